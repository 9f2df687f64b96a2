"""Time the kernels of several domains with all ranks as one launch on one GPU, over LoopNet.

    python -m ep_dispatcher.bench.rails_one_gpu --out results.jsonl

No network is in it: a put is a copy inside the GPU. What it tells is what the kernels themselves
cost. Every setting is first compared with the specification, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ep_dispatcher.bench.kernels_one_gpu import time_rounds_us
from ep_dispatcher.bench.one_gpu import WorldShape, load_kernels
from ep_dispatcher.bench.one_gpu_spec import assert_same_bits, make_round
from ep_dispatcher.bench.rail_world import RailWorld
from ep_dispatcher.bench.results import ResultLog, log_of_module, summarise_times
from ep_dispatcher.routing import RoutingSpec, make_topk_idx

_SWEEP_BYTES = 256 << 20  # several times the L2


@dataclass(frozen=True, kw_only=True)
class RailSetting:
    """One line of the table: `num_sms` blocks of each rank serve its domain, `num_blocks` rails."""

    num_domains: int
    domain_size: int
    num_sms: int
    num_blocks: int
    hidden: int = 7168
    num_topk: int = 8
    num_experts: int = 256
    num_tokens: int = 1024


SETTINGS = [
    RailSetting(num_domains=domains, domain_size=size, num_sms=sms, num_blocks=blocks)
    for domains, size in ((2, 4), (4, 2))
    for sms, blocks in ((12, 2), (12, 4), (8, 8))
]


class RailBench:
    """A setting's world and the calls of one round.

    Args:
        setting: what to run.
        kernels: the extension module.
    """

    def __init__(self, setting: RailSetting, kernels: object) -> None:
        """Make inputs and plans."""
        self.setting = setting
        ranks = setting.num_domains * setting.domain_size
        copies = setting.num_tokens * setting.num_topk
        self.world = RailWorld(
            WorldShape(
                ep_size=ranks,
                num_experts=setting.num_experts,
                num_topk=setting.num_topk,
                hidden=setting.hidden,
                max_tokens=setting.num_tokens,
                num_channels=setting.num_sms,
                ring_depth=16,
                output_bytes=copies * 5 // 4 * (2 * setting.hidden + 4),
            ),
            setting.domain_size,
            kernels,
            num_blocks=setting.num_blocks,
        )
        spec = RoutingSpec(
            name="uniform", num_experts=setting.num_experts, num_topk=setting.num_topk
        )
        routing = [make_topk_idx(spec, setting.num_tokens, rank) for rank in range(ranks)]
        self.work = make_round(self.world, routing)
        plans = [self.world.new_rail_plan(rank, *topk.shape) for rank, topk in enumerate(routing)]
        self.outputs = self.world.new_outputs(self.work.rows, weights=True)
        self.out = [torch.full_like(rows, float("nan")) for rows in self.work.x]
        combines, returns = self.world.rail_combine_calls(plans, self.work.expert_out, self.out)
        self.calls: dict[str, tuple[str, list[Any]]] = {
            "plan_exchange": (
                "rail_exchange",
                self.world.rail_plan_calls(plans, self.work.topk_idx),
            ),
            "plan_counts": ("rail_counts", self.world.rail_plan_calls(plans, self.work.topk_idx)),
            "plan_route": ("route", self.world.virtual_route_calls(plans)),
            "dispatch": (
                "rail_dispatch",
                self.world.rail_dispatch_calls(
                    plans, self.work.x, self.work.topk_weights, self.outputs
                ),
            ),
            "combine_domain": ("combine", combines),
            "combine_return": ("rail_return", returns),
        }
        self.sweep = torch.empty(_SWEEP_BYTES, dtype=torch.uint8, device=self.world.device)

    def run(self, phase: str) -> None:
        """Launch one kernel for all ranks."""
        name, calls = self.calls[phase]
        self.world.launch(name, calls)

    def check(self) -> None:
        """Compare one round with the specification.

        Raises:
            AssertionError: a bit differs.
        """
        for phase in self.calls:
            self.run(phase)
        for rank, (recv_x, _) in enumerate(self.outputs):
            assert_same_bits("recv_x", recv_x, self.work.recv_x[rank])

    def check_sums(self) -> None:
        """Compare the sums of the last round with the specification.

        Raises:
            AssertionError: a bit differs.
        """
        for rank, out in enumerate(self.out):
            assert_same_bits("out", out, self.work.out[rank])

    def rail_rows(self) -> int:
        """Rows that one rank sends to other domains, on average."""
        total = 0
        for rank, plan in enumerate(self.work.plans):
            domain = plan.dst_rank // self.setting.domain_size
            for other in range(self.setting.num_domains):
                if other != rank // self.setting.domain_size:
                    total += int((domain == other).any(1).sum())
        return total // len(self.work.plans)

    def payload_bytes(self, phase: str) -> tuple[int, int]:
        """Bytes that a rank's rail blocks carry, and those that its domain blocks store."""
        row_bytes = 2 * self.setting.hidden
        copies = self.setting.num_tokens * self.setting.num_topk
        rails = self.rail_rows() * row_bytes
        return {
            "dispatch": (rails, copies * row_bytes),
            "combine_domain": (0, copies * row_bytes),
            "combine_return": (rails, self.setting.num_tokens * row_bytes),
        }.get(phase, (0, 0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all settings, print a table, append one line for each phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines file to append to")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each rank")
    parser.add_argument("--kernels", default="ep_kernels", help="module to time")
    options = parser.parse_args(arguments)
    log = log_of_module(options.out, "ep_dispatcher.bench.rails_one_gpu", arguments or sys.argv[1:])
    kernels = load_kernels(options.kernels)
    for setting in SETTINGS:
        bench = RailBench(RailSetting(**(vars(setting) | {"num_tokens": options.tokens})), kernels)
        _report(bench, log, options.rounds)
        del bench
        torch.cuda.empty_cache()
    return 0


def _report(bench: RailBench, log: ResultLog | None, rounds: int) -> None:
    bench.check()
    bench.check_sums()
    setting = bench.setting
    cells = []
    for phase in bench.calls:
        times = summarise_times(
            time_rounds_us(lambda phase=phase: bench.run(phase), rounds, bench.sweep)  # type: ignore[misc]
        )
        median = float(times["median_us"])
        rails, stored = bench.payload_bytes(phase)
        per_token = 1000 * median / setting.num_tokens
        cells.append(f"{phase} {median:.0f} us ({per_token:.0f} ns a token)")
        if log:
            log.write(
                sharing="one launch",
                suite="rails",
                backend="ep_dispatcher/device",
                phase=phase,
                layout="expert_major",
                ranks=setting.num_domains * setting.domain_size,
                domains=setting.num_domains,
                num_sms=setting.num_sms,
                rail_blocks=setting.num_blocks,
                num_tokens=setting.num_tokens,
                hidden=setting.hidden,
                num_topk=setting.num_topk,
                num_experts=setting.num_experts,
                dtype="bfloat16",
                routing="uniform",
                net="loop",
                seed=0,
                checked=True,
                ns_per_token=round(per_token, 1),
                rail_GBps_per_block=round(rails / median / 1e3 / setting.num_blocks, 2),
                domain_GBps_per_sm=round(stored / median / 1e3 / setting.num_sms, 2),
                **times,
            )
    print(  # noqa: T201
        f"D x L={setting.num_domains}x{setting.domain_size} T={setting.num_tokens} "
        f"SMs={setting.num_sms}+{setting.num_blocks}: " + " | ".join(cells),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
