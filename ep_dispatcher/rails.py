"""A rank's place in its NVLink domain, and what reaches the other domains.

Inside a domain the kernels know local ranks only, and experts elsewhere as nobody's. Over several
domains each rank is home of D segments of tokens: its own and those of its rail (csrc/api/ep_rail.h
tells the rest).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher import native
from ep_dispatcher.config import EpConfig, Topology
from ep_dispatcher.errors import UnavailableError
from ep_dispatcher.memory import RING_DEPTH, partial_bytes
from ep_dispatcher.plan import Placement
from ep_dispatcher.rail_memory import rail_blocks, segment_tokens
from ep_dispatcher.rail_posts import (
    GDAKI_QUEUE_DEPTH,
    RailPosts,
    check_proxy_queue,
    num_contexts,
)

MAX_DOMAINS, MAX_DOMAIN_SIZE = 32, 72  # EP_MAX_DOMAINS, EP_MAX_RANKS
_NET_GIN = 2  # EP_NET_GIN
_GIN_PROXY = 2  # NCCL_GIN_TYPE_PROXY


@dataclass(frozen=True)
class DomainView:
    """Where a rank is.

    Attributes:
        topology: of the group.
        placement: of all experts.
        ep_rank: among all ranks.
    """

    topology: Topology
    placement: Placement
    ep_rank: int

    @property
    def index(self) -> int:
        """Of the rank in its domain."""
        return self.topology.lsa_rank(self.ep_rank)

    @property
    def number(self) -> int:
        """Of the domain."""
        return self.topology.domain_of(self.ep_rank)

    @property
    def first_rank(self) -> int:
        """The lowest rank of the domain."""
        return self.number * self.topology.domain_size

    def tables(self, device: torch.device) -> dict[str, Tensor]:
        """Owners of experts as the domain's kernels know them; see `owner_tables`."""
        size = self.topology.domain_size
        owner = self.placement.rank_of - self.first_rank
        return owner_tables(owner.where((owner >= 0) & (owner < size), size), size, device)

    def shape(self, module: Any, config: EpConfig) -> Any:  # noqa: ANN401
        """EpWindowShape of the domain: all segments' tokens are its rank's."""
        return module.WindowShape(
            ep_size=self.topology.domain_size,
            num_experts=self.placement.num_experts,
            num_topk=config.shape.num_topk,
            num_channels=config.tuning.num_sms,
            ring_depth=RING_DEPTH,
            max_tokens=self.topology.num_domains * segment_tokens(config, self.topology),
            partial_bytes=partial_bytes(config),
        )


def check_topology(topology: Topology) -> None:
    """Refuse more domains, or larger ones, than kernels have room for.

    Raises:
        UnavailableError: on all ranks alike.
    """
    if topology.num_domains > MAX_DOMAINS or topology.domain_size > MAX_DOMAIN_SIZE:
        raise UnavailableError(
            f"the ranks are {topology.num_domains} NVLink domains of {topology.domain_size}; the "
            f"device tier takes up to {MAX_DOMAINS} domains of up to {MAX_DOMAIN_SIZE} ranks: use "
            "a smaller expert-parallel group, or take the reference tier"
        )


