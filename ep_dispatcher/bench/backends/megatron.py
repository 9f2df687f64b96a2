"""Megatron-Core's dispatchers, driven through their six steps as its MoE layer drives them.

The backward runs through autograd, so its phases include the backward of the permutes.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor

from ep_dispatcher.bench.backends import base
from ep_dispatcher.bench.backends.nccl_ep import capacity_rows, token_bound
from ep_dispatcher.bench.spec import Work
from ep_dispatcher.bench.stopwatch import MEET

_CLASSES = {
    "alltoall": "MoEAlltoAllTokenDispatcher",
    "allgather": "MoEAllGatherTokenDispatcher",
    "flex": "MoEFlexTokenDispatcher",
}
_FUSED = "fused"  # in a backend's name: its permutes are Transformer Engine's
_WIRES: dict[str, base.Wire] = {
    "alltoall": "by_copy",
    "allgather": "all_gather",
    "flex": "deduplicated",
}


class MegatronSession(base.PlainSession):
    """See `Session`."""

    def __init__(self, work: Work, place: base.Place) -> None:
        """Build a dispatcher from a config that holds nothing but what it needs."""
        self._kind, *more = place.name.partition("/")[2].split("-")
        self._fused = _FUSED in more
        self._flex_backend = more[0] if self._kind == "flex" else ""
        self._num_local = base.need_even_experts(work, place.name)
        if self._kind == "flex":
            base.need_cuda(place)
        _install_standins(place)
        base.need("megatron.core", "megatron-core")
        module = base.need("megatron.core.transformer.moe.token_dispatcher", "megatron-core")
        self.wire: base.Wire = _WIRES[self._kind]
        self._work, self._place = work, place
        self._topk_idx, self._map, self._probs = (torch.empty(0) for _ in range(3))
        self._kept: list[Tensor] = []
        self._parallel: Any = base.need("megatron.core.parallel_state", "megatron-core")
        _open_groups(self._parallel, work, place)
        first = place.rank * self._num_local
        try:
            self._dispatcher = getattr(module, _CLASSES[self._kind])(
                self._num_local,
                list(range(first, first + self._num_local)),
                config=self._config(),
                pg_collection=self._groups(),
            )
        except (ImportError, ValueError, AssertionError, TypeError) as error:
            raise base.Refused(
                f"{place.name} refused to open: {str(error).splitlines()[0]}"
            ) from error

    def identity(self) -> base.Identity:
        """The dispatcher's class, and its manager's where it has one."""
        manager = getattr(self._dispatcher, "_comm_manager", None)
        classes = [base.class_name(self._dispatcher)] + (
            [base.class_name(manager)] if manager else []
        )
        notes = ["through the dispatcher object's six steps and autograd"]
        notes.append("permutes of Transformer Engine" if self._fused else "permutes of torch")
        if self._kind == "flex":
            notes.append(f"num_sms {self._work.num_sms}")
        elif self._place.device.type == "cuda":
            notes.append(f"NCCL max_ctas {self._work.num_sms}; permutes run on every SM")
        return base.Identity(
            classes=tuple(classes),
            files=(base.file_of(inspect.getmodule(type(self._dispatcher))),),
            versions={"megatron_core": base.version_of("megatron-core")},
            notes=tuple(notes),
        )

    def prepare(self, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Make the map and the dense probs that Megatron's router gives."""
        self._topk_idx = topk_idx
        self._map, self._probs = base.multihot(topk_idx, topk_weights, self._work.num_experts)

    def plan(self, lap: base.Lap) -> None:
        """Part of dispatch_preprocess here."""

    def dispatch(self, x: Tensor, topk_weights: Tensor, lap: base.Lap) -> base.Received:
        """Steps 1 to 3; step 1 plans and, with alltoall, permutes."""
        rows_in = x.detach().unsqueeze(1).requires_grad_()
        probs_in = self._probs.detach().requires_grad_()
        steps = self._dispatcher
        rows, probs = steps.dispatch_preprocess(rows_in, self._map, probs_in)
        lap("permute")
        lap(MEET)
        rows, probs = steps.token_dispatch(rows, probs)
        lap("dispatch")
        rows, tokens_per_expert, probs = steps.dispatch_postprocess(rows, probs)
        lap("permute")
        self._kept = [rows_in, probs_in, rows, probs]
        counts = torch.as_tensor(tokens_per_expert)
        return base.Received(
            rows=rows.detach(),
            weights=probs.detach().float(),
            tokens_per_expert=counts,
            segment_rows=counts,
        )

    def combine(self, expert_out: Tensor, lap: base.Lap) -> Tensor:
        """Steps 4 to 6."""
        rows_out = expert_out.detach().requires_grad_()
        rows = self._dispatcher.combine_preprocess(rows_out)
        lap("unpermute")
        lap(MEET)
        rows = self._dispatcher.token_combine(rows)
        lap("combine")
        out: Tensor = self._dispatcher.combine_postprocess(rows)
        lap("unpermute")
        self._kept += [rows_out, out]
        return out.detach().reshape(-1, self._work.hidden)

    def combine_backward(self, grad_out: Tensor, lap: base.Lap) -> Tensor:
        """Autograd of steps 4 to 6."""
        rows_out, out = self._kept[4:]
        grad: Tensor = torch.autograd.grad([out], [rows_out], [grad_out.view_as(out)])[0]
        lap("combine_backward")
        return grad

    def dispatch_backward(
        self, grad_rows: Tensor, grad_weights: Tensor, lap: base.Lap
    ) -> tuple[Tensor, Tensor | None]:
        """Autograd of steps 1 to 3."""
        rows_in, probs_in, rows, probs = self._kept[:4]
        grad_x, grad_probs = torch.autograd.grad(
            [rows, probs], [rows_in, probs_in], [grad_rows, grad_weights.to(probs.dtype)]
        )
        lap("dispatch_backward")
        return grad_x.squeeze(1), base.gather_slots(grad_probs, self._topk_idx)

    def close(self) -> None:
        """See `Session.close`."""
        self._kept = []
        del self._dispatcher
        self._parallel.destroy_model_parallel()

    def _config(self) -> Any:  # noqa: ANN401
        """A TransformerConfig with this backend's knobs, as far as this version has them."""
        config_module = base.need("megatron.core.transformer.transformer_config", "megatron-core")
        known = inspect.signature(config_module.TransformerConfig).parameters
        work = self._work
        values: dict[str, Any] = {
            "num_layers": 1,
            "hidden_size": work.hidden,
            "num_attention_heads": 1,
            "num_moe_experts": work.num_experts,
            "moe_router_topk": work.num_topk,
            "moe_token_dispatcher_type": self._kind,
            "expert_model_parallel_size": work.ranks,
            "moe_router_dtype": "fp32",
            "add_bias_linear": False,
            "params_dtype": getattr(torch, work.dtype),
            "bf16": work.dtype == "bfloat16",
            "moe_permute_fusion": self._fused,
        }
        if self._kind == "flex":
            values["moe_flex_dispatcher_backend"] = self._flex_backend
            if "moe_flex_dispatcher_num_sms" in known:
                values["moe_flex_dispatcher_num_sms"] = work.num_sms
            else:
                values["moe_deepep_num_sms"] = values["moe_hybridep_num_sms"] = work.num_sms
            if self._flex_backend == "ncclep":  # refuses to open without it
                values["moe_expert_rank_capacity_factor"] = capacity_factor(work)
        try:
            return config_module.TransformerConfig(**values)
        except (ValueError, TypeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise base.Refused(f"Megatron refuses this config: {reason}") from error

    def _groups(self) -> SimpleNamespace:
        """Megatron's groups: expert parallelism over all ranks, no expert tensor parallelism."""
        state = self._parallel
        return SimpleNamespace(
            ep=state.get_expert_model_parallel_group(),
            expt_tp=state.get_expert_tensor_parallel_group(),
            tp_ep=state.get_expert_tensor_and_model_parallel_group(),
        )


def capacity_factor(work: Work) -> float:
    """Rows that a rank has room for, in units of T (rounded up) x K; beyond it NCCL EP traps."""
    unit = token_bound(work) * work.num_topk
    return (capacity_rows(work) + 1) / unit  # one more, as Megatron rounds the product down


def _open_groups(parallel: Any, work: Work, place: base.Place) -> None:  # noqa: ANN401
    """Megatron's groups; on GPUs its experts' ones have the work's SM budget, by a file of its."""
    if place.device.type != "cuda":
        parallel.initialize_model_parallel(expert_model_parallel_size=work.ranks)
        return
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        limit = {"max_ctas": work.num_sms}
        yaml.safe_dump({"ep": limit, "tp_ep_mp": limit}, file)
        file.flush()
        parallel.initialize_model_parallel(
            expert_model_parallel_size=work.ranks, nccl_communicator_config_path=file.name
        )


def _install_standins(place: base.Place) -> None:
    """Let Megatron run without a GPU, and keep it from looking for a JIT compiler."""
    if place.device.type == "cpu":
        standins = base.need("ep_dispatcher.megatron.cpu_standins", "ep_dispatcher")
        standins.install()
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def open_session(work: Work, place: base.Place) -> MegatronSession:
    """Open one of Megatron's dispatchers."""
    return MegatronSession(work, place)
