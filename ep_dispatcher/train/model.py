"""Builds the Megatron-Core model, its optimizer and its schedule from a training config.

Import it after `runtime.open_runtime`, which installs the stand-ins that Megatron needs without a
GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from ep_dispatcher.errors import UnavailableError
from ep_dispatcher.megatron.plugin import EpPlugin, with_ep_dispatcher
from ep_dispatcher.train.config import VOCABULARY, TrainConfig, TrainSection
from ep_dispatcher.train.runtime import Runtime

OURS = "ep_dispatcher"
DELAY = "overlap_dispatch_backward_with_experts_wgrad"


@dataclass(frozen=True, eq=False)
class Job:
    """A model ready to be trained.

    Attributes:
        chunk: this pipeline stage, wrapped for data parallelism.
        optimizer: Megatron's.
        megatron_config: Megatron's.
        plugin: of our dispatcher; None for Megatron's own.
    """

    chunk: Any
    optimizer: Any
    megatron_config: TransformerConfig
    plugin: EpPlugin | None

    def close(self, *, failed: bool = False) -> None:
        """Close the dispatcher's groups; a rank that failed does not wait for the others."""
        if self.plugin is not None:
            self.plugin.close(failed=failed)


class ParallelNorm(torch.nn.LayerNorm):
    """A LayerNorm that Megatron accepts under sequence parallelism; its own torch norm refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:  # noqa: ANN401
        """Mark the weights as replicated, so that their gradients are summed over the TP ranks."""
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010


def has_transformer_engine(runtime: Runtime) -> bool:
    """Whether grouped GEMM and fused attention of Transformer Engine can be used."""
    return runtime.on_gpu and importlib.util.find_spec("transformer_engine") is not None


def build_job(config: TrainConfig, runtime: Runtime) -> Job:
    """Build model, dispatcher and optimizer; collective.

    Raises:
        ConfigError: a setting that contradicts the chosen dispatcher.
    """
    initialize_groups(config)
    torch.manual_seed(config.train.seed)
    model_parallel_cuda_manual_seed(config.train.seed)
    megatron_config = make_megatron_config(config, runtime)
    ours = config.train.dispatcher == OURS
    plugin = EpPlugin(config.ep_dispatcher) if ours else None
    module = make_module(config, megatron_config, runtime, plugin)
    sharded = config.train.distributed_optimizer
    chunk = DistributedDataParallel(
        megatron_config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=sharded,
            delay_wgrad_compute=config.train.delay_weight_gradients,
        ),
        module,
    )
    megatron_config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(_optimizer_config(config), [chunk])
    megatron_config.grad_scale_func = optimizer.scale_loss
    return Job(chunk, optimizer, megatron_config, plugin)


def initialize_groups(config: TrainConfig) -> None:
    """Make Megatron's process groups, unless they are there; collective."""
    if parallel_state.model_parallel_is_initialized():
        return
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
    )


def make_megatron_config(config: TrainConfig, runtime: Runtime) -> TransformerConfig:
    """Translate the sections to Megatron's config; our dispatcher is put in by the plug-in."""
    model = config.model
    dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
    dispatcher = config.train.dispatcher
    fields: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "ffn_hidden_size": model.ffn_hidden or 4 * model.hidden,
        "normalization": model.norm,
        "gated_linear_unit": model.gated,
        "activation_func": torch.nn.functional.silu if model.gated else torch.nn.functional.gelu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": not runtime.on_gpu,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "moe_token_dispatcher_type": "alltoall" if dispatcher == OURS else dispatcher,
        "moe_grouped_gemm": has_transformer_engine(runtime),
        "overlap_moe_expert_parallel_comm": config.train.overlap,
        **_delay_fields(config, runtime),
        **_moe_fields(config),
        **_parallel_fields(config),
        **_recompute_fields(model.recompute),
    }
    return TransformerConfig(**fields)


def _delay_fields(config: TrainConfig, runtime: Runtime) -> dict[str, Any]:
    """Megatron's name for weight gradients that are computed beside the backward of dispatch.

    Raises:
        UnavailableError: this Megatron, or this machine, cannot delay them.
    """
    if not config.train.delay_weight_gradients:
        return {}
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    if DELAY not in known or not has_transformer_engine(runtime):
        raise UnavailableError(
            "train.delay_weight_gradients is true; it needs megatron-core 0.18 or later and "
            "Transformer Engine on a GPU, so set it to false here"
        )
    return {DELAY: True}


