"""Whom an error of several domains may name, of whichever rank made the others wait."""

from __future__ import annotations


def names_cause(waited: tuple[int, int], culprits: set[int], domain_size: int) -> bool:
    """Whether a fault is of or names a culprit, or a rank that its own domain misses for one.

    The deadlines of a domain's ranks end at about the same time: where a culprit's rail ends in a
    domain, its other ranks may be the first to file that they wait for that rank.

    Args:
        waited: the rank that waited, and for whom.
        culprits: ranks that are late, or whose network fails.
        domain_size: ranks of a domain.
    """
    rank, peer = waited
    if {rank, peer} & culprits:
        return True
    on_the_rail = {culprit % domain_size for culprit in culprits}
    same_domain = rank // domain_size == peer // domain_size
    return rank != peer and same_domain and peer % domain_size in on_the_rail
