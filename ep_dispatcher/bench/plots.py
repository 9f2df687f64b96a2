"""The report's plots, each as a PNG; one colour for a backend in all of them."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from ep_dispatcher.bench.page_data import (
    PHASES,
    Line,
    Series,
    backends_of,
    median_us,
    round_trip_us,
    runs_of,
    series,
    setting_of,
    setting_words,
    slow_down,
    timed,
)

_COLOURS = (
    "#0b6e4f",
    "#c8553d",
    "#3d5a80",
    "#e0a458",
    "#7d4e7a",
    "#888888",
    "#222222",
    "#1f9bcf",
    "#d1478f",
    "#8c6d1f",
    "#6f42c1",
    "#a3b18a",
)
_PHASE_COLOURS = {
    "plan": "#9aa5b1",
    "permute": "#e0a458",
    "dispatch": "#0b6e4f",
    "combine": "#3d5a80",
    "unpermute": "#c8553d",
}
_SIZE = (8.0, 4.4)
_DPI = 110


@dataclass(frozen=True)
class Plot:
    """A picture with its name and the sentence under it."""

    name: str
    caption: str
    png: bytes


def make_plots(lines: Sequence[Line], products: Sequence[Line] = ()) -> list[Plot]:
    """All plots that the lines have data for.

    Args:
        lines: recorded.
        products: those of matrix products beside communication.
    """
    mpl.use("Agg")
    makers = (
        _against_tokens,
        _stacked,
        _against_sms,
        _against_skew,
        _memory,
        _layer,
    )
    made = [*(maker(lines) for maker in makers), _interference(products)]
    return [plot for plot in made if plot is not None]


def _against_tokens(lines: Sequence[Line]) -> Plot | None:
    found = series(lines, "num_tokens", round_trip_us, where=_plain)
    title = "Forward round trip against tokens a rank"
    caption = f"{title} ({found.words}); lower is better."
    labels = ("tokens a rank", "us")
    return _curves(lines, found, "time_against_tokens", (title, caption), labels, log=True)


def _against_sms(lines: Sequence[Line]) -> Plot | None:
    def rate(here: Sequence[Line], variant: tuple[str, int]) -> float | None:
        mine = [line for line in here if (line["backend"], line["num_sms"]) == variant]
        rates = [
            line["bandwidth_GBps"]["D2"]
            for line in mine
            if line["phase"] == "dispatch" and "bandwidth_GBps" in line
        ]
        return float(rates[-1]) if rates else None

    found = series(lines, "num_sms", rate)
    title = "Dispatch, rows delivered (D2) against SMs a rank"
    caption = f"{title} ({found.words}); higher is better."
    labels = ("SMs a rank", "GB/s a rank")
    return _curves(lines, found, "rate_against_sms", (title, caption), labels)


def _against_skew(lines: Sequence[Line]) -> Plot | None:
    even = {"routing": "zipf", "skew": 0.0}  # what exponent 0 draws, under the name it was run by
    skewed = [
        line | (even if line["routing"] == "uniform" else {})
        for line in lines
        if line["routing"] in ("uniform", "zipf")
    ]
    found = series(skewed, "skew", round_trip_us)
    slower = {
        name: [(x, y / curve[0][1]) for x, y in curve] for name, curve in found.points.items()
    }
    title = "Slow-down of the round trip against skew"
    caption = f"{title}, relative to the least skew shown; 0 is uniform ({found.words})."
    labels = ("exponent of the Zipf routing", "times slower")
    found = found._replace(points=slower)
    return _curves(lines, found, "slowdown_against_skew", (title, caption), labels)


def _memory(lines: Sequence[Line]) -> Plot | None:
    def peak(here: Sequence[Line], variant: tuple[str, int]) -> float | None:
        mine = [line for line in here if (line["backend"], line["num_sms"]) == variant]
        sizes = [
            line["peak_bytes"] + line.get("persistent_bytes", 0)
            for line in mine
            if "peak_bytes" in line
        ]
        return sizes[-1] / 1e6 if sizes else None

    found = series(lines, "num_tokens", peak, where=_plain)
    title = "Peak memory in the timed rounds plus what is held"
    caption = f"{title} ({found.words}); lower is better."
    labels = ("tokens a rank", "MB a rank")
    return _curves(lines, found, "memory_against_tokens", (title, caption), labels, log=True)


def _stacked(lines: Sequence[Line]) -> Plot | None:
    """Phases of every backend on the setting that most backends have, one bar each."""
    lines = [line for line in timed(lines) if line["phase"] in PHASES]
    settings = list(map(setting_of, lines))
    if not settings:
        return None
    counts = {
        s: len({x["backend"] for x in timed(lines) if setting_of(x) == s})
        for s in dict.fromkeys(settings)
    }
    chosen = max(counts, key=lambda s: counts[s])
    mine = [line for line in timed(lines) if setting_of(line) == chosen]
    order = backends_of(mine)
    variants = sorted(
        {(line["backend"], line["num_sms"]) for line in mine},
        key=lambda variant: (order.index(variant[0]), variant[1]),
    )
    many = len({sms for _, sms in variants}) > 1
    names = [f"{backend}, {sms} SMs" if many else backend for backend, sms in variants]
    title = "Forward round trip by phase"
    figure, axes = _figure(title, height=1.7 + 0.42 * len(variants))
    left = [0.0] * len(variants)
    for phase in PHASES:
        widths = [median_us(mine, variant, phase) or 0.0 for variant in variants]
        if any(widths):
            axes.barh(
                names, widths, left=left, label=phase, color=_PHASE_COLOURS[phase], height=0.7
            )
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:,.0f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("us")
    axes.set_xlim(right=1.12 * max(left))
    axes.grid(axis="y", visible=False)
    axes.legend(ncols=5, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    caption = f"{title} ({setting_words(mine[0])}); shorter is better."
    return Plot("phases", caption + _runs_words(runs_of(mine, variants)), _png(figure))


def _layer(lines: Sequence[Line]) -> Plot | None:
    def forward_and_backward(here: Sequence[Line], variant: tuple[str, int]) -> float | None:
        parts = [median_us(here, variant, f"layer_{way}") for way in ("forward", "backward")]
        return None if None in parts else sum(us for us in parts if us is not None)

    found = series(lines, "num_tokens", forward_and_backward, where=_plain)
    what = "Whole layer with experts, forward and backward"
    labels = ("tokens a rank", "us")
    caption = f"{what} ({found.words}); lower is better."
    plot = _curves(lines, found, "layer_against_tokens", (what, caption), labels, log=True)
    if plot is not None:
        return plot
    return _bars(lines, forward_and_backward, "layer", what, ("us", "{:,.0f}"))


def _interference(lines: Sequence[Line]) -> Plot | None:
    found = series(lines, "num_sms", slow_down)
    what = "Slow-down of matrix products while dispatch and combine run beside them"
    labels = ("SMs a rank", "times slower")
    of = f"against the SMs a rank that communication may hold ({found.words}); lower is better."
    plot = _curves(lines, found, "interference", (what, f"{what}, {of}"), labels)
    if plot is not None:
        return plot
    return _bars(lines, slow_down, "interference", what, ("times slower; 1 is alone", "{:.2f}"))


def _bars(
    lines: Sequence[Line],
    value: Callable[[Sequence[Line], tuple[str, int]], float | None],
    name: str,
    what: str,
    look: tuple[str, str],
) -> Plot | None:
    """A bar for each backend where no axis was swept, on the setting with most of them.

    None where there is a single bar: it compares nothing.

    Args:
        lines: recorded.
        value: of the lines of one setting and (backend, SMs).
        name: of the plot.
        what: is shown, for the title and the caption.
        look: label of the axis, and format of a value.
    """
    bars: dict[tuple[str, int], float] = {}
    words, runs = "", list[str]()
    for setting in dict.fromkeys(map(setting_of, timed(lines))):
        mine = [line for line in timed(lines) if setting_of(line) == setting]
        variants = dict.fromkeys((line["backend"], line["num_sms"]) for line in mine)
        found = {
            variant: measured
            for variant in variants
            if (measured := value(mine, variant)) is not None
        }
        if len(found) > len(bars):
            words, bars, runs = setting_words(mine[0]), found, runs_of(mine, list(found))
    if len(bars) < 2:
        return None
    label, form = look
    figure, axes = _figure(what, height=1.5 + 0.42 * len(bars))
    names = [f"{backend}, {sms} SMs" for backend, sms in bars]
    axes.barh(names, list(bars.values()), color=_COLOURS[0], height=0.6)
    for row, measured in enumerate(bars.values()):
        axes.text(measured, row, f" {form.format(measured)}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(left=0, right=1.15 * max(bars.values()))
    axes.set_xlabel(label)
    axes.grid(axis="y", visible=False)
    caption = f"{what} ({words}); shorter is better.{_runs_words(runs)}"
    return Plot(name, caption, _png(figure))


def _runs_words(runs: Sequence[str]) -> str:
    """What a caption says of the runs: nothing of a single one, which the page's head names."""
    return f" Of several runs: {', '.join(runs)}." if len(runs) > 1 else ""


