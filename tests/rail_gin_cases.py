"""What the ranks of the tests over real GIN do; see device_cases.py."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from device_cases import (
    Case,
    Inputs,
    differences,
    inputs,
    poisoned_memory,
    run_once,
)
from loopback_rma import Plugin

from ep_dispatcher import (
    AgreementError,
    ConfigError,
    EpConfig,
    EpError,
    EPGroup,
    EpTimeoutError,
    Plan,
)
from ep_dispatcher.device import DeviceBackend
from ep_dispatcher.memory import persistent_bytes
from ep_dispatcher.rail_device import RailBackend

Found = TypeVar("Found")
Network = dict[str, str]  # settings of the plugin, which reads them for each communicator
AFTER_S = 10.0  # deadline of a group after a fault: whoever is late may be, what is lost is told


@dataclass(frozen=True, kw_only=True)
class RailCase(Case):
    """A case whose ranks are split into domains of `domain_size`."""

    domain_size: int = 1

    def config(self, tier: str) -> EpConfig:
        """The config of a group of that tier."""
        return dataclasses.replace(super().config(tier), virtual_domain_size=self.domain_size)


@contextlib.contextmanager
def settings(network: Network) -> Iterator[None]:
    """Settings of the plugin for communicators that are made inside."""
    os.environ.update(network)
    try:
        yield
    finally:
        for name in network:
            del os.environ[name]


def over(
    process_group: dist.ProcessGroup,
    network: Network,
    work: Callable[..., Found],
    *args: object,
) -> Found:
    """What `work(process_group, *args)` finds over such a network."""
    with settings(network):
        return work(process_group, *args)


def groups_differ(process_group: dist.ProcessGroup, groups: Sequence[Sequence[Case]]) -> list[str]:
    """What differs from the reference in groups one after the other, each with several rounds.

    Args:
        process_group: of all ranks.
        groups: cases of each group's rounds; the first one's config has room for the others.
    """
    return [
        f"group {number}, {what}"
        for number, cases in enumerate(groups)
        for what in _cases_differ(process_group, cases)
    ]


def _cases_differ(
    process_group: dist.ProcessGroup,
    cases: Sequence[Case],
    begins: Callable[[], None] = lambda: None,
) -> list[str]:
    """`groups_differ` of one group; calls `begins` just before each round of the device tier."""
    found = []
    with (
        EPGroup.create(process_group, cases[0].config("device")) as device,
        EPGroup.create(process_group, cases[0].config("reference")) as reference,
    ):
        for number, case in enumerate(cases):
            given = inputs(case, device.ep_rank)
            want = run_once(reference, given)
            with poisoned_memory():
                begins()
                got = run_once(device, given)
            torch.cuda.synchronize()  # as in rounds_differ
            found += [f"round {number}: {name}" for name in differences(got, want)]
            if int(got.plan.demand_rows) != want.plan.demand_rows:
                found.append(f"round {number}: demand_rows")
    return found


def captured_without_capacity(process_group: dist.ProcessGroup, case: RailCase) -> str:
    """Capture a plan that the host would wait for; the group goes on afterwards."""
    with EPGroup.create(process_group, case.config("device")) as group:
        given = inputs(case, group.ep_rank)
        run_once(group, given)
        torch.cuda.synchronize()
        message = ""
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            try:
                group.plan(given.topk_idx)
            except ConfigError as error:
                message = str(error)
        run_once(group, given)
        return message


def count_puts(plugin: Plugin, rank: int) -> Counter[tuple[int, int]]:
    """Puts of this rank so far, by peer and bytes."""
    rows = [row for row in plugin.rows() if row.rank == rank and row.kind == "put"]
    return Counter({(row.peer, row.size): row.number for row in rows})


def crossing_tokens(plan: Plan) -> Counter[int]:
    """How many tokens go to each other domain, by the rank that takes them there."""
    topology = plan.topology
    domains = torch.where(plan.dst_rank >= 0, plan.dst_rank // topology.domain_size, -1)
    mine = topology.domain_of(plan.ep_rank)
    return Counter(
        {
            topology.rail_peer(plan.ep_rank, domain): int((domains == domain).any(dim=1).sum())
            for domain in range(topology.num_domains)
            if domain != mine
        }
    )


@dataclass(frozen=True)
class Crossed:
    """Puts of one rank, by peer and bytes, and tokens that had to cross, by peer."""

    dispatch: Counter[tuple[int, int]]
    combine: Counter[tuple[int, int]]
    tokens: Counter[int]


def puts_of_a_round(process_group: dist.ProcessGroup, case: RailCase, plugin: str) -> Crossed:
    """Count the puts of one dispatch and one combine."""
    counters = Plugin(Path(plugin))
    with EPGroup.create(process_group, case.config("device")) as group:
        given = inputs(case, group.ep_rank)
        run_once(group, given)
        plan = group.plan(given.topk_idx)
        marks = [_settled(counters, group.ep_rank)]
        recv_x, _ = group.dispatch(plan, given.x, given.weights)
        marks.append(_settled(counters, group.ep_rank))
        group.combine(plan, recv_x)
        marks.append(_settled(counters, group.ep_rank))
        return Crossed(marks[1] - marks[0], marks[2] - marks[1], crossing_tokens(plan))


def _settled(plugin: Plugin, rank: int) -> Counter[tuple[int, int]]:
    """The counters once this rank's kernels have ended; each waits for its own puts."""
    torch.cuda.synchronize()
    return count_puts(plugin, rank)


