"""The files that start a job on several nodes: here each node is one rank on this machine.

SLURM's own commands are stand-ins that start what they are given as SLURM does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import yaml

from ep_dispatcher import cli
from ep_dispatcher.train import runtime

pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[1]
NODES = 2
STEPS = 2
CONNECTIONS, LOADING = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "scripts").is_dir(), reason="scripts are not beside the tests"),
]

SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith("--kill")]
ranks = []
for rank in map(str, range({NODES})):
    slurm = {{"PROCID": rank, "LOCALID": "0", "NODEID": rank, "NTASKS": "{NODES}", "STEP_ID": "0"}}
    values = {{f"SLURM_{{name}}": value for name, value in slurm.items()}}
    ranks.append(subprocess.Popen(words, env=os.environ | values))
sys.exit(max(rank.wait() for rank in ranks))
"""
SRUN_CORES = "#!/bin/sh\necho $SRUN_CPUS_PER_TASK cores for $*\n"  # starts nothing
SCONTROL = "#!/bin/sh\nprintf '127.0.0.1\\nsecond-node\\n'\n"


def write_config(folder: Path) -> Path:
    """A training of two nodes, one rank each; returns its file."""
    config = {
        "model": {
            "num_layers": 1, "hidden": 32, "num_attention_heads": 2, "expert_ffn_hidden": 32,
            "num_experts": 4, "num_topk": 2, "seq_length": 32, "dtype": "float32",
        },
        "parallel": {"num_nodes": NODES, "ranks_per_node": 1, "expert": NODES},
        "train": {"steps": STEPS, "micro_batch": 1, "out_dir": str(folder / "run")},
        "ep_dispatcher": {"tier": "reference"},
    }  # fmt: skip
    path = folder / "two_nodes.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def environment(**changes: str) -> dict[str, str]:
    """Variables of a job whose nodes meet on this machine."""
    beside = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{beside}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MASTER_PORT": free_port(),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **changes,
    }


def slurm(
    folder: Path, script: str, *words: str, srun: str = SRUN, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run a batch file as sbatch would on the first node."""
    commands, venv = folder / "commands", folder / "venv" / "bin"
    for place in (commands, venv):
        place.mkdir(parents=True)
    for name, text in (("srun", srun), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (venv / "activate").write_text("")
    given = environment(VENV=str(venv.parent), SLURM_JOB_NODELIST="node[0-1]", **changes)
    given["PATH"] = f"{commands}:{given['PATH']}"
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / script), *words],
        env=given, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_torchrun_starts_a_rank_on_each_node(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    shared = environment(NNODES=str(NODES), RANKS_PER_NODE="1", MASTER_ADDR="127.0.0.1")
    nodes = [
        subprocess.Popen(
            [str(ROOT / "scripts" / "train_torchrun.sh"), str(config)],
            env=shared | {"NODE_RANK": str(node)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(NODES)
    ]
    told = [node.communicate(timeout=100)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0] * NODES, told
    assert f"group of {NODES} ranks" in told[0]
    assert f"done: step {STEPS}" in told[0]


@pytest.mark.parametrize("lacks", ["NODE_RANK", "MASTER_ADDR"])
def test_torchrun_over_several_nodes_asks_where_they_meet(lacks: str) -> None:
    """It would wait for other nodes on this one otherwise."""
    given = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    del given[lacks]
    done = subprocess.run(
        [str(ROOT / "scripts" / "train_torchrun.sh"), "any.yaml"],
        env={"PATH": os.environ["PATH"], "NNODES": "2", **given},
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"{lacks}: is not set" in done.stderr


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"NNODES": "0"}, "NNODES is '0'; it must be a whole number from 1 to"),
        ({"NNODES": "abc"}, "NNODES is 'abc'; it must be a whole number from 1 to"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK is '2'; it must be a whole number from 0"),
        ({"NODE_RANK": "-1"}, "NODE_RANK is '-1'; it must be a whole number from 0 to 0"),
        ({"RANKS_PER_NODE": "0"}, "RANKS_PER_NODE is '0'; it must be a whole number from 1 to"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'; it must be a whole number from 1 to"),
    ],
)
def test_torchrun_is_not_started_with_a_number_that_cannot_be(
    given: dict[str, str], told: str, tmp_path: Path
) -> None:
    """It would wait for nodes that never come, or say nothing of the variable."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/bin/sh\necho started\n")
    torchrun.chmod(0o755)
    place = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [str(ROOT / "scripts" / "train_torchrun.sh"), "any.yaml"],
        env=place | given, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (cli.USER_ERROR, "")
    assert told in done.stderr


