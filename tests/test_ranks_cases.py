"""Every row of `cases.py`, in every way that a user may train: the gradient by hand, or the same error on all ranks."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CASES, Case, uses_weight
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from ranks import make_trainer, rank_environment
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from toys import AWARE, approx

from lightning_gradavg import GradAvgModelParallelStrategy, GradAvgReducer, GradAvgStrategy, average_gradients
from lightning_gradavg.fabric import GradAvgStrategy as OfFabric

pytestmark = AWARE
SLOPES = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
"""A loss of gradient g has these multiples of it, so that a sharded model has some on each rank."""


class Line(nn.Module):
    """Its loss has the gradient that the micro-batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, gradient: Any) -> Any:
        if isinstance(gradient, Mapping):
            return {name: self(value) for name, value in gradient.items()}
        return gradient * (self.weight * SLOPES).sum()


Grads = list[Tensor]


def gradient_of(module: nn.Module) -> Tensor:
    (parameter,) = module.parameters()
    gradient: Any = parameter.grad
    assert gradient is not None
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()


def parts(case: Case, micro_batch: Any) -> tuple[Any, dict[str, Any]]:
    """Return the gradient of a micro-batch, and its weight as a keyword where the rule uses one and it is given."""
    gradient, *weight = micro_batch if isinstance(micro_batch, tuple) else (micro_batch,)
    return gradient, {"weight": weight[0]} if weight and uses_weight(case) else {}


def share_of_loss(case: Case, window: Sequence[Any]) -> float:
    """Return what a loop divides its losses by: under the mean a window's length, as with stock DDP."""
    return len(window) if case.reduction == "mean" else 1


