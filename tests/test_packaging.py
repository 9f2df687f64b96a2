"""What a user gets from `pip install`, and what a reader gets from the documents."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import ep_dispatcher

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


def tracked_files(*patterns: str) -> list[Path]:
    """Files of the checkout, committed or about to be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(line) for line in listed.splitlines() if (ROOT / line).is_file()]


def project() -> dict[str, Any]:
    """The [project] table."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that a machine without nvcc builds, from a copy of the checkout."""
    copy = tmp_path_factory.mktemp("checkout")
    for file in tracked_files():
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, copy / file)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "NCCL_HOME")
    }
    environment["PATH"] = "/usr/bin:/bin"
    options = ["--no-deps", "--no-build-isolation", "--quiet", "-w", "wheels", "."]
    command = [sys.executable, "-m", "pip", "wheel", *options]
    subprocess.run(command, cwd=copy, env=environment, check=True)
    return next((copy / "wheels").glob("*.whl"))


@pytest.mark.skipif(Path("/usr/bin/nvcc").exists(), reason="nvcc cannot be hidden here")
def test_without_nvcc_the_wheel_is_pure_python(pure_wheel: Path) -> None:
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(pure_wheel).namelist()
    assert not [name for name in names if name.endswith((".so", ".cu"))]
    assert {"ep_dispatcher/py.typed", "ep_dispatcher/_C.pyi"} <= set(names)


def test_the_wheel_holds_every_module(pure_wheel: Path) -> None:
    modules = {str(path) for path in tracked_files("ep_dispatcher/*.py")}
    assert modules <= set(zipfile.ZipFile(pure_wheel).namelist())


def test_the_installed_version_is_the_one_stated() -> None:
    try:
        installed = metadata.version("ep_dispatcher")
    except metadata.PackageNotFoundError:
        pytest.skip("not installed here: runs from the checkout")
    assert installed == ep_dispatcher.__version__


def test_extras_are_those_the_documents_name() -> None:
    extras = project()["optional-dependencies"]
    assert set(extras) == {"cu12", "cu13", "megatron", "bench", "dev"}
    assert project()["scripts"] == {"ep-dispatcher": "ep_dispatcher.cli:main"}


def test_importing_the_package_imports_neither_megatron_nor_the_native_module() -> None:
    program = (
        "import sys, ep_dispatcher\n"
        "heavy = [n for n in sys.modules if n.split('.')[0] in ('megatron', 'matplotlib')]\n"
        "assert not heavy, heavy\n"
        "assert 'ep_dispatcher._C' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_relative_links_in_documents_lead_somewhere() -> None:
    broken = [
        f"{document}: {target}"
        for document in tracked_files("*.md")
        for target in LINK.findall((ROOT / document).read_text())
        if not (ROOT / document.parent / target).exists()
    ]
    assert not broken


def test_scripts_are_executable() -> None:
    assert not [
        str(path)
        for path in tracked_files("scripts/*.sh", ".ci/run")
        if not os.access(ROOT / path, os.X_OK)
    ]
