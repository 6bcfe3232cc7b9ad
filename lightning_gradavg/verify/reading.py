"""Whether the ranks together read what one process reads: each sample of an epoch once, and the same in each step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import NamedTuple

from lightning_gradavg.verify.records import EpochReading, RankBatch, Record, SampleId
from lightning_gradavg.verify.report import Finding

__all__ = ["compare_readings"]


class Readings(NamedTuple):
    """What was found about the samples."""

    findings: list[Finding]
    remarks: list[str]  # on what the compared steps do not show


def compare_readings(records: Sequence[Record], alone: EpochReading) -> Readings:
    """Compare the samples of the compared steps, and those of an epoch, with what one process reads."""
    found = Readings([], [])
    place = _place_of_other_data(records)
    if place and records[0].reading.deals_indices:
        detail = f"a sampler deals the indices of one data set, and each rank holds another: they differ in `{place}`"
        found.findings.append(Finding("different data sets", "samples", detail))
        return found
    steps = _steps_of_first_epoch(records)
    samples = [list(chain(*(rank_batch.sample_ids for rank_batch in taken))) for taken in steps]
    counts = Counter(chain(*samples))
    # A data set may hold equal samples.
    is_as_alone = counts == Counter(alone.samples[: counts.total()])
    if min(counts.values()) >= max(2, len(records)) and not is_as_alone:
        detail = f"all {len(records)} ranks read the same samples: the global batch is one rank's"
        found.findings.append(Finding("duplicated stream", "samples", detail))
        return found
    read: list[Hashable] = list(chain(*samples))
    length = math.nan
    if not place:  # else each rank has data of its own, as of a client
        pieces = chain(*(rank_batch.pieces for rank_batch in chain(*steps)))
        read = list(chain(*(piece.indices for piece in pieces))) or read  # a stream has no indices
        if not records[0].facts.splits_batches:
            length = sum(record.reading.length for record in records)
    _compare_epochs(read, length, alone, len(records), found)
    _compare_order(samples, alone, found)
    return found


def _steps_of_first_epoch(records: Sequence[Record]) -> list[list[RankBatch]]:
    """Return what all ranks took in each step of the first epoch that counts, in the order of windows and ranks."""
    steps = []
    for steps_of_ranks in zip(*(record.steps for record in records), strict=False):
        if steps_of_ranks[0].epoch != records[0].steps[0].epoch:
            break
        batches = chain(*(step.batches for step in steps_of_ranks))
        steps.append([rank_batch for rank_batch in batches if rank_batch.counts])
    return steps


def _place_of_other_data(records: Sequence[Record]) -> str:
    """Return what differs between the data sets of the ranks, such as "sample[0]"; "" if nothing does."""
    held = records[0].reading.held
    for record in records[1:]:
        for place, digests in record.reading.held.items():
            if held.get(place, digests) != digests:
                return place
    return ""


def _compare_epochs(read: Sequence[Hashable], length: float, alone: EpochReading, ranks: int, found: Readings) -> None:
    """Find samples that an epoch reads more than once, or never.

    Args:
        read: What the ranks read in the compared steps.
        length: The number of samples that they read in an epoch; NaN if it is not known.
        alone: What one process reads.
        ranks: The number of ranks.
        found: What is found is added to this.
    """
    # A sampler may repeat samples on purpose, and then one process does, too.
    first_of_alone = alone.samples[: len(read)]
    repeats = len(set(read)) < len(read) and len(set(first_of_alone)) == len(first_of_alone)
    extra = length - alone.length
    if repeats and extra > 0:
        cause = "padding"
        if extra >= alone.length:
            cause = "duplicated stream"
        detail = f"the ranks read {length:g} samples in an epoch of {alone.length:g}"
        found.findings.append(Finding(cause, "samples", detail))
    elif repeats and len(first_of_alone) == len(read):
        found.remarks.append("in the compared steps the ranks read some samples twice, and one process does not")
    elif extra > 0 or extra <= -ranks:  # a sampler may leave out the samples that do not fill all ranks
        found.remarks.append(
            f"the samplers of the ranks read {length:g} samples in an epoch, and that of one process {alone.length:g}"
        )


def _compare_order(samples: Sequence[Sequence[SampleId]], alone: EpochReading, found: Readings) -> None:
    """Note the first global batch that is not what one process reads at that place of its epoch."""
    start = 0
    for position, on_ranks in enumerate(samples):
        # One process goes on where a step as large as that of the ranks ended.
        total = len(on_ranks)
        expected = alone.samples[start : start + total]
        start += total
        if len(expected) < total:
            return  # it is not known what one process reads here
        equal = (Counter(on_ranks) & Counter(expected)).total()
        if equal < total:
            detail = f"one process would read {equal} of the {total} samples of step {position}, and other samples"
            found.findings.append(Finding("data order", "samples", detail, position, note=True))
            return
