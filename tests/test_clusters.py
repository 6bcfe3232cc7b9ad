"""The script that starts a run with torchrun runs on two nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from benchmarks.nodes import network, obstacle

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ROOT / "examples/torchrun/train.sh"


EXAMPLE = ["--accelerator=cpu", "--epochs=1", f"--num-train={3 * 32}"]
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def weights(folder: Path) -> torch.Tensor:
    """Return the weights of the last checkpoint, in one vector, after asserting that it is that of the last step."""
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    assert 3 == saved["global_step"]
    return torch.cat([tensor.flatten().double() for tensor in saved["state_dict"].values()])


KNOCK = """
import socket, sys, time
started = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 1))
except ConnectionRefusedError:
    print(time.monotonic() - started)
"""


@pytest.mark.full
def test_delayed_nodes_answer_after_twice_the_delay():
    reason = obstacle("ip", "tc", "cc")
    if reason is not None:
        pytest.skip(reason)
    with network(2, None, delay=20) as made:
        command = ["ip", "netns", "exec", made.namespaces[0], sys.executable, "-c", KNOCK, made.addresses[1]]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert float(printed) >= 0.04


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_agents_in_two_namespaces(tmp_path):
    """Agents in network namespaces of their own find each other by address; their four ranks train as one process."""
    reason = obstacle("ip")
    if reason is not None:
        pytest.skip(reason)
    command = ["bash", str(TORCHRUN), *EXAMPLE, f"--folder={tmp_path}/nodes"]
    with network(2, None) as made, ExitStack() as stack:
        agents = []
        for node, (name, address) in enumerate(zip(made.namespaces, made.addresses, strict=True)):
            # The host name of this machine leads into neither namespace.
            told = {"HEAD": made.addresses[0], "PET_LOCAL_ADDR": address, "GLOO_SOCKET_IFNAME": made.interface}
            head = {"PET_RDZV_CONF": "is_host=true"} if node == 0 else {}
            agent = subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                env={**ENVIRONMENT, **told, **head, "PROCESSES": "2"},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            agents.append(stack.enter_context(agent))
            stack.callback(agent.terminate)
        printed = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [0, 0] == [agent.returncode for agent in agents], printed
    ranks = [set(re.findall(r"GLOBAL_RANK: (\d+), MEMBER: \d/4", each)) for each in printed]
    assert sorted(map(sorted, ranks)) == [["0", "1"], ["2", "3"]]
    assert 1 == "".join(printed).count("4 ranks on 2 nodes")

    one = tmp_path / "one"
    subprocess.run(
        [sys.executable, "-m", "examples.cluster", *EXAMPLE, f"--folder={one}"], env=ENVIRONMENT, cwd=ROOT, check=True
    )
    expected = weights(one)
    assert (weights(tmp_path / "nodes") - expected).norm() <= 1e-6 * expected.norm()
