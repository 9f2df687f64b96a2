"""How many bytes a routing puts on each link: counted from the plan alone, before any data moves.

One matrix says it all: `rows[a, b]` is how many row messages rank a sends to rank b. Every other
figure (send or receive, inside a domain or across domains) is a sum over a part of it, and combine
is its transpose. A local copy is no message, so the diagonal is zero. A topology may be virtual:
the traffic of 64 ranks needs the routing of 64 ranks, not 64 GPUs.

Three schemes, so that what deduplication saves can be stated:

* ``deduplicated``, what this package does: a token goes once to each destination rank of its own
  domain, and once to each other domain that needs it, to the GPU with the same index there, which
  forwards it once to each destination rank of its domain.
* ``by_rank``: once to each destination rank, directly; no forwarding.
* ``by_copy``: once for each (token, slot), directly to the expert's rank; no deduplication at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ep_dispatcher.config import Topology
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.plan import Placement, Plan

Scheme = Literal["deduplicated", "by_rank", "by_copy"]
Link = Literal["inside", "across"]
Direction = Literal["send", "receive"]

SCHEMES: tuple[Scheme, ...] = ("deduplicated", "by_rank", "by_copy")
LINKS: tuple[Link, ...] = ("inside", "across")


@dataclass(frozen=True)
class Traffic:
    """Messages between ranks: who sends how many rows to whom.

    Attributes:
        rows: [P, P] fp64, row messages from rank (first index) to rank; whole numbers when counted,
            fractions when expected. The diagonal is zero.
        topology: says which pairs share a domain.
    """

    rows: Tensor
    topology: Topology

    def __add__(self, other: Traffic) -> Traffic:
        """Traffic of both together; the topologies must be equal."""
        if self.topology != other.topology:
            raise ConfigError(
                f"traffic of {self.topology} and of {other.topology} cannot be added; "
                "use one topology for all ranks"
            )
        return Traffic(self.rows + other.rows, self.topology)

    def transpose(self) -> Traffic:
        """The way back: combine sends one partial row where dispatch sent one row."""
        return Traffic(self.rows.T, self.topology)

    def rows_per_rank(self, link: Link, direction: Direction) -> Tensor:
        """[P] fp64, row messages of each rank on one class of link, in one direction."""
        selected = self.rows * _link_mask(self.topology, link)
        return selected.sum(dim=1 if direction == "send" else 0)

    def bytes_per_rank(self, link: Link, direction: Direction, row_bytes: int) -> Tensor:
        """[P] fp64, payload of each rank: rows only; for what is beside them see `side_bytes`."""
        return self.rows_per_rank(link, direction) * row_bytes


def source_traffic(
    dst_rank: Tensor, ep_rank: int, topology: Topology, scheme: Scheme = "deduplicated"
) -> Traffic:
    """Count the dispatch messages that the tokens of one rank cause, forwarding included.

    Args:
        dst_rank: [T, K] int64, the rank of each copy's expert; -1 marks a dropped slot.
        ep_rank: the rank that holds these tokens, in [0, P).
        topology: of the group; it may be virtual.
        scheme: what is sent once.

    Returns:
        Traffic of these tokens alone; add up all ranks for the whole world.

    Example: 4 ranks as 2 domains of 2; rank 0 holds three tokens,
        dst_rank = [[1, 1], [2, 3], [3, -1]].
        deduplicated: 0->1 once (token 0); 0->2 twice (tokens 1, 2 to domain 1, by the rail);
            2->3 twice (forwarded; the copy of token 1 for rank 2 itself is local there).
        by_rank: 0->1 once, 0->2 once, 0->3 twice.
        by_copy: 0->1 twice, 0->2 once, 0->3 twice.
    """
    kept = dst_rank >= 0
    num_tokens = dst_rank.shape[0]
    if scheme == "by_copy":
        return _place(torch.bincount(dst_rank[kept], minlength=topology.ep_size), ep_rank, topology)
    # One spare column takes the dropped slots, so that a plain scatter does it.
    reached = torch.zeros(num_tokens, topology.ep_size + 1, dtype=torch.bool)
    reached.scatter_(1, torch.where(kept, dst_rank, topology.ep_size), value=True)
    reached = reached[:, : topology.ep_size]
    per_rank = reached.sum(dim=0)
    if scheme == "by_rank":
        return _place(per_rank, ep_rank, topology)
    domains = reached.view(num_tokens, topology.num_domains, topology.domain_size)
    return _place_rails(per_rank, domains.any(dim=2).sum(dim=0), ep_rank, topology)


def carried_copies(dst_rank: Tensor, ep_rank: int, topology: Topology) -> Traffic:
    """Count the copies that the deduplicated messages of one rank's tokens stand for.

    Args:
        dst_rank: [T, K] int64, the rank of each copy's expert; -1 marks a dropped slot.
        ep_rank: the rank that holds these tokens.
        topology: of the group; it may be virtual.

    Example: that of `source_traffic`: 0->1 two copies, 0->2 three (rail), 2->3 two.
    """
    per_rank = torch.bincount(dst_rank[dst_rank >= 0], minlength=topology.ep_size)
    per_domain = per_rank.view(topology.num_domains, topology.domain_size).sum(dim=1)
    return _place_rails(per_rank, per_domain, ep_rank, topology)


def side_bytes(
    messages: Traffic, copies: Traffic, num_topk: int, link: Link, direction: Direction
) -> Tensor:
    """[P] fp64, bytes that dispatch sends beside the rows: addresses and weights, not payload.

    Inside a domain: a header word a message; a row number and a weight (4 bytes each) a copy.
    Across domains: one record a message with the weights of all slots (4 bytes each), whatever the
    number of copies, so that one put carries it; its place there says which token it is, and the
    plan, which has brought the routing, where it goes.

    Args:
        messages: deduplicated.
        copies: of the same tokens, from `carried_copies`.
        num_topk: K.
        link: class of link.
        direction: send or receive.

    Example: K=2, that of `source_traffic`, sent by rank 0: inside 4 + 2 * 8 = 20, across
        2 * (2 * 4) = 16.
    """
    num_messages = messages.rows_per_rank(link, direction)
    if link == "across":
        return num_messages * 4 * num_topk
    return num_messages * 4 + copies.rows_per_rank(link, direction) * 8


def plan_traffic(plan: Plan, scheme: Scheme = "deduplicated") -> Traffic:
    """Count the dispatch messages that one rank's plan causes, in the plan's own topology."""
    return source_traffic(plan.dst_rank.cpu(), plan.ep_rank, plan.topology, scheme)


def world_traffic(
    topk_idx_of_ranks: Iterable[Tensor],
    placement: Placement,
    topology: Topology,
    scheme: Scheme = "deduplicated",
) -> Traffic:
    """Count the dispatch messages of a whole world, given every rank's routing.

    Args:
        topk_idx_of_ranks: for each rank in order, [T, K] int64 experts; T may differ; -1 dropped.
        placement: owner of each expert.
        topology: of the group; it may be virtual.
        scheme: what is sent once.

    Raises:
        ConfigError: not exactly one routing a rank.
    """
    total = Traffic(_zeros(topology), topology)
    num_ranks = 0
    for rank, topk_idx in enumerate(topk_idx_of_ranks):
        num_ranks += 1
        if rank < topology.ep_size:
            dst_rank = torch.where(topk_idx >= 0, placement.rank_of[topk_idx.clamp(min=0)], -1)
            total += source_traffic(dst_rank, rank, topology, scheme)
    if num_ranks != topology.ep_size:
        raise ConfigError(
            f"routings of {num_ranks} ranks were given; the topology has {topology.ep_size} ranks"
        )
    return total


def expected_traffic(
    placement: Placement,
    num_tokens: int,
    num_topk: int,
    topology: Topology,
    scheme: Scheme = "deduplicated",
) -> Traffic:
    """Expected dispatch messages when each token picks K distinct experts uniformly.

    A rank (or domain) with e of the E experts is missed by a token with probability
    C(E - e, K) / C(E, K), the hypergeometric chance of drawing none of its experts.

    Args:
        placement: owner of each expert.
        num_tokens: T of every rank.
        num_topk: K, at most E.
        topology: of the group; it may be virtual.
        scheme: what is sent once.

    Raises:
        ConfigError: K > E, or placement and topology differ in P.

    Example: 2 ranks of one domain, 2 experts each, K=2, T=6: a token misses a rank with
        probability C(2, 2) / C(4, 2) = 1/6, so 0->1 and 1->0 carry 6 * 5/6 = 5 rows each;
        by_copy 6 * 2 / 2 = 6 rows.
    """
    num_experts = placement.num_experts
    if placement.ep_size != topology.ep_size:
        raise ConfigError(
            f"the placement has {placement.ep_size} ranks, the topology {topology.ep_size}; "
            "build both with one ep_size"
        )
    if num_topk > num_experts:
        raise ConfigError(
            f"num_topk is {num_topk}; distinct experts allow at most num_experts {num_experts}"
        )
    owned = torch.bincount(placement.rank_of, minlength=topology.ep_size)
    per_rank = num_tokens * _hit_probability(num_experts, owned, num_topk)
    if scheme == "by_copy":
        per_rank = num_tokens * num_topk * owned / num_experts
    owned_by_domain = owned.view(topology.num_domains, topology.domain_size).sum(dim=1)
    per_domain = num_tokens * _hit_probability(num_experts, owned_by_domain, num_topk)
    total = Traffic(_zeros(topology), topology)
    for source in range(topology.ep_size):
        if scheme == "deduplicated":
            total += _place_rails(per_rank, per_domain, source, topology)
        else:
            total += _place(per_rank, source, topology)
    return total


def _hit_probability(num_experts: int, owned: Tensor, num_topk: int) -> Tensor:
    """[N] fp64, chance that K distinct uniform picks of E experts touch each of N owners."""
    missed = [math.comb(num_experts - int(mine), num_topk) for mine in owned]
    picks = math.comb(num_experts, num_topk)
    return torch.tensor([1.0 - ways / picks for ways in missed], dtype=torch.float64)


def _zeros(topology: Topology) -> Tensor:
    return torch.zeros(topology.ep_size, topology.ep_size, dtype=torch.float64)


def _link_mask(topology: Topology, link: Link) -> Tensor:
    """[P, P] bool, which pairs of different ranks a class of link joins."""
    domain = torch.arange(topology.ep_size) // topology.domain_size
    same_domain = domain[:, None] == domain[None, :]
    if link == "across":
        return ~same_domain
    return same_domain & ~torch.eye(topology.ep_size, dtype=torch.bool)


def _place(per_rank: Tensor, source: int, topology: Topology) -> Traffic:
    """Every message straight from `source` to its destination; its own rows are no messages."""
    rows = _zeros(topology)
    rows[source] = per_rank.to(torch.float64)
    rows[source, source] = 0
    return Traffic(rows, topology)


def _place_rails(per_rank: Tensor, per_domain: Tensor, source: int, topology: Topology) -> Traffic:
    """Messages over rails: [P] and [D] tokens of `source` that reach each rank and each domain."""
    rows = _zeros(topology)
    by_domain = per_rank.to(torch.float64).view(topology.num_domains, topology.domain_size)
    for domain in range(topology.num_domains):
        first = domain * topology.domain_size
        entry = topology.rail_peer(source, domain)  # in the home domain this is the source itself
        rows[entry, first : first + topology.domain_size] = by_domain[domain]
        rows[entry, entry] = 0
        if entry != source:
            rows[source, entry] = per_domain[domain]
    return Traffic(rows, topology)
