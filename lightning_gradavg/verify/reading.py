"""Whether the ranks together read what one process reads: each sample of an epoch once, and the same in each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from lightning_gradavg._support.text import plural
from lightning_gradavg.verify.records import EpochReading, RankBatch, Record
from lightning_gradavg.verify.report import Finding

__all__ = ["Readings", "compare_readings"]


class Readings(NamedTuple):
    """What was found about the samples."""

    findings: list[Finding]
    remarks: list[str]  # on what the compared steps do not show


def compare_readings(records: Sequence[Record], alone: EpochReading) -> Readings:
    """Compare the samples of the compared steps, and those of an epoch, with what one process reads."""
    steps = _steps_of_first_epoch(records)
    found = Readings([], [])
    if _read_all_the_same(steps, len(records)) and not _read_as_one_process(steps, alone):
        detail = f"all {len(records)} ranks read the same samples in the same order: the global batch is one rank's"
        found.findings.append(Finding("duplicated stream", "samples", detail))
        return found
    _compare_epochs(records, alone, steps, found)
    _compare_order(steps, alone, found)
    return found


def _steps_of_first_epoch(records: Sequence[Record]) -> list[list[RankBatch]]:
    """Return what all ranks took in each step of the first epoch that counts, in the order of windows and ranks."""
    steps = []
    for steps_of_ranks in zip(*(record.steps for record in records), strict=False):
        if steps_of_ranks[0].epoch != records[0].steps[0].epoch:
            break
        taken = []
        for step in steps_of_ranks:
            taken += [rank_batch for rank_batch in step.batches if rank_batch.counts]
        steps.append(taken)
    return steps


def _read_all_the_same(steps: Sequence[Sequence[RankBatch]], ranks: int) -> bool:
    """Return whether all ranks take the same samples in every step."""
    if ranks == 1:
        return False
    for taken in steps:
        first = taken[0].sample_ids
        if len(taken) < ranks or any(rank_batch.sample_ids != first for rank_batch in taken):
            return False
    return True


def _read_as_one_process(steps: Sequence[Sequence[RankBatch]], alone: EpochReading) -> bool:
    """Return whether one process would read these samples, too: a data set may hold equal ones."""
    on_ranks = Counter[bytes]()
    for taken in steps:
        for rank_batch in taken:
            on_ranks.update(rank_batch.sample_ids)
    return on_ranks == Counter(alone.samples[: on_ranks.total()])


def _compare_epochs(
    records: Sequence[Record], alone: EpochReading, steps: Sequence[Sequence[RankBatch]], found: Readings
) -> None:
    """Find samples that an epoch never reads, or reads more than once, by the lengths of the samplers."""
    lengths = [record.reading.length for record in records if record.reading.length is not None]
    if records[0].facts.splits_batches or alone.length is None or len(lengths) < len(records):
        return
    extra = sum(lengths) - alone.length
    # A sampler may leave out the samples that do not fill all ranks.
    if -len(records) < extra <= 0:
        return
    if any(reading.own_sampler for reading in (alone, *(record.reading for record in records))):
        found.remarks.append(
            f"by a sampler of your own, the ranks read {sum(lengths)} samples in an epoch, and one process"
            f" {alone.length}"
        )
        return
    if extra < 0:
        detail = f"an epoch never reads {-extra} of its {plural(alone.length, 'sample')}"
        found.findings.append(Finding("unread samples", "samples", detail))
        return
    cause = "padding"
    detail = f"an epoch reads {plural(extra, 'sample')} twice, to fill the ranks"
    if extra >= alone.length:
        cause = "duplicated stream"
        detail = "every rank reads all samples of an epoch"
    indices: list[Hashable] = []
    for taken in steps:
        for rank_batch in taken:
            for piece in rank_batch.pieces:
                indices += piece.indices
    if len(set(indices)) < len(indices):
        found.findings.append(Finding(cause, "samples", detail))
    else:
        found.remarks.append(f"beyond the compared steps, {detail}")


def _compare_order(steps: Sequence[Sequence[RankBatch]], alone: EpochReading, found: Readings) -> None:
    """Note the first global batch that is not what one process reads at that place of its epoch."""
    start = 0
    for position, taken in enumerate(steps):
        # One process goes on where a step as large as that of the ranks ended.
        on_ranks = Counter[bytes]()
        for rank_batch in taken:
            on_ranks.update(rank_batch.sample_ids)
        total = on_ranks.total()
        expected = Counter(alone.samples[start : start + total])
        start += total
        if expected.total() < total:
            return  # it is not known what one process reads here
        if on_ranks == expected:
            continue
        equal = (on_ranks & expected).total()
        detail = f"one process would read {equal} of the {total} samples of step {position}, and other samples"
        if equal == 0:
            detail = f"one process would read none of the {total} samples of step {position}"
        found.findings.append(Finding("data order", "samples", detail, position, note=True))
        return
