"""Saves and loads a job through megatron.core.dist_checkpointing, in its torch_dist format.

The state of a run is the parameters, the optimizer's state, the random generators and the step;
the text and the learning rate are functions of the step.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from ep_dispatcher.train.config import TrainConfig
from ep_dispatcher.train.data import Corpus
from ep_dispatcher.train.manifest import (
    PARTIAL,
    CheckpointError,
    Manifest,
    digest,
    finished,
    folder_of,
)
from ep_dispatcher.train.model import Job
from ep_dispatcher.train.runtime import Runtime

# How a sharded optimizer is laid out; the only form that Megatron can load with torch's AdamW. It
# needs the same layout of ranks, which a resumed run must have anyway.
_OPTIMIZER_METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}


class DirectSave(torch_strategies.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Writes Megatron's torch_dist format from the rank itself.

    Megatron's own strategy starts two more processes a rank and needs psutil even for a blocking
    save; the processes outlive a rank that is killed. The files are the same, and
    dist_checkpointing.load reads them with its own strategy.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:  # noqa: ANN401
        """Write this rank's part; collective."""
        renamed, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        dcp.save(
            torch_strategies.mcore_to_pyt_state_dict(renamed, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir),
            planner=torch_strategies.MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


class Checkpoints:
    """The checkpoints of a run.

    Args:
        config: of the run.
        corpus: its text.
        runtime: this rank.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, runtime: Runtime) -> None:
        """Look at nothing yet."""
        self.root = Path(config.train.out_dir) / "checkpoints"
        self._keep = config.train.keep_checkpoints
        self._identity = config.identity()
        self._corpus = corpus
        self._runtime = runtime

    def save(self, job: Job, step: int) -> Path:
        """Write a checkpoint after `step` steps and drop the oldest ones; collective.

        A run that is killed meanwhile leaves a folder that no run reads.
        """
        folder = folder_of(self.root, step)
        partial = folder.with_name(folder.name + PARTIAL)
        if self._runtime.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(
            _state_of(job, self._runtime, loading=False),
            str(partial),
            sharded_strategy=DirectSave("torch_dist", 1),
        )
        dist.barrier()
        if self._runtime.is_first:
            files = {path.name: digest(path) for path in partial.iterdir() if path.is_file()}
            Manifest(step, self._identity, self._corpus.sha256, files).write(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            for old in finished(self.root)[: -self._keep]:
                shutil.rmtree(old)
        dist.barrier()
        return folder

    def load_latest(self, job: Job) -> int:
        """Load the newest checkpoint into a job; collective.

        Returns:
            Optimizer steps done; 0 where there is no checkpoint.

        Raises:
            CheckpointError: damaged, or of another config or text; the same on all ranks.
        """
        found: list[Any] = [None]
        if self._runtime.is_first:
            found = [self._latest()]
        dist.broadcast_object_list(found, src=0)
        folder, problem = found[0]
        if problem:
            raise CheckpointError(problem)
        if folder is None:
            return 0
        manifest = Manifest.read(folder)
        self._refuse_damage(manifest, folder)
        _allocate_state(job.optimizer)
        state = dist_checkpointing.load(_state_of(job, self._runtime, loading=True), str(folder))
        job.chunk.module.load_state_dict(state["model"])
        with torch.no_grad():  # a sharded fp32 optimizer copies into views of the parameters
            job.optimizer.load_state_dict(state["optimizer"])
        _set_step_counts(job.optimizer, manifest.step)
        _set_random_state(state["random"], self._runtime)
        return manifest.step

    def _latest(self) -> tuple[Path | None, str]:
        """The newest checkpoint, or None, and why it cannot be used; removes left-overs."""
        for partial in self.root.glob(f"*{PARTIAL}"):
            shutil.rmtree(partial)
        folders = finished(self.root)
        if not folders:
            return None, ""
        try:
            manifest = Manifest.read(folders[-1])
            manifest.check_same_run(folders[-1], self._identity, self._corpus.sha256)
        except CheckpointError as error:
            return None, str(error)
        return folders[-1], ""

    def _refuse_damage(self, manifest: Manifest, folder: Path) -> None:
        """Let the ranks check the files between them and raise the same error on all."""
        size = self._runtime.num_ranks
        problems: list[str] = [""] * size
        dist.all_gather_object(problems, manifest.damage(folder, self._runtime.rank, size))
        for problem in problems:
            if problem:
                raise CheckpointError(problem)


def _state_of(job: Job, runtime: Runtime, *, loading: bool) -> dict[str, Any]:
    """What is saved, as Megatron's sharded state dict."""
    model = job.chunk.module.sharded_state_dict(metadata=_OPTIMIZER_METADATA)
    return {
        "model": model,
        "optimizer": job.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=_OPTIMIZER_METADATA
        ),
        "random": ShardedObject(
            "random", _random_state(runtime), (runtime.num_ranks,), (runtime.rank,)
        ),
    }


def _allocate_state(optimizer: Any) -> None:  # noqa: ANN401
    """Give a sharded optimizer its state, to be overwritten by the load.

    Without Transformer Engine or Apex, Megatron asks it for its step count before it has any.
    """
    for each in _sharded_parts(optimizer):
        if not each.optimizer.state:
            each._init_optimizer_states_with_dummy_values()


def _set_step_counts(optimizer: Any, step: int) -> None:  # noqa: ANN401
    """Give each parameter of a sharded optimizer the step count that its bias correction needs.

    Megatron does not save the counts of torch's AdamW in this form, and lets all parameters share
    one tensor, which then counts a step for each of them. No step is ever skipped here (there is
    no loss scale), so the count is the run's.
    """
    for each in _sharded_parts(optimizer):
        for state in each.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = torch.full_like(state["step"], step)


def _sharded_parts(optimizer: Any) -> list[DistributedOptimizer]:  # noqa: ANN401
    """The distributed optimizers in Megatron's optimizer: one for dense, one for expert weights."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each for each in parts if isinstance(each, DistributedOptimizer)]


def _random_state(runtime: Runtime) -> dict[str, Any]:
    """State of the generators that a step may draw from."""
    return {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if runtime.on_gpu else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_random_state(state: dict[str, Any], runtime: Runtime) -> None:
    """Put the generators where they were."""
    torch.set_rng_state(state["cpu"])
    if runtime.on_gpu:
        torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])
