"""The host's one wait: for the few bytes that the last kernel of a plan writes."""

from __future__ import annotations

import time
from collections.abc import Callable

_SLACK_S = 0.5  # the GPU's own deadline comes first and says more


def wait_for_answer(
    looks: Callable[[], bool],
    has_begun: Callable[[], bool],
    has_ended: Callable[[], bool],
    limit_s: float,
) -> bool:
    """Wait until a plan's kernels have answered; False if they will not.

    Time counts from when the stream has come to them: what was given to it before is not theirs,
    however long it takes.

    Args:
        looks: True once the answer is there; waits for it for a short while.
        has_begun: whether the stream has come to the first of the kernels.
        has_ended: whether all of them have ended.
        limit_s: the longest that they can take, by their own deadlines.
    """
    deadline_s = float("inf")
    ended = False
    while not looks():
        now_s = time.monotonic()
        if ended or now_s > deadline_s:
            return False
        if deadline_s == float("inf") and has_begun():
            deadline_s = now_s + limit_s + _SLACK_S
        ended = has_ended()  # once more after the end: it may have answered just before
    return True
