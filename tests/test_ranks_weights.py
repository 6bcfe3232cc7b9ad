"""Weights that are not given, misspelt, or given now and then: what is said, and what is refused on all ranks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_module
from ranks import make_trainer
from toys import WEIGHTED, Toy, approx, loader, same_everywhere, train

from lightning_gradavg import GradAvgStrategy

BATCHES = [[[1.0, 2.0], [3.0]], [[4.0], [5.0]]]


@contextmanager
def told() -> Iterator[list[str]]:
    """Collect the lines that the strategy tells on this rank."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # a handler of one line
    rank_zero_module.log.addHandler(handler)
    try:
        yield lines
    finally:
        rank_zero_module.log.removeHandler(handler)
        lines[:] = [line.removeprefix("GradAvgStrategy: ") for line in lines if line.startswith("GradAvgStrategy")]


def train_told(*args: Any, **options: Any) -> list[str]:
    """Body: train the toy, and return what was told after the line at the start."""
    with told() as lines:
        train(*args, **options)
    return [line.partition(".")[0] for line in lines[1:]]


class Returns(Toy):
    """Returns what it is told to beside the loss."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__()
        self.result = result

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.losses(batch).mean(), **self.result}


SAMPLES = ["n = samples of the batch, as no weight is given"]


@pytest.mark.parametrize(
    ("result", "strategy", "told"),
    [
        ({}, WEIGHTED, SAMPLES),
        ({"weight": None}, WEIGHTED, SAMPLES),
        ({"height": 4, "length": 3, "weights_of": 1}, WEIGHTED, SAMPLES),
        ({"weight": 3}, WEIGHTED, []),
        ({"weights": 3}, {}, []),
        ({"weights": 3}, {"reduction": "sum"}, []),
    ],
    ids=str,
)
def test_what_stands_in_for_a_weight_is_told_once(world, result, strategy, told):
    """Without a weight rank 0 says, in the first step, what n is, and no other rank anything."""
    assert [told, []] == world(2).run(train_told, BATCHES, {"result": result}, strategy, module=Returns)


class Tokens(Toy):
    """Batches of a tensor of integers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch.double(), batch_idx)


def targets_that_count(batch: Any, batch_idx: int) -> Any:
    return (batch != -100).sum()


def train_tokens(weight: Any, strategy: dict[str, Any]) -> Any:
    """Body: train on targets of which the second batch has one that does not count; return what is warned of."""
    batches = [torch.tensor([1, 2]), torch.tensor([3, -100]), torch.tensor([-100, 4])]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train([batches] * 2, {"weight": weight}, strategy, module=Tokens)
    return [str(one.message)[:44] for one in seen if "-100" in str(one.message)]


WARNED = ["integer tensors of a batch hold -100, the ta"]


@pytest.mark.parametrize(
    ("weight", "strategy", "warned"),
    [
        (None, WEIGHTED, WARNED),
        (None, {"split_batches": True}, WARNED),
        (targets_that_count, WEIGHTED, []),
        (None, {}, []),
    ],
)
def test_targets_that_do_not_count_are_warned_of_once(world, weight, strategy, warned):
    """Integer targets of -100 without a weight are warned of, once and on rank 0."""
    assert [warned, []] == world(2).run(train_tokens, weight, strategy)


class Iterates(Toy):
    """Takes its batches itself."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.weighted = weighted

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:  # type: ignore[override]  # Lightning's other form
        batch, *_ = next(dataloader_iter)
        loss = self.losses(batch).mean()
        return {"loss": loss, "weight": len(batch)} if self.weighted else loss


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor", "ignore:Found `dataloader_iter`")
def test_a_step_that_reads_its_batches_needs_a_weight(world):
    for raised in world(2).run_expecting_errors(train, BATCHES, {"weighted": False}, WEIGHTED, module=Iterates):
        assert 'return {"loss": loss, "weight": n} from training_step' in raised.message
    seen = same_everywhere(world(2).run(train, BATCHES, {"weighted": True}, WEIGHTED, module=Iterates))
    assert [approx(7 / 3), 4.0] == [gradient.item() for gradient in seen.gradients]


def test_a_checkpoint_of_stock_ddp_goes_on_under_another_rule(world, tmp_path):
    assert [(0, 2), (1, 2)] == world(2).run(resume_from_stock, str(tmp_path / "stock.ckpt"))


def resume_from_stock(path: str) -> tuple[int, int]:
    """Body: continue a checkpoint of stock DDP under a rule; return how many times the steps of the first it has."""
    saving = make_trainer(DDPStrategy(), max_epochs=1, use_distributed_sampler=False)
    saving.fit(Toy(), loader(BATCHES[dist.get_rank()]))
    saving.save_checkpoint(path)
    trainer = make_trainer(GradAvgStrategy(reduction="weighted_mean"), max_epochs=2, use_distributed_sampler=False)
    trainer.fit(Toy(weight=lambda batch, _: len(batch)), loader(BATCHES[dist.get_rank()]), ckpt_path=path)
    return dist.get_rank(), trainer.global_step // saving.global_step
