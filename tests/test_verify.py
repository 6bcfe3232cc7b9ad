"""The comparison without any process: random numbers, samples, differences, reports, and the command's options."""

from __future__ import annotations

import copy
import importlib
import io
import json
import math
import pickle
import re
import sys
import sysconfig
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jsonargparse
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, LearningRateMonitor
from lightning.pytorch.strategies import ModelParallelStrategy
from test_ranks_verify import RUNS
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from toys import MLP

from lightning_gradavg import GradAvgModelParallelStrategy, GradAvgStrategy
from lightning_gradavg._lightning.options import in_code
from lightning_gradavg.cli import main
from lightning_gradavg.cli.lightning import read_names
from lightning_gradavg.verify.causes import CAUSES, explanation
from lightning_gradavg.verify.draws import Draws
from lightning_gradavg.verify.judge import judge
from lightning_gradavg.verify.lines import _LIBRARIES
from lightning_gradavg.verify.processes import reported_error
from lightning_gradavg.verify.records import Record, RecordedStep, RunFacts, StageTensors, join_shards
from lightning_gradavg.verify.report import Baseline, Finding, Report
from lightning_gradavg.verify.sketches import Difference, compare_tensors, sketch
from lightning_gradavg.verify.target import (
    Target,
    imported,
    quiet_options,
    resolve_strategy,
    user_run_of,
)

ROOT = Path(__file__).resolve().parent.parent


def recorded(function, size, seed=3):
    """Return what a function computes of so many samples, and the mode that recorded what it drew."""
    torch.manual_seed(seed)
    mode = Draws(double=False)
    with mode:
        return function(size), mode


def drawn_again(function, size, parts):
    """Return the same where the numbers that parts drew are drawn again, and the mode."""
    mode = Draws(double=False)
    mode.parts = [part.drawn for part in parts]
    with mode:
        return function(size), mode


MASKS = {
    "dropout": lambda size: nn.functional.dropout(torch.ones(size, 5), 0.5),
    "a coin of each": lambda size: torch.bernoulli(torch.full((size, 2), 0.5)),
}
DRAWING = MASKS | {
    "noise": lambda size: torch.randn(size, 3),
    "in place": lambda size: torch.empty(size).exponential_(),
    "normal": lambda size: torch.empty(size, 3).normal_(3.0, 2.0),
    "around a mean": lambda size: torch.normal(torch.full((size,), 7.0), 1.0),
    "several rows of each": lambda size: torch.rand(3 * size, 2),
    "integers": lambda size: torch.randint(2**40, (size, 3)),
    "drawn twice": lambda size: torch.rand(size, 1) + 10 * torch.rand(size, 1),
}


@pytest.mark.parametrize("name", DRAWING)
def test_a_batch_draws_what_its_parts_drew(name):
    """A batch of five draws what one of three and one of two drew, each from a state of its own."""
    three, first = recorded(DRAWING[name], 3, seed=1)
    two, second = recorded(DRAWING[name], 2, seed=2)
    whole, mode = drawn_again(DRAWING[name], 5, [first, second])
    assert torch.equal(torch.cat([three, two]), whole)
    assert "" == mode.problem


def test_a_place_draws_the_same_at_any_length():
    """Where texts are padded further, their first places draw as before; where heads stand before, too."""
    short, first = recorded(lambda size: torch.randn(2 * size, 3, 3), 2, seed=1)
    long, second = recorded(lambda size: torch.randn(2 * size, 5, 5), 2, seed=2)
    whole, mode = drawn_again(lambda size: torch.randn(2 * size, 5, 5), 4, [first, second])
    assert torch.equal(short, whole[:4, :3, :3])
    assert torch.equal(long, whole[4:])
    assert "" == mode.problem


def attended(size):
    return nn.functional.scaled_dot_product_attention(*[torch.ones(size, 2, 3, 4)] * 3)


