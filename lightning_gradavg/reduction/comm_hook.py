"""The communication hook of DDP, where there is one: the user's, or what 16-bit parameters and unread weights need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from lightning_gradavg.hooks import float32_sum
from lightning_gradavg.lightning_internals import backend_name, stored
from lightning_gradavg.part import Run
from lightning_gradavg.reduction.weights import MicroBatch
from lightning_gradavg.rules import RULES, Rule

__all__ = ["CommHook"]

_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks"
_SERVED = ("default_hooks", "debugging_hooks")


class CommHook:
    """Registers the hook of a run: that of the user, who may give its state and a wrapper, too."""

    def __init__(self, hook: Callable[..., Any] | None, state: Any, wrapper: Callable[..., Any] | None) -> None:
        self._hook, self._state, self._wrapper = hook, state, wrapper
        self._sums_wide = False
        self._absent: Tensor | None = None

    def register(self, run: Run, rule: Rule) -> Callable[[MicroBatch], None] | None:
        """Register the hook that the run needs, or none: then DDP divides, to the bits of stock.

        Return what has buckets masked by weights that may stay unread on an accelerator; None elsewhere.
        """
        model = run.ddp
        self._refuse(gloo=backend_name(model.process_group, run.device) == "gloo")
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        given = self._hook or self._wrapper
        # Stock DDP sums 16-bit gradients in 16 bits.
        self._sums_wide = not given and rule != RULES["mean"] and not dtypes.isdisjoint((torch.float16, torch.bfloat16))
        hook = self._hook or (float32_sum if self._sums_wide else allreduce_hook)
        if self._wrapper is not None:
            hook = self._wrapper(hook)
        of_ddp = getattr(model, "mixed_precision", None) is not None  # has registered its own
        masks = run.device.type != "cpu" and rule.uses_weight and not of_ddp
        if given or self._sums_wide or masks:
            model.register_comm_hook(self._state, self._wrapped(hook))
        return self._mask if masks else None

    def _refuse(self, *, gloo: bool) -> None:
        """Raise a ValueError about a hook of torch that does not return the mean, or mixes up collectives on gloo."""
        for module in (getattr(self._hook, "__module__", ""), type(self._state).__module__):
            folder, _, file = module.rpartition(".")
            if folder == _OF_TORCH and file not in (_SERVED if gloo else {*_SERVED, "powerSGD_hook"}):
                raise ValueError(
                    f"ddp_comm_hook={getattr(self._hook, '__qualname__', self._hook)} cannot be combined with a"
                    f" reduction: hooks of {file} average weights, run the optimizer, or work on NCCL only. Use"
                    " lightning.pytorch.strategies.DDPStrategy, or a hook that returns the mean of the bucket."
                )

    def _wrapped(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that DDP takes: it refuses partial functions, callable objects, and postponed annotations."""

        def hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
            if self._absent is not None:
                numbers = stored(bucket.buffer())
                # A product of 0 and NaN is NaN. Gradients of other ranks' losses pass.
                numbers.masked_fill_(numbers.isnan() & self._absent, 0)
            return inner(state, bucket)  # type: ignore[no-any-return]  # of the user

        hook.__annotations__ = {"bucket": dist.GradBucket, "return": Future[Tensor]}
        return hook

    def _mask(self, micro_batch: MicroBatch) -> None:
        """Replace NaN by 0 in the buckets of the next backward if its weights, which nobody has read, are 0."""
        unread = [weight for weight in micro_batch.weights.values() if isinstance(weight, Tensor)]
        self._absent = torch.stack([weight == 0 for weight in unread]).all() if unread else None

    def describe(self) -> str:
        """Return what the line at the start of a run says of it."""
        return "; 16-bit gradients summed in float32" if self._sums_wide else ""
