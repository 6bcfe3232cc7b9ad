"""FAULTS: what goes wrong in a run of two ranks, and when; what every rank says, and how it ends.

The ranks end after the run, as those that a launcher starts: they may be killed, be stopped, or fail.
"""

from __future__ import annotations

import errno
import os
import signal
import warnings
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import Ended, RankEnvironment, RankPool, covering, make_trainer
from toys import Toy, loader

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.lightning_internals import store_of_world

__all__ = ["FAULTS", "Fault", "Injected", "fail", "interrupt", "kill", "run_ranks", "terminate", "train"]


def run_ranks(body: Callable[..., Any], *, world_size: int = 2, timeout: float = 5, **given: Any) -> list[Ended]:
    """Run a body on ranks of its own, and return how each of them ended; `timeout` is that of the process group."""
    with closing(RankPool(world_size, patience=timeout)) as pool, warnings.catch_warnings():
        warnings.simplefilter("default")
        return pool.end(body, **given)


class Injected(Toy):
    """A method of it acts on what it returns, on one rank, from the third step on."""

    def __init__(self, moment: str = "training_step", act: Any = None, rank: int = 1, **toy: Any) -> None:
        super().__init__(**toy)
        own = getattr(self, moment)

        def acting(*args: Any, **kwargs: Any) -> Any:
            returned = own(*args, **kwargs)
            due = self.global_step >= 2 or moment == "configure_optimizers"
            return act(returned) if act is not None and due and dist.get_rank() == rank else returned

        setattr(self, moment, acting)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing."""


class Other(Injected):
    """The same, as of another version of the script."""


def grow(module: Any) -> None:
    module.more = torch.nn.Parameter(torch.zeros(1))


def fail(returned: Any) -> None:
    raise ValueError("the user's own error")


def send(number: int, returned: Any) -> Any:
    os.kill(os.getpid(), number)
    return returned


kill, stop, terminate = (partial(send, number) for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM))


def interrupt(returned: Any) -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return send(signal.SIGINT, returned)


def fill_disk(returned: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def be_late(returned: Any) -> Any:
    """Come to the exchange when the other rank has given up and ended."""
    store_of_world().wait([f"ended/{1 - dist.get_rank()}"])
    return returned


def to_nothing(returned: Any) -> None:
    return None


def train(
    moment: str = "training_step",
    act: Any = None,
    *,
    rank: int = 1,
    model: Callable[..., Injected] = Injected,
    toy: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    resume: str | None = None,
    keep: dict[str, Any] | None = None,
    epochs: int = 1,
    folder: str,
    **options: Any,
) -> int:
    """Body: train on five batches, with something that happens at one moment on one rank; return the steps."""
    trainer = make_trainer(
        GradAvgStrategy(**{"check_replicas_every_n_steps": 1, **(strategy or {})}),
        max_epochs=epochs,
        use_distributed_sampler=False,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, **(keep or {"save_top_k": -1}))],
        **options,
    )
    batches = loader([[1.0, 2.0, 3.0, 4.0]] * 5)
    trainer.fit(model(moment, act, rank, **(toy or {})), batches, loader([[0.0]]), ckpt_path=resume)
    return trainer.global_step


def train_apart(folder: str, patch: tuple[str, Any] | None = None, **changed: Any) -> int:
    if dist.get_rank() == 0:
        return train(folder=folder)
    with mock.patch(*patch) if patch is not None else nullcontext():
        return train(folder=folder, **changed)


def train_again(torn: bool, folder: str) -> int:
    """Body: go on from a checkpoint that is cut off, or on rank 1 from that of the epoch before."""
    train(folder=folder, epochs=2)
    first, second = sorted(Path(folder).glob("*.ckpt"))
    if torn and dist.get_rank() == 0:
        os.truncate(second, 1000)
    dist.barrier()
    return train(resume=str(first if dist.get_rank() == 1 and not torn else second), folder=folder, epochs=4)


class Fault:
    """What happens in a run, and how both ranks end.

    Args:
        said: What each rank says in the end, a part of its error, or what both say; "" for nothing.
        body: Runs on both ranks, with `args` and an empty folder. By default it trains.
        codes: The exit codes; None for a process that is stopped, and never ends.
        full: Whether it takes too long for every run of the tests.
        logged: Whether a rank logs a line before any traceback: what all agree on, or read, is nobody's fault.
    """

    def __init__(
        self,
        *said: str,
        body: Callable[..., Any] = train,
        codes: tuple[int | None, ...] = (1, 1),
        full: bool = False,
        logged: bool = True,
        **args: Any,
    ) -> None:
        self.said, self.codes, self.full, self.logged = (said[0], said[-1]), codes, full, logged
        self.body, self.args = body, args


_OWN = "ValueError: the user's own error"
_LOST = "nothing was heard from rank {}: lost, killed or stuck"
_START: dict[str, Any] = {"body": train_apart}
_PIECES = {"equivalent_to": "data_parallel", "num_replicas": 4}

# What ends a rank, what it says, its exit code, and what the other says.
_ACTS = {
    "exception": (fail, _OWN, 1, f"rank {{}} ended with {_OWN}"),
    "kill -9": (kill, "", -9, _LOST),
    "SIGSTOP": (stop, "", None, _LOST),
}
_MOMENTS = ["configure_optimizers", "training_step", "validation_step", "on_train_epoch_end", "on_save_checkpoint"]
_ENDS = list(_ACTS), _MOMENTS, (0, 1)


def _ends(what: str, moment: str, rank: int) -> Fault:
    act, said, code, told = _ACTS[what]
    both = [(said, code), (told.format(rank), 1)]
    ends, codes = zip(*(both if rank == 0 else reversed(both)), strict=True)
    full = (what, moment, rank) not in covering(*_ENDS, strength=1)
    return Fault(*ends, codes=codes, full=full, moment=moment, act=act, rank=rank)


# fmt: off
FAULTS = {
    **{f"{what} in {moment} on rank {rank}": _ends(what, moment, rank) for what, moment, rank in product(*_ENDS)},
    "exception in one of several pieces of a step": Fault(
        f"rank 1 ended with {_OWN}", _OWN, act=fail, strategy=_PIECES),
    "SIGTERM": Fault("SIGTERMException", act=terminate, logged=False),
    "Ctrl-C": Fault("rank 1 ended with KeyboardInterrupt", "SystemExit: 1", act=interrupt),
    "a rank comes after the timeout": Fault(_LOST.format(1), "all ranks say the same", act=be_late, full=True),
    "None from training_step": Fault(
        "rank 1 ended with RuntimeError: training_step returned no loss on rank 1", "nonfinite='skip_step'",
        act=to_nothing),
    "None from the loader": Fault(
        "rank 1 ended with RuntimeError: the train loader yielded None on rank 1", "on rank 1. Lightning skips",
        moment="on_before_batch_transfer", act=to_nothing),
    "None from the last transfer hook": Fault(
        "rank 1 ended with RuntimeError: the train loader yielded None on rank 1", "on rank 1. Lightning skips",
        moment="on_after_batch_transfer", act=to_nothing, strategy={"reduction": "weighted_mean"},
        accumulate_grad_batches=2),
    "the disk is full while a checkpoint is written": Fault(
        "No space left on device", "rank 0 ended with OSError: [Errno 28] No space left on device",
        moment="on_save_checkpoint", act=fill_disk, rank=0),
    "another torch": Fault("torch 1.0 on rank 1", patch=("torch.__version__", "1.0"), **_START),
    "another script": Fault(
        "class faults.Injected on rank 0; a module of the class faults.Other on rank 1", model=Other,
        full=True, **_START),
    "another number of parameters": Fault(
        "nothing on rank 0; the parameter more of shape (1,) and torch.float32 on rank 1",
        patch=("faults.Injected.configure_model", grow), full=True, **_START),
    "another shape of a parameter": Fault(
        "w of shape () and torch.float64 on rank 0; the parameter w of shape (1,)", toy={"start": [1.0]}, **_START),
    "another max_steps": Fault(
        "Trainer(max_steps=-1) on rank 0; Trainer(max_steps=3) on rank 1", max_steps=3, full=True, **_START),
    "another reduction": Fault(
        "(reduction='mean') on rank 0; GradAvgStrategy(reduction='sum') on rank 1",
        strategy={"reduction": "sum"}, **_START),
    "LOCAL_RANK twice on a node": Fault(
        "(node, rank on the node) is (0, 0) on ranks 0, 1",
        patch=("ranks.RankEnvironment.local_rank", RankEnvironment.node_rank), **_START),
    "a torn checkpoint": Fault(
        "epoch=1-step=10.ckpt is damaged: 1000 bytes, file is not a zip file. ", body=train_again,
        torn=True, logged=False),
    "an older checkpoint on rank 1": Fault(
        "after 10 steps and 2 epochs on rank 0; training begins after 5 steps and 1 epochs on rank 1",
        body=train_again, torn=False),
}
# fmt: on
