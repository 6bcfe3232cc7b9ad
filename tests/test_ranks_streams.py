"""One stream for each thing that draws: what a piece draws, what moves the order, and what is compared.

All runs train on noise: each sample, `collate_fn`, transfer hook, forward and backward draws from torch, Python and
NumPy, so a number that is drawn elsewhere shows in the bits of the weight.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from orders import Unsized, seed
from ranks import grid, make_trainer
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, get_worker_info

from lightning_gradavg import GradAvgStrategy, split_batches
from lightning_gradavg.batches import part
from lightning_gradavg.batches.chunks import Piece
from lightning_gradavg.batches.streams import PassPlace

# Python 3.12 and later, of the workers that are forked from a process with threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled"),
]

WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
REPRODUCIBLE = {"reproducible": True, "num_replicas": 4}
SPLITS: list[dict[str, Any]] = [
    {"equivalent_to": "single_device"},
    {"split_batches": True},
    {"equivalent_to": "data_parallel"},
]


def noise() -> float:
    """Draw from every global generator."""
    return float(torch.rand(())) + random.random() + np.random.rand()  # noqa: NPY002  # global on purpose


class Noisy(Dataset[Any]):
    """Augments each sample at random."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index + noise())


def collate_noisy(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples) + noise()


class Adding(torch.autograd.Function):
    """Adds noise to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + noise()


class Net(LightningModule):
    """Draws wherever a module can."""

    def __init__(self, workers: dict[str, Any]) -> None:
        super().__init__()
        seed_everything(5, verbose=False)
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.workers = workers
        self.logged: list[float] = []

    def train_dataloader(self) -> Any:
        return DataLoader(Noisy(), 8, shuffle=True, collate_fn=collate_noisy, **self.workers)

    def val_dataloader(self) -> Any:
        return DataLoader(Noisy(), 3, shuffle=True, collate_fn=collate_noisy, **self.workers)

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch + noise()

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch + noise()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return Adding.apply(self.net(batch[:, None] / 20)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("seen", self.net(batch[:, None] / 20).mean() + noise(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        noise()

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:  # which counts the batches of a rank
            self.logged.append(float(self.trainer.callback_metrics["seen"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Saving(Callback):
    """Saves within an epoch, and at the end of one."""

    def __init__(self, folder: str, batches: Sequence[int]) -> None:
        self.folder = folder
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        total = trainer.fit_loop.epoch_loop.total_batch_idx
        if total in self.batches:
            trainer.save_checkpoint(f"{self.folder}/{total}.ckpt")


class Bits(NamedTuple):
    """What must be equal on any number of ranks."""

    weights: list[list[float]]
    fingerprint: str
    # What validation logged, in float64 of the exact mean.
    logged: list[float]


def train(
    strategy: dict[str, Any], workers: dict[str, Any], folder: str = "", resume: str | None = None, **options: Any
) -> tuple[int, Bits]:
    """Body: train the module that draws everywhere; return the rank, and what must be equal."""
    module = Net(workers)
    trainer = make_trainer(
        GradAvgStrategy(**strategy), max_epochs=2, callbacks=[Saving(folder, (1, 2))] if folder else [], **options
    )
    trainer.fit(module, ckpt_path=resume, weights_only=False)
    weights = [parameter.flatten().tolist() for parameter in module.parameters()]
    strategy_of_run: Any = trainer.strategy
    return dist.get_rank(), Bits(weights, strategy_of_run.fingerprint(), module.logged)


OPTIONS: dict[str, dict[str, Any]] = {
    "each batch": {},
    "windows of 2": {"accumulate_grad_batches": 2},
    "validation within the epoch": {"val_check_interval": 1, "num_sanity_val_steps": 2},
}


KINDS_OF_WORKERS: list[dict[str, Any]] = [{}, WORKERS, {**WORKERS, "persistent_workers": True}]


@pytest.mark.parametrize(("workers", "options"), grid(KINDS_OF_WORKERS, [*OPTIONS], strength=1))
def test_the_same_bits_whatever_draws(world, workers, options):
    """Loading, hooks, steps, backwards and validation draw, and 1, 2 and 4 ranks leave the same bits."""
    ((_, alone),) = world(1).run(train, REPRODUCIBLE, workers, **OPTIONS[options])
    for world_size in (2, 4):
        ranks = world(world_size).run(train, REPRODUCIBLE, workers, **OPTIONS[options])
        assert list(range(world_size)) == [rank for rank, _ in ranks]
        for _, bits in ranks:
            assert alone.weights == bits.weights
            assert alone.fingerprint == bits.fingerprint
            assert pytest.approx(alone.logged, rel=1e-6) == bits.logged  # of a mean over ranks, in float32


@pytest.mark.parametrize("workers", [{}, WORKERS])
@pytest.mark.parametrize("saved", [1, 2])
def test_a_resumed_run_draws_what_the_run_before_would_have(world, tmp_path, workers, saved):
    """Saved within an epoch and at its end on 2 ranks, and resumed on 1 and 4, nothing is lost, bit for bit."""
    ranks = world(2).run(train, REPRODUCIBLE, workers, str(tmp_path), limit_val_batches=0)
    for world_size in (1, 4):
        path = str(tmp_path / f"{saved}.ckpt")
        for _, bits in world(world_size).run(train, REPRODUCIBLE, workers, resume=path, limit_val_batches=0):
            assert ranks[0][1] == bits


def test_keys_differ_in_every_place():
    """Two epochs, two loaders, two batches, two pieces, and a stand-in of each rank draw different numbers."""
    pieces = [Piece(0, 0, 2), Piece(1, 2, 4)]
    keys: list[bytes] = []
    for run, loader, number, batch in np.ndindex(2, 2, 2, 3):
        place = PassPlace(run, loader, number)
        keys += [place.key(batch, piece, rank=0) for piece in pieces]
        keys += [place.key(batch, Piece(None, 0, 2), rank=rank) for rank in range(2)]
    assert len(keys) == len(set(keys))
    # The rank that computes a replica changes nothing.
    assert PassPlace(0, 0, 0).key(0, pieces[1], rank=0) == PassPlace(0, 0, 0).key(0, pieces[1], rank=3)


class Masks(LightningModule):
    """Notes what each rank's forward draws, after `seed_everything`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.drawn: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        return (self.w * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def draw_masks(options: dict[str, Any], epochs: int = 2) -> list[float]:
    """Body: return what the rank's steps draw."""
    seed_everything(3, verbose=False)
    module = Masks()
    make_trainer(GradAvgStrategy(**options), max_epochs=epochs).fit(module, DataLoader(torch.ones(8), 4))
    return module.drawn


