"""Models of every kind on real ranks equal one process, and losses without gradients leave others as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from ranks import RankError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from toys import (
    AWARE,
    DEPRECATED,
    GATHERS,
    MLP,
    WEIGHTED,
    Recorded,
    Toy,
    approx,
    assert_reference,
    same_everywhere,
    shares,
    train,
)

pytestmark = [
    *AWARE,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed"),
]


@pytest.mark.parametrize(
    ("variant", "window"),
    [(variant, window) for variant in ("", "checkpoint", "checkpoint_reentrant", "frozen") for window in (1, 2)]
    + [("compile", 1), ("unused", 1)],
)
def test_model_variants(world, variant, window):
    """Checkpointed, frozen, compiled and unused layers, with counts 3 and 1, equal one process."""
    strategy = {**WEIGHTED, "find_unused_parameters": variant == "unused"}
    given = {"module": MLP, "accumulate_grad_batches": window}
    seen = world(2).run(train, shares(5), {"variant": variant}, strategy, **given)
    assert_reference(seen, variant, 5, window, 1e-5 if variant == "compile" else 1e-6)


def test_double_precision(world):
    given = {"module": MLP, "accumulate_grad_batches": 2, "precision": "64-true"}
    seen = world(2).run(train, shares(5, torch.float64), None, WEIGHTED, **given)
    assert_reference(seen, "", 5, 2, 1e-12, torch.float64)


def test_unused_parameters_are_told_of(world):
    """By the words of DDP: Lightning would name another strategy."""
    with pytest.raises(RankError, match=r"(?s)`find_unused_parameters=True`.*did not receive grad.*: 4 5"):
        world(2).run(train, shares(3), {"variant": "unused"}, WEIGHTED, module=MLP)


class NoGraph(Recorded):
    """Rank 1 returns a loss without graph; `kind` says what is special about the parameters, or the loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(7, 3, sparse=kind == "sparse").double()
        self.other = nn.Parameter(torch.ones(3, dtype=torch.complex128 if kind == "complex" else torch.float32))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        terms = {"table": self.table(batch.long()).sum(), "other": 2 * self.other.abs().sum()}
        if dist.get_rank() == 1:
            terms = dict.fromkeys(terms, torch.zeros(()))
        if self.kind == "no tensor":
            return {"loss": 0.5, "weight": 1}
        weight = 2 - 2 * dist.get_rank()
        if self.kind == "terms":
            return {"loss": terms, "weight": dict.fromkeys(terms, weight)}
        return {"loss": terms["table"] + terms["other"], "weight": weight}


@pytest.mark.parametrize("kind", ["dtypes", "sparse", "complex", "terms"])
def test_rank_without_graph_keeps_step(world, kind):
    """It joins the reduction, whatever the parameters' dtypes and layouts: 1 in 2 rows of 3, and 2 in the other 3."""
    seen = same_everywhere(world(2).run(train, [[[1.0, 2.0]]] * 2, {"kind": kind}, WEIGHTED, module=NoGraph))
    other, table = seen.gradients[0].abs().split([3, 21])
    assert ([0.0] * 3 + [1.0] * 6 + [0.0] * 12, [2.0] * 3) == (table.tolist(), other.tolist())


def test_loss_that_is_no_tensor_is_quoted(world):
    raised = world(2).run_expecting_errors(train, [[[1.0]]] * 2, {"kind": "no tensor"}, WEIGHTED, module=NoGraph)
    assert all(one.type_name == "TypeError" and "a tensor with a graph, got 0.5" in one.message for one in raised)


