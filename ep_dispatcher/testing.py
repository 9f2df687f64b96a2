"""Ranks as threads, and routings: what tests and benchmarks share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")
_TIMEOUT_S = 20  # what peers of a rank that raised wait before they give up


class ThreadWorld(Generic[Result]):
    """P ranks of one process, each a thread with its own gloo group.

    Args:
        num_ranks: P.
    """

    def __init__(self, num_ranks: int) -> None:
        """Connect the ranks; costs a few milliseconds."""
        store = dist.HashStore()
        timeout = timedelta(seconds=_TIMEOUT_S)

        def connect(rank: int) -> dist.ProcessGroup:
            # Gloo's bare group has the methods that we call; its stub lacks the common base.
            return dist.ProcessGroupGloo(store, rank, num_ranks, timeout)  # type: ignore[return-value]

        self.groups: list[dist.ProcessGroup] = _in_threads(num_ranks, connect)

    def run(self, work: Callable[[dist.ProcessGroup], Result]) -> list[Result]:
        """Call `work` with each rank's group, side by side; returns the values by rank.

        Raises:
            BaseException: of the rank that failed first in time; its peers' follow from it.
        """
        return _in_threads(len(self.groups), lambda rank: work(self.groups[rank]))


_worlds: dict[int, ThreadWorld[object]] = {}  # test worlds are kept, as making one takes time


def run_ranks(num_ranks: int, work: Callable[[dist.ProcessGroup], Result]) -> list[Result]:
    """Run `work(process_group)` on `num_ranks` thread ranks and return the values by rank.

    A world in which a rank raised is thrown away, as its peers may have stopped half-way.
    """
    world = _worlds.pop(num_ranks, None) or ThreadWorld(num_ranks)
    values = world.run(work)
    _worlds[num_ranks] = world
    return values  # type: ignore[return-value]


def make_routing(
    num_tokens: int, num_topk: int, num_experts: int, *, seed: int, dropped: float = 0.0
) -> Tensor:
    """Draw a uniform routing without repeats: [T, K] int64, a share `dropped` of slots at -1."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    topk_idx = scores.topk(num_topk, dim=1).indices
    mask = torch.rand(num_tokens, num_topk, generator=generator) < dropped
    return topk_idx.masked_fill(mask, -1)


def marked_weights(rank: int, num_tokens: int, num_topk: int) -> Tensor:
    """Weights [T, K] fp32 that are all different, so that a swapped slot shows.

    Example: rank 0, token 0 -> 0.125 * (100 + 10 + slot).
    """
    token = torch.arange(1, num_tokens + 1).view(-1, 1)
    slot = torch.arange(num_topk).view(1, -1)
    return 0.125 * ((rank + 1) * 100 + token * 10 + slot).float()


def _in_threads(num_ranks: int, work: Callable[[int], Result]) -> list[Result]:
    """Call `work(rank)` in one thread per rank; raise what failed first."""
    values: dict[int, Result] = {}
    failures: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            values[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001  # carried to the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [values[rank] for rank in range(num_ranks)]
