"""Manual optimization on real ranks: what a user steps on was reduced, once, with its weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from grids import grid
from mlp import COUNTS, MLP, assert_reference, reference, samples
from ranks import make_trainer
from torch import Tensor
from torch.utils.data import DataLoader
from toys import AWARE, WEIGHTED, Toy, approx, same_everywhere, train

from lightning_gradavg import GradAvgStrategy

pytestmark = AWARE
NAN = float("nan")


class Manual(MLP):
    """Manual optimization with 4 micro-batches per step; only the last one is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        last = (batch_idx + 1) % 4 == 0
        if batch_idx % 4 == 0:
            optimizer.zero_grad()
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(super().training_step(batch, batch_idx), weight=len(batch[0]))
        if last:
            optimizer.step()


def train_manual(static: bool) -> Any:
    rank = dist.get_rank()
    bounds = np.cumsum([0, *COUNTS])
    data = [(x[bounds[rank] : bounds[rank + 1]], y[bounds[rank] : bounds[rank + 1]]) for x, y in samples(8)]
    model, strategy = Manual(), GradAvgStrategy(reduction="weighted_mean", static_graph=static)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(model, DataLoader(data, batch_size=None))
    assert trainer.global_step == 2
    return {"rank": torch.tensor(rank), **model.state_dict()}


@pytest.mark.parametrize("static", [False, True])
def test_manual_windows_equal_automatic_ones(world, static):
    """Or a static graph is refused by a lightning that does not start its first reduction."""
    if static and not hasattr(GradAvgStrategy(), "_pl_static_graph_delay_done"):
        raised = world(2).run_expecting_errors(train_manual, static)
        assert all("static_graph=True with manual optimization" in one.message for one in raised)
        return
    assert_reference(world(2).run(train_manual, static), reference("", 8, 4), 1e-6)


