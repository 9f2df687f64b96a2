"""Recorded lines: comparing two runs, the tables and the plots of the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ep_dispatcher.bench import plots
from ep_dispatcher.bench.command import read_lines
from ep_dispatcher.bench.compare import bootstrap_ratio, compare
from ep_dispatcher.bench.page_data import best_table, host_table, newest, series
from ep_dispatcher.bench.plots import enclosing
from ep_dispatcher.bench.report import write_pages
from ep_dispatcher.bench.spec import Work
from ep_dispatcher.cli import main
from ep_dispatcher.errors import ConfigError

WORK = Work(ranks=2, num_tokens=6, hidden=8, num_topk=2, num_experts=4, dtype="float32")


def timed_line(times: list[float], **fields: object) -> dict[str, Any]:
    """A recorded line with only what comparing and plotting read."""
    ordered = sorted(times)
    line = {"backend": "b", "phase": "dispatch", **vars(WORK), "rounds_us": times}
    return line | {"median_us": ordered[len(ordered) // 2]} | fields


NOISY = [100.0 + (7 * n) % 11 for n in range(20)]


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, "same"), (1.02, "same"), (1.3, "slower"), (0.7, "faster")]
)
def test_compare_calls_only_what_noise_cannot_explain(factor: float, verdict: str) -> None:
    (change,) = compare([timed_line(NOISY)], [timed_line([t * factor for t in NOISY])])
    assert change.verdict == verdict
    assert change.is_regression is (verdict == "slower")
    assert change.low is not None
    assert change.high is not None
    assert change.low <= factor <= change.high


def test_a_time_that_was_lost_is_a_regression() -> None:
    kept, lost = timed_line(NOISY), timed_line(NOISY, phase="combine")
    changes = {change.verdict for change in compare([kept, lost], [kept])}
    assert changes == {"same", "lost"}


@pytest.mark.parametrize(
    ("us", "code", "words"),
    [
        (10.0, 0, "1 compared, 0 worse"),
        (20.0, 3, "slower       10.0 ->       20.0 us  x2.000 [2.000, 2.000]  b dispatch"),
    ],
)
def test_comparing_two_runs_ends_with_what_it_found(
    us: float, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, time, gpu in (("a", 10.0, "H100"), ("b", us, "H200")):
        (tmp_path / name).mkdir()
        found = timed_line([time] * 20, machine={"gpu": gpu, "load_before": us})
        (tmp_path / name / "results.jsonl").write_text(json.dumps(found) + "\n")
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == code
    told = capsys.readouterr().out
    assert words in told
    assert "the runs differ in gpu: H100 -> H200" in told
    assert "load_before" not in told


def compare_files(folder: Path, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> int:
    """`bench compare` of two recorded runs."""
    for name, lines in (("a", before), ("b", after)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return main(["bench", "compare", str(folder / "a"), str(folder / "b")])


def error_line(**fields: object) -> dict[str, Any]:
    """A row without a time."""
    return {"backend": "b", **vars(WORK), "error": "it hung"} | fields


@pytest.mark.parametrize(
    ("before", "after", "code", "words"),
    [
        ([timed_line(NOISY)], [error_line()], 3, "1 compared, 1 worse"),
        ([timed_line(NOISY)], [error_line(num_tokens=7)], 2, "no backend, phase and work in comm"),
        ([timed_line(NOISY)], [], 2, "the second run has no lines"),
        ([], [timed_line(NOISY)], 2, "the first run has no lines"),
        ([error_line()], [timed_line(NOISY)], 2, "no line of the first run has a time"),
    ],
    ids=["only errors", "errors of another work", "empty B", "empty A", "only errors in A"],
)
def test_a_run_without_times_is_lost_or_named(
    before: list[dict[str, Any]],
    after: list[dict[str, Any]],
    code: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compare_files(tmp_path, before, after) == code
    told = capsys.readouterr()
    assert words in told.out + told.err


def test_a_comparison_says_how_many_phases_it_cannot_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounds that spread over a factor of two tell nothing about 5 %; equal ones do."""
    wide = timed_line([50.0 + 5 * n for n in range(20)])
    sharp = timed_line([10.0] * 20, phase="combine")
    assert compare_files(tmp_path, [wide, sharp], [wide, sharp]) == 0
    assert "1 with an interval too wide to tell whether they are slower by 5%" in (
        capsys.readouterr().out
    )
    assert compare_files(tmp_path, [sharp], [sharp]) == 0
    assert "too wide" not in capsys.readouterr().out


def test_a_layers_cell_is_not_compared_with_one_without_experts() -> None:
    plain, layer = timed_line([10.0] * 20), timed_line([30.0] * 20, ffn_hidden=64)
    changes = compare([plain, layer], [plain, layer])
    assert [change.verdict for change in changes] == ["same", "same"]


def test_the_interval_of_equal_rounds_is_a_point() -> None:
    assert bootstrap_ratio([10.0] * 20, [20.0] * 20, 0.95) == (2.0, 2.0)


def test_equal_and_best_sms_are_shown_side_by_side() -> None:
    lines = [
        timed_line([time], phase=phase, num_sms=sms)
        for phase in ("dispatch", "combine")
        for sms, time in ((8, 90.0), (16, 50.0), (32, 60.0))
    ]
    table = best_table(lines)
    assert table is not None
    assert table.rows[0][2:] == ("180 / 100 / 120", "16", "100")
    wider = [line | {"hidden": 32} for line in lines if line["num_sms"] != 16]
    table = best_table([*lines, *wider])
    assert table is not None
    assert table.rows[1][2:] == ("180 / - / 120", "32", "120")  # under the head of all budgets


