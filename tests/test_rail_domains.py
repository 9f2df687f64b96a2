"""A rank's place in its domain, on the host: tables of experts, blocks, lengths of segments."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
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
    native,
    rail_posts,
    rails,
)
from ep_dispatcher.device import DeviceBackend, Routes
from ep_dispatcher.group import topology_of
from ep_dispatcher.rail_device import RailBackend, RailRoutes
from ep_dispatcher.rail_memory import rail_blocks, segment_tokens
from ep_dispatcher.rail_posts import RailPosts, blocks_for
from ep_dispatcher.rails import (
    MAX_DOMAIN_SIZE,
    MAX_DOMAINS,
    DomainView,
    OpenRails,
    check_topology,
    check_world,
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
    ("num_domains", "num_sms", "tokens", "blocks"),
    [(1, 16, 4096, 0), (2, 16, 4096, 4), (2, 1, 9, 1), (32, 4, 9, 4), (32, 16, 4096, 8)],
)
def test_rails_get_a_warp_for_each_domain_and_lanes_that_hold_their_posts(
    num_domains: int, num_sms: int, tokens: int, blocks: int
) -> None:
    topology = Topology(ep_size=num_domains, domain_size=1)
    assert rail_blocks(config(num_sms, tokens), topology) == blocks


def test_segments_hold_the_longest_rank() -> None:
    """At least one token where there are rails, so that areas have a size."""
    rails, single = Topology(ep_size=2, domain_size=1), Topology(ep_size=2, domain_size=2)
    assert segment_tokens(config(), rails) == 10
    assert segment_tokens(config(max_tokens=0), rails) == 1
    assert segment_tokens(config(max_tokens=0), single) == 0


@pytest.mark.parametrize("num_sms", [8, 12, 16, 24, 32])
@pytest.mark.parametrize("domain_size", [1, 8])
def test_every_number_of_domains_takes_4096_tokens(num_sms: int, domain_size: int) -> None:
    """No more blocks than serve the domain, and every queue has room for what is posted."""
    for num_domains in range(2, MAX_DOMAINS + 1):
        topology = Topology(ep_size=num_domains * domain_size, domain_size=domain_size)
        check_world(config(num_sms, max_tokens=4096), topology)
        assert rail_blocks(config(num_sms, max_tokens=4096), topology) <= num_sms


def _posts_by_context(posts: RailPosts, contexts: int) -> list[int]:
    """Counted channel by channel, numbered as csrc/core/rail_layout.h does."""
    queues = [0] * contexts
    chunks = range(-(-posts.max_tokens // 32))
    for lane in range(posts.lanes):
        channel = lane * posts.num_domains
        queues[channel // posts.num_domains % contexts] += 16 + 2 * len(chunks[lane :: posts.lanes])
    for block in range(posts.num_channels):
        channel = posts.lanes * posts.num_domains + block
        queues[channel // posts.num_domains % contexts] += 2
    entry = posts.lanes * posts.num_domains + posts.num_channels
    queues[entry // posts.num_domains % contexts] += 3
    queues[0] += 1  # a fault is told over the first
    return queues


@pytest.mark.parametrize("num_domains", [2, 3, 8, 16, 32])
@pytest.mark.parametrize("num_sms", [1, 8, 16, 33, 128])
def test_what_a_rank_posts_while_the_network_takes_nothing_fits(
    num_domains: int, num_sms: int
) -> None:
    for max_tokens in (1, 100, 2048, 4096, 20000, 65536):
        blocks = blocks_for(num_domains, num_sms, max_tokens, num_sms // 4)
        posts = RailPosts(num_domains, blocks, num_sms, max_tokens)
        contexts = posts.contexts()
        if contexts is None:
            assert blocks >= num_sms
            assert posts.most(posts.lanes) > 256
            continue
        for given in (contexts, contexts + 1, 2 * contexts):  # NCCL may give more
            assert max(_posts_by_context(posts, given)) <= posts.most(given) <= 256


def test_bounds_of_posts_are_those_of_the_kernels() -> None:
    csrc = Path(rail_posts.__file__).resolve().parents[1] / "csrc"
    text = "".join(
        (csrc / name).read_text() for name in ("api/ep_rail.h", "kernels/rail_return.cuh")
    )
    for name, value in (
        ("EP_RAIL_CHUNK_TOKENS", rail_posts._CHUNK_TOKENS),
        ("EP_RAIL_WARPS", rail_posts.RAIL_WARPS),
        ("kMostUnsentSums", rail_posts._MOST_UNSENT),
    ):
        assert re.findall(rf"\b{name} = (\d+)", text) == [str(value)]


@pytest.mark.parametrize("value", ["1", "0x20", "128"])
def test_queues_of_the_proxy_that_are_too_short_are_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("NCCL_GIN_PROXY_QUEUE_SIZE", value)
    told = f"NCCL_GIN_PROXY_QUEUE_SIZE is {int(value, 0)}; .*at least 256"
    with pytest.raises(UnavailableError, match=told):
        rail_posts.check_proxy_queue()


@pytest.mark.parametrize("value", [None, "", "x", "-1", "0", "100", "256", "1024"])
def test_other_lengths_are_nccls_own_or_long_enough(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    """What is no power of two NCCL passes over."""
    monkeypatch.delenv("NCCL_GIN_PROXY_QUEUE_SIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("NCCL_GIN_PROXY_QUEUE_SIZE", value)
    rail_posts.check_proxy_queue()


@pytest.mark.parametrize(("gin_type", "refused"), [(2, True), (3, False)])
def test_rails_ask_for_queues_that_hold_their_posts(
    monkeypatch: pytest.MonkeyPatch, gin_type: int, refused: bool
) -> None:
    """Whatever GIN: of GDAKI twice the posts are asked for, of the proxy short ones are refused."""
    asked: dict[str, int] = {}
    made = types.SimpleNamespace(
        layout=types.SimpleNamespace(channels=1, signals_per_domain=1),
    )
    module = types.SimpleNamespace(RailShape=asked.update, Rails=lambda *_: sys.exit("opened"))
    monkeypatch.setattr(native, "load", lambda: module)
    monkeypatch.setattr(rails, "make_rail", lambda *_: made)
    monkeypatch.setenv("NCCL_GIN_PROXY_QUEUE_SIZE", "64")
    found = types.SimpleNamespace(rail_gin=gin_type)
    communicator = types.SimpleNamespace(properties=lambda: found)
    domain = DomainView(Topology(ep_size=2, domain_size=1), Placement((0, 1), 2), 0)
    with pytest.raises(UnavailableError if refused else SystemExit):
        OpenRails(config(), domain, communicator, types.SimpleNamespace(base=0))
    assert asked.get("queue_depth") == (None if refused else 512)


def test_tokens_that_no_number_of_contexts_has_room_for_are_refused() -> None:
    topology = Topology(ep_size=32, domain_size=1)
    check_world(config(4, max_tokens=3648), topology)
    with pytest.raises(UnavailableError, match=r"is 3649; .* num_sms 4 gives 1 lane.*more SMs"):
        check_world(config(4, max_tokens=3649), topology)


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
