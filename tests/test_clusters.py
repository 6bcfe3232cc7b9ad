"""The scripts that start a run on a cluster say what they are to say: no cluster is needed for that."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from examples.cluster import launched

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SBATCH = EXAMPLES / "slurm/train.sbatch"
TORCHRUN = EXAMPLES / "torchrun/train.sh"
PYTORCHJOB = EXAMPLES / "kubernetes/pytorchjob.yaml"


def printed(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script whose Python is `echo`."""
    return subprocess.run(
        ["bash", str(script), "--epochs=3"],
        env={"PATH": os.environ["PATH"], "PYTHON": "echo", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_torchrun_is_told_of_the_nodes():
    """The script's words are options of torchrun: nodes, processes, and where the first node is."""
    words = printed(TORCHRUN, HEAD="node-a").stdout.split()
    assert ["-m", "torch.distributed.run"] == words[:2]
    told = get_args_parser().parse_args(words[2:])
    found = [told.nnodes, told.nproc_per_node, told.rdzv_backend, told.rdzv_endpoint]
    assert ["2", "4", "c10d", "node-a:29400"] == found
    assert ("examples.cluster", ["--epochs=3"]) == (told.training_script, told.training_script_args)
    assert "HEAD: the host name of the first node" in printed(TORCHRUN).stderr


def test_sbatch_starts_one_process_per_gpu(tmp_path):
    """SLURM is asked for two nodes of four tasks and GPUs, and srun is told of the cores, which it does not inherit."""
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", SBATCH.read_text(), re.MULTILINE))
    asked = {"nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "4", "signal": "SIGUSR1@90", "requeue": ""}
    assert asked.items() <= options.items()
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\necho "$@"\n')
    srun.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    started = printed(SBATCH, PATH=path, SLURM_CPUS_PER_TASK=options["cpus-per-task"]).stdout
    assert "--cpus-per-task=8 --kill-on-bad-exit=1 echo -m examples.cluster --epochs=3\n" == started


def test_pytorchjob_starts_one_process_per_gpu():
    """Kubeflow's whole schema of the training operator 1.7 to 1.9 accepts the file (2026-11-22)."""
    job: Any = yaml.safe_load(PYTORCHJOB.read_text())
    assert ("kubeflow.org/v1", "PyTorchJob") == (job["apiVersion"], job["kind"])
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert "pytorch" == container["name"]
    assert job["spec"]["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"]) == "4"
    assert worker["replicas"] == job["spec"]["elasticPolicy"]["maxReplicas"] == 2
    assert "examples.cluster" == get_args_parser().parse_args(container["command"][1:]).training_script
    volumes = {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}


SLURM = {"SLURM_NNODES": "3", "SLURM_NTASKS_PER_NODE": "1"}
TORCHRUN_SAYS = {"GROUP_WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "layout"),
    [(SLURM, (3, 1)), (TORCHRUN_SAYS, (3, 2)), ({**SLURM, **TORCHRUN_SAYS}, (3, 2)), ({}, (1, 1))],
)
def test_the_launcher_tells_nodes_and_processes(monkeypatch, environment, layout):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert layout == launched()
