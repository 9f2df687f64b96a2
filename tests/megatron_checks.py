"""Properties of the dispatcher inside real Megatron layers, each run by 4 ranks of its own.

The list follows what Megatron's own unit tests check of its dispatchers, and what its schedules
rely on without a test. A check is a function of no arguments that asserts; `megatron_world.py`
runs them, and `test_megatron_dispatcher.py` reports each as a test.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import importlib
import io
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import get_capacity
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ep_dispatcher.errors import ClosedError, RoutingError, UnavailableError
from ep_dispatcher.megatron.compat import parse_version
from ep_dispatcher.megatron.layer import EpMoELayer
from ep_dispatcher.megatron.options import MegatronOptions
from ep_dispatcher.megatron.plugin import EpPlugin, with_ep_dispatcher

HIDDEN = 16
TOKENS = (6, 2)  # sequence, batch
LAYOUTS = ((1, 4, 1), (4, 1, 1), (2, 2, 1), (2, 2, 2), (1, 2, 2), (1, 1, 4), (1, 1, 1))


@contextlib.contextmanager
def layout(tp: int, ep: int, etp: int) -> Iterator[None]:
    """Megatron's process groups for a layout of the 4 ranks."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def make_layer(plugin: EpPlugin, **settings: object) -> Any:  # noqa: ANN401
    """An MoE layer of 8 experts, top-2, for the layout in force."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    fields: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_dtype": "fp32",
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "use_cpu_initialization": True,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    config = TransformerConfig(**(fields | settings))
    num_experts = config.num_moe_experts
    spec = get_gpt_layer_local_spec(num_experts=num_experts, moe_grouped_gemm=False)
    mlp = with_ep_dispatcher(spec, plugin).submodules.mlp
    layer = mlp(config=config) if callable(mlp) else build_module(mlp, config=config)
    assert isinstance(layer, EpMoELayer)
    layer.set_layer_number(0)
    return layer


def make_tokens(sequence: int = TOKENS[0]) -> Tensor:
    """Rows that differ between ranks and tokens."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    tokens = torch.randn(sequence, TOKENS[1], HIDDEN, generator=generator)
    return tokens.requires_grad_()


def through(
    layer: Any,  # noqa: ANN401
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor,
) -> tuple[Tensor, Tensor]:
    """The six steps with experts that only apply their probability; out and the counts."""
    steps = layer.token_dispatcher
    rows, weights = steps.dispatch_preprocess(tokens, routing_map, probs)
    rows, weights = steps.token_dispatch(rows, weights)
    rows, counts, weights = steps.dispatch_postprocess(rows, weights)
    assert int(counts.sum()) == len(rows) == len(weights)
    rows = (rows * weights.unsqueeze(-1)).to(rows.dtype)
    rows = steps.combine_preprocess(rows)
    out = steps.combine_postprocess(steps.token_combine(rows))
    assert out.shape == tokens.shape
    return out, counts


def dense_sum(probs: Tensor, routing_map: Tensor) -> Tensor:
    """[.., 1] what each token is multiplied by when each expert only applies its probability."""
    return (probs * routing_map).sum(1).view(*TOKENS, 1).detach()


def check_dropless(tp: int, ep: int, etp: int) -> None:
    """Dense probs and identity experts give the input back, forward and backward.

    Probs are non-zero where nothing is routed, so routes taken from probs would show.
    """
    with layout(tp, ep, etp), EpPlugin() as plugin:
        layer = make_layer(plugin)
        tokens = make_tokens()
        _, routing_map = layer.route(tokens.detach())
        probs = torch.full(routing_map.shape, 0.5, requires_grad=True)
        out, _ = through(layer, tokens, routing_map, probs)
        torch.testing.assert_close(out / etp, tokens.detach())
        (out / etp).backward(tokens.detach())
        torch.testing.assert_close(tokens.grad, tokens.detach())
        squares = tokens.detach().reshape(-1, HIDDEN).square().sum(1, keepdim=True)
        torch.testing.assert_close(probs.grad, squares * routing_map)


