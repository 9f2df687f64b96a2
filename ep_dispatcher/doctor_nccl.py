"""`ep-dispatcher doctor --nccl`: what NCCL makes of a job's ranks, and a put on every rail.

Under torchrun or srun each process is a rank; otherwise ranks are started on this machine.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ep_dispatcher import native
from ep_dispatcher.agreement import gather_json
from ep_dispatcher.collectives import Collectives
from ep_dispatcher.communicator import Reasons, open_communicator, topology_from
from ep_dispatcher.config import Topology
from ep_dispatcher.errors import ConfigError, UnavailableError
from ep_dispatcher.rails import check_topology
from ep_dispatcher.slurm import adopt_slurm, check_place, meeting

ROUNDS = 21  # round trips on each rail; the first is not timed
WAIT_TIMEOUT_S = 10.0
START_TIMEOUT_S = 180.0
MEET_TIMEOUT = timedelta(seconds=90)
# A rank may wait WAIT_TIMEOUT_S for each of 31 peers while the others wait for it; with the meeting
# this ends before the limit of scripts/doctor_nodes.sbatch.
_PROBE_TIMEOUT = timedelta(minutes=8)
_POLL_S = 0.05
GIN_TYPES = {0: "none", 2: "proxy", 3: "gdaki", 4: "gpi", 5: "efa"}
_GIN_WORDS = {
    "none": "none",
    "proxy": "proxy (a CPU thread of NCCL posts the puts)",
    "gdaki": "GDAKI (the GPU rings the adapter's doorbell)",
    "gpi": "GPI (a plugin of the adapter's vendor)",
    "efa": "EFA (AWS)",
}
# A rank goes through its peers one by one, and waits for its puts to be sent before each.
AFTER_A_FAILURE = (
    "Mend the first bad row of a rank first: a later row with the same rank, on either side, may "
    "be bad only as a consequence of it."
)
_SHOWN_VARIABLES = ("NCCL_", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "LOOPBACK_RMA_")
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Trip:
    """Round trips between two ranks of one rail.

    Attributes:
        rank, peer: the rank that asks, and the one that answers.
        mean_us, shortest_us: of all but the first; None where none finished.
        finished, rounds: round trips that came back, and that were tried.
        wrong_words: 8-byte words that arrived wrong, there and back.
    """

    rank: int
    peer: int
    mean_us: float | None
    shortest_us: float | None
    finished: int
    rounds: int
    wrong_words: int

    @property
    def verdict(self) -> str:
        """In words, for the table."""
        if self.finished < self.rounds:
            return f"no answer to round trip {self.finished + 1} in {WAIT_TIMEOUT_S:.0f} s"
        return f"{self.wrong_words} wrong words" if self.wrong_words else "ok"


@dataclass(frozen=True)
class NcclReport:
    """What NCCL found, as rank 0 tells it.

    Attributes:
        hosts: of each rank.
        gpus: name and number of each rank's GPU.
        num_domains, domain_size: NVLink domains (LSA teams) and their ranks.
        gin: between same-index ranks of the domains, a value of GIN_TYPES.
        nccl_version, nccl_path: what runs.
        headers_version: what the kernels were compiled with.
        variables: of the environment, that NCCL reads.
        trips: one for each rail and pair of domains.
    """

    hosts: tuple[str, ...]
    gpus: tuple[str, ...]
    num_domains: int
    domain_size: int
    gin: str
    nccl_version: str
    nccl_path: str
    headers_version: str
    variables: dict[str, str]
    trips: tuple[Trip, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"ok": self.ok}

    @property
    def ok(self) -> bool:
        """Whether all puts arrived, and right."""
        return all(trip.verdict == "ok" for trip in self.trips)

    def facts(self) -> list[tuple[str, str]]:
        """Rows of the first table."""
        placed = zip(self.hosts, self.gpus, strict=True)
        shared = len(self.hosts) - len(set(placed))
        gpus = f"{len(self.gpus)} ranks on {len(set(self.hosts))} host(s), e.g. {self.gpus[0]}"
        return [
            ("ranks", gpus + (f"; {shared} share a GPU with another" if shared else "")),
            ("NVLink domains", f"{self.num_domains} of {self.domain_size} rank(s)"),
            ("GIN between domains", _GIN_WORDS.get(self.gin, self.gin)),
            ("NCCL", f"{self.nccl_version} at {self.nccl_path}"),
            ("kernels compiled with", f"NCCL {self.headers_version}"),
            ("environment", " ".join(f"{k}={v}" for k, v in self.variables.items()) or "-"),
        ]


def is_rank() -> bool:
    """Whether this process was started as a rank of a job."""
    adopt_slurm("scripts/doctor_nodes.sbatch")
    return "RANK" in os.environ


def probe() -> NcclReport | None:
    """Be one rank: open a communicator over all, put on every rail; the report on rank 0.

    Raises:
        UnavailableError: on every rank alike, if any lacks something; says what to do. Or the
            ranks did not meet.
        ConfigError: a variable that says where the ranks meet is missing or cannot be.
    """
    check_place("scripts/doctor_nodes.sbatch")
    with meeting(MEET_TIMEOUT):
        dist.init_process_group("gloo", timeout=MEET_TIMEOUT)
    try:
        with meeting(MEET_TIMEOUT):
            # Of its own, as the time for the meeting is too short for what follows.
            group = dist.new_group(backend="gloo", timeout=_PROBE_TIMEOUT)
        collectives = Collectives(group)
        reasons = Reasons(collectives)
        with reasons:
            _choose_gpu()
        reasons.agree()
        return _report(collectives)
    finally:
        dist.destroy_process_group()


def start_ranks(num_ranks: int | None, domain_size: int | None, words: Sequence[str]) -> int:
    """Run `ep-dispatcher` with these words as ranks on this machine; returns the exit code.

    Args:
        num_ranks: how many; None for one on each GPU, and at least two.
        domain_size: split them into domains of that size; None to leave it to NCCL.
        words: of the command line.

    Raises:
        UnavailableError: this machine cannot run the device tier, or a rank was ended from
            outside; says why.
        ConfigError: fewer than one rank, or a domain size that does not divide the ranks.
    """
    if num_ranks is not None and num_ranks < 1:
        raise ConfigError(f"--ranks is {num_ranks}; it must be at least 1")
    num_gpus = torch.cuda.device_count()
    size = num_ranks or max(2, num_gpus)
    check_domain_size(domain_size, size)
    missing = native.missing_reason()
    if missing is not None:
        raise UnavailableError(f"NCCL was not probed: {missing}")
    port = _free_port()
    environments = [
        rank_environment(rank, size, num_gpus, domain_size, port) for rank in range(size)
    ]
    command = [sys.executable, "-m", "ep_dispatcher", *words]
    processes = [subprocess.Popen(command, env=each) for each in environments]
    try:
        return max(_wait(processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Exit codes of all ranks.

    Looks at all of them in turns: those that wait for a dead one would hide it.

    Raises:
        UnavailableError: names ranks that a signal ended, or that were not done in time.
    """
    last = time.monotonic() + START_TIMEOUT_S
    while True:
        late = time.monotonic() >= last
        codes = [process.poll() for process in processes]
        _refuse_ended(codes)
        if late and None in codes:
            _refuse_late(codes)
        if None not in codes:
            return [code for code in codes if code is not None]
        time.sleep(_POLL_S)


