r"""Megatron's combined 1F1B schedule: how much communication it hides behind another micro-batch.

    torchrun --nproc-per-node 4 -m ep_dispatcher.profile.schedule \
        --config configs/overlap_layer.yaml --set train.num_micro_batches=12

Trains the same model with Megatron's dispatcher and with ours, plain and under 1F1B, and times
forward and backward of a step's micro-batches. Under 1F1B Megatron cuts a layer into nodes on two
streams; each is clocked by events, so `hidden_fraction` is the part of the time of the nodes that
dispatch or combine during which a node that computes ran on the same rank. With n micro-batches at
most (n - 1) / n of it can be hidden: the first forward and the last backward have no partner, so
fewer than two are refused.

Each variant's line is written as soon as it is there, so the order of --variants says what is left
of a run that is cut; the first one is what the losses of the others are compared with.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ep_dispatcher.bench.results import ResultLog, log_of_module, summarise_times
from ep_dispatcher.errors import EpError
from ep_dispatcher.launch import OK, USER_ERROR, tell
from ep_dispatcher.profile.clock import (
    Clock,
    Span,
    hidden_ms,
    max_connections,
    stamp_maker,
    total_ms,
)
from ep_dispatcher.profile.lines import layer_fields, sharing_of
from ep_dispatcher.profile.parity import config_of, refuse_variants
from ep_dispatcher.profile.watch import Tell, Watch, add_limit, positive
from ep_dispatcher.train.config import TrainConfig, load_config
from ep_dispatcher.train.data import Corpus, load_corpus
from ep_dispatcher.train.progress import say
from ep_dispatcher.train.runtime import Runtime, open_runtime

VARIANTS = ("alltoall", "ours", "alltoall 1f1b", "ours 1f1b")
COMMUNICATION = ("moe_dispatch", "moe_combine")
COMPUTE = "compute"
_NCCL_BLOCKS = "NCCL_MAX_CTAS"


class Rounds(NamedTuple):
    """How often a step runs."""

    warm_up: int
    timed: int


@dataclass(frozen=True)
class Measured:
    """What a variant showed on this rank.

    Attributes:
        times_ms: forward and backward of all micro-batches of a step, each round.
        spans: of the schedule's nodes, in one more round; none without 1F1B.
        loss: mean of the first step.
        backend: what moved the rows.
    """

    times_ms: list[float]
    spans: list[Span]
    loss: float
    backend: str


@contextlib.contextmanager
def clocked_nodes(clock: Clock) -> Iterator[None]:
    """Record the forward and backward of each node of Megatron's schedule that is made inside.

    Args:
        clock: active; gets the name of a node that communicates, and `COMPUTE` for any other.
    """
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    plain = ScheduleNode.__init__

    def clocked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with clock.span(name):
                return function(*args, **kwargs)

        return timed

    def make(node: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        plain(node, *args, **kwargs)
        name = node.name if node.name in COMMUNICATION else COMPUTE
        node.forward_func = clocked(node.forward_func, name)
        node.backward_func = clocked(node.backward_func, name)

    ScheduleNode.__init__ = make
    try:
        yield
    finally:
        ScheduleNode.__init__ = plain


def run_variant(
    config: TrainConfig, corpus: Corpus, runtime: Runtime, rounds: Rounds, tell: Tell
) -> Measured:
    """Build a variant, warm it up, time it, and clock one more round of nodes; collective.

    Args:
        config: of the variant.
        corpus: its text.
        runtime: this rank.
        rounds: to warm up and to time, at least one each.
        tell: is told each phase as it begins.
    """
    from ep_dispatcher.train.loop import Trainer, tiers_of
    from ep_dispatcher.train.model import build_job

    tell("building the model")
    job = build_job(config, runtime)
    trainer = Trainer(config, corpus, runtime, job)
    # One batch for all: a product of another number of rows is chosen anew, which takes the host.
    results = []
    for index in range(rounds.warm_up):
        tell(f"step {index + 1} of {rounds.warm_up} to warm up")
        results.append(trainer.run_gradients(0))
        runtime.settle()
    times_ms: list[float] = []
    for index in range(rounds.timed):
        before = f", the last one took {times_ms[-1]:.1f} ms" if times_ms else ""
        tell(f"round {index + 1} of {rounds.timed}{before}")
        runtime.settle()
        began = time.perf_counter()
        trainer.run_gradients(0)
        if runtime.on_gpu:
            torch.cuda.synchronize()
        times_ms.append((time.perf_counter() - began) * 1e3)
    spans = []
    if config.train.overlap:  # other schedules have no nodes
        tell("a round with its nodes clocked")
        spans = _clocked_round(trainer, runtime)
    losses = [float(each["loss"]) for each in results[0]]
    tiers = "+".join(sorted(tiers_of(job)))
    job.close()
    backend = f"ep_dispatcher/{tiers}" if tiers else f"megatron/{config.train.dispatcher}"
    return Measured(times_ms, spans, sum(losses) / max(1, len(losses)), backend)


def _clocked_round(trainer: Any, runtime: Runtime) -> list[Span]:  # noqa: ANN401
    """When each node of one step ran."""
    clock = Clock(stamp_maker(on_gpu=runtime.on_gpu))
    runtime.settle()
    with clocked_nodes(clock):
        clock.start()
        trainer.run_gradients(0)
        return clock.stop()


def summarise(measured: Measured, runtime: Runtime) -> dict[str, Any]:
    """What a variant showed over all ranks; collective."""
    own = {
        "times_ms": measured.times_ms,
        "communication_ms": total_ms(measured.spans, COMMUNICATION),
        "hidden_ms": hidden_ms(measured.spans, COMMUNICATION, (COMPUTE,)),
        "loss": measured.loss,
    }
    told: list[Any] = [None] * runtime.num_ranks
    dist.all_gather_object(told, own)
    communication = sum(each["communication_ms"] for each in told)
    slowest = [max(ranks) for ranks in zip(*(each["times_ms"] for each in told), strict=True)]
    hidden = sum(each["hidden_ms"] for each in told)
    return {
        **summarise_times([each * 1e3 for each in slowest]),
        "communication_us": round(communication / len(told) * 1e3, 1) if communication else None,
        "hidden_fraction": round(hidden / communication, 4) if communication else None,
        "backend": measured.backend,
        "first_loss": sum(each["loss"] for each in told) / len(told),
    }


def record(
    name: str, found: dict[str, Any], first: dict[str, Any], config: TrainConfig, log: ResultLog
) -> None:
    """Append the line of a variant."""
    difference = abs(found["first_loss"] / first["first_loss"] - 1)
    log.write(
        sharing=sharing_of(config),
        suite="overlap",
        variant=name,
        phase="step",
        **layer_fields(config),
        num_micro_batches=config.train.num_micro_batches,
        num_layers=config.model.num_layers,
        checked=difference < 1e-2,
        difference=difference,
        max_connections=max_connections(),
        nccl_max_ctas=os.environ.get(_NCCL_BLOCKS),
        **found,
    )


def measure(words: Sequence[str], config: TrainConfig, runtime: Runtime, tell: Tell) -> None:
    """Run, record and print all variants; collective.

    Args:
        words: the command line.
        config: that it names.
        runtime: this rank.
        tell: is told each phase as it begins.
    """
    args = _parser().parse_args(words)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    tell("reading the text, and Megatron's modules")
    corpus = load_corpus(config.data, config.model.seq_length)
    rounds = Rounds(args.warm_up, args.rounds)
    log = log_of_module(args.out, "ep_dispatcher.profile.schedule", words)
    first: dict[str, Any] | None = None
    for name in args.variants.split(","):
        variant = config_of(name, config, 1)
        phase = functools.partial(_tell_of, tell, name)
        found = summarise(run_variant(variant, corpus, runtime, rounds, phase), runtime)
        first = first or found
        gc.collect()
        if runtime.on_gpu:
            torch.cuda.empty_cache()
        if runtime.is_first:
            record(name, found, first, variant, log)
            say(
                f"{name:14s} step {found['median_us'] / 1e3:9.2f} ms  communication "
                f"{(found['communication_us'] or 0) / 1e3:8.2f} ms  hidden "
                f"{found['hidden_fraction']}  first loss {found['first_loss']:.4f}"
            )


def read_config(words: Sequence[str]) -> TrainConfig:
    """The config that a command line names.

    Raises:
        EpError: a bad config, or one that does not allow a variant.
    """
    args = _parser().parse_args(words)
    config = load_config(args.config, args.overrides)
    refuse_variants(args.variants.split(","), config, 1)
    return config


def main(words: Sequence[str]) -> int:
    """Be one rank of the measurement; returns the exit code."""
    args = _parser().parse_args(words)
    try:
        config = read_config(words)
    except EpError as error:
        tell(error, "profile.schedule")
        return USER_ERROR
    bound_nccl(config)
    with Watch(args.out, args.limit) as watch:
        runtime = open_runtime(config)
        measure(words, config, runtime, watch)
        dist.barrier()
        dist.destroy_process_group()
    return OK


def _tell_of(tell: Tell, name: str, text: str) -> None:
    tell(f"{name}: {text}")


def bound_nccl(config: TrainConfig) -> None:
    """Keep NCCL's blocks within the SMs that norms leave free, where ranks share a GPU.

    A norm over wide rows is one launch whose blocks must all have a place; NCCL's of the other
    ranks hold theirs until this rank comes. What the environment says stays.
    """
    if config.parallel.ranks_share_gpu:
        os.environ.setdefault(_NCCL_BLOCKS, str(config.ep_dispatcher.num_sms))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ep_dispatcher.profile.schedule", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--out", type=Path, default=Path("docs/results/overlap.jsonl"))
    parser.add_argument("--rounds", type=positive, default=4, help="steps to time (default 4)")
    parser.add_argument("--warm-up", type=positive, default=2, help="steps before (default 2)")
    add_limit(parser)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="names, with commas")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
