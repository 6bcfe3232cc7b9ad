"""What users do with the rules, in real Trainers, with numbers by hand. `cases.py` has the rules themselves."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from toys import AWARE, WEIGHTED, Recorded, approx, flat, same_everywhere, train

pytestmark = AWARE


def test_uneven_batches(world):
    """Case 2: ranks with 3 and 1 samples; the mean over samples is 7.5, also after 20 steps."""
    seen = same_everywhere(world(2).run(train, [[[1, 2, 3]] * 20, [[4]] * 20], {"kind": "s"}, WEIGHTED))
    assert (approx(7.5), approx(0.21029776386659413)) == (seen.gradients[0].item(), seen.weights[19].item())


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


class Embedded(Recorded):
    """Logits of an embedding, cross-entropy over the labels that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, labels = batch
        return {"loss": torch.nn.functional.cross_entropy(self.net(tokens), labels), "weight": (labels != -100).sum()}


def train_and_hear(batches: Any) -> Any:
    """Body: return what was said of weights of 0, too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = train(batches, strategy=WEIGHTED, module=Embedded)
    return seen, [str(warning.message) for warning in caught if "weight 0" in str(warning.message)]


def test_all_labels_of_a_rank_ignored(world):
    """The rank with only ignored labels changes nothing in the other's mean gradient, and is warned once."""
    tokens, labels, model = torch.arange(6), torch.arange(1, 7), Embedded()
    batches = [[(tokens, labels)] * 3, [(tokens, torch.full_like(labels, -100))] * 3]
    loss = torch.nn.functional.cross_entropy(model.net(tokens), labels)
    expected = flat(torch.autograd.grad(loss, list(model.parameters())))
    for rank, (seen, said) in enumerate(world(2).run(train_and_hear, batches)):
        warned = ["rank 1 has a micro-batch of weight 0, which contributes nothing"] if rank == 1 else []
        assert warned == [message.partition(" to the gradient")[0] for message in said]
        torch.testing.assert_close(seen.gradients[-1], expected, rtol=1e-6, atol=1e-6)
