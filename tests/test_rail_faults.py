"""Rails: deadlines name who is missing in every domain, and each ordering claim is needed.

The negative controls take one claim of csrc/kernels/rail.cuh away (csrc/kernels/mutation.cuh) and
must see wrong data; mutation 0 is the control that must pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_causes import names_cause
from kernel_world import check_plans, check_rows, check_sums, fails
from rail_cases import (
    WORLDS,
    check_rail_round,
    late_epochs,
    new_rail_round,
    new_rail_world,
    no_faults,
    rail_combine,
    rail_dispatch,
    rail_plan,
)

from ep_dispatcher.bench.one_gpu_spec import Round
from ep_dispatcher.bench.rail_world import RailPlan, RailWorld

pytestmark = [pytest.mark.gpu(1), pytest.mark.fault]

LATE_RANK, LATE_US = 3, 3000
ENTRY, ROWS, SUMS = 13, 14, 15  # EpPhase
CHAOS_SEEDS = 36


def _calls(world: RailWorld, work: Round, plans: list[RailPlan], name: str) -> list[Any]:
    """Arguments of one of the rails' kernels."""
    if name in ("rail_exchange", "rail_counts"):
        return world.rail_plan_calls(plans, work.topk_idx)
    if name == "rail_send":
        return world.rail_send_calls(work.topk_idx, work.x, work.topk_weights)
    if name == "rail_dispatch":
        outputs = world.new_outputs(work.rows, weights=True)
        return world.rail_dispatch_calls(plans, work.x, work.topk_weights, outputs)
    out = [torch.empty_like(rows) for rows in work.x]
    domains, returns = world.rail_combine_calls(plans, work.expert_out, out)
    world.launch("combine", domains)
    return returns


@pytest.mark.parametrize("net", ["loop", "chaos"])
@pytest.mark.parametrize(
    "name", ["rail_exchange", "rail_counts", "rail_send", "rail_dispatch", "rail_return"]
)
def test_a_rank_that_never_calls_is_named(name: str, net: str) -> None:
    world = new_rail_world(2, 2, timeout_s=0.3, net=net)
    work = new_rail_round(world, "uniform")
    check_rail_round(world, work)
    plans = rail_plan(world, work)
    calls = _calls(world, work, plans, name)
    torch.cuda.synchronize()
    start = time.monotonic()
    world.launch(name, calls[:LATE_RANK])
    torch.cuda.synchronize()
    assert time.monotonic() - start < 2.5
    filed = [fault for fault in map(world.fault, range(LATE_RANK)) if fault.filed]
    assert LATE_RANK in {fault.peer for fault in filed}
    assert all(names_cause((fault.rank, fault.peer), {LATE_RANK}, 2) for fault in filed)
    if name == "rail_dispatch":  # each of them needs rank 3, or one that has told it
        assert len(filed) == LATE_RANK
    fresh = new_rail_world()
    check_rail_round(fresh, new_rail_round(fresh))


@pytest.mark.parametrize("net", ["loop", "chaos"])
def test_launches_after_a_fault_leave_at_once_and_write_nothing(net: str) -> None:
    """What the one that failed has left is stale; every rank of every domain is told of it."""
    timeout_s = 1.0
    world = new_rail_world(2, 2, timeout_s=timeout_s, net=net)
    work = new_rail_round(world, "uniform")
    plans = rail_plan(world, work)
    outputs = world.new_outputs(work.rows, weights=True)
    out = [torch.full_like(rows, float("nan")) for rows in work.x]
    planning = world.rail_plan_calls(plans, work.topk_idx)
    dispatches = world.rail_dispatch_calls(plans, work.x, work.topk_weights, outputs)
    _, returns = world.rail_combine_calls(plans, work.expert_out, out)
    for plan, (rows, _) in zip(plans, outputs, strict=True):
        plan["dst_rank"].fill_(77)
        rows.fill_(float("nan"))
    world.launch("rail_exchange", planning[:LATE_RANK])
    torch.cuda.synchronize()
    start = time.monotonic()
    for name, calls in (
        ("rail_counts", planning),
        ("rail_send", world.rail_send_calls(work.topk_idx, work.x, work.topk_weights)),
        ("rail_dispatch", dispatches),
        ("rail_return", returns),
    ):
        world.launch(name, calls)
    torch.cuda.synchronize()
    assert time.monotonic() - start < timeout_s / 2
    assert {world.fault(rank).peer for rank in range(4)} == {LATE_RANK}
    assert all(bool((plan["dst_rank"] == 77).all()) for plan in plans)
    assert all(bool(rows.isnan().all()) for rows, _ in outputs)
    assert all(bool(rows.isnan().all()) for rows in out)


