"""Recorded runs on real ranks against their reference: every planted fault is named, healthy runs are equal."""

from __future__ import annotations

import pytest
from verify_runs import CASES, IN_DOCS, RUNS, THREE, UNEVEN, batches, recorded

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
    return reference_report(tapes, run.build(), options, None, stream=stream, order_asked=True)


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
