"""Recorded runs on real ranks against their reference: every planted fault is named, healthy runs are not."""

from __future__ import annotations

import pytest
import verify_runs
from verify_runs import AGAIN, FAULTS, HEALTHY, LATE, SEVERAL, STOCHASTIC, THREE, UNEVEN, batches, recorded

from lightning_gradavg.verify.reference import read_stream
from lightning_gradavg.verify.report import STAGES
from lightning_gradavg.verify.run import reference_report

# One rank's micro-batch has no terms, which is meant.
pytestmark = pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0:UserWarning")

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def report_of(world, folder, setups, name, ranks=2):
    setup = getattr(verify_runs, setups)[name]
    tapes = world(ranks).run(recorded, setups, name, str(folder))
    options = {**QUIET, "max_epochs": 1, **setup.options}
    stream = None
    if not isinstance(setup.data, tuple):
        stream = read_stream(setup.build(), {"train_dataloaders": setup.loader()}, options, 100)
    return reference_report(tapes, setup.build(), options, None, stream=stream, order_asked=stream is not None)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(world, tmp_path, name):
    """The one fault of the set-up is found, and nothing else."""
    report = report_of(world, tmp_path, "FAULTS", name)
    assert [name] == [finding.cause for finding in report.findings]


@pytest.mark.parametrize("name", AGAIN)
def test_another_way_to_the_same_cause_is_named(world, tmp_path, name):
    """The cause is shown by what it does, not by how it came about."""
    report = report_of(world, tmp_path, "AGAIN", name)
    assert [name] == [finding.cause for finding in report.findings]


@pytest.mark.parametrize("names", SEVERAL)
def test_several_faults_are_all_named(world, tmp_path, names):
    """One fault does not hide another."""
    report = report_of(world, tmp_path, "SEVERAL", names)
    assert set(names) == {finding.cause for finding in report.findings}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(world, tmp_path, name):
    """The run equals its reference in every stage that is compared."""
    report = report_of(world, tmp_path, "HEALTHY", name)
    assert [] == [(finding.cause, finding.detail) for finding in report.findings]
    assert [] == list(report.remarks)
    assert report.equal


def test_case_7_a_compensated_loss_is_flagged_with_its_factor(world, tmp_path):
    """Case 7: under the weighted mean the gradient is 1.75 against 2.0 of the reference; the factor is shown."""
    report = report_of(world, tmp_path, "CASES", 7)
    first = report.first
    assert "hand-compensated loss" == first.cause
    assert (1.75, 2.0) == (pytest.approx(first.difference.found), pytest.approx(first.difference.expected))
    assert 0.875 == pytest.approx(first.factor)
    assert 'reduction="mean"' in first.detail


def test_case_41_dropout_is_a_note(world, tmp_path):
    """Case 41: Dropout(0.5) yields a "stochastic" finding with the layer's name instead of a false mismatch."""
    report = report_of(world, tmp_path, "CASES", 41)
    assert ["stochastic"] == [finding.cause for finding in report.findings]
    assert "model.2" in report.findings[0].detail
    assert report.equal


def test_case_42_batch_norm_is_named(world, tmp_path):
    """Case 42: plain batch norm on two ranks is named; rank 0's running mean is 0.1, that of the whole batch 0.3."""
    report = report_of(world, tmp_path, "CASES", 42)
    assert ["batch norm"] == [finding.cause for finding in report.findings]
    assert "batch norm not synchronised" in report.first.detail
    buffers = {stage.name: stage for stage in report.stages}["buffers"]
    assert (0.1, 0.3) == (pytest.approx(buffers.difference.found), pytest.approx(buffers.difference.expected))


def test_every_stage_is_compared(world, tmp_path):
    """A run whose module splits over samples is compared in all stages, and is equal in all."""
    report = report_of(world, tmp_path, "HEALTHY", "stock DDP")
    assert dict.fromkeys(STAGES, "equal") == {stage.name: stage.status for stage in report.stages}
    assert {"model.0.weight", "model.0.bias", "model.2.weight", "model.2.bias"} == set(report.gradients)
    assert [2] * 4 == [len(of_steps) for of_steps in report.gradients.values()]


