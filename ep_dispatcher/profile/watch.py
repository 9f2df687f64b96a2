"""What a measurement is at, and where its ranks are if it does not go on.

The first rank prints a line a phase, with the seconds since the start. Every rank keeps the phase
that it is in in a file of its own, and its stacks are added there when a phase lasts longer than
the limit, which ends the rank, or when the job is ended from outside (SIGTERM, as torchrun sends
it to the ranks that are left, and `timeout` to all). Nothing of that needs the interpreter, so a
rank that waits inside a call is shown too. A rank that ends or raises by itself leaves no file.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from ep_dispatcher.train.progress import Steps

Tell = Callable[[str], object]  # is told what begins

LIMIT_S = 300.0  # the first step of a large model compiles and allocates


class Watch:
    """Shows phases of a measurement and where it hangs; a context manager.

    Args:
        out: what is measured goes to this file; stacks go beside it. None: stacks go to stderr.
        limit_s: that a phase may take.
        rank: this one; None: the environment's RANK, or 0.
    """

    def __init__(self, out: Path | None, limit_s: float, rank: int | None = None) -> None:
        """Count seconds from here."""
        self._limit_s, self._began = limit_s, time.perf_counter()
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._say = Steps(speaks=self.rank == 0)
        self.path = None if out is None else stacks_file(out, self.rank)
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        """Watch the phase in which ranks meet."""
        if self.path is None:
            self._file = sys.__stderr__
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8")
        assert self._file is not None
        faulthandler.register(signal.SIGTERM, file=self._file, all_threads=True, chain=True)
        place = self.path or "stderr"
        self(f"ranks meet; stacks of a phase over {self._limit_s:g} s go to {place}, and of others")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Watch no longer; what was raised has its own traceback."""
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGTERM)
        if self.path is not None and self._file is not None:
            self._file.close()
            self.path.unlink(missing_ok=True)

    def __call__(self, text: str) -> None:
        """A phase begins: the first rank says so."""
        self._say(text)
        self.at(text)

    def at(self, text: str) -> None:
        """A phase begins that is too short for a line."""
        assert self._file is not None
        if self.path is not None:
            self._file.seek(0)
            self._file.truncate()
            passed_s = time.perf_counter() - self._began
            self._file.write(f"rank {self.rank}, since {passed_s:.1f} s: {text}\n")
            self._file.flush()
        faulthandler.dump_traceback_later(self._limit_s, file=self._file, exit=True)


def stacks_file(out: Path, rank: int) -> Path:
    """Where a rank keeps its phase and its stacks: runs/a.jsonl, 2 -> runs/a.rank2.stacks."""
    return out.with_name(f"{out.stem}.rank{rank}.stacks")


def add_limit(parser: argparse.ArgumentParser) -> None:
    """Add the option that says how long a phase may take."""
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=LIMIT_S,
        metavar="S",
        help="seconds that a phase (building a model, a step) may take; then the ranks write their "
        f"stacks and end (default {LIMIT_S:g})",
    )


def positive(text: str) -> int:
    """A number of steps or rounds: at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value
