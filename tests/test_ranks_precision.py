"""Precisions, clipping, sparse gradients and double backward under a reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from toys import AWARE, WEIGHTED, Recorded, Toy, approx, flat, same_everywhere, train

pytestmark = AWARE


class Weighed(Toy):
    """A batch is its gradient, and then its weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": (self.w * batch[:-1].to(self.w.dtype)).sum(), "weight": batch[-1].double()}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("precision", "dtype"), [("16-true", torch.float16), ("bf16-true", torch.bfloat16)])
def test_half_precision_is_summed_in_single(world, precision, dtype, window):
    """The mean of 60000 and 50000, weighted 3 to 1, does not overflow on the way; nor does one of 2e-7 underflow."""
    for scale in (1.0, 2.0**-38):
        rows = [[[60000.0 * scale, 3.0]] * window, [[50000.0 * scale, 1.0]] * window]
        options = {"module": Weighed, "precision": precision, "accumulate_grad_batches": window}
        seen = same_everywhere(world(2).run(train, rows, {"dtype": dtype}, WEIGHTED, **options))
        expected = torch.tensor(57500.0 * scale, dtype=dtype)
        assert dtype == seen.gradients[0].dtype
        # Each of the two gradients was rounded to half precision before they were averaged.
        torch.testing.assert_close(seen.gradients[0], expected, rtol=2 * torch.finfo(dtype).eps, atol=2.0**-24)


def test_bfloat16_is_rounded_once(world):
    """Summed in bfloat16, half of the numbers would differ."""
    of_ranks = torch.randn(3, 100, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows, toy = [[[*one.tolist(), 1.0]] for one in of_ranks], {"dtype": torch.bfloat16, "start": [1.0] * 100}
    seen = same_everywhere(world(3).run(train, rows, toy, WEIGHTED, module=Weighed, precision="bf16-true"))
    assert torch.equal(of_ranks.float().mean(0).bfloat16(), seen.gradients[0])


class Mixed(Recorded):
    def __init__(self) -> None:
        super().__init__(0.1)
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.net(batch).float().square().mean(), "weight": 4096 * len(batch)}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("precision", "scale", "tolerance"), [("16-mixed", 2.0**15, 2e-3), ("bf16-mixed", None, 2e-2)])
def test_mixed_precision(world, precision, scale, tolerance, window):
    """Weights of thousands do not overflow a loss scaled by 2**15: the gradient is that of float32, rounded."""
    draw = torch.Generator().manual_seed(10)
    rows = [[torch.randn(n, 6, generator=draw) for _ in range(window)] for n in (3, 1)]
    plugin = MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu", init_scale=scale) if scale else None)
    options = {"plugins": [plugin], "accumulate_grad_batches": window}
    seen = same_everywhere(world(2).run(train, rows, None, WEIGHTED, module=Mixed, **options))
    model = Mixed()
    loss = model.net(torch.cat([torch.cat(of_rank) for of_rank in rows])).square().mean()
    expected = flat(torch.autograd.grad(loss, list(model.parameters())))
    assert torch.linalg.norm(seen.gradients[0] - expected) <= tolerance * torch.linalg.norm(expected)


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


class Penalty(Recorded):
    """y = w x^2 + b, and the loss is the square of dy/dx, which b drops out of."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad((self.w * x**2 + self.b).sum(), x, create_graph=True)
        return slope.square().mean()


@pytest.mark.parametrize(("reduction", "expected"), [("weighted_mean", 20.0), ("sum", 40.0)])
def test_double_backward(world, reduction, expected):
    """Local gradients 8 and 32 give 20 for w; b has none, or zero."""
    strategy = {"reduction": reduction, "find_unused_parameters": True}
    (gradient,) = same_everywhere(world(2).run(train, [[[1.0]], [[2.0]]], None, strategy, module=Penalty)).gradients
    w, *b = gradient.flatten().tolist()
    assert (approx(expected, 1e-6), True) == (w, b in ([], [0.0]))


class Sparse(Recorded):
    """An embedding with sparse gradients next to a dense layer."""

    def __init__(self) -> None:
        super().__init__(0.1)
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(7, 3, sparse=True).double(), nn.Linear(3, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch.numel() == 0:
            return {"loss": self.head(self.table(torch.tensor([0]))).mean() * torch.nan, "weight": 0}
        return {"loss": self.head(self.table(batch)).square().mean(), "weight": batch.numel()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.table.weight.grad is not None
        assert self.table.weight.grad.is_sparse
        super().on_before_optimizer_step(optimizer)


@pytest.mark.parametrize(
    "per_rank",
    [[[[1, 2, 2]], [[2]]], [[[1, 2, 2]], [[]]], [[[1, 2], [3]], [[4, 5, 6], [1]]], [[[1, 2], [3]], [[], [1]]]],
    ids=str,
)
def test_sparse_gradients(world, per_rank):
    model, rows = Sparse(), [[torch.tensor(tokens, dtype=torch.long) for tokens in of_rank] for of_rank in per_rank]
    loss = model.head(model.table(torch.cat([torch.cat(of_rank) for of_rank in rows]))).square().mean()
    expected = flat(torch.autograd.grad(loss, list(model.parameters())))
    window = len(per_rank[0])
    seen = world(2).run(train, rows, None, WEIGHTED, module=Sparse, accumulate_grad_batches=window)
    torch.testing.assert_close(same_everywhere(seen).gradients[0], expected, rtol=1e-12, atol=1e-12)
