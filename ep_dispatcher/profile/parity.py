r"""Trains the same model with several dispatchers, one after the other, and compares the losses.

    torchrun --nproc-per-node 4 -m ep_dispatcher.profile.parity \
        --config configs/one_gpu_4ranks.yaml --set train.num_micro_batches=4

Every variant starts from the same seed and reads the same text. Ours passes if its losses differ
from alltoall's by no more than those of Megatron's allgather do, and if it gives the same bits
when it is run again. "alltoall split" is a control for chunks: Megatron's dispatcher with each
micro-batch in two halves, so that a weight's gradient is the sum of two products there too. A
variant "... 1f1b" needs two micro-batches a step or more, and all variants have equally many.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.bench.results import ResultLog, log_of_module
from ep_dispatcher.errors import ConfigError, EpError
from ep_dispatcher.launch import OK, USER_ERROR, tell
from ep_dispatcher.megatron.options import OverlapOptions
from ep_dispatcher.profile.lines import sharing_of
from ep_dispatcher.profile.watch import Watch, add_limit, positive
from ep_dispatcher.train.config import TrainConfig, load_config
from ep_dispatcher.train.data import BatchKey, Corpus, load_corpus
from ep_dispatcher.train.progress import say
from ep_dispatcher.train.runtime import Runtime, open_runtime

VARIANTS = (
    "alltoall",
    "allgather",
    "ours",
    "ours again",
    "chunks",
    "chunks again",
    "ours 1f1b",
    "alltoall 1f1b",
)
SPLIT = "alltoall split"  # not among them, as it changes an auxiliary loss
# What else may follow the dispatcher in a variant's name.
CHANGES: dict[str, tuple[str, str, Any]] = {
    "1f1b": ("train", "overlap", True),
    "sharded": ("train", "distributed_optimizer", True),
    "delayed": ("train", "delay_weight_gradients", True),
    "recompute": ("model", "recompute", "moe"),
    "recompute_all": ("model", "recompute", "full"),
}
OTHER_WORDS = ("again", "split", "ledger")


@dataclass(frozen=True)
class Run:
    """What one variant showed.

    Attributes:
        losses: of each step.
        digest: of all parameters of this rank at the end.
        step_s: median time of a step.
        tiers: of our groups.
        peak_bytes: of the device memory of this rank that torch counts; 0 on the CPU.
    """

    losses: list[float]
    digest: float
    step_s: float
    tiers: str
    peak_bytes: int

    def has_bits_of(self, other: Run) -> bool:
        """Whether losses and parameters are the same."""
        return (self.losses, self.digest) == (other.losses, other.digest)


@dataclass(frozen=True)
class SplitCorpus(Corpus):
    """The same text in micro-batches of half the size: two of them are one of the whole."""

    def batch(self, key: BatchKey, micro_batch: int, seq_length: int) -> tuple[Tensor, Tensor]:
        """A half of the micro-batch that the other variants read."""
        whole = dataclasses.replace(key, index=key.index // 2)
        tokens, labels = super().batch(whole, 2 * micro_batch, seq_length)
        first = key.index % 2 * micro_batch
        half = slice(first, first + micro_batch)
        return tokens[half], labels[half]

    @classmethod
    def of(cls, corpus: Corpus) -> SplitCorpus:
        """Over the same text."""
        return cls(corpus.tokens, corpus.sha256, corpus.num_files, corpus.source)


def config_of(name: str, config: TrainConfig, chunks: int) -> TrainConfig:
    """The config of a variant: a dispatcher, then words of `CHANGES`.

    Raises:
        ConfigError: micro-batches that cannot be split, or whose halves have another loss.
    """
    dispatcher, *words = name.split()
    ours = dispatcher in ("ours", "chunks")
    if name == SPLIT:
        config = _split(config)
    ep_dispatcher = dataclasses.replace(
        config.ep_dispatcher,
        overlap=OverlapOptions(chunks=chunks if dispatcher == "chunks" else 1),
        debug_ledger="ledger" in words,
    )
    train: dict[str, Any] = {
        "dispatcher": "ep_dispatcher" if ours else dispatcher,
        "log_every": 1,
    }
    model: dict[str, Any] = {}
    for section, key, value in (CHANGES[word] for word in words if word in CHANGES):
        (train if section == "train" else model)[key] = value
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        train=dataclasses.replace(config.train, **train),
        ep_dispatcher=ep_dispatcher,
    )


def refuse_variants(names: Sequence[str], config: TrainConfig, chunks: int) -> None:
    """Refuse variants that the config does not allow, before any of them is run.

    Raises:
        ConfigError: names the variant, and what to set for all of them.
    """
    for name in names:
        try:
            config_of(name, config, chunks)
        except ConfigError as error:
            raise ConfigError(
                f"variant {name!r}: {error}; --set holds for all variants, or leave this "
                "one out of --variants"
            ) from error


def _split(config: TrainConfig) -> TrainConfig:
    train, model = config.train, config.model
    if train.micro_batch % 2 or model.aux_loss:
        raise ConfigError(
            f"train.micro_batch is {train.micro_batch} and model.aux_loss {model.aux_loss}; "
            f"{SPLIT!r} needs an even one and 0, as that loss is no sum over tokens"
        )
    halves = dataclasses.replace(
        train, micro_batch=train.micro_batch // 2, num_micro_batches=2 * train.num_micro_batches
    )
    return dataclasses.replace(config, train=halves)


def train(config: TrainConfig, corpus: Corpus, runtime: Runtime, watch: Watch) -> Run:
    """Train one variant from its seed; collective."""
    from ep_dispatcher.train.loop import Trainer, tiers_of
    from ep_dispatcher.train.model import build_job

    if runtime.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    job = build_job(config, runtime)
    trainer = Trainer(config, corpus, runtime, job)
    losses, times = [], []
    for step in range(config.train.steps):
        tell = watch if step < 2 else watch.at  # the first step takes longer than all others
        tell(f"step {step + 1} of {config.train.steps}")
        started = time.perf_counter()
        line = trainer.step(step)
        times.append(time.perf_counter() - started)
        assert line is not None
        losses.append(line.loss)
    digest = torch.stack(
        [
            each.detach().double().abs().sum() + each.detach().double().sum()
            for each in job.chunk.parameters()
        ]
    ).sum()
    tiers = "+".join(sorted(tiers_of(job)))
    job.close()
    peak_bytes = torch.cuda.max_memory_allocated() if runtime.on_gpu else 0
    return Run(losses, float(digest), statistics.median(times), tiers, peak_bytes)


def worst(losses: Sequence[float], others: Sequence[float]) -> float:
    """Largest difference of two losses of one step."""
    return max(abs(one - other) for one, other in zip(losses, others, strict=True))


def mean_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Mean size of the difference of the losses of one step."""
    return statistics.fmean(abs(one - other) for one, other in zip(losses, others, strict=True))


