"""The C ABI compares the ranks of one launch, and checks where sums of several domains go.

As in test_c_abi.py, which is about the arguments of one rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from abi_arguments import ADDRESS, CALLS, LAYOUT, arguments, module_or_skip


@pytest.fixture(scope="module")
def module() -> Any:  # noqa: ANN401
    return module_or_skip()


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


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        ("route", "capacity_rows", 10),
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
    """The launch has the shape of the first rank, and senders take its capacity for all."""
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
