"""The headers of the NCCL wheel, and why they cannot be compiled against."""

from __future__ import annotations

import ast
import re
import shutil
import sysconfig
from pathlib import Path

SETUP = Path(__file__).parents[1] / "setup.py"
NCCL = Path(sysconfig.get_path("platlib"), "nvidia/nccl/include")


def missing_for_nccl() -> str:
    """What a test that compiles against NCCL lacks; "" for nothing.

    torch for CUDA brings an NCCL of its own in place of the wheel that was installed before it.
    """
    if shutil.which("nvcc") is None or shutil.which("g++") is None:
        return "needs nvcc and g++"
    header = NCCL / "nccl.h"
    if not header.is_file() or not SETUP.is_file():
        return "needs the headers of an NCCL wheel, and setup.py beside the tests"
    oldest = re.search(r"^OLDEST_NCCL = (.*)$", SETUP.read_text(encoding="utf-8"), re.MULTILINE)
    assert oldest is not None
    text = header.read_text(encoding="utf-8")
    found = tuple(
        int(number) for number in re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)", text)
    )
    return "" if found >= ast.literal_eval(oldest[1]) else f"needs NCCL {oldest[1]}, not {found}"
