"""The comparison without any process: measures, samples, random numbers, reports, and the command's options."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, LearningRateMonitor
from rich.console import Console
from torch import nn
from verify_runs import IN_DOCS, RUNS, Graph, Net, batches

import lightning_gradavg
from lightning_gradavg import GradAvgVerifier, verify
from lightning_gradavg.cli import main
from lightning_gradavg.tree import slice_batch
from lightning_gradavg.verify.causes import CAUSES, PAGE
from lightning_gradavg.verify.compare import (
    Parts,
    Tolerance,
    clipped_to,
    combinations,
    differences,
    factor_between,
    implied_shares,
    is_rounding,
    matches,
    rounded_on_the_wire,
    ulp_of,
)
from lightning_gradavg.verify.record import Recorder, RunFacts, patched, sketch
from lightning_gradavg.verify.replay import MisalignedError, Recorded, Replayed
from lightning_gradavg.verify.report import STAGES, Finding, Report, Stage, plot_report, print_report, times
from lightning_gradavg.verify.run import Progress, estimate
from lightning_gradavg.verify.state import UnknownSamplesError, digest, digests, join, module_state, samples_in
from lightning_gradavg.verify.target import Settings, Target, imported, quiet_options, resolve_strategy

ROOT = Path(__file__).resolve().parent.parent
EXACT = Tolerance(1e-9, 1e-9)
EVEN = Parts(ranks=(0, 1), samples=(4, 4), weights=None, world_size=2, accumulation=1)
UNEVEN = Parts(ranks=(0, 1), samples=(3, 1), weights=(6.0, 1.0), world_size=2, accumulation=1)


def one(found, expected, **options):
    (difference,) = differences({"w": found}, {"w": expected}, 1e-5, **options)
    return difference


def test_a_difference_is_relative_to_the_largest_element():
    """0.5 of 4 is 0.125, in ulps of 4 in float32 it is 2 ** 20, and it stands where the tensors differ most."""
    difference = one(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0]))
    assert (0.125, 2.0**20, 4.5, 4.0) == (difference.relative, difference.ulps, difference.found, difference.expected)
    assert difference.factor is None


def test_equal_bits_differ_by_nothing():
    """Equal tensors differ by 0 ulps, also where both are NaN or infinite in the same place."""
    odd = torch.tensor([1.0, math.nan, math.inf])
    assert (0.0, 0.0) == (one(odd, odd.clone()).relative, one(odd, odd.clone()).ulps)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_infinitely_far(odd):
    """A NaN or an infinity against a number is a difference whatever the tolerance."""
    assert math.inf == one(torch.tensor([1.0, odd]), torch.tensor([1.0, 1.0])).relative


def test_a_missing_gradient_is_zero():
    """No gradient and a gradient of zeros train the same; no gradient and another one do not."""
    zero, two = torch.zeros(2), torch.full((2,), 2.0)
    absent, other = differences({"a": zero}, {"b": two}, 1e-5)
    assert ("b", 1.0, "a", 0.0) == (absent.name, absent.relative, other.name, other.relative)


def test_small_tensors_are_measured_against_the_large():
    """What is zero but for rounding, beside a gradient of 1, does not differ by 100 %."""
    found = {"w": torch.ones(2), "b": torch.tensor([1e-8])}
    expected = {"w": torch.ones(2), "b": torch.tensor([-1e-8])}
    assert pytest.approx(2e-7, rel=1e-6) == differences(found, expected, 1e-5)[1].relative


def test_slack_takes_two_ulps_of_the_weights_off():
    """An update computed by subtraction is known to 2 ulps of the weights, and no better."""
    update, rounding = torch.tensor([1e-5]), 2 * ulp_of(1.0, torch.float32)
    slack = {"w": torch.ones(1)}
    assert 0.0 == one(update + 0.9 * rounding, update, slack=slack).relative
    assert 0.0 < one(update + 1.5 * rounding, update, slack=slack).relative


@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0, 4.0 / 3])
def test_a_factor_is_found(factor):
    """A multiple of the reference is named as one."""
    expected = torch.tensor([1.0, -3.0, 0.25])
    assert pytest.approx(factor) == factor_between(factor * expected, expected, 1e-5)


@pytest.mark.parametrize("found", [[1.0, -3.0, 0.25], [2.0, -6.0, 0.6], [0.0, 0.0, 0.0], [math.nan, 1.0, 1.0]])
def test_what_is_no_multiple_has_no_factor(found):
    """Neither the reference itself, nor something else, nor zeros, nor NaN is a multiple."""
    assert factor_between(torch.tensor(found), torch.tensor([1.0, -3.0, 0.25]), 1e-5) is None


@pytest.mark.parametrize(
    ("parts", "gradients", "target", "names"),
    [
        (
            EVEN,
            [[2.0, 0.0], [0.0, 4.0]],
            [1.0, 2.0],
            {"mean", "samples", "mean of the ranks' means", "configured window"},
        ),
        (EVEN, [[2.0, 0.0], [0.0, 4.0]], [2.0, 4.0], {"sum", "multiplied"}),
        (EVEN, [[2.0, 0.0], [0.0, 4.0]], [0.5, 1.0], {"divided twice", "samples, divided twice"}),
        (EVEN, [[2.0, 0.0], [0.0, 4.0]], [0.25, 0.5], {"sum over samples"}),
        (EVEN, [[2.0, 0.0], [0.0, 4.0]], [0.0, 4.0], {"rank 1 alone"}),
        (UNEVEN, [[4.0, 0.0], [0.0, 4.0]], [3.0, 1.0], {"samples"}),
        (UNEVEN, [[7.0, 0.0], [0.0, 7.0]], [6.0, 1.0], {"weights"}),
        (UNEVEN, [[7.0, 0.0], [0.0, 7.0]], [1.0, 1.0], {"sum over weights"}),
        (EVEN, [[2.0, 0.0], [0.0, 4.0]], [1.0, 1.0], set()),
    ],
)
def test_combinations_are_recognized(parts, gradients, target, names):
    """Every way of combining two gradients predicts its own result, computed by hand."""
    found = matches(torch.tensor(target).double(), torch.tensor(gradients).double(), parts, EXACT)
    assert names == set(found)


def test_a_part_that_does_not_count_may_be_nan():
    """A micro-batch of weight 0 is left out of a combination, not multiplied by 0."""
    parts = Parts(ranks=(0, 1), samples=(1, 1), weights=(2.0, 0.0), world_size=2, accumulation=1)
    gradients = torch.tensor([[3.0], [math.nan]], dtype=torch.float64)
    assert "weights" in matches(torch.tensor([3.0], dtype=torch.float64), gradients, parts, EXACT)


def test_windows_of_different_lengths_have_different_means():
    """Rank 0 with two micro-batches and rank 1 with one: 1/3 each, or 1/4, 1/4, 1/2 as a mean of the ranks' means."""
    found = combinations(Parts((0, 0, 1), (1, 1, 1), None, 2, 2))
    assert pytest.approx([1 / 3] * 3) == found["mean"]
    assert [0.25, 0.25, 0.5] == found["mean of the ranks' means"]
    assert [0.25] * 3 == found["configured window"]


