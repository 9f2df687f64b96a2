"""What the ranks of the device tests do. Each function runs on every rank of a ProcessWorld."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher import (
    AgreementError,
    CapacityError,
    EpConfig,
    EPGroup,
    MoeShape,
    Plan,
    RoutingError,
    ShapeError,
    Tuning,
)
from ep_dispatcher.device import DeviceBackend
from ep_dispatcher.memory import persistent_bytes

PLAN_FIELDS = (
    "counts",
    "dst_rank",
    "dst_row",
    "tokens_per_expert",
    "padded_tokens_per_expert",
    "expert_offsets",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One world: sizes, routing and mode; the same on all ranks. Rank r has tokens[r % len]."""

    kind: str = "uniform"
    tokens: tuple[int, ...] = (64, 64, 64, 64)
    hidden: int = 256
    num_topk: int = 2
    num_experts: int = 16
    dtype: str = "bfloat16"
    alignment: int = 1
    precision: str = "rounded"
    capacity: int | None = None
    num_sms: int = 4
    timeout_s: float = 5.0
    output_bytes: int | None = None
    duplicates: str = "auto"
    combine: str = "auto"
    seed: int = 0

    def config(self, tier: str) -> EpConfig:
        """The config of a group of that tier."""
        shape = MoeShape(
            hidden=self.hidden,
            num_topk=self.num_topk,
            num_experts=self.num_experts,
            dtype=self.dtype,
        )
        return EpConfig(
            shape=shape,
            max_tokens_per_rank=max(self.tokens),
            alignment=self.alignment,
            recv_capacity_rows=self.capacity,
            precision=self.precision,  # type: ignore[arg-type]
            tier=tier,  # type: ignore[arg-type]
            output_bytes=self.output_bytes,
            tuning=Tuning(
                num_sms=self.num_sms,
                timeout_s=self.timeout_s,
                duplicates=self.duplicates,  # type: ignore[arg-type]
                combine=self.combine,  # type: ignore[arg-type]
            ),
        )

    def num_tokens(self, rank: int) -> int:
        """T of a rank."""
        return self.tokens[rank % len(self.tokens)]

    def round(self, number: int) -> Case:
        """The same world with other values."""
        return dataclasses.replace(self, seed=self.seed + 1000 * number)


class Inputs(NamedTuple):
    """One rank's inputs, on the GPU."""

    topk_idx: Tensor
    x: Tensor
    weights: Tensor


class Ran(NamedTuple):
    """One rank's results, forward and backward."""

    plan: Plan
    recv_x: Tensor
    recv_weights: Tensor
    out: Tensor
    grad_x: Tensor
    grad_weights: Tensor


def routing(case: Case, rank: int) -> Tensor:
    """[T, K] of one rank."""
    generator = torch.Generator().manual_seed(case.seed * 131 + rank)
    tokens, slots, experts = case.num_tokens(rank), case.num_topk, case.num_experts
    if case.kind == "all_to_one":
        return torch.full((tokens, slots), experts - 1)
    if case.kind == "even":  # all ranks receive equally many rows
        return torch.arange(tokens * slots).remainder(experts).view(tokens, slots)
    if case.kind == "one_rank":  # all experts of one rank, and slots to spare
        local = experts // dist.get_world_size()
        chosen = torch.full((tokens, slots), -1)
        chosen[:, :local] = torch.arange(tokens).view(-1, 1) * local + torch.arange(local)
        return chosen.where(chosen < 0, chosen % experts)
    if case.kind == "any":  # dropped slots and experts that are listed twice
        return torch.randint(-1, experts, (tokens, slots), generator=generator)
    scores = torch.rand(tokens, experts, generator=generator)
    if case.kind == "skewed":
        scores += 3.0 / (1 + torch.arange(experts))
    return scores.topk(slots).indices


def inputs(case: Case, rank: int) -> Inputs:
    """Everything that one rank passes in."""
    generator = torch.Generator().manual_seed(case.seed * 137 + rank)
    shape = (case.num_tokens(rank), case.hidden)
    x = torch.randn(shape, generator=generator).to(getattr(torch, case.dtype))
    weights = torch.rand(case.num_tokens(rank), case.num_topk, generator=generator)
    return Inputs(routing(case, rank).cuda(), x.cuda(), weights.cuda())


