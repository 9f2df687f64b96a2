"""Draws the phases of a layer over time, one lane for communication and one for the experts.

    python -m ep_dispatcher.profile.picture spans.json docs/overlap.png --rank 0
    python -m ep_dispatcher.profile.picture runs/profile/trace_rank0.json docs/overlap.png

The first form takes what `ep_dispatcher.profile.layer --spans` wrote, one row for each variant; the
second a Chrome trace of `ep-dispatcher profile`, whose last layer is drawn kernel by kernel.
Several traces, each as NAME=FILE, are drawn below each other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ep_dispatcher.profile.clock import COMMUNICATION, Span
from ep_dispatcher.profile.trace import Trace
from ep_dispatcher.ranges import PREFIX

_COLOURS = {
    "plan": "#999999",
    "dispatch": "#1f77b4",
    "combine": "#2ca02c",
    "dispatch_backward": "#17becf",
    "combine_backward": "#98df8a",
    "experts": "#ff7f0e",
    "experts_backward": "#d62728",
    "shared_experts": "#9467bd",
    "shared_experts_backward": "#c5b0d5",
}


_MANY = 60  # spans of a row, above which white edges would cover them


def last_layer(trace: Trace) -> list[Span]:
    """Forward and backward of the last layer of a trace, in ms since its first plan.

    A layer begins with a plan after the backward of another layer, or after nothing.
    """
    spans: list[Span] = []
    went_back = False
    for each in trace.work:
        name = each.phase.removeprefix(PREFIX)
        if not name:
            continue
        if name == "plan" and went_back:
            spans.clear()
        went_back = name.endswith("_backward")
        spans.append(Span(name, each.start_us / 1e3, each.end_us / 1e3))
    start = spans[0].start_ms if spans else 0.0
    return [Span(each.name, each.start_ms - start, each.end_ms - start) for each in spans]


def draw(spans_of: dict[str, list[Span]], title: str, path: Path) -> None:
    """Draw one row of two lanes for each variant, all on one axis of time.

    Args:
        spans_of: phases of one rank, by variant.
        title: of the picture.
        path: PNG to write.
    """
    figure = Figure(figsize=(11, 0.9 + 0.85 * len(spans_of)), layout="constrained")
    axes = figure.add_subplot()
    labels, ticks = [], []
    edge = 0.4 if max(map(len, spans_of.values())) < _MANY else 0.0
    for row, (name, spans) in enumerate(reversed(spans_of.items())):
        base = 2.5 * row
        for span in spans:
            lane = base + (span.name in COMMUNICATION)
            axes.barh(
                lane, span.end_ms - span.start_ms, left=span.start_ms, height=0.9,
                color=_COLOURS.get(span.name, "black"), edgecolor="white", linewidth=edge,
            )  # fmt: skip
        ticks += [base, base + 1]
        labels += [f"{name}: experts", "communication"]
    axes.set_xlim(left=0)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set_xlabel("ms since the layer began")
    axes.set_title(title, fontsize=10)
    seen = {span.name for spans in spans_of.values() for span in spans}
    handles = [Patch(color=_COLOURS[name], label=name) for name in _COLOURS if name in seen]
    below = -0.16 if len(spans_of) > 3 else -0.25
    axes.legend(
        handles=handles,
        ncol=len(handles),
        fontsize=7,
        loc="upper center",
        bbox_to_anchor=(0.5, below),
        frameon=False,
    )
    figure.savefig(path, dpi=130)


def main(words: Sequence[str]) -> int:
    """Read the files and draw them."""
    parser = argparse.ArgumentParser(prog="ep_dispatcher.profile.picture", description=__doc__)
    parser.add_argument("files", nargs="+", help="spans, or Chrome traces, and the PNG to write")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--variants", default="", help="names with commas; default all")
    parser.add_argument("--title", default="One MoE layer, forward and backward")
    args = parser.parse_args(words)
    *sources, picture = args.files
    spans_of: dict[str, list[Span]] = {}
    for source in sources:
        name, _, file = source.rpartition("=")
        spans_of |= _read(Path(file), name or "layer", args.rank)
    names = args.variants.split(",") if args.variants else list(spans_of)
    draw({name: spans_of[name] for name in names}, args.title, Path(picture))
    return 0


def _read(path: Path, name: str, rank: int) -> dict[str, list[Span]]:
    """Spans by variant: those of a rank in a file of spans, or the last layer of a trace."""
    if path.suffix != ".gz":
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, list):
            found: dict[str, list[Any]] = content[rank]
            return {each: [Span(*span) for span in spans] for each, spans in found.items()}
    return {name: last_layer(Trace.read(path))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
