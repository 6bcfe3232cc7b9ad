"""The cost model: its formulas against numbers computed by hand, its limits, and its figures on disk."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning_gradavg.wire.options import WIRE_DTYPES

from lightning_gradavg.costs.allreduce import ALGORITHMS, MOST_ON_NODE, SEGMENT_BYTES, Cost, Layout, cost_of
from lightning_gradavg.costs.links import BYTES_PER_NUMBER, Link, Links, Stages, fit_link
from lightning_gradavg.costs.overlap import FIRST_BUCKET_BYTES, bucket_sizes, step_seconds
from lightning_gradavg.costs.plot import plot_predictions
from lightning_gradavg.costs.predict import Prediction, Way, Work, best, predict, predict_all
from lightning_gradavg.wire import exchange
from lightning_gradavg.wire.codecs import CODECS, Plain

WITHIN = Link(1.0, 100.0)
BETWEEN = Link(3.0, 10.0)
STAGES = Stages(encode=5.0, decode_sum=7.0, decode=11.0)
SLOW = Links(WITHIN, BETWEEN, {"float32": STAGES, "bfloat16": STAGES}, sum=2.0)
FREE = Links(WITHIN, BETWEEN)

algorithms = st.sampled_from(list(ALGORITHMS))
wire_dtypes = st.sampled_from(list(BYTES_PER_NUMBER))
layouts = st.builds(Layout, st.integers(1, 12), st.integers(1, 12))
amounts = st.floats(1.0, 1e9)
links_of = st.builds(
    lambda a, b, c, d: Links(Link(a, b), Link(c, d)),
    st.floats(0, 1e-2),
    st.floats(1e6, 1e12),
    st.floats(0, 1e-2),
    st.floats(1e6, 1e12),
)


def test_bytes_per_number_are_those_of_the_codecs():
    """What a codec adds per number is what the model counts, headers apart."""
    assert {"float32", *WIRE_DTYPES} == set(BYTES_PER_NUMBER)
    assert (SEGMENT_BYTES, MOST_ON_NODE) == (exchange.SEGMENT_BYTES, exchange.MOST_ON_NODE)
    for name, size in BYTES_PER_NUMBER.items():
        codec = CODECS.get(name, Plain(torch.float32))
        assert 1024 * size == codec.row_bytes(2048) - codec.row_bytes(1024)


@pytest.mark.parametrize(
    ("algorithm", "layout", "wire", "sent"),
    [
        # 120 numbers, 480 bytes. Six rounds of 120 bytes, each 1 + 120/100 s within or 3 + 120/10 s between nodes.
        ("ring", Layout(1, 4), 6 * 2.2, 0.0),
        ("ring", Layout(4, 1), 6 * 15.0, 720.0),
        ("ring", Layout(2, 2), 6 * 15.0, 720.0),
        # Three to others, then three rounds of a ring.
        ("scattered", Layout(1, 4), 3 + 360 / 100 + 3 * 2.2, 0.0),
        ("scattered", Layout(4, 1), 9 + 360 / 10 + 3 * 15.0, 720.0),
        # One to the own node, two to the other; 2 ranks send 240 bytes each over the node's link.
        ("scattered", Layout(2, 2), 1 + 120 / 100 + 6 + 480 / 10 + 3 * 15.0, 480 + 360),
        # Halves within the node there and back, quarters over the link of two ranks there and back.
        ("node by node", Layout(2, 2), 2 * (1 + 240 / 100) + 2 * (3 + 240 / 10), 480.0),
        ("node by node", Layout(4, 1), 2 * (9 + 360 / 10), 720.0),
        # Two levels, all bytes, there and back: 2 (sqrt(2 * 2 * 3) + sqrt(480/10))^2.
        ("tree", Layout(4, 1), 2 * (math.sqrt(12) + math.sqrt(48)) ** 2, 960.0),
        # Of a pair each is the root of one tree: half of the bytes.
        ("tree", Layout(2, 1), 2 * (math.sqrt(6) + math.sqrt(24)) ** 2, 480.0),
        # One level within and one between; the link between nodes is the narrowest.
        ("tree", Layout(2, 2), 2 * (math.sqrt(2 * (1 + 3)) + math.sqrt(24)) ** 2, 480.0),
    ],
)
def test_seconds_and_bytes_by_hand(algorithm: str, layout: Layout, wire: float, sent: float):
    """The formulas give what a pencil gives, in seconds and in bytes that a node sends."""
    cost = cost_of(algorithm, 120, "float32", layout, FREE)
    assert pytest.approx(wire) == cost.wire
    assert pytest.approx(sent) == cost.sent
    assert 0.0 == cost.processor


@pytest.mark.parametrize(
    ("algorithm", "wire_dtype", "layout", "per_number"),
    [
        ("ring", "float32", Layout(1, 4), 0.75 * 2),
        ("ring", "bfloat16", Layout(1, 4), 5 + 11 + 0.75 * (7 + 5)),
        ("tree", "float32", Layout(1, 4), 2.0),
        ("tree", "float32", Layout(2, 1), 0.5 * 2),
        ("scattered", "bfloat16", Layout(1, 4), 0.75 * (5 + 7) + 2 / 4 + 5 / 4 + 11),
        ("node by node", "bfloat16", Layout(4, 1), 0.75 * (5 + 7) + 2 / 4 + 5 / 4 + 11),
        # A half is sent within the node and the other kept; then a half of the half between nodes.
        ("node by node", "bfloat16", Layout(2, 2), (5 + 7 + 2) / 2 + (5 + 7 + 2) / 4 + 5 / 4 + 11),
    ],
)
def test_processor_time_by_hand(algorithm: str, wire_dtype: str, layout: Layout, per_number: float):
    """A rank encodes, adds and decodes as many numbers as the docstrings say."""
    assert pytest.approx(100 * per_number) == cost_of(algorithm, 100, wire_dtype, layout, SLOW).processor


@pytest.mark.parametrize(
    ("algorithm", "wire_dtype", "layout", "measured"),
    [
        ("ring", "float32", Layout(2, 1), 1.003),
        ("ring", "bfloat16", Layout(2, 1), 0.502),
        ("scattered", "bfloat16", Layout(2, 1), 0.501),
        ("scattered", "int8", Layout(2, 1), 0.255),
        ("ring", "float32", Layout(4, 1), 1.505),
        ("ring", "float32", Layout(2, 2), 1.505),
        ("scattered", "float32", Layout(2, 2), 1.755),
        ("scattered", "bfloat16", Layout(2, 2), 0.879),
        ("scattered", "int8", Layout(2, 2), 0.447),
        ("node by node", "float32", Layout(2, 2), 1.004),
        ("node by node", "bfloat16", Layout(2, 2), 0.503),
    ],
)
def test_bytes_are_those_that_were_counted(algorithm: str, wire_dtype: str, layout: Layout, measured: float):
    """A node's cable carried these multiples of the gradients in emulated networks, headers of up to 1 % included."""
    numbers = 11_175_000
    found = cost_of(algorithm, numbers, wire_dtype, layout, FREE).sent / (4 * numbers)
    assert found <= measured <= 1.01 * found


