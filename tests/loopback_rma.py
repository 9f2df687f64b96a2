"""Calls the loopback RMA plugin as NCCL does, on host memory: ranks are objects in one process."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import CFUNCTYPE, POINTER, byref, c_bool, c_char_p, c_int, c_size_t, c_uint32, c_uint64
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

_POINTER = ctypes.c_void_p
_OUT = POINTER(_POINTER)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # of csrc/testing/loopback_rma/rma_abi.h, in its order
    "init": (_OUT, c_uint64, _POINTER),
    "devices": (POINTER(c_int),),
    "properties": (c_int, _POINTER),
    "listen": (_POINTER, c_int, _POINTER, _OUT),
    "connect": (_POINTER, _OUT, c_int, c_int, _POINTER, _OUT),
    "create_context": (_POINTER, POINTER(c_int * 3), _OUT),
    "register_region": (_POINTER, _POINTER, c_size_t, c_int, c_uint64, _OUT),
    "register_dma_buf": (_POINTER,),
    "deregister_region": (_POINTER, _POINTER),
    "destroy_context": (_POINTER,),
    "close_collective": (_POINTER,),
    "close_listener": (_POINTER,),
    "put": (
        *(_POINTER, c_int, c_uint64, _POINTER, c_size_t, c_uint64, _POINTER, c_uint32),
        _OUT,
    ),
    "put_signal": (
        *(_POINTER, c_int, c_uint64, _POINTER, c_size_t, c_uint64, _POINTER, c_uint32),
        *(c_uint64, _POINTER, c_uint64, c_uint32, c_bool, _OUT),
    ),
    "get": (
        *(_POINTER, c_int, c_uint64, _POINTER, c_size_t, c_uint64, _POINTER, c_uint32),
        _OUT,
    ),
    "flush": (_POINTER, c_int, _POINTER, c_uint32, _OUT),
    "test": (_POINTER, _POINTER, POINTER(c_int)),
    "progress": (_POINTER,),
    "query_error": (_POINTER, POINTER(c_bool)),
    "finalize": (_POINTER,),
}
_KINDS = ("put", "signal", "get")
HOST, ADD = 1, 2
HANDLE_BYTES = 128
WINDOW_BYTES = 1 << 20
NUM_SIGNALS = 64


class PluginError(RuntimeError):
    """A call of the plugin returned one of NCCL's error codes."""

    def __init__(self, name: str, code: int) -> None:
        """Keep the code."""
        super().__init__(f"{name} returned {code}")
        self.code = code


class _Table(ctypes.Structure):
    _fields_ = [  # ctypes wants it so
        ("name", c_char_p),
        *((name, CFUNCTYPE(c_int, *types)) for name, types in _FUNCTIONS.items()),
    ]


class _Row(ctypes.Structure):
    _fields_ = [
        *((name, c_int) for name in ("collective", "num_ranks", "rank", "peer", "kind", "unused")),
        ("bytes", c_uint64),
        ("count", c_uint64),
    ]


class Row(NamedTuple):
    """Operations that are alike; see csrc/testing/loopback_rma/loopback_rma.h."""

    rank: int
    peer: int
    kind: str
    size: int
    number: int


class Plugin:
    """The loaded plugin.

    Args:
        path: of the shared library.
    """

    def __init__(self, path: Path) -> None:
        """Load it."""
        self.library = ctypes.CDLL(str(path))
        self.table = _Table.in_dll(self.library, "ncclRmaPlugin_v14")

    def call(self, name: str, *args: object) -> None:
        """Call a function of the table.

        Raises:
            PluginError: it failed.
        """
        code = getattr(self.table, name)(*args)
        if code:
            raise PluginError(name, code)

    def rows(self) -> list[Row]:
        """Counters of the collectives that are open in this process."""
        count = self.library.loopback_rma_read(None, 0)
        rows = (_Row * count)()
        self.library.loopback_rma_read(rows, count)
        return [Row(r.rank, r.peer, _KINDS[r.kind], r.bytes, r.count) for r in rows]

    def inject(self, fault: str) -> bool:
        """Arm a fault; False if it is malformed."""
        return bool(self.library.loopback_rma_inject(fault.encode()) == 0)


