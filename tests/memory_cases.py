"""The layer whose memory is counted."""

from __future__ import annotations

from ep_dispatcher.config import EpConfig, MoeShape, Precision, Tuning


def make_config(
    *,
    hidden: int = 7168,
    num_topk: int = 8,
    num_experts: int = 256,
    max_tokens: int = 4096,
    num_sms: int = 16,
    precision: Precision = "rounded",
) -> EpConfig:
    """The usual layer, with changes."""
    return EpConfig(
        shape=MoeShape(hidden=hidden, num_topk=num_topk, num_experts=num_experts),
        max_tokens_per_rank=max_tokens,
        precision=precision,
        tuning=Tuning(num_sms=num_sms),
    )