@given(algorithms, wire_dtypes, amounts, links_of)
def test_a_single_rank_sends_nothing(algorithm: str, wire_dtype: str, numbers: float, links: Links):
    """One rank has nothing to sum with: no time, no bytes."""
    assert Cost() == cost_of(algorithm, numbers, wire_dtype, Layout(1, 1), links)


@given(algorithms, wire_dtypes, layouts, amounts, links_of, st.floats(1.0, 10.0))
def test_more_costs_more(algorithm: str, wire_dtype: str, layout: Layout, numbers: float, links: Links, factor: float):
    """More numbers, more latency and less bandwidth never make a sum shorter."""
    assert links.between is not None
    now = cost_of(algorithm, numbers, wire_dtype, layout, links).wire
    slower = [
        Link(factor * links.between.latency, links.between.bandwidth),
        Link(links.between.latency, links.between.bandwidth / factor),
    ]
    later = [cost_of(algorithm, factor * numbers, wire_dtype, layout, links).wire]
    later += [cost_of(algorithm, numbers, wire_dtype, layout, replace(links, between=link)).wire for link in slower]
    assert all(wire >= now * (1 - 1e-12) for wire in later)


@given(algorithms, wire_dtypes, st.integers(1, 9), st.integers(1, 9), amounts, links_of)
def test_more_nodes_take_no_less(algorithm: str, wire_dtype: str, nodes: int, ranks: int, numbers: float, links: Links):
    """Where links within a node are no worse than those between, another node never makes a sum shorter."""
    assert links.between is not None
    equal = replace(links, within=links.between)
    few = cost_of(algorithm, numbers, wire_dtype, Layout(nodes, ranks), equal)
    more = cost_of(algorithm, numbers, wire_dtype, Layout(nodes + 1, ranks), equal)
    assert more.wire >= few.wire * (1 - 1e-12)
    assert more.sent >= few.sent * (1 - 1e-12)


