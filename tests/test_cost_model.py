"""The cost model: its formulas against numbers computed by hand, its limits, and its figures on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.allreduce import (
    ALGORITHMS,
    FIRST_BUCKET_BYTES,
    Cost,
    Layout,
    Work,
    bucket_sizes,
    cost_of,
    predict,
    step_seconds,
)
from benchmarks.cost_model import Way, compare, main, way_of
from benchmarks.links import WIRE_TYPES, Link, Links, Stages, fit_link, measure_links, neighbors
from lightning_gradavg.place import places_on_nodes

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
WITHIN = Link(1.0, 100.0)
BETWEEN = Link(3.0, 10.0)
STAGES = Stages(encode=5.0, decode_sum=7.0, decode=11.0)
SLOW = Links(WITHIN, BETWEEN, {"float32": STAGES, "bfloat16": STAGES}, sum=2.0)
FREE = Links(WITHIN, BETWEEN)

algorithms = st.sampled_from(list(ALGORITHMS))
wire_types = st.sampled_from(list(WIRE_TYPES))
layouts = st.builds(Layout, st.integers(1, 12), st.integers(1, 12))
amounts = st.floats(1.0, 1e9)
links_of = st.builds(
    lambda a, b, c, d: Links(Link(a, b), Link(c, d)),
    st.floats(0, 1e-2),
    st.floats(1e6, 1e12),
    st.floats(0, 1e-2),
    st.floats(1e6, 1e12),
)


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
    ("algorithm", "wire_type", "layout", "per_number"),
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
def test_processor_time_by_hand(algorithm: str, wire_type: str, layout: Layout, per_number: float):
    """A rank encodes, adds and decodes as many numbers as the docstrings say."""
    assert pytest.approx(100 * per_number) == cost_of(algorithm, 100, wire_type, layout, SLOW).processor


@pytest.mark.parametrize(
    ("algorithm", "wire_type", "layout", "measured"),
    [
        ("ring", "float32", Layout(2, 1), 1.003),
        ("ring", "bfloat16", Layout(2, 1), 0.502),
        ("scattered", "bfloat16", Layout(2, 1), 0.501),
        ("ring", "float32", Layout(4, 1), 1.505),
        ("ring", "float32", Layout(2, 2), 1.505),
        ("scattered", "float32", Layout(2, 2), 1.755),
        ("scattered", "bfloat16", Layout(2, 2), 0.879),
        ("node by node", "float32", Layout(2, 2), 1.004),
        ("node by node", "bfloat16", Layout(2, 2), 0.503),
    ],
)
def test_bytes_are_those_that_were_counted(algorithm: str, wire_type: str, layout: Layout, measured: float):
    """A node's cable carried these multiples of the gradients in emulated networks, headers of up to 1 % included."""
    numbers = 11_175_000
    found = cost_of(algorithm, numbers, wire_type, layout, FREE).sent / (4 * numbers)
    assert found <= measured <= 1.01 * found


@given(algorithms, wire_types, amounts, links_of)
def test_a_single_rank_sends_nothing(algorithm: str, wire_type: str, numbers: float, links: Links):
    """One rank has nothing to sum with: no time, no bytes."""
    assert Cost() == cost_of(algorithm, numbers, wire_type, Layout(1, 1), links)


@given(algorithms, wire_types, layouts, amounts, links_of, st.floats(1.0, 10.0))
def test_more_costs_more(algorithm: str, wire_type: str, layout: Layout, numbers: float, links: Links, factor: float):
    """More numbers, more latency and less bandwidth never make a sum shorter."""
    assert links.between is not None
    now = cost_of(algorithm, numbers, wire_type, layout, links).wire
    slower = [
        Link(factor * links.between.latency, links.between.bandwidth),
        Link(links.between.latency, links.between.bandwidth / factor),
    ]
    later = [cost_of(algorithm, factor * numbers, wire_type, layout, links).wire]
    later += [cost_of(algorithm, numbers, wire_type, layout, replace(links, between=link)).wire for link in slower]
    assert all(wire >= now * (1 - 1e-12) for wire in later)


