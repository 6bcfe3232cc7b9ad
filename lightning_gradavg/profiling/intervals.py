"""Intervals of time, and what two clocks differ by. All moments and durations are whole nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Interval", "Offset", "intersection", "length", "offset_between", "offset_within", "union"]


class Interval(NamedTuple):
    """From `start` to `end`, in nanoseconds; `start <= end`."""

    start: int
    end: int

    def shifted(self, offset: int) -> Interval:
        """Return the interval on a clock that is `offset` ahead."""
        return Interval(self.start + offset, self.end + offset)

    def clipped(self, within: Interval) -> Interval:
        """Return the part inside of `within`; where they do not meet, an empty interval at its nearer end."""
        start, end = (min(max(moment, within.start), within.end) for moment in self)
        return Interval(start, end)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return what the intervals cover, as disjoint intervals in order."""
    covered: list[Interval] = []
    for interval in sorted(intervals):
        if covered and interval.start <= covered[-1].end:
            covered[-1] = Interval(covered[-1].start, max(covered[-1].end, interval.end))
        else:
            covered.append(interval)
    return covered


def intersection(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """Return what both cover, as disjoint intervals in order."""
    others = union(second)
    common = []
    for one in union(first):
        for other in others:
            start, end = max(one.start, other.start), min(one.end, other.end)
            if start < end:
                common.append(Interval(start, end))
    return common


def length(intervals: Iterable[Interval]) -> int:
    """Return how long it is covered by any of the intervals; where they overlap, time counts once."""
    return sum(interval.end - interval.start for interval in union(intervals))


class Offset(NamedTuple):
    """What to add to one clock to read another.

    Attributes:
        value: The offset, in nanoseconds.
        uncertainty: How far from `value` the true offset may be, in nanoseconds.
    """

    value: int
    uncertainty: int


def offset_within(limits: Iterable[tuple[int, int]]) -> Offset:
    """Return the offset of which each pair of limits is known: at least the first, at most the second.

    Clocks are taken to agree unless the limits exclude it: nothing is corrected that is not seen. Limits that exclude
    each other, as of a clock that was set in between, give the middle of the gap.

    Raises:
        ValueError: If there are no limits.
    """
    lows, highs = zip(*limits, strict=True) if (limits := list(limits)) else ((), ())
    if not lows:
        raise ValueError("an offset needs at least one pair of limits, got none")
    low, high = max(lows), min(highs)
    if low <= 0 <= high:
        return Offset(0, max(-low, high))
    return Offset((low + high) // 2, (abs(high - low) + 1) // 2)


def offset_between(own: Sequence[Interval], reference: Sequence[Interval]) -> Offset:
    """Return what to add to a rank's clock to read the clock of another rank.

    Args:
        own: When this rank entered and left each of several barriers, on its own clock.
        reference: When the other rank entered and left the same barriers, on its clock.

    A barrier is left by no rank before it was entered by all of them, which gives two limits per barrier.
    """
    return offset_within(
        (theirs.start - mine.end, theirs.end - mine.start) for mine, theirs in zip(own, reference, strict=True)
    )
