"""The training config: a YAML file of five sections, checked before a rank is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ep_dispatcher.config import EpConfig, MoeShape, Topology
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.megatron.options import MegatronOptions
from ep_dispatcher.train.sections import Section, choice, number, refuse_unknown

VOCABULARY = 256  # the model reads and predicts bytes
# Keys of the section ep_dispatcher that change no result.
SPEED_ONLY = (
    "num_sms",
    "chunk_tokens",
    "timeout_s",
    "duplicates",
    "combine",
    "output_bytes",
    "debug_ledger",
)
BOOKKEEPING = (
    "steps",
    "out_dir",
    "log_every",
    "checkpoint_every",
    "keep_checkpoints",
    "record_routing",
    "device",
)


@dataclass(frozen=True, kw_only=True)
class ModelSection(Section):
    """The GPT MoE model, in Megatron-Core's terms.

    Attributes:
        num_layers: transformer layers; the first `num_dense_layers` of them have a plain MLP.
        hidden: elements per token row.
        num_attention_heads, num_query_groups: heads, and groups of them that share keys and values
            (None: one group a head).
        ffn_hidden: inner width of a plain MLP; None for 4 * hidden.
        expert_ffn_hidden: inner width of an expert.
        shared_expert_ffn_hidden: inner width of the shared expert; None for no shared expert.
        num_experts, num_topk: E and K.
        gated: SwiGLU instead of GELU.
        norm: kind of normalisation.
        seq_length: tokens of a sequence.
        dtype: of parameters and rows.
        router_score: how scores become weights.
        router_groups, router_group_topk: choose among the experts of the best groups only.
        router_bias: balance the load with a bias per expert (needs sigmoid scores).
        aux_loss: coefficient of the load-balancing loss; 0 for none.
        capacity_factor: tokens beyond this times the mean load are dropped; None for dropless.
        recompute: what the backward computes again instead of keeping it.
    """

    num_layers: int = number(2)
    num_dense_layers: int = number(0, low=0)
    hidden: int = number(64, low=8)
    num_attention_heads: int = number(4)
    num_query_groups: int | None = number(None)
    ffn_hidden: int | None = number(None)
    expert_ffn_hidden: int = number(128)
    shared_expert_ffn_hidden: int | None = number(None)
    num_experts: int = number(8)
    num_topk: int = number(2)
    gated: bool = False
    norm: str = choice("LayerNorm", "RMSNorm")
    seq_length: int = number(64, low=2)
    dtype: str = choice("float32", "bfloat16")
    router_score: str = choice("softmax", "sigmoid")
    router_groups: int | None = number(None)
    router_group_topk: int | None = number(None)
    router_bias: bool = False
    aux_loss: float = number(0.01, low=0)
    capacity_factor: float | None = number(None, low=0)
    recompute: str = choice("none", "moe", "full")

    def __post_init__(self) -> None:
        """Check what fields demand of each other."""
        super().__post_init__()
        if self.num_topk > self.num_experts:
            raise ConfigError(
                f"model.num_topk is {self.num_topk}; it must be at most model.num_experts "
                f"({self.num_experts})"
            )
        if self.num_dense_layers >= self.num_layers:
            raise ConfigError(
                f"model.num_dense_layers is {self.num_dense_layers}; it must be less than "
                f"model.num_layers ({self.num_layers}), or no layer has experts"
            )
        _check_divides("model.num_attention_heads", self.num_attention_heads, "hidden", self.hidden)


@dataclass(frozen=True, kw_only=True)
class ParallelSection(Section):
    """How ranks are used. Data parallelism is what is left over.

    Attributes:
        num_nodes, ranks_per_node: processes to start.
        tensor, pipeline: ranks of a tensor-parallel group, stages of the pipeline.
        expert: ranks that share the experts of a layer.
        expert_tensor: ranks that share each expert.
        ranks_share_gpu: several ranks may use one GPU (needs MPS; for tests, not for speed).
    """

    num_nodes: int = number(1)
    ranks_per_node: int = number(4)
    tensor: int = number(1)
    pipeline: int = number(1)
    expert: int = number(4)
    expert_tensor: int = number(1)
    ranks_share_gpu: bool = False

    def __post_init__(self) -> None:
        """Check that the groups divide the ranks."""
        super().__post_init__()
        world = f"the {self.num_ranks} ranks (num_nodes * ranks_per_node)"
        for factors in (("tensor", "pipeline"), ("expert", "expert_tensor", "pipeline")):
            product = 1
            for factor in factors:
                product *= getattr(self, factor)
            if self.num_ranks % product:
                names = " * ".join(f"parallel.{factor}" for factor in factors)
                raise ConfigError(
                    f"{names} is {product}; it must divide {world}. Set parallel.ranks_per_node "
                    f"to a multiple of {product}, or lower one of them"
                )

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole job."""
        return self.num_nodes * self.ranks_per_node

    @property
    def data(self) -> int:
        """Data-parallel ranks: how many read different text."""
        return self.num_ranks // (self.tensor * self.pipeline)

    @property
    def ep_size(self) -> int:
        """P: ranks of a dispatcher's group."""
        return self.expert * self.expert_tensor


