"""What is concluded from timelines: medians, advice where figures carry it, and the report's forms."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from lightning_gradavg.profiling.ddp_buckets import BucketLayout
from lightning_gradavg.profiling.intervals import Interval, Offset
from lightning_gradavg.profiling.report import draw, print_report, to_json
from lightning_gradavg.profiling.summary import Profile, RankTimeline, advice_of, notes_of, summary_of
from lightning_gradavg.profiling.timeline import Backward, Bucket, Step

MS = 1_000_000
MIB = 2**20


def step(start, reductions, *, last_gradient=60, end=None, total=100, copied_back=0, sizes=None):
    """A step in ms: forward to 20, backward to `last_gradient`, and reductions in its buckets."""
    spans = tuple(Interval((start + begin) * MS, (start + stop) * MS) for begin, stop in reductions)
    sizes = sizes or [MIB] * len(spans)
    end = max([last_gradient, *(stop for _, stop in reductions)]) if end is None else end
    buckets = tuple(
        Bucket(index, (start + 30 + index) * MS, span, size)
        for index, (span, size) in enumerate(zip(spans, sizes, strict=True))
    )
    backward = Backward(Interval((start + 20) * MS, (start + end) * MS), (start + last_gradient) * MS, buckets, spans)
    whole = Interval(start * MS, (start + total) * MS)
    return Step(whole, (start * MS,), (backward,), copied_back * MS)


def profile_of(*ranks, sizes=(MIB,), parameters=2, **options):
    timelines = tuple(RankTimeline(rank, "host", Offset(0, 0), tuple(steps)) for rank, steps in enumerate(ranks))
    buckets = tuple(BucketLayout(tuple(range(parameters)), size, size // 4, "float32") for size in sizes)
    names = tuple(f"layer.{index}" for index in range(parameters))
    found = Profile(timelines, 5, buckets, names, "DDPStrategy", "nccl", "cuda", 25.0, gradient_as_bucket_view=True)
    return replace(found, **options)


def advice(profile):
    return advice_of(profile, summary_of(profile))


def notes(profile):
    return notes_of(profile, summary_of(profile))


def test_medians_over_steps_and_ranks():
    """Durations are medians of a rank's steps; bounds those of the slowest rank of each step."""
    lengths = (10, 20, 90)
    first = [step(200 * index, [(60, 60 + length)], total=160) for index, length in enumerate(lengths)]
    second = [step(200 * index, [(55, 60 + length)], total=170) for index, length in enumerate(lengths)]

    summary = summary_of(profile_of(first, second))

    assert [(20, 160, 140, 0), (25, 170, 150, 5)] == [
        (rank.times.communication // MS, rank.times.step // MS, rank.times.compute // MS, rank.waiting // MS)
        for rank in summary.ranks
    ]
    assert (170, 150, 20) == tuple(value // MS for value in summary.bounds)
    (bucket,) = summary.buckets
    assert (10, 37.5, 60) == (bucket.ready / MS, bucket.start / MS, bucket.end / MS)
    assert pytest.approx(MIB / 20e6) == bucket.bandwidth


def test_a_hidden_reduction_needs_nothing():
    """Where little comes after the last gradient, there is nothing to tune."""
    (line,) = advice(profile_of([step(0, [(40, 64)])]))

    assert "The reduction is hidden" in line
    assert "4 ms (4%)" in line


def test_a_rank_that_waits_is_named():
    """A rank most of whose communication is waiting is told to even out the work."""
    fast = step(0, [(30, 80)], last_gradient=40)
    slow = step(0, [(70, 80)], last_gradient=70)

    lines = advice(profile_of([fast], [slow]))

    assert "Rank 0 spends 40 ms of its 50 ms of communication waiting for slower ranks" in lines[0]


def test_communication_that_cannot_be_hidden():
    """Where communication outlasts computation, no bucket size is advised."""
    (line,) = advice(profile_of([step(0, [(30, 95)], last_gradient=40)]))

    assert "Communication (65 ms) takes longer than computation (45 ms)" in line
    assert "bucket_cap_mb" not in line


def test_one_bucket_for_everything():
    """A single bucket of several parameters is advised to be cut; one of a single parameter cannot be."""
    steps = [step(0, [(60, 80)])]

    (line,) = advice(profile_of(steps, sizes=(6 * MIB,)))

    assert "one bucket of 6 MiB" in line
    assert "a bucket_cap_mb below 6 (now 25)" in line
    assert [] == advice(profile_of(steps, sizes=(6 * MIB,), parameters=1))


def test_a_short_transfer_is_not_worth_hiding():
    """Where a rank goes on long after its last gradient, but hardly for the transfer, no bucket size is advised."""
    assert [] == advice(profile_of([step(0, [(60, 64)], end=80)], sizes=(6 * MIB,)))


def test_small_buckets_that_are_slow():
    """Small buckets are advised to be joined where they reach a fraction of the largest one's bandwidth."""
    sizes = (64 * 1024, 64 * 1024, 8 * MIB)
    slow = [step(0, [(40, 45), (45, 50), (60, 80)], sizes=sizes)]
    fast = [step(0, [(40, 40.01), (45, 45.01), (60, 80)], sizes=sizes)]

    (line,) = advice(profile_of(slow, sizes=sizes))

    assert "2 of 3 buckets are below 1 MiB and reach 0.013 GB/s, the largest 0.42 GB/s" in line
    assert [] == advice(profile_of(fast, sizes=sizes))


def test_copies_out_of_buckets():
    """Copying that takes a part of the step worth saying is what gradient_as_bucket_view saves, unless it is on."""
    steps = [step(0, [(40, 64)], copied_back=4)]

    lines = advice(profile_of(steps, gradient_as_bucket_view=False))

    assert "Copying reduced gradients out of their buckets takes 4 ms of a step (4%)" in lines[-1]
    assert not any("Copying" in line for line in advice(profile_of(steps)))


def test_nothing_is_said_of_collectives_that_were_not_seen():
    """Without a collective in the trace there is a note, and no advice on buckets."""
    unseen = replace(step(0, [], end=90), backwards=(Backward(Interval(20 * MS, 90 * MS), 60 * MS),))
    profile = profile_of([unseen], sizes=(6 * MIB,))

    assert [] == advice(profile)
    assert ["The trace has no collective of some reductions"] == [note[:46] for note in notes(profile)]


def test_notes_on_cpu_and_on_clocks():
    """A CPU's bound is the sum, and clocks of several hosts were compared."""
    one = RankTimeline(0, "a", Offset(0, 0), (step(0, [(60, 80)]),))
    other = RankTimeline(1, "b", Offset(3 * MS, MS // 2), (step(0, [(60, 80)]),))
    profile = replace(profile_of([one.steps[0]]), ranks=(one, other), device="cpu")

    on_cpu, clocks = notes(profile)

    assert "the sum is the bound to compare with" in on_cpu
    assert "within 0.5 ms" in clocks


def test_the_report_says_what_the_json_says(tmp_path):
    """Tables show every bucket and rank; the JSON has moments relative to the first profiled step."""
    steps = [step(1000, [(40, 50), (60, 80)], sizes=(MIB, 2 * MIB))]
    profile = profile_of(steps, steps, sizes=(MIB, 2 * MIB))
    out = io.StringIO()

    print_report(profile, summary_of(profile), Console(file=out, width=120))
    document = json.loads(to_json(profile, summary_of(profile)))

    text = out.getvalue()
    assert "DDPStrategy on 2 rank(s), cuda, nccl: medians of 1 step(s) after the first 5." in text
    assert ["0", "100.00", "20.00", "40.00", "20.00", "20.00", "30.00", "10.00", "20.00", "0.00", "0.00"] in [
        line.split() for line in text.splitlines()
    ]
    assert ["1", "2", "float32", "2", "11.00", "40.00", "60.00", "0.105"] in [
        line.split() for line in text.splitlines()
    ]
    assert (1, 100.0, 80.0, 30.0) == (
        document["schema"],
        *(document["bounds"][f"{name}_ms"] for name in ("step", "compute", "transfer")),
    )
    (backward,) = document["ranks"][1]["steps"][0]["backwards"]
    assert {"index": 1, "ready_ms": 31.0, "start_ms": 60.0, "end_ms": 80.0} == backward["buckets"][1]
    pytest.importorskip("matplotlib")
    draw(tmp_path / "timeline.png", profile)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
