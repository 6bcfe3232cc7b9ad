"""Which state a run is in, in a few characters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gradavg.tree import bits, described, leaves

__all__ = ["combined", "state_digests"]

_SIZE = 8  # bytes of a digest: 16 characters


def state_digests(
    module: nn.Module, optimizers: Sequence[Optimizer], further: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, str]:
    """Return 16 characters per tensor and number of a training state, by name, that depend on its bits.

    The state is all parameters and buffers, the optimizers' state and options, and further values by name.
    """
    return {name: _digest(value) for name, value in _state(module, optimizers, further)}


def combined(digests: Mapping[str, str]) -> str:
    """Return the one digest of all digests: the fingerprint of a state."""
    return blake2b(repr(sorted(digests.items())).encode(), digest_size=_SIZE).hexdigest()


def _state(module: nn.Module, optimizers: Sequence[Optimizer], further: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for index, optimizer in enumerate(optimizers):
        yield from leaves(optimizer.state_dict(), f"optimizer {index}")
    yield from further.items()


def _digest(value: Any) -> str:
    digest = blake2b(digest_size=_SIZE)
    for place, leaf in leaves(value):
        digest.update(f"{place}{described(leaf)};".encode())
        if isinstance(leaf, Tensor):
            digest.update(bits(leaf))
    return digest.hexdigest()
