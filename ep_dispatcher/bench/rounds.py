"""One backend on one work on one rank: open, check, time, check again, close."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher import EPGroup
from ep_dispatcher.bench.backends import find_opener
from ep_dispatcher.bench.backends.base import Place, Session
from ep_dispatcher.bench.ceiling import measure_ceilings
from ep_dispatcher.bench.check import Checker, WrongResult
from ep_dispatcher.bench.inputs import make_inputs
from ep_dispatcher.bench.interference import CALLS, Interference
from ep_dispatcher.bench.layer import Layer
from ep_dispatcher.bench.spec import Method, Work
from ep_dispatcher.bench.stopwatch import Stopwatch
from ep_dispatcher.bench.usage import PeakMemory, count_calls, memory_in_use, read_clocks


@dataclass
class RankResult:
    """What one rank measured; plain values, as it travels as JSON.

    Attributes:
        times_us: microseconds of each timed round, by phase.
        host_us: microseconds that the host spent in each phase, mean of a round.
        cpu_us: processor time of this process in a round, all phases together, mean.
        max_error: see `Checker`.
        bit_equal: whether combine and its kin gave the reference tier's bits; None if not asked.
        identity: what ran here.
        wire: scheme of what travels to the experts; `wire_home`: and back.
        layout: of what dispatch moves.
        received_rows: R without padding.
        memory: "peak_bytes" and "persistent_bytes", where known.
        usage: "launches" and "host_syncs" of a round, where known.
        ceilings: GB/s, see `measure_ceilings`.
        clocks: MHz.
        open_s: seconds that opening took.
        beside_calls: of communication that ended while products ran, mean of the rounds that
            measure interference; None where they were not measured.
    """

    times_us: dict[str, list[float]] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    cpu_us: float = 0.0
    max_error: float = 0.0
    bit_equal: bool | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    wire: str = ""
    wire_home: str = ""
    layout: str = ""
    received_rows: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    clocks: dict[str, float] | None = None
    open_s: float = 0.0
    beside_calls: float | None = None


class Runner:
    """Drives one session.

    Args:
        work: what to move.
        method: how to measure.
        place: where.
        sharing_ranks: ranks that share this device, for memory that only the device counts.
    """

    def __init__(self, work: Work, method: Method, place: Place, sharing_ranks: int) -> None:
        """Draw the inputs; nothing of the backend yet."""
        self._work, self._method, self._place = work, method, place
        self._sharing_ranks = sharing_ranks
        self._inputs = make_inputs(work, place.rank, place.device)
        self._watch = Stopwatch(place.group, place.device)
        self._session: Session | None = None
        self.result = RankResult()

    def open(self) -> None:
        """Open the backend.

        Raises:
            Refused: it is missing, or cannot do this work.
        """
        self._meet()
        before = memory_in_use(self._place.device)
        start = time.perf_counter()
        self._session = find_opener(self._place.name)(self._work, self._place)
        self.result.open_s = round(time.perf_counter() - start, 3)
        self._meet()
        held = memory_in_use(self._place.device) - before
        session, memory = self._session, self.result.memory
        if session.persistent_bytes is not None:
            memory["persistent_bytes"] = session.persistent_bytes
        elif self._place.device.type == "cuda":
            memory["persistent_bytes"] = max(held, 0) // self._sharing_ranks
        self.result.identity = asdict(session.identity())
        self.result.wire, self.result.layout = session.wire, session.layout
        self.result.wire_home = session.wire_home

    def run(self) -> RankResult:
        """Check, warm up, time, check again.

        Raises:
            WrongResult: the backend's result is not the reference's; no time is kept.
        """
        session = self._open_session()
        session.prepare(self._inputs.topk_idx, self._inputs.topk_weights)
        checker = Checker(self._work, self._place.rank, self._inputs)
        given = self._one_by_one(session, checker, checked=True)
        if self._place.name.startswith("ep_dispatcher/"):
            self._compare_bits(session, given)
        for _ in range(self._method.warmup):
            self._round(session, given)
        self._watch.read()
        self._watch.read_host()
        self._time(session, given)
        self._measure_peak(session, given)
        del given  # a second set need not fit in the memory that `place` takes from
        self._one_by_one(session, checker, checked=True)
        self.result.max_error = checker.max_error
        if self._place.name in self._method.interference and self._place.device.type == "cuda":
            self._time_interference(session, checker)
        if self._work.ffn_hidden:
            self._time_layer(session)
        self.result.clocks = read_clocks(self._place.device)
        return self.result

    def measure_ceilings(self) -> None:
        """Measure the machine beside the backend."""
        self.result.ceilings = measure_ceilings(
            self._place.group, self._place.device, link=self._sharing_ranks == 1
        )

    def count_usage(self) -> None:
        """Profile one more round; after everything else, as a profiler may fail."""
        session = self._open_session()
        checker = Checker(self._work, self._place.rank, self._inputs)
        given = self._one_by_one(session, checker, checked=False)
        self.result.usage = count_calls(lambda: self._calls(session, given))

    def close(self) -> None:
        """Close the backend, if it is open."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _one_by_one(self, session: Session, checker: Checker, *, checked: bool) -> _Given:
        """Every call once, untimed; each result is compared; returns what other rounds are fed."""
        inputs = self._inputs
        session.plan(_no_lap)
        received = session.dispatch(inputs.x, inputs.topk_weights, _no_lap).with_counts_on_cpu()
        self.result.received_rows = int(received.tokens_per_expert.sum())
        if checked:
            checker.dispatch(received)
        grad_rows, grad_weights = checker.grad_rows(received)
        expert_out = session.place(checker.expert_out(received))
        given = _Given(expert_out, session.place(grad_rows), grad_weights)
        out = session.combine(given.expert_out, _no_lap)
        if checked:
            checker.combine(out)
        if session.has_backward:
            got = session.combine_backward(inputs.grad_out, _no_lap)
            back = session.dispatch_backward(given.grad_rows, given.grad_weights, _no_lap)
            if checked:
                checker.combine_backward(got)
                checker.dispatch_backward(*back)
        return given

    def _calls(self, session: Session, given: _Given) -> None:
        """All calls once, back to back."""
        inputs = self._inputs
        session.plan(_no_lap)
        session.dispatch(inputs.x, inputs.topk_weights, _no_lap)
        session.combine(given.expert_out, _no_lap)
        if session.has_backward:
            session.combine_backward(inputs.grad_out, _no_lap)
            session.dispatch_backward(given.grad_rows, given.grad_weights, _no_lap)

    def _time(self, session: Session, given: _Given) -> None:
        """The timed rounds."""
        times: dict[str, list[float]] = {}
        cpu_start = time.process_time_ns()
        for _ in range(self._method.rounds):
            self._round(session, given)
            for phase, us in self._watch.read().items():
                times.setdefault(phase, []).append(us)
        rounds = self._method.rounds
        self.result.cpu_us = round((time.process_time_ns() - cpu_start) / 1000 / rounds, 1)
        self.result.times_us = times
        self.result.host_us = {
            phase: round(us / rounds, 2) for phase, us in self._watch.read_host().items()
        }

    def _measure_peak(self, session: Session, given: _Given) -> None:
        """Memory of one more round, without the watch: its sweeps of the L2 allocate as well."""
        peak = PeakMemory(self._place.device)
        self._calls(session, given)
        if session.has_backward:
            self._pair(session, given)
        found = peak.read()
        if found is not None:
            self.result.memory["peak_bytes"] = found

    def _round(self, session: Session, given: _Given) -> None:
        """All calls once, each from a cold cache and a meeting of the ranks."""
        watch, inputs = self._watch, self._inputs
        watch.begin()
        session.plan(watch.lap)
        if session.has_static_plan:
            watch.begin()
            session.plan_static(watch.lap)
        watch.begin()
        session.dispatch(inputs.x, inputs.topk_weights, watch.lap)
        watch.begin()
        session.combine(given.expert_out, watch.lap)
        if session.has_backward:
            watch.begin()
            session.combine_backward(inputs.grad_out, watch.lap)
            watch.begin()
            session.dispatch_backward(given.grad_rows, given.grad_weights, watch.lap)
            watch.begin()
            self._pair(session, given)
            watch.lap("pair")

    def _pair(self, session: Session, given: _Given) -> None:
        """Dispatch and combine, then the backward of both, with nothing between them."""
        inputs = self._inputs
        session.dispatch(inputs.x, inputs.topk_weights, _no_lap)
        session.combine(given.expert_out, _no_lap)
        session.combine_backward(inputs.grad_out, _no_lap)
        session.dispatch_backward(given.grad_rows, given.grad_weights, _no_lap)

    def _time_layer(self, session: Session) -> None:
        """The whole layer's forward as one phase, and its backward as another; checked first."""
        layer = Layer(session, self._work, self._place, self._inputs)
        layer.check()
        watch = self._watch

        def both_ways() -> None:
            watch.begin()
            layer.forward()
            watch.lap("layer_forward")
            if session.has_backward:
                watch.begin()
                layer.backward()
                watch.lap("layer_backward")

        self._time_more(both_ways)

    def _time_interference(self, session: Session, checker: Checker) -> None:
        """Matrix products alone, beside dispatch and combine, and beside themselves."""
        given, inputs = self._one_by_one(session, checker, checked=False), self._inputs
        products = Interference(self._work, self._place.device)

        def communicate() -> None:
            session.dispatch(inputs.x, inputs.topk_weights, _no_lap)
            session.combine(given.expert_out, _no_lap)

        found: dict[str, list[float]] = {}
        for number in range(self._method.warmup + self._method.rounds):
            for name, value in products.round(self._watch, communicate).items():
                if number >= self._method.warmup:
                    found.setdefault(name, []).append(value)
        calls = found.pop(CALLS)
        self.result.beside_calls = sum(calls) / len(calls)
        self.result.times_us |= found
        self._watch.read_host()

    def _time_more(self, run: Callable[[], None]) -> None:
        """Rounds whose laps join the times of this backend; their host time is not kept."""
        for number in range(self._method.warmup + self._method.rounds):
            run()
            times = self._watch.read()
            if number >= self._method.warmup:
                for phase, us in times.items():
                    self.result.times_us.setdefault(phase, []).append(us)
        self._watch.read_host()

    def _compare_bits(self, session: Session, given: _Given) -> None:
        """Compare this package's tier with its reference tier, bit for bit."""
        inputs = self._inputs
        session.plan(_no_lap)
        received = session.dispatch(inputs.x, inputs.topk_weights, _no_lap)
        mine = [received.rows, session.combine(given.expert_out, _no_lap)]
        session.combine_backward(inputs.grad_out, _no_lap)
        mine += [session.dispatch_backward(given.grad_rows, given.grad_weights, _no_lap)[0]]
        with EPGroup.create(self._place.group, self._work.ep_config("reference")) as group:
            plan = group.plan(inputs.topk_idx)
            want = [
                group.dispatch(plan, inputs.x)[0],
                group.combine(plan, given.expert_out),
                group.combine(plan, given.grad_rows),
            ]
        self.result.bit_equal = all(map(torch.equal, mine, want))
        if not self.result.bit_equal:
            raise WrongResult("the tier's bits differ from the reference tier's")

    def _meet(self) -> None:
        """Wait for all ranks, and for the device."""
        dist.all_reduce(torch.zeros(1, device=self._place.device), group=self._place.group)
        if self._place.device.type == "cuda":
            torch.cuda.synchronize(self._place.device)

    def _open_session(self) -> Session:
        assert self._session is not None, "open comes first"
        return self._session


@dataclass(frozen=True, eq=False)
class _Given:
    """Tensors that every round feeds in where the experts would."""

    expert_out: Tensor
    grad_rows: Tensor
    grad_weights: Tensor


def _no_lap(phase: str) -> None:
    """Time nothing."""
