"""Checks of the kernels against the specification, all ranks in one process on one GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from ep_dispatcher.bench.one_gpu import KernelPlan, OneGpuWorld, WorldShape, load_kernels
from ep_dispatcher.bench.one_gpu_spec import Round, assert_same_bits, make_round
from ep_dispatcher.errors import UnavailableError

# Small enough for compute-sanitizer (scripts/gpu_tests.sh): of each kind of test some or all cases.
# Cases that take an ordering claim away are not: their data is wrong on purpose.
small = pytest.mark.sanitize


def with_small(values: Sequence[object], chosen: Sequence[object]) -> list[object]:
    """Cases, of which the chosen ones are small enough for compute-sanitizer."""
    return [pytest.param(value, marks=small) if value in chosen else value for value in values]


def route(world: OneGpuWorld, work: Round, *, streams: bool = False) -> list[KernelPlan]:
    """Run the route kernel; nothing is checked."""
    plans = [world.new_plan(rank, *topk.shape) for rank, topk in enumerate(work.topk_idx)]
    calls = world.route_calls(plans, work.topk_idx, work.alignment, work.capacity_rows)
    world.launch("route", calls, streams=streams)
    return plans


def check_plans(world: OneGpuWorld, work: Round, plans: Sequence[Any]) -> None:
    """Every field of every rank's plan equals the specification."""
    torch.cuda.synchronize(world.device)
    for rank, (plan, expected) in enumerate(zip(plans, work.plans, strict=True)):
        for name in ("dst_rank", "dst_row", "counts", "tokens_per_expert",
                     "padded_tokens_per_expert", "expert_offsets"):  # fmt: skip
            assert_same_bits(
                f"rank {rank} {name}", plan[name].long(), getattr(expected, name).long()
            )
        letter = world.mailbox(plan)
        assert letter.ticket != 0
        assert letter.demand_rows == expected.demand_rows
        assert letter.num_rows == min(expected.demand_rows, expected.num_recv_rows)
        assert plan["totals"][:2].tolist() == [letter.num_rows, letter.demand_rows]
        assert (letter.bad_token, letter.refused_rank) == (-1, -1)
        assert world.fault(rank).filed == 0


def dispatch(
    world: OneGpuWorld,
    work: Round,
    plans: Sequence[KernelPlan],
    *,
    streams: bool = False,
    duplicate: int = 0,
    shift_bytes: int = 512,
) -> list[tuple[Tensor, Tensor | None]]:
    """Run the dispatch kernel into poisoned rows that start elsewhere on every rank."""
    outputs = world.new_outputs(work.rows, weights=True, shift_bytes=shift_bytes)
    calls = world.dispatch_calls(plans, work.x, work.topk_weights, outputs, duplicate)
    world.launch("dispatch", calls, streams=streams)
    return outputs


