"""Routing map and dense probs to compact slots, and the gradient back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ep_dispatcher.errors import RoutingError
from ep_dispatcher.megatron.routes import compact_routes, fold_tensor_ranks, gather_weights


@st.composite
def routing_maps(draw: st.DrawFn) -> Tensor:
    """[T, E] bool of any density, rows without experts and without tokens among them."""
    num_tokens, num_experts = draw(st.integers(0, 8)), draw(st.integers(1, 8))
    size = num_tokens * num_experts
    bits = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return torch.tensor(bits, dtype=torch.bool).view(num_tokens, num_experts)


def test_example_of_compact_routes() -> None:
    routing_map = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0]])
    assert compact_routes(routing_map, 2, check=True).tolist() == [[1, 3], [-1, -1]]


def test_router_rows_with_two_and_with_one_expert() -> None:
    """[.5, .5, 0, 0] and [.5, 0, 0, 0] at K=2: the empty slot is dropped, not sent to an expert."""
    probs = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0]], requires_grad=True)
    topk_idx = compact_routes(probs > 0, 2, check=True)
    assert topk_idx.tolist() == [[0, 1], [0, -1]]
    weights = gather_weights(probs, topk_idx, torch.float32)
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.0]]
    (weights * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert probs.grad is not None
    assert probs.grad.tolist() == [[1.0, 2.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]]


def test_example_of_fold_tensor_ranks() -> None:
    assert fold_tensor_ranks(torch.tensor([[3, -1]]), 2, 2).tolist() == [[5, 7, -1, -1]]


@given(routing_maps())
def test_compact_routes_list_exactly_the_map(routing_map: Tensor) -> None:
    """Scattering the slots back gives the map; each row ascends, empty slots last."""
    num_experts = routing_map.shape[1]
    topk_idx = compact_routes(routing_map, num_experts, check=True)
    for row, listed in zip(routing_map, topk_idx.tolist(), strict=True):
        experts = row.nonzero().flatten().tolist()
        assert listed == experts + [-1] * (num_experts - len(experts))


@given(routing_maps())
def test_gather_weights_is_the_map_read_both_ways(routing_map: Tensor) -> None:
    """Weights are the probs of the routes; the gradient returns to those and only those."""
    probs = torch.arange(routing_map.numel(), dtype=torch.float64).view(routing_map.shape) + 1
    probs.requires_grad_()
    topk_idx = compact_routes(routing_map, routing_map.shape[1], check=True)
    weights = gather_weights(probs, topk_idx, torch.float32)
    assert weights.dtype == torch.float32
    assert sorted(weights[topk_idx >= 0].tolist()) == sorted(probs[routing_map].tolist())
    assert not weights[topk_idx < 0].any()
    (weights * weights.detach()).sum().backward()
    expected = torch.where(routing_map, probs.detach(), 0.0)
    torch.testing.assert_close(probs.grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_shards_of_an_expert_lie_on_all_its_ranks(tp_size: int) -> None:
    """4 ranks of 3 experts: shard of expert e on rank (e // 3) * tp + t, same local index."""
    topk_idx = torch.arange(12).view(4, 3)
    shards = fold_tensor_ranks(topk_idx, 3, tp_size).view(4, 3, tp_size)
    for expert in range(12):
        for tp_rank, shard in enumerate(shards[expert // 3, expert % 3].tolist()):
            assert shard // 3 == expert // 3 * tp_size + tp_rank
            assert shard % 3 == expert % 3


def test_a_row_beyond_the_slots_is_refused() -> None:
    """And it is named: nothing is cut off silently."""
    routing_map = torch.tensor([[1, 0, 0], [1, 1, 1]]).bool()
    with pytest.raises(RoutingError, match=r"row 1 .* has 3 experts; .* at most 2"):
        compact_routes(routing_map, 2, check=True)
