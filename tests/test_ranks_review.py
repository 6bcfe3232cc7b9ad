"""What a sceptic tries on real ranks: combinations of options, terms, windows and interrupted loops."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from ranks import make_trainer
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader
from toys import Toy, loader, same_everywhere, train

from lightning_gradavg import GradAvgStrategy

WEIGHTED = {"reduction": "weighted_mean"}

pytestmark = [
    pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0:UserWarning"),
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified"),
]


def approx(value: float) -> Any:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


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
        if self.how == "fewer" and batch_idx % 2 == 1:
            loss, weight = {"cls": loss["cls"] + 0 * self.box}, {"cls": weight["cls"]}
        if self.how == "misnamed" and dist.get_rank() == 1 and batch_idx == 1:
            weight = {"cls": 1, "boxes": 1}
        if self.how == "many":
            terms = [f"t{index}" for index in range(10 + dist.get_rank())]
            loss, weight = dict.fromkeys(terms, loss["cls"] + loss["box"]), dict.fromkeys(terms, 1)
        if self.how == "float":
            loss = 0.5
        return {"loss": loss, "weight": weight}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append([parameter.grad.item() for parameter in self.parameters()])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


RANKS: Any = [[([1, 1], [4]), ([2], [0])], [([3, 3], [5, 2, 4]), ([6, 6, 6], [10])]]


def train_heads(per_rank: Any, strategy: Any, window: int = 1, how: str = "") -> Any:
    data = [tuple(torch.tensor(part, dtype=torch.float64) for part in pair) for pair in per_rank[dist.get_rank()]]
    model = Heads(how)
    make_trainer(
        GradAvgStrategy(**{**WEIGHTED, **strategy}),
        max_epochs=1,
        use_distributed_sampler=False,
        accumulate_grad_batches=window,
    ).fit(model, DataLoader(data, batch_size=None))
    return dist.get_rank(), model.gradients


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
@pytest.mark.parametrize("window", [1, 2])
def test_terms_with_heads_of_their_own(world: Any, window: int, late: bool, strategy: Any) -> None:
    """Case 9: named terms with a head each, one term empty and its gradient NaN, equal one process under all options.

    A static graph is refused where terms are accumulated: DDP would count a backward per term.
    """
    if window > 1 and "static_graph" in strategy:
        raised = world(2).run_expecting_errors(train_heads, RANKS, strategy, window)
        assert ["ValueError"] * 2 == [one.type_name for one in raised]
        assert all("static_graph=True" in one.message and "named loss terms" in one.message for one in raised)
        return
    ranks = [rank[::-1] if late else rank for rank in RANKS]
    ranks = [rank * 2 for rank in ranks]
    steps = range(0, 4, window)
    expected = [reference([pair for rank in ranks for pair in rank[step : step + window]]) for step in steps]
    for index, (rank, gradients) in enumerate(world(2).run(train_heads, ranks, strategy, window)):
        assert index == rank
        assert [[approx(x) for x in step] for step in expected] == gradients


def test_term_that_no_rank_has(world: Any) -> None:
    """Case 9: a term of weight 0 on all ranks adds nothing."""
    ranks: Any = [[([1, 1], [0])], [([3, 3], [0, 0])]]
    assert [(rank, [[4.0, 2.0, 0.0]]) for rank in (0, 1)] == world(2).run(train_heads, ranks, {})


@pytest.mark.parametrize("window", [1, 2])
def test_named_terms_and_a_rank_without_graph(world: Any, window: int) -> None:
    """A rank whose terms have no graph and no weight contributes nothing, and the others' terms stay."""
    expected = [reference(RANKS[0][step : step + window]) for step in range(0, 2, window)]
    for _, gradients in world(2).run(train_heads, RANKS, {}, window, "no graph"):
        assert [[approx(x) for x in step] for step in expected] == gradients


def test_term_that_a_later_micro_batch_lacks(world: Any) -> None:
    """A micro-batch without one of the window's terms has weight 0 in it."""
    expected = [
        2 * (1 + 1 + 2 + 3 + 3 + 18) / 8 + 3 * (4 + 5 + 2 + 4) / 4,
        (1 + 1 + 2 + 3 + 3 + 18) / 8,
        (4 + 5 + 2 + 4) / 4,
    ]
    for _, gradients in world(2).run(train_heads, RANKS, {}, 2, "fewer"):
        assert [[approx(x) for x in expected]] == gradients


