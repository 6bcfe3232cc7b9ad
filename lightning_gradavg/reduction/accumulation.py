"""Local accumulation: one backward per micro-batch, each weighed on its own, reduced at the end of the window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gradavg.lightning_internals import stored, version_of
from lightning_gradavg.reduction.loss import WeighedLoss, gradients_discarded
from lightning_gradavg.reduction.reducer import Reducer
from lightning_gradavg.reduction.window import WHOLE_LOSS, MicroBatch, Window

__all__ = ["Accumulation"]

Gradients = list[Tensor | None]


class Accumulation:
    """Accumulates the weighed gradients of a module on this rank, and has the reducer combine them.

    A weight that is on an accelerator is read on the host where something is to be decided by it: under accumulation,
    where a gradient of weight 0 must not be added; among named terms, where one of weight 0 must be left out of the
    backward; and where gradients cross ranks. The host then waits once per micro-batch. Otherwise the micro-batch is
    its window, and the buckets themselves are selected.

    Args:
        reducer: Combines the accumulated gradients during the last backward of a window.
        parameters: The parameters that the reducer sees.
        preserves_gradients: Whether gradients that were there before the window are kept out of the reduction and
            added to its result, as they must be when a user accumulates gradients that were already reduced.

    Attributes:
        crosses_ranks: Whether gradients of one rank's loss reach another within the backward, as through batch norm
            over all ranks, or a gather: samples whose own loss does not count still enter the losses of others.
    """

    def __init__(self, reducer: Reducer, parameters: Sequence[nn.Parameter], *, preserves_gradients: bool) -> None:
        self.reducer, self.crosses_ranks = reducer, False
        self.parameters = list(parameters)
        self._preserves = preserves_gradients
        self._before: Gradients | None = None
        self._trained: tuple[bool, ...] = ()
        self._left: list[tuple[Tensor | None, int]] = []
        self._of_term: dict[str, Gradients] = {}
        rule, place = reducer.rule, reducer.window.place
        self._multiplies = rule.uses_weight or rule.share(place, 1.0).multiplier != 1

    def reset(self) -> None:
        """Forget a window that was begun and never reduced."""
        if self.pending:
            self.reducer.reset()
        self._before, self._left, self._of_term = None, [], {}

    def give_up(self) -> None:
        """Forget a window that failed, and its gradients: they are again those that were there before it."""
        self._set_gradients(self._before)
        self.reducer.reset()
        self._before, self._left, self._of_term, self.crosses_ranks = None, [], {}, False

    @property
    def pending(self) -> int:
        """Number of micro-batches accumulated and not yet reduced."""
        return len(self.reducer.window.micro_batches)

    def on_gather(self) -> None:
        """Note that gradients of a step cross ranks."""
        self.crosses_ranks = True

    @property
    def closed(self) -> tuple[Window, float]:
        """The window that is being reduced, and what its gradients were divided by."""
        return self.reducer.closed

    def weigh(self, terms: Mapping[str, Tensor], micro_batch: MicroBatch) -> WeighedLoss:
        """Return the loss to run the backward from.

        Args:
            terms: The loss terms by name.
            micro_batch: Their weights; the one name `WHOLE_LOSS` if all terms share a weight.
        """
        weighed = self._multiplies or micro_batch.absent
        return WeighedLoss.of(terms, micro_batch) if weighed else WeighedLoss.plain(terms, micro_batch)

    def backward(self, loss: WeighedLoss, run: Callable[..., None], *, last: bool, loss_divisor: float | None) -> None:
        """Run a micro-batch's backward; after the last one of the window the gradients are the reduced ones.

        Args:
            loss: What `weigh` returned.
            run: Runs the backward of the loss; takes `retain_graph=True`.
            last: Whether the reducer's hook runs during this backward.
            loss_divisor: What the training loop divides every loss of this window by; None for its micro-batches.
        """
        if self._preserves and self.pending and self._cleared():
            self.reset()
        alone = last and self.pending == 0
        if self._preserves and self._before is None:
            # A gradient may live in a bucket of DDP, which the next reduction overwrites.
            self._before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
            self._set_gradients(None)
        micro_batch = self._checked(loss.micro_batch)
        multipliers = self.reducer.add(micro_batch)
        self.reducer.accumulating = not last
        if last:
            self.reducer.close(self.pending if loss_divisor is None else loss_divisor)
        named = tuple(multipliers) != (WHOLE_LOSS,)
        coefficients = {term: multiplier / self.reducer.unit for term, multiplier in multipliers.items()}
        if alone and not named and not self.crosses_ranks and _is_unread(multipliers[WHOLE_LOSS]):
            self._select(loss, coefficients[WHOLE_LOSS], run)
            return
        read = _on_host(multipliers)
        counted = {term: value if _counts(read[term]) else None for term, value in coefficients.items()}
        if named and last:
            # Each term has its own normalizer, and one backward, on top of what was accumulated of each.
            factors = self._fold()
            counted = {term: None if value is None else value * factors[term] for term, value in counted.items()}
        if micro_batch.problem is not None or all(value is None for value in counted.values()):
            self._discard(loss, run, micro_batch)
        elif named and not last:
            self._run_each_term(loss, counted, run)
        else:
            self._run(loss, list(counted.values()), run)

    @property
    def held(self) -> Iterator[tuple[int, Tensor]]:
        """The gradients accumulated so far, each with the index of its parameter."""
        for gradients in ([parameter.grad for parameter in self.parameters], *self._of_term.values()):
            yield from ((index, gradient) for index, gradient in enumerate(gradients) if gradient is not None)

    def drop(self, *, explicit: bool) -> None:
        """Let nothing count that was accumulated; `explicit` is as of `Window.drop`. Zeroed: 0 times NaN is NaN."""
        self.reducer.window.drop(explicit=explicit)
        for _, gradient in self.held:
            stored(gradient).zero_()

    def close(self, run: Callable[[], None], loss_divisor: float) -> None:
        """Reduce what was accumulated, by a backward that adds nothing to it.

        Args:
            run: Runs it.
            loss_divisor: What the training loop divides every loss of this window by.
        """
        self.reducer.accumulating = False
        self.reducer.close(loss_divisor)
        if self._of_term:
            self._fold()
        run()

    def pause(self) -> None:
        """End a micro-batch that is not the last one of its window."""
        self.reducer.accumulating = False
        if self._preserves:
            self._left = [(p.grad, 0 if p.grad is None else version_of(p.grad)) for p in self.parameters]

    def finish(self) -> None:
        """End the window after its last backward: check it, and add what was there before it."""
        self._left, self._of_term = [], {}
        self.reducer.finish()
        before, self._before = self._before, None
        for parameter, gradient in zip(self.parameters, before or (), strict=before is not None):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def reduce_apart(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        """Reduce gradients that are in no bucket as buckets are, after the last backward of a window."""
        self.reducer.reduce_apart(parameters, group)

    def check(self) -> None:
        """Raise what is wrong with the last window, where no further one does."""
        self.reducer.check()

    def _checked(self, micro_batch: MicroBatch) -> MicroBatch:
        """Find fault with a micro-batch that trains other parameters than its window, or weighs other terms."""
        # Asked of every parameter only where it is compared.
        trained = tuple(parameter.requires_grad for parameter in self.parameters) if self._preserves else ()
        first = self.pending == 0
        if first:
            self._trained = trained
        if first or micro_batch.problem is not None:
            return micro_batch
        problem = None
        if trained != self._trained:
            problem = (
                "it trains other parameters than the micro-batches before it, which were not reduced yet:"
                " reduce the window of one optimizer before the backward of another"
            )
        elif (WHOLE_LOSS in self.reducer.window.terms) != (WHOLE_LOSS in micro_batch.weights):
            problem = (
                "its loss terms share a weight, or have one each, unlike those of the micro-batches before it: name the"
                " weights in all micro-batches of a window or in none"
            )
        return replace(micro_batch, problem=problem)

    def _cleared(self) -> bool:
        """Return whether the user zeroed the gradients of a window that was not reduced, which gives it up."""
        gradients = [parameter.grad for parameter in self.parameters]
        touched = [
            now is not left or (now is not None and version_of(now) != version)
            for now, (left, version) in zip(gradients, self._left, strict=True)
        ]
        # Only gradients that someone touched are looked at, which waits for an accelerator.
        return any(touched) and not any(bool(stored(gradient).any()) for gradient in gradients if gradient is not None)

    def _select(self, loss: WeighedLoss, coefficient: Tensor, run: Callable[..., None]) -> None:
        """Run the only backward of a window, and have the reducer discard the buckets where it does not count."""
        self.reducer.discarded = ((coefficient > 0) & (coefficient < math.inf)).logical_not()
        self._run(loss, [coefficient], run)

    def _run(self, loss: WeighedLoss, coefficients: Sequence[Any], run: Callable[..., None], **extra: Any) -> None:
        loss.coefficients[:] = coefficients
        run(**extra)

    def _discard(self, loss: WeighedLoss, run: Callable[..., None], micro_batch: MicroBatch) -> None:
        """Run a backward whose own loss does not count, so that DDP sees it, and keep what others' losses left.

        The loss's own gradient is stopped at its root: through a gather even 0 times NaN would reach the other ranks.
        """
        keeps = self.crosses_ranks and not micro_batch.absent and micro_batch.problem is None
        with nullcontext() if keeps else gradients_discarded(self.parameters):
            self._run(loss, [None] * len(micro_batch.weights), run)

    def _run_each_term(self, loss: WeighedLoss, counted: Mapping[str, Any], run: Callable[..., None]) -> None:
        """Accumulate each term's gradient apart, since its normalizer is known only at the end of the window."""
        terms = list(counted)
        for term in terms:
            self._set_gradients(self._of_term.get(term))
            values = [counted[term] if other == term else None for other in terms]
            discards = counted[term] is None and not self.crosses_ranks
            with gradients_discarded(self.parameters) if discards else nullcontext():
                self._run(loss, values, run, retain_graph=term != terms[-1])
            self._of_term[term] = [parameter.grad for parameter in self.parameters]
        # Something to be zeroed, where the user gives the window up.
        self._set_gradients(self._of_term[terms[0]])

    def _fold(self) -> dict[str, Any]:
        """Let the gradients be those accumulated of all terms, normalized; return each term's factor."""
        factors = self.reducer.term_factors()
        if self._of_term:
            of_terms = [factors[term] for term in self._of_term]
            of_parameters = zip(*self._of_term.values(), strict=True)
            self._set_gradients([_combined(gradients, of_terms) for gradients in of_parameters])
        self._of_term = {}
        return factors

    def _set_gradients(self, gradients: Gradients | None) -> None:
        for parameter, gradient in zip(self.parameters, gradients or [None] * len(self.parameters), strict=True):
            parameter.grad = gradient


def _combined(gradients: Iterable[Tensor | None], factors: Iterable[Any]) -> Tensor | None:
    pairs = zip(gradients, factors, strict=True)
    scaled = [(gradient * factor).to(gradient.dtype) for gradient, factor in pairs if gradient is not None]
    return sum(scaled[1:], scaled[0]) if scaled else None


def _is_unread(number: Any) -> bool:
    return isinstance(number, Tensor) and number.device.type != "cpu"


def _on_host(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers, read in one go."""
    values = [number for number in numbers.values() if _is_unread(number)]
    read = iter(torch.stack(values).tolist() if values else ())
    return {name: next(read) if _is_unread(number) else float(number) for name, number in numbers.items()}


def _counts(coefficient: float) -> bool:
    """Return whether a gradient is to be added; one that is not a number is a fault, which the totals tell."""
    return 0 < coefficient < math.inf
