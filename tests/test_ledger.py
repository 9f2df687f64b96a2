"""Debug mode: the ledger finds a call that a rank makes in another order; the blocks that fit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ep_dispatcher import EpConfig, EPGroup, MoeShape
from ep_dispatcher.backend import Backend
from ep_dispatcher.collectives import Collectives
from ep_dispatcher.errors import AgreementError, ConfigError
from ep_dispatcher.ledger import LedgerBackend
from ep_dispatcher.plan import Plan
from ep_dispatcher.residency import RankGpu, check_blocks_fit, gpus_are_shared
from ep_dispatcher.testing import run_ranks

SHAPE = MoeShape(hidden=8, num_topk=2, num_experts=4, dtype="float32")


def silent_tier(plans: list[Plan]) -> Backend:
    """A tier that moves nothing and never waits, as kernels launched on a GPU."""
    supply = iter(plans)
    silent = SimpleNamespace(
        plan=lambda *_: next(supply),
        dispatch=lambda plan, x, weights: (x, weights),
        combine=lambda plan, rows, weights: (rows, weights),
        close=lambda *, failed: None,
    )
    return cast(Backend, silent)


def config(*, debug_ledger: bool) -> EpConfig:
    return EpConfig(shape=SHAPE, max_tokens_per_rank=16, debug_ledger=debug_ledger)


def routing(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(5, SHAPE.num_experts, generator=generator).topk(SHAPE.num_topk, 1).indices


def plans_of(process_group: dist.ProcessGroup, number: int) -> list[Plan]:
    with EPGroup.create(process_group, config(debug_ledger=False)) as group:
        return [group.plan(routing(group.ep_rank)) for _ in range(number)]


def errors_of(work: Callable[[LedgerBackend, list[Plan], int], None]) -> list[str]:
    """Run work over a silent tier on two ranks; returns each rank's error."""

    def on_rank(process_group: dist.ProcessGroup) -> str:
        plans = plans_of(process_group, 2)
        streams = iter([7, 7, 9, 9, 9, 9, 9, 9])
        ledger = LedgerBackend(
            silent_tier(plans),
            Collectives(process_group),
            every_call=False,
            current_stream=lambda: next(streams),
        )
        try:
            made = [ledger.plan(None, 1, None) for _ in plans]
            work(ledger, [plan for plan in made if plan is not None], process_group.rank())
            ledger.close()
        except AgreementError as error:
            return str(error)
        return ""

    return run_ranks(2, on_rank)


def test_equal_calls_pass() -> None:
    """Two plans in flight, calls in one order: nothing is raised, and the results are the same."""

    def work(ledger: LedgerBackend, plans: list[Plan], rank: int) -> None:
        for plan in (plans[1], plans[0]):
            ledger.dispatch(plan, torch.zeros(1), None)

    assert errors_of(work) == ["", ""]


def test_swapped_calls_are_named() -> None:
    """Rank 1 combines before it dispatches: every rank learns of the first call that differs."""

    def work(ledger: LedgerBackend, plans: list[Plan], rank: int) -> None:
        calls = [ledger.dispatch, ledger.combine]
        for call in calls if rank == 0 else reversed(calls):
            call(plans[0], torch.zeros(1), None)

    for error in errors_of(work):
        assert "call 2 is combine (plan 0, stream 1) on rank 1" in error
        assert "dispatch (plan 0, stream 1) on rank 0" in error


def test_another_plan_is_named() -> None:
    """The same operation with another plan is another call."""

    def work(ledger: LedgerBackend, plans: list[Plan], rank: int) -> None:
        ledger.dispatch(plans[rank], torch.zeros(1), None)

    for error in errors_of(work):
        assert "dispatch (plan 1, stream 1) on rank 1 and dispatch (plan 0, stream 1)" in error