class EarlySends:
    """In the place of a backend's native module: plans send a dispatch's records, then count.

    Attributes:
        given: inputs of the dispatch that comes after the next plan; None: it sends by itself.
        watches: whether nobody counts before all ranks' records are sent, and puts are counted.
        marks: puts of records, by peer, before and after those were sent and after their dispatch.
    """

    def __init__(self, backend: RailBackend, case: RailCase, counters: Plugin) -> None:
        """Take the module's place for as long as the backend lives."""
        self.given: Inputs | None = None
        self.watches = False
        self.marks: list[Counter[int]] = []
        self._module, self._session, self._counters = backend._module, backend._session, counters
        self._row_bytes = case.config("device").shape.row_bytes
        self._record_bytes = self._row_bytes + 4 * case.num_topk
        self._sent = False
        backend._module = self

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """What the module has."""
        return getattr(self._module, name)

    def rail_counts(self, call: Any, stream: int) -> None:  # noqa: ANN401
        """Send, then count."""
        given, self.given = self.given, None
        if given is not None:
            self._mark()
            self._module.rail_send(self._arguments(given), stream)
            self._sent = True
            self._mark()
        self._module.rail_counts(call, stream)

    def rail_dispatch(self, call: Any, stream: int) -> None:  # noqa: ANN401
        """Dispatch, without what was sent."""
        call.sent = int(self._sent)
        self._module.rail_dispatch(call, stream)
        if self._sent:
            self._mark()
        self._sent = False

    def _mark(self) -> None:
        """Count this rank's puts of that size once its kernels have ended."""
        if self.watches:
            puts, size = _settled(self._counters, self._session.ep_rank), self._record_bytes
            marked = {peer: number for (peer, each), number in puts.items() if each == size}
            self.marks.append(Counter(marked))

    def _arguments(self, given: Inputs) -> Any:  # noqa: ANN401
        assert self._session.rails is not None
        call = self._module.RailSendArgs(self._session.context, self._session.rails.rail)
        call.topk_idx, call.x = given.topk_idx.data_ptr(), given.x.data_ptr()
        call.num_tokens, call.num_topk = given.topk_idx.shape
        call.row_bytes, call.topk_weights = self._row_bytes, given.weights.data_ptr()
        return call


@dataclass(frozen=True)
class Early:
    """Records that left before the counts.

    Attributes:
        differ: results of all rounds that are not the reference's.
        before_counts, altogether: puts of the first round's records by peer, before any rank
            counted and until the end of their dispatch.
        tokens: that had to cross, by peer.
    """

    differ: list[str]
    before_counts: Counter[int]
    altogether: Counter[int]
    tokens: Counter[int]


