"""EPGroup: opens a tier over a process group, checks what users pass, and closes it all."""

from __future__ import annotations

import logging
import weakref
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher import device, ops, rail_device, ranges, validate
from ep_dispatcher.agreement import check_equal_configs, config_values, gather_json
from ep_dispatcher.backend import Backend
from ep_dispatcher.collectives import Collectives
from ep_dispatcher.config import EpConfig, Topology, Tuning, check_alignment
from ep_dispatcher.errors import (
    AgreementError,
    ClosedError,
    ConfigError,
    EpError,
    ShapeError,
    UnavailableError,
)
from ep_dispatcher.ledger import LedgerBackend
from ep_dispatcher.plan import Placement, Plan
from ep_dispatcher.reference import ReferenceBackend

logger = logging.getLogger("ep_dispatcher")


class EPGroup:
    """The ranks that share the experts of a layer, and the tier that moves tokens among them.

    Make one with `EPGroup.create`; it is a context manager. One group serves any number of
    layers, plans and calls; all calls are collective and in the same order on all ranks. So are
    their backwards: each rank must want gradients of a dispatch (of x or of the weights), or none
    may, and a rank without tokens runs its backward too. Calls of a group on different streams must
    be ordered by events.

    Attributes:
        config: what the group was made with.
        topology: NVLink domains.
        placement: owner of each expert.
        tier: "reference" or "device", the same on all ranks.
        ep_rank: this rank, in [0, P).
        ep_size: P.

    Example (4 ranks, 8 experts, each rank with its own routing):
        with EPGroup.create(None, EpConfig(shape=MoeShape(hidden=64, num_topk=2, num_experts=8),
                                           max_tokens_per_rank=4096)) as group:
            plan = group.plan(topk_idx)
            recv_x, recv_weights = group.dispatch(plan, x, topk_weights)
            out = group.combine(plan, experts(recv_x, plan.tokens_per_expert, recv_weights))
    """

    def __init__(
        self, config: EpConfig, topology: Topology, tier: str, backend: Backend, ep_rank: int
    ) -> None:
        """Use `create`."""
        self.config = config
        self.topology = topology
        self.placement = placement_of(config, topology.ep_size)
        self.tier = tier
        self.ep_rank = ep_rank
        self.ep_size = topology.ep_size
        self._backend: Backend | None = backend
        self._plans: weakref.WeakSet[Plan] = weakref.WeakSet()  # those made here and still in use

    @classmethod
    def create(cls, process_group: dist.ProcessGroup | None, config: EpConfig) -> EPGroup:
        """Open a group; collective.

        Args:
            process_group: a torch.distributed group; None for the default one.
            config: equal on all ranks.

        Raises:
            AgreementError: configs differ, or another rank passed no EpConfig; names the rank, the
                field and both values.
            ConfigError: no EpConfig, or one that does not fit the number of ranks.
            TypeError: process_group is no group, or one that this rank is not a member of.
            UnavailableError: tier "device" was asked for and a rank lacks something; says what.
        """
        collectives = Collectives(_group_or_default(process_group))
        told = gather_json(collectives, _introduction(config))
        _check_configs(config, told)
        topology = topology_of(config, collectives.size)
        placement = placement_of(config, collectives.size)
        tier, why = _choose_tier(config, [each["refusal"] for each in told])
        backend: Backend = ReferenceBackend(collectives, config, topology, placement)
        if tier == "device":
            try:
                opened = rail_device.open_backend(collectives, config, placement)
                backend, topology = opened, opened.topology
            except UnavailableError as error:
                if config.tier == "device":
                    raise
                tier, why = "reference", str(error)
        if config.debug_ledger:
            backend = LedgerBackend(backend, collectives, every_call=tier == "reference")
        if collectives.rank == 0:
            logger.info("group of %d ranks: tier %s (%s)", collectives.size, tier, why)
            if tier != "device" and any(each["sees_gpu"] for each in told):
                _warn_of_fallback(config, why)
            _warn_of_idle_knobs(config)
        return cls(config, topology, tier, backend, collectives.rank)

    def plan(self, topk_idx: Tensor, alignment: int | None = None) -> Plan:
        """Plan a routing; collective.

        In static mode of the device tier (`recv_capacity_rows`) the host does not wait, so the
        RoutingError of an id that is not there, and the AgreementError of the other ranks, come
        from a later call, and not from the same one on all ranks: where one raises, another may
        have launched already, and its kernels wait. So after either error ranks go on only once
        all have synchronized and `check` has passed on all. A rank that had launched too much
        finds an EpTimeoutError there, and the group is finished: synchronize and check right
        after a plan that may be refused.

        Args:
            topk_idx: [T, K] int64, expert of each slot in [0, E), -1 for a dropped slot. T and K
                may differ between ranks and calls; T may be 0; an expert may be listed twice.
            alignment: rows; None for the config's.

        Raises:
            ShapeError, RoutingError, ConfigError: this rank's input cannot be planned.
            AgreementError: another rank's input cannot be planned, or alignments differ.
        """
        backend = self._open_backend()
        rows = self.config.alignment if alignment is None else alignment
        try:
            check_alignment(rows)
            validate.check_topk_idx(topk_idx, self.config)
            if self.tier == "reference" or self.config.check_values:
                validate.check_expert_ids(topk_idx, self.config.shape.num_experts)
        except EpError as error:
            backend.plan(None, 0, str(error))
            raise
        with ranges.phase(ranges.PLAN, on_gpu=topk_idx.is_cuda):
            plan = backend.plan(topk_idx, rows, None)
        assert plan is not None
        self._plans.add(plan)
        return plan

    def dispatch(
        self, plan: Plan, x: Tensor, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Send each token to the experts of its slots; collective, differentiable.

        Args:
            plan: of this group.
            x: [T, H] rows of the config's dtype.
            topk_weights: [T, K] fp32 (float64 for float64 rows), or None on all ranks.

        Returns:
            recv_x [R, H], expert-major, and recv_weights [R] (or None); padding rows are zero.

        Raises:
            ShapeError: not a dense tensor, wrong dtype or shape, or a plan of another group.
            RoutingError: a weight that is not finite, with `check_values`.
            CapacityError: device tier: this rank's memory for output rows (`output_bytes`) is
                full. The others wait for it, within their deadline: drop outputs and call again,
                or close the group with `failed`, which tells them.
        """
        backend = self._open_backend()
        self._check_plan(plan)
        validate.check_rows("x", x, plan.num_tokens, self.config)
        if topk_weights is not None:
            validate.check_topk_weights(topk_weights, plan, self.config)
        return ops.dispatch(x, topk_weights, plan, backend)

    def combine(self, plan: Plan, expert_out: Tensor) -> Tensor:
        """Sum the rows of each token at its home rank; collective, differentiable.

        Args:
            plan: the one that `dispatch` used.
            expert_out: [R, H] rows of the config's dtype; padding rows are ignored.

        Returns:
            [T, H]; a token without copies gets zeros. The order of the sum is fixed
            (`ep_dispatcher.reference` gives it), so the bits are the same on every run.

        Raises:
            ShapeError: wrong dtype or shape, or a plan of another group.
        """
        backend = self._open_backend()
        self._check_plan(plan)
        validate.check_rows("expert_out", expert_out, plan.num_recv_rows, self.config)
        return ops.combine(expert_out, plan, backend)

    def empty_rows(self, plan: Plan) -> Tensor:
        """Memory for the rows that the experts return; not collective.

        `combine` takes rows from anywhere, but where it lets peers read them (`Tuning.combine`
        "gather"), rows that lie elsewhere are copied first, which costs a read and a write of
        all of them. So let the experts' last operation write into this (`out=`).

        Args:
            plan: of this group.

        Returns:
            [R, H], uninitialised, of the config's dtype; an ordinary tensor in every other way.

        Raises:
            ShapeError: a plan of another group.
            CapacityError: device tier: `output_bytes` has no room for it.
        """
        backend = self._open_backend()
        self._check_plan(plan)
        return backend.empty_rows(plan)

    def check(self) -> None:
        """Raise what earlier calls have met on the device since they returned; waits for nothing.

        Every other call checks first; this one is for those who replay a CUDA graph, and for the
        last calls before results are kept: those (a checkpoint's gradients, say) are right only
        once the stream of the calls was synchronized and `check` has passed after it. A fault
        leaves rows unwritten, and no call waits for its kernels.

        Raises:
            EpTimeoutError: a rank did not come in time, or left; the group is finished.
            CapacityError: a rank left that had no room for output rows; likewise.
            AgreementError: only some ranks passed topk_weights to a dispatch; likewise.
            RoutingError, AgreementError: static mode: an earlier routing must not be used. Ranks
                learn of it at different calls: go on only once all have synchronized and checked.
        """
        self._open_backend().check()

    def close(self, *, failed: bool = False) -> None:
        """Free what the tier holds; collective; a second call does nothing.

        Rows that calls returned stay valid; the backward of a call raises ClosedError.

        Args:
            failed: this rank leaves because of an error, so it must not wait for the others. Device
                tier: those that wait for it raise at once, and say that it left; those that close
                free their part and return.

        Raises:
            EpTimeoutError: device tier: a rank neither closed nor left within the deadline; all is
                freed here.
            EpTimeoutError, EpError: device tier: what `check` would have raised of the last calls,
                unless `failed`; all is freed here.
        """
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close(failed=failed)

    def __enter__(self) -> Self:
        """Return the group."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the group; an error that is being raised goes on, whatever the close meets."""
        try:
            self.close(failed=error is not None)
        except (EpError, RuntimeError) as met:
            if error is None:
                raise
            logger.warning("after %s, the close of its group failed too: %s", kind, met)

    def _open_backend(self) -> Backend:
        """The tier, unless the group was closed."""
        if self._backend is None:
            raise ClosedError
        return self._backend

    def _check_plan(self, plan: Plan) -> None:
        """Raise unless this group made the plan: another's may name other buffers and peers."""
        if not isinstance(plan, Plan):
            raise ShapeError(f"plan is {plan!r}; it must be what `plan` of this group returned")
        if plan not in self._plans:
            raise ShapeError("this plan was made by another group; use the group that made it")


def _group_or_default(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself; the default one for None."""
    if process_group is None:
        process_group = dist.group.WORLD
        if process_group is None:
            raise ConfigError(
                "there is no default process group; call torch.distributed."
                "init_process_group first or pass a group"
            )
    # By what is called on it: a bare backend (ProcessGroupGloo, say) is no ProcessGroup to Python.
    if not all(callable(getattr(process_group, name, None)) for name in ("rank", "allgather")):
        raise TypeError(
            f"process_group is {process_group!r}; it must be a torch.distributed.ProcessGroup "
            "that this rank is a member of (new_group returns none to the other ranks), or None "
            "for the default one"
        )
    return process_group


def _introduction(config: object) -> dict[str, Any]:
    """What a rank tells the others before it opens anything; plain values."""
    if not isinstance(config, EpConfig):
        return {"instead": type(config).__name__}
    return {
        "config": config_values(config),
        "refusal": device.unavailable_reason(config),
        "sees_gpu": torch.cuda.is_available(),
    }


def _check_configs(config: object, told: list[dict[str, Any]]) -> None:
    """Raise on all ranks unless all passed an EpConfig, and the same.

    Raises:
        ConfigError: this rank passed something else.
        AgreementError: another did, or they differ.
    """
    if not isinstance(config, EpConfig):
        raise ConfigError(f"config is {config!r}; it must be an EpConfig (see from_dict)")
    for rank, each in enumerate(told):
        if "instead" in each:
            raise AgreementError(
                f"rank {rank} passed a {each['instead']} for config; it must be an EpConfig, the "
                "same on all ranks; its own error says more"
            )
    check_equal_configs([each["config"] for each in told])


def _warn_of_fallback(config: EpConfig, why: str) -> None:
    """Whoever has GPUs takes "auto" for the kernels, so must see where it is not."""
    if config.tier == "auto":
        logger.warning(
            "tier is 'auto' and takes the reference tier, which is much slower: %s. Mend that, or "
            "set tier to 'reference' if it is meant so, to 'device' to be stopped by it",
            why,
        )


def _warn_of_idle_knobs(config: EpConfig) -> None:
    """A knob changes speed, never results: so it is no error, but who measures it must know."""
    chunk_tokens = config.tuning.chunk_tokens
    if chunk_tokens != Tuning.chunk_tokens:
        logger.warning(
            "chunk_tokens is %d, but no tier reads it: leave it at %d",
            chunk_tokens,
            Tuning.chunk_tokens,
        )


def topology_of(config: EpConfig, ep_size: int) -> Topology:
    """Domains of a group: one, or as many as `virtual_domain_size` makes of it.

    Raises:
        ConfigError: that does not divide the ranks.
    """
    size = config.virtual_domain_size or ep_size
    if ep_size % size:
        raise ConfigError(
            f"virtual_domain_size is {size}; it must divide the {ep_size} ranks of the group"
        )
    return Topology(ep_size=ep_size, domain_size=size)


def placement_of(config: EpConfig, ep_size: int) -> Placement:
    """The config's table of experts, or equal blocks."""
    if config.expert_rank is not None:
        return Placement(config.expert_rank, ep_size)
    return Placement.even(config.shape.num_experts, ep_size)


def _choose_tier(config: EpConfig, reasons: list[str | None]) -> tuple[str, str]:
    """Agree on a tier from every rank's reason against the device tier; returns it and why."""
    lacking = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
    if config.tier == "reference":
        return "reference", "asked for"
    if not lacking:
        return "device", "asked for" if config.tier == "device" else "every rank can"
    rank, reason = lacking[0]
    if config.tier == "device":
        raise UnavailableError(
            f"tier is 'device', but on rank {rank} {reason}; run `ep-dispatcher doctor` there, or "
            "set tier to 'auto' or 'reference'"
        )
    return "reference", f"on rank {rank} {reason}"