@pytest.mark.parametrize(
    "options",
    [{"equivalent_to": "single_device"}, {"split_batches": True}, {"equivalent_to": "data_parallel"}],
    ids=str,
)
def test_no_two_ranks_draw_one_mask(world, options):
    """After `seed_everything` all processes have one state; their steps draw different numbers all the same."""
    drawn = list(chain(*world(3).run(draw_masks, options)))
    assert 3 * 4 == len(drawn) == len(set(drawn))


def test_one_rank_draws_what_stock_lightning_draws(world):
    """A batch that is not cut is computed from the process's own state.

    From the second epoch on, a stock process has one state for masks and order, and each moves the other.
    """
    (alone,) = world(1).run(draw_masks, {"equivalent_to": "single_device"}, epochs=1)
    (stock,) = world(1).run(draw_masks, {}, epochs=1)
    assert 2 == len(stock)
    assert stock == alone


class Recorded(Dataset[Any]):
    """Notes in which process it is read, and seeds a generator of its own as torch's recipe does."""

    def __init__(self) -> None:
        self.owner: int | None = None
        self.rng: Any = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if self.owner is None:
            self.owner = os.getpid()  # as a file is opened lazily, which processes must not share
        assert self.owner == os.getpid(), "it was read before the workers were forked"
        return torch.tensor(self.rng.random())


def seed_dataset(worker_id: int) -> None:
    """Seed the dataset of a worker, as torch's documentation recommends."""
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    assert isinstance(dataset, Recorded), "a worker's dataset is the user's own object"
    dataset.rng = np.random.default_rng(info.seed)


def read_in_workers(split: bool) -> list[float]:
    """Body: return what the rank's workers drew in a pass."""
    seed(1)
    loader: Any = DataLoader(Recorded(), 4, worker_init_fn=seed_dataset, **WORKERS)
    return list(chain(*[batch.tolist() for batch in (split_batches(loader) if split else loader)]))


def test_workers_have_the_users_dataset_and_seeds_of_their_own(world):
    """No two ranks seed their workers alike, and nobody reads in the main process, also not to compare a sample."""
    drawn = list(chain(*world(2).run(read_in_workers, split=True)))
    assert 8 == len(drawn) == len(set(drawn))
    assert 8 == len(world(1).run(read_in_workers, split=False)[0])


