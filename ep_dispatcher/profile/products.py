"""The experts' matrix products of one rank, forward, for timing beside communication.

Sizes are those of a rank of 16 experts that receives 32768 rows, evenly: [rows, H] x [H, 2F] and
[rows, F] x [F, H] for each expert.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

HIDDEN, FFN_HIDDEN, LOCAL_EXPERTS, EXPERT_ROWS = 7168, 2048, 16, 2048
_PASSES = 3  # of all experts, so that products outlast communication
_MARGIN = "NVTE_EXT_MARGIN_SM"  # read by Transformer Engine at each call


class Products(Protocol):
    """Products that can be launched one by one.

    Attributes:
        name: recorded.
        head_start_cycles: longer than the host takes to queue them.
    """

    name: str
    head_start_cycles: int

    def launches(self) -> list[Callable[[], object]]:
        """One call a launch, in order."""
        ...

    def left_free(self, num_sms: int) -> contextlib.AbstractContextManager[None]:
        """Products launched inside use all SMs but these; 0 leaves them alone."""
        ...


def _draw(device: torch.device, *sizes: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(sizes))
    return torch.randn(sizes, generator=generator, device=device, dtype=torch.bfloat16)


class SingleProducts:
    """One matrix product of cuBLASLt a launch, all on one stream.

    Args:
        device: a GPU.
    """

    name = "cuBLASLt, forward"
    head_start_cycles = 12_000_000  # about 6 ms

    def __init__(self, device: torch.device) -> None:
        """Draw rows and weights; torch takes cuBLASLt from now on, which can be told."""
        torch.backends.cuda.preferred_blas_library("cublaslt")
        self._x = _draw(device, LOCAL_EXPERTS, EXPERT_ROWS, HIDDEN)
        self._up = _draw(device, LOCAL_EXPERTS, HIDDEN, 2 * FFN_HIDDEN)
        self._inner = _draw(device, EXPERT_ROWS, FFN_HIDDEN)
        self._down = _draw(device, LOCAL_EXPERTS, FFN_HIDDEN, HIDDEN)
        self._wide = torch.empty_like(self._inner).repeat(1, 2)
        self._out = torch.empty_like(self._x)

    def launches(self) -> list[Callable[[], object]]:
        """See `Products.launches`."""
        calls: list[Callable[[], object]] = []
        for expert in list(range(LOCAL_EXPERTS)) * _PASSES:
            calls += [self._first(expert), self._second(expert)]
        return calls

    @contextlib.contextmanager
    def left_free(self, num_sms: int) -> Iterator[None]:
        """See `Products.left_free`."""
        torch._C._set_sm_carveout_experimental(num_sms or None)
        try:
            yield
        finally:
            torch._C._set_sm_carveout_experimental(None)

    def _first(self, expert: int) -> Callable[[], object]:
        return lambda: torch.mm(self._x[expert], self._up[expert], out=self._wide)

    def _second(self, expert: int) -> Callable[[], object]:
        return lambda: torch.mm(self._inner, self._down[expert], out=self._out[expert])


class GroupedProducts:
    """All experts in one launch of Transformer Engine's grouped GEMM, as Megatron runs them.

    Args:
        device: a GPU.
    """

    name = "TE GroupedLinear, forward"
    head_start_cycles = 30_000_000  # about 16 ms

    def __init__(self, device: torch.device) -> None:
        """Draw rows and weights."""
        import transformer_engine.pytorch as te

        linear = functools.partial(
            te.GroupedLinear, bias=False, params_dtype=torch.bfloat16, device=device
        )
        rows = LOCAL_EXPERTS * EXPERT_ROWS
        self._splits = [EXPERT_ROWS] * LOCAL_EXPERTS
        self._x, self._inner = _draw(device, rows, HIDDEN), _draw(device, rows, FFN_HIDDEN)
        self._up: Any = linear(LOCAL_EXPERTS, HIDDEN, 2 * FFN_HIDDEN)
        self._down: Any = linear(LOCAL_EXPERTS, FFN_HIDDEN, HIDDEN)

    def launches(self) -> list[Callable[[], object]]:
        """See `Products.launches`."""
        pair: list[Callable[[], object]] = [
            functools.partial(self._run, self._up, self._x),
            functools.partial(self._run, self._down, self._inner),
        ]
        return pair * _PASSES

    @contextlib.contextmanager
    def left_free(self, num_sms: int) -> Iterator[None]:
        """See `Products.left_free`."""
        before = os.environ.get(_MARGIN)
        if num_sms:
            os.environ[_MARGIN] = str(num_sms)
        try:
            yield
        finally:
            os.environ.pop(_MARGIN, None)
            if before is not None:
                os.environ[_MARGIN] = before

    @torch.no_grad()
    def _run(self, linear: Any, rows: Tensor) -> object:  # noqa: ANN401
        return linear(rows, self._splits)


KINDS: Mapping[str, Callable[[torch.device], Products]] = MappingProxyType(
    {"cublaslt": SingleProducts, "te": GroupedProducts}
)
