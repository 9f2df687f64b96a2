"""Parts of the training job that need no ranks: text, schedule, counting, files, picture."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ep_dispatcher import ConfigError, EpConfig, EPGroup, MoeShape, Topology
from ep_dispatcher.accounting import plan_traffic
from ep_dispatcher.megatron.compat import SM_MARGINS, leave_sms
from ep_dispatcher.testing import make_routing, run_ranks
from ep_dispatcher.train.config import DataSection, load_config
from ep_dispatcher.train.data import BatchKey, DataError, load_corpus
from ep_dispatcher.train.manifest import CheckpointError, Manifest, digest, finished, folder_of
from ep_dispatcher.train.metrics import MetricsFile, StepMetrics, read_metrics
from ep_dispatcher.train.observe import Layout, RouterObserver, max_over_mean
from ep_dispatcher.train.plots import draw
from ep_dispatcher.train.runtime import sm_margin


def metrics_of(step: int) -> StepMetrics:
    """A line with two layers of four experts."""
    return StepMetrics(
        step=step,
        loss=5.0 / step,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=8,
        tokens_per_s=100.0,
        step_s=0.1,
        tokens_per_expert=[[4, 4, 4, 4], [16, 0, 0, 0]],
        load_max_over_mean=4.0,
        moved_bytes=10,
        across_bytes=0,
    )


def test_default_text_is_the_standard_library() -> None:
    """Real text is found without a path, the same each time."""
    section = DataSection(max_bytes=100_000)
    first, second = load_corpus(section, 64), load_corpus(section, 64)
    assert first.num_files > 1
    assert first.sha256 == second.sha256
    assert b"import" in bytes(first.tokens.tolist())


def test_folder_is_read_in_order_and_cut(tmp_path: Path) -> None:
    """Sorted by name, folders too; other endings are left out; max_bytes holds."""
    (tmp_path / "b.txt").write_text("B" * 600)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_text("A" * 600)
    (tmp_path / "c.bin").write_text("C")
    text = load_corpus(DataSection(path=str(tmp_path), max_bytes=1024), 8)
    assert bytes(text.tokens.tolist()) == b"A" * 600 + b"\n" + b"B" * 423
    with pytest.raises(DataError, match=r"\.nothing"):
        load_corpus(DataSection(path=str(tmp_path), suffixes=".nothing"), 8)


def test_batches_depend_on_the_key_alone(tmp_path: Path) -> None:
    """Equal keys give equal bytes, other keys others; labels are the next bytes."""
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 40)
    text = load_corpus(DataSection(path=str(path)), 16)
    key = BatchKey(seed=1, step=2, data_rank=3, index=0)
    tokens, labels = text.batch(key, 4, 16)
    assert torch.equal(tokens, text.batch(key, 4, 16)[0])
    assert torch.equal((tokens + 1) % 256, labels)
    for other in (BatchKey(2, 2, 3, 0), BatchKey(1, 3, 3, 0), BatchKey(1, 2, 4, 0)):
        assert not torch.equal(tokens, text.batch(other, 4, 16)[0])


def test_last_byte_can_be_a_label(tmp_path: Path) -> None:
    """Text of one sequence and one byte has exactly one place to start."""
    path = tmp_path / "text"
    path.write_bytes(b"abcd")
    tokens, labels = load_corpus(DataSection(path=str(path)), 3).batch(BatchKey(0, 0, 0, 0), 1, 3)
    assert (bytes(tokens[0].tolist()), bytes(labels[0].tolist())) == (b"abc", b"bcd")


class MoELayer(nn.Module):
    """What the observer looks for: a module of that name with a router and a layer number."""

    def __init__(self, layer_number: int) -> None:
        """Make a router that returns what it is given."""
        super().__init__()
        self.layer_number = layer_number
        self.router = _Router()


class _Router(nn.Module):
    def forward(self, routing_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (probs, routing_map)."""
        return routing_map.float(), routing_map


