"""What a GPU posts to another domain, counted so that none of NCCL's queues ever fills.

A kernel that posts to a full queue waits for room without a deadline. NCCL has a queue for each
context and peer. So there are lanes and contexts enough that all a rank can post while the network
towards a peer takes nothing fits in. How long a queue is depends on the kind of GIN: the proxy's
holds 32 times what the net plugin calls its most receives at once (maxRecvs, 8 of NCCL's own), so
256 posts, unless NCCL_GIN_PROXY_QUEUE_SIZE says otherwise, and a shorter one is refused; a plugin
with fewer receives has shorter queues, which nothing here sees. GDAKI's would hold 128 entries, and
is asked to hold as many as these posts take.

How much that is: let the network stop during launch X of a rank. A launch with a put to that peer
does not end, since it waits until its puts are sent; one without any ends after a signal for each
chunk. X + 1 posts once the peer was seen to enter it, which the peer may do, as it knows our entry
into X. The peer does not leave X + 1, as our entry into that never comes, so we post nothing in
X + 2 but an entry, or our parts of a routing. That makes the signals of two launches, the puts of
one, the parts of one routing, and a few words.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ep_dispatcher.errors import UnavailableError

RAIL_WARPS = 8  # EP_RAIL_WARPS, putting warps of a block
_FEWEST_CONTEXTS = 4  # of GIN; NCCL's own default
_QUEUE_POSTS = 256  # of a context and peer that are held; the proxy's own length
_PROXY_VARIABLE = "NCCL_GIN_PROXY_QUEUE_SIZE"
# Of GDAKI a post takes one entry, and a put two more in a second queue of the same length, which
# count it. So twice the posts are enough for both.
GDAKI_QUEUE_DEPTH = 2 * _QUEUE_POSTS
_MOST_UNSENT = 16  # puts of a lane on their way: kMostUnsentSums
_CHUNK_TOKENS = 32  # EP_RAIL_CHUNK_TOKENS
_LAUNCHES = 2  # whose signals may be queued
_POSTS_OF_A_PART = 2  # of a routing: it and its signal
_WORDS = 4  # three entries and a fault


@dataclass(frozen=True)
class RailPosts:
    """Posts of a rank to one peer of its rail.

    Attributes:
        num_domains: at least 2.
        num_blocks: that serve the rails, EP_RAIL_WARPS putting warps each.
        num_channels: blocks that serve the domain; each posts a part of the routing.
        max_tokens: of a rank.
    """

    num_domains: int
    num_blocks: int
    num_channels: int
    max_tokens: int

    @property
    def lanes(self) -> int:
        """Channels towards each other domain, as `rail_lanes` has them."""
        return max(1, self.num_blocks * RAIL_WARPS // (self.num_domains - 1))

    def most(self, contexts: int) -> int:
        """Posts that one of so many contexts may have to hold.

        Channels go round the contexts in groups of D: a group for each lane, then those of the
        routing's parts and of entries.

        Example: 32 domains, 8 blocks, 16 channels, 4096 tokens -> 2 lanes; with 2 contexts one of
        them holds a lane's 2 x 64 signals and 16 puts, 16 x 2 posts of a routing, and 4 more: 180.
        """
        chunks = -(-self.max_tokens // _CHUNK_TOKENS)
        of_lane = _LAUNCHES * -(-chunks // self.lanes) + _MOST_UNSENT
        groups = -(-(self.num_channels + 1) // self.num_domains)
        parts = min(self.num_channels, -(-groups // contexts) * self.num_domains)
        return -(-self.lanes // contexts) * of_lane + _POSTS_OF_A_PART * parts + _WORDS

    def contexts(self) -> int | None:
        """The fewest contexts whose queues never fill; None where a lane alone fills one."""
        for contexts in range(min(_FEWEST_CONTEXTS, self.lanes), self.lanes + 1):
            if self.most(contexts) <= _QUEUE_POSTS:
                return contexts
        return None


def blocks_for(num_domains: int, num_channels: int, max_tokens: int, wanted: int) -> int:
    """Blocks that serve the rails: `wanted`, and more where these would have too few lanes.

    Args:
        num_domains: at least 2.
        num_channels: blocks that serve the domain, and the most that the rails get beyond the
            fewest that have a warp for each domain.
        max_tokens: of a rank.
        wanted: blocks, if they are enough.

    Example: 32 domains, 16 channels, 4096 tokens, 4 wanted -> 8; with 2048 tokens 4.
    """
    blocks = max(wanted, -(-(num_domains - 1) // RAIL_WARPS))
    while blocks < num_channels:
        if RailPosts(num_domains, blocks, num_channels, max_tokens).contexts() is not None:
            break
        blocks += 1
    return blocks


def num_contexts(posts: RailPosts) -> int:
    """GIN contexts to ask for.

    Raises:
        UnavailableError: more tokens than lanes have room for; on all ranks alike.

    Example: 2 domains, 4 blocks, 16 channels, 4096 tokens -> 4.
    """
    contexts = posts.contexts()
    if contexts is None:
        raise UnavailableError(
            f"max_tokens_per_rank is {posts.max_tokens}; towards each of {posts.num_domains - 1} "
            f"other domain(s) num_sms {posts.num_channels} gives {posts.lanes} lane(s), and what "
            "they post could fill NCCL's queues, which a kernel would wait for without an end: "
            "give the device tier more SMs (num_sms) or fewer tokens a call, or take the reference "
            "tier"
        )
    return contexts


def check_proxy_queue() -> None:
    """Refuse queues of NCCL's proxy that are shorter than the posts that this module allows.

    NCCL takes its own length for what is no power of two.

    Raises:
        UnavailableError: names the variable and its value.
    """
    text = os.environ.get(_PROXY_VARIABLE, "")
    try:
        size = int(text, 0)
    except ValueError:  # not set, or no number: NCCL passes over it as well
        return
    if 1 <= size < _QUEUE_POSTS and size.bit_count() == 1:
        raise UnavailableError(
            f"{_PROXY_VARIABLE} is {size}; a rank may have to post {_QUEUE_POSTS} times before its "
            "network takes any, and a kernel waits without an end for room in a full queue: unset "
            f"it, or make it at least {_QUEUE_POSTS}"
        )