def test_implied_shares_are_the_terms_of_the_parts():
    """A mean over 3 and 1 terms takes the shares 0.75 and 0.25 of its parts."""
    parts = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 5.0]], dtype=torch.float64)
    assert [0.75, 0.25] == pytest.approx(implied_shares(torch.tensor([0.75, 1.75, 1.25]).double(), parts, EXACT))


@pytest.mark.parametrize(
    ("parts", "target"),
    [
        ([[1.0, 2.0, 0.0], [0.0, 1.0, 5.0]], [1.0, 0.0, 0.0]),  # no combination
        ([[1.0, 2.0, 0.0], [0.0, 1.0, 5.0]], [1.0, 3.0, 5.0]),  # a sum, not a mean
        ([[1.0, 2.0, 0.0], [2.0, 4.0, 0.0]], [1.5, 3.0, 0.0]),  # many combinations
        ([[1.0], [3.0]], [2.5]),  # one number, two parts
    ],
)
def test_no_shares_are_made_up(parts, target):
    """Where no shares, or many, make up the gradient, none are named."""
    assert implied_shares(torch.tensor(target).double(), torch.tensor(parts).double(), EXACT) is None


@pytest.mark.parametrize(("name", "dtype"), [("fp16 wire", torch.float16), ("bf16 wire", torch.bfloat16)])
@pytest.mark.parametrize("rounds_sum", [False, True])
def test_a_wire_is_known_by_its_rounding(name, dtype, rounds_sum):
    """Summands, or summands and sum, rounded to a narrow type are told from float32 and from the other type."""
    gradients = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).double()
    sent = gradients.to(dtype).double().mean(0)
    received = sent.to(dtype).double() if rounds_sum else sent
    rows = [{"w": row} for row in gradients]
    assert name == rounded_on_the_wire({"w": received}, rows, EVEN, 1e-6)
    assert rounded_on_the_wire({"w": gradients.float().mean(0).double()}, rows, EVEN, 1e-6) is None


