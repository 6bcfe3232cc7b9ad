"""`gather` in real Trainers on real ranks: every line of docs/contrastive.md, and the numbers of one process."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import make_trainer, on_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from toys import AWARE, Recorded, approx, loader

from lightning_gradavg import GradAvgStrategy, average_gradients
from lightning_gradavg.reduction.gather import gather
from lightning_gradavg.rules import RULES

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "contrastive.md").read_text("utf-8")

A = torch.tensor([(0.5, -0.2), (1.0, 0.6), (-0.75, 0.3), (0.25, -0.9)], dtype=torch.float64)
B = torch.tensor([(0.4, 0.1), (0.9, 0.5), (-1.0, -0.4), (-0.3, -0.7)], dtype=torch.float64)
N = len(A)

pytestmark = AWARE


class TwoTowers(nn.Module):
    """one matrix under both towers, and the scale of the logits above them."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Parameter(torch.tensor([[1.0, 0.2], [-0.3, 0.8]], dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def loss(self, rows: Tensor, columns: Tensor, start: int = 0, how: str = "mean") -> Tensor:
        """Return the loss of a block of rows, the first of which matches the column `start`."""
        return cross_entropy(self.scale * rows @ columns.T, torch.arange(start, start + len(rows)), reduction=how)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in (self.m, self.scale)]


def single_process() -> tuple[Tensor, list[Tensor]]:
    towers = TwoTowers()
    loss = towers.loss(A @ towers.m.T, B @ towers.m.T)
    loss.backward()
    return loss.detach(), towers.gradients()


def ratio_of(gradient: Tensor, right: Tensor) -> float | None:
    """Return by how much a gradient is a multiple of the right one; None if it is no multiple of it."""
    ratio = float((gradient * right).sum() / (right * right).sum())
    return ratio if torch.allclose(gradient, ratio * right, rtol=1e-9, atol=1e-12) else None


def assert_single_process(gradients: Sequence[Tensor]) -> None:
    assert [approx(1.0, 1e-9)] * 2 == [ratio_of(*pair) for pair in zip(gradients, single_process()[1], strict=True)]


def starts_of(rows: Sequence[int]) -> list[int]:
    return [sum(rows[:rank]) for rank in range(len(rows))]


