"""The ablation harness as a user runs it: processes, faults, lines and pages, on the CPU."""

from __future__ import annotations

import base64
import json
import os
import signal
import struct
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_dispatcher.bench.backends.control import CRASH_EXIT_CODE
from ep_dispatcher.bench.command import NO_TIMES
from ep_dispatcher.bench.launcher import Outcome
from ep_dispatcher.bench.run import Bench
from ep_dispatcher.bench.spec import Work
from ep_dispatcher.bench.trace import RouterTrace, write_trace
from ep_dispatcher.cli import main

TINY = [
    "ranks=2",
    "num_tokens=24",
    "hidden=16",
    "num_topk=2",
    "num_experts=4",
    "dtype=float32",
    "warmup=1",
]
GOOD = ("ep_dispatcher/reference", "torch/all_to_all")
Lines = dict[str, list[dict[str, Any]]]


def bench(out: Path, *backends: str, more: tuple[str, ...] = ()) -> tuple[int, Lines]:
    """Run backends on a tiny work; the exit code, and the lines of each backend."""
    words = ["bench", "run", "--backends", *backends, "--out", str(out), "--no-report"]
    code = main([*words, "--set", *TINY, *more])
    return code, read(out)


def read(out: Path) -> Lines:
    """Recorded lines by backend."""
    lines: Lines = {}
    for text in (out / "results.jsonl").read_text().splitlines():
        line = json.loads(text)
        lines.setdefault(line["backend"], []).append(line)
    return lines


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Lines]:
    """One run of the backends that work here, with the whole layer."""
    out = tmp_path_factory.mktemp("bench")
    code, lines = bench(out, *GOOD, "nccl_ep", more=("ffn_hidden=8",))
    assert code == 0
    return out, lines


def test_every_phase_of_a_backend_has_a_checked_line_with_a_time(ran: tuple[Path, Lines]) -> None:
    for backend in GOOD:
        lines = {line["phase"]: line for line in ran[1][backend]}
        expected = {"plan", "dispatch", "combine", "combine_backward", "dispatch_backward", "pair"}
        expected |= {"layer_forward", "layer_backward"}
        assert expected <= set(lines)
        for line in lines.values():
            assert line["checked"] is True
            assert line["rounds"] == len(line["rounds_us"]) == 20
            assert 0 < line["min_us"] <= line["median_us"] <= line["p95_us"]


def test_a_line_proves_what_ran_and_names_its_bandwidths(ran: tuple[Path, Lines]) -> None:
    line = next(x for x in ran[1]["ep_dispatcher/reference"] if x["phase"] == "dispatch")
    assert "ep_dispatcher.reference.ReferenceBackend" in line["identity"]["classes"]
    assert line["bit_equal"] is True
    assert set(line["bandwidth_GBps"]) >= {"wire", "D1", "D2", "D3", "D4_send", "D5_pairs"}
    assert line["ceiling_fraction"] > 0
    assert line["wire_bytes"] <= 24 * 16 * 4  # a token goes to the other rank once at most


def test_a_backend_that_cannot_run_here_is_a_row_with_the_reason(ran: tuple[Path, Lines]) -> None:
    (line,) = ran[1]["nccl_ep"]
    assert line["error"] == "nccl_ep runs on GPUs only; this run's device is cpu"
    assert "median_us" not in line


def test_pages_hold_every_time_and_fetch_nothing(ran: tuple[Path, Lines], tmp_path: Path) -> None:
    assert main(["bench", "report", str(ran[0]), "--out", str(tmp_path)]) == 0
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    for lines in ran[1].values():
        for line in lines:
            shown = line.get("error") or f"{line['median_us']:,.0f} / {line['p95_us']:,.0f}"
            assert shown.replace("'", "&#x27;") in page
            assert shown in text
    assert "src=" in page
    assert "http" not in page
    assert (tmp_path / "phases.png").read_bytes().startswith(b"\x89PNG")


class PageReader(HTMLParser):
    """What a browser would make of a page: unclosed or crossing tags, pictures, things to fetch."""

    EMPTY = ("img", "meta", "br", "hr")
    FETCHES = ("script", "link", "iframe", "object", "embed", "a")

    def __init__(self) -> None:
        """Nothing read yet."""
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.pictures: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what is opened, shown or fetched."""
        values = dict(attrs)
        if tag in self.FETCHES:
            self.faults.append(f"<{tag}>")
        if tag == "img":
            self.pictures.append(values["src"] or "")
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Only what was opened last may be closed."""
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}>")


