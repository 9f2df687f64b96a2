"""The model of docs/scaling.md: its bytes are the accounting's, and its document is up to date."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ep_dispatcher import scaling
from ep_dispatcher.errors import ConfigError

ROOT = Path(__file__).parents[1]
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


def test_the_document_holds_the_models_table() -> None:
    """Of the rates that docs/scaling.md names below it."""
    text = (ROOT / "docs/scaling.md").read_text()
    named = re.findall(r"(\w+_gb_s)=([\d.]+)", text)
    assert len(named) == 5
    rates = scaling.Rates(**{name: float(value) for name, value in named})
    assert scaling.table(MACHINE, rates) in text


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
