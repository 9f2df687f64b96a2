"""`ep-dispatcher profile`: some steps of the training job under torch.profiler, and what they say.

Each rank writes a Chrome trace (for chrome://tracing or Perfetto); the first one a table and
`summary.json`. Works on the CPU too, where there are times of phases but no kernels.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ep_dispatcher import launch
from ep_dispatcher.errors import ConfigError, EpError
from ep_dispatcher.profile.trace import Trace, summarise
from ep_dispatcher.profile.watch import LIMIT_S, Tell, Watch, add_limit
from ep_dispatcher.slurm import adopt_slurm
from ep_dispatcher.train.config import TrainConfig
from ep_dispatcher.train.data import load_corpus
from ep_dispatcher.train.runtime import Runtime

SUMMARY = "summary.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `profile`: those of `train`, and how many steps to warm up."""
    launch.add_arguments(parser)
    parser.epilog = (
        "example:\n  %(prog)s --config configs/tiny_cpu.yaml --steps 2 --out runs/profile"
    )
    parser.add_argument(
        "--warm-up", type=int, default=3, metavar="N", help="steps before those (default 3)"
    )
    parser.add_argument(
        "--same-batch",
        action="store_true",
        help="only the gradients of the first batch, again and again: a product of another number "
        "of rows is one that the library of products has to choose an algorithm for, on the host",
    )
    add_limit(parser)


def run(args: argparse.Namespace) -> int:
    """Profile; returns the exit code.

    Raises:
        EpError: a config that cannot work, found before a rank is started.
    """
    if args.steps is None:
        args.steps = 3
    config = launch.read_config(args)
    if args.warm_up < 1 or args.steps < 1:
        raise ConfigError(
            f"--steps is {args.steps} and --warm-up {args.warm_up}; each must be at least 1"
        )
    refuse_other_dispatchers(config)
    adopt_slurm("scripts/train.sbatch")
    if "RANK" in os.environ:
        return run_rank(config, args.warm_up, same_batch=args.same_batch, limit_s=args.limit)
    if config.parallel.num_nodes > 1:
        raise ConfigError("profile starts the ranks of one node; use srun or torchrun for more")
    words = [*launch.words_of(args), "--warm-up", str(args.warm_up), "--limit", str(args.limit)]
    words += ["--same-batch"] if args.same_batch else []
    return launch.start_ranks(config, words, "ep_dispatcher.profile")


def refuse_other_dispatchers(config: TrainConfig) -> None:
    """Refuse a job whose layers have no named phases: a summary would call them free.

    Raises:
        ConfigError: the dispatcher is one of Megatron's.
    """
    if config.train.dispatcher != "ep_dispatcher":
        raise ConfigError(
            f"train.dispatcher is {config.train.dispatcher}, whose phases have no names in a "
            "trace; set train.dispatcher to ep_dispatcher, or use ep_dispatcher.profile.layer, "
            "which times a layer of alltoall and of ours by events"
        )


def rank_main(words: Sequence[str]) -> int:
    """Run `python -m ep_dispatcher.profile` with these words; returns the exit code."""
    parser = argparse.ArgumentParser(prog="ep_dispatcher.profile", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(words))
    except EpError as error:
        launch.tell(error, "profile")
        return launch.USER_ERROR


def run_rank(
    config: TrainConfig, warm_up: int, *, same_batch: bool = False, limit_s: float = LIMIT_S
) -> int:
    """Profile as the rank that the environment names; returns the exit code."""
    import torch.distributed as dist

    from ep_dispatcher.train.runtime import open_runtime

    with Watch(Path(config.train.out_dir) / SUMMARY, limit_s) as watch:
        runtime = open_runtime(config)
        profile_job(config, warm_up, runtime, watch, same_batch=same_batch)
        dist.barrier()
        dist.destroy_process_group()
    return launch.OK


def profile_job(
    config: TrainConfig, warm_up: int, runtime: Runtime, tell: Tell, *, same_batch: bool = False
) -> None:
    """Build the job, run its steps under the profiler, write what they say; collective.

    Args:
        config: of the job.
        warm_up: steps before.
        runtime: this rank.
        tell: is told each phase as it begins.
        same_batch: take the gradients of the first batch each time and leave the weights alone, so
            that every step has the same routing.

    Raises:
        ConfigError: ranks share a GPU.
    """
    import torch.distributed as dist

    if runtime.on_gpu and config.parallel.ranks_share_gpu:
        raise ConfigError(
            "parallel.ranks_share_gpu is true; kernels of ranks that share a GPU through MPS "
            "cannot be traced. Give each rank a GPU (for one GPU: parallel.ranks_per_node=1, "
            "parallel.expert=1), or use ep_dispatcher.profile.layer, which times by events"
        )
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    tell("reading the text, and Megatron's modules")
    from ep_dispatcher.train.loop import Trainer
    from ep_dispatcher.train.model import build_job

    corpus = load_corpus(config.data, config.model.seq_length)
    tell("building the model")
    job = build_job(config, runtime)
    trainer = Trainer(config, corpus, runtime, job)
    for step in range(warm_up):
        tell(f"step {step + 1} of {warm_up} to warm up")
        _one_step(trainer, step, same_batch=same_batch)
    runtime.settle()
    tell(f"{config.train.steps} steps under the profiler, whose own start takes a while")
    folder = Path(config.train.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"trace_rank{runtime.rank}.json"
    run = functools.partial(_one_step, trainer, same_batch=same_batch)
    _record(run, range(warm_up, warm_up + config.train.steps), path, on_gpu=runtime.on_gpu)
    tell(f"reading {path}")
    told: list[Any] = [None] * runtime.num_ranks
    dist.all_gather_object(told, summarise(Trace.read(path)))
    if runtime.is_first:
        _report(config, told, folder)
    job.close()


def _one_step(trainer: Any, step: int, *, same_batch: bool) -> None:  # noqa: ANN401
    """Run a step, or the first one's gradients again; nothing is logged, as that would wait."""
    if same_batch:
        trainer.run_gradients(0)
    else:
        trainer.run_unlogged(step)


def _record(run: Callable[[int], None], steps: range, path: Path, *, on_gpu: bool) -> None:
    """Run steps under the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as profiler:
        for step in steps:
            run(step)
        if on_gpu:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def _report(config: TrainConfig, told: list[dict[str, Any]], folder: Path) -> None:
    """Write the summary and print it."""
    summary = {
        "dispatcher": config.train.dispatcher,
        "steps": config.train.steps,
        "overlap_chunks": config.ep_dispatcher.overlap.chunks,
        "ranks": told,
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    ranks = [rank for rank in told if rank["layers"]]  # a pipeline stage may have none
    table = Table(title=f"{config.train.dispatcher}: per layer and micro-batch, mean over ranks")
    table.add_column("what")
    table.add_column("us", justify="right")
    for name in sorted({name for rank in ranks for name in rank["phases_us"]}):
        each = [rank["phases_us"].get(name, 0.0) / rank["layers"] for rank in ranks]
        table.add_row(name, f"{sum(each) / len(each):.1f}")
    for name in ("communication_us", "exposed_us"):
        each = [rank[name] / rank["layers"] for rank in ranks if rank[name] is not None]
        if each:
            table.add_row(name.removesuffix("_us"), f"{sum(each) / len(each):.1f}")
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    for name in ("hidden_fraction", "gemm_slow_down", "plans_per_layer", "host_syncs_per_layer"):
        values = [rank[name] for rank in told]
        console.print(f"{name}: {', '.join(str(value) for value in values)}", markup=False)
    console.print(f"files: {folder / SUMMARY}, {folder}/trace_rank*.json", markup=False)
