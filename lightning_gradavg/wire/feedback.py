"""Error feedback: what a lossy codec did not send at one step is added to what it sends at the next.

References:
    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019; in two stages as in
    Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated Compression",
    2019.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Feedback", "Residual", "Residuals"]


@dataclass
class Residual:
    """What was not sent of one segment of a bucket.

    Attributes:
        parts: Of the parts that this rank scatters in the last hop: shape `(parts, width)`.
        total: Of the part that it sums: shape `(1, width)`.
        first: Position of the first of `parts` in the bucket, in numbers.
        own: Position of `total` among `parts`.
    """

    parts: Tensor
    total: Tensor
    first: int
    own: int


@dataclass
class Residuals:
    """What was not sent of one bucket.

    Attributes:
        parameters: The `id` of each parameter in the bucket, and its size.
        segments: Of each segment.
        carried: What other buckets, of an earlier arrangement, did not send of these parameters; to be added once.
    """

    parameters: tuple[tuple[int, int], ...]
    segments: list[Residual] = field(default_factory=list)
    carried: Tensor | None = None

    def flat(self) -> Tensor:
        """Return all that is owed of the bucket, in its order."""
        size = sum(numel for _, numel in self.parameters)
        device = self.segments[0].parts.device
        flat = torch.zeros(size, device=device) if self.carried is None else self.carried.clone()
        for segment in self.segments:
            parts = segment.parts.clone()
            parts[segment.own] += segment.total[0]
            here = flat[segment.first : segment.first + parts.numel()]
            here += parts.flatten()[: here.numel()]
        return flat


class Feedback:
    """The residuals of all buckets of a rank.

    DDP arranges its buckets anew after the first iteration. What is owed to a parameter then moves with it, as a
    part of this rank's own gradient: the sum over the ranks is what it would have been.
    """

    def __init__(self) -> None:
        self._of_bucket: dict[tuple[tuple[int, int], ...], Residuals] = {}
        self._owed: dict[int, Tensor] = {}

    def forget(self, lost: Tensor) -> None:
        """Owe nothing any more if a step was lost.

        What that step paid back is lost with it, and what it left is that of a gradient that was never used: often a
        huge one, and in units of a loss scale that is about to fall.

        Args:
            lost: 0-dim boolean; on an accelerator it is not read.
        """
        if lost.device.type == "cpu":
            if lost:
                self._of_bucket.clear()
                self._owed.clear()
            return
        for owed in self._owed.values():
            owed.masked_fill_(lost, 0)
        for residuals in self._of_bucket.values():
            for segment in residuals.segments:
                segment.parts.masked_fill_(lost, 0)
                segment.total.masked_fill_(lost, 0)

    def residuals(self, parameters: Sequence[Tensor], segments: Callable[[], list[Residual]]) -> Residuals:
        """Return the residuals of a bucket.

        Args:
            parameters: What the bucket holds the gradients of, in its order.
            segments: Makes those of a new bucket, all zero.
        """
        # A complex number is two on the wire.
        key = tuple((id(parameter), parameter.numel() * (1 + parameter.is_complex())) for parameter in parameters)
        if key in self._of_bucket:
            return self._of_bucket[key]
        members = {identity for identity, _ in key}
        for other in [other for other in self._of_bucket if any(identity in members for identity, _ in other)]:
            flat = self._of_bucket.pop(other).flat()
            owed = flat.split([numel for _, numel in other])
            self._owed |= {identity: part for (identity, _), part in zip(other, owed, strict=True)}
        residuals = Residuals(key, segments())
        if any(identity in self._owed for identity, _ in key):
            device = parameters[0].device
            owed_here = (self._owed.pop(identity, None) for identity, _ in key)
            residuals.carried = torch.cat(
                [
                    torch.zeros(numel, device=device) if owed is None else owed
                    for owed, (_, numel) in zip(owed_here, key, strict=True)
                ]
            )
        self._of_bucket[key] = residuals
        return residuals
