"""The table of runs: recorded on real ranks and judged by one process."""

from __future__ import annotations

import pytest
from verify_runs import RUNS, judged, recorded

# One rank's micro-batch has no terms, or its random numbers are its own, which is meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:random numbers drawn in:UserWarning"),
    pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric val_loss:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:c10d.*an autograd kernel was not registered:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning"),
]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_judged_right(world, name):
    """A healthy run is equal, a fault is named with its factor, and what was not compared is said."""
    run = RUNS[name]
    report = judged(name, world(run.ranks).run(recorded, name))
    text, found = str(report), report.first.cause if report.first is not None else ""
    assert (run.verdict, run.cause) == (report.verdict, found), text
    assert run.not_shown in " ".join(report.remarks)
    assert all(said in text for said in run.says), text
    assert run.factor is None or run.factor == pytest.approx(report.first.factor)
