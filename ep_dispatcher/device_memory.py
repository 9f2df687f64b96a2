"""Output rows from the registered arena, as ordinary tensors of a torch memory pool.

The pool has one segment, the arena's heap, from which torch's caching allocator cuts blocks. So
the rows can be resized, freed and kept like any tensor, and peers can address them.

A block of the caching allocator belongs to one stream. The pool's is the stream of its first use
(the home stream); there nothing is waited for, as with any tensor. A call on another stream waits,
on the device, for what the home stream had been given by the time the same piece of the heap was
let go, and for nothing that came after: so communication runs beside later work of the home stream.
Its rows are given back when that stream is done with them; a third one that reads them has to be
told by `record_stream`, as with any tensor.

Rows of a captured call are kept until the group is closed: replays write them, and nothing tells
when a graph is gone. They are part of the heap, so what captures keep is never more than the heap.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ep_dispatcher.config import DTYPE_BYTES, Combine, EpConfig, Topology
from ep_dispatcher.errors import CapacityError

HEAP_STEP_BYTES = 2 << 20  # segments are whole multiples of it
_SMALLEST_HEAP_BYTES = 64 << 20
_DEFAULT_BALANCED_OUTPUTS = 4
_GATHERED_OUTPUTS = 2  # expert rows that combine reads, forward and backward
# Smaller requests would go to segments for small blocks, which the arena has not.
_SMALLEST_BLOCK_BYTES = (1 << 20) + 512


def heap_bytes_of(config: EpConfig, topology: Topology, form: Combine) -> int:
    """Size of the heap that a group's output rows are cut from.

    Without `output_bytes` in the config: room for four outputs of a balanced routing (in static
    mode, of the capacity) and two more where combine gathers, at least 64 MiB.

    Args:
        config: of the group.
        topology: of the group.
        form: of combine, as `combine_form.choose_combine` chose it: "push" or "gather".

    Example: T=4096, H=7168 of BF16, K=8, E=256, 8 ranks -> 1.88 GB to push, 2.82 GB to gather.
    """
    shape = config.shape
    if config.output_bytes is not None:
        wanted = config.output_bytes
    else:
        experts = -(-shape.num_experts // topology.ep_size)
        balanced = config.max_tokens_per_rank * shape.num_topk + experts * (config.alignment - 1)
        rows = balanced if config.recv_capacity_rows is None else config.recv_capacity_rows
        weight_bytes = DTYPE_BYTES["float32"]
        outputs = _DEFAULT_BALANCED_OUTPUTS
        outputs += _GATHERED_OUTPUTS if form == "gather" else 0
        wanted = outputs * rows * (shape.row_bytes + weight_bytes)
        wanted = max(wanted, _SMALLEST_HEAP_BYTES)
    return -(-wanted // HEAP_STEP_BYTES) * HEAP_STEP_BYTES


@functools.cache
def _allocator(file: str) -> torch.cuda.memory.CUDAPluggableAllocator:
    """The native module's functions as an allocator, one for the life of the process.

    Blocks that users hold may be the last to use it, long after their group was closed.
    """
    return torch.cuda.memory.CUDAPluggableAllocator(file, "ep_segment_alloc", "ep_segment_free")


def _fills_new_memory() -> bool:
    """Whether torch launches a kernel on a tensor that it makes, to fill it with NaN."""
    fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.are_deterministic_algorithms_enabled() and fills


def _span_of(block: Tensor) -> tuple[int, int]:
    """First address of a block and the one after its last."""
    start = block.data_ptr()
    return start, start + block.untyped_storage().nbytes()


class _Piece(NamedTuple):
    """Addresses that a block holds until its storage is gone."""

    storage: Any
    start: int
    end: int


class ReuseLog:
    """Says what a stream must wait for before it writes to memory that the home stream used.

    Blocks go back without notice, so each call looks which are gone and takes an event of the home
    stream: what used them there was launched before.
    """

    def __init__(self) -> None:
        """Nothing is held yet."""
        self._held: list[_Piece] = []
        self._freed: deque[tuple[Any, list[_Piece]]] = deque()

    def hold(self, block: Tensor) -> None:
        """Watch a block that was handed out."""
        self._held.append(_Piece(StorageWeakRef(block.untyped_storage()), *_span_of(block)))

    def sweep(self, block: Tensor, record_event: Callable[[], Any]) -> None:
        """Find what is gone, forget what was read to its end; before `hold` of the block.

        Args:
            block: just cut; what lay at its addresses is gone, also where a storage was only
                resized to nothing.
            record_event: takes an event of the home stream as it is now.
        """
        start, end = _span_of(block)
        gone = [
            piece
            for piece in self._held
            if piece.storage.expired() or (piece.start < end and start < piece.end)
        ]
        if gone:
            freed = {id(piece) for piece in gone}
            self._held = [piece for piece in self._held if id(piece) not in freed]
            self._freed.append((record_event(), gone))
        while self._freed and self._freed[0][0].query():
            self._freed.popleft()

    def events_before(self, block: Tensor) -> list[Any]:
        """Events to wait for before a block's memory is written on another stream than home."""
        start, end = _span_of(block)
        return [
            event
            for event, pieces in self._freed
            if any(piece.start < end and start < piece.end for piece in pieces)
        ]


