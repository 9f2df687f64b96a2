"""The device tier between processes that share a GPU, bit for bit against the reference tier.

Needs a GPU; the processes need MPS to run at the same time (scripts/gpu_tests.sh starts it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import device_cases as cases
import device_fault_cases as faults
import pytest
from device_cases import Case, warm_up
from multi_process import ProcessWorld
from nccl_shim import INTERNAL_ERROR, NULL_WINDOW, nccl_that_lies

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(180)]

SMALL_HEAP = Case(kind="even", hidden=4096, tokens=(256,) * 4, output_bytes=32 << 20)
STATIC = Case(tokens=(64, 32, 48, 64), capacity=512, num_topk=2, alignment=16)
# What "auto" takes for ranks that have a GPU each; where they share one, it takes neither.
PUSH = Case(combine="push", duplicates="receiver", num_topk=4)
STATIC_PUSH = replace(STATIC, combine="push", duplicates="receiver", num_topk=4, capacity=1024)
FORMS = ("auto", "push_and_receiver")

# One of the worlds of the fixture, for what has nothing to do with the number of ranks.
four_ranks = pytest.mark.parametrize("world", [4], ids=["4ranks"], indirect=True)


@pytest.fixture(scope="module", params=[4, 2, 8], ids=["4ranks", "2ranks", "8ranks"])
def world(request: pytest.FixtureRequest) -> Iterator[ProcessWorld]:
    """Processes that stay up for all tests."""
    with ProcessWorld(request.param) as started:
        started.run(warm_up)
        yield started


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(kind="skewed", hidden=1024, num_topk=8, num_experts=32),
        Case(kind="all_to_one"),
        Case(kind="any", num_topk=5, alignment=16),
        Case(dtype="float16", alignment=128),
        Case(dtype="float32", kind="any", precision="exact"),
        Case(kind="any", precision="exact", num_topk=4),
        Case(kind="one_rank", num_topk=8),
        Case(tokens=(65, 0, 1, 33), kind="any", num_topk=3),
        Case(tokens=(0, 0, 0, 0)),
        Case(tokens=(1, 1, 1, 1), num_topk=1, num_experts=9),
        Case(hidden=72, num_sms=1),
        Case(hidden=2880, num_sms=8, tokens=(200, 100, 300, 150), num_topk=4),
        Case(combine="push", kind="skewed", hidden=1024, num_topk=8, num_experts=32),
        Case(combine="push", tokens=(65, 0, 1, 33), kind="any", num_topk=3, precision="exact"),
        Case(combine="push", hidden=2880, num_sms=8, tokens=(200, 100, 300, 150), num_topk=4),
        Case(duplicates="receiver", hidden=7168, num_topk=8, num_experts=32, alignment=16),
        Case(duplicates="receiver", hidden=2880, tokens=(65, 0, 1, 33), kind="any", num_topk=4),
        Case(duplicates="receiver", kind="all_to_one", num_topk=3),
    ],
    ids=lambda case: (
        f"{case.kind} {case.dtype} T{case.tokens} H{case.hidden} K{case.num_topk} "
        f"{case.duplicates} {case.combine}"
    ),
)
def test_every_result_is_the_references(world: ProcessWorld, case: Case) -> None:
    """Plan, rows, weights, sums and both gradients."""
    assert not any(world.run(cases.rounds_differ, case))


def test_fifty_rounds_of_changing_routing(world: ProcessWorld) -> None:
    assert not any(world.run(cases.rounds_differ, Case(kind="any", num_topk=4), 50))


def test_a_thousand_epochs_with_late_ranks(world: ProcessWorld) -> None:
    """Nine routings in turns; before each round every rank sleeps for a time of its own."""
    case = Case(kind="any", num_topk=3, tokens=(65, 0, 64, 33))
    assert not any(world.run(cases.epochs_differ, case, 9, 1000))


def test_epochs_with_late_ranks_push_and_copy_at_the_receiver(world: ProcessWorld) -> None:
    case = replace(PUSH, kind="any", tokens=(65, 0, 64, 33))
    assert not any(world.run(cases.epochs_differ, case, 9, 200))


@pytest.mark.parametrize("case", [Case(kind="any"), replace(PUSH, kind="any")], ids=FORMS)
def test_the_number_of_blocks_does_not_change_a_bit(world: ProcessWorld, case: Case) -> None:
    """As far as the blocks of all ranks fit on one GPU: 8 x 16 on one of 132 SMs."""
    assert not any(world.run(cases.fitting_block_counts_differ, case, (2, 4, 8, 16)))


@pytest.mark.parametrize(("dtype", "tier"), [("bfloat16", "device"), ("float64", "reference")])
def test_auto_takes_the_device_tier_where_it_can(
    world: ProcessWorld, dtype: str, tier: str
) -> None:
    assert set(world.run(cases.chosen_tier, dtype)) == {tier}


@pytest.mark.parametrize("case", [Case(kind="any"), replace(PUSH, kind="any")], ids=FORMS)
def test_two_plans_interleave(world: ProcessWorld, case: Case) -> None:
    assert not any(world.run(cases.plans_interleaved, case))


@pytest.mark.parametrize("first", [0, 1])
def test_two_groups_alternate_and_close_in_either_order(world: ProcessWorld, first: int) -> None:
    assert not any(world.run(cases.groups_alternate, Case(), first))


def test_outputs_are_ordinary_tensors(world: ProcessWorld) -> None:
    """Not views, no aliases, resizable, valid after close and on other streams."""
    for found in world.run(cases.outputs_are_ordinary, Case()):
        assert found == {
            "is_view": False,
            "alias": False,
            "after_close": True,
            "other_stream": True,
        }


def test_memory_of_dropped_outputs_is_used_again(world: ProcessWorld) -> None:
    """Outputs of 200 rounds take far more than the heap."""
    assert set(world.run(cases.memory_is_reused, SMALL_HEAP, 200)) == {200}


def test_a_full_heap_names_the_size_that_would_do(world: ProcessWorld) -> None:
    for message, works_again in world.run(cases.heap_exhausted, SMALL_HEAP):
        assert "output_bytes=33554432" in message
        assert "would do" in message
        assert works_again


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("expert", "RoutingError", "expert 16"),
        ("dtype", "ShapeError", "int32"),
        ("place", "ShapeError", "topk_idx is on cpu"),
    ],
)
def test_a_bad_routing_stops_all_ranks_and_the_group_goes_on(
    world: ProcessWorld, what: str, error: str, words: str
) -> None:
    for rank, (kind, message, differ) in enumerate(world.run(cases.bad_routing, Case(), what)):
        assert kind == (error if rank == 1 else "AgreementError")
        assert (words if rank == 1 else "rank 1") in message
        assert not differ


def test_a_bad_expert_id_in_static_mode_is_told_by_the_next_call(world: ProcessWorld) -> None:
    for rank, (kind, message, differ) in enumerate(world.run(cases.bad_static_routing, STATIC)):
        assert kind == ("RoutingError" if rank == 1 else "AgreementError")
        assert ("topk_idx[3] names expert 16" if rank == 1 else "rank 1") in message
        assert not differ


def test_static_mode_is_the_references(world: ProcessWorld) -> None:
    assert not any(world.run(cases.rounds_differ, STATIC, 3))


def test_static_mode_drops_what_the_reference_drops(world: ProcessWorld) -> None:
    """And tells the true demand."""
    tight = replace(STATIC, capacity=48, kind="skewed")
    assert not any(world.run(cases.rounds_differ, tight, 3))


@pytest.mark.parametrize("case", [STATIC, STATIC_PUSH], ids=FORMS)
def test_a_graph_of_a_layer_replays_with_other_routings(world: ProcessWorld, case: Case) -> None:
    assert not any(world.run(cases.graph_replays_differ, case, 5))


@pytest.mark.parametrize("case", [STATIC, STATIC_PUSH], ids=FORMS)
def test_static_mode_neither_synchronises_nor_allocates(world: ProcessWorld, case: Case) -> None:
    assert set(world.run(cases.static_steady_state, case, 10)) == {0}


def test_persistent_memory_is_the_formulas(world: ProcessWorld) -> None:
    """Window and tables; torch gave no more than the tables."""
    for found in world.run(cases.memory_of_group, Case(hidden=2880, num_sms=8, num_experts=40)):
        assert found["held"] == found["formula"]
        assert found["from torch"] == found["tables as torch rounds them"]


def check_missing_rank(world: ProcessWorld, case: Case, missed: str, comes_late: bool) -> None:
    """Every other rank names the last one in time, by its own wait or as a peer has told it."""
    *others, last = world.run(faults.missing_rank, case, missed, comes_late)
    for waited in others:
        assert waited.phase
        assert waited.seconds < case.timeout_s + 1
        assert waited.peer == len(others)
        assert not waited.differ
    assert not last.differ
    assert bool(last.phase) == comes_late  # a latecomer learns that its group is finished


@pytest.mark.fault
@pytest.mark.parametrize(
    ("missed", "comes_late"),
    [("dispatch", False), ("plan", False), ("combine", False), ("dispatch", True)],
)
def test_a_missing_rank_is_named_in_time_and_a_new_group_works(
    world: ProcessWorld, missed: str, comes_late: bool
) -> None:
    check_missing_rank(world, Case(timeout_s=1.0, combine="gather"), missed, comes_late)


@four_ranks
@pytest.mark.fault
@pytest.mark.parametrize("missed", ["plan", "combine"])
def test_a_rank_past_the_deadline_is_named_and_a_new_group_works(
    world: ProcessWorld, missed: str
) -> None:
    check_missing_rank(world, Case(timeout_s=1.0, combine="gather"), missed, True)


@four_ranks
@pytest.mark.fault
@pytest.mark.parametrize(
    ("missed", "comes_late"), [("combine", False), ("combine", True), ("dispatch", True)]
)
def test_a_missing_rank_is_named_where_ranks_push_and_receivers_copy(
    world: ProcessWorld, missed: str, comes_late: bool
) -> None:
    """Eight tokens are one chunk: the last rank's come last, so that only it is waited for."""
    check_missing_rank(world, replace(PUSH, timeout_s=1.0, tokens=(8,) * 4), missed, comes_late)


