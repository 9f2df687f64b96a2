"""The groups of a plug-in: one per process group and shape, shared by all layers that want it."""

from __future__ import annotations

import atexit
import logging
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ep_dispatcher import EPGroup, MoeShape
from ep_dispatcher.config import MAX_TOKENS_PER_RANK
from ep_dispatcher.errors import ClosedError, EpError
from ep_dispatcher.megatron.options import POLICY_BACKEND, POLICY_TYPE, MegatronOptions
from ep_dispatcher.megatron.outputs import output_bytes

logger = logging.getLogger("ep_dispatcher.megatron")


@dataclass
class _Lease:
    """A group and the number of dispatchers that use it."""

    group: EPGroup
    num_users: int


class GroupPool:
    """Opens groups when they are first needed and closes them with their last user, or at exit.

    Args:
        options: of the section; the same for all groups of the pool.
    """

    def __init__(self, options: MegatronOptions) -> None:
        """Hold nothing yet; groups are opened by `lease`."""
        self._options = options
        self._leases: dict[tuple[dist.ProcessGroup, MoeShape], _Lease] = {}
        self._closed = False
        self._told = False

    def lease(
        self,
        process_group: dist.ProcessGroup,
        shape: MoeShape,
        num_tokens: int,
        device: torch.device,
        model_config: Any = None,  # noqa: ANN401
    ) -> EPGroup:
        """Return the group of a shape, opening it at first; collective where it opens.

        Args:
            process_group: ranks of the expert and expert-tensor parallel group.
            shape: of the layer; the part of the key beside the process group.
            num_tokens: T of the call at hand, from which buffers are sized if nobody said more.
            device: where the rows lie.
            model_config: Megatron's, which tells how many outputs are alive at a time; None for
                the group's own default.

        Raises:
            ClosedError: the pool was closed.
        """
        if self._closed:
            raise ClosedError("the ep_dispatcher plug-in was closed; make a new one")
        key = (process_group, shape)
        if key not in self._leases:
            bound = self._token_bound(process_group, num_tokens, device)
            if not self._leases:
                atexit.register(self._close_at_exit)
            wanted = None
            if model_config is not None and device.type != "cpu":
                wanted = output_bytes(model_config, shape, bound)
            config = self._options.ep_config(shape, bound, wanted)
            group = EPGroup.create(process_group, config)
            self._leases[key] = _Lease(group, 0)
            self._tell(group, shape)
        lease = self._leases[key]
        lease.num_users += 1
        return lease.group

    def release(self, process_group: dist.ProcessGroup, shape: MoeShape) -> None:
        """Give one lease back; the group closes with the last one. After `close`: nothing."""
        lease = self._leases.get((process_group, shape))
        if lease is None:
            return
        lease.num_users -= 1
        if lease.num_users == 0:
            del self._leases[(process_group, shape)]
            lease.group.close()

    def close(self, *, failed: bool = False) -> None:
        """Close all groups, whoever uses them; a second call does nothing.

        Args:
            failed: this rank leaves because of an error, so it must not wait for the others.

        Raises:
            EpError, EpTimeoutError: the first that a group met, once all are closed, as other ranks
                wait for each; of a rank that `failed` it is logged, as its own error says more.
        """
        self._closed = True
        atexit.unregister(self._close_at_exit)
        leases, self._leases = self._leases, {}
        met: list[EpError | RuntimeError] = []
        for lease in leases.values():
            try:
                lease.group.close(failed=failed)
            except (EpError, RuntimeError) as error:
                met.append(error)
        if met and not failed:
            raise met[0]
        for behind in met:
            logger.warning("after an error, the close of a group failed too: %s", behind)

    def _close_at_exit(self) -> None:
        """Close; the interpreter keeps `last_value` of the error that ended this process."""
        self.close(failed=getattr(sys, "last_value", None) is not None)

    @property
    def num_groups(self) -> int:
        """Groups that are open."""
        return len(self._leases)

    def _token_bound(
        self, process_group: dist.ProcessGroup, num_tokens: int, device: torch.device
    ) -> int:
        """Bound on T: what the section says, or the largest T of this call over the ranks.

        On the CPU nothing is sized by the bound, so it is the largest that there is.
        """
        if self._options.max_tokens_per_rank is not None:
            return self._options.max_tokens_per_rank
        if device.type == "cpu":
            return MAX_TOKENS_PER_RANK
        largest = torch.tensor([num_tokens], device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=process_group)
        return int(largest)

    def _tell(self, group: EPGroup, shape: MoeShape) -> None:
        """Name the effective dispatcher, once, on rank 0, whatever the logging level is."""
        rank = dist.get_rank() if dist.is_initialized() else group.ep_rank
        if self._told or rank != 0:
            return
        self._told = True
        line = (
            f"MoE token dispatcher: ep_dispatcher, tier {group.tier}, group of {group.ep_size} "
            f"ranks, {shape.num_experts} experts, {shape.num_topk} slots, hidden {shape.hidden} "
            f"{shape.dtype} (Megatron's config says {POLICY_TYPE} + {POLICY_BACKEND}: only its "
            "policies are used)"
        )
        if logger.isEnabledFor(logging.INFO):
            logger.info(line)
        else:
            sys.stderr.write(line + "\n")
