"""What crosses the wire: how many collectives, of which kind, and how the ranks agree on errors."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from ranks import make_trainer
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from toys import Toy, loader, same_everywhere, train

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.rules import RULES, Share

WEIGHTED = {"reduction": "weighted_mean"}
ONE_PARAMETER = 1024

pytestmark = pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0:UserWarning")


def approx(value, tolerance=1e-12):
    return pytest.approx(value, rel=tolerance, abs=tolerance)


class TwoBuckets(Toy):
    """Two parameters, each a bucket of its own under a small cap."""

    def __init__(self) -> None:
        super().__init__(start=[1.0] * ONE_PARAMETER, dtype=torch.float32)
        self.v = nn.Parameter(torch.ones(ONE_PARAMETER))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return ((self.w + self.v).mean() * batch).mean()


def count_reductions(strategy: Any, micro_batches: int, window: int) -> tuple[int, Counter[int]]:
    """Body: return how often an all-reduce of each number of elements ran."""
    model = TwoBuckets()
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, accumulate_grad_batches=window)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        trainer.fit(model, loader([[1.0 + dist.get_rank()]] * micro_batches))
    sizes = Counter(int(np.prod(e.input_shapes[0])) for e in record.events() if e.name == "gloo:all_reduce")
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
        # Stock Lightning broadcasts the flag of termination, which is an all-reduce of two signals here.
        extra = {size: n for size, n in (ours[rank] - stock[rank]).items() if size != 2}
        assert ({64: 3} if RULES[reduction].uses_weight else {}) == extra


def train_accumulated(reduction: str) -> Any:
    return train([[[1.0 + dist.get_rank()]] * 4] * 2, {}, {"reduction": reduction}, accumulate_grad_batches=4)


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
def test_whole_window_is_reduced_once(world, reduction):
    """Case 15: micro-gradients 1 + r, accumulated over 4, give 1.5."""
    assert [approx(1.5)] == [g.item() for g in same_everywhere(world(2).run(train_accumulated, reduction)).gradients]


class Wide(Toy):
    """Random float32 gradients of many magnitudes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(start=[1.0] * 300, dtype=torch.float32)
        self.net = nn.Sequential(nn.Linear(300, 50), nn.Tanh(), nn.Linear(50, 7))
        self.gradients_: list[torch.Tensor] = []

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
    assert isinstance(strategy._ddp_kwargs, dict)
    return model.seen


class Hooks(Toy):
    hooks: int = -1

    def on_train_start(self) -> None:
        self.hooks = len(self.trainer.strategy.model._comm_hooks)


def count_hooks(options: dict[str, Any]) -> int:
    model = Hooks()
    make_trainer(GradAvgStrategy(**options), max_epochs=1).fit(model, loader([[1.0]]))
    return model.hooks


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.01}], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_default_is_stock_ddp(world, world_size, options, window):
    """Without an option of its own the strategy has the bits of stock DDP, on 3 ranks too, where 1/W is rounded."""
    ours = same_everywhere(world(world_size).run(train_wide, True, options, window))
    stock = same_everywhere(world(world_size).run(train_wide, False, options, window))
    assert 4 // window == len(ours.gradients)
    for mine, theirs in zip(ours.gradients, stock.gradients, strict=True):
        assert torch.equal(mine, theirs)


def test_default_registers_no_hook(world):
    """No rule installs a communication hook on a CPU."""
    for reduction in RULES:
        assert [0, 0] == world(2).run(count_hooks, {"reduction": reduction})


