"""What a replica owns, whichever rank computes it, and training steps that run once for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from ranks import make_trainer
from replicas import (
    Classifier,
    Manual,
    Normed,
    Options,
    assert_same,
    data,
    fit,
    outcome,
    parallel,
    state_of,
)
from torch import Tensor, nn

from lightning_gradavg import GradAvgStrategy


class Save(Callback):
    """Writes a checkpoint when the run has made so many steps, within an epoch."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def saved(folder: str, strategy: Options, stop: int, resume: str | None) -> tuple[str, dict[str, Tensor]]:
    module = Classifier(drop=nn.Dropout(0.3))
    torch.manual_seed(7)
    path = str(Path(folder) / f"{stop}.ckpt")
    trainer = make_trainer(GradAvgStrategy(**strategy), max_steps=stop, max_epochs=10, callbacks=[Save(path, stop)])
    trainer.fit(module, data(22, shuffle=True), ckpt_path=resume)
    return path, state_of(module)


@pytest.mark.parametrize("sizes", [(4, 1, 2), (1, 3, 4)])
def test_a_run_goes_on_at_another_world_size(world, tmp_path, sizes):
    _, expected = world(1).run(saved, str(tmp_path / "whole"), parallel(), 8, None)[0]
    path = None
    for size, stop in zip(sizes, (2, 5, 8), strict=True):
        runs = world(size).run(saved, str(tmp_path / "parts"), parallel(), stop, path)
        path, state = runs[0]
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def resumed_with_other_replicas(folder: str, path: str) -> None:
    saved(folder, {**parallel(), "num_replicas": 2}, 8, path)


def test_other_replicas_are_another_recipe(world, tmp_path):
    path, _ = world(2).run(saved, str(tmp_path), parallel(), 2, None)[0]
    for raised in world(2).run_expecting_errors(resumed_with_other_replicas, str(tmp_path / "more"), path):
        assert "num_replicas: 4 in the checkpoint, now 2" in raised.message


@pytest.mark.parametrize("size", [2, 3])
def test_manual_optimization_runs_one_replica_per_rank(world, size):
    expected, _ = world(1).run(outcome, Normed, parallel(size))[0]
    for state, _ in world(size).run(outcome, Manual, parallel(size)):
        torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)


def test_replicas_do_without_a_preset(world):
    assert_same(world, (2, 3, 4), Normed, {"split_batches": True, "num_replicas": 4})


class Drifting(Classifier):
    """Evaluates in training mode, as Monte Carlo dropout does."""

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.train()
        self.log("value", self(batch[0]).mean(), sync_dist=True)
        self.eval()


def validated_within() -> float:
    module = Drifting()
    trainer = make_trainer(GradAvgStrategy(equivalent_to="single_device"), max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, data(), data(20, 4))
    return float(trainer.callback_metrics["value"])


def test_a_model_evaluated_in_training_mode_does_not_hang(world):
    expected = world(1).run(validated_within)[0]
    assert world(2).run(validated_within) == pytest.approx([expected] * 2, rel=1e-12)
    assert world(3).run(validated_within) == pytest.approx([expected] * 3, rel=1e-12)


def patched() -> tuple[list[int], bool]:
    """Body: the calls of methods that a user has put on the instance, and whether they are still there."""
    module = Classifier()
    mine = {name: Mock(wraps=getattr(module, name)) for name in ("training_step", "log")}
    vars(module).update(mine)
    fit(module, parallel())
    return [each.call_count for each in mine.values()], mine.items() <= vars(module).items()


def test_patched_methods_are_called_and_put_back(world):
    assert world(2).run(patched) == [([6, 3], True)] * 2


def outputs_seen(folder: str) -> list[Any]:
    seen: list[Any] = []

    class Extra(Classifier):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "rows": batch[1], "size": len(batch[1])}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append({name: value.tolist() for name, value in outputs.items()})

    fit(Extra(), parallel(), data(11, 11), logger=CSVLogger(folder), log_every_n_steps=1)
    return seen


def test_outputs_of_a_ranks_replicas_are_joined(world, tmp_path):
    (whole,), *_ = world(1).run(outputs_seen, str(tmp_path))
    assert whole["rows"] == next(iter(data(11, 11)))[1].tolist()
    assert whole["size"] == [3, 3, 3, 2]
    halves = [seen for (seen,) in world(2).run(outputs_seen, str(tmp_path))]
    assert halves[0]["rows"] + halves[1]["rows"] == whole["rows"]
    assert halves[0]["size"] + halves[1]["size"] == whole["size"]
    mean = (6 * halves[0]["loss"] + 5 * halves[1]["loss"]) / 11
    assert mean == pytest.approx(whole["loss"], rel=1e-12)
