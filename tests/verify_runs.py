"""Runs for the verification: with one fault each, healthy ones, and some that cannot be judged; no test in here.

The names of `RUNS` are the lines of the tables in docs/verify.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import verify_modules as m
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from ranks import rank_environment
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy, gather
from lightning_gradavg.verify.explain import judge
from lightning_gradavg.verify.record import Tape
from lightning_gradavg.verify.report import Report
from lightning_gradavg.verify.run import Settings, quiet_options, record_run

FEATURES, CLASSES = 6, 3
Batch = tuple[Tensor, Tensor]


class Sgd(LightningModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Net(Sgd):
    """Two layers with a mean loss; `loss` is "mean" or "sum", `middle` stands between the layers."""

    def __init__(self, loss: str = "mean", *middle: nn.Module) -> None:
        super().__init__()
        self.loss = loss
        self.model = nn.Sequential(nn.Linear(FEATURES, 8), *middle, nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y, reduction=self.loss)


def normed(**options: Any) -> Net:
    return Net("mean", nn.BatchNorm1d(8, **options))


def dropped(loss: str = "mean") -> Net:
    return Net(loss, nn.Dropout(0.5))


def with_step(step: Callable[..., Any], module: Callable[[], Net] = Net) -> Callable[[], Net]:
    """Return what builds a module with another training step, which gets the module's own as its first argument."""

    def build() -> Net:
        built = module()
        own: Any = type(built).training_step

        def training_step(self: Any, batch: Batch, batch_idx: int) -> Any:
            return step(self, lambda changed: own(self, changed, batch_idx), batch, batch_idx)

        built.__class__ = type("WithStep", (type(built),), {"training_step": training_step})
        return built

    return build


def with_optimizer(make: Callable[[Any], Any], module: Callable[[], LightningModule] = Net) -> Callable[[], Any]:
    def build() -> Any:
        built = module()
        built.__class__ = type("WithOptimizer", (type(built),), {"configure_optimizers": make})
        return built

    return build


