"""What a benchmark run is told: the work, the sweeps over it, the backends, and the method.

A file names one base `work` and a list of `sweeps`. A sweep gives lists of values for some fields
of the work; it stands for their product, the other fields as in the base. What several sweeps ask
for is run once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ep_dispatcher.config import Combine, Duplicates, EpConfig, MoeShape, Tuning
from ep_dispatcher.errors import ConfigError

MIN_ROUNDS = 20
ROUTINGS = ("uniform", "group-limited", "zipf", "all-to-one", "replay")
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One point of a sweep: what every backend is asked to move.

    Attributes:
        ranks: P.
        domains: NVLink domains, virtual ones where the machine has fewer.
        num_tokens: T of every rank.
        hidden: H.
        num_topk: K.
        num_experts: E.
        dtype: of the rows.
        routing: "uniform", "group-limited", "zipf", "all-to-one" (all tokens choose the first K
            experts) or "replay" (a recorded router trace).
        skew: exponent of zipf, in [0, inf); 0 is uniform.
        masked_fraction: share of slots that are dropped (-1), in [0, 1].
        trace: file that "replay" reads.
        alignment: rows of each expert are padded to a multiple of this.
        num_sms: SM budget of communication, a rank; backends without such a knob say so.
        chunk_tokens: tokens that travel under one flag, where a backend has such a knob.
        combine: "push", "gather" or "auto", this package's device tier only; see `Tuning`.
        duplicates: "sender", "receiver" or "auto", likewise.
        ffn_hidden: inner size of the experts of the whole layer; 0 leaves the layer out.
        seed: of routing and rows.
    """

    ranks: int = 4
    domains: int = 1
    num_tokens: int = 4096
    hidden: int = 7168
    num_topk: int = 8
    num_experts: int = 256
    dtype: str = "bfloat16"
    routing: str = "uniform"
    skew: float = 1.0
    masked_fraction: float = 0.0
    trace: str | None = None
    alignment: int = 1
    num_sms: int = 16
    chunk_tokens: int = 64
    combine: Combine = "auto"
    duplicates: Duplicates = "auto"
    ffn_hidden: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what no later step would check in words that name the field."""
        _check_types(self)
        if self.routing not in ROUTINGS:
            raise ConfigError(f"routing is {self.routing!r}; it must be one of {list(ROUTINGS)}")
        if (self.routing == "replay") != (self.trace is not None):
            raise ConfigError(
                f"routing is {self.routing!r} and trace is {self.trace!r}; 'replay' needs a file "
                "in `trace`, the others need none"
            )
        if not 0 <= self.masked_fraction <= 1:
            raise ConfigError(f"masked_fraction is {self.masked_fraction}; it must be in [0, 1]")
        if not 0 <= self.skew < math.inf:
            raise ConfigError(f"skew is {self.skew}; it must be in [0, inf)")
        if self.ranks < 1:
            raise ConfigError(f"ranks is {self.ranks}; it must be at least 1")
        if self.domains < 1 or self.ranks % self.domains:
            raise ConfigError(f"domains is {self.domains}; it must divide ranks {self.ranks}")
        if not 1 <= self.num_topk <= self.num_experts:
            raise ConfigError(
                f"num_topk is {self.num_topk}; it must be in [1, num_experts {self.num_experts}]"
            )
        if self.ffn_hidden < 0 or self.num_tokens < 0:
            raise ConfigError(
                f"ffn_hidden is {self.ffn_hidden} and num_tokens {self.num_tokens}; "
                "neither may be negative"
            )
        self.ep_config()

    def ep_config(self, tier: Literal["reference", "device"] = "reference") -> EpConfig:
        """The config of an ep_dispatcher group for this work; refuses what no group could do."""
        return EpConfig(
            shape=MoeShape(
                hidden=self.hidden,
                num_topk=self.num_topk,
                num_experts=self.num_experts,
                dtype=self.dtype,
            ),
            max_tokens_per_rank=self.num_tokens,
            alignment=self.alignment,
            virtual_domain_size=self.ranks // self.domains if self.domains > 1 else None,
            tier=tier,
            tuning=Tuning(
                num_sms=self.num_sms,
                chunk_tokens=self.chunk_tokens,
                combine=self.combine,
                duplicates=self.duplicates,
            ),
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.ep_config().shape.row_bytes

    def label(self) -> str:
        """Short words for people: T, H, K, E, P and what is unusual.

        Example: "P=4 T=256 H=64 K=2 E=8 float32 zipf 1.5".
        """
        words = [f"P={self.ranks}", f"T={self.num_tokens}", f"H={self.hidden}"]
        words += [f"K={self.num_topk}", f"E={self.num_experts}", self.dtype, self.routing]
        if self.routing == "zipf":
            words[-1] += f" {self.skew:g}"
        if self.masked_fraction:
            words.append(f"masked {self.masked_fraction:g}")
        if self.domains > 1:
            words.append(f"domains {self.domains}")
        return " ".join([*words, *self.knobs()])

    def knobs(self) -> list[str]:
        """Words for the knobs of this package that were set."""
        named = (("combine", self.combine), ("copies by", self.duplicates))
        return [f"{name} {value}" for name, value in named if value != "auto"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a backend is measured.

    Attributes:
        warmup: rounds that are not timed.
        rounds: timed rounds.
        time_limit_s: for one backend and one work, start-up included; past it the row says so.
        max_failures: crashes or hangs of one backend after which its remaining works are given up.
        interference: backends beside whose dispatch and combine matrix products are timed (GPU),
            after the times; what hangs there loses them, so name what is known to share a GPU.
        usage: profile one more round for launches and host synchronisations (GPU), after the times.
    """

    warmup: int = 5
    rounds: int = MIN_ROUNDS
    time_limit_s: float = 120.0
    max_failures: int = 2
    interference: Sequence[str] = ()
    usage: bool = True

    def __post_init__(self) -> None:
        """Refuse fewer rounds than a 95th percentile needs, and limits that allow nothing."""
        _check_types(self)
        if self.rounds < MIN_ROUNDS:
            raise ConfigError(f"rounds is {self.rounds}; it must be at least {MIN_ROUNDS}")
        if self.warmup < 1:
            raise ConfigError(f"warmup is {self.warmup}; it must be at least 1")
        if not 0 < self.time_limit_s < math.inf:
            raise ConfigError(f"time_limit_s is {self.time_limit_s}; it must be in (0, inf)")
        if self.max_failures < 1:
            raise ConfigError(f"max_failures is {self.max_failures}; it must be at least 1")
        _listed(vars(self), "interference", str, "backends")


