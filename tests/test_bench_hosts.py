"""The harness on hosts: SLURM's variables, recovery, targets, the script for several GPUs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.bench.backends.base import Lap, Place
from ep_dispatcher.bench.backends.own import OwnSession
from ep_dispatcher.bench.check import WrongResult
from ep_dispatcher.bench.inputs import make_inputs, make_routing
from ep_dispatcher.bench.launcher import Launch, Outcome
from ep_dispatcher.bench.layer import Layer
from ep_dispatcher.bench.lines import lines_of
from ep_dispatcher.bench.page_data import phase_table, rate_table, with_knobs
from ep_dispatcher.bench.rounds import RankResult
from ep_dispatcher.bench.spec import Method, Work
from ep_dispatcher.bench.targets import judge
from ep_dispatcher.bench.trace import read_trace
from ep_dispatcher.cli import main
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.testing import run_ranks

ROOT = Path(__file__).parents[1]
TINY = ["ranks=2", "num_tokens=24", "hidden=16", "num_topk=2", "num_experts=4"]
TINY += ["dtype=float32", "warmup=1"]


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (out / "results.jsonl").read_text().splitlines()]


def line(backend: str, phase: str, us: float, **more: object) -> dict[str, Any]:
    """A recorded line of the target's work on 8 GPUs."""
    values: dict[str, Any] = {"ranks": 8, "num_tokens": 4096, "hidden": 7168, "num_topk": 8}
    values |= {"num_experts": 256, "dtype": "bfloat16", "routing": "uniform", "num_sms": 8}
    values |= {"backend": backend, "phase": phase, "median_us": us, "p95_us": us}
    return values | {"wire_bytes": 272e6} | more


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def test_ranks_meet_by_what_slurm_tells_each_of_them(tmp_path: Path) -> None:
    """As `srun -n 2` starts them: no RANK, no WORLD_SIZE; only SLURM's names and MASTER_ADDR."""
    words = [sys.executable, "-m", "ep_dispatcher", "bench", "run", "--no-report"]
    words += ["--backends", "torch/all_to_all", "--out", str(tmp_path), "--set", *TINY]
    common = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    common |= {"SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            words,
            env=common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    lines = read(tmp_path)
    assert {found["checked"] for found in lines} == {True}
    assert len({found["run"] for found in lines}) == 1  # one launcher wrote


def test_slurm_without_an_address_says_which_command_gives_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "2")
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    words = ["bench", "run", "--backends", "torch/all_to_all", "--out", str(tmp_path)]
    assert main([*words, "--set", *TINY]) == 2
    assert "MASTER_ADDR=$(scontrol show hostnames" in capsys.readouterr().err


def test_the_machine_is_put_right_after_a_bad_end_before_others_start(tmp_path: Path) -> None:
    words = ["bench", "run", "--backends", "control/crash", "torch/all_to_all", "--no-report"]
    words += ["--out", str(tmp_path), "--recover", f"touch {tmp_path}/recovered"]
    assert main([*words, "--set", *TINY]) == 0
    first, *rest = read(tmp_path)
    assert "died with exit code" in first["error"]
    assert all(found["checked"] for found in rest)
    recovered = (tmp_path / "recovered").stat().st_mtime
    assert recovered <= (tmp_path / "results.jsonl").stat().st_mtime


def test_times_are_kept_where_counting_calls_hung_and_the_next_work_is_not_blamed() -> None:
    works = tuple(Work(ranks=2, num_tokens=tokens) for tokens in (8, 16, 32))
    launch = Launch(backend="b", works=works, device="cuda", method=Method())
    result = asdict(RankResult(times_us={"dispatch": [1.0] * 20}))
    files: dict[str, Any] = {f"0.{rank}": {"result": result} for rank in range(2)}
    files |= {"1.0": {"result": result, "counting": True}, "1.1": {"result": result}}
    outcomes, failed = launch._merge(0, [files], ["took longer"])
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert failed  # and a new set of processes begins with the third
    del files["1.0"]["counting"]
    outcomes, failed = launch._merge(0, [files], ["took longer"])
    assert [outcome.error for outcome in outcomes] == [None, None, "took longer"]