def run_once(group: EPGroup, given: Inputs) -> Ran:
    """Dispatch, multiply by the weights, combine, and all the way back."""
    x = given.x.clone().requires_grad_()
    weights = given.weights.clone().requires_grad_()
    plan = group.plan(given.topk_idx)
    recv_x, recv_weights = group.dispatch(plan, x, weights)
    assert recv_weights is not None
    expert_out = (recv_x.float() * recv_weights.unsqueeze(1)).to(recv_x.dtype)
    out = group.combine(plan, expert_out)
    (
        out.float() * torch.arange(out.numel(), device=out.device).view_as(out).remainder(7)
    ).sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return Ran(plan, recv_x.detach(), recv_weights.detach(), out.detach(), x.grad, weights.grad)


def differences(got: Ran, want: Ran) -> list[str]:
    """Names of the results whose bits differ."""
    pairs = [(name, getattr(got.plan, name), getattr(want.plan, name)) for name in PLAN_FIELDS]
    pairs += [(name, getattr(got, name), getattr(want, name)) for name in Ran._fields[1:]]
    return [name for name, left, right in pairs if not same_bits(left, right)]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal dtype, shape and bits."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(left.cpu(), right.cpu())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory of tensors holds NaN, or the largest integer: what no kernel writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def warm_up(process_group: dist.ProcessGroup) -> None:
    """Do what a process does once and what takes it seconds, so that it falls into no deadline.

    The first `poisoned_memory` imports torch's compiler, some 800 modules, between the reference's
    last collective and the kernels' first plan: eight ranks need not end that together.
    """
    dtypes = (torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32)
    with poisoned_memory():
        for dtype in dtypes:
            torch.empty(1, dtype=dtype, device="cuda")
    torch.cuda.synchronize()
    dist.barrier(group=process_group)


def rounds_differ(process_group: dist.ProcessGroup, case: Case, rounds: int = 1) -> list[str]:
    """Results of the two tiers that differ, in any of the rounds."""
    found = []
    with (
        EPGroup.create(process_group, case.config("device")) as device,
        EPGroup.create(process_group, case.config("reference")) as reference,
    ):
        for number in range(rounds):
            given = inputs(case.round(number), device.ep_rank)
            want = run_once(reference, given)
            with poisoned_memory():
                got = run_once(device, given)
            torch.cuda.synchronize()  # a copy behind a kernel that waits would hold up a plugin's
            found += [f"round {number}: {name}" for name in differences(got, want)]
            if int(got.plan.demand_rows) != want.plan.demand_rows:
                found.append(f"round {number}: demand_rows")
    return found


def block_counts_differ(
    process_group: dist.ProcessGroup, case: Case, block_counts: tuple[int, ...], most_blocks: int
) -> list[str]:
    """What differs from the reference where ranks run on so many blocks, all of them at once."""
    fit = [count for count in block_counts if count * process_group.size() <= most_blocks]
    return [
        f"{count} blocks, {what}"
        for count in fit
        for what in rounds_differ(process_group, dataclasses.replace(case, num_sms=count))
    ]


def fitting_block_counts_differ(
    process_group: dist.ProcessGroup, case: Case, block_counts: tuple[int, ...]
) -> list[str]:
    """`block_counts_differ`, as far as one GPU holds all ranks' blocks and has an SM to spare."""
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return block_counts_differ(process_group, case, block_counts, sms - 1)


def epochs_differ(
    process_group: dist.ProcessGroup, case: Case, rounds: int, epochs: int
) -> list[str]:
    """Rounds again and again in a changing order, each rank late at random before each."""
    with EPGroup.create(process_group, case.config("reference")) as reference:
        given = [inputs(case.round(number), reference.ep_rank) for number in range(rounds)]
        wanted = [run_once(reference, one) for one in given]
        delays = torch.Generator().manual_seed(reference.ep_rank)
    found = []
    with EPGroup.create(process_group, case.config("device")) as device:
        for epoch in range(epochs):
            number = epoch * 7 % rounds + epoch // rounds % 2
            cycles = torch.randint(0, 400_000, (), generator=delays)  # up to 0.2 ms
            torch.cuda._sleep(int(cycles))
            with poisoned_memory():
                got = run_once(device, given[number % rounds])
            torch.cuda.synchronize()  # as in rounds_differ
            what = differences(got, wanted[number % rounds])
            found += [f"epoch {epoch}: {name}" for name in what]
    return found


