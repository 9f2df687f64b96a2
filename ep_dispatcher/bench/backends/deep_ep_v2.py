"""DeepEP's second interface (`ElasticBuffer`) with expanded rows, which are expert-major.

The plan is part of its dispatch, which reads the counts on the host. Its copy and reduce epilogues
use every SM whatever the budget.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_dispatcher.bench.backends import base
from ep_dispatcher.bench.spec import Work


class ElasticSession(base.PlainSession):
    """See `Session`."""

    wire: base.Wire = "deduplicated"

    def __init__(self, work: Work, place: base.Place) -> None:
        """Make a buffer sized by the library for this work."""
        base.need_cuda(place)
        base.need_even_experts(work, place.name)
        if work.dtype != "bfloat16":
            raise base.Refused(f"deep_ep/v2 moves bfloat16 rows; dtype is {work.dtype}")
        self._deep_ep: Any = base.need("deep_ep", "DeepEP")
        if not hasattr(self._deep_ep, "ElasticBuffer"):
            raise base.Refused(f"this deep_ep ({base.version_of('deep_ep')}) has no ElasticBuffer")
        self._work = work
        self._buffer = self._deep_ep.ElasticBuffer(
            place.group,
            num_max_tokens_per_rank=work.num_tokens,
            hidden=work.hidden,
            num_topk=work.num_topk,
            explicitly_destroy=True,
        )
        self._topk_idx = torch.empty(0)
        self._handle: Any = None
        self._num_rows = 0

    def identity(self) -> base.Identity:
        """The class and its package."""
        return base.Identity(
            classes=(base.class_name(self._buffer),),
            files=(base.file_of(self._deep_ep),),
            versions={"deep_ep": base.version_of("deep_ep")},
            notes=(f"expanded rows, num_sms {self._work.num_sms}", "epilogues run on every SM"),
        )

    def prepare(self, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Nothing to convert."""
        self._topk_idx = topk_idx.to(getattr(self._deep_ep, "topk_idx_t", torch.int64))

    def plan(self, lap: base.Lap) -> None:
        """Part of dispatch here."""

    def dispatch(self, x: Tensor, topk_weights: Tensor, lap: base.Lap) -> base.Received:
        """See `Session.dispatch`."""
        rows, _, weights, self._handle, _ = self._buffer.dispatch(
            x,
            topk_idx=self._topk_idx,
            topk_weights=topk_weights,
            num_experts=self._work.num_experts,
            expert_alignment=self._work.alignment,
            num_sms=self._work.num_sms,
            do_cpu_sync=True,
            do_expand=True,
            do_zero_padding=True,
        )
        lap("dispatch")
        self._num_rows = len(rows)
        real = self._handle.num_unaligned_recv_tokens_per_expert.to("cpu", torch.int64)
        step = self._work.alignment
        return base.Received(
            rows=rows,
            weights=weights.flatten(),
            tokens_per_expert=real,
            segment_rows=(real + step - 1) // step * step,
        )

    def combine(self, expert_out: Tensor, lap: base.Lap) -> Tensor:
        """See `Session.combine`."""
        out, _, _ = self._buffer.combine(expert_out, self._handle, num_sms=self._work.num_sms)
        lap("combine")
        return torch.as_tensor(out)

    def combine_backward(self, grad_out: Tensor, lap: base.Lap) -> Tensor:
        """Expanded dispatch with the kept handle."""
        rows, *_ = self._buffer.dispatch(
            grad_out, handle=self._handle, num_sms=self._work.num_sms, do_expand=True
        )
        lap("combine_backward")
        return torch.as_tensor(rows)

    def dispatch_backward(
        self, grad_rows: Tensor, grad_weights: Tensor, lap: base.Lap
    ) -> tuple[Tensor, Tensor | None]:
        """Combine of expanded rows with one weight gradient each."""
        grad_x, grad_topk, _ = self._buffer.combine(
            grad_rows, self._handle, topk_weights=grad_weights, num_sms=self._work.num_sms
        )
        lap("dispatch_backward")
        return grad_x, grad_topk

    def close(self) -> None:
        """See `Session.close`."""
        self._handle = None
        self._buffer.destroy()


def open_session(work: Work, place: base.Place) -> ElasticSession:
    """Open DeepEP's second interface."""
    return ElasticSession(work, place)
