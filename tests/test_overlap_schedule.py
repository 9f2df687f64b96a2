"""The order in which an MoE layer's chunks are launched, and what streams wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import Function

from ep_dispatcher.megatron import overlap_schedule
from ep_dispatcher.megatron.overlap_schedule import Chunk, Lanes, auto_chunks, cut, run_chunks


class Logged(Function):
    """Adds one; its forward and backward write their names into a log."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, log: list[str], name: str) -> Tensor:  # noqa: ANN401
        """Log the name."""
        ctx.log, ctx.name = log, name
        log.append(name)
        return rows + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Log the name in lower case."""
        ctx.log.append(ctx.name.lower())
        return grad, None, None


class LoggedSteps:
    """Steps that move nothing; a plan is the number of its chunk."""

    def __init__(self) -> None:
        """An empty log."""
        self.log: list[str] = []
        self._plans = 0

    def plan(self, topk_idx: Tensor) -> Any:  # noqa: ANN401
        """The next number."""
        self._plans += 1
        self.log.append(f"P{self._plans - 1}")
        return self._plans - 1

    def dispatch(self, plan: Any, x: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """D."""
        return Logged.apply(x, self.log, f"D{plan}"), topk_weights  # type: ignore[no-untyped-call]

    def experts(self, plan: Any, recv_x: Tensor, recv_weights: Tensor) -> Tensor:  # noqa: ANN401
        """E."""
        rows: Tensor = Logged.apply(recv_x, self.log, f"E{plan}")  # type: ignore[no-untyped-call]
        return rows

    def combine(self, plan: Any, expert_out: Tensor) -> Tensor:  # noqa: ANN401
        """C."""
        rows: Tensor = Logged.apply(expert_out, self.log, f"C{plan}")  # type: ignore[no-untyped-call]
        return rows


def run(num_tokens: int, num_chunks: int) -> tuple[list[str], Tensor]:
    """The launches of a layer, forward and backward, and its output."""
    steps = LoggedSteps()
    x = torch.arange(4.0 * num_tokens).view(num_tokens, 4).requires_grad_()
    routes = torch.zeros(num_tokens, 2, dtype=torch.int64)
    chunks = cut(routes, x, torch.ones(num_tokens, 2), num_chunks)
    outs = run_chunks(
        steps,
        chunks,
        Lanes(None),
        beside_dispatch=lambda: steps.log.append("S"),
        beside_combine=lambda: steps.log.append("S"),
    )
    out = torch.cat(outs)
    assert torch.equal(out, x + 3)
    out.backward(torch.ones_like(out))
    return steps.log, out


def test_launches_of_three_chunks() -> None:
    """Forward: the next dispatch before the experts, the last combine behind them.

    Shared experts (S) run beside the plans and the first dispatch, and beside the last combine.

    Backward: the mirror image, so the gradients of the next chunk are on their way while the
    experts of this one run.
    """
    log, _ = run(6, 3)
    words = " ".join(log)
    forward, backward = words.split(" C2 S ")
    assert forward == "S P0 P1 P2 D0 D1 E0 D2 E1 C0 E2 C1"
    assert backward == "c2 c1 e2 c0 e1 d2 e0 d1 d0"


@given(num_tokens=st.integers(0, 9), num_chunks=st.integers(1, 6))
def test_launch_order_depends_on_the_number_of_chunks_alone(
    num_tokens: int, num_chunks: int
) -> None:
    """Ranks with other numbers of tokens, none among them, launch in the same order."""
    assert run(num_tokens, num_chunks)[0] == run(7, num_chunks)[0]


@given(num_tokens=st.integers(0, 50), num_chunks=st.integers(1, 16))
def test_chunks_are_all_tokens_in_order(num_tokens: int, num_chunks: int) -> None:
    """Nothing is lost or swapped; lengths differ by one at most."""
    x = torch.arange(float(num_tokens)).view(-1, 1)
    chunks = cut(x.long(), x, x, num_chunks)
    sizes = [len(chunk.x) for chunk in chunks]
    assert torch.equal(torch.cat([chunk.x for chunk in chunks]), x)
    assert len(chunks) == num_chunks
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("tokens", "topk", "local", "expected"),
    [(32768, 8, 16, 2), (65536, 8, 4, 4), (4096, 8, 4, 1), (0, 8, 64, 1), (64, 2, 2, 1)],
)
def test_auto_leaves_each_expert_enough_rows(
    tokens: int, topk: int, local: int, expected: int
) -> None:
    """8192 rows an expert and chunk in a balanced routing, four chunks at most, one at least."""
    assert auto_chunks(tokens, topk, local) == expected


class Stream:
    """A stream without a GPU: what has happened for sure when its next launch runs."""

    def __init__(self, name: str) -> None:
        """Nothing was launched."""
        self.name = name
        self.happened: set[str] = set()

    def record_event(self) -> frozenset[str]:
        """What has happened when this event is reached."""
        return frozenset(self.happened)

    def wait_event(self, event: frozenset[str]) -> None:
        """Everything launched from now on runs after the event."""
        self.happened |= event


class TwoStreams:
    """Steps on two streams, and what was wrong with their order or with the use of memory.

    A step's outputs are new tensors, made on the stream on which the step runs.
    """

    def __init__(self) -> None:
        """The caller's stream is current."""
        self.compute, self.communication = Stream("caller's"), Stream("communication")
        self.current = self.compute
        self.wrong: list[str] = []
        self.launched: list[str] = []
        self._made: dict[int, tuple[Tensor, str, Stream]] = {}
        self._used: set[tuple[int, str]] = set()
        self._kept: set[tuple[int, str]] = set()

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Stands for torch.cuda.stream."""
        before, self.current = self.current, stream
        yield
        self.current = before

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Stands for Tensor.record_stream."""
        self._kept.add((id(tensor), stream.name))

    def make(self, name: str, *shape: int) -> Tensor:
        """A tensor of the current stream, written by the launch `name`."""
        made = torch.zeros(*shape, dtype=torch.int64)
        self._made[id(made)] = (made, name, self.current)
        return made

    def launch(self, name: str, reads: Sequence[Tensor]) -> None:
        """Something runs on the current stream; note what it reads too early."""
        self.launched.append(f"{name} on {self.current.name}")
        for tensor in reads:
            _, maker, _ = self._made[id(tensor)]
            if maker not in self.current.happened:
                self.wrong.append(f"{name} does not wait for {maker}")
            self._used.add((id(tensor), self.current.name))
        self.current.happened.add(name)

    def forgotten(self) -> list[str]:
        """Uses of another stream's memory that torch was not told of."""
        found = []
        for tensor, name in sorted(self._used - self._kept):
            _, maker, home = self._made[tensor]
            if home.name != name:
                found.append(f"what {maker} made is not kept for the {name} stream")
        return found

    def plan(self, topk_idx: Tensor) -> Any:  # noqa: ANN401
        """P; the plan is the number of its chunk."""
        number = sum(each.startswith("P") for each in self.launched)
        self.launch(f"P{number}", [topk_idx])
        return number

    def dispatch(self, plan: Any, x: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """D."""
        self.launch(f"D{plan}", [x, topk_weights])
        return self.make(f"D{plan}", 1, 1), self.make(f"D{plan}", 1)

    def experts(self, plan: Any, recv_x: Tensor, recv_weights: Tensor) -> Tensor:  # noqa: ANN401
        """E."""
        self.launch(f"E{plan}", [recv_x, recv_weights])
        return self.make(f"E{plan}", 1, 1)

    def combine(self, plan: Any, expert_out: Tensor) -> Tensor:  # noqa: ANN401
        """C."""
        self.launch(f"C{plan}", [expert_out])
        return self.make(f"C{plan}", 1, 1)


def on_two_streams(num_chunks: int) -> TwoStreams:
    """Run a layer's chunks, whose tensors the caller's stream makes and whose sums it reads."""
    streams = TwoStreams()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda: streams.current)
        patch.setattr(torch.cuda, "stream", streams.stream)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: streams.keep(tensor, stream))
        streams.launch("router", [])
        chunks = [
            Chunk(*(streams.make("router", 1, 1) for _ in Chunk._fields)) for _ in range(num_chunks)
        ]
        outs = run_chunks(
            streams,
            chunks,
            Lanes(streams.communication),  # type: ignore[arg-type]
            beside_dispatch=lambda: streams.launch("S0", []),
            beside_combine=lambda: streams.launch("S1", []),
        )
        streams.launch("cat", outs)
    return streams


