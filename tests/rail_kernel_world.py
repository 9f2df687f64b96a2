"""Checks of the rails' kernels against the specification: all domains in one process on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from kernel_world import kernels_or_skip, routing_of
from torch import Tensor

from ep_dispatcher.bench.one_gpu import WorldShape
from ep_dispatcher.bench.one_gpu_spec import Round, assert_same_bits
from ep_dispatcher.bench.rail_world import RailPlan, RailShape, RailWorld


def new_world(
    num_domains: int = 2,
    domain_size: int = 2,
    *,
    net: str = "loop",
    chaos_seed: int = 0,
    num_blocks: int = 1,
    mutations: bool = False,
    **sizes: Any,  # noqa: ANN401
) -> RailWorld:
    """A small world; test builds of the kernels where switches or counters are needed."""
    defaults: dict[str, Any] = {
        "ep_size": num_domains * domain_size, "num_experts": 16, "num_topk": 4, "hidden": 256,
        "max_tokens": 100, "num_channels": 4, "timeout_s": 2.0,
    }  # fmt: skip
    kernels = kernels_or_skip("ep_kernels_mutated" if mutations else "ep_kernels")
    rails = RailShape(
        num_domains=num_domains, num_blocks=num_blocks, net=net, chaos_seed=chaos_seed
    )
    return RailWorld(WorldShape(**(defaults | sizes)), rails, kernels)


def new_round(world: RailWorld, kind: str = "duplicates", seed: int = 0, **options: int) -> Round:
    """Unequal numbers of tokens, one rank without any where there are many."""
    shape = world.shape
    tokens = [max(0, shape.max_tokens - 14 * rank) for rank in range(shape.ep_size)]
    routing = routing_of(kind, tokens, shape.num_topk, shape.num_experts, seed)
    return world.make_round(routing, seed=seed, **options)


def new_plans(world: RailWorld, work: Round) -> list[RailPlan]:
    return [world.new_plan(rank, *topk.shape) for rank, topk in enumerate(work.topk_idx)]


def plan(world: RailWorld, work: Round, *, streams: bool = False) -> list[RailPlan]:
    """Run the kernels of a plan; nothing is checked."""
    plans = new_plans(world, work)
    rails, routes = world.plan_calls(plans, work.topk_idx, work.alignment, work.capacity_rows)
    _launch(
        world, {"rail_exchange": rails, "rail_counts": rails, "route": routes}, streams=streams
    )
    return plans


def _launch(world: RailWorld, calls: dict[str, list[Any]], *, streams: bool) -> None:
    if streams:
        world.fork()
    for name, ranks in calls.items():
        world.launch(name, ranks, streams=streams)
    if streams:
        world.join()


def check_plans(world: RailWorld, work: Round, plans: Sequence[RailPlan]) -> None:
    """Every field that Python sees equals the specification."""
    torch.cuda.synchronize(world.device)
    for rank, (got, expected) in enumerate(zip(plans, work.plans, strict=True)):
        fault = world.fault(rank)
        assert fault.filed == 0, f"rank {rank} misses {fault.peer}, phase {fault.phase}"
        for name in ("dst_rank", "dst_row", "counts"):
            assert_same_bits(
                f"rank {rank} {name}", getattr(got, name).long(), getattr(expected, name).long()
            )
        for name in ("tokens_per_expert", "padded_tokens_per_expert", "expert_offsets"):
            assert_same_bits(
                f"rank {rank} {name}", got.tensors[name].long(), getattr(expected, name).long()
            )
        letter = world.mailbox(got)
        assert letter.demand_rows == expected.demand_rows
        assert (letter.bad_token, letter.refused_rank) == (-1, -1)


def dispatch(
    world: RailWorld,
    work: Round,
    plans: Sequence[RailPlan],
    *,
    streams: bool = False,
    duplicate: int = 0,
    shift_bytes: int = 512,
) -> list[tuple[Tensor, Tensor]]:
    """Run dispatch into poisoned rows that start elsewhere on every rank."""
    outputs = world.new_outputs(work.rows, shift_bytes=shift_bytes)
    calls = world.dispatch_calls(plans, work.x, work.topk_weights, outputs, duplicate)
    _launch(world, {"rail_dispatch": calls}, streams=streams)
    return outputs


def check_rows(work: Round, outputs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Rows and weights equal the specification, padding included."""
    for rank, (recv_x, recv_weights) in enumerate(outputs):
        assert_same_bits(f"rank {rank} recv_x", recv_x, work.recv_x[rank])
        assert_same_bits(f"rank {rank} recv_weights", recv_weights, work.recv_weights[rank])


def combine(
    world: RailWorld, work: Round, plans: Sequence[RailPlan], *, streams: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Run combine and the return of sums into poisoned rows."""
    out = [torch.full_like(rows, float("nan")) for rows in work.x]
    grads = [torch.full_like(weights, float("nan")) for weights in work.topk_weights]
    combines, returns = world.combine_calls(plans, work.expert_out, out, work.row_grads, grads)
    _launch(world, {"combine": combines, "rail_return": returns}, streams=streams)
    return out, grads


def check_sums(work: Round, result: tuple[list[Tensor], list[Tensor]]) -> None:
    """Sums and gradients of weights equal the specification."""
    for rank, (out, grads) in enumerate(zip(*result, strict=True)):
        assert_same_bits(f"rank {rank} out", out, work.out[rank])
        assert_same_bits(f"rank {rank} weight_grads", grads, work.weight_grads[rank])


def check_round(
    world: RailWorld, work: Round, *, streams: bool = False, duplicate: int = 0
) -> None:
    """Plan, dispatch and combine of one round equal the specification."""
    plans = plan(world, work, streams=streams)
    check_plans(world, work, plans)
    rows = dispatch(world, work, plans, streams=streams, duplicate=duplicate)
    check_faults(world)
    check_rows(work, rows)
    sums = combine(world, work, plans, streams=streams)
    check_faults(world)
    check_sums(work, sums)


def check_faults(world: RailWorld) -> None:
    """Nobody has filed a fault."""
    torch.cuda.synchronize(world.device)
    for rank in range(world.shape.ep_size):
        fault = world.fault(rank)
        assert fault.filed == 0, (
            f"rank {rank} misses {fault.peer}, phase {fault.phase}, channel {fault.channel}: "
            f"{fault.seen} of {fault.expected}"
        )
