"""`ep-dispatcher bench run | compare | report | trace`."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ep_dispatcher.bench.backends import BACKENDS, check_name
from ep_dispatcher.bench.compare import Change, compare, differing_facts
from ep_dispatcher.bench.launcher import Outcome, join_others
from ep_dispatcher.bench.lines import slowest_rank
from ep_dispatcher.bench.results import ResultLog, summarise_times
from ep_dispatcher.bench.run import Bench, with_changes
from ep_dispatcher.bench.spec import BenchSpec, load_spec
from ep_dispatcher.bench.trace import merge_traces, read_trace, write_trace
from ep_dispatcher.errors import ConfigError

OK, REGRESSED, NO_TIMES = 0, 3, 4
LINES = "results.jsonl"
_SHOWN = (
    "plan",
    "plan_static",
    "dispatch",
    "combine",
    "combine_backward",
    "dispatch_backward",
    "pair",
)
_PLAIN_WIDTH = 200
_TRACE_SUFFIX = ".npz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands to a parser of their own."""
    add_to(
        parser.add_subparsers(dest="action", required=True, metavar="{run,compare,report,trace}")
    )


def add_to(actions: Any) -> None:  # noqa: ANN401  # argparse does not export the type
    """Add the subcommands beside others; each sets `run` to `command.run` and names itself."""
    run_parser = _add(actions, "run", "run backends on the same work: check, then time")
    run_parser.add_argument("--config", type=Path, help="YAML file, see configs/bench_*.yaml")
    run_parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder")
    run_parser.add_argument("--list", action="store_true", help="print the backends and stop")
    run_parser.add_argument("--backends", nargs="+", help="instead of the file's")
    run_parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the file's")
    run_parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="fields of the work or method"
    )
    run_parser.add_argument("--budget", type=float, metavar="SECONDS", help="of the whole run")
    run_parser.add_argument(
        "--recover",
        metavar="COMMAND",
        help="run it after processes ended badly, before others start: one that restarts MPS, say",
    )
    run_parser.add_argument(
        "--commit", help="recorded where the source tree has no git folder to tell it"
    )
    run_parser.add_argument("--no-report", action="store_true", help="write the lines only")
    run_parser.add_argument(
        "--strict", action="store_true", help="exit code 4 if any row has no time, not only if all"
    )
    parser = _add(actions, "compare", "compare two runs; exit code 3 if the second is slower")
    parser.add_argument("before", type=Path, help="JSON lines file, or the folder of a run")
    parser.add_argument("after", type=Path, help="likewise")
    parser.add_argument("--tolerance", type=float, default=0.05, help="share (default 0.05)")
    parser.add_argument("--confidence", type=float, default=0.95, help="default 0.95")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser = _add(actions, "report", "make the Markdown and HTML pages of recorded lines")
    parser.add_argument("lines", type=Path, nargs="+", help="JSON lines files or folders")
    parser.add_argument("--out", type=Path, required=True, help="folder for report.md, report.html")
    parser = _add(actions, "trace", "show router traces, or put those of several ranks together")
    parser.add_argument("files", type=Path, nargs="+", help=f"{_TRACE_SUFFIX} files")
    parser.add_argument("--merge", type=Path, help="write all of them into this file")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    actions = {"run": _run, "compare": _compare, "report": _report, "trace": _trace}
    return actions[args.action](args)


def read_lines(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read recorded lines; a folder stands for the lines file in it.

    Raises:
        ConfigError: a file that is missing or no text, or a line that is no JSON object.
    """
    lines = []
    for path in paths:
        file = path / LINES if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"{file} does not exist; give a JSON lines file or a run's folder")
        for number, text in enumerate(file.read_bytes().splitlines(), 1):
            lines.append(_parsed(text, f"{file}, line {number}"))
    return lines


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    """One recorded line."""
    try:
        line = json.loads(text)
    except ValueError as error:  # also bytes that are no text
        line = error
    if not isinstance(line, dict):
        raise ConfigError(f"{where} is not a JSON object; remove the line if a run was cut off")
    return line


def _add(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:  # noqa: ANN401
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=summary)
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="print tracebacks of errors"
    )
    parser.set_defaults(run=run, action=name)
    return parser


def _run(args: argparse.Namespace) -> int:
    """`bench run`."""
    console = _console()
    if args.list:
        for name, (_, summary) in BACKENDS.items():
            console.print(f"{name:28}{summary}", highlight=False)
        return OK
    spec = _spec(args)
    _check_folder(args.out)
    signal.signal(signal.SIGTERM, _leave)
    together = join_others()
    words = getattr(args, "words", ["ep-dispatcher", "bench", "run"])
    log = ResultLog(args.out / LINES, words, **({"commit": args.commit} if args.commit else {}))
    leads = together is None or together.leads
    bench = Bench(
        spec=spec,
        log=log,
        together=together,
        budget_s=args.budget,
        recover=args.recover,
        # An error may have brackets, which are no markup: gloo's do.
        tell=lambda outcome: console.print(Text(_progress(outcome)), soft_wrap=True),
    )
    outcomes = bench.run()
    if leads:
        console.print(_table(outcomes))
        console.print(f"{log.path}: run {log.run}", markup=False)
        if not args.no_report:
            _write_report([line for line in read_lines([log.path]) if line["run"] == log.run], args)
    enough = all if args.strict else any
    return OK if enough(outcome.error is None for outcome in outcomes) else NO_TIMES


def _check_folder(out: Path) -> None:
    """Refuse, before hours of measuring, a folder that cannot take lines and pages."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out is {out}, which is a file; give a folder")
    if (out / LINES).exists():
        read_lines([out])  # new lines behind one that was cut off could not be read again


