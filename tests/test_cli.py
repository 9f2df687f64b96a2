"""The command line: what it prints, its exit codes, and that errors are one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ep_dispatcher import cli, device_limits, doctor_nccl
from ep_dispatcher._version import __version__
from ep_dispatcher.config import EpConfig, MoeShape
from ep_dispatcher.device import unavailable_reason
from ep_dispatcher.device_session import check_table_fits
from ep_dispatcher.errors import ConfigError, UnavailableError
from ep_dispatcher.plan import Placement

CONFIG = """
ep_dispatcher:
  shape: {hidden: 7168, num_topk: 8, num_experts: 256}
  max_tokens_per_rank: 4096
"""

TRAINING = """
model: {hidden: 128, num_topk: 4, num_experts: 32, dtype: bfloat16, seq_length: 32}
parallel: {num_nodes: 2, ranks_per_node: 4, expert: 8}
train: {micro_batch: 3}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A config file of the usual layer."""
    path = tmp_path / "layer.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return str(path)


def fails(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command that must fail; returns the exit code and its one line."""
    code = cli.main(words)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("ep-dispatcher: error: ")
    return code, lines[0]


def report(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run a command with --json and parse what it prints."""
    assert cli.main([*words, "--json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def test_module_and_version() -> None:
    """`python -m ep_dispatcher --version` works in a process of its own."""
    command = [sys.executable, "-m", "ep_dispatcher", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"ep-dispatcher {__version__}"


def test_no_command_prints_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command is named, with a line to copy."""
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    for name in ("train", "plan", "doctor", "bench"):
        assert f"ep-dispatcher {name}" in text


def test_plan_reports_the_known_sums(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """16 ranks in 2 domains: rails 58.5 MB by formula, and the counted mean beside it."""
    words = ["plan", "--config", config, "--ranks", "16", "--domains", "2", "--tokens", "1024"]
    values = report(words, capsys)
    ours = next(
        entry
        for entry in values["links"]
        if (entry["phase"], entry["link"], entry["scheme"])
        == ("dispatch", "across", "deduplicated")
    )
    assert ours["expected_bytes"] * 4 == pytest.approx(58.5e6, rel=0.002)
    assert ours["send_bytes"]["mean"] == pytest.approx(ours["expected_bytes"], rel=0.02)
    assert values["rows"]["received"]["mean"] == 1024 * 8
    assert values["memory"]["device"]["total"] > values["memory"]["reference"]["total"] == 0


def test_plan_prints_tables(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Schemes, both links and every memory term are there; across only where there are domains."""
    words = ["plan", "--config", config, "--ranks", "4", "--tokens", "64"]
    assert cli.main(words) == 0
    one_domain = capsys.readouterr().out
    assert cli.main([*words, "--domains", "2"]) == 0
    two_domains = capsys.readouterr().out
    for word in ("deduplicated", "by_rank", "by_copy", "dispatch inside", "partial_ring"):
        assert word in one_domain
    assert "combine across" in two_domains
    assert "rail_landing" in two_domains
    assert "combine across" not in one_domain
    assert "rail_landing" not in one_domain


def test_plan_has_no_memory_for_a_world_that_the_device_tier_refuses(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """33 domains: said with the reason; an error where the config asks for that tier."""
    words = ["--ranks", "33", "--tokens", "8"]
    values = report(["plan", "--config", config, *words, "--domains", "33"], capsys)
    assert "33 NVLink domains" in values["device_tier_refuses"]
    assert list(values["memory"]) == ["reference"]
    assert cli.main(["plan", "--config", config, *words, "--domains", "33"]) == 0
    assert "The device tier refuses this: the ranks are 33" in capsys.readouterr().out
    taken = report(["plan", "--config", config, *words, "--domains", "11"], capsys)
    assert taken["device_tier_refuses"] is None
    path = tmp_path / "device.yaml"
    path.write_text(CONFIG + "  tier: device", encoding="utf-8")
    code, line = fails(["plan", "--config", str(path), *words, "--domains", "33"], capsys)
    assert code == 2
    assert "up to 32 domains" in line


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("hidden: 8, num_topk: 80, num_experts: 128", "num_topk is 80; .* at most 64"),
        ("hidden: 8, num_topk: 2, num_experts: 4096", "num_experts is 4096; .* at most 2048"),
        (
            "hidden: 1073741824, num_topk: 2, num_experts: 8",
            "hidden is 1073741824; .* at most 268435456 elements",
        ),
    ],
)
def test_plan_says_which_tier_takes_a_shape(
    section: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the device tier's kernels have no room for is refused as a group would refuse it."""
    path = tmp_path / "shape.yaml"
    text = f"ep_dispatcher:\n  shape: {{{section}}}\n  max_tokens_per_rank: 4\n"
    path.write_text(text, encoding="utf-8")
    words = ["plan", "--config", str(path), "--ranks", "4"]
    values = report(words, capsys)
    assert re.match(reason, values["device_tier_refuses"])
    assert list(values["memory"]) == ["reference"]
    assert cli.main(words) == 0
    told = capsys.readouterr().out
    assert re.search(f"The device tier refuses this: {reason}", told)
    assert "The reference tier takes this" in told
    path.write_text(text + "  tier: device\n", encoding="utf-8")
    code, line = fails(words, capsys)
    assert code == 2
    assert re.search(reason, line)


@pytest.mark.parametrize(
    ("domains", "tokens", "refused"),
    [(1, 32767, False), (1, 32768, True), (4, 8191, False), (4, 8192, True)],
)
def test_plan_says_how_many_tokens_the_device_tier_takes(
    domains: int, tokens: int, refused: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over several domains a rank is home of the tokens of its whole rail."""
    path = tmp_path / "shape.yaml"
    shape = "{hidden: 64, num_topk: 64, num_experts: 2048}"
    path.write_text(f"ep_dispatcher:\n  shape: {shape}\n  max_tokens_per_rank: {tokens}\n")
    words = ["plan", "--config", str(path), "--ranks", "4", "--domains", str(domains)]
    told = report([*words, "--tokens", "8"], capsys)["device_tier_refuses"]
    assert (told is not None) == refused
    if refused:
        assert f"max_tokens_per_rank is {tokens}; with num_topk 64" in told
        assert f"at most {tokens - 1} " in told


@pytest.mark.parametrize(
    ("domains", "crowd", "refused"), [(1, 227, False), (1, 228, True), (2, 228, False)]
)
def test_plan_refuses_a_table_of_experts_that_a_domain_has_no_room_for(
    domains: int, crowd: int, refused: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the sentence with which a group refuses it; smaller domains have room for more."""
    table = [0] * crowd + [*range(1, 72)]
    path = tmp_path / "crowded.yaml"
    text = (
        f"ep_dispatcher:\n  shape: {{hidden: 8, num_topk: 2, num_experts: {len(table)}}}\n"
        f"  max_tokens_per_rank: 4\n  expert_rank: {table}\n"
    )
    path.write_text(text, encoding="utf-8")
    words = ["plan", "--config", str(path), "--ranks", "72", "--domains", str(domains)]
    values = report(words, capsys)
    if not refused:
        assert values["device_tier_refuses"] is None
        return
    with pytest.raises(UnavailableError) as group:
        check_table_fits(Placement(tuple(table), 72), 72)
    assert values["device_tier_refuses"] == str(group.value)
    assert list(values["memory"]) == ["reference"]
    path.write_text(text + "  tier: device\n", encoding="utf-8")
    code, line = fails(words, capsys)
    assert code == 2
    assert f"rank 0 {crowd} experts; with 72 ranks" in line


def test_the_largest_table_is_that_of_the_kernels() -> None:
    header = Path(device_limits.__file__).resolve().parents[1] / "csrc/core/args.h"
    if not header.is_file():
        pytest.skip("csrc is not beside the package, so there is no header to compare with")
    told = re.findall(r"kMaxBaseEntries = (\d+)", header.read_text())
    assert told == [str(device_limits.MAX_BASE_ENTRIES)]


def test_the_largest_shapes_are_those_of_the_c_interface() -> None:
    header = Path(device_limits.__file__).resolve().parents[1] / "csrc/api/ep_dispatcher.h"
    if not header.is_file():
        pytest.skip("csrc is not beside the package, so there is no header to compare with")
    for name in ("TOPK", "EXPERTS"):
        told = re.findall(rf"EP_MAX_{name} = (\d+)", header.read_text())
        assert told == [str(getattr(device_limits, f"MAX_{name}"))]


def test_plan_of_one_rank_sends_nothing(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All copies are local."""
    values = report(["plan", "--config", config, "--ranks", "1", "--tokens", "32"], capsys)
    assert all(entry["send_bytes"]["max"] == 0 for entry in values["links"])


def test_plan_skewed_routing_loads_one_rank(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With zipf the fullest rank receives more than with uniform, and no formula is shown."""
    words = ["plan", "--config", config, "--ranks", "8", "--tokens", "256"]
    uniform = report(words, capsys)
    zipf = report([*words, "--routing", "zipf"], capsys)
    assert zipf["rows"]["received"]["max"] > 1.5 * uniform["rows"]["received"]["max"]
    assert "expected_bytes" in uniform["links"][0]
    assert "expected_bytes" not in zipf["links"][0]


def test_plan_combine_is_the_way_back(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What a rank sends in dispatch it receives in combine, on each link in each scheme."""
    words = ["plan", "--config", config, "--ranks", "8", "--domains", "2", "--tokens", "64"]
    links = report([*words, "--routing", "zipf"], capsys)["links"]
    found = {(entry["phase"], entry["link"], entry["scheme"]): entry for entry in links}
    assert len(found) == len(links) == 2 * 2 * 3
    for (phase, link, scheme), entry in found.items():
        if phase == "dispatch":
            back = found["combine", link, scheme]
            assert back["receive_bytes"] == entry["send_bytes"]
            assert back["send_bytes"] == entry["receive_bytes"]
    skewed = found["dispatch", "across", "by_copy"]  # where one direction cannot pass for the other
    assert skewed["send_bytes"] != skewed["receive_bytes"]


def test_plan_reads_a_training_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes, ranks and domains (one a node) follow from its sections; options override them."""
    path = tmp_path / "train.yaml"
    path.write_text(TRAINING, encoding="utf-8")
    values = report(["plan", "--config", str(path)], capsys)
    sizes = ("ranks", "domains", "num_tokens", "hidden", "num_topk", "num_experts", "dtype")
    assert [values[name] for name in sizes] == [8, 2, 3 * 32, 128, 4, 32, "bfloat16"]
    values = report(["plan", "--config", str(path), "--ranks", "32", "--tokens", "5"], capsys)
    assert [values[name] for name in sizes] == [32, 8, 5, 128, 4, 32, "bfloat16"]


def test_plan_sends_a_token_to_all_shards_of_an_expert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks that share every expert: each receives all T x K rows of both; K, E doubled."""
    path = tmp_path / "train.yaml"
    path.write_text(TRAINING.replace("expert: 8", "expert: 1, expert_tensor: 2"), encoding="utf-8")
    values = report(["plan", "--config", str(path)], capsys)
    assert (values["num_topk"], values["num_experts"], values["num_shards"]) == (8, 64, 2)
    assert values["rows"]["received"] == {"mean": 2 * 96 * 4, "max": 2 * 96 * 4}
    assert "expected_bytes" not in values["links"][0]
    code, line = fails(["plan", "--config", str(path), "--ranks", "3"], capsys)
    assert code == 2
    assert "ranks is 3; with 2 shards an expert it must be a multiple of 2" in line


def test_plan_exact_partials_are_in_fp32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Precision "exact" doubles the bytes of bfloat16 partial sums, and of nothing else."""
    path = tmp_path / "exact.yaml"
    path.write_text(CONFIG + "  precision: exact", encoding="utf-8")
    words = ["plan", "--config", str(path), "--ranks", "4", "--domains", "2", "--tokens", "64"]
    links = report(words, capsys)["links"]
    found = {(e["phase"], e["link"], e["scheme"]): e["send_bytes"]["mean"] for e in links}
    for link in ("inside", "across"):
        for scheme, factor in (("deduplicated", 2), ("by_rank", 2), ("by_copy", 1)):
            assert found["combine", link, scheme] == factor * found["dispatch", link, scheme] > 0


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--domains", "3", "--ranks", "8"], ["domains is 3", "8 ranks"]),
        (["--ranks", "512"], ["num_experts is 256", "at least 512"]),
        (["--tokens", "5000"], ["num_tokens is 5000", "4096", "max_tokens_per_rank"]),
        (["--ranks", "0"], ["ep_size is 0", "an int >= 1"]),
    ],
)
def test_plan_refuses_in_one_line(
    options: list[str], parts: list[str], config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong value is named with its range, and the exit code is 2."""
    code, line = fails(["plan", "--config", config, *options], capsys)
    assert code == 2
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("a: [1", "is not a YAML file"),
        ("- 1\n- 2", "holds list where sections are needed"),
        ("suite: ablation", "neither a section 'model'"),
        (CONFIG + "  colour: red", "unknown key 'colour' in section 'ep_dispatcher'"),
        (CONFIG.replace("hidden", "width"), "unknown key 'width' in section 'shape'"),
    ],
)
def test_plan_names_a_bad_config_file(
    text: str | None, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing, broken or wrong files are user mistakes, not tracebacks."""
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    code, line = fails(["plan", "--config", str(path)], capsys)
    assert code == 2
    assert part in line


def test_doctor_names_tier_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 on any machine; the tier agrees with what a group would choose."""
    values = report(["doctor"], capsys)
    names = {finding["name"] for finding in values["findings"]}
    assert {"python", "torch", "gpu", "nvcc", "native module", "megatron-core"} <= names
    shape = MoeShape(hidden=1024, num_topk=8, num_experts=256)
    reason = unavailable_reason(EpConfig(shape=shape, max_tokens_per_rank=4096))
    assert values["tier"] == ("device" if reason is None else "reference")
    assert reason is None or (values["reason"] == reason and values["next_step"])


def test_doctor_prints_a_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The table ends with the tier."""
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "tier: " in text
    assert "megatron-core" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--ranks", "4"], "--ranks is 4"), (["--domain-size", "2"], "--domain-size is 2")],
)
def test_doctor_refuses_options_of_a_start_in_a_rank(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Under torchrun or srun they would be passed over; what splits domains there is named."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(doctor_nccl, "probe", lambda: None)
    code, line = fails(["doctor", "--nccl", *words], capsys)
    assert code == cli.USER_ERROR
    assert told in line
    assert "NCCL_LSA_TEAM_SIZE" in line


@pytest.mark.parametrize("lacks", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_doctor_names_what_a_rank_lacks(
    lacks: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """RANK alone, left over in a shell, starts nothing."""
    names = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(lacks)
    code, line = fails(["doctor", "--nccl"], capsys)
    assert code == cli.USER_ERROR
    assert f"RANK is set and {lacks} is not" in line


def test_doctor_says_what_a_bad_row_may_follow_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where there is one."""
    good = doctor_nccl.Trip(0, 1, 50.0, 40.0, finished=21, rounds=21, wrong_words=0)
    bad = doctor_nccl.Trip(0, 2, None, None, finished=0, rounds=21, wrong_words=0)
    monkeypatch.setenv("RANK", "0")
    for trips, told in (((good,), False), ((bad, good), True)):
        report = doctor_nccl.NcclReport(
            ("node0",) * 3, ("H200 (0)",) * 3, 3, 1, "proxy", "2.30.7", "nccl", "2.30.7", {}, trips
        )
        monkeypatch.setattr(doctor_nccl, "probe", lambda report=report: report)
        assert cli.main(["doctor", "--nccl"]) == (cli.FAILED if told else cli.OK)
        printed = " ".join(capsys.readouterr().out.split())
        assert (doctor_nccl.AFTER_A_FAILURE in printed) == told


class _Launcher(types.ModuleType):
    """Stands in for the training launcher."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__("launcher")
        self.error = error
        self.seen = ""

    def add_arguments(self, parser: Any) -> None:  # noqa: ANN401
        parser.add_argument("--config")

    def run(self, args: Any) -> int:  # noqa: ANN401
        self.seen = args.config
        if self.error is not None:
            raise self.error
        return 0


def use_launcher(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> _Launcher:
    """Put a stand-in where the launcher is imported from."""
    launcher = _Launcher(error)
    monkeypatch.setitem(sys.modules, "ep_dispatcher.launch", launcher)
    return launcher


def test_train_hands_its_options_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of the launcher are parsed and reach it."""
    launcher = use_launcher(monkeypatch, None)
    assert cli.main(["train", "--config", "a.yaml"]) == 0
    assert launcher.seen == "a.yaml"


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (ConfigError("hidden is 3"), 2, "hidden is 3"),
        (RuntimeError("it\nbroke"), 1, "unexpected RuntimeError: it broke; run again with --debug"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_are_one_line(
    error: BaseException,
    code: int,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A user's mistake is 2, a bug is 1, both without a traceback."""
    use_launcher(monkeypatch, error)
    found, line = fails(["train"], capsys)
    assert found == code
    assert part in line


@pytest.mark.parametrize("words", [["--debug", "train"], ["train", "--debug"]])
def test_debug_adds_the_traceback(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--debug works before and after the command's name."""
    use_launcher(monkeypatch, ConfigError("hidden is 3"))
    assert cli.main(words) == 2
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert text.splitlines()[-1] == "ep-dispatcher: error: hidden is 3"


def test_train_without_megatron_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing package is named with the command that brings it."""

    def import_module(name: str) -> types.ModuleType:
        raise ModuleNotFoundError(f"No module named 'megatron' for {name}", name="megatron")

    monkeypatch.setattr(cli, "importlib", types.SimpleNamespace(import_module=import_module))
    code, line = fails(["train"], capsys)
    assert code == 2
    assert "needs megatron" in line
    assert "pip install 'ep_dispatcher[megatron]'" in line


def test_unknown_option_is_refused_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Argparse's own refusal: exit code 2 and the option's name."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--colour"])
    assert stopped.value.code == 2
    assert "--colour" in capsys.readouterr().err
