"""Deadlines name who is missing, and each ordering claim of the kernels is needed.

The negative controls take one claim away (csrc/kernels/mutation.cuh), make one rank late where it
matters, and must see wrong data.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernel_world import (
    FORMS,
    GRACE_S,
    check_all_name,
    check_plans,
    check_round,
    check_rows,
    check_sums,
    combine,
    dispatch,
    fails,
    new_round,
    new_world,
    route,
    routing_of,
    set_timeout,
    small,
    with_small,
)
from torch import Tensor

from ep_dispatcher.bench.one_gpu import OneGpuWorld
from ep_dispatcher.bench.one_gpu_spec import Round, make_round

pytestmark = [pytest.mark.gpu(1), pytest.mark.fault]

ROUTE_COUNTS, DISPATCH_READY, COMBINE_READY, COMBINE_PARTIAL = 2, 3, 5, 7  # EpPhase
LATE_RANK = 3
LATE_US = 3000
DEADLINE_S = 0.2


def _calls(world: OneGpuWorld, work: Round, name: str) -> list[object]:
    """Arguments of one kernel of a round whose plan is made."""
    plans = route(world, work)
    if name == "route":
        return world.route_calls(plans, work.topk_idx)
    if name == "dispatch":
        outputs = world.new_outputs(work.rows, weights=True)
        return world.dispatch_calls(plans, work.x, work.topk_weights, outputs)
    out = [torch.empty_like(rows) for rows in work.x]
    return world.combine_calls(plans, work.expert_out, out)


# What ranks wait for that lack a rank, by kernel. Pushing, the first records of every channel with
# this routing include some of the last rank, so that nobody comes to a wait for another rank.
_PHASES = {
    "route": {ROUTE_COUNTS},
    "dispatch": {DISPATCH_READY},
    "combine": {COMBINE_READY, COMBINE_PARTIAL},
}


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        pytest.param(name, phases, marks=small if name == "combine" else ())
        for name, phases in _PHASES.items()
    ],
    ids=list(_PHASES),
)
def test_a_rank_that_never_calls_is_named(name: str, phases: set[int]) -> None:
    world = new_world()
    work = new_round(world, "uniform")
    check_round(world, work)
    set_timeout(world, DEADLINE_S)
    calls = _calls(world, work, name)
    torch.cuda.synchronize()
    start = time.monotonic()
    world.launch(name, calls[:LATE_RANK])
    torch.cuda.synchronize()
    assert time.monotonic() - start < DEADLINE_S + GRACE_S  # they have left
    check_all_name(world, LATE_RANK, phases, start, DEADLINE_S)
    fresh = new_world()
    check_round(fresh, new_round(fresh))


@pytest.mark.parametrize("name", ["route", "dispatch", "combine"])
def test_a_rank_past_the_deadline_is_named_and_one_before_it_is_not(name: str) -> None:
    """It stalls for longer than the others may take to tell of it."""
    deadline_s = 0.3
    world = new_world(mutations=True, timeout_s=deadline_s)
    work = new_round(world, "uniform")
    check_round(world, work)
    world.contexts[LATE_RANK].test_delay_us = 100_000
    check_round(world, work)
    world.contexts[LATE_RANK].test_delay_us = 0
    calls: list[Any] = _calls(world, work, name)
    for call in calls:
        context = call.context
        context.test_delay_us = 1_500_000 if context.ep_rank == LATE_RANK else 0
        call.context = context
    torch.cuda.synchronize()
    start = time.monotonic()
    world.launch(name, calls)
    check_all_name(world, LATE_RANK, _PHASES[name], start, deadline_s)
    torch.cuda.synchronize()
    fresh = new_world()
    check_round(fresh, new_round(fresh))


_GARBAGE = 1 << 30  # as a row, a rank or a slot: far outside all memory


def _late_or_missing(world: OneGpuWorld, calls: list[Any], *, late: bool) -> list[Any]:
    """Calls of which the last rank's is made past the deadline, or not at all."""
    if not late:
        return calls[:LATE_RANK]
    context = calls[LATE_RANK].context
    context.test_delay_us = 700_000
    calls[LATE_RANK].context = context
    return calls