def chosen_tier(process_group: dist.ProcessGroup, dtype: str) -> str:
    """The tier that "auto" takes."""
    with EPGroup.create(process_group, Case(dtype=dtype).config("auto")) as group:
        return group.tier


def plans_interleaved(process_group: dist.ProcessGroup, case: Case) -> list[str]:
    """Two plans, both dispatches, then both combines; each plan used twice."""
    results = []
    for tier in ("device", "reference"):
        with EPGroup.create(process_group, case.config(tier)) as group:
            given = [inputs(case.round(number), group.ep_rank) for number in range(2)]
            plans = [group.plan(one.topk_idx) for one in given]
            rows = [
                group.dispatch(plan, one.x, one.weights)
                for plan, one in zip(plans, given, strict=True)
            ]
            outs = [group.combine(plan, row[0]) for plan, row in zip(plans, rows, strict=True)]
            again = [group.dispatch(plan, out)[0] for plan, out in zip(plans, outs, strict=True)]
            torch.cuda.synchronize()  # as in rounds_differ
            results.append([*[row[0].clone() for row in rows], *outs, *again])
    return [
        str(index)
        for index, (got, want) in enumerate(zip(*results, strict=True))
        if not same_bits(got, want)
    ]


def groups_alternate(process_group: dist.ProcessGroup, case: Case, first: int) -> list[str]:
    """Two groups used in turns, closed in either order."""
    other = dataclasses.replace(case, hidden=2 * case.hidden, num_experts=case.num_experts + 3)
    groups = [EPGroup.create(process_group, each.config("device")) for each in (case, other)]
    found = []
    for number in range(3):
        for each, group in zip((case, other), groups, strict=True):
            given = inputs(each.round(number), group.ep_rank)
            with EPGroup.create(process_group, each.config("reference")) as reference:
                want = run_once(reference, given)
            found += differences(run_once(group, given), want)
    groups[first].close()
    given = inputs((other, case)[first], groups[1 - first].ep_rank)
    run_once(groups[1 - first], given)
    groups[1 - first].close()
    return found


