"""Listens to the routers of a model: tokens of each expert, and bytes that the rows move.

The bytes are counted from the routing by `ep_dispatcher.accounting`, with the scheme of the
dispatcher at work, so they are what it puts on the links: rows that leave their rank, there and
back, forward and backward. Weights and counts (a few bytes a row) are not in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from ep_dispatcher.accounting import Scheme, source_traffic
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
        scheme: what the dispatcher sends once; "everywhere" for one that sends all to all.
    """

    num_layers: int
    num_experts: int
    row_bytes: int
    ep_rank: int
    expert_tensor: int
    topology: Topology
    scheme: Scheme | str


class RouterObserver:
    """Adds up what the routers of one rank decide; a context manager.

    Args:
        model: Megatron's, wrapped or not; its MoE layers have `router` and `layer_number`.
        layout: sizes and the dispatcher's scheme.

    Attributes:
        active: whether to count; counting synchronises a GPU with the host.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        """Find the MoE layers."""
        self.active = True
        self._layout = layout
        self._layers = [module for module in model.modules() if _is_moe_layer(module)]
        self._handles: list[Any] = []
        self._totals = torch.zeros(self._size(), dtype=torch.float64)

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

    def take(self) -> Tensor:
        """Return what was counted and start again.

        Returns:
            [num_layers * E + 2] fp64: copies of each layer and expert that this rank's tokens
            asked for, then bytes inside domains and across them. Summed over ranks it is the job.
        """
        totals, self._totals = self._totals, torch.zeros(self._size(), dtype=torch.float64)
        return totals

    def split(self, totals: Tensor) -> tuple[Tensor, int, int]:
        """Tokens of each expert [num_layers, E], bytes inside, bytes across, of summed totals."""
        load = totals[:-2].view(self._layout.num_layers, self._layout.num_experts)
        return load, int(totals[-2]), int(totals[-1])

    def count(self, routing_map: Tensor, layer: int, *, with_grad: bool) -> None:
        """Add one routing.

        Args:
            routing_map: [T, E] bool.
            layer: from 0.
            with_grad: whether autograd records: a forward that is computed again later does not,
                so it moves bytes but is not a second routing.
        """
        layout = self._layout
        routed = routing_map.detach().bool().reshape(-1, layout.num_experts).cpu()
        if with_grad:
            first = layer * layout.num_experts
            self._totals[first : first + layout.num_experts] += routed.sum(0)
        traffic = source_traffic(
            self._dst_rank(routed), layout.ep_rank, layout.topology, self._scheme()
        )
        trips = 4 if with_grad else 2  # dispatch and combine, and their backward
        for position, link in ((-2, "inside"), (-1, "across")):
            rows = traffic.rows_per_rank(link, "send").sum()  # type: ignore[arg-type]
            self._totals[position] += rows * layout.row_bytes * trips

    def _dst_rank(self, routed: Tensor) -> Tensor:
        """[T, slots] int64: the ranks that each token's rows go to, -1 for none."""
        layout = self._layout
        if layout.scheme == "everywhere":
            return torch.arange(layout.topology.ep_size).expand(len(routed), -1)
        shards = layout.expert_tensor
        owners = layout.topology.ep_size // shards
        owner = torch.arange(layout.num_experts) // (layout.num_experts // owners)
        ranks = owner[:, None] * shards + torch.arange(shards)
        wide = routed[:, :, None].expand(-1, -1, shards)
        return torch.where(wide, ranks, -1).flatten(1)

    def _scheme(self) -> Scheme:
        """The scheme in the accounting's words."""
        if self._layout.scheme == "everywhere":
            return "by_rank"
        return self._layout.scheme  # type: ignore[return-value]

    def _size(self) -> int:
        return self._layout.num_layers * self._layout.num_experts + 2

    def _listener(self, layer: int) -> Any:  # noqa: ANN401
        """The hook of one router."""

        def listen(module: nn.Module, args: object, output: Any) -> None:  # noqa: ANN401
            if self.active:
                self.count(output[1], layer, with_grad=torch.is_grad_enabled())

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
