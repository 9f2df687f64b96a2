"""The C ABI refuses, by name and before a launch, what would break the GPU's context or hang.

On any machine: addresses here are numbers that nobody follows. A call that passes all checks gets
as far as its launch, for which these tests need a machine without a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_dispatcher import UnavailableError, device, native

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


@pytest.fixture(scope="module")
def module() -> Any:  # noqa: ANN401
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be launched")
@pytest.mark.parametrize("call", CALLS)
def test_right_arguments_pass_every_check(module: Any, call: str) -> None:  # noqa: ANN401
    """So that what the other tests change is what is refused."""
    with pytest.raises(RuntimeError, match="the launch failed"):
        getattr(module, call)(arguments(module, call), 0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("ep_size", 73, r"ep_size is 73; it must be in \[1, 72\]"),
        ("num_topk", 65, "num_topk is 65"),
        ("max_tokens", -1, "max_tokens is -1"),
        ("max_tokens", (1 << 62) + 5, "max_tokens is 4611686018427387909"),
        ("max_tokens", (1 << 63) - 1, "max_tokens is 9223372036854775807"),
        ("partial_bytes", (1 << 30) + 16, "partial_bytes is 1073741840"),
    ],
)
def test_sizes_of_a_window_out_of_range_are_named(
    module: Any,  # noqa: ANN401
    field: str,
    value: int,
    words: str,
) -> None:
    with pytest.raises(ValueError, match=words):
        module.WindowLayout(module.WindowShape(**(LAYOUT | {field: value})))


@pytest.mark.parametrize(
    ("call", "field", "value", "words"),
    [
        ("route", "topk_idx", 0, "topk_idx is NULL"),
        ("route", "topk_idx", ADDRESS + 4, "topk_idx is 268435460; it must be a multiple of 8"),
        ("route", "alignment", 0, r"alignment is 0; it must be a power of two in \[1, 4096\]"),
        ("route", "alignment", 12, "alignment is 12; it must be a power of two"),
        ("route", "alignment", 8192, "alignment is 8192; it must be a power of two"),
        ("route", "alignment", -(1 << 31), "alignment is -2147483648; it must be a power of two"),
        ("route", "capacity_rows", 1 << 31, "capacity_rows is 2147483648"),
        ("route", "mailbox", ADDRESS, "ticket is 0"),
        ("route", "mailbox", ADDRESS + 4, "multiple of 8"),
        ("route", "segment_shift", ADDRESS, "segment_tokens is 0"),
        ("dispatch", "row_bytes", 24, "row_bytes is 24; it must be a multiple of 16"),
        ("dispatch", "row_bytes", (1 << 63) - 16, "row_bytes is 9223372036854775792"),
        ("dispatch", "recv_rows", 1 << 31, "recv_rows is 2147483648"),
        ("dispatch", "recv_x_offset", 4096, r"recv_x_offset is 4096; it must be in \["),
        ("dispatch", "recv_weights_offset", (1 << 20) + 2, "multiple of 4"),
        ("dispatch", "recv_weights_offset", -4, r"recv_weights_offset .* is -4"),
        ("dispatch", "topk_weights", ADDRESS + 2, "topk_weights is"),
        ("dispatch", "recv_weights_offset", 1 << 21, "topk_weights is NULL"),
        ("combine", "out", 0, "out is NULL"),
        ("combine", "hidden", 1 << 62, "hidden is 4611686018427387904"),
        ("combine", "hidden", 1024, r"bytes of a partial row is 2048; it must be in \[16, 1024\]"),
        ("combine", "row_weights_grad", ADDRESS, "weights_grad is NULL"),
        ("combine", "weights_grad", ADDRESS + 2, "weights_grad is"),
    ],
)
def test_arguments_out_of_range_are_named(
    module: Any,  # noqa: ANN401
    call: str,
    field: str,
    value: int,
    words: str,
) -> None:
    with pytest.raises(ValueError, match=words):
        getattr(module, call)(arguments(module, call, {field: value}), 0)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("pointer", PLAN_POINTERS)
def test_a_plan_without_one_of_its_lists_is_refused(module: Any, call: str, pointer: str) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=rf"plan\.{pointer} is NULL"):
        getattr(module, call)(arguments(module, call, plan={pointer: 0}), 0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("timeout_ns", 0, "timeout_ns is 0"),
        ("timeout_ns", (1 << 64) - 1, "timeout_ns is 18446744073709551615"),
        ("num_local_experts", 0, "num_local_experts is 0"),
        ("fault", ADDRESS + 4, "fault is 268435460; it must be a multiple of 8"),
        ("expert_rank", 0, "expert_rank is NULL"),
        ("first_rank", -1, r"first_rank is -1; it must be in \[0, 65531\]"),
        ("first_rank", 65532, r"first_rank is 65532; it must be in \[0, 65531\]"),
    ],
)
def test_a_context_out_of_range_is_refused(
    module: Any,  # noqa: ANN401
    field: str,
    value: int,
    words: str,
) -> None:
    with pytest.raises(ValueError, match=words):
        module.route(arguments(module, "route", context={field: value}), 0)


def test_a_window_laid_out_for_another_shape_is_refused(module: Any) -> None:  # noqa: ANN401
    """Also where it is as long: regions lie elsewhere in it."""
    args = arguments(module, "route")
    context, other = args.context, module.WindowLayout(
        module.WindowShape(**(LAYOUT | {"max_tokens": LAYOUT["max_tokens"] - 1}))
    )  # fmt: skip
    assert other.total_bytes == context.window.total_bytes
    assert other.partials != context.window.partials
    context.window = other
    args.context = context
    with pytest.raises(ValueError, match="window is not the layout of shape"):
        module.route(args, 0)


@pytest.mark.parametrize(("of", "name"), [("context", "context.reserved"), ("plan", "plan.reserv")])
def test_reserved_fields_must_be_zero(module: Any, of: str, name: str) -> None:  # noqa: ANN401
    """So that a later version may give them a meaning."""
    args = arguments(module, "route", **{of: {"reserved": 1}})
    with pytest.raises(ValueError, match=f"{name}.* is 1; it must be 0"):
        module.route(args, 0)


def test_gradients_without_their_place_are_refused_where_peers_read_them(module: Any) -> None:  # noqa: ANN401
    args = arguments(module, "combine", {"form": 1, "weights_grad": ADDRESS})
    with pytest.raises(ValueError, match="row_weights_grad_offset is -1 but weights_grad is not"):
        module.combine(args, 0)


# Four segments of 16 tokens, rows of 512 bytes and gradients of four slots.
SEGMENTS = {
    "segment_tokens": 16, "home_segment": 3, "segment_stride": 528, "segment_out": ADDRESS,
    "weights_grad": ADDRESS,
}  # fmt: skip


def segmented(
    module: Any,  # noqa: ANN401
    fields: dict[str, int] | None = None,
    *,
    tokens: int = 64,
    ep_rank: int = 0,
) -> Any:  # noqa: ANN401
    """A combine whose sums go to several domains."""
    plan = {"num_tokens": tokens}
    return arguments(module, "combine", SEGMENTS | (fields or {}), plan=plan, ep_rank=ep_rank)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be launched")
@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 64),
        ({"weights_grad": 0, "segment_stride": 512}, 64),
        ({"exact": 1, "hidden": 128, "own_out": ADDRESS}, 64),
        ({"exact": 1, "dtype": 2, "hidden": 128}, 64),
        ({"home_segment": 0, "segment_out": 0, "segment_stride": 0}, 16),
        (dict.fromkeys(SEGMENTS, 0), 8),
    ],
    ids=["gradients", "sums", "wide sums", "fp32", "one segment", "one domain"],
)
def test_right_segments_pass_every_check(
    module: Any,  # noqa: ANN401
    fields: dict[str, int],
    tokens: int,
) -> None:
    with pytest.raises(RuntimeError, match="the launch failed"):
        module.combine(segmented(module, fields, tokens=tokens), 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"segment_tokens": -1}, r"segment_tokens is -1; it must be in \[0, 128\]"),
        ({"segment_tokens": 129}, r"segment_tokens is 129; it must be in \[0, 128\]"),
        ({"segment_tokens": 128}, r"num_tokens .* is 64; it must be in \[128,"),
        ({"segment_tokens": 24}, "num_tokens .* is 64; it must be a multiple of 24"),
        (
            {"form": 1, "row_weights_grad_offset": 0},
            "form is EP_COMBINE_GATHER with segment_tokens",
        ),
        ({"home_segment": 4}, r"home_segment is 4; it must be in \[0, 3\]"),
        ({"home_segment": -1}, r"home_segment is -1; it must be in \[0, 3\]"),
        ({"segment_stride": 512}, r"segment_stride is 512; it must be in \[528,"),
        ({"segment_stride": 536}, "segment_stride is 536; it must be a multiple of 16"),
        (
            {"exact": 1, "hidden": 192, "segment_stride": 768, "own_out": ADDRESS},
            r"segment_stride is 768; it must be in \[784,",
        ),
        ({"segment_out": 0}, "segment_out is NULL"),
        ({"segment_out": ADDRESS + 8}, "segment_out is 268435464; it must be a multiple of 16"),
        ({"exact": 1, "hidden": 128}, "own_out is NULL"),
        (
            {"exact": 1, "hidden": 128, "own_out": ADDRESS + 8},
            "own_out is 268435464; it must be a multiple of 16",
        ),
        ({"own_out": ADDRESS}, "own_out is 268435456; it must be NULL"),
        ({"segment_tokens": 0}, "home_segment is 3; it must be 0"),
        ({"segment_tokens": 0, "home_segment": 0}, "segment_stride is 528; it must be 0"),
        (
            {"segment_tokens": 0, "home_segment": 0, "segment_stride": 0},
            "segment_out is 268435456; it must be NULL",
        ),
        (
            dict.fromkeys(SEGMENTS, 0) | {"own_out": ADDRESS},
            "own_out is 268435456; it must be NULL",
        ),
    ],
)
def test_segments_out_of_range_are_named(
    module: Any,  # noqa: ANN401
    fields: dict[str, int],
    words: str,
) -> None:
    """Else sums would be written where nobody has made room."""
    with pytest.raises(ValueError, match=words):
        module.combine(segmented(module, fields), 0)


@pytest.mark.parametrize("field", ["expert_out_offset", "row_weights_grad_offset"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (4096, r"\(0 without rows\) is 4096; it must be in \[\d{5,},"),
        (-16, r"\(0 without rows\) is -16; it must be in \["),
        ((1 << 20) + 2, "is 1048578; it must be a multiple of"),
        ((1 << 46) + 16, "is 70368744177680; it must be in"),
    ],
)
def test_rows_that_peers_read_lie_behind_the_regions(
    module: Any,  # noqa: ANN401
    field: str,
    value: int,
    words: str,
) -> None:
    args = arguments(module, "combine", {"form": 1, "weights_grad": ADDRESS} | {field: value})
    if field != "row_weights_grad_offset":
        args.row_weights_grad_offset = 0
    with pytest.raises(ValueError, match=f"{field} {words}|{field} .*{words}"):
        module.combine(args, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be launched")
@pytest.mark.parametrize("value", [0, 1 << 20])
def test_a_rank_without_rows_names_no_place(module: Any, value: int) -> None:  # noqa: ANN401
    fields = {"form": 1, "expert_out_offset": value, "row_weights_grad_offset": value}
    with pytest.raises(RuntimeError, match="the launch failed"):
        module.combine(arguments(module, "combine", fields), 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be launched")
def test_a_refusal_has_an_alignment_of_its_own(module: Any) -> None:  # noqa: ANN401
    with pytest.raises(RuntimeError, match="the launch failed"):
        module.route(arguments(module, "route", {"alignment": device._REFUSED_ALIGNMENT}), 0)


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        ("dispatch", "row_bytes", 1024),
        ("dispatch", "duplicate", 1),
        ("combine", "dtype", 1),
        ("combine", "form", 1),
        ("combine", "hidden", 128),
    ],
)
def test_ranks_of_one_launch_must_agree_on_its_shape(
    module: Any,  # noqa: ANN401
    call: str,
    field: str,
    value: int,
) -> None:
    """The launch has the first rank's shared memory."""
    ranks = [arguments(module, call), arguments(module, call, {field: value}, ep_rank=1)]
    with pytest.raises(ValueError, match=f"{field} is {value} on one rank of a launch and"):
        getattr(module, f"{call}_world")(ranks, 0)