EVERY_RANK = (0, 1, 2, 3)


@four_ranks
@pytest.mark.fault
@pytest.mark.parametrize(
    ("function", "body", "liars", "words"),
    [
        ("ncclCommWindowRegister", NULL_WINDOW, EVERY_RANK, "NCCL gave no window for the arena"),
        ("ncclCommWindowRegister", INTERNAL_ERROR, EVERY_RANK, "arena.cpp"),
        ("ncclGetPeerDevicePointer", INTERNAL_ERROR, (1,), "arena.cpp"),
        ("ncclCommInitRankConfig", INTERNAL_ERROR, EVERY_RANK, "communicator.cpp"),
        ("ncclCommQueryProperties", INTERNAL_ERROR, (1,), "communicator.cpp"),
    ],
    ids=["null_window", "register", "peer_pointer", "init", "properties"],
)
def test_what_nccl_answers_is_looked_at_and_told_on_all_ranks(
    world: ProcessWorld,
    tmp_path: Path,
    function: str,
    body: str,
    liars: tuple[int, ...],
    words: str,
) -> None:
    """No rank waits for another, and a group over the NCCL that does not lie works afterwards."""
    library = nccl_that_lies(tmp_path, function, body)
    told = world.run(faults.refused_over, Case(), str(library), liars)
    for refusal, differ in told:
        assert refusal.startswith(f"on rank {liars[0]}: ")
        assert words in refusal
        if body == INTERNAL_ERROR:
            assert f"{function}(" in refusal
            assert "internal error" in refusal
        assert not differ