DRAWS_OF_BATCHES = {
    "a number": (lambda _: torch.rand(()), "one draw for a whole batch (aten.rand): it belongs to no sample"),
    "the shape of a weight": (lambda _: torch.randn(8, 6), "one draw for a whole batch (aten.randn)"),
    "as often as there are samples": (
        lambda size: [torch.rand(2 * size, 3) for _ in range(size)],
        "a batch of another size or rank draws other random numbers (aten.rand)",
    ),
    "more than it returns": (
        lambda size: torch.native_dropout(torch.ones(size, 5), 0.5, True)[0],
        "an operator draws what it does not return (aten.native_dropout)",
    ),
    "behind a seed": (lambda _: (torch.manual_seed(5), torch.randn(8, 6))[1], ""),
    "from a generator": (lambda _: torch.rand(3, generator=torch.Generator()), ""),
    "nothing": (attended, ""),
}


@pytest.mark.parametrize("name", DRAWS_OF_BATCHES)
def test_a_draw_of_no_sample_is_compared_if_all_draw_the_same(name):
    """So they do behind a seed of the user's."""
    draw, problem = DRAWS_OF_BATCHES[name]
    parts = [recorded(draw, 4, seed)[1] for seed in (1, 2)]
    _, mode = drawn_again(draw, 8, parts)
    assert problem in mode.problem
    assert bool(problem) == bool(mode.problem)


def test_hard_coded_types_become_float64():
    """Conversions, new tensors and mixed types are float64, and integers stay what they are."""
    x = torch.ones(2, dtype=torch.float64)
    with Draws(double=True):
        plain = torch.ones(2)
        found = [x.float(), x.to(torch.bfloat16), torch.zeros(2, dtype=torch.float32), plain @ x, plain.sum(), x.long()]
        plain[:1] += 1
        copied = copy.deepcopy(plain)
    assert [*[torch.float64] * 5, torch.int64] == [each.dtype for each in found]
    assert [2.0, 1.0] == plain.tolist() == copied.tolist(), "what is written to stays where it is"


