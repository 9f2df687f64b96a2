"""Checks a backend's results against what they must be, computed densely and without communication.

Every rank draws the inputs of all ranks from their seeds, so nothing here shares code or messages
with a backend under test. Rows of one expert may come in any order (only ours promises one); they
are matched by the first 8 bytes of each row, then compared bit for bit. Sums are compared with a
float64 sum: the bound is what rounding to the row dtype after every addition can cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_dispatcher.bench.backends.base import Received
from ep_dispatcher.bench.inputs import Inputs, make_inputs
from ep_dispatcher.bench.spec import Work
from ep_dispatcher.errors import EpError
from ep_dispatcher.plan import Placement

_KEY_BYTES = 8


class WrongResult(EpError):  # noqa: N818  # a verdict
    """A backend's result differs from the reference; the message says where."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Arrivals:
    """Rows that one rank must receive, by (local expert, source rank, token, slot).

    Attributes:
        rows: [R, H] of x.
        weights: [R] fp32.
        grads: [R, H] of grad_out.
        tokens_per_expert: [L] int64 on the CPU.
        experts: [L] int64 on the CPU, global ids.
    """

    rows: Tensor
    weights: Tensor
    grads: Tensor
    tokens_per_expert: Tensor
    experts: Tensor


class Checker:
    """Knows what every call of one rank must return.

    Args:
        work: what is moved.
        rank: this rank.
        inputs: what this rank feeds in.

    Attributes:
        max_error: largest difference of a sum from the float64 sum so far, as a share of the sum
            of its terms' magnitudes.
    """

    def __init__(self, work: Work, rank: int, inputs: Inputs) -> None:
        """Draw all ranks' inputs and sort out what arrives here."""
        self._work, self._inputs = work, inputs
        self._device = inputs.x.device
        self._arrivals = arrivals_of(work, rank, self._device)
        self.max_error = 0.0
        self._order = torch.empty(0)

    def expert_out(self, received: Received) -> Tensor:
        """What the experts give back: each row times its weight and a factor of its expert."""
        assert received.weights is not None
        return self._scaled(received.rows, received.weights, received.segment_rows)

    def grad_rows(self, received: Received) -> tuple[Tensor, Tensor]:
        """Gradients that go into the backward of dispatch: of the rows and of their weights."""
        assert received.weights is not None
        half = torch.full_like(received.weights, 0.5)
        factors = self._row_factors(received.segment_rows, len(received.rows))
        rows = self._scaled(received.rows, half, received.segment_rows)
        return rows, received.weights * factors

    def dispatch(self, received: Received) -> None:
        """Compare rows and weights bit for bit.

        Raises:
            WrongResult: they differ.
        """
        want = self._arrivals
        if not torch.equal(received.tokens_per_expert, want.tokens_per_expert):
            raise WrongResult(
                f"dispatch: tokens_per_expert is {received.tokens_per_expert.tolist()[:8]}...; the "
                f"reference has {want.tokens_per_expert.tolist()[:8]}..."
            )
        if received.weights is None:
            raise WrongResult("dispatch: the router weights did not arrive")
        real = _real_rows(received)
        self._order = real[_canonical(received.rows[real], want.tokens_per_expert)]
        reference = _canonical(want.rows, want.tokens_per_expert)
        _same_bits("dispatch: rows", received.rows[self._order], want.rows[reference])
        _same_bits("dispatch: weights", received.weights[self._order], want.weights[reference])

    def combine(self, out: Tensor) -> None:
        """Compare the sums of `expert_out` with the float64 sums."""
        self._sums("combine", out, self._inputs.topk_weights)

    def combine_backward(self, grad_rows: Tensor) -> None:
        """Compare the gradient rows bit for bit, in the order found by `dispatch`."""
        want = self._arrivals
        reference = _canonical(want.rows, want.tokens_per_expert)
        _same_bits("combine_backward: rows", grad_rows[self._order], want.grads[reference])

    def dispatch_backward(self, grad_x: Tensor, grad_weights: Tensor | None) -> None:
        """Compare the sums of `grad_rows`, and the weights' gradients where there are any."""
        inputs = self._inputs
        self._sums("dispatch_backward", grad_x, torch.full_like(inputs.topk_weights, 0.5))
        if grad_weights is not None:
            factors = expert_factors(inputs.topk_idx.clamp(min=0))
            want = (inputs.topk_weights * factors).masked_fill(inputs.topk_idx < 0, 0)
            _same_bits("dispatch_backward: weights", grad_weights, want)

    def _scaled(self, rows: Tensor, weights: Tensor, segment_rows: Tensor) -> Tensor:
        factors = self._row_factors(segment_rows, len(rows))
        return (rows.float() * (weights * factors).unsqueeze(1)).to(rows.dtype)

    def _row_factors(self, segment_rows: Tensor, num_rows: int) -> Tensor:
        """[R] fp32, factor of each row's expert; 0 behind the last segment."""
        per_row = expert_factors(self._arrivals.experts).repeat_interleave(segment_rows)
        factors = torch.zeros(num_rows)
        factors[: len(per_row)] = per_row
        return factors.to(self._device)

    def _sums(self, phase: str, out: Tensor, weights: Tensor) -> None:
        """Compare [T, H] with the sum over slots of x times weight times the expert's factor."""
        exact, magnitude = exact_sums(self._inputs.x, self._inputs.topk_idx, weights)
        if out.shape != exact.shape:
            raise WrongResult(f"{phase}: shape {list(out.shape)}, not {list(exact.shape)}")
        error = (out.double() - exact).abs()
        eps = torch.finfo(out.dtype).eps
        bad = ~(error <= (self._work.num_topk / 2 + 2) * eps * magnitude)
        if bool(bad.any()):
            token, column = bad.nonzero()[0].tolist()
            raise WrongResult(
                f"{phase}: token {token} element {column} is {out[token, column].item():.6g}; the "
                f"reference has {exact[token, column].item():.6g}; {int(bad.any(1).sum())} tokens "
                "differ by more than rounding"
            )
        if error.numel():
            share = (error / magnitude.clamp(min=1e-30)).max()
            self.max_error = max(self.max_error, float(share))


