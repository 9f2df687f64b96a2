"""Router traces: what a real router chose, recorded in training and replayed in a benchmark.

File: a NumPy archive (`.npz`, no pickles) with
    header      UTF-8 bytes of a JSON object: format (1), num_experts, num_topk, ep_size, and free
                text in `source`;
    entry_N     [T, K] int16, experts of each token, -1 for an empty slot; N counts up in the order
                of recording (micro-batch by micro-batch, layer by layer);
    layer, rank one int32 for each entry: the layer's number, and the rank that routed it.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ep_dispatcher.errors import ConfigError

if TYPE_CHECKING:
    from ep_dispatcher.bench.spec import Work

FORMAT = 1
MAX_EXPERTS = 1 << 15
_SOURCE = "an .npz file that training wrote (`train.record_routing`) or `bench trace --merge`"


@dataclass
class RouterTrace:
    """Routings in the order in which they were recorded.

    Attributes:
        num_experts: E.
        num_topk: K, slots of every entry.
        ep_size: P of the run that was recorded.
        source: free text: model, data, step.
        entries: [T, K] int64 each.
        layers: the layer of each entry.
        ranks: the rank of each entry.
    """

    num_experts: int
    num_topk: int
    ep_size: int
    source: str = ""
    entries: list[Tensor] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def add(self, topk_idx: Tensor, layer: int, rank: int) -> None:
        """Append one routing [T, K]; copied to the CPU."""
        self.entries.append(topk_idx.detach().to("cpu", torch.int64))
        self.layers.append(layer)
        self.ranks.append(rank)

    def tokens_of(self, rank: int, work: Work) -> Tensor:
        """The first T tokens that rank `rank % ep_size` routed, over its entries in order.

        Args:
            rank: of the benchmark.
            work: with num_tokens T, num_topk K and num_experts E.

        Raises:
            ConfigError: E or K differ, or there are fewer than T tokens.
        """
        if (self.num_experts, self.num_topk) != (work.num_experts, work.num_topk):
            raise ConfigError(
                f"the trace has num_experts {self.num_experts} and num_topk {self.num_topk}; the "
                f"work has {work.num_experts} and {work.num_topk}; set the work to the trace's"
            )
        wanted = rank % self.ep_size
        mine = [e for e, owner in zip(self.entries, self.ranks, strict=True) if owner == wanted]
        tokens = torch.cat(mine) if mine else torch.empty(0, self.num_topk, dtype=torch.int64)
        if len(tokens) < work.num_tokens:
            raise ConfigError(
                f"the trace has {len(tokens)} tokens of rank {wanted}; num_tokens is "
                f"{work.num_tokens}: lower it or record more steps"
            )
        return tokens[: work.num_tokens]

    def summary(self) -> dict[str, Any]:
        """Plain figures: entries, tokens, and how uneven the experts' loads are."""
        loads = torch.zeros(self.num_experts, dtype=torch.int64)
        for entry in self.entries:
            loads += torch.bincount(entry.flatten() + 1, minlength=self.num_experts + 1)[1:]
        mean = float(loads.double().mean())
        return {
            "num_experts": self.num_experts,
            "num_topk": self.num_topk,
            "ep_size": self.ep_size,
            "source": self.source,
            "entries": len(self.entries),
            "layers": len(set(self.layers)),
            "tokens": sum(len(entry) for entry in self.entries),
            "max_over_mean": round(float(loads.max()) / mean, 3) if mean else None,
            "idle_experts": int((loads == 0).sum()),
        }


def write_trace(path: Path, trace: RouterTrace) -> None:
    """Write a trace; an existing file is replaced.

    Raises:
        ConfigError: more experts than 16 bits can number.
    """
    if trace.num_experts > MAX_EXPERTS:
        raise ConfigError(f"num_experts is {trace.num_experts}; a trace holds up to {MAX_EXPERTS}")
    header = {
        "format": FORMAT,
        "num_experts": trace.num_experts,
        "num_topk": trace.num_topk,
        "ep_size": trace.ep_size,
        "source": trace.source,
    }
    arrays: dict[str, Any] = {
        "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
        "layer": np.asarray(trace.layers, dtype=np.int32),
        "rank": np.asarray(trace.ranks, dtype=np.int32),
    }
    for number, entry in enumerate(trace.entries):
        arrays[f"entry_{number}"] = entry.numpy().astype(np.int16)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_trace(path: Path) -> RouterTrace:
    """Read a trace.

    Raises:
        ConfigError: no file, no trace of this format, or an expert outside [-1, E).
    """
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise ConfigError(f"router trace {path} {what}; give {_SOURCE}")
    if not zipfile.is_zipfile(path):
        raise ConfigError(f"{path} is no router trace, as it is no .npz archive; give {_SOURCE}")
    try:
        trace, entries = _read_archive(path)
    except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} is no router trace ({reason}); give {_SOURCE}") from error
    for number, entry in enumerate(entries):
        if entry.shape[1:] != (trace.num_topk,):
            raise ConfigError(f"{path}: entry {number} has shape {entry.shape}, not [T, K]")
        if bool(((entry < -1) | (entry >= trace.num_experts)).any()):
            raise ConfigError(f"{path}: entry {number} names an expert outside the model's")
        trace.entries.append(torch.from_numpy(entry))
    return trace


def _read_archive(path: Path) -> tuple[RouterTrace, list[NDArray[np.int64]]]:
    """A trace without its entries, and the entries, unchecked."""
    with np.load(path, allow_pickle=False) as archive:
        header = json.loads(archive["header"].tobytes())
        if header["format"] != FORMAT:
            raise ConfigError(
                f"{path} has trace format {header['format']}; this version reads {FORMAT}"
            )
        trace = RouterTrace(
            num_experts=int(header["num_experts"]),
            num_topk=int(header["num_topk"]),
            ep_size=int(header["ep_size"]),
            source=str(header["source"]),
            layers=archive["layer"].tolist(),
            ranks=archive["rank"].tolist(),
        )
        count = range(len(trace.layers))
        return trace, [archive[f"entry_{number}"].astype(np.int64) for number in count]


def merge_traces(traces: list[RouterTrace]) -> RouterTrace:
    """Put the files of a run's ranks together.

    Raises:
        ConfigError: they are not of one model.
    """
    merged = RouterTrace(
        num_experts=traces[0].num_experts,
        num_topk=traces[0].num_topk,
        ep_size=traces[0].ep_size,
        source=traces[0].source,
    )
    for trace in traces:
        same = (trace.num_experts, trace.num_topk, trace.ep_size)
        if same != (merged.num_experts, merged.num_topk, merged.ep_size):
            raise ConfigError(
                f"traces of different models: num_experts, num_topk, ep_size {same} and "
                f"{(merged.num_experts, merged.num_topk, merged.ep_size)}"
            )
        merged.entries += trace.entries
        merged.layers += trace.layers
        merged.ranks += trace.ranks
    return merged
