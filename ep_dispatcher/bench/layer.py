"""The whole MoE layer around a backend: plan, dispatch, experts, combine, and the way back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ep_dispatcher import EPGroup
from ep_dispatcher.bench.backends.base import Place, Received, Session
from ep_dispatcher.bench.check import WrongResult
from ep_dispatcher.bench.experts import Experts
from ep_dispatcher.bench.inputs import Inputs
from ep_dispatcher.bench.spec import Work

_ROUNDINGS = 8  # between x and the sum: two products, the gate, the weight, and their gradients
_FP32_SPREAD = 4  # accumulation errors of a long fp32 product, in standard deviations


class Layer:
    """Runs the layer over a session, and over the reference tier to compare with.

    Args:
        session: open, with its routing prepared.
        work: what is moved; `ffn_hidden` sizes the experts.
        place: where.
        inputs: of this rank.
    """

    def __init__(self, session: Session, work: Work, place: Place, inputs: Inputs) -> None:
        """Draw the experts."""
        self._session, self._work, self._place, self._inputs = session, work, place, inputs
        self._experts = Experts(work, work.num_experts // work.ranks, place.device)
        self._kept: tuple[Tensor, ...] = ()

    def forward(self) -> Tensor:
        """[T, H]: the layer's output."""
        session, inputs = self._session, self._inputs
        session.plan(_no_lap)
        received = session.dispatch(inputs.x, inputs.topk_weights, _no_lap)
        assert received.weights is not None
        rows = received.rows.detach().requires_grad_()
        weights = received.weights.detach().requires_grad_()
        expert_out = self._experts(rows, weights, received, session.empty_rows())
        self._kept = (rows, weights, expert_out)
        return session.combine(expert_out.detach(), _no_lap)

    def backward(self) -> Tensor:
        """[T, H]: gradient of the layer's input; uses what `forward` kept."""
        rows, weights, expert_out = self._kept
        grad_out = self._session.combine_backward(self._inputs.grad_out, _no_lap)
        wanted = [rows, weights, *self._experts.matrices]
        grads = torch.autograd.grad(expert_out, wanted, grad_out)
        self._kept = ()
        return self._session.dispatch_backward(grads[0], grads[1], _no_lap)[0]

    def check(self) -> None:
        """Compare output and input gradient with the reference tier around the same experts.

        Raises:
            WrongResult: they differ by more than rounding.
        """
        out = self.forward().clone()
        grad_x = self.backward().clone() if self._session.has_backward else None
        want_out, want_grad = self._reference()
        self._compare("layer_forward", out, want_out)
        if grad_x is not None:
            self._compare("layer_backward", grad_x, want_grad)

    def _reference(self) -> tuple[Tensor, Tensor]:
        """Output and input gradient of the layer over the reference tier."""
        inputs = self._inputs
        with EPGroup.create(self._place.group, self._work.ep_config("reference")) as group:
            plan = group.plan(inputs.topk_idx)
            x = inputs.x.detach().requires_grad_()
            rows, weights = group.dispatch(plan, x, inputs.topk_weights)
            assert weights is not None
            received = Received(
                rows=rows,
                weights=weights,
                tokens_per_expert=plan.tokens_per_expert,
                segment_rows=plan.padded_tokens_per_expert,
            )
            out = group.combine(plan, self._experts(rows, weights, received))
            (grad_x,) = torch.autograd.grad(out, x, inputs.grad_out)
        return out.detach(), grad_x

    def _compare(self, phase: str, got: Tensor, want: Tensor) -> None:
        """Compare [T, H] with the reference, as a share of the largest element of each token."""
        eps, eps32 = torch.finfo(got.dtype).eps, torch.finfo(torch.float32).eps
        longest = max(self._work.hidden, self._work.ffn_hidden)
        share = (_ROUNDINGS + self._work.num_topk) * eps
        share += _FP32_SPREAD * math.sqrt(longest) * eps32
        scale = want.abs().amax(dim=1, keepdim=True).double()
        wrong = ~((got.double() - want.double()).abs() <= share * scale)
        if bool(wrong.any()):
            token, column = wrong.nonzero()[0].tolist()
            raise WrongResult(
                f"{phase}: token {token} element {column} is {got[token, column].item():.6g}; the "
                f"reference tier has {want[token, column].item():.6g}; "
                f"{int(wrong.any(1).sum())} tokens differ by more than rounding"
            )


def _no_lap(phase: str) -> None:
    """Time nothing."""
