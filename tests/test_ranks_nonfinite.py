"""A loss or a gradient that is no finite number, and a training step without loss: decided by all ranks together."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from ranks import make_trainer
from torch.utils.data import DataLoader
from toys import DEPRECATED, GATHERS, approx, gathers, loader

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy


class Faulty(LightningModule):
    """Toy-Lin with a fault on a rank: in the loss, in the gradient of a finite loss, or no loss at all."""

    def __init__(self, fault: str, ranks: tuple[int, ...], batches: tuple[int, ...], named: bool = False) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.other = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.fault, self.ranks, self.batches, self.named = fault, ranks, batches, named

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (batch * self.w).mean() + 0 * self.other
        if dist.get_rank() in self.ranks and batch_idx in self.batches:
            if self.fault == "none":
                return None
            loss = loss * math.nan if self.fault == "loss" else loss + self.other.abs().sqrt()
        return {"loss": {"a": loss}, "weight": {"a": len(batch)}} if self.named else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.0)


def train_faulty(
    policy: str,
    fault: str,
    strategy: dict[str, Any],
    ranks: tuple[int, ...] = (1,),
    batches: tuple[int, ...] = (2,),
    named: bool = False,
    gradients: Any = (2.0, 4.0),
    module: Callable[..., LightningModule] = Faulty,
    **options: Any,
) -> Any:
    """Body: train 5 steps on gradient 2 on rank 0 and 4 on rank 1; return the weight and the steps."""
    model: Any = module(fault, ranks, batches, named)
    trainer = make_trainer(
        GradAvgStrategy(nonfinite=policy, **strategy), max_epochs=1, use_distributed_sampler=False, **options
    )
    trainer.fit(model, loader([[gradients[dist.get_rank()]]] * 5))
    return model.w.item(), trainer.global_step


RULES: list[dict[str, Any]] = [{}, {"reduction": "weighted_mean"}, {"gradient_as_bucket_view": True}]


@pytest.mark.parametrize("strategy", RULES, ids=str)
@pytest.mark.parametrize("fault", ["loss", "gradient", "none"])
def test_case_50(world, fault, strategy):
    """Case 50: of five steps the third is left out on both ranks."""
    assert [(approx(-1.2), 5)] * 2 == world(2).run(train_faulty, "skip_step", fault, strategy)


class Gathers(Faulty):
    """The loss of each rank is the sum over all ranks' rows."""

    def __init__(self, fault: str, ranks: tuple[int, ...], batches: tuple[int, ...], named: bool, way: str) -> None:
        super().__init__(fault, ranks, batches, named)
        self.way = way

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = GATHERS[self.way](self, batch * self.w + 0 * self.other)
        if dist.get_rank() in self.ranks and batch_idx in self.batches:
            return None
        return {"loss": {"a": rows.sum()}, "weight": {"a": 1}} if self.named else rows.sum()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("batches", [(0,), (2,)], ids=str)
@gathers
@DEPRECATED
def test_no_loss_on_one_rank_after_a_gather(world, way, batches, named):
    """No rank waits in the backward of the gather: all skip the step. Two equal losses of gradient 2 + 4."""
    rule = {"reduction": "weighted_mean"} if named else {}
    options = {"batches": batches, "named": named, "module": partial(Gathers, way=way)}
    assert [(approx(-0.1 * 4 * 6), 5)] * 2 == world(2).run(train_faulty, "skip_step", "none", rule, **options)


@pytest.mark.parametrize(
    ("fault", "ranks", "said"),
    [
        ("loss", (1,), "nothing on rank 0; the loss is not finite on rank 1"),
        ("none", (1,), "nothing on rank 0; training_step returned no loss on rank 1"),
        ("gradient", (0, 1), "the gradient of parameter 'other' is not finite on ranks 0, 1"),
    ],
)
def test_case_50_raised(world, fault, ranks, said):
    """Case 50: all ranks raise, before the step is taken, and name rank and step."""
    raised = world(2).run_expecting_errors(train_faulty, "raise", fault, {}, ranks=ranks)
    assert all(f"optimizer step 2: {said}" in one.message and one.type_name == "RuntimeError" for one in raised)


