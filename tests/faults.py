"""FAULTS: what goes wrong in a run of two ranks, and when; what every rank says, and how it ends.

The ranks end after the run, as those that a launcher starts: they may be killed, be stopped, or fail.
"""

from __future__ import annotations

import errno
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from ranks import Ended, RankEnvironment, RankPool, covering, make_trainer
from torch.distributed.fsdp import fully_shard
from torchmetrics import SumMetric
from toys import One, Toy, loader

from lightning_gradavg import GradAvgModelParallelStrategy, GradAvgStrategy
from lightning_gradavg._lightning.internals import store_of_world

__all__ = ["FAULTS", "Fault", "Injected", "fail", "interrupt", "kill", "run_ranks", "terminate", "train"]


_ON_EXCEPTION: dict[str, Any] = {}
if "save_on_exception" in signature(ModelCheckpoint).parameters:  # since lightning 2.6
    _ON_EXCEPTION["save_on_exception"] = True


def run_ranks(body: Callable[..., Any], *, world_size: int = 2, timeout: float = 5, **given: Any) -> list[Ended]:
    """Run a body on ranks of its own, and return how each of them ended; `timeout` is that of the process group."""
    with closing(RankPool(world_size, patience=timeout)) as pool, warnings.catch_warnings():
        warnings.simplefilter("default")
        return pool.end(body, **given)


class Injected(Toy):
    """A method of it acts on what it returns, on one rank or (None) on both, after so many steps."""

    def __init__(
        self, moment: str = "training_step", act: Any = None, rank: int | None = 1, *, after: int = 2, **toy: Any
    ) -> None:
        super().__init__(**toy)
        own = getattr(self, moment)
        ranks = (0, 1) if rank is None else (rank,)

        def acting(*args: Any, **kwargs: Any) -> Any:
            returned = own(*args, **kwargs)
            due = self.global_step >= after or moment in ("setup", "configure_optimizers")
            return act(returned) if act is not None and due and dist.get_rank() in ranks else returned

        setattr(self, moment, acting)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing."""


class Other(Injected):
    """The same, as of another version of the script."""


class Logged(Injected):
    """Logs what callbacks monitor: a number, and a metric whose state torchmetrics gathers."""

    def __init__(self, *args: Any, sync_dist: bool = True, **toy: Any) -> None:
        super().__init__(*args, **toy)
        self.sync_dist, self.metric = sync_dist, SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log both, reduced at the end of the epoch."""
        self.metric.update(1.0)
        self.log("monitored", 1.0, sync_dist=self.sync_dist)
        self.log("metric", self.metric)


class Exchanging(Callback):
    """Runs every collective of the strategy when the run is interrupted."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Check that each answers with what this rank brings."""
        strategy, mine = trainer.strategy, torch.tensor([1, 4 + dist.get_rank()])
        for operation in ("mean", "sum", dist.ReduceOp.MAX):
            assert mine.tolist() == strategy.reduce(mine.clone(), reduce_op=operation).tolist()
        assert [2.5, 2.0] == [strategy.reduce(2.5), strategy.reduce(torch.tensor(2.0), group=dist.group.WORLD)]
        for every in (True, False):
            assert strategy.reduce_boolean_decision(True, all=every)
            assert not strategy.reduce_boolean_decision(False, all=every)
        for gathered in (strategy.all_gather(mine), pl_module.all_gather({"mine": mine})["mine"]):
            assert [mine.tolist()] * dist.get_world_size() == gathered.tolist()
        assert "mine" == strategy.broadcast("mine", 1 - dist.get_rank())
        strategy.barrier("in on_exception")
        assert trainer.log_dir is not None
        trainer.save_checkpoint(f"{trainer.default_root_dir}/in_on_exception.ckpt")
        if isinstance(pl_module, Logged):
            pl_module.metric.update(1.0)
            pl_module.metric.compute()
            assert {"monitored", "metric"} >= set(trainer.callback_metrics)
        if isinstance(strategy, GradAvgModelParallelStrategy):
            assert {} == strategy.lightning_module_state_dict() == strategy.optimizer_state(strategy.optimizers[0])
        elif strategy.optimizers:
            assert 16 == len(strategy.fingerprint())


class Begins(Injected):
    """Begins to log on rank 1 alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx >= 3 and dist.get_rank() == 1:
            self.log("late", batch.mean())
        return super().training_step(batch, batch_idx)


class Flat(Injected):
    """Has a gradient of exactly 0."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 0 * super().training_step(batch, batch_idx)


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


def exchange_other_shapes(returned: Any) -> Any:
    """Gather 3 numbers on rank 0, and 5 on rank 1."""
    mine = torch.ones(3 + 2 * dist.get_rank())
    dist.all_gather([torch.empty_like(mine), torch.empty_like(mine)], mine)


