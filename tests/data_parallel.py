"""DataParallel as Lightning 1.x used it, on one process of the CPU and in plain PyTorch: the reference of
`GradAvgStrategy(equivalent_to="data_parallel")`. Nothing here is computed by the package.

Copies between devices are left out of `torch/nn/parallel/{scatter_gather,replicate,data_parallel}.py`; the rest is
done as there, and checked against it in `test_data_parallel.py`. With one replica it is training on a single device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import Strategy
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

__all__ = [
    "BATCH_SIZES",
    "MODELS",
    "Labels",
    "Model",
    "Nested",
    "NestedRows",
    "Point",
    "Run",
    "assert_same_run",
    "fit",
    "gather",
    "loader",
    "num_samples",
    "replicate",
    "scatter",
    "train",
]

M = TypeVar("M", bound=nn.Module)
State = dict[str, Tensor]

BATCH_SIZES = (16, 15, 5, 1)
"""Sizes of the loader batches, in turn; 4 replicas get 4 4 4 4, 4 4 4 3, 2 2 1 and 1 samples."""


def scatter(batch: Any, num_replicas: int) -> list[Any]:
    """Return the parts of a batch that replicas get: as `torch.nn.parallel.scatter`, and dataclasses, too.

    There may be fewer than `num_replicas`, as `torch.chunk` makes fewer. What is no tensor is shared.
    """
    if isinstance(batch, Tensor):
        return list(batch.chunk(num_replicas))
    if is_dataclass(batch) and not isinstance(batch, type):
        names = [one.name for one in fields(batch)]
        columns = zip(*(scatter(getattr(batch, name), num_replicas) for name in names), strict=False)
        return [replace(batch, **dict(zip(names, column, strict=True))) for column in columns]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return [type(batch)(*part) for part in zip(*(scatter(one, num_replicas) for one in batch), strict=False)]
    if isinstance(batch, (list, tuple)) and batch:
        return [type(batch)(part) for part in zip(*(scatter(one, num_replicas) for one in batch), strict=False)]
    if isinstance(batch, dict) and batch:
        columns = zip(*(scatter(one, num_replicas) for one in batch.values()), strict=False)
        return [type(batch)(zip(batch, column, strict=True)) for column in columns]
    return [batch] * num_replicas


def replicate(module: M, num_replicas: int) -> list[M]:
    """Return replicas: their parameters pass gradients on to the module's; those after the first have own buffers."""
    replicas = []
    for number in range(num_replicas):
        parameters = {parameter: parameter.clone() for parameter in module.parameters()}
        buffers = {buffer: buffer.clone() if number else buffer for buffer in module.buffers()}
        copies = {one: one._replicate_for_data_parallel() for one in module.modules()}
        for one, copy in copies.items():
            for name, child in one._modules.items():
                copy._modules[name] = None if child is None else copies[child]
            for name, parameter in one._parameters.items():
                # A copy is no leaf, so it is a plain attribute of the replica.
                setattr(copy, name, None if parameter is None else parameters[parameter])
            for name, buffer in one._buffers.items():
                copy._buffers[name] = None if buffer is None else buffers[buffer]
        replicas.append(copies[module])
    return replicas


def gather(outputs: Sequence[Any]) -> Any:
    """Return the replicas' outputs as one: as `torch.nn.parallel.gather`, after Lightning 1.x made numbers tensors."""
    first = outputs[0]
    if first is None:
        return None
    if isinstance(first, (bool, int, float)):
        return torch.tensor(outputs)
    if isinstance(first, Tensor):
        return torch.cat([output.reshape(1) if output.ndim == 0 else output for output in outputs])
    if isinstance(first, dict):
        return type(first)((key, gather([output[key] for output in outputs])) for key in first)
    gathered = [gather(column) for column in zip(*outputs, strict=True)]
    return type(first)(*gathered) if hasattr(first, "_fields") else type(first)(gathered)


def num_samples(batch: Any) -> int:
    """Return the length of the first tensor."""
    if isinstance(batch, Tensor):
        return len(batch)
    for item in batch.values() if isinstance(batch, dict) else batch:
        if isinstance(item, (Tensor, dict, list, tuple)):
            return num_samples(item)
    raise AssertionError(f"no tensor in {batch!r}")


