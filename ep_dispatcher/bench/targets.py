"""Measured times beside the targets for one host: a short table, and the same as JSON.

    python -m ep_dispatcher.bench.targets results.jsonl... --ranks 8 --out targets.json

Nothing is judged that was not measured, nor on a machine that a target is not for: ranks that share
a GPU share its memory and SMs and have no links between them. Such a row says so. Peers may be
missing; where this package's own dispatch or combine has no time, the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ep_dispatcher.bench.command import read_lines
from ep_dispatcher.bench.page_data import Line, timed

OURS = "ep_dispatcher/device"
_ANY_TIER = "ep_dispatcher/"
PHASE_LIMIT_US = 850.0  # dispatch, combine: T=4096 H=7168 K=8 E=256 BF16, 8 GPUs
TARGET_RANKS = 8
MOST_SMS = 10
LINK_SHARE = 0.9
HIDDEN_SHARE = 0.9
_WORK = {"num_tokens": 4096, "hidden": 7168, "num_topk": 8, "num_experts": 256}
_BESIDE = {"dispatch": ("plan", "permute"), "combine": ("unpermute",)}
_NOT_FOR = {
    "mps": "ranks share a GPU",
    "time slices": "ranks share a GPU",
    "cpu": "measured without a GPU",
}
_WIDTH = 150


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One target.

    Attributes:
        what: is measured.
        target: in words.
        measured: in words; "not measured" where there is no line for it.
        met: None where nothing was measured, or where the target is for another machine.
        not_judged: why something measured is not judged; else empty.
    """

    what: str
    target: str
    measured: str
    met: bool | None
    not_judged: str = ""


def judge(lines: Sequence[Line], num_ranks: int) -> list[Verdict]:
    """Every target, against the lines of uniform routing with this many ranks.

    Args:
        lines: recorded; of this package's lines the best form counts, as a user can choose it.
        num_ranks: P.
    """
    mine = [line for line in timed(lines) if _is_target_work(line) and line["ranks"] == num_ranks]
    why = next((_NOT_FOR[way] for way in map(_sharing, lines) if way in _NOT_FOR), "")
    ceiling = max(
        (
            line["ceiling_GBps"]
            for line in lines
            if line.get("suite") == "ceiling" and line["ceiling"] == "link"
        ),
        default=None,
    )
    verdicts = []
    for phase in ("dispatch", "combine"):
        few = [line for line in mine if _is_ours(line, phase) and line["num_sms"] <= MOST_SMS]
        best = min(few, key=_median, default=None)
        is_for = why or ("" if num_ranks == TARGET_RANKS else f"for {TARGET_RANKS} GPUs")
        verdicts.append(_unless(is_for, _within_limit(phase, best)))
        verdicts.append(_link_share(phase, best, ceiling, has_links=num_ranks > 1 and not why))
        verdicts.append(_against_peers(phase, mine))
    verdicts.append(_unless(why, _hidden(lines)))
    return verdicts


def failure_of_ours(lines: Sequence[Line], num_ranks: int) -> str:
    """What this package has no time for; empty where dispatch and combine have one.

    The targets' work counts where any backend was given it, else whatever was: a run without a GPU
    moves less. So does any tier.

    Args:
        lines: recorded.
        num_ranks: P.
    """
    cells = [line for line in lines if "routing" in line and line["ranks"] == num_ranks]
    cells = [line for line in cells if _is_target_work(line)] or cells
    mine = [line for line in cells if str(line["backend"]).startswith(_ANY_TIER)]
    have = {line["phase"] for line in timed(mine)}
    lost = [phase for phase in ("dispatch", "combine") if phase not in have]
    if not lost:
        return ""
    reasons = [str(line["error"]) for line in mine if "error" in line]
    why = reasons[0] if reasons else "no line of it was recorded"
    return f"{OURS.split('/')[0]}: no time of {' and '.join(lost)} with {num_ranks} ranks: {why}"


def _unless(why: str, verdict: Verdict) -> Verdict:
    """The same verdict, not judged where there is a reason."""
    if not why or verdict.met is None:
        return verdict
    return replace(verdict, met=None, not_judged=why)


def _within_limit(phase: str, best: Line | None) -> Verdict:
    """The time itself."""
    target = f"at most {PHASE_LIMIT_US:.0f} us at {MOST_SMS} SMs or fewer"
    if best is None:
        return _missing(phase, target)
    words = f"{_median(best):,.0f} us at {best['num_sms']} SMs"
    return Verdict(what=phase, target=target, measured=words, met=_median(best) <= PHASE_LIMIT_US)


