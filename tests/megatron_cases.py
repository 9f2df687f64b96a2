"""Parallel layouts and options under which training must match Megatron's own dispatcher."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Change = Literal["none", "quantization_padding", "fewer_experts", "other_identity"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a layout for 4 ranks.

    Attributes:
        name: of the test.
        tp: tensor-parallel ranks (with sequence parallelism where above 1); likewise pp, ep, etp.
        vpp: chunks of the model on each pipeline rank, which take turns (interleaved schedule).
        num_experts: E.
        num_topk: K.
        num_microbatches: per step.
        bf16: parameters and rows in bfloat16, gradients summed in fp32.
        distributed_optimizer: shard the optimizer's state.
        overlap_grad_reduce: gradients of the ranks are summed while the backward runs.
        settings: further fields of TransformerConfig, for both dispatchers.
        overlap: run ours under the combined 1F1B schedule and the other without it.
        change: what is done to the built model, for both dispatchers.
        reference: Megatron's dispatcher to compare with.
        form: how ours is selected.
        section: of our config, for ours.
        reordered: the two sum in a different order although a token has only two experts.
        ci: runs in every CI run; the others are marked slow.
    """

    name: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 4
    etp: int = 1
    num_experts: int = 8
    num_topk: int = 2
    num_microbatches: int = 2
    bf16: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    overlap: bool = False
    change: Change = "none"
    reference: str = "alltoall"
    form: Literal["spec", "swap"] = "spec"
    section: dict[str, Any] = field(default_factory=dict)
    reordered: bool = False
    ci: bool = True

    @property
    def exact(self) -> bool:
        """Whether losses and parameters must be equal: two terms add up the same in any order."""
        return self.num_topk * self.etp <= 2 and not self.reordered

    @property
    def reference_run(self) -> str:
        """What Megatron's dispatcher trains for it: the same text for cases that share that run."""
        return repr(
            replace(self, name="", form="spec", section={}, overlap=False, reordered=False, ci=True)
        )


_SHARED = {"moe_shared_expert_intermediate_size": 32}
_CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
# Megatron counts that loss for as many layers as the first case of a process has.
_NO_AUX = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}

CASES = (
    Case(name="ep4"),
    Case(name="ep4_swapped", form="swap", ci=False),
    Case(name="ep2_dp2", ep=2, form="swap"),
    Case(name="ep1_dp4", ep=1, ci=False),
    Case(name="tp2_ep2_etp2", tp=2, ep=2, etp=2),
    Case(name="tp2_ep2_etp1", tp=2, ep=2, etp=1),
    Case(name="tp4_ep1_etp4", tp=4, ep=1, etp=4, ci=False),
    Case(name="experts16_topk6", num_experts=16, num_topk=6),
    Case(name="topk1", num_topk=1, settings={"moe_router_pre_softmax": True}, ci=False),
    Case(
        name="probs_on_input",
        num_topk=1,
        settings={"moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
        ci=False,
    ),
    Case(name="capacity_half", settings={"moe_expert_capacity_factor": 0.5}),
    Case(name="capacity_padded", settings=_CAPACITY),
    Case(name="shared_experts", settings=_SHARED),
    Case(
        name="shared_experts_gated", settings=_SHARED | {"moe_shared_expert_gate": True}, ci=False
    ),
    Case(name="shared_overlap", settings=_SHARED | {"moe_shared_expert_overlap": True}),
    Case(name="recompute_moe", settings=_RECOMPUTE),
    Case(name="router_bf16", bf16=True, settings={"moe_router_dtype": None}, ci=False),
    Case(name="distributed_optimizer", ep=2, distributed_optimizer=True),
    Case(name="bf16", bf16=True),
    Case(name="pp2_ep2", pp=2, ep=2, num_microbatches=4),
    Case(name="pp2_vpp2_ep2", pp=2, vpp=2, ep=2, num_microbatches=4, settings=_NO_AUX, ci=False),
    Case(name="grad_reduce_ep2", ep=2, overlap_grad_reduce=True, distributed_optimizer=True),
    Case(
        name="chunks2_grad_reduce_ep2",
        ep=2,
        overlap_grad_reduce=True,
        section={"overlap": {"chunks": 2}},
        reordered=True,
        ci=False,
    ),
    Case(
        name="chunks2_pp2_vpp2",
        pp=2,
        vpp=2,
        ep=2,
        num_microbatches=4,
        settings=_NO_AUX,
        section={"overlap": {"chunks": 2}, "debug_ledger": True},
        reordered=True,
        ci=False,
    ),
    Case(name="overlap_1f1b", bf16=True, num_microbatches=4, overlap=True),
    Case(
        name="overlap_1f1b_shared",
        bf16=True,
        num_microbatches=4,
        overlap=True,
        settings=_SHARED,
        ci=False,
    ),
    Case(
        name="overlap_1f1b_one_expert",
        num_experts=4,
        bf16=True,
        num_microbatches=4,
        overlap=True,
        ci=False,
    ),
    Case(
        name="chunks3_shared",
        settings=_SHARED,
        section={"overlap": {"chunks": 3}, "debug_ledger": True},
        reordered=True,  # a weight's gradient is a sum over the chunks
    ),
    Case(
        name="chunks2_tp2_recompute",
        tp=2,
        ep=2,
        etp=2,
        settings=_RECOMPUTE,
        section={"overlap": {"chunks": 2}},
        form="swap",
        distributed_optimizer=True,
    ),
    Case(
        name="chunks4_pp2",
        pp=2,
        ep=2,
        num_microbatches=4,
        section={"overlap": {"chunks": 4}, "debug_ledger": True},
        reordered=True,
        ci=False,
    ),
    Case(
        name="ledger_1f1b",
        bf16=True,
        num_microbatches=4,
        overlap=True,
        ci=False,
        section={"debug_ledger": True},
    ),
    Case(name="quantization_padding", change="quantization_padding"),
    Case(name="fewer_experts", change="fewer_experts", reference="allgather"),
)