def sum_over_ranks(returned: Any) -> Any:
    dist.all_reduce(torch.ones(1))
    return returned


def to_nothing(returned: Any) -> None:
    return None


def train(
    moment: str = "training_step",
    act: Any = None,
    *,
    rank: int | None = 1,
    model: Callable[..., Injected] = Injected,
    toy: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    resume: str | None = None,
    keep: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    epochs: int = 1,
    samples: int = 4,
    folder: str,
    **options: Any,
) -> int:
    """Body: train on five batches, with something that happens at one moment on one rank; return the steps."""
    trainer = make_trainer(
        GradAvgStrategy(**{"check_replicas_every_n_steps": 1, **(strategy or {})}),
        max_epochs=epochs,
        use_distributed_sampler=False,
        enable_checkpointing=True,
        callbacks=[*callbacks, ModelCheckpoint(folder, **(keep or {"save_top_k": -1}))],
        default_root_dir=folder,
        **options,
    )
    batches = loader([[1.0, 2.0, 3.0, 4.0][:samples]] * 5)
    trainer.fit(model(moment, act, rank, **(toy or {})), batches, loader([[0.0]]), ckpt_path=resume)
    return trainer.global_step


def train_quickly(**given: Any) -> int:
    """Body: train, where a rank that fails waits a second for the others to do the same."""
    with mock.patch("lightning_gradavg.faults.last_words._PATIENCE_SECONDS", 1.0):
        return train(**given)


