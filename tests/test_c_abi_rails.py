"""The C ABI of the rails refuses as that of one domain does (tests/test_c_abi.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from abi_arguments import ADDRESS, LAYOUT, arguments, module_or_skip, set_all


@pytest.fixture(scope="module")
def module() -> Any:  # noqa: ANN401
    return module_or_skip()


FAR = 1 << 30  # behind all that the layout holds
RAIL = {"num_domains": 2, "domain": 0, "num_blocks": 2, "max_tokens": 64, "exact": False, "net": 0}
RAIL_POINTERS = ("expert_rank", "expert_order", "owner_first")
RAIL_CALLS: dict[str, tuple[str, dict[str, int]]] = {
    "rail_exchange": (
        "RailPlanArgs",
        {"topk_idx": ADDRESS, "num_tokens": 8, "num_topk": 4, "alignment": 1, "capacity_rows": -1,
         "dst_rank": ADDRESS, "dst_row": ADDRESS, "counts": ADDRESS},
    ),
    "rail_send": (
        "RailSendArgs",
        {"topk_idx": ADDRESS, "x": ADDRESS, "num_tokens": 8, "num_topk": 4, "row_bytes": 512},
    ),
    "rail_dispatch": ("RailDispatchArgs", {"recv_x_offset": FAR}),
    "rail_return": (
        "RailReturnArgs",
        {"segment_tokens": 64, "segment_stride": 512, "segment_out": ADDRESS},
    ),
}  # fmt: skip


def rail_arguments(
    module: Any,  # noqa: ANN401
    call: str,
    fields: dict[str, int] | None = None,
    *,
    rail: dict[str, int] | None = None,
    context: dict[str, int] | None = None,
    ep_rank: int = 0,
    sizes: dict[str, int] | None = None,
) -> Any:  # noqa: ANN401
    """As `arguments`; those of a call within the domain go to its part, `sizes` to the rail's."""
    kind, defaults = RAIL_CALLS[call]
    inner = "combine" if call == "rail_return" else "dispatch"
    plan = {"num_tokens": LAYOUT["max_tokens"]}
    domain = arguments(module, inner, context=context, plan=plan, ep_rank=ep_rank)
    told = module.Rail(domain.context, **(RAIL | (sizes or {})))
    told.set_rail_bases([ADDRESS] * RAIL["num_domains"])
    set_all(told, dict.fromkeys(RAIL_POINTERS, ADDRESS) | (rail or {}))
    if kind in ("RailPlanArgs", "RailSendArgs"):
        args = getattr(module, kind)(domain.context, told)
        set_all(args, defaults | (fields or {}))
        return args
    set_all(domain, defaults | (fields or {}))
    return getattr(module, kind)(domain, told, 8, ADDRESS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be launched")
@pytest.mark.parametrize("call", RAIL_CALLS)
def test_right_arguments_of_rails_pass_every_check(module: Any, call: str) -> None:  # noqa: ANN401
    with pytest.raises(RuntimeError, match="the launch failed"):
        getattr(module, call)(rail_arguments(module, call), 0)


@pytest.mark.parametrize(
    ("call", "field", "value", "words"),
    [
        ("rail_exchange", "topk_idx", ADDRESS + 4, "topk_idx is 268435460; .* multiple of 8"),
        ("rail_exchange", "counts", ADDRESS + 4, "counts is 268435460; .* multiple of 8"),
        ("rail_exchange", "num_tokens", 65, r"num_tokens is 65; it must be in \[0, 64\]"),
        ("rail_send", "topk_idx", ADDRESS + 4, "topk_idx is 268435460; .* multiple of 8"),
        ("rail_send", "topk_weights", ADDRESS + 2, "topk_weights is"),
        ("rail_dispatch", "recv_weights_offset", FAR, "topk_weights is NULL"),
        ("rail_dispatch", "recv_weights_offset", FAR + 1, "must be a multiple of 4"),
        ("rail_dispatch", "recv_weights_offset", -4, "recv_weights_offset .* is -4"),
        ("rail_dispatch", "recv_x_offset", 0, "recv_x_offset is 0; it must be in"),
        ("rail_dispatch", "recv_x_offset", -1600, "recv_x_offset is -1600; it must be in"),
        ("rail_return", "hidden", 68, "hidden x element size is 136; it must be a multiple of 16"),
        ("rail_return", "hidden", 1 << 62, "hidden is 4611686018427387904"),
        ("rail_return", "hidden", -(1 << 62), "hidden is -4611686018427387904"),
        ("rail_return", "hidden", 0, r"hidden is 0; it must be in \[1,"),
        ("rail_exchange", "alignment", 48, "alignment is 48; it must be a power of two"),
        ("rail_return", "segment_out", 0, "segment_out is NULL"),
        ("rail_return", "segment_stride", 496, r"segment_stride is 496; it must be in \[512,"),
        ("rail_return", "own_out", ADDRESS, "own_out is 268435456; it must be NULL"),
        ("rail_return", "home_segment", 1, r"home_segment is 1; it must be in \[0, 0\]"),
    ],
)
def test_arguments_of_rails_out_of_range_are_named(
    module: Any,  # noqa: ANN401
    call: str,
    field: str,
    value: int,
    words: str,
) -> None:
    with pytest.raises(ValueError, match=words):
        getattr(module, call)(rail_arguments(module, call, {field: value}), 0)


@pytest.mark.parametrize("call", RAIL_CALLS)
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("timeout_ns", 0, "timeout_ns is 0"),
        ("fault", ADDRESS + 4, "fault is 268435460; it must be a multiple of 8"),
        ("expert_local", 0, "expert_local is NULL"),
        ("first_rank", 4, r"first_rank .* is 4; it must be in \[0, 0\]"),
    ],
)
def test_a_context_out_of_range_is_refused_by_rails(
    module: Any,  # noqa: ANN401
    call: str,
    field: str,
    value: int,
    words: str,
) -> None:
    with pytest.raises(ValueError, match=words):
        getattr(module, call)(rail_arguments(module, call, context={field: value}), 0)


