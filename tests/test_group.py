"""Groups: what they refuse, how ranks agree, several at once, and gradients in fp64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

from ep_dispatcher import (
    AgreementError,
    ClosedError,
    ConfigError,
    EpConfig,
    EPGroup,
    EpTimeoutError,
    MoeShape,
    RoutingError,
    ShapeError,
    Tuning,
    UnavailableError,
)
from ep_dispatcher.testing import make_routing, run_ranks

SHAPE = MoeShape(hidden=16, num_topk=2, num_experts=8, dtype="float32")
CONFIG = EpConfig(shape=SHAPE, max_tokens_per_rank=8)


def on_ranks(work: Callable[[EPGroup], object], config: EpConfig = CONFIG, ranks: int = 2) -> list:  # type: ignore[type-arg]
    """Run `work` on every rank of a fresh group."""

    def call(process_group: dist.ProcessGroup) -> object:
        with EPGroup.create(process_group, config) as group:
            return work(group)

    return run_ranks(ranks, call)


def nested(layout: torch.layout) -> Tensor:
    """A tensor of rows of different lengths."""
    rows = [torch.tensor([0, 1]), torch.tensor([2])]
    with warnings.catch_warnings(action="ignore"):  # the strided ones are a prototype
        return torch.nested.nested_tensor(rows, layout=layout)


def freed(tensor: Tensor) -> Tensor:
    """The tensor without its memory, as Megatron's 1F1B schedule leaves it."""
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("topk_idx", "error", "says"),
    [
        ([[0, 8]], RoutingError, r"topk_idx\[0, 1\] is 8; it must be in \[0, 7\], or -1"),
        ([[0, 1], [-2, 0]], RoutingError, r"topk_idx\[1, 0\] is -2"),
        ([[0, 1]] * 9, ShapeError, "9 tokens; .* at most max_tokens_per_rank=8"),
        ([[0, 1, 2]], ShapeError, "3 slots; it must have 1 to 2"),
        ([[]], ShapeError, "0 slots"),
        ([0, 1], ShapeError, r"int64 of shape \[2\]"),
        ([[0.0, 1.0]], ShapeError, r"float32 of shape \[1, 2\]; it must be int64"),
    ],
)
def test_bad_routing_is_refused_on_every_rank(
    topk_idx: list[object], error: type[Exception], says: str
) -> None:
    """The rank at fault says what is wrong; the others hear of it at once; the group goes on."""
    bad = torch.tensor(topk_idx)
    if not topk_idx[0] and isinstance(topk_idx[0], list):
        bad = bad.long()

    def work(group: EPGroup) -> int:
        if group.ep_rank == 1:
            with pytest.raises(error, match=says):
                group.plan(bad)
        else:
            with pytest.raises(AgreementError, match="rank 1 refused its routing.*" + says[:10]):
                group.plan(torch.tensor([[0, 1]]))
        return group.plan(torch.tensor([[0, 1]])).num_recv_rows

    assert on_ranks(work) == [4, 0]


@pytest.mark.parametrize(
    ("topk_idx", "says"),
    [
        ([[0, 1]], "topk_idx is of type list; it must be a torch.Tensor"),
        (None, "topk_idx is of type NoneType"),
        (torch.tensor([[0, 1]]).to_sparse(), "topk_idx is sparse_coo; it must be a dense"),
        (torch.empty(1, 2, dtype=torch.int64, device="meta"), "topk_idx is on the device meta"),
        (nested(torch.strided), "topk_idx is nested; it must be a dense tensor"),
        (nested(torch.jagged), "topk_idx is nested; it must be a dense tensor"),
        (freed(torch.tensor([[0, 1]])), "topk_idx is freed "),
    ],
)
def test_routing_that_is_no_dense_tensor_is_refused_on_every_rank(
    topk_idx: Tensor, says: str
) -> None:
    """The other ranks must hear of this mistake too, or they would wait for the exchange."""

    def work(group: EPGroup) -> int:
        if group.ep_rank == 1:
            with pytest.raises(ShapeError, match=says):
                group.plan(topk_idx)
        else:
            with pytest.raises(AgreementError, match="rank 1 refused its routing.*" + says):
                group.plan(torch.tensor([[0, 1]]))
        return group.plan(torch.tensor([[0, 1]])).num_recv_rows

    assert on_ranks(work) == [4, 0]


