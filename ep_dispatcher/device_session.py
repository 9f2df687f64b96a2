"""What a group of the device tier holds while it is open: communicator, window, tables, words.

Opening is collective and agrees after every step that can fail on one rank alone, so that no rank
waits for another that has given up.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher import native
from ep_dispatcher.agreement import gather_json
from ep_dispatcher.closing import Closing
from ep_dispatcher.collectives import Collectives
from ep_dispatcher.combine_form import choose_combine
from ep_dispatcher.communicator import Reasons, open_communicator, topology_from
from ep_dispatcher.config import EpConfig
from ep_dispatcher.device_faults import NO_ROOM, Failure, failure_of, filer_of, leaving_word
from ep_dispatcher.device_limits import MAX_BASE_ENTRIES, config_reason
from ep_dispatcher.device_memory import OutputPool, heap_bytes_of
from ep_dispatcher.errors import ClosedError, EpTimeoutError, UnavailableError
from ep_dispatcher.plan import Placement
from ep_dispatcher.rails import (
    DomainView,
    OpenRails,
    check_topology,
    control_bytes_of,
    owner_tables,
)


class DeviceSession:
    """An open communicator with its shared arena, and what every launch needs.

    Attributes:
        module: the native module.
        topology: domains, as NCCL sees them.
        ep_rank: this rank among all.
        context: EpContext of this rank in its domain, copied into every launch.
        shape: EpWindowShape of the domain.
        rails: towards the other domains; None in a single one.
        device: the GPU.
        outputs: where output rows come from.
    """

    def __init__(
        self,
        closing: Closing,
        config: EpConfig,
        domain: DomainView,
        communicator: Any,  # noqa: ANN401
        arena: Any,  # noqa: ANN401
        rails: OpenRails | None,
    ) -> None:
        """Use `open_session`."""
        self.module = native.load()
        self.topology = domain.topology
        self.ep_rank = domain.ep_rank
        self.rails = rails
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._closing = closing
        self._communicator = communicator
        self._arena = arena
        self._timeout_s = config.tuning.timeout_s
        self._fault = _pinned(self.module.FAULT_BYTES)
        self._tables = domain.tables(self.device)
        self._failure: Failure | None = None
        self._is_closed = False
        self.outputs = OutputPool(self.module, arena, self.device)
        self.shape = domain.shape(self.module, config)
        self.context = self._make_context(domain)

    @property
    def fault_address(self) -> int:
        """Where kernels file a fault: pinned host memory."""
        return self._fault.data_ptr()

    def check(self) -> None:
        """Raise if a wait of this rank has expired or found the group ended; waits for nothing.

        Raises:
            ClosedError: after `close`; the fault word may be gone, and what a launch names is.
            EpTimeoutError: names who waited for whom and for what, or who left.
            AgreementError: only some ranks passed weights to a dispatch.
            CapacityError: a rank had no room for output rows, and left.
        """
        if self._is_closed:
            raise ClosedError
        failure = self._known_failure()
        if failure is not None:
            raise failure

    def raise_expired(self, phase: str) -> None:
        """Raise after a wait of the host that nothing answered.

        Raises:
            EpTimeoutError: this rank's fault, or that of the peer that filed one.
        """
        self.check()
        filed_by = filer_of(self._error_word())
        who = f"rank {filed_by}, which filed a fault" if filed_by >= 0 else "its own GPU"
        self._failure = EpTimeoutError(
            f"rank {self.ep_rank} waited {self._timeout_s} s in {phase!r} for {who}; "
            "this group is finished: close it and make a new one",
            rank=self.ep_rank,
            peer=filed_by,
            phase=phase,
        )
        raise self._failure

    def close(self, *, failed: bool) -> None:
        """Free everything; collective, unless something has `failed` or a fault ended the group.

        Peers that wait for a rank that leaves are told, in kernels and here, so that they leave
        at once.

        Raises:
            EpTimeoutError: another rank has neither closed nor left in time; all is freed here.
            EpTimeoutError, AgreementError, CapacityError: as `check`, unless it was raised before
                or something has `failed`: the last calls met a fault that no later call could
                raise. All is freed here.
        """
        self._is_closed = True
        all_close = False
        try:
            if failed or self._is_faulty():
                self._leave()
            self.outputs.close()
            torch.cuda.synchronize(self.device)  # raises where the CUDA context is gone
            unraised = None if failed or self._failure is not None else self._known_failure()
            if not failed and not self._is_faulty() and filer_of(self._error_word()) < 0:
                all_close = self._closing.all_close(self._timeout_s)
        finally:
            if not all_close:
                self._abandon()
        if all_close:
            self._free_together()
        if unraised is not None:
            raise unraised

    def _leave(self) -> None:
        """Tell the peers, in the closing and in kernels; those whom a filed fault has told know."""
        self._closing.leave()
        if not self._fault_filed():  # there is none of a wait of the host, see `raise_expired`
            with contextlib.suppress(RuntimeError):  # a CUDA context that is gone tells nobody
                word = leaving_word(self.ep_rank, self.outputs.refused_bytes)
                self._arena.write_word(self.context.window.error, word)

    def _abandon(self) -> None:
        """Free this rank's part alone."""
        self._closing.leave()
        _Opened(self._communicator, self._arena, self.rails).abandon()

    def _free_together(self) -> None:
        if self.rails is not None:
            self.rails.close()
        self._arena.close()
        self._communicator.close()

    def _make_context(self, domain: DomainView) -> Any:  # noqa: ANN401
        context = self.module.Context(self.shape, domain.index)
        context.first_rank = domain.first_rank
        context.num_local_experts = len(domain.placement.local_experts(domain.ep_rank))
        context.timeout_ns = max(1, int(self._timeout_s * 1e9))
        last_rank = domain.first_rank + domain.topology.domain_size
        context.window_bases = self._arena.window_bases[domain.first_rank : last_rank]
        context.fault = self.fault_address
        for name, table in self._tables.items():
            setattr(context, name, table.data_ptr())
        return context

    def _known_failure(self) -> Failure | None:
        """What has ended this group, if a call has raised it or a kernel has filed it."""
        if self._failure is None and self._fault_filed():
            fault = self.module.read_fault(self.fault_address)
            word = self._error_word() if fault.phase == NO_ROOM else 0
            self._failure = failure_of(fault, word, self.ep_rank, self._timeout_s, self.topology)
        return self._failure

    def _is_faulty(self) -> bool:
        return self._failure is not None or self._fault_filed()

    def _fault_filed(self) -> bool:
        return bool(self.module.read_fault(self.fault_address).filed)

    def _error_word(self) -> int:
        """What a peer has told this rank; 0 for nothing."""
        return int(self._arena.read_word(self.context.window.error))


