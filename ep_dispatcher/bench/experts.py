"""Experts for the whole layer: one gated two-matrix network for each local expert.

All backends get the same experts, run over expert-major segments, so that the layer's times differ
by the backend alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ep_dispatcher.bench.backends.base import Received
from ep_dispatcher.bench.spec import Work

_SEED = 12345


class Experts:
    """L networks down(silu(gate(x)) * up(x)), their output times the router weight.

    Args:
        work: gives H, the inner size and the dtype.
        num_local_experts: L.
        device: of the matrices.
    """

    def __init__(self, work: Work, num_local_experts: int, device: torch.device) -> None:
        """Draw the matrices."""
        generator = torch.Generator(device).manual_seed(_SEED)
        inner, hidden = work.ffn_hidden, work.hidden
        dtype = getattr(torch, work.dtype)

        def draw(rows: int, columns: int) -> Tensor:
            shape = (num_local_experts, rows, columns)
            values = torch.randn(shape, generator=generator, device=device) * rows**-0.5
            matrix: Tensor = values.to(dtype)
            return matrix.detach().requires_grad_()

        self.matrices = [draw(hidden, 2 * inner), draw(inner, hidden)]

    def __call__(
        self, rows: Tensor, weights: Tensor, received: Received, out: Tensor | None = None
    ) -> Tensor:
        """[R, H] and [R] to [R, H], segment by segment; in `out` [R, H] where there is one."""
        # Unbound at once: a gradient through `matrix[expert]` is as large as all experts' matrices.
        into, back = (matrix.unbind(0) for matrix in self.matrices)
        pieces = []
        sizes = received.segment_rows.tolist()
        tail = len(rows) - sum(sizes)
        for expert, segment in enumerate(rows.split([*sizes, tail])):
            if expert == len(sizes):
                pieces.append(torch.zeros_like(segment))
                continue
            gate, up = (segment @ into[expert]).chunk(2, dim=1)
            pieces.append((functional.silu(gate) * up) @ back[expert])
        before, factors = torch.cat(pieces), weights.unsqueeze(1).to(rows.dtype)
        if out is None:
            return before * factors
        written: Tensor = _ProductInto.apply(before, factors, out)  # type: ignore[no-untyped-call]
        return written


class _ProductInto(torch.autograd.Function):
    """[R, H] times [R, 1], written into a given [R, H]: autograd has no `out=` of its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factors: Tensor, out: Tensor) -> Tensor:  # noqa: ANN401
        """Keeps both factors, not the product."""
        ctx.save_for_backward(rows, factors)
        ctx.mark_dirty(out)
        return torch.mul(rows, factors, out=out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        """As that of a product."""
        rows, factors = ctx.saved_tensors
        return grad * factors, (grad * rows).sum(1, keepdim=True), None
