"""When an optimizer step computed and when it communicated, and what bounds its duration.

All moments and durations are whole nanoseconds. Moments of one rank are on one clock; `transfers` and what builds on it
compare ranks, and take moments on a common clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_gradavg.profiling.intervals import Interval, intersection, length

__all__ = [
    "Backward",
    "Bounds",
    "Bucket",
    "Step",
    "Times",
    "bandwidth",
    "bounds_of",
    "times_of",
    "transfers",
]


@dataclass(frozen=True)
class Bucket:
    """One bucket of gradients in one backward.

    Attributes:
        index: In the order in which DDP reduces buckets.
        ready: When the last gradient of the bucket was there; None if it had none.
        reduction: When its collective ran on this rank; None if it could not be told from others.
        wire_bytes: Size of the tensor that was reduced; None if unknown.
    """

    index: int
    ready: int | None
    reduction: Interval | None
    wire_bytes: int | None

    def shifted(self, offset: int) -> Bucket:
        """Return the bucket on a clock that is `offset` ahead."""
        ready = None if self.ready is None else self.ready + offset
        reduction = None if self.reduction is None else self.reduction.shifted(offset)
        return replace(self, ready=ready, reduction=reduction)


@dataclass(frozen=True)
class Backward:
    """One backward of a micro-batch.

    Attributes:
        interval: From its start until the gradients are reduced, or are there if nothing is reduced.
        last_gradient: When the last local gradient was there.
        buckets: What was reduced, by bucket; empty in a backward that only accumulates.
        reductions: The collectives that reduced the gradients, in the order in which all ranks issued them.
        others: Further collectives of this backward, such as the exchange of weights, or those of the model.
    """

    interval: Interval
    last_gradient: int
    buckets: tuple[Bucket, ...] = ()
    reductions: tuple[Interval, ...] = ()
    others: tuple[Interval, ...] = ()

    @property
    def local(self) -> Interval:
        """The part that computes this rank's own gradients."""
        return Interval(self.interval.start, self.last_gradient)

    def shifted(self, offset: int) -> Backward:
        """Return the backward on a clock that is `offset` ahead."""
        return replace(
            self,
            interval=self.interval.shifted(offset),
            last_gradient=self.last_gradient + offset,
            buckets=tuple(bucket.shifted(offset) for bucket in self.buckets),
            reductions=tuple(reduction.shifted(offset) for reduction in self.reductions),
            others=tuple(other.shifted(offset) for other in self.others),
        )


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank.

    Attributes:
        interval: From the start of its first micro-batch to the end of its last one.
        batches: When each micro-batch started.
        backwards: Its backwards, in order.
        copied_back: How long reduced gradients were copied out of the buckets, in nanoseconds.
    """

    interval: Interval
    batches: tuple[int, ...]
    backwards: tuple[Backward, ...]
    copied_back: int = 0

    @property
    def reductions(self) -> list[Interval]:
        """The collectives that reduced gradients."""
        return [reduction for backward in self.backwards for reduction in backward.reductions]

    def shifted(self, offset: int) -> Step:
        """Return the step on a clock that is `offset` ahead."""
        return replace(
            self,
            interval=self.interval.shifted(offset),
            batches=tuple(moment + offset for moment in self.batches),
            backwards=tuple(backward.shifted(offset) for backward in self.backwards),
        )


@dataclass(frozen=True)
class Times:
    """Where the time of one step of one rank went, in nanoseconds.

    Attributes:
        step: The whole step.
        forward: From the start of a micro-batch, or the end of the backward before, to the start of a backward.
        backward: Backward until the last local gradient.
        communication: While at least one bucket was being reduced, waiting for other ranks included.
        overlap: The part of `communication` within `backward`.
        exposed: The other part of `communication`.
        tail: From the last local gradient until the gradients are reduced and in place.
        copied_back: As in `Step`.
    """

    step: int
    forward: int
    backward: int
    communication: int
    overlap: int
    exposed: int
    tail: int
    copied_back: int

    @property
    def other(self) -> int:
        """The rest: the optimizer, callbacks, and between micro-batches the loading of data."""
        return self.step - self.forward - self.backward - self.tail

    @property
    def compute(self) -> int:
        """What the step would take if nothing came after the last local gradient but the optimizer."""
        return self.step - self.tail


def times_of(step: Step) -> Times:
    """Return where the time of a step went; `overlap + exposed == communication`."""
    local = [backward.local for backward in step.backwards]
    communication = length(step.reductions)
    overlap = length(intersection(step.reductions, local))
    forward, before = 0, step.interval.start
    for backward in step.backwards:
        # Between two backwards of one micro-batch, its start lies before the end of the first.
        begun = [moment for moment in step.batches if before <= moment <= backward.interval.start]
        forward += backward.interval.start - max([before, *begun])
        before = backward.interval.end
    return Times(
        step=step.interval.end - step.interval.start,
        forward=forward,
        backward=length(local),
        communication=communication,
        overlap=overlap,
        exposed=communication - overlap,
        tail=sum(backward.interval.end - backward.last_gradient for backward in step.backwards),
        copied_back=step.copied_back,
    )


def transfers(reductions: Sequence[Sequence[Interval]]) -> list[list[Interval]]:
    """Return each rank's collectives without the time in which a rank waited for the last one to start.

    Args:
        reductions: The collectives of every rank, in the same order on all ranks, on a common clock.
    """
    if len({len(of_rank) for of_rank in reductions}) > 1:
        # Ranks that cannot be compared are taken as they are.
        return [list(of_rank) for of_rank in reductions]
    latest = [max(one.start for one in same) for same in zip(*reductions, strict=True)]
    return [
        [Interval(min(max(start, one.start), one.end), one.end) for start, one in zip(latest, of_rank, strict=True)]
        for of_rank in reductions
    ]


class Bounds(NamedTuple):
    """What bounds the duration of a step over all ranks, in nanoseconds.

    Attributes:
        step: The step itself, of the slowest rank.
        compute: The longest `Times.compute` of any rank.
        transfer: The longest communication of any rank, without waiting for others.
    """

    step: int
    compute: int
    transfer: int

    @property
    def best(self) -> int:
        """The larger of both: no arrangement of the same work is faster."""
        return max(self.compute, self.transfer)

    @property
    def total(self) -> int:
        """The sum of both: what the step takes if nothing overlaps."""
        return self.compute + self.transfer


def bounds_of(steps: Sequence[Step]) -> Bounds:
    """Return the bounds of one step.

    Args:
        steps: The same step on every rank, on a common clock.
    """
    times = [times_of(step) for step in steps]
    return Bounds(
        step=max(time.step for time in times),
        compute=max(time.compute for time in times),
        transfer=max(length(of_rank) for of_rank in transfers([step.reductions for step in steps])),
    )


def bandwidth(wire_bytes: int | None, reductions: Sequence[Interval | None]) -> float | None:
    """Return the algorithm bandwidth of one reduction, in GB/s (10^9 bytes per second).

    It is bytes / (last end - last start), with the bytes of the tensor that each rank holds, not those that travel: for
    W ranks, a ring sends 2 * (W - 1) / W times as many ("bus bandwidth", performance notes of NVIDIA's nccl-tests).

    Args:
        wire_bytes: Size of the tensor; None if unknown.
        reductions: The collective on every rank, on a common clock; None if unknown.

    Returns:
        The bandwidth, or None if the size or an interval is unknown, or no time passed.
    """
    known = [interval for interval in reductions if interval is not None]
    if wire_bytes is None or not known or len(known) < len(reductions):
        return None
    duration = max(interval.end for interval in known) - max(interval.start for interval in known)
    return wire_bytes / duration if duration > 0 else None
