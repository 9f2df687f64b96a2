"""The loopback RMA plugin on host memory: what it delivers, what it promises, what it refuses.

The same code moves GPU memory; only the copies differ (csrc/testing/loopback_rma/gpu.cpp).
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from loopback_rma import Plugin, PluginError, Rank, Row, exchange, wait_until, world

REMOTE_ERROR, INVALID_ARGUMENT, INVALID_USAGE = 6, 4, 5
HALF = 1 << 19  # sources in the lower half of a window, targets in the upper

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build it with")


@pytest.fixture(scope="module")
def plugin(plugin: str) -> Plugin:
    """Loaded."""
    return Plugin(Path(plugin))


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late and in any order."""
    monkeypatch.setenv("LOOPBACK_RMA_REORDER", "1")
    monkeypatch.setenv("LOOPBACK_RMA_DELAY_US", "2000")
    monkeypatch.setenv("LOOPBACK_RMA_SEED", "7")


@pytest.fixture
def pair(plugin: Plugin) -> Iterator[list[Rank]]:
    """Two ranks."""
    with world(plugin, 2) as ranks:
        yield ranks


def fill(rank: Rank, seed: int) -> bytes:
    """Give the lower half of a window a content of its own; returns it."""
    content = random.Random(seed).randbytes(HALF)
    rank.window[:HALF] = content
    return content


def settle(rank: Rank, requests: list[object]) -> bool:
    """Wait for requests, each polled until it is done."""
    return all(wait_until(partial(rank.is_done, request)) for request in requests)


def wait_for_signal(rank: Rank, signal: int, value: int, timeout_s: float = 10.0) -> bool:
    """Whether a signal of `rank` had that value in time."""
    return wait_until(lambda: rank.signals[signal] == value, timeout_s)


def square(ranks: list[Rank]) -> list[tuple[int, Rank, int]]:
    """All pairs: number of the sender, the sender, number of the receiver."""
    return [(me, rank, peer) for me, rank in enumerate(ranks) for peer in range(len(ranks))]


@pytest.mark.parametrize("size", [1, 8, 16, 32768, 32769, HALF])
def test_a_put_moves_its_bytes_and_no_others(pair: list[Rank], size: int) -> None:
    """Also more than a slot holds, and more than all slots do."""
    content = fill(pair[0], size)
    pair[0].put(1, HALF - size, size, HALF)
    pair[0].signal(1, 3)
    assert wait_for_signal(pair[1], 3, 1)
    assert bytes(pair[1].window[HALF : HALF + size]) == content[HALF - size :]
    assert not any(pair[1].window[HALF + size :])
    assert not any(pair[1].window[:HALF])


@pytest.mark.usefixtures("chaos")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_strong_signal_comes_after_all_puts_before_it(plugin: Plugin, num_ranks: int) -> None:
    """Every rank puts to every rank (itself too) in two contexts; a signal finds all in place."""
    count, size = 24, 512
    with world(plugin, num_ranks) as ranks:
        contents = [fill(rank, seed) for seed, rank in enumerate(ranks)]
        for number in range(count):
            for me, rank, peer in square(ranks):
                target = HALF + (me * count + number) * size
                rank.put(peer, number * size, size, target, number % 2)
        for me, rank, peer in square(ranks):
            for context in range(2):
                rank.signal(peer, 2 * me + context, context=context)
        for me, _, peer in square(ranks):
            for context in range(2):
                assert wait_for_signal(ranks[peer], 2 * me + context, 1)
                for number in range(context, count, 2):
                    start = HALF + (me * count + number) * size
                    got = bytes(ranks[peer].window[start : start + size])
                    assert got == contents[me][number * size :][:size]


@pytest.mark.usefixtures("chaos")
def test_a_weak_signal_may_come_before_a_put(pair: list[Rank]) -> None:
    """Else the test above could not fail: some weak signal overtakes the puts before it."""
    overtaken = 0
    for number in range(50):
        pair[0].window[number] = 1 + number
        pair[0].put(1, number, 1, HALF + number)
        pair[0].signal(1, 0, strong=False)
        assert wait_for_signal(pair[1], 0, number + 1)
        overtaken += pair[1].window[HALF + number] != 1 + number
    assert overtaken