@pytest.mark.parametrize(
    ("failed", "late", "streams"),
    [
        pytest.param("route", False, False, marks=small),
        pytest.param("combine", False, False, marks=small),
        ("route", True, False),
        ("route", False, True),
        ("route", True, True),
        ("combine", False, True),
    ],
)
def test_launches_behind_a_failed_one_write_nothing(failed: str, late: bool, streams: bool) -> None:
    """Their plan would lead outside all memory."""
    if streams:  # kernels of a single rank are loaded
        alone = new_world(mutations=late, ep_size=1)
        check_round(alone, new_round(alone), streams=True)
    world = new_world(mutations=late)
    work = new_round(world, "uniform")
    check_round(world, work, streams=streams)
    good = route(world, work)
    bad = [world.new_plan(rank, *topk.shape) for rank, topk in enumerate(work.topk_idx)]
    for plan in bad:
        for tensor in plan.tensors.values():
            tensor.fill_(_GARBAGE)
    outputs = world.new_outputs(work.rows, weights=True)
    rows, row_grads = world.place_rows(work.expert_out, work.row_grads)
    out = [torch.full_like(x, float("nan")) for x in work.x]
    grads = [torch.full_like(weights, float("nan")) for weights in work.topk_weights]
    torch.cuda.synchronize()
    set_timeout(world, 0.2)
    planning = world.route_calls(bad, work.topk_idx)
    combining = [world.combine_calls(bad, rows, out, row_grads, grads, form) for form in FORMS]
    first = planning if failed == "route" else world.combine_calls(good, work.expert_out, out)
    behind = [("route", world.route_calls(bad, work.topk_idx))] if failed == "combine" else []
    behind.append(("dispatch", world.dispatch_calls(bad, work.x, work.topk_weights, outputs)))
    behind += [("combine", calls) for calls in combining]
    first = _late_or_missing(world, first, late=late)
    world.launch(failed, first, streams=streams)
    for name, calls in behind:
        world.launch(name, calls[: len(first)], streams=streams)
    torch.cuda.synchronize()
    faults = [fault for fault in map(world.fault, range(LATE_RANK)) if fault.filed]
    phases = {ROUTE_COUNTS} if failed == "route" else {COMBINE_READY, COMBINE_PARTIAL}
    assert LATE_RANK in {fault.peer for fault in faults}
    assert {fault.phase for fault in faults} <= phases
    for output in outputs:
        for written in output:
            assert written is not None
            assert bool((written.view(torch.uint8) == 0xDE).all())
    assert all(bool(tensor.isnan().all()) for tensor in grads)
    if failed == "route":
        assert all(bool(tensor.isnan().all()) for tensor in out)
    else:
        assert all(bool((t == _GARBAGE).all()) for plan in bad for t in plan.tensors.values())
    fresh = new_world()
    check_round(fresh, new_round(fresh))


@pytest.mark.parametrize("seed", with_small(range(8), [0]))
def test_random_delays_change_nothing(seed: int) -> None:
    world = new_world(mutations=True, ring_depth=2)
    generator = torch.Generator().manual_seed(seed)
    works = [new_round(world, kind, seed=seed) for kind in ("uniform", "duplicates", "skewed")]
    for work in works * 3:
        delays = torch.randint(0, 400, (4,), generator=generator).tolist()
        for context, delay in zip(world.contexts, delays, strict=True):
            context.test_delay_us = delay
        check_round(world, work, streams=bool(seed % 2))


# test_mutation values: csrc/kernels/mutation.cuh
def _mutate(world: OneGpuWorld, mutation: int, late_rank: int = LATE_RANK) -> None:
    for context in world.contexts:
        context.test_mutation = mutation
        context.test_delay_us = LATE_US if context.ep_rank == late_rank else 0


def _warm_world(**sizes: object) -> OneGpuWorld:
    """A mutated world whose kernels are loaded, also those of a single rank."""
    alone = new_world(mutations=True, ep_size=1)
    check_round(alone, new_round(alone), streams=True)
    world = new_world(mutations=True, **sizes)
    check_round(world, new_round(world, seed=7))
    return world


@pytest.mark.parametrize("mutation", [0, 1, 2])
def test_route_needs_its_flag_order_and_its_wait(mutation: int) -> None:
    """Claims O1 and O2 of route; mutation 0 is the control that must pass."""
    world = _warm_world()
    _mutate(world, mutation)
    works = [new_round(world, kind, seed=seed) for seed, kind in enumerate(["uniform", "skewed"])]
    failures = []
    for work in works:
        plans = route(world, work)
        failures.append(fails(world, lambda: check_plans(world, work, plans)))  # noqa: B023
    assert any(failures) == (mutation != 0)


@pytest.mark.parametrize("mutation", with_small([0, 3], [0]))
def test_route_needs_two_buffers(mutation: int) -> None:
    """Claim O3 of route: rank 3 still reads epoch e while the others write epoch e + 1."""
    world = _warm_world()
    _mutate(world, mutation)
    works = [new_round(world, kind, seed=seed) for seed, kind in enumerate(["uniform", "skewed"])]
    plans = [
        [world.new_plan(rank, *topk.shape) for rank, topk in enumerate(work.topk_idx)]
        for work in works
    ]
    calls = [world.route_calls(own, work.topk_idx) for own, work in zip(plans, works, strict=True)]
    with world.rank_streams(4) as streams:
        for call in calls:
            world.launch_on(streams, "route", call)
    failed = fails(world, lambda: check_plans(world, works[0], plans[0]))
    assert failed == (mutation != 0)


@pytest.mark.parametrize("mutation", [0, 4])
def test_route_needs_its_grid_barrier(mutation: int) -> None:
    """Claim O4 of route: a block of rank 3 is late, and the others would take its old counts."""
    world = _warm_world()
    _mutate(world, mutation)
    work = new_round(world, "skewed", seed=1)
    plans = route(world, work)
    assert fails(world, lambda: check_plans(world, work, plans)) == (mutation != 0)


