"""`split_batches`: the loader's batches are the global batches, and every rank trains on its chunk of each."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from lockstep import (
    Graphs,
    Logged,
    Rank,
    Stream,
    Taken,
    Unsized,
    epochs,
    global_batches,
    in_one_world,
    on_ranks,
    plain,
    take_all,
)
from ranks import make_trainer
from torch import Tensor
from torch.nn.parallel import scatter
from torch.nn.parallel._functions import Scatter
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
)
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.batches.chunks import chunk_bounds
from lightning_gradavg.tree import batch_samples, data_digest, slice_batch

EIGHT: Any = range(8)


class Fixed:
    """A batch sampler of its own kind: no base class, and constructor arguments of its own."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class Doubling(DataLoader[Any]):
    """Has arguments and an iterator of its own."""

    def __init__(self, factor: int) -> None:
        super().__init__(range(6), batch_size=4)  # type: ignore[arg-type]  # a range will do
        self.factor = factor

    def __iter__(self) -> Any:
        return (batch * self.factor for batch in super().__iter__())


class Batches(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(7).split(4))


def of_indices(kind: Callable[[list[int]], Any]) -> Any:
    class Kind(Fixed):
        def __iter__(self) -> Iterator[Any]:
            return (kind(batch) for batch in self.batches)

    return DataLoader(torch.arange(5), batch_sampler=Kind([[4, 2, 0, 1, 3], [1, 1]]))  # type: ignore[arg-type]