def test_unequal_alignment_is_refused() -> None:
    """Alignment decides rows on both sides, so it must be equal."""

    def work(group: EPGroup) -> None:
        with pytest.raises(AgreementError, match="alignment is 16 on rank 1 and 1 on rank 0"):
            group.plan(torch.tensor([[0, 1]]), alignment=16 if group.ep_rank else 1)
        with pytest.raises(ConfigError, match="alignment is 12"):
            group.plan(torch.tensor([[0, 1]]), alignment=12)

    on_ranks(work)


@pytest.mark.parametrize(
    ("rows", "weights", "says"),
    [
        (torch.zeros(1, 16), None, r"x is float32 of shape \[1, 16\]; .* \[2, 16\]"),
        (torch.zeros(2, 8), None, r"\[2, 8\]"),
        (torch.zeros(2, 16, dtype=torch.bfloat16), None, "x is bfloat16.*must be float32"),
        (torch.zeros(2, 16), torch.zeros(2, 1), r"topk_weights is float32 of shape \[2, 1\]"),
        (torch.zeros(2, 16), torch.zeros(2, 2).half(), "topk_weights is float16.*float32"),
        ([[0.0] * 16] * 2, None, "x is of type list; it must be a torch.Tensor"),
        (torch.zeros(2, 16).to_sparse(), None, "x is sparse_coo; it must be a dense tensor"),
        (torch.zeros(2, 16), [[1.0, 1.0]] * 2, "topk_weights is of type list"),
        (freed(torch.zeros(2, 16)), None, "x is freed .*; it must be a dense tensor that holds"),
    ],
)
def test_bad_rows_and_weights_are_refused(rows: Tensor, weights: Tensor | None, says: str) -> None:
    """Before anything is sent."""

    def work(group: EPGroup) -> None:
        plan = group.plan(torch.tensor([[0, 1], [2, 3]]))
        with pytest.raises(ShapeError, match=says):
            group.dispatch(plan, rows, weights)
        with pytest.raises(ShapeError, match="expert_out is float32"):
            group.combine(plan, torch.zeros(99, 16))

    on_ranks(work)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_in_debug_mode(value: float) -> None:
    """And pass through otherwise, bits and all."""
    weights = torch.tensor([[0.5, value]])

    def refused(group: EPGroup) -> None:
        with pytest.raises(RoutingError, match=r"topk_weights\[0, 1\] is (nan|inf); .*finite"):
            group.dispatch(group.plan(torch.tensor([[0, 1]])), torch.zeros(1, 16), weights)

    def passed(group: EPGroup) -> Tensor:
        plan = group.plan(torch.tensor([[0, 1]]))
        recv_weights = group.dispatch(plan, torch.zeros(1, 16), weights)[1]
        assert recv_weights is not None
        return recv_weights

    on_ranks(refused, EpConfig(shape=SHAPE, max_tokens_per_rank=8, check_values=True), ranks=1)
    (got,) = on_ranks(passed, ranks=1)
    assert torch.equal(got.nan_to_num(7.0), weights.flatten().nan_to_num(7.0))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts": 16}, "shape.num_experts is 16 on rank 1 and 8 on rank 0"),
        ({"hidden": 32}, "shape.hidden is 32 on rank 1 and 16 on rank 0"),
        ({"num_topk": 3}, "shape.num_topk is 3 on rank 1 and 2 on rank 0"),
        ({"dtype": "bfloat16"}, "shape.dtype is 'bfloat16' on rank 1"),
    ],
)
def test_unequal_configs_are_refused_by_all_ranks(changes: dict[str, object], says: str) -> None:
    """One exchange at creation; the message names the rank that differs."""
    fields = {"hidden": 16, "num_topk": 2, "num_experts": 8, "dtype": "float32"}

    def call(process_group: dist.ProcessGroup) -> None:
        shape = fields | changes if process_group.rank() == 1 else fields
        config = EpConfig(shape=MoeShape(**shape), max_tokens_per_rank=8)  # type: ignore[arg-type]
        with pytest.raises(AgreementError, match=says):
            EPGroup.create(process_group, config)

    run_ranks(3, call)


