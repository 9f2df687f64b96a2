"""A whole run: every backend on every work, each result written as soon as it is there."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ep_dispatcher.bench.backends import check_name
from ep_dispatcher.bench.launcher import Alone, Launch, Outcome, Team, Together
from ep_dispatcher.bench.lines import lines_of
from ep_dispatcher.bench.results import ResultLog
from ep_dispatcher.bench.spec import BenchSpec, Work
from ep_dispatcher.bench.trace import read_trace
from ep_dispatcher.errors import ConfigError, UnavailableError

Tell = Callable[[Outcome], None]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A run that is ready to go.

    Attributes:
        spec: what to run.
        log: where lines go; used by the leader only.
        together: the other launchers under torchrun or SLURM, else None.
        budget_s: seconds that the whole run may take; works that come too late get a row.
        recover: command to run after processes have ended badly, before others start.
        tell: called with each outcome, to show progress.
    """

    spec: BenchSpec
    log: ResultLog
    together: Together | None = None
    budget_s: float | None = None
    recover: str | None = None
    tell: Tell = lambda outcome: None

    def __post_init__(self) -> None:
        """Check everything that can be checked before anything is started."""
        beside = self.spec.method.interference
        for name in (*(name for name, _ in self.spec.pairs()), *beside):
            check_name(name)
        check_traces([work for _, work in self.spec.pairs()])
        if self.budget_s is not None and not self.budget_s > 0:
            raise ConfigError(f"budget is {self.budget_s}; it must be above 0 seconds")
        if self.spec.device == "cuda" and not torch.cuda.is_available():
            raise UnavailableError("device is 'cuda' but torch sees no GPU; set it to 'cpu'")
        if self.together is not None:
            wrong = {work.ranks for _, work in self.spec.pairs()} - {self.together.size}
            if wrong:
                raise ConfigError(
                    f"ranks is {sorted(wrong)[0]} but {self.together.size} were started; set "
                    "`ranks` in the file to that number, or run without torchrun and SLURM"
                )

    def run(self) -> list[Outcome]:
        """Run everything; returns the outcomes in order."""
        outcomes = []
        deadline = None if self.budget_s is None else time.monotonic() + self.budget_s
        groups = itertools.groupby(self.spec.pairs(), key=lambda pair: (pair[0], pair[1].ranks))
        for (backend, ranks), pairs in groups:
            works = tuple(work for _, work in pairs)
            for outcome in self._launch(backend, ranks, works, deadline):
                outcomes.append(outcome)
                self._record(outcome)
        return outcomes

    def _launch(
        self, backend: str, ranks: int, works: tuple[Work, ...], deadline: float | None
    ) -> list[Outcome]:
        """One backend on its works of one number of ranks."""
        team: Team = self.together if self.together is not None else Alone(ranks)
        launch = Launch(
            backend=backend,
            works=works,
            device=self.spec.device,
            method=self.spec.method,
            sharing_ranks=self._sharing_ranks(ranks),
            deadline=deadline,
            recover=self.recover,
        )
        return launch.run(team)

    def _record(self, outcome: Outcome) -> None:
        """Write an outcome's lines and show it."""
        if self.together is not None and not self.together.leads:
            return
        sharing = self._sharing(outcome.work.ranks)
        for line in lines_of(outcome, self.spec.suite, sharing):
            self.log.write(**line)
        self.tell(outcome)

    def _sharing_ranks(self, ranks: int) -> int:
        """Ranks on one device; on a CPU each rank counts its own memory."""
        if self.spec.device == "cpu":
            return 1
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if self.together else ranks
        return -(-here // torch.cuda.device_count())

    def _sharing(self, ranks: int) -> str:
        """How ranks share the machine, in the words of the recorded lines."""
        if self.spec.device == "cpu":
            return "cpu"
        if self._sharing_ranks(ranks) == 1:
            return "one per gpu"
        return "mps" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else "time slices"


def check_traces(works: Sequence[Work]) -> None:
    """Refuse a router trace that cannot be read, or has not what a work replays of it.

    Raises:
        ConfigError: names the file, and what to set.
    """
    for path in {work.trace for work in works} - {None}:
        trace = read_trace(Path(str(path)))
        for work in (work for work in works if work.trace == path):
            for rank in range(min(work.ranks, trace.ep_size)):
                try:
                    trace.tokens_of(rank, work)
                except ConfigError as error:
                    raise ConfigError(f"router trace {path}: {error}") from error


def with_changes(spec: BenchSpec, **changes: object) -> BenchSpec:
    """A spec with some fields replaced; those that are None stay."""
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(spec, **given)  # type: ignore[arg-type]
