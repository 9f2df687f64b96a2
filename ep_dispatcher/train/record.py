"""Keeps what the routers of a training run chose, to be replayed by `ep-dispatcher bench`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import nn

from ep_dispatcher.bench.record import RouterRecorder
from ep_dispatcher.bench.trace import write_trace
from ep_dispatcher.train.config import TrainConfig


@contextlib.contextmanager
def recorded_routing(config: TrainConfig, model: nn.Module, ep_rank: int) -> Iterator[None]:
    """Record the first `train.record_routing` routings of this rank; nothing where it is 0.

    A trace goes to `router.rankN.npz` in the output folder, N being the global rank;
    `ep-dispatcher bench trace --merge` puts those of one expert-parallel group together.

    Args:
        config: of the run.
        model: this rank's part of it.
        ep_rank: this rank among those that share the experts.
    """
    if not config.train.record_routing:
        yield
        return
    with RouterRecorder(
        model,
        config.model.num_topk,
        ep_rank,
        config.parallel.expert,
        max_entries=config.train.record_routing,
        source="ep-dispatcher train",
    ) as recorder:
        yield
    folder = Path(config.train.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_trace(folder / f"router.rank{dist.get_rank()}.npz", recorder.trace)