def test_targets_are_judged_by_the_lines_and_by_nothing_else() -> None:
    lines = [
        line("ep_dispatcher/device", "dispatch", 700.0),
        line("ep_dispatcher/device", "combine", 900.0),
        line("ep_dispatcher/device", "combine", 600.0, num_sms=24),
        line("nccl_ep", "dispatch", 690.0, num_sms=16),
        line("torch/all_to_all", "combine", 500.0, num_sms=16),
        line("torch/all_to_all", "unpermute", 400.0, num_sms=16),
        {"suite": "ceiling", "ceiling": "link", "ceiling_GBps": 420.0},
    ]
    found = {verdict.what: verdict for verdict in judge(lines, 8)}
    assert found["dispatch"].met is True
    assert found["combine"].met is False  # 24 SMs do not count
    assert found["dispatch: link"].met is True  # 272 MB in 700 us: 389 of 420
    assert found["combine: link"].met is False
    assert found["dispatch: peers"].met is False
    assert found["combine: peers"].met is True  # theirs needs the unpermute too
    assert found["overlap"].met is None
    assert all(verdict.met is None for verdict in judge(lines, 4))


def test_a_dispatch_is_held_against_peers_with_the_plan_of_each() -> None:
    """The peer's plan is inside its permute, ours is a phase; alone, ours would be ahead."""
    lines = [
        line("ep_dispatcher/device", "plan", 300.0),
        line("ep_dispatcher/device", "dispatch", 700.0),
        line("megatron/alltoall", "permute", 200.0),
        line("megatron/alltoall", "dispatch", 750.0),
    ]
    (found,) = (verdict for verdict in judge(lines, 8) if verdict.what == "dispatch: peers")
    assert found.met is False
    assert found.measured == "ours 1,000, megatron/alltoall 950 us"
    assert "plan and permute included" in found.target


@pytest.mark.parametrize(
    ("sharing", "ranks", "why"),
    [
        ("mps", 8, "ranks share a GPU"),
        ("one per gpu", 4, "for 8 GPUs"),
        ("one per gpu", 8, ""),
    ],
)
def test_a_target_is_judged_on_the_machine_that_it_is_for(
    sharing: str, ranks: int, why: str
) -> None:
    more = {"ranks": ranks, "machine": {"sharing": sharing}}
    lines = [line("ep_dispatcher/device", "dispatch", 900.0, **more)]
    lines += [line("nccl_ep", "dispatch", 950.0, **more), {"hidden_fraction": 0.5}]
    lines += [{"suite": "ceiling", "ceiling": "link", "ceiling_GBps": 420.0}]
    found = {verdict.what: verdict for verdict in judge(lines, ranks)}
    assert found["dispatch"].not_judged == why
    assert found["dispatch"].met is (None if why else False)
    assert found["dispatch: peers"].met is True  # all had the same machine
    assert found["dispatch: link"].met is (None if sharing == "mps" else False)
    assert found["overlap"].met is (None if sharing == "mps" else False)


def test_forms_of_one_backend_stand_apart_in_the_tables() -> None:
    lines = [
        line("ep_dispatcher/device", "combine", us, combine=form)
        for form, us in (("push", 900.0), ("gather", 600.0))
    ]
    (table,) = phase_table([with_knobs(found) for found in lines])
    names = [row[0] for row in table.rows]
    assert names == ["ep_dispatcher/device, push", "ep_dispatcher/device, gather"]


class LosesARow(OwnSession):
    """Its combine forgets the last token's sum in the whole layer, as no single call would show."""

    def combine(self, expert_out: Tensor, lap: Lap) -> Tensor:
        """See `Session.combine`."""
        out = super().combine(expert_out, lap)
        out[-1] /= 2
        return out


@pytest.mark.parametrize("session", [OwnSession, LosesARow])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_layers_result_is_compared_with_the_reference(
    session: type[OwnSession], dtype: str
) -> None:
    work = Work(
        ranks=2, num_tokens=12, hidden=32, num_topk=2, num_experts=4, dtype=dtype, ffn_hidden=16
    )

    def check(group: dist.ProcessGroup) -> str:
        rank = group.rank()
        place = Place(
            group=group, rank=rank, device=torch.device("cpu"), name="ep_dispatcher/reference"
        )
        inputs = make_inputs(work, rank, place.device)
        opened = session(work, place)
        opened.prepare(inputs.topk_idx, inputs.topk_weights)
        try:
            Layer(opened, work, place, inputs).check()
        except WrongResult as error:
            return str(error)
        return ""

    told = run_ranks(2, check)
    if session is OwnSession:
        assert told == ["", ""]
    else:
        assert all("layer_forward: token 11" in reason for reason in told)


class Watched(OwnSession):
    """Notes where the rows that combine takes lie, and where it need not copy them from."""

    def empty_rows(self) -> Tensor | None:
        """See `Session.empty_rows`."""
        rows = super().empty_rows()
        assert rows is not None
        self.offered = rows.data_ptr()
        return rows

    def combine(self, expert_out: Tensor, lap: Lap) -> Tensor:
        """See `Session.combine`."""
        self.taken = expert_out.data_ptr()
        return super().combine(expert_out, lap)