def test_ranks_of_one_launch_must_agree_on_segments(module: Any) -> None:  # noqa: ANN401
    ranks = [
        segmented(module, {"segment_tokens": 16, "home_segment": 0}, ep_rank=0),
        segmented(module, {"segment_tokens": 32, "home_segment": 0}, ep_rank=1),
    ]
    with pytest.raises(ValueError, match="segment_tokens is 32 on one rank of a launch and 16"):
        module.combine_world(ranks, 0)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ep_size", 8),
        ("num_experts", 32),
        ("num_topk", 8),
        ("num_channels", 2),
        ("ring_depth", 32),
        ("max_tokens", 64),
        ("partial_bytes", 2048),
    ],
)
def test_windows_of_one_launch_must_be_alike(
    module: Any,  # noqa: ANN401
    call: str,
    field: str,
    value: int,
) -> None:
    """Ranks find each other's regions by their own layout."""
    other = arguments(module, call, layout={field: value}, ep_rank=1)
    words = f"{field} is {value} on one rank of a launch and {LAYOUT[field]} on its first"
    with pytest.raises(ValueError, match=words):
        getattr(module, f"{call}_world")([arguments(module, call), other], 0)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("ep_rank", "first_rank"), [(2, 0), (1, 1), (0, 2)], ids=["same", "domains", "first"]
)
def test_a_rank_is_once_in_a_launch(
    module: Any,  # noqa: ANN401
    call: str,
    ep_rank: int,
    first_rank: int,
) -> None:
    """Its index may recur in another domain; its number among all ranks may not."""
    ranks = [
        arguments(module, call, ep_rank=2),
        arguments(module, call, ep_rank=0),
        arguments(module, call, ep_rank=ep_rank, context={"first_rank": first_rank}),
    ]
    with pytest.raises(ValueError, match=r"first_rank \+ ep_rank is 2 on two ranks of a launch"):
        getattr(module, f"{call}_world")(ranks, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be launched")
@pytest.mark.parametrize("call", CALLS)
def test_ranks_of_two_domains_are_different(module: Any, call: str) -> None:  # noqa: ANN401
    ranks = [arguments(module, call), arguments(module, call, context={"first_rank": 4})]
    with pytest.raises(RuntimeError, match="the launch failed"):
        getattr(module, f"{call}_world")(ranks, 0)


@pytest.mark.parametrize("num_ranks", [0, 9])
def test_a_launch_takes_one_to_eight_ranks(module: Any, num_ranks: int) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=f"num_ranks is {num_ranks}; one launch takes 1 to 8"):
        module.route_world([arguments(module, "route")] * num_ranks, 0)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("mailbox", lambda module: module.read_mailbox(0)),
        ("fault", lambda module: module.read_fault(0)),
        ("mailbox", lambda module: module.wait_for_mailbox(0, 1, ADDRESS, 0.1)),
        ("fault", lambda module: module.wait_for_mailbox(ADDRESS, 1, 0, 0.1)),
    ],
)
def test_no_address_is_refused(module: Any, name: str, read: Callable[[Any], Any]) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=f"{name} is 0; it must be the address of host memory"):
        read(module)


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
    "rail_dispatch": ("RailDispatchArgs", {}),
    "rail_return": ("RailReturnArgs", {"segment_tokens": 64}),
}  # fmt: skip


