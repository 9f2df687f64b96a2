"""Worlds that tests share: Hypothesis strategies, and a runner that drives a world over threads."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from oracle import World
from torch import Tensor

from ep_dispatcher import EpConfig, EPGroup, MoeShape, Plan
from ep_dispatcher.testing import run_ranks


class Ran(NamedTuple):
    """What one rank saw: forward values, and gradients of sum(values * cotangents)."""

    plan: Plan
    recv_x: Tensor
    recv_weights: Tensor
    out: Tensor
    grad_x: Tensor
    grad_weights: Tensor


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Any small world: ragged and empty ranks, dropped slots, duplicates, odd expert tables."""
    num_ranks = draw(st.integers(1, 4))
    domain_size = draw(st.sampled_from([n for n in (1, 2, 3, 4) if num_ranks % n == 0]))
    num_experts = draw(st.integers(num_ranks, 10))
    table = list(range(num_ranks)) + draw(
        st.lists(
            st.integers(0, num_ranks - 1),
            min_size=num_experts - num_ranks,
            max_size=num_experts - num_ranks,
        )
    )
    num_topk = draw(st.integers(1, 4))
    hot = draw(st.booleans())
    high = 0 if hot else num_experts - 1
    slots = st.lists(st.integers(-1, high), min_size=num_topk, max_size=num_topk)
    topk_idx = [
        torch.tensor(draw(st.lists(slots, max_size=6)), dtype=torch.int64).view(-1, num_topk)
        for _ in range(num_ranks)
    ]
    return World(
        topk_idx=topk_idx,
        expert_rank=tuple(draw(st.permutations(table))),
        num_ranks=num_ranks,
        domain_size=domain_size,
        alignment=draw(st.sampled_from([1, 2, 4, 16])),
        exact=draw(st.booleans()),
    )


def config_of(world: World, dtype: torch.dtype, **changes: object) -> EpConfig:
    """The config that makes a group for `world`."""
    values: dict[str, object] = {
        "shape": MoeShape(
            hidden=world.hidden,
            num_topk=world.num_topk,
            num_experts=world.num_experts,
            dtype=str(dtype).removeprefix("torch."),
        ),
        "max_tokens_per_rank": 1 << 14,
        "alignment": world.alignment,
        "virtual_domain_size": world.domain_size,
        "expert_rank": world.expert_rank,
        "precision": "exact" if world.exact else "rounded",
        "recv_capacity_rows": world.capacity,
    }
    return EpConfig(**(values | changes))  # type: ignore[arg-type]


def rows_for(world: World, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Random rows [T, H] for each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(len(idx), world.hidden, generator=generator).to(dtype) for idx in world.topk_idx
    ]


def weights_for(world: World, dtype: torch.dtype = torch.float32, seed: int = 1) -> list[Tensor]:
    """Random weights [T, K] for each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(idx.shape, generator=generator).to(dtype) for idx in world.topk_idx]


def each_rank(world: World, config: EpConfig, work: Callable[[EPGroup, int], object]) -> list:  # type: ignore[type-arg]
    """Run `work(group, rank)` on every thread rank of a fresh group."""

    def call(process_group: dist.ProcessGroup) -> object:
        with EPGroup.create(process_group, config) as group:
            return work(group, group.ep_rank)

    return run_ranks(world.num_ranks, call)


def run_world(
    world: World, x: list[Tensor], weights: list[Tensor], *, jitter_seed: int | None = None
) -> list[Ran]:
    """Dispatch, multiply by the weights, combine, and go back; on every rank.

    With `jitter_seed`, ranks sleep for random times, so that messages arrive in other orders.
    """

    def work(group: EPGroup, rank: int) -> Ran:
        pause = _pauses(jitter_seed, rank)
        rows = x[rank].clone().requires_grad_()
        router = weights[rank].clone().requires_grad_()
        plan = group.plan(world.topk_idx[rank])
        pause()
        recv_x, recv_weights = group.dispatch(plan, rows, router)
        assert recv_weights is not None
        pause()
        expert_out = (recv_x * recv_weights.unsqueeze(1)).to(recv_x.dtype)
        out = group.combine(plan, expert_out)
        pause()
        out.sum().backward()
        assert rows.grad is not None
        assert router.grad is not None
        return Ran(
            plan, recv_x.detach(), recv_weights.detach(), out.detach(), rows.grad, router.grad
        )

    return each_rank(world, config_of(world, x[0].dtype), work)


def _pauses(seed: int | None, rank: int) -> Callable[[], None]:
    """A function that sleeps up to 2 ms, or not at all without a seed."""
    if seed is None:
        return lambda: None
    source = random.Random(seed * 1000 + rank)
    return lambda: time.sleep(source.random() * 2e-3)
