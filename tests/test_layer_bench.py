"""The layer's measurement: a variant that fails on some ranks runs on none of them."""

from __future__ import annotations

import pytest
from layer_bench_cases import variants_that_run
from multi_process import ProcessWorld

NAMES = ["good", "output on 1", "step1 on 0", "step3 on 1", "good too"]


@pytest.mark.timeout(60)
def test_ranks_agree_which_variants_run() -> None:
    """Each rank's own errors differ; what is told and what runs afterwards must not."""
    with ProcessWorld(2) as world:
        told = world.run(variants_that_run, NAMES)
    assert told[0] == told[1]
    assert told[0] == [
        ("good", ""),
        ("output on 1", "rank 1: RuntimeError: output has failed"),
        ("step1 on 0", "rank 0: RuntimeError: step1 has failed"),
        ("step3 on 1", "rank 1: RuntimeError: step3 has failed"),
        ("good too", ""),
    ]
