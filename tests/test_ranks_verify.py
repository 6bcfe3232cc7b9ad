"""Recorded runs on real ranks against their reference: every planted fault is named, healthy runs are equal."""

from __future__ import annotations

import pytest
import torch
from verify_runs import IN_DOCS, RUNS, THREE, UNEVEN, batches, recorded

from lightning_gradavg.verify.reference import read_stream
from lightning_gradavg.verify.report import STAGES, Report
from lightning_gradavg.verify.run import reference_report

# One rank's micro-batch has no terms, or its random numbers are its own, which is meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0:UserWarning"),
    pytest.mark.filterwarnings("ignore:random numbers drawn in model.1 are those of each rank:UserWarning"),
    pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric val_loss:RuntimeWarning"),
]

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def report_of(world, folder, name) -> Report:
    run = RUNS[name]
    tapes = world(3 if name in THREE else 2).run(recorded, name, str(folder))
    options = {**QUIET, "max_epochs": 1, **run.options}
    stream = read_stream(run.build(), {"train_dataloaders": run.loader()}, options, 100)
    return reference_report(tapes, run.build(), options, None, stream=stream)


@pytest.mark.parametrize("name", IN_DOCS)
def test_a_run_is_judged_right(world, tmp_path, name):
    """A healthy run is equal in every row, a fault is named and nothing else, and what was not compared is said."""
    run, report = RUNS[name], report_of(world, tmp_path, name)
    differing = [stage.name for stage in report.stages if stage.status == "differs"]
    assert (run.verdict, list(run.causes)) == (
        report.verdict,
        [finding.cause for finding in report.findings if finding.is_difference],
    ), (report.findings, report.remarks)
    assert bool(run.causes) == bool(differing), differing
    assert run.not_shown in " ".join(report.remarks)


@pytest.mark.parametrize("name", THREE)
def test_three_ranks_and_float64(world, tmp_path, name):
    """Three ranks catch a hard-coded 2, one of them has nothing, and in float64 rounding is far below 1e-10."""
    report = report_of(world, tmp_path, name)
    assert ("equal", 1e-10) == (report.verdict, report.tolerance)
    assert 1e-13 > max(max(of_steps) for of_steps in report.gradients.values())


def test_case_7_a_compensated_loss_is_flagged_with_its_factor(world, tmp_path):
    """Case 7: under the weighted mean the gradient is 1.75 against 2.0 of the reference; the factor is shown."""
    first = report_of(world, tmp_path, "case 7").first
    assert "hand-compensated loss" == first.cause
    assert (1.75, 2.0) == (pytest.approx(first.difference.found), pytest.approx(first.difference.expected))
    assert 0.875 == pytest.approx(first.factor)
    assert 'reduction="mean"' in first.detail


def test_case_41_dropout_is_a_note(world, tmp_path):
    """Case 41: Dropout(0.5) yields a "stochastic" note with the layer's name, and everything is compared."""
    report = report_of(world, tmp_path, "case 41")
    assert ["stochastic"] == [finding.cause for finding in report.findings]
    assert "drawn in model.1;" in report.findings[0].detail
    assert report.equal


def test_case_42_batch_norm_is_named(world, tmp_path):
    """Case 42: plain batch norm on two ranks is named; rank 0's running mean is 0.1, that of the whole batch 0.3."""
    report = report_of(world, tmp_path, "case 42")
    assert ["batch norm"] == [finding.cause for finding in report.findings]
    found = stages_of(report)["buffers"].difference
    assert (0.1, 0.3) == (pytest.approx(found.found), pytest.approx(found.expected))


def stages_of(report):
    return {stage.name: stage for stage in report.stages}


def test_every_stage_is_compared(world, tmp_path):
    """A run whose module splits over samples is compared in all stages, and is equal in all."""
    report = report_of(world, tmp_path, "stock DDP")
    assert dict.fromkeys(STAGES, "equal") == {stage.name: stage.status for stage in report.stages}
    assert {"model.0.weight", "model.0.bias", "model.2.weight", "model.2.bias"} == set(report.gradients)
    assert [2] * 4 == [len(of_steps) for of_steps in report.gradients.values()]


def test_random_numbers_hide_no_stage(world, tmp_path):
    """With dropout outputs, losses and gradients are compared as without: one process draws what the ranks drew."""
    report = report_of(world, tmp_path, "dropout, uneven batches, `weighted_mean`")
    assert dict.fromkeys(STAGES[:-1], "equal") == {stage.name: stage.status for stage in report.stages[:-1]}


