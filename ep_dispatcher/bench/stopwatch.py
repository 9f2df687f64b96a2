"""Times the phases of a call: CUDA events on a GPU, the monotonic clock on a CPU."""

from __future__ import annotations

import time
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor

MEET = "meet"  # in place of a phase, see `Stopwatch.lap`
_FLUSH_TIMES_L2 = 2
_HEAD_START_CYCLES = 4_000_000  # about 2 ms: longer than the host takes to queue any call


class Stopwatch:
    """Laps of one call at a time.

    `begin` empties the caches and lines the ranks up; `lap(phase)` then ends a phase. The times of
    a phase that has several laps in a round add up. On a GPU nothing is waited for until `read`,
    so the host runs ahead as it does in training.

    Args:
        group: of all ranks, for tensors on `device`.
        device: of the work.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Make what flushes the L2 cache."""
        self._group, self._device = group, device
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, torch.cuda.Event | int]] = []
        self._meeting = torch.zeros(1, device=device)
        self._flushed: Tensor | None = None
        self._host_start_ns = 0
        self._host_ns: dict[str, int] = defaultdict(int)
        self._last_host_ns = 0
        if self._cuda:
            l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            size = _FLUSH_TIMES_L2 * l2_bytes // 4
            self._flushed = torch.zeros(size, dtype=torch.int32, device=device)

    def begin(self, head_start_cycles: int = _HEAD_START_CYCLES) -> None:
        """Flush, meet the other ranks, and start.

        Args:
            head_start_cycles: for which a GPU waits before it meets the others.
        """
        if self._flushed is not None:
            # A rank that is done would sweep the SMs that others on its GPU still need.
            dist.all_reduce(self._meeting, group=self._group)
            # Ends in reads of more than L2 holds, as what a sweep leaves written is written back
            # later. The sum of int32 is one of a copy in int64, twice as large.
            self._flushed.sum()
            # The host queues the call meanwhile, so its launch time is not in the laps.
            torch.cuda._sleep(head_start_cycles)
        # On a GPU this meets on the device: the stream goes on when the last rank's has come.
        dist.all_reduce(self._meeting, group=self._group)
        self._mark("")

    def lap(self, phase: str) -> None:
        """End a phase; what follows until the next lap belongs to the next one.

        `MEET` ends nothing: the ranks meet as in `begin`. It stands between work of each rank alone
        and communication, which would else be charged with the wait for the slowest rank.
        """
        if phase == MEET:
            self.begin()
        else:
            self._mark(phase)

    def read(self) -> dict[str, float]:
        """Microseconds of each phase since the last `read`; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        times: dict[str, float] = defaultdict(float)
        for (_, start), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            if phase:
                times[phase] += _between_us(start, end)
        self._marks = []
        return dict(times)

    def read_host(self) -> dict[str, float]:
        """Microseconds that the host spent in each phase since the last `read_host`."""
        spent = {phase: ns / 1000 for phase, ns in self._host_ns.items()}
        self._host_ns = defaultdict(int)
        return spent

    def _mark(self, phase: str) -> None:
        now_ns = time.perf_counter_ns()
        if phase:
            self._host_ns[phase] += now_ns - self._last_host_ns
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, now_ns))
        self._last_host_ns = time.perf_counter_ns()


def _between_us(start: torch.cuda.Event | int, end: torch.cuda.Event | int) -> float:
    """Microseconds between two marks of one kind."""
    if isinstance(start, int) and isinstance(end, int):
        return (end - start) / 1000
    assert not isinstance(start, int)
    assert not isinstance(end, int)
    return float(start.elapsed_time(end)) * 1000
