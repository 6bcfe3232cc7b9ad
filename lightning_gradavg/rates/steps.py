"""Scaled learning rates within the steps of an optimizer, by the optimizer's own hooks.

The groups of an optimizer hold *base values*. Schedulers, checkpoints, callbacks and the user's code see nothing else.
Only while the optimizer computes its update they hold *scaled values*. After t optimizer steps

    scaled lr = factor(t) * base lr,        factor(t) = warmup_factor(f(k), t, T)

with the scale k, the scaling's factor f, and a warm-up of T steps (`scaling.py`). Under `"adam_sde"` the smoothing
constants and `eps` are scaled too, without a warm-up.

Momentum needs no correction when the factor changes: the buffers of `torch.optim` do not contain the learning rate
(Goyal et al. 2017, arXiv 1706.02677).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_gradavg._lightning.internals import version_of
from lightning_gradavg.rates.scaling import Hyperparameters

__all__ = ["ScaledSteps"]

_Group: TypeAlias = dict[str, Any]  # an element of `optimizer.param_groups`, as torch types it
_Stamp: TypeAlias = float | tuple[int, int]


class _ScaledGroup(NamedTuple):
    """A parameter group that holds scaled values."""

    group: _Group
    base: Hyperparameters  # the values that the scaled ones replaced, by name
    stamp: _Stamp  # of the learning rate, right after the scaled one was written


class ScaledSteps:
    """Scales the parameter groups of one optimizer within each of its steps.

    `begin` and `end` are hooks that torch calls before and after `step`. They are not enough, and so the calls are:

        begin                       the outermost `step` begins: the groups get scaled values
            closure                 base values while it runs, as in Lightning's, which runs a whole training step
                begin, end          another step of this optimizer within its closure: scaled, and base again
            begin, end              a `step` that calls `super().step()`: the groups are scaled already
        end                         the groups get base values

    | the step | then |
    |---|---|
    | of a subclass calls `super().step()`, so that torch calls the hooks twice | scaled once: `_calls` is a stack |
    | runs a closure, which adds a group or writes a learning rate | these are base values, scaled when it ends |
    | has a closure that raises | base values |
    | raises elsewhere | scaled values until `end_calls`, which `Rates` calls behind each step of Lightning's |

    A learning rate that the optimizer itself writes in its step, as some adapt theirs, is a scaled one: its base is
    that rate over the factor, so that the next step does not scale it twice.

    No reference to the optimizer is kept, so that one which a user replaces is freed.

    Attributes:
        taken: Optimizer steps, without those within another one of the same optimizer. `Rates` sets it when a run is
            resumed.
    """

    def __init__(self, factor: Callable[[int], float], scaled: Callable[[_Group, float], Hyperparameters]) -> None:
        """Begin with a new optimizer, which has base values in its groups.

        Args:
            factor: Returns the factor of the learning rate after so many steps.
            scaled: Returns the scaled values of a group with base values, by name, at a factor of the learning rate.
        """
        self.taken = 0
        self._factor_after = factor
        self._scaled_values = scaled
        self._factor = 1.0  # of the groups in `_groups`
        self._groups: list[_ScaledGroup] = []  # those that hold scaled values now
        self._calls: list[bool] = []  # for each `step` in progress, whether it scaled the groups

    def attach(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Scale the steps of the optimizer from now on; return what ends that.

        Raises:
            ValueError: If torch calls no hooks of this optimizer.
        """
        # `Optimizer.__init__` sets up the hooks, and has the `step` of the class call them. Lightning also accepts
        # optimizers that are none of torch's (its protocol `Optimizable`).
        try:
            return [
                optimizer.register_step_pre_hook(self._begin),
                optimizer.register_step_post_hook(self._end),
            ]
        except AttributeError as error:
            raise ValueError(
                f"the learning rates of {type(optimizer).__name__} cannot be scaled: it never calls"
                " torch.optim.Optimizer.__init__, so torch calls no hook of its step. Call super().__init__ in its"
                " constructor, return the optimizer that it wraps from configure_optimizers, or use lr_scaling='none'."
            ) from error

    def check(self, optimizer: Optimizer) -> None:
        """Raise a ValueError if a group cannot be scaled. No group is changed."""
        factor = self._factor_after(self.taken)
        for group in optimizer.param_groups:
            self._scaled_values(group, factor)

    @property
    def calls(self) -> int:
        """The `step`s in progress, those that call each other counted singly."""
        return len(self._calls)

    @property
    def holds_scaled_values(self) -> bool:
        """Whether groups hold scaled values now."""
        return len(self._groups) > 0

    def factor(self) -> float:
        """Return the factor of the learning rate in the next step, or the one in progress."""
        return self._factor_after(self.taken)

    # Torch types the arguments of a hook so. They include the optimizer.
    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Scale the groups, and have the closure see base values."""
        scales = not self.holds_scaled_values
        if scales:
            self._scale(optimizer)
        self._calls.append(scales)
        around = partial(self._around, optimizer=optimizer)
        return tuple(around(value) for value in args), {name: around(value) for name, value in kwargs.items()}

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        """Restore the groups, and count the step, if it is not part of another one."""
        scaled_here = self._calls.pop()
        if not scaled_here:
            return
        if not self.holds_scaled_values:
            raise RuntimeError(
                f"the closure of a step of {type(optimizer).__name__} raised, and the step went on, with learning rates"
                " that lr_scaling has not scaled. Let the exception end the step, or use lr_scaling='none'."
            )
        self._restore()
        self.taken += 1

    def _around(self, value: Any, *, optimizer: Optimizer) -> Any:
        """Return a closure that sees base values; any other argument of `step` as it is."""
        if not callable(value) or isinstance(value, Optimizer | nn.Module):
            return value
        closure: Callable[..., Any] = value

        def closure_with_base_values(*args: Any, **kwargs: Any) -> Any:
            calls = self.calls
            was_scaled = self.holds_scaled_values
            self._restore()
            result = closure(*args, **kwargs)  # if it raises, base values stay
            self.end_calls(calls)  # a step within the closure raised, and the closure caught that
            if was_scaled:
                self._scale(optimizer)
            return result

        return closure_with_base_values

    def end_calls(self, calls: int) -> None:
        """End all `step`s but the first `calls`: they raised, and torch calls no hook of such a step."""
        if self.calls > calls:
            del self._calls[calls:]
            self._restore()

    def _scale(self, optimizer: Optimizer) -> None:
        """Write scaled values into all groups.

        Raises:
            ValueError: If a group cannot be scaled. No group is changed then.
        """
        self._factor = self._factor_after(self.taken)
        groups = optimizer.param_groups
        scaled = [self._scaled_values(group, self._factor) for group in groups]
        bases = [{name: _copied(group[name]) for name in values} for group, values in zip(groups, scaled, strict=True)]
        # Groups may share a tensor. So no value is written before all are computed, and no stamp is taken before all
        # values are written.
        for group, values in zip(groups, scaled, strict=True):
            _write(group, values)
        for group, base in zip(groups, bases, strict=True):
            self._groups.append(_ScaledGroup(group, base, _stamp(group["lr"])))

    def _restore(self) -> None:
        """Write base values into all groups that hold scaled ones."""
        # All bases before any is written: groups may share a tensor.
        bases = [self._base_values(scaled_group) for scaled_group in self._groups]
        for scaled_group, base in zip(self._groups, bases, strict=True):
            _write(scaled_group.group, base)
        self._groups.clear()

    def _base_values(self, scaled_group: _ScaledGroup) -> Hyperparameters:
        """Return the base values of a group, also if its optimizer wrote another learning rate since.

        Without such a write, these are the values from before, bit by bit: 0.007 * factor / factor may differ from
        0.007.
        """
        learning_rate = scaled_group.group["lr"]
        if _stamp(learning_rate) == scaled_group.stamp:
            return scaled_group.base
        return {**scaled_group.base, "lr": learning_rate / self._factor}


def _copied(value: Any) -> Any:
    """Return a hyperparameter with copies of its tensors: it may be one, or a tuple of some."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(_copied(element) for element in value)
    return value


def _write(group: _Group, values: Hyperparameters) -> None:
    """Write values into a group; into tensors in place, as groups may share them and a captured graph reads them."""
    for name, value in values.items():
        current = group[name]
        if isinstance(current, tuple) and any(isinstance(element, Tensor) for element in current):
            for element, new in zip(current, value, strict=True):
                _fill(element, new)
        elif isinstance(current, Tensor):
            _fill(current, value)
        else:
            group[name] = value


@torch.no_grad()
def _fill(tensor: Tensor, value: float | Tensor) -> None:
    if isinstance(value, Tensor):
        tensor.copy_(value)
    else:
        tensor.fill_(value)


def _stamp(value: float | Tensor) -> _Stamp:
    """Return what differs once a value was written.

    A tensor is not read: on an accelerator the host would wait. Every write in place raises its version.
    """
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    return value
