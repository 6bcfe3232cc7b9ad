"""Layers, training steps, hooks and loaders as users write them, for the verification; no test in here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from orders import Augmented
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy, dropout, softplus
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
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


def layers(*middle: nn.Module, change: Callable[[nn.Sequential], Any] = lambda net: None) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))
    change(net)
    return net


def normed(**options: Any) -> nn.Module:
    return layers(nn.BatchNorm1d(8, **options))


def dropped(change: Callable[[nn.Sequential], Any] = lambda net: None) -> nn.Module:
    return layers(nn.Dropout(0.5), change=change)


def hooked(change: Callable[[Tensor], Tensor]) -> Layers:
    """Change gradients in a hook on every parameter."""
    return lambda: dropped(lambda net: [each.register_hook(change) for each in net.parameters()])


def frozen() -> nn.Module:
    return dropped(lambda net: net[0].requires_grad_(requires_grad=False))


def words(part: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 8), nn.Dropout(part), nn.Linear(8, 7))


class Texts(nn.Module):
    """A transformer or a recurrent layer over padded texts, with dropout."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.table, self.rows, self.out = nn.Embedding(7, 8), rows, nn.Linear(8, 7)

    def forward(self, batch: Tensor) -> Tensor:
        rows = self.table(batch)
        attends = isinstance(self.rows, nn.TransformerEncoderLayer)
        return self.out(self.rows(rows, src_key_padding_mask=batch == 0) if attends else self.rows(rows)[0])


def attention() -> nn.Module:
    return Texts(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True))


def recurrent() -> nn.Module:
    return Texts(nn.LSTM(8, 8, num_layers=2, batch_first=True, dropout=0.3))


# Training steps.


def entropy(call: Callable[[Any, Tensor], Tensor] = lambda net, x: net(x), **options: Any) -> OfStep:
    """Return a step that calls the layers in a way of its own."""
    return lambda module, batch: cross_entropy(call(module.net, batch[0]), batch[1], **options)


classified, summed = entropy(), entropy(reduction="sum")
masked = entropy(ignore_index=0)  # the mean over the samples of other classes, as over tokens


def scaled(factor: Callable[[Any], Any], of: OfStep = classified) -> OfStep:
    return lambda module, batch: factor(module) * of(module, batch)


CALLS = count(2)


def weighing(of: OfStep, counted: Callable[[Any], Tensor]) -> OfStep:
    return lambda module, batch: {"loss": of(module, batch), "weight": counted(batch).sum()}


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


def gathered(_: Any, rows: Tensor) -> Tensor:
    every = [torch.zeros_like(rows) for _ in range(world())]
    dist.all_gather(every, rows)
    return torch.cat(every)


def gathered_at_once(_: Any, rows: Tensor) -> Tensor:
    every = torch.zeros(world() * len(rows), rows.shape[1], dtype=rows.dtype)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(every, rows)  # the new name from torch 2.13 on
    return every


DETACHED: dict[str, Any] = {
    "`self.all_gather`": lambda module, rows: module.all_gather(rows).flatten(0, 1),
    "`torch.distributed.all_gather`": gathered,
    "`torch.distributed.all_gather_single`": gathered_at_once,
}
"""All ranks' rows, without gradient."""


def scores(way: str) -> OfStep:
    """A contrastive loss of this rank's rows against those of all, which are gathered in a way."""

    def step(module: Any, batch: Any) -> Tensor:
        rows, other = module.net(batch[0]), module.net(batch[0] + 0.1)
        targets = torch.arange(len(rows)) + (rank() * len(rows) if world() > 1 else 0)
        return cross_entropy(rows @ (GATHERS | DETACHED)[way](module, other).T, targets)

    return step


def by_hand(of: OfStep = classified, *, every: int = 1, outside: bool = False) -> OfStep:
    """Optimize manually, every so many batches; `outside` runs the backward past Lightning."""

    def step(module: Any, batch: Any) -> None:
        optimizer, loss = module.optimizers(), of(module, batch) / every
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
    module.log("loss", classified(module, batch), sync_dist=True)


def adversarial(module: Any, batch: Any) -> None:
    """A generator and a discriminator with an optimizer each."""
    (make, judge), (makes, judges) = module.net, module.optimizers()
    made = make(torch.randn(len(batch[0]), 3))
    judges.zero_grad()
    module.manual_backward((softplus(-judge(batch[0])) + softplus(judge(made.detach()))).mean())
    judges.step()
    makes.zero_grad()
    module.manual_backward(softplus(-judge(made)).mean())
    makes.step()