def outputs_are_ordinary(process_group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    """What a user does to output tensors: resize, outlive the group, use another stream."""
    group = EPGroup.create(process_group, case.config("device"))
    given = inputs(case, group.ep_rank)
    plan = group.plan(given.topk_idx)
    first, weights = group.dispatch(plan, given.x, given.weights)
    assert weights is not None
    kept = first.clone()
    address = first.data_ptr()
    is_view = first._is_view()
    second, _ = group.dispatch(plan, given.x, given.weights)
    alias = second.data_ptr() == address
    second.untyped_storage().resize_(0)
    del second
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        third, _ = group.dispatch(plan, given.x, given.weights)
        other_stream = third.clone()
    torch.cuda.current_stream().wait_stream(side)
    group.close()
    torch.cuda.synchronize()
    return {
        "is_view": is_view,
        "alias": alias,
        "after_close": same_bits(first, kept),
        "other_stream": same_bits(other_stream, kept),
    }


def memory_is_reused(process_group: dist.ProcessGroup, case: Case, rounds: int) -> int:
    """Run many rounds in a heap that holds only a few outputs; returns the rounds that ran."""
    with EPGroup.create(process_group, case.config("device")) as group:
        for number in range(rounds):
            run_once(group, inputs(case.round(number), group.ep_rank))
    return rounds


def heap_exhausted(process_group: dist.ProcessGroup, case: Case) -> tuple[str, bool]:
    """Keep outputs alive until none fits; then let go, and it works again."""
    kept: list[Tensor] = []
    message = ""
    with EPGroup.create(process_group, case.config("device")) as group:
        given = inputs(case, group.ep_rank)
        plan = group.plan(given.topk_idx)
        try:
            kept.extend(group.dispatch(plan, given.x)[0] for _ in range(1000))
        except CapacityError as error:
            message = str(error)
        kept.clear()
        again = group.dispatch(plan, given.x)[0]
        return message, bool(again.isfinite().all())


def bad_routing(
    process_group: dist.ProcessGroup, case: Case, what: str
) -> tuple[str, str, list[str]]:
    """A routing of rank 1 cannot be planned; all ranks learn of it, and the group goes on."""
    with EPGroup.create(process_group, case.config("device")) as group:
        given = inputs(case, group.ep_rank)
        bad = given.topk_idx.clone()
        if group.ep_rank == 1 and what == "expert":
            bad[3, 1] = case.num_experts
        elif group.ep_rank == 1:
            bad = bad.cpu() if what == "place" else bad.int()
        kind, message = "", ""
        try:
            group.plan(bad)
        except (RoutingError, AgreementError, ShapeError) as error:
            kind, message = type(error).__name__, str(error)
        with EPGroup.create(process_group, case.config("reference")) as reference:
            want = run_once(reference, given)
        return kind, message, differences(run_once(group, given), want)


def bad_static_routing(process_group: dist.ProcessGroup, case: Case) -> tuple[str, str, list[str]]:
    """Static mode does not wait, so a bad id drops its slot and the next call tells of it."""
    with (
        EPGroup.create(process_group, case.config("device")) as group,
        EPGroup.create(process_group, case.config("reference")) as reference,
    ):
        given = inputs(case, group.ep_rank)
        bad, dropped = given.topk_idx.clone(), given.topk_idx.clone()
        if group.ep_rank == 1:
            bad[3, 1], dropped[3, 1] = case.num_experts, -1
        got, want = group.plan(bad), reference.plan(dropped)
        found = [name for name in PLAN_FIELDS
                 if not same_bits(getattr(got, name), getattr(want, name))]  # fmt: skip
        torch.cuda.synchronize()
        kind, message = "", ""
        try:
            group.check()
        except (RoutingError, AgreementError) as error:
            kind, message = type(error).__name__, str(error)
        found += differences(run_once(group, given), run_once(reference, given))
        return kind, message, found


def memory_of_group(process_group: dist.ProcessGroup, case: Case) -> dict[str, int]:
    """What an open group holds beside its output rows, and what the formula says."""
    before = torch.cuda.memory_allocated()
    with EPGroup.create(process_group, case.config("device")) as group:
        backend = group._backend
        assert isinstance(backend, DeviceBackend)
        session = backend._session
        tables = [table.nbytes for table in session._tables.values()]
        arena = session._arena
        formula = persistent_bytes(group.config, group.topology)
        return {
            "from torch": torch.cuda.memory_allocated() - before,
            "tables as torch rounds them": sum(-(-size // 512) * 512 for size in tables),
            "held": sum(tables) + arena.heap - arena.base,
            "formula": formula["total"],
        }


def graph_replays_differ(process_group: dist.ProcessGroup, case: Case, rounds: int) -> list[str]:
    """A layer forward and backward in one CUDA graph, replayed with changing routing."""
    found = []
    with (
        EPGroup.create(process_group, case.config("device")) as group,
        EPGroup.create(process_group, case.config("reference")) as reference,
    ):
        held = Inputs(*(tensor.clone() for tensor in inputs(case, group.ep_rank)))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run_once(group, held)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run_once(group, held)
        for number in range(rounds):
            given = inputs(case.round(number), group.ep_rank)
            for ours, theirs in zip(held, given, strict=True):
                ours.copy_(theirs)
            graph.replay()
            torch.cuda.synchronize()
            want = run_once(reference, given)
            found += [f"replay {number}: {name}" for name in differences(got, want)]
    return found


def static_steady_state(process_group: dist.ProcessGroup, case: Case, rounds: int) -> int:
    """Run static mode where any host synchronisation is an error; returns new segments."""
    with EPGroup.create(process_group, case.config("device")) as group:
        given = inputs(case, group.ep_rank)
        for _ in range(3):
            run_once(group, given)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["num_device_alloc"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(rounds):
                run_once(group, given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats()["num_device_alloc"] - before)