def layout_of(rank: int, *, domain_size: int) -> Layout:
    """4 ranks, 8 experts, 2 layers, rows of 64 bytes."""
    return Layout(
        num_layers=2,
        num_experts=8,
        row_bytes=64,
        ep_rank=rank,
        expert_tensor=1,
        topology=Topology(ep_size=4, domain_size=domain_size),
    )


@pytest.mark.parametrize("domain_size", [4, 2])
@pytest.mark.parametrize("scheme", ["deduplicated", "by_rank", "by_copy"])
def test_observed_bytes_are_those_of_the_plan(scheme: str, domain_size: int) -> None:
    """The routing map gives the same rows as the plan that the group makes of the routing."""
    config = EpConfig(
        shape=MoeShape(hidden=16, num_topk=3, num_experts=8, dtype="float32"),
        max_tokens_per_rank=64,
        virtual_domain_size=domain_size,
    )

    def work(process_group: dist.ProcessGroup) -> None:
        with EPGroup.create(process_group, config) as group:
            topk_idx = make_routing(20, 3, 8, seed=group.ep_rank, dropped=0.2)
            plan = group.plan(topk_idx)
            traffic = plan_traffic(plan, scheme)  # type: ignore[arg-type]
            routed = torch.zeros(20, 9, dtype=torch.bool).scatter_(1, topk_idx % 9, True)[:, :8]
            layout = layout_of(group.ep_rank, domain_size=domain_size)
            layer = MoELayer(layer_number=2)
            with RouterObserver(layer, layout) as observer:
                layer.router(routed)
                with torch.no_grad():
                    layer.router(routed)
            load, inside, across = observer.split(observer.take(scheme))  # type: ignore[arg-type]
            trips = 4 + 2  # with gradients there and back twice, without once
            assert inside == int(traffic.rows_per_rank("inside", "send").sum()) * 64 * trips
            assert across == int(traffic.rows_per_rank("across", "send").sum()) * 64 * trips
            assert load[1].tolist() == routed.sum(0).tolist()
            assert not load[0].any()
            layer.router(routed)
            assert not observer.take("by_rank").any()  # the hooks are gone

    run_ranks(4, work)


def test_everywhere_counts_each_token_for_each_other_rank() -> None:
    """All-gather: T rows to 3 others, and as many back, forward and backward."""
    observer = RouterObserver(nn.Module(), layout_of(1, domain_size=4))
    observer.see(torch.ones(5, 8, dtype=torch.bool), 0, with_grad=True)
    assert observer.split(observer.take("everywhere"))[1:] == (5 * 3 * 64 * 4, 0)


def test_shards_of_an_expert_each_get_a_row() -> None:
    """Two shards an expert: the token of rank 0 reaches rank 1 (own shard) or ranks 2 and 3."""
    layout = Layout(
        num_layers=1,
        num_experts=2,
        row_bytes=1,
        ep_rank=0,
        expert_tensor=2,
        topology=Topology(ep_size=4, domain_size=4),
    )
    observer = RouterObserver(nn.Module(), layout)
    observer.see(torch.tensor([[True, False]]), 0, with_grad=True)
    assert observer.split(observer.take("by_rank"))[1] == 4
    observer.see(torch.tensor([[False, True]]), 0, with_grad=True)
    assert observer.split(observer.take("by_rank"))[1] == 8


def test_balance_leaves_out_layers_without_experts() -> None:
    """The worst layer counts."""
    assert max_over_mean(torch.tensor([[3.0, 1.0], [2.0, 2.0], [0.0, 0.0]])) == 1.5


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    """Later lines and a torn one go; what is appended follows."""
    file = MetricsFile(tmp_path, 0)
    for step in (1, 2, 3):
        file.append(metrics_of(step))
    with file.path.open("a") as text:
        text.write('{"step": 4, "lo')
    resumed = MetricsFile(tmp_path, 2)
    resumed.append(metrics_of(3))
    assert [line.step for line in read_metrics(resumed.path)] == [1, 2, 3]
    assert [line.step for line in resumed.kept] == [1, 2]


