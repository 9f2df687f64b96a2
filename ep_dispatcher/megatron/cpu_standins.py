"""Stand-ins for the parts of torch.cuda that Megatron-Core calls, for machines without a GPU.

What: `install()` replaces attributes of `torch.cuda`, three methods of `torch.Tensor`, the
`device="cuda"` of torch's factory functions and three functions of `torch.distributed` with CPU
versions, so that Megatron's own dispatchers, optimizers and schedules run over gloo.

Why: Megatron-Core has no CPU mode. It makes streams, reads `torch.cuda.current_device()` and seeds
the CUDA generator even where nothing would run on a GPU; without a GPU each of these raises. None
of its own code is changed here, apart from names that 0.16.1 forgets to define without
Transformer Engine (`_define_missing_names`).

Never active where a GPU is: `install()` returns False at once if `torch.cuda.is_available()`.
`torch.cuda.is_available()` keeps saying False and `torch.cuda.device_count()` 0 afterwards, so
nothing that looks for a GPU finds the stand-ins.

Call it before megatron is imported, as some modules copy functions out of torch.cuda:

    from ep_dispatcher.megatron import cpu_standins
    cpu_standins.install()
    import megatron.core
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
FACTORIES = ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")
# moe_utils of 0.16.1 imports these from Transformer Engine and reads them without it (not in 0.17)
TE_NAMES = (
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_topk_with_score_function",
    "fused_unpermute",
    "te_general_gemm",
)


class Stream:
    """A stream of a machine that has none: everything runs in order on the calling thread."""

    cuda_stream = 0
    device = CPU
    priority = 0
    stream_id = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Accept what torch.cuda.Stream accepts."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority, as on a real device."""
        return (0, -1)

    def wait_stream(self, stream: object) -> None:
        """Do nothing: there is one order."""

    def wait_event(self, event: object) -> None:
        """Do nothing: there is one order."""

    def record_event(self, event: Event | None = None) -> Event:
        """The event given, or a new one."""
        return event or Event()

    def synchronize(self) -> None:
        """Do nothing: work is done when its call returns."""

    def query(self) -> bool:
        """All work is done."""
        return True


class Event:
    """An event on a machine without streams: it has always happened."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Accept what torch.cuda.Event accepts."""

    def record(self, stream: object = None) -> None:
        """Do nothing."""

    def wait(self, stream: object = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, end_event: object) -> float:
        """No time is measured here."""
        return 0.0


class _Generators:
    """`torch.cuda.default_generators`, indexed by device: always the CPU's generator."""

    def __getitem__(self, index: object) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def install() -> bool:
    """Make torch.cuda answer on a machine without a GPU.

    Call it before importing megatron; a second call changes nothing.

    Returns:
        True where the stand-ins are active; False where a GPU is, and nothing was changed.
    """
    if torch.cuda.is_available():
        return False
    if issubclass(torch.cuda.Stream, Stream):
        return True
    _install_streams()
    _install_devices()
    _install_random()
    _install_tensor_methods()
    _install_factories()
    _install_collectives()
    _define_missing_names()
    return True


def _replace(owner: object, **values: object) -> None:
    """Set several attributes of a module or class."""
    for name, value in values.items():
        setattr(owner, name, value)


def _nothing() -> Callable[..., None]:
    """A new function that does nothing; torch.compile refuses one object under two names."""

    def nothing(*args: object, **kwargs: object) -> None:
        pass

    return nothing


def _install_streams() -> None:
    """Streams, events and profiler ranges."""
    current = Stream()

    @contextlib.contextmanager
    def stream(_stream: object) -> Iterator[None]:
        yield

    _replace(
        torch.cuda,
        Stream=Stream,
        Event=Event,
        stream=stream,
        current_stream=lambda *_args, **_kwargs: current,
        default_stream=lambda *_args, **_kwargs: current,
        set_stream=_nothing(),
        synchronize=_nothing(),
        is_current_stream_capturing=lambda: False,
    )
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, _nothing())


def _install_devices() -> None:
    """Device queries; the current device is a torch.device, so that `device=` of it means CPU."""
    properties = SimpleNamespace(
        name="cpu", major=0, minor=0, multi_processor_count=1, total_memory=0
    )
    _replace(
        torch.cuda,
        current_device=lambda: CPU,
        set_device=_nothing(),
        get_device_name=lambda *_args, **_kwargs: "cpu",
        get_device_capability=lambda *_args, **_kwargs: (0, 0),
        get_device_properties=lambda *_args, **_kwargs: properties,
        cudart=_nothing(),
        empty_cache=_nothing(),
        ipc_collect=_nothing(),
        reset_peak_memory_stats=_nothing(),
    )
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        setattr(torch.cuda, name, lambda *_args, **_kwargs: 0)
    _replace(torch.cuda, memory_stats=lambda *_args, **_kwargs: {})


