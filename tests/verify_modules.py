"""Layers, training steps, hooks and loaders as users write them, for the verification; no test in here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, mse_loss, softplus
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from toys import GATHERS

Layers = Callable[[], nn.Module]
OfStep = Callable[[Any, Any], Any]
Loader = Callable[[], Any]


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Step(LightningModule):
    """A module of layers, a training step and hooks, all given as functions; SGD by default."""

    def __init__(self, make: Layers, step: OfStep, **hooks: Any) -> None:
        super().__init__()
        self.net, self.step, self.batch_idx = make(), step, 0
        for name, hook in hooks.items():
            setattr(self, name, hook.__get__(self) if callable(hook) else hook)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch_idx = batch_idx
        return self.step(self, batch)

    def configure_optimizers(self) -> Any:
        return sgd(self)


# Layers.


def layers(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def normed(**options: Any) -> nn.Module:
    return layers(nn.BatchNorm1d(8, **options))


def dropped() -> nn.Sequential:
    return layers(nn.Dropout(0.5))


def words(part: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 8), nn.Dropout(part), nn.Linear(8, 7))


def hooked(change: Callable[[Tensor], Tensor], *middle: nn.Module) -> nn.Module:
    """Change gradients in a hook on every parameter."""
    net = layers(*middle)
    for parameter in net.parameters():
        parameter.register_hook(change)
    return net


def frozen() -> nn.Module:
    net = dropped()
    net[0].requires_grad_(requires_grad=False)
    return net


def spectral() -> nn.Module:
    net = layers()
    nn.utils.parametrizations.spectral_norm(net[0])
    return net


def other_start() -> nn.Module:
    """Initialize other weights where there are several processes."""
    torch.manual_seed(world())
    return layers()


def counting() -> nn.Module:
    net = layers()
    net.register_buffer("seen", torch.zeros(()))
    return net


class Recurrent(nn.Module):
    """A recurrent layer over embedded texts; `packs` packs them."""

    def __init__(self, kind: Any = nn.GRU, *, packs: bool = False, part: float = 0.0) -> None:
        super().__init__()
        self.table, self.packs = nn.Embedding(7, 4, padding_idx=0), packs
        self.rows, self.out = kind(4, 5, num_layers=2, batch_first=True, dropout=part), nn.Linear(5, 7)

    def forward(self, batch: Tensor) -> Tensor:
        rows, lengths = self.table(batch), (batch != 0).sum(1)
        if self.packs:
            return self.out(self.rows(pack_padded_sequence(rows, lengths, True, False))[1][-1])
        return self.out(self.rows(rows)[0][torch.arange(len(batch)), lengths - 1])


class Attention(nn.Module):
    """A transformer with dropout over padded texts."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.table, self.rows = nn.Embedding(7, 8), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(8, 7)

    def forward(self, batch: Tensor) -> Tensor:
        return self.out(self.rows(self.table(batch), src_key_padding_mask=batch == 0))


class Called(nn.Module):
    """Layers that a function calls in a way of its own, such as by a checkpoint."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor], inner: Any = None) -> None:
        super().__init__()
        self.first, self.inner, self.call = nn.Linear(6, 6), inner or layers(nn.Dropout(0.3)), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, self.first(x))


def compiled() -> nn.Module:
    return Called(lambda inner, x: inner(x), torch.compile(layers(nn.Dropout(0.3))))


def checkpointed(*, reentrant: bool) -> nn.Module:
    return Called(lambda inner, x: checkpoint(inner, x, use_reentrant=reentrant))


class Tiny(nn.Module):
    """A parameter with a gradient of 1e-9 beside large ones; it is multiplied by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.tiny = layers(), nn.Parameter(torch.ones(6))
        self.tiny.register_hook(lambda gradient: gradient * world())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + 1e-9 * self.tiny * x)


class Teacher(nn.Module):
    """An average of the weights, as parameters or, with `held`, in a buffer."""

    def __init__(self, *, held: bool = False) -> None:
        super().__init__()
        self.student = layers()
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)
        if held:
            self.register_buffer("mean", self.student[0].bias.detach().clone())


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


