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
from toys import Toy, loader, same_everywhere

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.rules import RULES

ONE_PARAMETER = 1024


class TwoBuckets(Toy):
    """Two parameters, each a bucket of its own under a small cap."""

    def __init__(self) -> None:
        super().__init__(start=[1.0] * ONE_PARAMETER, dtype=torch.float32)
        self.v = nn.Parameter(torch.ones(ONE_PARAMETER))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return ((self.w + self.v).mean() * batch).mean()


def count_reductions(strategy: Any, micro_batches: int, window: int) -> tuple[int, Counter[int]]:
    """Body: return how often an all-reduce of each number of elements ran, and, as 0, the exchanges of short rows."""
    model = TwoBuckets()
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, accumulate_grad_batches=window)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        trainer.fit(model, loader([[1.0 + dist.get_rank()]] * micro_batches))
    sizes = Counter(int(np.prod(e.input_shapes[0])) for e in record.events() if e.name == "gloo:all_reduce")
    sizes[0] = sum(e.name.startswith("gloo:all_to_all") for e in record.events())
    return dist.get_rank(), sizes


def count_ours(reduction: str, micro_batches: int, window: int) -> Any:
    return count_reductions(GradAvgStrategy(reduction=reduction, bucket_cap_mb=0.001), micro_batches, window)


def count_stock(micro_batches: int, window: int) -> Any:
    return count_reductions(DDPStrategy(bucket_cap_mb=0.001), micro_batches, window)


def of_three_windows(world: Any, window: int, body: Any, *arguments: Any) -> list[Counter[int]]:
    """Return per rank the reductions of windows 2 to 4."""
    long = world(2).run(body, *arguments, 4 * window, window)
    short = world(2).run(body, *arguments, window, window)
    assert [0, 1] == [one[0] for one in long]
    return [after[1] - before[1] for after, before in zip(long, short, strict=True)]


@pytest.fixture(scope="module")
def stock_collectives(world: Any) -> dict[int, list[Counter[int]]]:
    return {window: of_three_windows(world, window, count_stock) for window in (1, 4)}


@pytest.mark.skipif(
    torch.__version__ < "2.6", reason="the profiler of an older torch records no shapes of gloo's events"
)
@pytest.mark.parametrize("reduction", RULES)
@pytest.mark.parametrize("window", [1, 4])
def test_number_of_collectives(world, stock_collectives, reduction, window):
    """Cases 15 and 16: over 3 windows, 6 gradient reductions as in stock DDP, and at most 3 small ones."""
    ours, stock = of_three_windows(world, window, count_ours, reduction), stock_collectives[window]
    for rank in (0, 1):
        assert {ONE_PARAMETER: 6} == {size: n for size, n in stock[rank].items() if size >= ONE_PARAMETER}
        assert {ONE_PARAMETER: 6} == {size: n for size, n in ours[rank].items() if size >= ONE_PARAMETER}
        # One per window under rules with weights, and one per micro-batch, where Lightning broadcasts a flag.
        assert {0: 3 * RULES[reduction].uses_weight + 3 * window} == dict(ours[rank] - stock[rank])


class Wide(Toy):
    """Random float32 gradients of many magnitudes."""

    def __init__(self) -> None:
        super().__init__(start=[1.0] * 300, dtype=torch.float32)
        self.net = nn.Sequential(nn.Linear(300, 50), nn.Tanh(), nn.Linear(50, 7))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator = torch.Generator().manual_seed(int(batch.item()))
        x = torch.randn(6, 300, generator=generator) * torch.logspace(-9, 5, 300)
        return self.net(x * self.w).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters()]))


def train_wide(ours: bool, options: dict[str, Any], window: int) -> Any:
    torch.manual_seed(1)
    model = Wide()
    strategy = GradAvgStrategy(**options) if ours else DDPStrategy(**options)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, accumulate_grad_batches=window)
    trainer.fit(model, loader([[float(10 * step + dist.get_rank())] for step in range(4)]))
    return model.seen


class Hooks(Toy):
    hooks: int = -1

    def on_train_start(self) -> None:
        self.hooks = len(self.trainer.strategy.model._comm_hooks)


def count_hooks(reduction: Any) -> int:
    model = Hooks()
    make_trainer(GradAvgStrategy(reduction=reduction), max_epochs=1).fit(model, loader([[1.0]]))
    return model.hooks


@pytest.mark.parametrize(
    ("world_size", "options", "window"),
    grid([1, 2, 3], [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.01}], [1, 2]),
)
def test_default_is_stock_ddp(world, world_size, options, window):
    """Without an option of its own the strategy has the bits of stock DDP, on 3 ranks too, where 1/W is rounded."""
    ours = same_everywhere(world(world_size).run(train_wide, True, options, window))
    stock = same_everywhere(world(world_size).run(train_wide, False, options, window))
    assert 4 // window == len(ours.gradients)
    for mine, theirs in zip(ours.gradients, stock.gradients, strict=True):
        assert torch.equal(mine, theirs)


def test_default_registers_no_hook(world):
    for reduction in RULES:
        assert [0, 0] == world(2).run(count_hooks, reduction)
