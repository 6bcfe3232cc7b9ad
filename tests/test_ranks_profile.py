"""A profile shows what the package does in a step: each exchange and each pass over gradients, by a name of its own."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, Strategy
from ranks import make_trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from toys import WEIGHTED, Toy

from lightning_gradavg import GradAvgStrategy, average_gradients, gather, global_mean, hooks


class Net(Toy):
    """Logs a value in each step; the gradients from before a window are kept."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.log("value", 1.0)
        return found

    def optimizer_zero_grad(self, *args: Any) -> None:
        """Nothing: what a step leaves adds up with the next one."""


def train(options: Mapping[str, Any], weight: float = 2.0, observes: bool = False, **trainer_options: Any) -> None:
    weighs = (lambda batch, batch_idx: weight) if "reduction" in options else None
    module = Net(weight=weighs, dtype=torch.float32)
    strategy = GradAvgStrategy(**options)
    if observes:
        strategy.observe_next_step()
    data: Any = torch.arange(32.0)
    trainer = make_trainer(strategy, max_epochs=1, limit_train_batches=3, **trainer_options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(data, batch_size=4))


def weigh_zero() -> None:
    """The gradients of one rank do not count."""
    train(WEIGHTED, weight=float(dist.get_rank()))


def average() -> None:
    module = nn.Linear(3, 3)
    module(torch.ones(2, 3)).sum().backward()
    average_gradients(module)


def gather_rows() -> None:
    gather(torch.ones(2, 3, requires_grad=True)).sum().backward()


def mean_of_all() -> None:
    global_mean(torch.ones((), requires_grad=True), 1).backward()


def reduce_by_hook() -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    model.register_comm_hook(None, hooks.bfloat16)
    model(torch.ones(2, 3)).sum().backward()


TREE = {"num_replicas": 2, "reproducible": True, "reduction": "weighted_mean"}
SCOPES: Mapping[str, tuple[Callable[[], None], set[str]]] = {
    "weighted_mean": (partial(train, WEIGHTED), {"exchange rows", "wait for rows", "reduce bucket"}),
    "weighted_mean in windows": (
        partial(train, WEIGHTED, accumulate_grad_batches=3),
        {"choose unit", "exchange rows", "wait for rows", "reduce bucket"},
    ),
    "sum": (partial(train, {"reduction": "sum"}), {"reduce bucket"}),
    "kept gradients": (partial(train, WEIGHTED), {"keep gradients", "add kept gradients"}),
    "weight 0": (weigh_zero, {"pass no NaN"}),
    "reproducible": (
        partial(train, TREE),
        {"exchange rows", "wait for rows", "add replica", "sum of replicas"},
    ),
    "replicas": (
        partial(train, {"equivalent_to": "data_parallel", "num_replicas": 4}),
        {"exchange logged values", "exchange numbers", "broadcast buffers", "add kept gradients"},
    ),
    "check_replicas": (
        partial(train, {**WEIGHTED, "check_replicas_every_n_steps": 1}),
        {"compare replicas", "exchange numbers"},
    ),
    "report": (partial(train, WEIGHTED, observes=True), {"measure gradients", "exchange numbers"}),
    "average_gradients": (
        average,
        {"exchange numbers", "reduce gradients", "wait for gradients", "write gradients"},
    ),
    "gather": (gather_rows, {"exchange numbers", "exchange gathered rows"}),
    "global_mean": (mean_of_all, {"global_mean", "exchange numbers"}),
    "hook": (reduce_by_hook, {"reduce bucket"}),
}
"""Of each: what runs, and the scopes that it has at least."""
ALL_IN_SCOPES = ("average_gradients", "gather", "global_mean")
"""What has no collectives but those of the package: each of them is in a scope."""