@pytest.mark.usefixtures("chaos")
def test_puts_may_pass_each_other(pair: list[Rank]) -> None:
    """Of puts to one byte, the last one posted is not always the last to land."""
    pair[0].window[:16] = bytes(range(16))
    last_to_land = []
    for number in range(20):
        for value in range(16):
            pair[0].put(1, value, 1, HALF)
        pair[0].signal(1, 0)
        assert wait_for_signal(pair[1], 0, number + 1)
        last_to_land.append(pair[1].window[HALF])
    assert set(last_to_land) != {15}


@pytest.mark.usefixtures("chaos")
def test_a_source_is_read_late_but_not_after_its_request(pair: list[Rank]) -> None:
    """A source changed before its request is done may go out changed; afterwards never."""
    changed = 0
    for number in range(50):
        pair[0].window[0] = 1
        request = pair[0].put(1, 0, 1, HALF + 2 * number)
        pair[0].window[0] = 2
        assert settle(pair[0], [request])
        pair[0].window[0] = 3
        pair[0].signal(1, 0)
        assert wait_for_signal(pair[1], 0, number + 1)
        assert pair[1].window[HALF + 2 * number] != 3
        changed += pair[1].window[HALF + 2 * number] == 2
    assert changed


def test_ranks_may_be_processes(plugin: Plugin) -> None:
    """Nothing but the handle passes between them."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = zip(*(context.Pipe() for _ in range(2)), strict=True)
    processes = [
        context.Process(target=exchange, args=(plugin.library._name, theirs[rank], rank))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    handles = [pipe.recv() for pipe in ours]
    for rank, pipe in enumerate(ours):
        pipe.send(handles[1 - rank])
    assert [pipe.recv() for pipe in ours] == [True, True]
    for pipe in ours:
        pipe.send(None)
    for process in processes:
        process.join(timeout=20)
    assert [process.exitcode for process in processes] == [0, 0]


def test_signals_add_up(pair: list[Rank]) -> None:
    """A thousand, from both ranks, to the same word."""
    for _ in range(500):
        for rank in pair:
            rank.signal(1, 5)
    assert wait_for_signal(pair[1], 5, 1000)


@pytest.mark.parametrize("peer", [0, 1])
def test_get_brings_the_peers_bytes(pair: list[Rank], peer: int) -> None:
    content = fill(pair[peer], 11)
    request = pair[0].get(peer, 100, 70000, HALF)
    assert settle(pair[0], [request])
    assert bytes(pair[0].window[HALF : HALF + 70000]) == content[100:70100]


def test_counters_tell_puts_by_peer_and_size(plugin: Plugin) -> None:
    with world(plugin, 3) as ranks:
        for _ in range(4):
            ranks[0].put(2, 0, 640, HALF)
        ranks[0].put(2, 0, 64, HALF)
        ranks[1].put(0, 0, 640, HALF)
        ranks[1].signal(0, 1)
        got = plugin.rows()
    want = [(0, 2, "put", 64, 1), (0, 2, "put", 640, 4), (1, 0, "put", 640, 1)]
    assert sorted(got) == sorted([Row(*row) for row in want] + [Row(1, 0, "signal", 0, 1)])
    assert plugin.rows() == []


def test_counters_are_written_at_teardown(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOOPBACK_RMA_STATS", str(tmp_path))
    with world(plugin, 2) as ranks:
        ranks[1].put(0, 0, 48, HALF)
    lines = [line for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    row = {"rank": 1, "num_ranks": 2, "peer": 0, "kind": "put", "bytes": 48, "count": 1}
    assert [json.loads(line) for line in lines] == [row]


@pytest.mark.parametrize(
    ("source", "size", "target"),
    [(1 << 20, 1, 0), ((1 << 20) - 8, 16, 0), (0, 16, (1 << 20) - 8), (0, 1, 1 << 40)],
)
def test_a_put_outside_a_region_is_refused(
    pair: list[Rank], source: int, size: int, target: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the range and the region's size."""
    with pytest.raises(PluginError) as error:
        pair[0].put(1, source, size, target)
    assert error.value.code == INVALID_ARGUMENT
    assert "lies outside region 0" in (told := capfd.readouterr().err)
    assert "1048576 bytes" in told


