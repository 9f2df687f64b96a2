"""The two collectives that the reference tier and group creation need, on a process-group object.

Calls go to the object itself: groups of thread ranks are not registered with torch.distributed.
Bytes travel, not elements, so every dtype works on every communication library.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Collectives:
    """All-gather and all-to-all of rows over one process group.

    Attributes:
        rank: this rank.
        size: P.
        store: of the process group; None for a bare one.

    Args:
        process_group: any torch.distributed group; gloo serves CPU tensors (others are copied
            there and back), NCCL serves CUDA tensors.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """Remember the group and where its tensors must lie."""
        self._group = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self.store = _store_of(process_group)
        name = _backend_name(process_group)
        self._device = torch.device("cuda" if name == "nccl" else "cpu")

    def all_gather(self, values: Tensor) -> Tensor:
        """Stack every rank's `values` (equal shape and dtype on all ranks) along a new axis 0."""
        sent = values.detach().to(self._device).contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        self._group.allgather([parts], [sent]).wait()
        return torch.stack(parts).to(values.device)

    def all_to_all(self, rows: Tensor, send: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `send[p]` consecutive rows to rank p and get `received[p]` rows from it.

        Args:
            rows: [sum(send), ...]; what follows the first axis is equal on all ranks.
            send: rows for each rank.
            received: rows from each rank.

        Returns:
            [sum(received), ...] in order of the source rank.
        """
        row_bytes = _row_bytes(rows)
        sent = rows.detach().to(self._device).contiguous().view(-1).view(torch.uint8)
        got = torch.empty(sum(received) * row_bytes, dtype=torch.uint8, device=self._device)
        splits_in = [n * row_bytes for n in received]
        splits_out = [n * row_bytes for n in send]
        self._group.alltoall_base(got, sent, splits_in, splits_out).wait()
        return got.view(rows.dtype).view(-1, *rows.shape[1:]).to(rows.device)


def _backend_name(process_group: dist.ProcessGroup) -> str:
    """Name of the library under a group, for registered groups and bare ones."""
    try:
        return str(dist.get_backend(process_group))
    except (ValueError, AssertionError, RuntimeError):
        return str(process_group.name())


def _store_of(process_group: dist.ProcessGroup) -> dist.Store | None:
    """Where ranks may leave words for each other; None for a bare group."""
    try:
        return process_group.get_group_store()
    except (AttributeError, RuntimeError):
        return None


def _row_bytes(rows: Tensor) -> int:
    """Bytes of one row, also where there are no rows."""
    elements = 1
    for size in rows.shape[1:]:
        elements *= size
    return elements * rows.element_size()
