"""Ranks with different numbers of batches: whole runs, and loaders. Their gradients are rows of `cases.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from ranks import RankError, make_trainer, on_ranks
from test_ranks_cases import READS
from torch import Tensor
from toys import Seen, Toy, approx, loader, same_everywhere

from lightning_gradavg import GradAvgStrategy

FEWER = [[[1.0]] * 5, [[3.0]] * 3]


class Counted(Toy):
    """Notes what Lightning calls and logs."""

    def __init__(self) -> None:
        super().__init__(start=0.0, lr=0.1)
        self.noted: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("first", batch.flatten()[0].float(), on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.noted.append("validation")

    def on_train_epoch_end(self) -> None:
        self.noted.append(float(self.trainer.callback_metrics["first"]))


def train_and_validate(folder: str) -> tuple[Seen, list[Any]]:
    """Body: two epochs with validation and checkpoints."""
    model, saves = Counted(), ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
    options: Any = {"max_epochs": 2, "callbacks": [saves], "enable_checkpointing": True}
    trainer = make_trainer(GradAvgStrategy(), use_distributed_sampler=False, **options)
    trainer.fit(model, loader(FEWER[dist.get_rank()]), loader([[0.0]]))
    return model.seen, model.noted


def test_two_epochs(world, tmp_path):
    """Case 33: five batches of gradient 1 and three of 3 take w from 0 to -0.8 on both ranks, in each epoch."""
    logged, ended = pytest.approx((5 * 1 + 3 * 3) / 8), world(2).run(train_and_validate, str(tmp_path))
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
    trainer = make_trainer(GradAvgStrategy(), max_epochs=1, use_distributed_sampler=False)
    with pytest.raises(RuntimeError, match="one of the 2 train loaders has no more batches on 1 of 2 ranks"):
        trainer.fit(Both(), CombinedLoader(streams, "max_size"))


def loader_of_run(kind: str, apart: bool) -> str:
    """Body: return what Lightning reads from, of batches that the ranks may all have."""
    trainer = make_trainer(GradAvgStrategy(), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(Toy(), READS[kind]([torch.ones(1) * number + 10 * apart * dist.get_rank() for number in range(3)]))
    return type(trainer.train_dataloader).__name__


@pytest.mark.parametrize(
    ("ranks", "kind", "expected"),
    [(2, "list", "DataLoader"), (2, "stream", "JoinedLoader"), (1, "stream", "DataLoader")],
)
def test_known_lengths_cost_nothing(world, ranks, kind, expected):
    assert [expected] * ranks == world(ranks).run(loader_of_run, kind, apart=True)


def test_a_stream_that_all_ranks_read_alike_is_warned_of(world):
    with pytest.raises(RankError, match="all ranks read the same batches of DataLoader over Stream: every"):
        world(2).run(loader_of_run, "stream", apart=False)
