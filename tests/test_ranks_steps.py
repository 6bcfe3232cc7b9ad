"""Training steps of every kind in a real Trainer, with numbers by hand, of one process or of stock DDP.

`cases.py` has rules, weights, windows and options. Here a step, a model, a callback or a precision is special.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_module
from ranks import covering, make_trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from toys import (
    GATHERS,
    IGNORE_DEPRECATED_GATHER,
    IGNORE_UNUSED_PARAMETERS,
    MLP,
    WEIGHTED,
    OneWeight,
    Recorded,
    Seen,
    Toy,
    approx,
    make_batches_of_ranks,
    make_loader,
    same_everywhere,
    train,
    train_in_one_process,
)

from lightning_gradavg import GradAvgStrategy

pytestmark = [
    *IGNORE_UNUSED_PARAMETERS,
    IGNORE_DEPRECATED_GATHER,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed"),
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor"),
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter`"),
]
STEPS = {"mean": [0.745, 0.555025, 0.413493625], "weighted_mean": [0.745, 0.555025, 0.413493625], "sum": [-1.04]}


@pytest.mark.parametrize("reduction", STEPS)
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 4), (1, 8), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_invariance_grid(world, ranks, accumulation, reduction):
    """Case 12: the steps on 1 to 8 do not depend on how the batch is cut, rank by rank and then in micro-batches."""
    pieces = np.array_split(np.arange(1.0, 9.0), ranks * accumulation)
    expected = STEPS[reduction]
    batches = [[pieces[m * ranks + r].tolist() for m in range(accumulation)] * len(expected) for r in range(ranks)]
    toy = {"kind": "s", "loss": "sum" if reduction == "sum" else "mean"}
    options = {"accumulate_grad_batches": accumulation}
    seen = same_everywhere(world(ranks).run(train, batches, toy, {"reduction": reduction}, **options))
    assert [approx(weight) for weight in expected] == [weight.item() for weight in seen.weights]


class Stepped(Recorded):
    def __init__(
        self, step: Callable[[Any, Any], Any], net: Callable[[], nn.Module] = OneWeight, by_hand: bool = False
    ) -> None:
        super().__init__(0.1)
        torch.manual_seed(4)
        self.net = net()
        self.step = step
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)


def mean_loss(module: Any, batch: Any) -> Tensor:
    return module.net(batch).mean()


def misspelt(module: Any, batch: Any) -> dict[str, Any]:
    return {"loss": module.net(batch["x"]).mean(), "wieght": 3}


def by_hand(step: Callable[[Any, Any, Any], Any], start: Any = 1.0) -> Callable[[], Stepped]:
    """Return what makes a module that is optimized by hand: `step` gets its optimizer, too."""
    return partial(
        Stepped, lambda module, batch: step(module, batch, module.optimizers()), partial(OneWeight, start), True
    )


def direct(module: Any, batch: Tensor, optimizer: Any) -> None:
    mean_loss(module, batch).backward()
    optimizer.step()


def swapped(module: Any, batch: Tensor, optimizer: Any) -> None:
    """Write gradients that differ in their order alone."""
    module.net.w.grad = torch.tensor([1.0, -1.0] if dist.get_rank() else [-1.0, 1.0], dtype=torch.float64)
    optimizer.step()


def again_on_rank_1(module: Any, batch: Tensor, optimizer: Any) -> None:
    """Step twice where the batch says so; the other rank does not wait for it."""
    module.manual_backward(mean_loss(module, batch))
    for _ in range(1 + int(dist.get_rank() == 1 and batch.item() == 7)):
        optimizer.step()


def kept_graph(module: Any, batch: Tensor, optimizer: Any) -> None:
    """Run the backward of a weighed loss, (1 + 3 * 5) / 4, and another one of the loss itself."""
    loss = 11 * mean_loss(module, batch)
    module.manual_backward(loss, weight=1 + 2 * dist.get_rank(), retain_graph=True)
    optimizer.step()
    module.zero_grad()
    loss.backward()
    assert approx(11 * batch.item()) == module.net.w.grad.item()
    module.zero_grad()


def interrupted(module: Any, batch: Tensor, optimizer: Any) -> None:
    """Have a hook raise between the weighing of a loss and its backward, over gradients that are kept."""
    weight = 3 - 2 * dist.get_rank()
    module.manual_backward(mean_loss(module, batch), weight=weight)
    with patch.object(module, "on_before_backward", side_effect=KeyError), pytest.raises(KeyError):
        module.manual_backward(100 * mean_loss(module, batch), weight=9)
    module.manual_backward(mean_loss(module, batch), weight=weight)
    optimizer.step()


def without_sync(module: Any, batch: Tensor, optimizer: Any) -> None:
    """Accumulate by `no_sync` of the model that Lightning has wrapped: (3 * 1 + 3 + 5 + 15) / 6 on both ranks."""
    with module.trainer.strategy.model.no_sync():
        module.manual_backward(mean_loss(module, batch), weight=3 - 2 * dist.get_rank())
    module.manual_backward(3 * mean_loss(module, batch), weight=1)
    optimizer.step()


def toggled_twice(module: Any, batch: Tensor, optimizer: Any) -> None:
    """The same by `toggle_model` around another one, which ends within it."""
    with optimizer.toggle_model(sync_grad=False):
        with optimizer.toggle_model(sync_grad=False):
            pass
        module.manual_backward(mean_loss(module, batch), weight=3 - 2 * dist.get_rank())
    module.manual_backward(3 * mean_loss(module, batch), weight=1)
    optimizer.step()


class LooksAhead(Toy):
    """Runs a backward of the wrapped model before its first step, which no loss was weighed for."""

    def forward(self, batch: Tensor) -> Tensor:
        return self.losses(batch).mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        model: Any = self.trainer.strategy.model
        if batch_idx == 0:
            loss = model(100 * batch)
            with pytest.raises(RuntimeError, match="whose loss was not weighed"):
                loss.backward()
            self.zero_grad()


class SeesItsLoss(Toy):
    """Its callbacks see the loss that it returned, and its hooks the gradient times w in units of 4."""

    def __init__(self, **toy: Any) -> None:
        super().__init__(**toy)
        self.hooked: list[float] = []
        self.w.register_hook(lambda gradient: self.hooked.append(gradient.item()))

    def on_before_backward(self, loss: Tensor) -> None:
        self.value = loss.item()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        assert self.value == outputs["loss"].item() == self.losses(batch).mean().item()
        assert self.hooked[-1] == batch.mean().item() * len(batch) / 4


class TwoOptimizers(Recorded):
    """Each has a loss of its own, of other parameters, which accumulate for two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.ModuleList([OneWeight(), OneWeight()])

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.model.no_sync():
            self.manual_backward(self.net[0](batch).mean(), weight=1)
        self.manual_backward(self.net[1](batch).mean(), weight=3)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.net]


