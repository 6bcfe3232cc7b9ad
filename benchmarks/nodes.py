"""Run a benchmark on several emulated nodes: `python -m benchmarks.nodes --nodes 2 --rate 1gbit -- --models mlp`.

Each node is a network namespace of Linux with one virtual cable to a bridge in a namespace of its own; a token bucket
filter (`tc ... tbf`) on both ends of the cable limits its rate. The ranks of a node are started in its namespace by
`torchrun`. What follows `--` goes to the benchmark (`--module`), by default `benchmarks.step`, which counts the bytes
on the node's cable: that of `GLOO_SOCKET_IFNAME`. Nodes share the machine's cores and memory; the cable loses and
delays nothing beyond its rate. With one node there is no cable: the benchmark runs on a loopback interface that no
other process uses.

With `--delay`, the cables end in a process instead of a bridge, `relay.c`, which hands each packet on after that time.
An answer comes after twice the delay. It needs a C compiler and /dev/net/tun, and the node's end alone limits a rate.

Needs root, and `ip` and `tc` of iproute2. The namespaces are made for the run, named after the process, and removed at
its end with all that still runs in them, also when a rank dies, on an error or an interrupt. What a killed run leaves
is removed by the next one. With GPUs and NCCL the ranks of a node take that node's share of the GPUs of
the machine only if `CUDA_VISIBLE_DEVICES` says so; that has not been run.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

__all__ = ["Network", "main", "network", "obstacle"]

PORT = 29500
"""Of the rendezvous. The first node's namespace has all of its ports to itself."""

