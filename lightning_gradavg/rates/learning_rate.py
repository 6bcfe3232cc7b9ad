"""Effective learning rates over schedules in base units.

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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from lightning_gradavg.rates.parameter_groups import EffectiveGroups
from lightning_gradavg.rates.scaling import ScaleFunction, Scaling, resolve_scaling, scale_factor, warmup_factor
from lightning_gradavg.rates.watched import STEPS, is_watched, watched_class

__all__ = ["LearningRates"]


@dataclass(eq=False)
class _Attached:
    optimizer: Optimizer
    groups: EffectiveGroups
    steps: int = 0
    depth: int = 0  # how many `in_base_units` are open


class LearningRates:
    """Keeps effective values in the parameter groups of optimizers, and base values before their schedulers.

    A value that someone else writes into a group, a callback or a scheduler that is not watched, is taken as an
    effective value: its base is the written value / the factor in force. It stays as written until the factor changes
    or a watched scheduler steps. A group that is new, by `add_param_group` or by `load_state_dict` of the optimizer, is
    taken to hold base values. Both are noticed by the next call for that optimizer; where a base value is computed from
    what a group holds, do it within `in_base_units`.

    Tensor learning rates are updated in place, as schedulers of torch do. `get_last_lr()` of a watched scheduler, as
    all its state, is in base units.

    Args:
        lr_scaling: A key of `SCALINGS`, a function `scale -> factor`, or a `Scaling`.
        lr_warmup_steps: Optimizer steps from the base to the scaled learning rate, of each optimizer; 0 for none.

    Raises:
        ValueError: If `lr_scaling` is a string that names no scaling, or `lr_warmup_steps` is negative.
        TypeError: If either is of another type.
    """

    def __init__(self, lr_scaling: str | ScaleFunction | Scaling, lr_warmup_steps: int = 0) -> None:
        if isinstance(lr_warmup_steps, bool) or not isinstance(lr_warmup_steps, int):
            raise TypeError(
                f"lr_warmup_steps must be an int, got {lr_warmup_steps!r} of type {type(lr_warmup_steps).__name__}."
            )
        if lr_warmup_steps < 0:
            raise ValueError(f"lr_warmup_steps must be >= 0 (0: no warm-up), got {lr_warmup_steps!r}.")
        self._scaling = resolve_scaling(lr_scaling)
        self._warmup_steps = lr_warmup_steps
        self._scale = 1.0
        self._factor = scale_factor(self._scaling, self._scale)
        self._attached: list[_Attached] = []
        self._watched: list[tuple[Any, type]] = []

    @property
    def scale(self) -> float:
        """Global batch over base batch; 1 until `set_scale`."""
        return self._scale

    @property
    def active(self) -> bool:
        """Whether any effective value differs from its base; if not, no value of a group is ever touched."""
        return self._factor != 1 or (self._scaling.rescales_moments and self._scale != 1)

    def factor(self, optimizer: Optimizer) -> float:
        """Return effective learning rate / base learning rate after the optimizer steps counted so far.

        It is the same for all parameter groups of an optimizer.
        """
        return warmup_factor(self._factor, self._of(optimizer).steps, self._warmup_steps)

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """Take the values of the parameter groups as base values, and write the effective ones.

        Optimizers that are attached already stay as they are. Step counters start at 0.

        Raises:
            ValueError: If a value cannot be scaled (see `scaled_hyperparameters`), now or at the smallest beta of a
                scheduler with `cycle_momentum`, or optimizers share a learning-rate tensor. Nothing is attached then.
        """
        new: list[_Attached] = []
        for optimizer in optimizers:
            if all(attached.optimizer is not optimizer for attached in (*self._attached, *new)):
                new.append(_Attached(optimizer, EffectiveGroups(optimizer, self._scaling)))
        self._check((*self._attached, *new), self._scale)
        self._attached += new
        self.refresh()

    def set_scale(self, scale: float) -> None:
        """Set the scale, and write the effective values computed from the base values; at any time of a run.

        Args:
            scale: Global batch over base batch, finite and > 0.

        Raises:
            ValueError: As in `attach`, or if `scale` or the factor is not finite and > 0. Nothing changes then.
            TypeError: If `scale` or the factor is not a number.
        """
        factor = scale_factor(self._scaling, scale)
        self._check(self._attached, float(scale))
        for attached in self._attached:
            attached.groups.to_base_units()
        self._scale, self._factor = float(scale), factor
        self.refresh()

    def advance(self, optimizer: Optimizer) -> None:
        """Count one optimizer step, and write the effective values of the next; call it after each one."""
        self._of(optimizer).steps += 1
        self.refresh(optimizer)

    def refresh(self, *optimizers: Optimizer) -> None:
        """Notice new groups and values that others wrote; call it before an optimizer step.

        Args:
            optimizers: All that are attached by default.
        """
        for attached in self._selected(optimizers):
            self._write(attached)

    @contextmanager
    def in_base_units(self, *optimizers: Optimizer) -> Iterator[None]:
        """Let the parameter groups hold base values within, and take what they hold at the end as base values.

        It may be nested; `set_scale` and `advance` within write at the end.

        Args:
            optimizers: All that are attached by default.
        """
        selected = self._selected(optimizers)
        for attached in selected:
            attached.groups.to_base_units()
        for attached in selected:
            attached.depth += 1
        try:
            yield
        finally:
            for attached in selected:
                attached.depth -= 1
            for attached in selected:
                if attached in self._attached:
                    self._write(attached)

    def watch(self, scheduler: Any) -> None:
        """Let `scheduler.step` run in base units, until `unwatch` or `detach`.

        Of schedulers that step others, such as `SequentialLR`, only the outer one needs it. Pickles, copies and
        `state_dict()` of the scheduler are those of one that nobody watches.

        Args:
            scheduler: Any object whose class has a method `step` or `step_update`.

        Raises:
            TypeError: If it has neither, or is no object of a Python class.
            ValueError: If another `LearningRates` watches it, or `attach` would refuse the betas that it will use.
        """
        if any(scheduler is watched for watched, _ in self._watched):
            return
        original = type(scheduler)
        if is_watched(scheduler):
            raise ValueError(f"{original.__qualname__} is watched by another LearningRates; call its detach() first.")
        self._check(self._attached, self._scale)
        remedy = "Wrap what writes learning rates in `with learning_rates.in_base_units():` instead."
        if not any(hasattr(original, name) for name in STEPS):
            raise TypeError(f"{original.__qualname__} has no method {' or '.join(map(repr, STEPS))}. {remedy}")
        try:
            scheduler.__class__ = watched_class(original, self.in_base_units)
        except TypeError as error:
            raise TypeError(f"A {original.__qualname__} cannot be watched: {error}. {remedy}") from None
        self._watched.append((scheduler, original))

    def unwatch(self, scheduler: Any) -> None:
        """Give a watched scheduler its own `step` back; nothing happens to others."""
        for watched, original in self._watched:
            if watched is scheduler:
                scheduler.__class__ = original
        self._watched = [pair for pair in self._watched if pair[0] is not scheduler]

    def detach(self, *, restore_values: bool = True) -> None:
        """Unwatch all schedulers and let go of all optimizers.

        Args:
            restore_values: Whether the groups get their base values back; if not, they keep the effective ones.
        """
        for scheduler, _ in tuple(self._watched):
            self.unwatch(scheduler)
        if restore_values:
            for attached in self._attached:
                attached.groups.to_base_units()
        self._attached = []

    def state_dict(self) -> dict[str, Any]:
        """Return the step counters, in the order of `attach`: plain data without scale, factor or learning rates."""
        return {"steps": [attached.steps for attached in self._attached]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the step counters to what `state_dict` returned, and write the effective values.

        Raises:
            ValueError: If it is not of as many optimizers as are attached.
        """
        steps = state_dict["steps"]
        if len(steps) != len(self._attached):
            raise ValueError(
                f"The saved optimizer steps {steps!r} are of {len(steps)} optimizers, and {len(self._attached)} are"
                " attached. Resume with the optimizers that the checkpoint was saved with."
            )
        for attached, count in zip(self._attached, steps, strict=True):
            attached.steps = count
        self.refresh()

    def base_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the optimizer's state with base values in its parameter groups; the optimizer stays as it is.

        Args:
            optimizer: An attached optimizer.
            state_dict: A state of it, `optimizer.state_dict()` by default; it is copied. One without `param_groups`, as
                ranks have that save nothing, comes back as it is.
        """
        attached = self._of(optimizer)
        return attached.groups.base_state_dict(optimizer.state_dict() if state_dict is None else state_dict)

    def reload(self, optimizer: Optimizer) -> None:
        """Take all values of the groups as base values, and write the effective ones.

        Call it after `optimizer.load_state_dict`.

        Raises:
            ValueError: If a loaded value cannot be scaled; the groups then hold what was loaded.
        """
        attached = self._of(optimizer)
        attached.groups.reload()
        self._write(attached)

    def _of(self, optimizer: Optimizer) -> _Attached:
        for attached in self._attached:
            if attached.optimizer is optimizer:
                return attached
        raise ValueError(
            f"This {type(optimizer).__name__} is not attached; attached are"
            f" {[type(attached.optimizer).__name__ for attached in self._attached]}. Call attach([optimizer]) first."
        )

    def _selected(self, optimizers: Sequence[Optimizer]) -> list[_Attached]:
        return [self._of(optimizer) for optimizer in optimizers] or list(self._attached)

    def _check(self, every: Iterable[_Attached], scale: float) -> None:
        if self._scaling.name == "none":
            return
        holders: dict[int, Optimizer] = {}
        for attached in every:
            attached.groups.check(scale)
            for lr in attached.groups.learning_rate_tensors():
                if holders.setdefault(id(lr), attached.optimizer) is not attached.optimizer:
                    raise ValueError(
                        f"Two optimizers share one learning-rate tensor, {lr!r}, but count their steps apart. Give each"
                        " its own: lr.clone()."
                    )

    def _write(self, attached: _Attached) -> None:
        if self.active and not attached.depth:
            attached.groups.write(warmup_factor(self._factor, attached.steps, self._warmup_steps), self._scale)
