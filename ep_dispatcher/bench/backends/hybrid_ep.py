"""Hybrid-EP (`HybridEPBuffer` of DeepEP's hybrid-ep branch) with its own permute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_dispatcher.bench.backends import base
from ep_dispatcher.bench.spec import Work


class HybridSession(base.PlainSession):
    """See `Session`."""

    wire: base.Wire = "deduplicated"

    def __init__(self, work: Work, place: base.Place) -> None:
        """Make a buffer with the work's SM budget."""
        base.need_cuda(place)
        self._num_local = base.need_even_experts(work, place.name)
        if work.dtype != "bfloat16":
            raise base.Refused(f"hybrid_ep moves bfloat16 rows; dtype is {work.dtype}")
        if work.alignment > 1:
            raise base.Refused("hybrid_ep is driven without padding here; set alignment to 1")
        self._module: Any = base.need("deep_ep", "DeepEP's hybrid-ep branch")
        if not hasattr(self._module, "HybridEPBuffer"):
            raise base.Refused("this deep_ep has no HybridEPBuffer; install its hybrid-ep branch")
        self._work = work
        self._buffer = self._module.HybridEPBuffer(
            place.group,
            hidden_dim=work.hidden,
            max_num_of_tokens_per_rank=work.num_tokens,
            num_local_experts=self._num_local,
            num_sms_dispatch_api=work.num_sms,
            num_sms_combine_api=work.num_sms,
        )
        self._topk_idx, self._map, self._probs = (torch.empty(0) for _ in range(3))
        self._handle: Any = None
        self._num_rows = 0

    def identity(self) -> base.Identity:
        """The class and its package."""
        return base.Identity(
            classes=(base.class_name(self._buffer),),
            files=(base.file_of(self._module),),
            versions={"deep_ep": base.version_of("deep_ep")},
            notes=(f"num_sms {self._work.num_sms}", "dispatch_with_permute, host counts"),
        )

    def prepare(self, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Make the map and the dense probs that it takes from Megatron's router."""
        self._topk_idx = topk_idx
        self._map, self._probs = base.multihot(topk_idx, topk_weights, self._work.num_experts)

    def plan(self, lap: base.Lap) -> None:
        """Part of dispatch here."""

    def dispatch(self, x: Tensor, topk_weights: Tensor, lap: base.Lap) -> base.Received:
        """See `Session.dispatch`."""
        rows, probs, _, counts, self._handle = self._buffer.dispatch_with_permute(
            hidden=x,
            routing_map=self._map,
            probs=self._probs,
            num_of_experts_per_rank=self._num_local,
        )
        lap("dispatch")
        self._num_rows = len(rows)
        tokens_per_expert = torch.as_tensor(counts).to("cpu", torch.int64)
        return base.Received(
            rows=rows,
            weights=probs.flatten(),
            tokens_per_expert=tokens_per_expert,
            segment_rows=tokens_per_expert,
        )

    def combine(self, expert_out: Tensor, lap: base.Lap) -> Tensor:
        """See `Session.combine`."""
        out, _ = self._buffer.combine_with_unpermute(hidden=expert_out, handle=self._handle)
        lap("combine")
        return torch.as_tensor(out)

    def combine_backward(self, grad_out: Tensor, lap: base.Lap) -> Tensor:
        """Dispatch with the kept handle."""
        rows, *_ = self._buffer.dispatch_with_permute(
            hidden=grad_out, handle=self._handle, num_permuted_tokens=self._num_rows
        )
        lap("combine_backward")
        return torch.as_tensor(rows)

    def dispatch_backward(
        self, grad_rows: Tensor, grad_weights: Tensor, lap: base.Lap
    ) -> tuple[Tensor, Tensor | None]:
        """Combine with the gradients of the dense probs."""
        grad_x, grad_probs = self._buffer.combine_with_unpermute(
            hidden=grad_rows, probs=grad_weights, handle=self._handle
        )
        lap("dispatch_backward")
        return grad_x, base.gather_slots(grad_probs, self._topk_idx)

    def close(self) -> None:
        """Nothing to call: the buffer frees itself."""
        self._handle = None
        del self._buffer


def open_session(work: Work, place: base.Place) -> HybridSession:
    """Open Hybrid-EP."""
    return HybridSession(work, place)
