"""Negative controls: the baseline with one deliberate fault each, which must be caught."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from torch import Tensor

from ep_dispatcher.bench.backends.base import Identity, Lap, Place, Received
from ep_dispatcher.bench.backends.torch_all_to_all import TorchSession
from ep_dispatcher.bench.spec import Work

CRASH_EXIT_CODE = 41
_LONGER_THAN_ANY_LIMIT_S = 3600


class SwappedRows(TorchSession):
    """Two received rows change places; their weights do not."""

    def dispatch(self, x: Tensor, topk_weights: Tensor, lap: Lap) -> Received:
        """See `Session.dispatch`."""
        received = super().dispatch(x, topk_weights, lap)
        rows = received.rows.clone()
        if len(rows) > 1:
            rows[[0, -1]] = rows[[-1, 0]]
        return replace(received, rows=rows)


class DroppedToken(TorchSession):
    """The first token that was routed anywhere gets zeros."""

    def combine(self, expert_out: Tensor, lap: Lap) -> Tensor:
        """See `Session.combine`."""
        out = super().combine(expert_out, lap)
        out[self._the_routes().token[:1]] = 0
        return out


class Crash(TorchSession):
    """The last rank dies in dispatch, without a word."""

    def dispatch(self, x: Tensor, topk_weights: Tensor, lap: Lap) -> Received:
        """See `Session.dispatch`."""
        if self._place.rank == self._work.ranks - 1:
            os._exit(CRASH_EXIT_CODE)
        return super().dispatch(x, topk_weights, lap)


class Hang(TorchSession):
    """The last rank never calls dispatch."""

    def dispatch(self, x: Tensor, topk_weights: Tensor, lap: Lap) -> Received:
        """See `Session.dispatch`."""
        if self._place.rank == self._work.ranks - 1:
            time.sleep(_LONGER_THAN_ANY_LIMIT_S)
        return super().dispatch(x, topk_weights, lap)


class Mixed(TorchSession):
    """The last rank claims another version."""

    def identity(self) -> Identity:
        """See `Session.identity`."""
        mine = super().identity()
        last = self._place.rank == self._work.ranks - 1
        return replace(mine, versions=mine.versions | {"control": "2" if last else "1"})


def open_session(work: Work, place: Place) -> TorchSession:
    """Open the control that the name says."""
    kinds = {
        "control/swapped_rows": SwappedRows,
        "control/dropped_token": DroppedToken,
        "control/crash": Crash,
        "control/hang": Hang,
        "control/mixed": Mixed,
    }
    return kinds[place.name](work, place)
