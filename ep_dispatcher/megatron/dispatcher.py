"""The token dispatcher that Megatron's MoE layer talks to: its six steps over an EPGroup.

Rules that it keeps (nothing in Megatron writes them down):
    R1 What is differentiable goes through arguments and returns; attributes hold routing only.
    R2 One forward per layer is in flight; the backward uses nothing but autograd's saved plan.
    R3 What is returned is an ordinary tensor that the 1F1B schedule may resize to nothing.
    R4 Only steps 2 and 5 communicate.
    R5 Routing is let go of at combine, or recomputation would keep it alive.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import (
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
    _DispatchManager,
)
from torch import Tensor

from ep_dispatcher import EPGroup, MoeShape, Plan
from ep_dispatcher.megatron import compat
from ep_dispatcher.megatron.pool import GroupPool
from ep_dispatcher.megatron.routes import compact_routes, fold_tensor_ranks, gather_weights


class EpManager(_DispatchManager):  # type: ignore[misc]
    """Routing and communication of one layer: what Megatron calls the manager of a flex dispatcher.

    Args:
        process_group: the expert and expert-tensor parallel ranks.
        num_local_experts: L.
        tp_size: expert-tensor-parallel ranks; each shard of an expert counts as an expert.
        config: Megatron's.
        pool: where the group comes from.
        check: refuse a routing with more experts in a row than slots.

    Attributes:
        topk_idx: [T, K] int64, routing from step 1 to step 5. The one tensor that a CUDA graph of
            step 1 has to hand on.
        token_probs: set by the 1F1B schedule; never read (R1), cleared with the routing.
        dispatched_probs: likewise.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        num_local_experts: int,
        tp_size: int,
        config: Any,  # noqa: ANN401
        pool: GroupPool,
        *,
        check: bool,
    ) -> None:
        """Hold the layer's facts; the group is opened by the first dispatch."""
        self.group = process_group
        self.num_local_experts = num_local_experts
        self.num_experts = tp_size * config.num_moe_experts
        self.config = config
        self.topk_idx: Tensor | None = None
        self.token_probs: Tensor | None = None
        self.dispatched_probs: Tensor | None = None
        self._tp_size = tp_size
        self._check = check
        self._pool = pool
        self._groups: dict[MoeShape, EPGroup] = {}
        self._plan: Plan | None = None
        self._ep_group: EPGroup | None = None
        self._probs_dtype = torch.float32

    @property
    def max_experts_per_row(self) -> int:
        """Experts that a row of the routing map may have."""
        if compat.rows_may_exceed_topk(self.config):
            return int(self.config.num_moe_experts)
        return int(self.config.moe_router_topk)

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> Tensor:
        """Keep the routes of a batch and return their weights; local.

        Args:
            routing_map: [T, E].
            probs: [T, E], in the router's dtype.

        Returns:
            topk_weights: [T, K], fp32 (float64 for float64 probs of float64 rows), differentiable.
        """
        check = self._check or routing_map.device.type == "cpu"
        topk_idx = compact_routes(routing_map, self.max_experts_per_row, check=check)
        self._probs_dtype = probs.dtype
        wire = torch.float64 if self.config.params_dtype == torch.float64 else torch.float32
        weights = gather_weights(probs, topk_idx, wire)
        if self._tp_size > 1:
            topk_idx = fold_tensor_ranks(topk_idx, self.num_local_experts, self._tp_size)
            weights = weights.unsqueeze(-1).expand(-1, -1, self._tp_size).flatten(1)
        self.topk_idx = topk_idx
        return weights

    def dispatch(self, hidden_states: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Plan the routes of `setup_metadata` and send rows and weights; collective.

        Args:
            hidden_states: [T, H]; H may differ from the config's hidden size (latent MoE).
            topk_weights: [T, K].

        Returns:
            recv_x [R, H] and recv_weights [R] in the router's dtype.
        """
        assert self.topk_idx is not None, "dispatch needs the routing of setup_metadata"
        group = self.group_for(hidden_states)
        plan = self.plan(group, self.topk_idx)
        self._plan, self._ep_group = plan, group
        return self.send(group, plan, hidden_states, topk_weights)

    def plan(self, group: EPGroup, topk_idx: Tensor) -> Plan:
        """Plan routes with the alignment that the experts need; collective."""
        alignment = max(group.config.alignment, compat.quantization_alignment(self.config))
        return group.plan(topk_idx, alignment)

    def send(
        self, group: EPGroup, plan: Plan, hidden_states: Tensor, topk_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Dispatch rows and weights; the latter arrive in the router's dtype; collective."""
        recv_x, recv_weights = group.dispatch(plan, hidden_states, topk_weights)
        assert recv_weights is not None
        return recv_x, recv_weights.to(self._probs_dtype)

    def take_routes(self) -> Tensor:
        """Hand over the routing of `setup_metadata`, [T, K], and let go of it."""
        routes, self.topk_idx = self.topk_idx, None
        assert routes is not None, "there are routes between step 1 and the dispatch only"
        self.token_probs = self.dispatched_probs = None
        return routes

    def combine(self, hidden_states: Tensor) -> Tensor:
        """Sum the experts' rows at home and let go of the routing; collective.

        Args:
            hidden_states: [R, H], expert-major.

        Returns:
            [T, H].
        """
        assert self._plan is not None, "combine needs the plan of dispatch"
        assert self._ep_group is not None
        out = self._ep_group.combine(self._plan, hidden_states)
        self._plan = self._ep_group = None
        self.topk_idx = self.token_probs = self.dispatched_probs = None
        return out

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """Return the rows as they are: they arrive expert-major."""
        return hidden_states

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """Return the rows as they are: combine reads them expert-major."""
        return hidden_states

    def get_number_of_tokens_per_expert(self) -> Tensor:
        """[L] int64, rows of each local expert, padding included, where the experts read them."""
        assert self._plan is not None, "there are counts between dispatch and combine only"
        return self.counts_for_experts(self._plan)

    def counts_for_experts(self, plan: Plan) -> Tensor:
        """[L] int64 of a plan, padding included, on the device or host, as the experts want it."""
        if compat.counts_on_device(self.config) or plan.segment_rows is None:
            return plan.padded_tokens_per_expert.to(plan.topk_idx.device, non_blocking=True)
        return plan.segment_rows

    @property
    def is_idle(self) -> bool:
        """Whether no routing is held: before step 1 and after step 5."""
        held = (self._plan, self._ep_group, self.topk_idx, self.token_probs, self.dispatched_probs)
        return all(value is None for value in held)

    def close(self) -> None:
        """Give the groups back to the pool."""
        groups, self._groups = self._groups, {}
        for shape in groups:
            self._pool.release(self.group, shape)

    def group_for(self, hidden_states: Tensor) -> EPGroup:
        """The group for rows of this width and dtype, shared with the other layers."""
        shape = MoeShape(
            hidden=hidden_states.shape[1],
            num_topk=self.max_experts_per_row * self._tp_size,
            num_experts=self.num_experts,
            dtype=str(hidden_states.dtype).removeprefix("torch."),
        )
        if shape not in self._groups:
            self._groups[shape] = self._pool.lease(
                self.group, shape, len(hidden_states), hidden_states.device, self.config
            )
        return self._groups[shape]


class EpDispatcher(MoEFlexTokenDispatcher):  # type: ignore[misc]
    """A flex dispatcher of Megatron whose manager is ours.

    Args:
        num_local_experts: L, experts of this expert-parallel rank.
        local_expert_indices: their global ids.
        config: Megatron's; carries the policy identity (`options.apply_policy`).
        pg_collection: with `ep`, `expt_tp` and `tp_ep`.
        pool: where groups come from.
        check: debug mode.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,  # noqa: ANN401
        pg_collection: Any,  # noqa: ANN401
        pool: GroupPool,
        *,
        check: bool = False,
    ) -> None:
        """Set up what the base class has and leave out the managers that it would import."""
        MoETokenDispatcher.__init__(self, config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self._comm_manager = EpManager(
            self.tp_ep_group, num_local_experts, self.tp_size, config, pool, check=check
        )
        self.cudagraph_attrs = ["_comm_manager.topk_idx"]

    def set_shared_experts(self, shared_experts: Any) -> None:  # noqa: ANN401
        """Run these beside the communication (0.16 and 0.17 refuse that in their flex class)."""
        MoETokenDispatcher.set_shared_experts(self, shared_experts)

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Step 1, local: routes from the map, [.., H] -> [T, H] and weights [T, K].

        Not compiled, unlike the method that it replaces: it keeps Python objects.
        """
        self.hidden_shape = hidden_states.shape
        weights = self._comm_manager.setup_metadata(routing_map, probs)
        return hidden_states.reshape(-1, self.hidden_shape[-1]), weights

    def token_dispatch(
        self,
        hidden_states: Tensor,
        probs: Tensor | None = None,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Step 2, collective, on the current stream: rows and weights to the experts.

        Args:
            hidden_states: [T, H].
            probs: topk_weights [T, K] of step 1, or their detached copy.
            async_finish: unused; nothing blocks the host beyond the row counts.
            allocate_on_comm_stream: unused; results belong to the current stream.

        Returns:
            recv_x [R, H] and recv_weights [R].
        """
        assert probs is not None, "token_dispatch needs the weights that step 1 returned"
        shared = self.shared_experts
        if shared is not None:
            compat.begin_shared_experts(shared, hidden_states.view(self.hidden_shape))
        recv_x, recv_weights = self._comm_manager.dispatch(hidden_states, probs)
        if shared is not None:
            compat.run_shared_fc1(shared, hidden_states.view(self.hidden_shape), recv_x)
        return recv_x, recv_weights

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Step 3, local: rows are expert-major already; adds the counts that the experts need."""
        manager = self._comm_manager
        rows = manager.get_permuted_hidden_states_by_experts(hidden_states)
        return rows, manager.get_number_of_tokens_per_expert(), probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Step 4, local: nothing to undo."""
        return self._comm_manager.get_restored_hidden_states_by_experts(hidden_states)

    def token_combine(
        self,
        hidden_states: Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> Tensor:
        """Step 5, collective, on the current stream: [R, H] -> [T, H]."""
        if self.shared_experts is not None:
            compat.hold_shared_experts(self.shared_experts)
        return self._comm_manager.combine(hidden_states)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Step 6, local: the layer's shape, and the overlapped shared experts' output."""
        shared = self.shared_experts
        out = hidden_states.view(self.hidden_shape)
        if shared is None:
            return out
        shared.linear_fc2_forward(hidden_states)
        shared.post_forward_comm()
        total: Tensor = out + shared.get_output()
        return total

    def close(self) -> None:
        """Give the groups of this layer back; the last layer closes them."""
        self._comm_manager.close()
