"""Error feedback: what a lossy codec did not send at one step is added to what it sends at the next.

References:
    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019; in two stages as in
    Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated Compression",
    2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gradavg.wire.codecs import Codec

__all__ = ["Feedback", "Residuals", "encode_with_feedback"]


@dataclass
class Residuals:
    """What was not sent of one bucket.

    Attributes:
        parameters: The `id` of each parameter in the bucket, and its size.
        parts: Of the parts that this rank scatters in the last hop: shape `(parts, width)`.
        total: Of the part that it sums: shape `(1, width)`.
        first: Position of the first of `parts` in the bucket, in numbers.
        own: Position of `total` among `parts`.
        carried: What other buckets, of an earlier arrangement, did not send of these parameters; to be added once.
    """

    parameters: tuple[tuple[int, int], ...]
    parts: Tensor
    total: Tensor
    first: int
    own: int
    carried: Tensor | None = None

    def flat(self) -> Tensor:
        """Return all that is owed of the bucket, in its order."""
        size = sum(numel for _, numel in self.parameters)
        parts = self.parts.clone()
        parts[self.own] += self.total[0]
        before = parts.new_zeros(self.first)
        flat = torch.cat((before, parts.flatten(), parts.new_zeros(size)))[:size]
        return flat if self.carried is None else flat + self.carried


class Feedback:
    """The residuals of all buckets of a rank.

    DDP arranges its buckets anew after the first iteration. What is owed to a parameter then moves with it, as a
    part of this rank's own gradient: the sum over the ranks is what it would have been.
    """

    def __init__(self) -> None:
        self._of_bucket: dict[tuple[tuple[int, int], ...], Residuals] = {}
        self._owed: dict[int, Tensor] = {}

    def residuals(self, parameters: Sequence[Tensor], *, rows: int, width: int, first: int, own: int) -> Residuals:
        """Return the residuals of a bucket, zero where it is new.

        Args:
            parameters: What the bucket holds the gradients of, in its order.
            rows: Parts that this rank scatters in the last hop.
            width: Numbers in a part.
            first: As in `Residuals`.
            own: As in `Residuals`.
        """
        key = tuple((id(parameter), parameter.numel()) for parameter in parameters)
        if key in self._of_bucket:
            return self._of_bucket[key]
        members = {identity for identity, _ in key}
        for other in [other for other in self._of_bucket if any(identity in members for identity, _ in other)]:
            flat = self._of_bucket.pop(other).flat()
            owed = flat.split([numel for _, numel in other])
            self._owed |= {identity: part for (identity, _), part in zip(other, owed, strict=True)}
        device = parameters[0].device
        carried = None
        if any(identity in self._owed for identity, _ in key):
            owed_here = (self._owed.pop(identity, None) for identity, _ in key)
            carried = torch.cat(
                [
                    torch.zeros(numel, device=device) if owed is None else owed
                    for owed, (_, numel) in zip(owed_here, key, strict=True)
                ]
            )
        residuals = Residuals(
            key,
            torch.zeros(rows, width, device=device),
            torch.zeros(1, width, device=device),
            first,
            own,
            carried,
        )
        self._of_bucket[key] = residuals
        return residuals


def encode_with_feedback(
    codec: Codec, rows: Tensor, residual: Tensor, *, fault: int, exact: int | None = None
) -> Tensor:
    """Return the payload of `rows + residual`, and keep in `residual` what it does not say.

    Where that is not finite, the old residual is kept: the step is lost, and what it owed is not.

    Args:
        codec: Lossy.
        rows: float32; becomes the sum of both.
        residual: Of the same shape.
        fault: As in `Codec.encode`.
        exact: A row that is not read from the payload, so that nothing is owed for it.
    """
    rows += residual
    payload = codec.encode(rows, fault)
    lost = rows - codec.decode(payload)
    if exact is not None:
        lost[exact] = rows[exact] - rows[exact]  # nothing, or NaN
    residual.copy_(torch.where(lost.isfinite(), lost, residual))
    return payload
