"""What the ranks of the tests over real GIN do; see device_cases.py."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from device_cases import Case, Inputs, inputs, rounds_differ, run_once
from loopback_rma import Plugin

from ep_dispatcher import EpConfig, EPGroup, EpTimeoutError, Plan


@dataclass(frozen=True, kw_only=True)
class RailCase(Case):
    """A case whose ranks are split into domains of `domain_size`."""

    domain_size: int = 1

    def config(self, tier: str) -> EpConfig:
        """The config of a group of that tier."""
        return dataclasses.replace(
            super().config(tier), virtual_domain_size=self.domain_size, untested_rails=True
        )


def rounds_differ_on(
    process_group: dist.ProcessGroup, case: RailCase, rounds: int, network: dict[str, str]
) -> list[str]:
    """`rounds_differ` with settings of the plugin, which reads them for each communicator."""
    os.environ.update(network)
    try:
        return rounds_differ(process_group, case, rounds)
    finally:
        for name in network:
            del os.environ[name]


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


def fault_and_after(
    process_group: dist.ProcessGroup, case: RailCase, plugin: str, fault: str
) -> tuple[float, str, list[str]]:
    """Make the network fail in a running group: seconds, the error, and a new group's results."""
    library = Plugin(Path(plugin))
    group = EPGroup.create(process_group, case.config("device"))
    given = inputs(case, group.ep_rank)
    run_once(group, given)
    torch.cuda.synchronize()
    dist.barrier(group=process_group)
    assert library.inject(fault)
    start, told = time.monotonic(), ""
    try:
        _rounds_until_told(group, given)
    except EpTimeoutError as error:
        told = error.phase
    seconds = time.monotonic() - start
    assert library.inject("")
    group.close(failed=True)
    return seconds, told, rounds_differ(process_group, case)


def _rounds_until_told(group: EPGroup, given: Inputs, most: int = 5) -> None:
    for _ in range(most):
        plan = group.plan(given.topk_idx)
        recv_x, _ = group.dispatch(plan, given.x, given.weights)
        group.combine(plan, recv_x)
        torch.cuda.synchronize()