class Scalar(nn.Module):
    """One weight at 1, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))


# Training steps.


def entropy(**options: Any) -> OfStep:
    return lambda module, batch: cross_entropy(module.net(batch[0]), batch[1], **options)


classified, summed = entropy(), entropy(reduction="sum")
masked = entropy(ignore_index=0)
"""The mean over the samples of classes other than 0, as over tokens that are not padding."""
class_weighted = entropy(weight=torch.tensor([1.0, 5.0, 2.0]))


def scaled(factor: Callable[[Any], Any], of: OfStep = classified) -> OfStep:
    return lambda module, batch: factor(module) * of(module, batch)


divided, multiplied = scaled(lambda _: 1 / world()), scaled(lambda _: world())
CALLS = count(2)
by_global = scaled(lambda _: next(CALLS))
by_index = scaled(lambda module: 1 + module.batch_idx)
multiplied_late = scaled(lambda module: world() if module.batch_idx == 1 else 1)


def kept(start: Callable[[], Iterator[Any]], factor: Callable[[Any], Any] = lambda value: value) -> OfStep:
    """Multiply the loss by what an iterator in an attribute yields."""

    def value(module: Any) -> Any:
        vars(module).setdefault("factors", start())
        return factor(next(module.factors))

    return scaled(value)


def weighing(of: OfStep, counted: Callable[[Any], Tensor]) -> OfStep:
    return lambda module, batch: {"loss": of(module, batch), "weight": counted(batch).sum()}


weighted = weighing(masked, lambda batch: batch[1] != 0)


def noisy(module: Any, batch: Any) -> Tensor:
    return classified(module, (batch[0] + torch.randn_like(batch[0]), batch[1]))


def mixed_up(module: Any, batch: Any) -> Tensor:
    (x, y), part = batch, np.random.beta(1, 1)  # noqa: NPY002  # the generator that users' code draws from
    order = torch.randperm(len(x))
    outputs = module.net(part * x + (1 - part) * x[order])
    return part * cross_entropy(outputs, y) + (1 - part) * cross_entropy(outputs, y[order])


def penalized(of: OfStep = classified, *, alone: bool = False) -> OfStep:
    """Add an L2 penalty; `alone` on rank 0."""

    def step(module: Any, batch: Any) -> Tensor:
        penalty = 0.3 * sum(parameter.square().sum() for parameter in module.parameters())
        return of(module, batch) + (penalty * 0 if alone and rank() else penalty)

    return step


def by_average(module: Any, batch: Any) -> Tensor:
    """Divide the loss by its moving average."""
    loss = classified(module, batch)
    module.average = 0.9 * getattr(module, "average", 1.0) + 0.1 * float(loss.detach())
    return loss / module.average


def by_position(module: Any, batch: Any) -> Tensor:
    """Weigh the first samples of a batch most, whichever these are."""
    losses = entropy(reduction="none")(module, batch)
    return (losses / torch.arange(1, len(losses) + 1)).mean()


def named_terms(module: Any, batch: Any) -> Any:
    """A loss per sample and one per sample of a class other than 0, each with its own weight."""
    outputs, counted = module.net(batch[0]), batch[1] != 0
    terms = {"all": cross_entropy(outputs, batch[1]), "some": outputs[counted].square().sum() / counted.sum()}
    return {"loss": terms, "weight": {"all": len(batch[1]), "some": counted.sum()}}


def spread(outputs: Tensor) -> Tensor:
    return outputs.var(dim=0, correction=0).sum()


def gathered(rows: Tensor) -> Tensor:
    every = [torch.zeros_like(rows) for _ in range(world())]
    dist.all_gather(every, rows)
    return torch.cat(every)


def gathered_at_once(rows: Tensor) -> Tensor:
    every = torch.zeros(world() * len(rows), rows.shape[1], dtype=rows.dtype)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(every, rows)  # the new name from torch 2.13 on
    return every


def scores(way: str, part: float = 0.0) -> OfStep:
    """A contrastive loss of this rank's rows against those of all, which are gathered in a way."""
    ways: Any = {
        "Lightning, detached": lambda one, rows: one.all_gather(rows).flatten(0, 1),
        "torch, detached": lambda _, rows: gathered(rows),
        "torch, at once": lambda _, rows: gathered_at_once(rows),
        "none": lambda _, rows: rows,
    }

    def step(module: Any, batch: Any) -> Tensor:
        rows, other = module.net(batch[0]), module.net(dropout(batch[0] + 0.1, part))
        columns = (GATHERS | ways)[way](module, other)
        start = rank() * len(rows) if len(columns) > len(rows) else 0
        return cross_entropy(rows @ columns.T, torch.arange(start, start + len(rows)))

    return step


