"""The end of a group of the device tier, without a GPU: nobody waits for a rank that has left."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ep_dispatcher import ClosedError, EpTimeoutError, RoutingError
from ep_dispatcher.closing import Closing
from ep_dispatcher.collectives import Collectives
from ep_dispatcher.config import Topology
from ep_dispatcher.device import DeviceBackend
from ep_dispatcher.device_session import DeviceSession
from ep_dispatcher.testing import run_ranks

NUM_RANKS, ODD_ONE = 3, 1
SOON_S = 2.0  # far less than the 20 s of the thread ranks' process group


class Ended(NamedTuple):
    """How a rank's close went."""

    seconds: float
    freed: str  # "together" or "alone"
    error: EpTimeoutError | None
    in_step: bool  # whether the process group's next collective still meets that of the others


class Session:
    """A session over stand-ins that note how it was freed."""

    def __init__(self, collectives: Collectives, timeout_s: float) -> None:
        """Open; collective."""
        self.freed = ""
        session: Any = DeviceSession.__new__(DeviceSession)
        session.topology = Topology(ep_size=NUM_RANKS, domain_size=NUM_RANKS)
        session.ep_rank, session.rails, session.device = collectives.rank, None, None
        self.module = SimpleNamespace(read_fault=lambda _: SimpleNamespace(filed=0))
        session.module = self.module
        session.outputs = SimpleNamespace(refused_bytes=0, close=lambda: None)
        session.context = SimpleNamespace(window=SimpleNamespace(error=0))
        session._fault, session._failure, session._timeout_s = torch.zeros(1), None, timeout_s
        session._closing = Closing(collectives)
        session._arena = SimpleNamespace(
            read_word=lambda _: 0,
            write_word=lambda *_: None,
            forget=lambda: None,
            close=lambda: None,
        )
        session._communicator = SimpleNamespace(
            abort=lambda: self._note("alone"), close=lambda: self._note("together")
        )
        session._is_closed = False
        self.close: Callable[..., None] = session.close
        self.check: Callable[[], None] = session.check

    def _note(self, how: str) -> None:
        self.freed += how


def ends(
    monkeypatch: pytest.MonkeyPatch,
    odd_one_closes: Callable[[Session], None],
    timeout_s: float = 10.0,
) -> list[Ended]:
    """Open a session on all ranks, and close it on all but one, which does something else."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    store = dist.HashStore()

    def end(process_group: dist.ProcessGroup) -> Ended:
        collectives = Collectives(process_group)
        collectives.store = store
        session = Session(collectives, timeout_s)
        start = time.monotonic()
        error = None
        try:
            if collectives.rank == ODD_ONE:
                odd_one_closes(session)
            else:
                session.close(failed=False)
        except EpTimeoutError as raised:
            error = raised
        seconds = time.monotonic() - start
        ranks = collectives.all_gather(torch.tensor(collectives.rank)).tolist()
        return Ended(seconds, session.freed, error, ranks == list(range(NUM_RANKS)))

    return run_ranks(NUM_RANKS, end)


def test_all_close_together_however_late_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(session: Session) -> None:
        time.sleep(0.2)
        session.close(failed=False)

    for ended in ends(monkeypatch, late):
        assert (ended.freed, ended.error, ended.in_step) == ("together", None, True)


def test_nobody_waits_for_a_rank_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the process group can still be used, for a new group for example."""

    def fail(session: Session) -> None:
        time.sleep(0.2)  # the others are waiting
        session.close(failed=True)

    for ended in ends(monkeypatch, fail):
        assert (ended.freed, ended.error, ended.in_step) == ("alone", None, True)
        assert ended.seconds < SOON_S


@pytest.mark.parametrize("failed", [False, True])
def test_a_rank_whose_gpu_is_gone_frees_its_part_and_tells_the_others(
    monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """Its close raises what CUDA said, and they do not wait for it."""

    def synchronize(device: object) -> None:
        if device == "gone":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def lose(session: Session) -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        session.close.__self__.device = "gone"  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="illegal memory access"):
            session.close(failed=failed)

    for ended in ends(monkeypatch, lose):
        assert (ended.freed, ended.error, ended.in_step) == ("alone", None, True)
        assert ended.seconds < SOON_S


