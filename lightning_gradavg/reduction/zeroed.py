"""Which gradients of an open window the user has zeroed: in a loop of your own, this is how you abandon a window."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from torch import nn
from torch.utils.weak import TensorWeakRef

from lightning_gradavg._lightning.internals import stored, version_of

__all__ = ["LeftGradients", "Zeroed"]


class Zeroed(Enum):
    """Which gradients of an open window the user has zeroed since its last backward. `LeftGradients` has the table."""

    NONE = "none"
    SOME = "some, as if each of two optimizers had a window of its own"
    ALL = "all, which abandons the window"


class _Now(Enum):
    """What has become of one gradient since the backward that left it."""

    NO_GRADIENT = "set to None"
    UNTOUCHED = "as it was"
    ZEROS = "written to or replaced, and all zeros"
    CHANGED = "written to or replaced, and not all zeros, as by clipping"


class _LeftGradient(NamedTuple):
    """A parameter's gradient as a backward of a user's loop has left it."""

    parameter: nn.Parameter
    # Weak: held strongly, the gradients that a user frees stayed alive through the next window, one model size of
    # memory (`test_window.py`: nothing keeps gradients that the user frees).
    gradient: TensorWeakRef
    version: int  # counts writes in place

    def now(self) -> _Now:
        """Return what has become of it. The host reads its values, and waits for the device, only if it is touched."""
        gradient = self.parameter.grad
        if gradient is None:
            return _Now.NO_GRADIENT
        if self.gradient() is gradient and version_of(gradient) == self.version:
            return _Now.UNTOUCHED
        if bool(stored(gradient).any()):
            return _Now.CHANGED
        return _Now.ZEROS


class LeftGradients:
    """The gradients of an open window as its last backward has left them, to tell what the user does to them.

    Zeros say less than None: clipping keeps a gradient that was 0, and `zero_grad(set_to_none=False)` writes zeros.

        | set to None, or zeros | and of the others                 | the user                                    |
        |-----------------------|-----------------------------------|---------------------------------------------|
        | none                  | whatever                          | has zeroed NONE                             |
        | all                   | there are none                    | has zeroed ALL                              |
        | some, one by None     | whatever                          | has zeroed SOME                             |
        | some, all by zeros    | some are changed                  | has clipped, and zeroed NONE                |
        | some, all by zeros    | none is touched                   | has zeroed SOME                             |

    Gradients that are all exactly 0, and are then clipped, look like the second row: the window is abandoned with its
    weight. Noting after every backward which gradients are 0 would tell them apart, for a pass over all gradients:
    15 to 60 % of the step of a small multi-layer perceptron on one CPU core.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note the gradients of some parameters."""
        self._gradients: list[_LeftGradient] = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                self._gradients.append(_LeftGradient(parameter, TensorWeakRef(gradient), version_of(gradient)))

    def zeroed(self) -> Zeroed:
        """Return which of them the user has zeroed since."""
        # A parameter without a gradient before says nothing: the loss may not have reached it.
        found = {gradient.now() for gradient in self._gradients}
        is_none = _Now.NO_GRADIENT in found
        are_zeros = _Now.ZEROS in found
        are_changed = _Now.CHANGED in found
        if not is_none and not are_zeros:
            return Zeroed.NONE
        if not are_changed and _Now.UNTOUCHED not in found:
            return Zeroed.ALL
        if not is_none and are_changed:
            return Zeroed.NONE
        return Zeroed.SOME
