"""Starts one set of processes for each backend, watches it, and gathers what came of each work.

A set that crashes or exceeds its time limit is ended and started again behind the work that it
died of, so that one bad peer costs its own row and nothing else. Ranks come from here (one
machine), from torchrun, or from SLURM; in the last two cases every rank runs this module for its
own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from ep_dispatcher.agreement import gather_json
from ep_dispatcher.bench.spec import Device, Method, Work
from ep_dispatcher.bench.worker import COUNTING, FAILED, WHERE, Job, result_file
from ep_dispatcher.collectives import Collectives
from ep_dispatcher.errors import ConfigError

_POLL_S = 0.05
_GRACE_S = 10.0  # for the peers of a rank that has ended badly
_RECOVERY_S = 60.0
_TELL_S = 0.5  # for a process that is asked where it is
_SHORT = 2000  # characters of a rank's standard error that are looked through


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one backend on one work.

    Attributes:
        backend: name.
        work: what it was asked.
        ranks: each rank's `RankResult` as plain values; empty where there is an error.
        error: why there is no time, in one sentence; None where there is.
    """

    backend: str
    work: Work
    ranks: tuple[dict[str, Any], ...] = ()
    error: str | None = None


class Team(Protocol):
    """The launchers of a run: one, or one for each rank.

    Attributes:
        local_ranks: ranks whose processes this launcher starts.
        leads: whether this launcher writes the results.
    """

    local_ranks: Sequence[int]
    leads: bool

    def share(self, value: Any) -> Any:  # noqa: ANN401
        """The leader's value, at all launchers."""
        ...

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401
        """Every launcher's value, at all launchers."""
        ...


class Alone:
    """One launcher that starts all ranks on this machine."""

    leads = True

    def __init__(self, ranks: int) -> None:
        """Take all ranks."""
        self.local_ranks: Sequence[int] = range(ranks)

    def share(self, value: Any) -> Any:  # noqa: ANN401
        """The value itself."""
        return value

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401
        """The value alone."""
        return [value]


class Together:
    """A launcher for each rank, made by torchrun or SLURM; they talk over gloo."""

    def __init__(self) -> None:
        """Join the other launchers."""
        dist.init_process_group("gloo")
        assert dist.group.WORLD is not None
        self._collectives = Collectives(dist.group.WORLD)
        self.size = self._collectives.size
        self.local_ranks: Sequence[int] = [self._collectives.rank]
        self.leads = self._collectives.rank == 0

    def share(self, value: Any) -> Any:  # noqa: ANN401
        """See `Team.share`."""
        return gather_json(self._collectives, value)[0]

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401
        """See `Team.gather`."""
        return gather_json(self._collectives, value)


