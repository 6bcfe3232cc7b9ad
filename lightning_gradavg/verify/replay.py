"""What stands around a module when one process replays the samples of several ranks: its strategy, world and loader."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_gradavg.verify.loading import read_epoch
from lightning_gradavg.verify.recorder import Recorder, loss_and_weight
from lightning_gradavg.verify.records import RankBatch, RecordedPiece, RunFacts

__all__ = [
    "Group",
    "OneProcess",
    "Replay",
    "ReplayLoader",
    "TakenBatch",
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
        if loss is None or not self._facts.automatic:
            return output
        if isinstance(output, Mapping):
            return {**output, "loss": self._normalized(loss, weight)}
        return self._normalized(loss, weight)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        weight = kwargs.pop("weight", None)  # `manual_backward(loss, weight=n)` is for strategies of this package
        if not self._facts.automatic:
            closure_loss = self._normalized(closure_loss, weight)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _normalized(self, loss: Any, weight: float | None) -> Any:
        """Return a loss of which the gradient is what the run's rule makes of it."""
        if self._facts.rule.name != "normalized_sum":
            return loss
        if weight is None:
            weight = self._recorder.running.size
        if weight == 0:
            return loss * 0.0  # no term counts, so the run's gradient is zero
        return loss / weight

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
    replaced: dict[str, Any] = {
        "all_gather": _all_gather,
        "all_gather_into_tensor": _all_gather_into_tensor,
        "all_gather_single": _all_gather_into_tensor,  # the name from torch 2.13 on
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with mock.patch.multiple(dist, create=True, **replaced):
            yield
    finally:
        dist.destroy_process_group()


@dataclass
class Replay:
    """Makes the batches of one process, in place of those of the user's loader.

    Attributes:
        steps: The groups that one process takes in each step, one after the other.
        epochs: The epoch of each step.
        recorder: What records the run of one process.
        epoch_length: The number of batches in an epoch; infinity if the run's loader has no length.
        reads: Whether to note what one process would read, where it makes its first iterator.
        epoch: Returns the epoch of the Trainer of one process, which is made later, because it needs the loaders first.
    """

    steps: Sequence[Sequence[Group]]
    epochs: Sequence[int]
    recorder: Recorder
    epoch_length: float
    reads: bool
    epoch: Callable[[], int] = int

    def batches(self, loader: DataLoader[Any]) -> Iterator[object]:
        """Yield the batches of the Trainer's epoch, which `loader` collates."""
        epoch = self.epoch()
        groups: list[Group] = []
        for step, epoch_of_step in zip(self.steps, self.epochs, strict=True):
            if epoch_of_step == epoch:
                groups += step
        if self.reads:
            # Here the process is in the state in which one process would make its own iterator, so the order is its.
            self.reads = False
            samples = sum(taken.rank_batch.size for group in groups for taken in group)
            first_batches = self.recorder.loading.first_samples(loader, samples)
            self.recorder.record.reading = read_epoch(loader, first_batches)
        for group in groups:
            yield self._batch(loader, group)
        # The recorder ended the run within an epoch, when a further batch arrived. It ends this run in the same way.
        while epoch >= self.epochs[-1]:
            yield self._batch(loader, self.steps[-1][-1])

    def _batch(self, loader: DataLoader[Any], group: Group) -> object:
        samples: list[object] = []
        parts = []
        for taken in group:
            for piece in taken.rank_batch.pieces:
                samples += [pickle.loads(packed) for packed in piece.packed_samples]
                parts.append(piece.draws)
        batch = loader.collate_fn(samples)
        joined = RecordedPiece(size=len(samples), parts=parts)
        self.recorder.loading.note(batch, joined)
        return batch

    def replace_train_dataloader(self, owner: LightningModule | LightningDataModule) -> None:
        """Have a module or data module return a stand-in for its own loader."""
        own_method = owner.train_dataloader
        vars(owner)["train_dataloader"] = lambda: ReplayLoader(own_method(), self)


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
        if math.isinf(self._replay.epoch_length):
            raise TypeError("the loader has no length")
        return math.ceil(self._replay.epoch_length)
