"""The comparison without any process: measures, hypotheses, samples, reports, and the command's options."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor
from rich.console import Console

import lightning_gradavg
from lightning_gradavg.cli import main
from lightning_gradavg.rules import RULES
from lightning_gradavg.verification import GradAvgVerifier, verify
from lightning_gradavg.verification.causes import CAUSES, PAGE
from lightning_gradavg.verification.data import compare_samples
from lightning_gradavg.verification.dense import gather_outputs, loss_of_pairs
from lightning_gradavg.verification.hypotheses import Parts, combinations, implied_shares, matches, rounded_on_the_wire
from lightning_gradavg.verification.measure import differences, factor_between, ulp_of
from lightning_gradavg.verification.plot import plot_report
from lightning_gradavg.verification.recorder import Recorder
from lightning_gradavg.verification.records import Facts, MicroBatch, Run, Step
from lightning_gradavg.verification.report import STAGES, Finding, Report, Stage
from lightning_gradavg.verification.samples import digest, join_batches, sample_fingerprints
from lightning_gradavg.verification.script import acts_of, pairs_of
from lightning_gradavg.verification.table import print_report
from lightning_gradavg.verification.targets import ObjectTarget, imported, quiet_options, resolve_strategy
from lightning_gradavg.verification.worlds import Settings

ROOT = Path(__file__).resolve().parent.parent
EVEN = Parts(ranks=(0, 1), samples=(4, 4), weights=None, world_size=2, accumulation=1)
UNEVEN = Parts(ranks=(0, 1), samples=(3, 1), weights=(6.0, 1.0), world_size=2, accumulation=1)


def one(found, expected, **options):
    (difference,) = differences({"w": found}, {"w": expected}, **{"tolerance": 1e-5, **options})
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
    absent, other = differences({"a": zero}, {"b": two}, tolerance=1e-5)
    assert ("b", 1.0, "a", 0.0) == (absent.name, absent.relative, other.name, other.relative)


def test_small_tensors_are_measured_against_the_large():
    """What is zero but for rounding, beside a gradient of 1, does not differ by 100 %."""
    found = {"w": torch.ones(2), "b": torch.tensor([1e-8])}
    expected = {"w": torch.ones(2), "b": torch.tensor([-1e-8])}
    assert pytest.approx(2e-7, rel=1e-6) == differences(found, expected, tolerance=1e-5)[1].relative


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
        (EVEN, [[2.0, 0.0], [0.0, 4.0]], [2.0, 4.0], {"sum"}),
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
    found = matches(torch.tensor(target).double(), torch.tensor(gradients).double(), parts, 1e-9)
    assert names == set(found)


def test_a_part_that_does_not_count_may_be_nan():
    """A micro-batch of weight 0 is left out of a combination, not multiplied by 0."""
    parts = Parts(ranks=(0, 1), samples=(1, 1), weights=(2.0, 0.0), world_size=2, accumulation=1)
    gradients = torch.tensor([[3.0], [math.nan]], dtype=torch.float64)
    assert "weights" in matches(torch.tensor([3.0], dtype=torch.float64), gradients, parts, 1e-9)


def test_windows_of_different_lengths_have_different_means():
    """Rank 0 with two micro-batches and rank 1 with one: 1/3 each, or 1/4, 1/4, 1/2 as a mean of the ranks' means."""
    found = combinations(Parts((0, 0, 1), (1, 1, 1), None, 2, 2))
    assert pytest.approx([1 / 3] * 3) == found["mean"]
    assert [0.25, 0.25, 0.5] == found["mean of the ranks' means"]
    assert [0.25] * 3 == found["configured window"]


def test_implied_shares_are_the_terms_of_the_parts():
    """A mean over 3 and 1 terms takes the shares 0.75 and 0.25 of its parts."""
    parts = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 5.0]], dtype=torch.float64)
    assert [0.75, 0.25] == pytest.approx(implied_shares(torch.tensor([0.75, 1.75, 1.25]).double(), parts, 1e-9))


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
    assert implied_shares(torch.tensor(target).double(), torch.tensor(parts).double(), 1e-9) is None


@pytest.mark.parametrize(("name", "dtype"), [("fp16 wire", torch.float16), ("bf16 wire", torch.bfloat16)])
@pytest.mark.parametrize("rounds_sum", [False, True])
def test_a_wire_is_known_by_its_rounding(name, dtype, rounds_sum):
    """Summands, or summands and sum, rounded to a narrow type are told from float32 and from the other type."""
    gradients = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).double()
    sent = gradients.to(dtype).double().mean(0)
    received = sent.to(dtype).double() if rounds_sum else sent
    assert name == rounded_on_the_wire(received, gradients, EVEN, 1e-6)
    assert rounded_on_the_wire(gradients.float().mean(0).double(), gradients, EVEN, 1e-6) is None


