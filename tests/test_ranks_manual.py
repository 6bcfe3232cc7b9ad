"""Manual optimization on real ranks: what a user steps on was reduced, once, with its weights."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from mlp import COUNTS, MLP, assert_reference, reference, samples
from ranks import make_trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from toys import AWARE, WEIGHTED, Toy, approx, loader, same_everywhere, train

from lightning_gradavg import GradAvgStrategy

pytestmark = AWARE


class Manual(MLP):
    """Manual optimization: `window` micro-batches per step; only the last one is reduced."""

    def __init__(self, window: int, weighted: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.window, self.weighted = window, weighted

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        last = (batch_idx + 1) % self.window == 0
        if batch_idx % self.window == 0:
            optimizer.zero_grad()
        with optimizer.toggle_model(sync_grad=last):
            loss = super().training_step(batch, batch_idx)
            if self.weighted:
                self.manual_backward(loss, weight=len(batch[0]))
            else:
                self.manual_backward(loss / self.window)
        if last:
            optimizer.step()


def train_manual(window: int, weighted: bool, strategy: Any, per_rank: Any = None) -> Any:
    rank = dist.get_rank()
    bounds = np.cumsum([0, *(per_rank or COUNTS)])
    data = [(x[bounds[rank] : bounds[rank + 1]], y[bounds[rank] : bounds[rank + 1]]) for x, y in samples(8)]
    model = Manual(window, weighted)
    trainer = make_trainer(GradAvgStrategy(**strategy), max_epochs=1, use_distributed_sampler=False)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        trainer.fit(model, DataLoader(data, batch_size=None))
    assert trainer.global_step == 8 // window
    reductions = [event for event in record.events() if event.name == "gloo:all_reduce"]
    return {"rank": torch.tensor(rank), "reductions": torch.tensor(len(reductions)), **model.state_dict()}


@pytest.mark.parametrize("static", [False, True])
def test_manual_optimization(world, static):
    """Case 18: a manual loop with 4 micro-batches per step equals automatic accumulation of 4, or is refused."""
    if static and not hasattr(GradAvgStrategy(), "_pl_static_graph_delay_done"):
        raised = world(2).run_expecting_errors(train_manual, 4, True, {**WEIGHTED, "static_graph": True})
        assert all("static_graph=True with manual optimization" in one.message for one in raised)
        return
    ranks = world(2).run(train_manual, 4, True, {**WEIGHTED, "static_graph": static})
    assert_reference(ranks, reference("", 8, 4), 1e-6)


class Direct(Toy):
    """Manual optimization that goes past the strategy, or never ends its window."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.way = way

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.losses(batch).mean()
        if self.way == "direct":
            loss.backward()
        else:
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("way", ["direct", "never synchronized"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted_mean"])
def test_step_on_unreduced_gradients_is_detected(world, reduction, way):
    """Case 18: a step on gradients that no backward reduced is an error on all ranks; stock Lightning drifts apart."""
    raised = world(2).run_expecting_errors(train, [[[1]], [[2]]], {"way": way}, {"reduction": reduction}, module=Direct)
    assert ["RuntimeError"] * 2 == [one.type_name for one in raised]
    assert all("self.manual_backward(loss)" in one.message for one in raised)


class Alone(Toy):
    """Steps a second time on the same gradients, on one rank and in one batch."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.batch = batch

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.losses(batch).mean())
        optimizer.step()
        if dist.get_rank() == 1 and batch_idx == self.batch:
            optimizer.step()


@pytest.mark.parametrize("batch", [0, 2, 5])
@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
def test_step_of_one_rank_alone_is_an_error_on_all(world, reduction, batch):
    raised = world(2).run_expecting_errors(
        train, [[[1.0]] * 6] * 2, {"batch": batch}, {"reduction": reduction}, module=Alone
    )
    assert ["RuntimeError"] * 2 == [one.type_name for one in raised]
    assert all(
        "SGD.step() was called on gradients" in one.message and "it was called on rank 1." in one.message
        for one in raised
    )


class Surgery(Toy):
    """Writes gradients by hand, as PCGrad does, of samples that all ranks have, or of its own and reduced by itself."""

    def __init__(self, how: str) -> None:
        super().__init__(start=[1.0, 2.0])
        self.automatic_optimization = False
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        x = self.all_gather(batch) if self.how == "of all" else batch
        (gradient,) = torch.autograd.grad((x.mean() * self.w).sum(), self.w)
        if self.how == "reduced":
            dist.all_reduce(gradient)
        self.w.grad = gradient
        optimizer.step()


def train_by_hand(how: str) -> Any:
    """Body: return what was warned of, and the weights."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trained = train([[[1.0], [2.0]], [[3.0], [5.0]]], {"how": how}, {"reduction": "sum"}, module=Surgery)
    found = [str(one.message) for one in seen if "gradients" in str(one.message)]
    return [text.split(". ")[1] for text in found], trained.weights


@pytest.mark.parametrize(("how", "weight"), [("of all", 1 - 0.01 * 5.5), ("reduced", 1 - 0.01 * 11)])
def test_gradients_written_by_hand_are_the_users_own(world, how, weight):
    (warned, weights), (others, same) = world(2).run(train_by_hand, how)
    assert ["They are the same on all ranks, so nothing drifts apart; reduction='sum' is not applied to them"] == warned
    assert [] == others
    assert torch.equal(weights[-1], same[-1])
    torch.testing.assert_close(weight, weights[-1][0].item())


def test_gradients_written_by_hand_that_differ_are_refused(world):
    raised = world(2).run_expecting_errors(train_swapped)
    assert all("they differ between the ranks, which would drift apart" in one.message for one in raised)


def train_swapped() -> Any:
    class Swapped(Surgery):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.w.grad = torch.tensor([1.0, -1.0] if dist.get_rank() else [-1.0, 1.0], dtype=self.w.dtype)
            self.optimizers().step()

    return train([[[1.0]], [[1.0]]], {"how": "swapped"}, {}, module=Swapped)


class Adversaries(Toy):
    """Steps its first optimizer only where the loss of all ranks is high, its second always and twice."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        first, second = optimizers
        loss = self.losses(batch).mean()
        self.manual_backward(loss)
        if self.trainer.strategy.reduce(loss.detach().clone()) > 2:
            first.step()
            first.zero_grad()
        self.manual_backward((self.other * batch).mean())
        second.step()
        second.step()
        second.zero_grad()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Neither optimizer has all gradients."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.w], lr=0.01), torch.optim.SGD([self.other], lr=0.01)]


def train_adversaries() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"SGD.step\(\) was called on gradients")
        trainer = make_trainer(
            GradAvgStrategy(find_unused_parameters=True), max_epochs=1, use_distributed_sampler=False
        )
        model = Adversaries()
        trainer.fit(model, loader([[1.0 + dist.get_rank()], [2.0 + dist.get_rank()], [1.0 + dist.get_rank()]]))
    return model.w.item(), model.other.item()


def test_an_optimizer_steps_when_its_loss_is_high(world):
    # Losses of all ranks are 1.5, 2.5 and 1.5 times the weight: one step, on the gradients 1.5 + 2.5.
    assert [(pytest.approx(0.96), pytest.approx(1 - 0.02 * 5.5))] * 2 == world(2).run(train_adversaries)


class Repeated(Toy):
    """Manual optimization that reduces every micro-batch and adds the results up before one step."""

    def __init__(self, set_to_none: bool) -> None:
        super().__init__(lr=1.0)
        self.automatic_optimization = False
        self.set_to_none = set_to_none

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad(set_to_none=self.set_to_none)
        for micro_batch in batch.unbind():
            samples = micro_batch[~micro_batch.isnan()]
            self.manual_backward(self.losses(samples).mean(), weight=samples.numel())
        optimizer.step()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_every_backward_is_reduced_on_its_own(world, view, set_to_none):
    """Gradients that were reduced before are not reduced again: (1+2+3)/3 + (5+1)/2 = 5."""
    nan = float("nan")
    batches = [[[[1, 2], [5, nan]]] * 2, [[[3, nan], [1, nan]]] * 2]
    seen = same_everywhere(
        world(2).run(
            train,
            batches,
            {"set_to_none": set_to_none},
            {**WEIGHTED, "gradient_as_bucket_view": view},
            module=Repeated,
        )
    )
    assert [approx(5.0)] * 2 == [gradient.item() for gradient in seen.gradients]


class TwoPlayers(LightningModule):
    """Case 19: two weights with a loss and an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.d = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.automatic_optimization = False
        self.gradients: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        gradients = []
        optimizers: Any = self.optimizers()
        for optimizer, parameter, x in zip(optimizers, (self.g, self.d), batch, strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward((parameter * x).mean(), weight=x.numel())
            gradients.append(parameter.grad.item())
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.gradients.append(tuple(gradients))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.g], lr=0.1), torch.optim.SGD([self.d], lr=0.1)]


