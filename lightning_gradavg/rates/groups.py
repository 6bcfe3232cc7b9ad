"""Effective learning rates in the parameter groups of an optimizer.

While no step is in progress, a group holds *base values*, which schedulers and checkpoints see, and during a step
*effective values*. After t optimizer steps

    effective lr = factor(t) * base lr,        factor(t) = warmup_factor(f(k), t, T)

With `"adam_sde"` the smoothing constants and `eps` follow the scale, too, without a warm-up. Momentum needs no
correction when the factor changes: the buffers of `torch.optim` do not contain the learning rate (Goyal et al. 2017,
arXiv 1706.02677).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gradavg.lightning_internals import version_of
from lightning_gradavg.rates.scaling import Scaling

__all__ = ["ScaledGroups"]

_Values: TypeAlias = dict[str, Any]


class ScaledGroups:
    """An optimizer's groups that hold effective values, from the construction on until `end`.

    A learning rate that someone else writes into a group meanwhile is an effective one, which this step uses unchanged.
    Its base is the written value / the factor. A learning rate that is a tensor is changed in place.
    """

    def __init__(self, optimizer: Optimizer, scaling: Scaling, scale: float, factor: float) -> None:
        self._factor, self._groups = factor, list(optimizer.param_groups)
        values = [scaling.hyperparameters(scale, group, factor) for group in self._groups]
        pairs = list(zip(self._groups, values, strict=True))
        self._bases = [{name: _kept(group[name]) for name in effective} for group, effective in pairs]
        _write(pairs)
        self._left = [_stamp(group["lr"]) for group in self._groups]  # after all of them: groups may share a tensor

    @property
    def bases(self) -> list[_Values]:
        """The base values of each group."""
        rows = zip(self._groups, self._bases, self._left, strict=True)
        return [
            base if _stamp(group["lr"]) == left else {**base, "lr": group["lr"] / self._factor}
            for group, base, left in rows
        ]

    def end(self) -> None:
        """Have the groups hold base values."""
        _write(zip(self._groups, self.bases, strict=True))

    def at_rest(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a state of the optimizer, with base values in its parameter groups."""
        pairs = zip(state["param_groups"], self.bases, strict=True)
        return {**state, "param_groups": [{**saved, **base} for saved, base in pairs]}


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
