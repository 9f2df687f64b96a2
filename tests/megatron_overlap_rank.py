"""A layer in chunks on streams that are late, run by the rank of test_megatron_overlap_gpu.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ep_dispatcher.megatron import cpu_standins

HIDDEN = 256
TOKENS = (64, 2)  # sequence, batch
CHUNKS = 3
ROUNDS = 3
SLEEP_S = 0.02
_CYCLES_PER_S = 1.7e9  # of any GPU that there is, within a factor of two
STEPS = {"communication": ("dispatch", "combine"), "caller's": ("experts",), "": ()}


def pause() -> None:
    """Keep the current stream busy for about `SLEEP_S`; nothing on the CPU."""
    if torch.cuda.is_available():
        torch.cuda._sleep(int(SLEEP_S * _CYCLES_PER_S))


class Late(Function):
    """Passes rows on; what comes before them in the backward begins late, on the same stream."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # noqa: ANN401
        """Hand on."""
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        """Sleep, then hand on."""
        pause()
        return grad


def late(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step of a chunk whose stream sleeps before it, forward and backward."""

    def slow(*args: Any) -> Any:  # noqa: ANN401
        pause()
        out = step(*args)
        if isinstance(out, tuple):
            return tuple(Late.apply(each) for each in out)  # type: ignore[no-untyped-call]
        return Late.apply(out)  # type: ignore[no-untyped-call]

    return slow


@contextlib.contextmanager
def late_streams(asleep: str, left_out: str) -> Iterator[None]:
    """Let one stream be late inside, and leave one kind of hand-over out.

    Args:
        asleep: "communication", "caller's", or "" for neither.
        left_out: "take" (the caller's stream does not wait for rows), "lend" (combine does not
            wait for the experts), or "" for nothing.
    """
    from ep_dispatcher.megatron.overlap import LayerSteps
    from ep_dispatcher.megatron.overlap_schedule import Lanes

    lend = Lanes.lend

    def lend_chunks(lanes: Lanes, event: Any, *tensors: Tensor) -> None:  # noqa: ANN401
        if len(tensors) > 1:  # a chunk's routes, rows and weights
            lend(lanes, event, *tensors)

    with contextlib.ExitStack() as stack:
        for name in STEPS[asleep]:
            stack.enter_context(
                mock.patch.object(LayerSteps, name, late(getattr(LayerSteps, name)))
            )
        if left_out == "take":
            stack.enter_context(mock.patch.object(Lanes, "take", return_value=None))
        if left_out == "lend":
            stack.enter_context(mock.patch.object(Lanes, "lend", lend_chunks))
        yield


def step(layer: Any, x: Tensor) -> tuple[list[Tensor], bool]:  # noqa: ANN401
    """Output and all gradients of a step, and whether the GPU was still busy when it was launched.

    Args:
        layer: Megatron's module.
        x: [S, B, H].
    """
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    out, _ = layer(x)
    out.backward(torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out))
    busy = x.is_cuda and not torch.cuda.current_stream().query()
    if x.is_cuda:
        torch.cuda.synchronize()
    grads = [each.grad for each in layer.parameters() if each.grad is not None]
    assert x.grad is not None
    return [each.detach().clone() for each in (out, x.grad, *grads)], busy


def difference(found: list[Tensor], want: list[Tensor]) -> float:
    """Largest relative difference (2-norms); infinite where something is no number."""
    sizes = [(one - other).norm() / other.norm() for one, other in zip(found, want, strict=True)]
    return float(torch.stack(sizes).nan_to_num(nan=float("inf")).max())


def late_layer(process_group: dist.ProcessGroup, asleep: str, left_out: str) -> dict[str, Any]:
    """Compare a layer in chunks with the layer in one piece, with other tokens each round.

    Args:
        process_group: of one rank; Megatron makes its own of the same process.
        asleep: see `late_streams`.
        left_out: likewise.

    Returns:
        `difference`: the largest of all rounds; `busy`: whether the GPU was still busy with each
        step when all of it was launched; `tiers`.
    """
    assert process_group.size() == 1
    cpu_standins.install()
    from megatron_checks import layout, make_layer

    from ep_dispatcher.megatron.overlap import OverlappedMoELayer
    from ep_dispatcher.megatron.plugin import EpPlugin

    on_gpu = torch.cuda.is_available()
    where = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    section = {"tier": "device", "output_bytes": 64 << 20} if on_gpu else {}
    settings = {"hidden_size": HIDDEN, "moe_router_load_balancing_type": "none"}
    with (
        layout(1, 1, 1),
        EpPlugin.from_section(section) as one,
        EpPlugin.from_section(section | {"overlap": {"chunks": CHUNKS}}) as other,
    ):
        plain = make_layer(one, **settings).to(where)
        chunked = make_layer(other, **settings).to(where)
        assert isinstance(chunked, OverlappedMoELayer)
        chunked.load_state_dict(plain.state_dict(), strict=False)
        tokens = [torch.randn(*TOKENS, HIDDEN).to(where) for _ in range(ROUNDS + 1)]
        wanted = [step(plain, x)[0] for x in tokens]
        step(chunked, tokens[0])  # loads kernels, and fills the memory that is used again
        differences, busy = [], []
        with late_streams(asleep, left_out):
            for x, want in zip(tokens[1:], wanted[1:], strict=True):
                found, was_busy = step(chunked, x)
                differences.append(difference(found, want))
                busy.append(was_busy)
        leases = [*one.pool._leases.values(), *other.pool._leases.values()]
        tiers = sorted({lease.group.tier for lease in leases})
    return {"difference": max(differences), "busy": all(busy), "tiers": tiers}
