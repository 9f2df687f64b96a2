"""Communication kernels beside real matrix products, in one process on one GPU.

    python -m ep_dispatcher.profile.beside --out docs/results/overlap.jsonl

The kernels of four ranks run as one launch on a stream of high priority, the products of one
rank's experts on another; their launches do not depend on each other, as under Megatron's combined
1F1B schedule, where one micro-batch travels while another computes. Communication begins first,
so its blocks hold their SMs. Everything is timed by events, one before and after each launch.

The ranks share one GPU, so they bring a quarter of the tokens each: together the launch moves as
many rows as one rank of 4096 tokens does on a GPU of its own. Needs the module that
scripts/gpu_kernels.sh builds.

What the products lose has two causes: SMs that they cannot have, and memory traffic. A kernel that
holds as many SMs and moves nothing ("SMs held idle") shows the first alone.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ep_dispatcher.bench.kernels_one_gpu import PAIRS, Bench, Setting
from ep_dispatcher.bench.one_gpu import load_kernels
from ep_dispatcher.bench.results import ResultLog, log_of_module, summarise_times
from ep_dispatcher.profile.clock import overlap_of
from ep_dispatcher.profile.products import EXPERT_ROWS, FFN_HIDDEN, HIDDEN, KINDS, Products
from ep_dispatcher.profile.watch import Tell, Watch, add_limit, positive
from ep_dispatcher.train.progress import say

RANKS, TOKENS, SLOTS, EXPERTS = 4, 1024, 8, 64
HELD_SMS = (8, 16, 32)
MORE_LEFT_FREE = (8, 16)  # beyond the held ones, that products are told to leave alone
_FILLED = 0.6  # of the products' time, by repeats of the communication
_PAIR = "pair_gather"
_WARM_UP = 2
_FIRST_CYCLES = 60_000  # about 30 us, by which communication begins before the products
_HOLDER = """
extern "C" __global__ void hold_sm(int microseconds) {
  unsigned long long now, start;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    __nanosleep(500);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < 1000ull * microseconds);
}
"""
_HOLDER_THREADS = 32
_HOLDER_SHARED_BYTES = 200 << 10  # no block of a product fits beside that

Interval = tuple[float, float]


@dataclass(frozen=True)
class Timeline:
    """One round: when each product and each communication kernel ran, in ms."""

    products: list[Interval]
    calls: list[Interval]

    @property
    def wall_ms(self) -> float:
        """From the first start to the last end."""
        both = self.products + self.calls
        return max(end for _, end in both) - min(start for start, _ in both)


@dataclass(frozen=True)
class Findings:
    """What rounds of products and communication, alone and together, showed.

    Attributes:
        hidden_fraction: part of the communication's time during which products ran too.
        saved_fraction: part of the communication's time alone that both together did not take.
        gemm_slow_down: of the products that communication ran beside all the time.
        num_products: how many those were, in all rounds.
        communication_slow_down: of the kernels that products ran beside all the time.
    """

    hidden_fraction: float
    saved_fraction: float
    gemm_slow_down: float | None
    num_products: int
    communication_slow_down: float | None


def evaluate(
    products: Sequence[Timeline], calls: Sequence[Timeline], both: Sequence[Timeline]
) -> Findings:
    """Compare rounds of both with rounds of each alone; each call with the median of its like.

    Example: products (0, 2), (2, 4) alone; one call (0, 1) alone; together products (0, 3),
    (3, 5) and the call (0, 3) -> hidden 1.0, slow-down 1.5 of one product, saved 0.0.
    """
    alone_ms = _medians([each.products for each in products])
    call_ms = _medians([each.calls for each in calls])
    total = hidden = 0.0
    gemm_pairs: list[tuple[float, float]] = []
    call_pairs: list[tuple[float, float]] = []
    for each in both:
        cover = [(each.products[0][0], each.products[-1][1])]
        total += sum(end - start for start, end in each.calls)
        hidden += sum(overlap_of(call, cover) for call in each.calls)
        held = (each.calls[0][0], each.calls[-1][1])
        gemm_pairs += _pairs_within(each.products, alone_ms, held)
        call_pairs += _pairs_within(each.calls, call_ms, cover[0])
    alone = statistics.median(each.wall_ms for each in products)
    communication = statistics.median(each.wall_ms for each in calls)
    together = statistics.median(each.wall_ms for each in both)
    return Findings(
        hidden_fraction=hidden / total,
        saved_fraction=(alone + communication - together) / communication,
        gemm_slow_down=_ratio(gemm_pairs),
        num_products=len(gemm_pairs),
        communication_slow_down=_ratio(call_pairs),
    )


def _medians(rounds: Sequence[Sequence[Interval]]) -> list[float]:
    """Median length of each call over the rounds."""
    return [
        statistics.median(end - start for start, end in of_call)
        for of_call in zip(*rounds, strict=True)
    ]


def _pairs_within(
    intervals: Sequence[Interval], alone_ms: Sequence[float], cover: Interval
) -> list[tuple[float, float]]:
    """Length here and alone of the calls that lie in `cover` from start to end."""
    return [
        (end - start, alone)
        for (start, end), alone in zip(intervals, alone_ms, strict=True)
        if cover[0] <= start and end <= cover[1]
    ]


def _ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    if not pairs:
        return None
    return sum(here for here, _ in pairs) / sum(alone for _, alone in pairs)


class Beside:
    """Runs products and other launches, alone and together.

    Args:
        products: of the experts.
        calls: launched on a stream of their own, before the products.
        priority: of that stream; -1 is above that of the products.

    Attributes:
        calls: as given, or more often.
    """

    def __init__(
        self, products: Products, calls: Sequence[Callable[[], object]], priority: int = -1
    ) -> None:
        """Run both once."""
        self._products = products.launches()
        self._head_start_cycles = products.head_start_cycles
        self.calls = calls
        self._side = torch.cuda.Stream(priority=priority)
        self._round(products=True, calls=True)

    def repeated(self) -> Beside:
        """The same with the calls as often as the products last clearly longer."""
        products_ms = self._round(products=True, calls=False).wall_ms
        calls_ms = self._round(products=False, calls=True).wall_ms
        self.calls = [*self.calls] * max(1, int(_FILLED * products_ms / calls_ms))
        return self

    def rounds(self, count: int, *, products: bool, calls: bool) -> list[Timeline]:
        """Timelines of rounds after a warm-up."""
        found = [self._round(products=products, calls=calls) for _ in range(_WARM_UP + count)]
        return found[_WARM_UP:]

    def _round(self, *, products: bool, calls: bool) -> Timeline:
        torch.cuda.synchronize()
        main = torch.cuda.current_stream()
        origin = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(self._head_start_cycles)
        origin.record(main)
        call_events: list[torch.cuda.Event] = []
        product_events: list[torch.cuda.Event] = []
        if calls:
            self._side.wait_event(origin)
            with torch.cuda.stream(self._side):
                call_events = _launch(self.calls)
        if products:
            if calls:
                torch.cuda._sleep(_FIRST_CYCLES)
            product_events = _launch(self._products)
        torch.cuda.synchronize()
        return Timeline(_intervals(origin, product_events), _intervals(origin, call_events))


def calls_of(bench: Bench) -> list[Callable[[], object]]:
    """One call a kernel of a pair of dispatch and combine."""
    return [functools.partial(bench.run, phase) for phase in PAIRS[_PAIR]]


def holder(num_sms: int, microseconds: int) -> Callable[[], object]:
    """A launch that holds SMs for a time and moves nothing."""
    kernel: Any = torch.cuda._compile_kernel(_HOLDER, "hold_sm")
    kernel.set_shared_memory_config(_HOLDER_SHARED_BYTES)
    return functools.partial(
        kernel,
        grid=(num_sms, 1, 1),
        block=(_HOLDER_THREADS, 1, 1),
        args=[microseconds],
        shared_mem=_HOLDER_SHARED_BYTES,
    )


def _launch(calls: Sequence[Callable[[], object]]) -> list[torch.cuda.Event]:
    """Queue calls on the current stream, with an event before, between and after them."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    return events


