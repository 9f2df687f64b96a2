"""NCCL EP through the nccl-extensions package: high throughput, expert-major rows.

`nccl_ep` is its eager mode: the plan reads the number of rows on the host and the outputs are sized
exactly, as this package does in its default mode; its dispatch waits for the device once more.
`nccl_ep/static` has a receive capacity, here the rows of the busiest rank, and its host never
waits. Kernels are called directly (the package has no autograd), so its backward phases carry no
autograd cost.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.bench.backends import base
from ep_dispatcher.bench.inputs import most_rows
from ep_dispatcher.bench.spec import Work

_MAX_TOKENS = 8192  # tokens of a rank, a constant of the library
_TOKEN_STEP = 64  # group creation fails for a bound that is no multiple of this
_NCCL_MOST_CTAS = 32
_EAGER = 0
_TIMEOUT_NS = 20_000_000_000


@dataclass(frozen=True, eq=False, kw_only=True)
class Buffers:
    """Outputs that all rounds of one routing write to.

    Attributes:
        rows: [R, H]; `weights`: [R] fp32; `grads`: [R, H].
        out: [T, H]; `grad_x`: [T, H]; `grad_weights`: [T, K] fp32.
    """

    rows: Tensor
    weights: Tensor
    grads: Tensor
    out: Tensor
    grad_x: Tensor
    grad_weights: Tensor


class NcclEpSession(base.PlainSession):
    """See `Session`."""

    wire: base.Wire = "deduplicated"

    def __init__(self, work: Work, place: base.Place) -> None:
        """Make a communicator and a group of NCCL EP's."""
        base.need_cuda(place)
        self._num_local = base.need_even_experts(work, place.name)
        _check_limits(work)
        core = base.need("nccl.core", "nccl4py")
        self._ep: Any = base.need("nccl.ep", "nccl-extensions")
        self._work, self._place = work, place
        self._capacity = capacity_rows(work) if place.name.endswith("/static") else _EAGER
        self._comm = _communicator(core, work, place)
        self._group = self._ep.Group.create(self._comm, self._group_config())
        self._handle: Any = None
        self._kept: list[Any] = []  # descriptors must outlive the calls that read them
        self._buffers: Buffers | None = None
        self._topk_idx = torch.empty(0)
        device = place.device
        self._segments = torch.zeros(self._num_local, dtype=torch.int64, device=device)
        self._offsets = torch.zeros_like(self._segments)
        self._total = torch.zeros(1, dtype=torch.int64, device=device)
        self._layout_info = self._ep.LayoutInfo(
            expert_counters=self._tensor(self._segments),
            expert_offsets=self._tensor(self._offsets),
            recv_total_counter=self._tensor(self._total),
        )
        self._num_rows = 0
        self._real = torch.zeros(0, dtype=torch.int64)

    def identity(self) -> base.Identity:
        """The library that was loaded, and its knobs."""
        return base.Identity(
            classes=(base.class_name(self._group), base.class_name(self._comm)),
            files=(base.file_of(self._ep), str(self._ep.get_lib_path()).rsplit("/", 1)[-1]),
            versions={
                "nccl-extensions": base.version_of("nccl-extensions"),
                "nccl4py": base.version_of("nccl4py"),
                "libnccl_ep": str(self._ep.get_lib_version()),
            },
            notes=(
                f"high throughput, expert-major, max_num_sms {self._work.num_sms}; max_ctas of its "
                f"communicator {_most_ctas(self._work)}",
                f"receive capacity {self._capacity or 'none: eager sizes'}",
                "zero_copy left at its default; kernels called directly, without autograd",
            ),
        )

    def prepare(self, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Keep the routing; its handle is made by the first plan, later plans update it."""
        self._topk_idx = topk_idx
        self._real = self._count_real()

    def plan(self, lap: base.Lap) -> None:
        """Update the handle, and read how many rows come."""
        routing = self._tensor(self._topk_idx)
        if self._handle is None:
            self._handle = self._group.create_handle(
                self._ep.Layout.EXPERT_MAJOR,
                routing,
                layout_info=self._layout_info,
                config=self._ep.HandleConfig(
                    dispatch_output_per_expert_alignment=self._work.alignment
                ),
                stream=_stream(),
            )
        else:
            self._handle.update(routing, layout_info=self._layout_info, stream=_stream())
        self._num_rows = self._capacity or int(self._total.item())
        lap("plan")
        if self._buffers is None or len(self._buffers.rows) != self._num_rows:
            self._buffers = self._make_buffers()

    def dispatch(self, x: Tensor, topk_weights: Tensor, lap: base.Lap) -> base.Received:
        """See `Session.dispatch`."""
        ep, buffers = self._ep, self._the_buffers()
        self._handle.dispatch(
            ep.DispatchInputs(tokens=self._tensor(x), topk_weights=self._tensor(topk_weights)),
            ep.DispatchOutputs(
                tokens=self._tensor(buffers.rows), topk_weights=self._tensor(buffers.weights)
            ),
            stream=_stream(),
        )
        lap("dispatch")
        return base.Received(
            rows=buffers.rows,
            weights=buffers.weights,
            tokens_per_expert=self._real,
            segment_rows=self._segments,
        )

    def combine(self, expert_out: Tensor, lap: base.Lap) -> Tensor:
        """See `Session.combine`."""
        ep, buffers = self._ep, self._the_buffers()
        self._handle.combine(
            ep.CombineInputs(tokens=self._tensor(expert_out)),
            ep.CombineOutputs(tokens=self._tensor(buffers.out)),
            stream=_stream(),
        )
        lap("combine")
        return buffers.out

    def combine_backward(self, grad_out: Tensor, lap: base.Lap) -> Tensor:
        """Dispatch in the backward direction, which carries no weights."""
        ep, buffers = self._ep, self._the_buffers()
        self._handle.dispatch(
            ep.DispatchInputs(tokens=self._tensor(grad_out)),
            ep.DispatchOutputs(tokens=self._tensor(buffers.grads)),
            config=ep.DispatchConfig(pass_direction=ep.PassDir.BWD),
            stream=_stream(),
        )
        lap("combine_backward")
        return buffers.grads

    def dispatch_backward(
        self, grad_rows: Tensor, grad_weights: Tensor, lap: base.Lap
    ) -> tuple[Tensor, Tensor | None]:
        """Combine in the backward direction, with the weights' gradients."""
        ep, buffers = self._ep, self._the_buffers()
        self._handle.combine(
            ep.CombineInputs(
                tokens=self._tensor(grad_rows), topk_weights=self._tensor(grad_weights)
            ),
            ep.CombineOutputs(
                tokens=self._tensor(buffers.grad_x),
                topk_weights=self._tensor(buffers.grad_weights),
            ),
            config=ep.CombineConfig(pass_direction=ep.PassDir.BWD),
            stream=_stream(),
        )
        lap("dispatch_backward")
        dropped = self._topk_idx < 0
        return buffers.grad_x, buffers.grad_weights.masked_fill(dropped, 0)

    def close(self) -> None:
        """Let go of handle, group and communicator, in this order."""
        torch.cuda.synchronize(self._place.device)
        self._buffers, self._kept = None, []
        for held in (self._handle, self._group, self._comm):
            if held is not None:
                with contextlib.suppress(RuntimeError):
                    held.destroy()

    def _group_config(self) -> Any:  # noqa: ANN401
        """The group's configuration; every knob that is not named is the library's default."""
        work, ep = self._work, self._ep
        return ep.GroupConfig(
            algorithm=ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=work.num_experts,
            max_dispatch_tokens_per_rank=token_bound(work),
            max_recv_tokens_per_rank=self._capacity,
            max_token_bytes=work.row_bytes,
            max_num_sms=work.num_sms,
            num_topk=work.num_topk,
            timeout_ns=_TIMEOUT_NS,
        )

    def _make_buffers(self) -> Buffers:
        work, device = self._work, self._place.device
        dtype = getattr(torch, work.dtype)
        rows, tokens = (self._num_rows, work.hidden), (work.num_tokens, work.hidden)
        return Buffers(
            rows=torch.empty(rows, dtype=dtype, device=device),
            weights=torch.empty(self._num_rows, device=device),
            grads=torch.empty(rows, dtype=dtype, device=device),
            out=torch.empty(tokens, dtype=dtype, device=device),
            grad_x=torch.empty(tokens, dtype=dtype, device=device),
            grad_weights=torch.empty(work.num_tokens, work.num_topk, device=device),
        )

    def _count_real(self) -> Tensor:
        """[L] int64 on the CPU: rows of each local expert; the library tells padded counts only."""
        experts = self._work.num_experts
        mine = torch.bincount(self._topk_idx.flatten() + 1, minlength=experts + 1)[1:]
        dist.all_reduce(mine, group=self._place.group)
        first = self._place.rank * self._num_local
        return mine[first : first + self._num_local].cpu()

    def _tensor(self, values: Tensor) -> Any:  # noqa: ANN401
        """A descriptor of a tensor, kept alive for a while."""
        described = self._ep.Tensor(values)
        self._kept = [*self._kept[-32:], described]
        return described

    def _the_buffers(self) -> Buffers:
        assert self._buffers is not None, "plan comes before dispatch"
        return self._buffers


def _communicator(core: Any, work: Work, place: base.Place) -> Any:  # noqa: ANN401
    """A communicator of the same ranks whose collectives keep to the SM budget too.

    With NCCL's default of 32 blocks a rank, the plan's all-gather of ranks that share one GPU may
    not fit on it at once, and then waits for itself.
    """
    mine = core.get_unique_id(empty=place.rank != 0).as_bytes
    told = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(place.device)
    dist.broadcast(told, src=0, group=place.group)
    unique_id = core.UniqueId.from_bytes(told.cpu().numpy().tobytes())
    config = core.NCCLConfig(max_ctas=_most_ctas(work))
    with torch.cuda.device(place.device):
        return core.Communicator.init(work.ranks, place.rank, unique_id, config)


def _most_ctas(work: Work) -> int:
    """Blocks of the communicator's collectives."""
    return min(work.num_sms, _NCCL_MOST_CTAS)


def capacity_rows(work: Work) -> int:
    """Rows to make room for; no less than the tokens that one rank sends."""
    return max(most_rows(work), token_bound(work))


def token_bound(work: Work) -> int:
    """T, rounded up to what group creation takes."""
    return -(-max(work.num_tokens, 1) // _TOKEN_STEP) * _TOKEN_STEP


def _check_limits(work: Work) -> None:
    """Raise base.Refused for a work beyond the library's documented limits."""
    if work.dtype == "float64":
        raise base.Refused("nccl_ep moves bf16, fp16 and fp32 rows; dtype is float64")
    if work.num_tokens > _MAX_TOKENS:
        raise base.Refused(
            f"nccl_ep takes at most {_MAX_TOKENS} tokens a rank, not {work.num_tokens}"
        )
    if work.domains > 1:
        raise base.Refused("nccl_ep finds its domains itself; virtual domains cannot be asked for")
    if work.num_experts % 4:
        raise base.Refused(
            f"nccl_ep needs num_experts to be a multiple of 4, not {work.num_experts}"
        )


def _stream() -> int:
    """The current stream's handle."""
    return int(torch.cuda.current_stream().cuda_stream)


def open_session(work: Work, place: base.Place) -> NcclEpSession:
    """Open NCCL EP."""
    return NcclEpSession(work, place)
