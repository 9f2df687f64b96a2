"""The order in which an MoE layer's chunks are launched, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import Function

from ep_dispatcher.megatron.overlap_schedule import Lanes, auto_chunks, cut, run_chunks


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