@given(algorithms, wire_types, st.integers(1, 9), st.integers(1, 9), amounts, links_of)
def test_more_nodes_take_no_less(algorithm: str, wire_type: str, nodes: int, ranks: int, numbers: float, links: Links):
    """Where links within a node are no worse than those between, another node never makes a sum shorter."""
    assert links.between is not None
    equal = replace(links, within=links.between)
    few = cost_of(algorithm, numbers, wire_type, Layout(nodes, ranks), equal)
    more = cost_of(algorithm, numbers, wire_type, Layout(nodes + 1, ranks), equal)
    assert more.wire >= few.wire * (1 - 1e-12)
    assert more.sent >= few.sent * (1 - 1e-12)


@given(st.integers(2, 64), wire_types, amounts)
def test_one_rank_per_node_sends_the_bytes_of_a_ring(nodes: int, wire_type: str, numbers: float):
    """Node by node, scattered and ring: with one rank per node each sends `2 (M - 1)/M` of the bytes."""
    expected = 2 * (nodes - 1) / nodes * numbers * WIRE_TYPES[wire_type].itemsize
    for algorithm in ("ring", "scattered", "node by node"):
        cost = cost_of(algorithm, numbers, wire_type, Layout(nodes, 1), FREE)
        assert pytest.approx(expected) == cost.sent
        assert pytest.approx(2 * (nodes - 1) * BETWEEN.latency + expected / BETWEEN.bandwidth) == cost.wire


@given(algorithms, st.integers(2, 12), st.integers(1, 12), amounts)
def test_bfloat16_sends_half(algorithm: str, nodes: int, ranks: int, numbers: float):
    """Two bytes per number cross the links of nodes instead of four."""
    full, half = (
        cost_of(algorithm, numbers, wire_type, Layout(nodes, ranks), FREE).sent for wire_type in ("float32", "bfloat16")
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
        (lambda: cost_of("tree", 1, "bfloat16", Layout(2, 1), Links(WITHIN)), "of one node only. .* or give --between"),
        (lambda: Layout.of(6, 4), "6 ranks do not fill nodes of 4 ranks. Give a multiple of 4"),
        (lambda: Layout.of(0, 4), "0 ranks do not fill"),
        (lambda: Link(-1.0, 1.0), "a latency >= 0 and a bandwidth > 0, got -1.0 and 1.0"),
        (lambda: Link(0.0, 0.0), "a latency >= 0 and a bandwidth > 0, got 0.0 and 0.0"),
        (lambda: Link(math.nan, 1.0), "got nan and 1.0"),
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
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"sum": 1}', "KeyError: 'within'"),
        ('{"within": {"latency": -1, "bandwidth": 1}}', "a latency >= 0 and a bandwidth > 0, got -1 and 1"),
        ('{"within": {"speed": 1}}', "unexpected keyword argument 'speed'"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, message: str):
    """A file of something else is refused by its name."""
    path = tmp_path / "links.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=f"links.json' holds no figures of links .*{message}"):
        Links.load(path)
    with pytest.raises(ValueError, match=r"nothing\.json' holds no figures of links \(FileNotFoundError"):
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
    step, communication = predict("ring", "float32", work, Layout(2, 1), FREE)
    assert pytest.approx(2 * (3 + 2**19 / 10)) == communication
    assert pytest.approx(6.0 + communication) == step
    assert (6.0, 0.0) == predict("ring", "float32", work, Layout(1, 1), FREE)


STEP = ["predict", "--gradient-mb", "44.7", "--compute-ms", "20", "40"]


