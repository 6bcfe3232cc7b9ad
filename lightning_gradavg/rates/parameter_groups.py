"""The parameter groups of one optimizer, with effective values in them and base values beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gradavg.rates.scaling import Scaling, scale_factor, scaled_hyperparameters

__all__ = ["EffectiveGroups"]

_Mark: TypeAlias = list[tuple[Any, int | None]]


def _leaves(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _mark(value: Any) -> _Mark:
    # A tensor's version tells that someone wrote to it; unlike its value it is read without waiting for a device.
    return [(leaf, leaf._version if isinstance(leaf, Tensor) else None) for leaf in _leaves(value)]


def _is_marked(value: Any, mark: _Mark) -> bool:
    now = _mark(value)
    return len(now) == len(mark) and all(
        version == marked_version and (leaf is marked or (version is None and bool(leaf == marked)))
        for (leaf, version), (marked, marked_version) in zip(now, mark, strict=True)
    )


def _copy(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_copy(leaf) for leaf in value)
    return value.detach().clone() if isinstance(value, Tensor) else value


def _overwritten(old: Any, new: Any) -> Any:
    """Return what a group holds once `new` is written over `old`; tensors stay the objects that they are."""
    if isinstance(old, (tuple, list)) and len(old) == len(new):
        return type(old)(_overwritten(*pair) for pair in zip(old, new, strict=True))
    if not isinstance(old, Tensor):
        return new
    with torch.no_grad():
        return old.copy_(new) if isinstance(new, Tensor) else old.fill_(new)


@dataclass(eq=False)
class _Group:
    """A parameter group, and what its values stand for.

    Attributes:
        values: The optimizer's own dict.
        base: The base values of the marked names.
        marks: What was written, by name. A value without a mark is in base units.
        in_force: The factor of the learning rate and the scale with which the marked values were written.
    """

    values: dict[str, Any]
    base: dict[str, Any] = field(default_factory=dict)
    marks: dict[str, _Mark] = field(default_factory=dict)
    in_force: tuple[float, float] = (1.0, 1.0)

    def in_base_units(self) -> dict[str, Any]:
        return {**self.values, **self.base}

    def write(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.values[name] = _overwritten(self.values[name], value)

    def mark(self) -> None:
        self.marks = {name: _mark(self.values[name]) for name in self.base}


class EffectiveGroups:
    """The parameter groups of one optimizer; their values are base values until `write`.

    Groups are told apart by their dicts: `add_param_group` adds one, and `load_state_dict` of the optimizer replaces
    all of them. A new one holds base values.

    Args:
        optimizer: The optimizer.
        scaling: What governs `lr` and, where it rescales moments, `eps` with `betas` or `alpha`.
    """

    def __init__(self, optimizer: Optimizer, scaling: Scaling) -> None:
        self.optimizer = optimizer
        self._scaling = scaling
        self._groups: list[_Group] = []

    def learning_rate_tensors(self) -> Iterator[Tensor]:
        """Yield the learning rates that are tensors."""
        for values in self.optimizer.param_groups:
            if isinstance(values.get("lr"), Tensor):
                yield values["lr"]

    def read(self) -> None:
        """Find the base values of new groups and of values that others wrote.

        Raises:
            ValueError: If a written smoothing constant is not the effective value of any base value.
        """
        known = {id(group.values): group for group in self._groups}
        self._groups = [known.get(id(values)) or self._new(values) for values in self.optimizer.param_groups]
        for group in self._groups:
            others = [name for name, mark in group.marks.items() if not _is_marked(group.values[name], mark)]
            group.base |= {name: self._base_of(name, group) for name in others}
            group.marks |= {name: _mark(group.values[name]) for name in others}

    def check(self, scale: float) -> None:
        """Raise ValueError unless all base values, and the betas that `cycle_momentum` will use, allow `scale`."""
        self.read()
        for index, group in enumerate(self._groups):
            base = group.in_base_units()
            # OneCycleLR and CyclicLR leave in the group between which values they move its beta1.
            cycled = [base[name] for name in ("base_momentum", "max_momentum") if name in base and "betas" in base]
            for beta1 in (None, *cycled):
                betas = {} if beta1 is None else {"betas": (beta1, *base["betas"][1:])}
                try:
                    scaled_hyperparameters(self._scaling, scale, {**base, **betas})
                except ValueError as error:
                    cause = ", with the beta1 that its scheduler will set (cycle_momentum)" if betas else ""
                    place = f"{type(self.optimizer).__name__}, parameter group {index}{cause}"
                    raise ValueError(f"{place}: {error}") from error

    def to_base_units(self) -> None:
        """Let the groups hold their base values."""
        self.read()
        for group in self._groups:
            group.write(group.base)
        for group in self._groups:
            group.base, group.marks = {}, {}

    def write(self, lr_factor: float, scale: float) -> None:
        """Let the groups hold the effective values: `lr` by `lr_factor`, and moments by `scale`.

        Raises:
            ValueError: If a base value does not allow `scale`; no group has changed then.
        """
        self.read()
        changes: list[tuple[_Group, dict[str, Any], dict[str, Any]]] = []
        for group in self._groups:
            base = group.in_base_units()
            names = ["lr"]
            if self._scaling.rescales_moments:
                names += ["eps", "betas" if "betas" in base else "alpha"]
            if group.in_force != (lr_factor, scale) or group.marks.keys() != set(names):
                moments = scaled_hyperparameters(self._scaling, scale, base) if self._scaling.rescales_moments else {}
                effective = {**moments, "lr": base["lr"] * lr_factor}
                changes.append((group, {name: _copy(base[name]) for name in names}, effective))
        for group, base, effective in changes:
            group.base, group.in_force = base, (lr_factor, scale)
            group.write(effective)
        # Only now, because groups may share a tensor.
        for group in self._groups if changes else ():
            group.mark()

    def reload(self) -> None:
        """Take what the groups hold as base values."""
        self._groups = [_Group(values) for values in self.optimizer.param_groups]

    def base_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a state of the optimizer, with copies of the base values in its `param_groups`."""
        self.read()
        state = dict(state_dict)
        if "param_groups" in state:
            state["param_groups"] = [
                {**saved, **{name: _copy(value) for name, value in group.base.items()}}
                for saved, group in zip(state["param_groups"], self._groups, strict=True)
            ]
        return state

    def _new(self, values: dict[str, Any]) -> _Group:
        # torch gives all groups without a learning rate of their own the one tensor of the optimizer's defaults, which
        # then holds the effective value of the groups before.
        for other in self._groups:
            if isinstance(values.get("lr"), Tensor) and "lr" in other.marks and other.values["lr"] is values["lr"]:
                return _Group(values, {"lr": other.base["lr"]}, {"lr": other.marks["lr"]}, other.in_force)
        return _Group(values)

    def _base_of(self, name: str, group: _Group) -> Any:
        value, (lr_factor, scale) = group.values[name], group.in_force
        if name == "lr":
            return _copy(value) / lr_factor
        if name == "eps":
            return _copy(value) * scale_factor(self._scaling, scale)
        try:
            return scaled_hyperparameters(self._scaling, 1 / scale, group.values)[name]
        except ValueError as error:
            raise ValueError(
                f"{name}={value!r} was written into a parameter group at scale {scale:g} of lr_scaling="
                f"{self._scaling.name!r}, where it stands for no base value in [0, 1). Write base values, in"
                " `with learning_rates.in_base_units():`."
            ) from error
