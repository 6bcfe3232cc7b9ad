"""The steps of an exchange, in one process: what is cut, in which order, in whose memory, and where it runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from lightning_gradavg.place import places_on_nodes
from lightning_gradavg.wire import exchange
from lightning_gradavg.wire.codecs import CODECS
from lightning_gradavg.wire.exchange import Exchange, InOrder
from lightning_gradavg.wire.route import WireOptions, route_of

CPU = torch.device("cpu")


def of_three() -> Exchange:
    """Return what one rank of three has, which no group connects."""
    route = route_of(WireOptions("bfloat16"), places_on_nodes([0, 0, 0]), 1, lays_own_ways=False)
    return Exchange(route, CODECS["bfloat16"], {})


@pytest.mark.parametrize("size", [1, 23, 24, 25, 48, 100])
def test_segments_cover_a_bucket_once(size, monkeypatch):
    """The segments of a bucket hold each number once, and zeros beyond its end, in parts of aligned size."""
    monkeypatch.setattr(exchange, "SEGMENT_BYTES", 48)
    flat = torch.arange(1.0, size + 1)
    segments = list(of_three()._cut(flat[None]))
    assert torch.equal(flat, torch.cat([segment.numbers for segment in segments]))
    padded = torch.cat([segment.total.flatten() for segment in segments])
    assert torch.equal(torch.cat([flat, torch.zeros(len(padded) - size)]), padded)
    assert {8} == {segment.columns for segment in segments}
    assert all(segment.total.shape == (1, 24) for segment in segments)


@pytest.mark.parametrize("size", [241, 1000, 1201])
def test_little_of_a_segment_is_padding(size, monkeypatch):
    """A bucket that is no multiple of the longest segment is cut evenly: each part is padded to aligned rows alone."""
    monkeypatch.setattr(exchange, "SEGMENT_BYTES", 480)  # 240 numbers
    segments = list(of_three()._cut(torch.zeros(1, size)))
    assert -(-size // 240) == len(segments)
    assert sum(segment.total.numel() for segment in segments) < size + len(segments) * 3 * CODECS["bfloat16"].multiple


def test_order_of_steps():
    """Steps come in an order that depends on their number alone: two segments between one step and the next."""
    steps: Any = ["scatter", "gather", "arrive"]
    segments: Any = [0, 1, 2, 3]
    order = list(exchange._in_turn(steps, segments))
    assert {(step, segment) for step in steps for segment in segments} == set(order)
    assert 12 == len(order)
    for step, after in (("scatter", "gather"), ("gather", "arrive")):
        for segment in segments:
            assert order.index((step, segment)) < order.index((after, segment))
    assert [("scatter", 0), ("scatter", 1), ("gather", 0), ("scatter", 2), ("gather", 1), ("scatter", 3)] == order[:6]
    assert [("arrive", 2), ("arrive", 3)] == order[-2:]


def test_memory_is_used_again():
    """Segments that are under way at once have memory of their own, and those of the next bucket take it over."""
    ours = of_three()
    flat = torch.zeros(1, 10)

    def addresses(name: str) -> list[int]:
        lent = [ours._lender(slot, CPU)(name, 2, 5, torch.float32) for slot in range(3)]
        return [memory.data_ptr() for memory in lent]

    first = addresses("sent")
    assert 6 == len({*first, *addresses("received")})
    assert first == addresses("sent")
    assert 1 == len(list(ours._cut(flat)))
    larger = ours._lender(0, CPU)("sent", 2, 50, torch.float32)
    assert (2, 50) == tuple(larger.shape)
    assert larger.data_ptr() == ours._lender(0, CPU)("sent", 1, 7, torch.float64).data_ptr()


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_calls_run_in_order_and_the_thread_ends():
    """Calls run one after another in a thread, which has ended when it is closed."""
    seen: list[int] = []
    in_order = InOrder(CPU, "in order")

    def call(number: int) -> torch.Tensor:
        seen.append(number)
        assert threads("in order") == [threading.current_thread()]
        return torch.tensor(number)

    futures = [in_order.submit(lambda number=number: call(number)) for number in range(100)]
    assert 99 == futures[-1].wait().item()
    assert in_order.close()
    assert list(range(100)) == seen
    assert [] == threads("in order")
    assert in_order.close()


def test_failure_of_a_call_is_the_last_one():
    """What a call raises is told by its future and those after it, which do not run; the thread ends all the same."""
    in_order = InOrder(CPU, "failing")

    def fail() -> torch.Tensor:
        raise MemoryError("no memory")

    for future in (in_order.submit(fail), in_order.submit(pytest.fail)):  # type: ignore[arg-type]  # is not called
        with pytest.raises(RuntimeError, match="the sum of a bucket over the ranks failed: MemoryError"):
            future.wait()
    assert in_order.close()
    assert [] == threads("failing")


def test_thread_that_waits_for_a_lost_peer_is_not_waited_for():
    """Where a call has not come back, closing says so at once, and the thread ends when it does."""
    in_order, hold = InOrder(CPU, "held"), threading.Event()

    def wait() -> torch.Tensor:
        assert hold.wait(30)
        return torch.ones(())

    in_order.submit(wait)
    assert not in_order.close()
    (thread,) = threads("held")
    hold.set()
    thread.join()
    assert in_order.close()


def test_forgotten_thread_ends():
    """A thread that nobody holds ends after what it was given."""
    in_order = InOrder(CPU, "forgotten")
    future = in_order.submit(lambda: torch.ones(()))
    (thread,) = threads("forgotten")
    del in_order
    thread.join()
    assert 1.0 == future.wait().item()
