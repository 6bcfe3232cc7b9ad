"""Random numbers that belong to a replica and a step, whichever process draws them and whatever it drew before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch

from lightning_gradavg.random_state import random_state, restore_random_state, seeded

__all__ = ["ReplicaStreams"]


class ReplicaStreams:
    """Random streams of replicas: all draws inside `of` depend on the seed, the step and the replica alone."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._of_device: Any = None if device.type == "cpu" else getattr(torch, device.type, None)
        if device.type != "cpu" and not hasattr(self._of_device, "set_rng_state"):
            raise ValueError(
                f"device must be a CPU or an accelerator whose module has get_rng_state, as torch.cuda; got"
                f" {str(device)!r}: move the model to such a one"
            )

    @contextmanager
    def of(self, step: int, replica: int) -> Iterator[None]:
        """Draw from the stream of a replica inside, and put all generators back afterwards, also after an exception.

        Those are torch's on the CPU and the device, Python's and NumPy's. Nothing waits for the device. What
        `torch.utils.checkpoint` recomputes later draws the same from torch, whose states it keeps; for Python and
        NumPy, enter `of` within the function that is recomputed.
        """
        # A hash, because a sum such as seed + step + replica repeats.
        digest = blake2b(f"{self._seed},{step},{replica}".encode(), digest_size=32).digest()
        on_host, device = random_state(), self._of_device
        on_device = None if device is None else device.get_rng_state()
        restore_random_state(seeded(digest[:8] + digest[16:]))
        if device is not None:
            device.manual_seed(int.from_bytes(digest[8:16], "little"))
        try:
            yield
        finally:
            restore_random_state(on_host)
            if device is not None:
                device.set_rng_state(on_device)
