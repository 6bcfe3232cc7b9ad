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
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from toys import AWARE, Recorded, approx, flat, train

from lightning_gradavg import average_gradients
from lightning_gradavg.reduction.gather import gather
from lightning_gradavg.rules import RULES

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "contrastive.md").read_text("utf-8")

A = torch.tensor([(0.5, -0.2), (1.0, 0.6), (-0.75, 0.3), (0.25, -0.9)], dtype=torch.float64)
B = torch.tensor([(0.4, 0.1), (0.9, 0.5), (-1.0, -0.4), (-0.3, -0.7)], dtype=torch.float64)
N = len(A)

pytestmark = AWARE


class Towers(Recorded):
    """One matrix under both towers, and the scale of the logits above them.

    The loss is of a rank's own rows or of all, a formula of their `mean` and `sum`; `told` is whether `gather` gets the
    rule and the weight.
    """

    def __init__(
        self,
        reduction: str = "mean",
        rows: Sequence[int] = (N,),
        nodes: Sequence[int] = (0,),
        loss: str = "all rows: mean",
        weight: str = "",
        told: bool = False,
    ) -> None:
        super().__init__()
        self.m = nn.Parameter(torch.tensor([[1.0, 0.2], [-0.3, 0.8]], dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        rank = self.seen.rank
        self.start = sum(rows[:rank])
        self.names = {"W": len(nodes), "N": N, "nodes": len(set(nodes)), "L": nodes.count(nodes[rank])}
        self.whose, self.formula = loss.split(": ")
        self.weight = N if weight == "N" else rows[rank]
        self.told = {"reduction": reduction, "weight": self.weight} if told else {}
        self.given = {"weight": self.weight} if RULES[reduction].uses_weight else {}

    def features(self, batch: Any) -> tuple[Tensor, Tensor]:
        a, b = batch
        return a @ self.m.T, b @ self.m.T

    def loss(self, rows: Tensor, columns: Tensor, start: int = 0, how: str = "mean") -> Tensor:
        """Return the loss of a block of rows, the first of which matches the column `start`."""
        return cross_entropy(self.scale * rows @ columns.T, torch.arange(start, start + len(rows)), reduction=how)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own = self.features(batch)
        everybody: Any = gather(own, **self.told)
        rows, start = (own[0], self.start) if self.whose == "own rows" else (everybody[0], 0)
        losses: Any = {how: self.loss(rows, everybody[1], start, how) for how in ("mean", "sum")}
        return {"loss": evaluate(self.formula, {**losses, **self.names}), **self.given}


def single_process() -> tuple[float, Tensor]:
    """Return the loss, and its gradient for the matrix and then the scale."""
    towers = Towers()
    loss = towers.loss(*towers.features((A, B)))
    return loss.item(), flat([*torch.autograd.grad(loss, [towers.m, towers.scale])])


def evaluate(formula: str, names: dict[str, Any]) -> Any:
    """Return the value of a chain of `*` and `/`, as the tables of the page have it."""
    first, *rest = re.split(r" ([*/]) ", formula)
    value = names[first]
    for operator, name in zip(rest[::2], rest[1::2], strict=True):
        value = value * names[name] if operator == "*" else value / names[name]
    return value


def ratios(gradient: Tensor) -> list[float | None]:
    """Return by how much the matrix's gradient, and the scale's, are multiples of the right ones; None if not."""
    found = []
    for mine, right in zip(gradient.split([4, 1]), single_process()[1].split([4, 1]), strict=True):
        ratio = float((mine * right).sum() / (right * right).sum())
        found.append(ratio if torch.allclose(mine, ratio * right, rtol=1e-9, atol=1e-12) else None)
    return found


def reduced(plainly: bool, rows: Sequence[int], nodes: Sequence[int], **variant: Any) -> Tensor:
    """Body: the gradient of one step, under the strategy or in a plain loop."""
    parts = list(zip(A.split(rows), B.split(rows), strict=True))
    toy, rule = {"rows": rows, "nodes": nodes, **variant}, {"reduction": variant["reduction"]}
    if not plainly:
        return train([[part] for part in parts], toy, rule, nodes, Towers).gradients[0]
    os.environ["NODE_RANK"] = str(nodes[dist.get_rank()])
    model = Towers(**toy)
    model.training_step(parts[dist.get_rank()], 0)["loss"].backward()
    average_gradients(model, **rule, weight=model.weight)
    return flat(parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def ratios_of(
    world: Any, rows: Sequence[int] = (2, 0, 1, 1), nodes: Any = (0, 0, 0, 1), plainly: bool = False, **variant: Any
) -> list[float | None]:
    """Return the ratios to the gradients of one process, which are the same on all ranks.

    By default rows and nodes are uneven, and one rank is empty.
    """
    first, *others = world(len(nodes)).run(reduced, plainly, rows, nodes, **variant)
    assert all(torch.equal(first, other) for other in others)
    return ratios(first)


def table_of(title: str) -> list[list[str]]:
    """Return the rows of the first table below a title of the page, without its head."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(' `"') for cell in line.strip("|").split("|")] for line in lines[2:]]


RIGHT, ONE = table_of("Which loss, under which rule"), approx(1.0, 1e-9)
assert {row[0] for row in RIGHT} == set(RULES)
assert {row[3] for row in RIGHT} == {"", "tell"}


@pytest.mark.parametrize("way", ["strategy", "plain loop", "plain loop, told"])
@pytest.mark.parametrize(("reduction", "loss", "weight", "plain"), RIGHT)
def test_what_is_right(world, reduction, loss, weight, plain, way):
    """Every line is the gradient of one process; in a plain loop, where it says so, only if `gather` is told.

    The strategy leaves what `gather` is told out of account.
    """
    given, told = {"reduction": reduction, "loss": loss, "weight": weight}, way != "plain loop"
    found = ratios_of(world, plainly=way != "strategy", **given, told=told)
    assert found == ([ONE, ONE] if told or plain != "tell" else [None, mock.ANY])


def test_single_process_numbers():
    """The loss of the full batch is 0.6918260226, and the gradient of M is as computed by hand."""
    loss, gradient = single_process()
    assert pytest.approx(0.6918260226, abs=1e-10) == loss
    expected = torch.tensor([-0.34945875, -0.21453436, 0.00286419, -0.34827028], dtype=torch.float64)
    torch.testing.assert_close(gradient[:4], expected, rtol=0, atol=1e-6)


class Cached(Towers):
    """Features first without graph, then recomputed chunk by chunk, each loss that of the full batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        part = slice(self.start, self.start + self.weight)
        with torch.no_grad():
            cached = gather(self.features((A[part], B[part])))
        start, chunk = batch
        own = self.features(chunk)
        # The rows of all, with gradients in a rank's own alone.
        rows = [torch.cat([x[:start], y, x[start + len(y) :]]) for x, y in zip(cached, own, strict=True)]
        return self.loss(*rows)


@pytest.mark.parametrize(("world_size", "reduction", "ratio"), [(1, "mean", 1 / 2), (2, "sum", 1.0)])
def test_chunks_are_summed(world, world_size, reduction, ratio):
    """The gradients of 2 chunks per rank add up to that of the full batch; averaging halves on one rank."""
    length, rows = N // world_size // 2, [N // world_size] * world_size
    chunks = [(torch.tensor(i), (A[i : i + length], B[i : i + length])) for i in range(0, N, length)]
    of_ranks, toy = [chunks[:2], chunks[2:]], {"rows": rows, "nodes": [0] * world_size}
    options: Any = {"module": Cached, "accumulate_grad_batches": 2}
    for seen in world(world_size).run(train, of_ranks, toy, {"reduction": reduction}, **options):
        assert [approx(ratio, 1e-9), approx(ratio * 2 * world_size, 1e-9)] == ratios(seen.gradients[0])


@pytest.mark.parametrize("strategy", [{}, {"split_batches": True}, {"equivalent_to": "single_device"}], ids=str)
def test_a_rank_without_samples_brings_no_rows(world, strategy):
    """Chunks of 4 rows are 2, 2 and 0; else ranks 1 and 2 have read their last batch when rank 0 reads another one."""
    batch, toy = (A, B), {"rows": (N, 0, 0), "nodes": (0, 0, 0)}
    of_ranks = [[batch]] * 3 if strategy else [[batch, batch], [(A[:1], B[:1])], [(A[:1], B[:1])]]
    for seen in world(3).run(train, of_ranks, toy, strategy, None, Towers):
        assert [ONE, ONE] == ratios(seen.gradients[-1])
