"""One exchange at group creation, so that no rank goes on with a different idea of the group."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import torch

from ep_dispatcher.collectives import Collectives
from ep_dispatcher.config import EpConfig
from ep_dispatcher.errors import AgreementError

Value = TypeVar("Value")


def gather_json(collectives: Collectives, value: Value) -> list[Value]:
    """All-gather one JSON-encodable value per rank."""
    encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = collectives.all_gather(torch.tensor([len(encoded)])).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(encoded)] = encoded
    rows = collectives.all_gather(padded)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]


def check_equal_configs(configs: list[dict[str, Any]]) -> None:
    """Raise unless every rank passed the same config.

    Raises:
        AgreementError: names the first rank that differs from rank 0, the field and both values.
    """
    flat = [_flatten(config) for config in configs]
    for rank, values in enumerate(flat):
        for name, value in values.items():
            if value != flat[0][name]:
                raise AgreementError(
                    f"{name} is {value!r} on rank {rank} and {flat[0][name]!r} on rank 0; all "
                    "ranks of a group must pass the same config"
                )


def config_values(config: EpConfig) -> dict[str, Any]:
    """A config as it travels: plain values only."""
    values = config.to_dict()
    if config.expert_rank is not None:
        values["expert_rank"] = list(config.expert_rank)
    return values


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined with dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
