"""Profiling: spans by events, and what is read out of a Chrome trace."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ep_dispatcher import device, launch
from ep_dispatcher.errors import ConfigError
from ep_dispatcher.launch import USER_ERROR
from ep_dispatcher.profile import command, parity, schedule, syncs
from ep_dispatcher.profile.beside import Timeline, evaluate, variants_of
from ep_dispatcher.profile.clock import Clock, HostStamp, Span, hidden_ms, merge, overlap_of
from ep_dispatcher.profile.parity import SPLIT, SplitCorpus, config_of
from ep_dispatcher.profile.picture import last_layer
from ep_dispatcher.profile.picture import main as picture
from ep_dispatcher.profile.products import GroupedProducts
from ep_dispatcher.profile.trace import Trace, summarise
from ep_dispatcher.train.config import load_config
from ep_dispatcher.train.data import BatchKey, Corpus

Intervals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda pair: (pair[0], sum(pair)))
)


@given(intervals=Intervals, probe=st.tuples(st.integers(0, 30), st.integers(0, 10)))
def test_overlap_counts_each_moment_once(
    intervals: list[tuple[int, int]], probe: tuple[int, int]
) -> None:
    """The same as counting whole microseconds one by one."""
    covered = {moment for start, end in intervals for moment in range(start, end)}
    merged = merge([(float(start), float(end)) for start, end in intervals])
    assert sum(end - start for start, end in merged) == len(covered)
    start, end = probe[0], sum(probe)
    assert overlap_of((start, end), merged) == len(covered & set(range(start, end)))


def test_hidden_time_is_that_beside_experts() -> None:
    """A dispatch from 0 to 4 and a combine from 6 to 8; experts from 1 to 3 and from 7 to 9."""
    spans = [
        Span("dispatch", 0, 4),
        Span("experts", 1, 3),
        Span("combine", 6, 8),
        Span("experts", 7, 9),
    ]
    assert hidden_ms(spans, ("dispatch", "combine"), ("experts",)) == 3


class Ticks:
    """Stamps that count how often one was taken."""

    def __init__(self) -> None:
        """At zero."""
        self.now = 0

    def make(self) -> Any:  # noqa: ANN401
        """A stamp of this counter."""
        ticks = self

        class Tick(HostStamp):
            at = 0

            def record(self) -> None:
                ticks.now += 1
                self.at = ticks.now

            def elapsed_time(self, end: Any) -> float:  # noqa: ANN401
                return float(end.at - self.at)

        return Tick()


def test_clock_brackets_forward_and_backward() -> None:
    """A wrapped function's forward and backward are spans that contain what runs in them."""
    clock = Clock(Ticks().make)
    seen: list[str] = []

    def note(grad: torch.Tensor) -> None:
        seen.append("backward")

    def double(x: torch.Tensor, none: None) -> tuple[torch.Tensor, None]:
        with clock.span("inside"):
            out = x * 2
        out.register_hook(note)
        return out, none

    timed = clock.wrap("double", double)
    x = torch.ones(3, requires_grad=True)
    assert timed(x, None)[1] is None  # not active: nothing is recorded
    clock.start()
    timed(x, None)[0].sum().backward()
    spans = {span.name: span for span in clock.stop()}
    assert set(spans) == {"double", "inside", "double_backward"}
    assert spans["double"].start_ms < spans["inside"].start_ms
    assert spans["inside"].end_ms < spans["double"].end_ms < spans["double_backward"].start_ms
    assert spans["double_backward"].start_ms < spans["double_backward"].end_ms
    assert seen == ["backward"]
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: object) -> Any:  # noqa: ANN401
    """A complete event of a trace."""
    return {
        "ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args
    }  # fmt: skip


