"""One loader batch is one step of Lightning on any number of ranks, however many pieces each of them computes."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from data_parallel import Model, Options, assert_same_run, fit, parallel, single
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from ranks import make_trainer
from torch import Tensor, nn

from lightning_gradavg import GradAvgStrategy

SIZES = [8, 8, 8, 8, 5]  # the last of which leaves one of 4 ranks without samples


class Net(Model):
    """Returns more than its loss, and has a scheduler of every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "rows": batch[1], "size": len(batch[1])}

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}


class Spectral(Net):
    """Every forward in training moves the buffers that the weights follow from."""

    def build(self) -> nn.Module:
        net: Any = super().build()
        nn.utils.parametrizations.spectral_norm(net[0])
        return net


class LBFGS(Net):
    """Steps by closures."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class Keeps(Net):
    """Does not zero all gradients."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class Seen(ProgressBar):
    """Notes what a callback sees at the end of each batch, averages the weights, and stops the run when told."""

    def __init__(self, stop: int | None) -> None:
        super().__init__()
        self.stop, self.average = stop, dict[str, Tensor]()
        self.steps: list[tuple[Any, ...]] = []
        self.outputs: list[tuple[float, float, list[Any]]] = []

    def disable(self) -> None:
        """Stay on all ranks."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate, total = trainer.optimizers[0].param_groups[0]["lr"], self.total_train_batches
        self.steps.append((batch_idx, trainer.global_step, rate, total))
        for name, value in module.state_dict().items():
            self.average[name] = self.average.get(name, value).lerp(value, 0.3)
        size = 0 if trainer.strategy._batches.chunk.stand_in else int(torch.as_tensor(outputs["size"]).sum())
        self.outputs.append((size * float(outputs["loss"]), size, outputs["rows"][:size].tolist()))
        trainer.should_stop |= len(self.steps) == self.stop


def seen(kind: type[Net], strategy: Options, folder: str, stop: int | None = None, **options: Any) -> Any:
    """Body: train for two epochs; return the run, what is exact on any number of ranks, averages, and outputs."""
    callback, hooks = Seen(stop), Mock(spec=Callback, state_key="hooks", **{"state_dict.return_value": {}})
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    options = {"max_epochs": 2, "enable_checkpointing": True, "enable_progress_bar": True, **options}
    run = fit(kind, strategy, load={"sizes": SIZES, "times": 1}, callbacks=[callback, hooks, keep], **options)
    saved = sorted(path.name for path in Path(folder).iterdir())
    called = [name for name, *_ in hooks.method_calls]
    progress = callback.trainer.fit_loop.epoch_loop.batch_progress.state_dict()
    return run, (callback.steps, saved, called, progress), callback.average, callback.outputs


RUNS: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "hooks, logs, schedulers, averages": (Net, {}),
    "spectral norm, a part of the batches": (Spectral, {"limit_train_batches": 0.5}),
    "windows of 2, gradients that are kept": (Keeps, {"accumulate_grad_batches": 2}),
    "windows of 4, a short last one, clipping": (Net, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05}),
    "LBFGS": (LBFGS, {}),
    "should_stop": (Net, {"stop": 3, "min_epochs": 0}),
    "bucket views, unused": (Net, {"of_strategy": {"gradient_as_bucket_view": True, "find_unused_parameters": True}}),
}
IN_PIECES = {
    "4 replicas": parallel(),
    "parts of 2 samples": {"split_batches": True, "max_device_batch_size": 2},
    "parts of 3 samples on one device": single(max_device_batch_size=3),
}


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize(("name", "pieces"), [*zip(RUNS, cycle(IN_PIECES), strict=False)])
def test_lightning_counts_loader_batches(world, tmp_path, name, pieces):
    """The order of hooks, progress, rates and checkpoints are the same; outputs side by side are those of the whole."""
    kind, options = RUNS[name]
    options = dict(options)
    of_strategy = options.pop("of_strategy", {})
    # Without batch norm and dropout all of them are the run of one process that computes whole batches.
    ((expected, exact, average, whole),) = world(1).run(seen, kind, single(), str(tmp_path / "whole"), **options)
    for size in (1, 4):
        strategy = {**IN_PIECES[pieces], **of_strategy}
        runs, *found = zip(*world(size).run(seen, kind, strategy, str(tmp_path / str(size)), **options), strict=True)
        assert_same_run(runs, expected, 1e-12)
        for mine, averaged, _ in zip(*found, strict=True):
            assert exact == mine
            torch.testing.assert_close(averaged, average, rtol=1e-12, atol=1e-12)
        for parts, (loss, samples, rows) in zip(zip(*found[-1], strict=True), whole, strict=True):
            losses, counts, of_ranks = zip(*parts, strict=True)
            assert (samples, rows) == (sum(counts), [row for part in of_ranks for row in part])
            assert pytest.approx(loss, rel=1e-12) == sum(losses)


def patched() -> tuple[list[int], bool]:
    """Body: the calls of methods that a user has put on the instance, and whether they are still there."""
    module = Model()
    mine = {name: Mock(wraps=getattr(module, name)) for name in ("training_step", "log")}
    vars(module).update(mine)
    make_trainer(GradAvgStrategy(**parallel()), max_epochs=1).fit(module, module.loader([8], times=3))
    return [each.call_count for each in mine.values()], mine.items() <= vars(module).items()


def test_patched_methods_are_called_and_put_back(world):
    """In 3 steps of 2 replicas each, which log once."""
    assert [([6, 3], True)] * 2 == world(2).run(patched)