class Sharded(Injected):
    """One weight, in shards."""

    def __init__(self, rank: int) -> None:
        super().__init__(act=fail, rank=rank)
        del self.w
        self.net = One([1.0, 2.0])

    def configure_model(self) -> None:
        """Shard the weight."""
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def losses(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the losses of samples."""
        return self.net(batch.double()[:, None]).sum(-1)


def train_sharded(*, rank: int, callbacks: Sequence[Callback] = (), folder: str) -> None:
    """Body: fail on one rank of a sharded model, where a checkpoint gathers the shards."""
    keep = ModelCheckpoint(folder, save_last=True, **_ON_EXCEPTION)
    trainer = make_trainer(
        GradAvgModelParallelStrategy(),
        max_epochs=1,
        use_distributed_sampler=False,
        enable_checkpointing=True,
        default_root_dir=folder,
        callbacks=[*callbacks, keep],
    )
    with mock.patch("lightning_gradavg.faults.last_words._PATIENCE_SECONDS", 1.0):
        trainer.fit(Sharded(rank), loader([[1.0, 2.0, 3.0, 4.0]] * 5))


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
        timeout: Seconds that a collective waits for the other rank. A run that must not wait has many.
    """

    def __init__(
        self,
        *said: str,
        body: Callable[..., Any] = train,
        codes: tuple[int | None, ...] = (1, 1),
        full: bool = False,
        logged: bool = True,
        timeout: float = 5,
        **args: Any,
    ) -> None:
        self.said, self.codes, self.full, self.logged = (said[0], said[-1]), codes, full, logged
        self.body, self.args, self.timeout = body, args, timeout


_OWN = "ValueError: the user's own error"
_LOST = "nothing was heard from rank {}: lost, killed or stuck"
_START: dict[str, Any] = {"body": train_apart}
_PIECES = {"equivalent_to": "data_parallel", "num_replicas": 4}
_FIXED = {"reproducible": True, "num_replicas": 2}
_REFUSED = "training_step runs the collective c10d::allreduce_, but rank 1 has no samples in this step"

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


# How ModelCheckpoint chooses and writes, when one rank fails.
_KEPT: list[list[dict[str, Any]]] = [
    [{"save_last": last} for last in (True, "link", None)],
    [{"save_top_k": 1}, {"save_top_k": -1}, {"save_top_k": 0}]
    + [{"save_top_k": count, "monitor": name} for count in (1, 2) for name in ("monitored", "metric")],
    [{}, {"every_n_train_steps": 1}, {"every_n_train_steps": 5}],
    [{}, {"save_weights_only": True}],
    [{}, {"enable_version_counter": False}],
]
_SYNCED, _FAILS = (True, False), ("training_step", "validation_step", "on_validation_epoch_end", "on_train_epoch_end")


def _of_exception(rank: int) -> list[str]:
    """Return what both ranks say when one of them fails."""
    said = [f"rank {rank} ended with {_OWN}"] * 2
    said[rank] = _OWN
    return said


def _exchanging(moment: str, rank: int, *, full: bool = False) -> Fault:
    given: dict[str, Any] = {"callbacks": [Exchanging()], "act": fail, "model": Logged, "moment": moment, "rank": rank}
    return Fault(*_of_exception(rank), body=train_quickly, full=full, timeout=40, **given)


def _kept(kept: dict[str, Any], moment: str, rank: int, *, full: bool = True, **toy: Any) -> Fault:
    keep = {**_ON_EXCEPTION, **kept}
    callbacks = [EarlyStopping("monitored", patience=9, check_on_train_epoch_end=False)]
    given: dict[str, Any] = {"keep": keep, "moment": moment, "rank": rank, "toy": toy, "callbacks": callbacks}
    return Fault(*_of_exception(rank), body=train_quickly, act=fail, model=Logged, full=full, timeout=40, **given)


def _all_kept() -> dict[str, Fault]:
    found = {}
    for *parts, synced, moment, rank in covering(*_KEPT, _SYNCED, _FAILS, (0, 1)):
        kept = {name: value for part in parts for name, value in part.items()}
        # Without the names of the options: pytest cuts long ones.
        text = f"checkpoints, {moment} on rank {rank}, {', '.join(map(str, (synced, *kept.values())))}"
        found[text] = _kept(kept, moment, rank, sync_dist=synced)
    return found


# fmt: off
FAULTS = {
    **{f"{what} in {moment} on rank {rank}": _ends(what, moment, rank) for what, moment, rank in product(*_ENDS)},
    "exception in one of several pieces of a step": Fault(
        f"rank 1 ended with {_OWN}", _OWN, act=fail, strategy=_PIECES),
    **_all_kept(),
    "exception, ModelCheckpoint(save_last=True, save_on_exception=True)": _kept(
        {"save_last": True}, "training_step", 1, full=False),
    "exception on rank 0, ModelCheckpoint(save_last='link', monitor, save_on_exception=True)": _kept(
        {"save_last": "link", "monitor": "metric"}, "on_validation_epoch_end", 0, full=False),
    "exception in training_step, and a callback that exchanges": _exchanging("training_step", 1),
    "exception in setup, and a callback that exchanges": _exchanging("setup", 1),
    "exception in training_step on rank 0, and a callback that exchanges": _exchanging("training_step", 0, full=True),
    "exception at the end of validation, and a callback that exchanges": _exchanging(
        "on_validation_epoch_end", 1, full=True),
    "exception in a sharded run": Fault(
        f"rank 1 ended with {_OWN}", _OWN, body=train_sharded, rank=1, timeout=40),
    "exception in a sharded run on rank 0, and a callback that exchanges": Fault(
        _OWN, f"rank 0 ended with {_OWN}", body=train_sharded, rank=0, callbacks=[Exchanging()], timeout=40),
    "SIGTERM": Fault("SIGTERMException", act=terminate, logged=False),
    "Ctrl-C": Fault("rank 1 ended with KeyboardInterrupt", "SystemExit: 1", act=interrupt),
    "a rank comes after the timeout": Fault(_LOST.format(1), "all ranks say the same", act=be_late, full=True),
    **{f"a collective of a rank without samples, {name}": Fault(
        f"rank 1 ended with RuntimeError: {_REFUSED}", _REFUSED, act=sum_over_ranks, samples=1, strategy=strategy)
       for name, strategy in {"split": {"split_batches": True}, "reproducible": _FIXED}.items()},
    "None from training_step": Fault(
        "rank 1 ended with RuntimeError: training_step returned no loss on rank 1", "nonfinite='skip_step'",
        act=to_nothing),
    "None from training_step, where the other rank's gradient is 0": Fault(
        "rank 1 ended with RuntimeError: training_step returned no loss on rank 1", "nonfinite='skip_step'",
        act=to_nothing, model=Flat),
    "a rank begins to log where no other does": Fault(
        "rank 1 ended with RuntimeError: rank 1 begins to log", "in which nothing is logged on rank 0, and nobody",
        model=Begins, strategy={"equivalent_to": "single_device"}),
    "None from the loader": Fault(
        "rank 1 ended with RuntimeError: the train loader yielded None on rank 1", "on rank 1. Lightning skips",
        moment="on_before_batch_transfer", act=to_nothing),
    # Gloo aborts the rank that receives more than it expects, in a thread of its own.
    "ranks that exchange other shapes": Fault(
        "", _LOST.format(0), codes=(-6, 1), rank=None, act=exchange_other_shapes),
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
        "PytorchStreamReader failed reading zip archive: failed finding central directory", body=train_again,
        torn=True),
    "an older checkpoint on rank 1": Fault(
        "after 10 steps and 2 epochs on rank 0; training begins after 5 steps and 1 epochs on rank 1",
        body=train_again, torn=False),
}
# fmt: on
