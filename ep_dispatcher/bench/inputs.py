"""Routings and rows of a work: the same on every machine and for every backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ep_dispatcher.bench.spec import Work
from ep_dispatcher.bench.trace import read_trace
from ep_dispatcher.plan import Placement
from ep_dispatcher.routing import RoutingSpec, make_topk_idx

_STREAMS = 1_000_003  # seeds of ranks and purposes do not meet


@dataclass(frozen=True, eq=False, kw_only=True)
class Inputs:
    """What one rank feeds to a backend.

    Attributes:
        topk_idx: [T, K] int64; -1 marks a dropped slot.
        topk_weights: [T, K] fp32 in (0, 1]; 0 in dropped slots.
        x: [T, H] rows.
        grad_out: [T, H], gradient of the combined rows.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    x: Tensor
    grad_out: Tensor


def make_routing(work: Work, rank: int) -> Tensor:
    """[T, K] int64 on the CPU: the routing of one rank.

    Raises:
        ConfigError: a trace that does not fit the work.
    """
    if work.routing == "replay":
        assert work.trace is not None
        topk_idx = read_trace(Path(work.trace)).tokens_of(rank, work)
    elif work.routing == "all-to-one":
        topk_idx = torch.arange(work.num_topk).repeat(work.num_tokens, 1)
    else:
        topk_idx = make_topk_idx(_spec(work), work.num_tokens, rank)
    if work.masked_fraction:
        generator = torch.Generator().manual_seed(_seed(work, rank, 1))
        masked = torch.rand(topk_idx.shape, generator=generator) < work.masked_fraction
        topk_idx = topk_idx.masked_fill(masked, -1)
    return topk_idx


def most_rows(work: Work) -> int:
    """Rows that the busiest rank receives, with as much padding as alignment can ask for."""
    owner = Placement.even(work.num_experts, work.ranks).rank_of
    received = torch.zeros(work.ranks, dtype=torch.int64)
    for rank in range(work.ranks):
        topk_idx = make_routing(work, rank)
        chosen = owner[topk_idx[topk_idx >= 0]]
        received += torch.bincount(chosen, minlength=work.ranks)
    padding = -(-work.num_experts // work.ranks) * (work.alignment - 1)
    return int(received.max()) + padding


def make_inputs(work: Work, rank: int, device: torch.device) -> Inputs:
    """Draw one rank's inputs: routing and weights on the CPU, rows where they are used."""
    topk_idx = make_routing(work, rank)
    generator = torch.Generator().manual_seed(_seed(work, rank, 2))
    weights = 1 - torch.rand(topk_idx.shape, generator=generator)
    dtype = getattr(torch, work.dtype)
    on_device = torch.Generator(device).manual_seed(_seed(work, rank, 3))
    rows = [
        torch.randn(
            work.num_tokens, work.hidden, generator=on_device, device=device, dtype=torch.float32
        ).to(dtype)
        for _ in range(2)
    ]
    return Inputs(
        topk_idx=topk_idx.to(device),
        topk_weights=weights.masked_fill(topk_idx < 0, 0).to(device),
        x=rows[0],
        grad_out=rows[1],
    )


def _seed(work: Work, rank: int, purpose: int) -> int:
    return (work.seed * _STREAMS + rank) * 8 + purpose


def _spec(work: Work) -> RoutingSpec:
    """The seeded routing of a work."""
    names = {"uniform": "uniform", "zipf": "zipf", "group-limited": "group-limited"}
    return RoutingSpec(
        name=names[work.routing],  # type: ignore[arg-type]
        num_experts=work.num_experts,
        num_topk=work.num_topk,
        seed=work.seed,
        skew=work.skew,
    )
