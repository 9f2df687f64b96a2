"""Listens to the routers of a model: tokens of each expert, and bytes that the rows move.

The bytes are counted from the routing by `ep_dispatcher.accounting`, with the scheme of the
dispatcher at work, so they are what it puts on the links: rows that leave their rank, there and
back, forward and backward. Weights and counts (a few bytes a row) are not in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from ep_dispatcher.accounting import LINKS, Scheme, source_traffic
from ep_dispatcher.config import Topology


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the counting needs to know.

    Attributes:
        num_layers, num_experts: size of the table of tokens per expert.
        row_bytes: of one token row.
        ep_rank: this rank in the dispatcher's group.
        expert_tensor: ranks that share each expert; each gets a row.
        topology: of the group.
    """

    num_layers: int
    num_experts: int
    row_bytes: int
    ep_rank: int
    expert_tensor: int
    topology: Topology


class RouterObserver:
    """Adds up what the routers of one rank decide; a context manager.

    Args:
        model: Megatron's, wrapped or not; its MoE layers have `router` and `layer_number`.
        layout: sizes.

    Attributes:
        active: whether to count; counting synchronises a GPU with the host.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        """Find the MoE layers."""
        self.active = True
        self._layout = layout
        self._layers: list[Any] = [each for each in model.modules() if _is_moe_layer(each)]
        self._handles: list[Any] = []
        self._seen: list[tuple[Tensor, int, bool]] = []

    def __enter__(self) -> Self:
        """Hook the routers."""
        for layer in self._layers:
            listen = self._listener(int(layer.layer_number) - 1)
            self._handles.append(layer.router.register_forward_hook(listen))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()

    def take(self, scheme: Scheme | Literal["everywhere"]) -> Tensor:
        """Count what was seen and start again.

        Args:
            scheme: what the dispatcher sends once; "everywhere" for one that sends all to all. It
                is told at the end, as the dispatcher's tier is known after its first batch.

        Returns:
            [num_layers * E + 2] fp64: copies of each layer and expert that this rank's tokens
            asked for, then bytes inside domains and across them. Summed over ranks it is the job.
        """
        layout = self._layout
        seen, self._seen = self._seen, []
        totals = torch.zeros(layout.num_layers * layout.num_experts + 2, dtype=torch.float64)
        for routed, layer, with_grad in seen:
            if with_grad:
                first = layer * layout.num_experts
                totals[first : first + layout.num_experts] += routed.sum(0)
            trips = 4 if with_grad else 2  # dispatch and combine, and their backward
            totals[-2:] += self._rows(routed, scheme) * layout.row_bytes * trips
        return totals

    def split(self, totals: Tensor) -> tuple[Tensor, int, int]:
        """Tokens of each expert [num_layers, E], bytes inside, bytes across, of summed totals."""
        load = totals[:-2].view(self._layout.num_layers, self._layout.num_experts)
        return load, int(totals[-2]), int(totals[-1])

    def see(self, routing_map: Tensor, layer: int, *, with_grad: bool) -> None:
        """Take note of one routing.

        Args:
            routing_map: [T, E] bool.
            layer: from 0.
            with_grad: whether autograd records: a forward that is computed again later does not,
                so it moves bytes but is not a second routing.
        """
        routed = routing_map.detach().bool().reshape(-1, self._layout.num_experts)
        self._seen.append((routed.cpu(), layer, with_grad))

    def _rows(self, routed: Tensor, scheme: Scheme | Literal["everywhere"]) -> Tensor:
        """[2] fp64: rows that a dispatch of this routing sends inside domains, and across them."""
        layout = self._layout
        if scheme == "everywhere":
            dst_rank = torch.arange(layout.topology.ep_size).expand(len(routed), -1)
            scheme = "by_rank"
        else:
            dst_rank = self._dst_rank(routed)
        traffic = source_traffic(dst_rank, layout.ep_rank, layout.topology, scheme)
        return torch.stack([traffic.rows_per_rank(link, "send").sum() for link in LINKS])

    def _dst_rank(self, routed: Tensor) -> Tensor:
        """[T, slots] int64: the ranks that each token's rows go to, -1 for none."""
        layout = self._layout
        shards = layout.expert_tensor
        owners = layout.topology.ep_size // shards
        owner = torch.arange(layout.num_experts) // (layout.num_experts // owners)
        ranks = owner[:, None] * shards + torch.arange(shards)
        wide = routed[:, :, None].expand(-1, -1, shards)
        return torch.where(wide, ranks, -1).flatten(1)

    def _listener(self, layer: int) -> Any:  # noqa: ANN401
        """The hook of one router."""

        def listen(module: nn.Module, args: object, output: Any) -> None:  # noqa: ANN401
            if self.active:
                self.see(output[1], layer, with_grad=torch.is_grad_enabled())

        return listen


def _is_moe_layer(module: nn.Module) -> bool:
    """Whether a module is Megatron's MoE layer or a subclass, without importing Megatron."""
    return any(base.__name__ == "MoELayer" for base in type(module).__mro__)


def max_over_mean(load: Tensor) -> float:
    """Largest load of an expert over the mean load, worst layer: 1 is perfect balance.

    Args:
        load: [num_layers, E]; layers without experts are zero and do not count.

    Example: [[3, 1], [2, 2]] -> 1.5.
    """
    active = load[load.sum(1) > 0]
    if not len(active):
        return 0.0
    return float((active.max(1).values / active.mean(1)).max())