def test_a_difference_is_seen_in_the_stage_that_makes_it(world, tmp_path):
    """Each stage starts from the run's own result of the one before: a wrong gradient is clipped and stepped right."""
    report = report_of(world, tmp_path, "a sum loss")
    assert {"reduced gradient"} == {stage.name for stage in report.stages if stage.status == "differs"}
    assert "the gradient is half of that of one process: the loss is a sum over samples" in report.first.detail
    assert ("model.0.weight", 0.5) == (report.first.difference.name, pytest.approx(report.first.factor))


def test_outputs_of_batch_norm_part_first(world, tmp_path):
    """Where ranks normalize over their own samples the outputs part first, at the layer that mixes samples."""
    report = report_of(world, tmp_path, "batch norm")
    differing = [stage for stage in report.stages if stage.status == "differs"]
    assert ("outputs", "model.1 0") == (differing[0].name, differing[0].difference.name)


def test_the_learning_rate_is_named_with_its_factor(world, tmp_path):
    """A learning rate multiplied by the number of ranks makes the same update, twice."""
    first = report_of(world, tmp_path, "a learning rate times the ranks").first
    assert ("optimizer update", 2.0) == (first.stage, pytest.approx(first.factor))
    assert "the learning rate is 0.2, on one process 0.1: twice it" in first.detail


def test_the_shares_of_unknown_counts_are_shown(world, tmp_path):
    """Where the counts are not known, the shares that make up the right gradient are shown: each rank's terms."""
    report = report_of(world, tmp_path, "a mean over tokens weighted by samples")
    ones = [(batches(sizes, seed=rank)[0][1] != 0).sum().item() for rank, sizes in enumerate(UNEVEN)]
    shown = ", ".join(f"{one / sum(ones):.4g}" for one in ones)
    assert f"takes the shares {shown} of" in report.first.detail
    assert '"weight": n' in report.first.diff


def test_the_first_step_leads(world, tmp_path):
    """A wrong learning rate in step 0 leads a short window in step 1, which is an earlier stage of a step."""
    report = report_of(world, tmp_path, "a learning rate times the ranks, a short last window")
    assert [("learning-rate scale", 0), ("short window", 1)] == [(each.cause, each.step) for each in report.findings]


def test_another_order_of_a_sampler_is_a_note(world, tmp_path):
    """Under a shuffling sampler the headline is what changes the gradient, and the order is only to be known."""
    report = report_of(world, tmp_path, "a sum loss, shuffled")
    assert [("sum loss", True), ("data order", False)] == [(each.cause, each.is_difference) for each in report.findings]


def test_another_order_of_a_script_is_a_difference(world, tmp_path):
    """Without a sampler that shuffles, global batches that one process reads later are another training."""
    report = report_of(world, tmp_path, "ranks that read backwards")
    assert [("data order", 0, True)] == [(each.cause, each.step, each.is_difference) for each in report.findings]
    assert "0 of the 8 samples" in report.first.detail


def test_samples_that_one_process_never_reads_may_be_transformed(world, tmp_path):
    """Where not a single sample is known, the order is not compared, and it is said why."""
    report = report_of(world, tmp_path, "samples of their own on several processes")
    assert "not shown" == report.verdict
    assert "transformed at random" in stages_of(report)["samples"].note


def test_a_small_factor_shows_in_half_precision(world, tmp_path):
    """A factor of 1.004 is as small as bfloat16's rounding, but points along the gradient."""
    report = report_of(world, tmp_path, "gradients times 1.004 in bfloat16")
    assert ["unexplained"] == [finding.cause for finding in report.findings]
    assert 1.004 == pytest.approx(report.first.factor, rel=1e-4)


def test_the_reference_is_as_precise_as_the_run(world, tmp_path):
    """The precision of matrix products that the ranks set is the reference's, too, and loosens what is rounding."""
    report = report_of(world, tmp_path, "medium precision of products")
    assert "equal" == report.verdict
    assert "medium" == torch.get_float32_matmul_precision()


def test_each_part_of_a_batch_is_told_apart_by_its_state(world, tmp_path):
    """What both calls of a window keep for themselves is named, not taken for a loss of other terms."""
    report = report_of(world, tmp_path, "a moving average of the loss in an attribute")
    assert "not compared" == stages_of(report)["reduced gradient"].status
    assert [] == list(report.findings)
