"""Intervals, clocks, and what a step's timeline says: laws on synthetic timelines, without processes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gradavg.profiling.intervals import (
    Interval,
    Offset,
    intersection,
    length,
    offset_between,
    offset_within,
    union,
)
from lightning_gradavg.profiling.timeline import Backward, Bucket, Step, bandwidth, bounds_of, times_of, transfers

MOMENTS = st.integers(0, 60)


@st.composite
def intervals(draw, within=MOMENTS):
    start, end = sorted((draw(within), draw(within)))
    return Interval(start, end)


SOME_INTERVALS = st.lists(intervals(), max_size=8)


def cells(some):
    """The unit cells of the time axis that intervals cover: the reference that the laws are checked against."""
    return {cell for interval in some for cell in range(interval.start, interval.end)}


@given(SOME_INTERVALS)
def test_union_covers_the_same_time_once(some):
    """A union covers what its intervals cover, disjointly and in order, and is its own union."""
    covered = union(some)

    assert cells(some) == cells(covered)
    assert len(cells(some)) == length(some) == length(covered)
    assert all(one.end < other.start for one, other in pairwise(covered))
    assert covered == union(covered)


@given(SOME_INTERVALS, SOME_INTERVALS)
def test_intersection_covers_what_both_cover(first, second):
    """An intersection covers the time that both cover, whichever comes first."""
    assert cells(first) & cells(second) == cells(intersection(first, second))
    assert intersection(first, second) == intersection(second, first)


@given(intervals(), intervals())
def test_clipped_is_the_part_inside(interval, within):
    """A clipped interval lies within, and covers the common time."""
    clipped = interval.clipped(within)

    assert within.start <= clipped.start <= clipped.end <= within.end
    assert cells([interval]) & cells([within]) == cells([clipped])


def test_clocks_that_may_agree_are_not_corrected():
    """Limits on both sides of zero leave the clock as it is, and say how far it may be off."""
    assert Offset(0, 30) == offset_within([(-10, 40), (-20, 30)])
    assert Offset(0, 20) == offset_within([(-50, 20), (-10, 30)])


def test_clocks_that_cannot_agree_are_corrected_to_the_middle():
    """Limits on one side of zero give the middle of what they allow."""
    assert Offset(110, 10) == offset_within([(100, 150), (80, 120)])
    assert Offset(-110, 10) == offset_within([(-150, -100), (-120, -80)])


def test_limits_that_exclude_each_other_give_the_middle_of_the_gap():
    """A clock that was set in between leaves no offset that fits; the error is half of the contradiction."""
    assert Offset(150, 50) == offset_within([(200, 300), (0, 100)])


def test_an_offset_needs_limits():
    """Without a reading there is nothing to tell a clock by."""
    with pytest.raises(ValueError, match="at least one pair of limits"):
        offset_within([])


@given(
    st.integers(-1000, 1000),
    st.lists(st.tuples(MOMENTS, MOMENTS, MOMENTS, MOMENTS), min_size=1, max_size=6),
)
def test_the_offset_of_a_clock_is_found_within_its_uncertainty(offset, delays):
    """However ranks enter and leave barriers, the true offset is within the stated uncertainty."""
    own, reference, now = [], [], 0
    for enter_own, enter_reference, leave_own, leave_reference in delays:
        entered = now + enter_own, now + enter_reference
        release = max(entered)
        own.append(Interval(entered[0], release + leave_own).shifted(-offset))
        reference.append(Interval(entered[1], release + leave_reference))
        now = release + 100

    found = offset_between(own, reference)

    assert abs(found.value - offset) <= found.uncertainty


@st.composite
def steps(draw):
    """A step of micro-batches, each a forward, a backward, and reductions anywhere from its start to its end."""
    now, batches, backwards = draw(MOMENTS), [], []
    begin = now
    for _ in range(draw(st.integers(1, 3))):
        batches.append(now)
        start = now + draw(MOMENTS)
        last_gradient = start + draw(MOMENTS)
        end = last_gradient + draw(MOMENTS)
        reductions = tuple(draw(st.lists(intervals(st.integers(start, end)), max_size=4)))
        buckets = tuple(Bucket(index, start, one, 8) for index, one in enumerate(reductions))
        backwards.append(Backward(Interval(start, end), last_gradient, buckets, reductions))
        now = end + draw(MOMENTS)
    return Step(Interval(begin, now), tuple(batches), tuple(backwards), draw(MOMENTS))


@given(steps())
def test_the_parts_of_a_step_add_up(step):
    """Overlap and exposed make the communication; forward, backward, tail and the rest make the step."""
    times = times_of(step)

    assert times.communication == times.overlap + times.exposed
    assert times.step == times.forward + times.backward + times.tail + times.other
    assert times.step == times.compute + times.tail
    assert min(times.forward, times.backward, times.tail, times.other, times.overlap, times.exposed) >= 0
    # All that is exposed comes after a last gradient here, since a reduction lies within its backward.
    assert times.exposed <= times.tail


@given(steps())
def test_overlap_is_the_communication_within_local_backwards(step):
    """The overlap is the time covered by a reduction and by a local backward at once."""
    local = [backward.local for backward in step.backwards]

    assert len(cells(step.reductions) & cells(local)) == times_of(step).overlap


@given(steps(), st.integers(-1000, 1000))
def test_a_clock_changes_no_duration(step, offset):
    """A step on a shifted clock has the same durations, and shifts back to itself."""
    assert times_of(step) == times_of(step.shifted(offset))
    assert step == step.shifted(offset).shifted(-offset)


@given(st.lists(steps(), min_size=1, max_size=3))
def test_no_step_is_shorter_than_its_best(ranks):
    """The larger of compute and communication bounds the step from below, and their sum is no smaller."""
    bounds = bounds_of(ranks)

    assert bounds.best <= bounds.step
    assert bounds.best <= bounds.total


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(intervals(), min_size=n, max_size=n), min_size=1)))
def test_transfers_are_what_is_left_without_waiting(ranks):
    """Waiting only shortens collectives from their start; the last rank to start one waits for nobody."""
    without = transfers(ranks)

    for same, left in zip(zip(*ranks, strict=True), zip(*without, strict=True), strict=True):
        latest = max(one.start for one in same)
        for one, part in zip(same, left, strict=True):
            assert one.end == part.end
            assert one.start <= part.start <= part.end
            assert part.start == one.start or one.start < latest
            assert part.start >= min(latest, one.end)


def test_ranks_with_different_collectives_are_not_compared():
    """Without the same collectives on all ranks nobody can be said to wait."""
    ranks = [[Interval(0, 10)], [Interval(5, 10), Interval(10, 12)]]

    assert ranks == transfers(ranks)


def test_a_step_by_hand():
    """Two buckets, of which one is reduced during backward and one half after it."""
    reductions = (Interval(40, 50), Interval(70, 90))
    buckets = (Bucket(0, 38, reductions[0], 1000), Bucket(1, 70, reductions[1], 4000))
    accumulating = Backward(Interval(10, 20), 20)
    reducing = Backward(Interval(35, 95), 80, buckets, reductions)
    step = Step(Interval(0, 100), (0, 25), (accumulating, reducing), copied_back=3)

    times = times_of(step)

    assert (100, 20, 55, 30, 20, 10, 15, 3) == (
        times.step,
        times.forward,  # 0 to 10, and 25 to 35
        times.backward,  # 10 to 20, and 35 to 80
        times.communication,
        times.overlap,
        times.exposed,
        times.tail,
        times.copied_back,
    )
    assert (10, 85) == (times.other, times.compute)
    slower = Step(
        Interval(0, 110), (0,), (Backward(Interval(20, 95), 90, reductions=(Interval(45, 50), Interval(80, 90))),)
    )
    assert (110, 105, 15) == tuple(bounds_of([step, slower]))
    assert (105, 120) == (bounds_of([step, slower]).best, bounds_of([step, slower]).total)


def test_two_backwards_of_one_micro_batch():
    """A second backward's forward begins where the first backward ended."""
    step = Step(Interval(0, 100), (0,), (Backward(Interval(10, 30), 30), Backward(Interval(45, 60), 60)))

    assert (25, 35, 40) == (times_of(step).forward, times_of(step).backward, times_of(step).other)


def test_bandwidth_counts_from_the_last_start_to_the_last_end():
    """4000 bytes in 20 ns are 200 GB/s: the time in which any rank still waits for another does not count."""
    assert pytest.approx(200.0) == bandwidth(4000, [Interval(0, 30), Interval(10, 29)])


@pytest.mark.parametrize(
    ("wire_bytes", "reductions"),
    [(None, [Interval(0, 1)]), (8, []), (8, [Interval(0, 1), None]), (8, [Interval(5, 5)])],
)
def test_bandwidth_is_unknown_without_size_or_time(wire_bytes, reductions):
    """Nothing is said of a reduction whose size or duration is unknown."""
    assert bandwidth(wire_bytes, reductions) is None
