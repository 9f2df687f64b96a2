"""The memory formula of several domains: equal to the C++ layout, within the stated bound."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from memory_cases import make_config

from ep_dispatcher.config import Topology
from ep_dispatcher.memory import (
    RING_DEPTH,
    partial_bytes,
    partial_slot_bytes,
    persistent_bytes,
    rail_regions,
    window_regions,
)
from ep_dispatcher.rail_memory import rail_blocks, segment_tokens

CSRC = Path(__file__).parents[1] / "csrc"

# Reads one world a line and prints the layout of its rails as JSON.
PROGRAM = """
#include <cstdio>
#include "core/rail_layout.h"
int main() {
  EpContext context{};
  EpWindowShape& shape = context.shape;
  EpRail rail{};
  while (std::scanf("%d %d %d %d %d %ld %ld %d %d %ld %d", &shape.ep_size, &shape.num_experts,
                    &shape.num_topk, &shape.num_channels, &shape.ring_depth, &shape.max_tokens,
                    &shape.partial_bytes, &rail.num_domains, &rail.num_blocks, &rail.max_tokens,
                    &rail.exact) == 11) {
    context.window = ep::make_window_layout(shape);
    const EpRailLayout layout = ep::make_rail_layout(context, rail);
    std::printf("{");
#define SHOW(name) std::printf("\\"" #name "\\": %ld, ", static_cast<long>(layout.name));
    FIELDS
    std::printf("\\"slot_bytes\\": %ld}\\n", static_cast<long>(layout.slot_bytes));
  }
}
"""


CASES = [
    (make_config(), Topology(ep_size=64, domain_size=8)),
    (make_config(precision="exact"), Topology(ep_size=16, domain_size=4)),
    (
        make_config(hidden=72, num_topk=1, max_tokens=0, num_sms=1),
        Topology(ep_size=2, domain_size=1),
    ),
    (make_config(), Topology(ep_size=32, domain_size=1)),  # more rail blocks than a quarter of SMs
    (make_config(num_topk=33, max_tokens=777, num_sms=7), Topology(ep_size=192, domain_size=6)),
]


def layouts_of_header(tmp_path: Path) -> list[dict[str, int]]:
    """Compile the C++ layout and ask it for every case."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to compile csrc/core/rail_layout.h")
    if not CSRC.is_dir():
        pytest.skip("csrc is not beside the tests, so there is no layout to compare with")
    shown = " ".join(f"SHOW({name})" for name in [*rail_regions(*CASES[0]), "total_bytes"])
    source, program = tmp_path / "layout.cpp", str(tmp_path / "layout")
    source.write_text(PROGRAM.replace("FIELDS", shown), encoding="utf-8")
    command = ["g++", "-std=c++17", "-I", str(CSRC), str(source), "-o", program]
    subprocess.run(command, check=True, timeout=60)
    lines = []
    for config, topology in CASES:
        tokens = segment_tokens(config, topology)
        numbers = (
            topology.domain_size, config.shape.num_experts, config.shape.num_topk,
            config.tuning.num_sms, RING_DEPTH, topology.num_domains * tokens,
            partial_bytes(config), topology.num_domains, rail_blocks(config, topology), tokens,
            int(config.precision == "exact"),
        )  # fmt: skip
        lines.append(" ".join(map(str, numbers)))
    done = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, check=True, timeout=60
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_regions_equal_the_layout_of_the_kernels(tmp_path: Path) -> None:
    """Every offset, the slot and the total that csrc/core/rail_layout.h gives."""
    layouts = layouts_of_header(tmp_path)
    assert len(layouts) == len(CASES)
    for (config, topology), layout in zip(CASES, layouts, strict=True):
        window = sum(window_regions(config, topology).values())
        regions = rail_regions(config, topology)
        offsets = itertools.accumulate(regions.values(), initial=-(-window // 4096) * 4096)
        assert [layout[name] for name in regions] == list(offsets)[:-1]
        assert layout["slot_bytes"] == partial_slot_bytes(config)
        terms = persistent_bytes(config, topology)
        assert layout["total_bytes"] == terms["total"] - terms["expert_tables"]


def test_eight_domains_of_8_stay_below_nine_tenths_of_a_gigabyte() -> None:
    """T=4096, H=7168, K=8, E=256; nearly all of it a slot for each token of the other domains."""
    config, topology = CASES[0]
    terms = persistent_bytes(config, topology)
    assert terms["total"] <= 0.9e9
    landed = 2 * 7 * 4096 * partial_slot_bytes(config)
    assert landed <= terms["rail_landing"] + terms["rail_partials"] <= 1.01 * landed


def test_terms_add_up() -> None:
    """The total is the sum of the named terms, and the window's part is whole pages."""
    for config, topology in CASES:
        terms = persistent_bytes(config, topology)
        total = terms.pop("total")
        assert total == sum(terms.values())
        assert (total - terms["expert_tables"]) % 4096 == 0
        assert all(size >= 0 for size in terms.values())
