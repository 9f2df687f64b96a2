"""Checks of what users pass to a group; each raises before anything is launched."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_dispatcher.config import EpConfig
from ep_dispatcher.errors import RoutingError, ShapeError
from ep_dispatcher.plan import Plan


def check_topk_idx(topk_idx: Tensor, config: EpConfig) -> None:
    """Check a routing: [T, K] int64, T and K within the group's bounds.

    Raises:
        ShapeError: wrong dtype, rank or sizes.
    """
    shape = config.shape
    _check_tensor("topk_idx", topk_idx)
    if topk_idx.dtype != torch.int64 or topk_idx.dim() != 2:
        raise ShapeError(f"topk_idx is {_describe(topk_idx)}; it must be int64 of shape [T, K]")
    num_tokens, num_topk = topk_idx.shape
    if num_tokens > config.max_tokens_per_rank:
        raise ShapeError(
            f"topk_idx has {num_tokens} tokens; this group was made for at most "
            f"max_tokens_per_rank={config.max_tokens_per_rank}"
        )
    if not 1 <= num_topk <= shape.num_topk:
        raise ShapeError(f"topk_idx has {num_topk} slots; it must have 1 to {shape.num_topk}")


def check_expert_ids(topk_idx: Tensor, num_experts: int) -> None:
    """Check that every expert id is in [-1, E); reads the values, so it waits for a GPU.

    Raises:
        RoutingError: names the first token and slot with a bad id.
    """
    bad = ((topk_idx < -1) | (topk_idx >= num_experts)).nonzero()
    if len(bad):
        token, slot = bad[0].tolist()
        raise RoutingError(
            f"topk_idx[{token}, {slot}] is {int(topk_idx[token, slot])}; it must be in "
            f"[0, {num_experts - 1}], or -1 for a dropped slot"
        )


def check_topk_weights(topk_weights: Tensor, plan: Plan, config: EpConfig) -> None:
    """Check router weights: [T, K] fp32; with `check_values` also that they are finite.

    Raises:
        ShapeError: wrong dtype or shape.
        RoutingError: a NaN or infinite weight, in debug mode.
    """
    wanted = torch.float64 if config.shape.dtype == "float64" else torch.float32
    expected = (plan.num_tokens, plan.num_topk)
    _check_tensor("topk_weights", topk_weights)
    if topk_weights.dtype != wanted or tuple(topk_weights.shape) != expected:
        raise ShapeError(
            f"topk_weights is {_describe(topk_weights)}; it must be {_name(wanted)} of shape "
            f"{list(expected)}, like the planned topk_idx"
        )
    if config.check_values and not bool(topk_weights.isfinite().all()):
        token, slot = (~topk_weights.isfinite()).nonzero()[0].tolist()
        raise RoutingError(
            f"topk_weights[{token}, {slot}] is {float(topk_weights[token, slot])}; "
            "weights must be finite (check_values is on)"
        )


def check_rows(name: str, rows: Tensor, num_rows: int, config: EpConfig) -> None:
    """Check token rows: [num_rows, hidden] of the group's dtype.

    Raises:
        ShapeError: wrong dtype or shape.
    """
    shape = config.shape
    wanted: torch.dtype = getattr(torch, shape.dtype)
    _check_tensor(name, rows)
    if rows.dtype != wanted or tuple(rows.shape) != (num_rows, shape.hidden):
        raise ShapeError(
            f"{name} is {_describe(rows)}; it must be {shape.dtype} of shape "
            f"[{num_rows}, {shape.hidden}]"
        )


def _check_tensor(name: str, value: object) -> None:
    """Check that a value is a tensor with data in the ordinary layout.

    Raises:
        ShapeError: it is something else, such as a list or a sparse, nested or freed tensor.
    """
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name} is of type {type(value).__name__}; it must be a torch.Tensor")
    kind = _kind_without_data(value)
    if kind is not None:
        raise ShapeError(f"{name} is {kind}; it must be a dense tensor that holds data")


def _kind_without_data(value: Tensor) -> str | None:
    """Say in words what keeps a tensor's data from being read by address; None for nothing."""
    if value.is_meta:
        return "on the device meta"
    if value.is_nested:  # asked before any size, which a nested tensor may lack
        return "nested"
    if value.layout != torch.strided:
        return str(value.layout).removeprefix("torch.")
    if value.numel() and not value.untyped_storage().nbytes():  # resized, as Megatron does
        return "freed (its storage was resized to nothing)"
    return None


def _describe(tensor: Tensor) -> str:
    """Dtype and shape, for messages."""
    return f"{_name(tensor.dtype)} of shape {list(tensor.shape)}"


def _name(dtype: torch.dtype) -> str:
    """Dtype without torch's prefix."""
    return str(dtype).removeprefix("torch.")
