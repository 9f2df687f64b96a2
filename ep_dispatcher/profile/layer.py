"""One MoE layer, forward and backward: Megatron's dispatcher, ours, and ours in chunks.

    torchrun --nproc-per-node 4 -m ep_dispatcher.profile.layer --config configs/overlap_layer.yaml

All variants have the same weights and tokens and take turns in every round. Times are of the
slowest rank of a round; `hidden_fraction` is the part of the communication's time during which the
experts of the same rank, shared ones among them, ran too. A variant "chunksN serial" has the chunks
but one stream: the speed of its experts is what those of "chunksN" are compared with. With
`--delayed`, variants "... delayed" compute the experts' weight gradients beside the backward of
dispatch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.bench.results import ResultLog, log_of_module, summarise_times
from ep_dispatcher.device import DeviceBackend
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.launch import OK
from ep_dispatcher.megatron.options import OverlapOptions
from ep_dispatcher.profile.clock import (
    COMMUNICATION,
    Clock,
    ClockedBackend,
    Span,
    hidden_ms,
    max_connections,
    stamp_maker,
    total_ms,
)
from ep_dispatcher.profile.lines import layer_fields, sharing_of
from ep_dispatcher.profile.watch import Tell, Watch, add_limit, positive
from ep_dispatcher.train.config import TrainConfig, load_config
from ep_dispatcher.train.progress import say
from ep_dispatcher.train.runtime import Runtime, open_runtime

EXPERTS = ("experts", "experts_backward")
COMPUTE = (*EXPERTS, "shared_experts", "shared_experts_backward")
_WARM_UP = 3


@dataclass(eq=False)
class Variant:
    """A layer to be timed.

    Attributes:
        name: shown.
        layer: Megatron's module.
        plugin: of ours; None for Megatron's dispatcher.
        clock: records its phases.
        times_ms: forward and backward of each round.
        spans: of one round.
        peak_bytes: device memory in use beyond what is before a step, rows in our arena included.
        difference: of its output from the first variant's, relative (2-norm).
        error: why there is no result.
    """

    name: str
    layer: Any
    plugin: Any
    clock: Clock
    times_ms: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    spans: list[Span] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    difference: float = 0.0
    error: str = ""


class LayerBench:
    """Builds the variants and runs them in turn; all methods are collective.

    Args:
        config: one layer, its sizes and layout.
        runtime: this rank.
        chunks: numbers of chunks to try.
        delayed: try each with delayed weight gradients too.
        serial: try each on one stream too.
        tell: is told each phase as it begins.
    """

    def __init__(
        self,
        config: TrainConfig,
        runtime: Runtime,
        chunks: Sequence[int],
        *,
        delayed: bool = False,
        serial: bool = True,
        tell: Tell,
    ) -> None:
        """Build all variants over the weights of the first, which they share."""
        self._config, self._runtime, self._tell = config, runtime, tell
        self._pools: dict[bool, Any] = {}  # an arena belongs to the stream that used it first
        self._weights: list[Tensor] = []
        self.variants = [self._build("alltoall", None), self._build("ours", self._options(1))]
        for number in chunks:
            for name in (f"chunks{number}", f"chunks{number} serial")[: 1 + serial]:
                self.variants.append(self._build(name, self._options(number)))
        if delayed:
            self.variants.append(self._build("ours delayed", self._options(1)))
            for number in chunks:
                self.variants.append(self._build(f"chunks{number} delayed", self._options(number)))
        torch.manual_seed(config.train.seed + 1 + runtime.rank)
        shape = (config.model.seq_length, config.train.micro_batch, config.model.hidden)
        dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        self._x = torch.randn(shape, device=runtime.device, dtype=dtype).requires_grad_()
        self._grad = torch.randn(shape, device=runtime.device, dtype=dtype)

    def run(self, rounds: int) -> None:
        """Check each variant against the first, warm up, time, and record one round of each."""
        self._tell("the first variant's output")
        first = self._output(self.variants[0])
        for variant in self.variants:
            self._tell(f"{variant.name}: output and {_WARM_UP} steps to warm up")
            self._warm_up(variant, first)
        running = [variant for variant in self.variants if not variant.error]
        for index in range(rounds):
            self._tell(f"round {index + 1} of {rounds} of all variants")
            for variant in running:
                variant.times_ms.append(self._step(variant))
        for variant in running:
            self._tell(f"{variant.name}: memory and phases of a step")
            self._measure_memory(variant)
            dist.barrier()
            variant.clock.start()
            self._step(variant)
            variant.spans = variant.clock.stop()

    def _warm_up(self, variant: Variant, first: Tensor) -> None:
        """Compare with the first output and run some steps; note why where that cannot be done.

        Ranks agree after each of these, so that a variant runs on all of them or on none. Those
        that wait inside a call for the rank that failed come here when that call's deadline has
        passed; Megatron's own calls have NCCL's.
        """

        def compare() -> None:
            variant.difference = _relative(self._output(variant), first)

        def step() -> None:
            self._step(variant)

        for attempt in (compare, *[step] * _WARM_UP):
            variant.error = _first_error(attempt)
            if variant.error:
                return

    def close(self) -> None:
        """Close the groups."""
        for pool in self._pools.values():
            pool.close()

    def _options(self, chunks: int) -> Any:  # noqa: ANN401
        return dataclasses.replace(
            self._config.ep_dispatcher, overlap=OverlapOptions(chunks=chunks)
        )

    def _build(self, name: str, options: Any) -> Variant:  # noqa: ANN401
        """A layer with its clock; ours share the groups of those with as many streams."""
        self._tell(f"{name}: building the layer")
        from ep_dispatcher.megatron.plugin import EpPlugin, with_ep_dispatcher
        from ep_dispatcher.train.model import block_spec, make_megatron_config

        train = dataclasses.replace(
            self._config.train,
            dispatcher="alltoall" if options is None else "ep_dispatcher",
            delay_weight_gradients=name.endswith("delayed"),
        )
        config = dataclasses.replace(self._config, train=train)
        megatron_config = make_megatron_config(config, self._runtime)
        spec, plugin = block_spec(config, megatron_config, self._runtime), None
        if options is not None:
            plugin = EpPlugin(options)
            two_streams = options.overlap.chunks != 1 and not name.endswith("serial")
            plugin.pool = self._pools.setdefault(two_streams, plugin.pool)
            spec = with_ep_dispatcher(spec, plugin)
            if name.endswith("serial") and self._runtime.on_gpu:
                plugin._communication = torch.cuda.current_stream()
        layer = self._make_layer(spec.layer_specs[-1].submodules.mlp, megatron_config)
        clock = Clock(stamp_maker(on_gpu=self._runtime.on_gpu))
        _clock_layer(layer, clock, delayed=train.delay_weight_gradients, ours=options is not None)
        return Variant(name, layer, plugin, clock)

    def _make_layer(self, mlp: Any, megatron_config: Any) -> Any:  # noqa: ANN401
        """The layer that a spec describes, over the weights of the first."""
        from megatron.core.transformer.spec_utils import build_module

        torch.manual_seed(self._config.train.seed)
        if callable(mlp):
            layer = mlp(config=megatron_config)
        else:
            layer = build_module(mlp, config=megatron_config)
        layer.set_layer_number(1)
        layer = layer.to(self._runtime.device)
        if megatron_config.bf16:
            layer = layer.bfloat16()
        self._weights = self._weights or list(layer.parameters())
        for own, given in zip(layer.parameters(), self._weights, strict=True):
            own.data = given.data
        return layer

    def _clock_backend(self, variant: Variant) -> None:
        """Record the calls of our tier with the clock of the variant that is running."""
        if variant.plugin is None:
            return
        for lease in variant.plugin.pool._leases.values():
            backend = lease.group._backend
            if not isinstance(backend, ClockedBackend):
                lease.group._backend = ClockedBackend(backend, variant.clock)
            lease.group._backend.clock = variant.clock

    def _output(self, variant: Variant) -> Tensor:
        with torch.no_grad():
            out: Tensor = variant.layer(self._x)[0]
        return out

    def _step(self, variant: Variant) -> tuple[float, float]:
        """Forward and backward once, no gradient is kept; returns their times in ms."""
        self._clock_backend(variant)
        self._runtime.settle()
        make = stamp_maker(on_gpu=self._runtime.on_gpu)
        stamps: list[Any] = [make() for _ in range(3)]
        stamps[0].record()
        out, _ = variant.layer(self._x)
        stamps[1].record()
        out.backward(self._grad)
        stamps[2].record()
        if self._runtime.on_gpu:
            torch.cuda.synchronize()
        self._x.grad = None
        for parameter in variant.layer.parameters():
            parameter.grad = None
        return stamps[0].elapsed_time(stamps[1]), stamps[1].elapsed_time(stamps[2])

    def _measure_memory(self, variant: Variant) -> None:
        """Peak of a step beyond what is held before it; 0 on the CPU, where nothing counts it."""
        if not self._runtime.on_gpu:
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._step(variant)
        variant.peak_bytes = torch.cuda.max_memory_allocated() - before


def _clock_layer(layer: Any, clock: Clock, *, delayed: bool, ours: bool) -> None:  # noqa: ANN401
    """Record the phases of a layer; communication of ours is clocked at its backend.

    Args:
        layer: Megatron's module.
        clock: gets the phases.
        delayed: whether the experts' weight gradients are computed apart.
        ours: whether the dispatcher is.
    """
    layer.experts.forward = clock.wrap("experts", layer.experts.forward)
    if layer.shared_experts is not None:
        shared = layer.shared_experts
        shared.forward = clock.wrap("shared_experts", shared.forward)
    if delayed:
        layer.experts.backward_dw = clock.wrap("experts_backward", layer.experts.backward_dw)
    if not ours:
        steps = layer.token_dispatcher
        steps.token_dispatch = clock.wrap("dispatch", steps.token_dispatch)
        steps.token_combine = clock.wrap("combine", steps.token_combine)


def _first_error(attempt: Callable[[], None]) -> str:
    """Try something on all ranks; returns the first rank's error, to all; empty if it went well."""
    mine = ""
    try:
        attempt()
    except Exception as error:  # noqa: BLE001  the other variants are measured all the same
        mine = f"{type(error).__name__}: {error}"
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return next((f"rank {rank}: {error}" for rank, error in enumerate(told) if error), "")


