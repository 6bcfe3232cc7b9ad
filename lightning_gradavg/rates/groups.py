"""Scaled learning rates in the parameter groups of an optimizer.

Between steps, a parameter group holds *base values*, which schedulers and checkpoints see. Within a step it holds
*scaled values*. After t optimizer steps

    scaled lr = factor(t) * base lr,        factor(t) = warmup_factor(f(k), t, T)

with the scale k, the scaling's factor f, and a warm-up of T steps (`scaling.py`). Under `"adam_sde"` the smoothing
constants and `eps` are scaled too, without a warm-up.

Momentum needs no correction when the factor changes: the buffers of `torch.optim` do not contain the learning rate
(Goyal et al. 2017, arXiv 1706.02677).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

_Group: TypeAlias = dict[str, Any]  # an element of `optimizer.param_groups`, as torch types it
_Values: TypeAlias = dict[str, Any]  # those of its values that a scaling changes, by name
_Stamp: TypeAlias = float | tuple[int, int]


@dataclass
class _ScaledGroup:
    """A parameter group that holds scaled values."""

    group: _Group
    replaced_base: _Values  # the base values that the scaled ones were computed from and replaced
    stamp: _Stamp  # of the scaled learning rate, right after it was written

    def base_values(self, factor: float) -> _Values:
        """Return the base values, also if somebody wrote another learning rate into the group since.

        Without such a write, these are the values from before, bit by bit: 0.007 * factor / factor may differ from
        0.007. A learning rate that was written within the step is a scaled one, so its base is that over the factor.
        """
        if _stamp(self.group["lr"]) == self.stamp:
            return self.replaced_base
        return {**self.replaced_base, "lr": self.group["lr"] / factor}

    def is_replaced_by(self, loaded_group: _Group) -> bool:
        """Return whether `load_state_dict` put a group in the place of this one, with the scaled values in it.

        Torch makes a new group then, with the list of parameters of the old one. The values are equal if the state was
        taken within this step. A state of another step, or of a checkpoint, has base values.
        """
        if loaded_group["params"] is not self.group["params"]:
            return False
        return all(loaded_group[name] == self.group[name] for name in self.replaced_base)


class ScaledGroups:
    """Scales all groups of one optimizer for one step, from the construction until `restore`.

    `Rates` makes one when a step begins and calls `restore` when the optimizer has stepped or the batch has ended. The
    states of a group, and what leads from one to the next:

                  scale_new_groups            somebody writes group["lr"]
        base  --------------------->  scaled  ----------------------------->  written
         ^                              |                                        |
         |            restore           |        restore: base = written / factor|
         +------------------------------+----------------------------------------+

    | state | the group holds | `_groups` has a record |
    |---|---|---|
    | base: between steps, or new within one | base values | no |
    | scaled | scaled values | yes |
    | written | scaled values; the optimizer steps with the written learning rate | yes |

    A group that is removed within the step keeps its record: `restore` gives it base values, too, as a user may add it
    again.

    A group may come within a step:

    | how | it comes with | then |
    |---|---|---|
    | `optimizer.add_param_group` | base values | scaled at once |
    | `optimizer.load_state_dict` of a state from another step, or of a checkpoint | base values | scaled at once |
    | `optimizer.load_state_dict` of a state that was taken within this step | scaled values | they stay |
    | a user appends to `optimizer.param_groups` | base values | scaled before the step (`scale_new_groups`) |

    A learning rate that is a tensor is changed in place: groups may share it, and a captured graph may read it.
    """

    def __init__(self, optimizer: Optimizer, scaling: Scaling, scale: float, factor: float) -> None:
        """Scale the groups that the optimizer has.

        Args:
            optimizer: The optimizer, with base values in its groups.
            scaling: The scaling.
            scale: The global batch over the base batch.
            factor: The factor of the learning rate in this step.

        Raises:
            ValueError: If a group cannot be scaled. No group is changed then.
        """
        self._optimizer = optimizer
        self._scaling = scaling
        self._scale = scale
        self._factor = factor
        self._groups: dict[int, _ScaledGroup] = {}  # by the id of the group, which the record keeps alive
        self.scale_new_groups()
        self._methods = ExitStack()
        # Torch has no hook for a new group. The next hook of Lightning's would be too late: a group that is added in
        # `on_before_optimizer_step` takes part in the step that follows at once
        # (`test_a_group_that_is_added_is_scaled_in_its_first_step`).
        for name in ("add_param_group", "load_state_dict"):
            # Lightning accepts optimizers without `add_param_group` (its protocol `Optimizable`).
            if hasattr(optimizer, name):
                method = self._then_scale(getattr(optimizer, name))
                self._methods.enter_context(replaced(optimizer, name, method))

    def _then_scale(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that calls another one, which may bring new groups, and scales those."""

        # A function: of a bound method, `copy.deepcopy` of the optimizer would copy the owner, too.
        def call_and_scale(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.scale_new_groups()
            return result

        return call_and_scale

    def scale_new_groups(self) -> None:
        """Scale the groups that hold base values.

        Raises:
            ValueError: If a group cannot be scaled. No group is changed then.
        """
        new_groups: list[tuple[_Group, _Values, _Values]] = []  # group, base, scaled
        for group in self._optimizer.param_groups:
            if self._find(group) is None:
                scaled_names = self._scaling.hyperparameters(self._scale, group, self._factor).keys()
                base = {name: self._base_value(group, name) for name in scaled_names}
                scaled = self._scaling.hyperparameters(self._scale, base, self._factor)
                new_groups.append((group, base, scaled))
        # Groups may share a tensor. So no value is written before all are computed, and no stamp is taken before all
        # values are written.
        for group, _, scaled in new_groups:
            _write(group, scaled)
        for group, base, _ in new_groups:
            self._groups[id(group)] = _ScaledGroup(group, base, _stamp(group["lr"]))

    def _base_value(self, group: _Group, name: str) -> Any:
        """Return the base of a value of a new group.

        The value may be a tensor that a scaled group has too, as where the constructor of the optimizer got a tensor
        for its learning rate, which is then the default of every group. Such a tensor holds the scaled value already.
        """
        value = group[name]
        if not isinstance(value, Tensor):
            return value
        for scaled_group in self._groups.values():
            if scaled_group.group.get(name) is value:
                return scaled_group.base_values(self._factor)[name]
        return value.detach().clone()

    def _find(self, group: _Group) -> _ScaledGroup | None:
        """Return the record of a group, or None if it holds base values.

        A group that `load_state_dict` put in the place of a scaled one is recorded here if it holds the same values.
        """
        if id(group) in self._groups:
            return self._groups[id(group)]
        for scaled_group in self._groups.values():
            if scaled_group.is_replaced_by(group):
                base = scaled_group.base_values(self._factor)
                self._groups[id(group)] = _ScaledGroup(group, base, _stamp(group["lr"]))
                return self._groups[id(group)]
        return None

    def restore(self) -> None:
        """Write base values into all groups, also into those that were removed within the step."""
        self._methods.close()
        # A user may have loaded a state past the optimizer's method: such groups are recorded here.
        for group in self._optimizer.param_groups:
            self._find(group)
        scaled_groups = list(self._groups.values())
        # All bases before any is written: groups may share a tensor.
        bases = [scaled_group.base_values(self._factor) for scaled_group in scaled_groups]
        for scaled_group, base in zip(scaled_groups, bases, strict=True):
            _write(scaled_group.group, base)

    def with_base_values(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a `state_dict` of the optimizer for a checkpoint, with base values in its groups."""
        groups = []
        for saved_group, group in zip(state["param_groups"], self._optimizer.param_groups, strict=True):
            scaled_group = self._find(group)
            if scaled_group is None:  # appended past the optimizer's method, it holds base values
                groups.append(dict(saved_group))
            else:
                groups.append({**saved_group, **scaled_group.base_values(self._factor)})
        return {**state, "param_groups": groups}


def _write(group: _Group, values: _Values) -> None:
    """Write values into a group, into tensors in place."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            with torch.no_grad():
                group[name].copy_(value)
        else:
            group[name] = value


def _stamp(value: float | Tensor) -> _Stamp:
    """Return what differs once a value was written.

    A tensor is not read: on an accelerator the host would wait. Every write in place raises its version.
    """
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    return value
