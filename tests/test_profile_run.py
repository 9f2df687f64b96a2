"""`ep-dispatcher profile` and the measurement of one layer, on two ranks of the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_ranks import ForkedRanks

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parent.parent
TWO_RANKS = ("parallel.ranks_per_node=2", "parallel.expert=2")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a module of ours; returns its exit code and what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def settings(*values: str) -> list[str]:
    """As options."""
    return [word for value in values for word in ("--set", value)]


def test_profile_writes_traces_and_a_summary(tmp_path: Path) -> None:
    """Two layers of two chunks: each phase has time, and there are two plans a layer.

    With --same-batch no step of the optimizer is among what was recorded.
    """
    small = ("model.seq_length=32", "data.max_bytes=100000", "ep_dispatcher.overlap.chunks=2")
    done = run(
        "ep_dispatcher", "profile", "--config", "configs/tiny_cpu.yaml", "--steps", "1",
        "--warm-up", "1", "--same-batch", "--out", str(tmp_path), *settings(*TWO_RANKS, *small),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["ranks"]) == 2
    for rank, found in enumerate(summary["ranks"]):
        trace = (tmp_path / f"trace_rank{rank}.json").read_text()
        assert len(trace) > 1000
        assert "Optimizer.step" not in trace
        assert found["layers"] == 2
        assert found["plans_per_layer"] == 2.0
        assert set(found["phases_us"]) == {
            "plan", "dispatch", "experts", "combine",
            "combine_backward", "experts_backward", "dispatch_backward",
        }  # fmt: skip
        assert all(value > 0 for value in found["phases_us"].values())
    assert "experts_backward" in done.stdout


def test_schedule_bench_records_what_1f1b_hides(forked: ForkedRanks, tmp_path: Path) -> None:
    """Only variants under 1F1B have nodes to clock, so only they have a hidden fraction."""
    out = tmp_path / "overlap.jsonl"
    small = (
        "model.hidden=64", "model.num_attention_heads=4", "model.expert_ffn_hidden=64",
        "model.num_experts=8", "model.num_topk=2", "model.seq_length=32", "model.norm=LayerNorm",
        "data.max_bytes=100000", "train.num_micro_batches=3",
    )  # fmt: skip
    words = ["--config", "configs/overlap_layer.yaml", "--out", str(out), "--rounds", "2"]
    words += settings(*TWO_RANKS, *small)
    code, _, errors = forked.run("ep_dispatcher.profile.schedule", words, 2, tmp_path / "logs")
    assert code == 0, errors
    lines = {line["variant"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert list(lines) == ["alltoall", "ours", "alltoall 1f1b", "ours 1f1b"]
    for name, line in lines.items():
        assert line["checked"], line
        assert line["backend"] == (
            "ep_dispatcher/reference" if name.startswith("ours") else "megatron/alltoall"
        )
        assert ("hidden_fraction" in line) == name.endswith("1f1b")
        assert ("communication_us" in line) == name.endswith("1f1b")


def test_layer_bench_records_checked_lines(forked: ForkedRanks, tmp_path: Path) -> None:
    """Alltoall, ours, ours in two chunks, with and without a second stream: three lines each."""
    out = tmp_path / "overlap.jsonl"
    small = (
        "model.hidden=64", "model.num_attention_heads=4", "model.expert_ffn_hidden=64",
        "model.num_experts=8", "model.num_topk=2", "model.seq_length=64", "model.dtype=float32",
        "model.norm=LayerNorm",
    )  # fmt: skip
    words = (
        "--config", "configs/overlap_layer.yaml", "--out", str(out), "--chunks", "2",
        "--rounds", "2", "--spans", str(tmp_path / "spans.json"), *settings(*TWO_RANKS, *small),
    )  # fmt: skip
    code, _, errors = forked.run("ep_dispatcher.profile.layer", words, 2, tmp_path / "logs")
    assert code == 0, errors
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["variant"] for line in lines} == {"alltoall", "ours", "chunks2", "chunks2 serial"}
    assert len(lines) == 12
    for line in lines:
        assert line["checked"], line
        assert line["median_us"] > 0
        assert 0 <= line["hidden_fraction"] <= 1
    spans = json.loads((tmp_path / "spans.json").read_text())
    names = [name for name, _, _ in spans[1]["chunks2"]]
    assert names.count("dispatch_backward") == names.count("experts") == 2
