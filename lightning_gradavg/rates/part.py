"""The part that has the learning rate follow the global batch, and checkpoints agree with the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any, cast

from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_gradavg.lightning_internals import TrainingLoop, finds_learning_rate, last_rates
from lightning_gradavg.methods import replaced
from lightning_gradavg.part import Part, Run, Saved
from lightning_gradavg.rates.groups import LearningRates
from lightning_gradavg.rates.recipe import RunRecipe

__all__ = ["Rates", "ScaledRates", "rates_of"]


class Rates(Part):
    """Keeps the recipe of a run, and compares it with that of a checkpoint. Nothing is scaled."""

    def __init__(self, recipe: RunRecipe, *, allow_change: bool, may_differ: bool) -> None:
        self.recipe = recipe
        self._allow_change, self._may_differ = allow_change, may_differ
        self._sizes: list[int | None] = []
        self._accumulation = 1
        self._loaded: Saved | None = None
        self._optimizers: Sequence[Optimizer] = ()

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers of the run."""
        self._optimizers = optimizers

    def prepare_loaders(self, stage: str) -> None:
        """Forget the sizes of earlier training loaders."""
        self._sizes = [] if stage == "train" else self._sizes

    def add_loader(self, size: int | None, accumulation: int) -> None:
        """Note the batch size of a training loader, None if it does not tell, and the loader batches per step."""
        self._sizes.append(size)
        self._set_batch(accumulation)

    def _set_batch(self, accumulation: int) -> None:
        self._accumulation = accumulation
        self.recipe.set_batch(self._sizes, world_size=self.run.world.size, accumulation=accumulation)

    def begin(self, accumulation: int) -> list[str]:
        """Begin training, and return what does not fit together in the recipe."""
        self._follow(accumulation)
        self._compare()
        return self.recipe.contradictions(self.run.num_nodes)

    def arrive(self, batch: Any, accumulation: int) -> None:
        """Begin a batch: follow what may have changed since the last one."""
        self._follow(accumulation)

    def _follow(self, accumulation: int) -> None:
        if accumulation != self._accumulation:
            self._set_batch(accumulation)

    def end(self) -> None:
        """End a step in which something failed."""

    def learning_rates(self) -> tuple[float, ...]:
        """Return those that the step in progress or the next one uses, of every group of every optimizer."""
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return tuple(float(group["lr"]) for group in groups if "lr" in group)

    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state as it is saved."""
        return state

    def load_optimizers(self, saved: Saved | None) -> None:
        """Go on from a checkpoint, whose states of optimizers are about to be loaded."""

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the recipe."""
        saved |= {"recipe": self.recipe.settings(), "rates": None}

    def load(self, saved: Saved) -> None:
        """Remember what the checkpoint's run was, until this one's loaders are known."""
        self._loaded = saved

    def _compare(self) -> None:
        """Refuse to continue a run under another recipe than it was begun with."""
        loaded, self._loaded = self._loaded, None
        if loaded is None or self._may_differ:
            return
        if "recipe" not in loaded:
            rule = self.recipe.rule
            rank_zero_info(
                "GradAvgStrategy: the checkpoint was saved by another strategy and does not say how gradients were"
                f" reduced; from now on they are reduced by reduction={rule.name!r}, g = {rule.formula}"
            )
        differences = self.recipe.differences(loaded.get("recipe", {}))
        if not differences:
            return
        message = "the checkpoint was trained under another recipe:\n  " + "\n  ".join(differences)
        if not self._allow_change:
            raise ValueError(f"{message}\nChange it back, or pass allow_recipe_change=True if this is intended.")
        rank_zero_info(f"GradAvgStrategy: {message}")


