"""Small rounds over several domains, for compute-sanitizer (scripts/gpu_tests.sh).

    compute-sanitizer --tool memcheck python tests/rail_sanitize.py

What must come out is computed on the CPU, so that hardly any kernel but ours has to be looked at.
Initcheck does not see what the bulk copy engine stores, as `combine` does: memory that a later
kernel reads is filled with NaN first, and the comparison tells whether any of it was left.
`--overrun` gives one call too little memory: memcheck has to tell.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from kernel_world import routing_of
from rail_cases import WORLDS, new_rail_world, no_faults
from torch import Tensor

from ep_dispatcher.bench.one_gpu import OneGpuWorld
from ep_dispatcher.bench.one_gpu_spec import Round, assert_same_bits, make_round
from ep_dispatcher.bench.rail_world import RailWorld

TIMEOUT_S = 60.0  # the kernels run a thousand times slower
CHAOS_SEEDS = (0, 1, 2)  # the first for all worlds
OF_OTHER_SEEDS = ((2, 2), (2, 4))
# Two blocks have two lanes to each of seven domains; 66 tokens are three chunks of 32, so that one
# lane has two of them and the sums of two.
LONG_WORLD, LONG = (8, 1), {"max_tokens": 66, "num_blocks": 2, "output_bytes": 1 << 18}
TINY = {"max_tokens": 8, "num_blocks": 1, "output_bytes": 1 << 16}


def _rounds(world: RailWorld) -> tuple[Round, Round]:
    """A round and what must come out, on the CPU; and its inputs on the GPU."""
    shape = world.shape
    on_cpu = SimpleNamespace(
        shape=shape, device=torch.device("cpu"), placement=world.placement, topology=world.topology
    )
    tokens = [shape.max_tokens - rank for rank in range(shape.ep_size)]
    routing = routing_of("duplicates", tokens, shape.num_topk, shape.num_experts, 0)
    work = make_round(cast("OneGpuWorld", on_cpu), routing, alignment=4)

    def there(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.to(world.device) for tensor in tensors]

    return work, replace(
        work,
        topk_idx=there(work.topk_idx),
        topk_weights=there(work.topk_weights),
        x=there(work.x),
        expert_out=there(work.expert_out),
        row_grads=there(work.row_grads),
    )


def _compare(name: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for rank, (one, right) in enumerate(zip(got, expected, strict=True)):
        assert_same_bits(f"rank {rank} {name}", one.cpu(), right)


def check_round(world: RailWorld, say: Callable[[str], None], *, overrun: bool) -> None:
    """Plan, both kinds of dispatch, combine with gradients."""
    expected, work = _rounds(world)
    plans = [world.new_rail_plan(rank, *topk.shape) for rank, topk in enumerate(work.topk_idx)]
    calls = world.rail_plan_calls(plans, work.topk_idx, work.alignment)
    short = torch.zeros(1, dtype=torch.int64, device=world.device)
    if overrun:
        calls[0].counts = short.data_ptr()
    world.launch("rail_exchange", calls)
    world.launch("rail_counts", calls)
    world.launch("route", world.virtual_route_calls(plans, work.alignment))
    no_faults(world)
    say("plan")
    for duplicate in (0, 1):
        outputs = world.new_outputs(work.rows, weights=True)
        dispatches = world.rail_dispatch_calls(
            plans, work.x, work.topk_weights, outputs, duplicate=duplicate, sent=duplicate == 0
        )
        if duplicate == 0:
            world.launch(
                "rail_send", world.rail_send_calls(work.topk_idx, work.x, work.topk_weights)
            )
        world.launch("rail_dispatch", dispatches)
        no_faults(world)
        _compare("recv_x", [rows for rows, _ in outputs], expected.recv_x)
        _compare("recv_weights", [w for _, w in outputs if w is not None], expected.recv_weights)
        say(f"dispatch {duplicate}")
    out = [torch.full_like(rows, float("nan")) for rows in work.x]
    grads = [torch.full_like(weights, float("nan")) for weights in work.topk_weights]
    domains, returns = world.rail_combine_calls(plans, work.expert_out, out, work.row_grads, grads)
    world.launch("combine", domains)
    world.launch("rail_return", returns)
    no_faults(world)
    _compare("out", out, expected.out)
    _compare("weights_grad", grads, expected.weight_grads)
    say("combine")


def rounds(
    nets: Sequence[str], worlds: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, tuple[int, int], dict[str, Any]]]:
    """Net, world and sizes of each round: tiny ones with all seeds, then the long ones."""
    for net in nets:
        for seed in CHAOS_SEEDS if net == "chaos" else (0,):
            for world in worlds:
                if seed == 0 or world in OF_OTHER_SEEDS:
                    yield net, world, {"chaos_seed": seed, **TINY}
    for net in nets if LONG_WORLD in worlds else ():
        for seed in CHAOS_SEEDS[1:] if net == "chaos" else (0,):
            yield net, LONG_WORLD, {"chaos_seed": seed, **LONG}


def main(words: Sequence[str] | None = None) -> int:
    """A round for each world and net, and some longer ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="*", default=["loop", "chaos"])
    names = [f"{domains}x{size}" for domains, size in WORLDS]
    parser.add_argument("--worlds", nargs="*", choices=names, default=names)
    parser.add_argument("--overrun", action="store_true")
    options = parser.parse_args(words)
    start = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - start:7.1f} s  {what}", flush=True)  # noqa: T201

    torch.zeros(1, device="cuda")
    say("context")
    for net, (num_domains, domain_size), sizes in rounds(
        options.nets, [WORLDS[names.index(name)] for name in options.worlds]
    ):
        world = new_rail_world(
            num_domains, domain_size, net=net, num_channels=2, ring_depth=2,
            num_experts=8, num_topk=2, hidden=64, timeout_s=TIMEOUT_S, **sizes,
        )  # fmt: skip
        seed, tokens = sizes["chaos_seed"], sizes["max_tokens"]
        say(f"{net} {num_domains}x{domain_size}, seed {seed}, {tokens} tokens: world")
        check_round(world, say, overrun=options.overrun)
    return 0


if __name__ == "__main__":
    sys.exit(main())