def _moe_fields(config: TrainConfig) -> dict[str, Any]:
    """Megatron's names for experts and router."""
    model = config.model
    dense = model.num_dense_layers
    return {
        "num_moe_experts": model.num_experts,
        "moe_layer_freq": [0] * dense + [1] * (model.num_layers - dense),
        "moe_ffn_hidden_size": model.expert_ffn_hidden,
        "moe_shared_expert_intermediate_size": model.shared_expert_ffn_hidden,
        "moe_router_topk": model.num_topk,
        "moe_router_dtype": "fp32",
        "moe_router_score_function": model.router_score,
        "moe_router_num_groups": model.router_groups,
        "moe_router_group_topk": model.router_group_topk,
        "moe_router_enable_expert_bias": model.router_bias,
        "moe_router_load_balancing_type": "aux_loss" if model.aux_loss else "none",
        "moe_aux_loss_coeff": model.aux_loss,
        "moe_expert_capacity_factor": model.capacity_factor,
    }


def _parallel_fields(config: TrainConfig) -> dict[str, Any]:
    """Megatron's names for the layout of ranks."""
    parallel = config.parallel
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": parallel.tensor > 1,  # Megatron's MoE layers demand it
        "pipeline_model_parallel_size": parallel.pipeline,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }


def _recompute_fields(recompute: str) -> dict[str, Any]:
    """Megatron's names for what the backward computes again."""
    if recompute == "moe":
        return {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    if recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return {}


def block_spec(config: TrainConfig, megatron_config: TransformerConfig, runtime: Runtime) -> Any:  # noqa: ANN401
    """Specs of the layers of this pipeline stage, with Megatron's dispatcher."""
    spec = get_gpt_decoder_block_spec(
        megatron_config,
        use_transformer_engine=has_transformer_engine(runtime),
        normalization=config.model.norm,
    )
    if config.parallel.tensor > 1 and not has_transformer_engine(runtime):
        for layer in spec.layer_specs:
            layer.submodules.input_layernorm = ParallelNorm
            layer.submodules.pre_mlp_layernorm = ParallelNorm
        spec.layer_norm = ParallelNorm
    return spec


def make_module(
    config: TrainConfig,
    megatron_config: TransformerConfig,
    runtime: Runtime,
    plugin: EpPlugin | None,
) -> torch.nn.Module:
    """The layers of this pipeline stage, on this rank's device."""
    spec = block_spec(config, megatron_config, runtime)
    if plugin is not None:
        spec = with_ep_dispatcher(spec, plugin)
    model = GPTModel(
        megatron_config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=config.model.seq_length,
        position_embedding_type="rope",
        parallel_output=True,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    module: torch.nn.Module = model.cuda() if runtime.on_gpu else model
    if megatron_config.bf16:
        module = Float16Module(megatron_config, module)
    return module


def _optimizer_config(config: TrainConfig) -> OptimizerConfig:
    """AdamW; the learning rate of each step comes from `learning_rate`."""
    train = config.train
    return OptimizerConfig(
        optimizer="adam",
        lr=train.learning_rate,
        min_lr=train.min_learning_rate,
        weight_decay=train.weight_decay,
        clip_grad=train.clip_grad,
        bf16=config.model.dtype == "bfloat16",
        params_dtype=torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32,
        use_distributed_optimizer=train.distributed_optimizer,
    )


def learning_rate(train: TrainSection, step: int) -> float:
    """Learning rate of a step, from 0: a linear rise, then a cosine. It needs no state.

    Example: warmup_steps 2, decay_steps 4, peak 1.0, end 0.0 -> 0.5, 1.0, 1.0, 0.5, 0.0.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    decay_steps = train.decay_steps or train.steps
    span = max(1, decay_steps - train.warmup_steps)
    done = min(1.0, (step - train.warmup_steps) / span)
    low, high = train.min_learning_rate, train.learning_rate
    return low + (high - low) * 0.5 * (1 + math.cos(math.pi * done))