class Unstable(Dataset[Any]):
    """Draws outside of the streams, from the entropy of the operating system."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(np.random.default_rng().random())


class Coin(Unstable):
    """Throws a coin like that, which falls alike twice, and otherwise on the other rank."""

    throws = 0

    def __getitem__(self, index: int) -> Tensor:
        self.throws += 1
        return torch.tensor(float(dist.get_rank() if self.throws <= 2 else self.throws % 2))


def fit_unstable(options: dict[str, Any], dataset: type[Unstable] = Unstable) -> int:
    trainer = make_trainer(GradAvgStrategy(**options), max_epochs=1)
    trainer.fit(Masks(), DataLoader(dataset(), 4))
    return trainer.global_step


def test_a_sample_that_draws_outside_of_the_streams(world):
    """It cannot be compared between ranks; where bits are promised, it is an error on all of them."""
    for dataset in (Unstable, Coin):
        assert [2, 2] == world(2).run(fit_unstable, {"equivalent_to": "single_device"}, dataset)
    for error in world(2).run_expecting_errors(fit_unstable, REPRODUCIBLE):
        assert "RuntimeError" == error.type_name
        assert "loads again from the same random state differs" in error.message


class Epochs(LightningModule):
    """Notes what its loader draws in each epoch, of which Lightning asks for anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.drawn: list[float] = []

    def train_dataloader(self) -> Any:
        return DataLoader(Noisy(), 20)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.drawn.append(float(batch.sum()))
        return (self.w * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def draw_of_epochs() -> list[float]:
    """Body: train three epochs, each with a new loader."""
    seed_everything(3, verbose=False)
    module = Epochs()
    strategy = GradAvgStrategy(reproducible=True, num_replicas=2)
    make_trainer(strategy, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(module)
    return module.drawn


def test_a_loader_that_is_replaced_goes_on_with_its_passes(world):
    """A new loader for each epoch draws other numbers in each, the same on 1 and 2 ranks."""
    (alone,) = world(1).run(draw_of_epochs)
    of_ranks = world(2).run(draw_of_epochs)
    assert 6 == len(alone) == len(set(alone))
    assert sorted(alone) == sorted(chain(*of_ranks))


def read_in_turn() -> list[list[float]]:
    """Body: read two loaders in turn, three passes and two."""
    seed(7)
    first, second = (split_batches(DataLoader(Noisy(), 20, shuffle=True)) for _ in range(2))
    return [next(iter(loader)).tolist() for loader in (first, second, first, second, first)]


def test_two_loaders_of_an_own_loop_read_as_on_one_process(world):
    """Their orders are those of one process, and no two passes draw the same."""
    seed(7)
    plain = [DataLoader(torch.arange(20), 20, shuffle=True) for _ in range(2)]
    orders = [next(iter(plain[index])).tolist() for index in (0, 1, 0, 1, 0)]
    of_ranks = world(2).run(read_in_turn)
    read = [list(chain(*passes)) for passes in zip(*of_ranks, strict=True)]
    # A sample is its index and up to 3 of noise, so numbers are told apart by their fractions.
    for order, samples in zip(orders, read, strict=True):
        assert all(index <= sample < index + 3 for index, sample in zip(order, samples, strict=True))
    assert 100 == len(set(chain(*read)))


def fit_two_loaders(options: dict[str, Any]) -> None:
    """Body: train on two loaders, of which each rank has its own half of the data."""
    halves: list[DataLoader[Any]] = [DataLoader(torch.arange(16.0)[dist.get_rank() :: 2], 4) for _ in range(2)]

    class Both(Masks):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(torch.cat(list(batch)), batch_idx)

    make_trainer(GradAvgStrategy(**options), max_epochs=1).fit(Both(), halves)


def test_ranks_that_read_halves_of_the_data_are_an_error_on_all(world):
    """8 of 16 samples would train, by both ranks: the sample of index 0 tells."""
    for error in world(2).run_expecting_errors(fit_two_loaders, {"split_batches": True}):
        assert "RuntimeError" == error.type_name
        assert "the datasets of the ranks differ" in error.message


def fit_ready(options: dict[str, Any]) -> None:
    """Body: train on batches that come ready made, of which each rank has its own half of the data."""
    batches: Any = list(torch.arange(16.0)[dist.get_rank() :: 2].split(4))
    make_trainer(GradAvgStrategy(**options), max_epochs=1).fit(Masks(), DataLoader(batches, batch_size=None))


def fit_late_difference(options: dict[str, Any]) -> None:
    """Body: train by a sampler that differs between the ranks in the last of three batches alone."""
    batches: Any = [[0, 1], [2, 3], [4, 5 + dist.get_rank()]]
    make_trainer(GradAvgStrategy(**options), max_epochs=1).fit(
        Masks(), DataLoader(torch.arange(8.0), batch_sampler=batches)
    )


@pytest.mark.parametrize(
    ("fits", "message"),
    [(fit_ready, "the datasets of the ranks differ"), (fit_late_difference, "found at batch 3 of this epoch")],
)
def test_what_ranks_read_is_compared_to_the_end(world, fits, message):
    for error in world(2).run_expecting_errors(fits, {"split_batches": True}):
        assert "RuntimeError" == error.type_name
        assert message in error.message


def appended(samples: list[list[float]]) -> Tensor:
    """Change each sample in place, which the dataset keeps."""
    for sample in samples:
        sample.append(9.0)
    return torch.tensor(samples)


def fit_appending(options: dict[str, Any]) -> list[int]:
    """Body: return the numbers of columns of the batches, of samples that `collate_fn` changes."""
    widths: list[int] = []

    class Wide(Masks):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            widths.append(batch.shape[1])
            return super().training_step(batch, batch_idx)

    samples: Any = [[float(index)] for index in range(4)]
    make_trainer(GradAvgStrategy(**options), max_epochs=1).fit(Wide(), DataLoader(samples, 4, collate_fn=appended))
    return widths


@pytest.mark.parametrize("options", SPLITS, ids=str)
def test_collate_fn_changes_a_sample_once(world, options):
    """Samples are compared between ranks, and collated as a whole, without a trace in those that train."""
    assert [[2], [2]] == world(2).run(fit_appending, options)


def padded(samples: list[list[float]]) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(sample) for sample in samples], batch_first=True)


