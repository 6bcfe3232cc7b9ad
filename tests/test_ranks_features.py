"""What DDP users combine with a reduction: options, precisions, autograd features, manual optimization, hooks."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from ranks import RankError, make_trainer
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from toys import Toy, loader, same_everywhere, train

from lightning_gradavg import GradAvgStrategy

WEIGHTED = {"reduction": "weighted_mean"}
COUNTS = (3, 1)


def approx(value, tolerance=1e-12):
    return pytest.approx(value, rel=tolerance, abs=tolerance)


class MLP(LightningModule):
    """8-16-4 with tanh and cross-entropy; `variant` names what is special about it."""

    def __init__(self, variant: str = "", lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.variant, self.lr = variant, lr
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        if variant == "unused":
            self.extra = nn.Linear(3, 3)
        if variant == "frozen":
            self.first.requires_grad_(False)
        self.body = nn.Sequential(self.first, nn.Tanh(), self.second)
        # In a list, so that the compiled module's parameters are not registered under a second name.
        self.calls = [torch.compile(self.body, backend="aot_eager") if variant == "compile" else self.body]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.variant.startswith("checkpoint"):
            reentrant = self.variant == "checkpoint_reentrant"
            hidden = checkpoint(
                lambda y: torch.tanh(self.first(y)), x.requires_grad_(reentrant), use_reentrant=reentrant
            )
            return checkpoint(self.second, hidden, use_reentrant=reentrant)
        return self.calls[0](x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr, momentum=0.9)


def samples(steps: int, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    size = sum(COUNTS)
    return [
        (torch.randn(size, 8, generator=generator, dtype=dtype), torch.randint(4, (size,), generator=generator))
        for _ in range(steps)
    ]


def reference(variant: str, steps: int, window: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Train one process on whole global batches, without Lightning."""
    model = MLP("frozen" if variant == "frozen" else "").to(dtype)
    optimizer = model.configure_optimizers()
    batches = samples(steps, dtype)
    for start in range(0, steps, window):
        x, y = (torch.cat(part) for part in zip(*batches[start : start + window], strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return dict(model.state_dict())


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


def assert_reference(ranks: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert [rank["rank"].item() for rank in ranks] == [0, 1]
    for name, value in expected.items():
        assert torch.equal(ranks[0][name], ranks[1][name])
        torch.testing.assert_close(ranks[0][name], value, rtol=tolerance, atol=tolerance)


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
    """In float64 the run equals one process to 1e-12."""
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


@pytest.mark.parametrize("window", [1, 2])
def test_static_graph_under_the_mean(world, window):
    """Case 46: a static graph works under the mean, too, accumulated or not (stock DDP fails an assertion of torch)."""
    seen = same_everywhere(
        world(2).run(train, [[[1], [2]], [[3], [6]]], {}, {"static_graph": True}, accumulate_grad_batches=window)
    )
    assert ([approx(2.0), approx(4.0)] if window == 1 else [approx(3.0)]) == [g.item() for g in seen.gradients]


class Manual(MLP):
    """Manual optimization: `window` micro-batches per step; only the last one is reduced."""

    def __init__(self, window: int, weighted: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.window, self.weighted = window, weighted

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        last = (batch_idx + 1) % self.window == 0
        if batch_idx % self.window == 0:
            optimizer.zero_grad()
        with optimizer.toggle_model(sync_grad=last):
            loss = super().training_step(batch, batch_idx)
            if self.weighted:
                self.manual_backward(loss, weight=len(batch[0]))
            else:
                self.manual_backward(loss / self.window)
        if last:
            optimizer.step()


def train_manual(window: int, weighted: bool, strategy: Any, per_rank: Any = None) -> Any:
    rank = dist.get_rank()
    bounds = np.cumsum([0, *(per_rank or COUNTS)])
    data = [(x[bounds[rank] : bounds[rank + 1]], y[bounds[rank] : bounds[rank + 1]]) for x, y in samples(8)]
    model = Manual(window, weighted)
    trainer = make_trainer(GradAvgStrategy(**strategy), max_epochs=1, use_distributed_sampler=False)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        trainer.fit(model, DataLoader(data, batch_size=None))
    assert trainer.global_step == 8 // window
    reductions = [event for event in record.events() if event.name == "gloo:all_reduce"]
    return {"rank": torch.tensor(rank), "reductions": torch.tensor(len(reductions)), **model.state_dict()}


@pytest.mark.parametrize("static", [False, True])
def test_manual_optimization(world, static):
    """Case 18: a manual loop with 4 micro-batches per step equals automatic accumulation of 4, or is refused."""
    if static and not hasattr(GradAvgStrategy(), "_pl_static_graph_delay_done"):
        raised = world(2).run_expecting_errors(train_manual, 4, True, {**WEIGHTED, "static_graph": True})
        assert all("static_graph=True with manual optimization" in one.message for one in raised)
        return
    ranks = world(2).run(train_manual, 4, True, {**WEIGHTED, "static_graph": static})
    assert_reference(ranks, reference("", 8, 4), 1e-6)


def test_manual_optimization_under_the_mean(world):
    """Case 18: under the mean a manual loop divides by its window itself, as with stock DDP."""
    ranks = world(2).run(train_manual, 4, False, {}, (2, 2))
    assert_reference(ranks, reference("", 8, 4), 1e-6)


class Direct(Toy):
    """Manual optimization that goes past the strategy, or never ends its window."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.way = way

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.losses(batch).mean()
        if self.way == "direct":
            loss.backward()
        else:
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("way", ["direct", "never synchronized"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted_mean"])
def test_step_on_unreduced_gradients_is_detected(world, reduction, way):
    """Case 18: a step on gradients that no backward reduced is an error on all ranks; stock Lightning drifts apart."""
    raised = world(2).run_expecting_errors(train, [[[1]], [[2]]], {"way": way}, {"reduction": reduction}, module=Direct)
    assert ["RuntimeError"] * 2 == [one.type_name for one in raised]
    assert all("self.manual_backward(loss)" in one.message for one in raised)


class Surgery(Toy):
    """Writes gradients by hand, as PCGrad does, of samples that all ranks have, or of its own and reduced by itself."""

    def __init__(self, how: str) -> None:
        super().__init__(start=[1.0, 2.0])
        self.automatic_optimization = False
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        x = self.all_gather(batch) if self.how == "of all" else batch
        (gradient,) = torch.autograd.grad((x.mean() * self.w).sum(), self.w)
        if self.how == "reduced":
            dist.all_reduce(gradient)
        self.w.grad = gradient
        optimizer.step()


def train_by_hand(how: str) -> Any:
    """Body: return what was warned of, and the weights."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trained = train([[[1.0], [2.0]], [[3.0], [5.0]]], {"how": how}, {"reduction": "sum"}, module=Surgery)
    found = [str(one.message) for one in seen if "gradients" in str(one.message)]
    return [text.split(". ")[1] for text in found], trained.weights


@pytest.mark.parametrize(("how", "weight"), [("of all", 1 - 0.01 * 5.5), ("reduced", 1 - 0.01 * 11)])
def test_gradients_written_by_hand_are_the_users_own(world, how, weight):
    """What no `manual_backward` reduced is warned of once, and trains, where it is the same on all ranks."""
    (warned, weights), (others, same) = world(2).run(train_by_hand, how)
    assert ["They are the same on all ranks, so nothing drifts apart; reduction='sum' is not applied to them"] == warned
    assert [] == others
    assert torch.equal(weights[-1], same[-1])
    torch.testing.assert_close(weight, weights[-1][0].item())


def test_gradients_written_by_hand_that_differ_are_refused(world):
    """Gradients that differ between the ranks, if only in their order, are an error on all of them."""
    raised = world(2).run_expecting_errors(train_swapped)
    assert all("they differ between the ranks, which would drift apart" in one.message for one in raised)


def train_swapped() -> Any:
    class Swapped(Surgery):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.w.grad = torch.tensor([1.0, -1.0] if dist.get_rank() else [-1.0, 1.0], dtype=self.w.dtype)
            self.optimizers().step()

    return train([[[1.0]], [[1.0]]], {"how": "swapped"}, {}, module=Swapped)


class Adversaries(Toy):
    """Steps its first optimizer only where the loss of all ranks is high, its second always and twice."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        first, second = optimizers
        loss = self.losses(batch).mean()
        self.manual_backward(loss)
        if self.trainer.strategy.reduce(loss.detach().clone()) > 2:
            first.step()
            first.zero_grad()
        self.manual_backward((self.other * batch).mean())
        second.step()
        second.step()
        second.zero_grad()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Neither optimizer has all gradients."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.w], lr=0.01), torch.optim.SGD([self.other], lr=0.01)]


def train_adversaries() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"SGD.step\(\) was called on gradients")
        trainer = make_trainer(
            GradAvgStrategy(find_unused_parameters=True), max_epochs=1, use_distributed_sampler=False
        )
        model = Adversaries()
        trainer.fit(model, loader([[1.0 + dist.get_rank()], [2.0 + dist.get_rank()], [1.0 + dist.get_rank()]]))
    return model.w.item(), model.other.item()


def test_an_optimizer_steps_when_its_loss_is_high(world):
    """A GAN may skip steps of one optimizer, and step on the same reduced gradients again."""
    # Losses of all ranks are 1.5, 2.5 and 1.5 times the weight: one step, on the gradients 1.5 + 2.5.
    assert [(pytest.approx(0.96), pytest.approx(1 - 0.02 * 5.5))] * 2 == world(2).run(train_adversaries)


class Repeated(Toy):
    """Manual optimization that reduces every micro-batch and adds the results up before one step."""

    def __init__(self, set_to_none: bool) -> None:
        super().__init__(lr=1.0)
        self.automatic_optimization = False
        self.set_to_none = set_to_none

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad(set_to_none=self.set_to_none)
        for micro_batch in batch.unbind():
            samples = micro_batch[~micro_batch.isnan()]
            self.manual_backward(self.losses(samples).mean(), weight=samples.numel())
        optimizer.step()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_every_backward_is_reduced_on_its_own(world, view, set_to_none):
    """Gradients that were reduced before are not reduced again: (1+2+3)/3 + (5+1)/2 = 5."""
    nan = float("nan")
    batches = [[[[1, 2], [5, nan]]] * 2, [[[3, nan], [1, nan]]] * 2]
    seen = same_everywhere(
        world(2).run(
            train,
            batches,
            {"set_to_none": set_to_none},
            {**WEIGHTED, "gradient_as_bucket_view": view},
            module=Repeated,
        )
    )
    assert [approx(5.0)] * 2 == [gradient.item() for gradient in seen.gradients]


class TwoPlayers(LightningModule):
    """Case 19: two weights with a loss and an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.d = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.automatic_optimization = False
        self.gradients: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        gradients = []
        optimizers: Any = self.optimizers()
        for optimizer, parameter, x in zip(optimizers, (self.g, self.d), batch, strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward((parameter * x).mean(), weight=x.numel())
            gradients.append(parameter.grad.item())
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.gradients.append(tuple(gradients))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.g], lr=0.1), torch.optim.SGD([self.d], lr=0.1)]


def train_two_players(per_rank: Any) -> Any:
    model = TwoPlayers()
    data = [tuple(torch.tensor(x, dtype=torch.float64) for x in per_rank[dist.get_rank()])] * 3
    make_trainer(
        GradAvgStrategy(**WEIGHTED, find_unused_parameters=True), max_epochs=1, use_distributed_sampler=False
    ).fit(model, DataLoader(data, batch_size=None))
    return dist.get_rank(), model.gradients


def test_several_optimizers(world):
    """Case 19: counts (3, 1) of one loss and (1, 3) of the other do not mix: 2.0 and 3.0 in every batch."""
    ranks = world(2).run(train_two_players, [([1, 1, 1], [9]), ([5], [1, 1, 1])])
    assert [(0, [(2.0, 3.0)] * 3), (1, [(2.0, 3.0)] * 3)] == ranks


class Interleaved(TwoPlayers):
    """Accumulates the loss of one optimizer and reduces in the backward of the other."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        g, d = optimizers
        with g.toggle_model(sync_grad=False):
            self.manual_backward((self.g * batch[0]).mean(), weight=3)
        with d.toggle_model():
            self.manual_backward((self.d * batch[1]).mean(), weight=1)


def train_interleaved() -> None:
    x = torch.ones(2, dtype=torch.float64)
    make_trainer(GradAvgStrategy(**WEIGHTED, find_unused_parameters=True), max_epochs=1).fit(
        Interleaved(), DataLoader([(x, x)], batch_size=None)
    )


def test_windows_of_two_optimizers_cannot_overlap(world):
    """Counts of two losses that would be mixed are an error on all ranks."""
    raised = world(2).run_expecting_errors(train_interleaved)
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all("rank 1: micro-batch 1 of the window: it trains other parameters" in one.message for one in raised)
