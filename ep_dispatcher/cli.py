"""The `ep-dispatcher` command: train, profile, plan, doctor, bench.

A user's mistake is printed as one line that says what to do, with exit code 2; anything unexpected
likewise, with exit code 1. A traceback is printed only with --debug.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ep_dispatcher import doctor_nccl
from ep_dispatcher._version import __version__
from ep_dispatcher.bench import command as bench_command
from ep_dispatcher.bench import plan_cpu
from ep_dispatcher.bench.results import ResultLog
from ep_dispatcher.doctor import Diagnosis, diagnose
from ep_dispatcher.errors import ConfigError, EpError, EpTimeoutError, UnavailableError
from ep_dispatcher.plan_input import PlanOptions, read_question
from ep_dispatcher.plan_report import make_report, print_report
from ep_dispatcher.routing import ROUTINGS

OK, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130

Command = Callable[[argparse.Namespace], int]

_EPILOG = """\
to get going:
  ep-dispatcher doctor                                  what this machine can run
  ep-dispatcher plan --config configs/tiny_cpu.yaml     bytes on each link, rows, memory
  ep-dispatcher train --config configs/tiny_cpu.yaml    train a small MoE model
  ep-dispatcher bench plan                              time the plan on the CPU
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code.

    Args:
        argv: words after the program's name; None for those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001  # the last stop
        if "--debug" in words:
            traceback.print_exc()
        message, code = _explain(error)
        sys.stderr.write(f"ep-dispatcher: error: {' '.join(message.split())}\n")
        return code


def _explain(error: BaseException) -> tuple[str, int]:
    """What to tell the user about an error, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, EpError | EpTimeoutError | OSError):
        return str(error), USER_ERROR
    name = type(error).__name__
    return f"unexpected {name}: {error}; run again with --debug for the traceback", FAILED


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser for a command line; `train` is asked for its options only if it is named."""
    parser = argparse.ArgumentParser(
        prog="ep-dispatcher",
        description="Megatron-Core MoE token dispatcher with its own CUDA kernels.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ep-dispatcher {__version__}")
    parser.add_argument("--debug", action="store_true", help="print tracebacks of errors")
    commands = parser.add_subparsers(dest="command", metavar="{train,profile,plan,doctor,bench}")
    _add_train(commands, named="train" in words)
    _add_profile(commands, named="profile" in words)
    _add_plan(commands)
    _add_doctor(commands)
    _add_bench(commands)
    return parser


def _run(words: list[str]) -> int:
    """Parse and run; errors are the caller's."""
    parser = build_parser(words)
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return OK
    args.words = ["ep-dispatcher", *words]
    command: Command = args.run
    return command(args)


