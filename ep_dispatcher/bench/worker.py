"""One rank's process: runs its share of a job and leaves one file for each work.

    python -m ep_dispatcher.bench.worker JOB_FILE LAUNCHER_PID

Ranks meet as torchrun's do, through RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A work that all
ranks refuse, or whose result is wrong, is written and the next one follows; after any other failure
the process writes the reason and ends, as its peers may be waiting in the middle of a collective.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_dispatcher.agreement import gather_json
from ep_dispatcher.bench.backends.base import Place, Refused
from ep_dispatcher.bench.check import WrongResult
from ep_dispatcher.bench.results import describe_versions
from ep_dispatcher.bench.rounds import Runner
from ep_dispatcher.bench.spec import Method, Work
from ep_dispatcher.collectives import Collectives

FAILED = 3
COUNTING = "counting"  # in a result: the times are there, the process went on to count calls
WHERE = signal.SIGUSR1
_LOOK_S = 1.0
_NCCL_CTAS = 16  # of the group that only checks and meetings use


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a set of processes does: one backend, works of one number of ranks, in order.

    Attributes:
        backend: name.
        device: "cpu" or "cuda".
        works: to run; `first` numbers the first of them.
        method: how to measure.
        folder: where the files go.
        sharing_ranks: ranks that share a device.
    """

    backend: str
    device: str
    works: tuple[Work, ...]
    first: int
    method: Method
    folder: str
    sharing_ranks: int

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Job:
        """From JSON."""
        values = json.loads(text)
        values["works"] = tuple(Work(**work) for work in values["works"])
        values["method"] = Method(**values["method"])
        return cls(**values)


def result_file(folder: Path, number: int, rank: int) -> Path:
    """Where rank `rank` leaves what came of work `number`."""
    return folder / f"work{number}.rank{rank}.json"


class Worker:
    """The process of one rank.

    Args:
        job: what to do.
    """

    def __init__(self, job: Job) -> None:
        """Join the other ranks."""
        self._job = job
        self._folder = Path(job.folder)
        self._rank = int(os.environ["RANK"])
        self._device = _device(job.device)
        timeout = timedelta(seconds=2 * job.method.time_limit_s)  # the launcher's limit comes first
        if job.device == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = _NCCL_CTAS
            dist.init_process_group("nccl", timeout=timeout, pg_options=options)
            self._side = dist.new_group(backend="gloo", timeout=timeout)
        else:
            dist.init_process_group("gloo", timeout=timeout)
            self._side = dist.group.WORLD

    def run(self) -> None:
        """Every work of the job."""
        for offset, work in enumerate(self._job.works):
            number = self._job.first + offset
            try:
                self._write(number, self._run_work(number, work))
            except BaseException as error:
                self._write(number, {"error": _one_line(error), "fatal": True})
                raise

    def _run_work(self, number: int, work: Work) -> dict[str, Any]:
        """Run one work and return what to write; raises only where peers may hang."""
        assert dist.group.WORLD is not None
        place = Place(
            group=dist.group.WORLD, rank=self._rank, device=self._device, name=self._job.backend
        )
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what works before kept may be all that this one needs
        runner = Runner(work, self._job.method, place, self._job.sharing_ranks)
        refusal = None
        try:
            runner.open()
        except Refused as error:
            refusal = str(error)
        found = self._disagreement(refusal, runner.result.identity)
        if found is not None:
            runner.close()
            return {"error": found}
        wrong = None
        try:
            runner.run()
        except WrongResult as error:
            wrong = str(error)
        found = self._first("the result is wrong: ", wrong)
        if found is not None:
            # Ranks stopped at different calls; what they left behind cannot be trusted to close.
            raise _Stop(found)
        runner.measure_ceilings()
        values = {"result": asdict(runner.result)}
        if self._device.type == "cuda" and self._job.method.usage:
            self._write(number, values | {COUNTING: True})  # a profiler may hang: times are kept
            self._add_usage(runner, values)
        runner.close()
        return values

    def _add_usage(self, runner: Runner, values: dict[str, Any]) -> None:
        """Profile a round; a profiler that fails costs these two figures only."""
        with contextlib.suppress(RuntimeError):
            runner.count_usage()
            values["result"]["usage"] = runner.result.usage

    def _disagreement(self, refusal: str | None, identity: dict[str, Any]) -> str | None:
        """Why this work cannot run: a rank refuses, or ranks run different versions."""
        told = self._gather([refusal, identity.get("versions"), describe_versions()])
        for rank, (reason, _, _) in enumerate(told):
            if reason is not None:
                alone = "" if all(other[0] for other in told) else f"rank {rank}: "
                return alone + str(reason)
        for rank, (_, backend, common) in enumerate(told):
            mine, first = {**common, **backend}, {**told[0][2], **told[0][1]}
            for name in sorted(set(mine) | set(first)):
                if mine.get(name) != first.get(name):
                    return (
                        f"ranks run different versions: {name} is {mine.get(name)} on rank {rank} "
                        f"and {first.get(name)} on rank 0"
                    )
        return None

    def _first(self, prefix: str, reason: str | None) -> str | None:
        """The first rank's reason, if any rank has one."""
        for rank, told in enumerate(self._gather(reason)):
            if told is not None:
                return f"{prefix}rank {rank}: {told}"
        return None

    def _gather(self, value: Any) -> list[Any]:  # noqa: ANN401
        assert self._side is not None
        return gather_json(Collectives(self._side), value)

    def _write(self, number: int, values: dict[str, Any]) -> None:
        """Write a file that is either whole or not there; an error never replaces a result."""
        target = result_file(self._folder, number, self._rank)
        if target.exists() and "error" in values:
            return
        part = target.with_suffix(".part")
        part.write_text(json.dumps(values), encoding="utf-8")
        part.rename(target)


class _Stop(Exception):  # noqa: N818  # not an error of this program
    """Carries a verdict that ends the process."""


def _device(name: str) -> torch.device:
    """This rank's device: GPUs are dealt out by local rank, and shared where there are too few."""
    if name == "cpu":
        return torch.device("cpu")
    index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _one_line(error: BaseException) -> str:
    """An error in one sentence."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, _Stop) else f"{type(error).__name__}: {text}"


def _end_with(launcher: int) -> None:
    """End this process when its launcher is gone: nobody would end it if it waited for peers."""
    while os.getppid() == launcher:
        time.sleep(_LOOK_S)
    os._exit(FAILED)


def main(words: list[str]) -> int:
    """Run the job in the named file; the exit code tells the launcher whether all works ran."""
    job = Job.load(Path(words[0]).read_text(encoding="utf-8"))
    # The launcher asks so before it ends a process that hangs.
    faulthandler.register(WHERE, all_threads=False)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(int(words[1]),), daemon=True).start()
    try:
        Worker(job).run()
    except BaseException as error:  # noqa: BLE001  # already written; peers must see an end
        sys.stderr.write(f"bench worker: {_one_line(error)}\n")
        sys.stderr.flush()
        os._exit(FAILED)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