def test_a_difference_is_seen_in_the_stage_that_makes_it(world, tmp_path):
    """Each stage starts from the run's own result of the one before: a wrong gradient is clipped and stepped right."""
    report = report_of(world, tmp_path, "FAULTS", "sum loss")
    status = {stage.name: stage.status for stage in report.stages}
    assert ("equal", "differs", "equal", "differs") == tuple(map(status.get, STAGES[2:6]))
    assert ("equal", "equal") == tuple(map(status.get, STAGES[6:8]))
    assert 'the gradient is 0.5 x the reference: the loss is a sum, use `reduction="sum"`' == report.first.detail
    assert ("model.0.weight", 0.5) == (report.first.difference.name, pytest.approx(report.first.factor))


def test_outputs_of_batch_norm_part_first(world, tmp_path):
    """Where ranks normalize over their own samples the outputs are the first stage to part, and are named."""
    report = report_of(world, tmp_path, "FAULTS", "batch norm")
    differing = [stage for stage in report.stages if stage.status == "differs"]
    assert ("outputs", "forward 0") == (differing[0].name, differing[0].difference.name)
    assert {"outputs", "loss", "local gradients", "reduced gradient", "buffers"} >= {stage.name for stage in differing}


def test_the_learning_rate_is_named_with_its_factor(world, tmp_path):
    """A learning rate multiplied by the number of ranks makes the same update, twice."""
    report = report_of(world, tmp_path, "FAULTS", "learning-rate scale")
    assert ("optimizer update", pytest.approx(2.0)) == (report.first.stage, report.first.factor)
    assert "0.2, on one process 0.1" in report.first.detail


def test_the_shares_of_unknown_counts_are_shown(world, tmp_path):
    """Where the counts are not known, the shares that make up the right gradient are shown: each rank's terms."""
    report = report_of(world, tmp_path, "FAULTS", "counts")
    ones = [(batches(sizes, seed=rank)[0][1] != 0).sum().item() for rank, sizes in enumerate(UNEVEN)]
    shown = ", ".join(f"{one / sum(ones):.3g}" for one in ones)
    assert f"takes the shares {shown} of" in report.first.detail


@pytest.mark.parametrize("stage", LATE)
def test_a_late_stage_is_compared_on_its_own(world, tmp_path, stage):
    """Where only one stage behind the gradient parts, it is named, and the gradient is not blamed."""
    report = report_of(world, tmp_path, "LATE", stage)
    assert [("unexplained", stage)] == [(finding.cause, finding.stage) for finding in report.findings]
    assert [stage] == [each.name for each in report.stages if each.status == "differs"]


def test_lr_scaling_is_taken_over(world, tmp_path):
    """A learning rate that the strategy scales because it was told to is no finding."""
    report = report_of(world, tmp_path, "HEALTHY", "scaled on purpose")
    assert report.equal


@pytest.mark.parametrize("name", THREE)
def test_three_ranks_and_float64(world, tmp_path, name):
    """Three ranks catch a hard-coded 2, one of them has nothing, and in float64 rounding is far below 1e-10."""
    report = report_of(world, tmp_path, "THREE", name, ranks=3)
    assert [] == list(report.findings)
    assert 1e-10 == report.tolerance
    assert 1e-13 > max(max(of_steps) for of_steps in report.gradients.values())


@pytest.mark.filterwarnings("ignore:random numbers drawn in model.2 are those of each rank:UserWarning")
@pytest.mark.parametrize("name", STOCHASTIC)
def test_a_healthy_run_with_chance_has_a_note(world, tmp_path, name):
    """Random numbers alone are a note, however the ranks' gradients are weighed: nothing is taken for a mismatch."""
    report = report_of(world, tmp_path, "STOCHASTIC", name)
    assert ["stochastic"] == [finding.cause for finding in report.findings]
    assert report.equal
    assert [] == list(report.remarks)


def test_batches_that_cannot_be_joined_are_computed_one_by_one(world, tmp_path):
    """Texts padded to different lengths have no global batch; their mean over tokens is right, and said to be so."""
    report = report_of(world, tmp_path, "PADDED", "weighted")
    assert report.equal
    assert ["cannot be joined" in remark for remark in report.remarks] == [True]
    stock = report_of(world, tmp_path, "PADDED", "stock DDP")
    assert ["mean of means"] == [finding.cause for finding in stock.findings]
    assert "they hold 6, 3 terms" in stock.first.detail
