"""Small models whose gradients are known by hand, and a run of a real Trainer on them inside the ranks.

Toy-S: one weight at 1, prediction `w * x`, loss half the squared prediction: the gradient of a sample is `x * x`.
Toy-Lin: loss `w * x`: the gradient of a sample is `x`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import Logger
from ranks import make_trainer
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgStrategy, gather

MicroBatches = Sequence[Sequence[float]]
WEIGHTED = {"reduction": "weighted_mean"}
# Of tests that mean what the user is warned of.
AWARE = [
    pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0:UserWarning"),
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified"),
]


GATHERS: dict[str, Callable[[LightningModule, Tensor], Tensor]] = {
    "lightning_gradavg": lambda module, rows: gather(rows),
    "Lightning": lambda module, rows: cast("Tensor", module.all_gather(rows, sync_grads=True)).flatten(0, 1),
    "torch": lambda module, rows: torch.cat(all_gather(rows)),
}
"""All ranks' rows, with gradient."""
gathers = pytest.mark.parametrize("way", GATHERS)
DEPRECATED = pytest.mark.filterwarnings(r"ignore:torch.distributed.nn.functional.all_gather is deprecated")


def approx(value: Any, tolerance: float = 1e-12) -> Any:
    return pytest.approx(value, rel=tolerance, abs=tolerance)


@dataclass
class Seen:
    """What one rank saw of a run."""

    rank: int
    world_size: int
    gradients: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    calls: int = 0


class Toy(LightningModule):
    """One weight; `kind` is "lin" or "s"; `loss` is "mean" or "sum" over the samples of a micro-batch."""

    def __init__(
        self,
        kind: str = "lin",
        loss: str = "mean",
        lr: float = 0.01,
        start: float | Sequence[float] = 1.0,
        dtype: torch.dtype = torch.float64,
        weight: Callable[[Tensor, int], Any] | None = None,
    ) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(start, dtype=dtype))
        self.kind, self.loss, self.lr, self.weight = kind, loss, lr, weight
        self.seen = Seen(dist.get_rank(), dist.get_world_size())

    def losses(self, batch: Tensor) -> Tensor:
        products = batch.to(self.w.dtype) * self.w
        products = products.sum(-1) if products.ndim > 1 else products
        return products if self.kind == "lin" else 0.5 * products**2

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        losses = self.losses(batch)
        loss = losses.mean() if self.loss == "mean" else losses.sum()
        if self.weight is None:
            return loss
        return {"loss": loss, "weight": self.weight(batch, batch_idx)}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.w.grad
        assert gradient is not None
        self.seen.gradients.append(gradient.detach().clone())

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step > len(self.seen.weights):
            self.seen.weights.append(self.w.detach().clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Memory(Logger):
    """Keeps what is logged."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Forget them."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


def loader(micro_batches: MicroBatches) -> DataLoader[Tensor]:
    """Return a loader that yields exactly these micro-batches."""
    data: Any = [torch.tensor(micro_batch, dtype=torch.float64) for micro_batch in micro_batches]
    return DataLoader(data, batch_size=None)


def train(
    per_rank: Mapping[int, MicroBatches] | Sequence[MicroBatches],
    toy: Mapping[str, Any] | None = None,
    strategy: Mapping[str, Any] | None = None,
    nodes: Sequence[int] | None = None,
    module: Callable[..., Toy] = Toy,
    **options: Any,
) -> Seen:
    """Body: train the toy on each rank's own micro-batches with a real Trainer."""
    model = module(**(toy or {}))
    trainer = make_trainer(
        GradAvgStrategy(**(strategy or {})),
        nodes=nodes,
        **{"max_epochs": 1, "use_distributed_sampler": False, **options},
    )
    trainer.fit(model, loader(per_rank[dist.get_rank()]))
    return model.seen


def same_everywhere(seen: Sequence[Seen]) -> Seen:
    """Assert that all ranks took part and hold the same bits, and return what they saw."""
    assert [(one.rank, one.world_size) for one in seen] == [(rank, len(seen)) for rank in range(len(seen))]
    for one in seen[1:]:
        assert len(one.gradients) == len(seen[0].gradients) > 0
        for mine, first in zip(one.gradients + one.weights, seen[0].gradients + seen[0].weights, strict=True):
            assert torch.equal(mine, first)
    return seen[0]


class Stop(Callback):
    """Ends the run after a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == self.step


class FirstLater(LightningModule):
    """Mixed into a module with layers `net`: the first of them trains from the third step on."""

    net: Any

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx >= 2)
