"""Combine by gathering: its deadlines name who is missing, and each ordering claim is needed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from kernel_world import (
    FORMS,
    GRACE_S,
    check_all_name,
    check_round,
    check_sums,
    combine,
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

GATHER_READY, GATHER_DONE, GRADIENTS = 9, 10, 20  # EpPhase
LATE_RANK = 3
DEADLINE_S = 0.2


def _warm_world() -> OneGpuWorld:
    """A mutated world whose kernels are loaded, also those of a single rank."""
    alone = new_world(mutations=True, ep_size=1)
    check_round(alone, new_round(alone), streams=True)
    world = new_world(mutations=True)
    check_round(world, new_round(world, seed=7))
    return world


def _mutate(world: OneGpuWorld, mutation: int) -> None:
    """Take a claim of csrc/kernels/combine_gather.cu away and make one rank late."""
    for context in world.contexts:
        context.test_mutation = mutation
        context.test_delay_us = 3000 if context.ep_rank == LATE_RANK else 0


@pytest.mark.parametrize("mutation", [0, 31])
def test_rows_are_read_only_after_their_owner_came(mutation: int) -> None:
    """Claim G1: without it, rows are read where they lay in the last launch."""
    world = _warm_world()
    first, work = new_round(world, "uniform", seed=1), new_round(world, "uniform", seed=2)
    combine(world, first, route(world, first), form="gather", shift_bytes=0)
    plans = route(world, work)
    torch.cuda.synchronize()
    _mutate(world, mutation)
    sums = combine(world, work, plans, form="gather", shift_bytes=4096)
    assert fails(world, lambda: check_sums(work, sums)) == (mutation != 0)


@pytest.mark.parametrize("mutation", with_small([0, 32, 33], [0]))
def test_rows_may_be_overwritten_once_the_kernel_of_their_owner_has_ended(mutation: int) -> None:
    """Claims G2 and G3: the late rank has read all it needs, or the others' kernels still run."""
    world = _warm_world()
    work = new_round(world, "uniform")
    plans = route(world, work)
    rows, row_grads = world.place_rows(work.expert_out, work.row_grads)
    out = [torch.full_like(x, float("nan")) for x in work.x]
    grads = [torch.full_like(weights, float("nan")) for weights in work.topk_weights]
    torch.cuda.synchronize()
    _mutate(world, mutation)
    calls = world.combine_calls(plans, rows, out, row_grads, grads, "gather")
    with world.rank_streams(4) as streams:
        world.launch_on(streams, "combine", calls)
        for stream, own in zip(streams, zip(rows, row_grads, strict=True), strict=True):
            with torch.cuda.stream(stream):
                for tensor in own:
                    tensor.zero_()
    assert fails(world, lambda: check_sums(work, (out, grads))) == (mutation != 0)


@pytest.mark.parametrize("mutation", with_small([35, 34], [35]))
def test_a_stage_is_loaded_again_only_after_it_was_read(mutation: int) -> None:
    """Claim G4: 34 starts the next load before a stage is read, 35 reads as late after the load."""
    world = _warm_world()
    work = new_round(world, "uniform")
    plans = route(world, work)
    torch.cuda.synchronize()
    _mutate(world, mutation)
    for context in world.contexts:
        context.test_delay_us //= 100  # it stalls at every term
    sums = combine(world, work, plans, form="gather")
    assert fails(world, lambda: check_sums(work, sums)) == (mutation == 34)


def _calls(world: OneGpuWorld, work: Round) -> list[Any]:
    """Arguments of a combine whose plan is made."""
    plans = route(world, work)
    rows, row_grads = world.place_rows(work.expert_out, work.row_grads)
    out = [torch.empty_like(x) for x in work.x]
    grads = [torch.empty_like(weights) for weights in work.topk_weights]
    return world.combine_calls(plans, rows, out, row_grads, grads, "gather")


@small
def test_a_rank_that_never_calls_is_named() -> None:
    world = new_world()
    work = new_round(world, "uniform")
    check_round(world, work)
    set_timeout(world, DEADLINE_S)
    calls = _calls(world, work)
    torch.cuda.synchronize()
    start = time.monotonic()
    world.launch("combine", calls[:LATE_RANK])
    torch.cuda.synchronize()
    assert time.monotonic() - start < DEADLINE_S + GRACE_S  # they have left
    check_all_name(world, LATE_RANK, {GATHER_READY}, start, DEADLINE_S)
    fresh = new_world()
    check_round(fresh, new_round(fresh))


