"""What the links between the GPUs of one host carry: copy engines only, no library on top.

    python -m ep_dispatcher.bench.gpu_links --out ceiling.jsonl

One process drives all GPUs. Each of them sends a part to every other one at the same time, as an
all-to-all does; the figure is what leaves a GPU. With one GPU it is a copy inside its memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ep_dispatcher.bench.results import ResultLog

_ROUNDS = 12
_PART_BYTES = 128 << 20


def measure_links(num_gpus: int, part_bytes: int = _PART_BYTES) -> float:
    """GB/s that leave one GPU while all send to all; the best round.

    Args:
        num_gpus: the first so many GPUs take part.
        part_bytes: for each pair of GPUs.
    """
    gpus = range(num_gpus)
    pairs = [(a, b) for a in gpus for b in gpus if a != b] or [(0, 0)]
    streams = {pair: torch.cuda.Stream(pair[0]) for pair in pairs}
    sources = {a: torch.ones(part_bytes, dtype=torch.uint8, device=f"cuda:{a}") for a in gpus}
    targets = {
        pair: torch.empty(part_bytes, dtype=torch.uint8, device=f"cuda:{pair[1]}") for pair in pairs
    }

    def send_all() -> None:
        for pair in pairs:
            with torch.cuda.stream(streams[pair]):
                targets[pair].copy_(sources[pair[0]], non_blocking=True)

    sent = part_bytes * max(num_gpus - 1, 1)
    return sent / min(_seconds(send_all, num_gpus) for _ in range(_ROUNDS)) / 1e9


def _seconds(work: Callable[[], None], num_gpus: int) -> float:
    """Wall time of enqueued work on all GPUs; long enough for the host's share not to matter."""
    for gpu in range(num_gpus):
        torch.cuda.synchronize(gpu)
    start = time.perf_counter()
    work()
    for gpu in range(num_gpus):
        torch.cuda.synchronize(gpu)
    return time.perf_counter() - start


def main(words: list[str]) -> int:
    """Measure, print, and append one line."""
    parser = argparse.ArgumentParser(description="Measure the links between the GPUs of this host.")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file to append to")
    args = parser.parse_args(words)
    rate = measure_links(args.gpus)
    kind = "link" if args.gpus > 1 else "memory"
    log = ResultLog(args.out, ["python", "-m", "ep_dispatcher.bench.gpu_links", *words])
    log.write(
        sharing="one per gpu",
        suite="ceiling",
        backend="copy engines",
        ranks=args.gpus,
        ceiling=kind,
        ceiling_GBps=round(rate, 1),
    )
    sys.stdout.write(f"{args.gpus} GPUs: {rate:.0f} GB/s leave each one ({kind})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
