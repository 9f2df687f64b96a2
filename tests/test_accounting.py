"""Byte accounting: against a walk over every token, against the closed form, against known sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ep_dispatcher.accounting import (
    LINKS,
    SCHEMES,
    Link,
    Scheme,
    Traffic,
    carried_copies,
    expected_traffic,
    plan_traffic,
    side_bytes,
    source_traffic,
    world_traffic,
)
from ep_dispatcher.config import EpConfig, MoeShape, Topology
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.group import EPGroup
from ep_dispatcher.plan import Placement, build_plan, count_copies
from ep_dispatcher.reference import Routes
from ep_dispatcher.routing import RoutingSpec, make_topk_idx, make_world
from ep_dispatcher.testing import run_ranks

ROW_BYTES = 7168 * 2  # hidden 7168 in bfloat16


@dataclass(frozen=True)
class World:
    """A topology, an owner for each expert, and a routing for each rank."""

    topology: Topology
    placement: Placement
    routings: list[Tensor]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Small worlds with any domains, owners, ragged and empty ranks, drops and duplicates."""
    domain_size, num_domains = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ep_size = domain_size * num_domains
    rest = st.lists(st.integers(0, ep_size - 1), max_size=6)
    owners = draw(st.permutations([*range(ep_size), *draw(rest)]))
    num_topk = draw(st.integers(1, 4))
    slot = st.integers(-1, len(owners) - 1)
    row = st.lists(slot, min_size=num_topk, max_size=num_topk)
    tables = [draw(st.lists(row, max_size=5)) for _ in range(ep_size)]
    routings = [torch.tensor(t, dtype=torch.int64).view(-1, num_topk) for t in tables]
    topology = Topology(ep_size=ep_size, domain_size=domain_size)
    return World(topology, Placement(tuple(owners), ep_size), routings)


def stops(home: int, owner: int, topology: Topology, scheme: Scheme) -> list[int]:
    """Ranks that one copy visits from home to owner."""
    if scheme == "deduplicated":
        return [home, topology.rail_peer(home, topology.domain_of(owner)), owner]
    return [home, owner]


def walk(world: World, scheme: Scheme) -> list[list[int]]:
    """Oracle: send every copy hop by hop and count each distinct message once."""
    ep_size = world.topology.ep_size
    seen = set()
    for home, routing in enumerate(world.routings):
        for token, experts in enumerate(routing.tolist()):
            for slot, expert in enumerate(experts):
                if expert < 0:
                    continue
                path = stops(home, world.placement.expert_rank[expert], world.topology, scheme)
                name = (home, token, slot) if scheme == "by_copy" else (home, token)
                for sender, receiver in pairwise(path):
                    if sender != receiver:
                        seen.add((name, sender, receiver))
    rows = [[0] * ep_size for _ in range(ep_size)]
    for _, sender, receiver in seen:
        rows[sender][receiver] += 1
    return rows


def mean_mb(traffic: Traffic, link: Link) -> float:
    """Mean payload that a rank sends, in MB of 1e6 bytes."""
    return float(traffic.bytes_per_rank(link, "send", ROW_BYTES).mean()) / 1e6


@pytest.mark.parametrize("scheme", SCHEMES)
@given(world=worlds())
def test_counts_equal_a_walk_over_every_copy(scheme: Scheme, world: World) -> None:
    """The vectorised count is the number of distinct (token, sender, receiver) hops."""
    counted = world_traffic(world.routings, world.placement, world.topology, scheme)
    assert counted.rows.tolist() == walk(world, scheme)


@given(world=worlds())
def test_links_partition_the_messages(world: World) -> None:
    """Each message is inside a domain or across, sent once and received once."""
    traffic = world_traffic(world.routings, world.placement, world.topology)
    for link in LINKS:
        sent = traffic.rows_per_rank(link, "send").sum()
        assert sent == traffic.rows_per_rank(link, "receive").sum()
    assert sum(traffic.rows_per_rank(link, "send").sum() for link in LINKS) == traffic.rows.sum()


@given(world=worlds())
def test_deduplication_never_adds_messages_across_domains(world: World) -> None:
    """Across domains: by domain <= by rank <= by copy."""
    across = [
        world_traffic(world.routings, world.placement, world.topology, scheme)
        .rows_per_rank("across", "send")
        .sum()
        for scheme in SCHEMES
    ]
    assert across == sorted(across)


@given(world=worlds())
def test_plans_give_the_same_traffic_as_routings(world: World) -> None:
    """Adding up the ranks' plans equals counting the routings."""
    num_experts = world.placement.num_experts
    counts = torch.stack([count_copies(r, num_experts) for r in world.routings])
    total = sum(
        plan_traffic(
            build_plan(
                routing, counts, placement=world.placement, topology=world.topology, ep_rank=rank
            )
        ).rows
        for rank, routing in enumerate(world.routings)
    )
    expected = world_traffic(world.routings, world.placement, world.topology)
    assert torch.equal(torch.as_tensor(total), expected.rows)


