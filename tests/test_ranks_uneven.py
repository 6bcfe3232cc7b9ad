"""Ranks with different numbers of batches: those that are done go on with weight 0 until all are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from ranks import make_trainer
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, IterableDataset
from toys import WEIGHTED, Toy, approx, loader, same_everywhere, train

from lightning_gradavg import GradAvgStrategy


class Stream(IterableDataset[Tensor]):
    """Batches one after another, of no known length."""

    def __init__(self, micro_batches: Sequence[Sequence[float]]) -> None:
        self.micro_batches = micro_batches

    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.tensor(micro_batch, dtype=torch.float64) for micro_batch in self.micro_batches)


class Batches:
    """An iterable that is no loader of torch's; on rank 0 it tells its length."""

    def __init__(self, micro_batches: Sequence[Sequence[float]]) -> None:
        self.stream = Stream(micro_batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.stream)

    def __len__(self) -> int:
        if dist.get_rank() > 0:
            raise NotImplementedError
        return len(self.stream.micro_batches)


KINDS: dict[str, Any] = {
    "stream": lambda batches: DataLoader(Stream(batches), batch_size=None),
    "workers": lambda batches: DataLoader(Stream(batches), batch_size=None, num_workers=1),
    "lengths": loader,
    "iterable": Batches,
}


class Counted(Toy):
    """Counts what Lightning calls, and logs every batch."""

    def __init__(self, **toy: Any) -> None:
        super().__init__(**toy)
        self.calls: list[str] = []
        self.logged: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("first", batch.flatten()[0].float(), on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.calls.append("validation")

    def on_train_epoch_end(self) -> None:
        self.calls.append("end")
        self.logged.append(float(self.trainer.callback_metrics["first"]))


def train_uneven(per_rank: Any, kind: str, strategy: dict[str, Any], folder: str, **options: Any) -> Any:
    """Body: train and validate on batches of this rank's own; return what was seen, called, logged and saved."""
    model = Counted(lr=0.1, start=0.0)
    checkpoints = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
    trainer = make_trainer(
        GradAvgStrategy(**strategy),
        **{"max_epochs": 1, "callbacks": [checkpoints], "enable_checkpointing": True, **options},
        use_distributed_sampler=False,
    )
    trainer.fit(model, KINDS[kind](per_rank[dist.get_rank()]), loader([[0.0]]))
    return model.seen, model.w.item(), model.calls, model.logged, trainer.global_step


CASE_33 = [[[1.0]] * 5, [[3.0]] * 3]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("stream", {}), ("workers", WEIGHTED), ("lengths", WEIGHTED), ("lengths", {}), ("iterable", {})],
)
def test_case_33(world, tmp_path, kind, strategy):
    """Case 33: five batches of gradient 1 and three of 3 take w from 0 to -0.8 on both ranks."""
    ended = world(2).run(train_uneven, CASE_33, kind, strategy, str(tmp_path))
    seen = same_everywhere([one[0] for one in ended])
    assert [2.0, 2.0, 2.0, 1.0, 1.0] == [float(gradient) for gradient in seen.gradients]
    assert [approx(-0.8)] * 2 == [one[1] for one in ended]


def test_two_epochs(world, tmp_path):
    ended = world(2).run(train_uneven, CASE_33, "stream", {}, str(tmp_path), max_epochs=2)
    for _, w, calls, logged, steps in ended:
        assert approx(-1.6) == w
        assert ["validation", "validation", "end", "validation", "end"] == calls
        assert [pytest.approx((5 * 1 + 3 * 3) / 8)] * 2 == logged
        assert 10 == steps
    assert {"epoch=0.ckpt", "epoch=1.ckpt"} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("strategy", [{"ddp_comm_hook": allreduce_hook}, WEIGHTED], ids=["hook", "weighted_mean"])
def test_windows(world, tmp_path, strategy):
    """The mean of a window is over the micro-batches that there are: here 4, 3, and 1 of a short window."""
    per_rank = [[[1.0], [2.0], [3.0], [5.0], [7.0]], [[6.0], [11.0], [2.0]]]
    ended = world(2).run(train_uneven, per_rank, "stream", strategy, str(tmp_path), accumulate_grad_batches=2)
    seen = same_everywhere([one[0] for one in ended])
    assert [20 / 4, 10 / 3, 7.0] == [approx(float(gradient)) for gradient in seen.gradients]