def early_rounds(
    process_group: dist.ProcessGroup, case: RailCase, plugin: str, rounds: int
) -> Early:
    """Rounds whose plans send; in the first of them ranks wait between sending and counting."""
    found, tokens = [], []
    with (
        EPGroup.create(process_group, case.config("device")) as device,
        EPGroup.create(process_group, case.config("reference")) as reference,
    ):
        assert isinstance(device._backend, RailBackend)
        early = EarlySends(device._backend, case, Plugin(Path(plugin)))
        for number in range(rounds):
            given = inputs(case.round(number), device.ep_rank)
            want = run_once(reference, given)
            early.given, early.watches = given, number == 0
            with poisoned_memory():
                got = run_once(device, given)
            torch.cuda.synchronize()  # as in rounds_differ
            tokens.append(crossing_tokens(got.plan))
            found += [f"round {number}: {name}" for name in differences(got, want)]
        first, sent, dispatched = early.marks
        return Early(found, sent - first, dispatched - first, tokens[0])


def memory_of_group(process_group: dist.ProcessGroup, case: RailCase) -> tuple[int, int]:
    """Bytes that an open group holds beside its output rows, and those of the formula."""
    with EPGroup.create(process_group, case.config("device")) as group:
        backend = group._backend
        assert isinstance(backend, DeviceBackend)
        session = backend._session
        assert session.rails is not None
        tables = [*session._tables.values(), *session.rails._tables.values()]
        held = sum(table.nbytes for table in tables) + session._arena.heap - session._arena.base
        return held, persistent_bytes(group.config, group.topology)["total"]


@dataclass(frozen=True)
class After:
    """How a rank fared in a new group after a fault.

    Attributes:
        differ: results that are not the reference's.
        began_s: when its first plan began, by the clock that all ranks of a machine share; nan: it
            did not come to that.
        ended_s: when it had its results, or raised.
        failure: the traceback of what it raised; "" for nothing.
    """

    differ: list[str]
    began_s: float
    ended_s: float
    failure: str


def trouble_after(answers: Sequence[After]) -> str:
    """What was wrong in the new groups, with all ranks' times; "" for nothing.

    A rank that was late began past the deadline of the first one; what a rank that began in time
    did not send was lost, or stood still.

    Args:
        answers: of all ranks, by rank.
    """
    if not any(after.failure or after.differ for after in answers):
        return ""
    began = [after.began_s for after in answers if not math.isnan(after.began_s)]
    first = min(began, default=math.nan)
    lines = [f"a new group failed; its deadline is {AFTER_S} s, and first plans began within "]
    lines[0] += f"{max(began, default=math.nan) - first:.3f} s of {len(began)} ranks"
    known = {rank: after.began_s for rank, after in enumerate(answers)}
    order = sorted(known, key=lambda rank: (math.isnan(known[rank]), known[rank]))
    for rank, after in ((rank, answers[rank]) for rank in order):
        last = after.failure.strip().rsplit("\n", 1)[-1]
        what = last or (f"differ: {after.differ}" if after.differ else "right")
        came = "never began a plan"
        if not math.isnan(after.began_s):
            came = f"began at {after.began_s:.3f} s (+{after.began_s - first:.3f} s)"
        lines.append(f"rank {rank} {came}, ended at {after.ended_s:.3f} s: {what}")
    failed = [after for after in answers if after.failure]
    lines += [after.failure for after in sorted(failed, key=lambda after: after.ended_s)[:1]]
    return "\n".join(lines)


@dataclass(frozen=True)
class Told:
    """How a rank fared in a group that failed; no phase: it raised nothing.

    Attributes:
        seconds: until it raised.
        rank, peer, phase, behind: of the error.
        closing_s: seconds that closing the group took.
        after: a new group in the same process.
    """

    seconds: float
    rank: int
    peer: int
    phase: str
    behind: tuple[int, ...]
    closing_s: float
    after: After

    @property
    def differ(self) -> list[str]:
        """All that was wrong in the new group."""
        return self.after.differ + [self.after.failure] * bool(self.after.failure)


