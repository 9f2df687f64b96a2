"""Runs Megatron-Core on 4 ranks: trains with its dispatcher and with ours, and runs checks.

    python tests/megatron_world.py --steps 10 --cases ep4,bf16 --out result.jsonl
    python tests/megatron_world.py --record docs/results/megatron_parity.jsonl
    python tests/megatron_world.py --checks capacity,two_models

The first process starts a second, which imports Megatron once and, as gloo slows down with every
group it made, forks one process per rank (gloo, on the CPU) for every case, or for the few that
share a run of Megatron's dispatcher. Rank 0 writes one JSON object a case. Checks
(`megatron_checks.py`) are run likewise, a few in one set of processes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_cases import CASES, Case

NUM_RANKS = 4
OUTCOMES = "outcomes.jsonl"  # of rank 0
_TIMEOUT_S = 840  # of all cases of a call, or all checks; below the limit of their tests


@dataclass(frozen=True)
class Outcome:
    """What a case showed.

    Attributes:
        case: its name.
        versions: of megatron_core, torch and python.
        losses: of ours, one a step, averaged over the data-parallel ranks.
        reference_losses: of Megatron's dispatcher.
        max_param_difference: largest absolute difference over all parameters and ranks.
        dispatchers: class names and tiers seen in our model.
        seconds: both runs; ours alone where another case has had the other run.
        error: why there is no result, in one sentence; empty if there is one.
    """

    case: str
    versions: dict[str, str]
    losses: list[float]
    reference_losses: list[float]
    max_param_difference: float
    dispatchers: list[str]
    seconds: float
    error: str = ""

    @property
    def max_loss_difference(self) -> float:
        """Largest relative difference of two losses of one step."""
        pairs = zip(self.losses, self.reference_losses, strict=True)
        return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def run_cases(names: Sequence[str], steps: int) -> list[Outcome]:
    """Run cases on `NUM_RANKS` processes; returns the outcomes, in another order perhaps."""
    lines = _launch(["--cases", ",".join(names), "--steps", str(steps)])
    return [Outcome(**line) for line in lines]


def run_checks(names: Sequence[str]) -> dict[str, str]:
    """Run checks on `NUM_RANKS` processes; returns the first rank's error of each, or ""."""
    return {line["check"]: line["error"] for line in _launch(["--checks", ",".join(names)])}


def _launch(arguments: list[str]) -> list[dict[str, Any]]:
    """Start the process that forks the ranks, wait for it, read the lines that rank 0 wrote.

    Raises:
        RuntimeError: a rank failed; carries the end of what each said.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-W", "ignore", __file__, *arguments, "--ranks-in", name]
        process = _start(command, folder / "ranks.log")
        try:
            code = process.wait(timeout=_TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the ranks
        if code:
            said = [
                f"{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log"))
            ]
            raise RuntimeError(f"ended with {code}\n" + "\n".join(said))
        return [json.loads(line) for line in (folder / OUTCOMES).read_text().splitlines()]


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own with its output in a file."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    root = str(Path(__file__).parent.parent)
    environment.setdefault("TORCHDYNAMO_DISABLE", "1")  # each rank would trace Megatron's functions
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    with log.open("w") as file:
        return subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def _record(outcomes: Sequence[Outcome], steps: int, path: Path) -> None:
    """Append one line a case to a file of results (docs/results)."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    run = uuid.uuid4().hex[:12]
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    cases = {case.name: case for case in CASES}
    with path.open("a") as file:
        for outcome in outcomes:
            case = cases[outcome.case]
            line = {
                "run": run,
                "when": now,
                "commit": commit,
                "command": shlex.join(["python", "tests/megatron_world.py", *sys.argv[1:]]),
                "machine": f"cpu, {NUM_RANKS} processes on {os.cpu_count()} cores, gloo",
                "versions": outcome.versions,
                "suite": "train",
                "backend": "ep_dispatcher/reference",
                "compared_with": f"megatron/{case.reference}",
                "phase": "step",
                "case": case.name,
                "ranks": NUM_RANKS,
                "num_experts": case.num_experts,
                "num_topk": case.num_topk,
                "dtype": "bfloat16" if case.bf16 else "float32",
                "steps": steps,
                "checked": not outcome.error and passes(case, outcome),
                "exact_required": case.exact,
                "first_loss": outcome.losses[0] if outcome.losses else None,
                "last_loss": outcome.losses[-1] if outcome.losses else None,
                "max_loss_difference": None if outcome.error else outcome.max_loss_difference,
                "max_param_difference": outcome.max_param_difference,
                "error": outcome.error,
            }
            file.write(json.dumps(line) + "\n")


def passes(case: Case, outcome: Outcome) -> bool:
    """The gate: equal where two terms are added at most, else within the rounding of reordering."""
    if case.exact:
        return outcome.losses == outcome.reference_losses and outcome.max_param_difference == 0
    return outcome.max_loss_difference < 1e-5 and outcome.max_param_difference < 1e-4


def main() -> None:
    """Parse the command line; with --ranks-in be the process that forks the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", default=",".join(names), help="comma-separated names")
    parser.add_argument("--checks", help="comma-separated names; runs these instead of cases")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, help="where to write outcomes as JSON lines")
    parser.add_argument("--record", type=Path, help="file of results to append to")
    parser.add_argument("--ranks-in", type=Path, help="set by the first process")
    arguments = parser.parse_args()
    if arguments.ranks_in is not None:
        from megatron_rank import fork_ranks

        fork_ranks(arguments)
    elif arguments.checks:
        _report_checks(run_checks(arguments.checks.split(",")))
    else:
        outcomes = run_cases(arguments.cases.split(","), arguments.steps)
        if arguments.record:
            _record(outcomes, arguments.steps, arguments.record)
        _report(outcomes)


def _report_checks(errors: dict[str, str]) -> None:
    """One line a check on stdout, with the traceback where it failed; status 1 if one did."""
    for name, error in errors.items():
        sys.stdout.write(f"{'MISS' if error else 'ok  '} {name}\n{error}")
    sys.exit(1 if any(errors.values()) else 0)


def _report(outcomes: Sequence[Outcome]) -> None:
    """One line a case on stdout; ends with status 1 where a gate was missed."""
    cases = {case.name: case for case in CASES}
    missed = 0
    for outcome in outcomes:
        good = not outcome.error and passes(cases[outcome.case], outcome)
        missed += not good
        shown = outcome.error or (
            f"{outcome.losses[0]:.6f} -> {outcome.losses[-1]:.6f}  "
            f"loss {outcome.max_loss_difference:.1e}  params {outcome.max_param_difference:.1e}"
        )
        line = f"{'ok  ' if good else 'MISS'} {outcome.case:26s} {shown}  {outcome.seconds:.1f} s\n"
        sys.stdout.write(line)
    sys.exit(1 if missed else 0)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Plain values of an outcome."""
    return dict(vars(outcome))


if __name__ == "__main__":
    main()
