"""Every row of `cases.py`, in every way that a user may train: the gradient by hand, or the same error on all ranks.

Below are whole runs and loaders where ranks have different numbers of batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CASES, CLEARED, CLEARS, LOOPS, Case, Fails, Steep, Trains, uses_weight
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from ranks import RankError, make_trainer, on_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, IterableDataset
from toys import AWARE, OfFabric, OfTorch, OfTrainer, One, Seen, Toy, approx, loader, same_everywhere

from lightning_gradavg import GradAvgModelParallelStrategy, GradAvgStrategy, average_gradients

pytestmark = [
    *AWARE,
    pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.training_step. returned .None."),
]
AS_THEY_ARE: Any = {"use_distributed_sampler": False}
SLOPES = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
"""A loss of gradient g has these multiples of it, so that a sharded model has some on each rank."""


class Line(nn.Module):
    """Its loss has the gradient that the micro-batch says in the parameters that train; or losses by name have it."""

    forwards: Tensor

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(2, dtype=case.dtype)) for _ in range(2))
        self.register_buffer("forwards", torch.zeros(()))  # which DDP broadcasts
        self.train_only(case.begins)

    def train_only(self, names: Sequence[str]) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in names)

    def forward(self, gradient: Any) -> Any:
        self.forwards.add_(1)
        slopes = SLOPES.to(self.first.dtype)
        first, second = (self.first * slopes[:2]).sum(), (self.second * slopes[2:]).sum()
        if isinstance(gradient, Mapping):
            return {name: value * (first + second) for name, value in gradient.items()}
        return gradient * (first + second)


Grads = list[Tensor]


def gradient_of(module: nn.Module) -> Tensor:
    gradients: list[Any] = [torch.zeros(2) if one.grad is None else one.grad for one in module.parameters()]
    return torch.cat([each.full_tensor() if hasattr(each, "full_tensor") else each for each in gradients])


def parts(case: Case, micro_batch: Any) -> tuple[Any, dict[str, Any]]:
    """Return the gradient of a micro-batch, and its weight as a keyword where the rule uses one and it is given."""
    if isinstance(micro_batch, Tensor):
        return case.loss(micro_batch), {}
    gradient, *weight = micro_batch[:2] if isinstance(micro_batch, tuple) else (micro_batch,)
    return gradient, {"weight": weight[0]} if weight and uses_weight(case) else {}


def fail(gradient: Tensor) -> None:
    raise MemoryError("it does not fit")


def length_of(window: Sequence[Any], micro_batch: Any) -> int:
    """Return the micro-batches in the window of this one: those after what was given up, of the same parameters."""
    cleared = [index for index, one in enumerate(window) if one in CLEARS]
    remaining = window[cleared[-1] + 1 if cleared else 0 :]
    if getattr(micro_batch, "ends", None) is None:
        return len(remaining)
    return sum(one.parameters == micro_batch.parameters for one in remaining)


def run_window(case: Case, module: Line, forward: Any, loop: Any, window: Sequence[Any]) -> Tensor:
    """Run a window in a loop of the user's own; return the gradient after it, which is zeroed unless it is kept."""
    with pytest.raises((MemoryError, ValueError)) if any(isinstance(one, Fails) for one in window) else nullcontext():
        for index, one in enumerate(window, 1):
            if one in CLEARS:
                module.zero_grad(set_to_none=one == CLEARED)
                continue
            if isinstance(one, Trains):
                module.train_only(one.parameters)
            gradient, weight = parts(case, one)
            ends = getattr(one, "ends", None)
            with loop.no_sync(forward, enabled=index < len(window) if ends is None else not ends):
                loss = forward(gradient)
                if isinstance(one, Fails):
                    loss.register_hook(fail)
                # Under the mean a loop divides, as with stock DDP.
                loop.backward(loss / length_of(window, one) if case.reduction == "mean" else loss, **weight)
    reduced = gradient_of(module)
    if not case.keeps:
        module.zero_grad()
    return reduced


