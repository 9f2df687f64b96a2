"""Variables that say where a rank stands: srun's become torchrun's, and none may be missing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from ep_dispatcher.errors import ConfigError, UnavailableError

_MOST_PORTS = 65535
_MOST_RANKS = 2**31 - 1


def adopt_slurm(example: str) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT if srun started this process as a rank.

    Args:
        example: a script that shows how the variables are exported.

    Raises:
        ConfigError: MASTER_ADDR or SLURM_LOCALID is missing, or SLURM_NTASKS is no number of ranks.
    """
    if "RANK" in os.environ or "SLURM_NTASKS" not in os.environ:
        return
    if _whole("SLURM_NTASKS", 1, _MOST_RANKS, f"start the ranks with srun (see {example})") == 1:
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


def check_place(example: str) -> tuple[int, int]:
    """Refuse a rank that was not told its number, that of all ranks, or where they meet.

    A number out of range would leave the ranks waiting for one that never comes.

    Args:
        example: a script that starts ranks.

    Returns:
        RANK and WORLD_SIZE.

    Raises:
        ConfigError: names what is missing or cannot be, and the range.
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
    size = _whole("WORLD_SIZE", 1, _MOST_RANKS, start)
    rank = _whole("RANK", 0, size - 1, start, "WORLD_SIZE - 1")
    if "LOCAL_RANK" in os.environ:
        _whole("LOCAL_RANK", 0, size - 1, start, "WORLD_SIZE - 1")
    _whole("MASTER_PORT", 1, _MOST_PORTS, "export a free port of MASTER_ADDR, e.g. 29500")
    _check_interfaces()
    return rank, size


@contextmanager
def meeting(timeout: timedelta) -> Iterator[None]:
    """Around what waits for the other ranks to come: its errors say what to check.

    Args:
        timeout: how long that waits, for the message.

    Raises:
        UnavailableError: in place of torch's RuntimeError; names where the ranks were to meet.
    """
    try:
        yield
    except RuntimeError as error:
        place = {
            name: os.environ.get(name, "not set")
            for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
        }
        told = ", ".join(f"{name} is {value}" for name, value in place.items())
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UnavailableError(
            f"the ranks did not meet within {timeout.total_seconds():.0f} s: {told}. Check that "
            "all WORLD_SIZE ranks were started, each with its own RANK; that MASTER_ADDR is the "
            "host of rank 0 and every node reaches it; that nothing else holds MASTER_PORT and no "
            "firewall closes it; and that GLOO_SOCKET_IFNAME, if set, is an interface that joins "
            f"the nodes (`ip -brief address` lists them). torch said: {lines[0]}"
        ) from error


def _whole(name: str, least: int, most: int, remedy: str, why_most: str = "") -> int:
    """The variable as a number.

    Args:
        name: of a variable that is set.
        least: the smallest number allowed.
        most: the largest.
        remedy: what to do.
        why_most: where the upper end comes from.

    Raises:
        ConfigError: names the variable, its value, the range and the remedy.
    """
    text = os.environ[name]
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        end = f"{most} ({why_most})" if why_most else f"{most}"
        raise ConfigError(
            f"{name} is {text!r}; it must be a whole number from {least} to {end}; {remedy}"
        )
    return value


def _check_interfaces() -> None:
    """Refuse a GLOO_SOCKET_IFNAME that names an interface which this host has not.

    Raises:
        ConfigError: names it and those that there are.
    """
    text = os.environ.get("GLOO_SOCKET_IFNAME", "")
    present = [name for _, name in socket.if_nameindex()]
    for name in text.split(","):
        # torch passes over a text of one letter; `eth0:1` is a second address of eth0.
        if len(text) > 1 and name and name.partition(":")[0] not in present:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME is {text!r}; it must name interfaces of this host "
                f"({', '.join(present)}), with commas between; export the one that joins the "
                "nodes, or unset it"
            )
