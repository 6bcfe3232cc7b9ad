"""Effective learning rates in parameter groups, over schedules in base units.

A parameter group shows the *effective* value, the one that the next optimizer step uses. Schedulers compute in *base
units*, as if the run had its base batch: while one steps, the groups hold base values. So after t optimizer steps

    effective lr = factor(t) * schedule,        factor(t) = warmup_factor(f(k), t, T)

whatever the scheduler is, and what is saved is in base units: a resume at another scale computes its own factor and
cannot compound it. With `"adam_sde"` the smoothing constants and `eps` have effective and base values, too. They follow
the scale at once: warm-up is for the learning rate alone.

Momentum is not corrected when the factor changes: `torch.optim` keeps the learning rate outside the momentum buffer,
and only buffers that contain it need the correction of Goyal et al. 2017 (arXiv 1706.02677).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from lightning_gradavg.rates.scaling import (
    ScaleFunction,
    Scaling,
    as_count,
    resolve_scaling,
    scale_factor,
    scaled_hyperparameters,
    warmup_factor,
)
from lightning_gradavg.rates.watched import unwatch, watch

__all__ = ["LearningRates"]

_Values: TypeAlias = dict[str, Any]


class _Written(NamedTuple):
    """What was written into a parameter group: effective values, the base values behind them, and what lies between."""

    group: _Values  # the optimizer's own dict; held, so that no other gets its id
    factors: tuple[float, float]  # that of the learning rate, and the scale
    base: _Values
    effective: _Values


_NOTHING = _Written({}, (0.0, 0.0), {}, {})


class LearningRates:
    """Keeps effective values in the parameter groups of optimizers, and base values before their schedulers.

    A value that someone else writes into a group, a callback or a scheduler that is not watched, is taken as an
    effective value: its base is the written value / the factor in force. It stays as written until the factor changes
    or a watched scheduler steps. A group that is new, by `add_param_group` or by `load_state_dict` of the optimizer, is
    taken to hold base values. Both are noticed by the next call; where a base value is computed from what a group
    holds, do it within `in_base_units`.

    Args:
        lr_scaling: A key of `SCALINGS`, a function `scale -> factor`, or a `Scaling`.
        lr_warmup_steps: Optimizer steps from the base to the scaled learning rate, of each optimizer; 0 for none.

    Attributes:
        scale: Global batch over base batch; 1 until `set_scale`.

    Raises:
        ValueError: If `lr_scaling` is a string that names no scaling, or `lr_warmup_steps` is negative.
        TypeError: If either is of another type.
    """

    def __init__(self, lr_scaling: str | ScaleFunction | Scaling, lr_warmup_steps: int = 0) -> None:
        self.scale = 1.0
        self._scaling = resolve_scaling(lr_scaling)
        self._warmup_steps = as_count("lr_warmup_steps", lr_warmup_steps, least=0)
        self._factor = scale_factor(self._scaling, self.scale)
        self._steps: dict[Optimizer, int] = {}
        self._written: dict[int, _Written] = {}  # by the id of the group
        self._watched: list[Any] = []
        self._open = 0  # how many `in_base_units` are open

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """Take the values of these optimizers' groups as base values, and write the effective ones.

        Those that are attached already stay as they are, and no others stay attached. Step counters start at 0.

        Raises:
            ValueError: If a value cannot be scaled (see `scaled_hyperparameters`), now or at the smallest beta of a
                scheduler with `cycle_momentum`. Nothing is attached then.
            TypeError: If a learning rate is a tensor.
        """
        steps = {optimizer: self._steps.get(optimizer, 0) for optimizer in optimizers}
        self._changes(steps, self._factor, self.scale)
        self._steps = steps
        self.refresh()

    def set_scale(self, scale: float) -> None:
        """Set the scale, and write the effective values computed from the base values; at any time of a run.

        Raises:
            ValueError: As in `attach`, or if `scale` or the factor is not finite and > 0. Nothing changes then.
            TypeError: If `scale` or the factor is not a number.
        """
        factor = scale_factor(self._scaling, scale)
        self._changes(self._steps, factor, scale)
        with self.in_base_units():
            self.scale, self._factor = float(scale), factor

    def advance(self, optimizer: Optimizer) -> None:
        """Count one optimizer step, and write the effective values of the next; call it after each one."""
        if optimizer not in self._steps:
            raise ValueError(
                f"This {type(optimizer).__name__} is not attached; attached are"
                f" {[type(attached).__name__ for attached in self._steps]}. Call attach([optimizer]) first."
            )
        self._steps[optimizer] += 1
        self.refresh()

    def refresh(self) -> None:
        """Notice new groups and values that others wrote; call it before an optimizer step."""
        if not self._open:
            for written in self._changes(self._steps, self._factor, self.scale):
                written.group.update(written.effective)
                self._written[id(written.group)] = written

    @contextmanager
    def in_base_units(self) -> Iterator[None]:
        """Let all groups hold base values within, and take what they hold at the end as base values.

        It may be nested; `set_scale` and `advance` within write at the end.
        """
        for group, base in [(written.group, self._base(written.group)) for written in self._written.values()]:
            group.update(base)
        self._written = {}
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self.refresh()

    def watch(self, scheduler: Any) -> None:
        """Let a scheduler step in base units, until `detach`; the outer one of those that step others.

        `get_last_lr()`, as all its state, is in base units.

        Raises:
            TypeError: If it has no method `step` or `step_update`, another `LearningRates` watches it, or its class
                cannot be changed.
        """
        if all(scheduler is not watched for watched in self._watched):
            watch(scheduler, self.in_base_units)
            self._watched.append(scheduler)

    def detach(self) -> None:
        """Unwatch all schedulers, let go of all optimizers, and give their groups the base values back."""
        for scheduler in self._watched:
            unwatch(scheduler)
        with self.in_base_units():
            self._watched, self._steps = [], {}

    def state_dict(self) -> dict[str, Any]:
        """Return the step counters, in the order of `attach`: plain data without scale, factor or learning rates."""
        return {"steps": list(self._steps.values())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the step counters to what `state_dict` returned, and write the effective values.

        Raises:
            ValueError: If it is not of as many optimizers as are attached.
        """
        steps = state_dict["steps"]
        if len(steps) != len(self._steps):
            raise ValueError(
                f"The saved optimizer steps {steps!r} are of {len(steps)} optimizers, and {len(self._steps)} are"
                " attached. Resume with the optimizers that the checkpoint was saved with."
            )
        self._steps = dict(zip(self._steps, steps, strict=True))
        self.refresh()

    def base_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a state of the optimizer, with base values in its parameter groups."""
        groups = zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
        return {**state_dict, "param_groups": [{**saved, **self._base(group)} for saved, group in groups]}

    def reload(self, optimizer: Optimizer) -> None:
        """Take all values of the groups as base values, and write the effective ones, after a `load_state_dict`.

        Raises:
            ValueError: If a loaded value cannot be scaled; the groups then hold what was loaded.
        """
        for group in optimizer.param_groups:
            self._written.pop(id(group), None)
        self.refresh()

    def _base(self, group: _Values) -> _Values:
        """Return the base values of what was written into a group; nothing where the group is in base units."""
        written = self._written.get(id(group), _NOTHING)
        lr_factor, scale = written.factors
        base = dict(written.base)
        for name in (name for name, value in written.effective.items() if value != group[name]):
            if name == "lr":
                base[name] = group[name] / lr_factor
            else:
                base[name] = scaled_hyperparameters(self._scaling, 1 / scale, group)[name]
        return base

    def _changes(self, steps: Mapping[Optimizer, int], factor: float, scale: float) -> list[_Written]:
        """Return what to write into every group whose values were computed with other factors."""
        changes = []
        for optimizer, count in steps.items():
            factors = (warmup_factor(factor, count, self._warmup_steps), scale)
            for index, group in enumerate(optimizer.param_groups):
                if self._written.get(id(group), _NOTHING).factors == factors:
                    continue
                values = {**group, **self._base(group)}
                try:
                    effective = self._effective(values, *factors)
                except ValueError as error:
                    raise ValueError(f"{type(optimizer).__name__}, parameter group {index}: {error}") from error
                base = {name: values[name] for name in effective}
                changes.append(_Written(group, factors, base, effective))
        return changes

    def _effective(self, base: _Values, lr_factor: float, scale: float) -> _Values:
        """Return the effective values of a group: `lr` by its factor in the warm-up, moments by the scale."""
        if isinstance(base.get("lr"), Tensor):
            raise TypeError(f"a learning rate that is scaled must be a number, got {base['lr']!r}. Use lr.item().")
        if {"betas", "base_momentum"} <= base.keys():
            # OneCycleLR and CyclicLR leave in the group how far they will lower beta1.
            cycled = {**base, "betas": (base["base_momentum"], *base["betas"][1:])}
            try:
                scaled_hyperparameters(self._scaling, scale, cycled)
            except ValueError as error:
                raise ValueError(f"with the beta1 that its scheduler will set (cycle_momentum): {error}") from error
        return scaled_hyperparameters(self._scaling, scale, base) | {"lr": base["lr"] * lr_factor}
