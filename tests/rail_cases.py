"""Checks of the kernels over several domains against the specification, on one GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from kernel_world import check_plans, check_rows, check_sums, kernels_or_skip, routing_of
from torch import Tensor

from ep_dispatcher.bench.one_gpu import WorldShape
from ep_dispatcher.bench.one_gpu_spec import Round, make_round
from ep_dispatcher.bench.rail_world import RailPlan, RailWorld

WORLDS = [(2, 1), (2, 2), (2, 4), (4, 2), (4, 1), (8, 1)]  # domains, ranks of each


def new_rail_world(
    num_domains: int = 2,
    domain_size: int = 2,
    *,
    mutations: bool = False,
    net: str = "loop",
    num_blocks: int = 2,
    chaos_seed: int = 0,
    **sizes: Any,  # noqa: ANN401
) -> RailWorld:
    defaults: dict[str, Any] = {
        "ep_size": num_domains * domain_size, "num_experts": 16, "num_topk": 4, "hidden": 256,
        "max_tokens": 100, "output_bytes": 8 << 20, "timeout_s": 3.0,
    }  # fmt: skip
    kernels = kernels_or_skip("ep_kernels_mutated" if mutations else "ep_kernels")
    return RailWorld(
        WorldShape(**(defaults | sizes)),
        domain_size,
        kernels,
        net=net,
        num_blocks=num_blocks,
        chaos_seed=chaos_seed,
    )


def new_rail_round(
    world: RailWorld,
    kind: str = "duplicates",
    seed: int = 0,
    tokens: Sequence[int] | None = None,
    **options: Any,  # noqa: ANN401
) -> Round:
    shape = world.shape
    if tokens is None:
        tokens = [shape.max_tokens - 3 * rank for rank in range(shape.ep_size)]
    routing = routing_of(kind, tokens, shape.num_topk, shape.num_experts, seed)
    return make_round(world, routing, seed=seed, **options)


def rail_plan(world: RailWorld, work: Round, *, streams: bool = False) -> list[RailPlan]:
    """Run the kernels of a plan; nothing is checked."""
    plans = start_rail_plan(world, work, streams=streams)
    finish_rail_plan(world, work, plans, streams=streams)
    return plans


def start_rail_plan(world: RailWorld, work: Round, *, streams: bool = False) -> list[RailPlan]:
    """Run what brings the routing, and nothing that needs counts."""
    plans = [world.new_rail_plan(rank, *topk.shape) for rank, topk in enumerate(work.topk_idx)]
    world.launch("rail_exchange", _plan_calls(world, work, plans), streams=streams)
    return plans


def finish_rail_plan(
    world: RailWorld, work: Round, plans: Sequence[RailPlan], *, streams: bool = False
) -> None:
    """Run the rest of a plan's kernels."""
    world.launch("rail_counts", _plan_calls(world, work, plans), streams=streams)
    route = world.virtual_route_calls(plans, work.alignment, work.capacity_rows)
    world.launch("route", route, streams=streams)


def _plan_calls(world: RailWorld, work: Round, plans: Sequence[RailPlan]) -> list[Any]:
    return world.rail_plan_calls(plans, work.topk_idx, work.alignment, work.capacity_rows)


def rail_dispatch(
    world: RailWorld,
    work: Round,
    plans: Sequence[RailPlan],
    *,
    streams: bool = False,
    duplicate: int = 0,
    weights: bool = True,
    sent: bool = False,
) -> list[tuple[Tensor, Tensor | None]]:
    """Run dispatch into poisoned rows that start elsewhere on every rank.

    `sent`: `rail_send` has been launched for it.
    """
    outputs = world.new_outputs(work.rows, weights=weights, shift_bytes=512)
    topk_weights = work.topk_weights if weights else None
    calls = world.rail_dispatch_calls(
        plans, work.x, topk_weights, outputs, duplicate=duplicate, sent=sent
    )
    world.launch("rail_dispatch", calls, streams=streams)
    return outputs