class OpenRails:
    """GIN towards the other domains, open on all ranks.

    Attributes:
        rail: EpRail, a part of every launch.
        domain: number of the own one.
        segment_tokens: length of a segment.
    """

    def __init__(
        self,
        config: EpConfig,
        domain: DomainView,
        communicator: Any,  # noqa: ANN401
        arena: Any,  # noqa: ANN401
    ) -> None:
        """Open them; collective, after the arena was shared.

        Raises:
            UnavailableError: NCCL has no GIN here, or its queues are too short; says what to do.
        """
        if communicator.properties().rail_gin == _GIN_PROXY:
            check_proxy_queue()
        module = native.load()
        self.domain = domain.number
        self.segment_tokens = segment_tokens(config, domain.topology)
        self.rail = make_rail(module, config, domain)
        layout = self.rail.layout
        shape = module.RailShape(
            num_contexts=num_contexts(rail_posts(config, domain.topology)),
            signals_per_domain=layout.signals_per_domain,
            num_counters=layout.channels,
            queue_depth=GDAKI_QUEUE_DEPTH,
        )
        self._base = int(arena.base)
        self._native = module.Rails(communicator, arena, shape)
        self.rail.gin_device_comm = self._native.device_comm
        self.rail.gin_window = self._native.window
        self.rail.gin_contexts = self._native.num_contexts
        self.rail.gin_signals_per_domain = layout.signals_per_domain
        self.rail.gin_counters = layout.channels
        device = torch.device("cuda", torch.cuda.current_device())
        placement = domain.placement
        self._tables = owner_tables(placement.rank_of, placement.ep_size, device)
        for name in ("expert_rank", "expert_order", "owner_first"):
            setattr(self.rail, name, self._tables[name].data_ptr())

    def address(self, offset: int) -> int:
        """Where `offset` bytes into this rank's window lie."""
        return self._base + offset

    def close(self) -> None:
        """Close; collective, before the arena."""
        self._native.close()

    def forget(self) -> None:
        """Let go, after the communicator was aborted."""
        self._native.forget()


def check_world(config: EpConfig, topology: Topology) -> None:
    """Refuse what the device tier has no room for, before anything is opened.

    Raises:
        UnavailableError: on all ranks alike.
    """
    check_topology(topology)
    if topology.num_domains > 1:
        num_contexts(rail_posts(config, topology))


def rail_posts(config: EpConfig, topology: Topology) -> RailPosts:
    """What a rank posts to another domain; several domains."""
    return RailPosts(
        num_domains=topology.num_domains,
        num_blocks=rail_blocks(config, topology),
        num_channels=config.tuning.num_sms,
        max_tokens=segment_tokens(config, topology),
    )


def make_rail(module: Any, config: EpConfig, domain: DomainView) -> Any:  # noqa: ANN401
    """EpRail of a rank, with its layout and without addresses."""
    return module.Rail(
        module.Context(domain.shape(module, config), domain.index),
        num_domains=domain.topology.num_domains,
        domain=domain.number,
        num_blocks=rail_blocks(config, domain.topology),
        max_tokens=segment_tokens(config, domain.topology),
        exact=config.precision == "exact" and config.shape.dtype != "float32",
        net=_NET_GIN,
    )


def control_bytes_of(module: Any, config: EpConfig, domain: DomainView) -> int:  # noqa: ANN401
    """Bytes of a rank's window in front of its output rows."""
    if domain.topology.num_domains == 1:
        return int(module.WindowLayout(domain.shape(module, config)).total_bytes)
    return int(make_rail(module, config, domain).layout.total_bytes)


def owner_tables(owner: Tensor, num_ranks: int, device: torch.device) -> dict[str, Tensor]:
    """What kernels know of a placement, as int32 on `device`.

    Args:
        owner: [E] int64, rank of each expert; `num_ranks` for one that none of these ranks has.
        num_ranks: of them.
        device: of the tables.

    Returns:
        expert_rank [E], expert_local [E] (place among the owner's experts), expert_order [E]
        (experts by owner, then id), owner_first [num_ranks + 1] (where each owner starts in that
        order).

    Example: owner [1, 0, 2, 1], 2 ranks -> local [0, 0, 0, 1], order [1, 0, 3, 2], first [0, 1, 3].
    """
    order = torch.argsort(owner, stable=True)
    sizes = torch.bincount(owner, minlength=num_ranks)[:num_ranks]
    first = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    local = torch.empty_like(owner)
    local[order] = torch.arange(len(order)) - first[owner[order]]
    tables = {
        "expert_rank": owner,
        "expert_local": local,
        "expert_order": order,
        "owner_first": first,
    }
    return {name: table.to(device, torch.int32) for name, table in tables.items()}
