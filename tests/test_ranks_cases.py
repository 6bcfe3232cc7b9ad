"""Every row of CASES (`cases.py`), in every way that a user may train: the gradient by hand, or one error on all ranks.

`WAY_OF` has the body that runs a row in a way. Below are whole runs, and loaders where ranks have different numbers of
batches.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_parts import CLEARED, CLEARS, LOOPS, Fails, Steep, Trains
from cases import CASES, Case
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from ranks import NEEDS_SHARDS_ON_CPU, RankError, make_trainer, on_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader
from toys import (
    IGNORE_UNUSED_PARAMETERS,
    FabricLoop,
    OneWeight,
    Seen,
    Stream,
    TorchLoop,
    Toy,
    TrainerLoop,
    approx,
    make_loader,
    same_everywhere,
)

from lightning_gradavg import GradAvgModelParallelStrategy, GradAvgStrategy, average_gradients

pytestmark = [
    *IGNORE_UNUSED_PARAMETERS,
    pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.training_step. returned .None."),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
]
AS_THEY_ARE: Any = {"use_distributed_sampler": False}
SLOPES = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
"""A loss of gradient g has these multiples of it, so that a sharded model has some on each rank."""


class Line(nn.Module):
    """Its loss has the gradient that the micro-batch says in the parameters that train; or losses by name have it."""

    forwards: Tensor

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2, dtype=case.dtype))
        self.second = nn.Parameter(torch.ones(2, dtype=case.dtype))
        self.register_buffer("forwards", torch.zeros(()))  # which DDP broadcasts
        self.train_only(case.trains)

    def train_only(self, names: Sequence[str]) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in names)

    def forward(self, gradient: Any) -> Any:
        self.forwards.add_(1)
        slopes = SLOPES.to(self.first.dtype)
        loss = (self.first * slopes[:2]).sum() + (self.second * slopes[2:]).sum()
        if isinstance(gradient, Mapping):
            return {name: value * loss for name, value in gradient.items()}
        return gradient * loss


Grads = list[Tensor]
"""The gradient of `Line` after each window."""


def gradient_of(module: nn.Module) -> Tensor:
    """Return the gradients of all parameters, end to end: of shards, those of all ranks; zeros where there is none."""
    gradients: list[Tensor] = []
    for parameter in module.parameters():
        gradient: Any = parameter.grad
        if gradient is None:
            gradient = torch.zeros(2)
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        gradients.append(gradient)
    return torch.cat(gradients)


def gradient_and_weight(case: Case, micro_batch: Any) -> tuple[Any, dict[str, Any]]:
    """Return the gradient of a micro-batch, and its weight as a keyword if it has one that the rule reads."""
    if isinstance(micro_batch, Tensor):
        return case.loss(micro_batch), {}
    if not isinstance(micro_batch, tuple):
        return micro_batch, {}
    gradient, weight = micro_batch[:2]
    if not case.uses_weight:
        return gradient, {}
    return gradient, {"weight": weight}


def fail(gradient: Tensor) -> None:
    raise MemoryError("it does not fit")


def length_of(window: Sequence[Any], micro_batch: Any) -> int:
    """Return the number of micro-batches in the window that this one ends up in.

    What the user gave up does not count. If two windows are open at once, those of the same parameters count.
    """
    remaining: list[Any] = []
    for item in window:
        if item in CLEARS:
            remaining = []
        else:
            remaining.append(item)
    if getattr(micro_batch, "ends", None) is None:
        return len(remaining)
    return sum(item.parameters == micro_batch.parameters for item in remaining)


def ends_window(window: Sequence[Any], index: int) -> bool:
    """Return whether a micro-batch is the last of its window: a `Trains` may say so, else the last of the row's is."""
    said_by_row: bool | None = getattr(window[index], "ends", None)
    if said_by_row is None:
        return index == len(window) - 1
    return said_by_row


def run_window(case: Case, module: Line, model: Any, loop: Any, window: Sequence[Any]) -> Tensor:
    """Run a window in a loop of the user's own; return the gradient after it, which is zeroed unless it is kept."""
    expected_error: Any = nullcontext()
    if any(isinstance(item, Fails) for item in window):
        # A `Fails` whose weight is negative is refused with a ValueError.
        expected_error = pytest.raises((MemoryError, ValueError))
    with expected_error:
        for index, micro_batch in enumerate(window):
            if micro_batch in CLEARS:
                module.zero_grad(set_to_none=micro_batch == CLEARED)
                continue
            if isinstance(micro_batch, Trains):
                module.train_only(micro_batch.parameters)
            gradient, weight = gradient_and_weight(case, micro_batch)
            with loop.no_sync(model, enabled=not ends_window(window, index)):
                loss = model(gradient)
                if isinstance(micro_batch, Fails):
                    loss.register_hook(fail)
                if case.reduction == "mean":
                    # Under the mean a loop divides, as with stock DDP.
                    loss = loss / length_of(window, micro_batch)
                loop.backward(loss, **weight)
    reduced = gradient_of(module)
    if not case.keeps_gradients:
        module.zero_grad()
    return reduced


