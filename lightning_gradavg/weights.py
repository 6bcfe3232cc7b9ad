"""Weights: how many loss terms stand behind a micro-batch, in whatever type the user counts them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.rules import Weight

__all__ = ["as_weight", "weight_problem"]


def as_weight(value: Any, device: torch.device) -> Weight:
    """Return `value` as a weight, without float32 rounding and without waiting for an accelerator.

    Args:
        value: An int, a float, a NumPy scalar, or a tensor with one element, of any dtype and on any device.
        device: Where the gradients are.

    Returns:
        A float; or, for a tensor on an accelerator, a detached 0-dim float64 tensor on `device`.

    Raises:
        TypeError: If `value` is not one number.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise TypeError(f"a weight is one number, got a tensor of shape {tuple(value.shape)} and {value.dtype}")
        weight: Tensor = value.detach()
        if weight.device.type != "cpu" and device.type != "cpu":
            return weight.reshape(()).to(device=device, dtype=torch.float64, non_blocking=True)
        value = weight
    elif isinstance(value, (str, bytes)):
        raise TypeError(f"a weight is one number, got {value!r} of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise TypeError(f"a weight is one number, got {type(value).__name__} too large for a float") from None
    except (TypeError, ValueError):
        raise TypeError(f"a weight is one number, got {value!r} of type {type(value).__name__}") from None


def weight_problem(weight: Weight) -> str | None:
    """Return what is wrong with `weight`, or None if it is finite and >= 0 or cannot be looked at without waiting."""
    if isinstance(weight, Tensor) or (math.isfinite(weight) and weight >= 0):
        return None
    return f"weight {weight!r} is not a finite number >= 0"
