"""What was stepped on counts, whatever ends a run: the resumed run trains on the samples of an undisturbed one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from ranks import RankError, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_gradavg import GradAvgStrategy

SIZE, BATCH, WINDOW = 20, 4, 2
STEPS = 3  # of an epoch: windows of 2, 2 and 1 batches

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


class Shuffled(LightningModule):
    """Weights that are drawn, and a shuffled loader; notes the samples of each batch that an optimizer stepped on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1, dtype=torch.float64)
        self.window: list[float] = []
        self.stepped: list[list[float]] = []

    def train_dataloader(self) -> Any:
        data: Any = torch.arange(1, SIZE + 1, dtype=torch.float64)[:, None] / SIZE
        return DataLoader(data, BATCH, shuffle=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        chunk = strategy._batches.chunk
        self.window += [] if chunk.stand_in else batch.flatten().tolist()
        return (self.net(batch) ** 2).mean()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.stepped.append(self.window)
        self.window = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class End(Callback):
    """Ends the run in a batch, before its backward; and looks at data by way of the strategy, which changes nothing."""

    def __init__(self, how: str, batch: int, rank: int | None = None) -> None:
        self.how, self.batch, self.rank = how, batch, rank

    def on_train_batch_start(self, trainer: Trainer, module: Any, *args: Any) -> None:
        trainer.strategy.batch_to_device(torch.zeros(2, 1))

    def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        if progress.total.processed == self.batch:
            if self.how.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, self.how))
            elif self.how:
                raise {"error": RuntimeError, "interrupt": KeyboardInterrupt}[self.how]("the run ends here")


def fit(folder: str, how: str, batch: int, resume: str | None = None, every: bool = False, **options: Any) -> Any:
    """Body: train two epochs, or until the run is ended."""
    seed_everything(11, verbose=False)
    module = Shuffled()
    steps = {"every_n_train_steps": 1} if every else {}
    keep = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_exception=True, **steps)  # type: ignore[arg-type]
    trainer = make_trainer(
        GradAvgStrategy(split_batches=True, **options),
        max_epochs=2,
        accumulate_grad_batches=WINDOW,
        enable_checkpointing=True,
        callbacks=[End(how, batch), keep],
    )
    ended = ""
    try:
        trainer.fit(module, ckpt_path=resume)
    except (RuntimeError, KeyboardInterrupt, SystemExit) as error:
        ended = type(error).__name__
    return module.stepped, module.net.weight.item(), ended


def windows(ranks: list[Any]) -> list[list[float]]:
    """Return the samples of each optimizer step, of all ranks."""
    assert len({weight for _, weight, _ in ranks}) == 1
    steps = zip(*(stepped for stepped, _, _ in ranks), strict=True)
    return [sorted(sample for part in parts for sample in part) for parts in steps]


def newest(folder: Any) -> str | None:
    """Return the checkpoint of the latest step; Lightning saves none before the first."""
    found = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    return str(found[-1]) if found else None


RESUMES = [
    (how, batch, before, after)
    for how, before, after in [("error", 1, 2), ("interrupt", 2, 1), ("error", 2, 3)]
    for batch in ((1, 2, 3, 4, 7) if (before, after) != (2, 3) else (3,))
]
FULL = [(how, batch, 4, 1) for how in ("error", "interrupt") for batch in range(4)] + [
    ("error", batch, 2, 4) for batch in range(4)
]


@pytest.mark.parametrize(
    ("how", "batch", "before", "after"), [*RESUMES, *(pytest.param(*row, marks=pytest.mark.full) for row in FULL)]
)
def test_a_run_that_ends_in_a_batch_repeats_its_window(world, tmp_path, how, batch, before, after):
    """Ended by an error or Ctrl-C in any batch of a window, and resumed on another number of ranks, nothing is lost."""
    (undisturbed,) = world(1).run(fit, str(tmp_path / "whole"), "", -1)
    first = world(before).run(fit, str(tmp_path / "first"), how, batch)
    ends = {"error": {"RuntimeError"}, "interrupt": {"SystemExit", "KeyboardInterrupt"}}[how]
    assert ends >= {ended for _, _, ended in first}
    rest = world(after).run(fit, str(tmp_path / "rest"), "", -1, newest(tmp_path / "first"))

    done = windows(first)
    assert batch // 5 * STEPS + batch % 5 // WINDOW == len(done)
    assert windows([undisturbed]) == [*done, *windows(rest)]
    assert undisturbed[1] == pytest.approx(rest[0][1], rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_run_that_is_killed_goes_on_from_its_last_step(world, tmp_path, how, batch):
    """Of ranks that are killed the last checkpoint of a step is gone on with, on one more rank."""
    (undisturbed,) = world(1).run(fit, str(tmp_path / "whole"), "", -1)
    with contextlib.suppress(RankError):
        world(2).run(fit, str(tmp_path / "first"), how, batch, every=True)
    rest = world(3).run(fit, str(tmp_path / "rest"), "", -1, newest(tmp_path / "first"))

    steps = batch // WINDOW
    assert windows([undisturbed])[steps:] == windows(rest)


class Plain(Shuffled):
    """Draws in the dataset, too."""

    def train_dataloader(self) -> Any:
        class Data(Dataset[Any]):
            def __len__(self) -> int:
                return SIZE

            def __getitem__(self, index: int) -> Tensor:
                return torch.full((1,), index / SIZE, dtype=torch.float64)

        return DataLoader(Data(), BATCH, shuffle=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) ** 2).mean()


