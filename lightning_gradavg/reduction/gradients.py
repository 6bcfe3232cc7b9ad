"""Where the gradients of a model are: the parameters of DDP, or the shards of FSDP (`reduction.sharded`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gradavg._lightning.internals import scale_each, stored
from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.reduction.loss import MicroBatch

__all__ = ["ModelGradients", "ReplicatedGradients", "scale_gradients"]


class ModelGradients(Protocol):
    """What a window asks of the model whose gradients it reduces, in this order.

    `parameters` and `leaves` are two sets under FSDP2 alone: an optimizer reads shards, and autograd accumulates into
    unsharded parameters, which exist during a forward and a backward.
    """

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters whose gradients an optimizer reads, asked once at the beginning of a window."""

    def leaves(self) -> Sequence[nn.Parameter]:
        """Return the parameters into which autograd accumulates."""

    def checked(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch with the problem that the model adds to it, if any. May be a collective operation."""

    def finish(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Multiply the reduced gradients of some parameters by a factor. May be a collective operation."""

    def discard(self) -> None:
        """Free what a window has accumulated elsewhere than in the parameters, when it is abandoned."""


class ReplicatedGradients:
    """The gradients of a model that every rank has in full, and DDP averages.

    DDP does not know parameters that were frozen when it was built (`_build_params_for_reducer`). Stock DDP leaves each
    rank its own gradient of those that are unfrozen later, as by BackboneFinetuning, and the ranks drift apart
    (`test_ranks_steps.py`: unfrozen parameters). Here they are averaged after the backward.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        frozen: Sequence[nn.Parameter] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Serve all parameters of the model, of which some were `frozen` when DDP was built over `group`."""
        self._parameters = parameters
        self._frozen = frozen
        self._group = group

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return all parameters of the model."""
        return self._parameters

    def leaves(self) -> Sequence[nn.Parameter]:
        """Return the same: autograd accumulates into them."""
        return self._parameters

    def checked(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch: a replicated model adds no problem."""
        return micro_batch

    def finish(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Average what DDP does not know, and multiply the gradients by a factor. A collective operation."""
        self.average_unfrozen(parameters)
        # In full windows it is exactly 1 (`test_factor.py`), and costs no pass.
        if factor != 1:
            scale_gradients(parameters, factor)

    def discard(self) -> None:
        """Do nothing: all gradients are those of the parameters."""

    def average_unfrozen(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of those that were frozen when DDP was built, and train now."""
        if not self._frozen:
            return
        # A window of one optimizer asks for its own parameters: those of another one are averaged at its window's end.
        asked = set(parameters)
        unfrozen: list[nn.Parameter] = []
        for parameter in self._frozen:
            if parameter.requires_grad and parameter in asked:
                unfrozen.append(parameter)
        # Collective: all ranks must unfreeze the same parameters at the same step, as replicas do.
        if unfrozen:
            average_gradients(unfrozen, group=self._group)


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> int:
    """Multiply the gradients of the parameters that train by a factor; return how many there are."""
    gradients: list[Tensor] = []
    for parameter in parameters:
        # The others may hold gradients from before the window, or those of another optimizer's window.
        if parameter.requires_grad and parameter.grad is not None:
            gradients.append(parameter.grad)
    if gradients:
        # 0 times NaN is NaN: what no rank has a weight for was discarded by the guard before.
        with torch.profiler.record_function("GradAvg: scale gradients"):
            scale_each(map(stored, gradients), factor)
    return len(gradients)