class Automatic(LightningModule):
    """Trains on the micro-batches of a row, and notes the gradients that its optimizer sees."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = Line(case)
        self.case = case
        self.gradients = Grads()
        # The loss of the running step if `on_before_backward` must get its value, None if it may get another.
        self.loss: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, Trains):
            self.net.train_only(batch.parameters)
        if self.case.runs_collective:
            dist.all_reduce(torch.ones(()))
        gradient, weight = gradient_and_weight(self.case, batch)
        self.loss = None
        if gradient is None:
            return None
        loss = self.net(gradient)
        if not isinstance(batch, Tensor):
            self.loss = loss
        if isinstance(batch, Steep):
            # The square root has an infinite slope at 0, and the slope of `abs` is 0 there: the gradient is NaN.
            loss = loss + (loss - loss.detach()).abs().sqrt()
        if weight or isinstance(loss, Mapping):
            return {"loss": loss, **weight}
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        """Check the value, which is not weighed; where ranks share a batch, it may be another one."""
        if self.loss is not None and self.case.dtype == torch.float64:
            assert approx(self.loss.item() / self.trainer.accumulate_grad_batches) == loss.item()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(gradient_of(self.net))

    def optimizer_zero_grad(self, *args: Any) -> None:
        if not self.case.keeps_gradients:
            super().optimizer_zero_grad(*args)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Manual(Automatic):
    """Trains in manual optimization. A batch is a whole window."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.automatic_optimization = False
        # The gradients after each window, also of those whose backward raised, after which the optimizer does not step.
        self.reduced = Grads()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loop = TrainerLoop(self)
        self.reduced.append(run_window(self.case, self.net, self.net, loop, batch))
        if not any(isinstance(item, Fails) for item in batch):
            loop.optimizer.step()


class Validated(Automatic):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(1.0)


class Sharded(Automatic):
    def configure_model(self) -> None:
        from torch.distributed._composable.fsdp import fully_shard  # noqa: PLC0415  # slow

        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Batches(Stream):
    """A loader that is none of torch's. It has a length on rank 0 only."""

    def __len__(self) -> int:
        if dist.get_rank() > 0:
            raise NotImplementedError
        return len(self.batches)


class Estimated(Stream):
    """A stream that says it has 5 batches, whatever this rank has."""

    def __len__(self) -> int:
        return 5


def make_loader_of_any(batches: Any, **options: Any) -> Any:
    """Return a loader that yields these batches as they are."""
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch, **options)


LOADERS: Mapping[str, Callable[[list[Any]], Any]] = {
    "list": make_loader_of_any,
    "stream": lambda batches: make_loader_of_any(Stream(batches)),
    "stream with an estimated length": lambda batches: make_loader_of_any(Estimated(batches)),
    "workers": lambda batches: make_loader_of_any(Stream(batches), num_workers=1),
    "iterable": Batches,
}
"""What makes a loader of a rank's batches, by the kind that a row names."""


def fit(model: Automatic, batches: Any, strategy: Any = None, **options: Any) -> Grads:
    case = model.case
    if strategy is None:
        strategy = GradAvgStrategy(reduction=case.reduction, **case.options)
    make_trainer(strategy, nodes=case.nodes, max_epochs=1, **AS_THEY_ARE, **options).fit(model, batches)
    return model.gradients


def micro_batches_of_rank(case: Case, rank: int) -> list[Any]:
    """Return the micro-batches of all windows of a rank, one after another."""
    return list(chain.from_iterable(case.windows[rank]))


# Bodies: each runs a row in one way, on every rank, and returns the gradient after each window.


def automatic(case: Case, model: type[Automatic] = Automatic, strategy: Any = None) -> Grads:
    loader = LOADERS[case.loader](micro_batches_of_rank(case, dist.get_rank()))
    return fit(model(case), loader, strategy, accumulate_grad_batches=case.longest_window)


def twice(case: Case) -> Grads:
    """Train in two runs of one Trainer, with validation after every batch."""
    model = Validated(case)
    batches = make_loader_of_any(micro_batches_of_rank(case, dist.get_rank()))
    strategy = GradAvgStrategy(reduction=case.reduction)
    window = {"accumulate_grad_batches": case.longest_window, "val_check_interval": 1}
    trainer = make_trainer(strategy, nodes=case.nodes, **AS_THEY_ARE, **window)
    for max_epochs in (1, 2):
        trainer.fit_loop.max_epochs = max_epochs
        trainer.fit(model, batches, make_loader_of_any([1, 2]))
    return model.gradients


