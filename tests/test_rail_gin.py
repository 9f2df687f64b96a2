"""Several domains over NCCL's own GIN, on one GPU: bit for bit the reference tier's results.

The network is the loopback plugin (docs/loopback_rma.md), plain or late and reordered. Needs a GPU
and MPS, so that the ranks' kernels run at the same time. LOOPBACK_RMA_PLUGIN may name a plugin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import rail_gin_cases as cases
from device_cases import (
    Case,
    block_counts_differ,
    epochs_differ,
    graph_replays_differ,
    plans_interleaved,
    rounds_differ,
)
from rail_gin_world import LIMIT_S, WORLD_IDS, WORLDS, Domains, open_domains

PLAIN: cases.Network = {}


def late(seed: int) -> cases.Network:
    """Every put and signal late, in an order drawn from the seed and from timing."""
    return {
        "LOOPBACK_RMA_DELAY_US": "200",
        "LOOPBACK_RMA_REORDER": "1",
        "LOOPBACK_RMA_SEED": str(seed),
    }


NETWORKS = pytest.mark.parametrize(
    "network",
    [PLAIN, late(3), late(11), late(29)],
    ids=["plain", "late3", "late11", "late29"],
)

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(180)]


@pytest.fixture(scope="module", params=WORLDS, ids=WORLD_IDS)
def domains(request: pytest.FixtureRequest, plugin: str) -> Iterator[Domains]:
    """Each of the worlds, for all tests."""
    num_ranks, domain_size = request.param
    with open_domains(num_ranks, domain_size, plugin) as opened:
        yield opened


@NETWORKS
def test_every_result_is_the_references(domains: Domains, network: cases.Network) -> None:
    """Plan, rows, weights, sums and both gradients, with routings that change."""
    case = domains.case(kind="any", num_topk=4, alignment=16)
    assert not any(domains.run(cases.over, network, rounds_differ, case, 3))


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": (65, 0, 1, 33), "num_topk": 3, "kind": "any"},
        {"dtype": "float32", "hidden": 1024, "num_experts": 9},
        {"precision": "exact", "num_topk": 4},
        {"kind": "all_to_one"},
        {"kind": "one_rank", "num_topk": 8},
        {"kind": "skewed", "hidden": 1024, "num_topk": 8, "num_experts": 32, "alignment": 128},
        {"tokens": (1, 1, 1, 1), "num_topk": 1, "num_experts": 9},
        {"tokens": (0, 0, 0, 0)},
        {"dtype": "float16", "hidden": 72, "num_sms": 1},
        {"hidden": 7168, "num_topk": 8, "num_experts": 32, "tokens": (300, 200, 100, 257)},
    ],
    ids=[
        "ragged",
        "float32",
        "exact",
        "all to one",
        "one rank",
        "skewed",
        "one token",
        "no tokens",
        "short rows",
        "large",
    ],
)
def test_other_shapes_are_the_references(domains: Domains, changes: dict[str, object]) -> None:
    assert not any(domains.run(rounds_differ, domains.case(**changes)))


def test_other_shapes_are_the_references_where_all_is_late(domains: Domains) -> None:
    """Routings, types, numbers of blocks, exact sums, long rows and static mode.

    In groups of several rounds, as opening a group takes longer than a round; each finds what the
    one before left.
    """
    any_routing = domains.case(
        kind="any", tokens=(65, 33, 64, 1), hidden=1024, num_topk=8, alignment=128
    )
    routings: list[dict[str, Any]] = [
        {"kind": "all_to_one", "num_topk": 2},
        {"kind": "one_rank"},
        {"tokens": (65, 0, 1, 33), "num_topk": 3},
        {"kind": "skewed"},
        {"kind": "uniform", "tokens": (1, 1, 1, 1), "num_topk": 1},
        {"tokens": (0, 0, 0, 0)},
        {"seed": 1},
    ]
    other_groups = [
        domains.case(dtype="float32", hidden=1024, num_experts=9, num_sms=2, alignment=16),
        domains.case(kind="any", precision="exact", num_topk=4, num_sms=8),
        domains.case(dtype="float16", hidden=72, num_sms=1),
        domains.case(hidden=7168, num_topk=8, num_experts=32, tokens=(65, 33, 64, 17)),
        domains.case(capacity=48, kind="skewed", alignment=16),
    ]
    groups: list[list[Case]] = [
        [any_routing, *(replace(any_routing, **changes) for changes in routings)]
    ]
    groups += [[case, case.round(1)] for case in other_groups]
    assert not any(domains.run(cases.over, late(13), cases.groups_differ, groups))


@pytest.mark.parametrize("network", [PLAIN, late(7)], ids=["plain", "late7"])
def test_many_epochs_with_late_ranks(domains: Domains, network: cases.Network) -> None:
    """Nine routings in turns; before each round every rank sleeps for a time of its own."""
    case = domains.case(kind="any", num_topk=3, tokens=(33, 0, 16, 9))
    assert not any(domains.run(cases.over, network, epochs_differ, case, 9, 100))


def test_the_number_of_blocks_does_not_change_a_bit(domains: Domains) -> None:
    """As far as the blocks of all ranks fit on one GPU."""
    assert not any(domains.run(block_counts_differ, domains.case(kind="any"), (2, 4, 8, 16), 64))


@pytest.mark.parametrize("network", [PLAIN, late(17)], ids=["plain", "late17"])
def test_two_plans_interleave(domains: Domains, network: cases.Network) -> None:
    """Two dispatches, then two combines; each plan is used again."""
    case = domains.case(kind="any")
    assert not any(domains.run(cases.over, network, plans_interleaved, case))


@pytest.mark.parametrize("network", [PLAIN, late(19)], ids=["plain", "late19"])
def test_records_may_leave_before_the_counts(
    domains: Domains, plugin: str, network: cases.Network
) -> None:
    """By `rail_send`, all of them and each once: the dispatch behind the counts sends none."""
    case = domains.case(kind="any", num_topk=4, tokens=(65, 33, 0, 64))
    for early in domains.run(cases.over, network, cases.early_rounds, case, plugin, 4):
        assert not early.differ
        assert early.before_counts == early.altogether == +early.tokens


@pytest.mark.parametrize("network", [PLAIN, late(23)], ids=["plain", "late23"])
def test_each_token_crosses_to_each_domain_once_and_so_does_its_sum(
    domains: Domains, plugin: str, network: cases.Network
) -> None:
    """One put a (token, remote domain) there and one back, all of one size; no other put."""
    case = domains.case(num_topk=4)
    ranks = domains.run(cases.over, network, cases.puts_of_a_round, case, plugin)
    for crossed in ranks:
        there: Counter[int] = Counter()
        for (peer, _), number in crossed.dispatch.items():
            there[peer] += number
        assert there == +crossed.tokens
    for rank, crossed in enumerate(ranks):
        back: Counter[int] = Counter()
        for (peer, _), number in crossed.combine.items():
            back[peer] += number
        assert back == +Counter({p: other.tokens[rank] for p, other in enumerate(ranks)})
    sizes = {size for crossed in ranks for _, size in (*crossed.dispatch, *crossed.combine)}
    row_bytes, most_beside = 2 * case.hidden, 4 * case.num_topk + 16
    assert all(row_bytes <= size <= row_bytes + most_beside for size in sizes)


@pytest.mark.parametrize("network", [PLAIN, late(5)], ids=["plain", "late5"])
def test_a_graph_of_a_layer_replays_with_other_routings(
    domains: Domains, network: cases.Network
) -> None:
    """Forward and backward in one CUDA graph: the proxy's thread runs whether or not one waits."""
    case = domains.case(tokens=(64, 32, 48, 64), capacity=64 * domains.num_ranks * 2, alignment=16)
    assert not any(domains.run(cases.over, network, graph_replays_differ, case, 4))


