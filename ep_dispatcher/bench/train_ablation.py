"""Trains one config with each dispatcher, same seed and data, and lays the runs over each other.

    python -m ep_dispatcher.bench.train_ablation --config configs/tiny_cpu.yaml --steps 60

Each run is a process tree of its own. Written are a JSON line for each dispatcher, `ablation.png`
(loss, its difference from the first dispatcher, step time, tokens/s and memory) and `ablation.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ep_dispatcher.bench.results import ResultLog, summarise_times
from ep_dispatcher.train.config import load_config

DISPATCHERS = ("alltoall", "ep_dispatcher", "allgather")
WARM_UP_STEPS = 5
NO_BASE = "not compared, the base failed"
_COLOURS = {"ep_dispatcher": "#0b6e4f", "alltoall": "#c8553d", "allgather": "#3d5a80"}
_STYLES = ("-", "--", ":")
_POLL_S = 0.5
_GRACE_S = 40.0  # torchrun gives its ranks 30 s


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What a training run left behind.

    Attributes:
        dispatcher: name.
        losses: of each step.
        step_s: seconds of each step after the first few.
        tokens_per_s: median over the same steps.
        peak_bytes: largest memory seen, of the GPUs or of the process tree; None where unknown.
        wall_s: seconds from start to end.
        error: why there is no loss; None where there is.
    """

    dispatcher: str
    losses: list[float]
    step_s: list[float]
    tokens_per_s: float
    peak_bytes: int | None
    wall_s: float
    error: str | None = None


def train(
    config: Path, dispatcher: str, steps: int, folder: Path, data: str | None, limit_s: float
) -> TrainingRun:
    """Train once with one dispatcher; a run that fails or hangs says why instead of raising."""
    out = folder / dispatcher
    shutil.rmtree(out, ignore_errors=True)  # else it would go on from its checkpoint
    words = [sys.executable, "-m", "ep_dispatcher", "train", "--config", str(config)]
    words += ["--steps", str(steps), "--out", str(out)]
    words += ["--set", f"train.dispatcher={dispatcher}"] + (["--data", data] if data else [])
    out.mkdir(parents=True)
    start = time.monotonic()
    with (out / "log.txt").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        with _MemoryWatch(process.pid) as watch:
            code = _wait(process, limit_s)
    wall_s = round(time.monotonic() - start, 2)
    metrics = read_metrics(out / "metrics.jsonl")
    if code != 0 or not metrics:
        how = f"exit code {code}" if code is not None else f"its time limit of {limit_s:g} s"
        lines = (out / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        last = " ".join(lines[-1].split())[:300] if lines else "no output"
        return TrainingRun(
            dispatcher=dispatcher,
            losses=[],
            step_s=[],
            tokens_per_s=0.0,
            peak_bytes=None,
            wall_s=wall_s,
            error=f"training ended with {how}: {last}",
        )
    timed = metrics[WARM_UP_STEPS:] or metrics
    speeds = sorted(float(line["tokens_per_s"]) for line in timed)
    return TrainingRun(
        dispatcher=dispatcher,
        losses=[float(line["loss"]) for line in metrics],
        step_s=[float(line["step_s"]) for line in timed],
        tokens_per_s=speeds[len(speeds) // 2],
        peak_bytes=watch.peak_bytes,
        wall_s=wall_s,
    )


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit code; None where the limit came first, and all of its processes were ended."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also where this process is interrupted
        _end(process, signal.SIGTERM)  # on which a launcher ends the ranks, in groups of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        _end(process, signal.SIGKILL)
        process.wait()


def _end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """Signal a process and its group, if any of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Lines of a metrics file; none if there is no file."""
    if not file.is_file():
        return []
    return [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]


def largest_difference(losses: Sequence[float], base: Sequence[float]) -> float:
    """Largest relative difference of two loss curves over the steps that both have, at least one.

    Example: [2.0, 1.1] and [2.0, 1.0] -> 0.1.
    """
    pairs = zip(losses, base, strict=False)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def compared(run: TrainingRun, base: TrainingRun) -> dict[str, Any]:
    """Fields that tell how far a run's losses are from the base's, and over how many steps.

    A base without a loss gives no difference; 0 would say that the runs agree.
    """
    if base.error is not None:
        return {"loss_not_compared": NO_BASE}
    return {
        "loss_difference": largest_difference(run.losses, base.losses),
        "loss_compared_with": base.dispatcher,
        "loss_compared_steps": min(len(run.losses), len(base.losses)),
    }


def record(runs: Sequence[TrainingRun], config: Path, log: ResultLog, sharing: str) -> None:
    """Write a line for each run."""
    base = runs[0]
    for run in runs:
        name = run.dispatcher if run.dispatcher == "ep_dispatcher" else f"megatron/{run.dispatcher}"
        fields: dict[str, Any] = {"suite": "train", "backend": name, "phase": "step"}
        fields["config"] = config.name
        if run.error is not None:
            log.write(sharing=sharing, **fields, error=run.error)
            continue
        log.write(
            sharing=sharing,
            **fields,
            **summarise_times([step * 1e6 for step in run.step_s]),
            steps=len(run.losses),
            tokens_per_s=round(run.tokens_per_s, 1),
            first_loss=run.losses[0],
            last_loss=run.losses[-1],
            **compared(run, base),
            peak_bytes=run.peak_bytes,
            wall_s=run.wall_s,
        )


def sharing_of(config: Path) -> str:
    """How the ranks of a config share this machine, in the words of the recorded lines."""
    if not shutil.which("nvidia-smi"):
        return "cpu"
    return "mps" if load_config(config).parallel.ranks_share_gpu else "one per gpu"


def draw(runs: Sequence[TrainingRun], file: Path) -> None:
    """Loss, its difference from the first run's and step time over the steps; speed and memory."""
    mpl.use("Agg")
    figure = Figure(figsize=(13, 7), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "apart", "step"], ["speed", "memory", "memory"]])
    good = [run for run in runs if run.error is None]
    for number, run in enumerate(good):
        _draw_curves(axes, run, runs[0], _STYLES[number % len(_STYLES)])
    _draw_bars(axes["speed"], {run.dispatcher: run.tokens_per_s for run in good}, "{:,.0f}")
    peaks = {run.dispatcher: run.peak_bytes / 1e6 for run in good if run.peak_bytes is not None}
    _draw_bars(axes["memory"], peaks, "{:,.0f}")
    titles = {
        "loss": "loss, nats",
        "apart": f"relative difference of the loss from {runs[0].dispatcher}",
        "step": "milliseconds a step",
        "speed": "tokens/s, median of the steps; longer is better",
        "memory": "peak memory, MB of all ranks together; shorter is better",
    }
    for name, title in titles.items():
        axes[name].set_title(title, fontsize=10, loc="left")
        axes[name].grid(visible=True, color="#dddddd", linewidth=0.6)
        axes[name].set_axisbelow(True)
        axes[name].spines[["top", "right"]].set_visible(False)
    if runs[0].error is not None:
        axes["apart"].text(0.5, 0.5, NO_BASE, ha="center", transform=axes["apart"].transAxes)
    for name in ("loss", "apart", "step"):
        axes[name].set_xlabel("step")
        axes[name].xaxis.set_major_locator(MaxNLocator(integer=True))
        if axes[name].get_legend_handles_labels()[1]:
            axes[name].legend(frameon=False, fontsize=9)
    axes["step"].set_ylim(bottom=0)
    figure.savefig(file, dpi=110, metadata={"Software": None})


