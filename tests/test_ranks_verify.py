"""RUNS: healthy runs, runs with one fault each, and some that cannot be judged; real ranks record, one process judges.

Each row shows something that no other row shows: a mechanism of the package, or a way to ask for one.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from orders import Augmented, Graphs
from ranks import RankEnvironment
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.functional import cross_entropy, dropout, softplus
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate
from toys import GATHERS, Toy

from lightning_gradavg import GradAvgStrategy, global_mean
from lightning_gradavg.verify import record
from lightning_gradavg.verify.explain import judge
from lightning_gradavg.verify.run import quiet_options, record_run
from lightning_gradavg.verify.twin import Built

Layers = Callable[[], nn.Module]
OfStep = Callable[[Any, Any], Any]
Loader = Callable[[], Any]


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def of_rank() -> torch.Generator:
    return torch.Generator().manual_seed(rank())


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


def frozen() -> nn.Module:
    return dropped(lambda net: net[0].requires_grad_(requires_grad=False))


def words(part: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 8), nn.Dropout(part), nn.Linear(8, 7))


class Texts(nn.Module):
    """A transformer over padded texts, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.table, self.out = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, batch: Tensor) -> Tensor:
        return self.out(self.rows(self.table(batch), src_key_padding_mask=batch == 0))


# Training steps.


def entropy(call: Callable[[Any, Tensor], Tensor] = lambda net, x: net(x), **options: Any) -> OfStep:
    return lambda module, batch: cross_entropy(call(module.net, batch[0]), batch[1], **options)


classified, summed = entropy(), entropy(reduction="sum")
masked = entropy(ignore_index=0)  # the mean over the samples of other classes, as over tokens


def scaled(factor: Callable[[Any], Any], of: OfStep = classified) -> OfStep:
    return lambda module, batch: factor(module) * of(module, batch)


def weighing(of: OfStep, counted: Callable[[Any], Tensor]) -> OfStep:
    return lambda module, batch: {"loss": of(module, batch), "weight": counted(batch).sum()}


def penalized(of: OfStep) -> OfStep:
    return lambda module, batch: of(module, batch) + 0.3 * sum(one.square().sum() for one in module.parameters())


def by_position(module: Any, batch: Any) -> Tensor:
    """Weigh the first samples of a batch most, whichever these are."""
    losses = entropy(reduction="none")(module, batch)
    return (losses / torch.arange(1, len(losses) + 1)).mean()


def global_means(module: Any, batch: Any) -> Tensor:
    """The loss of every sample, and a penalty of those of a class other than 0, each by its count on all ranks."""
    outputs, counted = module.net(batch[0]), batch[1] != 0
    totals = cross_entropy(outputs, batch[1], reduction="sum"), outputs[counted].square().sum()
    of_all, of_some = global_mean(totals, (len(outputs), counted.sum()))
    return of_all + of_some


def spread(outputs: Tensor) -> Tensor:
    return outputs.var(dim=0, correction=0).sum()


def gathered_at_once(_: Any, rows: Tensor) -> Tensor:
    every = torch.zeros(world() * len(rows), rows.shape[1], dtype=rows.dtype)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(every, rows)  # the new name from torch 2.13 on
    return every


DETACHED: dict[str, Any] = {
    "`self.all_gather`": lambda module, rows: module.all_gather(rows).flatten(0, 1),
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
    (make, critic), (makes, judges) = module.net, module.optimizers()
    made = make(torch.randn(len(batch[0]), 3))
    judges.zero_grad()
    module.manual_backward((softplus(-critic(batch[0])) + softplus(critic(made.detach()))).mean())
    judges.step()
    makes.zero_grad()
    module.manual_backward(softplus(-critic(made)).mean())
    makes.step()


def each_text(module: Any, batch: Tensor) -> Tensor:
    losses = cross_entropy(module.net(batch).transpose(1, 2), batch, reduction="none") * (batch != 0)
    return (losses.sum(1) / (batch != 0).sum(1)).mean()


def each_token(module: Any, batch: Tensor) -> Tensor:
    return cross_entropy(module.net(batch).flatten(0, 1), batch.flatten(), ignore_index=0)


def by_words(module: Any, batch: Tensor) -> Tensor:
    """Draw for one word after the other, and once more for all."""
    rows = torch.stack([dropout(row, 0.1) for row in module.net(batch).unbind(1)], 1)
    return (dropout(rows, 0.1).square().sum(-1) * (batch != 0)).sum(1).mean()


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


def sgd(module: Any, of: Any = torch.optim.SGD, **options: Any) -> Any:
    return of(module.parameters(), **{"lr": 0.1, **options})


def lbfgs(module: Any) -> Any:
    return sgd(module, torch.optim.LBFGS, max_iter=3)


def one_cycle(module: Any) -> Any:
    """Adam makes much of gradients that are zero but for rounding, as of a bias before batch norm."""
    trainer, optimizer = module.trainer, torch.optim.AdamW(module.parameters(), lr=0.01)
    steps = int(trainer.estimated_stepping_batches)
    assert trainer.num_training_batches < 100, "known once the loaders are set up"
    assert len(trainer.train_dataloader) * trainer.max_epochs >= steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps + 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def drifts(module: Any, _: Any, batch_idx: int) -> None:
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


def dealt(every: Iterable[Any], part: Callable[[list[Any]], list[Any]] = in_turn) -> DataLoader[Any]:
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


def plain(number: int = 32, size: int = 4, sampler: Callable[[], Any] = lambda: None, **options: Any) -> Loader:
    return lambda: DataLoader(TensorDataset(*samples(number)), size, sampler=sampler(), **options)


def texts() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 9, (32,), generator=generator).tolist()
    rows: Any = [torch.randint(1, 7, (length,), generator=generator) for length in lengths]
    return DataLoader(rows, 4, collate_fn=lambda each: pad_sequence(each, True))


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


