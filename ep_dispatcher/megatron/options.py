"""The `ep_dispatcher:` section of a training config, and what it asks of Megatron's config.

Megatron asks for two strings in about ten places (who pads for FP8, which inputs the 1F1B schedule
frees, which attributes it sets on the manager). A dispatcher whose rows are already permuted when
they arrive must answer "flex" and "hybridep" there: the policy identity. The objects are ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from ep_dispatcher.config import Combine, Duplicates, EpConfig, MoeShape, Precision, Tier, Tuning
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.megatron import compat

POLICY_TYPE = "flex"
POLICY_BACKEND = "hybridep"
MAX_CHUNKS = 16  # a chunk of fewer rows would spend its time in launches
_TUNING = ("num_sms", "chunk_tokens", "timeout_s", "duplicates", "combine")
_SMALLEST = MoeShape(hidden=8, num_topk=1, num_experts=1)  # any shape: to check the other fields


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """How an MoE layer hides its communication behind its own experts.

    Attributes:
        chunks: runs of tokens that the layer is cut into; 1 for no overlap, "auto" for as many as
            leave every expert enough rows (`overlap_schedule.auto_chunks`).

    Raises:
        ConfigError: a value out of its range.
    """

    chunks: int | Literal["auto"] = 1

    def __post_init__(self) -> None:
        """Check the field."""
        is_int = isinstance(self.chunks, int) and not isinstance(self.chunks, bool)
        if self.chunks != "auto" and not (is_int and 1 <= self.chunks <= MAX_CHUNKS):
            raise ConfigError(
                f"overlap.chunks is {self.chunks!r}; it must be 'auto' or a whole number in "
                f"[1, {MAX_CHUNKS}]"
            )


@dataclass(frozen=True, kw_only=True)
class MegatronOptions:
    """What a user may set in the section; everything else follows from Megatron's config.

    Attributes:
        tier: "auto", "reference" or "device".
        precision: "rounded" or "exact" partial sums.
        alignment: rows; each expert's segment is a multiple of it, and of what FP8 or FP4 needs.
        max_tokens_per_rank: largest T of any call, which sizes buffers; None takes the largest of
            the first batch over the ranks (on the CPU there are no buffers and no bound).
        output_bytes: device tier: memory that received rows are cut from; None counts what the
            model's layers keep alive (`outputs.output_bytes`).
        virtual_domain_size: split an NVLink domain into smaller ones, for ablations.
        check_values: debug mode; refuses NaN weights and rows with more experts than slots.
        num_sms: SM budget of the communication kernels.
        chunk_tokens: tokens that travel under one flag; no tier reads it now, see `Tuning`.
        timeout_s: device tier: deadline of every wait.
        duplicates: device tier: who makes a token's further copies; see `Tuning`.
        combine: device tier: how rows come home; see `Tuning`.
        overlap: of communication with the experts of the same layer.
        debug_ledger: debug mode; compares the order of all calls between the ranks.

    Raises:
        ConfigError: a value out of its range.
    """

    tier: Tier = "auto"
    precision: Precision = "rounded"
    alignment: int = 1
    max_tokens_per_rank: int | None = None
    output_bytes: int | None = None
    virtual_domain_size: int | None = None
    check_values: bool = False
    num_sms: int = Tuning.num_sms
    chunk_tokens: int = Tuning.chunk_tokens
    timeout_s: float = Tuning.timeout_s
    duplicates: Duplicates = Tuning.duplicates
    combine: Combine = Tuning.combine
    overlap: OverlapOptions = dataclasses.field(default_factory=OverlapOptions)
    debug_ledger: bool = False

    def __post_init__(self) -> None:
        """Check every field now rather than at the first batch."""
        self.ep_config(_SMALLEST, self.max_tokens_per_rank or 0)

    @classmethod
    def from_section(cls, section: Mapping[str, Any] | None) -> Self:
        """Build the options from the section's plain values; None or nothing gives defaults.

        Raises:
            ConfigError: an unknown key, or a value out of its range.
        """
        values = dict(section or {})
        _refuse_unknown(cls, values, "ep_dispatcher")
        overlap = values.get("overlap")
        if not isinstance(overlap, OverlapOptions):
            values["overlap"] = _overlap_from(overlap)
        return cls(**values)

    def ep_config(
        self, shape: MoeShape, max_tokens_per_rank: int, output_bytes: int | None = None
    ) -> EpConfig:
        """The config of a group for layers of this shape.

        Args:
            shape: of the layers.
            max_tokens_per_rank: bound on T.
            output_bytes: used where the section has none.
        """
        return EpConfig(
            shape=shape,
            max_tokens_per_rank=max_tokens_per_rank,
            alignment=self.alignment,
            output_bytes=self.output_bytes or output_bytes,
            virtual_domain_size=self.virtual_domain_size,
            precision=self.precision,
            tier=self.tier,
            check_values=self.check_values,
            debug_ledger=self.debug_ledger,
            tuning=Tuning(**{name: getattr(self, name) for name in _TUNING}),
        )


def _overlap_from(section: object) -> OverlapOptions:
    """Build from the nested mapping `overlap:`; None gives defaults."""
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(
            f"'overlap' in section 'ep_dispatcher' is {section!r}; it must be a mapping such as "
            "{chunks: auto}"
        )
    values = dict(section or {})
    _refuse_unknown(OverlapOptions, values, "ep_dispatcher.overlap")
    return OverlapOptions(**values)


def _refuse_unknown(kind: Any, values: Mapping[str, Any], section: str) -> None:  # noqa: ANN401
    """Raise ConfigError if a mapping has a key that is no field of `kind`."""
    known = sorted(field.name for field in dataclasses.fields(kind))
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown key {unknown[0]!r} in section {section!r}; known keys: {known}")


def apply_policy(config: Any, options: MegatronOptions) -> None:  # noqa: ANN401
    """Put the policy identity on a TransformerConfig, after refusing what contradicts it.

    Args:
        config: Megatron's; two fields are set. A second call changes nothing.
        options: of the section.

    Raises:
        ConfigError: a setting that another dispatcher needs, or that cannot work with this one;
            the message names the setting and what to do.
    """
    _refuse_other_dispatchers(config)
    _refuse_other_backends_knobs(config, options)
    _refuse_static_shapes(config)
    _refuse_chunks(config, options)
    config.moe_token_dispatcher_type = POLICY_TYPE
    config.moe_flex_dispatcher_backend = POLICY_BACKEND


def _refuse_other_dispatchers(config: Any) -> None:  # noqa: ANN401
    """Refuse a config that names one of Megatron's fused backends."""
    backend = getattr(config, "moe_flex_dispatcher_backend", POLICY_BACKEND)
    if config.moe_token_dispatcher_type == POLICY_TYPE and backend != POLICY_BACKEND:
        raise ConfigError(
            f"moe_token_dispatcher_type is 'flex' with moe_flex_dispatcher_backend {backend!r}, "
            "and the section 'ep_dispatcher' is there too; drop the section, or set the backend "
            "to 'hybridep' (the name under which ep_dispatcher runs), or the type to 'alltoall'"
        )
    if getattr(config, "moe_enable_deepep", False):
        raise ConfigError("moe_enable_deepep is True; unset it to use ep_dispatcher")
    if getattr(config, "batch_invariant_mode", False):
        raise ConfigError(
            "batch_invariant_mode is True, which Megatron allows with its alltoall dispatcher "
            "only; unset it (ep_dispatcher sums in a fixed order anyway)"
        )