def counts(module: Any, batch: Any) -> Tensor:
    module.net.seen += len(batch[0])
    return classified(module, batch)


def last_word(module: Any, batch: Tensor) -> Tensor:
    last = (batch != 0).sum(1) - 1
    return cross_entropy(module.net(batch)[torch.arange(len(batch)), last], batch[:, 0])


def each_text(module: Any, batch: Tensor) -> Tensor:
    losses = cross_entropy(module.net(batch).transpose(1, 2), batch, reduction="none") * (batch != 0)
    return (losses.sum(1) / (batch != 0).sum(1)).mean()


def each_token(module: Any, batch: Tensor) -> Tensor:
    return cross_entropy(module.net(batch).flatten(0, 1), batch.flatten(), ignore_index=0)


def by_words(module: Any, batch: Tensor) -> Tensor:
    """Draw for one word after the other, and once more for all."""
    rows = torch.stack([dropout(row, 0.1) for row in module.net(batch).unbind(1)], 1)
    return (dropout(rows, 0.1).square().sum(-1) * (batch != 0)).sum(1).mean()


def reads_data(module: Any, batch: Any) -> Tensor:
    assert len(module.trainer.train_dataloader.dataset) == 32
    module.logger.experiment.add_scalar("seen", 1.0)
    return classified(module, batch)


def in_float(module: Any, batch: Any) -> Tensor:
    loss = cross_entropy(module.net(batch[0].float()).float(), batch[1]).to(torch.float32)
    module.log("loss", loss, sync_dist=True)
    return loss


def summed_value(module: Any, batch: Any) -> Tensor:
    """Return a loss whose value is the sum over the ranks, and whose gradient is that of this rank."""
    loss = classified(module, batch)
    total = loss.detach().clone()
    dist.all_reduce(total)
    module.log("loss", total)
    return loss + (total - loss.detach())


def case_7(module: Any, batch: Tensor) -> Tensor:
    """Loss w * x, hand-scaled by W / global count."""
    total = torch.tensor(float(len(batch)))
    dist.all_reduce(total)
    return module.net.losses(batch).sum() * world() / total


# Hooks, and optimizers.


def sgd(module: Any, **options: Any) -> Any:
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1, **options})


def grouped(module: Any, other: float) -> Any:
    first, *_, last = module.net
    return torch.optim.SGD([{"params": first.parameters()}, {"params": last.parameters(), "lr": other}], lr=0.1)


