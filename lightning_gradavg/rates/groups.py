"""Effective learning rates in the parameter groups of an optimizer.

While no step is in progress, a group holds *base values*, which schedulers and checkpoints see, and during a step
*effective values*. After t optimizer steps

    effective lr = factor(t) * base lr,        factor(t) = warmup_factor(f(k), t, T)

With `"adam_sde"` the smoothing constants and `eps` follow the scale, too, without a warm-up. Momentum needs no
correction when the factor changes: the buffers of `torch.optim` do not contain the learning rate (Goyal et al. 2017,
arXiv 1706.02677).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gradavg._lightning.internals import version_of
from lightning_gradavg._lightning.methods import replaced
from lightning_gradavg.rates.scaling import Scaling

__all__ = ["ScaledGroups"]

_Values: TypeAlias = dict[str, Any]


@dataclass
class _HeldGroup:
    """A parameter group that holds effective values."""

    group: _Values
    written_base: _Values  # what the effective values were computed from
    effective: _Values
    left: Any = None  # the stamp of the learning rate that was written

    def base(self, factor: float) -> _Values:
        """Return the base values: a learning rate that someone else wrote since is an effective one."""
        if _stamp(self.group["lr"]) == self.left:
            return self.written_base
        return {**self.written_base, "lr": self.group["lr"] / factor}


class ScaledGroups:
    """An optimizer's groups that hold effective values, from the construction on until `end`.

    A learning rate that someone else writes into a group meanwhile is an effective one, which this step uses unchanged.
    Its base is the written value / the factor. A learning rate that is a tensor is changed in place.

    A group that is added meanwhile, or loaded with a state, comes with base values, as before training and in a
    checkpoint, and gets effective ones at once. A loaded group that has the effective values was saved within the step,
    and keeps them.
    """

    def __init__(self, optimizer: Optimizer, scaling: Scaling, scale: float, factor: float) -> None:
        self._optimizer = optimizer
        self._scaling = scaling
        self._scale = scale
        self._factor = factor
        self._held: dict[int, _HeldGroup] = {}  # by the id of the group
        self.follow()
        self._methods = ExitStack()
        # Torch has no hook for a new group, and steps with what it finds right after the last hook of Lightning's.
        for name in ("add_param_group", "load_state_dict"):
            if hasattr(optimizer, name):
                self._methods.enter_context(replaced(optimizer, name, self._followed(getattr(optimizer, name))))

    def _followed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that changes the groups, and has the new ones hold effective values."""

        def change(*args: Any, **kwargs: Any) -> Any:  # a function: a copy of the optimizer has none of it
            result = method(*args, **kwargs)
            self.follow()
            return result

        return change

    def follow(self) -> None:
        """Have the groups that the optimizer has now hold effective values."""
        begun: list[_HeldGroup] = []
        for group in self._optimizer.param_groups:
            if self._find(group) is None:
                base = {name: self._base(group, name) for name in self._hyperparameters(group)}
                effective = self._hyperparameters({**group, **base})
                begun.append(_HeldGroup(group, base, effective))
        _write((held.group, held.effective) for held in begun)
        for held in begun:  # after all of them: groups may share a tensor
            held.left = _stamp(held.group["lr"])
            self._held[id(held.group)] = held

    def _hyperparameters(self, group: _Values) -> _Values:
        return self._scaling.hyperparameters(self._scale, group, self._factor)

    def _base(self, group: _Values, name: str) -> Any:
        """Return the base of a new group's value. A tensor that it shares with another group holds an effective one."""
        value = group[name]
        for held in self._held.values():
            if isinstance(value, Tensor) and held.group.get(name) is value:
                return held.base(self._factor)[name]
        return _kept(value)

    def _find(self, group: _Values) -> _HeldGroup | None:
        """Return what is known of a group, or of one that it replaced, with the same parameters and effective values.

        None of a group that holds base values.
        """
        if id(group) in self._held:
            return self._held[id(group)]
        for held in list(self._held.values()):
            if held.group["params"] is not group["params"]:
                continue
            if all(group[name] == value for name, value in held.effective.items()):
                found = _HeldGroup(group, held.written_base, held.effective, _stamp(group["lr"]))
                self._held[id(group)] = found
                return found
        return None

    def end(self) -> None:
        """Have the groups hold base values, also those that were removed."""
        self._methods.close()
        for group in self._optimizer.param_groups:
            self._find(group)
        held_groups = list(self._held.values())
        # All bases before any is written: groups may share a tensor.
        bases = [held.base(self._factor) for held in held_groups]
        _write((held.group, base) for held, base in zip(held_groups, bases, strict=True))

    def at_rest(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a state of the optimizer, with base values in its parameter groups."""
        groups = []
        for saved, group in zip(state["param_groups"], self._optimizer.param_groups, strict=True):
            held = self._find(group)
            groups.append({**saved, **({} if held is None else held.base(self._factor))})
        return {**state, "param_groups": groups}


@torch.no_grad()
def _write(pairs: Iterable[tuple[_Values, _Values]]) -> None:
    for group, values in pairs:
        for name, value in values.items():
            if isinstance(value, Tensor):
                group[name].copy_(value)
            else:
                group[name] = value


def _stamp(value: Any) -> Any:
    """Return what tells whether a value was written; of a tensor without waiting for an accelerator."""
    return (id(value), version_of(value)) if isinstance(value, Tensor) else value


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
