"""Modules with one fault each, and healthy ones, for the comparison of runs; no test in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from ranks import make_trainer
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy, gather
from lightning_gradavg.verify.record import Tape
from lightning_gradavg.verify.run import record_run

FEATURES, CLASSES = 6, 3
Batch = tuple[Tensor, Tensor]


class Net(LightningModule):
    """Two layers with a mean loss; `loss` is "mean" or "sum"."""

    def __init__(self, loss: str = "mean", lr: float = 0.1) -> None:
        super().__init__()
        self.loss, self.lr = loss, lr
        self.model = self.make_model()

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y, reduction=self.loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Normed(Net):
    """With batch norm."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))


class Dropped(Net):
    """With dropout."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


class Noisy(Net):
    """Draws noise in its training step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step((x + torch.randn_like(x), y), batch_idx)


class Masked(Net):
    """The mean over the samples of classes other than 0, as over tokens that are not padding."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y, ignore_index=0)


class Weighted(Masked):
    """Says what its loss is a mean of."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "weight": (batch[1] != 0).sum()}


class HandCompensated(Net):
    """Undoes what stock DDP does, as scripts of all ages do: local sum x W / global count."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, y = batch
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        return nn.functional.cross_entropy(self(x), y, reduction="sum") * dist.get_world_size() / count


class Divided(Net):
    """Divides by the number of ranks, which DDP does, too."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) / dist.get_world_size()


class Spread(Net):
    """A loss that does not split over samples: the variance of the outputs in the batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self(batch[0]).var(dim=0, correction=0).sum()


class Contrastive(Net):
    """Each row against all rows of all ranks."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        rows = self(batch[0])
        everyone = gather(rows)
        start = dist.get_rank() * len(rows)
        return nn.functional.cross_entropy(rows @ everyone.T, torch.arange(start, start + len(rows)))


class SpreadOfAll(Spread):
    """The same loss on the outputs of all replicas."""

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
    """Manual optimization; `outside` runs the backward past Lightning."""

    def __init__(self, outside: bool = False) -> None:
        super().__init__()
        self.automatic_optimization, self.outside = False, outside

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        x, y = batch
        model = self.model if self.outside else self
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if self.outside:
            with self.trainer.strategy.model.no_sync() if dist.get_world_size() > 1 else nullcontext():
                loss.backward()
        else:
            self.manual_backward(loss)
        optimizer.step()


class Unused(Net):
    """Leaves a parameter out of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(2))


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
            for parameter in self.parameters():
                parameter.grad = None

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.model[layer].parameters(), lr=0.1) for layer in (0, 2)]


class NamedTerms(Net):
    """A loss per sample and one per sample of a class other than 0, each with its own weight."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, y = batch
        outputs, counted = self(x), y != 0
        return {
            "loss": {
                "all": nn.functional.cross_entropy(outputs, y),
                "some": outputs[counted].square().sum() / counted.sum(),
            },
            "weight": {"all": len(y), "some": counted.sum()},
        }


class Scheduled(Net):
    """Halves its learning rate after every epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class ClippedByRanks(Net):
    """Clips to a part of the value for every rank."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.1 / dist.get_world_size(), "norm")


class Counting(Net):
    """Counts the samples that this rank has seen, in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.seen += len(batch[0])
        return super().training_step(batch, batch_idx)


class ScaledRate(Net):
    """Multiplies its learning rate by the number of ranks."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr * self.trainer.world_size, momentum=0.9)


class OtherStart(Net):
    """Initializes other weights where there are several processes."""

    def make_model(self) -> nn.Module:
        if dist.is_initialized() and dist.get_world_size() > 1:
            torch.manual_seed(2)
        return super().make_model()


