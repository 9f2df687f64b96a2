"""The MoE layer that hides its communication behind its own experts, chunk by chunk.

`overlap_schedule` says in which order and on which streams; this module says what the steps are.
Megatron calls dispatch, experts and combine one after the other. Here the first and the last hand
on what they get, and the middle one runs all three for every chunk.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ep_dispatcher import EPGroup, Plan
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.megatron import compat
from ep_dispatcher.megatron.dispatcher import EpManager
from ep_dispatcher.megatron.layer import EpMoELayer
from ep_dispatcher.megatron.overlap_schedule import Lanes, auto_chunks, cut, run_chunks


class DelayedWeightGradients(Function):
    """Passes a tensor on; its backward, behind dispatch's, computes the weights' gradients.

    Megatron's experts keep back the gradients of their weights if
    `overlap_dispatch_backward_with_experts_wgrad` says so. Nobody waits for them but the
    optimizer, so they run on the caller's stream while the gradients of the rows travel home.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: Any, compute: torch.cuda.Stream | None) -> Tensor:  # noqa: ANN401
        """Remember whose gradients."""
        ctx.experts, ctx.compute = experts, compute
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Compute those of the oldest chunk that has none; `grad_x` goes on as it is."""
        with contextlib.nullcontext() if ctx.compute is None else torch.cuda.stream(ctx.compute):
            add_weight_gradients(ctx.experts)
        return grad_x, None, None


def add_weight_gradients(experts: Any) -> None:  # noqa: ANN401
    """Compute the weight gradients of the oldest chunk that has none, and keep those of others.

    Transformer Engine's experts put theirs in the place of what is in `grad`. Megatron's wrapper
    for data parallelism has taken that away by then; without one it is added again here.
    """
    before = [(weight, weight.grad) for weight in experts.parameters() if weight.grad is not None]
    experts.backward_dw()
    for weight, grad in before:
        if weight.grad is not None and weight.grad is not grad:
            weight.grad.add_(grad)


def refuse_single_gradients(experts: Any, chunks: int | str) -> None:  # noqa: ANN401
    """Refuse delayed weight gradients where somebody takes each once a backward.

    Megatron-FSDP puts `post_wgrad_grad_acc_hook` on such weights: it is called once, when the
    gradient is complete, and the one of each chunk would be written over the last chunk's.

    Raises:
        ConfigError: a weight has such a hook.
    """
    for name, weight in experts.named_parameters():
        if getattr(weight, "post_wgrad_grad_acc_hook", None) is not None:
            raise ConfigError(
                f"overlap.chunks is {chunks} and overlap_dispatch_backward_with_experts_wgrad is "
                f"True, but the gradient of the experts' {name} is taken once a backward "
                "(post_wgrad_grad_acc_hook, as Megatron-FSDP sets it) and chunks make one each; "
                "set overlap.chunks to 1 or the other to False"
            )


class LayerSteps:
    """`ChunkSteps` of one layer.

    Args:
        manager: of the layer's dispatcher.
        group: for rows of this width.
        experts: Megatron's module.
        compute: the caller's stream; None on the CPU.
    """

    def __init__(
        self,
        manager: EpManager,
        group: EPGroup,
        experts: Any,  # noqa: ANN401
        compute: torch.cuda.Stream | None,
    ) -> None:
        """Keep what the steps need."""
        self._manager, self._group = manager, group
        self._experts, self._compute = experts, compute
        self._delays = compat.delays_weight_gradients(manager.config)

    def plan(self, topk_idx: Tensor) -> Plan:
        """Plan with the alignment that the experts need."""
        return self._manager.plan(self._group, topk_idx)

    def dispatch(self, plan: Plan, x: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Send rows; where weight gradients are delayed, hang them behind its backward."""
        if self._delays and torch.is_grad_enabled():
            if x.requires_grad:
                x = self._behind(x)
            else:  # nothing below this layer is trained; the router's weights are
                topk_weights = self._behind(topk_weights)
        return self._manager.send(self._group, plan, x, topk_weights)

    def experts(self, plan: Plan, recv_x: Tensor, recv_weights: Tensor) -> Tensor:
        """Run the experts that live here."""
        counts = self._manager.counts_for_experts(plan)
        if self._compute is not None and counts.is_cuda:
            counts.record_stream(self._compute)  # the plan's memory is the communication stream's
        expert_out, bias = self._experts(recv_x, counts, recv_weights)
        assert bias is None, "experts with a bias of their own cannot be combined"
        rows: Tensor = expert_out
        return rows

    def combine(self, plan: Plan, expert_out: Tensor) -> Tensor:
        """Sum at home."""
        return self._group.combine(plan, expert_out)

    def _behind(self, given: Tensor) -> Tensor:
        """What was given, with the weights' gradients behind its own."""
        passed: Tensor = DelayedWeightGradients.apply(given, self._experts, self._compute)  # type: ignore[no-untyped-call]
        return passed


