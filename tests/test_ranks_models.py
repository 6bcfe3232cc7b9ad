"""Models and optimizers of every kind on real ranks, under every option of DDP, equal one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from mlp import COUNTS, MLP, assert_reference, reference, samples
from ranks import RankError, make_trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from toys import AWARE, DEPRECATED, GATHERS, WEIGHTED, Toy, approx, loader, same_everywhere, train

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.rules import RULES

pytestmark = [
    *AWARE,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed"),
]


def train_mlp(
    variant: str, steps: int, window: int = 1, strategy: Any = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Body: rank r takes its share of COUNTS of every global batch."""
    bounds = np.cumsum([0, *COUNTS])
    rank = dist.get_rank()
    part = slice(bounds[rank], bounds[rank + 1])
    double = options.get("precision") == "64-true"
    data = [(x[part], y[part]) for x, y in samples(steps, torch.float64 if double else torch.float32)]
    model = MLP(variant)
    trainer = make_trainer(
        GradAvgStrategy(**{**WEIGHTED, **(strategy or {})}),
        max_epochs=1,
        use_distributed_sampler=False,
        accumulate_grad_batches=window,
        **options,
    )
    trainer.fit(model, DataLoader(data, batch_size=None))
    assert trainer.global_step == -(-steps // window)
    return {"rank": torch.tensor(rank), **model.state_dict()}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("variant", ["", "checkpoint", "checkpoint_reentrant", "frozen"])
def test_model_variants(world, variant, window):
    """Case 45: checkpointed layers, both variants, and frozen ones, with counts 3 and 1, equal one process."""
    ranks = world(2).run(train_mlp, variant, 5, window)
    assert_reference(ranks, reference(variant, 5, window), 1e-6)


def test_compiled_inside(world):
    """Case 49: a module compiled inside equals one process."""
    assert_reference(world(2).run(train_mlp, "compile", 5), reference("", 5, 1), 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 0.0005},
        {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True, "static_graph": True},
        {"broadcast_buffers": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_ddp_options(world, options, window):
    """Case 46: options of DDP change nothing in the result; a static graph included."""
    assert_reference(world(2).run(train_mlp, "", 5, window, options), reference("", 5, window), 1e-6)


def test_double_precision(world):
    ranks = world(2).run(train_mlp, "", 5, 2, precision="64-true")
    assert_reference(ranks, reference("", 5, 2, torch.float64), 1e-12)


def train_unused(find: bool) -> Any:
    return train_mlp("unused", 3, strategy={"find_unused_parameters": find})


def test_unused_parameters_are_named(world):
    """Case 47: without the flag, the error names the unused parameters."""
    with pytest.raises(RankError, match=r"extra\.weight, extra\.bias"):
        world(2).run(train_unused, False)


def test_unused_parameters_are_allowed(world):
    """Case 47: with the flag the others equal one process."""
    ranks = world(2).run(train_unused, True)
    assert_reference(ranks, reference("", 3, 1), 1e-6)


class NoGraph(LightningModule):
    """Rank 1 returns a loss without graph; `kind` says what is special about the parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(7, 3, sparse=kind == "sparse").double()
        self.other = nn.Parameter(torch.ones(3, dtype=torch.complex128 if kind == "complex" else torch.float32))
        self.gradients: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if dist.get_rank() == 1:
            return {"loss": torch.zeros(()), "weight": 0}
        return {"loss": self.table(batch.long()).sum() + 2 * self.other.abs().sum(), "weight": 2}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = [parameter.grad.to_dense().abs().sum().item() for parameter in self.parameters()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train_without_graph(kind: str) -> Any:
    model = NoGraph(kind)
    make_trainer(GradAvgStrategy(**WEIGHTED), max_epochs=1, use_distributed_sampler=False).fit(
        model, loader([[1.0, 2.0]])
    )
    return dist.get_rank(), model.gradients


@pytest.mark.parametrize("kind", ["dtypes", "sparse", "complex"])
def test_rank_without_graph_keeps_step(world: Any, kind: str) -> None:
    """Case 5: a rank without graph joins the reduction, whatever the parameters' dtypes and layouts."""
    assert [(0, [6.0, 6.0]), (1, [6.0, 6.0])] == world(2).run(train_without_graph, kind)


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

    def __init__(self, names: Sequence[str] = ("own", ".own"), **toy: Any) -> None:
        super().__init__(**toy)
        self.own = nn.Parameter(torch.ones((), dtype=torch.float64))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)  # no public way

    def losses(self, batch: Tensor) -> Tensor:
        return (self.w + self.own) * batch

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.gradients += [self.w.grad.clone(), self.own.grad.clone()]


def weight_of(batch: Tensor, batch_idx: int) -> float:
    return 0.0 if batch[0] == 9 else 4.0


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_parameters_that_ddp_ignores_follow_the_rule_on_their_rank(world, rule, window):
    first, second = world(2).run(
        train,
        [[[-1.0]] * 2, [[-3.0]] * 2],
        {"weight": weight_of if RULES[rule].uses_weight else None},
        {"reduction": rule, "gradient_as_bucket_view": window == 2, "check_replicas_every_n_steps": None},
        module=OwnPart,
        accumulate_grad_batches=window,
    )
    of_losses = {"sum": window, "mean_of_node_sums": window, "normalized_sum": 1 / 4}.get(rule, 1)
    for seen, x in ((first, -1.0), (second, -3.0)):
        assert [approx(x * of_losses)] * (2 // window) == [own.item() for own in seen.gradients[1::2]]


def test_a_parameter_that_ddp_reduces_all_the_same_is_reduced_once(world):
    seen = world(2).run(train, [[[-1.0]], [[-3.0]]], {"names": ["own"]}, {"reduction": "sum"}, module=OwnPart)
    assert [-4.0, -4.0] == [gradient.item() for gradient in same_everywhere(seen).gradients]


@pytest.mark.parametrize("window", [1, 2])
def test_parameters_that_ddp_ignores_get_nothing_of_weight_0(world, window):
    first, second = world(2).run(
        train,
        [[[-1.0]] * 2, [[9.0]] * 2],
        {"weight": weight_of},
        {**WEIGHTED, "check_replicas_every_n_steps": None},
        module=OwnPart,
        accumulate_grad_batches=window,
    )
    assert [approx(-1.0), approx(-1.0)] * (2 // window) == [gradient.item() for gradient in first.gradients]
    assert [approx(-1.0), 0.0] * (2 // window) == [gradient.item() for gradient in second.gradients]


class Keeps(Toy):
    """Adds up the gradients of all steps."""

    def optimizer_zero_grad(self, *args: Any) -> None:
        """Keep them."""


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("strategy", [{}, WEIGHTED, {"reduction": "sum"}], ids=str)
@pytest.mark.parametrize("window", [1, 2])
def test_gradients_that_are_kept_are_added_once(world, window, strategy, view):
    """The means of the batches are 2, 4, 6, 8; what was reduced before is not reduced again."""
    rows = [[[1.0], [2.0], [3.0], [4.0]], [[3.0], [6.0], [9.0], [12.0]]]
    options = {**strategy, "gradient_as_bucket_view": view}
    seen = same_everywhere(world(2).run(train, rows, {}, options, module=Keeps, accumulate_grad_batches=window))
    expected = torch.tensor([2.0, 4.0, 6.0, 8.0]).reshape(-1, window)
    # A sum counts both ranks, and all micro-batches.
    of_windows = 2 * expected.sum(1) if strategy.get("reduction") == "sum" else expected.mean(1)
    assert [approx(value) for value in of_windows.cumsum(0).tolist()] == [g.item() for g in seen.gradients]
