"""`ep-dispatcher doctor --nccl`: what it starts, what it tells; on a GPU, over the plugin.

With a GPU and g++, several ranks share the GPU; run it under MPS, or each hand-over takes
milliseconds. LOOPBACK_RMA_PLUGIN may name a plugin that was built already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from ep_dispatcher import cli, doctor_nccl, native
from ep_dispatcher.communicator import topology_from
from ep_dispatcher.doctor_nccl import NcclReport, Trip
from ep_dispatcher.errors import ConfigError, UnavailableError

ROOT = Path(__file__).parents[1]
GOOD = Trip(0, 2, 50.0, 40.0, finished=21, rounds=21, wrong_words=0)
SILENT = Trip(1, 3, None, None, finished=0, rounds=21, wrong_words=0)
WRONG = Trip(1, 3, 50.0, 40.0, finished=21, rounds=21, wrong_words=7)
NUM_ROUNDS, PUT_BYTES = doctor_nccl.ROUNDS, 4096


def report(*trips: Trip) -> NcclReport:
    """Four ranks on one host, two on each GPU."""
    return NcclReport(
        hosts=("node0",) * 4,
        gpus=("H200 (0)", "H200 (0)", "H200 (1)", "H200 (1)"),
        num_domains=2,
        domain_size=2,
        gin="proxy",
        nccl_version="2.30.7",
        nccl_path="libnccl.so.2",
        headers_version="2.30.7",
        variables={"NCCL_LSA_TEAM_SIZE": "2"},
        trips=trips,
    )


@pytest.mark.parametrize(
    ("trip", "verdict"),
    [(GOOD, "ok"), (SILENT, "no answer to round trip 1 in 10 s"), (WRONG, "7 wrong words")],
)
def test_a_rail_is_judged_by_answers_and_bytes(trip: Trip, verdict: str) -> None:
    assert trip.verdict == verdict
    assert report(GOOD, trip).ok == (verdict == "ok")
    assert report(trip).to_dict()["ok"] == (verdict == "ok")


def test_facts_name_what_a_user_has_to_know() -> None:
    facts = dict(report(GOOD).facts())
    assert facts["ranks"].endswith("2 share a GPU with another")
    assert facts["NVLink domains"] == "2 of 2 rank(s)"
    assert "CPU thread" in facts["GIN between domains"]
    assert facts["environment"] == "NCCL_LSA_TEAM_SIZE=2"


def test_ranks_get_the_variables_that_sharing_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if they share; and what the user has set stays."""
    for name in ("NCCL_LSA_TEAM_SIZE", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    alone = doctor_nccl.rank_environment(1, 2, 2, None, 1234)
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in alone
    assert "NCCL_LSA_TEAM_SIZE" not in alone
    assert (alone["RANK"], alone["LOCAL_RANK"], alone["WORLD_SIZE"]) == ("1", "1", "2")
    assert alone["MASTER_PORT"] == "1234"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    shared = doctor_nccl.rank_environment(0, 4, 1, 2, 1234)
    assert shared["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert shared["NCCL_LSA_TEAM_SIZE"] == "2"
    assert shared["NCCL_NVLS_ENABLE"] == "2"


@pytest.mark.parametrize("words", [["--ranks", "2"], ["--domain-size", "1"]])
def test_ranks_without_a_probe_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *words]) == cli.USER_ERROR
    assert "go with --nccl" in capsys.readouterr().err


@pytest.mark.parametrize("num_ranks", [0, -2])
def test_fewer_than_one_rank_is_refused(num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"--ranks is {num_ranks}; it must be at least 1"):
        doctor_nccl.start_ranks(num_ranks, None, ["doctor", "--nccl"])


def test_a_rank_that_was_killed_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is negative, and that of the others may be 0."""
    kill_one = "import os; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9)"
    start = subprocess.Popen
    monkeypatch.setattr(native, "missing_reason", lambda: None)
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, env: start([sys.executable, "-c", kill_one], env=env)
    )
    with pytest.raises(UnavailableError, match="rank 1 was ended by SIGKILL"):
        doctor_nccl.start_ranks(2, None, ["doctor", "--nccl"])


def start_code(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the ranks run this code in place of the command."""
    start = subprocess.Popen
    monkeypatch.setattr(native, "missing_reason", lambda: None)
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, env: start([sys.executable, "-c", code], env=env)
    )


def test_a_dead_rank_is_named_while_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, time; os.kill(os.getpid(), 11) if os.environ['RANK'] == '1' else 0; "
    start_code(monkeypatch, code + "time.sleep(20)")
    monkeypatch.setattr(doctor_nccl, "START_TIMEOUT_S", 10.0)
    with pytest.raises(UnavailableError, match="rank 1 was ended by SIGSEGV"):
        doctor_nccl.start_ranks(2, None, ["doctor", "--nccl"])


