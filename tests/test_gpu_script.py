"""scripts/gpu_tests.sh runs every test that needs a GPU, and refuses what it does not know."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SCRIPT = TESTS.parent / "scripts" / "gpu_tests.sh"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="scripts are not beside the tests")


def test_every_file_with_tests_for_a_gpu_is_run() -> None:
    """Named in a part, braces of the shell included."""
    text = re.sub(
        r"(\S+)\{(\w+),(\w+)\}(\S+)", r"\1\2\4 \1\3\4", SCRIPT.read_text(encoding="utf-8")
    )
    marked = [
        path.name
        for path in sorted(TESTS.glob("test_*.py"))
        if re.search(r"^(?!\s*#).*mark\.gpu\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(marked) > 10
    assert [name for name in marked if f"tests/{name}" not in text] == []
    named = set(re.findall(r"tests/(\w+\.py)", text))
    assert [name for name in named if not (TESTS / name).is_file()] == []


@pytest.mark.parametrize(
    ("part", "worlds", "told"),
    [("gin", "2x1 3x3", "WORLDS has 3x3; worlds: 2x1"), ("gyn", "", "no part is called gyn")],
)
def test_what_the_script_does_not_know_is_refused(
    part: str, worlds: str, told: str, tmp_path: Path
) -> None:
    environment = os.environ | {"WORLDS": worlds, "RESULTS": str(tmp_path)}
    done = subprocess.run(
        [SCRIPT, part], env=environment, capture_output=True, text=True, check=False, timeout=20
    )
    assert done.returncode == 2
    assert told in done.stdout


@pytest.mark.slow
def test_worlds_of_the_script_are_those_of_the_tests() -> None:
    """`-k` of a world that no test has would select nothing."""
    text = SCRIPT.read_text(encoding="utf-8")
    for name, source in (
        ("ALL_WORLDS", "test_rail_gin.py"),
        ("FAULT_WORLDS", "test_rail_gin_faults.py"),
    ):
        worlds = re.search(rf"^{name}='(.*?)'", text, re.MULTILINE)
        assert worlds is not None
        words = [str(TESTS / source), "--collect-only", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words],
            capture_output=True, text=True, check=True, timeout=60, cwd=TESTS.parent,
        )  # fmt: skip
        found = set(re.findall(r"\[(\d+x\d+)", done.stdout))
        assert found == set(worlds[1].split())


RECORD = SCRIPT.with_name("gpu_record.sh")


def test_every_part_that_records_is_known_and_names_files_and_modules_that_exist() -> None:
    text = RECORD.read_text(encoding="utf-8")
    names = re.search(r"^ALL_PARTS='(.*?)'", text, re.MULTILINE)
    assert names is not None
    assert sorted(re.findall(r"^part_(\w+)\(\)", text, re.MULTILINE)) == sorted(names[1].split())
    head = text.split("set -uo pipefail")[0]
    assert [name for name in names[1].split() if not re.search(rf"\b{name}\b", head)] == []
    files = re.findall(r"\b((?:configs|scripts)/[\w.]+)", text)
    modules = [name.replace(".", "/") for name in re.findall(r"-m (ep_dispatcher\.[\w.]+)", text)]
    root = SCRIPT.parent.parent
    assert [name for name in files if not (root / name).is_file()] == []
    assert [name for name in modules if not (root / f"{name}.py").is_file()] == []


def test_recording_names_its_parts_and_refuses_others(tmp_path: Path) -> None:
    environment = os.environ | {"RESULTS": str(tmp_path / "results")}
    unknown = "no part is called kernel; parts: kernels"
    for words, code, told in (
        ([], 2, "Parts of"),
        (["-h"], 0, "Parts of"),
        (["kernel"], 2, unknown),
    ):
        done = subprocess.run(
            [RECORD, *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
        assert (done.returncode, told in done.stdout) == (code, True)
