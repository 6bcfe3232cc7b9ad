"""`gather` between real ranks: any dtype and number of rows, every gradient once, the same error on all ranks.

And in real Trainers: every line of docs/contrastive.md, and the numbers of one process.
"""

from __future__ import annotations

import gc
import os
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import Raised, make_trainer, on_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from toys import IGNORE_UNUSED_PARAMETERS, Recorded, Toy, approx, flat, make_loader, train

from lightning_gradavg import GradAvgStrategy, average_gradients, gather, global_mean
from lightning_gradavg._support.running import Forward, running
from lightning_gradavg.rules import RULES

pytestmark = IGNORE_UNUSED_PARAMETERS
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.int64, torch.int16, torch.uint8, torch.bool),
]
ROWS = [(2,), (3, 1), (0, 0, 0), (1, 3, 0, 2)]


def of_dtypes(rows: Sequence[int], tail: Sequence[int]) -> list[Tensor]:
    numbers = torch.arange(rows[dist.get_rank()]).reshape(-1, *[1] * len(tail)).expand(-1, *tail) + dist.get_rank()
    return [(numbers % 2 if dtype is torch.bool else numbers).to(dtype) for dtype in DTYPES]


def views(rows: Sequence[int], tail: Sequence[int]) -> list[Tensor]:
    """Return tensors that are not laid out row by row, or not stored as they read."""
    base = torch.arange(6.0).reshape(2, 3) + 10 * dist.get_rank()
    conjugate = torch.complex(base, base).conj()
    assert conjugate.is_conj()
    assert conjugate.imag.is_neg()
    images = torch.arange(72.0).reshape(2, 3, 4, 3) + 100 * dist.get_rank()
    by_channel = images.to(memory_format=torch.channels_last)
    volumes = images.reshape(2, 3, 2, 2, 3).to(memory_format=torch.channels_last_3d)
    assert not by_channel.is_contiguous()
    return [
        *(base.T, base[:, ::2], base[:1].expand(2, 3), conjugate, conjugate.imag),
        *(by_channel, by_channel[:0], by_channel.bfloat16(), by_channel > 20, torch.complex(by_channel, by_channel)),
        *(volumes, images.transpose(1, 3), images[:, :1].expand(-1, 5, -1, -1), images[::2, ..., ::2]),
    ]


def gather_together_and_alone(tensors: Callable[..., list[Tensor]], *given: Any) -> list[tuple[Tensor, Tensor]]:
    """Body: gather tensors in one call, and each alone; return this rank's and all, as numbers."""
    own = tensors(*given)
    pairs = []
    for tensor, of_all in zip(own, gather(own), strict=True):
        alone = gather(tensor)
        assert tensor.dtype == of_all.dtype == alone.dtype
        assert not of_all.requires_grad
        assert torch.equal(of_all.to(torch.complex128), alone.to(torch.complex128))
        pairs.append((tensor.to(torch.complex128), of_all.to(torch.complex128)))
    return pairs


@pytest.mark.parametrize("tensors", [of_dtypes, views])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_rows_of_all_ranks_in_their_order(world, rows, tensors):
    for tail in ((), (3,), (2, 5), (0,)):
        of_ranks = world(len(rows)).run(gather_together_and_alone, tensors, rows, tail)
        for of_tensor in zip(*of_ranks, strict=True):
            expected = torch.cat([own for own, _ in of_tensor])
            assert all(torch.equal(expected, gathered) for _, gathered in of_tensor)


class Home(NamedTuple):
    """What comes home where each rank has a loss of all rows; None on a rank whose tensor has no gradient."""

    of_ranks: Sequence[Tensor]
    loss: Callable[[Tensor, int], Tensor]
    expected: Sequence[Any]


def times(*factors: float) -> Callable[[Tensor, int], Tensor]:
    return lambda rows, rank: (rows * factors[rank]).sum()


def numbered(rows: Tensor, rank: int) -> Tensor:
    return (rows * 2.0**rank * torch.arange(1, len(rows) + 1)[:, None]).sum().real


def numbers(rows: Sequence[int]) -> list[list[list[float]]]:
    """Return the sum over ranks of what `numbered` gives each row, by rank."""
    of_all = [[(2.0 ** len(rows) - 1) * number] * 2 for number in range(1, sum(rows) + 1)]
    return [of_all[sum(rows[:rank]) : sum(rows[: rank + 1])] for rank in range(len(rows))]