def lines_of(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    main(argv)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_tables_of_predictions(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """44.7 MB at 100 MB/s: the second bucket is ready at 44.4 ms and takes 262.3 ms, and the last one 174.6 ms."""
    curves = str(tmp_path / "curves.png")
    lines = lines_of(capsys, *STEP, "--between", "100", "800", "--ranks", "1", "2", "4096", "--plot", curves)
    work, links = Work(44.7e6, 0.02, 0.04), Links(Link(1e-4, 1e8), Link(1e-4, 1e8))
    expected = [1e3 * predict(name, "float32", work, Layout(2, 1), links)[0] for name in ALGORITHMS]
    assert pytest.approx(44.397 + 262.344 + 174.570, abs=0.01) == expected[0]
    assert f"2 x 1 {' '.join(f'{value:.4g}' for value in expected)}" in lines
    assert len(WIRE_TYPES) == lines.count("1 x 1 60 60 60 60")
    assert len(WIRE_TYPES) == len([line for line in lines if line.startswith("4096 x 1 ")])
    assert Path(curves).read_bytes().startswith(b"\x89PNG")


def test_options_take_the_place_of_measured_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Figures of a file are used where no option gives others."""
    links = Links(Link(1e-5, 1e9), Link(1e-4, 1e8), {"bfloat16": Stages(1e-9, 2e-9, 3e-9)}, sum=1e-10)
    links.save(tmp_path / "links.json")
    argv = [*STEP, "--links", str(tmp_path / "links.json"), "--ranks", "8", "--ranks-per-node", "4", "--bucket-mb", "5"]
    lines = lines_of(capsys, *argv, "--between", "100", "1600", "--no-overlap", "--wire-types", "bfloat16")
    faster = replace(links, between=Link(1e-4, 2e8))
    work = Work(44.7e6, 0.02, 0.04, bucket_bytes=5 * 2**20, overlap=False)
    expected = [f"{1e3 * predict(name, 'bfloat16', work, Layout(2, 4), faster)[0]:.4g}" for name in ALGORITHMS]
    assert f"2 x 4 {' '.join(expected)}" in lines


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            [*STEP, "--ranks", "6", "--ranks-per-node", "4", "--within", "1", "1"],
            "6 ranks do not fill nodes of 4 ranks",
        ),
        (STEP, "nothing is known of the links: give --between and --within, or --links FILE"),
        ([*STEP, "--between", "5", "5", "--ranks-per-node", "2"], "nothing is known of the links within a node"),
        ([*STEP, "--within", "5", "5"], "of one node only. Measure on two nodes or more, or give --between"),
        ([*STEP, "--between", "-5", "5"], "a latency >= 0 and a bandwidth > 0, got -5e-06"),
        ([*STEP, "--between", "5", "5", "--bucket-mb", "0"], "--gradient-mb and --bucket-mb are above 0"),
        ([*STEP, "--links", "no.json"], "'no.json' holds no figures of links"),
        ([*STEP, "--wire-types", "fp8"], "invalid choice: 'fp8'"),
        (["measure", "--ranks", "1"], "--repeats is 1 or more and --ranks 2 or more; got 15 and 1"),
        (["measure", "--repeats", "0"], "--repeats is 1 or more and --ranks 2 or more; got 0 and 2"),
        (["compare", "--links", "no.json", "results.json"], "'no.json' holds no figures of links"),
    ],
)
def test_bad_input(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    """Whoever finds it, the parser or the model: the value is quoted, and the exit code is 2."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert 2 == ended.value.code
    assert message in capsys.readouterr().err


def results(nodes: int, ranks: int, **seconds: list[float]) -> dict[str, object]:
    return {
        "title": "a model",
        "gradient_bytes": 44_700_000,
        "nodes": nodes,
        "world_size": nodes * ranks,
        "seconds": {name.replace("_", " "): found for name, found in seconds.items()},
    }


def test_prediction_beside_measurement(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """A measured step of 400 ms that is predicted to take 481 is off by 20 %; other variants are left out."""
    links = Links(Link(1e-4, 1e8), Link(1e-4, 1e8))
    saved = results(2, 1, compute_only=[0.05, 0.06, 0.07], DDP=[0.3, 0.4, 0.5], communication_only=[0.4], other=[1.0])
    step, alone = compare(saved, links)
    assert ("DDP", Way("ring"), 0.4) == (step.name, step.way, step.measured)
    work = Work(44.7e6, 0.02, 0.04)
    assert predict("ring", "float32", work, Layout(2, 1), links)[0] == pytest.approx(step.predicted)
    assert pytest.approx(step.predicted / 0.4 - 1) == step.error
    assert 0.447 < alone.predicted < 0.45
    links.save(tmp_path / "links.json")
    (tmp_path / "results.json").write_text(json.dumps({"models": [saved]}), "utf-8")
    lines = lines_of(capsys, "compare", "--links", str(tmp_path / "links.json"), str(tmp_path / "results.json"))
    assert f"DDP ring, float32 {1e3 * step.predicted:.1f} 400.0 {step.error:+.1%}" in lines


@pytest.mark.parametrize(("nodes", "error"), [("2x1", 10.2), ("4x1", -6.1), ("2x2", -2.5)])
def test_errors_of_the_documentation(nodes: str, error: float):
    """What benchmarks/README.md says of DDP is what the kept measurements give."""
    (measured,) = json.loads((RESULTS / f"nodes{nodes}.json").read_text("utf-8"))["models"]
    found = {one.name: one.error for one in compare(measured, Links.load(RESULTS / f"links{nodes}.json"))}
    assert error == round(100 * found["DDP"], 1)
    page = (RESULTS.parent / "README.md").read_text("utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| DDP | +")]
    assert f" {error:+.1f} % |" in row


@pytest.mark.parametrize(
    ("name", "alone", "in_groups"),
    [
        ("DDP", Way("ring"), Way("ring")),
        ("DDP, bucket views", Way("ring"), Way("ring")),
        ("DDP, bfloat16 hook", Way("ring", "bfloat16"), Way("ring", "bfloat16")),
        ("DDP, PowerSGD rank 1", None, None),
        ("Lightning DDPStrategy, no termination flag", Way("ring"), Way("ring")),
        ("communication only, bfloat16 on the wire", Way("scattered", "bfloat16"), Way("node by node", "bfloat16")),
        ("GradAvg mean", Way("ring"), Way("ring")),
        ("GradAvg mean, node by node", Way("node by node"), Way("node by node")),
        ("GradAvg weighted_mean", Way("ring"), Way("node by node")),
        ("GradAvg weighted_mean, flat", Way("ring"), Way("ring")),
        ("GradAvg sum, float16 on the wire", Way("scattered", "float16"), Way("node by node", "float16")),
        ("GradAvg sum, float16 on the wire, flat", Way("scattered", "float16"), Way("scattered", "float16")),
        ("average_gradients, weighted_mean", Way("ring"), Way("ring")),
        ("all-reduce per parameter", None, None),
    ],
)
def test_variants_that_the_model_knows(name: str, alone: Way | None, in_groups: Way | None):
    """Each variant of the benchmark is the way that it goes with one rank per node, and with two."""
    assert (alone, in_groups) == (way_of(name, Layout(2, 1)), way_of(name, Layout(2, 2)))


def measured(nodes):
    return measure_links(places_on_nodes(nodes), torch.device("cpu"), repeats=1)


def measured_then_summed(nodes):
    """Body: after a measurement the process group is as before, also with ranks that were idle."""
    links = measured(nodes)
    total = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(total)
    return links, total.item()


@pytest.mark.parametrize(
    ("nodes", "between"),
    [((0, 0), False), ((0, 1), True), ((0, 0, 1), True), ((0, 0, 1, 1), True)],
)
def test_links_are_measured(world, nodes, between):
    """All ranks return the same figures, above 0: of each wire type, and of links between nodes where there are two."""
    (first, total), *others = world(len(nodes)).run(measured_then_summed, nodes)
    assert all((first, total) == other for other in others)
    assert sum(range(1, len(nodes) + 1)) == total
    assert between == (first.between is not None)
    for link in (first.within, first.between) if between else (first.within,):
        assert link.latency >= 0
        assert 0 < link.bandwidth < math.inf
    assert list(WIRE_TYPES) == list(first.stages)
    for stages in first.stages.values():
        assert min(stages.encode, stages.decode_sum, stages.decode) > 0
    assert first.sum > 0
    about = {"world_size": len(nodes), "nodes": len(set(nodes)), "backend": "gloo"}
    assert about == {name: first.about[name] for name in about}


@pytest.mark.parametrize(
    ("nodes", "between", "expected", "sharing"),
    [
        ((0, 0, 0), False, [(1, 2), (2, 0), (0, 1)], 1),
        ((0, 0, 0), True, [None, None, None], 0),
        ((0, 1), False, [None, None], 0),
        ((0, 1), True, [(1, 1), (0, 0)], 1),
        ((0, 0, 1, 1), False, [(1, 1), (0, 0), (3, 3), (2, 2)], 1),
        ((0, 0, 1, 1), True, [(2, 2), (3, 3), (0, 0), (1, 1)], 2),
        # The third rank of node 0 has no partner, and the order of nodes is not that of ranks.
        ((0, 1, 0, 1, 0), True, [(1, 1), (0, 0), (3, 3), (2, 2), None], 2),
    ],
)
def test_who_sends_to_whom(nodes, between, expected, sharing):
    """Within nodes a ring per node; between nodes a ring per position that every node has, all over the same links."""
    places = places_on_nodes(nodes)
    found = [neighbors(places, rank, between=between) for rank in range(len(nodes))]
    assert [(peers, sharing) for peers in expected] == found
