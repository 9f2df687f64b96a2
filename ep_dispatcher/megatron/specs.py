"""Layer specs by name, for scripts that take `--spec ep_dispatcher.megatron.specs gpt_moe_spec`.

Megatron looks the name up in this module. From 0.19 on it calls what it finds with the model's
config; before, it takes it as the spec itself, so there the spec is built when this module is
imported, from Megatron's arguments, which exist by then. Our section has its defaults in this
form; to set it, build the spec in Python with `with_ep_dispatcher`, or use the launcher.
"""

from __future__ import annotations

from typing import Any

import megatron.core
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

from ep_dispatcher.errors import ConfigError
from ep_dispatcher.megatron.compat import parse_version
from ep_dispatcher.megatron.plugin import EpPlugin, with_ep_dispatcher
from ep_dispatcher.megatron.pretrain import require_training

_CALLED_FROM = (0, 19)


def block_spec(config: Any, vp_stage: int | None = None) -> Any:  # noqa: ANN401
    """A GPT block whose MoE layers dispatch with ep_dispatcher.

    Args:
        config: Megatron's model config (with a `transformer` in it) or TransformerConfig.
        vp_stage: virtual pipeline stage. All stages of a model share one plug-in, which stays
            with the config.
    """
    transformer = getattr(config, "transformer", config)
    plugin = vars(transformer).setdefault("ep_plugin", None) or EpPlugin()
    transformer.ep_plugin = plugin
    spec = get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=transformer.transformer_impl == "transformer_engine",
        normalization=transformer.normalization,
        qk_l2_norm=transformer.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return with_ep_dispatcher(spec, plugin)


def _named_spec() -> Any:  # noqa: ANN401
    """What the installed version wants to find: a function, or a spec."""
    if parse_version(megatron.core.__version__) >= _CALLED_FROM:
        return block_spec
    require_training()
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    if args.virtual_pipeline_model_parallel_size:
        raise ConfigError(
            f"megatron-core {megatron.core.__version__} takes one spec for all virtual pipeline "
            "stages; use swap_dispatchers or the launcher with a virtual pipeline"
        )
    return block_spec(core_transformer_config_from_args(args))


gpt_moe_spec = _named_spec()