def join_others() -> Together | None:
    """Join the ranks that torchrun or SLURM started; None where this process is on its own.

    Raises:
        ConfigError: under SLURM without MASTER_ADDR.
    """
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "RANK" not in os.environ:
        if "MASTER_ADDR" not in os.environ:
            raise ConfigError(
                "MASTER_ADDR is not set; before srun, export the first host: "
                'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            )
        os.environ.setdefault("MASTER_PORT", "29571")
        names = {
            "RANK": "SLURM_PROCID",
            "WORLD_SIZE": "SLURM_NTASKS",
            "LOCAL_RANK": "SLURM_LOCALID",
        }
        os.environ.update({name: os.environ[source] for name, source in names.items()})
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return Together()
    return None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A backend's works of one number of ranks.

    Attributes:
        backend: name.
        works: all with the same `ranks`.
        device: "cpu" or "cuda".
        method: how to measure, and the limits.
        sharing_ranks: ranks that share a device.
        deadline: time.monotonic() at which the whole run must have ended; None for never.
        recover: command that puts the machine right after processes have ended badly.
    """

    backend: str
    works: tuple[Work, ...]
    device: Device
    method: Method
    sharing_ranks: int = 1
    deadline: float | None = None
    recover: str | None = None

    def run(self, team: Team) -> list[Outcome]:
        """Run all works; returns their outcomes in order, at every launcher."""
        outcomes: list[Outcome] = []
        failures = 0
        with tempfile.TemporaryDirectory(prefix="ep_bench_") as folder:
            while len(outcomes) < len(self.works):
                if (reason := self._why_stop(team, failures)) is not None:
                    rest = self.works[len(outcomes) :]
                    outcomes += [
                        Outcome(backend=self.backend, work=work, error=reason) for work in rest
                    ]
                    break
                done, failed = self._run_set(team, Path(folder), len(outcomes))
                failures += failed
                outcomes += done
        return outcomes

    def _why_stop(self, team: Team, failures: int) -> str | None:
        """Why the remaining works are not tried; the same at all launchers."""
        if failures >= self.method.max_failures:
            return f"not tried, as this backend ended badly {failures} times before in this run"
        if team.share(self.deadline is not None and time.monotonic() >= self.deadline):
            return "not tried, as the time budget of the run was used up"
        return None

    def _run_set(self, team: Team, folder: Path, first: int) -> tuple[list[Outcome], bool]:
        """Start the processes on the works from `first` on; returns what they got through."""
        address, port = team.share([os.environ.get("MASTER_ADDR", "127.0.0.1"), _free_port()])
        job = Job(
            backend=self.backend,
            device=self.device,
            works=self.works[first:],
            first=first,
            method=self.method,
            folder=str(folder),
            sharing_ranks=self.sharing_ranks,
        )
        processes = _Processes(job, team.local_ranks, address, port)
        try:
            why = processes.watch(self.method.time_limit_s, self.deadline)
        finally:
            processes.end()  # also when this process is interrupted
        if why is not None and self.recover is not None:
            self._recover(self.recover)
        told = team.gather(_read_results(folder, first, len(self.works), team.local_ranks))
        reasons = [reason for reason in team.gather(why) if reason is not None]
        return self._merge(first, told, sorted(reasons, key=_is_consequence))

    def _recover(self, command: str) -> None:
        """Run the command; its failure shows in what the next processes say."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(shlex.split(command), timeout=_RECOVERY_S, check=False)

    def _merge(
        self, first: int, told: list[dict[str, Any]], reasons: list[str]
    ) -> tuple[list[Outcome], bool]:
        """Put the ranks' files of each work together, up to the first that is incomplete."""
        by_rank = {key: value for part in told for key, value in part.items()}
        outcomes: list[Outcome] = []
        counting = False
        for number in range(first, len(self.works)):
            work = self.works[number]
            files = [by_rank.get(f"{number}.{rank}") for rank in range(work.ranks)]
            if None in files and counting:
                return outcomes, True  # it ended badly behind the times of the work before
            counting = any(COUNTING in file for file in files if file)
            errors = [file for file in files if file and "error" in file]
            if errors:
                error = min((file["error"] for file in errors), key=_is_consequence)
                if None in files and reasons and _is_consequence(error):
                    error = reasons[0]  # the rank that died left no file, its peers only noticed
                outcomes.append(Outcome(backend=self.backend, work=work, error=error))
            elif None not in files:
                results = tuple(file["result"] for file in files if file)
                outcomes.append(Outcome(backend=self.backend, work=work, ranks=results))
            else:
                reason = reasons[0] if reasons else "a rank ended without a word"
                outcomes.append(Outcome(backend=self.backend, work=work, error=reason))
            if None in files or any(file.get("fatal") for file in errors):
                return outcomes, _ended_badly(outcomes[-1].error)
        return outcomes, False


class _Processes:
    """The processes of the local ranks of one job."""

    def __init__(self, job: Job, ranks: Sequence[int], address: str, port: int) -> None:
        """Start them."""
        self._folder, self._first, self._ranks = Path(job.folder), job.first, ranks
        self._count = len(job.works)
        file = self._folder / f"job{job.first}.rank{ranks[0]}.json"
        file.write_text(job.dump(), encoding="utf-8")
        self._logs = [self._folder / f"log{job.first}.rank{rank}" for rank in ranks]
        self._running = [
            self._start(file, log, job.works[0].ranks, rank, (address, port))
            for rank, log in zip(ranks, self._logs, strict=True)
        ]

    def watch(self, limit_s: float, end: float | None) -> str | None:
        """Wait until all end, or the limit has passed without a work done, or the run must end.

        Args:
            limit_s: for each work.
            end: time.monotonic() at which the run must end; None for never.

        Returns:
            None if all ended well, else why the first one did not.
        """
        why = None
        done, deadline = 0, time.monotonic() + limit_s
        while any(process.poll() is None for process in self._running):
            time.sleep(_POLL_S)
            now = self._finished()
            if now > done:
                done, deadline = now, time.monotonic() + limit_s
            if why is None and self._bad_rank() is not None:
                why = self._describe()
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            if end is not None and time.monotonic() > end:
                why = why or "was ended, as the time budget of the run was used up"
                break
            if time.monotonic() > deadline:
                limit = f"took longer than its time limit of {limit_s:.0f} s and was ended"
                why = why or limit + self._where()
                break
        self.end()
        return why or (self._describe() if self._bad_rank() is not None else None)

    def _start(
        self, file: Path, log: Path, size: int, rank: int, meeting: tuple[str, int]
    ) -> subprocess.Popen[bytes]:
        # torchrun's own store would answer instead of the one that this set of processes makes.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        local = os.environ.get("LOCAL_RANK", str(rank)) if len(self._ranks) == 1 else str(rank)
        kept |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": local}
        kept |= {"MASTER_ADDR": meeting[0], "MASTER_PORT": str(meeting[1])}
        command = [sys.executable, "-m", "ep_dispatcher.bench.worker", str(file), str(os.getpid())]
        with log.open("wb") as output:
            return subprocess.Popen(
                command, env=kept, stdout=output, stderr=output, start_new_session=True
            )

    def _finished(self) -> int:
        """Works that every local rank has left a file for."""
        numbers = range(self._first, self._first + self._count)
        return sum(
            all(result_file(self._folder, number, rank).exists() for rank in self._ranks)
            for number in numbers
        )

    def _bad_rank(self) -> int | None:
        """Position of a process that ended badly; one that could not say why comes first."""
        codes = [process.poll() for process in self._running]
        bad = [n for n, code in enumerate(codes) if code not in (None, 0)]
        return min(bad, key=lambda n: codes[n] == FAILED, default=None)

    def _describe(self) -> str:
        """How the first bad rank ended, with the last line that it wrote."""
        position = self._bad_rank()
        assert position is not None
        code = self._running[position].poll()
        assert code is not None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        text = self._logs[position].read_text(encoding="utf-8", errors="replace")[-_SHORT:]
        lines = [line for line in text.splitlines() if line.strip()]
        tail = f": {' '.join(lines[-1].split())[:300]}" if lines else ""
        return f"rank {self._ranks[position]} died with {how}{tail}"

    def _where(self) -> str:
        """In which function the first rank that still runs is, as far as Python can tell."""
        position = next((n for n, each in enumerate(self._running) if each.poll() is None), None)
        if position is None:
            return ""
        seen = self._logs[position].stat().st_size
        self._running[position].send_signal(WHERE)
        time.sleep(_TELL_S)
        text = self._logs[position].read_bytes()[seen:].decode(errors="replace")
        frames = innermost(text)
        return f"; rank {self._ranks[position]} was in {frames}" if frames else ""

    def end(self) -> None:
        """End what still runs; by force, as it may wait inside a library."""
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._running:
            process.wait()


def _read_results(folder: Path, first: int, stop: int, ranks: Sequence[int]) -> dict[str, Any]:
    """The local ranks' files, by "work.rank"."""
    found = {}
    for number in range(first, stop):
        for rank in ranks:
            file = result_file(folder, number, rank)
            if file.exists():
                found[f"{number}.{rank}"] = json.loads(file.read_text(encoding="utf-8"))
    return found


def innermost(dump: str) -> str:
    """The innermost frame of a traceback that faulthandler wrote, and of this package's.

    Example: 'File "/a/torch/cuda.py", line 9 in wait' above 'File "/b/ep_dispatcher/c.py", line 5
    in f' -> "wait (cuda.py:9), called from f (c.py:5)".
    """
    frames = re.findall(r'File "([^"]+)", line (\d+)\s+in (\S+)', dump)
    words = [f"{name} ({file.rsplit('/', 1)[-1]}:{line})" for file, line, name in frames]
    ours = [n for n, (file, _, _) in enumerate(frames) if "/ep_dispatcher/" in file]
    if not ours or ours[0] == 0:
        return words[0] if words else ""
    return f"{words[0]}, called from {words[ours[0]]}"


def _is_consequence(error: str) -> bool:
    """Whether an error looks like that of a peer of the rank that failed first."""
    words = ("Connection", "connection", "closed by peer", "Timed out", "timed out", "Broken pipe")
    return any(word in error for word in words)


def _ended_badly(error: str | None) -> bool:
    """Whether an error cost a set of processes unexpectedly: a wrong result is a clean verdict."""
    return error is not None and not error.startswith("the result is wrong")


def _free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