def rail_arguments(
    module: Any,  # noqa: ANN401
    call: str,
    fields: dict[str, int] | None = None,
    *,
    rail: dict[str, int] | None = None,
    context: dict[str, int] | None = None,
) -> Any:  # noqa: ANN401
    """As `arguments`; those of a call within the domain go to its part."""
    kind, defaults = RAIL_CALLS[call]
    inner = "combine" if call == "rail_return" else "dispatch"
    domain = arguments(module, inner, context=context, plan={"num_tokens": LAYOUT["max_tokens"]})
    told = module.Rail(domain.context, **RAIL)
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
        ("rail_dispatch", "recv_weights_offset", 1 << 20, "topk_weights is NULL"),
        ("rail_return", "hidden", 1 << 62, "hidden is 4611686018427387904"),
        ("rail_return", "hidden", -(1 << 62), "hidden is -4611686018427387904"),
        ("rail_return", "hidden", 0, r"hidden is 0; it must be in \[1,"),
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


@pytest.mark.parametrize("size", ["ep_chaos_bytes", "ep_max_records", "ep_chunk_stride"])
def test_sizes_of_nothing_are_zero(module: Any, size: str) -> None:  # noqa: ANN401
    told = getattr(ctypes.CDLL(module.__file__), size)
    told.restype, told.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    assert told(None) == 0


class WindowShape(ctypes.Structure):
    """EpWindowShape of the C header."""

    _fields_ = [
        ("ep_size", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("num_topk", ctypes.c_int32),
        ("num_channels", ctypes.c_int32),
        ("ring_depth", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("max_tokens", ctypes.c_int64),
        ("partial_bytes", ctypes.c_int64),
    ]


@pytest.mark.parametrize(("size", "right"), [("ep_max_records", 4 * 128), ("ep_chunk_stride", 17)])
def test_sizes_of_shapes_out_of_range_are_zero(module: Any, size: str, right: int) -> None:  # noqa: ANN401
    told = getattr(ctypes.CDLL(module.__file__), size)
    told.restype, told.argtypes = ctypes.c_int64, [ctypes.POINTER(WindowShape)]
    assert told(WindowShape(**LAYOUT)) == right
    for field, value in (
        ("ep_size", -5), ("max_tokens", 1 << 61), ("max_tokens", -4), ("reserved", 1),
    ):  # fmt: skip
        assert told(WindowShape(**(LAYOUT | {field: value}))) == 0