def train_two_players(per_rank: Any) -> Any:
    model = TwoPlayers()
    data = [tuple(torch.tensor(x, dtype=torch.float64) for x in per_rank[dist.get_rank()])] * 3
    make_trainer(
        GradAvgStrategy(**WEIGHTED, find_unused_parameters=True), max_epochs=1, use_distributed_sampler=False
    ).fit(model, DataLoader(data, batch_size=None))
    return dist.get_rank(), model.gradients


def test_several_optimizers(world):
    """Case 19: counts (3, 1) of one loss and (1, 3) of the other do not mix: 2.0 and 3.0 in every batch."""
    ranks = world(2).run(train_two_players, [([1, 1, 1], [9]), ([5], [1, 1, 1])])
    assert [(0, [(2.0, 3.0)] * 3), (1, [(2.0, 3.0)] * 3)] == ranks


class Interleaved(TwoPlayers):
    """Accumulates the loss of one optimizer and reduces in the backward of the other."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        g, d = optimizers
        with g.toggle_model(sync_grad=False):
            self.manual_backward((self.g * batch[0]).mean(), weight=3)
        with d.toggle_model():
            self.manual_backward((self.d * batch[1]).mean(), weight=1)


def train_interleaved() -> None:
    x = torch.ones(2, dtype=torch.float64)
    make_trainer(GradAvgStrategy(**WEIGHTED, find_unused_parameters=True), max_epochs=1).fit(
        Interleaved(), DataLoader([(x, x)], batch_size=None)
    )


def test_windows_of_two_optimizers_cannot_overlap(world):
    raised = world(2).run_expecting_errors(train_interleaved)
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all("rank 1: micro-batch 1 of the window: it trains other parameters" in one.message for one in raised)


class Windows(Toy):
    """A manual loop that clears the gradients when it begins a window, and so drops one that an epoch's end cut."""

    def __init__(self, set_to_none: bool) -> None:
        super().__init__(lr=0.0)
        self.automatic_optimization = False
        self.set_to_none = set_to_none

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=self.set_to_none)
        with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(self.losses(batch).mean(), weight=batch.numel())
        if batch_idx % 2 == 1:
            optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_cleared_take_their_weights_along(world: Any, set_to_none: bool) -> None:
    """Case 18: a window that the user drops by `zero_grad` does not count in the next one."""
    rows = [[[1.0], [1.0], [1.0, 1.0, 1.0]]] * 2
    seen = same_everywhere(
        world(2).run(train, rows, {"set_to_none": set_to_none}, WEIGHTED, module=Windows, max_epochs=2)
    )
    assert [1.0, 1.0] == [gradient.item() for gradient in seen.gradients]


