"""Records a router trace from a Megatron training run: a hook on every router of the model."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from ep_dispatcher.bench.trace import RouterTrace
from ep_dispatcher.errors import ConfigError


class RouterRecorder:
    """Listens to the routers of a model; a context manager.

    A router is a module whose class, or a base of it, is called `Router`, as Megatron's are; its
    forward returns (probs, routing_map [T, E]). Nothing is changed in what it returns. Routings
    are copied to the CPU at once, which synchronises: do not time a run that is recorded.

    Args:
        model: any module; wrappers around a Megatron model are fine.
        num_topk: K, slots kept of each token.
        rank: this expert-parallel rank; `ep_size`: how many there are.
        max_entries: stop recording after so many routings.
        source: free text for the file.

    Example:
        with RouterRecorder(model, num_topk=8, rank=ep_rank, ep_size=8) as recorder:
            train_a_few_steps(model)
        write_trace(Path(f"router.rank{ep_rank}.npz"), recorder.trace)
    """

    def __init__(
        self,
        model: nn.Module,
        num_topk: int,
        rank: int,
        ep_size: int,
        *,
        max_entries: int = 256,
        source: str = "",
    ) -> None:
        """Find the routers.

        Raises:
            ConfigError: there are none.
        """
        self.trace = RouterTrace(num_experts=0, num_topk=num_topk, ep_size=ep_size, source=source)
        self._rank, self._max_entries = rank, max_entries
        self._routers = [module for module in model.modules() if _is_router(module)]
        self._handles: list[Any] = []
        if not self._routers:
            raise ConfigError(
                f"{type(model).__name__} has no router to record; is it an MoE model?"
            )

    def __enter__(self) -> Self:
        """Hook every router."""
        for layer, router in enumerate(self._routers):
            self._handles.append(router.register_forward_hook(self._hook(layer)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, layer: int) -> Any:  # noqa: ANN401
        """The listener of one router."""

        def listen(module: nn.Module, args: object, output: Any) -> None:  # noqa: ANN401
            if len(self.trace.entries) < self._max_entries:
                self._keep(output[1], layer)

        return listen

    def _keep(self, routing_map: Tensor, layer: int) -> None:
        """Append one routing."""
        routed = routing_map.detach().bool().reshape(-1, routing_map.shape[-1])
        self.trace.num_experts = routed.shape[1]
        self.trace.add(experts_of(routed, self.trace.num_topk), layer, self._rank)


def experts_of(routed: Tensor, num_topk: int) -> Tensor:
    """[T, K] int64: experts of each row of a bool map [T, E], ascending; -1 fills up.

    Raises:
        ConfigError: a row with more than K experts.

    Example: [[0, 1, 0, 1], [0, 0, 0, 0]], K=2 -> [[1, 3], [-1, -1]].
    """
    widest = int(routed.sum(1).max()) if len(routed) else 0
    if widest > num_topk:
        raise ConfigError(f"a token was routed to {widest} experts; num_topk is {num_topk}")
    num_experts = routed.shape[1]
    ids = torch.arange(num_experts, device=routed.device)
    listed = torch.where(routed, ids, num_experts).sort(dim=1).values[:, :num_topk]
    return listed.masked_fill(listed == num_experts, -1)


def _is_router(module: nn.Module) -> bool:
    """Whether a module is one of Megatron's routers, without importing Megatron."""
    return any(base.__name__ == "Router" for base in type(module).__mro__)
