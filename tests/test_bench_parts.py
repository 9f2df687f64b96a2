"""The ablation harness's parts: specs, traces, byte counts, the check itself."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ep_dispatcher.accounting import LINKS
from ep_dispatcher.bench.backends.base import Received
from ep_dispatcher.bench.backends.megatron import capacity_factor
from ep_dispatcher.bench.bandwidth import count_rows, phase_bytes, rates
from ep_dispatcher.bench.check import Checker, WrongResult, arrivals_of
from ep_dispatcher.bench.experts import Experts
from ep_dispatcher.bench.inputs import make_inputs, make_routing, most_rows
from ep_dispatcher.bench.record import RouterRecorder, experts_of
from ep_dispatcher.bench.spec import BenchSpec, Work, load_spec
from ep_dispatcher.bench.stopwatch import MEET, Stopwatch
from ep_dispatcher.bench.trace import RouterTrace, merge_traces, read_trace, write_trace
from ep_dispatcher.cli import main
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.testing import run_ranks

CPU = torch.device("cpu")
WORK = Work(ranks=2, num_tokens=6, hidden=8, num_topk=2, num_experts=4, dtype="float32")


def received(work: Work = WORK) -> Received:
    """What a right backend gives rank 0."""
    want = arrivals_of(work, 0, CPU)
    return Received(
        rows=want.rows.clone(),
        weights=want.weights.clone(),
        tokens_per_expert=want.tokens_per_expert,
        segment_rows=want.tokens_per_expert,
    )


def checker() -> Checker:
    return Checker(WORK, 0, make_inputs(WORK, 0, CPU))


def test_sweeps_expand_to_products_and_repeat_nothing() -> None:
    spec = BenchSpec.from_dict(
        {
            "backends": ["a", "b"],
            "work": vars(WORK),
            "sweeps": [
                {"num_tokens": [1, 2], "num_topk": [1, 2]},
                {"num_tokens": [2], "backends": ["b"]},
            ],
        }
    )
    mine = [(w.num_tokens, w.num_topk) for name, w in spec.pairs() if name == "b"]
    assert mine == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert len(spec.pairs()) == 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backends": []}, "backends is empty"),
        ({"backends": ["x"], "colour": 1}, "unknown key 'colour' in the file"),
        ({"backends": ["x"], "work": {"tokens": 1}}, "unknown key 'tokens' in section 'work'"),
        ({"backends": ["x"], "sweeps": [{"num_tokens": 4}]}, "it must be a list of values"),
        ({"backends": ["x"], "work": {"hidden": 3}}, "hidden a multiple of 8"),
        ({"backends": ["x"], "work": {"routing": "replay"}}, "'replay' needs a file"),
        ({"backends": ["x"], "work": {"domains": 3}}, "it must divide ranks 4"),
        ({"backends": ["x"], "method": {"rounds": 5}}, "rounds is 5; it must be at least 20"),
        ({"backends": ["x"], "device": "tpu"}, "device is 'tpu'"),
        ({"backends": ["x"], "work": {"ranks": "x"}}, "ranks is 'x'; it must be a whole number"),
        ({"backends": ["x"], "work": {"ranks": True}}, "ranks is True; it must be a whole number"),
        ({"backends": ["x"], "work": {"ranks": 0}}, "ranks is 0; it must be at least 1"),
        ({"backends": ["x"], "work": {"skew": "much"}}, "skew is 'much'; it must be a number"),
        ({"backends": ["x"], "work": {"skew": -1}}, r"skew is -1; it must be in \[0, inf\)"),
        ({"backends": ["x"], "work": {"skew": math.nan}}, r"skew is nan; it must be in \[0, inf"),
        (
            {"backends": ["x"], "sweeps": [{"routing": ["zipf"], "skew": [0, math.inf]}]},
            r"skew is inf; it must be in \[0, inf\)",
        ),
        ({"backends": ["x"], "method": {"usage": "maybe"}}, "it must be true or false"),
        ({"backends": ["x"], "method": {"time_limit_s": math.nan}}, r"nan; it must be in \(0, inf"),
        ({"backends": "x"}, "backends is 'x'; it must be a list of names"),
        ({"backends": ["x"], "work": [1, 2]}, r"section 'work' is \[1, 2\]; it must be a mapping"),
        ({"backends": ["x"], "work": {"trace": ["a"]}}, r"trace is \['a'\]; it must be a word"),
        ({"backends": ["x"], "sweeps": {"num_tokens": [4]}}, "it must be a list of mappings"),
        ({"backends": ["x"], "sweeps": [{"backends": "x"}]}, "backends is 'x'; it must be a list"),
        (
            {"backends": ["x", "y"], "sweeps": [{"backends": ["x"], "num_tokens": [4]}]},
            "backend 'y' is in `backends` but no sweep runs it",
        ),
    ],
)
def test_a_wrong_spec_names_what_is_wrong(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchSpec.from_dict(values)


@pytest.mark.parametrize("file", sorted(Path("configs").glob("bench_*.yaml")), ids=str)
def test_the_shipped_files_load(file: Path) -> None:
    assert load_spec(file).pairs()


def test_routings_are_what_their_names_say() -> None:
    assert make_routing(replace(WORK, routing="all-to-one"), 1).unique().tolist() == [0, 1]
    masked = make_routing(replace(WORK, num_tokens=1000, masked_fraction=0.25), 0)
    assert 0.2 < float((masked < 0).float().mean()) < 0.3
    even, skewed = (
        torch.bincount(
            make_routing(
                replace(WORK, num_tokens=500, num_experts=16, routing=name, skew=2.0), 0
            ).flatten(),
            minlength=16,
        )
        for name in ("uniform", "zipf")
    )
    assert int(skewed.max()) > 3 * int(even.max())


@pytest.mark.parametrize(
    "work",
    [
        replace(WORK, num_tokens=100),
        replace(WORK, num_tokens=100, routing="zipf"),
        replace(WORK, num_tokens=4096, routing="all-to-one"),
    ],
    ids=["uniform", "zipf", "all-to-one"],
)
def test_megatrons_buffer_has_room_for_the_busiest_rank(work: Work) -> None:
    """By its rule: tokens in chunks of 64, times K, times the factor, rounded down."""
    tokens = -(-work.num_tokens // 64) * 64
    room = int(tokens * work.num_topk * capacity_factor(work))
    assert max(most_rows(work), tokens) <= room <= max(most_rows(work), tokens) + 1


def test_the_check_accepts_rows_in_any_order_inside_an_expert() -> None:
    right = received()
    order = torch.cat([torch.arange(int(n)).flip(0) for n in right.tokens_per_expert])
    starts = right.tokens_per_expert.cumsum(0) - right.tokens_per_expert
    order += starts.repeat_interleave(right.tokens_per_expert)
    assert right.weights is not None
    turned = replace(right, rows=right.rows[order], weights=right.weights[order])
    checker().dispatch(turned)


@pytest.mark.parametrize("fault", ["weight", "bit", "count", "missing weights"])
def test_the_check_catches_a_wrong_dispatch(fault: str) -> None:
    right = received()
    assert right.weights is not None
    if fault == "weight":
        right.weights[0] *= 1.0000001
    if fault == "bit":
        right.rows.view(torch.int32)[-1, -1] ^= 1
    if fault == "count":
        right = replace(right, tokens_per_expert=right.tokens_per_expert.flip(0) + 1)
    if fault == "missing weights":
        right = replace(right, weights=None)
    with pytest.raises(WrongResult, match="dispatch"):
        checker().dispatch(right)


def dense_sums(weights: Tensor, inputs_x: Tensor, topk_idx: Tensor) -> Tensor:
    """Combine of the check's expert rows, in float32, straight from its definition."""
    scales = weights * (1 + (topk_idx % 7).float() / 8)
    return torch.einsum("th,tk->th", inputs_x, scales)


