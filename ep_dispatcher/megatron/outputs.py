"""How much memory the dispatcher's output rows need in a model: which of them autograd keeps.

The device tier cuts its outputs from one arena that is sized when a group is opened. In training
the rows that dispatch brings are the experts' input, so autograd keeps those of every layer until
its backward has run; the rows of the backward's dispatch live for one layer only.
"""

from __future__ import annotations

from typing import Any

from ep_dispatcher.config import DTYPE_BYTES, MoeShape

HEADROOM = 1.5  # a rank may get that many times the rows of a balanced routing, in every layer
# Forward, backward's dispatch, rows on their way home, and one that another stream still holds.
_TRANSIENT = 4
_SMALLEST_BYTES = 64 << 20
_BLOCK_SLACK_BYTES = 2 << 20  # what the allocator may lose on each block


def kept_outputs(config: Any) -> int:  # noqa: ANN401
    """Outputs of dispatch that are alive at a time on the fullest pipeline stage, at most.

    Every layer of the stage keeps one for each micro-batch in flight. A stage has 1/pp of the
    layers and the first stage up to pp micro-batches, so that is the number of layers of the
    model; an interleaved schedule has up to twice as many in flight. Where the layer is
    recomputed, only the layer at hand has any.

    Args:
        config: Megatron's TransformerConfig.

    Example: 4 layers with experts, no pipeline, nothing recomputed -> 4 + 4.
    """
    if _recomputes_layers(config):
        return _TRANSIENT
    layers = _num_moe_layers(config)
    interleaved = getattr(config, "virtual_pipeline_model_parallel_size", None)
    if interleaved or getattr(config, "overlap_moe_expert_parallel_comm", False):
        layers *= 2
    return layers + _TRANSIENT


def output_bytes(config: Any, shape: MoeShape, num_tokens: int) -> int:  # noqa: ANN401
    """Size of the arena for a model's layers of one shape.

    Args:
        config: Megatron's.
        shape: of the group; E counts the shards of an expert.
        num_tokens: bound on T.
    """
    shards = shape.num_experts // config.num_moe_experts
    copies = num_tokens * config.moe_router_topk * shards
    rows = int(max(HEADROOM, getattr(config, "moe_expert_capacity_factor", None) or 0) * copies)
    each = rows * (shape.row_bytes + DTYPE_BYTES["float32"]) + _BLOCK_SLACK_BYTES
    return max(kept_outputs(config) * each, _SMALLEST_BYTES)


def _num_moe_layers(config: Any) -> int:  # noqa: ANN401
    """Layers with experts, those for multi-token prediction included."""
    layers, pattern = int(config.num_layers), config.moe_layer_freq
    if isinstance(pattern, list):
        with_experts = sum(1 for each in pattern if each)
    else:
        with_experts = -(-layers // int(pattern))
    return with_experts + int(getattr(config, "mtp_num_layers", None) or 0)


def _recomputes_layers(config: Any) -> bool:  # noqa: ANN401
    """Whether the whole MoE layer runs again in the backward."""
    granularity = getattr(config, "recompute_granularity", None)
    if granularity == "full":
        every = getattr(config, "recompute_num_layers", None) == 1
        return every and getattr(config, "recompute_method", None) == "uniform"
    return granularity == "selective" and "moe" in (config.recompute_modules or [])
