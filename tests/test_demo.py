"""The demo reports what happened, and its exit status says whether GradAvg matches."""

from __future__ import annotations

import json
import math

import pytest
import torch

from examples.demo import runs, same_bits
from examples.demo.report import TaskResult


@pytest.mark.parametrize(
    ("weights", "losses", "status"),
    [(2e-6, 2e-6, 0), (1e-4, 0.0, 1), (0.0, 1e-4, 1), (math.nan, 0.0, 1), (0.0, math.nan, 1)],
)
def test_the_exit_status_says_whether_gradavg_matches(weights, losses, status, monkeypatch, tmp_path, capsys):
    """The demo fails if a weight or a loss of GradAvg differs by more than 1e-5, whatever stock DDP does."""
    factors = {"auto": (1.0, 1.0), "ddp": (1.5, 1.5), "gradavg": (1.0 + weights, 1.0 + losses)}

    def made_up(configuration, *_, **__):
        last_weight, last_loss = factors[configuration.strategy]
        ones = torch.ones(12, dtype=torch.float64)
        found = TaskResult(torch.cat([2 * ones, last_loss * ones[:1]]), {"a": ones, "b": last_weight * ones}, 0.75, 3.0)
        return dict.fromkeys(("digits", "text"), found)

    monkeypatch.setattr(runs, "run", made_up)
    monkeypatch.setenv("COLUMNS", "80")
    assert status == runs.main(["--worlds", "2", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    failure = "Differs from one process by more than 1e-05: GradAvg, 2 processes, digits; GradAvg, 2 processes, text"
    assert bool(status) == (failure in " ".join(printed.split()))
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    assert 2 == rows.count("one process, reversed 0.0e+00 0.0e+00 2.00 to 1.90 0.7500 3.0 s")
    assert 2 == rows.count("stock DDP, 2 processes 5.0e-01 5.0e-01 2.00 to 1.95 0.7500 3.0 s")
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert 0.5 == written["stock DDP, 2 processes"]["text"]["difference_of_weights"]


@pytest.mark.full
@pytest.mark.slow
def test_the_demo_leaves_the_same_bits(tmp_path, capsys):
    """Trained by Lightning's own launcher on one process and on two, the language model has the same weights."""
    assert 0 == same_bits.main(["--worlds", "1", "2", "--samples", "41", "--output", str(tmp_path)])
    assert "the same bits" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)  # 40 s on two idle cores
def test_the_demo_runs_on_four_processes(tmp_path):
    """On real processes GradAvg is within 1e-5 of one process in both tasks, where stock DDP is far off."""
    assert 0 == runs.main(["--quick", "--worlds", "4", "--output", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert 4 == len(results)
    assert all(results["stock DDP, 4 processes"][task]["difference_of_weights"] > 1e-3 for task in ("digits", "text"))
