"""Markers become skips with the reason; an old native module is told of; Hypothesis; the plugin."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from forked_ranks import ForkedRanks
from hypothesis import HealthCheck, settings

from ep_dispatcher import native

_SLOW_WORLDS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("dev", max_examples=30, deadline=None, suppress_health_check=_SLOW_WORLDS)
settings.register_profile(
    "ci",
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=_SLOW_WORLDS,
)
settings.load_profile("dev")

_STALE = native.stale_reason()

# Files that take over 30 s. They start first, so that no worker ends with one of them alone.
_LONG_FILES = (
    "test_megatron_parity.py",
    "test_bench_hosts.py",
    "test_train_run.py",
    "test_bench_run.py",
    "test_megatron_dispatcher.py",
    "test_launch_files.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of long files first, else leave the order."""

    def place(item: pytest.Item) -> int:
        name = item.path.name
        return _LONG_FILES.index(name) if name in _LONG_FILES else len(_LONG_FILES)

    items.sort(key=place)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, with the reason."""
    gpu = item.get_closest_marker("gpu")
    if gpu is not None:
        needed = gpu.args[0] if gpu.args else 1
        found = torch.cuda.device_count()
        if found < needed:
            pytest.skip(f"needs {needed} GPU(s); torch sees {found} here")
    if item.get_closest_marker("multinode") is not None and "SLURM_JOB_ID" not in os.environ:
        pytest.skip("needs several hosts joined by RDMA; runs inside a SLURM job only")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell with each failure that the native module is not what the sources say, if so.

    It ends no run: file times also change where a checkout goes to another commit and back.
    """
    report = yield
    if _STALE is not None and report.failed:
        report.sections.append(("what may be the cause", _STALE))
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    """Tell it once more behind the list of failures, where it is read."""
    yield
    if _STALE is not None:
        terminalreporter.write_line(f"WARNING: {_STALE}", red=True)


@pytest.fixture(scope="session")
def forked() -> Iterator[ForkedRanks]:
    """Ranks that have imported Megatron; for jobs of which only the results count."""
    ranks = ForkedRanks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the loopback plugin for GIN: the one that the environment names, or built here."""
    built = os.environ.get("LOOPBACK_RMA_PLUGIN")
    if built is not None:
        return built
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build the loopback plugin with")
    path = tmp_path_factory.mktemp("plugin") / "libloopback_rma.so"
    subprocess.run([Path(__file__).parents[1] / "scripts/build_loopback_rma.sh", path], check=True)
    return str(path)
