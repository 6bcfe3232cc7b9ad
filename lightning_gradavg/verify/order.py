"""The samples that the ranks read, and those that one process reads: read twice, repeated, or in another order."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import RandomSampler

from lightning_gradavg.lightning_internals import BEFORE_TRANSFER
from lightning_gradavg.verify.record import Tape
from lightning_gradavg.verify.reference import Enough, world_of_one
from lightning_gradavg.verify.replay import Piece
from lightning_gradavg.verify.report import Finding, Stage
from lightning_gradavg.verify.rows import digests

__all__ = ["Order", "Stream", "read_stream"]

_NAME = "samples"
_PADDED = (
    "the end of an epoch was not among the steps: there the sampler repeats {} samples, to fill the ranks;"
    " GradAvgStrategy(split_batches=True) repeats none"
)


@dataclass(frozen=True)
class Stream:
    """What one process reads."""

    batches: Sequence[tuple[int, Sequence[bytes]]]  # of every loader batch the epoch and the samples' fingerprints
    shuffles: bool = False  # whether the loader deals the samples at random


class _Reading(LightningModule):
    """Reads the training batches of a module, and trains nothing: no optimizer steps, and nothing of it is asked for.

    Args:
        module: The module, whose hooks that make data are called.
        batches: How many batches to read, at most.
    """

    def __init__(self, module: LightningModule, batches: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._batches, self.shuffles = batches, False
        self.stream: list[tuple[int, tuple[bytes, ...]]] = []
        for name in ("prepare_data", "setup", "train_dataloader"):
            if is_overridden(name, module):
                setattr(self, name, getattr(module, name))

    def read(self, batch: Any, **_: Any) -> Any:
        """Note a batch as the loader made it."""
        loader: Any = self.trainer.train_dataloader
        self.shuffles = isinstance(getattr(loader, "sampler", None), RandomSampler)
        self.stream.append((self.trainer.current_epoch, digests(batch, getattr(loader, "batch_size", None))))
        if len(self.stream) >= self._batches:
            raise Enough
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Train nothing."""

    def configure_optimizers(self) -> None:
        """Step nothing."""


setattr(_Reading, BEFORE_TRANSFER, _Reading.read)

_OF_DATA = frozenset(["max_epochs", "reload_dataloaders_every_n_epochs", "overfit_batches", "precision", "logger"])


def read_stream(module: LightningModule, data: Mapping[str, Any], options: Mapping[str, Any], batches: int) -> Stream:
    """Return the first batches that one process trains on.

    Args:
        module: The module as before training. It is not trained.
        data: The arguments `train_dataloaders` or `datamodule` of `fit`, or none.
        options: The options of the run's Trainer.
        batches: How many batches to read, at most.
    """
    reading = _Reading(module, batches)
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    kept = {name: value for name, value in options.items() if name in _OF_DATA}
    module.trainer = Trainer(strategy=SingleDeviceStrategy(), accelerator="cpu", **{**kept, **quiet})
    with world_of_one(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of a fit without optimizer
        module.trainer.fit(reading, **data)
    return Stream(reading.stream, reading.shuffles)


class Order:
    """Compares what was read.

    Args:
        tapes: What the ranks recorded.
        steps: Every step's position, and the pieces that count in it.
        stream: What one process reads, or None if that is not part of the question.
    """

    def __init__(
        self, tapes: Sequence[Tape], steps: Sequence[tuple[int, Sequence[Piece]]], stream: Stream | None
    ) -> None:
        self._tapes, self._stream, self._facts = tapes, stream, tapes[0].facts
        batches = {position: tapes[0].steps[position].batches for position, _ in steps}
        # In manual optimization several steps are of the same batches.
        first = {batches[position]: (position, pieces) for position, pieces in reversed(steps)}
        self._windows = [
            (position, tapes[0].batches[start].epoch, self._read(pieces))
            for (start, _), (position, pieces) in sorted(first.items())
        ]

    def _read(self, pieces: Sequence[Piece]) -> list[bytes]:
        batches = sorted({(piece.rank, piece.batch) for piece in pieces})
        return [sample for rank, number in batches for sample in self._tapes[rank].batches[number].samples]

    def judge(self) -> tuple[Stage, list[Finding], list[str]]:
        """Return the stage, what it shows, and what is known of steps beyond those that were recorded."""
        twice = [*self._duplicated(), *self._padded()]
        seen = any(finding.cause == "padding" for finding in twice)
        foreseen = [_PADDED.format(self._facts.padded)] * (self._facts.padded > 0 and not seen)
        if twice:
            return Stage(_NAME, "differs", twice[0].step, note=twice[0].detail), twice, foreseen
        if self._stream is None:
            note = "no sample is read twice; the order of one process was not asked for"
            return Stage(_NAME, "equal", note=note), [], foreseen
        return (*self._compared(self._stream), foreseen)

    def _duplicated(self) -> Iterator[Finding]:
        """Yield whether all ranks read the same."""
        reads = [tuple(sample for batch in tape.batches for sample in batch.samples) for tape in self._tapes]
        # Where one process sees equal samples, too, they are equal and not read twice.
        there = Counter(sample for _, samples in (self._stream or Stream([])).batches for sample in samples)
        if len(reads) > 1 and len(set(reads)) == 1 and not Counter(reads[0] * len(reads)) <= there:
            detail = f"all {len(reads)} ranks read the same samples in the same order: the global batch is one rank's"
            yield Finding("duplicated stream", _NAME, detail, 0)

    def _padded(self) -> Iterator[Finding]:
        """Yield the samples that the sampler repeats, where the end of an epoch was recorded."""
        epochs = [batch.epoch for batch in self._tapes[0].batches] if self._facts.padded else []
        ended = [epoch for epoch in sorted(set(epochs)) if epochs.count(epoch) >= self._facts.epoch_batches]
        for epoch in ended[:1]:
            last = max(position for position, of, _ in self._windows if of == epoch)
            here = [sample for _, of, samples in self._windows if of == epoch for sample in samples]
            again = len(here) - len(set(here))
            detail = f"{again} of {len(here)} samples are trained on twice in epoch {epoch}, to fill the ranks"
            yield from [Finding("padding", _NAME, detail, last)] if again else []

    def _compared(self, stream: Stream) -> tuple[Stage, list[Finding]]:
        """Find the first global batch that is not what one process reads at that place of its epoch."""
        taken, shuffled = Counter[int](), self._facts.shuffles or stream.shuffles
        known = {sample for _, samples in stream.batches for sample in samples}
        for step, epoch, samples in self._windows:
            read = [sample for at, of_batch in stream.batches if at == epoch for sample in of_batch]
            here, there = Counter(samples), Counter(read[taken[epoch] : taken[epoch] + len(samples)])
            taken[epoch] += len(samples)
            if here == there:
                continue
            if not shuffled and known.isdisjoint(samples):
                note = "no sample is one that one process reads: they may be transformed at random"
                return Stage(_NAME, "not compared", step, note=note), []
            why = "; a sampler shuffles them, and deals another order to another number of processes" * shuffled
            shared = (here & there).total()
            detail = (
                f"{shared} of the {len(samples)} samples of a global batch are those that one process trains on then"
            )
            finding = Finding("data order", _NAME, detail + why, step, note=shuffled)
            return Stage(_NAME, "note" if shuffled else "differs", step, note=detail + why), [finding]
        return Stage(_NAME, "equal"), []
