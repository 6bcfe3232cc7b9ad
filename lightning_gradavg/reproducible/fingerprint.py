"""A short hash of the state of training, by which two runs are compared in one line of a log."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gradavg.random_state import random_state
from lightning_gradavg.ranks import World
from lightning_gradavg.tree import leaves

__all__ = ["fingerprint"]


def fingerprint(module: nn.Module, optimizers: Iterable[Optimizer], drawn_from: Any, world: World) -> str:
    """Return 16 hexadecimal digits of parameters, buffers, optimizer and random state, to the bit.

    A collective operation: of random states that of rank 0 counts, on all ranks.

    Args:
        module: The module.
        optimizers: Those of the run.
        drawn_from: What else random numbers follow from.
        world: The ranks.
    """
    digest = blake2b(digest_size=8)
    state = {
        "parameters": dict(module.named_parameters()),
        "buffers": dict(module.named_buffers()),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "random": [world.from_first(random_state()), drawn_from],
    }
    for path, value in leaves(state):
        digest.update(f"{path}={_described(value)};".encode())
        if isinstance(value, Tensor):
            stored = value.detach().cpu().contiguous().reshape(-1)
            digest.update(stored.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)}"
    # Of an object of the user's the text may be its address.
    return repr(value) if isinstance(value, (int, float, str, bytes, type(None))) else type(value).__qualname__