def needed(name: str, names: Sequence[str]) -> set[str]:
    """The variants that the line of one compares it with, itself included.

    Example: "ours" of alltoall, ours, ours again -> all three.
    """
    return {name, "alltoall"} | ({"allgather", f"{name} again"} & set(names))


def record(name: str, runs: dict[str, Run], config: TrainConfig, log: ResultLog) -> str:
    """Append the line of a variant; returns what to print.

    Args:
        name: of the variant.
        runs: it and what it is compared with.
        config: of all variants.
        log: gets the line.
    """
    run, reference = runs[name], runs["alltoall"]
    allowed = worst(runs["allgather"].losses, reference.losses) if "allgather" in runs else None
    repeated = runs.get(f"{name} again")
    same_bits = None if repeated is None else repeated.has_bits_of(run)
    ours = name.startswith(("ours", "chunks"))
    difference = worst(run.losses, reference.losses)
    mean = mean_difference(run.losses, reference.losses)
    last = abs(run.losses[-1] - reference.losses[-1])
    log.write(
        sharing=sharing_of(config),
        suite="train",
        backend=f"ep_dispatcher/{run.tiers}" if ours else f"megatron/{name.split()[0]}",
        variant=name,
        phase="step",
        ranks=config.parallel.num_ranks,
        num_sms=config.ep_dispatcher.num_sms,
        num_tokens=config.tokens_per_rank,
        num_micro_batches=config.train.num_micro_batches,
        hidden=config.model.hidden,
        num_topk=config.model.num_topk,
        num_experts=config.model.num_experts,
        dtype=config.model.dtype,
        seed=config.train.seed,
        steps=len(run.losses),
        first_loss=run.losses[0],
        last_loss=run.losses[-1],
        losses=[round(loss, 6) for loss in run.losses],
        max_loss_difference=difference,
        mean_loss_difference=mean,
        last_loss_difference=last,
        allgather_loss_difference=allowed,
        checked=ours and allowed is not None and difference <= allowed,
        same_bits_again=same_bits,
        peak_bytes=run.peak_bytes or None,
        median_us=round(run.step_s * 1e6, 1),
    )
    return (
        f"{name:14s} loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}  from alltoall worst "
        f"{difference:.2e} mean {mean:.2e} last {last:.2e}  step {run.step_s * 1e3:.1f} ms  "
        f"{run.tiers}" + ("" if same_bits is None else f"  same bits again: {same_bits}")
    )


