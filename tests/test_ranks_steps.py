"""What users do around the steps of a Trainer, with numbers by hand. `cases.py` has the rules themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from toys import AWARE, WEIGHTED, Recorded, Toy, approx, flat, same_everywhere, train

pytestmark = AWARE


STEPS = {"mean": [0.745, 0.555025, 0.413493625], "weighted_mean": [0.745, 0.555025, 0.413493625], "sum": [-1.04]}


@pytest.mark.parametrize("reduction", STEPS)
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 4), (1, 8), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_invariance_grid(world, ranks, accumulation, reduction):
    """Case 12: the steps on 1 to 8 do not depend on how the batch is cut, rank by rank and then in micro-batches."""
    pieces = np.array_split(np.arange(1.0, 9.0), ranks * accumulation)
    expected = STEPS[reduction]
    batches = [[pieces[m * ranks + r].tolist() for m in range(accumulation)] * len(expected) for r in range(ranks)]
    toy = {"kind": "s", "loss": "sum" if reduction == "sum" else "mean"}
    options = {"accumulate_grad_batches": accumulation}
    seen = same_everywhere(world(ranks).run(train, batches, toy, {"reduction": reduction}, **options))
    assert [approx(weight) for weight in expected] == [weight.item() for weight in seen.weights]


class Interrupted(Toy):
    """Ends its first epoch in the middle of a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.trainer.current_epoch == 0 and batch_idx == 3 else None


def test_epoch_that_ends_within_a_window(world):
    rows = [[[1], [2, 2, 2], [3], [4], [5], [6]]] * 2
    options = {"module": Interrupted, "max_epochs": 2, "accumulate_grad_batches": 2}
    seen = same_everywhere(world(2).run(train, rows, {"lr": 0.0}, WEIGHTED, **options))
    assert [1.75, 1.75, 3.5, 5.5] == [gradient.item() for gradient in seen.gradients]


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
def test_scheduled_window(world, reduction):
    """4 batches of gradient 1, windows of 1 and then 2, end at 1 - 4 - 2 = -5."""
    options = {"max_epochs": 2, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}
    seen = same_everywhere(world(2).run(train, [[[1]] * 4] * 2, {"lr": 1.0}, {"reduction": reduction}, **options))
    assert (approx(-5.0), 6) == (seen.weights[-1].item(), len(seen.weights))


class Tuned(Toy):
    """Lightning's callback unfreezes the backbone at the second epoch, and adds it to the optimizer."""

    def __init__(self) -> None:
        super().__init__(start=[1.0])
        self.backbone = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(self.backbone.weight, 2.0)

    def losses(self, batch: Tensor) -> Tensor:
        return self.backbone(self.w) * batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.w], lr=0.5)

    def configure_callbacks(self) -> Any:
        return [BackboneFinetuning(1, backbone_initial_lr=0.25, verbose=False)]


@pytest.mark.parametrize(("strategy", "mean"), [({}, 2.5), (WEIGHTED, 2.0)], ids=str)
def test_a_backbone_that_begins_to_train_in_the_second_epoch(world, strategy, mean):
    """Of samples 1, 1, 1 and 4, or 5 with half of the say: the product `w * backbone` has the gradients of both."""
    seen = same_everywhere(
        world(2).run(
            train, [[[1.0, 1.0, 1.0]], [[5.0 if mean == 2.0 else 4.0]]], None, strategy, module=Tuned, max_epochs=2
        )
    )
    w = 1 - 0.5 * 2 * mean
    assert [approx([w, 2.0]), approx([w - 0.5 * 2 * mean, 2 - 0.25 * w * mean])] == [
        one.tolist() for one in seen.weights
    ]


class ByHand(Toy):
    """Runs `step(module, batch)` as its training step, in manual optimization."""

    def __init__(self, step: Callable[..., None], start: Any = 1.0) -> None:
        super().__init__(start=start)
        self.automatic_optimization, self.step = False, step

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(self, batch, self.optimizers())


def direct(module: ByHand, batch: Tensor, optimizer: Any) -> None:
    module.losses(batch).mean().backward()
    optimizer.step()


def never_synchronized(module: ByHand, batch: Tensor, optimizer: Any) -> None:
    with optimizer.toggle_model(sync_grad=False):
        module.manual_backward(module.losses(batch).mean())
    optimizer.step()


def swapped(module: ByHand, batch: Tensor, optimizer: Any) -> None:
    """Write gradients that differ in their order alone."""
    module.w.grad = torch.tensor([1.0, -1.0] if dist.get_rank() else [-1.0, 1.0], dtype=module.w.dtype)
    optimizer.step()


def again_on_rank_1(module: ByHand, batch: Tensor, optimizer: Any) -> None:
    """Step twice where the batch says so; the other rank does not wait for it."""
    module.manual_backward(module.losses(batch).mean())
    for _ in range(1 + int(dist.get_rank() == 1 and batch.item() == 7)):
        optimizer.step()


