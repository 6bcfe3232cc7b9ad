"""Manual optimization on real ranks: what a user steps on was reduced, once, with its weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from toys import AWARE, WEIGHTED, Toy, approx, same_everywhere, train

pytestmark = AWARE
NAN = float("nan")


class ByHand(Toy):
    """Runs `step(module, batch, batch_idx)` as its training step, on the weight `w` and on another one, `v`."""

    def __init__(self, step: Callable[..., None], lr: float = 0.0, start: Any = 1.0) -> None:
        super().__init__(lr=lr, start=start)
        self.automatic_optimization = False
        self.step = step
        self.v = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(self, batch, batch_idx)

    @property
    def both(self) -> Any:
        return self.optimizers()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=self.lr) for parameter in (self.w, self.v)]


def run(world: Any, step: Callable[..., None], per_rank: Any, strategy: Any = WEIGHTED, **options: Any) -> Any:
    """Return what the ranks saw, all the same."""
    options = {"toy": {"step": step}, "strategy": {"find_unused_parameters": True, **strategy}, **options}
    return same_everywhere(world(2).run(train, per_rank, module=ByHand, **options))


def refused(world: Any, step: Callable[..., None], per_rank: Any, reduction: str, **toy: Any) -> set[str]:
    """Return what the error says, of all ranks."""
    strategy = {"reduction": reduction, "find_unused_parameters": True}
    raised = world(2).run_expecting_errors(train, per_rank, {"step": step, **toy}, strategy, module=ByHand)
    return {f"{one.type_name}: {one.message}" for one in raised}


def direct(module: ByHand, batch: Tensor, _: int) -> None:
    module.losses(batch).mean().backward()
    module.both[0].step()


def never_synchronized(module: ByHand, batch: Tensor, _: int) -> None:
    first, _second = module.both
    with first.toggle_model(sync_grad=False):
        module.manual_backward(module.losses(batch).mean())
    first.step()


def swapped(module: ByHand, batch: Tensor, _: int) -> None:
    """Write gradients that differ in their order alone."""
    module.w.grad = torch.tensor([1.0, -1.0] if dist.get_rank() else [-1.0, 1.0], dtype=module.w.dtype)
    module.both[0].step()


def again_on_rank_1(module: ByHand, batch: Tensor, batch_idx: int, at: int) -> None:
    first, _ = module.both
    module.manual_backward(module.losses(batch).mean())
    first.step()
    if dist.get_rank() == 1 and batch_idx == at:
        first.step()


@pytest.mark.parametrize(
    ("step", "reduction"), [(direct, "mean"), (direct, "sum"), (never_synchronized, "weighted_mean")]
)
def test_step_on_gradients_that_nothing_reduced(world, reduction, step):
    """Stock Lightning drifts apart."""
    (text,) = refused(world, step, [[[1.0]] * 3, [[2.0]] * 3], reduction, lr=0.01)
    assert text.startswith("RuntimeError: the ranks drifted apart: after 1 batch(es) parameter 'w' is not the same")
    assert "self.manual_backward(loss)" in text


@pytest.mark.parametrize(("at", "found"), [(0, 1), (2, 4), (5, 6)])
def test_step_of_one_rank_alone(world, at, found):
    """The other does not wait for it. The ranks compare after 1, 2 and 4 batches, and at the end."""
    (text,) = refused(world, partial(again_on_rank_1, at=at), [[[1.0]] * 6] * 2, "mean", lr=0.01)
    assert f"drifted apart: after {found} batch(es) parameter 'w' is not the same" in text
    assert "another one is on rank 1." in text


def test_gradients_written_by_hand_that_differ(world):
    (text,) = refused(world, swapped, [[[1.0]]] * 2, "mean", start=[1.0, 1.0], lr=0.01)
    assert "the ranks drifted apart: after 1 batch(es)" in text


def surgery(module: ByHand, batch: Tensor, _: int, how: str) -> None:
    """Write a gradient as PCGrad does: of samples that all ranks have, or one's own and reduced by oneself."""
    x = module.trainer.strategy.reduce(batch.clone()) if how == "of all" else batch
    (gradient,) = torch.autograd.grad((x.mean() * module.w).sum(), module.w)
    if how == "reduced":
        dist.all_reduce(gradient)
    module.w.grad = gradient
    module.both[0].step()


@pytest.mark.parametrize(("how", "weight"), [("of all", 1 - 0.01 * 5.5), ("reduced", 1 - 0.01 * 11)])
def test_gradients_written_by_hand_are_the_users_own(world, how, weight):
    """They train as they are, where they are the same on all ranks."""
    toy = {"step": partial(surgery, how=how), "lr": 0.01}
    for trained in world(2).run(train, [[[1.0], [2.0]], [[3.0], [5.0]]], toy, {"reduction": "sum"}, module=ByHand):
        assert approx(weight) == trained.weights[-1][0].item()


