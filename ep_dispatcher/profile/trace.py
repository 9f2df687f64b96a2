"""Reads a Chrome trace of torch.profiler: which phase of a layer each kernel belongs to.

A kernel belongs to the innermost range `ep:...` that was open on the host where it was launched.
The backward of the experts, and of the shared ones, has no range of its own: there, the autograd
operation that launched the kernel carries the sequence number of its forward, which had one.
Without kernels (on the CPU) the operations of the host are looked at instead.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ep_dispatcher.profile.clock import merge, overlap_of
from ep_dispatcher.ranges import EXPERTS, LAYER, PLAN, PREFIX, SHARED_EXPERTS

EXPERTS_BACKWARD = EXPERTS + "_backward"
_BACKWARDS = {EXPERTS: EXPERTS_BACKWARD, SHARED_EXPERTS: SHARED_EXPERTS + "_backward"}
_ROUTED = (EXPERTS, EXPERTS_BACKWARD)
_COMPUTE = (*_BACKWARDS, *_BACKWARDS.values())
_SYNCHRONISING = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
)
_GEMM = ("gemm", "cutlass", "nvjet", "xmma", "wgmma")


@dataclass(frozen=True)
class Work:
    """A kernel, or an operation of the host.

    Attributes:
        name: of it.
        shape: what makes two of one name comparable.
        phase: range without its prefix; "" outside the layer.
        start_us, end_us: when it ran.
        communicates: whether it belongs to plan, dispatch or combine, or to NCCL.
    """

    name: str
    shape: str
    phase: str
    start_us: float
    end_us: float
    communicates: bool

    @property
    def us(self) -> float:
        """How long it ran."""
        return self.end_us - self.start_us

    @property
    def interval(self) -> tuple[float, float]:
        """When it ran."""
        return self.start_us, self.end_us


class _Ranges:
    """Ranges of one thread, which nest: finds the innermost one around a moment."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        self._events = sorted(events, key=lambda event: float(event["ts"]))
        self._starts = [float(event["ts"]) for event in self._events]
        self._ends = [_end(event) for event in self._events]
        self._latest_ends = list(accumulate(self._ends, max))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._events)

    def around(self, moment_us: float) -> dict[str, Any] | None:
        for index in range(bisect_right(self._starts, moment_us) - 1, -1, -1):
            if self._latest_ends[index] < moment_us:
                return None  # nor does any before it reach that far
            if self._ends[index] >= moment_us:
                return self._events[index]
        return None


