"""The processes of a benchmark, and the rounds in which they measure one variant after the other."""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import random
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from benchmarks.nodes import Network
from benchmarks.one_gpu import OneGpu, alone_on_a_gpu
from benchmarks.report import begin_file

__all__ = ["World", "in_rounds", "is_rank", "joined", "progress", "quiet_trainer", "run", "slowest", "start"]


@dataclass(frozen=True)
class World:
    """The live process group.

    Attributes:
        device: Where this rank computes.
        ranks_on_node: Number of ranks on this node.
    """

    device: torch.device
    ranks_on_node: int

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return dist.get_world_size() // self.ranks_on_node

    @property
    def accelerator(self) -> Any:
        """What Lightning takes as the `accelerator` of a Trainer."""
        if self.device.type == "cpu":
            return "cpu"
        if torch.cuda.device_count() < self.ranks_on_node:
            return OneGpu()
        return "gpu"


def is_rank() -> bool:
    """Return whether this process is a rank already: torchrun started it, perhaps for `benchmarks.nodes`."""
    return "LOCAL_RANK" in os.environ


def run(
    body: Callable[[argparse.Namespace], None], arguments: argparse.Namespace, print_results: Callable[[Path], None]
) -> None:
    """Run a benchmark on its ranks, or as one of them, and print what the ranks have saved.

    Args:
        body: Measures on every rank; rank 0 adds rows to the file.
        arguments: Those of the command line, with `output`, the file, and `ranks`, the sizes of the worlds.
        print_results: Prints the table of a file.
    """
    if is_rank():
        is_first = os.environ["RANK"] == "0"
        if is_first:
            begin_file(arguments.output)
        body(arguments)
        if is_first:
            print_results(arguments.output)
        return
    begin_file(arguments.output)
    for ranks in arguments.ranks:
        start(body, ranks, arguments)
    print_results(arguments.output)


def start(body: Callable[..., None], ranks: int, *arguments: Any, nodes: Network | None = None) -> None:
    """Run a function of a module on some ranks of this machine, and wait for them. All end if one fails.

    Args:
        body: Runs on every rank.
        ranks: Their number.
        arguments: Those of `body`.
        nodes: Nodes, one for each rank; None for one node.
    """
    method = "spawn"
    if sys.platform == "linux" and torch.cuda.device_count() == 0:
        method = "fork"  # so torch and Lightning are imported once, and not by every rank
    torch.multiprocessing.start_processes(
        _be_rank, (body, ranks, _free_port(), nodes, arguments), nprocs=ranks, start_method=method
    )


def _be_rank(
    rank: int,
    body: Callable[..., None],
    ranks: int,
    port: int,
    nodes: Network | None,
    arguments: Sequence[Any],
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="benchmark",  # by which Lightning sees that it need not start processes
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if nodes is not None:
        _enter(nodes.namespaces[rank])
        os.environ.update(
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            GROUP_RANK=str(rank),
            MASTER_ADDR=nodes.addresses[0],
            GLOO_SOCKET_IFNAME=nodes.interface,
        )
    body(*arguments)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _enter(namespace: str) -> None:
    """Move this process to a network namespace, as `setns` does (Python has it from 3.12 on)."""
    new_network = 0x40000000  # CLONE_NEWNET
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, new_network) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    finally:
        os.close(descriptor)


@contextmanager
def joined() -> Iterator[World]:
    """Join the process group of the ranks, and leave it in the end.

    Each rank has a GPU of its own where there are enough, else all share the first one. Without any they use CPUs, with
    one thread each.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    ranks_on_node = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() >= ranks_on_node:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    elif torch.cuda.is_available():
        device = torch.device("cuda", 0)
        alone_on_a_gpu()
    _quiet()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    try:
        yield World(device, ranks_on_node)
        dist.barrier()
    finally:
        # A process group that lives on in a cycle would end with the interpreter, and gloo's threads abort it then.
        gc.collect()
        dist.destroy_process_group()


def _quiet() -> None:
    """Keep advice on data loaders and the like from burying the tables."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(lambda record: record.levelno >= logging.ERROR)
    for name in ("rank_zero", "utilities.rank_zero"):
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.ERROR)
        logging.getLogger(f"lightning.fabric.{name}").setLevel(logging.ERROR)


def quiet_trainer(strategy: Strategy, world: World, **options: Any) -> Trainer:
    """Return a Trainer of one epoch without logger, checkpoints, progress bar, summary, and a sampler of Lightning's.

    Args:
        strategy: The strategy.
        world: The ranks.
        options: Further options of the Trainer, which count where they say otherwise.
    """
    quiet: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "accelerator": world.accelerator,
        "devices": world.ranks_on_node,
        "num_nodes": world.nodes,
    }
    return Trainer(strategy=strategy, **{**quiet, **options})


def in_rounds(names: Sequence[str], rounds: int, *, warm_up: int = 1) -> Iterator[tuple[str, bool]]:
    """Yield each name once per round, in an order drawn anew, the same on all ranks, and whether the round counts.

    A trainer and its model are a cycle, in stock as well: what a round leaves is collected before the next name.

    Args:
        names: The variants.
        rounds: Rounds that count.
        warm_up: Rounds before them.
    """
    generator = random.Random(0)
    for number in range(-warm_up, rounds):
        for name in generator.sample(names, len(names)):
            gc.collect()
            dist.barrier()
            yield name, number >= 0


def slowest(values: Sequence[float], world: World) -> list[float]:
    """Return the largest of each value over the ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def progress(text: str) -> None:
    """Say on standard error what is measured, on rank 0."""
    if dist.get_rank() == 0:
        sys.stderr.write(f"{text}\n")
