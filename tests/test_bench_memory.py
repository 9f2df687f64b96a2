"""How much memory the benchmark asks of this package's groups: what a round keeps, and no more."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ep_dispatcher import Plan
from ep_dispatcher.backend import Backend
from ep_dispatcher.bench import rounds
from ep_dispatcher.bench.backends.base import Place
from ep_dispatcher.bench.backends.own import OUTPUTS, OwnSession
from ep_dispatcher.bench.launcher import innermost
from ep_dispatcher.bench.rounds import Runner
from ep_dispatcher.bench.spec import Method, Work
from ep_dispatcher.bench.stopwatch import Stopwatch
from ep_dispatcher.bench.usage import PeakMemory
from ep_dispatcher.testing import run_ranks

WORK = Work(ranks=2, num_tokens=12, hidden=32, num_topk=2, num_experts=4, dtype="float32")


@dataclass(eq=False)
class Counting:
    """A tier that counts the row outputs [R, H] which are alive at once, as an arena would."""

    inner: Backend
    most: int = 0
    _given: list[StorageWeakRef] = field(default_factory=list)

    def plan(self, topk_idx: Tensor | None, alignment: int, refusal: str | None) -> Plan | None:
        """See `Backend.plan`."""
        return self.inner.plan(topk_idx, alignment, refusal)

    def dispatch(
        self, plan: Plan, x: Tensor, topk_weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.dispatch`."""
        rows, weights = self.inner.dispatch(plan, x, topk_weights)
        self._count(rows)
        return rows, weights

    def combine(
        self, plan: Plan, expert_out: Tensor, row_weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.combine`; rows that lie elsewhere are copied for the time of the call."""
        here = StorageWeakRef(expert_out.untyped_storage())
        if here not in self._given:
            self._count(expert_out.clone())
        return self.inner.combine(plan, expert_out, row_weights)

    def empty_rows(self, plan: Plan) -> Tensor:
        """See `Backend.empty_rows`."""
        rows = self.inner.empty_rows(plan)
        self._count(rows)
        return rows

    def check(self) -> None:
        """See `Backend.check`."""
        self.inner.check()

    def close(self, *, failed: bool = False) -> None:
        """See `Backend.close`."""
        self.inner.close(failed=failed)

    def _count(self, rows: Tensor) -> None:
        self._given = [given for given in self._given if not given.expired()]
        self._given.append(StorageWeakRef(rows.untyped_storage()))
        self.most = max(self.most, len(self._given))


@pytest.mark.parametrize("ffn_hidden", [0, 16], ids=["calls", "layer"])
def test_a_run_keeps_as_many_outputs_as_its_group_has_room_for(ffn_hidden: int) -> None:
    work = Work(**vars(WORK) | {"ffn_hidden": ffn_hidden})

    def count(group: dist.ProcessGroup) -> int:
        name, device = "ep_dispatcher/reference", torch.device("cpu")
        place = Place(group=group, rank=group.rank(), device=device, name=name)
        runner = Runner(work, Method(warmup=1), place, 1)
        runner.open()
        session = runner._open_session()
        assert isinstance(session, OwnSession)
        counting = Counting(session._group._open_backend())
        session._group._backend = counting
        runner.run()
        runner.close()
        return counting.most

    assert run_ranks(2, count) == [OUTPUTS, OUTPUTS]


def test_a_peak_is_a_backends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between beginning and end of the count no watch sweeps the L2, which takes memory too."""
    told: list[str] = []

    class Told(PeakMemory):
        """Notes when it counts; gives a size where the CPU's has none."""

        def __init__(self, device: torch.device) -> None:
            told.append("count")
            super().__init__(device)

        def read(self) -> int:
            told.append("read")
            return 77

    begin = Stopwatch.begin

    def noted(watch: Stopwatch, *cycles: int) -> None:
        told.append("sweep")
        begin(watch, *cycles)

    monkeypatch.setattr(rounds, "PeakMemory", Told)
    monkeypatch.setattr(Stopwatch, "begin", noted)

    def measure(group: dist.ProcessGroup) -> int:
        place = Place(
            group=group,
            rank=group.rank(),
            device=torch.device("cpu"),
            name="ep_dispatcher/reference",
        )
        runner = Runner(replace(WORK, ranks=1), Method(warmup=1), place, 1)
        runner.open()
        result = runner.run()
        runner.close()
        return result.memory["peak_bytes"]

    assert run_ranks(1, measure) == [77]
    assert told.count("sweep") >= Method().rounds
    assert told[told.index("count") :] == ["count", "read"]


def test_the_example_of_an_innermost_frame() -> None:
    dump = 'File "/a/torch/cuda.py", line 9 in wait\n  File "/b/ep_dispatcher/c.py", line 5 in f'
    assert innermost(dump) == "wait (cuda.py:9), called from f (c.py:5)"
    assert innermost('File "/b/ep_dispatcher/c.py", line 5 in f') == "f (c.py:5)"
    assert innermost("Segmentation fault") == ""
