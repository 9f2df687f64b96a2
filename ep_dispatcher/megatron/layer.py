"""A MoE layer of Megatron whose token dispatcher is ours: the form for layer specs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from ep_dispatcher.megatron.dispatcher import EpDispatcher
from ep_dispatcher.ranges import EXPERTS, LAYER, SHARED_EXPERTS, phase

if TYPE_CHECKING:
    from ep_dispatcher.megatron.plugin import EpPlugin


class EpMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's MoE layer in all but the dispatcher.

    Args:
        config: Megatron's; gets the policy identity.
        *args: as MoELayer takes them.
        plugin: options and groups; shared by all layers of a model.
        **kwargs: as MoELayer takes them.
    """

    def __init__(
        self,
        config: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        plugin: EpPlugin,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Build the parent as an alltoall layer, so that it imports no backend, then replace."""
        plugin.configure(config)
        policy_type = config.moe_token_dispatcher_type
        config.moe_token_dispatcher_type = "alltoall"
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.moe_token_dispatcher_type = policy_type
        adopt(self, plugin)

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Megatron's forward, named in profiles."""
        with phase(LAYER, on_gpu=self.router.weight.is_cuda):
            return super().forward(*args, **kwargs)

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor | None:
        """Megatron's step beside dispatch, named in profiles; None where it has nothing to do."""
        if not self.use_shared_expert or self.shared_expert_overlap:
            return None
        with phase(SHARED_EXPERTS, on_gpu=hidden_states.is_cuda):
            shared: Tensor = super().shared_experts_compute(hidden_states)
        return shared

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Megatron's step between dispatch and combine, named in profiles."""
        with phase(EXPERTS, on_gpu=hidden_states.is_cuda):
            rows: tuple[Tensor, None] = super().routed_experts_compute(hidden_states, probs)
        return rows


def adopt(layer: Any, plugin: EpPlugin) -> None:  # noqa: ANN401
    """Make a built MoE layer one of ours: its dispatcher, and the plug-in that it asks.

    Args:
        layer: Megatron's MoELayer, or a subclass of ours.
        plugin: options and groups.
    """
    layer._plugin = plugin
    replace_dispatcher(layer, plugin)


def replace_dispatcher(layer: Any, plugin: EpPlugin) -> EpDispatcher:  # noqa: ANN401
    """Put our dispatcher into a built MoE layer, over the groups of the one that it had.

    Args:
        layer: Megatron's MoELayer.
        plugin: options and groups.

    Returns:
        The new dispatcher.
    """
    old = layer.token_dispatcher
    groups = SimpleNamespace(ep=old.ep_group, expt_tp=old.tp_group, tp_ep=old.tp_ep_group)
    new = EpDispatcher(
        layer.num_local_experts,
        layer.local_expert_indices,
        layer.config,
        groups,
        plugin.pool,
        check=plugin.options.check_values,
    )
    if layer.shared_experts is not None and layer.shared_expert_overlap:
        new.set_shared_experts(layer.shared_experts)
    layer.token_dispatcher = new
    return new
