"""Several ranks on one GPU, in one process, without NCCL: windows are plain allocations.

Each call runs the kernels of all ranks as one launch, which is how compute-sanitizer and the
profiler can see them, and how they are timed without processes; or as one launch for each rank on
its own stream.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher.config import DTYPE_BYTES, Topology
from ep_dispatcher.device_session import placement_tables
from ep_dispatcher.errors import UnavailableError
from ep_dispatcher.plan import Placement

DTYPE_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # EpDtype
FORM_CODES = {"push": 0, "gather": 1}  # EpCombineForm
_OUTPUT_ALIGNMENT_BYTES = 256
_BUILD_FOLDER = Path("build", "gpu_kernels")


def load_kernels(name: str = "ep_kernels") -> Any:  # noqa: ANN401  # an extension module
    """Import a module that scripts/gpu_kernels.sh built below the current folder.

    Args:
        name: "ep_kernels", or "ep_kernels_mutated" with the tests' switches compiled in.

    Raises:
        UnavailableError: it is not there.
    """
    if name in sys.modules:
        return sys.modules[name]
    file = _BUILD_FOLDER / f"{name}.so"
    if not file.is_file():
        raise UnavailableError(f"{file} is missing; build it with scripts/gpu_kernels.sh build")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


@dataclass(frozen=True, kw_only=True)
class WorldShape:
    """Sizes of a world; `num_channels` blocks run for each rank."""

    ep_size: int
    num_experts: int
    num_topk: int
    hidden: int
    max_tokens: int
    dtype: torch.dtype = torch.bfloat16
    num_channels: int = 4
    ring_depth: int = 8
    exact: bool = False
    timeout_s: float = 10.0
    output_bytes: int = 64 << 20
    expert_rank: tuple[int, ...] | None = None

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a row."""
        return DTYPE_BYTES[str(self.dtype).removeprefix("torch.")]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.hidden * self.element_bytes


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelPlan:
    """One rank's plan as the kernels fill it; tensors on the GPU, named as in the C header."""

    tensors: dict[str, Tensor]
    pointers: Any
    mailbox: Tensor

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of that name."""
        return self.tensors[name]


class OneGpuWorld:
    """Windows, contexts and calls of all ranks.

    Args:
        shape: sizes.
        kernels: the extension module.
        device: the GPU.
    """

    def __init__(self, shape: WorldShape, kernels: Any, device: torch.device | None = None) -> None:  # noqa: ANN401
        """Allocate the windows and zero what must be zero."""
        self.shape = shape
        self.kernels = kernels
        self.device = device or torch.device("cuda")
        expert_rank = shape.expert_rank
        self.placement = (
            Placement.even(shape.num_experts, shape.ep_size)
            if expert_rank is None
            else Placement(expert_rank, shape.ep_size)
        )
        self.tables = placement_tables(self.placement, self.device)
        self.window_shape = self._window_shape()
        self.layout = self._layout()
        self.windows = [
            torch.zeros(
                self.layout.total_bytes + 2 * shape.output_bytes,
                dtype=torch.uint8,
                device=self.device,
            )
            for _ in range(shape.ep_size)
        ]
        self.faults = [_pinned(kernels.FAULT_BYTES) for _ in range(shape.ep_size)]
        self.contexts = [self._context(rank) for rank in range(shape.ep_size)]
        self._streams: list[torch.cuda.Stream] = []
        self._ticket = 0
        torch.cuda.synchronize(self.device)

    @property
    def topology(self) -> Topology:
        """One domain."""
        return Topology(ep_size=self.shape.ep_size, domain_size=self.shape.ep_size)

    def _window_shape(self) -> Any:  # noqa: ANN401
        shape = self.shape
        return self.kernels.WindowShape(
            ep_size=shape.ep_size,
            num_experts=shape.num_experts,
            num_topk=shape.num_topk,
            num_channels=shape.num_channels,
            ring_depth=shape.ring_depth,
            max_tokens=shape.max_tokens,
            partial_bytes=shape.hidden * (4 if shape.exact else shape.element_bytes),
        )

    def _layout(self) -> Any:  # noqa: ANN401
        return self.kernels.WindowLayout(self.window_shape)

    def _context(self, rank: int) -> Any:  # noqa: ANN401
        context = self.kernels.Context(self.window_shape, rank)
        context.num_local_experts = len(self.placement.local_experts(rank))
        context.timeout_ns = int(self.shape.timeout_s * 1e9)
        context.window_bases = [window.data_ptr() for window in self.windows]
        context.fault = self.faults[rank].data_ptr()
        for name, table in self.tables.items():
            setattr(context, name, table.data_ptr())
        return context

    def launch(self, name: str, calls: Sequence[Any], *, streams: bool = False) -> None:
        """Run one kernel for the given ranks: as one launch, or each on its own stream."""
        if streams:
            with self.rank_streams(len(calls)) as rank_streams:
                self.launch_on(rank_streams, name, calls)
            return
        stream = torch.cuda.current_stream(self.device).cuda_stream
        getattr(self.kernels, f"{name}_world")(list(calls), stream)

    @contextmanager
    def rank_streams(self, num_ranks: int) -> Iterator[list[torch.cuda.Stream]]:
        """One stream for each rank, after the current stream's work and joined to it at the end."""
        while len(self._streams) < num_ranks:
            self._streams.append(torch.cuda.Stream(self.device))
        current = torch.cuda.current_stream(self.device)
        streams = self._streams[:num_ranks]
        for stream in streams:
            stream.wait_stream(current)
        yield streams
        for stream in streams:
            current.wait_stream(stream)

    def launch_on(
        self, streams: Sequence[torch.cuda.Stream], name: str, calls: Sequence[Any]
    ) -> None:
        """Launch each rank's kernel on its stream."""
        for call, stream in zip(calls, streams, strict=True):
            getattr(self.kernels, name)(call, stream.cuda_stream)

    def new_plan(self, rank: int, num_tokens: int, num_topk: int) -> KernelPlan:
        """Memory for a plan, poisoned: what a kernel does not write shows."""
        shape, local = self.shape, self.contexts[rank].num_local_experts
        ranks = self.window_shape.ep_size
        records = self.kernels.max_records(self.window_shape)
        stride = self.kernels.chunk_stride(self.window_shape)
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "dst_rank": ((num_tokens, num_topk), torch.int32),
            "dst_row": ((num_tokens, num_topk), torch.int32),
            "contributor": ((num_tokens, num_topk), torch.int64),
            "counts": ((ranks, shape.num_experts), torch.int64),
            "tokens_per_expert": ((local,), torch.int64),
            "padded_tokens_per_expert": ((local,), torch.int64),
            "expert_offsets": ((local,), torch.int64),
            "totals": ((4,), torch.int64),
            "record_header": ((records,), torch.int32),
            "record_row": ((records, shape.num_topk), torch.int32),
            "chunk_first": ((ranks, stride), torch.int32),
            "source_tokens": ((ranks,), torch.int32),
        }
        tensors = {
            name: torch.full(size, -77, dtype=dtype, device=self.device)
            for name, (size, dtype) in sizes.items()
        }
        pointers = self.kernels.PlanPointers()
        pointers.num_tokens, pointers.num_topk = num_tokens, num_topk
        for name, tensor in tensors.items():
            setattr(pointers, name, tensor.data_ptr())
        mailbox = _pinned(self.kernels.MAILBOX_BYTES + 8 * local)
        return KernelPlan(tensors=tensors, pointers=pointers, mailbox=mailbox)

    def route_calls(
        self,
        plans: Sequence[KernelPlan],
        topk_idx: Sequence[Tensor],
        alignment: int = 1,
        capacity_rows: int = -1,
    ) -> list[Any]:
        """Arguments of `route` for all ranks; topk_idx: [T, K] int64 each."""
        self._ticket += 1
        calls = []
        for context, plan, routing in zip(self.contexts, plans, topk_idx, strict=True):
            call = self.kernels.RouteArgs(context, plan.pointers)
            call.topk_idx = routing.data_ptr()
            call.alignment, call.capacity_rows = alignment, capacity_rows
            call.mailbox, call.ticket = plan.mailbox.data_ptr(), self._ticket
            calls.append(call)
        return calls

    def new_outputs(
        self, num_rows: Sequence[int], *, weights: bool, shift_bytes: int = 0
    ) -> list[tuple[Tensor, Tensor | None]]:
        """recv_x [rows, hidden] and recv_weights [rows] in the windows, poisoned.

        Args:
            num_rows: of each rank.
            weights: whether there are weights.
            shift_bytes: rank r's rows start r times this later: windows need not be alike.
        """
        outputs: list[tuple[Tensor, Tensor | None]] = []
        for rank, rows in enumerate(num_rows):
            recv_x, recv_weights = self._rows(rank, rows, rank * shift_bytes)
            outputs.append((recv_x, recv_weights if weights else None))
        return outputs

    def place_rows(
        self, expert_out: Sequence[Tensor], row_grads: Sequence[Tensor], *, shift_bytes: int = 0
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Copies of expert rows and of their gradients that lie in the windows, behind outputs.

        Args:
            expert_out: [rows, hidden] of each rank.
            row_grads: [rows] of each rank.
            shift_bytes: as in `new_outputs`.
        """
        placed: tuple[list[Tensor], list[Tensor]] = ([], [])
        for rank, sources in enumerate(zip(expert_out, row_grads, strict=True)):
            start = self.shape.output_bytes + rank * shift_bytes
            for to, source, kept in zip(
                self._rows(rank, len(sources[0]), start), sources, placed, strict=True
            ):
                to.copy_(source)
                kept.append(to)
        return placed

    def _rows(self, rank: int, rows: int, start_bytes: int) -> tuple[Tensor, Tensor]:
        """[rows, hidden] and [rows] fp32 in a window, poisoned, `start_bytes` after its layout."""
        first = self.layout.total_bytes + start_bytes
        size = rows * self.shape.row_bytes
        weights = -(-size // _OUTPUT_ALIGNMENT_BYTES) * _OUTPUT_ALIGNMENT_BYTES
        area = self.windows[rank][first : first + weights + 4 * rows]
        area.fill_(0xDE)
        return (
            area[:size].view(self.shape.dtype).view(rows, self.shape.hidden),
            area[weights:].view(torch.float32),
        )

    def _offset(self, rank: int, tensor: Tensor) -> int:
        """Bytes from the start of the window; of an empty tensor, any place in it."""
        if tensor.numel() == 0:
            return int(self.layout.total_bytes)
        return tensor.data_ptr() - self.windows[rank].data_ptr()

    def dispatch_calls(
        self,
        plans: Sequence[KernelPlan],
        x: Sequence[Tensor],
        topk_weights: Sequence[Tensor] | None,
        outputs: Sequence[tuple[Tensor, Tensor | None]],
        duplicate: int = 0,
    ) -> list[Any]:
        """Arguments of `dispatch` for all ranks; outputs from `new_outputs`."""
        calls = []
        for rank, plan in enumerate(plans):
            recv_x, recv_weights = outputs[rank]
            call = self.kernels.DispatchArgs(self.contexts[rank], plan.pointers)
            call.x, call.row_bytes = x[rank].data_ptr(), self.shape.row_bytes
            call.topk_weights = 0 if topk_weights is None else topk_weights[rank].data_ptr()
            call.recv_x_offset = self._offset(rank, recv_x)
            call.recv_weights_offset = (
                -1 if recv_weights is None else self._offset(rank, recv_weights)
            )
            call.recv_rows, call.duplicate = len(recv_x), duplicate
            calls.append(call)
        return calls

    def combine_calls(
        self,
        plans: Sequence[KernelPlan],
        expert_out: Sequence[Tensor],
        out: Sequence[Tensor],
        row_weights_grad: Sequence[Tensor] | None = None,
        weights_grad: Sequence[Tensor] | None = None,
        form: str = "push",
    ) -> list[Any]:
        """Arguments of `combine` for all ranks; for "gather", rows and gradients in the windows."""
        calls = []
        for rank, plan in enumerate(plans):
            call = self.kernels.CombineArgs(self.contexts[rank], plan.pointers)
            call.expert_out, call.out = expert_out[rank].data_ptr(), out[rank].data_ptr()
            call.hidden, call.exact = self.shape.hidden, int(self.shape.exact)
            call.dtype, call.form = DTYPE_CODES[self.shape.dtype], FORM_CODES[form]
            call.row_weights_grad_offset = -1
            if form == "gather":
                call.expert_out_offset = self._offset(rank, expert_out[rank])
            if row_weights_grad is not None and weights_grad is not None:
                call.row_weights_grad = row_weights_grad[rank].data_ptr()
                call.weights_grad = weights_grad[rank].data_ptr()
                if form == "gather":
                    call.row_weights_grad_offset = self._offset(rank, row_weights_grad[rank])
            calls.append(call)
        return calls

    def mailbox(self, plan: KernelPlan) -> Any:  # noqa: ANN401
        """What the host was told by the last finished `route` of this plan."""
        return self.kernels.read_mailbox(plan.mailbox.data_ptr())

    def fault(self, rank: int) -> Any:  # noqa: ANN401
        """The fault that this rank filed; its field `filed` is 0 where there is none."""
        return self.kernels.read_fault(self.faults[rank].data_ptr())


def _pinned(num_bytes: int) -> Tensor:
    """Zeroed host memory that the GPU can write."""
    return torch.zeros(num_bytes, dtype=torch.uint8).pin_memory()
