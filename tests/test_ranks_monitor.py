"""The callback `GradAvgMonitor` in real Trainers on real ranks: what it logs, and what it warns of."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import make_trainer
from toys import WEIGHTED, Memory, Toy, approx, loader, train

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy


def monitored(
    per_rank: Sequence[Any], monitor: Mapping[str, Any], *run: Any, **options: Any
) -> list[tuple[int | None, dict[str, float]]]:
    """Body: train on each rank's own micro-batches under a monitor, and return what it logged."""
    memory, callbacks = Memory(), [GradAvgMonitor(**monitor)]
    train(per_rank, *run, **{"log_every_n_steps": 0, "logger": memory, "callbacks": callbacks, **options})
    return [(step, row) for step, row in memory.rows if any(name.startswith("gradavg/") for name in row)]


def test_every_value(world):
    """A step of item 2's split is logged under these names with these values."""
    batches = [[[1, 2, 3]] * 2, [[4]] * 2]
    options = {"every_n_steps": 1, "per_rank": True}
    results = world(2).run(monitored, batches, options, {"kind": "s", "lr": 0.0}, WEIGHTED)
    (first, values), (second, later) = results[0]

    assert (0, 1) == (first, second)
    expected = {
        "loss": 3.75,
        "normalizer": 4,
        "gradient_norm": 7.5,
        "lr_scale": 1,
        "lr/group_0": 0,
        "global_batch_size": 4,
        "weight/mean": 2,
        "weight/min": 1,
        "weight/max": 3,
        "weight/rank_0": 3,
        "weight/rank_1": 1,
        "local_gradient_norm/mean": 31 / 3,
        "local_gradient_norm/min": 14 / 3,
        "local_gradient_norm/max": 16,
        "local_gradient_norm/rank_0": 14 / 3,
        "local_gradient_norm/rank_1": 16,
    }
    assert {f"gradavg/{name}": approx(value) for name, value in expected.items()} == values
    assert values == later


@pytest.mark.parametrize(
    ("every", "log_every", "steps"), [(None, 3, [2, 5]), (4, 3, [3]), (None, 0, []), (1, 0, [0, 1, 2, 3, 4, 5, 6])]
)
def test_how_often(world, every, log_every, steps):
    options = {"log_every_n_steps": log_every, "accumulate_grad_batches": 2}
    batches, monitor = [[[index] for index in range(1, 15)]] * 2, {"every_n_steps": every, "check_data": False}
    for rows in world(2).run(monitored, batches, monitor, **options):
        assert steps == [step for step, _ in rows]


COLLECTIVES = [(dist, "all_reduce"), (dist, "all_gather"), (dist, "all_gather_object")]
HOOKS = [(torch.Tensor, "register_post_accumulate_grad_hook"), (torch.Tensor, "register_hook")]


def count_work(per_rank: Sequence[Any], monitors: Sequence[GradAvgMonitor]) -> list[int]:
    """Body: train, and return how many collectives Python started, and how many hooks it registered."""
    with ExitStack() as stack:
        counts = [
            [
                stack.enter_context(mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name)))
                for owner, name in kind
            ]
            for kind in (COLLECTIVES, HOOKS)
        ]
        train(per_rank, callbacks=monitors)
        return [sum(each.call_count for each in kind) for kind in counts]


def test_steps_that_are_not_logged_do_nothing(world):
    """A logged step costs one exchange and one hook per parameter; 12 steps with 2 of them logged cost twice that."""
    batches, monitors = [[[index] for index in range(12)]] * 2, [GradAvgMonitor(6, check_data=False)]
    alone, watched = (world(2).run(count_work, batches, each) for each in ([], monitors))
    for (collectives, hooks), found in zip(alone, watched, strict=True):
        assert [collectives + 2, hooks + 2] == found


def shown_metrics(prog_bar: bool) -> tuple[set[str], set[str]]:
    """Body: return the names in the progress bar and in callback_metrics."""
    callbacks = [GradAvgMonitor(1, prefix="run", prog_bar=prog_bar)]
    trainer = make_trainer(GradAvgStrategy(), callbacks=callbacks, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(Toy(), loader([[1 + dist.get_rank()], [2]]))
    return {name for name in trainer.progress_bar_metrics if "/" in name}, set(trainer.callback_metrics)


@pytest.mark.parametrize(("prog_bar", "shown"), [(True, {"run/loss", "run/gradient_norm"}), (False, set())])
def test_the_progress_bar(world, prog_bar, shown):
    """With prog_bar the loss and the norm are in the progress bar, and in callback_metrics always, by the prefix."""
    for in_bar, in_callbacks in world(2).run(shown_metrics, prog_bar):
        assert shown == in_bar
        assert {"run/loss", "run/gradient_norm", "run/weight/min"} <= in_callbacks


def warned_of_data(per_rank: Sequence[Sequence[float]], steps: int) -> list[str]:
    """Body: train on these numbers of each rank, and return the warnings about them."""
    batches = [[[number] for number in numbers] for numbers in per_rank]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = train(batches, {"lr": 0.0}, callbacks=[GradAvgMonitor(1)], max_steps=steps)
    assert steps == len(seen.gradients)
    return [str(warning.message) for warning in caught if "same training batches" in str(warning.message)]


def test_identical_streams_are_noticed(world):
    """Case 40: within 3 steps, on rank 0; not those that are split by rank, or whose samples are all alike."""
    (message,), other = world(2).run(warned_of_data, [range(40)] * 2, 3)
    assert message.startswith("all ranks read the same training batches: every sample counts once per rank")
    assert [] == other
    for per_rank in ([range(0, 80, 2), range(1, 80, 2)], [[1] * 40] * 2):
        assert [[], []] == world(2).run(warned_of_data, per_rank, 20)
