"""The recipe of a run: its global batch, the scale that follows from it, and what a checkpoint must agree with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from lightning_gradavg.rates.scaling import (
    BatchScale,
    ScaleFunction,
    as_count,
    batch_scale,
    contradictions,
    resolve_scaling,
    scale_factor,
)
from lightning_gradavg.rules import Rule

__all__ = ["RunRecipe"]


@dataclass(eq=False)
class RunRecipe:
    """What a user stated once, and what it means for the loaders and the world of this run.

    Attributes:
        num_replicas: Chunks that every loader batch is computed in, where they shape the result; else None.
        arithmetic: What numbers are computed in, by name, where a run that continues this one must agree with it.
        batch: The global and the base batch; of scale 1 until the training loaders are known.
        global_batch_size: Samples of one optimizer step over ranks and window; None where no loader tells, or none is
            there yet.
    """

    rule: Rule
    _: KW_ONLY
    split_batches: bool
    lr_scaling: str | ScaleFunction
    base_batch_size: int | None
    base_world_size: int
    lr_warmup_steps: int
    equivalent_to: str | None = None
    num_replicas: int | None = None
    arithmetic: Mapping[str, Any] = field(default_factory=dict)
    batch: BatchScale = field(init=False)
    global_batch_size: int | None = field(init=False)

    def __post_init__(self) -> None:
        self._scaling = resolve_scaling(self.lr_scaling)
        if as_count("lr_warmup_steps", self.lr_warmup_steps, least=0) > 0 and not self.scales:
            raise ValueError(
                f"lr_warmup_steps={self.lr_warmup_steps} leads to the learning rate that lr_scaling='none' does not"
                " scale. Choose an lr_scaling, or warm up with a scheduler."
            )
        self.set_batch([1], world_size=1, accumulation=1)  # the same checks, before there is a loader
        self.batch, self.global_batch_size = BatchScale(1, 1), None

    @property
    def scales(self) -> bool:
        """Whether the learning rate follows the global batch."""
        return self._scaling.name != "none"

    @property
    def lr_scale(self) -> float:
        """What the learning rate is multiplied by once the warm-up is over."""
        return scale_factor(self._scaling, self.batch.scale)

    def set_batch(self, sizes: Sequence[int | None], *, world_size: int, accumulation: int) -> None:
        """Compute the global batch and the scale from the batch sizes of all training loaders."""
        size = sizes[0] if len({*sizes}) == 1 else None
        if size is None and self.base_batch_size is not None and self.scales:
            raise ValueError(
                f"lr_scaling={self._scaling.name!r} with base_batch_size={self.base_batch_size} needs the size of a"
                f" training batch, but the training loaders have the batch sizes {list(sizes)}. Give the loader, its"
                " batch sampler or its dataset an attribute `batch_size`, or use base_world_size."
            )
        self.batch = batch_scale(
            size or 1,  # without a base batch the scale is a ratio of ranks, for which any size will do
            world_size=world_size,
            accumulate_grad_batches=accumulation,
            split_batches=self.split_batches,
            base_batch_size=self.base_batch_size,
            base_world_size=self.base_world_size,
        )
        self.global_batch_size = self.batch.global_batch_size if size is not None else None

    def found_here(self) -> None:
        """Take the current global batch for the base batch: a learning rate was just found with it."""
        if self.global_batch_size is not None:
            self.base_batch_size = self.global_batch_size
            self.batch = BatchScale(self.global_batch_size, self.global_batch_size)

    def contradictions(self, nodes: int) -> list[str]:
        """Return what does not fit together in the recipe."""
        return list(contradictions(self.rule.name, self._scaling, self.batch, nodes=nodes).values())

    def settings(self) -> dict[str, Any]:
        """Return what a run that continues this one must agree with, free of the world size."""
        # Without a scaling the base says nothing, and a search for a learning rate would seem to change the recipe.
        says_base = self.scales and self.global_batch_size is not None
        return {
            "reduction": self.rule.name,
            "split_batches": self.split_batches,
            "equivalent_to": self.equivalent_to,
            "num_replicas": self.num_replicas,
            "global_batch_size": self.global_batch_size,
            "lr_scaling": self._scaling.name,
            "base_batch_size": self.batch.base_batch_size if says_base else None,
            "lr_warmup_steps": self.lr_warmup_steps,
            **self.arithmetic,
        }

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return where saved settings differ from these."""
        return [
            f"{name}: {saved[name]!r} in the checkpoint, now {value!r}"
            for name, value in self.settings().items()
            if saved.get(name) not in (None, value)
        ]
