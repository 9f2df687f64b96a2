"""What a group of the device tier holds while it is open: communicator, window, tables, words.

Opening is collective and agrees after every step that can fail on one rank alone, so that no rank
waits for another that has given up.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher import native
from ep_dispatcher.agreement import gather_json
from ep_dispatcher.collectives import Collectives
from ep_dispatcher.communicator import Reasons, open_communicator
from ep_dispatcher.config import EpConfig, Topology
from ep_dispatcher.device_memory import OutputPool, heap_bytes_of
from ep_dispatcher.errors import EpTimeoutError, UnavailableError
from ep_dispatcher.memory import RING_DEPTH, partial_bytes
from ep_dispatcher.plan import Placement

PHASES = (
    "no wait",
    "route: own blocks",
    "route: counts",
    "dispatch: entry",
    "dispatch: rows",
    "combine: entry",
    "combine: free slot",
    "combine: partial sums",
    "another warp of the same block",
    "combine: entry (gather)",
    "combine: readers (gather)",
)


class DeviceSession:
    """An open communicator with its shared arena, and what every launch needs.

    Attributes:
        module: the native module.
        context: EpContext of this rank, copied into every launch.
        shape: EpWindowShape.
        device: the GPU.
        outputs: where output rows come from.
    """

    def __init__(
        self,
        collectives: Collectives,
        config: EpConfig,
        placement: Placement,
        communicator: Any,  # noqa: ANN401
        arena: Any,  # noqa: ANN401
    ) -> None:
        """Use `open_session`."""
        self.module = native.load()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._collectives = collectives
        self._communicator = communicator
        self._arena = arena
        self._timeout_s = config.tuning.timeout_s
        self._fault = _pinned(self.module.FAULT_BYTES)
        self._tables = placement_tables(placement, self.device)
        self._failure: EpTimeoutError | None = None
        self.outputs = OutputPool(self.module, arena, self.device)
        self.shape = window_shape(self.module, config, placement)
        self.context = self._make_context(collectives.rank, placement)

    @property
    def fault_address(self) -> int:
        """Where kernels file a fault: pinned host memory."""
        return self._fault.data_ptr()

    def check(self) -> None:
        """Raise if a wait of this rank has expired; costs no synchronisation.

        Raises:
            EpTimeoutError: names who waited for whom and for what.
        """
        if self._failure is None and self.module.read_fault(self.fault_address).filed:
            self._failure = self._describe_fault()
        if self._failure is not None:
            raise self._failure

    def raise_expired(self, phase: str) -> None:
        """Raise after a wait of the host that nothing answered.

        Raises:
            EpTimeoutError: this rank's fault, or that of the peer that filed one.
        """
        self.check()
        filed_by = self._filed_by()
        who = f"rank {filed_by}, which filed a fault" if filed_by >= 0 else "its own GPU"
        self._failure = EpTimeoutError(
            f"rank {self.context.ep_rank} waited {self._timeout_s} s in {phase!r} for {who}; "
            "this group is finished: close it and make a new one",
            rank=self.context.ep_rank,
            peer=filed_by,
            phase=phase,
        )
        raise self._failure

    def close(self, *, failed: bool) -> None:
        """Free everything; collective, unless something has `failed` or a fault ended the group."""
        self.outputs.close()
        torch.cuda.synchronize(self.device)
        faulty = self._failure is not None or self.module.read_fault(self.fault_address).filed
        if failed or faulty or self._filed_by() >= 0:
            self._communicator.abort()
            self._arena.forget()
            return
        self._collectives.all_gather(torch.zeros(1, dtype=torch.int64))  # all are done
        self._arena.close()
        self._communicator.close()

    def _make_context(self, ep_rank: int, placement: Placement) -> Any:  # noqa: ANN401
        context = self.module.Context(self.shape, ep_rank)
        context.num_local_experts = len(placement.local_experts(ep_rank))
        context.timeout_ns = int(self._timeout_s * 1e9)
        context.window_bases = self._arena.window_bases
        context.fault = self.fault_address
        for name, table in self._tables.items():
            setattr(context, name, table.data_ptr())
        return context

    def _describe_fault(self) -> EpTimeoutError:
        fault = self.module.read_fault(self.fault_address)
        phase = PHASES[fault.phase]
        detail = f"channel {fault.channel}: expected {fault.expected}, seen {fault.seen}"
        if fault.rank != self.context.ep_rank:
            detail = "told by that rank"
        return EpTimeoutError(
            f"rank {fault.rank} waited {self._timeout_s} s for rank {fault.peer} in {phase!r} "
            f"({detail}); this group is finished: close it and make a new one",
            rank=fault.rank,
            peer=fault.peer,
            phase=phase,
        )

    def _filed_by(self) -> int:
        """The rank that told this one of its fault, -1 for none; waits for the GPU."""
        return int(self._arena.read_word(self.context.window.error) & _ERROR_RANK_MASK) - 1


def open_session(
    collectives: Collectives, config: EpConfig, topology: Topology, placement: Placement
) -> DeviceSession:
    """Open the device tier on all ranks; collective.

    Raises:
        UnavailableError: on every rank alike, if any rank cannot; names the first and says why.
    """
    reasons = Reasons(collectives)
    _refuse_threads(collectives)
    if topology.num_domains > 1:
        raise UnavailableError("several domains need the rails, which this version has not")
    communicator = open_communicator(collectives)
    arena = None
    module = native.load()
    with reasons:
        _refuse_properties(communicator.properties())
        control_bytes = module.WindowLayout(window_shape(module, config, placement)).total_bytes
        control_bytes = -(-control_bytes // _HEAP_ALIGNMENT_BYTES) * _HEAP_ALIGNMENT_BYTES
        arena = module.Arena(communicator, control_bytes, heap_bytes_of(config, topology))
    reasons.agree()
    with reasons:
        assert arena is not None
        arena.share()
    reasons.agree()
    return DeviceSession(collectives, config, placement, communicator, arena)


_ERROR_RANK_MASK = 0xFFFF  # who filed; see args.h
_HEAP_ALIGNMENT_BYTES = 4096


def placement_tables(placement: Placement, device: torch.device) -> dict[str, Tensor]:
    """What kernels know of a placement, as int32 on `device`.

    Returns:
        expert_rank [E], expert_local [E] (place among the owner's experts), expert_order [E]
        (experts by owner, then id), owner_first [P + 1] (where each owner starts in that order).
    """
    owner = placement.rank_of
    order = torch.argsort(owner, stable=True)
    sizes = torch.bincount(owner, minlength=placement.ep_size)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    local = torch.empty_like(owner)
    local[order] = torch.arange(len(order)) - first[owner[order]]
    tables = {
        "expert_rank": owner,
        "expert_local": local,
        "expert_order": order,
        "owner_first": first,
    }
    return {name: table.to(device, torch.int32) for name, table in tables.items()}


def window_shape(module: Any, config: EpConfig, placement: Placement) -> Any:  # noqa: ANN401
    """EpWindowShape of a group."""
    return module.WindowShape(
        ep_size=placement.ep_size,
        num_experts=placement.num_experts,
        num_topk=config.shape.num_topk,
        num_channels=config.tuning.num_sms,
        ring_depth=RING_DEPTH,
        max_tokens=config.max_tokens_per_rank,
        partial_bytes=partial_bytes(config),
    )


def _refuse_threads(collectives: Collectives) -> None:
    """Kernels of two ranks wait for each other, so they cannot share one process's stream."""
    told = gather_json(collectives, [socket.gethostname(), os.getpid()])
    if len({tuple(place) for place in told}) < collectives.size:
        raise UnavailableError("ranks are threads of one process; give each its own process")


def _refuse_properties(properties: Any) -> None:  # noqa: ANN401
    if not properties.device_api:
        raise UnavailableError("NCCL offers no device API here (NCCL_CUMEM_ENABLE must not be 0)")
    if properties.num_domains > 1:
        raise UnavailableError(
            f"NCCL sees {properties.num_domains} NVLink domains; this version serves one"
        )


def _pinned(num_bytes: int) -> Tensor:
    """Zeroed host memory that the GPU can write."""
    return torch.zeros(num_bytes, dtype=torch.uint8).pin_memory()
