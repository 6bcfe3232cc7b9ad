"""The comparison without any process: random numbers, samples, differences, reports, and the command's options."""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, LearningRateMonitor
from torch import nn
from verify_runs import IN_DOCS, RUNS, Net

import lightning_gradavg
from lightning_gradavg import verify
from lightning_gradavg.cli import main
from lightning_gradavg.verify.draws import DrawsBySample
from lightning_gradavg.verify.processes import require_memory
from lightning_gradavg.verify.record import sketch
from lightning_gradavg.verify.report import (
    CAUSES,
    STAGES,
    Finding,
    Report,
    Stage,
    explanation,
    plot_report,
    times,
)
from lightning_gradavg.verify.target import Settings, Target, imported, quiet_options, resolve_strategy
from lightning_gradavg.verify.twin import Difference, difference

ROOT = Path(__file__).resolve().parent.parent


def drawn(function, keys):
    torch.manual_seed(3)
    mode = DrawsBySample(double=False)
    mode.begin(keys)
    with mode:
        return function(len(keys)), mode


DRAWING = {
    "noise": lambda size: torch.randn(size, 3),
    "noise like": lambda size: torch.rand_like(torch.ones(size, 2)),
    "in place": lambda size: torch.empty(size).exponential_(),
    "dropout": lambda size: nn.functional.dropout(torch.ones(size, 5), 0.5),
    "dropout of channels": lambda size: nn.functional.dropout2d(torch.ones(size, 4, 2, 2), 0.5),
    "a class of each": lambda size: torch.multinomial(torch.ones(size, 9), 1),
    "a coin of each": lambda size: torch.bernoulli(torch.full((size, 2), 0.5)),
    "around a mean": lambda size: torch.normal(torch.full((size,), 7.0), 1.0),
    "several rows of each": lambda size: torch.rand(3 * size, 2),
    "drawn twice": lambda size: torch.rand(size, 1) + 10 * torch.rand(size, 1),
}


@pytest.mark.parametrize("name", DRAWING)
def test_a_sample_draws_the_same_in_any_batch(name):
    """A batch of five draws what one of three and one of two drew, one below the other, and no number twice."""
    keys = [(0, rank, index) for rank, size in enumerate((3, 2)) for index in range(size)]
    parts = [drawn(DRAWING[name], keys[:3])[0], drawn(DRAWING[name], keys[3:])[0]]
    whole, mode = drawn(DRAWING[name], keys)
    assert torch.equal(torch.cat(parts), whole)
    assert not mode.shared
    if name != "a coin of each":
        assert len(whole.unique()) > 1


def test_a_place_draws_the_same_at_any_length():
    """Where texts are padded further, their first places draw as before; where heads stand before, too."""
    keys = [(0, 0, index) for index in range(2)]
    short, long = (drawn(lambda _, length=length: torch.randn(4, length, length), keys)[0] for length in (3, 5))
    assert torch.equal(short, long[:, :3, :3])


def test_numbers_have_the_distribution_that_they_are_asked_for():
    """Mean and deviation of a normal distribution, the ends of a uniform one, the part that dropout drops."""
    keys = [(0, 0, index) for index in range(1000)]
    normal = drawn(lambda size: torch.empty(size, 100).normal_(3.0, 2.0), keys)[0]
    assert (3.0, 2.0) == (pytest.approx(float(normal.mean()), abs=0.02), pytest.approx(float(normal.std()), abs=0.02))
    uniform = drawn(lambda size: torch.empty(size, 100).uniform_(-1.0, 3.0), keys)[0]
    assert (-1.0, 3.0) == (
        pytest.approx(float(uniform.min()), abs=1e-3),
        pytest.approx(float(uniform.max()), abs=1e-3),
    )
    dropped = drawn(lambda size: nn.functional.dropout(torch.ones(size, 100), 0.3), keys)[0]
    assert 0.3 == pytest.approx(float((dropped == 0).double().mean()), abs=0.01)


def test_a_permutation_permutes_each_ranks_samples():
    """The samples of each rank change places among themselves, counted from where the rank's begin."""
    keys = [(0, rank, index) for rank, size in enumerate((3, 4)) for index in range(size)]
    first, other = drawn(torch.randperm, keys[:3])[0], drawn(torch.randperm, keys[3:])[0]
    assert [*first.tolist(), *(other + 3).tolist()] == drawn(torch.randperm, keys)[0].tolist()


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda _: torch.rand(()), "aten.rand"),
        (lambda _: torch.randn(7), "aten.randn"),
        (lambda _: torch.randperm(9), "aten.randperm"),
        (lambda size: torch.rand(size, generator=torch.Generator()), "aten.rand, with a generator of its own"),
    ],
)
def test_a_draw_of_no_sample_is_noted(draw, name):
    """One number for a batch, a permutation of something else, or a generator of the user's belongs to no sample."""
    assert [name] == list(drawn(draw, [(0, 0, index) for index in range(4)])[1].shared)