def test_the_host_time_of_each_call_is_shown_where_it_was_measured() -> None:
    lines = [timed_line([9.0], phase="plan", num_sms=8, host_us=1234.5)]
    lines += [timed_line([9.0], phase="combine", num_sms=8, host_us=90.2)]
    lines += [timed_line([9.0], phase="pair", num_sms=8, host_us=7.0)]
    lines += [timed_line([9.0], phase="dispatch", num_sms=8)]
    table = host_table(lines)
    assert table.head[2:] == ("plan", "combine")
    assert [row[2:] for row in table.rows] == [("1,234", "90")]


def test_series_hold_everything_but_the_axis_fixed() -> None:
    lines = [timed_line([float(t)], num_tokens=t) for t in (8, 16, 32)]
    lines += [timed_line([5.0], num_tokens=64, hidden=32)]

    def value(here: object, variant: object) -> float:
        return float(len(here))  # type: ignore[arg-type]

    assert series(lines, "num_tokens", value)[1] == {"b": [(8, 1), (16, 1), (32, 1)]}


def plot_lines(backend: str, runs: dict[int, str]) -> list[dict[str, Any]]:
    """Dispatch and combine at each number of tokens, of the run named for it."""
    return [
        timed_line([float(tokens)], backend=backend, phase=phase, num_tokens=tokens, run=run)
        for tokens, run in runs.items()
        for phase in ("dispatch", "combine")
    ]


@pytest.mark.parametrize(
    ("lines", "ending"),
    [
        (plot_lines("a", {8: "r1", 16: "r1"}), "lower is better."),
        (plot_lines("a", {8: "r1", 16: "r1", 32: "r2"}), "Of several runs: r1, r2."),
        (
            plot_lines("a", {8: "r1", 16: "r2"}) + plot_lines("b", {8: "r3", 16: "r3"}),
            "Of several runs: r1, r2, r3.",
        ),
        (plot_lines("a", {8: "r1", 16: "r2"}), None),
    ],
    ids=["one run", "two runs", "two backends", "a point of each run"],
)
def test_a_plot_says_what_it_draws_and_of_which_runs(
    lines: list[dict[str, Any]], ending: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One backend with one point of each run is left out: its line would compare runs."""
    monkeypatch.setattr(plots, "_png", lambda figure: figure.get_suptitle().encode())
    found = {plot.name: plot for plot in plots.make_plots(lines)}
    plot = found.get("time_against_tokens")
    assert (plot is None) is (ending is None)
    if plot is not None and ending is not None:
        assert plot.caption.endswith(ending)
        assert plot.png == b"Forward round trip against tokens a rank"
    assert found["phases"].png == b"Forward round trip by phase"


def test_a_single_bar_is_no_plot() -> None:
    layer = [timed_line([9.0], phase=f"layer_{way}") for way in ("forward", "backward")]
    assert "layer" not in {plot.name for plot in plots.make_plots(layer)}
    both = [*layer, *(line | {"backend": "c", "run": "r2"} for line in layer)]
    (plot,) = (plot for plot in plots.make_plots(both) if plot.name == "layer")
    assert plot.caption.endswith("r2.")


def test_an_axis_ends_at_ticks() -> None:
    assert enclosing([633.0, 1833.0]) == (500, 2000)
    assert enclosing([1000.0]) == (1000, 2000)
    assert enclosing([0.3, 40.0]) == (0.2, 50)


@pytest.mark.parametrize("second", [b"nonsense", b'{"run": 1, "ba', b"5", b"null", b"[]", b"\xff"])
def test_lines_that_are_no_json_objects_are_named(second: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"run": 1}\n' + second)
    with pytest.raises(ConfigError, match="line 2 is not a JSON object; remove the line if"):
        read_lines([file])


def test_a_report_needs_lines_of_the_bench(tmp_path: Path) -> None:
    """Those of a training run or of `bench plan` name no such work."""
    with pytest.raises(ConfigError, match="none of the 1 lines is of `bench run`"):
        write_pages([timed_line([9.0])], tmp_path / "pages")
    (tmp_path / "file").touch()
    whole = dict.fromkeys(("run", "when", "commit", "command", "machine", "versions"), "x")
    with pytest.raises(ConfigError, match="is a file; give a folder for the pages"):
        write_pages([timed_line([9.0], **whole)], tmp_path / "file")


def test_a_cell_that_ran_twice_is_shown_from_its_last_run_alone() -> None:
    cell = {"backend": "nccl_ep", "num_sms": 16, "ranks": 4, "num_tokens": 8, "routing": "uniform"}
    old = [cell | {"run": "a", "phase": phase} for phase in ("dispatch", "combine")]
    other = [cell | {"run": "a", "phase": "dispatch", "routing": "zipf"}]
    new = [cell | {"run": "b", "phase": "dispatch"}]
    assert newest([*old, *other, *new]) == [*other, *new]
    fewer = new[0] | {"num_sms": 8}
    assert newest([*old, fewer]) == [fewer, *old]
    assert newest([*old, other[0] | {"backend": "a"}, fewer])[-1]["backend"] == "a"
