"""Gradients that are known on all ranks, and training runs that reduce exactly these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.models import MODELS, Measured
from benchmarks.ways import live_places
from lightning_gradavg import average_gradients
from lightning_gradavg.reduction.combine import combine
from lightning_gradavg.rules import RULES, Rule

__all__ = ["STEPS", "WINDOW", "Given", "Gradients", "Look", "average", "fit", "give", "gradients_of", "weight_of"]

STEPS = 3
"""Optimizer steps: buckets are rebuilt after the first, and PowerSGD begins with the third."""

WINDOW = 2
"""Micro-batches of a step."""

Gradients = list[Tensor]
"""One per parameter."""


@dataclass(frozen=True)
class Given:
    """What is reduced.

    Attributes:
        local: This rank's gradients, of every step and micro-batch.
        gathered: Of every step and parameter the gradients of all pairs of rank and micro-batch, rank by rank.
        nodes: The node of every rank.
    """

    local: list[list[Gradients]]
    gathered: list[Gradients]
    nodes: list[int]

    def expected(self, rule: Rule, window: int) -> Iterator[Gradients]:
        """Yield what the rule defines for each step in float64, the first micro-batches of each window counted."""
        nodes = [node for node in self.nodes for _ in range(window)]
        world_size = len(self.nodes)
        weights = [weight_of(rank, micro, world_size) for rank in range(world_size) for micro in range(window)]
        for step in self.gathered:
            yield [
                combine(
                    pairs.unflatten(0, (-1, WINDOW))[:, :window].flatten(0, 1).double(),
                    rule=rule,
                    nodes=nodes,
                    weights=weights,
                )
                for pairs in step
            ]


def weight_of(rank: int, micro: int, world_size: int) -> float:
    """Return the weight of a rank's micro-batch."""
    if micro == WINDOW - 1 and rank == world_size - 1:
        return 0.0
    return 3.0 + rank + 2.5 * micro


def give(model: str, device: torch.device) -> tuple[nn.Module, Given]:
    """Compute and gather the gradients of a model, the same on all ranks."""
    torch.manual_seed(0)
    module = Measured(MODELS[model].model()).to(device)
    parameters = list(module.parameters())
    torch.manual_seed(1 + dist.get_rank())
    local = []
    for _ in range(STEPS):
        window = []
        for _ in range(WINDOW):
            inputs, target = MODELS[model].batch()
            loss = module.loss((inputs.to(device), target.to(device)))
            window.append(list(torch.autograd.grad(loss, parameters)))
        local.append(window)
    gathered = [
        [_gather(torch.stack([window[micro][index] for micro in range(WINDOW)])) for index in range(len(parameters))]
        for window in local
    ]
    return module.network, Given(local, gathered, [place.node for place in live_places()])


def _gather(mine: Tensor) -> Tensor:
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.cat(everyone)


class _Linear(LightningModule):
    """A network whose gradients are given."""

    def __init__(self, network: nn.Module, local: list[list[Gradients]]) -> None:
        super().__init__()
        self.network = network
        self._local = local

    @override
    def training_step(self, batch: int, batch_idx: int) -> dict[str, Any]:
        step, micro = divmod(batch_idx, WINDOW)
        loss = _linear(self.network, self._local[step][micro])
        return {"loss": loss, "weight": weight_of(dist.get_rank(), micro, dist.get_world_size())}

    @override
    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.0)


def _linear(network: nn.Module, gradients: Gradients) -> Tensor:
    terms = [(parameter * given).sum() for parameter, given in zip(network.parameters(), gradients, strict=True)]
    return torch.stack(terms).sum()


Look = Callable[[int, Gradients], None]
"""Takes a step and its reduced gradients."""


class _Look(Callback):
    def __init__(self, look: Look) -> None:
        self._look = look

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Look at the reduced gradients of a step."""
        del optimizer
        self._look(trainer.global_step, gradients_of(pl_module))


def gradients_of(module: nn.Module) -> Gradients:
    """Return the gradients of a module."""
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def fit(strategy: Callable[[], Strategy], network: nn.Module, given: Given, look: Look) -> None:
    """Reduce the gradients by a strategy, in a real training run."""
    device = next(network.parameters()).device
    nodes = len(set(given.nodes))
    trainer = Trainer(
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=len(given.nodes) // nodes,
        num_nodes=nodes,
        strategy=strategy(),
        max_epochs=1,
        accumulate_grad_batches=WINDOW,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[_Look(look)],
    )
    batches: Any = list(range(STEPS * WINDOW))
    trainer.fit(_Linear(network, given.local), DataLoader(batches, batch_size=None))
    network.to(device)
    network.zero_grad()


def average(network: nn.Module, given: Given, look: Look, *, reduction: str, **options: Any) -> None:
    """Reduce the first micro-batch of each window by the function for plain loops."""
    weight = weight_of(dist.get_rank(), 0, dist.get_world_size()) if RULES[reduction].uses_weight else None
    for step, window in enumerate(given.local):
        network.zero_grad()
        _linear(network, window[0]).backward()
        average_gradients(network, reduction=reduction, weight=weight, **options)
        look(step, gradients_of(network))
    network.zero_grad()
