"""Worlds with more ranks than one launch holds: domains of 3, 6 and 8 ranks, up to 32 domains.

Each rank's kernels run on a stream of its own.
"""

from __future__ import annotations

import pytest
from rail_cases import WORLDS, check_rail_round, new_rail_round, new_rail_world

pytestmark = pytest.mark.gpu(1)

WIDE = [(3, 2), (2, 3), (3, 3), (2, 6), (2, 8), (6, 2), (16, 1), (32, 1)]  # domains, ranks of each
_PUTTING_WARPS = 8  # of a block; each serves one domain


@pytest.mark.parametrize("net", ["loop", "chaos"])
@pytest.mark.parametrize(("num_domains", "domain_size"), WIDE)
def test_a_round_equals_the_specification(num_domains: int, domain_size: int, net: str) -> None:
    assert (num_domains, domain_size) not in WORLDS
    num_ranks = num_domains * domain_size
    world = new_rail_world(
        num_domains, domain_size, net=net, num_experts=max(16, num_ranks + 3), hidden=64,
        max_tokens=66, num_channels=1, ring_depth=2,
        num_blocks=-(-(num_domains - 1) // _PUTTING_WARPS),
    )  # fmt: skip
    for seed, kind in enumerate(("uniform", "duplicates", "mostly_dropped")):
        tokens = [66 - 2 * rank for rank in range(num_ranks)]
        work = new_rail_round(world, kind, seed, tokens=[max(0, count) for count in tokens])
        check_rail_round(world, work, streams=True)