def test_configs_that_do_not_fit_the_ranks_are_refused() -> None:
    """Fewer experts than ranks; domains that do not divide the group; a group that is not there."""
    few = EpConfig(shape=MoeShape(hidden=16, num_topk=1, num_experts=2), max_tokens_per_rank=8)
    odd = EpConfig(shape=SHAPE, max_tokens_per_rank=8, virtual_domain_size=2)

    def call(process_group: dist.ProcessGroup) -> None:
        with pytest.raises(ConfigError, match="num_experts is 2; the group has 3 ranks"):
            EPGroup.create(process_group, few)
        with pytest.raises(ConfigError, match="domain_size is 2; it must divide the 3 ranks"):
            EPGroup.create(process_group, odd)

    run_ranks(3, call)
    with pytest.raises(ConfigError, match="no default process group"):
        EPGroup.create(None, CONFIG)


def test_a_knob_that_does_nothing_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="ep_dispatcher"):
        asked = replace(CONFIG, tier="reference")  # which no GPU is warned about
        on_ranks(lambda _: None, asked)
        assert caplog.messages == []
        on_ranks(lambda _: None, replace(asked, tuning=Tuning(chunk_tokens=16)))
    assert caplog.messages == ["chunk_tokens is 16, but no tier reads it: leave it at 64"]


@pytest.mark.parametrize("given", ["x", dist.GroupMember.NON_GROUP_MEMBER, CONFIG])
def test_what_is_no_process_group_is_refused(given: object) -> None:
    """Such as what new_group returns on a rank that is not in it."""
    with pytest.raises(
        TypeError, match=r"process_group is .*must be a torch\.distributed\.Process"
    ):
        EPGroup.create(given, CONFIG)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_device_tier_without_a_gpu_is_refused_and_auto_takes_the_reference() -> None:
    """Asked for by name it is an error that says what is missing, never another tier."""
    asked = EpConfig(shape=SHAPE, max_tokens_per_rank=8, tier="device")

    def call(process_group: dist.ProcessGroup) -> None:
        with pytest.raises(UnavailableError, match="rank 0 no GPU is visible"):
            EPGroup.create(process_group, asked)

    run_ranks(2, call)
    assert on_ranks(lambda group: group.tier) == ["reference", "reference"]


@pytest.mark.parametrize("expert_rank", [(0, 1) * 4, None], ids=["other", "equal"])
def test_closed_group_and_foreign_plan_are_refused(expert_rank: tuple[int, ...] | None) -> None:
    """Closing twice is allowed; using a closed group or another group's plan is not.

    Nor is a plan of a group with an equal config: it names that group's buffers.
    """
    other = EpConfig(shape=SHAPE, max_tokens_per_rank=8, expert_rank=expert_rank)

    def call(process_group: dist.ProcessGroup) -> None:
        first = EPGroup.create(process_group, CONFIG)
        with EPGroup.create(process_group, other) as second:
            plan = second.plan(torch.tensor([[0, 1]]))
            with pytest.raises(ShapeError, match="made by another group"):
                first.dispatch(plan, torch.zeros(1, 16))
        with pytest.raises(ShapeError, match="plan is None; it must be what `plan`"):
            first.dispatch(None, torch.zeros(1, 16))  # type: ignore[arg-type]
        first.close()
        first.close()
        with pytest.raises(ClosedError, match=r"EPGroup\.create"):
            first.plan(torch.tensor([[0, 1]]))

    run_ranks(2, call)


def test_a_close_that_fails_hides_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """What a `with` is left for goes on; without one, what the close meets is raised."""

    def close(*, failed: bool) -> None:
        raise EpTimeoutError("the close", rank=0, peer=1, phase="close")

    def work(group: EPGroup) -> None:
        group._backend.close = close  # type: ignore[method-assign, union-attr]
        if group.ep_rank == 0:
            with pytest.raises(KeyError, match="the first"), group:
                raise KeyError("the first")
        else:
            with pytest.raises(EpTimeoutError, match="the close"), group:
                pass

    on_ranks(work)
    assert "the close of its group failed too: the close" in caplog.text


