"""The Megatron-Core adapter: the only place that imports megatron.

Importing this package imports nothing of megatron, so that `cpu_standins.install()` can run first.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "EpDispatcher": "dispatcher",
    "EpMoELayer": "layer",
    "MegatronOptions": "options",
    "swap_dispatchers": "plugin",
    "with_ep_dispatcher": "plugin",
}

__all__ = [
    "EpDispatcher",
    "EpMoELayer",
    "MegatronOptions",
    "swap_dispatchers",
    "with_ep_dispatcher",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import the module that defines `name` when it is first asked for."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