def order(options: dict[str, Any] | None) -> list[float]:
    """Body: a script that seeds, draws weights, and trains."""
    seed_everything(3, verbose=False)
    module = Plain()
    if options is None:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, enable_model_summary=False, **quiet)  # type: ignore[arg-type]
    else:
        trainer = make_trainer(GradAvgStrategy(**options), max_epochs=2)
    trainer.fit(module)
    return [module.net.weight.item(), module.net.bias.item()]


@pytest.mark.parametrize(
    "options",
    [
        {"split_batches": True},
        {"split_batches": True, "max_device_batch_size": 1},
        {"num_replicas": 2, "split_batches": True},
    ],
)
def test_weights_drawn_before_fit_leave_the_order_of_one_process(world, options):
    """The script of one device trains to the same bits on one process, and to 1e-12 on 2 and 3."""
    (expected,) = world(1).run(order, None)
    (alone,) = world(1).run(order, options)
    if options == {"split_batches": True}:
        assert expected == alone
    for ranks in (1, 2, 3):
        for weights in world(ranks).run(order, options):
            assert expected == pytest.approx(weights, rel=1e-12)


class Two(Shuffled):
    """Reads two loaders of different lengths together."""

    def train_dataloader(self) -> Any:
        data: Any = torch.arange(80, dtype=torch.float64)[:, None]
        return [DataLoader(data[:size], BATCH) for size in (16, 80)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return sum((self.net(part) ** 2).mean() for part in batch)  # type: ignore[return-value]


def two(limit: float, path: str | None = None, resume: str | None = None, **options: Any) -> int:
    """Body: train on two loaders, and save in mid-epoch."""
    trainer = make_trainer(GradAvgStrategy(split_batches=True, **options), max_epochs=1, limit_train_batches=limit)
    module = Two()
    if path is not None:
        module.on_train_batch_end = lambda *_: trainer.save_checkpoint(path)  # type: ignore[method-assign, assignment]
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 2, 3
    trainer.fit(module, ckpt_path=resume)
    return trainer.global_step


@pytest.mark.parametrize("limit", [None, 1])
def test_a_part_of_each_loader_is_its_own(world, limit):
    """Half of 4 and of 20 batches are 2 and 10, of which the longer counts, in whatever micro-batches."""
    assert [10, 10] == world(2).run(two, 0.5, max_device_batch_size=limit)


def test_several_loaders_go_on_from_the_end_of_an_epoch_only(world, tmp_path):
    """A checkpoint of mid-epoch is refused on all ranks, with what to do."""
    path = str(tmp_path / "mid.ckpt")
    world(2).run(two, 1.0, path)
    for raised in world(2).run_expecting_errors(two, 1.0, None, path):
        assert raised.type_name == "ValueError"
        assert "within an epoch, after 3 batches of one of 2 train loaders" in raised.message


class Endless(IterableDataset[Tensor]):
    """Tells no length."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(16, dtype=torch.float64)[:, None]


def cycled(path: str, epochs: int, resume: str | None = None) -> None:
    """Body: train on a loader and a stream, which Lightning cycles, and save at the end."""

    class Cycled(Two):
        def train_dataloader(self) -> Any:
            return [super().train_dataloader()[0], DataLoader(Endless(), BATCH)]

    trainer = make_trainer(GradAvgStrategy(split_batches=True), max_epochs=epochs)
    trainer.fit(Cycled(), ckpt_path=resume)
    trainer.save_checkpoint(path)


def test_cycled_loaders_of_which_one_is_a_stream_do_not_go_on(world, tmp_path):
    """How often Lightning began the shorter anew is in no checkpoint: an error on all ranks says what to do."""
    path = str(tmp_path / "end.ckpt")
    world(2).run(cycled, path, 1)
    for raised in world(2).run_expecting_errors(cycled, path, 2, path):
        assert raised.type_name == "ValueError"
        assert "CombinedLoader(loaders, mode='min_size') or 'max_size'" in raised.message