def centred(samples: list[list[float]]) -> dict[str, Any]:
    targets = torch.tensor([sample[0] for sample in samples])
    return {"x": targets, "target": targets - targets.mean(), "names": [str(sample) for sample in samples]}


def plain(samples: list[list[float]]) -> dict[str, Any]:
    return {
        "x": torch.tensor([sample[0] for sample in samples]),
        "classes": ["a", "b"],
        "pairs": [(1, 2)] * len(samples),
    }


def said_of_collating(collate: Callable[[Any], Any], options: dict[str, Any]) -> list[str]:
    """Body: return the lines about `collate_fn` that the rank says in a run."""
    lines: list[str] = []

    class OfAny(Masks):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(torch.ones(2), batch_idx)

    samples: Any = [[float(index)] * (1 + index) for index in range(4)]
    with mock.patch.object(part, "rank_zero_info", rank_zero_only(lines.append)):
        make_trainer(GradAvgStrategy(**options), max_epochs=1).fit(OfAny(), DataLoader(samples, 4, collate_fn=collate))
    return [line for line in lines if "collate_fn" in line]


@pytest.mark.parametrize(
    ("collate", "options", "found"),
    [
        (padded, {"equivalent_to": "single_device"}, "found in batch. Every rank"),
        (centred, {"equivalent_to": "data_parallel"}, "found in batch['target']. Every rank"),
        (plain, {"equivalent_to": "single_device"}, None),
        # What is to be reproduced is a run of as many ranks, which collate their own samples.
        (padded, {"split_batches": True}, None),
    ],
)
def test_what_depends_on_the_whole_batch_is_said_once(world, collate, options, found):
    """Rank 0 collates the first batch as a whole, too, and compares; what it cannot compare it passes over."""
    of_rank_0, of_rank_1 = world(2).run(said_of_collating, collate, options)
    assert [] == of_rank_1
    if found is None:
        assert [] == of_rank_0
    else:
        (line,) = of_rank_0
        assert found in line


class Watching:
    """A batch sampler that looks at training: each batch begins at the number of steps so far."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(12):
            steps = len(self.module.drawn_batches)
            yield [(steps + place) % 20 for place in range(4)]


class Watched(Masks):
    """Notes the batches of its own rank."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn_batches: list[list[float]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.drawn_batches.append(batch.tolist() if isinstance(batch, Tensor) else [piece.tolist() for piece in batch])


