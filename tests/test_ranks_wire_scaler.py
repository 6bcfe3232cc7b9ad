"""Loss scaling under every wire type: a step that one rank loses is lost on all, and the next ones are right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from ranks import make_trainer
from torch import nn
from torch.utils.data import DataLoader
from toys import Seen

from lightning_gradavg import GradAvgStrategy

# As in test_ranks_wire, and 1e-3 for the half precision of the forward and backward themselves.
LARGEST_ERROR = {"bfloat16": 3e-3, "float16": 1e-3, "int8": 1.3e-2, None: 1e-3}

WIRES: list[Any] = [
    ([0, 0], {"wire_dtype": "bfloat16"}),
    ([0, 0], {"wire_dtype": "float16"}),
    ([0, 0], {"wire_dtype": "int8"}),
    ([0, 0, 1, 1], {"wire_dtype": "int8", "wire_scope": "nodes"}),
    ([0, 0, 1, 1], {"node_aware": True}),
]

WIDTH = 32


class Scaled(LightningModule):
    """A network in float16 under a gradient scaler, whose weights stay where they are.

    A batch is a seed and what the loss is multiplied by.
    """

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.lr = lr
        self.seen = Seen(dist.get_rank(), dist.get_world_size())
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        seed, factor = batch.tolist()
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(int(seed)))
        return {"loss": self.net(x).float().square().mean() * factor, "weight": 1 + dist.get_rank()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters()]))

    def on_train_batch_end(self, *args: Any) -> None:
        precision: Any = self.trainer.precision_plugin
        self.scales.append(precision.scaler.get_scale())
        self.seen.weights.append(torch.cat([p.detach().flatten() for p in self.parameters()]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def train_scaled(
    nodes: Sequence[int],
    wire: Any,
    factors: Sequence[Sequence[float]],
    scale: float = 2.0**10,
    growth: int = 2000,
    lr: float = 0.0,
    window: int = 1,
    seeds: int = 1,
) -> tuple[Seen, list[float]]:
    """Body: train on batches of seed `rank + 10 * (step modulo seeds)`, times this rank's factors."""
    rank = dist.get_rank()
    model = Scaled(lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth)
    trainer = make_trainer(
        GradAvgStrategy(reduction="weighted_mean", bucket_cap_mb=0.003, **wire),
        nodes=nodes,
        max_epochs=1,
        use_distributed_sampler=False,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        accumulate_grad_batches=window,
    )
    data: Any = [torch.tensor([rank + 10.0 * (step % seeds), factor]) for step, factor in enumerate(factors[rank])]
    trainer.fit(model, DataLoader(data, batch_size=None))
    return model.seen, model.scales


def exact_gradient(world_size: int) -> torch.Tensor:
    """Return the weighted mean of the ranks' gradients in float32."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    total = torch.zeros(sum(p.numel() for p in net.parameters()))
    for rank in range(world_size):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
        gradients = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
        total += (1 + rank) * torch.cat([gradient.flatten() for gradient in gradients])
    return total / sum(range(1, world_size + 1))


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def of_ranks(answers: Sequence[tuple[Seen, list[float]]]) -> tuple[Seen, list[float]]:
    """Assert that all ranks saw the same scales and bits, NaN included, and return them."""
    first, first_scales = answers[0]
    expected = first.gradients + first.weights
    for seen, scales in answers[1:]:
        assert first_scales == scales
        torch.testing.assert_close(seen.gradients + seen.weights, expected, rtol=0, atol=0, equal_nan=True)
    assert [(seen.rank, seen.world_size) for seen, _ in answers] == [(r, len(answers)) for r in range(len(answers))]
    return answers[0]


def factors_of(world_size: int, steps: int, bad: Sequence[int], value: float = torch.inf) -> list[list[float]]:
    """Return 1 for every rank and step, but `value` in the bad steps of rank 1."""
    return [[value if rank == 1 and step in bad else 1.0 for step in range(steps)] for rank in range(world_size)]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("nodes", "wire"), WIRES, ids=str)
def test_overflow_on_one_rank(world, nodes, wire, window):
    """An infinite loss on one rank has all ranks skip the step, halve the scale and go on with right gradients."""
    factors = factors_of(len(nodes), 5 * window, [2 * window])
    answers = world(len(nodes)).run(train_scaled, nodes, wire, factors, lr=1e-6, window=window)
    seen, scales = of_ranks(answers)
    assert [1024.0, 1024.0, 512.0, 512.0, 512.0] == scales[window - 1 :: window]
    assert not seen.gradients[2].isfinite().all()
    weights = seen.weights[window - 1 :: window]
    assert [False, True, False, False] == [torch.equal(a, b) for a, b in pairwise(weights)]
    exact = exact_gradient(len(nodes))
    for step in (0, 1, 3, 4):
        # From the second step on, int8 pays back what the step before owed.
        owed = 1 if wire.get("wire_dtype") == "int8" and step > 0 else 0
        assert relative_error(seen.gradients[step], exact) <= (1 + owed) * LARGEST_ERROR[wire.get("wire_dtype")]


@pytest.mark.parametrize("losses", [1, 10, 16])
@pytest.mark.parametrize(("nodes", "wire"), WIRES, ids=str)
def test_lost_steps_in_a_row(world, nodes, wire, losses):
    """While the scale falls to a 65536th, what int8 owed in its old units is not added to gradients in its new ones:
    after 16 lost steps the next gradient is as exact as any."""
    factors = factors_of(len(nodes), losses + 7, range(4, 4 + losses))
    seen, scales = of_ranks(world(len(nodes)).run(train_scaled, nodes, wire, factors, scale=2.0**16))
    assert 2.0 ** (16 - losses) == scales[-1]
    exact = exact_gradient(len(nodes))
    lost = [not gradient.isfinite().all() for gradient in seen.gradients]
    assert [4 <= step < 4 + losses for step in range(losses + 7)] == lost
    owed = 2 if wire.get("wire_dtype") == "int8" else 1
    for gradient in (*seen.gradients[:4], *seen.gradients[4 + losses :]):
        assert relative_error(gradient, exact) <= owed * LARGEST_ERROR[wire.get("wire_dtype")]


def test_power_sgd_survives_a_lost_step(world):
    """After a step that was lost PowerSGD begins anew: its errors and matrices, NaN by then, are not used again. The
    mean of its gradients comes near the exact one."""
    wire = {"power_sgd_rank": 4, "power_sgd_start_step": 2}
    seen, scales = of_ranks(world(2).run(train_scaled, [0, 0], wire, factors_of(2, 60, [4]), scale=2.0**10))
    assert 2.0**9 == scales[-1]
    exact = exact_gradient(2)
    assert [step == 4 for step in range(60)] == [not gradient.isfinite().all() for gradient in seen.gradients]
    mean = torch.stack(seen.gradients[5:]).mean(0)
    assert relative_error(mean, exact) <= 0.25 * relative_error(seen.gradients[5], exact)


@pytest.mark.parametrize("growth", [1000, 10])
def test_growing_scale(world, growth):
    """What int8 owes is worth half when the scale doubles. Over 40 steps and 4 doublings their mean is still off by no
    more than what is owed in the end, and those four halves: by a tenth of a step's error."""
    seen, scales = of_ranks(
        world(2).run(train_scaled, [0, 0], {"wire_dtype": "int8"}, factors_of(2, 40, []), scale=2.0**6, growth=growth)
    )
    assert 2.0 ** (6 + 40 // growth) == scales[-1]
    exact = exact_gradient(2)
    assert relative_error(torch.stack(seen.gradients).mean(0), exact) <= 0.1 * LARGEST_ERROR["int8"]
