"""Which form of combine a group runs where its config leaves the choice open."""

from __future__ import annotations

from ep_dispatcher.config import Combine, EpConfig, Topology
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.memory import partial_bytes

_GATHER_LINK_LIMIT = 1.25  # gather saves two passes over local memory; that much link is worth it


def choose_combine(config: EpConfig, topology: Topology, *, gpus_are_shared: bool) -> Combine:
    """The form that `Tuning.combine` names; for "auto", the one with less to move.

    "push" sends one partial row for each pair of token and rank, and moves it three times: into
    the ring, out of it, and home. "gather" reads every expert row once, over the link where it is
    not the home rank's own. So gather wins where both put about the same on the links: with many
    ranks for few slots, with partial rows in fp32, or where ranks share a GPU and so have no link.

    Args:
        config: of the group.
        topology: of the group; with several domains only "push" is possible.
        gpus_are_shared: whether two of its ranks have the same GPU.

    Raises:
        ConfigError: "gather" was asked for, and there are several domains.

    Example: rows of BF16, K=8, rounded: link bytes of gather over those of push are 1.52 with 8
        ranks, 1.11 with 32, 1.05 with 64. So 8 ranks push and 32 gather.
    """
    if topology.num_domains > 1:
        if config.tuning.combine == "gather":
            raise ConfigError(
                f"combine is 'gather' and the group spans {topology.num_domains} NVLink domains; "
                "a home rank reads rows inside its own domain only: set it to 'auto' or 'push'"
            )
        return "push"
    if config.tuning.combine != "auto":
        return config.tuning.combine
    gather = gpus_are_shared or link_ratio(config, topology) <= _GATHER_LINK_LIMIT
    return "gather" if gather else "push"


def link_ratio(config: EpConfig, topology: Topology) -> float:
    """Bytes of gather over bytes of push on the links, expected for a uniform routing.

    A token's K slots lie on a given other rank K / P times; at least one does with probability
    1 - (1 - 1 / P) ** K.

    Args:
        config: of the group.
        topology: of the group.
    """
    slots, ranks = config.shape.num_topk, topology.ep_size
    rows = slots / ranks * config.shape.row_bytes
    partials = (1 - (1 - 1 / ranks) ** slots) * partial_bytes(config)
    return rows / partials
