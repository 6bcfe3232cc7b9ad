"""What the timelines of all ranks say together: medians, bounds, and advice where the figures carry it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from statistics import median

from lightning_gradavg.profiling.ddp_buckets import BucketLayout
from lightning_gradavg.profiling.intervals import Offset, length
from lightning_gradavg.profiling.timeline import Bounds, Step, Times, bandwidth, bounds_of, times_of, transfers

__all__ = ["BucketSummary", "Profile", "RankSummary", "RankTimeline", "Summary", "advice_of", "notes_of", "summary_of"]

_HIDDEN = 0.05
"""The part of a step below which nothing is worth tuning."""

_WORTH = 0.03
"""The part of a step from which one cost of it is worth saying."""

_SMALL = 2**20
"""A bucket below this, in bytes, may be too small to use the link."""


@dataclass(frozen=True)
class RankTimeline:
    """The profiled steps of one rank, on the clock of rank 0.

    Attributes:
        rank: The rank in the process group that DDP reduces over.
        host: Name of its host.
        clock: What was added to the rank's own clock.
        steps: The profiled steps.
    """

    rank: int
    host: str
    clock: Offset
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Profile:
    """The profiled steps of all ranks.

    Attributes:
        ranks: In rank order.
        first_step: Optimizer steps before the first profiled one.
        buckets: The buckets of DDP; None if they are unknown.
        names: Names of the parameters that DDP reduces, by position.
        strategy: The class of the strategy.
        backend: Of the process group, such as "gloo".
        device: Where the model is, such as "cpu".
        bucket_cap_mb: The option of DDP, in MiB.
        gradient_as_bucket_view: The option of DDP.
    """

    ranks: tuple[RankTimeline, ...]
    first_step: int
    buckets: tuple[BucketLayout, ...] | None
    names: tuple[str, ...]
    strategy: str
    backend: str
    device: str
    bucket_cap_mb: float
    gradient_as_bucket_view: bool

    @property
    def steps(self) -> list[tuple[Step, ...]]:
        """Each profiled step, on all ranks."""
        return list(zip(*(rank.steps for rank in self.ranks), strict=True))


@dataclass(frozen=True)
class RankSummary:
    """Medians over the steps of one rank, in nanoseconds.

    Attributes:
        rank: The rank.
        times: The median of each duration on its own, so that they need not add up.
        other: The median of `Times.other`.
        waiting: The part of the communication before the last rank started it.
    """

    rank: int
    times: Times
    other: int
    waiting: int


@dataclass(frozen=True)
class BucketSummary:
    """Medians of one bucket over ranks and steps; moments in nanoseconds after the start of the backward.

    Attributes:
        layout: What it holds.
        ready: When its last gradient was there.
        start: When its collective started.
        end: When its collective was finished.
        bandwidth: In GB/s, see `timeline.bandwidth`.
        wire_bytes: Size of the tensor that was reduced.
    """

    layout: BucketLayout
    ready: float | None
    start: float | None
    end: float | None
    bandwidth: float | None
    wire_bytes: int | None


@dataclass(frozen=True)
class Summary:
    """What a profile says.

    Attributes:
        ranks: Of each rank.
        bounds: The median of each of the three durations.
        best: The median of `Bounds.best`, in nanoseconds.
        total: The median of `Bounds.total`, in nanoseconds.
        buckets: Of each bucket; empty if the buckets are unknown.
    """

    ranks: tuple[RankSummary, ...]
    bounds: Bounds
    best: int
    total: int
    buckets: tuple[BucketSummary, ...]


def summary_of(profile: Profile) -> Summary:
    """Return the medians of a profile of at least one step."""
    bounds = [bounds_of(step) for step in profile.steps]
    return Summary(
        ranks=tuple(_rank_summary(profile, index) for index in range(len(profile.ranks))),
        bounds=Bounds(*(round(median(values)) for values in zip(*bounds, strict=True))),
        best=round(median(one.best for one in bounds)),
        total=round(median(one.total for one in bounds)),
        buckets=tuple(_bucket_summary(profile, index, one) for index, one in enumerate(profile.buckets or ())),
    )


def _rank_summary(profile: Profile, index: int) -> RankSummary:
    times = [times_of(step) for step in profile.ranks[index].steps]
    medians = {field.name: round(median(getattr(time, field.name) for time in times)) for field in fields(Times)}
    waiting = [
        length(step[index].reductions) - length(transfers([one.reductions for one in step])[index])
        for step in profile.steps
    ]
    other = round(median(time.other for time in times))
    return RankSummary(profile.ranks[index].rank, Times(**medians), other, round(median(waiting)))


def _bucket_summary(profile: Profile, index: int, layout: BucketLayout) -> BucketSummary:
    ready, starts, ends, rates, sizes = [], [], [], [], []
    for step in profile.steps:
        if len({len(of_rank.backwards) for of_rank in step}) > 1:
            continue
        for same in zip(*(of_rank.backwards for of_rank in step), strict=True):
            on_ranks = [(backward, backward.buckets[index]) for backward in same if backward.buckets]
            for backward, bucket in on_ranks:
                begin, reduction = backward.interval.start, bucket.reduction
                ready.append(None if bucket.ready is None else bucket.ready - begin)
                starts.append(None if reduction is None else reduction.start - begin)
                ends.append(None if reduction is None else reduction.end - begin)
                sizes.append(bucket.wire_bytes)
            if len(on_ranks) == len(same):
                rates.append(bandwidth(on_ranks[0][1].wire_bytes, [bucket.reduction for _, bucket in on_ranks]))
    size = _median(sizes)
    return BucketSummary(
        layout, _median(ready), _median(starts), _median(ends), _median(rates), None if size is None else round(size)
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def advice_of(profile: Profile, summary: Summary) -> list[str]:
    """Return what could make the step shorter, one line each; what the figures do not show is not said."""
    step, tail = summary.bounds.step, max(rank.times.tail for rank in summary.ranks)
    if tail <= _HIDDEN * step:
        hidden = (
            f"The reduction is hidden: after the last gradient a step goes on for {_ms(tail)} ({tail / step:.0%}) until"
            " it is done, and no setting can gain more than that."
        )
        found = [hidden]
    else:
        found = [*_advice_on_waiting(summary), *_advice_on_buckets(profile, summary)]
    return [*found, *_advice_on_copies(profile, summary)]


def _advice_on_waiting(summary: Summary) -> Iterator[str]:
    rank = max(summary.ranks, key=lambda rank: rank.waiting)
    communication = rank.times.communication
    if rank.waiting > max(communication / 2, _HIDDEN * summary.bounds.step):
        yield (
            f"Rank {rank.rank} spends {_ms(rank.waiting)} of its {_ms(communication)} of communication waiting for"
            " slower ranks: even out their work before anything else."
        )


def _advice_on_buckets(profile: Profile, summary: Summary) -> Iterator[str]:
    compute, transfer, buckets = summary.bounds.compute, summary.bounds.transfer, summary.buckets
    small, rate, top = _small_buckets(summary)
    if transfer <= _HIDDEN * summary.bounds.step:
        return  # all that hiding it could gain
    if transfer >= compute:
        yield (
            f"Communication ({_ms(transfer)}) takes longer than computation ({_ms(compute)}), so no bucket size hides"
            " it: reduce less often (accumulate_grad_batches) or send fewer bytes (ddp_comm_hook)."
        )
    elif len(buckets) == 1 and len(buckets[0].layout.parameters) > 1:
        size = buckets[0].layout.num_bytes
        yield (
            f"All gradients are in one bucket of {_mib(size)}, whose reduction starts after the last of them: a"
            f" bucket_cap_mb below {size / 2**20:.3g} (now {profile.bucket_cap_mb:g}) lets a part start earlier."
        )
    elif small > len(buckets) / 2 and rate < top / 4:
        yield (
            f"{small} of {len(buckets)} buckets are below {_mib(_SMALL)} and reach {rate:.2g} GB/s, the largest"
            f" {top:.2g} GB/s: a bucket_cap_mb above {profile.bucket_cap_mb:g} joins them."
        )


def _small_buckets(summary: Summary) -> tuple[int, float, float]:
    """Return how many buckets are small beside the largest, their median bandwidth, and that of the largest."""
    rated = [(bucket.layout.num_bytes, bucket.bandwidth) for bucket in summary.buckets if bucket.bandwidth is not None]
    largest, top = max(rated, default=(0, 0.0))
    small = [rate for size, rate in rated if size < min(_SMALL, largest / 4)]
    return len(small), median(small) if small else 0.0, top


def _advice_on_copies(profile: Profile, summary: Summary) -> Iterator[str]:
    step, copied = summary.bounds.step, max(rank.times.copied_back for rank in summary.ranks)
    if not profile.gradient_as_bucket_view and copied >= _WORTH * step:
        yield (
            f"Copying reduced gradients out of their buckets takes {_ms(copied)} of a step ({copied / step:.0%}):"
            " gradient_as_bucket_view=True leaves it out."
        )


def notes_of(profile: Profile, summary: Summary) -> list[str]:
    """Return what to know when reading the figures."""
    notes = []
    if profile.device == "cpu":
        notes.append(
            "On a CPU communication is computed by the cores that also train: the larger of both is out of reach, and"
            " the sum is the bound to compare with."
        )
    if any(not any(backward.reductions for backward in step.backwards) for rank in profile.ranks for step in rank.steps):
        notes.append(
            "The trace has no collective of some reductions, as of a hook that issues them from a thread of its own:"
            " communication is understated, and the bounds with it."
        )
    elif any(bucket.start is None for bucket in summary.buckets) or profile.buckets is None:
        notes.append(
            "Not every bucket has one collective of its size in the trace, as with a hook that issues several: when"
            " buckets were reduced, and how fast, is left out."
        )
    uncertainty = max(rank.clock.uncertainty for rank in profile.ranks)
    if len({rank.host for rank in profile.ranks}) > 1:
        notes.append(f"The clocks of the hosts were compared to within {_ms(uncertainty)}.")
    return notes


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3g} ms"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.3g} MiB"
