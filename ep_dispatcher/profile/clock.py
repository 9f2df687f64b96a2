"""Start and end of the phases of a layer, by events on the streams that they run on.

A profiler of kernels (CUPTI) cannot be used where several ranks share a GPU through MPS. Events
can: each phase records one before and one after what it launches, on its own stream, and they are
read when all is done. A wait for another stream comes before the first of them, so a span is the
time that the phase itself takes, its waits for other ranks included.

The backward of a phase is bracketed by two autograd nodes that do nothing else: one on its
outputs, which runs first, and one on its inputs, which runs last.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from ep_dispatcher.backend import Backend
from ep_dispatcher.plan import Plan

COMMUNICATION = ("plan", "dispatch", "combine", "dispatch_backward", "combine_backward")


class Stamp(Protocol):
    """A moment on a stream."""

    def record(self) -> None:
        """Take the moment at which the current stream gets here."""
        ...

    def elapsed_time(self, end: Any) -> float:  # noqa: ANN401
        """Milliseconds from this moment to another."""
        ...


class HostStamp:
    """A moment of the host, for the CPU."""

    def __init__(self) -> None:
        """Not taken yet."""
        self._at_s = 0.0

    def record(self) -> None:
        """Take it now."""
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: HostStamp) -> float:
        """Milliseconds to another."""
        return (end._at_s - self._at_s) * 1e3


def stamp_maker(*, on_gpu: bool) -> Callable[[], Stamp]:
    """What makes a moment: on the GPU's current stream, or of the host where there is none."""
    return functools.partial(torch.cuda.Event, enable_timing=True) if on_gpu else HostStamp


class Span(NamedTuple):
    """A phase that ran, in milliseconds since the clock was started."""

    name: str
    start_ms: float
    end_ms: float


class _Open:
    """A phase that has begun."""

    def __init__(self, name: str, start: Stamp) -> None:
        self.name, self.start = name, start
        self.end: Stamp | None = None


class Clock:
    """Collects the phases of a step.

    Args:
        make_stamp: makes a moment that has not been taken.

    Attributes:
        active: whether phases are recorded; wrapped functions do nothing more otherwise.
    """

    def __init__(self, make_stamp: Callable[[], Stamp]) -> None:
        """Nothing is recorded until `start`."""
        self.active = False
        self._make = make_stamp
        self._origin = make_stamp()
        self._phases: list[_Open] = []

    def start(self) -> None:
        """Forget what was recorded and begin."""
        self._phases.clear()
        self._origin = self._stamp()
        self.active = True

    def stop(self) -> list[Span]:
        """End, wait for the GPU and return the phases that ran, in order of their start."""
        self.active = False
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        origin = self._origin
        spans = [
            Span(each.name, origin.elapsed_time(each.start), origin.elapsed_time(each.end))
            for each in self._phases
            if each.end is not None
        ]
        return sorted(spans, key=lambda span: span.start_ms)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record what is launched inside."""
        phase = self.open(name)
        yield
        self.close(phase)

    def open(self, name: str) -> _Open:
        """A phase begins on the current stream."""
        phase = _Open(name, self._stamp())
        self._phases.append(phase)
        return phase

    def close(self, phase: _Open) -> None:
        """It ends on the current stream."""
        phase.end = self._stamp()

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is recorded as `name`, and its backward as `name`_backward."""

        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if not self.active:
                return function(*args, **kwargs)
            shared: list[_Open] = []
            marked = _mark_inputs(self, shared, args)
            with self.span(name):
                out = function(*marked, **kwargs)
            return _mark_outputs(self, shared, name + "_backward", out)

        return timed

    def _stamp(self) -> Stamp:
        stamp = self._make()
        stamp.record()
        return stamp


