"""Runs the launcher without a GPU, for its test; arguments are Megatron's and ours.

Megatron refuses to start without CUDA in one module, which is answered here for it alone.
With --theirs the dispatchers are left as Megatron built them.
"""

from __future__ import annotations

import runpy
import sys
from types import FrameType

from ep_dispatcher.megatron import cpu_standins


def _asked_by_initialize() -> bool:
    """Answer torch.cuda.is_available(): yes to megatron.training.initialize, no to all others."""
    frame: FrameType | None = sys._getframe(1)
    return frame is not None and frame.f_code.co_filename.endswith("training/initialize.py")


def _devices_for_initialize() -> int:
    """Answer torch.cuda.device_count(): one GPU, else 0.19 makes no groups, and none to others."""
    frame: FrameType | None = sys._getframe(1)
    return int(frame is not None and frame.f_code.co_filename.endswith("training/initialize.py"))


def main() -> None:
    """Run ep_dispatcher.megatron.pretrain as `python -m` would."""
    assert cpu_standins.install()
    import torch

    from ep_dispatcher.megatron import gpt_job

    torch.cuda.is_available = _asked_by_initialize
    torch.cuda.device_count = _devices_for_initialize
    if "--theirs" in sys.argv:
        sys.argv.remove("--theirs")
        setattr(gpt_job, "swap_dispatchers", lambda chunks, _plugin: chunks)  # noqa: B010
    runpy.run_module("ep_dispatcher.megatron.pretrain", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
