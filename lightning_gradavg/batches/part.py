"""Training loaders whose batches are split over the ranks, and the Trainer's options that count batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_gradavg._lightning.internals import injects_samplers, set_injection_of_samplers
from lightning_gradavg._lightning.options import Options
from lightning_gradavg._lightning.part import Part, Run, Saved
from lightning_gradavg._lightning.stand_in import stand_in
from lightning_gradavg.batches.chunks import STAND_IN, Chunk, Split, cut_pieces
from lightning_gradavg.batches.order import LoaderState, loader_state
from lightning_gradavg.batches.progress import JoinedLoader, NumberedLoader, Progress, join

__all__ = ["Batches", "ReplicaSlice", "SplitBatches"]


class ReplicaSlice(NamedTuple):
    """One replica's part of the batch in training; a stand-in is of no replica (None), and 0 of its samples count."""

    replica: int | None
    samples: int
    batch: Any


class Batches(Part):
    """Every rank has batches of its own, as in stock DDP, some of them perhaps fewer than others.

    Attributes:
        joins: Whether some ranks may have fewer batches than others.
        stepping: Whether a training step runs.
        chunk: What stands behind the batch in training; None where it is the rank's own.
        missing: Number of ranks that have no batch of their own now.
        without_samples: The ranks that have no samples of the batch in training.
    """

    joins = stepping = False
    chunk: Chunk | None = None
    missing = 0
    without_samples: Sequence[int] = ()

    def setup(self, run: Run) -> None:
        """Forget an earlier run."""
        super().setup(run)
        self.joins, self.chunk, self.missing = False, None, 0
        self.without_samples = ()
        self._named = (-1, 0)  # the epoch in which those ranks were named, and their number
        self._loaders: list[Any] = []

    @property
    def idle(self) -> Sequence[int]:
        """Within a training step, the ranks that have no samples in it; none outside of one."""
        return self.without_samples if self.stepping else ()

    @property
    def has_samples(self) -> bool:
        """Whether the samples of the batch in training count, or only keep the rank busy."""
        return self.chunk is None or not self.chunk.stand_in

    def counted(self, value: Tensor) -> Tensor:
        """Return what this rank adds to a sum over the ranks that have samples."""
        return value if self.has_samples else torch.zeros_like(value)

    def prepare_loaders(self, stage: str) -> None:
        """Forget the training loaders that are about to be replaced."""
        self._loaders = [] if stage == "train" else self._loaders

    def process_dataloader(self, loader: Any) -> Any:
        """Return the loader, which ends on all ranks at once. A collective operation."""
        joined = join(loader, self.run.world, self.run.device, self.run.loop)
        if isinstance(joined, JoinedLoader):
            self._loaders.append(joined)
            self.joins = True
        return joined

    @property
    def fetches_within(self) -> bool:
        """Whether `training_step` fetches its own batches."""
        return is_param_in_hook_signature(self.run.module.training_step, "dataloader_iter", explicit=True)

    def on_train_batch_start(self) -> None:
        """Find what stands behind the batch that arrives, unless the step is still to fetch it."""
        if self.joins and self.fetches_within:
            return
        self._arrive(self.run.loop.epoch, self.run.loop.batch_number)

    def _behind(self, epoch: Any, number: int) -> list[Any]:
        """Return what stands behind a batch, of each loader, None where it has none."""
        return [each.behind.get(epoch, {}).get(number) for each in self._loaders]

    def _arrive(self, epoch: Any, number: int) -> None:
        """Find what stands behind a batch."""
        fetched = self._behind(epoch, number)
        world_size = self.run.world.size
        loaders = len(self.run.loop.iterators)
        having = [each.tally.read()[0] for each in fetched if each is not None]
        self.missing = world_size - min(having, default=world_size)
        self.chunk = None if all(each is None or each.own for each in fetched) else STAND_IN
        if self.missing > 0 and loaders > 1:
            raise RuntimeError(
                f"one of the {loaders} train loaders has no more batches on {self.missing} of {world_size} ranks: no"
                " weight of the step can count one loader and not the other. Give all ranks the same number of batches,"
                " or read them by one loader."
            )
        self._name_ranks()

    def _name_ranks(self) -> None:
        """Find which ranks have no samples, if it is another number of them. A collective operation then.

        A rank without batches gets none in the rest of the epoch.
        """
        found = (self.run.trainer.current_epoch, self.missing)
        if found == self._named:
            return
        self._named = found
        of_ranks = self.run.world.gather_integers([self.has_samples]) if self.missing > 0 else []
        self.without_samples = [rank for rank, (has_samples,) in enumerate(of_ranks) if not has_samples]

    def training_step(self) -> AbstractContextManager[Any]:
        """Have a step whose samples do not count leave no trace."""
        if self.joins and self.fetches_within:
            return self._fetching()
        return nullcontext() if self.has_samples else stand_in(self.run.module)

    @contextmanager
    def _fetching(self) -> Iterator[None]:
        """Learn what stands behind the batch of a step that fetches it."""
        with nullcontext() if self.has_samples else stand_in(self.run.module):
            yield
        self._arrive(self.run.loop.epoch, self.run.loop.batch_number)
        if self.missing > 0:
            raise RuntimeError(
                f"{self.missing} of {self.run.world.size} ranks have no more batches, which a"
                " training_step(dataloader_iter) learns too late: it fetches its own. Let training_step take"
                " (batch, batch_idx), or give all ranks the same number of batches."
            )

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save that there is nothing to go on with."""
        saved["loaders"] = None


class SplitBatches(Batches):
    """Splits the training loaders of a run."""

    _injects_samplers: bool | None = None  # as the Trainer has it; None of a run that does not train
    _states: Sequence[LoaderState] | None = None
    _loaders: list[NumberedLoader]

    def __init__(self, options: Options) -> None:
        self._options = options

    def configure_ddp(self, run: Run) -> None:
        """Begin to split the loaders of a run."""
        super().configure_ddp(run)
        if self.fetches_within:
            raise ValueError(
                "split_batches=True cannot serve a training_step(dataloader_iter): it fetches its own batches."
                " Let training_step take (batch, batch_idx), or set split_batches=False."
            )
        options = self._options
        self._split = Split(
            run.world.rank,
            run.world.size,
            replicas=options.shaping_replicas(run.world.size),
            max_samples=options.max_device_batch_size,
            whole=options.replicated,
        )
        self._progress, self._injects_samplers = Progress(run.loop), injects_samplers(run.trainer)

    def prepare_loaders(self, stage: str) -> None:
        """Have Lightning leave the samplers of training loaders alone, which can be told from others here only."""
        super().prepare_loaders(stage)
        if self._injects_samplers is not None:
            set_injection_of_samplers(self.run.trainer, self._injects_samplers and stage != "train")

    def process_dataloader(self, loader: Any) -> NumberedLoader:
        """Return a training loader of this rank's parts of the batches. A collective operation."""
        split = NumberedLoader(loader, self._split, self.run.world, self._progress)
        for state in (self._states or [])[len(self._loaders) :][:1]:
            split.load_state_dict(state)
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
        within = [state["batches"] for state in states if state["snapshots"]]
        if any(within) and max(len(states), len(self._loaders)) > 1:
            raise ValueError(
                f"the checkpoint was saved within an epoch, after {max(within)} batches of one of {len(states)} train"
                f" loaders, and this run has {len(self._loaders)}: with several, training resumes only from the end of"
                " an epoch. Resume from a checkpoint that was saved there, or read the data by one loader."
            )
        self.run.loop.leave_ended_epoch()
        self.run.loop.restart_at(next(iter(within), self.run.loop.processed))

    def _arrive(self, epoch: Any, number: int) -> None:
        behind = self._behind(epoch, number)
        chunks = [each.chunk for each in behind if each is not None]
        _require_same_reach(chunks)
        self.chunk = chunks[0]
        self.without_samples = [rank for rank, pieces in enumerate(self.chunk.layout) if pieces == 0]
        differ = len({chunk.batch_samples for chunk in chunks}) > 1
        if differ and not self.chunk.stand_in and any(chunk.batch_samples % self._split.chunks for chunk in chunks):
            # The ranks' parts of the batches differ in proportion, so no loader's samples weigh a loss over several.
            self.chunk = self.chunk._replace(samples=None)
        self._progress.arrive(number, self._loaders, behind)

    def slices(self, batch: Any) -> list[ReplicaSlice]:
        """Cut the rank's batch in training, of each of several loaders, into its pieces, in order."""
        chunk = self.chunk
        assert chunk is not None, "slices() needs a batch that is in training"
        pieces, parts = chunk.pieces, [batch]
        if max(chunk.layout) > 1:
            try:
                structure = self.run.loop.structure
                # On ranks without samples, too: all raise, or none.
                cut = [
                    cut_pieces(part, loader.now.chunk) if loader.now else [None] * len(pieces)
                    for part, loader in zip(structure.flatten_up_to(batch), self._loaders, strict=True)
                ]
            except ValueError as error:
                raise ValueError(
                    f"training_step gets a batch of type {type(batch).__name__} that is not as the train loader yielded"
                    f" it, so it cannot be cut into replicas: {error}. Have on_before_batch_transfer and"
                    " on_after_batch_transfer keep structure and number of samples, or change them in training_step."
                ) from error
            parts = [structure.unflatten(rows) for rows in zip(*cut, strict=True)]
        return [ReplicaSlice(at.replica, at.samples, part) for at, part in zip(pieces, parts, strict=True)]

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the loaders' states here: Lightning would load them only within an epoch, and not if they were there."""
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        saved["loaders"] = progress.pop("combined_loader", None)

    def load(self, saved: Saved) -> None:
        """Go on, in the next run, where a checkpoint was written."""
        self._states = saved.get("loaders") and [loader_state(state) for state in saved["loaders"]]

    def teardown(self) -> None:
        """Have Lightning treat samplers as it did."""
        self._states = None
        if self._injects_samplers is not None:
            set_injection_of_samplers(self.run.trainer, self._injects_samplers)
            self._injects_samplers = None


def _require_same_reach(chunks: Sequence[Chunk]) -> None:
    """Raise on all ranks unless several loaders' batches are cut into the same pieces: each has one weight."""
    if len({chunk.layout for chunk in chunks}) > 1:
        found = " and ".join(
            f"{chunk.batch_samples} samples in {' + '.join(map(str, chunk.layout))} pieces" for chunk in chunks
        )
        raise RuntimeError(
            f"the batches of the train loaders, now {found} on the ranks, are not cut alike, so some piece has samples"
            " of one loader and none of another. Set drop_last=True, or use equal batch sizes."
        )
