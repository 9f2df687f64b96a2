"""Measures what the machine can do, in the run it is compared with: memory and links.

Memory: every rank copies a large tensor at the same time; bytes read and written count. Link: an
all-to-all of equal, large parts; only what leaves a rank counts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ep_dispatcher.bench.stopwatch import Stopwatch

_ROUNDS = 7
_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}


def measure_ceilings(
    group: dist.ProcessGroup, device: torch.device, *, link: bool
) -> dict[str, float]:
    """GB/s of one rank while all ranks do the same; median of a few rounds.

    Args:
        group: of all ranks, for tensors on `device`.
        device: of the tensors.
        link: whether to measure links too; without a link of their own ranks have none.

    Returns:
        "memory": read plus write of a copy; "link": sent by an all-to-all (absent with one rank).
    """
    size = _BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    watch = Stopwatch(group, device)
    memory_us, link_us = [], []
    ranks = group.size()
    link = link and ranks > 1
    part = size // 8 // ranks * ranks
    for _ in range(_ROUNDS):
        watch.begin()
        target.copy_(source)
        watch.lap("memory")
        if link:
            watch.begin()
            dist.all_to_all_single(target[:part], source[:part], group=group)
            watch.lap("link")
        times = watch.read()
        memory_us.append(times["memory"])
        link_us += [times["link"]] if link else []
    ceilings = {"memory": _rate(2 * size, memory_us)}
    if link:
        ceilings["link"] = _rate(part * (ranks - 1) // ranks, link_us)
    return ceilings


def _rate(size_bytes: int, times_us: list[float]) -> float:
    """GB/s (1e9 bytes) at the median time."""
    return size_bytes / sorted(times_us)[len(times_us) // 2] / 1000
