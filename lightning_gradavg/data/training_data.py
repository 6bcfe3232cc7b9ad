"""Training loaders whose batches are split over the ranks, and the Trainer's options that count batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_gradavg.data.batches import Chunk, Split
from lightning_gradavg.data.collated import batch_samples, slice_batch
from lightning_gradavg.data.loaders import BatchSplitter, SplitLoader

__all__ = ["ReplicaSlice", "SplitTraining", "as_one_stand_in"]


class ReplicaSlice(NamedTuple):
    """One replica's part of the batch in training.

    Attributes:
        replica: The replica, from 0, over all ranks; None for a stand-in.
        samples: Number of samples that count: 0 for a stand-in.
        batch: Its part of the batch.
    """

    replica: int | None
    samples: int
    batch: Any


class SplitTraining:
    """Splits the training loaders of one run.

    Lightning counts what a loader yields, which are this rank's micro-batches. The options that a user gave in loader
    batches are multiplied by the micro-batches of each, and put back at the end of the run.

    Args:
        trainer: The Trainer.
        module: The module that it trains.
        max_device_batch_size: Most samples in a micro-batch, or None.
        group: The process group that the batches are split over.
        num_replicas: Number of replicas of every loader batch, all of a rank's in one micro-batch; None for one per
            rank.
        whole_batches: Whether every rank reads whole batches, see `lightning_gradavg.data.whole_batches`.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        max_device_batch_size: int | None,
        group: dist.ProcessGroup | None,
        *,
        num_replicas: int | None = None,
        whole_batches: bool = False,
    ) -> None:
        if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            raise ValueError(
                "split_batches=True cannot serve a training_step(dataloader_iter): it takes batches past the strategy."
                " Let training_step take (batch, batch_idx), or set split_batches=False."
            )
        self._trainer, self._module = trainer, module
        self._group: Any = group if group is not None else dist.group.WORLD
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        self.splitter = BatchSplitter(
            Split(rank, world_size, num_replicas, max_device_batch_size),
            None if dist.get_world_size() == 1 else _broadcast,
            None if world_size == 1 else self._agree,
            whole_batches,
        )
        self.splitter.epoch_ended = trainer.fit_loop.epoch_loop._num_ready_batches_reached
        self._saved_micro_batches: int | None = None
        connector = trainer._accelerator_connector
        self._injects_samplers = connector.use_distributed_sampler
        self._accumulation = trainer.accumulate_grad_batches
        self._limit, self._val_interval = trainer.limit_train_batches, trainer.val_check_interval
        self._scheduled = any(
            isinstance(callback, GradientAccumulationScheduler)
            for callback in trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        )
        self._epoch: int | None = None
        self.chunk: Chunk | None = None

    @property
    def accumulation(self) -> int:
        """Loader batches per optimizer step, which is what the user's `accumulate_grad_batches` counts."""
        return self._accumulation

    @property
    def micro_batches(self) -> int:
        """Micro-batches per loader batch."""
        return self.splitter.micro_batches

    def before_loaders(self, *, training: bool) -> None:
        """Have Lightning leave the samplers of the loaders that it is about to prepare alone, or not."""
        self._trainer._accelerator_connector.use_distributed_sampler = self._injects_samplers and not training

    def wrap(self, loader: Any) -> SplitLoader:
        """Return a training loader of this rank's micro-batches. A collective operation."""
        split = self.splitter.wrap(loader)
        count = self.micro_batches
        if count > 1 and not self._module.automatic_optimization:
            raise ValueError(
                f"max_device_batch_size={self.splitter.split.max_samples} cuts every batch into {count} micro-batches,"
                " between which a training_step in manual optimization would step. Use automatic optimization, or cut"
                " the batches in training_step."
            )
        self._count_micro_batches(split, count)
        return split

    def take(self) -> Chunk | None:
        """Note and return what stands behind the batch to train on now."""
        if self._epoch != self._trainer.current_epoch:
            self._epoch = self._trainer.current_epoch
            self._round_validation()  # Lightning computes it anew where it reloads the loaders
            if self._scheduled:
                # The callback writes it at the start of every epoch, in loader batches.
                self._accumulation = self._trainer.accumulate_grad_batches
                self._accumulate()
        loader = self._trainer.fit_loop._combined_loader
        self.chunk = self.splitter.take(loader)
        return self.chunk

    def slices(self, batch: Any) -> list[ReplicaSlice]:
        """Cut the rank's batch in training, as `training_step` gets it, into its replicas.

        Returns:
            The replicas in order, each with its part of the batch; of several loaders' batches each with its part of
            every one, in the same structure. For a stand-in the batch itself, of no replica and no samples.

        Raises:
            ValueError: If the batch no longer has the structure or the number of samples that the loaders yielded.
        """
        assert self.chunk is not None, "slices() needs a batch that take() has noted"
        if self.splitter.split.replicas is None:
            return [ReplicaSlice(self.chunk.replica, self.chunk.samples, batch)]
        loaders: Any = self._trainer.fit_loop._combined_loader
        spec, chunks = loaders._spec, self.splitter.taken
        try:
            parts = spec.flatten_up_to(batch)
        except ValueError as error:
            raise ValueError(
                f"the batch of type {type(batch).__name__} that training_step gets does not have the structure of the"
                " train loaders any more, so it cannot be cut into replicas. Have on_before_batch_transfer and"
                " on_after_batch_transfer keep one batch for each loader."
            ) from error
        for chunk, part in zip(chunks, parts, strict=True):
            # On ranks without samples, too: all raise, or none.
            if chunk is not None and batch_samples(part) != chunk.stop - chunk.start:
                raise ValueError(
                    f"training_step gets a batch of {batch_samples(part)} samples where the train loader yielded"
                    f" {chunk.stop - chunk.start}, so it cannot be cut into replicas. Have on_before_batch_transfer and"
                    " on_after_batch_transfer keep the number of samples, or change it in training_step."
                )
        if self.chunk.stand_in:
            return [ReplicaSlice(None, 0, batch)]
        return [
            ReplicaSlice(
                piece.replica,
                piece.stop - piece.start,
                spec.unflatten(
                    None if chunk is None else _cut_out(part, chunk, position)
                    for chunk, part in zip(chunks, parts, strict=True)
                ),
            )
            for position, piece in enumerate(self.chunk.pieces)
        ]

    def resume(self, states: Sequence[Any], micro_batches: int) -> None:
        """Go on where a checkpoint was written.

        Args:
            states: Those of the training loaders.
            micro_batches: How many micro-batches a loader batch had in the run that saved it.
        """
        self.splitter.resume(states)
        self._saved_micro_batches = micro_batches

    def start(self) -> None:
        """Begin training, with the loaders set up and the progress of a checkpoint restored."""
        self.splitter.end_set_up(self._trainer.fit_loop._combined_loader)
        saved, self._saved_micro_batches = self._saved_micro_batches, None
        if saved is None:
            return
        # Lightning's progress counts micro-batches of the run that saved the checkpoint.
        loop = self._trainer.fit_loop
        epochs: Any = loop.epoch_progress
        if epochs.total.ready == epochs.total.processed:
            # Resumed at the last batch of an epoch, Lightning 2.6 ends it in `reset`, but takes itself to be within it:
            # the next epoch would not be counted as begun, and not be gone on with after another checkpoint.
            loop.reset_restart_stage()
        progress = loop.epoch_loop.batch_progress
        current: Any = progress.current
        processed = current.processed
        taken = self.splitter.batches_taken or processed // saved
        now = taken * self.micro_batches
        for name in ("ready", "started", "processed", "completed"):
            ahead = getattr(current, name) - processed
            setattr(progress.total, name, getattr(progress.total, name) + now - processed)
            setattr(current, name, now + ahead)

    def restore(self) -> None:
        """Put the Trainer's options back to what the user gave."""
        trainer = self._trainer
        trainer._accelerator_connector.use_distributed_sampler = self._injects_samplers
        trainer.accumulate_grad_batches = self._accumulation
        trainer.limit_train_batches, trainer.val_check_interval = self._limit, self._val_interval

    def _round_validation(self) -> None:
        """Validate after whole loader batches where the user gave a part of the epoch."""
        total, count = self._trainer.fit_loop.max_batches, self.micro_batches
        if isinstance(self._val_interval, float) and total != float("inf"):
            self._trainer.val_check_batch = max(1, int(total // count * self._val_interval)) * count

    def _accumulate(self) -> None:
        self._trainer.accumulate_grad_batches = self._accumulation * self.micro_batches
        self.splitter.window_batches = self._accumulation

    def _count_micro_batches(self, loader: Any, count: int) -> None:
        trainer = self._trainer
        if not self._scheduled:  # the callback insists on 1 until training begins
            self._accumulate()
        if isinstance(self._limit, int):
            trainer.limit_train_batches = self._limit * count
        elif self._limit != 1.0 and count > 1:
            # A part of the micro-batches could end within a loader batch.
            trainer.limit_train_batches = int(len(loader) // count * self._limit) * count
        if isinstance(self._val_interval, int):
            trainer.val_check_interval = self._val_interval * count

    def _agree(self, value: bytes) -> bool:
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return len(set(values)) == 1


def _broadcast(value: Any) -> Any:
    """Return rank 0's value: that of the run, as ranks beside the group may hold other parts of the same replicas."""
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def _cut_out(batch: Any, chunk: Chunk, position: int) -> Any:
    """Return the samples of one of the rank's replicas."""
    _, start, stop = chunk.pieces[position]
    return slice_batch(batch, start - chunk.start, stop - chunk.start)


@contextmanager
def as_one_stand_in(module: LightningModule) -> Iterator[None]:
    """Run a training step whose samples do not count: buffers are put back, and what it logs has batch size 0."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    log: Callable[..., None] = module.log

    def log_nothing(*args: Any, **kwargs: Any) -> None:
        log(*args, **{**kwargs, "batch_size": 0})

    module.log = log_nothing  # type: ignore[method-assign]  # for this step only
    try:
        yield
    finally:
        del module.log
        for buffer, before in buffers:
            # Past autograd, whose backward is still to come: what it computes from the buffers is discarded.
            buffer.data.copy_(before)
