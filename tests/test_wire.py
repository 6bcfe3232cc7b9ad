"""What travels between ranks: options, routes, bytes, and what lossy bytes leave behind; no processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning_gradavg.wire.buffers import Buffers
from lightning_gradavg.wire.feedback import Feedback, Residual
from lightning_gradavg.wire.options import WIRE_DTYPES, WireOptions
from lightning_gradavg.wire.segments import Segment, Travelling
from lightning_gradavg.wire.worker import Worker

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.place import places_on_nodes
from lightning_gradavg.wire.codecs import BLOCK, CODECS, Float16, Int8, Plain, fault_of
from lightning_gradavg.wire.route import Hop, route_of

# The largest error of one rounding to 8 or 11 significant bits, relative to the number: the unit roundoff of the type.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def random_rows(rows: int = 3, width: int = 2 * BLOCK, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", WIRE_DTYPES)
def test_payload_has_the_stated_size(name):
    """A row is 8 bytes longer than its numbers are wide, and that of int8 4 more for each block."""
    rows, codec = random_rows(), CODECS[name]
    payload = codec.encode(rows)
    expected = {"bfloat16": 8 + 1024, "float16": 8 + 1024, "int8": 8 + 2 * 4 + 512}[name]
    assert (3, expected) == tuple(payload.shape)
    assert expected == codec.row_bytes(512)
    assert torch.uint8 == payload.dtype
    assert rows.shape == codec.decode(payload).shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_own_type_is_exact(dtype):
    """Numbers sent in their own type come back with all bits, those that are not finite as well."""
    rows = random_rows().to(dtype)
    rows[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    codec = Plain(dtype, dtype)
    torch.testing.assert_close(codec.decode(codec.encode(rows)), rows, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", WIRE_DTYPES)
def test_numbers_are_read_into_the_type_of_a_bucket(name, dtype):
    """What is read into a bucket is what is decoded, rounded once to the bucket's type; over several pieces."""
    payload = CODECS[name].encode(random_rows(2, 2**17 + 2 * BLOCK))
    rows = torch.full((2, 2**17 + 2 * BLOCK), math.nan, dtype=dtype)
    CODECS[name].read(payload, rows)
    assert torch.equal(CODECS[name].decode(payload).to(dtype), rows)


@pytest.mark.parametrize("name", WIRE_DTYPES)
def test_factor_is_applied_before_the_rounding(name):
    """Numbers times a factor are written as the products would be, and stay as they were; over several pieces."""
    codec, rows = CODECS[name], random_rows(2, 2**17 + 2 * BLOCK)
    before, payload = rows.clone(), codec.blank(2, rows.shape[1], 0, rows.device)
    codec.write(rows, payload, 0.3)
    assert torch.equal(codec.encode(rows * 0.3), payload)
    assert torch.equal(before, rows)


@pytest.mark.parametrize("exponent", [-120, -60, 0, 60, 120])
@pytest.mark.parametrize("name", ROUNDING)
def test_rounding_is_that_of_the_type_at_any_magnitude(name, exponent):
    """float16, which ends at 65504 and at 6e-8, neither overflows nor underflows: each number is rounded once."""
    rows = random_rows() * 2.0**exponent
    decoded = CODECS[name].decode(CODECS[name].encode(rows))
    # A normal float16 is 2**-28 of the largest or more, and a normal bfloat16 a normal float32.
    normal = rows.abs() >= rows.abs().amax(1, keepdim=True) * 2.0**-28
    normal &= rows.abs() >= torch.finfo(torch.float32).tiny
    assert ((decoded - rows).abs() <= ROUNDING[name] * rows.abs())[normal].all()


def test_float16_scale_is_a_power_of_two():
    """Numbers that float16 can hold next to the largest come back exactly, whatever their common power of two."""
    for exponent in (-130, -20, 0, 5, 100):
        rows = torch.tensor([[1.0, -1.5, 1.75, 2.0**-10], [3.0, 0.0, -0.0, 1.25]]) * 2.0**exponent
        assert torch.equal(rows, Float16().decode(Float16().encode(rows)))


def test_float16_extremes():
    """The largest numbers that do not round to 2**128, the smallest, and rows of zeros survive."""
    largest, smallest = 1.9995 * 2.0**127, torch.finfo(torch.float32).smallest_normal
    rows = torch.tensor([[largest, -largest], [smallest, 0.0], [0.0, 0.0], [2.0**-149, 0.0]])
    decoded = Float16().decode(Float16().encode(rows))
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded[:3], rows[:3], rtol=ROUNDING["float16"], atol=0)
    assert [0.0, 0.0] == decoded[2].tolist()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ROUNDING)