class ScaledRates(Rates):
    """Has optimizers hold effective learning rates from the arrival of a batch until they have stepped.

    In manual optimization they hold them until `training_step` begins, and within every `step`.
    """

    def __init__(self, recipe: RunRecipe, *, allow_change: bool) -> None:
        super().__init__(recipe, allow_change=allow_change, may_differ=False)
        self._rates = LearningRates(recipe.lr_scaling, recipe.lr_warmup_steps)
        self._finds_lr = False
        self._schedulers: dict[LRScheduler, Any] = {}
        self._monitors, self._skipping = ExitStack(), ExitStack()

    def setup(self, run: Run) -> None:
        """Let go of an earlier run: not at its end, after which a checkpoint can still be saved."""
        super().setup(run)
        self.end()
        self._rates.attach(())

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers, whose groups hold base values."""
        super().setup_optimizers(optimizers)
        self._rates.attach(optimizers)

    def _set_batch(self, accumulation: int) -> None:
        super()._set_batch(accumulation)
        self._rates.set_scale(self.recipe.batch.scale)

    def _follow(self, accumulation: int) -> None:
        found, self._finds_lr = self._finds_lr, finds_learning_rate(self.run.trainer)
        if found and not self._finds_lr:
            # The learning rate was found with this global batch: scaling it again would count the batch twice.
            self.recipe.found_here()
            self._set_batch(accumulation)
        super()._follow(accumulation)

    def arrive(self, batch: Any, accumulation: int) -> None:
        """Begin a batch, and with it a step."""
        # Callbacks may move batches at any time; of a batch that is None Lightning calls no hook.
        if not TrainingLoop(self.run.trainer.fit_loop).between_batches or batch is None:
            return
        self._end()
        super().arrive(batch, accumulation)
        self._schedulers = {scheduler: last_rates(scheduler) for scheduler in self._known_schedulers()}
        self._begin()
        if is_overridden("on_train_batch_start", self.run.module):
            self._skipping.enter_context(_wrapped(self.run.module, "on_train_batch_start", self._unless_skipped))

    def _known_schedulers(self) -> Iterator[LRScheduler]:
        """Yield the schedulers that Lightning steps, and those that the module or a callback keeps."""
        trainer: Any = self.run.trainer
        kept = chain.from_iterable(vars(owner).values() for owner in (self.run.module, *trainer.callbacks))
        items = chain.from_iterable(value if isinstance(value, list) else [value] for value in kept)
        for item in chain(items, (config.scheduler for config in trainer.lr_scheduler_configs)):
            if isinstance(item, LRScheduler) and item.optimizer in self._optimizers:
                yield item

    def begin(self, accumulation: int) -> list[str]:
        """Begin training, and return what does not fit together in the recipe."""
        messages = super().begin(accumulation)
        for callback in cast(Any, self.run.trainer).callbacks:
            if isinstance(callback, LearningRateMonitor):
                self._monitors.enter_context(_wrapped(callback, "on_train_epoch_start", self._in_force))
        return messages

    def _in_force(self, hook: Callable[..., Any], *args: Any) -> None:
        """Have a monitor see effective values although no step is in progress."""
        self._begin()
        try:
            hook(*args)
        finally:
            self._rates.end()

    def _unless_skipped(self, hook: Callable[..., Any], *args: Any) -> Any:
        """End the step of a batch that is skipped: Lightning steps schedulers without telling the strategy."""
        self._skipping.close()
        response = hook(*args)
        if response == -1:
            self._end()
        return response

    def _begin(self) -> None:
        if not self._finds_lr:
            self._rates.begin()

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Surround a training step, within an optimizer step or not, as where the window goes on."""
        if self.run.module.automatic_optimization:
            self._begin()
        else:
            self._end()
        try:
            yield
        finally:
            self._end()

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Have a step use effective values, and count it."""
        if self._finds_lr:
            return step()
        with self._rates.step(optimizer):
            result = step()
        self._end()
        return result

    def _end(self) -> None:
        """End what is not within an optimizer step."""
        if not self._rates.end():
            return
        stepped = [type(each).__name__ for each, last in self._schedulers.items() if last_rates(each) is not last]
        self._schedulers = {}
        if stepped:
            raise RuntimeError(
                f"a {stepped[0]} stepped between the arrival of a batch and the end of the optimizer's step, where"
                " parameter groups hold the learning rate as lr_scaling has scaled it. Step it after the optimizer, as"
                " in on_train_batch_end, or return it from configure_optimizers."
            )

    def end(self) -> None:
        """End a step in which something failed."""
        self._skipping.close()
        self._schedulers = {}
        self._rates.end()

    def learning_rates(self) -> tuple[float, ...]:
        """Return those that the step in progress or the next one uses, of every group of every optimizer."""
        return tuple(float(lr) for optimizer in self._optimizers for lr in self._rates.of(optimizer))

    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with base values in it."""
        return self._rates.base_state_dict(optimizer, state) if state else state

    def load_optimizers(self, saved: Saved | None) -> None:
        """Go on with the warm-up where the checkpoint's run was."""
        warmed_up = (saved or {}).get("rates")
        if warmed_up is not None:
            self._rates.load_state_dict(warmed_up)

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the recipe, and how far the warm-up is."""
        super().save(saved, checkpoint)
        saved["rates"] = self._rates.state_dict()

    def teardown(self) -> None:
        """Let go of callbacks."""
        self._monitors.close()

    def describe(self) -> str:
        """Return the scale, and what it makes of the learning rates."""
        rates = ", ".join(f"{lr:g}" for lr in dict.fromkeys(self.learning_rates()))
        return f"; scale {self.recipe.batch.scale:g}, learning rate x {self.recipe.lr_scale:g}, at first {rates}"


def _wrapped(owner: object, name: str, wrapper: Callable[..., Any]) -> AbstractContextManager[None]:
    """Have an object call a wrapper with its hook of this name."""
    hook = getattr(owner, name)
    # A function, of which a copy of the owner copies nothing.
    return replaced(owner, name, lambda *args: wrapper(hook, *args))


def rates_of(recipe: RunRecipe, *, allow_change: bool, may_differ: bool) -> Rates:
    """Return the part that serves a recipe.

    Args:
        recipe: The recipe.
        allow_change: Whether a checkpoint of another recipe may be resumed.
        may_differ: Whether a checkpoint need not agree, because this run trains as stock DDP does.
    """
    if recipe.scales:
        return ScaledRates(recipe, allow_change=allow_change)
    return Rates(recipe, allow_change=allow_change, may_differ=may_differ)