def test_hard_coded_types_become_float64():
    """Conversions, new tensors and mixed types are float64, and integers stay what they are."""
    mode, x = DrawsBySample(double=True), torch.ones(2, dtype=torch.float64)
    with mode:
        found = [x.float(), x.to(torch.bfloat16), torch.zeros(2, dtype=torch.float32), torch.ones(2) @ x, x.long()]
    assert [*[torch.float64] * 4, torch.int64] == [each.dtype for each in found]


@pytest.mark.parametrize("size", [7, 4096, 100_003])
def test_a_sketch_is_linear_and_sees_every_element(size):
    """Sums of tensors have the sum of their sketches, and an element that changes by one unit changes the sketch."""
    first, other = torch.randn(2, size, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(sketch(first.double() + 2 * other.double()), sketch(first) + 2 * sketch(other), atol=1e-12)
    changed = first.clone()
    changed[size // 2] = torch.nextafter(changed[size // 2], torch.tensor(9.0))
    assert not torch.equal(sketch(first), sketch(changed))
    assert sketch(first).numel() == min(size, 4096)


def between(found: Any, expected: Any) -> Difference | None:
    mine, other = ({n: torch.tensor(v, dtype=torch.float64) for n, v in one.items()} for one in (found, expected))
    return difference(mine, other, 1e-8)[0]


@pytest.mark.parametrize(
    ("found", "expected", "differs"),
    [
        ({"w": [1.0, 4.5]}, {"w": [1.0, 4.0]}, ("w", 0.125, 4.5, 4.0)),
        ({"w": [1.0], "tiny": [2e-9]}, {"w": [1.0], "tiny": [1e-9]}, ("tiny", 1.0, 2e-9, 1e-9)),
        ({"w": [1.0], "zero": [1e-16]}, {"w": [1.0], "zero": [-3e-17]}, None),  # but for rounding
        ({"w": [1.0]}, {"w": [1.0], "zero": [0.0]}, None),
        ({}, {"w": [2.0]}, ("w", 1.0, 0.0, 2.0)),
        ({"w": [1.0, math.nan]}, {"w": [1.0, math.nan]}, None),
        ({"w": [1.0, math.nan]}, {"w": [1.0, 1.0]}, ("w", math.inf, math.nan, 1.0)),
        ({"w": [1.0 + 1e-9]}, {"w": [1.0]}, None),
    ],
)
def test_tensors_are_measured_by_themselves(found, expected, differs):
    """Each tensor by its largest element, however small it is, and rounding of the largest is nothing."""
    seen = between(found, expected)
    assert (seen is None) == (differs is None)
    if seen is not None and differs is not None:
        assert differs[0] == seen.name
        assert list(differs[1:]) == pytest.approx([seen.relative, seen.found, seen.expected], nan_ok=True)


def test_a_factor_is_that_of_all():
    """Run / one process is a number only if everything is that multiple."""
    assert 0.5 == pytest.approx(between({"a": [1.0, 2.0], "b": [3.0]}, {"a": [2.0, 4.0], "b": [6.0]}).factor)
    assert between({"a": [1.0, 2.0], "b": [3.0]}, {"a": [2.0, 4.0], "b": [3.0]}).factor is None


def report(*findings, gradients=None, remarks=(), steps=2):
    stages = [Stage(name, "equal") for name in STAGES]
    return Report("DDPStrategy", "mean", 1, steps, 1e-8, stages, findings, gradients or {"w": [0.0, math.inf]}, remarks)


DOUBLED = Difference("w", 1.0, 2.0, 1.0, 2.0)


def test_verdicts():
    """Notes make no difference, a remark is not shown, and ignored causes are left out."""
    note, defect = Finding("data order", "samples", "x", note=True), Finding("sum loss", "reduced gradient", "2 x")
    assert report(note).equal
    assert ("different", defect) == (report(note, defect).verdict, report(note, defect).first)
    assert report(note, defect).without(["sum loss"]).equal
    assert ["not shown"] * 2 == [report(remarks=["assumed"]).verdict, report(steps=0).verdict]


def test_json_has_no_numbers_that_json_has_not():
    """Infinity and NaN become null, and every finding carries its text and factor."""
    text = json.dumps(report(Finding("sum loss", "reduced gradient", "2 x", 0, DOUBLED)).as_dict(), allow_nan=False)
    read = json.loads(text)
    assert [0.0, None] == read["gradients"]["w"]
    assert (2, False, "different", 2.0) == (
        *(read["schema"], read["equal"], read["verdict"]),
        read["findings"][0]["factor"],
    )
    assert CAUSES["sum loss"].text == read["findings"][0]["text"]


def test_a_report_begins_with_what_it_means():
    """What people read: the verdict in plain words, then what was found, what to do as a diff, and the table."""
    finding = Finding("double division", "reduced gradient", "by both", 0, DOUBLED, "divide once", "-loss / 2\n+loss")
    text = str(report(finding, remarks=["this and that"]))
    expected = (
        "DIFFERENT, from step 0 on, in reduced gradient: divided twice: by the run's own code, and by the reduction",
        "by both",
        "w is 2, on one process 1",
        "Do: divide once.",
        "-loss / 2",
        "not shown: this and that",
        "first in step",
        "ranks: 1, optimizer steps: 2",
    )
    assert sorted(map(text.index, expected)) == list(map(text.index, expected))
    assert str(report()).startswith("EQUAL: every step is that of one process.")
    assert str(report(remarks=["x"])).startswith("NOT SHOWN: ")


@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.parametrize("ours", [True, False])
def test_a_diff_keeps_options_and_advises_none_that_is_set(name, ours):
    """The options in use are in the diff as they are, and an option that is set is not advised."""
    cause = CAUSES[name]
    option = cause.option.partition("=")[0]
    used = {"GradAvgStrategy", *{option} - {"reduction"}} if ours else set()
    rule = cause.option.partition("=")[2].strip('"') if option == "reduction" and ours else "mean"
    _, diff = cause.remedy("GradAvgStrategy" if ours else "DDPStrategy", rule, used)
    assert not (ours and option) or "strategy=" not in diff
    assert "strategy=" not in diff or "DDPStrategy(...)" in diff
    assert "strategy=" not in diff or "GradAvgStrategy(..." in diff


def test_another_reduction_replaces_the_one_in_use():
    """A diff of a strategy with a reduction states it, and what takes its place."""
    _, diff = CAUSES["mean of means"].remedy("GradAvgStrategy", "sum", {"GradAvgStrategy"})
    assert '-trainer = Trainer(strategy=GradAvgStrategy(..., reduction="sum"), ...)' in diff
    assert '+trainer = Trainer(strategy=GradAvgStrategy(..., reduction="weighted_mean"), ...)' in diff
    assert "import" not in diff


@pytest.mark.parametrize(("factor", "words"), [(0.5, "half of"), (2.0001, "twice"), (0.875, "0.875 x"), (-1.0, "-1 x")])
def test_factors_are_said_in_words(factor, words):
    """What is half or twice is called so."""
    assert words == times(factor)


def test_the_page_of_causes_is_what_the_command_says():
    """`python docs/causes.py` writes docs/causes.md, and `--explain` prints the same."""
    causes = runpy.run_path(str(ROOT / "docs" / "causes.py"))
    assert causes["page"]() == causes["PAGE"].read_text("utf-8")
    for name, cause in CAUSES.items():
        assert cause.plain in explanation(name)


def test_the_page_lists_every_run():
    """Each run of the table is a line of docs/verify.md, with its cause."""
    lines = (ROOT / "docs" / "verify.md").read_text("utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    rows = {row[0]: row[-1] for row in cells if row[0] in RUNS}
    assert set(IN_DOCS) == set(rows)
    expected = {name: RUNS[name].cause for name in IN_DOCS if RUNS[name].cause}
    assert expected == {name: rows[name] for name in expected}
    counts = {verdict: sum(RUNS[name].verdict == verdict for name in IN_DOCS) for verdict in ("equal", "different")}
    assert (True, True) == (counts["equal"] >= 60, counts["different"] >= 55)


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


def test_a_cause_is_explained(capsys):
    """`--explain` needs nothing to verify."""
    assert 0 == main(["verify", "--explain", "sum loss"])
    assert "Adam hides the factor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to verify: give --config FILE, or module:LightningModule"),
        (["--config", "nofile.yaml"], "--config 'nofile.yaml': there is no such file"),
        (["torch.nn:Linear", "--config", "c.yaml", "--init", "a=1"], "beside it write --model.NAME=VALUE"),
        (["torch.nn:Linear", "--model.lr=1"], "'--model.lr=1' is not an option"),
        (["torch.nn:Linear", "--trainer", "max_epochs"], "--trainer must be NAME=VALUE, got 'max_epochs'"),
        (["torch.nn:Linear", "--trainer", "foo=3"], "Trainer has no option 'foo'. It has accelerator, "),
        (["torch.nn:Linear", "--init", "hidden"], "--init must be NAME=VALUE, got 'hidden'"),
        (["torch.nn:Linear", "--steps", "0"], "steps must be 1 or more, got 0"),
        (["torch.nn:Linear", "--strategy", "fsdp"], "gradients of whole models.*got FSDPStrategy"),
        (["torch.nn:Linear", "--strategy", "adhoc"], "strategy='adhoc' is not registered. It has .*gradavg"),
        (["torch.nn:Linear", "--plot", "/no/where.png"], "--plot '/no/where.png': there is no folder '/no'"),
        (["torch.nn:Linear", "--ignore", "dropout"], "'dropout'.*sum loss"),
        (["torch.nn:Linear", "--trainer", "max_epoch=3"], "no option 'max_epoch'. Did you mean 'max_epochs'\\?"),
        (["--explain", "sum los"], "Did you mean 'sum loss'\\?"),
        (["--explain", "dropout"], "'dropout'.*sum loss"),
    ],
)
def test_wrong_usage_is_one_line(arguments, message, capsys):
    """Wrong arguments end the command with code 2 and a line that quotes them, before any process starts."""
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["verify", *arguments]))
    assert 2 == ended.value.code
    error = capsys.readouterr().err
    assert 1 == error.count("\n")
    assert error.startswith("gradavg verify: error: ")
    assert re.search(message, error)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 0}, "devices must be 1 or more, got 0"),
        ({"accelerator": "tpu"}, "2 ranks need as many devices of type 'tpu', and torch finds 0"),
        ({"accelerator": "cuda", "devices": 99}, "99 ranks need as many devices of type 'cuda', and torch finds"),
        ({"tolerance": -1.0}, "tolerance is a relative difference > 0, got -1.0"),
    ],
)
def test_settings_are_checked(settings, message):
    """A setting out of range is refused with its value."""
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


