"""The device tier: our kernels, where every rank has what they need.

Eager mode waits once a plan, for the few bytes of the mailbox that `route` writes. Static mode
(`recv_capacity_rows`) waits for nothing and can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ep_dispatcher import native
from ep_dispatcher.agreement import gather_json
from ep_dispatcher.collectives import Collectives
from ep_dispatcher.config import EpConfig, Topology
from ep_dispatcher.device_limits import config_reason
from ep_dispatcher.device_session import DeviceSession
from ep_dispatcher.device_wait import wait_for_answer
from ep_dispatcher.errors import AgreementError, ConfigError, RoutingError, ShapeError
from ep_dispatcher.plan import Placement, Plan
from ep_dispatcher.residency import RankGpu

DTYPE_CODES = {"bfloat16": 0, "float16": 1, "float32": 2}  # EpDtype
_FORM_CODES = {"push": 0, "gather": 1}  # EpCombineForm
_DUPLICATE_CODES = {"sender": 0, "receiver": 1}  # EpDuplicate
_REFUSED_ALIGNMENT = 4095  # no power of two, so no rank can have asked for it
_TICKET_BYTES = 8
_WAIT_SLICE_S = 0.05


def unavailable_reason(config: EpConfig) -> str | None:
    """Say in one sentence why this rank cannot run the device tier; None where it can."""
    reason = config_reason(config)
    if reason is not None:
        return reason
    if not torch.cuda.is_available():
        return "no GPU is visible to torch"
    return native.missing_reason()


Given = ParamSpec("Given")
Result = TypeVar("Result")


def _on_its_gpu(
    call: Callable[Concatenate[DeviceBackend, Given], Result],
) -> Callable[Concatenate[DeviceBackend, Given], Result]:
    """Run a call on the group's GPU, whichever is the current one, as operations of torch do."""

    @functools.wraps(call)
    def guarded(self: DeviceBackend, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with torch.cuda.device(self._session.device):
            return call(self, *args, **kwargs)

    return guarded


@dataclass(frozen=True, eq=False)
class Routes:
    """The device tier's part of a plan.

    Attributes:
        pointers: EpPlan.
        memory: what it points into.
    """

    pointers: Any
    memory: tuple[Tensor, ...]

    def used_on(self, stream: torch.cuda.Stream) -> Any:  # noqa: ANN401
        """The pointers, for a launch on a stream that may not be the one that planned.

        Users cannot tell torch of it themselves, as they do not see the memory.
        """
        for tensor in self.memory:
            tensor.record_stream(stream)
        return self.pointers


class DeviceBackend:
    """`Backend` over the kernels.

    Args:
        session: open on all ranks.
        config: of the group.
        topology: of the group.
        placement: owner of each expert.
        duplicates: who makes further copies of a token; equal on all ranks.
        form: of combine, "push" or "gather"; equal on all ranks.
    """

    _PLAN_KERNELS = 1  # each has a deadline of its own
    _OTHER_CAUSES = ""  # why a plan may be refused, beside routing and alignment

    def __init__(
        self,
        session: DeviceSession,
        config: EpConfig,
        topology: Topology,
        placement: Placement,
        duplicates: str,
        form: str,
    ) -> None:
        """Keep what every call needs."""
        self.combine_form = form
        self.duplicates = duplicates
        self._duplicate = _DUPLICATE_CODES[duplicates]
        self._session = session
        self._module = session.module
        self._config = config
        self._topology = topology
        self._placement = placement
        self._dtype: torch.dtype = getattr(torch, config.shape.dtype)
        num_local = session.context.num_local_experts
        self._mailbox = torch.zeros(
            self._module.MAILBOX_BYTES + 8 * num_local, dtype=torch.uint8
        ).pin_memory()
        self._ticket = 0
        self._begun = torch.cuda.Event()  # the stream has come to a plan's kernels

    @property
    def topology(self) -> Topology:
        """Domains, as NCCL sees them."""
        return self._topology

    @property
    def heap_bytes(self) -> int:
        """Memory that output rows are cut from, as `device_memory.heap_bytes_of` sized it."""
        return self._session.outputs.heap_bytes

    @_on_its_gpu
    def plan(self, topk_idx: Tensor | None, alignment: int, refusal: str | None) -> Plan | None:
        """See `Backend.plan`.

        Raises:
            ConfigError: a graph is being captured, and the group is not in static mode.
            ShapeError: the routing lies elsewhere; the others learn of it like of any refusal.
        """
        self.check()
        if self._config.recv_capacity_rows is None and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "a plan whose size the host waits for cannot be captured in a CUDA graph; set "
                "recv_capacity_rows, which makes all sizes fixed"
            )
        if topk_idx is None:
            assert refusal is not None
            self._refuse_to_plan()
            return None
        try:
            routing = self._padded(self._on_device("topk_idx", topk_idx), -1)
        except ShapeError:
            self._refuse_to_plan()
            raise
        tensors, pointers = self._plan_memory(len(routing))
        num_rows = self._config.recv_capacity_rows
        if num_rows is None:
            self._begun.record(torch.cuda.current_stream(self._session.device))
        self._route(routing, pointers, alignment, asks=True)
        demand_rows: int | Tensor = tensors["totals"][1]
        segment_rows = None
        if num_rows is None:
            letter = self._wait_for_letter(alignment)
            num_rows, demand_rows = int(letter.num_rows), int(letter.demand_rows)
            segment_rows = self._segment_rows(alignment)
        slots = topk_idx.shape[1]
        return Plan(
            ep_rank=self._session.ep_rank,
            topology=self._topology,
            placement=self._placement,
            alignment=alignment,
            topk_idx=topk_idx,
            counts=tensors["counts"],
            dst_rank=tensors["dst_rank"][:, :slots].long(),
            dst_row=tensors["dst_row"][:, :slots].long(),
            tokens_per_expert=tensors["tokens_per_expert"],
            padded_tokens_per_expert=tensors["padded_tokens_per_expert"],
            expert_offsets=tensors["expert_offsets"],
            num_recv_rows=num_rows,
            demand_rows=demand_rows,
            segment_rows=segment_rows,
            transport=Routes(pointers, (routing, tensors["words"], tensors["longs"])),
        )

    @_on_its_gpu
    def dispatch(
        self, plan: Plan, x: Tensor, topk_weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.dispatch`."""
        self.check()
        x = _aligned(self._on_device("x", x))
        shape, rows = self._config.shape, plan.num_recv_rows
        outputs = self._session.outputs
        call = self._module.DispatchArgs(self._session.context, self._pointers_of(plan))
        recv_x = outputs.empty((rows, shape.hidden), self._dtype)
        recv_weights = None
        if topk_weights is not None:
            topk_weights = self._padded(self._on_device("topk_weights", topk_weights), 0.0)
            recv_weights = outputs.empty((rows,), torch.float32)
            call.topk_weights = topk_weights.data_ptr()
        call.x, call.row_bytes = x.data_ptr(), shape.row_bytes
        call.recv_x_offset = outputs.offset_of(recv_x)
        call.recv_weights_offset = outputs.offset_of(recv_weights)
        call.recv_rows, call.duplicate = rows, self._duplicate
        self._launch_dispatch(call, plan)
        return recv_x, recv_weights

    @_on_its_gpu
    def combine(
        self, plan: Plan, expert_out: Tensor, row_weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.combine`."""
        self.check()
        expert_out = _aligned(self._on_device("expert_out", expert_out))
        expert_out = self._reachable(expert_out)
        shape, outputs = self._config.shape, self._session.outputs
        call = self._module.CombineArgs(self._session.context, self._pointers_of(plan))
        call.row_weights_grad_offset = -1
        gathers = self.combine_form == "gather"
        out = self._plain((plan.num_tokens, shape.hidden), self._dtype)
        weights = None
        if row_weights is not None:
            row_weights = self._reachable(self._on_device("row_weights", row_weights))
            weights = self._plain((plan.num_tokens, shape.num_topk), torch.float32)
            call.row_weights_grad, call.weights_grad = row_weights.data_ptr(), weights.data_ptr()
            call.row_weights_grad_offset = outputs.offset_of(row_weights) if gathers else -1
        call.expert_out, call.out = expert_out.data_ptr(), out.data_ptr()
        call.expert_out_offset = outputs.offset_of(expert_out) if gathers else 0
        call.hidden, call.dtype = shape.hidden, DTYPE_CODES[shape.dtype]
        call.exact = int(self._config.precision == "exact")
        call.form = _FORM_CODES[self.combine_form]
        self._launch_combine(call, plan, wants_gradients=weights is not None)
        return out, None if weights is None else weights[:, : plan.num_topk]

    @_on_its_gpu
    def empty_rows(self, plan: Plan) -> Tensor:
        """See `Backend.empty_rows`; in the arena where combine gathers, else plain memory."""
        sizes = (plan.num_recv_rows, self._config.shape.hidden)
        if self.combine_form == "gather":
            return self._session.outputs.empty(sizes, self._dtype)
        return self._plain(sizes, self._dtype)

    def _plain(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=self._session.device)

    def _reachable(self, values: Tensor) -> Tensor:
        """The values where peers can read them, if they have to."""
        if self.combine_form == "push":
            return values
        return self._session.outputs.holding(values)

    def check(self) -> None:
        """See `Backend.check`."""
        self._session.check()
        self._check_letter()

    def _check_letter(self) -> None:
        """Raise if, in static mode, an earlier routing must not be used."""
        if self._config.recv_capacity_rows is None:
            return
        letter = self._module.read_mailbox(self._mailbox.data_ptr())
        if letter.ticket:
            self._mailbox[:_TICKET_BYTES] = 0
            self._refuse(letter, "than ours in an earlier plan")

    @_on_its_gpu
    def close(self, *, failed: bool = False) -> None:
        """Free the tier; collective, unless something has failed or a fault ended the group.

        Raises:
            EpTimeoutError: another rank has neither closed nor left in time.
            EpTimeoutError, EpError: as `check`, unless something has `failed`: what the last calls
                met. All is freed here.
        """
        self._session.close(failed=failed)
        if not failed:
            self._check_letter()

    def _refuse_to_plan(self) -> None:
        """Take part in a plan with no tokens, and with an alignment that nobody else has."""
        nothing = torch.empty(
            0, self._config.shape.num_topk, dtype=torch.int64, device=self._session.device
        )
        _, pointers = self._plan_memory(0)
        self._route(nothing, pointers, _REFUSED_ALIGNMENT, asks=False)

    def _route(self, routing: Tensor, pointers: Any, alignment: int, *, asks: bool) -> None:  # noqa: ANN401
        """Launch `route`; where the host asks, it answers in the mailbox.

        In static mode it does so only if the routing must not be used: `check` looks.
        """
        capacity = self._config.recv_capacity_rows
        call = self._module.RouteArgs(self._session.context, pointers)
        call.topk_idx, call.alignment = routing.data_ptr(), alignment
        call.capacity_rows = -1 if capacity is None else capacity
        if asks:
            self._ticket += 1
            call.mailbox, call.ticket = self._mailbox.data_ptr(), self._ticket
            call.only_refusals = int(capacity is not None)
        self._launch_route(call)

    def _launch_route(self, call: Any) -> None:  # noqa: ANN401
        self._module.route(call, self._stream())

    def _launch_dispatch(self, call: Any, plan: Plan) -> None:  # noqa: ANN401
        self._module.dispatch(call, self._stream())

    def _launch_combine(self, call: Any, plan: Plan, *, wants_gradients: bool) -> None:  # noqa: ANN401
        self._module.combine(call, self._stream())

    def _wait_for_letter(self, alignment: int) -> Any:  # noqa: ANN401
        """The host's one wait: for the mailbox of the last `route`."""
        address = self._mailbox.data_ptr()
        if not self._answered(address):
            self._session.raise_expired("route: counts")
        self._session.check()  # after a fault `route` has worked on what was not there
        letter = self._module.read_mailbox(address)
        self._refuse(letter, f"than {alignment}, so no rank may go on")
        return letter

    def _refuse(self, letter: Any, consequence: str) -> None:  # noqa: ANN401
        """Raise if a routing must not be used.

        Raises:
            RoutingError: this rank's names an expert that is not there.
            AgreementError: another rank's does, or alignments differ, or `_OTHER_CAUSES`.
        """
        if letter.bad_token >= 0:
            raise RoutingError(
                f"topk_idx[{letter.bad_token}] names expert {letter.bad_expert}; it must be in "
                f"[0, {self._placement.num_experts - 1}], or -1 for a dropped slot"
            )
        if letter.refused_rank >= 0:
            raise AgreementError(
                f"rank {letter.refused_rank} refused its routing or passed an alignment other "
                f"{consequence}; its own error says more{self._OTHER_CAUSES}"
            )

    def _segment_rows(self, alignment: int) -> Tensor:
        """[L] int64, rows of each local expert with padding, from the letter just read."""
        real = self._mailbox[self._module.MAILBOX_BYTES :].view(torch.int64)
        return (real + (alignment - 1)) // alignment * alignment

    def _answered(self, address: int) -> bool:
        """Wait for the ticket; False once the plan's kernels have ended without writing it."""
        fault = self._session.fault_address
        return wait_for_answer(
            lambda: self._module.wait_for_mailbox(address, self._ticket, fault, _WAIT_SLICE_S),
            self._begun.query,
            torch.cuda.current_stream(self._session.device).query,
            self._PLAN_KERNELS * self._config.tuning.timeout_s,
        )

    def _plan_memory(self, num_tokens: int) -> tuple[dict[str, Tensor], Any]:
        """Memory that `route` fills: two blocks, cut by name; and EpPlan over them."""
        shape, module, slots = self._session.shape, self._module, self._config.shape.num_topk
        local = self._session.context.num_local_experts
        ranks, records = shape.ep_size, module.max_records(shape)
        longs = {
            "counts": (ranks, shape.num_experts),
            "tokens_per_expert": (local,),
            "padded_tokens_per_expert": (local,),
            "expert_offsets": (local,),
            "totals": (4,),
            "contributor": (num_tokens, slots),
        }
        words = {
            "dst_rank": (num_tokens, slots),
            "dst_row": (num_tokens, slots),
            "record_header": (records,),
            "record_row": (records, slots),
            "chunk_first": (ranks, module.chunk_stride(shape)),
            "source_tokens": (ranks,),
        }
        tensors = self._cut("longs", longs, torch.int64) | self._cut("words", words, torch.int32)
        pointers = module.PlanPointers()
        pointers.num_tokens, pointers.num_topk = num_tokens, slots
        for name in (*longs, *words):
            setattr(pointers, name, tensors[name].data_ptr())
        return tensors, pointers

    def _cut(
        self, name: str, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """One block called `name`, and views of it, each starting at a cache line."""
        step = 128 // dtype.itemsize
        starts, end = {}, 0
        for part, sizes in shapes.items():
            starts[part] = end
            end += -(-_elements(sizes) // step) * step
        block = torch.empty(end, dtype=dtype, device=self._session.device)
        parts = {
            part: block[start : start + _elements(shapes[part])].view(shapes[part])
            for part, start in starts.items()
        }
        return parts | {name: block}

    def _padded(self, values: Tensor, filler: float) -> Tensor:
        """[T, k] with as many slots as the group was made for, so that all ranks have equal K."""
        missing = self._config.shape.num_topk - values.shape[1]
        if missing == 0:
            return values.contiguous()
        return torch.nn.functional.pad(values, (0, missing), value=filler)

    def _on_device(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor, contiguous.

        Raises:
            ShapeError: it lies elsewhere.
        """
        if tensor.device != self._session.device:
            raise ShapeError(
                f"{name} is on {tensor.device}; the device tier of this rank works on "
                f"{self._session.device}"
            )
        return tensor.detach().contiguous()

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._session.device).cuda_stream

    def _pointers_of(self, plan: Plan) -> Any:  # noqa: ANN401
        """EpPlan, for a launch on the current stream."""
        assert isinstance(plan.transport, Routes)
        return plan.transport.used_on(torch.cuda.current_stream(self._session.device))


def gpus_of(collectives: Collectives) -> list[RankGpu]:
    """The current GPU of each rank; collective."""
    own = torch.cuda.get_device_properties(torch.cuda.current_device())
    told = gather_json(collectives, [str(own.uuid), own.multi_processor_count])
    return [RankGpu(str(uuid), int(str(sm_count))) for uuid, sm_count in told]


def _aligned(rows: Tensor) -> Tensor:
    """The rows themselves if they start at a multiple of 16 bytes, else a copy."""
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


def _elements(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