class Rank:
    """One rank: a window and a page of signals, each registered in that order.

    Attributes:
        window, signals: host memory of this rank.
    """

    def __init__(self, plugin: Plugin, num_contexts: int) -> None:
        """Listen; `connect` does the rest."""
        self.plugin = plugin
        self.handle = ctypes.create_string_buffer(HANDLE_BYTES)
        self._memory = (ctypes.c_uint8 * WINDOW_BYTES)()
        self.window = memoryview(self._memory).cast("B")
        self.signals = (c_uint64 * NUM_SIGNALS)()
        self._num_contexts = num_contexts
        self._instance, self._listener = _POINTER(), _POINTER()
        self.collective, self.context = _POINTER(), _POINTER()
        self._regions = (_POINTER(), _POINTER())
        plugin.call("init", byref(self._instance), 0, None)
        plugin.call("listen", self._instance, 0, self.handle, byref(self._listener))

    def connect(self, handles: list[Any], rank: int) -> None:
        """Meet the others; collective."""
        addresses = (_POINTER * len(handles))(*(ctypes.addressof(each) for each in handles))
        arguments = (len(handles), rank, self._listener, byref(self.collective))
        self.plugin.call("connect", self._instance, addresses, *arguments)
        self.plugin.call("close_listener", self._listener)
        config = (c_int * 3)(self._num_contexts, 0, 1)
        self.plugin.call("create_context", self.collective, byref(config), byref(self.context))
        places = ((self._memory, WINDOW_BYTES), (self.signals, 8 * NUM_SIGNALS))
        for (memory, size), region in zip(places, self._regions, strict=True):
            self.plugin.call(
                "register_region", self.collective, memory, size, HOST, 0, byref(region)
            )

    def put(self, peer: int, source: int, size: int, target: int, context: int = 0) -> Any:  # noqa: ANN401
        """Post a put from our window to the peer's; returns its request."""
        window, request = self._regions[0], _POINTER()
        self.plugin.call(
            "put", self.context, context, source, window, size, target, window, peer,
            byref(request),
        )  # fmt: skip
        return request

    def signal(self, peer: int, signal: int, *, strong: bool = True, context: int = 0) -> Any:  # noqa: ANN401
        """Post a signal without bytes; returns its request."""
        request = _POINTER()
        self.plugin.call(
            "put_signal", self.context, context, 0, None, 0, 0, None, peer, 8 * signal,
            self._regions[1], 1, ADD, strong, byref(request),
        )  # fmt: skip
        return request

    def get(self, peer: int, remote: int, size: int, local: int) -> Any:  # noqa: ANN401
        """Post a get from the peer's window to ours; returns its request."""
        window, request = self._regions[0], _POINTER()
        self.plugin.call(
            "get", self.context, 0, remote, window, size, local, window, peer, byref(request)
        )
        return request

    def flush(self, peer: int) -> Any:  # noqa: ANN401
        """Ask for what was got from a peer to be visible; returns its request."""
        request = _POINTER()
        self.plugin.call("flush", self.context, 0, self._regions[0], peer, byref(request))
        return request

    def is_done(self, request: Any) -> bool:  # noqa: ANN401
        """Poll a request once; it must not be used after it was done."""
        done = c_int()
        self.plugin.call("test", self.collective, request, byref(done))
        return bool(done.value)

    def has_error(self) -> bool:
        """What NCCL asks now and then."""
        failed = c_bool()
        self.plugin.call("query_error", self.context, byref(failed))
        return failed.value

    def close_context(self) -> None:
        """Close the context, once."""
        if self.context:
            self.plugin.call("destroy_context", self.context)
        self.context = _POINTER()

    def deregister_window(self) -> None:
        """Take the window's registration away, once."""
        self._deregister(self._regions[0])

    def _deregister(self, region: Any) -> None:  # noqa: ANN401
        if region:
            self.plugin.call("deregister_region", self.collective, region)
        region.value = None

    def close(self) -> None:
        """As NCCL closes: context, regions, collective, instance."""
        self.close_context()
        for region in self._regions:
            self._deregister(region)
        self.plugin.call("close_collective", self.collective)
        self.plugin.call("finalize", self._instance)


@contextlib.contextmanager
def world(plugin: Plugin, num_ranks: int, num_contexts: int = 2) -> Iterator[list[Rank]]:
    """Ranks of one process, connected; closed at the end."""
    ranks = [Rank(plugin, num_contexts) for _ in range(num_ranks)]
    handles = [rank.handle for rank in ranks]
    threads = [
        threading.Thread(target=rank.connect, args=(handles, index))
        for index, rank in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Poll a condition; False if it did not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


def exchange(path: str, pipe: Connection, rank: int) -> None:
    """Be one of two ranks, each a process: put a pattern to the other and check what it sent."""
    plugin = Plugin(Path(path))
    mine = Rank(plugin, 1)
    pipe.send(mine.handle.raw)
    others = ctypes.create_string_buffer(pipe.recv(), HANDLE_BYTES)
    handles = [mine.handle, others] if rank == 0 else [others, mine.handle]
    mine.connect(handles, rank)
    size = 100_000
    mine.window[:size] = bytes([1 + rank]) * size
    mine.put(1 - rank, 0, size, size)
    mine.signal(1 - rank, 0)
    came = wait_until(lambda: mine.signals[0] == 1)
    pipe.send(came and mine.window[size : 2 * size] == bytes([2 - rank]) * size)
    pipe.recv()  # the other is done as well
    mine.close()
