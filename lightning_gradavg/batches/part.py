"""Training loaders whose batches are split over the ranks, and the Trainer's options that count batches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_gradavg.batches.chunks import Chunk, Split, even_parts, require_same_reach
from lightning_gradavg.batches.collate import Apart
from lightning_gradavg.batches.joined import fetched_now, join
from lightning_gradavg.batches.loader import BatchSplitter
from lightning_gradavg.batches.order import Behind
from lightning_gradavg.batches.progress import NumberedLoader, Progress
from lightning_gradavg.lightning_internals import TrainingLoop, injects_samplers, set_injection_of_samplers
from lightning_gradavg.options import Options
from lightning_gradavg.part import Part, Run, Saved
from lightning_gradavg.stand_in import stand_in
from lightning_gradavg.tree import batch_samples, slice_batch

__all__ = ["Batches", "ReplicaSlice", "SplitBatches"]


class ReplicaSlice(NamedTuple):
    """One replica's part of the batch in training; a stand-in is of no replica (None), and 0 of its samples count."""

    replica: int | None
    samples: int
    batch: Any


_STAND_IN = Chunk(0, 0, (), ranks=1, batch_samples=0, batch_replicas=0)


class Batches(Part):
    """Every rank has batches of its own, as in stock DDP, some of them perhaps fewer than others.

    Attributes:
        joins: Whether some ranks may have fewer batches than others.
        stepping: Whether a training step runs.
    """

    joins = stepping = False
    _loop: TrainingLoop | None = None

    def setup(self, run: Run) -> None:
        """Forget an earlier run."""
        super().setup(run)
        self.joins, self._loop = False, None

    @property
    def accumulation(self) -> int:
        """Loader batches per optimizer step, which is what the user's `accumulate_grad_batches` counts."""
        trainer: Any = self.run.trainer
        schedules = (each for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler))
        schedule = next(schedules, None)  # it writes the Trainer's value when the epoch begins
        if schedule is not None:
            return int(schedule.get_accumulate_grad_batches(trainer.current_epoch))
        return int(trainer.accumulate_grad_batches)

    @property
    def chunk(self) -> Chunk | None:
        """What stands behind the batch in training; None where it is the rank's own."""
        return None if self._fetched[0] else _STAND_IN

    @property
    def missing(self) -> int:
        """Number of ranks that have no batch of their own now."""
        return self._fetched[1]

    @property
    def _fetched(self) -> tuple[bool, int]:
        return fetched_now(self._loop, self.run.world.size) if self.joins and self._loop is not None else (True, 0)

    @property
    def _ranks(self) -> int:
        """Number of ranks whose batch in training counts."""
        return self.run.world.size - self.missing

    @property
    def having(self) -> int | None:
        """Within a training step whose samples count on some ranks only, the number of those; None else."""
        return self._ranks if self.stepping and 0 < self._ranks < self.run.world.size else None

    def counted(self, value: Any) -> Any:
        """Return what this rank adds to a sum over those ranks."""
        chunk = self.chunk
        return torch.zeros_like(value) if chunk is not None and chunk.stand_in else value

    def process_dataloader(self, loader: Any) -> Any:
        """Return the loader, which ends on all ranks at once. A collective operation."""
        self._loop = TrainingLoop(self.run.trainer.fit_loop)
        joined = join(loader, self.run.world, self.run.device, self._loop)
        self.joins |= joined is not loader
        return joined

    def training_step(self) -> AbstractContextManager[Any]:
        """Have a step whose samples do not count leave no trace."""
        chunk = self.chunk
        return stand_in(self.run.module) if chunk is not None and chunk.stand_in else nullcontext()

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save that there is nothing to go on with."""
        saved["loaders"] = None


class SplitBatches(Batches):
    """Splits the training loaders of a run."""

    _splitter: BatchSplitter | None = None

    def __init__(self, options: Options) -> None:
        self._options = options
        self._saved: Saved = {}

    def configure_ddp(self, run: Run) -> None:
        """Begin to split the loaders of a run."""
        trainer, options = run.trainer, self._options
        if is_param_in_hook_signature(run.module.training_step, "dataloader_iter", explicit=True):
            raise ValueError(
                "split_batches=True cannot serve a training_step(dataloader_iter): it fetches its own batches."
                " Let training_step take (batch, batch_idx), or set split_batches=False."
            )
        super().configure_ddp(run)
        self._splitter = BatchSplitter(
            Split(run.world.rank, run.world.size, options.num_replicas, options.max_device_batch_size),
            run.world,
            whole_batches=options.replicated,
        )
        self._loop = TrainingLoop(trainer.fit_loop)
        self._progress = Progress(self._loop, lambda: self.accumulation)
        self._injects_samplers = injects_samplers(trainer)
        resumed, self._saved = self._saved, {}
        self._states: list[Any] | None = resumed.get("loaders")
        # Of an earlier version, which had Lightning count parts of batches.
        self._parts_before = resumed.get("micro_batches", 1)
        self._loaders: list[NumberedLoader] = []

    @property
    def chunk(self) -> Chunk | None:
        """What stands behind the batch in training; of several loaders' batches the first that has one."""
        return next((each.chunk for each in self._behind if each is not None), None)

    @property
    def missing(self) -> int:
        """None: all ranks know what stands behind the batch."""
        return 0

    @property
    def _ranks(self) -> int:
        chunk = self.chunk
        return self.run.world.size if chunk is None else chunk.ranks

    @property
    def _behind(self) -> list[Behind | None]:
        return [] if self._splitter is None else self._progress.in_training()

    def prepare_loaders(self, stage: str) -> None:
        """Have Lightning leave the samplers of training loaders alone.

        The only moment at which training and evaluation loaders can be told apart and their samplers kept.
        """
        if self._splitter is not None:
            set_injection_of_samplers(self.run.trainer, self._injects_samplers and stage != "train")
            self._loaders = [] if stage == "train" else self._loaders

    def process_dataloader(self, loader: Any) -> NumberedLoader:
        """Return a training loader of this rank's parts of the batches. A collective operation."""
        assert self._splitter is not None
        split = self._splitter.wrap(loader, partial(NumberedLoader, progress=self._progress))
        place = len(self._loaders)
        self._loaders.append(split)
        if self._states is not None and place < len(self._states):
            split.load_state_dict(self._states[place])
        rank_zero_info(f"GradAvgStrategy: {split.describe()}")
        return split

    def on_train_start(self) -> None:
        """Begin training, with the loaders set up and the progress of a checkpoint restored.

        Raises:
            ValueError: If the checkpoint is of a run with other loaders, or of the middle of an epoch of several.
        """
        self._progress.end_set_up()
        states, self._states = self._states, None
        if states is None:
            return
        assert self._loop is not None
        loaders = self._loaders
        if len(states) != len(loaders):
            raise ValueError(
                f"the checkpoint holds the states of {len(states)} train loaders, and this run has {len(loaders)}."
                " Resume with the train loaders of the run that saved it."
            )
        within = [each.start["batches"] for each in loaders if each.start and not each.start["complete"]]
        if len(states) > 1 and any(within):
            raise ValueError(
                f"the checkpoint was saved within an epoch, after {max(within)} batches of one of {len(states)} train"
                " loaders: with several, training resumes only from the end of an epoch. Resume from a checkpoint that"
                " was saved there, or read the data by one loader."
            )
        loop = self.run.trainer.fit_loop
        epochs: Any = loop.epoch_progress
        if epochs.total.ready == epochs.total.processed:
            # Resumed at the last batch of an epoch, Lightning 2.6 ends it in `reset`, but takes itself to be within it:
            # the next epoch would not count as begun, and another checkpoint would not resume it.
            loop.reset_restart_stage()
        self._loop.restart_at(next(iter(within), self._loop.processed // self._parts_before))

    def on_train_batch_start(self) -> None:
        """Note that a batch is about to be trained on."""
        chunks = [each.chunk for each in self._progress.arrive() if each is not None]
        if len(chunks) > 1:
            require_same_reach(chunks, self._options.num_replicas)

    def slices(self, batch: Any) -> list[ReplicaSlice]:
        """Cut the rank's batch in training, as `training_step` gets it, into its replicas, in order.

        Several loaders' batches are each cut, and keep their structure. A stand-in is the batch itself.
        """
        chunk = self.chunk
        assert chunk is not None, "slices() needs a batch that is in training"
        assert self._loop is not None
        chunks = [each and each.chunk for each in self._behind]
        pieces = max((each.pieces for each in chunks if each is not None), key=len)
        if self._options.num_replicas is None and len(pieces) <= 1:
            return [ReplicaSlice(pieces[0].replica if pieces else None, chunk.samples, batch)]
        structure = self._loop.structure
        try:
            parts = structure.flatten_up_to(batch)
        except ValueError as error:
            raise ValueError(
                f"the batch of type {type(batch).__name__} that training_step gets does not have the structure of the"
                f" train loaders any more, so it cannot be cut into replicas. {_KEEP} one batch for each loader."
            ) from error
        # On ranks without samples, too: all raise, or none.
        cut = [_cut_out(part, each, len(pieces)) for part, each in zip(parts, chunks, strict=True)]
        if not pieces:
            return [ReplicaSlice(None, 0, batch)]
        return [
            ReplicaSlice(piece.replica, stop - start, structure.unflatten(row))
            for piece, (start, stop), row in zip(
                pieces, _bounds(chunk, len(pieces)), zip(*cut, strict=True), strict=True
            )
        ]

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the loaders' states here: Lightning would load them only within an epoch, and not if they were there."""
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        saved["loaders"] = progress.pop("combined_loader", None)

    def load(self, saved: Saved) -> None:
        """Go on, in the next run, where a checkpoint was written."""
        self._saved = saved

    def teardown(self) -> None:
        """Have Lightning treat samplers as it did."""
        if self._splitter is None:
            return
        self._splitter = None
        set_injection_of_samplers(self.run.trainer, self._injects_samplers)


_KEEP = "Have on_before_batch_transfer and on_after_batch_transfer keep"


def _bounds(chunk: Chunk, count: int) -> list[tuple[int, int]]:
    """Return the bounds of the pieces, as many as the largest of several loaders' batches has."""
    pieces = [(start, stop) for _, start, stop in chunk.pieces]
    return pieces if len(pieces) == count else even_parts(chunk.start, chunk.stop, count)


def _cut_out(batch: Any, chunk: Chunk | None, count: int) -> Sequence[Any]:
    """Return the samples of each of the rank's pieces; None of a loader that has no more."""
    if chunk is None:
        return [None] * count
    if isinstance(batch, Apart) and len(batch) == count:
        return batch
    if not isinstance(batch, Apart) and batch_samples(batch) != chunk.stop - chunk.start:
        raise ValueError(
            f"training_step gets a batch of {batch_samples(batch)} samples where the train loader yielded"
            f" {chunk.stop - chunk.start}, so it cannot be cut into replicas. {_KEEP} the number of samples, or change"
            " it in training_step."
        )
    if isinstance(batch, Apart) or chunk.samples < count:
        raise RuntimeError(
            f"a train loader yielded {chunk.samples} samples for this rank in {len(chunk.pieces)} parts beside"
            f" another's in {count}, so some part has samples of one loader and none of another. Set drop_last=True,"
            " raise max_device_batch_size, or use equal batch sizes."
        )
    bounds = _bounds(chunk, count) if count > 0 else []
    return [slice_batch(batch, start - chunk.start, stop - chunk.start) for start, stop in bounds]
