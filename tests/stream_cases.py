"""What a rank of the stream tests does. Each function runs in a ProcessWorld of one rank."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from device_cases import Case, inputs, same_bits

from ep_dispatcher import EPGroup

# Rows of 4 MB. Torch cuts from the start of the free part, so an address tells about reuse.
SMALL = Case(kind="even", hidden=4096, tokens=(256,), output_bytes=32 << 20)
LONG_S = 0.8
_CYCLES_PER_S = 1.7e9  # of any GPU that there is, within a factor of two


def _keep_busy() -> None:
    """Occupy the current stream for about `LONG_S`."""
    torch.cuda._sleep(int(LONG_S * _CYCLES_PER_S))


def seconds_beside_a_busy_stream(process_group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    """Dispatch on another stream than the first one, which works on something long meanwhile."""
    side = torch.cuda.Stream()
    with EPGroup.create(process_group, case.config("device")) as group:
        given = inputs(case, group.ep_rank)
        plan = group.plan(given.topk_idx)
        kept = group.dispatch(plan, given.x)[0].clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):  # what it loads and lets go is not timed
            group.dispatch(plan, given.x)
        torch.cuda.synchronize()
        _keep_busy()
        began = time.perf_counter()
        with torch.cuda.stream(side):
            rows = group.dispatch(plan, given.x)[0]
            copy = rows.clone()
        side.synchronize()
        passed_s = time.perf_counter() - began
        still_busy = not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        return {"s": passed_s, "still_busy": still_busy, "rows": same_bits(copy, kept)}


def rows_read_late(process_group: dist.ProcessGroup, case: Case, how: str) -> dict[str, bool]:
    """Read rows on the first stream after a long pause, and write their memory on another one.

    Args:
        process_group: of one rank.
        case: sizes.
        how: the rows are given back: "deleted" or "resized"; "unprotected" is "deleted" without
            the events that protect them.
    """
    side = torch.cuda.Stream()
    with EPGroup.create(process_group, case.config("device")) as group:
        given = inputs(case, group.ep_rank)
        plan = group.plan(given.topk_idx)
        group.dispatch(plan, given.x)
        want = group.dispatch(plan, given.x)[0].clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            group.dispatch(plan, given.x)  # its kernels are loaded
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")  # torch looks what other streams are done with
        if how == "unprotected":
            backend: Any = group._backend
            backend._session.outputs._reuse.events_before = lambda _: []
        rows = group.dispatch(plan, given.x)[0]
        address = rows.data_ptr()
        _keep_busy()
        read = rows.clone()
        if how == "resized":
            rows.untyped_storage().resize_(0)
        else:
            del rows
        with torch.cuda.stream(side):
            other = group.dispatch(plan, given.x + 1)[0]
        reused = other.data_ptr() == address
        torch.cuda.synchronize()
        return {"reused": reused, "as_written": same_bits(read, want)}
