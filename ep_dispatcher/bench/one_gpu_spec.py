"""The specification for all ranks of a `OneGpuWorld`: inputs of a round and what must come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_dispatcher.bench.one_gpu import OneGpuWorld
from ep_dispatcher.plan import Plan, build_plan, count_copies
from ep_dispatcher.reference import ordered_sum

_NO_ROW = 1 << 40


@dataclass(frozen=True, eq=False, kw_only=True)
class Round:
    """Inputs and expected results of one round of plan, dispatch and combine; lists by rank.

    Attributes:
        topk_idx, topk_weights, x: what ranks bring.
        alignment, capacity_rows: of the plan; -1 for no capacity.
        plans: expected plans.
        recv_x, recv_weights: expected rows.
        expert_out, row_grads: what experts return; independent of recv_x, so that a row that went
            astray cannot cancel itself out.
        out, weight_grads: expected sums.
    """

    topk_idx: list[Tensor]
    topk_weights: list[Tensor]
    x: list[Tensor]
    alignment: int
    capacity_rows: int
    plans: list[Plan]
    recv_x: list[Tensor]
    recv_weights: list[Tensor]
    expert_out: list[Tensor]
    row_grads: list[Tensor]
    out: list[Tensor]
    weight_grads: list[Tensor]

    @property
    def rows(self) -> list[int]:
        """Rows that each rank receives."""
        return [plan.num_recv_rows for plan in self.plans]


def make_round(
    world: OneGpuWorld,
    topk_idx: Sequence[Tensor],
    *,
    alignment: int = 1,
    capacity_rows: int = -1,
    seed: int = 0,
) -> Round:
    """Draw rows and weights for a routing and compute what must come out."""
    shape, device = world.shape, world.device
    generator = torch.Generator(device=device).manual_seed(seed)

    def rows(count: int) -> Tensor:
        values = torch.randn(count, shape.hidden, generator=generator, device=device)
        return values.to(shape.dtype)

    def floats(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, device=device)

    routing = [topk.to(device) for topk in topk_idx]
    counts = torch.stack([count_copies(topk, shape.num_experts) for topk in routing])
    plans = [
        build_plan(
            topk,
            counts,
            placement=world.placement,
            topology=world.topology,
            ep_rank=rank,
            alignment=alignment,
            recv_capacity_rows=None if capacity_rows < 0 else capacity_rows,
        )
        for rank, topk in enumerate(routing)
    ]
    x = [rows(len(topk)) for topk in routing]
    weights = [floats(*topk.shape) for topk in routing]
    expert_out = [rows(plan.num_recv_rows) for plan in plans]
    row_grads = [floats(plan.num_recv_rows) for plan in plans]
    received = [_expected_rows(plans, rank, x, weights) for rank in range(shape.ep_size)]
    return Round(
        topk_idx=routing,
        topk_weights=weights,
        x=x,
        alignment=alignment,
        capacity_rows=capacity_rows,
        plans=plans,
        recv_x=[rows for rows, _ in received],
        recv_weights=[row_weights for _, row_weights in received],
        expert_out=expert_out,
        row_grads=row_grads,
        out=[expected_sum(plan, expert_out, shape.dtype, shape.exact) for plan in plans],
        weight_grads=[_expected_weight_grads(plan, row_grads) for plan in plans],
    )


def _expected_rows(
    plans: Sequence[Plan], rank: int, x: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """recv_x and recv_weights of `rank`."""
    recv_x = x[0].new_zeros(plans[rank].num_recv_rows, x[0].shape[1])
    recv_weights = weights[0].new_zeros(plans[rank].num_recv_rows)
    for plan, rows, row_weights in zip(plans, x, weights, strict=True):
        token, slot = (plan.dst_rank == rank).nonzero(as_tuple=True)
        recv_x[plan.dst_row[token, slot]] = rows[token]
        recv_weights[plan.dst_row[token, slot]] = row_weights[token, slot]
    return recv_x, recv_weights


def expected_sum(
    plan: Plan, expert_out: Sequence[Tensor], dtype: torch.dtype, exact: bool
) -> Tensor:
    """The specified sum: rows ascending on each rank, ranks ascending, domains ascending."""
    partials, indices = [], []
    own = torch.arange(plan.num_tokens, device=plan.dst_row.device)
    for rank, rows in enumerate(expert_out):
        index = plan.dst_row.masked_fill(plan.dst_rank != rank, _NO_ROW).sort(1).values
        index = index.masked_fill(index == _NO_ROW, -1)
        partial = ordered_sum(rows, index)
        partials.append(partial if exact else partial.to(dtype))
        indices.append(torch.where((index >= 0).any(1), own + rank * plan.num_tokens, -1))
    terms, sums, present = torch.cat(partials), [], []
    size = plan.topology.domain_size
    for domain in range(plan.topology.num_domains):
        index = torch.stack(indices[domain * size : (domain + 1) * size], 1)
        partial = ordered_sum(terms, index)
        sums.append(partial if exact else partial.to(dtype))
        present.append(torch.where((index >= 0).any(1), own + domain * plan.num_tokens, -1))
    return ordered_sum(torch.cat(sums), torch.stack(present, 1)).to(dtype)


def _expected_weight_grads(plan: Plan, row_grads: Sequence[Tensor]) -> Tensor:
    grads = torch.zeros(plan.dst_row.shape, device=plan.dst_row.device)
    for rank, rows in enumerate(row_grads):
        here = plan.dst_rank == rank
        grads[here] = rows[plan.dst_row[here]]
    return grads


def assert_same_bits(name: str, got: Tensor, expected: Tensor) -> None:
    """Compare bit patterns, so that -0 and NaN count."""
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    same = got.contiguous().view(word) == expected.contiguous().view(word)
    if not bool(same.all()):
        first = (~same).nonzero()[0].tolist()
        at = tuple(first)
        raise AssertionError(
            f"{name}: {int((~same).sum())} of {same.numel()} elements differ, first at {first}: "
            f"{got[at].item()}, expected {expected[at].item()}"
        )