class OutputPool:
    """Hands out tensors that lie in an arena.

    Args:
        module: the native module.
        arena: whose heap to use; it must be shared already.
        device: the GPU.

    Attributes:
        refused_bytes: that the last call of `empty` had no room for; 0 if it had.
    """

    def __init__(self, module: Any, arena: Any, device: torch.device) -> None:  # noqa: ANN401
        """Make the pool; the heap is taken at the first call of `empty`."""
        self._module = module
        self._arena = arena
        self._device = device
        self._pool = torch.cuda.MemPool(_allocator(module.__file__).allocator())
        self._home: torch.cuda.Stream | None = None
        self._anchor: Tensor | None = None
        self._captured: list[Tensor] = []
        self._reuse = ReuseLog()
        self._lock = threading.Lock()  # autograd's backward runs in a thread of its own
        self.refused_bytes = 0

    @property
    def heap_bytes(self) -> int:
        """Size of all that rows are cut from."""
        return int(self._arena.heap_bytes)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor in the arena, ready for use on the current stream.

        Args:
            shape: sizes.
            dtype: of the elements.

        Raises:
            CapacityError: the heap has no free piece of that size; names the size that would do.
        """
        with self._lock:
            home = self._home or self._open()
            current = torch.cuda.current_stream(self._device)
            with torch.cuda.stream(home):
                block = self._block(shape, dtype)
            if not block.numel():
                pass  # takes nothing of the heap
            elif torch.cuda.is_current_stream_capturing():
                self._captured.append(block)  # a replay writes it again, whoever holds it then
            else:
                # After the cut: whatever lay there before is gone by now, and found to be.
                self._reuse.sweep(block, home.record_event)
                self._reuse.hold(block)
                if current != home:
                    self._await_users(block, current)
            self.refused_bytes = 0
        return block

    def offset_of(self, tensor: Tensor | None) -> int:
        """Bytes from the start of the window to a tensor from `empty`; -1 for None."""
        if tensor is None:
            return -1
        start = tensor.data_ptr() if tensor.numel() else self._arena.heap
        return int(start - self._arena.base)

    def holding(self, tensor: Tensor) -> Tensor:
        """The contiguous tensor itself if it lies in the arena, else a copy that does.

        Raises:
            CapacityError: the heap has no room for the copy.
        """
        start, end = self._arena.heap, self._arena.heap + self._arena.heap_bytes
        if tensor.numel() == 0 or start <= tensor.data_ptr() < end:
            return tensor
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def close(self) -> None:
        """Let go of the heap; tensors that users still hold stay valid."""
        self._captured.clear()
        self._anchor = None

    def _await_users(self, block: Tensor, current: torch.cuda.Stream) -> None:
        """Let a stream wait for the home stream's users of the memory, and torch for the stream."""
        if _fills_new_memory():
            assert self._home is not None
            current.wait_stream(self._home)  # which has just been given the filling
        for event in self._reuse.events_before(block):
            current.wait_event(event)
        block.record_stream(current)

    def _open(self) -> torch.cuda.Stream:
        """Make the heap the pool's one segment, owned by the current stream."""
        home = torch.cuda.current_stream(self._device)
        with self._module.SegmentOffer(self._arena), self._allocations():
            whole = torch.empty(self._arena.heap_bytes, dtype=torch.uint8, device=self._device)
        assert whole.data_ptr() == self._arena.heap
        del whole
        with self._allocations():  # while it lives, torch cannot give the segment back
            self._anchor = torch.empty(
                _SMALLEST_BLOCK_BYTES, dtype=torch.uint8, device=self._device
            )
        self._home = home
        return home

    def _allocations(self) -> Any:  # noqa: ANN401
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def _block(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Cut a block; where there is none, wait for blocks that other streams still use."""
        elements = 1
        for size in shape:
            elements *= size
        if elements == 0:
            return torch.empty(shape, dtype=dtype, device=self._device)
        elements = max(elements, -(-_SMALLEST_BLOCK_BYTES // dtype.itemsize))
        try:
            block = self._cut(elements, dtype)
        except torch.OutOfMemoryError:
            torch.cuda.synchronize(self._device)
            # Outside the pool, torch looks which blocks other streams have finished with.
            torch.empty(1, device=self._device)
            try:
                block = self._cut(elements, dtype)
            except torch.OutOfMemoryError:
                raise self._exhausted(elements * dtype.itemsize) from None
        if not self._arena.heap <= block.data_ptr() < self._arena.heap + self._arena.heap_bytes:
            raise CapacityError(
                "output rows cannot be taken from the arena while a graph is captured on the "
                "stream of the group's first dispatch; capture on another stream"
            )
        return block.resize_(shape)

    def _cut(self, elements: int, dtype: torch.dtype) -> Tensor:
        with self._allocations():
            return torch.empty(elements, dtype=dtype, device=self._device)

    def _exhausted(self, needed_bytes: int) -> CapacityError:
        heap = self.heap_bytes
        self.refused_bytes = needed_bytes
        enough = -(-(heap + needed_bytes) // HEAP_STEP_BYTES) * HEAP_STEP_BYTES
        captured = sum(block.untyped_storage().nbytes() for block in self._captured)
        graphs = (
            f" ({captured} bytes of it belong to captured graphs until the group is closed: "
            "capture each graph once)"
            if captured
            else ""
        )
        return CapacityError(
            f"output rows of {needed_bytes} bytes do not fit into what is free of output_bytes="
            f"{heap}{graphs}; output_bytes={enough} would do here, or keep fewer outputs alive"
        )