@pytest.mark.parametrize("size", [7, 4096, 100_003])
def test_a_sketch_is_linear_and_sees_every_element(size):
    first, other = torch.randn(2, size, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(sketch(first.double() + 2 * other.double()), sketch(first) + 2 * sketch(other), atol=1e-12)
    changed = first.clone()
    changed[size // 2] = torch.nextafter(changed[size // 2], torch.tensor(9.0))
    assert not torch.equal(sketch(first), sketch(changed))
    assert sketch(first).numel() == min(size, 4096)


@pytest.mark.parametrize(
    ("found", "expected", "differs"),
    [
        ({"w": [1.0, 4.5]}, {"w": [1.0, 4.0]}, ("w", 0.125, 4.5, 4.0, None)),
        ({"w": [1.0], "tiny": [2e-9]}, {"w": [1.0], "tiny": [1e-9]}, ("tiny", 1.0, 2e-9, 1e-9, 2.0)),
        ({"w": [1.0], "zero": [1e-16]}, {"w": [1.0], "zero": [-3e-17]}, None),  # but for rounding
        ({"w": [1.0]}, {"w": [1.0], "zero": [0.0]}, None),
        ({}, {"w": [2.0]}, ("w", 1.0, 0.0, 2.0, None)),
        ({"w": [1.0, math.nan]}, {"w": [1.0, math.nan]}, None),
        ({"w": [1.0, math.nan]}, {"w": [1.0, 1.0]}, ("w", math.inf, math.nan, 1.0, None)),
        ({"w": [1.0 + 1e-9]}, {"w": [1.0]}, None),
        ({"a": [1.0, 2.0], "b": [3.0]}, {"a": [2.0, 4.0], "b": [6.0]}, ("a", 0.5, 2.0, 4.0, 0.5)),
        ({"a": [1.0, 2.0], "b": [3.0]}, {"a": [2.0, 4.0], "b": [3.0]}, ("a", 0.5, 2.0, 4.0, 0.5)),
        ({"a": [1.0, 2.0], "b": [3.0]}, {"a": [2.0, 4.0], "b": [4.0]}, ("a", 0.5, 2.0, 4.0, None)),
    ],
)
def test_tensors_are_measured_against_themselves(found, expected, differs):
    """Each tensor by its largest element; rounding of the largest is nothing; a factor is that of all that differ."""
    mine, other = ({n: torch.tensor(v, dtype=torch.float64) for n, v in one.items()} for one in (found, expected))
    seen = next(iter(compare_tensors(mine, other, 1e-8)), None)
    assert (differs is None) == (seen is None)
    if differs is not None:
        name, *numbers, factor = differs
        assert (name, factor) == (seen.name, seen.factor)
        assert numbers == pytest.approx([seen.relative, seen.found, seen.expected], nan_ok=True)


def shards_of_rank(*stages):
    """Return the record of a rank that took one step in a sharded run."""
    return Record(facts=RunFacts(sharded=True), steps=[RecordedStep(0, [], list(stages), {})])


def test_shards_add_up_to_the_whole():
    """What is no shard stays that of its rank, and a rank without a tensor, as without a gradient, adds nothing."""
    first = StageTensors(
        "weights", {"shard": torch.tensor([1.0, 0.0]), "own": torch.tensor([5.0])}, frozenset({"shard"})
    )
    last = StageTensors(
        "weights", {"shard": torch.tensor([0.0, 2.0]), "own": torch.tensor([7.0])}, frozenset({"shard"})
    )
    records = [shards_of_rank(first), shards_of_rank(StageTensors("weights", {})), shards_of_rank(last)]
    join_shards(records)
    joined = [record.steps[0].stages[0].tensors for record in records]
    assert [[1.0, 2.0]] * 3 == [tensors["shard"].tolist() for tensors in joined]
    assert [5.0, 7.0] == [joined[0]["own"].item(), joined[2]["own"].item()]


def test_shards_of_other_steps_are_not_joined():
    weights = StageTensors("weights", {})
    records = [shards_of_rank(StageTensors("reduced gradient", {}), weights), shards_of_rank(weights)]
    expected = "the ranks take different optimizer steps, so their shards make no whole tensors"
    assert [expected] == judge(records, lambda: None, 1e-8).remarks


def report(*findings, remarks=(), steps=2):
    return Report("DDPStrategy", "mean", 1, steps, 1e-8, findings, remarks)


GONE = Difference("w", math.inf, math.nan, 1.0, 2.0)
NOTE, DEFECT = Finding("data order", "samples", "x", note=True), Finding("sum loss", "reduced gradient", "2 x", 0, GONE)


@pytest.mark.parametrize(
    ("shown", "verdict", "head", "statuses"),
    [
        (report(), "equal", "EQUAL to one process.", ["equal"] * 8),
        (report(NOTE), "equal", "EQUAL to one process.", ["equal", "note", *["equal"] * 6]),
        (report(steps=0), "not shown", "NOT SHOWN to equal one process.", ["not compared"] * 8),
        (report(remarks=["assumed"]), "not shown", "NOT SHOWN to equal one process.", ["equal"] * 8),
        (
            report(NOTE, DEFECT),
            "different",
            "DIFFERENT from one process.",
            ["equal", "note", "differs", *["not compared"] * 4, "equal"],
        ),
        (
            report(replace(DEFECT, step=1)),
            "different",
            "DIFFERENT from one process.",
            ["equal", "equal", "differs", *["equal"] * 5],
        ),
    ],
)
def test_a_report_has_a_verdict_and_says_what_was_compared(shown, verdict, head, statuses):
    """Notes make no difference, a remark is not shown, and behind a first step that differs nothing is compared."""
    assert (verdict, statuses) == (shown.verdict, list(shown.stages.values()))
    assert shown.equal == bool(shown) == (verdict == "equal")
    assert ("Not covered: " in str(shown)) == shown.equal
    assert repr(shown) == str(shown)
    assert str(shown).startswith(head)
    read = json.loads(json.dumps(shown.as_dict(), allow_nan=False))  # which has no infinity
    gone = {"name": "w", "relative": None, "found": None, "expected": 1.0, "factor": 2.0}
    assert all(one["difference"] in (None, gone) for one in read["findings"])


@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        (Baseline(), "one process."),
        (Baseline(8), "one process with batch 8."),
        (Baseline(8, 8), "one process with batch 8."),
        (
            Baseline(12, 6),
            "one process with batch 12. Your loader's batch is 6, so one process takes twice as many steps: see docs/w",
        ),
        (Baseline(24, 2, 3), "is 2, and 3 of them are accumulated, so one process takes 4 times as many steps"),
        (Baseline(11, 4), "is 4, so one process takes another number of steps"),
        (Baseline(24, 8, 3, 2), "one process with batch 24 in 6 chunks."),
    ],
)
def test_the_first_line_names_the_run_on_one_process(baseline, said):
    for shown in (report(), report(DEFECT), report(remarks=["assumed"])):
        assert said in str(replace(shown, baseline=baseline)).splitlines()[0]


