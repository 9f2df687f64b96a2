"""The native module on a machine without a GPU: it loads, answers, and refuses by name."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_dispatcher import EpConfig, MoeShape, UnavailableError, device, device_limits, native
from ep_dispatcher.device_session import check_table_fits
from ep_dispatcher.memory import partial_bytes
from ep_dispatcher.plan import Placement

TOO_OLD = 22809

built = pytest.mark.skipif(
    not Path(native.__file__).with_name("_C" + sysconfig.get_config_var("EXT_SUFFIX")).exists(),
    reason="the native module is not built here (it needs nvcc and the NCCL wheel)",
)
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to make a stand-in with")


@pytest.fixture
def old_nccl(tmp_path: Path) -> Path:
    """A library that says it is NCCL 2.28.9, as an older torch brings it."""
    source = tmp_path / "old.c"
    source.write_text(f"int ncclGetVersion(int* version) {{ *version = {TOO_OLD}; return 0; }}\n")
    made = tmp_path / "lib" / "libnccl.so.2"
    made.parent.mkdir()
    flags = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"]
    subprocess.run(["gcc", *flags, "-o", str(made), str(source)], check=True)
    return made


def hide_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the native module look as if it had never been built."""
    monkeypatch.setitem(sys.modules, "ep_dispatcher._C", None)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_native_module_is_built_where_nvcc_is() -> None:
    assert native.load().build_versions().nccl >= 23007


@built
def test_versions_it_was_built_with_are_told() -> None:
    found = native.capabilities()
    assert found.nccl_compiled is not None
    assert tuple(map(int, found.nccl_compiled.split("."))) >= (2, 30, 7)
    assert found.cuda_compiled is not None
    assert float(found.cuda_compiled) >= 12.0


@built
@pytest.mark.parametrize(
    ("code", "text"), [(23007, "2.30.7"), (22809, "2.28.9"), (23203, "2.32.3")]
)
def test_nccl_version_reads_like_its_wheel(code: int, text: str) -> None:
    assert native.load().nccl_version_text(code) == text


@built
def test_gpus_are_those_that_torch_sees() -> None:
    found = native.capabilities()
    assert len(found.gpus) == torch.cuda.device_count()
    for index, gpu in enumerate(found.gpus):
        major, minor = torch.cuda.get_device_capability(index)
        assert gpu.compute_capability == 10 * major + minor


@built
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_gpu_says_so() -> None:
    assert "no GPU is visible" in str(native.missing_reason())


def test_a_missing_module_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_native(monkeypatch)
    assert "no native module" in str(native.missing_reason())
    with pytest.raises(UnavailableError, match=r"nvidia-nccl-cu13>=2\.30\.7"):
        native.load()


def test_capabilities_without_the_module_are_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_native(monkeypatch)
    plain = native.capabilities().to_dict()
    assert plain["nccl_compiled"] is None
    assert plain["gpus"] == ()


@built
@needs_gcc
def test_old_nccl_is_refused_with_the_way_out(old_nccl: Path) -> None:
    message = r"NCCL 2\.28\.9 \(.*\) is older than 2\.30\.7.*pip install"
    with pytest.raises(UnavailableError, match=message):
        native.load().NcclLibrary(str(old_nccl))


@built
def test_a_file_that_is_no_library_is_refused() -> None:
    with pytest.raises(UnavailableError, match="could not be opened"):
        native.load().NcclLibrary("no/such/libnccl.so.2")