def test_a_missing_call_is_named() -> None:
    """Rank 1 leaves a call out: its close stands where rank 0 dispatches."""

    def work(ledger: LedgerBackend, plans: list[Plan], rank: int) -> None:
        if rank == 0:
            ledger.dispatch(plans[0], torch.zeros(1), None)

    for error in errors_of(work):
        assert "close (plan 2, stream 1) on rank 1 and dispatch (plan 0, stream 1)" in error


def test_a_call_that_differs_is_told_though_the_close_fails_too() -> None:
    """A fault that came of it says less."""

    def work(ledger: LedgerBackend, plans: list[Plan], rank: int) -> None:
        if rank == 0:
            ledger.dispatch(plans[0], torch.zeros(1), None)

        def fail(*, failed: bool) -> None:
            raise RuntimeError("a fault of the device")

        ledger._inner.close = fail  # type: ignore[assignment]

    assert all("close (plan 2, stream 1) on rank 1" in error for error in errors_of(work))


def test_a_group_keeps_the_ledger_and_its_results() -> None:
    """With debug_ledger the bits are those without it, and a call out of order is refused."""

    def on_rank(process_group: dist.ProcessGroup, *, debug: bool) -> torch.Tensor:
        with EPGroup.create(process_group, config(debug_ledger=debug)) as group:
            rank = group.ep_rank
            plan = group.plan(routing(rank))
            x = torch.arange(40.0).view(5, 8) + rank
            recv_x, _ = group.dispatch(plan, x)
            return group.combine(plan, recv_x)

    plain = run_ranks(2, lambda group: on_rank(group, debug=False))
    logged = run_ranks(2, lambda group: on_rank(group, debug=True))
    for left, right in zip(plain, logged, strict=True):
        assert torch.equal(left, right)


def test_a_group_refuses_a_call_out_of_order() -> None:
    """In the reference tier, where the swapped calls would wait for each other."""

    def on_rank(process_group: dist.ProcessGroup) -> str:
        group = EPGroup.create(process_group, config(debug_ledger=True))
        plan = group.plan(routing(group.ep_rank))
        try:
            if group.ep_rank == 0:
                group.dispatch(plan, torch.zeros(5, 8))
            else:
                group.combine(plan, torch.zeros(plan.num_recv_rows, 8))
        except AgreementError as error:
            return str(error)
        return ""

    for error in run_ranks(2, on_rank):
        assert "call 1 is combine (plan 0, stream 0) on rank 1" in error


@given(ranks=st.integers(1, 12), num_sms=st.integers(1, 128), sm_count=st.integers(8, 148))
def test_blocks_of_all_ranks_of_a_gpu_fit_or_are_refused(
    ranks: int, num_sms: int, sm_count: int
) -> None:
    """Refused exactly where there are more blocks than SMs; the budget named does fit."""
    gpus = [RankGpu("a", sm_count)] * ranks + [RankGpu("b", 1000)]
    assert gpus_are_shared(gpus) == (ranks > 1)
    if ranks * num_sms <= sm_count:
        check_blocks_fit(num_sms, gpus)
        return
    fits = sm_count // ranks
    words = f"at most {fits} here" if fits else "no num_sms fits: let fewer ranks share it"
    with pytest.raises(ConfigError, match=words):
        check_blocks_fit(num_sms, gpus)
    if fits:
        check_blocks_fit(fits, gpus)


def test_the_budget_named_leaves_room_for_the_rails() -> None:
    """A quarter of the budget comes on top: of 33 SMs, 27 + 6 blocks fit, 28 + 7 do not."""
    gpus = [RankGpu("a", 132)] * 4
    with pytest.raises(
        ConfigError, match=r"num_sms is 28 \(and 7 blocks for the rails\).*most 27 "
    ):
        check_blocks_fit(28, gpus, lambda sms: sms // 4)
    check_blocks_fit(27, gpus, lambda sms: sms // 4)
    with pytest.raises(ConfigError, match="no num_sms fits"):
        check_blocks_fit(1, gpus, lambda _: 33)