class Typed(Net):
    def __init__(self, weighted: bool = False, hidden: int = 3) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Target(lambda: nn.Linear(1, 1)), "got .* of type Linear"),
        (Target(Net), "there is no training data: give --data"),
        (Target(Typed, init={"weighted": "maybe"}), "--init weighted='maybe': give true or false"),
        (Target(Typed, init={"hidden": True}), "--init hidden=True: give an integer"),
        (Target(Typed, init={"width": 3}), "there is no such argument. It has weighted, hidden"),
    ],
)
def test_a_wrong_target_is_refused(target, message):
    """What is no module, or has no data, or other arguments, is refused by name."""
    with pytest.raises((TypeError, ValueError), match=message):
        target.build()


def test_options_of_the_trainer_are_kept_but_for_the_noise():
    """The user's options and callbacks stay, those that log, save, search or stop go."""
    schedule = GradientAccumulationScheduler({0: 2})
    callbacks = [LearningRateMonitor(), LearningRateFinder(), schedule]
    kept = quiet_options({"gradient_clip_val": 0.5, "callbacks": callbacks, "logger": True}, "cpu")
    assert (0.5, [schedule], "cpu") == tuple(kept[name] for name in ("gradient_clip_val", "callbacks", "accelerator"))


def test_strategies_that_start_processes_start_none_here():
    """A strategy named for its start method runs in the processes that are there."""
    assert "popen" == resolve_strategy("gradavg_spawn")._start_method
    assert "DDPStrategy" == type(resolve_strategy("auto")).__name__


def test_names_are_imported(tmp_path):
    """`package.module:Name` and `file.py:Name` are what they say, nested names included."""
    (tmp_path / "one_net.py").write_text("class Net:\n    class Part: ...\n")
    assert LightningModule is imported("lightning.pytorch:LightningModule")
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
    (tmp_path / "unguarded.py").write_text("\n".join([*lines, "except Exception:", "    pass"]))
    sys.modules.pop("unguarded", None)
    with pytest.raises(ValueError, match=rf"trains when it is imported \(line 4: {re.escape(call)}\).*__main__"):
        imported(f"{tmp_path / 'unguarded.py'}:Net")


def test_too_little_memory_is_said_before_anything_runs():
    """A model that does not fit in float64 is refused with the figure."""
    large = Net()
    large.more = nn.Linear(10**8, 10**4, device="meta")
    with pytest.raises(
        ValueError, match=r"2 processes need 8e\+04 GB of memory for 1e\+06 million parameters in float64"
    ):
        require_memory(large, 2, double=True)
    require_memory(Net(), 2, double=True)


def test_verify_is_exported():
    """`verify` of the package is the function, in whatever order modules were imported."""
    assert verify is lightning_gradavg.verify
    assert callable(verify)