def _refuse_ended(codes: Sequence[int | None]) -> None:
    """Raise if a signal ended a rank."""
    ended = [
        f"rank {rank} was ended by {signal.Signals(-code).name}"
        for rank, code in enumerate(codes)
        if code is not None and code < 0
    ]
    if ended:
        raise UnavailableError(
            f"{', '.join(ended)}; run again with NCCL_DEBUG=INFO to see how far NCCL came"
        )


def _refuse_late(codes: Sequence[int | None]) -> None:
    """Raise, and name the ranks that are not done and the codes of those that failed."""
    late = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
    failed = "".join(
        f"; rank {rank} had ended with exit code {code}" for rank, code in enumerate(codes) if code
    )
    raise UnavailableError(
        f"the ranks were not done in {START_TIMEOUT_S:.0f} s: still running {late}{failed}; run "
        "again with NCCL_DEBUG=INFO to see how far NCCL came (docs/multi_node.md lists common "
        "causes)"
    )


def check_domain_size(domain_size: int | None, size: int) -> None:
    """Refuse domains that do not share the ranks out.

    Raises:
        ConfigError: names both numbers.
    """
    if domain_size is not None and (domain_size < 1 or size % domain_size):
        raise ConfigError(
            f"--domain-size is {domain_size}; it must be at least 1 and divide the {size} ranks"
        )