@pytest.mark.parametrize("policy", ["skip_step", "raise", "propagate"])
def test_no_loss_on_any_rank(world, policy):
    assert [(approx(-1.2), 5)] * 2 == world(2).run(train_faulty, policy, "none", {}, ranks=(0, 1))


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [({"reduction": "weighted_mean"}, 3 + 3), ({}, 3 + 3), ({"reduction": "sum"}, 12 + 6)],
    ids=["weighted_mean", "mean", "sum"],
)
@pytest.mark.parametrize("fault", ["loss", "none"])
def test_windows(world, strategy, expected, fault):
    ended = world(2).run(train_faulty, "skip_step", fault, strategy, accumulate_grad_batches=2)
    assert [(approx(-0.1 * expected), 3)] * 2 == ended


class Interrupted(Faulty):
    """Its first run ends between its first loss, which is NaN on rank 1, and the backward."""

    def on_before_backward(self, loss: Any) -> None:
        if self.batches:
            self.batches = ()
            raise KeyError("the first run")


def train_interrupted() -> Any:
    model = Interrupted("loss", (1,), (0,))
    trainer = make_trainer(GradAvgStrategy(nonfinite="skip_step"), max_epochs=1, use_distributed_sampler=False)
    data = loader([[2.0 + 2 * dist.get_rank()]] * 5)
    with pytest.raises(KeyError, match="the first run"):
        trainer.fit(model, data)
    trainer.fit(model, data)
    return model.w.item()


def test_what_was_noted_of_a_step_does_not_outlive_its_run(world):
    assert [approx(-1.5)] * 2 == world(2).run(train_interrupted)


@pytest.mark.parametrize("strategy", RULES[:2], ids=str)
def test_propagate(world, strategy):
    for w, _ in world(2).run(train_faulty, "propagate", "loss", strategy):
        assert math.isnan(w)


def test_no_loss_on_one_rank_by_default(world):
    with pytest.raises(Exception, match="training_step returned no loss on rank 1, and one on others"):
        world(2).run(train_faulty, "propagate", "none", {})


def test_the_monitor_waits_for_a_step_that_is_taken(world):
    assert [3.0, 3.0] == world(2).run(observed_norm)


def observed_norm() -> float:
    """Body: observe a step that is left out; return the norm that is reported."""
    model = Faulty("loss", (1,), (0,))
    trainer = make_trainer(
        GradAvgStrategy(nonfinite="skip_step"),
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[GradAvgMonitor(100, check_data=False)],
        limit_train_batches=2,
    )
    strategy: Any = trainer.strategy
    strategy.observe_next_step()
    trainer.fit(model, loader([[2.0 + 2 * dist.get_rank()]] * 2))
    norm: float = strategy.report().gradient_norm
    return norm


def fit_by_hand() -> None:
    """Body: optimize by hand where steps are to be judged."""
    model = Faulty("none", (), ())
    model.automatic_optimization = False
    make_trainer(GradAvgStrategy(nonfinite="raise"), max_epochs=1).fit(model, loader([[1.0]]))


def test_manual_optimization_is_refused(world):
    raised = world(2).run_expecting_errors(fit_by_hand)
    assert all("nonfinite='raise' checks a step before it is taken" in one.message for one in raised)


class OfOneSample(Faulty):
    """Its loss is no number where its samples hold 5."""

    def __init__(self) -> None:
        super().__init__("", (), ())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (batch * self.w + 0 * self.other).mean() * (math.nan if bool((batch == 5).any()) else 1)


def train_split(policy: str, strategy: dict[str, Any]) -> Any:
    """Body: train on the batches 1 to 4 and 5 to 8, shared out over the ranks; return the weight."""
    model = OfOneSample()
    trainer = make_trainer(GradAvgStrategy(nonfinite=policy, **strategy), max_epochs=1)
    data: Any = torch.arange(1, 9, dtype=torch.float64)
    trainer.fit(model, DataLoader(data, batch_size=4))
    return model.w.item()


SPLITS: list[dict[str, Any]] = [
    {"split_batches": True},
    {"split_batches": True, "max_device_batch_size": 1},
    {"equivalent_to": "data_parallel"},
    {"equivalent_to": "data_parallel", "num_replicas": 4},
]


@pytest.mark.parametrize("strategy", SPLITS, ids=str)
def test_split_batches(world, strategy):
    assert [approx(-0.25)] * 2 == world(2).run(train_split, "skip_step", strategy)
