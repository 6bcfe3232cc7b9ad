"""The part that has the learning rate follow the global batch, and checkpoints agree with the recipe."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_gradavg._lightning.internals import finds_learning_rate
from lightning_gradavg._lightning.methods import replaced
from lightning_gradavg._lightning.options import Options
from lightning_gradavg._lightning.part import Part, Saved
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


class Rates(Part):
    """Keeps the recipe of a run: what a user stated once, and what it means for the loaders and the world of this run.

    If the recipe scales learning rates, optimizers hold effective ones from the arrival of a batch until they have
    stepped, or the batch ends; in manual optimization within every `step`.

    Args that are no options of `GradAvgStrategy`:
        options: How batches are split and losses reduced.
        allow_change: Whether a checkpoint of another recipe may be resumed.
        stock: Whether gradients are those of stock DDP: without a scaling, a checkpoint need not agree.

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
        self._options, self._scaling, self._warmup_steps = options, resolve_scaling(lr_scaling), lr_warmup_steps
        self.scales = self._scaling.name != "none"
        self._allow_change, self._may_differ = allow_change, stock and not self.scales
        if lr_warmup_steps < 0 or (lr_warmup_steps > 0 and not self.scales):
            raise ValueError(
                f"lr_warmup_steps={lr_warmup_steps} must be 0 or more, and 0 with lr_scaling='none', which has nothing"
                " to warm up to. Choose an lr_scaling, or warm up with a scheduler."
            )
        self._batch_of = partial(
            batch_scale,
            split_batches=options.split_batches,
            base_batch_size=base_batch_size,
            base_world_size=base_world_size,
        )
        self._batch_of([1], world_size=1)  # the same checks, before there is a loader
        self.batch = BatchScale(1, 1, known=False)
        self._sizes: list[int | None] = []
        self._accumulation = 1
        self._found_with: int | None = None  # the global batch of a search for a learning rate
        self._loaded: Saved = {}
        self._steps: MutableMapping[Optimizer, int] = {}
        self._begun: dict[Optimizer, ScaledGroups] = {}
        self._hooks = ExitStack()

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one optimizer step over ranks and window; None where no loader tells, or none is there yet."""
        return self.batch.global_batch_size if self.batch.known else None

    @property
    def lr_scale(self) -> float:
        """What the learning rate is multiplied by once the warm-up is over."""
        return self._scaling.at(self.batch.scale)

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers of the run, whose groups hold base values. Those of before go on counting."""
        self.end()
        steps = {optimizer: self._steps.get(optimizer, 0) for optimizer in optimizers}
        self._steps = WeakKeyDictionary(steps)  # a user may replace optimizers in training

    @property
    def _optimizers(self) -> Sequence[Optimizer]:
        """Those that the run trains with now."""
        return self.run.trainer.optimizers

    def prepare_loaders(self, stage: str) -> None:
        """Forget the sizes of earlier training loaders."""
        self._sizes = [] if stage == "train" else self._sizes

    def add_loader(self, size: int | None) -> None:
        """Note the batch size of a training loader, None if it does not tell."""
        self._sizes.append(size)
        self._set_batch()

    def _set_batch(self) -> None:
        """Set what the steps from the next one on follow.

        A learning rate is found with a global batch: scaled in the search or after it, it would count the batch twice.
        """
        self.end()
        self._accumulation = self.run.loop.accumulation
        now = self._batch_of(self._sizes, self._accumulation, world_size=self.run.world.size)
        if self.scales and finds_learning_rate(self.run.trainer):
            self._found_with = now.global_batch_size
        self.batch = now._replace(base_batch_size=self._found_with or now.base_batch_size)

    def on_train_start(self) -> None:
        """Begin training, or raise a ValueError about what cannot be scaled or resumed."""
        self._set_batch()
        self._compare()
        if not self.scales:
            return
        if warning := counted_twice(self._options.rule.name, self._scaling, self.batch.scale, self.run.num_nodes):
            rank_zero_warn(warning)
        self.apply()
        self.end()
        trainer: Any = self.run.trainer
        # Schedulers see base values, whether an optimizer stepped in the batch or not, and monitors effective ones.
        self._surround(trainer.fit_loop.epoch_loop, "update_lr_schedulers", self.end)
        monitors = [each for each in trainer.callbacks if isinstance(each, LearningRateMonitor)]
        by_hand = not self.run.module.automatic_optimization
        for monitor, name in product(monitors, ["on_train_epoch_start", *["on_train_batch_start"] * by_hand]):
            self._surround(monitor, name, self.apply)

    def _surround(self, owner: object, name: str, before: Callable[[], None]) -> None:
        """Call something before a hook, and end all steps after it."""
        hook = getattr(owner, name)

        def surrounded(*args: Any, **kwargs: Any) -> None:  # a function, of which a copy of the owner copies nothing
            before()
            hook(*args, **kwargs)
            self.end()

        self._hooks.enter_context(replaced(owner, name, surrounded))

    def on_train_batch_start(self) -> None:
        """Begin a batch, and with it a step."""
        # In its pass without backwards, SWA makes the window so long that Lightning takes no step.
        if self.run.loop.accumulation != self._accumulation and not self.run.loop.skips_backward:
            self._set_batch()
        if self.scales and self.run.module.automatic_optimization:
            self.end()
            self.apply()

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Have a step use effective values, and count it unless it fails."""
        self.apply(optimizer)
        try:
            result = step()
            self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        finally:
            self.end(optimizer)
        return result

    def apply(self, *optimizers: Optimizer) -> None:
        """Have the groups of some optimizers, by default of all, hold effective values until `end`."""
        if not self.scales:
            return
        for optimizer in optimizers or self._optimizers:
            if optimizer in self._begun:
                self._begun[optimizer].follow()
                continue
            factor = self._factor(optimizer)
            self._begun[optimizer] = ScaledGroups(optimizer, self._scaling, self.batch.scale, factor)

    def end(self, *optimizers: Optimizer) -> None:
        """Have these groups hold base values."""
        for optimizer in self._begun.keys() & (optimizers or self._begun.keys()):
            self._begun.pop(optimizer).end()

    def _factor(self, optimizer: Optimizer) -> float:
        return warmup_factor(self.lr_scale, self._steps.get(optimizer, 0), self._warmup_steps)

    def learning_rates(self) -> tuple[float, ...]:
        """Return those that the step in progress or the next one uses, of every group of every optimizer."""
        for scaled in self._begun.values():
            scaled.follow()
        factors = {each: 1.0 if each in self._begun else self._factor(each) for each in self._optimizers}
        groups = ((group, factor) for each, factor in factors.items() for group in each.param_groups)
        return tuple(float(group["lr"] * factor) for group, factor in groups if "lr" in group)

    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state as it is saved, with base values in it."""
        return self._begun[optimizer].at_rest(state) if state and optimizer in self._begun else state

    def load_optimizers(self, saved: Saved | None) -> None:
        """Go on with the warm-up where the checkpoint's run was; the states of optimizers are about to be loaded."""
        steps = ((saved or {}).get("rates") or {"steps": ()})["steps"]
        self._steps.update(zip(list(self._steps), steps, strict=False))

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the recipe, and how far the warm-up is."""
        saved |= {"recipe": self._settings(), "rates": None}
        if self.scales:
            saved["rates"] = {"steps": [self._steps.get(optimizer, 0) for optimizer in self._optimizers]}

    def load(self, saved: Saved) -> None:
        """Remember what the checkpoint's run was, until this one's loaders are known."""
        self._loaded = saved.get("recipe", {})

    def _settings(self) -> dict[str, Any]:
        """Return what a run that continues this one must agree with, free of the world size."""
        # Without a scaling the base says nothing, and a search for a learning rate would seem to change the recipe.
        says_base = self.scales and self.batch.known
        return {
            "reduction": self._options.rule.name,
            "split_batches": self._options.split_batches,
            "equivalent_to": self._options.preset,
            "num_replicas": self._options.shaping_replicas(self.run.world.size),
            "global_batch_size": self.global_batch_size,
            "lr_scaling": self._scaling.name,
            "base_batch_size": self.batch.base_batch_size if says_base else None,
            "lr_warmup_steps": self._warmup_steps,
        }

    def _compare(self) -> None:
        """Refuse to continue a run under another recipe than it was begun with."""
        saved, self._loaded = self._loaded, {}
        differences = [
            f"{name}: {saved[name]!r} in the checkpoint, now {value!r}"
            for name, value in self._settings().items()
            if saved.get(name) not in (None, value)
        ]
        if self._may_differ or not differences:
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
        if not self.scales:
            return ""
        rates = ", ".join(f"{lr:g}" for lr in dict.fromkeys(self.learning_rates()))
        return f"; scale {self.batch.scale:g}, learning rate x {self.lr_scale:g}, at first {rates}"
