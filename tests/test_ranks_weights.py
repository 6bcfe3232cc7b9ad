"""What users are told of weights in real Trainers, and weights after a run without them."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_module
from ranks import make_trainer
from toys import WEIGHTED, Toy, loader, train

from lightning_gradavg import GradAvgStrategy

BATCHES = [[[1.0, 2.0], [3.0]], [[4.0], [5.0]]]


def train_and_hear(*args: Any, **options: Any) -> list[str]:
    """Body: return what this rank is told of the samples n, and warned of weights."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # a handler of one line
    rank_zero_module.log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(*args, **options)
    finally:
        rank_zero_module.log.removeHandler(handler)
    told = [line.removeprefix("GradAvgStrategy: ") for line in lines if line.startswith("GradAvgStrategy: n")]
    warned = [str(one.message) for one in caught if "weight" in str(one.message)]
    return [line.partition(".")[0] for line in told + warned]


class Returns(Toy):
    """Returns what it is told to beside the loss."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__()
        self.result = result

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        given = {name: value(batch) if callable(value) else value for name, value in self.result.items()}
        return {"loss": self.losses(batch).mean(), **given}


def targets_that_count(batch: Any) -> Any:
    return (batch != -100).sum()


def none_on_rank_1(batch: Any) -> int:
    return 1 - dist.get_rank()


TARGETS = [[torch.tensor([1, 2]), torch.tensor([3, -100]), torch.tensor([-100, 4])]] * 2
NOTHING = "rank 1 has a micro-batch of weight 0, which contributes nothing to the gradient"
SAMPLES = "n = samples of the batch, as no weight is given"
IGNORED = (
    "integer tensors of a batch hold -100, the targets that torch's losses ignore, and no weight is given: the loss is"
    " then weighted by its samples, including the ignored ones"
)


@pytest.mark.parametrize(
    ("result", "strategy", "batches", "said"),
    [
        ({}, WEIGHTED, BATCHES, [SAMPLES]),
        ({"weight": None, "height": 4, "weights_of": 1}, WEIGHTED, BATCHES, [SAMPLES]),
        ({"weight": 3}, WEIGHTED, BATCHES, []),
        ({"weights": 3}, {"reduction": "sum"}, BATCHES, []),
        ({}, WEIGHTED, TARGETS, [SAMPLES, IGNORED]),
        ({}, {"split_batches": True}, TARGETS, [SAMPLES, IGNORED]),
        ({"weight": targets_that_count}, WEIGHTED, TARGETS, []),
        ({"weight": none_on_rank_1}, WEIGHTED, BATCHES, [NOTHING]),
        ({}, {}, TARGETS, []),
    ],
)
def test_what_stands_in_for_a_weight_is_said_once(world, result, strategy, batches, said):
    """By rank 0, or by the rank that it is about."""
    of_ranks = world(2).run(train_and_hear, batches, {"result": result}, strategy, module=Returns)
    assert ([[], said] if said == [NOTHING] else [said, []]) == of_ranks


def resume_from_stock(path: str) -> tuple[int, int]:
    """Body: continue a checkpoint of stock DDP under a rule; return how many times the steps of the first it has."""
    saving = make_trainer(DDPStrategy(), max_epochs=1, use_distributed_sampler=False)
    saving.fit(Toy(), loader(BATCHES[dist.get_rank()]))
    saving.save_checkpoint(path)
    trainer = make_trainer(GradAvgStrategy(reduction="weighted_mean"), max_epochs=2, use_distributed_sampler=False)
    trainer.fit(Toy(weight=lambda batch, _: len(batch)), loader(BATCHES[dist.get_rank()]), ckpt_path=path)
    return dist.get_rank(), trainer.global_step // saving.global_step


def test_a_checkpoint_of_stock_ddp_goes_on_under_another_rule(world, tmp_path):
    assert [(0, 2), (1, 2)] == world(2).run(resume_from_stock, str(tmp_path / "stock.ckpt"))