def _intervals(origin: torch.cuda.Event, events: Sequence[torch.cuda.Event]) -> list[Interval]:
    times = [origin.elapsed_time(event) for event in events]
    return list(itertools.pairwise(times))


@dataclass(frozen=True)
class Variant:
    """How products and communication share the GPU.

    Attributes:
        held_sms: blocks of the launch of all ranks.
        left_free_sms: that products are told to leave alone.
        priority: of the communication's stream.
        idle: the SMs are held by a kernel that moves nothing.
    """

    held_sms: int
    left_free_sms: int = 0
    priority: int = -1
    idle: bool = False

    @property
    def name(self) -> str:
        """Shown and recorded."""
        plain = "beside" if self.priority else "beside, equal priority"
        plain = "SMs held idle" if self.idle else plain
        more = self.left_free_sms - self.held_sms
        told = f", products told {more} more" if more > 0 else ", products told"
        return plain + told if self.left_free_sms else plain


def variants_of(held_sms: int) -> list[Variant]:
    """Products as they are, and told to leave SMs alone; then SMs that are held idle."""
    told = [held_sms, *(held_sms + more for more in MORE_LEFT_FREE)]
    return [
        Variant(held_sms),
        *(Variant(held_sms, left_free_sms=number) for number in told),
        Variant(held_sms, priority=0),
        Variant(held_sms, idle=True),
        *(Variant(held_sms, left_free_sms=number, idle=True) for number in told),
    ]


@dataclass(frozen=True)
class Job:
    """What all variants share.

    Attributes:
        products: of the experts.
        log: gets the lines; None: nobody does.
        kernels: the module.
        rounds: to time.
        tell: is told each phase as it begins.
    """

    products: Products
    log: ResultLog | None
    kernels: object
    rounds: int
    tell: Tell


