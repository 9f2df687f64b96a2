"""Persistent memory of the rails: the regions that csrc/core/rail_layout.h lays out, as a formula.

They lie in each rank's window behind those of its domain. The two that matter hold at most every
token of every other domain's rank of the same rail: records on their way in, sums on their way
home.
"""

from __future__ import annotations

from dataclasses import dataclass

from ep_dispatcher.config import EpConfig, Topology
from ep_dispatcher.rail_posts import RAIL_WARPS, RailPosts, blocks_for

REGION_ALIGNMENT_BYTES = 128
WORD_BYTES = 4
EPOCH_BYTES = 8
COUNTS_EXTRA = 3  # EP_COUNTS_EXTRA
PARITIES = 2  # areas that one call fills while a peer may still read those of the last
_SMS_A_RAIL_BLOCK = 4  # of the budget; a rail needs far fewer than its domain (docs/scaling.md)
_RAIL_STAGES = 4  # EP_RAIL_STAGES, records of a warp whose puts may be on their way
_CONTROL_BYTES = 56  # sizeof(RailControl)
_VERDICT_BYTES = 32
_ROLE_BYTES = 64  # kRoleWords, of a block
_TOPK_HEADER_BYTES = 20  # sizeof(RailTopkHeader)
_EXPERT_BYTES = 2  # of an expert's id on the wire


def align(size_bytes: int, alignment_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def segment_tokens(config: EpConfig, topology: Topology) -> int:
    """Tokens of a segment: those of any rank; over several domains at least one."""
    return max(config.max_tokens_per_rank, int(topology.num_domains > 1))


def rail_blocks(config: EpConfig, topology: Topology) -> int:
    """Blocks that a kernel gives to the rails, on top of `num_sms`; 0 in a single domain.

    A quarter of `num_sms`, or as many as a warp for each domain takes, or as many as NCCL's queues
    need (`rail_posts`).
    """
    if topology.num_domains == 1:
        return 0
    num_sms, tokens = config.tuning.num_sms, segment_tokens(config, topology)
    return blocks_for(topology.num_domains, num_sms, tokens, num_sms // _SMS_A_RAIL_BLOCK)


@dataclass(frozen=True)
class RailSizes:
    """What the regions of the rails depend on.

    Attributes:
        topology: of the group; several domains.
        num_experts, num_topk: E and K.
        num_channels: blocks of a kernel that serve the domain.
        num_blocks: blocks that serve the rails.
        tokens: length of a segment.
        slot_bytes: of one record or sum.
        own_bytes: of a sum that stays here until the others have come; 0 where it needs no place.
    """

    topology: Topology
    num_experts: int
    num_topk: int
    num_channels: int
    num_blocks: int
    tokens: int
    slot_bytes: int
    own_bytes: int

    def regions(self) -> dict[str, int]:
        """Bytes of each region, padding included; names and order are EpRailLayout's."""
        domains, channels = self.topology.num_domains, self.num_channels
        ranks = self.topology.ep_size
        lanes = RailPosts(domains, self.num_blocks, channels, self.tokens).lanes
        landed = (domains - 1) * self.tokens * self.slot_bytes
        stages = self.num_blocks * RAIL_WARPS * _RAIL_STAGES
        sizes = {
            "signals": EPOCH_BYTES * domains * (2 * lanes + 2 + channels),
            "control": _CONTROL_BYTES,
            "posted": EPOCH_BYTES * (lanes * domains + channels + 1),
            "stats": 2 * EPOCH_BYTES * domains,
            "role_times": 2 * _ROLE_BYTES * (channels + self.num_blocks),
            "counts_flag": EPOCH_BYTES * ranks,
            "counts": WORD_BYTES * PARITIES * ranks * (self.num_experts + COUNTS_EXTRA),
            "block_counts": WORD_BYTES * channels * domains * self.num_experts,
            "topk": PARITIES * domains * channels * self._topk_part_bytes(),
            "shift": WORD_BYTES * ranks * self.num_experts,
            "verdict": _VERDICT_BYTES,
            "virtual_topk": 8 * domains * self.tokens * self.num_topk,
            "staging": stages * self.slot_bytes,
            "landing": landed,
            "partials": landed,
            "own": self.tokens * self.own_bytes,
        }
        return {name: align(size, REGION_ALIGNMENT_BYTES) for name, size in sizes.items()}

    def _topk_part_bytes(self) -> int:
        """Of the routing that one block of a rank sends to another domain."""
        slots = -(-self.tokens // self.num_channels) * self.num_topk
        return align(_TOPK_HEADER_BYTES + _EXPERT_BYTES * slots, 16)
