"""The picture of a run: the loss curve, and which experts the tokens went to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ep_dispatcher.train.metrics import StepMetrics

PICTURE = "training.png"
_UNIFORM_NATS = float(np.log(256))  # loss of a model that knows nothing of bytes
_COLUMNS = 120  # of the heat map; more steps are averaged
_MOST_LABELS = 12


def draw(metrics: Sequence[StepMetrics], title: str, path: Path) -> None:
    """Draw the picture of a run.

    Args:
        metrics: lines of the run, by step; at least one.
        title: of the picture.
        path: PNG file to write.
    """
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    curve, heat = figure.subplots(2, 1, height_ratios=(1, 1.1))
    _draw_loss(curve, metrics)
    _draw_load(figure, heat, metrics)
    figure.savefig(path, dpi=110)


def _draw_loss(axes: Any, metrics: Sequence[StepMetrics]) -> None:  # noqa: ANN401
    """Loss of each step, its running mean, and the loss of guessing."""
    steps = np.array([line.step for line in metrics])
    losses = np.array([line.loss for line in metrics])
    width = max(1, len(losses) // 20)
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="each step")
    mean = np.convolve(losses, np.ones(width) / width, mode="valid")
    label = f"mean of {width} logged steps"
    axes.plot(steps[width - 1 :], mean, color="tab:blue", linewidth=2, label=label)
    axes.axhline(_UNIFORM_NATS, color="grey", linestyle=":", linewidth=1, label="guessing: ln 256")
    axes.annotate(
        f"{mean[-1]:.2f}", (steps[-1], mean[-1]), (4, 0), textcoords="offset points", va="center"
    )
    axes.set(xlabel="step", ylabel="loss (nats a byte)", ylim=(0, None))
    axes.set_xlim(steps[0] - 0.5, steps[-1] * 1.04 + 0.5)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")


def _draw_load(figure: Any, axes: Any, metrics: Sequence[StepMetrics]) -> None:  # noqa: ANN401
    """Heat map over steps: load of each expert over the mean of its layer."""
    load = np.array([line.tokens_per_expert for line in metrics], dtype=float)
    with_experts = [layer for layer in range(load.shape[1]) if load[:, layer].any()]
    relative = load[:, with_experts] / load[:, with_experts].mean(axis=2, keepdims=True)
    num_experts = load.shape[2]
    rows = _averaged(relative.reshape(len(load), -1)).T
    steps = [line.step for line in metrics]
    image = axes.imshow(
        rows,
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        vmin=0,
        vmax=2,
        extent=(steps[0] - 0.5, steps[-1] + 0.5, len(rows) - 0.5, -0.5),
    )
    figure.colorbar(image, ax=axes, label="load / mean of the layer", extend="max", pad=0.01)
    for edge in range(1, len(with_experts)):
        axes.axhline(edge * num_experts - 0.5, color="black", linewidth=1.5)
    every = -(-len(rows) // _MOST_LABELS) if len(rows) > 2 * _MOST_LABELS else 1
    shown = range(0, len(rows), every)
    names = [f"layer {with_experts[row // num_experts] + 1}, {row % num_experts}" for row in shown]
    axes.set_yticks(list(shown), names, fontsize=8)
    axes.set(xlabel="step", ylabel="expert", title="tokens per expert (white: its fair share)")


def _averaged(rows: Any) -> Any:  # noqa: ANN401
    """[steps, N] -> at most `_COLUMNS` rows, each the mean of consecutive ones."""
    if len(rows) <= _COLUMNS:
        return rows
    return np.stack([part.mean(axis=0) for part in np.array_split(rows, _COLUMNS)])
