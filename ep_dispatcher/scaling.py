"""A model of dispatch and combine over many NVLink domains, from bytes and measured kernel rates.

    python -m ep_dispatcher.scaling [--results docs/results] [--out docs]

Bytes are `accounting.expected_traffic`; rates of the kernels and of the rails' roles are those that
one GPU showed; links have stated speeds. No network was measured: docs/scaling.md lists what is
assumed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ep_dispatcher.accounting import expected_traffic
from ep_dispatcher.config import EpConfig, MoeShape, Topology
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.memory import partial_bytes, persistent_bytes
from ep_dispatcher.plan import Placement
from ep_dispatcher.rail_memory import WORD_BYTES, rail_blocks

DOMAINS = (1, 2, 4, 8, 16, 32, 64)
FIXED_US = 30.0  # start of a kernel, entry signals, the first chunk's way over both links


@dataclass(frozen=True)
class Machine:
    """Links and GPUs.

    Attributes:
        rail_gb_s: what one GPU's adapter moves, a direction.
        nvlink_gb_s: what one GPU moves to its domain, a direction.
        domain_size: GPUs that NVLink joins.
        num_sms: SMs of a kernel that serve the domain; those of the rails come on top.
    """

    name: str
    rail_gb_s: float
    nvlink_gb_s: float
    domain_size: int
    num_sms: int


# Practical speeds, not nominal ones (50 and 450 GB/s); docs/scaling.md says whose.
H200_CX7 = Machine("8 x H200, 400 Gb/s a GPU", 47.0, 370.0, 8, 16)


@dataclass(frozen=True)
class Rates:
    """What one SM does, from one GPU's measurement: GB a second of rows.

    Attributes:
        dispatch_gb_s: expert rows stored, in one domain.
        combine_gb_s: expert rows summed, inside a domain, by the push form (`auto` takes gather on
            one domain).
        forward_gb_s: expert rows stored, where most come from landing slots.
        send_gb_s: rows made into records; what a record has beside its row is not counted.
        return_gb_s: sums put, while others are added up.
    """

    dispatch_gb_s: float
    combine_gb_s: float
    forward_gb_s: float
    send_gb_s: float
    return_gb_s: float


@dataclass(frozen=True)
class Estimate:
    """One phase at one number of domains; times in us.

    Attributes:
        rail_us, nvlink_us, sm_us: time that each resource is busy for; sm_us of the SMs that serve
            the domain.
        rail_sm_us: of the SMs that serve the rails.
        rail_mb: bytes over one adapter, a direction.
        puts: of one rank.
    """

    phase: str
    num_domains: int
    rail_us: float
    nvlink_us: float
    sm_us: float
    rail_sm_us: float
    rail_mb: float
    puts: float

    @property
    def total_us(self) -> float:
        """Dispatch: all at once, in a pipeline of chunks. Combine: the domain, then the rails."""
        inside = max(self.nvlink_us, self.sm_us)
        across = max(self.rail_us, self.rail_sm_us)
        return FIXED_US + (max(inside, across) if self.phase == "dispatch" else inside + across)

    @property
    def bound(self) -> str:
        """The resource that decides."""
        busy = {
            "rail": self.rail_us,
            "NVLink": self.nvlink_us,
            "SMs": self.sm_us,
            "rail SMs": self.rail_sm_us,
        }
        return max(busy, key=lambda name: busy[name])


def read_rates(folder: Path, hidden: int = 7168) -> Rates:
    """The best rate of each kernel and role among the recorded settings of that width.

    Of the rails' roles while they do not wait, as the model has them in a pipeline. A put that is
    recorded is a copy inside the GPU, made by the putting warps: it is left out of the send role,
    whose warps only post to an adapter, and is all of the return role. A role that was not recorded
    is taken to copy at dispatch's rate.

    Args:
        folder: holds one_domain.jsonl, and rails.jsonl where the rails were timed.
        hidden: elements of a row.

    Raises:
        ConfigError: a kernel of one domain was not recorded.
    """
    best: dict[str, float] = {}
    for row in _lines(folder / "one_domain.jsonl", hidden):
        if row["phase"] in ("dispatch", "combine"):
            row_bytes = row["num_tokens"] * row["num_topk"] * 2 * hidden
            rate = row_bytes / row["num_sms"] / row["median_us"] / 1e3
            best[row["phase"]] = max(rate, best.get(row["phase"], 0.0))
    if set(best) != {"dispatch", "combine"}:
        raise ConfigError(f"{folder} holds no dispatch and combine with hidden {hidden}")
    roles: dict[str, float] = {}
    for row in _lines(folder / "rails.jsonl", hidden):
        if "GBps_per_block" in row:
            rate = float(row["GBps_per_block"]) / _busy_share(row)
            roles[row["phase"]] = max(rate, roles.get(row["phase"], 0.0))
    of_roles = [roles.get(role, best["dispatch"]) for role in _ROLES]
    return Rates(best["dispatch"], best["combine"], *of_roles)


_ROLES = ("dispatch/forward", "dispatch/send", "combine_return/return")


def _busy_share(row: dict[str, Any]) -> float:
    """Of a role's time: neither waiting nor, if it sends, putting."""
    putting = row.get("putting_share", 0.0) if row["phase"] == "dispatch/send" else 0.0
    return 1.0 - float(row.get("waiting_share", 0.0)) - float(putting)