class Newton(Toy):
    """LBFGS evaluates the closure several times in a step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return (0.5 * (self.w * batch - 3).square()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=10)


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
def test_optimizer_with_a_closure(world, reduction):
    """Every step ends in the minimum of the mean over all samples, at 33/39."""
    rows = [[[1.0, 2.0]] * 3, [[3.0, 5.0]] * 3]
    seen = same_everywhere(world(2).run(train, rows, {}, {"reduction": reduction}, module=Newton))
    assert [approx(33 / 39, 1e-9)] * 3 == [weight.item() for weight in seen.weights]


def steep(rows: Tensor) -> Tensor:
    """Return 0, with a gradient of infinity times 0."""
    return (0 * rows).sqrt()


def steep_compiled(rows: Tensor) -> Tensor:
    return torch.compile(steep, backend="aot_eager")(rows)  # type: ignore[no-any-return]  # torch leaves it untyped


POISONS: dict[str, Any] = {
    "finite": lambda rows: rows,
    "NaN": lambda rows: rows * torch.nan,
    "checkpoint": lambda rows: checkpoint(steep, rows, use_reentrant=True),
    "compiled": steep_compiled,
    "checkpoint before sqrt": lambda rows: steep(checkpoint(torch.tanh, rows, use_reentrant=True)),
}


class Poisoned(Toy):
    """Rank 1 has weight 0 and a poisoned loss, over its own rows or those of all ranks."""

    def __init__(self, poison: str, way: str) -> None:
        super().__init__(lr=0.0)
        self.poison, self.way = POISONS[poison], way

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        rows = self.w * batch
        rows = rows if self.way == "alone" else GATHERS[self.way](self, rows)
        rank = dist.get_rank()
        return {"loss": (self.poison(rows) if rank else rows).sum(), "weight": 1 - rank}


@DEPRECATED
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("way", ["alone", *GATHERS])
def test_weight_0_contributes_nothing_and_passes_the_others(world, way, poison, window):
    """Rank 0's loss is over 1 w, or over the gathered 1 w + 10 w, whose gradient comes home to rank 1 as well."""
    toy = {"poison": poison, "way": way}
    seen = same_everywhere(
        world(2).run(train, [[[1.0]] * 2, [[10.0]] * 2], toy, WEIGHTED, module=Poisoned, accumulate_grad_batches=window)
    )
    assert [approx(1.0 if way == "alone" else 11.0)] * (2 // window) == [gradient.item() for gradient in seen.gradients]


class PoisonedTerm(Poisoned):
    """Two terms share a layer; on rank 1 one of them is poisoned, and has weight 0."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        rows, rank = self.w * batch, dist.get_rank()
        poisoned = (self.poison(rows) if rank else rows).sum()
        return {"loss": {"a": rows.sum(), "b": poisoned}, "weight": {"a": 1, "b": 1 - rank}}


@pytest.mark.parametrize("poison", POISONS)
def test_term_of_weight_0_beside_one_that_counts(world, poison):
    """The mean of 1 and 10, and the 1 of the only rank that counts in the other term."""
    toy = {"poison": poison, "way": "alone"}
    seen = same_everywhere(world(2).run(train, [[[1.0]], [[10.0]]], toy, WEIGHTED, module=PoisonedTerm))
    assert [approx(5.5 + 1)] == [gradient.item() for gradient in seen.gradients]


class OwnPart(Toy):
    """Has a parameter that DDP leaves to each rank, by the name that DDP looks for at the top of a module."""

    def __init__(self, **toy: Any) -> None:
        super().__init__(**toy)
        self.own = nn.Parameter(torch.ones((), dtype=torch.float64))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, [".own"])  # no public way

    def losses(self, batch: Tensor) -> Tensor:
        return (self.w + self.own) * batch


@pytest.mark.parametrize("window", [1, 2])
def test_a_parameter_that_ddp_ignores_gets_under_the_mean_what_stock_gives(world, window):
    given: Any = {"module": OwnPart, "accumulate_grad_batches": window}
    options = {"check_replicas_every_n_steps": None}
    ours = world(2).run(train, [[[-1.0]] * 2, [[-3.0]] * 2], None, options, **given)
    stock = world(2).run(train, [[[-1.0]] * 2, [[-3.0]] * 2], None, None, of=DDPStrategy, **given)
    for mine, theirs in zip(ours, stock, strict=True):
        assert torch.equal(torch.stack(mine.gradients), torch.stack(theirs.gradients))


@pytest.mark.parametrize("strategy", [{"reduction": "sum"}, WEIGHTED, {"split_batches": True}], ids=str)
def test_a_parameter_that_ddp_ignores_is_refused_by_name_under_other_rules(world, strategy):
    for raised in world(2).run_expecting_errors(train, [[[-1.0]]] * 2, None, strategy, module=OwnPart):
        assert raised.type_name == "ValueError"
        assert "DDP was told to ignore the parameter 'own'" in raised.message
