"""Configs refuse what cannot work, naming value and range, and survive a round trip."""

from __future__ import annotations

from typing import Any

import pytest

from ep_dispatcher import ConfigError, EpConfig, EpError, MoeShape, Topology, Tuning

SHAPE: dict[str, Any] = {"hidden": 64, "num_topk": 2, "num_experts": 8}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden": 0}, "hidden is 0; it must be an int >= 1"),
        ({"hidden": 7}, "14 bytes in bfloat16.*hidden a multiple of 8"),
        ({"hidden": 2, "dtype": "float32"}, "hidden a multiple of 4"),
        ({"hidden": 64.0}, "hidden is 64.0"),
        ({"num_topk": 0}, "num_topk is 0"),
        ({"num_topk": True}, "num_topk is True"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of"),
        ({"dtype": ["float32"]}, r"dtype is \['float32'\]; it must be one of"),
    ],
)
def test_shape_is_checked(changes: dict[str, Any], says: str) -> None:
    """Each field of MoeShape."""
    with pytest.raises(ConfigError, match=says):
        MoeShape(**(SHAPE | changes))


@pytest.mark.parametrize("hidden", [72, 1024, 2048, 2880, 4096, 5120, 6144, 7168, 7176])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_common_widths_are_allowed(hidden: int, dtype: str) -> None:
    """Any row of a multiple of 16 bytes."""
    assert MoeShape(hidden=hidden, num_topk=8, num_experts=64, dtype=dtype).row_bytes % 16 == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_tokens_per_rank": -1}, r"max_tokens_per_rank is -1; it must be an int in \[0"),
        ({"max_tokens_per_rank": 1 << 21}, "max_tokens_per_rank is 2097152"),
        ({"alignment": 0}, "alignment is 0"),
        ({"alignment": 1.5}, "alignment is 1.5; it must be a power of two"),
        ({"alignment": 8192}, r"alignment is 8192; it must be a power of two in \[1, 4096\]"),
        ({"alignment": 3}, "alignment is 3; it must be a power of two"),
        ({"recv_capacity_rows": -5}, "recv_capacity_rows is -5"),
        ({"output_bytes": 1 << 20}, "output_bytes is 1048576"),
        ({"output_bytes": 1 << 63}, "output_bytes is 9223372036854775808"),
        ({"virtual_domain_size": 0}, "virtual_domain_size is 0"),
        ({"precision": "fp32"}, "precision is 'fp32'; it must be 'rounded' or 'exact'"),
        ({"tier": "gpu"}, "tier is 'gpu'; it must be 'auto', 'reference' or 'device'"),
        ({"expert_rank": (0, 1)}, "expert_rank has 2 entries; it needs one for each of the 8"),
        ({"expert_rank": [0] * 8}, "expert_rank is .*; it must be a tuple"),
        ({"expert_rank": (0, "1") * 4}, r"expert_rank\[1\] is '1'; it must be an int >= 0"),
        ({"check_values": "no"}, "check_values is 'no'; it must be True or False"),
        ({"shape": SHAPE}, "shape is .*; it must be MoeShape"),
        ({"tuning": None}, "tuning is None; it must be Tuning"),
    ],
)
def test_config_is_checked(changes: dict[str, Any], says: str) -> None:
    """Each field of EpConfig."""
    values: dict[str, Any] = {"shape": MoeShape(**SHAPE), "max_tokens_per_rank": 16} | changes
    with pytest.raises(ConfigError, match=says):
        EpConfig(**values)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_sms": 0}, "num_sms is 0; it must be an int in"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"timeout_s": 0}, "timeout_s is 0; it must be in"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"timeout_s": 1e-12}, r"timeout_s is 1e-12; it must be in \[0\.001, 3600\] seconds, and"),
        ({"timeout_s": float("nan")}, "timeout_s is nan; it must be in"),
        ({"timeout_s": "30"}, "timeout_s is '30'; it must be in"),
        ({"timeout_s": True}, "timeout_s is True"),
        ({"duplicates": "both"}, "duplicates is 'both'; it must be 'auto', 'sender' or"),
    ],
)
def test_tuning_is_checked(changes: dict[str, Any], says: str) -> None:
    """Each field of Tuning."""
    with pytest.raises(ConfigError, match=says):
        Tuning(**changes)


def test_mistakes_are_value_errors() -> None:
    """So that callers may catch the standard class."""
    assert issubclass(ConfigError, EpError)
    assert issubclass(EpError, ValueError)


def test_dict_round_trip_and_unknown_keys() -> None:
    """A YAML section becomes a config and back; unknown and missing keys are named."""
    section = {"shape": SHAPE, "max_tokens_per_rank": 16, "tuning": {"num_sms": 4}}
    config = EpConfig.from_dict(section)
    assert config.tuning.num_sms == 4
    assert EpConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match=r"unknown key 'num_sm' in section 'tuning'.*num_sms"):
        EpConfig.from_dict(section | {"tuning": {"num_sm": 4}})
    with pytest.raises(ConfigError, match="key 'max_tokens_per_rank' is missing"):
        EpConfig.from_dict({"shape": SHAPE})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shape": 3}, "section 'shape' is 3; it must be a mapping"),
        ({"tuning": None}, "section 'tuning' is None; it must be a mapping"),
        ({"expert_rank": "01234567"}, "expert_rank is '01234567'; it must be a tuple"),
        ({1: 2}, "unknown key 1 in section 'ep_dispatcher'"),
    ],
)
def test_sections_of_another_kind_are_refused(changes: dict[Any, Any], says: str) -> None:
    """What YAML gives where a mapping or a list was left out."""
    with pytest.raises(ConfigError, match=says):
        EpConfig.from_dict({"shape": SHAPE, "max_tokens_per_rank": 16} | changes)


def test_topology_arithmetic() -> None:
    """Rank 5 of 2 domains of 4: domain 1, lsa_rank 1, rail peer 1 in domain 0."""
    topology = Topology(ep_size=8, domain_size=4)
    assert topology.num_domains == 2
    assert (topology.domain_of(5), topology.lsa_rank(5)) == (1, 1)
    assert topology.rail_peer(5, 0) == 1
    with pytest.raises(ConfigError, match="domain_size is 3; it must divide ep_size 8"):
        Topology(ep_size=8, domain_size=3)
