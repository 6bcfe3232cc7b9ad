"""The part that has the learning rate follow the global batch, and checkpoints agree with the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_gradavg.lightning_internals import finds_learning_rate
from lightning_gradavg.part import Part, Run, Saved
from lightning_gradavg.rates.groups import LearningRates
from lightning_gradavg.rates.recipe import RunRecipe

__all__ = ["Rates", "ScaledRates", "rates_of"]


class Rates(Part):
    """Keeps a recipe: what a user stated of batch and learning rate, on any number of ranks. Nothing is scaled.

    Args:
        recipe: The recipe.
        allow_change: Whether a checkpoint of another recipe may be resumed.
        may_differ: Whether a checkpoint need not agree, because this run trains as stock DDP does.
    """

    def __init__(self, recipe: RunRecipe, *, allow_change: bool, may_differ: bool) -> None:
        self.recipe = recipe
        self._allow_change, self._may_differ = allow_change, may_differ
        self._sizes: list[int | None] = []
        self._accumulation = 1
        self._loaded: Saved | None = None

    def setup_optimizers(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Take the optimizers of the run, and the schedulers that Lightning steps."""

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

    def begin(self, schedulers: Sequence[Any], accumulation: int) -> list[str]:
        """Begin training, and return what does not fit together in the recipe.

        Raises:
            ValueError: If the checkpoint that is resumed was trained under another recipe.
        """
        self.follow(schedulers, accumulation)
        self._compare()
        return self.recipe.contradictions(self.run.num_nodes)

    def follow(self, schedulers: Sequence[Any], accumulation: int) -> None:  # for those who scale
        """Follow what may have changed since the last batch.

        Args:
            schedulers: Those that Lightning steps.
            accumulation: Loader batches per optimizer step.
        """
        if accumulation != self._accumulation:
            self._set_batch(accumulation)

    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:  # likewise
        """Return an optimizer's state as it is saved."""
        return state

    def load_optimizers(self, saved: Saved | None, load: Callable[[], None]) -> None:  # likewise
        """Have optimizers load their states."""
        load()

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
                f" reduced; from here on they are by reduction={rule.name!r}, g = {rule.formula}"
            )
        differences = self.recipe.differences(loaded.get("recipe", {}))
        if not differences:
            return
        message = "the checkpoint was trained under another recipe:\n  " + "\n  ".join(differences)
        if not self._allow_change:
            raise ValueError(f"{message}\nChange it back, or pass allow_recipe_change=True if this is meant.")
        rank_zero_info(f"GradAvgStrategy: {message}")


class ScaledRates(Rates):
    """Has optimizers hold effective learning rates, and their schedulers compute in base units."""

    def __init__(self, recipe: RunRecipe, *, allow_change: bool) -> None:
        super().__init__(recipe, allow_change=allow_change, may_differ=False)
        self._rates = LearningRates(recipe.lr_scaling, recipe.lr_warmup_steps)
        self._finds_lr = False

    def setup(self, run: Run) -> None:
        """Let go of an earlier run: not at its end, after which a checkpoint can still be saved."""
        super().setup(run)
        self._rates.detach()

    def setup_optimizers(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Let the optimizers hold effective values, and their schedulers compute in base units."""
        self._optimizers = optimizers
        self._rates.attach(optimizers)
        self._watch([*schedulers, *self._kept_by_user()])

    def _set_batch(self, accumulation: int) -> None:
        super()._set_batch(accumulation)
        self._rates.set_scale(self.recipe.batch.scale)

    def begin(self, schedulers: Sequence[Any], accumulation: int) -> list[str]:
        """Begin training, and return what does not fit together in the recipe."""
        messages = super().begin(schedulers, accumulation)
        self._watch(self._kept_by_user())
        return messages

    def follow(self, schedulers: Sequence[Any], accumulation: int) -> None:
        """Follow the window, new schedulers, and Lightning's search for a learning rate."""
        found, self._finds_lr = self._finds_lr, finds_learning_rate(self.run.trainer)
        if found and not self._finds_lr:
            # The learning rate was found with this global batch: scaling it again would count the batch twice.
            self.recipe.found_here()
            self._set_batch(accumulation)
        super().follow(schedulers, accumulation)
        # A callback may have replaced a scheduler, as StochasticWeightAveraging does.
        self._watch(schedulers)

    def _watch(self, schedulers: Iterable[Any]) -> None:
        for scheduler in schedulers if not self._finds_lr else ():
            self._rates.watch(scheduler)

    def _kept_by_user(self) -> Iterator[LRScheduler]:
        """Yield the schedulers that the module or a callback keeps, to step them itself."""
        callbacks = self.run.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        values = chain.from_iterable(vars(owner).values() for owner in (self.run.module, *callbacks))
        for item in chain.from_iterable(value if isinstance(value, list) else [value] for value in values):
            if isinstance(item, LRScheduler) and item.optimizer in self._optimizers:
                yield item

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Have a step use effective values, and count it."""
        if self._finds_lr:
            return step()
        self._rates.refresh()
        result = step()
        self._rates.advance(optimizer)
        return result

    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with base values in it."""
        return self._rates.base_state_dict(optimizer, state) if state else state

    def load_optimizers(self, saved: Saved | None, load: Callable[[], None]) -> None:
        """Have optimizers load their states, which hold base values, and go on with effective ones."""
        warmed_up = (saved or {}).get("rates")
        if warmed_up is not None:
            self._rates.load_state_dict(warmed_up)
        load()
        for optimizer in self._optimizers:
            self._rates.reload(optimizer)

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the recipe, and how far the warm-up is."""
        super().save(saved, checkpoint)
        saved["rates"] = self._rates.state_dict()

    def describe(self) -> str:
        """Return the scale, and what it makes of the learning rate."""
        return f"; scale {self.recipe.batch.scale:g}, learning rate x {self.recipe.lr_scale:g}"


def rates_of(recipe: RunRecipe, *, allow_change: bool, may_differ: bool) -> Rates:
    """Return the part that serves a recipe. See `Rates` for the arguments."""
    if recipe.scales:
        return ScaledRates(recipe, allow_change=allow_change)
    return Rates(recipe, allow_change=allow_change, may_differ=may_differ)
