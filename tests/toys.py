"""Small models, a run of a real Trainer on them inside the ranks, and the loops in which users say where windows end.

Toy-S: one weight at 1, prediction `w * x`, loss half the squared prediction: the gradient of a sample is `x * x`.
Toy-Lin: loss `w * x`: the gradient of a sample is `x`. An MLP where a result is that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from ranks import RankEnvironment, make_trainer
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgReducer, GradAvgStrategy, gather
from lightning_gradavg import fabric as of_fabric

WEIGHTED = {"reduction": "weighted_mean"}
# Of tests that mean what the user is warned of.
AWARE = [pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")]


GATHERS: dict[str, Callable[[LightningModule, Tensor], Tensor]] = {
    "lightning_gradavg": lambda module, rows: gather(rows),
    "Lightning": lambda module, rows: cast("Tensor", module.all_gather(rows, sync_grads=True)).flatten(0, 1),
    "torch": lambda module, rows: torch.cat(all_gather(rows)),
}
"""All ranks' rows, with gradient."""
DEPRECATED = pytest.mark.filterwarnings(r"ignore:torch.distributed.nn.functional.all_gather is deprecated")


def approx(value: Any, tolerance: float = 1e-12) -> Any:
    return pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return a copy of one tensor, or of several end to end; of sharded ones, what all shards hold."""
    whole = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors)
    copies = [tensor.detach().to_dense().clone() for tensor in whole]
    return copies[0] if len(copies) == 1 else torch.cat([copy.flatten() for copy in copies])


@dataclass
class Seen:
    """What one rank saw of a run: gradients of all parameters that have some, and weights after each step."""

    rank: int
    world_size: int
    gradients: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    steps: int = 0


class Recorded(LightningModule):
    """Records what its optimizer, SGD without momentum, sees and makes."""

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__()
        self.lr, alone = lr, not dist.is_initialized()
        self.seen = Seen(0, 1) if alone else Seen(dist.get_rank(), dist.get_world_size())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if gradients := [parameter.grad for parameter in self.parameters() if parameter.grad is not None]:
            self.seen.gradients.append(flat(gradients))

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step > len(self.seen.weights):
            self.seen.weights.append(flat(self.parameters()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class One(nn.Module):
    """The gradient of a sample is the sample."""

    def __init__(self, start: Any = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, samples: Tensor) -> Tensor:
        return samples * self.w

    @property
    def gradient(self) -> float | None:
        return None if self.w.grad is None else self.w.grad.item()


class Toy(Recorded):
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
        super().__init__(lr)
        self.w = nn.Parameter(torch.tensor(start, dtype=dtype))
        self.kind, self.loss, self.weight = kind, loss, weight

    def losses(self, batch: Tensor) -> Tensor:
        products = batch.to(self.w.dtype) * self.w
        products = products.sum(-1) if products.ndim > 1 else products
        return products if self.kind == "lin" else 0.5 * products**2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.losses(batch)
        loss = losses.mean() if self.loss == "mean" else losses.sum()
        if self.weight is None:
            return loss
        return {"loss": loss, "weight": self.weight(batch, batch_idx)}


class MLP(Recorded):
    """8-16-4 with tanh and cross-entropy; `variant` names what is special about it."""

    def __init__(self, variant: str = "") -> None:
        super().__init__(0.1)
        torch.manual_seed(11)
        self.variant = variant
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        if variant == "unused":
            self.extra = nn.Linear(3, 3)
        self.first.requires_grad_(variant != "frozen")
        self.body = nn.Sequential(self.first, nn.Tanh(), self.second)

    def forward(self, x: Tensor) -> Tensor:
        if self.variant.startswith("checkpoint"):
            reentrant = self.variant == "checkpoint_reentrant"
            hidden = checkpoint(
                lambda y: torch.tanh(self.first(y)), x.requires_grad_(reentrant), use_reentrant=reentrant
            )
            return checkpoint(self.second, hidden, use_reentrant=reentrant)
        return self.body(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr, momentum=0.9)


COUNTS = (3, 1)
"""The samples of each rank in a batch of an MLP."""


def samples(steps: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    size = sum(COUNTS)
    return [
        (torch.randn(size, 8, generator=generator, dtype=dtype), torch.randint(4, (size,), generator=generator))
        for _ in range(steps)
    ]


def shares(steps: int, dtype: torch.dtype = torch.float32, counts: Sequence[int] = COUNTS) -> list[list[Any]]:
    cut = [(x.split(counts), y.split(counts)) for x, y in samples(steps, dtype)]
    return [[(x[rank], y[rank]) for x, y in cut] for rank in range(len(counts))]


def alone(model: Any, of_ranks: Sequence[Sequence[Any]], window: int = 1, clip: float = math.inf) -> list[Tensor]:
    """Return the weights before and after each step on all ranks' batches at once, of one process without Lightning."""
    optimizer, found = model.configure_optimizers(), [flat(model.parameters())]
    for start in range(0, len(of_ranks[0]), window):
        parts = [batch for of_rank in of_ranks for batch in of_rank[start : start + window]]
        plain = isinstance(parts[0], Tensor)
        batch = torch.cat(parts) if plain else tuple(torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        output = model.training_step(batch, 0)
        (output["loss"] if isinstance(output, dict) else output).backward()
        if clip < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        found.append(flat(model.parameters()))
    return found


class Memory(Logger):
    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.hyperparameters: list[dict[str, Any]] = []

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hyperparameters.append(dict(params))

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


def loader(micro_batches: Iterable[Any]) -> DataLoader[Any]:
    """Return a loader that yields exactly these micro-batches; lists of numbers as tensors."""
    data: Any = [torch.tensor(one, dtype=torch.float64) if isinstance(one, list) else one for one in micro_batches]
    return DataLoader(data, batch_size=None)


def train(
    per_rank: Mapping[int, Sequence[Any]] | Sequence[Sequence[Any]],
    toy: Mapping[str, Any] | None = None,
    strategy: Mapping[str, Any] | None = None,
    nodes: Sequence[int] | None = None,
    module: Callable[..., Any] = Toy,
    of: Callable[..., Any] = GradAvgStrategy,
    **options: Any,
) -> Seen:
    """Body: train a model on each rank's own micro-batches with a real Trainer, under a strategy of ours by default."""
    model = module(**(toy or {}))
    trainer = make_trainer(
        of(**(strategy or {})), nodes=nodes, **{"max_epochs": 1, "use_distributed_sampler": False, **options}
    )
    trainer.fit(model, loader(per_rank[dist.get_rank()]))
    seen: Seen = model.seen
    seen.steps = trainer.global_step
    return seen


def same_everywhere(seen: Sequence[Seen]) -> Seen:
    """Assert that all ranks took part and hold the same bits, and return what they saw."""
    assert [(one.rank, one.world_size) for one in seen] == [(rank, len(seen)) for rank in range(len(seen))]
    for one in seen[1:]:
        assert len(one.gradients) == len(seen[0].gradients) > 0
        for mine, first in zip(one.gradients + one.weights, seen[0].gradients + seen[0].weights, strict=True):
            assert torch.equal(mine, first)
    return seen[0]


class OfTrainer:
    def __init__(self, module: LightningModule) -> None:
        self.optimizer: Any = module.optimizers()
        self.backward = module.manual_backward

    def set_up(self, module: nn.Module) -> Any:
        return module

    def no_sync(self, model: Any, *, enabled: bool) -> Any:
        return self.optimizer.toggle_model(sync_grad=not enabled)


class OfFabric:
    def __init__(self, strategy: Any = None, nodes: Sequence[int] | None = None, **options: Any) -> None:
        environment = RankEnvironment(nodes)
        self.fabric = Fabric(
            accelerator="cpu",
            devices=environment.ranks_on_node,
            num_nodes=environment.num_nodes,
            strategy=of_fabric.GradAvgStrategy(**options) if strategy is None else strategy,
            plugins=[environment],
        )
        self.strategy: Any = self.fabric.strategy
        self.set_up, self.backward = self.fabric.setup, self.fabric.backward
        self.fabric.launch()

    def no_sync(self, model: Any, *, enabled: bool) -> Any:
        return self.fabric.no_backward_sync(model, enabled=enabled)


class OfTorch:
    def __init__(self, nodes: Sequence[int] | None = None, ddp: Any = None, **options: Any) -> None:
        self.reducer = GradAvgReducer(**options)
        self.ddp, self.node = ddp or {}, None if nodes is None else nodes[dist.get_rank()]

    def set_up(self, module: nn.Module) -> Any:
        model = DistributedDataParallel(module, **self.ddp)
        self.reducer.register(model, node=self.node)
        return model

    def backward(self, loss: Any, *, retain_graph: bool | None = None, **weight: Any) -> None:
        self.reducer.weigh(loss, **weight).backward(retain_graph=retain_graph)

    @contextmanager
    def no_sync(self, model: Any, *, enabled: bool) -> Iterator[None]:
        if not enabled:
            yield
            return
        with model.no_sync():
            yield