@given(st.integers(2, 64), wire_dtypes, amounts)
def test_one_rank_per_node_sends_the_bytes_of_a_ring(nodes: int, wire_dtype: str, numbers: float):
    """Node by node, scattered and ring: with one rank per node each sends `2 (M - 1)/M` of the bytes."""
    expected = 2 * (nodes - 1) / nodes * numbers * BYTES_PER_NUMBER[wire_dtype]
    for algorithm in ("ring", "scattered", "node by node"):
        cost = cost_of(algorithm, numbers, wire_dtype, Layout(nodes, 1), FREE)
        assert pytest.approx(expected) == cost.sent
        assert pytest.approx(2 * (nodes - 1) * BETWEEN.latency + expected / BETWEEN.bandwidth) == cost.wire


@given(algorithms, st.integers(2, 12), st.integers(1, 12), amounts)
def test_bfloat16_sends_half(algorithm: str, nodes: int, ranks: int, numbers: float):
    """Two bytes per number cross the links of nodes instead of four."""
    full, half = (
        cost_of(algorithm, numbers, wire_dtype, Layout(nodes, ranks), FREE).sent
        for wire_dtype in ("float32", "bfloat16")
    )
    assert pytest.approx(full) == 2 * half


@given(st.integers(2, 12), st.integers(2, 12), amounts)
def test_node_by_node_sends_the_fewest_bytes(nodes: int, ranks: int, numbers: float):
    """With two ranks per node or more, no other way but the tree of two nodes sends as little over a node's link."""
    layout = Layout(nodes, ranks)
    fewest = cost_of("node by node", numbers, "float32", layout, FREE).sent
    assert pytest.approx(2 * (nodes - 1) / nodes * 4 * numbers) == fewest
    for algorithm in ("ring", "scattered"):
        assert fewest < cost_of(algorithm, numbers, "float32", layout, FREE).sent


def test_latency_decides_among_thousands():
    """At 4096 ranks a small sum takes a ring 8190 latencies and a tree of 12 levels 48."""
    links = Links(Link(1e-5, 1e12), Link(1e-5, 1e12))
    assert pytest.approx(8190e-5, rel=1e-4) == cost_of("ring", 1, "float32", Layout(4096, 1), links).wire
    assert pytest.approx(48e-5, rel=1e-2) == cost_of("tree", 1, "float32", Layout(4096, 1), links).wire


def test_stages_overlap_by_segments():
    """The longer of sending and working counts, and the other for one segment; without segments their sum."""
    assert 12.0 == Cost(wire=10.0, processor=8.0, segments=4).seconds
    assert 12.0 == Cost(wire=8.0, processor=10.0, segments=4).seconds
    assert 18.0 == Cost(wire=10.0, processor=8.0).seconds


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cost_of("butterfly", 1, "float32", Layout(1, 2), FREE), "algorithm='butterfly' is not one of 'ring'"),
        (lambda: cost_of("ring", 1, "fp8", Layout(1, 2), FREE), "wire_dtype='fp8' is not one of 'float32'"),
        (lambda: cost_of("ring", -1, "int8", Layout(1, 2), FREE), "numbers must be finite and >= 0, got -1"),
        (lambda: cost_of("tree", 1, "int8", Layout(2, 1), Links(WITHIN)), "give latency and bandwidth of a node's"),
        (lambda: Layout(0, 2), "integers >= 1, got 0 and 2"),
        (lambda: Layout.of(6, 4), "6 ranks do not fill nodes of 4 ranks. Give a multiple of 4"),
        (lambda: Layout.of(0, 4), "0 ranks do not fill"),
        (lambda: Link(-1.0, 1.0), "latency must be a finite number >= 0, got -1.0"),
        (lambda: Link(0.0, 0.0), "bandwidth must be a finite number > 0, got 0.0"),
        (lambda: Link(True, 1.0), "latency must be a finite number >= 0, got True"),
        (lambda: Stages(encode=math.nan), "encode must be a finite number >= 0, got nan"),
        (lambda: Links(WITHIN, sum=-1), "sum must be a finite number >= 0, got -1"),
        (lambda: Links(WITHIN, stages={"fp8": Stages()}), "stages of 'fp8', which is not one of 'float32'"),
        (lambda: fit_link([4.0], [1.0]), r"two sizes or more and a time for each, all > 0; got \[4.0\] bytes"),
        (lambda: fit_link([4.0, 8.0], [1.0, 0.0]), r"all > 0; got .*\[1.0, 0.0\] s"),
        (lambda: bucket_sizes(0, 1), "sizes of buckets must be > 0, got total=0, cap=1"),
        (lambda: Way("ring", "fp8"), "wire_dtype='fp8' is not one of"),
        (lambda: Way("star"), "algorithm='star' is not one of"),
        (lambda: Work(0, 1, 1), "gradient_bytes must be finite and > 0, got 0"),
        (lambda: Work(1, -1, 1), "forward must be finite and >= 0, got -1"),
    ],
)
def test_errors_quote_the_value(call: Callable[[], object], message: str):
    """What cannot be is refused with the value and with what is accepted."""
    with pytest.raises(ValueError, match=message):
        call()


