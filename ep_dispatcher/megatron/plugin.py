"""Three ways to select ep_dispatcher in Megatron without changing it, over one object.

plugin = EpPlugin.from_section(section)          # the `ep_dispatcher:` mapping of your config
spec = with_ep_dispatcher(spec, plugin)          # (a) in a layer spec, before building
model_chunks = swap_dispatchers(chunks, plugin)  # (b) in a built model, as a pre-wrap hook
python -m ep_dispatcher.megatron.pretrain ...    # (c) a launcher that does (b)
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import megatron.core
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from ep_dispatcher.errors import ConfigError
from ep_dispatcher.megatron import compat
from ep_dispatcher.megatron.dispatcher import EpDispatcher
from ep_dispatcher.megatron.layer import EpMoELayer, adopt
from ep_dispatcher.megatron.options import MegatronOptions, apply_policy
from ep_dispatcher.megatron.overlap import OverlappedMoELayer
from ep_dispatcher.megatron.pool import GroupPool

logger = logging.getLogger("ep_dispatcher.megatron")
Spec = TypeVar("Spec")
Chunks = TypeVar("Chunks", bound=list[Any])


class EpPlugin:
    """Options and groups of one training job; a context manager.

    Warns about a version of megatron-core outside the tested range.

    Args:
        options: of the section; None for defaults.
    """

    def __init__(self, options: MegatronOptions | None = None) -> None:
        """Open nothing yet."""
        compat.warn_if_untested(megatron.core.__version__)
        self.options = options or MegatronOptions()
        self.pool = GroupPool(self.options)
        self._communication: torch.cuda.Stream | None = None

    @classmethod
    def from_section(cls, section: Mapping[str, Any] | None) -> Self:
        """Make a plug-in from the `ep_dispatcher:` mapping of a training config."""
        return cls(MegatronOptions.from_section(section))

    def communication_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream that chunks travel on, one for all layers; None on the CPU."""
        if device.type != "cuda":
            return None
        if self._communication is None:
            # Its few blocks must be placed before the many of a GEMM, or they would wait for them.
            self._communication = torch.cuda.Stream(device, priority=-1)
        return self._communication

    def configure(self, config: Any) -> None:  # noqa: ANN401
        """Put the policy identity on a TransformerConfig, or refuse it; see `apply_policy`."""
        apply_policy(config, self.options)

    def close(self, *, failed: bool = False) -> None:
        """Close all groups; the layers cannot be used any more. A second call does nothing.

        Args:
            failed: this rank leaves because of an error, so it must not wait for the others.
        """
        self.pool.close(failed=failed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied spec or model shares the plug-in: process groups cannot be copied."""
        return self

    def __enter__(self) -> Self:
        """Return the plug-in."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the groups."""
        self.close(failed=error is not None)


def with_ep_dispatcher(spec: Spec, plugin: EpPlugin | None = None) -> Spec:
    """Return a copy of a spec in which every MoE layer dispatches with ep_dispatcher.

    Args:
        spec: a layer spec, a block spec (`get_gpt_decoder_block_spec`), a hybrid stack spec, or
            any nest of them; the spec itself is left as it was.
        plugin: one per job, so that models and chunks share groups; None makes one for this spec.

    Raises:
        ConfigError: the spec has no MoE layer.
    """
    changed, num_layers = _replace_moe(spec, plugin or EpPlugin())
    if num_layers == 0:
        raise ConfigError(
            "this spec has no MoELayer to give ep_dispatcher to; pass a spec built with "
            "num_experts, before any other replacement of its MoE layer"
        )
    replaced: Spec = changed
    return replaced


def swap_dispatchers(model_chunks: Chunks, plugin: EpPlugin | None = None) -> Chunks:
    """Replace the dispatchers of a built model; usable as a pre-wrap hook as it is.

    Run it before the model is wrapped in DDP and before the first batch. Build the model with
    `moe_token_dispatcher_type="alltoall"`, which needs no other package.

    Args:
        model_chunks: the model's chunks of this pipeline rank.
        plugin: one per job; None makes one for this model.

    Returns:
        The same list.

    Raises:
        ConfigError: a setting that contradicts ep_dispatcher.
    """
    plugin = plugin or EpPlugin()
    modules = [module for chunk in model_chunks for module in chunk.modules()]
    layers = [module for module in modules if isinstance(module, MoELayer)]
    if not layers:
        logger.warning("no MoE layer on this pipeline rank: nothing for ep_dispatcher to do")
        return model_chunks
    for config in _configs_of(modules):
        plugin.configure(config)
    for layer in layers:
        if not isinstance(layer.token_dispatcher, EpDispatcher):
            _become_chunked(layer, plugin)
            adopt(layer, plugin)
    return model_chunks


def _become_chunked(layer: Any, plugin: EpPlugin) -> None:  # noqa: ANN401
    """Give a built layer the class that runs in chunks, where the section asks for chunks.

    Raises:
        ConfigError: the layer is of somebody else's class.
    """
    if plugin.options.overlap.chunks == 1:
        return
    if type(layer) is not MoELayer:
        raise ConfigError(
            f"overlap.chunks is {plugin.options.overlap.chunks} but this model has a "
            f"{type(layer).__name__} in place of Megatron's MoELayer; set overlap.chunks to 1"
        )
    layer.__class__ = OverlappedMoELayer


def dispatchers_of(model_chunks: list[Any]) -> list[Any]:
    """The token dispatchers of all MoE layers of a model, in module order."""
    return [
        module.token_dispatcher
        for chunk in model_chunks
        for module in chunk.modules()
        if isinstance(module, MoELayer)
    ]


def _configs_of(modules: list[Any]) -> list[Any]:
    """The distinct MoE configs that these modules read: usually one, as layers share it."""
    configs = {
        id(config): config
        for config in (getattr(module, "config", None) for module in modules)
        if isinstance(config, TransformerConfig) and config.num_moe_experts is not None
    }
    return list(configs.values())


def _replace_moe(node: Any, plugin: EpPlugin) -> tuple[Any, int]:  # noqa: ANN401
    """Copy a nest of specs with its MoE layers replaced; returns the copy and their number.

    Up to 0.17 an MLP is a ModuleSpec, from 0.18 on a functools.partial of its class.
    """
    ours = OverlappedMoELayer if plugin.options.overlap.chunks != 1 else EpMoELayer
    if isinstance(node, functools.partial):
        if node.func is not MoELayer:
            return node, 0
        return functools.partial(ours, *node.args, plugin=plugin, **node.keywords), 1
    if isinstance(node, ModuleSpec) and node.module is MoELayer:
        params = {**(node.params or {}), "plugin": plugin}
        return dataclasses.replace(node, module=ours, params=params), 1
    if isinstance(node, list):
        pairs = [_replace_moe(item, plugin) for item in node]
        return [item for item, _ in pairs], sum(count for _, count in pairs)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return _replace_in_fields(node, plugin)
    return node, 0


def _replace_in_fields(node: Any, plugin: EpPlugin) -> tuple[Any, int]:  # noqa: ANN401
    """`_replace_moe` for the fields of a dataclass (a ModuleSpec or a set of submodules)."""
    changed, total = copy.copy(node), 0
    for field in dataclasses.fields(node):
        value, count = _replace_moe(getattr(node, field.name), plugin)
        if count:
            setattr(changed, field.name, value)
        total += count
    return (changed, total) if total else (node, 0)