def _refuse_other_backends_knobs(config: Any, options: MegatronOptions) -> None:  # noqa: ANN401
    """Refuse settings that only steer another backend, as they would silently do nothing."""
    for name in (
        "moe_permute_fusion_into_hybridep",
        "moe_ncclep_static_shape",
        "moe_ncclep_zero_copy",
        "moe_dispatch_fwd_dtype",
        "moe_combine_bwd_dtype",
    ):
        value = getattr(config, name, None)
        if value:
            raise ConfigError(
                f"{name} is {value!r}, which steers another dispatcher's kernels and would do "
                "nothing here; unset it (ep_dispatcher always delivers permuted rows)"
            )
    num_sms = getattr(config, "moe_flex_dispatcher_num_sms", None)
    if num_sms is not None and num_sms != options.num_sms:
        raise ConfigError(
            f"moe_flex_dispatcher_num_sms is {num_sms} but num_sms of the section "
            f"'ep_dispatcher' is {options.num_sms}; set only the latter"
        )


def _refuse_chunks(config: Any, options: MegatronOptions) -> None:  # noqa: ANN401
    """Refuse chunks where something else of Megatron hides the same communication."""
    if options.overlap.chunks == 1:
        return
    for name, instead in (
        ("overlap_moe_expert_parallel_comm", "hides the same communication behind another batch"),
        ("moe_shared_expert_overlap", "runs the shared experts, which the chunks do themselves"),
    ):
        if getattr(config, name, False):
            raise ConfigError(
                f"overlap.chunks is {options.overlap.chunks} and {name} is True, which {instead}; "
                "set one of the two"
            )


def _refuse_static_shapes(config: Any) -> None:  # noqa: ANN401
    """Refuse settings that need the number of received rows before the routing is known."""
    for name in ("moe_expert_rank_capacity_factor", "moe_paged_stash"):
        value = getattr(config, name, None)
        if value:
            raise ConfigError(
                f"{name} is {value!r}; ep_dispatcher allocates what each batch needs and has no "
                "fixed budget of rows yet, so unset it"
            )
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        raise ConfigError(
            "transformer_impl is 'inference_optimized', which brings its own dispatchers; "
            "ep_dispatcher is for training"
        )
    scopes = compat.cuda_graph_scopes(config)
    if scopes is not None and (not scopes or scopes & {"full", "full_iteration", "moe"}):
        raise ConfigError(
            f"CUDA graphs capture {sorted(scopes) or 'whole layers'}; ep_dispatcher waits for the "
            "row counts on the host, so capture at most 'attn', 'moe_router' and 'moe_preprocess'"
        )
