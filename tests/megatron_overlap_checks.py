"""Properties of the MoE layer that runs in chunks, each checked by 4 ranks; see megatron_checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron_checks import layout, make_layer, make_tokens
from torch import Tensor

from ep_dispatcher import ops
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.megatron.overlap import OverlappedMoELayer
from ep_dispatcher.megatron.plugin import EpPlugin
from ep_dispatcher.ranges import SHARED_EXPERTS

SHARED = {"moe_shared_expert_intermediate_size": 32}


class RowExperts(torch.nn.Module):
    """Experts whose rows do not depend on how many there are, as those of a GEMM may."""

    def forward(self, rows: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Apply the weights."""
        assert int(counts.sum()) == len(rows)
        return rows * weights.unsqueeze(-1), None


@dataclass(frozen=True)
class Result:
    """What a layer made: output, gradient of its input, gradients of its weights, its weights."""

    out: Tensor
    grad: Tensor
    weight_grads: dict[str, Tensor]
    weights: dict[str, Tensor]


def run_layer(
    chunks: int | str,
    weights: dict[str, Tensor] | None,
    *,
    sequence: int,
    exact: bool,
    settings: dict[str, Any],
) -> Result:
    """A layer forward and backward."""
    with EpPlugin.from_section({"overlap": {"chunks": chunks}}) as plugin:
        layer = make_layer(plugin, **settings)
        assert isinstance(layer, OverlappedMoELayer) == (chunks != 1)
        if weights is not None:
            layer.load_state_dict(weights, strict=False)
        if exact:
            layer.experts = RowExperts()
        tokens = make_tokens(sequence)
        out, bias = layer(tokens)
        assert bias is None
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        assert tokens.grad is not None
        named = dict(layer.named_parameters())
        grads = {name: each.grad for name, each in named.items() if each.grad is not None}
        copied = {name: value.detach().clone() for name, value in named.items()}
        assert layer.token_dispatcher._comm_manager.is_idle
        return Result(out.detach(), tokens.grad, grads, copied)


def compare(chunks: int | str, *, exact: bool, sequence: int = 6, **settings: object) -> None:
    """The layer in chunks against the layer in one piece."""
    how: dict[str, Any] = {"sequence": sequence, "exact": exact, "settings": settings}
    whole = run_layer(1, None, **how)
    parts = run_layer(chunks, whole.weights, **how)
    rtol, atol = (0.0, 0.0) if exact else (1e-5, 1e-6)
    torch.testing.assert_close(parts.out, whole.out, rtol=rtol, atol=atol)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=rtol, atol=atol)
    assert parts.weight_grads.keys() == whole.weight_grads.keys()
    for name, values in whole.weight_grads.items():  # those of experts are sums over the chunks
        torch.testing.assert_close(parts.weight_grads[name], values, rtol=1e-5, atol=1e-6)


def check_same_bits() -> None:
    """Output and input's gradient have the same bits for any number of chunks.

    With experts that treat each row alike; a GEMM may round otherwise for other numbers of rows.
    """
    for tp, ep, etp in ((1, 4, 1), (2, 2, 2)):
        with layout(tp, ep, etp):
            for chunks in (2, 3, 5):
                compare(chunks, exact=True)


def check_shared_experts() -> None:
    """Real experts, shared ones among them, in two halves: the same within rounding.

    Also with one row, which has no halves, and with a gate.
    """
    with layout(1, 4, 1):
        compare(3, exact=False, **SHARED)
        compare(2, exact=False, sequence=1, **SHARED)
        compare(3, exact=False, moe_shared_expert_gate=True, **SHARED)


def check_shared_experts_are_named() -> None:
    """One range a layer in one piece, one a half in chunks, and none where there are none."""
    for chunks, settings, number in ((1, SHARED, 1), (3, SHARED, 2), (1, {}, 0)):
        with layout(1, 4, 1), EpPlugin.from_section({"overlap": {"chunks": chunks}}) as plugin:
            layer = make_layer(plugin, **settings)
            with torch.profiler.profile() as profiler:
                layer(make_tokens())
        names = [each.name for each in profiler.events()]
        assert names.count(SHARED_EXPERTS) == number, (chunks, settings)