class Pair(NamedTuple):
    x: torch.Tensor
    name: list[str]


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    size: int = 3


BATCHES = [
    (torch.arange(6.0).reshape(3, 2), torch.arange(3)),
    {"x": torch.arange(3.0), "deep": [torch.ones(3, 1), ["a", "b", "c"]]},
    Pair(torch.arange(3.0), ["a", "b", "c"]),
    Record(torch.arange(3.0)),
    [np.arange(6.0).reshape(3, 2)],
    torch.arange(3).to(torch.bfloat16),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_joined_batches_hold_the_samples_of_all(batch):
    """Joining keeps type and structure, and the fingerprints of the samples, in order."""
    fingerprints = sample_fingerprints(batch)
    joined = join_batches([batch, batch])
    assert 3 == len(set(fingerprints))
    assert type(batch) is type(joined)
    assert (*fingerprints, *fingerprints) == sample_fingerprints(joined)
    assert digest(joined) == digest(join_batches([batch, batch]))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], r"\(2, 3\).*\(2, 4\)"),
        ([torch.ones(2), [1.0]], "Tensor.*list"),
        ([{"x": torch.ones(2), "scale": 1.0}, {"x": torch.ones(2), "scale": 2.0}], "float differ"),
        ([torch.tensor(1.0), torch.tensor(2.0)], "number without samples"),
    ],
)
def test_batches_that_cannot_be_joined_say_why(batches, message):
    """Padding to different lengths, other types and other settings are told apart."""
    with pytest.raises(ValueError, match=message):
        join_batches(batches)


def test_fingerprints_read_every_element():
    """One element in the middle of a large sample makes another fingerprint."""
    image = torch.zeros(1, 3, 64, 64)
    changed = image.clone()
    changed[0, 1, 32, 32] = 1e-6
    assert sample_fingerprints(image) != sample_fingerprints(changed)


def test_the_loss_of_pairs_follows_the_rule():
    """Of losses 2 and 6 with counts 3 and 1: mean over samples 3, weighted 3, sum 8, normalized sum 2, plain mean 4."""
    losses = [torch.tensor(2.0), torch.tensor(6.0)]
    expected = {None: 3.0, "weighted_mean": 3.0, "sum": 8.0, "normalized_sum": 2.0, "mean": 4.0}
    found = {name: loss_of_pairs(losses, [3, 1], None if name is None else RULES[name]).item() for name in expected}
    assert pytest.approx(expected) == found


def test_the_loss_of_a_pair_without_terms_is_zero():
    """A NaN of weight 0 leaves a loss of 0."""
    outputs = [{"loss": torch.tensor(math.nan), "weight": 0}]
    assert 0.0 == loss_of_pairs(outputs, [3], RULES["weighted_mean"]).item()


def test_named_terms_have_their_own_weights():
    """Case 9: 8/4 + 10/4 = 4.5."""
    outputs = [
        {"loss": {"cls": torch.tensor(1.0), "box": torch.tensor(4.0)}, "weight": {"cls": 2, "box": 1}},
        {"loss": {"cls": torch.tensor(3.0), "box": torch.tensor(2.0)}, "weight": {"cls": 2, "box": 3}},
    ]
    assert 4.5 == loss_of_pairs(outputs, [2, 2], RULES["weighted_mean"]).item()


def test_outputs_are_gathered_as_data_parallel_does():
    """Tensors are joined, scalars and numbers become one entry per replica, structures are kept."""
    outputs = [
        {"rows": torch.ones(2, 3), "both": (torch.tensor(1.0), 5)},
        {"rows": torch.zeros(1, 3), "both": (torch.tensor(2.0), 6)},
    ]
    gathered = gather_outputs(outputs)
    assert (3, 3) == gathered["rows"].shape
    assert ([1.0, 2.0], [5, 6]) == tuple(each.tolist() for each in gathered["both"])


def step(*samples, epoch=0):
    micro_batches = [MicroBatch(0, torch.ones(1), tuple(map(str.encode, names)), {}) for names in samples]
    return Step(epoch, micro_batches, [], {}, {}, {}, [], 0, {})


