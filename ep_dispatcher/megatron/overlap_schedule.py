"""The order in which an MoE layer's chunks of tokens are launched, and on which stream.

Data flow   tokens are cut into chunks; each is planned, dispatched, computed and combined on its
            own, so a token's sum, and its bits, are those of the layer without chunks.
Streams     D dispatch and C combine on the communication stream, E experts on the caller's:
                communication P D0 | D1  D2 | C0  D3 | C1 ...        C(n-1)
                caller's        S  | E0  .  | E1  .  | E2 ...  E(n-1)  S
            Nothing of the chunks can run beside the plans, the first dispatch and the last combine;
            the shared experts S can, half of their tokens beside each end. All plans come first: in
            eager mode the host waits for each, and after them for nothing.
Backward    Nothing is written for it. Autograd runs a node on the stream of its forward and waits
            for exactly the events that it needs, and it takes nodes in reverse order of their
            creation. So the launch order below, read backwards, is the schedule of the backward.
Order       The same on every rank: it depends on the number of chunks alone.
Lifetime    L1 what the caller's stream allocated and the communication stream reads is recorded on
            the latter; L2 the other way round likewise; L3 the caller's stream waits for the
            communication stream before anything is returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ep_dispatcher import Plan
from ep_dispatcher.ranges import EXPERTS, phase

# Every chunk makes all weight gradients once more, to be added up, and has its own plan. With 1024,
# 2048 and 4096 rows an expert and chunk that cost more than two chunks hid (docs/overlap.md).
MIN_EXPERT_ROWS = 8192
MAX_AUTO_CHUNKS = 4


class ChunkSteps(Protocol):
    """What is done with one chunk; each but `experts` is collective."""

    def plan(self, topk_idx: Tensor) -> Plan:
        """Plan a routing [T, K]."""
        ...

    def dispatch(self, plan: Plan, x: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H], [T, K] -> [R, H], [R]."""
        ...

    def experts(self, plan: Plan, recv_x: Tensor, recv_weights: Tensor) -> Tensor:
        """[R, H], [R] -> [R, H]."""
        ...

    def combine(self, plan: Plan, expert_out: Tensor) -> Tensor:
        """[R, H] -> [T, H]."""
        ...


class Chunk(NamedTuple):
    """Some consecutive tokens of a rank: routes [T, K], rows [T, H] and weights [T, K]."""

    topk_idx: Tensor
    x: Tensor
    topk_weights: Tensor


class Received(NamedTuple):
    """Rows and weights at their experts, and when they are there."""

    recv_x: Tensor
    recv_weights: Tensor
    arrived: torch.cuda.Event | None


class Computed(NamedTuple):
    """What the experts made of a chunk, and when it is there."""

    expert_out: Tensor
    done: torch.cuda.Event | None


def auto_chunks(num_tokens: int, num_topk: int, num_local_experts: int) -> int:
    """Number of chunks where the config says "auto".

    As many as leave every local expert `MIN_EXPERT_ROWS` rows of a balanced routing, at most
    `MAX_AUTO_CHUNKS`. All arguments are equal on all ranks, so the answer is.

    Args:
        num_tokens: bound on T.
        num_topk: K.
        num_local_experts: L.

    Example: T=32768, K=8, L=16 -> 16384 rows an expert -> 2 chunks.
    """
    rows = num_tokens * num_topk // num_local_experts
    return max(1, min(MAX_AUTO_CHUNKS, rows // MIN_EXPERT_ROWS))


def cut(topk_idx: Tensor, x: Tensor, topk_weights: Tensor, num_chunks: int) -> list[Chunk]:
    """Cut tokens into `num_chunks` runs whose lengths differ by one at most; some may be empty."""
    base, longer = divmod(len(x), num_chunks)
    sizes = [base + (index < longer) for index in range(num_chunks)]
    parts = zip(topk_idx.split(sizes), x.split(sizes), topk_weights.split(sizes), strict=True)
    return [Chunk(*part) for part in parts]


class Lanes:
    """The caller's stream and the communication stream; on a machine without streams, neither.

    Args:
        communication: a stream of the GPU that the rows lie on; None on the CPU.
    """

    def __init__(self, communication: torch.cuda.Stream | None) -> None:
        """Take the current stream as the caller's."""
        self.communication = communication
        self.compute = None if communication is None else torch.cuda.current_stream()

    def communicating(self) -> contextlib.AbstractContextManager[object]:
        """What is launched inside goes to the communication stream."""
        if self.communication is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self.communication)

    def computed(self) -> torch.cuda.Event | None:
        """An event after what the caller's stream has launched so far."""
        return None if self.compute is None else self.compute.record_event()

    def arrived(self) -> torch.cuda.Event | None:
        """An event after what the communication stream has launched so far."""
        return None if self.communication is None else self.communication.record_event()

    def lend(self, event: torch.cuda.Event | None, *tensors: Tensor) -> None:
        """Let the communication stream read tensors of the caller's stream (L1)."""
        _hand_over(self.communication, event, tensors)

    def take(self, event: torch.cuda.Event | None, *tensors: Tensor) -> None:
        """Let the caller's stream read tensors of the communication stream (L2)."""
        _hand_over(self.compute, event, tensors)


def _hand_over(
    stream: torch.cuda.Stream | None, event: torch.cuda.Event | None, tensors: Sequence[Tensor]
) -> None:
    """Let a stream wait for an event, and their memory for the stream's use of tensors."""
    if stream is None:
        return
    assert event is not None
    stream.wait_event(event)
    for tensor in tensors:
        tensor.record_stream(stream)


def run_chunks(
    steps: ChunkSteps,
    chunks: Sequence[Chunk],
    lanes: Lanes,
    *,
    beside_dispatch: Callable[[], None],
    beside_combine: Callable[[], None],
) -> list[Tensor]:
    """Run all chunks of a layer; collective, differentiable.

    Args:
        steps: the layer's.
        chunks: this rank's; equally many on all ranks.
        lanes: streams.
        beside_dispatch: launched on the caller's stream beside the plans and the first dispatch.
        beside_combine: likewise, beside the last combine.

    Returns:
        [T, H] of each chunk, ready on the caller's stream.
    """
    ready = lanes.computed()
    for chunk in chunks:
        lanes.lend(ready, *chunk)
    beside_dispatch()
    with lanes.communicating():
        plans = [steps.plan(chunk.topk_idx) for chunk in chunks]

    def dispatch(index: int) -> Received:
        with lanes.communicating():
            chunk = chunks[index]
            rows = steps.dispatch(plans[index], chunk.x, chunk.topk_weights)
            return Received(*rows, lanes.arrived())

    def combine(index: int, computed: Computed) -> Tensor:
        lanes.lend(computed.done, computed.expert_out)
        with lanes.communicating():
            return steps.combine(plans[index], computed.expert_out)

    def experts(index: int, rows: Received) -> Computed:
        lanes.take(rows.arrived, rows.recv_x, rows.recv_weights)
        with phase(EXPERTS, on_gpu=rows.recv_x.is_cuda):
            expert_out = steps.experts(plans[index], rows.recv_x, rows.recv_weights)
        return Computed(expert_out, lanes.computed())

    received = dispatch(0)
    outs: list[Tensor] = []
    computed: Computed | None = None
    for index in range(len(chunks)):
        here = received
        if index + 1 < len(chunks):
            received = dispatch(index + 1)
        before, computed = computed, experts(index, here)
        if before is not None:
            outs.append(combine(index - 1, before))
    assert computed is not None
    outs.append(combine(len(chunks) - 1, computed))
    beside_combine()
    lanes.take(lanes.arrived(), *outs)  # L3
    return outs