class Interrupted(Toy):
    """Ends its first epoch in the middle of a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.trainer.current_epoch == 0 and batch_idx == 3 else None


class Newton(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return (0.5 * (self.w * batch - 3).square()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=10)


class LateHalf(Recorded):
    """A parameter in float16 trains from the second epoch on; its gradient is 40000, and 65504 the largest number."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.ones(()))
        self.late = nn.Parameter(torch.ones((), dtype=torch.float16), requires_grad=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.late.requires_grad_(self.trainer.current_epoch == 1)
        return {"loss": 0 * self.whole + (40000 * self.late).float(), "weight": batch.sum()}


class Iterates(Toy):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:  # type: ignore[override]  # Lightning's other form
        return super().training_step(next(dataloader_iter)[0], 0)


def penalty(module: Any, batch: Tensor) -> Tensor:
    """Return the square of dy/dx of y = w x^2 + b, which b drops out of."""
    x = batch.clone().requires_grad_()
    w, b = module.net
    (slope,) = torch.autograd.grad((w * x**2 + b).sum(), x, create_graph=True)
    return slope.square().mean()


def two_numbers() -> nn.ParameterList:
    return nn.ParameterList([torch.ones((), dtype=torch.float64) for _ in range(2)])


def weighted_minus_1(ranks: Sequence[int], module: Any, batch: Tensor) -> Any:
    return {"loss": mean_loss(module, batch), "weight": -1.0 if dist.get_rank() in ranks else 1.0}


def silent(module: Any, batch: Tensor) -> Tensor | None:
    again = batch is getattr(module, "before", None)
    module.before = batch
    return None if again else mean_loss(module, batch)


def without_graph(module: Any, batch: Tensor) -> Any:
    loss = module.net[0](batch.long()).sum() + 2 * module.net[1].w.abs().sum()
    rank = dist.get_rank()
    return {"loss": torch.zeros(()) if rank == 1 else loss, "weight": 2 - 2 * rank}


def of_kind(kind: str) -> nn.Module:
    """Return a table of float64 and three numbers, of which `kind` says what is special."""
    other = OneWeight([1.0] * 3)
    other.w.data = other.w.data.to(torch.complex128 if kind == "complex" else torch.float32)
    return nn.Sequential(nn.Embedding(7, 3, sparse=kind == "sparse").double(), other)


def steep(rows: Tensor) -> Tensor:
    """Return 0, with a gradient of infinity times 0."""
    return (0 * rows).sqrt()


POISONS: dict[str, Callable[[Tensor], Any]] = {
    "finite": lambda rows: rows,
    "NaN": lambda rows: rows * torch.nan,
    "checkpoint": lambda rows: checkpoint(steep, rows, use_reentrant=True),
    "compiled": torch.compile(steep, backend="aot_eager"),
    "checkpoint before sqrt": lambda rows: steep(checkpoint(torch.tanh, rows, use_reentrant=True)),
}


def poisoned(poison: str, way: str, module: Any, batch: Tensor) -> Any:
    """Return on rank 1 a poisoned loss of weight 0, over its own rows or those of all ranks."""
    rows = module.net(batch)
    rank = dist.get_rank()
    rows = rows if way == "alone" else GATHERS[way](module, rows)
    return {"loss": (POISONS[poison](rows) if rank else rows).sum(), "weight": 1 - rank}


def twice(gradient: Tensor) -> Tensor:
    return 2 * gradient


def hooked_one() -> OneWeight:
    one = OneWeight()
    one.w.register_hook(twice)
    return one


def hooked(module: Any, batch: Tensor) -> Any:
    """Return on rank 1 a loss of weight 0, whose gradient hooks of the user change."""
    rows = module.net(batch)
    rows.register_hook(twice)
    return {"loss": rows.sum(), "weight": 1 - dist.get_rank()}


class OwnPart(Toy):
    """Has a parameter that DDP leaves to each rank, by the name that DDP looks for at the top of a module."""

    def __init__(self, **toy: Any) -> None:
        super().__init__(**toy)
        self.own = nn.Parameter(torch.ones((), dtype=torch.float64))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, [".own"])  # no public way

    def losses(self, batch: Tensor) -> Tensor:
        return (self.w + self.own) * batch


