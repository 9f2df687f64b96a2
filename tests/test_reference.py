"""The reference tier: layout, order of sums, gradients; whole worlds over thread ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import World, combined, dispatched
from torch import Tensor
from worlds import config_of, each_rank, rows_for, run_world, weights_for, worlds

from ep_dispatcher import EPGroup, Placement
from ep_dispatcher.reference import ordered_sum
from ep_dispatcher.testing import make_routing, marked_weights

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def four_ranks(topk_idx: list[Tensor], num_experts: int = 8, **changes: object) -> World:
    """A world of one rank per list entry with equal blocks of experts."""
    num_ranks = len(topk_idx)
    world = World(
        topk_idx=topk_idx,
        expert_rank=Placement.even(num_experts, num_ranks).expert_rank,
        num_ranks=num_ranks,
        domain_size=num_ranks,
        hidden=16,
    )
    return replace(world, **changes)  # type: ignore[arg-type]


def assert_forward_and_backward(world: World, dtype: torch.dtype, seed: int = 0) -> None:
    """Every value and gradient of a world is bit for bit the oracle's."""
    x, weights = rows_for(world, dtype, seed), weights_for(world, seed=seed + 1)
    ran = run_world(world, x, weights)
    wanted = dispatched(world, x, weights)
    for got, (recv_x, recv_weights) in zip(ran, wanted, strict=True):
        assert torch.equal(got.recv_x, recv_x)
        assert torch.equal(got.recv_weights, recv_weights)
    expert_out = [(recv_x * recv_weights.unsqueeze(1)).to(dtype) for recv_x, recv_weights in wanted]
    ones = [torch.ones_like(rows) for rows in x]
    back = dispatched(world, ones, weights)  # what combine's backward gives each row
    grad_rows = [
        (grad * recv_weights.unsqueeze(1)).to(dtype)
        for (grad, _), (_, recv_weights) in zip(back, wanted, strict=True)
    ]
    for got, out, grad_x in zip(
        ran, combined(world, expert_out), combined(world, grad_rows), strict=True
    ):
        assert torch.equal(got.out, out)
        assert torch.equal(got.grad_x, grad_x)
    for got, grad_weights in zip(ran, _weight_gradients(world, x), strict=True):
        torch.testing.assert_close(got.grad_weights, grad_weights, rtol=2e-2, atol=2e-2)


def _weight_gradients(world: World, x: list[Tensor]) -> list[Tensor]:
    """Gradient of sum(out) for a slot is the sum of its token's row; 0 where nothing is sent."""
    return [
        rows.float().sum(1, keepdim=True) * (idx >= 0)
        for rows, idx in zip(x, world.topk_idx, strict=True)
    ]


@given(worlds(), st.sampled_from(DTYPES))
def test_any_world_equals_the_oracle(world: World, dtype: torch.dtype) -> None:
    """Dispatch, weights, combine and gradients, bit for bit, for any routing and topology."""
    assert_forward_and_backward(world, dtype)


@given(worlds())
def test_combine_is_the_adjoint_of_dispatch(world: World) -> None:
    """<dispatch(x), y> == <x, combine(y)> over all ranks; exact, as the values are integers."""
    generator = torch.Generator().manual_seed(3)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, generator=generator).float()

    x = [integers(len(idx), world.hidden) for idx in world.topk_idx]

    def work(group: EPGroup, rank: int) -> tuple[float, float]:
        plan = group.plan(world.topk_idx[rank])
        recv_x, _ = group.dispatch(plan, x[rank])
        y = torch.arange(recv_x.numel()).view_as(recv_x).remainder(7).float()
        out = group.combine(plan, y)
        return float((recv_x * y).sum()), float((x[rank] * out).sum())

    pairs = each_rank(world, config_of(world, torch.float32), work)
    assert sum(a for a, _ in pairs) == sum(b for _, b in pairs)


def test_ragged_ranks_then_all_tokens_to_one_expert() -> None:
    """4 ranks, 8 experts, K=1, T = [4, 4, 4, 0]; then every token to expert 0."""
    ragged = [make_routing(t, 1, 8, seed=r) for r, t in enumerate([4, 4, 4, 0])]
    assert_forward_and_backward(four_ranks(ragged), torch.float32)
    world = four_ranks([torch.zeros_like(idx) for idx in ragged])
    assert_forward_and_backward(world, torch.float32)
    ran = run_world(world, rows_for(world, torch.float32), weights_for(world))
    assert [r.plan.num_recv_rows for r in ran] == [12, 0, 0, 0]


