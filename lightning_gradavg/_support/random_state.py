"""The random state of a process, from which samplers, datasets and models on the CPU draw by default.

That is the state of three global generators: torch's on the CPU, Python's, and NumPy's if it is imported.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, TypeAlias

import torch

# A plain tuple of plain values, because checkpoints hold it: `torch.load(weights_only=True)` refuses a NamedTuple.
RandomState: TypeAlias = tuple[
    torch.Tensor,  # of torch, as `torch.get_rng_state` returns it
    tuple[int, tuple[int, ...], float | None],  # of Python: version, words, and a number kept back by `random.gauss`
    dict[str, Any] | None,  # of NumPy, with lists for arrays; None where NumPy is not imported
]
"""The states of the CPU's global generators."""


def random_state() -> RandomState:
    """Return the states of the CPU's global generators."""
    for_numpy = None
    # Not imported here: it may not be installed, and nothing has drawn from it before it was imported.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        for_numpy = _without_arrays(numpy.random.get_state(legacy=False))
    return torch.get_rng_state(), random.getstate(), for_numpy


def _without_arrays(value: Any) -> Any:
    """Return a nested dict with lists and numbers in place of NumPy's arrays and numbers."""
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def restore_random_state(state: RandomState) -> None:
    """Set the states of the CPU's global generators."""
    for_torch, for_python, for_numpy = state
    torch.set_rng_state(for_torch)
    version, words, gauss = for_python
    random.setstate((version, tuple(words), gauss))  # it refuses a list, which a checkpoint may hold
    if for_numpy is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(for_numpy)


def same_random_state(first: RandomState, second: RandomState) -> bool:
    """Return whether two states draw the same numbers.

    Where NumPy was not imported for one of them, its generator is not compared.
    """
    torch_of_first, python_of_first, numpy_of_first = first
    torch_of_second, python_of_second, numpy_of_second = second
    if not torch.equal(torch_of_first, torch_of_second):
        return False
    if python_of_first != python_of_second:
        return False
    if numpy_of_first is None or numpy_of_second is None:
        return True
    return numpy_of_first == numpy_of_second


def stream_key(seed: int, *place: int | str) -> bytes:
    """Return the key of a random stream: 32 bytes that follow from a seed and a place in the run.

    A hash, because a sum such as `seed + batch + piece` repeats.
    """
    return blake2b(repr((seed, *place)).encode(), digest_size=32).digest()


def seed_generators(key: bytes, device: torch.device | None = None) -> None:
    """Seed the global generators of the CPU, and that of an accelerator, by the key of a stream.

    Each has 8 bytes of its own: of one seed, Python and NumPy make the same stream. Nothing waits for the accelerator.
    """
    for_torch = int.from_bytes(key[0:8], "little")
    for_python = int.from_bytes(key[8:16], "little")
    for_numpy = int.from_bytes(key[16:24], "little")
    torch.default_generator.manual_seed(for_torch)  # `torch.manual_seed` would seed the accelerators, too
    random.seed(for_python)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # In place: a new `RandomState` asks the operating system for entropy first, which takes ten times as long.
        numpy.random.seed([for_numpy & 0xFFFFFFFF, for_numpy >> 32])  # NumPy takes words of 32 bits
    if device is not None and device.type != "cpu":
        getattr(torch, device.type).manual_seed(int.from_bytes(key[24:32], "little"))


@contextmanager
def drawing_from(key: bytes | None, device: torch.device | None = None) -> Iterator[None]:
    """Draw from the stream of a key within the context; then restore all generators. Without a key, change nothing.

    The generators are torch's on the CPU and on the device, Python's and NumPy's. What `torch.utils.checkpoint`
    recomputes later draws the same numbers from torch, whose states it keeps. For Python and NumPy, enter the context
    within the function that is recomputed.
    """
    if key is None:
        yield
        return
    # Not `random_state`, whose form checkpoints can hold: this runs several times in a step.
    of_torch = torch.get_rng_state()
    of_python = random.getstate()
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    accelerator: Any = None  # the module of the device's type, such as `torch.cuda`
    on_device: torch.Tensor | None = None
    if device is not None and device.type != "cpu":
        accelerator = getattr(torch, device.type)
        on_device = accelerator.get_rng_state()
    seed_generators(key, device)
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        if accelerator is not None:
            accelerator.set_rng_state(on_device)


def seeded(key: bytes) -> RandomState:
    """Return the states that `seed_generators` sets."""
    own = random_state()
    seed_generators(key)
    try:
        return random_state()
    finally:
        restore_random_state(own)
