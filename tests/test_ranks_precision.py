"""Precisions, clipping, sparse gradients, double backward and process groups under a reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from ranks import make_trainer
from torch import nn
from torch.utils.data import DataLoader
from toys import AWARE, WEIGHTED, Seen, Toy, approx, same_everywhere, train

from lightning_gradavg import GradAvgStrategy

pytestmark = AWARE


class Lin(Toy):
    """Toy-Lin whose batch is `[x, weight]`, in the dtype that the precision asks for."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype=dtype, lr=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.w * batch[0].to(self.w.dtype)
        return {"loss": loss, "weight": batch[1].double()} if batch.numel() == 2 else loss


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("precision", "dtype"), [("16-true", torch.float16), ("bf16-true", torch.bfloat16)])
def test_half_precision_is_summed_in_single(world, precision, dtype, window):
    """The mean of 60000 and 50000, weighted 3 to 1, does not overflow on the way; nor does one of 2e-7 underflow."""
    for scale in (1.0, 2.0**-38):
        rows = [[[60000.0 * scale, 3.0]] * window, [[50000.0 * scale, 1.0]] * window]
        seen = same_everywhere(
            world(2).run(
                train, rows, {"dtype": dtype}, WEIGHTED, module=Lin, precision=precision, accumulate_grad_batches=window
            )
        )
        expected = torch.tensor(57500.0 * scale, dtype=dtype)
        assert dtype == seen.gradients[0].dtype
        # Each of the two gradients was rounded to half precision before they were averaged.
        torch.testing.assert_close(seen.gradients[0], expected, rtol=2 * torch.finfo(dtype).eps, atol=2.0**-24)


class Wide(Toy):
    """The batch is the gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": (self.w * batch.to(self.w.dtype)).sum(), "weight": 1}


def test_bfloat16_is_rounded_once(world):
    """Summed in bfloat16, half of the numbers would differ."""
    of_ranks = torch.randn(3, 100, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows, toy = [[one.tolist()] for one in of_ranks], {"dtype": torch.bfloat16, "start": [1.0] * 100}
    seen = same_everywhere(world(3).run(train, rows, toy, WEIGHTED, module=Wide, precision="bf16-true"))
    assert torch.equal(of_ranks.float().mean(0).bfloat16(), seen.gradients[0])


def train_mixed(precision: str, scale: float | None, weights: Any, window: int) -> Any:
    """Body: mixed precision on CPU; returns the gradients that reach the optimizer and those of float32."""
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = Mixed()
    plugin = MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu", init_scale=scale) if scale else None)
    trainer = make_trainer(
        GradAvgStrategy(**WEIGHTED),
        max_epochs=1,
        use_distributed_sampler=False,
        plugins=[plugin],
        accumulate_grad_batches=window,
    )
    data = [
        torch.randn(weights[rank], 6, generator=torch.Generator().manual_seed(10 * m + rank)) for m in range(window)
    ]
    trainer.fit(model, DataLoader(data, batch_size=None))
    return model.seen


class Mixed(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.seen = Seen(dist.get_rank(), dist.get_world_size())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.net(batch).float().square().mean(), "weight": 4096 * len(batch)}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.gradients.extend(p.grad.clone() for p in self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("precision", "scale", "tolerance"), [("16-mixed", 2.0**15, 2e-3), ("bf16-mixed", None, 2e-2)])
def test_mixed_precision(world, precision, scale, tolerance, window):
    """Weights of thousands do not overflow a loss scaled by 2**15: the gradient is that of float32, rounded."""
    weights = (3, 1)
    seen = same_everywhere(world(2).run(train_mixed, precision, scale, weights, window))
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    data = torch.cat(
        [
            torch.randn(n, 6, generator=torch.Generator().manual_seed(10 * m + r))
            for r, n in enumerate(weights)
            for m in range(window)
        ]
    )
    expected = torch.autograd.grad(net(data).square().mean(), list(net.parameters()))
    for gradient, reference in zip(seen.gradients, expected, strict=True):
        assert torch.linalg.norm(gradient - reference) <= tolerance * torch.linalg.norm(reference)


@pytest.mark.parametrize(
    ("reduction", "algorithm", "window", "expected"),
    [
        ("weighted_mean", "norm", 2, (-0.6, -0.8)),
        ("mean", "norm", 1, (-0.6, -0.8)),
        ("sum", "norm", 2, (-0.6, -0.8)),
        ("weighted_mean", "value", 1, (-1.0, -1.0)),
        ("mean", "value", 2, (-1.0, -1.0)),
    ],
)
def test_clipping_sees_the_reduced_gradient(world, reduction, algorithm, expected, window):
    """Case 53: norm clipping to 1 gives (-0.6, -0.8), value clipping (-1, -1), accumulated or not."""
    batches = [[[[3.0, 0.0]]] * window, [[[0.0, 4.0]]] * window]
    toy, options = {"start": [0.0, 0.0], "lr": 1.0}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": algorithm}
    ranks = world(2).run(train, batches, toy, {"reduction": reduction}, accumulate_grad_batches=window, **options)
    assert [approx(value, 1e-5) for value in expected] == same_everywhere(ranks).weights[-1].tolist()


class Penalty(LightningModule):
    """Case 48: y = w x^2 + b, and the loss is the square of dy/dx, which b drops out of."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        self.gradients: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad((self.w * x**2 + self.b).sum(), x, create_graph=True)
        return slope.square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = self.w.grad.item(), None if self.b.grad is None else self.b.grad.item()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train_penalty(reduction: str) -> Any:
    model = Penalty()
    strategy = GradAvgStrategy(reduction=reduction, find_unused_parameters=True)
    data = [torch.tensor([1.0 + dist.get_rank()])]
    make_trainer(strategy, max_epochs=1, use_distributed_sampler=False).fit(model, DataLoader(data, batch_size=None))
    return model.gradients