def test_layout_of_ranks():
    """Ranks fill nodes; fewer than a node holds stand on one."""
    assert Layout(4, 2) == Layout.of(8, 2)
    assert Layout(1, 3) == Layout.of(3, 8)
    assert 8 == Layout(4, 2).world_size


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_exact_times_give_back_the_link(latency: float, bandwidth: float):
    """Times of a link without noise are fitted by that link, with a residual of 0."""
    sizes = [2.0**12, 2.0**16, 2.0**21, 2.0**23]
    link, residual = fit_link(sizes, [latency + size / bandwidth for size in sizes])
    assert residual < 1e-6
    for size in sizes:
        assert pytest.approx(latency + size / bandwidth, rel=1e-5) == link.seconds(size)


@pytest.mark.parametrize("seconds", [[5.0, 5.0, 5.0], [9.0, 5.0, 1.0], [1.0, 20.0, 300.0]])
def test_times_that_no_link_has(seconds: list[float]):
    """Times that do not grow, or grow faster than the size, give a line through the origin and a residual."""
    sizes = [10.0, 100.0, 1000.0]
    link, residual = fit_link(sizes, seconds)
    assert 0.0 == link.latency
    assert link.bandwidth > 0
    errors = [link.seconds(size) / second - 1 for size, second in zip(sizes, seconds, strict=True)]
    assert residual == pytest.approx(math.sqrt(sum(error**2 for error in errors) / 3))
    assert residual > 0.05


def test_links_survive_a_file(tmp_path: Path):
    """What is saved is loaded, with and without links between nodes."""
    for links in (replace(SLOW, about={"backend": "gloo"}), Links(WITHIN)):
        links.save(tmp_path / "links.json")
        assert links == Links.load(tmp_path / "links.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as figures of links"),
        ("[]", "holds no figures of links"),
        ('{"schema": 7}', "schema 7 is not 1: measure again"),
        ('{"schema": 1}', "these are no figures of links: 'within'"),
        ('{"schema": 1, "within": {"latency": -1, "bandwidth": 1}}', "latency must be a finite number >= 0, got -1"),
        ('{"schema": 1, "within": {"speed": 1}}', "unexpected keyword argument 'speed'"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, message: str):
    """A file of something else is refused by its name."""
    path = tmp_path / "links.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=f"links.json.*{message}"):
        Links.load(path)
    with pytest.raises(ValueError, match=r"nothing\.json' cannot be read"):
        Links.load(tmp_path / "nothing.json")


def test_buckets():
    """The first bucket is small, the others are full, and the last holds the rest."""
    assert (1.0, 4.0, 4.0, 2.0) == bucket_sizes(11.0, 4.0, first=1.0)
    assert (2.0, 2.0) == bucket_sizes(4.0, 2.0, first=9.0)
    assert (3.0,) == bucket_sizes(3.0, 4.0, first=9.0)
    assert (FIRST_BUCKET_BYTES, 25 * 2**20) == bucket_sizes(26 * 2**20, 25 * 2**20)


def test_the_backward_hides_communication():
    """Buckets of 1, 4, 4 and 2 bytes through a backward of 11 s, at 1, 2 and 0.5 s per byte, by hand."""
    sizes = (1.0, 4.0, 4.0, 2.0)
    # Ready at 6, 10, 14 and 16; at 0.5 s per byte each ends before the next is ready, and the last at 17.
    assert 17.0 == step_seconds(5.0, 11.0, sizes, lambda size: 0.5 * size, overlap=True)
    # At 1 s per byte: 7, 14, 18, 20. At 2: 8, 18, 26, 30.
    assert 20.0 == step_seconds(5.0, 11.0, sizes, lambda size: size, overlap=True)
    assert 30.0 == step_seconds(5.0, 11.0, sizes, lambda size: 2 * size, overlap=True)
    assert 16.0 + 11.0 == step_seconds(5.0, 11.0, sizes, lambda size: size, overlap=False)
    assert 16.0 == step_seconds(5.0, 11.0, sizes, lambda _: 0.0, overlap=True)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(1, 100), st.floats(0.5, 30), st.floats(0, 3))
