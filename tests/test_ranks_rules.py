"""Every rule equals the dense reference, on every layout of nodes and with every window, through a real Trainer."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from grids import grid
from torch import Tensor
from toys import Toy, same_everywhere, train

from lightning_gradavg.place import Place
from lightning_gradavg.reduction.reference import combine
from lightning_gradavg.rules import RULES, Share, resolve_rule

SIZE = 5
LAYOUTS = [[0], [0, 0], [0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 2, 3]]

pytestmark = pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0:UserWarning")


def square_root_of_weight(place: Place, weight: Any) -> Share:
    """A user's rule: weigh by the square root, normalize by the node's share of it."""
    return Share(weight**0.5 / place.ranks_on_node, weight**0.5)


class Dictated(Toy):
    """A batch dictates the gradient: `[x_1 .. x_n, weight]`. At weight 0 the loss is NaN, as means of nothing are."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        weight = batch[-1]
        loss = (self.w * batch[:-1]).sum()
        if self.hparams_poisoned and weight == 0:
            loss = loss * torch.nan
        return {"loss": loss, "weight": weight} if self.hparams_weighted else loss

    def __init__(self, weighted: bool) -> None:
        super().__init__(start=[1.0] * SIZE, lr=0.0)
        self.hparams_weighted = self.hparams_poisoned = weighted


def dictate(world_size: int, micro_batches: int, seed: int) -> list[list[list[float]]]:
    """Draw a row for each rank and micro-batch: a gradient and a weight, a third of the weights 0."""
    draw = random.Random(seed)
    return [
        [
            [draw.uniform(-1, 1) for _ in range(SIZE)]
            + [draw.choice([0.0, draw.uniform(0.1, 9), float(draw.randint(1, 9))])]
            for _ in range(micro_batches)
        ]
        for _ in range(world_size)
    ]


@pytest.mark.parametrize(
    ("reduction", "nodes", "window"),
    grid([*RULES, square_root_of_weight], LAYOUTS, [1, 2, 3, 4]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_rule_equals_dense_reference(world, nodes, window, reduction):
    """A rule's gradient is `combine` of all (rank, micro-batch) pairs to 1e-12, in full and short windows."""
    rule, world_size = resolve_rule(reduction), len(nodes)
    steps = 2 * window + window // 2
    rows = dictate(world_size, steps, seed=window)
    seen = same_everywhere(
        world(world_size).run(
            train,
            rows,
            {"weighted": rule.uses_weight},
            {"reduction": reduction},
            nodes=nodes,
            module=Dictated,
            accumulate_grad_batches=window,
        )
    )
    starts = range(0, steps, window)
    assert len(starts) == len(seen.gradients)
    for start, gradient in zip(starts, seen.gradients, strict=True):
        pairs = [(rank, row) for rank in range(world_size) for row in rows[rank][start : start + window]]
        expected = combine(
            torch.tensor([row[:-1] for _, row in pairs], dtype=torch.float64),
            rule=rule,
            nodes=[nodes[rank] for rank, _ in pairs],
            weights=[row[-1] for _, row in pairs],
        )
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_nothing_anywhere(world):
    """A window without any weight leaves finite zero gradients, the same on all ranks."""
    rows = [[[1.0, 2.0, 3.0, 4.0, 5.0, 0.0]] * 3, [[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]] * 3]
    for window in (1, 3):
        seen = same_everywhere(
            world(2).run(
                train,
                rows,
                {"weighted": True},
                {"reduction": "weighted_mean"},
                module=Dictated,
                accumulate_grad_batches=window,
            )
        )
        assert all(torch.equal(torch.zeros(SIZE, dtype=torch.float64), gradient) for gradient in seen.gradients)