class Automatic(LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net, self.case, self.gradients = Line(case), case, Grads()
        self.loss: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, Trains):
            self.net.train_only(batch.parameters)
        if self.case.collects:
            dist.all_reduce(torch.ones(()))
        (gradient, weight), self.loss = parts(self.case, batch), None
        if gradient is None:
            return None
        loss = self.net(gradient)
        if not isinstance(batch, Tensor) and "nonfinite" not in self.case.options:
            self.loss = loss
        if isinstance(batch, Steep):
            loss = loss + (loss - loss.detach()).abs().sqrt()
        return {"loss": loss, **weight} if weight or isinstance(loss, Mapping) else loss

    def on_before_backward(self, loss: Tensor) -> None:
        """Check the value, which is not weighed; where ranks judge a loss or share a batch, it may be another one."""
        if self.loss is not None and self.case.dtype == torch.float64:
            assert approx(self.loss.item() / self.trainer.accumulate_grad_batches) == loss.item()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(gradient_of(self.net))

    def optimizer_zero_grad(self, *args: Any) -> None:
        if not self.case.keeps:
            super().optimizer_zero_grad(*args)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Manual(Automatic):
    """A batch is a whole window."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.automatic_optimization, self.reduced = False, Grads()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loop = OfTrainer(self)
        self.reduced.append(run_window(self.case, self.net, self.net, loop, batch))
        if not any(isinstance(one, Fails) for one in batch):
            loop.optimizer.step()


class Validated(Automatic):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(1.0)


class Sharded(Automatic):
    def configure_model(self) -> None:
        from torch.distributed._composable.fsdp import fully_shard  # noqa: PLC0415  # slow

        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Stream(IterableDataset[Any]):
    """Of no known length."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Batches(Stream):
    """No dataset for a loader of torch's; on rank 0 it tells its length."""

    def __len__(self) -> int:
        if dist.get_rank() > 0:
            raise NotImplementedError
        return len(self.batches)


def as_they_are(batches: Any, **options: Any) -> Any:
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch, **options)


READS: Mapping[str, Callable[[list[Any]], Any]] = {
    "list": as_they_are,
    "stream": lambda batches: as_they_are(Stream(batches)),
    "workers": lambda batches: as_they_are(Stream(batches), num_workers=1),
    "iterable": Batches,
}


def fit(model: Automatic, batches: Any, strategy: Any = None, **options: Any) -> Grads:
    case = model.case
    strategy = strategy or GradAvgStrategy(reduction=case.reduction, **case.options)
    make_trainer(strategy, nodes=case.nodes, max_epochs=1, **AS_THEY_ARE, **options).fit(model, batches)
    return model.gradients


def in_a_row(windows: Sequence[Sequence[Any]]) -> list[Any]:
    return [micro_batch for window in windows for micro_batch in window]


def automatic(case: Case, model: Any = None, strategy: Any = None) -> Grads:
    longest = max(len(window) for of_rank in case.windows for window in of_rank)
    loader = READS[case.reads](in_a_row(case.windows[dist.get_rank()]))
    return fit((model or Automatic)(case), loader, strategy, accumulate_grad_batches=longest)


def twice(case: Case) -> Grads:
    """Train in two runs of one Trainer, with validation after every batch."""
    model, loader = Validated(case), as_they_are(in_a_row(case.windows[dist.get_rank()]))
    window = {"accumulate_grad_batches": max(map(len, case.windows[0])), "val_check_interval": 1}
    trainer = make_trainer(GradAvgStrategy(reduction=case.reduction), nodes=case.nodes, **AS_THEY_ARE, **window)
    for trainer.fit_loop.max_epochs in (1, 2):
        trainer.fit(model, loader, as_they_are([1, 2]))
    return model.gradients


def split(case: Case) -> Grads:
    batches = [torch.cat(of_ranks) for of_ranks in zip(*map(in_a_row, case.windows), strict=True)]
    order = torch.arange(sum(map(len, batches))).split(list(map(len, batches)))
    loader: Any = DataLoader(torch.cat(batches), batch_sampler=[one.tolist() for one in order])
    return fit(Automatic(case), loader, accumulate_grad_batches=max(map(len, case.windows[0])))