@pytest.mark.parametrize("peer", [2, 500_000, (1 << 32) - 1])
@pytest.mark.parametrize("call", ["put", "signal", "get", "flush"])
def test_a_peer_that_is_no_rank_is_refused(
    pair: list[Rank], call: str, peer: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """With its number and the ranks that there are, whatever the operation."""
    post = {
        "put": lambda: pair[0].put(peer, 0, 16, HALF),
        "signal": lambda: pair[0].signal(peer, 0),
        "get": lambda: pair[0].get(peer, 0, 16, HALF),
        "flush": lambda: pair[0].flush(peer),
    }
    with pytest.raises(PluginError) as error:
        post[call]()
    assert error.value.code == INVALID_ARGUMENT
    assert f"peer {peer} of an operation by rank 0; ranks are 0 to 1" in capfd.readouterr().err


def answer_of(rank: Rank, request: object) -> int:
    """The error that a request ends with; 0 for none."""
    try:
        assert settle(rank, [request])
    except PluginError as error:
        return error.code
    return 0


def test_a_put_whose_source_is_gone_is_told_by_its_request(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sources of some puts are deregistered before they were read."""
    monkeypatch.setenv("LOOPBACK_RMA_DELAY_US", "300000")
    with world(plugin, 2) as ranks:
        requests = [ranks[0].put(1, 0, 16, HALF) for _ in range(16)]
        ranks[0].deregister_window()
        codes = {answer_of(ranks[0], each) for each in requests}
    assert REMOTE_ERROR in codes
    assert codes <= {0, REMOTE_ERROR}


@pytest.mark.parametrize("size", [16, HALF])
def test_a_put_whose_context_is_closed_is_told_by_its_request(plugin: Plugin, size: int) -> None:
    """Waiting for its slots or for its source to be read."""
    with world(plugin, 2) as ranks:
        assert plugin.inject("stall:rank=0:ms=400")
        requests = [ranks[0].put(1, 0, size, HALF) for _ in range(4)]
        ranks[0].close_context()
        assert [answer_of(ranks[0], each) for each in requests] == [REMOTE_ERROR] * 4


def test_a_dropped_put_is_complete_here_and_never_signalled_there(
    plugin: Plugin, pair: list[Rank]
) -> None:
    """As on a network that lost it: what follows in its context waits, other contexts do not."""
    assert plugin.inject("drop:rank=0:after=1")
    requests = [pair[0].put(1, 0, 16, HALF) for _ in range(2)]
    pair[0].signal(1, 0)
    pair[0].signal(1, 1, context=1)
    assert settle(pair[0], requests)
    assert wait_for_signal(pair[1], 1, 1)
    assert not wait_for_signal(pair[1], 0, 1, timeout_s=0.2)


def test_a_weak_signal_arrives_behind_a_dropped_put(plugin: Plugin, pair: list[Rank]) -> None:
    """In the same context, too: it covers no put but one of its own. A strong one waits."""
    assert plugin.inject("drop:rank=0")
    pair[0].put(1, 0, 16, HALF)
    pair[0].signal(1, 0, strong=False)
    pair[0].signal(1, 1)
    assert wait_for_signal(pair[1], 0, 1)
    assert not wait_for_signal(pair[1], 1, 1, timeout_s=0.2)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("drop:rank=99", "field 'rank' of a fault is 99; ranks are 0 to 1 here"),
        ("drop:rank=2", "field 'rank' of a fault is 2; ranks are 0 to 1 here"),
        ("stall:peer=7", "field 'peer' of a fault is 7; ranks are 0 to 1 here"),
    ],
)
def test_a_fault_of_a_rank_that_is_not_there_is_refused(
    plugin: Plugin,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fault: str,
    told: str,
) -> None:  # fmt: skip
    """When ranks connect, without waiting for each other, and from inside a test."""
    monkeypatch.setenv("LOOPBACK_RMA_FAULT", fault)
    here, absent = Rank(plugin, 1), Rank(plugin, 1)
    start = time.monotonic()
    with pytest.raises(PluginError):
        here.connect([here.handle, absent.handle], 0)
    assert time.monotonic() - start < 5
    assert f"LOOPBACK_RMA_FAULT: {told}" in capfd.readouterr().err
    monkeypatch.delenv("LOOPBACK_RMA_FAULT")
    with world(plugin, 2):
        assert not plugin.inject(fault)
        assert told in capfd.readouterr().err


@pytest.mark.usefixtures("pair")
def test_a_fault_is_taken_if_one_open_collective_has_its_rank(plugin: Plugin) -> None:
    with world(plugin, 3):
        assert plugin.inject("drop:rank=2")
    assert not plugin.inject("drop:rank=2")


def test_a_fault_is_refused_where_nothing_is_connected(
    plugin: Plugin, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not plugin.inject("drop:rank=0")
    assert "no communicator is connected here;" in capfd.readouterr().err
    assert plugin.inject("")


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize(
    "fault", ["drop", "fail:rank=-1:peer=-1", "stall:rank=1:ms=1", "drop:peer=1:count=2", ""]
)
def test_a_fault_of_all_ranks_or_of_the_last_one_is_taken(plugin: Plugin, fault: str) -> None:
    assert plugin.inject(fault)


def test_a_failed_put_is_told_by_its_request_and_by_query(plugin: Plugin, pair: list[Rank]) -> None:
    assert plugin.inject("fail:rank=0:peer=1")
    request = pair[0].put(1, 0, 16, HALF)
    with pytest.raises(PluginError) as error:
        pair[0].is_done(request)
    assert error.value.code == REMOTE_ERROR
    assert pair[0].has_error()
    assert not pair[1].has_error()


def test_a_stall_ends_when_it_was_told_to(plugin: Plugin, pair: list[Rank]) -> None:
    """Nothing moves before; all of it afterwards."""
    assert plugin.inject("stall:rank=0:ms=300")
    pair[0].put(1, 0, 16, HALF)
    pair[0].signal(1, 0)
    assert not wait_for_signal(pair[1], 0, 1, timeout_s=0.15)
    assert wait_for_signal(pair[1], 0, 1)


def test_a_stall_for_ever_does_not_keep_a_rank_from_closing(plugin: Plugin) -> None:
    with world(plugin, 2) as ranks:
        assert plugin.inject("stall:rank=0")
        ranks[0].put(1, 0, 16, HALF)
        ranks[1].put(0, 0, 16, HALF)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("LOOPBACK_RMA_SLOTS", "0", "[1, 4096]"),
        ("LOOPBACK_RMA_SEED", "x", "whole number"),
        ("LOOPBACK_RMA_FAULT", "lose:rank=1", "drop, fail and stall"),
        ("LOOPBACK_RMA_FAULT", "drop:rang=1", "rank, peer, after, count and ms"),
        ("LOOPBACK_RMA_FAULT", "drop:rank=0:rank=1", "'rank' of a fault is given twice"),
        ("LOOPBACK_RMA_FAULT", "drop:ms=5", "'ms' of a fault is 5, but only a stall"),
        ("LOOPBACK_RMA_FAULT", "fail:ms=5", "'ms' of a fault is 5, but only a stall"),
        ("LOOPBACK_RMA_FAULT", "stall:count=2", "'count' of a fault is 2, but a stall"),
    ],
)
def test_a_malformed_setting_is_refused_with_what_is_allowed(
    plugin: Plugin,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    value: str,
    told: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(name, value)
    with pytest.raises(PluginError) as error:
        Rank(plugin, 1)
    assert error.value.code == INVALID_USAGE
    assert told in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"), [("absent", "No such file or directory"), ("file", "Not a directory")]
)
def test_a_folder_for_counters_that_cannot_serve_is_refused_at_the_start(
    plugin: Plugin,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    told: str,
) -> None:  # fmt: skip
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOOPBACK_RMA_STATS", str(tmp_path / name))
    with pytest.raises(PluginError) as error:
        Rank(plugin, 1)
    assert error.value.code == INVALID_USAGE
    assert f"LOOPBACK_RMA_STATS is '{tmp_path / name}': {told}" in capfd.readouterr().err


def test_a_folder_without_room_names_what_is_needed(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOOPBACK_RMA_SLOTS", "4096")
    monkeypatch.setenv("LOOPBACK_RMA_SLOT_BYTES", str(1 << 26))
    rank = Rank(plugin, 1)
    with pytest.raises(PluginError):
        rank.connect([rank.handle], 0)
    assert "LOOPBACK_RMA_FOLDER" in capfd.readouterr().err


def test_a_peer_that_never_comes_leaves_nothing_behind(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The segment of the rank that waited in vain goes with it."""
    monkeypatch.setenv("LOOPBACK_RMA_FOLDER", str(tmp_path))
    monkeypatch.setenv("LOOPBACK_RMA_TIMEOUT_S", "1")
    here, absent = Rank(plugin, 1), Rank(plugin, 1)
    with pytest.raises(PluginError):
        here.connect([here.handle, absent.handle], 0)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_in_shared_memory(plugin: Plugin, pair: list[Rank]) -> None:
    """Not even while ranks are connected, so that a killed process leaves nothing behind."""
    assert plugin.rows() == []
    assert len(pair) == 2
    assert not list(Path("/dev/shm").glob("loopback-rma-*"))
