"""Recorded results: one JSON object a line, with all that is needed to run it again.

Written by the tools, never by hand; a run that failed is a line too. Fields that do not apply are
left out. The common fields (`run`, `when`, `commit`, `command`, `machine`, `versions`) are filled
in here, the others by the caller.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import secrets
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ep_dispatcher._version import __version__

UNKNOWN = "unknown"


@dataclass
class ResultLog:
    """Appends lines that share one run id to a JSON lines file.

    Attributes:
        path: file to append to; its folder is made.
        command: words of the command that was run, program first.
        run: id shared by the lines of one run.
        commit: of the source tree when the run began.
        load: runnable processes on this machine when the run began (one-minute average).
    """

    path: Path
    command: Sequence[str]
    run: str = field(default_factory=lambda: secrets.token_hex(4))
    commit: str = field(default_factory=lambda: current_commit())
    load: float = field(default_factory=lambda: round(os.getloadavg()[0], 2))

    def write(self, *, sharing: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        """Append one line: the common fields, then `fields` without those that are None.

        Args:
            sharing: how ranks share the machine: "cpu", "threads", "mps", "one per gpu".
            fields: named as in the glossary.

        Returns:
            The line.
        """
        line = {
            "run": self.run,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": self.commit,
            "command": shlex.join(self.command),
            "machine": describe_machine(sharing) | {"load_before": self.load},
            "versions": describe_versions(),
        }
        line |= {name: value for name, value in fields.items() if value is not None}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
        return line


def summarise_times(times_us: Sequence[float]) -> dict[str, float | int]:
    """Median, 95th percentile (nearest rank), minimum and number of rounds, in microseconds.

    Example: 1, 2, ..., 20 -> median 10.5, p95 19, min 1, rounds 20.
    """
    ordered = sorted(times_us)
    middle = len(ordered) // 2
    median = (ordered[middle] + ordered[~middle]) / 2
    p95 = ordered[-(-len(ordered) * 95 // 100) - 1]
    return {
        "median_us": round(median, 2),
        "p95_us": round(p95, 2),
        "min_us": round(ordered[0], 2),
        "rounds": len(ordered),
    }


def log_of_module(path: Path, module: str, words: Sequence[str]) -> ResultLog:
    """The log of `python -m MODULE WORDS`.

    Args:
        path: file to append to; recorded in the command by its name alone.
        module: dotted name.
        words: its arguments.
    """
    short = [path.name if word == str(path) else word for word in words]
    return ResultLog(path, ["python", "-m", module, *short])


def current_commit() -> str:
    """Git commit of this source tree, with "+changes" where tracked files differ from it."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return UNKNOWN
    return commit + ("+changes" if _git("status", "--porcelain", "-uno") else "")


def describe_machine(sharing: str) -> dict[str, Any]:
    """GPUs and CPU of this machine and how the ranks share them."""
    machine: dict[str, Any] = {"sharing": sharing, "cpu": _cpu_name(), "cpu_cores": os.cpu_count()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name(0)
        machine["gpu_count"] = torch.cuda.device_count()
        machine["driver"] = _driver_version()
    return machine


def describe_versions() -> dict[str, str]:
    """Versions of what a result depends on; a package that is not installed is left out."""
    versions = {
        "ep_dispatcher": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for name, package in (
        ("megatron_core", "megatron-core"),
        ("transformer_engine", "transformer-engine"),
    ):
        found = package_version(package)
        if found is not None:
            versions[name] = found
    if torch.cuda.is_available():
        versions["nccl"] = loaded_nccl_version()
    return versions


def loaded_nccl_version() -> str:
    """Version of the NCCL in this process, which another one preloaded may have taken over."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return torch_nccl_version()
    if failed:
        return torch_nccl_version()
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def torch_nccl_version() -> str:
    """Version of the NCCL that torch uses; call it only where torch has one."""
    return ".".join(map(str, torch.cuda.nccl.version()))


def package_version(package: str) -> str | None:
    """Version of an installed package, without importing it; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str | None:
    """Output of a git command in this source tree, or None where there is no git or tree."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *words],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    """Model name of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def _driver_version() -> str:
    """Version of NVIDIA's kernel driver."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    except OSError:
        return UNKNOWN
