"""The device tier: our kernels, where every rank has what they need."""

from __future__ import annotations

import torch

from ep_dispatcher.config import EpConfig


def unavailable_reason(config: EpConfig) -> str | None:
    """Say in one sentence why this rank cannot run the device tier; None where it can."""
    if config.shape.dtype == "float64":
        return "float64 rows run in the reference tier only"
    if not torch.cuda.is_available():
        return "no GPU is visible to torch"
    return "this version has no device kernels"