def _draw_curves(
    axes: dict[str, Axes], run: TrainingRun, base: TrainingRun, linestyle: str
) -> None:
    """One run's loss, difference from the base's loss, and step time."""
    look: dict[str, Any] = {
        "color": _COLOURS.get(run.dispatcher),
        "linestyle": linestyle,
        "label": run.dispatcher,
    }
    axes["loss"].plot(range(1, len(run.losses) + 1), run.losses, linewidth=2, **look)
    if run is not base and base.error is None:
        apart = [(a - b) / b for a, b in zip(run.losses, base.losses, strict=False)]
        axes["apart"].plot(range(1, len(apart) + 1), apart, **look)
    first = len(run.losses) - len(run.step_s) + 1
    milliseconds = [step * 1e3 for step in run.step_s]
    axes["step"].plot(range(first, first + len(run.step_s)), milliseconds, **look)


def _draw_bars(axes: Axes, values: dict[str, float], words: str) -> None:
    """A bar for each run, with its value beside it; nothing where there is none."""
    if not values:
        axes.text(0.5, 0.5, "unknown", ha="center", transform=axes.transAxes)
        return
    colours = [_COLOURS.get(name, "#888888") for name in values]
    axes.barh(list(values), list(values.values()), color=colours, height=0.6)
    for row, value in enumerate(values.values()):
        axes.text(value, row, f" {words.format(value)}", va="center", fontsize=9)
    axes.set_xlim(0, 1.15 * max(values.values()))
    axes.invert_yaxis()