def check_capacity() -> None:
    """With a capacity, an expert gets no more rows and a dropped route contributes nothing."""
    with layout(1, 4, 1), EpPlugin() as plugin:
        layer = make_layer(plugin, moe_expert_capacity_factor=0.5)
        tokens = make_tokens()
        probs, routing_map = layer.route(tokens.detach())
        assert int(routing_map.sum()) < 2 * len(routing_map), "the capacity drops nothing here"
        out, counts = through(layer, tokens, routing_map, probs)
        capacity = get_capacity(2 * len(routing_map), num_experts=8, capacity_factor=0.5)
        assert int(counts.max()) <= capacity * 4
        scale = dense_sum(probs, routing_map)
        torch.testing.assert_close(out, tokens.detach() * scale)
        out.backward(torch.ones_like(out))
        torch.testing.assert_close(tokens.grad, scale.expand_as(tokens))


def check_drop_and_pad() -> None:
    """Padding each expert to its capacity changes counts but neither output nor gradient."""
    with layout(1, 4, 1), EpPlugin() as plugin:
        results = []
        for padded in (False, True):
            torch.manual_seed(7)
            layer = make_layer(
                plugin, moe_expert_capacity_factor=0.5, moe_pad_expert_input_to_capacity=padded
            )
            tokens = make_tokens()
            probs, routing_map = layer.route(tokens.detach())
            out, counts = through(layer, tokens, routing_map, probs)
            out.backward(torch.ones_like(out))
            results.append((out, tokens.grad, counts))
        (out, grad, counts), (padded_out, padded_grad, padded_counts) = results
        assert grad is not None
        assert padded_grad is not None
        torch.testing.assert_close(padded_out, out, rtol=0, atol=0)
        torch.testing.assert_close(padded_grad, grad, rtol=0, atol=0)
        capacity = get_capacity(2 * 12, num_experts=8, capacity_factor=0.5)
        assert padded_counts.tolist() == [capacity * 4] * 2
        padding = padded_counts.sum() - counts.sum()
        dist.all_reduce(padding)
        assert int(padding) > 0, "nothing was padded here"


def check_rows_beyond_topk() -> None:
    """A routing that gives a row more experts than the config allows is refused, not cut."""
    with layout(1, 4, 1), EpPlugin() as plugin:
        layer = make_layer(plugin)
        routing_map = torch.ones(12, 8, dtype=torch.bool)
        with pytest.raises(RoutingError, match="has 8 experts"):
            layer.token_dispatcher.dispatch_preprocess(
                make_tokens(), routing_map, torch.ones(12, 8)
            )