def _add_command(
    commands: Any,  # noqa: ANN401  # argparse does not export the type
    name: str,
    run: Command,
    summary: str,
) -> argparse.ArgumentParser:
    """Add a subcommand that also takes --debug after its name."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="print tracebacks of errors"
    )
    parser.set_defaults(run=run)
    return parser


def _add_train(commands: Any, named: bool) -> None:  # noqa: ANN401
    parser = _add_command(commands, "train", _train, "train a small GPT MoE with Megatron-Core")
    if named:
        _launcher().add_arguments(parser)


def _add_profile(commands: Any, named: bool) -> None:  # noqa: ANN401
    summary = "trace some steps of the training job: phases, hidden communication, waits"
    parser = _add_command(commands, "profile", _profile, summary)
    if named:
        _imported("ep_dispatcher.profile.command").add_arguments(parser)


def _add_plan(commands: Any) -> None:  # noqa: ANN401
    summary = "expected bytes on each link, rows and memory of a config; needs no GPU"
    parser = _add_command(commands, "plan", _plan, summary)
    parser.add_argument(
        "--config", type=Path, required=True, help="YAML file, of training or with a shape"
    )
    parser.add_argument("--ranks", type=int, help="ranks of the group (default: the config's)")
    parser.add_argument("--domains", type=int, help="NVLink domains (default: the config's, or 1)")
    parser.add_argument("--tokens", type=int, help="tokens per rank (default: max_tokens_per_rank)")
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--skew", type=float, default=1.0, help="exponent of zipf (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_doctor(commands: Any) -> None:  # noqa: ANN401
    summary = "what this machine can run, and which tier would be chosen and why"
    parser = _add_command(commands, "doctor", _doctor, summary)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--nccl",
        action="store_true",
        help="open a communicator over the job's ranks (torchrun, srun; else starts some here) "
        "and measure a put on every rail between NVLink domains",
    )
    parser.add_argument("--ranks", type=int, help="with --nccl: ranks to start on this machine")
    parser.add_argument("--domain-size", type=int, help="with --nccl: split them into domains")


def _add_bench(commands: Any) -> None:  # noqa: ANN401
    parser = _add_command(commands, "bench", _bench_plan, "benchmarks; results as JSON lines")
    names = "{run,compare,report,trace,plan}"
    suites = parser.add_subparsers(dest="suite", required=True, metavar=names)
    plan = _add_command(suites, "plan", _bench_plan, "time of the plan on the CPU")
    plan.add_argument("--tokens", type=int, default=4096, help="tokens per rank")
    plan.add_argument("--experts", type=int, default=256)
    plan.add_argument("--topk", type=int, default=8)
    plan.add_argument("--rounds", type=int, default=50, help="timed rounds, at least 20")
    plan.add_argument("--seed", type=int, default=0)
    plan.add_argument(
        "--out", type=Path, default=Path("docs/results/plan.jsonl"), help="file to append to"
    )
    bench_command.add_to(suites)


def _train(args: argparse.Namespace) -> int:
    return int(_launcher().run(args) or OK)


def _profile(args: argparse.Namespace) -> int:
    return int(_imported("ep_dispatcher.profile.command").run(args) or OK)


def _plan(args: argparse.Namespace) -> int:
    options = PlanOptions(
        ranks=args.ranks,
        domains=args.domains,
        tokens=args.tokens,
        routing=args.routing,
        skew=args.skew,
        seed=args.seed,
    )
    report = make_report(read_question(args.config, options))
    if args.json:
        _write_json(report)
    else:
        print_report(report, Console())
    return OK


def _doctor(args: argparse.Namespace) -> int:
    if args.nccl:
        return _doctor_nccl(args)
    if args.ranks is not None or args.domain_size is not None:
        raise ConfigError("--ranks and --domain-size go with --nccl; add it, or leave them out")
    diagnosis = diagnose()
    if args.json:
        _write_json(diagnosis.to_dict())
    else:
        _print_diagnosis(diagnosis, Console())
    return OK


def _doctor_nccl(args: argparse.Namespace) -> int:
    if not doctor_nccl.is_rank():
        words = ["doctor", "--nccl", *(["--json"] if args.json else [])]
        return doctor_nccl.start_ranks(args.ranks, args.domain_size, words)
    _refuse_options_of_a_start(args)
    report = doctor_nccl.probe()
    if report is None:  # rank 0 tells
        return OK
    if args.json:
        _write_json(report.to_dict())
    else:
        _print_nccl_report(report, Console())
    return OK if report.ok else FAILED


def _refuse_options_of_a_start(args: argparse.Namespace) -> None:
    """Refuse options for ranks that are started here, in a rank that was started already.

    Raises:
        ConfigError: names the option and what does the same under torchrun or srun.
    """
    for option, value in (("--ranks", args.ranks), ("--domain-size", args.domain_size)):
        if value is not None:
            raise ConfigError(
                f"{option} is {value}, but this process is a rank already (RANK is set): torchrun "
                "or srun say how many ranks there are, and NCCL_LSA_TEAM_SIZE, exported before "
                "they start, splits them into domains; leave the option out"
            )


def _print_nccl_report(report: doctor_nccl.NcclReport, console: Console) -> None:
    """Print what NCCL found, then a row for each rail and pair of domains."""
    table = Table(show_header=False)
    for name, value in report.facts():
        table.add_row(name, Text(value, overflow="fold"))
    console.print(table)
    if report.num_domains == 1:
        console.print("one NVLink domain: no rails are needed")
        return
    rails = Table(title="Round trip of 4096 bytes and a signal, us")
    for column in ("ranks", "mean", "shortest", "data"):
        rails.add_column(column, justify="right")
    for trip in report.trips:
        times = [f"{us:.1f}" if us is not None else "-" for us in (trip.mean_us, trip.shortest_us)]
        rails.add_row(f"{trip.rank} <-> {trip.peer}", *times, trip.verdict)
    console.print(rails)
    if not report.ok:
        console.print(doctor_nccl.AFTER_A_FAILURE)


def _print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print findings as a table, then the tier, the reason and the next step."""
    colours = {"ok": "green", "absent": "yellow", "problem": "red"}
    table = Table(show_lines=False)
    for column in ("what", "state", "found, and what to do"):
        table.add_column(column, overflow="fold")
    for finding in diagnosis.findings:
        state = Text(finding.state, style=colours[finding.state])
        text = finding.value + (f"\n-> {finding.next_step}" if finding.next_step else "")
        table.add_row(finding.name, state, Text(text))
    console.print(table)
    console.print(Text(f"tier: {diagnosis.tier}, as {diagnosis.reason}", style="bold"))
    if diagnosis.next_step:
        console.print(Text(f"for the device tier: {diagnosis.next_step}"))


def _bench_plan(args: argparse.Namespace) -> int:
    bench = plan_cpu.PlanBench(
        num_tokens=args.tokens,
        num_experts=args.experts,
        num_topk=args.topk,
        seed=args.seed,
        rounds=args.rounds,
    )
    lines = plan_cpu.record_plan_bench(bench, ResultLog(args.out, args.words))
    table = Table(title=f"Plan on the CPU: T={args.tokens} E={args.experts} K={args.topk}")
    for column in ("what", "ranks", "median us", "p95 us", "rounds"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for line in lines:
        cells = ("ranks", "median_us", "p95_us", "rounds")
        table.add_row(line["what"], *(str(line.get(name, "-")) for name in cells))
        if "error" in line:
            table.add_row(Text(line["error"], style="red"))
    console = Console()
    console.print(table)
    console.print(f"recorded in {args.out}", markup=False)
    return OK


def _launcher() -> Any:  # noqa: ANN401
    """The module that trains."""
    return _imported("ep_dispatcher.launch")


def _imported(module: str) -> Any:  # noqa: ANN401  # a module, imported late as it is slow to import
    """A module that needs Megatron."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("ep_dispatcher"):
            raise  # a module of our own: a bug, not something to install
        raise UnavailableError(
            f"this command needs {error.name}, which is not installed; "
            "pip install 'ep_dispatcher[megatron]'"
        ) from error


def _write_json(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values, indent=2) + "\n")