def sharded_by_hand() -> DataLoader[Any]:
    return DataLoader(Subset(TensorDataset(*samples(64)), range(rank(), 64, world())), batch_size=4, shuffle=True)


# Runs.


EVEN, UNEVEN, WINDOWS = by_ranks((4, 4), (4, 4)), by_ranks((6, 4), (2, 2)), by_ranks((4, 4, 4), (4, 4, 4))
ALL, LATER = plain(), by_ranks((4, 6), (4, 2))


class Run:
    """Layers, step, loader, strategy, and hooks and options of the Trainer; and what is to be found.

    A gradient is a `factor` of the right one, and the report `says` all this, in this order.
    """

    verdict, cause, not_shown = "equal", "", ""

    def __init__(
        self,
        make: Layers = layers,
        step: OfStep = classified,
        reads: Loader = EVEN,
        strategy: Callable[[], Any] = DDPStrategy,
        *,
        optimizer: Callable[[Any], Any] = sgd,
        manual: bool = False,
        window: int = 1,
        **given: Any,
    ) -> None:
        self.make, self.step, self.reads, self.strategy = make, step, reads, strategy
        self.steps, self.ranks = given.pop("steps", 2), given.pop("ranks", 2)
        self.tolerance, self.factor = given.pop("tolerance", 1e-8), given.pop("factor", None)
        self.says: Sequence[str] = given.pop("says", ())
        of_trainer = {"use_distributed_sampler": False, "accumulate_grad_batches": window}
        self.given = {**of_trainer, "automatic_optimization": not manual, "configure_optimizers": optimizer, **given}

    def build(self) -> Built:
        hooks = {n: each for n, each in self.given.items() if hasattr(LightningModule, n) or n == "training_step_end"}
        options = {name: each for name, each in self.given.items() if name not in hooks}
        torch.manual_seed(1)
        module = Step(self.make, self.step, **hooks)
        return Built(module, {"train_dataloaders": self.reads()}, quiet_options({"max_epochs": 1, **options}, "cpu"))


def shared(make: Layers = layers, step: OfStep = classified, reads: Loader = ALL, **more: Any) -> Run:
    """Return a run over a loader of which Lightning's sampler deals a part to each rank."""
    return Run(make, step, reads, **{"use_distributed_sampler": True, **more})


def recorded(name: str) -> record.Record:
    module, data, options = RUNS[name].build()
    environment = RankEnvironment()
    options = {
        **options,
        "plugins": [*options["plugins"], environment],
        "devices": environment.ranks_on_node,
    }
    with mock.patch.object(record, "_MOST_SAMPLES", 200):  # so that a stream without an end has one soon
        return record_run(record.Recorder(RUNS[name].steps), RUNS[name].strategy(), options, module, data)


def ours(**options: Any) -> Callable[[], GradAvgStrategy]:
    return lambda: GradAvgStrategy(**options)


def sending(hook: Any, **options: Any) -> Callable[[], GradAvgStrategy]:
    return ours(ddp_comm_hook=hook, **options)


def stock(**options: Any) -> Callable[[], DDPStrategy]:
    return lambda: DDPStrategy(**options)


BY_WEIGHT, BY_SUM, SPLIT = ours(reduction="weighted_mean"), ours(reduction="sum"), ours(split_batches=True)
SINGLE, PARALLEL = ours(equivalent_to="single_device"), ours(equivalent_to="data_parallel")
SCALED = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
TOKENS = weighing(each_token, lambda batch: batch != 0)
COUNTER = scaled(lambda module: next(vars(module).setdefault("factors", iter(range(1, 99)))))

