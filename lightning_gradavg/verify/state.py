"""What a call of `training_step` is given beside the weights: samples, buffers, attributes, random numbers, settings.

What a batch holds is known, or it is not: a wrong guess would join the targets of one image with those of another and
blame the run. Known are tensors and arrays with the samples along dimension 0, lists of one number or string per
sample, and values without samples that are the same in all batches, in any nesting of mappings, lists, tuples and
dataclasses. Everything else is not: texts padded to another length in every batch, lists of one record per sample,
graphs.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from types import ModuleType
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_gradavg.random_state import RandomState, random_state, restore_random_state
from lightning_gradavg.tree import batch_samples, bits, is_array, leaves, mapped, rebuilt, slice_batch

__all__ = [
    "Randomness",
    "UnknownSamplesError",
    "compute_as",
    "digest",
    "digests",
    "generators_of",
    "hidden_state",
    "host_random_state",
    "join",
    "known_samples",
    "module_state",
    "random_states",
    "restore_random_states",
    "samples_in",
    "set_module_state",
    "torch_settings",
]

_CONSTANTS = (int, float, complex, str, bytes, type(None))  # what is no tensor, and still plain
_OF_A_TABLE = 2  # dimensions; an image has more
_LARGEST_ATTRIBUTE = 1 << 26  # bytes; what a module keeps beyond that is no state of its loss

# What Lightning and torch keep in a module beside what the user does; both have no list of it.
_OF_FRAMEWORK = frozenset(vars(LightningModule())) | frozenset(vars(nn.Module())) | {"_hparams", "_log_hyperparams"}

Randomness: TypeAlias = tuple[RandomState, list[Tensor]]
"""The states of the host's random generators, and of those of the device."""


class UnknownSamplesError(ValueError):
    """It is not known which samples a batch holds, or how batches become one."""


def samples_in(batch: Any, loader_size: int | None = None) -> int:
    """Return the number of samples in a batch.

    Args:
        batch: Of any structure.
        loader_size: The number of samples in a full batch, where the loader has one. It tells a list of four images,
            each with three channels along dimension 0, from a tensor of three samples.

    Raises:
        UnknownSamplesError: If there is no such number, or another could be meant.
    """
    if all(is_array(leaf) or isinstance(leaf, _CONSTANTS) for _, leaf in leaves(batch)):
        with suppress(ValueError):
            size = batch_samples(batch)
            if not any(_may_be_samples(each, size, {size, loader_size}) for each in _lists(batch)):
                return size
    raise UnknownSamplesError(f"which samples a batch of type {type(batch).__name__} holds is not known")


def known_samples(batch: Any, loader_size: int | None) -> int | None:
    """Return the number of samples in a batch, or None where it is not known."""
    with suppress(UnknownSamplesError):
        return samples_in(batch, loader_size)
    return None


def _lists(value: Any) -> list[Sequence[Any]]:
    """Return the lists and tuples in a batch, at any depth, that hold anything but plain values."""
    found: list[Any] = []

    def note(each: Any) -> bool:
        found.append(each)
        return False  # look into it, too

    list(leaves(value, is_leaf=note))
    return [each for each in found if type(each) in (list, tuple) and not _is_column(each)]


def _may_be_samples(items: Sequence[Any], size: int, sizes: set[int | None]) -> bool:
    """Return whether a list in a batch of `size` samples could hold one record for each of them."""
    rows = all(is_array(item) and size in item.shape[:1] for item in items)
    images = len(items) != size and all(len(getattr(item, "shape", ())) > _OF_A_TABLE for item in items)
    return len(items) in sizes and (images or not rows)


def _is_column(value: Any) -> bool:
    return type(value) in (list, tuple) and all(isinstance(item, _CONSTANTS) for item in value)


