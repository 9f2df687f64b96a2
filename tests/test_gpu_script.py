"""Scripts for one GPU: each test that needs one is run; what a script does not know is refused.

Programs of the driver and the interpreter are stand-ins here that write down how they were called.
"""

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


def stand_in(folder: Path, name: str, does: str = "") -> Path:
    """A program that appends its name and words to `calls` beside it, and then `does` something."""
    program = folder / name
    program.write_text(f'#!/bin/bash\necho "{name} $*" >>"{folder}/calls"\n{does}\n')
    program.chmod(0o755)
    return program


def run_beside(
    folder: Path, script: str, *words: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a script, stand-ins first on its path; what it did, and calls of the stand-ins."""
    done = subprocess.run(
        [SCRIPT.with_name(script), *words],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "RESULTS": str(folder / "out")}
        | {"TMPDIR": str(folder), "PYTHON": str(folder / "python")} | environment,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    calls = folder / "calls"
    return done, calls.read_text().splitlines() if calls.is_file() else []


@pytest.mark.parametrize("script", ["gpu_tests.sh", "gpu_record.sh"])
def test_all_parts_are_known_before_the_first_runs(script: str, tmp_path: Path) -> None:
    stand_in(tmp_path, "python")
    done, calls = run_beside(tmp_path, script, "kernels", "bogus")
    assert (done.returncode, calls) == (2, [])
    assert "no part is called bogus; parts: " in done.stdout


def recorded(
    folder: Path, *parts: str, says: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run parts of the script that records, with programs that do nothing; see `run_beside`."""
    stand_in(folder, "nvidia-cuda-mps-control")
    stand_in(folder, "python", f"[[ $1 != -c ]] || exec {sys.executable} \"$@\"\necho '{says}'")
    return run_beside(folder, "gpu_record.sh", *parts, CUDA_MPS_PIPE_DIRECTORY="")


def modules_of(call: str) -> list[tuple[str, str]]:
    """Modules of ours that a command runs, the measurements of one that runs several, and words."""
    found = re.search(r"-m (ep_dispatcher\S*)(.*)", call)
    if found is None:
        return []
    if found[1].endswith(".together"):
        parts = [part.split(maxsplit=1) for part in found[2].split(" ++ ")]
        return [(f"ep_dispatcher.profile.{name}", f" {words}") for name, words in parts]
    profile = found[2].startswith(" profile ")
    return [("ep_dispatcher.profile.command" if profile else found[1], found[2])]


def test_options_of_the_parts_about_overlap_are_those_of_their_modules(tmp_path: Path) -> None:
    """Every command names options that its module has."""
    done, calls = recorded(
        tmp_path, "layer", "schedule", "parity", "together", "trace", "beside", "waits"
    )
    assert done.returncode == 0, done.stdout
    root = SCRIPT.parent.parent / "ep_dispatcher"
    common = (root / "profile" / "watch.py").read_text() + (root / "launch.py").read_text()
    seen = []
    for module, words in [each for call in calls for each in modules_of(call)]:
        source = common + (root.parent / f"{module.replace('.', '/')}.py").read_text()
        for option in re.findall(r" (--[\w-]+)", words):
            assert f'"{option}"' in source, (option, module)
        seen.append(module.rpartition(".")[2])
    twice = ["layer", "parity", "command", "picture"]
    assert sorted(seen) == sorted([*twice, *twice, "layer", "layer", "schedule", "beside", "syncs"])


@pytest.mark.parametrize(("graphed", "code"), [("[1.5, 2.0]", 0), ("[1.5, 2.5]", 1), ("[1.5]", 1)])
def test_losses_with_graphs_must_be_those_without(graphed: str, code: int, tmp_path: Path) -> None:
    says = f'{{"plain": [1.5, 2.0], "graphed": {graphed}}}'
    done, calls = recorded(tmp_path, "graphs", says=says)
    assert calls[0].endswith("tests/megatron_graph_rank.py chunks attn,moe_router,moe_preprocess")
    assert done.returncode == code, done.stdout
    assert f'"graphed": {graphed}' in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("words", [["biuld"], ["build", "--bogus"], ["kernels"]])
def test_steps_of_the_kernels_are_known_before_the_first_runs(
    words: list[str], tmp_path: Path
) -> None:
    for name in ("python", "nvcc"):
        stand_in(tmp_path, name)
    done, calls = run_beside(tmp_path, "gpu_kernels.sh", *words)
    assert (done.returncode, calls) == (2, [])
    assert done.stdout == f"no step is called {words[-1]}; steps: build example time\n"


@pytest.mark.parametrize("script", ["gpu_tests.sh", "gpu_kernels.sh", "bench_one_gpu.sh"])
def test_help_is_the_head_of_the_script(script: str, tmp_path: Path) -> None:
    done, calls = run_beside(tmp_path, script, "--help")
    assert (done.returncode, calls) == (0, [])
    head = SCRIPT.with_name(script).read_text(encoding="utf-8").split("\nset -uo pipefail")[0]
    assert done.stdout == "".join(f"{line[2:]}\n" for line in head.splitlines()[1:])


@pytest.fixture
def one_gpu(tmp_path: Path) -> Path:
    """A folder of stand-ins for what scripts/bench_one_gpu.sh calls; the build takes 3 s."""
    for name in ("nvidia-smi", "nvidia-cuda-mps-control"):
        stand_in(tmp_path, name)
    unknown = '[[ $* != *--bogus* ]] || { echo "unrecognized arguments: --bogus" >&2; exit 2; }'
    stand_in(tmp_path, "python", f"{unknown}\n[[ $* != *setup.py* ]] || sleep 3")
    return tmp_path


def test_a_build_that_takes_the_whole_budget_is_told(one_gpu: Path) -> None:
    words = ["--lines-only", "--out", str(one_gpu / "out"), "--budget", "3"]
    done, calls = run_beside(one_gpu, "bench_one_gpu.sh", *words)
    assert any("setup.py" in call for call in calls)
    assert not any("bench" in call for call in calls)
    assert done.returncode == 2
    assert re.fullmatch(
        r"bench_one_gpu.sh: --budget 3 leaves no time to measure after \d+ s and 0 for the pages; "
        r"give more, or run it again: what was built stays\n",
        done.stderr,
    )


def test_a_budget_that_pages_take_is_refused_before_the_build(one_gpu: Path) -> None:
    words = ["--out", str(one_gpu / "out"), "--budget", "20"]
    done, calls = run_beside(one_gpu, "bench_one_gpu.sh", *words)
    assert (done.returncode, [call for call in calls if call.startswith("python")]) == (2, [])
    assert "--budget 20 leaves no time to measure" in done.stderr


def test_an_option_of_the_bench_is_refused_before_the_build(one_gpu: Path) -> None:
    words = ["--out", str(one_gpu / "out"), "--lines-only", "--bogus"]
    done, calls = run_beside(one_gpu, "bench_one_gpu.sh", *words)
    assert done.returncode == 2
    assert calls == ["nvidia-smi -L", "python -m ep_dispatcher bench run --bogus --list"]
    assert done.stderr == "unrecognized arguments: --bogus\n"


def sanitized(folder: Path, tools: str) -> list[tuple[int, str]]:
    """Limit in s and command of each check of the part `sanitize`."""
    stand_in(folder, "timeout", 'exec "${@:4}"')
    stand_in(folder, "compute-sanitizer", "echo passed")
    done, calls = run_beside(folder, "gpu_tests.sh", "sanitize", TOOLS=tools)
    assert done.returncode == 0, done.stdout
    limits = [call.split(" ", 4) for call in calls if call.startswith("timeout")]
    checks = [(int(words[3]), words[4]) for words in limits]
    assert len(done.stdout.splitlines()) == len(checks)  # a row each
    return checks


MARKED = ["test_kernels", "test_combine_gather", "test_kernel_faults"]


def test_sanitizers_fit_in_one_call(tmp_path: Path) -> None:
    """Each tool is one check over all files but initcheck, which is one a file and two for one."""
    checks = sanitized(tmp_path, "memcheck initcheck")
    assert max(limit for limit, _ in checks) <= 395
    cases = [command for _, command in checks if "-m sanitize" in command]
    files = [re.findall(r"tests/(\w+)\.py", case) for case in cases if "memcheck" in case]
    assert files == [MARKED]
    cases = [case for case in cases if "initcheck" in case]
    files = [re.findall(r"tests/(\w+)\.py", case) for case in cases]
    assert sorted(files) == sorted([name] for name in ["test_kernels", *MARKED])
    chosen = sorted(case.partition(" -k ")[2] for case in cases if "/test_kernels.py" in case)
    assert chosen[0] == f"not ({chosen[1]})"  # no case is in neither


@pytest.mark.slow
def test_initcheck_has_about_half_of_the_largest_file_in_each_check() -> None:
    sizes = re.search(r"^SIZES='(.*?)'", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    assert sizes is not None
    words = [
        "tests/test_kernels.py",
        "-m",
        "sanitize",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    found = []
    for chosen in (sizes[1], f"not ({sizes[1]})"):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words, "-k", chosen],
            capture_output=True, text=True, check=True, timeout=60, cwd=TESTS.parent,
        )  # fmt: skip
        found.append(done.stdout.count("::"))
    assert min(found) > 0.4 * sum(found), found