def runs_of(*ranks, **facts):
    return [Run(rank, len(ranks), {}, list(steps), Facts("Test", **facts)) for rank, steps in enumerate(ranks)]


def stream(*batches):
    return [(0, [sample.encode() for sample in names]) for names in batches]


def test_the_order_of_one_process_is_kept_by_sets():
    """Strided or contiguous, each global batch of one process is the ranks' union; the first other one is found."""
    runs = runs_of([step("ac"), step("eg")], [step("bd"), step("fh")])
    assert "equal" == compare_samples(runs, stream("ab", "cd", "ef", "gh"))[0].status
    ((finding,)) = compare_samples(runs, stream("abcd", "xyzw"))[1]
    assert ("data order", 1) == (finding.cause, finding.step)
    assert "0 of the 4 samples" in finding.detail


def test_samples_that_one_process_never_reads_may_be_transformed():
    """Where not a single sample is known, the report says that a random transformation may be the reason."""
    ((finding,)) = compare_samples(runs_of([step("ab")], [step("cd")]), stream("ABCD"))[1]
    assert "transformed at random" in finding.detail


def test_one_stream_on_all_ranks_is_found():
    """Case 40: identical samples on both ranks are one stream, unless one process reads them as often."""
    runs = runs_of([step("ab"), step("cd")], [step("ab"), step("cd")])
    assert ["duplicated stream"] == [finding.cause for finding in compare_samples(runs, None)[1]]
    assert ["duplicated stream"] == [finding.cause for finding in compare_samples(runs, stream("ab", "cd", "ef"))[1]]
    assert [] == compare_samples(runs, stream("abab", "cdcd"))[1]


def test_padding_is_counted_where_it_is_reached():
    """A sampler that repeats is a finding, with the number of repeated samples where the epoch's end was recorded."""
    runs = runs_of([step("ab")], [step("ca")], padded=1)
    assert "repeats 1 samples at the end" in compare_samples(runs, None)[1][0].detail
    assert "1 samples are trained on twice" in compare_samples(runs, stream("abc"))[1][0].detail


def test_micro_batches_are_put_into_the_order_of_one_process():
    """By loader batch, then rank, then cut; those that only kept a rank busy are left out."""
    runs = runs_of([step("a", "b", "e", "f")], [step("c", "d", "", "")], cuts=2)
    assert [b"a", b"b", b"c", b"d", b"e", b"f"] == [micro.samples[0] for _, micro, _ in pairs_of(runs, 0)]


def test_steps_of_one_batch_are_one_act():
    """Two optimizers that step in one batch are one call of training_step."""
    first = step("a")
    second = Step(0, first.micro_batches, [], {}, {}, {}, [], 1, {})
    assert [(0, 1), (2,)] == [act.steps for act in acts_of(runs_of([first, second, step("b", epoch=1)]))]


def report(*findings, gradients=None):
    stages = [Stage(name, "equal") for name in STAGES]
    return Report("DDPStrategy", "mean", 2, 2, "one process", 1e-5, stages, findings, gradients or {"w": [0.0, math.inf]})


def test_notes_do_not_make_a_difference():
    """Random numbers are a note: the report is equal with it, and different with any other cause."""
    note = Finding("stochastic", "random state", "drawn in dropout")
    assert report(note).equal
    assert report(note).first is None
    defect = Finding("sum loss", "reduced gradient", "2 x")
    assert not report(note, defect).equal
    assert defect == report(note, defect).first
    assert report(note, defect).without(["sum loss"]).equal


def test_an_unknown_cause_cannot_be_ignored():
    """A misspelt cause is refused with the list of causes."""
    with pytest.raises(ValueError, match=r"'dropout' is not a cause; use some of .*'stochastic'"):
        report().without(["dropout"])


