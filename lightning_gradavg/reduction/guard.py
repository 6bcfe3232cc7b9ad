"""Guards on the gradients of parameters: what does not count is discarded, and what bypasses the rule is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_gradavg._support.flat import local_part
from lightning_gradavg.reduction.loss import MicroBatch

__all__ = ["BypassGuard", "DiscardedGradients", "without_discarded_nan"]

_discarding: set[DiscardedGradients] = set()
"""The guards of the backward that runs. One runs at a time, on threads of autograd that see no context variables."""


def without_discarded_nan(gradient: Tensor) -> Tensor:
    """Return what a backward may send to other ranks: without NaN if the loss of this rank does not count.

    `gather` and batch norm over all ranks call it in their backward. The gradients of other ranks' losses pass.
    """
    if not _discarding:
        return gradient
    # Infinity stays: it may be another rank's, and the rule passes it on, as DDP does.
    return gradient.masked_fill(gradient.isnan(), 0)


class DiscardedGradients:
    """Discards the gradients of a loss that does not count, from its making until `end`, around the backward.

    Its factor is 0, but 0 times NaN is NaN. So what reaches a parameter is replaced before it is accumulated:

    | the micro-batch                            | becomes 0  | because                                             |
    |--------------------------------------------|------------|-----------------------------------------------------|
    | has weight 0                               | NaN        | gradients of other ranks' losses pass, by `gather`  |
    |                                            |            | and batch norm over all ranks                       |
    | is absent, or has a problem that all raise | everything | nothing of it may count                             |
    """

    def __init__(self, leaves: Iterable[nn.Parameter], micro_batch: MicroBatch) -> None:
        """Guard the parameters into which autograd accumulates."""
        self._handles: list[RemovableHandle] = []
        # `gather` and batch norm ask. Walking the graph for functions that send gradients was tried: it also served
        # torch's own gathers, for a graph walk in every such step. Select what is finite before those.
        _discarding.add(self)
        if micro_batch.absent or micro_batch.problem is not None:
            hook = _zeros
        else:
            hook = _without_nan
        for leaf in leaves:
            if leaf.requires_grad:
                # Before `AccumulateGrad`, so DDP and FSDP reduce what the hook returns.
                self._handles.append(leaf.register_hook(hook))

    def end(self) -> None:
        """Remove the hooks. May be called again, as after an exception."""
        # Not left on the parameters with a switch: a hook costs a call of Python in every backward, and
        # `test_ranks_stock.py` counts those that stay.
        _discarding.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _zeros(gradient: Tensor | None) -> Tensor | None:
    """Return zeros in place of a gradient."""
    if gradient is None:
        return None
    # A copy: autograd may hold the tensor elsewhere. In place, the layout of sparse and sharded gradients stays.
    with torch.profiler.record_function("GradAvg: discard gradient"):
        zeros = gradient.clone()
        local_part(zeros).zero_()
    return zeros


def _without_nan(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient with 0 in place of NaN."""
    if gradient is None:
        return None
    with torch.profiler.record_function("GradAvg: discard gradient"):
        kept = gradient.clone()
        values = local_part(kept)
        if kept.is_sparse:
            # Before it is coalesced, a sparse gradient shows no values.
            kept = kept.coalesce()
            values = kept.values()
        values.masked_fill_(values.isnan(), 0)
    return kept


class BypassGuard:
    """Raises a RuntimeError if a gradient reaches the model by a backward whose loss was not weighed.

    In your own loop such a gradient would be averaged, whatever the rule says. Lightning's Trainer needs no guard in
    automatic optimization, where it runs the only backward.
    """

    def __init__(self, leaves: Iterable[nn.Parameter], rule_name: str, is_weighed: Callable[[], bool]) -> None:
        """Guard some parameters; `is_weighed` returns whether the backward of a weighed loss runs."""
        self._rule_name = rule_name
        self._is_weighed = is_weighed
        # After the gradient is accumulated: `torch.autograd.grad` accumulates none, and calls no such hook.
        self._handles = [leaf.register_post_accumulate_grad_hook(self._check) for leaf in leaves if leaf.requires_grad]

    def _check(self, leaf: Tensor) -> None:
        if not self._is_weighed():
            # A user who catches the error must not step on it.
            leaf.grad = None
            raise RuntimeError(
                f"a gradient of shape {tuple(leaf.shape)} reached the model by a backward that bypassed"
                f" reduction={self._rule_name!r}, so it would be averaged. Call self.manual_backward,"
                " fabric.backward or GradAvgReducer.weigh(...).backward() with weight= instead of loss.backward()."
            )

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
