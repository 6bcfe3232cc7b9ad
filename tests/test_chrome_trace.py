"""What is read from Chrome traces, and from notes with them: synthetic traces of gloo and of a device."""

from __future__ import annotations

import json

import pytest

from lightning_gradavg.profiling.chrome_trace import CLOCK_MARK, Collective, Trace, read_trace
from lightning_gradavg.profiling.ddp_buckets import BucketLayout
from lightning_gradavg.profiling.intervals import Interval
from lightning_gradavg.profiling.recording import BackwardRecord, StepRecord, timeline_of

BASE = 1_790_857_026_000_000_000
ALL_REDUCE = "c10d::allreduce_"


def at(microseconds):
    return BASE + microseconds * 1000


def span(start, end):
    return Interval(at(start), at(end))


def event(name, start, end, category="cpu_op", thread=1, **arguments):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 7,
        "tid": thread,
        "ts": float(start),
        "dur": float(end - start),
        "args": {key.replace("_", " "): value for key, value in arguments.items()},
    }


def issued(start, end, numel, name=ALL_REDUCE):
    return event(name, start, end, Input_Dims=[[[numel]], []], Input_type=["TensorList", ""])


def on_gloo(start, end, numel, thread=2, dtype="float", name="gloo:all_reduce"):
    return event(name, start, end, "user_annotation", thread, Input_Dims=[[numel]], Input_type=[dtype])


def launch(start, correlation, thread=1):
    return event("cudaLaunchKernel", start, start + 1, "cuda_runtime", thread, correlation=correlation)


def kernel(name, start, end, correlation):
    return event(name, start, end, "kernel", 99, correlation=correlation)


def read(*events, mark=0, marks=((0, 1),)):
    mark_event = event(CLOCK_MARK, mark, mark + 1, "user_annotation")
    document = {"schemaVersion": 1, "traceEvents": [mark_event, *events], "baseTimeNanoseconds": BASE}
    return read_trace(json.dumps(document), [span(*one) for one in marks])


def test_gloo_runs_collectives_on_its_threads():
    """Each operator is tied to the event of the same kind and size that starts after it, whatever ends first."""
    trace = read(
        issued(10, 12, 100),
        issued(20, 22, 50),
        issued(30, 32, 100),
        issued(40, 42, 3, "c10d::broadcast_"),
        on_gloo(25, 90, 50, thread=3, dtype="double"),
        on_gloo(13, 60, 100, dtype="c10::Half"),
        on_gloo(61, 70, 100),
        on_gloo(71, 72, 3, name="gloo:broadcast"),
    )

    assert [
        Collective(at(10), span(13, 60), 100, 2),
        Collective(at(20), span(25, 90), 50, 8),
        Collective(at(30), span(61, 70), 100, 4),
        Collective(at(40), span(71, 72), 3, 4),
    ] == trace.collectives
    assert not trace.on_device
    assert at(50) == trace.reached(at(50))


def test_an_event_that_was_not_closed_is_not_used():
    """Where the profiler stopped before a thread closed its event, the collective has no interval."""
    unclosed = event("gloo:all_reduce", 13, 13, "user_annotation", 2)

    assert [Collective(at(10), None, 100, None)] == read(issued(10, 12, 100), unclosed).collectives


def test_nccl_runs_collectives_as_kernels():
    """A collective is the kernel launched within its operator, of the size that the record within it gives."""
    trace = read(
        event(ALL_REDUCE, 10, 20, Input_Dims=[[], []], Input_type=["TensorList", ""]),
        event("record_param_comms", 11, 19, dtype="BFloat16", In_msg_nelems=100),
        launch(12, 1),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 50, 80, 1),
        launch(30, 2),
        kernel("gemm", 55, 60, 2),
        launch(12, 3, thread=5),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 81, 82, 3),
    )

    assert [Collective(at(10), span(50, 80), 100, 2)] == trace.collectives


def test_the_device_reaches_a_moment_when_what_was_launched_before_is_done():
    """A moment of the host becomes the end of the work launched by then, collectives left out, or stays."""
    trace = read(
        launch(5, 1),
        kernel("gemm", 100, 150, 1),
        launch(6, 2),
        kernel("relu", 20, 30, 2),
        issued(7, 9, 100),
        launch(8, 3),
        kernel("ncclDevKernel_AllReduce", 100, 900, 3),
    )

    assert trace.on_device
    assert [at(4), at(150), at(150), at(200)] == [trace.reached(at(moment)) for moment in (4, 5, 50, 200)]


def test_copies_out_of_buckets_are_found_on_host_and_device():
    """A copy takes the operator's time, or that of the kernels launched in it."""
    name = "torch.distributed.ddp.reducer::copy_bucket_to_grad"

    trace = read(event(name, 10, 12), event(name, 20, 22), launch(21, 1), kernel("copy", 70, 75, 1))

    assert [span(10, 12), span(70, 75)] == trace.copies


