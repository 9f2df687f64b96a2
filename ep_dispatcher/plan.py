"""The plan: routing turned into addresses by counting, without atomics and without maps.

Letters in shapes: T tokens of this rank, K slots (num_topk), E experts, P ranks, L experts of one
rank, R rows that a rank receives (padding included).

Every function here is a pure function of its arguments and communicates nothing: a backend
exchanges one row of E counts per rank and calls `build_plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ep_dispatcher.config import Topology
from ep_dispatcher.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """Which rank owns each expert, and in which order that rank keeps its experts.

    A rank keeps its experts by ascending id. Built with `Placement.even` or from a table.

    Attributes:
        expert_rank: E entries, the owner of each expert; every rank owns at least one.
        ep_size: P.

    Raises:
        ConfigError: fewer experts than ranks, an owner outside [0, P), a rank without experts.

    Example: `Placement.even(10, 4).expert_rank` -> (0, 0, 0, 1, 1, 1, 2, 2, 3, 3).
    """

    expert_rank: tuple[int, ...]
    ep_size: int

    def __post_init__(self) -> None:
        """Check that the table gives every rank at least one expert."""
        if len(self.expert_rank) < self.ep_size:
            raise ConfigError(
                f"num_experts is {len(self.expert_rank)}; the group has {self.ep_size} ranks and "
                f"each needs an expert, so it must be at least {self.ep_size}"
            )
        for expert, rank in enumerate(self.expert_rank):
            if not 0 <= rank < self.ep_size:
                raise ConfigError(
                    f"expert_rank[{expert}] is {rank}; it must be in [0, {self.ep_size - 1}]"
                )
        idle = sorted(set(range(self.ep_size)) - set(self.expert_rank))
        if idle:
            raise ConfigError(f"expert_rank gives rank {idle[0]} no expert; each rank needs one")

    @classmethod
    def even(cls, num_experts: int, ep_size: int) -> Placement:
        """Consecutive blocks; where E is not a multiple of P the first E % P ranks own one more."""
        small, extra = divmod(num_experts, ep_size)
        sizes = [small + (rank < extra) for rank in range(ep_size)]
        return cls(tuple(rank for rank, size in enumerate(sizes) for _ in range(size)), ep_size)

    @property
    def num_experts(self) -> int:
        """E, over the whole group."""
        return len(self.expert_rank)

    @cached_property
    def rank_of(self) -> Tensor:
        """[E] int64 on the CPU: owner of each expert."""
        return torch.tensor(self.expert_rank, dtype=torch.int64)

    def local_experts(self, rank: int) -> Tensor:
        """[L] int64 on the CPU: ids of the experts that `rank` owns, ascending."""
        return (self.rank_of == rank).nonzero().flatten()


class Layout(NamedTuple):
    """How one rank's received rows divide among its experts; all [L] int64, in rows.

    Attributes:
        real: rows that carry a copy.
        padded: rows including the padding that follows them.
        offsets: first row of each expert.
    """

    real: Tensor
    padded: Tensor
    offsets: Tensor

    @property
    def num_rows(self) -> int:
        """Rows in all, padding included."""
        return int(self.padded.sum())


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """Everything that dispatch and combine need, forward and backward; immutable.

    Attributes:
        ep_rank: the rank that this plan belongs to.
        topology: NVLink domains of the group.
        placement: owner of each expert.
        alignment: rows of each expert are padded to a multiple of this.
        topk_idx: [T, K] int64, the routing that was planned; -1 marks a dropped slot.
        counts: [P, E] int64, copies that each rank sends to each expert (the true demand).
        dst_rank: [T, K] int64, receiver of each copy; -1 where nothing is sent.
        dst_row: [T, K] int64, its row there; -1 where nothing is sent.
        tokens_per_expert: [L] int64, rows received for each local expert, without padding.
        padded_tokens_per_expert: [L] int64, the same with padding; what a grouped GEMM runs over.
        expert_offsets: [L] int64, first row of each local expert.
        num_recv_rows: R, rows of recv_x; in static mode the capacity.
        demand_rows: rows that dropless routing would need (one int64 on the GPU where the device
            tier works in static mode, as the host does not wait for it); above `num_recv_rows`
            means that rows were dropped, by the same rule on all ranks: those with the highest
            row numbers.
        segment_rows: [L] int64 on the CPU: `padded_tokens_per_expert` where the host knows it
            without waiting; None where it does not (static mode of the device tier).
        transport: the backend's own part.
    """

    ep_rank: int
    topology: Topology
    placement: Placement
    alignment: int
    topk_idx: Tensor
    counts: Tensor
    dst_rank: Tensor
    dst_row: Tensor
    tokens_per_expert: Tensor
    padded_tokens_per_expert: Tensor
    expert_offsets: Tensor
    num_recv_rows: int
    demand_rows: int | Tensor
    segment_rows: Tensor | None = None
    transport: object = None

    @property
    def num_tokens(self) -> int:
        """T, tokens of this rank."""
        return int(self.topk_idx.shape[0])

    @property
    def num_topk(self) -> int:
        """K, slots of each token."""
        return int(self.topk_idx.shape[1])

    @property
    def overflowed(self) -> bool:
        """Whether static mode dropped rows on this rank's receiving side."""
        return bool(self.demand_rows > self.num_recv_rows)