HALF = torch.ones(1, dtype=torch.float16)
HOME: dict[str, Home] = {
    **{
        f"{rows} of {dtype}": Home([torch.ones(n, 2, dtype=dtype) for n in rows], numbered, numbers(rows))
        for rows in ROWS
        for dtype in (torch.float32, torch.complex128)
    },
    # The result requires grad on every rank if any rank's tensor does, so that no rank waits.
    "one has a gradient": Home([torch.tensor([3.0])] * 3, lambda rows, _: rows.prod(), [None, [27.0], None]),
    # 120000 is infinite in float16, and 257 is 256 in bfloat16.
    "float16": Home([HALF] * 3, times(60000.0, 60000.0, -60000.0), [[60000.0]] * 3),
    "bfloat16": Home([HALF.bfloat16()] * 3, times(256.0, 1.0, 1.0), [[258.0]] * 3),
}


def come_home(name: str) -> None:
    home = HOME[name]
    rank = dist.get_rank()
    x = home.of_ranks[rank].clone().requires_grad_(home.expected[rank] is not None)
    rows = gather(x)
    assert rows.requires_grad
    home.loss(rows, rank).backward()
    assert home.expected[rank] == (None if x.grad is None else x.grad.tolist())
    assert x.grad is None or x.dtype == x.grad.dtype


@pytest.mark.parametrize("name", HOME)
def test_the_gradient_of_a_row_is_the_sum_over_ranks(world, name):
    world(len(HOME[name].of_ranks)).run(come_home, name)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda images: images.clone(),
    "channels_last": lambda images: images.contiguous(memory_format=torch.channels_last),
    "transposed": lambda images: images.transpose(1, 3).contiguous().transpose(1, 3),
    "every other": lambda images: images.repeat_interleave(2, dim=3)[..., ::2],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("of_loss", LAYOUTS)
@pytest.mark.parametrize("of_rows", LAYOUTS)
@on_ranks(3)
def test_gradients_of_every_layout(of_rows, of_loss, dtype):
    """Ranks of 2, 0 and 1 rows, whose losses weigh an element by its number times 1, 2 and 4: it gets 7 times that."""
    rank = dist.get_rank()
    start, stop = [(0, 2), (2, 2), (2, 3)][rank]
    numbers = torch.arange(36.0).reshape(3, 2, 3, 2).to(dtype)
    x = LAYOUTS[of_rows](numbers[start:stop]).requires_grad_()
    gathered = gather(x)
    assert torch.equal(numbers, gathered)
    assert gathered.is_contiguous()
    gathered.backward(LAYOUTS[of_loss](numbers * 2**rank))
    assert torch.equal(7 * numbers[start:stop], x.grad)


@on_ranks(3)
def test_an_expanded_gradient():
    """The gradient of a sum repeats one element in memory, and that of an expanded row is the sum over its copies."""
    row = torch.ones(1, 2, requires_grad=True)
    gather(row.expand(dist.get_rank(), 2)).sum().backward()
    expected = 3.0 * dist.get_rank()
    assert [[expected, expected]] == row.grad.tolist()


@on_ranks(3)
def test_the_loss_of_a_stand_in_reaches_no_rank():
    """Rank 2 stands in: its rows are in no loss, and an infinite derivative behind its factor 0 sends no NaN."""
    rank = dist.get_rank()
    x = torch.tensor([rank + 1.0], requires_grad=True)
    if rank < 2:
        gathered = gather(x)
    else:
        with running(Forward(samples=0)):
            gathered = gather(x)
    assert [1.0, 2.0] == gathered.tolist()
    loss = gathered.prod() if rank < 2 else 0.0 * (gathered - gathered.detach()).sqrt().sum()
    loss.backward()
    assert [[4.0], [2.0], [0.0]][rank] == x.grad.tolist()


@on_ranks(3)
def test_group():
    """Ranks 0 and 2 gather among themselves."""
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    x = torch.tensor([float(rank)], requires_grad=True)
    if rank == 1:
        with pytest.raises(ValueError, match="global rank 1 is not a member of the group"):
            gather(x, group=group)
        return
    result = gather(x, group=group)
    result.prod().backward()
    assert ([0.0, 2.0], 4.0 - 2 * rank) == (result.tolist(), x.grad.item())
    with torch.inference_mode():  # as Lightning validates
        assert [0.0, 2.0] == gather(x, group=group).tolist()


class Sharded(Tensor):
    device_mesh = "which only a DTensor has"


