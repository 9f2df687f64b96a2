"""What the ranks of the tests over real GIN do; see device_cases.py."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from device_cases import (
    Case,
    Inputs,
    inputs,
    rounds_differ,
    run_once,
)
from loopback_rma import Plugin

from ep_dispatcher import AgreementError, ConfigError, EpConfig, EPGroup, EpTimeoutError, Plan
from ep_dispatcher.device import DeviceBackend
from ep_dispatcher.memory import persistent_bytes

Network = dict[str, str]  # settings of the plugin, which reads them for each communicator


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


def differ_on(
    process_group: dist.ProcessGroup,
    network: Network,
    work: Callable[..., list[str]],
    *args: object,
) -> list[str]:
    """What `work(process_group, *args)` finds to differ over such a network."""
    with settings(network):
        return work(process_group, *args)


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
class Told:
    """How a rank fared in a group that failed; no phase: it raised nothing.

    Attributes:
        seconds: until it raised.
        rank, peer, phase, behind: of the error.
        closing_s: seconds that closing the group took.
        differ: results of a new group in the same process.
    """

    seconds: float
    rank: int
    peer: int
    phase: str
    behind: tuple[int, ...]
    closing_s: float
    differ: list[str]


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


def weights_in_one_domain(
    process_group: dist.ProcessGroup, case: RailCase
) -> tuple[str, list[str]]:
    """Only the first domain passes weights; what the next plan raises, and what differs after."""
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
    return message, rounds_differ(process_group, case)


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
    differ = rounds_differ(process_group, case)
    if error is None:
        return Told(seconds, -1, -1, "", (), closing_s, differ)
    return Told(seconds, error.rank, error.peer, error.phase, error.behind, closing_s, differ)


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
