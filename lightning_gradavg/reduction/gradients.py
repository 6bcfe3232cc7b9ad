"""Where the gradients of a window are, and how they are summed over ranks.

| model                             | class                               | sums                                       |
|-----------------------------------|-------------------------------------|--------------------------------------------|
| wrapped by DDP                    | `ReplicatedGradients`               | DDP, whose hook multiplies every bucket    |
| sharded by FSDP2                  | `reduction.sharded`                 | FSDP2; shards are multiplied afterwards    |
| of a reproducible run             | `reproducible.engine`               | a tree over all replicas                   |
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg._lightning.internals import require_reduced, scale_each
from lightning_gradavg._support.flat import local_part
from lightning_gradavg.reduction.average import sum_gradients_over_ranks

__all__ = [
    "DDP_REDUCES",
    "Backward",
    "Gradients",
    "KeepsApart",
    "ReplicatedGradients",
    "add_gradients",
    "ignored_parameters",
    "scale_gradients",
    "take_gradients",
]


DDP_REDUCES = (
    "it reduces in the first backward after a forward outside of no_sync(). Have the window's last forward outside of"
    " it, too; and run one backward for each forward: pass several losses as one, their sum."
)
"""When DDP reduces, and what to do, for messages about a backward in which it does not."""


class Backward(NamedTuple):
    """What is known of a backward before it runs. A step that runs in *pieces* has a backward for each of them."""

    # False of all pieces but the last: their backward runs within `training_step`.
    is_last_of_step: bool = True
    # Whether the window ends with the step. Then `ReplicaGradients` sums the replicas, each after its last backward.
    is_in_last_step: bool = True


class Gradients(Protocol):
    """What a window asks of the model whose gradients it reduces, in this order.

    `parameters` and `leaves` are two sets under FSDP2 alone: an optimizer reads shards, and autograd accumulates into
    unsharded parameters, which exist during a forward and a backward.
    """

    copies: int
    """Number of ranks that compute one loss together, and follow each other."""

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters whose gradients an optimizer reads, asked once at the beginning of a window."""

    def leaves(self) -> Sequence[nn.Parameter]:
        """Return the parameters into which autograd accumulates."""

    def begin_backward(self, parameters: Sequence[nn.Parameter], backward: Backward) -> None:
        """Have the parameters hold the gradients of the window alone."""

    def end_backward(self, backward: Backward) -> None:
        """End a backward that did not raise. Unless it is the step's last, keep its gradients out of the parameters.

        Lightning zeroes gradients between `training_step` and the last backward.
        """

    def reduce(self, parameters: Sequence[nn.Parameter], factor: float, *, in_hook: bool) -> None:
        """Have the parameters hold the sum over ranks, times the factor. A collective operation.

        Args:
            parameters: Those of the window.
            factor: What the sum of all ranks' gradients is multiplied by.
            in_hook: Whether DDP's hook has reduced all its buckets in the window.
        """

    def reduce_unfrozen(self, factor: float) -> None:
        """Sum the gradients of parameters that the model's engine does not reduce, times a factor. Collective.

        The plain mean calls it after each window, in the place of `reduce`: the engine has averaged all others. Raise
        a ValueError if there are such parameters, and they cannot be summed.
        """

    def add_earlier(self) -> None:
        """Add the gradients from before the window."""

    def abandon(self, *, are_zeroed: bool = False) -> None:
        """Discard the gradients of the window, and restore those from before it.

        Args:
            are_zeroed: Whether the user has zeroed both, so that there is nothing to restore.
        """


class KeepsApart:
    """Keeps the gradients of a window and those from before it apart, which the factor of the window must not multiply.

    `.grad` is the only place where autograd accumulates and an optimizer reads. So the gradients from before the window
    leave it when its first backward begins, and are added when it is reduced. Lightning zeroes `.grad` between
    `training_step` and the backward. So after the backward of a piece, which runs within `training_step`, `.grad` holds
    the gradients from before the window again, until the next backward begins.
    """

    def __init__(self) -> None:
        """Begin with no window."""
        self._holding: Sequence[nn.Parameter] | None = None  # the parameters, while they hold the window's gradients
        self._earlier: dict[nn.Parameter, Tensor] = {}  # from before the window, while the parameters hold its own
        self._of_window: dict[nn.Parameter, Tensor] = {}  # while the parameters hold those from before it

    def begin_backward(self, parameters: Sequence[nn.Parameter], backward: Backward) -> None:  # noqa: ARG002  # all
        """Have the parameters hold the gradients of the window."""
        if self._holding is not None:
            return
        self._holding = parameters
        earlier = take_gradients(parameters)
        if earlier:
            # A copy: under `gradient_as_bucket_view` a gradient is a view of DDP's bucket, which the next reduction
            # overwrites (`cases.py`: "added to gradients that are kept", into views).
            with torch.profiler.record_function("GradAvg: keep gradients"):
                self._earlier = {parameter: gradient.clone() for parameter, gradient in earlier.items()}
        add_gradients(self._of_window)
        self._of_window = {}

    def end_backward(self, backward: Backward) -> None:
        """End a backward; between pieces, have the parameters hold the gradients from before the window."""
        if backward.is_last_of_step:
            return
        assert self._holding is not None
        self._of_window = take_gradients(self._holding)
        self._holding = None
        add_gradients(self._earlier)
        self._earlier = {}

    def add_earlier(self) -> None:
        """End the window: the parameters hold the sum of both."""
        add_gradients(self._earlier)
        self._forget()

    def abandon(self, *, are_zeroed: bool = False) -> None:
        """Discard the gradients of the window, and restore those from before it, unless the user has zeroed both."""
        if self._holding is not None and not are_zeroed:
            # Also where there was none: what the window has accumulated is of this rank alone, not reduced.
            for parameter in self._holding:
                parameter.grad = self._earlier.get(parameter)
        self._forget()

    def _forget(self) -> None:
        self._holding = None
        self._earlier = {}
        self._of_window = {}


