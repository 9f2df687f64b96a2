"""The training loop of one rank.

Import it after `runtime.open_runtime`, like `model`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from ep_dispatcher.accounting import Scheme
from ep_dispatcher.config import DTYPE_BYTES
from ep_dispatcher.errors import EpError, EpTimeoutError
from ep_dispatcher.group import EPGroup
from ep_dispatcher.megatron.plugin import dispatchers_of
from ep_dispatcher.train.checkpoint import Checkpoints
from ep_dispatcher.train.config import TrainConfig
from ep_dispatcher.train.data import BatchKey, Corpus
from ep_dispatcher.train.metrics import MetricsFile, StepMetrics
from ep_dispatcher.train.model import OURS, Job, build_job, learning_rate
from ep_dispatcher.train.observe import Layout, RouterObserver, max_over_mean
from ep_dispatcher.train.progress import Progress, Summary
from ep_dispatcher.train.record import recorded_routing
from ep_dispatcher.train.runtime import Runtime

Batch = dict[str, Tensor]


def train(config: TrainConfig, corpus: Corpus, runtime: Runtime) -> Summary:
    """Train to `train.steps`, from the newest checkpoint if there is one; collective.

    Raises:
        EpError: a config or checkpoint that cannot work; the same on all ranks.
    """
    job = build_job(config, runtime)
    try:
        summary = _run_steps(config, corpus, runtime, job)
    except BaseException:
        job.close(failed=True)
        raise
    job.close()
    return summary


def _run_steps(config: TrainConfig, corpus: Corpus, runtime: Runtime, job: Job) -> Summary:
    """Run the steps that are left."""
    checkpoints = Checkpoints(config, corpus, runtime)
    done = checkpoints.load_latest(job)
    folder = Path(config.train.out_dir)
    metrics = MetricsFile(folder, done) if runtime.is_first else None
    trainer = Trainer(config, corpus, runtime, job)
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    with (
        recorded_routing(config, job.chunk, ep_rank),
        Progress(config, runtime, done, metrics.kept if metrics else []) as progress,
    ):
        for step in range(done, config.train.steps):
            line = trainer.step(step)
            if line is not None and metrics is not None:
                metrics.append(line)
                progress.show(line)
            is_last = step + 1 == config.train.steps
            every = config.train.checkpoint_every
            saves = every > 0 and ((step + 1) % every == 0 or is_last)
            if saves or is_last:
                check_groups(job, runtime)
            if saves:
                checkpoints.save(job, step + 1)
    return progress.summary()


def check_groups(job: Job, runtime: Runtime) -> None:
    """Raise on every rank if a group of any rank has met a fault so far; collective.

    No call waits for its kernels, and those of a fault leave gradients unwritten: what came of
    them must not be saved.

    Raises:
        EpTimeoutError, EpError: what this rank's group met, see `EPGroup.check`.
        RuntimeError: another rank's group met something; names the first rank and says what.
    """
    if job.plugin is None:
        return
    if runtime.on_gpu:
        torch.cuda.synchronize()
    own: EpError | EpTimeoutError | None = None
    try:
        for group in groups_of(job):
            group.check()
    except (EpError, EpTimeoutError) as met:
        own = met
    told: list[str | None] = [None] * runtime.num_ranks
    dist.all_gather_object(told, None if own is None else str(own))
    if own is not None:
        raise own
    for rank, text in enumerate(told):
        if text is not None:
            raise RuntimeError(
                f"the group of rank {rank} met a fault, so no steps since the last checkpoint are "
                f"saved: {text}"
            )


class Trainer:
    """Runs optimizer steps and sums up what they showed.

    Args:
        config: of the run.
        corpus: its text.
        runtime: this rank.
        job: model and optimizer.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, runtime: Runtime, job: Job) -> None:
        """Hook the routers."""
        self._config = config
        self._corpus = corpus
        self._runtime = runtime
        self._job = job
        self._run: Callable[..., list[dict[str, Tensor]]] = get_forward_backward_func()

    def step(self, step: int) -> StepMetrics | None:
        """Run optimizer step `step`, from 0; collective.

        Returns:
            The metrics, on the first rank, if the step is one that is logged.
        """
        train = self._config.train
        logged = (step + 1) % train.log_every == 0 or step + 1 == train.steps
        with RouterObserver(self._job.chunk, self._layout()) as observer:
            observer.active = logged
            started = time.perf_counter()
            results, grad_norm = self._optimize(step)
            if not logged:
                return None
            totals = self._sum_over_ranks(results, observer.take(self._scheme()))
        step_s = time.perf_counter() - started
        load, inside, across = observer.split(totals[2:])
        tokens = self._config.tokens_per_step
        return StepMetrics(
            step=step + 1,
            loss=float(totals[0] / totals[1]),
            grad_norm=None if grad_norm is None else float(grad_norm),
            learning_rate=learning_rate(train, step),
            tokens=tokens,
            tokens_per_s=round(tokens / step_s, 1),
            step_s=round(step_s, 4),
            tokens_per_expert=load.long().tolist(),
            load_max_over_mean=round(max_over_mean(load), 4),
            moved_bytes=inside + across,
            across_bytes=across,
        )

    def run_unlogged(self, step: int) -> None:
        """Run optimizer step `step` and look at nothing, as that would wait for the GPU."""
        self._optimize(step)

    def _optimize(self, step: int) -> tuple[list[dict[str, Tensor]], Any]:
        """Gradients and a step of the optimizer; returns the losses and the gradient's norm."""
        results = self.run_gradients(step)
        for group in self._job.optimizer.param_groups:
            group["lr"] = learning_rate(self._config.train, step)
        _, grad_norm, _ = self._job.optimizer.step()
        return results, grad_norm

    def run_gradients(self, step: int) -> list[dict[str, Tensor]]:
        """Run all micro-batches of a step and leave the weights as they are.

        Returns the losses of the micro-batches, on the last pipeline stage.
        """
        config = self._config
        self._job.chunk.zero_grad_buffer()
        self._job.optimizer.zero_grad()
        return self._run(
            forward_step_func=functools.partial(_forward_step, overlap=config.train.overlap),
            data_iterator=self._batches(step),
            model=[self._job.chunk],
            num_microbatches=config.train.num_micro_batches,
            seq_length=config.model.seq_length,
            micro_batch_size=config.train.micro_batch,
            forward_only=False,
        )

    def _batches(self, step: int) -> Iterator[Batch]:
        """The micro-batches of a step for this rank, on its device."""
        train, length = self._config.train, self._config.model.seq_length
        device = self._runtime.device
        positions = torch.arange(length, device=device).expand(train.micro_batch, length)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
        data_rank = parallel_state.get_data_parallel_rank()
        for index in range(train.num_micro_batches):
            key = BatchKey(train.seed, step, data_rank, index)
            tokens, labels = self._corpus.batch(key, train.micro_batch, length)
            yield {
                "input_ids": tokens.to(device),
                "position_ids": positions,
                "attention_mask": mask,
                "labels": labels.to(device),
            }

    def _sum_over_ranks(self, results: list[dict[str, Tensor]], observed: Tensor) -> Tensor:
        """Sum of losses, their number, and what the observers counted, in one exchange."""
        losses = [float(result["loss"]) for result in results]
        own = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
        totals = torch.cat([own, observed]).to(self._runtime.device)
        dist.all_reduce(totals)
        return totals.cpu()

    def _layout(self) -> Layout:
        """What the observer counts with."""
        model = self._config.model
        return Layout(
            num_layers=model.num_layers,
            num_experts=model.num_experts,
            row_bytes=model.hidden * DTYPE_BYTES[model.dtype],
            ep_rank=_rank_in_group(),
            expert_tensor=self._config.parallel.expert_tensor,
            topology=self._config.topology(),
        )

    def _scheme(self) -> Scheme | Literal["everywhere"]:
        """What the dispatcher at work sends once.

        The reference tier sends a token straight to each rank that needs it; the device tier
        sends it once to each domain.
        """
        dispatcher = self._config.train.dispatcher
        if dispatcher != OURS:
            return "by_copy" if dispatcher == "alltoall" else "everywhere"
        return "deduplicated" if "device" in tiers_of(self._job) else "by_rank"


def tiers_of(job: Job) -> set[str]:
    """Tiers of our dispatcher's groups that are open; none before the first step."""
    return {group.tier for group in groups_of(job)}


def groups_of(job: Job) -> set[EPGroup]:
    """Groups of our dispatcher that are open; none before the first step."""
    managers = [getattr(each, "_comm_manager", None) for each in dispatchers_of([job.chunk])]
    return {group for each in managers for group in getattr(each, "_groups", {}).values()}


def _rank_in_group() -> int:
    """This rank in the dispatcher's group."""
    return dist.get_rank(parallel_state.get_expert_tensor_and_model_parallel_group())


def _forward_step(
    batches: Iterator[Batch],
    model: Any,  # noqa: ANN401
    return_schedule_plan: bool = False,
    *,
    overlap: bool = False,
) -> tuple[Any, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    """One micro-batch, in the form that Megatron's schedules call."""
    batch = next(batches)
    if return_schedule_plan:
        assert overlap
        return get_attr_wrapped_model(model, "build_schedule_plan")(**batch), _mean_loss
    return model(**batch), _mean_loss


def _mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean over the tokens; the copy is for us, as the schedule scales the loss in place."""
    mean = losses.float().mean()
    return mean, {"loss": mean.detach().clone()}
