"""A strategy that keeps a recipe: its training data, learning rate and checkpoints follow the global batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_gradavg.collectives.agreement import on_ranks, ranks_by_value
from lightning_gradavg.data.sources import loader_batch_size
from lightning_gradavg.data.training_data import SplitTraining, as_one_stand_in
from lightning_gradavg.evaluation.evaluating import EvaluatingStrategy
from lightning_gradavg.presets import Plan
from lightning_gradavg.rates.recipe import RunRecipe

__all__ = ["RecipeStrategy"]

_CHECKPOINT_KEY = "lightning_gradavg"


class RecipeStrategy(EvaluatingStrategy):
    """Splits the training data, scales the learning rate, and saves both free of the world size.

    Args:
        plan: What the user's options on batches, rule and evaluation come to.
        recipe: What the user stated of batch and learning rate.
        allow_recipe_change: Whether a checkpoint of another recipe may be resumed.
        **options: Those of `DDPStrategy`.
    """

    def __init__(
        self,
        plan: Plan,
        recipe: RunRecipe,
        *,
        allow_recipe_change: bool,
        **options: Any,
    ) -> None:
        super().__init__(plan.rule, exact_evaluation=plan.exact_evaluation, **options)
        self._plan = plan
        self._recipe = recipe
        self._allow_recipe_change = allow_recipe_change
        self._data: SplitTraining | None = None
        self._prepares_training_data = False
        self._loader_sizes: list[int | None] = []
        self._loaded: dict[str, Any] | None = None
        self._finds_lr = False
        self._accumulation = 1

    @override
    def setup(self, trainer: Trainer) -> None:
        if self._recipe.rates is not None:
            # Not at the end of the run before: a checkpoint can be saved after it.
            self._recipe.rates.detach()
        super().setup(trainer)

    @override
    def _register_ddp_hooks(self) -> None:
        super()._register_ddp_hooks()
        if self._plan.split_batches:
            assert isinstance(self.model, DistributedDataParallel)
            assert self.lightning_module is not None
            group = self.model.process_group
            self._data = SplitTraining(
                self._trainer,
                self.lightning_module,
                self._plan.max_device_batch_size,
                group,
                num_replicas=self._plan.num_replicas,
                whole_batches=self._plan.replicated,
            )
            if self._loaded is not None and self._loaded["loaders"] is not None:
                self._data.resume(self._loaded["loaders"], self._loaded["micro_batches"])

    @override
    def _samples(self) -> float | None:
        chunk = self._data.chunk if self._data is not None else None
        return chunk.samples if chunk is not None else None

    @override
    def _around_step(self) -> AbstractContextManager[None]:
        assert self.lightning_module is not None
        return as_one_stand_in(self.lightning_module) if self._samples() == 0 else nullcontext()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        rates = None if self._finds_lr else self._recipe.rates
        if rates is not None:
            rates.refresh()
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if rates is not None:
            rates.advance(optimizer)
        return result

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one optimizer step, over ranks and window; None before `fit` or where no loader tells."""
        return self._recipe.global_batch_size

    @property
    def lr_scale(self) -> float:
        """What `lr_scaling` multiplies the learning rate by, the warm-up being over."""
        return self._recipe.lr_scale

    def _announce(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        group = self.model.process_group
        ranks, nodes = dist.get_world_size(group), self._num_nodes_seen
        batch, size = self._recipe.batch, self.global_batch_size
        scaled = self._recipe.rates is not None
        scale = f"; scale {batch.scale:g}, learning rate x {self.lr_scale:g}" if scaled else ""
        rank_zero_info(
            f"GradAvgStrategy: reduction={self._rule.name!r}, g = {self._rule.formula};"
            f" {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)} ({dist.get_backend(group)});"
            f" global batch {size if size is not None else 'unknown'}, windows of"
            f" {self._trainer.accumulate_grad_batches} micro-batches{scale}{self._describe()}"
        )

    def _describe(self) -> str:
        """Return more to say about the run in the line at its start."""
        return ""

    @override
    def _prepare_loaders(self, name: str) -> None:
        self._prepares_training_data = name == "train_dataloader()"
        self._loader_sizes = [] if self._prepares_training_data else self._loader_sizes
        if self._data is not None:
            # The only moment at which training and evaluation loaders can be told apart and their samplers kept.
            self._data.before_loaders(training=self._prepares_training_data)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        if not self._prepares_training_data or self._trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        self._loader_sizes.append(loader_batch_size(dataloader))
        if self._data is not None:
            split = self._data.wrap(dataloader)
            rank_zero_info(f"GradAvgStrategy: {split.describe()}")
            dataloader = split
        self._set_batch()
        return dataloader

    def _set_batch(self) -> None:
        """Tell the recipe the global batch, as loaders and accumulation are now."""
        self._accumulation = self._trainer.accumulate_grad_batches
        accumulation = self._accumulation if self._data is None else self._data.accumulation
        self._recipe.set_batch(
            self._loader_sizes, world_size=dist.get_world_size(self._group), accumulation=accumulation
        )

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._trainer.training:
            if self._data is not None:
                self._data.take()
            self._follow()
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_start(self) -> None:
        """Begin with the training loaders, which are known now."""
        super().on_train_start()
        self._require_same_length()
        if self._data is not None:
            self._data.start()
        self._follow()
        for scheduler in self._schedulers():
            self._watch(scheduler)
        self._compare_recipes()
        for message in self._recipe.contradictions(self._num_nodes_seen):
            self._warn(message)
        self._announce()

    def _require_same_length(self) -> None:
        """Raise, on all ranks alike, if groups of ranks would wait for each other at different batches."""
        if self._group is None:
            return
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, self._trainer.num_training_batches)
        if len(set(of_ranks)) > 1:
            counts = "; ".join(f"{count} {on_ranks(ranks)}" for count, ranks in ranks_by_value(of_ranks).items())
            raise ValueError(
                f"the process groups of the run have different numbers of batches in an epoch: {counts}. Their ranks"
                " wait for each other in checkpoints, validation and at the end, so these numbers must be the same:"
                " use groups of equal size, or limit_train_batches."
            )

    @override
    def teardown(self) -> None:
        if self._data is not None:
            self._data.restore()
            self._data = None
        super().teardown()

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self._recipe.rates is not None:
            self._recipe.rates.attach(self.optimizers)
            for scheduler in self._schedulers():
                self._watch(scheduler)

    def _schedulers(self) -> Iterator[Any]:
        """Yield the schedulers of this run: those that Lightning steps, and those that a user keeps and steps."""
        yield from (config.scheduler for config in self.lr_scheduler_configs)
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        for owner in (self.lightning_module, *callbacks):
            for value in vars(owner).values():
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, LRScheduler) and item.optimizer in self.optimizers:
                        yield item

    def _watch(self, scheduler: Any) -> None:
        if self._recipe.rates is not None and not self._finds_lr:
            self._recipe.rates.watch(scheduler)

    def _follow(self) -> None:
        """Follow what may have changed since the last batch: the window, or Lightning's search for a learning rate."""
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        finds_lr = any(isinstance(callback, _LRCallback) for callback in callbacks)
        if finds_lr != self._finds_lr:
            self._finds_lr = finds_lr
            if not finds_lr:
                # The learning rate was found with this global batch: scaling it again would count the batch twice.
                self._recipe.found_here()
                self._set_batch()
        if self._trainer.accumulate_grad_batches != self._accumulation:
            self._set_batch()
        if self._recipe.rates is not None:
            # A callback may have replaced a scheduler, as StochasticWeightAveraging does.
            for config in self.lr_scheduler_configs:
                self._watch(config.scheduler)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        rates = self._recipe.rates
        state = super().optimizer_state(optimizer)
        if rates is None or not state:
            return state
        return rates.base_state_dict(getattr(optimizer, "_optimizer", optimizer), state)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        rates, saved = self._recipe.rates, checkpoint.get(_CHECKPOINT_KEY)
        if rates is not None and saved is not None and saved["rates"] is not None:
            rates.load_state_dict(saved["rates"])
        super().load_optimizer_state_dict(checkpoint)
        if rates is not None:
            for optimizer in self.optimizers:
                rates.reload(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        loaders = None
        if self._data is not None:
            # Lightning would load them only within an epoch, and not if the loaders were already there.
            progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
            loaders = progress.pop("combined_loader", None)
        checkpoint[_CHECKPOINT_KEY] = {**self._saved(), "loaders": loaders}
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def _saved(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this strategy, next to the state of the loaders."""
        return {
            "recipe": self._recipe.fingerprint(),
            "rates": self._recipe.rates.state_dict() if self._recipe.rates is not None else None,
            "micro_batches": self._data.micro_batches if self._data is not None else 1,
        }

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._loaded = checkpoint.get(_CHECKPOINT_KEY)
        return checkpoint

    def _compare_recipes(self) -> None:
        """Refuse to continue a run under another recipe than it was begun with."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and self._ddp_comm_state is not None:
            rank_zero_info("GradAvgStrategy: ddp_comm_state is not part of a checkpoint and begins anew")
        stock = self._stock and self._recipe.rates is None
        if loaded is None or stock:
            return
        differences = self._recipe.differences(loaded["recipe"])
        if not differences:
            return
        message = "the checkpoint was trained under another recipe:\n  " + "\n  ".join(differences)
        if not self._allow_recipe_change:
            raise ValueError(f"{message}\nChange it back, or pass allow_recipe_change=True if this is meant.")
        rank_zero_info(f"GradAvgStrategy: {message}")
