"""The model of docs/scaling.md: its bytes are the accounting's, and its document is up to date."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from ep_dispatcher import scaling
from ep_dispatcher.accounting import expected_traffic, side_bytes
from ep_dispatcher.config import Topology
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.memory import persistent_bytes, rail_record_bytes
from ep_dispatcher.plan import Placement
from ep_dispatcher.rail_memory import rail_blocks
from ep_dispatcher.rail_posts import RAIL_WARPS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
RATES = scaling.Rates(50.0, 20.0, 40.0, 30.0, 30.0)
MACHINE = scaling.H200_CX7


def test_one_domain_uses_no_rail() -> None:
    for one in scaling.estimate(scaling.typical_config(1, 8), 1, MACHINE, RATES):
        assert one.rail_us == 0
        assert one.puts == 0


def test_two_domains_send_each_token_to_the_other_domain_once() -> None:
    """With 8 of 256 experts a token misses a half of them once in some 300 times."""
    for one in scaling.estimate(scaling.typical_config(2, 8), 2, MACHINE, RATES):
        assert 0.99 * 4096 < one.puts < 4096
        assert one.rail_us == pytest.approx(one.rail_mb / MACHINE.rail_gb_s * 1e3)


def test_a_slower_link_or_fewer_sms_take_longer() -> None:
    config = scaling.typical_config(8, 8)
    plain = scaling.estimate(config, 8, MACHINE, RATES)
    for change in ({"rail_gb_s": 23.5}, {"num_sms": 1}, {"nvlink_gb_s": 30.0}):
        for before, after in zip(
            plain, scaling.estimate(config, 8, replace(MACHINE, **change), RATES), strict=True
        ):
            assert after.total_us > before.total_us


def test_rates_are_the_best_recorded_ones(tmp_path: Path) -> None:
    """Of the width that is asked for; 8 bytes a row here stand for 4 elements."""
    rows = [
        {"phase": phase, "hidden": hidden, "num_sms": sms, "median_us": us}
        for phase in ("dispatch", "combine")
        for hidden, sms, us in ((4, 1, 1.0), (4, 2, 0.25), (8, 1, 0.001))
    ]
    _write(tmp_path / "one_domain.jsonl", rows)
    assert scaling.read_rates(tmp_path, hidden=4) == scaling.Rates(*[16.0] * 5)
    roles = [
        {"phase": phase, "hidden": hidden, "GBps_per_block": rate}
        for phase in ("dispatch/send", "combine_return/return", "combine_return/receive")
        for hidden, rate in ((4, 3.0), (4, 5.0), (8, 70.0))
    ]
    _write(tmp_path / "rails.jsonl", roles)
    assert scaling.read_rates(tmp_path, hidden=4) == scaling.Rates(16.0, 16.0, 16.0, 5.0, 5.0)
    shares = {"waiting_share": 0.25, "making_share": 0.25, "putting_share": 0.5}
    _write(tmp_path / "rails.jsonl", [{**role, **shares} for role in roles])
    busy = scaling.read_rates(tmp_path, hidden=4)
    assert (busy.send_gb_s, busy.return_gb_s) == (5.0 / 0.25, 5.0 / 0.75)
    with pytest.raises(ConfigError, match="hidden 16"):
        scaling.read_rates(tmp_path, hidden=16)


def _write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    lines = [json.dumps({"num_tokens": 1000, "num_topk": 1, **row}) for row in rows]
    path.write_text("\n".join(lines))


def test_combine_sums_in_the_domain_before_it_returns() -> None:
    """Its two kernels follow each other; dispatch's roles share one."""
    dispatch, combine = scaling.estimate(scaling.typical_config(4, 8), 4, MACHINE, RATES)
    fixed = scaling.FIXED_US
    assert dispatch.total_us == fixed + max(
        dispatch.rail_us, dispatch.nvlink_us, dispatch.sm_us, dispatch.rail_sm_us
    )
    inside, across = max(combine.nvlink_us, combine.sm_us), max(combine.rail_us, combine.rail_sm_us)
    assert combine.total_us == fixed + inside + across


def test_a_put_has_the_bytes_that_the_accounting_counts() -> None:
    """A row and weights, not the padded slot where they land; back, a row alone."""
    config, topology = scaling.typical_config(8, 8), Topology(ep_size=64, domain_size=8)
    placement = Placement.even(config.shape.num_experts, 64)
    traffic = expected_traffic(placement, 4096, 8, topology)
    rows = traffic.bytes_per_rank("across", "send", config.shape.row_bytes)[0]
    beside = side_bytes(traffic, traffic, 8, "across", "send")[0]
    dispatch, combine = scaling.estimate(config, 8, MACHINE, RATES)
    assert dispatch.rail_mb * 1e6 == pytest.approx(float(rows + beside))
    assert combine.rail_mb * 1e6 == pytest.approx(float(rows))
    assert scaling.record_bytes(config) == 14368


def test_rates_of_the_rails_count_rows_as_the_bench_does() -> None:
    """Both ways alike: the weights of a record are in none of the rates."""
    same = replace(RATES, return_gb_s=RATES.send_gb_s)
    dispatch, combine = scaling.estimate(scaling.typical_config(8, 8), 8, MACHINE, same)
    assert dispatch.rail_sm_us == combine.rail_sm_us
    assert dispatch.rail_us > combine.rail_us


