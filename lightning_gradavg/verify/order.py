"""The samples that the ranks read, and those that one process reads: read twice, repeated, or in another order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lightning_gradavg.verify.record import Call, Tape
from lightning_gradavg.verify.reference import Stream
from lightning_gradavg.verify.report import Finding, Stage

__all__ = ["Order"]

_NAME = "samples"
_PADDED = (
    "the end of an epoch was not among the steps: there the sampler repeats {} samples, to fill the ranks;"
    " GradAvgStrategy(split_batches=True) repeats none"
)


class Order:
    """Compares what was read.

    Args:
        tapes: What the ranks recorded.
        steps: Every step's position, and the pieces that count in it.
        stream: What one process reads, or None if that is not part of the question.
    """

    def __init__(
        self, tapes: Sequence[Tape], steps: Sequence[tuple[int, Sequence[Call]]], stream: Stream | None
    ) -> None:
        self._tapes, self._stream, self._facts = tapes, stream, tapes[0].facts
        batches = {position: tapes[0].steps[position].batches for position, _ in steps}
        # In manual optimization several steps are of the same batches.
        first = {batches[position]: (position, pieces) for position, pieces in reversed(steps)}
        self._windows = [
            (position, tapes[0].batches[start].epoch, self._read(pieces))
            for (start, _), (position, pieces) in sorted(first.items())
        ]

    def _read(self, pieces: Sequence[Call]) -> list[bytes]:
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
