"""What stands around a module when one process replays the samples of several ranks: its strategy, world and loader."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_gradavg.verify.loading import read_epoch
from lightning_gradavg.verify.recorder import Recorder, loss_and_weight
from lightning_gradavg.verify.records import RankBatch, RecordedPiece, RecordedStep, Refused, ReplicaSamples, RunFacts

__all__ = [
    "Group",
    "OneProcess",
    "Replay",
    "ReplayLoader",
    "TakenBatch",
    "batch_norm_of_replicas",
    "world_of_one",
]


class TakenBatch(NamedTuple):
    """A micro-batch that a rank took."""

    window_index: int  # its position in the window of its rank
    rank: int
    rank_batch: RankBatch


Group: TypeAlias = Sequence[TakenBatch]
"""Micro-batches that one process takes as one batch."""


class OneProcess(SingleDeviceStrategy):
    """One device, with what a module may ask of a strategy of several."""

    lr_scale = 1.0
    has_samples = True

    def __init__(self, device: torch.device, recorder: Recorder, facts: RunFacts) -> None:
        super().__init__(device)
        self._recorder = recorder
        self._facts = facts  # of the run

    @property
    def global_batch_size(self) -> int:
        """The samples of the batch."""
        return self._recorder.running.size

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return one loss, as Lightning takes it, normalized as the run's rule does."""
        output = super().training_step(*args, **kwargs)
        loss, weight = loss_and_weight(output)
        if loss is None or self._facts.rule.name != "normalized_sum":
            return output
        if weight is None:
            weight = self._recorder.running.size
        if isinstance(output, Mapping):
            return {**output, "loss": loss / weight}
        return loss / weight

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("weight", None)  # `manual_backward(loss, weight=n)` is for strategies of this package
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def all_gather(self, tensor: Tensor, group: object = None, sync_grads: bool = False) -> Tensor:
        return tensor.unsqueeze(0)  # with its gradient, as one device has it


def _all_gather(tensor_list: list[Tensor], tensor: Tensor, *_: object, **__: object) -> None:
    """Gather in a world of one, with the gradient, so that what a detached gather lacks on several ranks is seen."""
    tensor_list[0].copy_(tensor)


def _all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, *_: object, **__: object) -> None:
    output_tensor.copy_(input_tensor.reshape(output_tensor.shape))


@contextmanager
def world_of_one() -> Iterator[None]:
    """Give the user's code a process group of one rank to ask."""
    replaced: dict[str, Any] = {"all_gather": _all_gather}
    for name in ("all_gather_into_tensor", "all_gather_single"):  # the second is the name from torch 2.13 on
        if hasattr(dist, name):
            replaced[name] = _all_gather_into_tensor
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with mock.patch.multiple(dist, **replaced):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def batch_norm_of_replicas(recorder: Recorder) -> Iterator[None]:
    """Have batch norm normalize the samples of each replica by themselves, as `nn.DataParallel` does.

    Everything else is computed of the whole batch, also its loss. So what a replica's loss counts for is not taken from
    the run.
    """
    stock_batch_norm = nn.functional.batch_norm
    signature = inspect.signature(stock_batch_norm)

    def batch_norm(
        rows: Tensor, mean: Tensor | None, variance: Tensor | None, *options: Any, **named_options: Any
    ) -> Tensor:
        arguments = signature.bind(rows, mean, variance, *options, **named_options).arguments
        if not arguments.get("training", False):
            return stock_batch_norm(rows, mean, variance, *options, **named_options)
        rows_per_sample, rest = divmod(len(rows), recorder.running.size)
        if rest > 0:
            raise Refused(
                f"batch norm gets {len(rows)} rows of {recorder.running.size} samples, so one process does not"
                " know which rows are those of a replica"
            )
        replicas = recorder.running.replicas
        outputs = []
        of_replicas = rows.split([rows_per_sample * replica.samples for replica in replicas])
        for replica, rows_of_replica in zip(replicas, of_replicas, strict=True):
            statistics: tuple[Tensor | None, Tensor | None] = (None, None)
            if replica.is_first:
                statistics = (mean, variance)
            outputs.append(stock_batch_norm(rows_of_replica, *statistics, *options, **named_options))
        return torch.cat(outputs)

    with mock.patch.object(nn.functional, "batch_norm", batch_norm):
        yield


