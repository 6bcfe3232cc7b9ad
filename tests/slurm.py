"""A real SLURM of two nodes on this machine, with munge, for as long as a test takes: Debian's slurm-wlm and munge.

Each node is a slurmd with a name and a port of its own, and starts its tasks itself. They share the machine's network.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread

__all__ = ["OBSTACLE", "Slurm", "slurm"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
NODES = ("node0", "node1")
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))
_MISSING = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
OBSTACLE = (
    f"{', '.join(_MISSING)} not found: apt install slurm-wlm munge"
    if _MISSING
    else "slurmd starts jobs as root only"
    if os.geteuid() != 0
    else None
)
"""Why there can be no SLURM here; None where there can."""

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
NodeName=node0 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=node1 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class Slurm:
    """A cluster that runs.

    Args:
        environment: What its commands need of the environment.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def run(self, *command: str, timeout: float = 30.0) -> str:
        """Return what a command of SLURM printed."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def _daemon(environment: dict[str, str], ready: str, *command: str) -> Iterator[None]:
    """Run a daemon in the foreground, and go on when it has written that it is ready."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            seen = []
            for line in process.stdout:
                seen.append(line)
                if ready in line:
                    break
            else:
                raise AssertionError(f"{command[0]} ended: {''.join(seen)}")
            # Or it would block when the pipe is full.
            Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
            yield
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Run munged, slurmctld and a slurmd per node with all their files in `folder`.

    Nobody knows the nodes by name, so their tasks are told by `MASTER_ADDR` where rank 0 is.
    """
    (folder / "state").mkdir(parents=True)
    (folder / "spool").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=socket.gethostname(), folder=folder, ports=_free_ports(1 + len(NODES))))
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(config), "MASTER_ADDR": "127.0.0.1"}
    files = {"socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "munge.seed"}
    munged = ["munged", "--foreground", "--force", f"--key-file={key}"]
    with ExitStack() as stack:
        for ready, command in (
            ("Created socket", [*munged, *(f"--{option}={folder / name}" for option, name in files.items())]),
            ("Running as primary controller", ["slurmctld", "-D", "-vv"]),
            *(("slurmd started", ["slurmd", "-D", "-vv", "-N", name]) for name in NODES),
        ):
            stack.enter_context(_daemon(environment, ready, *command))
        yield Slurm(environment)
