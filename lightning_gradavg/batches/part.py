"""Training loaders whose batches are split over the ranks, and the Trainer's options that count batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_gradavg.batches.chunks import Chunk, Split, require_same_reach
from lightning_gradavg.batches.joined import join, taken
from lightning_gradavg.batches.loader import BatchSplitter, SplitLoader
from lightning_gradavg.batches.progress import Progress
from lightning_gradavg.lightning_internals import TrainingLoop, injects_samplers, set_injection_of_samplers
from lightning_gradavg.methods import logged_as
from lightning_gradavg.options import Options
from lightning_gradavg.part import Part, Run, Saved
from lightning_gradavg.tree import batch_samples, slice_batch

__all__ = ["Batches", "ReplicaSlice", "SplitBatches"]


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


_STAND_IN = Chunk(0, 0, (), index=0, count=1, ranks=1, batch_samples=0, batch_replicas=0)


class Batches(Part):
    """Every rank has batches of its own, as in stock DDP, some of them perhaps fewer than others.

    Attributes:
        chunk: What stands behind the batch in training; None where it is the rank's own.
        micro_batches: Micro-batches per loader batch, in the run that began last.
        missing: Number of ranks that have no batch of their own now.
    """

    chunk: Chunk | None = None
    micro_batches: int = 1
    missing = 0
    _joins = False

    def setup(self, run: Run) -> None:
        """Forget an earlier run."""
        super().setup(run)
        self.chunk, self.missing, self._joins = None, 0, False

    @property
    def accumulation(self) -> int:
        """Loader batches per optimizer step, which is what the user's `accumulate_grad_batches` counts."""
        return self.run.trainer.accumulate_grad_batches

    def process_dataloader(self, loader: Any) -> Any:
        """Return the loader, which ends on all ranks at once. A collective operation."""
        joined = join(loader, self.run.world, self.run.device)
        self._joins |= joined is not loader
        return joined

    def on_train_batch_start(self) -> None:
        """Note whether the batch to train on now counts, and how many ranks have none."""
        if self._joins:
            own, self.missing = taken(TrainingLoop(self.run.trainer.fit_loop).iterators, self.run.world.size)
            self.chunk = None if own else _STAND_IN

    def training_step(self) -> AbstractContextManager[Any]:
        """Have a step whose samples do not count leave no trace."""
        stand_in = self.chunk is not None and self.chunk.stand_in
        return _as_stand_in(self.run.module) if stand_in else nullcontext()

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save that there is nothing to go on with."""
        saved |= {"micro_batches": 1, "loaders": None}


_COUNT_BATCHES = ("accumulate_grad_batches", "limit_train_batches", "val_check_interval")


class SplitBatches(Batches):
    """Splits the training loaders of a run.

    Lightning counts what a loader yields, which are this rank's micro-batches. The options that a user gave in loader
    batches are multiplied by the micro-batches of each, and put back at the end of the run.

    Args:
        options: What the user's options come to.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._saved: Saved = {}
        self._progress: Progress | None = None

    def configure_ddp(self, run: Run) -> None:
        """Begin to split the loaders of a run."""
        trainer, options = run.trainer, self._options
        if is_param_in_hook_signature(run.module.training_step, "dataloader_iter", explicit=True):
            raise ValueError(
                "split_batches=True cannot serve a training_step(dataloader_iter): it takes batches past the strategy."
                " Let training_step take (batch, batch_idx), or set split_batches=False."
            )
        super().configure_ddp(run)
        self._progress = Progress(TrainingLoop(trainer.fit_loop), lambda: self.accumulation)
        self._splitter = BatchSplitter(
            Split(run.world.rank, run.world.size, options.num_replicas, options.max_device_batch_size),
            run.world,
            self._progress,
            whole_batches=options.replicated,
        )
        self._given = {name: getattr(trainer, name) for name in _COUNT_BATCHES}
        self._injects_samplers = injects_samplers(trainer)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        self._schedule = next((each for each in callbacks if isinstance(each, GradientAccumulationScheduler)), None)
        self._taken: list[Chunk | None] = []
        self.micro_batches = 1
        self._resumed, self._saved = self._saved, {}
        if self._resumed.get("loaders"):
            self._progress.states = deque(self._resumed["loaders"])

    @property
    def accumulation(self) -> int:
        """Loader batches per optimizer step, which is what the user's `accumulate_grad_batches` counts."""
        if self._schedule is not None:
            return self._schedule.get_accumulate_grad_batches(self.run.trainer.current_epoch)
        count: int = self._given["accumulate_grad_batches"]
        return count

    def prepare_loaders(self, stage: str) -> None:
        """Have Lightning leave the samplers of training loaders alone.

        The only moment at which training and evaluation loaders can be told apart and their samplers kept.
        """
        if self._progress is not None:
            set_injection_of_samplers(self.run.trainer, self._injects_samplers and stage != "train")

    def process_dataloader(self, loader: Any) -> SplitLoader:
        """Return a training loader of this rank's micro-batches. A collective operation."""
        split = self._splitter.wrap(loader)
        self.micro_batches = count = self._splitter.progress.micro_batches
        if count > 1 and not self.run.module.automatic_optimization:
            raise ValueError(
                f"max_device_batch_size={self._options.max_device_batch_size} cuts every batch into {count}"
                " micro-batches, between which a training_step in manual optimization would step."
                " Use automatic optimization, or cut the batches in training_step."
            )
        self._count_micro_batches(split, count)
        rank_zero_info(f"GradAvgStrategy: {split.describe()}")
        return split

    def _count_micro_batches(self, loader: SplitLoader, count: int) -> None:
        trainer, given = self.run.trainer, self._given
        if self._schedule is None:  # the callback insists on 1 until training begins
            trainer.accumulate_grad_batches = self.accumulation * count
        for name in ("limit_train_batches", "val_check_interval"):
            if isinstance(given[name], int):
                setattr(trainer, name, given[name] * count)
        limit = given["limit_train_batches"]
        if isinstance(limit, float) and limit != 1.0 and count > 1:
            # A part of the micro-batches could end within a loader batch.
            trainer.limit_train_batches = int(len(loader) // count * limit) * count

    def on_train_start(self) -> None:
        """Begin training, with the loaders set up and the progress of a checkpoint restored."""
        assert self._progress is not None
        self._progress.end_set_up()
        if self._resumed.get("loaders") is not None:
            self._count_again(self._resumed["micro_batches"], self._progress.resumed_batches)

    def _count_again(self, saved: int, taken: int | None) -> None:
        """Have Lightning's progress count micro-batches of this run, and not of the one that saved the checkpoint."""
        loop = self.run.trainer.fit_loop
        epochs: Any = loop.epoch_progress
        if epochs.total.ready == epochs.total.processed:
            # Resumed at the last batch of an epoch, Lightning 2.6 ends it in `reset`, but takes itself to be within it:
            # the next epoch would not be counted as begun, and not be gone on with after another checkpoint.
            loop.reset_restart_stage()
        progress = loop.epoch_loop.batch_progress
        current: Any = progress.current
        processed = current.processed
        now = (processed // saved if taken is None else taken) * self.micro_batches
        for name in ("ready", "started", "processed", "completed"):
            ahead = getattr(current, name) - processed
            setattr(progress.total, name, getattr(progress.total, name) + now - processed)
            setattr(current, name, now + ahead)

    def on_train_batch_start(self) -> None:
        """Note what stands behind the batch to train on now."""
        assert self._progress is not None
        trainer, count, interval = self.run.trainer, self.micro_batches, self._given["val_check_interval"]
        if self._schedule is not None:
            # The callback writes it at the start of every epoch, in loader batches.
            trainer.accumulate_grad_batches = self.accumulation * count
        if isinstance(interval, float) and trainer.fit_loop.max_batches != float("inf"):
            # After whole loader batches. Lightning computes it anew where it reloads the loaders.
            trainer.val_check_batch = max(1, int(trainer.fit_loop.max_batches // count * interval)) * count
        self._taken = self._progress.take()
        chunks = list(filter(None, self._taken))
        self.chunk = next(iter(chunks), None)
        if len(chunks) > 1:
            require_same_reach(chunks, self._options.num_replicas)

    def slices(self, batch: Any) -> list[ReplicaSlice]:
        """Cut the rank's batch in training, as `training_step` gets it, into its replicas.

        Returns:
            The replicas in order, each with its part of the batch; of several loaders' batches each with its part of
            every one, in the same structure. For a stand-in the batch itself, of no replica and no samples.

        Raises:
            ValueError: If the batch no longer has the structure or the number of samples that the loaders yielded.
        """
        assert self.chunk is not None, "slices() needs a batch that is in training"
        assert self._progress is not None
        pieces = self.chunk.pieces
        whole = [ReplicaSlice(pieces[0].replica if pieces else None, self.chunk.samples, batch)]
        if self._options.num_replicas is None:
            return whole
        structure = self._progress.loop.structure
        try:
            parts = structure.flatten_up_to(batch)
        except ValueError as error:
            raise ValueError(
                f"the batch of type {type(batch).__name__} that training_step gets does not have the structure of the"
                " train loaders any more, so it cannot be cut into replicas. Have on_before_batch_transfer and"
                " on_after_batch_transfer keep one batch for each loader."
            ) from error
        both = list(zip(self._taken, parts, strict=True))
        for chunk, part in both:
            # On ranks without samples, too: all raise, or none.
            if chunk is not None and batch_samples(part) != chunk.stop - chunk.start:
                raise ValueError(
                    f"training_step gets a batch of {batch_samples(part)} samples where the train loader yielded"
                    f" {chunk.stop - chunk.start}, so it cannot be cut into replicas. Have on_before_batch_transfer and"
                    " on_after_batch_transfer keep the number of samples, or change it in training_step."
                )
        cut = [
            ReplicaSlice(
                piece.replica,
                piece.stop - piece.start,
                structure.unflatten(_cut_out(part, chunk, position) for chunk, part in both),
            )
            for position, piece in enumerate(pieces)
        ]
        return cut or whole

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the loaders' states here: Lightning would load them only within an epoch, and not if they were there."""
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        saved |= {"micro_batches": self.micro_batches, "loaders": progress.pop("combined_loader", None)}

    def load(self, saved: Saved) -> None:
        """Go on, in the next run, where a checkpoint was written."""
        self._saved = saved

    def teardown(self) -> None:
        """Put the Trainer's options back to what the user gave."""
        if self._progress is None:
            return
        self._progress, self.chunk = None, None
        set_injection_of_samplers(self.run.trainer, self._injects_samplers)
        for name, value in self._given.items():
            setattr(self.run.trainer, name, value)


def _cut_out(batch: Any, chunk: Chunk | None, position: int) -> Any:
    """Return the samples of one of the rank's replicas; None of a loader that has no more."""
    if chunk is None:
        return None
    _, start, stop = chunk.pieces[position]
    return slice_batch(batch, start - chunk.start, stop - chunk.start)


@contextmanager
def _as_stand_in(module: LightningModule) -> Iterator[None]:
    """Run a training step whose samples do not count: buffers are put back, and what it logs has batch size 0."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with logged_as(module, lambda arguments: {**arguments, "batch_size": 0}):
        yield
    for buffer, before in buffers:
        # Past autograd, whose backward is still to come: what it computes from the buffers is discarded.
        buffer.data.copy_(before)
