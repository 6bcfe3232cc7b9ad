"""What the samples of a run tell: repeated ones, streams that all ranks read, another order than on one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_gradavg.verification.records import Run
from lightning_gradavg.verification.report import Finding, Stage
from lightning_gradavg.verification.script import acts_of, pairs_of

__all__ = ["Stream", "compare_samples"]

Stream = Sequence[tuple[int, Sequence[bytes]]]
"""What one process reads: of every loader batch, the epoch and the fingerprints of its samples."""


def compare_samples(runs: Sequence[Run], stream: Stream | None) -> tuple[Stage, list[Finding]]:
    """Return the stage "samples" and its findings.

    Args:
        runs: What the ranks recorded.
        stream: What one process with the same configuration reads; None if it is not known.
    """
    findings = [found for found in (_duplicated(runs, stream), _padded(runs, stream)) if found is not None]
    if stream is None:
        status = "differs" if findings else "not compared"
        return Stage("samples", status, note="the order of one process was not asked for"), findings
    order = _order(runs, stream)
    if order is not None and not findings:
        findings.append(order)
    if findings:
        return Stage("samples", "differs", findings[0].step, note=findings[0].detail), findings
    return Stage("samples", "equal"), findings


def _of_step(runs: Sequence[Run], position: int) -> list[bytes]:
    return [sample for _, micro_batch, _ in pairs_of(runs, position) for sample in micro_batch.samples]


def _of_rank(run: Run, position: int) -> tuple[bytes, ...]:
    return tuple(sample for micro_batch in run.steps[position].micro_batches for sample in micro_batch.samples)


def _positions(runs: Sequence[Run]) -> list[int]:
    """Return the first step of every batch or window: several optimizers may step in one."""
    return [act.steps[0] for act in acts_of(runs) if runs[0].steps[act.steps[0]].micro_batches]


def _duplicated(runs: Sequence[Run], stream: Stream | None) -> Finding | None:
    """Find that all ranks read the same samples in the same order."""
    positions = _positions(runs)
    reads = [[_of_rank(run, position) for position in positions] for run in runs]
    if len(runs) == 1 or not any(reads[0]) or any(read != reads[0] for read in reads[1:]):
        return None
    if stream is not None:
        # Where one process sees equal samples, too, they are equal and not read twice.
        there = Counter(sample for _, samples in stream for sample in samples)
        here = Counter(sample for position in positions for sample in _of_step(runs, position))
        if here <= there:
            return None
    return Finding(
        "duplicated stream",
        "samples",
        f"all {len(runs)} ranks read the same samples in the same order in {len(positions)} steps:"
        " the global batch is one rank's",
        positions[0],
    )


def _padded(runs: Sequence[Run], stream: Stream | None) -> Finding | None:
    padded = runs[0].facts.padded
    if padded == 0:
        return None
    if stream is not None:
        epochs = {runs[0].steps[position].epoch for position in _positions(runs)}
        for epoch in sorted(epochs):
            here = Counter(
                sample
                for position in _positions(runs)
                if runs[0].steps[position].epoch == epoch
                for sample in _of_step(runs, position)
            )
            there = Counter(sample for at, samples in stream if at == epoch for sample in samples)
            again = sum((here - there).values())
            if again and set(here) <= set(there):
                return Finding(
                    "padding", "samples", f"{again} samples are trained on twice in epoch {epoch}, to fill the ranks"
                )
    return Finding(
        "padding",
        "samples",
        f"the sampler repeats {padded} samples at the end of every epoch, so that all ranks have equally many",
    )


def _order(runs: Sequence[Run], stream: Stream) -> Finding | None:
    """Find the first global batch that is not what one process reads at that place of its epoch."""
    taken: Counter[int] = Counter()
    read: dict[int, list[bytes]] = {}
    for epoch, samples in stream:
        read.setdefault(epoch, []).extend(samples)
    for position in _positions(runs):
        here, epoch = _of_step(runs, position), runs[0].steps[position].epoch
        there = read.get(epoch, [])[taken[epoch] : taken[epoch] + len(here)]
        taken[epoch] += len(here)
        if Counter(here) == Counter(there):
            continue
        shared = sum((Counter(here) & Counter(there)).values())
        everywhere = {sample for samples in read.values() for sample in samples}
        changed = "" if everywhere & set(here) else "; none of them is read there at all: they may be transformed at random"
        return Finding(
            "data order",
            "samples",
            f"{shared} of the {len(here)} samples of the global batch are those that one process trains on then{changed}",
            position,
        )
    return None