def check_few_tokens() -> None:
    """More chunks than tokens: some are empty on every rank; "auto" is one piece on the CPU."""
    with layout(1, 4, 1):
        compare(5, exact=True, sequence=1)
        compare("auto", exact=True)


def check_release() -> None:
    """Nothing of the routing, nor of the shared experts, outlives the forward."""
    with layout(1, 4, 1), EpPlugin.from_section({"overlap": {"chunks": 2}}) as plugin:
        layer = make_layer(plugin, **SHARED)
        layer(make_tokens())
        assert layer.token_dispatcher._comm_manager.is_idle
        assert layer._shared_in == []
        assert layer._shared_out == []


def check_delayed_weight_gradients() -> None:
    """Each chunk's weight gradients are asked for once, behind its dispatch's backward.

    The experts are Megatron's without Transformer Engine, which have nothing to delay, so what is
    seen is the order of calls.
    """
    calls: list[str] = []
    combine = ops.DispatchRows.backward

    def seen(*args: Any) -> Any:  # noqa: ANN401
        calls.append("dispatch backward")
        return combine(*args)

    with layout(1, 4, 1), EpPlugin.from_section({"overlap": {"chunks": 3}}) as plugin:
        layer = make_layer(plugin)
        layer.config.overlap_dispatch_backward_with_experts_wgrad = True
        layer.experts.backward_dw = lambda: calls.append("weights")
        out, _ = layer(make_tokens())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops.DispatchRows, "backward", staticmethod(seen))
            out.sum().backward()
    assert calls == ["dispatch backward", "weights"] * 3, calls


class Replaced(torch.nn.Module):
    """Experts with one weight; its gradient takes the place of the one before, as TE's does."""

    def __init__(self) -> None:
        """Nothing computed."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self._kept: list[Tensor] = []

    def forward(self, rows: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Scale by the weight; keep what its gradient is made of."""
        self._kept.append(rows.detach().sum().view(1))
        return rows * self.weight.detach() * weights.unsqueeze(-1), None

    def backward_dw(self) -> None:
        """That of the last chunk that has none, alone."""
        self.weight.grad = self._kept.pop()


def check_delayed_gradients_add_up() -> None:
    """The gradients of all chunks are there, also where nothing below the layer is trained."""
    sums: list[Tensor] = []
    for trained in (True, False):
        with layout(1, 4, 1), EpPlugin.from_section({"overlap": {"chunks": 3}}) as plugin:
            layer = make_layer(plugin)
            layer.config.overlap_dispatch_backward_with_experts_wgrad = True
            layer.experts = Replaced()
            tokens = make_tokens().requires_grad_(trained)
            out, _ = layer(tokens)
            want = sum(layer.experts._kept)
            out.sum().backward()
            assert layer.experts._kept == []
            assert layer.experts.weight.grad is not None
            torch.testing.assert_close(layer.experts.weight.grad, want)
            sums.append(layer.experts.weight.grad)
    torch.testing.assert_close(*sums)


def check_single_gradients_are_refused() -> None:
    """A weight whose gradient is taken once a backward: refused in chunks, before a collective."""
    called: list[str] = []
    with layout(1, 4, 1), EpPlugin.from_section({"overlap": {"chunks": 3}}) as plugin:
        layer = make_layer(plugin)
        weight = next(layer.experts.parameters())
        weight.post_wgrad_grad_acc_hook = lambda: called.append("hook")
        layer(make_tokens())  # no gradient is delayed, so the hook is nobody's
        layer.config.overlap_dispatch_backward_with_experts_wgrad = True
        with pytest.raises(ConfigError, match=r"overlap\.chunks is 3 .* set overlap\.chunks to 1"):
            layer(make_tokens())
    assert called == []


CHECKS: dict[str, Callable[[], None]] = {
    "chunks_give_the_same_bits": check_same_bits,
    "chunks_with_shared_experts": check_shared_experts,
    "shared_experts_are_named_in_profiles": check_shared_experts_are_named,
    "chunks_of_few_tokens": check_few_tokens,
    "chunks_release_routing": check_release,
    "chunks_delay_weight_gradients": check_delayed_weight_gradients,
    "delayed_gradients_of_chunks_add_up": check_delayed_gradients_add_up,
    "delayed_gradients_taken_once_are_refused": check_single_gradients_are_refused,
}
