"""One loader batch is one step of Lightning on any number of ranks, however many pieces each of them computes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from ranks import make_trainer
from replicas import Regression, data, parallel, single, state_of

from lightning_gradavg import GradAvgStrategy

SAMPLES, BATCH = 43, 8  # 5 loader batches of 8 samples, and one of 3, which leaves one of 4 ranks without


class Net(Regression):
    """Logs its loss; `lbfgs` steps by closures, `keeps` does not zero gradients, and `halves` has a scheduler."""

    lbfgs = keeps = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "rows": batch[1]}

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if not (self.keeps and batch_idx % 2):
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def configure_optimizers(self) -> Any:
        if self.lbfgs:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}


class LBFGS(Net):
    lbfgs = True


class Keeps(Net):
    keeps = True


class Seen(Callback):
    """Notes what callbacks see, keeps a moving average of the weights, and stops the run when told."""

    def __init__(self, stop: int | None) -> None:
        self.stop, self.calls = stop, dict.fromkeys(("backward", "after", "zero", "step"), 0)
        self.steps: list[tuple[int, int, float, float]] = []
        self.average: dict[str, torch.Tensor] = {}

    def on_before_backward(self, *_: Any) -> None:
        self.calls["backward"] += 1

    def on_after_backward(self, *_: Any) -> None:
        self.calls["after"] += 1

    def on_before_zero_grad(self, *_: Any) -> None:
        self.calls["zero"] += 1

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.calls["step"] += 1

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, value in state_of(module).items():
            self.average[name] = self.average.get(name, value).lerp(value, 0.3)
        loss, lr = trainer.callback_metrics["loss_step"].item(), trainer.optimizers[0].param_groups[0]["lr"]
        self.steps.append((batch_idx, trainer.global_step, lr, loss))
        trainer.should_stop |= len(self.steps) == self.stop


class Bar(ProgressBar):
    """A progress bar that notes its totals."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: list[Any] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        self.totals.append(self.total_train_batches)

    def disable(self) -> None:
        pass


def seen(kind: type[Net], strategy: Mapping[str, Any], folder: str, stop: int | None = None, **options: Any) -> Any:
    """Body: all that a run of two epochs shows."""
    module, callback, bar = kind(), Seen(stop), Bar()
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(
        GradAvgStrategy(**strategy),
        callbacks=[callback, bar, keep],
        **{"max_epochs": 2, "enable_checkpointing": True, "enable_progress_bar": True, **options},
    )
    trainer.fit(module, data(SAMPLES, BATCH))
    progress = trainer.fit_loop.epoch_loop.batch_progress.state_dict()
    return {
        "calls": callback.calls,
        "totals": bar.totals,
        "progress": progress,
        "steps": callback.steps,
        "epoch": trainer.callback_metrics["loss_epoch"].item(),
        "average": callback.average,
        "state": state_of(module),
        "saved": sorted(path.rsplit("/", 1)[-1] for path in keep.best_k_models),
    }


RUNS: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "hooks, logs, schedulers, averages": (Net, {}),
    "windows of 2": (Net, {"accumulate_grad_batches": 2}),
    "windows of 4, a short last one": (Net, {"accumulate_grad_batches": 4}),
    "LBFGS": (LBFGS, {}),
    "gradients that are kept": (Keeps, {}),
    "should_stop": (Net, {"stop": 3, "min_epochs": 0}),
    "clipping": (Net, {"gradient_clip_val": 0.05}),
    "a part of the batches": (Net, {"limit_train_batches": 0.5}),
    "bucket views, unused": (Net, {"of_strategy": {"gradient_as_bucket_view": True, "find_unused_parameters": True}}),
}
IN_PIECES = {
    "4 replicas": parallel(4),
    "parts of 2 samples": {"split_batches": True, "max_device_batch_size": 2},
    "parts of 3 samples on one device": single(max_device_batch_size=3),
}
AWARE = pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")


@AWARE
@pytest.mark.parametrize(("name", "pieces"), [*zip(RUNS, cycle(IN_PIECES), strict=False)])
def test_lightning_counts_loader_batches(world, tmp_path, name, pieces):
    kind, options = RUNS[name]
    options = dict(options)
    of_strategy = options.pop("of_strategy", {})
    # Without batch norm and dropout all of them are the run of one process that computes whole batches.
    (expected,) = world(1).run(seen, kind, single(), str(tmp_path / "whole"), **options)
    for size in (1, 2, 4):
        folder = str(tmp_path / str(size))
        for found in world(size).run(seen, kind, {**IN_PIECES[pieces], **of_strategy}, folder, **options):
            for exact in ("calls", "totals", "progress", "saved"):
                assert expected[exact] == found[exact]
            for mine, right in zip(found["steps"], expected["steps"], strict=True):
                assert pytest.approx(right, rel=1e-6) == mine
            assert pytest.approx(expected["epoch"], rel=1e-6) == found["epoch"]
            torch.testing.assert_close(found["average"], expected["average"], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found["state"], expected["state"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_scheduler_of_every_second_batch(world, tmp_path, size):
    strategy = {"split_batches": True, "max_device_batch_size": 1}
    for found in world(size).run(seen, Net, strategy, str(tmp_path), limit_train_batches=4, max_epochs=1):
        assert [(0, 0.1), (1, 0.05), (2, 0.05), (3, 0.025)] == [
            (index, pytest.approx(rate)) for index, _, rate, _ in found["steps"]
        ]