def faults_of(page: str) -> list[str]:
    """What is wrong with a page's tags and pictures."""
    reader = PageReader()
    reader.feed(page)
    reader.close()
    faults = reader.faults + [f"<{tag}> is not closed" for tag in reader.open]
    for source in reader.pictures:
        kind, _, data = source.partition(",")
        picture = base64.b64decode(data) if kind == "data:image/png;base64" else b""
        if not picture.startswith(b"\x89PNG") or min(struct.unpack(">II", picture[16:24])) < 200:
            faults.append(f"picture {source[:40]}")
    return faults if reader.pictures else [*faults, "no picture"]


def test_the_page_is_whole_and_carries_its_pictures(
    ran: tuple[Path, Lines], tmp_path: Path
) -> None:
    assert main(["bench", "report", str(ran[0]), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert faults_of(page) == []
    assert faults_of(page.replace("</table>", "", 1))
    assert faults_of(page.replace("data:image/png;base64,", "phases.png?", 1))
    assert faults_of(page.replace("<h1>", '<h1><a href="x">x</a>', 1))


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("control/swapped_rows", "dispatch: rows differ from the reference"),
        ("control/dropped_token", "combine: token"),
        ("control/mixed", "ranks run different versions: control is 2 on rank 1 and 1 on rank 0"),
        ("control/crash", f"rank 1 died with exit code {CRASH_EXIT_CODE}"),
    ],
)
def test_a_bad_backend_gets_no_time(backend: str, reason: str, tmp_path: Path) -> None:
    code, lines = bench(tmp_path, backend)
    assert code == 4
    (line,) = lines[backend]
    assert reason in line["error"]
    assert line["checked"] is False
    assert "median_us" not in line


def test_a_hang_costs_its_own_row_and_the_run_goes_on(tmp_path: Path) -> None:
    limit = ("time_limit_s=15", "max_failures=1")
    code, lines = bench(tmp_path, "control/hang", "torch/all_to_all", more=limit)
    assert code == 0
    (line,) = lines["control/hang"]
    assert "took longer than its time limit of 15 s and was ended; rank 0 was in" in line["error"]
    assert "(torch_all_to_all.py:" in line["error"]  # waits for the rank that never calls
    assert all(line["checked"] for line in lines["torch/all_to_all"])


@pytest.mark.parametrize("waited_s", [0, 3], ids=["starting", "started"])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_where_the_bench_is_ended(
    how: signal.Signals, waited_s: float, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "ep_dispatcher", "bench", "run", "--backends", "control/hang"]
    started = subprocess.Popen([*words, "--out", str(tmp_path), "--no-report", "--set", *TINY])
    deadline = time.monotonic() + 60
    while len(workers := children_of(started.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(workers) == 2
    time.sleep(waited_s)  # they import torch first
    started.send_signal(how)
    started.wait(20)
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, workers))