def read_config(words: Sequence[str]) -> TrainConfig:
    """The config that a command line names.

    Raises:
        EpError: a bad config, or one that does not allow a variant.
    """
    args = _parser().parse_args(words)
    config = load_config(args.config, [*args.overrides, f"train.steps={args.steps}"])
    refuse_variants(args.variants, config, args.chunks)
    return config


def main(words: Sequence[str]) -> int:
    """Be one rank; returns the exit code."""
    args = _parser().parse_args(words)
    try:
        config = read_config(words)
    except EpError as error:
        tell(error, "profile.parity")
        return USER_ERROR
    with Watch(args.out, args.limit) as watch:
        runtime = open_runtime(config)
        measure(words, config, runtime, watch)
        dist.barrier()
        dist.destroy_process_group()
    return OK


def measure(words: Sequence[str], config: TrainConfig, runtime: Runtime, watch: Watch) -> None:
    """Train all variants, compare and record; collective.

    Args:
        words: the command line.
        config: that it names.
        runtime: this rank.
        watch: is told each phase as it begins.
    """
    args = _parser().parse_args(words)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    watch("reading the text, and Megatron's modules")
    corpus = load_corpus(config.data, config.model.seq_length)
    torch.use_deterministic_algorithms(True, warn_only=True)  # of what is Megatron's and torch's
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    log = log_of_module(args.out, "ep_dispatcher.profile.parity", words)
    found = []
    for seed in args.seeds or [config.train.seed]:
        seeded = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
        lines = Lines(args.variants, seeded, log if runtime.is_first else None)
        found.append(_compare_seed(args, lines, corpus, runtime, watch))
    if runtime.is_first and len(found) > 1:
        for line in summarise_seeds(found):
            say(line)


class Lines:
    """Runs with one seed, and their lines: each is written once all that it needs has run.

    Args:
        names: of all variants.
        config: of them.
        log: gets the lines; None: there are none.

    Attributes:
        config: as given.
        runs: so far.
    """

    def __init__(self, names: Sequence[str], config: TrainConfig, log: ResultLog | None) -> None:
        """No run yet."""
        self.config, self.runs = config, dict[str, Run]()
        self._names, self._log = names, log
        self._left = list(names)

    def add(self, name: str, run: Run) -> None:
        """A variant has run."""
        self.runs[name] = run
        self._write([each for each in self._left if needed(each, self._names) <= set(self.runs)])

    def end(self) -> None:
        """No more will run: what did is written where alltoall did."""
        if "alltoall" in self.runs:
            self._write([each for each in self._left if each in self.runs])

    def _write(self, names: Sequence[str]) -> None:
        for name in names:
            self._left.remove(name)
            if self._log is not None:
                say(record(name, self.runs, self.config, self._log))


def _compare_seed(
    args: argparse.Namespace, lines: Lines, corpus: Corpus, runtime: Runtime, watch: Watch
) -> dict[str, Run]:
    """All variants with one seed; collective."""
    try:
        for name in args.variants:
            text = SplitCorpus.of(corpus) if name == SPLIT else corpus
            watch(f"seed {lines.config.train.seed}, {name}: building the model")
            variant = config_of(name, lines.config, args.chunks)
            lines.add(name, train(variant, text, runtime, watch))
            gc.collect()
    finally:  # what was measured is kept where a later variant fails
        lines.end()
    return lines.runs


def summarise_seeds(found: Sequence[dict[str, Run]]) -> list[str]:
    """Differences from alltoall over seeds: mean over steps and seeds, worst, and of last steps."""
    words = [f"differences of losses from alltoall over {len(found)} seeds"]
    for name in found[0]:
        pairs = [(runs[name].losses, runs["alltoall"].losses) for runs in found]
        mean = statistics.fmean(mean_difference(*pair) for pair in pairs)
        last = statistics.fmean(abs(own[-1] - other[-1]) for own, other in pairs)
        words.append(
            f"{name:14s} mean {mean:.2e}  worst {max(worst(*pair) for pair in pairs):.2e}  "
            f"mean of last steps {last:.2e}"
        )
    return words


def _variants(text: str) -> list[str]:
    """Names with commas between them."""
    names = text.split(",")
    for name in names:
        dispatcher, *words = name.split() or [""]
        unknown = [word for word in words if word not in (*CHANGES, *OTHER_WORDS)]
        if dispatcher not in ("alltoall", "allgather", "ours", "chunks") or unknown:
            known = ", ".join((*CHANGES, *OTHER_WORDS))
            raise argparse.ArgumentTypeError(
                f"{name!r} is no variant; it is alltoall, allgather, ours or chunks, then any of "
                f"{known}"
            )
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ep_dispatcher.profile.parity", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--steps", type=positive, default=50)
    add_limit(parser)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--variants", type=_variants, default=",".join(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="*", help="instead of the config's train.seed")
    parser.add_argument("--out", type=Path, default=Path("docs/results/train.jsonl"))
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