def fault_and_after(
    process_group: dist.ProcessGroup, case: RailCase, plugin: str, fault: str
) -> Told:
    """Make the network fail in a running group; then mend it and make a new group."""
    library = Plugin(Path(plugin))
    group = EPGroup.create(process_group, case.config("device"))
    given = inputs(case, group.ep_rank)
    run_once(group, given)
    torch.cuda.synchronize()
    dist.barrier(group=process_group)
    assert library.inject(fault)
    start, error = time.monotonic(), None
    try:
        _rounds_until_told(group, given)
    except EpTimeoutError as raised:
        error = raised
    seconds = time.monotonic() - start
    assert library.inject("")
    return _after(process_group, case, group, seconds, error)


def lagging_domain(process_group: dist.ProcessGroup, case: RailCase, lag_s: float) -> Told:
    """The last domain makes each call so much later than the others; then make a new group."""
    group = EPGroup.create(process_group, case.config("device"))
    last = group.topology.num_domains - 1
    lags = group.topology.domain_of(group.ep_rank) == last
    given = inputs(case, group.ep_rank)
    dist.barrier(group=process_group)
    start, error = time.monotonic(), None
    try:
        _rounds_until_told(group, given, most=1, lag_s=lag_s if lags else 0.0)
        group.check()
    except EpTimeoutError as raised:
        error = raised
    return _after(process_group, case, group, time.monotonic() - start, error)


def weights_in_one_domain(process_group: dist.ProcessGroup, case: RailCase) -> tuple[str, After]:
    """Only the first domain passes weights; what the next plan raises, and a new group after it."""
    group = EPGroup.create(process_group, case.config("device"))
    given = inputs(case, group.ep_rank)
    plan = group.plan(given.topk_idx)
    first = group.topology.domain_of(group.ep_rank) == 0
    group.dispatch(plan, given.x, given.weights if first else None)
    message = ""
    try:
        group.plan(given.topk_idx)
    except AgreementError as error:
        message = str(error)
    group.close(failed=bool(message))
    return message, _new_group(process_group, case)


def _after(
    process_group: dist.ProcessGroup,
    case: RailCase,
    group: EPGroup,
    seconds: float,
    error: EpTimeoutError | None,
) -> Told:
    """Close the group, and see that a new one works."""
    start = time.monotonic()
    group.close(failed=error is not None)
    closing_s = time.monotonic() - start
    after = _new_group(process_group, case)
    if error is None:
        return Told(seconds, -1, -1, "", (), closing_s, after)
    return Told(seconds, error.rank, error.peer, error.phase, error.behind, closing_s, after)


def _new_group(process_group: dist.ProcessGroup, case: RailCase) -> After:
    """A round of a new group, whose deadline is `AFTER_S` whatever that of the case."""
    differ: list[str] = []
    began_s, failure = math.nan, ""

    def begin() -> None:
        nonlocal began_s
        torch.cuda.synchronize()  # the GPU comes to the plan when the host does
        began_s = time.monotonic()

    try:
        patient = dataclasses.replace(case, timeout_s=AFTER_S)
        differ = _cases_differ(process_group, [patient], begin)
    except (EpError, RuntimeError):  # told with the times of all ranks, see `trouble_after`
        failure = traceback.format_exc()
    return After(differ, began_s, time.monotonic(), failure)


def _rounds_until_told(group: EPGroup, given: Inputs, most: int = 5, lag_s: float = 0.0) -> None:
    for _ in range(most):
        time.sleep(lag_s)
        plan = group.plan(given.topk_idx)
        time.sleep(lag_s)
        recv_x, _ = group.dispatch(plan, given.x, given.weights)
        torch.cuda.synchronize()
        time.sleep(lag_s)
        group.combine(plan, recv_x)
        torch.cuda.synchronize()