def by_hand(*, every: int = 1, outside: bool = False) -> OfStep:
    """Optimize manually, every so many batches; `outside` runs the backward past Lightning."""

    def step(module: Any, batch: Any) -> None:
        optimizer, loss = module.optimizers(), classified(module, batch) / every
        if module.batch_idx % every == 0:
            optimizer.zero_grad()
        if outside:
            with module.trainer.strategy.model.no_sync() if world() > 1 else nullcontext():
                loss.backward()
        else:
            module.manual_backward(loss)
        if (module.batch_idx + 1) % every == 0:
            module.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()

    return step


def repeated(module: Any, batch: Any) -> None:
    for _ in range(world()):
        by_hand()(module, batch)


def quantized(module: Any, batch: Any) -> Tensor:
    return classified(module, (torch.quantize_per_tensor(batch[0], 0.1, 0, torch.qint8).dequantize(), batch[1]))


def by_words(module: Any, batch: Tensor) -> Tensor:
    """Draw for one word after the other, and once more for all."""
    rows = torch.stack([dropout(row, 0.1) for row in module.net(batch).unbind(1)], 1)
    return (dropout(rows, 0.1).square().sum(-1) * (batch != 0)).sum(1).mean()


def adversarial(factor: Callable[[], int]) -> OfStep:
    """A generator and a discriminator with an optimizer each; both losses are multiplied."""

    def step(module: Any, batch: Any) -> None:
        net, (makes, judges) = module.net, module.optimizers()
        made = net.make(torch.randn(len(batch[0]), 3))
        judges.zero_grad()
        module.manual_backward(factor() * (softplus(-net.judge(batch[0])) + softplus(net.judge(made.detach()))).mean())
        judges.step()
        makes.zero_grad()
        module.manual_backward(factor() * softplus(-net.judge(made)).mean())
        makes.step()

    return step


def counts(module: Any, batch: Any) -> Tensor:
    module.net.seen += len(batch[0])
    return classified(module, batch)


def sparse(module: Any, batch: Any) -> Tensor:
    return (module.net(batch[1]) - 1).square().mean()


def last_word(module: Any, batch: Tensor) -> Tensor:
    return cross_entropy(module.net(batch), batch[:, 0])


def each_text(module: Any, batch: Tensor) -> Tensor:
    losses = cross_entropy(module.net(batch).transpose(1, 2), batch, reduction="none") * (batch != 0)
    return (losses.sum(1) / (batch != 0).sum(1)).mean()


def each_token(module: Any, batch: Tensor, **options: Any) -> Tensor:
    return cross_entropy(module.net(batch).flatten(0, 1), batch.flatten(), ignore_index=0, **options)


def all_tokens(module: Any, batch: Tensor) -> Tensor:
    return each_token(module, batch, reduction="sum")


def taught(module: Any, batch: Any) -> Tensor:
    return mse_loss(module.net.student(batch[0] + 0.1), module.net.teacher(batch[0]))


def detected(module: Any, batch: Any) -> Tensor:
    outputs = module.net(torch.stack(list(batch[0])))
    losses = [(out - one["boxes"].mean(0)).square().mean() for out, one in zip(outputs, batch[1], strict=True)]
    return torch.stack(losses).mean()


def of_graphs(module: Any, batch: Graph) -> Tensor:
    of_nodes = module.net(batch.nodes)
    return of_nodes.new_zeros(batch.count, 3).index_add(0, batch.graph, of_nodes).square().mean()


def of_both(module: Any, batch: Any) -> Tensor:
    return classified(module, batch["one"]) + classified(module, batch["other"])


def reads_data(module: Any, batch: Any) -> Tensor:
    assert len(module.trainer.train_dataloader.dataset) == 32
    module.logger.experiment.add_scalar("seen", 1.0)
    return classified(module, batch)


def logged(module: Any, batch: Any) -> Tensor:
    loss = classified(module, batch)
    module.log("loss", loss, sync_dist=True)
    return loss


def summed_value(module: Any, batch: Any) -> Tensor:
    """Return a loss whose value is the sum over the ranks, and whose gradient is that of this rank."""
    loss = classified(module, batch)
    total = loss.detach().clone()
    dist.all_reduce(total)
    module.log("loss", total)
    return loss + (total - loss.detach())


def in_float(module: Any, batch: Any) -> Tensor:
    return cross_entropy(module.net(batch[0].float()).float(), batch[1]).to(torch.float32)


def one_draw(module: Any, batch: Any) -> Tensor:
    return classified(module, (batch[0] * (0.5 + torch.rand(1)), batch[1]))


