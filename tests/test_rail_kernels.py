"""Dispatch and combine over several domains equal the specification, all ranks on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernel_world import (
    ROUTINGS,
    check_plans,
    check_rows,
    check_sums,
    kernels_or_skip,
    routing_of,
)
from rail_cases import (
    WORLDS,
    check_rail_round,
    check_sent_round,
    late_epochs,
    new_rail_round,
    new_rail_world,
    no_faults,
    rail_combine,
    rail_dispatch,
    rail_plan,
    wrong_elements,
)
from torch import Tensor

from ep_dispatcher.bench.one_gpu_spec import make_round
from ep_dispatcher.bench.rails_one_gpu import RailBench, RailSetting

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize(("num_domains", "domain_size"), WORLDS)
@pytest.mark.parametrize("kind", sorted(ROUTINGS))
@pytest.mark.parametrize("alignment", [1, 16, 128])
def test_a_round_equals_the_specification(
    num_domains: int, domain_size: int, kind: str, alignment: int
) -> None:
    world = new_rail_world(num_domains, domain_size)
    check_rail_round(world, new_rail_round(world, kind, num_domains, alignment=alignment))


@pytest.mark.parametrize(("num_domains", "domain_size"), WORLDS)
@pytest.mark.parametrize("kind", sorted(ROUTINGS))
def test_a_round_over_late_puts_equals_the_specification(
    num_domains: int, domain_size: int, kind: str
) -> None:
    """All alignments in one world: each finds what the one before left."""
    world = new_rail_world(num_domains, domain_size, net="chaos", chaos_seed=domain_size)
    for alignment in (1, 16, 128):
        check_rail_round(world, new_rail_round(world, kind, alignment, alignment=alignment))


def _one_rank(tokens: Sequence[int], num_experts: int) -> list[Tensor]:
    """Each token takes all experts of one rank, which changes from token to token."""
    local = num_experts // len(tokens)
    routing = []
    for rank, count in enumerate(tokens):
        owner = (torch.arange(count) + rank).remainder(len(tokens)).unsqueeze(1)
        routing.append(owner * local + torch.arange(local))
    return routing


# Tokens of rank r are tokens[r % 4]; 65 and 33 are one more than chunks of 32 hold.
SHAPES: dict[str, dict[str, Any]] = {
    "all to one": {"kind": "all_to_one", "tokens": (65, 33, 64, 1)},
    "skewed by 128": {"kind": "skewed", "tokens": (65, 33, 64, 1), "alignment": 128},
    "ragged": {"kind": "duplicates", "tokens": (65, 0, 1, 33)},
    "mostly dropped": {"kind": "mostly_dropped", "tokens": (0, 65, 33, 0)},
    "one rank": {"kind": "one_rank", "tokens": (65, 33, 64, 1)},
    "one token": {"kind": "uniform", "tokens": (1, 1, 1, 1), "num_topk": 1},
    "no token": {"kind": "uniform", "tokens": (0, 0, 0, 0)},
}


@pytest.mark.parametrize("net", ["loop", "chaos"])
@pytest.mark.parametrize(("num_domains", "domain_size"), WORLDS)
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_extreme_routings_equal_the_specification(
    num_domains: int, domain_size: int, name: str, net: str
) -> None:
    """Each twice, so that the second finds what the first left."""
    given = SHAPES[name]
    num_ranks, num_topk = num_domains * domain_size, given.get("num_topk", 4)
    tokens = [given["tokens"][rank % 4] for rank in range(num_ranks)]
    if given["kind"] == "one_rank":
        routing = _one_rank(tokens, 16)
        num_topk = 16 // num_ranks
    else:
        routing = routing_of(given["kind"], tokens, num_topk, 16)
    world = new_rail_world(num_domains, domain_size, net=net, num_topk=num_topk)
    for seed in range(2):
        work = make_round(world, routing, alignment=given.get("alignment", 1), seed=seed)
        check_rail_round(world, work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("hidden", [8, 72, 2880, 7168, 16384])
def test_rows_of_any_length_and_type(dtype: torch.dtype, exact: bool, hidden: int) -> None:
    world = new_rail_world(hidden=hidden, dtype=dtype, exact=exact, max_tokens=40)
    check_rail_round(world, new_rail_round(world))


@pytest.mark.parametrize(("num_experts", "num_topk"), [(4, 1), (10, 2), (64, 22), (300, 64)])
def test_any_number_of_experts_and_slots(num_experts: int, num_topk: int) -> None:
    world = new_rail_world(num_experts=num_experts, num_topk=num_topk)
    check_rail_round(world, new_rail_round(world, "uniform"))
    check_rail_round(world, new_rail_round(world, "duplicates"))


@pytest.mark.parametrize(
    "tokens", [[0, 0, 0, 0], [1, 1, 1, 1], [0, 77, 0, 5], [1, 0, 0, 0], [100, 63, 64, 65]]
)
def test_any_number_of_tokens(tokens: list[int]) -> None:
    world = new_rail_world()
    check_rail_round(world, new_rail_round(world, "duplicates", tokens=tokens))


def test_experts_may_live_anywhere() -> None:
    world = new_rail_world(num_experts=7, expert_rank=(3, 0, 2, 0, 1, 3, 3))
    check_rail_round(world, new_rail_round(world))


def test_rows_past_the_capacity_are_dropped_alike() -> None:
    world = new_rail_world()
    for capacity_rows in (0, 40, 90, 1000):
        check_rail_round(world, new_rail_round(world, capacity_rows=capacity_rows))


def test_k_may_differ_from_call_to_call() -> None:
    world = new_rail_world(2, 2)
    for num_topk in (4, 1, 3, 2):
        routing = routing_of("duplicates", [64, 9, 100, 33], num_topk, 16, num_topk)
        check_rail_round(world, make_round(world, routing))


def test_all_tokens_may_leave_their_domain() -> None:
    world = new_rail_world(2, 2)
    routing = [
        torch.arange(4).expand(50, 4).contiguous() + 8 * (1 - rank // 2) + rank for rank in range(4)
    ]
    check_rail_round(world, make_round(world, routing))


def test_unequal_alignments_are_refused_in_every_domain() -> None:
    world = new_rail_world(2, 2)
    work = new_rail_round(world, "uniform", alignment=4)
    plans = [world.new_rail_plan(rank, *topk.shape) for rank, topk in enumerate(work.topk_idx)]
    calls = world.rail_plan_calls(plans, work.topk_idx, 4)
    calls[2].alignment = 8
    world.launch("rail_exchange", calls)
    world.launch("rail_counts", calls)
    route = world.virtual_route_calls(plans, 4)
    route[2].alignment = 8
    world.launch("route", route)
    torch.cuda.synchronize()
    refused = [world.mailbox(plan.virtual).refused_rank for plan in plans]
    assert refused == [2, 2, 0, 2]
    check_rail_round(world, new_rail_round(world, "uniform"))


@pytest.mark.parametrize("net", ["loop", "chaos"])
@pytest.mark.parametrize("num_channels", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_the_number_of_blocks_does_not_change_a_bit(
    num_channels: int, num_blocks: int, net: str
) -> None:
    world = new_rail_world(num_channels=num_channels, num_blocks=num_blocks, net=net)
    check_rail_round(world, new_rail_round(world))


@pytest.mark.parametrize("net", ["loop", "chaos"])
@pytest.mark.parametrize("num_channels", [2, 4, 8])
@pytest.mark.parametrize(("num_domains", "domain_size"), [(2, 4), (8, 1)])
def test_the_number_of_blocks_of_eight_ranks_does_not_change_a_bit(
    num_domains: int, domain_size: int, num_channels: int, net: str
) -> None:
    """With two for the rails and one for the puts that are late, 8 x 11 blocks at most."""
    world = new_rail_world(num_domains, domain_size, num_channels=num_channels, net=net)
    check_rail_round(world, new_rail_round(world))


def test_sixteen_blocks_of_eight_ranks_do_not_change_a_bit() -> None:
    """8 x 16 is as many as one GPU has room for, so records are sent before, by other blocks."""
    world = new_rail_world(2, 4, num_channels=16, num_blocks=1)
    for seed in range(2):
        check_sent_round(world, new_rail_round(world, seed=seed), streams=True)


@pytest.mark.parametrize("ring_depth", [1, 3])
def test_shallow_rings(ring_depth: int) -> None:
    world = new_rail_world(2, 4, ring_depth=ring_depth)
    check_rail_round(world, new_rail_round(world))


@pytest.mark.parametrize(("num_domains", "domain_size"), [(2, 2), (4, 2)])
def test_many_rounds_reuse_every_slot(num_domains: int, domain_size: int) -> None:
    world = new_rail_world(num_domains, domain_size)
    for seed in range(8):
        kind = sorted(ROUTINGS)[seed % len(ROUTINGS)]
        check_rail_round(world, new_rail_round(world, kind, seed, alignment=4 ** (seed % 3)))


@pytest.mark.parametrize("net", ["loop", "chaos"])
@pytest.mark.parametrize(
    ("num_domains", "domain_size"), [world for world in WORLDS if world != (2, 2)]
)
def test_two_hundred_epochs_with_late_ranks(num_domains: int, domain_size: int, net: str) -> None:
    """As a thousand of 2x2 in test_rail_faults.py; what differs is counted on the GPU."""
    world = new_rail_world(
        num_domains, domain_size, hidden=64, max_tokens=33, net=net, mutations=True
    )
    wrong = []
    for epoch, work in late_epochs(world, 200):
        plans = rail_plan(world, work)
        rows = rail_dispatch(world, work, plans, duplicate=epoch % 2)
        wrong.append(wrong_elements(work, rows, rail_combine(world, work, plans)))
        if epoch % 10 == 9:
            check_plans(world, work, plans)
    no_faults(world)
    assert torch.stack(wrong).nonzero().flatten().tolist() == []  # epochs


def test_a_launch_for_each_rank_on_its_own_stream() -> None:
    world = new_rail_world(2, 2)
    for seed in range(3):
        check_rail_round(world, new_rail_round(world, seed=seed), streams=True)


def test_a_plan_serves_many_calls_and_weights_are_optional() -> None:
    world = new_rail_world(2, 2)
    work = new_rail_round(world)
    plans = rail_plan(world, work)
    check_plans(world, work, plans)
    for _ in range(3):
        outputs = rail_dispatch(world, work, plans, weights=False)
        for (recv_x, recv_weights), expected in zip(outputs, work.recv_x, strict=True):
            assert recv_weights is None
            assert torch.equal(recv_x.view(torch.int16), expected.view(torch.int16))
        check_rows(work, rail_dispatch(world, work, plans))
        out, _ = rail_combine(world, work, plans, grads=False)
        assert all(torch.equal(got, want) for got, want in zip(out, work.out, strict=True))
        check_sums(work, rail_combine(world, work, plans))


def _small_bench(net: str, kernels: str) -> RailBench:
    setting = RailSetting(
        num_domains=2, domain_size=2, num_sms=2, num_blocks=1, num_topk=4,
        num_experts=16, num_tokens=100, net=net,
    )  # fmt: skip
    return RailBench(setting, kernels_or_skip(kernels))


CALLS = [  # their kernels; the return adds to what its combine stored, so it is no call of its own
    ("plan_exchange", "plan_counts", "plan_route"),
    ("dispatch",),
    ("dispatch_send", "dispatch_forward"),  # a send is good for one dispatch
    ("combine_domain", "combine_return"),
]


@pytest.mark.parametrize("net", ["loop", "chaos"])
def test_each_call_may_be_repeated_before_the_next_one(net: str) -> None:
    """And the calls' memory is kept: what others allocate meanwhile does not get into it."""
    bench = _small_bench(net, "ep_kernels")
    assert [phase for call in CALLS for phase in call] == list(bench.calls)
    kept = []
    for call in CALLS:
        for _ in range(5):
            for phase in call:
                bench.run(phase)
        kept += [
            torch.full((1 << power,), 0x7F, dtype=torch.uint8, device="cuda")
            for power in range(9, 21)
            for _ in range(4)
        ]
    bench.compare_rows()
    bench.compare_sums()
    bench.check()
    no_faults(bench.world)


