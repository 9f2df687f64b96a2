"""The dispatcher inside Megatron's layers: one test for each check of `megatron_checks.py`."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from megatron_world import run_checks

CHECKS = (
    "dropless_tp1_ep4_etp1",
    "dropless_tp4_ep1_etp1",
    "dropless_tp2_ep2_etp1",
    "dropless_tp2_ep2_etp2",
    "dropless_tp1_ep2_etp2",
    "dropless_tp1_ep1_etp4",
    "dropless_tp1_ep1_etp1",
    "capacity",
    "drop_and_pad",
    "rows_beyond_topk",
    "fp8_padding",
    "fp4_padding",
    "uneven_tokens",
    "fewer_experts",
    "latent_width",
    "router_dtype",
    "arguments_carry_gradients",
    "freed_inputs",
    "other_identity_fails",
    "graphed_attributes",
    "recompute_releases",
    "shared_groups",
    "two_models",
    "names_itself_once",
    "no_backend_is_imported",
    "spec_by_name",
    "chunks_give_the_same_bits",
    "chunks_with_shared_experts",
    "shared_experts_are_named_in_profiles",
    "chunks_of_few_tokens",
    "chunks_release_routing",
    "chunks_delay_weight_gradients",
    "delayed_gradients_of_chunks_add_up",
    "delayed_gradients_taken_once_are_refused",
)


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """What each check said, run once by 4 ranks; "" where it passed."""
    return run_checks(CHECKS)


@pytest.mark.timeout(600)  # the first waits for all; other work may go on beside
@pytest.mark.parametrize("check", CHECKS)
def test_check(check: str, errors: dict[str, str]) -> None:
    """The check passed on all ranks."""
    assert not errors[check], errors[check]