def open_session(
    collectives: Collectives, config: EpConfig, placement: Placement, *, gpus_are_shared: bool
) -> DeviceSession:
    """Open the device tier on all ranks; collective.

    Args:
        collectives: over all ranks.
        config: of the group.
        placement: owner of each expert.
        gpus_are_shared: whether two ranks have the same GPU, which decides the form of combine.

    Raises:
        UnavailableError: on every rank alike, if any rank cannot; names the first and says why.
        ConfigError: on every rank alike; see `choose_combine`.
    """
    _refuse_threads(collectives)
    closing = Closing(collectives)
    communicator = open_communicator(collectives)
    opened = _Opened(communicator)
    try:
        return _open_over(opened, collectives, closing, config, placement, gpus_are_shared)
    except BaseException:
        opened.abandon()
        raise


@dataclass
class _Opened:
    """What a session that is being opened holds so far."""

    communicator: Any
    arena: Any = None
    rails: OpenRails | None = None

    def abandon(self) -> None:
        """Free this rank's part alone."""
        self.communicator.abort()
        if self.rails is not None:
            self.rails.forget()
        if self.arena is not None:
            self.arena.forget()


def _open_over(
    opened: _Opened,
    collectives: Collectives,
    closing: Closing,
    config: EpConfig,
    placement: Placement,
    gpus_are_shared: bool,
) -> DeviceSession:
    """What `open_session` does once there is a communicator."""
    communicator, reasons = opened.communicator, Reasons(collectives)
    num_domains = communicator.properties().num_domains
    topology = topology_from(num_domains, collectives.size, config.virtual_domain_size)
    check_topology(topology)
    reason = config_reason(config, topology.num_domains)
    if reason is not None:
        raise UnavailableError(reason)
    form = choose_combine(config, topology, gpus_are_shared=gpus_are_shared)
    domain = DomainView(topology, placement, collectives.rank)
    module = native.load()
    with reasons:
        check_table_fits(placement, topology.domain_size)
        control_bytes = control_bytes_of(module, config, domain)
        control_bytes = -(-control_bytes // _HEAP_ALIGNMENT_BYTES) * _HEAP_ALIGNMENT_BYTES
        heap_bytes = heap_bytes_of(config, topology, form)
        opened.arena = module.Arena(communicator, control_bytes, heap_bytes)
    reasons.agree()
    with reasons:
        opened.arena.share()
    reasons.agree()
    if topology.num_domains > 1:
        with reasons:
            opened.rails = OpenRails(config, domain, communicator, opened.arena)
        reasons.agree()
    session = None
    with reasons:
        session = DeviceSession(closing, config, domain, communicator, opened.arena, opened.rails)
    reasons.agree()
    assert session is not None
    return session


_HEAP_ALIGNMENT_BYTES = 4096


def check_table_fits(
    placement: Placement, domain_size: int, max_entries: int = MAX_BASE_ENTRIES
) -> None:
    """Refuse a table of experts that `route` has no room for, before any rank waits for another.

    Args:
        placement: owner of each expert.
        domain_size: ranks of a domain.
        max_entries: experts of one rank x ranks of its domain, at most.

    Raises:
        UnavailableError: on all ranks alike; names the first rank that owns too many experts.
    """
    most = max_entries // domain_size
    for rank in range(placement.ep_size):
        owned = len(placement.local_experts(rank))
        if owned > most:
            raise UnavailableError(
                f"expert_rank gives rank {rank} {owned} experts; with {domain_size} ranks in a "
                f"domain the device tier has room for {most} on each: spread them more evenly, or "
                "take the reference tier"
            )


def placement_tables(placement: Placement, device: torch.device) -> dict[str, Tensor]:
    """What kernels of a single domain know of a placement; see `rails.owner_tables`."""
    return owner_tables(placement.rank_of, placement.ep_size, device)


def _refuse_threads(collectives: Collectives) -> None:
    """Kernels of two ranks wait for each other, so they cannot share one process's stream."""
    told = gather_json(collectives, [socket.gethostname(), os.getpid()])
    if len({tuple(place) for place in told}) < collectives.size:
        raise UnavailableError("ranks are threads of one process; give each its own process")


def _pinned(num_bytes: int) -> Tensor:
    """Zeroed host memory that the GPU can write."""
    return torch.zeros(num_bytes, dtype=torch.uint8).pin_memory()