@pytest.mark.parametrize(("reduction", "expected"), [("weighted_mean", 20.0), ("sum", 40.0)])
def test_double_backward(world, reduction, expected):
    """Case 48: local gradients 8 and 32 give 20 for w; b has none, or zero."""
    for w, b in world(2).run(train_penalty, reduction):
        assert (approx(expected, 1e-6), True) == (w, b in (None, 0.0))


class Sparse(LightningModule):
    """An embedding with sparse gradients next to a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(7, 3, sparse=True).double(), nn.Linear(3, 1).double()
        self.gradients: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch.numel() == 0:
            batch = torch.tensor([0])
            return {"loss": self.head(self.table(batch)).mean() * torch.nan, "weight": 0}
        return {"loss": self.head(self.table(batch)).square().mean(), "weight": batch.numel()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.table.weight.grad is not None
        assert self.table.weight.grad.is_sparse
        self.gradients = [p.grad.clone().to_dense() for p in self.parameters() if p.grad is not None]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_sparse(per_rank: Any, window: int) -> Any:
    model = Sparse()
    data = [torch.tensor(tokens, dtype=torch.long) for tokens in per_rank[dist.get_rank()]]
    trainer = make_trainer(
        GradAvgStrategy(**WEIGHTED), max_epochs=1, use_distributed_sampler=False, accumulate_grad_batches=window
    )
    trainer.fit(model, DataLoader(data, batch_size=None))
    return model.gradients


@pytest.mark.parametrize(
    "per_rank",
    [[[[1, 2, 2]], [[2]]], [[[1, 2, 2]], [[]]], [[[1, 2], [3]], [[4, 5, 6], [1]]], [[[1, 2], [3]], [[], [1]]]],
    ids=str,
)
def test_sparse_gradients(world, per_rank):
    tokens = torch.tensor([token for rank in per_rank for micro_batch in rank for token in micro_batch])
    model = Sparse()
    loss = model.head(model.table(tokens)).square().mean()
    expected = [gradient.to_dense() for gradient in torch.autograd.grad(loss, list(model.parameters()))]
    for gradients in world(2).run(train_sparse, per_rank, len(per_rank[0])):
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)
