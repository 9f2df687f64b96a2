"""What ended a group of the device tier, in words: expired waits, and ranks that left.

A kernel files an `EpFault` for its own host and sets the error word in each peer's window, where
their waits find it. A host that leaves because of an error sets the same words, so that its peers
do not wait out the deadline for it.
"""

from __future__ import annotations

from typing import Any

from ep_dispatcher.config import Topology
from ep_dispatcher.errors import AgreementError, CapacityError, EpTimeoutError

PHASES = (  # EpPhase
    "no wait",
    "route: own blocks",
    "route: counts",
    "dispatch: entry",
    "dispatch: rows",
    "combine: entry",
    "combine: free slot",
    "combine: partial sums",
    "another warp of the same block",
    "combine: entry (gather)",
    "combine: readers (gather)",
    "rails: routing of another domain",
    "rails: counts of the own domain",
    "rails: entry of another domain",
    "rails: rows of another domain",
    "rails: sums of another domain",
    "rails: own puts on their way",
    "dispatch: weights on some ranks only",
    "a rank left",
    "a rank left for want of memory",
    "combine: gradients of weights on some ranks only",
)
WEIGHTS, LEFT, NO_ROOM, GRADIENTS = 17, 18, 19, 20  # those that are no waits
_PART_BITS = 16  # kErrorPartBits
_PART_MASK = (1 << _PART_BITS) - 1
_ROOM_STEP_BYTES = 2 << 20
_FINISHED = "this group is finished: close it and make a new one"

Failure = EpTimeoutError | AgreementError | CapacityError


def leaving_word(rank: int, wanted_bytes: int) -> int:
    """The error word of a rank that leaves, see `error_word` of csrc/core/args.h.

    Args:
        rank: that leaves.
        wanted_bytes: of output rows that it had no room for; 0 if it leaves for another reason.

    Example: rank 3, 5 MiB -> parts 4, 3, 19, and 3 (steps of 2 MiB).
    """
    phase = NO_ROOM if wanted_bytes else LEFT
    steps = min(-(-wanted_bytes // _ROOM_STEP_BYTES), _PART_MASK)
    parts = (rank + 1, rank, phase, steps)
    return sum(part << (place * _PART_BITS) for place, part in enumerate(parts))


def filer_of(word: int) -> int:
    """The rank that set an error word; -1 for none."""
    return (word & _PART_MASK) - 1


def _wanted_room(word: int, rank: int) -> str:
    """In words, the room that a rank lacked; no size if another has set the word since."""
    if filer_of(word) != rank or word >> (2 * _PART_BITS) & _PART_MASK != NO_ROOM:
        return ""
    steps = word >> (3 * _PART_BITS) & _PART_MASK
    return f" of {steps * (_ROOM_STEP_BYTES >> 20)} MiB"


def _behind(topology: Topology, rank: int, peer: int) -> tuple[int, ...]:
    """Ranks of other domains for whom `peer` may have waited when `rank` waited for it."""
    domain = topology.domain_of(peer)
    if rank == peer or topology.domain_of(rank) != domain:
        return ()
    others = (other for other in range(topology.num_domains) if other != domain)
    return tuple(topology.rail_peer(peer, other) for other in others)


def failure_of(
    fault: Any,  # noqa: ANN401
    word: int,
    ep_rank: int,
    timeout_s: float,
    topology: Topology,
) -> Failure:
    """The error to raise for a filed fault.

    Args:
        fault: EpFault of this rank.
        word: the error word of its window, if the fault's phase is NO_ROOM; the size is there.
        ep_rank: this rank.
        timeout_s: deadline of a wait.
        topology: of the group, which says whose wait may lie behind the one that ended.
    """
    if fault.phase == WEIGHTS:
        return AgreementError(
            f"of ranks {fault.rank} and {fault.peer} one passed topk_weights to dispatch and the "
            f"other did not; pass them on all ranks or on none; {_FINISHED}"
        )
    if fault.phase == GRADIENTS:
        return AgreementError(
            f"of ranks {fault.rank} and {fault.peer} one gave gradients of weights to combine and "
            f"the other did not; give them on all ranks or on none; {_FINISHED}"
        )
    if fault.phase == NO_ROOM:
        return CapacityError(
            f"rank {fault.rank} left: it had no room for output rows"
            f"{_wanted_room(word, fault.rank)}; give all ranks a larger output_bytes, or keep "
            f"fewer outputs alive; {_FINISHED}"
        )
    phase = PHASES[fault.phase]
    behind: tuple[int, ...] = ()
    if fault.phase == LEFT:
        text = f"rank {fault.rank} left because of an error of its own, which says more"
    else:
        detail = f"channel {fault.channel}: expected {fault.expected}, seen {fault.seen}"
        if fault.rank != ep_rank:
            detail = "told by that rank"
        text = (
            f"rank {fault.rank} waited {timeout_s} s for rank {fault.peer} in {phase!r} ({detail})"
        )
        behind = _behind(topology, fault.rank, fault.peer)
    if behind:
        ranks = f"rank {behind[0]}" if len(behind) == 1 else f"ranks {', '.join(map(str, behind))}"
        text += f", which may have waited for {ranks} of other domains itself"
    return EpTimeoutError(
        f"{text}; {_FINISHED}", rank=fault.rank, peer=fault.peer, phase=phase, behind=behind
    )