def test_a_difference_is_named_with_its_stage_its_parameter_and_its_factor():
    _, line, *_ = str(report(DEFECT)).splitlines()
    assert line.startswith("From step 0 on, in the reduced gradient of `w`, 2 x that of one process: the loss is a sum")


ONE_DEVICE = {"equivalent_to": '"single_device"'}


@pytest.mark.parametrize(
    ("cause", "options", "changed"),
    [
        ("mean of means", {}, 'GradAvgStrategy(reduction="weighted_mean")'),
        ("sum loss", ONE_DEVICE, 'GradAvgStrategy(equivalent_to="single_device", reduction="sum")'),
        ("counts", {"reduction": '"sum"', "bucket_cap_mb": "1"}, '(reduction="weighted_mean", bucket_cap_mb=1)'),
        ("short window", {"find_unused_parameters": "True"}, "GradAvgStrategy(find_unused_parameters=True)"),
    ],
)
def test_a_diff_keeps_the_options_of_the_strategy(cause, options, changed):
    """There is one, that of the first finding: two would contradict each other."""
    findings = [replace(DEFECT, cause=cause), Finding("padding", "samples", "x")]
    text = str(replace(report(*findings), options=options))
    assert 1 == text.count("+trainer = ")
    assert f"{changed}, ...)" in text


def test_a_strategy_that_weighs_stays_as_it_is():
    text = str(replace(report(replace(DEFECT, cause="counts")), options=ONE_DEVICE, weighs=True))
    assert '    +    return {"loss": loss, "weight": n}' in text
    assert "Trainer(" not in text


def test_options_are_written_as_in_a_script():
    options = {"reduction": "sum", "ddp_comm_hook": fp16_compress_hook, "bucket_cap_mb": 1}
    expected = {"reduction": '"sum"', "ddp_comm_hook": "fp16_compress_hook", "bucket_cap_mb": "1"}
    assert expected == in_code(options)


