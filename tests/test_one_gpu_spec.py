"""What the kernels are compared with on one GPU is what the reference tier computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kernel_world import routing_of

from ep_dispatcher import EpConfig, EPGroup, MoeShape, Placement
from ep_dispatcher.bench import kernels_one_gpu, rails_one_gpu
from ep_dispatcher.bench.one_gpu import WorldShape
from ep_dispatcher.bench.one_gpu_spec import Round, assert_same_bits, make_round
from ep_dispatcher.config import Topology
from ep_dispatcher.testing import run_ranks

HIDDEN, NUM_TOPK, NUM_EXPERTS = 24, 4, 16


def world_of(num_domains: int, domain_size: int, exact: bool) -> Any:  # noqa: ANN401
    """As much of a world as the specification asks for."""
    ranks = num_domains * domain_size
    return SimpleNamespace(
        shape=WorldShape(
            ep_size=ranks, num_experts=NUM_EXPERTS, num_topk=NUM_TOPK, hidden=HIDDEN,
            max_tokens=40, exact=exact,
        ),
        device=torch.device("cpu"),
        placement=Placement.even(NUM_EXPERTS, ranks),
        topology=Topology(ep_size=ranks, domain_size=domain_size),
    )  # fmt: skip


def results_of_reference(work: Round, domain_size: int, exact: bool) -> list[list[torch.Tensor]]:
    """Sums, rows and weights of each rank, from groups of the reference tier."""
    config = EpConfig(
        shape=MoeShape(hidden=HIDDEN, num_topk=NUM_TOPK, num_experts=NUM_EXPERTS),
        max_tokens_per_rank=40,
        precision="exact" if exact else "rounded",
        virtual_domain_size=domain_size,
        tier="reference",
    )

    def of_rank(process_group: dist.ProcessGroup) -> list[torch.Tensor]:
        with EPGroup.create(process_group, config) as group:
            rank = group.ep_rank
            plan = group.plan(work.topk_idx[rank])
            recv_x, recv_weights = group.dispatch(plan, work.x[rank], work.topk_weights[rank])
            assert recv_weights is not None
            return [recv_x, recv_weights, group.combine(plan, work.expert_out[rank])]

    return list(run_ranks(len(work.x), of_rank))


@pytest.mark.parametrize(("num_domains", "domain_size"), [(1, 4), (2, 2), (4, 1), (2, 3)])
@pytest.mark.parametrize("exact", [False, True])
def test_a_round_is_what_the_reference_tier_computes(
    num_domains: int, domain_size: int, exact: bool
) -> None:
    world = world_of(num_domains, domain_size, exact)
    ranks = num_domains * domain_size
    tokens = [40 - 7 * rank for rank in range(ranks)]
    work = make_round(world, routing_of("duplicates", tokens, NUM_TOPK, NUM_EXPERTS))
    for rank, (recv_x, recv_weights, out) in enumerate(
        results_of_reference(work, domain_size, exact)
    ):
        assert_same_bits(f"rank {rank} recv_x", recv_x, work.recv_x[rank])
        assert_same_bits(f"rank {rank} recv_weights", recv_weights, work.recv_weights[rank])
        assert_same_bits(f"rank {rank} out", out, work.out[rank])


def test_domains_decide_the_bits_of_a_sum() -> None:
    """Else the comparison above could not tell two levels from one."""
    sums = []
    for num_domains, domain_size in ((1, 4), (2, 2)):
        world = world_of(num_domains, domain_size, exact=False)
        sums.append(make_round(world, routing_of("uniform", [40] * 4, NUM_TOPK, NUM_EXPERTS)).out)
    assert any(not torch.equal(one, other) for one, other in zip(*sums, strict=True))


@pytest.mark.parametrize("main", [kernels_one_gpu.main, rails_one_gpu.main])
def test_a_module_that_is_not_built_is_one_line_that_says_how(
    main: Callable[[Sequence[str]], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["--kernels", "not_built"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not_built.so is missing; build it with scripts/gpu_kernels.sh build" in line
