"""The fingerprint of a training state: a few characters that depend on every bit of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_gradavg._support.tree import bits, digest_of, leaves

__all__ = ["combined", "state_digests"]

_SIZE = 8  # bytes of a digest: 16 characters


def state_digests(
    module: nn.Module, optimizers: Sequence[Optimizer], further: Mapping[str, object] = MappingProxyType({})
) -> dict[str, str]:
    """Return 16 characters per tensor and number of a training state, by name, that depend on its bits.

    The state is all parameters and buffers, the optimizers' state and options, and further values by name.
    """
    state: list[tuple[str, Any]] = []
    state.extend(module.named_parameters())
    state.extend(module.named_buffers())
    # Beside tensors, such as moments, an optimizer's state dict holds numbers, such as the learning rate.
    for index, optimizer in enumerate(optimizers):
        state.extend(leaves(optimizer.state_dict(), f"optimizer {index}"))
    state.extend(further.items())
    return {name: digest_of(value, bits, size=_SIZE).hex() for name, value in state}


def combined(digests: Mapping[str, str]) -> str:
    """Return the one digest of all digests: the fingerprint of a state."""
    return blake2b(repr(sorted(digests.items())).encode(), digest_size=_SIZE).hexdigest()