def _link_share(
    phase: str, best: Line | None, ceiling: float | None, *, has_links: bool
) -> Verdict:
    """Bytes on the links against what copy engines put there."""
    what, target = f"{phase}: link", f"at least {LINK_SHARE:.0%} of the measured link"
    if not has_links:
        words = "nothing to measure: no two ranks have a GPU each"
        return Verdict(what=what, target=target, measured=words, met=None)
    if best is None or ceiling is None:
        return _missing(what, target)
    rate = best["wire_bytes"] / _median(best) / 1000
    words = f"{rate:,.0f} of {ceiling:,.0f} GB/s, {rate / ceiling:.0%}"
    return Verdict(what=what, target=target, measured=words, met=rate >= LINK_SHARE * ceiling)


def _against_peers(phase: str, lines: Sequence[Line]) -> Verdict:
    """Each one's best time, with what it needs beside: a peer's permute may hold its plan."""
    what = f"{phase}: peers"
    target = f"ahead of every peer, each at its best SMs, {' and '.join(_BESIDE[phase])} included"
    times: dict[str, float] = {}
    for name in {line["backend"] for line in lines}:
        found = [
            _median(line) + sum(_beside_us(lines, line, other) for other in _BESIDE[phase])
            for line in lines
            if line["backend"] == name and line["phase"] == phase
        ]
        if found:
            times[name] = min(found)
    ours = times.pop(OURS, None)
    if ours is None or not times:
        return _missing(what, target)
    peer = min(times, key=lambda name: times[name])
    words = f"ours {ours:,.0f}, {peer} {times[peer]:,.0f} us"
    return Verdict(what=what, target=target, measured=words, met=ours < times[peer])


def _hidden(lines: Sequence[Line]) -> Verdict:
    """The overlapped layer's lines carry the share themselves."""
    target = f"at least {HIDDEN_SHARE:.0%} of communication hidden"
    shares = [line["hidden_fraction"] for line in lines if "hidden_fraction" in line]
    if not shares:
        return _missing("overlap", target)
    best = max(shares)
    return Verdict(what="overlap", target=target, measured=f"{best:.0%}", met=best >= HIDDEN_SHARE)


def _beside_us(lines: Sequence[Line], line: Line, phase: str) -> float:
    """Median of another phase of the same backend and SMs; 0 where it has none."""
    same: Callable[[Line], bool] = lambda other: (  # noqa: E731
        other["phase"] == phase
        and other["backend"] == line["backend"]
        and other["num_sms"] == line["num_sms"]
    )
    return min((_median(other) for other in lines if same(other)), default=0.0)


def _is_ours(line: Line, phase: str) -> bool:
    return bool(line["backend"] == OURS and line["phase"] == phase)


def _is_target_work(line: Line) -> bool:
    """Whether a line is of the work that the targets are about."""
    plain = line.get("routing") == "uniform" and line.get("domains", 1) == 1
    return plain and all(line.get(name) == value for name, value in _WORK.items())


def _sharing(line: Line) -> str:
    """How ranks share GPUs; empty where a line does not tell."""
    return str(line.get("machine", {}).get("sharing", ""))


def _median(line: Line) -> float:
    return float(line["median_us"])


def _missing(what: str, target: str) -> Verdict:
    return Verdict(what=what, target=target, measured="not measured", met=None)


def main(words: list[str]) -> int:
    """Print the table and write the JSON; exit code 1 where our own times are missing."""
    parser = argparse.ArgumentParser(description="Hold recorded lines against the targets.")
    parser.add_argument("lines", type=Path, nargs="+", help="JSON lines files or folders of runs")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args(words)
    found = [path for path in args.lines if path.exists()]
    lines = read_lines(found)
    verdicts = judge(lines, args.ranks)
    title = (
        f"Targets for {TARGET_RANKS} ranks with a GPU each, beside what {args.ranks} ranks measured"
    )
    table = Table(title=title, title_justify="left")
    for column in ("what", "target", "measured", "met"):
        table.add_column(column)
    for verdict in verdicts:
        met = {True: "yes", False: "no", None: verdict.not_judged}[verdict.met]
        met = f"not judged: {met}" if verdict.not_judged else met
        table.add_row(verdict.what, verdict.target, verdict.measured, met)
    Console(width=_WIDTH).print(table)
    args.out.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1) + "\n")
    failure = failure_of_ours(lines, args.ranks)
    if failure:
        sys.stderr.write(failure + "\n")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
