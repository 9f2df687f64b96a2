"""What a user sees of a run: a bar on a terminal, plain lines elsewhere, and the last word."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from ep_dispatcher.train.config import TrainConfig
from ep_dispatcher.train.metrics import METRICS, StepMetrics
from ep_dispatcher.train.plots import PICTURE, draw
from ep_dispatcher.train.runtime import Runtime

_LINE_EVERY_S = 2.0  # between plain lines


def say(text: str) -> None:
    """Print one line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Steps:
    """Says what a command that is silent for long is at, and when.

    Args:
        speaks: whether this rank does.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        """Count seconds from here."""
        self._speaks, self._began = speaks, time.perf_counter()

    def __call__(self, text: str) -> None:
        """Print a line that starts with the seconds."""
        if self._speaks:
            say(f"{time.perf_counter() - self._began:6.1f} s  {text}")


@dataclass(frozen=True)
class Summary:
    """What is left of a run.

    Attributes:
        folder: of its files.
        metrics: all lines, of the parts before a restart too.
        done_before: steps that were done when this process began.
        seconds: that the steps of this process took.
    """

    folder: Path
    metrics: list[StepMetrics]
    done_before: int
    seconds: float

    def finish(self, config: TrainConfig) -> list[str]:
        """Draw the picture and return the last lines to print."""
        if not self.metrics:
            return [f"nothing was logged; the files are in {self.folder}"]
        first, last = self.metrics[0], self.metrics[-1]
        title = (
            f"{config.train.dispatcher}: {config.model.num_layers} layers, "
            f"{config.model.num_experts} experts, top-{config.model.num_topk}, "
            f"{config.parallel.num_ranks} ranks"
        )
        draw(self.metrics, title, self.folder / PICTURE)
        head = f"done: step {last.step}, loss {first.loss:.3f} -> {last.loss:.3f}"
        if last.step <= self.done_before:
            head = f"nothing to do: all {last.step} steps were done before, loss {last.loss:.3f}"
        moved = sum(line.moved_bytes for line in self.metrics)
        return [
            f"{head}, {self._speed()}, busiest expert {last.load_max_over_mean:.2f} x the mean, "
            f"{_bytes(moved)} of rows moved in {len(self.metrics)} logged steps",
            f"files: {self.folder / METRICS}, {self.folder / PICTURE}, "
            f"{self.folder / 'checkpoints'}",
        ]

    def _speed(self) -> str:
        """Median speed of the steps of this process, or of all."""
        lines = [line for line in self.metrics if line.step > self.done_before] or self.metrics
        speeds = sorted(line.tokens_per_s for line in lines)
        return f"{speeds[len(speeds) // 2]:,.0f} tokens/s"


class Progress:
    """Shows the steps of a run on the first rank; a context manager.

    Args:
        config: of the run.
        runtime: this rank.
        done: steps done before.
        kept: metrics of those.
    """

    def __init__(
        self, config: TrainConfig, runtime: Runtime, done: int, kept: list[StepMetrics]
    ) -> None:
        """Show nothing yet."""
        self._config, self._done, self._metrics = config, done, list(kept)
        self._visible = runtime.is_first
        console = Console()
        self._bar = _make_bar(console) if self._visible and console.is_terminal else None
        self._task: TaskID | None = None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        """Begin."""
        if self._visible and self._done:
            say(f"going on from the checkpoint of step {self._done}")
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(
                "", total=self._config.train.steps, completed=self._done
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.stop()

    def show(self, metrics: StepMetrics) -> None:
        """Show a step that was logged."""
        self._metrics.append(metrics)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=metrics.step, description=describe(metrics))
            return
        first, last = metrics.step == self._done + 1, metrics.step == self._config.train.steps
        if first or last or time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._last_line = time.monotonic()
            say(f"step {metrics.step:>6}/{self._config.train.steps}  {describe(metrics)}")

    def summary(self) -> Summary:
        """What is left of the run."""
        folder = Path(self._config.train.out_dir)
        return Summary(folder, self._metrics, self._done, time.monotonic() - self._started)


def describe(metrics: StepMetrics) -> str:
    """One step in words."""
    return (
        f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:>8,.0f} tokens/s  "
        f"load max/mean {metrics.load_max_over_mean:.2f}  moved {_bytes(metrics.moved_bytes)}"
    )


def _make_bar(console: Console) -> Bar:
    """The bar of a terminal."""
    columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"))
    return Bar(*columns, TimeRemainingColumn(), console=console)


def _bytes(count: int) -> str:
    """A number of bytes in words: 1 MB is 1e6 bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