GRACE = 10.0
"""Seconds that a launcher has to end its ranks."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{command}` failed with exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _namespaces() -> list[str]:
    """Return the names of those that runs of this module made."""
    names = (line.split()[0] for line in _run("ip netns list").splitlines() if line)
    return [name for name in names if re.fullmatch(r"gradavg\d+(n\d+|sw)", name)]


def _remove(name: str) -> None:
    """Remove a namespace, which its processes would keep alive unseen; ends of cables in it go with it."""
    for process in map(int, _run(f"ip netns pids {name}").split()):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    _run(f"ip netns del {name}")


def _remove_abandoned() -> None:
    """Remove what killed runs have left."""
    for name in _namespaces():
        made_by = re.findall(r"\d+", name)[0]
        if not Path("/proc", made_by).exists():
            _remove(name)


def obstacle(*tools: str) -> str | None:
    """Return why there can be no nodes here, which making one shows; None where there can.

    Args:
        tools: The programs that are needed.
    """
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if os.geteuid() != 0 and not missing:
        missing = ["root"]
    if missing:
        return f"network namespaces need root and iproute2; missing: {', '.join(missing)}"
    try:
        _remove_abandoned()
        with _namespace(f"gradavg{os.getpid()}n0"):
            return None
    except RuntimeError as error:  # a container may forbid it to root, too
        return str(error)


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    try:
        _run(f"ip netns add {name}")
        _run(f"ip -n {name} link set lo up")
        yield name
    finally:
        # An interrupt may have come before it was made.
        if name in _namespaces():
            _remove(name)


@contextmanager
def network(nodes: int, rate: str | None, delay: float = 0.0) -> Iterator[Network]:
    """Make the namespaces of some nodes, and remove them in the end.

    Args:
        nodes: One or more.
        rate: Of every cable in each direction, as `tc` writes it: "1gbit"; None for no limit.
        delay: Milliseconds that a packet takes from one node to another, with two nodes or more.
    """
    prefix = f"gradavg{os.getpid()}"
    with ExitStack() as stack:
        names = tuple(stack.enter_context(_namespace(f"{prefix}n{index}")) for index in range(nodes))
        if nodes == 1:
            yield Network(names, ("127.0.0.1",), "lo")
            return
        addresses = tuple(f"10.77.0.{index + 1}" for index in range(nodes))
        if delay > 0:
            stack.enter_context(_relay(names, delay))
            for name, address in zip(names, addresses, strict=True):
                # Packets as large as TUN takes: each costs the relay the same, whatever its size.
                _run(f"ip -n {name} link set cable mtu 65000 up")
                _run(f"ip -n {name} addr add {address}/24 dev cable")
                if rate is not None:
                    _limit(name, "cable", rate)
            yield Network(names, addresses, "cable")
            return
        switch = stack.enter_context(_namespace(f"{prefix}sw"))
        _run(f"ip -n {switch} link add bridge0 type bridge")
        _run(f"ip -n {switch} link set bridge0 up")
        for index, (name, address) in enumerate(zip(names, addresses, strict=True)):
            _run(f"ip -n {switch} link add port{index} type veth peer name cable netns {name}")
            _run(f"ip -n {switch} link set port{index} master bridge0 up")
            _run(f"ip -n {name} addr add {address}/24 dev cable")
            _run(f"ip -n {name} link set cable up")
            if rate is not None:
                _limit(switch, f"port{index}", rate)
                _limit(name, "cable", rate)
        yield Network(names, addresses, "cable")


def _limit(namespace: str, device: str, rate: str) -> None:
    _run(f"tc -n {namespace} qdisc add dev {device} root tbf rate {rate} burst 128kb latency 50ms")


@contextmanager
def _relay(namespaces: Sequence[str], delay: float) -> Iterator[None]:
    """Run the process in which delayed cables end; it makes an interface `cable` in each namespace.

    Raises:
        RuntimeError: If it cannot be compiled, or makes no interfaces.
    """
    with TemporaryDirectory() as folder:
        program = f"{folder}/relay"
        _run(f"cc -O2 -o {program} {Path(__file__).with_name('relay.c')}")
        command = [program, str(round(1000 * delay)), *namespaces]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline() != "ready\n":
                    raise RuntimeError("the relay of delayed cables made no interfaces; its error stands above")
                yield
            finally:
                process.kill()


def _commands(arguments: argparse.Namespace, nodes: Network) -> Iterator[list[str]]:
    """Yield the command that starts the ranks of each node."""
    for index, name in enumerate(nodes.namespaces):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", str(arguments.nodes), "--node-rank", str(index)]
        command += ["--nproc-per-node", str(arguments.ranks)]
        command += ["--master-addr", nodes.addresses[0], "--master-port", str(PORT)]
        command += ["--module", arguments.module, *arguments.arguments]
        yield command


def _rate(rate: str) -> str:
    """Return a rate of the command line.

    Raises:
        argparse.ArgumentTypeError: If `tc` would not understand it.
    """
    if re.fullmatch(r"0*[1-9]\d*(kbit|mbit|gbit)", rate) is None:
        raise argparse.ArgumentTypeError(f"{rate!r} is not a rate; give a number > 0 and kbit, mbit or gbit: 1gbit")
    return rate


def _delay(delay: str) -> float:
    """Return the milliseconds of a delay of the command line.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    if re.fullmatch(r"\d+(\.\d+)?ms", delay) is None:
        raise argparse.ArgumentTypeError(f"{delay!r} is not a delay; give milliseconds: 10ms")
    return float(delay.removesuffix("ms"))


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Be the handler of signals: begin to remove the nodes."""
    del frame
    # Nothing may interrupt the removal, nor the commands that it runs: they inherit this.
    for signal_number in _SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def _launched(commands: Iterator[list[str]], environment: dict[str, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run commands; at the end of the block, terminate those that still run, and wait for each or kill it."""
    # The inner stack closes first, so all processes are terminated before any is waited for.
    with ExitStack() as waits, ExitStack() as terminations:
        processes = []
        for command in commands:
            process = subprocess.Popen(command, env=environment)
            waits.callback(_wait_or_kill, process)
            terminations.callback(process.terminate)  # nothing where it has ended
            processes.append(process)
        yield processes


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended or one has failed, which the others might wait for in vain; return its exit code."""
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for process in processes:
            descriptor = os.pidfd_open(process.pid)
            stack.callback(os.close, descriptor)
            selector.register(descriptor, selectors.EVENT_READ, process)
        while selector.get_map():
            for key, _ in selector.select():
                selector.unregister(key.fd)
                code: int = key.data.wait()
                if code != 0:
                    return code
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the nodes, run the benchmark on them, and remove them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nodes", description="Run a benchmark on emulated nodes of limited bandwidth."
    )
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes (default: 2)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks on each node (default: 1)")
    parser.add_argument("--rate", type=_rate, default=None, help="of each cable, such as 1gbit (default: no limit)")
    parser.add_argument("--delay", type=_delay, default=0.0, help="of each packet, such as 10ms (default: none)")
    parser.add_argument("--module", default="benchmarks.step", help="what to run (default: benchmarks.step)")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="arguments of the benchmark")
    parsed = parser.parse_args(arguments)
    if parsed.nodes < 1 or parsed.ranks < 1:
        parser.error(f"--nodes and --ranks are 1 or more; got {parsed.nodes} and {parsed.ranks}")
    if parsed.delay > 0 and parsed.nodes == 1:
        parser.error("--delay needs two nodes: the only node has no cable")
    tools = ["ip", "tc"]
    if parsed.delay > 0:
        tools.append("cc")
    reason = obstacle(*tools)
    if reason is not None:
        parser.error(reason)
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    try:
        code = _run_on_nodes(parsed)
    except KeyboardInterrupt as interrupt:
        sys.exit(f"ended by {interrupt}; the nodes are removed")
    if code != 0:
        sys.exit(f"the benchmark failed: a node's launcher ended with exit code {code}")


def _run_on_nodes(arguments: argparse.Namespace) -> int:
    """Return 0, or the exit code of the first node that failed."""
    with network(arguments.nodes, arguments.rate, arguments.delay) as nodes:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": nodes.interface, "NCCL_SOCKET_IFNAME": nodes.interface}
        environment.setdefault("OMP_NUM_THREADS", "1")
        with _launched(_commands(arguments, nodes), environment) as processes:
            return _wait(processes)


if __name__ == "__main__":
    main()