def test_a_trace_on_another_clock_is_put_on_that_of_the_notes():
    """Where the annotation cannot have been within its readings, every event is moved."""
    trace = read(issued(10, 12, 1), mark=0, marks=((5000, 5000),))

    assert [at(5010)] == [one.issued for one in trace.collectives]


@pytest.mark.parametrize("marks", [(), ((0, 1), (2, 3))])
def test_a_trace_without_its_marks_is_refused(marks):
    """A trace that has not one annotation for each reading of the clock is of another recording."""
    with pytest.raises(ValueError, match=f"1 annotations 'gradavg: clock' for {len(marks)} readings"):
        read(marks=marks)


LAYOUT = (BucketLayout((2, 1), 400, 100, "float32"), BucketLayout((0,), 200, 50, "float32"))


def noted(**ready):
    backward = BackwardRecord(20, True, 90, {int(name[1:]): moment for name, moment in ready.items()})
    return StepRecord([10], [backward], 100)


def test_collectives_are_those_of_buckets_in_order():
    """What is issued beside the buckets' reductions is kept apart, and an end is not after the backward's."""
    trace = Trace(
        [
            Collective(5, Interval(6, 7), 100, 4),
            Collective(21, Interval(22, 23), 3, 8),
            Collective(40, Interval(41, 70), 100, 2),
            Collective(60, Interval(71, 95), 50, None),
        ],
        [Interval(80, 84), Interval(99, 200)],
    )

    step = timeline_of(noted(p2=30, p1=39, p0=58), trace, LAYOUT)

    (backward,) = step.backwards
    assert (Interval(10, 100), (10,), 5) == (step.interval, step.batches, step.copied_back)
    assert (Interval(20, 90), 58) == (backward.interval, backward.last_gradient)
    assert [(0, 39, Interval(41, 70), 200), (1, 58, Interval(71, 90), None)] == [
        (one.index, one.ready, one.reduction, one.wire_bytes) for one in backward.buckets
    ]
    assert (Interval(41, 70), Interval(71, 90)) == backward.reductions
    assert (Interval(22, 23),) == backward.others


def test_a_hook_with_its_own_collectives_reduces_no_bucket():
    """Where the collectives are not those of the buckets, all of the backward count as its reduction."""
    trace = Trace([Collective(40, Interval(41, 70), 7, 4), Collective(60, Interval(71, 80), 7, 4)], [])

    (backward,) = timeline_of(noted(p0=58), trace, LAYOUT).backwards

    assert (Interval(41, 70), Interval(71, 80)) == backward.reductions
    assert [(None, None), (58, None)] == [(bucket.ready, bucket.reduction) for bucket in backward.buckets]


def test_unknown_buckets_leave_the_collectives():
    """Where DDP's buckets are not known, all collectives of the backward count as its reduction."""
    trace = Trace([Collective(40, Interval(41, 70), 7, 4)], [])

    (backward,) = timeline_of(noted(p0=58), trace, None).backwards

    assert ((), (Interval(41, 70),)) == (backward.buckets, backward.reductions)


def test_an_accumulating_backward_reduces_nothing():
    """Collectives of a backward that DDP does not reduce in are the model's own."""
    record = StepRecord([10], [BackwardRecord(20, False, 90, {0: 50})], 100)

    (backward,) = timeline_of(record, Trace([Collective(40, Interval(41, 70), 100, 4)], []), LAYOUT).backwards

    assert ((), (Interval(41, 70),), 90) == (backward.reductions, backward.others, backward.last_gradient)


def test_an_unused_bucket_was_never_ready():
    """A bucket none of whose parameters got a gradient has no moment at which it was ready."""
    trace = Trace([Collective(40, Interval(41, 70), 100, 4), Collective(60, Interval(71, 80), 50, 4)], [])

    (backward,) = timeline_of(noted(p0=58), trace, LAYOUT).backwards

    assert [None, 58] == [bucket.ready for bucket in backward.buckets]


def test_on_a_device_moments_are_those_of_the_device():
    """The host runs ahead: gradients are ready, and steps end, when the device is there."""
    collectives = [Collective(40, Interval(300, 400), 100, 4), Collective(60, Interval(400, 450), 50, 4)]
    trace = Trace(collectives, [], [(15, 120), (30, 200), (58, 390), (95, 500)])

    step = timeline_of(noted(p2=30, p1=39, p0=58), trace, LAYOUT)

    (backward,) = step.backwards
    assert Interval(10, 500) == step.interval
    assert (Interval(120, 450), 390) == (backward.interval, backward.last_gradient)
    assert [200, 390] == [bucket.ready for bucket in backward.buckets]
    assert (Interval(300, 400), Interval(400, 450)) == backward.reductions
