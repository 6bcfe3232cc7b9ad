"""Split loaders inside Lightning's loops: fetchers, `CombinedLoader`, and a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from lockstep import Loop, in_one_world, numbered, splitter_of, take_all
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_gradavg.batches.chunks import Chunk, Split
from lightning_gradavg.batches.progress import Progress
from lightning_gradavg.lightning_internals import TrainingLoop


class Pair(NamedTuple):
    x: Any
    y: Any


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def _rows(fetcher: _DataFetcher, progress: Progress, loop: Loop, steps: int) -> list[tuple[Any, list[Chunk | None]]]:
    """Read as the training loop does, and note what stands behind every batch."""
    rows: list[tuple[Any, list[Chunk | None]]] = []
    while not fetcher.done and len(rows) < steps:
        batch, _, _ = next(fetcher)
        loop.count.ready = len(rows) + 1
        for _ in range(2):  # asked twice, it is the same
            chunks = [each and each.chunk for each in progress.in_training()]
        rows.append((batch, chunks))
        _look(fetcher.combined_loader.flattened)
    return rows


def _look(loaders: Any) -> None:
    """Look at the first batch of each loader, and at all of them, as a user may."""
    for loader in loaders:
        next(iter(loader))
        list(loader)


class Unsized:
    """An iterable of batches that hides its length: Lightning then fetches one batch ahead."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _matches(row: tuple[Any, list[Chunk | None]]) -> bool:
    """Whether every batch of the row holds the samples that are said to stand behind it."""
    batches, chunks = row
    return all(
        batch is None
        if chunk is None
        else [value % 4 for value in batch.tolist()] == list(range(chunk.start, chunk.stop))
        for batch, chunk in zip(batches, chunks, strict=True)
    )


class TestInLightning:
    @pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
    @pytest.mark.parametrize("sized", [True, False])
    @pytest.mark.parametrize("sizes", [(7, 22), (22, 7), (9, 9), (13,)])
    @pytest.mark.parametrize("rank", [0, 2])
    def test_what_stands_behind_a_batch_is_told_in_step(
        self, mode: Any, sized: bool, sizes: tuple[int, ...], rank: int
    ) -> None:
        """Fetched ahead or not, cycled, exhausted, left early, looked at between: every batch meets its own chunk."""
        splitter, loop = splitter_of(Split(rank, 3)), Loop()
        progress = Progress(loop, lambda: 1)
        loaders = []
        for start, size in zip((0, 100), sizes, strict=False):
            batches = torch.arange(start, start + size).split(4)
            loaders.append(numbered(list(batches) if sized else Unsized(batches), splitter, progress))
        fetcher = _PrefetchDataFetcher()
        fetcher.setup(CombinedLoader(loaders, mode))
        loop.read(fetcher.combined_loader)
        lengths = [-(-size // 4) for size in sizes]
        expected = min(lengths) if mode == "min_size" else max(lengths)

        iter(fetcher)
        for epoch, steps in enumerate((99, 2, 99, 1, 99)):
            _look(loaders)
            if epoch > 0:
                iter(fetcher)
            rows = _rows(fetcher, progress, loop, steps)

            assert len(rows) == min(steps, expected)
            assert all(map(_matches, rows))
            assert all(any(chunk is not None for chunk in chunks) for _, chunks in rows)

    def test_a_loader_that_keeps_its_place_is_asked_for_it(self) -> None:
        """Lightning saves and restores the state of a user's loader that has some, untouched."""

        class Resumable(list[Any]):
            at = 0

            def state_dict(self) -> dict[str, int]:
                return {"at": self.at}

            def load_state_dict(self, state: dict[str, int]) -> None:
                self.at = state["at"]

        resumable = Resumable()
        loader = numbered(resumable, splitter_of(Split()))
        assert isinstance(loader, _Stateful)

        combined = CombinedLoader([loader])
        combined._load_state_dicts([{"at": 3}])

        assert 3 == resumable.at
        assert [{"at": 3}] == combined._state_dicts()

    def test_epochs_reach_the_samplers(self) -> None:
        """Lightning's `set_epoch` arrives at the user's sampler."""
        data = torch.arange(4)
        sampler: DistributedSampler[int] = DistributedSampler(data, num_replicas=1, rank=0)  # type: ignore[arg-type]
        loader = in_one_world(DataLoader(data, sampler=sampler))  # type: ignore[arg-type]  # a tensor will do

        _set_sampler_epoch(loader, 5)

        assert 5 == sampler.epoch

    def test_wrapping_again_replaces_the_split(self) -> None:
        """A `CombinedLoader` of a user that was split in an earlier run is split anew."""
        first = in_one_world(DataLoader(range(4)), rank=1, world_size=2)  # type: ignore[arg-type]  # a range will do
        second = in_one_world(first)

        assert second.loader is first.loader
        assert 4 == len(take_all(second))

    @pytest.mark.parametrize("options", [{}, {"limit_train_batches": 3}, {"reload_dataloaders_every_n_epochs": 1}])
    @pytest.mark.parametrize("container", ["one", "list", "dict"])
    def test_a_trainer_sees_the_users_types(self, container: str, options: dict[str, Any]) -> None:
        """In a Trainer, hooks get the user's batches, and the strategy knows what stands behind each of them."""
        module = _run(rank=2, container=container, options=options)

        assert len(module.batches) == len(module.strategy.chunks) == 2 * options.get("limit_train_batches", 4)
        for batch, chunk in zip(module.batches, module.strategy.chunks, strict=True):
            assert type(batch) is {"one": Pair, "list": list, "dict": dict}[container]
            parts: Any = batch
            pair = parts if container == "one" else parts["a" if container == "dict" else 0]
            assert len(pair.x) == chunk.stop - chunk.start
        stand_ins = [chunk.stand_in for chunk in module.strategy.chunks]
        assert [index % 4 == 3 and "limit_train_batches" not in options for index in range(len(stand_ins))] == stand_ins


class _SplitStrategy(SingleDeviceStrategy):
    """What a strategy does with a splitter, for one simulated rank."""

    def __init__(self, rank: int) -> None:
        super().__init__("cpu")
        self.splitter = splitter_of(Split(rank, 3))
        self.chunks: list[Any] = []

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self.progress = Progress(TrainingLoop(trainer.fit_loop), lambda: 1)

    def process_dataloader(self, dataloader: object) -> object:
        return numbered(dataloader, self.splitter, self.progress)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.chunks.append(next(each.chunk for each in self.progress.in_training() if each is not None))


class _Module(LightningModule):
    def __init__(self, make: Callable[[], Any], strategy: _SplitStrategy) -> None:
        super().__init__()
        self.make, self.strategy = make, strategy
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.batches: list[Any] = []

    def train_dataloader(self) -> Any:
        return self.make()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.batches.append(batch)
        return batch

    def training_step(self, batch: Any) -> Tensor:
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _run(rank: int, container: str, options: dict[str, Any], *, shuffle: bool = False) -> _Module:
    def make() -> Any:
        def loader() -> DataLoader[Any]:
            return DataLoader([Pair(item, str(item)) for item in range(20)], batch_size=6, shuffle=shuffle)  # type: ignore[arg-type]

        return {"one": loader, "list": lambda: [loader(), loader()], "dict": lambda: {"a": loader()}}[container]()

    strategy = _SplitStrategy(rank)
    module = _Module(make, strategy)
    trainer = Trainer(
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module)
    return module