def vectors(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_rounding_is_told_by_its_pattern():
    """A difference of 1e-4 in any direction is rounding, one along the gradient or one of its parts is not."""
    expected, part, noise = torch.randn(3, 400, generator=torch.Generator().manual_seed(0)).double()
    limits = Tolerance(1e-5, 1e-3)
    assert is_rounding(expected + 1e-4 * noise, expected, [part], limits)
    assert not is_rounding(expected * 1.0001, expected, [part], limits)
    assert not is_rounding(expected + 1e-4 * part, expected, [part], limits)
    assert not is_rounding(expected + 1e-2 * noise, expected, [part], limits)


FACTS = RunFacts(
    strategy="DDPStrategy",
    told=None,
    stock=True,
    automatic=True,
    step_end=False,
    statistics=False,
    precision="32-true",
    device="cpu",
    settings={"matmul": "highest", "tf32": True},
    dtypes={"w": torch.float32, "steps": torch.int64},
)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, Tolerance(1e-5, 1e-3)),
        ({"dtypes": {"w": torch.float64}}, Tolerance(1e-10, 1e-8)),
        ({"dtypes": {"w": torch.bfloat16}}, Tolerance(2e-2, 1e-1)),
        ({"precision": "bf16-mixed"}, Tolerance(1e-5, 5e-2)),
        ({"settings": {"matmul": "medium", "tf32": False}}, Tolerance(1e-5, 5e-2)),
        ({"device": "cuda"}, Tolerance(1e-5, 5e-2)),
    ],
)
def test_the_tolerance_is_that_of_the_precision(changed, expected):
    """What rounding stays below follows from weights, autocast, and products in TF32, which accelerators alone have."""
    assert expected == Tolerance.of(replace(FACTS, **changed), None)
    assert Tolerance(0.5, expected.loose) == Tolerance.of(replace(FACTS, **changed), 0.5)


def test_clipping_before_the_reduction_is_seen_by_its_norm():
    """Gradients of norms 5 and 1, the first clipped to 2 and both averaged: the norm is 2. Unclipped ones have none."""
    rows = vectors([3.0, 4.0, 0.0], [0.0, 0.0, 1.0])
    assert 2.0 == pytest.approx(clipped_to((rows[0] * 0.4 + rows[1]) / 2, rows, [0.5, 0.5], EXACT))
    assert clipped_to(rows.mean(0), rows, [0.5, 0.5], EXACT) is None


