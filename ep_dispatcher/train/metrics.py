"""Metrics of a run: one JSON object a line, cut back to the checkpoint that a run goes on from."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ep_dispatcher.errors import ConfigError

METRICS = "metrics.jsonl"
TIMES = ("step_s", "tokens_per_s")  # the only fields that differ between two equal runs


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What one step showed, over all ranks.

    Attributes:
        step: from 1.
        loss: mean cross entropy of a byte, in nats.
        grad_norm: of the gradient before clipping; None where nothing is clipped.
        learning_rate: that was used.
        tokens: read in this step.
        tokens_per_s, step_s: speed.
        tokens_per_expert: [num_layers][E] copies that the tokens asked for.
        load_max_over_mean: busiest expert over the mean, worst layer.
        moved_bytes: row bytes that left their rank in this step, forward and backward.
        across_bytes: the part of them that left its NVLink domain.
    """

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    tokens: int
    tokens_per_s: float
    step_s: float
    tokens_per_expert: list[list[int]]
    load_max_over_mean: float
    moved_bytes: int
    across_bytes: int


class MetricsFile:
    """Appends to `metrics.jsonl` of a run.

    Args:
        folder: of the run; made if it is missing.
        step: steps done; later lines, of a run that was killed, are dropped.
    """

    def __init__(self, folder: Path, step: int) -> None:
        """Cut the file back."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        self.kept = [line for line in read_metrics(self.path) if line.step <= step]
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text("".join(_as_line(line) for line in self.kept), encoding="utf-8")
        os.replace(fresh, self.path)

    def append(self, metrics: StepMetrics) -> None:
        """Write one line, at once."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_as_line(metrics))


def read_metrics(path: Path) -> list[StepMetrics]:
    """The lines of a metrics file; none if there is no file. A torn last line is left out.

    Raises:
        ConfigError: a line that is no line of metrics; names it.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [_from_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _from_line(line: str, where: str) -> StepMetrics:
    """Read one line back."""
    try:
        return StepMetrics(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{where} is no line of metrics ({error}); delete that line, or give another --out"
        ) from error


def _as_line(metrics: StepMetrics) -> str:
    return json.dumps(asdict(metrics)) + "\n"
