"""Names of the backends and their adapters; a module is imported when it is asked for."""

from __future__ import annotations

import difflib
import importlib

from ep_dispatcher.bench.backends.base import Opener
from ep_dispatcher.errors import ConfigError

_HERE = "ep_dispatcher.bench.backends"

# name -> (module, what it is); a module has `open_session`
BACKENDS: dict[str, tuple[str, str]] = {
    "ep_dispatcher/reference": ("own", "this package, reference tier"),
    "ep_dispatcher/device": ("own", "this package, device tier"),
    "torch/all_to_all": ("torch_all_to_all", "torch all-to-all plus permute: the plain baseline"),
    "megatron/alltoall": ("megatron", "Megatron-Core's alltoall dispatcher"),
    "megatron/alltoall-fused": ("megatron", "the same with Transformer Engine's permutes"),
    "megatron/allgather": ("megatron", "Megatron-Core's allgather dispatcher"),
    "megatron/flex-deepep": ("megatron", "Megatron-Core's flex dispatcher over DeepEP"),
    "megatron/flex-deepep-fused": ("megatron", "the same with Transformer Engine's permutes"),
    "megatron/flex-hybridep": ("megatron", "Megatron-Core's flex dispatcher over Hybrid-EP"),
    "megatron/flex-ncclep": ("megatron", "Megatron-Core's flex dispatcher over NCCL EP"),
    "nccl_ep": ("nccl_ep", "NCCL EP (nccl-extensions), high throughput, expert-major, eager"),
    "nccl_ep/static": ("nccl_ep", "the same with a receive capacity: its host never waits"),
    "deep_ep/v1": ("deep_ep_v1", "DeepEP's Buffer, inside one host, flat rows"),
    "deep_ep/v2": ("deep_ep_v2", "DeepEP's ElasticBuffer, expanded (expert-major) rows"),
    "hybrid_ep": ("hybrid_ep", "DeepEP's HybridEPBuffer with its fused permute"),
    "control/swapped_rows": ("control", "negative control: two rows change places"),
    "control/dropped_token": ("control", "negative control: one token is not summed"),
    "control/crash": ("control", "negative control: the last rank dies"),
    "control/hang": ("control", "negative control: the last rank never calls"),
    "control/mixed": ("control", "negative control: the last rank runs another version"),
}


def check_name(name: str) -> None:
    """Raise ConfigError for a name that is no backend."""
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, 1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"unknown backend {name!r}; {hint}known: {', '.join(BACKENDS)}")


def find_opener(name: str) -> Opener:
    """The function that opens a session of a backend.

    Raises:
        ConfigError: no backend of this name.
    """
    check_name(name)
    opener: Opener = importlib.import_module(f"{_HERE}.{BACKENDS[name][0]}").open_session
    return opener
