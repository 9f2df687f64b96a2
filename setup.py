"""Builds the native module where nvcc and NCCL's headers are found; pure Python elsewhere.

EP_CUDA_ARCHS=90 (or 100) compiles for those GPUs alone, in half the time; the default is both.
EP_GIN_PROXY_ONLY=1 leaves out all kinds of GIN but the proxy: for tests, where it is the only one.
EP_FAST_COMPILE=1 optimizes little what includes NCCL, to see whether it compiles with some version.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

OLDEST_NCCL = (2, 30, 7)
# Of csrc; the rest is for tests. Those that take longest come first: else one core ends alone.
FOLDERS = ("transport", "kernels", "bindings", "core", "api")
# Their objects serve all versions of NCCL, as its headers are not on their path.
NEED_NO_NCCL = ("csrc/api/", "csrc/kernels/", "csrc/bindings/kernels.cpp", "csrc/bindings/rail.cpp")
FLAGS = ("-std=c++17", "-O3", "-lineinfo", "-cudart=static", "-Icsrc")
HOST_FLAGS = "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Werror"
ARCHITECTURES = {
    "90": "arch=compute_90,code=sm_90",
    "100": "arch=compute_100,code=[sm_100,compute_100]",
}
# Kinds of GIN of which NCCL's device headers compile nothing then; EFA's came after 2.30.7.
NOT_PROXY = ("GDAKI", "GPI", "EFA_GDA")
# Hidden symbols: else the copy of the CUDA runtime that torch loaded would answer our calls.
LINK_FLAGS = ("-shared", "-Xlinker=--exclude-libs,ALL", "-lrt", "-ldl", "-lpthread")


def find_nvcc() -> str | None:
    """Path of nvcc, or None."""
    home = os.environ.get("CUDA_HOME", "")
    return shutil.which(f"{home}/bin/nvcc") or shutil.which("nvcc")


def find_nccl() -> tuple[Path, tuple[int, ...]]:
    """Folder of nccl.h and its version, which is () where there is none."""
    wheel = sysconfig.get_path("platlib") + "/nvidia/nccl"
    for home in (os.environ.get("NCCL_HOME", wheel), wheel):
        header = Path(home, "include/nccl.h")
        if header.is_file():
            parts = re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)", header.read_text())
            return header.parent, tuple(map(int, parts))
    return Path(), ()


def architectures() -> list[str]:
    """Those that are asked for, by their numbers; all of them by default."""
    asked = os.environ.get("EP_CUDA_ARCHS", "").replace(",", " ").split() or [*ARCHITECTURES]
    unknown = sorted(set(asked) - set(ARCHITECTURES))
    if unknown:
        raise SystemExit(
            f"EP_CUDA_ARCHS has {', '.join(unknown)}; it takes {' and '.join(ARCHITECTURES)}"
        )
    return [number for number in ARCHITECTURES if number in asked]


def gin_flags() -> list[str]:
    """For nvcc: which kinds of GIN the kernels can post to; all of them without any flag."""
    if os.environ.get("EP_GIN_PROXY_ONLY", "0") in ("", "0"):
        return []
    return [f"-DNCCL_GIN_{kind}_ENABLE=0" for kind in NOT_PROXY]


def fast_flags() -> list[str]:
    """For an nvcc that knows it: hardly any optimization of kernels; all of it without any flag."""
    return [] if os.environ.get("EP_FAST_COMPILE", "0") in ("", "0") else ["--Ofast-compile=max"]


class BuildNative(build_ext):
    """Compiles and links with nvcc; an object newer than every file of csrc is kept."""

    def build_extension(self, ext: Extension) -> None:
        """Build one shared object, one compiler for each core."""
        import pybind11

        nccl, version = find_nccl()
        folders = (pybind11.get_include(), sysconfig.get_path("include"))
        nvcc = [find_nvcc() or "nvcc", *FLAGS, HOST_FLAGS]
        nvcc += [f"-isystem={folder}" for folder in folders]
        asked = architectures()
        nvcc += [f"-gencode={ARCHITECTURES[number]}" for number in asked]
        nvcc += [f"--threads={len(asked)}"]  # side by side, as one file takes longest by far
        kept = Path("build", "-".join([str(sysconfig.get_config_var("SOABI")), *asked]))
        gin, fast = gin_flags(), fast_flags()
        marks = ("-proxy" if gin else "") + ("-fast" if fast else "")
        with_nccl = (
            [*nvcc, *gin, *fast, f"-isystem={nccl}"],
            kept / ("nccl-{}.{}.{}".format(*version) + marks),
        )
        target = self.get_ext_fullpath(ext.name)
        self.mkpath(os.path.dirname(target))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            built = [
                *pool.map(
                    lambda source: self.compile_one(
                        *((nvcc, kept) if source.startswith(NEED_NO_NCCL) else with_nccl), source
                    ),
                    ext.sources,
                )
            ]
        self.spawn([*nvcc, "-o", target, *built, *LINK_FLAGS])

    def compile_one(self, nvcc: list[str], objects: Path, source: str) -> str:
        """Compile one file unless its object is up to date."""
        made = objects / (source + ".o")
        self.mkpath(str(made.parent))
        newest = max(path.stat().st_mtime for path in [Path("setup.py"), *Path("csrc").rglob("*")])
        if not made.exists() or made.stat().st_mtime < newest:
            subprocess.run([*nvcc, "-c", "-o", str(made), source], check=True)
        return str(made)


sources = [
    str(path) for folder in FOLDERS for path in sorted(Path("csrc", folder).glob("*.c[pu]*"))
]
sources = [path for path in sources if path.endswith((".cpp", ".cu"))]
native = find_nvcc() is not None and find_nccl()[1] >= OLDEST_NCCL
if not native:
    print("ep_dispatcher is built without its native module: that needs nvcc and NCCL's headers.")  # noqa: T201
modules = [Extension("ep_dispatcher._C", sources)] if native else []
setup(ext_modules=modules, cmdclass={"build_ext": BuildNative})
