"""The callback `GradAvgMonitor` in real Trainers on real ranks: what it logs, and what it warns of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import make_trainer
from torch.utils.data import DataLoader, IterableDataset
from toys import Memory, Toy, approx, loader

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy

WEIGHTED = {"reduction": "weighted_mean"}
QUIET: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False, "log_every_n_steps": 0}


def monitored(
    per_rank: Sequence[Any],
    monitor: Mapping[str, Any],
    toy: Mapping[str, Any] | None = None,
    strategy: Mapping[str, Any] | None = None,
    module: Callable[..., Any] = Toy,
    **options: Any,
) -> list[tuple[int | None, dict[str, float]]]:
    """Body: train on each rank's own micro-batches under a monitor, and return what it logged."""
    memory = Memory()
    trainer = make_trainer(
        GradAvgStrategy(**(strategy or {})),
        callbacks=[GradAvgMonitor(**monitor)],
        logger=memory,
        **{**QUIET, **options},
    )
    trainer.fit(module(**(toy or {})), loader(per_rank[dist.get_rank()]))
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
    results = world(2).run(
        monitored, [[[index] for index in range(1, 15)]] * 2, {"every_n_steps": every, "check_data": False},
        log_every_n_steps=log_every, accumulate_grad_batches=2,
    )  # fmt: skip
    for rows in results:
        assert steps == [step for step, _ in rows]


def count_work(per_rank: Sequence[Any], every: int | None) -> tuple[int, int, int]:
    """Body: the collectives that Python starts and the hooks that are registered in 12 steps, and the steps logged."""
    started = {"collectives": 0, "hooks": 0}
    with pytest.MonkeyPatch.context() as patch:
        for module, name, key in (
            (dist, "all_reduce", "collectives"),
            (dist, "all_gather", "collectives"),
            (dist, "all_gather_object", "collectives"),
            (torch.Tensor, "register_post_accumulate_grad_hook", "hooks"),
            (torch.Tensor, "register_hook", "hooks"),
        ):
            patch.setattr(module, name, _counted(getattr(module, name), started, key))
        monitor = {"every_n_steps": every, "check_data": False} if every is not None else None
        memory = Memory()
        options = {**QUIET, "logger": memory, "callbacks": [GradAvgMonitor(**monitor)] if monitor else []}
        make_trainer(GradAvgStrategy(), **options).fit(Toy(), loader(per_rank[dist.get_rank()]))
    return started["collectives"], started["hooks"], len(memory.rows)


def _counted(function: Any, counts: dict[str, int], key: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[key] += 1
        return function(*args, **kwargs)

    return call


def test_steps_that_are_not_logged_do_nothing(world):
    """A logged step costs one exchange and one hook per parameter; 12 steps with 2 of them logged cost twice that."""
    batches = [[[index] for index in range(12)]] * 2
    for alone, watched in zip(
        world(2).run(count_work, batches, None), world(2).run(count_work, batches, 6), strict=True
    ):
        assert (2, 2) == (watched[0] - alone[0], watched[1] - alone[1])
        assert (0, 2) == (alone[2], watched[2])


def shown_metrics(prog_bar: bool) -> tuple[set[str], set[str]]:
    """Body: return the names in the progress bar and in callback_metrics."""
    callbacks = [GradAvgMonitor(1, prefix="run", prog_bar=prog_bar)]
    trainer = make_trainer(GradAvgStrategy(), callbacks=callbacks, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(Toy(), loader([[1 + dist.get_rank()], [2]]))
    return set(trainer.progress_bar_metrics), set(trainer.callback_metrics)


def test_the_progress_bar(world):
    """With prog_bar the loss and the norm are in the progress bar, and in callback_metrics always, by the prefix."""
    for prog_bar, shown in ((True, {"run/loss", "run/gradient_norm"}), (False, set())):
        for in_bar, in_callbacks in world(2).run(shown_metrics, prog_bar):
            assert shown == {name for name in in_bar if name.startswith("run/")}
            assert {"run/loss", "run/gradient_norm", "run/weight/min"} <= in_callbacks


class Stream(IterableDataset[Any]):
    """Counts from `first` on, in steps of `step`."""

    def __init__(self, first: int, step: int, constant: bool = False) -> None:
        self.first, self.step, self.constant = first, step, constant

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(40):
            yield torch.tensor([1.0 if self.constant else self.first + self.step * index], dtype=torch.float64)


def warned_of_data(kind: str, steps: int) -> list[tuple[int, str]]:
    """Body: the warnings of a run, each with the step it came in."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stream = {
        "identical": Stream(0, 1),
        "split": Stream(rank, world_size),
        "constant": Stream(0, 1, constant=True),
    }[kind]
    module = Toy(lr=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(GradAvgStrategy(), callbacks=[GradAvgMonitor(1)], max_steps=steps)
        trainer.fit(module, DataLoader(stream, batch_size=2))
    assert len(module.seen.gradients) == steps
    return [(rank, str(warning.message)) for warning in caught if "same training batches" in str(warning.message)]


def test_identical_streams_are_noticed(world):
    """Case 40: an iterable that is the same on both ranks is warned of within 3 steps, on rank 0."""
    first, second = world(2).run(warned_of_data, "identical", 3)
    ((rank, message),) = first
    assert 0 == rank
    assert message.startswith("all ranks read the same training batches: every sample counts once per rank")
    assert [] == second


@pytest.mark.parametrize("kind", ["split", "constant"])
def test_other_streams_are_not(world, kind):
    """Case 40: a stream that is split by rank, or whose samples are all alike, gives no warning in 20 steps."""
    assert [[], []] == world(2).run(warned_of_data, kind, 20)