def test_a_graph_of_sizes_that_the_host_waits_for_is_refused(domains: Domains) -> None:
    for message in domains.run(cases.captured_without_capacity, domains.case()):
        assert "set recv_capacity_rows" in message


def test_static_mode_drops_what_the_reference_drops(domains: Domains) -> None:
    """And tells the true demand."""
    case = domains.case(capacity=48, kind="skewed", alignment=16)
    assert not any(domains.run(rounds_differ, case, 2))


@pytest.mark.parametrize("precision", ["rounded", "exact"])
def test_persistent_memory_is_the_formulas(domains: Domains, precision: str) -> None:
    """Window with all areas of the rails, and tables; NCCL's own queues come on top."""
    case = domains.case(
        hidden=2880, num_experts=40, num_sms=8, tokens=(512,) * 4, precision=precision
    )
    for held, formula in domains.run(cases.memory_of_group, case):
        assert held == formula


def test_a_domain_that_lags_within_the_deadline_delays_and_nothing_else(domains: Domains) -> None:
    lag_s = 0.5
    for told in domains.run(cases.lagging_domain, domains.case(kind="any"), lag_s):
        assert not told.phase
        assert told.seconds > 3 * lag_s - 0.2
        assert not told.differ


def test_limits_of_tests_leave_room_for_those_of_kernels() -> None:
    """Else a wait of ours that expires would look like a hang."""
    assert cases.RailCase().timeout_s * 4 < LIMIT_S
