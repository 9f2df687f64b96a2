"""Selecting the dispatcher: layer specs of every form, and what a user may get wrong."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("megatron.core")

import megatron.core
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from ep_dispatcher.errors import ConfigError
from ep_dispatcher.megatron import cpu_standins
from ep_dispatcher.megatron.layer import EpMoELayer
from ep_dispatcher.megatron.plugin import (
    EpPlugin,
    swap_dispatchers,
    with_ep_dispatcher,
)
from ep_dispatcher.megatron.pool import _Lease


def layer_spec(num_experts: int | None = 8) -> ModuleSpec:
    """A layer of the installed version, in its own form."""
    return get_gpt_layer_local_spec(num_experts=num_experts, moe_grouped_gemm=False)


def moe_class(spec: ModuleSpec) -> object:
    """The class that a layer spec builds its MLP with, in either form."""
    mlp = spec.submodules.mlp
    return mlp.func if isinstance(mlp, functools.partial) else mlp.module


def plugin_of(spec: ModuleSpec) -> object:
    """The plug-in that a layer spec hands to its MoE layer."""
    mlp = spec.submodules.mlp
    return mlp.keywords["plugin"] if isinstance(mlp, functools.partial) else mlp.params["plugin"]


def test_layer_spec_is_copied_with_its_moe_layer_replaced() -> None:
    spec, plugin = layer_spec(), EpPlugin()
    changed = with_ep_dispatcher(spec, plugin)
    assert moe_class(changed) is EpMoELayer
    assert plugin_of(changed) is plugin
    assert moe_class(spec) is MoELayer
    assert changed.submodules.self_attention is spec.submodules.self_attention


def test_both_forms_of_an_mlp_spec_are_replaced() -> None:
    """A ModuleSpec as up to 0.17 and a functools.partial as from 0.18, whatever is installed."""
    plugin = EpPlugin()
    older = ModuleSpec(module=MoELayer, submodules="s", params={"extra": 1})
    newer = functools.partial(MoELayer, submodules="s")
    for form in (older, newer):
        layer = ModuleSpec(module=object, submodules=copy.copy(layer_spec().submodules))
        layer.submodules.mlp = form
        changed = with_ep_dispatcher(layer, plugin)
        assert moe_class(changed) is EpMoELayer
        assert plugin_of(changed) is plugin
    assert older.params == {"extra": 1}


def test_block_spec_shares_one_plugin_and_keeps_dense_layers() -> None:
    dense, sparse = layer_spec(None), layer_spec()
    block = TransformerBlockSubmodules(layer_specs=[dense, sparse, sparse])
    changed = with_ep_dispatcher(block)
    assert changed.layer_specs[0] is dense
    plugins = [plugin_of(spec) for spec in changed.layer_specs[1:]]
    assert plugins[0] is plugins[1]


def test_hybrid_stack_spec_is_replaced() -> None:
    """The stack of Mamba hybrids, which keeps its MoE layer one level further down."""
    try:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as stack
    except ImportError as error:  # older, or without Triton or Transformer Engine
        pytest.skip(f"megatron-core {megatron.core.__version__} has no stack here: {error}")
    changed: ModuleSpec = with_ep_dispatcher(stack)
    assert moe_class(changed.submodules.moe_layer) is EpMoELayer
    assert moe_class(stack.submodules.moe_layer) is MoELayer


def test_a_spec_nested_in_a_stack_is_replaced() -> None:
    """The same nest, built by hand, as the real one cannot be imported everywhere."""

    @dataclasses.dataclass
    class Stack:
        norm: type
        moe_layer: ModuleSpec

    stack = ModuleSpec(module=object, submodules=Stack(torch.nn.LayerNorm, layer_spec()))
    changed = with_ep_dispatcher(stack)
    assert moe_class(changed.submodules.moe_layer) is EpMoELayer
    assert moe_class(stack.submodules.moe_layer) is MoELayer


def test_a_copied_spec_shares_the_plugin() -> None:
    plugin = EpPlugin()
    assert plugin_of(copy.deepcopy(with_ep_dispatcher(layer_spec(), plugin))) is plugin


def test_a_spec_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="no MoELayer"):
        with_ep_dispatcher(layer_spec(None))


def test_a_chunk_without_experts_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A dense pipeline stage is no mistake, but it is said."""
    chunks = [torch.nn.Linear(2, 2)]
    assert swap_dispatchers(chunks) is chunks
    assert "no MoE layer on this pipeline rank" in caplog.text


def test_a_plugin_warns_about_a_version_nobody_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.23.0")
    with pytest.warns(UserWarning, match=r"megatron-core 0\.23\.0 is outside"):
        EpPlugin()


def test_standins_are_not_taken_for_a_gpu() -> None:
    """In a process of its own, as they stay: streams work, and nothing finds a device."""
    script = (
        "import torch; from ep_dispatcher.megatron import cpu_standins as standins\n"
        "assert standins.install() and standins.install()\n"
        "assert torch.zeros(1, device='cuda').device.type == 'cpu'\n"
        "torch.cuda.current_stream().wait_stream(torch.cuda.Stream())\n"
        "assert not torch.cuda.is_available() and torch.cuda.device_count() == 0\n"
    )
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", script], env=hidden, check=True, timeout=100)


def test_standins_do_nothing_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one attribute of torch.cuda is replaced."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = dict(vars(torch.cuda))
    assert not cpu_standins.install()
    assert dict(vars(torch.cuda)) == before


class OpenGroup:
    """Stands for an EPGroup and notes how it was closed."""

    def __init__(self) -> None:
        """Open."""
        self.failed: list[bool] = []

    def close(self, *, failed: bool = False) -> None:
        """As EPGroup.close."""
        self.failed.append(failed)


def hold(plugin: EpPlugin) -> OpenGroup:
    """A group that the plug-in's pool has open."""
    group = OpenGroup()
    plugin.pool._leases[object(), None] = _Lease(group, 1)  # type: ignore[arg-type,index]
    return group


def test_a_failed_rank_does_not_wait_for_the_others_when_it_closes() -> None:
    """It would, for ranks that are stuck because of it: leaving a `with` by an error says so."""
    with EpPlugin() as plugin:
        well = hold(plugin)
    plugin = EpPlugin()
    badly = hold(plugin)
    with pytest.raises(KeyError), plugin:
        raise KeyError
    assert (well.failed, badly.failed) == ([False], [True])


@pytest.mark.parametrize(("ending", "failed"), [("pass", False), ("raise KeyError", True)])
def test_groups_close_at_exit_knowing_whether_it_failed(ending: str, failed: bool) -> None:
    """Also where nobody closed the plug-in: an error that ends the process counts."""
    script = f"""
import atexit
from ep_dispatcher.megatron.options import MegatronOptions
from ep_dispatcher.megatron.pool import GroupPool, _Lease
class Group:
    def close(self, *, failed=False): print("failed", failed)
pool = GroupPool(MegatronOptions())
pool._leases[0] = _Lease(Group(), 1)
atexit.register(pool._close_at_exit)
{ending}
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert f"failed {failed}" in ran.stdout, ran.stderr
