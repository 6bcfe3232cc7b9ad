"""Effective learning rates in parameter groups, for the length of a step.

While no step is in progress, a group holds *base values*, which schedulers and checkpoints see. From `begin` to `end`
it holds *effective values*. After t optimizer steps

    effective lr = factor(t) * base lr,        factor(t) = warmup_factor(f(k), t, T)

With `"adam_sde"` the smoothing constants and `eps` follow the scale, too, without a warm-up. Momentum needs no
correction when the factor changes: the buffers of `torch.optim` do not contain the learning rate (Goyal et al. 2017,
arXiv 1706.02677).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gradavg.lightning_internals import version_of
from lightning_gradavg.rates.scaling import (
    ScaleFunction,
    Scaling,
    as_count,
    resolve_scaling,
    scale_factor,
    scaled_hyperparameters,
    warmup_factor,
)

__all__ = ["LearningRates"]

_Values: TypeAlias = dict[str, Any]


@dataclass
class _Scaled:
    """The values that a scaling governs in one parameter group, in a step."""

    group: _Values  # the optimizer's own dict
    lr_factor: float
    base: _Values
    effective: _Values
    stamps: _Values = field(default_factory=dict)  # of the values that were left in the group

    def written(self) -> set[str]:
        """Return what anyone has written into the group since."""
        return {name for name, stamp in self.stamps.items() if _stamp(self.group[name]) != stamp}


class LearningRates:
    """Scales what the parameter groups of optimizers hold, while a step is in progress.

    A value that someone else writes into a group during a step is an effective value: this step uses it unchanged. Its
    base is the written value / the factor. A learning rate that is a tensor is changed in place.

    Attributes:
        scale: Global batch over base batch; 1 until `set_scale`.
    """

    def __init__(self, lr_scaling: str | ScaleFunction | Scaling, lr_warmup_steps: int = 0) -> None:
        self.scale = 1.0
        self._scaling = resolve_scaling(lr_scaling)
        self._warmup_steps = as_count("lr_warmup_steps", lr_warmup_steps, least=0)
        self._steps: dict[Optimizer, int] = {}
        self._begun: dict[Optimizer, list[_Scaled]] = {}

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """Scale these optimizers and no others. Those that are attached already go on counting.

        Raises:
            ValueError: If a value cannot be scaled.
        """
        self.end()
        self._steps = {optimizer: self._steps.get(optimizer, 0) for optimizer in optimizers}
        self.set_scale(self.scale)

    def set_scale(self, scale: float) -> None:
        """Set the scale of the steps from the next one on; ValueError if a value cannot be scaled."""
        self.end()
        self.scale = scale
        for optimizer in self._steps:
            self.of(optimizer)

    def begin(self) -> None:
        """Have the groups of all optimizers hold effective values, until `end` or the end of their `step`."""
        for optimizer in self._steps:
            self._begin(optimizer)

    def end(self) -> None:
        """Have all groups hold base values.

        Raises:
            ValueError: If no base value leads to a value that was written. Groups hold their last base values then.
        """
        for optimizer in [*self._begun]:
            self._end(optimizer)

    @contextmanager
    def step(self, optimizer: Optimizer) -> Iterator[None]:
        """Have an optimizer's groups hold effective values inside, and count the step unless it fails."""
        if optimizer not in self._steps:
            raise ValueError(
                f"lr_scaling does not know this {type(optimizer).__name__}, whose step would use its learning rate"
                " unscaled: return it from configure_optimizers."
            )
        self._begin(optimizer)
        try:
            yield
            self._steps[optimizer] += 1
        finally:
            self._end(optimizer)

    def of(self, optimizer: Optimizer) -> list[Any]:
        """Return the effective learning rates of an optimizer's next step, or of the one in progress, by group."""
        if optimizer in self._steps and optimizer not in self._begun:
            return [each.effective["lr"] for each in self._scaled(optimizer)]
        return [group["lr"] for group in optimizer.param_groups if "lr" in group]

    def state_dict(self) -> dict[str, Any]:
        """Return the step counters, in the order of `attach`."""
        return {"steps": list(self._steps.values())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the step counters to what `state_dict` returned."""
        steps = state_dict["steps"]
        if len(steps) != len(self._steps):
            raise ValueError(
                f"The saved optimizer steps {steps!r} are of {len(steps)} optimizers, and {len(self._steps)} are"
                " attached. Resume with the optimizers that the checkpoint was saved with."
            )
        self._steps = dict(zip(self._steps, steps, strict=True))

    def base_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a state of the optimizer, with base values in its parameter groups."""
        bases = {id(each.group): self._base(each) for each in self._begun.get(optimizer, ())}
        groups = zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
        return {**state_dict, "param_groups": [{**saved, **bases.get(id(group), {})} for saved, group in groups]}

    def _begin(self, optimizer: Optimizer) -> None:
        if optimizer not in self._begun:
            self._begun[optimizer] = scaled = self._scaled(optimizer)
            _write((each.group, each.effective) for each in scaled)
            for each in scaled:  # after all of them: groups may share a tensor
                each.stamps = {name: _stamp(each.group[name]) for name in each.effective}

    def _end(self, optimizer: Optimizer) -> None:
        scaled = self._begun.pop(optimizer, [])
        values = [each.base for each in scaled]
        try:
            values = [self._base(each) for each in scaled]
        finally:
            _write(zip((each.group for each in scaled), values, strict=True))

    def _base(self, scaled: _Scaled) -> _Values:
        """Return the base values of a group in a step, and of what was written into it."""
        written, group = scaled.written(), scaled.group
        moments = scaled_hyperparameters(self._scaling, 1 / self.scale, group) if written - {"lr"} else {}
        values = moments | {"lr": group["lr"] / scaled.lr_factor}
        return scaled.base | {name: values[name] for name in written}

    def _scaled(self, optimizer: Optimizer) -> list[_Scaled]:
        """Return what the groups of an optimizer, which hold base values, are to hold in its next step."""
        factor = warmup_factor(scale_factor(self._scaling, self.scale), self._steps[optimizer], self._warmup_steps)
        scaled = []
        for index, group in enumerate(optimizer.param_groups):
            try:
                effective = scaled_hyperparameters(self._scaling, self.scale, group) | {"lr": group["lr"] * factor}
                if {"betas", "base_momentum"} <= group.keys():
                    # OneCycleLR and CyclicLR will set that beta1: raise at the start, not at the step that reaches it.
                    lowest = {**group, "betas": (group["base_momentum"], *group["betas"][1:])}
                    scaled_hyperparameters(self._scaling, self.scale, lowest)
            except ValueError as error:
                raise ValueError(f"{type(optimizer).__name__}, parameter group {index}: {error}") from error
            base = {name: _kept(group[name]) for name in effective}
            scaled.append(_Scaled(group, factor, base, effective))
        return scaled


@torch.no_grad()
def _write(values: Iterable[tuple[_Values, _Values]]) -> None:
    for group, of_group in values:
        for name, value in of_group.items():
            if isinstance(value, Tensor):
                group[name].copy_(value)
            else:
                group[name] = value


def _stamp(value: Any) -> Any:
    """Return what tells whether a value was written; of a tensor without waiting for an accelerator."""
    return (id(value), version_of(value)) if isinstance(value, Tensor) else value


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
