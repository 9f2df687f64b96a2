"""Arguments of the C ABI that pass every check; addresses are numbers that nobody follows."""

from __future__ import annotations

from typing import Any

import pytest

from ep_dispatcher import UnavailableError, native

ADDRESS = 1 << 28
LAYOUT = {
    "ep_size": 4, "num_experts": 16, "num_topk": 4, "num_channels": 4, "ring_depth": 16,
    "max_tokens": 128, "partial_bytes": 1024,
}  # fmt: skip
CONTEXT_POINTERS = ("expert_rank", "expert_local", "expert_order", "owner_first", "fault")
PLAN_POINTERS = (
    "dst_rank", "dst_row", "contributor", "counts", "tokens_per_expert",
    "padded_tokens_per_expert", "expert_offsets", "totals", "record_header", "record_row",
    "chunk_first", "source_tokens",
)  # fmt: skip
CALLS: dict[str, tuple[str, dict[str, int]]] = {
    "route": ("RouteArgs", {"topk_idx": ADDRESS, "alignment": 1, "capacity_rows": -1}),
    "dispatch": (
        "DispatchArgs",
        {
            "x": ADDRESS,
            "row_bytes": 512,
            "recv_rows": 10,
            "recv_x_offset": 1 << 20,
            "recv_weights_offset": -1,
        },
    ),
    "combine": (
        "CombineArgs",
        {"expert_out": ADDRESS, "out": ADDRESS, "hidden": 256, "row_weights_grad_offset": -1},
    ),
}


def module_or_skip() -> Any:  # noqa: ANN401
    try:
        return native.load()
    except UnavailableError as error:
        pytest.skip(str(error))


def arguments(
    module: Any,  # noqa: ANN401
    call: str,
    fields: dict[str, int] | None = None,
    *,
    plan: dict[str, int] | None = None,
    context: dict[str, int] | None = None,
    layout: dict[str, int] | None = None,
    ep_rank: int = 0,
) -> Any:  # noqa: ANN401
    """Arguments that are right but for what is named."""
    told = module.Context(module.WindowShape(**(LAYOUT | (layout or {}))), ep_rank)
    told.num_local_experts, told.timeout_ns = 4, 1_000_000_000
    told.window_bases = [ADDRESS] * told.shape.ep_size
    routes = module.PlanPointers()
    routes.num_tokens, routes.num_topk = 8, 4
    kind, defaults = CALLS[call]
    set_all(told, dict.fromkeys(CONTEXT_POINTERS, ADDRESS) | (context or {}))
    set_all(routes, dict.fromkeys(PLAN_POINTERS, ADDRESS) | (plan or {}))
    args = getattr(module, kind)(told, routes)
    set_all(args, defaults | (fields or {}))
    return args


def set_all(struct: Any, fields: dict[str, int]) -> None:  # noqa: ANN401
    for name, value in fields.items():
        setattr(struct, name, value)
