"""Routings made by a seed: input for estimates, benchmarks and tests where no router is at hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ep_dispatcher.errors import ConfigError

RoutingName = Literal["uniform", "group-limited", "zipf"]
ROUTINGS: tuple[RoutingName, ...] = ("uniform", "group-limited", "zipf")


@dataclass(frozen=True, kw_only=True)
class RoutingSpec:
    """How tokens choose experts; always K distinct ones.

    Attributes:
        name: "uniform"; "zipf", where expert e is drawn with weight (e + 1) ** -skew, without
            replacement; "group-limited", where a token first picks its `num_limited_groups` best
            of `num_groups` equal blocks of experts and then only experts of those.
        num_experts: E.
        num_topk: K.
        seed: of the whole world; rank r draws from its own stream of this seed.
        skew: exponent of "zipf"; 0 is uniform.
        num_groups: blocks of "group-limited"; must divide E.
        num_limited_groups: blocks that a token may use; their experts must be at least K.
    """

    name: RoutingName
    num_experts: int
    num_topk: int
    seed: int = 0
    skew: float = 1.0
    num_groups: int = 8
    num_limited_groups: int = 4

    def __post_init__(self) -> None:
        """Check the name and that K distinct experts can be had."""
        if self.name not in ROUTINGS:
            raise ConfigError(f"routing is {self.name!r}; it must be one of {list(ROUTINGS)}")
        if not 1 <= self.num_topk <= self.num_experts:
            raise ConfigError(
                f"num_topk is {self.num_topk}; it must be in [1, num_experts {self.num_experts}]"
            )
        if not math.isfinite(self.skew):
            raise ConfigError(f"skew is {self.skew}; it must be a finite number")
        if self.name == "group-limited":
            self._check_groups()

    def _check_groups(self) -> None:
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ConfigError(
                f"num_groups is {self.num_groups}; it must divide num_experts {self.num_experts}"
            )
        if not 1 <= self.num_limited_groups <= self.num_groups:
            raise ConfigError(
                f"num_limited_groups is {self.num_limited_groups}; "
                f"it must be in [1, num_groups {self.num_groups}]"
            )
        usable = self.num_experts // self.num_groups * self.num_limited_groups
        if self.num_topk > usable:
            raise ConfigError(
                f"num_topk is {self.num_topk}; {self.num_limited_groups} of {self.num_groups} "
                f"groups have {usable} experts, so it must be at most {usable}"
            )


def make_topk_idx(spec: RoutingSpec, num_tokens: int, rank: int) -> Tensor:
    """Draw one rank's routing: [T, K] int64, distinct experts in each row, best first.

    The same (spec, num_tokens, rank) gives the same routing on every machine with this torch.
    """
    generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + rank)
    # Gumbel noise on log weights: the K largest are K weighted draws without replacement.
    uniform = torch.rand(num_tokens, spec.num_experts, generator=generator)
    scores = -torch.log(-torch.log(uniform.clamp(1e-12, 1 - 1e-7)))
    if spec.name == "zipf":
        scores -= spec.skew * torch.log(torch.arange(1, spec.num_experts + 1).float())
    if spec.name == "group-limited":
        scores = _keep_best_groups(scores, spec)
    return torch.topk(scores, spec.num_topk, dim=1).indices


def make_world(spec: RoutingSpec, num_tokens: int, num_ranks: int) -> Iterator[Tensor]:
    """Draw every rank's routing in rank order, one at a time (a world of 64 is large)."""
    for rank in range(num_ranks):
        yield make_topk_idx(spec, num_tokens, rank)


def _keep_best_groups(scores: Tensor, spec: RoutingSpec) -> Tensor:
    """Put all experts outside a token's best groups out of reach; a group scores by its best two.

    Source of the rule: node-limited routing, DeepSeek-V3 report (arXiv 2412.19437), 2.1.2.
    """
    grouped = scores.view(scores.shape[0], spec.num_groups, -1)
    num_best = min(2, grouped.shape[2])
    group_score = grouped.topk(num_best, dim=2).values.sum(dim=2)
    best = group_score.topk(spec.num_limited_groups, dim=1).indices
    allowed = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, best, value=True)
    return grouped.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1)
