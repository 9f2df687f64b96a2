"""This package's tiers, through EPGroup and autograd, as a user calls them."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

import ep_dispatcher
from ep_dispatcher import EpConfig, EPGroup, Plan
from ep_dispatcher.bench.backends.base import (
    Identity,
    Lap,
    Layout,
    Place,
    Received,
    Refused,
    Wire,
    class_name,
    file_of,
)
from ep_dispatcher.bench.inputs import most_rows
from ep_dispatcher.bench.spec import Work
from ep_dispatcher.errors import EpError
from ep_dispatcher.memory import persistent_bytes

# Alive at once: a round's received rows, the rows and gradient rows fed to it, gradient rows that
# come back.
OUTPUTS = 4
_WEIGHT_BYTES = 4
_SMALLEST_OUTPUT_BYTES = 64 << 20
_SPARE_BYTES = 32 << 20  # weights and their gradients, which take blocks of at least 1 MiB


class OwnSession:
    """See `Session`."""

    layout: Layout = "expert_major"
    has_backward = True

    def __init__(self, work: Work, place: Place) -> None:
        """Open a group of the tier that the backend's name says."""
        tier: Literal["device", "reference"] = (
            "device" if place.name.endswith("/device") else "reference"
        )
        try:
            self._group = EPGroup.create(place.group, _config(work, tier))
        except EpError as error:
            raise Refused(str(error)) from error
        backend = self._group._open_backend()
        copies_travel = getattr(backend, "duplicates", None) == "sender"
        gathers = getattr(backend, "combine_form", None) == "gather"
        plain: Wire = "deduplicated" if tier == "device" else "by_rank"
        self.wire: Wire = "by_copy" if copies_travel else plain
        self.wire_home: Wire = "by_copy" if gathers else plain
        sizes = persistent_bytes(self._group.config, self._group.topology, self._group.tier)  # type: ignore[arg-type]
        self.persistent_bytes: int | None = sizes["total"]
        self._static = _open_static(work, place, self._group.config) if tier == "device" else None
        self.has_static_plan = self._static is not None
        self._plan: Plan | None = None
        self._topk_idx = torch.empty(0)
        self._kept: list[Tensor] = []

    def identity(self) -> Identity:
        """Tier and the class that serves it."""
        backend = self._group._open_backend()
        notes = [f"tier {self._group.tier}", "called through EPGroup and autograd"]
        form = getattr(backend, "combine_form", None)
        if form is not None:
            notes.append(f"combine {form}; its rows lie where empty_rows puts them")
            notes.append(f"further copies made by the {backend.duplicates}")  # type: ignore[attr-defined]
        return Identity(
            classes=(class_name(self._group), class_name(backend)),
            files=(file_of(ep_dispatcher),),
            versions={"ep_dispatcher": ep_dispatcher.__version__},
            notes=tuple(notes),
        )

    def prepare(self, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Nothing to convert."""
        self._topk_idx = topk_idx

    def plan(self, lap: Lap) -> None:
        """See `Session.plan`."""
        self._plan = self._group.plan(self._topk_idx)
        lap("plan")

    def plan_static(self, lap: Lap) -> None:
        """See `Session.plan_static`."""
        assert self._static is not None, "only where has_static_plan says so"
        self._static.plan(self._topk_idx)
        lap("plan_static")

    def dispatch(self, x: Tensor, topk_weights: Tensor, lap: Lap) -> Received:
        """See `Session.dispatch`."""
        plan = self._the_plan()
        self._kept = []  # the last round's rows go before this round's are made
        rows_in = x.detach().requires_grad_()
        weights_in = topk_weights.detach().requires_grad_()
        rows, weights = self._group.dispatch(plan, rows_in, weights_in)
        lap("dispatch")
        assert weights is not None
        self._kept = [rows_in, weights_in, rows, weights]
        return Received(
            rows=rows.detach(),
            weights=weights.detach(),
            tokens_per_expert=plan.tokens_per_expert,
            segment_rows=plan.padded_tokens_per_expert,
        )

    def empty_rows(self) -> Tensor | None:
        """See `Session.empty_rows`."""
        return self._group.empty_rows(self._the_plan())

    def place(self, rows: Tensor) -> Tensor:
        """See `Session.place`."""
        return self._group.empty_rows(self._the_plan()).copy_(rows)

    def combine(self, expert_out: Tensor, lap: Lap) -> Tensor:
        """See `Session.combine`."""
        rows_out = expert_out.detach().requires_grad_()
        out = self._group.combine(self._the_plan(), rows_out)
        lap("combine")
        self._kept += [rows_out, out]
        return out.detach()

    def combine_backward(self, grad_out: Tensor, lap: Lap) -> Tensor:
        """See `Session.combine_backward`."""
        rows_out, out = self._kept[4:]
        (grad,) = torch.autograd.grad(out, rows_out, grad_out)
        lap("combine_backward")
        return grad

    def dispatch_backward(
        self, grad_rows: Tensor, grad_weights: Tensor, lap: Lap
    ) -> tuple[Tensor, Tensor | None]:
        """See `Session.dispatch_backward`."""
        rows_in, weights_in, rows, weights = self._kept[:4]
        grad_x, grad_topk = torch.autograd.grad(
            [rows, weights], [rows_in, weights_in], [grad_rows, grad_weights]
        )
        lap("dispatch_backward")
        return grad_x, grad_topk

    def close(self) -> None:
        """See `Session.close`."""
        self._kept, self._plan = [], None
        try:
            if self._static is not None:
                self._static.close()
        finally:
            self._group.close()

    def _the_plan(self) -> Plan:
        assert self._plan is not None, "plan comes before dispatch"
        return self._plan


def _open_static(work: Work, place: Place, config: EpConfig) -> EPGroup | None:
    """A group that only plans, with room for any routing, so that its host never waits.

    None where this cannot be had, on all ranks alike; then the lines lack that phase.
    """
    static = dataclasses.replace(
        config,
        recv_capacity_rows=work.ranks * work.num_tokens * work.num_topk,
        output_bytes=_SMALLEST_OUTPUT_BYTES,
    )
    try:
        return EPGroup.create(place.group, static)
    except EpError:
        return None


def _config(work: Work, tier: Literal["device", "reference"]) -> EpConfig:
    """The group's config, with room for the outputs of the busiest rank."""
    config = work.ep_config(tier)
    size = OUTPUTS * most_rows(work) * (work.row_bytes + _WEIGHT_BYTES) + _SPARE_BYTES
    return dataclasses.replace(config, output_bytes=max(size, _SMALLEST_OUTPUT_BYTES))


def open_session(work: Work, place: Place) -> OwnSession:
    """Open this package's tier."""
    return OwnSession(work, place)