def test_the_check_accepts_a_rounded_sum_and_catches_a_missing_term() -> None:
    inputs = make_inputs(WORK, 0, CPU)
    out = dense_sums(inputs.topk_weights, inputs.x, inputs.topk_idx)
    mine = checker()
    mine.combine(out)
    assert mine.max_error < 1e-6
    weights = inputs.topk_weights.clone()
    weights[3, 1] = 0
    with pytest.raises(WrongResult, match="combine: token 3"):
        checker().combine(dense_sums(weights, inputs.x, inputs.topk_idx))


def test_the_check_notices_a_row_that_another_expert_worked_on() -> None:
    inputs = make_inputs(WORK, 0, CPU)
    wrong = dense_sums(inputs.topk_weights, inputs.x, (inputs.topk_idx + 1) % 4)
    with pytest.raises(WrongResult, match="combine"):
        checker().combine(wrong)


def test_byte_counts_of_a_routing_that_is_easy_to_count() -> None:
    work = replace(WORK, routing="all-to-one")  # both ranks send all tokens to rank 0's experts
    for wire, rows in (("by_copy", 12), ("by_rank", 6), ("deduplicated", 6), ("all_gather", 6)):
        counts = count_rows(work, wire)  # type: ignore[arg-type]
        assert sum(float(counts.sent[link][1]) for link in LINKS) == rows
    counts = count_rows(work, "deduplicated")
    assert counts.sent["inside"].tolist() == [0, 6]
    assert counts.copies.tolist() == [24, 0]
    assert counts.rank_pairs.tolist() == [6, 6]
    sizes = phase_bytes(work, counts, "combine")
    assert sizes["wire_bytes"] == 3 * work.row_bytes
    assert sizes["wire_bytes_max"] == 6 * work.row_bytes