X = torch.ones(1, 2)
NESTED = torch.nested.nested_tensor([X], layout=torch.jagged)
# What each of two ranks gives instead of one row, and what both are told.
# fmt: off
MISUSES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "bad on one rank": ({"tensors": 3}, {}, "gather cannot proceed, on rank 0: tensors must be a tensor, or a tuple"),
    "shapes": (
        {}, {"tensors": torch.ones(1, 3)},
        "gather cannot proceed: tensors of shape (rows, 2) and torch.float32 on rank 0; tensors of shape (rows, 3)"),
    "structure": ({}, {"tensors": (X, X)}, "torch.float32 on rank 0; tensors[0] of shape (rows, 2) and torch.float32 "),
    "no_grad": ({}, {"grad": False}, "with gradients on rank 0; under torch.no_grad on rank 1. Pass the same"),
    "a number": ({"tensors": torch.tensor(1.0)}, {}, "has no dimension to concatenate along: pass tensor.reshape(1)"),
    "no tensor": ({"tensors": {}}, {}, "there is no tensor in {}: pass at least one"),
    "sparse": ({"tensors": X.to_sparse()}, {}, "tensors must be a dense tensor, got layout torch.sparse_coo"),
    "nested": ({"tensors": NESTED}, {}, "a dense tensor, got a nested tensor"),
    "sharded": ({"tensors": Sharded(X)}, {}, "tensors is a DTensor: pass its full_tensor()"),
}
# fmt: on


def misuse(name: str) -> None:
    of_ranks: Any = MISUSES[name]
    given = {"tensors": X.detach().requires_grad_(), "grad": True, **of_ranks[dist.get_rank()]}
    with torch.set_grad_enabled(given.pop("grad")):
        gather(given.pop("tensors"), **given)


@pytest.mark.parametrize("name", MISUSES)
def test_errors_are_the_same_on_all_ranks(world, name):
    raised = world(2).run_expecting_errors(misuse, name)
    assert [Raised("ValueError", raised[0].message)] * 2 == raised
    assert MISUSES[name][2] in raised[0].message


PAGE = (Path(__file__).resolve().parent.parent / "docs" / "contrastive.md").read_text("utf-8")

A = torch.tensor([(0.5, -0.2), (1.0, 0.6), (-0.75, 0.3), (0.25, -0.9)], dtype=torch.float64)
B = torch.tensor([(0.4, 0.1), (0.9, 0.5), (-1.0, -0.4), (-0.3, -0.7)], dtype=torch.float64)
N = len(A)


