"""Persistent device memory of a group, as a formula with named terms.

Counted is what each rank holds beside its output tensors for as long as the group is open. One
domain: the regions of a rank's window, as csrc/core/window_layout.h lays them out (a test compiles
it and compares), and the tables of experts. Several domains: these regions span one domain only,
whose ranks are home of the tokens of their rails; those of csrc/core/rail_layout.h come behind.
"""

from __future__ import annotations

from typing import Literal

from ep_dispatcher.config import EpConfig, Topology
from ep_dispatcher.rail_memory import (
    COUNTS_EXTRA,
    EPOCH_BYTES,
    PARITIES,
    REGION_ALIGNMENT_BYTES,
    WORD_BYTES,
    RailSizes,
    rail_blocks,
    segment_tokens,
)
from ep_dispatcher.rail_memory import align as _align

RING_DEPTH = 16  # partial rows in flight for each (channel, pair of ranks); two chunks' worth

_WINDOW_ALIGNMENT_BYTES = 4096
_LOCAL_CONTROL_BYTES = 1072  # sizeof(LocalControl): epochs, exits, one barrier word a channel
_SEND_WARPS = 16  # EP_SEND_WARPS, each with its own progress word
_READY_BYTES = 32  # sizeof(EpReady)

# Which regions of the window make up each term that is shown.
_TERMS = {
    "control": (
        "error",
        "local",
        "route_flag",
        "dispatch_ready",
        "rows_done",
        "combine_ready",
        "gather_ready",
        "gather_done",
        "partial_full",
        "partial_free",
    ),
    "counts": ("block_counts", "counts"),
    "records": ("record_header", "record_entry"),
    "partial_ring": ("partials",),
}
_RAIL_TERMS = {
    "rail_control": (
        "signals",
        "control",
        "posted",
        "stats",
        "role_times",
        "counts_flag",
        "shift",
        "verdict",
    ),
    "rail_routing": ("counts", "block_counts", "topk", "virtual_topk"),
    "rail_landing": ("staging", "landing"),
    "rail_partials": ("partials", "own"),
}


def persistent_bytes(
    config: EpConfig,
    topology: Topology,
    tier: Literal["device", "reference"] = "device",
    ring_depth: int = RING_DEPTH,
) -> dict[str, int]:
    """Persistent device memory of one rank: bytes of each named term, and "total".

    The reference tier holds nothing between calls, so it has only the total, 0.

    Args:
        config: of the group; its shape, max_tokens_per_rank and num_sms set the sizes.
        topology: of the group.
        tier: whose memory.
        ring_depth: partial rows in flight for each (channel, pair of ranks).
    """
    if tier == "reference":
        return {"total": 0}
    regions = window_regions(config, topology, ring_depth)
    terms = {term: sum(regions[name] for name in names) for term, names in _TERMS.items()}
    terms["window_end"] = -sum(terms.values()) % _WINDOW_ALIGNMENT_BYTES
    tables = 3 * config.shape.num_experts + topology.domain_size + 1
    if topology.num_domains > 1:
        rails = rail_regions(config, topology)
        terms |= {term: sum(rails[name] for name in names) for term, names in _RAIL_TERMS.items()}
        terms["rail_end"] = -sum(rails.values()) % _WINDOW_ALIGNMENT_BYTES
        tables += 3 * config.shape.num_experts + topology.ep_size + 1
    terms["expert_tables"] = WORD_BYTES * tables
    return terms | {"total": sum(terms.values())}


def window_regions(
    config: EpConfig, topology: Topology, ring_depth: int = RING_DEPTH
) -> dict[str, int]:
    """Bytes of each region of a rank's window, padding included, in the order they lie in it.

    A region's offset is the sum of those before it. Names and order are EpWindowLayout's.
    """
    ranks, channels = topology.domain_size, config.tuning.num_sms
    tokens, shape = topology.num_domains * segment_tokens(config, topology), config.shape
    slots = channels * topology.domain_size * ring_depth
    sizes = {
        "error": EPOCH_BYTES,
        "local": _LOCAL_CONTROL_BYTES,
        "route_flag": EPOCH_BYTES * ranks * channels,
        "dispatch_ready": _READY_BYTES * ranks,
        "rows_done": EPOCH_BYTES * ranks * channels * _SEND_WARPS,
        "combine_ready": EPOCH_BYTES * ranks,
        "gather_ready": _READY_BYTES * ranks,
        "gather_done": EPOCH_BYTES * ranks * channels,
        "partial_full": EPOCH_BYTES * slots,
        "partial_free": EPOCH_BYTES * slots,
        "block_counts": WORD_BYTES * channels * (shape.num_experts + ranks),
        "counts": PARITIES * ranks * WORD_BYTES * (shape.num_experts + ranks + COUNTS_EXTRA),
        "record_header": WORD_BYTES * PARITIES * ranks * tokens,
        "record_entry": WORD_BYTES * PARITIES * ranks * tokens * shape.num_topk,
        "partials": slots * partial_slot_bytes(config),
    }
    return {name: _align(size, REGION_ALIGNMENT_BYTES) for name, size in sizes.items()}


def counts_row_bytes(config: EpConfig, topology: Topology) -> int:
    """Bytes of the counts that a rank sends to each other rank when it plans."""
    words = config.shape.num_experts + topology.ep_size + COUNTS_EXTRA
    return WORD_BYTES * words


def partial_bytes(config: EpConfig) -> int:
    """Bytes of a partial sum on its way home: of the row's dtype, or fp32 where exact."""
    shape = config.shape
    return 4 * shape.hidden if config.precision == "exact" else shape.row_bytes


def partial_slot_bytes(config: EpConfig) -> int:
    """Bytes of one slot of the ring: a partial row, then one float a slot of the token."""
    weights = WORD_BYTES * config.shape.num_topk
    return _align(_align(partial_bytes(config), 16) + weights, REGION_ALIGNMENT_BYTES)


def rail_record_bytes(config: EpConfig) -> int:
    """Bytes of one landed record: the row and a weight for each slot, up to whole lines."""
    shape = config.shape
    return _align(shape.row_bytes + WORD_BYTES * shape.num_topk, REGION_ALIGNMENT_BYTES)


def rail_regions(config: EpConfig, topology: Topology) -> dict[str, int]:
    """Bytes of each region of the rails behind those of `window_regions`; several domains."""
    shape = config.shape
    apart = config.precision == "exact" and shape.dtype != "float32"
    return RailSizes(
        topology=topology,
        num_experts=shape.num_experts,
        num_topk=shape.num_topk,
        num_channels=config.tuning.num_sms,
        num_blocks=rail_blocks(config, topology),
        tokens=segment_tokens(config, topology),
        slot_bytes=partial_slot_bytes(config),
        own_bytes=partial_bytes(config) if apart else 0,
    ).regions()
