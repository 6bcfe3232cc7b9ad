"""What ranks log in training steps under replicas: values of groups, of some ranks, of some steps; and how they travel.

A batch of two samples per rank: on rank r, in every step, the samples 2r and 2r + 1, whose mean is 2r + 0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import group_of, make_trainer
from torch import Tensor
from toys import Toy, make_loader

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg._support.collectives import World

STEPS = 6


class Logs(Toy):
    """Logs as it is told, and notes after each step what is known of it and what the step has sent."""

    def __init__(self, logs: Callable[[Logs, Tensor, int], None]) -> None:
        super().__init__(lr=0.0)
        self.logs = logs
        self.known = list[dict[str, float]]()
        self.sent = list[tuple[int, int]]()
        self.pickled = mock.Mock()
        self.rows = mock.Mock()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.logs(self, batch, batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, *_: Any) -> None:
        for sent in (self.pickled, self.rows):
            sent.reset_mock()

    def on_train_batch_end(self, *_: Any) -> None:
        self.sent.append((self.pickled.call_count, self.rows.call_count))
        self.known.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


def run(logs: Callable[[Logs, Tensor, int], None], strategy: dict[str, Any]) -> tuple[Any, Any, dict[str, float]]:
    """Body: train some steps; return what was known and sent in each, and what was known at the end."""
    module = Logs(logs)
    size = dist.get_world_size()
    trainer = make_trainer(GradAvgStrategy(**strategy), max_epochs=1)
    rows = mock.patch.object(World, "gather_row", autospec=True, side_effect=World.gather_row)
    pickled = mock.patch.object(dist, "all_gather_object", side_effect=dist.all_gather_object)
    with rows as module.rows, pickled as module.pickled:
        trainer.fit(module, make_loader([[float(n) for n in range(2 * size)]] * STEPS))
    return module.known, module.sent, {name: float(value) for name, value in trainer.callback_metrics.items()}


def nothing(module: Logs, batch: Tensor, batch_idx: int) -> None:
    """Log nothing."""


def usual(module: Logs, batch: Tensor, batch_idx: int) -> None:
    module.log("mean", batch.mean(), on_step=True, on_epoch=True, sync_dist=True)
    module.log("largest", batch.max(), reduce_fx=torch.max, sync_dist=True)


def many(module: Logs, batch: Tensor, batch_idx: int) -> None:
    for number in range(40):
        module.log(f"mean {number}", number + batch.mean(), sync_dist=True)


def of_pairs(module: Logs, batch: Tensor, batch_idx: int) -> None:
    """Log the mean of ranks 0 and 1, and of rank 2, which is in no group of theirs."""
    pair = group_of((0, 1))
    alone = group_of((2,))
    mine = alone if dist.get_rank() == 2 else pair
    module.log("of pairs", batch.mean(), on_step=True, on_epoch=True, sync_dist=True, sync_dist_group=mine)
    module.log("of first two", batch.mean(), sync_dist=True, sync_dist_group=pair)
    module.log("of all", batch.mean(), sync_dist_group=pair)


def of_first(module: Logs, batch: Tensor, batch_idx: int) -> None:
    if module.trainer.is_global_zero:
        module.log("first", batch.mean())


def beside(module: Logs, batch: Tensor, batch_idx: int) -> None:
    """Log one value on all ranks, and from the fourth step on another one on rank 1."""
    module.log("mean", batch.mean())
    if batch_idx >= 3 and dist.get_rank() == 1:
        module.log("second", batch.mean())


def seldom(module: Logs, batch: Tensor, batch_idx: int) -> None:
    if batch_idx == 3:
        usual(module, batch, batch_idx)


def stopping(module: Logs, batch: Tensor, batch_idx: int) -> None:
    """Log on all ranks in the third step, on rank 0 alone in the fourth and the last one."""
    if batch_idx == 2 or (batch_idx in (3, 5) and dist.get_rank() == 0):
        module.log("mean", batch.mean())


def new_in_each_step(module: Logs, batch: Tensor, batch_idx: int) -> None:
    module.log(f"step {batch_idx}", batch.mean())


SINGLE: dict[str, Any] = {"equivalent_to": "single_device"}
PIECES: dict[str, Any] = {"split_batches": True, "max_device_batch_size": 1}
QUIET = [(0, 0)]
ONE = [(0, 1)]
OF_RANKS = {"mean": 2.5, "mean_step": 2.5, "largest": 5.0}
SENT: dict[str, tuple[Any, dict[str, Any], list[tuple[int, int]], list[int], dict[str, float]]] = {
    # What is logged, the strategy, what steps send, by pickle and as numbers, and the steps after which is known what.
    "nothing": (nothing, SINGLE, [*ONE, *5 * QUIET], [], {}),
    "as usual": (usual, SINGLE, 6 * ONE, [0, 5], OF_RANKS),
    "as usual, in pieces": (usual, PIECES, 6 * ONE, [0, 5], OF_RANKS),
    "many": (many, SINGLE, [(0, 2), *5 * ONE], [0, 5], {f"mean {n}": 2.5 + n for n in range(40)}),
    "on rank 0 alone": (of_first, SINGLE, [(1, 1), *5 * ONE], [0, 5], {"first": 0.5}),
    "more on one rank": (beside, SINGLE, [*3 * ONE, (1, 1), *2 * ONE], [3, 5], {"mean": 2.5, "second": 2.5}),
    "in one step": (seldom, SINGLE, [*ONE, *2 * QUIET, *2 * ONE, *QUIET], [3, 5], OF_RANKS),
    "others in each step": (new_in_each_step, SINGLE, 6 * ONE, [5], {"step 0": 2.5, "step 5": 2.5}),
    "less on one rank": (stopping, SINGLE, [*ONE, *QUIET, *ONE, (1, 1), *2 * ONE], [5], {"mean": 0.5}),
}


@pytest.mark.parametrize("name", SENT)
def test_a_step_sends_numbers_and_a_name_once(world, name):
    """Of three ranks. Nothing travels by pickle but tables that differ, once; steps that log nothing send nothing."""
    logs, strategy, sent, steps, values = SENT[name]
    for known, really_sent, end in world(3).run(run, logs, strategy):
        assert sent == really_sent
        assert [pytest.approx(values)] * len(steps) == [{key: known[step][key] for key in values} for step in steps]
        assert end.get("mean_epoch", 2.5) == pytest.approx(2.5)


def test_a_value_of_a_group_is_that_of_its_ranks(world):
    """Of ranks 0 and 1 the mean is (0.5 + 2.5) / 2, of rank 2 it is 4.5. A group without sync_dist=True means none."""
    for rank, (known, sent, end) in enumerate(world(3).run(run, of_pairs, SINGLE)):
        of_pair = 4.5 if rank == 2 else 1.5
        expected = {"of pairs_step": of_pair, "of first two": of_pair, "of all": 2.5}
        for of_step in known:
            assert expected.items() <= of_step.items()
        assert end["of pairs_epoch"] == of_pair
        assert [(1, 1), *5 * ONE] == sent, "the groups differ, and with them the tables"


class Odd:
    """What Lightning does not take for `reduce_fx`, and cannot be pickled, compared by hash, or asked its name."""

    __hash__ = None  # type: ignore[assignment]  # on purpose

    def __call__(self, values: Any) -> Any:
        return values

    def __reduce__(self) -> Any:
        raise TypeError("this cannot be pickled")


def custom(reduce: Any, module: Logs, batch: Tensor, batch_idx: int) -> None:
    module.log("odd", batch.mean(), reduce_fx=reduce() if isinstance(reduce, type) else lambda values: values)


def rows(module: Logs, batch: Tensor, batch_idx: int) -> None:
    module.log("rows", torch.ones(2))


@pytest.mark.parametrize(
    ("logs", "error", "said"),
    [
        (partial(custom, Odd), "MisconfigurationException", "self.log(..., reduce_fx={min,max,mean,sum})"),
        (partial(custom, None), "MisconfigurationException", "self.log(..., reduce_fx={min,max,mean,sum})"),
        (rows, "ValueError", "the tensor must have a single element"),
    ],
)
def test_what_lightning_refuses_to_log_it_refuses_in_its_words(world, logs, error, said):
    for raised in world(2).run_expecting_errors(run, logs, SINGLE):
        assert error == raised.type_name
        assert said in raised.message
