"""Whole training runs on a few ranks: a killed one goes on bit for bit; wrong use is refused."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_ranks import ForkedRanks

from ep_dispatcher.train.manifest import finished
from ep_dispatcher.train.metrics import METRICS, TIMES, StepMetrics, read_metrics
from ep_dispatcher.train.plots import PICTURE

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parent.parent
RANKS = 2  # each takes 5 s to import what it needs
STEPS = 12
EVERY = 5  # steps between checkpoints
KILL_AFTER = 7  # a step with lines behind the last checkpoint
_TIMEOUT_S = 120


def start(
    out: Path,
    *options: str,
    steps: int = STEPS,
    modules: tuple[Path, ...] = (),
) -> subprocess.Popen[str]:
    """Start the main job in a session of its own, small; `modules` are found before ours."""
    command = [sys.executable, "-m", "ep_dispatcher.train", *words(out, *options, steps=steps)]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (*modules, ROOT)))
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def words(out: Path, *options: str, ranks: int = RANKS, steps: int = STEPS) -> list[str]:
    """Options of the small job, and more."""
    given = ["--config", "configs/tiny_cpu.yaml", "--out", str(out), "--steps", str(steps)]
    settings = ["train.decay_steps=12", "train.warmup_steps=2", f"train.checkpoint_every={EVERY}"]
    settings += ["train.micro_batch=2", "model.seq_length=32", "data.max_bytes=100000"]
    settings += [f"parallel.ranks_per_node={ranks}", "parallel.expert=2", *options]
    return given + [word for setting in settings for word in ("--set", setting)]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a job; returns exit code, output and errors."""
    try:
        out, err = process.communicate(timeout=_TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, out, err


def numbers(out: Path) -> list[dict[str, object]]:
    """All metrics of a run but its times."""
    lines = [dataclasses.asdict(line) for line in read_metrics(out / METRICS)]
    return [{key: line[key] for key in line if key not in TIMES} for line in lines]


def told(errors: str) -> set[str]:
    """Lines of an error that all ranks have; on a slow machine some tell it after the first."""
    return {line.replace("error: rank 1: ", "error: ") for line in errors.splitlines()}


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill the launcher and its ranks, which have sessions of their own, without warning."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    )
    for pid in [process.pid, *map(int, listed.stdout.split())]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=_TIMEOUT_S)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run without interruption: its folder and what it printed."""
    out = tmp_path_factory.mktemp("whole")
    code, text, errors = finish(start(out))
    assert code == 0, errors
    return out, text


def test_run_reports_true_numbers(whole: tuple[Path, str]) -> None:
    """Every token asks for K experts in each layer; files are there and named; it learns."""
    out, text = whole
    lines: list[StepMetrics] = read_metrics(out / METRICS)
    assert [line.step for line in lines] == list(range(1, STEPS + 1))
    tokens = RANKS * 2 * 32
    for line in lines:
        assert line.tokens == tokens
        assert [sum(layer) for layer in line.tokens_per_expert] == [2 * tokens] * 2
        most = 2 * 4 * tokens * 2 * 64 * 4  # layers, trips, tokens, experts, row bytes
        assert 0 < line.moved_bytes <= most
        assert line.moved_bytes % (64 * 4) == 0
        assert line.across_bytes == 0
    assert lines[-1].loss < lines[0].loss
    assert (out / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert f"done: step {STEPS}" in text
    assert str(out / METRICS) in text
    assert [path.name[-2:] for path in finished(out / "checkpoints")] == ["10", "12"]


def test_killed_run_goes_on_bit_for_bit(whole: tuple[Path, str], tmp_path: Path) -> None:
    """Killed with -9 between checkpoints, the same command again: the same metrics, exactly."""
    killed = start(tmp_path)
    deadline = time.monotonic() + _TIMEOUT_S
    while len(read_metrics(tmp_path / METRICS)) < KILL_AFTER:
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kill_all(killed)
    assert len(read_metrics(tmp_path / METRICS)) < STEPS
    code, text, errors = finish(start(tmp_path))
    assert code == 0, errors
    assert "going on from the checkpoint of step" in text
    assert numbers(tmp_path) == numbers(whole[0])


def test_alltoall_trains_alike_and_moves_more(
    whole: tuple[Path, str], forked: ForkedRanks, tmp_path: Path
) -> None:
    """Top-2: the same losses and loads as Megatron's dispatcher; deduplication saves bytes."""
    options = words(tmp_path, "train.dispatcher=alltoall")
    code, text, errors = forked.run("ep_dispatcher.train", options, RANKS, tmp_path / "logs")
    assert code == 0, errors
    assert "dispatcher alltoall" in text
    for ours, theirs in zip(numbers(whole[0]), numbers(tmp_path), strict=True):
        assert ours["moved_bytes"] < theirs["moved_bytes"]  # type: ignore[operator]
        assert ours | {"moved_bytes": 0} == theirs | {"moved_bytes": 0}


def test_sharded_optimizer_resumes(forked: ForkedRanks, tmp_path: Path) -> None:
    """EP2 with data parallelism and the distributed optimizer: from step 5 again, the same."""
    ranks = 4
    options = words(tmp_path, "train.distributed_optimizer=true", ranks=ranks, steps=2 * EVERY)

    def run() -> tuple[int, str, str]:
        return forked.run("ep_dispatcher.train", options, ranks, tmp_path / "logs")

    code, _, errors = run()
    assert code == 0, errors
    whole_run = numbers(tmp_path)
    shutil.rmtree(finished(tmp_path / "checkpoints")[-1])
    code, text, errors = run()
    assert code == 0, errors
    assert f"going on from the checkpoint of step {EVERY}" in text
    assert numbers(tmp_path) == whole_run


def test_no_checkpoint_is_saved_after_a_fault_on_one_rank(tmp_path: Path) -> None:
    """A fault of the last step's kernels, which no call raises; every rank stops."""
    (tmp_path / "sitecustomize.py").write_text(f"""
import atexit, os, time
from pathlib import Path
from ep_dispatcher import EPGroup, EpTimeoutError

def check(group):
    rank = int(os.environ["RANK"])
    Path({str(tmp_path)!r}, f"checked{{rank}}").touch()
    if rank == 1:
        atexit.register(time.sleep, 2)  # the other is not ended before it has said why
        raise EpTimeoutError("waited in vain", rank=1, peer=0, phase="combine: partial sums")

EPGroup.check = check
""")
    code, _, errors = finish(start(tmp_path / "out", steps=EVERY, modules=(tmp_path,)))
    assert code == 1
    assert "EpTimeoutError: waited in vain" in errors
    assert (
        "RuntimeError: the group of rank 1 met a fault, so no steps since the last checkp" in errors
    )
    assert [path.name for path in sorted(tmp_path.glob("checked*"))] == ["checked0", "checked1"]
    assert finished(tmp_path / "out" / "checkpoints") == []


def test_damaged_checkpoint_and_other_config_are_refused(whole: tuple[Path, str]) -> None:
    """One line that names the file, or the setting; nothing is changed. Runs last: it breaks."""
    out = whole[0]
    before = (out / METRICS).read_bytes()
    code, _, errors = finish(start(out, "model.num_topk=1"))
    assert code == 2
    assert "model.num_topk is 1" in errors
    assert len(errors.splitlines()) == 1
    newest = finished(out / "checkpoints")[-1]
    part = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    code, _, errors = finish(start(out))
    assert code == 2
    assert f"{part.name} is damaged" in errors
    assert len(told(errors)) == 1
    assert (out / METRICS).read_bytes() == before