def measure(job: Job) -> None:
    """Time all variants and record one line each."""
    lasted_us = {}
    for held_sms in HELD_SMS:
        lasted_us[held_sms] = _measure_communication(job, held_sms)
        torch.cuda.empty_cache()
    for held_sms, us in lasted_us.items():
        idle = Beside(job.products, [holder(held_sms, us)])
        for variant in variants_of(held_sms):
            if variant.idle:
                _measure_variant(variant, job, idle)


def _measure_communication(job: Job, held_sms: int) -> int:
    """All variants that communicate; returns how long the communication of a round takes, in us."""
    setting = Setting(
        hidden=HIDDEN,
        num_topk=SLOTS,
        num_experts=EXPERTS,
        num_sms=held_sms // RANKS,
        num_tokens=TOKENS,
        ranks=RANKS,
    )
    job.tell(f"{job.products.name}: communication that holds {held_sms} SMs")
    bench = Bench(setting, job.kernels)
    bench.check()
    pair = Beside(job.products, calls_of(bench)).repeated()
    for variant in variants_of(held_sms):
        if not variant.idle:
            _measure_variant(variant, job, Beside(job.products, pair.calls, variant.priority))
            bench.check_last_pair()
    lasted_ms = [each.wall_ms for each in pair.rounds(job.rounds, products=False, calls=True)]
    return int(1e3 * statistics.median(lasted_ms))


def _measure_variant(variant: Variant, job: Job, beside: Beside) -> None:
    """Products are compared with those that may use the whole GPU."""
    products, rounds = job.products, job.rounds
    job.tell(f"{products.name}: {variant.held_sms} SMs, {variant.name}")
    alone = beside.rounds(rounds, products=True, calls=False)
    calls = beside.rounds(rounds, products=False, calls=True)
    with products.left_free(variant.left_free_sms):
        told = beside.rounds(rounds, products=True, calls=False)
        both = beside.rounds(rounds, products=True, calls=True)
    found = evaluate(alone, calls, both)
    alone_us, told_us, calls_us = (
        round(1e3 * statistics.median(each.wall_ms for each in timelines), 1)
        for timelines in (alone, told, calls)
    )
    times = summarise_times([1e3 * each.wall_ms for each in both])
    slow_down = found.gemm_slow_down
    per_sm = None if slow_down is None else (slow_down - 1) / variant.held_sms
    say(
        f"{variant.held_sms:2d} SMs, {variant.name:36s} products {alone_us:8.1f} us (told "
        f"{told_us:.1f})  communication {calls_us:8.1f}  together {times['median_us']:8.1f}  "
        f"hidden {found.hidden_fraction:.3f}  saved {found.saved_fraction:.3f}  slow-down of "
        f"{found.num_products} products {slow_down or 0:.3f}, of communication "
        f"{found.communication_slow_down or 0:.3f}"
    )
    if job.log is None:
        return
    job.log.write(
        sharing="one launch",
        suite="overlap",
        backend="ep_dispatcher/device",
        variant=variant.name,
        phase="hold" if variant.idle else _PAIR,
        layout="expert_major",
        experts=products.name,
        ranks=RANKS,
        domains=1,
        num_sms=variant.held_sms // RANKS,
        held_sms=variant.held_sms,
        left_free_sms=variant.left_free_sms,
        num_tokens=TOKENS,
        hidden=HIDDEN,
        expert_ffn_hidden=FFN_HIDDEN,
        expert_rows=EXPERT_ROWS,
        num_topk=SLOTS,
        num_experts=EXPERTS,
        dtype="bfloat16",
        routing="uniform",
        seed=0,
        checked=not variant.idle,
        launches=len(beside.calls),
        **times,
        hidden_fraction=round(found.hidden_fraction, 4),
        saved_fraction=round(found.saved_fraction, 4),
        gemm_slow_down=None if slow_down is None else round(slow_down, 4),
        gemm_slow_down_per_sm=None if per_sm is None else round(per_sm, 5),
        communication_slow_down=found.communication_slow_down,
        products_alone_us=alone_us,
        products_told_alone_us=told_us,
        communication_us=calls_us,
    )


def main(words: Sequence[str]) -> int:
    """Measure and record; returns the exit code."""
    parser = argparse.ArgumentParser(prog="ep_dispatcher.profile.beside", description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines file to append to")
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument(
        "--experts",
        choices=list(KINDS),
        nargs="+",
        default=["cublaslt"],
        help="whose products, one after the other (default cublaslt)",
    )
    add_limit(parser)
    args = parser.parse_args(words)
    log = args.out and log_of_module(args.out, "ep_dispatcher.profile.beside", words)
    with Watch(args.out, args.limit) as watch:
        for kind in args.experts:
            watch(f"{kind}: rows and weights")
            products = KINDS[kind](torch.device("cuda"))
            measure(Job(products, log, load_kernels(), args.rounds, watch))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