class Trace:
    """One rank's trace.

    Args:
        events: `traceEvents` of the file.

    Attributes:
        work: what ran, in order of its start.
        num_layers: forwards of an MoE layer; plans, where a schedule runs a layer's parts itself.
        num_plans: plans made.
        num_syncs: CUDA calls that wait for the GPU, during a layer's forward or in a phase of its
            backward.
        on_gpu: whether there are kernels in it.
    """

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        """Sort the events by kind and give each piece of work its phase."""
        kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            if event.get("ph") == "X":
                kinds[str(event.get("cat"))].append(event)
        marks = [each for each in kinds["user_annotation"] if each["name"].startswith(PREFIX)]
        phases = [each for each in marks if each["name"] != LAYER]
        layers = [each for each in marks if each["name"] == LAYER]
        self.num_plans = sum(each["name"] == PLAN for each in marks)
        self.num_layers = len(layers) or self.num_plans
        self.on_gpu = bool(kinds["kernel"])
        self._phases = _by_thread(phases)
        self._layers = _by_thread(layers)
        self._operations = _by_thread(
            [each for each in kinds["cpu_op"] if "Sequence number" in each.get("args", {})]
        )
        self._forward_phase = self._phases_of_forwards(kinds["cpu_op"])
        calls = kinds["cuda_runtime"] + kinds["cuda_driver"]
        self.num_syncs = sum(
            1 for each in calls if each["name"] in _SYNCHRONISING and self._in_layer(each)
        )
        found = self._kernels(kinds["kernel"], calls) if self.on_gpu else self._host_work(phases)
        self.work = sorted(found, key=lambda each: each.start_us)

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read a file, compressed or not."""
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            return cls(json.load(file)["traceEvents"])

    def _in_layer(self, event: dict[str, Any]) -> bool:
        """Whether a call was made during a layer, by any thread, or in a phase of a backward."""
        moment_us = float(event["ts"])
        if any(ranges.around(moment_us) for ranges in self._layers.values()):
            return True
        phases = self._phases.get(event["tid"])
        return phases is not None and phases.around(moment_us) is not None

    def _phases_of_forwards(self, operations: Sequence[dict[str, Any]]) -> dict[int, str]:
        """Phase of each forward operation, by sequence number."""
        found: dict[int, str] = {}
        for each in operations:
            number = each.get("args", {}).get("Sequence number")
            backward = each.get("args", {}).get("Fwd thread id")
            if number is None or int(number) < 0 or backward:
                continue
            ranges = self._phases.get(each["tid"])
            mark = ranges.around(float(each["ts"])) if ranges is not None else None
            if mark is not None:
                found[int(number)] = str(mark["name"])
        return found

    def _phase_at(self, thread: Any, moment_us: float) -> str:  # noqa: ANN401
        """Phase that was open on a thread, or that the backward operation there belongs to."""
        ranges = self._phases.get(thread)
        mark = ranges.around(moment_us) if ranges is not None else None
        if mark is not None:
            return str(mark["name"])
        operations = self._operations.get(thread)
        operation = operations.around(moment_us) if operations is not None else None
        if operation is None or not operation["args"].get("Fwd thread id"):
            return ""
        forward = self._forward_phase.get(int(operation["args"]["Sequence number"]), "")
        return _BACKWARDS.get(forward, "")

    def _kernels(
        self, kernels: Sequence[dict[str, Any]], calls: Sequence[dict[str, Any]]
    ) -> list[Work]:
        """Kernels with the phase in which they were launched."""
        launches = {each["args"]["correlation"]: each for each in calls if _correlated(each)}
        found = []
        for each in kernels:
            launch = launches.get(each["args"].get("correlation"))
            phase = "" if launch is None else self._phase_at(launch["tid"], float(launch["ts"]))
            found.append(_work(each, phase, str(each["args"].get("grid", ""))))
        return found

    def _host_work(self, phases: Sequence[dict[str, Any]]) -> list[Work]:
        """Ranges of the host, and the backward operations of the experts."""
        found = [_work(each, str(each["name"]), "") for each in phases]
        for ranges in self._operations.values():
            for each in ranges:
                if each["args"].get("Fwd thread id"):
                    number = int(each["args"]["Sequence number"])
                    phase = _BACKWARDS.get(self._forward_phase.get(number, ""))
                    if phase is not None:
                        found.append(_work(each, phase, ""))
        return found


def summarise(trace: Trace) -> dict[str, Any]:
    """What a rank's trace says; times in microseconds over all profiled steps.

    Returns:
        `phases_us` (time of each phase, pieces that overlap counted once), `communication_us`,
        `exposed_us`, `hidden_fraction`, `gemm_slow_down`, `layers`, `plans_per_layer`,
        `host_syncs_per_layer`. What needs kernels is None without them, what is for each layer
        without a layer, and communication where none was recorded.
    """
    names = sorted({each.phase for each in trace.work if each.phase})
    communication = [each for each in trace.work if each.communicates]
    compute = merge([each.interval for each in trace.work if not each.communicates])
    total = sum(each.us for each in communication)
    hidden = sum(overlap_of(each.interval, compute) for each in communication)
    per_layer = 1 / trace.num_layers if trace.num_layers else None
    return {
        "phases_us": {
            name.removeprefix(PREFIX): round(_length([w for w in trace.work if w.phase == name]), 3)
            for name in names
        },
        "communication_us": round(total, 3) if communication else None,
        "exposed_us": round(total - hidden, 3) if trace.on_gpu and communication else None,
        "hidden_fraction": round(hidden / total, 4) if trace.on_gpu and total else None,
        "gemm_slow_down": gemm_slow_down(trace.work) if trace.on_gpu else None,
        "layers": trace.num_layers,
        "plans_per_layer": round(trace.num_plans * per_layer, 3) if per_layer else None,
        "host_syncs_per_layer": (
            round(trace.num_syncs * per_layer, 3) if trace.on_gpu and per_layer else None
        ),
    }


def gemm_slow_down(work: Sequence[Work]) -> float | None:
    """How much longer the experts' GEMMs take while communication runs; 1.0 is no slow-down.

    Kernels of one name and grid are compared with each other: those that communication overlaps
    for more than half of their time with those that it does not touch. None without such a pair.
    """
    cover = merge([each.interval for each in work if each.communicates])
    beside: dict[tuple[str, str], list[float]] = defaultdict(list)
    alone: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in work:
        if each.phase not in _ROUTED or not any(word in each.name.lower() for word in _GEMM):
            continue
        overlapped = overlap_of(each.interval, cover)
        if overlapped > 0.5 * each.us:
            beside[(each.name, each.shape)].append(each.us)
        elif overlapped == 0:
            alone[(each.name, each.shape)].append(each.us)
    pairs = [key for key in beside if key in alone]
    if not pairs:
        return None
    slow = sum(sum(beside[key]) for key in pairs)
    fast = sum(len(beside[key]) * sum(alone[key]) / len(alone[key]) for key in pairs)
    return round(slow / fast, 4)


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event.get("dur", 0))


def _by_thread(events: Sequence[dict[str, Any]]) -> dict[Any, _Ranges]:
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        threads[event["tid"]].append(event)
    return {thread: _Ranges(found) for thread, found in threads.items()}


def _correlated(event: dict[str, Any]) -> bool:
    return "correlation" in event.get("args", {})


def _work(event: dict[str, Any], phase: str, shape: str) -> Work:
    name = str(event["name"])
    ours = phase.startswith(PREFIX) and phase not in _COMPUTE
    return Work(
        name=name,
        shape=shape,
        phase=phase,
        start_us=float(event["ts"]),
        end_us=_end(event),
        communicates=ours or "nccl" in name.lower(),
    )


def _length(work: Sequence[Work]) -> float:
    """Time that pieces of work cover, counted once where they overlap."""
    return sum(end - start for start, end in merge([each.interval for each in work]))
