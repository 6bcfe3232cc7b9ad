"""The command `gradavg plan`: its tables, its JSON, its errors, and its documentation."""

from __future__ import annotations

import json

import pytest

from lightning_gradavg.cli.plan import main
from lightning_gradavg.plan import Cluster, Recipe, make_plan

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


def test_a_noise_scale_bounds_linear_scaling(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(lines_of(capsys, *SEED, "--noise-scale", "900"))
    assert "Your noise scale is about 900: linear scaling is safe to a global batch of about 900." in text
    assert "stock DDP, global batch 64: by that formula lr 0.0380083, where linear scaling says 0.04." in text
    text = " ".join(lines_of(capsys, *SEED, "--noise-scale", "12"))
    assert "Your noise scale is about 12: the base batch of 16 is beyond it, and no linear scaling" in text
    text = " ".join(lines_of(capsys, *ADAM, "--noise-scale", "900"))
    assert "For adam there is no such formula" in text
    assert "by that formula" not in text


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
    options = [*SEED, *argv.split(), "--global-batch-size", "192", "--max-device-batch-size", "10", "--json"]
    assert main(options) == 0
    expected = make_plan(recipe, Cluster(2, 2), global_batch_size=192, max_device_batch_size=10)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps({"schema": 1, **expected}))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-size", "1.5"], "argument --batch-size: invalid int value: '1.5'"),
        (["--lr", "inf"], "lr must be finite and > 0, got inf"),
        (["--noise-scale", "nan"], "noise_scale must be finite and > 0, got nan"),
        (["--betas", "0.9", "0.99"], "betas=(0.9, 0.99) has no meaning for optimizer 'sgd'"),
        (["--optimizer", "lion"], "invalid choice: 'lion'"),
        (["--learning-rate", "1"], "unrecognized arguments: --learning-rate 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