class ByHand(Toy):
    """Runs `step(module, batch, batch_idx)` as its training step, on the weight `w` and on another one, `v`."""

    def __init__(self, step: Callable[..., None], lr: float = 0.0, start: Any = 1.0) -> None:
        super().__init__(lr=lr, start=start)
        self.automatic_optimization = False
        self.step = step
        self.v = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(self, batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.w.grad is not None:
            super().on_before_optimizer_step(optimizer)

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
    (text,) = refused(world, swapped, [[[1.0]]] * 2, "mean", start=[1.0, 2.0], lr=0.01)
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
        torch.testing.assert_close(weight, trained.weights[-1].item())


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


def train_adversaries() -> Any:
    model = ByHand(adversaries, lr=0.01)
    rank, strategy = dist.get_rank(), GradAvgStrategy(find_unused_parameters=True)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    data: Any = [torch.tensor([x + rank], dtype=torch.float64) for x in (1.0, 2.0, 1.0)]
    trainer.fit(model, DataLoader(data, batch_size=None))
    return model.w.item(), model.v.item()


def test_an_optimizer_steps_when_its_loss_is_high(world):
    """Losses of all ranks are 1.5, 2.5 and 1.5 times the weight: one step, on the gradients 1.5 + 2.5."""
    assert [(approx(0.96), approx(1 - 0.02 * 5.5))] * 2 == world(2).run(train_adversaries)


def repeated(module: ByHand, batch: Tensor, _: int, set_to_none: bool) -> None:
    """Reduce every micro-batch, and add the results up before one step."""
    first, _second = module.both
    first.zero_grad(set_to_none=set_to_none)
    for micro_batch in batch.unbind():
        of_micro_batch = micro_batch[~micro_batch.isnan()]
        module.manual_backward(module.losses(of_micro_batch).mean(), weight=of_micro_batch.numel())
    first.step()


@pytest.mark.parametrize(("set_to_none", "view"), [(False, False), (True, False), (True, True)])
def test_every_backward_is_reduced_on_its_own(world, view, set_to_none):
    """Gradients that were reduced before are not reduced again: (1+2+3)/3 + (5+1)/2 = 5."""
    batches = [[[[1, 2], [5, NAN]]] * 2, [[[3, NAN], [1, NAN]]] * 2]
    strategy = {**WEIGHTED, "gradient_as_bucket_view": view}
    seen = run(world, partial(repeated, set_to_none=set_to_none), batches, strategy)
    assert [approx(5.0)] * 2 == [gradient.item() for gradient in seen.gradients]


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


def cleared(module: ByHand, batch: Tensor, batch_idx: int, set_to_none: bool) -> None:
    """Clear the gradients where a window begins, and so drop one that the end of an epoch cut."""
    first, _ = module.both
    if batch_idx % 2 == 0:
        first.zero_grad(set_to_none=set_to_none)
    with first.toggle_model(sync_grad=batch_idx % 2 == 1):
        module.manual_backward(module.losses(batch).mean(), weight=batch.numel())
    if batch_idx % 2 == 1:
        first.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_cleared_take_their_weights_along(world, set_to_none):
    rows = [[[1.0], [1.0], [1.0, 1.0, 1.0]]] * 2
    seen = run(world, partial(cleared, set_to_none=set_to_none), rows, max_epochs=2)
    assert [1.0, 1.0] == [gradient.item() for gradient in seen.gradients]


def fail(gradient: Tensor) -> None:
    raise MemoryError("it does not fit")


def interrupted(module: ByHand, batch: Tensor, _: int, window: int, fails: int, clears: bool, weighs: bool) -> None:
    """Catch a backward that raises in the second of three windows, and go on."""
    first, _second = module.both

    def run_window(x: float, weight: float, fails: int | None = None) -> None:
        for index in range(window):
            with first.toggle_model(sync_grad=index == window - 1):
                loss = module.losses(torch.tensor([x])).mean()
                if index == fails:
                    loss.register_hook(fail)
                module.manual_backward(loss, **({"weight": weight} if weighs else {}))

    run_window(100.0, 1.0)
    before = module.w.grad.item()
    with pytest.raises(MemoryError):
        run_window(1000.0, 50.0, fails)
    assert before == module.w.grad.item()
    if clears:
        first.zero_grad()
    run_window(1.0, 1.0)
    first.step()


STRATEGIES: Any = [WEIGHTED, {"reduction": "sum"}, {**WEIGHTED, "gradient_as_bucket_view": True}]


@pytest.mark.parametrize(
    ("strategy", "at", "clears"), grid(STRATEGIES, [(1, 0), (2, 0), (2, 1), (3, 1)], [True, False])
)
def test_a_backward_that_raised_leaves_nothing_behind(world, strategy, at, clears):
    """Neither its gradient nor its weight: 1, or 101 where the gradient of 100 was kept; a sum counts all losses."""
    window, fails = at
    sums = strategy["reduction"] == "sum"
    step = partial(interrupted, window=window, fails=fails, clears=clears, weighs=not sums)
    seen = run(world, step, [[[1.0]]] * 2, strategy)
    losses = 2 * window if sums else 1
    assert [approx(losses * 1.0 if clears else losses * 101.0)] == [gradient.item() for gradient in seen.gradients]


def kept_graph(module: ByHand, batch: Tensor, _: int) -> None:
    """Run the backward of named terms, and another one of their sum."""
    first, _second = module.both
    rank, loss = dist.get_rank(), {"a": module.losses(batch).mean(), "b": 10 * module.losses(batch).mean()}
    module.manual_backward(loss, weight={"a": 1 + 2 * rank, "b": 1 - rank}, retain_graph=True)
    module.seen.gradients.append(module.w.grad.clone())
    first.zero_grad()
    sum(loss.values()).backward()
    first.zero_grad()


def test_named_terms_keep_their_graph(world):
    """Of x = 1 and 5 the terms are (1 + 3 * 5) / 4 and 10 * 1."""
    seen = run(world, kept_graph, [[[1.0]], [[5.0]]])
    assert [approx(14.0)] == [gradient.item() for gradient in seen.gradients]
