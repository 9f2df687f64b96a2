"""The `ep_dispatcher:` section, what it asks of Megatron's config, and what it refuses."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from ep_dispatcher.errors import ConfigError
from ep_dispatcher.megatron import compat
from ep_dispatcher.megatron.options import MegatronOptions, apply_policy


def config_with(**fields: Any) -> SimpleNamespace:  # noqa: ANN401
    """A stand-in for TransformerConfig with what every version has."""
    plain = {"moe_token_dispatcher_type": "alltoall", "moe_flex_dispatcher_backend": "deepep"}
    return SimpleNamespace(**(plain | fields))


def test_section_becomes_the_config_of_a_group() -> None:
    from ep_dispatcher import MoeShape

    section = {"num_sms": 24, "tier": "reference", "precision": "exact", "timeout_s": 5.0}
    options = MegatronOptions.from_section(section)
    shape = MoeShape(hidden=64, num_topk=2, num_experts=8)
    config = options.ep_config(shape, 4096)
    assert (config.tuning.num_sms, config.tuning.timeout_s) == (24, 5.0)
    assert (config.tier, config.precision, config.max_tokens_per_rank) == (
        "reference",
        "exact",
        4096,
    )
    assert MegatronOptions.from_section(None) == MegatronOptions()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"num_smss": 3}, r"unknown key 'num_smss' .* known keys: .*'num_sms'"),
        ({"num_sms": 0}, r"num_sms is 0; it must be an int in \[1, 128\]"),
        ({"tier": "gpu"}, r"tier is 'gpu'; it must be"),
        ({"alignment": 3}, r"alignment is 3; it must be a power of two"),
        ({"precision": "high"}, r"precision is 'high'; it must be"),
        ({"max_tokens_per_rank": -1}, r"max_tokens_per_rank is -1; it must be"),
        ({"timeout_s": 0}, r"timeout_s is 0; it must be in \[0\.001, 3600\]"),
        ({"overlap": {"chunks": 0}}, r"overlap.chunks is 0; it must be 'auto' or a whole number"),
        ({"overlap": {"chunks": "many"}}, r"overlap.chunks is 'many'; it must be 'auto' or"),
        ({"overlap": {"chunks": True}}, r"overlap.chunks is True; it must be 'auto' or"),
        ({"overlap": {"chunk": 2}}, r"unknown key 'chunk' in section 'ep_dispatcher.overlap'"),
        ({"overlap": 2}, r"'overlap' in section 'ep_dispatcher' is 2; it must be a mapping"),
        ({"debug_ledger": 1}, r"debug_ledger is 1; it must be True or False"),
        ({"output_bytes": 5}, r"output_bytes is 5; it must be an int"),
    ],
)
def test_a_bad_section_is_refused_at_once(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MegatronOptions.from_section(section)


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_policy_identity_is_set(kind: str) -> None:
    config = config_with(moe_token_dispatcher_type=kind)
    for _ in range(2):  # a second call finds its own identity and accepts it
        apply_policy(config, MegatronOptions())
        assert config.moe_token_dispatcher_type == "flex"
        assert config.moe_flex_dispatcher_backend == "hybridep"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_token_dispatcher_type": "flex"}, "moe_flex_dispatcher_backend 'deepep'"),
        (
            {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep"},
            "moe_flex_dispatcher_backend 'ncclep'",
        ),
        ({"moe_enable_deepep": True}, "moe_enable_deepep is True"),
        ({"batch_invariant_mode": True}, "batch_invariant_mode is True"),
        ({"moe_permute_fusion_into_hybridep": True}, "moe_permute_fusion_into_hybridep is True"),
        ({"moe_ncclep_zero_copy": True}, "moe_ncclep_zero_copy is True"),
        ({"moe_ncclep_static_shape": True}, "moe_ncclep_static_shape is True"),
        ({"moe_dispatch_fwd_dtype": "mxfp8"}, "moe_dispatch_fwd_dtype is 'mxfp8'"),
        ({"moe_flex_dispatcher_num_sms": 20}, "moe_flex_dispatcher_num_sms is 20 but num_sms"),
        ({"moe_expert_rank_capacity_factor": 1.5}, "moe_expert_rank_capacity_factor is 1.5"),
        ({"moe_paged_stash": True}, "moe_paged_stash is True"),
        ({"transformer_impl": "inference_optimized"}, "transformer_impl is 'inference_optimized'"),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "moe"]},
            r"CUDA graphs capture \['attn', 'moe'\]",
        ),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}, "whole layers"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, "CUDA graphs capture"),
    ],
)
def test_a_contradiction_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    config = config_with(**fields)
    before = vars(config).copy()
    with pytest.raises(ConfigError, match=message):
        apply_policy(config, MegatronOptions())
    assert vars(config) == before


def test_graphs_up_to_preprocess_are_accepted() -> None:
    scopes = [SimpleNamespace(name="moe_router"), SimpleNamespace(name="moe_preprocess")]
    config = config_with(cuda_graph_impl="transformer_engine", cuda_graph_modules=scopes)
    apply_policy(config, MegatronOptions())
    assert config.moe_token_dispatcher_type == "flex"


@pytest.mark.parametrize("version", ["0.16.1", "0.17.0", "0.18.0rc1", "0.19.2", "0.19.2+abc"])
def test_no_warning_inside_the_tested_range(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.warn_if_untested(version)


@pytest.mark.parametrize("version", ["0.15.9", "0.16.0", "0.20.0", "1.0"])
def test_a_version_outside_is_warned_about_with_the_range(version: str) -> None:
    with pytest.warns(UserWarning, match=r"0\.16\.1 to 0\.19\.x"):
        compat.warn_if_untested(version)


def test_quantization_alignment_is_one_without_quantised_experts() -> None:
    assert compat.quantization_alignment(SimpleNamespace(fp8=None, fp4=None)) == 1


@pytest.mark.parametrize("name", ["overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap"])
def test_chunks_beside_another_overlap_are_refused(name: str) -> None:
    """Each alone is fine."""
    chunked = MegatronOptions.from_section({"overlap": {"chunks": "auto"}})
    apply_policy(config_with(**{name: True}), MegatronOptions())
    apply_policy(config_with(), chunked)
    with pytest.raises(ConfigError, match=f"overlap.chunks is auto and {name} is True"):
        apply_policy(config_with(**{name: True}), chunked)
