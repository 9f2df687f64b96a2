"""The report's plots, each as a PNG; one colour for a backend in all of them."""

from __future__ import annotations

import io
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
    backends_of,
    median_us,
    round_trip_us,
    series,
    setting_of,
    setting_words,
    slow_down,
    timed,
)

Points = dict[str, list[tuple[float, float]]]
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


def make_plots(lines: Sequence[Line]) -> list[Plot]:
    """All plots that the lines have data for."""
    mpl.use("Agg")
    makers = (
        _against_tokens,
        _stacked,
        _against_sms,
        _against_skew,
        _memory,
        _layer,
        _interference,
    )
    return [plot for maker in makers if (plot := maker(lines)) is not None]


def _against_tokens(lines: Sequence[Line]) -> Plot | None:
    words, points = series(lines, "num_tokens", round_trip_us, where=_plain)
    caption = f"Forward round trip against tokens a rank ({words}); lower is better."
    return _curves(lines, points, "time_against_tokens", caption, ("tokens a rank", "us"), log=True)


def _against_sms(lines: Sequence[Line]) -> Plot | None:
    def rate(here: Sequence[Line], variant: tuple[str, int]) -> float | None:
        mine = [line for line in here if (line["backend"], line["num_sms"]) == variant]
        rates = [
            line["bandwidth_GBps"]["D2"]
            for line in mine
            if line["phase"] == "dispatch" and "bandwidth_GBps" in line
        ]
        return float(rates[-1]) if rates else None

    words, points = series(lines, "num_sms", rate)
    caption = f"Dispatch, rows delivered (D2) against SMs a rank ({words}); higher is better."
    return _curves(lines, points, "rate_against_sms", caption, ("SMs a rank", "GB/s a rank"))


def _against_skew(lines: Sequence[Line]) -> Plot | None:
    even = {"routing": "zipf", "skew": 0.0}  # what exponent 0 draws, under the name it was run by
    skewed = [
        line | (even if line["routing"] == "uniform" else {})
        for line in lines
        if line["routing"] in ("uniform", "zipf")
    ]
    words, points = series(skewed, "skew", round_trip_us)
    base = {name: curve[0][1] for name, curve in points.items()}
    slower = {n: [(x, y / base[n]) for x, y in curve] for n, curve in points.items()}
    caption = (
        f"Slow-down of the round trip against skew, relative to the least skew shown; 0 is "
        f"uniform ({words})."
    )
    labels = ("exponent of the Zipf routing", "times slower")
    return _curves(lines, slower, "slowdown_against_skew", caption, labels)


def _memory(lines: Sequence[Line]) -> Plot | None:
    def peak(here: Sequence[Line], variant: tuple[str, int]) -> float | None:
        mine = [line for line in here if (line["backend"], line["num_sms"]) == variant]
        sizes = [
            line["peak_bytes"] + line.get("persistent_bytes", 0)
            for line in mine
            if "peak_bytes" in line
        ]
        return sizes[-1] / 1e6 if sizes else None

    words, points = series(lines, "num_tokens", peak, where=_plain)
    caption = f"Peak memory in the timed rounds plus what is held ({words}); lower is better."
    labels = ("tokens a rank", "MB a rank")
    return _curves(lines, points, "memory_against_tokens", caption, labels, log=True)


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
    figure, axes = _figure(height=1.4 + 0.42 * len(variants))
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
    caption = f"Forward round trip by phase ({setting_words(mine[0])}); shorter is better."
    return Plot("phases", caption, _png(figure))


def _layer(lines: Sequence[Line]) -> Plot | None:
    def forward_and_backward(here: Sequence[Line], variant: tuple[str, int]) -> float | None:
        parts = [median_us(here, variant, f"layer_{way}") for way in ("forward", "backward")]
        return None if None in parts else sum(us for us in parts if us is not None)

    words, points = series(lines, "num_tokens", forward_and_backward, where=_plain)
    what = "Whole layer with experts, forward and backward"
    labels = ("tokens a rank", "us")
    caption = f"{what} ({words}); lower is better."
    plot = _curves(lines, points, "layer_against_tokens", caption, labels, log=True)
    if plot is not None:
        return plot
    return _bars(lines, forward_and_backward, "layer", what, ("us", "{:,.0f}"))


def _interference(lines: Sequence[Line]) -> Plot | None:
    words, points = series(lines, "num_sms", slow_down)
    what = "Slow-down of matrix products while dispatch and combine run beside them"
    labels = ("SMs a rank", "times slower")
    caption = f"{what}, against the SMs a rank that communication may hold ({words}); lower is "
    plot = _curves(lines, points, "interference", f"{caption}better.", labels)
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

    Args:
        lines: recorded.
        value: of the lines of one setting and (backend, SMs).
        name: of the plot.
        what: is shown, for the caption.
        look: label of the axis, and format of a value.
    """
    best: tuple[str, dict[str, float]] = ("", {})
    for setting in dict.fromkeys(map(setting_of, timed(lines))):
        mine = [line for line in timed(lines) if setting_of(line) == setting]
        variants = dict.fromkeys((line["backend"], line["num_sms"]) for line in mine)
        found = {
            f"{variant[0]}, {variant[1]} SMs": measured
            for variant in variants
            if (measured := value(mine, variant)) is not None
        }
        if len(found) > len(best[1]):
            best = (setting_words(mine[0]), found)
    words, bars = best
    if not bars:
        return None
    label, form = look
    figure, axes = _figure(height=1.2 + 0.42 * len(bars))
    axes.barh(list(bars), list(bars.values()), color=_COLOURS[0], height=0.6)
    for row, measured in enumerate(bars.values()):
        axes.text(measured, row, f" {form.format(measured)}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(left=0, right=1.15 * max(bars.values()))
    axes.set_xlabel(label)
    axes.grid(axis="y", visible=False)
    return Plot(name, f"{what} ({words}); shorter is better.", _png(figure))


def _plain(line: Line) -> bool:
    """Uniform routing without masks: what the curves over T are drawn for."""
    return line["routing"] == "uniform" and not line.get("masked_fraction")


def _curves(
    lines: Sequence[Line],
    points: Points,
    name: str,
    caption: str,
    labels: tuple[str, str],
    *,
    log: bool = False,
) -> Plot | None:
    """One line a backend, named where it ends; None where there is nothing to draw."""
    if not points:
        return None
    colours = dict(zip(backends_of(lines), _COLOURS * len(lines), strict=False))
    figure, axes = _figure()
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
    return Plot(name, caption, _png(figure))


def enclosing(values: Sequence[float]) -> tuple[float, float]:
    """The nearest ticks (1, 2 or 5 times a power of ten) around positive values.

    Example: 633 and 1833 -> (500, 2000).
    """
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    ticks = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    low = max(tick for tick in ticks if tick <= min(values))
    return low, min(tick for tick in ticks if tick >= max(values) and tick > low)


def _figure(height: float = _SIZE[1]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
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
