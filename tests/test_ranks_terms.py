"""Loss terms by name on real ranks: each has its own denominator, over all ranks and micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from ranks import make_trainer
from torch import nn
from torch.utils.data import DataLoader
from toys import AWARE, WEIGHTED, approx

from lightning_gradavg import GradAvgStrategy

pytestmark = AWARE


class Heads(LightningModule):
    """A trunk with a head per loss term, all weights at 1, 2 and 3; a batch is (classes, boxes).

    The box loss is a masked mean over the boxes that are not 0: without any, its value and its gradient are NaN.
    """

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.trunk, self.cls, self.box = (nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in (1.0, 2.0, 3.0))
        self.how = how
        self.gradients: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        classes, boxes = batch
        mask = (boxes != 0).double()
        loss: Any = {
            "cls": (self.trunk * self.cls * classes).mean(),
            "box": (self.trunk * self.box * boxes * mask).sum() / mask.sum(),
        }
        weight: Any = {"cls": classes.numel(), "box": mask.sum()}
        if self.how == "no graph" and dist.get_rank() == 1:
            loss, weight = dict.fromkeys(loss, torch.zeros(())), dict.fromkeys(loss, 0)
        if self.how == "float":
            loss = 0.5
        return {"loss": loss, "weight": weight}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append([parameter.grad.item() for parameter in self.parameters()])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


RANKS: Any = [[([1, 1], [4]), ([2], [0])], [([3, 3], [5, 2, 4]), ([6, 6, 6], [10])]]


def train_heads(per_rank: Any, strategy: Any, how: str = "") -> Any:
    data = [tuple(torch.tensor(part, dtype=torch.float64) for part in pair) for pair in per_rank[dist.get_rank()]]
    model = Heads(how)
    trainer = make_trainer(GradAvgStrategy(**WEIGHTED, **strategy), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(model, DataLoader(data, batch_size=None))
    return model.gradients


def reference(pairs: Any) -> list[float]:
    """The gradients of trunk and heads for the mean over all classes plus the mean over all boxes."""
    classes = [x for pair in pairs for x in pair[0]]
    boxes = [x for pair in pairs for x in pair[1] if x]
    of_classes, of_boxes = sum(classes) / len(classes), sum(boxes) / len(boxes) if boxes else 0.0
    return [2 * of_classes + 3 * of_boxes, of_classes, of_boxes]


@pytest.mark.parametrize(
    "strategy",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-5},
    ],
    ids=str,
)
@pytest.mark.parametrize("late", [False, True], ids=["empty term last", "empty term first"])
def test_terms_with_heads_of_their_own(world: Any, late: bool, strategy: Any) -> None:
    """Case 9: named terms with a head each, one empty with a NaN gradient, equal one process under all options."""
    ranks = [rank[::-1] if late else rank for rank in RANKS]
    ranks = [rank * 2 for rank in ranks]
    expected = [[approx(x) for x in reference([rank[step] for rank in ranks])] for step in range(4)]
    assert [expected] * 2 == world(2).run(train_heads, ranks, strategy)


def test_named_terms_and_a_rank_without_graph(world: Any) -> None:
    expected = [[approx(x) for x in reference([pair])] for pair in RANKS[0]]
    assert [expected] * 2 == world(2).run(train_heads, RANKS, {}, "no graph")


def test_loss_that_is_no_tensor_is_quoted(world: Any) -> None:
    raised = world(2).run_expecting_errors(train_heads, RANKS, {}, "float")
    assert all(one.type_name == "TypeError" and "a tensor with a graph, got 0.5" in one.message for one in raised)
