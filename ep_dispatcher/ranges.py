"""Names of the phases of a layer in profiles: a torch.profiler range and an NVTX range in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

PREFIX = "ep:"
PLAN = PREFIX + "plan"
DISPATCH = PREFIX + "dispatch"
EXPERTS = PREFIX + "experts"
COMBINE = PREFIX + "combine"
DISPATCH_BACKWARD = PREFIX + "dispatch_backward"
COMBINE_BACKWARD = PREFIX + "combine_backward"
SHARED_EXPERTS = PREFIX + "shared_experts"
LAYER = PREFIX + "layer"


@contextmanager
def phase(name: str, *, on_gpu: bool) -> Iterator[None]:
    """Mark what is launched inside as one phase; costs microseconds where nothing records.

    Args:
        name: one of the constants above.
        on_gpu: also open an NVTX range, for Nsight Systems.
    """
    with record_function(name):
        if on_gpu:
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if on_gpu:
                torch.cuda.nvtx.range_pop()
