"""How much slower matrix products get while communication runs beside them on the same GPU.

The products run on a stream of their own, the communication where its calls always run: outputs
of this package wait for the stream of its first call, so on any other stream communication would
come after what that stream has queued, and nothing would run beside anything.

Two streams that could run at the same time need not do so. Every figure therefore comes with the
number of communication calls that ended while the products still ran; none means that there is
no figure. And the products are timed beside themselves too, which has to be slower: a clock that
misses that would miss communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ep_dispatcher.bench.spec import Work
from ep_dispatcher.bench.stopwatch import Stopwatch

ALONE, BESIDE, CONTROL = "gemm_alone", "gemm_beside", "gemm_control"
CALLS = "beside_calls"  # ended while the products ran, mean of the rounds
LEAST_CONTROL = 1.2  # times slower beside themselves; two of a kind share what one had
_PRODUCTS = 4  # in a row, so that their sum is longer than one call of a backend
_REPEATS = 4  # of the communication, so that it lasts as long as the products
_HEAD_START_CYCLES = 20_000_000  # about 10 ms: the host queues products and all repeats meanwhile
_SEED = 99


@dataclass(frozen=True, kw_only=True)
class Span:
    """One round of products with a neighbour, microseconds since the ranks met.

    Attributes:
        products_us: when the products had ended.
        calls_us: when each call of the neighbour had ended, in order.
    """

    products_us: float
    calls_us: Sequence[float]

    @property
    def calls_beside(self) -> int:
        """Calls of the neighbour that ended while the products ran."""
        return sum(us < self.products_us for us in self.calls_us)


class Interference:
    """Times products of the work's width: alone, beside communication, beside more products.

    Args:
        work: gives H, T and the dtype; a product is [T, H] times [H, H / 2].
        device: a GPU.
    """

    def __init__(self, work: Work, device: torch.device) -> None:
        """Draw the matrices."""
        generator = torch.Generator(device).manual_seed(_SEED)
        dtype = getattr(torch, work.dtype)
        sizes = (work.num_tokens, work.hidden), (work.hidden, max(work.hidden // 2, 1))
        self._left, self._right = (
            torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes
        )
        # Results lie ready: what streams take from the allocator can make one wait for another.
        self._results = [self._left @ self._right for _ in range(2)]
        self._side = torch.cuda.Stream(device)

    def round(self, watch: Stopwatch, communicate: Callable[[], None]) -> dict[str, float]:
        """One round of each kind.

        Args:
            watch: lines the ranks up.
            communicate: dispatch and combine, on whatever stream is current.

        Returns:
            Microseconds of `ALONE`, `BESIDE` and `CONTROL`, and the count `CALLS`.
        """
        beside = self.span(watch, communicate, _REPEATS)
        return {
            ALONE: self.span(watch, communicate, 0).products_us,
            BESIDE: beside.products_us,
            CONTROL: self.span(watch, lambda: self._multiply(1), 1).products_us,
            CALLS: float(beside.calls_beside),
        }

    def span(self, watch: Stopwatch, neighbour: Callable[[], None], repeats: int) -> Span:
        """Products on one stream, `repeats` calls of the neighbour on the current one.

        Nothing orders the two; both wait for the ranks to meet, which the device does when the
        host has queued all of it.
        """
        main = torch.cuda.current_stream()
        watch.begin(_HEAD_START_CYCLES)
        start, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(repeats + 2))
        start.record(main)
        self._side.wait_event(start)
        with torch.cuda.stream(self._side):
            self._multiply(0)
            ends[0].record()
        for end in ends[1:]:
            neighbour()
            end.record(main)
        main.wait_stream(self._side)
        watch.read()
        products_us, *calls_us = (start.elapsed_time(end) * 1000 for end in ends)
        return Span(products_us=products_us, calls_us=calls_us)

    def _multiply(self, result: int) -> None:
        for _ in range(_PRODUCTS):
            torch.mm(self._left, self._right, out=self._results[result])


def why_no_figure(calls: float, control: float) -> str | None:
    """Why a measured slow-down says nothing; None where it does.

    Args:
        calls: mean number of communication calls that ended while the products ran.
        control: time of the products beside themselves over their time alone.
    """
    if calls < 1:
        return "communication did not run beside the products: no call ended before they did"
    if control < LEAST_CONTROL:
        return (
            f"the clock sees no slow-down: products beside products took {control:.2f} times as "
            f"long, not {LEAST_CONTROL} or more"
        )
    return None
