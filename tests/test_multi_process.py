"""The launcher of ranks as processes."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from multi_process import ProcessWorld, RankError


def sum_of_ranks(process_group: dist.ProcessGroup, factor: int) -> int:
    """A value that every rank has a part in."""
    value = torch.tensor([process_group.rank() * factor])
    process_group.allreduce([value]).wait()
    return int(value)


def fail_on_rank_one(process_group: dist.ProcessGroup) -> int:
    """Raise on one rank only."""
    if process_group.rank() == 1:
        raise ValueError("rank one is to blame")
    return process_group.rank()


def sleep_on_rank_one(process_group: dist.ProcessGroup) -> None:
    """Let one rank hang."""
    while process_group.rank() == 1:
        time.sleep(0.1)


def die_on_rank_one(process_group: dist.ProcessGroup) -> None:
    """End one rank's process; the other waits for it."""
    if process_group.rank() == 1:
        os.abort()
    process_group.barrier().wait()


def test_ranks_answer_and_a_rank_that_raises_shows_its_traceback() -> None:
    """And the world goes on after it."""
    with ProcessWorld(2) as world:
        assert world.run(sum_of_ranks, 10) == [10, 10]
        with pytest.raises(RankError, match=r"(?s)rank 1.*rank one is to blame"):
            world.run(fail_on_rank_one)
        assert world.run(sum_of_ranks, 1) == [1, 1]


@pytest.mark.parametrize(
    ("work", "timeout_s", "told"),
    [
        (sleep_on_rank_one, 1.0, r"(?s)rank 1: no answer in time.*in sleep_on_rank_one.*thread "),
        (die_on_rank_one, 60.0, r"(?s)rank 1: died with exit code -6.*in die_on_rank_one"),
    ],
    ids=["hangs", "dies"],
)
def test_a_rank_that_never_answers_is_shown_with_its_stack(
    work: object, timeout_s: float, told: str
) -> None:
    """Soon, and the world is over then."""
    with ProcessWorld(2) as world:
        world.run(sum_of_ranks, 1)
        start = time.monotonic()
        with pytest.raises(RankError, match=told):
            world.run(work, timeout_s=timeout_s)  # type: ignore[arg-type]
        with pytest.raises(RankError, match="this world is over: rank 1"):
            world.run(sum_of_ranks, 1)
    assert time.monotonic() - start < 15