class Sparse(Stepped):
    def __init__(self) -> None:
        super().__init__(sparse_rows, lambda: nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 1)).double())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.net.get_parameter("0.weight").grad
        assert gradient is not None
        assert gradient.is_sparse
        super().on_before_optimizer_step(optimizer)


def sparse_rows(module: Any, batch: Tensor) -> Any:
    rows = module.net(batch if batch.numel() > 0 else torch.tensor([0]))
    return {"loss": rows.square().mean() * (1 if batch.numel() > 0 else torch.nan), "weight": batch.numel()}


def mixed(module: Any, batch: Tensor) -> Any:
    return {"loss": module.net(batch).float().square().mean(), "weight": 4096 * len(batch)}


MIXED = partial(Stepped, mixed, lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))


def long(of_ranks: Sequence[Sequence[Any]]) -> list[list[Tensor]]:
    return [[torch.tensor(one, dtype=torch.long) for one in of_rank] for of_rank in of_ranks]


class Run(NamedTuple):
    """A row.

    Attributes:
        module: Makes the module.
        of_ranks: The batches of each rank.
        expected: After each step the gradient, or the weights; what is found in the error of every rank; or None, for
            the weights of one process on all ranks' batches at once.
        strategy: The options of the strategy.
        weights: Whether these are expected, not gradients.
        options: Those of the Trainer.
        tolerance: Relative and absolute.
    """

    module: Callable[[], Any]
    of_ranks: Any
    expected: Any
    strategy: Mapping[str, Any] = WEIGHTED
    weights: bool = False
    options: Mapping[str, Any] = {}
    tolerance: float = 1e-12


def as_one(module: Any, of_ranks: Any, window: int = 1, tolerance: float = 1e-6, unused: bool = False) -> Run:
    strategy = {**WEIGHTED, "find_unused_parameters": unused}
    return Run(module, of_ranks, None, strategy, options={"accumulate_grad_batches": window}, tolerance=tolerance)


