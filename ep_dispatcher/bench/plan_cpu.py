"""Time of the plan on the CPU: one rank alone with all counts given, and P thread ranks.

The first is `build_plan`, the arithmetic alone. The second is `EPGroup.plan` in the reference tier:
validation, the exchange of counts over gloo, the arithmetic, and the tier's own index lists; a
round takes as long as its slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ep_dispatcher.bench.results import ResultLog, summarise_times
from ep_dispatcher.config import EpConfig, MoeShape, Topology
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.group import EPGroup
from ep_dispatcher.plan import Placement, Plan, build_plan, count_copies
from ep_dispatcher.routing import RoutingSpec, make_topk_idx, make_world
from ep_dispatcher.testing import run_ranks

MIN_ROUNDS = 20
_WARM_UP_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class PlanBench:
    """What is timed.

    Attributes:
        num_tokens: T of every rank.
        num_experts: E.
        num_topk: K.
        seed: of the uniform routing.
        rounds: timed rounds, after a few that are not.
    """

    num_tokens: int = 4096
    num_experts: int = 256
    num_topk: int = 8
    seed: int = 0
    rounds: int = 50

    def __post_init__(self) -> None:
        """Refuse fewer rounds than a 95th percentile needs."""
        if self.rounds < MIN_ROUNDS:
            raise ConfigError(f"rounds is {self.rounds}; it must be at least {MIN_ROUNDS}")

    @property
    def routing(self) -> RoutingSpec:
        """The routing that is planned."""
        return RoutingSpec(
            name="uniform", num_experts=self.num_experts, num_topk=self.num_topk, seed=self.seed
        )


def one_rank_plan(bench: PlanBench, num_ranks: int) -> Callable[[], Plan]:
    """Return a call that builds rank 0's plan, the counts of all ranks being given."""
    routings = list(make_world(bench.routing, bench.num_tokens, num_ranks))
    counts = torch.stack([count_copies(routing, bench.num_experts) for routing in routings])
    placement = Placement.even(bench.num_experts, num_ranks)
    topology = Topology(ep_size=num_ranks, domain_size=num_ranks)

    def build() -> Plan:
        return build_plan(
            routings[0], counts, placement=placement, topology=topology, ep_rank=0, alignment=1
        )

    return build


def time_one_rank(bench: PlanBench, num_ranks: int) -> list[float]:
    """Time `build_plan` of one rank; microseconds of each round."""
    return _time_rounds(one_rank_plan(bench, num_ranks), bench.rounds)


def time_thread_ranks(bench: PlanBench, num_ranks: int) -> list[float]:
    """Time `EPGroup.plan` on thread ranks; microseconds of the slowest rank of each round."""
    config = EpConfig(
        # Rows are never touched here, so any hidden size does.
        shape=MoeShape(hidden=64, num_topk=bench.num_topk, num_experts=bench.num_experts),
        max_tokens_per_rank=bench.num_tokens,
        tier="reference",
    )

    def work(process_group: dist.ProcessGroup) -> list[float]:
        with EPGroup.create(process_group, config) as group:
            topk_idx = make_topk_idx(bench.routing, bench.num_tokens, group.ep_rank)
            return _time_rounds(lambda: group.plan(topk_idx), bench.rounds)

    per_rank = run_ranks(num_ranks, work)
    return [max(times) for times in zip(*per_rank, strict=True)]


def record_plan_bench(bench: PlanBench, log: ResultLog) -> list[dict[str, Any]]:
    """Time the plan for 8 and 64 ranks alone and 4 thread ranks; one recorded line each."""
    alone, threads = "build_plan of one rank, counts given", "EPGroup.plan, slowest rank"
    cases = (
        (alone, "cpu", 8, time_one_rank),
        (alone, "cpu", 64, time_one_rank),
        (threads, "threads", 4, time_thread_ranks),
    )
    return [
        log.write(
            sharing=sharing,
            suite="plan",
            backend="ep_dispatcher/reference",
            phase="plan",
            what=what,
            ranks=num_ranks,
            domains=1,
            num_tokens=bench.num_tokens,
            num_topk=bench.num_topk,
            num_experts=bench.num_experts,
            routing=bench.routing.name,
            seed=bench.seed,
            torch_threads=torch.get_num_threads(),
            **_measure_or_explain(measure, bench, num_ranks),
        )
        for what, sharing, num_ranks, measure in cases
    ]


def _measure_or_explain(
    measure: Callable[[PlanBench, int], list[float]], bench: PlanBench, num_ranks: int
) -> dict[str, Any]:
    """Times of a case, or why it cannot be run (more ranks than experts)."""
    try:
        return dict(summarise_times(measure(bench, num_ranks)))
    except ConfigError as error:
        return {"error": str(error)}


def _time_rounds(work: Callable[[], object], rounds: int) -> list[float]:
    """Microseconds of each call of `work`, after a warm-up."""
    for _ in range(_WARM_UP_ROUNDS):
        work()
    times_us = []
    for _ in range(rounds):
        start_ns = time.perf_counter_ns()
        work()
        times_us.append((time.perf_counter_ns() - start_ns) / 1000)
    return times_us