@pytest.mark.parametrize("window", [1, 2])
def test_misnamed_weights_anywhere_in_the_window(world: Any, window: int) -> None:
    """Weights named otherwise than the terms, in any micro-batch, are an error that all ranks raise together."""
    raised = world(2).run_expecting_errors(train_heads, RANKS, {}, window, "misnamed")
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all("its weights are named ['boxes', 'cls']" in one.message for one in raised)


def test_ranks_with_different_numbers_of_terms(world: Any) -> None:
    """Ten terms on one rank and eleven on the other are an error on both, and no mismatched collective."""
    raised = world(2).run_expecting_errors(train_heads, RANKS, {}, 1, "many")
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all("the ranks' losses have different terms" in one.message for one in raised)


def test_loss_that_is_no_tensor_is_quoted(world: Any) -> None:
    """A loss that is a number instead of a tensor is quoted."""
    raised = world(2).run_expecting_errors(train_heads, RANKS, {}, 1, "float")
    assert all("0.5" in one.message and "loss" in one.message for one in raised)
    assert {"TypeError"} >= {one.type_name for one in raised}


class Windows(Toy):
    """A manual loop that clears the gradients when it begins a window, and so drops one that an epoch's end cut."""

    def __init__(self, set_to_none: bool = True, weighted: bool = True) -> None:
        super().__init__(lr=0.0)
        self.automatic_optimization = False
        self.set_to_none, self.weighted = set_to_none, weighted

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=self.set_to_none)
        with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
            loss = self.losses(batch).mean()
            if self.weighted:
                self.manual_backward(loss, weight=batch.numel())
            else:
                self.manual_backward(loss)
        if batch_idx % 2 == 1:
            optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_cleared_take_their_weights_along(world: Any, set_to_none: bool) -> None:
    """Case 18: a window that the user drops by `zero_grad` does not count in the next one."""
    rows = [[[1.0], [1.0], [1.0, 1.0, 1.0]]] * 2
    seen = same_everywhere(
        world(2).run(train, rows, {"set_to_none": set_to_none}, WEIGHTED, module=Windows, max_epochs=2)
    )
    assert [1.0, 1.0] == [gradient.item() for gradient in seen.gradients]


def train_pickled(pickled: bool) -> Any:
    strategy: Any = GradAvgStrategy(ddp_comm_hook=default_hooks.allreduce_hook)
    if pickled:
        strategy = pickle.loads(pickle.dumps(strategy))
    model = Windows(weighted=False)
    make_trainer(strategy, max_epochs=1, use_distributed_sampler=False).fit(model, loader([[1.0], [3.0]]))
    return dist.get_rank(), [gradient.item() for gradient in model.seen.gradients]


def test_pickling_changes_nothing(world: Any) -> None:
    """A strategy that was pickled, as for spawned processes, reduces as the original does."""
    assert [(0, [4.0]), (1, [4.0])] == world(2).run(train_pickled, False) == world(2).run(train_pickled, True)


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


class Interrupted(Toy):
    """Ends its first epoch in the middle of a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.trainer.current_epoch == 0 and batch_idx == 3 else None


def test_epoch_that_ends_within_a_window(world: Any) -> None:
    """What an epoch left of a window, stopped by `on_train_batch_start`, does not count in the next."""
    rows = [[[1], [2, 2, 2], [3], [4], [5], [6]]] * 2
    seen = same_everywhere(
        world(2).run(train, rows, {"lr": 0.0}, WEIGHTED, module=Interrupted, max_epochs=2, accumulate_grad_batches=2)
    )
    assert [1.75, 1.75, 3.5, 5.5] == [gradient.item() for gradient in seen.gradients]


class Newton(Toy):
    """LBFGS evaluates the closure several times in a step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return (0.5 * (self.w * batch - 3).square()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=10)