@pytest.mark.parametrize("ledger", [False, True])
def test_a_backward_after_closing_is_refused(ledger: bool) -> None:
    """By every rank for itself: also where the others run none."""

    def call(process_group: dist.ProcessGroup) -> None:
        config = EpConfig(shape=SHAPE, max_tokens_per_rank=8, debug_ledger=ledger)
        x = torch.ones(1, 16, requires_grad=True)
        with EPGroup.create(process_group, config) as group:
            plan = group.plan(torch.tensor([[0, 1]]))
            recv_x, _ = group.dispatch(plan, x)
            out = group.combine(plan, recv_x.detach().requires_grad_())
        if group.ep_rank == 0:
            for result in (recv_x, out):
                with pytest.raises(ClosedError, match="before closing it"):
                    result.sum().backward()
        assert x.grad is None

    run_ranks(2, call)


def test_gradients_of_rows_or_weights_on_different_ranks() -> None:
    """Rank 0 wants the gradient of x only and rank 1 that of the weights only; both take part."""

    def work(group: EPGroup) -> tuple[bool, bool]:
        first = group.ep_rank == 0
        x = torch.ones(3, 16, requires_grad=first)
        weights = torch.ones(3, 2, requires_grad=not first)
        plan = group.plan(make_routing(3, 2, 8, seed=group.ep_rank))
        recv_x, recv_weights = group.dispatch(plan, x, weights)
        assert recv_weights is not None
        (group.combine(plan, recv_x).sum() + recv_weights.sum()).backward()
        for leaf, expected in ((x, 2.0), (weights, 1.0)):
            assert leaf.grad is None or bool((leaf.grad == expected).all())
        return x.grad is not None, weights.grad is not None

    assert on_ranks(work) == [(True, False), (False, True)]


def test_two_groups_alternate() -> None:
    """Different experts, ranks and widths; plans of both in flight."""
    wide = EpConfig(
        shape=MoeShape(hidden=32, num_topk=3, num_experts=5, dtype="float32"),
        max_tokens_per_rank=8,
        expert_rank=(1, 0, 1, 0, 1),
    )

    def call(process_group: dist.ProcessGroup) -> bool:
        rank = process_group.rank()
        with (
            EPGroup.create(process_group, CONFIG) as first,
            EPGroup.create(process_group, wide) as second,
        ):
            for step in range(3):
                plan_a = first.plan(make_routing(4, 2, 8, seed=step + rank))
                plan_b = second.plan(make_routing(5, 3, 5, seed=step + rank))
                a, b = torch.randn(4, 16), torch.randn(5, 32)
                recv_b, _ = second.dispatch(plan_b, b)
                recv_a, _ = first.dispatch(plan_a, a)
                assert torch.allclose(first.combine(plan_a, recv_a), 2 * a)
                assert torch.allclose(second.combine(plan_b, recv_b), 3 * b)
        return True

    assert run_ranks(2, call) == [True, True]


def test_one_plan_serves_many_calls_in_any_order() -> None:
    """D D C C, and backward twice through one graph."""

    def work(group: EPGroup) -> None:
        plan = group.plan(make_routing(4, 2, 8, seed=group.ep_rank))
        x = torch.randn(4, 16, requires_grad=True)
        first, _ = group.dispatch(plan, x)
        second, _ = group.dispatch(plan, 2 * x)
        out = group.combine(plan, second) + group.combine(plan, first)
        assert torch.allclose(out, 6 * x)
        out.sum().backward(retain_graph=True)
        assert x.grad is not None
        once = x.grad.clone()
        assert torch.allclose(once, torch.full_like(once, 6.0))
        out.sum().backward()
        assert torch.equal(x.grad, 2 * once)

    on_ranks(work)


def test_rank_without_tokens_keeps_its_graph() -> None:
    """A rank with T=0 still serves its experts and takes part in backward."""

    def work(group: EPGroup) -> Tensor:
        tokens = 0 if group.ep_rank == 1 else 4
        scale = torch.ones(16, requires_grad=True)
        x = torch.ones(tokens, 16, requires_grad=True)
        plan = group.plan(torch.full((tokens, 1), 5))
        recv_x, _ = group.dispatch(plan, x)
        group.combine(plan, recv_x * scale).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (tokens, 16)
        assert scale.grad is not None
        return scale.grad[0]

    assert [float(value) for value in on_ranks(work)] == [0.0, 4.0]


