r"""Several measurements, one after the other, by ranks that start once.

    torchrun --nproc-per-node 4 -m ep_dispatcher.profile.together \
        layer --config configs/overlap_layer.yaml ++ \
        parity --config configs/one_gpu_4ranks.yaml --variants alltoall,allgather,ours

Each is `ep_dispatcher.profile.layer` or `parity` with its options, and records what it does alone;
the longest --limit and the first one's train.device hold for all. Put parity last: it has torch
take deterministic algorithms from there on. `schedule` is not among them, as it bounds NCCL's
blocks, which holds for the whole process.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist

from ep_dispatcher.errors import ConfigError, EpError
from ep_dispatcher.launch import OK, USER_ERROR, tell
from ep_dispatcher.profile import layer, parity
from ep_dispatcher.profile.watch import Watch, add_limit
from ep_dispatcher.train.config import TrainConfig
from ep_dispatcher.train.runtime import Runtime, open_runtime

BETWEEN = "++"
Measure = Callable[[Sequence[str], TrainConfig, Runtime, Watch], None]
KINDS: Mapping[str, tuple[Callable[[Sequence[str]], TrainConfig], Measure]] = MappingProxyType(
    {
        "layer": (layer.read_config, layer.measure),
        "parity": (parity.read_config, parity.measure),
    }
)


@dataclass(frozen=True)
class Part:
    """One measurement.

    Attributes:
        name: of its module.
        words: of its command line.
        config: that they name.
    """

    name: str
    words: list[str]
    config: TrainConfig

    def run(self, runtime: Runtime, watch: Watch) -> None:
        """Measure, and let go of what it held; collective."""
        KINDS[self.name][1](self.words, self.config, runtime, watch)
        gc.collect()
        if runtime.on_gpu:
            torch.cuda.empty_cache()


def read_parts(words: Sequence[str]) -> list[Part]:
    """The measurements that a command line names.

    Raises:
        ConfigError: an unknown one, a bad config, or a layout of ranks that is not the first's.
    """
    parts: list[Part] = []
    for name, *rest in _split(words):
        if name not in KINDS:
            raise ConfigError(f"{name!r} is no measurement; it is one of {', '.join(KINDS)}")
        parts.append(Part(name, rest, KINDS[name][0](rest)))
    for number, part in enumerate(parts, 1):
        own, first = part.config.parallel, parts[0].config.parallel
        if own != first:
            raise ConfigError(
                f"measurement {number} ({part.name}) has {own}, the first one {first}; they share "
                "ranks, so set the same for both"
            )
    return parts


def _split(words: Sequence[str]) -> list[list[str]]:
    """Words between `BETWEEN`; a name that is missing is empty."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == BETWEEN:
            parts.append([])
        else:
            parts[-1].append(word)
    return [part or [""] for part in parts]


def main(words: Sequence[str]) -> int:
    """Be one rank of all measurements; returns the exit code."""
    try:
        parts = read_parts(words)
    except EpError as error:
        tell(error, "profile.together")
        return USER_ERROR
    options = [_options(part) for part in parts]
    with Watch(options[0].out, max(each.limit for each in options)) as watch:
        runtime = open_runtime(parts[0].config)
        for part in parts:
            part.run(runtime, watch)
        dist.barrier()
        dist.destroy_process_group()
    return OK


def _options(part: Part) -> argparse.Namespace:
    """What the watch needs of a measurement's options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("docs/results/overlap.jsonl"))
    add_limit(parser)
    return parser.parse_known_args(part.words)[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
