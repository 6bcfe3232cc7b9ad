"""The part that has the learning rate follow the global batch, and checkpoints agree with the recipe."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_gradavg._lightning.internals import finds_learning_rate
from lightning_gradavg._lightning.methods import replaced
from lightning_gradavg._lightning.options import Options
from lightning_gradavg._lightning.part import Part, Saved
from lightning_gradavg._support.text import plural
from lightning_gradavg.rates.groups import ScaledGroups
from lightning_gradavg.rates.scaling import (
    BatchScale,
    ScaleFunction,
    batch_scale,
    counted_twice,
    resolve_scaling,
    warmup_factor,
)

__all__ = ["Rates"]

_Result = TypeVar("_Result")


class Rates(Part):
    """Scales the learning rates of a run by its global batch, and refuses to resume another recipe.

    The strategy calls, in this order:

    1. `load`, with what a checkpoint says of its recipe.
    2. `setup_optimizers`, with the optimizers of the run.
    3. `load_optimizers`, before the optimizers load a checkpoint.
    4. `prepare_loaders` and then `add_loader` for each training loader: these give the global batch.
    5. `on_train_start`: raises an error about what cannot be scaled or resumed.
    6. `on_train_batch_start`, `optimizer_step` and `optimizer_state` (for checkpoints), again and again.
    7. `teardown`. If the run fails, `restore_groups` comes first.

    What the groups of an optimizer hold. `ScaledGroups` has the states of a single group:

    | moment | automatic optimization | manual optimization |
    |---|---|---|
    | before a batch | base values | base values |
    | from `on_train_batch_start` on | scaled values | base values |
    | within the optimizer's `step` | scaled values | scaled values |
    | after it, or at the end of a batch without a step | base values | base values |
    | where schedulers step, in validation, in a checkpoint | base values | base values |
    | where a `LearningRateMonitor` reads them | scaled values | scaled values |

    Attributes:
        batch: The global and the base batch; of scale 1 until the training loaders are known.
        scales: Whether the learning rate follows the global batch.
    """

    def __init__(
        self,
        options: Options,
        *,
        lr_scaling: str | ScaleFunction = "none",
        base_batch_size: int | None = None,
        base_world_size: int = 1,
        lr_warmup_steps: int = 0,
        allow_change: bool = False,
        stock: bool = False,
    ) -> None:
        """Check the recipe, before there is a loader or an optimizer.

        Args:
            options: How batches are split and losses reduced.
            lr_scaling: As of `GradAvgStrategy`, and so are the next three.
            base_batch_size: The base batch in samples.
            base_world_size: Ranks of the base run.
            lr_warmup_steps: Optimizer steps until the full factor.
            allow_change: Whether a checkpoint of another recipe may be resumed.
            stock: Whether gradients are those of stock DDP, which resumes a checkpoint of any recipe.

        Raises:
            ValueError: If a number is out of range, or the numbers contradict each other.
        """
        self._options = options
        self._scaling = resolve_scaling(lr_scaling)
        self._base_batch_size = base_batch_size
        self._base_world_size = base_world_size
        self._warmup_steps = lr_warmup_steps
        self._allow_change = allow_change
        self.scales = self._scaling.name != "none"
        self._may_differ = stock and not self.scales
        if lr_warmup_steps < 0:
            raise ValueError(f"lr_warmup_steps={lr_warmup_steps} must be 0 or more.")
        if lr_warmup_steps > 0 and not self.scales:
            raise ValueError(
                f"lr_warmup_steps={lr_warmup_steps} needs an lr_scaling other than 'none'. Choose one, or warm up with"
                " a scheduler."
            )
        self._measure_batch([1], accumulation=1, world_size=1)  # only for its errors

        # What is known of the training loaders.
        self.batch = BatchScale(1, 1, known=False)
        self._loader_sizes: list[int | None] = []  # None for a loader that does not tell
        self._accumulation = 1  # the one that `batch` was computed with
        self._size_in_search: int | None = None  # the global batch with which a learning rate was searched for

        # What happened to the optimizers. An optimizer is in `_in_step` from the scaling of its groups to `restore`.
        self._loaded_recipe: Saved = {}
        self._steps: MutableMapping[Optimizer, int] = {}  # optimizer steps taken, for the warm-up
        self._in_step: dict[Optimizer, ScaledGroups] = {}
        self._hooks = ExitStack()  # hooks of Lightning that are replaced while the run trains

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one optimizer step over ranks and window; None where no loader tells, or none is there yet."""
        if not self.batch.known:
            return None
        return self.batch.global_batch_size

    @property
    def lr_scale(self) -> float:
        """What the learning rate is multiplied by once the warm-up is over."""
        return self._scaling.at(self.batch.scale)

    @property
    def _optimizers(self) -> Sequence[Optimizer]:
        """Those that the run trains with now: a user may replace them while it trains."""
        return self.run.trainer.optimizers

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers of the run, whose groups hold base values. Those that are known keep their steps."""
        self.restore_groups()
        steps = {optimizer: self._steps.get(optimizer, 0) for optimizer in optimizers}
        # Weak: an optimizer that a user replaces is not kept alive, with its state, by its number of steps.
        self._steps = WeakKeyDictionary(steps)

    def prepare_loaders(self, stage: str) -> None:
        """Forget the sizes of earlier training loaders."""
        if stage == "train":
            self._loader_sizes = []

    def add_loader(self, size: int | None) -> None:
        """Note the batch size of a training loader, None if it does not tell."""
        self._loader_sizes.append(size)
        self._set_batch()

    def _set_batch(self) -> None:
        """Set the global and the base batch of the next steps, from the loaders and the accumulation."""
        # The groups may hold scaled values, of the batch so far
        # (`test_groups_hold_scaled_values_in_a_step_and_base_values_between`).
        self.restore_groups()
        self._accumulation = self.run.loop.accumulation
        batch = self._measure_batch(self._loader_sizes, self._accumulation, self.run.world.size)
        # A learning rate that `Tuner.lr_find` finds was found with this global batch, which is therefore its base
        # batch. A scale other than 1, in the search or in the run after it, would count the batch twice.
        if self.scales and finds_learning_rate(self.run.trainer):
            self._size_in_search = batch.global_batch_size
        if self._size_in_search is not None:
            batch = batch._replace(base_batch_size=self._size_in_search)
        self.batch = batch

    def _measure_batch(self, loader_sizes: Sequence[int | None], accumulation: int, world_size: int) -> BatchScale:
        return batch_scale(
            loader_sizes,
            accumulation,
            world_size=world_size,
            split_batches=self._options.split_batches,
            base_batch_size=self._base_batch_size,
            base_world_size=self._base_world_size,
        )

    def on_train_start(self) -> None:
        """Begin training, or raise a ValueError about what cannot be scaled or resumed."""
        self._set_batch()
        self._compare_recipes()
        if not self.scales:
            return
        warning = counted_twice(self._options.rule.name, self._scaling, self.batch.scale, self.run.num_nodes)
        if warning:
            rank_zero_warn(warning)
        # Scaling once raises an error about a group that cannot be scaled now, and not in the first batch.
        self.scale_groups()
        self.restore_groups()
        self._replace_hooks()

    def _replace_hooks(self) -> None:
        """Have schedulers see base values, and monitors of learning rates scaled ones."""
        trainer: Any = self.run.trainer
        # Lightning's loop steps the schedulers of a batch also if no optimizer stepped in it.
        self._surround(trainer.fit_loop.epoch_loop, "update_lr_schedulers", self.restore_groups)
        for callback in trainer.callbacks:
            if not isinstance(callback, LearningRateMonitor):
                continue
            self._surround(callback, "on_train_epoch_start", self.scale_groups)
            # In automatic optimization a batch has scaled values already, and keeps them after this hook.
            if not self.run.module.automatic_optimization:
                self._surround(callback, "on_train_batch_start", self.scale_groups)

    def _surround(self, owner: object, name: str, before: Callable[[], None]) -> None:
        """Replace a hook by one that calls `before` first, and restores all groups afterwards."""
        hook = getattr(owner, name)

        # A function: of a bound method, `copy.deepcopy` of the owner would copy this part, too.
        def surrounded(*args: object, **kwargs: object) -> None:
            before()
            hook(*args, **kwargs)
            self.restore_groups()

        self._hooks.enter_context(replaced(owner, name, surrounded))

    def on_train_batch_start(self) -> None:
        """Scale the groups for the batch that arrives; in automatic optimization they stay so until the step.

        The strategy calls this before the hooks of the user, which see the scaled values.
        """
        accumulation_changed = self.run.loop.accumulation != self._accumulation
        # In its last pass, SWA makes the window as long as the epoch, so that Lightning takes no step in it.
        if accumulation_changed and not self.run.loop.skips_backward:
            self._set_batch()
        if self.scales and self.run.module.automatic_optimization:
            # The batch before may have ended without a step.
            self.restore_groups()
            self.scale_groups()

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], _Result]) -> _Result:
        """Call `step` with scaled values in the groups of its optimizer, count it unless it raises, and restore them.

        The optimizer need not be one that `configure_optimizers` returned.
        """
        self._scale_groups_of(optimizer)
        try:
            result = step()
            self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        finally:
            self._restore_groups_of(optimizer)
        return result

    def scale_groups(self) -> None:
        """Have all groups of the run hold scaled values until `restore_groups`. Does nothing without a scaling."""
        for optimizer in self._optimizers:
            self._scale_groups_of(optimizer)

    def _scale_groups_of(self, optimizer: Optimizer) -> None:
        if not self.scales:
            return
        if optimizer in self._in_step:
            self._in_step[optimizer].scale_new_groups()
            return
        factor = self._factor(optimizer)
        self._in_step[optimizer] = ScaledGroups(optimizer, self._scaling, self.batch.scale, factor)

    def restore_groups(self) -> None:
        """Have all groups that hold scaled values hold base values again."""
        for optimizer in list(self._in_step):
            self._restore_groups_of(optimizer)

    def _restore_groups_of(self, optimizer: Optimizer) -> None:
        scaled_groups = self._in_step.pop(optimizer, None)
        if scaled_groups is not None:
            scaled_groups.restore()

    def _factor(self, optimizer: Optimizer) -> float:
        return warmup_factor(self.lr_scale, self._steps.get(optimizer, 0), self._warmup_steps)

    def learning_rates(self) -> tuple[float, ...]:
        """Return those that the step in progress or the next one uses, of every group of every optimizer."""
        rates = []
        for optimizer in self._optimizers:
            if optimizer in self._in_step:
                self._in_step[optimizer].scale_new_groups()
                factor = 1.0
            else:
                factor = self._factor(optimizer)
            for group in optimizer.param_groups:
                # An optimizer may choose its own rates, as Adafactor of Transformers does with `lr=None`.
                if group.get("lr") is not None:
                    rates.append(float(group["lr"] * factor))
        return tuple(rates)

    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state as it is saved, with base values in it."""
        # The state is empty on ranks that do not save it.
        if not state or optimizer not in self._in_step:
            return state
        return self._in_step[optimizer].with_base_values(state)

    def load_optimizers(self, saved: Saved | None) -> None:
        """Resume the warm-up where the checkpoint's run was; the states of optimizers are about to be loaded."""
        if saved is None or saved.get("rates") is None:
            return
        # A run with another number of optimizers keeps the steps of those that both have.
        for optimizer, steps in zip(list(self._steps), saved["rates"]["steps"], strict=False):
            self._steps[optimizer] = steps

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the recipe, and how far the warm-up is."""
        saved["recipe"] = self._recipe()
        saved["rates"] = None
        if self.scales:
            saved["rates"] = {"steps": [self._steps.get(optimizer, 0) for optimizer in self._optimizers]}

    def load(self, saved: Saved) -> None:
        """Remember the recipe of the checkpoint, until the loaders of this run are known."""
        self._loaded_recipe = saved.get("recipe", {})

    def _recipe(self) -> dict[str, Any]:
        """Return what a run that continues this one must agree with, free of the world size."""
        base_batch_size = None
        # Without a scaling the base says nothing, and a search for a learning rate would seem to change the recipe.
        if self.scales and self.batch.known:
            base_batch_size = self.batch.base_batch_size
        return {
            "reduction": self._options.rule.name,
            "split_batches": self._options.split_batches,
            "equivalent_to": self._options.preset,
            "num_replicas": self._options.shaping_replicas(self.run.world.size),
            "global_batch_size": self.global_batch_size,
            "lr_scaling": self._scaling.name,
            "base_batch_size": base_batch_size,
            "lr_warmup_steps": self._warmup_steps,
        }

    def _compare_recipes(self) -> None:
        """Refuse to continue a run under another recipe than it was begun with."""
        saved = self._loaded_recipe
        self._loaded_recipe = {}
        if self._may_differ:
            return
        differences = []
        for name, value in self._recipe().items():
            saved_value = saved.get(name)
            # None is a value that the checkpoint does not know, such as a batch size that no loader told.
            if saved_value is not None and saved_value != value:
                differences.append(f"{name}: {saved_value!r} in the checkpoint, now {value!r}")
        if not differences:
            return
        message = "the checkpoint was trained under another recipe:\n  " + "\n  ".join(differences)
        if not self._allow_change:
            raise ValueError(f"{message}\nChange it back, or pass allow_recipe_change=True if this is intended.")
        rank_zero_info(f"GradAvgStrategy: {message}")

    def teardown(self) -> None:
        """Restore the hooks of Lightning."""
        self._hooks.close()

    def describe(self) -> str:
        """Return the scale, and what it makes of the learning rates."""
        if not self.scales:
            return ""
        distinct_rates = dict.fromkeys(self.learning_rates())
        rates = ", ".join(f"{rate:g}" for rate in distinct_rates)
        warmup = ""
        if self._warmup_steps > 0:
            warmup = f" after {plural(self._warmup_steps, 'warm-up step')}"
        return (
            f"; global batch / base batch = {self.batch.scale:g}, so learning rate x {self.lr_scale:g}{warmup},"
            f" now {rates}"
        )
