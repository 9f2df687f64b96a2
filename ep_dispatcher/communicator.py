"""Opens an NCCL communicator of our own over the ranks of a group, and agrees on failures."""

from __future__ import annotations

from typing import Any

import torch

from ep_dispatcher import native
from ep_dispatcher.agreement import gather_json
from ep_dispatcher.collectives import Collectives
from ep_dispatcher.config import Topology
from ep_dispatcher.errors import UnavailableError

_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES


class Reasons:
    """Collects why a step failed here, then lets all ranks raise the same error.

    Args:
        collectives: over all ranks.
    """

    def __init__(self, collectives: Collectives) -> None:
        """Nothing has failed yet."""
        self._collectives = collectives
        self._reason: str | None = None

    def __enter__(self) -> None:
        """Begin a step that can fail on one rank alone."""
        self._reason = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Keep the reason of a failure for `agree`."""
        if isinstance(error, (ValueError, RuntimeError)):
            self._reason = str(error)
            return True
        return False

    def agree(self) -> None:
        """Raise on all ranks if the step failed on any.

        Raises:
            UnavailableError: names the first such rank and its reason.
        """
        for rank, reason in enumerate(gather_json(self._collectives, self._reason)):
            if reason is not None:
                raise UnavailableError(f"on rank {rank}: {reason}")


def open_communicator(collectives: Collectives) -> Any:  # noqa: ANN401  # of the native module
    """Open a communicator over all ranks on each rank's current GPU; collective.

    Raises:
        UnavailableError: on every rank alike, if any rank has no NCCL that will do, or NCCL fails.
    """
    reasons = Reasons(collectives)
    library, ids = None, b""
    with reasons:
        library = native.open_nccl()
        if collectives.rank == 0:
            ids = native.load().make_communicator_id(library)
    reasons.agree()
    told = torch.tensor(list(ids.ljust(_ID_BYTES, b"\0")), dtype=torch.uint8)
    unique_id = bytes(collectives.all_gather(told)[0].tolist())
    communicator = None
    with reasons:
        communicator = native.load().Communicator(
            library, unique_id, collectives.rank, collectives.size
        )
        if not communicator.properties().device_api and communicator.properties().num_domains == 1:
            raise UnavailableError(
                "NCCL offers no device API here (NCCL_CUMEM_ENABLE must not be 0)"
            )
    reasons.agree()
    return communicator


def topology_from(num_domains: int, ep_size: int, wanted_domain_size: int | None) -> Topology:
    """Domains as NCCL sees them (its LSA teams: consecutive ranks, all of one size).

    NCCL splits a domain on request of its own variable NCCL_LSA_TEAM_SIZE, which it reads once a
    process; so a `virtual_domain_size` is checked against what NCCL did, not set.

    Args:
        num_domains: LSA teams of the communicator.
        ep_size: P.
        wanted_domain_size: `virtual_domain_size` of the config; None to take what NCCL says.

    Raises:
        UnavailableError: the two differ; says what to export.
    """
    if ep_size % num_domains:
        raise UnavailableError(
            f"NCCL sees {num_domains} NVLink domains in {ep_size} ranks, which are not of one "
            "size; use equally many ranks in each"
        )
    domain_size = ep_size // num_domains
    if wanted_domain_size not in (None, domain_size):
        raise UnavailableError(
            f"virtual_domain_size is {wanted_domain_size}, but NCCL's domains have {domain_size} "
            f"ranks; export NCCL_LSA_TEAM_SIZE={wanted_domain_size} before the ranks start (it "
            "must divide the ranks of each host)"
        )
    return Topology(ep_size=ep_size, domain_size=domain_size)
