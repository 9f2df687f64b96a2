"""Reference tier: dispatch and combine in plain PyTorch over any process group.

This is the executable specification: every kernel gives the same bits.

Order and rounding of the sum that `combine` makes for one token:
    1. on each rank, its rows of the token by ascending row (expert, then slot), in fp32; the
       result is rounded to the row dtype, or kept in fp32 where precision is "exact";
    2. in each domain, the partial sums of its ranks by ascending rank, in fp32; rounded alike;
    3. at home, the partial sums of the domains by ascending domain, in fp32; rounded to the dtype.
A sum starts from its first term, so a sum of one term has that term's bits (-0 stays -0); a sum of
no terms is +0. float64 rows are summed in float64 and never rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ep_dispatcher.collectives import Collectives
from ep_dispatcher.config import EpConfig, Topology
from ep_dispatcher.errors import AgreementError, ClosedError
from ep_dispatcher.plan import Placement, Plan, build_plan, count_copies

_REFUSAL_BYTES = 256  # of the reason that travels to the other ranks


@dataclass(frozen=True, eq=False, kw_only=True)
class Routes:
    """The reference tier's part of a plan: who sends what where, as index lists.

    U is the number of (token, destination rank) pairs of this rank, V of those that it receives,
    C and D likewise of copies. Sent lists are in (rank, token, row) order, received ones in
    (source rank, token, row) order.

    Attributes:
        sent_token: [U] int64, token of each pair.
        sent_pairs: P ints, pairs for each rank; `received_pairs` likewise.
        sent_copy: [C] int64, flat index into [T, K] of each copy.
        sent_copies: P ints, copies for each rank; `received_copies` likewise.
        received_pair: [D] int64, pair of each received copy.
        received_row: [D] int64, its row in recv_x.
        rows_of_pair: [V, J] int64, rows of each received pair, ascending; -1 fills up.
        pairs_of_token: [T, P] int64, position in `sent_token` of a token's pair with each rank;
            -1 where it has none.
    """

    sent_token: Tensor
    sent_pairs: list[int]
    received_pairs: list[int]
    sent_copy: Tensor
    sent_copies: list[int]
    received_copies: list[int]
    received_pair: Tensor
    received_row: Tensor
    rows_of_pair: Tensor
    pairs_of_token: Tensor


_PASSED = {True: "passed", False: "did not pass"}


class ReferenceBackend:
    """Implements `Backend` with an all-gather and a few all-to-alls.

    Args:
        collectives: over the group.
        config: the group's.
        topology: NVLink domains; decides the order of sums only, rows travel directly.
        placement: owner of each expert.
    """

    def __init__(
        self,
        collectives: Collectives,
        config: EpConfig,
        topology: Topology,
        placement: Placement,
    ) -> None:
        """Hold the group's facts; nothing is allocated."""
        self._is_closed = False
        self._collectives = collectives
        self._config = config
        self._topology = topology
        self._placement = placement

    def plan(self, topk_idx: Tensor | None, alignment: int, refusal: str | None) -> Plan | None:
        """See `Backend.plan`."""
        counts = self._exchange_counts(topk_idx, alignment, refusal)
        if topk_idx is None:
            return None
        plan = build_plan(
            topk_idx,
            counts,
            placement=self._placement,
            topology=self._topology,
            ep_rank=self._collectives.rank,
            alignment=alignment,
            recv_capacity_rows=self._config.recv_capacity_rows,
        )
        return replace(plan, transport=self._routes(plan))

    def dispatch(
        self, plan: Plan, x: Tensor, topk_weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.dispatch`; padding rows and their weights are zero."""
        self._agree_on_weights(topk_weights is not None)
        routes = _routes_of(plan)
        received = self._collectives.all_to_all(
            x[routes.sent_token], routes.sent_pairs, routes.received_pairs
        )
        recv_x = x.new_zeros(plan.num_recv_rows, x.shape[1])
        recv_x[routes.received_row] = received[routes.received_pair]
        if topk_weights is None:
            return recv_x, None
        weights = self._collectives.all_to_all(
            topk_weights.flatten()[routes.sent_copy], routes.sent_copies, routes.received_copies
        )
        recv_weights = topk_weights.new_zeros(plan.num_recv_rows)
        recv_weights[routes.received_row] = weights
        return recv_x, recv_weights

    def _agree_on_weights(self, given: bool) -> None:
        """Refuse weights of some ranks only: their rows would have no weight elsewhere."""
        all_given = self._collectives.all_gather(torch.tensor([int(given)])).flatten().tolist()
        if len(set(all_given)) > 1:
            other = all_given.index(int(not given))
            raise AgreementError(
                f"rank {self._collectives.rank} {_PASSED[given]} topk_weights to dispatch and "
                f"rank {other} {_PASSED[not given]}; pass them on all ranks or on none"
            )

    def combine(
        self, plan: Plan, expert_out: Tensor, row_weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.combine`; the module docstring gives order and rounding."""
        routes = _routes_of(plan)
        partial = self._rounded(ordered_sum(expert_out, routes.rows_of_pair), expert_out.dtype)
        returned = self._collectives.all_to_all(partial, routes.received_pairs, routes.sent_pairs)
        out = self._sum_at_home(returned, routes.pairs_of_token, expert_out.dtype)
        if row_weights is None:
            return out, None
        returned_weights = self._collectives.all_to_all(
            row_weights[routes.received_row], routes.received_copies, routes.sent_copies
        )
        weights = row_weights.new_zeros(plan.num_tokens * plan.num_topk)
        weights[routes.sent_copy] = returned_weights
        return out, weights.view(plan.num_tokens, plan.num_topk)

    def empty_rows(self, plan: Plan) -> Tensor:
        """See `Backend.empty_rows`; ordinary memory."""
        dtype: torch.dtype = getattr(torch, self._config.shape.dtype)
        return torch.empty(
            (plan.num_recv_rows, self._config.shape.hidden),
            dtype=dtype,
            device=plan.topk_idx.device,
        )

    def check(self) -> None:
        """See `Backend.check`: but for closing, every call has said by itself what it met."""
        if self._is_closed:
            raise ClosedError

    def close(self, *, failed: bool = False) -> None:
        """Nothing to free; later backwards are refused, as in the device tier."""
        self._is_closed = True

    def _sum_at_home(self, returned: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum the ranks' partial rows of each domain, then the domains' (steps 2 and 3)."""
        size = self._topology.domain_size
        domains = [
            self._rounded(ordered_sum(returned, pairs[:, first : first + size]), dtype)
            for first in range(0, self._topology.ep_size, size)
        ]
        present = [
            (pairs[:, first : first + size] >= 0).any(1)
            for first in range(0, self._topology.ep_size, size)
        ]
        num_tokens = len(pairs)
        own = torch.arange(num_tokens, device=pairs.device)
        which = [
            torch.where(there, own + domain * num_tokens, -1)
            for domain, there in enumerate(present)
        ]
        return ordered_sum(torch.cat(domains), torch.stack(which, 1)).to(dtype)

    def _rounded(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        """Round a partial sum as the group's precision says."""
        return partial if self._config.precision == "exact" else partial.to(dtype)

    def _exchange_counts(
        self, topk_idx: Tensor | None, alignment: int, refusal: str | None
    ) -> Tensor:
        """All-gather one row of counts, with the alignment and a refusal in front of it."""
        num_experts = self._placement.num_experts
        device = torch.device("cpu") if topk_idx is None else topk_idx.device
        reason = (refusal or "").encode()[:_REFUSAL_BYTES].ljust(_REFUSAL_BYTES, b" ")
        header = torch.frombuffer(bytearray(reason), dtype=torch.int64).to(device)
        if topk_idx is None:
            counts = torch.zeros(num_experts, dtype=torch.int64)
        else:
            counts = count_copies(topk_idx, num_experts)
        own = torch.cat([counts, torch.tensor([alignment], device=device), header])
        rows = self._collectives.all_gather(own)
        if refusal is None:
            _raise_refusals(rows[:, num_experts + 1 :])
            _raise_unequal("alignment", rows[:, num_experts])
        return rows[:, :num_experts]

    def _routes(self, plan: Plan) -> Routes:
        """Exchange index lists, so that both sides of each link know what travels."""
        size, num_tokens = self._collectives.size, max(plan.num_tokens, 1)
        sent_copy, token = _copies_by_rank(plan)
        rank = plan.dst_rank.flatten()[sent_copy]
        keys, pair_of_copy = torch.unique(rank * num_tokens + token, return_inverse=True)
        sent_pairs = torch.bincount(keys // num_tokens, minlength=size)
        sent_copies = torch.bincount(rank, minlength=size)
        first_pair = sent_pairs.cumsum(0) - sent_pairs
        splits = torch.stack([sent_pairs, sent_copies], 1)
        received = self._collectives.all_to_all(splits, [1] * size, [1] * size)
        received_pairs, received_copies = received[:, 0], received[:, 1]
        row = plan.dst_row.flatten()[sent_copy]
        lists = torch.stack([pair_of_copy - first_pair[rank], row], 1)
        got = self._collectives.all_to_all(lists, sent_copies.tolist(), received_copies.tolist())
        base = received_pairs.cumsum(0) - received_pairs
        received_pair = got[:, 0] + base.repeat_interleave(received_copies)
        return Routes(
            sent_token=keys % num_tokens,
            sent_pairs=sent_pairs.tolist(),
            received_pairs=received_pairs.tolist(),
            sent_copy=sent_copy,
            sent_copies=sent_copies.tolist(),
            received_copies=received_copies.tolist(),
            received_pair=received_pair,
            received_row=got[:, 1],
            rows_of_pair=_ragged(received_pair, got[:, 1], int(received_pairs.sum())),
            pairs_of_token=_pairs_of_token(keys, plan.num_tokens, num_tokens, size),
        )


def ordered_sum(rows: Tensor, index: Tensor) -> Tensor:
    """Sum listed rows in the order of the list, in fp32 (float64 stays float64).

    Args:
        rows: [M, H].
        index: [N, J] int64, rows of each sum; entries of -1 are skipped.

    Returns:
        [N, H] fp32 (or float64); a sum of no rows is +0.

    Example: rows [[2^24], [1], [-2^24]] with index [[0, 1, 2], [0, 2, 1]] -> [[0], [1]], as
        2^24 + 1 rounds to 2^24 in fp32.
    """
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = torch.zeros(len(index), rows.shape[1], dtype=dtype, device=rows.device)
    started = torch.zeros(len(index), dtype=torch.bool, device=rows.device)
    for terms in index.unbind(1):
        first = ((terms >= 0) & ~started).nonzero().flatten()
        later = ((terms >= 0) & started).nonzero().flatten()
        total[first] = rows[terms[first]].to(dtype)
        total[later] += rows[terms[later]].to(dtype)
        started[first] = True
    return total


def _copies_by_rank(plan: Plan) -> tuple[Tensor, Tensor]:
    """Flat [T * K] indices of the copies that are sent, in (rank, token, row) order, and tokens."""
    kept = (plan.dst_rank.flatten() >= 0).nonzero().flatten()
    kept = kept[torch.argsort(plan.dst_row.flatten()[kept], stable=True)]
    kept = kept[torch.argsort(kept // max(plan.num_topk, 1), stable=True)]
    kept = kept[torch.argsort(plan.dst_rank.flatten()[kept], stable=True)]
    return kept, kept // max(plan.num_topk, 1)


def _ragged(owner: Tensor, values: Tensor, num_owners: int) -> Tensor:
    """Turn (owner, value) pairs, owners ascending, into a padded matrix.

    Example: owner [0, 0, 2], values [5, 9, 3], 3 owners -> [[5, 9], [-1, -1], [3, -1]].
    """
    sizes = torch.bincount(owner, minlength=num_owners)
    width = int(sizes.max()) if len(owner) else 0
    position = torch.arange(len(owner), device=owner.device) - (sizes.cumsum(0) - sizes)[owner]
    matrix = owner.new_full((num_owners, width), -1)
    matrix[owner, position] = values
    return matrix


def _pairs_of_token(keys: Tensor, num_tokens: int, stride: int, size: int) -> Tensor:
    """Invert the list of (rank, token) pairs: [T, P] positions, -1 where there is no pair."""
    matrix = keys.new_full((num_tokens, size), -1)
    matrix[keys % stride, keys // stride] = torch.arange(len(keys), device=keys.device)
    return matrix


def _routes_of(plan: Plan) -> Routes:
    """The reference tier's part of a plan that it made."""
    assert isinstance(plan.transport, Routes)
    return plan.transport


def _raise_refusals(headers: Tensor) -> None:
    """Raise if any rank sent a reason instead of counts."""
    for rank, header in enumerate(headers.cpu()):
        reason = bytes(header.view(torch.uint8).tolist()).decode(errors="replace").strip()
        if reason:
            raise AgreementError(f"rank {rank} refused its routing, so no rank may go on: {reason}")


def _raise_unequal(name: str, values: Tensor) -> None:
    """Raise if a value differs between ranks."""
    listed: Sequence[int] = values.tolist()
    for rank, value in enumerate(listed):
        if value != listed[0]:
            raise AgreementError(
                f"{name} is {value} on rank {rank} and {listed[0]} on rank 0; pass the same "
                f"{name} on all ranks"
            )
