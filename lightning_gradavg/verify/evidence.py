"""What is known of one step whose reduced gradient differs: which shares of its parts the run and one process took.

`P` are the gradients that one process computes of each micro-batch alone, `F` that of all samples at once, and `G` what
the run made of them. A combination of `P` has a share for each micro-batch: equal shares ("mean"), those of the samples
or of the weights, or any others. The combination of `P` that is `F` is *right*, the one that is `G` was *made*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from lightning_gradavg.verify.comparison import Seen
from lightning_gradavg.verify.sketches import Tensors, flat, gap_between, multiple_of
from lightning_gradavg.verify.twin import Twin

__all__ = ["Evidence"]


class Evidence:
    """What one process makes of the micro-batches of a step, alone and together.

    Gradients are vectors of the sketches of those parameters that differ.

    Args:
        twin: Trains one process up to the step, once for each micro-batch alone.
        seen: The difference.
        tolerance: The largest relative difference that counts as equal.

    Attributes:
        near: The largest relative difference up to which a combination of gradients is another gradient.
        world_size: The number of ranks.
        factor: `G` / `F`, if that is one number.
        is_of_all: Whether all gradients differ, and none is equal but zeros.
        group: The micro-batches of all ranks.
        batches: The same, without their places.
        parts: `P`, a row for each micro-batch.
        whole: `F`.
        reduced: `G`.
        like: Sketches that have the names and the order of the vectors.
    """

    def __init__(self, twin: Twin, seen: Seen, tolerance: float) -> None:
        self._twin = twin
        self._step = seen.step
        self.facts = twin.records[0].facts
        self.near = 100 * tolerance
        self.world_size = len(twin.records)
        self.group = twin.group_of_step(seen.step)
        self.batches = [taken.rank_batch for taken in self.group]
        gradients = [twin.gradient_of([taken], seen.step) for taken in self.group]
        # A part may have no gradient of a parameter, as of an embedding that its samples do not use.
        of_all: Tensors = {}
        for tensors in (*gradients, seen.expected, seen.found):
            of_all.update(tensors)
        self.like = {name: tensor for name, tensor in of_all.items() if name in seen.names}
        self.parts = torch.stack([flat(gradient, self.like) for gradient in gradients])
        self.whole = flat(seen.expected, self.like)
        self.reduced = flat(seen.found, self.like)
        self.factor = multiple_of(self.reduced, self.whole, self.near)
        self.is_of_all = not any(gradient.any() for name, gradient in seen.expected.items() if name not in seen.names)

    @property
    def multiple(self) -> str:
        """What is known of `G` / `F`, in words."""
        if self.factor is None:
            return "the gradient is another one"
        return f"the gradient is {self.factor:.4g} x that of one process"

    @cached_property
    def shares(self) -> Mapping[str, Tensor]:
        """The named combinations: which share each micro-batch has, by what decides on it."""
        amounts = {"samples": [float(rank_batch.size) for rank_batch in self.batches]}
        weights = [rank_batch.weight for rank_batch in self.batches if rank_batch.weight is not None]
        if len(weights) == len(self.batches) and sum(weights) > 0:
            amounts["weights"] = weights
        amounts["mean"] = [1.0] * len(self.batches)
        shares = {}
        for name, of_name in amounts.items():
            shares[name] = torch.tensor(of_name, dtype=torch.float64) / sum(of_name)
        return shares

    def factors(self, gradient: Tensor) -> Mapping[str, float]:
        """Return which of the named combinations a gradient is a multiple of, and which multiple."""
        factors: dict[str, float] = {}
        for name, shares in self.shares.items():
            counts = shares != 0  # a micro-batch without a share may have a gradient of NaN
            factor = multiple_of(gradient, shares[counts] @ self.parts[counts], self.near)
            if factor is not None:
                factors[name] = factor
        return factors

    def solved_shares(self, gradient: Tensor) -> Tensor | None:
        """Return the shares with which the parts make up a gradient; None if no shares do, or many could."""
        # With fewer elements than parts, or with parts that depend on each other, many shares make the same gradient.
        number = len(self.parts)
        if len(gradient) <= number or not gradient.isfinite().all() or not self.parts.isfinite().all():
            return None
        if int(torch.linalg.matrix_rank(self.parts, rtol=1e-9)) < number:
            return None
        scale = float(self.parts.abs().max())
        solution = torch.linalg.lstsq(self.parts.T / scale, (gradient / scale).unsqueeze(1)).solution
        shares: Tensor = solution[:, 0]
        if gap_between(gradient, shares @ self.parts) <= self.near:
            return shares
        return None

    @cached_property
    def right(self) -> Mapping[str, Tensor]:
        """The combinations of the parts that are the whole: by name, or "terms" with shares of their own."""
        factors = self.factors(self.whole)
        right: dict[str, Tensor] = {}
        for name, factor in factors.items():
            if self.is_close(factor, 1):
                right[name] = self.shares[name]
        number = len(self.batches)
        if self.is_close(factors.get("mean", 0.0), number):
            right["sum"] = self.shares["mean"] * number
        if right:
            return right
        shares = self.solved_shares(self.whole)
        # A loss that is a mean over terms has shares of its numbers of terms, which are not negative and add up to 1.
        if shares is not None and float(shares.min()) > -self.near and self.is_close(float(shares.sum()), 1):
            right["terms"] = shares
        return right

    @property
    def depends_on_order(self) -> bool:
        """Whether one process computes another gradient of the same samples in another order."""
        reversed_order = self._twin.gradient_of(self.group[::-1], self._step)
        return not gap_between(flat(reversed_order, self.like), self.whole) <= self.near

    def is_close(self, factor: float, expected: float) -> bool:
        """Return whether a factor is another, but for rounding."""
        return math.isclose(factor, expected, rel_tol=self.near)