def manual(case: Case) -> Grads:
    model = Manual(case)
    fit(model, as_they_are(case.windows[dist.get_rank()]))
    return model.reduced


def sharded(case: Case) -> Grads:
    strategy: Any = GradAvgModelParallelStrategy(
        reduction=case.reduction, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1
    )
    return automatic(case, Sharded, strategy)


def run_loop(case: Case, loop: Any) -> Grads:
    module = Line(case)
    forward = loop.set_up(module)
    return [run_window(case, module, forward, loop, window) for window in case.windows[dist.get_rank()]]


def fabric(case: Case) -> Grads:
    return run_loop(case, OfFabric(nodes=case.nodes, reduction=case.reduction, **case.options))


def reducer(case: Case) -> Grads:
    nodes = case.nodes or [0] * dist.get_world_size()
    return run_loop(case, OfTorch(nodes=nodes, reduction=case.reduction, ddp=case.options))


def average(case: Case) -> Grads:
    module, found = Line(case), Grads()
    if case.nodes is not None:
        os.environ["NODE_RANK"] = str(case.nodes[dist.get_rank()])
    for (micro_batch,) in case.windows[dist.get_rank()]:
        gradient, weight = parts(case, micro_batch)
        module.zero_grad()
        module(gradient).backward()
        average_gradients(list(module.parameters()), reduction=case.reduction, **weight)
        found.append(gradient_of(module))
    return found


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


def by_hand(case: Case) -> list[Any]:
    """Return what is expected: where nothing counts, exact zeros."""
    pairs = [one if isinstance(one, tuple) else (one, one) for one in case.gradients]
    of_slopes = [[first, first, second, second] for first, second in pairs]
    rounded = {"tolerance": 2 * torch.finfo(case.dtype).eps} if case.dtype in (torch.float16, torch.bfloat16) else {}
    return [
        [approx(slope * one, **rounded) if one != 0 else 0.0 for slope, one in zip(SLOPES.tolist(), each, strict=True)]
        for each in of_slopes
    ]


@pytest.mark.parametrize(
    ("way", "case"), [pytest.param(way, case, id=f"{way}-{case}") for case in CASES for way in case.ways]
)
def test_gradient_by_hand(world, way, case):
    ranks, said = world(len(case.windows)), case.said(way)
    if said is not None:
        raised = ranks.run_expecting_errors(WAY_OF[way], case)
        assert len({tuple(one) for one in raised}) == 1
        assert said in raised[0].message
        assert raised[0].type_name in ("ValueError", "RuntimeError", "TypeError")
        return
    first, *others = ranks.run(WAY_OF[way], case)
    assert by_hand(case) == [gradient.tolist() for gradient in first]
    for other in others:
        assert all(torch.equal(*map(torch.nan_to_num, pair)) for pair in zip(first, other, strict=True))


def free_gradients(loop: Any, net: One, forward: Any, reduction: str) -> None:
    """Drop gradients within a window, and after one: nobody else may hold them, with or without a next backward."""
    weighs = {} if reduction == "mean" else {"weight": 1 + dist.get_rank()}

    def backward(*, ends: bool) -> StorageWeakRef:
        with loop.no_sync(forward, enabled=not ends):
            loop.backward(forward(torch.ones(1, dtype=torch.float64)).mean(), **weighs)
        assert net.w.grad is not None
        return StorageWeakRef(net.w.grad.untyped_storage())

    for ends in (False, True, False, False, True, True):
        gradient = backward(ends=ends)
        net.zero_grad()
        assert gradient.expired()


class Freeing(LightningModule):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.net, self.reduction, self.automatic_optimization = One(), reduction, False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        free_gradients(OfTrainer(self), self.net, self.net, self.reduction)

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
        make_trainer(strategy, max_epochs=1, **AS_THEY_ARE).fit(Freeing(reduction), as_they_are([0, 1]))
        return
    given = {"reduction": reduction}
    loop: Any = OfFabric(**given, **options) if way == "fabric" else OfTorch(**given, ddp=options)
    net = One()
    free_gradients(loop, net, loop.set_up(net), reduction)