def test_the_reference_tier_sends_by_rank() -> None:
    """What `by_rank` counts is what the reference tier hands to its all-to-all."""
    config = EpConfig(shape=MoeShape(hidden=8, num_topk=3, num_experts=8), max_tokens_per_rank=64)
    spec = RoutingSpec(name="zipf", num_experts=8, num_topk=3)

    def sent(process_group: dist.ProcessGroup) -> tuple[list[int], list[float]]:
        with EPGroup.create(process_group, config) as group:
            plan = group.plan(make_topk_idx(spec, 40, group.ep_rank))
        assert isinstance(plan.transport, Routes)
        pairs = list(plan.transport.sent_pairs)
        pairs[plan.ep_rank] = 0  # local rows are no messages
        return pairs, plan_traffic(plan, "by_rank").rows[plan.ep_rank].tolist()

    for pairs, counted in run_ranks(4, sent):
        assert pairs == counted


@pytest.mark.parametrize(
    ("scheme", "messages"),
    [
        ("deduplicated", {(0, 1): 1, (0, 2): 2, (2, 3): 2}),
        ("by_rank", {(0, 1): 1, (0, 2): 1, (0, 3): 2}),
        ("by_copy", {(0, 1): 2, (0, 2): 1, (0, 3): 2}),
    ],
)
def test_source_traffic_example(scheme: Scheme, messages: dict[tuple[int, int], int]) -> None:
    """The worked example of `source_traffic`."""
    topology = Topology(ep_size=4, domain_size=2)
    traffic = source_traffic(torch.tensor([[1, 1], [2, 3], [3, -1]]), 0, topology, scheme)
    found = {(int(a), int(b)): int(traffic.rows[a, b]) for a, b in traffic.rows.nonzero()}
    assert found == messages


def test_side_bytes_example() -> None:
    """The worked examples of `carried_copies` and `side_bytes`."""
    topology, dst_rank = Topology(ep_size=4, domain_size=2), torch.tensor([[1, 1], [2, 3], [3, -1]])
    messages, copies = source_traffic(dst_rank, 0, topology), carried_copies(dst_rank, 0, topology)
    found = {(int(a), int(b)): int(copies.rows[a, b]) for a, b in copies.rows.nonzero()}
    assert found == {(0, 1): 2, (0, 2): 3, (2, 3): 2}
    assert side_bytes(messages, copies, 2, "inside", "send").tolist() == [20, 0, 24, 0]
    assert side_bytes(messages, copies, 2, "across", "send").tolist() == [16, 0, 0, 0]


@given(world=worlds())
def test_a_message_carries_one_copy_or_more(world: World) -> None:
    """Copies flow over exactly the links that messages use, at least one a message."""
    for rank, routing in enumerate(world.routings):
        owner = world.placement.rank_of[routing.clamp(min=0)]
        dst_rank = torch.where(routing >= 0, owner, -1)
        messages = source_traffic(dst_rank, rank, world.topology).rows
        copies = carried_copies(dst_rank, rank, world.topology).rows
        assert torch.equal(messages > 0, copies > 0)
        assert (copies >= messages).all()


def test_expected_traffic_example() -> None:
    """The worked example of `expected_traffic`."""
    topology, placement = Topology(ep_size=2, domain_size=2), Placement.even(4, 2)
    rows = expected_traffic(placement, 6, 2, topology).rows
    torch.testing.assert_close(rows, torch.tensor([[0.0, 5.0], [5.0, 0.0]], dtype=torch.float64))
    by_copy = expected_traffic(placement, 6, 2, topology, "by_copy").rows
    assert by_copy.tolist() == [[0, 6], [6, 0]]


def test_combine_is_the_way_back() -> None:
    """Combine receives where dispatch sent, over the same links."""
    topology = Topology(ep_size=4, domain_size=2)
    dispatch = source_traffic(torch.tensor([[2, 3], [1, 3]]), 0, topology)
    combine = dispatch.transpose()
    for link in LINKS:
        sent = combine.rows_per_rank(link, "send").tolist()
        assert sent == dispatch.rows_per_rank(link, "receive").tolist()
    assert combine.rows_per_rank("across", "send").tolist() == [0, 0, 2, 0]