def launched(
    correlation: int, name: str, call_us: float, start_us: float, end_us: float, tid: int = 1
) -> list[Any]:
    """A kernel and the call that launched it."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", call_us, 1, tid, correlation=correlation),
        event("kernel", name, start_us, end_us - start_us, 7, correlation=correlation, grid=[8]),
    ]


def layer_events() -> list[Any]:
    """A layer: dispatch beside nothing, a GEMM alone, a GEMM beside combine, and a backward."""
    return [
        event("user_annotation", "ep:layer", 0, 50),
        event("user_annotation", "ep:plan", 1, 4),
        event("user_annotation", "ep:dispatch", 5, 5),
        event("user_annotation", "ep:experts", 10, 10),
        event("user_annotation", "ep:combine", 25, 5),
        event("cpu_op", "aten::mm", 11, 8, **{"Sequence number": 40, "Fwd thread id": 0}),
        event("cpu_op", "aten::other", 40, 8, **{"Sequence number": 41, "Fwd thread id": 0}),
        event("cpu_op", "MmBackward0", 60, 8, 2, **{"Sequence number": 40, "Fwd thread id": 1}),
        event("cpu_op", "OtherBackward", 70, 8, 2, **{"Sequence number": 41, "Fwd thread id": 1}),
        event("cuda_runtime", "cudaStreamSynchronize", 3, 1),
        event("cuda_runtime", "cudaDeviceSynchronize", 90, 1),
        *launched(1, "dispatch_kernel", 6, 100, 140),
        *launched(2, "nvjet_gemm", 12, 140, 160),
        *launched(3, "nvjet_gemm", 14, 160, 190),
        *launched(4, "combine_kernel", 26, 162, 182),
        *launched(5, "nvjet_gemm_wgrad", 61, 200, 220, tid=2),
        *launched(6, "elementwise", 71, 220, 230, tid=2),
    ]


def test_summary_of_a_trace() -> None:
    """Every figure, from the events above: dispatch is exposed, combine is hidden."""
    found = summarise(Trace(layer_events()))
    assert found["phases_us"] == {
        "combine": 20.0,
        "dispatch": 40.0,
        "experts": 50.0,
        "experts_backward": 20.0,
    }
    assert found["communication_us"] == 60
    assert found["exposed_us"] == 40
    assert found["hidden_fraction"] == pytest.approx(20 / 60, abs=1e-4)
    assert found["gemm_slow_down"] == 1.5
    assert (found["layers"], found["plans_per_layer"]) == (1, 1.0)
    assert found["host_syncs_per_layer"] == 1.0  # the other is outside the layer


def test_summary_without_kernels() -> None:
    """On the CPU: ranges and the experts' backward operations; nothing about streams."""
    host = [each for each in layer_events() if each["cat"] in ("user_annotation", "cpu_op")]
    found = summarise(Trace(host))
    assert found["phases_us"] == {
        "combine": 5.0,
        "dispatch": 5.0,
        "experts": 10.0,
        "experts_backward": 8.0,
        "plan": 4.0,
    }
    assert found["hidden_fraction"] is None
    assert found["host_syncs_per_layer"] is None


@pytest.mark.parametrize("on_gpu", [True, False])
def test_shared_experts_and_their_backward_are_compute(on_gpu: bool) -> None:
    """They have phases of their own, none of them communication."""
    events = [
        *layer_events(),
        event("user_annotation", "ep:shared_experts", 31, 8),
        event("cpu_op", "aten::mm", 32, 2, **{"Sequence number": 42, "Fwd thread id": 0}),
        event("cpu_op", "MmBackward0", 80, 6, 2, **{"Sequence number": 42, "Fwd thread id": 1}),
        *launched(7, "nvjet_shared", 33, 300, 304),
        *launched(8, "nvjet_shared_wgrad", 81, 310, 316, tid=2),
    ]
    if not on_gpu:
        events = [each for each in events if each["cat"] in ("user_annotation", "cpu_op")]
    plain, found = summarise(Trace(layer_events())), summarise(Trace(events))
    assert found["phases_us"]["shared_experts"] == (4.0 if on_gpu else 8.0)
    assert found["phases_us"]["shared_experts_backward"] == 6.0
    if on_gpu:
        assert found["communication_us"] == plain["communication_us"]


@pytest.mark.parametrize("name", ["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"])
def test_waits_of_the_driver_are_counted(name: str) -> None:
    """Libraries call the driver without the runtime; its names are others."""
    events = [*layer_events(), event("cuda_driver", name, 4, 1)]
    assert Trace(events).num_syncs == Trace(layer_events()).num_syncs + 1


def test_layers_are_counted_without_their_range() -> None:
    """Under a schedule that runs a layer's parts itself there are plans only."""
    parts = [each for each in layer_events() if each["name"] != "ep:layer"]
    assert summarise(Trace([*parts, event("user_annotation", "ep:plan", 300, 2)]))["layers"] == 2