def _lines(path: Path, hidden: int) -> Iterator[dict[str, Any]]:
    """The results of that width in a file; none where there is no file."""
    for line in path.read_text().splitlines() if path.is_file() else ():
        row = json.loads(line)
        if row.get("hidden") == hidden and "phase" in row:
            yield row


def record_bytes(config: EpConfig) -> int:
    """Bytes of one put of dispatch: a row and the weight of each slot, as `accounting.side_bytes`.

    What lies in the slot where it lands is padded (`memory.rail_record_bytes`); the padding does
    not cross.
    """
    return config.shape.row_bytes + WORD_BYTES * config.shape.num_topk


@dataclass(frozen=True)
class Phase:
    """Bytes of one put, and of one row over NVLink and in the rates; the rates of the two parts."""

    name: str
    put_bytes: int
    row_bytes: int
    sm_gb_s: float
    rail_sm_gb_s: float


def estimate(config: EpConfig, num_domains: int, machine: Machine, rates: Rates) -> list[Estimate]:
    """Dispatch and combine of uniform routing over `num_domains` domains.

    Of a forward pass: dispatch carries weights, combine no gradients of them.

    Example: one domain has no rail, so rail_us is 0.
    """
    topology = Topology(ep_size=num_domains * machine.domain_size, domain_size=machine.domain_size)
    shape, tokens = config.shape, config.max_tokens_per_rank
    placement = Placement.even(shape.num_experts, topology.ep_size)
    traffic = expected_traffic(placement, tokens, shape.num_topk, topology)
    across = float(traffic.rows_per_rank("across", "send")[0])
    inside = float(traffic.rows_per_rank("inside", "send")[0])
    expert_rows = tokens * shape.num_topk * shape.row_bytes
    blocks = max(1, rail_blocks(config, topology))
    several = num_domains > 1
    both = (
        Phase(
            "dispatch",
            record_bytes(config),
            shape.row_bytes,
            rates.forward_gb_s if several else rates.dispatch_gb_s,
            rates.send_gb_s,
        ),
        Phase(
            "combine",
            partial_bytes(config),
            partial_bytes(config),
            rates.combine_gb_s,
            rates.return_gb_s,
        ),
    )
    return [
        Estimate(
            phase=one.name,
            num_domains=num_domains,
            rail_us=across * one.put_bytes / machine.rail_gb_s / 1e3,
            nvlink_us=inside * one.row_bytes / machine.nvlink_gb_s / 1e3,
            sm_us=expert_rows / one.sm_gb_s / machine.num_sms / 1e3,
            rail_sm_us=across * one.row_bytes / one.rail_sm_gb_s / blocks / 1e3,
            rail_mb=across * one.put_bytes / 1e6,
            puts=across,
        )
        for one in both
    ]


def typical_config(num_domains: int, domain_size: int) -> EpConfig:
    """T=4096, H=7168, K=8, E=256 in BF16; one expert a rank where there are more ranks."""
    num_experts = max(256, num_domains * domain_size)
    shape = MoeShape(hidden=7168, num_topk=8, num_experts=num_experts)
    return EpConfig(shape=shape, max_tokens_per_rank=4096)


