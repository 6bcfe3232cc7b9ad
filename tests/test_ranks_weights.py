"""Weights that are not given, misspelt, or given now and then: what is said, and what is refused on all ranks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_module
from ranks import make_trainer
from torch.utils.data import DataLoader
from toys import Toy, loader, train

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.reduction.weights import holds_ignored_targets, misspelt_weight

WEIGHTED = {"reduction": "weighted_mean"}
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
    return lines[1:]


class Returns(Toy):
    """Returns what it is told to beside the loss."""

    def __init__(self, result: dict[str, Any], every: int = 1) -> None:
        super().__init__()
        self.result, self.every = result, every

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = self.result if batch_idx % self.every == 0 else {}
        return {"loss": self.losses(batch).mean(), **result}


SAMPLES = ["n = samples of the batch, as training_step returned no weight"]


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


def test_keys_that_look_like_a_weight():
    for key in ("weights", "Weight", "WEIGHT", "weight_", "wieght", "weigth", "wight", "Weights"):
        assert f"the result of training_step has {key!r}" in str(misspelt_weight({"loss": 1.0, key: 3}))
    for other in ("height", "weight", "num_tokens", "freight", "class_weights", "sample_weight", 3, "w"):
        assert misspelt_weight({"loss": 1.0, other: 3}) is None


class Tokens(Toy):
    """Batches of a tensor of integers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch.double(), batch_idx)


def train_tokens(weighted: bool, strategy: dict[str, Any]) -> Any:
    """Body: train on targets of which the second batch has one that does not count."""
    data: Any = [torch.tensor([1, 2]), torch.tensor([3, -100]), torch.tensor([-100, 4])]
    model = Tokens(weight=(lambda batch, _: (batch != -100).sum()) if weighted else None)
    trainer = make_trainer(GradAvgStrategy(**strategy), max_epochs=1, use_distributed_sampler=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(model, DataLoader(data, batch_size=None))
    return [str(one.message)[:44] for one in seen if "-100" in str(one.message)]


WARNED = ["integer tensors of a batch hold -100, the ta"]


@pytest.mark.parametrize(
    ("weighted", "strategy", "warned"),
    [(False, WEIGHTED, WARNED), (False, {"split_batches": True}, WARNED), (True, WEIGHTED, []), (False, {}, [])],
    ids=str,
)
def test_targets_that_do_not_count_are_warned_of_once(world, weighted, strategy, warned):
    """Integer targets of -100 without a weight are warned of, once and on rank 0."""
    assert [warned, []] == world(2).run(train_tokens, weighted, strategy)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": torch.zeros(3), "y": torch.tensor([1, -100])}, True),
        ((torch.tensor([-100.0]), [torch.tensor([-100], dtype=torch.int8)]), False),
        ([torch.empty(2, dtype=torch.int64, device="meta"), "text", 3], False),
    ],
)
def test_where_targets_are_looked_for(batch, expected):
    """Integers of 16 bits and more are looked at, on the host only."""
    assert expected is holds_ignored_targets(batch)


class Iterates(Toy):
    """Takes its batches itself."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.weighted, self.read = weighted, 0

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:  # type: ignore[override]  # Lightning's other form
        batch, *_ = next(dataloader_iter)
        self.read += 1
        loss = self.losses(batch).mean()
        return {"loss": loss, "weight": len(batch)} if self.weighted else loss


def train_iterating(weighted: bool) -> Any:
    model = Iterates(weighted)
    trainer = make_trainer(GradAvgStrategy(**WEIGHTED), max_epochs=1, use_distributed_sampler=False)
    try:
        trainer.fit(model, loader(BATCHES[dist.get_rank()]))
    except ValueError as error:
        return model.read, str(error)
    return model.read, [gradient.item() for gradient in model.seen.gradients]


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor", "ignore:Found `dataloader_iter`")
def test_a_step_that_reads_its_batches_needs_a_weight(world):
    for read, message in world(2).run(train_iterating, False):
        assert read == 1
        assert 'return {"loss": loss, "weight": n} from training_step' in message
    assert [(2, [pytest.approx(7 / 3), 4.0])] * 2 == world(2).run(train_iterating, True)


def resume_from_stock(folder: str, reduction: str) -> list[str]:
    """Body: continue a checkpoint of stock DDP under a rule."""
    saving = make_trainer(DDPStrategy(), max_epochs=1, use_distributed_sampler=False)
    saving.fit(Toy(), loader(BATCHES[dist.get_rank()]))
    path = Path(folder) / "stock.ckpt"
    saving.save_checkpoint(path)
    trainer: Trainer = make_trainer(GradAvgStrategy(reduction=reduction), max_epochs=2, use_distributed_sampler=False)
    with told() as lines:
        trainer.fit(Toy(weight=lambda batch, _: len(batch)), loader(BATCHES[dist.get_rank()]), ckpt_path=str(path))
    return [line for line in lines if "checkpoint" in line]


@pytest.mark.filterwarnings('ignore:a "weight" was given')
def test_a_checkpoint_of_stock_ddp_goes_on_under_another_rule_with_a_word(world, tmp_path):
    ((line,), others) = world(2).run(resume_from_stock, str(tmp_path), "weighted_mean")
    assert line.endswith("from now on they are reduced by reduction='weighted_mean', g = sum(n * g) / sum(n)")
    assert [] == others
    assert [[], []] == world(2).run(resume_from_stock, str(tmp_path), "mean")
