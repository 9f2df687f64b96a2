"""Debug mode: every rank writes down the order of its calls, and the ranks compare.

Kernels of different ranks wait for each other, so a rank that launches two of them the other way
round, or on another stream, blocks the job with nothing to show for it. The ledger finds that
before the wait runs out, and names the first call that differs.

The device tier compares at each plan and at the end, so that calls between them run as they would
without the ledger; the reference tier, whose calls wait for each other on the host, at each call.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_dispatcher.agreement import gather_json
from ep_dispatcher.backend import Backend
from ep_dispatcher.collectives import Collectives
from ep_dispatcher.errors import AgreementError, EpError
from ep_dispatcher.plan import Plan

logger = logging.getLogger("ep_dispatcher")


class Entry(NamedTuple):
    """One call.

    Attributes:
        operation: "plan", "dispatch", "combine" or "close".
        plan: number of the plan, in order of making.
        stream: number of the stream that it was launched on, in order of first use.
    """

    operation: str
    plan: int
    stream: int

    def __str__(self) -> str:
        """In words."""
        return f"{self.operation} (plan {self.plan}, stream {self.stream})"


class LedgerBackend:
    """A tier that writes down what it is asked for; otherwise the tier that it wraps.

    Args:
        inner: the tier.
        collectives: over the ranks of the group.
        every_call: compare before each call, not only at plans and at the end.
        current_stream: identifies the stream of a call; replaced in tests.
    """

    def __init__(
        self,
        inner: Backend,
        collectives: Collectives,
        *,
        every_call: bool,
        current_stream: Callable[[], int] | None = None,
    ) -> None:
        """Start an empty ledger."""
        self._inner = inner
        self._collectives = collectives
        self._every_call = every_call
        self._current_stream = current_stream or _stream_handle
        self._streams: dict[int, int] = {}
        self._numbers: weakref.WeakKeyDictionary[Plan, int] = weakref.WeakKeyDictionary()
        self._num_plans = 0
        self._digest = hashlib.sha256()
        self._num_entries = 0
        self._unchecked: list[Entry] = []  # since the ranks last agreed

    def plan(self, topk_idx: Tensor | None, alignment: int, refusal: str | None) -> Plan | None:
        """See `Backend.plan`; compares first."""
        number, self._num_plans = self._num_plans, self._num_plans + 1
        self._write("plan", number, compare=True)
        plan = self._inner.plan(topk_idx, alignment, refusal)
        if plan is not None:
            self._numbers[plan] = number
        return plan

    def dispatch(
        self, plan: Plan, x: Tensor, topk_weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.dispatch`."""
        self._write("dispatch", self._numbers[plan], compare=self._every_call)
        return self._inner.dispatch(plan, x, topk_weights)

    def combine(
        self, plan: Plan, expert_out: Tensor, row_weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.combine`."""
        self._write("combine", self._numbers[plan], compare=self._every_call)
        return self._inner.combine(plan, expert_out, row_weights)

    def empty_rows(self, plan: Plan) -> Tensor:
        """See `Backend.empty_rows`."""
        return self._inner.empty_rows(plan)

    def check(self) -> None:
        """See `Backend.check`; no part of the order."""
        self._inner.check()

    def close(self, *, failed: bool = False) -> None:
        """See `Backend.close`; compares what is left, unless a rank leaves early.

        A call that differs says more than a fault that came of it, so the fault is logged.
        """
        try:
            if not failed:
                self._write("close", self._num_plans, compare=True)
        except BaseException:
            try:
                self._inner.close(failed=failed)
            except (EpError, RuntimeError):
                logger.exception("the group was closed with an error of its own")
            raise
        self._inner.close(failed=failed)

    def _write(self, operation: str, plan: int, *, compare: bool) -> None:
        """Add a call, and compare if asked to."""
        stream = self._streams.setdefault(self._current_stream(), len(self._streams))
        entry = Entry(operation, plan, stream)
        self._unchecked.append(entry)
        self._num_entries += 1
        self._digest.update(str(entry).encode())
        if compare:
            self._compare()

    def _compare(self) -> None:
        """Exchange digests, and the calls themselves if they differ.

        Raises:
            AgreementError: on every rank; names the first call that differs.
        """
        told = gather_json(self._collectives, [self._num_entries, self._digest.hexdigest()])
        if all(each == told[0] for each in told):
            self._unchecked.clear()
            return
        ledgers: list[list[Any]] = gather_json(self._collectives, self._unchecked)
        first = self._num_entries - len(self._unchecked)  # where they last agreed: equal on all
        raise AgreementError(_first_difference(ledgers, first))


def _first_difference(ledgers: list[list[Any]], first: int) -> str:
    """Say which call of which rank is the first that differs from rank 0's.

    Args:
        ledgers: of each rank, since they last agreed.
        first: number of the first call in them.
    """
    longest = max(len(ledger) for ledger in ledgers)
    for index in range(longest):
        calls = [_call_at(ledger, index) for ledger in ledgers]
        other = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
        if other is not None:
            return (
                f"the order of calls differs: call {first + index} is {calls[other]} on rank "
                f"{other} and {calls[0]} on rank 0; all ranks must make the same calls, in one "
                "order and on the same streams"
            )
    raise AssertionError("digests differ but no call does")


def _call_at(ledger: list[Any], index: int) -> str:
    """A call in words, or that there is none."""
    if index >= len(ledger):
        return "not there"
    operation, plan, stream = ledger[index]
    return str(Entry(operation, plan, stream))


def _stream_handle() -> int:
    """The current stream of the current GPU; 0 without one."""
    return int(torch.cuda.current_stream().cuda_stream) if torch.cuda.is_available() else 0
