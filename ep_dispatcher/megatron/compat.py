"""What differs between the versions of Megatron-Core that the adapter was tested with."""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

OLDEST = (0, 16, 1)
NEWEST = (0, 19)  # any patch release of it
TESTED_RANGE = "0.16.1 to 0.19.x"
# How many SMs Transformer Engine's norms leave free; it reads them when a norm is built.
SM_MARGINS = ("NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN")


def parse_version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "0.19.2rc1+abc" -> (0, 19, 2)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def is_tested(text: str) -> bool:
    """Whether a version of megatron-core lies in the tested range."""
    version = parse_version(text)
    return version >= OLDEST and version[:2] <= NEWEST


def warn_if_untested(text: str) -> None:
    """Warn, with the range, about a version of megatron-core that nobody tried."""
    if not is_tested(text):
        warnings.warn(
            f"megatron-core {text} is outside the range that ep_dispatcher was tested with "
            f"({TESTED_RANGE}); compare losses with the alltoall dispatcher before a long run",
            stacklevel=3,
        )


def quantization_alignment(config: Any) -> int:  # noqa: ANN401
    """Rows that each expert's segment must be a multiple of for FP8 or FP4; 1 without them.

    0.16 names 16 where nothing is quantised, later versions 0, so those two mean 1 here.
    """
    if not (getattr(config, "fp8", None) or getattr(config, "fp4", None)):
        return 1
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

    return max(1, int(get_align_size_for_quantization(config)))


def counts_on_device(config: Any) -> bool:  # noqa: ANN401
    """Whether the experts read `tokens_per_expert` on the device; the others call `tolist()`."""
    names = ("moe_use_grouped_tensor", "use_transformer_engine_op_fuser")
    return any(getattr(config, name, False) for name in names)


def delays_weight_gradients(config: Any) -> bool:  # noqa: ANN401
    """Whether the experts keep back their weights' gradients until `backward_dw` (0.18 and on)."""
    return bool(getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False))


def rows_may_exceed_topk(config: Any) -> bool:  # noqa: ANN401
    """Whether the router may give a token more than top-k experts: fillers that pad an expert.

    `moe_router_padding_for_quantization` is not among them: in spite of its name Megatron's
    dispatchers add those routes, not the router, and ours aligns segments instead.
    """
    names = ("moe_pad_expert_input_to_capacity", "moe_pad_experts_for_cuda_graph_inference")
    return any(getattr(config, name, False) for name in names)


def leave_sms(num_sms: int) -> None:
    """Have Transformer Engine's norms leave SMs free, unless the environment says how many.

    For rows of more than 4096 elements, unless of 8192 or another tuned width, the backward of an
    RMSNorm is one cooperative launch over the GPU with barriers in it: no block ends before the
    last one has a place. Where another rank on the GPU holds SMs while it waits for this one,
    neither goes on.

    Source: transformer_engine/common/normalization/rmsnorm/rmsnorm_bwd_semi_cuda_kernel.cu@076b995.
    """
    for name in SM_MARGINS:
        os.environ.setdefault(name, str(num_sms))


def cuda_graph_scopes(config: Any) -> set[str] | None:  # noqa: ANN401
    """Names of the parts of a layer that CUDA graphs capture; None without CUDA graphs.

    The field is called cuda_graph_scope up to 0.17 and cuda_graph_modules from 0.18.
    """
    if getattr(config, "cuda_graph_impl", "none") == "none":
        return None
    scopes = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", [])
    if isinstance(scopes, str):
        scopes = scopes.split(",")
    return {str(getattr(scope, "name", scope)) for scope in scopes or []}


def begin_shared_experts(shared: Any, hidden_states: Any) -> None:  # noqa: ANN401
    """Before the dispatch is launched: tie the shared experts' stream to the current one.

    From 0.18 on `wait_current_stream` does that and the rest may follow the launch; before, only
    `pre_forward_comm` does, so it has to come first or nothing would overlap.
    """
    if hasattr(shared, "wait_current_stream"):
        shared.wait_current_stream()
    else:
        shared.pre_forward_comm(hidden_states)


def run_shared_fc1(shared: Any, hidden_states: Any, recv_x: Any) -> None:  # noqa: ANN401
    """After the dispatch was launched: the shared experts' first linear layer and activation."""
    if hasattr(shared, "wait_current_stream"):
        shared.pre_forward_comm(hidden_states, wait_current_stream=False)
    shared.linear_fc1_forward_and_act(recv_x)


def hold_shared_experts(shared: Any) -> None:  # noqa: ANN401
    """Before the combine is launched: keep the second linear layer behind the routed experts."""
    if hasattr(shared, "wait_current_stream"):
        shared.wait_current_stream()