class Interrupted(Toy):
    """Catches a backward that raises, as one that does not fit into memory, and trains on.

    Args:
        window: Micro-batches of a window.
        fails: The micro-batch whose backward raises, of the window of the first batch.
        clears: Whether the gradients are zeroed afterwards.
        weighs: Whether to give weights.
    """

    def __init__(self, window: int, fails: int, clears: bool, weighs: bool) -> None:
        super().__init__(lr=0.0)
        self.automatic_optimization = False
        self.window, self.fails, self.clears, self.weighs = window, fails, clears, weighs

    def run_window(self, optimizer: Any, x: float, weight: float, fails: int | None = None) -> None:
        for index in range(self.window):
            with optimizer.toggle_model(sync_grad=index == self.window - 1):
                loss = self.losses(torch.tensor([x])).mean()
                if index == fails:
                    loss.register_hook(self.fail)
                self.manual_backward(loss, **({"weight": weight} if self.weighs else {}))

    def fail(self, gradient: Tensor) -> None:
        raise MemoryError("it does not fit")

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.run_window(optimizer, 100.0, 1.0)
        before = self.w.grad.item()
        with pytest.raises(MemoryError):
            self.run_window(optimizer, 1000.0, 50.0, self.fails)
        # What was reduced before is there as it was.
        assert before == self.w.grad.item()
        if self.clears:
            optimizer.zero_grad()
        self.run_window(optimizer, 1.0, 1.0)
        optimizer.step()


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize(("window", "fails"), [(1, 0), (2, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize("strategy", [WEIGHTED, {"reduction": "sum"}, {**WEIGHTED, "gradient_as_bucket_view": True}])
def test_a_backward_that_raised_leaves_nothing_behind(world, strategy, window, fails, clears):
    """Neither its gradient nor its weight: 1, or 101 where the gradient of 100 was kept; a sum counts all losses."""
    toy = {"window": window, "fails": fails, "clears": clears, "weighs": strategy["reduction"] != "sum"}
    seen = same_everywhere(world(2).run(train, [[[1.0]]] * 2, toy, strategy, module=Interrupted))
    losses = 2 * window if strategy["reduction"] == "sum" else 1
    assert [approx(losses * 1.0 if clears else losses * 101.0)] == [gradient.item() for gradient in seen.gradients]


class Terms(Toy):
    """Runs the backward of named terms twice, in a window of one or of two."""

    def __init__(self, window: int) -> None:
        super().__init__(lr=0.0)
        self.automatic_optimization = False
        self.window = window

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, rank = self.optimizers(), dist.get_rank()
        loss = {"a": self.losses(batch).mean(), "b": 10 * self.losses(batch).mean()}
        with optimizer.toggle_model(sync_grad=self.window == 1):
            self.manual_backward(loss, weight={"a": 1 + 2 * rank, "b": 1 - rank}, retain_graph=True)
        self.seen.gradients.append(self.w.grad.clone())
        optimizer.zero_grad()
        sum(loss.values()).backward()  # the graph was kept
        optimizer.zero_grad()


def test_named_terms_keep_their_graph(world):
    """Of x = 1 and 5 the terms are (1 + 3 * 5) / 4 and 10 * 1."""
    seen = same_everywhere(world(2).run(train, [[[1.0]], [[5.0]]], {"window": 1}, WEIGHTED, module=Terms))
    assert [approx(14.0)] == [gradient.item() for gradient in seen.gradients]