def read_watching(workers: dict[str, Any]) -> list[list[Any]]:
    """Body: return the rank's samples of each batch."""
    module = Watched()
    loader: Any = DataLoader(torch.arange(20.0), batch_sampler=Watching(module), **workers)
    make_trainer(GradAvgStrategy(**REPRODUCIBLE), max_epochs=1).fit(module, loader)
    return module.drawn_batches


@pytest.mark.parametrize("workers", [{}, WORKERS])
def test_a_sampler_is_asked_equally_far_ahead_on_any_number_of_ranks(world, workers):
    """One rank has four pieces of each batch and two have two: the sampler sees training at the same step."""
    (alone,) = world(1).run(read_watching, workers)
    of_ranks = world(2).run(read_watching, workers)
    assert alone == [list(chain(*batches)) for batches in zip(*of_ranks, strict=True)]


class Ordered(Masks):
    """Notes the order of transfers and forwards, and what hooks of a batch get."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.events.append(f"moves {len(batch)}")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.events.append(f"starts {[len(piece) for piece in batch]}")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.events.append(f"ends {[len(piece) for piece in batch]}")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.events.append(f"computes {len(batch)}")
        return super().training_step(batch, batch_idx)


def order_of_pieces() -> list[str]:
    """Body: train on a batch in two pieces."""
    module = Ordered()
    strategy = GradAvgStrategy(split_batches=True, max_device_batch_size=3)
    make_trainer(strategy, max_epochs=1).fit(module, DataLoader(torch.ones(5), 5))
    return module.events


def test_the_device_holds_one_piece_at_a_time(world):
    """A piece is moved when it is computed. Hooks of a batch get the list of pieces."""
    (events,) = world(1).run(order_of_pieces)
    assert ["starts [2, 3]", "moves 2", "computes 2", "moves 3", "computes 3", "ends [2, 3]"] == events


class Buffered(IterableDataset[Any]):
    """A stream that shuffles by a buffer, as web datasets do: half of it is drawn from at random."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        numbers = range(24) if worker is None else range(worker.id, 24, worker.num_workers)
        buffer: list[int] = []
        for number in numbers:
            buffer.append(number)
            if len(buffer) > 5:
                yield buffer.pop(random.randrange(len(buffer)))
        random.shuffle(buffer)
        yield from buffer


def noisy_numbers(samples: list[int]) -> list[int]:
    noise()
    return samples


def read_buffered(workers: dict[str, Any]) -> list[list[int]]:
    """Body: return the rank's samples of each batch of two passes."""
    seed(dist.get_rank())
    loader = split_batches(DataLoader(Buffered(), 4, collate_fn=noisy_numbers, **workers))
    return [list(batch) for _ in range(2) for batch in loader]


@pytest.mark.parametrize("workers", [{}, WORKERS])
def test_a_shuffle_buffer_yields_each_sample_once_on_any_number_of_ranks(world, workers):
    """`collate_fn` draws from the stream of its piece, and the reader goes on from where it was."""
    passes = []
    for world_size in (2, 3):
        ranks = world(world_size).run(read_buffered, workers)
        passes.append([list(chain(*batches)) for batches in zip(*ranks, strict=True)])
    first, second = passes
    assert first == second
    numbers = list(chain(*first))
    assert [*range(24)] == sorted(numbers[:24]) == sorted(numbers[24:])
    assert numbers[:24] != numbers[24:]