class OverlappedMoELayer(EpMoELayer):
    """Megatron's MoE layer with our dispatcher, run in chunks (`overlap.chunks` of the section).

    Of Megatron's steps it changes five: the shared experts run in two halves, beside the first
    dispatch and beside the last combine, `dispatch` and `combine` hand on what they get,
    `routed_experts_compute` runs dispatch, experts and combine of all chunks, and `postprocess`
    adds what the shared experts made. With one chunk it is its parent.
    """

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor | None:
        """Put the shared experts off until `routed_experts_compute`, in two halves; local."""
        self._shared_out: list[Tensor] = []
        self._shared_in: list[Tensor] = []
        graphed = compat.cuda_graph_scopes(self.config) is not None
        if graphed or not (self.use_shared_expert and self._is_chunked()):
            shared: Tensor | None = super().shared_experts_compute(hidden_states)
            return shared
        # Rows of FP8 or FP4 products come in multiples that halves may not be.
        pieces = 2 if compat.quantization_alignment(self.config) == 1 else 1
        self._shared_in = list(hidden_states.chunk(pieces))
        return None

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Hand on rows [T, H] and weights [T, K]: the chunks are dispatched with their experts."""
        if self._is_chunked():
            return hidden_states, probs
        rows: tuple[Tensor, Tensor] = super().dispatch(hidden_states, probs)
        return rows

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Dispatch, compute and combine all chunks; collective: [T, H], [T, K] -> [T, H]."""
        if not self._is_chunked():
            rows: tuple[Tensor, None] = super().routed_experts_compute(hidden_states, probs)
            return rows
        manager = self.token_dispatcher._comm_manager
        if compat.delays_weight_gradients(manager.config):
            refuse_single_gradients(self.experts, self._plugin.options.overlap.chunks)
        group = manager.group_for(hidden_states)
        lanes = Lanes(self._plugin.communication_stream(hidden_states.device))
        steps = LayerSteps(manager, group, self.experts, lanes.compute)
        chunks = cut(manager.take_routes(), hidden_states, probs, self._num_chunks(group))
        outs = run_chunks(
            steps,
            chunks,
            lanes,
            beside_dispatch=self._run_shared_experts,
            beside_combine=self._run_shared_experts,
        )
        return torch.cat(outs), None

    def combine(self, output: Tensor) -> Tensor:
        """Hand on the sums [T, H]: the chunks were combined with their experts."""
        if self._is_chunked():
            return output
        combined: Tensor = super().combine(output)
        return combined

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Restore the layer's shape and add the shared experts' output."""
        if self._shared_out:
            shared_expert_output = torch.cat(self._shared_out)
            self._shared_out = []
        out: Tensor = super().postprocess(output, shared_expert_output)
        return out

    def _run_shared_experts(self) -> None:
        """The next half of their tokens, on the caller's stream."""
        if not self._shared_in:
            return
        shared = super().shared_experts_compute(self._shared_in.pop(0))
        assert shared is not None
        self._shared_out.append(shared)

    def _is_chunked(self) -> bool:
        return bool(self._plugin.options.overlap.chunks != 1)

    def _num_chunks(self, group: EPGroup) -> int:
        """What the section says, or what "auto" makes of the group's sizes."""
        chunks = self._plugin.options.overlap.chunks
        if chunks != "auto":
            return int(chunks)
        if group.tier == "reference":
            return 1  # nothing runs beside anything there
        slots = group.config.shape.num_topk
        return auto_chunks(group.config.max_tokens_per_rank, slots, self.num_local_experts)