@dataclass
class Run:
    """What a run showed.

    Attributes:
        gradients: Before each optimizer step, by the parameters' names.
        losses: The loss of each loader batch.
        replica_losses: The loss of each replica, per loader batch; empty where the module has a training_step_end.
        buffers: After each loader batch.
        weights: After the last step, with the buffers.
    """

    gradients: list[State] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    replica_losses: list[list[float]] = field(default_factory=list)
    buffers: list[State] = field(default_factory=list)
    weights: State = field(default_factory=dict)


class _Loss(NamedTuple):
    value: Tensor
    weight: float
    of_replicas: list[float]


def _loss(module: Any, batch: Any, batch_idx: int, num_replicas: int, *, mean_of_replicas: bool) -> _Loss:
    parts = scatter(batch, num_replicas)
    replicas = replicate(module, len(parts))
    outputs = [one.training_step(part, batch_idx) for one, part in zip(replicas, parts, strict=True)]
    if hasattr(module, "training_step_end"):
        output = module.training_step_end(gather(outputs))
        return _Loss(output["loss"] if isinstance(output, dict) else output, num_samples(batch), [])
    outputs = [output if isinstance(output, dict) else {"loss": output} for output in outputs]
    losses = [output["loss"] for output in outputs]
    values = [loss.item() for loss in losses]
    if mean_of_replicas:
        return _Loss(torch.stack(losses).mean(), 1.0, values)
    weights = [float(output.get("weight", num_samples(part))) for output, part in zip(outputs, parts, strict=True)]
    weighted = [weight * loss for weight, loss in zip(weights, losses, strict=True)]
    return _Loss(torch.stack(weighted).sum() / sum(weights), sum(weights), values)


def train(
    module: LightningModule,
    batches: Iterable[Any],
    num_replicas: int,
    *,
    epochs: int = 1,
    accumulate: int = 1,
    mean_of_replicas: bool = False,
) -> Run:
    """Train a module, whose `training_step`, `training_step_end` and `configure_optimizers` are used, with replicas.

    Args:
        module: The module, which ends with the trained weights.
        batches: The loader batches of an epoch.
        num_replicas: R.
        epochs: Passes over the batches.
        accumulate: Loader batches of one optimizer step, whose losses are averaged by their weights; at the end of an
            epoch, the last ones, however few.
        mean_of_replicas: True for the mean over the replicas' losses, as in Lightning 1.x. Otherwise their mean by
            their samples, or by the `"weight"` that `training_step` returned.
    """
    run = Run()
    optimizer: Any = module.configure_optimizers()
    module.train()
    loader_batches = list(batches)
    for _ in range(epochs):
        for start in range(0, len(loader_batches), accumulate):
            optimizer.zero_grad()
            weights: list[float] = []
            for batch_idx, batch in enumerate(loader_batches[start : start + accumulate], start):
                loss = _loss(module, batch, batch_idx, num_replicas, mean_of_replicas=mean_of_replicas)
                weights.append(loss.weight)
                # Relative to the first weight, so that a window of one batch has the gradient of its very loss.
                (loss.value * (loss.weight / weights[0])).backward()
                run.losses.append(loss.value.item())
                run.replica_losses.append(loss.of_replicas)
                run.buffers.append({name: buffer.clone() for name, buffer in module.named_buffers()})
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad /= sum(weights) / weights[0]
            run.gradients.append(
                {name: one.grad.to_dense().clone() for name, one in module.named_parameters() if one.grad is not None}
            )
            optimizer.step()
    run.weights = {name: value.clone() for name, value in module.state_dict().items()}
    return run


class Model(LightningModule):
    """A small model on 37 fixed samples; `losses` gets the value of each `training_step_end`, where there is one.

    `replica_losses` gets that of each `training_step` while `notes` is true.
    """

    lr = 0.05

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.losses: list[float] = []
        self.replica_losses: list[list[float]] = []
        self.notes = False
        self.build()
        self.to(dtype)

    def build(self) -> None:
        raise NotImplementedError

    def data(self) -> Dataset[Any]:
        raise NotImplementedError

    def draw(self, *size: int) -> Tensor:
        """Return the same random numbers on every call of a size."""
        return torch.randn(37, *size, generator=torch.Generator().manual_seed(sum(size)), dtype=self.dtype)

    def note(self, loss: Tensor, weight: int) -> Tensor:
        """Remember and return the loss of a replica, and log it where there is a Trainer."""
        if self.notes:
            self.replica_losses[-1].append(loss.item())
        if self._trainer is not None:
            self.log("loss", loss, sync_dist=True, batch_size=weight)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4)


