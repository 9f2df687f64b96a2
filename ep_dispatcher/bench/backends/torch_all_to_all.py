"""The plain baseline: permute, torch all-to-all of every copy, sort by expert; and back.

No deduplication: a token travels once for each of its experts. This is what a user writes with
torch.distributed alone, with the counts read by the host, as uneven all-to-alls need them there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.bench.backends.base import (
    Identity,
    Lap,
    Place,
    PlainSession,
    Received,
    Wire,
    class_name,
    file_of,
    need_even_experts,
)
from ep_dispatcher.bench.spec import Work
from ep_dispatcher.bench.stopwatch import MEET


@dataclass(frozen=True, eq=False, kw_only=True)
class Routes:
    """Index lists of one routing; C copies sent, R received.

    Attributes:
        copy: [C] int64, flat index into [T, K] of each copy, by expert.
        token: [C] int64.
        send: copies for each rank; `receive`: from each rank.
        by_expert: [R] int64, position among the received copies of each expert-major row.
        arrival: [R] int64, the inverse.
        tokens_per_expert: [L] int64 on the CPU.
    """

    copy: Tensor
    token: Tensor
    send: list[int]
    receive: list[int]
    by_expert: Tensor
    arrival: Tensor
    tokens_per_expert: Tensor


class TorchSession(PlainSession):
    """See `Session`."""

    wire: Wire = "by_copy"
    persistent_bytes: int | None = 0

    def __init__(self, work: Work, place: Place) -> None:
        """Make a group whose NCCL may use as many blocks as the work allows."""
        self._num_local = need_even_experts(work, place.name)
        self._work, self._place = work, place
        self._group = _limited_group(work, place)
        self._topk_idx = torch.empty(0)
        self._routes: Routes | None = None

    def identity(self) -> Identity:
        """The collective's library and version."""
        name = dist.get_backend(self._group)
        notes = [f"all_to_all_single over {name}", "a copy for each expert travels"]
        if name == "nccl":
            notes.append(f"NCCL max_ctas {self._work.num_sms}; permutes run on every SM")
        return Identity(
            classes=(class_name(self._group),),
            files=(file_of(dist),),
            versions={"torch": str(torch.__version__)},
            notes=tuple(notes),
        )

    def prepare(self, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Nothing to convert."""
        self._topk_idx = topk_idx

    def plan(self, lap: Lap) -> None:
        """Sort the copies by expert, exchange counts, and read them on the host."""
        flat = self._topk_idx.flatten()
        experts, local = self._work.num_experts, self._num_local
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat + 1, minlength=experts + 1)
        copy = order[int(counts[0]) :]  # dropped slots sort first
        sent = counts[1:].view(self._work.ranks, local)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self._group)
        expert_of = torch.arange(local, device=flat.device).repeat(self._work.ranks)
        by_expert = torch.argsort(expert_of.repeat_interleave(got.flatten()), stable=True)
        arrival = torch.empty_like(by_expert)
        arrival[by_expert] = torch.arange(len(by_expert), device=flat.device)
        self._routes = Routes(
            copy=copy,
            token=copy // self._topk_idx.shape[1],
            send=sent.sum(1).tolist(),
            receive=got.sum(1).tolist(),
            by_expert=by_expert,
            arrival=arrival,
            tokens_per_expert=got.sum(0).cpu(),
        )
        lap("plan")

    def dispatch(self, x: Tensor, topk_weights: Tensor, lap: Lap) -> Received:
        """Permute, send rows and weights, sort by expert."""
        routes = self._the_routes()
        rows, weights = x[routes.token], topk_weights.flatten()[routes.copy]
        lap("permute")
        lap(MEET)
        rows = self._exchange(rows, routes.receive, routes.send)
        weights = self._exchange(weights, routes.receive, routes.send)
        lap("dispatch")
        rows, weights = rows[routes.by_expert], weights[routes.by_expert]
        lap("permute")
        return Received(
            rows=rows,
            weights=weights,
            tokens_per_expert=routes.tokens_per_expert,
            segment_rows=routes.tokens_per_expert,
        )

    def combine(self, expert_out: Tensor, lap: Lap) -> Tensor:
        """Sort by source, send back, sum each token's rows in fp32."""
        routes = self._the_routes()
        rows = expert_out[routes.arrival]
        lap("unpermute")
        lap(MEET)
        rows = self._exchange(rows, routes.send, routes.receive)
        lap("combine")
        out = self._sum_at_home(rows)
        lap("unpermute")
        return out

    def combine_backward(self, grad_out: Tensor, lap: Lap) -> Tensor:
        """The way of dispatch, without weights; permutes included."""
        routes = self._the_routes()
        rows = self._exchange(grad_out[routes.token], routes.receive, routes.send)
        grad = rows[routes.by_expert]
        lap("combine_backward")
        return grad

    def dispatch_backward(
        self, grad_rows: Tensor, grad_weights: Tensor, lap: Lap
    ) -> tuple[Tensor, Tensor | None]:
        """The way of combine, with the weights' gradients; permutes included."""
        routes = self._the_routes()
        rows = self._exchange(grad_rows[routes.arrival], routes.send, routes.receive)
        weights = self._exchange(grad_weights[routes.arrival], routes.send, routes.receive)
        grad_x = self._sum_at_home(rows)
        grad_topk = grad_weights.new_zeros(self._topk_idx.numel())
        grad_topk[routes.copy] = weights
        lap("dispatch_backward")
        return grad_x, grad_topk.view(self._topk_idx.shape)

    def close(self) -> None:
        """See `Session.close`."""
        self._routes = None
        if self._group is not self._place.group:
            dist.destroy_process_group(self._group)

    def _exchange(self, rows: Tensor, receive: list[int], send: list[int]) -> Tensor:
        """All-to-all of rows with the host's split sizes."""
        got = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(got, rows.contiguous(), receive, send, group=self._group)
        return got

    def _sum_at_home(self, rows: Tensor) -> Tensor:
        """Rows [C, H] in the order of `copy` to the sum of each token [T, H]."""
        routes = self._the_routes()
        shape = (self._topk_idx.shape[0], rows.shape[1])
        total = torch.zeros(shape, dtype=torch.float32, device=rows.device)
        return total.index_add_(0, routes.token, rows.float()).to(rows.dtype)

    def _the_routes(self) -> Routes:
        assert self._routes is not None, "plan comes before dispatch"
        return self._routes


def _limited_group(work: Work, place: Place) -> dist.ProcessGroup:
    """A group with the work's SM budget where NCCL carries it, else the given one."""
    if place.device.type != "cuda":
        return place.group
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = work.num_sms
    group: dist.ProcessGroup = dist.new_group(backend="nccl", pg_options=options)
    return group


def open_session(work: Work, place: Place) -> TorchSession:
    """Open the baseline."""
    return TorchSession(work, place)