class Keeping(DataLoader[Any]):
    """Keeps one iterator over all epochs, and its workers with it: it asks its sampler when it likes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        vars(self)["kept"] = super().__iter__()

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(vars(self)["kept"])
        vars(self)["kept"] = super().__iter__()


class Swapped(Dataset[Any]):
    """Ready-made batches by tuples, which an array takes for an index; and by tensors, which one takes as they are."""

    def __init__(self) -> None:
        self.rows = torch.arange(64).reshape(8, 8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: Any) -> Tensor:
        return torch.atleast_1d(self.rows[key])

    def __getitems__(self, indices: Tensor) -> list[Tensor]:
        assert isinstance(indices, Tensor)
        return list(self.rows[indices][:, 0])


def tuples(size: int) -> DataLoader[Any]:
    """Return a loader without batches whose sampler yields tuples, each of which is one index."""
    sampler: Any = [(3, slice(0, 4)), (5, slice(2, 6))]
    return DataLoader(Swapped(), sampler=sampler, batch_size=None)


def tensors(size: int) -> DataLoader[Any]:
    """Return a loader whose batch sampler yields tensors, by which the dataset loads samples together."""
    sampler: Any = [torch.tensor([0, 1, 2, 3]), torch.tensor([4, 5, 6])]
    return DataLoader(Swapped(), batch_sampler=sampler)


def lists_of_indices(size: int) -> DataLoader[Any]:
    """Return a loader without batches whose sampler yields lists of indices."""
    sampler: Any = BatchSampler(SequentialSampler(range(size)), 4, drop_last=False)
    return DataLoader(np.arange(size), sampler=sampler, batch_size=None)


class Numbered(Dataset[Any]):
    """Samples by pairs of an index and an epoch, as samplers yield them that tell workers the epoch."""

    def __getitem__(self, key: tuple[int, int]) -> int:
        index, epoch = key
        assert isinstance(key, tuple)
        return index + 100 * epoch


def pairs(size: int) -> DataLoader[Any]:
    batches: Any = [[(index, 0) for index in range(size)][start : start + 4] for start in range(0, size, 4)]
    return DataLoader(Numbered(), batch_sampler=batches)


TEN = ([[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]])
"""What ranks 0 and 1 get of 10 samples in batches of 4."""

LOADERS: dict[str, tuple[Callable[[int], Any], tuple[list[list[int]], list[list[int]]]]] = {
    "kept iterator": (lambda size: Keeping(torch.arange(size), 4), TEN),
    "lists of indices": (lists_of_indices, TEN),
    "pairs": (pairs, TEN),
    "tuples": (tuples, ([[24, 25], [42, 43]], [[26, 27], [44, 45]])),
    "tensors": (tensors, ([[0, 8], [32, 40]], [[16, 24], [48]])),
}


def read_loader(kind: str) -> list[list[int]]:
    """Body: return the rank's samples of each batch of two passes."""
    loader = split_batches(LOADERS[kind][0](10))
    return [[int(number) for number in batch] for _ in range(2) for batch in loader]


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_is_read_as_it_is(world, kind):
    """What is no plain list of indices over a plain dataset, on 2 ranks, twice; and whole on one."""
    first, second = LOADERS[kind][1]
    of_rank_0, of_rank_1 = world(2).run(read_loader, kind)
    assert first * 2 == of_rank_0
    assert second * 2 == of_rank_1
    (alone,) = world(1).run(read_loader, kind)
    assert [[*own, *other] for own, other in zip(first, second, strict=True)] * 2 == alone


class Threaded:
    """An iterable of batches that a thread of this process reads ahead."""

    def __iter__(self) -> Iterator[Tensor]:
        done = threading.Event()
        thread = threading.Thread(target=done.wait, daemon=True)
        thread.start()
        yield torch.ones(4)
        done.set()
        thread.join()


def fit_threaded(options: dict[str, Any]) -> None:
    make_trainer(GradAvgStrategy(**options), max_epochs=1).fit(Masks(), Threaded())


def test_a_thread_that_reads_ahead_is_refused_where_bits_are_promised(world):
    for error in world(2).run_expecting_errors(fit_threaded, REPRODUCIBLE):
        assert "num_workers=1" in error.message


class Sized(IterableDataset[Any]):
    """A stream that says its length."""

    def __len__(self) -> int:
        return 8

    def __init__(self, first: float) -> None:
        self.first = first

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.first, self.first + 8))


class Cycled(Masks):
    """Has a schedule over the steps that Lightning estimates."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit_sized(options: dict[str, Any]) -> tuple[int, int]:
    """Body: train half of a stream with a length; return the steps that Lightning estimates, and those taken."""
    module = Cycled()
    trainer = make_trainer(GradAvgStrategy(**options), max_epochs=1, limit_train_batches=0.5)
    first = 1.0 if options else 1.0 + dist.get_rank()  # without splitting, each rank has data of its own
    trainer.fit(module, DataLoader(Sized(first), 2))
    return int(trainer.estimated_stepping_batches), trainer.global_step


@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"equivalent_to": "single_device"}], ids=str)
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_a_stream_keeps_its_length(world, options):
    """Schedules and `limit_train_batches` read it, as with stock Lightning: half of 4 batches are 2."""
    assert [(2, 2)] * 2 == world(2).run(fit_sized, options)


class Evaluated(Watched):
    """Has validation, too."""

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Have validation run."""