def test_roles_say_when_they_ran() -> None:
    """No role lasts longer than all launches, nor are its warps busier than they can be."""
    bench = _small_bench("loop", "ep_kernels_mutated")
    launches = bench.time_us(5)
    roles = bench.time_roles(5)
    assert set(roles) == {"forward", "send", "return", "receive"}
    for role in roles.values():
        assert 0 < role.us < 10 * sum(map(max, launches.values()))
        assert role.moved_bytes > 0
        assert 0 < sum(role.shares.values()) <= 1
    assert roles["send"].shares["making"] > 0
    assert roles["return"].shares["making"] == 0
    bench.check()


@pytest.mark.parametrize("net", ["loop", "chaos"])
@pytest.mark.parametrize(("num_domains", "domain_size"), WORLDS)
def test_a_graph_of_a_round_replays_with_other_routings(
    num_domains: int, domain_size: int, net: str
) -> None:
    """Plan, dispatch, combine and return in static mode, one graph."""
    world = new_rail_world(num_domains, domain_size, net=net)
    options: dict[str, Any] = {"alignment": 16, "capacity_rows": 900}
    works = [new_rail_round(world, "duplicates", seed, **options) for seed in range(3)]
    held = new_rail_round(world, "uniform", 99, **options)  # the graph's own memory
    check_rail_round(world, held)
    plans = [world.new_rail_plan(rank, *topk.shape) for rank, topk in enumerate(held.topk_idx)]
    outputs = world.new_outputs(held.rows, weights=True)
    out = [torch.empty_like(rows) for rows in held.x]
    grads = [torch.empty_like(weights) for weights in held.topk_weights]
    planning = world.rail_plan_calls(plans, held.topk_idx, 16, 900)
    domains, returns = world.rail_combine_calls(plans, held.expert_out, out, held.row_grads, grads)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        world.launch("rail_exchange", planning)
        world.launch("rail_counts", planning)
        world.launch("route", world.virtual_route_calls(plans, 16, 900))
        world.launch(
            "rail_dispatch", world.rail_dispatch_calls(plans, held.x, held.topk_weights, outputs)
        )
        world.launch("combine", domains)
        world.launch("rail_return", returns)
    for work in works * 4:
        for name in ("topk_idx", "topk_weights", "x", "expert_out", "row_grads"):
            for to, source in zip(getattr(held, name), getattr(work, name), strict=True):
                to.copy_(source)
        for result in (*out, *grads, *(rows for rows, _ in outputs)):
            result.fill_(float("nan"))
        graph.replay()
        check_plans(world, work, plans)
        check_rows(work, outputs)
        check_sums(work, (out, grads))
    no_faults(world)


