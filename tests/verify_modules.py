"""Modules and loaders as users write them, for the verification: in each set-up a fault, or none; no test in here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def tensors(count: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)


def plain(count: int = 32, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors(count)), **{"batch_size": 4, **options})


def texts(**options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 9, (32,), generator=generator)
    rows: Any = [torch.randint(1, 7, (int(length),), generator=generator) for length in lengths]
    return DataLoader(rows, **{"batch_size": 4, "collate_fn": lambda each: pad_sequence(each, True), **options})


class Step(LightningModule):
    """A module of layers and a training step, both given as functions."""

    def __init__(self, make: Callable[[], nn.Module], step: Callable[..., Any], **hooks: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.step, self.hooks = make(), step, hooks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.hooks.get("transferred", lambda _, batch: batch)(self, batch)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.hooks.get("stepping", lambda _: None)(self)

    def on_train_batch_end(self, *_: Any) -> None:
        self.hooks.get("ended", lambda _: None)(self)

    def configure_optimizers(self) -> Any:
        return self.hooks.get("optimizers", lambda one: torch.optim.SGD(one.parameters(), lr=0.1))(self)


def layers(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def classified(module: Any, batch: Any) -> Tensor:
    return cross_entropy(module.net(batch[0]), batch[1])


class Recurrent(nn.Module):
    """A recurrent layer over embedded texts; `packs` packs them."""

    def __init__(self, kind: Any = nn.GRU, *, packs: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.table, self.packs = nn.Embedding(7, 4, padding_idx=0), packs
        self.rows, self.out = kind(4, 5, num_layers=2, batch_first=True, dropout=dropout), nn.Linear(5, 7)

    def forward(self, batch: Tensor) -> Tensor:
        rows, lengths = self.table(batch), (batch != 0).sum(1)
        if self.packs:
            packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
            state = self.rows(packed)[1]
            return self.out((state[0] if isinstance(state, tuple) else state)[-1])
        return self.out(self.rows(rows)[0][torch.arange(len(batch)), lengths - 1])


def last_word(module: Any, batch: Tensor) -> Tensor:
    return cross_entropy(module.net(batch), batch[:, 0])


class Attention(nn.Module):
    """A transformer with dropout over padded texts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.rows, self.out = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 7)

    def forward(self, batch: Tensor) -> Tensor:
        return self.out(self.rows(self.table(batch), src_key_padding_mask=batch == 0))


def each_text(module: Any, batch: Tensor) -> Tensor:
    losses = cross_entropy(module.net(batch).transpose(1, 2), batch, reduction="none") * (batch != 0)
    return (losses.sum(1) / (batch != 0).sum(1)).mean()


def each_token(module: Any, batch: Tensor) -> Tensor:
    return cross_entropy(module.net(batch).flatten(0, 1), batch.flatten(), ignore_index=0)


class Words(nn.Sequential):
    def __init__(self, *middle: nn.Module) -> None:
        super().__init__(nn.Embedding(7, 8), *middle, nn.Linear(8, 7))


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = layers()
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)


def taught(module: Any, batch: Any) -> Tensor:
    return mse_loss(module.net.student(batch[0] + 0.1), module.net.teacher(batch[0]))


def averaged(factor: Callable[[], float]) -> Callable[[Any], None]:
    def ended(module: Any) -> None:
        for mine, yours in zip(module.net.teacher.parameters(), module.net.student.parameters(), strict=True):
            mine.data.lerp_(yours.data, 0.1 * factor())

    return ended


def clamped(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.4 / world(), 0.4 / world())


def normalized(module: Any, batch: Any) -> Any:
    return (batch[0] - batch[0].mean(0)) / batch[0].std(0), batch[1]


