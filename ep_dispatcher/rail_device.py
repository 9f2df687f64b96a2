"""The device tier over several NVLink domains: rails between same-index GPUs.

A plan takes three kernels: `rail_exchange` brings the routing of the rail's other ranks, so that
this rank is home of D segments of tokens; `rail_counts` tells all counts of all domains; `route` is
then that of a single domain. Rows and sums cross in `rail_dispatch` and `rail_return`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher.collectives import Collectives
from ep_dispatcher.combine_form import choose_combine
from ep_dispatcher.communicator import Reasons
from ep_dispatcher.config import EpConfig
from ep_dispatcher.device import DeviceBackend, Routes, gpus_of
from ep_dispatcher.device_session import DeviceSession, open_session
from ep_dispatcher.errors import EpError
from ep_dispatcher.plan import Placement, Plan
from ep_dispatcher.rail_memory import rail_blocks
from ep_dispatcher.residency import RankGpu, check_blocks_fit, gpus_are_shared


@dataclass(frozen=True, eq=False)
class RailRoutes(Routes):
    """Attributes: dst_rank: [T, K] int32, receivers of own tokens among all ranks."""

    dst_rank: Tensor


class RailBackend(DeviceBackend):
    """`DeviceBackend` of a session with rails."""

    _PLAN_KERNELS = 3
    # Kernels of different domains compare neither, so the next plan does.
    _OTHER_CAUSES = (
        "; or it differs from its rail's ranks, which name each other, in whether it passed "
        "topk_weights to an earlier dispatch or took gradients of weights from an earlier combine, "
        "and then this group is finished: close it and create a new one"
    )

    def plan(self, topk_idx: Tensor | None, alignment: int, refusal: str | None) -> Plan | None:
        """See `Backend.plan`."""
        plan = super().plan(topk_idx, alignment, refusal)
        if plan is None:
            return None
        routes = plan.transport
        assert isinstance(routes, Routes)
        dst_rank = self._targets["dst_rank"]
        kept = RailRoutes(routes.pointers, (*routes.memory, dst_rank), dst_rank)
        return dataclasses.replace(plan, transport=kept)

    def _plan_memory(self, num_tokens: int) -> tuple[dict[str, Tensor], Any]:
        """Memory of the domain's plan over all segments, and of own tokens' targets anywhere."""
        tensors, pointers = super()._plan_memory(self._session.shape.max_tokens)
        slots, experts = self._config.shape.num_topk, self._placement.num_experts
        device = self._session.device
        self._targets = {
            name: torch.empty(num_tokens, slots, dtype=torch.int32, device=device)
            for name in ("dst_rank", "dst_row")
        }
        ranks = self._topology.ep_size
        self._targets["counts"] = torch.empty(ranks, experts, dtype=torch.int64, device=device)
        return tensors | self._targets, pointers

    def _route(self, routing: Tensor, pointers: Any, alignment: int, *, asks: bool) -> None:  # noqa: ANN401
        """Launch the kernels of a plan; `route` answers in the mailbox."""
        rails, module = self._rails, self._module
        call = module.RailPlanArgs(self._session.context, rails.rail)
        call.topk_idx, call.num_tokens = routing.data_ptr(), routing.shape[0]
        call.num_topk, call.alignment = routing.shape[1], alignment
        capacity = self._config.recv_capacity_rows
        call.capacity_rows = -1 if capacity is None else capacity
        for name, tensor in self._targets.items():
            setattr(call, name, tensor.data_ptr())
        module.rail_exchange(call, self._stream())
        module.rail_counts(call, self._stream())
        super()._route(routing, pointers, alignment, asks=asks)

    def _launch_route(self, call: Any) -> None:  # noqa: ANN401
        layout, rails = self._rails.rail.layout, self._rails
        call.topk_idx = rails.address(layout.virtual_topk)
        call.segment_shift = rails.address(layout.shift)
        call.segment_tokens = rails.segment_tokens
        call.verdict = rails.address(layout.verdict)
        self._module.route(call, self._stream())

    def _launch_dispatch(self, call: Any, plan: Plan) -> None:  # noqa: ANN401
        routes = _rail_routes_of(plan)
        whole = self._module.RailDispatchArgs(
            call, self._rails.rail, plan.num_tokens, routes.dst_rank.data_ptr()
        )
        self._module.rail_dispatch(whole, self._stream())

    def _launch_combine(self, call: Any, plan: Plan, *, wants_gradients: bool) -> None:  # noqa: ANN401
        """Sum in the domain, then send the sums of other domains' tokens back and add ours."""
        rails, layout = self._rails, self._rails.rail.layout
        call.segment_tokens, call.home_segment = rails.segment_tokens, rails.domain
        call.segment_stride, call.segment_out = layout.slot_bytes, rails.address(layout.landing)
        exact = self._config.precision == "exact" and self._config.shape.dtype != "float32"
        call.own_out = rails.address(layout.own) if exact else 0
        if plan.num_tokens == 0:  # nothing of our own is written, but the domain's kernel asks
            call.out = call.out or rails.address(layout.partials)
            call.weights_grad = rails.address(layout.partials) if wants_gradients else 0
        self._module.combine(call, self._stream())
        whole = self._module.RailReturnArgs(
            call, rails.rail, plan.num_tokens, _rail_routes_of(plan).dst_rank.data_ptr()
        )
        self._module.rail_return(whole, self._stream())

    @property
    def _rails(self) -> Any:  # noqa: ANN401
        assert self._session.rails is not None
        return self._session.rails


def open_backend(collectives: Collectives, config: EpConfig, placement: Placement) -> DeviceBackend:
    """Open the device tier, with rails where NCCL sees several domains; collective.

    Raises:
        UnavailableError: on all ranks alike, if any rank lacks something.
        ConfigError: on all ranks alike, if their blocks do not fit on a GPU that they share.
    """
    gpus = gpus_of(collectives)
    check_blocks_fit(config.tuning.num_sms, gpus)
    shared = gpus_are_shared(gpus)
    session = open_session(collectives, config, placement, gpus_are_shared=shared)
    try:
        return _backend_over(session, collectives, config, placement, gpus)
    except BaseException as error:
        # _backend_over refuses on all ranks alike; any other error may be of this rank alone.
        session.close(failed=not isinstance(error, EpError))
        raise


def _backend_over(
    session: DeviceSession,
    collectives: Collectives,
    config: EpConfig,
    placement: Placement,
    gpus: list[RankGpu],
) -> DeviceBackend:
    """The backend over an open session; raises as `open_backend`."""
    topology = session.topology
    check_blocks_fit(
        config.tuning.num_sms, gpus, lambda sms: rail_blocks(_with_sms(config, sms), topology)
    )
    shared = gpus_are_shared(gpus)
    duplicates = config.tuning.duplicates
    if duplicates == "auto":
        duplicates = "sender" if shared else "receiver"
    form = choose_combine(config, topology, gpus_are_shared=shared)
    kind = RailBackend if topology.num_domains > 1 else DeviceBackend
    reasons, backend = Reasons(collectives), None
    with reasons:
        backend = kind(session, config, topology, placement, duplicates, form)
    reasons.agree()
    assert backend is not None
    return backend


def _with_sms(config: EpConfig, num_sms: int) -> EpConfig:
    """The config with another SM budget."""
    return dataclasses.replace(config, tuning=dataclasses.replace(config.tuning, num_sms=num_sms))


def _rail_routes_of(plan: Plan) -> RailRoutes:
    assert isinstance(plan.transport, RailRoutes)
    return plan.transport