def test_a_trace_without_named_layers_has_no_figures_for_one() -> None:
    """A dispatcher of Megatron's: what is not known is None, not zero, and not of one layer."""
    events = [
        event("cpu_op", "aten::mm", 11, 8, **{"Sequence number": 40, "Fwd thread id": 0}),
        *launched(2, "nvjet_gemm", 12, 140, 160),
    ]
    for trace in (Trace(events), Trace(events[:1])):
        found = summarise(trace)
        assert found["layers"] == 0
        for name in (
            "communication_us", "exposed_us", "hidden_fraction", "plans_per_layer",
            "host_syncs_per_layer",
        ):  # fmt: skip
            assert found[name] is None, name


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_other_dispatchers_are_refused_before_ranks_start(
    dispatcher: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their layers have no named phases; the message says what can be used."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    path = Path(__file__).parent.parent / "configs" / "tiny_cpu.yaml"
    words = ["--config", str(path), "--set", f"train.dispatcher={dispatcher}"]
    assert command.rank_main(words) == USER_ERROR
    said = capsys.readouterr().err
    assert f"train.dispatcher is {dispatcher}" in said
    assert "ep_dispatcher.profile.layer" in said


def test_the_table_is_of_ranks_with_layers_each_by_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipeline stage without experts, one of one layer and one of three: 40, 60 / 3 -> 30."""
    path = Path(__file__).parent.parent / "configs" / "tiny_cpu.yaml"
    empty = summarise(Trace([]))
    ranks = [
        empty | {"layers": layers, "phases_us": {"plan": 4.0 * layers}, "communication_us": total}
        for layers, total in ((1, 40.0), (3, 60.0))
    ]
    command._report(load_config(path), [empty, *ranks], tmp_path)
    rows = {
        words[1]: words[3]
        for words in (line.split() for line in capsys.readouterr().out.splitlines())
        if len(words) == 5
    }
    assert (rows["plan"], rows["communication"]) == ("4.0", "30.0")


def test_compressed_traces_are_read(tmp_path: Path) -> None:
    """A .gz gives what the plain file gives."""
    text = json.dumps({"traceEvents": layer_events()})
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    assert summarise(Trace.read(plain)) == summarise(Trace.read(packed))


def test_products_beside_communication_are_compared_with_those_alone() -> None:
    """The example of `evaluate`; then a call of which half is after the products."""
    alone = [Timeline([(0, 2), (2, 4)], [])]
    call = [Timeline([], [(0, 1)])]
    found = evaluate(alone, call, [Timeline([(0, 3), (3, 5)], [(0, 3)])])
    assert found.hidden_fraction == 1
    assert found.saved_fraction == 0
    assert (found.gemm_slow_down, found.num_products) == (1.5, 1)
    assert found.communication_slow_down == 3
    found = evaluate(alone, call, [Timeline([(0, 2), (2, 4)], [(3.5, 4.5)])])
    assert found.hidden_fraction == 0.5
    assert found.saved_fraction == 0.5
    assert (found.gemm_slow_down, found.num_products) == (None, 0)
    assert found.communication_slow_down is None


def test_variants_have_names_of_their_own() -> None:
    """Of one number of SMs; products are told to leave those alone at least, or none."""
    variants = variants_of(16)
    assert len({each.name for each in variants}) == len(variants)
    assert {each.left_free_sms for each in variants if not each.idle} == {0, 16, 24, 32}
    assert {each.left_free_sms for each in variants if each.idle} == {0, 16, 24, 32}
    assert [each.name for each in variants if each.priority == 0] == ["beside, equal priority"]


def test_grouped_products_are_told_by_the_environment_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the user has set is there again afterwards; 0 changes nothing."""
    products = object.__new__(GroupedProducts)  # needs no GPU for this
    monkeypatch.delenv("NVTE_EXT_MARGIN_SM", raising=False)
    with products.left_free(24):
        assert os.environ["NVTE_EXT_MARGIN_SM"] == "24"
    assert "NVTE_EXT_MARGIN_SM" not in os.environ
    monkeypatch.setenv("NVTE_EXT_MARGIN_SM", "3")
    for told, seen in ((24, "24"), (0, "3")):
        with products.left_free(told):
            assert os.environ["NVTE_EXT_MARGIN_SM"] == seen
        assert os.environ["NVTE_EXT_MARGIN_SM"] == "3"


def test_split_micro_batches_are_halves_of_the_others() -> None:
    """The control for chunks reads the same sequences, two micro-batches for one."""
    corpus = Corpus(torch.arange(200, dtype=torch.uint8), "", 1, "test")
    halves = SplitCorpus.of(corpus)
    for index in range(2):
        whole = corpus.batch(BatchKey(1, 2, 0, index), 4, 8)
        parts = [halves.batch(BatchKey(1, 2, 0, 2 * index + half), 2, 8) for half in range(2)]
        for side in range(2):
            assert torch.equal(torch.cat([part[side] for part in parts]), whole[side])


def test_split_control_keeps_the_batch_and_refuses_another_loss() -> None:
    """Twice the micro-batches of half the size; an auxiliary loss is no sum over tokens."""
    path = Path(__file__).parent.parent / "configs" / "one_gpu_4ranks.yaml"
    config = load_config(path, ["model.aux_loss=0"])
    split = config_of(SPLIT, config, 2)
    assert split.tokens_per_step == config.tokens_per_step
    assert split.train.num_micro_batches == 2 * config.train.num_micro_batches
    assert split.train.dispatcher == "alltoall"
    with pytest.raises(ConfigError, match="aux_loss"):
        config_of(SPLIT, load_config(path, []), 2)


def test_words_of_a_parity_variant_change_the_config() -> None:
    """A dispatcher, then what is changed; the rest of the config stays."""
    path = Path(__file__).parent.parent / "configs" / "one_gpu_4ranks.yaml"
    config = load_config(path, [])
    found = config_of("chunks sharded recompute ledger", config, 3)
    assert found.train.distributed_optimizer
    assert found.model.recompute == "moe"
    assert found.ep_dispatcher.overlap.chunks == 3
    assert found.ep_dispatcher.debug_ledger
    assert found.model.hidden == config.model.hidden
    plain = config_of("alltoall 1f1b", load_config(path, ["train.num_micro_batches=2"]), 3)
    assert (plain.train.dispatcher, plain.train.overlap) == ("alltoall", True)
    assert not plain.ep_dispatcher.debug_ledger


@pytest.mark.parametrize("module", [parity, schedule])
def test_one_micro_batch_under_1f1b_is_refused_before_any_variant_runs(
    module: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It would combine nothing; the message names the variant and the setting."""
    monkeypatch.setattr(module, "open_runtime", lambda _: pytest.fail("a rank joined the job"))
    path = Path(__file__).parent.parent / "configs" / "one_gpu_4ranks.yaml"
    words = ["--config", str(path), "--variants", "alltoall,ours 1f1b"]
    assert module.main(words) == USER_ERROR
    said = capsys.readouterr().err
    assert "variant 'ours 1f1b'" in said
    assert "train.num_micro_batches to at least 2" in said
    with pytest.raises(pytest.fail.Exception, match="a rank joined"):
        module.main([*words, "--set", "train.num_micro_batches=2"])


@pytest.mark.parametrize("name", ["deepep", "ours twice", ""])
def test_unknown_parity_variants_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything runs; the message names the words."""
    with pytest.raises(SystemExit):
        parity.main(["--config", "none.yaml", "--variants", f"alltoall,{name}"])
    assert "recompute" in capsys.readouterr().err


def test_picture_shows_the_last_layer_of_a_trace(tmp_path: Path) -> None:
    """Two layers one after the other: only the phases of the second, from its plan on."""
    marks: list[Any] = []
    work: list[Any] = []
    for start in (0.0, 1000.0):
        for index, name in enumerate(("plan", "dispatch", "combine_backward", "dispatch_backward")):
            at = start + 10 * index
            marks.append(event("user_annotation", f"ep:{name}", at, 5))
            work += launched(int(at) + 1, name, at + 1, at + 100, at + 102 + index)
    spans = last_layer(Trace([*marks, *work]))
    assert [span.name for span in spans] == [
        "plan", "dispatch", "combine_backward", "dispatch_backward",
    ]  # fmt: skip
    assert spans[0].start_ms == 0
    assert spans[1].start_ms == pytest.approx(0.01)
    assert spans[3].end_ms - spans[3].start_ms == pytest.approx(0.005)
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [*marks, *work]}))
    assert picture([f"1 chunk={trace}", str(tmp_path / "layer.png")]) == 0
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")