def _install_random() -> None:
    """The "CUDA" generator is the CPU's default generator.

    torch.manual_seed() calls torch.cuda.manual_seed_all() itself, so that one must do nothing.
    """

    def get_rng_state(*_args: object, **_kwargs: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
        torch.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def lazy_call(function: Callable[[], object], **_kwargs: object) -> None:
        function()

    random = {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state}
    _replace(torch.cuda, **random, manual_seed=manual_seed, manual_seed_all=_nothing())
    _replace(torch.cuda, _lazy_call=lazy_call, default_generators=_Generators())
    _replace(torch.cuda.random, **random)


def _install_tensor_methods() -> None:
    """`cuda()` keeps a tensor where it is; `type()` names a CUDA type.

    Megatron's mixed-precision optimizers and its gradient clipping compare `Tensor.type()` with
    "torch.cuda.FloatTensor" and refuse anything else.
    """
    plain_type = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:  # noqa: ANN401
        if dtype is None:
            return plain_type(self).replace("torch.", "torch.cuda.", 1)
        return plain_type(self, dtype, **kwargs)

    def stay(self: object, *_args: object, **_kwargs: object) -> object:
        return self

    _replace(torch.Tensor, type=type_, cuda=stay, record_stream=_nothing())
    _replace(torch.nn.Module, cuda=stay)


def _install_factories() -> None:
    """Torch's factory functions read `device="cuda"` as the CPU and need no pinned memory."""

    def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def factory(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return factory

    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _install_collectives() -> None:
    """Collectives that gloo lacks and Megatron's own dispatchers use.

    The alltoall dispatcher passes split sizes as tensors when they are on the CPU, and gathers
    pieces of different sizes over the expert-tensor-parallel group, which only NCCL can do.
    """
    _replace(
        dist,
        all_to_all_single=_with_listed_splits(dist.all_to_all_single),
        all_gather=_gather_uneven(dist.all_gather),
        reduce_scatter=_scatter_uneven(dist.reduce_scatter),
    )


def _with_listed_splits(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """`all_to_all_single` whose split sizes may be tensors."""

    def plain(splits: Any) -> Any:  # noqa: ANN401
        return splits.tolist() if isinstance(splits, torch.Tensor) else splits

    @functools.wraps(exchange)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,  # noqa: ANN401
        input_split_sizes: Any = None,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        return exchange(
            output, input, plain(output_split_sizes), plain(input_split_sizes), **kwargs
        )

    return all_to_all_single


def _is_even(pieces: list[torch.Tensor]) -> bool:
    """Whether all pieces have one shape; the same answer on every rank of the group."""
    return len({piece.shape for piece in pieces}) == 1


def _gather_uneven(gather: Callable[..., Any]) -> Callable[..., Any]:
    """`all_gather` whose pieces may differ in their number of rows: padded to the longest."""

    @functools.wraps(gather)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401
        if _is_even(tensor_list):
            return gather(tensor_list, tensor, group=group, async_op=async_op)
        rows = max(piece.shape[0] for piece in tensor_list)
        padded = tensor.new_zeros((rows, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in tensor_list]
        gather(gathered, padded, group=group)
        for piece, full in zip(tensor_list, gathered, strict=True):
            piece.copy_(full[: piece.shape[0]])
        return None

    return all_gather


def _scatter_uneven(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """`reduce_scatter` whose pieces may differ in size: a sum of everything, then a slice."""

    @functools.wraps(scatter)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,  # noqa: ANN401
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401
        if _is_even(input_list):
            return scatter(output, input_list, op=op, group=group, async_op=async_op)
        total = torch.cat([piece.reshape(-1) for piece in input_list])
        dist.all_reduce(total, op=op, group=group)
        start = sum(piece.numel() for piece in input_list[: dist.get_rank(group)])
        output.copy_(total[start : start + output.numel()].view_as(output))
        return None

    return reduce_scatter


def _define_missing_names() -> None:
    """Define, as None, the names that 0.16.1 reads although Transformer Engine is not there."""
    try:
        from megatron.core.transformer.moe import moe_utils
    except ImportError:
        return  # no megatron here: nothing to complete
    for name in TE_NAMES:
        if not hasattr(moe_utils, name):
            setattr(moe_utils, name, None)
