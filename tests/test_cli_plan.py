"""The command `gradavg plan`: its tables, its JSON, its errors, and its documentation."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, fields
from typing import Any

import pytest

from lightning_gradavg.cli.plan import main
from lightning_gradavg.plan import Advice, Chunks, Cluster, NoiseAdvice, Outcome, Plan, Recipe, Run, make_plan
from lightning_gradavg.rates.scaling import SCALINGS

SEED = ["--batch-size", "16", "--lr", "0.01", "--nodes", "2", "--devices-per-node", "2"]
ADAM = ["--batch-size", "32", "--lr", "0.001", "--devices-per-node", "4", "--optimizer", "adam"]


@pytest.fixture(autouse=True)
def _width_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def lines_of(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """Return what the command prints, one space for each gap."""
    assert main(argv) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return [" ".join(line.split()) for line in printed.out.splitlines()]


def test_tables_answer_the_question_of_the_threads(capsys: pytest.CaptureFixture[str]) -> None:
    """4 per device and lr 0.01 with the global batch kept; stock DDP is at 64, where linear is 0.04 and sqrt 0.02."""
    lines = lines_of(capsys, *SEED)
    for expected in (
        "batch per device 16 4 16",
        "global batch 16 16 64",
        "scale k 1 1 4",
        "gradient of mean losses mean over 16 mean over 16 mean of 4 means",
        "gradient of sum losses sum over 16 sum over 16 sum over 64, 4 times too small",
        "linear k * lr lr 0.01 lr 0.04",
        "sqrt sqrt(k) * lr lr 0.01 lr 0.02",
        "keep it 0.01 right: the base step fits lr_scaling='none'",
        "divide it by 4 (ranks) 0.0025 wrong: 0.25 times the base step fits no lr_scaling",
        "DataLoader(dataset, batch_size=16)",
        "Trainer(num_nodes=2, devices=2, strategy=GradAvgStrategy(reduction='weighted_mean', split_batches=True))",
    ):
        assert expected in lines


def test_tables_of_a_batch_that_does_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    """Case 23: 12 on 5 devices prints the chunks, the lengths and the nearest batches that divide evenly."""
    length = ("--epochs", "1", "--dataset-size", "24", "--warmup-steps", "1")
    lines = lines_of(capsys, "--batch-size", "12", "--lr", "0.01", "--devices-per-node", "5", *length)
    text = " ".join(lines)
    assert "batch per device 12 3 on 4 devices, 0 on 1 device 12" in lines
    assert "steps 2 2 1" in lines
    assert "warm-up steps 1 1 1" in lines
    assert "Nearest global batches that divide evenly: 10 and 15." in text


def test_a_noise_scale_bounds_linear_scaling(capsys: pytest.CaptureFixture[str]) -> None:
    """A noise scale of 900 is the limit, and gives lr 0.0380083 at 64."""
    text = " ".join(lines_of(capsys, *SEED, "--noise-scale", "900"))
    assert "Your noise scale is about 900: linear scaling is safe to a global batch of about 900." in text
    assert "stock DDP, global batch 64: by that formula lr 0.0380083, where linear scaling says 0.04." in text
    text = " ".join(lines_of(capsys, *SEED, "--noise-scale", "12"))
    assert "Your noise scale is about 12: the base batch of 16 is beyond it, and no linear scaling" in text
    text = " ".join(lines_of(capsys, *ADAM, "--noise-scale", "900"))
    assert "For adam there is no such formula" in text
    assert "by that formula" not in text


@pytest.mark.parametrize("given", ["-3", "0", "nan"])
def test_noise_scales_that_cannot_be(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A noise scale that is not finite and > 0 is one line that quotes it, with exit code 2."""
    assert main([*SEED, "--noise-scale", given]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"gradavg plan: error: noise_scale must be finite and > 0, got {float(given)}.\n"


def test_one_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    """One node, device, rank and sample are not called nodes, devices, ranks and samples."""
    base = ("--batch-size", "1", "--lr", "0.1", "--accumulate-grad-batches", "2")
    lines = lines_of(capsys, *base, "--devices-per-node", "1", "--max-device-batch-size", "1")
    assert lines[0].endswith("on 1 device, sgd, lr 0.1. Now: 1 node x 1 device = 1 rank.")
    each = "2, each of at most 1 sample"
    assert f"micro-batches per device {each} {each} {each}" in lines


def test_tables_leave_out_what_the_recipe_does_not_say(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a length there are no rows of steps."""
    lines = lines_of(capsys, *SEED)
    assert not [line for line in lines if line.startswith(("steps", "warm-up"))]


def test_an_infeasible_scaling_names_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """Adam at scale 32 shows the largest feasible batch in the table and the reason below it."""
    text = " ".join(lines_of(capsys, *ADAM, "--global-batch-size", "1024", "--max-device-batch-size", "100"))
    assert "largest global" in text
    assert "319" in text
    assert "lr_scaling='adam_sde' is not feasible at scale 32 with beta1=0.9" in text
    assert "micro-batches per device 1 3, each of at most 86 samples 1" in text
    assert "lr_scaling='sqrt', base_batch_size=32" in text


def test_betas_and_eps_of_adam(capsys: pytest.CaptureFixture[str]) -> None:
    """The row of adam_sde prints lr, betas and eps at scale 4."""
    assert main([*ADAM, "--global-batch-size", "128", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (scaling,) = [each for each in plan["gradavg"]["scalings"] if each["lr_scaling"] == "adam_sde"]
    assert scaling["hyperparameters"] == {"lr": 0.002, "betas": [0.6, 0.996], "eps": 5e-9}
    text = " ".join(lines_of(capsys, *ADAM, "--global-batch-size", "128"))
    assert "lr 0.002, betas 0.6 0.996, eps" in text


NAMES: dict[type, set[str]] = {
    Recipe: {
        *("batch_size", "lr", "devices", "accumulate_grad_batches", "optimizer", "betas", "alpha", "eps"),
        *("weight_decay", "steps", "epochs", "dataset_size", "warmup_steps"),
    },
    Cluster: {"nodes", "devices_per_node"},
    Run: {
        *("world_size", "loader_batch_size", "chunks", "accumulate", "global_batch_size", "scale", "steps_per_epoch"),
        *("steps", "warmup_steps", "mean_loss_gradient", "sum_loss_gradient", "sum_loss_divisor", "scalings"),
    },
    Chunks: {"samples", "devices", "micro_batch_size"},
    Outcome: {
        *("lr_scaling", "feasible", "problem", "lr_factor", "hyperparameters", "weight_decay", "lr_warmup_steps"),
        "largest_global_batch_size",
    },
    Advice: {"text", "lr", "gradavg", "stock_ddp"},
    Plan: {
        *("recipe", "cluster", "base", "gradavg", "stock_ddp", "nearest_even_batch_sizes", "advice", "notes", "code"),
        "noise",
    },
    NoiseAdvice: {"noise_scale", "linear_scaling_limit", "gradavg_lr", "stock_ddp_lr"},
}


def test_json_has_the_documented_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """Schema 1 has exactly these fields."""
    assert main([*SEED, "--noise-scale", "900", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("schema") == 1
    found: dict[type, list[dict[str, Any]]] = {
        Plan: [printed],
        Recipe: [printed["recipe"]],
        Cluster: [printed["cluster"]],
        Run: [printed["base"], printed["gradavg"], printed["stock_ddp"]],
        Advice: printed["advice"],
        Chunks: printed["gradavg"]["chunks"],
        Outcome: printed["gradavg"]["scalings"],
        NoiseAdvice: [printed["noise"]],
    }
    for kind, objects in found.items():
        assert objects
        for each in objects:
            assert set(each) == NAMES[kind] == {field.name for field in fields(kind)}
    assert [each["lr_scaling"] for each in printed["gradavg"]["scalings"]] == list(SCALINGS)


@pytest.mark.parametrize(
    ("argv", "recipe"),
    [
        (
            (
                "--optimizer adamw --betas 0.8 0.95 --eps 1e-7 --weight-decay 0.1 --base-devices 2 --steps 90"
                " --accumulate-grad-batches 3 --dataset-size 500 --warmup-steps 9"
            ),
            Recipe(
                batch_size=16,
                lr=0.01,
                devices=2,
                accumulate_grad_batches=3,
                optimizer="adamw",
                betas=(0.8, 0.95),
                eps=1e-7,
                weight_decay=0.1,
                steps=90,
                dataset_size=500,
                warmup_steps=9,
            ),
        ),
        (
            "--optimizer rmsprop --alpha 0.9 --epochs 3 --dataset-size 500",
            Recipe(batch_size=16, lr=0.01, optimizer="rmsprop", alpha=0.9, epochs=3, dataset_size=500),
        ),
    ],
)
def test_every_option_reaches_the_plan(argv: str, recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON is the plan of the recipe, the cluster and the limits that the options name."""
    options = [*SEED, *argv.split(), "--global-batch-size", "192", "--max-device-batch-size", "10", "--json"]
    assert main(options) == 0
    expected = make_plan(recipe, Cluster(2, 2), global_batch_size=192, max_device_batch_size=10)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps({"schema": 1, **asdict(expected)}))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-size", "0"], "batch_size must be an integer >= 1, got 0"),
        (["--batch-size", "1.5"], "argument --batch-size: invalid int value: '1.5'"),
        (["--lr", "fast"], "argument --lr: invalid float value: 'fast'"),
        (["--lr", "-0.1"], "lr must be finite and > 0, got -0.1"),
        (["--lr", "inf"], "lr must be finite and > 0, got inf"),
        (["--nodes", "0"], "nodes must be an integer >= 1, got 0"),
        (["--betas", "0.9", "1.5", "--optimizer", "adam"], "beta2 must be in [0, 1), got 1.5"),
        (["--betas", "0.9", "0.99"], "betas=(0.9, 0.99) has no meaning for optimizer 'sgd'"),
        (["--epochs", "3"], "epochs=3 needs the size of the data set"),
        (["--global-batch-size", "-8"], "global_batch_size must be an integer >= 1, got -8"),
        (["--optimizer", "lion"], "invalid choice: 'lion'"),
        (["--learning-rate", "1"], "unrecognized arguments: --learning-rate 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever finds it, the parser or the recipe: one line on standard error that quotes the value, and code 2."""
    try:
        code: object = main([*SEED, *argv])
    except SystemExit as exit_:
        code = exit_.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.startswith("gradavg plan: error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_required_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A call without the recipe names the options that it needs."""
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "the following arguments are required: --batch-size, --lr, --devices-per-node" in capsys.readouterr().err


def test_the_module_runs_as_a_command() -> None:
    """`python -m lightning_gradavg.cli.plan` prints the same plan as the function, with nothing on standard error."""
    command = [sys.executable, "-m", "lightning_gradavg.cli.plan", *SEED, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["stock_ddp"]["global_batch_size"] == 64
