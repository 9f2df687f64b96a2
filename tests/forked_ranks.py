"""Jobs whose ranks are forked from one process that has imported Megatron, which takes 5 s a rank.

For tests of what ranks compute. How a job is started is left to others: there is no launcher here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_TIMEOUT_S = 120  # of a job


class ForkedRanks:
    """A process that forks the ranks of one job after another."""

    def __init__(self) -> None:
        """Start it; it imports while the caller goes on."""
        environment = {name: value for name, value in os.environ.items() if name != "RANK"}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def run(
        self, module: str, words: Sequence[str], num_ranks: int, logs: Path
    ) -> tuple[int, str, str]:
        """Run `python -m MODULE WORDS` as each rank.

        Args:
            module: that each rank runs.
            words: of its command line.
            num_ranks: of the job.
            logs: folder for what each rank says.

        Returns:
            The first exit code that is not 0, or 0; output and errors of all ranks.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        logs.mkdir(exist_ok=True)
        job = {"module": module, "words": list(words), "num_ranks": num_ranks, "logs": str(logs)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        codes: list[int] = json.loads(self._process.stdout.readline())
        out, err = (
            "".join((logs / f"rank{rank}.{kind}").read_text() for rank in range(num_ranks))
            for kind in ("out", "err")
        )
        return next((code for code in codes if code), 0), out, err

    def close(self) -> None:
        """End it, and ranks that still run."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def _be_rank(job: dict[str, Any], rank: int, port: int) -> None:
    """Run the module as `__main__`, with the variables that a launcher sets."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["num_ranks"], "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    for descriptor, kind in ((1, "out"), (2, "err")):
        with Path(job["logs"], f"rank{rank}.{kind}").open("w") as file:
            os.dup2(file.fileno(), descriptor)
    sys.argv = [job["module"], *job["words"]]
    runpy.run_module(job["module"], run_name="__main__", alter_sys=True)


def _run_job(job: dict[str, Any]) -> list[int | None]:
    """Fork the ranks and wait for them; returns their exit codes, -9 for one that took too long."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")  # this process has no threads, only imports
    ranks = [
        context.Process(target=_be_rank, args=(job, rank, port)) for rank in range(job["num_ranks"])
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + _TIMEOUT_S
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def main() -> None:
    """Import what takes long, then run a job for each line that comes."""
    from ep_dispatcher.megatron import cpu_standins

    cpu_standins.install()
    import ep_dispatcher.train.loop  # noqa: F401  # and Megatron, after the stand-ins

    for line in sys.stdin:
        sys.stdout.write(json.dumps(_run_job(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