def without_avg(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        raise RuntimeError(f"{op} is not available")
    return dist.distributed_c10d.all_reduce(tensor, op, **kwargs)


def train_without_avg(per_rank: Any, toy: Any, strategy: Any, **options: Any) -> Any:
    original: Any = dist.all_reduce
    dist.all_reduce = without_avg  # type: ignore[assignment]  # for this body only
    try:
        return train(per_rank, toy, strategy, **options)
    finally:
        dist.all_reduce = original


def test_no_means_cross_the_wire(world):
    """Case 31: with AVG, which gloo has not, made to fail, cases 1, 2 and 12 still hold."""
    run = world(2).run
    assert (
        approx(30.0)
        == same_everywhere(
            run(train_without_avg, [[[1, 2]], [[3, 4]]], {"kind": "s", "loss": "sum"}, {"reduction": "sum"})
        )
        .gradients[0]
        .item()
    )
    assert (
        approx(7.5)
        == same_everywhere(run(train_without_avg, [[[1, 2, 3]], [[4]]], {"kind": "s"}, WEIGHTED)).gradients[0].item()
    )
    assert (
        approx(0.745)
        == same_everywhere(run(train_without_avg, [[[1, 2, 3, 4]], [[5, 6, 7, 8]]], {"kind": "s"}, WEIGHTED))
        .weights[0]
        .item()
    )


WEIGHT_TYPES = {
    "int": lambda n: n,
    "float": float,
    "numpy int": np.int64,
    "numpy float": np.float32,
    "bool tensor sum": lambda n: torch.ones(n, dtype=torch.bool).sum(),
    "int32": lambda n: torch.tensor(n, dtype=torch.int32),
    "float16": lambda n: torch.tensor(n, dtype=torch.float16),
    "bfloat16": lambda n: torch.tensor([n], dtype=torch.bfloat16),
    "float64 with graph": lambda n: torch.tensor(float(n), dtype=torch.float64, requires_grad=True) * 1,
}


class Typed(Toy):
    def __init__(self, kind_of_weight: str) -> None:
        super().__init__(kind="s")
        self.kind_of_weight = kind_of_weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.losses(batch).mean(), "weight": WEIGHT_TYPES[self.kind_of_weight](batch.numel())}


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_types_of_weights(world, kind):
    """Case 32: a weight may be any scalar of any type: 7.5."""
    seen = same_everywhere(world(2).run(train, [[[1, 2, 3]], [[4]]], {"kind_of_weight": kind}, WEIGHTED, module=Typed))
    assert approx(7.5) == seen.gradients[0].item()


class Given(Toy):
    """The batch is `[x, weight]`; a weight of -2 stands for none given, -3 for a string, -4 for two numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, weight = self.w * batch[0], batch[1].item()
        if weight == -2:
            return {"loss": loss}
        return {"loss": loss, "weight": {-3: "many", -4: torch.ones(2)}.get(weight, weight)}


def test_large_weights_are_summed_in_double_precision(world):
    """Case 32: 2**24 samples of gradient 0 and one of 2**24 + 1 give exactly 1 to 1e-10."""
    seen = same_everywhere(world(2).run(train, [[[0.0, 2.0**24]], [[2.0**24 + 1, 1.0]]], {}, WEIGHTED, module=Given))
    assert approx(1.0, 1e-10) == seen.gradients[0].item()


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (-1.0, r"rank 1: .*weight -1\.0 is not a finite number >= 0"),
        (float("nan"), r"rank 1: .*weight nan is not a finite number >= 0"),
        (float("inf"), r"rank 1: .*weight inf is not a finite number >= 0"),
        (-3.0, r"rank 1: .*a weight is one number, got 'many' of type str"),
        (-4.0, r"rank 1: .*a weight is one number, got a tensor of shape \(2,\)"),
        (-2.0, r"rank 1: .*a weight was given in the steps before, but not in this one"),
    ],
)
def test_bad_weight_of_one_rank(world, bad, message, window):
    """Case 32: a weight that is negative, not finite, no number, or missing on one rank is the same error on all."""
    good = [[1.0, 1.0]] * 2
    raised = world(2).run_expecting_errors(
        train, [good, [[1.0, 1.0], [1.0, bad]]], {}, WEIGHTED, module=Given, accumulate_grad_batches=window
    )
    assert raised[0] == raised[1]
    assert "ValueError" == raised[0].type_name
    assert re.search(message, raised[0].message, re.DOTALL)


def infinite_share(place: Any, weight: Any) -> Share:
    return Share(weight, float("inf") if place.rank == 1 and weight == 4 else weight)


def negative_share(place: Any, weight: Any) -> Share:
    return Share(-weight, weight)


def not_a_share(place: Any, weight: Any) -> Any:
    return weight


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (infinite_share, r"rank 1: .*'infinite_share' returned normalizer=inf"),
        (negative_share, r"'negative_share' returned multiplier=-[24]\.0"),
        (not_a_share, r"'not_a_share' failed"),
    ],
    ids=["infinite", "negative", "no share"],
)
def test_bad_share_of_a_custom_rule(world, rule, message):
    """A user's rule that returns no finite numbers >= 0 is an error that names the rule, on all ranks."""
    raised = world(2).run_expecting_errors(train, [[[1, 2]], [[3, 4, 5, 6]]], {}, {"reduction": rule})
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all(re.search(message, one.message) for one in raised), raised


class Opaque(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w * 1.0


def train_on_opaque_batches() -> Any:
    data: Any = [object()]
    make_trainer(GradAvgStrategy(**WEIGHTED), max_epochs=1, use_distributed_sampler=False).fit(
        Opaque(), DataLoader(data, batch_size=None, collate_fn=lambda batch: batch)
    )


def test_samples_that_cannot_be_counted(world):
    """A batch without a countable tensor needs a weight, which the error says."""
    raised = world(2).run_expecting_errors(train_on_opaque_batches)
    assert all('return {"loss": loss, "weight": n}' in one.message for one in raised)
