"""What `ep-dispatcher plan` is asked, from a config file and options that override it.

Two kinds of file are read: a training config (it has a section `model`), and a plain one whose
section `ep_dispatcher` is an EpConfig (it has a `shape`), optionally with `ranks` and `domains`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ep_dispatcher.config import EpConfig, Topology
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.group import topology_of
from ep_dispatcher.routing import RoutingName, RoutingSpec

_SECTION = "ep_dispatcher"


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """What a plan report answers.

    Attributes:
        config: of the group.
        topology: of the group; it may be virtual.
        num_tokens: T of every rank, at most the config's max_tokens_per_rank.
        routing: how tokens choose experts, before experts are sharded.
        num_shards: ranks that share each expert (expert tensor parallelism); the config counts
            each shard as an expert, and a token goes to all shards of an expert it chose.
    """

    config: EpConfig
    topology: Topology
    num_tokens: int
    routing: RoutingSpec
    num_shards: int = 1

    def __post_init__(self) -> None:
        """Check T against the config's bound, and that shards fill the ranks."""
        bound = self.config.max_tokens_per_rank
        if not 0 <= self.num_tokens <= bound:
            raise ConfigError(
                f"num_tokens is {self.num_tokens}; it must be in [0, max_tokens_per_rank {bound}]; "
                "give fewer --tokens or raise max_tokens_per_rank in the config"
            )
        ranks, experts = self.topology.ep_size, self.config.shape.num_experts
        if self.num_shards > 1 and (ranks % self.num_shards or experts % ranks):
            raise ConfigError(
                f"ranks is {ranks}; with {self.num_shards} shards an expert it must be a multiple "
                f"of {self.num_shards} that divides the {experts} shards"
            )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the command line says; None leaves it to the file.

    Attributes:
        ranks: P.
        domains: NVLink domains.
        tokens: T of every rank.
        routing, skew, seed: see RoutingSpec.
    """

    ranks: int | None = None
    domains: int | None = None
    tokens: int | None = None
    routing: RoutingName = "uniform"
    skew: float = 1.0
    seed: int = 0


def read_question(path: Path, options: PlanOptions) -> PlanQuestion:
    """Read a config file and apply the options.

    Raises:
        ConfigError: not a file of either kind, or a value out of its range; says which.
    """
    document = _read_yaml(path)
    num_shards = 1
    if "model" in document:
        # Late, as it is needed for such files only.
        training = importlib.import_module("ep_dispatcher.train.config").load_config(path)
        config: EpConfig = training.ep_config()
        from_file: Topology = training.topology()
        num_shards = training.parallel.expert_tensor
    else:
        section = dict(_plain_section(path, document))
        ranks, domains = section.pop("ranks", 1), section.pop("domains", None)
        config = EpConfig.from_dict(section)
        from_file = _split(ranks, domains) if domains else topology_of(config, ranks)
    topology = _override(from_file, options)
    shape = config.shape
    return PlanQuestion(
        config=config,
        topology=topology,
        num_tokens=config.max_tokens_per_rank if options.tokens is None else options.tokens,
        routing=RoutingSpec(
            name=options.routing,
            num_experts=shape.num_experts // num_shards,
            num_topk=shape.num_topk // num_shards,
            seed=options.seed,
            skew=options.skew,
        ),
        num_shards=num_shards,
    )


def _override(topology: Topology, options: PlanOptions) -> Topology:
    """Apply --ranks and --domains; without --domains the size of a domain stays, if it fits."""
    ranks = topology.ep_size if options.ranks is None else options.ranks
    if options.domains is not None:
        return _split(ranks, options.domains)
    if options.ranks is None:
        return topology
    one_domain = topology.num_domains == 1 or ranks < topology.domain_size
    return Topology(ep_size=ranks, domain_size=ranks if one_domain else topology.domain_size)


def _split(ranks: int, domains: int) -> Topology:
    """Ranks in equal domains."""
    if not all(isinstance(count, int) for count in (ranks, domains)):
        raise ConfigError(f"ranks is {ranks!r} and domains {domains!r}; both must be whole numbers")
    if domains < 1 or ranks % domains:
        raise ConfigError(f"domains is {domains}; it must divide the {ranks} ranks")
    return Topology(ep_size=ranks, domain_size=max(1, ranks // domains))


def _plain_section(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    """The section `ep_dispatcher` with a shape in it."""
    section = document.get(_SECTION)
    if not isinstance(section, dict) or "shape" not in section:
        raise ConfigError(
            f"{path} has neither a section 'model' (a training config) nor a section "
            f"'{_SECTION}' with a 'shape'; give one such as configs/tiny_cpu.yaml"
        )
    return section


def _read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); give a YAML file such as those in configs/"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"{path} is not a YAML file: {where}") from error
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path} holds {type(document).__name__} where sections are needed; see configs/"
        )
    return document
