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


def fit(folder: str, how: str, batch: int, resume: str | None = None) -> Any:
    """Body: train two epochs, or until the run is ended."""
    seed_everything(11, verbose=False)
    module = Shuffled()
    steps = {"every_n_train_steps": 1} if how == "SIGKILL" or (resume and "killed" in resume) else {}
    keep = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_exception=True, **steps)  # type: ignore[arg-type]
    trainer = make_trainer(
        GradAvgStrategy(split_batches=True),
        max_epochs=2,
        accumulate_grad_batches=WINDOW,
        enable_checkpointing=True,
        callbacks=[End(how, batch), keep],
    )
    with contextlib.suppress(*([RuntimeError, KeyboardInterrupt, SystemExit] if how else [])):
        trainer.fit(module, ckpt_path=resume)
    return module.stepped, module.net.weight.item()


def windows(ranks: list[Any]) -> list[list[float]]:
    """Return the samples of each optimizer step, of all ranks."""
    assert len({weight for _, weight in ranks}) == 1
    steps = zip(*(stepped for stepped, _ in ranks), strict=True)
    return [sorted(sample for part in parts for sample in part) for parts in steps]


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """Return the samples of each step, and the last weight, of a run on one process that nobody ends."""
    (ended,) = world(1).run(fit, str(tmp_path_factory.mktemp("undisturbed")), "", -1)
    return windows([ended]), ended[1]


# How the run ends, in which batch of two epochs of 5, and on how many ranks before and after.
RESUMES = [
    *[("error", batch, 1, 2) for batch in (1, 2, 3, 4, 7)],
    *[("interrupt", batch, 2, 1) for batch in (1, 2, 7)],
    ("error", 3, 2, 3),
    ("SIGKILL", 3, 2, 3),
]
FULL = [
    *[(how, batch, 4, 1) for how in ("error", "interrupt", "SIGTERM", "SIGKILL") for batch in range(10)],
    *[("error", batch, 2, 4) for batch in range(10)],
]


@pytest.mark.parametrize(
    ("how", "batch", "before", "after"), [*RESUMES, *(pytest.param(*row, marks=pytest.mark.full) for row in FULL)]
)
def test_a_resumed_run_goes_on_after_the_last_whole_window(world, tmp_path, undisturbed, how, batch, before, after):
    """Wherever and however a run ends, resumed on another number of ranks it trains on what it has not stepped on."""
    expected, weight = undisturbed
    folder, first = tmp_path / ("killed" if how == "SIGKILL" else "ended"), None
    with pytest.raises(RankError, match="exit code -9") if how == "SIGKILL" else contextlib.nullcontext():
        first = world(before).run(fit, str(folder), how, batch)
    # Lightning saves no checkpoint before the first step.
    done, kept = max(((int(path.stem.partition("=")[2]), str(path)) for path in folder.glob("*")), default=(0, None))
    rest = world(after).run(fit, str(tmp_path / "rest"), "", -1, kept)

    stepped = batch // 5 * STEPS + batch % 5 // WINDOW
    assert stepped <= done if how == "SIGTERM" else stepped == done  # which has the batches at hand trained on
    assert first is None or expected[:done] == windows(first)
    assert expected[done:] == windows(rest)
    assert weight == pytest.approx(rest[0][1], rel=1e-12)


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


class Unsized(IterableDataset[Tensor]):
    """Tells no length; shuffled."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.randperm(40).double()[:, None]


class Cycled(Two):
    """A shuffled loader of one batch, which Lightning cycles beside a stream."""

    def train_dataloader(self) -> Any:
        data: Any = torch.arange(BATCH, dtype=torch.float64)[:, None]
        return [DataLoader(data, BATCH, shuffle=True), DataLoader(Unsized(), BATCH)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.window += [sample for part in batch for sample in part.flatten().tolist()]
        return super().training_step(batch, batch_idx)


def cycled(path: str, epochs: int, resume: str | None = None) -> Any:
    """Body: train on a loader and a stream, and save at the end."""
    seed_everything(5, verbose=False)
    trainer = make_trainer(GradAvgStrategy(split_batches=True), max_epochs=epochs)
    trainer.fit(module := Cycled(), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return module.stepped


def test_a_cycled_loader_beside_a_stream_goes_on(world, tmp_path):
    """Resumed after its first epoch, every rank has the samples of the run that goes on, in their order."""
    path = str(tmp_path / "end.ckpt")
    whole = world(2).run(cycled, path, 3)
    world(2).run(cycled, path, 1)
    assert [stepped[10:] for stepped in whole] == world(2).run(cycled, path, 3, path)
