"""A GPT pre-training job for the launcher: model, datasets and forward step from Megatron's args.

The wheels of megatron-core carry `megatron.training` from 0.17 on, but not the script around it.
This is the least that such a script needs; anything else (other models, context parallelism,
fine-tuning) belongs into your own script with `swap_dispatchers`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_tokenizer
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from ep_dispatcher.errors import ConfigError
from ep_dispatcher.megatron.plugin import EpPlugin, swap_dispatchers

_DATA_ARGS = {
    "random_seed": "seed",
    "sequence_length": "seq_length",
    "split": "split",
    "path_to_cache": "data_cache_path",
    "mmap_bin_files": "mmap_bin_files",
    "num_dataset_builder_threads": "num_dataset_builder_threads",
    "reset_position_ids": "reset_position_ids",
    "reset_attention_mask": "reset_attention_mask",
    "eod_mask_loss": "eod_mask_loss",
    "create_attention_mask": "create_attention_mask_in_dataloader",
}


def check_args(args: Any) -> None:  # noqa: ANN401
    """Refuse what this job cannot do.

    Raises:
        ConfigError: names the argument and the way out.
    """
    if getattr(args, "context_parallel_size", 1) > 1:
        raise ConfigError(
            f"--context-parallel-size is {args.context_parallel_size}; this launcher does not "
            "slice sequences. Use swap_dispatchers as a pre-wrap hook in your own script"
        )
    if getattr(args, "spec", None) is not None:
        raise ConfigError(
            f"--spec is {args.spec}; this launcher builds the spec of a GPT block itself. Drop it, "
            "or use with_ep_dispatcher on that spec in your own script"
        )
    if not getattr(args, "num_experts", None):
        raise ConfigError("--num-experts is not set: there is no MoE layer to dispatch for")


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,  # noqa: ANN401
    pg_collection: Any = None,  # noqa: ANN401
    *,
    plugin: EpPlugin,
) -> GPTModel:
    """Megatron's model provider: one chunk of a GPT model, with our dispatcher in it.

    Args:
        pre_process: the chunk has the embedding.
        post_process: the chunk has the output layer.
        vp_stage: virtual pipeline stage.
        config: TransformerConfig; None builds it from the arguments.
        pg_collection: process groups; None for Megatron's global ones.
        plugin: options and groups.
    """
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    spec, mtp_spec = _layer_specs(args, config, vp_stage)
    model = GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=mtp_spec,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
    swap_dispatchers([model], plugin)
    return model


def _layer_specs(args: Any, config: TransformerConfig, vp_stage: int | None) -> tuple[Any, Any]:  # noqa: ANN401
    """Specs of the decoder block and of the multi-token-prediction block (or None)."""
    engine = args.transformer_impl == "transformer_engine"
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=engine,
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    if not getattr(args, "mtp_num_layers", None):
        return spec, None
    return spec, get_gpt_mtp_block_spec(
        config, spec.layer_specs[-1], use_transformer_engine=engine, vp_stage=vp_stage
    )


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Megatron's dataset provider: train, valid and test sets, built on every rank.

    Args:
        num_samples: of each of the three sets.
        vp_stage: virtual pipeline stage; all stages read the same data.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        blend=blend,
        blend_per_split=blend_per_split,
        tokenizer=get_tokenizer(),
        **{field: getattr(args, name) for field, name in _DATA_ARGS.items()},
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    datasets = BlendedMegatronDatasetBuilder(kind, num_samples, lambda: True, config).build()
    return tuple(datasets)


build_datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron asks for this mark


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]],
    model: Any,  # noqa: ANN401
    return_schedule_plan: bool = False,
) -> tuple[Any, Any]:
    """Megatron's forward step: output (or the plan of the combined schedule) and loss function."""
    batch = {
        name: values.to(torch.cuda.current_device(), non_blocking=True)
        for name, values in next(data_iterator).items()
        if name in ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
    }
    loss_mask = batch.pop("loss_mask")
    inputs = {
        "input_ids": batch["tokens"],
        "position_ids": batch["position_ids"],
        "attention_mask": batch.get("attention_mask"),
        "labels": batch["labels"],
        "loss_mask": loss_mask,
    }
    loss = functools.partial(masked_loss, loss_mask)
    if return_schedule_plan:
        return get_attr_wrapped_model(model, "build_schedule_plan")(**inputs), loss
    return model(**inputs), loss


def masked_loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the losses of unmasked tokens, their number, and both for the log.

    Args:
        loss_mask: [B, S] of zeros and ones.
        output: [B, S] loss of each token.
    """
    mask = loss_mask.flatten().float()
    total = (output.flatten().float() * mask).sum()
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.stack([total.detach().clone(), num_tokens.float()])
    return total, num_tokens, {"lm loss": report}
