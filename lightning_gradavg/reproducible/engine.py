"""The gradients of a run whose bits do not depend on the number of ranks.

Every backward stays on its rank. A replica's gradient is what its own micro-batches of the window add up to, one after
another. After the last backward of a window all replicas are added up by the tree, and multiplied once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_gradavg._lightning.part import Run
from lightning_gradavg._support.running import running_forward
from lightning_gradavg.reduction.gradients import Backward
from lightning_gradavg.reproducible.sum import Gradients, TreeSum

__all__ = ["ReplicaGradients"]


class ReplicaGradients:
    """The gradients of the replicas of each loader batch, summed in one order on any number of ranks.

    The pieces of a rank's step are its replicas, in their order. A replica is *complete* when no further micro-batch of
    the window can add to it. Then its gradient goes to the tree, and its memory is free.

    The calls are those of a `Window`. In a window of N micro-batches on a rank with 2 replicas:

        begin_backward, end_backward    of the first replica; complete in the window's last micro-batch
        begin_backward, end_backward    of the second replica
        ...
        reduce                          adds up all replicas of all ranks
        add_earlier
    """

    copies = 1

    def __init__(self, run: Run, replicas: int) -> None:
        """Number this rank's replicas.

        Args:
            run: The run that trains.
            replicas: Number of replicas on all ranks, which the number of ranks divides.
        """
        self._world = run.world
        self._replicas = replicas
        count = replicas // run.world.size
        self._replicas_of_rank = range(run.world.rank * count, (run.world.rank + 1) * count)
        self._parameters = list(run.ddp.module.parameters())
        self._parameters_of_tree: list[nn.Parameter] = []
        self._tree: TreeSum | None = None
        self._clear()

    def _clear(self) -> None:
        self._is_new = True  # whether the next backward is the first of a window
        self._position = 0  # of the next replica in the running step
        self._of_replicas: dict[int, Gradients] = {}  # of those that are not complete
        self._holds_window = False  # whether the parameters hold gradients of the window
        self._earlier: Gradients = {}  # from before the window, while they are not in the parameters

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return all parameters of the model."""
        return self._parameters

    def leaves(self) -> Sequence[nn.Parameter]:
        """Return the same: autograd accumulates into them."""
        return self._parameters

    def begin_backward(self, parameters: Sequence[nn.Parameter], backward: Backward) -> None:  # noqa: ARG002  # all
        """Have the parameters hold the gradients of the rank's next replica."""
        self._earlier = self._take_gradients()
        self._holds_window = True
        if self._is_new:
            # They may be those of the last window, in memory that this window writes to.
            self._earlier = {key: gradient.clone() for key, gradient in self._earlier.items()}
            self._is_new = False
        if not running_forward().stands_in:
            # Autograd adds to what earlier micro-batches of the window left for this replica.
            self._set_gradients(self._of_replicas.get(self._replica, {}))

    @property
    def _replica(self) -> int:
        """The number of the replica whose backward runs."""
        return self._replicas_of_rank[self._position]

    def end_backward(self, backward: Backward) -> None:
        """Keep the gradients of the replica apart, and give back those from before the window."""
        computed = self._take_gradients()
        self._set_gradients(self._earlier)
        self._holds_window = False
        self._earlier = {}
        replica = self._replica
        # Not those of a stand-in, which are 0: they are no replica's, and another number of ranks has none.
        if not running_forward().stands_in:
            self._of_replicas[replica] = computed
        if backward.is_in_last_step:
            self._add_to_tree(replica, is_last=backward.is_last_of_step)
        self._position += 1
        if backward.is_last_of_step:
            self._position = 0

    def _add_to_tree(self, replica: int, *, is_last: bool) -> None:
        """Add a complete replica to the tree; after the last backward, those behind it, too.

        The loader batch at the end of the window may have no samples of those.
        """
        if replica == self._replicas_of_rank.start:
            self._make_tree()
        assert self._tree is not None
        stop = replica + 1
        if is_last:
            stop = self._replicas_of_rank.stop
        for complete_replica in range(replica, stop):
            with torch.profiler.record_function("GradAvg: add replica"):
                self._tree.add(complete_replica, self._of_replicas.pop(complete_replica, {}))

    def _make_tree(self) -> None:
        """Make a tree for the parameters that train now, unless there is one."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if self._tree is None or not _are_the_same(trained, self._parameters_of_tree):
            self._parameters_of_tree = trained
            self._tree = TreeSum(trained, replicas=self._replicas, world=self._world)

    def reduce(self, parameters: Sequence[nn.Parameter], factor: float, *, in_hook: bool) -> None:  # noqa: ARG002  # DDP
        """Have the parameters hold the sum over all replicas, times the factor. A collective operation."""
        assert self._tree is not None
        with torch.profiler.record_function("GradAvg: sum of replicas"):
            sums = self._tree.gradients(factor)
        self._earlier = self._take_gradients()
        self._holds_window = True
        self._set_gradients(sums)

    def reduce_unfrozen(self, factor: float) -> None:
        """Do nothing: the tree knows all parameters, and such a run is never one of the plain mean."""

    def add_earlier(self) -> None:
        """Add the gradients from before the window."""
        for parameter in self._parameters:
            earlier = self._earlier.get(id(parameter))
            if earlier is None:
                continue
            if parameter.grad is None:
                parameter.grad = earlier
            else:
                parameter.grad.add_(earlier)
        self._clear()

    def abandon(self, *, are_zeroed: bool = False) -> None:
        """Discard the window, and restore the gradients from before it, unless the user has zeroed both."""
        if self._holds_window and not are_zeroed:
            # Also where there was none: what a backward has accumulated is of this rank alone.
            self._take_gradients()
            self._set_gradients(self._earlier)
        self._tree = None  # it may hold replicas of this window
        self._clear()

    def _take_gradients(self) -> Gradients:
        """Return the parameters' gradients by `id`; the parameters have none afterwards."""
        # By `id`: the hash of a parameter is a method in Python, called for each of them in each step.
        taken: Gradients = {}
        for parameter in self._parameters:
            if parameter.grad is not None:
                taken[id(parameter)] = parameter.grad
                parameter.grad = None
        return taken

    def _set_gradients(self, gradients: Mapping[int, Tensor]) -> None:
        """Give the parameters, which have none, these gradients."""
        if not gradients:
            return
        for parameter in self._parameters:
            gradient = gradients.get(id(parameter))
            if gradient is not None:
                parameter.grad = gradient


def _are_the_same(parameters: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    """Return whether two sequences hold the same objects; `==` of parameters compares their values."""
    if len(parameters) != len(others):
        return False
    return all(parameter is other for parameter, other in zip(parameters, others, strict=True))
