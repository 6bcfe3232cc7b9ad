"""The strategy inside real Trainers on real ranks: cases of sections A and B, with the numbers computed by hand."""

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


@pytest.mark.parametrize(
    ("samples", "ranks", "gradient", "weight"),
    [([1, 2, 3, 4], 2, 30.0, 0.70), (range(1, 9), 4, 204.0, -1.04)],
)
def test_sum_of_sum_losses(world, samples, ranks, gradient, weight):
    """Case 1: a loss summed over the samples needs summed gradients."""
    seen = same_everywhere(
        world(ranks).run(train, split(samples, ranks), {"kind": "s", "loss": "sum"}, {"reduction": "sum"})
    )
    assert approx(gradient) == seen.gradients[0].item()
    assert approx(weight) == seen.weights[0].item()


def test_stock_mean_of_sum_losses_is_too_small(world):
    """Case 1: plain DDP gives 15 and 0.85 there."""
    seen = same_everywhere(world(2).run(train, split([1, 2, 3, 4], 2), {"kind": "s", "loss": "sum"}))
    assert approx(15.0) == seen.gradients[0].item()
    assert approx(0.85) == seen.weights[0].item()


def test_uneven_batches(world):
    """Case 2: ranks with 3 and 1 samples; the mean over samples is 7.5, and 0.210 after 20 steps."""
    batches = [[[1, 2, 3]] * 20, [[4]] * 20]
    seen = same_everywhere(world(2).run(train, batches, {"kind": "s"}, WEIGHTED))
    assert approx(7.5) == seen.gradients[0].item()
    assert approx(0.925) == seen.weights[0].item()
    assert approx(0.21029776386659413) == seen.weights[19].item()


def test_uneven_batches_under_plain_mean(world):
    """Case 2: plain DDP gives 10.3333 and 0.1129 after 20 steps."""
    seen = same_everywhere(world(2).run(train, [[[1, 2, 3]] * 20, [[4]] * 20], {"kind": "s"}))
    assert approx(31 / 3) == seen.gradients[0].item()
    assert approx(0.11288091098482216) == seen.weights[19].item()


def test_token_mean_over_ranks_and_micro_batches(world):
    """Case 4: one denominator, 12 tokens, over two ranks and two micro-batches."""
    batches = [[[2, 2, 2], [8]], [[4, 4], [1] * 6]]
    seen = same_everywhere(world(2).run(train, batches, {}, WEIGHTED, accumulate_grad_batches=2))
    assert [approx(28 / 12)] == [gradient.item() for gradient in seen.gradients]
    summed = same_everywhere(
        world(2).run(train, batches, {"loss": "sum"}, {"reduction": "normalized_sum"}, accumulate_grad_batches=2)
    )
    assert [approx(28 / 12)] == [gradient.item() for gradient in summed.gradients]


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


def test_rank_without_samples_has_a_nan_loss(world):
    """Case 5: rank 0 holds {2, 4} and rank 1 nothing, whose mean is NaN: the gradient is 3."""
    batches = [[[2, 4]], [[]]]
    seen = same_everywhere(world(2).run(train, batches, {}, WEIGHTED))
    assert [approx(3.0)] == [gradient.item() for gradient in seen.gradients]


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


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("mean_of_node_means", 4.0), ("mean_of_node_sums", 8.0), ("sum_of_node_means", 8.0), ("sum", 16.0), ("mean", 4.0)],
)
def test_per_node_rules(world, reduction, expected):
    """Case 10: gradients 1, 3 | 5, 7 on two nodes."""
    batches = [[[1]], [[3]], [[5]], [[7]]]
    seen = same_everywhere(world(4).run(train, batches, {}, {"reduction": reduction}, nodes=[0, 0, 1, 1]))
    assert approx(expected) == seen.gradients[0].item()


@pytest.mark.parametrize(("ranks", "accumulation"), [(4, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize(("reduction", "expected"), [("mean", 3.0), ("sum", 12.0)])
def test_nodes_or_accumulation(world, ranks, accumulation, reduction, expected):
    """Case 11: gradients 1, 2, 3, 6 give 3.0, or 12.0 summed, for any factorisation."""
    batches = split([1, 2, 3, 6], ranks, accumulation)
    seen = same_everywhere(
        world(ranks).run(train, batches, {}, {"reduction": reduction}, accumulate_grad_batches=accumulation)
    )
    assert [approx(expected)] == [gradient.item() for gradient in seen.gradients]