def test_broken_line_of_metrics_is_named(tmp_path: Path) -> None:
    """A complete line that is not ours: file, line number and a way out."""
    file = MetricsFile(tmp_path, 0)
    file.append(metrics_of(1))
    with file.path.open("a") as text:
        text.write("{}\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2 is no line of metrics.*--out"):
        read_metrics(file.path)


def test_picture_is_drawn_from_one_line_and_from_many(tmp_path: Path) -> None:
    """A PNG comes out, also where steps must be averaged."""
    for count in (1, 500):
        path = tmp_path / f"{count}.png"
        draw([metrics_of(step) for step in range(1, count + 1)], "title", path)
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Manifest, Path]:
    """A finished checkpoint of one file."""
    folder = folder_of(tmp_path, 7)
    folder.mkdir()
    (folder / "data").write_bytes(b"weights")
    identity = {"train": {"seed": 1}}
    manifest = Manifest(7, identity, "text", {"data": digest(folder / "data")})
    manifest.write(folder)
    return manifest, folder


def test_manifest_finds_a_changed_byte_and_a_missing_file(
    checkpoint: tuple[Manifest, Path],
) -> None:
    """Whole: nothing to say; otherwise the file is named, with a way out."""
    manifest, folder = checkpoint
    assert Manifest.read(folder) == manifest
    assert manifest.damage(folder) == ""
    (folder / "data").write_bytes(b"weighTs")
    assert "data is damaged; delete the folder" in manifest.damage(folder)
    (folder / "data").unlink()
    assert "data is missing" in manifest.damage(folder)


def test_manifest_refuses_another_run(checkpoint: tuple[Manifest, Path]) -> None:
    """Another setting and another text are named; a broken manifest too."""
    manifest, folder = checkpoint
    manifest.check_same_run(folder, {"train": {"seed": 1}}, "text")
    with pytest.raises(CheckpointError, match=r"train\.seed is 2.*made with 1"):
        manifest.check_same_run(folder, {"train": {"seed": 2}}, "text")
    with pytest.raises(CheckpointError, match="the text is not the one"):
        manifest.check_same_run(folder, {"train": {"seed": 1}}, "other")
    (folder / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="no readable manifest"):
        Manifest.read(folder)


def test_folder_that_is_being_written_is_not_read(checkpoint: tuple[Manifest, Path]) -> None:
    """Only complete checkpoints count, oldest first."""
    _, folder = checkpoint
    folder_of(folder.parent, 10).mkdir()
    (folder.parent / "step_00000011.partial").mkdir()
    (folder.parent / "step_of_something_else").mkdir()
    assert [path.name for path in finished(folder.parent)] == ["step_00000007", "step_00000010"]


@pytest.mark.parametrize(
    ("ranks", "num_gpus", "num_sms", "expected"),
    [(4, 1, 16, 64), (1, 1, 16, 16), (4, 4, 16, 16), (4, 2, 16, 32), (8, 1, 16, 124)],
)
def test_norms_leave_the_sms_of_communication(
    ranks: int, num_gpus: int, num_sms: int, expected: int
) -> None:
    """Those of all ranks on the GPU (132 SMs), but never all of it."""
    config = load_config(
        Path(__file__).parent.parent / "configs" / "one_gpu_4ranks.yaml",
        [f"parallel.ranks_per_node={ranks}", f"ep_dispatcher.num_sms={num_sms}",
         f"parallel.expert={ranks}"],
    )  # fmt: skip
    assert sm_margin(config, num_gpus, 132) == expected


def test_a_margin_that_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is set."""
    forward, backward = SM_MARGINS
    monkeypatch.setenv(forward, "5")
    monkeypatch.delenv(backward, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    leave_sms(64)
    assert (os.environ[forward], os.environ[backward]) == ("5", "64")
