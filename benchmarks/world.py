"""The processes of a benchmark: torchrun starts them, each joins the others."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

from benchmarks.one_gpu import alone_on_a_gpu

__all__ = ["World", "is_rank", "joined", "quiet", "sent_by", "slowest", "start"]


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


def is_rank() -> bool:
    """Return whether torchrun started this process."""
    return "LOCAL_RANK" in os.environ


def start(module: str, ranks: int, arguments: Sequence[str]) -> None:
    """Run a module on some ranks of this machine, one thread each unless `OMP_NUM_THREADS` says otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun(["--standalone", f"--nproc-per-node={ranks}", "--module", module, *arguments])


@contextmanager
def joined(*, shares_gpu: bool = False) -> Iterator[World]:
    """Join the process group that torchrun prepared, and leave it in the end.

    Args:
        shares_gpu: What happens where there are fewer GPUs than ranks: all ranks share the first one, or use CPUs.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    ranks_on_node = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() >= ranks_on_node:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    elif torch.cuda.is_available() and shares_gpu:
        device = torch.device("cuda", 0)
        alone_on_a_gpu()
    quiet()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    try:
        yield World(device, ranks_on_node)
        dist.barrier()
    finally:
        # A process group that lives on in a cycle would end with the interpreter, and gloo's threads abort it then.
        gc.collect()
        dist.destroy_process_group()


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of each value over the ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def sent_by(interface: str) -> Callable[[], int]:
    """Return a function that tells how many bytes a network interface has sent, headers included (Linux).

    Raises:
        ValueError: If there is no such interface.
    """
    counter = Path("/sys/class/net") / interface / "statistics" / "tx_bytes"
    if not counter.exists():
        names = sorted(path.name for path in counter.parents[2].glob("*"))
        raise ValueError(f"--interface={interface!r} is not a network interface of this machine; it has {names}.")
    return lambda: int(counter.read_text())


def quiet() -> None:
    """Keep advice on data loaders and the like from burying the tables."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(lambda record: record.levelno >= logging.ERROR)
    for name in ("rank_zero", "utilities.rank_zero"):
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.ERROR)
        logging.getLogger(f"lightning.fabric.{name}").setLevel(logging.ERROR)