class Automatic(LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net, self.case, self.gradients = Line(), case, Grads()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        gradient, weight = parts(self.case, batch)
        loss = self.net(gradient)
        return {"loss": loss, **weight} if weight else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(gradient_of(self.net))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Manual(Automatic):
    """A batch is a whole window."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for index, micro_batch in enumerate(batch, 1):
            gradient, weight = parts(self.case, micro_batch)
            with optimizer.toggle_model(sync_grad=index == len(batch)):
                loss = self.net(gradient)
                loss = loss if isinstance(loss, dict) else loss / share_of_loss(self.case, batch)
                self.manual_backward(loss, **weight)
        optimizer.step()


class Sharded(Automatic):
    def configure_model(self) -> None:
        from torch.distributed._composable.fsdp import fully_shard  # noqa: PLC0415  # slow

        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def fit(model: Automatic, strategy: Any, batches: Sequence[Any], **options: Any) -> Grads:
    trainer = make_trainer(
        strategy, nodes=model.case.nodes, max_epochs=1, use_distributed_sampler=False, num_sanity_val_steps=0, **options
    )
    data: Any = list(batches)
    trainer.fit(model, DataLoader(data, batch_size=None, collate_fn=lambda batch: batch))
    return model.gradients


def automatic(case: Case, model: Any = Automatic, strategy: Any = None) -> Grads:
    windows = case.windows[dist.get_rank()]
    micro_batches = [micro_batch for window in windows for micro_batch in window]
    longest = max(len(window) for of_rank in case.windows for window in of_rank)
    strategy = strategy or GradAvgStrategy(reduction=case.reduction, **case.options)
    return fit(model(case), strategy, micro_batches, accumulate_grad_batches=longest)


def manual(case: Case) -> Grads:
    strategy = GradAvgStrategy(reduction=case.reduction, **case.options)
    return fit(Manual(case), strategy, case.windows[dist.get_rank()])


def sharded(case: Case) -> Grads:
    strategy: Any = GradAvgModelParallelStrategy(
        reduction=case.reduction, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1
    )
    return automatic(case, Sharded, strategy)


def loop(case: Case, module: Line, model: Any, backward: Callable[..., None], local: Callable[[], Any]) -> Grads:
    """Run the windows of this rank, whose loop is the user's own."""
    found = Grads()
    for window in case.windows[dist.get_rank()]:
        for index, micro_batch in enumerate(window, 1):
            gradient, weight = parts(case, micro_batch)
            with local() if index < len(window) else nullcontext():
                loss = model(gradient)
                backward(loss if isinstance(loss, dict) else loss / share_of_loss(case, window), **weight)
        found.append(gradient_of(module))
        module.zero_grad()
    return found


def fabric(case: Case) -> Grads:
    environment, module = rank_environment(case.nodes), Line()
    runs = Fabric(
        accelerator="cpu",
        devices=environment.ranks_on_node,
        num_nodes=environment.num_nodes,
        strategy=OfFabric(reduction=case.reduction),
        plugins=[environment],
    )
    runs.launch()
    model = runs.setup(module)
    return loop(case, module, model, runs.backward, lambda: runs.no_backward_sync(model))


def reducer(case: Case) -> Grads:
    module, weighs = Line(), GradAvgReducer(reduction=case.reduction)
    model = DistributedDataParallel(module)
    weighs.register(model, node=(case.nodes or [0] * dist.get_world_size())[dist.get_rank()])
    return loop(case, module, model, lambda loss, **weight: weighs.weigh(loss, **weight).backward(), model.no_sync)


@contextmanager
def on_node(case: Case) -> Iterator[None]:
    if case.nodes is not None:
        os.environ["NODE_RANK"] = str(case.nodes[dist.get_rank()])
    yield


def average(case: Case) -> Grads:
    module, found = Line(), Grads()
    with on_node(case):
        for (micro_batch,) in case.windows[dist.get_rank()]:
            gradient, weight = parts(case, micro_batch)
            module.zero_grad()
            module(gradient).backward()
            average_gradients(list(module.parameters()), reduction=case.reduction, **weight)
            found.append(gradient_of(module))
    return found


WAY_OF: Mapping[str, Callable[[Case], Grads]] = {
    "automatic": automatic,
    "manual": manual,
    "fabric": fabric,
    "reducer": reducer,
    "average": average,
    "sharded": sharded,
}


def by_hand(case: Case) -> list[Any]:
    """Return what is expected: where nothing counts, exact zeros."""
    return [[approx(slope * one) if one != 0 else 0.0 for slope in SLOPES.tolist()] for one in case.gradients]


@pytest.mark.parametrize(
    ("way", "case"), [pytest.param(way, case, id=f"{way}-{case}") for case in CASES for way in case.ways]
)
def test_gradient_by_hand(world, way, case):
    ranks, said = world(len(case.windows)), case.said(way)
    if said is not None:
        raised = ranks.run_expecting_errors(WAY_OF[way], case)
        assert len({tuple(one) for one in raised}) == 1
        assert said in raised[0].message
        assert raised[0].type_name in ("ValueError", "RuntimeError")
        return
    first, *others = ranks.run(WAY_OF[way], case)
    assert by_hand(case) == [gradient.tolist() for gradient in first]
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))


def in_one_run(way: str, reduction: Any) -> Case:
    """Return all rows of a rule on two ranks of one node as one run, in an order by chance."""
    rows = [
        case
        for case in CASES
        if way in case.ways and case.reduction == reduction and case.said(way) is None
        if len(case.windows) == 2 and case.nodes in (None, [0, 0]) and not case.options
        if len({len(windows) for windows in case.windows}) == 1
    ]
    steps: list[tuple[Any, Any]] = [
        (gradient, [windows[index] for windows in case.windows])
        for case in rows
        for index, gradient in enumerate(case.gradients)
    ]
    random.Random(7).shuffle(steps)
    windows = [[window[rank] for _, window in steps] for rank in range(2)]
    assert len(steps) > 5
    return Case("in one run", reduction, windows, [gradient for gradient, _ in steps])


@pytest.mark.parametrize("reduction", ["weighted_mean", "normalized_sum"])
@pytest.mark.parametrize("way", ["manual", "fabric", "reducer"])
def test_a_window_leaves_nothing_to_the_next(world, way, reduction):
    case = in_one_run(way, reduction)
    for found in world(2).run(WAY_OF[way], case):
        assert by_hand(case) == [gradient.tolist() for gradient in found]
