"""Time plan, dispatch and combine with all ranks as one launch on one GPU; no processes, no NCCL.

    python -m ep_dispatcher.bench.kernels_one_gpu --out results.jsonl

Every setting is first compared with the specification, bit for bit; then each kernel is timed by
CUDA events over its one launch (so the time is that of the slowest rank), with the L2 swept
between rounds; `plan_warm` is a plan's share of twenty in one graph. Needs the module that
scripts/gpu_kernels.sh builds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher.bench.one_gpu import KernelPlan, OneGpuWorld, WorldShape, load_kernels
from ep_dispatcher.bench.one_gpu_spec import Round, assert_same_bits, make_round
from ep_dispatcher.bench.results import ResultLog, log_of_module, summarise_times
from ep_dispatcher.errors import UnavailableError
from ep_dispatcher.memory import RING_DEPTH
from ep_dispatcher.routing import RoutingSpec, make_topk_idx

_SWEEP_BYTES = 256 << 20  # several times the L2
_WARM_UP = 5
_IN_A_GRAPH = 20  # launches, where the L2 stays warm


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One line of the table: `num_sms` blocks for each of `ranks` ranks."""

    hidden: int
    num_topk: int
    num_experts: int
    num_sms: int
    num_tokens: int = 4096
    ranks: int = 4
    ring_depth: int = RING_DEPTH


SETTINGS = [
    *(Setting(hidden=7168, num_topk=8, num_experts=256, num_sms=sms) for sms in (8, 16, 32)),
    *(Setting(hidden=2880, num_topk=4, num_experts=128, num_sms=sms) for sms in (8, 16, 32)),
    *(Setting(hidden=4096, num_topk=2, num_experts=8, num_sms=sms) for sms in (8, 16, 32)),
]


# Forward and backward of the pair; the experts' time is not in it.
PAIRS = {
    "pair": ("dispatch", "combine", "combine_backward", "dispatch_backward"),
    "pair_gather": (
        "dispatch",
        "combine_gather",
        "combine_backward",
        "dispatch_backward_gather",
    ),
}