EPOCHS: Any = {"max_epochs": 2}
CLIPPED = (("norm", [-0.6, -0.8]), ("value", [-1.0, -1.0]))
WINDOW: Any = {"accumulate_grad_batches": 2}
FEWER = [[[1.0]] * 5, [[3.0]] * 3]
UNKNOWN_WEIGHT = (
    "^reduction='weighted_mean' cannot be applied: the result of training_step has 'wieght' and no \"weight\", and the"
    " number of samples cannot be read from a batch of type"
)
GONE = r"1 of 2 ranks have no more batches.*"
HALVES = torch.randn(3, 100, generator=torch.Generator().manual_seed(1)).bfloat16()
SCHEDULED: Any = {**EPOCHS, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}


def drifts(step: Any, batches: Sequence[float], found: int, start: Any = 1.0) -> Run:
    """Return a row in which the ranks drift apart, of which stock Lightning says nothing."""
    others = batches if step is again_on_rank_1 else [2.0] * len(batches)
    text = (
        rf"^the ranks drifted apart: after {found} batch\(es\) parameter 'net.w' is not the.*another one is on rank 1\."
        r" In manual optimization, call self\.manual_backward\(loss\).* on all ranks or on none\."
    )
    of_ranks = [[[one] for one in of_rank] for of_rank in (batches, others)]
    return Run(by_hand(step, start), of_ranks, text, {})