def check_quantization_padding(fp4: bool = False) -> None:
    """For FP8 or FP4 experts each segment is a multiple of their alignment; results are equal."""
    with layout(1, 4, 1), EpPlugin() as plugin:
        results = []
        for quantised in (False, True):
            torch.manual_seed(7)
            layer = make_layer(plugin, num_moe_experts=32, moe_router_topk=4)
            if quantised:
                config = copy.copy(layer.config)
                config.fp8, config.fp8_recipe = (None, None) if fp4 else ("e4m3", "delayed")
                config.fp4, config.fp4_recipe = ("e2m1", "nvfp4") if fp4 else (None, None)
                layer.token_dispatcher._comm_manager.config = config
            tokens = make_tokens()
            probs, routing_map = layer.route(tokens.detach())
            probs = probs.detach().requires_grad_()
            out, counts = through(layer, tokens, routing_map, probs)
            out.backward(torch.ones_like(out))
            results.append((out, tokens.grad, probs.grad, counts))
        *plain, counts = results[0]
        *padded, padded_counts = results[1]
        for ours, theirs in zip(padded, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        alignment = 32 if fp4 else 16
        assert all(count % alignment == 0 for count in padded_counts.tolist())
        assert int(padded_counts.sum()) > int(counts.sum()), "nothing was padded here"


def check_uneven_tokens() -> None:
    """Each rank has its own number of tokens, changing by the call: none, one, and growing."""
    with layout(1, 4, 1), EpPlugin() as plugin:
        layer = make_layer(plugin)
        for lengths in ((4, 0, 1, 7), (1, 1, 1, 1), (0, 0, 0, 0), (0, 40, 3, 0)):
            tokens = make_tokens(lengths[dist.get_rank()])
            # Not by the router: Megatron's fails on a rank without tokens.
            experts = torch.rand(tokens.shape[0] * TOKENS[1], 8).topk(2, dim=1).indices
            routing_map = torch.zeros(len(experts), 8, dtype=torch.bool).scatter_(1, experts, True)
            probs = torch.full(routing_map.shape, 0.5)
            out, _ = through(layer, tokens, routing_map, probs)
            torch.testing.assert_close(out, tokens.detach())
            out.backward(tokens.detach())
            torch.testing.assert_close(tokens.grad, tokens.detach())


def check_fewer_experts() -> None:
    """Rows of no, one and two experts come back as the sum over what they were routed to."""
    with layout(2, 2, 2), EpPlugin() as plugin:
        layer = make_layer(plugin)
        routing_map = torch.zeros(12, 8, dtype=torch.bool)
        for token in range(12):
            routing_map[token, : token % 3] = True
        probs = torch.full((12, 8), 0.25)
        tokens = make_tokens()
        out, counts = through(layer, tokens, routing_map, probs)
        torch.testing.assert_close(out / 2, tokens.detach() * dense_sum(probs, routing_map))
        routed = torch.tensor(int(counts.sum()))
        dist.all_reduce(routed)
        assert int(routed) == 4 * 12 * 2, "12 routes a rank, each to 2 shards"


def check_latent_width() -> None:
    """The width is that of the rows, not the config's hidden size."""
    with layout(1, 4, 1), EpPlugin() as plugin:
        layer = make_layer(plugin)
        _, routing_map = layer.route(make_tokens().detach())
        latent = make_tokens().detach()[..., :8].contiguous().requires_grad_()
        out, _ = through(layer, latent, routing_map, torch.full(routing_map.shape, 0.5))
        torch.testing.assert_close(out, latent.detach())


def check_router_dtype() -> None:
    """Probs keep the router's dtype on arrival and in their gradient; fp32 is on the wire."""
    with layout(1, 4, 1), EpPlugin() as plugin:
        layer = make_layer(plugin)
        steps = layer.token_dispatcher
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            tokens = make_tokens()
            _, routing_map = layer.route(tokens.detach())
            probs = torch.full(routing_map.shape, 0.5, dtype=dtype, requires_grad=True)
            rows, weights = steps.dispatch_preprocess(tokens, routing_map, probs)
            assert weights.dtype == torch.float32
            rows, weights = steps.token_dispatch(rows, weights)
            assert weights.dtype == dtype
            steps.token_combine(rows * weights.unsqueeze(-1).float()).sum().backward()
            assert probs.grad is not None
            assert probs.grad.dtype == dtype


def check_arguments_carry_gradients() -> None:
    """Step 2 uses the tensors it is given, as the 1F1B schedule passes detached ones (R1)."""
    with layout(1, 4, 1), EpPlugin() as plugin:
        layer = make_layer(plugin)
        steps = layer.token_dispatcher
        probs, routing_map = layer.route(make_tokens().detach())
        probs = probs.detach().requires_grad_()
        rows, weights = steps.dispatch_preprocess(make_tokens(), routing_map, probs)
        rows, weights = rows.detach().requires_grad_(), weights.detach().requires_grad_()
        steps._comm_manager.token_probs = weights  # as Megatron's schedule does
        recv, recv_weights = steps.token_dispatch(rows, weights)
        steps.token_combine(recv * recv_weights.unsqueeze(-1)).sum().backward()
        assert rows.grad is not None
        assert weights.grad is not None
        assert probs.grad is None
        assert steps._comm_manager.is_idle


def check_freed_inputs() -> None:
    """The combine's input may be freed after the forward; results alias nothing (R3)."""
    with layout(1, 4, 1), EpPlugin() as plugin:
        layer = make_layer(plugin)
        steps = layer.token_dispatcher
        tokens = make_tokens()
        _, routing_map = layer.route(tokens.detach())
        rows, weights = steps.dispatch_preprocess(
            tokens, routing_map, torch.full(routing_map.shape, 0.5)
        )
        recv, recv_weights = steps.token_dispatch(rows, weights)
        expert_out = recv * recv_weights.unsqueeze(-1)
        out = steps.token_combine(expert_out)
        storages = {t.untyped_storage().data_ptr() for t in (rows, recv, expert_out, out)}
        assert len(storages) == 4
        expert_out.untyped_storage().resize_(0)
        out.backward(torch.ones_like(out))
        torch.testing.assert_close(tokens.grad, torch.ones_like(tokens))


def check_other_identity_fails() -> None:
    """Negative control: under another policy identity the 1F1B schedule frees what ours saved."""
    from megatron_cases import CASES
    from megatron_rank import train

    case = next(case for case in CASES if case.overlap)
    with layout(1, case.ep, 1), EpPlugin() as plugin:
        train(case, 1, plugin)
        with pytest.raises(RuntimeError, match="not allocated"):
            train(dataclasses.replace(case, change="other_identity"), 1, plugin)


def check_graphed_attributes() -> None:
    """What a CUDA graph of step 1 hands on is enough: replayed copies give the same result."""
    with layout(1, 4, 1), EpPlugin() as plugin:
        layer = make_layer(plugin)
        steps = layer.token_dispatcher
        tokens = make_tokens()
        _, routing_map = layer.route(tokens.detach())
        rows, weights = steps.dispatch_preprocess(
            tokens, routing_map, torch.full(routing_map.shape, 0.5)
        )
        assert steps.cudagraph_attrs == ["_comm_manager.topk_idx"]
        held = steps._comm_manager.topk_idx
        assert isinstance(held, Tensor)
        steps._comm_manager.topk_idx = held.clone()  # a replay sets the graph's output back
        recv, recv_weights = steps.token_dispatch(rows, weights)
        out = steps.token_combine(recv * recv_weights.unsqueeze(-1))
        torch.testing.assert_close(out.view_as(tokens), tokens.detach())


def check_recompute_releases() -> None:
    """Under recomputation nothing keeps a plan alive once the backward is done (R5)."""
    with layout(1, 4, 1), EpPlugin() as plugin:
        layer = make_layer(plugin, recompute_granularity="selective", recompute_modules=["moe"])
        plans = _watch_plans(layer)
        for _ in range(3):
            out, _ = layer(make_tokens())
            assert layer.token_dispatcher._comm_manager.is_idle
            out.sum().backward()
            del out
        gc.collect()
        assert len(plans) == 6, "3 forwards, each run again in the backward"
        assert [plan() for plan in plans] == [None] * 6


def _watch_plans(layer: Any) -> list[Callable[[], object]]:  # noqa: ANN401
    """Weak references to the plans that a layer makes."""
    plans: list[Callable[[], object]] = []
    manager = layer.token_dispatcher._comm_manager
    dispatch = manager.dispatch

    def watched(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = dispatch(rows, weights)
        plans.append(weakref.ref(manager._plan))
        return result

    manager.dispatch = watched
    return plans


def check_shared_groups() -> None:
    """Layers of one shape share a group; it closes with its last layer, and with the plug-in."""
    with layout(1, 4, 1), EpPlugin() as plugin:
        layers = [make_layer(plugin) for _ in range(3)]
        for layer in layers:
            layer(make_tokens())
        assert plugin.pool.num_groups == 1
        groups = [
            next(iter(layer.token_dispatcher._comm_manager._groups.values())) for layer in layers
        ]
        assert groups[0] is groups[1] is groups[2]
        layers[0].token_dispatcher.close()
        layers[1](make_tokens())
        layers[1].token_dispatcher.close()
        layers[2].token_dispatcher.close()
        assert plugin.pool.num_groups == 0
        layers[2](make_tokens())
        assert plugin.pool.num_groups == 1
        plugin.close()
        with pytest.raises(ClosedError, match="closed"):
            layers[2](make_tokens())


def check_two_models() -> None:
    """Two models used in turns, backward after both forwards, give what each gives alone."""
    with layout(1, 4, 1), EpPlugin() as first, EpPlugin() as second:
        torch.manual_seed(7)
        small = make_layer(first)
        large = make_layer(
            second, num_moe_experts=4, moe_router_topk=1, moe_router_pre_softmax=True
        )
        alone = [_grad_of(layer) for layer in (small, large)]
        inputs = [make_tokens(), make_tokens()]
        outs = [layer(tokens)[0] for layer, tokens in zip((small, large), inputs, strict=True)]
        for out in outs:
            out.sum().backward()
        for tokens, expected in zip(inputs, alone, strict=True):
            assert tokens.grad is not None
            torch.testing.assert_close(tokens.grad, expected, rtol=0, atol=0)


def _grad_of(layer: Any) -> Tensor:  # noqa: ANN401
    """Gradient of a layer's summed output with respect to its tokens."""
    tokens = make_tokens()
    layer(tokens)[0].sum().backward()
    assert tokens.grad is not None
    return tokens.grad


def check_names_itself_once() -> None:
    """The effective dispatcher is named once, on rank 0, and its config carries the identity."""
    said = io.StringIO()
    with layout(1, 4, 1), EpPlugin(MegatronOptions(tier="reference")) as plugin:
        layers = [make_layer(plugin), make_layer(plugin, moe_ffn_hidden_size=32)]
        with contextlib.redirect_stderr(said):
            for layer in (*layers, *layers):
                layer(make_tokens())
        config = layers[0].config
        assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == (
            "flex",
            "hybridep",
        )
    expected = 1 if dist.get_rank() == 0 else 0
    assert said.getvalue().count("ep_dispatcher, tier reference") == expected, said.getvalue()


def check_no_backend_is_imported() -> None:
    """Building a layer under the name of another backend imports nothing of it."""
    with layout(1, 4, 1), EpPlugin() as plugin:
        make_layer(plugin, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
        assert not {"deep_ep", "transformer_engine"} & set(sys.modules)


def check_spec_by_name() -> None:
    """The spec that scripts name on the command line; stages of a model share its plug-in."""
    version = parse_version(megatron.core.__version__)
    if version < (0, 19):  # then it is built at import, from arguments that do not exist here
        with pytest.raises(UnavailableError if version < (0, 17) else AssertionError):
            importlib.import_module("ep_dispatcher.megatron.specs")
        return
    from ep_dispatcher.megatron.specs import gpt_moe_spec

    with layout(1, 4, 1), EpPlugin() as plugin:
        config = make_layer(plugin).config
        config.transformer_impl = "local"
        blocks = [gpt_moe_spec(config), gpt_moe_spec(SimpleNamespace(transformer=config))]
        layers = [spec.submodules.mlp for block in blocks for spec in block.layer_specs]
        assert [layer.func for layer in layers] == [EpMoELayer, EpMoELayer]
        assert layers[0].keywords["plugin"] is layers[1].keywords["plugin"]


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"dropless_tp{tp}_ep{ep}_etp{etp}": lambda tp=tp, ep=ep, etp=etp: check_dropless(  # type: ignore[misc]
            tp, ep, etp
        )
        for tp, ep, etp in LAYOUTS
    },
    "capacity": check_capacity,
    "drop_and_pad": check_drop_and_pad,
    "rows_beyond_topk": check_rows_beyond_topk,
    "fp8_padding": check_quantization_padding,
    "fp4_padding": lambda: check_quantization_padding(fp4=True),
    "uneven_tokens": check_uneven_tokens,
    "fewer_experts": check_fewer_experts,
    "latent_width": check_latent_width,
    "router_dtype": check_router_dtype,
    "arguments_carry_gradients": check_arguments_carry_gradients,
    "freed_inputs": check_freed_inputs,
    "other_identity_fails": check_other_identity_fails,
    "graphed_attributes": check_graphed_attributes,
    "recompute_releases": check_recompute_releases,
    "shared_groups": check_shared_groups,
    "two_models": check_two_models,
    "names_itself_once": check_names_itself_once,
    "no_backend_is_imported": check_no_backend_is_imported,
    "spec_by_name": check_spec_by_name,
}