class _Begin(Function):
    """On outputs: their gradients arrive when the phase's backward begins."""

    @staticmethod
    def forward(ctx: Any, clock: Clock, shared: list[_Open], name: str, *rows: Tensor) -> Any:  # noqa: ANN401
        """Hand the outputs on."""
        ctx.clock, ctx.shared, ctx.name = clock, shared, name
        return tuple(each.view_as(each) for each in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ANN401
        """The phase's backward begins."""
        ctx.shared.append(ctx.clock.open(ctx.name))
        return (None, None, None, *grads)


class _End(Function):
    """On inputs: their gradients arrive when the phase's backward has ended."""

    @staticmethod
    def forward(ctx: Any, clock: Clock, shared: list[_Open], *rows: Tensor) -> Any:  # noqa: ANN401
        """Hand the inputs on."""
        ctx.clock, ctx.shared = clock, shared
        return tuple(each.view_as(each) for each in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ANN401
        """The phase's backward ends."""
        if ctx.shared:
            ctx.clock.close(ctx.shared.pop())
        return (None, None, *grads)


def _is_marked(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _mark_inputs(clock: Clock, shared: list[_Open], args: Sequence[Any]) -> list[Any]:
    """The arguments, those with gradients through one `_End`."""
    rows = [each for each in args if _is_marked(each)]
    if not rows:
        return list(args)
    marked = iter(_End.apply(clock, shared, *rows))  # type: ignore[no-untyped-call]
    return [next(marked) if _is_marked(each) else each for each in args]


def _mark_outputs(clock: Clock, shared: list[_Open], name: str, out: Any) -> Any:  # noqa: ANN401
    """What a function returned, those with gradients through one `_Begin`."""
    single = not isinstance(out, tuple)
    values = (out,) if single else out
    rows = [each for each in values if _is_marked(each)]
    if not rows:
        return out
    marked = iter(_Begin.apply(clock, shared, name, *rows))  # type: ignore[no-untyped-call]
    values = tuple(next(marked) if _is_marked(each) else each for each in values)
    return values[0] if single else values


class ClockedBackend:
    """A tier whose calls are recorded; the direction is told from the weights that travel along.

    Args:
        inner: the tier.
        clock: of the variant that is running; may be changed between calls.
    """

    def __init__(self, inner: Backend, clock: Clock) -> None:
        """Wrap."""
        self._inner, self.clock = inner, clock

    def plan(self, topk_idx: Tensor | None, alignment: int, refusal: str | None) -> Plan | None:
        """See `Backend.plan`."""
        with self._span("plan"):
            return self._inner.plan(topk_idx, alignment, refusal)

    def dispatch(
        self, plan: Plan, x: Tensor, topk_weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.dispatch`."""
        with self._span("combine_backward" if topk_weights is None else "dispatch"):
            return self._inner.dispatch(plan, x, topk_weights)

    def combine(
        self, plan: Plan, expert_out: Tensor, row_weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.combine`."""
        with self._span("combine" if row_weights is None else "dispatch_backward"):
            return self._inner.combine(plan, expert_out, row_weights)

    def empty_rows(self, plan: Plan) -> Tensor:
        """See `Backend.empty_rows`."""
        return self._inner.empty_rows(plan)

    def check(self) -> None:
        """See `Backend.check`."""
        self._inner.check()

    def close(self, *, failed: bool = False) -> None:
        """See `Backend.close`."""
        self._inner.close(failed=failed)

    def _span(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self.clock.span(name) if self.clock.active else contextlib.nullcontext()


def max_connections() -> int | None:
    """`CUDA_DEVICE_MAX_CONNECTIONS`: queues that a process has for its streams; None if not set.

    Streams that share one wait for each other, so a line of a measurement of overlap names it.
    """
    text = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(text) if text.isdecimal() else None


def hidden_ms(spans: Iterable[Span], hidden: Sequence[str], behind: Sequence[str]) -> float:
    """Time of the phases `hidden` during which a phase of `behind` ran too.

    Example: dispatch 0 to 4, experts 1 to 3 -> 2.
    """
    spans = list(spans)
    cover = merge([(each.start_ms, each.end_ms) for each in spans if each.name in behind])
    return sum(
        overlap_of((each.start_ms, each.end_ms), cover) for each in spans if each.name in hidden
    )


def merge(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as disjoint ones in ascending order.

    Example: (0, 2), (5, 6), (1, 3) -> (0, 3), (5, 6).
    """
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def overlap_of(interval: tuple[float, float], cover: Sequence[tuple[float, float]]) -> float:
    """How much of an interval lies in disjoint ones.

    Example: (1, 6) in (0, 2), (5, 9) -> 2.
    """
    start, end = interval
    return sum(max(0.0, min(end, right) - max(start, left)) for left, right in cover)


def total_ms(spans: Iterable[Span], names: Sequence[str]) -> float:
    """Time of the phases with these names, one after the other."""
    return sum(each.end_ms - each.start_ms for each in spans if each.name in names)
