"""Training with ep_dispatcher gives the losses and parameters of Megatron's own dispatchers.

Every case trains a small GPT for 10 steps on 4 gloo ranks, once with each (`megatron_cases.py`).
"""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("megatron.core")

from megatron_cases import CASES, Case
from megatron_world import Outcome, passes, run_cases

STEPS = 10
_CI = [case for case in CASES if case.ci]
_SLOW = [case for case in CASES if not case.ci]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """What all cases gave that this run of pytest has tests of; some share a run of Megatron's."""
    asked = [
        str(item.callspec.id)
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and "outcomes" in item.fixturenames
    ]
    return {outcome.case: outcome for outcome in run_cases(asked, STEPS)}


def _assert_matches(case: Case, outcome: Outcome) -> None:
    assert len(outcome.losses) == STEPS
    assert outcome.losses[-1] < outcome.losses[0] - 0.5, "it did not learn, so nothing was compared"
    assert set(outcome.dispatchers) == {"EpDispatcher"}
    if case.exact:
        assert outcome.losses == outcome.reference_losses
        assert outcome.max_param_difference == 0
    else:
        assert outcome.max_loss_difference < 1e-5
        assert outcome.max_param_difference < 1e-4


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", _CI, ids=lambda case: case.name)
def test_training_matches_megatron(case: Case, outcomes: dict[str, Outcome]) -> None:
    """Equal losses and parameters; within the rounding of another order where sums are longer."""
    _assert_matches(case, outcomes[case.name])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", _SLOW, ids=lambda case: case.name)
def test_training_matches_megatron_slow(case: Case, outcomes: dict[str, Outcome]) -> None:
    """The same for layouts and options that differ less from those above."""
    _assert_matches(case, outcomes[case.name])


def test_the_gate_sees_a_difference() -> None:
    """One bit of a loss fails an exact case; 1e-4 relative fails the others."""
    exact, loose = CASES[0], next(case for case in CASES if not case.exact)
    same = Outcome(exact.name, {}, [4.0, 3.0], [4.0, 3.0], 0.0, ["EpDispatcher"], 1.0)
    assert passes(exact, same)
    assert passes(loose, same)
    assert not passes(exact, dataclasses.replace(same, losses=[4.0, 3.0000002]))
    assert not passes(exact, dataclasses.replace(same, max_param_difference=1e-9))
    assert passes(loose, dataclasses.replace(same, losses=[4.0, 3.0000002]))
    assert not passes(loose, dataclasses.replace(same, losses=[4.0, 3.0003]))
    assert not passes(loose, dataclasses.replace(same, max_param_difference=2e-4))