def arrivals_of(work: Work, rank: int, device: torch.device) -> Arrivals:
    """What `rank` receives, from the seeds of all ranks."""
    placement = Placement.even(work.num_experts, work.ranks)
    experts = placement.local_experts(rank)
    local_of = torch.full((work.num_experts + 1,), -1)  # the last entry takes -1
    local_of[experts] = torch.arange(len(experts))
    local_of = local_of.to(device)
    local, rows, weights, grads = [], [], [], []
    for source in range(work.ranks):
        inputs = make_inputs(work, source, device)
        where = local_of[inputs.topk_idx]
        token, slot = (where >= 0).nonzero(as_tuple=True)
        local.append(where[token, slot])
        rows.append(inputs.x[token])
        weights.append(inputs.topk_weights[token, slot])
        grads.append(inputs.grad_out[token])
    order = torch.argsort(torch.cat(local), stable=True)
    return Arrivals(
        rows=torch.cat(rows)[order],
        weights=torch.cat(weights)[order],
        grads=torch.cat(grads)[order],
        tokens_per_expert=torch.bincount(torch.cat(local), minlength=len(experts)).cpu(),
        experts=experts,
    )


def expert_factors(experts: Tensor) -> Tensor:
    """A factor for each expert id, exact in fp32, so that a row at the wrong expert shows.

    Example: experts 0, 1, 8 -> 1, 1.125, 1.125.
    """
    return 1 + (experts % 7).float() / 8


def exact_sums(x: Tensor, topk_idx: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[T, H] float64: the sum of each token's expert rows, and of their magnitudes."""
    exact = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    magnitude = torch.zeros_like(exact)
    for experts, weight in zip(topk_idx.unbind(1), weights.unbind(1), strict=True):
        scale = (weight * expert_factors(experts.clamp(min=0))).masked_fill(experts < 0, 0)
        # The experts round each row to the dtype, so the terms of the sum are rounded ones.
        term = (x.float() * scale.unsqueeze(1)).to(x.dtype).double()
        exact += term
        magnitude += term.abs()
    return exact, magnitude


def _real_rows(received: Received) -> Tensor:
    """[sum of tokens_per_expert] int64: positions of the rows that are no padding."""
    segments = received.segment_rows
    starts = segments.cumsum(0) - segments
    real = [
        torch.arange(int(first), int(first + count))
        for first, count in zip(starts, received.tokens_per_expert, strict=True)
    ]
    return torch.cat(real).to(received.rows.device)


def _canonical(rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """[R] int64: the order by (expert, first bytes of the row)."""
    if not len(rows):
        return torch.empty(0, dtype=torch.int64, device=rows.device)
    head = rows[:, : _KEY_BYTES // rows.element_size()].contiguous()
    key = head.view(torch.int64).flatten()
    expert = torch.arange(len(tokens_per_expert)).repeat_interleave(tokens_per_expert)
    by_key = torch.argsort(key, stable=True)
    return by_key[torch.argsort(expert.to(rows.device)[by_key], stable=True)]


def _same_bits(what: str, got: Tensor, want: Tensor) -> None:
    """Raise WrongResult unless two tensors are equal; -0 equals 0."""
    if got.shape != want.shape:
        raise WrongResult(f"{what}: shape {list(got.shape)}, not {list(want.shape)}")
    if torch.equal(got, want):
        return
    place = (got != want).nonzero()[0].tolist()
    raise WrongResult(
        f"{what} differ from the reference, first at {place}: {got[tuple(place)].item():.6g}, not "
        f"{want[tuple(place)].item():.6g}; {int((got != want).sum())} elements differ"
    )
