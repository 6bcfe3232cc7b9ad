"""Faults, injected into runs of two ranks, and what is expected of them.

The ranks end after the run, as those that a launcher starts: they may be killed, be stopped, or fail. So
`python tests/faults.py` prints what is seen.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import Ended, RankPool, ensure_forkserver, make_trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.lightning_internals import store_of_world

__all__ = ["FAULTS", "Fault", "inject", "run_ranks"]


def run_ranks(body: Callable[..., Any], *, world_size: int = 2, timeout: float = 5, **given: Any) -> list[Ended]:
    """Run a body on ranks of its own, and return how each of them ended; `timeout` is that of the process group."""
    with closing(RankPool(world_size, patience=timeout)) as pool, warnings.catch_warnings():
        warnings.simplefilter("default")
        return pool.end(body, **given)


class Stream(IterableDataset[Tensor]):
    """Batches one after another, of no known length."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class Injected(LightningModule):
    """Toy-Lin from 0, with lr 0.1, in which something happens at one moment on one rank."""

    def __init__(self, moment: str = "", act: Any = None, rank: int = 1, sizes: Sequence[int] = (2,)) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(sizes[0], dtype=torch.float64))
        self.more = torch.nn.ParameterList(torch.zeros(size, dtype=torch.float64) for size in sizes[1:])
        self.moment, self.act, self.rank = moment, act, rank

    def reach(self, moment: str) -> None:
        if moment == self.moment and dist.get_rank() == self.rank:
            self.act(self)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = (batch * self.w).sum() + sum(0 * parameter.sum() for parameter in self.more)
        if self.global_step == 2:
            self.reach("step")
            if self.moment == "loss" and dist.get_rank() == self.rank:
                return self.act(loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.reach("validation")

    def on_train_epoch_end(self) -> None:
        self.reach("epoch end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.reach("optimizer")
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Other(Injected):
    """The same, as of another version of the script."""


class Disk(TorchCheckpointIO):
    """A disk on which something happens when a checkpoint is written."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        self.act = act

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.act(None)


def fail(module: Any) -> None:
    raise ValueError("the user's own error")


def send(number: int, module: Any) -> None:
    os.kill(os.getpid(), number)


kill, stop, terminate = (partial(send, number) for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM))


def interrupt(module: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)


def fill_disk(module: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def be_late(module: Any) -> None:
    """Come to the exchange when the other rank has given up and ended."""
    store_of_world().wait([f"ended/{1 - dist.get_rank()}"])


def to_nothing(loss: Tensor) -> None:
    return None


def to_weighted(loss: Tensor) -> dict[str, Any]:
    return {"loss": loss, "weight": 1}


def train(
    moment: str = "",
    act: Any = None,
    *,
    rank: int = 1,
    strategy: dict[str, Any] | None = None,
    batches: tuple[int, int] = (5, 5),
    stream: bool = False,
    apart: float = 10,
    disk: Any = None,
    module: Any = None,
    folder: str = "",
    **options: Any,
) -> Any:
    """Body: train on gradients 1, 2, ... on rank 0 and 11, 12, ... on rank 1; return weight, steps, and warnings."""
    mine = dist.get_rank()
    model = Injected(moment, act, rank) if module is None or mine != rank else module()
    data: Any = [torch.tensor([1 + index + apart * mine], dtype=torch.float64) for index in range(batches[mine])]
    own = {} if disk is None or mine != 0 else {"checkpoint_io": Disk(disk)}
    options |= {} if disk is None else {"callbacks": [ModelCheckpoint(folder)], "enable_checkpointing": True}
    trainer = make_trainer(
        GradAvgStrategy(**{"check_replicas_every_n_steps": 1, **(strategy or {}), **own}),
        **{"max_epochs": 1, "use_distributed_sampler": False, **options},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        validation: Any = DataLoader([0.0], batch_size=None)  # type: ignore[arg-type]  # a list is a dataset
        trainer.fit(model, DataLoader(Stream(data) if stream else data, batch_size=None), validation)
    told = [str(one.message) for one in caught if "all ranks" in str(one.message)]
    return [round(float(one), 9) for one in model.w.detach()], trainer.global_step, told


def train_apart(what: str, folder: str) -> Any:
    """Body: train, with something else on rank 1."""
    if dist.get_rank() == 0:
        return train()
    changed: dict[str, Callable[[], Any]] = {
        "trainer": lambda: train(max_steps=3),
        "strategy": lambda: train(strategy={"reduction": "sum"}),
        "class": lambda: train(module=Other),
        "number": lambda: train(module=lambda: Injected(sizes=(2, 1))),
        "shape": lambda: train(module=lambda: Injected(sizes=(3,))),
    }
    if what in changed:
        return changed[what]()
    patched: dict[str, Any] = {
        "version": mock.patch.object(torch, "__version__", "1.0"),
        "place": mock.patch("ranks.RankEnvironment.local_rank", return_value=0),
    }
    with patched[what]:
        return train()


def train_again(torn: bool, folder: str) -> Any:
    """Body: go on from a checkpoint that is cut off, or on rank 1 from that of the epoch before."""
    train(callbacks=[ModelCheckpoint(folder, save_top_k=-1)], enable_checkpointing=True, max_epochs=2)
    first, second = sorted(Path(folder).glob("*.ckpt"))
    if torn and dist.get_rank() == 0:
        second.write_bytes(second.read_bytes()[:1000])
    dist.barrier()
    return go_on(str(first if dist.get_rank() == 1 and not torn else second))


def go_on(path: str) -> Any:
    trainer = make_trainer(GradAvgStrategy(), max_epochs=4, use_distributed_sampler=False)
    trainer.fit(Injected(), DataLoader([torch.ones(1, dtype=torch.float64)] * 5, batch_size=None), ckpt_path=path)  # type: ignore[arg-type]  # see above
    return trainer.global_step


def launch(environment: dict[str, str], folder: str, **options: Any) -> None:
    """Body: begin a run as a launcher would that started another number of processes."""
    os.environ.update(environment)
    Trainer(strategy=GradAvgStrategy(), accelerator="cpu", logger=False, **options).fit(Injected())


@dataclass(frozen=True)
class Fault:
    """How both ranks end.

    Attributes:
        body: Runs on both ranks, with `args` and an empty folder.
        said: What each rank says in the end: a part of its error, or of what it returns; "" for nothing.
        codes: The exit codes; None for a process that is stopped, and never ends.
        full: Whether it takes too long for every run of the tests.
        timeout: That of the process group, in seconds.
    """

    body: Callable[..., Any]
    args: dict[str, Any]
    said: tuple[str, str]
    codes: tuple[int | None, int | None] = (1, 1)
    full: bool = False
    timeout: float = 5


def _at(moment: str, act: Any, said: tuple[str, str], codes: Any = (1, 1), *, full: bool = False, **args: Any) -> Fault:
    """Return what happens on rank 1, or another, at a moment of its training."""
    timeout = args.pop("timeout", 5)
    return Fault(train, {"moment": moment, "act": act, **args}, said, codes, full, timeout)


def _start(what: str, said: str, *, full: bool = False) -> Fault:
    """Return what is refused at the start, on both ranks."""
    return Fault(train_apart, {"what": what}, (said, said), full=full)


_OWN, _FINE = "ValueError: the user's own error", (0, 0)
_BY_1, _BY_0 = (f"rank 1 ended with {_OWN}", _OWN), (_OWN, f"rank 0 ended with {_OWN}")
_LOST = "nothing was heard from rank {}: lost, killed or stuck"
_LOST_1, _LOST_0 = (_LOST.format(1), ""), ("", _LOST.format(0))
_LATE = _LOST.format(1), "all ranks say the same"
_NONE = "rank 1 ended with RuntimeError: training_step returned no loss on rank 1", "nonfinite='skip_step'"
_SIGNAL, _INTERRUPT = ("SIGTERMException",) * 2, ("rank 1 ended with KeyboardInterrupt", "SystemExit: 1")
_FULL_DISK = "No space left on device", "rank 0 ended with OSError: [Errno 28] No space left on device"
_TORN = ("epoch=1-step=10.ckpt is damaged: 1000 bytes, file is not a zip file. ",) * 2
_OLDER = ("after 10 steps and 2 epochs on rank 0; training begins after 5 steps and 1 epochs on rank 1",) * 2
_TASKS = ("SLURM_NTASKS=1 processes, but Trainer(devices=2, num_nodes=1) trains on 2",) * 2
_SLURM = {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train"}
_SLURM |= dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
_TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
_WEIGHTED = {"reduction": "weighted_mean"}

# fmt: off
FAULTS: dict[str, Fault] = {
    "exception in training_step": _at("step", fail, _BY_1),
    "exception in validation_step": _at("validation", fail, _BY_1),
    "exception at the end of an epoch": _at("epoch end", fail, _BY_1, max_epochs=2),
    "exception in one of several pieces of a step": _at(
        "step", fail, _BY_1, strategy={"equivalent_to": "data_parallel", "num_replicas": 4}, apart=0),
    "exception in configure_optimizers": _at("optimizer", fail, _BY_1),
    "exception on rank 0": _at("step", fail, _BY_0, rank=0),
    "kill -9": _at("step", kill, _LOST_1, (1, -9)),
    "kill -9 of rank 0": _at("step", kill, _LOST_0, (-9, 1), rank=0, full=True),
    "kill -9 in validation_step": _at("validation", kill, _LOST_1, (1, -9), full=True),
    "kill -9 while a checkpoint is written": Fault(train, {"disk": kill}, _LOST_0, (-9, 1)),
    "SIGSTOP": _at("step", stop, _LOST_1, (1, None), timeout=2, full=True),
    "SIGSTOP of rank 0": _at("step", stop, _LOST_0, (None, 1), rank=0, timeout=2, full=True),
    "SIGSTOP in validation_step": _at("validation", stop, _LOST_1, (1, None), timeout=2, full=True),
    "SIGTERM": _at("step", terminate, _SIGNAL),
    "Ctrl-C": _at("step", interrupt, _INTERRUPT),
    "a rank comes after the timeout": _at("step", be_late, _LATE, timeout=1, full=True),
    "None from training_step": _at("loss", to_nothing, _NONE),
    "a weight on one rank only": _at("loss", to_weighted, ("not usable",) * 2, strategy=_WEIGHTED, full=True),
    "2 batches, and none on rank 1, of a stream": Fault(
        train, {"batches": (2, 0), "stream": True}, ("[-0.3, -0.3], 2",) * 2, _FINE, full=True),
    "a stream that was not split": Fault(
        train, {"stream": True, "apart": 0},
        ("all ranks read the same batches of DataLoader over Stream", "[]"), _FINE),
    "another torch": _start("version", "torch 1.0 on rank 1"),
    "another script": _start(
        "class", "class faults.Injected on rank 0; a module of the class faults.Other on rank 1", full=True),
    "another number of parameters": _start(
        "number", "nothing on rank 0; the parameter more.0 of shape (1,) and torch.float64 on rank 1", full=True),
    "another shape of a parameter": _start(
        "shape", "w of shape (2,) and torch.float64 on rank 0; the parameter w of shape (3,)"),
    "another max_steps": _start(
        "trainer", "Trainer(max_steps=-1) on rank 0; Trainer(max_steps=3) on rank 1", full=True),
    "another reduction": _start("strategy", "(reduction='mean') on rank 0; GradAvgStrategy(reduction='sum') on rank 1"),
    "LOCAL_RANK twice on a node": _start("place", "(node, rank on the node) is (0, 0) on ranks 0, 1"),
    "SLURM_NTASKS=1, devices=2": Fault(launch, {"environment": _SLURM, "devices": 2}, _TASKS),
    "torchrun of 2, devices=4": Fault(
        launch, {"environment": _TORCHRUN, "devices": 4}, ("(4 * 1) does not match the world size (2)",) * 2),
    "the disk is full while a checkpoint is written": Fault(train, {"disk": fill_disk}, _FULL_DISK),
    "a torn checkpoint": Fault(train_again, {"torn": True}, _TORN),
    "an older checkpoint on rank 1": Fault(train_again, {"torn": False}, _OLDER),
}
# fmt: on


def inject(fault: Fault, folder: Path) -> tuple[bool, list[Ended]]:
    """Return whether the two ranks ended as they should, and how."""
    stuck = fault.codes.index(None) if None in fault.codes else None
    ended = run_ranks(fault.body, stuck=stuck, timeout=fault.timeout, folder=str(folder), **fault.args)
    said = all(part in one.said if part else not one.said for part, one in zip(fault.said, ended, strict=True))
    return said and fault.codes == tuple(one.exit_code for one in ended), ended


def main() -> None:
    """Print how each fault ends, and after how many seconds."""
    ensure_forkserver()  # its start is no part of the first fault
    for name, fault in FAULTS.items():
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            expected, ended = inject(fault, Path(folder))
        sys.stdout.write(f"| {name} | {'as expected' if expected else ended} | {time.monotonic() - begun:.1f} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    # By its name, by which the ranks import it.
    import faults

    faults.main()
