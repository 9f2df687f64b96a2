"""What NCCL answers is looked at, as far as this can be seen without a GPU.

tests/test_device.py goes on with windows, which need one.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from nccl_shim import INTERNAL_ERROR, nccl_that_lies

from ep_dispatcher import native

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ep_dispatcher._C") is None,
    reason="the native module is not built here (it needs nvcc and the NCCL wheel)",
)


def test_a_stand_in_answers_like_nccl_but_for_one_function(tmp_path: Path) -> None:
    library = nccl_that_lies(tmp_path, "ncclCommWindowRegister", INTERNAL_ERROR)
    stand_in = native.load().NcclLibrary(str(library))
    assert stand_in.version == native.open_nccl().version
    assert len(native.load().make_communicator_id(stand_in)) == 128


@pytest.mark.parametrize("function", ["ncclGetUniqueId", "ncclCommInitRankConfig"])
def test_an_error_of_nccl_says_which_call_where_and_why(tmp_path: Path, function: str) -> None:
    library = native.load().NcclLibrary(str(nccl_that_lies(tmp_path, function, INTERNAL_ERROR)))
    failure = rf"{function}\(.*\) failed at csrc/core/communicator\.cpp:\d+: internal error"
    with pytest.raises(RuntimeError, match=failure):
        native.load().Communicator(library, native.load().make_communicator_id(library), 0, 1)
