"""Matrix products beside communication: what counts as beside, and a clock that sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_dispatcher.bench.interference import (
    ALONE,
    CALLS,
    CONTROL,
    LEAST_CONTROL,
    Interference,
    Span,
    why_no_figure,
)
from ep_dispatcher.bench.page_data import interference_table, slow_down
from ep_dispatcher.bench.report import write_pages
from ep_dispatcher.bench.spec import Work
from ep_dispatcher.bench.stopwatch import Stopwatch


def line(phase: str, us: float, **more: object) -> dict[str, Any]:
    """A recorded line with what the pages read."""
    values: dict[str, Any] = {"backend": "ep_dispatcher/device", **vars(Work())}
    return values | {"phase": phase, "median_us": us, "p95_us": us} | more


def product_lines(beside: float, control: float, **more: object) -> list[dict[str, Any]]:
    """Products alone (100 us), beside communication and beside products, as recorded."""
    times = (("gemm_alone", 100.0), ("gemm_beside", beside), ("gemm_control", control))
    return [line(phase, us, **more) for phase, us in times]


RECORDED: dict[str, Any] = {
    "machine": {"sharing": "mps", "gpu": "a GPU", "gpu_count": 1},
    "versions": {},
    "commit": "c",
    "when": "w",
    "command": "x",
    "run": "r",
}


def test_the_slow_down_of_products_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    lines = product_lines(110.0, 200.0, num_sms=8, beside_calls=2.0, **RECORDED)
    lines += product_lines(125.0, 200.0, num_sms=16, beside_calls=3.0, **RECORDED)
    write_pages(lines, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| 100 | 110 | 200 | 2.0 | 1.100 | r |" in text
    assert "| 100 | 125 | 200 | 3.0 | 1.250 | r |" in text
    assert (tmp_path / "interference.png").read_bytes().startswith(b"\x89PNG")


def test_a_later_run_without_products_does_not_hide_those_of_an_earlier_one(tmp_path: Path) -> None:
    lines = [*product_lines(110.0, 200.0, beside_calls=2.0, **RECORDED)]
    lines.append(line("dispatch", 9.0, **RECORDED | {"run": "later"}))
    write_pages(lines, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| 100 | 110 | 200 | 2.0 | 1.100 | r |" in text
    assert "Run r" in text
    assert "Run later" in text
    write_pages([*lines, *product_lines(150.0, 200.0, beside_calls=2.0, **RECORDED)], tmp_path)
    assert "| 1.100 |" not in (tmp_path / "report.md").read_text()


def test_a_page_of_several_machines_says_so(tmp_path: Path) -> None:
    lines = [line("dispatch", 9.0, **RECORDED)]
    write_pages(lines, tmp_path)
    assert "several machines" not in (tmp_path / "report.md").read_text()
    other = RECORDED | {"machine": {"sharing": "cpu", "cpu": "a CPU"}, "run": "s"}
    write_pages([*lines, line("dispatch", 9.0, num_tokens=8, **other)], tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "of several machines" in text
    assert "Machine: 1 x a GPU; ranks share it: mps." in text
    assert "Machine: a CPU; ranks share it: cpu." in text


def test_calls_count_only_where_they_ended_before_the_products_did() -> None:
    assert Span(products_us=100.0, calls_us=[40.0, 90.0, 130.0]).calls_beside == 2
    assert Span(products_us=100.0, calls_us=[101.0]).calls_beside == 0


@pytest.mark.parametrize(
    ("control", "more", "why"),
    [
        (200.0, {"beside_calls": 0.2}, "did not run beside the products"),
        (101.0, {"beside_calls": 3.0}, "the clock sees no slow-down"),
        (200.0, {}, "do not tell whether communication ran beside"),
    ],
)
def test_no_slow_down_is_told_that_was_not_seen_beside(
    control: float, more: dict[str, float], why: str
) -> None:
    lines = product_lines(100.0, control, num_sms=8, **more)
    assert slow_down(lines, ("ep_dispatcher/device", 8)) is None
    (row,) = interference_table(lines).rows
    assert why in row[-2]


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.gpu(1)
def test_products_tell_a_neighbour_that_runs_beside_them_from_one_that_waits(
    alone: dist.ProcessGroup,
) -> None:
    """By the neighbour's own events; a neighbour that takes the machine slows the products down."""
    device = torch.device("cuda")
    work = Work(ranks=1, num_tokens=4096, hidden=4096, num_topk=1, num_experts=1)
    products, watch = Interference(work, device), Stopwatch(alone, device)
    busy, small = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for n in (8192, 64))
    other = [torch.empty_like(matrix) for matrix in (busy, small)]

    def hold() -> None:
        torch.mm(busy, busy, out=other[0])

    def glance() -> None:
        torch.mm(small, small, out=other[1])

    def wait() -> None:
        torch.cuda.current_stream().wait_stream(products._side)
        glance()

    found = {
        name: [products.span(watch, neighbour, 2) for _ in range(5)][-1]
        for name, neighbour in (("hold", hold), ("glance", glance), ("wait", wait))
    }
    alone_us = min(products.span(watch, glance, 0).products_us for _ in range(5))
    assert found["glance"].calls_beside == 2
    assert found["wait"].calls_beside == 0
    assert found["hold"].products_us > LEAST_CONTROL * alone_us
    round_us = products.round(watch, wait)
    assert round_us[CONTROL] > LEAST_CONTROL * round_us[ALONE]
    assert why_no_figure(round_us[CALLS], round_us[CONTROL] / round_us[ALONE]) is not None