@pytest.fixture(scope="module")
def recorded() -> scaling.Rates:
    """The rates of docs/results."""
    return scaling.read_rates(RESULTS)


def test_the_document_and_the_picture_hold_the_recorded_rates_and_both_tables(
    recorded: scaling.Rates,
) -> None:
    tables = (scaling.table(MACHINE, recorded), scaling.beside(MACHINE, recorded))
    for path in (ROOT / "docs/scaling.md", ROOT / "docs/scaling.svg"):
        text = path.read_text()
        for part in (str(recorded), *tables):
            assert part in text, f"{path.name} is stale: python -m ep_dispatcher.scaling"


def test_the_sentences_of_the_document_follow_the_model(recorded: scaling.Rates) -> None:
    text = " ".join((ROOT / "docs/scaling.md").read_text().split())
    for fact in (*_facts_of_the_model(recorded), *_facts_of_the_memory(), *_facts_of_the_results()):
        assert fact in text


def _estimates(count: int, rates: scaling.Rates) -> list[scaling.Estimate]:
    return scaling.estimate(scaling.typical_config(count, 8), count, MACHINE, rates)


def _facts_of_the_model(rates: scaling.Rates) -> Iterator[str]:
    config = scaling.typical_config(8, 8)
    record, row = scaling.record_bytes(config), config.shape.row_bytes
    dispatch, combine = _estimates(8, rates)
    rail_us = dispatch.rail_us
    yield f"{record} bytes (dispatch); one partial row, {row} bytes (combine)"
    yield f"weights ({row} bytes a put), and dispatch's adjoint"
    yield f"gradients with the sums ({record}): {100 * (record / row - 1):.1f} % less and more"
    yield (
        f"a rank posts {dispatch.puts:.0f} puts of {record} bytes in {rail_us / 1e3:.1f} ms,"
        f" one every {rail_us / dispatch.puts:.1f} us"
    )
    warps = RAIL_WARPS * rail_blocks(config, Topology(ep_size=64, domain_size=8))
    under_way = warps * 4 * record  # EP_RAIL_STAGES of each
    yield (
        f"{warps} putting warps then have {under_way / 1e6:.2f} MB under way, what"
        f" {MACHINE.rail_gb_s:.0f} GB/s carry in {under_way / MACHINE.rail_gb_s / 1e3:.0f} us"
    )
    yield f"(at 8 domains {dispatch.rail_sm_us / 1e3:.1f} ms of {rail_us / 1e3:.1f})"
    yield f"rail's floor for BF16 rows ({combine.rail_us / 1e3:.1f} ms)"
    at_once = {count: _ms_at_once(_estimates(count, rates)[1]) for count in (2, 8)}
    now = {count: _estimates(count, rates)[1].total_us / 1e3 for count in (2, 8)}
    yield (
        f"8 domains would take {at_once[8]:.1f} ms in place of {now[8]:.1f},"
        f" and 2 domains {at_once[2]:.1f} in place of {now[2]:.1f}"
    )
    crossings = [_estimates(count, rates)[0].puts / 4096 for count in (2, 8, 64)]
    yield "{:.1f} crossing at two domains, {:.1f} at eight, {:.1f} at sixty-four".format(*crossings)


def _ms_at_once(one: scaling.Estimate) -> float:
    """Were the two launches of combine one."""
    longest = max(one.rail_us, one.nvlink_us, one.sm_us, one.rail_sm_us)
    return (scaling.FIXED_US + longest) / 1e3


def _facts_of_the_memory() -> Iterator[str]:
    config, topology = scaling.typical_config(8, 8), Topology(ep_size=64, domain_size=8)
    exact = persistent_bytes(replace(config, precision="exact"), topology)["total"]
    yield f"padded to {rail_record_bytes(config)} bytes"
    yield f"8 domains of 8 take {exact / 1e9:.3f} GB, twice that bound"
    assert persistent_bytes(config, topology)["total"] < 0.9e9 < 1.8e9 < exact


def _facts_of_the_results() -> Iterator[str]:
    """Which run the rates come from, and what 16 SMs a rank did."""
    rows = list(map(json.loads, (RESULTS / "one_domain.jsonl").read_text().splitlines()))
    at_16 = {
        row["phase"]: row["num_tokens"] * row["num_topk"] * 14336 / 16 / row["median_us"] / 1e3
        for row in rows
        if row.get("hidden") == 7168 and row.get("num_sms") == 16
    }
    yield f"(at 16 SMs {at_16['dispatch']:.1f} and {at_16['combine']:.1f} GB/s were measured)"
    rails = list(map(json.loads, (RESULTS / "rails.jsonl").read_text().splitlines()))
    for row in rails:
        if row.get("hidden") == 7168 and "GBps_per_block" in row:
            when = datetime.fromisoformat(row["when"])
            yield f"{when.day} {when:%B}, {when:%H:%M}, commit `{row['commit'][:7]}`"


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    scaling.plot(MACHINE, RATES, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size > 10_000


@pytest.mark.parametrize("option", ["--results", "--out"])
def test_a_folder_that_cannot_serve_is_named(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        scaling.main([option, str(tmp_path / "absent")])
    assert str(tmp_path / "absent") in capsys.readouterr().err