@pytest.mark.parametrize(("net", "pointer"), [(1, "chaos"), (2, "gin_device_comm")])
def test_structs_of_a_net_are_aligned(
    module: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    net: int,
    pointer: str,
) -> None:
    monkeypatch.setitem(RAIL, "net", net)
    args = rail_arguments(module, "rail_exchange", rail={pointer: ADDRESS + 4})
    with pytest.raises(ValueError, match=f"{pointer} is 268435460; it must be a multiple of 8"):
        module.rail_exchange(args, 0)


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        ("rail_send", "row_bytes", 256),
        ("rail_dispatch", "row_bytes", 256),
        ("rail_dispatch", "duplicate", 1),
        ("rail_return", "hidden", 128),
        ("rail_return", "dtype", 1),
    ],
)
def test_ranks_of_one_launch_of_rails_must_agree(
    module: Any,  # noqa: ANN401
    call: str,
    field: str,
    value: int,
) -> None:
    ranks = [rail_arguments(module, call), rail_arguments(module, call, {field: value}, ep_rank=1)]
    with pytest.raises(ValueError, match=f"{field} is {value} on one rank of a launch and"):
        getattr(module, f"{call}_world")(ranks, 0)


@pytest.mark.parametrize("call", RAIL_CALLS)
def test_rails_of_one_launch_must_be_alike(module: Any, call: str) -> None:  # noqa: ANN401
    other = rail_arguments(module, call, ep_rank=1, sizes={"num_blocks": 4})
    with pytest.raises(ValueError, match="num_blocks is 4 on one rank of a launch and 2"):
        getattr(module, f"{call}_world")([rail_arguments(module, call), other], 0)


@pytest.mark.parametrize("call", RAIL_CALLS)
def test_a_rank_is_once_in_a_launch_of_rails(module: Any, call: str) -> None:  # noqa: ANN401
    ranks = [rail_arguments(module, call)] * 2
    with pytest.raises(ValueError, match=r"first_rank \+ ep_rank is 0 on two ranks of a launch"):
        getattr(module, f"{call}_world")(ranks, 0)