# fmt: off
EQUAL = {
    "case 41": Run(dropped),
    "a sum loss, `sum`": Run(step=summed, reads=LATER, strategy=BY_SUM, steps=1),
    "a sum loss, `normalized_sum`": Run(step=summed, reads=UNEVEN, strategy=ours(reduction="normalized_sum")),
    "global means": Run(step=global_means, reads=UNEVEN),
    "global means of equal weight": Run(
        step=weighing(global_means, lambda batch: torch.ones(())), reads=UNEVEN, strategy=BY_WEIGHT),
    "windows of weighted batches": Run(
        step=weighing(masked, lambda batch: batch[1] != 0), reads=by_ranks((6, 4, 3), (2, 4, 1)), strategy=BY_WEIGHT,
        window=2),
    "dropout, a short last window": Run(dropped, reads=WINDOWS, strategy=GradAvgStrategy, window=2),
    "a short window beyond the steps": Run(reads=WINDOWS, strategy=GradAvgStrategy, window=2, steps=1),
    "dropout, uneven batches, bfloat16": Run(dropped, reads=UNEVEN, strategy=BY_WEIGHT, precision="bf16-mixed"),
    "clipping, float16 with a gradient scaler": Run(plugins=[SCALED], gradient_clip_val=0.1),
    "clipping in manual optimization": Run(step=by_hand(), strategy=GradAvgStrategy, manual=True),
    "a GAN with noise": Run(
        lambda: nn.ModuleList([nn.Linear(3, 6), layers()]), adversarial, strategy=stock(find_unused_parameters=True),
        steps=4, manual=True,
        optimizer=lambda self: [torch.optim.Adam(each.parameters(), 0.01) for each in self.net.children()]),
    "AdamW, one cycle, batch norm on one device": Run(normed, reads=plain(20, 8), strategy=SINGLE, optimizer=one_cycle),
    "a frozen layer, dropout, hooks that read gradients, an average of weights": Run(
        frozen, on_train_start=lambda self: len(self.trainer.train_dataloader),
        on_before_optimizer_step=lambda self, _: [float(each.grad.norm()) for each in self.net[-1].parameters()],
        on_train_batch_end=averaged(lambda: 1.0)),
    "`split_batches` on three ranks": Run(
        reads=plain(20, 7), strategy=SPLIT, steps=3, ranks=3, precision="64-true", tolerance=1e-13),
    "an idle rank": Run(reads=plain(10), strategy=SPLIT, ranks=3, steps=3, precision="64-true"),
    "`split_batches` in pieces, dropout": Run(
        dropped, reads=plain(22, 7), strategy=ours(split_batches=True, max_device_batch_size=2), window=2),
    "`training_step_end`": Run(
        step=lambda module, batch: {"outputs": module.net(batch[0])}, reads=plain(14, 5), strategy=SINGLE,
        training_step_end=lambda _, outputs: spread(outputs["outputs"])),
    "padded texts with their weights, dropout": shared(lambda: words(0.3), TOKENS, texts, strategy=BY_WEIGHT),
    "padded texts, attention, dropout": shared(Texts, each_text, texts),
    "L-BFGS, bucket views": Run(strategy=stock(gradient_as_bucket_view=True), optimizer=lbfgs),
    "batches of a class of their own": shared(
        step=lambda module, batch: classified(module, default_collate(batch.samples)), reads=plain(collate_fn=Graphs)),
    "noise that a data set draws in a worker": shared(
        lambda: nn.Linear(1, 3), lambda module, batch: module.net(batch).square().mean(), augmented,
        says=["samples of the step are those of one process there"]),
    **{f"contrastive, gathered by {way}": shared(step=scores(way)) for way in GATHERS},
    "compiled, dropout": shared(dropped, entropy(lambda net, x: torch.compile(net)(x))),
    "checkpointed, reentrant, dropout": shared(
        dropped, entropy(lambda net, x: checkpoint(net, x.requires_grad_(), use_reentrant=True))),
    **{
        f"a stream, {how} for each": Run(reads=streamed(how), strategy=BY_WEIGHT, steps=4)
        for how in ("every W-th", "uneven parts")
    },
    "a sampler of your own": Run(reads=plain(sampler=lambda: in_turn([*range(32)]))),
}
DIFFERENT = {
    "initial weights": Run(lambda: layers(change=lambda net: net[0].weight.data.mul_(world()))),
    "duplicated stream": Run(reads=streamed("all")),
    "duplicated stream: without an end": Run(reads=streamed("all", cycle)),
    "padding": shared(reads=plain(15)),
    "unread samples: sharded by hand and by the sampler": shared(reads=sharded_by_hand),
    "data order: ranks that read backwards": Run(
        reads=lambda: dealt(batches((4,) * 4), lambda every: in_turn(every)[:: 3 - 2 * world()])),
    "batch norm: case 42": Run(
        lambda: nn.BatchNorm1d(1), lambda module, batch: (module.net(batch) * batch).mean(),
        lambda: dealt(torch.tensor([[[0.0], [2.0]], [[4.0], [6.0]]])), steps=1),
    "batch norm: windows": Run(normed, reads=WINDOWS, strategy=GradAvgStrategy, window=3, steps=1),
    "batch norm: in evaluation, without running statistics": Run(lambda: normed(track_running_stats=False).eval()),
    "non-decomposable loss": Run(step=lambda module, batch: spread(module.net(batch[0]))),
    **{f"detached gather: {way}": shared(step=scores(way)) for way in DETACHED},
    "weighed global mean": Run(step=global_means, reads=UNEVEN, strategy=BY_WEIGHT),
    "weighed global mean: of a sum": Run(step=global_means, strategy=BY_SUM),
    "sum loss": Run(
        step=summed, factor=0.5,
        says=[
            "DIFFERENT, from step 0 on, in the reduced gradient: the loss is a sum over samples",
            "the gradient is 0.5 x that of one process: the loss is a sum over samples", "net.", " on one process",
            "Do: ", '+trainer = Trainer(strategy=GradAvgStrategy(..., reduction="sum"), ...)',
            "differs       from step 0 on: sum loss", "ranks: 2, optimizer steps: 1",
        ]),
    "constant term: an L2 penalty under `sum`": Run(step=penalized(summed), strategy=BY_SUM),
    "mean of means": Run(reads=UNEVEN),
    "mean of means: over tokens": Run(step=masked),
    "mean of means: over tokens of padded texts, with weights": shared(words, TOKENS, texts),
    "counts: class weights": Run(step=entropy(weight=torch.tensor([1.0, 5.0, 2.0])), strategy=BY_WEIGHT),
    "counts: a mean under `sum`": Run(
        reads=UNEVEN, strategy=BY_SUM,
        says=[
            '.sum()\n    -trainer = Trainer(strategy=GradAvgStrategy(..., reduction="sum"), ...)\n',
            '+trainer = Trainer(strategy=GradAvgStrategy(..., reduction="weighted_mean"), ...)',
        ]),
    "short window": Run(reads=WINDOWS, window=2),
    "hand-compensated loss: case 7": Run(
        Toy, case_7, lambda: dealt([torch.ones(3), torch.tensor([5.0])]), BY_WEIGHT, steps=1, factor=0.875,
        says=['with it `reduction="mean"` is right', "net.w is 1.75, but 2 on one process"]),
    "hand-compensated loss: times the ranks, dropout": Run(dropped, scaled(lambda _: world())),
    "hand-compensated loss: a tiny gradient times the ranks": Run(
        lambda: layers(change=lambda net: net[0].bias.register_hook(lambda grad: 1e-9 * world() * grad)),
        says=["net.0.bias is "]),
    "double division: a loss": Run(step=scaled(lambda _: 1 / world())),
    "double division: a communication hook": Run(strategy=sending(reduced_by(lambda sent: sent / 2))),
    "gradient hooks: every rank clips its norm": Run(
        strategy=sending(reduced_by(lambda sent: sent * min(1.0, 0.05 / float(sent.norm()))))),
    "16-bit wire: float16": Run(strategy=sending(fp16_compress_hook)),
    "unsynchronised replicas: a weight": Run(on_train_batch_start=drifts),
    "unsynchronised replicas: past the strategy": Run(step=by_hand(outside=True), manual=True),
    "unsynchronised replicas: rates": Run(optimizer=lambda self: sgd(self, lr=0.1 * (1 + self.global_rank))),
    "learning-rate scale": Run(optimizer=lambda self: sgd(self, lr=0.1 * world(), momentum=0.9)),
    "optimizer options: weight decay": Run(optimizer=lambda self: sgd(self, weight_decay=0.01 * world())),
    "weights beside the gradient: an average": Run(frozen, on_train_batch_end=averaged(world)),
    "buffers of one rank: of its samples": Run(
        lambda: layers(change=lambda net: net.register_buffer("seen", torch.zeros(()))),
        on_train_batch_start=lambda self, batch, _: self.net.seen.add_(len(batch[0])) and None),
    "logged value: summed over the ranks": shared(
        step=summed_value, factor=2.0, says=["in the logged values", "the training is the same"]),
    "unexplained: times the ranks in manual optimization": Run(
        step=by_hand(scaled(lambda _: 0.01 * world())), manual=True, says=["the gradient is 2 x that of one process"]),
    "unexplained: times 1.004": Run(strategy=sending(reduced_by(lambda sent: sent * 1.004)), precision="bf16-mixed"),
}
"""By the cause that is to be named, and what the run does."""

