"""What a config will cost, before anything runs: bytes on each link, rows, persistent memory.

`make_report` gives plain values (the JSON form), `print_report` the same as tables. Nothing here
needs a GPU or more than one process: the routing of every rank is drawn by a seed and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ep_dispatcher.accounting import (
    LINKS,
    SCHEMES,
    Link,
    Scheme,
    Traffic,
    carried_copies,
    expected_traffic,
    side_bytes,
    source_traffic,
)
from ep_dispatcher.device_limits import config_reason
from ep_dispatcher.device_session import check_table_fits
from ep_dispatcher.errors import UnavailableError
from ep_dispatcher.group import placement_of
from ep_dispatcher.megatron.routes import fold_tensor_ranks  # needs nothing of megatron
from ep_dispatcher.memory import counts_row_bytes, partial_bytes, persistent_bytes
from ep_dispatcher.plan import Placement, count_copies, expert_layout
from ep_dispatcher.plan_input import PlanQuestion
from ep_dispatcher.rails import check_world
from ep_dispatcher.routing import make_world

_TIERS: tuple[Literal["device", "reference"], ...] = ("device", "reference")
_LEGEND = """\
Cells: mean/largest over the ranks, MB = 1e6 bytes, rows only; local copies are not sent.
What a rank sends in dispatch it receives in combine. "inside": in its NVLink domain.
  deduplicated  device tier: once to each rank of the own domain, once to each other
                domain, whose same-index GPU forwards it
  by_rank       reference tier: once to each rank, nothing forwarded
  by_copy       no deduplication: once for each expert
  expected      mean of deduplicated by formula (uniform routing)"""


@dataclass(frozen=True)
class _World:
    """What the routing of all ranks comes to.

    Attributes:
        placement: owner of each expert.
        counts: [P, E] int64.
        dispatch: messages of dispatch in each scheme.
        copies: what the deduplicated messages carry.
    """

    placement: Placement
    counts: Tensor
    dispatch: dict[Scheme, Traffic]
    copies: Traffic


def make_report(question: PlanQuestion) -> dict[str, Any]:
    """Answer with plain values: bytes are per rank, each with the mean and the maximum."""
    refusal = _refusal(question)
    world = _count_world(question)
    shape, topology = question.config.shape, question.topology
    return {
        "ranks": topology.ep_size,
        "domains": topology.num_domains,
        "num_tokens": question.num_tokens,
        "hidden": shape.hidden,
        "num_topk": shape.num_topk,
        "num_experts": shape.num_experts,
        "num_shards": question.num_shards,
        "dtype": shape.dtype,
        "row_bytes": shape.row_bytes,
        "routing": question.routing.name,
        "seed": question.routing.seed,
        "rows": _rows(question, world),
        "links": [
            _link_entry(question, world, phase, link, scheme)
            for phase in ("dispatch", "combine")
            for link in LINKS
            for scheme in SCHEMES
        ],
        "counts_send_bytes": (topology.ep_size - 1) * counts_row_bytes(question.config, topology),
        "memory": {
            tier: persistent_bytes(question.config, topology, tier)
            for tier in _TIERS
            if tier == "reference" or refusal is None
        },
        "device_tier_refuses": refusal,
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables; every figure in it is per rank."""
    console.print(
        f"[bold]{report['ranks']} ranks in {report['domains']} domain(s)[/]: "
        f"T={report['num_tokens']} H={report['hidden']} K={report['num_topk']} "
        f"E={report['num_experts']} {report['dtype']} ({report['row_bytes']} bytes a row), "
        f"routing {report['routing']}, seed {report['seed']}"
    )
    if report["num_shards"] > 1:
        console.print(f"K and E count each of an expert's {report['num_shards']} shards as one.")
    console.print(_rows_table(report["rows"]))
    console.print(_links_table(report["links"], report["domains"]))
    console.print(_LEGEND, highlight=False, soft_wrap=True)
    beside = {
        entry["link"]: _megabytes(entry["side_send_bytes"]["mean"])
        for entry in report["links"]
        if "side_send_bytes" in entry
    }
    console.print(
        f"Addresses and weights beside the deduplicated rows of dispatch: {beside['inside']} MB "
        f"inside, {beside['across']} MB across; counts of a plan: {report['counts_send_bytes']:,} "
        "bytes.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_memory_table(report["memory"]))
    refusal = report["device_tier_refuses"]
    device = f"refuses this: {refusal}" if refusal is not None else "takes this"
    for tier, verdict in (("device", device), ("reference", "takes this")):
        console.print(f"The {tier} tier {verdict}", highlight=False, soft_wrap=True)


def _refusal(question: PlanQuestion) -> str | None:
    """Why the device tier does not take this config, its domains or tokens; None if it does.

    Raises:
        UnavailableError: the same, where the config asks for that tier.
    """
    try:
        reason = config_reason(question.config, question.topology.num_domains)
        if reason is not None:
            raise UnavailableError(reason)
        check_world(question.config, question.topology)
        placement = placement_of(question.config, question.topology.ep_size)
        check_table_fits(placement, question.topology.domain_size)
    except UnavailableError as error:
        if question.config.tier == "device":
            raise
        return str(error)
    return None


def _count_world(question: PlanQuestion) -> _World:
    """Draw every rank's routing once and count it."""
    topology = question.topology
    placement = placement_of(question.config, topology.ep_size)
    counts = []
    zeros = torch.zeros(topology.ep_size, topology.ep_size, dtype=torch.float64)
    dispatch = {scheme: Traffic(zeros, topology) for scheme in SCHEMES}
    copies = Traffic(zeros, topology)
    routings = make_world(question.routing, question.num_tokens, topology.ep_size)
    for rank, chosen in enumerate(routings):
        topk_idx = _to_shards(chosen, question)
        counts.append(count_copies(topk_idx, placement.num_experts))
        dst_rank = placement.rank_of[topk_idx]
        copies += carried_copies(dst_rank, rank, topology)
        for scheme in SCHEMES:
            dispatch[scheme] += source_traffic(dst_rank, rank, topology, scheme)
    return _World(placement, torch.stack(counts), dispatch, copies)


def _to_shards(topk_idx: Tensor, question: PlanQuestion) -> Tensor:
    """Experts that the router chose -> experts as the group counts them, each shard one."""
    if question.num_shards == 1:
        return topk_idx
    num_local = question.config.shape.num_experts // question.topology.ep_size
    return fold_tensor_ranks(topk_idx, num_local, question.num_shards)


def _rows(question: PlanQuestion, world: _World) -> dict[str, Any]:
    """Rows that a rank receives, real and padded."""
    layouts = [
        expert_layout(world.counts, world.placement, rank, question.config.alignment)
        for rank in range(question.topology.ep_size)
    ]
    return {
        "alignment": question.config.alignment,
        "sent_copies": question.num_tokens * question.config.shape.num_topk,
        "received": _spread(torch.stack([layout.real.sum() for layout in layouts])),
        "received_padded": _spread(torch.stack([layout.padded.sum() for layout in layouts])),
        "per_expert": _spread(world.counts.sum(0)),
    }


def _link_entry(
    question: PlanQuestion, world: _World, phase: str, link: Link, scheme: Scheme
) -> dict[str, Any]:
    """Bytes of one phase on one class of link in one scheme."""
    config, traffic = question.config, world.dispatch[scheme]
    row_bytes = config.shape.row_bytes
    if phase == "combine":
        traffic = traffic.transpose()
        # Without deduplication nothing is summed before it travels, so rows keep their dtype.
        row_bytes = row_bytes if scheme == "by_copy" else partial_bytes(config)
    entry: dict[str, Any] = {
        "phase": phase,
        "link": link,
        "scheme": scheme,
        "send_bytes": _spread(traffic.bytes_per_rank(link, "send", row_bytes)),
        "receive_bytes": _spread(traffic.bytes_per_rank(link, "receive", row_bytes)),
    }
    if question.routing.name == "uniform" and question.num_shards == 1:
        num_topk = question.routing.num_topk
        tokens, topology = question.num_tokens, question.topology
        expected = expected_traffic(world.placement, tokens, num_topk, topology, scheme)
        # The mean over ranks, which is the same for send and receive.
        entry["expected_bytes"] = float(expected.bytes_per_rank(link, "send", row_bytes).mean())
    if scheme == "deduplicated" and phase == "dispatch":
        beside = side_bytes(traffic, world.copies, config.shape.num_topk, link, "send")
        entry["side_send_bytes"] = _spread(beside)
    return entry


def _spread(per_rank: Tensor) -> dict[str, float]:
    """Mean and maximum over the ranks."""
    values = per_rank.to(torch.float64)
    return {"mean": float(values.mean()), "max": float(values.max())}


def _rows_table(rows: dict[str, Any]) -> Table:
    table = Table(title="Rows", title_justify="left")
    table.add_column("what")
    table.add_column("mean", justify="right")
    table.add_column("largest", justify="right")
    sent = f"{rows['sent_copies']:,}"
    table.add_row("copies that a rank sends (T x K)", sent, sent)
    for name, words in (
        ("received", "rows that a rank receives"),
        ("received_padded", f"the same, each expert padded to {rows['alignment']}"),
        ("per_expert", "rows of an expert"),
    ):
        table.add_row(words, f"{rows[name]['mean']:,.0f}", f"{rows[name]['max']:,.0f}")
    return table


def _links_table(links: list[dict[str, Any]], num_domains: int) -> Table:
    """One line for each phase and link that exists, one column for each scheme."""
    table = Table(title="Payload that a rank sends, MB", title_justify="left")
    table.add_column("link")
    for column in (*SCHEMES, "expected"):
        table.add_column(column, justify="right")
    for phase in ("dispatch", "combine"):
        for link in LINKS if num_domains > 1 else LINKS[:1]:
            entries = {e["scheme"]: e for e in links if (e["phase"], e["link"]) == (phase, link)}
            table.add_row(
                f"{phase} {link}",
                *(_mean_and_max(entries[scheme]["send_bytes"]) for scheme in SCHEMES),
                _megabytes(entries["deduplicated"].get("expected_bytes")),
            )
    return table


def _memory_table(memory: dict[str, dict[str, int]]) -> Table:
    table = Table(title="Persistent device memory per rank", title_justify="left")
    table.add_column("term")
    table.add_column("MB", justify="right")
    for term, size in memory.get("device", {}).items():
        if term == "total":
            table.add_section()
        table.add_row(f"device tier: {term}", _megabytes(size))
    table.add_row("reference tier: total", _megabytes(memory["reference"]["total"]))
    return table


def _mean_and_max(size: dict[str, float]) -> str:
    return f"{_megabytes(size['mean'])}/{_megabytes(size['max'])}"


def _megabytes(size: float | None) -> str:
    """Bytes as MB of 1e6 bytes; empty for None."""
    if size is None:
        return ""
    return f"{size / 1e6:,.1f}" if size >= 1e5 or size == 0 else f"{size / 1e6:,.4f}"
