"""What users do with the rules, in real Trainers, with numbers by hand. `cases.py` has the rules themselves."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from ranks import make_trainer
from torch.utils.data import DataLoader
from toys import Toy, same_everywhere, train

from lightning_gradavg import GradAvgStrategy

WEIGHTED = {"reduction": "weighted_mean"}

pytestmark = pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0:UserWarning")


def approx(value):
    return pytest.approx(value, rel=1e-12, abs=1e-12)


def split(samples, ranks, micro_batches=1):
    """Cut samples contiguously: rank by rank, then micro-batch by micro-batch."""
    pieces = np.array_split(np.asarray(samples, dtype=float), ranks * micro_batches)
    return [[pieces[m * ranks + r].tolist() for m in range(micro_batches)] for r in range(ranks)]


def test_stock_mean_of_sum_losses_is_too_small(world):
    """Case 1: plain DDP gives 15 and 0.85 there."""
    seen = same_everywhere(world(2).run(train, split([1, 2, 3, 4], 2), {"kind": "s", "loss": "sum"}))
    assert approx(15.0) == seen.gradients[0].item()
    assert approx(0.85) == seen.weights[0].item()


@pytest.mark.parametrize(
    ("strategy", "gradient", "weight"),
    [(WEIGHTED, 7.5, 0.21029776386659413), ({}, 31 / 3, 0.11288091098482216)],
    ids=["weighted", "plain DDP"],
)
def test_uneven_batches(world, strategy, gradient, weight):
    """Case 2: ranks with 3 and 1 samples; the mean over samples is 7.5."""
    seen = same_everywhere(world(2).run(train, [[[1, 2, 3]] * 20, [[4]] * 20], {"kind": "s"}, strategy))
    assert approx(gradient) == seen.gradients[0].item()
    assert approx(weight) == seen.weights[19].item()


GRID = [(1, 1, 8), (1, 4, 2), (1, 8, 1), (2, 1, 4), (2, 2, 2), (4, 1, 2), (4, 2, 1)]


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
@pytest.mark.parametrize(("ranks", "accumulation", "local"), GRID)
def test_invariance_grid(world, ranks, accumulation, local, reduction):
    """Case 12: the steps do not depend on how the batch is cut."""
    pieces = split(range(1, 9), ranks, accumulation)
    assert local == len(pieces[0][0])
    batches = [piece * 3 for piece in pieces]
    seen = same_everywhere(
        world(ranks).run(train, batches, {"kind": "s"}, {"reduction": reduction}, accumulate_grad_batches=accumulation)
    )
    assert [approx(0.745), approx(0.555025), approx(0.413493625)] == [weight.item() for weight in seen.weights]


@pytest.mark.parametrize(("ranks", "accumulation", "local"), GRID)
def test_invariance_grid_of_sums(world, ranks, accumulation, local):
    """Case 12: the sum over all samples is -1.04 after the first step, however it is cut."""
    seen = same_everywhere(
        world(ranks).run(
            train,
            split(range(1, 9), ranks, accumulation),
            {"kind": "s", "loss": "sum"},
            {"reduction": "sum"},
            accumulate_grad_batches=accumulation,
        )
    )
    assert approx(-1.04) == seen.weights[0].item()


class EmbeddingModel(LightningModule):
    """Case 5: logits of an embedding, cross-entropy over the labels that are not ignored."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11))
        self.gradients = []

    def training_step(self, batch, batch_idx):
        tokens, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(tokens), labels)
        return {"loss": loss, "weight": (labels != -100).sum()}

    def on_before_optimizer_step(self, optimizer):
        self.gradients = [parameter.grad.clone() for parameter in self.parameters()]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train_with_ignored_labels():
    tokens, labels = torch.arange(6), torch.arange(1, 7)
    model = EmbeddingModel()
    reference = torch.autograd.grad(
        torch.nn.functional.cross_entropy(model.net(tokens), labels), list(model.parameters())
    )
    if dist.get_rank() == 1:
        labels = torch.full_like(labels, -100)
    trainer = make_trainer(GradAvgStrategy(**WEIGHTED), max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, DataLoader([(tokens, labels)] * 3, batch_size=None))
    said = [str(warning.message) for warning in caught if "weight 0" in str(warning.message)]
    return dist.get_rank(), said, model.gradients, list(reference)


def test_all_labels_of_a_rank_ignored(world):
    """Case 5: the rank with only ignored labels changes nothing in the other's mean gradient, and is warned once."""
    for rank, (seen, said, gradients, reference) in enumerate(world(2).run(train_with_ignored_labels)):
        assert rank == seen
        assert ([], ["rank 1 has a micro-batch of weight 0, which contributes nothing"])[rank] == [
            message.partition(" to the gradient")[0] for message in said
        ]
        torch.testing.assert_close(gradients, reference, rtol=1e-6, atol=1e-6)


class HandScaled(Toy):
    """Case 7: a script that multiplies by W and divides by the global count of 4 itself."""

    def __init__(self, weighted=True):
        super().__init__()
        self.weighted = weighted

    def training_step(self, batch, batch_idx):
        loss = self.losses(batch).sum() * 2 / 4
        return {"loss": loss, "weight": batch.numel()} if self.weighted else loss


def test_hand_scaled_loss_is_right_under_mean(world):
    """Case 7: a loss compensated by hand stays right under the mean (2.0) and is wrong when weighted (1.75)."""
    batches = [[[1, 1, 1]], [[5]]]
    seen = same_everywhere(world(2).run(train, batches, {"weighted": False}, module=HandScaled))
    assert approx(2.0) == seen.gradients[0].item()
    seen = same_everywhere(world(2).run(train, batches, {}, WEIGHTED, module=HandScaled))
    assert approx(1.75) == seen.gradients[0].item()


class ClassWeighted(Toy):
    """Case 8: class weights 1 and 9; each rank returns the weighted mean over its own samples."""

    def training_step(self, batch, batch_idx):
        class_weight = 1.0 if batch[0] == 1 else 9.0
        return {"loss": self.losses(batch).mean(), "weight": class_weight * batch.numel()}


def test_denominator_is_a_sum_of_class_weights(world):
    """Case 8: weights 2 and 18 give 1.9; plain and sample-weighted means give 1.5."""
    batches = [[[1, 1]], [[2, 2]]]
    assert (
        approx(1.9)
        == same_everywhere(world(2).run(train, batches, {}, WEIGHTED, module=ClassWeighted)).gradients[0].item()
    )
    assert approx(1.5) == same_everywhere(world(2).run(train, batches, {}, WEIGHTED)).gradients[0].item()
