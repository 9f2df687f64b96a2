"""Starts the ranks of `ep-dispatcher train`, or is one of them.

Under torchrun or srun each process is a rank already. Otherwise this process starts the ranks of
one node through torch.distributed.run and waits for them.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from ep_dispatcher.errors import ConfigError, EpError
from ep_dispatcher.slurm import adopt_slurm
from ep_dispatcher.train.config import TrainConfig, load_config
from ep_dispatcher.train.data import Corpus, load_corpus
from ep_dispatcher.train.manifest import Manifest, finished

OK, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
_HEAD_START_S = 3.0  # of the first rank in telling an error that every rank has

_EPILOG = """\
examples:
  %(prog)s --config configs/tiny_cpu.yaml
  %(prog)s --config configs/tiny_cpu.yaml --data my_text/ --out runs/mine
  %(prog)s --config configs/tiny_cpu.yaml --set train.dispatcher=alltoall --out runs/alltoall
  torchrun --nproc-per-node 4 -m ep_dispatcher.train --config configs/tiny_cpu.yaml

A run that was stopped goes on from its last checkpoint when the same command is given again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `train`."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--config", type=Path, required=True, help="YAML file, such as configs/tiny_cpu.yaml"
    )
    parser.add_argument(
        "--data", metavar="PATH", help="text file or folder (default: Python's own sources)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps in all")
    parser.add_argument("--out", metavar="DIR", help="folder of metrics, checkpoints and picture")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="override a value of the config; may be given again",
    )


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit code.

    Raises:
        EpError: a config or text that cannot work, found before a rank is started.
    """
    config = read_config(args)
    adopt_slurm("scripts/train.sbatch")
    if "RANK" in os.environ:
        return run_rank(config)
    if config.parallel.num_nodes > 1:
        raise ConfigError(
            f"parallel.num_nodes is {config.parallel.num_nodes}; start such a job with srun (see "
            "scripts/train.sbatch) or torchrun (see scripts/train_torchrun.sh)"
        )
    corpus = load_corpus(config.data, config.model.seq_length)
    refuse_other_run(config, corpus)
    return start_ranks(config, words_of(args))


def rank_main(words: Sequence[str]) -> int:
    """Run `python -m ep_dispatcher.train` with these words; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="ep_dispatcher.train", description="One rank of a training job, or all of one node."
    )
    add_arguments(parser)
    args = parser.parse_args(words)
    try:
        return run(args)
    except EpError as error:
        tell(error)
        return USER_ERROR


def read_config(args: argparse.Namespace) -> TrainConfig:
    """The config file with the options applied.

    Raises:
        ConfigError: see `load_config`.
    """
    overrides = list(args.overrides)
    for key, value in (("data.path", args.data), ("train.out_dir", args.out)):
        if value is not None:
            overrides.append(f"{key}={_quoted(value)}")
    if args.steps is not None:
        overrides.append(f"train.steps={args.steps}")
    return load_config(args.config, overrides)


def refuse_other_run(config: TrainConfig, corpus: Corpus) -> None:
    """Refuse, before a rank is started, an output folder that holds another run.

    Raises:
        ConfigError: the folder is a file.
        CheckpointError: names the first setting that differs.
    """
    if Path(config.train.out_dir).is_file():
        raise ConfigError(f"{config.train.out_dir} is a file; --out must name a folder")
    folders = finished(Path(config.train.out_dir) / "checkpoints")
    if folders:
        manifest = Manifest.read(folders[-1])
        manifest.check_same_run(folders[-1], config.identity(), corpus.sha256)


def run_rank(config: TrainConfig) -> int:
    """Train as the rank that the environment names; returns the exit code."""
    import torch.distributed as dist

    from ep_dispatcher.train.progress import say
    from ep_dispatcher.train.runtime import open_runtime

    corpus = load_corpus(config.data, config.model.seq_length)
    runtime = open_runtime(config)
    # Up to 0.17 Megatron says this of every subclass of its MoE layer; it means nothing here.
    logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(
        lambda record: "Unknown MLP type" not in record.getMessage()
    )
    from ep_dispatcher.train.loop import train  # after the stand-ins of a machine without a GPU

    if runtime.is_first:
        say(
            f"training with dispatcher {config.train.dispatcher}: {runtime.describe()}; "
            f"{len(corpus.tokens):,} bytes of {corpus.num_files} files of {corpus.source}"
        )
    summary = train(config, corpus, runtime)
    if runtime.is_first:
        for line in summary.finish(config):
            say(line)
    dist.barrier()
    dist.destroy_process_group()
    return OK


def start_ranks(config: TrainConfig, words: list[str], module: str = "ep_dispatcher.train") -> int:
    """Start one process a rank on this machine and wait for them; returns the exit code.

    Args:
        config: says how many.
        words: of each rank's command line.
        module: that each rank runs.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks say it
    for name, value in _rank_environment(config).items():
        os.environ.setdefault(name, value)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.parallel.ranks_per_node,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    command = ["-m", module, *words]
    try:
        elastic_launch(launch, sys.executable)(*command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != USER_ERROR:
            sys.stderr.write(f"rank {rank} ended with exit code {failure.exitcode}\n")
        return USER_ERROR if failure.exitcode == USER_ERROR else FAILED
    except SignalException as stop:
        sys.stderr.write(f"stopped by {stop.sigval.name}; the same command goes on from here\n")
        return 128 + int(stop.sigval)
    return OK


def _rank_environment(config: TrainConfig) -> dict[str, str]:
    """Variables that ranks on one machine need; what the user has set stays."""
    values = {
        "OMP_NUM_THREADS": "1",  # the ranks share the cores already
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",  # Megatron names each optional package that is missing
    }
    if Path("/sys/class/net/lo").exists():
        values["GLOO_SOCKET_IFNAME"] = "lo"  # works where the host's name has no address
    if config.parallel.ranks_share_gpu:
        values["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # since NCCL 2.30.3; refused without it
        values["NCCL_MAX_CTAS"] = "16"  # all ranks' blocks must fit on the GPU beside ours
    return values


def words_of(args: argparse.Namespace) -> list[str]:
    """The options again, for the ranks."""
    words = ["--config", str(args.config)]
    for name in ("data", "steps", "out"):
        if getattr(args, name) is not None:
            words += [f"--{name}", str(getattr(args, name))]
    for override in args.overrides:
        words += ["--set", override]
    return words


def _quoted(text: str) -> str:
    """Text as a YAML value that stays text, whatever it looks like."""
    return "'" + text.replace("'", "''") + "'"


def tell(error: EpError, command: str = "train") -> None:
    """Print an error; a rank but the first waits, as it is ended if all have the same."""
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        time.sleep(_HEAD_START_S)
    where = f"rank {rank}: " if rank else ""
    sys.stderr.write(f"ep-dispatcher {command}: error: {where}{error}\n")
