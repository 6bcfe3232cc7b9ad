"""The command `gradavg plan`: its tables, its JSON, its errors, and its documentation."""

from __future__ import annotations

import json

import pytest

from lightning_gradavg.cli.plan import main
from lightning_gradavg.plan import Recipe, make_plan

SEED = ["--batch-size", "16", "--lr", "0.01", "--nodes", "2", "--devices-per-node", "2"]


def test_every_option_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--optimizer adamw --betas 0.8 0.95 --eps 1e-7 --base-devices 2 --steps 90 --accumulate-grad-batches 3"
        " --dataset-size 500 --warmup-steps 9 --global-batch-size 192 --max-device-batch-size 10"
    )
    assert main([*SEED, *options.split(), "--json"]) == 0
    recipe = Recipe(
        batch_size=16,
        lr=0.01,
        devices=2,
        accumulate_grad_batches=3,
        optimizer="adamw",
        betas=(0.8, 0.95),
        eps=1e-7,
        steps=90,
        dataset_size=500,
        warmup_steps=9,
    )
    expected = make_plan(recipe, nodes=2, devices_per_node=2, global_batch_size=192, max_device_batch_size=10)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps({"schema": 2, **expected}))


def test_the_tables_show_the_runs_and_the_scalings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    assert main([*SEED, "--global-batch-size", "160"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "chunks 16 on 1 device 40 on 4 devices 16 on 4 devices" in lines
    assert "linear k * lr lr 0.1 lr 0.04" in lines
    assert any(line.endswith("not for this optimizer not for this optimizer") for line in lines)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-size", "1.5"], "argument --batch-size: invalid int value: '1.5'"),
        (["--lr", "inf"], "lr must be finite and > 0, got inf"),
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