class CNN(Model):
    """Two convolutions with batch norm; each replica has a loss of its own."""

    def build(self) -> None:
        self.network = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.Conv2d(4, 4, 3, stride=2, padding=1),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, 3),
        )

    def data(self) -> Dataset[Any]:
        return TensorDataset(self.draw(1, 4, 4), torch.arange(37) % 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.note(nn.functional.cross_entropy(self.network(x), y), len(x))


class Masked(Model):
    """Each replica returns the mean over its masked values, and their number as its weight."""

    def build(self) -> None:
        self.network = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))

    def data(self) -> Dataset[Any]:
        return TensorDataset(self.draw(5), self.draw(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, mask = batch[0], batch[1] > batch[1].mean(dim=1, keepdim=True)  # 1 to 3 of 4 values of each sample
        loss = self.network(x)[mask].square().mean()
        return {"loss": self.note(loss, int(mask.sum())), "weight": mask.sum()}


class Sparse(Model):
    """An embedding with sparse gradients."""

    def build(self) -> None:
        self.embedding = nn.Embedding(37, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def data(self) -> Any:
        return list(torch.arange(37))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.note(self.head(self.embedding(batch)).tanh().square().mean(), len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)  # which takes no weight decay of sparse gradients


class Contrastive(Model):
    """Two towers, whose features of the whole batch meet in `training_step_end`, above a learned temperature."""

    def build(self) -> None:
        self.a = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.b = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def data(self) -> Any:
        return list(zip(self.draw(5), self.draw(6), strict=True))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        a, b = batch
        return nn.functional.normalize(self.a(a)), nn.functional.normalize(self.b(b))

    def training_step_end(self, outputs: Any) -> Tensor:
        a, b = outputs
        logits = self.log_scale.exp() * a @ b.T
        target = torch.arange(len(a), device=a.device)
        loss = (nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.T, target)) / 2
        self.losses.append(loss.item())
        return loss


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Labels:
    target: Any
    unit: str


def collate_nested(samples: Sequence[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Any]:
    """Return a batch of dicts, lists, tuples, named tuples and dataclasses, with things that are no tensors."""
    x, y, target = (torch.stack(column) for column in zip(*samples, strict=True))
    return {"points": [Point(x, (y, "shared"))], "labels": Labels(target, "metre"), "none": None, "factor": 0.5}


class Nested(Model):
    """Nested batches and outputs, with a tensor without dimension and a number, of which each replica has its own."""

    seen: Tensor

    def build(self) -> None:
        self.network = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 2))
        self.register_buffer("seen", torch.zeros(()))

    def data(self) -> Any:
        return list(zip(self.draw(3), self.draw(4), self.draw(2), strict=True))

    def step_of(self, x: Tensor) -> int:
        """Return by how much the buffer grows."""
        return len(x)

    def numbers(self, prediction: Tensor) -> dict[str, Any]:
        """Return what a replica has one of: a square of a mean, and how many samples it has."""
        return {"penalty": prediction.mean() ** 2, "count": len(prediction)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (point,), labels = batch["points"], batch["labels"]
        x, (y, shared) = point
        assert (shared, labels.unit, batch["none"]) == ("shared", "metre", None)
        self.seen += self.step_of(x)
        # Of the buffer as this replica has it.
        prediction = self.network(torch.cat([x, y], dim=1)) * (1 + self.seen / 1000)
        errors = batch["factor"] * (prediction - labels.target)
        return {"points": [Point(prediction[:, 0], (errors,))], **self.numbers(prediction)}

    def training_step_end(self, outputs: Any) -> Any:
        ((predictions, (errors,)),) = outputs["points"]
        count, penalty = outputs["count"], outputs["penalty"]
        assert penalty.shape == count.shape
        assert len(predictions) == len(errors) == count.sum()
        # Products of rows across replicas, and numbers in the order of the replicas.
        across = (predictions[:, None] * predictions[None]).mean()
        order = torch.arange(1, len(penalty) + 1).to(penalty) / len(penalty)
        loss = errors.square().mean() + 0.1 * across + (order * penalty).sum() / order.sum()
        self.losses.append(loss.item())
        return {"loss": loss, "errors": errors.detach()}


class NestedRows(Nested):
    """The same with rows alone, of which one device has as many as all replicas, and a buffer that counts steps."""

    def step_of(self, x: Tensor) -> int:
        return 1

    def numbers(self, prediction: Tensor) -> dict[str, Any]:
        return {"penalty": prediction.mean(dim=1) ** 2, "count": torch.ones(len(prediction), dtype=torch.long)}


MODELS: dict[str, type[Model]] = {
    "cnn": CNN,
    "masked": Masked,
    "sparse": Sparse,
    "contrastive": Contrastive,
    "nested": Nested,
    "nested rows": NestedRows,
}


def loader(model: Model) -> DataLoader[Any]:
    """Return 20 batches of the sizes above, of all samples in another order each time."""
    order = torch.Generator().manual_seed(3)
    batches = [part.tolist() for _ in range(5) for part in torch.randperm(37, generator=order).split(BATCH_SIZES)]
    collate = collate_nested if isinstance(model, Nested) else None
    return DataLoader(model.data(), batch_sampler=batches, collate_fn=collate)


class _Observer(Callback):
    """Notes of a run in a Trainer what `train` notes."""

    def __init__(self) -> None:
        self.run = Run()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        data = trainer.strategy._batches
        pl_module.notes = data is None or not data.chunk.stand_in
        pl_module.replica_losses.append([])

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        pl_module.notes = False  # a training_step that runs again in the backward is the same one

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        named = pl_module.named_parameters()
        gradients = {name: one.grad.to_dense().clone() for name, one in named if one.grad is not None}
        self.run.gradients.append(gradients)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.run.buffers.append({name: buffer.clone() for name, buffer in pl_module.named_buffers()})
        if "loss" in trainer.callback_metrics:
            self.run.losses.append(trainer.callback_metrics["loss"].item())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.run.losses += pl_module.losses
        self.run.replica_losses = pl_module.replica_losses
        self.run.weights = {name: value.clone() for name, value in pl_module.state_dict().items()}


def fit(model: Model, strategy: Strategy, batches: Iterable[Any], **options: Any) -> Run:
    """Train a model in a Trainer, in a rank body, and return what this rank saw."""
    observer = _Observer()
    trainer = make_trainer(strategy, callbacks=[observer], **{"max_epochs": 1, **options})
    trainer.fit(model, batches)
    return observer.run


def assert_same_run(
    ranks: Sequence[Run],
    expected: Run,
    tolerance: float,
    after: float | None = None,
    *,
    replicas: bool = True,
    losses: bool = True,
) -> None:
    """Assert that all ranks hold the same bits, and that they are those of the reference within the tolerance.

    Args:
        ranks: What the ranks saw, in rank order.
        expected: What the reference showed.
        tolerance: Relative, and absolute where a value is below 1. What is logged is in float32: 1e-6 there at best.
        after: The tolerance of buffers and weights after the first step; the same by default.
        replicas: Whether the ranks' replicas, one rank's after the other's, are those of the reference.
        losses: Whether the loss of a batch, that is logged where replicas have losses, is that of the reference.
    """
    first = ranks[0]
    for other in ranks[1:]:
        torch.testing.assert_close(other.gradients, first.gradients, rtol=0, atol=0)
        torch.testing.assert_close(other.buffers, first.buffers, rtol=0, atol=0)
        torch.testing.assert_close(other.weights, first.weights, rtol=0, atol=0)
        assert other.losses == first.losses
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(first.gradients[0], expected.gradients[0], **close)
    assert len(first.gradients) == len(expected.gradients)
    of_replicas = [[one for rank in ranks for one in rank.replica_losses[step]] for step in range(len(first.buffers))]
    of_losses = max(tolerance, 1e-6) if any(of_replicas) else tolerance
    if losses:
        torch.testing.assert_close(first.losses, expected.losses, rtol=of_losses, atol=of_losses)
    if replicas:
        torch.testing.assert_close(of_replicas, expected.replica_losses, **close)
    torch.testing.assert_close(first.buffers[:1], expected.buffers[:1], **close)
    close = dict.fromkeys(close, after or tolerance)
    torch.testing.assert_close(first.buffers, expected.buffers, **close)
    torch.testing.assert_close(first.weights, expected.weights, **close)
