"""The part that has the learning rate follow the global batch, and checkpoints agree with the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_gradavg.lightning_internals import TrainingLoop, finds_learning_rate, last_rates
from lightning_gradavg.methods import replaced
from lightning_gradavg.part import Part, Run, Saved
from lightning_gradavg.rates.groups import LearningRates
from lightning_gradavg.rates.recipe import RunRecipe

__all__ = ["Rates"]


class Rates(Part):
    """Keeps the recipe of a run, and compares it with that of a checkpoint.

    If the recipe scales learning rates, optimizers hold effective ones from the arrival of a batch until they have
    stepped. In manual optimization they hold them until `training_step` begins, and within every `step`.

    Args:
        recipe: The recipe.
        allow_change: Whether a checkpoint of another recipe may be resumed.
        may_differ: Whether a checkpoint need not agree, because this run trains as stock DDP does.
    """

    def __init__(self, recipe: RunRecipe, *, allow_change: bool, may_differ: bool) -> None:
        self.recipe = recipe
        self._allow_change, self._may_differ = allow_change, may_differ
        self._rates = LearningRates(recipe.lr_scaling, recipe.lr_warmup_steps)
        self._scales = recipe.scales
        self._sizes: list[int | None] = []
        self._accumulation = 1
        self._loaded: Saved | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._finds_lr = self._stepping = False
        self._schedulers: dict[LRScheduler, Any] = {}
        self._hooks = ExitStack()

    def setup(self, run: Run) -> None:
        """Let go of an earlier run: not at its end, after which a checkpoint can still be saved."""
        super().setup(run)
        self.end()
        self._rates.attach(())

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers of the run, whose groups hold base values."""
        self._optimizers = optimizers
        self._rates.attach(optimizers if self._scales else ())

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
        self._rates.set_scale(self.recipe.batch.scale)

    def begin(self, accumulation: int) -> list[str]:
        """Begin training, and return what does not fit together in the recipe."""
        self._follow(accumulation)
        self._compare()
        if self._scales:
            trainer: Any = self.run.trainer
            self._replace_hook(trainer.fit_loop.epoch_loop, "update_lr_schedulers", self._at_rest)
            for callback in trainer.callbacks:
                if isinstance(callback, LearningRateMonitor):
                    self._replace_hook(callback, "on_train_epoch_start", self._in_force)
        return self.recipe.contradictions(self.run.num_nodes)

    def _replace_hook(self, owner: object, name: str, wrapper: Callable[..., None]) -> None:
        hook = getattr(owner, name)
        # A function, of which a copy of the owner copies nothing.
        self._hooks.enter_context(replaced(owner, name, lambda *args, **kwargs: wrapper(hook, *args, **kwargs)))

    def _at_rest(self, hook: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Have schedulers see base values, also those of a batch that `on_train_batch_start` skips."""
        self.end()
        hook(*args, **kwargs)

    def _in_force(self, hook: Callable[..., None], *args: Any) -> None:
        """Have a monitor see effective values although no step is in progress."""
        self._begin()
        hook(*args)
        self._rates.end()

    def arrive(self, batch: Any, accumulation: int) -> None:
        """Begin a batch, and with it a step."""
        if not self._scales:
            self._follow(accumulation)
        # Callbacks may move batches at any time; of a batch that is None Lightning calls no hook.
        elif batch is not None and TrainingLoop(self.run.trainer.fit_loop).between_batches:
            self._end()
            self._follow(accumulation)
            self._schedulers = {scheduler: last_rates(scheduler) for scheduler in self._known_schedulers()}
            self._begin()

    def _known_schedulers(self) -> Iterator[LRScheduler]:
        """Yield the schedulers that Lightning steps, and those that the module keeps."""
        configured = (config.scheduler for config in self.run.trainer.lr_scheduler_configs)
        for each in (*vars(self.run.module).values(), *configured):
            if isinstance(each, LRScheduler) and each.optimizer in self._optimizers:
                yield each

    def _follow(self, accumulation: int) -> None:
        """Follow what may have changed since the last batch."""
        found, self._finds_lr = self._finds_lr, self._scales and finds_learning_rate(self.run.trainer)
        if found and not self._finds_lr:
            # The learning rate was found with this global batch: scaling it again would count the batch twice.
            self.recipe.found_here()
            self._rates.set_scale(self.recipe.batch.scale)
        if accumulation != self._accumulation:
            self._set_batch(accumulation)

    def training_step(self) -> AbstractContextManager[None]:
        """Surround a training step, within an optimizer step or not, as where the window goes on."""
        return self._step_alone() if self._scales and not self._stepping else nullcontext()

    @contextmanager
    def _step_alone(self) -> Iterator[None]:
        if not self.run.module.automatic_optimization:
            self._end()
        yield
        self._end()

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Have a step use effective values, and count it."""
        if self._finds_lr or not self._scales:
            return step()
        with self._rates.step(optimizer):
            self._stepping = True
            try:
                result = step()
            finally:
                self._stepping = False
        self._require_schedulers_at_rest()
        return result

    def _begin(self) -> None:
        if not self._finds_lr:
            self._rates.begin()

    def _end(self) -> None:
        self._rates.end()
        self._require_schedulers_at_rest()

    def _require_schedulers_at_rest(self) -> None:
        stepped = [type(each).__name__ for each, last in self._schedulers.items() if last_rates(each) is not last]
        self._schedulers = {}
        if stepped:
            raise RuntimeError(
                f"a {stepped[0]} stepped between the arrival of a batch and the end of the optimizer's step, where"
                " parameter groups hold the learning rate as lr_scaling has scaled it. Step it after the optimizer, as"
                " in on_train_batch_end, or return it from configure_optimizers."
            )

    def end(self) -> None:
        """End a step in which something failed, or that is skipped."""
        self._schedulers = {}
        self._rates.end()

    def learning_rates(self) -> tuple[float, ...]:
        """Return those that the step in progress or the next one uses, of every group of every optimizer."""
        return tuple(float(lr) for optimizer in self._optimizers for lr in self._rates.of(optimizer))

    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state as it is saved, with base values in it."""
        return self._rates.base_state_dict(optimizer, state) if state else state

    def load_optimizers(self, saved: Saved | None) -> None:
        """Go on with the warm-up where the checkpoint's run was; the states of optimizers are about to be loaded."""
        warmed_up = (saved or {}).get("rates")
        if warmed_up is not None and self._scales:
            self._rates.load_state_dict(warmed_up)

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the recipe, and how far the warm-up is."""
        saved |= {"recipe": self.recipe.settings(), "rates": self._rates.state_dict() if self._scales else None}

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

    def teardown(self) -> None:
        """Let go of Lightning's hooks."""
        self._hooks.close()

    def describe(self) -> str:
        """Return the scale, and what it makes of the learning rates."""
        if not self._scales:
            return ""
        rates = ", ".join(f"{lr:g}" for lr in dict.fromkeys(self.learning_rates()))
        return f"; scale {self.recipe.batch.scale:g}, learning rate x {self.recipe.lr_scale:g}, at first {rates}"