def test_token_count_may_change_every_step() -> None:
    """One group: T grows, shrinks to 1 and to 0, and grows past the first step's."""
    steps = [
        [make_routing(t + rank % 2, 2, 8, seed=t + rank) for rank in range(4)]
        for t in (5, 9, 1, 0, 17, 3)
    ]
    world = four_ranks(steps[0])

    def work(group: EPGroup, rank: int) -> list[Tensor]:
        outs = []
        for step in steps:
            plan = group.plan(step[rank])
            rows = torch.full((len(step[rank]), 16), float(rank + 1))
            outs.append(group.combine(plan, group.dispatch(plan, rows)[0]))
        return outs

    for rank, outs in enumerate(each_rank(world, config_of(world, torch.float32), work)):
        for step, out in zip(steps, outs, strict=True):
            assert torch.equal(out, torch.full((len(step[rank]), 16), 2.0 * (rank + 1)))


def test_dropped_slots_and_dropped_tokens() -> None:
    """[[0, -1], [-1, -1], [3, 0]]: a token without experts comes back as zeros."""
    idx = torch.tensor([[0, -1], [-1, -1], [3, 0]])
    world = four_ranks([idx, idx[:0]], num_experts=4)
    x = rows_for(world, torch.float32)
    weights = [torch.ones(3, 2), torch.ones(0, 2)]
    home = run_world(world, x, weights)[0]
    assert torch.equal(home.out, x[0] * torch.tensor([[1.0], [0.0], [2.0]]))
    assert torch.equal(home.grad_weights[1], torch.zeros(2))
    assert home.grad_weights[0, 1] == 0
    assert torch.equal(home.grad_x[1], torch.zeros(16))


@pytest.mark.parametrize("num_topk", [22, 33, 64])
def test_wide_topk(num_topk: int) -> None:
    """K up to all experts; the fp32 sum of 64 terms is still the oracle's bits."""
    world = four_ranks(
        [make_routing(3, num_topk, 64, seed=r) for r in range(4)], num_experts=64, domain_size=2
    )
    assert_forward_and_backward(world, torch.bfloat16)


@pytest.mark.parametrize("hidden", [72, 1024, 2048, 2880, 4096, 5120, 6144, 7168, 7176])
def test_any_width_of_whole_16_bytes(hidden: int) -> None:
    """E=10 on 4 ranks, bf16, real widths."""
    world = four_ranks(
        [make_routing(3, 2, 10, seed=r) for r in range(4)], num_experts=10, hidden=hidden
    )
    assert_forward_and_backward(world, torch.bfloat16)


def test_weights_keep_their_slots() -> None:
    """Weights 0.125 * ((rank + 1) * 100 + (token + 1) * 10 + slot): a swapped slot would show."""
    world = four_ranks([make_routing(5, 3, 8, seed=r) for r in range(4)])
    weights = [marked_weights(rank, 5, 3) for rank in range(4)]
    x = rows_for(world, torch.float32)
    ran = run_world(world, x, weights)
    for got, (_, recv_weights) in zip(ran, dispatched(world, x, weights), strict=True):
        assert torch.equal(got.recv_weights, recv_weights)
    assert len(torch.cat([r.recv_weights for r in ran]).unique()) == 60


def test_weight_gradients_go_back_to_their_slots() -> None:
    """Gradient of recv_weights is its own value, so each slot must get its own weight back."""
    world = four_ranks([make_routing(5, 3, 8, seed=r, dropped=0.3) for r in range(4)])

    def work(group: EPGroup, rank: int) -> tuple[Tensor, Tensor]:
        weights = marked_weights(rank, 5, 3).requires_grad_()
        plan = group.plan(world.topk_idx[rank])
        _, recv_weights = group.dispatch(plan, torch.ones(5, 16), weights)
        assert recv_weights is not None
        recv_weights.square().sum().backward()
        assert weights.grad is not None
        return weights.grad, weights.detach()

    results = each_rank(world, config_of(world, torch.float32), work)
    for rank, (grad, weights) in enumerate(results):
        assert torch.equal(grad, 2 * weights * (world.topk_idx[rank] >= 0))


