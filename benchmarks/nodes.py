"""Run a benchmark on several emulated nodes: `python -m benchmarks.nodes --nodes 2 --rate 1gbit -- --models mlp`.

Each node is a network namespace of Linux with one virtual cable to a bridge in a namespace of its own; a token bucket
filter (`tc ... tbf`) on both ends of the cable limits its rate. The ranks of a node are started in its namespace by
`torchrun`. What follows `--` goes to `benchmarks.step`, which counts the bytes on the node's cable. Nodes share the
machine's cores and memory; the cable loses and delays nothing beyond its rate. With one node there is no cable: the
benchmark runs on a loopback interface that no other process uses.

Needs root, and `ip` and `tc` of iproute2. The namespaces are made for the run, named after the process, and removed at
its end, also on an error or an interrupt. With GPUs and NCCL the ranks of a node take that node's share of the GPUs of
the machine only if `CUDA_VISIBLE_DEVICES` says so; that has not been run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["Network", "main", "network"]

PORT = 29500
"""Of the rendezvous. The first node's namespace has all of its ports to itself."""

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Network:
    """Nodes that reach each other.

    Attributes:
        namespaces: One per node.
        addresses: Of each node, as the others reach it.
        interface: The name of each node's end of its cable.
    """

    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]
    interface: str


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{command}` failed with exit code {done.returncode}: {done.stderr.strip()}")


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _run(f"ip netns add {name}")
    try:
        _run(f"ip -n {name} link set lo up")
        yield name
    finally:
        # Its end of a cable goes with it, and with that the other end.
        _run(f"ip netns del {name}")


@contextmanager
def network(nodes: int, rate: str | None) -> Iterator[Network]:
    """Make the namespaces of some nodes, and remove them in the end.

    Args:
        nodes: One or more.
        rate: Of every cable in each direction, as `tc` writes it: "1gbit"; None for no limit.
    """
    prefix = f"gradavg{os.getpid()}"
    with ExitStack() as stack:
        names = tuple(stack.enter_context(_namespace(f"{prefix}n{index}")) for index in range(nodes))
        if nodes == 1:
            yield Network(names, ("127.0.0.1",), "lo")
            return
        switch = stack.enter_context(_namespace(f"{prefix}sw"))
        _run(f"ip -n {switch} link add bridge0 type bridge")
        _run(f"ip -n {switch} link set bridge0 up")
        addresses = tuple(f"10.77.0.{index + 1}" for index in range(nodes))
        for index, (name, address) in enumerate(zip(names, addresses, strict=True)):
            _run(f"ip -n {switch} link add port{index} type veth peer name cable netns {name}")
            _run(f"ip -n {switch} link set port{index} master bridge0 up")
            _run(f"ip -n {name} addr add {address}/24 dev cable")
            _run(f"ip -n {name} link set cable up")
            if rate is not None:
                for namespace, device in ((switch, f"port{index}"), (name, "cable")):
                    _run(f"tc -n {namespace} qdisc add dev {device} root tbf rate {rate} burst 128kb latency 50ms")
        yield Network(names, addresses, "cable")


def _megabits(rate: str) -> float:
    """Return a rate as `tc` writes it, in Mbit/s."""
    number, unit = rate[:-4], rate[-4:]
    try:
        megabits = float(number) * UNITS[unit] / 1e6
    except (KeyError, ValueError):
        megabits = 0.0
    if not megabits > 0:
        raise argparse.ArgumentTypeError(f"{rate!r} is not a rate; give a number > 0 and kbit, mbit or gbit: 1gbit")
    return megabits


def _commands(given: argparse.Namespace, made: Network) -> Iterator[list[str]]:
    options = ["--interface", made.interface, *given.arguments]
    if given.rate is not None and len(made.namespaces) > 1:
        options += ["--bandwidth", str(_megabits(given.rate))]
    for index, name in enumerate(made.namespaces):
        launch = ["--nnodes", str(given.nodes), "--node-rank", str(index), "--nproc-per-node", str(given.ranks)]
        launch += ["--master-addr", made.addresses[0], "--master-port", str(PORT)]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, "--module", given.module, *options]
        yield ["ip", "netns", "exec", name, *command]


def _rate(rate: str) -> str:
    _megabits(rate)
    return rate


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    raise KeyboardInterrupt(f"signal {number}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the nodes, run the benchmark on them, and remove them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nodes", description="Run a benchmark on emulated nodes of limited bandwidth."
    )
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes (default: 2)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks on each node (default: 1)")
    parser.add_argument("--rate", type=_rate, default=None, help="of each cable, such as 1gbit (default: no limit)")
    parser.add_argument("--module", default="benchmarks.step", help="what to run (default: benchmarks.step)")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="arguments of the benchmark")
    given = parser.parse_args(arguments)
    if given.nodes < 1 or given.ranks < 1:
        parser.error(f"--nodes and --ranks are 1 or more; got {given.nodes} and {given.ranks}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        parser.error(f"network namespaces need root and iproute2; missing: {', '.join(missing) or 'root'}")
    # A termination is to remove the namespaces, too.
    signal.signal(signal.SIGTERM, _interrupt)
    with network(given.nodes, given.rate) as made, ExitStack() as stack:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": made.interface, "NCCL_SOCKET_IFNAME": made.interface}
        environment.setdefault("OMP_NUM_THREADS", "1")
        processes = []
        for command in _commands(given, made):
            process = subprocess.Popen(command, env=environment)
            stack.callback(_end, process)
            processes.append(process)
        codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit(f"the benchmark failed: exit codes of the nodes {codes}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that is still running, which ends its ranks."""
    if process.poll() is None:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
