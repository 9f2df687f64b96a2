"""DeepEP's first interface (`Buffer`), inside one host: flat rows, so permutes are done in torch.

A token arrives once at each rank; `permute` copies it to each of its local experts, `unpermute`
adds their rows up in fp32. Both are index operations of torch, timed as phases of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_dispatcher.bench.backends import base
from ep_dispatcher.bench.spec import Work
from ep_dispatcher.bench.stopwatch import MEET


class DeepEpSession(base.PlainSession):
    """See `Session`."""

    layout: base.Layout = "flat"
    wire: base.Wire = "by_rank"

    def __init__(self, work: Work, place: base.Place) -> None:
        """Make a buffer with the size that the library asks for."""
        base.need_cuda(place)
        self._num_local = base.need_even_experts(work, place.name)
        if work.dtype != "bfloat16":
            raise base.Refused(f"deep_ep/v1 moves bfloat16 rows; dtype is {work.dtype}")
        if work.num_sms % 2:
            raise base.Refused(f"deep_ep/v1 needs an even num_sms, not {work.num_sms}")
        self._deep_ep: Any = base.need("deep_ep", "DeepEP")
        buffer = self._deep_ep.Buffer
        buffer.set_num_sms(work.num_sms)
        size = max(
            config(work.ranks).get_nvl_buffer_size_hint(work.row_bytes, work.ranks)
            for config in (buffer.get_dispatch_config, buffer.get_combine_config)
        )
        self._work = work
        self._buffer = buffer(place.group, num_nvl_bytes=size, explicitly_destroy=True)
        self._topk_idx = torch.empty(0)
        self._layout: tuple[Any, ...] = ()
        self._handle: Any = None
        self._routes: tuple[Tensor, Tensor, Tensor] | None = None
        self._flat_rows = 0

    def identity(self) -> base.Identity:
        """The class and its package."""
        return base.Identity(
            classes=(base.class_name(self._buffer),),
            files=(base.file_of(self._deep_ep),),
            versions={"deep_ep": base.version_of("deep_ep")},
            notes=(f"num_sms {self._work.num_sms}", "flat rows; permutes are torch index kernels"),
        )

    def prepare(self, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Nothing to convert."""
        self._topk_idx = topk_idx

    def plan(self, lap: base.Lap) -> None:
        """The layout kernel; the exchange of counts is part of dispatch."""
        self._layout = self._buffer.get_dispatch_layout(self._topk_idx, self._work.num_experts)
        lap("plan")

    def dispatch(self, x: Tensor, topk_weights: Tensor, lap: base.Lap) -> base.Received:
        """Flat rows, then a row for each expert."""
        per_rank, _, per_expert, in_rank, _ = self._layout
        rows, experts, weights, counts, self._handle, _ = self._buffer.dispatch(
            x,
            topk_idx=self._topk_idx,
            topk_weights=topk_weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        lap("dispatch")
        self._flat_rows = len(rows)
        source, slot = (experts >= 0).nonzero(as_tuple=True)
        order = torch.argsort(experts[source, slot], stable=True)
        source, slot = source[order], slot[order]
        self._routes = (source, slot, experts)
        received = rows[source], weights[source, slot]
        lap("permute")
        tokens_per_expert = torch.as_tensor(counts, dtype=torch.int64)
        return base.Received(
            rows=received[0],
            weights=received[1],
            tokens_per_expert=tokens_per_expert,
            segment_rows=tokens_per_expert,
        )

    def combine(self, expert_out: Tensor, lap: base.Lap) -> Tensor:
        """Add up each flat row, then send it home."""
        flat = self._add_up(expert_out)
        lap("unpermute")
        lap(MEET)
        out, _, _ = self._buffer.combine(flat, self._handle)
        lap("combine")
        return torch.as_tensor(out)

    def combine_backward(self, grad_out: Tensor, lap: base.Lap) -> Tensor:
        """Dispatch with the kept handle, and the permute."""
        rows, *_ = self._buffer.dispatch(grad_out, handle=self._handle)
        grad: Tensor = rows[self._the_routes()[0]]
        lap("combine_backward")
        return grad

    def dispatch_backward(
        self, grad_rows: Tensor, grad_weights: Tensor, lap: base.Lap
    ) -> tuple[Tensor, Tensor | None]:
        """Combine with the weights' gradients, and the unpermute."""
        source, slot, experts = self._the_routes()
        flat_weights = torch.zeros(experts.shape, device=grad_weights.device)
        flat_weights[source, slot] = grad_weights
        grad_x, grad_topk, _ = self._buffer.combine(
            self._add_up(grad_rows), self._handle, topk_weights=flat_weights
        )
        lap("dispatch_backward")
        return grad_x, grad_topk

    def close(self) -> None:
        """See `Session.close`."""
        self._handle = self._routes = None
        self._buffer.destroy()

    def _add_up(self, rows: Tensor) -> Tensor:
        """[R, H] expert-major to flat rows, summed in fp32."""
        total = torch.zeros(self._flat_rows, rows.shape[1], device=rows.device)
        return total.index_add_(0, self._the_routes()[0], rows.float()).to(rows.dtype)

    def _the_routes(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self._routes is not None, "dispatch comes first"
        return self._routes


def open_session(work: Work, place: base.Place) -> DeepEpSession:
    """Open DeepEP's first interface."""
    return DeepEpSession(work, place)
