"""What this machine can run, and which tier a group would choose here and why.

Looks only; allocates nothing on a GPU and imports neither Megatron nor Transformer Engine.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ep_dispatcher import device, native
from ep_dispatcher._version import __version__
from ep_dispatcher.bench.results import package_version, torch_nccl_version
from ep_dispatcher.config import EpConfig, MoeShape
from ep_dispatcher.megatron import compat  # imports nothing of megatron

State = Literal["ok", "absent", "problem"]

OLDEST_PYTHON = (3, 11)
_RDMA_FOLDER = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Finding:
    """One fact about the machine.

    Attributes:
        name: what was looked at.
        value: what was found.
        state: "ok"; "absent", where something works without it; "problem", where it is in the way.
        next_step: what to do about it; empty where there is nothing to do.
    """

    name: str
    value: str
    state: State = "ok"
    next_step: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and the choice that follows from them.

    Attributes:
        findings: one for each thing looked at.
        tier: what `tier: auto` gives on a group of machines like this one.
        reason: why.
        next_step: how to get the device tier; empty where it is chosen.
    """

    findings: tuple[Finding, ...]
    tier: str
    reason: str
    next_step: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def diagnose() -> Diagnosis:
    """Look at this machine; never raises for what it lacks."""
    capabilities = native.capabilities()
    findings = (
        _python(),
        Finding("ep_dispatcher", __version__),
        Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"),
        _gpus(),
        _nvcc(),
        _native_module(capabilities),
        _nccl_of_torch(),
        _nccl_for_device_tier(capabilities),
        _lsa(),
        _gin(),
        megatron_finding(package_version("megatron-core")),
        _transformer_engine(),
    )
    reason = device.unavailable_reason(_typical_config())
    if reason is None:
        return Diagnosis(findings, "device", "this machine has all that the kernels need", "")
    return Diagnosis(findings, "reference", reason, _first_step(findings))


def megatron_finding(version: str | None) -> Finding:
    """Place a Megatron-Core version in the tested range, or say how to get one.

    Example: "0.16.1" -> ok; "0.15.0" -> a problem, with the range as the next step.
    """
    tested = f"tested: {compat.TESTED_RANGE}"
    install = "pip install 'ep_dispatcher[megatron]'"
    if version is None:
        value = f"not installed ({tested})"
        return Finding("megatron-core", value, "absent", f"to train: {install}")
    if compat.is_tested(version):
        return Finding("megatron-core", f"{version} ({tested})")
    step = f"it may work; for a tested version: {install}"
    return Finding("megatron-core", f"{version} ({tested})", "problem", step)


def _typical_config() -> EpConfig:
    """A usual config, for the question which tier it would get."""
    shape = MoeShape(hidden=1024, num_topk=8, num_experts=256, dtype="bfloat16")
    return EpConfig(shape=shape, max_tokens_per_rank=4096)


def _first_step(findings: Iterable[Finding]) -> str:
    """The first thing to do towards the device tier: GPU first, then the build, then NCCL."""
    by_name = {finding.name: finding for finding in findings}
    for name in ("gpu", "native module", "nccl for the device tier"):
        if by_name[name].next_step:
            return by_name[name].next_step
    return "the reference tier runs everything, slower; nothing is missing on your side"


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Finding("python", version, "problem", "use Python 3.11 or later")
    return Finding("python", version)