@built
@needs_gcc
@pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="this torch links NCCL itself, and the stand-in for an old one lacks most of it",
)
def test_old_nccl_in_the_process_does_not_hide_a_newer_wheel(old_nccl: Path) -> None:
    """Torch loads its own NCCL first; ours opens beside it, or is refused naming the old one."""
    program = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)\n"
        "from ep_dispatcher import native\n"
        f"assert native.load().loaded_nccl_version() == {TOO_OLD}\n"
        "found = native.capabilities()\n"
        "refusal = '' if found.nccl_loaded else native._try_nccl()[1]\n"
        "print(found.nccl_loaded or ('refused' if '2.28.9' in refusal else refusal))\n"
    )
    command = [sys.executable, "-c", program, str(old_nccl)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    wheel = [path for path in native._nccl_files() if "/" in path]
    assert (answer != "refused") if wheel else (answer == "refused")
    assert answer == "refused" or tuple(map(int, answer.split("."))) >= (2, 30, 7)


def test_more_slots_than_the_kernels_carry_are_refused_with_a_way_out() -> None:
    """Before anything else is asked, so on every machine."""
    shape = MoeShape(hidden=64, num_topk=65, num_experts=128)
    reason = device.unavailable_reason(EpConfig(shape=shape, max_tokens_per_rank=8))
    assert reason is not None
    assert "num_topk is 65" in reason
    assert "at most 64" in reason
    assert "reference tier" in reason


def test_a_capacity_past_32_bits_is_refused() -> None:
    shape = MoeShape(hidden=64, num_topk=2, num_experts=8)
    config = EpConfig(shape=shape, max_tokens_per_rank=8, recv_capacity_rows=1 << 31)
    assert "recv_capacity_rows is 2147483648" in str(device.unavailable_reason(config))


@built
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_topk": 64, "num_experts": 2048, "max_tokens": 32767}, None),
        (
            {"num_topk": 64, "num_experts": 2048, "max_tokens": 32768},
            "max_tokens_per_rank is 32768",
        ),
        ({"num_topk": 3, "num_experts": 2048, "max_tokens": 699050}, None),
        (
            {"num_topk": 3, "num_experts": 2048, "max_tokens": 699051},
            "max_tokens_per_rank is 69905",
        ),
        ({"num_topk": 64, "num_experts": 65, "max_tokens": 524287}, None),
        (
            {"num_topk": 64, "num_experts": 65, "max_tokens": 524288},
            "max_tokens_per_rank is 524288",
        ),
        ({"hidden": 1 << 28}, None),
        ({"hidden": (1 << 28) + 8, "precision": "exact"}, "hidden is 268435464"),
    ],
)
def test_what_the_c_interface_has_no_room_for_is_refused_in_the_users_names(
    changes: dict[str, Any], says: str | None
) -> None:
    """At the same numbers: the largest that the layout takes is taken, the next is refused."""
    sizes = {"num_topk": 2, "num_experts": 8, "hidden": 64, "max_tokens": 8} | changes
    shape = MoeShape(**{name: sizes[name] for name in ("num_topk", "num_experts", "hidden")})
    config = EpConfig(
        shape=shape,
        max_tokens_per_rank=sizes["max_tokens"],
        precision=sizes.get("precision", "rounded"),
    )
    reason = device_limits.config_reason(config)
    assert reason is None if says is None else says in str(reason)
    module = native.load()
    layout = module.WindowShape(
        ep_size=4, num_experts=shape.num_experts, num_topk=shape.num_topk, num_channels=1,
        ring_depth=16, max_tokens=config.max_tokens_per_rank, partial_bytes=partial_bytes(config),
    )  # fmt: skip
    if says is None:
        module.WindowLayout(layout)
    else:
        with pytest.raises(ValueError, match=r"max_tokens x num_topk|partial_bytes"):
            module.WindowLayout(layout)


def checkout(folder: Path) -> tuple[Path, Path]:
    """A source checkout with a module that was just built; the package and the module."""
    package = folder / "ep_dispatcher"
    module = package / ("_C" + sysconfig.get_config_var("EXT_SUFFIX"))
    sources = ("setup.py", "csrc/core/args.h", "csrc/kernels/route.cu", "csrc/testing/kernels.cpp")
    for file in (*(folder / name for name in sources), module):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (1000, 1000))
    return package, module


@pytest.mark.parametrize("changed", ["csrc/core/args.h", "csrc/kernels/route.cu", "setup.py"])
def test_a_module_older_than_a_source_is_told_of_until_it_is_built_again(
    changed: str, tmp_path: Path
) -> None:
    package, module = checkout(tmp_path)
    assert native.stale_reason(package) is None
    os.utime(tmp_path / changed, (2000, 2000))
    assert f"{module.name} is older than {changed}: rebuild" in str(native.stale_reason(package))
    os.utime(module, (3000, 3000))
    assert native.stale_reason(package) is None


def test_only_what_the_module_is_made_of_counts(tmp_path: Path) -> None:
    """Neither other modules' sources; nor anything without a module, or once installed."""
    package, module = checkout(tmp_path)
    os.utime(tmp_path / "csrc/testing/kernels.cpp", (2000, 2000))
    assert native.stale_reason(package) is None
    os.utime(tmp_path / "setup.py", (2000, 2000))
    assert native.stale_reason(package) is not None
    shutil.rmtree(tmp_path / "csrc")
    assert native.stale_reason(package) is None
    package, module = checkout(tmp_path)
    os.utime(tmp_path / "setup.py", (2000, 2000))
    module.unlink()
    assert native.stale_reason(package) is None


def test_the_folders_of_the_module_are_those_that_are_compiled() -> None:
    setup = Path(native.__file__).resolve().parents[1] / "setup.py"
    if not setup.is_file():
        pytest.skip("setup.py is not beside the package")
    (folders,) = re.findall(r"^FOLDERS = (\(.*\))$", setup.read_text(), re.MULTILINE)
    assert sorted(ast.literal_eval(folders)) == sorted(native._SOURCE_FOLDERS)


def test_a_rank_with_more_experts_than_route_has_room_for_is_named() -> None:
    """Equal blocks fit in any case."""
    check_table_fits(Placement.even(2048, 72), 72, 16384)
    crowded = Placement((0,) * 5 + (1,) * 6 + (2, 3), 4)
    check_table_fits(crowded, 4, 24)
    with pytest.raises(UnavailableError, match=r"rank 1 6 experts; .* room for 5 on each"):
        check_table_fits(crowded, 4, 23)


def test_memory_of_a_plan_is_kept_for_the_stream_of_each_launch() -> None:
    """Torch would else give it away while another stream than the planning one still reads it."""

    class Memory:
        def __init__(self) -> None:
            self.used_on: list[object] = []

        def record_stream(self, stream: object) -> None:
            self.used_on.append(stream)

    memory = (Memory(), Memory())
    routes = device.Routes("pointers", memory)  # type: ignore[arg-type]
    stream: Any = "communication"
    assert routes.used_on(stream) == "pointers"
    assert [part.used_on for part in memory] == [["communication"], ["communication"]]
