"""A pass over the training data without backwards: weight averaging (SWA) has Lightning update batch norm by one."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from toys import approx

from lightning_gradavg import GradAvgStrategy

pytestmark = pytest.mark.filterwarnings("ignore:Swapping scheduler")

SIZES = [8, 8, 6]  # samples of the batches; 4 replicas have 2 2 2 2, 2 2 2 2 and 2 2 2 0 of them
BATCHES = torch.randn(sum(SIZES), 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64).split(SIZES)
EPOCHS = 2


class Seen(NamedTuple):
    """What a rank saw of a run and its last pass."""

    buffers: dict[str, Tensor]  # in the end
    weights: list[Tensor]  # when the pass begins, and in the end
    gradients: list[Tensor]  # at the same times
    backwards: int  # of the pass
    losses: int  # steps of the pass whose result has a loss
    global_batch: int | None  # at the end of the pass


class Normed(LightningModule):
    """Batch norm comes first, so its statistics are those of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        nn.init.ones_(self.net[1].weight)
        nn.init.zeros_(self.net[1].bias)
        self.weights = list[Tensor]()
        self.gradients = list[Tensor]()
        self.backwards = self.losses = 0
        self.net[1].weight.register_hook(self.count)

    @property
    def updates_batch_norm(self) -> bool:
        return bool(self.trainer.current_epoch == EPOCHS)

    def count(self, gradient: Tensor) -> None:
        self.backwards += self.updates_batch_norm

    def note(self) -> None:
        weight = self.net[1].weight
        self.weights.append(weight.detach().clone())
        self.gradients.append(weight.grad.clone())

    def on_train_epoch_start(self) -> None:
        if self.updates_batch_norm:
            self.note()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch) - 1).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.losses += self.updates_batch_norm * ("loss" in outputs)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def average(strategy: dict[str, Any], folder: str) -> Seen:
    """Body: train two epochs with weight averaging, and then update batch norm."""
    module = Normed()
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)
    saving = ModelCheckpoint(folder, save_last=True)
    chosen = GradAvgStrategy(check_replicas_every_n_steps=1, **strategy)
    trainer = make_trainer(
        chosen,
        max_epochs=EPOCHS,
        callbacks=[averaging, saving],
        enable_checkpointing=True,
        use_distributed_sampler=False,
    )
    data: Any = torch.cat(BATCHES)
    trainer.fit(module, DataLoader(data, SIZES[0]))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.note()
    return Seen(buffers, module.weights, module.gradients, module.backwards, module.losses, chosen.global_batch_size)


SPLIT = {"split_batches": True}
REPLICAS = {"equivalent_to": "data_parallel", "num_replicas": 4}
# Ranks, options, and the samples of each batch that the first replica or part has.
PASSES: dict[str, tuple[int, dict[str, Any], list[int]]] = {
    "plain": (2, {}, [8, 8, 6]),
    "weighted": (2, {"reduction": "weighted_mean"}, [8, 8, 6]),
    "a replica on each rank": (2, {"equivalent_to": "data_parallel"}, [4, 4, 3]),
    "several replicas": (2, REPLICAS, [2, 2, 2]),
    "a rank without samples": (3, REPLICAS, [2, 2, 2]),
    "replicas without a preset": (2, {**SPLIT, "num_replicas": 4}, [2, 2, 2]),
    "one device": (2, {"equivalent_to": "single_device"}, [8, 8, 6]),
    "parts": (2, {**SPLIT, "max_device_batch_size": 3}, [2, 2, 3]),
    "reproducible": (2, {"reproducible": True, "num_replicas": 4}, [2, 2, 2]),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_without_backwards_updates_batch_norm_alone(world, tmp_path, name):
    """All ranks hold the statistics of the first replica's samples, averaged over the batches; gradients stay.

    Stock Lightning steps at the end of the pass, on the gradients of the last training step; so does each rank.
    """
    size, strategy, samples = PASSES[name]
    ranks = world(size).run(average, strategy, str(tmp_path))
    assert len(ranks) == size
    firsts = [batch[:count] for batch, count in zip(BATCHES, samples, strict=True)]
    expected = {
        "running_mean": torch.stack([first.mean(0) for first in firsts]).mean(0),
        "running_var": torch.stack([first.var(0) for first in firsts]).mean(0),
        "num_batches_tracked": torch.tensor(len(SIZES)),
    }
    for seen in ranks:
        for buffer, value in expected.items():
            assert approx(value.tolist()) == seen.buffers[f"net.0.{buffer}"].tolist(), buffer
        assert torch.equal(*seen.gradients)
        assert torch.equal(torch.stack(seen.weights), torch.stack(ranks[0].weights))
        assert torch.equal(seen.weights[0] - 0.05 * seen.gradients[0], seen.weights[1])
        assert (seen.backwards, seen.losses) == (0, len(SIZES))
        of_ranks = size if strategy.keys() <= {"reduction"} else 1
        assert SIZES[0] * of_ranks == seen.global_batch
