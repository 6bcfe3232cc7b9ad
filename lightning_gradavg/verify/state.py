"""What a call of `training_step` starts from, beside the weights: buffers, attributes, random numbers, settings."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_gradavg.random_state import RandomState, random_state, restore_random_state
from lightning_gradavg.tree import leaves, mapped
from lightning_gradavg.verify.rows import CONSTANTS, digest

__all__ = [
    "Randomness",
    "generators_of",
    "hidden_state",
    "host_random_state",
    "module_state",
    "random_states",
    "restore_random_states",
    "set_module_state",
    "torch_settings",
]

Randomness: TypeAlias = tuple[RandomState, list[Tensor]]
"""The states of the host's random generators, and of those of the device."""

_LARGEST_ATTRIBUTE = 1 << 26  # bytes; what a module keeps beyond that is no state of its loss

# What Lightning and torch keep in a module beside what the user does; both have no list of it.
_OF_FRAMEWORK = frozenset(vars(LightningModule())) | frozenset(vars(nn.Module())) | {"_hparams", "_log_hyperparams"}


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that the user's code set, beside parameters, buffers and submodules."""
    return {name: value for name, value in vars(module).items() if name not in _OF_FRAMEWORK}


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return copies of a module's buffers and of the plain values that its code keeps in attributes, by name."""
    return {
        f"{path}.{name}".removeprefix("."): mapped(value, _copied)
        for path, part in module.named_modules()
        for name, value in (*part.named_buffers(recurse=False), *_own_attributes(part).items())
        if _is_state(value)
    }


def _is_state(value: Any) -> bool:
    """Return whether a value is made of numbers, strings and tensors, and is not too large to be copied."""
    held = [leaf for _, leaf in leaves(value)]
    plain = all(isinstance(leaf, (Tensor, *CONSTANTS)) or type(leaf).__module__ == "numpy" for leaf in held)
    return plain and sum(int(getattr(leaf, "nbytes", 0)) for leaf in held) <= _LARGEST_ATTRIBUTE


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.copy(value)


def set_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Set buffers and attributes of a module."""
    parts, buffers = dict(module.named_modules()), dict(module.named_buffers())
    for name, value in state.items():
        path, _, attribute = name.rpartition(".")
        if name in buffers and buffers[name].shape == value.shape:
            buffers[name].data.copy_(value)
        elif path in parts:
            live = getattr(parts[path], attribute, None)
            device = live.device if isinstance(live, Tensor) else torch.device("cpu")
            given = mapped(value, _copied)
            setattr(parts[path], attribute, given.to(device) if isinstance(given, Tensor) else given)


def hidden_state(module: nn.Module) -> dict[str, bytes]:
    """Return fingerprints of what `training_step` could change and nobody puts back: of objects, classes, globals."""
    kept, home = module_state(module), type(module).__module__
    found = {f"{name} of module {home}": value for name, value in vars(sys.modules.get(home, nn)).items()}
    for path, part in module.named_modules():
        for name, value in {**vars(type(part)), **_own_attributes(part)}.items():
            found[f"{path}.{name}".removeprefix(".")] = value
    return {
        name: digest(value)
        for name, value in found.items()
        if name not in kept and "__" not in name and not callable(value) and not isinstance(value, ModuleType)
    }


class _DeviceGenerator:
    """The random generator of an accelerator, whichever it is."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = getattr(torch, device.type)

    def get_state(self) -> Tensor:
        """Return its state."""
        state: Tensor = self._module.get_rng_state()
        return state

    def set_state(self, state: Tensor) -> None:
        """Go back to a state."""
        self._module.set_rng_state(state)


def generators_of(device: torch.device) -> list[Any]:
    """Return the generator of an accelerator; none for the CPU, whose is always there."""
    return [] if device.type == "cpu" else [_DeviceGenerator(device)]


def random_states(device: torch.device) -> Randomness:
    """Return the states of all global random generators."""
    return random_state(), [generator.get_state() for generator in generators_of(device)]


def restore_random_states(states: Randomness, device: torch.device) -> None:
    """Go back to such states."""
    restore_random_state(states[0])
    for generator, state in zip(generators_of(device), states[1], strict=False):
        generator.set_state(state)


def host_random_state() -> bytes:
    """Return a fingerprint of Python's and NumPy's generators, whose numbers cannot be followed."""
    return digest(random_state()[1:])


def torch_settings(apply: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what torch computes with, process-wide, and compute so from now on where other settings are given."""
    found = {
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": torch.backends.cudnn.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
    }
    if apply is not None:
        torch.set_float32_matmul_precision(apply["matmul"])
        torch.backends.cudnn.allow_tf32 = apply["tf32"]
        torch.use_deterministic_algorithms(apply["deterministic"], warn_only=True)
        torch.set_default_dtype(apply["dtype"])
    return found