def write_page(runs: Sequence[TrainingRun], config: Path, file: Path) -> None:
    """A table of the runs with the picture."""
    head = (
        "| dispatcher | last loss | largest difference | ms a step | tokens/s | peak MB | wall s |"
    )
    parts = [f"# Training {config.name} with each dispatcher", "", "![curves](ablation.png)", ""]
    parts += [head, "|---|---|---|---|---|---|---|"]
    for run in runs:
        if run.error is not None:
            parts.append(f"| {run.dispatcher} | {run.error} | | | | | |")
            continue
        step_ms = summarise_times([step * 1e6 for step in run.step_s])["median_us"] / 1e3
        apart = _difference_words(run, runs[0])
        peak = "unknown" if run.peak_bytes is None else f"{run.peak_bytes / 1e6:,.0f}"
        parts.append(
            f"| {run.dispatcher} | {run.losses[-1]:.6f} | {apart} | {step_ms:,.1f} | "
            f"{run.tokens_per_s:,.0f} | {peak} | {run.wall_s:,.1f} |"
        )
    parts += ["", "Same seed, same data, same steps. Largest difference: of the losses, relative."]
    file.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _difference_words(run: TrainingRun, base: TrainingRun) -> str:
    """The largest difference; where not all steps of both were compared, over how many."""
    found = compared(run, base)
    if "loss_difference" not in found:
        return NO_BASE
    steps, most = found["loss_compared_steps"], max(len(run.losses), len(base.losses))
    over = "" if steps == most else f", over {steps} of {most} steps"
    return f"{found['loss_difference']:.2e}{over}"


class _MemoryWatch:
    """Polls the memory of all GPUs, or else of a process and its descendants, in a thread."""

    def __init__(self, pid: int) -> None:
        """Watch from now on."""
        self.peak_bytes: int | None = None
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> _MemoryWatch:
        """Start."""
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        """Stop."""
        self._over.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._over.wait(_POLL_S):
            found = _gpu_bytes() if shutil.which("nvidia-smi") else _tree_bytes(self._pid)
            if found is not None:
                self.peak_bytes = max(found, self.peak_bytes or 0)


def _gpu_bytes() -> int | None:
    """Memory in use on all GPUs."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    try:
        return sum(int(text) for text in done.stdout.split()) << 20
    except ValueError:
        return None


def _tree_bytes(root: int) -> int | None:
    """Resident memory of a process and all that descend from it."""
    parents, sizes = {}, {}
    for stat in Path("/proc").glob("[0-9]*/status"):
        try:
            pairs = (line.split(":", 1) for line in stat.read_text(encoding="utf-8").splitlines())
            fields = {pair[0]: pair[1].split() for pair in pairs if len(pair) == 2}
        except OSError:
            continue  # it has ended meanwhile
        pid = int(stat.parent.name)
        parents[pid] = int(fields["PPid"][0])
        sizes[pid] = int(fields["VmRSS"][0]) * 1024 if "VmRSS" in fields else 0
    mine = {root}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in mine} - mine
        grown = bool(more)
        mine |= more
    return sum(sizes.get(pid, 0) for pid in mine) or None


def main(words: Sequence[str] | None = None) -> int:
    """Run the ablation; exit code 1 if any dispatcher did not train."""
    parser = argparse.ArgumentParser(description="train one config with each dispatcher")
    parser.add_argument("--config", type=Path, required=True)
    steps_help = f"of each run, above {WARM_UP_STEPS} (default 60)"
    parser.add_argument("--steps", type=int, default=60, help=steps_help)
    parser.add_argument("--data", help="as for `ep-dispatcher train`")
    parser.add_argument(
        "--dispatchers", nargs="+", default=list(DISPATCHERS[:2]), help=", ".join(DISPATCHERS)
    )
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for each run")
    parser.add_argument(
        "--commit", help="recorded where the source tree has no git folder to tell it"
    )
    given = list(sys.argv[1:] if words is None else words)
    args = parser.parse_args(given)
    if args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps is {args.steps}; it must be above {WARM_UP_STEPS}")
    for name in args.dispatchers:
        if name not in DISPATCHERS or args.dispatchers.count(name) > 1:
            allowed = f"each must be one of {', '.join(DISPATCHERS)}, once"
            parser.error(f"--dispatchers has {name!r} in {args.dispatchers}; {allowed}")
    if not args.limit > 0:
        parser.error(f"--limit is {args.limit:g}; it must be above 0 seconds")
    if not args.config.is_file():
        parser.error(f"--config is {args.config}, which is no file")
    runs = [
        train(args.config, name, args.steps, args.out, args.data, args.limit)
        for name in args.dispatchers
    ]
    command = ["python", "-m", "ep_dispatcher.bench.train_ablation", *given]
    known = {"commit": args.commit} if args.commit else {}
    log = ResultLog(args.out / "results.jsonl", command, **known)
    record(runs, args.config, log, sharing_of(args.config))
    draw(runs, args.out / "ablation.png")
    write_page(runs, args.config, args.out / "ablation.md")
    sys.stdout.write((args.out / "ablation.md").read_text(encoding="utf-8"))
    return 0 if all(run.error is None for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
