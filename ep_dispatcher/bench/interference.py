"""How much slower a matrix product gets while communication runs beside it on the same GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ep_dispatcher.bench.spec import Work
from ep_dispatcher.bench.stopwatch import Stopwatch

ALONE, BESIDE = "gemm_alone", "gemm_beside"
_PRODUCTS = 4  # in a row, so that their sum is longer than one call of a backend
_REPEATS = 4  # of the communication, so that it lasts as long as the products
_SEED = 99


class Interference:
    """Times products of the work's width, alone and beside communication on a second stream.

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
        self._side = torch.cuda.Stream(device)

    def round(self, watch: Stopwatch, communicate: Callable[[], None]) -> None:
        """One lap of each kind.

        Args:
            watch: gets the laps.
            communicate: dispatch and combine, on whatever stream is current.
        """
        main = torch.cuda.current_stream()
        watch.begin()
        self._multiply()
        watch.lap(ALONE)
        watch.begin()
        self._side.wait_stream(main)
        self._multiply()
        watch.lap(BESIDE)
        # Queued after the products, which the device has not begun yet: see `Stopwatch.begin`.
        with torch.cuda.stream(self._side):
            for _ in range(_REPEATS):
                communicate()
        main.wait_stream(self._side)

    def _multiply(self) -> None:
        for _ in range(_PRODUCTS):
            torch.mm(self._left, self._right)
