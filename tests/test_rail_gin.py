"""Several domains over NCCL's own GIN, on one GPU: bit for bit the reference tier's results.

The network is the loopback plugin (docs/loopback_rma.md), plain or late and reordered. Needs a GPU
and MPS, so that the ranks' kernels run at the same time. LOOPBACK_RMA_PLUGIN may name a plugin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import rail_gin_cases as cases
from device_cases import rounds_differ
from multi_process import ProcessWorld
from rail_gin_cases import RailCase

ROOT = Path(__file__).parents[1]
LATE = {"LOOPBACK_RMA_DELAY_US": "200", "LOOPBACK_RMA_REORDER": "1", "LOOPBACK_RMA_SEED": "3"}
NETWORKS = pytest.mark.parametrize("network", [{}, LATE], ids=["plain", "late and reordered"])

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(180)]


class Domains:
    """A world of ranks in domains."""

    def __init__(self, world: ProcessWorld, num_ranks: int, domain_size: int) -> None:
        """Keep what tests ask for."""
        self.world = world
        self.num_ranks = num_ranks
        self.domain_size = domain_size

    def case(self, **changes: object) -> RailCase:
        """A case of this world; tokens are cut to its ranks."""
        tokens = changes.pop("tokens", (64,) * self.num_ranks)
        assert isinstance(tokens, tuple)
        values = {"tokens": tokens[: self.num_ranks], "domain_size": self.domain_size, **changes}
        return RailCase(**values)  # type: ignore[arg-type]


WORLDS = [(4, 2), (2, 1), (4, 1)]


@pytest.fixture(
    scope="module", params=WORLDS, ids=[f"{ranks // size}x{size}" for ranks, size in WORLDS]
)
def domains(request: pytest.FixtureRequest, plugin: str) -> Iterator[Domains]:
    """D x L processes that stay up for all tests."""
    num_ranks, domain_size = request.param
    variables = {
        "NCCL_LSA_TEAM_SIZE": str(domain_size),
        "NCCL_RMA_PLUGIN": plugin,
        "NCCL_GIN_TYPE": "2",
        "NCCL_RMA_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with ProcessWorld(num_ranks) as world:
            yield Domains(world, num_ranks, domain_size)


@NETWORKS
def test_every_result_is_the_references(domains: Domains, network: dict[str, str]) -> None:
    """Plan, rows, weights, sums and both gradients, with routings that change."""
    case = domains.case(kind="any", num_topk=4, alignment=16)
    assert not any(domains.world.run(cases.rounds_differ_on, case, 3, network))


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": (65, 0, 1, 33), "num_topk": 3, "kind": "any"},
        {"dtype": "float32", "hidden": 1024, "num_experts": 6},
        {"precision": "exact", "num_topk": 4},
        {"kind": "all_to_one"},
    ],
    ids=["ragged", "float32", "exact", "all to one"],
)
def test_other_shapes_are_the_references(domains: Domains, changes: dict[str, object]) -> None:
    assert not any(domains.world.run(rounds_differ, domains.case(**changes)))


def test_each_token_crosses_to_each_domain_once_and_so_does_its_sum(
    domains: Domains, plugin: str
) -> None:
    """One put a (token, remote domain) there and one back, all of one size; no other put."""
    case = domains.case(num_topk=4)
    ranks = domains.world.run(cases.puts_of_a_round, case, plugin)
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


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["stall:rank=1", "drop:rank=1:after=3", "fail:rank=1:after=3"])
def test_a_network_that_fails_is_told_in_time_and_a_new_group_works(
    domains: Domains, plugin: str, fault: str
) -> None:
    deadline_s = 2.0
    answers = domains.world.run(
        cases.fault_and_after, domains.case(timeout_s=deadline_s), plugin, fault
    )
    for seconds, phase, differ in answers:
        assert phase
        assert seconds < 2 * deadline_s + 1
        assert not differ