def test_a_step_stands_between_its_bounds(forward: float, backward: float, total: float, cap: float, rate: float):
    """A step is at least computation, and communication after the forward; at most their sum, as without overlap."""
    sizes = bucket_sizes(total, cap, first=1.0)
    found = step_seconds(forward, backward, sizes, lambda size: rate * size, overlap=True)
    apart = step_seconds(forward, backward, sizes, lambda size: rate * size, overlap=False)
    assert found >= max(forward + backward, forward + rate * total) * (1 - 1e-9)
    assert found <= apart * (1 + 1e-9)
    assert pytest.approx(forward + backward + rate * total) == apart


def test_prediction_of_a_step():
    """2 ranks, 1 MiB in one bucket: a ring of 2 (3 + 2**20/2/10) s, none of it hidden: it is ready at the end."""
    work = Work(2**20, forward=2.0, backward=4.0)
    found = predict(Way("ring"), work, Layout(2, 1), FREE)
    assert pytest.approx(2 * (3 + 2**19 / 10)) == found.communication == found.exposed
    assert pytest.approx(6.0 + found.communication) == found.step
    assert 2**20 == found.sent
    assert 6.0 == predict(Way("ring"), work, Layout(1, 1), FREE).step


def test_best_is_what_something_offers():
    """The shortest step counts only where an option chooses it; int8 from rank to rank is offered by nothing."""
    work = Work(1e6, 0.01, 0.02)
    links = Links(Link(1e-5, 1e10), Link(1e-4, 1e8))
    found = predict_all(work, [Layout(4, 2)], links)
    assert 16 == len(found)
    choice = best(found)
    assert choice is not None
    assert ("node by node, int8", "wire_dtype='int8', node_aware=True") == (str(choice.way), choice.chosen_by)
    assert None is best(one for one in found if one.way == Way("ring", "int8"))
    assert choice.step == min(one.step for one in found if one.chosen_by is not None)


@pytest.mark.parametrize(
    ("way", "layout", "chosen_by"),
    [
        (Way("ring"), Layout(4, 1), "the default"),
        (Way("ring"), Layout(2, 2), "node_aware=False"),
        (Way("ring", "bfloat16"), Layout(4, 1), "ddp_comm_hook=bf16_compress_hook"),
        (Way("tree", "float16"), Layout(4, 1), "NCCL_ALGO=Tree, ddp_comm_hook=fp16_compress_hook"),
        (Way("tree", "int8"), Layout(4, 1), None),
        (Way("scattered"), Layout(4, 1), None),
        (Way("scattered", "int8"), Layout(4, 1), "wire_dtype='int8'"),
        (Way("scattered", "int8"), Layout(2, 2), "wire_dtype='int8', node_aware=False"),
        (Way("node by node"), Layout(4, 1), None),
        (Way("node by node"), Layout(2, 2), "node_aware=True"),
        (Way("node by node", "bfloat16"), Layout(2, 2), "wire_dtype='bfloat16', node_aware=True"),
    ],
)
def test_how_a_way_is_chosen(way: Way, layout: Layout, chosen_by: str | None):
    """Each way names its options, or nothing where ranks stand so that it cannot be had."""
    assert chosen_by == way.chosen_by(layout)


def curves() -> tuple[list[Prediction], Work]:
    work = Work(1e6, 0.01, 0.02)
    links = Links(Link(1e-5, 1e10), Link(1e-4, 1e8))
    return predict_all(work, [Layout.of(ranks, 2) for ranks in (2, 4, 8)], links), work


def test_curves_are_drawn(tmp_path: Path):
    """A picture per wire type is written."""
    predictions, work = curves()
    plot_predictions(predictions, work, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without matplotlib the error names the extra that brings it; a type that it cannot write is quoted."""
    predictions, work = curves()
    with pytest.raises(RuntimeError, match=r"curves\.xyz' cannot be written"):
        plot_predictions(predictions, work, tmp_path / "curves.xyz")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match=r"pip install 'lightning-gradavg\[demo\]'"):
        plot_predictions(predictions, work, tmp_path / "curves.png")
