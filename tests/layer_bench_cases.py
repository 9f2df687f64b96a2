"""What ranks of the layer's measurement do when some of them fail; run by test_layer_bench.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.profile.layer import LayerBench, Variant


class Scripted(LayerBench):
    """Its variants raise on one rank, at the call that their name says; nothing is moved."""

    def __init__(self, names: list[str]) -> None:
        """Take the names of the variants; no layer is built."""
        self.variants = [Variant(name, None, None, None) for name in names]  # type: ignore[arg-type]
        self._calls = dict.fromkeys(names, 0)
        self.stepped: list[str] = []

    def _output(self, variant: Variant) -> Tensor:
        self._fail_at(variant, "output")
        return torch.ones(3)

    def _step(self, variant: Variant) -> tuple[float, float]:
        dist.barrier()  # as the real one has: a rank that is elsewhere would meet it wrongly
        self._calls[variant.name] += 1
        self._fail_at(variant, f"step{self._calls[variant.name]}")
        return 1.0, 2.0

    def _fail_at(self, variant: Variant, call: str) -> None:
        if variant.name == f"{call} on {dist.get_rank()}":
            raise RuntimeError(f"{call} has failed")


def variants_that_run(group: dist.ProcessGroup, names: list[str]) -> list[tuple[str, str]]:
    """Names and errors of all variants after the warm-up, on this rank."""
    bench = Scripted(names)
    for variant in bench.variants:
        bench._warm_up(variant, torch.ones(3))
    return [(variant.name, variant.error) for variant in bench.variants]
