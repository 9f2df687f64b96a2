"""The plan: pure functions of the routing, against a loop over tokens and worked examples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from oracle import World, expert_rows, row_list
from worlds import config_of, each_rank, worlds

from ep_dispatcher import ConfigError, EPGroup, Placement, Plan, Topology
from ep_dispatcher.plan import (
    assign_rows,
    build_plan,
    count_copies,
    expert_layout,
    first_rows,
    stable_index,
)
from ep_dispatcher.testing import make_routing


def plans_of(world: World) -> list[Plan]:
    """Every rank's plan, built from the counts of all, without communication."""
    counts = torch.stack([count_copies(idx, world.num_experts) for idx in world.topk_idx])
    return [
        build_plan(
            idx,
            counts,
            placement=Placement(world.expert_rank, world.num_ranks),
            topology=Topology(ep_size=world.num_ranks, domain_size=world.domain_size),
            ep_rank=rank,
            alignment=world.alignment,
            recv_capacity_rows=world.capacity,
        )
        for rank, idx in enumerate(world.topk_idx)
    ]


def test_docstring_examples_hold() -> None:
    """The worked examples in the docstrings of the plan."""
    topk_idx = torch.tensor([[0, -1], [-1, -1], [3, 0]])
    assert count_copies(topk_idx, 4).tolist() == [2, 0, 0, 1]
    assert stable_index(topk_idx, 4).tolist() == [[0, -1], [-1, -1], [0, 1]]
    counts = torch.tensor([[2, 0], [1, 1]])
    pair = Placement((0, 1), 2)
    assert first_rows(counts, pair, 1, 1).tolist() == [2, 0]
    assert assign_rows(torch.tensor([[1], [0]]), counts, pair, 1).tolist() == [[0], [2]]
    assert Placement.even(10, 4).expert_rank == (0, 0, 0, 1, 1, 1, 2, 2, 3, 3)
    plan = build_plan(
        torch.tensor([[1], [0]]),
        counts,
        placement=pair,
        topology=Topology(ep_size=2, domain_size=2),
        ep_rank=1,
    )
    assert plan.dst_rank.tolist() == [[1], [0]]
    assert plan.dst_row.tolist() == [[0], [2]]
    assert plan.tokens_per_expert.tolist() == [1]
    assert plan.num_recv_rows == 1


@given(worlds())
def test_rows_are_those_of_the_oracle(world: World) -> None:
    """Each copy has the row that a loop over (expert, source, token, slot) gives it."""
    for rank, plan in enumerate(plans_of(world)):
        rows = row_list(world, rank)
        assert plan.num_recv_rows == len(rows)
        for position, row in enumerate(rows):
            if row is not None:
                source, token, slot = row
                sender = plans_of(world)[source]
                assert sender.dst_rank[token, slot] == rank
                assert sender.dst_row[token, slot] == position


@given(worlds())
def test_copies_and_rows_are_a_bijection(world: World) -> None:
    """No two copies share a row; every copy that is not dropped has one."""
    plans = plans_of(world)
    sent = [
        (rank, row)
        for plan in plans
        for rank, row in zip(
            plan.dst_rank.flatten().tolist(), plan.dst_row.flatten().tolist(), strict=True
        )
        if rank >= 0
    ]
    assert len(sent) == len(set(sent)) == sum(int((idx >= 0).sum()) for idx in world.topk_idx)
    assert len(sent) == sum(int(plan.tokens_per_expert.sum()) for plan in plans)