def test_the_layers_experts_write_where_combine_reads() -> None:
    work = Work(
        ranks=2, num_tokens=12, hidden=32, num_topk=2, num_experts=4, dtype="float32", ffn_hidden=16
    )

    def watch(group: dist.ProcessGroup) -> bool:
        cpu = torch.device("cpu")
        place = Place(group=group, rank=group.rank(), device=cpu, name="ep_dispatcher/reference")
        inputs = make_inputs(work, group.rank(), cpu)
        session = Watched(work, place)
        session.prepare(inputs.topk_idx, inputs.topk_weights)
        Layer(session, work, place, inputs).forward()
        return session.taken == session.offered

    assert run_ranks(2, watch) == [True, True]


@pytest.mark.timeout(300)
def test_the_script_for_many_gpus_runs_from_tests_to_table(tmp_path: Path) -> None:
    done = subprocess.run(
        ["scripts/multi_gpu.sh", "2", "--cpu", "--out", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert (tmp_path / "report.html").is_file()
    assert len(json.loads((tmp_path / "targets.json").read_text())) == 7
    checked = {found["backend"] for found in read(tmp_path) if found["checked"]}
    assert checked == {"ep_dispatcher/reference", "torch/all_to_all"}


STAND_IN = """#!/usr/bin/env bash
case "$*" in
  *ep_dispatcher.bench.targets*) exec "$REAL_PYTHON" "$@" ;;
  *"import megatron.core"*) exit 1 ;; # no overlap
  *"bench run"*) cp "$RECORDED" "$OUT/results.jsonl" ;;
esac
echo "1 passed"
"""


@pytest.mark.parametrize("lost", [None, "dispatch", "combine"])
def test_the_script_for_many_gpus_fails_where_our_own_backend_did(
    lost: str | None, tmp_path: Path
) -> None:
    """A peer without a time is no failure. Tests and benchmark are stood in for."""
    lines = [
        line("ep_dispatcher/reference", phase, 9.0, ranks=2)
        if phase != lost
        else line("ep_dispatcher/reference", "", 0, ranks=2, error="it fell over")
        for phase in ("dispatch", "combine")
    ]
    lines += [line("nccl_ep", "", 0, ranks=2, error="not here")]
    for each in (found for found in lines if "error" in found):
        del each["phase"], each["median_us"]
    recorded, python = tmp_path / "recorded.jsonl", tmp_path / "python"
    recorded.write_text("".join(json.dumps(each) + "\n" for each in lines))
    python.write_text(STAND_IN)
    python.chmod(0o755)
    environment = {"PYTHON": str(python), "REAL_PYTHON": sys.executable}
    environment |= {"RECORDED": str(recorded), "OUT": str(tmp_path)}
    done = subprocess.run(
        ["scripts/multi_gpu.sh", "2", "--cpu", "--out", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == (0 if lost is None else 1), done.stdout + done.stderr
    parts = (tmp_path / "parts.txt").read_text()
    (bench,) = (text for text in parts.splitlines() if " bench " in text)
    assert bench.startswith("FAIL (ours)" if lost else "ok ")
    assert (f"no time of {lost} with 2 ranks: it fell over" in bench) is (lost is not None)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("", "scripts/multi_gpu.sh N"),
        ("0 --cpu", "N is '0'; it must be a whole number, 1 or more"),
        ("two", "N is 'two'; it must be a whole number"),
        ("1 --ranks-per-gpu 0", "--ranks-per-gpu is '0'; it must be a whole number, 1 or more"),
        ("1 --budget 5", "--budget is '5'; it must be a whole number, 60 or more"),
        ("1 --budget", "--budget needs a value"),
        ("1 --out --quick", "--out needs a value"),
        ("1 --quik", "unknown option --quik"),
        ("999", "999 GPUs are asked for"),
    ],
)
def test_the_script_for_many_gpus_names_what_is_wrong(words: str, answer: str) -> None:
    done = subprocess.run(
        ["scripts/multi_gpu.sh", *words.split()],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert answer in done.stdout


@pytest.mark.parametrize("word", ["--help", "-h"])
@pytest.mark.parametrize("script", ["multi_gpu.sh", "bench_one_gpu.sh"])
def test_help_is_no_error(script: str, word: str) -> None:
    words = [f"scripts/{script}", word]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert f"scripts/{script} " in done.stdout


def test_lines_of_the_layer_end_after_a_whole_column() -> None:
    """The script's own words, on a line as `profile.layer` writes it and on a longer one."""
    script = (ROOT / "scripts/multi_gpu.sh").read_text()
    (words,) = (text for text in script.splitlines() if text.strip().startswith("grep -E '^[a-z0"))
    log = "ours in 2 chunks forward 12.345  hidden 0.5  peak 12.345 GB  difference 0.0e+00\n"
    log += "one layer, experts X; ms\n"
    shell = words.replace('"$out/overlap.log"', "")
    done = subprocess.run(["bash", "-c", shell], input=log, capture_output=True, text=True)
    assert done.stdout == "ours in 2 chunks forward 12.345  hidden 0.5  peak 12.345 GB\n"


def test_the_memory_of_one_gpu_is_not_taken_for_a_link() -> None:
    lines = [line("ep_dispatcher/device", "dispatch", 700.0)]
    lines += [{"suite": "ceiling", "ceiling": "memory", "ceiling_GBps": 2000.0}]
    (found,) = (verdict for verdict in judge(lines, 8) if verdict.what == "dispatch: link")
    assert found.met is None


def test_a_form_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="combine is 'pull'"):
        Work(combine="pull")  # type: ignore[arg-type]


def test_what_routers_chose_in_training_is_replayed(tmp_path: Path) -> None:
    """Two ranks train one step and record; the bench moves just those tokens."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    words = [sys.executable, "-m", "ep_dispatcher", "train", "--config", "configs/tiny_cpu.yaml"]
    words += ["--steps", "1", "--out", str(tmp_path / "train")]
    for change in ("record_routing=4", "checkpoint_every=0"):
        words += ["--set", f"train.{change}"]
    for change in ("ranks_per_node=2", "expert=2"):
        words += ["--set", f"parallel.{change}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted((tmp_path / "train").glob("router.rank*.npz"))
    trace = read_trace(files[0])
    assert len(files) == trace.ep_size
    assert 0 < len(trace.entries) <= 4
    merged = tmp_path / "router.npz"
    assert main(["bench", "trace", *map(str, files), "--merge", str(merged)]) == 0
    work = [f"ranks={trace.ep_size}", "routing=replay", f"trace={merged}", "dtype=float32"]
    work += ["num_tokens=32", "hidden=16", f"num_topk={trace.num_topk}"]
    work += [f"num_experts={trace.num_experts}"]
    words = ["bench", "run", "--backends", "ep_dispatcher/reference", "--no-report"]
    assert main([*words, "--out", str(tmp_path), "--set", *work]) == 0
    sent = read(tmp_path)[0]["received_rows"]
    kept = sum(int((x[:32] >= 0).sum()) for x in first_entries(files))
    assert sum(sent) == kept


def first_entries(files: list[Path]) -> list[Tensor]:
    """The routing that each rank recorded first."""
    return [read_trace(file).entries[0] for file in files]


def test_bytes_are_counted_for_what_travels_each_way() -> None:
    """Two ranks, K=2 of 4 experts: copies that travel apart are more rows than sums of them."""
    work = Work(ranks=2, num_tokens=64, hidden=16, num_topk=2, num_experts=4, dtype="float32")
    result = asdict(RankResult(wire="by_copy", wire_home="by_rank", layout="expert_major"))
    result["times_us"] = {"dispatch": [10.0] * 20, "combine": [10.0] * 20}
    outcome = Outcome(backend="ep_dispatcher/device", work=work, ranks=(result, result))
    sent = {found["phase"]: found["wire_bytes"] for found in lines_of(outcome, "s", "mps")}
    chosen = [make_routing(work, rank) // 2 != rank for rank in range(2)]
    assert sent["dispatch"] == sum(int(away.sum()) for away in chosen) * work.row_bytes / 2
    assert sent["combine"] == sum(int(away.any(1).sum()) for away in chosen) * work.row_bytes / 2
    assert sent["combine"] < sent["dispatch"]


@pytest.mark.parametrize("phases", [["dispatch"], ["plan", "dispatch"]])
def test_a_rate_that_charges_the_plan_needs_a_plan(phases: list[str]) -> None:
    """Also for lines that were recorded with that rate: Megatron's plan is in its permute."""
    work = Work(ranks=2, num_tokens=64, hidden=16, num_topk=2, num_experts=4, dtype="float32")
    result = asdict(RankResult(wire="by_copy", wire_home="by_copy", layout="expert_major"))
    result["times_us"] = {phase: [10.0] * 20 for phase in phases}
    outcome = Outcome(backend="megatron/alltoall", work=work, ranks=(result, result))
    lines = list(lines_of(outcome, "s", "mps"))
    rates = lines[-1]["bandwidth_GBps"]
    assert ("D5_pairs" in rates) is ("plan" in phases)
    rates |= {"D5_assignments": 123.0, "D5_pairs": 45.0}
    (row,) = rate_table(lines).rows
    assert row[-3:-1] == (("123", "45") if "plan" in phases else ("-", "-"))