@pytest.mark.parametrize("net", ["loop", "chaos"])
def test_a_plan_after_a_fault_sends_nothing(net: str) -> None:
    """Nor writes: what it would read has not come, and its memory holds what it held before."""
    world = new_rail_world(2, 2, timeout_s=0.5, net=net)
    work = new_rail_round(world, "uniform")
    plans = [world.new_rail_plan(rank, *topk.shape) for rank, topk in enumerate(work.topk_idx)]
    planning = world.rail_plan_calls(plans, work.topk_idx)
    world.launch("rail_exchange", planning[:LATE_RANK])
    world.launch("rail_exchange", planning)
    world.launch("rail_counts", planning)
    world.launch("route", world.virtual_route_calls(plans))
    torch.cuda.synchronize()
    assert all(world.fault(rank).filed for rank in range(4))
    assert all(bool((plan.virtual["dst_rank"] == -77).all()) for plan in plans)
    assert all(bool((plan["dst_rank"] == -77).all()) for plan in plans)


@pytest.mark.parametrize("name", ["rail_dispatch", "rail_return"])
def test_a_domain_past_the_deadline_is_named_and_one_before_it_is_not(name: str) -> None:
    world = new_rail_world(4, 1, mutations=True, timeout_s=0.3)
    work = new_rail_round(world, "uniform")
    world.contexts[LATE_RANK].test_delay_us = 60_000
    check_rail_round(world, work)
    world.contexts[LATE_RANK].test_delay_us = 0
    plans = rail_plan(world, work)
    world.contexts[LATE_RANK].test_delay_us = 700_000
    calls = _calls(world, work, plans, name)
    world.launch(name, calls)
    torch.cuda.synchronize()
    filed = [world.fault(rank) for rank in range(LATE_RANK)]
    assert all(fault.filed for fault in filed)
    assert all(LATE_RANK in (fault.rank, fault.peer) for fault in filed)
    assert {fault.phase for fault in filed} <= {ENTRY, ROWS, SUMS}


def test_a_late_domain_delays_only_its_own_tokens() -> None:
    """The blocks that forward the others' tokens end before it comes."""
    late_ns = 40_000_000
    world = new_rail_world(4, 1, mutations=True, max_tokens=128, num_channels=4)  # one a segment
    work = new_rail_round(world, "uniform", tokens=[128] * 4)
    check_rail_round(world, work)
    plans = rail_plan(world, work)
    torch.cuda.synchronize()
    world.contexts[LATE_RANK].test_delay_us = late_ns // 1000
    check_rows(work, rail_dispatch(world, work, plans))
    for rank in range(LATE_RANK):
        forward, _ = world.role_times(rank)
        spans_ns = (forward[:4, 1] - forward[:4, 0]).tolist()
        assert max(spans_ns[:LATE_RANK]) < late_ns // 4
        assert spans_ns[LATE_RANK] > late_ns // 2


MOST_RECORDS, MOST_SUMS = 4, 16  # EP_RAIL_STAGES, kMostUnsentSums


@pytest.mark.parametrize("mutation", [0, 44])
def test_a_warp_has_a_bounded_number_of_puts_on_their_way(mutation: int) -> None:
    """Mutation 44 fills its places again without a wait."""
    world = new_rail_world(2, 2, net="chaos", mutations=True, num_blocks=1, max_tokens=512)
    work = new_rail_round(world, "uniform")
    plans = rail_plan(world, work)
    torch.cuda.synchronize()
    _mutate(world, mutation)
    rail_dispatch(world, work, plans)
    rail_combine(world, work, plans)
    times = [world.role_times(rank) for rank in range(4)]
    records = max(int(dispatch[:, 6].max()) for dispatch, _ in times)
    sums = max(int(back[:, 6].max()) for _, back in times)
    assert records > MOST_RECORDS if mutation else records == MOST_RECORDS
    assert MOST_RECORDS < sums <= MOST_SUMS