def _plain(line: Line) -> bool:
    """Uniform routing without masks: what the curves over T are drawn for."""
    return line["routing"] == "uniform" and not line.get("masked_fraction")


def _curves(
    lines: Sequence[Line],
    found: Series,
    name: str,
    words: tuple[str, str],
    labels: tuple[str, str],
    *,
    log: bool = False,
) -> Plot | None:
    """One line a backend; None where there is nothing to draw.

    Nothing is a single backend of which no run has two points: its line would show how runs differ.

    Args:
        lines: recorded; their backends give the colours.
        found: what to draw.
        name: of the plot.
        words: title of the picture, and caption without the runs.
        labels: of the axes.
        log: whether both axes are logarithmic.
    """
    points, each = found.points, list(found.runs.values())
    if not points or (len(points) == 1 and max(map(each[0].count, each[0])) < 2):
        return None
    colours = dict(zip(backends_of(lines), _COLOURS * len(lines), strict=False))
    figure, axes = _figure(words[0])
    for backend, curve in points.items():
        x, y = zip(*curve, strict=True)
        axes.plot(x, y, marker="o", markersize=4, color=colours[backend], label=backend)
    ticks = sorted({x for curve in points.values() for x, _ in curve})
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(*enclosing([y for curve in points.values() for _, y in curve]))
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    if not log:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.legend(fontsize=8, frameon=False)
    runs = list(dict.fromkeys(itertools.chain(*each)))
    return Plot(name, words[1] + _runs_words(runs), _png(figure))


def enclosing(values: Sequence[float]) -> tuple[float, float]:
    """The nearest ticks (1, 2 or 5 times a power of ten) around positive values.

    Example: 633 and 1833 -> (500, 2000).
    """
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    ticks = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    low = max(tick for tick in ticks if tick <= min(values))
    return low, min(tick for tick in ticks if tick >= max(values) and tick > low)


def _figure(title: str, height: float = _SIZE[1]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")  # over a legend that lies on the axes
    axes: Axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    options: dict[str, Any] = {"metadata": {"Software": None}}
    figure.savefig(buffer, format="png", dpi=_DPI, **options)
    return buffer.getvalue()
