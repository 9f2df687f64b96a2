"""How a group ends: each rank says that it closes or that it leaves, so that none waits in vain.

A collective of the process group would not do. A rank that leaves because of an error takes part in
none, and one that the others have begun would meet its next. So ranks meet in the group's store.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid

import torch
import torch.distributed as dist

from ep_dispatcher.agreement import gather_json
from ep_dispatcher.collectives import Collectives
from ep_dispatcher.errors import EpTimeoutError

logger = logging.getLogger("ep_dispatcher")

_OUTCOME = "outcome"  # set for all ranks by the first to decide
_CLOSED, _LEFT, _LATE = "closed", "left", "late"  # _LATE is followed by those ranks
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class Closing:
    """The end of one group, seen by one rank; collective to make.

    Args:
        collectives: over the ranks of the group. Where their process group has no store, all
            ranks are taken to close.
    """

    def __init__(self, collectives: Collectives) -> None:
        """Agree on a name that no other group has."""
        self._collectives = collectives
        self._keys = [f"rank{rank}" for rank in range(collectives.size)]
        name = gather_json(collectives, uuid.uuid4().hex)[0]
        store = collectives.store
        self._store = None if store is None else dist.PrefixStore(f"ep_dispatcher/{name}", store)

    def leave(self) -> None:
        """Tell the ranks that close, or will, not to wait for this one."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # a store that is gone tells nobody
                _decide(self._store, _LEFT)

    def all_close(self, timeout_s: float) -> bool:
        """Wait until all ranks close; False if one has left, or this one was late.

        Args:
            timeout_s: the longest wait; past it all ranks leave.

        Raises:
            EpTimeoutError: names the ranks that were late.
        """
        outcome = _CLOSED
        if self._store is not None:
            try:
                outcome = self._meet(self._store, timeout_s)
            except RuntimeError as error:  # the process that held it has ended
                logger.warning("the store is gone, so all ranks are taken to close: %s", error)
        kind, *ranks = outcome.split()
        late = [int(rank) for rank in ranks]
        if late and self._collectives.rank not in late:
            self._raise_expired(late, timeout_s)
        if kind == _CLOSED:
            self._collectives.all_gather(torch.zeros(1, dtype=torch.int64))  # all know it
        return kind == _CLOSED

    def _raise_expired(self, late: list[int], timeout_s: float) -> None:
        rank = self._collectives.rank
        raise EpTimeoutError(
            f"rank {rank} waited {timeout_s} s in 'close' for ranks {late}, which neither "
            "closed this group nor left it. What the group held on this rank is freed, and the "
            "process group is as it was: see what keeps those ranks, or set timeout_s higher",
            rank=rank,
            peer=late[0],
            phase="close",
        )

    def _meet(self, store: dist.Store, timeout_s: float) -> str:
        """The outcome, once there is one."""
        deadline_s = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        store.set(self._keys[self._collectives.rank], "")
        while not store.check([_OUTCOME]) and not store.check(self._keys):
            if time.monotonic() > deadline_s:
                late = [str(at) for at, key in enumerate(self._keys) if not store.check([key])]
                return _decide(store, " ".join([_LATE, *late]) if late else _CLOSED)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return _decide(store, _CLOSED)


def _decide(store: dist.Store, outcome: str) -> str:
    """Set the outcome unless it is set; returns what it is."""
    return store.compare_set(_OUTCOME, "", outcome).decode()