class Towers(Recorded):
    """One matrix under both towers, and the scale of the logits above them.

    The loss is of a rank's own rows or of all, a formula of their `mean` and `sum`.
    """

    def __init__(
        self,
        reduction: str = "mean",
        rows: Sequence[int] = (N,),
        nodes: Sequence[int] = (0,),
        loss: str = "all rows: mean",
        weight: str = "",
    ) -> None:
        super().__init__()
        self.m = nn.Parameter(torch.tensor([[1.0, 0.2], [-0.3, 0.8]], dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        rank = self.seen.rank
        self.start = sum(rows[:rank])
        self.names = {"W": len(nodes), "N": N, "n": rows[rank], "nodes": len(set(nodes)), "L": nodes.count(nodes[rank])}
        self.whose, self.formula = loss.split(": ")
        self.weight = N if weight == "N" else rows[rank]
        self.given = {"weight": self.weight} if RULES[reduction].uses_weight else {}

    def features(self, batch: Any) -> tuple[Tensor, Tensor]:
        a, b = batch
        return a @ self.m.T, b @ self.m.T

    def loss(self, rows: Tensor, columns: Tensor, start: int = 0, how: str = "mean") -> Tensor:
        """Return the loss of a block of rows, the first of which matches the column `start`."""
        return cross_entropy(self.scale * rows @ columns.T, torch.arange(start, start + len(rows)), reduction=how)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own = self.features(batch)
        everybody: Any = gather(own)
        rows, start = (own[0], self.start) if self.whose == "own rows" else (everybody[0], 0)
        losses: Any = {how: self.loss(rows, everybody[1], start, how) for how in ("mean", "sum")}
        return {"loss": evaluate(self.formula, {**losses, **self.names}), **self.given}


def single_process() -> tuple[float, Tensor]:
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
    parts = list(zip(A.split(rows), B.split(rows), strict=True))
    toy = {"rows": rows, "nodes": nodes, **variant}
    rule = {"reduction": variant["reduction"]}
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


RIGHT = table_of("Which loss, under which rule")
ONE = approx(1.0, 1e-9)
assert {row[0] for row in RIGHT} == set(RULES)
assert {row[3] for row in RIGHT} == {"yes", "if n is equal", "if L is equal"}


@pytest.mark.parametrize(("reduction", "loss", "weight", "plain"), RIGHT)
def test_what_is_right_under_the_strategy(world, reduction, loss, weight, plain):
    assert [ONE, ONE] == ratios_of(world, reduction=reduction, loss=loss, weight=weight)


@pytest.mark.parametrize(("reduction", "loss", "weight", "plain"), RIGHT)
def test_what_is_right_with_average_gradients(world, reduction, loss, weight, plain):
    """Every line if all ranks have one row and all nodes two ranks; else those that say so."""
    given = {"plainly": True, "reduction": reduction, "loss": loss, "weight": weight}
    assert [ONE, ONE] == ratios_of(world, (1, 1, 1, 1), (0, 0, 1, 1), **given)
    of_matrix, of_scale = ratios_of(world, **given)
    if plain == "yes":
        assert [ONE, ONE] == [of_matrix, of_scale]
    else:
        assert of_matrix is None


@on_ranks()
def test_average_gradients_by_hand():
    """Loss q is the mean of its own numbers times that of all: 2 and 6, times 3.6. Their mean by counts is 3.6 ** 2.

    Weighed after the backward, the gradients of 16.8 and 40.8 give 26.4. Weighed before it, they add up to 25.92.
    """
    numbers = torch.tensor([[1.0, 2.0, 3.0], [5.0, 7.0]][dist.get_rank()], dtype=torch.float64)
    count = len(numbers)
    ways: list[tuple[Callable[[Tensor], Tensor], dict[str, Any], float]] = [
        (lambda loss: loss, {"reduction": "weighted_mean", "weight": count}, 26.4),
        (lambda loss: loss * count / 5, {"reduction": "sum"}, 25.92),
        (lambda loss: global_mean(loss * count, count), {"reduction": "mean"}, 25.92),
    ]
    for weigh, rule, expected in ways:
        w = torch.ones((), dtype=torch.float64, requires_grad=True)
        own = numbers * w
        weigh(own.mean() * gather(own).mean()).backward()
        average_gradients(w, **rule)
        assert approx(expected) == w.grad.item()


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
    length = N // world_size // 2
    rows = [N // world_size] * world_size
    chunks = [(torch.tensor(i), (A[i : i + length], B[i : i + length])) for i in range(0, N, length)]
    of_ranks = [chunks[:2], chunks[2:]]
    toy = {"rows": rows, "nodes": [0] * world_size}
    options: Any = {"module": Cached, "accumulate_grad_batches": 2}
    for seen in world(world_size).run(train, of_ranks, toy, {"reduction": reduction}, **options):
        assert [approx(ratio, 1e-9), approx(ratio * 2 * world_size, 1e-9)] == ratios(seen.gradients[0])


@pytest.mark.parametrize("strategy", [{}, {"split_batches": True}, {"equivalent_to": "single_device"}], ids=str)
def test_a_rank_without_samples_brings_no_rows(world, strategy):
    """Chunks of 4 rows are 2, 2 and 0; else ranks 1 and 2 have read their last batch when rank 0 reads another one."""
    batch = (A, B)
    toy = {"rows": (N, 0, 0), "nodes": (0, 0, 0)}
    of_ranks = [[batch]] * 3 if strategy else [[batch, batch], [(A[:1], B[:1])], [(A[:1], B[:1])]]
    for seen in world(3).run(train, of_ranks, toy, strategy, None, Towers):
        assert [ONE, ONE] == ratios(seen.gradients[-1])


class Token:
    """Lives as long as the graph that holds it."""


class HoldsToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class FailsBeforeBackward(Toy):
    """Gathers, and raises before the backward of its loss."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        token = Token()
        self.graph = weakref.ref(token)
        rows: Any = HoldsToken.apply(self.losses(batch), token)
        return {"loss": gather(rows).mean(), "weight": 1}

    def on_before_backward(self, loss: Tensor) -> None:
        raise KeyError("before the backward")


def fail_before_backward() -> bool:
    """Body: return whether the graph of the step is freed while the strategy lives."""
    module = FailsBeforeBackward()
    trainer = make_trainer(GradAvgStrategy(reduction="weighted_mean"), max_epochs=1)
    try:
        trainer.fit(module, make_loader([[1.0]]))
    except KeyError as error:
        error.__traceback__ = None
    gc.collect()
    return module.graph() is None


def test_a_run_that_fails_before_a_backward_frees_its_graph(world):
    assert [True, True] == world(2).run(fail_before_backward)