def test_bandwidth_definitions_count_different_rows_over_the_same_time() -> None:
    work = replace(WORK, routing="all-to-one")
    found = rates(work, count_rows(work, "deduplicated"), "dispatch", 1.0, 1.0, flat=False)
    row = work.row_bytes / 1000
    assert found["wire"] == pytest.approx(3 * row)
    assert found["D1"] == pytest.approx(6 * row)
    assert found["D2"] == pytest.approx(12 * row)
    assert found["D3"] == pytest.approx(6 * (work.row_bytes + 24) / 1000)
    assert found["D5_assignments"] == pytest.approx(12 * row / 2)


def test_a_trace_replays_what_was_recorded(tmp_path: Path) -> None:
    traces = [RouterTrace(num_experts=4, num_topk=2, ep_size=2) for _ in range(2)]
    for rank, trace in enumerate(traces):
        for layer in range(3):
            trace.add(torch.tensor([[rank, -1], [layer, 3]]), layer, rank)
    file = tmp_path / "trace.npz"
    write_trace(file, merge_traces(traces))
    work = replace(WORK, routing="replay", trace=str(file), num_tokens=4)
    assert make_routing(work, 1).tolist() == [[1, -1], [0, 3], [1, -1], [1, 3]]
    summary = read_trace(file).summary()
    assert (summary["entries"], summary["layers"], summary["tokens"]) == (6, 3, 12)
    with pytest.raises(ConfigError, match="has 6 tokens of rank 0; num_tokens is 7"):
        make_routing(replace(work, num_tokens=7), 0)
    with pytest.raises(ConfigError, match="set the work to the trace's"):
        make_routing(replace(work, num_experts=8), 0)


