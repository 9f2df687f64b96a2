"""What setup.py compiles: kinds of GIN (EP_GIN_PROXY_ONLY) and GPUs (EP_CUDA_ARCHS)."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest
from nccl_headers import NCCL, missing_for_nccl

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").is_file(), reason="setup.py is not beside the tests"
)


def asked_of(monkeypatch: pytest.MonkeyPatch, name: str, variable: str, value: str) -> list[str]:
    """What a function of setup.py says where a variable has a value."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["setup.py", "--name"])
    monkeypatch.setenv(variable, value)
    found: list[str] = runpy.run_path("setup.py")[name]()
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


@pytest.mark.parametrize("value", ["", "0"])
def test_a_build_has_all_kinds_unless_asked(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    assert flags_of(monkeypatch, value) == []


@pytest.mark.slow
@pytest.mark.skipif(missing_for_nccl() != "", reason=missing_for_nccl() or "nothing is missing")
@pytest.mark.parametrize(("value", "has_gdaki"), [("0", True), ("1", False)])
def test_gin_kernels_compile_with_the_proxy_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, has_gdaki: bool
) -> None:
    """Told by the names of functions, as the headers' own are in the object."""
    made = tmp_path / "probe.o"
    command = ["nvcc", "-std=c++17", "-O1", "-c", f"-I{ROOT / 'csrc'}", f"-isystem={NCCL}"]
    command += ["-gencode=arch=compute_90,code=sm_90", *flags_of(monkeypatch, value)]
    command += ["-lineinfo", "-o", str(made), str(ROOT / "csrc/transport/gin_probe.cu")]
    subprocess.run(command, check=True, timeout=300)
    content = made.read_bytes()
    assert b"nccl3gin5proxy" in content
    assert (b"nccl3gin5gdaki" in content) == has_gdaki