def shuffled(rank: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    return DataLoader(range(40), batch_size=4, shuffle=True, generator=generator)  # type: ignore[arg-type]


def of_rank(rank: int) -> Any:
    return DataLoader(range(40), batch_sampler=Fixed([[step, rank] for step in range(9)]))  # type: ignore[arg-type]


LOADERS: dict[str, Callable[[int], Any]] = {
    # Of a rank; all follow rank 0.
    **{kind.__name__: lambda _, kind=kind: of_indices(kind) for kind in (tuple, torch.tensor, np.array, iter)},  # type: ignore[misc]
    "a subclass": lambda _: Doubling(10),
    "a stream of batches": lambda _: DataLoader(Batches(), batch_size=None),
    "a list of batches": lambda _: DataLoader(list(torch.arange(7).split(4)), batch_size=None),  # type: ignore[arg-type]
    "generators of different seeds": shuffled,
    "batches that depend on the rank": of_rank,
}


@pytest.mark.parametrize("kind", LOADERS)
def test_global_batches_are_those_of_a_plain_loader(kind: str) -> None:
    make = LOADERS[kind]

    ranks = on_ranks(3, lambda rank: take_all(rank.load(make(rank.split.rank))))

    assert plain(make(0)) == global_batches(ranks)


class TestOrder:
    def test_random_states_move_on_as_in_one_process(self) -> None:
        """A rank whose state is rank 0's moves on as one process; one with its own keeps it, undisturbed."""

        def make() -> DataLoader[Any]:
            return DataLoader(torch.arange(8), batch_size=4, shuffle=True)  # type: ignore[arg-type]  # a tensor will do

        plain(make())
        after_one_process = torch.rand(3).tolist()
        torch.manual_seed(99)
        own = torch.rand(3).tolist()

        def body(rank: Rank) -> list[float]:
            take_all(rank.load(make()))
            drawn: list[float] = torch.rand(3).tolist()
            return drawn

        assert [after_one_process, after_one_process, own] == on_ranks(3, body, seeds=[7, 7, 99])

    def test_what_ranks_draw_before_the_first_batch_changes_nothing(self) -> None:
        """Hooks may draw between the start of an epoch and its first batch; the order is that of rank 0's process."""

        def make() -> DataLoader[Any]:
            return DataLoader(torch.arange(20), batch_size=6, shuffle=True)  # type: ignore[arg-type]  # a tensor will do

        def body(rank: Rank) -> list[Taken]:
            batches = rank.load(make()).begin().items
            torch.rand(3 + rank.split.rank)
            return [Taken(batch, behind.chunk) for batch, behind in batches]

        torch.manual_seed(7)
        batches = iter(make())
        torch.rand(3)

        assert [batch.tolist() for batch in batches] == global_batches(on_ranks(3, body, seeds=[7, 7, 7]))

    @pytest.mark.slow
    @pytest.mark.parametrize("generator", [None, 5])
    def test_no_two_ranks_augment_alike(self, generator: int | None) -> None:
        """Sample k of every chunk draws numbers of its own, in this process and in workers, whatever the seeds."""

        class Noise(Dataset[Any]):
            def __len__(self) -> int:
                return 8

            def __getitem__(self, index: int) -> Any:
                return torch.rand(())

        def body(rank: Rank, workers: int) -> list[float]:
            own = None if generator is None else torch.Generator().manual_seed(generator)
            loader = DataLoader(Noise(), batch_size=8, num_workers=workers, generator=own)
            (taken,) = take_all(rank.load(loader))
            return taken.batch.tolist()  # type: ignore[no-any-return]

        for workers in (0, 1):
            ranks = on_ranks(4, partial(body, workers=workers), seeds=[7, 7, 7, 7])
            assert 8 == len({number for rank in ranks for number in rank})


class TestMapStyle:
    def test_only_the_own_samples_are_loaded(self) -> None:
        """A rank loads its own chunk, and for a missing one the two samples of its stand-in."""
        datasets: list[Logged] = []

        def make() -> DataLoader[Any]:
            datasets.append(Logged(13))
            return DataLoader(datasets[-1], batch_size=8)

        on_ranks(4, epochs(make))

        loaded = [dataset.loaded for dataset in datasets]
        assert [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12], [6, 7, 8, 9]] == loaded

    def test_the_log_names_the_samplers(self) -> None:
        line = in_one_world(DataLoader(torch.arange(8), batch_size=4, shuffle=True)).describe()  # type: ignore[arg-type]
        assert "its BatchSampler and RandomSampler: used as it is" in line
        assert line.endswith("; each rank loads its own samples only")

    def test_all_arguments_of_the_loader_are_kept(self) -> None:
        """The copy that is read has every attribute of the user's loader, but a batch sampler that asks the user's."""
        options: dict[str, Any] = {"pin_memory": True, "timeout": 9, "worker_init_fn": print, "prefetch_factor": 5}
        loader: DataLoader[Any] = DataLoader(EIGHT, 4, num_workers=1, persistent_workers=True, **options)
        vars(loader)["_iterator"] = object()  # persistent workers that have already been used
        before = dict(vars(loader))

        split = in_one_world(loader)

        read = vars(split._read)
        assert before == vars(loader)
        assert {"batch_sampler", "_iterator"} == {name for name in read if read[name] is not before[name]}
        assert read["_iterator"] is None, "its workers are its own"
        assert split.batch_sampler is loader.batch_sampler


class TestIterables:
    def test_samples_of_a_stream_are_split_before_they_are_collated(self) -> None:
        """Every rank reads the stream, and collates its own samples; the short last batch is split like any other."""
        got: list[int] = []

        def collate(samples: list[int]) -> Tensor:
            got.append(len(samples))
            return torch.tensor(samples)

        on_ranks(2, epochs(lambda: DataLoader(Stream(13), batch_size=5, collate_fn=collate)))

        assert [3, 3, 2, 2, 2, 1] == got

    def test_what_workers_send_can_be_pinned(self) -> None:
        """`torch` pins memory inside what the copy of the loader yields, and leaves the rest as it is."""

        class Pinnable:
            pinned = False

            def pin_memory(self) -> Pinnable:
                self.pinned = True
                return self

        loader = in_one_world(DataLoader(Stream(3), batch_size=4, collate_fn=lambda _: Pinnable()))
        next(iter(loader))

        sent = pin_memory(loader._read.collate_fn([1, 2, 3]))

        assert (3, data_digest((3, 1, 3))) == (sent.rows, sent.key)
        assert sent.part.pinned

    def test_endless_iterables_without_length(self) -> None:
        """An iterable without length has none when it is split, and may never end."""

        class Endless:
            def __iter__(self) -> Iterator[Tensor]:
                return (torch.full((4,), step) for step in iter(int, 1))

        loader = in_one_world(Endless(), rank=1, world_size=2)

        with pytest.raises(TypeError):
            len(loader)
        assert [0, 0] == next(iter(loader)).tolist()


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Record:
    x: Any
    name: str = "all"
    made: int = field(default=0, init=False)


