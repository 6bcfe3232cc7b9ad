"""Random numbers that belong to a replica and a step, whichever process draws them and whatever it drew before."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["ReplicaStreams"]


class _Generator(NamedTuple):
    """Reads, writes and seeds a global generator."""

    state: Callable[[], Any]
    restore: Callable[[Any], object]
    seed: Callable[[int], object]


def _seed_numpy(seed: int) -> None:
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002  # users draw from it; it takes words of 32 bits


_CPU = _Generator(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed)
_PYTHON = _Generator(random.getstate, random.setstate, random.seed)
_NUMPY = _Generator(np.random.get_state, np.random.set_state, _seed_numpy)


class ReplicaStreams:
    """Random streams of replicas: all draws inside `of` depend on the seed, the step and the replica alone."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generators = (_CPU, _generator_of(device), _PYTHON, _NUMPY)

    @contextmanager
    def of(self, step: int, replica: int) -> Iterator[None]:
        """Draw from the stream of a replica inside, and put all generators back afterwards, also after an exception.

        Those are torch's on the CPU and the device, Python's and NumPy's. Nothing waits for the device. What
        `torch.utils.checkpoint` recomputes later draws the same from torch, whose states it keeps; for Python and
        NumPy, enter `of` within the function that is recomputed.
        """
        # A hash, because a sum such as seed + step + replica repeats. Each generator has its own seed, because Python
        # and NumPy make the same stream of the same words.
        digest = blake2b(f"{self._seed},{step},{replica}".encode(), digest_size=32).digest()
        with ExitStack() as put_back:
            for index, generator in enumerate(self._generators):
                if generator is not None:
                    put_back.callback(generator.restore, generator.state())
                    generator.seed(int.from_bytes(digest[8 * index : 8 * index + 8], "little"))
            yield


def _generator_of(device: torch.device) -> _Generator | None:
    """Return the generator of the current device of this type; None for the CPU."""
    if device.type == "cpu":
        return None
    module: Any = getattr(torch, device.type, None)
    if not hasattr(module, "set_rng_state"):
        raise ValueError(
            f"device must be a CPU or an accelerator whose module has get_rng_state, as torch.cuda; got"
            f" {str(device)!r}: move the model to such a one"
        )
    return _Generator(module.get_rng_state, module.set_rng_state, module.manual_seed)