class Normed(Toy):
    """Has a buffer that every forward changes, and a loss that is no number where a batch is seen again."""

    forwards: Tensor

    def __init__(self) -> None:
        super().__init__(start=[1.0])
        self.register_buffer("forwards", torch.zeros(1))
        self.firsts: set[float] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.forwards.add_(1)
        again = float(batch[0]) in self.firsts
        self.firsts.add(float(batch[0]))
        return self.losses(batch).mean() * (float("nan") if again else 1)


@pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated")
@pytest.mark.parametrize("strategy", [{"broadcast_buffers": False}, {"reduction": "weighted_mean"}], ids=str)
def test_a_stand_in_leaves_no_trace(world, strategy):
    ended = world(2).run(train_normed, [[[1.0], [2.0], [3.0]], [[4.0]]], strategy)
    seen = same_everywhere([one for one, _ in ended])
    assert [2.5, 2.0, 3.0] == [float(gradient) for gradient in seen.gradients]
    if strategy.get("broadcast_buffers") is False:
        assert [3.0, 1.0] == [forwards for _, forwards in ended]


def train_normed(per_rank: Any, strategy: dict[str, Any]) -> Any:
    """Body: train; return what was seen, and how often the buffer was changed."""
    model = Normed()
    trainer = make_trainer(GradAvgStrategy(**strategy), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(model, KINDS["stream"](per_rank[dist.get_rank()]))
    return model.seen, float(model.forwards)


class ByHand(Toy):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.losses(batch).mean())
        optimizer.step()


@pytest.mark.parametrize(
    ("strategy", "module", "quoted"),
    [({"reduction": "mean_of_node_means"}, Toy, "'mean_of_node_means' counts ranks"), ({}, ByHand, "manual")],
)
def test_what_is_refused(world, strategy, module, quoted):
    raised = world(2).run_expecting_errors(train, CASE_33, None, strategy, module=module)
    assert ["RuntimeError"] * 2 == [one.type_name for one in raised]
    assert all("1 of 2 ranks have no more batches" in one.message and quoted in one.message for one in raised)


def train_two_loaders() -> None:
    """Body: train on two streams together, of which one ends earlier on rank 1."""
    streams = {name: KINDS["stream"]([[1.0]] * (3 - dist.get_rank() * (name == "b"))) for name in "ab"}
    trainer = make_trainer(GradAvgStrategy(), max_epochs=1, use_distributed_sampler=False)

    class Both(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.losses(batch["a"]).mean() + self.losses(batch["b"]).mean()

    trainer.fit(Both(start=[1.0]), CombinedLoader(streams, "max_size"))


def test_two_loaders_are_refused(world):
    raised = world(2).run_expecting_errors(train_two_loaders)
    assert ["RuntimeError"] * 2 == [one.type_name for one in raised]
    assert all("one of the 2 train loaders has no more batches on 1 of 2 ranks" in one.message for one in raised)


def loaders_read(kind: str) -> Any:
    """Body: return the type of what is read."""
    model = Toy(start=[1.0])
    trainer = make_trainer(GradAvgStrategy(), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(model, KINDS[kind]([[1.0 + dist.get_rank()]] * 3))
    return type(trainer.train_dataloader).__name__


def test_known_lengths_cost_nothing(world):
    assert ["DataLoader"] * 2 == world(2).run(loaders_read, "lengths")
    assert ["JoinedLoader"] * 2 == world(2).run(loaders_read, "stream")
    assert ["DataLoader"] == world(1).run(loaders_read, "stream")


class NothingToSay(Toy):
    """Returns no loss for a batch that it was given before."""

    before: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        again, self.before = batch is self.before, batch
        return None if again else self.losses(batch).mean()


@pytest.mark.parametrize(
    ("module", "strategy"),
    [(ByHand, WEIGHTED), *((NothingToSay, {"nonfinite": policy}) for policy in ("propagate", "raise", "skip_step"))],
)
def test_manual_optimization_and_stand_ins_without_loss(world, module, strategy):
    seen = same_everywhere(world(2).run(train, CASE_33, None, strategy, module=module))
    assert [2.0, 2.0, 2.0, 1.0, 1.0] == [float(gradient) for gradient in seen.gradients]
