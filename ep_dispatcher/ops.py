"""The autograd pair: backward of dispatch is combine, and of combine is dispatch, on one plan.

Both are adjoint linear maps, so nothing is saved but the plan. A backward asks its tier first, as
the group may have been closed since.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ep_dispatcher import ranges
from ep_dispatcher.backend import Backend
from ep_dispatcher.plan import Plan
from ep_dispatcher.ranges import phase


class DispatchRows(Function):
    """[T, H], [T, K] -> [R, H], [R]."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        topk_weights: Tensor | None,
        plan: Plan,
        backend: Backend,
    ) -> tuple[Tensor, Tensor | None]:
        """Send rows and weights to the experts."""
        ctx.plan, ctx.backend = plan, backend
        with phase(ranges.DISPATCH, on_gpu=x.is_cuda):
            return backend.dispatch(plan, x.contiguous(), topk_weights)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_recv_x: Tensor,
        grad_recv_weights: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Sum the rows' gradients at home and bring each weight's gradient to its slot."""
        ctx.backend.check()
        with phase(ranges.DISPATCH_BACKWARD, on_gpu=grad_recv_x.is_cuda):
            grad_x, grad_weights = ctx.backend.combine(
                ctx.plan, grad_recv_x.contiguous(), grad_recv_weights
            )
        return grad_x, grad_weights, None, None


class CombineRows(Function):
    """[R, H] -> [T, H]."""

    @staticmethod
    def forward(ctx: Any, expert_out: Tensor, plan: Plan, backend: Backend) -> Tensor:  # noqa: ANN401
        """Sum each token's rows at its home rank."""
        ctx.plan, ctx.backend = plan, backend
        with phase(ranges.COMBINE, on_gpu=expert_out.is_cuda):
            return backend.combine(plan, expert_out.contiguous(), None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, None, None]:  # noqa: ANN401
        """Send each token's gradient to all its rows."""
        ctx.backend.check()
        with phase(ranges.COMBINE_BACKWARD, on_gpu=grad_out.is_cuda):
            return ctx.backend.dispatch(ctx.plan, grad_out.contiguous(), None)[0], None, None


def dispatch(
    x: Tensor, topk_weights: Tensor | None, plan: Plan, backend: Backend
) -> tuple[Tensor, Tensor | None]:
    """Differentiable `Backend.dispatch`."""
    recv: tuple[Tensor, Tensor | None] = DispatchRows.apply(x, topk_weights, plan, backend)  # type: ignore[no-untyped-call]
    return recv


def combine(expert_out: Tensor, plan: Plan, backend: Backend) -> Tensor:
    """Differentiable `Backend.combine` of rows."""
    out: Tensor = CombineRows.apply(expert_out, plan, backend)  # type: ignore[no-untyped-call]
    return out
