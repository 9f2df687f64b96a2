"""What the device tier's host side decides without a GPU: waits, failures in words, opening."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_dispatcher import (
    AgreementError,
    CapacityError,
    EpConfig,
    EpTimeoutError,
    MoeShape,
    ShapeError,
    Topology,
    Tuning,
    UnavailableError,
    device_faults,
    device_session,
    device_wait,
    rail_device,
)
from ep_dispatcher.collectives import Collectives
from ep_dispatcher.device import DeviceBackend
from ep_dispatcher.device_session import DeviceSession
from ep_dispatcher.plan import Placement
from ep_dispatcher.residency import RankGpu
from ep_dispatcher.testing import run_ranks

HEADER = Path(__file__).parents[1] / "csrc" / "api" / "ep_dispatcher.h"
ONE_DOMAIN = Topology(ep_size=4, domain_size=4)
CONFIG = EpConfig(shape=MoeShape(hidden=64, num_topk=2, num_experts=8), max_tokens_per_rank=8)


class Clock:
    """Time that passes only while somebody looks, one second a look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer_at: float) -> None:
        """Replace the clock of the waits."""
        self.now_s, self._answer_at = 0.0, answer_at
        monkeypatch.setattr(device_wait, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def looks(self) -> bool:
        """Whether the answer is there, a second later."""
        self.now_s += 1.0
        return self.now_s >= self._answer_at

    def is_past(self, moment_s: float) -> bool:
        """Whether it is later than that."""
        return self.now_s > moment_s


NEVER = float("inf")


def wait(clock: Clock, begins_at: float, ends_at: float, limit_s: float = 10.0) -> bool:
    """Wait for kernels that begin and end at those times."""
    return device_wait.wait_for_answer(
        clock.looks,
        lambda: clock.is_past(begins_at),
        lambda: clock.is_past(ends_at),
        limit_s,
    )


def test_other_work_of_the_stream_does_not_count_as_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten times the limit passes before the kernels begin."""
    clock = Clock(monkeypatch, answer_at=105.0)
    assert wait(clock, begins_at=100.0, ends_at=106.0)
    assert clock.now_s == 105.0


def test_kernels_that_neither_answer_nor_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, answer_at=NEVER)
    assert not wait(clock, begins_at=20.0, ends_at=NEVER)
    assert 30.0 < clock.now_s < 34.0


def test_kernels_that_ended_without_an_answer_are_looked_at_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, answer_at=NEVER)
    assert not wait(clock, begins_at=0.0, ends_at=5.0)
    assert clock.now_s == 7.0
    late = Clock(monkeypatch, answer_at=7.0)  # written between the look and the end
    assert wait(late, begins_at=0.0, ends_at=5.0)


def test_every_phase_of_the_kernels_has_words() -> None:
    """In the order of the C header."""
    told = re.findall(r"EP_PHASE_(\w+) = (\d+)", HEADER.read_text())
    assert [int(number) for _, number in told] == list(range(len(device_faults.PHASES)))
    numbers = {name: int(number) for name, number in told}
    for name in ("WEIGHTS", "LEFT", "NO_ROOM", "GRADIENTS"):
        assert getattr(device_faults, name) == numbers[name]


def fault(phase: int, rank: int = 2, peer: int = 3) -> SimpleNamespace:
    """A filed EpFault."""
    return SimpleNamespace(rank=rank, peer=peer, phase=phase, channel=1, expected=7, seen=6)


@pytest.mark.parametrize(
    ("phase", "kind", "words"),
    [
        (4, EpTimeoutError, "rank 2 waited 5.0 s for rank 3 in 'dispatch: rows' (told by"),
        (device_faults.WEIGHTS, AgreementError, "of ranks 2 and 3 one passed topk_weights"),
        (device_faults.GRADIENTS, AgreementError, "of ranks 2 and 3 one gave gradients of weights"),
        (device_faults.LEFT, EpTimeoutError, "rank 2 left because of an error of its own"),
        (device_faults.NO_ROOM, CapacityError, "rank 2 left: it had no room for output rows of 6 "),
    ],
)
def test_a_failure_names_the_ranks_and_the_reason(
    phase: int, kind: type[Exception], words: str
) -> None:
    word = device_faults.leaving_word(2, 5 << 20)
    failure = device_faults.failure_of(
        fault(phase), word, ep_rank=0, timeout_s=5.0, topology=ONE_DOMAIN
    )
    assert type(failure) is kind
    assert words in str(failure)
    assert "close it and make a new one" in str(failure)


@pytest.mark.parametrize(
    "word",
    [
        device_faults.leaving_word(2, 0),
        device_faults.leaving_word(1, 5 << 20),
        3 | 3 << 16 | 4 << 32,
    ],
    ids=["left", "another rank", "a wait"],
)
def test_a_size_that_was_overwritten_is_not_told(word: int) -> None:
    """The fault keeps the phase that its kernel saw, the word whatever was set last."""
    failure = device_faults.failure_of(
        fault(device_faults.NO_ROOM), word, ep_rank=0, timeout_s=5.0, topology=ONE_DOMAIN
    )
    assert "rank 2 left: it had no room for output rows; give all ranks" in str(failure)


def test_the_rank_that_waited_says_what_it_saw() -> None:
    failure = device_faults.failure_of(fault(4), 0, ep_rank=2, timeout_s=5.0, topology=ONE_DOMAIN)
    assert "channel 1: expected 7, seen 6" in str(failure)


@pytest.mark.parametrize(
    ("domain_size", "waited", "behind", "words"),
    [
        (4, (2, 3), (7, 11), "(told by that rank), which may have waited for ranks 7, 11 of other"),
        (6, (2, 3), (9,), "(told by that rank), which may have waited for rank 9 of other domains"),
        (4, (2, 6), (), "(told by that rank); this group"),
        (4, (3, 3), (), "(told by that rank); this group"),
        (12, (2, 3), (), "(told by that rank); this group"),
    ],
    ids=["three domains", "two domains", "across domains", "own blocks", "one domain"],
)
def test_a_wait_inside_a_domain_names_whose_rail_may_lie_behind_it(
    domain_size: int, waited: tuple[int, int], behind: tuple[int, ...], words: str
) -> None:
    """The rank that is waited for may wait for its rail itself, and its wait end no sooner."""
    failure = device_faults.failure_of(
        fault(4, *waited),
        0,
        ep_rank=0,
        timeout_s=5.0,
        topology=Topology(ep_size=12, domain_size=domain_size),
    )
    assert isinstance(failure, EpTimeoutError)
    assert failure.behind == behind
    assert words in str(failure)


@pytest.mark.parametrize(("wanted_bytes", "steps"), [(1, 1), (5 << 20, 3), (1 << 50, 0xFFFF)])
def test_a_leaving_word_carries_who_and_how_much(wanted_bytes: int, steps: int) -> None:
    word = device_faults.leaving_word(71, wanted_bytes)
    assert device_faults.filer_of(word) == 71
    assert word == 72 | 71 << 16 | device_faults.NO_ROOM << 32 | steps << 48
    assert device_faults.leaving_word(0, 0) == 1 | device_faults.LEFT << 32
    assert device_faults.filer_of(0) == -1


class Arena:
    """A window that keeps what is written to it."""

    def __init__(self) -> None:
        """Nothing was written."""
        self.words: list[tuple[int, int]] = []

    def read_word(self, offset: int) -> int:
        """What was written last."""
        return self.words[-1][1] if self.words else 0

    def write_word(self, offset: int, word: int) -> None:
        """Keep it."""
        self.words.append((offset, word))

    def forget(self) -> None:
        """Nothing to let go."""


def closed_session(
    monkeypatch: pytest.MonkeyPatch,
    *,
    filed: int,
    refused_bytes: int,
    expires: bool = False,
    failed: bool = True,
) -> Arena:
    """What a session of rank 1 writes that closes because of an error."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    session: Any = DeviceSession.__new__(DeviceSession)
    session.ep_rank, session.rails, session.device = 1, None, None
    session.module = SimpleNamespace(read_fault=lambda _: SimpleNamespace(filed=filed))
    session.outputs = SimpleNamespace(refused_bytes=refused_bytes, close=lambda: None)
    session.context = SimpleNamespace(window=SimpleNamespace(error=64))
    session._fault, session._timeout_s = torch.zeros(1), 5.0
    session._failure, session._is_closed = None, False
    session._closing = SimpleNamespace(leave=lambda: None)
    session._arena, session._communicator = Arena(), SimpleNamespace(abort=lambda: None)
    if expires:
        with pytest.raises(EpTimeoutError, match="in 'route: counts' for its own GPU"):
            session.raise_expired("route: counts")
    session.close(failed=failed)
    arena: Arena = session._arena
    return arena


@pytest.mark.parametrize("refused_bytes", [0, 4 << 20])
def test_a_rank_that_leaves_tells_its_peers(
    monkeypatch: pytest.MonkeyPatch, refused_bytes: int
) -> None:
    arena = closed_session(monkeypatch, filed=0, refused_bytes=refused_bytes)
    assert arena.words == [(64, device_faults.leaving_word(1, refused_bytes))]


@pytest.mark.parametrize("failed", [False, True])
def test_a_rank_that_leaves_after_a_wait_of_its_host_tells_its_peers(
    monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """No kernel has filed anything, so that they would wait out their deadline."""
    arena = closed_session(monkeypatch, filed=0, refused_bytes=0, expires=True, failed=failed)
    assert arena.words == [(64, device_faults.leaving_word(1, 0))]


def test_a_rank_whose_group_is_finished_already_overwrites_no_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not closed_session(monkeypatch, filed=1, refused_bytes=0).words


def test_a_session_that_one_rank_cannot_make_is_refused_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the others would go on to a first plan, and wait there. What was open is let go."""
    freed: list[str] = []
    communicator = SimpleNamespace(
        properties=lambda: SimpleNamespace(num_domains=1),
        abort=lambda: freed.append("communicator"),
    )
    arena = SimpleNamespace(share=lambda: None, forget=lambda: freed.append("arena"))
    module = SimpleNamespace(MAX_BASE_ENTRIES=16384, Arena=lambda *_: arena)

    def session(*given: Any) -> str:  # noqa: ANN401
        if given[2].ep_rank == 1:
            raise RuntimeError("no pinned memory")
        return "a session"

    for name, stand_in in {
        "open_communicator": lambda _: communicator,
        "native": SimpleNamespace(load=lambda: module),
        "control_bytes_of": lambda *_: 4096,
        "DeviceSession": session,
        "_refuse_threads": lambda _: None,
    }.items():
        monkeypatch.setattr(device_session, name, stand_in)

    def refusal(process_group: dist.ProcessGroup) -> str:
        with pytest.raises(UnavailableError) as refused:
            device_session.open_session(
                Collectives(process_group), CONFIG, Placement.even(8, 2), gpus_are_shared=False
            )
        return str(refused.value)

    assert run_ranks(2, refusal) == ["on rank 1: no pinned memory"] * 2
    assert sorted(freed) == ["arena"] * 2 + ["communicator"] * 2


@pytest.mark.parametrize(
    ("num_domains", "tuning", "made", "error", "failed"),
    [
        (2, Tuning(num_sms=28), None, "num_sms is 28 .* blocks for the rails", False),
        (2, Tuning(combine="gather"), None, "combine is 'gather'", False),
        (1, Tuning(), UnavailableError("no mailbox"), "no mailbox", False),
        (1, Tuning(), KeyboardInterrupt("stopped"), "stopped", True),
    ],
)
def test_a_session_is_closed_if_no_group_comes_of_it(
    monkeypatch: pytest.MonkeyPatch,
    num_domains: int,
    tuning: Tuning,
    made: BaseException | None,
    error: str,
    failed: bool,
) -> None:
    """Together where all ranks refuse alike; else this one leaves, and the others are told."""
    closed: list[bool] = []
    session = SimpleNamespace(
        topology=Topology(ep_size=2, domain_size=2 // num_domains),
        close=lambda *, failed: closed.append(failed),
    )

    def backend(*_: object) -> None:
        assert made is not None
        raise made

    for name, stand_in in {
        "gpus_of": lambda _: [RankGpu("a", 32), RankGpu("b", 32)],
        "open_session": lambda *_, **__: session,
        "DeviceBackend": backend,
        "RailBackend": backend,
    }.items():
        monkeypatch.setattr(rail_device, name, stand_in)
    config = replace(CONFIG, tuning=tuning)

    def refusal(process_group: dist.ProcessGroup) -> None:
        with pytest.raises(BaseException, match=error):
            rail_device.open_backend(Collectives(process_group), config, Placement.even(8, 2))

    run_ranks(2, refusal)
    assert closed == [failed] * 2


def gpus_entered(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Which GPUs are made the current one from now on."""
    entered: list[object] = []

    @contextmanager
    def device(which: object) -> Iterator[None]:
        entered.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    return entered


class HereError(Exception):
    """The call has come as far as the session."""


@pytest.mark.parametrize(
    "call",
    [
        lambda backend: backend.plan(None, 1, "refused"),
        lambda backend: backend.dispatch(None, None, None),
        lambda backend: backend.combine(None, None, None),
        lambda backend: backend.close(),
    ],
    ids=["plan", "dispatch", "combine", "close"],
)
def test_calls_run_on_the_gpu_of_the_group(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], object]
) -> None:
    """A launch would else go to whichever GPU is the current one."""
    entered = gpus_entered(monkeypatch)

    def come(**_: object) -> None:
        raise HereError

    backend: Any = DeviceBackend.__new__(DeviceBackend)
    backend._session = SimpleNamespace(device="the group's", check=come, close=come)
    with pytest.raises(HereError):
        call(backend)
    assert entered == ["the group's"]


def test_a_routing_that_lies_elsewhere_is_refused_before_the_others_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank takes part in the plan, which tells its peers."""
    gpus_entered(monkeypatch)
    refused = []
    backend: Any = DeviceBackend.__new__(DeviceBackend)
    backend._session = SimpleNamespace(device=torch.device("cuda", 0), check=lambda: None)
    backend._config = SimpleNamespace(recv_capacity_rows=64)
    backend._module = SimpleNamespace(read_mailbox=lambda _: SimpleNamespace(ticket=0))
    backend._mailbox = torch.zeros(8)
    backend._refuse_to_plan = lambda: refused.append(True)
    with pytest.raises(ShapeError, match="topk_idx is on cpu; the device tier of this rank works"):
        backend.plan(torch.zeros(4, 2, dtype=torch.int64), 1, None)
    assert refused == [True]