def rank_environment(
    rank: int, size: int, num_gpus: int, domain_size: int | None, port: int
) -> dict[str, str]:
    """Variables of a rank on this machine; what the user has set stays."""
    values = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    if size > num_gpus:
        values["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # since NCCL 2.30.3; refused without it
        values["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast cannot serve ranks that share a GPU
    values |= dict(os.environ)
    if domain_size is not None:
        values["NCCL_LSA_TEAM_SIZE"] = str(domain_size)
    values |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    return values | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _choose_gpu() -> None:
    missing = native.missing_reason()
    if missing is not None:
        raise UnavailableError(missing)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _report(collectives: Collectives) -> NcclReport | None:
    """The facts and the round trips."""
    module = native.load()
    communicator = open_communicator(collectives)
    properties = communicator.properties()
    topology = topology_from(properties.num_domains, collectives.size, None)
    check_topology(topology)
    trips = _trips(collectives, communicator, topology) if topology.num_domains > 1 else []
    index = torch.cuda.current_device()
    gpu = f"{torch.cuda.get_device_name(index)} ({index})"
    told: list[Any] = gather_json(
        collectives, [socket.gethostname(), gpu, [asdict(trip) for trip in trips]]
    )
    communicator.close()
    if collectives.rank:
        return None
    library = native.open_nccl()
    return NcclReport(
        hosts=tuple(host for host, _, _ in told),
        gpus=tuple(gpu for _, gpu, _ in told),
        num_domains=topology.num_domains,
        domain_size=topology.domain_size,
        gin=GIN_TYPES.get(properties.rail_gin, f"type {properties.rail_gin}"),
        nccl_version=module.nccl_version_text(library.version),
        nccl_path=library.path,
        headers_version=module.nccl_version_text(module.build_versions().nccl),
        variables={k: v for k, v in sorted(os.environ.items()) if k.startswith(_SHOWN_VARIABLES)},
        trips=tuple(Trip(**trip) for _, _, found in told for trip in found),
    )


def _trips(collectives: Collectives, communicator: Any, topology: Topology) -> list[Trip]:  # noqa: ANN401
    """Round trips that this rank started; collective."""
    module = native.load()
    reasons = Reasons(collectives)
    arena = rails = None
    with reasons:
        window_bytes = module.gin_probe_window_bytes(topology.num_domains)
        window_bytes = -(-window_bytes // _PAGE_BYTES) * _PAGE_BYTES
        arena = module.Arena(communicator, window_bytes, _PAGE_BYTES)
    reasons.agree()
    assert arena is not None
    with reasons:
        arena.share()
    reasons.agree()
    with reasons:
        shape = module.RailShape(
            num_contexts=1, signals_per_domain=module.PROBE_SIGNALS, num_counters=1
        )
        rails = module.Rails(communicator, arena, shape)
    reasons.agree()
    assert rails is not None
    results = torch.zeros(module.PROBE_RESULT_BYTES * topology.num_domains, dtype=torch.uint8)
    results = results.pin_memory()
    gather_json(collectives, None)  # all are ready, so that no rank's wait begins early
    stream = torch.cuda.current_stream()
    module.probe_rails(rails, arena, ROUNDS, WAIT_TIMEOUT_S, results.data_ptr(), stream.cuda_stream)
    stream.synchronize()
    mine = topology.domain_of(collectives.rank)
    trips = [
        _trip(
            module.read_probe_result(results.data_ptr(), domain),
            collectives.rank,
            topology.rail_peer(collectives.rank, domain),
        )
        for domain in range(topology.num_domains)
        if domain != mine
    ]
    if all(gather_json(collectives, all(trip.verdict == "ok" for trip in trips))):
        rails.close()
        arena.close()
    else:  # NCCL may wait for ever for what was lost
        communicator.abort()
        rails.forget()
        arena.forget()
    return [trip for trip in trips if trip.rank < trip.peer]


def _trip(result: dict[str, int], rank: int, peer: int) -> Trip:
    timed = result["finished"] - 1
    return Trip(
        rank=rank,
        peer=peer,
        mean_us=result["total_ns"] / timed / 1e3 if timed > 0 else None,
        shortest_us=result["shortest_ns"] / 1e3 if timed > 0 else None,
        finished=result["finished"],
        rounds=ROUNDS,
        wrong_words=result["wrong_words"],
    )