@pytest.mark.parametrize("seed", range(CHAOS_SEEDS))
def test_late_puts_and_random_delays_change_nothing(seed: int) -> None:
    num_domains, domain_size = WORLDS[seed % len(WORLDS)]
    world = new_rail_world(
        num_domains, domain_size, net="chaos", chaos_seed=100 * seed, mutations=True, max_tokens=64,
        ring_depth=2 + seed % 3,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    works = [new_rail_round(world, kind, seed) for kind in ("uniform", "duplicates", "skewed")]
    for work in works:
        delays = torch.randint(0, 300, (world.shape.ep_size,), generator=generator).tolist()
        for context, delay in zip(world.contexts, delays, strict=True):
            context.test_delay_us = delay
        check_rail_round(world, work)


@pytest.mark.parametrize("net", ["loop", "chaos"])
def test_many_epochs_with_changing_routing(net: str) -> None:
    world = new_rail_world(2, 4, hidden=64, net=net)
    kinds = ("uniform", "duplicates", "mostly_dropped", "skewed")
    works = [new_rail_round(world, kind, seed) for seed, kind in enumerate(kinds)]
    for epoch in range(60):
        work = works[epoch * 7 // 2 % len(works)]
        plans = rail_plan(world, work)
        rows = rail_dispatch(world, work, plans, duplicate=epoch % 2)
        check_rows(work, rows)
        check_sums(work, rail_combine(world, work, plans))
    no_faults(world)


@pytest.mark.parametrize("net", ["loop", "chaos"])
def test_a_thousand_epochs_with_late_ranks(net: str) -> None:
    """Each compared before the next; other worlds are in test_rail_kernels.py."""
    world = new_rail_world(2, 2, hidden=64, max_tokens=33, net=net, mutations=True)
    for epoch, work in late_epochs(world, 1000):
        plans = rail_plan(world, work)
        rows = rail_dispatch(world, work, plans, duplicate=epoch % 2)
        sums = rail_combine(world, work, plans)
        if epoch % 10 == 9:
            check_plans(world, work, plans)
        check_rows(work, rows)
        check_sums(work, sums)
    no_faults(world)


@pytest.mark.parametrize("net", ["loop", "chaos"])
@pytest.mark.parametrize(("num_domains", "domain_size"), WORLDS)
def test_plans_may_be_used_in_any_order(num_domains: int, domain_size: int, net: str) -> None:
    """Two dispatches, then two combines, and others: as pipelines and recomputation call."""
    world = new_rail_world(num_domains, domain_size, net=net)
    works = [new_rail_round(world, "duplicates", 1), new_rail_round(world, "skewed", 2)]
    plans = [rail_plan(world, work) for work in works]
    for at in (0, 1, 0, 0, 1):
        check_rows(works[at], rail_dispatch(world, works[at], plans[at]))
    for at in (1, 0, 0, 1):
        check_sums(works[at], rail_combine(world, works[at], plans[at]))
    check_rows(works[0], rail_dispatch(world, works[0], plans[0]))
    no_faults(world)


def test_a_bad_expert_is_named_in_every_domain() -> None:
    world = new_rail_world(2, 2)
    work = new_rail_round(world, "uniform")
    work.topk_idx[2][5, 1] = 16
    plans = rail_plan(world, work)
    torch.cuda.synchronize()
    letters = [world.mailbox(one.virtual) for one in plans]
    assert [letter.refused_rank for letter in letters] == [2, 2, 2, 2]
    assert [(letter.bad_token, letter.bad_expert) for letter in letters] == [
        (-1, -1), (-1, -1), (5, 16), (-1, -1),
    ]  # fmt: skip
    check_rail_round(world, new_rail_round(world, "uniform"))


def check_domains_name_each_other(world: RailWorld, plans: list[RailPlan]) -> None:
    """Each domain of two with two ranks names the first rank of the other one."""
    no_faults(world)
    letters = [world.mailbox(one.virtual) for one in plans]
    assert [letter.refused_rank for letter in letters] == [2, 2, 0, 0]
    assert {letter.bad_token for letter in letters} == {-1}


def test_a_plan_refuses_a_domain_with_another_number_of_slots() -> None:
    world = new_rail_world(2, 2, num_topk=2)
    work = new_rail_round(world, "uniform")
    topk_idx = [
        topk[:, : 2 if rank < 2 else 1].contiguous() for rank, topk in enumerate(work.topk_idx)
    ]
    plans = [world.new_rail_plan(rank, *topk.shape) for rank, topk in enumerate(topk_idx)]
    planning = world.rail_plan_calls(plans, topk_idx)
    world.launch("rail_exchange", planning)
    world.launch("rail_counts", planning)
    world.launch("route", world.virtual_route_calls(plans))
    check_domains_name_each_other(world, plans)
    check_rail_round(world, new_rail_round(world, "uniform"))


@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_the_next_plan_refuses_a_domain_that_passed_no_weights_or_gradients(call: str) -> None:
    """No kernel compares them between domains; what was summed without them is lost, and told."""
    world = new_rail_world(2, 2)
    work = new_rail_round(world, "uniform")
    plans = rail_plan(world, work)
    with_weights = world.new_outputs(work.rows, weights=True, shift_bytes=512)
    without = world.new_outputs(work.rows, weights=False, shift_bytes=512)
    rows = world.rail_dispatch_calls(plans, work.x, work.topk_weights, with_weights)
    if call == "dispatch":
        rows[2:] = world.rail_dispatch_calls(plans, work.x, None, without)[2:]
    world.launch("rail_dispatch", rows)
    out = [torch.empty_like(x) for x in work.x]
    grads = [torch.empty_like(weights) for weights in work.topk_weights]
    domains, returns = world.rail_combine_calls(plans, work.expert_out, out, work.row_grads, grads)
    if call == "combine":
        bare = world.rail_combine_calls(plans, work.expert_out, out)
        domains[2:], returns[2:] = bare[0][2:], bare[1][2:]
    world.launch("combine", domains)
    world.launch("rail_return", returns)
    no_faults(world)
    check_domains_name_each_other(world, rail_plan(world, work))
    fresh = new_rail_world(2, 2)
    check_rail_round(fresh, new_rail_round(fresh))


def _mutate(world: RailWorld, mutation: int) -> None:
    for rank, context in enumerate(world.contexts):
        context.test_mutation = mutation
        context.test_delay_us = LATE_US if rank == LATE_RANK else 0


@pytest.mark.parametrize("mutation", [0, 49, 50])
def test_a_plan_needs_its_waits(mutation: int) -> None:
    failed = []
    for seed, kind in enumerate(["uniform", "skewed"]):
        world = new_rail_world(2, 2, net="chaos", chaos_seed=seed, mutations=True)
        work = new_rail_round(world, kind, seed)
        _mutate(world, mutation)
        plans = rail_plan(world, work)
        failed.append(fails(world, lambda: check_plans(world, work, plans)))  # noqa: B023
    assert any(failed) == (mutation != 0)


def _some_seed_differs(
    mutation: int, differs: Callable[[RailWorld, Round, list[RailPlan]], bool]
) -> bool:
    """Whether the kernels of a mutation give other bits for one of four orders of the puts."""
    failed = []
    for seed in range(4):
        world = new_rail_world(
            2, 2, net="chaos", chaos_seed=seed, mutations=True, hidden=1024, num_blocks=1
        )
        work = new_rail_round(world, "uniform", seed)
        plans = rail_plan(world, work)
        torch.cuda.synchronize()
        _mutate(world, mutation)
        failed.append(differs(world, work, plans))
    return any(failed)


@pytest.mark.parametrize("mutation", [0, 41, 42, 44, 45, 51, 52])
def test_dispatch_needs_what_orders_its_records(mutation: int) -> None:
    """Signal first, no wait, a stage reused early, a weak signal, a put before its record.

    52: the signal goes over another channel than its puts.
    """

    def differs(world: RailWorld, work: Round, plans: list[RailPlan]) -> bool:
        rows = rail_dispatch(world, work, plans)
        return fails(world, lambda: check_rows(work, rows))

    assert _some_seed_differs(mutation, differs) == (mutation != 0)


@pytest.mark.parametrize("mutation", [0, 45, 46, 47, 52])
def test_the_return_needs_what_orders_its_sums(mutation: int) -> None:
    """A weak signal, signal first, no wait, the signal over another channel than its puts."""

    def differs(world: RailWorld, work: Round, plans: list[RailPlan]) -> bool:
        sums = rail_combine(world, work, plans)
        return fails(world, lambda: check_sums(work, sums))

    assert _some_seed_differs(mutation, differs) == (mutation != 0)


def _load_kernels_of_one_rank() -> None:
    """Launch each kernel for one rank: loading it later would wait for kernels that wait for it."""
    world = new_rail_world(4, 1, mutations=True, timeout_s=0.02)
    work = new_rail_round(world, "uniform")
    plans = rail_plan(world, work)
    route = world.virtual_route_calls(plans)
    domains, _ = world.rail_combine_calls(plans, work.expert_out, [x.clone() for x in work.x])
    calls = {
        name: _calls(world, work, plans, name)
        for name in ("rail_exchange", "rail_counts", "rail_dispatch", "rail_return")
    } | {"route": route, "combine": domains}
    for name, ranks in calls.items():
        getattr(world.kernels, name)(ranks[0], torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()


@pytest.mark.parametrize("mutation", [0, 43])
def test_dispatch_needs_the_entry_of_the_other_domain(mutation: int) -> None:
    """Rank 3 forwards late; without credit the next call's records overwrite those it still has."""
    _load_kernels_of_one_rank()
    world = new_rail_world(4, 1, mutations=True, hidden=1024)
    works = [new_rail_round(world, "uniform", seed) for seed in range(2)]
    plans = [rail_plan(world, work) for work in works]
    torch.cuda.synchronize()
    _mutate(world, mutation)
    rows = max(max(work.rows) for work in works)
    outputs = world.new_outputs([rows] * 4, weights=True)
    copies = [(rows.clone(), weights.clone()) for rows, weights in outputs if weights is not None]
    calls = [
        world.rail_dispatch_calls(own, work.x, work.topk_weights, outputs)
        for own, work in zip(plans, works, strict=True)
    ]
    with world.rank_streams(4) as streams:
        world.launch_on(streams, "rail_dispatch", calls[0])
        for stream, copy, output in zip(streams, copies, outputs, strict=True):
            with torch.cuda.stream(stream):
                for to, source in zip(copy, output, strict=True):
                    assert source is not None
                    to.copy_(source)
        world.launch_on(streams, "rail_dispatch", calls[1])
    got = [
        (x[:size], weights[:size]) for (x, weights), size in zip(copies, works[0].rows, strict=True)
    ]
    assert fails(world, lambda: check_rows(works[0], got)) == (mutation != 0)


@pytest.mark.parametrize("mutation", [0, 48])
def test_the_return_needs_the_entry_of_the_home(mutation: int) -> None:
    """Rank 3 adds late; without credit the next call's sums overwrite those it still has."""
    _load_kernels_of_one_rank()
    world = new_rail_world(4, 1, mutations=True, hidden=1024)
    works = [new_rail_round(world, "uniform", seed) for seed in range(2)]
    plans = [rail_plan(world, work) for work in works]
    torch.cuda.synchronize()
    _mutate(world, mutation)
    results, calls = [], []
    for work, own in zip(works, plans, strict=True):
        out = [torch.full_like(rows, float("nan")) for rows in work.x]
        grads = [torch.full_like(weights, float("nan")) for weights in work.topk_weights]
        results.append((out, grads))
        calls.append(world.rail_combine_calls(own, work.expert_out, out, work.row_grads, grads))
    with world.rank_streams(4) as streams:
        for domains, returns in calls:
            world.launch_on(streams, "combine", domains)
            world.launch_on(streams, "rail_return", returns)
    assert fails(world, lambda: check_sums(works[0], results[0])) == (mutation != 0)
