"""How often plan, dispatch and combine wait for the GPU, counted by the profiler.

    torchrun --nproc-per-node 1 -m ep_dispatcher.profile.syncs --out docs/results/overlap.jsonl

Forward and backward of an empty layer (no experts), once with exact sizes (eager: the host is to
read the mailbox of each plan, without a CUDA call) and once with a capacity (static: it is to read
nothing). CUDA calls that wait are counted in the trace, waits for a mailbox where the device tier
makes them, in both modes alike. One rank, as the profiler cannot look through MPS.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ep_dispatcher import EpConfig, EPGroup, MoeShape, device
from ep_dispatcher.bench.results import ResultLog, log_of_module
from ep_dispatcher.device_wait import wait_for_answer
from ep_dispatcher.profile.trace import Trace
from ep_dispatcher.profile.watch import Tell, Watch, add_limit
from ep_dispatcher.ranges import LAYER, phase
from ep_dispatcher.train.progress import say

SHAPE = MoeShape(hidden=2048, num_topk=8, num_experts=64)
TOKENS = 2048
_LAYERS = 4


class MailboxWaits:
    """How often the host waited for a plan's mailbox."""

    def __init__(self) -> None:
        """Not yet."""
        self.count = 0


class Seen(NamedTuple):
    """What was recorded of some layers: their trace, and the host's waits for mailboxes."""

    trace: Trace
    mailbox_waits: int


@contextlib.contextmanager
def counting_waits() -> Iterator[MailboxWaits]:
    """Count the device tier's calls of `wait_for_answer` inside."""
    waits = MailboxWaits()

    def counted(*args: Any) -> bool:  # noqa: ANN401
        waits.count += 1
        return wait_for_answer(*args)

    with mock.patch.object(device, "wait_for_answer", counted):
        yield waits


def run_layers(group: EPGroup, topk_idx: torch.Tensor, x: torch.Tensor, tell: Tell) -> Seen:
    """Run some layers, forward and backward inside one range each, and read their trace."""

    def layer() -> None:
        with phase(LAYER, on_gpu=True):
            plan = group.plan(topk_idx)
            weights = torch.ones(topk_idx.shape, device=x.device, requires_grad=True)
            recv_x, recv_weights = group.dispatch(plan, x, weights)
            assert recv_weights is not None
            out = group.combine(plan, recv_x * recv_weights.unsqueeze(1).to(recv_x.dtype))
            out.backward(x.detach())

    tell("layers to warm up")
    for _ in range(3):
        layer()
    torch.cuda.synchronize()
    tell("layers under the profiler, whose own start takes a while")
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with counting_waits() as waits, profile(activities=kinds) as profiler:
        for _ in range(_LAYERS):
            layer()
        torch.cuda.synchronize()
    tell("reading the trace")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return Seen(Trace.read(path), waits.count)


def main(words: Sequence[str]) -> int:
    """Measure both modes on one GPU; returns the exit code."""
    parser = argparse.ArgumentParser(prog="ep_dispatcher.profile.syncs", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results/overlap.jsonl"))
    add_limit(parser)
    args = parser.parse_args(words)
    with Watch(args.out, args.limit) as watch:
        torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        log = log_of_module(args.out, "ep_dispatcher.profile.syncs", words)
        measure(log, watch)
        dist.destroy_process_group()
    return 0


def measure(log: ResultLog, tell: Tell) -> None:
    """Count both modes over the default process group, of one rank, and record them."""
    scores = torch.rand(TOKENS, SHAPE.num_experts, device="cuda")
    topk_idx = scores.topk(SHAPE.num_topk, 1).indices
    x = torch.randn(TOKENS, SHAPE.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for mode, capacity in (("eager", None), ("static", TOKENS * SHAPE.num_topk)):
        config = EpConfig(
            shape=SHAPE, max_tokens_per_rank=TOKENS, recv_capacity_rows=capacity, tier="device"
        )
        tell(f"{mode}: opening the group")
        with EPGroup.create(None, config) as group:
            seen = run_layers(group, topk_idx, x, tell)
        record(mode, seen, log)


def record(mode: str, seen: Seen, log: ResultLog) -> None:
    """Append the line of a mode and print it; figures are of one layer."""
    trace, waits = seen
    log.write(
        sharing="one per gpu",
        suite="overlap",
        backend="ep_dispatcher/device",
        variant=mode,
        phase="step",
        ranks=1,
        num_tokens=TOKENS,
        hidden=SHAPE.hidden,
        num_topk=SHAPE.num_topk,
        num_experts=SHAPE.num_experts,
        dtype=SHAPE.dtype,
        host_syncs=(trace.num_syncs + waits) / _LAYERS,
        cuda_synchronisations=trace.num_syncs / _LAYERS,
    )
    say(
        f"{mode}: {trace.num_layers} layers, {trace.num_syncs} CUDA calls that wait, "
        f"{waits} waits for a mailbox, {len(trace.work)} kernels"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
