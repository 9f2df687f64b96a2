"""The doctor's findings on machines that are not this one."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from ep_dispatcher import device, doctor, native


def capabilities(**changes: object) -> native.Capabilities:
    """A machine on which the device tier can run, with changes."""
    values: dict[str, object] = {
        "nccl_compiled": "2.30.7",
        "cuda_compiled": "13.0",
        "nccl_loaded": "2.32.3",
        "nccl_path": "libnccl.so.2",
        "driver_cuda": "13.0",
        "gpus": (native.Gpu("H200", 90, 132, 150 << 30),),
        "missing": None,
    }
    return native.Capabilities(**(values | changes))  # type: ignore[arg-type]


def use_gpus(monkeypatch: pytest.MonkeyPatch, count: int, capability: tuple[int, int]) -> None:
    """Let torch report `count` equal GPUs."""
    facts = types.SimpleNamespace(
        name="GPU X",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        total_memory=140 << 30,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: facts.name)


def findings_of(diagnosis: doctor.Diagnosis) -> dict[str, doctor.Finding]:
    """Findings by name."""
    return {finding.name: finding for finding in diagnosis.findings}


@pytest.mark.parametrize(
    ("version", "state"),
    [("0.16.1", "ok"), ("0.19.2", "ok"), ("0.15.0", "problem"), ("0.20.0", "problem")],
)
def test_megatron_outside_the_tested_range_is_a_problem(version: str, state: str) -> None:
    """The range is named either way."""
    finding = doctor.megatron_finding(version)
    assert finding.state == state
    assert "0.16.1 to 0.19" in finding.value
    assert bool(finding.next_step) == (state == "problem")


def test_a_bare_machine_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Megatron, Transformer Engine and native module: absent, each with a next step."""
    monkeypatch.setattr(doctor, "package_version", lambda package: None)
    refusal = "this installation has no native module; build it"
    bare = capabilities(nccl_compiled=None, nccl_loaded=None, gpus=(), missing=refusal)
    monkeypatch.setattr(native, "capabilities", lambda: bare)
    found = findings_of(doctor.diagnose())
    assert found["megatron-core"].state == "absent"
    assert "pip install 'ep_dispatcher[megatron]'" in found["megatron-core"].next_step
    assert found["native module"].value == "this installation has no native module"
    assert found["native module"].next_step == "build it"
    assert found["transformer-engine"].state == "absent"


def test_a_module_older_than_its_sources_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "capabilities", capabilities)
    for stale, state in ((None, "ok"), ("the module is older than a.cu: rebuild it", "problem")):
        monkeypatch.setattr(native, "stale_reason", lambda stale=stale: stale)
        found = findings_of(doctor.diagnose())["native module"]
        assert found.state == state
        assert found.next_step == ("rebuild it" if stale else "")
    assert found.value.endswith("; the module is older than a.cu")


@pytest.mark.parametrize(("capability", "state"), [((9, 0), "ok"), ((8, 0), "problem")])
def test_gpus_older_than_the_kernels_are_a_problem(
    capability: tuple[int, int], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name, count and capability are shown; below 9.0 the kernels do not run."""
    use_gpus(monkeypatch, 2, capability)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    found = findings_of(doctor.diagnose())["gpu"]
    assert found.state == state
    assert found.value.startswith(f"2 x GPU X (capability {capability[0]}.{capability[1]}, 132 SMs")


def test_gpus_that_do_not_reach_each_other_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 pairs of 3 GPUs, those with GPU 2 are cut off."""
    use_gpus(monkeypatch, 3, (9, 0))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: 2 not in (a, b))
    found = findings_of(doctor.diagnose())["lsa (NVLink)"]
    assert found.value.startswith("2 of 6 pairs")
    assert found.state == "problem"


def test_old_nccl_is_a_problem_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel that brings a newer one is named; without a GPU it is merely absent."""
    for gpus, state in ((capabilities().gpus, "problem"), ((), "absent")):
        old = capabilities(nccl_loaded=None, gpus=gpus, missing="NCCL 2.29.7 is older than 2.30.7")
        monkeypatch.setattr(native, "capabilities", lambda old=old: old)
        found = findings_of(doctor.diagnose())["nccl for the device tier"]
        assert found.state == state
        assert "nvidia-nccl-cu13>=2.30.7" in found.next_step


def test_rdma_adapters_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By name, in order."""
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(doctor, "_RDMA_FOLDER", tmp_path)
    assert "mlx5_0, mlx5_1" in findings_of(doctor.diagnose())["gin (RDMA)"].value


@pytest.mark.parametrize("reason", [None, "no GPU is visible to torch"])
def test_the_tier_is_what_a_group_would_choose(
    reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device where nothing is lacking; else reference with that reason and a next step."""
    monkeypatch.setattr(device, "unavailable_reason", lambda config: reason)
    diagnosis = doctor.diagnose()
    assert diagnosis.tier == ("reference" if reason else "device")
    assert (diagnosis.reason == reason) == bool(reason)
    assert bool(diagnosis.next_step) == bool(reason)
