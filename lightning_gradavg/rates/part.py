"""The part that has the learning rate follow the global batch, and checkpoints agree with the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_gradavg.part import Part, Run, Saved
from lightning_gradavg.rates.recipe import RunRecipe

__all__ = ["Rates"]


class Rates(Part):
    """Keeps a recipe: what a user stated of batch and learning rate, on any number of ranks.

    Args:
        recipe: The recipe.
        allow_change: Whether a checkpoint of another recipe may be resumed.
        may_differ: Whether a checkpoint need not agree, because this run trains as stock DDP does.
    """

    def __init__(self, recipe: RunRecipe, *, allow_change: bool, may_differ: bool) -> None:
        self.recipe = recipe
        self._allow_change, self._may_differ = allow_change, may_differ and recipe.rates is None
        self._sizes: list[int | None] = []
        self._accumulation = 1
        self._loaded: Saved | None = None
        self._finds_lr = False

    def setup(self, run: Run) -> None:
        """Let go of an earlier run: not at its end, after which a checkpoint can still be saved."""
        super().setup(run)
        if self.recipe.rates is not None:
            self.recipe.rates.detach()

    def setup_optimizers(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Let the optimizers hold effective values, and their schedulers compute in base units."""
        self._optimizers = optimizers
        if self.recipe.rates is not None:
            self.recipe.rates.attach(optimizers)
            self._watch(self._schedulers(schedulers))

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
        self._watch(self._schedulers(schedulers))
        self._compare()
        return self.recipe.contradictions(self.run.num_nodes)

    def follow(self, schedulers: Sequence[Any], accumulation: int) -> None:
        """Follow what may have changed since the last batch: the window, or Lightning's search for a learning rate.

        Args:
            schedulers: Those that Lightning steps.
            accumulation: Loader batches per optimizer step.
        """
        callbacks = self.run.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        found, self._finds_lr = self._finds_lr, any(isinstance(callback, _LRCallback) for callback in callbacks)
        if found and not self._finds_lr:
            # The learning rate was found with this global batch: scaling it again would count the batch twice.
            self.recipe.found_here()
        if (found and not self._finds_lr) or accumulation != self._accumulation:
            self._set_batch(accumulation)
        # A callback may have replaced a scheduler, as StochasticWeightAveraging does.
        self._watch(schedulers)

    def _watch(self, schedulers: Sequence[Any] | Iterator[Any]) -> None:
        rates = None if self._finds_lr else self.recipe.rates
        if rates is not None:
            for scheduler in schedulers:
                rates.watch(scheduler)

    def _schedulers(self, schedulers: Sequence[Any]) -> Iterator[Any]:
        """Yield the schedulers of this run: those that Lightning steps, and those that a user keeps and steps."""
        yield from schedulers
        callbacks = self.run.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        for owner in (self.run.module, *callbacks):
            for value in vars(owner).values():
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, LRScheduler) and item.optimizer in self._optimizers:
                        yield item

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Have a step use effective values, and count it."""
        rates = None if self._finds_lr else self.recipe.rates
        if rates is None:
            return step()
        rates.refresh()
        result = step()
        rates.advance(optimizer)
        return result

    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with base values in it."""
        if self.recipe.rates is None or not state:
            return state
        return self.recipe.rates.base_state_dict(getattr(optimizer, "_optimizer", optimizer), state)

    def load_optimizers(self, saved: Saved | None, load: Callable[[], None]) -> None:
        """Have optimizers load their states, which hold base values, and go on with effective ones."""
        rates = self.recipe.rates
        if rates is not None and saved is not None and saved["rates"] is not None:
            rates.load_state_dict(saved["rates"])
        load()
        if rates is not None:
            for optimizer in self._optimizers:
                rates.reload(optimizer)

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the recipe, and how far the warm-up is."""
        rates = self.recipe.rates
        saved |= {"recipe": self.recipe.fingerprint(), "rates": None if rates is None else rates.state_dict()}

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

    def describe(self) -> str:
        """Return the scale, and what it makes of the learning rate."""
        batch = self.recipe.batch
        if self.recipe.rates is None:
            return ""
        return f"; scale {batch.scale:g}, learning rate x {self.recipe.lr_scale:g}"
