"""What the recorded lines of a Megatron layer have in common."""

from __future__ import annotations

from typing import Any

import torch

from ep_dispatcher.train.config import TrainConfig


def sharing_of(config: TrainConfig) -> str:
    """How the job's ranks share GPUs, in the words of the recorded lines."""
    if not torch.cuda.is_available():
        return "cpu"
    return "mps" if config.parallel.ranks_share_gpu else "one per gpu"


def layer_fields(config: TrainConfig) -> dict[str, Any]:
    """Shape of the layer with experts, and what its dispatcher may hold."""
    model = config.model
    return {
        "ranks": config.parallel.ep_size,
        "num_sms": config.ep_dispatcher.num_sms,
        "num_tokens": config.tokens_per_rank,
        "hidden": model.hidden,
        "expert_ffn_hidden": model.expert_ffn_hidden,
        "shared_expert_ffn_hidden": model.shared_expert_ffn_hidden,
        "num_topk": model.num_topk,
        "num_experts": model.num_experts,
        "dtype": model.dtype,
        "routing": "router",
        "seed": config.train.seed,
    }
