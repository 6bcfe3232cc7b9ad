"""The 16-bit precisions of a run, and runs that differ by their rounding alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor

from lightning_gradavg._support.tree import mapped

__all__ = ["PRECISIONS", "Perturbation", "PrecisionType", "plugin_of", "require_precision"]


class PrecisionType(NamedTuple):
    """A precision that the Trainer trains in."""

    dtype: torch.dtype  # of most operators
    step: float  # the largest relative distance of two neighbouring numbers of this type
    keeps_gradients: bool  # whether weights and gradients are float32


PRECISIONS: Mapping[str, PrecisionType] = {
    "bf16-mixed": PrecisionType(torch.bfloat16, 2.0**-7, keeps_gradients=True),
    "16-mixed": PrecisionType(torch.float16, 2.0**-10, keeps_gradients=True),
    "bf16-true": PrecisionType(torch.bfloat16, 2.0**-7, keeps_gradients=False),
}
"""By the names that Lightning has for them."""


def require_precision(name: str) -> None:
    """Raise a ValueError if verify does not know a precision."""
    if name not in PRECISIONS:
        raise ValueError(
            f"precision={name!r} is none of {', '.join(map(repr, PRECISIONS))}. Leave it out to compare in float64"
        )


def plugin_of(plugins: Sequence[object], name: str, device_type: str) -> Precision:
    """Return the precision plugin of a run: the user's, if one of `plugins` is for this precision, or Lightning's."""
    for plugin in plugins:
        if isinstance(plugin, Precision) and plugin.precision == name:
            return plugin
    if name == "bf16-true":
        return HalfPrecision("bf16-true")
    # Made here, because Lightning replaces "16-mixed" on a CPU by "bf16-mixed".
    return MixedPrecision(name, device_type)  # type: ignore[arg-type]  # its literals are the other two names


class Perturbation:
    """Moves weights and inputs to a neighbouring number of a 16-bit type, up or down at random.

    Whole numbers stay as they are: they may be labels, masks or counts, and the types have most of them exactly.

    Args:
        precision: The type.
        seed: Of the random directions.
    """

    def __init__(self, precision: PrecisionType, seed: int) -> None:
        self._step = precision.step
        self._generator = torch.Generator().manual_seed(seed)

    def move(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors in place."""
        with torch.no_grad():
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.copy_(self._moved(tensor))

    def moved_batch(self, batch: object) -> object:
        """Return a batch with moved floating-point tensors."""
        return mapped(batch, self._moved_leaf)

    def _moved_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return self._moved(leaf)
        return leaf

    def _moved(self, tensor: Tensor) -> Tensor:
        directions = torch.randint(2, tensor.shape, generator=self._generator).to(tensor.device) * 2 - 1
        moved = (tensor.double() * (1 + self._step * directions)).to(tensor.dtype)
        return torch.where(tensor == tensor.round(), tensor, moved)
