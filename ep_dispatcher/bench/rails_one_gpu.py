"""Time the kernels of several domains with all ranks as one launch on one GPU, over LoopNet.

    python -m ep_dispatcher.bench.rails_one_gpu --out results.jsonl

No network is in it: a put is a copy inside the GPU, which the putting warp makes. What it tells is
what the kernels themselves cost. Every setting is first compared with the specification, bit for
bit.

Each round is a plan, a dispatch, the same dispatch again as two launches (send, then forward), and
a combine, with events around each launch. The two tell what a role takes alone. What roles take
while they share a launch comes from the module for tests, whose blocks note when they began and
ended and what their warps waited (RoleClock in csrc/kernels/rail.cuh).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher.bench.kernels_one_gpu import sweep_before_launch
from ep_dispatcher.bench.one_gpu import WorldShape, load_kernels
from ep_dispatcher.bench.one_gpu_spec import assert_same_bits, make_round
from ep_dispatcher.bench.rail_world import RailWorld
from ep_dispatcher.bench.results import ResultLog, log_of_module, summarise_times
from ep_dispatcher.errors import UnavailableError
from ep_dispatcher.routing import RoutingSpec, make_topk_idx

_SWEEP_BYTES = 256 << 20  # several times the L2
_WARM_UP = 3
SPLIT = ("dispatch_send", "dispatch_forward")  # of a second dispatch
_WARPS = 8  # of a block, in every role at this width
_COLUMNS = ("waiting", "making", "putting")  # of RailWorld.role_times, from the fourth on


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
    net: str = "loop"


SETTINGS = [
    RailSetting(num_domains=domains, domain_size=size, num_sms=sms, num_blocks=blocks)
    for domains, size, sms, blocks in (
        (2, 4, 12, 4),
        (2, 4, 12, 2),
        (2, 4, 8, 8),
        (2, 4, 4, 1),  # so few that they do not wait for the GPU's memory
        (4, 2, 12, 4),
        (4, 2, 4, 1),
    )
]
_CROSSES = ("dispatch_send", "combine_return")  # what rail blocks alone bring forward


@dataclass(frozen=True, kw_only=True)
class Role:
    """What one rank's blocks of one role did in a launch.

    Attributes:
        us: from the begin of the first block to the end of the last.
        blocks: that have this role.
        moved_bytes: that they stored or put, of row data.
        shares: of their warps' time, by what they did.
    """

    us: float
    blocks: int
    moved_bytes: int
    shares: dict[str, float]

    @property
    def gb_s_per_block(self) -> float:
        """While the role ran, waits included."""
        return self.moved_bytes / self.us / 1e3 / self.blocks


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
            net=setting.net,
            num_blocks=setting.num_blocks,
        )
        spec = RoutingSpec(
            name="uniform", num_experts=setting.num_experts, num_topk=setting.num_topk
        )
        routing = [make_topk_idx(spec, setting.num_tokens, rank) for rank in range(ranks)]
        self.work = make_round(self.world, routing)
        # Kept, as the calls hold no more than addresses.
        self.plans = [
            self.world.new_rail_plan(rank, *topk.shape) for rank, topk in enumerate(routing)
        ]
        self.outputs = self.world.new_outputs(self.work.rows, weights=True)
        self.out = [torch.full_like(rows, float("nan")) for rows in self.work.x]
        self.calls = self._make_calls()
        self.sweep = torch.empty(_SWEEP_BYTES, dtype=torch.uint8, device=self.world.device)

    def _make_calls(self) -> dict[str, tuple[str, list[Any]]]:
        """Kernel and arguments of each phase, in the order of a round."""
        world, work, plans = self.world, self.work, self.plans
        combines, returns = world.rail_combine_calls(plans, work.expert_out, self.out)
        planning = world.rail_plan_calls(plans, work.topk_idx)
        return {
            "plan_exchange": ("rail_exchange", planning),
            "plan_counts": ("rail_counts", planning),
            "plan_route": ("route", world.virtual_route_calls(plans)),
            "dispatch": (
                "rail_dispatch",
                world.rail_dispatch_calls(plans, work.x, work.topk_weights, self.outputs),
            ),
            "dispatch_send": (
                "rail_send",
                world.rail_send_calls(work.topk_idx, work.x, work.topk_weights),
            ),
            "dispatch_forward": (
                "rail_dispatch",
                world.rail_dispatch_calls(
                    plans, work.x, work.topk_weights, self.outputs, sent=True
                ),
            ),
            "combine_domain": ("combine", combines),
            "combine_return": ("rail_return", returns),
        }

    def run(self, phase: str) -> None:
        """Launch one kernel for all ranks."""
        name, calls = self.calls[phase]
        self.world.launch(name, calls)

    def check(self) -> None:
        """Run a round and compare it with the specification.

        Raises:
            AssertionError: a bit differs.
        """
        for phase in self.calls:
            self._poison(phase)
            self.run(phase)
            if phase in ("dispatch", "dispatch_forward"):
                self.compare_rows()
        self.compare_sums()

    def _poison(self, phase: str) -> None:
        """Overwrite what a phase is to write."""
        if phase in ("dispatch", "dispatch_forward"):
            for recv_x, _ in self.outputs:
                recv_x.fill_(float("nan"))
        elif phase == "combine_domain":
            for out in self.out:
                out.fill_(float("nan"))

    def compare_rows(self) -> None:
        """Compare the rows of the last dispatch with the specification.

        Raises:
            AssertionError: a bit differs.
        """
        for rank, (recv_x, _) in enumerate(self.outputs):
            assert_same_bits("recv_x", recv_x, self.work.recv_x[rank])

    def compare_sums(self) -> None:
        """Compare the sums of the last combine with the specification.

        Raises:
            AssertionError: a bit differs.
        """
        for rank, out in enumerate(self.out):
            assert_same_bits("out", out, self.work.out[rank])

    def time_us(self, rounds: int) -> dict[str, list[float]]:
        """Event times of each phase inside whole rounds, the L2 swept before each."""
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]
        events = {phase: [] for phase in self.calls}
        for _ in range(rounds + _WARM_UP):
            for phase, pairs in events.items():
                start = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                sweep_before_launch(self.sweep)
                start.record()
                self.run(phase)
                end.record()
                pairs.append((start, end))
        torch.cuda.synchronize()
        return {
            phase: [1000 * start.elapsed_time(end) for start, end in pairs[_WARM_UP:]]
            for phase, pairs in events.items()
        }

    def time_roles(self, rounds: int) -> dict[str, Role]:
        """Roles of dispatch and of the return: medians over rounds of means over ranks.

        Of a module for tests, in rounds as `time_us` has them.
        """
        seen: dict[str, list[Role]] = {}
        for _ in range(rounds + _WARM_UP):
            for phase in self.calls:
                if phase not in SPLIT:
                    sweep_before_launch(self.sweep)
                    self.run(phase)
            torch.cuda.synchronize()
            for name, role in self._last_roles():
                seen.setdefault(name, []).append(role)
        return {name: _middle(roles[_WARM_UP:]) for name, roles in seen.items()}

    def _last_roles(self) -> Iterator[tuple[str, Role]]:
        setting = self.setting
        row_bytes = 2 * setting.hidden
        copies = setting.num_tokens * setting.num_topk * row_bytes
        crossing, home = self.rail_rows() * row_bytes, setting.num_tokens * row_bytes
        times = [self.world.role_times(rank) for rank in range(self.world.shape.ep_size)]
        dispatch = torch.stack([one for one, _ in times])
        back = torch.stack([one for _, one in times])
        sms, blocks = setting.num_sms, setting.num_blocks
        yield "forward", _role(dispatch[:, :sms], copies)
        yield "send", _role(dispatch[:, sms:], crossing)
        yield "return", _role(back[:, :blocks], crossing)
        yield "receive", _role(back[:, blocks:], home)

    def rail_rows(self) -> int:
        """Rows that one rank sends to other domains, on average."""
        total = 0
        for rank, plan in enumerate(self.work.plans):
            domain = plan.dst_rank // self.setting.domain_size
            for other in range(self.setting.num_domains):
                if other != rank // self.setting.domain_size:
                    total += int((domain == other).any(1).sum())
        return total // len(self.work.plans)


def _role(words: Tensor, moved_bytes: int) -> Role:
    """`words`: [ranks, blocks, 8] of one role."""
    values = words.to(torch.float64)
    spans_ns = values[:, :, 1].amax(1) - values[:, :, 0].amin(1)
    warp_cycles = values[:, :, 2].sum() * _WARPS
    spent = values[:, :, 3:6].sum((0, 1)) / warp_cycles
    return Role(
        us=float(spans_ns.mean()) / 1e3,
        blocks=words.shape[1],
        moved_bytes=moved_bytes,
        shares=dict(zip(_COLUMNS, spent.tolist(), strict=True)),
    )


def _middle(roles: Sequence[Role]) -> Role:
    """The medians of several rounds."""
    shares = {name: median(role.shares[name] for role in roles) for name in _COLUMNS}
    return replace(roles[0], us=median(role.us for role in roles), shares=shares)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all settings, print a table, append one line for each phase and role."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines file to append to")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each rank")
    parser.add_argument("--kernels", default="ep_kernels", help="module to time")
    parser.add_argument(
        "--role-kernels", default="ep_kernels_mutated", help="module for roles; empty: none"
    )
    options = parser.parse_args(arguments)
    words = arguments or sys.argv[1:]
    log = options.out and log_of_module(options.out, "ep_dispatcher.bench.rails_one_gpu", words)
    try:
        kernels = load_kernels(options.kernels)
        role_kernels = load_kernels(options.role_kernels) if options.role_kernels else None
    except UnavailableError as error:
        parser.exit(2, f"rails_one_gpu: error: {error}\n")
    settings = [replace(setting, num_tokens=options.tokens) for setting in SETTINGS]
    for setting in settings:
        _report_phases(setting, kernels, log, options.rounds)
        torch.cuda.empty_cache()
    for setting in settings if role_kernels is not None else ():
        _report_roles(setting, role_kernels, log, options.rounds)
        torch.cuda.empty_cache()
    return 0


def _report_phases(
    setting: RailSetting, kernels: object, log: ResultLog | None, rounds: int
) -> None:
    bench = RailBench(setting, kernels)
    bench.check()
    times = bench.time_us(rounds)
    bench.check()
    cells = []
    for phase, of_rounds in times.items():
        summary = summarise_times(of_rounds)
        per_token = 1000 * float(summary["median_us"]) / setting.num_tokens
        cells.append(f"{phase} {summary['median_us']:.0f} us ({per_token:.0f} ns a token)")
        crossing = bench.rail_rows() if phase in _CROSSES else None
        _write(
            log,
            setting,
            "ep_dispatcher/device",
            phase,
            per_token,
            crossing_rows=crossing,
            **summary,
        )
    _show(setting, cells)


def _report_roles(
    setting: RailSetting, kernels: object, log: ResultLog | None, rounds: int
) -> None:
    bench = RailBench(setting, kernels)
    bench.check()
    launches = bench.time_us(rounds)
    roles = bench.time_roles(rounds)
    bench.check()
    cells = []
    for name, role in roles.items():
        phase = "dispatch" if name in ("forward", "send") else "combine_return"
        launch_us = float(summarise_times(launches[phase])["median_us"])
        per_token = 1000 * role.us / setting.num_tokens
        shares = {f"{what}_share": round(share, 3) for what, share in role.shares.items()}
        _write(
            log,
            setting,
            "ep_dispatcher/device, module for tests",
            f"{phase}/{name}",
            per_token,
            role_us=round(role.us, 1),
            role_blocks=role.blocks,
            moved_bytes=role.moved_bytes,
            GBps_per_block=round(role.gb_s_per_block, 2),
            launch_us=launch_us,
            rounds=rounds,
            **shares,
        )
        cells.append(
            f"{name} {role.us:.0f} of {launch_us:.0f} us, {role.gb_s_per_block:.1f} GB/s a block"
        )
    _show(setting, cells)


def _write(
    log: ResultLog | None,
    setting: RailSetting,
    backend: str,
    phase: str,
    ns_per_token: float,
    **fields: Any,  # noqa: ANN401  # fields of a line
) -> None:
    if log is None:
        return
    log.write(
        sharing="one launch",
        suite="rails",
        backend=backend,
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
        net=setting.net,
        seed=0,
        checked=True,
        ns_per_token=round(ns_per_token, 1),
        **fields,
    )


def _show(setting: RailSetting, cells: Sequence[str]) -> None:
    print(  # noqa: T201
        f"D x L={setting.num_domains}x{setting.domain_size} T={setting.num_tokens} "
        f"SMs={setting.num_sms}+{setting.num_blocks}: " + " | ".join(cells),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
