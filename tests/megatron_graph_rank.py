"""Trains a model twice, without and with CUDA graphs of its layers; run by test_megatron_graphs.py.

    python tests/megatron_graph_rank.py ours attn,moe_router

A process does this once, as a capture that fails leaves torch and Megatron unusable.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from ep_dispatcher.profile.parity import config_of
from ep_dispatcher.train.config import TrainConfig, load_config
from ep_dispatcher.train.data import Corpus, load_corpus
from ep_dispatcher.train.runtime import Runtime, open_runtime

SETTINGS = (
    "parallel.ranks_per_node=1", "parallel.expert=1", "parallel.ranks_share_gpu=false",
    "ep_dispatcher.tier=device", "ep_dispatcher.timeout_s=10", "model.num_layers=2",
    "model.num_topk=2", "train.micro_batch=2", "train.num_micro_batches=2", "train.steps=6",
)  # fmt: skip
WARM_UP = 2


def losses_of(
    config: TrainConfig, corpus: Corpus, runtime: Runtime, modules: list[str] | None
) -> list[float]:
    """Losses of all steps; the layers are captured after the first two, if modules are named."""
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ep_dispatcher.train import model
    from ep_dispatcher.train.loop import Trainer

    graphs: dict[str, Any] = {}
    if modules is not None:
        graphs = {
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": modules,
            "cuda_graph_warmup_steps": WARM_UP,
        }
    initialize_rng_tracker(use_te_rng_tracker=True, force_reset=True)  # graphs capture its states
    with (
        mock.patch.object(model, "TransformerConfig", partial(TransformerConfig, **graphs)),
        mock.patch.object(model, "DistributedDataParallel", wrapped_on_a_stream),
    ):
        job = model.build_job(config, runtime)
    trainer = Trainer(config, corpus, runtime, job)
    losses, helper = [], None
    for step in range(config.train.steps):
        if modules is not None and step == WARM_UP:
            helper = TECudaGraphHelper(
                model=[job.chunk],
                config=job.megatron_config,
                seq_length=config.model.seq_length,
                micro_batch_size=config.train.micro_batch,
                optimizers=[job.optimizer],
            )
            helper.create_cudagraphs()
            assert helper.graphs_created()
        results, _ = trainer._optimize(step)
        losses += [float(each["loss"]) for each in results]
    if helper is not None:
        helper.delete_cuda_graphs()
    job.close()
    return losses


def wrapped_on_a_stream(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Megatron's wrapper for data parallelism, made on a stream of its own as in its training.

    It keeps the nodes that add up gradients. They run on the stream that they were made on, and
    the default one cannot be captured.
    """
    import torch
    from megatron.core.distributed import DistributedDataParallel

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        wrapped = DistributedDataParallel(*args, **kwargs)
    torch.cuda.current_stream().wait_stream(stream)
    return wrapped


def main(variant: str, modules: str) -> int:
    """Print the losses without and with graphs as JSON."""
    config = load_config(Path("configs/one_gpu_4ranks.yaml"), list(SETTINGS))
    runtime = open_runtime(config)
    import torch
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    train = config.train
    batch = train.micro_batch * train.num_micro_batches
    init_num_microbatches_calculator(0, None, batch, train.micro_batch, 1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    corpus = load_corpus(config.data, config.model.seq_length)
    chosen = config_of(variant, config, 2)
    plain = losses_of(chosen, corpus, runtime, None)
    graphed = losses_of(chosen, corpus, runtime, modules.split(","))
    sys.stdout.write(json.dumps({"plain": plain, "graphed": graphed}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # graphs hold on to what the process group would wait for


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