def test_what_is_not_finite_stays_so_and_spoils_nothing(name, bad):
    """An infinite number or NaN arrives as itself, and its neighbours as if it were not there."""
    rows = random_rows()
    clean = CODECS[name].decode(CODECS[name].encode(rows.index_fill(1, torch.tensor([5]), 0.0)))
    rows[:, 5] = bad
    decoded = CODECS[name].decode(CODECS[name].encode(rows))
    assert [str(bad)] * 3 == [str(value) for value in decoded[:, 5].tolist()]
    decoded[:, 5] = clean[:, 5]
    assert torch.equal(clean, decoded)


def test_int8_step_is_the_block_maximum_over_127():
    """Each number is off by at most half a step of its block, and the largest of a block is exact to float32."""
    rows = random_rows() * torch.tensor([1e-20, 1.0, 1e20])[:, None]
    decoded = Int8().decode(Int8().encode(rows))
    blocks, back = rows.unflatten(1, (-1, BLOCK)), decoded.unflatten(1, (-1, BLOCK))
    step = blocks.abs().amax(2, keepdim=True) / 127
    assert ((blocks - back).abs() <= step * (0.5 + 1e-5)).all()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_int8_block_with_a_bad_number_is_nan(bad):
    """What is not finite is seen in its block, and in no other."""
    rows = random_rows()
    rows[1, 300] = bad
    decoded = Int8().decode(Int8().encode(rows))
    assert decoded[1, BLOCK:].isnan().all()
    assert decoded[[0, 2]].isfinite().all()
    assert decoded[1, :BLOCK].isfinite().all()


def test_int8_of_tiny_blocks_is_zero():
    """Where a scale has no reciprocal, nothing is sent, and nothing becomes NaN."""
    rows = torch.full((1, BLOCK), 2.0**-149)
    assert torch.equal(torch.zeros(1, BLOCK), Int8().decode(Int8().encode(rows)))


@pytest.mark.parametrize("codec", [*CODECS.values(), Plain(torch.float64, torch.float64)])
def test_fault_travels_with_the_numbers(codec):
    """The header says which rank failed, and does not touch the numbers."""
    rows = random_rows().to(codec.dtype)
    assert 0 == fault_of(codec.encode(rows))
    assert 3 == fault_of(codec.encode(rows, 3))
    assert torch.equal(codec.decode(codec.encode(rows)), codec.decode(codec.encode(rows, 3)))


def segments_of(flat: torch.Tensor, factor: Any) -> list[Segment]:
    """Two segments of three parts, of one and of three numbers."""
    bucket = Travelling(flat, flat, lambda: factor, torch.float32, torch.futures.Future())
    return [Segment(bucket, 0, 1, 3), Segment(bucket, 3, 3, 3)]


@pytest.mark.parametrize("size", [4, 5, 8, 11, 12])
def test_segments_cover_a_bucket_once(size):
    """The segments of a bucket hold each number once, and zeros beyond its end; the sum is written back likewise."""
    flat = torch.arange(1.0, size + 1)
    expected = torch.zeros(12)
    expected[:size] = 2 * flat
    read = [(rows * factor).flatten() for rows, factor in (segment.read() for segment in segments_of(flat, 2.0))]
    assert torch.equal(expected, torch.cat(read))
    for segment, rows in zip(segments_of(flat, 1.0), read, strict=True):
        segment.write(lambda out, rows=rows: out.copy_(rows.view_as(out)))
    assert torch.equal(expected[:size], flat)


@pytest.mark.parametrize("factor", [0.0, torch.tensor(0.0)])
@pytest.mark.parametrize("size", [5, 12])
def test_discarded_bucket_is_read_as_zeros(size, factor):
    """A factor of 0 selects a gradient away, NaN or not."""
    for segment in segments_of(torch.full((size,), math.nan), factor):
        rows, left = segment.read()
        assert 1.0 == left
        assert torch.equal(torch.zeros(3, segment.columns), rows)