def split(case: Case) -> Grads:
    micro_batches = [micro_batches_of_rank(case, rank) for rank in range(len(case.windows))]
    batches = [torch.cat(micro_batches_of_step) for micro_batches_of_step in zip(*micro_batches, strict=True)]
    sizes = [len(batch) for batch in batches]
    indices_of_batches = torch.arange(sum(sizes)).split(sizes)
    loader: Any = DataLoader(torch.cat(batches), batch_sampler=[indices.tolist() for indices in indices_of_batches])
    return fit(Automatic(case), loader, accumulate_grad_batches=case.longest_window)


def manual(case: Case) -> Grads:
    model = Manual(case)
    fit(model, make_loader_of_any(case.windows[dist.get_rank()]))
    return model.reduced


def sharded(case: Case) -> Grads:
    strategy: Any = GradAvgModelParallelStrategy(
        reduction=case.reduction, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1
    )
    return automatic(case, Sharded, strategy)


def run_loop(case: Case, loop: Any) -> Grads:
    module = Line(case)
    model = loop.set_up(module)
    return [run_window(case, module, model, loop, window) for window in case.windows[dist.get_rank()]]


def fabric(case: Case) -> Grads:
    return run_loop(case, FabricLoop(nodes=case.nodes, reduction=case.reduction, **case.options))


def reducer(case: Case) -> Grads:
    nodes = case.nodes or [0] * dist.get_world_size()
    return run_loop(case, TorchLoop(nodes=nodes, reduction=case.reduction, ddp=case.options))


def average(case: Case) -> Grads:
    module = Line(case)
    gradients = Grads()
    if case.nodes is not None:
        os.environ["NODE_RANK"] = str(case.nodes[dist.get_rank()])
    for (micro_batch,) in case.windows[dist.get_rank()]:
        gradient, weight = gradient_and_weight(case, micro_batch)
        module.zero_grad()
        module(gradient).backward()
        average_gradients(list(module.parameters()), reduction=case.reduction, **weight)
        gradients.append(gradient_of(module))
    return gradients


WAY_OF: Mapping[str, Callable[[Case], Grads]] = {
    "automatic": automatic,
    "twice": twice,
    "split": split,
    "manual": manual,
    "fabric": fabric,
    "reducer": reducer,
    "average": average,
    "sharded": sharded,
}


def expected_gradients(case: Case) -> list[list[Any]]:
    """Return the gradient of `Line` after each window of a row, approximately; zeros are exact."""
    tolerance = 1e-12
    if case.dtype in (torch.float16, torch.bfloat16):
        tolerance = 2 * torch.finfo(case.dtype).eps
    expected = []
    for gradient in case.gradients:
        if isinstance(gradient, tuple):
            first, second = gradient
        else:
            first = second = gradient
        numbers: list[Any] = []
        for slope, number in zip(SLOPES.tolist(), [first, first, second, second], strict=True):
            numbers.append(approx(slope * number, tolerance) if number != 0 else 0.0)
        expected.append(numbers)
    return expected


def make_parameters_of_cases() -> list[Any]:
    """Return a parameter of pytest for every row of CASES and each way in which it is run."""
    parameters = []
    for case in CASES:
        for way in case.served_ways:
            marks = [NEEDS_SHARDS_ON_CPU] if way == "sharded" else []
            parameters.append(pytest.param(way, case, id=f"{way}-{case}", marks=marks))
    return parameters


@pytest.mark.parametrize(("way", "case"), make_parameters_of_cases())
def test_gradient_by_hand(world, way, case):
    ranks = world(len(case.windows))
    error = case.expected_error(way)
    if error is not None:
        raised = ranks.run_expecting_errors(WAY_OF[way], case)
        assert [raised[0]] * len(raised) == raised
        assert error in raised[0].message
        assert raised[0].type_name in ("ValueError", "RuntimeError", "TypeError")
        return
    gradients, *gradients_of_other_ranks = ranks.run(WAY_OF[way], case)
    assert expected_gradients(case) == [gradient.tolist() for gradient in gradients]
    for gradients_of_rank in gradients_of_other_ranks:
        for gradient, gradient_of_rank in zip(gradients, gradients_of_rank, strict=True):
            assert torch.equal(torch.nan_to_num(gradient), torch.nan_to_num(gradient_of_rank))


def free_gradients(loop: Any, net: OneWeight, model: Any, reduction: str) -> None:
    """Drop gradients within a window, and after one: nobody else may hold them, with or without a next backward."""
    weight = {} if reduction == "mean" else {"weight": 1 + dist.get_rank()}

    def backward(*, ends: bool) -> StorageWeakRef:
        with loop.no_sync(model, enabled=not ends):
            loop.backward(model(torch.ones(1, dtype=torch.float64)).mean(), **weight)
        assert net.w.grad is not None
        return StorageWeakRef(net.w.grad.untyped_storage())

    for ends in (False, True, False, False, True, True):
        gradient = backward(ends=ends)
        net.zero_grad()
        assert gradient.expired()


