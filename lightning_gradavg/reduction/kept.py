"""Gradients from before a window, which its factor must not multiply.

`.grad` is the only place where autograd accumulates and an optimizer reads. So a window takes the gradients from before
it out of there when its first backward begins, and adds them back when it is reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Apart", "add_gradients", "take_gradients"]

Gradients = dict[nn.Parameter, Tensor]


def take_gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    """Return the gradients of some parameters, and set them to None there."""
    taken: Gradients = {}
    for parameter in parameters:
        if parameter.grad is not None:
            taken[parameter] = parameter.grad
            parameter.grad = None
    return taken


def add_gradients(gradients: Gradients) -> None:
    """Add gradients to those that the parameters have."""
    # The usual case: a user's loop, or Lightning's, has zeroed them. A profile then shows no scope.
    if not gradients:
        return
    with torch.profiler.record_function("GradAvg: add kept gradients"):
        for parameter, gradient in gradients.items():
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)


class Apart:
    """Holds the gradients of a window and those from before it apart: one of them is in the parameters.

    The calls of a window: `enter` when a backward begins; `leave` after one that runs within `training_step`, as
    Lightning zeroes gradients after that; `add_earlier` or `restore_earlier` at the end.
    """

    def __init__(self) -> None:
        self._is_entered = False
        self._parameters: Sequence[nn.Parameter] = ()
        self._earlier: Gradients = {}  # from before the window, while the parameters hold those of the window
        self._of_window: Gradients = {}  # while the parameters hold those from before it

    def enter(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have the parameters hold the gradients of the window."""
        if self._is_entered:
            return
        self._is_entered = True
        self._parameters = parameters
        earlier = take_gradients(parameters)
        if earlier:
            # A copy: under `gradient_as_bucket_view` a gradient is a view of DDP's bucket, which the next reduction
            # overwrites (`cases.py`: "added to gradients that are kept", into views).
            with torch.profiler.record_function("GradAvg: keep gradients"):
                self._earlier = {parameter: gradient.clone() for parameter, gradient in earlier.items()}
        add_gradients(self._of_window)
        self._of_window = {}

    def leave(self) -> None:
        """Have the parameters hold the gradients from before the window."""
        self._of_window = take_gradients(self._parameters)
        self._is_entered = False
        add_gradients(self._earlier)
        self._earlier = {}

    def add_earlier(self) -> None:
        """End the window: the parameters hold the sum of both."""
        add_gradients(self._earlier)
        self._clear()

    def restore_earlier(self) -> None:
        """Give the window up: the parameters hold the gradients from before it."""
        if self._is_entered:
            # Also where there was none: what the window has accumulated is of this rank alone, not reduced.
            for parameter in self._parameters:
                parameter.grad = self._earlier.get(parameter)
        self._clear()

    def drop(self) -> None:
        """Give the window up where the user has zeroed gradients, and with them those from before it."""
        self._clear()

    def _clear(self) -> None:
        self._is_entered = False
        self._earlier = {}
        self._of_window = {}
