"""Training with each dispatcher: a run that fails or takes too long is a row that says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ep_dispatcher.bench.train_ablation import largest_difference, main


def test_the_example_of_a_largest_difference() -> None:
    assert largest_difference([2.0, 1.1], [2.0, 1.0]) == pytest.approx(0.1)


def test_a_run_past_its_limit_is_a_row_without_a_loss(tmp_path: Path) -> None:
    words = ["--config", "configs/tiny_cpu.yaml", "--dispatchers", "alltoall", "--limit", "1"]
    assert main([*words, "--out", str(tmp_path)]) == 1
    (line,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert "training ended with its time limit of 1 s" in line["error"]
    assert "last_loss" not in line
    assert "time limit of 1 s" in (tmp_path / "ablation.md").read_text()
