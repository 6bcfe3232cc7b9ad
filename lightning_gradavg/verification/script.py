"""The script of a reference run: what the ranks trained on, step by step, joined into global batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_gradavg.verification.records import MicroBatch, Part, Run, Step
from lightning_gradavg.verification.samples import join_batches

__all__ = ["Act", "acts_of", "pairs_of"]

Pair = tuple[int, MicroBatch, "Part | None"]
"""A rank, one of its micro-batches, and the backward of it."""


@dataclass(frozen=True)
class Act:
    """What one call of `training_step` on one process has to reproduce.

    Attributes:
        steps: The positions of the optimizer steps in a run: one, or those that manual optimization takes in a batch.
        epoch: The epoch.
        pairs: Every rank's micro-batches whose samples count, in the order of one process.
    """

    steps: tuple[int, ...]
    epoch: int
    pairs: tuple[Pair, ...]

    def join(self) -> object:
        """Return the global batch.

        Raises:
            ValueError: If the micro-batches cannot be joined.
        """
        return join_batches([micro_batch.batch for _, micro_batch, _ in self.pairs])


def acts_of(runs: Sequence[Run]) -> list[Act]:
    """Return what one process has to do to take the steps that all ranks took."""
    acts = []
    for positions in _batches(runs[0]):
        steps = tuple(positions)
        acts.append(Act(steps, runs[0].steps[steps[0]].epoch, tuple(pairs_of(runs, steps[0]))))
    return acts


def pairs_of(runs: Sequence[Run], position: int) -> Iterator[Pair]:
    """Yield the pairs of one optimizer step: by loader batch, then by rank, then by cut."""
    steps = [run.steps[position] for run in runs]
    cuts = runs[0].facts.cuts
    longest = max(len(step.micro_batches) for step in steps)
    for start in range(0, longest, cuts):
        for rank, step in enumerate(steps):
            for index in range(start, min(start + cuts, len(step.micro_batches))):
                micro_batch = step.micro_batches[index]
                if micro_batch.samples:
                    yield rank, micro_batch, _only_part(step, index)


def _only_part(step: Step, index: int) -> Part | None:
    parts = [part for part in step.parts if part.micro_batch == index]
    return parts[0] if len(parts) == 1 else None


def _batches(run: Run) -> Iterator[list[int]]:
    """Group the steps that were taken within one batch."""
    group: list[int] = []
    for position, step in enumerate(run.steps):
        if group and step.micro_batches is not run.steps[group[-1]].micro_batches:
            yield group
            group = []
        group.append(position)
    if group:
        yield group