def table(machine: Machine, rates: Rates, domains: Iterable[int] = DOMAINS) -> str:
    """A Markdown table of both phases."""
    lines = [
        "| domains | experts | puts a rank | dispatch: rail / NVLink / SMs / rail SMs, us |"
        " dispatch, us | combine: the same, us | combine, us | persistent GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for count in domains:
        config = typical_config(count, machine.domain_size)
        parts = []
        both = estimate(config, count, machine, rates)
        for one in both:
            parts.append(
                f"{one.rail_us:.0f} / {one.nvlink_us:.0f} / {one.sm_us:.0f} / {one.rail_sm_us:.0f}"
            )
            parts.append(f"**{one.total_us:.0f}** ({one.bound})")
        topology = Topology(ep_size=count * machine.domain_size, domain_size=machine.domain_size)
        memory_gb = persistent_bytes(config, topology)["total"] / 1e9
        cells = (count, config.shape.num_experts, f"{both[0].puts:.0f}", *parts, f"{memory_gb:.2f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


# Published times, or recomputed from the publisher's rate by the rule in docs/scaling.md.
# (name, ((domains, dispatch us, combine us), ...))
PUBLISHED = (
    ("Hybrid-EP kernels, H100, 16 SMs, BF16", ((2, 1633, 1859), (4, 3678, 3691), (8, 6218, 6244))),
    ("pplx-garden on CX7", ((4, 4012, 7527), (8, 4665, 8771))),
    ("DeepEP as pplx-garden ran it, CX7", ((2, 2482, 1864), (4, 3680, 3565), (8, 5072, 5923))),
)


def beside(machine: Machine, rates: Rates) -> str:
    """A Markdown table of the model's times and the published ones, us."""
    names = [name for name, _ in PUBLISHED]
    lines = [
        f"| domains of {machine.domain_size} | model, ours, us (dispatch, combine) | "
        + " | ".join(names)
        + " |",
        "|" + "---|" * (2 + len(names)),
    ]
    for count in sorted({point[0] for _, points in PUBLISHED for point in points}):
        config = typical_config(count, machine.domain_size)
        ours = ", ".join(f"{one.total_us:.0f}" for one in estimate(config, count, machine, rates))
        cells = [str(count), ours]
        for _, points in PUBLISHED:
            theirs = [f"{p[1]}, {p[2]}" for p in points if p[0] == count]
            cells.append(theirs[0] if theirs else "(left out)")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(machine: Machine, rates: Rates, path: Path) -> None:
    """Time against domains, the model as lines, published times as marks.

    What was drawn stands in the picture's description too, where a test can read it.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "scaling"  # the same file from the same numbers
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.8), sharey=True, layout="constrained")
    for axis, phase, column in zip(axes, ("dispatch", "combine"), (1, 2), strict=True):
        found = [
            one
            for count in DOMAINS
            for one in estimate(typical_config(count, machine.domain_size), count, machine, rates)
            if one.phase == phase
        ]
        counts = [one.num_domains for one in found]
        axis.plot(counts, [one.total_us for one in found], "k-o", ms=4, label="model, ours")
        for name in ("rail", "nvlink", "sm", "rail_sm"):
            busy = [getattr(one, f"{name}_us") for one in found]
            axis.plot(counts, [us or None for us in busy], "--", lw=1, label=f"model: {name}")
        for (label, points), mark in zip(PUBLISHED, "sv^", strict=True):
            axis.plot([p[0] for p in points], [p[column] for p in points], mark, label=label)
        axis.set(
            xscale="log", yscale="log", title=phase, xlabel=f"domains of {machine.domain_size}"
        )
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("us")
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=4, fontsize=7)
    figure.suptitle(
        "MODEL, no RDMA hardware was used: T=4096 H=7168 K=8 BF16, uniform", fontsize=10
    )
    drawn = f"{rates}\n{table(machine, rates)}\n{beside(machine, rates)}"
    figure.savefig(path, metadata={"Date": None, "Description": drawn})
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> int:
    """Print the tables and write the picture."""
    parser = argparse.ArgumentParser(description="Model of time against NVLink domains.")
    parser.add_argument("--results", type=Path, default=Path("docs/results"), help="folder")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of scaling.svg")
    args = parser.parse_args(words)
    if not args.out.is_dir():
        parser.error(f"--out {args.out} is no folder")
    try:
        rates = read_rates(args.results)
    except ConfigError as error:
        parser.error(f"--results: {error}")
    tables = f"{table(H200_CX7, rates)}\n\n{beside(H200_CX7, rates)}"
    sys.stdout.write(f"{rates}\n{H200_CX7}\n\n{tables}\n")
    plot(H200_CX7, rates, args.out / "scaling.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
