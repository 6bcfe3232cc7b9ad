"""The recipe of a run: its global batch, the scale that follows from it, and what a checkpoint must agree with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_gradavg.rates.global_batch import BatchScale, batch_scale, contradictions
from lightning_gradavg.rates.learning_rate import LearningRates
from lightning_gradavg.rates.scaling import ScaleFunction, resolve_scaling, scale_factor
from lightning_gradavg.rules import Rule

__all__ = ["RunRecipe"]


class RunRecipe:
    """What a user stated once, and what it means for the loaders and the world of this run.

    Args:
        rule: The reduction rule.
        split_batches: Whether the loader's batches are the global batches.
        lr_scaling: How the learning rate follows the scale.
        base_batch_size: The global batch that the learning rate was tuned for, or None.
        base_world_size: Without it, the ranks that the learning rate was tuned for.
        lr_warmup_steps: Optimizer steps from the base to the scaled learning rate.
        equivalent_to: The name of the run to be reproduced, or None.

    Attributes:
        num_replicas: Chunks that every loader batch is computed in, where they shape the result; else None.
        rates: Keeps effective learning rates; None where nothing is scaled.
        batch: The global and the base batch; None until the training loaders are known.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        split_batches: bool,
        lr_scaling: str | ScaleFunction,
        base_batch_size: int | None,
        base_world_size: int,
        lr_warmup_steps: int,
        equivalent_to: str | None = None,
    ) -> None:
        self._rule, self._split, self._equivalent_to = rule, split_batches, equivalent_to
        self.num_replicas: int | None = None
        self._scaling = resolve_scaling(lr_scaling)
        self._base_batch_size, self._base_world_size = base_batch_size, base_world_size
        self._warmup_steps = lr_warmup_steps
        rates = LearningRates(lr_scaling, lr_warmup_steps)
        self.rates = None if self._scaling.name == "none" else rates
        # The same checks, before there is a loader.
        batch_scale(
            1,
            world_size=1,
            split_batches=split_batches,
            base_batch_size=base_batch_size,
            base_world_size=base_world_size,
        )
        if lr_warmup_steps and self.rates is None:
            raise ValueError(
                f"lr_warmup_steps={lr_warmup_steps} leads to the learning rate that lr_scaling='none' does not scale."
                " Choose an lr_scaling, or warm up with a scheduler."
            )
        self.batch: BatchScale | None = None
        self._known = False

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one optimizer step over ranks and window; None where no loader tells, or none is there yet."""
        return self.batch.global_batch_size if self.batch is not None and self._known else None

    @property
    def lr_scale(self) -> float:
        """What the learning rate is multiplied by once the warm-up is over."""
        return scale_factor(self._scaling, self.batch.scale) if self.batch is not None else 1.0

    def set_batch(self, sizes: Sequence[int | None], *, world_size: int, accumulation: int) -> None:
        """Compute the global batch and apply the scale.

        Args:
            sizes: The batch size of every training loader.
            world_size: Ranks of the process group.
            accumulation: Loader batches per optimizer step and rank.

        Raises:
            ValueError: If the scale cannot be known or served.
        """
        known = [size for size in set(sizes) if size is not None]
        self._known = len(known) == 1 and None not in sizes
        if not self._known and self._base_batch_size is not None and self.rates is not None:
            raise ValueError(
                f"lr_scaling={self._scaling.name!r} with base_batch_size={self._base_batch_size} needs the size of a"
                f" training batch, but the training loaders have the batch sizes {list(sizes)}. Give the loader, its"
                " batch sampler or its dataset an attribute `batch_size`, or use base_world_size."
            )
        self.batch = batch_scale(
            known[0] if self._known else 1,
            world_size=world_size,
            accumulate_grad_batches=accumulation,
            split_batches=self._split,
            base_batch_size=self._base_batch_size,
            base_world_size=self._base_world_size,
        )
        if self.rates is not None:
            self.rates.set_scale(self.batch.scale)

    def found_here(self) -> None:
        """Take the current global batch for the base batch: a learning rate was just found with it."""
        if self.batch is not None and self._known:
            self._base_batch_size = self.batch.global_batch_size
            self.batch = BatchScale(self.batch.global_batch_size, self.batch.global_batch_size)

    def contradictions(self, nodes: int) -> list[str]:
        """Return what does not fit together, with the effective multiplier."""
        if self.batch is None:
            return []
        return [found.message for found in contradictions(self._rule.name, self._scaling, self.batch, nodes=nodes)]

    def fingerprint(self) -> dict[str, Any]:
        """Return what a run that continues this one must agree with, free of the world size."""
        return {
            "reduction": self._rule.name,
            "split_batches": self._split,
            "equivalent_to": self._equivalent_to,
            "num_replicas": self.num_replicas,
            "global_batch_size": self.global_batch_size,
            "lr_scaling": self._scaling.name,
            "base_batch_size": self._fingerprinted_base,
            "lr_warmup_steps": self._warmup_steps,
        }

    @property
    def _fingerprinted_base(self) -> float | None:
        # Without a scaling the base says nothing, and a search for a learning rate would seem to change the recipe.
        if self.rates is None or self.batch is None or not self._known:
            return None
        return self.batch.base_batch_size

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return where a saved fingerprint differs from this one."""
        return [
            f"{name}: {saved[name]!r} in the checkpoint, now {value!r}"
            for name, value in self.fingerprint().items()
            if saved.get(name) is not None and saved[name] != value
        ]
