"""Bytes and rates of a phase: what the wire carried, and the five bandwidths that people publish.

They differ in which rows they count, so a figure without its name says nothing. Definitions D1 to
D5, by where they are in use:

    wire    rows that leave a rank, over the phase's time; the one to hold against a link
    D1      DeepEP "RDMA": (token, domain) pairs, the token's own domain included
    D2      DeepEP "NVL": rows received, own ones included; flat layouts count a token once a rank
    D3      DeepEP V2 "logical": (token, rank) pairs, own rank included, 8 + 4 bytes a slot beside
    D4      NCCL EP bench: rows sent and rows received, each apart, own rank excluded
    D5      CollectiveX: token-expert assignments, and (token, rank) pairs; the plan is charged, so
            a backend whose plan is no phase of its own (Megatron's is in its permute) has none
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_dispatcher.accounting import LINKS, Traffic, source_traffic
from ep_dispatcher.bench.backends.base import Wire
from ep_dispatcher.bench.inputs import make_routing
from ep_dispatcher.bench.spec import Work
from ep_dispatcher.config import Topology
from ep_dispatcher.plan import Placement

_SLOT_BYTES = 8 + 4  # an index and a weight
FORWARD = ("dispatch", "combine_backward")
BACKWARD = ("combine", "dispatch_backward")


@dataclass(frozen=True, eq=False, kw_only=True)
class Counts:
    """Row counts of each rank's dispatch; [P] float64 each.

    Attributes:
        sent: rows that leave the rank, by class of link; `received`: that arrive.
        copies: rows that reach the rank's experts, own ones included.
        own_copies: (token, slot) pairs of the rank's tokens.
        rank_pairs: (token, rank) pairs of its tokens, own rank included.
        domain_pairs: (token, domain) pairs, own domain included.
        arriving_pairs: (token, rank) pairs that arrive, own ones included.
    """

    sent: dict[str, Tensor]
    received: dict[str, Tensor]
    copies: Tensor
    own_copies: Tensor
    rank_pairs: Tensor
    domain_pairs: Tensor
    arriving_pairs: Tensor


def count_rows(work: Work, wire: Wire) -> Counts:
    """Count a work's rows from the routing of all ranks, for one way of sending them."""
    topology = Topology(ep_size=work.ranks, domain_size=work.ranks // work.domains)
    owner = Placement.even(work.num_experts, work.ranks).rank_of
    traffic = Traffic(torch.zeros(work.ranks, work.ranks, dtype=torch.float64), topology)
    copies = torch.zeros(work.ranks, work.ranks, dtype=torch.float64)
    pairs = torch.zeros_like(copies)
    domain_pairs = torch.zeros(work.ranks, dtype=torch.float64)
    for rank in range(work.ranks):
        topk_idx = make_routing(work, rank)
        dst_rank = torch.where(topk_idx >= 0, owner[topk_idx.clamp(min=0)], -1)
        copies[rank] = torch.bincount(dst_rank[dst_rank >= 0], minlength=work.ranks)
        reached = _reached(dst_rank, work.ranks)
        pairs[rank] = reached.sum(0)
        by_domain = reached.view(len(reached), work.domains, topology.domain_size)
        domain_pairs[rank] = by_domain.any(2).sum()
        traffic += _traffic(work, wire, dst_rank, rank, topology)
    return Counts(
        sent={link: traffic.rows_per_rank(link, "send") for link in LINKS},
        received={link: traffic.rows_per_rank(link, "receive") for link in LINKS},
        copies=copies.sum(0),
        own_copies=copies.sum(1),
        rank_pairs=pairs.sum(1),
        domain_pairs=domain_pairs,
        arriving_pairs=pairs.sum(0),
    )


def phase_bytes(work: Work, counts: Counts, phase: str) -> dict[str, float]:
    """Bytes of one rank in one phase, means over the ranks.

    Returns:
        "wire_bytes" (sent), "wire_bytes_max" (of the busiest rank), "across_bytes" (the part that
        leaves the domain), and "hbm_bytes": the least local memory traffic, which is one read of
        each row and one write of each row that the phase delivers.
    """
    outward = phase in FORWARD
    sent = counts.sent if outward else counts.received
    total = sum(sent.values(), torch.zeros(work.ranks, dtype=torch.float64)) * work.row_bytes
    rows = work.num_tokens + float(counts.copies.mean())
    return {
        "wire_bytes": float(total.mean()),
        "wire_bytes_max": float(total.max()),
        "across_bytes": float(sent["across"].mean()) * work.row_bytes,
        "hbm_bytes": rows * work.row_bytes,
    }


def rates(
    work: Work, counts: Counts, phase: str, time_us: float, plan_us: float | None, flat: bool
) -> dict[str, float]:
    """GB/s (1e9 bytes) of a phase by each definition; means over the ranks.

    Args:
        work: what was moved.
        counts: of it.
        phase: "dispatch", "combine" or a backward; combine's rows run the other way.
        time_us: of the phase, slowest rank.
        plan_us: of the plan, which D5 charges; None leaves D5 out.
        flat: whether the backend delivers a token once a rank.
    """
    row = work.row_bytes
    rows_in = counts.arriving_pairs if flat else counts.copies
    sent = sum(float(rows.mean()) for rows in counts.sent.values())
    received = sum(float(rows.mean()) for rows in counts.received.values())
    if phase in BACKWARD:
        sent, received = received, sent
    beside = _SLOT_BYTES * work.num_topk
    counted = {
        "wire": sent * row,
        "D1": float(counts.domain_pairs.mean()) * row,
        "D2": float(rows_in.mean()) * row,
        "D3": float(counts.rank_pairs.mean()) * (row + beside),
        "D4_send": sent * row,
        "D4_receive": received * row,
    }
    found = {name: size / time_us / 1000 for name, size in counted.items()}
    if plan_us is not None:
        charged_us = time_us + plan_us
        found["D5_assignments"] = float(counts.own_copies.mean()) * row / charged_us / 1000
        found["D5_pairs"] = float(counts.rank_pairs.mean()) * row / charged_us / 1000
    return {name: round(value, 4) for name, value in found.items()}


def _reached(dst_rank: Tensor, ranks: int) -> Tensor:
    """[T, P] bool: which ranks each token goes to."""
    reached = torch.zeros(len(dst_rank), ranks + 1, dtype=torch.bool)
    reached.scatter_(1, torch.where(dst_rank >= 0, dst_rank, ranks), value=True)
    return reached[:, :ranks]


def _traffic(work: Work, wire: Wire, dst_rank: Tensor, rank: int, topology: Topology) -> Traffic:
    """One rank's messages in a backend's way of sending."""
    if wire != "all_gather":
        return source_traffic(dst_rank, rank, topology, wire)
    rows = torch.zeros(work.ranks, work.ranks, dtype=torch.float64)
    rows[rank] = len(dst_rank)
    rows[rank, rank] = 0
    return Traffic(rows, topology)
