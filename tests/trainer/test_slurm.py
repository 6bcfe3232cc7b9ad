"""On a real SLURM of two nodes on this machine: job steps, and `train.sbatch` signalled and queued again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm import OBSTACLE, Slurm, slurm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STEPS = 40
LIMIT = 300  # seconds that a job may take
LAYOUT = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.timeout(2.5 * LIMIT),
    pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE)),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def queue(cluster: Slurm, output: Path, *command: str) -> subprocess.Popen[str]:
    """Queue a job of two tasks on each of the two nodes, and return what waits for its end."""
    job = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        ["sbatch", "--wait", f"--output={output}", *LAYOUT, *command],
        env={**cluster.environment, **job, "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}"},
        cwd=ROOT,
        text=True,
    )


def test_job_steps_of_two_nodes(cluster, tmp_path):
    """Two steps train on two nodes with two tasks each: each rank is told its node, and a rule of nodes counts them."""
    rules = {"weighted_mean": (14 + 3 * 16) / 6, "mean_of_node_means": ((14 / 3 + 16) / 2 + 16) / 2}
    steps = [f"srun {sys.executable} {ROOT}/tests/selected.py {tmp_path}/{rule} 2 2 {rule}" for rule in rules]
    output = tmp_path / "steps.out"
    with queue(cluster, output, f"--wrap={' && '.join(steps)}") as job:
        assert 0 == job.wait(LIMIT), output.read_text()
    for rule, gradient in rules.items():
        seen = [json.loads(path.read_text()) for path in sorted((tmp_path / rule).glob("rank*.json"))]
        assert [(0, 4, 0), (1, 4, 0), (2, 4, 1), (3, 4, 1)] == [
            (one["rank"], one["world_size"], one["node_rank"]) for one in seen
        ]
        assert [pytest.approx(gradient, rel=1e-12)] * 4 == [one["gradient"] for one in seen]
    assert 2 == output.read_text().count("4 ranks on 2 nodes")


def test_uneven_agents_of_torchrun(cluster, tmp_path):
    """With an agent of torchrun as each node's task, nodes have different numbers of ranks, as the example is told."""
    script = ROOT / "examples/torchrun/train.sh"
    example = f"--accelerator=cpu --epochs=1 --num-train=64 --folder={tmp_path}/run"
    found = "HEAD=127.0.0.1 PET_LOCAL_ADDR=127.0.0.1 PROCESSES=$((SLURM_NODEID + 1))"
    output = tmp_path / "agents.out"
    task = f"srun bash -c '{found} exec bash {script} {example}'"
    with queue(cluster, output, "--ntasks-per-node=1", f"--wrap={task}") as job:
        assert 0 == job.wait(LIMIT), output.read_text()
    assert 1 == output.read_text().count("3 ranks on 2 nodes")


def train(cluster: Slurm, folder: Path) -> subprocess.Popen[str]:
    """Queue the example on CPUs instead of GPUs."""
    script = ["--gpus-per-node=0", str(ROOT / "examples/slurm/train.sbatch"), "--accelerator=cpu", f"--folder={folder}"]
    return queue(cluster, Path(f"{folder}.out"), *script, "--epochs=2", f"--num-train={STEPS // 2 * 32}")


def fingerprints(output: str) -> dict[int, str]:
    """Return those that the example logs, by step; of a step that was taken again the later one."""
    return {int(step): found for step, found in re.findall(r"after step (\d+), fingerprint (\w+)", output)}


def test_a_signalled_job_is_queued_again_and_goes_on(cluster, tmp_path):
    """Signalled as before its time is up, the job saves on all ranks, is queued again, and ends as one undisturbed."""
    with train(cluster, tmp_path / "undisturbed") as job:
        assert 0 == job.wait(LIMIT), (tmp_path / "undisturbed.out").read_text()
    folder = tmp_path / "signalled"
    with train(cluster, folder) as job:
        with subprocess.Popen(
            ["tail", "--follow=name", "--retry", "--lines=+1", f"{folder}.out"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as tail:
            assert tail.stdout is not None
            for line in tail.stdout:
                if "after step 3" in line:
                    break
            tail.terminate()
        cluster.run("scancel", "--signal=USR1", "--name=gradavg")
        assert 0 == job.wait(LIMIT), Path(f"{folder}.out").read_text()
    output = Path(f"{folder}.out").read_text()
    assert "Requeued SLURM job" in output
    assert "Restored all states from the checkpoint" in output
    assert 2 == output.count("4 ranks on 2 nodes")
    undisturbed, signalled = (fingerprints(text) for text in (Path(tmp_path, "undisturbed.out").read_text(), output))
    assert list(range(1, STEPS + 1)) == sorted(undisturbed)
    assert undisturbed == signalled