def rail_combine(
    world: RailWorld,
    work: Round,
    plans: Sequence[RailPlan],
    *,
    streams: bool = False,
    grads: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run combine and the return into poisoned rows; behind them lie guards."""
    out = [_guarded(rows) for rows in work.x]
    weights_grad = [_guarded(weights) for weights in work.topk_weights]
    domains, returns = world.rail_combine_calls(
        plans,
        work.expert_out,
        out,
        work.row_grads if grads else None,
        weights_grad if grads else None,
    )
    world.launch("combine", domains, streams=streams)
    world.launch("rail_return", returns, streams=streams)
    _check_guards(out)
    _check_guards(weights_grad)
    return _unguarded(out), _unguarded(weights_grad)


def check_rail_round(world: RailWorld, work: Round, *, streams: bool = False) -> None:
    """Plan, dispatch and combine; each compared bit for bit."""
    plans = rail_plan(world, work, streams=streams)
    check_plans(world, work, plans)
    for duplicate in (0, 1):
        check_rows(work, rail_dispatch(world, work, plans, streams=streams, duplicate=duplicate))
        no_faults(world)
    check_sums(work, rail_combine(world, work, plans, streams=streams))
    no_faults(world)


def check_sent_round(world: RailWorld, work: Round, *, streams: bool = False) -> None:
    """As `check_rail_round`, with records that a launch of their own sends.

    So fewer blocks have to be on the GPU at once.
    """
    plans = rail_plan(world, work, streams=streams)
    check_plans(world, work, plans)
    sends = world.rail_send_calls(work.topk_idx, work.x, work.topk_weights)
    world.launch("rail_send", sends, streams=streams)
    check_rows(work, rail_dispatch(world, work, plans, streams=streams, sent=True))
    check_sums(work, rail_combine(world, work, plans, streams=streams))
    no_faults(world)


def late_epochs(world: RailWorld, epochs: int) -> Iterator[tuple[int, Round]]:
    """Nine rounds in turns; in every fifth epoch each rank is late by a time of its own.

    Args:
        world: with mutations, which bring the delays.
        epochs: how many.
    """
    kinds = ("uniform", "duplicates", "mostly_dropped")
    works = [new_rail_round(world, kind, seed) for seed in range(3) for kind in kinds]
    generator = torch.Generator().manual_seed(1)
    for epoch in range(epochs):
        most_us = 200 if epoch % 5 == 0 else 1
        delays = torch.randint(0, most_us, (len(world.contexts),), generator=generator).tolist()
        for context, delay in zip(world.contexts, delays, strict=True):
            context.test_delay_us = delay
        yield epoch, works[epoch * 7 % len(works)]


def wrong_elements(
    work: Round,
    rows: Sequence[tuple[Tensor, Tensor | None]],
    sums: tuple[Sequence[Tensor], Sequence[Tensor]],
) -> Tensor:
    """How many elements of a round's results differ in bits, on the GPU: nobody waits for it."""
    weights = [each for _, each in rows if each is not None]
    got = (*(each for each, _ in rows), *weights, *sums[0], *sums[1])
    want = (*work.recv_x, *work.recv_weights, *work.out, *work.weight_grads)
    return torch.stack(
        [(a.view(torch.int16) != b.view(torch.int16)).sum() for a, b in zip(got, want, strict=True)]
    ).sum()


def no_faults(world: RailWorld) -> None:
    torch.cuda.synchronize(world.device)
    for rank in range(world.shape.ep_size):
        fault = world.fault(rank)
        told = f"rank {rank}: {fault.rank} missed {fault.peer}, phase {fault.phase}"
        assert fault.filed == 0, f"{told}, channel {fault.channel}"


_GUARD_ROWS = 8


def _guarded(like: Tensor) -> Tensor:
    rows = torch.full(
        (len(like) + _GUARD_ROWS, *like.shape[1:]),
        float("nan"),
        dtype=like.dtype,
        device=like.device,
    )
    rows[len(like) :] = 77.0
    return rows


def _check_guards(tensors: Sequence[Tensor]) -> None:
    """One wait for all ranks."""
    kept = torch.stack([(rows[-_GUARD_ROWS:] == 77.0).all() for rows in tensors]).tolist()
    assert all(kept), f"rank {kept.index(False)}: stored past its tokens"


def _unguarded(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [rows[:-_GUARD_ROWS] for rows in tensors]
