"""Several NVLink domains on one GPU, in one process: `OneGpuWorld` with rails between its ranks.

Domains are plain allocations as ranks are; what crosses between them goes through a net of
csrc/transport/net.cuh. A plan, a dispatch and a combine are several launches, each of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher.bench.one_gpu import KernelPlan, OneGpuWorld, WorldShape
from ep_dispatcher.config import Topology
from ep_dispatcher.rails import DomainView

NETS = {"loop": 0, "chaos": 1}  # EpNet
_OWN_TABLES = ("expert_rank", "expert_order", "owner_first")


@dataclass(frozen=True, eq=False, kw_only=True)
class RailPlan:
    """One rank's plan over several domains.

    Attributes:
        virtual: of the tokens that its domain sees, in segments.
        tensors: dst_rank, dst_row [T, K] and counts [P, E], over all ranks.
        num_tokens: T.
    """

    virtual: KernelPlan
    tensors: dict[str, Tensor]
    num_tokens: int

    @property
    def mailbox(self) -> Tensor:
        """Where the host is told what to allocate."""
        return self.virtual.mailbox

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of that name; the group's where it differs from the domain's."""
        return self.tensors[name] if name in self.tensors else self.virtual[name]


class RailWorld(OneGpuWorld):
    """Windows, contexts, rails and calls of all ranks.

    Args:
        shape: sizes; ep_size is that of the whole world, D x domain_size.
        domain_size: ranks of each domain.
        kernels: the extension module.
        net: "loop" or "chaos".
        num_blocks: blocks of each rank that serve the rails.
        chaos_seed: of the order in which "chaos" carries out puts.
    """

    def __init__(
        self,
        shape: WorldShape,
        domain_size: int,
        kernels: Any,  # noqa: ANN401
        *,
        net: str = "loop",
        num_blocks: int = 2,
        chaos_seed: int = 0,
    ) -> None:
        """Allocate the windows and zero what must be zero."""
        self._domain_size, self._net, self._num_blocks = domain_size, net, num_blocks
        self._chaos_seed = chaos_seed
        self._domain_tables: dict[int, dict[str, Tensor]] = {}
        self._chaos: list[Tensor] = []
        super().__init__(shape, kernels)
        self.rails = [self._rail(rank) for rank in range(shape.ep_size)]
        torch.cuda.synchronize(self.device)

    @property
    def topology(self) -> Topology:
        """Domains of consecutive ranks."""
        return Topology(ep_size=self.shape.ep_size, domain_size=self._domain_size)

    def _view(self, rank: int) -> DomainView:
        return DomainView(self.topology, self.placement, rank)

    def _window_shape(self) -> Any:  # noqa: ANN401
        shape = self.shape
        return self.kernels.WindowShape(
            ep_size=self._domain_size,
            num_experts=shape.num_experts,
            num_topk=shape.num_topk,
            num_channels=shape.num_channels,
            ring_depth=shape.ring_depth,
            max_tokens=self.topology.num_domains * shape.max_tokens,
            partial_bytes=shape.hidden * (4 if shape.exact else shape.element_bytes),
        )

    def _layout(self) -> Any:  # noqa: ANN401
        return self._bare_rail(0).layout

    def _bare_rail(self, rank: int) -> Any:  # noqa: ANN401
        view = self._view(rank)
        return self.kernels.Rail(
            self.kernels.Context(self.window_shape, view.index),
            num_domains=self.topology.num_domains,
            domain=view.number,
            num_blocks=self._num_blocks,
            max_tokens=self.shape.max_tokens,
            exact=self.shape.exact and self.shape.dtype != torch.float32,
            net=NETS[self._net],
        )

    def _context(self, rank: int) -> Any:  # noqa: ANN401
        view = self._view(rank)
        context = self.kernels.Context(self.window_shape, view.index)
        context.first_rank = view.first_rank
        context.num_local_experts = len(self.placement.local_experts(rank))
        context.timeout_ns = int(self.shape.timeout_s * 1e9)
        domain = self.windows[view.first_rank : view.first_rank + self._domain_size]
        context.window_bases = [window.data_ptr() for window in domain]
        context.fault = self.faults[rank].data_ptr()
        self._domain_tables[rank] = view.tables(self.device)
        for name, table in self._domain_tables[rank].items():
            setattr(context, name, table.data_ptr())
        return context

    def _rail(self, rank: int) -> Any:  # noqa: ANN401
        rail = self._bare_rail(rank)
        for name in _OWN_TABLES:
            setattr(rail, name, self.tables[name].data_ptr())
        rail.set_rail_bases(
            [
                self.windows[self.topology.rail_peer(rank, domain)].data_ptr()
                for domain in range(self.topology.num_domains)
            ]
        )
        if self._net == "chaos":
            size = -(-rail.chaos_bytes // 8)
            self._chaos.append(torch.zeros(size, dtype=torch.int64, device=self.device))
            rail.chaos, rail.chaos_seed = self._chaos[-1].data_ptr(), self._chaos_seed + rank
        return rail

    def new_rail_plan(self, rank: int, num_tokens: int, num_topk: int) -> RailPlan:
        """Memory for a plan, poisoned."""
        tokens = self.topology.num_domains * self.shape.max_tokens
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "dst_rank": ((num_tokens, num_topk), torch.int32),
            "dst_row": ((num_tokens, num_topk), torch.int32),
            "counts": ((self.shape.ep_size, self.shape.num_experts), torch.int64),
        }
        tensors = {
            name: torch.full(size, -77, dtype=dtype, device=self.device)
            for name, (size, dtype) in sizes.items()
        }
        virtual = self.new_plan(rank, tokens, num_topk)
        return RailPlan(virtual=virtual, tensors=tensors, num_tokens=num_tokens)

    def rail_plan_calls(
        self,
        plans: Sequence[RailPlan],
        topk_idx: Sequence[Tensor],
        alignment: int = 1,
        capacity_rows: int = -1,
    ) -> list[Any]:
        """Arguments of `rail_exchange` and of `rail_counts` for all ranks."""
        calls = []
        for rank, (plan, routing) in enumerate(zip(plans, topk_idx, strict=True)):
            call = self.kernels.RailPlanArgs(self.contexts[rank], self.rails[rank])
            call.topk_idx, call.num_tokens = routing.data_ptr(), plan.num_tokens
            call.num_topk, call.alignment = routing.shape[1], alignment
            call.capacity_rows = capacity_rows
            for name, tensor in plan.tensors.items():
                setattr(call, name, tensor.data_ptr())
            calls.append(call)
        return calls

    def virtual_route_calls(
        self, plans: Sequence[RailPlan], alignment: int = 1, capacity_rows: int = -1
    ) -> list[Any]:
        """Arguments of `route` over the domains' tokens, after the rails' part of the plan."""
        self._ticket += 1
        calls = []
        for rank, plan in enumerate(plans):
            call = self.kernels.RouteArgs(self.contexts[rank], plan.virtual.pointers)
            call.topk_idx = self._at(rank, "virtual_topk")
            call.segment_shift, call.verdict = self._at(rank, "shift"), self._at(rank, "verdict")
            call.segment_tokens = self.shape.max_tokens
            call.alignment, call.capacity_rows = alignment, capacity_rows
            call.mailbox, call.ticket = plan.mailbox.data_ptr(), self._ticket
            calls.append(call)
        return calls

    def rail_send_calls(
        self,
        topk_idx: Sequence[Tensor],
        x: Sequence[Tensor],
        topk_weights: Sequence[Tensor] | None,
    ) -> list[Any]:
        """Arguments of `rail_send` for all ranks; their dispatch is then told so."""
        calls = []
        for rank, routing in enumerate(topk_idx):
            call = self.kernels.RailSendArgs(self.contexts[rank], self.rails[rank])
            call.topk_idx, call.x = routing.data_ptr(), x[rank].data_ptr()
            call.num_tokens, call.num_topk = routing.shape
            call.row_bytes = self.shape.row_bytes
            call.topk_weights = 0 if topk_weights is None else topk_weights[rank].data_ptr()
            calls.append(call)
        return calls

    def rail_dispatch_calls(
        self,
        plans: Sequence[RailPlan],
        x: Sequence[Tensor],
        topk_weights: Sequence[Tensor] | None,
        outputs: Sequence[tuple[Tensor, Tensor | None]],
        *,
        duplicate: int = 0,
        sent: bool = False,
    ) -> list[Any]:
        """Arguments of `rail_dispatch` for all ranks; outputs from `new_outputs`."""
        virtual = [plan.virtual for plan in plans]
        calls = []
        for rank, call in enumerate(
            self.dispatch_calls(virtual, x, topk_weights, outputs, duplicate)
        ):
            plan = plans[rank]
            whole = self.kernels.RailDispatchArgs(
                call, self.rails[rank], plan.num_tokens, plan["dst_rank"].data_ptr()
            )
            whole.sent = int(sent)
            calls.append(whole)
        return calls

    def rail_combine_calls(
        self,
        plans: Sequence[RailPlan],
        expert_out: Sequence[Tensor],
        out: Sequence[Tensor],
        row_weights_grad: Sequence[Tensor] | None = None,
        weights_grad: Sequence[Tensor] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Arguments of `combine` inside the domains, then of `rail_return`, for all ranks."""
        virtual = [plan.virtual for plan in plans]
        domains = self.combine_calls(virtual, expert_out, out, row_weights_grad, weights_grad)
        returns = []
        for rank, call in enumerate(domains):
            call.segment_tokens = self.shape.max_tokens
            call.home_segment = self.topology.domain_of(rank)
            call.segment_stride = self.layout.slot_bytes
            call.segment_out = self._at(rank, "landing")
            if self.shape.exact and self.shape.dtype != torch.float32:
                call.own_out = self._at(rank, "own")
            returns.append(
                self.kernels.RailReturnArgs(
                    call,
                    self.rails[rank],
                    plans[rank].num_tokens,
                    plans[rank]["dst_rank"].data_ptr(),
                )
            )
        return domains, returns

    def _at(self, rank: int, region: str) -> int:
        """Address of a region of a rank's window."""
        return self.windows[rank].data_ptr() + int(getattr(self.layout, region))

    def put_counts(self, rank: int) -> Tensor:
        """[D, 2] int64: puts and bytes of a rank to each domain so far (modules for tests only)."""
        return self._words(rank, "stats", (self.topology.num_domains, 2))

    def role_times(self, rank: int) -> tuple[Tensor, Tensor]:
        """Of the last dispatch and return, what blocks spent (modules for tests only).

        Args:
            rank: whose.

        Returns:
            dispatch: [C + rail blocks, 8] int64, forwarding blocks first.
            back: [rail blocks + C, 8] int64, putting blocks first. Columns: begin and end in ns,
                cycles; cycles that its warps waited, made records, put, added up over warps;
                the most puts that one of them had on their way.
        """
        blocks = self.shape.num_channels + self._num_blocks
        dispatch, back = self._words(rank, "role_times", (2, blocks, 8))
        return dispatch, back

    def _words(self, rank: int, region: str, size: tuple[int, ...]) -> Tensor:
        """A copy of int64 words of a rank's window."""
        first = int(getattr(self.layout, region))
        words = self.windows[rank][first : first + 8 * math.prod(size)].view(torch.int64)
        return words.view(size).clone()
