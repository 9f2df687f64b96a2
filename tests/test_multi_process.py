"""The launcher of ranks as processes."""

from __future__ import annotations

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


def test_ranks_answer_and_a_rank_that_raises_shows_its_traceback() -> None:
    """And the world goes on after it."""
    with ProcessWorld(2) as world:
        assert world.run(sum_of_ranks, 10) == [10, 10]
        with pytest.raises(RankError, match=r"(?s)rank 1.*rank one is to blame"):
            world.run(fail_on_rank_one)
        assert world.run(sum_of_ranks, 1) == [1, 1]
