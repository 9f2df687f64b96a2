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
from abi_arguments import ADDRESS, CALLS, LAYOUT, PLAN_POINTERS, arguments, module_or_skip

from ep_dispatcher import device


@pytest.fixture(scope="module")
def module() -> Any:  # noqa: ANN401
    return module_or_skip()


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
        ("route", "segment_shift", ADDRESS, "segment_tokens is 0; it must divide max_tokens, 128"),
        ("route", "segment_tokens", 8, "segment_tokens .* is 8; it must be 0"),
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
    reserved = {"reserved": 1}
    args = arguments(
        module,
        "route",
        context=reserved if of == "context" else None,
        plan=reserved if of == "plan" else None,
    )
    with pytest.raises(ValueError, match=f"{name}.* is 1; it must be 0"):
        module.route(args, 0)


def test_gradients_without_their_place_are_refused_where_peers_read_them(module: Any) -> None:  # noqa: ANN401
    args = arguments(module, "combine", {"form": 1, "weights_grad": ADDRESS})
    with pytest.raises(ValueError, match="row_weights_grad_offset is -1 but weights_grad is not"):
        module.combine(args, 0)


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
    fields |= {"weights_grad": ADDRESS}
    with pytest.raises(RuntimeError, match="the launch failed"):
        module.combine(arguments(module, "combine", fields), 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be launched")
def test_a_refusal_has_an_alignment_of_its_own(module: Any) -> None:  # noqa: ANN401
    with pytest.raises(RuntimeError, match="the launch failed"):
        module.route(arguments(module, "route", {"alignment": device._REFUSED_ALIGNMENT}), 0)


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