@pytest.mark.parametrize(
    ("num_domains", "link", "scheme", "megabytes"),
    [
        (1, "inside", "deduplicated", 272.0),
        (1, "inside", "by_copy", 411.0),
        (2, "across", "deduplicated", 58.5),
        (4, "across", "deduplicated", 159.0),
        (8, "across", "deduplicated", 272.0),
    ],
)
def test_known_sums(num_domains: int, link: Link, scheme: Scheme, megabytes: float) -> None:
    """E=256, K=8, T=4096, domains of 8: the sums that the design states, rounded as there."""
    topology = Topology(ep_size=8 * num_domains, domain_size=8)
    placement = Placement.even(256, topology.ep_size)
    expected = mean_mb(expected_traffic(placement, 4096, 8, topology, scheme), link)
    assert expected == pytest.approx(megabytes, abs=0.5 if megabytes > 100 else 0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_domains", [1, 2, 8])
def test_simulation_agrees_with_the_closed_form(num_domains: int, scheme: Scheme) -> None:
    """Uniform routing of a whole world lies within 1 % of the expectation on each link.

    At T=512 a rank sends thousands of rows on each link; the world's mean is far tighter.
    """
    topology = Topology(ep_size=8 * num_domains, domain_size=8)
    placement = Placement.even(256, topology.ep_size)
    spec = RoutingSpec(name="uniform", num_experts=256, num_topk=8, seed=1)
    world = make_world(spec, 512, topology.ep_size)
    counted = world_traffic(world, placement, topology, scheme)
    expected = expected_traffic(placement, 512, 8, topology, scheme)
    for link in LINKS:
        assert mean_mb(counted, link) == pytest.approx(mean_mb(expected, link), rel=0.01)


@settings(max_examples=20)
@given(st.integers(4, 20), st.integers(1, 4), st.integers(1, 2))
def test_closed_form_allows_uneven_experts(num_experts: int, num_topk: int, size: int) -> None:
    """Equal to the average over all K-subsets of experts, E not divisible by P included."""
    topology, placement = Topology(ep_size=4, domain_size=size), Placement.even(num_experts, 4)
    subsets = torch.combinations(torch.arange(num_experts), num_topk)
    exact = sum(
        source_traffic(placement.rank_of[subsets], rank, topology).rows for rank in range(4)
    )
    expected = expected_traffic(placement, len(subsets), num_topk, topology)
    torch.testing.assert_close(expected.rows, torch.as_tensor(exact))


def test_a_token_with_all_experts_at_home_sends_nothing() -> None:
    """Local copies are no wire bytes, in any scheme."""
    topology = Topology(ep_size=4, domain_size=2)
    for scheme in SCHEMES:
        assert source_traffic(torch.full((5, 3), 2), 2, topology, scheme).rows.sum() == 0


def test_group_limited_routing_reaches_few_domains() -> None:
    """With one group a domain, a token leaves home for at most its limit of domains."""
    spec = RoutingSpec(name="group-limited", num_experts=64, num_topk=8, num_limited_groups=2)
    groups = make_topk_idx(spec, 200, 3) // 8
    assert all(len(set(row)) <= 2 for row in groups.tolist())


@pytest.mark.parametrize("name", ["uniform", "group-limited", "zipf"])
def test_routings_are_distinct_and_repeat_by_seed(name: str) -> None:
    """K distinct experts in every row; same seed same bits; another seed or rank another draw."""
    spec = RoutingSpec(name=name, num_experts=32, num_topk=8, seed=5)  # type: ignore[arg-type]
    topk_idx = make_topk_idx(spec, 100, 2)
    assert all(len(set(row)) == 8 for row in topk_idx.tolist())
    assert torch.equal(topk_idx, make_topk_idx(spec, 100, 2))
    assert not torch.equal(topk_idx, make_topk_idx(spec, 100, 3))
    assert not torch.equal(topk_idx, make_topk_idx(replace(spec, seed=6), 100, 2))


def test_zipf_prefers_low_experts() -> None:
    """The first expert gets at least four times its uniform share at skew 1."""
    spec = RoutingSpec(name="zipf", num_experts=64, num_topk=4)
    counts = torch.bincount(make_topk_idx(spec, 1000, 0).flatten(), minlength=64)
    assert counts[0] > 4 * 1000 * 4 / 64
    assert counts[0] > counts[8] > counts[63]


def test_wrong_use_names_value_and_range() -> None:
    """Each refusal states what was given and what is allowed."""
    topology = Topology(ep_size=2, domain_size=1)
    placement = Placement.even(4, 2)
    with pytest.raises(ConfigError, match="routings of 1 ranks"):
        world_traffic([torch.zeros(1, 1, dtype=torch.int64)], placement, topology)
    with pytest.raises(ConfigError, match=r"num_topk is 5.*at most num_experts 4"):
        expected_traffic(placement, 1, 5, topology)
    with pytest.raises(ConfigError, match="placement has 2 ranks, the topology 4"):
        expected_traffic(placement, 1, 1, Topology(ep_size=4, domain_size=1))
    with pytest.raises(ConfigError, match="cannot be added"):
        _ = Traffic(torch.zeros(2, 2), topology) + Traffic(
            torch.zeros(2, 2), Topology(ep_size=2, domain_size=2)
        )
    with pytest.raises(ConfigError, match="routing is 'random'"):
        RoutingSpec(name="random", num_experts=4, num_topk=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_groups is 3; it must divide"):
        RoutingSpec(name="group-limited", num_experts=8, num_topk=2, num_groups=3)
    with pytest.raises(ConfigError, match="must be at most 4"):
        RoutingSpec(name="group-limited", num_experts=8, num_topk=5, num_limited_groups=4)
