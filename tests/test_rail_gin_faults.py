"""Several domains over NCCL's own GIN where the network or a domain fails: told, in time, and over.

As tests/test_rail_gin.py; apart from it, as a rank that hangs here must not cost its results.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import rail_gin_cases as cases
from fault_causes import names_cause
from rail_gin_world import WORLD_IDS, WORLDS, Domains, open_domains

DEADLINE_S = 2.0
CLOSING_S = 10.0  # NCCL's abort of a communicator, and that of the plugin

pytestmark = [pytest.mark.gpu(1), pytest.mark.fault, pytest.mark.timeout(120)]


_SMALL = WORLD_IDS[:3]  # up to four ranks


def worlds(*names: str) -> pytest.MarkDecorator:
    """A test's worlds, of D x L ranks each."""
    chosen = [WORLDS[WORLD_IDS.index(name)] for name in names]
    return pytest.mark.parametrize("domains", chosen, ids=names, indirect=True)


@pytest.fixture(scope="module")
def domains(request: pytest.FixtureRequest, plugin: str) -> Iterator[Domains]:
    """A world, for all tests that have it."""
    num_ranks, domain_size = request.param
    with open_domains(num_ranks, domain_size, plugin) as opened:
        yield opened


def check_told(domains: Domains, answers: list[cases.Told], culprits: set[int]) -> None:
    """Every rank was told in time of what the culprits have caused, and a new group was right."""
    for ep_rank, told in enumerate(answers):
        assert told.phase
        assert told.seconds < 2 * DEADLINE_S + 2
        assert told.closing_s < CLOSING_S
        blames = ep_rank in culprits or names_cause(
            (told.rank, told.peer), culprits, domains.domain_size
        )
        assert blames, f"{culprits} are to blame, but rank {ep_rank} was told {told}: {answers}"
    named = {told.peer for told in answers} | {told.rank for told in answers}
    named.update(*(told.behind for told in answers))
    assert named & culprits, f"{culprits} of {domains.num_ranks} ranks are to blame: {answers}"
    check_after([told.after for told in answers])


def check_after(answers: list[cases.After]) -> None:
    """The new groups of all ranks were right."""
    trouble = cases.trouble_after(answers)
    assert not trouble, trouble


@pytest.mark.parametrize("fault", ["stall:rank=1", "drop:rank=1:after=3", "fail:rank=1:after=3"])
@worlds(*_SMALL)
def test_a_network_that_fails_is_told_in_time_and_a_new_group_works(
    domains: Domains, plugin: str, fault: str
) -> None:
    """Rank 1's side of the wire stands still, or loses a put, or says that one failed."""
    case = domains.case(timeout_s=DEADLINE_S)
    check_told(domains, domains.run(cases.fault_and_after, case, plugin, fault), {1})


@worlds("2x4")
def test_a_lost_put_among_eight_ranks_is_told_in_time(domains: Domains, plugin: str) -> None:
    """Also by the six ranks that are on other rails."""
    case = domains.case(timeout_s=DEADLINE_S)
    answers = domains.run(cases.fault_and_after, case, plugin, "drop:rank=1:after=3")
    check_told(domains, answers, {1})


# SMs and slots where eight ranks share a GPU: with all blocks on it at once, two lanes to each of
# seven peers are left, which wait for some 990 tokens each; a queue holds 256 posts.
EIGHT = {"num_sms": 8, "num_topk": 2}


@worlds(*_SMALL, "8x1")
def test_a_network_that_stands_still_fills_no_queue(domains: Domains, plugin: str) -> None:
    """However many tokens wait to be put: a post to a full queue would wait for ever."""
    sizes = EIGHT if domains.num_ranks == 8 else {"num_sms": 16, "num_topk": 8}
    case = domains.case(timeout_s=DEADLINE_S, tokens=(4096,), hidden=64, **sizes)
    answers = domains.run(cases.fault_and_after, case, plugin, "stall:rank=1")
    check_told(domains, answers, {1})


@worlds(*_SMALL)
def test_a_domain_past_the_deadline_is_told_and_a_new_group_works(domains: Domains) -> None:
    case = domains.case(timeout_s=DEADLINE_S)
    last = set(range(domains.num_ranks - domains.domain_size, domains.num_ranks))
    answers = domains.run(cases.lagging_domain, case, 1.5 * DEADLINE_S)
    check_told(domains, answers, last)


@worlds(*_SMALL)
def test_weights_in_one_domain_only_are_told_by_the_next_plan(domains: Domains) -> None:
    answers = domains.run(cases.weights_in_one_domain, domains.case(timeout_s=DEADLINE_S))
    for message, _ in answers:
        assert "whether it passed topk_weights to an earlier dispatch" in message
    check_after([after for _, after in answers])