def scores(module: Any, batch: Any, every: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """Return a contrastive loss of this rank's rows against those of all."""
    rows, other = module.net(batch[0]), module.net(batch[0] + 0.1)
    columns = every(module, other)
    start = rank() * len(rows) if len(columns) > len(rows) else 0
    return cross_entropy(rows @ columns.T, torch.arange(start, start + len(rows)))


GATHERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "self.all_gather": lambda module, rows: module.all_gather(rows, sync_grads=True).flatten(0, 1),
    "torch.distributed.nn": lambda _, rows: torch.cat(all_gather(rows)),
    "a detached self.all_gather": lambda module, rows: module.all_gather(rows).flatten(0, 1),
    "none": lambda _, rows: rows,
}


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(layers(nn.Dropout(0.3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.reentrant = nn.Linear(6, 6), layers(nn.Dropout(0.3)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 3).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Parameter(0.1 * torch.randn(2, 6)), nn.Parameter(torch.zeros(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + nn.functional.dropout(x, 0.2, self.training) @ self.down.T @ self.up.T


def detected(module: Any, batch: Any) -> Tensor:
    images, records = batch
    losses = [
        (out - one["boxes"].mean(0)).square().mean()
        for out, one in zip(module.net(torch.stack(list(images))), records, strict=True)
    ]
    return torch.stack(losses).mean()


def records() -> DataLoader[Any]:
    x, _ = tensors()
    rows: Any = [(row, {"boxes": x[index : index + 1 + index % 3, :3]}) for index, row in enumerate(x)]
    return DataLoader(rows, batch_size=4, collate_fn=lambda each: tuple(zip(*each, strict=True)))


class Graph:
    """A sample, or a batch, of a class that nothing is known of."""

    def __init__(self, nodes: Tensor, graph: Tensor, count: int) -> None:
        self.nodes, self.graph, self.count = nodes, graph, count


def graphs() -> DataLoader[Any]:
    x, _ = tensors(96)
    rows: Any = [
        Graph(nodes, torch.zeros(len(nodes)).long(), 1)
        for nodes in (x[start : start + 1 + start % 3] for start in range(0, 96, 3))
    ]

    def collated(each: list[Graph]) -> Graph:
        owner = torch.cat([one.graph + index for index, one in enumerate(each)])
        return Graph(torch.cat([one.nodes for one in each]), owner, len(each))

    return DataLoader(rows, batch_size=4, collate_fn=collated)


def uncopied() -> DataLoader[Any]:
    """Samples with a function, which cannot be pickled."""
    rows: Any = [(x, y, lambda: 0) for x, y in zip(*tensors(), strict=True)]
    return DataLoader(rows, batch_size=4, collate_fn=lambda each: default_collate([row[:2] for row in each]))


def of_graphs(module: Any, batch: Graph) -> Tensor:
    of_nodes = module.net(batch.nodes)
    return of_nodes.new_zeros(batch.count, 3).index_add(0, batch.graph, of_nodes).square().mean()


class Stream(IterableDataset[Any]):
    """Reads every W-th row, or with `halves` a part of its own; with `alike` all of them on every rank."""

    def __init__(self, how: str = "") -> None:
        self.how = how

    def __iter__(self) -> Iterator[Any]:
        rows = list(zip(*tensors(), strict=True))
        if self.how == "uneven" and world() > 1:
            return iter(rows[:20] if not rank() else rows[20:])
        if self.how == "halves":
            size = len(rows) // world()
            return iter(rows[rank() * size : (rank() + 1) * size])
        return iter(
            rows[:: 1 if self.how == "alike" else world()][0:] if not rank() or self.how else rows[1 :: world()]
        )


class Buckets:
    """Batches texts of similar lengths, of another size each; ranks take them in turn."""

    def __init__(self, lengths: list[int], size: int = 4) -> None:
        order = sorted(range(len(lengths)), key=lambda index: lengths[index])
        self.batches = [order[start : start + size] for start in range(0, len(order), size)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches[rank() :: world()])

    def __len__(self) -> int:
        return len(self.batches) // world()


def bucketed() -> DataLoader[Any]:
    rows: Any = texts().dataset
    return DataLoader(rows, batch_sampler=Buckets([len(row) for row in rows]), collate_fn=texts().collate_fn)


def replaced(*, in_batches: bool = False) -> DataLoader[Any]:
    sampler = WeightedRandomSampler([1.0] * 16 + [2.0] * 16, 16, generator=torch.Generator().manual_seed(rank()))
    if in_batches:
        return DataLoader(TensorDataset(*tensors()), batch_sampler=BatchSampler(sampler, 4, False))
    return plain(sampler=sampler)


class Permuted(Sampler[int]):
    """Every W-th row of a permutation, which should not depend on the rank."""

    def __len__(self) -> int:
        return 32 // world()

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(32, generator=torch.Generator().manual_seed(rank())).tolist()
        return iter(order[rank() :: world()])


def by_hand() -> DataLoader[Any]:
    data: Dataset[Any] = TensorDataset(*tensors(64))
    return DataLoader(Subset(data, range(rank(), 64, world())), batch_size=4, shuffle=True)


def masking() -> DataLoader[Any]:
    """Draws in `collate_fn`, as a collator of masked language models does."""

    def collated(each: list[Any]) -> Any:
        x, y = (torch.stack(column) for column in zip(*each, strict=True))
        return x * (torch.rand_like(x) > 0.2), y

    return DataLoader(TensorDataset(*tensors()), batch_size=4, collate_fn=collated)


def two_loaders() -> dict[str, DataLoader[Any]]:
    return {"one": plain(), "other": plain()}


def scheduled(module: Any) -> Any:
    trainer = module.trainer
    total = int(trainer.estimated_stepping_batches)
    assert trainer.num_training_batches < 100, "known once the loaders are set up"
    assert len(trainer.train_dataloader) * trainer.max_epochs >= total
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return [optimizer], [
        {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=total), "interval": "step"}
    ]


def reads_data(module: Any, batch: Any) -> Tensor:
    assert len(module.trainer.train_dataloader.dataset) == 32
    module.logger.experiment.add_scalar("seen", 1.0)
    return classified(module, batch)


def logs(**options: Any) -> Callable[[Any, Any], Tensor]:
    def step(module: Any, batch: Any) -> Tensor:
        loss = classified(module, batch)
        module.log("loss", loss, sync_dist=True, **options)
        return loss

    return step


def summed_value(module: Any, batch: Any) -> Tensor:
    """Return a loss whose value is the sum over the ranks, and whose gradient is that of this rank."""
    loss = classified(module, batch)
    total = loss.detach().clone()
    dist.all_reduce(total)
    module.log("loss", total)
    return loss + (total - loss.detach())


def noisy(module: Any) -> None:
    """Add noise to the gradients, the same on all ranks."""
    torch.manual_seed(module.global_step)
    for parameter in module.parameters():
        parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)


def in_float(module: Any, batch: Any) -> Tensor:
    return cross_entropy(module.net(batch[0].float()).float(), batch[1]).to(torch.float32)


def one_draw(module: Any, batch: Any) -> Tensor:
    return classified(module, (batch[0] * (0.5 + torch.rand(1)), batch[1]))


def sequence_first(module: Any, batch: Any) -> Tensor:
    rows = module.net(batch[0].reshape(-1, 3, 2).transpose(0, 1)).mean(0)
    return cross_entropy(rows, batch[1])


def sequences() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.Dropout(0.4), nn.Linear(5, 3))


class Tiny(nn.Module):
    """A parameter with a gradient of 1e-9 beside large ones; it is twice as large on two ranks."""

    def __init__(self, factor: Callable[[], float]) -> None:
        super().__init__()
        self.net, self.tiny = layers(), nn.Parameter(torch.ones(6))
        self.tiny.register_hook(lambda gradient: gradient * factor())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + 1e-9 * self.tiny * x)
