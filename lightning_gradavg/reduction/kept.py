"""Gradients that a backward must not touch: those from before the window, and those of earlier pieces of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["KeptGradients", "PieceGradients", "take_gradients"]

Gradients = dict[nn.Parameter, Tensor]


def take_gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    """Return the gradients of some parameters, which have none afterwards."""
    taken: Gradients = {}
    for parameter in parameters:
        if parameter.grad is not None:
            taken[parameter] = parameter.grad
            parameter.grad = None
    return taken


def _add(gradients: Gradients) -> None:
    """Add gradients to those that the parameters have."""
    if not gradients:
        return
    with torch.profiler.record_function("GradAvg: add kept gradients"):
        for parameter, gradient in gradients.items():
            if parameter.grad is None:  # the loss does not reach it in this window
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)


class KeptGradients:
    """The gradients from before a window, which the factor of the window must not multiply.

    They exist if the user accumulates over several optimizer steps, as with `optimizer_zero_grad` overridden, or over
    several windows in manual optimization. They are set aside when this object is made; after the reduction of the
    window comes `add_back`, or `restore` if it is abandoned.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep the gradients of some parameters, and remove them from there."""
        self._parameters = parameters
        self._kept = take_gradients(parameters)
        if self._kept:
            with torch.profiler.record_function("GradAvg: keep gradients"):
                # Copies: a gradient may be a view of a bucket of DDP, which the next reduction overwrites.
                self._kept = {parameter: gradient.clone() for parameter, gradient in self._kept.items()}

    def add_back(self) -> None:
        """Add them to the gradients of the window."""
        _add(self._kept)

    def restore(self) -> None:
        """Put them in place of the gradients of the window."""
        # Also where there was none: what the window has accumulated is of this rank alone.
        for parameter in self._parameters:
            parameter.grad = self._kept.get(parameter)


class PieceGradients:
    """The gradients of the pieces of a step whose backwards ran within `training_step`.

    Lightning zeroes gradients after `training_step` and before the backward of the last piece. So those of earlier
    pieces are kept here, and the parameters hold what they held before the step. Calls come in this order: for each
    piece but the last `begin_piece` and `end_piece`, then `add_back` before the backward of the last piece.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Serve some parameters."""
        self._parameters = parameters
        self._of_pieces: Gradients = {}
        self._outside: Gradients = {}

    def begin_piece(self) -> None:
        """Have the parameters hold the gradients of the earlier pieces."""
        self._outside = take_gradients(self._parameters)
        _add(self._of_pieces)

    def end_piece(self) -> None:
        """Keep the gradients of the pieces so far, and put back what was there before the step."""
        self._of_pieces = take_gradients(self._parameters)
        _add(self._outside)
        self._outside = {}

    def add_back(self) -> None:
        """Add the gradients of the pieces to what Lightning has left."""
        of_pieces = self._of_pieces
        self._of_pieces = {}
        _add(of_pieces)

    def forget(self) -> None:
        """Drop the gradients of the pieces of a step that was given up."""
        self._of_pieces = {}