@given(worlds())
def test_exchanged_plans_equal_local_ones(world: World) -> None:
    """A group's plan is the one that the counts of all ranks give."""

    def work(group: EPGroup, rank: int) -> Plan:
        return group.plan(world.topk_idx[rank])

    plans = each_rank(world, config_of(world, torch.float32), work)
    for got, want in zip(plans, plans_of(world), strict=True):
        for name in ("counts", "dst_rank", "dst_row", "tokens_per_expert", "expert_offsets"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert (got.num_recv_rows, got.demand_rows) == (want.num_recv_rows, want.demand_rows)


@pytest.mark.parametrize("alignment", [1, 16, 32, 128])
def test_empty_expert_stays_empty_when_aligned(alignment: int) -> None:
    """Counts [1, 0, 33] pad to multiples; the middle expert keeps no rows."""
    layout = expert_layout(
        torch.tensor([[1, 0, 33]]), Placement((0, 0, 0), 1), rank=0, alignment=alignment
    )
    up = {1: (1, 33), 16: (16, 48), 32: (32, 64), 128: (128, 128)}[alignment]
    assert layout.real.tolist() == [1, 0, 33]
    assert layout.padded.tolist() == [up[0], 0, up[1]]
    assert layout.offsets.tolist() == [0, up[0], up[0]]
    assert layout.num_rows == sum(up)


def test_real_and_padded_counts_are_both_there() -> None:
    """[3, 5] at alignment 4 gives real [3, 5] and padded [4, 8]."""
    topk_idx = torch.tensor([[0]] * 3 + [[1]] * 5)
    world = World(topk_idx=[topk_idx], expert_rank=(0, 0), num_ranks=1, domain_size=1, alignment=4)
    (plan,) = plans_of(world)
    assert plan.tokens_per_expert.tolist() == [3, 5]
    assert plan.padded_tokens_per_expert.tolist() == [4, 8]
    assert plan.expert_offsets.tolist() == [0, 4]


@pytest.mark.parametrize(("num_topk", "num_experts"), [(22, 64), (33, 64), (64, 64), (8, 256)])
def test_counts_are_complete_for_wide_routings(num_topk: int, num_experts: int) -> None:
    """Sum of counts is T * K and each equals a bincount, also where ten rows differ from all."""
    topk_idx = make_routing(1, num_topk, num_experts, seed=1).repeat(2304, 1)
    topk_idx[7:17] = make_routing(10, num_topk, num_experts, seed=2)
    counts = count_copies(topk_idx, num_experts)
    assert int(counts.sum()) == topk_idx.numel()
    assert torch.equal(counts, torch.bincount(topk_idx.flatten(), minlength=num_experts))
    world = World(
        topk_idx=[topk_idx, topk_idx[:5]],
        expert_rank=Placement.even(num_experts, 2).expert_rank,
        num_ranks=2,
        domain_size=2,
    )
    for plan in plans_of(world):
        for source, copies in enumerate(zip(plan.dst_rank, plan.dst_row, strict=True)):
            assert source < plan.num_tokens
            assert len(set(zip(*[c.tolist() for c in copies], strict=True))) == num_topk


def test_experts_that_do_not_divide_by_the_ranks() -> None:
    """E=10 on 4 ranks: blocks of 3, 3, 2, 2."""
    placement = Placement.even(10, 4)
    assert [len(placement.local_experts(rank)) for rank in range(4)] == [3, 3, 2, 2]
    world = World(
        topk_idx=[make_routing(9, 3, 10, seed=rank) for rank in range(4)],
        expert_rank=placement.expert_rank,
        num_ranks=4,
        domain_size=2,
    )
    for rank, plan in enumerate(plans_of(world)):
        lengths = [len(copies) for copies in expert_rows(world, rank)]
        assert plan.tokens_per_expert.tolist() == lengths


@pytest.mark.parametrize(("capacity", "kept"), [(0, [0, 0]), (3, [3, 0]), (6, [3, 2]), (9, [3, 5])])
def test_static_mode_drops_the_last_rows_and_says_so(capacity: int, kept: list[int]) -> None:
    """Real [3, 5] at alignment 4 in `capacity` rows; the true demand is reported."""
    topk_idx = torch.tensor([[0]] * 3 + [[1]] * 5)
    world = World(
        topk_idx=[topk_idx],
        expert_rank=(0, 0),
        num_ranks=1,
        domain_size=1,
        alignment=4,
        capacity=capacity,
    )
    (plan,) = plans_of(world)
    assert plan.tokens_per_expert.tolist() == kept
    assert int((plan.dst_row >= 0).sum()) == sum(kept)
    assert (plan.num_recv_rows, plan.demand_rows) == (capacity, 12)
    assert plan.overflowed
    assert plan.counts.tolist() == [[3, 5]]


def test_capacity_that_suffices_drops_nothing() -> None:
    """At exactly the demand nothing is dropped and nothing is reported."""
    topk_idx = torch.tensor([[0], [1], [1]])
    world = World(topk_idx=[topk_idx], expert_rank=(0, 0), num_ranks=1, domain_size=1, capacity=3)
    (plan,) = plans_of(world)
    assert not plan.overflowed
    assert int((plan.dst_row >= 0).sum()) == 3


@pytest.mark.parametrize(
    ("table", "ep_size", "says"),
    [
        ((0, 1), 3, "at least 3"),
        ((0, 1, 2), 2, r"expert_rank\[2\] is 2; it must be in \[0, 1\]"),
        ((0, 0, 0), 2, "rank 1 no expert"),
        ((0, -1), 2, r"expert_rank\[1\] is -1"),
    ],
)
def test_bad_tables_are_refused(table: tuple[int, ...], ep_size: int, says: str) -> None:
    """The message names the entry and the range."""
    with pytest.raises(ConfigError, match=says):
        Placement(table, ep_size)
