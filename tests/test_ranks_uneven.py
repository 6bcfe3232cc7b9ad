"""Ranks with different numbers of batches: those that are done go on with weight 0 until all are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from ranks import RankError, make_trainer, on_ranks
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


class Read(Toy):
    """Reads its batches in some way, and notes how."""

    def __init__(self, kind: str = "stream", **toy: Any) -> None:
        super().__init__(**{"start": 0.0, "lr": 0.1, **toy})
        self.way = kind
        self.noted: list[Any] = []

    def fit(self, per_rank: Any, strategy: Any, *others: Any, **options: Any) -> Any:
        """Train on batches of this rank's own; return what was seen and noted, and what is read."""
        defaults = {"max_epochs": 1, "use_distributed_sampler": False}
        trainer = make_trainer(GradAvgStrategy(**strategy), **{**defaults, **options})
        trainer.fit(self, KINDS[self.way](per_rank[dist.get_rank()]), *others)
        return self.seen, self.noted, type(trainer.train_dataloader).__name__


def train_uneven(per_rank: Any, strategy: Any, model: Any = Read, toy: Any = None, **options: Any) -> Any:
    """Body: the same, by a model made here."""
    return model(**(toy or {})).fit(per_rank, strategy, **options)


CASE_33 = [[[1.0]] * 5, [[3.0]] * 3]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("stream", {}), ("workers", WEIGHTED), ("lengths", WEIGHTED), ("lengths", {}), ("iterable", {})],
)
def test_some_batches_on_one_rank_alone(world, kind, strategy):
    """Five batches of gradient 1 and three of 3 take w from 0 to -0.8 on both ranks."""
    ended = world(2).run(train_uneven, CASE_33, strategy, toy={"kind": kind})
    seen = same_everywhere([one for one, *_ in ended])
    assert [2.0, 2.0, 2.0, 1.0, 1.0] == [float(gradient) for gradient in seen.gradients]
    assert approx(-0.8) == seen.weights[-1].item()


def test_a_stream_that_all_ranks_read_alike_is_warned_of(world):
    with pytest.raises(RankError, match="all ranks read the same batches of DataLoader over Stream: every"):
        world(2).run(train_uneven, [[[1.0], [2.0], [3.0]]] * 2, {})


class Counted(Read):
    """Notes what Lightning calls and logs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("first", batch.flatten()[0].float(), on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.noted.append("validation")

    def on_train_epoch_end(self) -> None:
        self.noted.append(float(self.trainer.callback_metrics["first"]))


def train_and_validate(folder: str) -> Any:
    checkpoints = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
    options = {"max_epochs": 2, "callbacks": [checkpoints], "enable_checkpointing": True}
    return Counted().fit(CASE_33, {}, loader([[0.0]]), **options)


def test_two_epochs(world, tmp_path):
    logged = pytest.approx((5 * 1 + 3 * 3) / 8)
    ended = world(2).run(train_and_validate, str(tmp_path))
    for _, noted, _ in ended:
        assert ["validation", "validation", logged, "validation", logged] == noted
    weights = same_everywhere([one for one, *_ in ended]).weights
    assert (approx(-1.6), 10) == (weights[-1].item(), len(weights))
    assert {"epoch=0.ckpt", "epoch=1.ckpt"} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("strategy", [{"ddp_comm_hook": allreduce_hook}, WEIGHTED], ids=["hook", "weighted_mean"])
def test_windows(world, strategy):
    """The mean of a window is over the micro-batches that there are: here 4, 3, and 1 of a short window."""
    per_rank = [[[1.0], [2.0], [3.0], [5.0], [7.0]], [[6.0], [11.0], [2.0]]]
    ended = world(2).run(train_uneven, per_rank, strategy, accumulate_grad_batches=2)
    seen = same_everywhere([one for one, *_ in ended])
    assert [20 / 4, 10 / 3, 7.0] == [approx(float(gradient)) for gradient in seen.gradients]


class Normed(Read):
    """Has a buffer that every forward changes, and a loss that is no number where a batch is seen again."""

    forwards: Tensor

    def __init__(self) -> None:
        super().__init__(start=[1.0])
        self.register_buffer("forwards", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.forwards.add_(1)
        again = float(batch[0]) in self.noted
        self.noted.append(float(batch[0]))
        return self.losses(batch).mean() * (float("nan") if again else 1)

    def on_train_end(self) -> None:
        self.noted[:] = [float(self.forwards)]


@pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated")
@pytest.mark.parametrize("strategy", [{"broadcast_buffers": False}, WEIGHTED], ids=str)
def test_a_stand_in_leaves_no_trace(world, strategy):
    ended = world(2).run(train_uneven, [[[1.0], [2.0], [3.0]], [[4.0]]], strategy, Normed)
    assert [2.5, 2.0, 3.0] == [float(gradient) for gradient in same_everywhere([one for one, *_ in ended]).gradients]
    if strategy.get("broadcast_buffers") is False:
        assert [[3.0], [1.0]] == [forwards for _, forwards, _ in ended]


class ByHand(Toy):
    """Optimizes by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.losses(batch).mean())
        optimizer.step()


class Fetching(Toy):
    """Fetches its own batches."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:  # type: ignore[override]  # Lightning's other form
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor", "ignore:Found `dataloader_iter`")
@pytest.mark.parametrize(
    ("strategy", "module", "error", "quoted"),
    [
        ({"reduction": "mean_of_node_means"}, Toy, "RuntimeError", "1 of 2 ranks have no more batches.*counts ranks"),
        ({}, ByHand, "RuntimeError", "1 of 2 ranks have no more batches.*manual"),
        ({}, Fetching, "RuntimeError", "1 of 2 ranks have no more batches.*dataloader_iter"),
        ({"split_batches": True}, Fetching, "ValueError", "split_batches=True cannot serve.*dataloader_iter"),
    ],
)
def test_what_is_refused(world, strategy, module, error, quoted):
    raised = world(2).run_expecting_errors(train, CASE_33, None, strategy, module=module)
    assert [error] * 2 == [one.type_name for one in raised]
    assert all(re.search(quoted, one.message, re.DOTALL) for one in raised)


class Both(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.losses(batch["a"]).mean() + self.losses(batch["b"]).mean()


@on_ranks()
def test_two_loaders_are_refused():
    """Of two streams read together one ends earlier on rank 1."""
    streams = {name: KINDS["stream"]([[1.0]] * (3 - dist.get_rank() * (name == "b"))) for name in "ab"}
    trainer = make_trainer(GradAvgStrategy(), max_epochs=1, use_distributed_sampler=False)
    with pytest.raises(RuntimeError, match="one of the 2 train loaders has no more batches on 1 of 2 ranks"):
        trainer.fit(Both(), CombinedLoader(streams, "max_size"))


@pytest.mark.parametrize(
    ("ranks", "kind", "expected"),
    [(2, "lengths", "DataLoader"), (2, "stream", "JoinedLoader"), (1, "stream", "DataLoader")],
)
def test_known_lengths_cost_nothing(world, ranks, kind, expected):
    ended = world(ranks).run(train_uneven, [[[1.0]] * 3] * ranks, {}, toy={"kind": kind})
    assert [expected] * ranks == [name for *_, name in ended]


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
