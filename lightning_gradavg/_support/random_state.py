"""The random state of a process, from which samplers, datasets and models on the CPU draw by default."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, TypeAlias

import torch

RandomState: TypeAlias = tuple[torch.Tensor, Any, Any]
"""States of torch's, Python's and NumPy's global generators, as values that `torch.load(weights_only=True)` reads."""


def random_state() -> RandomState:
    """Return the states of the CPU's global generators."""
    numpy = sys.modules.get("numpy")  # nobody can have drawn from it before it was imported
    return torch.get_rng_state(), random.getstate(), _plain(numpy.random.get_state(legacy=False)) if numpy else None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def restore_random_state(state: RandomState) -> None:
    """Set the states of the CPU's global generators."""
    for_torch, (version, words, gauss), for_numpy = state
    torch.set_rng_state(for_torch)
    random.setstate((version, tuple(words), gauss))
    if for_numpy is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(for_numpy)


def same_random_state(one: RandomState, other: RandomState) -> bool:
    """Return whether two states draw the same, apart from NumPy if it was not imported for one of them."""
    same_numpy = None in (one[2], other[2]) or one[2] == other[2]
    return torch.equal(one[0], other[0]) and one[1] == other[1] and same_numpy


def forked(state: RandomState, stream: int) -> RandomState:
    """Return states for one of several streams, derived from that of torch's generator."""
    return seeded(blake2b(state[0].numpy().tobytes() + str(stream).encode(), digest_size=24).digest())


def seeded(digest: bytes) -> RandomState:
    """Return states of 24 bytes, 8 for each generator, as Python and NumPy make the same stream of the same seed."""
    for_torch, for_python, for_numpy = (int.from_bytes(digest[start : start + 8], "little") for start in (0, 8, 16))
    numpy = sys.modules.get("numpy")
    words = [for_numpy & 0xFFFFFFFF, for_numpy >> 32]  # NumPy takes words of 32 bits
    return (
        torch.Generator().manual_seed(for_torch).get_state(),
        random.Random(for_python).getstate(),
        _plain(numpy.random.RandomState(words).get_state(legacy=False)) if numpy else None,
    )


class RandomStream:
    """A stream of random numbers beside the process's own, from which everything draws within `drawing`.

    A process whose own state equals that of the stream moves on with it. Any other gets its own back.

    Attributes:
        moved: The states before and after what was drawn last.
    """

    def __init__(self) -> None:
        self._state = self._own = random_state()
        self.moved, self.drawing_now = (self._state, self._state), False

    @property
    def state(self) -> RandomState:
        """The state that the stream draws from next."""
        return random_state() if self.drawing_now else self._state

    @state.setter
    def state(self, state: RandomState) -> None:
        self._state = state
        if self.drawing_now:
            restore_random_state(state)

    @contextmanager
    def drawing(self, *, apart: bool = False) -> Iterator[None]:
        """Draw from the stream inside; `apart` from the process, even if its own state is equal."""
        nested, self.drawing_now, now = self.drawing_now, True, random_state()
        if nested:
            self._state = now
        else:
            self._own = now
        before, moves = self._state, nested or (not apart and same_random_state(now, self._state))
        restore_random_state(before)
        try:
            yield
        finally:
            self._state, self.drawing_now = random_state(), nested
            self.moved = before, self._state
            if not moves:
                restore_random_state(self._own)

    def pull(self, before: RandomState, after: RandomState) -> None:
        """Have the process move on to `after`, if its own state is `before`."""
        if same_random_state(self._own if self.drawing_now else random_state(), before):
            self._own = after
            if not self.drawing_now:
                restore_random_state(after)
