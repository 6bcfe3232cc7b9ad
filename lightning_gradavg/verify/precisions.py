"""The precisions in which a run can be compared with one process.

In float64 ("64-true") a fault exceeds rounding by far. In 16 bits rounding is as large as some faults, so what counts
as equal is measured on the model: by how much one process in 16 bits is another than the same in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

__all__ = ["PRECISIONS", "is_measured", "plugin_of", "require_precision"]

PRECISIONS: Mapping[str, float] = {
    "64-true": 1e-8,
    "32-true": 1e-4,
    "bf16-mixed": 1e-6,
    "16-mixed": 1e-6,
    "bf16-true": 1e-6,
}
"""By Lightning's names: the relative difference that counts as equal, in 16 bits beside what rounding explains."""

_LOSS_SCALE = 1024.0
"""At which few gradients overflow. A step that a scaler skips cannot be compared."""


def require_precision(name: str) -> None:
    """Raise a ValueError if verify does not know a precision."""
    if name not in PRECISIONS:
        raise ValueError(f"precision={name!r} is none of {', '.join(map(repr, PRECISIONS))}. Leave it out for float64")


def is_measured(name: str) -> bool:
    """Return whether what rounding explains is measured."""
    return name not in ("64-true", "32-true")


def plugin_of(plugins: Sequence[object], name: str) -> Precision:
    """Return the precision plugin of a run: the user's, if one of `plugins` is for these 16 bits, or Lightning's."""
    if name == "64-true":
        return DoublePrecision()
    if name == "32-true":
        return Precision()
    for plugin in plugins:
        if isinstance(plugin, Precision) and plugin.precision == name:
            if isinstance(plugin, MixedPrecision):
                _move_to_cpu(plugin)
            return plugin
    if name == "bf16-true":
        return HalfPrecision("bf16-true")
    if name == "bf16-mixed":
        return MixedPrecision("bf16-mixed", "cpu")
    # Made here, because Lightning replaces "16-mixed" on a CPU by "bf16-mixed".
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=_LOSS_SCALE))


def _move_to_cpu(plugin: MixedPrecision) -> None:
    """Have a plugin for another device, such as that of a user's config, compute in 16 bits on the CPU.

    Without that device, its `autocast` and its scaler would do nothing, and the run would be one of 32 bits.
    """
    if plugin.device == "cpu":
        return
    plugin.device = "cpu"
    if plugin.scaler is not None:
        plugin.scaler = torch.amp.GradScaler("cpu", init_scale=_LOSS_SCALE)