@pytest.mark.parametrize(
    ("step", "reduction", "batches", "found"),
    [
        (direct, "mean", [1, 1, 1], 1),
        (direct, "sum", [1, 1, 1], 1),
        (never_synchronized, "weighted_mean", [1, 1, 1], 1),
        (swapped, "mean", [1], 1),
        # The ranks compare after 1, 2 and 4 batches, and at the end.
        (again_on_rank_1, "mean", [7, 1, 1, 1, 1, 1], 1),
        (again_on_rank_1, "mean", [1, 1, 7, 1, 1, 1], 4),
        (again_on_rank_1, "mean", [1, 1, 1, 1, 1, 7], 6),
    ],
)
def test_steps_by_which_ranks_drift_apart_are_an_error(world, step, reduction, batches, found):
    """Stock Lightning says nothing."""
    toy, rows = {"step": step, "start": [1.0, 1.0] if step is swapped else 1.0}, [[[one] for one in batches]] * 2
    if step is not again_on_rank_1:
        rows = [rows[0], [[2.0]] * len(batches)]
    raised = world(2).run_expecting_errors(train, rows, toy, {"reduction": reduction}, module=ByHand)
    (text,) = {f"{one.type_name}: {one.message}" for one in raised}
    assert text.startswith(f"RuntimeError: the ranks drifted apart: after {found} batch(es) parameter 'w' is not the")
    assert "another one is on rank 1." in text
    assert "self.manual_backward(loss)" in text


def of_all(module: ByHand, batch: Tensor, optimizer: Any) -> None:
    """Write a gradient as PCGrad does, of samples that all ranks have."""
    mean = module.trainer.strategy.reduce(batch.clone()).mean()
    module.w.grad = torch.autograd.grad(mean * module.w, module.w)[0]
    optimizer.step()


def reduced(module: ByHand, batch: Tensor, optimizer: Any) -> None:
    """Write a gradient of one's own, reduced by oneself."""
    (gradient,) = torch.autograd.grad(batch.mean() * module.w, module.w)
    dist.all_reduce(gradient)
    module.w.grad = gradient
    optimizer.step()


def kept_graph(module: ByHand, batch: Tensor, optimizer: Any) -> None:
    """Run the backward of named terms, (1 + 3 * 5) / 4 and 10 * 1, and another one of their sum."""
    rank, loss = dist.get_rank(), {"a": module.losses(batch).mean(), "b": 10 * module.losses(batch).mean()}
    module.manual_backward(loss, weight={"a": 1 + 2 * rank, "b": 1 - rank}, retain_graph=True)
    optimizer.step()
    module.zero_grad()
    sum(loss.values()).backward()
    assert module.w.grad is not None
    assert approx(11 * batch.item()) == module.w.grad.item()
    module.zero_grad()


def interrupted(module: ByHand, batch: Tensor, optimizer: Any) -> None:
    """Have a hook raise between the weighing of a loss and its backward, over gradients that are kept."""
    weight = 3 - 2 * dist.get_rank()
    module.manual_backward(module.losses(batch).mean(), weight=weight)
    with patch.object(module, "on_before_backward", side_effect=KeyError), pytest.raises(KeyError):
        module.manual_backward(100 * module.losses(batch).mean(), weight=9)
    module.manual_backward(module.losses(batch).mean(), weight=weight)
    optimizer.step()


@pytest.mark.parametrize(
    ("step", "reduction", "samples", "gradient"),
    [
        (of_all, "sum", (2.0, 4.0), 3.0),
        (reduced, "sum", (2.0, 4.0), 6.0),
        (kept_graph, "weighted_mean", (1.0, 5.0), 4 + 10.0),
        (interrupted, "weighted_mean", (1.0, 5.0), 2 * (3 * 1 + 5) / 4),
    ],
)
def test_steps_by_hand_train_on(world, step, reduction, samples, gradient):
    of_ranks = world(2).run(train, [[[x]] for x in samples], {"step": step}, {"reduction": reduction}, module=ByHand)
    assert [approx(1 - 0.01 * gradient)] * 2 == [seen.weights[0].item() for seen in of_ranks]


class Weighed(Toy):
    """A batch is its gradient, and then its weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": (self.w * batch[:-1].to(self.w.dtype)).sum(), "weight": batch[-1].double()}


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


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted_mean"])
@pytest.mark.parametrize(("algorithm", "expected"), [("norm", (-0.6, -0.8)), ("value", (-1.0, -1.0))])
def test_clipping_sees_the_reduced_gradient(world, reduction, algorithm, expected, window):
    """Case 53: of a gradient in the direction of (3, 4), both above 1."""
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
