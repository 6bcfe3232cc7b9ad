"""The gradients of a window, before and after each backward of Lightning's loop, of Fabric, or of a user's loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradavg.lightning_internals import scale_each, stored, version_of
from lightning_gradavg.place import Place
from lightning_gradavg.reduction.sums import as_real
from lightning_gradavg.reduction.weigh import WeighedLoss, gradients_discarded, nan_stopped
from lightning_gradavg.reduction.window import Window
from lightning_gradavg.rules import share_of

__all__ = ["Accumulation"]

_OTHERS = (
    "it trains other parameters than the micro-batches before it, which were not reduced yet:"
    " reduce the window of one optimizer before the backward of another"
)


class Accumulation:
    """The gradients of a window: only those that it computed.

    Args:
        window: The window.
        parameters: The parameters that it trains.
        owned_by_user: Whether gradients may be there before the window, and may be changed within it, as in manual
            optimization and loops of users.
        apart: Those of the parameters that no rank shares.
        leaves: What autograd accumulates into; by default the parameters.
        guards: Whether gradients that arrive by other backwards are an error.

    Attributes:
        pieces: Backwards of the step under way that are not its last.
    """

    def __init__(
        self,
        window: Window,
        parameters: Sequence[nn.Parameter],
        *,
        owned_by_user: bool,
        apart: Sequence[nn.Parameter] = (),
        leaves: Sequence[nn.Parameter] = (),
        guards: bool = False,
    ) -> None:
        self.window, self.parameters, self._running = window, list(parameters), False
        self._leaves, self._inside = leaves or self.parameters, ExitStack()
        self._stopped: float | None = None  # what stands for the gradient of a term that does not count
        self._owned_by_user = owned_by_user
        self._apart = {id(parameter): parameter for parameter in apart}
        self._before: list[Tensor | None] = []  # gradients that the window found
        self._left: list[tuple[Tensor | None, int]] = []  # gradients that it left to the user, and their versions
        self._trained: list[bool] = []
        self._carried: list[Any] = []
        self._last = False
        self._handles = [one.register_hook(self._guard) for one in self._leaves if guards and one.requires_grad]
        self._of_pieces: list[Tensor | None] = []
        self.pieces = 0

    def begin_step(self) -> None:
        """Begin a step of one or more backwards; one that was not finished gives its window up."""
        if self.pieces > 0:
            self._of_pieces, self.pieces = [], 0
            self.abandon()

    @contextmanager
    def backward(self, loss: WeighedLoss, *, last: bool, final: bool = True, **options: Any) -> Iterator[None]:
        """Surround the backward of a loss, which may end its window, and be the final one of its step.

        One that raises gives its window up, and what it added to the gradients. The options are those of `start`.
        """
        with self._piece(final=final) if self.pieces > 0 or not final else nullcontext():
            self.start(loss, last=last, **options)
            try:
                yield
                self._inside.close()
            except BaseException:
                # A loop may go on with the next batch, as after one that did not fit into memory.
                self.abandon()
                raise

    @contextmanager
    def _piece(self, *, final: bool) -> Iterator[None]:
        """Keep the gradients of a step's backwards until the final one: the loop zeroes gradients in between."""
        before, began = [p.grad for p in self.parameters], self.window.length == self.pieces
        self._set_gradients(self._of_pieces)
        if final:
            self._of_pieces, self.pieces = [], 0
            if began:
                self._before = _cloned(before)
            else:
                self._add(before)
            yield
            return
        self.pieces += 1
        try:
            yield
            self._of_pieces = [p.grad for p in self.parameters]
        finally:
            self._set_gradients(before)

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients or [None] * len(self.parameters), strict=True):
            parameter.grad = gradient

    def _add(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=False):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def start(self, loss: WeighedLoss, *, last: bool, missed: int = 0, masks: Any = None) -> None:
        """Weigh a loss whose backward begins now; what surrounds it ends with it, or when the window is given up.

        Args:
            loss: The loss.
            last: Whether this backward ends the window.
            missed: Ranks that have no such micro-batch.
            masks: What masks gradients on an accelerator by weights that the host has not read; None to read them.

        Raises:
            ValueError: If the loss does not fit into its window, or on all ranks, if some rank's does not.
        """
        try:
            self._start(loss, last=last, missed=missed, masks=masks)
        except BaseException:
            self.abandon()
            raise

    def _start(self, loss: WeighedLoss, *, last: bool, missed: int, masks: Any) -> None:
        window, micro_batch, self._running = self.window, loss.micro_batch, True
        if self._owned_by_user and window.micro_batches and self._cleared():
            self._before = []
            window.reset()
        if not window.micro_batches:
            self._begin(aside=not last or window.afterwards or window.loss_divisor != 1)
        elif self._owned_by_user and self._trained != [parameter.requires_grad for parameter in self.parameters]:
            micro_batch = replace(micro_batch, problem=_OTHERS)
        carried = window.carry(micro_batch, last=last, missed=missed, unread=masks is not None)
        self._last, micro_batch = last, window.micro_batches[-1]
        if loss.coefficients:
            loss.coefficients[:] = [self._stopped if value is None else value for value in carried]
        self._carried += carried
        nothing = micro_batch.absent or micro_batch.problem is not None
        if nothing or all(value is None for value in carried):
            self._inside.enter_context(gradients_discarded(self._leaves, nan_only=not nothing))
        if nothing or None in carried:
            self._inside.enter_context(nan_stopped(loss, [] if nothing else carried))
        if masks is not None:
            self._inside.enter_context(masks(micro_batch))

    def _guard(self, gradient: Tensor) -> None:
        if not self._running:
            raise RuntimeError(
                f"a gradient of shape {tuple(gradient.shape)} reached the model by a backward that bypassed"
                f" reduction={self.window.rule.name!r}, so it would be averaged. Call self.manual_backward,"
                " fabric.backward or GradAvgReducer.weigh(...).backward() with weight= instead of loss.backward()."
            )

    def close(self) -> None:
        """Leave the tensors as they were found."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, *, aside: bool) -> None:
        """Begin a window, with the gradients set aside that it finds.

        A window of one that multiplies nothing afterwards may leave them: DDP averages what is equal on all ranks.
        """
        self._trained = [parameter.requires_grad for parameter in self.parameters] if self._owned_by_user else []
        self._before, self._carried = [], []
        if aside and any(parameter.grad is not None for parameter in self.parameters):
            self._before = _cloned([parameter.grad for parameter in self.parameters])
            self._set_gradients([])

    def _cleared(self) -> bool:
        """Return whether the user zeroed the gradients of a window that was not reduced, which gives it up."""
        gradients = [parameter.grad for parameter in self.parameters]
        touched = any(
            now is not left or (now is not None and version_of(now) != version)
            for now, (left, version) in zip(gradients, self._left, strict=True)
        )
        # Only gradients that someone touched are looked at, which waits for an accelerator.
        return touched and not self._holds_any([gradient for gradient in gradients if gradient is not None])

    def _holds_any(self, gradients: Sequence[Tensor]) -> bool:
        return any(bool(stored(gradient).any()) for gradient in gradients)

    def reduce(self) -> bool:
        """Finish the gradients where the backward that has been ended the window; return whether it did."""
        self._inside.close()
        self._running = False
        if not self._last:
            if self._owned_by_user:
                self._left = [(p.grad, 0 if p.grad is None else version_of(p.grad)) for p in self.parameters]
            return False
        if not self.window.is_alone:
            factor = self.window.after(self.window.totals())
            if isinstance(factor, Tensor) or factor != 1:
                shared = (p for p in self.parameters if p.requires_grad and id(p) not in self._apart)
                self._scale([p.grad for p in shared if p.grad is not None], factor)
        if self._apart:
            self._of_rank_alone([parameter for parameter in self._apart.values() if parameter.requires_grad])
        return True

    def _scale(self, gradients: Sequence[Tensor], factor: Any) -> None:
        scale_each([as_real(stored(gradient)) for gradient in gradients], factor)

    def end(self) -> None:
        """Add what was there before the window to what it reduced, and begin the next."""
        if self._last:
            self._add(self._before)
            self._before = []
            self.window.reset()

    def finish(self) -> None:
        """Finish the gradients of a window that ended, and begin the next."""
        try:
            self.reduce()
        except ValueError:
            self.abandon()
            raise
        self.end()

    def abandon(self) -> None:
        """Give the window up, and restore the gradients that it found."""
        self._inside.close()
        self._running = False
        self._set_gradients(self._before)
        self._before = []
        self.window.reset()

    def _of_rank_alone(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have gradients that no rank shares follow the rule over this rank's own micro-batches."""
        place, window = Place().over_window(self.window.length), self.window
        weights = [float(weight) for each in window.micro_batches for weight in each.weights.values()]
        shares = [share_of(window.rule, place, weight) for weight in weights]
        normalizer = float(sum(share.normalizer for share in shares))
        pairs = zip(shares, self._carried, strict=True)
        # What a weight that was not read carries may be 0.
        ratio = next((float(share.multiplier) / float(carried) for share, carried in pairs if carried), 0.0)
        factor = ratio * window.divisor / normalizer if normalizer > 0 else 0.0
        for parameter in parameters:
            if factor == 0 and parameter.grad is None:  # where nothing counts no gradient has come
                parameter.grad = torch.zeros_like(parameter)
        self._scale([p.grad for p in parameters if p.grad is not None], factor)


def _cloned(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return copies: a gradient may live in a bucket of DDP, which the next reduction overwrites."""
    return [None if gradient is None else gradient.clone() for gradient in gradients]
