"""The table of runs: recorded on real ranks and judged by one process."""

from __future__ import annotations

import pytest
from verify_modules import batches
from verify_runs import RUNS, SIZES, judged, recorded

from lightning_gradavg.verify.report import Report

# One rank's micro-batch has no terms, or its random numbers are its own, which is meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:random numbers drawn in:UserWarning"),
    pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric val_loss:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:c10d.*an autograd kernel was not registered:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning"),
]


def report_of(world, name) -> Report:
    return judged(name, world(RUNS[name].ranks).run(recorded, name))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_judged_right(world, name):
    """A healthy run is equal, a fault is named, and what was not compared is said."""
    run, report = RUNS[name], report_of(world, name)
    found = report.first.cause if report.first is not None else ""
    assert (run.verdict, run.cause) == (report.verdict, found), str(report)
    assert run.not_shown in " ".join(report.remarks)


def test_case_7_a_compensated_loss_is_flagged_with_its_factor(world):
    """Case 7: under the weighted mean the gradient is 1.75 against 2.0 of one process; the factor is shown."""
    first = report_of(world, "case 7").first
    assert (1.75, 2.0) == (pytest.approx(first.difference.found), pytest.approx(first.difference.expected))
    assert 0.875 == pytest.approx(first.factor)
    assert 'reduction="mean"' in first.detail


def test_a_difference_is_seen_in_the_stage_that_makes_it(world):
    """What comes before the wrong gradient is equal, what comes after it is not compared; a diff keeps options."""
    report = report_of(world, "a sum loss")
    assert ("equal", "differs", "not compared") == tuple(
        report.stages[name] for name in ("samples", "reduced gradient", "weights")
    )
    assert "the gradient is 0.5 x that of one process: the loss is a sum over samples" in report.first.detail
    assert 0.5 == pytest.approx(report.first.factor)
    assert '+trainer = Trainer(strategy=GradAvgStrategy(..., reduction="sum"), ...)' in report.first.diff


def test_the_shares_of_unknown_counts_are_shown(world):
    """Where the counts are not known, the shares that make up the right gradient are shown: each rank's terms."""
    report = report_of(world, "a mean over tokens weighted by samples")
    ones = [(batches(sizes, seed=rank)[0][1] != 0).sum().item() for rank, sizes in enumerate(SIZES)]
    assert f"weights the micro-batches by {', '.join(f'{one / sum(ones):.4g}' for one in ones)}," in report.first.detail
    assert '"weight": n' in report.first.diff
    assert "reduction" not in report.first.diff, "which is set already"


def test_another_order_of_a_sampler_is_a_note(world):
    """Under a shuffling sampler the headline is what changes the gradient, and the order is only to be known."""
    report = report_of(world, "a sum loss, shuffled")
    assert [("sum loss", False), ("data order", True)] == [(each.cause, each.note) for each in report.findings]


def test_a_logged_value_is_told_from_the_training(world):
    """The training is that of one process, and the report says that only the logged value is not."""
    first = report_of(world, "a loss summed over the ranks by hand").first
    assert ("logged values", 2.0) == (first.stage, pytest.approx(first.factor, rel=0.1))
    assert "the training is the same" in first.detail


def test_float64_tells_a_tiny_gradient(world):
    """In float64 all steps of a healthy run agree to 1e-13, and a parameter of 1e-9 is measured by itself."""
    name = "`split_batches` on three ranks"
    assert judged(name, world(3).run(recorded, name), tolerance=1e-13).equal
    assert "net.tiny" == report_of(world, "a tiny gradient times the ranks").first.difference.name
