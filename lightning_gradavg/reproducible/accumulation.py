"""The gradients of a rank's replicas, each by itself, and the totals of their weights, in an order free of the ranks.

A replica's gradient is what its own micro-batches of the window add up to, one after another. It is taken out of the
parameters after each backward; when it is complete, it is folded with those before it. That of the replica whose
backward comes last arrives in DDP's buckets, where the others are added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gradavg.place import Place
from lightning_gradavg.reduction.accumulation import Accumulation, Gradients
from lightning_gradavg.reduction.loss import WeighedLoss
from lightning_gradavg.reduction.reducer import Reducer
from lightning_gradavg.reduction.sums import SUM_DTYPES, as_real
from lightning_gradavg.reduction.window import WHOLE_LOSS, MicroBatch, Totals, Window
from lightning_gradavg.reproducible.tree import Fold, Span
from lightning_gradavg.rules import Rule

__all__ = ["ReplicaAccumulation", "ReplicaReducer", "ReplicaSums", "ReplicaWindow"]


class ReplicaWindow(Window):
    """A window whose normalizers travel by replica: each is added up in the order of its micro-batches.

    The unit is 1 and no power of two near the weights, as that would follow from weights that a resumed run has not
    seen: where it makes numbers subnormal, it shows in the bits.

    Args:
        rule: The reduction rule.
        places: The places of all ranks, in rank order.
        rank: This rank.
        replicas: Replicas of each loader batch.
    """

    unit = 1.0

    def __init__(self, rule: Rule, places: Sequence[Place], rank: int, *, replicas: int) -> None:
        super().__init__(rule, places, rank)
        self.sums = replicas

    def summed(self, normalizers: Tensor) -> Tensor:
        """Return the normalizer of each replica, 0 for those of other ranks: added to 0 they keep their bits."""
        sums = normalizers.new_zeros(self.sums)
        for micro_batch, normalizer in zip(self.micro_batches, normalizers[0], strict=True):
            sums[micro_batch.replica] += normalizer
        return sums

    def totals(self, values: Any) -> Totals:
        """Return the ranks' summaries, added up, as what they are."""
        return _ReplicaTotals(values, len(self.places))


class _ReplicaTotals(Totals):
    def total(self, index: int) -> Any:  # noqa: ARG002  # losses have one term
        if isinstance(self.normalizers, Tensor):
            return self.normalizers.sum()
        return float(torch.tensor(self.normalizers, dtype=torch.float64).sum())

    def unit_after(self, unit: float) -> float:
        return unit


class ReplicaSums:
    """What is known of the gradients of this rank's replicas before the last one's is in the buckets.

    Args:
        replicas: Replicas of each loader batch.
        held: Those of this rank.
        parameters: The parameters, in the order of all gradients here.

    Attributes:
        held: See above.
        latest: The replica whose backward runs, or ran last: its gradient is in no sum.
        waiting: Gradients of replicas that have micro-batches left.
        nothing: Those of a replica that has none.
    """

    def __init__(self, replicas: int, held: range, parameters: Sequence[nn.Parameter]) -> None:
        self.held, self._replicas = held, replicas
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        self.nothing: Gradients = [None] * len(parameters)
        self.reset()

    def reset(self) -> None:
        """Begin a window."""
        self.latest = self.held.start
        self.waiting: dict[int, Gradients] = {}
        self._complete: Fold[Gradients] = Fold(self._replicas, _into_left)

    def take(self, gradients: Gradients, *, complete: bool) -> None:
        """Take the gradients of the latest replica, with or without those of its last micro-batch."""
        if complete:
            self._complete.push((self.latest, self.latest + 1), _all_flat(gradients))
        else:
            self.waiting[self.latest] = gradients

    def completed(self, gradients: Gradients, parameters: Sequence[Tensor]) -> Gradients:
        """Return the latest replica's gradients with zeros where it has none, but another replica of this rank has."""
        others = [*(each for _, each in self._complete.nodes), *self.waiting.values()]
        return [
            torch.zeros_like(parameter) if mine is None and any(each[index] is not None for each in others) else mine
            for index, (mine, parameter) in enumerate(zip(gradients, parameters, strict=True))
        ]

    def nodes(self, parameters: Sequence[Tensor], latest: Sequence[Tensor]) -> list[tuple[Span, Gradients]]:
        """Return what this rank's replicas add up to.

        Args:
            parameters: Some of the parameters.
            latest: Their gradients of the latest replica, one-dimensional and in the type of sums; written into.
        """
        indices = [self._index[id(parameter)] for parameter in parameters]
        fold: Fold[Gradients] = Fold(self._replicas, _into_right)
        for span, gradients in self._complete.nodes:
            fold.push(span, [gradients[index] for index in indices])
        fold.push((self.latest, self.latest + 1), list(latest))
        # The loader batch at the end of the window may have no samples of these.
        for replica in range(self.latest + 1, self.held.stop):
            waiting = _all_flat(self.waiting.get(replica, self.nothing))
            fold.push((replica, replica + 1), [waiting[index] for index in indices])
        return fold.nodes


