"""CUDA graphs of the parts of a layer that do not depend on the routing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformer_engine", reason="Megatron captures layers through it")
pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(120)]

ROOT = Path(__file__).parent.parent
ROUTER = "attn,moe_router"


@pytest.mark.parametrize(
    ("variant", "modules"),
    [("alltoall", ROUTER), ("ours", ROUTER), ("ours", f"{ROUTER},moe_preprocess")],
)
def test_losses_are_the_same_with_graphs(variant: str, modules: str) -> None:
    """Two layers, two micro-batches a step: four steps of replayed graphs give the same bits."""
    environment = os.environ | {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29671", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/megatron_graph_rank.py", variant, modules],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["plain"]) == 12
    assert found["graphed"] == found["plain"]
