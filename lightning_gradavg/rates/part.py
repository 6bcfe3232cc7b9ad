"""The part that has the learning rate follow the global batch, and checkpoints agree with the recipe."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer
from lightning.pytorch.tuner import lr_finder
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_gradavg._lightning.options import Options
from lightning_gradavg._lightning.part import Part, Run, Saved
from lightning_gradavg._support.text import plural
from lightning_gradavg.rates.scaling import (
    BatchScale,
    Hyperparameters,
    ScaleFunction,
    batch_scale,
    counted_twice,
    resolve_scaling,
    warmup_factor,
)
from lightning_gradavg.rates.steps import ScaledSteps

__all__ = ["Rates"]

_Result = TypeVar("_Result")

_UNNAMED = "a function without a name"
"""What a recipe says of a lambda, a `partial` or a callable object as `lr_scaling`."""


class Rates(Part):
    """Scales the learning rates of a run by its global batch, and refuses to resume another recipe.

    The strategy calls, in this order:

    1. `load`, with what a checkpoint says of its recipe.
    2. `load_optimizers`, before the optimizers load a checkpoint.
    3. `prepare_loaders` and then `add_loader` for each training loader: these give the global batch.
    4. `on_train_start`: raises an error about what cannot be scaled or resumed, and scales every `step` from here on.
    5. `attach`, with optimizers that replace others.
    6. `on_train_batch_start`, `optimizer_step` and `end_failed_steps`, again and again.
    7. `teardown`.

    Groups hold scaled values only while their optimizer computes its update (`ScaledSteps`).

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
        global_batch_size: int | None = None,
        lr_warmup_steps: int = 0,
        allow_change: bool = False,
        stock: bool = False,
    ) -> None:
        """Check the recipe, before there is a loader or an optimizer.

        Args:
            options: How batches are split and losses reduced.
            lr_scaling: As of `GradAvgStrategy`, and so are the next four.
            base_batch_size: The base batch in samples.
            base_world_size: Ranks of the base run.
            global_batch_size: The global batch in samples, where loaders and windows do not tell it.
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
        self._given_batch_size = global_batch_size
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
        # Only for the errors about numbers: no loader is known yet.
        batch_scale(
            [None if global_batch_size is not None else 1],
            world_size=1,
            split_batches=options.split_batches,
            base_batch_size=base_batch_size,
            base_world_size=base_world_size,
            global_batch_size=global_batch_size,
        )

        # What is known of the training loaders.
        self.batch = BatchScale(1, 1, known=False)
        self._loader_sizes: list[int | None] = []  # None for a loader that does not tell
        self._accumulation = 1  # the one that `batch` was computed with
        self._size_in_search: int | None = None  # the global batch with which a learning rate was searched for

        self._loaded_recipe: Saved = {}
        self._steps: MutableMapping[Optimizer, ScaledSteps] = {}
        self._hooks: MutableMapping[Optimizer, list[RemovableHandle]] = {}  # of a run that trains
        self._trains = False

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one optimizer step over ranks and window; None where no loader tells, or none is there yet."""
        if not self.batch.known:
            return None
        return self.batch.global_batch_size

    @property
    def loader_batch_size(self) -> int | None:
        """Samples of one batch of all training loaders together; None where no loader or the user's code tells."""
        is_manual = not self.run.module.automatic_optimization
        if is_manual or self.global_batch_size is None:
            return None
        known_sizes = [size for size in self._loader_sizes if size is not None]
        if len(known_sizes) < len(self._loader_sizes):
            return None
        return sum(known_sizes)

    @property
    def lr_scale(self) -> float:
        """What the learning rate is multiplied by once the warm-up is over."""
        return self._scaling.at(self.batch.scale)

    @property
    def _optimizers(self) -> Sequence[Optimizer]:
        """Those that the run trains with now: a user may replace them while it trains."""
        return self.run.trainer.optimizers

    def setup(self, run: Run) -> None:
        """Begin a run. Optimizers of an earlier one, which a user may return again, keep their number of steps."""
        super().setup(run)
        # Weak: an optimizer that a user replaces is not kept alive, with its state. Not in the constructor, as the
        # strategy is pickled for processes that are spawned.
        self._steps = WeakKeyDictionary(self._steps)
        self._hooks = WeakKeyDictionary()

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
        self._accumulation = self.run.loop.accumulation
        batch = self._measured_batch()
        # A learning rate that `Tuner.lr_find` finds was found with this global batch, which is therefore its base
        # batch. A scale other than 1, in the search or in the run after it, would count the batch twice.
        if self.scales and _finds_learning_rate(self.run.trainer):
            self._size_in_search = batch.global_batch_size
        if self._size_in_search is not None:
            batch = batch._replace(base_batch_size=self._size_in_search)
        self.batch = batch

    def _measured_batch(self) -> BatchScale:
        """Return the global and the base batch, or raise a ValueError if they cannot be known."""
        sizes = self._loader_sizes
        if not self.run.module.automatic_optimization:
            # How many batches an optimizer step has is up to the user's code. The ratio to the batch of a run on other
            # ranks is known all the same.
            sizes = [None] * len(sizes)
            if self._base_batch_size is not None and self._given_batch_size is None:
                raise ValueError(
                    f"base_batch_size={self._base_batch_size} needs the global batch, but in manual optimization your"
                    " training_step decides how many batches an optimizer step has. Give the samples of one optimizer"
                    " step over all ranks by GradAvgStrategy(global_batch_size=...)."
                )
        return batch_scale(
            sizes,
            self._accumulation,
            world_size=self.run.world.size,
            split_batches=self._options.split_batches,
            base_batch_size=self._base_batch_size,
            base_world_size=self._base_world_size,
            global_batch_size=self._given_batch_size,
        )

    def on_train_start(self) -> None:
        """Begin to scale the steps, or raise a ValueError about what cannot be scaled or resumed."""
        self._set_batch()
        self._compare_recipes()
        if not self.scales:
            return
        warning = counted_twice(self._options.rule.name, self._scaling, self.batch.scale, self.run.num_nodes)
        if warning:
            rank_zero_warn(warning)
        for optimizer in self._optimizers:
            # An error about a group that cannot be scaled now, and not in the first batch.
            self._steps_of(optimizer).check(optimizer)
        self._trains = True
        self.attach(self._optimizers)

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Scale the steps of these optimizers from now on, if the run trains. Others keep being scaled."""
        if not self._trains:
            return
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = self._steps_of(optimizer).attach(optimizer)

    def _steps_of(self, optimizer: Optimizer) -> ScaledSteps:
        """Return the steps of an optimizer, which go on counting if it is the one of an earlier run."""
        if optimizer not in self._steps:
            self._steps[optimizer] = ScaledSteps(self._factor, self._scaled_values)
        return self._steps[optimizer]

    def _factor(self, steps: int) -> float:
        """Return the factor of the learning rate after so many optimizer steps."""
        return warmup_factor(self.lr_scale, steps, self._warmup_steps)

    def _scaled_values(self, group: dict[str, Any], factor: float) -> Hyperparameters:
        return self._scaling.hyperparameters(self.batch.scale, group, factor)

    def on_train_batch_start(self) -> None:
        """Follow another accumulation, and optimizers that a user put into the list of the Trainer."""
        accumulation_changed = self.run.loop.accumulation != self._accumulation
        # In its last pass, SWA makes the window as long as the epoch, so that Lightning takes no step in it.
        if accumulation_changed and not self.run.loop.skips_backward:
            self._set_batch()
        self.attach(self._optimizers)

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], _Result]) -> _Result:
        """Call `step`, Lightning's, in which the optimizer steps unless a loss scaler skips that.

        Raises:
            RuntimeError: If the optimizer stepped, and torch called no hook.
        """
        if not self._trains:
            return step()
        self.attach([optimizer])  # which `configure_optimizers` need not have returned
        steps = self._steps_of(optimizer)
        taken = steps.taken
        calls = steps.calls
        try:
            result = step()
        finally:
            steps.end_calls(calls)
        has_scaler = getattr(self.run.trainer.precision_plugin, "scaler", None) is not None
        if steps.taken == taken and not has_scaler:
            raise RuntimeError(
                f"{type(optimizer).__name__} took a step in which torch called no hook, so lr_scaling="
                f"{self._scaling.name!r} has not scaled its learning rates. Leave its method `step` to its class,"
                " return the optimizer that it wraps from configure_optimizers, or use lr_scaling='none'."
            )
        return result

    def end_failed_steps(self) -> None:
        """Restore base values where a step raised that the user's code took itself."""
        for steps in self._steps.values():
            # Within the closure of a step in progress, groups hold base values.
            if steps.holds_scaled_values:
                steps.end_calls(0)

    def factors(self) -> tuple[float, ...]:
        """Return the factor of the learning rates in the next step of each optimizer, or the one in progress."""
        return tuple(self._steps_of(optimizer).factor() for optimizer in self._optimizers)

    def load_optimizers(self, saved: Saved | None) -> None:
        """Resume the warm-up where the checkpoint's run was; the states of optimizers are about to be loaded."""
        if saved is None or saved.get("rates") is None:
            return
        # A run with another number of optimizers keeps the steps of those that both have.
        for optimizer, taken in zip(self._optimizers, saved["rates"]["steps"], strict=False):
            self._steps_of(optimizer).taken = taken

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the recipe, and how far the warm-up is."""
        saved["recipe"] = self._recipe()
        saved["rates"] = None
        if self.scales:
            saved["rates"] = {"steps": [self._steps_of(optimizer).taken for optimizer in self._optimizers]}

    def load(self, saved: Saved) -> None:
        """Remember the recipe of the checkpoint, until the loaders of this run are known."""
        self._loaded_recipe = saved.get("recipe", {})

    def _recipe(self) -> dict[str, Any]:
        """Return what a run that continues this one must agree with, free of the world size.

        The global batch is none of it: it changes within a run (`GradientAccumulationScheduler`), and the scale follows
        it.
        """
        lr_scaling = self._scaling.name
        if not self._scaling.is_named:
            lr_scaling = _UNNAMED
        base = None
        if self.scales and self._base_batch_size is not None:
            base = f"base_batch_size={self._base_batch_size}"
        elif self.scales:
            base = f"base_world_size={self._base_world_size}"
        return {
            "reduction": self._options.rule.name,
            "split_batches": self._options.split_batches,
            "equivalent_to": self._options.preset,
            "num_replicas": self._options.shaping_replicas(self.run.world.size),
            "lr_scaling": lr_scaling,
            "base": base,
            "lr_warmup_steps": self._warmup_steps,
        }

    def _compare_recipes(self) -> None:
        """Refuse to continue a run under another recipe than it was begun with, or say which recipe is dropped."""
        saved = self._loaded_recipe
        self._loaded_recipe = {}
        differences = []
        for name, value in self._recipe().items():
            if name in saved and saved[name] != value:
                differences.append(f"{name}: {saved[name]!r} in the checkpoint, now {value!r}")
        if saved.get("lr_scaling") == self._recipe()["lr_scaling"] == _UNNAMED:
            rank_zero_info(
                "GradAvgStrategy: lr_scaling is a function without a name, so it is not compared with the checkpoint's."
                " A function that `def` names is compared by that name."
            )
        if not differences:
            return
        message = "the checkpoint was trained under another recipe:\n  " + "\n  ".join(differences)
        if self._may_differ:
            rank_zero_warn(
                f"GradAvgStrategy: {message}\nThis strategy trains as stock DDP does, so it goes on without the"
                " checkpoint's. Give the options of the checkpoint's run to go on with them."
            )
            return
        if not self._allow_change:
            raise ValueError(f"{message}\nChange it back, or pass allow_recipe_change=True if this is intended.")
        rank_zero_info(f"GradAvgStrategy: {message}")

    def teardown(self) -> None:
        """Leave the optimizers as they were."""
        self.end_failed_steps()
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        self._hooks.clear()
        self._trains = False

    def describe(self) -> str:
        """Return the scale, and what it makes of the learning rates."""
        if not self.scales:
            return ""
        warmup = ""
        if self._warmup_steps > 0:
            warmup = f" after {plural(self._warmup_steps, 'warm-up step')}"
        return (
            f"Global batch / base batch = {self.batch.scale:g}, so every optimizer step multiplies its learning rate"
            f" by {self.lr_scale:g}{warmup}; schedulers, LearningRateMonitor and checkpoints show the base rate."
        )


def _finds_learning_rate(trainer: Trainer) -> bool:
    """Return whether `Tuner.lr_find` trains: it does so with a callback of its own."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return any(type(callback).__module__ == lr_finder.__name__ for callback in callbacks)