def test_waits_for_a_mailbox_are_counted_where_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the call that the device tier makes, while it is counted and not after."""
    backend: Any = object.__new__(device.DeviceBackend)  # needs no GPU for this
    backend._session = SimpleNamespace(fault_address=0, device=None)
    backend._module = SimpleNamespace(wait_for_mailbox=lambda *_: True)
    backend._config = SimpleNamespace(tuning=SimpleNamespace(timeout_s=1.0))
    backend._begun = SimpleNamespace(query=lambda: True)
    backend._ticket = 1
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: backend._begun)
    with syncs.counting_waits() as waits:
        assert waits.count == 0
        assert [backend._answered(0), backend._answered(0)] == [True, True]
    assert backend._answered(0)
    assert waits.count == 2


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_waits_of_either_mode_are_those_that_were_counted(mode: str) -> None:
    """Eight mailboxes and one CUDA call in four layers; nothing follows from the mode's name."""
    lines: list[dict[str, Any]] = []
    log: Any = SimpleNamespace(write=lambda **fields: lines.append(fields))
    syncs.record(mode, syncs.Seen(Trace(layer_events()), 8), log)
    (line,) = lines
    assert (line["variant"], line["host_syncs"], line["cuda_synchronisations"]) == (
        mode,
        2.25,
        0.25,
    )
