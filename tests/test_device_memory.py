"""Memory of output rows: reused in the order of streams, without waiting for anything else."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import stream_cases as cases
import torch
from multi_process import ProcessWorld

from ep_dispatcher import CapacityError
from ep_dispatcher.device_memory import OutputPool, ReuseLog


class Block:
    """A tensor of 64 bytes, said to lie at an address."""

    def __init__(self, address: int) -> None:
        """Own 64 bytes of storage somewhere."""
        self._storage = torch.empty(64, dtype=torch.uint8).untyped_storage()
        self._address = address

    def data_ptr(self) -> int:
        """Where it is said to lie."""
        return self._address

    def untyped_storage(self) -> torch.UntypedStorage:
        """What is watched."""
        return self._storage


class Event:
    """Taken of a stream."""

    def __init__(self, name: str) -> None:
        """Not reached yet."""
        self.name, self.done = name, False

    def query(self) -> bool:
        """Whether the stream has reached it."""
        return self.done


class Stream:
    """Counts its events."""

    def __init__(self) -> None:
        """Nothing was taken."""
        self.events: list[Event] = []

    def record_event(self) -> Event:
        """Take the next one."""
        self.events.append(Event(str(len(self.events))))
        return self.events[-1]


def take(log: ReuseLog, home: Stream, address: int) -> tuple[Block, list[str]]:
    """What the pool does with a new block; also the names of the events to wait for."""
    block = Block(address)
    log.sweep(block, home.record_event)  # type: ignore[arg-type]
    log.hold(block)  # type: ignore[arg-type]
    return block, [event.name for event in log.events_before(block)]  # type: ignore[arg-type]


def test_fresh_memory_is_waited_for_by_nobody() -> None:
    """No event is taken where nothing was let go."""
    log, home = ReuseLog(), Stream()
    kept = [take(log, home, address) for address in (0, 64, 128)]
    assert [names for _, names in kept] == [[], [], []]
    assert not home.events


def test_memory_is_waited_for_up_to_when_it_was_found_gone() -> None:
    """An event taken then, not one of the time when the memory is handed out again."""
    log, home = ReuseLog(), Stream()
    first, _ = take(log, home, 0)
    del first
    second, names = take(log, home, 64)  # finds the first gone, lies elsewhere
    assert names == []
    assert take(log, home, 0)[1] == ["0"]
    assert second.data_ptr() == 64


def test_a_block_over_parts_of_several_waits_for_each_that_it_touches() -> None:
    """Neighbours that only touch at an address do not count."""
    log, home = ReuseLog(), Stream()
    blocks = {address: take(log, home, address)[0] for address in (0, 64, 128)}
    for number, address in enumerate((0, 64, 128)):
        del blocks[address]
        take(log, home, 1024 + 64 * number)
    names = take(log, home, 32)[1]
    assert {"0", "1"} <= set(names)
    assert "2" not in names


def test_memory_whose_storage_was_resized_to_nothing_is_waited_for() -> None:
    """The storage lives on, so only the reuse of its addresses tells that it let go."""
    log, home = ReuseLog(), Stream()
    resized, _ = take(log, home, 0)
    names = take(log, home, 0)[1]
    assert names == ["0"]
    assert resized.data_ptr() == 0


def test_events_that_are_over_are_forgotten() -> None:
    """The log does not grow with the number of calls."""
    log, home = ReuseLog(), Stream()
    for _ in range(50):
        take(log, home, 0)
        for event in home.events:
            event.done = True
    assert len(log._freed) <= 1
    assert len(log._held) <= 1
    assert take(log, home, 64)[1] == []


class Heap(OutputPool):
    """A pool over plain memory, captured from the start, that cuts one block behind another."""

    def __init__(self, heap_bytes: int) -> None:
        """Take the memory; no GPU."""
        self._memory, self._end = bytearray(heap_bytes), 0
        start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._arena = SimpleNamespace(heap=start, heap_bytes=heap_bytes)
        self._home: Any = "a stream"
        self._device = torch.device("cpu")
        self._captured: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def _cut(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        start, self._end = self._end, self._end + elements * dtype.itemsize
        if self._end > len(self._memory):
            self._end = start
            raise torch.OutOfMemoryError
        part = memoryview(self._memory)[start : self._end]
        return torch.frombuffer(part, dtype=dtype)


def test_rows_of_captures_are_kept_and_never_more_than_the_heap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often a graph is captured; empty rows, which take nothing, are not kept."""
    for name, stand_in in {
        "current_stream": lambda _: "a stream",
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": lambda _: None,
        "is_current_stream_capturing": lambda: True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    pool = Heap(8 << 20)

    def capture_all() -> None:
        for _ in range(1000):
            pool.empty((0, 64), torch.float32)
            pool.empty((1 << 19, 1), torch.float32)

    kept = 4 * (2 << 20)
    with pytest.raises(CapacityError, match=rf"{kept} bytes of it belong to captured graphs"):
        capture_all()
    assert [len(block) for block in pool._captured] == [1 << 19] * 4
    pool._anchor = None
    pool.close()
    assert not pool._captured


@pytest.mark.gpu(1)
def test_another_stream_does_not_wait_for_later_work_of_the_first() -> None:
    """Communication on a stream of its own runs beside the first stream's kernels."""
    with ProcessWorld(1) as world:
        (found,) = world.run(cases.seconds_beside_a_busy_stream, cases.SMALL)
    assert found["rows"]
    assert found["still_busy"], found
    assert found["s"] < cases.LONG_S / 4


@pytest.mark.gpu(1)
def test_memory_is_not_written_before_the_first_stream_has_read_it() -> None:
    """However the rows were given back; without protection the reader sees the next rows."""
    with ProcessWorld(1) as world:
        found = {
            how: world.run(cases.rows_read_late, cases.SMALL, how)[0]
            for how in ("deleted", "resized", "unprotected")
        }
    assert all(each["reused"] for each in found.values()), found
    assert found["deleted"]["as_written"]
    assert found["resized"]["as_written"]
    assert not found["unprotected"]["as_written"]
