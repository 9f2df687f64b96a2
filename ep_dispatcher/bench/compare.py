"""Compares two recorded runs: the ratio of medians with a bootstrap confidence interval.

Rounds are resampled with replacement within each run, 2000 times, from a fixed seed. A phase has
regressed where the whole interval of B / A lies above 1 + tolerance: noise alone does not do that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ep_dispatcher.errors import ConfigError

_RESAMPLES = 2000
_SEED = 20240501
_WORK = (
    "ranks",
    "domains",
    "num_tokens",
    "hidden",
    "num_topk",
    "num_experts",
    "dtype",
    "routing",
    "skew",
    "masked_fraction",
    "trace",
    "alignment",
    "num_sms",
    "chunk_tokens",
    "combine",
    "duplicates",
    "ffn_hidden",
    "seed",
)
_MACHINE = ("gpu", "gpu_count", "driver", "sharing", "cpu", "cpu_cores")

Line = dict[str, Any]
Key = tuple[object, ...]
Verdict = Literal["slower", "faster", "same", "lost", "new"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One phase of one backend on one work, before and after.

    Attributes:
        what: backend, phase and the fields of the work, for people.
        before_us: median of A; None where A has no time.
        after_us: median of B; None where B has no time.
        ratio: after / before.
        low: lower end of the ratio's interval; `high`: upper end.
        verdict: "slower" and "lost" make a regression.
        too_wide: whether "same" may be slower by more than the tolerance: more rounds would tell.
    """

    what: str
    before_us: float | None
    after_us: float | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: Verdict
    too_wide: bool = False

    @property
    def is_regression(self) -> bool:
        """Whether B is worse beyond doubt: slower, or without a time that A has."""
        return self.verdict in ("slower", "lost")


def compare(
    before: Sequence[Line],
    after: Sequence[Line],
    *,
    tolerance: float = 0.05,
    confidence: float = 0.95,
) -> list[Change]:
    """Match the lines of two runs and judge each pair.

    Args:
        before: lines of A; the last line of a kind counts.
        after: lines of B; where its rows say that there is no time, what A has is lost.
        tolerance: slow-down that is not worth a word, as a share.
        confidence: of the interval.

    Raises:
        ConfigError: tolerance or confidence out of range, no lines in A or B, no times in A, or
            nothing in common.
    """
    if not tolerance >= 0:
        raise ConfigError(f"tolerance is {tolerance}; it must be 0 or more")
    if not 0.5 <= confidence < 1:
        raise ConfigError(f"confidence is {confidence}; it must be in [0.5, 1)")
    for side, lines in (("first", before), ("second", after)):
        if not lines:
            raise ConfigError(f"the {side} run has no lines; give one that measured something")
    old, new = _by_key(before), _by_key(after)
    if not old:
        raise ConfigError(
            "no line of the first run has a time, so there is nothing to compare with"
        )
    if not {(backend, *work) for backend, _, *work in old} & _cells(after):
        raise ConfigError("the two runs have no backend, phase and work in common")
    return [
        _judge(key, old.get(key), new.get(key), tolerance, confidence)
        for key in sorted(set(old) | set(new), key=str)
    ]


def differing_facts(before: Sequence[Line], after: Sequence[Line]) -> list[str]:
    """What else than the code differs between two runs, and so may explain a difference of times.

    Returns:
        Words such as "gpu: H100 -> H200"; machines first, then versions of packages.
    """
    facts = []
    for section in ("machine", "versions"):
        old, new = (_values_of(lines, section) for lines in (before, after))
        names = _MACHINE if section == "machine" else sorted(set(old) | set(new))
        facts += [
            f"{name}: {old.get(name, 'none')} -> {new.get(name, 'none')}"
            for name in names
            if old.get(name) != new.get(name)
        ]
    return facts


def _values_of(lines: Sequence[Line], section: str) -> dict[str, str]:
    """Values of a section over all lines; several where they differ, in order."""
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        for name, value in line.get(section, {}).items():
            found.setdefault(name, {})[str(value)] = None
    return {name: ", ".join(values) for name, values in found.items()}


def bootstrap_ratio(
    before: Sequence[float], after: Sequence[float], confidence: float
) -> tuple[float, float]:
    """Interval of median(after) / median(before).

    Example: before all 10, after all 20 -> (2.0, 2.0).
    """
    source = np.random.default_rng(_SEED)
    medians = [
        np.median(source.choice(np.asarray(times), (_RESAMPLES, len(times))), axis=1)
        for times in (before, after)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(medians[1] / medians[0], [tail, 1 - tail])
    return float(low), float(high)


def _by_key(lines: Sequence[Line]) -> dict[Key, Line]:
    """Timed lines by backend, phase and work."""
    return {
        (line["backend"], line["phase"], *(line.get(name) for name in _WORK)): line
        for line in lines
        if "median_us" in line and "phase" in line
    }


def _cells(lines: Sequence[Line]) -> set[Key]:
    """Backend and work of every line, also of those that say why there is no time."""
    return {
        (line["backend"], *(line.get(name) for name in _WORK))
        for line in lines
        if "backend" in line
    }


def _judge(
    key: Key, old: Line | None, new: Line | None, tolerance: float, confidence: float
) -> Change:
    """Judge one pair of lines."""
    what = _words(key)
    if old is None or new is None:
        times = [None if line is None else float(line["median_us"]) for line in (old, new)]
        verdict: Verdict = "new" if old is None else "lost"
        return Change(what=what, before_us=times[0], after_us=times[1], verdict=verdict)
    rounds = [line.get("rounds_us") or [line["median_us"]] for line in (old, new)]
    low, high = bootstrap_ratio(rounds[0], rounds[1], confidence)
    verdict = "same"
    if low > 1 + tolerance:
        verdict = "slower"
    elif high < 1 / (1 + tolerance):
        verdict = "faster"
    before_us, after_us = float(old["median_us"]), float(new["median_us"])
    ratio = after_us / before_us
    return Change(
        what=what,
        before_us=before_us,
        after_us=after_us,
        ratio=ratio,
        low=low,
        high=high,
        verdict=verdict,
        too_wide=verdict == "same" and high > 1 + tolerance,
    )


def _words(key: Key) -> str:
    """A key for people: names only what is not the usual."""
    usual = {"domains": 1, "alignment": 1, "chunk_tokens": 64, "seed": 0}
    backend, phase, *values = key
    named = zip(_WORK, values, strict=True)
    shown = [f"{n}={v}" for n, v in named if v is not None and usual.get(n) != v]
    return f"{backend} {phase} {' '.join(shown)}"
