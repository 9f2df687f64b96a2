"""Records of a dispatch may leave before the counts of its plan are known."""

from __future__ import annotations

import pytest
import torch
from kernel_world import check_plans, check_rows, check_sums
from rail_cases import (
    WORLDS,
    finish_rail_plan,
    new_rail_round,
    new_rail_world,
    no_faults,
    rail_combine,
    rail_dispatch,
    rail_plan,
    start_rail_plan,
)
from torch import Tensor

from ep_dispatcher.bench.one_gpu_spec import Round
from ep_dispatcher.bench.rail_world import RailWorld

pytestmark = pytest.mark.gpu(1)

SENT = 16  # EP_PHASE_RAIL_SENT


def _send(world: RailWorld, work: Round, *, weights: bool = True) -> None:
    topk_weights = work.topk_weights if weights else None
    world.launch("rail_send", world.rail_send_calls(work.topk_idx, work.x, topk_weights))


@pytest.mark.parametrize("net", ["loop", "chaos"])
@pytest.mark.parametrize(("num_domains", "domain_size"), WORLDS)
def test_records_are_there_before_the_counts_are_exchanged(
    num_domains: int, domain_size: int, net: str
) -> None:
    world = new_rail_world(num_domains, domain_size, net=net, mutations=True)
    for seed, kind in enumerate(("uniform", "duplicates", "mostly_dropped")):
        work = new_rail_round(world, kind, seed)
        plans = start_rail_plan(world, work)
        before = [world.put_counts(rank) for rank in range(world.shape.ep_size)]
        _send(world, work)
        torch.cuda.synchronize()  # and nobody has counted yet
        for rank, expected in enumerate(work.plans):
            sent = (world.put_counts(rank) - before[rank])[:, 0].tolist()
            assert sent == _tokens_by_domain(expected.dst_rank, rank, num_domains, domain_size)
        finish_rail_plan(world, work, plans)
        check_plans(world, work, plans)
        check_rows(work, rail_dispatch(world, work, plans, sent=True))
        check_sums(work, rail_combine(world, work, plans))
        check_rows(work, rail_dispatch(world, work, plans, duplicate=1))
    no_faults(world)


def _tokens_by_domain(dst_rank: Tensor, rank: int, num_domains: int, domain_size: int) -> list[int]:
    """Tokens of a rank that go to each other domain."""
    own = rank // domain_size
    return [
        0
        if domain == own
        else int(((dst_rank >= 0) & (dst_rank // domain_size == domain)).any(1).sum())
        for domain in range(num_domains)
    ]


@pytest.mark.parametrize("net", ["loop", "chaos"])
def test_a_send_may_run_beside_the_rest_of_the_plan(net: str) -> None:
    world = new_rail_world(2, 4, net=net)
    side = torch.cuda.Stream()
    works = [new_rail_round(world, kind, seed) for seed, kind in enumerate(("uniform", "skewed"))]
    for epoch in range(12):
        work = works[epoch % 2]
        plans = start_rail_plan(world, work)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _send(world, work)
        finish_rail_plan(world, work, plans)
        rows = rail_dispatch(world, work, plans, sent=True, duplicate=epoch % 2)
        torch.cuda.current_stream().wait_stream(side)
        sums = rail_combine(world, work, plans)
        check_plans(world, work, plans)
        check_rows(work, rows)
        check_sums(work, sums)
    no_faults(world)


def test_rows_past_the_capacity_travel_and_are_dropped() -> None:
    world = new_rail_world()
    for capacity_rows in (0, 40, 1000):
        work = new_rail_round(world, capacity_rows=capacity_rows)
        plans = start_rail_plan(world, work)
        _send(world, work)
        finish_rail_plan(world, work, plans)
        check_plans(world, work, plans)
        check_rows(work, rail_dispatch(world, work, plans, sent=True))
        check_sums(work, rail_combine(world, work, plans))
    no_faults(world)


def test_weights_may_stay_at_home() -> None:
    world = new_rail_world()
    work = new_rail_round(world)
    plans = rail_plan(world, work)
    _send(world, work, weights=False)
    outputs = rail_dispatch(world, work, plans, weights=False, sent=True)
    for (recv_x, recv_weights), expected in zip(outputs, work.recv_x, strict=True):
        assert recv_weights is None
        assert torch.equal(recv_x.view(torch.int16), expected.view(torch.int16))


@pytest.mark.fault
@pytest.mark.parametrize("again", ["rail_send", "rail_dispatch"])
@pytest.mark.parametrize("net", ["loop", "chaos"])
def test_a_call_out_of_turn_names_itself(again: str, net: str) -> None:
    """Records were sent, and then again, before their dispatch: nothing is overwritten."""
    world = new_rail_world(timeout_s=0.3, net=net)
    work = new_rail_round(world)
    plans = rail_plan(world, work)
    _send(world, work)
    no_faults(world)
    if again == "rail_send":
        _send(world, work)
    else:
        rail_dispatch(world, work, plans)
    torch.cuda.synchronize()
    for rank in range(world.shape.ep_size):
        fault = world.fault(rank)
        assert (fault.filed, fault.phase) == (1, SENT)
        assert fault.peer == fault.rank