@pytest.mark.parametrize("chaos_seed", range(6))
@pytest.mark.parametrize(("num_domains", "domain_size"), [(2, 2), (4, 2), (8, 1)])
def test_late_and_reordered_puts_change_nothing(
    num_domains: int, domain_size: int, chaos_seed: int
) -> None:
    world = new_rail_world(num_domains, domain_size, net="chaos", chaos_seed=chaos_seed)
    for seed in range(2):
        check_rail_round(world, new_rail_round(world, seed=seed))


@pytest.mark.parametrize("net", ["loop", "chaos"])
@pytest.mark.parametrize(("num_domains", "domain_size"), WORLDS)
def test_a_token_crosses_to_a_domain_once_each_way(
    num_domains: int, domain_size: int, net: str
) -> None:
    world = new_rail_world(num_domains, domain_size, mutations=True, net=net)
    ranks = range(num_domains * domain_size)
    work = new_rail_round(world)
    plans = rail_plan(world, work)
    start = [world.put_counts(rank) for rank in ranks]
    rail_dispatch(world, work, plans)
    sent = [world.put_counts(rank) - start[rank] for rank in ranks]
    rail_combine(world, work, plans)
    back = [world.put_counts(rank) - start[rank] - sent[rank] for rank in ranks]
    record = world.shape.row_bytes + 4 * world.shape.num_topk
    for rank, plan in enumerate(work.plans):
        home = rank // domain_size
        for domain in range(num_domains):
            there = (plan.dst_rank >= 0) & (plan.dst_rank // domain_size == domain)
            tokens = 0 if domain == home else int(there.any(1).sum())
            peer = world.topology.rail_peer(rank, domain)
            assert sent[rank][domain].tolist() == [tokens, tokens * record]
            assert back[peer][home].tolist() == [tokens, tokens * record]