def _gpus() -> Finding:
    if not torch.cuda.is_available():
        step = "run where a CUDA GPU is visible to torch (nvidia-smi lists it)"
        if torch.version.cuda is None:
            step = "this torch has no CUDA; install a CUDA build of torch on a machine with a GPU"
        return Finding("gpu", "none visible to torch", "absent", step)
    names = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        gib = facts.total_memory / 2**30
        names.append(
            f"{facts.name} (capability {facts.major}.{facts.minor}, "
            f"{facts.multi_processor_count} SMs, {gib:.0f} GiB)"
        )
    value = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    best = max(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    if best[0] * 10 + best[1] < native.OLDEST_COMPUTE_CAPABILITY:
        return Finding("gpu", value, "problem", "the kernels need capability 9.0 (Hopper) or later")
    return Finding("gpu", value)


def _nvcc() -> Finding:
    home = os.environ.get("CUDA_HOME")
    path = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if path is None:
        return Finding(
            "nvcc",
            "not found in CUDA_HOME or on PATH",
            "absent",
            "needed only to build the native module: install the CUDA toolkit",
        )
    try:
        text = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("nvcc", f"{path} does not run ({error})", "problem", "repair CUDA toolkit")
    release = re.search(r"release ([\d.]+)", text)
    return Finding("nvcc", f"{release.group(1) if release else 'unknown version'} at {path}")


def _native_module(capabilities: native.Capabilities) -> Finding:
    if capabilities.nccl_compiled is None:
        found = str(capabilities.missing)
        fact, _, step = found.partition("; ")
        return Finding("native module", fact, "absent", step or found)
    built = f"built with CUDA {capabilities.cuda_compiled}, NCCL {capabilities.nccl_compiled}"
    driver = capabilities.driver_cuda
    value = f"{built}; driver: {f'CUDA {driver}' if driver else 'none'}"
    stale = native.stale_reason()
    if stale is not None:
        fact, _, step = stale.partition(": ")
        return Finding("native module", f"{value}; {fact}", "problem", step)
    return Finding("native module", value)


def _nccl_of_torch() -> Finding:
    if not torch.distributed.is_nccl_available():
        return Finding("nccl of torch", "not built in; the reference tier uses gloo", "absent")
    version = torch_nccl_version()
    return Finding("nccl of torch", f"{version} (used by the reference tier on GPUs)")


def _nccl_for_device_tier(capabilities: native.Capabilities) -> Finding:
    name = "nccl for the device tier"
    if capabilities.nccl_loaded is not None:
        return Finding(name, f"{capabilities.nccl_loaded} at {capabilities.nccl_path}")
    installed = _nccl_packages()
    if capabilities.nccl_compiled is None:
        return Finding(name, f"{installed}; not asked, as there is no native module", "absent")
    return Finding(
        name,
        f"none that is 2.30.7 or later ({installed})",
        "problem" if capabilities.gpus else "absent",
        "pip install --no-deps 'nvidia-nccl-cu13>=2.30.7' (cu12 for CUDA 12)",
    )


def _nccl_packages() -> str:
    """Installed NCCL wheels in words."""
    found = [
        f"{package} {version}"
        for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
        if (version := package_version(package)) is not None
    ]
    return ", ".join(found) or "no NCCL wheel installed"


def _lsa() -> Finding:
    """Loads and stores between GPUs: whether every pair here can reach each other's memory."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return Finding("lsa (NVLink)", "not probed: no GPU", "absent")
    if count == 1:
        return Finding("lsa (NVLink)", "one GPU: ranks that share it reach each other")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    reached = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    value = f"{reached} of {len(pairs)} pairs of GPUs reach each other's memory"
    if reached == len(pairs):
        return Finding("lsa (NVLink)", value)
    return Finding("lsa (NVLink)", value, "problem", "see `nvidia-smi topo -p2p r`")


def _gin() -> Finding:
    """Puts from a GPU over RDMA: whether there are adapters; NCCL decides when a group is made."""
    try:
        adapters = sorted(path.name for path in _RDMA_FOLDER.iterdir())
    except OSError:
        adapters = []
    if not adapters:
        return Finding("gin (RDMA)", "no RDMA adapter; needed only across NVLink domains", "absent")
    return Finding("gin (RDMA)", f"adapters {', '.join(adapters)}; NCCL decides at group creation")


def _transformer_engine() -> Finding:
    version = package_version("transformer-engine")
    if version is None:
        return Finding("transformer-engine", "not installed; not needed", "absent")
    return Finding("transformer-engine", version)
