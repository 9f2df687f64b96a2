"""Which form of combine a group takes, and the memory that it wants the experts' rows in."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ep_dispatcher import (
    ConfigError,
    EpConfig,
    EPGroup,
    MoeShape,
    Topology,
    Tuning,
    UnavailableError,
    device_session,
)
from ep_dispatcher.collectives import Collectives
from ep_dispatcher.combine_form import choose_combine, link_ratio
from ep_dispatcher.config import Combine, Precision
from ep_dispatcher.device_memory import heap_bytes_of
from ep_dispatcher.errors import ShapeError
from ep_dispatcher.plan import Placement
from ep_dispatcher.testing import run_ranks


def make_config(
    num_topk: int = 8, precision: Precision = "rounded", combine: Combine = "auto"
) -> EpConfig:
    """A layer of 256 experts."""
    return EpConfig(
        shape=MoeShape(hidden=64, num_topk=num_topk, num_experts=256),
        max_tokens_per_rank=64,
        precision=precision,
        tier="reference",
        tuning=Tuning(combine=combine),
    )


def one_domain(ep_size: int) -> Topology:
    """All ranks joined by NVLink."""
    return Topology(ep_size=ep_size, domain_size=ep_size)


@pytest.mark.parametrize(
    ("config", "ep_size", "form"),
    [
        (make_config(), 8, "push"),
        (make_config(), 32, "gather"),
        (make_config(num_topk=2), 8, "gather"),
        (make_config(precision="exact"), 8, "gather"),  # its partial rows are twice as long
        (make_config(num_topk=1), 2, "gather"),
    ],
)
def test_auto_takes_the_form_with_less_to_move(config: EpConfig, ep_size: int, form: str) -> None:
    assert choose_combine(config, one_domain(ep_size), gpus_are_shared=False) == form


def test_auto_gathers_where_there_is_no_link() -> None:
    assert choose_combine(make_config(), one_domain(4), gpus_are_shared=True) == "gather"


@pytest.mark.parametrize("form", ["push", "gather"])
def test_a_form_that_was_asked_for_is_taken(form: Combine) -> None:
    for shared in (False, True):
        config = make_config(combine=form)
        assert choose_combine(config, one_domain(8), gpus_are_shared=shared) == form


def test_several_domains_push() -> None:
    """Where ranks share a GPU, too; what they cannot do is refused, not replaced."""
    rails = Topology(ep_size=8, domain_size=4)
    forms: tuple[Combine, ...] = ("auto", "push")
    for form in forms:
        assert choose_combine(make_config(combine=form), rails, gpus_are_shared=True) == "push"
    with pytest.raises(ConfigError, match=r"combine is 'gather' .* 2 NVLink domains.*'auto'"):
        choose_combine(make_config(combine="gather"), rails, gpus_are_shared=True)


def test_the_link_ratio_is_that_of_a_uniform_routing() -> None:
    """Counted on random tokens, each slot on any rank."""
    ranks, slots = 8, 8
    chosen = torch.randint(0, ranks, (20000, slots), generator=torch.Generator().manual_seed(0))
    reached = torch.zeros(len(chosen), ranks).scatter_(1, chosen, 1.0).sum()
    expected = len(chosen) * slots / float(reached)
    assert link_ratio(make_config(), one_domain(ranks)) == pytest.approx(expected, rel=0.01)


def test_another_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="'auto', 'push' or 'gather'"):
        Tuning(combine="pull")  # type: ignore[arg-type]


def test_empty_rows_fit_their_plan_and_no_other_group() -> None:
    def rows_of(group: dist.ProcessGroup) -> tuple[torch.Size, torch.dtype]:
        config = make_config(num_topk=2)
        with EPGroup.create(group, config) as own, EPGroup.create(group, config) as other:
            plan = own.plan(torch.arange(10).view(5, 2))
            rows = own.empty_rows(plan)
            _raises(ShapeError, lambda: other.empty_rows(plan))
            rows.fill_(1.0)
            assert torch.equal(own.combine(plan, rows), torch.full((5, 64), 2.0).bfloat16())
            return rows.shape, rows.dtype

    assert run_ranks(2, rows_of) == [((20, 64), torch.bfloat16), ((0, 64), torch.bfloat16)]


def _raises(kind: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(kind):
        call()


def test_the_default_heap_is_that_of_the_form_that_runs() -> None:
    """Four outputs of a balanced routing to push, six to gather; "auto" is no form."""
    shape = MoeShape(hidden=7168, num_topk=8, num_experts=256)
    config = EpConfig(shape=shape, max_tokens_per_rank=4096)
    output_bytes = 4096 * 8 * (7168 * 2 + 4)
    sizes: list[tuple[Combine, int]] = [("push", 4), ("gather", 6)]
    for form, outputs in sizes:
        wanted = outputs * output_bytes
        found = heap_bytes_of(config, one_domain(8), form)
        assert wanted <= found < wanted + (2 << 20)


@pytest.mark.parametrize(("shared", "outputs"), [(False, 4), (True, 6)])
def test_a_group_asks_for_the_heap_of_its_form(
    shared: bool, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 ranks push unless they share a GPU, where nothing goes over a link."""
    asked: list[int] = []

    def arena(_communicator: object, _control_bytes: int, heap_bytes: int) -> None:
        asked.append(heap_bytes)
        raise RuntimeError("no memory")

    communicator = SimpleNamespace(
        properties=lambda: SimpleNamespace(num_domains=1), abort=lambda: None
    )
    module = SimpleNamespace(MAX_BASE_ENTRIES=16384, Arena=arena)
    for name, stand_in in {
        "open_communicator": lambda _: communicator,
        "native": SimpleNamespace(load=lambda: module),
        "control_bytes_of": lambda *_: 4096,
        "_refuse_threads": lambda _: None,
    }.items():
        monkeypatch.setattr(device_session, name, stand_in)
    shape = MoeShape(hidden=7168, num_topk=8, num_experts=256)
    config = EpConfig(shape=shape, max_tokens_per_rank=4096)

    def refused(process_group: dist.ProcessGroup) -> None:
        with pytest.raises(UnavailableError, match="no memory"):
            device_session.open_session(
                Collectives(process_group), config, Placement.even(256, 8), gpus_are_shared=shared
            )

    run_ranks(8, refused)
    assert {size // (4096 * 8 * (7168 * 2 + 4)) for size in asked} == {outputs}