class Replay:
    """Makes the batches of one process, in place of those of the user's loader.

    Args:
        steps: The groups that one process takes in each step, one after the other.
        run: The steps of each rank, which may be more than `steps`.
        recorder: What records the run of one process.
        epoch_length: The number of batches in an epoch; infinity if the run's loader has no length.
        reads: Whether to note what one process would read, where it makes its first iterator.

    Attributes:
        trainer: The Trainer of one process. It is set before training, because it needs the loaders first.
    """

    trainer: Trainer

    def __init__(
        self,
        steps: Sequence[Sequence[Group]],
        run: Sequence[Sequence[RecordedStep]],
        recorder: Recorder,
        epoch_length: float,
        *,
        reads: bool,
    ) -> None:
        self._steps = steps
        self._run = run
        self._recorder = recorder
        self._epochs = [step.epoch for step in run[0]]
        self.epoch_length = epoch_length
        self._reads = reads

    def batches(self, loader: DataLoader[Any]) -> Iterator[object]:
        """Yield the batches of the Trainer's epoch, which `loader` collates."""
        epoch = self.trainer.current_epoch
        if self._reads:
            # Here the process is in the state in which one process would make its own iterator, so the order is its.
            self._reads = False
            first_batches = self._recorder.loading.first_samples(loader, self._samples_of_first_epoch())
            self._recorder.record.reading = read_epoch(loader, first_batches)
        for step, (groups, epoch_of_step) in enumerate(zip(self._steps, self._epochs, strict=False)):
            if epoch_of_step != epoch:
                continue
            for group in groups:
                yield self._batch(loader, group, step)
        # The recorder ended the run within an epoch, when a further batch arrived. It ends this run in the same way.
        last_step = len(self._steps) - 1
        if epoch >= self._epochs[last_step]:
            while True:
                yield self._batch(loader, self._steps[last_step][-1], last_step)

    def _samples_of_first_epoch(self) -> int:
        number = 0
        for groups, epoch in zip(self._steps, self._epochs, strict=False):
            if epoch == self._epochs[0]:
                number += sum(taken.rank_batch.size for group in groups for taken in group)
        return number

    def _batch(self, loader: DataLoader[Any], group: Group, step: int) -> object:
        samples: list[object] = []
        parts = []
        replicas = []
        for taken in group:
            for number, piece in enumerate(taken.rank_batch.pieces):
                samples += [pickle.loads(packed) for packed in piece.packed_samples]
                parts.append(piece.draws)
                replicas.append(ReplicaSamples(piece.size, is_first=taken.rank == 0 and number == 0))
        batch = loader.collate_fn(samples)
        common_parts = [steps[step].common_draws for steps in self._run]
        joined = RecordedPiece(size=len(samples), parts=parts, common_parts=common_parts, replicas=replicas)
        self._recorder.loading.note(batch, joined)
        return batch

    def replace_train_dataloader(self, owner: LightningModule | LightningDataModule) -> None:
        """Have a module or data module return a stand-in for its own loader."""
        own_method = owner.train_dataloader

        def train_dataloader() -> ReplayLoader:
            return ReplayLoader(own_method(), self)

        vars(owner)["train_dataloader"] = train_dataloader


class ReplayLoader:
    """Stands for the user's loader, whose attributes it has, and reads what the ranks took."""

    def __init__(self, loader: DataLoader[Any], replay: Replay) -> None:
        self._loader, self._replay = loader, replay

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):  # as copies and pickles ask
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[object]:
        return self._replay.batches(self._loader)

    def __len__(self) -> int:
        if not math.isfinite(self._replay.epoch_length):
            raise TypeError("the loader has no length")
        return math.ceil(self._replay.epoch_length)