@dataclass(frozen=True, kw_only=True)
class DataSection(Section):
    """The text.

    Attributes:
        path: a file, or a folder whose text files are read; None for the Python standard library's
            own sources.
        suffixes: of the files read in a folder, separated by spaces.
        max_bytes: stop reading after so many bytes.
    """

    path: str | None = None
    suffixes: str = ".py .txt .md .rst .c .h .cpp .cu .java .js .rs .go .tex .html .json .csv"
    max_bytes: int = number(8 << 20, low=1024)


@dataclass(frozen=True, kw_only=True)
class TrainSection(Section):
    """The optimisation and what is kept of it.

    Attributes:
        dispatcher: "ep_dispatcher", or one of Megatron's own for an ablation.
        steps: optimizer steps in all; a resumed run goes on to this step.
        micro_batch: sequences of a micro-batch on each data-parallel rank.
        num_micro_batches: micro-batches of a step.
        learning_rate, min_learning_rate: peak, and end of the cosine.
        warmup_steps, decay_steps: linear rise, and step at which the cosine ends (None: `steps`).
        clip_grad: largest norm of the gradient; 0 for no clipping.
        weight_decay: of AdamW.
        distributed_optimizer: shard the optimizer's state over the data-parallel ranks.
        overlap: hide expert communication behind another micro-batch (needs bfloat16 and
            `num_micro_batches` of at least 2).
        delay_weight_gradients: compute the experts' weight gradients while the gradients of their
            rows travel home (needs Transformer Engine and megatron-core 0.18 or later).
        seed: of the initial parameters and the order of the text.
        device: "auto" takes GPUs where every rank sees one.
        log_every, checkpoint_every, keep_checkpoints: steps, steps (0: none), and how many.
        record_routing: routings of each rank to keep in `out_dir` as a router trace; it makes the
            host wait for each of them, so do not time such a run.
        out_dir: folder of metrics, checkpoints and the picture.
    """

    dispatcher: str = choice("ep_dispatcher", "alltoall", "allgather")
    steps: int = number(100)
    micro_batch: int = number(2)
    num_micro_batches: int = number(1)
    learning_rate: float = number(3e-3, low=0)
    min_learning_rate: float = number(3e-4, low=0)
    warmup_steps: int = number(10, low=0)
    decay_steps: int | None = number(None)
    clip_grad: float = number(1.0, low=0)
    weight_decay: float = number(0.01, low=0)
    distributed_optimizer: bool = False
    overlap: bool = False
    delay_weight_gradients: bool = False
    seed: int = number(1234, low=0)
    device: str = choice("auto", "cpu", "cuda")
    log_every: int = number(1)
    checkpoint_every: int = number(50, low=0)
    keep_checkpoints: int = number(2)
    record_routing: int = number(0, low=0)
    out_dir: str = "runs/train"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All sections; what they demand of each other is checked here.

    Raises:
        ConfigError: names the keys, their values and what is allowed.
    """

    model: ModelSection
    parallel: ParallelSection
    data: DataSection
    train: TrainSection
    ep_dispatcher: MegatronOptions

    def __post_init__(self) -> None:
        """Check across sections."""
        model, parallel = self.model, self.parallel
        _check_divides("parallel.expert", parallel.expert, "model.num_experts", model.num_experts)
        _check_divides("parallel.pipeline", parallel.pipeline, "model.num_layers", model.num_layers)
        _check_divides("parallel.tensor", parallel.tensor, "model.seq_length", model.seq_length)
        for name in ("num_attention_heads", "num_query_groups"):
            count = getattr(model, name)
            if count is not None:
                _check_divides("parallel.tensor", parallel.tensor, f"model.{name}", count)
        if self.train.overlap:
            _check_overlap(self)
        self.ep_config()

    @property
    def tokens_per_rank(self) -> int:
        """T: tokens that a rank routes in one micro-batch; the largest there is."""
        return self.train.micro_batch * self.model.seq_length // self.parallel.tensor

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over the whole job."""
        per_rank = self.train.micro_batch * self.model.seq_length * self.train.num_micro_batches
        return per_rank * self.parallel.data

    def ep_config(self) -> EpConfig:
        """What the dispatcher's groups are made with: for `ep-dispatcher plan` and benchmarks."""
        folded = self.parallel.expert_tensor  # each shard of an expert counts as an expert
        shape = MoeShape(
            hidden=self.model.hidden,
            num_topk=self.model.num_topk * folded,
            num_experts=self.model.num_experts * folded,
            dtype=self.model.dtype,
        )
        options = self.ep_dispatcher
        return options.ep_config(shape, options.max_tokens_per_rank or self.tokens_per_rank)

    def topology(self) -> Topology:
        """Ranks of a dispatcher's group and their NVLink domains, one a node."""
        ep_size = self.parallel.ep_size
        size = self.ep_dispatcher.virtual_domain_size or min(ep_size, self.parallel.ranks_per_node)
        return Topology(ep_size=ep_size, domain_size=size)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested plain values, as a YAML file would hold them."""
        return dataclasses.asdict(self)

    def identity(self) -> dict[str, dict[str, Any]]:
        """The values that decide the numbers of a run; a resumed run must have the same."""
        values = self.to_dict()
        values["train"]["decay_steps"] = self.train.decay_steps or self.train.steps
        for key in BOOKKEEPING:
            del values["train"][key]
        for key in SPEED_ONLY:
            del values["ep_dispatcher"][key]
        del values["data"]["path"]  # the bytes count, and are compared themselves
        return values


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "parallel": ParallelSection,
    "data": DataSection,
    "train": TrainSection,
}


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and apply `section.key=value` overrides.

    Args:
        path: of the file.
        overrides: values are read as YAML.

    Raises:
        ConfigError: no such file, not YAML, an unknown section or key, a value out of range.
    """
    values = _read_yaml(path)
    for override in overrides:
        _apply_override(values, override)
    return config_from_dict(values)


