"""What is read from a trace: communication that a backward hides, and that it does not."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType

from lightning_gradavg.profile import GradAvgProfiler, overlap, read_steps

SECOND = 1_000_000_000
NODE = "autograd::engine::evaluate_function: AddmmBackward0"
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def event(name, start, end, device=DeviceType.CPU):
    """An event as torch.profiler keeps them, in seconds."""
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: int(start * SECOND),
        duration_ns=lambda: int((end - start) * SECOND),
        device_type=lambda: device,
    )


def steps(*bounds):
    """Steps one after another; the last is what follows upon the last complete one."""
    ends = [*bounds, bounds[-1] + 1]
    return [event(f"ProfilerStep#{index + 5}", *pair) for index, pair in enumerate(pairwise(ends))]


def exposed(events):
    return [(seconds, found.total, found.overlapped, found.exposed) for seconds, found in read_steps(events)]


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda one: (one[0], sum(one))), max_size=6)


@given(intervals, intervals)
def test_overlap_counts_each_moment_once(communication, computation):
    """Total and overlap are the numbers of moments with communication, and with both."""
    sent, computed = ({moment for span in spans for moment in range(*span)} for spans in (communication, computation))
    found = overlap(communication, computation)
    assert [len(sent), len(sent & computed), len(sent - computed)] == [
        round(seconds * SECOND) for seconds in (found.total, found.overlapped, found.exposed)
    ]


def test_a_host_by_hand():
    """Collectives of gloo against the nodes of the backward, step by step, labels and other operators left out."""
    host = [
        *steps(0, 10, 30),
        event(NODE, 2, 6),
        event("gloo:all_reduce", 5, 8),
        event("gloo:all_reduce", 7, 9),
        event("gradavg::bucket 0", 4, 9),
        event("aten::mm", 8, 9),
        event(NODE, 12, 20),
        event("gloo:all_reduce", 13, 14),
    ]
    # In the first step 5 to 9, with the backward until 6.
    assert [(10, 4, 1, 3), (20, 1, 1, 0)] == exposed(host)


def test_an_event_that_was_closed_late():
    """A collective ends with its backward at the latest, and in none with its step: DDP had its result by then."""
    backward = event("gradavg::backward", 2, 7)
    late = event("gloo:all_reduce", 6, 12)
    assert [(10, 1, 0, 1)] == exposed([*steps(0, 10), backward, event(NODE, 2, 6), late])
    assert [(10, 4, 0, 4)] == exposed([*steps(0, 10), late])


def test_a_device_by_hand():
    """NCCL's kernels against all others; spans that only carry a label of the host are neither."""
    device = [
        event("gemm", 2, 6, DeviceType.CUDA),
        event(REDUCE, 5, 9, DeviceType.CUDA),
        event("gradavg::bucket 0", 4, 9, DeviceType.CUDA),
        event("Memcpy DtoD", 8.5, 8.75, DeviceType.CUDA),
    ]
    host = [*steps(0, 10), event("gradavg::bucket 0", 1, 2), event(NODE, 1, 3), event("gradavg::backward", 1, 6)]
    assert [(10, 4, 1.25, 2.75)] == exposed(host + device)


def test_steps_without_communication():
    """A step in which nothing was sent has none, overlapped or not."""
    assert [(3, 0, 0, 0)] == exposed([*steps(0, 3), event(NODE, 1, 2)])


@pytest.mark.parametrize(
    ("options", "message"), [({"steps": 0}, "at least 1, got 0"), ({"skip": 1}, "skip=1 is too small")]
)
def test_too_few_steps_are_refused(options, message):
    """There is at least one step to profile, and two before it."""
    with pytest.raises(ValueError, match=message):
        GradAvgProfiler(**options)