HEADER = {"format": 1, "num_experts": 4, "num_topk": 2, "ep_size": 1, "source": ""}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "trace.npz does not exist; give an .npz file that training wrote"),
        ("a folder", "trace.npz is no file; give an .npz file"),
        (b"", "it is no .npz archive; give"),
        (b"nothing", "it is no .npz archive; give"),
        ({}, "is no router trace (KeyError: 'header is not a file in the archive')"),
        ({"header": [1]}, "is no router trace (TypeError"),
        ({"header": {"format": 1}}, "is no router trace (KeyError: 'num_experts'); give"),
        ({"header": HEADER | {"format": 2}}, "has trace format 2; this version reads 1"),
    ],
    ids=["none", "folder", "empty", "junk", "foreign", "list", "short header", "format"],
)
def test_a_file_that_is_no_trace_is_refused(
    content: str | bytes | dict[str, Any] | None,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "trace.npz"
    if isinstance(content, str):
        file.mkdir()
    elif isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        arrays: dict[str, Any] = {
            name: np.frombuffer(json.dumps(value).encode(), np.uint8)
            for name, value in content.items()
        }
        np.savez(file, **arrays)
    assert main(["bench", "trace", str(file)]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert str(file) in told


class Router(nn.Module):
    """Looks like Megatron's: returns probs and a routing map."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Every token to experts 1 and 2."""
        chosen = torch.zeros(len(x), 4, dtype=torch.bool)
        chosen[:, 1:3] = True
        return chosen.float(), chosen


def test_the_recorder_listens_to_routers_and_goes_away() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Router())
    with RouterRecorder(model, 2, rank=1, ep_size=4) as recorder:
        model(torch.zeros(3, 2))
    model(torch.zeros(3, 2))
    assert [entry.tolist() for entry in recorder.trace.entries] == [[[1, 2]] * 3]
    assert (recorder.trace.num_experts, recorder.trace.ranks) == (4, [1])
    with pytest.raises(ConfigError, match="has no router"):
        RouterRecorder(nn.Linear(1, 1), 2, rank=0, ep_size=1)
    with pytest.raises(ConfigError, match="routed to 3 experts; num_topk is 2"):
        experts_of(torch.ones(1, 3, dtype=torch.bool), 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_that_write_into_given_rows_differ_in_nothing(dtype: str) -> None:
    work = replace(WORK, ffn_hidden=16, dtype=dtype)
    experts, given = Experts(work, 2, CPU), received(work)
    assert given.weights is not None
    rows, weights = given.rows.requires_grad_(), given.weights.requires_grad_()
    into = torch.full_like(given.rows, torch.nan, requires_grad=False)
    outs = [experts(rows, weights, given), experts(rows, weights, given, into)]
    assert outs[1].data_ptr() == into.data_ptr()
    assert torch.equal(*outs)
    wanted = [rows, weights, *experts.matrices]
    grad = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)).to(rows.dtype)
    for plain, written in zip(
        *(torch.autograd.grad(out, wanted, grad) for out in outs), strict=True
    ):
        assert torch.equal(plain, written)


def test_gradients_of_the_layers_experts_are_not_made_once_for_each_expert() -> None:
    """Through `matrices[expert]` each of L gradients would be as large as all L matrices."""
    experts = Experts(replace(WORK, ffn_hidden=16, num_experts=12), 6, CPU)
    given = received(replace(WORK, num_experts=12))
    assert given.weights is not None
    out = experts(given.rows, given.weights, given)

    class Elements(TorchDispatchMode):
        """Adds up what operations return."""

        count = 0

        def __torch_dispatch__(
            self,
            func: torch._ops.OpOverload,
            types: tuple[type, ...],
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and not func.is_view:
                self.count += result.numel()
            return result

    with Elements() as made:  # type: ignore[no-untyped-call]
        torch.autograd.grad(out, experts.matrices, torch.ones_like(out))
    assert made.count < 4 * sum(matrix.numel() for matrix in experts.matrices)


@pytest.mark.parametrize("meets", [True, False])
def test_communication_is_not_charged_with_a_peers_slower_permute(meets: bool) -> None:
    """Rank 1 permutes for 100 ms more; what then waits for it counts unless the ranks meet."""

    def times(group: dist.ProcessGroup) -> dict[str, float]:
        watch = Stopwatch(group, CPU)
        watch.begin()
        sleep(0.1 * group.rank())
        watch.lap("unpermute")
        if meets:
            watch.lap(MEET)
        group.barrier().wait()
        watch.lap("combine")
        return watch.read()

    first, second = run_ranks(2, times)
    assert set(first) == set(second) == {"unpermute", "combine"}
    assert second["unpermute"] > 90_000
    assert (first["combine"] > 50_000) is not meets
