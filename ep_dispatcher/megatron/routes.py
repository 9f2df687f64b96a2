"""From Megatron's routing map and dense probs to compact slots, and back for the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ep_dispatcher.errors import RoutingError


def compact_routes(routing_map: Tensor, num_topk: int, *, check: bool) -> Tensor:
    """List the experts of each row of a routing map, ascending, without a host synchronisation.

    The map is the truth: a row may have fewer experts than its router's top-k (capacity, padding
    tokens) or more (fillers), and probs may be non-zero where nothing is routed.

    Args:
        routing_map: [T, E] bool (or 0 and 1).
        num_topk: K, slots; no row may have more experts.
        check: raise where a row has more (synchronises on a GPU).

    Returns:
        topk_idx: [T, K] int64; -1 fills up.

    Raises:
        RoutingError: with `check`, a row with more than K experts.

    Example: map [[0, 1, 0, 1], [0, 0, 0, 0]], K=2 -> [[1, 3], [-1, -1]].
    """
    routed = routing_map.bool()
    num_experts = routed.shape[1]
    if check and routed.shape[0] and int(routed.sum(1).max()) > num_topk:
        row = int(routed.sum(1).argmax())
        raise RoutingError(
            f"row {row} of the routing map has {int(routed[row].sum())} experts; this config "
            f"allows at most {num_topk}. Report the router setting that adds routes"
        )
    experts = torch.arange(num_experts, device=routed.device)
    listed = torch.where(routed, experts, num_experts)
    first = listed.topk(min(num_topk, num_experts), dim=1, largest=False, sorted=True).values
    return first.masked_fill(first == num_experts, -1)


def fold_tensor_ranks(topk_idx: Tensor, num_local_experts: int, tp_size: int) -> Tensor:
    """Repeat each route for every expert-tensor-parallel rank that holds a shard of its expert.

    A shard counts as an expert of its own. Shards are numbered so that rank ep * tp_size + tp owns
    the consecutive block of L, which is the order of ranks in Megatron's tp_ep group.

    Args:
        topk_idx: [T, K] int64, in [-1, E).
        num_local_experts: L.
        tp_size: ranks that share an expert.

    Returns:
        [T, K * tp_size] int64, in [-1, E * tp_size).

    Example: L=2, tp_size=2: expert 3 (rank pair 1, second expert) -> shards 5 and 7.
    """
    owner, local = topk_idx // num_local_experts, topk_idx % num_local_experts
    ranks = owner.unsqueeze(-1) * tp_size + torch.arange(tp_size, device=topk_idx.device)
    shards = ranks * num_local_experts + local.unsqueeze(-1)
    return shards.masked_fill(topk_idx.unsqueeze(-1) < 0, -1).flatten(1)


class GatherWeights(Function):
    """probs [T, E] and topk_idx [T, K] -> weights [T, K] in the wire's dtype; 0 in empty slots.

    The backward is a plain scatter into distinct places, so its bits do not depend on the order of
    atomics as those of `Tensor.gather` do on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, probs: Tensor, topk_idx: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ANN401
        """Read the weight of each slot."""
        ctx.save_for_backward(topk_idx)
        ctx.probs_dtype, ctx.num_experts = probs.dtype, probs.shape[1]
        weights = probs.gather(1, topk_idx.clamp(min=0)).to(dtype)
        return weights.masked_fill(topk_idx < 0, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_weights: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Put the gradient of each slot at its expert; nothing elsewhere."""
        (topk_idx,) = ctx.saved_tensors
        num_experts = ctx.num_experts
        # Empty slots write zeros into one column more, which is cut off.
        grad = grad_weights.new_zeros(topk_idx.shape[0], num_experts + 1)
        column = torch.where(topk_idx < 0, num_experts, topk_idx)
        grad.scatter_(1, column, grad_weights.masked_fill(topk_idx < 0, 0))
        return grad[:, :num_experts].to(ctx.probs_dtype), None, None


def gather_weights(probs: Tensor, topk_idx: Tensor, dtype: torch.dtype) -> Tensor:
    """Differentiable in `probs`; see `GatherWeights`."""
    weights: Tensor = GatherWeights.apply(probs, topk_idx, dtype)  # type: ignore[no-untyped-call]
    return weights
