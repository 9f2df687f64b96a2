"""Worlds with more ranks than one launch holds: domains of up to 12 ranks, up to 32 domains.

Each rank's kernels run on a stream of its own.
"""

from __future__ import annotations

import pytest
from rail_cases import (
    WORLDS,
    check_rail_round,
    check_sent_round,
    new_rail_round,
    new_rail_world,
)

from ep_dispatcher.bench.one_gpu_spec import Round
from ep_dispatcher.bench.rail_world import RailWorld

pytestmark = pytest.mark.gpu(1)

WIDE = [  # domains, ranks of each; of 24 ranks at most 120 blocks are on the GPU at once
    (3, 2), (2, 3), (3, 3), (2, 6), (2, 8), (6, 2), (16, 1), (24, 1), (2, 12),
]  # fmt: skip
KINDS = ("uniform", "duplicates", "mostly_dropped")
MOST_TOKENS = 66
_PUTTING_WARPS = 8  # of a block; each serves one domain


def _world(num_domains: int, domain_size: int, net: str) -> RailWorld:
    """One block of each rank for its domain, and for the rails as few as there may be."""
    return new_rail_world(
        num_domains, domain_size, net=net, num_experts=max(16, num_domains * domain_size + 3),
        hidden=64, max_tokens=MOST_TOKENS, num_channels=1, ring_depth=2,
        num_blocks=-(-(num_domains - 1) // _PUTTING_WARPS), output_bytes=1 << 20,
    )  # fmt: skip


def _round(world: RailWorld, kind: str, seed: int) -> Round:
    """Fewer tokens the higher the rank."""
    tokens = [MOST_TOKENS - 2 * rank for rank in range(world.shape.ep_size)]
    return new_rail_round(world, kind, seed, tokens=tokens)


@pytest.mark.parametrize("net", ["loop", "chaos"])
@pytest.mark.parametrize(("num_domains", "domain_size"), WIDE)
def test_a_round_equals_the_specification(num_domains: int, domain_size: int, net: str) -> None:
    assert (num_domains, domain_size) not in WORLDS
    world = _world(num_domains, domain_size, net)
    for seed, kind in enumerate(KINDS):
        check_rail_round(world, _round(world, kind, seed), streams=True)


@pytest.mark.parametrize("net", ["loop", "chaos"])
def test_as_many_domains_as_there_may_be(net: str) -> None:
    """Records are sent by a launch of their own: blocks of both would not fit on one GPU."""
    world = _world(32, 1, net)
    for seed, kind in enumerate(KINDS):
        check_sent_round(world, _round(world, kind, seed), streams=True)