def test_a_rank_that_comes_past_the_deadline_is_named() -> None:
    """It stalls for longer than the others may take to tell of it."""
    world = new_world(mutations=True)
    work = new_round(world, "uniform")
    check_round(world, work)
    set_timeout(world, DEADLINE_S)
    calls = _calls(world, work)
    late = calls[LATE_RANK].context
    late.test_delay_us = 1_500_000
    calls[LATE_RANK].context = late
    torch.cuda.synchronize()
    start = time.monotonic()
    world.launch("combine", calls)
    check_all_name(world, LATE_RANK, {GATHER_READY}, start, DEADLINE_S)
    torch.cuda.synchronize()
    fresh = new_world()
    check_round(fresh, new_round(fresh))


def _combine_without_gradients(
    world: OneGpuWorld, work: Round, form: str, lacking: set[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Combine where some ranks neither give gradients of weights nor want them."""
    plans = route(world, work)
    rows, row_grads = world.place_rows(work.expert_out, work.row_grads)
    out = [torch.full_like(x, float("nan")) for x in work.x]
    grads = [torch.full_like(weights, float("nan")) for weights in work.topk_weights]
    calls: list[Any] = world.combine_calls(plans, rows, out, row_grads, grads, form)
    for rank in lacking:
        calls[rank].row_weights_grad = calls[rank].weights_grad = 0
        calls[rank].row_weights_grad_offset = -1
    torch.cuda.synchronize()
    world.launch("combine", calls)
    torch.cuda.synchronize()
    return out, grads


@small
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lacking", [{LATE_RANK}, {0, 1, 2}], ids=["one_lacks", "one_gives"])
def test_gradients_on_some_ranks_only_are_told_on_all(form: str, lacking: set[int]) -> None:
    """Long before the deadline; one of the two ranks gave them, the other did not."""
    world = new_world(timeout_s=30.0)
    work = new_round(world, "uniform")
    check_round(world, work)
    start = time.monotonic()
    _combine_without_gradients(world, work, form, lacking)
    assert time.monotonic() - start < 15.0  # also under compute-sanitizer
    for fault in map(world.fault, range(4)):
        assert fault.filed
        assert fault.phase == GRADIENTS
        assert (fault.rank in lacking) != (fault.peer in lacking)
    fresh = new_world()
    check_round(fresh, new_round(fresh))


@small
def test_a_rank_that_shares_no_record_may_give_no_gradients() -> None:
    """Pushing: it has neither tokens nor rows, so that nobody asks it for any."""
    world = new_world()
    work = make_round(world, routing_of("uniform", [24, 24, 24, 0], 4, 12))  # experts of ranks 0-2
    sums = _combine_without_gradients(world, work, "push", {LATE_RANK})
    assert not any(world.fault(rank).filed for rank in range(4))
    check_sums(work, sums)


def test_a_rank_that_stalls_while_it_reads_is_named() -> None:
    """Mutation 32 makes the late rank stall once more after its entry."""
    world = new_world(mutations=True, timeout_s=DEADLINE_S)
    work = new_round(world, "uniform")
    check_round(world, work)
    plans = route(world, work)
    torch.cuda.synchronize()
    for context in world.contexts:
        context.test_mutation = 32 if context.ep_rank == LATE_RANK else 0
        context.test_delay_us = 150_000 if context.ep_rank == LATE_RANK else 0
    start = time.monotonic()
    combine(world, work, plans, form="gather")  # 0.15 s before its entry, and again after it
    check_all_name(world, LATE_RANK, {GATHER_DONE}, start, DEADLINE_S)
    torch.cuda.synchronize()
    fresh = new_world()
    check_round(fresh, new_round(fresh))


@pytest.mark.parametrize("seed", with_small(range(4), [0]))
def test_random_delays_change_nothing(seed: int) -> None:
    world = new_world(mutations=True)
    generator = torch.Generator().manual_seed(seed)
    works = [new_round(world, kind, seed=seed) for kind in ("uniform", "duplicates", "skewed")]
    for work in works * 3:
        delays = torch.randint(0, 400, (4,), generator=generator).tolist()
        for context, delay in zip(world.contexts, delays, strict=True):
            context.test_delay_us = delay
        plans = route(world, work, streams=bool(seed % 2))
        check_sums(work, combine(world, work, plans, streams=bool(seed % 2), form="gather"))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("expert_out_offset", 8, "multiple of 16"), ("expert_out_offset", -16, "must be in"),
     ("row_weights_grad_offset", 2, "multiple of 4"), ("form", 2, "must be in")],
)  # fmt: skip
def test_arguments_out_of_range_are_refused_before_a_launch(
    field: str, value: int, words: str
) -> None:
    world = new_world()
    work = new_round(world)
    plans = route(world, work)
    rows, _ = world.place_rows(work.expert_out, work.row_grads)
    out = [torch.empty_like(x) for x in work.x]
    calls = world.combine_calls(plans, rows, out, form="gather")
    setattr(calls[1], field, value)
    with pytest.raises(ValueError, match=words):
        world.launch("combine", calls)
    check_sums(work, combine(world, work, plans, form="gather"))
