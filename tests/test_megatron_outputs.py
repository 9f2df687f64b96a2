"""The size of the arena follows from what a model's layers keep alive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ep_dispatcher import MoeShape
from ep_dispatcher.megatron.outputs import HEADROOM, kept_outputs, output_bytes

SHAPE = MoeShape(hidden=1024, num_topk=8, num_experts=64)


def model(**settings: object) -> Any:  # noqa: ANN401
    """A model of 6 layers."""
    fields: dict[str, object] = {
        "num_layers": 6,
        "moe_layer_freq": 1,
        "moe_router_topk": 8,
        "num_moe_experts": 64,
        "recompute_granularity": None,
        "recompute_modules": [],
    }
    return SimpleNamespace(**(fields | settings))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, 10),
        ({"moe_layer_freq": 2}, 7),
        ({"moe_layer_freq": [0, 1, 1, 0, 0, 0]}, 6),
        ({"mtp_num_layers": 1}, 11),
        ({"virtual_pipeline_model_parallel_size": 2}, 16),
        ({"overlap_moe_expert_parallel_comm": True}, 16),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, 4),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, 10),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            4,
        ),
    ],
)
def test_kept_outputs(settings: dict[str, object], kept: int) -> None:
    """One for each MoE layer, twice where more micro-batches are in flight, none if recomputed."""
    assert kept_outputs(model(**settings)) == kept


def test_every_kept_output_fits() -> None:
    """Room for HEADROOM times a balanced routing in each; more shards of an expert, more rows."""
    rows = int(HEADROOM * 4096 * 8)
    assert output_bytes(model(), SHAPE, 4096) >= 10 * rows * (SHAPE.row_bytes + 4)
    folded = MoeShape(hidden=1024, num_topk=16, num_experts=128)
    assert output_bytes(model(), folded, 4096) > 1.9 * output_bytes(model(), SHAPE, 4096)
    assert output_bytes(model(), SHAPE, 0) >= 64 << 20
