"""Variables that say where a rank stands: srun's become torchrun's, and none may be missing."""

from __future__ import annotations

import os

from ep_dispatcher.errors import ConfigError


def adopt_slurm(example: str) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT if srun started this process as a rank.

    Args:
        example: a script that shows how the variables are exported.

    Raises:
        ConfigError: MASTER_ADDR or SLURM_LOCALID is missing.
    """
    if "RANK" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) == 1:
        return
    if "SLURM_PROCID" not in os.environ or "SLURM_STEP_ID" not in os.environ:
        return  # inside an allocation, but not started by srun
    if "MASTER_ADDR" not in os.environ:
        raise ConfigError(f"MASTER_ADDR is not set; export the first node's name as in {example}")
    if "SLURM_LOCALID" not in os.environ:
        raise ConfigError("SLURM_LOCALID is not set in this step; start the ranks with srun")
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    os.environ.setdefault("MASTER_PORT", "29500")


def check_place(example: str) -> None:
    """Refuse a rank that was not told its number, that of all ranks, or where they meet.

    Args:
        example: a script that starts ranks.

    Raises:
        ConfigError: names what is missing.
    """
    start = f"start the ranks with torchrun or srun (see {example})"
    if not os.environ.get("RANK"):
        raise ConfigError(f"RANK is not set; {start}")
    names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = ", ".join(name for name in names if not os.environ.get(name))
    if missing:
        raise ConfigError(
            f"RANK is set and {missing} is not set; {start}, or unset RANK to start them here"
        )
