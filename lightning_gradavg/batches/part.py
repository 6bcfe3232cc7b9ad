"""Training loaders whose batches are split over the ranks, and the Trainer's options that count batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from lightning_gradavg.batches.progress import FetchRecord, JoinedLoader, Progress, TrainingLoader, join

__all__ = ["Batches", "ReplicaSlice", "SplitBatches"]


class ReplicaSlice(NamedTuple):
    """What one replica computes of the batch in training."""

    replica: int | None  # its number; None of a stand-in
    samples: int  # that count: none of a stand-in
    batch: Any  # of the user's own type


class _Shortage(NamedTuple):
    """How many ranks have no batches left, and when."""

    epoch: int
    missing: int


class Batches(Part):
    """Every rank has batches of its own, as in stock DDP, some of them perhaps fewer than others.

    For each batch the strategy calls `on_train_batch_start`, and then the step within `training_step`. A step that
    takes a `dataloader_iter` fetches its own batch, so its record is found after the step.

    Attributes:
        joins: Whether some ranks may have fewer batches than others.
        stepping: Whether a training step runs; the strategy sets it.
        chunk: What this rank has of the batch in training; None where the batch is its own, and counts as a whole.
        missing: Number of ranks that have no batch left.
        without_samples: The ranks that have no samples of the batch in training.
    """

    joins: bool = False
    stepping: bool = False
    chunk: Chunk | None = None
    missing: int = 0
    without_samples: Sequence[int] = ()

    def setup(self, run: Run) -> None:
        """Forget an earlier run."""
        super().setup(run)
        self.joins = False
        self.chunk = None
        self.missing = 0
        self.without_samples = ()
        self._named: _Shortage | None = None  # when `without_samples` was found
        self._joined_loaders: list[JoinedLoader] = []

    @property
    def idle(self) -> Sequence[int]:
        """Within a training step, the ranks that have no samples in it; none outside of one."""
        return self.without_samples if self.stepping else ()

    @property
    def has_samples(self) -> bool:
        """Whether this rank has samples of the batch in training; else it runs a stand-in."""
        return self.chunk is None or not self.chunk.stand_in

    def counted(self, value: Tensor) -> Tensor:
        """Return what this rank adds to a sum over the ranks that have samples."""
        return value if self.has_samples else torch.zeros_like(value)

    def prepare_loaders(self, stage: str) -> None:
        """Forget the training loaders that are about to be replaced."""
        if stage == "train":
            self._joined_loaders = []

    def process_dataloader(self, loader: object) -> object:
        """Return the training loader, which ends on all ranks at once. A collective operation."""
        joined = join(loader, self.run.world, self.run.device, self.run.loop)
        if isinstance(joined, JoinedLoader):
            self._joined_loaders.append(joined)
            self.joins = True
        return joined

    @property
    def fetches_within(self) -> bool:
        """Whether `training_step` fetches its own batches, as Lightning has it if it takes a `dataloader_iter`."""
        return is_param_in_hook_signature(self.run.module.training_step, "dataloader_iter", explicit=True)

    def on_train_batch_start(self) -> None:
        """Find the record of the batch that arrives, unless the step is still to fetch it."""
        if self.joins and self.fetches_within:
            return
        self._arrive(self.run.loop.epoch, self.run.loop.batch_number)

    def _arrive(self, epoch: object, number: int) -> None:
        """Begin to train on a batch of this number in an epoch."""
        world_size = self.run.world.size
        fetched: list[FetchRecord] = []
        for loader in self._joined_loaders:
            record = loader.arrive(epoch, number)
            if record is not None:
                fetched.append(record)
        self.missing = 0
        self.chunk = None
        for record in fetched:
            ranks_with_batch, _ = record.counts.read()
            self.missing = max(self.missing, world_size - ranks_with_batch)
            if not record.has_batch:
                self.chunk = STAND_IN
        loaders = len(self.run.loop.iterators)
        if self.missing > 0 and loaders > 1:
            raise RuntimeError(
                f"one of the {loaders} train loaders has no more batches on {self.missing} of {world_size} ranks: no"
                " weight of the step can count one loader and not the other. Give all ranks the same number of batches,"
                " or read them by one loader."
            )
        self._find_ranks_without_samples()

    def _find_ranks_without_samples(self) -> None:
        """Find which ranks have no samples. A collective operation when their number changes, or the epoch.

        In the rest of an epoch it need not be repeated: a rank that has no batch left gets none.
        """
        shortage = _Shortage(self.run.trainer.current_epoch, self.missing)
        if shortage == self._named:
            return
        self._named = shortage
        if self.missing == 0:
            self.without_samples = ()
            return
        of_ranks = self.run.world.gather_integers([self.has_samples])
        self.without_samples = [rank for rank, (has_samples,) in enumerate(of_ranks) if not has_samples]

    def training_step(self) -> AbstractContextManager[None]:
        """Return the context of a training step, in which a stand-in leaves no trace."""
        if self.joins and self.fetches_within:
            return self._fetching()
        if self.has_samples:
            return nullcontext()
        return stand_in(self.run.module)

    @contextmanager
    def _fetching(self) -> Iterator[None]:
        """Run a training step that fetches its own batch, and refuse it if a rank had none left."""
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
        """Save that there are no loaders to resume."""
        saved["loaders"] = None


class SplitBatches(Batches):
    """Splits the training loaders of a run.

    The calls come in this order: `load`, in a resumed run; `configure_ddp`; for each time that Lightning prepares the
    training loaders, `prepare_loaders` and `process_dataloader` for each; `on_train_start`; then as in `Batches`.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._user_injects_samplers: bool | None = None  # the Trainer's option; None of a run that does not train
        self._states: Sequence[LoaderState] | None = None  # of a checkpoint, until training begins
        self._loaders: list[TrainingLoader] = []

    def setup(self, run: Run) -> None:
        """Forget an earlier run, but keep the states of a checkpoint: `load` may come before."""
        super().setup(run)
        self._loaders = []

    def configure_ddp(self, run: Run) -> None:
        """Begin to split the loaders of a run that trains."""
        super().configure_ddp(run)
        if self.fetches_within:
            raise ValueError(
                "split_batches=True cannot serve a training_step(dataloader_iter): it fetches its own batches."
                " Let training_step take (batch, batch_idx), or set split_batches=False."
            )
        self._split = Split(
            run.world.rank,
            run.world.size,
            replicas=self._options.shaping_replicas(run.world.size),
            max_samples=self._options.max_device_batch_size,
            whole=self._options.replicated,
        )
        self._progress = Progress(run.loop)
        self._user_injects_samplers = injects_samplers(run.trainer)

    def prepare_loaders(self, stage: str) -> None:
        """Turn off sampler injection while Lightning prepares the training loaders, and on again for others.

        This is the only call that knows which loaders come next.
        """
        if stage == "train":
            self._loaders = []
        if self._user_injects_samplers is not None:
            injects = self._user_injects_samplers and stage != "train"
            set_injection_of_samplers(self.run.trainer, injects)

    def process_dataloader(self, loader: object) -> TrainingLoader:
        """Return a training loader of this rank's parts of the batches. A collective operation."""
        split = TrainingLoader(loader, self._split, self.run.world, self._progress)
        index = len(self._loaders)
        if self._states is not None and index < len(self._states):
            split.load_state_dict(self._states[index])
        self._loaders.append(split)
        rank_zero_info(f"GradAvgStrategy: {split.describe()}")
        return split

    def on_train_start(self) -> None:
        """Begin training, with the loaders set up and the progress of a checkpoint restored.

        Raises:
            ValueError: If the checkpoint is of the middle of an epoch of several loaders.
        """
        self._progress.draws.end_set_up()
        states = self._states
        self._states = None
        if states is None:
            return
        within_epoch = [state["batches"] for state in states if state["snapshots"]]
        # A checkpoint in the first window of an epoch counts no batch: the epoch begins anew, with all its loaders.
        if any(within_epoch) and max(len(states), len(self._loaders)) > 1:
            raise ValueError(
                f"the checkpoint was saved within an epoch, after {max(within_epoch)} batches of one of"
                f" {len(states)} train loaders, and this run has {len(self._loaders)}: with several, training resumes"
                " only from the end of an epoch. Resume from a checkpoint that was saved there, or read the data by one"
                " loader."
            )
        loop = self.run.loop
        loop.leave_ended_epoch()
        batch = loop.processed
        if within_epoch:
            batch = within_epoch[0]
        loop.restart_at(batch)

    def _arrive(self, epoch: object, number: int) -> None:
        records = [loader.records.get(epoch, number) for loader in self._loaders]
        chunks = [record.chunk for record in records if record is not None]
        _require_same_layout(chunks)
        self.chunk = chunks[0]
        if self._differ_in_proportion(chunks) and not self.chunk.stand_in:
            # No loader's samples weigh a loss over several.
            self.chunk = self.chunk._replace(samples=None)
        self.without_samples = [rank for rank, pieces in enumerate(self.chunk.layout) if pieces == 0]
        self._progress.arrive(number, self._loaders, records)

    def _differ_in_proportion(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether the ranks' parts of several loaders' batches may differ in proportion.

        They don't if the batches are of one size, or if each is cut evenly: 8 and 4 samples on 4 ranks are 2 and 1 on
        each.
        """
        sizes = {chunk.batch_samples for chunk in chunks}
        if len(sizes) == 1:
            return False
        return any(size % self._split.chunks != 0 for size in sizes)

    def slices(self, batch: object) -> list[ReplicaSlice]:
        """Return the pieces of this rank's batch in training, in the order in which they are computed.

        The batch is in the structure of the loaders, as hooks have left it: of several loaders, each piece has a part
        of each.
        """
        chunk = self.chunk
        assert chunk is not None, "slices() needs a batch that is in training"
        parts = [batch]
        # Also on ranks with one piece or a stand-in, if another rank has several: all ranks raise, or none.
        if max(chunk.layout) > 1:
            try:
                parts = self._cut(batch, len(chunk.pieces))
            except ValueError as error:
                raise ValueError(
                    f"training_step gets a batch of type {type(batch).__name__} that is not as the train loader yielded"
                    f" it, so it cannot be cut into replicas: {error}. Have on_before_batch_transfer and"
                    " on_after_batch_transfer keep structure and number of samples, or change them in training_step."
                ) from error
        return [
            ReplicaSlice(piece.replica, piece.samples, part) for piece, part in zip(chunk.pieces, parts, strict=True)
        ]

    def _cut(self, batch: object, pieces: int) -> list[object]:
        """Cut a batch into so many pieces, each of the same structure."""
        structure = self.run.loop.structure
        of_loaders: list[Sequence[object]] = []
        for part, loader in zip(structure.flatten_up_to(batch), self._loaders, strict=True):
            if loader.current is None:
                of_loaders.append([None] * pieces)  # the loader has no more, and its part of the batch is None
            else:
                of_loaders.append(cut_pieces(part, loader.current.chunk))
        return [structure.unflatten(parts) for parts in zip(*of_loaders, strict=True)]

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the loaders' states here, and not with Lightning's.

        Lightning would load them only within an epoch, and raise if the resumed run has another number of loaders.
        """
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        saved["loaders"] = progress.pop("combined_loader", None)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Keep the states of a checkpoint for the loaders of the next run."""
        self._states = None
        # Of a run without `split_batches` there are none.
        if saved.get("loaders"):
            self._states = [loader_state(state) for state in saved["loaders"]]

    def teardown(self) -> None:
        """Have Lightning inject samplers as the user has said."""
        self._states = None
        if self._user_injects_samplers is not None:
            set_injection_of_samplers(self.run.trainer, self._user_injects_samplers)
            self._user_injects_samplers = None


def _require_same_layout(chunks: Sequence[Chunk]) -> None:
    """Raise on all ranks unless several loaders' batches are cut into the same pieces: each piece has one weight."""
    if len({chunk.layout for chunk in chunks}) == 1:
        return
    sizes = []
    for chunk in chunks:
        pieces = " + ".join(str(count) for count in chunk.layout)
        sizes.append(f"{chunk.batch_samples} samples in {pieces} pieces")
    raise RuntimeError(
        f"the batches of the train loaders, now {' and '.join(sizes)} on the ranks, are not cut alike, so some piece"
        " has samples of one loader and none of another. Set drop_last=True, or use equal batch sizes."
    )