NOT_SHOWN = {
    "trains replicas": Run(normed, reads=plain(14, 7), strategy=PARALLEL),
    "lr_scaling= changes the learning rate": Run(
        reads=plain(16, 8), strategy=ours(lr_scaling="linear", base_batch_size=4, split_batches=True)),
    "a generator of Python or NumPy": Run(step=entropy(lambda net, x: net(x * random.betavariate(1, 1)))),
    "one draw for a whole batch (aten.rand)": shared(step=entropy(lambda net, x: net(x * torch.rand(1)))),
    "one draw for a whole batch (aten.randn_like)": Run(
        on_before_optimizer_step=lambda self, _: [each.grad.add_(torch.randn_like(each)) for each in self.parameters()]
    ),
    "collate_fn draws random numbers": shared(
        reads=plain(collate_fn=lambda rows: default_collate([rows[place] for place in torch.randperm(len(rows))]))),
    "a batch of another size draws other random numbers (aten.bernoulli_)": shared(words, by_words, texts),
    "verify with --single, in float32": Run(
        step=entropy(lambda net, x: net(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()))),
    "one process takes fewer steps than the run": Run(
        on_train_batch_end=lambda self, *_: setattr(self.trainer, "should_stop", world() == 1)),
    "one process takes other optimizer steps in a batch than the run": Run(step=repeated, manual=True),
    "use one DataLoader": shared(
        step=lambda module, batch: classified(module, batch["one"]),
        reads=lambda: {"one": plain()(), "other": plain()()}),
    "no collate_fn makes the loader's batches": Run(reads=lambda: DataLoader(batches((4, 4)), batch_size=None)),
    "a sample cannot be copied": shared(reads=uncopied),
    "transformed at random": Run(reads=lambda: dealt(batches((4,) * 4, seed=world()))),
    "16 of the 32 samples of an epoch are none of the 32 of one process": Run(reads=streamed("halves", moved)),
    "4 of the 8 samples of the step are none of those of one process": Run(
        reads=streamed("every W-th", lambda rows: moved(cycle(rows)))),
    "by a sampler of your own, the ranks leave out": Run(
        reads=plain(sampler=lambda: in_turn(torch.randperm(32, generator=of_rank()).tolist()))),
    "keeps state for every micro-batch": Run(step=COUNTER, reads=WINDOWS, strategy=GradAvgStrategy, window=2),
    "their positions in the batch": Run(step=by_position),
    "the user's own sum": Run(step=by_hand(every=2), reads=WINDOWS, steps=1, manual=True),
    "1 samples of an epoch are read twice": shared(reads=plain(31)),
    "2 micro-batches of 4 samples, whose means DDPStrategy adds up and divides by 4": Run(
        reads=WINDOWS, window=2, steps=1),
}
# fmt: on
"""By what the report is to say."""