def batches_of(size: int) -> st.SearchStrategy[Any]:
    """Return nested batches of tensors that have `size` samples, and of objects that are no samples."""
    leaves = st.sampled_from([torch.arange(size), torch.arange(2.0 * size).view(size, 2)]) | st.sampled_from([5, "a"])
    nested = st.recursive(
        leaves,
        lambda inner: (
            st.tuples(inner, st.just(torch.arange(size)))
            | st.dictionaries(st.sampled_from("xyz"), inner, min_size=1)
            | st.lists(inner, min_size=1, max_size=2).map(lambda items: [torch.zeros(size), *items])
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=5,
    )
    return nested.map(lambda batch: {"always": torch.arange(size), "batch": batch})


def same(one: Any, other: Any) -> bool:
    """Whether two batches have the same types, structure and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class TestCollated:
    def test_every_structure_is_kept(self) -> None:
        """What scatter does not cut, arrays, columns and records, is sliced, too; everything else is shared."""
        shared = object()
        batch = {
            "array": np.arange(4),
            "record": Record(torch.arange(4)),
            "ordered": OrderedDict(x=torch.arange(4)),
            "user": UserDict(x=torch.arange(4)),
            "names": ["a", "b", "c", "d"],
            "others": (torch.tensor(5), "abcd", 4, ["a"], shared),
            "set": {torch.arange(4), "a"},
        }

        part = slice_batch(batch, 1, 3)

        assert [4, 2, 3] == [batch_samples(each) for each in (batch, ["a", "b"], (["a", "b", "c"], ["d", "e", "f"]))]
        assert [type(value) for value in batch.values()] == [type(value) for value in part.values()]
        assert [1, 2] == part["array"].tolist() == part["ordered"]["x"].tolist() == part["user"]["x"].tolist()
        assert ([1, 2], "all", 0) == (part["record"].x.tolist(), part["record"].name, part["record"].made)
        assert ["b", "c"] == part["names"]
        assert batch["others"] == part["others"]
        assert part["set"] is batch["set"], "as torch.nn.parallel.scatter shares it"

    @pytest.mark.parametrize(
        ("batch", "found"),
        [
            ((torch.zeros(4, 2), torch.zeros(2, 9)), "dimension 0 is 2 and 4"),
            (object(), "nothing in it has one"),
            (torch.tensor(1.0), "nothing in it has one"),
            (Pair(torch.zeros(3), torch.zeros(2)), "Pair cannot be split.*dimension 0 is 2 and 3"),
        ],
    )
    def test_unclear_batches_are_refused(self, batch: Any, found: str) -> None:
        """A batch whose tensors disagree is not cut at a guess."""
        with pytest.raises(ValueError, match=f"{found}.*leave split_batches out"):
            slice_batch(batch, 0, 1)

    @pytest.mark.parametrize("lengths", [[1, 1, 1], [3], [3, 2]])
    def test_packed_sequences_are_refused(self, lengths: list[int]) -> None:
        """A `PackedSequence` is never cut, also where its tensors happen to be equally long; the advice is to pad."""
        packed = pack_sequence([torch.ones(length) for length in lengths])

        for batch in (packed, {"x": torch.ones(3), "text": [packed]}):
            with pytest.raises(ValueError, match=r"a PackedSequence cannot be split.*pack_padded_sequence in training"):
                slice_batch(batch, 0, 1)

    @given(batch=batches_of(12), parts=st.integers(1, 6))
    def test_slices_are_what_scatter_makes(self, batch: Any, parts: int) -> None:
        """Cut at `chunk_bounds`, nested batches give the chunks of `torch.nn.parallel.scatter`, in the same types."""
        slices = [slice_batch(batch, start, stop) for start, stop in chunk_bounds(12, parts) if stop > start]

        with mock.patch.object(Scatter, "apply", lambda targets, _, dim, tensor: tensor.chunk(len(targets), dim)):
            expected = scatter(batch, list(range(parts)))

        assert len(slices) == len(expected)
        assert all(map(same, slices, expected))

    def test_fingerprints_tell_data_apart(self) -> None:
        """Case 40: equal data have equal fingerprints, and other values, order, types, shapes or structures do not."""
        values = [
            [1, 2, 3],
            [3, 2, 1],
            [1.0, 2.0, 3.0],
            ["1", "2", "3"],
            [(0, 1), 2],
            torch.arange(6),
            torch.arange(6).flip(0),
            torch.arange(6).int(),
            torch.arange(6).view(2, 3),
            {"x": torch.arange(6)},
            {"x": torch.arange(6), "y": "text"},
            Pair(1, None),
            Record(torch.ones(2, dtype=torch.bfloat16)),
            np.arange(6.0),
            torch.empty(0, 3),
        ]

        assert len(values) == len({data_digest(value) for value in values})
        assert data_digest([object(), torch.ones(2)]) == data_digest([object(), torch.ones(2)])
        assert {16} == {len(data_digest(value)) for value in values}


class Failing(Fixed):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        raise KeyError("out of batches")


class Counting(IterableDataset[int]):
    def __init__(self, stop: int) -> None:
        self.stop = stop

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.stop))


class Merging(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([torch.cat(list(super().__iter__()))])


class Repeating(DataLoader[Any]):
    def __iter__(self) -> Any:
        batches = list(super().__iter__())
        return iter([*batches, batches[0]])


class Drawing(Dataset[float]):
    """Draws from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.generator = random.Random(seed)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return self.generator.random()


def drawing(samples: list[Any]) -> Graphs:
    torch.rand(())
    return Graphs(samples)


def with_attribute(loader: Any, name: str, value: Any) -> Any:
    vars(loader)[name] = value
    return loader


DEALT: Any = DistributedSampler(EIGHT, num_replicas=2, rank=0)
TWO_WORKERS: list[dict[str, Any]] = [{"num_workers": 1}, {}]
RAGGED = [[torch.zeros(size) for size in (1, 2, 3, 4)]]

REFUSED: dict[str, tuple[Callable[[int], Any], dict[str, Any], list[str]]] = {
    # What returns the loader of a rank, how it is split, and what the errors of ranks 0 and 1 say, or that of all.
    "length": (lambda rank: DataLoader(EIGHT, 4 - rank), {}, ["the ranks' train loaders differ"]),
    "workers": (lambda rank: DataLoader(EIGHT, **TWO_WORKERS[rank]), {}, ["the ranks' train loaders differ"]),  # type: ignore[arg-type]
    "streams of different length": (
        lambda rank: DataLoader(Counting(20 + 4 * rank), 4),
        {},
        ["found at the end after batch 5", "found at batch 6 of"],
    ),
    "failing sampler": (
        lambda rank: DataLoader(EIGHT, batch_sampler=Failing([[0, 1], [2]])),  # type: ignore[arg-type]
        {},
        ["out of batches", "the batch sampler of rank 0, whose order counts, raised KeyError('out of batches')"],
    ),
    "empty indices": (
        lambda rank: DataLoader(EIGHT, batch_sampler=Fixed([[0], []])),  # type: ignore[arg-type]
        {},
        ["a loader batch has no samples: leave out empty batches"],
    ),
    "ragged": (lambda rank: RAGGED, {"whole": True}, ["dimension 0 is 1 and 2 and 3 and 4"]),
    "dealt": (
        lambda rank: DataLoader(EIGHT, sampler=DEALT),
        {},
        ["DistributedSampler for 2 replicas, but with split_batches=True"],
    ),
    "dealt on one rank": (
        lambda rank: DataLoader(EIGHT, sampler=DEALT if rank else None),
        {},
        ["the ranks' train loaders differ", "leave split_batches, equivalent_to and num_replicas out"],
    ),
    "out of order": (
        lambda rank: with_attribute(DataLoader(EIGHT, num_workers=1), "in_order", False),  # an argument since torch 2.6
        {},
        ["Use in_order=True"],
    ),
    "more batches": (lambda rank: Repeating(EIGHT, 2), {}, ["Repeating yielded more batches"]),
    "fewer batches": (lambda rank: Merging(EIGHT, 2), {}, ["Merging yielded fewer batches"]),
    "other samples": (
        lambda rank: DataLoader(Drawing(rank), 4),
        {"whole": True, "replicas": 2},
        ["does not yield the same batches on all ranks: found at batch 1 of this epoch"],
    ),
    "sharded on one rank": (
        lambda rank: DataLoader(with_attribute(Drawing(0), "sharded_by_rank", rank == 1), 4),
        {"replicas": 4},
        ["", "DataLoader or its dataset Drawing has sharded_by_rank = True"],
    ),
    "sharded": (
        lambda rank: DataLoader(with_attribute(Drawing(0), "sharded_by_rank", True), 4),
        {},
        ["leave split_batches, equivalent_to and num_replicas out, and every rank trains on its own batches"],
    ),
    "graphs, collated with draws": (
        lambda rank: DataLoader(EIGHT, collate_fn=drawing),
        {"whole": True},
        ["Graphs cannot be cut into replicas, and collate_fn draws random numbers"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_an_error_on_all_ranks(name: str) -> None:
    make, options, messages = REFUSED[name]

    def body(rank: Rank) -> Any:
        return take_all(rank.load(make(rank.split.rank)))

    errors = on_ranks(2, body, raises=(KeyError,), **options)

    for error, message in zip(errors, messages if len(messages) == 2 else messages * 2, strict=True):
        assert isinstance(error, (ValueError, RuntimeError, KeyError))
        assert message in str(error)


class Held(list[Any]):
    """Batches in memory, of which `CombinedLoader` takes a plain list for several loaders."""


class Looking(LightningModule):
    """Finds in every batch the samples that are said to stand behind it, and looks at the data in between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy: Any = self.trainer.strategy
        for _ in range(2):  # asked twice, it is the same
            for part, loader in zip(batch, strategy._batches._loaders, strict=True):
                behind = loader.now
                expected = None if behind is None else [*range(behind.chunk.start, behind.chunk.stop)]
                assert expected == (None if part is None else [value % 4 for value in part.tolist()])
        loaders: Any = self.trainer.train_dataloader
        for loader in loaders if batch_idx == 1 else ():
            next(iter(loader))
            list(loader)
        return {"loss": self.weight * 1.0, "weight": 1}  # batches of several sizes have no common one

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def steps_of(mode: Any, sized: bool, sizes: tuple[int, ...], limit: float) -> int:
    """Body: train two epochs, and return how many steps were taken."""
    batches = [torch.arange(100 * place, 100 * place + size).split(4) for place, size in enumerate(sizes)]
    loaders = CombinedLoader([Held(each) if sized else Unsized(partial(iter, each)) for each in batches], mode)
    trainer = make_trainer(GradAvgStrategy(split_batches=True), max_epochs=2, limit_train_batches=limit)
    trainer.fit(Looking(), loaders)
    return trainer.global_step


class TestInLightning:
    @pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
    @pytest.mark.parametrize("sized", [True, False])
    @pytest.mark.parametrize("sizes", [(7, 22), (22, 7), (9, 9), (13,)])
    def test_what_stands_behind_a_batch_is_told_in_step(
        self, world: Any, mode: str, sized: bool, sizes: tuple[int, ...]
    ) -> None:
        """Fetched ahead or not, cycled, exhausted, left early, looked at between: every batch meets its own chunk."""
        lengths = [-(-size // 4) for size in sizes]
        expected = min(lengths) if mode == "min_size" else max(lengths)
        assert [2 * expected] * 2 == world(2).run(steps_of, mode, sized, sizes, 1.0)
        assert [2] * 2 == world(2).run(steps_of, mode, sized, sizes, 1)

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