RUNS: dict[str, Run] = {
    # Case 2: ranks with 3 and 1 samples, whose mean gradient is 7.5 * w; the last weight is 0.21029776386659413.
    "uneven batches": Run(
        partial(Toy, "s"), [[[1, 2, 3]] * 20, [[4]] * 20], [(1 - 0.01 * 7.5) ** n for n in range(1, 21)], weights=True
    ),
    "an epoch that ends within a window": Run(
        partial(Interrupted, lr=0.0), [[[1], [2, 2, 2], [3], [4], [5], [6]]] * 2, [1.75, 1.75, 3.5, 5.5],
        options={**EPOCHS, **WINDOW},
    ),
    # 4 batches of gradient 1, windows of 1 and then 2, end at 1 - 4 - 2 = -5.
    **{
        f"a scheduled window {strategy}": Run(
            partial(Toy, lr=1.0), [[[1]] * 4] * 2, [0, -1, -2, -3, -4, -5], strategy, True, SCHEDULED
        )
        for strategy in ({}, WEIGHTED)
    },
    # Every step ends in the minimum of the mean over all samples, at 33/39.
    "an optimizer with a closure": Run(
        Newton, [[[1.0, 2.0]] * 3, [[3.0, 5.0]] * 3], [33 / 39] * 3, weights=True, tolerance=1e-9
    ),
    # Summed in bfloat16, half of the numbers would differ.
    "bfloat16 is rounded once": Run(
        partial(Toy, dtype=torch.bfloat16, start=[1.0] * 100), [[[one]] for one in HALVES.tolist()],
        [HALVES.float().mean(0).bfloat16().tolist()], options={"precision": "bf16-true"},
    ),
    # Case 53: of a gradient in the direction of (3, 4), both above 1.
    **{
        f"clipping {reduction} {algorithm} {window}": Run(
            partial(Toy, start=[0.0, 0.0], lr=1.0), [[[[3.0, 0.0]]] * window, [[[0.0, 4.0]]] * window], [expected],
            {"reduction": reduction}, weights=True, tolerance=1e-5,
            options={"gradient_clip_val": 1.0, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": window},
        )
        for (algorithm, expected), reduction, window in covering(CLIPPED, ("mean", "sum", "weighted_mean"), (1, 2))
    },
    "two backwards of a graph": Run(by_hand(kept_graph), [[[1.0]], [[5.0]]], [11 * 4.0]),
    "a window by no_sync of the wrapped model": Run(by_hand(without_sync), [[[1.0]], [[5.0]]], [26 / 6]),
    "a window by nested toggle_model": Run(by_hand(toggled_twice), [[[1.0]], [[5.0]]], [26 / 6]),
    "a backward that was not weighed": Run(partial(LooksAhead, lr=0.0), [[[1.0]] * 2, [[5.0]] * 2], [3.0, 3.0]),
    # Of 3 and 2 samples; the largest weight of both is 3, so the unit is 4.
    "a loss that keeps its value": Run(
        partial(SeesItsLoss, lr=0.0), [[[1.0, 2.0, 3.0]] * 2, [[4.0, 5.0]] * 2], [3.0] * 2
    ),
    "two losses of two optimizers in a window": Run(
        TwoOptimizers, [[[1.0]], [[5.0]]], "several optimizers train in a window of several micro-batches",
        {**WEIGHTED, "find_unused_parameters": True},
    ),
    "a backward that a hook prevents": Run(by_hand(interrupted), [[[1.0]], [[5.0]]], [2 * (3 * 1 + 5) / 4]),
    "a gradient that is not reduced": drifts(direct, [1, 1, 1], 1),
    "gradients in another order": drifts(swapped, [1], 1, start=[1.0, 1.0]),
    # The ranks compare after 1, 2 and 4 batches, and at the end.
    "a step too many at first": drifts(again_on_rank_1, [7, 1, 1, 1, 1, 1], 1),
    "a step too many later": drifts(again_on_rank_1, [1, 1, 7, 1, 1, 1], 4),
    "a step too many at last": drifts(again_on_rank_1, [1, 1, 1, 1, 1, 7], 6),
    # By the words of DDP: Lightning would name another strategy.
    "unused parameters": Run(
        partial(MLP, "unused"), make_batches_of_ranks(3),
        r'did not receive grad.*: 4 5(?s:.*)GradAvgStrategy\(reduction="weighted_mean", find_unused_parameters=True\)',
    ),
    # It joins the reduction, whatever the parameters' dtypes and layouts: 1 in 2 rows of 3, and 2 in the other 3.
    **{
        f"a loss without graph of {kind}": Run(
            partial(Stepped, without_graph, partial(of_kind, kind)), [[[1.0, 2.0]]] * 2,
            [[0.0] * 3 + [1.0] * 6 + [0.0] * 12 + [2.0] * 3],
        )
        for kind in ("dtypes", "sparse", "complex")
    },
    # Rank 0's loss is over 1 w, or over the gathered 1 w + 10 w, whose gradient comes home to rank 1 as well.
    **{
        f"a loss of weight 0 {poison} {way} {window}": Run(
            partial(Stepped, partial(poisoned, poison, way)), [[[1.0]] * 2, [[10.0]] * 2],
            [1.0 if way == "alone" else 11.0] * (2 // window), options={"accumulate_grad_batches": window},
        )
        for way, poison, window in covering(["alone", "lightning_gradavg"], [*POISONS], (1, 2))
    },
    "hooks of the user and a weight of 0": Run(partial(Stepped, hooked, hooked_one), [[[1.0]], [[10.0]]], [4.0]),
    "a negative weight": Run(
        partial(Stepped, partial(weighted_minus_1, [1])), [[[1.0]], [[2.0]]], "weight -1.0 is not a finite number"
    ),
    "a negative weight on all ranks": Run(
        partial(Stepped, partial(weighted_minus_1, [0, 1])), [[[1.0]], [[2.0]]], "weight -1.0 is not a finite number"
    ),
    "a misspelt weight": Run(
        partial(Stepped, misspelt), [[{"x": torch.ones(1), "y": torch.ones(2)}]] * 2, UNKNOWN_WEIGHT
    ),
    "a step that reads its batches": Run(
        partial(Iterates, weight=lambda batch, _: len(batch)), [[[1.0, 2.0], [3.0]], [[4.0], [5.0]]], [7 / 3, 4.0]
    ),
    "a step that reads its batches without a weight": Run(
        Iterates, [[[1.0, 2.0], [3.0]], [[4.0], [5.0]]], 'return {"loss": loss, "weight": n} from training_step'
    ),
    "fewer batches of a step that reads them": Run(
        Iterates, FEWER, "may have different numbers of batches, which a training_step.dataloader_iter.", {}
    ),
    "split batches of a step that reads them": Run(
        Iterates, FEWER, "split_batches=True cannot serve.*dataloader_iter", {"split_batches": True}
    ),
    "a stand-in without loss": Run(partial(Stepped, silent), FEWER, [2.0, 2.0, 2.0, 1.0, 1.0], {}),
    # As stock DDP has it: the gradients of each rank, here equal ones.
    "a parameter that DDP ignores": Run(OwnPart, [[[-1.0]]] * 2, [[-1.0, -1.0]], {}),
    **{
        f"a parameter that DDP ignores under {strategy}": Run(
            OwnPart, [[[-1.0]]] * 2, "DDP was told to ignore the parameter 'own'", strategy
        )
        for strategy in (WEIGHTED, {"split_batches": True})
    },
}  # fmt: skip


RUNS |= {
    "L-BFGS in windows": Run(
        Newton, [[[1.0, 2.0]] * 4, [[3.0, 5.0]] * 4],
        r"evaluates its closure several times, as L-BFGS does, with reduction='weighted_mean'", options=WINDOW,
    ),
    "a float16 parameter that trains later": Run(
        LateHalf, [[[4000.0]], [[1.0]]], [0.0, [0.0, 40000.0]], {**WEIGHTED, "find_unused_parameters": True},
        options=EPOCHS, tolerance=1e-3,
    ),
    **{
        f"an MLP {variant}": as_one(partial(MLP, variant), make_batches_of_ranks(5), 2)  # the last window is of one
        for variant in ("checkpoint", "checkpoint_reentrant", "frozen")
    },
    "an MLP with unused parameters": as_one(partial(MLP, "unused"), make_batches_of_ranks(5), unused=True),
    # Case 48.
    "double backward": as_one(
        partial(Stepped, penalty, two_numbers), [[torch.tensor([1.0])], [torch.tensor([2.0])]], 1, 1e-12, True
    ),
    "sparse rows of one rank": as_one(Sparse, long([[[1, 2, 2]], [[]]]), 1, 1e-12),
    "sparse rows in a window": as_one(Sparse, long([[[1, 2], [3, 3, 4]], [[], [1]]]), 2, 1e-12),
}  # fmt: skip


NEEDS_COMPLEX_IN_DDP = pytest.mark.skipif(
    torch.__version__ < "2.7", reason="DDP of an older torch cannot broadcast complex parameters over gloo"
)


def train_run(name: str) -> Seen:
    run = RUNS[name]
    return train(run.of_ranks, None, run.strategy, module=run.module, **run.options)


def make_parameters_of_runs() -> list[Any]:
    """Return a parameter of pytest for every row of RUNS."""
    parameters = []
    for name in RUNS:
        marks = []
        if name == "a loss without graph of complex":
            marks.append(NEEDS_COMPLEX_IN_DDP)
        if name == "a misspelt weight":
            # Rank 0 says it first, and in pytest it would raise there alone.
            marks.append(pytest.mark.filterwarnings("ignore:the result of training_step has 'wieght'"))
        parameters.append(pytest.param(name, marks=marks))
    return parameters


@pytest.mark.parametrize("name", make_parameters_of_runs())
def test_a_step_by_hand_or_the_same_error(world, name):
    run = RUNS[name]
    ranks = world(len(run.of_ranks))
    if isinstance(run.expected, str):
        raised = ranks.run_expecting_errors(train_run, name)
        assert all(re.search(run.expected, one.message, re.DOTALL) for one in raised), raised
        assert {(raised[0].type_name, re.sub(r"rank \d", "", raised[0].message))} == {
            (one.type_name, re.sub(r"rank \d", "", one.message)) for one in raised
        }
        return
    seen = same_everywhere(ranks.run(train_run, name))
    expected = run.expected
    weights = run.weights
    if expected is None:
        _, *of_one = train_in_one_process(run.module(), run.of_ranks, run.options["accumulate_grad_batches"])
        expected = [one.tolist() for one in of_one]
        weights = True
    found = [one.tolist() for one in (seen.weights if weights else seen.gradients)]
    assert [approx(one, run.tolerance) for one in expected] == found


def train_mixed(rows: Any, precision: str, scale: float | None) -> Seen:
    plugin = MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu", init_scale=scale) if scale else None)
    return train(rows, None, WEIGHTED, module=MIXED, plugins=[plugin], accumulate_grad_batches=len(rows[0]))


@pytest.mark.parametrize(
    ("name", "where"), [("a negative weight", " on rank 1"), ("a negative weight on all ranks", "")]
)
def test_the_first_line_names_a_cause_once(world, name, where):
    """The log shows the first line of an error alone, and a cause that all ranks share is not repeated for each."""
    for raised in world(2).run_expecting_errors(train_run, name):
        assert (
            f"reduction='weighted_mean' cannot be applied{where}: weight -1.0 is not a finite number >= 0."
            == raised.message
        )


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("precision", "scale", "tolerance"), [("16-mixed", 2.0**15, 2e-3), ("bf16-mixed", None, 2e-2)])
def test_mixed_precision(world, precision, scale, tolerance, window):
    """Weights of thousands do not overflow a loss scaled by 2**15: the step is that of float32, rounded."""
    draw = torch.Generator().manual_seed(10)
    rows = [[torch.randn(n, 6, generator=draw) for _ in range(window)] for n in (3, 1)]
    (found,) = same_everywhere(world(2).run(train_mixed, rows, precision, scale)).weights
    before, expected = train_in_one_process(MIXED(), rows, window)
    assert torch.linalg.norm(found - expected) <= tolerance * torch.linalg.norm(expected - before)


TARGETS = long([[[1, 2], [3, -100], [-100, 4]]] * 2)
NOTHING = "rank 1 has a micro-batch of weight 0, which contributes nothing to the gradient"
SAMPLES = "n = samples of the batch, as no weight is given"
MISSPELT = "the result of training_step has 'weights' and no \"weight\": the loss is weighted by its samples"
COUNTS = "the result of training_step has 'num_tokens', 'n' and no \"weight\": the loss is weighted by its samples"
IGNORED = (
    "integer tensors of a batch hold -100, the targets that torch's losses ignore, and no weight is given: the loss is"
    " then weighted by its samples, including the ignored ones"
)


# Beside the loss, what a step returns for a batch; the options, the batches, and what is said.
SAID: dict[str, tuple[Callable[[Tensor], dict[str, Any]], Any, Any, list[str]]] = {
    "no weight": (lambda batch: {"weight": None, "height": 4, "norm": 1.5}, WEIGHTED, FEWER, [SAMPLES]),
    "counts of the user": (
        lambda batch: {"num_tokens": torch.tensor(3), "n": 3, "size": 1.5, "height": 4},
        WEIGHTED,
        FEWER,
        [SAMPLES, COUNTS],
    ),
    "a word of the user": (lambda batch: {"weights": 3}, {"reduction": "sum"}, FEWER, []),
    "a word of the user that may be a weight": (lambda batch: {"weights": 3}, WEIGHTED, FEWER, [SAMPLES, MISSPELT]),
    "ignored targets": (lambda batch: {}, WEIGHTED, TARGETS, [SAMPLES, IGNORED]),
    "ignored targets of split batches": (lambda batch: {}, {"split_batches": True}, TARGETS, [SAMPLES, IGNORED]),
    "ignored targets under the mean": (lambda batch: {}, {}, TARGETS, []),
    "a weight": (lambda batch: {"weight": (batch != -100).sum()}, WEIGHTED, TARGETS, []),
    "a weight of 0": (lambda batch: {"weight": 1 - dist.get_rank()}, WEIGHTED, FEWER, [NOTHING]),
}


def heard(name: str) -> list[str]:
    """Body: return what this rank is told of the samples n, and warned of weights."""
    given, strategy, of_ranks, _ = SAID[name]
    module = partial(Stepped, lambda module, batch: {"loss": mean_loss(module, batch), **given(batch)})
    with warnings.catch_warnings(record=True) as caught, patch.object(rank_zero_module.log, "info") as info:
        warnings.simplefilter("always")
        train(of_ranks, None, strategy, module=module)
    told = [call.args[0].removeprefix("GradAvgStrategy: ") for call in info.call_args_list]
    warned = [str(one.message) for one in caught if "weight" in str(one.message)]
    return [line.partition(".")[0] for line in told + warned if line.startswith("n = ") or line in warned]


@pytest.mark.parametrize("name", SAID)
def test_what_stands_in_for_a_weight_is_said_once(world, name):
    """By rank 0, or by the rank that it is about."""
    said = SAID[name][-1]
    assert ([[], said] if said == [NOTHING] else [said, []]) == world(2).run(heard, name)


class Moved(Stepped):
    """Shows on the device no target that is ignored."""

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch.clamp(min=0)


def heard_of_moved(of_ranks: Any) -> list[str]:
    """Body: return what this rank is warned of targets."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(of_ranks, None, WEIGHTED, module=partial(Moved, mean_loss))
    return [str(one.message).partition(".")[0] for one in caught if "targets" in str(one.message)]


def test_ignored_targets_are_looked_for_on_the_host(world):
    """Nothing is read on the device for it."""
    assert [[IGNORED], []] == world(2).run(heard_of_moved, TARGETS)


def resume_from_stock(path: str) -> int:
    """Body: continue a checkpoint of stock DDP under a rule; return how many times the steps of the first it has."""
    batches = make_loader([[1.0], [2.0]])
    steps = list[int]()
    for epochs, strategy in enumerate((DDPStrategy(), GradAvgStrategy(reduction="weighted_mean")), 1):
        trainer = make_trainer(strategy, max_epochs=epochs, use_distributed_sampler=False)
        trainer.fit(Stepped(mean_loss), batches, ckpt_path=path if epochs > 1 else None)
        trainer.save_checkpoint(path)
        steps.append(trainer.global_step)
    return steps[1] // steps[0]


def test_a_checkpoint_of_stock_ddp_goes_on_under_another_rule(world, tmp_path):
    assert [2, 2] == world(2).run(resume_from_stock, str(tmp_path / "stock.ckpt"))


ONE_PARAMETER = 1024


class TwoBuckets(Toy):
    """Two parameters, each a bucket of its own under a small cap."""

    def __init__(self) -> None:
        super().__init__(start=[1.0] * ONE_PARAMETER, dtype=torch.float32)
        self.v = nn.Parameter(torch.ones(ONE_PARAMETER))
        self.hooks = -1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.hooks = len(self.trainer.strategy.model._comm_hooks)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return ((self.w + self.v).mean() * batch).mean()


def count_reductions(reduction: str | None, micro_batches: int, window: int) -> Counter[int]:
    """Body: return how often an all-reduce of each number of elements ran, and, as 0, the exchanges of short rows.

    Without a rule of stock DDP; with one the strategy adds a communication hook to it, but not under the plain mean.
    """
    model = TwoBuckets()
    given: Any = {"bucket_cap_mb": 0.001}
    strategy = DDPStrategy(**given) if reduction is None else GradAvgStrategy(reduction=reduction, **given)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, accumulate_grad_batches=window)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        trainer.fit(model, make_loader([[1.0 + dist.get_rank()]] * micro_batches))
    assert model.hooks == (reduction in ("sum", "weighted_mean"))
    sizes = Counter(int(np.prod(e.input_shapes[0])) for e in record.events() if e.name == "gloo:all_reduce")
    sizes[0] = sum(e.name.startswith("gloo:all_to_all") for e in record.events())
    return sizes


@pytest.mark.skipif(
    torch.__version__ < "2.7", reason="the profiler of an older torch records no shapes of gloo's events"
)
@pytest.mark.parametrize(("reduction", "window"), [("mean", 1), ("sum", 1), ("weighted_mean", 3)])
def test_number_of_collectives(world, reduction, window):
    """Case 16: over windows 2 to 4, 6 gradient reductions as in stock DDP, and 3 rows where Z is not known."""
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
    rows = Counter({0: 3}) if reduction == "weighted_mean" else Counter[int]()
    assert rows == ours - stock


class LateForward(Recorded):
    """In its second step, rank 1 ends its forward when rank 0 has reduced the bucket of `head`, and not before."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.first = nn.Parameter(torch.ones(1))
        self.head = nn.Parameter(torch.ones(ONE_PARAMETER))

    def on_train_start(self) -> None:
        self.messages = dist.new_group(timeout=timedelta(seconds=20))
        if dist.get_rank() == 0:
            self.first.register_post_accumulate_grad_hook(self.send)

    def send(self, _: Tensor) -> None:
        if self.trainer.global_step == 1:
            dist.send(torch.zeros(1), 1, group=self.messages)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and dist.get_rank() == 1:
            dist.recv(torch.zeros(1), 0, group=self.messages)
        loss = (batch * self.first * self.head).mean()
        return {"loss": loss, "weight": [3, 1][dist.get_rank()]}


def train_late() -> list[float]:
    """Body: return the gradient of `first` in each step."""
    module = LateForward()
    trainer = make_trainer(
        GradAvgStrategy(**WEIGHTED, bucket_cap_mb=0.001), max_epochs=1, use_distributed_sampler=False
    )
    trainer.fit(module, make_loader([[[1.0], [5.0]][dist.get_rank()]] * 2))
    return [gradient[0].item() for gradient in module.seen.gradients]


def test_no_rank_waits_for_a_row_before_it_sends_gradients(world):
    """(3 * 1 + 1 * 5) / 4. Rank 1 would wait for rank 0, and rank 0 for the row of rank 1."""
    assert [[2.0, 2.0]] * 2 == world(2).run(train_late)


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


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.01}])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_mean_is_stock_ddp(world, world_size, options, window):
    """The bits of stock DDP, on 3 ranks too, where 1/W is rounded."""
    batches = [[[10.0 * step + rank] * 49 for step in range(4)] for rank in range(world_size)]
    given = {"module": Wide, "accumulate_grad_batches": window, "precision": "32-true"}
    ours, stock = (
        same_everywhere(world(world_size).run(train, batches, None, options, of=of, **given))
        for of in (GradAvgStrategy, DDPStrategy)
    )
    assert 4 // window == len(ours.gradients)
    for mine, theirs in zip(ours.gradients, stock.gradients, strict=True):
        assert torch.equal(mine, theirs)