@dataclass(frozen=True, kw_only=True)
class BenchSpec:
    """A whole run.

    Attributes:
        suite: name in the recorded lines.
        device: "cpu" (gloo) or "cuda".
        work: base of the sweeps; run itself where there are no sweeps.
        sweeps: lists of values of work fields; "backends" in one restricts it to those.
        backends: names, see `ep-dispatcher bench run --list`.
        method: how to measure.
    """

    suite: str = "ablation"
    device: Device = "cpu"
    work: Work = field(default_factory=Work)
    sweeps: tuple[Mapping[str, Any], ...] = ()
    backends: tuple[str, ...] = ()
    method: Method = field(default_factory=Method)

    def __post_init__(self) -> None:
        """Check the device, and every sweep by expanding it."""
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device is {self.device!r}; it must be 'cpu' or 'cuda'")
        if not self.backends:
            raise ConfigError("backends is empty; name at least one, see `bench run --list`")
        asked = {name for name, _ in self.pairs()}
        idle = [name for name in self.backends if name not in asked]
        if idle:
            raise ConfigError(
                f"backend {idle[0]!r} is in `backends` but no sweep runs it; name it in one, or "
                "have a sweep without `backends`"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BenchSpec:
        """Build from a file's plain values.

        Raises:
            ConfigError: an unknown key, or a value out of its range.
        """
        plain = dict(values)
        _refuse_unknown(plain, cls, "the file")
        base = _section(plain, "work", Work)
        plain["work"] = Work(**base)
        plain["method"] = Method(**_section(plain, "method", Method))
        plain["backends"] = _listed(plain, "backends", str, "names")
        plain["sweeps"] = _listed(plain, "sweeps", Mapping, "mappings of work fields to lists")
        for sweep in plain["sweeps"]:
            _listed(sweep, "backends", str, "names")
        return cls(**plain)

    def pairs(self) -> list[tuple[str, Work]]:
        """Every (backend, work) once, backend by backend, works in the order of the sweeps."""
        works: dict[str, dict[Work, None]] = {name: {} for name in self.backends}
        for sweep in self.sweeps or ({},):
            for name in sweep.get("backends", self.backends):
                works.setdefault(name, {}).update(dict.fromkeys(self._expand(sweep)))
        return [(name, work) for name, mine in works.items() for work in mine]

    def _expand(self, sweep: Mapping[str, Any]) -> list[Work]:
        """Works of one sweep: the product of its lists over the base."""
        axes = {name: values for name, values in sweep.items() if name != "backends"}
        _refuse_unknown(axes, Work, "a sweep")
        for name, values in axes.items():
            if not isinstance(values, Sequence) or isinstance(values, str) or not values:
                raise ConfigError(f"sweep of {name} is {values!r}; it must be a list of values")
        return [
            dataclasses.replace(self.work, **dict(zip(axes, point, strict=True)))
            for point in itertools.product(*axes.values())
        ]


def _check_types(values: Work | Method) -> None:
    """Raise ConfigError for a field that holds another kind of value than it is declared for."""
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word"}
    words["str | None"] = "a word, or left out"
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}
    kinds |= {"str": (str,), "str | None": (str, type(None))}
    for each in dataclasses.fields(values):
        value, declared = getattr(values, each.name), str(each.type)
        allowed = kinds.get(declared)
        if allowed is None:
            continue
        if not isinstance(value, allowed) or (isinstance(value, bool) and declared != "bool"):
            raise ConfigError(f"{each.name} is {value!r}; it must be {words[declared]}")


def load_spec(path: Path) -> BenchSpec:
    """Read a YAML file.

    Raises:
        ConfigError: not YAML, not a mapping, or a value out of its range; names the file.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}; a mapping is needed")
    try:
        return BenchSpec.from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _section(plain: Mapping[str, Any], name: str, cls: type) -> dict[str, Any]:
    """A nested section with known keys only."""
    values = plain.get(name) or {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"section {name!r} is {values!r}; it must be a mapping of fields")
    _refuse_unknown(values, cls, f"section {name!r}")
    return dict(values)


def _listed(values: Mapping[str, Any], name: str, kind: type, words: str) -> tuple[Any, ...]:
    """A value that must be a list of `kind`; what is not there is an empty one."""
    found = values.get(name) or ()
    if not isinstance(found, list | tuple) or not all(isinstance(each, kind) for each in found):
        raise ConfigError(f"{name} is {found!r}; it must be a list of {words}")
    return tuple(found)


def _refuse_unknown(values: Mapping[str, Any], cls: Any, where: str) -> None:  # noqa: ANN401
    """Raise ConfigError for a key that `cls` lacks."""
    known = sorted(f.name for f in dataclasses.fields(cls))
    unknown = sorted(set(values) - set(known), key=str)
    if unknown:
        raise ConfigError(f"unknown key {unknown[0]!r} in {where}; known keys: {known}")
