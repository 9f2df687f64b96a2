"""The contract between the benchmark and a backend.

A session is one backend opened for one work on one rank. Its calls are collective and come in the
order plan, dispatch, combine, combine_backward, dispatch_backward, round after round. Each call
closes laps of the stopwatch with the name of the phase that has just ended; what runs after the
last lap of a call is not timed, so format changes that only this benchmark needs go there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.bench.spec import Work
from ep_dispatcher.errors import EpError

Lap = Callable[[str], None]
Layout = Literal["expert_major", "flat"]
Wire = Literal["deduplicated", "by_rank", "by_copy", "all_gather"]


class Refused(EpError):  # noqa: N818  # an answer, not a fault
    """A backend cannot do a work; the message says why and becomes the row's `error`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Received:
    """What the experts of this rank get.

    Attributes:
        rows: [R, H], local expert by local expert.
        weights: [R] fp32 router weight of each row; None where the backend brings none.
        tokens_per_expert: [L] int64 on any device, rows of each local expert without padding.
        segment_rows: [L] int64 likewise, the same with padding; R or less in total.
    """

    rows: Tensor
    weights: Tensor | None
    tokens_per_expert: Tensor
    segment_rows: Tensor

    def with_counts_on_cpu(self) -> Received:
        """The same with both counts on the CPU; waits for the device."""
        return replace(
            self,
            tokens_per_expert=self.tokens_per_expert.to("cpu", torch.int64),
            segment_rows=self.segment_rows.to("cpu", torch.int64),
        )


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a session runs.

    Attributes:
        group: of all ranks, for tensors on `device`.
        rank: this one.
        device: of all tensors.
        name: the backend's, as one module may serve several.
    """

    group: dist.ProcessGroup
    rank: int
    device: torch.device
    name: str


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Proof of what ran.

    Attributes:
        classes: qualified names of the objects that did the work.
        files: files of the modules they come from.
        versions: of the packages involved.
        notes: what a reader must know: knobs that were set, defaults that were kept.
    """

    classes: tuple[str, ...]
    files: tuple[str, ...]
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Session(Protocol):
    """One backend, opened for one work.

    Attributes:
        layout: of what `dispatch` itself moves; rows handed to the caller are always expert-major.
        wire: what travels to the experts, for the byte accounting.
        wire_home: what travels back.
        persistent_bytes: device memory held while open, where the backend can say; else None.
        has_backward: whether the two backward calls exist.
        has_static_plan: whether `plan_static` exists.
    """

    layout: Layout
    wire: Wire

    @property
    def wire_home(self) -> Wire:
        """See above."""
        ...

    persistent_bytes: int | None
    has_backward: bool
    has_static_plan: bool

    def identity(self) -> Identity:
        """What really runs here."""
        ...

    def prepare(self, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Take a routing in the form that the backend's own router would give it; not timed."""
        ...

    def plan(self, lap: Lap) -> None:
        """Whatever depends on the routing alone; a backend without such a step closes no lap."""
        ...

    def plan_static(self, lap: Lap) -> None:
        """The plan again, in a mode where the host waits for nothing; its result is not used."""
        ...

    def dispatch(self, x: Tensor, topk_weights: Tensor, lap: Lap) -> Received:
        """[T, H] to the experts."""
        ...

    def empty_rows(self) -> Tensor | None:
        """[R, H] memory for what the experts return, from which `combine` need not copy it.

        None where `combine` takes rows from anywhere alike.
        """
        ...

    def place(self, rows: Tensor) -> Tensor:
        """The same [R, H] values where the calls that take rows home need no copy of them."""
        ...

    def combine(self, expert_out: Tensor, lap: Lap) -> Tensor:
        """[R, H] back home, summed: [T, H]."""
        ...

    def combine_backward(self, grad_out: Tensor, lap: Lap) -> Tensor:
        """[T, H] gradient of the combined rows to the experts: [R, H]."""
        ...

    def dispatch_backward(
        self, grad_rows: Tensor, grad_weights: Tensor, lap: Lap
    ) -> tuple[Tensor, Tensor | None]:
        """[R, H] and [R] back home: [T, H], and [T, K] where the backend carries it."""
        ...

    def close(self) -> None:
        """Free everything; collective."""
        ...


class PlainSession:
    """What most sessions have in common: rows go home from wherever they lie, one kind of plan."""

    layout: Layout = "expert_major"
    persistent_bytes: int | None = None
    has_backward = True
    has_static_plan = False
    wire: Wire

    @property
    def wire_home(self) -> Wire:
        """See `Session`: the same way back, unless a session says otherwise."""
        return self.wire

    def plan_static(self, lap: Lap) -> None:
        """See `Session.plan_static`."""

    def empty_rows(self) -> Tensor | None:
        """See `Session.empty_rows`."""
        return None

    def place(self, rows: Tensor) -> Tensor:
        """See `Session.place`."""
        return rows


Opener = Callable[[Work, Place], Session]


def need(module: str, package: str) -> ModuleType:
    """Import an optional module.

    Raises:
        Refused: it is not there, or does not import; the reason is in the message.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken install fails in many ways
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Refused(f"{package} cannot be used here: importing {module} gave {reason}") from error


def need_cuda(place: Place) -> None:
    """Raise Refused on the CPU."""
    if place.device.type != "cuda":
        raise Refused(f"{place.name} runs on GPUs only; this run's device is cpu")


def need_even_experts(work: Work, name: str) -> int:
    """L, where each rank owns as many experts as the others.

    Raises:
        Refused: E is not a multiple of P.
    """
    if work.num_experts % work.ranks:
        raise Refused(
            f"{name} needs num_experts to be a multiple of ranks; they are {work.num_experts} and "
            f"{work.ranks}"
        )
    return work.num_experts // work.ranks


def version_of(package: str) -> str:
    """Installed version of a package, or "unknown"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def class_name(value: object) -> str:
    """Qualified name of a value's class."""
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


def file_of(module: Any) -> str:  # noqa: ANN401
    """File of a module, without the folders of the machine: from the top package on."""
    path = str(getattr(module, "__file__", None) or getattr(module, "__path__", ["?"])[0])
    top = module.__name__.split(".")[0]
    _, found, rest = path.rpartition(f"/{top}/")
    return f"{top}/{rest}" if found else path.rsplit("/", 1)[-1]


def multihot(topk_idx: Tensor, topk_weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Routing as Megatron's router gives it: map [T, E] bool and probs [T, E] fp32."""
    column = torch.where(topk_idx < 0, num_experts, topk_idx)
    shape = (topk_idx.shape[0], num_experts + 1)
    chosen = torch.zeros(shape, dtype=torch.bool, device=topk_idx.device)
    probs = torch.zeros(shape, dtype=torch.float32, device=topk_idx.device)
    chosen.scatter_(1, column, value=True)
    probs.scatter_(1, column, topk_weights)
    return chosen[:, :num_experts].contiguous(), probs[:, :num_experts].contiguous()


def gather_slots(grad_probs: Tensor, topk_idx: Tensor) -> Tensor:
    """[T, E] gradient to [T, K]; 0 in dropped slots."""
    return grad_probs.gather(1, topk_idx.clamp(min=0)).masked_fill(topk_idx < 0, 0)
