"""The loopback RMA plugin where a rank stands still and a world ends with full queues and slots."""

from __future__ import annotations

import shutil
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from loopback_rma import Plugin, Rank, wait_until, world

HALF = 1 << 19  # targets lie in the upper half of a window
SOON_S = 1.5  # well before the 2 s that ranks wait for each other in tests of faults

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build it with")


@pytest.fixture(scope="module")
def plugin(plugin: str) -> Plugin:
    """Loaded."""
    return Plugin(Path(plugin))


def has_signal(rank: Rank, signal: int) -> bool:
    """Whether a signal of `rank` is 1."""
    return rank.signals[signal] == 1


def square(ranks: list[Rank]) -> list[tuple[int, Rank, int]]:
    """All pairs: number of the sender, the sender, number of the receiver."""
    return [(me, rank, peer) for me, rank in enumerate(ranks) for peer in range(len(ranks))]


def greet(ranks: list[Rank]) -> None:
    """Each rank puts its number to each other one, with a signal behind it; returns at once."""
    for me, rank, peer in square(ranks):
        rank.window[0] = 1 + me
        rank.put(peer, 0, 1, HALF + me)
        rank.signal(peer, me)


def check_greeted(ranks: list[Rank], start: float) -> None:
    """All of that came, long before a kernel's deadline, and nothing else did."""
    for me, _, peer in square(ranks):
        assert wait_until(partial(has_signal, ranks[peer], me))
    assert time.monotonic() - start < SOON_S
    for rank in ranks:
        assert list(rank.window[HALF : HALF + len(ranks)]) == list(range(1, 1 + len(ranks)))
        assert not any(rank.window[HALF + len(ranks) :])
        assert list(rank.signals[: 1 + len(ranks)]) == [1] * len(ranks) + [0]


def put_more_than_slots_hold(ranks: list[Rank], peers: tuple[int, ...]) -> None:
    """From these ranks to all and from all to them: most of it stays queued while one stalls."""
    for me, rank, peer in square(ranks):
        for number in range(300 if me in peers or peer in peers else 1):
            rank.put(peer, 0, 512, HALF + 512 * number)
            rank.signal(peer, 8 + me)


@pytest.mark.parametrize(
    "leave", [(), (1,), (0,), (0, 2, 3, 4, 5, 6, 7), (4, 1, 6)], ids=lambda ranks: f"{ranks}"
)
def test_what_a_stalled_world_had_queued_delays_no_new_one(
    plugin: Plugin, leave: tuple[int, ...]
) -> None:
    """As eight ranks end a group under a stall of rank 1; `leave` close before it is lifted."""
    with world(plugin, 8) as ranks:
        assert plugin.inject("stall:rank=1")
        put_more_than_slots_hold(ranks, (1,))
        ranks[0].signal(2, 50)
        assert wait_until(partial(has_signal, ranks[2], 50), SOON_S)  # behind 300 puts to rank 1
        early = [threading.Thread(target=ranks[each].close) for each in leave]
        for thread in early:
            thread.start()
            time.sleep(0.02)
        assert plugin.inject("")
        for thread in early:
            thread.join()
        ranks[:] = [rank for each, rank in enumerate(ranks) if each not in leave]
    with world(plugin, 8) as ranks:
        start = time.monotonic()
        greet(ranks)
        check_greeted(ranks, start)


def test_a_new_world_owes_nothing_to_one_that_still_stands_still(plugin: Plugin) -> None:
    """Of the same process, with full slots and queues, and closed after the new one."""
    with world(plugin, 4) as old:
        assert plugin.inject("stall:rank=1")
        put_more_than_slots_hold(old, (1,))
        with world(plugin, 4) as ranks:
            start = time.monotonic()
            greet(ranks)
            check_greeted(ranks, start)
        assert plugin.inject("")