def test_ranks_that_are_not_done_are_named_with_one_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(20)"
    start_code(monkeypatch, code)
    monkeypatch.setattr(doctor_nccl, "START_TIMEOUT_S", 1.5)
    told = "still running 0, 2; rank 1 had ended with exit code 3"
    with pytest.raises(UnavailableError, match=told):
        doctor_nccl.start_ranks(3, None, ["doctor", "--nccl"])


PLACE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"RANK": "5"}, "RANK is '5'; it must be a whole number from 0 to 1 (WORLD_SIZE - 1); "),
        ({"RANK": "-1"}, "RANK is '-1'; it must be a whole number from 0 to 1"),
        ({"RANK": "x"}, "RANK is 'x'; it must be a whole number from 0 to 1"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'; it must be a whole number from 0 to 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'; it must be a whole number from 1 to"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc'; it must be a whole number from 1 to 65535"),
        ({"MASTER_PORT": "99999999"}, "MASTER_PORT is '99999999'; it must be a whole number from"),
        ({"GLOO_SOCKET_IFNAME": "nosuch0"}, "GLOO_SOCKET_IFNAME is 'nosuch0'; it must name"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    changes: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything waits for a rank that never comes."""
    for name, value in (PLACE | changes).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *_, **__: pytest.fail("it began to wait")
    )
    assert cli.main(["doctor", "--nccl"]) == cli.USER_ERROR
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"NTASKS": "abc"}, "SLURM_NTASKS is 'abc'; it must be a whole number from 1 to"),
        ({"PROCID": "7"}, "RANK is '7'; it must be a whole number from 0 to 1 (WORLD_SIZE - 1)"),
    ],
)
def test_a_place_of_srun_that_cannot_be_is_refused(
    changes: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # set first, so that it is put back at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    step = {"PROCID": "0", "NTASKS": "2", "LOCALID": "0", "STEP_ID": "0"}
    for name, value in (step | changes).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *_, **__: pytest.fail("it began to wait")
    )
    assert cli.main(["doctor", "--nccl"]) == cli.USER_ERROR
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_do_not_meet_are_told_what_to_check(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other one was never started; the limit is that of the doctor but for its length."""
    port = str(doctor_nccl._free_port())
    changes = {"RANK": rank, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in (PLACE | changes).items():
        monkeypatch.setenv(name, value)
    assert timedelta(seconds=60) <= doctor_nccl.MEET_TIMEOUT <= timedelta(seconds=120)
    monkeypatch.setattr(doctor_nccl, "MEET_TIMEOUT", timedelta(seconds=1))
    assert cli.main(["doctor", "--nccl"]) == cli.USER_ERROR
    line = capsys.readouterr().err
    assert "the ranks did not meet within 1 s" in line
    assert f"MASTER_ADDR is 127.0.0.1, MASTER_PORT is {port}, GLOO_SOCKET_IFNAME is lo" in line


@pytest.mark.parametrize("domain_size", [0, 3, 8])
def test_a_domain_size_that_does_not_divide_is_refused(
    monkeypatch: pytest.MonkeyPatch, domain_size: int
) -> None:
    """Also where nothing can be probed: the argument is wrong everywhere."""
    monkeypatch.setattr(native, "missing_reason", lambda: "no GPU is visible (none)")
    told = f"--domain-size is {domain_size}; it must be at least 1 and divide the 4 ranks"
    with pytest.raises(ConfigError, match=told):
        doctor_nccl.start_ranks(4, domain_size, ["doctor", "--nccl"])


def test_without_a_gpu_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(native, "missing_reason", lambda: "no GPU is visible (none)")
    assert cli.main(["doctor", "--nccl"]) == cli.USER_ERROR
    assert "NCCL was not probed: no GPU is visible" in capsys.readouterr().err


def test_rank_0_prints_a_row_for_each_rail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And fails the command if one is bad."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(doctor_nccl, "probe", lambda: report(GOOD, SILENT))
    assert cli.main(["doctor", "--nccl"]) == cli.FAILED
    told = capsys.readouterr().out
    assert "0 <-> 2" in told
    assert "no answer to round trip 1" in told
    monkeypatch.setattr(doctor_nccl, "probe", lambda: report(GOOD))
    assert cli.main(["doctor", "--nccl", "--json"]) == cli.OK
    assert json.loads(capsys.readouterr().out)["trips"][0]["peer"] == 2


def test_other_ranks_print_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(doctor_nccl, "probe", lambda: None)
    assert cli.main(["doctor", "--nccl"]) == cli.OK
    assert capsys.readouterr().out == ""


def test_srun_needs_an_address_to_meet_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("PROCID", "3"), ("NTASKS", "16"), ("LOCALID", "3"), ("STEP_ID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert cli.main(["doctor", "--nccl"]) == cli.USER_ERROR
    assert "MASTER_ADDR is not set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_domains", "ep_size", "wanted", "domain_size"),
    [(1, 8, None, 8), (2, 8, None, 4), (2, 8, 4, 4), (8, 8, 1, 1), (2, 12, 6, 6)],
)
def test_domains_are_those_that_nccl_sees(
    num_domains: int, ep_size: int, wanted: int | None, domain_size: int
) -> None:
    assert topology_from(num_domains, ep_size, wanted).domain_size == domain_size


@pytest.mark.parametrize(
    ("num_domains", "ep_size", "wanted", "told"),
    [
        (1, 8, 4, "NCCL_LSA_TEAM_SIZE=4"),
        (2, 8, 8, "domains have 4 ranks"),
        (3, 8, None, "one size"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(
    num_domains: int, ep_size: int, wanted: int | None, told: str
) -> None:
    with pytest.raises(UnavailableError, match=told):
        topology_from(num_domains, ep_size, wanted)


# --- with a GPU: NCCL's own GIN over the plugin ---


def run_doctor(plugin: str | None, ranks: int, domain_size: int, **variables: str) -> Any:  # noqa: ANN401
    """Run the command; returns the finished process."""
    environment = {key: value for key, value in os.environ.items() if "LOOPBACK_RMA" not in key}
    environment |= {"NCCL_RMA_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}
    if plugin is not None:
        environment |= {"NCCL_RMA_PLUGIN": plugin, "NCCL_GIN_TYPE": "2"}
    words = ["doctor", "--nccl", "--json", "--ranks", str(ranks), "--domain-size"]
    return subprocess.run(
        [sys.executable, "-m", "ep_dispatcher", *words, str(domain_size)],
        env=environment | {f"LOOPBACK_RMA_{key}": value for key, value in variables.items()},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def json_of(finished: Any) -> dict[str, Any]:  # noqa: ANN401
    """The report; NCCL may have written lines around it."""
    text = finished.stdout
    assert "{\n" in text, finished.stderr
    values: dict[str, Any] = json.JSONDecoder().raw_decode(text, text.index("{\n"))[0]
    return values


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("ranks", "domain_size"), [(2, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize("chaos", [False, True], ids=["plain", "late and reordered"])
def test_every_rail_answers_with_the_right_bytes(
    plugin: str, tmp_path: Path, ranks: int, domain_size: int, chaos: bool
) -> None:
    """And the plugin has seen one put and one signal for each way of each round trip."""
    variables = {"STATS": str(tmp_path)}
    if chaos:
        variables |= {"DELAY_US": "300", "REORDER": "1", "SEED": "5"}
    finished = run_doctor(plugin, ranks, domain_size, **variables)
    assert finished.returncode == 0, finished.stderr
    values = json_of(finished)
    assert (values["num_domains"], values["gin"]) == (ranks // domain_size, "proxy")
    domains = ranks // domain_size
    assert len(values["trips"]) == domain_size * domains * (domains - 1) // 2
    counted = [json.loads(line) for path in tmp_path.iterdir() for line in path.open()]
    pairs = {(trip["rank"], trip["peer"]) for trip in values["trips"]}
    pairs |= {(peer, rank) for rank, peer in pairs}
    want = {(*pair, "put", PUT_BYTES, NUM_ROUNDS) for pair in pairs}
    want |= {(*pair, "signal", 0, NUM_ROUNDS) for pair in pairs}
    assert {
        (row["rank"], row["peer"], row["kind"], row["bytes"], row["count"]) for row in counted
    } == want


@pytest.mark.gpu(1)
@pytest.mark.fault
@pytest.mark.parametrize(
    "fault", ["drop:rank=1:after=6", "fail:rank=1:after=6", "stall:rank=1:after=6"]
)
def test_a_network_that_fails_is_told_and_hangs_nobody(plugin: str, fault: str) -> None:
    """Three round trips are answered; the fourth is not."""
    finished = run_doctor(plugin, 2, 1, FAULT=fault)
    assert finished.returncode == cli.FAILED
    (trip,) = json_of(finished)["trips"]
    assert trip["finished"] == 3
    assert trip["wrong_words"] == 0


@pytest.mark.gpu(1)
def test_domains_without_gin_are_refused_with_what_to_do() -> None:
    finished = run_doctor(None, 2, 1)
    assert finished.returncode == cli.USER_ERROR
    assert "span 2 NVLink domains" in finished.stderr
    assert "docs/loopback_rma.md" in finished.stderr


def test_a_rank_without_a_module_raises_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here as a world of one rank."""
    monkeypatch.setattr(native, "missing_reason", lambda: "no GPU is visible (none)")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(doctor_nccl._free_port()))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(UnavailableError, match="on rank 0: no GPU is visible"):
        doctor_nccl.probe()
