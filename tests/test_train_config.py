"""Training configs: all shipped files load, and every mistake is named before a rank starts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import yaml

from ep_dispatcher import launch
from ep_dispatcher.errors import ConfigError, EpError
from ep_dispatcher.slurm import adopt_slurm
from ep_dispatcher.train.config import (
    BOOKKEEPING,
    SPEED_ONLY,
    TrainConfig,
    config_from_dict,
    load_config,
)

CONFIGS = Path(__file__).parent.parent / "configs"
TRAINING = sorted(
    path for path in CONFIGS.glob("*.yaml") if "model" in yaml.safe_load(path.read_text())
)


def test_all_training_configs_are_there() -> None:
    """The list that the next test runs over is not empty by mistake."""
    names = {path.stem for path in TRAINING}
    assert names >= {
        "tiny_cpu",
        "one_gpu_4ranks",
        "h200_8gpu",
        "h200_4x8_slurm",
        "deepseek_v3_layer",
        "qwen3_moe_layer",
    }


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_shipped_config_loads_and_fits_the_dispatcher(path: Path) -> None:
    """Sections are valid together, and the dispatcher's own config follows from them."""
    config = load_config(path)
    shape = config.ep_config().shape
    assert (shape.hidden, shape.num_experts) == (config.model.hidden, config.model.num_experts)
    assert config.topology().ep_size == config.parallel.ep_size
    assert shape.num_experts % config.parallel.ep_size == 0
    assert config_from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("name", "hidden", "num_experts", "num_topk", "expert_ffn_hidden"),
    [("deepseek_v3_layer", 7168, 256, 8, 2048), ("qwen3_moe_layer", 4096, 128, 8, 1536)],
)
def test_layer_configs_have_the_published_shapes(
    name: str, hidden: int, num_experts: int, num_topk: int, expert_ffn_hidden: int
) -> None:
    """The shapes of the two layers."""
    model = load_config(CONFIGS / f"{name}.yaml").model
    assert (model.hidden, model.num_experts, model.num_topk, model.expert_ffn_hidden) == (
        hidden,
        num_experts,
        num_topk,
        expert_ffn_hidden,
    )


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"models": {}}, ["models", "known sections"]),
        ({"model": {"hiden": 64}}, ["hiden", "model", "known keys"]),
        ({"ep_dispatcher": {"tiers": "auto"}}, ["tiers", "ep_dispatcher"]),
        ({"model": {"hidden": "64"}}, ["model.hidden", "'64'", "whole number"]),
        ({"train": {"learning_rate": "1e-3"}}, ["train.learning_rate", "0.001"]),
        ({"train": {"steps": 0}}, ["train.steps", "at least 1"]),
        ({"train": {"learning_rate": float("nan")}}, ["train.learning_rate", "nan", "at least 0"]),
        ({"train": {"dispatcher": "deepep"}}, ["deepep", "ep_dispatcher, alltoall, allgather"]),
        ({"train": {"overlap": True}}, ["train.overlap", "bfloat16"]),
        ({"model": {"num_topk": 9}}, ["num_topk", "9", "8"]),
        ({"model": {"num_experts": 6}}, ["parallel.expert", "num_experts", "6"]),
        ({"parallel": {"ranks_per_node": 6}}, ["parallel.expert", "4", "6 ranks"]),
        ({"parallel": {"tensor": 3}}, ["parallel.tensor", "3", "4 ranks"]),
        ({"model": {"hidden": 66, "num_attention_heads": 2}}, ["hidden", "multiple"]),
        ({"model": []}, ["model", "keys and values"]),
    ],
)
def test_mistake_names_key_value_and_what_is_allowed(
    values: dict[str, object], parts: list[str]
) -> None:
    """One line that says what to change."""
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values)
    for part in parts:
        assert part in str(caught.value)


def test_overrides_are_read_as_yaml_and_checked(tmp_path: Path) -> None:
    """`--set` reaches sections that the file leaves out; a wrong one is refused."""
    path = tmp_path / "a.yaml"
    path.write_text("model: {hidden: 128}\n")
    config = load_config(path, ["train.steps=7", "model.gated=true", "data.path=null"])
    assert (config.train.steps, config.model.gated, config.model.hidden) == (7, True, 128)
    for wrong in ("train.stepz=7", "steps=7", "train.steps", "nothing.steps=7", "train.steps=[1"):
        with pytest.raises(ConfigError):
            load_config(path, [wrong])


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "", "\xff"])
def test_file_that_is_no_config_is_named(tmp_path: Path, text: str) -> None:
    """A list, broken YAML, nothing, and no UTF-8."""
    path = tmp_path / "broken.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(path)


def test_expert_shards_count_as_experts() -> None:
    """Expert tensor parallelism folds into the dispatcher's shape."""
    config = config_from_dict({"parallel": {"expert": 2, "expert_tensor": 2, "tensor": 2}})
    shape = config.ep_config().shape
    assert (shape.num_experts, shape.num_topk, config.topology().ep_size) == (16, 4, 4)


def test_identity_holds_what_decides_the_numbers() -> None:
    """Bookkeeping may change on a resume; what changes the numbers may not."""
    base = config_from_dict({"train": {"decay_steps": 100}})

    def with_values(**sections: dict[str, object]) -> TrainConfig:
        train = {"decay_steps": 100, **sections.pop("train", {})}
        return config_from_dict({"train": train, **sections})

    same = {"steps": 200, "out_dir": "elsewhere", "log_every": 3, "checkpoint_every": 9}
    assert with_values(train=same).identity() == base.identity()
    assert with_values(ep_dispatcher={"num_sms": 8}).identity() == base.identity()
    assert with_values(train={"seed": 5}).identity() != base.identity()
    assert with_values(ep_dispatcher={"precision": "exact"}).identity() != base.identity()
    # Without decay_steps the schedule ends at `steps`, so a longer run is another run.
    longer = config_from_dict({"train": {"steps": 200}})
    assert longer.identity() != config_from_dict({"train": {"steps": 100}}).identity()