@pytest.mark.parametrize("script", ["train.sbatch", "doctor_nodes.sbatch"])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "SLURM_JOB_NODELIST: is not set: submit this file with sbatch"),
        (
            {"SLURM_JOB_NODELIST": "node[0-1]", "VENV": "nowhere"},
            "VENV is 'nowhere', which has no bin/activate: export VENV",
        ),
    ],
)
def test_a_batch_file_run_by_hand_says_what_it_needs(
    script: str, given: dict[str, str], told: str
) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / script)],
        env={"PATH": os.environ["PATH"], **given},
        cwd=ROOT, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_several_nodes_may_cross_adapters_if_the_user_says_so() -> None:
    """As the file's comment says: 0 by default, and what is exported stays."""
    words = ["bash", "-c", "source scripts/nccl_env.sh; echo $NCCL_CROSS_NIC"]
    for given, seen in (({}, "0"), ({"NCCL_CROSS_NIC": "2"}, "2")):
        told = subprocess.check_output(words, env={"PATH": os.environ["PATH"], **given}, cwd=ROOT)
        assert told.decode() == f"{seen}\n"


def test_slurm_starts_a_rank_for_each_task(tmp_path: Path) -> None:
    done = slurm(tmp_path, "train.sbatch", str(write_config(tmp_path)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"group of {NODES} ranks" in done.stdout + done.stderr
    assert f"done: step {STEPS}" in done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_slurm_tells_why_doctor_cannot_look(tmp_path: Path) -> None:
    """On every rank, and none is left waiting."""
    done = slurm(tmp_path, "doctor_nodes.sbatch")
    assert done.returncode == cli.USER_ERROR
    assert done.stderr.count("error: on rank 0: ") == NODES
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", ["train.sbatch", "doctor_nodes.sbatch"])
@pytest.mark.parametrize(
    ("given", "cores"),
    [
        ({"SLURM_CPUS_PER_TASK": "12"}, "12"),
        ({"SLURM_CPUS_PER_TASK": "12", "SRUN_CPUS_PER_TASK": "6"}, "6"),
        ({}, "1"),
    ],
)
def test_ranks_get_the_cores_that_the_job_asked_for(
    script: str,
    given: dict[str, str],
    cores: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As srun does not ask sbatch for them; what the user exported stays."""
    for command in ("SLURM", "SRUN"):
        monkeypatch.delenv(f"{command}_CPUS_PER_TASK", raising=False)
    done = slurm(tmp_path, script, srun=SRUN_CORES, **given)
    assert done.returncode == 0, done.stderr
    assert f"{cores} cores for --kill-on-bad-exit=1 python -m ep_dispatcher" in done.stdout


class _OpenedError(Exception):
    """A rank came to where CUDA starts."""


@pytest.mark.parametrize("command", ["train", "profile"])
@pytest.mark.parametrize(
    ("overrides", "given", "connections", "loading"),
    [
        ([], {}, "32", "EAGER"),
        ([], {CONNECTIONS: "8", LOADING: "LAZY"}, "8", "LAZY"),
        (["parallel.tensor=2"], {}, None, "EAGER"),
        (["parallel.ranks_share_gpu=true"], {}, None, "EAGER"),
        (["train.device=cpu"], {}, None, None),
    ],
)
def test_a_rank_tells_cuda_what_it_needs_before_cuda_starts(
    command: str,
    overrides: list[str],
    given: dict[str, str],
    connections: str | None,
    loading: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However it was started. With tensor parallelism Megatron relies on one connection."""
    for name in (CONNECTIONS, LOADING):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # set first, so that it is put back at the end
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (ranks | given).items():
        monkeypatch.setenv(name, value)
    seen: list[str | None] = []

    def choose_device(_config: object) -> None:
        seen.extend(os.environ.get(name) for name in (CONNECTIONS, LOADING))
        raise _OpenedError

    monkeypatch.setattr(runtime, "_choose_device", choose_device)
    words = [word for override in overrides for word in ("--set", override)]
    cli.main([command, "--config", str(write_config(tmp_path)), *words])
    assert seen == [connections, loading]


def test_a_rank_that_is_told_half_of_its_place_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["train", "--config", str(write_config(tmp_path))]) == 2
    assert "WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"RANK": "5"}, "RANK is '5'; it must be a whole number from 0 to 1 (WORLD_SIZE - 1)"),
        ({"RANK": "x"}, "RANK is 'x'; it must be a whole number from 0 to 1"),
        ({}, "the ranks did not meet within 1 s"),
    ],
)
def test_a_rank_whose_place_cannot_be_or_is_alone_does_not_wait(
    changes: dict[str, str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in (ranks | {"GLOO_SOCKET_IFNAME": "lo"} | changes).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(runtime, "_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(runtime, "_choose_device", lambda _: torch.device("cpu"))
    assert cli.main(["train", "--config", str(write_config(tmp_path))]) == cli.USER_ERROR
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_start_files_leave_the_connections_to_the_ranks(nodes: str, tmp_path: Path) -> None:
    """They do not know whether the config has tensor parallelism."""
    told = f"{CONNECTIONS}=${{{CONNECTIONS}-not set}}"
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f'#!/bin/sh\necho "{told}"\n')
    torchrun.chmod(0o755)
    values = {"NNODES": nodes, "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for given, seen in (({}, "not set"), ({CONNECTIONS: "8"}, "8")):
        done = subprocess.run(
            [str(ROOT / "scripts" / "train_torchrun.sh"), "any.yaml"],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **values, **given},
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{CONNECTIONS}={seen}\n"
