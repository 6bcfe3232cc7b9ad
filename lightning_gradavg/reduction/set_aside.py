"""Gradients that a backward must not touch: earlier ones, from before the window, and those of pieces of a step.

`.grad` is the only place where autograd accumulates and an optimizer reads, so whatever must be told apart from what a
backward adds is moved out of it before, and added to it after.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["EarlierGradients", "PieceGradients", "take_gradients"]

Gradients = dict[nn.Parameter, Tensor]


def take_gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    """Return the gradients of some parameters, and set them to None there."""
    taken: Gradients = {}
    for parameter in parameters:
        if parameter.grad is not None:
            taken[parameter] = parameter.grad
            parameter.grad = None
    return taken


def _add(gradients: Gradients) -> None:
    """Add gradients to those that the parameters have."""
    # The usual case: a user's loop, or Lightning's, has zeroed them. A profile then shows no scope.
    if not gradients:
        return
    with torch.profiler.record_function("GradAvg: add kept gradients"):
        for parameter, gradient in gradients.items():
            if parameter.grad is None:  # the loss does not reach it in this window
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)


class EarlierGradients:
    """The gradients from before a window, which the factor of the window must not multiply.

    They exist if the user accumulates over several optimizer steps, as with `optimizer_zero_grad` overridden, or over
    several windows in manual optimization. Making this object sets them aside. Then comes one of

    - `add_back` after the window is reduced: the parameters hold the sum of both;
    - `restore` if the window is abandoned: the parameters hold these alone;
    - neither, if the user has zeroed all gradients meanwhile.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the gradients of some parameters aside; the parameters have none afterwards."""
        self._parameters = parameters
        self._gradients: Gradients = {}
        taken = take_gradients(parameters)
        if not taken:
            return
        with torch.profiler.record_function("GradAvg: keep gradients"):
            for parameter, gradient in taken.items():
                # A copy: under `gradient_as_bucket_view` the gradient is a view of DDP's bucket, which the next
                # reduction overwrites (`cases.py`: "added to gradients that are kept", into views).
                self._gradients[parameter] = gradient.clone()

    def add_back(self) -> None:
        """Add them to the gradients of the window."""
        _add(self._gradients)

    def restore(self) -> None:
        """Put them in place of the gradients of the window."""
        # Also where there was none: what the window has accumulated is of this rank alone, not reduced.
        for parameter in self._parameters:
            parameter.grad = self._gradients.get(parameter)


class PieceGradients:
    """The gradients of the pieces of a step whose backwards ran within `training_step`.

    Lightning's `Closure.closure` (`loops/optimization/automatic.py`) runs `training_step`, then `zero_grad`, then the
    backward. So the gradients of all pieces but the last are held here, and the parameters hold
    what they held before the step. Calls come in this order:

    1. `begin_piece` and `end_piece` around the backward of each piece but the last.
    2. `add_back` before the backward of the last piece.

    `discard` instead, if the step never reaches its last piece.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Serve some parameters."""
        self._parameters = parameters
        self._of_pieces: Gradients = {}
        self._from_before_the_step: Gradients = {}

    def begin_piece(self) -> None:
        """Have the parameters hold the gradients of the pieces so far, for the next one to be added."""
        self._from_before_the_step = take_gradients(self._parameters)
        _add(self._of_pieces)

    def end_piece(self) -> None:
        """Take the gradients of the pieces so far, and give the parameters back what they held before the step."""
        self._of_pieces = take_gradients(self._parameters)
        _add(self._from_before_the_step)
        self._from_before_the_step = {}

    def add_back(self) -> None:
        """Add the gradients of the pieces to what Lightning's `zero_grad` has left."""
        # Emptied first: a gradient that is put into a parameter belongs to it from here on.
        of_pieces = self._of_pieces
        self._of_pieces = {}
        _add(of_pieces)

    def discard(self) -> None:
        """Free the gradients of the pieces of a step that was cut off."""
        self._of_pieces = {}