def say(rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Send rows and what is owed, as a hop does, and return what arrives."""
    codec = Int8()
    payload = codec.blank(len(rows), rows.shape[1], 0, rows.device)
    codec.write(rows, payload, owed=residual)
    return codec.decode(payload)


def test_feedback_pays_everything_back():
    """After T steps the sum of what was said is T gradients, less what is still owed."""
    codec, residual, rows = Int8(), torch.zeros(1, BLOCK), random_rows(1, BLOCK)
    said = torch.zeros(1, BLOCK)
    for _ in range(50):
        said += say(rows, residual)
    torch.testing.assert_close(said + residual, 50 * rows, rtol=1e-5, atol=1e-5)
    assert (residual.abs() <= rows.abs().max() / 127).all()
    assert (said / 50 - rows).norm() <= 0.02 * (codec.decode(codec.encode(rows)) - rows).norm() * 2


def test_what_is_owed_moves_with_its_parameter():
    """When DDP arranges its buckets anew, every parameter takes along what it was owed, from both stages."""
    a, b, c = torch.zeros(3), torch.zeros(2), torch.zeros(4)
    feedback = Feedback()

    def zeros(width: int) -> Callable[[], list[Residual]]:
        return lambda: [Residual(torch.zeros(2, width), torch.zeros(1, width), 0, 1)]

    # Two ranks; this one is the second: of parts of 3 numbers it sums numbers 3 to 5, which are b and padding.
    first = feedback.residuals([a, b], zeros(3))
    first.segments[0].parts.copy_(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]))
    first.segments[0].total.copy_(torch.tensor([[10.0, 20.0, 99.0]]))
    assert first is feedback.residuals([a, b], zeros(3))
    other = feedback.residuals([c], zeros(2))
    assert other.carried is None
    other.segments[0].parts.copy_(torch.tensor([[5.0, 6.0], [7.0, 0.0]]))
    moved = feedback.residuals([b, c], zeros(3))
    assert moved.carried is not None
    assert [10.0, 20.0, 5.0, 6.0, 7.0, 0.0] == moved.carried.tolist()
    assert 0 == sum(part.count_nonzero() for segment in moved.segments for part in (segment.parts, segment.total))
    alone = feedback.residuals([a], zeros(2))
    assert alone.carried is not None
    assert [1.0, 2.0, 3.0] == alone.carried.tolist()


def test_owed_within_a_node_has_its_position():
    """The second rank of a node owes numbers of the second half of a bucket."""
    parts, total = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, 0.25]])
    residuals = Feedback().residuals([torch.zeros(8)], lambda: [Residual(parts, total, 4, 0)])
    assert [0.0, 0.0, 0.0, 0.0, 1.5, 2.25, 3.0, 4.0] == residuals.flat().tolist()


def names_of(options: WireOptions, nodes: list[int], rank: int = 0, *, nccl: bool = False) -> Any:
    return [(hop.name, hop.ranks, hop.narrow) for hop in route_of(options, places_on_nodes(nodes), rank, nccl=nccl).hops]


@pytest.mark.parametrize("nodes", [[0], [0, 0, 0], [0, 1], [0, 0, 1]])
def test_no_wire_type_is_one_all_reduce(nodes):
    """On one node, on nodes of one rank and on uneven ones, gradients in their own type need no other way."""
    assert [] == names_of(WireOptions(), nodes)


def test_even_nodes_are_summed_first():
    """On nodes of two ranks each a bucket goes through the node, and then across to the rank of equal position."""
    for rank, hops in (
        (0, [("node0", (0, 2), False), ("across0", (0, 1), True)]),
        (1, [("node1", (1, 3), False), ("across0", (0, 1), True)]),
        (3, [("node1", (1, 3), False), ("across1", (2, 3), True)]),
    ):
        assert hops == names_of(WireOptions("bfloat16"), [0, 1, 0, 1], rank)
    exact = [("node0", (0, 1), False), ("across0", (0, 2), False)]
    assert exact == names_of(WireOptions(), [0, 0, 1, 1])


@pytest.mark.parametrize("nodes", [[0, 0, 0, 1], [0, 0, 0]])
def test_everything_else_goes_between_all_ranks(nodes):
    """Uneven nodes, or one node, send in the wire type between all ranks."""
    everyone = [("all", tuple(range(len(nodes))), True)]
    assert everyone == names_of(WireOptions("int8"), nodes)


def test_scope_of_nodes_leaves_one_node_alone():
    """Between nodes only, one node sends in full precision, and nodes of one rank are all there is."""
    assert [] == names_of(WireOptions("bfloat16", "nodes"), [0, 0])
    assert [("all", (0, 1), True)] == names_of(WireOptions("bfloat16", "nodes"), [0, 1])


@pytest.mark.parametrize(
    ("options", "nodes", "nccl", "reason"),
    [
        (WireOptions(node_aware=True), [0, 0, 1], False, "node_aware=True has no effect: the nodes have 2, 1 ranks"),
        (WireOptions(node_aware=True), [0, 0], False, "node_aware=True has no effect: all ranks are on one node"),
        (WireOptions(node_aware=True), [0, 1], False, "node_aware=True has no effect: each node has one rank"),
        (WireOptions(node_aware=True), [0, 0, 1, 1], True, "node_aware=True has no effect: NCCL lays its own ways"),
        (WireOptions("bfloat16", "nodes"), [0, 0, 1], False, "all ranks send in bfloat16: the nodes have 2, 1 ranks"),
        (
            WireOptions("bfloat16", "nodes", node_aware=False),
            [0, 0, 1, 1],
            False,
            "all ranks send in bfloat16: node_aware=False",
        ),
        (WireOptions(), [0, 0, 1], False, None),
        (WireOptions("bfloat16", "nodes"), [0, 1], False, None),
    ],
)
def test_reason_why_a_wish_has_no_effect(options, nodes, nccl, reason):
    """What cannot be done as asked is said."""
    found = route_of(options, places_on_nodes(nodes), 0, nccl=nccl).reason
    assert (reason is None) == (found is None)
    assert reason is None or reason in found


def test_what_each_rank_holds():
    """After a hop, ranks that it does not join hold different parts, and after the last one each a part of its own."""
    places = places_on_nodes([0, 1, 0, 1])
    routes = [route_of(WireOptions(), places, rank, nccl=False) for rank in range(4)]
    assert [slice(0, 4)] * 4 == [route.held(0) for route in routes]
    assert [slice(0, 2), slice(0, 2), slice(2, 4), slice(2, 4)] == [route.held(1) for route in routes]
    assert [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)] == [route.held(2) for route in routes]


def test_parts_are_as_many_as_ranks():
    """Each rank holds one part of the sum."""
    assert 4 == route_of(WireOptions("int8"), places_on_nodes([0, 0, 1, 1]), 2, nccl=False).parts
    assert (
        Hop("across0", (0, 2), 1, narrow=True)
        == (route_of(WireOptions("int8"), places_on_nodes([0, 0, 1, 1]), 2, nccl=False).hops[1])
    )


def any_hook(state: Any, bucket: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wire_dtype": "float8"}, r"wire_dtype='float8' is not one of 'bfloat16', 'float16', 'int8'"),
        ({"wire_scope": "rack", "wire_dtype": "int8"}, r"wire_scope='rack' is not one of 'all', 'nodes'"),
        ({"wire_scope": "nodes"}, r"wire_scope='nodes' says where wire_dtype applies, which is not set"),
        ({"node_aware": "yes"}, r"node_aware must be True, False, or None .* got 'yes'"),
        ({"power_sgd_rank": 0}, r"power_sgd_rank must be 1 or more, .* got 0"),
        ({"power_sgd_rank": 1, "power_sgd_start_step": 1}, r"power_sgd_start_step must be 2 or more, .* got 1"),
        ({"power_sgd_rank": 1, "wire_dtype": "int8"}, r"power_sgd_rank=1 .* wire_dtype='int8'"),
        ({"power_sgd_rank": 1, "node_aware": True}, r"power_sgd_rank=1 .* node_aware=True"),
        ({"wire_dtype": "int8", "ddp_comm_hook": any_hook}, r"wire_dtype='int8' .* ddp_comm_hook"),
        ({"node_aware": True, "ddp_comm_wrapper": any_hook}, r"node_aware=True .* ddp_comm_wrapper"),
        ({"power_sgd_rank": 2, "ddp_comm_hook": any_hook}, r"power_sgd_rank=2 .* ddp_comm_hook"),
        (
            {"wire_dtype": "int8", "param_to_hook_all_reduce": torch.nn.Parameter(torch.zeros(1))},
            r"param_to_hook_all_reduce .* wire_dtype='int8'",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    """Case 30: an unknown value is quoted with those that are known, and two that contradict each other are named."""
    with pytest.raises(ValueError, match=message):
        GradAvgStrategy(**options)


def test_memory_is_used_again():
    """What was given back is taken by the next one of about its size, and by nobody else meanwhile."""
    buffers = Buffers()
    first, second = buffers.take(1000), buffers.take(1000)
    assert 1000 == len(first)
    assert first.data_ptr() != second.data_ptr()
    memory = first.data_ptr()
    buffers.give(first)
    assert memory != buffers.take(100).data_ptr()
    assert (memory, 900) == ((taken := buffers.take(900)).data_ptr(), len(taken))
    assert memory != buffers.take(900).data_ptr()


def test_worker_runs_in_order_and_ends():
    """Calls run one after another in a thread that ends when it is closed."""
    seen: list[int] = []
    worker = Worker("test")
    for number in range(100):
        worker.submit(seen.append, number)
    worker.close()
    assert list(range(100)) == seen
    assert not worker._thread.is_alive()


def test_forgotten_worker_ends():
    """A worker that nobody holds ends after what it was given."""
    seen: list[int] = []
    worker = Worker("test")
    thread = worker._thread
    worker.submit(seen.append, 1)
    del worker
    thread.join()
    assert [1] == seen
