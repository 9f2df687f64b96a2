"""Opening a group: a rank with no config, and `auto` where the device tier cannot be had."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ep_dispatcher import (
    AgreementError,
    ConfigError,
    EpConfig,
    EPGroup,
    MoeShape,
    UnavailableError,
    device,
    rail_device,
)
from ep_dispatcher.config import Tier
from ep_dispatcher.testing import run_ranks

SHAPE = MoeShape(hidden=16, num_topk=2, num_experts=8, dtype="float32")
CONFIG = EpConfig(shape=SHAPE, max_tokens_per_rank=8)


def test_what_is_no_config_on_one_rank_is_refused_on_all() -> None:
    """Nobody waits for the rank at fault, and the process group goes on."""

    def call(process_group: dist.ProcessGroup) -> str:
        if process_group.rank() == 1:
            with pytest.raises(ConfigError, match=r"config is \{'shape.*it must be an EpConfig"):
                EPGroup.create(process_group, CONFIG.to_dict())  # type: ignore[arg-type]
        else:
            with pytest.raises(AgreementError, match="rank 1 passed a dict for config; it must be"):
                EPGroup.create(process_group, CONFIG)
        with EPGroup.create(process_group, CONFIG) as group:
            return group.tier

    assert len(run_ranks(3, call)) == 3


REFUSAL = "on rank 1 NCCL 2.28.9 is older than 2.30.7"


@pytest.mark.parametrize(
    ("tier", "gpus", "opening", "warned"),
    [
        ("auto", True, False, True),
        ("auto", True, True, True),
        ("auto", False, False, False),
        ("reference", True, False, False),
    ],
)
def test_auto_that_leaves_gpus_to_the_reference_tier_is_warned_of_once(
    tier: Tier,
    gpus: bool,
    opening: bool,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Refused before or while the device tier opens; the reason and the way out are in it."""

    def refuse(*_: object) -> None:
        raise UnavailableError(REFUSAL)

    why = None if opening else REFUSAL.removeprefix("on rank 1 ")
    seen = iter([None, why] if gpus else [why, why])
    lock = threading.Lock()

    def reason(_: EpConfig) -> str | None:
        with lock:
            return next(seen)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(device, "unavailable_reason", reason)
    monkeypatch.setattr(rail_device, "open_backend", refuse)

    def tier_of(process_group: dist.ProcessGroup) -> str:
        with EPGroup.create(process_group, replace(CONFIG, tier=tier)) as group:
            return group.tier

    with caplog.at_level("WARNING", logger="ep_dispatcher"):
        tiers = run_ranks(2, tier_of)
    assert tiers == ["reference", "reference"]
    assert len(caplog.messages) == warned
    if warned:
        assert "NCCL 2.28.9 is older than 2.30.7. Mend that, or set tier to" in caplog.text