def one_cycle(module: Any) -> Any:
    """Adam makes much of gradients that are zero but for rounding, as of a bias before batch norm."""
    trainer, optimizer = module.trainer, torch.optim.AdamW(module.parameters(), lr=0.01)
    steps = int(trainer.estimated_stepping_batches)
    assert trainer.num_training_batches < 100, "known once the loaders are set up"
    assert len(trainer.train_dataloader) * trainer.max_epochs >= steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps + 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def halving(module: Any) -> Any:
    """Lower the rate with every epoch, and by a metric of the validation."""
    optimizer = sgd(module, momentum=0.9, weight_decay=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return [optimizer], [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        {"scheduler": plateau, "monitor": "val_loss"},
    ]


def lbfgs(module: Any) -> Any:
    return torch.optim.LBFGS(module.parameters(), max_iter=3)


def drifts(module: Any, _: Any, batch_idx: int) -> None:
    """One rank changes a weight on its own."""
    if batch_idx == 1 and rank() == 1:
        module.net[2].weight.data[0, 0] += 1e-3


def averaged(factor: Callable[[], float]) -> Callable[..., Any]:
    """Keep an average of weights in a layer without gradients."""
    return lambda module, *_: module.net[0].bias.data.lerp_(module.net[-1].weight.data.mean(0), 0.1 * factor())


def reduced_by(change: Callable[[Tensor], Tensor]) -> Callable[..., torch.futures.Future[Tensor]]:
    """Return a communication hook that changes each rank's bucket before they are averaged."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        bucket.set_buffer(change(bucket.buffer()))
        return allreduce_hook(state, bucket)

    return hook


# Loaders.


def samples(number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 6, generator=generator), torch.randint(3, (number,), generator=generator)


def batches(sizes: Sequence[int], seed: int = 0) -> list[Any]:
    return list(zip(*(each.split(list(sizes)) for each in samples(sum(sizes), seed)), strict=True))


def in_turn(every: list[Any]) -> list[Any]:
    return every[rank() :: world()]


def half(every: list[Any]) -> list[Any]:
    return every[rank() * len(every) // world() :][: len(every) // world()]


def backwards(every: list[Any]) -> list[Any]:
    return in_turn(every)[:: -1 if world() > 1 else 1]


def dealt(every: Sequence[Any], part: Callable[[list[Any]], list[Any]] = in_turn) -> DataLoader[Any]:
    """Return a loader of these batches, of which one process reads all, and each rank a part."""
    rows: list[Any] = []
    indices = []
    for batch in every:
        each = list(zip(*batch, strict=True)) if isinstance(batch, tuple) else list(batch)
        indices.append(list(range(len(rows), len(rows) + len(each))))
        rows += each
    return DataLoader(rows, batch_sampler=part(indices))


def by_ranks(*sizes: Sequence[int]) -> Loader:
    """Return what makes a loader of batches of these sizes for each rank, of which one process reads all in turn."""
    of_ranks = [batches(each, place) for place, each in enumerate(sizes)]
    return lambda: dealt([batch for of_step in zip(*of_ranks, strict=True) for batch in of_step])


def of_rows(*rows: list[Any]) -> Loader:
    return lambda: dealt([torch.tensor(row) for row in rows])


def plain(number: int = 32, size: int = 4, **options: Any) -> Loader:
    return lambda: DataLoader(TensorDataset(*samples(number)), size, **options)


def texts(size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 9, (32,), generator=generator).tolist()
    rows: Any = [torch.randint(1, 7, (length,), generator=generator) for length in lengths]
    return DataLoader(rows, size, collate_fn=lambda each: pad_sequence(each, True))


def uncopied() -> DataLoader[Any]:
    """Samples with a function, which cannot be pickled."""
    rows: Any = [(x, y, lambda: 0) for x, y in zip(*samples(32), strict=True)]
    return DataLoader(rows, 4, collate_fn=lambda each: default_collate([row[:2] for row in each]))


def augmented() -> DataLoader[Any]:
    """Samples with noise from every generator, which a worker draws."""
    return DataLoader(
        Augmented(), 4, num_workers=1, collate_fn=lambda rows: torch.stack([noise.sum() for _, noise in rows])[:, None]
    )


class Stream(IterableDataset[Any]):
    """Rows of all, or a part of them by rank and number of ranks."""

    def __init__(self, part: Callable[[int, int], slice], read: Callable[[Any], Iterator[Any]]) -> None:
        self.part, self.read = part, read

    def __iter__(self) -> Iterator[Any]:
        return self.read(list(zip(*samples(32), strict=True))[self.part(rank(), world())])


PARTS: dict[str, Callable[[int, int], slice]] = {
    "every W-th": lambda rank, world: slice(rank, None, world),
    "halves": lambda rank, world: slice(rank * 32 // world, (rank + 1) * 32 // world),
    "uneven parts": lambda rank, world: slice(20 * rank, 32 if rank or world == 1 else 20),
    "all": lambda rank, world: slice(None),
}


def streamed(how: str, read: Callable[[Any], Iterator[Any]] = iter) -> Loader:
    return lambda: DataLoader(Stream(PARTS[how], read), 4)


def moved(rows: Iterable[Any], by: float = 0.0) -> Iterator[Any]:
    """Yield other rows on every rank but the first, and `by` something on all."""
    return ((x + by + rank(), y) for x, y in rows)


def sampled(sampler: Callable[[], Any]) -> Loader:
    """Return what makes a loader with a sampler of the user's own."""
    return lambda: DataLoader(TensorDataset(*samples(32)), 4, sampler=sampler())


def replacing() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * 16 + [2.0] * 16, 16, generator=torch.Generator().manual_seed(rank()))


def replacing_in_batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples(32)), batch_sampler=BatchSampler(replacing(), 4, False))


def permuted() -> list[int]:
    """Every W-th row of a permutation, which should not depend on the rank."""
    return in_turn(torch.randperm(32, generator=torch.Generator().manual_seed(rank())).tolist())


def sharded_by_hand() -> DataLoader[Any]:
    return DataLoader(Subset(TensorDataset(*samples(64)), range(rank(), 64, world())), batch_size=4, shuffle=True)
