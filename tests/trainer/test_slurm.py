"""`examples/slurm/train.sbatch` on a real SLURM of this machine: signalled, queued again, and resumed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from slurm import OBSTACLE, Slurm, slurm

from lightning_gradavg.fingerprint import StateLog, parting_of

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE)),
]


def start(cluster: Slurm, folder: Path, tasks: int) -> subprocess.Popen[str]:
    """Queue the example with two processes on one node instead of eight on two, and return what waits for its end."""
    here = [f"--ntasks-per-node={tasks}", "--nodes=1", "--gpus-per-node=0", "--cpus-per-task=1", "--overcommit"]
    script = [str(ROOT / "examples/slurm/train.sbatch"), "--accelerator=cpu", f"--folder={folder}"]
    data = ["--epochs=2", f"--num-train={STEPS // 2 * 32}"]
    return subprocess.Popen(
        ["sbatch", "--wait", f"--output={folder}.out", *here, *script, *data],
        env={**cluster.environment, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=ROOT,
        text=True,
    )


def test_a_signalled_job_is_queued_again_and_goes_on(tmp_path):
    """Signalled as before its time is up, the job saves on all ranks, is queued again, and ends as one undisturbed."""
    with slurm(tmp_path / "slurm") as cluster:
        with start(cluster, tmp_path / "undisturbed", 2) as job:
            assert 0 == job.wait(180), (tmp_path / "undisturbed.out").read_text()
        folder = tmp_path / "signalled"
        with start(cluster, folder, 2) as job:
            with subprocess.Popen(
                ["tail", "--follow=name", "--retry", "--lines=+1", str(folder / "states.jsonl")],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            ) as tail:
                assert tail.stdout is not None
                for _ in range(3):
                    tail.stdout.readline()
                tail.terminate()
            cluster.run("scancel", "--signal=USR1", "--name=gradavg")
            assert 0 == job.wait(180), Path(f"{folder}.out").read_text()
    output = Path(f"{folder}.out").read_text()
    assert "Requeued SLURM job" in output
    assert "Restored all states from the checkpoint" in output
    assert "2 ranks on 1 node" in output
    logs = StateLog(tmp_path / "undisturbed" / "states.jsonl"), StateLog(folder / "states.jsonl")
    assert tuple(range(1, STEPS + 1)) == parting_of(*logs).compared
    assert None is parting_of(*logs).step
