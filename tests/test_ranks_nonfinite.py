"""A loss or a gradient that is no finite number, and a training step without loss: decided by all ranks together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import make_trainer, on_ranks
from torch.utils.data import DataLoader
from toys import DEPRECATED, GATHERS, WEIGHTED, Recorded, approx, gathers, loader, train

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy


class Faulty(Recorded):
    """Toy-Lin with a fault on some ranks: in the loss, in the gradient of a finite loss, or no loss at all."""

    def __init__(
        self, fault: str, ranks: tuple[int, ...] = (1,), batches: tuple[int, ...] = (2,), named: bool = False
    ) -> None:
        super().__init__(0.1)
        self.w, self.other = (torch.nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2))
        self.fault, self.ranks, self.batches, self.named = fault, ranks, batches, named

    def loss(self, batch: Any) -> Any:
        return (batch * self.w).mean() + 0 * self.other

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if dist.get_rank() in self.ranks and batch_idx in self.batches:
            if self.fault == "none":
                return None
            loss = loss * math.nan if self.fault == "loss" else loss + self.other.abs().sqrt()
        return {"loss": {"a": loss}, "weight": {"a": len(batch)}} if self.named else loss


FIVE = [[[2.0]] * 5, [[4.0]] * 5]
"""Five steps, whose gradient is 2 on rank 0 and 4 on rank 1."""


def trained(world: Any, policy: str, toy: Any, strategy: Any = None, module: Any = Faulty, **options: Any) -> Any:
    """Return the weight at the end, the same on all ranks, and the steps."""
    strategy = {"nonfinite": policy, **(strategy or {})}
    (weight, steps), other = [
        (one.weights[-1][0].item(), one.steps)
        for one in world(2).run(train, FIVE, toy, strategy, module=module, **options)
    ]
    assert (weight, steps) == other or math.isnan(weight)
    return weight, steps


RULES: list[dict[str, Any]] = [{}, WEIGHTED, {"gradient_as_bucket_view": True}]


@pytest.mark.parametrize("strategy", RULES, ids=str)
@pytest.mark.parametrize("fault", ["loss", "gradient", "none"])
def test_a_step_is_left_out(world, fault, strategy):
    """Of five steps the third, on both ranks."""
    assert (approx(-1.2), 5) == trained(world, "skip_step", {"fault": fault}, strategy)


class Gathers(Faulty):
    """The loss of each rank is the sum over all ranks' rows."""

    def __init__(self, way: str, **toy: Any) -> None:
        super().__init__("none", **toy)
        self.way = way

    def loss(self, batch: Any) -> Any:
        return GATHERS[self.way](self, batch * self.w + 0 * self.other).sum()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("batches", [(0,), (2,)], ids=str)
@gathers
@DEPRECATED
def test_no_loss_on_one_rank_after_a_gather(world, way, batches, named):
    """No rank waits in the backward of the gather: all skip the step. Two equal losses of gradient 2 + 4."""
    toy = {"way": way, "batches": batches, "named": named}
    assert (approx(-0.1 * 4 * 6), 5) == trained(world, "skip_step", toy, WEIGHTED if named else {}, Gathers)


@pytest.mark.parametrize(
    ("fault", "ranks", "said"),
    [
        ("loss", (1,), "nothing on rank 0; the loss is not finite on rank 1"),
        ("none", (1,), "nothing on rank 0; training_step returned no loss on rank 1"),
        ("gradient", (0, 1), "the gradient of parameter 'other' is not finite on ranks 0, 1"),
    ],
)
def test_all_ranks_raise_before_the_step_is_taken(world, fault, ranks, said):
    toy = {"fault": fault, "ranks": ranks}
    raised = world(2).run_expecting_errors(train, FIVE, toy, {"nonfinite": "raise"}, module=Faulty)
    assert all(f"optimizer step 2: {said}" in one.message and one.type_name == "RuntimeError" for one in raised)


@pytest.mark.parametrize("policy", ["skip_step", "raise", "propagate"])
def test_no_loss_on_any_rank(world, policy):
    assert (approx(-1.2), 5) == trained(world, policy, {"fault": "none", "ranks": (0, 1)})


@pytest.mark.parametrize(("reduction", "expected"), [("weighted_mean", 3 + 3), ("mean", 3 + 3), ("sum", 12 + 6)])
@pytest.mark.parametrize("fault", ["loss", "none"])
def test_windows(world, reduction, expected, fault):
    strategy = {"reduction": reduction}
    ended = trained(world, "skip_step", {"fault": fault}, strategy, accumulate_grad_batches=2)
    assert (approx(-0.1 * expected), 3) == ended


class Interrupted(Faulty):
    """Its first run ends between its first loss, which is NaN on rank 1, and the backward."""

    def on_before_backward(self, loss: Any) -> None:
        if self.batches:
            self.batches = ()
            raise KeyError("the first run")


@on_ranks()
def test_what_was_noted_of_a_step_does_not_outlive_its_run():
    model, data = Interrupted("loss", (1,), (0,)), loader(FIVE[dist.get_rank()])
    trainer = make_trainer(GradAvgStrategy(nonfinite="skip_step"), max_epochs=1, use_distributed_sampler=False)
    with pytest.raises(KeyError, match="the first run"):
        trainer.fit(model, data)
    trainer.fit(model, data)
    assert approx(-1.5) == model.w.item()


@pytest.mark.parametrize("strategy", RULES[:2], ids=str)
def test_propagate(world, strategy):
    assert math.isnan(trained(world, "propagate", {"fault": "loss"}, strategy)[0])


@on_ranks()
def test_the_monitor_waits_for_a_step_that_is_taken():
    """Of the step that is left out no norm is reported."""
    strategy: Any = GradAvgStrategy(nonfinite="skip_step")
    monitor = GradAvgMonitor(100, check_data=False)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[monitor], use_distributed_sampler=False)
    strategy.observe_next_step()
    trainer.fit(Faulty("loss", (1,), (0,)), loader(FIVE[dist.get_rank()][:2]))
    assert strategy.report().gradient_norm == 3


class ByHand(Faulty):
    automatic_optimization = False


def test_manual_optimization_is_refused(world):
    raised = world(2).run_expecting_errors(train, FIVE, {"fault": ""}, {"nonfinite": "raise"}, module=ByHand)
    assert all("nonfinite='raise' checks a step before it is taken" in one.message for one in raised)


class OfOneSample(Faulty):
    """Its loss is no number where its samples hold 5."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (math.nan if bool((batch == 5).any()) else 1)


SPLITS: list[dict[str, Any]] = [
    {"split_batches": True},
    {"split_batches": True, "max_device_batch_size": 1},
    {"equivalent_to": "data_parallel"},
    {"equivalent_to": "data_parallel", "num_replicas": 4},
]


@pytest.mark.parametrize("strategy", SPLITS, ids=str)
@on_ranks()
def test_split_batches(strategy):
    """The batches 1 to 4 and 5 to 8 are shared out over the ranks."""
    model, data = OfOneSample(""), torch.arange(1, 9, dtype=torch.float64)
    trainer = make_trainer(GradAvgStrategy(nonfinite="skip_step", **strategy), max_epochs=1)
    trainer.fit(model, DataLoader(data, batch_size=4))  # type: ignore[arg-type]  # a tensor is a dataset
    assert approx(-0.25) == model.w.item()