def count_copies(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Count the copies that each expert gets.

    Args:
        topk_idx: [T, K] int64, in [-1, E); -1 is counted nowhere.
        num_experts: E.

    Returns:
        [E] int64.

    Example: [[0, -1], [-1, -1], [3, 0]], E=4 -> [2, 0, 0, 1].
    """
    return torch.bincount(topk_idx.flatten() + 1, minlength=num_experts + 1)[1:]


def stable_index(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Number each copy among this rank's copies of the same expert, in (token, slot) order.

    Args:
        topk_idx: [T, K] int64, in [-1, E).
        num_experts: E.

    Returns:
        [T, K] int64; -1 where topk_idx is -1.

    Example: [[0, -1], [-1, -1], [3, 0]] -> [[0, -1], [-1, -1], [0, 1]].
    Source: distribution counting, Knuth, TAOCP volume 3, section 5.2, algorithm D.
    """
    bins = topk_idx.flatten() + 1
    order = torch.argsort(bins, stable=True)
    sizes = torch.bincount(bins, minlength=num_experts + 1)
    starts = sizes.cumsum(0) - sizes
    index = torch.empty_like(bins)
    index[order] = torch.arange(len(bins), device=bins.device) - starts[bins[order]]
    return index.masked_fill(bins == 0, -1).view_as(topk_idx)


def expert_layout(counts: Tensor, placement: Placement, rank: int, alignment: int) -> Layout:
    """Lay out the rows that `rank` receives: expert by expert, each padded to `alignment`.

    Args:
        counts: [P, E] int64.
        placement: owner of each expert.
        rank: whose rows.
        alignment: rows; an expert without rows stays at none.

    Example: one rank, counts [[1, 0, 33]], alignment 16 -> padded [16, 0, 48], offsets [0, 16, 16].
    """
    real = counts.sum(0)[placement.local_experts(rank).to(counts.device)]
    padded = (real + alignment - 1) // alignment * alignment
    return Layout(real, padded, padded.cumsum(0) - padded)


def first_rows(counts: Tensor, placement: Placement, ep_rank: int, alignment: int) -> Tensor:
    """Give the row, at its receiver, of this rank's first copy for each expert.

    Args:
        counts: [P, E] int64.
        placement: owner of each expert.
        ep_rank: the sending rank.
        alignment: rows.

    Returns:
        [E] int64, in rows: the expert's offset plus the copies of lower source ranks.

    Example: counts [[2, 0], [1, 1]], experts on ranks 0 and 1, ep_rank 1 -> [2, 0].
    """
    rows = counts[:ep_rank].sum(0)
    for rank in range(placement.ep_size):
        experts = placement.local_experts(rank).to(counts.device)
        rows[experts] += expert_layout(counts, placement, rank, alignment).offsets
    return rows


def assign_rows(
    topk_idx: Tensor, counts: Tensor, placement: Placement, ep_rank: int, alignment: int = 1
) -> Tensor:
    """Give each routed copy of a token its row in the receiver's expert-major buffer.

    Rows are ordered by (local expert, source rank, token, slot): a pure function of the routing,
    so no atomics, and the same bits on every run and every backend.

    Args:
        topk_idx: [T, K] int64, global expert of each slot; -1 marks a dropped slot.
        counts: [P, E] int64, copies each rank sends to each expert, all-gathered.
        placement: owner of each expert.
        ep_rank: this rank, in [0, P).
        alignment: rows of each expert are padded to a multiple of this.

    Returns:
        dst_row: [T, K] int64, in rows (not bytes); -1 where topk_idx is -1.

    Example: counts=[[2, 0], [1, 1]], ep_rank=1, topk_idx=[[1], [0]] -> [[0], [2]].
    """
    base = first_rows(counts, placement, ep_rank, alignment)
    rows = base[topk_idx.clamp(min=0)] + stable_index(topk_idx, placement.num_experts)
    return rows.masked_fill(topk_idx < 0, -1)


def build_plan(
    topk_idx: Tensor,
    counts: Tensor,
    *,
    placement: Placement,
    topology: Topology,
    ep_rank: int,
    alignment: int = 1,
    recv_capacity_rows: int | None = None,
) -> Plan:
    """Turn a routing and the counts of all ranks into this rank's plan.

    Args:
        topk_idx: [T, K] int64, in [-1, E).
        counts: [P, E] int64; row `ep_rank` is the histogram of topk_idx.
        placement: owner of each expert.
        topology: NVLink domains.
        ep_rank: this rank.
        alignment: rows.
        recv_capacity_rows: static mode: rows of every receiver; copies whose row would lie at or
            past it are dropped, on sender and receiver alike, as both derive it from `counts`.

    Returns:
        The plan, without the backend's part.

    Example: two ranks, two experts, rank 1 has topk_idx [[1], [0]], counts [[2, 0], [1, 1]]:
        dst_rank [[1], [0]], dst_row [[0], [2]], tokens_per_expert [1], num_recv_rows 1.
    """
    assert bool((count_copies(topk_idx, placement.num_experts) == counts[ep_rank]).all())
    dst_row = assign_rows(topk_idx, counts, placement, ep_rank, alignment)
    owner = placement.rank_of.to(topk_idx.device)
    dst_rank = owner[topk_idx.clamp(min=0)].masked_fill(topk_idx < 0, -1)
    layout = expert_layout(counts, placement, ep_rank, alignment)
    num_rows = demand_rows = layout.num_rows
    if recv_capacity_rows is not None:
        num_rows = recv_capacity_rows
        dropped = dst_row >= recv_capacity_rows
        dst_row = dst_row.masked_fill(dropped, -1)
        dst_rank = dst_rank.masked_fill(dropped, -1)
        layout = _truncate(layout, recv_capacity_rows)
    return Plan(
        ep_rank=ep_rank,
        topology=topology,
        placement=placement,
        alignment=alignment,
        topk_idx=topk_idx,
        counts=counts,
        dst_rank=dst_rank,
        dst_row=dst_row,
        tokens_per_expert=layout.real,
        padded_tokens_per_expert=layout.padded,
        expert_offsets=layout.offsets,
        num_recv_rows=num_rows,
        demand_rows=demand_rows,
        segment_rows=layout.padded.cpu(),
    )


def _truncate(layout: Layout, capacity_rows: int) -> Layout:
    """Cut every expert's rows at the end of the buffer.

    Example: real [3, 5], padded [4, 8], offsets [0, 4], capacity 6 -> real [3, 2], padded [4, 2].
    """
    room = (capacity_rows - layout.offsets).clamp(min=0)
    return Layout(
        torch.minimum(layout.real, room),
        torch.minimum(layout.padded, room),
        layout.offsets.clamp(max=capacity_rows),
    )