def test_a_rank_that_does_not_close_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it does at last, it waits for nobody."""

    def too_late(session: Session) -> None:
        time.sleep(0.6)
        session.close(failed=False)

    for rank, ended in enumerate(ends(monkeypatch, too_late, timeout_s=0.2)):
        assert (ended.freed, ended.in_step) == ("alone", True)
        assert ended.seconds < SOON_S
        if rank == ODD_ONE:
            assert ended.error is None
        else:
            assert ended.error is not None
            assert (ended.error.rank, ended.error.peer, ended.error.phase) == (rank, 1, "close")
            assert "for ranks [1], which neither closed this group nor left it" in str(ended.error)


def test_a_store_that_is_gone_does_not_keep_a_group_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise dist.DistNetworkError("connection reset")

    monkeypatch.setattr(dist.PrefixStore, "set", gone)
    for ended in ends(monkeypatch, lambda session: session.close(failed=False)):
        assert (ended.freed, ended.error, ended.in_step) == ("together", None, True)


@pytest.mark.parametrize("failed", [False, True])
def test_no_call_is_launched_after_closing(monkeypatch: pytest.MonkeyPatch, failed: bool) -> None:
    """Every call of the tier, backwards among them, checks first: the window may be gone."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)

    def end(process_group: dist.ProcessGroup) -> None:
        session = Session(Collectives(process_group), timeout_s=10.0)
        session.check()
        session.close(failed=failed)
        with pytest.raises(ClosedError, match="before closing it"):
            session.check()

    run_ranks(NUM_RANKS, end)


def file_fault(session: Session) -> None:
    """Let the last kernels of a session have waited in vain; no call comes that would raise it."""
    fault = SimpleNamespace(filed=1, rank=1, peer=2, phase=7, channel=0, expected=5, seen=4)
    session.module.read_fault = lambda _: fault


def test_a_fault_that_no_call_has_raised_is_raised_by_the_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By this rank alone, after all is freed; the others are told that it left."""

    def close(session: Session) -> None:
        file_fault(session)
        session.close(failed=False)

    for rank, ended in enumerate(ends(monkeypatch, close)):
        assert (ended.freed, ended.in_step) == ("alone", True)
        assert ended.seconds < SOON_S
        if rank == ODD_ONE:
            assert ended.error is not None
            assert (ended.error.rank, ended.error.peer) == (1, 2)
            assert ended.error.phase == "combine: partial sums"
        else:
            assert ended.error is None


@pytest.mark.parametrize("failed", [False, True])
def test_a_fault_is_raised_once_and_hides_no_other_error(
    monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """Neither what a call has raised already, nor what a rank leaves for."""

    def close(session: Session) -> None:
        file_fault(session)
        if not failed:
            with pytest.raises(EpTimeoutError, match="combine: partial sums"):
                session.check()
        session.close(failed=failed)

    for ended in ends(monkeypatch, close):
        assert (ended.freed, ended.error, ended.in_step) == ("alone", None, True)


@pytest.mark.parametrize("failed", [False, True])
def test_a_refused_routing_that_no_call_has_raised_is_raised_by_the_close(
    monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """In static mode, whose plans do not wait; what a rank leaves for says more."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    closed: list[bool] = []
    letter = SimpleNamespace(ticket=1, bad_token=3, bad_expert=9, refused_rank=-1)
    backend: Any = DeviceBackend.__new__(DeviceBackend)
    backend._session = SimpleNamespace(device=None, close=lambda *, failed: closed.append(failed))
    backend._config = SimpleNamespace(recv_capacity_rows=64)
    backend._module = SimpleNamespace(read_mailbox=lambda _: letter)
    backend._mailbox = torch.zeros(8)
    backend._placement = SimpleNamespace(num_experts=8)
    if failed:
        backend.close(failed=True)
    else:
        with pytest.raises(RoutingError, match=r"topk_idx\[3\] names expert 9"):
            backend.close()
    assert closed == [failed]


@pytest.mark.parametrize("failed", [False, True])
def test_a_group_whose_close_fails_leaves_none_open(
    caplog: pytest.LogCaptureFixture, failed: bool
) -> None:
    """Of several groups of a training job; the first error is raised, or told behind another."""
    pytest.importorskip("megatron.core")
    from ep_dispatcher.megatron.options import MegatronOptions
    from ep_dispatcher.megatron.pool import GroupPool, _Lease

    closed: list[tuple[int, bool]] = []

    def close(number: int, *, failed: bool) -> None:
        closed.append((number, failed))
        raise EpTimeoutError(f"group {number}", rank=0, peer=1, phase="close")

    pool = GroupPool(MegatronOptions())
    for number in range(3):
        group: Any = SimpleNamespace(close=functools.partial(close, number))
        pool._leases[number, None] = _Lease(group, 1)  # type: ignore[index]
    if failed:
        pool.close(failed=True)
        assert "after an error, the close of a group failed too: group 2" in caplog.text
    else:
        with pytest.raises(EpTimeoutError, match="group 0"):
            pool.close()
    assert closed == [(number, failed) for number in range(3)]
    assert pool.num_groups == 0