def children_of(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--budget", "-5"], "budget is -5.0; it must be above 0 seconds"),
        (["--set", "interference=torch/all_to_all"], "it must be a list of backends"),
        (["--set", "interference=[typo]"], "unknown backend 'typo'"),
        (["--set", "interference=5"], "interference is 5; it must be a list of backends"),
        (["--budget", "nan"], "budget is nan; it must be above 0 seconds"),
        (["--set", "num_tokens=["], "'[' is no value of YAML"),
        (["--set", "routing=replay", "trace=none.npz"], "none.npz"),
    ],
)
def test_a_wrong_run_is_refused_before_anything_starts(
    words: list[str], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["bench", "run", "--backends", "torch/all_to_all", "--out", str(tmp_path)]
    assert main([*start, *words]) == 2
    assert answer in capsys.readouterr().err
    assert not (tmp_path / "results.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ("num_tokens=9", "trace.npz: the trace has 8 tokens of rank 1; num_tokens is 9: lower it"),
        ("num_experts=8", "the work has 8 and 2; set the work to the trace's"),
    ],
)
def test_a_trace_of_another_shape_is_refused_before_anything_starts(
    change: str, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = RouterTrace(num_experts=4, num_topk=2, ep_size=2)
    for rank, tokens in enumerate((9, 8)):
        trace.add(torch.zeros(tokens, 2), 0, rank)
    write_trace(tmp_path / "trace.npz", trace)
    words = ["bench", "run", "--backends", "torch/all_to_all", "--out", str(tmp_path), "--set"]
    words += [*TINY, "routing=replay", f"trace={tmp_path / 'trace.npz'}", "num_tokens=8", change]
    assert main(words) == 2
    assert answer in capsys.readouterr().err
    assert not (tmp_path / "results.jsonl").exists()


@pytest.mark.parametrize(
    ("out", "answer"),
    [
        ("cut", "line 2 is not a JSON object; remove the line if a run was cut off"),
        ("cut/results.jsonl", "results.jsonl, which is a file; give a folder"),
    ],
)
def test_a_folder_that_cannot_take_lines_is_refused_before_anything_starts(
    out: str, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind a line that was cut off, what hours of measuring leave could not be read again."""
    (tmp_path / "cut").mkdir()
    left = tmp_path / "cut/results.jsonl"
    left.write_text('{"run": "a"}\n{"run": "b", "ph')
    words = ["bench", "run", "--backends", "torch/all_to_all", "--out", str(tmp_path / out)]
    assert main([*words, "--set", *TINY]) == 2
    assert answer in capsys.readouterr().err
    assert left.read_text().endswith('"ph')


def test_an_impossible_shape_is_a_row_that_names_it(tmp_path: Path) -> None:
    code, lines = bench(tmp_path, "torch/all_to_all", more=("num_experts=5",))
    assert code == 4
    (line,) = lines["torch/all_to_all"]
    assert "num_experts to be a multiple of ranks; they are 5 and 2" in line["error"]


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("megatron/alltoall", "MoEAlltoAllTokenDispatcher"),
        pytest.param("megatron/allgather", "MoEAllGatherTokenDispatcher", marks=pytest.mark.slow),
    ],
)
def test_megatrons_dispatcher_passes_the_check(name: str, cls: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    _, lines = bench(tmp_path, name)
    assert {line.get("error") for line in lines[name]} == {None}
    classes = lines[name][0]["identity"]["classes"]
    assert classes == [f"megatron.core.transformer.moe.token_dispatcher.{cls}"]


def test_it_runs_under_torchrun_and_goes_on_behind_a_crash(tmp_path: Path) -> None:
    """Rank 0 writes only what gloo says of a lost peer; the row says what rank 1 died of."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    words += [
        "-m",
        "ep_dispatcher",
        "bench",
        "run",
        "--backends",
        "control/crash",
        "torch/all_to_all",
        "--no-report",
    ]
    words += ["--out", str(tmp_path), "--set", *TINY]
    done = subprocess.run(
        words, env=dict(os.environ), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = read(tmp_path)
    (crashed,) = lines["control/crash"]
    assert crashed["error"] == f"rank 1 died with exit code {CRASH_EXIT_CODE}"
    assert all(line["checked"] for line in lines["torch/all_to_all"])


def test_an_error_with_brackets_is_shown_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gloo's errors have them, which name a source file."""

    def failed(bench: Bench) -> list[Outcome]:
        outcome = Outcome(backend="b", work=Work(), error="[/gloo/pair.cc:537] [red] closed")
        bench.tell(outcome)
        return [outcome]

    monkeypatch.setattr(Bench, "run", failed)
    words = ["bench", "run", "--backends", "torch/all_to_all", "--no-report"]
    assert main([*words, "--out", str(tmp_path)]) == NO_TIMES
    assert capsys.readouterr().out.count("[/gloo/pair.cc:537] [red] closed") == 2


def test_an_unknown_backend_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "run", "--backends", "nccl-ep", "--out", str(tmp_path)]) == 2
    assert "unknown backend 'nccl-ep'; did you mean 'nccl_ep'?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_strict_fails_where_a_single_row_has_no_time(tmp_path: Path) -> None:
    """Without it such a run succeeds, as `ran` has shown."""
    words = ["bench", "run", "--backends", "torch/all_to_all", "nccl_ep", "--no-report", "--strict"]
    assert main([*words, "--out", str(tmp_path), "--set", *TINY]) == 4