def train_after_evaluation(options: dict[str, Any] | None, loaders: int) -> tuple[list[Any], list[float]]:
    """Body: validate and train, without options as stock Lightning; return the rank's samples, and what steps draw."""
    seed(5)
    module = Evaluated()
    strategy = "auto" if options is None else GradAvgStrategy(**options)
    trainer: Any = make_trainer(strategy, max_epochs=1, num_sanity_val_steps=0)
    evaluated: list[Any] = [DataLoader(torch.ones(2)) for _ in range(loaders)]
    trainer.validate(module, evaluated, verbose=False)
    trainer.fit(module, DataLoader(torch.arange(16.0), 4, shuffle=True), evaluated)
    return module.drawn_batches, module.drawn


@pytest.mark.parametrize("loaders", [1, 3])
def test_evaluation_moves_random_numbers_as_on_one_process(world, loaders):
    """The iterator of each loader draws a seed for its workers, and nothing else draws."""
    ((order, drawn),) = world(1).run(train_after_evaluation, None, loaders)
    ((order_alone, drawn_alone),) = world(1).run(train_after_evaluation, {"equivalent_to": "single_device"}, loaders)
    assert order == order_alone
    assert drawn == drawn_alone
    strategy = {"split_batches": True, "exact_evaluation": True}
    of_ranks = [samples for samples, _ in world(2).run(train_after_evaluation, strategy, loaders)]
    assert order == [[*first, *second] for first, second in zip(*of_ranks, strict=True)]


def read_with_looks(kind: str, looks: bool) -> list[list[int]]:
    """Body: train two epochs while rank 0 alone looks at the data; return the rank's samples."""
    seed(5)
    numbers: Any = torch.arange(8)
    loaders: dict[str, Callable[[], Any]] = {
        "unsized": lambda: Unsized(lambda: torch.arange(8).split(4)),
        "shuffled": lambda: DataLoader(numbers, 4, shuffle=True),
        "generator": lambda: DataLoader(numbers, 4, shuffle=True, generator=torch.Generator()),
        "persistent": lambda: DataLoader(numbers, 4, shuffle=True, persistent_workers=True, **WORKERS),
    }
    module = Evaluated()
    trainer = make_trainer(
        GradAvgStrategy(split_batches=True),
        max_epochs=2,
        callbacks=[Looking()] if looks else [],
        num_sanity_val_steps=0,
    )
    trainer.fit(module, loaders[kind](), DataLoader(torch.ones(2)))
    return [[int(number) for number in batch] for batch in module.drawn_batches]


class Looking(Callback):
    """Looks at the data on rank 0 alone, as a callback that draws images does."""

    def look(self, trainer: Any) -> None:
        if trainer.global_rank == 0:
            next(iter(trainer.train_dataloader))
            if trainer.val_dataloaders is not None:
                next(iter(trainer.val_dataloaders))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer)


@pytest.mark.parametrize("kind", ["unsized", "shuffled", "generator", "persistent"])
def test_one_rank_may_look_at_the_data(world, kind):
    """A look exchanges nothing, and moves nothing."""
    assert world(2).run(read_with_looks, kind, looks=False) == world(2).run(read_with_looks, kind, looks=True)


class Drawing(Masks):
    """Draws from the process's own state before each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.own: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.own.append(random.random())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        noise()


class AfterValidation(Callback):
    """Saves at the end of each validation, before Lightning calls the strategy."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/{trainer.current_epoch}.ckpt")


def fit_saving(folder: str, resume: str | None) -> list[float]:
    """Body: return what the process drew of its own."""
    seed_everything(3 if resume is None else 8, verbose=False)
    module = Drawing()
    callbacks = [AfterValidation(folder)] if resume is None else []
    trainer = make_trainer(GradAvgStrategy(**REPRODUCIBLE), max_epochs=2, callbacks=callbacks, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(torch.ones(8), 4), DataLoader(torch.ones(4)), ckpt_path=resume, weights_only=False)
    return module.own


def test_a_checkpoint_of_a_validation_holds_the_own_state_of_training(world, tmp_path):
    """While it is saved, evaluation draws from a stream of its own."""
    whole = world(2).run(fit_saving, str(tmp_path), None)
    resumed = world(2).run(fit_saving, "", str(tmp_path / "0.ckpt"))
    assert [own[2:] for own in whole] == resumed
