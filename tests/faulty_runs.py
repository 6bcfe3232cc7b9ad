"""Runs in which something goes wrong, for the rows of `faults.py` and other tests; the ranks end after each run.

The ranks are processes of their own, as a launcher starts them: they may be killed, be stopped, or fail.
"""

from __future__ import annotations

import errno
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import ON_EXCEPTION, Ended, RankPool, make_trainer
from torchmetrics import SumMetric
from toys import OneWeight, Toy, make_loader

from lightning_gradavg import GradAvgModelParallelStrategy, GradAvgStrategy
from lightning_gradavg._lightning.internals import store_of_world


def run_ranks(body: Callable[..., Any], *, world_size: int = 2, timeout: float = 5, **options: Any) -> list[Ended]:
    """Run a body on ranks of its own and return how each of them ended.

    `timeout` is that of the process group, in seconds. `options` are arguments of `RankPool.end` and of the body.
    """
    with closing(RankPool(world_size, patience=timeout)) as pool, warnings.catch_warnings():
        warnings.simplefilter("default")
        return pool.end(body, **options)


# Models and callbacks.


class Injected(Toy):
    """A model in which one method acts on what it returns: on one rank, or on both (None), after so many steps."""

    def __init__(
        self,
        method: str = "training_step",
        act: Callable[[Any], Any] | None = None,
        rank: int | None = 1,
        *,
        after: int = 2,
        **toy: Any,
    ) -> None:
        super().__init__(**toy)
        if act is None:
            return
        original = getattr(self, method)
        # These run before the first step.
        runs_once = method in ("setup", "configure_optimizers")

        def acting(*args: Any, **kwargs: Any) -> Any:
            returned = original(*args, **kwargs)
            if rank not in (None, dist.get_rank()):
                return returned
            if self.global_step < after and not runs_once:
                return returned
            return act(returned)

        setattr(self, method, acting)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing."""


class Other(Injected):
    """The same model, as of another version of the script."""


class Logged(Injected):
    """Logs what callbacks monitor: a number, and a metric whose state torchmetrics gathers."""

    def __init__(self, *args: Any, sync_dist: bool = True, **toy: Any) -> None:
        super().__init__(*args, **toy)
        self.sync_dist = sync_dist
        self.metric = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log both, reduced at the end of the epoch."""
        self.metric.update(1.0)
        self.log("monitored", 1.0, sync_dist=self.sync_dist)
        self.log("metric", self.metric)