def train_newton(reduction: str | None) -> Any:
    model = Newton()
    strategy = GradAvgStrategy(reduction=reduction) if reduction else DDPStrategy()  # type: ignore[arg-type]  # a name
    rows = [[[1.0, 2.0]] * 3, [[3.0, 5.0]] * 3][dist.get_rank()]
    make_trainer(strategy, max_epochs=1, use_distributed_sampler=False).fit(model, loader(rows))
    return dist.get_rank(), model.w.item()


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
def test_optimizer_with_a_closure(world: Any, reduction: str) -> None:
    """LBFGS, whose closure runs several times per step, ends where stock DDP does: at 33/39."""
    expected = [(0, pytest.approx(33 / 39, rel=1e-9)), (1, pytest.approx(33 / 39, rel=1e-9))]
    assert expected == world(2).run(train_newton, reduction)
    assert expected == world(2).run(train_newton, None)


class Validated(Toy):
    """Has buffers, which DDP broadcasts in validation, too."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.norm = nn.BatchNorm1d(1).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.losses(batch).mean() + 0 * self.norm(batch.reshape(-1, 1)).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.norm(batch.reshape(-1, 1))


def train_validated(window: int, interval: int) -> Any:
    model = Validated()
    rows = [
        [[1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0], [8.0, 9.0]],
        [[1.0, 3.0], [3.0, 1.0], [6.0, 0.0, 3.0, 1.0], [2.0, 2.0]],
    ]
    trainer = make_trainer(
        GradAvgStrategy(**WEIGHTED),
        max_epochs=1,
        use_distributed_sampler=False,
        accumulate_grad_batches=window,
        val_check_interval=interval,
    )
    for _ in range(2):
        trainer.fit(model, loader(rows[dist.get_rank()]), loader([[1.0, 2.0], [3.0, 4.0]]))
        trainer.fit_loop.max_epochs = 2
    return dist.get_rank(), [gradient.item() for gradient in model.seen.gradients]


@pytest.mark.parametrize(("window", "interval", "expected"), [(2, 1, [23 / 9, 44 / 10]), (4, 3, [67 / 19])])
def test_validation_within_a_window_and_fit_again(world: Any, window: int, interval: int, expected: Any) -> None:
    """Validation between the micro-batches of a window, and a second `fit`, change nothing."""
    twice = [approx(value) for value in expected * 2]
    assert [(0, twice), (1, twice)] == world(2).run(train_validated, window, interval)


class Skipping(Toy):
    """Returns None for a micro-batch of one sample."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch.numel() == 1 else self.losses(batch).mean()


def train_skipping(reduction: str, rows: Any, window: int) -> Any:
    seen = train(
        [rows], {"lr": 0.0}, {"reduction": reduction}, module=Skipping, accumulate_grad_batches=window, max_epochs=1
    )
    return [gradient.item() for gradient in seen.gradients]


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
@pytest.mark.parametrize("rows", [[[1.0, 3.0], [5.0]], [[5.0], [1.0, 3.0]]], ids=str)
@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_skipped_micro_batch_within_a_window(world: Any, reduction: str, rows: Any) -> None:
    """Case 50: None, which Lightning allows in a world of one, is refused within a window: it would stay open."""
    (raised,) = world(1).run_expecting_errors(train_skipping, reduction, rows, 2)
    assert "RuntimeError" == raised.type_name
    assert "training_step returned no loss within an accumulation window" in raised.message
    assert '"weight": 0' in raised.message


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_skipped_batch_outside_of_windows(world: Any, reduction: str) -> None:
    """Case 50: in a world of one, a skipped batch that is a window of its own leaves the others as they are."""
    assert [[2.0, 6.0]] == world(1).run(train_counting, reduction)


def train_counting(reduction: str) -> Any:
    gradients = []

    class Counting(Skipping):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.w.grad is not None:
                gradients.append(self.w.grad.item())

    make_trainer(GradAvgStrategy(reduction=reduction), max_epochs=1, use_distributed_sampler=False).fit(  # type: ignore[arg-type]  # a name
        Counting(lr=0.0), loader([[1.0, 3.0], [5.0], [4.0, 8.0]])
    )
    return gradients