def sequence_first(module: Any, batch: Any) -> Tensor:
    return cross_entropy(module.net(batch[0].reshape(-1, 3, 2).transpose(0, 1)).mean(0), batch[1])


def sequences() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.Dropout(0.4), nn.Linear(5, 3))


def case_7(module: Any, batch: Tensor) -> Tensor:
    """Loss w * x, hand-scaled by W / global count."""
    total = torch.tensor(float(len(batch)))
    dist.all_reduce(total)
    return (module.net.w * batch).sum() * world() / total


def case_42(module: Any, batch: Tensor) -> Tensor:
    return (module.net(batch.reshape(-1, 1)) * batch.reshape(-1, 1)).mean()


# Hooks, and optimizers.


def sgd(module: Any, **options: Any) -> Any:
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1, **options})


def grouped(module: Any, other: float) -> Any:
    first, *_, last = module.net
    return torch.optim.SGD([{"params": first.parameters()}, {"params": last.parameters(), "lr": other}], lr=0.1)


def one_cycle(module: Any) -> Any:
    """Adam makes much of gradients that are zero but for rounding, as of a bias before batch norm."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    steps = int(module.trainer.estimated_stepping_batches) + 1
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def halving(module: Any) -> Any:
    optimizer = sgd(module, momentum=0.9, weight_decay=0.1)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def scheduled(module: Any) -> Any:
    trainer, optimizer = module.trainer, sgd(module)
    total = int(trainer.estimated_stepping_batches)
    assert trainer.num_training_batches < 100, "known once the loaders are set up"
    assert len(trainer.train_dataloader) * trainer.max_epochs >= total
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=total)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def on_plateau(module: Any) -> Any:
    optimizer = sgd(module)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def lbfgs(module: Any) -> Any:
    return torch.optim.LBFGS(module.parameters(), max_iter=3)


def divides(module: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= world()


def drifts(module: Any, _: Any, batch_idx: int) -> None:
    """One rank changes a weight on its own."""
    if batch_idx == 1 and rank() == 1:
        module.net[2].weight.data[0, 0] += 1e-3


def averaged(factor: Callable[[], float]) -> Callable[..., None]:
    def ended(module: Any, *_: Any) -> None:
        for mine, yours in zip(module.net.teacher.parameters(), module.net.student.parameters(), strict=True):
            mine.data.lerp_(yours.data, 0.1 * factor())

    return ended


def held(module: Any, *_: Any) -> None:
    module.net.mean.lerp_(module.net.student[0].bias.data, 0.1 * world())


def clamped(module: Any, *_: Any) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.4 / world(), 0.4 / world())


def normalized(_: Any, batch: Any, __: int) -> Any:
    return (batch[0] - batch[0].mean(0)) / batch[0].std(0), batch[1]


def shaken(module: Any, _: Any) -> None:
    """Add noise to the gradients, the same on all ranks."""
    torch.manual_seed(module.global_step)
    for parameter in module.parameters():
        parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)


def reduced_by(change: Callable[[Tensor], Tensor]) -> Callable[..., torch.futures.Future[Tensor]]:
    """Return a communication hook that changes each rank's bucket before they are averaged."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().copy_(change(bucket.buffer())).div_(dist.get_world_size())
        done: Any = dist.all_reduce(buffer, async_op=True)
        return done.get_future().then(lambda done: done.value()[0])

    return hook


# Loaders.


def samples(number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 6, generator=generator), torch.randint(3, (number,), generator=generator)


def batches(sizes: Sequence[int], seed: int = 0) -> list[Any]:
    return list(zip(*(each.split(list(sizes)) for each in samples(sum(sizes), seed)), strict=True))


def dealt(every: Sequence[Any], order: int = 1) -> DataLoader[Any]:
    """Return a loader of these batches, of which one process reads all, and each rank its own in this order."""
    rows: list[Any] = []
    indices = []
    for batch in every:
        each = list(zip(*batch, strict=True)) if isinstance(batch, tuple) else list(batch)
        indices.append(list(range(len(rows), len(rows) + len(each))))
        rows += each
    mine = indices[rank() :: world()][::order] if world() > 1 else indices
    return DataLoader(rows, batch_sampler=mine)  # type: ignore[arg-type]  # a list is a data set