class Begins(Injected):
    """Begins to log on rank 1 alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx >= 3 and dist.get_rank() == 1:
            self.log("late", batch.mean())
        return super().training_step(batch, batch_idx)


class Sharded(Injected):
    """A model of two weights in shards, whose training step raises on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(act=fail, rank=rank)
        del self.w
        self.net = OneWeight([1.0, 2.0])

    def configure_model(self) -> None:
        """Shard the weights."""
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # slow to import

        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def losses(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the losses of samples."""
        return self.net(batch.double()[:, None]).sum(-1)


class Exchanging(Callback):
    """Runs every collective of the strategy when the run is interrupted."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Check that each answers with what this rank brings."""
        strategy = trainer.strategy
        local = torch.tensor([1, 4 + dist.get_rank()])
        for operation in ("mean", "sum", dist.ReduceOp.MAX):
            assert local.tolist() == strategy.reduce(local.clone(), reduce_op=operation).tolist()
        assert 2.5 == strategy.reduce(2.5)
        assert 2.0 == strategy.reduce(torch.tensor(2.0), group=dist.group.WORLD)
        for of_all in (True, False):
            assert strategy.reduce_boolean_decision(True, all=of_all)
            assert not strategy.reduce_boolean_decision(False, all=of_all)
        local_of_all_ranks = [local.tolist()] * dist.get_world_size()
        assert local_of_all_ranks == strategy.all_gather(local).tolist()
        assert local_of_all_ranks == pl_module.all_gather({"local": local})["local"].tolist()
        assert "local" == strategy.broadcast("local", 1 - dist.get_rank())
        strategy.barrier("in on_exception")
        assert trainer.log_dir is not None
        trainer.save_checkpoint(f"{trainer.default_root_dir}/in_on_exception.ckpt")
        if isinstance(pl_module, Logged):
            pl_module.metric.update(1.0)
            pl_module.metric.compute()
            assert {"monitored", "metric"} >= set(trainer.callback_metrics)
        if isinstance(strategy, GradAvgModelParallelStrategy):
            assert {} == strategy.lightning_module_state_dict()
            assert {} == strategy.optimizer_state(strategy.optimizers[0])
        elif strategy.optimizers:
            assert 16 == len(strategy.fingerprint())


# Acts: what a method does with what it returns.


class Grows(Injected):
    """Gets another parameter on rank 1 alone, after two steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and dist.get_rank() == 1:
            self.more = torch.nn.Parameter(torch.zeros(1))
        return super().training_step(batch, batch_idx)


class Headed(Injected):
    """Has a parameter that one step of rank 1 does not use, the last by default: a head for rare labels.

    It has a bucket of its own, which DDP reduces last. The ranks take rank 0's buffer after a step of replicas.
    """

    def __init__(self, *args: Any, unused_in: int = 4, **toy: Any) -> None:
        super().__init__(*args, **toy)
        self.unused_in = unused_in
        self.head = torch.nn.Parameter(torch.zeros(300_000))  # DDP's first bucket holds a megabyte
        self.register_buffer("steps", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps.add_(1)
        if batch_idx != self.unused_in or dist.get_rank() != 1:
            batch = batch + self.head.sum()
        return super().training_step(batch, batch_idx)


class UnreadableError(ValueError):
    def __str__(self) -> str:
        raise KeyError("text")


def fail(returned: Any) -> None:
    raise ValueError("the user's own error")


def fail_like_gloo(returned: Any) -> None:
    raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by my own peer")


def fail_unreadably(returned: Any) -> None:
    raise UnreadableError


def send_signal(number: int, returned: Any) -> Any:
    os.kill(os.getpid(), number)
    return returned


def kill(returned: Any) -> Any:
    return send_signal(signal.SIGKILL, returned)


def stop(returned: Any) -> Any:
    return send_signal(signal.SIGSTOP, returned)


def terminate(returned: Any) -> Any:
    return send_signal(signal.SIGTERM, returned)


def interrupt(returned: Any) -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return send_signal(signal.SIGINT, returned)


def fill_disk(returned: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def be_late(returned: Any) -> Any:
    """Come to the exchange when the other rank has given up and ended."""
    store_of_world().wait([f"ended/{1 - dist.get_rank()}"])
    return returned


def exchange_other_shapes(returned: Any) -> Any:
    """Gather 3 numbers on rank 0, and 5 on rank 1."""
    local = torch.ones(3 + 2 * dist.get_rank())
    dist.all_gather([torch.empty_like(local), torch.empty_like(local)], local)
    return returned


def return_none(returned: Any) -> None:
    return None


def add_parameter(module: Any) -> None:
    """Be a `configure_model` that gives the module another parameter."""
    module.more = torch.nn.Parameter(torch.zeros(1))


# Bodies.


def train(
    method: str = "training_step",
    act: Callable[[Any], Any] | None = None,
    *,
    rank: int | None = 1,
    model: Callable[..., Injected] = Injected,
    toy: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    resume: str | None = None,
    model_checkpoint: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    epochs: int = 1,
    samples: int = 4,
    samples_of_first: int | None = None,
    folder: str,
    **options: Any,
) -> int:
    """Body: train on five batches, while a method of the model acts on a rank; return the number of steps.

    Each batch has so many `samples`, but the first one, if `samples_of_first` says so.
    `toy`, `strategy` and `model_checkpoint` are options of the model, of `GradAvgStrategy` and of `ModelCheckpoint`,
    which keeps all checkpoints by default; `options` are those of the Trainer.
    """
    strategy = {"check_replicas_every_n_steps": 1, **(strategy or {})}
    if model_checkpoint is None:
        model_checkpoint = {"save_top_k": -1}
    trainer = make_trainer(
        GradAvgStrategy(**strategy),
        max_epochs=epochs,
        use_distributed_sampler=False,
        enable_checkpointing=True,
        callbacks=[*callbacks, ModelCheckpoint(folder, **model_checkpoint)],
        default_root_dir=folder,
        **options,
    )
    sizes = [samples] * 5
    if samples_of_first is not None:
        sizes[0] = samples_of_first
    batches = make_loader([[1.0, 2.0, 3.0, 4.0][:size] for size in sizes])
    trainer.fit(model(method, act, rank, **(toy or {})), batches, make_loader([[0.0]]), ckpt_path=resume)
    return trainer.global_step


def train_quickly(**options: Any) -> int:
    """Body: train, where a rank that fails waits a second for the others to do the same."""
    with mock.patch("lightning_gradavg.faults.failure_reports._PATIENCE_SECONDS", 1.0):
        return train(**options)


def train_sharded(*, rank: int, callbacks: Sequence[Callback] = (), folder: str) -> None:
    """Body: fail on one rank of a sharded model, where a checkpoint gathers the shards."""
    checkpoints = ModelCheckpoint(folder, save_last=True, **ON_EXCEPTION)
    trainer = make_trainer(
        GradAvgModelParallelStrategy(),
        max_epochs=1,
        use_distributed_sampler=False,
        enable_checkpointing=True,
        default_root_dir=folder,
        callbacks=[*callbacks, checkpoints],
    )
    with mock.patch("lightning_gradavg.faults.failure_reports._PATIENCE_SECONDS", 1.0):
        trainer.fit(Sharded(rank), make_loader([[1.0, 2.0, 3.0, 4.0]] * 5))


def train_differently(folder: str, patch: tuple[str, Any] | None = None, **options: Any) -> int:
    """Body: train on rank 0, and on rank 1 with other options, or with what `mock.patch` puts in place of a name."""
    if dist.get_rank() == 0:
        return train(folder=folder)
    patched: Any = nullcontext()
    if patch is not None:
        name, replacement = patch
        patched = mock.patch(name, replacement)
    with patched:
        return train(folder=folder, **options)


def train_again(is_torn: bool, folder: str) -> int:
    """Body: resume at a checkpoint that is cut off, or on rank 1 at that of the epoch before."""
    train(folder=folder, epochs=2)
    first, second = sorted(Path(folder).glob("*.ckpt"))
    if is_torn and dist.get_rank() == 0:
        os.truncate(second, 1000)
    dist.barrier()
    resume = second
    if not is_torn and dist.get_rank() == 1:
        resume = first
    return train(resume=str(resume), folder=folder, epochs=4)
