"""The kernels equal the specification bit for bit, on one GPU with all ranks in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_world import (
    FORMS,
    check_plans,
    check_round,
    check_rows,
    check_sums,
    combine,
    dispatch,
    new_round,
    new_world,
    route,
    routing_of,
    small,
    with_small,
)

from ep_dispatcher.bench.one_gpu_spec import make_round

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize(
    ("kind", "ep_size", "alignment"),
    [
        pytest.param(kind, ranks, rows, marks=small if (ranks, rows) == (2, 16) else ())
        for kind in ("uniform", "skewed", "all_to_one", "duplicates", "mostly_dropped")
        for ranks in (1, 2, 4, 8)
        for rows in (1, 16, 128)
    ],
)
def test_a_round_equals_the_specification(kind: str, ep_size: int, alignment: int) -> None:
    world = new_world(ep_size=ep_size)
    check_round(world, new_round(world, kind, seed=ep_size, alignment=alignment))


@small
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden": 64, "max_tokens": 70},
        {"hidden": 3720, "ring_depth": 1},  # rows of two segments in dispatch, three in gather
        {"hidden": 40, "dtype": torch.float32, "exact": True, "ep_size": 3, "num_channels": 1},
    ],
    ids=["two chunks", "segments", "exact"],
)
def test_a_tiny_round(sizes: dict[str, Any]) -> None:
    """Every kernel in every form, as small as can be."""
    tiny = {"ep_size": 2, "num_experts": 6, "num_topk": 3, "max_tokens": 12, "num_channels": 2}
    world = new_world(**(tiny | {"timeout_s": 60.0, "output_bytes": 1 << 20} | sizes))
    check_round(world, new_round(world, alignment=4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("hidden", with_small([8, 72, 1024, 2880, 7168, 7176, 16384], [72]))
def test_rows_of_any_length_and_type(dtype: torch.dtype, exact: bool, hidden: int) -> None:
    world = new_world(hidden=hidden, dtype=dtype, exact=exact, max_tokens=40)
    check_round(world, new_round(world))


@pytest.mark.parametrize(
    ("num_experts", "num_topk"),
    [
        pytest.param(4, 1, marks=small), (10, 2), (16, 4), (64, 22),
        pytest.param(64, 33, marks=small), (256, 8), (300, 64),
    ],
)  # fmt: skip
def test_any_number_of_experts_and_slots(num_experts: int, num_topk: int) -> None:
    world = new_world(num_experts=num_experts, num_topk=num_topk, max_tokens=100)
    check_round(world, new_round(world, "uniform"))
    check_round(world, new_round(world, "duplicates"))


@pytest.mark.parametrize(
    "tokens",
    with_small(
        [[0, 0, 0, 0], [1, 1, 1, 1], [0, 77, 0, 5], [1, 0, 0, 0], [128, 63, 64, 65]],
        [[0, 0, 0, 0], [1, 1, 1, 1], [0, 77, 0, 5]],
    ),
)
def test_any_number_of_tokens(tokens: list[int]) -> None:
    world = new_world()
    for kind in ("uniform", "duplicates"):
        check_round(world, make_round(world, routing_of(kind, tokens, 4, 16)))


@small
def test_a_token_may_choose_all_experts_of_a_rank() -> None:
    world = new_world(num_experts=16, num_topk=4)
    routing = [torch.arange(4 * rank, 4 * rank + 4).expand(50, 4).contiguous() for rank in range(4)]
    check_round(world, make_round(world, routing))


@small
def test_experts_may_live_anywhere() -> None:
    world = new_world(num_experts=7, expert_rank=(3, 0, 2, 0, 1, 3, 3))
    check_round(world, new_round(world))


@small
def test_k_may_differ_from_call_to_call() -> None:
    world = new_world()
    for num_topk in (4, 1, 3, 2):
        check_round(world, make_round(world, routing_of("duplicates", [64] * 4, num_topk, 16)))


@pytest.mark.parametrize("num_channels", with_small([1, 2, 3, 4, 8, 16], [3]))
def test_the_number_of_blocks_does_not_change_a_bit(num_channels: int) -> None:
    world = new_world(num_channels=num_channels)
    check_round(world, new_round(world))


@pytest.mark.parametrize("ring_depth", with_small([1, 2, 32], [1]))
def test_the_ring_may_have_any_depth(ring_depth: int) -> None:
    world = new_world(ring_depth=ring_depth, num_channels=2)
    check_round(world, new_round(world))
    check_round(world, new_round(world, "all_to_one"))


def test_many_tokens_in_several_tiles_of_a_block() -> None:
    world = new_world(hidden=8, max_tokens=9000, num_channels=2, num_topk=8, num_experts=64)
    check_round(world, new_round(world, "skewed"))


@pytest.mark.parametrize("capacity_rows", with_small([0, 1, 100, 333, 100000], [0, 333]))
def test_rows_past_the_capacity_are_dropped_on_both_sides(capacity_rows: int) -> None:
    world = new_world(num_channels=3)
    for alignment in (1, 16):
        work = new_round(world, "skewed", alignment=alignment, capacity_rows=capacity_rows)
        check_round(world, work)


@small
@pytest.mark.parametrize("form", FORMS)
def test_a_sum_of_one_term_keeps_its_bits_and_of_none_is_plus_zero(form: str) -> None:
    world = new_world(dtype=torch.float16, num_topk=2)
    routing = [torch.full((20, 2), -1) for _ in range(4)]
    routing[1][3, 0] = 7
    work = make_round(world, routing)
    plans = route(world, work)
    for term in (-32768, 0x7C01):  # -0, and a NaN whose payload arithmetic would change
        work.expert_out[1].view(torch.int16).fill_(term)
        out, _ = combine(world, work, plans, form=form)
        bits = out[1].view(torch.int16)
        assert bits[3].tolist() == [term] * world.shape.hidden
        bits[3] = 0
        assert not bits.any()


@small
@pytest.mark.parametrize("form", FORMS)
def test_sums_follow_the_specified_order(form: str) -> None:
    """2^24, 1, -2^24 sum to 0 or 1 depending on the order."""
    world = new_world(ep_size=1, num_experts=3, num_topk=3, dtype=torch.float32, hidden=8)
    routing = [torch.tensor([[2, 0, 1], [0, 1, 2]])]
    work = make_round(world, routing)
    for expert, value in enumerate([2.0**24, 1.0, -(2.0**24)]):
        work.expert_out[0][2 * expert : 2 * expert + 2] = value
    out, _ = combine(world, work, route(world, work), form=form)
    assert out[0].tolist() == [[0.0] * 8] * 2


@small
def test_plans_may_be_used_in_any_order_and_any_number_of_times() -> None:
    world = new_world()
    first, second = new_round(world, seed=1), new_round(world, "skewed", seed=2, alignment=16)
    plans = {0: route(world, first), 1: route(world, second)}
    work = {0: first, 1: second}
    for at in (0, 1, 0, 0, 1):
        check_rows(work[at], dispatch(world, work[at], plans[at]))
    for at, form in enumerate(FORMS * 4):
        one = at * 5 // 3 % 2
        check_sums(work[one], combine(world, work[one], plans[one], form=form))
    check_rows(first, dispatch(world, first, plans[0]))


@pytest.mark.parametrize("duplicate", with_small([0, 1], [0]), ids=["sender", "receiver"])
def test_two_rounds_may_be_under_way_at_once(duplicate: int) -> None:
    """Dispatch, dispatch, combine, combine; the host waits for none of them."""
    world = new_world()
    works = [new_round(world, "uniform", seed=1), new_round(world, "skewed", seed=2)]
    plans = [route(world, work) for work in works]
    for form in FORMS:
        rows = [
            [(x.clone(), None if weights is None else weights.clone()) for x, weights in outputs]
            for outputs in (
                dispatch(world, *pair, duplicate=duplicate)
                for pair in zip(works, plans, strict=True)
            )
        ]
        sums = [combine(world, *pair, form=form) for pair in zip(works, plans, strict=True)]
        for work, work_rows, work_sums in zip(works, rows, sums, strict=True):
            check_rows(work, work_rows)
            check_sums(work, work_sums)


@pytest.mark.parametrize("duplicate", [0, 1], ids=["sender", "receiver"])
def test_a_thousand_epochs_with_changing_routing(duplicate: int) -> None:
    world = new_world(hidden=64)
    works = [new_round(world, kind, seed=seed) for seed in range(3)
             for kind in ("uniform", "duplicates", "mostly_dropped")]  # fmt: skip
    for epoch in range(1000):
        work = works[epoch * 7 % len(works)]
        plans = route(world, work)
        shift = 16 * (epoch % 5)
        rows = dispatch(world, work, plans, duplicate=duplicate, shift_bytes=shift)
        sums = combine(world, work, plans, form=FORMS[epoch // 3 % 2])
        if epoch % 10 == 9:
            check_plans(world, work, plans)
        check_rows(work, rows)
        check_sums(work, sums)


def test_one_launch_for_each_rank_gives_the_same() -> None:
    world = new_world()
    check_round(world, new_round(world, "uniform"))  # loads the kernels before any of them waits
    warm = new_world(ep_size=1)
    check_round(warm, new_round(warm, "uniform"), streams=True)
    for seed in range(20):
        check_round(world, new_round(world, seed=seed), streams=True)


@pytest.mark.parametrize("duplicate", [0, 1], ids=["sender", "receiver"])
@pytest.mark.parametrize("form", FORMS)
def test_static_mode_replays_as_a_graph_with_changing_routing(form: str, duplicate: int) -> None:
    world = new_world()
    options = {"alignment": 16, "capacity_rows": 900}
    works = [new_round(world, "duplicates", seed=seed, **options) for seed in range(4)]
    held = new_round(world, "uniform", seed=99, **options)  # the graph's own memory
    check_round(world, held)
    plans = [world.new_plan(rank, *topk.shape) for rank, topk in enumerate(held.topk_idx)]
    outputs = world.new_outputs(held.rows, weights=True)
    out = [torch.empty_like(rows) for rows in held.x]
    grads = [torch.empty_like(weights) for weights in held.topk_weights]
    expert_out, row_grads = world.place_rows(held.expert_out, held.row_grads)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        world.launch("route", world.route_calls(plans, held.topk_idx, 16, 900))
        world.launch(
            "dispatch",
            world.dispatch_calls(plans, held.x, held.topk_weights, outputs, duplicate),
        )
        world.launch(
            "combine",
            world.combine_calls(plans, expert_out, out, row_grads, grads, form),
        )
    for work in works * 25:
        for name in ("topk_idx", "topk_weights", "x"):
            for to, source in zip(getattr(held, name), getattr(work, name), strict=True):
                to.copy_(source)
        for to, source in zip(
            expert_out + row_grads, work.expert_out + work.row_grads, strict=True
        ):
            to.copy_(source)
        graph.replay()
        check_plans(world, work, plans)
        check_rows(work, outputs)
        check_sums(work, (out, grads))


def test_rows_past_two_to_the_31_elements() -> None:
    """One row of a receiver lies past 2^31 elements: the sums of row numbers must be 64-bit."""
    hidden, rows = 16384, (1 << 31) // 16384 + 1000
    world = new_world(
        ep_size=1, num_experts=2, num_topk=1, hidden=hidden, max_tokens=rows,
        output_bytes=rows * (hidden * 2 + 4) + 4096, num_channels=64,
    )  # fmt: skip
    routing = [torch.zeros(rows, 1, dtype=torch.int64)]
    plans = [world.new_plan(0, rows, 1)]
    topk_idx = [routing[0].to(world.device)]
    world.launch("route", world.route_calls(plans, topk_idx))
    x = [torch.arange(rows, device=world.device, dtype=torch.float32).view(-1, 1)
         .expand(rows, hidden).to(torch.bfloat16)]  # fmt: skip
    weights = [torch.ones(rows, 1, device=world.device)]
    outputs = world.new_outputs([rows], weights=True)
    world.launch("dispatch", world.dispatch_calls(plans, x, weights, outputs))
    assert torch.equal(outputs[0][0], x[0])
    for form in FORMS:
        out = [torch.full_like(x[0], float("nan"))]
        calls = world.combine_calls(plans, [outputs[0][0]], out, form=form)
        world.launch("combine", calls)
        assert torch.equal(out[0], x[0])


@small
def test_bad_experts_and_unequal_alignments_are_named() -> None:
    world = new_world()
    work = new_round(world, "uniform")
    work.topk_idx[2][5, 1] = 16
    plans = route(world, work)
    torch.cuda.synchronize()
    letters = [world.mailbox(plan) for plan in plans]
    assert [(letter.bad_token, letter.bad_expert) for letter in letters] == [
        (-1, -1), (-1, -1), (5, 16), (-1, -1),
    ]  # fmt: skip
    assert [letter.refused_rank for letter in letters] == [2, 2, 2, 2]
    check_round(world, new_round(world, "uniform"))
    calls = world.route_calls(plans, work.topk_idx)
    calls[3].alignment = 16
    work.topk_idx[2][5, 1] = 0
    world.launch("route", calls)
    torch.cuda.synchronize()
    assert [world.mailbox(plan).refused_rank for plan in plans] == [3, 3, 3, 0]
    check_round(world, new_round(world, "uniform"))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("row_bytes", 24, "multiple of 16"), ("recv_x_offset", 8, "multiple of 16"),
     ("recv_rows", -1, "must be in"), ("duplicate", 5, "must be in")],
)  # fmt: skip
def test_arguments_out_of_range_are_refused_before_a_launch(
    field: str, value: int, words: str
) -> None:
    world = new_world()
    work = new_round(world)
    plans = route(world, work)
    outputs = world.new_outputs(work.rows, weights=True)
    calls = world.dispatch_calls(plans, work.x, work.topk_weights, outputs)
    setattr(calls[1], field, value)
    with pytest.raises(ValueError, match=words):
        world.launch("dispatch", calls)
    check_rows(work, dispatch(world, work, plans))