class DenseLayer(torch.nn.Module):
    """A whole MoE layer in one process: every expert on every token, masked by the routing."""

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, topk_idx: Tensor) -> Tensor:
        """Take x [N, H], weights [N, K], experts [E, H, H], topk_idx [N, K] -> [N, H]."""
        out = torch.zeros_like(x)
        for expert, matrix in enumerate(experts):
            gate = (weights * (topk_idx == expert)).sum(1, keepdim=True)
            out = out + gate * silu(x @ matrix)
        return out


def test_moe_layer_gradients_equal_the_dense_oracle_in_fp64() -> None:
    """Values and all gradients (tokens, weights, expert matrices) of a layer on 3 ragged ranks."""
    shape = MoeShape(hidden=4, num_topk=2, num_experts=7, dtype="float64")
    config = EpConfig(
        shape=shape, max_tokens_per_rank=8, alignment=4, expert_rank=(0, 2, 1, 1, 0, 2, 2)
    )
    sizes = [3, 0, 5]
    idx = [make_routing(t, 2, 7, seed=r, dropped=0.2) for r, t in enumerate(sizes)]
    torch.manual_seed(0)
    x, weights = torch.randn(8, 4).double(), torch.rand(8, 2).double()
    experts, cotangent = torch.randn(7, 4, 4).double(), torch.randn(8, 4).double()
    parts = [(0, 3), (3, 3), (3, 8)]

    def work(group: EPGroup) -> tuple[Tensor, ...]:
        first, last = parts[group.ep_rank]
        leaves = [t.clone().requires_grad_() for t in (x[first:last], weights[first:last], experts)]
        rows, router, matrices = leaves
        plan = group.plan(idx[group.ep_rank])
        recv_x, recv_weights = group.dispatch(plan, rows, router)
        assert recv_weights is not None
        local = matrices[group.placement.local_experts(group.ep_rank)]
        segments = recv_x.split(plan.padded_tokens_per_expert.tolist())
        hidden = torch.cat([silu(s @ m) for s, m in zip(segments, local, strict=True)])
        out = group.combine(plan, hidden * recv_weights.unsqueeze(1))
        out.backward(cotangent[first:last])
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return out.detach(), *grads

    got = on_ranks(work, config, ranks=3)
    dense = [t.clone().requires_grad_() for t in (x, weights, experts)]
    out = DenseLayer()(*dense, torch.cat(idx))
    out.backward(cotangent)
    torch.testing.assert_close(torch.cat([g[0] for g in got]), out)
    torch.testing.assert_close(torch.cat([g[1] for g in got]), dense[0].grad)
    torch.testing.assert_close(torch.cat([g[2] for g in got]), dense[1].grad)
    torch.testing.assert_close(sum(g[3] for g in got), dense[2].grad)


def test_gradcheck_of_dispatch_and_combine() -> None:
    """torch.autograd.gradcheck in fp64, both inputs of dispatch and that of combine."""
    shape = MoeShape(hidden=2, num_topk=3, num_experts=5, dtype="float64")
    config = EpConfig(shape=shape, max_tokens_per_rank=8, alignment=2)

    def work(group: EPGroup) -> bool:
        plan = group.plan(make_routing(3, 3, 5, seed=2, dropped=0.2))
        x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
        rows = torch.randn(plan.num_recv_rows, 2, dtype=torch.float64, requires_grad=True)

        def both(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            return tuple(part for part in group.dispatch(plan, a, b) if part is not None)

        dispatch = torch.autograd.gradcheck(both, (x, weights))
        combine = torch.autograd.gradcheck(lambda a: group.combine(plan, a), (rows,))
        return bool(dispatch and combine)

    assert on_ranks(work, config, ranks=1) == [True]


@pytest.mark.parametrize("rank_with", [0, 1])
def test_weights_on_some_ranks_only_are_refused_on_all(rank_with: int) -> None:
    def work(group: EPGroup) -> str:
        plan = group.plan(torch.tensor([[0, 7]]))
        weights = torch.ones(1, 2) if group.ep_rank == rank_with else None
        with pytest.raises(AgreementError) as refused:
            group.dispatch(plan, torch.ones(1, 16), weights)
        return str(refused.value)

    passed = ["passed" if rank == rank_with else "did not pass" for rank in range(2)]
    for rank, told in enumerate(on_ranks(work)):
        assert told == (
            f"rank {rank} {passed[rank]} topk_weights to dispatch and rank {1 - rank} "
            f"{passed[1 - rank]}; pass them on all ranks or on none"
        )