def adversaries(module: ByHand, batch: Tensor, _: int) -> None:
    """Step one optimizer only where the loss of all ranks is high, the other always and twice."""
    first, second = module.both
    loss = module.losses(batch).mean()
    module.manual_backward(loss)
    if module.trainer.strategy.reduce(loss.detach().clone()) > 2:
        first.step()
        first.zero_grad()
    module.manual_backward((module.v * batch).mean())
    second.step()
    second.step()
    second.zero_grad()


def test_an_optimizer_steps_when_its_loss_is_high(world):
    """Losses of all ranks are 1.5, 2.5 and 1.5 times the weight: one step, on the gradients 1.5 + 2.5."""
    of_ranks = [[[x + rank] for x in (1.0, 2.0, 1.0)] for rank in range(2)]
    seen = run(world, adversaries, of_ranks, {"reduction": "mean"}, toy={"step": adversaries, "lr": 0.01})
    assert [approx(0.96), approx(1 - 0.02 * 5.5)] == seen.weights[-1].tolist()


def two_players(module: ByHand, batch: Tensor, _: int) -> None:
    """Give each optimizer a loss of its own, with another number of samples; write both gradients down."""
    gradients = []
    for optimizer, parameter, padded in zip(module.both, (module.w, module.v), batch, strict=True):
        x = padded[~padded.isnan()]
        module.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        module.manual_backward((parameter * x).mean(), weight=x.numel())
        gradients.append(parameter.grad.item())
        optimizer.step()
        module.untoggle_optimizer(optimizer)
    module.seen.gradients[-2:] = [torch.tensor(gradients)]


def test_counts_of_two_losses_do_not_mix(world):
    """With (3, 1) of one loss and (1, 3) of the other: 2.0 and 3.0."""
    seen = run(world, two_players, [[[[1, 1, 1], [9, NAN, NAN]]] * 3, [[[5, NAN, NAN], [1, 1, 1]]] * 3])
    assert [[2.0, 3.0]] * 3 == [gradients.tolist() for gradients in seen.gradients]


def interleaved(module: ByHand, batch: Tensor, _: int) -> None:
    """Accumulate the loss of one optimizer, and reduce in the backward of the other."""
    first, second = module.both
    with first.toggle_model(sync_grad=False):
        module.manual_backward((module.w * batch).mean(), weight=3)
    with second.toggle_model():
        module.manual_backward((module.v * batch).mean(), weight=1)


def test_windows_of_two_optimizers_cannot_overlap(world):
    (text,) = refused(world, interleaved, [[[1.0]]] * 2, "weighted_mean")
    assert "rank 1: micro-batch 1 of the window: it trains other parameters" in text


def kept_graph(module: ByHand, batch: Tensor, _: int) -> None:
    """Run the backward of named terms, and another one of their sum."""
    first, _second = module.both
    rank, loss = dist.get_rank(), {"a": module.losses(batch).mean(), "b": 10 * module.losses(batch).mean()}
    module.manual_backward(loss, weight={"a": 1 + 2 * rank, "b": 1 - rank}, retain_graph=True)
    module.seen.gradients.append(module.w.grad.clone())
    first.zero_grad()
    sum(loss.values()).backward()
    assert approx(11 * batch.item()) == module.w.grad.item()
    first.zero_grad()


def test_named_terms_keep_their_graph(world):
    """Of x = 1 and 5 the terms are (1 + 3 * 5) / 4 and 10 * 1."""
    seen = run(world, kept_graph, [[[1.0]], [[5.0]]])
    assert [approx(14.0)] == [gradient.item() for gradient in seen.gradients]


def interrupted(module: ByHand, batch: Tensor, _: int) -> None:
    """Have a hook raise between the weighing of a loss and its backward, over gradients that are kept."""
    weight = 3 - 2 * dist.get_rank()
    module.manual_backward(module.losses(batch).mean(), weight=weight)
    with patch.object(module, "on_before_backward", side_effect=KeyError), pytest.raises(KeyError):
        module.manual_backward(100 * module.losses(batch).mean(), weight=9)
    module.manual_backward(module.losses(batch).mean(), weight=weight)
    module.seen.gradients.append(module.w.grad.clone())


def test_a_loss_whose_backward_never_ran_is_forgotten(world):
    """Twice (3 * 1 + 5) / 4."""
    seen = run(world, interrupted, [[[1.0]], [[5.0]]])
    assert [approx(4.0)] == [gradient.item() for gradient in seen.gradients]
