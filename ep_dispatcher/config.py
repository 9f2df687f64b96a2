"""What a group is told at creation: frozen dataclasses, checked on construction, units in names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ep_dispatcher.errors import ConfigError

ROW_ALIGNMENT_BYTES = 16  # the bulk copy engine and 16-byte vector loads need it
MAX_TOKENS_PER_RANK = 1 << 20  # token numbers travel in 32-bit words beside 12 other bits
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 1e-3, 3600.0  # shorter, and healthy ranks are taken for lost
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

Tier = Literal["auto", "reference", "device"]
Precision = Literal["rounded", "exact"]
Duplicates = Literal["auto", "sender", "receiver"]
Combine = Literal["auto", "push", "gather"]


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise ConfigError unless `value` is an int in [low, high]."""
    allowed = f"an int >= {low}" if high is None else f"an int in [{low}, {high}]"
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be {allowed}")
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{name} is {value}; it must be {allowed}")


@dataclass(frozen=True, kw_only=True)
class MoeShape:
    """The sizes of an MoE layer, equal on all ranks of a group.

    Attributes:
        hidden: elements per token row.
        num_topk: K, the most slots that a call may use; a call may use fewer.
        num_experts: E over the whole group.
        dtype: of the rows; "float64" runs in the reference tier only.
    """

    hidden: int
    num_topk: int
    num_experts: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        """Check every field against its range."""
        _check_int("hidden", self.hidden, 1)
        _check_int("num_topk", self.num_topk, 1)
        _check_int("num_experts", self.num_experts, 1)
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype is {self.dtype!r}; it must be one of {sorted(DTYPE_BYTES)}")
        if self.row_bytes % ROW_ALIGNMENT_BYTES:
            step = ROW_ALIGNMENT_BYTES // DTYPE_BYTES[self.dtype]
            raise ConfigError(
                f"hidden is {self.hidden} ({self.row_bytes} bytes in {self.dtype}); a row must be "
                f"a multiple of {ROW_ALIGNMENT_BYTES} bytes, so hidden a multiple of {step}"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one token row."""
        return self.hidden * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Which ranks share an NVLink domain: consecutive ranks, all domains of one size.

    Attributes:
        ep_size: P, ranks in the group.
        domain_size: ranks in each domain (NCCL's LSA team); P / domain_size domains.

    Example: ep_size=8, domain_size=4 -> rank 5 is lsa_rank 1 of domain 1; its rail is ranks 1, 5.
    """

    ep_size: int
    domain_size: int

    def __post_init__(self) -> None:
        """Check that equal domains fill the group."""
        _check_int("ep_size", self.ep_size, 1)
        _check_int("domain_size", self.domain_size, 1, self.ep_size)
        if self.ep_size % self.domain_size:
            raise ConfigError(
                f"domain_size is {self.domain_size}; it must divide ep_size {self.ep_size}"
            )

    @property
    def num_domains(self) -> int:
        """How many NVLink domains the group spans."""
        return self.ep_size // self.domain_size

    def domain_of(self, rank: int) -> int:
        """Domain that `rank` belongs to."""
        return rank // self.domain_size

    def lsa_rank(self, rank: int) -> int:
        """Index of `rank` inside its domain."""
        return rank % self.domain_size

    def rail_peer(self, rank: int, domain: int) -> int:
        """The rank of `domain` with the same lsa_rank as `rank`: the only one it puts to there."""
        return domain * self.domain_size + self.lsa_rank(rank)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Knobs that change speed, never results.

    Attributes:
        num_sms: SM budget, the blocks that communication kernels may hold on each rank; over
            several domains those of the rails come on top (`rail_memory.rail_blocks`).
        chunk_tokens: tokens that travel under one flag. No tier reads it now: the device tier's
            chunks have the size that its kernels were compiled with. A group that is given another
            value than the default warns of it.
        timeout_s: device tier: deadline of every wait; past it EpTimeoutError is raised. The
            reference tier waits as long as its process group was told to.
        duplicates: device tier: who makes the second and further copies of a token that go to one
            rank. "sender": every copy crosses the link. "receiver": one does, and the receiver
            copies it. "auto": the receiver, unless ranks share a GPU, where no link is saved.
        combine: device tier: how rows come home. "push": each expert rank sends one sum for each
            token. "gather": the home rank reads the expert rows where they lie, which must be in
            the group's memory (`EPGroup.empty_rows`; rows elsewhere are copied there first).
            "auto": by what they put on the links; see `combine_form.choose_combine`.
    """

    num_sms: int = 16
    chunk_tokens: int = 64
    timeout_s: float = 30.0
    duplicates: Duplicates = "auto"
    combine: Combine = "auto"

    def __post_init__(self) -> None:
        """Check every field against its range."""
        _check_int("num_sms", self.num_sms, 1, 128)
        _check_int("chunk_tokens", self.chunk_tokens, 1, 1024)
        if not _is_number(self.timeout_s) or not MIN_TIMEOUT_S <= self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"timeout_s is {self.timeout_s!r}; it must be in [{MIN_TIMEOUT_S}, "
                f"{MAX_TIMEOUT_S:.0f}] seconds, and above any time that a rank may be behind: "
                f"leave it at {Tuning.timeout_s:.0f} if in doubt"
            )
        if self.duplicates not in ("auto", "sender", "receiver"):
            raise ConfigError(
                f"duplicates is {self.duplicates!r}; it must be 'auto', 'sender' or 'receiver'"
            )
        if self.combine not in ("auto", "push", "gather"):
            raise ConfigError(f"combine is {self.combine!r}; it must be 'auto', 'push' or 'gather'")


@dataclass(frozen=True, kw_only=True)
class EpConfig:
    """Everything a group needs; all ranks must agree on it.

    Attributes:
        shape: sizes of the layer.
        max_tokens_per_rank: bound on T of any call; sizes the persistent buffers.
        alignment: each expert's rows are padded to a multiple of this many rows (an expert with
            no rows stays at none); a plan may override it.
        recv_capacity_rows: None for eager mode (exact sizes, one wait of a few bytes); a row
            count for static mode (fixed sizes; rows past it are dropped and reported).
        output_bytes: device tier: memory that output rows are cut from; all outputs that are alive
            at a time must fit. None for four outputs of a balanced routing, six where combine
            gathers (`device_memory.heap_bytes_of`).
        virtual_domain_size: split a domain into smaller ones, for tests and ablations.
        expert_rank: the rank of each expert; None for equal consecutive blocks.
        precision: "rounded" rounds each rank's and each domain's partial sum to `dtype`;
            "exact" keeps partial sums in fp32 and rounds once.
        tier: "auto" takes the device tier where every rank can, else the reference tier.
        check_values: debug mode, refuses NaN and infinite weights (costs a host synchronisation).
        debug_ledger: debug mode, compares the order of all calls between the ranks.
        tuning: knobs that change speed only.
    """

    shape: MoeShape
    max_tokens_per_rank: int
    alignment: int = 1
    recv_capacity_rows: int | None = None
    output_bytes: int | None = None
    virtual_domain_size: int | None = None
    expert_rank: tuple[int, ...] | None = None
    precision: Precision = "rounded"
    tier: Tier = "auto"
    check_values: bool = False
    debug_ledger: bool = False
    tuning: Tuning = field(default_factory=Tuning)

    def __post_init__(self) -> None:
        """Check every field against its range."""
        _check_int("max_tokens_per_rank", self.max_tokens_per_rank, 0, MAX_TOKENS_PER_RANK)
        check_alignment(self.alignment)
        if self.recv_capacity_rows is not None:
            _check_int("recv_capacity_rows", self.recv_capacity_rows, 0)
        if self.output_bytes is not None:
            _check_int("output_bytes", self.output_bytes, 16 << 20, 1 << 46)
        if self.virtual_domain_size is not None:
            _check_int("virtual_domain_size", self.virtual_domain_size, 1)
        if self.precision not in ("rounded", "exact"):
            raise ConfigError(f"precision is {self.precision!r}; it must be 'rounded' or 'exact'")
        if self.tier not in ("auto", "reference", "device"):
            raise ConfigError(f"tier is {self.tier!r}; it must be 'auto', 'reference' or 'device'")
        self._check_flags()
        for name, kind in (("shape", MoeShape), ("tuning", Tuning)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {kind.__name__}")
        if self.expert_rank is not None:
            self._check_expert_rank(self.expert_rank)

    def _check_flags(self) -> None:
        """Check what is either on or off."""
        for name in ("check_values", "debug_ledger"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False")

    def _check_expert_rank(self, table: object) -> None:
        """Check the table of experts as far as that goes without the number of ranks."""
        if not isinstance(table, tuple):
            raise ConfigError(f"expert_rank is {table!r}; it must be a tuple of ranks")
        if len(table) != self.shape.num_experts:
            raise ConfigError(
                f"expert_rank has {len(table)} entries; it needs one for each of the "
                f"{self.shape.num_experts} experts"
            )
        for expert, rank in enumerate(table):
            _check_int(f"expert_rank[{expert}]", rank, 0)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpConfig:
        """Build a config from nested plain values, such as a YAML section.

        Raises:
            ConfigError: an unknown key, or a value out of range.
        """
        plain = dict(_mapping(values, "ep_dispatcher"))
        plain["shape"] = _build(MoeShape, plain.get("shape", {}), "shape")
        plain["tuning"] = _build(Tuning, plain.get("tuning", {}), "tuning")
        if isinstance(plain.get("expert_rank"), list):
            plain["expert_rank"] = tuple(plain["expert_rank"])
        config: EpConfig = _build(cls, plain, "ep_dispatcher")
        return config

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values; `from_dict(to_dict())` gives an equal config."""
        return dataclasses.asdict(self)


def check_alignment(alignment: int) -> None:
    """Raise ConfigError unless `alignment` is a power of two that a plan can use."""
    fits = type(alignment) is int and 1 <= alignment <= 4096
    if not fits or alignment & (alignment - 1):
        raise ConfigError(f"alignment is {alignment!r}; it must be a power of two in [1, 4096]")


def _is_number(value: object) -> bool:
    """Whether a value is an int or a float; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mapping(values: object, where: str) -> Mapping[str, Any]:
    """The values of a section; raises ConfigError unless it has keys."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"section {where!r} is {values!r}; it must be a mapping")
    return values


def _build(cls: Any, values: object, where: str) -> Any:  # noqa: ANN401
    """Call a dataclass with a mapping; unknown or missing keys become a ConfigError."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    values = _mapping(values, where)
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ConfigError(
            f"unknown key {unknown[0]!r} in section {where!r}; known keys: {sorted(known)}"
        )
    required = {
        name
        for name, f in known.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - set(values))
    if missing:
        raise ConfigError(f"key {missing[0]!r} is missing in section {where!r}")
    return cls(**values)
