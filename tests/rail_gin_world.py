"""Worlds of ranks in several domains, joined by NCCL's own GIN over the loopback plugin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from device_cases import warm_up
from multi_process import ProcessWorld
from rail_gin_cases import RailCase

LIMIT_S = 45.0  # of one call on all ranks
WORLDS = [(4, 2), (2, 1), (4, 1), (8, 4), (8, 2), (8, 1)]  # ranks, ranks of a domain
WORLD_IDS = [f"{ranks // size}x{size}" for ranks, size in WORLDS]


class Domains:
    """A world of ranks in domains."""

    def __init__(self, world: ProcessWorld, num_ranks: int, domain_size: int) -> None:
        """Keep what tests ask for."""
        self._world = world
        self.num_ranks = num_ranks
        self.domain_size = domain_size

    def case(self, **changes: Any) -> RailCase:  # noqa: ANN401
        """A case of this world."""
        return RailCase(domain_size=self.domain_size, **changes)

    def run(self, work: Callable[..., Any], *args: object) -> list[Any]:
        """Call `work(process_group, *args)` on all ranks; returns their values."""
        return self._world.run(work, *args, timeout_s=LIMIT_S)


@contextlib.contextmanager
def open_domains(num_ranks: int, domain_size: int, plugin: str) -> Iterator[Domains]:
    """D x L processes that stay up inside."""
    variables = {
        "NCCL_LSA_TEAM_SIZE": str(domain_size),
        "NCCL_RMA_PLUGIN": plugin,
        "NCCL_GIN_TYPE": "2",
        "NCCL_RMA_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "LOOPBACK_RMA_SLOT_BYTES": "16384",  # eight ranks fit into 64 MiB of /dev/shm
    }
    if num_ranks <= 4:  # queues enough that none of the plugin's copies waits behind a kernel
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = str(64 // num_ranks)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with ProcessWorld(num_ranks) as world:
            world.run(warm_up)
            yield Domains(world, num_ranks, domain_size)