def summarise(variant: Variant, runtime: Runtime) -> dict[str, Any]:
    """What a variant showed over all ranks; collective. Empty but on the first rank."""
    own = {
        "forward": [each[0] for each in variant.times_ms],
        "backward": [each[1] for each in variant.times_ms],
        "step": [sum(each) for each in variant.times_ms],
        "communication_ms": total_ms(variant.spans, COMMUNICATION),
        "hidden_ms": hidden_ms(variant.spans, COMMUNICATION, COMPUTE),
        "experts_ms": total_ms(variant.spans, EXPERTS),
        "phases_ms": {
            name: round(total_ms(variant.spans, (name,)), 4)
            for name in sorted({span.name for span in variant.spans})
        },
        "peak_bytes": variant.peak_bytes,
        "difference": variant.difference,
    }
    told: list[Any] = [None] * runtime.num_ranks
    dist.all_gather_object(told, own)
    if not runtime.is_first:
        return {}
    communication = sum(each["communication_ms"] for each in told)
    return {
        "times_us": {
            phase: summarise_times(
                [max(ranks) * 1e3 for ranks in zip(*(each[phase] for each in told), strict=True)]
            )
            for phase in ("forward", "backward", "step")
        },
        "hidden_fraction": round(sum(each["hidden_ms"] for each in told) / communication, 4)
        if communication
        else None,
        "communication_us": round(communication / len(told) * 1e3, 1),
        "experts_us": round(sum(each["experts_ms"] for each in told) / len(told) * 1e3, 1),
        "phases_us_rank0": {name: value * 1e3 for name, value in told[0]["phases_ms"].items()},
        "peak_bytes": max(each["peak_bytes"] for each in told),
        "difference": max(each["difference"] for each in told),
    }