@pytest.mark.parametrize("size", [7, 4096, 100_003])
def test_a_sketch_is_linear_and_sees_every_element(size):
    """Sums of tensors have the sum of their sketches, and an element that changes by one unit changes the sketch."""
    first, other = torch.randn(2, size, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(sketch(first.double() + 2 * other.double()), sketch(first) + 2 * sketch(other), atol=1e-12)
    changed = first.clone()
    changed[size // 2] = torch.nextafter(changed[size // 2], torch.tensor(9.0))
    assert not torch.equal(sketch(first), sketch(changed))
    assert sketch(first).numel() == min(size, 4096)


class Pair(NamedTuple):
    x: torch.Tensor
    name: list[str]


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    size: int = 3


BATCHES = [
    (torch.arange(6.0).reshape(3, 2), torch.arange(3)),
    {"x": torch.arange(3.0), "deep": [torch.ones(3, 1), ["a", "b", "c"]], "scale": 0.5},
    Pair(torch.arange(3.0), ["a", "b", "c"]),
    Record(torch.arange(3.0)),
    [np.arange(6.0).reshape(3, 2)],
    torch.arange(3).to(torch.bfloat16),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_joined_batches_hold_the_samples_of_all(batch):
    """Joining keeps type and structure, and the fingerprints of the samples, in order; a part of it is the batch."""
    joined = join([batch, batch], [3, 3])
    assert (3, 6) == (samples_in(batch), samples_in(joined))
    assert 3 == len(set(digests(batch)))
    assert type(batch) is type(joined)
    assert digests(batch) * 2 == digests(joined)
    assert digest(batch) == digest(slice_batch(joined, 0, 3))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], r"\(2, 3\).*\(2, 4\)"),
        ([torch.ones(2), [1.0]], "different types or lengths"),
        ([{"x": torch.ones(2), "scale": 1.0}, {"x": torch.ones(2), "scale": 2.0}], "1.0 is another value"),
        ([torch.tensor(1.0), torch.tensor(2.0)], "belongs to no sample"),
        ([[torch.ones(2)], [torch.ones(2), torch.ones(2)]], "different types or lengths"),
    ],
)
def test_batches_that_cannot_be_joined_say_why(parts, message):
    """Padding to different lengths, other types and other settings are told apart."""
    with pytest.raises(UnknownSamplesError, match=message):
        join(parts, [2, 2])


IMAGES = [torch.zeros(3, 8, 8) for _ in range(4)]


@pytest.mark.parametrize(
    ("batch", "loader_size"),
    [
        (IMAGES, 4),  # four images of three channels, not three samples
        ((torch.ones(8, 2), [{"boxes": torch.ones(8, 4)}] * 8), None),  # a record for each of eight images
        ((torch.ones(8, 2), [{"label": torch.tensor(1)}] * 8), None),
        (Graph(torch.ones(5, 3), torch.ones(2, 7)), None),
        ((torch.ones(4), object()), None),
        (torch.tensor(1.0), None),
    ],
)
def test_samples_that_are_not_known_are_not_guessed(batch, loader_size):
    """Lists of images or records, graphs and objects have no samples that could be joined or cut."""
    with pytest.raises(UnknownSamplesError, match="is not known"):
        samples_in(batch, loader_size)
    assert 1 == len(digests(batch, loader_size))


def test_fingerprints_read_every_element():
    """One element in the middle of a large sample makes another fingerprint."""
    image = torch.zeros(1, 3, 64, 64)
    changed = image.clone()
    changed[0, 1, 32, 32] = 1e-6
    assert digests(image) != digests(changed)


def drawn(function, size, seed):
    torch.manual_seed(seed)
    with Recorded() as recorded:
        result = function(size)
    return result, recorded.draws


DRAWING = {
    "noise": lambda size: torch.randn(size, 3),
    "noise like": lambda size: torch.rand_like(torch.ones(2, size)),
    "in place": lambda size: torch.empty(size).exponential_(),
    "dropout": lambda size: nn.functional.dropout(torch.ones(size, 5), 0.5),
    "dropout of channels": lambda size: nn.functional.dropout2d(torch.ones(size, 4, 2, 2), 0.5),
    "a class of each": lambda size: torch.multinomial(torch.ones(size, 9), 1),
    "a coin of each": lambda size: torch.bernoulli(torch.full((size, 2), 0.5)),
    "around a mean": lambda size: torch.normal(torch.full((size,), 7.0), 1.0),
}


