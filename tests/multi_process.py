"""Ranks as processes: a world that stays up and runs functions on all ranks."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

_START_TIMEOUT_S = 120.0


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
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, store, rank, num_ranks), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, work: Callable[..., Any], *args: object, timeout_s: float = _START_TIMEOUT_S
    ) -> list[Any]:
        """Call `work(process_group, *args)` on every rank; returns the ranks' values.

        Raises:
            RankError: ranks raised, died or did not answer in time.
        """
        for pipe in self._pipes:
            pipe.send((work, args))
        values, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                answered = pipe.poll(timeout_s)
                failure, value = pipe.recv() if answered else ("no answer in time", None)
            except EOFError:
                failure, value = "the process died", None
            values.append(value)
            if failure:
                failures.append(f"rank {rank}: {failure}")
        if failures:
            raise RankError("\n".join(failures))
        return values

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                continue  # that rank is gone already
        for process in self._processes:
            process.join(timeout=20)
            if process.is_alive():
                process.kill()
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


def _serve(pipe: Connection, store: str, rank: int, num_ranks: int) -> None:
    """A rank's life: join the group, then answer until told to end."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    file_store = dist.FileStore(store, num_ranks)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=num_ranks)
    while (order := pipe.recv()) is not None:
        work, args = order
        try:
            pipe.send(("", work(dist.group.WORLD, *args)))
        except BaseException:  # noqa: BLE001  # a rank reports whatever ended its work
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()
