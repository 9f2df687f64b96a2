"""What a backend costs beside time: memory, launches, host synchronisations, clocks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

_PAGE = 4096
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def memory_in_use(device: torch.device) -> int:
    """Bytes in use: of the whole GPU (libraries allocate behind torch's back) or this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE


class PeakMemory:
    """Largest memory of torch's allocator on a GPU since it was made, beyond what it held then.

    On a CPU nothing counts it: the heap keeps what rounds before have freed, so a process that
    grows no more says nothing about what a round takes.
    """

    def __init__(self, device: torch.device) -> None:
        """Forget the peak so far."""
        self._device = device
        if device.type == "cuda":
            self._start = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> int | None:
        """Bytes; None on a CPU."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) - self._start


def count_calls(work: Callable[[], object]) -> dict[str, int]:
    """Launches and host waits of one call on a GPU, as CUPTI records them.

    Returns:
        "launches" (kernels, copies and fills that were enqueued) and "host_syncs" (calls of the
        CUDA runtime that waited, the one that ends the measurement left out). A host that polls
        memory which the device writes is not seen.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
    counts = {"launches": 0, "host_syncs": 0}
    for event in profiler.events():
        name = event.name
        if name.startswith(("cudaLaunch", "cuLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")):
            counts["launches"] += 1
        elif name in _WAITS:
            counts["host_syncs"] += 1
    counts["host_syncs"] = max(counts["host_syncs"] - 1, 0)  # the profiler waits once at its end
    return counts


def read_clocks(device: torch.device) -> dict[str, float] | None:
    """Clocks in MHz right now; None where nothing tells them."""
    if device.type != "cuda":
        return _cpu_clock()
    command = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        first = done.stdout.splitlines()[device.index or 0]
        sm_mhz, memory_mhz = (float(word) for word in first.split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return {"sm_mhz": sm_mhz, "memory_mhz": memory_mhz}


def _cpu_clock() -> dict[str, float] | None:
    """Mean clock of the cores."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    found = [float(line.split(":")[1]) for line in text.splitlines() if line.startswith("cpu MHz")]
    return {"cpu_mhz": round(sum(found) / len(found), 1)} if found else None