def noisy(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    return own((batch[0] + torch.randn_like(batch[0]), batch[1]))


def masked(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    """The mean over the samples of classes other than 0, as over tokens that are not padding."""
    return nn.functional.cross_entropy(self(batch[0]), batch[1], ignore_index=0)


def weighted(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    return {"loss": masked(self, own, batch, batch_idx), "weight": (batch[1] != 0).sum()}


def class_weighted(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    return nn.functional.cross_entropy(self(batch[0]), batch[1], weight=torch.tensor([1.0, 5.0, 2.0]))


def compensated(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    """Undoes what stock DDP does, as scripts of all ages do: local sum x W / global count."""
    count = torch.tensor(float(len(batch[0])))
    dist.all_reduce(count)
    return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="sum") * m.world() / count


def divided(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    return own(batch) / m.world()


def multiplied(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    return own(batch) * m.world()


def multiplied_late(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    return own(batch) * (m.world() if batch_idx == 1 else 1)


def spread(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    return self(batch[0]).var(dim=0, correction=0).sum()


def info_nce(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    rows = self(batch[0])
    return nn.functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)).roll(1))


def contrastive(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    """Each row against all rows of all ranks."""
    rows = self(batch[0])
    start = dist.get_rank() * len(rows)
    return nn.functional.cross_entropy(rows @ gather(rows).T, torch.arange(start, start + len(rows)))


def mixed_up(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    (x, y), part = batch, np.random.beta(1, 1)  # noqa: NPY002  # the generator that users' code draws from
    order = torch.randperm(len(x))
    outputs = self(part * x + (1 - part) * x[order])
    losses = (nn.functional.cross_entropy(outputs, target) for target in (y, y[order]))
    first, other = losses
    return part * first + (1 - part) * other


def penalized(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    return own(batch) + 0.3 * sum(parameter.square().sum() for parameter in self.parameters())


def by_index(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    return own(batch) * (1 + batch_idx)


def by_average(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    """Divides the loss by its moving average."""
    loss = own(batch)
    self.average = 0.9 * getattr(self, "average", 1.0) + 0.1 * float(loss.detach())
    return loss / self.average


def by_count(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    """Warms up with the number of steps, kept in an attribute."""
    self.count = getattr(self, "count", 0) + 1
    return own(batch) * min(1.0, self.count / 10)


def by_position(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    """Weights the first samples of a batch most, whichever these are."""
    losses = nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")
    return (losses / torch.arange(1, len(losses) + 1)).mean()


CALLS = 0


def by_global(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    global CALLS  # noqa: PLW0603  # as scripts do
    CALLS += 1
    return own(batch) * (1 + CALLS)


def by_iterator(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    if not hasattr(self, "factors"):
        self.factors = iter(range(1, 1000))
    return own(batch) * next(self.factors)


def named_terms(self: Any, own: Any, batch: Batch, batch_idx: int) -> Any:
    """A loss per sample and one per sample of a class other than 0, each with its own weight."""
    outputs, counted = self(batch[0]), batch[1] != 0
    some = outputs[counted].square().sum() / counted.sum()
    return {
        "loss": {"all": nn.functional.cross_entropy(outputs, batch[1]), "some": some},
        "weight": {"all": len(batch[1]), "some": counted.sum()},
    }


class Hooked(Net):
    """Changes gradients in a hook on every parameter."""

    def __init__(self, change: Callable[[Tensor], Tensor], *middle: nn.Module) -> None:
        super().__init__("mean", *middle)
        for parameter in self.parameters():
            parameter.register_hook(change)


class DividesAfterwards(Net):
    """Divides the reduced gradients by the number of ranks."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad /= m.world()


class SpreadOfAll(Net):
    """A loss over the outputs of all replicas."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return {"outputs": self(batch[0])}

    def training_step_end(self, outputs: Any) -> Any:
        return outputs["outputs"].var(dim=0, correction=0).sum()


class Drifting(Net):
    """One rank changes a weight on its own."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and dist.get_rank() == 1:
            self.model[2].weight.data[0, 0] += 1e-3


class Manual(Net):
    """Manual optimization; `outside` runs the backward past Lightning, `every` accumulates so many batches."""

    def __init__(self, *, outside: bool = False, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization, self.outside, self.every = False, outside, every

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = nn.functional.cross_entropy((self.model if self.outside else self)(batch[0]), batch[1]) / self.every
        if batch_idx % self.every == 0:
            optimizer.zero_grad()
        if self.outside:
            with self.trainer.strategy.model.no_sync() if m.world() > 1 else nullcontext():
                loss.backward()
        else:
            self.manual_backward(loss)
        if (batch_idx + 1) % self.every == 0:
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()


class Gan(LightningModule):
    """A generator and a discriminator with an optimizer each; `factor` multiplies both losses, 0 for the ranks."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.automatic_optimization, self.factor = False, factor
        self.make = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, FEATURES))
        self.judge = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        makes, judges = self.optimizers()  # type: ignore[attr-defined, misc]  # two
        factor, made = self.factor or m.world(), self.make(torch.randn(len(batch[0]), 3))
        loss = nn.functional.softplus(-self.judge(batch[0])) + nn.functional.softplus(self.judge(made.detach()))
        judges.zero_grad()
        self.manual_backward(factor * loss.mean())
        judges.step()
        makes.zero_grad()
        self.manual_backward(factor * nn.functional.softplus(-self.judge(made)).mean())
        makes.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.make, self.judge)]


class TwoOptimizers(Net):
    """Steps twice in each batch, with an optimizer per layer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.model[layer].parameters(), lr=0.1) for layer in (0, 2)]


class Moco(LightningModule):
    """A momentum encoder, and a queue of keys in a buffer; `gathers` those of all ranks."""

    queue: Tensor
    place: Tensor

    def __init__(self, *, gathers: bool = True) -> None:
        super().__init__()
        self.gathers, self.of_queries, self.of_keys = gathers, nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 4)
        self.of_keys.requires_grad_(requires_grad=False)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(32, 4)))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for new, old in zip(self.of_queries.parameters(), self.of_keys.parameters(), strict=True):
                old.data = 0.9 * old.data + 0.1 * new.data
            keys = nn.functional.normalize(self.of_keys(batch[0] + 0.1))
        queries = nn.functional.normalize(self.of_queries(batch[0]))
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.T.clone()], 1)
        every = [torch.zeros_like(keys) for _ in range(m.world())]
        if self.gathers:
            dist.all_gather(every, keys)
        keys, start = torch.cat(every) if self.gathers else keys, int(self.place)
        self.queue[start : start + len(keys)] = keys
        self.place[0] = (start + len(keys)) % 32
        return nn.functional.cross_entropy(5 * scores, torch.zeros(len(queries), dtype=torch.long))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.of_queries.parameters(), lr=0.1)


class ClippedByRanks(Net):
    """Clips to a part of the value for every rank."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.1 / m.world(), "norm")


class Counting(Net):
    """Counts the samples that this rank has seen, in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.seen += len(batch[0])
        return super().training_step(batch, batch_idx)


class OtherStart(Net):
    """Initializes other weights where there are several processes."""

    def __init__(self) -> None:
        if m.world() > 1:
            torch.manual_seed(2)
        super().__init__()


class Sparse(LightningModule):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 4, sparse=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return (self.table(batch[1]) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(list(self.parameters()), lr=0.1)


class Asking(Net):
    """Asks for what is there in a run, and not everywhere else."""

    def on_train_start(self) -> None:
        self.length = len(self.trainer.train_dataloader)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm = [float(parameter.grad.norm()) for parameter in self.parameters()]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Texts(Sgd):
    """The loss of the tokens that are not padding, in texts of other lengths in every batch."""

    def __init__(self, loss: str = "mean", *, says: bool = False, drops: float = 0.0, by_text: bool = False) -> None:
        super().__init__()
        self.loss, self.says, self.by_text = loss, says, by_text
        self.table, self.drop, self.out = nn.Embedding(7, 3), nn.Dropout(drops), nn.Linear(3, 7)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        outputs, real = self.out(self.drop(self.table(batch)).tanh()), batch != 0
        losses = nn.functional.cross_entropy(outputs.transpose(1, 2), (batch + 1) % 7, reduction="none") * real
        if self.by_text:
            return (losses.sum(1) / real.sum(1)).mean()
        loss = losses.sum() / (real.sum() if self.loss == "mean" else 1)
        return {"loss": loss, "weight": real.sum()} if self.says else loss


class CaseSeven(Sgd):
    """Case 7: loss w * x, hand-scaled by W / global count."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        count = torch.tensor(float(len(batch)))
        dist.all_reduce(count)
        return (self.w * batch).sum() * m.world() / count


class CaseFortyTwo(Sgd):
    """Case 42: BatchNorm1d(1) on {0, 2} and {4, 6}."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.norm(batch.reshape(-1, 1)) * batch.reshape(-1, 1)).mean()


def sgd(self: Any, **options: Any) -> Any:
    return torch.optim.SGD(self.parameters(), **{"lr": 0.1, **options})


def grouped(self: Any, other: float) -> Any:
    first, *_, last = self.model
    return torch.optim.SGD([{"params": first.parameters()}, {"params": last.parameters(), "lr": other}], lr=0.1)


def one_cycle(self: Any) -> Any:
    """Adam makes much of gradients that are zero but for rounding, as of a bias before batch norm."""
    optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
    steps = int(self.trainer.estimated_stepping_batches) + 1
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def halving(self: Any) -> Any:
    optimizer = sgd(self, momentum=0.9, weight_decay=0.1)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def reduced_by(change: Callable[[Tensor], Tensor]) -> Callable[..., torch.futures.Future[Tensor]]:
    """Return a communication hook that changes each rank's bucket before they are averaged."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().copy_(change(bucket.buffer())).div_(dist.get_world_size())
        summed = dist.all_reduce(buffer, async_op=True).get_future()
        result: torch.futures.Future[Tensor] = summed.then(lambda done: done.value()[0])
        return result

    return hook


def samples(count: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def batches(sizes: Sequence[int], seed: int = 0) -> list[Batch]:
    x, y = samples(sum(sizes), seed)
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def of_rank(*rows: Any) -> Callable[[int], Any]:
    """Return what makes the batches of a rank: tensors of the given rows."""
    return lambda rank: [torch.tensor(batch) for batch in rows[rank]]


@dataclass(frozen=True)
class Run:
    """A run, and what is to be found.

    `data` is the number of samples of one data set, a function of the rank that returns its batches, or None for
    batches of the given `sizes` on each.
    """

    module: Callable[[], LightningModule] = Net
    sizes: Sequence[Sequence[int]] = ((4, 4), (4, 4))
    strategy: Callable[[], Any] = DDPStrategy
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 2
    data: int | Callable[[int], Any] | None = None
    batch_size: int = 4
    cause: str = ""
    not_shown: str = ""
    reads: Callable[[], Any] | None = None  # makes the same loader on all ranks, as a user does

    @property
    def verdict(self) -> str:
        return "different" if self.cause else "not shown" if self.not_shown else "equal"

    def build(self) -> LightningModule:
        torch.manual_seed(1)
        return self.module()

    def loader(self) -> Any:
        """Return this rank's loader; that of one process reads all ranks' batches in turn."""
        if self.reads is not None:
            return self.reads()
        if isinstance(self.data, int):
            return DataLoader(TensorDataset(*samples(self.data)), batch_size=self.batch_size)
        make: Any = self.data or (lambda rank: batches(self.sizes[rank], seed=rank))
        of_ranks = [list(make(rank)) for rank in range(len(self.sizes))]
        return dealt([batch for of_step in zip(*of_ranks, strict=True) for batch in of_step], len(of_ranks))


def dealt(every: Sequence[Any], ranks: int, order: int = 1) -> DataLoader[Any]:
    """Return a loader of these batches, of which one process reads all, and each rank its own in this order."""
    rows: list[Any] = []
    indices = []
    for batch in every:
        held = list(zip(*batch, strict=True)) if isinstance(batch, tuple) else list(batch)
        indices.append(range(len(rows), len(rows) + len(held)))
        rows += held
    mine = indices[m.rank() :: ranks][::order] if m.world() > 1 else indices
    return DataLoader(rows, batch_sampler=[list(each) for each in mine])  # type: ignore[arg-type]  # a list is a data set


def options_of(run: Run) -> dict[str, Any]:
    return quiet_options({"max_epochs": 1, "use_distributed_sampler": False, **run.options}, "cpu")


def recorded(name: str) -> Tape:
    """Body: record a run on this rank."""
    run, environment = RUNS[name], rank_environment()
    options = options_of(run)
    options["plugins"] = [*options["plugins"], environment]
    options["devices"] = environment.ranks_on_node
    settings = Settings(steps=run.steps)
    return record_run(run.strategy(), options, run.build(), {"train_dataloaders": run.loader()}, settings)


def judged(name: str, tapes: Sequence[Tape], tolerance: float = 1e-8) -> Report:
    """Return what one process makes of a recorded run."""
    run = RUNS[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")  # advice for a longer run
        return judge(tapes, lambda: (run.build(), {"train_dataloaders": run.loader()}, options_of(run)), tolerance)


def gradavg(**options: Any) -> Callable[[], GradAvgStrategy]:
    return lambda: GradAvgStrategy(**options)


def unused() -> DDPStrategy:
    return DDPStrategy(find_unused_parameters=True)


UNEVEN = ((6, 4), (2, 4))
WINDOWS = ((4, 4, 4), (4, 4, 4))
TWO: dict[str, Any] = {"accumulate_grad_batches": 2}
BY_WEIGHT, BY_SUM, SPLIT = gradavg(reduction="weighted_mean"), gradavg(reduction="sum"), gradavg(split_batches=True)
SINGLE, PARALLEL = gradavg(equivalent_to="single_device"), gradavg(equivalent_to="data_parallel")
SCALED = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
SHUFFLED: dict[str, Any] = {"use_distributed_sampler": True}
UNDEALT: dict[str, Any] = {"use_distributed_sampler": False}
TEXTS: dict[str, Any] = {"reads": m.texts, "options": SHUFFLED}

RUNS = {
    # Equal.
    "stock DDP": Run(),
    "`GradAvgStrategy()`": Run(strategy=GradAvgStrategy),
    "stock DDP with a shuffling sampler": Run(data=16, options=SHUFFLED),
    "a mean over uneven batches, `weighted_mean`": Run(Net, UNEVEN, BY_WEIGHT),
    "a mean over tokens, with its weight": Run(with_step(weighted), UNEVEN, BY_WEIGHT),
    "a sum loss, `sum`": Run(lambda: Net("sum"), UNEVEN, BY_SUM),
    "a sum loss, `normalized_sum`": Run(lambda: Net("sum"), UNEVEN, gradavg(reduction="normalized_sum")),
    "named loss terms": Run(with_step(named_terms), UNEVEN, BY_WEIGHT),
    "a short last window, `GradAvgStrategy()`": Run(Net, WINDOWS, GradAvgStrategy, TWO),
    "windows of weighted batches": Run(with_step(weighted), ((6, 4, 3), (2, 4, 1)), BY_WEIGHT, TWO),
    "gradient clipping": Run(options={"gradient_clip_val": 0.1}),
    "manual optimization": Run(Manual, strategy=GradAvgStrategy),
    "two optimizers": Run(TwoOptimizers, strategy=GradAvgStrategy, steps=4),
    "a GAN with noise": Run(Gan, strategy=unused, steps=4),
    "AdamW, one cycle, batch norm on one device": Run(
        with_optimizer(one_cycle, normed), strategy=SINGLE, data=20, batch_size=8
    ),
    "momentum, weight decay, three epochs": Run(with_optimizer(halving), options={"max_epochs": 3}, steps=5),
    "`split_batches`": Run(strategy=SPLIT, data=14, batch_size=5, steps=3),
    "`split_batches` in pieces": Run(
        strategy=gradavg(split_batches=True, max_device_batch_size=2), options=TWO, data=22, batch_size=7
    ),
    "a contrastive loss with `gather`": Run(with_step(contrastive)),
    "`data_parallel`, batch norm": Run(normed, strategy=PARALLEL, data=14, batch_size=7, not_shown="trains replicas"),
    "`reproducible`, four replicas on two ranks": Run(
        normed, strategy=gradavg(reproducible=True, num_replicas=4), data=16, batch_size=8, not_shown="trains replicas"
    ),
    "`single_device`, batch norm": Run(normed, strategy=SINGLE, data=14, batch_size=5),
    "`single_device`, `training_step_end`": Run(SpreadOfAll, strategy=SINGLE, data=14, batch_size=5),
    "a learning rate scaled by `lr_scaling`": Run(
        strategy=gradavg(lr_scaling="linear", base_batch_size=4, split_batches=True),
        data=16,
        batch_size=8,
        not_shown="lr_scaling= changes the learning rate",
    ),
    "unused parameters, bucket views": Run(
        lambda: Net("mean", nn.PReLU(8, device="cpu")),
        strategy=lambda: DDPStrategy(gradient_as_bucket_view=True, find_unused_parameters=True),
    ),
    "a static graph, dropout": Run(dropped, strategy=lambda: DDPStrategy(static_graph=True)),
    "dropout, uneven batches, `weighted_mean`": Run(dropped, UNEVEN, BY_WEIGHT),
    "dropout, windows": Run(dropped, WINDOWS, GradAvgStrategy, TWO),
    "dropout, `single_device`": Run(dropped, strategy=SINGLE, data=14, batch_size=5),
    "dropout, `data_parallel`": Run(dropped, strategy=PARALLEL, data=14, batch_size=5, not_shown="trains replicas"),
    "noise drawn in `training_step`": Run(with_step(noisy), UNEVEN, BY_WEIGHT),
    "mixup": Run(with_step(mixed_up), not_shown="a generator of Python or NumPy"),
    "padded texts with their weights, dropout": Run(lambda: Texts(says=True, drops=0.3), strategy=BY_WEIGHT, **TEXTS),
    "padded texts, a sum loss, `sum`": Run(lambda: Texts("sum"), strategy=BY_SUM, **TEXTS),
    "padded texts, a mean over texts": Run(lambda: Texts(by_text=True), **TEXTS),
    "an L2 penalty in a mean loss": Run(with_step(penalized)),
    "a step counter in an attribute": Run(with_step(by_count)),
    "a loss of `batch_idx`": Run(with_step(by_index)),
    "spectral norm": Run(lambda: _with_spectral_norm(Net())),
    "a momentum encoder and a queue of all ranks' keys": Run(Moco),
    "sparse gradients, SparseAdam": Run(Sparse),
    "hooks that read gradients, the loader, a validation metric": Run(Asking, options={"max_epochs": 3}, steps=3),
    "bfloat16 mixed precision, dropout": Run(dropped, UNEVEN, BY_WEIGHT, {"precision": "bf16-mixed"}),
    "float16 with a gradient scaler": Run(options={"plugins": [SCALED]}),
    "bfloat16 weights": Run(options={"precision": "bf16-true"}),
    # Different.
    "other initial weights on several processes": Run(OtherStart, cause="initial weights"),
    "one stream on all ranks": Run(data=16, cause="duplicated stream"),
    "samples repeated to fill the ranks": Run(data=15, options=SHUFFLED, cause="padding"),
    "batch norm": Run(normed, cause="batch norm"),
    "batch norm, dropout": Run(lambda: Net("mean", nn.BatchNorm1d(8), nn.Dropout(0.5)), cause="batch norm"),
    "batch norm in windows": Run(
        normed, WINDOWS, GradAvgStrategy, {"accumulate_grad_batches": 3}, 1, cause="batch norm"
    ),
    "batch norm without running statistics": Run(lambda: normed(track_running_stats=False), cause="batch norm"),
    "batch norm and uneven batches": Run(normed, UNEVEN, cause="batch norm"),
    "a loss that compares samples": Run(with_step(spread), cause="non-decomposable loss"),
    "InfoNCE on each rank, dropout": Run(with_step(info_nce, dropped), cause="non-decomposable loss"),
    "a sum loss": Run(lambda: Net("sum"), cause="sum loss"),
    "a sum loss, dropout": Run(lambda: dropped("sum"), cause="sum loss"),
    "a sum loss, bfloat16": Run(lambda: Net("sum"), options={"precision": "bf16-mixed"}, cause="sum loss"),
    "a sum loss over padded texts": Run(lambda: Texts("sum"), **TEXTS, cause="sum loss"),
    "an L2 penalty under `sum`": Run(with_step(penalized, lambda: Net("sum")), strategy=BY_SUM, cause="constant term"),
    "an L2 penalty in a sum loss": Run(with_step(penalized, lambda: Net("sum")), cause="constant term"),
    "uneven batches": Run(Net, UNEVEN, cause="mean of means"),
    "uneven batches, noise": Run(with_step(noisy), UNEVEN, cause="mean of means"),
    "a mean over tokens": Run(with_step(masked), cause="mean of means"),
    "a mean over tokens of padded texts, with weights": Run(lambda: Texts(says=True), **TEXTS, cause="mean of means"),
    "class weights": Run(with_step(class_weighted), cause="mean of means"),
    "class weights under `weighted_mean`": Run(with_step(class_weighted), strategy=BY_WEIGHT, cause="counts"),
    "a mean over tokens weighted by samples": Run(with_step(masked), UNEVEN, BY_WEIGHT, cause="counts"),
    "a mean under `sum`": Run(Net, UNEVEN, BY_SUM, cause="counts"),
    "a short last window": Run(Net, WINDOWS, options=TWO, cause="short window"),
    "a loss compensated by hand under `weighted_mean`": Run(
        with_step(compensated), UNEVEN, BY_WEIGHT, cause="hand-compensated loss"
    ),
    "a loss multiplied by the ranks, dropout": Run(with_step(multiplied, dropped), cause="hand-compensated loss"),
    "a loss multiplied by the ranks in the second step": Run(
        with_step(multiplied_late), ((4,) * 4, (4,) * 4), steps=3, cause="hand-compensated loss"
    ),
    "a GAN multiplied by the ranks": Run(lambda: Gan(0), strategy=unused, steps=4, cause="unexplained"),
    "a loss divided by the ranks": Run(with_step(divided), cause="double division"),
    "a communication hook that divides again": Run(
        strategy=gradavg(ddp_comm_hook=reduced_by(lambda bucket: bucket / 2)), cause="double division"
    ),
    "a communication hook that divides again under `sum`": Run(
        lambda: Net("sum"),
        strategy=gradavg(reduction="sum", ddp_comm_hook=reduced_by(lambda bucket: bucket / 2)),
        cause="double division",
    ),
    "a hook on parameters that divides, dropout": Run(
        lambda: Hooked(lambda grad: grad / m.world(), nn.Dropout(0.5)), cause="double division"
    ),
    "gradients divided after the reduction": Run(DividesAfterwards, cause="double division"),
    "every rank clips its norm": Run(
        strategy=gradavg(ddp_comm_hook=reduced_by(lambda bucket: bucket * min(1.0, 0.05 / float(bucket.norm())))),
        cause="gradient hooks",
    ),
    "every rank clips its values": Run(
        strategy=gradavg(ddp_comm_hook=reduced_by(lambda bucket: bucket.clamp(-0.01, 0.01))),
        cause="gradient hooks",
    ),
    "a hook on parameters that clips": Run(
        lambda: Hooked(lambda grad: grad.clamp(-0.01, 0.01)), cause="non-decomposable loss"
    ),
    "gradients sent as float16": Run(strategy=gradavg(ddp_comm_hook=fp16_compress_hook), cause="16-bit wire"),
    "gradients sent as bfloat16": Run(strategy=gradavg(ddp_comm_hook=bf16_compress_hook), cause="16-bit wire"),
    "gradients lost on the way": Run(
        strategy=gradavg(ddp_comm_hook=reduced_by(lambda bucket: bucket * 0)), cause="gradient hooks"
    ),
    "one rank changes a weight": Run(Drifting, cause="unsynchronised replicas"),
    "a backward past the strategy": Run(lambda: Manual(outside=True), cause="unsynchronised replicas"),
    "a learning rate of each rank": Run(
        with_optimizer(lambda self: sgd(self, lr=0.1 * (1 + self.global_rank))), cause="unsynchronised replicas"
    ),
    "an optimizer of each rank": Run(
        with_optimizer(
            lambda self: (torch.optim.Adam if self.global_rank else torch.optim.SGD)(self.parameters(), lr=0.1)
        ),
        cause="unsynchronised replicas",
    ),
    "a learning rate times the ranks": Run(
        with_optimizer(lambda self: sgd(self, lr=0.1 * self.trainer.world_size, momentum=0.9)),
        cause="learning-rate scale",
    ),
    "a learning rate of one group times the ranks": Run(
        with_optimizer(lambda self: grouped(self, 0.1 * self.trainer.world_size)), cause="learning-rate scale"
    ),
    "weight decay times the ranks": Run(
        with_optimizer(lambda self: sgd(self, weight_decay=0.01 * self.trainer.world_size)),
        cause="optimizer options",
    ),
    "a buffer of one rank's samples": Run(Counting, cause="buffers of one rank"),
    "a queue of one rank's keys": Run(lambda: Moco(gathers=False), cause="buffers of one rank"),
    "clipping to a part for every rank": Run(ClippedByRanks, cause="unexplained"),
    # Not shown.
    "batches that no `collate_fn` made": Run(
        reads=lambda: DataLoader(batches((4, 4)), batch_size=None),  # type: ignore[arg-type]  # a list is a data set
        not_shown="no collate_fn makes the loader's batches",
    ),
    "a mean over tokens of padded texts": Run(Texts, **TEXTS, cause="mean of means"),
    "a moving average of the loss in an attribute": Run(with_step(by_average), cause="mean of means"),
    "a counter outside of the module": Run(with_step(by_global)),
    "an iterator in an attribute": Run(with_step(by_iterator)),
    "a step counter in windows": Run(
        with_step(by_count), WINDOWS, GradAvgStrategy, TWO, not_shown="keeps state for every micro-batch"
    ),
    "spectral norm in windows": Run(
        lambda: _with_spectral_norm(Net()), WINDOWS, GradAvgStrategy, TWO, not_shown="keeps state for every micro-batch"
    ),
    "L-BFGS, a sum loss": Run(
        with_optimizer(lambda self: torch.optim.LBFGS(self.parameters(), max_iter=3), lambda: Net("sum")),
        cause="sum loss",
    ),
    "L-BFGS": Run(with_optimizer(lambda self: torch.optim.LBFGS(self.parameters(), max_iter=3))),
    "a loss of the positions in a batch": Run(with_step(by_position), not_shown="their positions in the batch"),
    "windows in manual optimization": Run(lambda: Manual(every=2), WINDOWS, steps=1, not_shown="the user's own sum"),
    "padding beyond the steps": Run(data=31, options=SHUFFLED, not_shown="1 samples of an epoch are read twice"),
    "a short window beyond the steps": Run(
        Net,
        ((4,) * 5, (4,) * 5),
        options=TWO,
        steps=1,
        not_shown="2 micro-batches of 4 samples, whose means DDPStrategy adds up and divides by 4",
    ),
}


def _with_spectral_norm(module: Net) -> Net:
    nn.utils.parametrizations.spectral_norm(module.model[0])
    return module


def on(
    make: Callable[[], nn.Module] = m.layers,
    step: Callable[..., Any] = m.classified,
    reads: Callable[[], Any] = m.plain,
    hooks: dict[str, Any] | None = None,
    **more: Any,
) -> Run:
    """Return a run of layers and a step over a loader that Lightning's sampler deals."""
    options = {**SHUFFLED, **more.pop("options", {})}
    return Run(lambda: m.Step(make, step, **hooks or {}), reads=reads, options=options, **more)


def on_stream(how: str, **more: Any) -> Run:
    return Run(lambda: m.Step(m.layers, m.classified), reads=lambda: DataLoader(m.Stream(how), 4), **more)


def contrasts(gathers: str, **more: Any) -> Run:
    return on(m.layers, lambda module, batch: m.scores(module, batch, m.GATHERS[gathers]), **more)


def checkpointed(*, reentrant: bool) -> Run:
    return on(lambda: m.Checkpointed(reentrant=reentrant))


def of_both(module: Any, batch: Any) -> Tensor:
    return m.classified(module, batch["one"]) + m.classified(module, batch["other"])


WEIGHTS, NO_LOSS = {"cause": "weights beside the gradient"}, {"cause": "non-decomposable loss"}
ATTENTION = {"make": m.Attention, "step": m.each_text}
MINE = {
    "GRU": on(m.Recurrent, m.last_word, m.texts),
    "LSTM, dropout": on(lambda: m.Recurrent(nn.LSTM, dropout=0.3), m.last_word, m.texts),
    "packed sequences": on(lambda: m.Recurrent(packs=True), m.last_word, m.texts),
    "padded texts, attention, dropout, a mean over texts": on(**ATTENTION, reads=m.texts),
    "an average of the weights": on(m.Teacher, m.taught, hooks={"ended": m.averaged(lambda: 1.0)}),
    "images with records, `collate_fn`": on(step=m.detected, reads=m.records),
    "graphs, `collate_fn`": on(step=m.of_graphs, reads=m.graphs),
    "contrastive, `self.all_gather(sync_grads=True)`": contrasts("self.all_gather"),
    "contrastive, `torch.distributed.nn`": contrasts("torch.distributed.nn"),
    "compiled, dropout": on(m.Compiled),
    "checkpointed, dropout": checkpointed(reentrant=False),
    "checkpointed, reentrant": checkpointed(reentrant=True),
    "LoRA, dropout": on(m.Adapted),
    "a stream, every W-th": on_stream(""),
    "a stream, a part for each": on_stream("halves"),
    "a sampler with replacement": Run(lambda: m.Step(m.layers, m.classified), reads=m.replaced),
    "batches of a sampler with replacement": Run(
        lambda: m.Step(m.layers, m.classified), reads=lambda: m.replaced(in_batches=True)
    ),
    "bucketed batches, a mean over texts": Run(lambda: m.Step(m.Words, m.each_text), reads=m.bucketed),
    "manual optimization, clipping": Run(Manual, reads=m.plain, options=SHUFFLED),
    "a schedule by `estimated_stepping_batches`": on(hooks={"optimizers": m.scheduled}, steps=3),
    "reads the data set and writes to the logger": on(step=m.reads_data),
    "`x.float()`": on(step=m.in_float),
    "samples along dimension 1, dropout": on(m.sequences, m.sequence_first),
    "logged with `sync_dist`": on(step=m.logs()),
    "random masks in `collate_fn`": on(reads=m.masking, not_shown="collate_fn draws random numbers"),
    "two loaders": on(step=of_both, reads=m.two_loaders, not_shown="use one DataLoader"),
    "padded texts, attention, dropout, `single_device`": on(
        **ATTENTION, reads=lambda: m.texts(batch_size=8), strategy=SINGLE, options=UNDEALT
    ),
    "a stream that ends earlier on a rank": on_stream("uneven", strategy=BY_WEIGHT, steps=4),
    "`drop_last`": on(reads=lambda: m.plain(30, drop_last=True)),
    # Different.
    "uneven batches late in a long window": Run(
        lambda: m.Step(m.layers, m.classified),
        sizes=((4,) * 9 + (2,), (4,) * 10),
        options={"accumulate_grad_batches": 10},
        cause="mean of means",
    ),
    "an average of the weights that depends on the ranks": on(
        m.Teacher, m.taught, hooks={"ended": m.averaged(m.world)}, **WEIGHTS
    ),
    "a clamp that depends on the ranks": on(hooks={"ended": m.clamped}, **WEIGHTS),
    "a batch hook that normalizes": on(hooks={"transferred": m.normalized}, **NO_LOSS),
    "data sharded by hand and by the sampler": on(reads=m.by_hand, cause="unread samples"),
    "a tiny gradient times the ranks": on(lambda: m.Tiny(m.world), cause="hand-compensated loss"),
    "a loss summed over the ranks by hand": on(step=m.summed_value, cause="logged value"),
    "a detached `self.all_gather`": contrasts("a detached self.all_gather", cause="detached gather"),
    "contrastive on each rank": contrasts("none", **NO_LOSS),
    "a stream that all ranks read": on_stream("alike", cause="duplicated stream"),
    "graphs that all ranks read": on(step=m.of_graphs, reads=m.graphs, options=UNDEALT, cause="duplicated stream"),
    "a mean over tokens, `collate_fn`": on(m.Words, m.each_token, m.texts, cause="mean of means"),
    "a short last batch in a window": on(reads=lambda: m.plain(28), options=TWO, cause="mean of means"),
    # Not shown.
    "samples that cannot be copied": on(reads=m.uncopied, not_shown="a sample cannot be copied"),
    "a permutation of each rank": Run(
        lambda: m.Step(m.layers, m.classified),
        reads=lambda: m.plain(sampler=m.Permuted()),
        not_shown="by a sampler of your own, the ranks leave out",
    ),
    "noise for whole gradients": on(hooks={"stepping": m.noisy}, not_shown="one draw for a whole batch"),
    "one draw for each batch": on(step=m.one_draw, not_shown="one draw for a whole batch (aten.rand)"),
    "a short last batch beyond the steps": Run(
        lambda: m.Step(m.layers, m.classified),
        sizes=((4, 4, 2), (4, 4, 4)),
        steps=1,
        not_shown="2 micro-batches of 2 and 4 samples",
    ),
}
RUNS.update(MINE)


THREE = {
    "an idle rank": Run(strategy=SPLIT, options={"precision": "64-true"}, data=12, batch_size=4),
    "split batches": Run(strategy=SPLIT, options={"precision": "64-true"}, data=20, batch_size=7, steps=3),
}


class Medium(Net):
    """Computes products of matrices in a lower precision."""

    def on_fit_start(self) -> None:
        torch.set_float32_matmul_precision("medium")


OTHERS = {
    "a learning rate times the ranks, a short last window": Run(
        with_optimizer(lambda self: sgd(self, lr=0.1 * self.trainer.world_size)),
        WINDOWS,
        options=TWO,
        cause="learning-rate scale",
    ),
    "a sum loss, and samples repeated to fill the ranks": Run(
        lambda: Net("sum"), data=15, options=SHUFFLED, cause="sum loss"
    ),
    "a sum loss, shuffled": Run(lambda: Net("sum"), data=16, options=SHUFFLED, cause="sum loss"),
    "ranks that read backwards": Run(reads=lambda: dealt(batches((4,) * 4), 2, order=-1), cause="data order"),
    "samples of their own on several processes": Run(
        data=lambda rank: batches((4, 4), seed=rank + 10 * (m.world() > 1)), not_shown="transformed at random"
    ),
    "gradients times 1.004 in bfloat16": Run(
        strategy=gradavg(ddp_comm_hook=reduced_by(lambda bucket: bucket * 1.004)),
        options={"precision": "bf16-mixed"},
        cause="unexplained",
    ),
    "medium precision of products": Run(Medium),
}
CASES = {
    "case 7": Run(
        CaseSeven, strategy=BY_WEIGHT, steps=1, data=of_rank([[1.0, 1.0, 1.0]], [[5.0]]), cause="hand-compensated loss"
    ),
    "case 41": Run(dropped),
    "case 42": Run(CaseFortyTwo, steps=1, data=of_rank([[0.0, 2.0]], [[4.0, 6.0]]), cause="batch norm"),
}
RUNS.update({**THREE, **CASES, **OTHERS})