def test_the_pages_say_what_the_code_knows(capsys):
    """`--explain` prints what a cause means, docs/verify.md counts the runs."""
    assert 0 == main(["verify", "--explain", "sum loss"])
    assert explanation("sum loss") in capsys.readouterr().out
    assert 0 == main(["verify", "--explain", "non-decomposable-loss"])
    assert explanation("non-decomposable loss") in capsys.readouterr().out
    assert all(cause.plain in explanation(name) for name, cause in CAUSES.items())
    page = " ".join((ROOT / "docs" / "verify.md").read_text("utf-8").split())
    counts = Counter(run.verdict for run in RUNS.values())
    assert f"{len(RUNS)} runs" in page
    assert f"{counts['different']} planted faults" in page
    assert f"{counts['equal']} healthy set-ups" in page
    assert f'{counts["not shown"]} runs are "not shown"' in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to verify: give --config FILE, or module:LightningModule"),
        (["--config", "nofile.yaml"], "--config 'nofile.yaml': there is no such file"),
        (["torch.nn:Linear", "--config", "c.yaml", "--init", "a=1"], "beside it write --model.NAME=VALUE"),
        (["torch.nn:Linear", "--model.lr=1"], "'--model.lr=1' is not an option"),
        (
            ["torch.nn:Linear", "--trainer", "max_epoch=3"],
            "max_epoch=3 is not an option of the Trainer. Did you mean 'max_epochs'\\?",
        ),
        (
            ["torch.nn:Linear", "--trainer", "acumulate=3"],
            "acumulate=3 is not an option of the Trainer. Did you mean 'accumulate_grad_batches'\\?",
        ),
        (
            ["torch.nn:Linear", "--init", "lr"],
            "argument --init: must be NAME=VALUE, such as accumulate_grad_batches=4, got 'lr'",
        ),
        (["torch.nn:Linear", "--steps", "0"], "steps must be an integer >= 1, got 0"),
        (["torch.nn:Linear", "--tolerance", "0"], "tolerance is a relative difference > 0, got 0.0"),
        (
            ["torch.nn:Linear", "--precision", "bf16-mixed"],
            "precision='bf16-mixed' is none of '64-true' and '32-true'. Leave it out for float64",
        ),
        (["torch.nn:Linear", "--strategy", "fsdp"], "DDPStrategy and ModelParallelStrategy.*got FSDPStrategy"),
        (["torch.nn:Linear", "--strategy", "adhoc"], "strategy='adhoc' is not registered. It has .*gradavg"),
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


def test_the_first_line_says_which_strategy_is_assumed(monkeypatch, capsys, tmp_path):
    """A script's Trainer is not read. A script that names a strategy of this package is told so."""
    command = importlib.import_module("lightning_gradavg.cli.verify")
    monkeypatch.setattr(command, "verify_target", lambda *_: report(DEFECT))
    (tmp_path / "stock.py").touch()
    (tmp_path / "ours.py").write_text("GradAvgStrategy()")
    printed = {}
    for name, arguments in {"stock": [], "ours": [], "told": ["--strategy", "gradavg"]}.items():
        script = tmp_path / "ours.py" if name == "told" else tmp_path / f"{name}.py"
        assert 1 == main(["verify", f"{script}:Net", *arguments])
        printed[name] = capsys.readouterr().out
    assert printed["stock"].startswith("This verifies the strategy ddp: --strategy is not given")
    assert printed["ours"].startswith("This verifies the strategy ddp")
    assert "verify it with --strategy" in printed["ours"].splitlines()[0]
    assert printed["told"].startswith("DIFFERENT from one process")


def test_a_report_that_cannot_be_printed_is_no_verdict(monkeypatch, capsys):
    command = importlib.import_module("lightning_gradavg.cli.verify")
    monkeypatch.setattr(command, "verify_target", lambda *_: report(remarks=["drawn in größe.py"]))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert 2 == main(["verify", "torch.nn:Linear"])
    assert "error: 'ascii' codec can't encode" in capsys.readouterr().err


def init(**given):
    return read_names("toys:Toy", None, given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (Target(lambda: user_run_of(lambda: nn.Linear(1, 1))).build, "got a Linear$"),
        (Target(lambda: user_run_of("toys:WEIGHTED")).build, "got a dict$"),
        (
            Target(lambda: user_run_of(MLP)).build,
            "no training data: give --data train.py:data, .*, or --data train.py:Data, a LightningDataModule",
        ),
        (lambda: init(lr="high"), "--init: .*lr.*float'>. Got value: high"),
        (lambda: init(width=3), "--init: Option 'width' is not accepted"),
        (lambda: imported("nowhere:Net"), "'nowhere:Net' cannot be imported: No module named 'nowhere'"),
        (lambda: imported("nowhere.py:Net"), "'nowhere.py:Net' cannot be imported: there is no file 'nowhere.py'"),
        (lambda: imported("torch.nn:Nothing"), "has no attribute 'Nothing'"),
        (lambda: imported("torch.nn"), "'torch.nn' must be written package.module:Name or file.py:Name"),
    ],
)
def test_what_cannot_be_verified_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_options_of_the_trainer_are_kept_but_for_the_noise():
    """The user's options and callbacks stay, those that log, save, search or stop go."""
    schedule = GradientAccumulationScheduler({0: 2})
    callbacks = [LearningRateMonitor(), LearningRateFinder(), schedule]
    kept = quiet_options({"gradient_clip_val": 0.5, "callbacks": callbacks, "logger": True})
    assert (0.5, [schedule], "cpu") == tuple(kept[name] for name in ("gradient_clip_val", "callbacks", "accelerator"))