@pytest.mark.parametrize("name", DRAWING)
def test_a_whole_draws_what_its_parts_drew(name):
    """The whole's random numbers are the parts', one below the other, also for parts of different sizes."""
    rows = 1 if name == "noise like" else 0
    function = DRAWING[name]
    parts = [drawn(function, size, seed=size) for size in (3, 2)]
    with Replayed([draws for _, draws in parts]) as replayed:
        whole = function(5)
    replayed.require_all()
    assert torch.equal(torch.cat([result for result, _ in parts], rows), whole)


def test_a_permutation_of_the_whole_permutes_its_parts():
    """The samples of each part change places among themselves, counted from where the part begins."""
    (first, one), (second, other) = drawn(torch.randperm, 3, 0), drawn(torch.randperm, 4, 1)
    with Replayed([one, other]):
        whole = torch.randperm(7)
    assert [*first.tolist(), *(second + 3).tolist()] == whole.tolist()


def test_what_belongs_to_no_sample_is_the_first_parts():
    """One number for a batch is that of the first part, and the parts can be run again with it."""
    parts = [drawn(lambda size: (torch.rand(1), torch.rand(size)), size, size) for size in (3, 2)]
    tapes = [draws for _, draws in parts]
    with Replayed(tapes) as replayed:
        shared, own = torch.rand(1), torch.rand(5)
    assert {0} == replayed.shared
    assert torch.equal(parts[0][0][0], shared)
    assert torch.equal(torch.cat([results[1] for results, _ in parts]), own)
    with Replayed([tapes[1]], replayed.shared, tapes[0]):
        again = torch.rand(1), torch.rand(2)
    assert torch.equal(shared, again[0])
    assert torch.equal(parts[1][0][1], again[1])


UNFOLLOWED = {
    "each sample with each": lambda size: torch.rand(size, size),
    "more draws for more samples": lambda size: [torch.rand(size) for _ in range(size)],
    "other draws": lambda size: torch.rand(size) if size < 4 else torch.randn(size),
}


def replayed_as_five(function):
    tapes = [drawn(function, size, size)[1] for size in (3, 2)]
    with Replayed(tapes) as replayed:
        function(5)
    replayed.require_all()


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_draws_that_are_not_of_samples_are_refused(name):
    """What depends on the batch as a whole cannot be put together from parts."""
    with pytest.raises(MisalignedError):
        replayed_as_five(UNFOLLOWED[name])


def test_the_state_of_a_module_is_its_buffers_and_plain_attributes():
    """Numbers, tensors and lists of them are kept, by copy; objects and what the framework keeps are not."""
    module = Net("mean", nn.BatchNorm1d(8))
    module.count, module.seen, module.model[1].helper = 3, [torch.ones(2)], object()
    state = module_state(module)
    assert {"loss", "count", "seen", "model.1.running_mean"} <= set(state)
    assert not {"model.1.helper", "training", "_trainer", "model.0.weight"} & set(state)
    module.seen[0] += 1
    assert 1 == state["seen"][0][0]


def test_a_watched_method_is_put_back():
    """A method is replaced on its class, inherited or not, and nothing of it is left afterwards."""
    kept = Net.training_step, "forward" in vars(Net), "manual_backward" in vars(Net)
    for name in ("training_step", "manual_backward"):
        restore = patched(Net, name, lambda original: lambda *args: "watched")
        assert "watched" == getattr(Net(), name)(None, 0)
        restore()
    assert kept == (Net.training_step, "forward" in vars(Net), "manual_backward" in vars(Net))


def report(*findings, gradients=None, remarks=()):
    stages = [Stage(name, "equal") for name in STAGES]
    gradients = gradients or {"w": [0.0, math.inf]}
    return Report("DDPStrategy", "mean", 1, 2, "one process", 1e-5, stages, findings, gradients, remarks)