def record(
    summaries: dict[str, dict[str, Any]], config: TrainConfig, log: ResultLog, experts: str
) -> None:
    """Append three lines a variant: forward, backward, and both."""
    serial = {name: each["experts_us"] for name, each in summaries.items()}
    for name, found in summaries.items():
        slow_down = None
        if serial.get(f"{name} serial"):
            slow_down = round(found["experts_us"] / serial[f"{name} serial"], 4)
        for phase, times in found["times_us"].items():
            log.write(
                sharing=sharing_of(config),
                suite="overlap",
                backend="megatron/alltoall" if name == "alltoall" else found["backend"],
                variant=name,
                phase="step" if phase == "step" else f"layer_{phase}",
                layout="expert_major",
                experts=experts,
                domains=1,
                **layer_fields(config),
                checked=found["difference"] < 1e-2,
                difference=found["difference"],
                **times,
                max_connections=max_connections(),
                hidden_fraction=found["hidden_fraction"],
                communication_us=found["communication_us"],
                experts_us=found["experts_us"],
                gemm_slow_down=slow_down,
                phases_us_rank0=found["phases_us_rank0"],
                peak_bytes=found["peak_bytes"] or None,
                arena_bytes=found.get("arena_bytes"),
            )


def main(words: Sequence[str]) -> int:
    """Be one rank of the measurement; returns the exit code."""
    config, args = read_config(words), _parser().parse_args(words)
    with Watch(args.out, args.limit) as watch:
        runtime = open_runtime(config)
        measure(words, config, runtime, watch)
        dist.barrier()
        dist.destroy_process_group()
    return OK


