"""What a replica owns, whichever rank computes it, and training steps that run once for each of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from replicas import Manual, Normed, Regression, assert_same, data, fit, outcome, parallel, single


@pytest.mark.parametrize("size", [2, 3])
def test_manual_optimization_runs_one_replica_per_rank(world, size):
    expected, _ = world(1).run(outcome, Normed, parallel(size))[0]
    for state, _ in world(size).run(outcome, Manual, parallel(size)):
        torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)


def test_replicas_do_without_a_preset(world):
    assert_same(world, (2, 3, 4), Normed, {"split_batches": True, "num_replicas": 4})


class Drifting(Normed):
    """Evaluates in training mode, as Monte Carlo dropout does."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.train()
        self.log("value", self(batch[0]).mean(), sync_dist=True)
        self.eval()


def validated_within() -> float:
    trainer = fit(Drifting(), single(), data(), data(20, 4), max_epochs=1, num_sanity_val_steps=0)
    return float(trainer.callback_metrics["value"])


@pytest.mark.parametrize("size", [2, 3])
def test_a_model_evaluated_in_training_mode_does_not_hang(world, size):
    expected = world(1).run(validated_within)
    assert world(size).run(validated_within) == pytest.approx(expected * size, rel=1e-12)


def patched() -> tuple[list[int], bool]:
    """Body: the calls of methods that a user has put on the instance, and whether they are still there."""
    module = Regression()
    mine = {name: Mock(wraps=getattr(module, name)) for name in ("training_step", "log")}
    vars(module).update(mine)
    fit(module, parallel(), data(24), max_epochs=1)
    return [each.call_count for each in mine.values()], mine.items() <= vars(module).items()


def test_patched_methods_are_called_and_put_back(world):
    """In 3 steps of 2 replicas each."""
    assert world(2).run(patched) == [([6, 3], True)] * 2


class Outputs(Regression):
    """Returns more than its loss."""

    def build(self) -> None:
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "rows": batch[1], "size": len(batch[1])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({name: value.tolist() for name, value in outputs.items()})


def outputs_seen(folder: str) -> list[Any]:
    module = Outputs()
    fit(module, parallel(), data(11, 11), max_epochs=1, logger=CSVLogger(folder), log_every_n_steps=1)
    return module.seen


def test_outputs_of_a_ranks_replicas_are_joined(world, tmp_path):
    (whole,), *_ = world(1).run(outputs_seen, str(tmp_path))
    assert whole["rows"] == next(iter(data(11, 11)))[1].tolist()
    assert whole["size"] == [3, 3, 3, 2]
    (first,), (second,) = world(2).run(outputs_seen, str(tmp_path))
    assert first["rows"] + second["rows"] == whole["rows"]
    assert first["size"] + second["size"] == whole["size"]
    assert (6 * first["loss"] + 5 * second["loss"]) / 11 == pytest.approx(whole["loss"], rel=1e-12)