def broken(*, event: bool, memory: bool) -> Callable[..., None]:
    """`_hand_over` without the wait, or without telling torch of the use, or without both."""

    def hand_over(stream: Any, at: Any, tensors: Sequence[Tensor]) -> None:  # noqa: ANN401
        if not event:
            stream.wait_event(at)
        if not memory:
            for tensor in tensors:
                tensor.record_stream(stream)

    return hand_over


@given(num_chunks=st.integers(1, 5))
def test_streams_wait_for_what_they_read_and_keep_its_memory(num_chunks: int) -> None:
    """L1, L2 and L3, for every hand-over of a forward; only communication is on its stream.

    Those of the backward are autograd's (tests/test_megatron_overlap_gpu.py runs them).
    """
    streams = on_two_streams(num_chunks)
    assert streams.wrong == []
    assert streams.forgotten() == []
    for each in streams.launched:
        assert each.endswith("communication") == (each[0] in "PDC"), each


def test_a_hand_over_that_does_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: two chunks, every hand-over left out in turn."""
    waits = {
        "P0 does not wait for router", "P1 does not wait for router",
        "D0 does not wait for router", "D1 does not wait for router",
        "E0 does not wait for D0", "E1 does not wait for D1",
        "C0 does not wait for E0", "C1 does not wait for E1",
        "cat does not wait for C0", "cat does not wait for C1",
    }  # fmt: skip
    kept = {
        f"what {maker} made is not kept for the {name} stream"
        for maker, name in (
            ("router", "communication"), ("D0", "caller's"), ("D1", "caller's"),
            ("E0", "communication"), ("E1", "communication"),
            ("C0", "caller's"), ("C1", "caller's"),
        )
    }  # fmt: skip
    for event, memory in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(overlap_schedule, "_hand_over", broken(event=event, memory=memory))
        streams = on_two_streams(2)
        assert set(streams.wrong) == (waits if event else set())
        assert set(streams.forgotten()) == (kept if memory else set())
