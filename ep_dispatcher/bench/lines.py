"""Turns outcomes into recorded lines: one for each phase, or one that says why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ep_dispatcher.bench.bandwidth import BACKWARD, FORWARD, Counts, count_rows, phase_bytes, rates
from ep_dispatcher.bench.interference import ALONE, BESIDE, CALLS, CONTROL
from ep_dispatcher.bench.launcher import Outcome
from ep_dispatcher.bench.results import summarise_times
from ep_dispatcher.bench.spec import Work

PHASES = (
    "plan",
    "plan_static",
    "permute",
    "dispatch",
    "combine",
    "unpermute",
    "combine_backward",
    "dispatch_backward",
    "pair",
    "layer_forward",
    "layer_backward",
    ALONE,
    BESIDE,
    CONTROL,
)


def lines_of(outcome: Outcome, suite: str, sharing: str) -> Iterable[dict[str, Any]]:
    """Fields of each line of an outcome, without those that the log fills in.

    Args:
        outcome: of one backend on one work.
        suite: name of the suite.
        sharing: how the ranks share the machine; decides the ceiling that applies.
    """
    common = {"suite": suite, "sharing": sharing, "backend": outcome.backend}
    common |= work_fields(outcome.work)
    if outcome.error is not None:
        yield common | {"checked": False, "error": outcome.error}
        return
    common |= _shared_figures(outcome)
    out, home = (outcome.ranks[0][name] for name in ("wire", "wire_home"))
    outward = count_rows(outcome.work, out)
    homeward = outward if home == out else count_rows(outcome.work, home)
    slowest = slowest_rank(outcome)
    plan_us = summarise_times(slowest["plan"])["median_us"] if "plan" in slowest else None
    for phase in PHASES:
        if phase in slowest:
            times = summarise_times(slowest[phase])
            fields: dict[str, Any] = common | {"phase": phase} | times
            fields |= _host_figures(outcome, phase)
            if phase in FORWARD + BACKWARD:
                counts = outward if phase in FORWARD else homeward
                fields |= _rate_figures(outcome, counts, phase, times["median_us"], plan_us)
            if phase == BESIDE:
                fields[CALLS] = min(rank["beside_calls"] for rank in outcome.ranks)
            fields["rounds_us"] = [round(us, 2) for us in slowest[phase]]
            yield fields


def work_fields(work: Work) -> dict[str, Any]:
    """Fields of a work under the names of the recorded lines; what does not apply is left out."""
    fields = asdict(work)
    if work.routing != "zipf":
        del fields["skew"]
    for name in ("trace", "masked_fraction", "ffn_hidden"):
        if not fields[name]:
            del fields[name]
    for name in ("combine", "duplicates"):
        if fields[name] == "auto":
            del fields[name]
    return fields


def slowest_rank(outcome: Outcome) -> dict[str, list[float]]:
    """Microseconds of each round by phase, of the rank that was slowest in that round."""
    first = outcome.ranks[0]["times_us"]
    return {
        phase: [max(us) for us in zip(*(r["times_us"][phase] for r in outcome.ranks), strict=True)]
        for phase in first
    }


def _shared_figures(outcome: Outcome) -> dict[str, Any]:
    """Fields that all phases of an outcome share."""
    ranks = outcome.ranks
    figures: dict[str, Any] = {
        "checked": True,
        "layout": ranks[0]["layout"],
        "wire": ranks[0]["wire"],
        "wire_home": ranks[0]["wire_home"],
        "identity": ranks[0]["identity"],
        "max_error": max(rank["max_error"] for rank in ranks),
        "received_rows": [rank["received_rows"] for rank in ranks],
        "cpu_us": max(rank["cpu_us"] for rank in ranks),
        "open_s": max(rank["open_s"] for rank in ranks),
        "clocks": ranks[0]["clocks"],
    }
    if ranks[0]["bit_equal"] is not None:
        figures["bit_equal"] = all(rank["bit_equal"] for rank in ranks)
    for group in ("memory", "usage"):
        for name in ranks[0][group]:
            figures[name] = max(rank[group][name] for rank in ranks)
    return figures


def _host_figures(outcome: Outcome, phase: str) -> dict[str, float]:
    """The host's time in one phase, slowest rank."""
    spent = [rank["host_us"].get(phase) for rank in outcome.ranks]
    return {} if None in spent else {"host_us": max(us for us in spent if us is not None)}


def _rate_figures(
    outcome: Outcome, counts: Counts, phase: str, time_us: float, plan_us: float | None
) -> dict[str, Any]:
    """Bytes and rates of a phase that moves rows, and its share of the measured ceiling."""
    work = outcome.work
    flat = outcome.ranks[0]["layout"] == "flat"
    sizes = {k: round(v) for k, v in phase_bytes(work, counts, phase).items()}
    figures: dict[str, Any] = dict(sizes)
    figures["bandwidth_GBps"] = rates(work, counts, phase, time_us, plan_us, flat)
    moved = float(counts.copies.mean()) * work.row_bytes
    figures["payload_GBps_per_sm"] = round(moved / time_us / 1000 / work.num_sms, 4)
    ceilings = [rank["ceilings"] for rank in outcome.ranks]
    kind = "link" if all("link" in found for found in ceilings) else "memory"
    ceiling = min((found.get(kind, math.inf) for found in ceilings), default=math.inf)
    if math.isfinite(ceiling):
        size = sizes["wire_bytes"] if kind == "link" else sizes["hbm_bytes"]
        figures["ceiling"] = kind
        figures["ceiling_GBps"] = round(ceiling, 3)
        figures["ceiling_fraction"] = round(size / time_us / 1000 / ceiling, 4)
    return figures
