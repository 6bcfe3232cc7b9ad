"""Training loaders whose batches are split over the ranks, and the Trainer's options that count batches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_gradavg.batches.chunks import Apart, Chunk, Split, require_same_reach
from lightning_gradavg.batches.order import Behind, LoaderState
from lightning_gradavg.batches.progress import JoinedIterator, NumberedLoader, Progress, join
from lightning_gradavg.lightning_internals import injects_samplers, set_injection_of_samplers
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


_STAND_IN = Chunk(0, 0, (), batch_samples=0, layout=())


class Batches(Part):
    """Every rank has batches of its own, as in stock DDP, some of them perhaps fewer than others.

    Attributes:
        joins: Whether some ranks may have fewer batches than others.
        stepping: Whether a training step runs.
    """

    joins = stepping = False

    def setup(self, run: Run) -> None:
        """Forget an earlier run."""
        super().setup(run)
        self.joins = False

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
        """Whether the batch in training is the rank's own, and how many ranks have none."""
        if not self.joins:
            return True, 0
        world_size, number = self.run.world.size, self.run.loop.ready - 1
        loaders = [each.loader for each in self.run.loop.iterators if isinstance(each, JoinedIterator)]
        fetched = [now for now in (loader.behind.get(number) for loader in loaders) if now is not None]
        missing: int = max((world_size - each.tally.read()[0] for each in fetched), default=0)
        if missing > 0 and len(self.run.loop.iterators) > 1:
            raise RuntimeError(
                f"one of the {len(self.run.loop.iterators)} train loaders has no more batches on {missing} of"
                f" {world_size} ranks: no weight of the step can count one loader and not the other. Give all ranks the"
                " same number of batches, or read them by one loader."
            )
        return all(each.own for each in fetched), missing

    @property
    def _ranks(self) -> int:
        """Number of ranks whose batch in training counts."""
        return self.run.world.size - self.missing

    @property
    def having(self) -> int | None:
        """Within a training step whose samples count on some ranks only, the number of those; None else."""
        return self._ranks if self.stepping and 0 < self._ranks < self.run.world.size else None

    @property
    def _counts(self) -> bool:
        """Whether the samples of the batch in training count, or only keep the rank busy."""
        chunk = self.chunk
        return chunk is None or not chunk.stand_in

    def counted(self, value: Any) -> Any:
        """Return what this rank adds to a sum over those ranks."""
        return value if self._counts else torch.zeros_like(value)

    def process_dataloader(self, loader: Any) -> Any:
        """Return the loader, which ends on all ranks at once. A collective operation."""
        joined = join(loader, self.run.world, self.run.device, self.run.loop)
        self.joins |= joined is not loader
        return joined

    def training_step(self) -> AbstractContextManager[Any]:
        """Have a step whose samples do not count leave no trace."""
        return nullcontext() if self._counts else stand_in(self.run.module)

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save that there is nothing to go on with."""
        saved["loaders"] = None


class SplitBatches(Batches):
    """Splits the training loaders of a run."""

    missing, _splits = 0, False
    _progress: Progress

    def __init__(self, options: Options) -> None:
        self._options = options
        self._states: list[LoaderState] | None = None

    def configure_ddp(self, run: Run) -> None:
        """Begin to split the loaders of a run."""
        if is_param_in_hook_signature(run.module.training_step, "dataloader_iter", explicit=True):
            raise ValueError(
                "split_batches=True cannot serve a training_step(dataloader_iter): it fetches its own batches."
                " Let training_step take (batch, batch_idx), or set split_batches=False."
            )
        super().configure_ddp(run)
        options = self._options
        self._split = Split(
            run.world.rank, run.world.size, options.num_replicas, options.max_device_batch_size, options.replicated
        )
        self._splits, self._progress = True, Progress(run.loop)
        self._injects_samplers = injects_samplers(run.trainer)
        self._loaders: list[NumberedLoader] = []

    @property
    def chunk(self) -> Chunk | None:
        """What stands behind the batch in training; of several loaders' batches the first that has one."""
        return next((each.chunk for each in self._behind if each is not None), None)

    @property
    def _ranks(self) -> int:
        chunk = self.chunk
        return self.run.world.size if chunk is None else chunk.ranks

    @property
    def _behind(self) -> list[Behind | None]:
        return self._progress.behind(self.run.loop.ready - 1) if self._splits else []

    def prepare_loaders(self, stage: str) -> None:
        """Have Lightning leave the samplers of training loaders alone, which can be told from others here only."""
        if self._splits:
            set_injection_of_samplers(self.run.trainer, self._injects_samplers and stage != "train")
            self._loaders = [] if stage == "train" else self._loaders

    def process_dataloader(self, loader: Any) -> NumberedLoader:
        """Return a training loader of this rank's parts of the batches. A collective operation."""
        split = NumberedLoader(loader, self._split, self.run.world, self._progress)
        if self._states is not None and len(self._loaders) < len(self._states):
            split.load_state_dict(self._states[len(self._loaders)])
        self._loaders.append(split)
        rank_zero_info(f"GradAvgStrategy: {split.describe()}")
        return split

    def on_train_start(self) -> None:
        """Begin training, with the loaders set up and the progress of a checkpoint restored.

        Raises:
            ValueError: If the checkpoint is of the middle of an epoch of several loaders.
        """
        self._progress.end_set_up()
        states, self._states = self._states, None
        if states is None:
            return
        within = [state["batches"] for state in states if not state["complete"]]
        if any(within) and max(len(states), len(self._loaders)) > 1:
            raise ValueError(
                f"the checkpoint was saved within an epoch, after {max(within)} batches of one of {len(states)} train"
                f" loaders, and this run has {len(self._loaders)}: with several, training resumes only from the end of"
                " an epoch. Resume from a checkpoint that was saved there, or read the data by one loader."
            )
        fit_loop = self.run.trainer.fit_loop
        epochs: Any = fit_loop.epoch_progress
        if epochs.total.ready == epochs.total.processed:
            # Resumed at the last batch of an epoch, Lightning 2.6 ends it in `reset`, but takes itself to be within it:
            # the next epoch would not count as begun, and another checkpoint would not resume it.
            fit_loop.reset_restart_stage()
        self.run.loop.restart_at(next(iter(within), self.run.loop.processed))

    def on_train_batch_start(self) -> None:
        """Note that a batch is about to be trained on."""
        chunks = [each.chunk for each in self._progress.arrive()]
        if len(chunks) > 1:
            require_same_reach(chunks)

    def slices(self, batch: Any) -> list[ReplicaSlice]:
        """Cut the rank's batch in training, of each of several loaders, into its replicas, in order.

        A stand-in is the batch itself.
        """
        chunk = self.chunk
        assert chunk is not None, "slices() needs a batch that is in training"
        if self._options.num_replicas is None and len(chunk.pieces) <= 1:
            return [ReplicaSlice(chunk.pieces[0].replica if chunk.pieces else None, chunk.samples, batch)]
        try:
            structure = self.run.loop.structure
            # On ranks without samples, too: all raise, or none.
            cut = [
                _cut_out(part, behind.chunk) if behind else [None] * len(chunk.pieces)
                for part, behind in zip(structure.flatten_up_to(batch), self._behind, strict=True)
            ]
        except ValueError as error:
            raise ValueError(
                f"training_step gets a batch of type {type(batch).__name__} that is not as the train loader yielded it,"
                f" so it cannot be cut into replicas: {error}. Have on_before_batch_transfer and"
                " on_after_batch_transfer keep structure and number of samples, or change them in training_step."
            ) from error
        if not chunk.pieces:
            return [ReplicaSlice(None, 0, batch)]
        rows = zip(chunk.pieces, zip(*cut, strict=True), strict=True)
        return [ReplicaSlice(at.replica, at.stop - at.start, structure.unflatten(row)) for at, row in rows]

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the loaders' states here: Lightning would load them only within an epoch, and not if they were there."""
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        saved["loaders"] = progress.pop("combined_loader", None)

    def load(self, saved: Saved) -> None:
        """Go on, in the next run, where a checkpoint was written."""
        self._states = saved.get("loaders")

    def teardown(self) -> None:
        """Have Lightning treat samplers as it did."""
        self._states = None
        if self._splits:
            self._splits = False
            set_injection_of_samplers(self.run.trainer, self._injects_samplers)


def _cut_out(batch: Any, chunk: Chunk) -> Sequence[Any]:
    """Return the samples of each of the rank's pieces."""
    if isinstance(batch, Apart):
        return batch
    if (found := batch_samples(batch)) != chunk.stop - chunk.start:
        raise ValueError(f"it has {found} samples where the train loader yielded {chunk.stop - chunk.start}")
    return [slice_batch(batch, start - chunk.start, stop - chunk.start) for _, start, stop in chunk.pieces]