def read_config(words: Sequence[str]) -> TrainConfig:
    """The config that a command line names.

    Raises:
        ConfigError: a bad config, or one of more than one layer.
    """
    args = _parser().parse_args(words)
    config = load_config(args.config, args.overrides)
    if config.model.num_layers != 1:
        raise ConfigError(f"model.num_layers is {config.model.num_layers}; this measures 1 layer")
    return config


def measure(words: Sequence[str], config: TrainConfig, runtime: Runtime, tell: Tell) -> None:
    """Time all variants and record them; collective.

    Args:
        words: the command line.
        config: that it names.
        runtime: this rank.
        tell: is told each phase as it begins.
    """
    tell("reading Megatron's modules")
    args = _parser().parse_args(words)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from ep_dispatcher.train.model import initialize_groups

    initialize_groups(config)
    model_parallel_cuda_manual_seed(config.train.seed)
    chunks = [int(number) for number in args.chunks.split(",") if number]
    serial = not args.no_serial
    bench = LayerBench(config, runtime, chunks, delayed=args.delayed, serial=serial, tell=tell)
    bench.run(args.rounds)
    log = log_of_module(args.out, "ep_dispatcher.profile.layer", words)
    _report(bench, config, runtime, log)
    if args.spans is not None:
        _write_spans(bench, runtime, args.spans)
    bench.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ep_dispatcher.profile.layer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--out", type=Path, default=Path("docs/results/overlap.jsonl"))
    parser.add_argument("--spans", type=Path, help="JSON file for the phases of each rank")
    parser.add_argument("--rounds", type=positive, default=10)
    add_limit(parser)
    parser.add_argument("--chunks", default="2,4", help="numbers of chunks, with commas")
    parser.add_argument("--no-serial", action="store_true", help="no variants on one stream")
    parser.add_argument(
        "--delayed", action="store_true", help="try delayed weight gradients (on a GPU with TE)"
    )
    return parser


def _report(bench: LayerBench, config: TrainConfig, runtime: Runtime, log: ResultLog) -> None:
    """Record all variants and print a line for each."""
    summaries = {}
    for variant in bench.variants:
        if variant.error:
            if runtime.is_first:
                say(f"{variant.name}: no result: {variant.error}")
            continue
        found = summarise(variant, runtime)
        if variant.plugin is not None and found:
            tiers = {lease.group.tier for lease in variant.plugin.pool._leases.values()}
            found["backend"] = "ep_dispatcher/" + "+".join(sorted(tiers))
            found["arena_bytes"] = _arena_bytes(variant)
        summaries[variant.name] = found
    if not runtime.is_first:
        return
    experts = type(bench.variants[0].layer.experts).__name__
    record(summaries, config, log, experts)
    say(f"one layer, experts {experts}, {runtime.describe()}; ms, slowest rank, median")
    for name, found in summaries.items():
        times = {phase: each["median_us"] / 1e3 for phase, each in found["times_us"].items()}
        say(
            f"{name:16s} forward {times['forward']:8.3f} backward {times['backward']:8.3f} "
            f"step {times['step']:8.3f}  communication {found['communication_us'] / 1e3:7.3f} "
            f"hidden {found['hidden_fraction']}  experts {found['experts_us'] / 1e3:8.3f}  "
            f"peak {found['peak_bytes'] / 1e9:.3f} GB  difference {found['difference']:.1e}"
        )


def _arena_bytes(variant: Variant) -> int | None:
    """What our groups hold for rows whether or not there are any; None off the device tier."""
    backends = [lease.group._open_backend() for lease in variant.plugin.pool._leases.values()]
    sizes = [each.heap_bytes for each in backends if isinstance(each, DeviceBackend)]
    return sum(sizes) if sizes else None


def _write_spans(bench: LayerBench, runtime: Runtime, path: Path) -> None:
    """The recorded round of every variant on every rank, for pictures."""
    own = {each.name: [list(span) for span in each.spans] for each in bench.variants}
    told: list[Any] = [None] * runtime.num_ranks
    dist.all_gather_object(told, own)
    if runtime.is_first:
        path.write_text(json.dumps(told))


def _relative(values: Tensor, other: Tensor) -> float:
    """Size of a difference relative to the second (2-norms)."""
    size = other.float().norm()
    return float((values.float() - other.float()).norm() / size)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
