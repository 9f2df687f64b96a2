"""Whether the blocks of all ranks can be on their GPUs at the same time.

Kernels of different ranks wait for each other. A block that has no place on a GPU until another
one ends, and that the other one waits for, is a deadlock; so it is refused before anything runs.
Each block takes a whole SM, by the shared memory that it asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ep_dispatcher.errors import ConfigError


class RankGpu(NamedTuple):
    """The GPU of a rank.

    Attributes:
        uuid: of the GPU, or of the slice of it.
        sm_count: its SMs.
    """

    uuid: str
    sm_count: int


def gpus_are_shared(gpus: Sequence[RankGpu]) -> bool:
    """Whether two ranks have the same GPU."""
    return len({gpu.uuid for gpu in gpus}) < len(gpus)


def check_blocks_fit(
    num_sms: int, gpus: Sequence[RankGpu], more_blocks: Callable[[int], int] = lambda _: 0
) -> None:
    """Refuse an SM budget that the ranks of one GPU cannot all have at once.

    Args:
        num_sms: the budget of each rank.
        gpus: of all ranks, so that all ranks decide alike.
        more_blocks: that a rank with a given budget has on top of it, those of the rails.

    Raises:
        ConfigError: names the GPU's ranks and SMs and the largest budget that fits.

    Example: 8 ranks on one GPU of 132 SMs, num_sms 17 -> refused; 16 fits.
    """
    ranks_on = Counter(gpu.uuid for gpu in gpus)
    for gpu in gpus:
        ranks = ranks_on[gpu.uuid]
        blocks = gpu.sm_count // ranks
        more = more_blocks(num_sms)
        if num_sms + more <= blocks:
            continue
        rails = f" (and {more} blocks for the rails)" if more else ""
        most = max(
            (sms for sms in range(1, num_sms) if sms + more_blocks(sms) <= blocks), default=0
        )
        way_out = f"num_sms may be at most {most} here"
        if most == 0:
            way_out = "no num_sms fits: let fewer ranks share it"
        raise ConfigError(
            f"num_sms is {num_sms}{rails} and {ranks} rank(s) share a GPU of {gpu.sm_count} SMs; "
            f"blocks that wait for each other must all be on it at once, so {way_out}"
        )