def by_ranks(*sizes: Sequence[int], own: bool = False) -> Loader:
    """Return what makes a loader of batches of these sizes for each rank, of which one process reads all in turn.

    Several processes have samples of their `own`.
    """

    def made() -> DataLoader[Any]:
        first = 10 * own * (world() > 1)
        of_ranks = [batches(each, first + place) for place, each in enumerate(sizes)]
        return dealt([batch for of_step in zip(*of_ranks, strict=True) for batch in of_step])

    return made


def of_rows(*rows: list[float]) -> Loader:
    return lambda: dealt([torch.tensor(row) for row in rows])


def plain(number: int = 32, size: int = 4, **options: Any) -> Loader:
    return lambda: DataLoader(TensorDataset(*samples(number)), size, **options)


def rows_of(rows: Any, collate: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows, **{"batch_size": 4, "collate_fn": collate, **options})


def texts(**options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 9, (32,), generator=generator).tolist()
    rows = [torch.randint(1, 7, (length,), generator=generator) for length in lengths]
    return rows_of(rows, lambda each: pad_sequence(each, True), **options)


def bucketed() -> DataLoader[Any]:
    """Batches of texts of similar lengths; ranks take them in turn."""
    rows: Any = texts().dataset
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    every = [order[start : start + 4] for start in range(0, len(order), 4)]
    return DataLoader(rows, batch_sampler=every[rank() :: world()], collate_fn=texts().collate_fn)


def records() -> DataLoader[Any]:
    x, _ = samples(32)
    rows = [(row, {"boxes": x[index : index + 1 + index % 3, :3]}) for index, row in enumerate(x)]
    return rows_of(rows, lambda each: tuple(zip(*each, strict=True)))


class Graph:
    """A sample, or a batch, of a class that nothing is known of."""

    def __init__(self, nodes: Tensor, graph: Tensor, number: int) -> None:
        self.nodes, self.graph, self.count = nodes, graph, number


def graphs() -> DataLoader[Any]:
    nodes = [each[: 1 + index % 3] for index, each in enumerate(samples(96)[0].split(3))]

    def collated(each: list[Graph]) -> Graph:
        owner = torch.cat([one.graph + index for index, one in enumerate(each)])
        return Graph(torch.cat([one.nodes for one in each]), owner, len(each))

    return rows_of([Graph(one, torch.zeros(len(one)).long(), 1) for one in nodes], collated)


def uncopied() -> DataLoader[Any]:
    """Samples with a function, which cannot be pickled."""
    rows = [(x, y, lambda: 0) for x, y in zip(*samples(32), strict=True)]
    return rows_of(rows, lambda each: default_collate([row[:2] for row in each]))


def masking() -> DataLoader[Any]:
    """Draws in `collate_fn`, as a collator of masked language models does."""

    def collated(each: list[Any]) -> Any:
        x, y = default_collate(each)
        return x * (torch.rand_like(x) > 0.2), y

    return rows_of(TensorDataset(*samples(32)), collated)


class Stream(IterableDataset[Any]):
    """Rows of all, or a part of them by rank and number of ranks."""

    def __init__(self, part: Callable[[int, int], slice]) -> None:
        self.part = part

    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(*samples(32), strict=True))[self.part(rank(), world())])


STREAMS: dict[str, Callable[[int, int], slice]] = {
    "every W-th": lambda rank, world: slice(rank, None, world),
    "halves": lambda rank, world: slice(rank * 32 // world, (rank + 1) * 32 // world),
    "uneven": lambda rank, world: slice(20 * rank, 32 if rank or world == 1 else 20),
    "alike": lambda rank, world: slice(None),
}


def streamed(how: str) -> Loader:
    return lambda: DataLoader(Stream(STREAMS[how]), 4)


def replaced(*, in_batches: bool = False) -> DataLoader[Any]:
    sampler = WeightedRandomSampler([1.0] * 16 + [2.0] * 16, 16, generator=torch.Generator().manual_seed(rank()))
    if in_batches:
        return DataLoader(TensorDataset(*samples(32)), batch_sampler=BatchSampler(sampler, 4, False))
    return plain(sampler=sampler)()


class Permuted(Sampler[int]):
    """Every W-th row of a permutation, which should not depend on the rank."""

    def __len__(self) -> int:
        return 32 // world()

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(32, generator=torch.Generator().manual_seed(rank())).tolist()
        return iter(order[rank() :: world()])


def sharded_by_hand() -> DataLoader[Any]:
    return DataLoader(Subset(TensorDataset(*samples(64)), range(rank(), 64, world())), batch_size=4, shuffle=True)