@pytest.mark.fault
def test_other_work_of_the_stream_does_not_count_as_waiting(world: ProcessWorld) -> None:
    """The host's deadline starts where the plan's kernels do."""
    deadline_s = 1.0
    for seconds, differ in world.run(
        faults.plan_behind_other_work, Case(timeout_s=deadline_s), 2.5 * deadline_s
    ):
        assert seconds > 2 * deadline_s
        assert not differ


@pytest.mark.fault
@pytest.mark.parametrize("wants_room", [True, False])
def test_a_rank_that_leaves_is_told_at_once(world: ProcessWorld, wants_room: bool) -> None:
    """Long before the deadline, with its reason; and a new group works."""
    case = replace(SMALL_HEAP, timeout_s=30.0)
    for rank, told in enumerate(world.run(faults.one_rank_leaves, case, wants_room)):
        assert told.seconds < 5
        if rank != faults.ODD_ONE:
            assert told.kind == ("CapacityError" if wants_room else "EpTimeoutError")
            assert f"rank {faults.ODD_ONE} left" in told.message
            assert ("no room for output rows of 4 MiB" in told.message) == wants_room
        assert not told.differ


@pytest.mark.fault
def test_nobody_waits_at_the_close_for_a_rank_that_failed(world: ProcessWorld) -> None:
    """Nor is a collective of the process group left open, as the new group would meet it."""
    for told in world.run(faults.one_rank_fails_while_others_close, Case(timeout_s=30.0)):
        assert told.seconds < 5
        assert not told.differ


def test_a_rank_without_room_may_make_some_and_call_again(world: ProcessWorld) -> None:
    for rank, (message, as_before) in enumerate(world.run(faults.one_rank_makes_room, SMALL_HEAP)):
        assert ("would do" in message) == (rank == faults.ODD_ONE)
        assert as_before


@pytest.mark.fault
@pytest.mark.parametrize("mode", [Case(timeout_s=30.0), replace(STATIC, timeout_s=30.0)])
def test_weights_on_some_ranks_only_are_told_on_all(world: ProcessWorld, mode: Case) -> None:
    """Nobody goes on with zeros; the deadline is not waited for."""
    for told in world.run(faults.weights_on_some, mode, 0):
        assert told.kind == "AgreementError"
        assert "pass them on all ranks or on none" in told.message
        assert told.seconds < 5
        assert not told.differ


@pytest.mark.fault
@pytest.mark.parametrize("form", ["push", "gather"])
def test_gradients_on_some_ranks_only_are_told_on_all(world: ProcessWorld, form: str) -> None:
    """As weights; the deadline is not waited for."""
    for told in world.run(faults.gradients_on_some, Case(timeout_s=30.0, combine=form), 0):
        assert told.kind == "AgreementError"
        assert "give them on all ranks or on none" in told.message
        assert told.seconds < 5
        assert not told.differ


@pytest.mark.fault
def test_calls_behind_a_plan_that_a_rank_missed_leave(world: ProcessWorld) -> None:
    """In static mode nobody looks between a plan and what uses it."""
    case = replace(STATIC, timeout_s=1.0)
    *others, last = world.run(faults.calls_behind_a_missing_plan, case)
    for waited in others:
        assert waited.phase.startswith("route")
        assert waited.seconds < case.timeout_s + 1
        assert not waited.differ
    assert len(others) in {waited.peer for waited in others}
    assert not last.differ