class Bench:
    """A setting's world, checked on construction.

    Args:
        setting: what to run.
        kernels: the extension module.
    """

    def __init__(self, setting: Setting, kernels: object) -> None:
        """Make inputs, run one round and compare it with the specification."""
        self.setting = setting
        copies = setting.num_tokens * setting.num_topk
        row_bytes = 2 * setting.hidden
        self.world = OneGpuWorld(
            WorldShape(
                ep_size=setting.ranks,
                num_experts=setting.num_experts,
                num_topk=setting.num_topk,
                hidden=setting.hidden,
                max_tokens=setting.num_tokens,
                num_channels=setting.num_sms,
                ring_depth=setting.ring_depth,
                output_bytes=copies * 5 // 4 * (row_bytes + 4),
            ),
            kernels,
        )
        spec = RoutingSpec(
            name="uniform", num_experts=setting.num_experts, num_topk=setting.num_topk
        )
        routing = [make_topk_idx(spec, setting.num_tokens, r) for r in range(setting.ranks)]
        self.work: Round = make_round(self.world, routing)
        self.plans: list[KernelPlan] = [
            self.world.new_plan(rank, *topk.shape) for rank, topk in enumerate(routing)
        ]
        self.outputs = self.world.new_outputs(self.work.rows, weights=True)
        self.out = [torch.full_like(rows, float("nan")) for rows in self.work.x]
        self.grads = [torch.full_like(w, float("nan")) for w in self.work.topk_weights]
        self.placed = self.world.place_rows(self.work.expert_out, self.work.row_grads)
        self.calls = {
            "plan": ("route", self.world.route_calls(self.plans, self.work.topk_idx)),
            "dispatch": (
                "dispatch",
                self.world.dispatch_calls(
                    self.plans, self.work.x, self.work.topk_weights, self.outputs
                ),
            ),
            "dispatch_dedup": (
                "dispatch",
                self.world.dispatch_calls(
                    self.plans, self.work.x, self.work.topk_weights, self.outputs, duplicate=1
                ),
            ),
            "combine_backward": (
                "dispatch",
                self.world.dispatch_calls(
                    self.plans, self.work.x, None, [(rows, None) for rows, _ in self.outputs]
                ),
            ),
        } | self._combine_calls()
        self._sweep = torch.empty(_SWEEP_BYTES, dtype=torch.uint8, device=self.world.device)

    def _combine_calls(self) -> dict[str, tuple[str, list[Any]]]:
        """Combine, forward and as dispatch's backward, in both forms."""
        expert_out, row_grads = self.placed
        calls = {}
        for form, suffix in (("push", ""), ("gather", "_gather")):
            calls["combine" + suffix] = self.world.combine_calls(
                self.plans, expert_out, self.out, form=form
            )
            calls["dispatch_backward" + suffix] = self.world.combine_calls(
                self.plans, expert_out, self.out, row_grads, self.grads, form
            )
        return {phase: ("combine", of_ranks) for phase, of_ranks in calls.items()}

    def check(self) -> None:
        """Compare one round with the specification.

        Raises:
            AssertionError: a bit differs.
        """
        for phase, (name, _) in self.calls.items():
            self.run(phase)
            if name == "dispatch":
                self._check_rows()
            if name == "combine":
                self._check_sums(grads=phase.startswith("dispatch_backward"))

    def check_last_pair(self) -> None:
        """Compare what the last pair of dispatch and combine has left with the specification.

        Raises:
            AssertionError: a bit differs.
        """
        self._check_rows()
        self._check_sums(grads=True)

    def _check_sums(self, *, grads: bool) -> None:
        for rank, out in enumerate(self.out):
            assert_same_bits("out", out, self.work.out[rank])
            out.fill_(float("nan"))
            if grads:
                assert_same_bits("weights_grad", self.grads[rank], self.work.weight_grads[rank])
                self.grads[rank].fill_(float("nan"))

    def _check_rows(self) -> None:
        for rank, (recv_x, recv_weights) in enumerate(self.outputs):
            assert recv_weights is not None
            assert_same_bits("recv_x", recv_x, self.work.recv_x[rank])
            assert_same_bits("recv_weights", recv_weights, self.work.recv_weights[rank])
            recv_x.fill_(float("nan"))

    def run(self, phase: str) -> None:
        """Launch one kernel for all ranks."""
        name, calls = self.calls[phase]
        self.world.launch(name, calls)

    def run_all(self, phases: Sequence[str]) -> None:
        """Launch kernels one after another, each for all ranks."""
        for phase in phases:
            self.run(phase)

    def time_us(self, phases: Sequence[str], rounds: int) -> list[float]:
        """Times of kernels in a row, each round with a cold L2 before the first."""
        return time_rounds_us(lambda: self.run_all(phases), rounds, self._sweep)

    def time_warm_us(self, phase: str, rounds: int) -> list[float]:
        """Times of one kernel among many in one graph, which find in the L2 what the last left."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_IN_A_GRAPH):
                self.run(phase)
        times = time_rounds_us(graph.replay, rounds, self._sweep)
        return [time_us / _IN_A_GRAPH for time_us in times]


def time_rounds_us(call: Callable[[], None], rounds: int, sweep: Tensor) -> list[float]:
    """Event times of `call`, each after a read of `sweep`; warm-up rounds left out."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(rounds + _WARM_UP)
    ]
    for start, end in events:
        sweep_before_launch(sweep)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [1000 * start.elapsed_time(end) for start, end in events[_WARM_UP:]]


def sweep_before_launch(sweep: Tensor) -> None:
    """Replace what the L2 holds, and keep the GPU busy while the host queues what is timed."""
    sweep.amax()  # reads: a write would leave its own write-back to the kernel
    torch.cuda._sleep(20_000)  # so that the launch is queued before the clock starts