def profiled(name: str) -> tuple[set[str], set[str]]:
    """Body: return the scopes of the package in a profile, and the collectives that are in none."""
    run, _ = SCOPES[name]
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    scopes = set()
    outside = set()
    for event in found.events():
        prefix, _, scope = event.name.partition("GradAvg: ")
        if scope and not prefix:
            scopes.add(scope)
        if event.name.startswith("c10d::"):
            parent = event
            while parent is not None and not parent.name.startswith("GradAvg: "):
                parent = parent.cpu_parent
            if parent is None:
                outside.add(event.name)
    return scopes, outside


BATCHES = 8
FIRST, LAST = 4, 6
"""Of the batches that are counted: ranks that split batches compare what they read at the 1st, 2nd, 4th and 8th."""
COLLECTIVES: Mapping[str, tuple[Callable[[], Strategy], int, tuple[int, int]]] = {
    "stock": (DDPStrategy, 1, (3, 0)),
    "mean": (GradAvgStrategy, 1, (3, 0)),
    "mean in windows": (GradAvgStrategy, 3, (1, 0)),
    "sum": (partial(GradAvgStrategy, reduction="sum"), 1, (3, 0)),
    "sum in windows": (partial(GradAvgStrategy, reduction="sum"), 3, (1, 0)),
    "mean_of_node_sums": (partial(GradAvgStrategy, reduction="mean_of_node_sums"), 1, (3, 0)),
    "mean_of_node_means in windows": (partial(GradAvgStrategy, reduction="mean_of_node_means"), 3, (1, 0)),
    "weighted_mean": (partial(GradAvgStrategy, **WEIGHTED), 1, (3, 3)),
    "weighted_mean in windows": (partial(GradAvgStrategy, **WEIGHTED), 3, (1, 1)),
    "normalized_sum": (partial(GradAvgStrategy, reduction="normalized_sum"), 1, (3, 3)),
    "split_batches": (partial(GradAvgStrategy, split_batches=True), 1, (3, 3)),
    "data_parallel": (partial(GradAvgStrategy, equivalent_to="data_parallel"), 1, (3, 3)),
    "single_device": (partial(GradAvgStrategy, equivalent_to="single_device"), 1, (3, 3)),
    "single_device in windows": (partial(GradAvgStrategy, equivalent_to="single_device"), 3, (1, 1)),
}
"""Of each: the strategy, the batches of a window, and the all-reduces and rows of three batches; nothing else comes."""


class Counting(Callback):
    """Counts the collectives of some batches, from the hooks before `training_step` to those behind it."""

    def __init__(self) -> None:
        self.profile = profile(activities=[ProfilerActivity.CPU])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            self.profile.start()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == LAST:
            self.profile.stop()


def collectives(name: str) -> dict[str, int]:
    """Body: return how many collectives of each kind some batches have."""
    make, window, _ = COLLECTIVES[name]
    strategy = make()
    counting = Counting()
    data: Any = torch.arange(2.0 * BATCHES)
    trainer = make_trainer(
        strategy, max_epochs=1, accumulate_grad_batches=window, use_distributed_sampler=False, callbacks=[counting]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Toy(dtype=torch.float32), DataLoader(data, batch_size=2))
    found = Counter(event.name for event in counting.profile.events() if event.name.startswith("c10d::"))
    return dict(found)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_step_has_the_collectives_of_stock_and_at_most_one_row(name, world):
    _, _, (buckets, rows) = COLLECTIVES[name]
    # Lightning broadcasts whether a signal has come, behind each batch.
    of_lightning = {"c10d::broadcast_": LAST - FIRST}
    expected = {**of_lightning, "c10d::allreduce_": buckets}
    if rows:
        expected["c10d::alltoall_base_"] = rows
    assert [expected, expected] == world(2).run(collectives, name)


@pytest.mark.parametrize("name", SCOPES)
def test_a_profile_names_every_exchange_and_every_pass_over_gradients(name, world):
    _, expected = SCOPES[name]
    found = world(2).run(profiled, name)
    has_all = [expected <= scopes for scopes, _ in found]
    assert has_all == ([True, False] if name == "weight 0" else [True, True])  # whose gradients count on one rank
    if name in ALL_IN_SCOPES:
        assert [set(), set()] == [outside for _, outside in found]
