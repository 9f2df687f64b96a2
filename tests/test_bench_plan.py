"""The plan's benchmark, its recorded form, and that nothing in the plan loops over tokens."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_dispatcher import cli
from ep_dispatcher.bench.plan_cpu import PlanBench, one_rank_plan, record_plan_bench
from ep_dispatcher.bench.results import ResultLog, summarise_times
from ep_dispatcher.config import EpConfig, MoeShape
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.group import EPGroup
from ep_dispatcher.routing import RoutingSpec, make_topk_idx
from ep_dispatcher.testing import run_ranks

SMALL = PlanBench(num_tokens=64, num_experts=64, num_topk=2, rounds=20)


def count_steps(work: Callable[[], object]) -> int:
    """Python instructions that `work` runs in this thread, in whatever module."""
    steps = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:  # noqa: ANN401
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return steps


def steps_of_group_plan(num_tokens: int) -> list[int]:
    """Python instructions of `EPGroup.plan` on each of two ranks."""
    shape = MoeShape(hidden=64, num_topk=2, num_experts=16)
    config = EpConfig(shape=shape, max_tokens_per_rank=4096, tier="reference")
    spec = RoutingSpec(name="uniform", num_experts=16, num_topk=2)

    def work(process_group: dist.ProcessGroup) -> int:
        with EPGroup.create(process_group, config) as group:
            topk_idx = make_topk_idx(spec, num_tokens, group.ep_rank)
            group.plan(topk_idx)  # what is imported or cached at the first call is not the plan's
            return count_steps(lambda: group.plan(topk_idx))

    return run_ranks(2, work)


def test_count_steps_sees_a_loop_over_tokens() -> None:
    """The negative control: a loop, also inside a comprehension, grows with its length."""
    values = torch.arange(64)
    loops: list[Callable[[int], object]] = [
        lambda n: [int(v) for v in values[:n]],
        lambda n: sum(1 for _ in range(n)),
    ]
    for loop in loops:
        short, long = (count_steps(lambda n=n, loop=loop: loop(n)) for n in (16, 64))  # type: ignore[misc]
        assert long > 2 * short


def test_build_plan_has_no_python_loop_over_tokens() -> None:
    """As many Python instructions for 64 tokens as for 4096."""
    steps = []
    for num_tokens in (64, 4096):
        build = one_rank_plan(PlanBench(num_tokens=num_tokens), 4)
        build()
        steps.append(count_steps(build))
    assert steps[0] == steps[1]


def test_group_plan_has_no_python_loop_over_tokens() -> None:
    """Nor in the reference tier: validation, exchange and index lists included."""
    few, many = steps_of_group_plan(64), steps_of_group_plan(2048)
    assert many == pytest.approx(few, rel=0.05)


def test_build_plan_scales_with_tokens() -> None:
    """Four times the tokens take less than eight times as long (best of nine)."""
    best = []
    for num_tokens in (2048, 8192):
        build = one_rank_plan(PlanBench(num_tokens=num_tokens), 8)
        build()
        times = []
        for _ in range(9):
            start = time.perf_counter()
            build()
            times.append(time.perf_counter() - start)
        best.append(min(times))
    assert best[1] < 8 * best[0]


def test_summary_example() -> None:
    """The worked example of `summarise_times`."""
    expected = {"median_us": 10.5, "p95_us": 19, "min_us": 1, "rounds": 20}
    assert summarise_times([float(n) for n in range(20, 0, -1)]) == expected
    assert summarise_times([3.0, 1.0, 2.0])["median_us"] == 2.0


def test_lines_hold_what_is_needed_to_run_again(tmp_path: Path) -> None:
    """Common fields are filled in, one run id for all lines, and the file says what is returned."""
    log = ResultLog(tmp_path / "folder" / "plan.jsonl", ["ep-dispatcher", "bench", "plan x"])
    lines = record_plan_bench(SMALL, log)
    assert log.path.read_text(encoding="utf-8") == "".join(
        json.dumps(line) + "\n" for line in lines
    )
    assert [line["ranks"] for line in lines] == [8, 64, 4]
    assert {line["run"] for line in lines} == {log.run}
    for line in lines:
        assert line["command"] == "ep-dispatcher bench 'plan x'"
        assert {"when", "commit", "machine", "versions"} <= set(line)
        assert {"python", "torch", "ep_dispatcher"} <= set(line["versions"])
        assert 0 < line["min_us"] <= line["median_us"] <= line["p95_us"]
        assert line["rounds"] == 20


def test_a_case_that_cannot_run_is_a_line_that_says_why(tmp_path: Path) -> None:
    """Sixteen experts are too few for 64 ranks; the other cases are timed."""
    bench = PlanBench(num_tokens=8, num_experts=16, num_topk=2, rounds=20)
    lines = record_plan_bench(bench, ResultLog(tmp_path / "plan.jsonl", ["x"]))
    assert ["error" in line for line in lines] == [False, True, False]
    assert "at least 64" in lines[1]["error"]
    assert "median_us" not in lines[1]


def test_a_second_run_appends(tmp_path: Path) -> None:
    """Earlier lines stay; a field that is None is left out; another log is another run."""
    for _ in range(2):
        ResultLog(tmp_path / "r.jsonl", ["x"]).write(sharing="cpu", suite="plan", error=None)
    first, second = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())
    assert first["run"] != second["run"]
    assert first["suite"] == "plan"
    assert "error" not in first


def test_too_few_rounds_are_refused() -> None:
    """A 95th percentile needs rounds."""
    with pytest.raises(ConfigError, match="rounds is 5; it must be at least 20"):
        PlanBench(rounds=5)


def test_bench_command_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ep-dispatcher bench plan` writes the file it names and prints medians."""
    out = tmp_path / "plan.jsonl"
    sizes = ["--tokens", "64", "--experts", "64", "--topk", "2", "--rounds", "20"]
    assert cli.main(["bench", "plan", *sizes, "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert {line["num_tokens"] for line in lines} == {64}
    assert "median us" in capsys.readouterr().out