for _name, _run in DIFFERENT.items():
    _run.verdict, _run.cause = "different", _name.partition(":")[0]
for _name, _run in NOT_SHOWN.items():
    _run.verdict, _run.not_shown = "not shown", _name
RUNS = EQUAL | DIFFERENT | NOT_SHOWN

# One rank's micro-batch has no samples that count, or its random numbers are its own, which is meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:random numbers drawn in:UserWarning"),
    pytest.mark.filterwarnings("ignore:Found 5 module.s. in eval mode:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:c10d.*an autograd kernel was not registered:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning"),
]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_judged_right(world, name):
    """A healthy run is equal, a fault is named with its factor, and what was not compared is said."""
    run = RUNS[name]
    records = world(run.ranks).run(recorded, name)
    with warnings.catch_warnings(), mock.patch.object(record, "_MOST_SAMPLES", 200):
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")  # advice for a longer run
        report = judge(records, run.build, run.tolerance)
    text, found = str(report), report.first.cause if report.first is not None else ""
    assert (run.verdict, run.cause) == (report.verdict, found), text
    assert run.not_shown in " ".join(report.remarks), text
    assert sorted(map(text.index, run.says)) == list(map(text.index, run.says)), text
    assert run.factor is None or run.factor == pytest.approx(report.first.factor)