class Skipping(Toy):
    """Its gradients are kept; of each step it notes whether the optimizer sees some."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.seen_by_optimizer: list[bool] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen_by_optimizer.append(self.w.grad is not None)

    def optimizer_zero_grad(self, *args: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@on_ranks()
def test_a_step_that_is_left_out_leaves_parameters_and_momentum():
    """Of gradients 2, NaN and 6, which add up: steps of 2 and 0.9 * 2 + 8."""
    module = Skipping()
    strategy = GradAvgStrategy(reduction="weighted_mean", nonfinite="skip_step")
    batches = loader([[2.0], [[1.0, torch.nan][dist.get_rank()]], [6.0]])
    make_trainer(strategy, max_epochs=1, **AS_THEY_ARE).fit(module, batches)
    assert [True, False, True] == module.seen_by_optimizer
    assert approx(1 - 0.1 * (2 + 9.8)) == module.w.item()


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
    model, saves = Counted(), ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
    trainer = make_trainer(GradAvgStrategy(), max_epochs=2, callbacks=[saves], enable_checkpointing=True, **AS_THEY_ARE)
    trainer.fit(model, loader([[[1.0]] * 5, [[3.0]] * 3][dist.get_rank()]), loader([[0.0]]))
    return model.seen, model.noted


def test_two_epochs_with_fewer_batches_on_a_rank(world, tmp_path):
    """Case 33: five batches of gradient 1 and three of 3 take w from 0 to -0.8 on both ranks, in each epoch."""
    logged, ended = approx((5 * 1 + 3 * 3) / 8), world(2).run(train_and_validate, str(tmp_path))
    for _, noted in ended:
        assert ["validation", "validation", logged, "validation", logged] == noted
    weights = same_everywhere([seen for seen, _ in ended]).weights
    assert (approx(-0.8), approx(-1.6), 10) == (weights[4].item(), weights[-1].item(), len(weights))
    assert {"epoch=0.ckpt", "epoch=1.ckpt"} == {path.name for path in tmp_path.iterdir()}


class Both(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.losses(batch["a"]).mean() + self.losses(batch["b"]).mean()


@on_ranks()
def test_two_loaders_are_refused():
    """Of two streams read together one ends earlier on rank 1."""
    batches = [torch.ones(1)] * 3
    streams = {name: READS["stream"](batches[dist.get_rank() * (name == "b") :]) for name in "ab"}
    trainer = make_trainer(GradAvgStrategy(), max_epochs=1, **AS_THEY_ARE)
    with pytest.raises(RuntimeError, match="one of the 2 train loaders has no more batches on 1 of 2 ranks"):
        trainer.fit(Both(), CombinedLoader(streams, "max_size"))


def read_alike() -> None:
    trainer = make_trainer(GradAvgStrategy(), max_epochs=1, **AS_THEY_ARE)
    trainer.fit(Toy(), READS["stream"]([torch.ones(1) * number for number in range(3)]))


def test_a_stream_that_all_ranks_read_alike_is_warned_of(world):
    with pytest.raises(RankError, match="all ranks read the same batches of DataLoader over Stream: every"):
        world(2).run(read_alike)


class NeverTrained(Toy):
    def on_train_start(self) -> None:
        raise AssertionError("training has begun")


@on_ranks()
def test_a_static_graph_in_windows_is_refused_before_training():
    strategy = GradAvgStrategy(reduction="weighted_mean", static_graph=True)
    trainer = make_trainer(strategy, max_epochs=1, accumulate_grad_batches=2, **AS_THEY_ARE)
    with pytest.raises(ValueError, match="static_graph=True with reduction='weighted_mean' in windows of several"):
        trainer.fit(NeverTrained(), loader([[1.0], [2.0]]))
