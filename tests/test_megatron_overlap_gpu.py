"""The streams of a layer in chunks: results with either of them late are those of one piece."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import megatron_overlap_rank as rank
from multi_process import ProcessWorld

from ep_dispatcher.megatron.overlap import LayerSteps

ROUNDING = 1e-4  # products of other numbers of rows, in float32


@pytest.fixture(scope="module")
def world() -> Iterator[ProcessWorld]:
    """One rank, whose layers are built anew for each test."""
    with ProcessWorld(1) as started:
        yield started


def test_chunks_agree_with_one_piece(world: ProcessWorld) -> None:
    """With no stream late: output, and gradients of rows, router and experts."""
    (found,) = world.run(rank.late_layer, "", "")
    assert found["difference"] < ROUNDING, found


def test_counts_on_the_gpu_are_kept_for_the_experts() -> None:
    """They lie in the plan's memory, and delayed weight gradients read them after the plan."""
    kept: list[str] = []
    counts = SimpleNamespace(is_cuda=True, record_stream=kept.append)
    manager: Any = SimpleNamespace(config=None, counts_for_experts=lambda _: counts)
    nothing: Any = None
    stream: Any = "caller's"
    steps = LayerSteps(manager, nothing, lambda rows, _, __: (rows, None), stream)
    steps.experts(nothing, nothing, nothing)
    assert kept == ["caller's"]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("asleep", ["communication", "caller's"])
def test_a_late_stream_changes_nothing(world: ProcessWorld, asleep: str) -> None:
    """It sleeps before each of its steps, forward and backward; the other one has to wait."""
    (found,) = world.run(rank.late_layer, asleep, "")
    assert found["tiers"] == ["device"]
    assert found["busy"], found  # so the host was ahead of it
    assert found["difference"] < ROUNDING, found


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("asleep", "left_out"), [("communication", "take"), ("caller's", "lend")])
def test_a_late_stream_that_nobody_waits_for_is_seen(
    world: ProcessWorld, asleep: str, left_out: str
) -> None:
    """The control: without the wait the other stream reads what an earlier round left there."""
    (found,) = world.run(rank.late_layer, asleep, left_out)
    assert found["difference"] > 100 * ROUNDING, found