def check_rows(work: Round, outputs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Rows and weights equal the specification, padding included."""
    for rank, (recv_x, recv_weights) in enumerate(outputs):
        assert recv_weights is not None
        assert_same_bits(f"rank {rank} recv_x", recv_x, work.recv_x[rank])
        assert_same_bits(f"rank {rank} recv_weights", recv_weights, work.recv_weights[rank])


FORMS = ("push", "gather")


def combine(
    world: OneGpuWorld,
    work: Round,
    plans: Sequence[KernelPlan],
    *,
    streams: bool = False,
    form: str = "push",
    shift_bytes: int = 512,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a combine kernel into poisoned rows, from rows that start elsewhere on every rank."""
    out = [torch.full_like(rows, float("nan")) for rows in work.x]
    grads = [torch.full_like(weights, float("nan")) for weights in work.topk_weights]
    rows, row_grads = work.expert_out, work.row_grads
    if form == "gather":
        rows, row_grads = world.place_rows(rows, row_grads, shift_bytes=shift_bytes)
    calls = world.combine_calls(plans, rows, out, row_grads, grads, form)
    world.launch("combine", calls, streams=streams)
    return out, grads


def check_sums(work: Round, result: tuple[list[Tensor], list[Tensor]]) -> None:
    """Sums and the weights' gradients equal the specification."""
    for rank, (out, grads) in enumerate(zip(*result, strict=True)):
        assert_same_bits(f"rank {rank} out", out, work.out[rank])
        assert_same_bits(f"rank {rank} weights_grad", grads, work.weight_grads[rank])


def set_timeout(world: OneGpuWorld, timeout_s: float) -> None:
    """Deadline of the launches from now on; a round before it may take a sanitizer's time."""
    for context in world.contexts:
        context.timeout_ns = int(timeout_s * 1e9)


def check_round(world: OneGpuWorld, work: Round, *, streams: bool = False) -> None:
    """Plan, dispatch and combine in both ways; each compared bit for bit."""
    plans = route(world, work, streams=streams)
    check_plans(world, work, plans)
    for duplicate in (0, 1):
        check_rows(work, dispatch(world, work, plans, streams=streams, duplicate=duplicate))
    for form in FORMS:
        check_sums(work, combine(world, work, plans, streams=streams, form=form))


def uniform(tokens: int, num_topk: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Each token's experts are distinct and any of them."""
    return torch.rand(tokens, num_experts, generator=generator).topk(num_topk).indices


def skewed(tokens: int, num_topk: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Low experts are far more likely."""
    scores = torch.rand(tokens, num_experts, generator=generator)
    return (scores + 3.0 / (1 + torch.arange(num_experts))).topk(num_topk).indices


def all_to_one(tokens: int, num_topk: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Every token takes the last experts, in the same order."""
    del generator
    return torch.arange(num_experts - num_topk, num_experts).expand(tokens, num_topk).contiguous()


def duplicates(tokens: int, num_topk: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """A token may take an expert several times, and slots are dropped."""
    return torch.randint(-1, num_experts, (tokens, num_topk), generator=generator)


def mostly_dropped(
    tokens: int, num_topk: int, num_experts: int, generator: torch.Generator
) -> Tensor:
    """Most slots are dropped, so many tokens go nowhere."""
    routing = uniform(tokens, num_topk, num_experts, generator)
    return routing.masked_fill(torch.rand(routing.shape, generator=generator) < 0.8, -1)


ROUTINGS: dict[str, Callable[[int, int, int, torch.Generator], Tensor]] = {
    "uniform": uniform,
    "skewed": skewed,
    "all_to_one": all_to_one,
    "duplicates": duplicates,
    "mostly_dropped": mostly_dropped,
}


def routing_of(
    kind: str, tokens: Sequence[int], num_topk: int, num_experts: int, seed: int = 0
) -> list[Tensor]:
    """[T, K] of each rank, T from `tokens`."""
    generator = torch.Generator().manual_seed(seed)
    return [ROUTINGS[kind](count, num_topk, num_experts, generator) for count in tokens]


def kernels_or_skip(name: str = "ep_kernels") -> Any:  # noqa: ANN401
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    try:
        return load_kernels(name)
    except UnavailableError as error:
        pytest.skip(str(error))


def new_world(mutations: bool = False, **sizes: Any) -> OneGpuWorld:  # noqa: ANN401
    defaults: dict[str, Any] = {
        "ep_size": 4, "num_experts": 16, "num_topk": 4, "hidden": 256, "max_tokens": 128,
    }  # fmt: skip
    kernels = kernels_or_skip("ep_kernels_mutated" if mutations else "ep_kernels")
    return OneGpuWorld(WorldShape(**(defaults | sizes)), kernels)


def new_round(world: OneGpuWorld, kind: str = "duplicates", seed: int = 0, **options: Any) -> Round:  # noqa: ANN401
    shape = world.shape
    tokens = [shape.max_tokens - 3 * rank for rank in range(shape.ep_size)]
    routing = routing_of(kind, tokens, shape.num_topk, shape.num_experts, seed)
    return make_round(world, routing, seed=seed, **options)


class Faults(Protocol):
    """A world whose ranks may have filed faults."""

    contexts: list[Any]

    def fault(self, rank: int) -> Any:  # noqa: ANN401
        """The fault of a rank."""


# Beyond the deadline, until a launch has told whom it lacks. scripts/gpu_tests.sh sets the variable
# under compute-sanitizer, which slows everything.
GRACE_S = 2.8 if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ else 1.0


def check_all_name(
    world: Faults, absent: int, phases: set[int], began_s: float, deadline_s: float
) -> None:
    """Every rank below `absent` files a fault that names it, in time; kernels may still run.

    Only for launches in which each wait that cannot end is for that rank: a rank that a peer has
    told before its own deadline repeats what the peer waited for.

    Args:
        world: whose first ranks were launched.
        absent: the rank that does not come, or comes past the deadline.
        phases: what the others may have waited for.
        began_s: when they were launched, by time.monotonic.
        deadline_s: of a wait.
    """
    while waiting := [rank for rank in range(absent) if not world.fault(rank).filed]:
        if time.monotonic() - began_s > deadline_s + GRACE_S:
            break
        time.sleep(0.001)
    assert not waiting, f"ranks {waiting} told nothing within {deadline_s} + {GRACE_S} s"
    for fault in map(world.fault, range(absent)):
        assert fault.peer == absent
        assert fault.phase in phases
        assert 0 <= fault.rank < absent


def fails(world: Faults, check: Callable[[], None]) -> bool:
    """Whether a comparison finds a difference, once all kernels have ended.

    No rank may have filed a fault: the rows of a launch that left differ whatever was taken away.
    """
    torch.cuda.synchronize()
    faults = [world.fault(rank) for rank in range(len(world.contexts))]
    filed = [(fault.rank, fault.peer, fault.phase) for fault in faults if fault.filed]
    assert not filed, f"the kernels left, as their waits expired: (rank, peer, phase) {filed}"
    try:
        check()
    except AssertionError:
        return True
    return False
