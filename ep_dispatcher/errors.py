"""Errors that users see: mistakes are `ValueError`s raised before any launch; faults name the peer.

Every message states the value that was found and the range that is allowed, and where it helps,
what to do next.
"""


class EpError(ValueError):
    """A user's mistake, found before anything is launched."""


class ConfigError(EpError):
    """A configuration that cannot work."""


class RoutingError(EpError):
    """A routing (`topk_idx`, `topk_weights`) that cannot be planned."""


class ShapeError(EpError):
    """A tensor with the wrong shape, dtype, device or layout."""


class AgreementError(EpError):
    """Ranks of one group disagree on something that must be equal; the message names the rank."""


class CapacityError(EpError):
    """A buffer is too small; the message names the size that would do."""


class UnavailableError(EpError):
    """This machine lacks what was asked for; the message says what is missing and how to get it."""


class ClosedError(EpError):
    """The group was closed and cannot be used any more, nor for a backward of its calls."""

    def __init__(
        self,
        message: str = "this group was closed; make a new one with EPGroup.create (and run the "
        "backward of a group's calls before closing it)",
    ) -> None:
        """Say what to do instead; by default of an EPGroup."""
        super().__init__(message)


class EpTimeoutError(RuntimeError):
    """A bounded wait expired.

    Attributes:
        rank: the rank that waited.
        peer: the rank it waited for.
        phase: what it waited for, for example ``"dispatch: rows"``.
        behind: ranks of other domains for whom `peer` may have waited itself, when a rank of its
            own domain waited for it: deadlines of both waits end at about the same time, and only
            the first to end is told.
    """

    def __init__(
        self, message: str, *, rank: int, peer: int, phase: str, behind: tuple[int, ...] = ()
    ) -> None:
        """Keep who waited for whom, so that a launcher can act on it."""
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.phase = phase
        self.behind = behind
