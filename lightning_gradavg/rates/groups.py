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
from typing import Any, NamedTuple, TypeAlias

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


class _Scaled(NamedTuple):
    """The values that a scaling governs in one parameter group."""

    group: _Values  # the optimizer's own dict; held, so that no other gets its id
    factors: tuple[float, float]  # that of the learning rate, and the scale
    base: _Values
    effective: _Values
    left: tuple[Any, ...] = ()  # what was last left in the group, to see whether anyone wrote since


class LearningRates:
    """Scales what the parameter groups of optimizers hold, while a step is in progress.

    A value that someone else writes into a group during a step is an effective value: this step uses it unchanged, and
    so do later ones until its base or the factor changes. Its base is the written value / the factor. A learning rate
    that is a tensor is changed in place.

    Attributes:
        scale: Global batch over base batch; 1 until `set_scale`.
    """

    def __init__(self, lr_scaling: str | ScaleFunction | Scaling, lr_warmup_steps: int = 0) -> None:
        self.scale = 1.0
        self._scaling = resolve_scaling(lr_scaling)
        self._warmup_steps = as_count("lr_warmup_steps", lr_warmup_steps, least=0)
        self._factor = scale_factor(self._scaling, self.scale)
        self._steps: dict[Optimizer, int] = {}
        self._begun: dict[Optimizer, list[_Scaled]] = {}
        self._ended: dict[Optimizer, list[_Scaled]] = {}
        self._stepping: set[Optimizer] = set()

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """Scale these optimizers and no others. Those that are attached already go on counting.

        Raises:
            ValueError: If a value cannot be scaled, now or at the lowest beta1 of its scheduler. Nothing changes then.
        """
        self.end()
        steps = {optimizer: self._steps.get(optimizer, 0) for optimizer in optimizers}
        for optimizer, count in steps.items():
            self._scaled(optimizer, self._factor, self.scale, count)
        self._steps, self._ended = steps, {}

    def set_scale(self, scale: float) -> None:
        """Set the scale of the steps from the next one on. What raises changes nothing."""
        self.end()
        factor = scale_factor(self._scaling, scale)
        for optimizer in self._steps:
            self._scaled(optimizer, factor, scale)
        self.scale, self._factor = float(scale), factor

    def begin(self) -> None:
        """Have the groups of all optimizers hold effective values, until `end` or the end of their `step`."""
        for optimizer in self._steps:
            self._begin(optimizer)

    def end(self) -> bool:
        """Have all groups hold base values, but for those of optimizers that are within a `step`.

        Returns:
            Whether there is no such optimizer.

        Raises:
            ValueError: If no base value leads to a value that was written. The group holds its last base value then.
        """
        for optimizer in self._begun.keys() - self._stepping:
            self._end(optimizer)
        return not self._stepping

    @contextmanager
    def step(self, optimizer: Optimizer) -> Iterator[None]:
        """Have an optimizer's groups hold effective values inside, and count the step unless it fails."""
        if optimizer not in self._steps:
            attached = [type(each).__name__ for each in self._steps]
            raise ValueError(
                f"This {type(optimizer).__name__} is not attached; attached are {attached}. Return it from"
                " configure_optimizers."
            )
        self._begin(optimizer)
        self._stepping.add(optimizer)
        try:
            yield
            self._steps[optimizer] += 1
        finally:
            self._stepping.remove(optimizer)
            self._end(optimizer)

    def of(self, optimizer: Optimizer) -> list[Any]:
        """Return the effective learning rates of an optimizer's next step, or of the one in progress, by group."""
        if optimizer in self._begun:
            return [group["lr"] for group in optimizer.param_groups]
        return [each.effective["lr"] for each in self._scaled(optimizer, self._factor, self.scale)]

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
        bases = {id(each.group): self._settled(each).base for each in self._begun.get(optimizer, ())}
        groups = zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
        return {**state_dict, "param_groups": [{**saved, **bases.get(id(group), {})} for saved, group in groups]}

    def _begin(self, optimizer: Optimizer) -> None:
        if optimizer not in self._begun:
            scaled = self._scaled(optimizer, self._factor, self.scale)
            self._begun[optimizer] = _written([(each, each.effective) for each in scaled])

    def _end(self, optimizer: Optimizer) -> None:
        settled, failed = [], None
        for each in self._begun.pop(optimizer, ()):
            try:
                settled.append(self._settled(each))
            except ValueError as error:
                settled.append(each)
                failed = error
        self._ended[optimizer] = _written([(each, each.base) for each in settled])
        if failed is not None:
            raise failed

    def _settled(self, scaled: _Scaled) -> _Scaled:
        """Return a group in a step with what was written into it since, and the base values of that."""
        group, (lr_factor, scale) = scaled.group, scaled.factors
        changed = zip(scaled.effective, scaled.left, strict=True)
        effective = {name: _kept(group[name]) for name, left in changed if _stamp(group[name]) != left}
        moments = scaled_hyperparameters(self._scaling, 1 / scale, group) if effective.keys() - {"lr"} else {}
        base = {name: group["lr"] / lr_factor if name == "lr" else moments[name] for name in effective}
        return scaled._replace(base=scaled.base | base, effective=scaled.effective | effective)

    def _scaled(self, optimizer: Optimizer, factor: float, scale: float, count: int | None = None) -> list[_Scaled]:
        """Return what the groups of an optimizer, which hold base values, are to hold after `count` steps."""
        ended = {id(each.group): each for each in self._ended.get(optimizer, ())}
        count = self._steps[optimizer] if count is None else count
        factors = (warmup_factor(factor, count, self._warmup_steps), scale)
        scaled = []
        for index, group in enumerate(optimizer.param_groups):
            last = ended.get(id(group))
            if last is not None and last.factors == factors and last.left == _stamps(group, last.base):
                scaled.append(last)  # also the bits of a value that was written
                continue
            try:
                effective = self._effective(group, *factors)
            except ValueError as error:
                raise ValueError(f"{type(optimizer).__name__}, parameter group {index}: {error}") from error
            scaled.append(_Scaled(group, factors, {name: _kept(group[name]) for name in effective}, effective))
        return scaled

    def _effective(self, base: _Values, lr_factor: float, scale: float) -> _Values:
        if {"betas", "base_momentum"} <= base.keys():
            # OneCycleLR and CyclicLR leave in the group how far they will lower beta1.
            lowest = {**base, "betas": (base["base_momentum"], *base["betas"][1:])}
            try:
                scaled_hyperparameters(self._scaling, scale, lowest)
            except ValueError as error:
                raise ValueError(f"with the beta1 that its scheduler will set (cycle_momentum): {error}") from error
        return scaled_hyperparameters(self._scaling, scale, base) | {"lr": base["lr"] * lr_factor}


@torch.no_grad()
def _written(values: list[tuple[_Scaled, _Values]]) -> list[_Scaled]:
    """Write values into groups, and return these with what is left in them."""
    for scaled, of_group in values:
        for name, value in of_group.items():
            if isinstance(value, Tensor):
                scaled.group[name].copy_(value)
            else:
                scaled.group[name] = value
    # After all of them: groups may share a tensor.
    return [scaled._replace(left=_stamps(scaled.group, of_group)) for scaled, of_group in values]


def _stamps(group: _Values, names: Iterable[str]) -> tuple[Any, ...]:
    return tuple(_stamp(group[name]) for name in names)


def _stamp(value: Any) -> Any:
    """Return what tells whether a value was written; of a tensor without waiting for an accelerator."""
    return (id(value), version_of(value)) if isinstance(value, Tensor) else value


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
