"""Batches of every kind, cut before they are collated: each sample trains with its own target, whatever holds them.

The data are x = 1 to n and the target 10 x, the loss is the mean of (w x - target)^2, and one step of SGD from 0 with a
rate of 0.01 goes to 0.2 times the mean of x^2: to 1.5 with four samples. A kind of batch is a `collate_fn`, and what
reads x and target from the batch that it makes.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from ranks import grid, make_trainer
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader
from toys import approx

from lightning_gradavg import GradAvgStrategy

# Python 3.12 and later, of the workers that are forked from a process with threads.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


class Sample(NamedTuple):
    """A sample of the dataset."""

    x: float
    target: float


Samples = Sequence[Sample]
Read = tuple[Any, Any]
"""x and target, each a tensor or a list of numbers."""


class Kind(NamedTuple):
    """A kind of batch."""

    collate: Callable[[list[Sample]], Any]
    read: Callable[[Any], Read]
    # The number of samples in the one batch.
    samples: int = 4


@dataclass
class Record:
    """A batch, or a sample, as a dataclass."""

    x: Any
    target: Any


class Pair(NamedTuple):
    """A batch as a named tuple."""

    x: Any
    target: Any


class Graph:
    """What a graph library collates: without length, and moved as one."""

    def __init__(self, samples: Samples) -> None:
        self.nodes = torch.tensor([list(sample) for sample in samples])

    def to(self, device: Any, **_: Any) -> Graph:
        self.nodes = self.nodes.to(device)
        return self


class Encoding(UserDict[str, Any]):
    """As a tokenizer of transformers returns it: a mapping with attributes, and a method `to`."""

    def to(self, device: Any, **_: Any) -> Encoding:
        return Encoding({name: value.to(device) for name, value in self.items()})


def x_of(samples: Samples) -> Tensor:
    return torch.tensor([sample.x for sample in samples])


def target_of(samples: Samples) -> Tensor:
    return torch.tensor([sample.target for sample in samples])


def texts_of(samples: Samples) -> list[Tensor]:
    """Return a text for each sample, of 2 x words: the first has the target, the last x. The longest of four has 8."""
    texts = []
    for sample in samples:
        text = torch.zeros(2 * int(sample.x))
        text[0], text[-1] = sample.target, sample.x
        texts.append(text)
    return texts


def read_texts(texts: Sequence[Tensor]) -> Read:
    return [float(text[-1]) for text in texts], [float(text[0]) for text in texts]


def boxes_of(samples: Samples) -> list[Tensor]:
    """Return two rows of two numbers for each sample."""
    return [torch.tensor([[sample.target, 0.0], [0.0, 0.0]]) for sample in samples]


def collate_in_place(samples: list[Any]) -> Tensor:
    """Append to each sample, which a second call would do again."""
    rows = [list(sample) for sample in samples]
    samples.append(Sample(0.0, 0.0))
    assert len(samples) == len(rows) + 1
    return torch.tensor(rows)


def time_major(samples: Samples) -> dict[str, Any]:
    texts = texts_of(samples)
    return {"text": pad_sequence(texts), "length": torch.tensor([len(text) for text in texts])}


def read_time_major(batch: dict[str, Any]) -> Read:
    return read_texts([text[:length] for text, length in zip(batch["text"].T, batch["length"], strict=True)])


def packed(samples: Samples) -> Any:
    return pack_sequence(texts_of(samples), enforce_sorted=False)


def read_packed(batch: Any) -> Read:
    padded, lengths = pad_packed_sequence(batch, batch_first=True)
    return read_texts([text[:length] for text, length in zip(padded, lengths, strict=True)])


def rows_of(samples: Samples) -> Tensor:
    return torch.tensor([list(sample) for sample in samples])


def read_rows(rows: Tensor) -> Read:
    return rows[:, 0], rows[:, 1]


KINDS: dict[str, Kind] = {
    "tensor": Kind(rows_of, read_rows),
    "dict": Kind(lambda s: {"x": x_of(s), "target": target_of(s)}, lambda b: (b["x"], b["target"])),
    "named tuple": Kind(lambda s: Pair(x_of(s), target_of(s)), lambda b: (b.x, b.target)),
    "dataclass": Kind(lambda s: Record(x_of(s), target_of(s)), lambda b: (b.x, b.target)),
    "list of tensors": Kind(lambda s: [x_of(s), target_of(s)], lambda b: (b[0], b[1])),
    "list of dicts": Kind(
        lambda s: [{"x": one.x, "target": one.target} for one in s],
        lambda b: ([one["x"] for one in b], [one["target"] for one in b]),
    ),
    "tuple of dicts": Kind(
        lambda s: tuple({"x": torch.tensor(one.x), "target": one.target} for one in s),
        lambda b: ([float(one["x"]) for one in b], [one["target"] for one in b]),
    ),
    "a dict per sample beside a tensor": Kind(
        lambda s: {"x": x_of(s), "meta": [{"target": one.target} for one in s]},
        lambda b: (b["x"], [one["target"] for one in b["meta"]]),
    ),
    "lists of lists": Kind(
        lambda s: {"x": x_of(s), "targets": [[one.target] * int(one.x) for one in s]},
        lambda b: (b["x"], [targets[0] for targets in b["targets"]]),
    ),
    "tensors without dimensions": Kind(
        lambda s: {"x": x_of(s), "targets": [torch.tensor(one.target) for one in s]},
        lambda b: (b["x"], [float(target) for target in b["targets"]]),
    ),
    "list of dataclasses": Kind(
        lambda s: {"x": x_of(s), "records": [Record(one.x, one.target) for one in s]},
        lambda b: (b["x"], [record.target for record in b["records"]]),
    ),
    "boxes, as many as samples": Kind(
        lambda s: {"x": x_of(s), "boxes": boxes_of(s)},
        lambda b: (b["x"], [float(boxes[0, 0]) for boxes in b["boxes"]]),
        samples=2,
    ),
    "class names, as many as samples": Kind(
        lambda s: {"rows": rows_of(s), "classes": ["cat", "dog", "bird", "fish"]},
        lambda b: read_rows(b["rows"]) if len(b["classes"]) == 4 else ([], []),
    ),
    "texts": Kind(
        lambda s: [f"{one.x} {one.target}" for one in s],
        lambda b: ([float(text.split()[0]) for text in b], [float(text.split()[1]) for text in b]),
    ),
    "time-major": Kind(time_major, read_time_major),
    "packed": Kind(packed, read_packed),
    "jagged": Kind(
        lambda s: torch.nested.nested_tensor(texts_of(s), layout=torch.jagged), lambda b: read_texts(b.unbind())
    ),
    "nested": Kind(lambda s: torch.nested.nested_tensor(texts_of(s)), lambda b: read_texts(b.unbind())),
    "sparse": Kind(lambda s: rows_of(s).to_sparse(), lambda b: read_rows(b.to_dense())),
    "CSR": Kind(lambda s: rows_of(s).to_sparse_csr(), lambda b: read_rows(b.to_dense())),
    "graph": Kind(Graph, lambda b: read_rows(b.nodes)),
    "encoding": Kind(lambda s: Encoding(x=x_of(s), target=target_of(s)), lambda b: (b["x"], b["target"])),
    "changed in place": Kind(collate_in_place, read_rows),
}


class Net(LightningModule):
    """One weight. It notes what a hook of a transfer sees, and how many samples a step gets."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.kind = kind
        self.sizes: list[int] = []
        self.types: set[type] = set()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.types.add(type(batch))
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = (torch.as_tensor(values, dtype=torch.float64) for values in self.kind.read(batch))
        self.sizes.append(len(x))
        return (self.w * x - target).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Trained(NamedTuple):
    """What a rank says of a run."""

    weight: float
    sizes: list[int]
    types: set[type]


