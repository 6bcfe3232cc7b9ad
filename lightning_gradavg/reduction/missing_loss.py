"""A step whose `training_step` returns no loss on this rank, which other ranks may wait for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gradavg._lightning.internals import store_of_world
from lightning_gradavg._lightning.part import Run
from lightning_gradavg.reduction.gradients import add_gradients, take_gradients

__all__ = ["RUN_NUMBERS", "StepWithoutLoss"]

RUN_NUMBERS = count()
"""Numbers the runs of this process, so that no step reads in the store what an earlier run has left there."""


class StepWithoutLoss:
    """One training step of a rank without a loss: it runs the backward of a loss of 0, as other ranks may wait for it.

    Afterwards it must know whether any rank has a loss, as ranks must not step apart:

        | without a loss are | a rank whose samples count | a rank that stands in  | a rank with a loss               |
        |--------------------|----------------------------|------------------------|----------------------------------|
        | all ranks          | skips the step             | skips the step         |                                  |
        | some               | raises a RuntimeError      | takes the step         | takes the step, and then learns  |
        |                    |                            |                        | of the error                     |

    How it knows: each rank without a loss adds 1 to a number in the store of the process group before its backward, and
    reads the number after the reduction. A reduction that has ended has waited for all ranks' backwards, so all have
    added theirs. Ranks with a loss do nothing: an exchange in every step would cost everybody's steps for one that
    Lightning hardly allows. The reduced gradient does not tell: it is 0 also if other ranks have a loss whose gradient
    is 0 (`test_ranks_faults.py`: None from training_step, where the other rank's gradient is 0).

    The calls: `begin_backward`, `is_skipped` after the reduction, and `end` when the next step begins.
    """

    def __init__(self, run: Run, key: str, parameters: Sequence[nn.Parameter], *, counts: bool) -> None:
        """Announce that this rank has no loss.

        Args:
            run: The run.
            key: What names the step in the store, the same on all ranks, and of no other step of this process.
            parameters: All parameters of the model.
            counts: Whether the rank has samples in the step. If not, it stands in.
        """
        self._run = run
        self._key = key
        self._parameters = parameters
        self._counts = counts
        self._earlier: dict[nn.Parameter, Tensor] = {}  # gradients from before the step
        self._store = dist.PrefixStore("lightning_gradavg/without_loss", store_of_world())
        # `Store.add` returns when the store has it, so this is before any collective that this rank begins later.
        self._store.add(key, 1)

    def begin_backward(self) -> None:
        """Take away the gradients from before the step, which an optimizer must not see if it is skipped."""
        for parameter, gradient in take_gradients(self._parameters).items():
            # A copy: it may be a view of DDP's bucket, which the reduction overwrites.
            self._earlier[parameter] = gradient.clone()

    def is_skipped(self) -> bool:
        """Return whether all ranks skip the step, or raise a RuntimeError on this one.

        Not collective: it comes after the reduction, in which all ranks have taken part.
        """
        self._wait_for_reduction()
        # Adding 0 reads the number; `Store.get` would return bytes.
        ranks_without_loss = self._store.add(self._key, 0)
        if ranks_without_loss == self._run.world.size:
            return True
        if not self._counts:
            self.end()
            return False
        raise RuntimeError(
            f"training_step returned no loss on rank {self._run.world.rank}, and one on others. Return one"
            ' on all ranks, such as {"loss": loss, "weight": 0} under a rule with weights.'
        )

    def _wait_for_reduction(self) -> None:
        """Have the host wait until the gradients are reduced."""
        # On a CPU, DDP's `Reducer::finalize_backward` has waited. On an accelerator it only orders streams.
        device = self._run.device
        if device.type != "cpu":
            with torch.profiler.record_function("GradAvg: wait for gradients"):
                getattr(torch, device.type).synchronize(device)

    def end(self) -> None:
        """Add the gradients from before the step, where it is taken, or when the next one begins."""
        add_gradients(self._earlier)
        self._earlier = {}
