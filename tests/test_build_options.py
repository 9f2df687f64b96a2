"""What setup.py compiles: kinds of GIN (EP_GIN_PROXY_ONLY), GPUs (EP_CUDA_ARCHS), what again."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nccl_headers import NCCL, missing_for_nccl

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").is_file(), reason="setup.py is not beside the tests"
)


def names_of_setup(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """All that setup.py defines; it builds nothing."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["setup.py", "--name"])
    return runpy.run_path("setup.py")


def asked_of(monkeypatch: pytest.MonkeyPatch, name: str, variable: str, value: str) -> list[str]:
    """What a function of setup.py says where a variable has a value."""
    monkeypatch.setenv(variable, value)
    found: list[str] = names_of_setup(monkeypatch)[name]()
    return found


def flags_of(monkeypatch: pytest.MonkeyPatch, value: str) -> list[str]:
    """What setup.py gives to nvcc."""
    return asked_of(monkeypatch, "gin_flags", "EP_GIN_PROXY_ONLY", value)


@pytest.mark.parametrize(
    ("value", "numbers"),
    [("", ["90", "100"]), ("90", ["90"]), ("100", ["100"]), ("100, 90", ["90", "100"])],
)
def test_a_build_is_for_the_gpus_that_are_named(
    monkeypatch: pytest.MonkeyPatch, value: str, numbers: list[str]
) -> None:
    assert asked_of(monkeypatch, "architectures", "EP_CUDA_ARCHS", value) == numbers


def test_a_gpu_that_no_build_is_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="EP_CUDA_ARCHS has 80; it takes 90 and 100"):
        asked_of(monkeypatch, "architectures", "EP_CUDA_ARCHS", "90 80")


@pytest.mark.parametrize(("value", "flags"), [("", []), ("0", []), ("1", ["--Ofast-compile=max"])])
def test_a_build_is_optimized_unless_asked(
    monkeypatch: pytest.MonkeyPatch, value: str, flags: list[str]
) -> None:
    assert asked_of(monkeypatch, "fast_flags", "EP_FAST_COMPILE", value) == flags


@pytest.mark.parametrize("value", ["", "0"])
def test_a_build_has_all_kinds_unless_asked(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    assert flags_of(monkeypatch, value) == []


def reaches_nccl(source: Path, seen: set[Path]) -> bool:
    """Whether a file of csrc includes a header of NCCL, or one of ours that does."""
    seen.add(source)
    text = source.read_text(encoding="utf-8")
    if re.search(r"^ *# *include <nccl", text, re.MULTILINE):
        return True
    ours = (
        ROOT / "csrc" / name for name in re.findall(r'^ *# *include "(.+)"', text, re.MULTILINE)
    )
    return any(reaches_nccl(header, seen) for header in ours if header not in seen)


def test_objects_that_serve_all_versions_of_nccl_include_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And only what includes it is compiled for each version."""
    names = names_of_setup(monkeypatch)
    sources = names["sources"]
    with_nccl = {source for source in sources if reaches_nccl(ROOT / source, set())}
    assert with_nccl == {each for each in sources if not each.startswith(names["NEED_NO_NCCL"])}


@pytest.mark.parametrize("changed", ["setup.py", "csrc/core/args.h", "csrc/kernels/route.cu"])
def test_an_object_is_compiled_again_where_a_file_is_newer(
    changed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build = names_of_setup(monkeypatch)["BuildNative"]
    source = "csrc/kernels/route.cu"
    for name in ("setup.py", "csrc/core/args.h", source):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    compiler = [sys.executable, "-c", "import sys; open(sys.argv[3], 'a').write('x')"]
    command = SimpleNamespace(mkpath=lambda folder: Path(folder).mkdir(parents=True, exist_ok=True))
    objects = tmp_path / "objects"
    made = Path(build.compile_one(command, compiler, objects, source))
    build.compile_one(command, compiler, objects, source)
    assert made.read_text() == "x"  # once
    for folder in tmp_path.rglob("*"):
        os.utime(folder, (1000, 1000))
    os.utime(changed, (2000, 2000))
    build.compile_one(command, compiler, objects, source)
    assert made.read_text() == "xx"
    assert build.compile_one(command, compiler, objects / "nccl-2.30.7", source) != str(made)


@pytest.mark.slow
@pytest.mark.skipif(missing_for_nccl() != "", reason=missing_for_nccl() or "nothing is missing")
@pytest.mark.parametrize(("value", "has_gdaki"), [("0", True), ("1", False)])
def test_gin_kernels_compile_with_the_proxy_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, has_gdaki: bool
) -> None:
    """Told by the names of functions, as the headers' own are in what the GPU gets."""
    made = tmp_path / "probe.cubin"
    command = ["nvcc", "-std=c++17", "-O1", "-cubin", f"-I{ROOT / 'csrc'}", f"-isystem={NCCL}"]
    command += ["-arch=sm_90", *flags_of(monkeypatch, value)]
    command += ["-lineinfo", "-o", str(made), str(ROOT / "csrc/transport/gin_probe.cu")]
    subprocess.run(command, check=True, timeout=300)
    content = made.read_bytes()
    assert b"nccl3gin5proxy" in content
    assert (b"nccl3gin5gdaki" in content) == has_gdaki