class ReplicatedGradients(KeepsApart):
    """The gradients of a model that every rank has in full. DDP sums them, and its hook multiplies every bucket.

    DDP does not know parameters that were frozen when it was built (`_build_params_for_reducer`). Stock DDP leaves each
    rank its own gradient of those that are unfrozen later, as by BackboneFinetuning, and the ranks drift apart
    (`cases.py`: "in which a parameter begins to train"). Here they are summed after the backward.
    """

    copies = 1

    def __init__(self, model: DistributedDataParallel, group: dist.ProcessGroup | None) -> None:
        """Serve a wrapped model; a `group` of None is this rank alone."""
        super().__init__()
        self._model = weakref.ref(model)  # weak: DDP holds its hook, and the hook leads here
        self._parameters = list(model.module.parameters())
        self._group = group
        ignored = set(ignored_parameters(model))
        self._in_buckets: list[nn.Parameter] = []
        self._frozen: list[nn.Parameter] = []  # when the model was wrapped
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad and name not in ignored:
                self._in_buckets.append(parameter)
            elif name not in ignored:
                self._frozen.append(parameter)

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return all parameters of the model."""
        return self._parameters

    def leaves(self) -> Sequence[nn.Parameter]:
        """Return the same: autograd accumulates into them."""
        return self._parameters

    def reduce(self, parameters: Sequence[nn.Parameter], factor: float, *, in_hook: bool) -> None:  # noqa: ARG002  # all
        """Sum what DDP does not know; raise a RuntimeError if DDP has not reduced the rest. A collective operation."""
        if not in_hook:
            model = self._model()
            if model is not None:
                require_reduced(model)
            # Gradients would stay those of each rank, without a word, as with stock DDP.
            if any(parameter.grad is not None for parameter in self._in_buckets if parameter.requires_grad):
                raise RuntimeError(f"DDP reduced nothing in this backward: {DDP_REDUCES}")
        self.reduce_unfrozen(factor)

    def reduce_unfrozen(self, factor: float) -> None:
        """Sum the gradients of those that were frozen when the model was wrapped, and train now. Collective."""
        # All ranks must unfreeze the same parameters at the same step, as replicas do. One that has a gradient and is
        # frozen again counts: under the plain mean, what trains may change within a window.
        late = [parameter for parameter in self._frozen if parameter.requires_grad or parameter.grad is not None]
        if late:
            sum_gradients_over_ranks(late, factor, self._group)

    @property
    def unfrozen(self) -> list[nn.Parameter]:
        """The parameters that train now, and were frozen when the model was wrapped."""
        return [parameter for parameter in self._frozen if parameter.requires_grad]


def take_gradients(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return the gradients of some parameters, and set them to None there."""
    taken: dict[nn.Parameter, Tensor] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            taken[parameter] = parameter.grad
            parameter.grad = None
    return taken


def add_gradients(gradients: dict[nn.Parameter, Tensor]) -> None:
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


def ignored_parameters(model: DistributedDataParallel) -> list[str]:
    """Return the names of the parameters that DDP leaves to each rank."""
    # `_build_params_for_reducer` of DDP joins the names of module and parameter by a dot, also at the top, where the
    # module's name is empty (`test_ranks_steps.py`: OwnPart).
    ignored: list[str] = []
    for name, _ in model.module.named_parameters():
        if name in model.parameters_to_ignore or f".{name}" in model.parameters_to_ignore:
            ignored.append(name)
    return ignored


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> int:
    """Multiply the gradients of the parameters that train by a factor; return how many there are."""
    gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is not None:
            gradients.append(parameter.grad)
    if gradients:
        with torch.profiler.record_function("GradAvg: scale gradients"):
            scale_each([local_part(gradient) for gradient in gradients], factor)
    return len(gradients)
