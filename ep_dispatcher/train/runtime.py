"""Which device and which communication backend this rank uses: decided here and nowhere else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ep_dispatcher.errors import ConfigError, UnavailableError
from ep_dispatcher.megatron.compat import leave_sms
from ep_dispatcher.slurm import check_place, meeting
from ep_dispatcher.train.config import TrainConfig

_TIMEOUT = timedelta(minutes=10)  # the first step of a large model compiles and allocates
_NORM_SMS = 8  # a norm keeps at least these


@dataclass(frozen=True)
class Runtime:
    """Where a rank runs.

    Attributes:
        rank, num_ranks: of the whole job.
        device: of parameters and rows.
        backend: of torch.distributed.
    """

    rank: int
    num_ranks: int
    device: torch.device
    backend: str

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU under it."""
        return self.device.type == "cuda"

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0

    def settle(self) -> None:
        """Wait until all ranks, and their GPUs, have nothing to do; collective."""
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        if self.on_gpu:
            torch.cuda.synchronize()

    def describe(self) -> str:
        """Say in words what the ranks run on."""
        if not self.on_gpu:
            return f"{self.num_ranks} ranks on the CPU, gloo"
        return f"{self.num_ranks} ranks on {torch.cuda.get_device_name(self.device)}, NCCL"


def open_runtime(config: TrainConfig) -> Runtime:
    """Join the job that RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR describe; collective.

    On a machine without a GPU this installs the stand-ins for torch.cuda, so call it before
    Megatron is imported.

    Raises:
        ConfigError: the number of ranks is not the config's or not told, a variable that says
            where they meet cannot be, or ranks share a GPU without leave.
        UnavailableError: train.device is "cuda" and this rank sees no GPU, or only some ranks do;
            or the ranks did not meet.
    """
    _set_cuda_defaults(config)
    rank, num_ranks = check_place("scripts/train.sbatch")
    if num_ranks != config.parallel.num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks were started; the config asks for {config.parallel.num_ranks} "
            "(parallel.num_nodes * parallel.ranks_per_node). Start as many, or change the config"
        )
    device = _choose_device(config)
    # Objects and agreements travel by gloo, so that they launch nothing on the GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with meeting(_TIMEOUT):
        store, _, _ = next(dist.rendezvous("env://", timeout=_TIMEOUT))
        _agree_on_backend(store, rank, num_ranks, backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        leave_sms(sm_margin(config, torch.cuda.device_count(), num_sms))
    else:
        from ep_dispatcher.megatron import cpu_standins

        cpu_standins.install()
    with meeting(_TIMEOUT):
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT
        )
    return Runtime(rank, num_ranks, device, backend)


def _set_cuda_defaults(config: TrainConfig) -> None:
    """Set the variables that CUDA reads at its start; what the user has set stays.

    Here and not in the files that start ranks, so that each rank has it however it was started, and
    as only the config says how many connections there may be.
    """
    if config.train.device == "cpu":
        return
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # lazily it can wait for a waiting kernel
    if config.parallel.tensor == 1 and not config.parallel.ranks_share_gpu:
        # One queue for each stream, or communication waits for compute. Megatron wants 1 with
        # tensor parallelism; MPS has not enough for several ranks of 32.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def _choose_device(config: TrainConfig) -> torch.device:
    """This rank's GPU, or the CPU."""
    wanted = config.train.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        if torch.cuda.is_available():
            raise ConfigError(
                "train.device is 'cpu' on a machine with a GPU, where Megatron-Core would use the "
                "GPU all the same; hide it with CUDA_VISIBLE_DEVICES= (nothing after the =)"
            )
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnavailableError(
            "train.device is 'cuda' but torch sees no GPU; run `ep-dispatcher doctor`, or set "
            "train.device to auto"
        )
    return torch.device("cuda", gpu_index(config, torch.cuda.device_count()))


def gpu_index(config: TrainConfig, num_gpus: int) -> int:
    """Which GPU of the node a local rank uses.

    Raises:
        ConfigError: there are fewer GPUs than ranks and the config does not allow sharing.
    """
    ranks = config.parallel.ranks_per_node
    if ranks > num_gpus and not config.parallel.ranks_share_gpu:
        raise ConfigError(
            f"parallel.ranks_per_node is {ranks} but this node has {num_gpus} GPU(s); lower it, or "
            "set parallel.ranks_share_gpu to true (needs MPS; a test setting, slow)"
        )
    return int(os.environ.get("LOCAL_RANK", "0")) % num_gpus


def sm_margin(config: TrainConfig, num_gpus: int, gpu_sms: int) -> int:
    """SMs that communication of all ranks on a GPU may hold.

    Args:
        config: of the job.
        num_gpus: of this node.
        gpu_sms: SMs of a GPU.

    Example: 4 ranks that hold 16 SMs each, on one GPU of 132 -> 64.
    """
    sharing = -(-config.parallel.ranks_per_node // max(1, num_gpus))
    return max(0, min(sharing * config.ep_dispatcher.num_sms, gpu_sms - _NORM_SMS))


def _agree_on_backend(store: dist.Store, rank: int, num_ranks: int, backend: str) -> None:
    """Raise if some ranks see a GPU and others do not: the backends could not talk."""
    store.set(f"ep_dispatcher/backend/{rank}", backend)
    for other in range(num_ranks):
        theirs = store.get(f"ep_dispatcher/backend/{other}").decode()
        if theirs != backend:
            raise UnavailableError(
                f"rank {rank} would use {backend} and rank {other} {theirs}: only some ranks see a "
                "GPU. Give every rank one, or hide them from all with CUDA_VISIBLE_DEVICES="
            )
