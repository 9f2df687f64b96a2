"""A rank's place in its domain, on the host: tables of experts, blocks, lengths of segments."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from fault_causes import names_cause

from ep_dispatcher import (
    ConfigError,
    EpConfig,
    MoeShape,
    Placement,
    Topology,
    Tuning,
    UnavailableError,
    rails,
)
from ep_dispatcher.device import DeviceBackend, Routes
from ep_dispatcher.group import topology_of
from ep_dispatcher.rail_device import RailBackend, RailRoutes
from ep_dispatcher.rail_memory import rail_blocks, segment_tokens
from ep_dispatcher.rails import (
    MAX_DOMAIN_SIZE,
    MAX_DOMAINS,
    DomainView,
    check_topology,
    most_posts,
    num_contexts,
    owner_tables,
)

CPU = torch.device("cpu")


def config(num_sms: int = 16, max_tokens: int = 10) -> EpConfig:
    """A small one."""
    shape = MoeShape(hidden=8, num_topk=2, num_experts=8)
    return EpConfig(shape=shape, max_tokens_per_rank=max_tokens, tuning=Tuning(num_sms=num_sms))


def test_the_example_of_owner_tables() -> None:
    tables = owner_tables(torch.tensor([1, 0, 2, 1]), 2, CPU)
    assert tables["expert_local"].tolist() == [0, 0, 0, 1]
    assert tables["expert_order"].tolist() == [1, 0, 3, 2]
    assert tables["owner_first"].tolist() == [0, 1, 3]


@pytest.mark.parametrize("ep_rank", range(4))
def test_a_domain_knows_its_own_experts_only(ep_rank: int) -> None:
    """8 experts, two a rank, in an order of their own; domains {0, 1} and {2, 3}."""
    placement = Placement((3, 0, 2, 1, 1, 2, 0, 3), 4)
    view = DomainView(Topology(ep_size=4, domain_size=2), placement, ep_rank)
    tables = view.tables(CPU)
    first = ep_rank // 2 * 2
    assert (view.number, view.index, view.first_rank) == (ep_rank // 2, ep_rank % 2, first)
    for expert, owner in enumerate(placement.rank_of.tolist()):
        here = first <= owner < first + 2
        assert tables["expert_rank"][expert] == (owner - first if here else 2)
    ours = [e for rank in (first, first + 1) for e in placement.local_experts(rank)]
    assert tables["expert_order"][:4].tolist() == [int(expert) for expert in ours]
    assert tables["owner_first"].tolist() == [0, 2, 4]


def test_a_single_domain_has_the_whole_table() -> None:
    placement = Placement((3, 0, 2, 1, 1, 2, 0, 3), 4)
    view = DomainView(Topology(ep_size=4, domain_size=4), placement, 2)
    whole = owner_tables(placement.rank_of, 4, CPU)
    assert all(torch.equal(table, whole[name]) for name, table in view.tables(CPU).items())
    assert (view.number, view.index) == (0, 2)


@pytest.mark.parametrize("size", [3, 5, 8])
def test_virtual_domains_that_do_not_fill_the_group_are_refused(size: int) -> None:
    wrong = dataclasses.replace(config(), virtual_domain_size=size)
    told = f"virtual_domain_size is {size}; it must divide the 4 ranks"
    with pytest.raises(ConfigError, match=told):
        topology_of(wrong, 4)
    assert topology_of(dataclasses.replace(wrong, virtual_domain_size=2), 4).num_domains == 2


@pytest.mark.parametrize(("num_domains", "domain_size"), [(33, 1), (40, 8), (1, 73), (2, 80)])
def test_more_or_larger_domains_than_kernels_have_room_for_are_refused(
    num_domains: int, domain_size: int
) -> None:
    told = f"{num_domains} NVLink domains of {domain_size}; the device tier takes up to 32 domains"
    with pytest.raises(UnavailableError, match=told):
        check_topology(Topology(ep_size=num_domains * domain_size, domain_size=domain_size))


def test_the_largest_domains_are_those_of_the_c_interface() -> None:
    check_topology(Topology(ep_size=MAX_DOMAINS * MAX_DOMAIN_SIZE, domain_size=MAX_DOMAIN_SIZE))
    api = Path(__file__).parents[1] / "csrc" / "api"
    if not api.is_dir():
        pytest.skip("csrc is not beside the tests, so there is no header to compare with")
    headers = "".join(path.read_text() for path in api.glob("*.h"))
    for name, value in (("EP_MAX_DOMAINS", MAX_DOMAINS), ("EP_MAX_RANKS", MAX_DOMAIN_SIZE)):
        assert re.findall(rf"\b{name} = (\d+)", headers) == [str(value)]


@pytest.mark.parametrize(
    ("num_domains", "num_sms", "blocks"), [(1, 16, 0), (2, 16, 4), (2, 1, 1), (32, 4, 4)]
)
def test_rails_get_a_warp_for_each_domain(num_domains: int, num_sms: int, blocks: int) -> None:
    topology = Topology(ep_size=num_domains, domain_size=1)
    assert rail_blocks(config(num_sms), topology) == blocks


def test_segments_hold_the_longest_rank() -> None:
    """At least one token where there are rails, so that areas have a size."""
    rails, single = Topology(ep_size=2, domain_size=1), Topology(ep_size=2, domain_size=2)
    assert segment_tokens(config(), rails) == 10
    assert segment_tokens(config(max_tokens=0), rails) == 1
    assert segment_tokens(config(max_tokens=0), single) == 0


@pytest.mark.parametrize(
    ("lanes", "max_tokens", "contexts"),
    [(8, 4096, 4), (64, 4096, 6), (1, 2048, 1), (2, 4096, 2), (32, 16384, 8), (64, 65536, 32)],
)
def test_contexts_are_enough_for_queues_that_never_fill(
    lanes: int, max_tokens: int, contexts: int
) -> None:
    """16 puts a lane and two signals for each 32 tokens, spread over contexts of 256 posts."""
    assert num_contexts(lanes, max_tokens) == contexts


@pytest.mark.parametrize("lanes", [1, 2, 3, 6, 8, 10, 31, 64])
@pytest.mark.parametrize("tokens_a_lane", [1, 100, 1000, 3328])
def test_two_launches_that_the_network_takes_nothing_of_fit_into_a_queue(
    lanes: int, tokens_a_lane: int
) -> None:
    """Counted lane by lane: a lane's context is its number modulo theirs."""
    max_tokens = lanes * tokens_a_lane
    contexts = num_contexts(lanes, max_tokens)
    posts = [0] * contexts
    for lane in range(lanes):
        chunks = range(lane, -(-max_tokens // 32), lanes)
        posts[lane % contexts] += 16 + 2 * len(chunks)
    assert max(posts) + 32 <= 256
    assert most_posts(contexts, lanes, max_tokens) >= max(posts) + 32


def test_bounds_of_posts_are_those_of_the_kernels() -> None:
    csrc = Path(rails.__file__).resolve().parents[1] / "csrc"
    chunk = re.search(r"EP_RAIL_CHUNK_TOKENS = (\d+)", (csrc / "api/ep_rail.h").read_text())
    unsent = re.search(r"kMostUnsentSums = (\d+)", (csrc / "kernels/rail_return.cuh").read_text())
    assert chunk is not None
    assert unsent is not None
    assert (int(chunk[1]), int(unsent[1])) == (rails._CHUNK_TOKENS, rails._MOST_UNSENT)


def test_tokens_that_no_number_of_contexts_has_room_for_are_refused() -> None:
    assert num_contexts(1, 3328) == 1
    with pytest.raises(UnavailableError, match=r"max_tokens_per_rank is 3329.*at most 3328"):
        num_contexts(1, 3329)


def test_targets_in_other_domains_are_memory_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they too are kept for the stream of each launch."""
    routing, dst_rank = torch.zeros(1), torch.ones(1)
    plan = dataclasses.make_dataclass("plan", ["transport"])(Routes("pointers", (routing,)))
    monkeypatch.setattr(DeviceBackend, "plan", lambda *_: plan)
    backend = RailBackend.__new__(RailBackend)
    backend._targets = {"dst_rank": dst_rank}
    made = backend.plan(None, 1, None)
    assert made is not None
    routes = made.transport
    assert isinstance(routes, RailRoutes)
    assert routes.dst_rank is dst_rank
    assert [id(part) for part in routes.memory] == [id(routing), id(dst_rank)]


def test_causes_are_the_culprit_and_the_end_of_its_rail_for_its_own_domain() -> None:
    """Two domains of two ranks, rank 1 to blame: its rail ends at rank 3."""
    pairs = [(rank, peer) for rank in range(4) for peer in range(4)]
    named = {pair for pair in pairs if names_cause(pair, {1}, 2)}
    assert named == {pair for pair in pairs if 1 in pair} | {(2, 3)}
    assert {pair for pair in pairs if names_cause(pair, {1}, 1)} == named - {(2, 3)}
