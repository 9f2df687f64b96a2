"""Draws the phases of a layer over time, one lane for communication and one for the experts.

python -m ep_dispatcher.profile.picture spans.json docs/overlap.png --rank 0
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

_COLOURS = {
    "plan": "#999999",
    "dispatch": "#1f77b4",
    "combine": "#2ca02c",
    "dispatch_backward": "#17becf",
    "combine_backward": "#98df8a",
    "experts": "#ff7f0e",
    "experts_backward": "#d62728",
}


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
    for row, (name, spans) in enumerate(reversed(spans_of.items())):
        base = 2.5 * row
        for span in spans:
            lane = base + (span.name in COMMUNICATION)
            axes.barh(
                lane, span.end_ms - span.start_ms, left=span.start_ms, height=0.9,
                color=_COLOURS.get(span.name, "black"), edgecolor="white", linewidth=0.4,
            )  # fmt: skip
        ticks += [base, base + 1]
        labels += [f"{name}: experts", "communication"]
    axes.set_xlim(left=0)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set_xlabel("ms since the layer began")
    axes.set_title(title, fontsize=10)
    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
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
    """Read the file that `ep_dispatcher.profile.layer --spans` wrote and draw it."""
    parser = argparse.ArgumentParser(prog="ep_dispatcher.profile.picture", description=__doc__)
    parser.add_argument("spans", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--variants", default="", help="names with commas; default all")
    parser.add_argument("--title", default="One MoE layer, forward and backward")
    args = parser.parse_args(words)
    ranks: list[dict[str, list[Any]]] = json.loads(args.spans.read_text(encoding="utf-8"))
    found = ranks[args.rank]
    names = args.variants.split(",") if args.variants else list(found)
    spans = {name: [Span(*each) for each in found[name]] for name in names}
    draw(spans, args.title, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