def test_json_has_no_numbers_that_json_has_not():
    """Infinity and NaN become null, and every finding carries its page and factor."""
    found = differences({"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])}, tolerance=1e-5)[0]
    text = json.dumps(report(Finding("sum loss", "loss", "2 x", 0, found)).as_dict(), allow_nan=False)
    read = json.loads(text)
    assert [0.0, None] == read["gradients"]["w"]
    assert (1, False, 2.0) == (read["schema"], read["equal"], read["findings"][0]["factor"])
    assert "docs/causes.md#sum-loss" == read["findings"][0]["page"]


def test_the_table_names_verdict_cause_and_page():
    """What people read: the first stage, the factor, what to do, and where it is explained."""
    found = differences({"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])}, tolerance=1e-5)[0]
    console = Console(width=120, record=True, file=io.StringIO())
    print_report(report(Finding("sum loss", "loss", "2 x", 0, found, "do this")), console)
    text = console.export_text()
    for part in (
        "DIFFERENT",
        "'loss' in step 0: sum loss",
        "Do: do this",
        "docs/causes.md#sum-loss",
        "w: 2, reference 1",
    ):
        assert part in text


def test_every_cause_has_a_section():
    """The page of causes explains each, under the title that reports link to."""
    titles = [line.removeprefix("## ") for line in (ROOT / PAGE).read_text("utf-8").splitlines() if line.startswith("## ")]
    assert list(CAUSES) == titles


def test_a_picture_is_written(tmp_path):
    """The plot is a PNG, also where a difference is infinite."""
    pytest.importorskip("matplotlib")
    plot_report(report(gradients={"a": [0.0, 1e-7], "b": [math.inf, 0.3]}), tmp_path / "report.png")
    assert b"\x89PNG" == (tmp_path / "report.png").read_bytes()[:4]


def test_without_matplotlib_the_plot_says_what_to_install(monkeypatch, tmp_path):
    """matplotlib is optional, and its absence is an error that says so."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="pip install matplotlib"):
        plot_report(report(), tmp_path / "report.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to verify: give --config FILE, or module:LightningModule"),
        (["nowhere:Net"], "'nowhere:Net' cannot be imported: No module named 'nowhere'"),
        (["torch.nn"], "'torch.nn' must be written package.module:Name"),
        (["torch.nn:Linear", "--config", "c.yaml"], "either --config or a module"),
        (["torch.nn:Linear", "--model.lr=1"], "'--model.lr=1' is not an option"),
        (["torch.nn:Linear", "--trainer", "max_epochs"], "--trainer must be NAME=VALUE, got 'max_epochs'"),
        (["torch.nn:Linear", "--steps", "0"], "steps must be 1 or more, got 0"),
        (["torch.nn:Linear", "--strategy", "fsdp"], "gradients of whole models.*got FSDPStrategy"),
        (["torch.nn:Linear", "--strategy", "adhoc"], "strategy='adhoc' is not registered; use one of .*gradavg"),
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
        ({"accelerator": "tpu"}, "accelerator must be 'cpu' or 'cuda', got 'tpu'"),
        ({"accelerator": "cuda", "devices": 99}, "99 ranks need as many GPUs"),
    ],
)
def test_settings_are_checked(settings, message):
    """A setting out of range is refused with its value."""
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


def test_the_verifier_and_the_recorder_check_their_options():
    """A callback with an impossible option fails where it is built."""
    with pytest.raises(ValueError, match=r"on_difference must be 'warn' or 'raise', got 'stop'"):
        GradAvgVerifier(on_difference="stop")
    with pytest.raises(ValueError, match="steps must be 1 or more, got 0"):
        Recorder(0)


def test_what_is_no_module_is_refused():
    """A function that returns something else than a LightningModule is refused by the type it returns."""
    with pytest.raises(TypeError, match=r"got .* of type Linear"):
        ObjectTarget(lambda: torch.nn.Linear(1, 1)).build()


def test_options_of_the_trainer_are_kept_but_for_the_noise():
    """The user's options and callbacks stay, those that log, save or stop go, and an unknown one is refused."""
    schedule = GradientAccumulationScheduler({0: 2})
    kept = quiet_options({"gradient_clip_val": 0.5, "callbacks": [LearningRateMonitor(), schedule], "logger": True}, "cpu")
    assert (0.5, [schedule], False, "cpu") == (
        kept["gradient_clip_val"],
        kept["callbacks"],
        kept["logger"],
        kept["accelerator"],
    )
    with pytest.raises(ValueError, match="Trainer has no option 'lerning_rate'"):
        quiet_options({"lerning_rate": 1}, "cpu")


def test_strategies_that_start_processes_start_none_here():
    """A strategy named for its start method runs in the processes that are there."""
    assert "popen" == resolve_strategy("gradavg_spawn")._start_method
    assert "DDPStrategy" == type(resolve_strategy("auto")).__name__


def test_names_are_imported():
    """`package.module:Name` is what it says, nested names included."""
    assert LightningModule is imported("lightning.pytorch:LightningModule")
    assert LightningModule.log is imported("lightning.pytorch:LightningModule.log")


def test_verify_is_exported():
    """`verify` of the package is the function, in whatever order modules were imported."""
    assert verify is lightning_gradavg.verify