def test_every_run_has_callbacks_of_its_own():
    """One process trains several times, and what a callback counted in the run before must not be there."""
    target = Target(lambda: user_run_of(MLP, [torch.ones(1)]), {"callbacks": [GradientAccumulationScheduler({0: 2})]})
    first, second = (target.build().options["callbacks"] for _ in range(2))
    assert first != second


@pytest.mark.parametrize(
    "strategy",
    [
        GradAvgStrategy(reduction="sum"),
        GradAvgStrategy(equivalent_to="data_parallel", num_replicas=4),
        GradAvgModelParallelStrategy(reduction="weighted_mean", tensor_parallel_size=1),
        ModelParallelStrategy(tensor_parallel_size=1),
    ],
)
def test_a_strategy_that_is_given_by_value_reaches_the_ranks(strategy):
    """`verify(strategy=...)` sends it to other processes."""
    assert type(pickle.loads(pickle.dumps(strategy))) is type(strategy)


def test_strategies_that_start_processes_start_none_here():
    assert "popen" == resolve_strategy("gradavg_spawn")._start_method
    found = [type(resolve_strategy(name)).__name__ for name in ("auto", "lightning.pytorch.strategies:DDPStrategy")]
    assert ["DDPStrategy"] * 2 == found


@pytest.mark.parametrize("call", ["Trainer.fit(None, None)", "verify(None)"])
def test_a_module_that_trains_on_import_is_refused_at_once(call, tmp_path):
    lines = ["from lightning.pytorch import Trainer", "from lightning_gradavg import verify", call]
    (tmp_path / "unguarded.py").write_text("\n".join(lines))
    sys.modules.pop("unguarded", None)
    with pytest.raises(ValueError, match=r"unguarded.py:Net' .* it (trains|verifies) when it is imported.*__main__"):
        imported(f"{tmp_path / 'unguarded.py'}:Net")


class WithoutTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_a_failure_without_a_text_is_reported():
    assert "rank 1 of 2 failed: WithoutTextError: <no text" in str(reported_error(WithoutTextError(), "rank 1 of 2"))


FAILS_IN = {
    "torch": lambda: nn.Linear(2, 1)(torch.ones(3)),
    "lightning": lambda: LightningModule().trainer,
    "jsonargparse": lambda: jsonargparse.ArgumentParser(exit_on_error=False).parse_args(["--unknown"]),
}


@pytest.mark.parametrize("library", FAILS_IN)
@pytest.mark.parametrize("in_site_packages", [True, False])
def test_a_failure_shows_the_line_of_the_user(monkeypatch, library, in_site_packages):
    """Also where the libraries are in none of Python's own folders, as after `pip install --target`."""
    if not in_site_packages:
        folders = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
        others = tuple(folder for folder in _LIBRARIES if folder not in folders)
        # By its name: the package shows the function `verify` instead of the module.
        monkeypatch.setattr(importlib.import_module("lightning_gradavg.verify.lines"), "_LIBRARIES", others)
    with pytest.raises(Exception) as raised:  # noqa: PT011  # every library raises another type
        FAILS_IN[library]()
    reported = str(reported_error(raised.value, "rank 1 of 2"))
    assert reported.startswith(f"rank 1 of 2 failed: {type(raised.value).__name__}: ")
    *_, place, line = reported.splitlines()
    assert place.startswith(f"  {__file__}, line ")
    assert line.strip().startswith(f'"{library}": lambda: ')