def _leave(number: int, frame: object) -> None:
    """Leave as after Ctrl-C, so that the ranks' processes are ended too."""
    raise SystemExit(128 + number)


def _console() -> Console:
    """A console that keeps a table's columns readable where no terminal tells a width."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=_PLAIN_WIDTH)


def _spec(args: argparse.Namespace) -> BenchSpec:
    """The file's spec with the command line's changes; flags alone are a spec as well."""
    for name in args.backends or ():
        check_name(name)
    backends = tuple(args.backends) if args.backends else None
    if args.config is not None:
        spec = load_spec(args.config)
        if backends is not None:
            spec = with_changes(spec, backends=backends, sweeps=_without_others(spec, backends))
        spec = with_changes(spec, device=args.device)
    elif backends is not None:
        spec = BenchSpec(backends=backends, device=args.device or "cpu")
    else:
        raise ConfigError("give --config, or --backends with --set; --list shows the backends")
    return _with_fields(spec, args.set)


def _without_others(spec: BenchSpec, backends: Sequence[str]) -> tuple[Any, ...]:
    """Sweeps restricted to some backends; a sweep that has none of them goes."""
    kept = []
    for sweep in spec.sweeps:
        mine = [name for name in sweep.get("backends", backends) if name in backends]
        if mine:
            kept.append({**sweep, "backends": mine})
    return tuple(kept)


def _with_fields(spec: BenchSpec, assignments: Sequence[str]) -> BenchSpec:
    """Apply KEY=VALUE words to the work or the method, whichever has the key."""
    values: dict[str, Any] = {"work": {}, "method": {}}
    for word in assignments:
        key, found, text = word.partition("=")
        section = "method" if key in spec.method.__dataclass_fields__ else "work"
        if not found or key not in getattr(spec, section).__dataclass_fields__:
            known = [*spec.work.__dataclass_fields__, *spec.method.__dataclass_fields__]
            raise ConfigError(f"--set {word!r}: it must be KEY=VALUE with a key of {known}")
        try:
            values[section][key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {word!r}: {text!r} is no value of YAML") from error
    return BenchSpec.from_dict(
        {
            "suite": spec.suite,
            "device": spec.device,
            "backends": spec.backends,
            "sweeps": spec.sweeps,
            "work": vars(spec.work) | values["work"],
            "method": vars(spec.method) | values["method"],
        }
    )


def _progress(outcome: Outcome) -> str:
    """One line for an outcome as it comes."""
    verdict = f"no time: {outcome.error}" if outcome.error else "checked, timed"
    return f"{outcome.backend:24} {outcome.work.label()} sms {outcome.work.num_sms}: {verdict}"


def _table(outcomes: Sequence[Outcome]) -> Table:
    """Medians of the slowest rank, a line for each backend and work."""
    table = Table(title="Microseconds, median of the slowest rank", title_justify="left")
    for column in ("backend", "work", "SMs"):
        table.add_column(column, overflow="fold")
    for column in (*_SHOWN, "permutes"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        work = outcome.work
        head = (outcome.backend, work.label(), str(work.num_sms))
        if outcome.error is not None:
            table.add_row(*head, "no time", Text(shortened(outcome.error)))
            continue
        times = {k: summarise_times(us)["median_us"] for k, us in slowest_rank(outcome).items()}
        permutes = times.get("permute", 0) + times.get("unpermute", 0)
        cells = [f"{times[phase]:,.0f}" if phase in times else "" for phase in _SHOWN]
        table.add_row(*head, *cells, f"{permutes:,.0f}" if permutes else "")
    return table


def shortened(text: str) -> str:
    """An error short enough for a cell."""
    return text if len(text) <= 60 else text[:57] + "..."


def _compare(args: argparse.Namespace) -> int:
    """`bench compare`."""
    before, after = read_lines([args.before]), read_lines([args.after])
    changes = compare(before, after, tolerance=args.tolerance, confidence=args.confidence)
    worse = sum(change.is_regression for change in changes)
    console = Console(soft_wrap=True)
    if args.json:
        console.print_json(json.dumps([vars(change) for change in changes]))
    else:
        for change in changes:
            console.print(_describe(change), highlight=False, markup=False)
        for fact in differing_facts(before, after):
            console.print(f"the runs differ in {fact}", highlight=False, markup=False)
        wide = sum(change.too_wide for change in changes)
        if wide:
            console.print(
                f"{wide} with an interval too wide to tell whether they are slower by "
                f"{args.tolerance:.0%}; measure more rounds",
                highlight=False,
            )
        console.print(f"{len(changes)} compared, {worse} worse")
    return REGRESSED if worse else OK


def _describe(change: Change) -> str:
    """One change in one line."""
    if change.ratio is None:
        return f"{change.verdict:7}{change.what}"
    return (
        f"{change.verdict:7}{change.before_us:10,.1f} -> {change.after_us:10,.1f} us  "
        f"x{change.ratio:.3f} [{change.low:.3f}, {change.high:.3f}]  {change.what}"
    )


def _report(args: argparse.Namespace) -> int:
    """`bench report`."""
    _write_report(read_lines(args.lines), args)
    return OK


def _write_report(lines: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Write both pages and say where."""
    from ep_dispatcher.bench.report import write_pages  # matplotlib takes its time to import

    for page in write_pages(lines, args.out):
        Console().print(str(page), markup=False)


def _trace(args: argparse.Namespace) -> int:
    """`bench trace`."""
    traces = [read_trace(file) for file in args.files]
    console = Console()
    for file, trace in zip(args.files, traces, strict=True):
        console.print_json(json.dumps({"file": file.name, **trace.summary()}))
    if args.merge is not None:
        write_trace(args.merge, merge_traces(traces))
        console.print(f"wrote {args.merge}", markup=False)
    return OK