def test_the_page_names_all_that_a_resumed_run_may_change() -> None:
    """Every key that is left out of a run's identity."""
    page = (CONFIGS.parent / "docs" / "training.md").read_text()
    paragraph = page.split("Free to change:")[1].split("Files are")[0]
    for key in (*BOOKKEEPING, *SPEED_ONLY):
        assert f"`{key}`" in paragraph, key


@pytest.mark.parametrize("kind", ["missing", "empty", "short"])
def test_wrong_data_ends_before_ranks_start(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing path, an empty folder and too little text: one line and exit code 2."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    data = tmp_path / "text"
    if kind != "missing":
        data.mkdir()
    if kind == "short":
        (data / "a.txt").write_text("abc")
    words = ["--config", str(CONFIGS / "tiny_cpu.yaml"), "--data", str(data)]
    assert launch.rank_main([*words, "--out", str(tmp_path / "run")]) == launch.USER_ERROR
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert str(data) in lines[0]
    assert not (tmp_path / "run").exists()


def test_out_that_is_a_file_ends_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line and exit code 2."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    out = tmp_path / "run"
    out.write_text("")
    words = ["--config", str(CONFIGS / "tiny_cpu.yaml"), "--out", str(out)]
    assert launch.rank_main(words) == launch.USER_ERROR
    assert "is a file; --out must name a folder" in capsys.readouterr().err


def test_several_nodes_are_not_started_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the scripts that do it."""
    for name in ("RANK", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    config = CONFIGS / "h200_4x8_slurm.yaml"
    with pytest.raises(EpError, match=r"scripts/train\.sbatch"):
        launch.run(_arguments(["--config", str(config)]))


def test_srun_ranks_get_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank, size and local rank follow from SLURM's variables."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in (("PROCID", "9"), ("NTASKS", "32"), ("LOCALID", "1"), ("STEP_ID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    adopt_slurm("scripts/train.sbatch")
    environment = os.environ
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("9", "32")
    assert environment["LOCAL_RANK"] == "1"


def test_a_step_without_local_ids_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("PROCID", "1"), ("NTASKS", "2"), ("STEP_ID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    with pytest.raises(EpError, match="SLURM_LOCALID is not set"):
        adopt_slurm("scripts/train.sbatch")


def test_options_of_a_path_that_looks_like_yaml_stay_text() -> None:
    """A folder called 1: or null is a folder."""
    args = _arguments(["--config", str(CONFIGS / "tiny_cpu.yaml"), "--data", "null", "--out", "7"])
    config = launch.read_config(args)
    assert (config.data.path, config.train.out_dir) == ("null", "7")


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    return parser.parse_args(words)


def test_nested_keys_can_be_overridden() -> None:
    """`ep_dispatcher.overlap.chunks` is a key of a mapping in a section."""
    path = Path(__file__).parent.parent / "configs/tiny_cpu.yaml"
    config = load_config(path, ["ep_dispatcher.overlap.chunks=auto"])
    assert config.ep_dispatcher.overlap.chunks == "auto"
    assert config.ep_dispatcher.num_sms == load_config(path).ep_dispatcher.num_sms
    with pytest.raises(ConfigError, match="unknown key 'chunk'"):
        load_config(path, ["ep_dispatcher.overlap.chunk=2"])


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "delay_weight_gradients", True),
        ("train", "dispatcher", "allgather"),
        ("model", "dtype", "float32"),
        ("model", "recompute", "moe"),
        ("model", "recompute", "full"),
        ("parallel", "expert", 1),
        ("parallel", "pipeline", 2),
        ("train", "num_micro_batches", 1),
        ("ep_dispatcher", "overlap", {"chunks": 2}),
        ("ep_dispatcher", "overlap", {"chunks": "auto"}),
    ],
)
def test_what_the_combined_schedule_cannot_do_is_refused(
    section: str, key: str, value: object
) -> None:
    """Before a rank starts, in one sentence, where Megatron would end with an assertion."""
    values: dict[str, dict[str, object]] = {
        "model": {"dtype": "bfloat16"},
        "train": {"overlap": True, "num_micro_batches": 2},
        "parallel": {"ranks_per_node": 4, "expert": 2},
        "ep_dispatcher": {},
    }
    config_from_dict(values)
    values[section][key] = value
    name, shown = f"{section}.{key}", value
    if isinstance(value, dict):
        [(inner, shown)] = value.items()
        name += f".{inner}"
    with pytest.raises(
        ConfigError,
        match=rf"^train\.overlap is true with {name} {shown}; .*, so set {name} to ",
    ):
        config_from_dict(values)


def test_chunks_of_a_dispatcher_that_is_not_at_work_are_no_mistake() -> None:
    """An ablation with alltoall leaves the section as it is; its chunks do nothing there."""
    train = {"overlap": True, "num_micro_batches": 2, "dispatcher": "alltoall"}
    config = config_from_dict(
        {
            "model": {"dtype": "bfloat16"},
            "train": train,
            "ep_dispatcher": {"overlap": {"chunks": 2}},
        }
    )
    assert config.train.overlap
