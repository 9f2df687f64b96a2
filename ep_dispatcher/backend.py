"""The contract between a group and a tier."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ep_dispatcher.plan import Plan


class Backend(Protocol):
    """Plans routings and moves rows; knows nothing of autograd.

    All methods but `close` are collective. Arguments were checked by the group.
    """

    def plan(self, topk_idx: Tensor | None, alignment: int, refusal: str | None) -> Plan | None:
        """Exchange counts and build the plan.

        A rank whose input was refused passes its reason instead of a routing, so that the others
        learn of it in the same exchange and nobody waits for it.

        Args:
            topk_idx: [T, K] int64, or None with a refusal.
            alignment: rows.
            refusal: why this rank's input cannot be planned, or None.

        Returns:
            The plan, or None on a rank that refused.

        Raises:
            AgreementError: another rank refused its input, or alignments differ.
        """
        ...

    def dispatch(
        self, plan: Plan, x: Tensor, topk_weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Move rows [T, H] and weights [T, K] to the experts: [R, H] and [R]."""
        ...

    def combine(
        self, plan: Plan, expert_out: Tensor, row_weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Sum rows [R, H] at home: [T, H]; bring one float a row [R] back to its slot: [T, K]."""
        ...

    def empty_rows(self, plan: Plan) -> Tensor:
        """Uninitialised rows [R, H] that `combine` takes without a copy; not collective."""
        ...

    def check(self) -> None:
        """Raise what earlier calls have met since they returned; waits for nothing.

        Raises:
            ClosedError: after `close`.
            EpTimeoutError: a wait has expired.
            RoutingError: static mode: an earlier routing of this rank named an expert that is not
                there; that slot counted as dropped.
            AgreementError: static mode: the same of another rank, or alignments differed.
        """
        ...

    def close(self, *, failed: bool = False) -> None:
        """Free what the tier holds; collective where the tier says so.

        Args:
            failed: this rank leaves because of an error, so it must not wait for the others.
        """
        ...
