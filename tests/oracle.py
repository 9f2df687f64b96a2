"""A dense one-process oracle: loops over tokens, shares no code with the package."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class World:
    """A whole group's input.

    Attributes:
        topk_idx: per rank, [T, K] int64.
        expert_rank: owner of each expert.
        num_ranks: P.
        domain_size: ranks per NVLink domain.
        alignment: rows.
        hidden: elements per row.
        exact: keep partial sums in fp32.
        capacity: rows of every receiver, or None.
    """

    topk_idx: list[Tensor]
    expert_rank: tuple[int, ...]
    num_ranks: int
    domain_size: int
    alignment: int = 1
    hidden: int = 8
    exact: bool = False
    capacity: int | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.expert_rank)

    @property
    def num_topk(self) -> int:
        """The largest K of any rank."""
        return max(idx.shape[1] for idx in self.topk_idx)


Row = tuple[int, int, int]  # source rank, token, slot


def expert_rows(world: World, rank: int) -> list[list[Row]]:
    """For each expert of `rank`, by ascending id: its copies in (source, token, slot) order."""
    rows = []
    for expert, owner in enumerate(world.expert_rank):
        if owner == rank:
            rows.append(
                [
                    (source, token, slot)
                    for source, idx in enumerate(world.topk_idx)
                    for token, experts in enumerate(idx.tolist())
                    for slot, chosen in enumerate(experts)
                    if chosen == expert
                ]
            )
    return rows


def row_list(world: World, rank: int) -> list[Row | None]:
    """Every row that `rank` receives, None for padding (and for the tail of a capacity)."""
    rows: list[Row | None] = []
    for copies in expert_rows(world, rank):
        rows += copies
        while len(copies) and len(rows) % world.alignment:
            rows.append(None)
    if world.capacity is not None:
        rows = rows[: world.capacity] + [None] * (world.capacity - len(rows))
    return rows


def dispatched(world: World, x: list[Tensor], weights: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """recv_x and recv_weights of every rank."""
    received = []
    for rank in range(world.num_ranks):
        rows = row_list(world, rank)
        recv_x = torch.zeros(len(rows), world.hidden, dtype=x[0].dtype)
        recv_weights = torch.zeros(len(rows), dtype=weights[0].dtype)
        for position, row in enumerate(rows):
            if row is not None:
                source, token, slot = row
                recv_x[position] = x[source][token]
                recv_weights[position] = weights[source][token, slot]
        received.append((recv_x, recv_weights))
    return received


def combined(world: World, expert_out: list[Tensor]) -> list[Tensor]:
    """Every rank's combined rows, in the specified order with the specified rounding."""
    dtype = expert_out[0].dtype
    lists = [row_list(world, rank) for rank in range(world.num_ranks)]
    out = []
    for home, idx in enumerate(world.topk_idx):
        result = torch.zeros(len(idx), world.hidden, dtype=dtype)
        for token in range(len(idx)):
            total = _token_sum(world, lists, expert_out, home, token)
            if total is not None:
                result[token] = total.to(dtype)
        out.append(result)
    return out


def _token_sum(
    world: World, lists: list[list[Row | None]], expert_out: list[Tensor], home: int, token: int
) -> Tensor | None:
    """Sum of one token: expert rows in a rank, ranks in a domain, domains."""
    dtype = expert_out[0].dtype
    domains = []
    for first in range(0, world.num_ranks, world.domain_size):
        ranks = []
        for rank in range(first, first + world.domain_size):
            terms = [
                expert_out[rank][position]
                for position, row in enumerate(lists[rank])
                if row is not None and row[:2] == (home, token)
            ]
            ranks.append(_sum(terms, dtype, world.exact))
        domains.append(_sum([part for part in ranks if part is not None], dtype, world.exact))
    return _sum([part for part in domains if part is not None], dtype, world.exact)


def _sum(terms: list[Tensor], dtype: torch.dtype, exact: bool) -> Tensor | None:
    """Left-to-right sum in fp32 (fp64 for fp64 rows); rounded unless exact."""
    if not terms:
        return None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term.to(wide)
    return total if exact else total.to(dtype)
