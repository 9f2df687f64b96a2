"""What the ranks of the device tests do where one of them fails, is late, or differs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from device_cases import PLAN_FIELDS, Case, inputs, rounds_differ, same_bits
from torch import Tensor

from ep_dispatcher import (
    AgreementError,
    CapacityError,
    EPGroup,
    EpTimeoutError,
    UnavailableError,
    native,
)

ODD_ONE = 1  # the rank that fails or differs
_PIECE_BYTES = 2 << 20  # of a heap
_CYCLES_PER_S = 2.0e9  # at least those of any GPU that there is


class Waited(NamedTuple):
    """How a rank fared whose group lacked a rank; no phase: it raised nothing."""

    seconds: float
    peer: int
    phase: str
    differ: list[str]  # results of a new group in the same process


class Told(NamedTuple):
    """What a rank raised, and how long after the call began; no kind: nothing."""

    seconds: float
    kind: str
    message: str
    differ: list[str]  # results of a new group in the same process


def missing_rank(
    process_group: dist.ProcessGroup, case: Case, missed: str, comes_late: bool
) -> Waited:
    """The last rank misses a call, or makes it past the deadline; then all make a new group."""
    group = EPGroup.create(process_group, case.config("device"))
    given = inputs(case, group.ep_rank)
    plan = group.plan(given.topk_idx)
    rows, _ = group.dispatch(plan, given.x)
    calls: dict[str, Callable[[], object]] = {
        "plan": lambda: group.plan(given.topk_idx),
        "dispatch": lambda: group.dispatch(plan, given.x),
        "combine": lambda: group.combine(plan, rows),
    }
    torch.cuda.synchronize()
    process_group.barrier().wait()
    start = time.monotonic()
    seconds, peer, phase = 0.0, -1, ""
    is_missing = group.ep_rank == group.ep_size - 1
    if is_missing and comes_late:
        time.sleep(case.timeout_s + 0.5)
    if comes_late or not is_missing:
        try:
            calls[missed]()
            torch.cuda.synchronize()
            group.plan(given.topk_idx)
        except EpTimeoutError as error:
            seconds, peer, phase = time.monotonic() - start, error.peer, error.phase
    process_group.barrier().wait()  # a rank that closes tells the others, which is not meant here
    group.close(failed=True)
    return Waited(seconds, peer, phase, rounds_differ(process_group, case))


def refused_over(
    process_group: dist.ProcessGroup, case: Case, library: str, liars: tuple[int, ...]
) -> tuple[str, list[str]]:
    """Create a group whose `liars` call that NCCL; why it was refused, and what a new one says."""
    refusal = ""
    lies = process_group.rank() in liars
    opens = (lambda: native.load().NcclLibrary(library)) if lies else native.open_nccl
    with mock.patch.object(native, "open_nccl", opens):
        try:
            EPGroup.create(process_group, case.config("device")).close()
        except UnavailableError as error:
            refusal = str(error)
    return refusal, rounds_differ(process_group, case)


def plan_behind_other_work(
    process_group: dist.ProcessGroup, case: Case, work_s: float
) -> tuple[float, list[str]]:
    """Plan while the stream has so much else to do; seconds waited, and what differs."""
    with (
        EPGroup.create(process_group, case.config("device")) as group,
        EPGroup.create(process_group, case.config("reference")) as reference,
    ):
        given = inputs(case, group.ep_rank)
        want = reference.plan(given.topk_idx)
        group.plan(given.topk_idx)
        torch.cuda.synchronize()
        process_group.barrier().wait()
        start = time.monotonic()
        torch.cuda._sleep(int(work_s * _CYCLES_PER_S))
        got = group.plan(given.topk_idx)
        seconds = time.monotonic() - start
        differ = [
            name for name in PLAN_FIELDS if not same_bits(getattr(got, name), getattr(want, name))
        ]
        return seconds, differ


def one_rank_leaves(process_group: dist.ProcessGroup, case: Case, wants_room: bool) -> Told:
    """One rank has no room for its rows, or some other error; the others are waiting for it."""
    group = EPGroup.create(process_group, case.config("device"))
    given = inputs(case, group.ep_rank)
    plan = group.plan(given.topk_idx)
    kept = _fill_heap(group) if wants_room and group.ep_rank == ODD_ONE else []

    def call() -> None:
        if group.ep_rank == ODD_ONE and not wants_room:
            time.sleep(0.2)  # so that the others are waiting
            raise CapacityError("something else")
        group.dispatch(plan, given.x, given.weights)

    told = _told_of(process_group, group, call)
    del kept
    return told._replace(differ=rounds_differ(process_group, case))


def one_rank_fails_while_others_close(process_group: dist.ProcessGroup, case: Case) -> Told:
    """One rank leaves because of an error after the last call; the others close as ever."""
    group = EPGroup.create(process_group, case.config("device"))
    group.plan(inputs(case, group.ep_rank).topk_idx)
    torch.cuda.synchronize()
    process_group.barrier().wait()
    failed = group.ep_rank == ODD_ONE
    if failed:
        time.sleep(0.3)  # so that the others are waiting
    start = time.monotonic()
    group.close(failed=failed)
    return Told(time.monotonic() - start, "", "", rounds_differ(process_group, case))


def one_rank_makes_room(process_group: dist.ProcessGroup, case: Case) -> tuple[str, bool]:
    """One rank has no room, drops something and calls again, for which the others have waited."""
    with EPGroup.create(process_group, case.config("device")) as group:
        given = inputs(case, group.ep_rank)
        plan = group.plan(given.topk_idx)
        want = group.dispatch(plan, given.x)[0].clone()
        kept = _fill_heap(group) if group.ep_rank == ODD_ONE else []
        message = ""
        try:
            rows = group.dispatch(plan, given.x)[0]
        except CapacityError as error:
            message = str(error)
            time.sleep(0.3)
            kept.clear()
            rows = group.dispatch(plan, given.x)[0]
        torch.cuda.synchronize()
        return message, same_bits(rows, want)


def weights_on_some(process_group: dist.ProcessGroup, case: Case, who_lacks: int) -> Told:
    """One rank passes no weights to dispatch."""
    group = EPGroup.create(process_group, case.config("device"))
    given = inputs(case, group.ep_rank)
    plan = group.plan(given.topk_idx)
    weights = None if group.ep_rank == who_lacks else given.weights
    told = _told_of(process_group, group, lambda: group.dispatch(plan, given.x, weights))
    return told._replace(differ=rounds_differ(process_group, case))


def gradients_on_some(process_group: dist.ProcessGroup, case: Case, who_lacks: int) -> Told:
    """One rank gives no gradients of weights to a combine."""
    group = EPGroup.create(process_group, case.config("device"))
    given = inputs(case, group.ep_rank)
    plan = group.plan(given.topk_idx)
    rows, weights = group.dispatch(plan, given.x, given.weights)
    backend: Any = group._backend  # autograd gives them on all ranks whose dispatch had weights
    gradients = None if group.ep_rank == who_lacks else weights
    told = _told_of(process_group, group, lambda: backend.combine(plan, rows, gradients))
    return told._replace(differ=rounds_differ(process_group, case))


def calls_behind_a_missing_plan(process_group: dist.ProcessGroup, case: Case) -> Waited:
    """The last rank misses a plan; the others go on, as the host waits for nothing."""
    group = EPGroup.create(process_group, case.config("device"))
    given = inputs(case, group.ep_rank)
    x, weights = given.x.requires_grad_(), given.weights.requires_grad_()

    def layer() -> None:
        plan = group.plan(given.topk_idx)
        rows, row_weights = group.dispatch(plan, x, weights)
        assert row_weights is not None
        out = group.combine(plan, (rows * row_weights.unsqueeze(1)).to(rows.dtype))
        out.backward(torch.ones_like(out))

    layer()
    torch.cuda.synchronize()
    process_group.barrier().wait()
    start = time.monotonic()
    seconds, peer, phase = 0.0, -1, ""
    if group.ep_rank != group.ep_size - 1:
        try:
            layer()
            torch.cuda.synchronize()
            group.check()
        except EpTimeoutError as error:
            seconds, peer, phase = time.monotonic() - start, error.peer, error.phase
    torch.cuda.synchronize()
    process_group.barrier().wait()
    group.close(failed=True)
    return Waited(seconds, peer, phase, rounds_differ(process_group, case))


def _fill_heap(group: EPGroup) -> list[Tensor]:
    """Take output memory of this rank alone, until there is none."""
    backend: Any = group._backend
    kept: list[Tensor] = []
    while True:
        try:
            kept.append(backend._session.outputs.empty((_PIECE_BYTES,), torch.uint8))
        except CapacityError:
            return kept


def _told_of(process_group: dist.ProcessGroup, group: EPGroup, call: Callable[[], object]) -> Told:
    """Make a call, see what is told of it, and close the group, as `with` would."""
    torch.cuda.synchronize()
    process_group.barrier().wait()
    start = time.monotonic()
    kind, message = "", ""
    try:
        call()
        torch.cuda.synchronize()
        group.check()
    except (AgreementError, CapacityError, EpTimeoutError) as error:
        kind, message = type(error).__name__, str(error)
    seconds = time.monotonic() - start
    group.close(failed=bool(kind))
    return Told(seconds, kind, message, [])
