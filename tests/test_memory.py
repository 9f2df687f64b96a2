"""The memory formula: equal to the C++ layout, within the stated bounds, and monotonic."""

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
    rail_record_bytes,
    window_regions,
)

CSRC = Path(__file__).parents[1] / "csrc"
LAYOUT_HEADER = CSRC / "core" / "window_layout.h"

# Reads one shape a line and prints its layout as JSON; fields in the order of EpWindowLayout.
PROGRAM = """
#include <cstdio>
#include "core/window_layout.h"
int main() {
  EpWindowShape shape{};
  while (std::scanf("%d %d %d %d %d %ld %ld", &shape.ep_size, &shape.num_experts, &shape.num_topk,
                    &shape.num_channels, &shape.ring_depth, &shape.max_tokens,
                    &shape.partial_bytes) == 7) {
    const EpWindowLayout layout = ep::make_window_layout(shape);
    std::printf("{");
#define SHOW(name) std::printf("\\"" #name "\\": %ld, ", static_cast<long>(layout.name));
    FIELDS
    std::printf("\\"slot_bytes\\": %ld}\\n", static_cast<long>(layout.slot_bytes));
  }
}
"""


def one_domain(ep_size: int) -> Topology:
    """All ranks joined by NVLink."""
    return Topology(ep_size=ep_size, domain_size=ep_size)


CASES = [
    (make_config(), one_domain(8), RING_DEPTH),
    (make_config(precision="exact"), one_domain(4), 8),
    (make_config(hidden=72, num_topk=1, num_experts=10, max_tokens=1, num_sms=1), one_domain(2), 9),
    (make_config(hidden=2880, num_topk=4, num_experts=32, max_tokens=0), one_domain(1), 16),
    (make_config(hidden=7176, num_topk=33, num_experts=64, max_tokens=777), one_domain(72), 64),
]


def layout_of_header(tmp_path: Path) -> list[dict[str, int]]:
    """Compile the C++ layout and ask it for every case."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to compile csrc/core/window_layout.h")
    if not LAYOUT_HEADER.is_file():
        pytest.skip("csrc is not beside the tests, so there is no layout to compare with")
    fields = [*window_regions(*CASES[0]), "total_bytes"]
    shown = " ".join(f"SHOW({name})" for name in fields)
    source = tmp_path / "layout.cpp"
    source.write_text(PROGRAM.replace("FIELDS", shown), encoding="utf-8")
    command = [compiler, "-std=c++17", "-I", str(CSRC), str(source), "-o", str(tmp_path / "layout")]
    subprocess.run(command, check=True, timeout=60)
    lines = [
        f"{topology.ep_size} {config.shape.num_experts} {config.shape.num_topk} "
        f"{config.tuning.num_sms} {depth} {config.max_tokens_per_rank} {partial_bytes(config)}"
        for config, topology, depth in CASES
    ]
    done = subprocess.run(
        [str(tmp_path / "layout")],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_regions_equal_the_layout_of_the_kernels(tmp_path: Path) -> None:
    """Every offset, the slot and the total that csrc/core/window_layout.h gives."""
    layouts = layout_of_header(tmp_path)
    assert len(layouts) == len(CASES)
    for (config, topology, depth), layout in zip(CASES, layouts, strict=True):
        regions = window_regions(config, topology, depth)
        offsets = list(itertools.accumulate(regions.values(), initial=0))
        assert [layout[name] for name in regions] == offsets[:-1]
        assert layout["slot_bytes"] == partial_slot_bytes(config)
        terms = persistent_bytes(config, topology, ring_depth=depth)
        assert layout["total_bytes"] == terms["total"] - terms["expert_tables"]


def test_terms_add_up() -> None:
    """The total is the sum of the named terms, and the window's part is whole pages."""
    for config, topology, depth in CASES:
        terms = persistent_bytes(config, topology, ring_depth=depth)
        total = terms.pop("total")
        assert total == sum(terms.values())
        assert (total - terms["expert_tables"]) % 4096 == 0
        assert all(size >= 0 for size in terms.values())


def test_one_domain_of_8_stays_below_half_a_gigabyte() -> None:
    """T=4096, H=7168, K=8, E=256, in either precision."""
    for precision in ("rounded", "exact"):
        config = make_config(precision=precision)
        assert persistent_bytes(config, one_domain(8))["total"] <= 0.5e9


def test_rail_record_holds_row_and_weights() -> None:
    """14336 bytes of row, 8 x 4 of weights, up to the next 128: 14464."""
    assert rail_record_bytes(make_config()) == 14464


def test_exact_partials_are_in_fp32() -> None:
    """Twice the bytes of bfloat16 rows, in the ring and on the rails."""
    rounded, exact = make_config(), make_config(precision="exact")
    assert partial_bytes(exact) == 2 * partial_bytes(rounded)
    topology = Topology(ep_size=64, domain_size=8)
    ours, theirs = persistent_bytes(exact, topology), persistent_bytes(rounded, topology)
    assert ours["partial_ring"] > 1.9 * theirs["partial_ring"]
    assert ours["rail_partials"] > 1.9 * theirs["rail_partials"]


def test_the_reference_tier_holds_nothing() -> None:
    """Zero bytes, whatever the sizes."""
    assert persistent_bytes(make_config(), one_domain(8), "reference") == {"total": 0}


def test_memory_of_one_domain_hardly_depends_on_the_number_of_tokens() -> None:
    """Records only: 2 x P x (1 + K) words a token; the ring has a fixed number of rows."""
    few, many = make_config(max_tokens=4096), make_config(max_tokens=8192)
    grown = persistent_bytes(many, one_domain(8))["total"]
    grown -= persistent_bytes(few, one_domain(8))["total"]
    assert grown == 4096 * 2 * 8 * (1 + 8) * 4
