"""ep_dispatcher: a Megatron-Core MoE token dispatcher with its own CUDA kernels.

Importing it needs neither CUDA nor Megatron.
"""

from ep_dispatcher._version import __version__
from ep_dispatcher.config import EpConfig, MoeShape, Topology, Tuning
from ep_dispatcher.errors import (
    AgreementError,
    CapacityError,
    ClosedError,
    ConfigError,
    EpError,
    EpTimeoutError,
    RoutingError,
    ShapeError,
    UnavailableError,
)
from ep_dispatcher.group import EPGroup
from ep_dispatcher.plan import Placement, Plan

__all__ = [
    "AgreementError",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "EPGroup",
    "EpConfig",
    "EpError",
    "EpTimeoutError",
    "MoeShape",
    "Placement",
    "Plan",
    "RoutingError",
    "ShapeError",
    "Topology",
    "Tuning",
    "UnavailableError",
    "__version__",
]
