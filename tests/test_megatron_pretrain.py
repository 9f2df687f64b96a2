"""The launcher: its arguments, the forms of Megatron's pretrain, and a whole run."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ep_dispatcher.errors import ConfigError, UnavailableError
from ep_dispatcher.megatron import pretrain
from ep_dispatcher.megatron.options import MegatronOptions

pytest.importorskip("megatron.core")

HAS_TRAINING = importlib.util.find_spec("megatron.training") is not None
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32 "
    "--max-position-embeddings 32 --transformer-impl local --num-experts 8 --moe-router-topk 2 "
    "--moe-router-dtype fp32 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear --use-cpu-initialization --no-persist-layer-norm --no-rope-fusion "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion"
)
RUN = (
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 3e-3 --log-interval 1 "
    "--eval-iters 0 --eval-interval 100 --mock-data --split 100,0,0 --num-workers 0 "
    "--tokenizer-type NullTokenizer --vocab-size 128 --distributed-backend gloo "
    "--no-check-for-nan-in-loss-and-grad"
)


def parsed(*arguments: str) -> argparse.Namespace:
    """Our arguments, parsed as Megatron's parser would."""
    return pretrain.add_arguments(argparse.ArgumentParser()).parse_args(list(arguments))


def test_single_settings_come_on_top_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: {layers: 2}\nep_dispatcher: {num_sms: 24, precision: exact}\n")
    options = pretrain.options_from_args(
        parsed("--ep-dispatcher-config", str(file), "--ep-dispatcher", "num_sms=8", "timeout_s=2.5")
    )
    assert (options.num_sms, options.precision, options.timeout_s) == (8, "exact", 2.5)


def test_no_arguments_give_the_defaults() -> None:
    assert pretrain.options_from_args(parsed()) == MegatronOptions()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("other: 1\n", "has no mapping 'ep_dispatcher'"),
        ("ep_dispatcher: [1]\n", r"is \[1\]; it must be a mapping"),
        ("ep_dispatcher: {num_sm: 1}\n", "unknown key 'num_sm'"),
        ("ep_dispatcher: {\n", "job.yaml"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        pretrain.options_from_args(parsed("--ep-dispatcher-config", str(file)))


def test_a_malformed_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 'num_sms'; it must be KEY=VALUE"):
        pretrain.options_from_args(parsed("--ep-dispatcher", "num_sms"))


def test_pretrain_of_0_17_parses_the_arguments_itself() -> None:
    called: dict[str, Any] = {}

    def old(train_valid_test_dataset_provider: str, extra_args_provider: object = None) -> None:
        called.update(data=train_valid_test_dataset_provider, extra=extra_args_provider)

    pretrain.start(old, None, None, {"train_valid_test_dataset_provider": "data"})
    assert called == {"data": "data", "extra": pretrain.add_arguments}


def test_pretrain_from_0_18_takes_a_container_of_parsed_arguments() -> None:
    called: dict[str, Any] = {}

    def new(cfg_container: str, train_valid_test_dataset_provider: str) -> None:
        called.update(container=cfg_container, data=train_valid_test_dataset_provider)

    def parse(extra_args_provider: object) -> argparse.Namespace:
        called["extra"] = extra_args_provider
        return argparse.Namespace(seed=7)

    job = {"train_valid_test_dataset_provider": "data"}
    pretrain.start(new, parse, lambda args: f"container of seed {args.seed}", job)
    assert called == {
        "extra": pretrain.add_arguments,
        "container": "container of seed 7",
        "data": "data",
    }


@pytest.mark.skipif(HAS_TRAINING, reason="this megatron-core carries megatron.training")
def test_a_wheel_without_training_is_refused_with_the_way_out() -> None:
    with pytest.raises(UnavailableError, match=r"from 0\.17 on .*swap_dispatchers"):
        pretrain.require_training()


@pytest.mark.skipif(not HAS_TRAINING, reason="needs megatron.training (megatron-core 0.17 on)")
def test_what_the_job_cannot_do_is_refused() -> None:
    from ep_dispatcher.megatron import gpt_job

    good = {"context_parallel_size": 1, "num_experts": 8, "spec": None}
    gpt_job.check_args(argparse.Namespace(**good))
    for change, message in (
        ({"context_parallel_size": 2}, "--context-parallel-size is 2"),
        ({"num_experts": None}, "--num-experts is not set"),
        ({"spec": ["module", "name"]}, "--spec is"),
    ):
        with pytest.raises(ConfigError, match=message):
            gpt_job.check_args(argparse.Namespace(**(good | change)))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_TRAINING, reason="needs megatron.training (megatron-core 0.17 on)")
def test_the_launcher_trains_like_megatron() -> None:
    """Two ranks, 6 iterations of Megatron's own loop: the losses of its alltoall dispatcher."""
    ours, said = launch("--ep-dispatcher", "tier=reference")
    theirs, _ = launch("--theirs")
    assert len(ours) == 6
    assert ours[-1] < ours[0] - 0.3
    assert ours == theirs
    assert said.count("MoE token dispatcher: ep_dispatcher, tier reference") == 1


def launch(*arguments: str) -> tuple[list[float], str]:
    """The losses, as logged, and all that was said."""
    folder = Path(__file__).parent
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(folder / "megatron_launcher.py"), *MODEL.split(), *RUN.split(), *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=140, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", said)], said
