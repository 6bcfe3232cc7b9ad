"""`GradAvgStrategy()` is Lightning's DDPStrategy: in steps of every kind the same bits, memory, operators and errors.

The one thing that it adds is the factor of a short last window, in automatic optimization.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from ranks import make_trainer, on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.weak import TensorWeakRef
from toys import IGNORE_UNUSED_PARAMETERS, Stream, Toy, approx, flat, make_loader

from lightning_gradavg import GradAvgStrategy

pytestmark = [
    *IGNORE_UNUSED_PARAMETERS,
    pytest.mark.filterwarnings("ignore:.*was configured without any hooks to monitor"),
]
WIDTH, SAMPLES, STEPS = 32, 4, 5
LARGE = 4 * WIDTH * WIDTH
"""The bytes of a layer's weight. No activation has as many."""


class Recorder(TorchDispatchMode):
    """Notes what each training step computes, and the most bytes of large tensors that are alive within one.

    Large are gradients, buckets, whatever is copied from them, and an optimizer's state. A tensor counts from the
    operator that returns it until its storage is freed, whoever holds it. Operators are those of torch, also within a
    backward, and collectives. Registered hooks are those on tensors, by `Tensor.register_hook` and the like.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Counter[str]] = []
        self.hooks: list[int] = []
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._within = False
        # Whether a large tensor came since the bytes were counted. Otherwise there can only be fewer.
        self._has_grown = False

    def begin_step(self) -> None:
        self.operators.append(Counter())
        self.hooks.append(0)
        self._within = True
        self._has_grown = True

    def end_step(self) -> None:
        self._within = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        if self._within:
            self.operators[-1][str(func)] += 1
            if self._has_grown:
                self.peak = max(self.peak, self._bytes())
                self._has_grown = False
        return result

    def _note(self, storage: Any) -> None:
        if storage.nbytes() >= LARGE and storage._cdata not in self._alive:
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self._has_grown = True

    def _bytes(self) -> int:
        self._alive = {key: noted for key, noted in self._alive.items() if not noted[0].expired()}
        return sum(size for _, size in self._alive.values())

    @contextmanager
    def counting_hooks(self) -> Iterator[None]:
        """Count the hooks that are registered on tensors while a step runs."""

        def counted(register: Callable[..., Any]) -> Callable[..., Any]:
            def note(tensor: Tensor, hook: Any) -> Any:
                if self._within:
                    self.hooks[-1] += 1
                return register(tensor, hook)

            return note

        with ExitStack() as patches:
            for name in ("register_hook", "register_post_accumulate_grad_hook"):
                patches.enter_context(mock.patch.object(Tensor, name, counted(getattr(Tensor, name))))
            yield


Step = Callable[["Nets", Tensor, int], Any]


class Scenario(NamedTuple):
    """A kind of training step.

    Attributes:
        step: The `training_step`.
        manual: Whether it takes its steps by hand.
        window: Batches of an optimizer step.
        options: Those of the strategy.
        trainer: Those of the Trainer.
        keeps: Whether Lightning zeroes no gradients.
        optimizers: Makes them from the two parts of the model.
    """

    step: Step
    manual: bool = False
    window: int = 1
    options: Mapping[str, Any] = {}
    trainer: Mapping[str, Any] = {}
    keeps: bool = False
    optimizers: Callable[[Nets], Any] = lambda nets: torch.optim.SGD(nets.parameters(), lr=0.01, momentum=0.9)


class Nets(LightningModule):
    """Two networks, of which a step trains one or both; each rank's batches are its own."""

    def __init__(self, scenario: Scenario, recorder: Recorder | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = self.make(), self.make()
        self.scenario, self.recorder = scenario, recorder
        self.automatic_optimization = not scenario.manual
        self.standing: list[dict[str, int]] = []

    @staticmethod
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(100 + dist.get_rank())
        count = STEPS * self.scenario.window
        return make_loader([torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(count)])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.recorder is not None:
            self.recorder.begin_step()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.scenario.step(self, batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.standing.append(hooks_of(self))

    def on_train_batch_end(self, *args: Any) -> None:
        if self.recorder is not None:
            self.recorder.end_step()

    def optimizer_zero_grad(self, *args: Any) -> None:
        if not self.scenario.keeps:
            super().optimizer_zero_grad(*args)

    def configure_optimizers(self) -> Any:
        return self.scenario.optimizers(self)


def hooks_of(module: LightningModule) -> dict[str, int]:
    """Return how many hooks there are on parameters and modules, and of DDP's communication."""
    model: Any = module.trainer.strategy.model
    of_parameters = [
        len(hooks or ())
        for parameter in module.parameters()
        for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    ]
    of_modules = [
        len(hooks)
        for part in model.modules()
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    ]
    return {"parameters": sum(of_parameters), "modules": sum(of_modules), "communication": len(model._comm_hooks)}


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    return net(batch).square().mean()


def both(nets: Nets, batch: Tensor) -> Tensor:
    return loss_of(nets.first, batch) + loss_of(nets.second, batch)


def plain(nets: Nets, batch: Tensor, index: int) -> Tensor:
    return both(nets, batch)


def adversarial(nets: Nets, batch: Tensor, index: int) -> None:
    """Train a generator, and then its critic."""
    optimizers: Any = nets.optimizers()
    generator, critic = optimizers
    nets.toggle_optimizer(generator)
    nets.manual_backward(loss_of(nets.second, nets.first(batch)))
    generator.step()
    generator.zero_grad()
    nets.untoggle_optimizer(generator)
    nets.toggle_optimizer(critic)
    made = nets.first(batch).detach()
    nets.manual_backward(loss_of(nets.second, batch) - loss_of(nets.second, made))
    critic.step()
    critic.zero_grad()
    nets.untoggle_optimizer(critic)


def two_windows(nets: Nets, batch: Tensor, index: int) -> None:
    """Accumulate the gradients of two optimizers, each in a window of its own, both open at once."""
    last = index % 2 == 1
    for optimizer, net in zip(nets.optimizers(), (nets.first, nets.second), strict=True):
        with optimizer.toggle_model(sync_grad=last):
            nets.manual_backward(loss_of(net, batch) / 2)
        if last:
            optimizer.step()
            optimizer.zero_grad()


def two_windows_by_closures(nets: Nets, batch: Tensor, index: int) -> None:
    """The "more advanced example" of `LightningOptimizer.step`, with steps where ranks have the same gradients."""
    last = index % 2 == 1
    for optimizer, net in zip(nets.optimizers(), (nets.first, nets.second), strict=True):

        def closure(optimizer: Any = optimizer, net: nn.Module = net) -> None:
            if not last:
                optimizer.zero_grad()
            nets.manual_backward(loss_of(net, batch) / 2)

        with optimizer.toggle_model(sync_grad=last):
            if last:
                optimizer.step(closure=closure)
            else:
                closure()


def several_backwards(count: int) -> Step:
    def step(nets: Nets, batch: Tensor, index: int) -> None:
        optimizer: Any = nets.optimizers()
        for samples in batch.repeat(count, 1).chunk(count):
            nets.manual_backward(both(nets, samples))
        optimizer.step()
        optimizer.zero_grad()

    return step


def accumulating(window: int, *, keeps: bool = False) -> Step:
    """Return a step that accumulates by hand."""

    def step(nets: Nets, batch: Tensor, index: int) -> None:
        optimizer: Any = nets.optimizers()
        last = (index + 1) % window == 0
        with optimizer.toggle_model(sync_grad=last):
            nets.manual_backward(both(nets, batch) / window)
        if last:
            optimizer.step()
            if not keeps:
                optimizer.zero_grad()

    return step


def unused_on_rank_1(nets: Nets, batch: Tensor, index: int) -> Tensor:
    return loss_of(nets.first, batch) if dist.get_rank() == 1 else both(nets, batch)


def alike(nets: Nets, batch: Tensor, index: int) -> Tensor:
    """Train on one batch on all ranks: L-BFGS decides by the loss of its rank how often it evaluates its closure."""
    return both(nets, torch.full_like(batch, 0.1 + 0.01 * index))


def changing(of_backwards: Sequence[Sequence[bool]]) -> Step:
    """Return a step by hand whose backwards train the first network, the second one, or both."""

    def step(nets: Nets, batch: Tensor, index: int) -> None:
        optimizer: Any = nets.optimizers()
        strategy: Any = nets.trainer.strategy
        for number, trains in enumerate(of_backwards, 1):
            for net, is_trained in zip((nets.first, nets.second), trains, strict=True):
                net.requires_grad_(is_trained)
            last = number == len(of_backwards)
            with strategy.block_backward_sync() if not last else nullcontext():
                nets.manual_backward(both(nets, batch * number) / 2)
        optimizer.step()
        optimizer.zero_grad()

    return step


def frozen_at_the_end(nets: Nets, batch: Tensor, index: int) -> Tensor:
    """Freeze the second network in every second batch."""
    nets.second.requires_grad_(index % 2 == 0)
    return both(nets, batch)


def two_optimizers(nets: Nets) -> Any:
    return [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9) for net in (nets.first, nets.second)]


def newton(nets: Nets) -> Any:
    return torch.optim.LBFGS(nets.parameters(), lr=0.01, max_iter=3)


UNUSED = {"find_unused_parameters": True}
ACCUMULATED = {window: {"accumulate_grad_batches": window} for window in (2, 3)}
BOTH, FIRST = (True, True), (True, False)
BATCHED = {"batched_grad_copy": True}
HAS_BATCHED_COPY = "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters  # torch 2.13 has it
SCENARIOS: Mapping[str, Scenario] = {
    "a single step": Scenario(plain),
    "a GAN with toggle_optimizer": Scenario(adversarial, True, options=UNUSED, optimizers=two_optimizers),
    "two optimizers with windows": Scenario(two_windows, True, 2, UNUSED, optimizers=two_optimizers),
    "two optimizers with windows and closures": Scenario(
        two_windows_by_closures, True, 2, UNUSED, optimizers=two_optimizers
    ),
    "two backwards": Scenario(several_backwards(2), True),
    "three backwards": Scenario(several_backwards(3), True),
    "two backwards into views": Scenario(several_backwards(2), True, options={"gradient_as_bucket_view": True}),
    "windows by hand": Scenario(accumulating(2), True, 2),
    "windows by hand, kept gradients": Scenario(accumulating(3, keeps=True), True, 3),
    "kept gradients": Scenario(plain, keeps=True),
    "LBFGS": Scenario(plain, optimizers=newton),
    "LBFGS in windows": Scenario(alike, False, 2, {}, ACCUMULATED[2], optimizers=newton),
    "a parameter unused on one rank": Scenario(unused_on_rank_1, options=UNUSED),
    **{f"windows of {window}": Scenario(plain, False, window, {}, of) for window, of in ACCUMULATED.items()},
    **{
        f"windows of {window}, kept gradients": Scenario(plain, False, window, {}, of, keeps=True)
        for window, of in ACCUMULATED.items()
    },
    "clipping": Scenario(plain, trainer={"gradient_clip_val": 0.05}),
    "clipping in windows": Scenario(plain, False, 2, {}, {"gradient_clip_val": 0.05, **ACCUMULATED[2]}),
    "views of buckets": Scenario(plain, options={"gradient_as_bucket_view": True}),
    "views of buckets in windows": Scenario(
        plain, False, 2, {"gradient_as_bucket_view": True}, ACCUMULATED[2]
    ),
    **{
        f"{name}, copied in one batch": Scenario(plain, False, window, options, ACCUMULATED.get(window, {}))
        for name, window, options in (
            ("a single step", 1, BATCHED),
            ("windows of 2", 2, BATCHED),
            ("views of buckets", 1, {**BATCHED, "gradient_as_bucket_view": True}),
        )
        if HAS_BATCHED_COPY
    },
    "a static graph": Scenario(plain, options={"static_graph": True}),
    "a parameter frozen within an automatic window": Scenario(frozen_at_the_end, False, 2, UNUSED, ACCUMULATED[2]),
    "a parameter frozen between windows": Scenario(frozen_at_the_end, options=UNUSED),
    "a parameter frozen within a window": Scenario(changing((BOTH, FIRST)), True, options=UNUSED),
    "a parameter frozen and unfrozen within a window": Scenario(
        changing((BOTH, FIRST, BOTH)), True, options=UNUSED
    ),
    "a parameter unfrozen within a window": Scenario(changing((FIRST, BOTH)), True, options=UNUSED),
}  # fmt: skip


class Outcome(NamedTuple):
    """What a rank found."""

    weights: Tensor
    steps: int
    peak: int
    operators: list[Counter[str]]
    hooks: list[int]
    standing: list[dict[str, int]]


def record(name: str, of: type[DDPStrategy]) -> Outcome:
    """Body: train under a strategy."""
    scenario, recorder = SCENARIOS[name], Recorder()
    nets = Nets(scenario, recorder)
    with recorder, recorder.counting_hooks():
        steps = fit(nets, of)
    return Outcome(flat(nets.parameters()), steps, recorder.peak, recorder.operators, recorder.hooks, nets.standing)


def fit(nets: Nets, of: type[DDPStrategy]) -> int:
    """Train, and return the number of optimizer steps."""
    scenario = nets.scenario
    trainer = make_trainer(of(**scenario.options), max_epochs=1, use_distributed_sampler=False, **scenario.trainer)
    trainer.fit(nets)
    return trainer.global_step


def make_parameters_of_scenarios() -> list[Any]:
    """Return each scenario with both numbers of ranks, every other one in a full run alone."""
    parameters = []
    for index, (name, size) in enumerate(product(SCENARIOS, [2, 3])):
        # Each scenario in every run, and the scenarios in turn on 2 and on 3 ranks: 0 and 3, 4 and 7 stay, and so on.
        marks = [] if index % 4 in (0, 3) else [pytest.mark.full]
        parameters.append(pytest.param(name, size, marks=marks))
    return parameters


@pytest.mark.parametrize(("name", "size"), make_parameters_of_scenarios())
def test_a_step_is_that_of_stock_ddp(world, name, size):
    ours, stock = (world(size).run(record, name, of) for of in (GradAvgStrategy, DDPStrategy))
    assert len(ours) == size
    optimizers = 2 if SCENARIOS[name].optimizers is two_optimizers else 1
    for mine, its in zip(ours, stock, strict=True):
        assert its.steps == mine.steps == STEPS * optimizers
        assert torch.equal(its.weights, mine.weights)
        assert its.operators == mine.operators
        assert its.peak == mine.peak > 0
        assert its.hooks == mine.hooks
        assert its.standing == mine.standing
    assert all(torch.equal(ours[0].weights, mine.weights) for mine in ours)


class EquallyWeighed(Nets):
    """Every loss of every rank has one weight."""

    def training_step(self, *args: Any) -> Any:
        loss = super().training_step(*args)
        if isinstance(self.trainer.strategy, GradAvgStrategy):
            return {"loss": loss, "weight": 8}
        return loss


def weigh_equally(of: Callable[..., DDPStrategy], window: int) -> Tensor:
    nets = EquallyWeighed(Scenario(plain, window=window, trainer={"accumulate_grad_batches": window}))
    fit(nets, of)
    return flat(nets.parameters())


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_equal_weights_have_the_bits_of_stock(world, size, window):
    """If weights and ranks are powers of two: in u they are exact, and a sum is divided as exactly as its terms."""
    stock = world(size).run(weigh_equally, DDPStrategy, window)
    ours = world(size).run(weigh_equally, partial(GradAvgStrategy, reduction="weighted_mean"), window)
    assert [True] * size == [torch.equal(its, mine) for its, mine in zip(stock, ours, strict=True)]


class TwoByHand(LightningModule):
    """Two numbers with an optimizer each, whose windows are open at once; their losses are `a*x/2` and `b*x/2`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2))
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, parameter in zip(self.optimizers(), (self.a, self.b), strict=True):
            with optimizer.toggle_model(sync_grad=batch_idx == 1):
                self.manual_backward((parameter * batch).sum() / 2)
            if batch_idx == 1:
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in (self.a, self.b)]


@pytest.mark.parametrize("of", [GradAvgStrategy, DDPStrategy])
@on_ranks()
def test_two_windows_that_are_open_at_once_by_hand(of):
    """1 - 0.1 * ((1 + 3) / 2 + (5 + 7) / 2) / 2 = 0.6, for both numbers."""
    module, batches = TwoByHand(), [[[1.0], [3.0]], [[5.0], [7.0]]][dist.get_rank()]
    trainer = make_trainer(of(**UNUSED), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, make_loader(batches))
    assert (approx(0.6), approx(0.6)) == (module.a.item(), module.b.item())


class EndsWithoutLoss(LightningModule):
    """One number, whose third batch has no loss on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 2 else (self.w * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@on_ranks()
def test_a_step_without_any_loss_beside_a_rank_that_stands_in_has_a_gradient_of_0():
    """1 - 0.1 * 2 - 0.1 * (0.9 * 2 + 2) = 0.42, less the momentum of 0.1 * 0.9 * 3.8. Rank 1 has no third batch."""
    module = EndsWithoutLoss()
    batches = [[[1.0], [1.0], [1.0]], [[3.0], [3.0]]][dist.get_rank()]
    trainer = make_trainer(GradAvgStrategy(), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, make_loader(batches))
    assert approx(0.42 - 0.342) == module.w.item()


class Shortened(Nets):
    """Its last window lacks a batch, but stock DDP divides it by the length of the others; it may make up for that."""

    def __init__(self, window: int, *, makes_up: bool, recorder: Recorder | None = None, **trainer: Any) -> None:
        options = {"accumulate_grad_batches": window, **trainer}
        super().__init__(Scenario(plain, window=window, trainer=options), recorder)
        self.makes_up = makes_up

    def train_dataloader(self) -> Any:
        batches = [batch for (batch,) in zip(super().train_dataloader())]
        return make_loader(batches[:-1])

    def training_step(self, *args: Any) -> Any:
        loss = super().training_step(*args)
        window = self.scenario.window
        first_of_last = self.trainer.num_training_batches // window * window
        if self.makes_up and self.trainer.fit_loop.epoch_loop.batch_idx >= first_of_last:
            loss = loss * (window / (window - 1))
        return loss


def shortened(of: type[DDPStrategy], window: int, **trainer: Any) -> tuple[Tensor, int, int]:
    recorder = Recorder()
    nets = Shortened(window, makes_up=of is DDPStrategy, recorder=recorder, **trainer)
    with recorder:
        steps = fit(nets, of)
    return flat(nets.parameters()), steps, recorder.peak


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("window", "clip"), [(2, None), (3, None), (3, 0.05)])
def test_the_losses_of_a_short_window_are_multiplied(world, window, clip, size):
    """By N over its length: then it has the bits, and the memory, of stock DDP with losses times that factor."""
    ours, stock = (
        world(size).run(shortened, of, window, gradient_clip_val=clip) for of in (GradAvgStrategy, DDPStrategy)
    )
    assert len(ours) == size
    for (weights, steps, peak), (its_weights, its_steps, its_peak) in zip(ours, stock, strict=True):
        assert torch.equal(its_weights, weights)
        assert its_steps == steps == STEPS
        assert its_peak == peak


class Kept(Toy):
    """Its gradients add up over the windows."""

    def optimizer_zero_grad(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize(("module", "expected"), [(Toy, [2.0, 5.0, 6.0]), (Kept, [2.0, 2.0 + 5.0, 2.0 + 5.0 + 6.0])])
@on_ranks()
def test_a_short_window_by_hand(module, expected, sized, options):
    """The means are those of 1 and 3, of 3 and 7, and of 5 and 7: what was there before is not multiplied."""
    numbers = [[1.0, 3.0, 3.0, 7.0, 5.0], [3.0, 1.0, 7.0, 3.0, 7.0]][dist.get_rank()]
    batches = [torch.tensor([number], dtype=torch.float64) for number in numbers]
    toy = module(lr=0.0)
    trainer = make_trainer(
        GradAvgStrategy(**options), max_epochs=1, use_distributed_sampler=False, accumulate_grad_batches=2
    )
    trainer.fit(toy, DataLoader(Stream(batches), batch_size=None) if not sized else make_loader(batches))
    assert [approx(number) for number in expected] == [gradient.item() for gradient in toy.seen.gradients]
    strategy: Any = trainer.strategy
    said = (
        "Stock Lightning divides the last window of an epoch, which has 1 micro-batch, by 2; here it is divided by 1."
    )
    # Nobody knows how many batches a stream has.
    assert sized == (said in strategy._start_line())


class CutOff(Kept):
    """Its first epoch ends within a window, whose gradient is not reduced before the next epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.trainer.current_epoch, batch_idx) == (0, 1) else None


@on_ranks()
def test_a_window_that_is_cut_off():
    """Gradients that are kept over the epochs are reduced with those of the next window, on all ranks alike."""
    found = [cut_off(of, make_loader) for of in (DDPStrategy, GradAvgStrategy)]
    assert approx((1.5 * 10 + (10 + 1 + 20 + 2) / 2) / 2) == found[0][0]
    assert found[0] == found[1]


def cut_off(of: type[DDPStrategy], load: Callable[[list[Tensor]], Any]) -> list[float]:
    """Body: return the gradients of the windows after one that the first epoch has cut off."""
    rank = dist.get_rank()
    toy = CutOff(lr=0.0)
    trainer = make_trainer(of(), max_epochs=2, use_distributed_sampler=False, accumulate_grad_batches=2)
    trainer.fit(toy, load([torch.tensor([number], dtype=torch.float64) for number in (10 + 10 * rank, 1 + rank, 1, 1)]))
    return [gradient.item() for gradient in toy.seen.gradients]


@on_ranks()
def test_a_window_of_a_stream_that_is_cut_off():
    """Nobody knows its length, so it is weighed as under any rule, and given up: its gradient is of each rank alone."""
    found = cut_off(GradAvgStrategy, lambda batches: DataLoader(Stream(batches), batch_size=None))
    assert [approx((10 + 1 + 20 + 2) / 4), approx((10 + 1 + 20 + 2) / 4 + 1)] == found


@pytest.mark.parametrize(("module", "expected"), [(Toy, [1.5, 3.5, 6.0]), (Kept, [1.5, 1.5 + 3.5, 1.5 + 3.5 + 6.0])])
@on_ranks()
def test_ranks_that_have_fewer_batches_by_hand(module, expected):
    """The means are those of 1 and 2, of 3 and 4, and 6: what was there before is not multiplied."""
    toy, batches = module(lr=0.0), [[[1.0], [3.0]], [[2.0], [4.0], [6.0]]][dist.get_rank()]
    trainer = make_trainer(GradAvgStrategy(), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(toy, make_loader(batches))
    assert [approx(number) for number in expected] == [gradient.item() for gradient in toy.seen.gradients]


class Watched(Toy):
    """Notes whether the last training batch is alive in the validation that follows."""

    last: TensorWeakRef
    is_alive: bool

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        copy = batch.clone()
        if self.trainer.training:
            self.last = TensorWeakRef(copy)
        return copy

    def on_validation_start(self) -> None:
        gc.collect()
        self.is_alive = self.last() is not None

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
@on_ranks()
def test_a_batch_is_freed_when_stock_frees_it(reduction):
    found = []
    for strategy in (DDPStrategy(), GradAvgStrategy(reduction=reduction)):
        toy = Watched(lr=0.0)
        trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, num_sanity_val_steps=0)
        trainer.fit(toy, make_loader([[1.0], [2.0]]), make_loader([[1.0]]))
        found.append(toy.is_alive)
    assert [False, False] == found


def backward_twice(nets: Nets, batch: Tensor, index: int) -> None:
    loss = both(nets, batch)
    nets.manual_backward(loss)
    nets.manual_backward(loss)


def marked_twice(nets: Nets, batch: Tensor, index: int) -> Tensor:
    """Let DDP see a gradient of the same parameters twice in a backward."""
    once: Any = checkpoint(nets.first, batch.requires_grad_(), use_reentrant=True)
    again: Any = checkpoint(nets.first, once, use_reentrant=True)
    return loss_of(nets.second, again)


def changed_in_place(nets: Nets, batch: Tensor, index: int) -> Tensor:
    hidden = nets.first(batch).exp()
    loss = hidden.square().mean() + loss_of(nets.second, batch)
    hidden.add_(1)
    return loss


def by_manual_backward(nets: Nets, batch: Tensor, index: int) -> Tensor:
    loss = both(nets, batch)
    nets.manual_backward(loss)
    return loss


ERRORS: Mapping[str, Scenario] = {
    "unused parameters": Scenario(lambda nets, batch, index: loss_of(nets.first, batch)),
    "unused parameters by hand": Scenario(
        lambda nets, batch, index: nets.manual_backward(loss_of(nets.first, batch)), manual=True
    ),
    "a graph that is gone": Scenario(backward_twice, manual=True),
    "a gradient that comes twice": Scenario(marked_twice, options=UNUSED),
    "a change in place": Scenario(changed_in_place),
    "a loss of several numbers": Scenario(lambda nets, batch, index: nets.first(batch) + nets.second(batch)),
    "a loss without a graph": Scenario(lambda nets, batch, index: torch.zeros(())),
    "a loss without a graph by hand": Scenario(
        lambda nets, batch, index: nets.manual_backward(torch.zeros(())), manual=True
    ),
    "a dict without a loss": Scenario(lambda nets, batch, index: {"losses": both(nets, batch)}),
    "a result of another type": Scenario(lambda nets, batch, index: "loss"),
    "a backward by hand in automatic optimization": Scenario(by_manual_backward),
}


class InItsOwnWords(DDPStrategy):
    """Leaves DDP's words about unused parameters: Lightning replaces them by the advice to name another strategy."""

    def on_exception(self, exception: BaseException) -> None:
        pass


def fail(name: str, of: type[DDPStrategy]) -> None:
    fit(Nets(ERRORS[name]), of)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_that_of_stock_ddp(world, name):
    ours, stock = (world(2).run_expecting_errors(fail, name, of) for of in (GradAvgStrategy, InItsOwnWords))
    assert None not in stock
    # Behind DDP's words about unused parameters stands the option beside the user's own.
    assert stock == [one._replace(message=one.message.partition("\nHere it is strategy=")[0]) for one in ours]


class Freed(NamedTuple):
    """What was freed of a run."""

    model: bool  # the wrapped model, when the run had ended
    module: bool  # when nobody used the run any more


class Wrapped(Toy):
    """Notes the wrapped model."""

    model: weakref.ref[Any]

    def on_train_start(self) -> None:
        self.model = weakref.ref(self.trainer.strategy.model)


def train_and_forget(make_strategy: Callable[[], DDPStrategy]) -> Freed:
    strategy = make_strategy()  # here: an assertion keeps the arguments of what it calls
    toy = Wrapped(lr=0.0)
    module = weakref.ref(toy)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(toy, make_loader([[1.0], [2.0]]))
    gc.collect()
    is_model_freed = toy.model() is None
    del toy, trainer, strategy
    gc.collect()
    return Freed(is_model_freed, module() is None)


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "weighted_mean": {"reduction": "weighted_mean"},
    "a hook": {"reduction": "weighted_mean", "ddp_comm_hook": allreduce_hook},
    "single_device": {"equivalent_to": "single_device"},
    "data_parallel": {"equivalent_to": "data_parallel"},
    "reproducible": {"reproducible": True, "num_replicas": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks()
def test_a_model_is_freed_when_stock_frees_it(name):
    """DDP holds the hook, and Python sees no circle through DDP."""
    assert Freed(model=True, module=True) == train_and_forget(DDPStrategy)
    assert Freed(model=True, module=True) == train_and_forget(partial(GradAvgStrategy, **OPTIONS[name]))
