"""Ranks as processes: a world that stays up and runs functions on all ranks.

A rank that dies or does not answer is told with its stacks, and ends the world: nothing hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

_START_TIMEOUT_S = 120.0
_GRACE_S = 5.0  # for the peers of a rank that died
_END_TIMEOUT_S = 20.0
_STACK_WAIT_S = 0.5


class RankError(AssertionError):
    """One or more ranks raised; the message holds every rank's own traceback."""


class ProcessWorld:
    """Processes that are the ranks of one gloo group; each uses GPU rank % (number of GPUs).

    A function sent to them must be importable by name. CUDA starts once a process, not once a
    test, which is most of a small test's time.

    Args:
        num_ranks: P.
    """

    def __init__(self, num_ranks: int) -> None:
        """Start the ranks."""
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name, "store"))
        self._pipes: list[Connection] = []
        self._processes = []
        self._over = ""
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, store, str(self._stacks_file(rank)), rank, num_ranks)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that a rank's end is seen here
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, work: Callable[..., Any], *args: object, timeout_s: float = _START_TIMEOUT_S
    ) -> list[Any]:
        """Call `work(process_group, *args)` on every rank; returns the ranks' values.

        Raises:
            RankError: ranks raised, died or did not answer in time; after the last two the world
                is over.
        """
        if self._over:
            raise RankError(f"this world is over: {self._over}")
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # that rank is gone, which is seen below
                pipe.send((work, args))
        answers = self._answers(timeout_s)
        failures = [
            f"rank {rank}: {failure}" for rank, (failure, _) in sorted(answers.items()) if failure
        ]
        if failures:
            raise RankError("\n".join(failures))
        return [answers[rank][1] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        for rank, process in enumerate(self._processes):
            process.join(timeout=max(0.0, deadline_s - time.monotonic()))
            if process.is_alive():
                sys.stderr.write(f"rank {rank} does not end:\n{self._stacks(rank)}")
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        """Return the world."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the ranks."""
        self.close()

    def _answers(self, timeout_s: float) -> dict[int, tuple[str, Any]]:
        """What each rank answered: why it failed, or "", and its value."""
        answers: dict[int, tuple[str, Any]] = {}
        deadline_s = time.monotonic() + timeout_s
        while len(answers) < len(self._pipes):
            waiting = {id(pipe): rank for rank, pipe in enumerate(self._pipes)}
            left_s = deadline_s - time.monotonic()
            open_pipes = [p for rank, p in enumerate(self._pipes) if rank not in answers]
            ready = wait(open_pipes, max(0.0, left_s))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[id(pipe)]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    answers[rank] = (self._death_of(rank), None)
                    deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        silent = [rank for rank in range(len(self._pipes)) if rank not in answers]
        for rank in silent:
            answers[rank] = (f"no answer in time\n{self._stacks(rank)}", None)
            self._over = self._over or f"rank {rank} did not answer"
        if self._over:
            for process in self._processes:
                process.kill()
        return answers

    def _death_of(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(timeout=_GRACE_S)
        self._over = f"rank {rank} died with exit code {process.exitcode}"
        return f"died with exit code {process.exitcode}\n{self._told_stacks(rank)}"

    def _stacks(self, rank: int) -> str:
        """Where a living rank is: Python's stacks, and what its threads wait for."""
        process = self._processes[rank]
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(_STACK_WAIT_S)
        return self._told_stacks(rank) + _threads_of(process.pid)

    def _told_stacks(self, rank: int) -> str:
        file = self._stacks_file(rank)
        return file.read_text(errors="replace") if file.exists() else ""

    def _stacks_file(self, rank: int) -> Path:
        return Path(self._folder.name, f"stacks.{rank}")


def _threads_of(pid: int) -> str:
    """Each thread of a process: its name, and the kernel function that it sleeps in."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            names = [Path(task, part).read_text().strip() for part in ("comm", "wchan")]
            lines.append(f"  thread {task.name}: {names[0]} in {names[1] or '?'}\n")
    return "".join(lines)


def _serve(pipe: Connection, store: str, stacks: str, rank: int, num_ranks: int) -> None:
    """A rank's life: join the group, then answer until told to end."""
    stacks_file = Path(stacks).open("w")  # noqa: SIM115  # until the process ends
    faulthandler.enable(file=stacks_file)
    faulthandler.register(signal.SIGUSR1, file=stacks_file)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=_START_TIMEOUT_S),
    )
    while (order := _next_order(pipe)) is not None:
        work, args = order
        try:
            pipe.send(("", work(dist.group.WORLD, *args)))
        except BaseException:  # noqa: BLE001  # a rank reports whatever ended its work
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()


def _next_order(pipe: Connection) -> Any:  # noqa: ANN401
    """What to do next; None to end, also where nobody is left who could tell."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None