@pytest.mark.parametrize("alignment", [1, 16, 32, 128])
def test_padding_is_zero_in_rows_weights_and_gradients(alignment: int) -> None:
    """Counts [1, 0, 33]: padding rows are zero, and what experts put there changes nothing."""
    idx = torch.tensor([[0]] + [[2]] * 33)
    world = four_ranks([idx], num_experts=3, alignment=alignment)
    x, weights = rows_for(world, torch.float32), weights_for(world)

    def work(group: EPGroup, rank: int) -> tuple[Tensor, ...]:
        rows = x[rank].clone().requires_grad_()
        router = weights[rank].clone().requires_grad_()
        plan = group.plan(idx)
        recv_x, recv_weights = group.dispatch(plan, rows, router)
        assert recv_weights is not None
        real = torch.zeros(plan.num_recv_rows, dtype=torch.bool)
        for first, count in zip(plan.expert_offsets, plan.tokens_per_expert, strict=True):
            real[first : first + count] = True
        assert not recv_x[~real].any()
        assert not recv_weights[~real].any()
        poison = torch.where(real, 0.0, float("nan"))
        expert_out = recv_x * recv_weights.unsqueeze(1) + poison.unsqueeze(1)
        out = group.combine(plan, expert_out)
        (grad_out,) = torch.autograd.grad(out.sum(), expert_out, retain_graph=True)
        assert not grad_out[~real].any()
        (recv_x + recv_weights.unsqueeze(1)).backward(
            torch.where(real, 1.0, float("nan")).unsqueeze(1).expand_as(recv_x)
        )
        assert rows.grad is not None
        assert router.grad is not None
        return out.detach(), rows.grad, router.grad

    ((out, grad_x, grad_weights),) = each_rank(world, config_of(world, torch.float32), work)
    assert torch.equal(out, x[0] * weights[0])
    assert torch.equal(grad_x, torch.ones_like(grad_x))
    assert torch.equal(grad_weights, torch.full_like(grad_weights, 16.0))


def test_order_of_the_sum_shows_in_cancellation() -> None:
    """2^24, 1, -2^24 over three experts of three ranks: ascending order gives 0, others 1."""
    assert ordered_sum(
        torch.tensor([[2.0**24], [1.0], [-(2.0**24)]]), torch.tensor([[0, 1, 2], [0, 2, 1]])
    ).tolist() == [[0.0], [1.0]]
    world = four_ranks([torch.tensor([[2, 0, 1]])] + [torch.zeros(0, 3, dtype=torch.int64)] * 2, 3)

    def work(group: EPGroup, rank: int) -> Tensor:
        plan = group.plan(world.topk_idx[rank])
        value = [2.0**24, 1.0, -(2.0**24)][rank]
        return group.combine(plan, torch.full((plan.num_recv_rows, 16), value))

    out = each_rank(world, config_of(world, torch.float32), work)[0]
    assert torch.equal(out, torch.zeros(1, 16))


def test_sum_of_one_term_keeps_its_bits() -> None:
    """-0 stays -0; a sum of no terms is +0."""
    total = ordered_sum(torch.tensor([[-0.0]]), torch.tensor([[-1, 0], [-1, -1]]))
    assert torch.signbit(total).flatten().tolist() == [True, False]


def test_domains_change_the_order_and_precision_the_rounding() -> None:
    """The two-level order and the rounding points are visible in bf16, so they are specified."""
    flat = four_ranks([make_routing(64, 8, 16, seed=r) for r in range(4)], num_experts=16)
    variants = [flat, replace(flat, domain_size=2), replace(flat, exact=True)]
    outs = []
    for world in variants:
        x, weights = rows_for(world, torch.bfloat16), weights_for(world)
        outs.append(torch.cat([r.out for r in run_world(world, x, weights)]))
        assert_forward_and_backward(world, torch.bfloat16)
    assert not torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_bits_do_not_depend_on_run_or_order_of_arrival() -> None:
    """Ranks sleep at random between calls; every value and gradient keeps its bits."""
    world = four_ranks([make_routing(33, 4, 8, seed=r) for r in range(4)], domain_size=2)
    x, weights = rows_for(world, torch.bfloat16), weights_for(world)
    first = run_world(world, x, weights)
    for seed in range(4):
        again = run_world(world, x, weights, jitter_seed=seed)
        for one, other in zip(first, again, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))


@given(worlds(), st.integers(0, 20))
def test_capacity_drops_by_one_rule_on_all_ranks(world: World, capacity: int) -> None:
    """Static mode equals the oracle that cuts each receiver's row list; gradients follow."""
    assert_capacity(replace(world, capacity=capacity))


def assert_capacity(world: World) -> None:
    """Forward values against the oracle; dropped copies give and get nothing."""
    x, weights = rows_for(world, torch.float32), weights_for(world)
    ran = run_world(world, x, weights)
    wanted = dispatched(world, x, weights)
    for got, (recv_x, recv_weights) in zip(ran, wanted, strict=True):
        assert torch.equal(got.recv_x, recv_x)
        assert torch.equal(got.recv_weights, recv_weights)
    expert_out = [recv_x * recv_weights.unsqueeze(1) for recv_x, recv_weights in wanted]
    for got, out in zip(ran, combined(world, expert_out), strict=True):
        assert torch.equal(got.out, out)
        assert not got.grad_weights[got.plan.dst_row < 0].any()
