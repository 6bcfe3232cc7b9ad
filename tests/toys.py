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
from torch.utils.data import DataLoader, IterableDataset

from lightning_gradavg import GradAvgReducer, GradAvgStrategy, gather
from lightning_gradavg import fabric as of_fabric

WEIGHTED = {"reduction": "weighted_mean"}

# Marks of tests that do on purpose what torch warns of.
IGNORE_UNUSED_PARAMETERS = [pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")]
IGNORE_DEPRECATED_GATHER = pytest.mark.filterwarnings(
    r"ignore:torch.distributed.nn.functional.all_gather is deprecated"
)

GATHERS: dict[str, Callable[[LightningModule, Tensor], Tensor]] = {
    "lightning_gradavg": lambda module, rows: gather(rows),
    "Lightning": lambda module, rows: cast("Tensor", module.all_gather(rows, sync_grads=True)).flatten(0, 1),
    "torch": lambda module, rows: torch.cat(all_gather(rows)),
}
"""Ways to gather all ranks' rows with their gradient: `(module, rows) -> rows of all ranks`."""


def approx(value: Any, tolerance: float = 1e-12) -> Any:
    """Return what equals a value up to a tolerance, both relative and absolute. NaN equals NaN."""
    return pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return a copy of one tensor, or of several end to end; of sharded ones, what all shards hold."""
    copies = []
    for tensor in tensors:
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()  # noqa: PLW2901  # the whole of the sharded tensor
        copies.append(tensor.detach().to_dense().clone())
    if len(copies) == 1:
        return copies[0]
    return torch.cat([copy.flatten() for copy in copies])


@dataclass
class Seen:
    """What one rank saw of a run."""

    rank: int
    world_size: int
    # Before each step, the gradients of all parameters that have some, end to end.
    gradients: list[Tensor] = field(default_factory=list)
    # After each step, all parameters, end to end.
    weights: list[Tensor] = field(default_factory=list)
    # The number of optimizer steps.
    steps: int = 0


class Recorded(LightningModule):
    """Records the gradients that its optimizer sees, SGD without momentum, and the weights that it makes."""

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__()
        self.lr = lr
        if dist.is_initialized():
            self.seen = Seen(dist.get_rank(), dist.get_world_size())
        else:
            self.seen = Seen(0, 1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        if gradients:
            self.seen.gradients.append(flat(gradients))

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step > len(self.seen.weights):
            self.seen.weights.append(flat(self.parameters()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class OneWeight(nn.Module):
    """One weight, by which a sample is multiplied: the gradient of a sample is the sample."""

    def __init__(self, start: Any = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, samples: Tensor) -> Tensor:
        return samples * self.w

    @property
    def gradient(self) -> float | None:
        if self.w.grad is None:
            return None
        return self.w.grad.item()


class Toy(Recorded):
    """One weight, or several that a sample's numbers are multiplied by.

    `kind` is "lin" or "s", see above. `loss` is "mean" or "sum" over the samples of a micro-batch. If there is a
    `weight`, a function of a batch and its index, the training step returns its result with the loss.
    """

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
        self.kind = kind
        self.loss = loss
        self.weight = weight

    def losses(self, batch: Tensor) -> Tensor:
        """Return the loss of each sample."""
        predictions = batch.to(self.w.dtype) * self.w
        if predictions.ndim > 1:
            predictions = predictions.sum(-1)
        if self.kind == "lin":
            return predictions
        return 0.5 * predictions**2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.losses(batch)
        if self.loss == "mean":
            loss = losses.mean()
        else:
            loss = losses.sum()
        if self.weight is None:
            return loss
        return {"loss": loss, "weight": self.weight(batch, batch_idx)}


class MLP(Recorded):
    """8-16-4 with tanh and cross-entropy, trained by SGD with momentum.

    `variant` is "unused" (with a layer that no loss depends on), "frozen" (without gradients of the first layer),
    "checkpoint" or "checkpoint_reentrant" (layers are computed again in the backward), or "".
    """

    def __init__(self, variant: str = "") -> None:
        super().__init__(0.1)
        torch.manual_seed(11)
        self.variant = variant
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)
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
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.9)


COUNTS = (3, 1)
"""The samples of each rank in a batch of an MLP."""


def make_samples(steps: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """Return one batch of inputs and classes for each step of an MLP, of all ranks together."""
    generator = torch.Generator().manual_seed(5)
    size = sum(COUNTS)
    batches = []
    for _ in range(steps):
        inputs = torch.randn(size, 8, generator=generator, dtype=dtype)
        classes = torch.randint(4, (size,), generator=generator)
        batches.append((inputs, classes))
    return batches


def make_batches_of_ranks(
    steps: int, dtype: torch.dtype = torch.float32, counts: Sequence[int] = COUNTS
) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the batches of each rank, which has so many samples (`counts`) of each batch of `make_samples`."""
    batches_of_ranks: list[list[tuple[Tensor, Tensor]]] = [[] for _ in counts]
    for inputs, classes in make_samples(steps, dtype):
        parts = zip(inputs.split(counts), classes.split(counts), strict=True)
        for batches, part in zip(batches_of_ranks, parts, strict=True):
            batches.append(part)
    return batches_of_ranks


def join_batches(batches: Sequence[Any]) -> Any:
    """Return one batch with the samples of several: tensors, or tuples of tensors."""
    if isinstance(batches[0], Tensor):
        return torch.cat(list(batches))
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def train_in_one_process(
    model: Any, batches_of_ranks: Sequence[Sequence[Any]], window: int = 1, clip: float = math.inf
) -> list[Tensor]:
    """Train on the batches of all ranks and of each window at once, in this process and without Lightning.

    Return the weights before the first and after each step. Gradients of a norm beyond `clip` are clipped.
    """
    optimizer = model.configure_optimizers()
    weights = [flat(model.parameters())]
    for start in range(0, len(batches_of_ranks[0]), window):
        batches_of_window: list[Any] = []
        for batches in batches_of_ranks:
            batches_of_window += batches[start : start + window]
        optimizer.zero_grad()
        output = model.training_step(join_batches(batches_of_window), 0)
        loss = output["loss"] if isinstance(output, dict) else output
        loss.backward()
        if clip < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        weights.append(flat(model.parameters()))
    return weights


class MemoryLogger(Logger):
    """Keeps what is logged in lists."""

    name = "memory"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.hyperparameters: list[dict[str, Any]] = []

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hyperparameters.append(dict(params))

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Stream(IterableDataset[Any]):
    """A dataset of no known length."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def make_loader(micro_batches: Iterable[Any]) -> DataLoader[Any]:
    """Return a loader that yields exactly these micro-batches; lists of numbers as tensors."""
    data: Any = []
    for micro_batch in micro_batches:
        if isinstance(micro_batch, list):
            data.append(torch.tensor(micro_batch, dtype=torch.float64))
        else:
            data.append(micro_batch)
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
    """Body: train a model on each rank's own micro-batches, with a real Trainer.

    `toy` and `strategy` are options of the model (a class, `module`) and of the strategy (a class, `of`), the others
    those of the Trainer.
    """
    model = module(**(toy or {}))
    options = {"max_epochs": 1, "use_distributed_sampler": False, **options}
    trainer = make_trainer(of(**(strategy or {})), nodes=nodes, **options)
    trainer.fit(model, make_loader(per_rank[dist.get_rank()]))
    seen: Seen = model.seen
    seen.steps = trainer.global_step
    return seen


def same_everywhere(seen_by_ranks: Sequence[Seen]) -> Seen:
    """Assert that all ranks took part and hold the same bits, and return what they saw."""
    first = seen_by_ranks[0]
    for rank, seen in enumerate(seen_by_ranks):
        assert rank == seen.rank
        assert len(seen_by_ranks) == seen.world_size
    for seen in seen_by_ranks[1:]:
        assert len(seen.gradients) == len(first.gradients) > 0
        tensors_of_first = first.gradients + first.weights
        for tensor, tensor_of_first in zip(seen.gradients + seen.weights, tensors_of_first, strict=True):
            assert torch.equal(tensor, tensor_of_first)
    return first


# The loops in which a user says where a window ends. Each has
#
#   set_up(module)                  the model that computes and reduces
#   backward(loss, weight=...)      the backward of a loss
#   no_sync(model, enabled=...)     a block whose backward does not end the window, if it is enabled


class TrainerLoop:
    """Manual optimization in the Trainer."""

    def __init__(self, module: LightningModule) -> None:
        self.optimizer: Any = module.optimizers()
        self.backward = module.manual_backward

    def set_up(self, module: nn.Module) -> Any:
        return module

    def no_sync(self, model: Any, *, enabled: bool) -> Any:
        return self.optimizer.toggle_model(sync_grad=not enabled)


class FabricLoop:
    """Fabric, under a strategy with these options, or another `strategy`."""

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
        self.set_up = self.fabric.setup
        self.backward = self.fabric.backward
        self.fabric.launch()

    def no_sync(self, model: Any, *, enabled: bool) -> Any:
        return self.fabric.no_backward_sync(model, enabled=enabled)


class TorchLoop:
    """Plain torch with `GradAvgReducer`, which has these options; `ddp` are options of DDP."""

    def __init__(self, nodes: Sequence[int] | None = None, ddp: Any = None, **options: Any) -> None:
        self.reducer = GradAvgReducer(**options)
        self.ddp = ddp or {}
        self.node = nodes[dist.get_rank()] if nodes is not None else None

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
