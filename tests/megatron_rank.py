"""One rank of the parity runs (`megatron_world.py`): builds, trains and compares."""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import multiprocessing
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ep_dispatcher.megatron import cpu_standins

cpu_standins.install()

import megatron.core  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.utils import get_attr_wrapped_model  # noqa: E402
from megatron_cases import CASES, Case  # noqa: E402
from megatron_world import NUM_RANKS, OUTCOMES, Outcome, as_json  # noqa: E402
from torch import Tensor  # noqa: E402

from ep_dispatcher.megatron.plugin import (  # noqa: E402
    EpPlugin,
    dispatchers_of,
    swap_dispatchers,
    with_ep_dispatcher,
)

VOCABULARY = 64
SEQUENCE = 16
MICRO_BATCH = 2
NUM_LAYERS = 2
HIDDEN = 32
LEARNING_RATE = 3e-3
_CHECKS_A_WORLD = 6  # in one set of processes: gloo slows down with every group
Trained = tuple[list[float], Tensor, list[str]]  # see `train`
_PEER_TIMEOUT_S = 60  # then ranks whose peer failed give up


class ParallelNorm(torch.nn.LayerNorm):
    """A LayerNorm that Megatron accepts under sequence parallelism; its own torch norm refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:  # noqa: ANN401
        """Mark the weights as replicated, so that their gradients are summed over the TP ranks."""
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010


def fork_ranks(arguments: argparse.Namespace) -> None:
    """Run a few cases or checks at a time on ranks of their own; status 1 where one failed.

    Cases that have the same run of Megatron's dispatcher share the ranks, and that run.
    """
    if arguments.checks:
        names = arguments.checks.split(",")
        parts = [
            names[first : first + _CHECKS_A_WORLD]
            for first in range(0, len(names), _CHECKS_A_WORLD)
        ]
    else:
        by_reference: dict[str, list[str]] = {}
        cases = {case.name: case for case in CASES}
        for name in arguments.cases.split(","):
            by_reference.setdefault(cases[name].reference_run, []).append(name)
        parts = [*by_reference.values()]
    context = multiprocessing.get_context("fork")  # this process has no threads, only imports
    for part in parts:
        ranks = [
            context.Process(target=_run_rank, args=(arguments, part, rank))
            for rank in range(NUM_RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(1)


def _run_rank(arguments: argparse.Namespace, names: Sequence[str], rank: int) -> None:
    """Run a case, or checks, as one of the ranks; rank 0 writes what came of them."""
    folder: Path = arguments.ranks_in
    with (
        (folder / f"rank{rank}.log").open("a") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(folder / names[0]), NUM_RANKS),
                rank=rank,
                world_size=NUM_RANKS,
                timeout=datetime.timedelta(seconds=_PEER_TIMEOUT_S),
            )
            lines = _run_checks(names) if arguments.checks else _run_cases(names, arguments.steps)
            for line in lines:
                if rank == 0:
                    with (folder / OUTCOMES).open("a") as file:
                        file.write(json.dumps(line) + "\n")
            dist.destroy_process_group()
        except BaseException:
            traceback.print_exc()
            raise


def _run_cases(names: Sequence[str], steps: int) -> Iterator[dict[str, Any]]:
    """Run cases that share a run of Megatron's dispatcher; yields the outcomes."""
    cases = {case.name: case for case in CASES}
    reference = None
    for name in names:
        outcome, reference = compare(cases[name], steps, reference)
        yield as_json(outcome)
        dist.barrier()


