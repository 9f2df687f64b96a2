"""An NCCL of which one function lies, to see that its answer is looked at."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ep_dispatcher import UnavailableError, native

# Bodies of functions that do nothing, with arguments as integers. ncclInternalError is 3.
INTERNAL_ERROR = "return 3;"
NULL_WINDOW = "*(void**)d = 0; return 0;"  # of ncclCommWindowRegister: success, and no window


def nccl_that_lies(folder: Path, function: str, body: str) -> Path:
    """Make a library that has one function of its own, and all others from the NCCL of a group.

    It names that NCCL by its path: by its soname, the loader would take an older copy that torch
    has brought into the process.

    Args:
        folder: where it is made.
        function: of NCCL, with at most five arguments that are integers or pointers where `body`
            reads them.
        body: in C, over the arguments a to e.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make a stand-in for NCCL with")
    try:
        nccl = Path(native.open_nccl().path).resolve()
    except UnavailableError as error:
        pytest.skip(str(error))
    empty, source = folder / "empty.c", folder / "lies.c"
    empty.write_text("typedef int nothing;\n")
    source.write_text(f"int {function}(long a, long b, long c, long d, long e) {{ {body} }}\n")
    stub, library = folder / "libstub.so", folder / "liblies.so"
    command = [compiler, "-shared", "-fPIC", "-w"]
    subprocess.run([*command, f"-Wl,-soname,{nccl}", "-o", str(stub), str(empty)], check=True)
    needed = ["-Wl,--no-as-needed", str(stub)]  # of it, only its name is kept
    subprocess.run([*command, "-o", str(library), str(source), *needed], check=True)
    return library