def copy_rate_gbps(rounds: int = 10) -> float:
    """Device-to-device copy, bytes read plus bytes written: this run's ceiling."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    times = time_rounds_us(copy, rounds, target)
    return 2 * source.numel() / sorted(times)[rounds // 2] / 1e3


def fill_rate_gbps(rounds: int = 10) -> float:
    """Bytes written by a fill: what stores alone can reach in this run."""
    target = torch.ones(2 << 30, dtype=torch.uint8, device="cuda")
    sweep = target[:_SWEEP_BYTES]

    def fill() -> None:
        target.zero_()

    times = time_rounds_us(fill, rounds, sweep)
    return target.numel() / sorted(times)[rounds // 2] / 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all settings, print a table, append one line for each phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines file to append to")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", type=int, default=None, help="number of SMs; default all")
    parser.add_argument("--hidden", type=int, default=None, help="elements of a row; default all")
    parser.add_argument("--phases", nargs="*", default=None, help="what to time; default all")
    parser.add_argument("--ring-depth", type=int, default=RING_DEPTH)
    parser.add_argument("--kernels", default="ep_kernels", help="module to time")
    options = parser.parse_args(arguments)
    words = arguments or sys.argv[1:]
    log = options.out and log_of_module(options.out, "ep_dispatcher.bench.kernels_one_gpu", words)
    try:
        kernels = load_kernels(options.kernels)
    except UnavailableError as error:
        parser.exit(2, f"kernels_one_gpu: error: {error}\n")
    ceilings = {"ceiling_GBps": round(copy_rate_gbps()), "fill_GBps": round(fill_rate_gbps())}
    print(f"a copy reads and writes (ceiling), a fill writes: {ceilings}")  # noqa: T201
    for plain in SETTINGS:
        if options.only in (None, plain.num_sms) and options.hidden in (None, plain.hidden):
            bench = Bench(replace(plain, ring_depth=options.ring_depth), kernels)
            _report(bench, log, options, ceilings)
            del bench
            torch.cuda.empty_cache()
    return 0


def _report(
    bench: Bench, log: ResultLog | None, options: argparse.Namespace, ceilings: dict[str, int]
) -> None:
    bench.check()
    setting = bench.setting
    copies = setting.num_tokens * setting.num_topk
    row_bytes = 2 * setting.hidden
    cells = []
    timed = {phase: (phase,) for phase in ("plan_warm", *bench.calls)} | PAIRS
    for phase in options.phases or timed:
        parts = timed[phase]
        warm = phase == "plan_warm"
        times = summarise_times(
            bench.time_warm_us("plan", options.rounds)
            if warm
            else bench.time_us(parts, options.rounds)
        )
        payload = 0 if phase in ("plan", "plan_warm") else copies * row_bytes * len(parts)
        per_sm = payload / float(times["median_us"]) / 1e3 / setting.num_sms
        cells.append(f"{phase} {times['median_us']:7.1f} (min {times['min_us']:.1f}) {per_sm:5.1f}")
        if log:
            log.write(
                sharing="one launch",
                suite="one_domain",
                backend="ep_dispatcher/device",
                phase=phase,
                layout="expert_major",
                ranks=setting.ranks,
                domains=1,
                num_sms=setting.num_sms,
                num_tokens=setting.num_tokens,
                hidden=setting.hidden,
                num_topk=setting.num_topk,
                num_experts=setting.num_experts,
                dtype="bfloat16",
                routing="uniform",
                seed=0,
                checked=True,
                launches=_IN_A_GRAPH if warm else len(parts),
                **ceilings,
                **times,
            )
    print(  # noqa: T201
        f"H={setting.hidden} K={setting.num_topk} E={setting.num_experts} "
        f"SMs={setting.num_sms}: " + " | ".join(cells),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