def test_notes_do_not_make_a_difference():
    """Random numbers are a note: the report is equal with it, and different with any other cause."""
    note = Finding("stochastic", "random state", "drawn in dropout")
    assert report(note).equal
    assert report(note).first is None
    defect = Finding("sum loss", "reduced gradient", "2 x")
    assert "different" == report(note, defect).verdict
    assert defect == report(note, defect).first
    assert report(note, defect).without(["sum loss"]).equal


def test_what_was_not_compared_is_not_equal():
    """A remark, or a stage that was not compared, makes a report that is not different not shown."""
    assert ("not shown", False) == (report(remarks=["assumed"]).verdict, report(remarks=["assumed"]).equal)
    open_ = Report("", "", 2, 2, "", 1e-5, [Stage("loss", "not compared")], [])
    assert "not shown" == open_.verdict
    assert "not shown" == Report("", "", 2, 0, "", 1e-5, [], []).verdict


def test_an_unknown_cause_cannot_be_ignored():
    """A misspelt cause is refused with the list of causes."""
    with pytest.raises(ValueError, match=r"'dropout' is not a cause; use some of .*'stochastic'"):
        report().without(["dropout"])


def doubled():
    return differences({"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])}, 1e-5)[0]


def test_json_has_no_numbers_that_json_has_not():
    """Infinity and NaN become null, and every finding carries its page and factor."""
    text = json.dumps(report(Finding("sum loss", "loss", "2 x", 0, doubled())).as_dict(), allow_nan=False)
    read = json.loads(text)
    assert [0.0, None] == read["gradients"]["w"]
    assert (1, False, "different", 2.0) == (
        *(read["schema"], read["equal"], read["verdict"]),
        read["findings"][0]["factor"],
    )
    assert "docs/causes.md#sum-loss" == read["findings"][0]["page"]


def printed(of_report):
    console = Console(width=120, record=True, file=io.StringIO())
    print_report(of_report, console)
    return console.export_text()


def test_a_report_begins_with_what_it_means():
    """What people read: the verdict in plain words, then the cause, what to do as a diff, and where to read on."""
    finding = Finding("double division", "loss", "by both", 0, doubled(), "divide once", "-loss / 2\n+loss")
    text = printed(report(finding, remarks=["this and that"]))
    expected = (
        "DIFFERENT, from step 0 on: divided twice: by the run's own code, and by the reduction (double division).",
        "by both",
        "w is 2, on one process 1",
        "Do: divide once.",
        "-loss / 2",
        "docs/causes.md#double-division",
        "not shown: this and that",
        "1 rank, 2 optimizer steps",
    )
    assert sorted(map(text.index, expected)) == list(map(text.index, expected))
    assert "ulps" not in text
    assert printed(report()).startswith("EQUAL: every step is that of one process.")
    assert printed(report(remarks=["x"])).startswith("NOT SHOWN: ")


@pytest.mark.parametrize(("factor", "words"), [(0.5, "half of"), (2.0001, "twice"), (0.875, "0.875 x"), (-1.0, "-1 x")])
def test_factors_are_said_in_words(factor, words):
    """What is half or twice is called so."""
    assert words == times(factor)


def test_every_cause_has_a_section():
    """The page of causes explains each, under the title that reports link to."""
    lines = (ROOT / PAGE).read_text("utf-8").splitlines()
    assert list(CAUSES) == [line.removeprefix("## ") for line in lines if line.startswith("## ")]


def test_the_page_lists_every_run():
    """Each run that is judged in the tests is a line of the page, with its causes or what is not shown of it."""
    lines = (ROOT / "docs" / "verify.md").read_text("utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    rows = {row[0]: row[-1] for row in cells if row[0] in RUNS}
    assert set(IN_DOCS) == set(rows)
    expected = {name: ", ".join(RUNS[name].causes) for name in IN_DOCS if RUNS[name].causes}
    assert expected == {name: rows[name] for name in expected}
    counts = {verdict: sum(RUNS[name].verdict == verdict for name in IN_DOCS) for verdict in ("equal", "different")}
    assert (True, True) == (counts["equal"] >= 25, counts["different"] >= 30)


def test_a_picture_is_written(tmp_path):
    """The plot is a PNG, also where a difference is infinite, and no higher for a thousand parameters."""
    pytest.importorskip("matplotlib")
    plot_report(report(gradients={"a": [0.0, 1e-7], "b": [math.inf, 0.3]}), tmp_path / "report.png")
    plot_report(report(gradients={f"layer{n}.weight": [1e-7, 1e-7] for n in range(1000)}), tmp_path / "many.png")
    heights = [int.from_bytes((tmp_path / name).read_bytes()[20:24], "big") for name in ("report.png", "many.png")]
    assert b"\x89PNG" == (tmp_path / "report.png").read_bytes()[:4]
    assert heights[0] < heights[1] < 3000


def test_without_matplotlib_the_plot_says_what_to_install(monkeypatch, tmp_path):
    """matplotlib is optional, and its absence is an error that says so."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="pip install matplotlib"):
        plot_report(report(), tmp_path / "report.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to verify: give --config FILE, or module:LightningModule"),
        (["torch.nn:Linear", "--config", "c.yaml"], "either --config or a module"),
        (["torch.nn:Linear", "--model.lr=1"], "'--model.lr=1' is not an option"),
        (["torch.nn:Linear", "--trainer", "max_epochs"], "--trainer must be NAME=VALUE, got 'max_epochs'"),
        (["torch.nn:Linear", "--trainer", "foo=3"], "Trainer has no option 'foo'; it has accelerator, "),
        (["torch.nn:Linear", "--init", "hidden"], "--init must be NAME=VALUE, got 'hidden'"),
        (["torch.nn:Linear", "--steps", "0"], "steps must be 1 or more, got 0"),
        (["torch.nn:Linear", "--strategy", "fsdp"], "gradients of whole models.*got FSDPStrategy"),
        (["torch.nn:Linear", "--strategy", "adhoc"], "strategy='adhoc' is not registered; use one of .*gradavg"),
        (["torch.nn:Linear", "--plot", "/no/where.png"], "--plot '/no/where.png': there is no folder '/no'"),
    ],
)
def test_wrong_usage_is_one_line(arguments, message, capsys):
    """Wrong arguments end the command with code 2 and a line that quotes them, before any process starts."""
    assert 2 == main(["verify", *arguments])
    error = capsys.readouterr().err
    assert 1 == error.count("\n")
    assert error.startswith("gradavg verify: error: ")
    assert re.search(message, error)


def test_a_wrong_cause_is_refused(capsys):
    """--ignore takes the names of causes and lists them."""
    with pytest.raises(SystemExit) as ended:
        main(["verify", "torch.nn:Linear", "--ignore", "dropout"])
    assert 2 == ended.value.code
    assert "stochastic" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 0}, "devices must be 1 or more, got 0"),
        ({"accelerator": "tpu"}, "accelerator must be 'cpu', or a type of device .* got 'tpu'"),
        ({"accelerator": "cuda", "devices": 99}, "99 ranks need as many devices of type cuda"),
    ],
)
def test_settings_are_checked(settings, message):
    """A setting out of range is refused with its value."""
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


def test_the_verifier_and_the_recorder_check_their_options(tmp_path):
    """A callback with an impossible option fails where it is built."""
    with pytest.raises(ValueError, match=r"on_difference must be 'warn' or 'raise', got 'stop'"):
        GradAvgVerifier(on_difference="stop")
    with pytest.raises(ValueError, match=r"'dropout' is not a cause"):
        GradAvgVerifier(ignore=["dropout"])
    with pytest.raises(ValueError, match="steps must be 1 or more, got 0"):
        Recorder(0, tmp_path)


def test_what_is_no_module_is_refused():
    """A function that returns something else than a LightningModule is refused by the type it returns."""
    with pytest.raises(TypeError, match=r"got .* of type Linear"):
        Target(lambda: nn.Linear(1, 1)).build()


def test_options_of_the_trainer_are_kept_but_for_the_noise():
    """The user's options and callbacks stay, those that log, save, search or stop go."""
    schedule = GradientAccumulationScheduler({0: 2})
    callbacks = [LearningRateMonitor(), LearningRateFinder(), schedule]
    kept = quiet_options({"gradient_clip_val": 0.5, "callbacks": callbacks, "logger": True}, "cpu")
    found = tuple(kept[name] for name in ("gradient_clip_val", "callbacks", "logger", "accelerator"))
    assert (0.5, [schedule], False, "cpu") == found


def test_strategies_that_start_processes_start_none_here():
    """A strategy named for its start method runs in the processes that are there."""
    assert "popen" == resolve_strategy("gradavg_spawn")._start_method
    assert "DDPStrategy" == type(resolve_strategy("auto")).__name__
    assert "GradAvgStrategy" == type(resolve_strategy("lightning_gradavg.GradAvgStrategy")).__name__


def test_names_are_imported(tmp_path):
    """`package.module:Name` and `file.py:Name` are what they say, nested names included."""
    (tmp_path / "one_net.py").write_text("class Net:\n    class Part: ...\n")
    assert LightningModule is imported("lightning.pytorch:LightningModule")
    assert LightningModule.log is imported("lightning.pytorch:LightningModule.log")
    assert "one_net" == imported(f"{tmp_path / 'one_net.py'}:Net.Part").__module__


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere:Net", "'nowhere:Net' cannot be imported: No module named 'nowhere'"),
        ("nowhere.py:Net", "'nowhere.py:Net' cannot be imported: there is no file 'nowhere.py'"),
        ("torch.nn:Nothing", "has no attribute 'Nothing'"),
        ("torch.nn", "'torch.nn' must be written package.module:Name or file.py:Name"),
    ],
)
def test_names_that_are_not_there_are_refused(path, message):
    """A name that names nothing is quoted."""
    with pytest.raises(ValueError, match=re.escape(message)):
        imported(path)


@pytest.mark.parametrize("call", ["Trainer.fit(None, None)", "verify(None)"])
def test_a_module_that_trains_on_import_is_refused_at_once(call, tmp_path):
    """Importing a script without guard begins no training, even where it catches errors, and says which line does."""
    lines = ["from lightning.pytorch import Trainer", "from lightning_gradavg import verify", "try:", f"    {call}"]
    text = "\n".join([*lines, "except Exception:", "    pass"])
    (tmp_path / "unguarded.py").write_text(text)
    sys.modules.pop("unguarded", None)
    with pytest.raises(ValueError, match=rf"trains when it is imported \(line 4: {re.escape(call)}\).*__main__"):
        imported(f"{tmp_path / 'unguarded.py'}:Net")


def test_too_little_space_is_said_before_anything_starts(tmp_path, capfd):
    """What a verification takes is said up front where it is much, and refused where there is not as much."""
    large = Net()
    large.more = nn.Linear(6000, 6000, device="meta")
    estimate(large, 3, tmp_path)
    assert "3 steps take about 0.72 GB of memory in each process" in capfd.readouterr().err
    large.more = nn.Linear(10**8, 10**6, device="meta")
    with pytest.raises(OSError, match="verify fewer steps"):
        estimate(large, 3, tmp_path)
    estimate(Net(), 3, tmp_path)
    assert "" == capfd.readouterr().err


def test_what_is_done_is_said_where_nothing_was_said_for_long(monkeypatch, capsys):
    """Progress is a line on standard error, once five seconds went by without one."""
    clock = iter([0.0, 4.0, 6.0, 6.0, 10.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    progress = Progress()
    for text in ("early", "late", "soon after"):
        progress(text)
    assert ("", "verify: late\n") == capsys.readouterr()


def test_verify_is_exported():
    """`verify` of the package is the function, in whatever order modules were imported."""
    assert verify is lightning_gradavg.verify
    assert callable(verify)


def test_a_batch_of_runs_is_reproducible():
    """The batches of a rank are the same in every process."""
    assert digest(batches((2, 3), seed=1)) == digest(batches((2, 3), seed=1))
