"""Random numbers that belong to a replica and a step, whichever process draws them and whatever it drew before."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch

from lightning_gradavg.random_state import random_state, restore_random_state

__all__ = ["ReplicaStreams"]


class ReplicaStreams:
    """Random streams of replicas: all draws inside `of` depend on the seed, the step and the replica alone.

    Args:
        seed: The seed of the run; any integer.
        device: The CPU; or an accelerator, whose current device's generator is seeded beside that of the CPU.

    Raises:
        ValueError: If the device has no generator.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._module = _module_of(device)
        # Imported now, or a step that is the first to import it would draw from a state that nobody seeded.
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy")

    @contextmanager
    def of(self, step: int, replica: int) -> Iterator[None]:
        """Draw from the stream of a replica inside, and put all generators back afterwards, also after an exception.

        Torch's generators of the CPU and the device, Python's `random` and, where it can be imported, NumPy's global
        generator start from their own seeds. Nothing waits for the device. What `torch.utils.checkpoint` recomputes
        after the end draws the same from torch, whose states it keeps; for Python and NumPy it does not, so there enter
        `of` within the function that is recomputed.

        Args:
            step: Index of the step.
            replica: Index of the replica.
        """
        for_cpu, for_device, for_python, for_numpy = self._seeds(step, replica)
        on_host = random_state()
        on_device = None if self._module is None else self._module.get_rng_state()
        try:
            torch.default_generator.manual_seed(for_cpu)
            if self._module is not None:
                self._module.manual_seed(for_device)
            random.seed(for_python)
            numpy = sys.modules.get("numpy")
            if numpy is not None:
                numpy.random.seed([for_numpy & 0xFFFFFFFF, for_numpy >> 32])  # NumPy takes words of 32 bits
            yield
        finally:
            restore_random_state(on_host)
            if self._module is not None:
                self._module.set_rng_state(on_device)

    def _seeds(self, step: int, replica: int) -> list[int]:
        """Return four seeds of 64 bits.

        Those of a hash, because a sum such as seed + step + replica repeats, and because torch's generator of the CPU
        takes no more than the lower 32 bits of a seed, in which all of the three must show. One seed for each
        generator, because Python and NumPy make the same stream of the same words.
        """
        digest = blake2b(f"{self._seed},{step},{replica}".encode(), digest_size=32).digest()
        return [int.from_bytes(digest[start : start + 8], "little") for start in range(0, 32, 8)]


def _module_of(device: torch.device) -> Any:
    """Return what seeds the current device of this type, as `torch.random.fork_rng` finds it; None for the CPU."""
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and not hasattr(module, "set_rng_state"):
        raise ValueError(
            f"device must be a CPU or an accelerator whose module has get_rng_state, as torch.cuda; got"
            f" {str(device)!r}: move the model to such a one"
        )
    return module if device.type != "cpu" else None