@pytest.mark.parametrize("mutation", [16, 15])
def test_dispatch_needs_its_stages_to_be_read_before_they_are_loaded(mutation: int) -> None:
    """Claim O4 of dispatch: a stage is written as soon as its stores are issued.

    16 waits until they have read it, 15 does not. Eight long stores a token: the last of them
    is read after seven others, and the end of the stage, where the test writes, after the rest.
    """
    world = _warm_world(hidden=3584, num_topk=8, max_tokens=256, num_channels=1)
    work = new_round(world, "uniform")
    plans = route(world, work)
    _mutate(world, mutation)
    assert fails(world, lambda: check_rows(work, dispatch(world, work, plans))) == (mutation == 15)


def _rows_at_the_end_of_each_kernel(
    world: OneGpuWorld, work: Round
) -> Sequence[tuple[Tensor, Tensor | None]]:
    """Copies that each rank takes as soon as its own dispatch kernel has ended."""
    plans = route(world, work)
    outputs = world.new_outputs(work.rows, weights=True)
    calls = world.dispatch_calls(plans, work.x, work.topk_weights, outputs)
    copies = [(torch.empty_like(rows), torch.empty_like(weights)) for rows, weights in outputs
              if weights is not None]  # fmt: skip
    with world.rank_streams(4) as streams:
        world.launch_on(streams, "dispatch", calls)
        for stream, copy, output in zip(streams, copies, outputs, strict=True):
            with torch.cuda.stream(stream):
                for to, source in zip(copy, output, strict=True):
                    assert source is not None
                    to.copy_(source)
    return copies


@pytest.mark.parametrize("mutation", with_small([0, 11, 12], [0]))
def test_dispatch_needs_its_flag_order_and_its_last_wait(mutation: int) -> None:
    """Claims O1 and O2 of dispatch: rows are there when a rank's own kernel ends."""
    world = _warm_world()
    work = new_round(world, "uniform")
    _mutate(world, mutation)
    copies = _rows_at_the_end_of_each_kernel(world, work)
    assert fails(world, lambda: check_rows(work, copies)) == (mutation != 0)


@pytest.mark.parametrize("mutation", [0, 14])
def test_further_copies_need_the_progress_of_the_sender(mutation: int) -> None:
    """Claim O5 of dispatch: without it, a receiver copies rows that have not come yet."""
    world = _warm_world()
    work = new_round(world, "uniform")
    plans = route(world, work)
    _mutate(world, mutation)
    outputs = dispatch(world, work, plans, duplicate=1)
    assert fails(world, lambda: check_rows(work, outputs)) == (mutation != 0)


@pytest.mark.parametrize("mutation", [0, 13])
def test_dispatch_needs_its_entry(mutation: int) -> None:
    """Claim O3 of dispatch: without it, rows go where the last launch wanted them."""
    world = _warm_world()
    work = new_round(world, "uniform")
    plans = route(world, work)
    dispatch(world, work, plans, shift_bytes=0)
    _mutate(world, mutation)
    outputs = dispatch(world, work, plans, shift_bytes=4096)
    assert fails(world, lambda: check_rows(work, outputs)) == (mutation != 0)


@pytest.mark.parametrize("mutation", [0, 21, 22, 23, 25])
def test_combine_needs_its_flag_order_its_wait_its_credits_and_its_sums(mutation: int) -> None:
    """Claims O1, O2, O3 and O5 of combine; 25 hands an outbox over before the sums are in it."""
    world = _warm_world(ring_depth=1)
    work = new_round(world, "uniform")
    plans = route(world, work)
    _mutate(world, mutation)
    for context in world.contexts:
        context.test_delay_us //= 10  # it stalls at every row
    sums = combine(world, work, plans)
    assert fails(world, lambda: check_sums(work, sums)) == (mutation != 0)


@pytest.mark.parametrize("mutation", with_small([0, 24], [0]))
def test_combine_needs_its_entry(mutation: int) -> None:
    """Claim O4 of combine: rank 3 still reads its rings while the others start the next launch."""
    world = _warm_world(ring_depth=32, num_channels=1)
    works = [
        make_round(world, routing_of("uniform", [24] * 4, 4, 16, seed), seed=seed)
        for seed in range(2)
    ]
    plans = [route(world, work) for work in works]
    torch.cuda.synchronize()
    _mutate(world, mutation)
    sums, calls = [], []
    for work, own in zip(works, plans, strict=True):
        out = [torch.full_like(rows, float("nan")) for rows in work.x]
        grads = [torch.full_like(weights, float("nan")) for weights in work.topk_weights]
        sums.append((out, grads))
        calls.append(world.combine_calls(own, work.expert_out, out, work.row_grads, grads))
    with world.rank_streams(4) as streams:
        for call in calls:
            world.launch_on(streams, "combine", call)
    assert fails(world, lambda: check_sums(works[0], sums[0])) == (mutation != 0)
