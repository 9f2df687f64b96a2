"""What the device tier's kernels have room for, in the names that users set.

The C interface refuses the same (csrc/api/ep_dispatcher.cpp), later and in names of its own.
"""

from __future__ import annotations

from ep_dispatcher.config import MAX_TOKENS_PER_RANK, EpConfig

MAX_TOPK = 64  # EP_MAX_TOPK
MAX_EXPERTS = 2048  # EP_MAX_EXPERTS
MAX_BASE_ENTRIES = 16384  # kMaxBaseEntries: experts of one rank x ranks of its domain
MAX_HIDDEN = 1 << 28  # the C interface counts a row's elements in fp32, up to 1 GiB
MAX_ROWS = (1 << 31) - 1  # rows travel as 32-bit words
_ENTRY_BITS = 32  # of a record: an expert, and which of the rank's copies it is


def config_reason(config: EpConfig, num_domains: int = 1) -> str | None:
    """Say in one sentence why no machine runs a config on the device tier; None if one may.

    Args:
        config: of a group.
        num_domains: NVLink domains that it spans; the fewest that are possible where unknown.
    """
    return _shape_reason(config) or _tokens_reason(config, num_domains)


def _shape_reason(config: EpConfig) -> str | None:
    """The part of `config_reason` about the layer and the rows that a rank may receive."""
    if config.shape.dtype == "float64":
        return "float64 rows run in the reference tier only"
    if config.shape.num_topk > MAX_TOPK:
        return (
            f"num_topk is {config.shape.num_topk}; the device tier carries at most {MAX_TOPK} "
            "slots a token (padding experts to a capacity makes a slot of every expert: turn "
            "moe_pad_expert_input_to_capacity off, or take the reference tier)"
        )
    if config.shape.num_experts > MAX_EXPERTS:
        return (
            f"num_experts is {config.shape.num_experts}; the device tier takes at most "
            f"{MAX_EXPERTS}: use fewer experts, or take the reference tier"
        )
    if config.recv_capacity_rows is not None and config.recv_capacity_rows > MAX_ROWS:
        return (
            f"recv_capacity_rows is {config.recv_capacity_rows}; the device tier takes at most "
            f"{MAX_ROWS} rows"
        )
    if config.shape.hidden > MAX_HIDDEN:
        return (
            f"hidden is {config.shape.hidden}; the device tier takes at most {MAX_HIDDEN} "
            "elements a row: use a smaller one, or take the reference tier"
        )
    return None


def _tokens_reason(config: EpConfig, num_domains: int) -> str | None:
    """The part of `config_reason` about tokens: a rank is home of those of its whole rail."""
    shape = config.shape
    copy_bits = _ENTRY_BITS - (shape.num_experts - 1).bit_length()
    most_copies = (1 << copy_bits) - 1
    most_tokens = min(most_copies // shape.num_topk, MAX_TOKENS_PER_RANK) // num_domains
    if config.max_tokens_per_rank <= most_tokens:
        return None
    domains = f" over {num_domains} NVLink domains" if num_domains > 1 else ""
    return (
        f"max_tokens_per_rank is {config.max_tokens_per_rank}; with num_topk {shape.num_topk} and "
        f"num_experts {shape.num_experts}{domains} the device tier takes at most {most_tokens} "
        "(token, slot and expert travel in 32 bits): set it lower, or take the reference tier"
    )