class Contrastive(Recorded):
    """Trains the towers once on dictated rows.

    `variant` says what each rank computes: `own` or all rows, `detached` or not, the `loss` as a formula of `mean` and
    `sum`, its `weight`, and `told`, whether `gather` gets the rule and the weight.
    """

    def __init__(self, reduction: str, rows: Sequence[int], nodes: Sequence[int], **variant: Any) -> None:
        super().__init__()
        self.towers = TwoTowers()
        self.reduction, self.nodes, self.variant = reduction, nodes, variant
        self.rows = rows[dist.get_rank()]
        self.start = starts_of(rows)[dist.get_rank()]

    def gathered(self, own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if not self.variant.get("detached"):
            told = {"reduction": self.reduction, "weight": self.weight} if self.variant.get("told") else {}
            return gather(own, **told)
        with torch.no_grad():
            a, b = gather(own)
        stop = self.start + self.rows
        return torch.cat([a[: self.start], own[0], a[stop:]]), torch.cat([b[: self.start], own[1], b[stop:]])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        a, b = (features @ self.towers.m.T for features in batch)
        everybody = self.gathered((a, b))
        rows, start = (a, self.start) if self.variant["own"] else (everybody[0], 0)
        names = {how: self.towers.loss(rows, everybody[1], start, how) for how in ("mean", "sum")}
        sizes = {"W": len(self.nodes), "N": N, "nodes": len(set(self.nodes)), "L": self.nodes.count(self.node)}
        loss = evaluate(self.variant["loss"], {**names, **sizes})
        return {"loss": loss, "weight": self.weight} if RULES[self.reduction].uses_weight else loss

    @property
    def weight(self) -> int:
        return {"N": N, "n": self.rows}[self.variant.get("weight") or "n"]

    @property
    def node(self) -> int:
        return self.nodes[dist.get_rank()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.reduced = self.towers.gradients()


def fit(model: Any, batches: Sequence[Any], nodes: Sequence[int] | None = None, **options: Any) -> list[Any]:
    """Train one epoch on each rank's own batches, and return the gradients that the model has seen."""
    make_trainer(
        GradAvgStrategy(reduction=model.reduction), nodes=nodes, max_epochs=1, use_distributed_sampler=False, **options
    ).fit(model, loader(batches))
    return model.reduced


def train_contrastive(
    reduction: str, rows: Sequence[int], nodes: Sequence[int], *, plainly: bool = False, **variant: Any
) -> list[Tensor]:
    """Body: the gradients of one step, under the strategy or in a plain loop."""
    rank = dist.get_rank()
    os.environ["NODE_RANK"] = str(nodes[rank])
    model = Contrastive(reduction, rows, nodes, **variant)
    part = slice(model.start, model.start + rows[rank])
    if not plainly:
        return fit(model, [(A[part], B[part])], nodes)
    output = model.training_step((A[part], B[part]), 0)
    (output["loss"] if isinstance(output, dict) else output).backward()
    average_gradients(model.towers, reduction=reduction, weight=model.weight)
    return model.towers.gradients()


def gradients_of(world: Any, reduction: str, rows: Sequence[int], *, nodes: Sequence[int], **variant: Any) -> Any:
    first, *others = world(len(nodes)).run(train_contrastive, reduction, rows, nodes, **variant)
    for other in others:
        assert all(torch.equal(mine, one) for mine, one in zip(other, first, strict=True))
    return first


def evaluate(formula: str, names: dict[str, Any]) -> Any:
    """Return the value of a chain of `*` and `/`, as the tables of the page have it."""
    first, *rest = re.split(r" ([*/]) ", formula)
    value = names[first] if first in names else float(first)
    for operator, name in zip(rest[::2], rest[1::2], strict=True):
        value = value * names[name] if operator == "*" else value / names[name]
    return value


def table_of(title: str) -> list[list[str]]:
    """Return the rows of the first table below a title of the page, without its head."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(' `"') for cell in line.strip("|").split("|")] for line in lines[2:]]


RIGHT = table_of("Which loss, under which rule")
LAYOUTS = (((2, 1, 1), [0, 0, 1]), ((2, 0, 1, 1), [0, 0, 0, 1]))


def test_table_covers_all_rules():
    """The table names every rule."""
    assert set(RULES) == {row[0] for row in RIGHT}
    assert len(RIGHT) == 15
    assert {"", "tell"} == {row[3] for row in RIGHT}


def ratios_of(world: Any, reduction: str, loss: str, weight: str, **how: Any) -> list[list[float | None]]:
    """Return the ratios to the gradients of one process, on uneven rows and nodes, an empty rank among them."""
    whose, formula = loss.split(": ")
    variant = {"own": whose == "own rows", "loss": formula, "weight": weight, **how}
    seen = [gradients_of(world, reduction, rows, nodes=nodes, **variant) for rows, nodes in LAYOUTS]
    return [[ratio_of(*pair) for pair in zip(of_layout, single_process()[1], strict=True)] for of_layout in seen]


@pytest.mark.parametrize("told", [False, True], ids=["untold", "told"])
@pytest.mark.parametrize(("reduction", "loss", "weight", "plain"), RIGHT)
def test_what_is_right_under_the_strategy(world, reduction, loss, weight, plain, told):
    """Every line is the gradient of one process, whether `gather` is told the rule and the weight or not."""
    assert [[approx(1.0, 1e-9)] * 2] * 2 == ratios_of(world, reduction, loss, weight, told=told)


@pytest.mark.parametrize(("reduction", "loss", "weight", "plain"), RIGHT)
def test_what_is_right_in_a_plain_loop(world, reduction, loss, weight, plain):
    """With `average_gradients`, too, if `gather` is told; untold, in the lines that do not say so."""
    assert [[approx(1.0, 1e-9)] * 2] * 2 == ratios_of(world, reduction, loss, weight, plainly=True, told=True)
    untold = ratios_of(world, reduction, loss, weight, plainly=True, told=False)
    assert untold == ([[approx(1.0, 1e-9)] * 2] * 2 if plain == "" else [[None, mock.ANY]] * 2)


def test_mean_of_own_rows_needs_equal_ones(world):
    """Under `"mean"` the mean over own rows has another direction where ranks have different numbers of rows."""
    unequal = ratios_of(world, "mean", "own rows: mean", "")
    assert [None, None] == [of_layout[0] for of_layout in unequal]


@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 1, 1]], ids=str)
@pytest.mark.parametrize("own", [True, False])
def test_what_goes_wrong_without_gradients(world, own, nodes):
    """Own rows have another direction; all rows 1/W of the gradient, and that of the scale is not too small with it."""
    rows = (N // len(nodes),) * len(nodes)
    seen = gradients_of(world, "mean", rows, nodes=nodes, own=own, detached=True, loss="mean")
    m, scale = (ratio_of(*pair) for pair in zip(seen, single_process()[1], strict=True))
    assert approx(1.0, 1e-9) == scale
    assert (None if own else approx(1 / len(nodes), 1e-9)) == m


def test_single_process_numbers():
    """the loss of the full batch is 0.6918260226, and the gradient of M is as computed by hand."""
    loss, (m, _) = single_process()
    assert pytest.approx(0.6918260226, abs=1e-10) == loss.item()
    expected = torch.tensor([[-0.34945875, -0.21453436], [0.00286419, -0.34827028]], dtype=torch.float64)
    torch.testing.assert_close(m, expected, rtol=0, atol=1e-6)


class Cached(Contrastive):
    """features first without graph, then recomputed chunk by chunk, each loss that of the full batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        everything, start = batch
        with torch.no_grad():
            cached = gather(tuple(x[self.start : self.start + self.rows] @ self.towers.m.T for x in everything))
        start = self.start + int(start)
        stop = start + self.variant["chunk"]
        a, b = (
            torch.cat([old[:start], x[start:stop] @ self.towers.m.T, old[stop:]])
            for old, x in zip(cached, everything, strict=True)
        )
        return self.towers.loss(a, b)


def train_cached(reduction: str, chunks: int) -> list[Tensor]:
    """Body: one step over all chunks of this rank's rows."""
    W = dist.get_world_size()
    model = Cached(reduction, [N // W] * W, [0] * W, chunk=N // W // chunks)
    batches = [((A, B), torch.tensor(index * model.variant["chunk"])) for index in range(chunks)]
    return fit(model, batches, accumulate_grad_batches=chunks)


@pytest.mark.parametrize("world_size", [1, 2])
def test_chunks_are_summed(world, world_size):
    """the gradients of 2 chunks per rank add up to that of the full batch; averaging halves on one rank."""
    _, (m, scale) = single_process()
    for reduction, ratio in (("sum", 1.0), ("mean", 1 / (2 * world_size))):
        for seen in world(world_size).run(train_cached, reduction, 2):
            assert approx(ratio, 1e-9) == ratio_of(seen[0], m)
            assert approx(ratio * 2 * world_size, 1e-9) == ratio_of(seen[1], scale)


class UnequalRows(Contrastive):
    """Micro-batches of different sizes, each a contrastive batch of its own, and the mean over all their rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        a, b, start = batch
        a, b = a @ self.towers.m.T, b @ self.towers.m.T
        how = "sum" if self.reduction == "normalized_sum" else "mean"
        return {"loss": self.towers.loss(a, gather(b), int(start), how), "weight": len(a)}


@pytest.mark.parametrize("reduction", ["normalized_sum", "weighted_mean"])
@on_ranks()
def test_accumulation_of_unequal_rows(reduction):
    """Sums and means are exact in a window of two micro-batches with (3, 1) rows of the full batch and (2, 2) of it."""
    model = UnequalRows(reduction, (2, 2), [0, 0])
    cuts = [[(0, 3), (0, 2)], [(3, 4), (2, 4)]][dist.get_rank()]
    batches = [(A[start:stop], B[start:stop], torch.tensor(start)) for start, stop in cuts]
    assert_single_process(fit(model, batches, accumulate_grad_batches=2))
