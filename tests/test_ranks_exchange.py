"""What crosses the wire: how many collectives, of which kind, and how the ranks agree on errors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from grids import grid
from lightning.pytorch.strategies import DDPStrategy
from ranks import make_trainer
from torch import nn
from torch.profiler import ProfilerActivity, profile
from toys import WEIGHTED, Toy, loader, same_everywhere, train

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.rules import RULES

ONE_PARAMETER = 1024


class TwoBuckets(Toy):
    """Two parameters, each a bucket of its own under a small cap."""

    def __init__(self) -> None:
        super().__init__(start=[1.0] * ONE_PARAMETER, dtype=torch.float32)
        self.v = nn.Parameter(torch.ones(ONE_PARAMETER))
        self.hooks = -1

    def on_train_start(self) -> None:
        self.hooks = len(self.trainer.strategy.model._comm_hooks)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return ((self.w + self.v).mean() * batch).mean()


def count_reductions(reduction: str | None, micro_batches: int, window: int) -> Counter[int]:
    """Body: return how often an all-reduce of each number of elements ran, and, as 0, the exchanges of short rows.

    Without a rule of stock DDP; with one the strategy adds no communication hook to it.
    """
    model = TwoBuckets()
    given: Any = {"bucket_cap_mb": 0.001}
    strategy = DDPStrategy(**given) if reduction is None else GradAvgStrategy(reduction=reduction, **given)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, accumulate_grad_batches=window)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        trainer.fit(model, loader([[1.0 + dist.get_rank()]] * micro_batches))
    assert model.hooks == 0
    sizes = Counter(int(np.prod(e.input_shapes[0])) for e in record.events() if e.name == "gloo:all_reduce")
    sizes[0] = sum(e.name.startswith("gloo:all_to_all") for e in record.events())
    return sizes


@pytest.mark.skipif(
    torch.__version__ < "2.6", reason="the profiler of an older torch records no shapes of gloo's events"
)
@pytest.mark.parametrize(("reduction", "window"), [("sum", 3), ("weighted_mean", 1), ("weighted_mean", 3)])
def test_number_of_collectives(world, reduction, window):
    """Case 16: over windows 2 to 4, 6 gradient reductions as in stock DDP, and at most 3 small ones."""
    (_, ours), (_, stock) = (
        [
            after - before
            for before, after in zip(
                *(world(2).run(count_reductions, rule, n * window, window) for n in (1, 4)), strict=True
            )
        ]
        for rule in (reduction, None)
    )
    assert 6 == stock[ONE_PARAMETER] == ours[ONE_PARAMETER]
    assert {ONE_PARAMETER} == {size for sizes in (ours, stock) for size in sizes if size >= ONE_PARAMETER}
    # One per window under rules with weights, and one per micro-batch, where Lightning broadcasts a flag.
    assert {0: 3 * RULES[reduction].uses_weight + 3 * window} == dict(ours - stock)


class Wide(Toy):
    """Random float32 gradients of many magnitudes."""

    def __init__(self) -> None:
        super().__init__(start=[1.0] * 300, dtype=torch.float32)
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(300, 50), nn.Tanh(), nn.Linear(50, 7))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator = torch.Generator().manual_seed(int(batch[0]))
        x = torch.randn(6, 300, generator=generator) * torch.logspace(-9, 5, 300)
        return self.net(x * self.w).square().sum()  # a mean divides one bit away


@pytest.mark.parametrize(
    ("world_size", "options", "window"),
    [
        *grid([1, 2, 3], [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.01}], [1, 2]),
        *grid([1, 2, 3], [WEIGHTED], [1]),
    ],
)
def test_the_mean_and_equal_weights_are_stock_ddp(world, world_size, options, window):
    """The bits of stock DDP, on 3 ranks too, where 1/W is rounded, and for weights of 49, where 49 * (1 / 49) < 1."""
    batches = [[[10.0 * step + rank] * 49 for step in range(4)] for rank in range(world_size)]
    precision = "64-true" if "reduction" in options else "32-true"
    given = {"module": Wide, "accumulate_grad_batches": window, "precision": precision}
    of_ddp = {name: value for name, value in options.items() if name != "reduction"}
    ours, stock = (
        same_everywhere(world(world_size).run(train, batches, None, chosen, of=of, **given))
        for of, chosen in ((GradAvgStrategy, options), (DDPStrategy, of_ddp))
    )
    assert 4 // window == len(ours.gradients)
    for mine, theirs in zip(ours.gradients, stock.gradients, strict=True):
        assert torch.equal(mine, theirs)