def train(options: dict[str, Any], workers: dict[str, Any]) -> tuple[int, dict[str, Trained]]:
    """Body: train one step on a batch of every kind; return the rank, and what each run gave."""
    trained: dict[str, Trained] = {}
    for name, kind in KINDS.items():
        samples = [Sample(float(x), 10.0 * x) for x in range(1, kind.samples + 1)]
        loader: Any = DataLoader(samples, kind.samples, collate_fn=kind.collate, **workers)
        net = Net(kind)
        make_trainer(GradAvgStrategy(**options), max_epochs=1).fit(net, loader)
        trained[name] = Trained(net.w.item(), net.sizes, net.types)
    return dist.get_rank(), trained


OPTIONS: dict[str, dict[str, Any]] = {
    "split": {"split_batches": True},
    "single device": {"equivalent_to": "single_device"},
    "data parallel": {"equivalent_to": "data_parallel"},
    "replicas": {"split_batches": True, "num_replicas": 3},
    "pieces": {"split_batches": True, "max_device_batch_size": 1},
    "reproducible": {"reproducible": True, "num_replicas": 6},
}
# One worker: a run has one batch, which leaves a second worker idle, and each fork of a rank takes as long as a run.
WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "one": {"num_workers": 1, "multiprocessing_context": "fork"},
    "persistent": {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True},
}


@pytest.mark.parametrize(("option", "world_size", "workers"), grid([*OPTIONS], [1, 2, 3], [*WORKERS], strength=1))
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.13, of workers
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
def test_a_sample_trains_with_its_own_target(world, option, world_size, workers):
    """Of any type, by any option that splits, hooks and `training_step` get batches of the user's own type."""
    ranks = world(world_size).run(train, OPTIONS[option], WORKERS[workers])
    assert list(range(world_size)) == [rank for rank, _ in ranks]
    for name, kind in KINDS.items():
        of_ranks = [trained[name] for _, trained in ranks]
        expected = 0.2 * sum(x * x for x in range(1, kind.samples + 1)) / kind.samples
        assert [(name, approx(expected))] * world_size == [(name, trained.weight) for trained in of_ranks]
        types = {type(kind.collate([Sample(1.0, 10.0)]))}
        assert [(name, types)] * world_size == [(name, trained.types) for trained in of_ranks]
