"""Local accumulation: one backward per micro-batch, each weighed on its own, reduced at the end of the window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_gradavg.reduction.reducer import Reducer
from lightning_gradavg.reduction.terms import Coefficients, keep_gradients, weigh_terms
from lightning_gradavg.reduction.window import WHOLE_LOSS, MicroBatch
from lightning_gradavg.rules import Weight

__all__ = ["Accumulator", "WeighedLoss"]

Gradients = list[Tensor | None]


@dataclass
class WeighedLoss:
    """A loss whose terms are weighed when its backward runs.

    Attributes:
        value: The sum of the terms, with graph. Its value is not weighed.
        micro_batch: The weights.
        coefficients: What the backward multiplies each term by; None if it multiplies by nothing.
        root: What the backward runs from, scaled as the precision asks; set before `Accumulator.backward`.
    """

    value: Tensor
    micro_batch: MicroBatch
    coefficients: Coefficients | None = None
    root: Tensor | None = None


class Accumulator:
    """Accumulates the weighed gradients of a module on this rank, and has the reducer combine them.

    Args:
        reducer: Combines the accumulated gradients during the last backward of a window.
        parameters: The parameters that the reducer sees.
        preserves_gradients: Whether gradients that were there before the window are kept out of the reduction and
            added to its result, as they must be when a user accumulates gradients that were already reduced.
    """

    def __init__(self, reducer: Reducer, parameters: Sequence[nn.Parameter], preserves_gradients: bool) -> None:
        self.reducer = reducer
        self.parameters = list(parameters)
        self._preserves = preserves_gradients
        self._before: Gradients | None = None
        self._trained: tuple[bool, ...] = ()
        self._left: list[tuple[Tensor | None, int]] = []
        self._of_term: dict[str, Gradients] = {}
        self._keeps_all = False

    def reset(self) -> None:
        """Forget a window that was begun and never reduced."""
        self.reducer.reset()
        self._before = None
        self._left = []
        self._of_term = {}

    @property
    def pending(self) -> int:
        """Number of micro-batches accumulated and not yet reduced."""
        return len(self.reducer.window.micro_batches)

    def weigh(self, terms: Mapping[str, Tensor], micro_batch: MicroBatch, *, alone: bool) -> WeighedLoss:
        """Return the loss to run the backward from.

        Args:
            terms: The loss terms by name.
            micro_batch: Their weights; the one name `WHOLE_LOSS` if all terms share a weight.
            alone: Whether the micro-batch is its window. Then one factor on the accumulated gradient says it all.
        """
        losses = [terms[term] for term in sorted(terms)]
        whole = tuple(micro_batch.weights) == (WHOLE_LOSS,)
        unweighed = alone and self.reducer.window.relative
        if whole and (unweighed or not (self.reducer.rule.uses_weight or micro_batch.absent)):
            return WeighedLoss(sum(losses[1:], losses[0]), micro_batch)
        if whole:
            losses = [sum(losses[1:], losses[0])]
        coefficients = Coefficients([1.0] * len(losses))
        return WeighedLoss(weigh_terms(coefficients, losses), micro_batch, coefficients)

    def backward(self, loss: WeighedLoss, run: Callable[..., None], *, last: bool, loss_divisor: float) -> None:
        """Run a micro-batch's backward; after the last one of the window the gradients are the reduced ones.

        Args:
            loss: What `weigh` returned.
            run: Runs the backward of the loss; takes `retain_graph=True`.
            last: Whether the reducer's hook runs during this backward.
            loss_divisor: What the training loop divides every loss of this window by.
        """
        if self._preserves and self.pending and self._cleared():
            self.reset()
        if self._preserves and self._before is None:
            # A gradient may live in a bucket of DDP, which the next reduction overwrites.
            self._before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
            self._set_gradients(None)
        micro_batch = self._checked(loss.micro_batch)
        coefficients = self.reducer.accumulate(micro_batch)
        self.reducer.accumulating = not last
        if last:
            self.reducer.close(loss_divisor)
        # Where gradients cross ranks, samples whose own loss does not count still enter the losses of others.
        self._keeps_all = not (self.reducer.window.relative or micro_batch.absent)
        if micro_batch.problem is not None:
            self._discard(loss, run)
        elif tuple(coefficients) == (WHOLE_LOSS,):
            self._backward_whole(loss, coefficients[WHOLE_LOSS], run)
        elif last:
            self._backward_last_terms(loss, coefficients, run)
        else:
            self._backward_each_term(loss, coefficients, run)

    def pause(self) -> None:
        """End a micro-batch that is not the last one of its window."""
        self.reducer.accumulating = False
        if self._preserves:
            self._left = [(p.grad, 0 if p.grad is None else p.grad._version) for p in self.parameters]

    def finish(self) -> None:
        """End the window after its last backward: check it, and add what was there before it."""
        self._left = []
        self.reducer.finish()
        before, self._before = self._before, None
        if before is None:
            return
        for parameter, gradient in zip(self.parameters, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _checked(self, micro_batch: MicroBatch) -> MicroBatch:
        """Find fault with a micro-batch that trains other parameters than its window."""
        if not self._preserves:
            return micro_batch
        trained = tuple(parameter.requires_grad for parameter in self.parameters)
        if self.pending == 0 or trained == self._trained:
            self._trained = trained
            return micro_batch
        problem = (
            "it trains other parameters than the micro-batches before it, which were not reduced yet:"
            " reduce the window of one optimizer before the backward of another"
        )
        return replace(micro_batch, problem=micro_batch.problem or problem)

    def _cleared(self) -> bool:
        """Return whether the user zeroed the gradients of a window that was not reduced, which gives it up."""
        gradients = [parameter.grad for parameter in self.parameters]
        if all(
            now is left and (now is None or now._version == version)
            for now, (left, version) in zip(gradients, self._left, strict=True)
        ):
            return False
        # Only gradients that someone touched are looked at, which waits for an accelerator.
        return not any(
            bool((gradient._values() if gradient.is_sparse else gradient).any())
            for gradient in gradients
            if gradient is not None
        )

    def _discard(self, loss: WeighedLoss, run: Callable[..., None]) -> None:
        if loss.coefficients is not None:
            value = 1.0 if self.reducer.window.relative else None
            loss.coefficients.values = [value for _ in loss.coefficients.values]
        with keep_gradients(self.parameters, self._keeps_all):
            run()

    def _stopped(self, coefficient: Weight) -> Weight | None:
        """Return None instead of 0 where gradients cross ranks: even 0 times NaN would reach the others."""
        return None if _is_zero(coefficient) and not self.reducer.window.relative else coefficient

    def _backward_whole(self, loss: WeighedLoss, coefficient: Weight, run: Callable[..., None]) -> None:
        if loss.coefficients is None:
            run()
            return
        loss.coefficients.values = [self._stopped(coefficient)]
        with keep_gradients(self.parameters, self._keeps_all or coefficient > 0):
            run()

    def _backward_each_term(
        self, loss: WeighedLoss, coefficients: Mapping[str, Weight], run: Callable[..., None]
    ) -> None:
        """Accumulate each term's gradient apart, since its normalizer is known only at the end of the window."""
        assert loss.coefficients is not None
        terms = list(coefficients)
        for index, term in enumerate(terms):
            coefficient = coefficients[term]
            loss.coefficients.values = [self._stopped(coefficient) if other == term else None for other in terms]
            self._set_gradients(self._of_term.get(term))
            with keep_gradients(self.parameters, self._keeps_all or coefficient > 0):
                run(retain_graph=index < len(terms) - 1)
            self._of_term[term] = [parameter.grad for parameter in self.parameters]
        # Something to be zeroed, where the user gives the window up.
        self._set_gradients(self._of_term[terms[0]])

    def _backward_last_terms(
        self, loss: WeighedLoss, coefficients: Mapping[str, Weight], run: Callable[..., None]
    ) -> None:
        assert loss.coefficients is not None
        factors = self.reducer.term_factors()
        total: Gradients = [None] * len(self.parameters)
        for term, gradients in self._of_term.items():
            for index, gradient in enumerate(gradients):
                total[index] = _plus_scaled(total[index], gradient, factors[term])
        self._of_term = {}
        self._set_gradients(total)
        # A term without gradient is left out of the backward: 0 times the NaN of an empty mean would be NaN.
        values = [
            None if _is_zero(coefficient) or _is_zero(factors[term]) else coefficient * factors[term]
            for term, coefficient in coefficients.items()
        ]
        if all(value is None for value in values):
            self._discard(loss, run)
            return
        unread = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
        # One backward goes through DDP. It may carry one term of unread weight, if no other; the rest comes before it.
        alone = all(value is None or isinstance(value, Tensor) for value in values)
        carried = unread.pop() if unread and alone else None
        for index in unread:
            loss.coefficients.values = [value if index == other else None for other, value in enumerate(values)]
            _add_kept(total, self._differentiate(loss), values[index])
            values[index] = None
        self._set_gradients(total)
        loss.coefficients.values = values
        with keep_gradients(self.parameters, True if carried is None else _positive(values[carried])):
            run()

    def _differentiate(self, loss: WeighedLoss) -> Gradients:
        """Return the gradients without accumulating them, so that DDP takes no notice."""
        assert loss.root is not None
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        found = iter(torch.autograd.grad(loss.root, trained, retain_graph=True, allow_unused=True))
        return [next(found) if parameter.requires_grad else None for parameter in self.parameters]

    def _set_gradients(self, gradients: Gradients | None) -> None:
        for parameter, gradient in zip(self.parameters, gradients or [None] * len(self.parameters), strict=True):
            parameter.grad = gradient


def _positive(number: Weight | None) -> bool | Tensor:
    return number is not None and number > 0


def _add_kept(total: Gradients, gradients: Gradients, factor: Weight | None) -> None:
    """Add gradients where their factor is above 0."""
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            kept, before = torch.where(torch.as_tensor(_positive(factor)), gradient, 0), total[index]
            total[index] = kept if before is None else before + kept


def _is_zero(number: Weight) -> bool:
    return not isinstance(number, Tensor) and number == 0


def _plus_scaled(total: Tensor | None, gradient: Tensor | None, factor: Weight) -> Tensor | None:
    if gradient is None:
        return total
    if isinstance(factor, Tensor):
        scaled = torch.where(factor == 0, 0, gradient * factor)
    elif factor == 0:
        scaled = torch.zeros_like(gradient)
    else:
        scaled = gradient * float(factor)
    return scaled.to(gradient.dtype) if total is None else total + scaled.to(gradient.dtype)
