"""A MoE layer of Megatron whose token dispatcher is ours: the form for layer specs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.moe.moe_layer import MoELayer

from ep_dispatcher.megatron.dispatcher import EpDispatcher

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
        replace_dispatcher(self, plugin)


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
