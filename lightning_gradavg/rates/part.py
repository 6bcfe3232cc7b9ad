"""The part that has the learning rate follow the global batch, and checkpoints agree with the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_gradavg.lightning_internals import TrainingLoop, finds_learning_rate, last_rates
from lightning_gradavg.methods import replaced
from lightning_gradavg.part import Part, Run, Saved
from lightning_gradavg.rates.groups import LearningRates
from lightning_gradavg.rates.scaling import (
    BatchScale,
    ScaleFunction,
    batch_scale,
    contradictions,
    resolve_scaling,
    scale_factor,
)
from lightning_gradavg.rules import Rule

__all__ = ["Rates"]


class Rates(Part):
    """Keeps the recipe of a run: what a user stated once, and what it means for the loaders and the world of this run.

    If the recipe scales learning rates, optimizers hold effective ones from the arrival of a batch until they have
    stepped, or the batch ends. In manual optimization they hold them until `training_step` begins, and within every
    `step`.

    Args:
        rule: The reduction rule.
        split_batches: Whether the loader's batches are the global batches.
        equivalent_to: The name of the run to reproduce, if any.
        lr_scaling: As of `GradAvgStrategy`, like the four that follow.
        base_batch_size: As above.
        base_world_size: As above.
        lr_warmup_steps: As above.
        allow_change: Whether a checkpoint of another recipe may be resumed.
        stock: Whether gradients are those of stock DDP: without a scaling, a checkpoint need not agree.

    Attributes:
        batch: The global and the base batch; of scale 1 until the training loaders are known.
        global_batch_size: Samples of one optimizer step over ranks and window; None where no loader tells, or none is
            there yet.
        num_replicas: Chunks that every loader batch is computed in, where they shape the result; else None.
        arithmetic: What numbers are computed in, by name, where a run that continues this one must agree with it.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        split_batches: bool,
        equivalent_to: str | None,
        lr_scaling: str | ScaleFunction,
        base_batch_size: int | None,
        base_world_size: int,
        lr_warmup_steps: int,
        allow_change: bool,
        stock: bool,
    ) -> None:
        self._rates = LearningRates(lr_scaling, lr_warmup_steps)
        self._rule, self._scaling, self._warmup_steps = rule, resolve_scaling(lr_scaling), lr_warmup_steps
        self._split, self._equivalent_to = split_batches, equivalent_to
        self._base_batch_size, self._base_world_size = base_batch_size, base_world_size
        self._allow_change, self._may_differ = allow_change, stock and not self.scales
        if lr_warmup_steps > 0 and not self.scales:
            raise ValueError(
                f"lr_warmup_steps={lr_warmup_steps} leads to the learning rate that lr_scaling='none' does not"
                " scale. Choose an lr_scaling, or warm up with a scheduler."
            )
        self._compute_batch([1], world_size=1)  # the same checks, before there is a loader
        self.batch = BatchScale(1, 1)
        self.global_batch_size: int | None = None
        self.num_replicas: int | None = None
        self.arithmetic: Mapping[str, Any] = {}
        self._sizes: list[int | None] = []
        self._accumulation = 1
        self._loaded: Saved | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._finds_lr = False
        self._schedulers: dict[LRScheduler, Any] = {}
        self._hooks = ExitStack()

    @property
    def scales(self) -> bool:
        """Whether the learning rate follows the global batch."""
        return self._scaling.name != "none"

    @property
    def lr_scale(self) -> float:
        """What the learning rate is multiplied by once the warm-up is over."""
        return scale_factor(self._scaling, self.batch.scale)

    def setup(self, run: Run) -> None:
        """Let go of an earlier run: not at its end, after which a checkpoint can still be saved."""
        super().setup(run)
        self.end()
        self._rates.attach(())

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers of the run, whose groups hold base values."""
        self._optimizers = optimizers
        self._rates.attach(optimizers if self.scales else ())

    def prepare_loaders(self, stage: str) -> None:
        """Forget the sizes of earlier training loaders."""
        self._sizes = [] if stage == "train" else self._sizes

    def add_loader(self, size: int | None, accumulation: int) -> None:
        """Note the batch size of a training loader, None if it does not tell, and the loader batches per step."""
        self._sizes.append(size)
        self._set_batch(accumulation)

    def _set_batch(self, accumulation: int) -> None:
        self._compute_batch(self._sizes, self.run.world.size, accumulation)
        self._accumulation = accumulation
        self._rates.set_scale(self.batch.scale)

    def _compute_batch(self, sizes: Sequence[int | None], world_size: int, accumulation: int = 1) -> None:
        """Compute the global batch and the scale from the batch sizes of all training loaders."""
        size = sizes[0] if len({*sizes}) == 1 else None
        if size is None and self._base_batch_size is not None and self.scales:
            raise ValueError(
                f"lr_scaling={self._scaling.name!r} with base_batch_size={self._base_batch_size} needs the size of a"
                f" training batch, but the training loaders have the batch sizes {list(sizes)}. Give the loader, its"
                " batch sampler or its dataset an attribute `batch_size`, or use base_world_size."
            )
        self.batch = batch_scale(
            size or 1,  # without a base batch the scale is a ratio of ranks, for which any size will do
            world_size=world_size,
            accumulate_grad_batches=accumulation,
            split_batches=self._split,
            base_batch_size=self._base_batch_size,
            base_world_size=self._base_world_size,
        )
        self.global_batch_size = self.batch.global_batch_size if size is not None else None

    def begin(self, accumulation: int) -> list[str]:
        """Begin training, and return what does not fit together in the recipe."""
        self._follow(accumulation)
        self._compare()
        if self.scales:
            trainer: Any = self.run.trainer
            self._replace_hook(trainer.fit_loop.epoch_loop, "update_lr_schedulers", self._at_rest)
            for callback in trainer.callbacks:
                if isinstance(callback, LearningRateMonitor):
                    self._replace_hook(callback, "on_train_epoch_start", self._in_force)
        return list(contradictions(self._rule.name, self._scaling, self.batch, nodes=self.run.num_nodes).values())

    def _replace_hook(self, owner: object, name: str, wrapper: Callable[..., None]) -> None:
        hook = getattr(owner, name)
        # A function, of which a copy of the owner copies nothing.
        self._hooks.enter_context(replaced(owner, name, lambda *args, **kwargs: wrapper(hook, *args, **kwargs)))

    def _at_rest(self, hook: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Have schedulers see base values: at the end of every batch, whether an optimizer stepped in it or not."""
        self._end()
        hook(*args, **kwargs)

    def _in_force(self, hook: Callable[..., None], *args: Any) -> None:
        """Have a monitor see effective values although no step is in progress."""
        self._begin()
        hook(*args)
        self._rates.end()

    def arrive(self, batch: Any, accumulation: int) -> None:
        """Begin a batch, and with it a step."""
        if not self.scales:
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
        found, self._finds_lr = self._finds_lr, self.scales and finds_learning_rate(self.run.trainer)
        if found and not self._finds_lr and self.global_batch_size is not None:
            # The learning rate was found with this global batch: scaling it again would count the batch twice.
            self._base_batch_size = self.global_batch_size
            self._set_batch(self._accumulation)
        if accumulation != self._accumulation:
            self._set_batch(accumulation)

    def begin_step(self) -> None:
        """Begin a training step, in manual optimization at rest."""
        if self.scales and not self.run.module.automatic_optimization:
            self._end()

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Have a step use effective values, and count it."""
        if self._finds_lr or not self.scales:
            return step()
        with self._rates.step(optimizer):
            result = step()
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
        if warmed_up is not None and self.scales:
            self._rates.load_state_dict(warmed_up)

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the recipe, and how far the warm-up is."""
        saved |= {"recipe": self._settings(), "rates": self._rates.state_dict() if self.scales else None}

    def load(self, saved: Saved) -> None:
        """Remember what the checkpoint's run was, until this one's loaders are known."""
        self._loaded = saved

    def _settings(self) -> dict[str, Any]:
        """Return what a run that continues this one must agree with, free of the world size."""
        # Without a scaling the base says nothing, and a search for a learning rate would seem to change the recipe.
        says_base = self.scales and self.global_batch_size is not None
        return {
            "reduction": self._rule.name,
            "split_batches": self._split,
            "equivalent_to": self._equivalent_to,
            "num_replicas": self.num_replicas,
            "global_batch_size": self.global_batch_size,
            "lr_scaling": self._scaling.name,
            "base_batch_size": self.batch.base_batch_size if says_base else None,
            "lr_warmup_steps": self._warmup_steps,
            **self.arithmetic,
        }

    def _compare(self) -> None:
        """Refuse to continue a run under another recipe than it was begun with."""
        loaded, self._loaded = self._loaded, None
        if loaded is None or self._may_differ:
            return
        if "recipe" not in loaded:
            rank_zero_info(
                "GradAvgStrategy: the checkpoint was saved by another strategy and does not say how gradients were"
                f" reduced; from now on they are reduced by reduction={self._rule.name!r}, g = {self._rule.formula}"
            )
        saved = loaded.get("recipe", {})
        differences = [
            f"{name}: {saved[name]!r} in the checkpoint, now {value!r}"
            for name, value in self._settings().items()
            if saved.get(name) not in (None, value)
        ]
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
        if not self.scales:
            return ""
        rates = ", ".join(f"{lr:g}" for lr in dict.fromkeys(self.learning_rates()))
        return f"; scale {self.batch.scale:g}, learning rate x {self.lr_scale:g}, at first {rates}"