class Adaptive(Normed):
    """Adam makes much of gradients that are zero but for rounding, as of a bias before batch norm."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=int(self.trainer.estimated_stepping_batches) + 1
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Padded(LightningModule):
    """The mean of a loss over the tokens that are not padding, in texts of other lengths on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        losses = self.embedding(batch).square().sum(-1)[batch != 0]
        return {"loss": losses.mean(), "weight": len(losses)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CaseSeven(LightningModule):
    """Case 7: loss w * x, hand-scaled by W / global count."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        count = torch.tensor(float(len(batch)))
        dist.all_reduce(count)
        return (self.w * batch).sum() * dist.get_world_size() / count

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class CaseFortyTwo(LightningModule):
    """Case 42: BatchNorm1d(1) on {0, 2} and {4, 6}."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.norm(batch.reshape(-1, 1)) * batch.reshape(-1, 1)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def divide_again(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket, and divide by the number of ranks once more."""
    bucket.buffer().div_(dist.get_world_size() ** 2)
    summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    result: torch.futures.Future[Tensor] = summed.then(lambda done: done.value()[0])
    return result


def samples(count: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def batches(sizes: Sequence[int], seed: int = 0) -> list[Batch]:
    x, y = samples(sum(sizes), seed)
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


@dataclass(frozen=True)
class Setup:
    """A run: module, sizes of each rank's batches, strategy and further options of the Trainer.

    `data` may also be the number of samples of one data set, the batches of each rank, or "one stream" for all ranks.
    """

    module: Callable[[], LightningModule]
    sizes: Sequence[Sequence[int]] = ((4, 4), (4, 4))
    strategy: Callable[[], Any] = DDPStrategy
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 2
    data: int | str | tuple[Any, ...] = "a list per rank"
    batch_size: int = 4

    def build(self) -> LightningModule:
        torch.manual_seed(1)
        return self.module()

    def loader(self) -> Any:
        """Return this rank's loader; that of one process reads all ranks' batches in turn."""
        if isinstance(self.data, int):
            return DataLoader(TensorDataset(*samples(self.data)), batch_size=self.batch_size)
        if isinstance(self.data, tuple):
            return DataLoader([torch.tensor(rows) for rows in self.data[dist.get_rank()]], batch_size=None)
        if self.data == "one stream":
            data: Any = batches(self.sizes[0])
        elif dist.is_initialized() and dist.get_world_size() > 1:
            data = batches(self.sizes[dist.get_rank()], seed=dist.get_rank())
        else:
            of_ranks = [batches(sizes, seed=rank) for rank, sizes in enumerate(self.sizes)]
            data = [batch for of_step in zip(*of_ranks, strict=True) for batch in of_step]
        return DataLoader(data, batch_size=None)


def recorded(setups: str, name: Any, folder: str) -> Tape:
    """Body: record a run of a set-up on this rank."""
    setup = (globals().get(setups) or __import__("wild").WILD)[name]
    trainer = make_trainer(
        setup.strategy(), **{"max_epochs": 1, "use_distributed_sampler": False, "callbacks": [], **setup.options}
    )
    return record_run(trainer, setup.build(), {"train_dataloaders": setup.loader()}, steps=setup.steps, folder=folder)


def gradavg(**options: Any) -> Callable[[], GradAvgStrategy]:
    return lambda: GradAvgStrategy(**options)


UNEVEN = ((6, 4), (2, 4))
WINDOWS = ((4, 4, 4), (4, 4, 4))

HEALTHY = {
    "stock DDP": Setup(Net),
    "GradAvg": Setup(Net, strategy=GradAvgStrategy),
    "weighted samples": Setup(Net, UNEVEN, gradavg(reduction="weighted_mean")),
    "weighted tokens": Setup(Weighted, UNEVEN, gradavg(reduction="weighted_mean")),
    "normalized sum": Setup(lambda: Net("sum"), UNEVEN, gradavg(reduction="normalized_sum")),
    "sum": Setup(lambda: Net("sum"), UNEVEN, gradavg(reduction="sum")),
    "accumulation": Setup(Net, WINDOWS, GradAvgStrategy, {"accumulate_grad_batches": 2}),
    "weighted accumulation": Setup(
        Weighted, ((6, 4, 3), (2, 4, 1)), gradavg(reduction="weighted_mean"), {"accumulate_grad_batches": 2}
    ),
    "clipping": Setup(Net, strategy=GradAvgStrategy, options={"gradient_clip_val": 0.1}),
    "manual optimization": Setup(Manual, strategy=GradAvgStrategy),
    "Adam, schedule": Setup(Adaptive, strategy=gradavg(equivalent_to="single_device"), data=20, batch_size=8),
    "split batches": Setup(Net, strategy=gradavg(split_batches=True), data=14, batch_size=5, steps=3),
    "cut batches": Setup(
        Net,
        strategy=gradavg(split_batches=True, max_device_batch_size=2),
        options={"accumulate_grad_batches": 2},
        data=22,
        batch_size=7,
    ),
    "contrastive": Setup(Contrastive),
    "data_parallel": Setup(Normed, strategy=gradavg(equivalent_to="data_parallel"), data=14, batch_size=7),
    "data_parallel, 4 replicas": Setup(
        Normed, strategy=gradavg(equivalent_to="data_parallel", num_replicas=4), data=16, batch_size=8
    ),
    "single_device": Setup(Normed, strategy=gradavg(equivalent_to="single_device"), data=14, batch_size=5),
    "scaled on purpose": Setup(
        Net, strategy=gradavg(lr_scaling="linear", base_batch_size=4, split_batches=True), data=16, batch_size=8
    ),
    "mean of replica losses": Setup(
        Normed,
        strategy=gradavg(equivalent_to="data_parallel", reduction="mean_of_replica_losses"),
        data=14,
        batch_size=7,  # batch norm over two samples would amplify rounding
    ),
    "bucket views, unused parameters": Setup(
        Unused, strategy=lambda: DDPStrategy(gradient_as_bucket_view=True, find_unused_parameters=True)
    ),
    "two optimizers": Setup(TwoOptimizers, strategy=GradAvgStrategy, steps=4),
    "named terms": Setup(NamedTerms, UNEVEN, gradavg(reduction="weighted_mean")),
    "three epochs": Setup(Scheduled, strategy=GradAvgStrategy, options={"max_epochs": 3}, steps=5),
    "mixed precision": Setup(Net, strategy=GradAvgStrategy, options={"precision": "bf16-mixed"}),
    "loss of all outputs": Setup(SpreadOfAll, strategy=gradavg(equivalent_to="single_device"), data=14, batch_size=5),
}

STOCHASTIC = {
    "dropout": Setup(Dropped, UNEVEN, gradavg(reduction="weighted_mean")),
    "noise": Setup(Noisy, UNEVEN, gradavg(reduction="weighted_mean")),
    "dropout, single_device": Setup(Dropped, strategy=gradavg(equivalent_to="single_device"), data=14, batch_size=5),
    "dropout, data_parallel": Setup(Dropped, strategy=gradavg(equivalent_to="data_parallel"), data=14, batch_size=5),
    "dropout, accumulation": Setup(Dropped, WINDOWS, GradAvgStrategy, {"accumulate_grad_batches": 2}),
}

THREE = {
    "idle rank, 3 ranks": Setup(
        Net, strategy=gradavg(split_batches=True), options={"precision": "64-true"}, data=12, batch_size=4
    ),
    "split batches, 3 ranks": Setup(
        Net,
        strategy=gradavg(split_batches=True),
        options={"precision": "64-true"},
        data=20,
        batch_size=7,
        steps=3,
    ),
}

TEXTS = (([[1, 2, 3, 4], [5, 6, 0, 0]],), ([[3, 2], [1, 0]],))

PADDED = {
    "weighted": Setup(Padded, strategy=gradavg(reduction="weighted_mean"), steps=1, data=TEXTS),
    "stock DDP": Setup(Padded, steps=1, data=TEXTS),
}

FAULTS = {
    "initial weights": Setup(OtherStart),
    "duplicated stream": Setup(Net, data="one stream"),
    "padding": Setup(Net, options={"use_distributed_sampler": True}, data=15),
    "data order": Setup(Net, options={"use_distributed_sampler": True}, data=16),
    "stochastic": Setup(Dropped),
    "batch norm": Setup(Normed),
    "non-decomposable loss": Setup(Spread),
    "sum loss": Setup(lambda: Net("sum")),
    "mean of means": Setup(Net, UNEVEN),
    "counts": Setup(Masked, UNEVEN, gradavg(reduction="weighted_mean")),
    "short window": Setup(Net, WINDOWS, options={"accumulate_grad_batches": 2}),
    "hand-compensated loss": Setup(HandCompensated, UNEVEN, gradavg(reduction="weighted_mean")),
    "double division": Setup(Divided),
    "fp16 wire": Setup(Net, strategy=gradavg(ddp_comm_hook=fp16_compress_hook)),
    "bf16 wire": Setup(Net, strategy=gradavg(ddp_comm_hook=bf16_compress_hook)),
    "unsynchronised replicas": Setup(Drifting),
    "learning-rate scale": Setup(ScaledRate),
}

AGAIN = {
    "sum loss": Setup(lambda: Net("sum"), strategy=GradAvgStrategy, options={"precision": "bf16-mixed"}),
    "mean of means": Setup(Masked),
    "double division": Setup(Net, strategy=gradavg(ddp_comm_hook=divide_again)),
    "unsynchronised replicas": Setup(lambda: Manual(outside=True)),
    "counts": Setup(Net, UNEVEN, gradavg(reduction="sum")),
    "batch norm": Setup(Normed, WINDOWS, GradAvgStrategy, {"accumulate_grad_batches": 3}, steps=1),
}
"""Other ways to the same causes."""

LATE = {"clipped gradient": Setup(ClippedByRanks), "buffers": Setup(Counting)}
"""Differences of a stage that have no name of their own."""

SEVERAL = {
    ("sum loss", "stochastic"): Setup(lambda: Dropped("sum")),
    ("mean of means", "stochastic"): Setup(Noisy, UNEVEN),
    ("batch norm", "mean of means"): Setup(Normed, UNEVEN),
}

CASES = {
    7: Setup(CaseSeven, strategy=gradavg(reduction="weighted_mean"), steps=1, data=(((1.0, 1.0, 1.0),), ((5.0,),))),
    41: Setup(Dropped),
    42: Setup(CaseFortyTwo, steps=1, data=(((0.0, 2.0),), ((4.0, 6.0),))),
}