class Freeing(LightningModule):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.net = OneWeight()
        self.reduction = reduction
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        free_gradients(TrainerLoop(self), self.net, self.net, self.reduction)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean", "normalized_sum"])
@pytest.mark.parametrize("way", LOOPS)
@on_ranks()
def test_gradients_that_the_user_drops_are_freed(way, reduction):
    """Where gradients are no views of buckets, which DDP keeps."""
    options = {"gradient_as_bucket_view": False}
    if way == "manual":
        strategy: Any = GradAvgStrategy(reduction=reduction, **options)
        make_trainer(strategy, max_epochs=1, **AS_THEY_ARE).fit(Freeing(reduction), make_loader_of_any([0, 1]))
        return
    loop: Any
    if way == "fabric":
        loop = FabricLoop(reduction=reduction, **options)
    else:
        loop = TorchLoop(reduction=reduction, ddp=options)
    net = OneWeight()
    free_gradients(loop, net, loop.set_up(net), reduction)


class Counted(Toy):
    def __init__(self) -> None:
        super().__init__(start=0.0, lr=0.1)
        self.noted: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("first", batch[0], on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.noted.append("validation")

    def on_train_epoch_end(self) -> None:
        self.noted.append(float(self.trainer.callback_metrics["first"]))


def train_and_validate(folder: str) -> tuple[Seen, list[Any]]:
    model = Counted()
    callbacks = [ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")]
    trainer = make_trainer(
        GradAvgStrategy(), max_epochs=2, callbacks=callbacks, enable_checkpointing=True, **AS_THEY_ARE
    )
    batches_of_rank = [[[1.0]] * 5, [[3.0]] * 3]
    trainer.fit(model, make_loader(batches_of_rank[dist.get_rank()]), make_loader([[0.0]]))
    return model.seen, model.noted


def test_two_epochs_with_fewer_batches_on_a_rank(world, tmp_path):
    """Case 33: five batches of gradient 1 and three of 3 take w from 0 to -0.8 on both ranks, in each epoch."""
    logged = approx((5 * 1 + 3 * 3) / 8)
    runs_of_ranks = world(2).run(train_and_validate, str(tmp_path))
    for _, noted in runs_of_ranks:
        assert ["validation", "validation", logged, "validation", logged] == noted
    weights = same_everywhere([seen for seen, _ in runs_of_ranks]).weights
    assert 10 == len(weights)
    assert approx(-0.8) == weights[4].item()
    assert approx(-1.6) == weights[-1].item()
    assert {"epoch=0.ckpt", "epoch=1.ckpt"} == {path.name for path in tmp_path.iterdir()}


class Both(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.losses(batch["a"]).mean() + self.losses(batch["b"]).mean()


@on_ranks()
def test_two_loaders_are_refused():
    """Of two streams read together one ends earlier on rank 1."""
    batches = [torch.ones(1)] * 3
    # Rank 1 has one batch less of "b".
    streams = {"a": LOADERS["stream"](batches), "b": LOADERS["stream"](batches[dist.get_rank() :])}
    trainer = make_trainer(GradAvgStrategy(), max_epochs=1, **AS_THEY_ARE)
    with pytest.raises(RuntimeError, match="one of the 2 train loaders has no more batches on 1 of 2 ranks"):
        trainer.fit(Both(), CombinedLoader(streams, "max_size"))


def read_the_same() -> None:
    trainer = make_trainer(GradAvgStrategy(), max_epochs=1, **AS_THEY_ARE)
    with warnings.catch_warnings():
        # An error also where pytest lets warnings pass, as with the oldest versions.
        warnings.filterwarnings("error", "all ranks read the same batches")
        trainer.fit(Toy(), LOADERS["stream"]([torch.ones(1) * number for number in range(3)]))


def test_a_stream_that_all_ranks_read_alike_is_warned_of(world):
    with pytest.raises(RankError, match="all ranks read the same batches of DataLoader over Stream: every"):
        world(2).run(read_the_same)


class NeverTrained(Toy):
    def on_train_start(self) -> None:
        raise AssertionError("training has begun")


@on_ranks()
def test_a_static_graph_in_windows_is_refused_before_training():
    strategy = GradAvgStrategy(reduction="weighted_mean", static_graph=True)
    trainer = make_trainer(strategy, max_epochs=1, accumulate_grad_batches=2, **AS_THEY_ARE)
    with pytest.raises(ValueError, match="static_graph=True in windows of several"):
        trainer.fit(NeverTrained(), make_loader([[1.0], [2.0]]))