def _run_checks(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run each check; yields its name and the traceback of the first rank that it failed on."""
    from megatron_checks import CHECKS as CHECKS_OF_DISPATCHER
    from megatron_overlap_checks import CHECKS as CHECKS_OF_OVERLAP

    checks = CHECKS_OF_DISPATCHER | CHECKS_OF_OVERLAP
    for name in names:
        error = ""
        try:
            checks[name]()
        except Exception:  # noqa: BLE001  # reported by the test of this check
            error = traceback.format_exc()
            sys.stderr.write(error)  # the exchange below fails if others are still in the check
        errors: list[str | None] = [None] * NUM_RANKS
        dist.all_gather_object(errors, error)
        yield {"check": name, "error": next((found for found in errors if found), "")}


def compare(case: Case, steps: int, reference: Trained | None) -> tuple[Outcome, Trained]:
    """Train with both dispatchers from the same seed and compare losses and parameters.

    Args:
        case: layout and options.
        steps: optimizer steps.
        reference: what Megatron's dispatcher gave in a case with the same `reference_run`, if any.

    Returns:
        The outcome, and what Megatron's dispatcher gave.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )
    started = time.monotonic()
    if reference is None:
        reference = train(case, steps, None)
    theirs, their_parameters, _ = reference
    with EpPlugin.from_section(case.section) as plugin:
        ours, our_parameters, dispatchers = train(case, steps, plugin)
    difference = (our_parameters - their_parameters).abs().max().double()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    parallel_state.destroy_model_parallel()
    outcome = Outcome(
        case=case.name,
        versions={
            "megatron_core": megatron.core.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        losses=ours,
        reference_losses=theirs,
        max_param_difference=float(difference),
        dispatchers=dispatchers,
        seconds=round(time.monotonic() - started, 2),
    )
    return outcome, reference


def train(case: Case, steps: int, plugin: EpPlugin | None) -> Trained:
    """Train; returns the losses, all parameters of this rank, and the dispatchers it ran with.

    Args:
        case: layout and options.
        steps: optimizer steps.
        plugin: None for Megatron's dispatcher.
    """
    torch.manual_seed(123)
    model_parallel_cuda_manual_seed(123)
    config = make_config(case, overlap=case.overlap and plugin is not None)
    stages = range(case.vpp) if case.vpp > 1 else [None]
    modules = [make_model(case, config, plugin, stage) for stage in stages]
    seen = check_dispatchers(case, modules, plugin)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=case.distributed_optimizer,
        overlap_grad_reduce=case.overlap_grad_reduce,
    )
    chunks = [DistributedDataParallel(config, ddp, module) for module in modules]
    config.finalize_model_grads_func = finalize_model_grads
    if case.overlap_grad_reduce:
        assert len(chunks) == 1
        config.no_sync_func = chunks[0].no_sync
    losses = list(_steps(case, config, chunks, steps))
    for dispatcher in dispatchers_of(chunks) if plugin else []:
        assert dispatcher._comm_manager.is_idle, "routing was kept after the step"
    parameters = [p.detach().float().flatten() for chunk in chunks for p in chunk.parameters()]
    return losses, torch.cat(parameters), seen


def make_config(case: Case, *, overlap: bool) -> TransformerConfig:
    """Megatron's config for a case; its dispatcher is the reference until a plug-in changes it."""
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    fields: dict[str, Any] = {
        "num_layers": NUM_LAYERS * case.vpp,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": 2 * HIDDEN,
        "num_moe_experts": case.num_experts,
        "moe_router_topk": case.num_topk,
        "moe_token_dispatcher_type": case.reference,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_router_dtype": "fp32",
        "tensor_model_parallel_size": case.tp,
        "sequence_parallel": case.tp > 1,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp if case.vpp > 1 else None,
        # Chunks in turns on two stages: a batch of sends and receives would mix up activations and
        # gradients, as both neighbours are the same rank (Megatron's own launcher refuses that).
        "overlap_p2p_comm": case.vpp > 1,
        "batch_p2p_comm": case.vpp == 1,
        "pipeline_dtype": dtype,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "bf16": case.bf16,
        "params_dtype": dtype,
        "use_cpu_initialization": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "overlap_moe_expert_parallel_comm": overlap,
    }
    return TransformerConfig(**(fields | case.settings))


def make_model(
    case: Case, config: TransformerConfig, plugin: EpPlugin | None, stage: int | None
) -> torch.nn.Module:
    """A chunk of this pipeline rank, with our dispatcher where there is a plug-in.

    Args:
        case: layout and options.
        config: Megatron's.
        plugin: None for Megatron's dispatcher.
        stage: virtual pipeline stage; None where the rank has one chunk.
    """
    layers = []
    for _ in range(NUM_LAYERS // case.pp):
        layer = get_gpt_layer_local_spec(num_experts=case.num_experts, moe_grouped_gemm=False)
        layer.submodules.input_layernorm = ParallelNorm
        layer.submodules.pre_mlp_layernorm = ParallelNorm
        layers.append(layer)
    spec = TransformerBlockSubmodules(layer_specs=layers, layer_norm=ParallelNorm)
    if plugin is not None and case.form == "spec":
        spec = with_ep_dispatcher(spec, plugin)
    model: torch.nn.Module = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        parallel_output=True,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
    )
    if plugin is not None and case.form == "swap":
        swap_dispatchers([model], plugin)
    CHANGES[case.change](model)
    return Float16Module(config, model) if case.bf16 else model


def check_dispatchers(
    case: Case, chunks: list[torch.nn.Module], plugin: EpPlugin | None
) -> list[str]:
    """Names of the dispatchers in a model, after asserting that they are those asked for."""
    names = [type(dispatcher).__name__ for dispatcher in dispatchers_of(chunks)]
    wanted = {"alltoall": "MoEAlltoAllTokenDispatcher", "allgather": "MoEAllGatherTokenDispatcher"}
    expected = wanted[case.reference] if plugin is None else "EpDispatcher"
    assert names == [expected] * (NUM_LAYERS * case.vpp // case.pp), names
    return names


def pad_for_quantization(model: torch.nn.Module) -> None:
    """Make dispatchers pad as for FP8 experts, without FP8 arithmetic, which a CPU lacks."""
    for dispatcher in dispatchers_of([model]):
        config = copy.copy(dispatcher.config)
        config.fp8, config.fp8_recipe = "e4m3", "delayed"
        config.moe_router_padding_for_quantization = True
        dispatcher.config = config
        if hasattr(dispatcher, "_comm_manager"):
            dispatcher._comm_manager.config = config


def drop_some_routes(model: torch.nn.Module) -> None:
    """Leave every third token with one expert and every fifth with none, as padding tokens have."""

    def drop(_module: object, _inputs: object, output: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        probs, routing_map = output
        tokens = torch.arange(len(routing_map))
        second = routing_map.cumsum(1) > 1
        dropped = (second & (tokens % 3 == 0).unsqueeze(1)) | (tokens % 5 == 0).unsqueeze(1)
        return probs.masked_fill(dropped, 0), routing_map & ~dropped

    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.router.register_forward_hook(drop)


def take_other_identity(model: torch.nn.Module) -> None:
    """Tell Megatron's schedules the name of another backend than the one that ours stands for."""
    for dispatcher in dispatchers_of([model]):
        dispatcher.config.moe_flex_dispatcher_backend = "another"


CHANGES: dict[str, Callable[[torch.nn.Module], None]] = {
    "none": lambda _model: None,
    "quantization_padding": pad_for_quantization,
    "fewer_experts": drop_some_routes,
    "other_identity": take_other_identity,
}


def _steps(
    case: Case, config: TransformerConfig, chunks: list[DistributedDataParallel], steps: int
) -> Iterator[float]:
    """Run optimizer steps; yields the loss of each, averaged over the data-parallel ranks."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            bf16=case.bf16,
            clip_grad=0.0,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=case.distributed_optimizer,
        ),
        chunks,
    )
    for parameters in optimizer.param_groups:
        parameters["lr"] = LEARNING_RATE
    run = get_forward_backward_func()
    for step in range(steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batches = [_batch(step, index) for index in range(case.num_microbatches)]
        iterators = [iter(batches) for _ in chunks]
        results = run(
            forward_step_func=_forward_step,
            data_iterator=iterators if case.vpp > 1 else iterators[0],
            model=chunks,
            num_microbatches=case.num_microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        optimizer.step()
        # Only the last pipeline stage has losses; the others add zero.
        total = sum((result["loss"] for result in results), torch.zeros(()))
        dist.all_reduce(total)
        yield float(total) * case.pp / NUM_RANKS / case.num_microbatches


def _batch(step: int, microbatch: int) -> dict[str, Tensor]:
    """Tokens that mostly follow an affine rule, so that there is something to learn."""
    data_rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(step * 1000 + microbatch * 10 + data_rank)
    tokens = [torch.randint(VOCABULARY, (MICRO_BATCH,), generator=generator)]
    for _ in range(SEQUENCE):
        noise = torch.randint(VOCABULARY, (MICRO_BATCH,), generator=generator)
        keep = torch.rand(MICRO_BATCH, generator=generator) > 0.05
        tokens.append(torch.where(keep, (tokens[-1] * 5 + 7) % VOCABULARY, noise))
    text = torch.stack(tokens, 1)
    return {
        "input_ids": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "position_ids": torch.arange(SEQUENCE).expand(MICRO_BATCH, SEQUENCE),
        "attention_mask": torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool(),
    }


def _forward_step(
    batches: Iterator[dict[str, Tensor]],
    model: Any,  # noqa: ANN401
    return_schedule_plan: bool = False,
) -> tuple[Any, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    """Megatron's forward step: the output (or the plan of the combined schedule) and the loss."""

    def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place

    batch = next(batches)
    if return_schedule_plan:
        return get_attr_wrapped_model(model, "build_schedule_plan")(**batch), loss_of
    return model(**batch), loss_of
