"""What is left of a measurement that hangs or is ended: each rank's phase and its stacks."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from ep_dispatcher.launch import USER_ERROR
from ep_dispatcher.profile import schedule, together
from ep_dispatcher.profile.parity import Lines, Run, needed
from ep_dispatcher.profile.watch import Watch, stacks_file
from ep_dispatcher.train.config import load_config

CONFIGS = Path(__file__).parent.parent / "configs"
FORK = multiprocessing.get_context("fork")
LONG_S = 30


def stuck() -> None:
    """Wait in a call that keeps the interpreter to itself."""
    ctypes.PyDLL(None).sleep(LONG_S)


def rank_that(out: Path, limit_s: float, rank: int, work: Callable[[], object]) -> BaseProcess:
    """A process that does something in a phase."""

    def main() -> None:
        # A fork has the handlers of the process that runs the tests; a rank that is started, none.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with Watch(out, limit_s, rank) as watch:
            watch("the phase before")
            watch.at("a step")
            work()

    process = FORK.Process(target=main)
    process.start()
    return process


def test_a_phase_over_the_limit_ends_its_rank_and_leaves_its_stacks(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "a.jsonl"
    process = rank_that(out, 0.3, 2, stuck)
    process.join(LONG_S / 2)
    assert process.exitcode == 1
    told = (tmp_path / "runs" / "a.rank2.stacks").read_text()
    assert told.startswith("rank 2, since 0.")
    assert "s: a step\n" in told
    assert "in stuck\n" in told
    assert "the phase before" not in told


def test_a_rank_that_is_ended_leaves_its_stacks(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    process = rank_that(out, LONG_S, 0, stuck)
    file = stacks_file(out, 0)
    while not (file.is_file() and "a step" in file.read_text()):
        time.sleep(0.01)
    time.sleep(0.1)
    process.terminate()
    process.join(LONG_S / 2)
    assert process.exitcode == -signal.SIGTERM
    assert "in stuck\n" in file.read_text()


def test_a_limit_is_of_each_phase_and_an_end_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Watch(tmp_path / "a.jsonl", 0.5, 0) as watch:
        for index in range(8):
            watch(f"phase {index}")
            time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []
    time.sleep(0.6)  # nor is this process ended
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("s  ")[1] for line in lines[1:]] == [f"phase {n}" for n in range(8)]


def test_a_rank_that_raises_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with Watch(tmp_path / "a.jsonl", LONG_S, 1) as watch:
            watch("a step")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_rank_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Watch(tmp_path / "a.jsonl", LONG_S, 1) as watch:
        watch("a step")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [("--limit", "0", "number of seconds above 0"), ("--rounds", "0", "at least 1")],
)
def test_values_that_cannot_be_are_refused(
    option: str, value: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        schedule.main(["--config", "none.yaml", option, value])
    assert told in capsys.readouterr().err


def test_nccl_leaves_norms_their_place_where_ranks_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No more blocks than the norms of another rank leave free for this one."""
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    for overrides, told in (
        (["parallel.ranks_share_gpu=false"], None),
        ([], "12"),
        (["ep_dispatcher.num_sms=8"], "12"),  # what is set stays
    ):
        words = ["ep_dispatcher.num_sms=12", *overrides]
        schedule.bound_nccl(load_config(CONFIGS / "overlap_layer.yaml", words))
        assert os.environ.get("NCCL_MAX_CTAS") == told


def a_run(*losses: float) -> Run:
    return Run(list(losses), 1.0, 0.01, "reference", 0)


class Log:
    """Keeps names of variants and what was found of them."""

    def __init__(self) -> None:
        """None yet."""
        self.lines: list[dict[str, Any]] = []

    def write(self, **fields: Any) -> None:  # noqa: ANN401
        """As `ResultLog.write`."""
        self.lines.append(fields)

    def names(self) -> list[str]:
        """Of the lines so far."""
        return [line["variant"] for line in self.lines]


def test_a_line_of_parity_is_written_once_all_that_it_names_has_run() -> None:
    names = ["alltoall", "allgather", "ours", "chunks", "ours again"]
    assert needed("ours", names) == {"alltoall", "allgather", "ours", "ours again"}
    log: Any = Log()
    lines = Lines(names, load_config(CONFIGS / "one_gpu_4ranks.yaml"), log)
    for name, losses, written in (
        ("alltoall", (3.0, 2.0), []),
        ("allgather", (3.0, 2.5), ["alltoall", "allgather"]),
        ("ours", (3.0, 2.25), ["alltoall", "allgather"]),
        ("chunks", (3.0, 2.75), ["alltoall", "allgather", "chunks"]),
    ):
        lines.add(name, a_run(*losses))
        assert log.names() == written
    lines.end()  # "ours again" failed
    assert log.names() == ["alltoall", "allgather", "chunks", "ours"]
    chunks, ours = log.lines[2:]
    assert (chunks["max_loss_difference"], chunks["checked"]) == (0.75, False)
    assert (ours["allgather_loss_difference"], ours["checked"]) == (0.5, True)
    assert ours["same_bits_again"] is None


def test_runs_without_alltoall_have_no_lines() -> None:
    log: Any = Log()
    lines = Lines(["ours", "alltoall"], load_config(CONFIGS / "one_gpu_4ranks.yaml"), log)
    lines.add("ours", a_run(1.0))
    lines.end()
    assert log.names() == []


LAYER = ["layer", "--config", str(CONFIGS / "overlap_layer.yaml")]
PARITY = ["parity", "--config", str(CONFIGS / "one_gpu_4ranks.yaml"), "--variants", "alltoall,ours"]


def test_measurements_together_keep_their_own_words_and_configs() -> None:
    wide = ["--set", "model.shared_expert_ffn_hidden=2048"]
    parts = together.read_parts([*LAYER, "++", *LAYER, *wide, "++", *PARITY, "--steps", "7"])
    assert [part.name for part in parts] == ["layer", "layer", "parity"]
    words = [LAYER[1:], [*LAYER[1:], *wide], [*PARITY[1:], "--steps", "7"]]
    assert [part.words for part in parts] == words
    widths = [part.config.model.shared_expert_ffn_hidden for part in parts[:2]]
    assert widths == [None, 2048]
    assert parts[2].config.train.steps == 7


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "'' is no measurement; it is one of layer, parity"),
        ([*LAYER, "++"], "'' is no measurement"),
        ([*LAYER, "++", "schedule"], "'schedule' is no measurement"),
        ([*LAYER, "++", *PARITY, "--set", "parallel.ranks_share_gpu=false"], "measurement 2 (par"),
        ([*LAYER, "--set", "model.num_layers=2"], "this measures 1 layer"),
    ],
)
def test_measurements_that_cannot_share_ranks_are_refused_before_these_meet(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(together, "open_runtime", lambda _: pytest.fail("a rank joined the job"))
    assert together.main(words) == USER_ERROR
    assert told in capsys.readouterr().err