def _flat(gradient: Tensor) -> Tensor:
    """Return the real numbers in the order in which they lie in memory, as they do in a bucket, without a gap."""
    numbers = as_real(gradient.resolve_conj())
    return numbers.as_strided((numbers.numel(),), (1,))


def _all_flat(gradients: Gradients) -> Gradients:
    return [None if gradient is None else _flat(gradient) for gradient in gradients]


def _into_left(left: Gradients, right: Gradients) -> Gradients:
    return [_sum(one, other) for one, other in zip(left, right, strict=True)]


def _into_right(left: Gradients, right: Gradients) -> Gradients:
    return [_sum(other, one) for one, other in zip(left, right, strict=True)]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum in the type of sums, in the memory of the first where it has that type. It is one in any order."""
    if one is None or other is None:
        return one if other is None else other
    return one.to(SUM_DTYPES[one.dtype]).add_(other)


class ReplicaAccumulation(Accumulation):
    """Keeps the gradient of each replica of this rank apart until it is complete.

    Args:
        reducer: Combines the gradients during the last backward of a window.
        parameters: The parameters that the reducer sees.
        sums: Takes the gradients.
        finds_unused: Whether DDP looks for parameters that a backward does not reach.
    """

    def __init__(
        self, reducer: Reducer, parameters: Sequence[nn.Parameter], sums: ReplicaSums, *, finds_unused: bool
    ) -> None:
        super().__init__(reducer, parameters, preserves_gradients=False)
        self._sums, self._finds_unused = sums, finds_unused
        self._replica, self._ends = sums.held.start, False

    def weigh(self, terms: Mapping[str, Tensor], micro_batch: MicroBatch) -> WeighedLoss:
        """Return the loss to run the backward from.

        Raises:
            ValueError: If its terms have weights of their own: their normalizers are known when their gradients are
                added up already.
        """
        if tuple(micro_batch.weights) != (WHOLE_LOSS,):
            raise ValueError(
                f"reproducible=True serves one weight for the whole loss, got one for each of"
                f" {', '.join(map(repr, micro_batch.weights))}. Return one number as weight, or leave reproducible out."
            )
        return super().weigh(terms, micro_batch)

    def reset(self) -> None:
        """Forget a window that was begun and never reduced."""
        super().reset()
        self._sums.reset()

    def begin(self, *, first: bool, ends: bool) -> None:
        """Note that the next backward is that of the rank's first or next replica.

        Args:
            first: Whether it is the first of a loader batch.
            ends: Whether that is the last of its window.
        """
        self._replica = self._sums.held.start if first else self._replica + 1
        self._ends = ends

    def backward(self, loss: WeighedLoss, run: Callable[..., None], *, last: bool, loss_divisor: float | None) -> None:
        """Run a micro-batch's backward; after the last one of the window the gradients are the reduced ones."""
        self._sums.latest = self._replica
        gradients = self._sums.waiting.pop(self._replica, self._sums.nothing)
        if last and self._finds_unused:
            # It raises where one that an earlier backward reached has no gradient now.
            gradients = self._sums.completed(gradients, self.parameters)
        self._set_gradients(gradients)
        super().backward(loss, run, last=last, loss_divisor=loss_divisor)
        if not last:
            self._sums.take([parameter.grad for parameter in self.parameters], complete=self._ends)
            self._set_gradients(None)

    def _checked(self, micro_batch: MicroBatch) -> MicroBatch:
        return replace(super()._checked(micro_batch), replica=self._replica)

    def finish(self) -> None:
        """End the window after its last backward."""
        super().finish()
        self._sums.reset()


@dataclass(frozen=True)
class _Alone:
    """One parameter's gradient, as a bucket."""

    parameter: Tensor
    gradient: Tensor

    def buffer(self) -> Tensor:
        return self.gradient

    def parameters(self) -> list[Tensor]:
        return [self.parameter]


class ReplicaReducer(Reducer):
    """A reducer whose sum of buckets adds what other replicas of the rank left."""

    def reduce_apart(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:  # noqa: ARG002  # that of the sum
        """Reduce gradients that are in no bucket as buckets are, after the last backward of a window."""
        for parameter in parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            bucket: Any = _Alone(parameter, _flat(gradient))
            bucket.gradient.copy_(self._reduce(bucket).wait())
            parameter.grad = gradient