def config_from_dict(values: Mapping[str, Any]) -> TrainConfig:
    """Build a config from nested plain values.

    Raises:
        ConfigError: see `load_config`.
    """
    names = [*SECTIONS, "ep_dispatcher"]
    unknown = [str(name) for name in values if name not in names]
    if unknown:
        raise ConfigError(f"unknown section {unknown[0]!r}; known sections: {', '.join(names)}")
    section = values.get("ep_dispatcher") or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"section 'ep_dispatcher' holds {section!r}; it needs keys and values")
    sections: dict[str, Any] = {
        name: kind.from_mapping(values.get(name)) for name, kind in SECTIONS.items()
    }
    return TrainConfig(**sections, ep_dispatcher=MegatronOptions.from_section(section))


def _read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); give a YAML file such as those in configs/"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no sections; see the files in configs/")
    return values


def _apply_override(values: dict[str, Any], override: str) -> None:
    """Put one `section.key=value` into the nested values."""
    name, equals, text = override.partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot and key):
        raise ConfigError(f"--set {override!r} is not of the form section.key=value")
    known = [*SECTIONS, "ep_dispatcher"]
    if section not in known:
        raise ConfigError(f"--set names section {section!r}; known sections: {', '.join(known)}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML") from error
    if section in SECTIONS:
        keys = [field.name for field in dataclasses.fields(SECTIONS[section])]
        refuse_unknown(section, {key: value}, keys)
    _put(values, [section, *key.split(".")], value)


def _put(values: dict[str, Any], path: Sequence[str], value: object) -> None:
    """Set a value in nested mappings, which are copied on the way."""
    head, *rest = path
    if not rest:
        values[head] = value
        return
    present = values.get(head)
    inner = dict(present) if isinstance(present, Mapping) else {}
    _put(inner, rest, value)
    values[head] = inner


def _check_overlap(config: TrainConfig) -> None:
    """Refuse what Megatron's combined schedule cannot do, before a rank is started.

    It runs the first forward and the last backward of a step alone, so with one micro-batch it
    would combine nothing and still be called an overlap.
    """
    model, parallel, train = config.model, config.parallel, config.train
    chunks = config.ep_dispatcher.overlap.chunks
    for name, value, refused, why, instead in (
        ("train.delay_weight_gradients", train.delay_weight_gradients, train.delay_weight_gradients,
         "that schedule has a delay of its own", "false"),
        ("model.dtype", model.dtype, model.dtype != "bfloat16",
         "Megatron overlaps 16-bit models only", "bfloat16"),
        ("model.recompute", model.recompute, model.recompute != "none",
         "it would repeat communication that the schedule has placed", "none"),
        ("parallel.expert", parallel.expert, parallel.expert == 1,
         "there is no communication to hide", "2 or more"),
        ("parallel.pipeline", parallel.pipeline, parallel.pipeline > 1,
         "it needs several model chunks a stage there, which this command does not make", "1"),
        ("train.dispatcher", train.dispatcher, train.dispatcher == "allgather",
         "Megatron has no schedule for it", "ep_dispatcher or alltoall"),
        ("train.num_micro_batches", train.num_micro_batches, train.num_micro_batches < 2,
         "it hides the communication of one micro-batch behind another", "at least 2"),
        ("ep_dispatcher.overlap.chunks", chunks,
         chunks != 1 and train.dispatcher == "ep_dispatcher",
         "both would hide the same communication", "1"),
    ):  # fmt: skip
        if refused:
            raise ConfigError(
                f"train.overlap is true with {name} {value}; {why}, so set {name} to {instead} or "
                "train.overlap to false"
            )


def _check_divides(name: str, value: int, total_name: str, total: int) -> None:
    """Raise unless `value` divides `total`."""
    if total % value:
        raise ConfigError(f"{name} is {value}; it must divide {total_name} ({total})")
