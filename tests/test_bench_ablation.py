"""Training with each dispatcher: a run that fails or takes too long is a row that says so."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ep_dispatcher.bench import train_ablation
from ep_dispatcher.bench.results import ResultLog
from ep_dispatcher.bench.train_ablation import (
    WARM_UP_STEPS,
    TrainingRun,
    draw,
    largest_difference,
    main,
    record,
    sharing_of,
    write_page,
)


def test_the_example_of_a_largest_difference() -> None:
    assert largest_difference([2.0, 1.1], [2.0, 1.0]) == pytest.approx(0.1)


def test_a_run_past_its_limit_is_a_row_without_a_loss(tmp_path: Path) -> None:
    words = ["--config", "configs/tiny_cpu.yaml", "--dispatchers", "alltoall", "--limit", "1"]
    assert main([*words, "--out", str(tmp_path)]) == 1
    (line,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert "training ended with its time limit of 1 s" in line["error"]
    assert "last_loss" not in line
    assert line["machine"]["sharing"] in ("cpu", "one per gpu")
    assert "time limit of 1 s" in (tmp_path / "ablation.md").read_text()


def test_lines_say_how_the_ranks_of_a_config_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert sharing_of(Path("configs/one_gpu_4ranks.yaml")) == "mps"
    assert sharing_of(Path("configs/h200_8gpu.yaml")) == "one per gpu"


def test_the_picture_and_the_page_hold_what_the_runs_left(tmp_path: Path) -> None:
    """One that trained, one that trained without known memory, and one that failed."""
    first = TrainingRun(
        dispatcher="alltoall",
        losses=[3.0, 2.0],
        step_s=[0.2537, 0.2537],
        tokens_per_s=512.0,
        peak_bytes=7_000_000,
        wall_s=9.0,
    )
    second = replace(first, dispatcher="ep_dispatcher", losses=[3.0, 2.2], peak_bytes=None)
    failed = replace(first, dispatcher="allgather", losses=[], step_s=[], error="ended with 1")
    runs = [first, second, failed]
    draw(runs, tmp_path / "ablation.png")
    write_page(runs, Path("configs/tiny_cpu.yaml"), tmp_path / "ablation.md")
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "ablation.md").read_text()
    assert "| alltoall | 2.000000 | 0.00e+00 | 253.7 | 512 | 7 | 9.0 |" in page
    assert "| ep_dispatcher | 2.200000 | 1.00e-01 | 253.7 | 512 | unknown | 9.0 |" in page
    assert "| allgather | ended with 1 |" in page


GOOD = TrainingRun(
    dispatcher="alltoall",
    losses=[3.0, 2.0],
    step_s=[0.25, 0.25],
    tokens_per_s=512.0,
    peak_bytes=None,
    wall_s=9.0,
)
FAILED = replace(GOOD, dispatcher="ep_dispatcher", losses=[], step_s=[], error="ended with 1")


@pytest.mark.parametrize(
    ("base", "page_words", "fields"),
    [
        (
            replace(FAILED, dispatcher="alltoall"),
            "| not compared, the base failed |",
            {"loss_not_compared": "not compared, the base failed"},
        ),
        (
            replace(GOOD, losses=[3.0]),
            "| 0.00e+00, over 1 of 2 steps |",
            {"loss_difference": 0.0, "loss_compared_steps": 1},
        ),
        (GOOD, "| 1.00e-01 |", {"loss_difference": pytest.approx(0.1), "loss_compared_steps": 2}),
    ],
    ids=["failed base", "short base", "whole base"],
)
def test_a_difference_says_what_it_is_from(
    base: TrainingRun, page_words: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    runs = [base, replace(GOOD, dispatcher="ep_dispatcher", losses=[3.0, 2.2])]
    config = Path("configs/tiny_cpu.yaml")
    record(runs, config, ResultLog(tmp_path / "results.jsonl", ["x"]), "cpu")
    line = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[-1])
    assert {name: line.get(name) for name in fields} == fields
    assert ("loss_difference" in line) is ("loss_difference" in fields)
    draw(runs, tmp_path / "ablation.png")
    write_page(runs, config, tmp_path / "ablation.md")
    assert page_words in (tmp_path / "ablation.md").read_text().splitlines()[-3]


@pytest.mark.parametrize(("second", "code"), [(GOOD, 0), (FAILED, 1)])
def test_one_run_without_a_loss_is_an_exit_code(
    second: TrainingRun, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter([GOOD, second])
    monkeypatch.setattr(train_ablation, "train", lambda *_: next(runs))
    assert main(["--config", "configs/tiny_cpu.yaml", "--out", str(tmp_path)]) == code


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--config", "configs/tiny_cpu.yaml", "--steps", "3"], "--steps is 3; it must be above 5"),
        (
            ["--config", "configs/tiny_cpu.yaml", "--dispatchers", "alltoall", "deepep"],
            "--dispatchers has 'deepep' in ['alltoall', 'deepep']; each must be one of alltoall, ",
        ),
        (
            ["--config", "configs/tiny_cpu.yaml", "--dispatchers", "alltoall", "alltoall"],
            "once",
        ),
        (["--config", "configs/tiny_cpu.yaml", "--limit", "nan"], "--limit is nan; it must be"),
        (["--config", "configs/none.yaml"], "configs/none.yaml, which is no file"),
    ],
)
def test_a_wrong_call_is_named_before_anything_trains(
    words: list[str],
    answer: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_ablation, "train", lambda *_: pytest.fail("it trained"))
    with pytest.raises(SystemExit):
        main(words)
    assert answer in capsys.readouterr().err


def test_the_scripts_words_and_the_check_know_the_same_limit() -> None:
    assert f"--steps must be above {WARM_UP_STEPS}" in Path("scripts/ablate.sh").read_text()