def join(batches: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the samples of all batches, of so many each, as one batch, with the structure and types of the first.

    Raises:
        UnknownSamplesError: If the batches differ in anything but their samples.
    """
    held = [dict(leaves(batch, is_leaf=_is_column)) for batch in batches]
    if len({tuple((place, type(leaf)) for place, leaf in of_batch.items()) for of_batch in held}) > 1:
        raise UnknownSamplesError("batches of different types or lengths cannot be joined")
    joined = (_joined([of_batch[place] for of_batch in held], list(sizes)) for place in held[0])
    return rebuilt(batches[0], joined, is_leaf=_is_column)


def _joined(parts: Sequence[Any], sizes: list[int]) -> Any:
    first = parts[0]
    if is_array(first) and len(first.shape) > 0:
        return _concatenated(parts)
    if _is_column(first) and [len(part) for part in parts] == sizes:
        return type(first)(item for part in parts for item in part)
    if len({digest(part) for part in parts}) > 1:
        raise UnknownSamplesError(f"{first!r} is another value in another batch, and belongs to no sample")
    return first


def _concatenated(parts: Sequence[Any]) -> Any:
    shapes = {(part.shape[1:], part.dtype): f"{tuple(part.shape)} of {part.dtype}" for part in parts}
    if len(shapes) > 1:
        listed = ", ".join(sorted(shapes.values()))
        raise UnknownSamplesError(f"tensors of these sizes or types cannot be joined along dimension 0: {listed}")
    joined = torch.cat([torch.as_tensor(part) for part in parts])
    return joined if isinstance(parts[0], Tensor) else joined.numpy()


def digests(batch: Any, loader_size: int | None = None) -> tuple[bytes, ...]:
    """Return a digest of every sample; one for the batch as a whole where its samples are not known."""
    size = known_samples(batch, loader_size)
    if size is None:
        return (digest(batch),)
    return tuple(digest(slice_batch(batch, index, index + 1)) for index in range(size))


class _Pickler(pickle.Pickler):
    """Pickles tensors by their elements alone, whatever storage they are a part of."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        return str, (f"{value.dtype}{tuple(value.shape)}", bytes(bits(value)))


class _Hash:
    def __init__(self) -> None:
        self.state = blake2b(digest_size=16)

    def write(self, data: Any) -> None:
        self.state.update(data)


def digest(value: Any) -> bytes:
    """Return 16 bytes that are equal for equal contents, of which every element is read."""
    found = _Hash()
    pickler = _Pickler(found)
    pickler.fast = True  # or equal values would differ by which of their parts are one object
    try:
        pickler.dump(value)
    except Exception:  # noqa: BLE001  # of the user's objects, of which no more is known
        return type(value).__qualname__.encode()
    return found.state.digest()


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
    plain = all(isinstance(leaf, (Tensor, *_CONSTANTS)) or type(leaf).__module__ == "numpy" for leaf in held)
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
            device = getattr(getattr(parts[path], attribute, None), "device", "cpu")
            given = mapped(value, _copied)
            setattr(parts[path], attribute, given.to(device) if isinstance(given, Tensor) else given)


def hidden_state(module: nn.Module) -> dict[str, bytes]:
    """Return digests of what `training_step` could change and nobody puts back: of objects, classes, globals."""
    kept, home = module_state(module), type(module).__module__
    found = {f"{name} of module {home}": value for name, value in vars(sys.modules.get(home, nn)).items()}
    for path, part in module.named_modules():
        own = {**vars(type(part)), **_own_attributes(part)}
        found.update({f"{path}.{name}".removeprefix("."): value for name, value in own.items()})
    return {
        name: digest(value)
        for name, value in found.items()
        if name not in kept and "__" not in name and not callable(value) and not isinstance(value, ModuleType)
    }


class _DeviceGenerator:
    """The random generator of an accelerator, whichever it is."""

    def __init__(self, device: torch.device) -> None:
        of_type: Any = getattr(torch, device.type)
        self.get_state, self.set_state = of_type.get_rng_state, of_type.set_rng_state


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
    """Return a digest of Python's and NumPy's generators, whose numbers cannot be followed."""
    return digest(random_state()[1:])


_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "tf32": (lambda: torch.backends.cudnn.allow_tf32, lambda on: setattr(torch.backends.cudnn, "allow_tf32", on)),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        partial(torch.use_deterministic_algorithms, warn_only=True),
    ),
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
}


def torch_settings() -> dict[str, Any]:
    """Return what torch computes with, process-wide."""
    return {name: read() for name, (read, _) in _SETTINGS.items()}


def compute_as(settings: Mapping[str, Any]) -> None:
    """Compute with such settings from now on."""
    for name, (_, write) in _SETTINGS.items():
        write(settings[name])
