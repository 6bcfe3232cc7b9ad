"""The communication hook of DDP, where there is one: the user's, or what 16-bit parameters and unread weights need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
_SERVED = ("default_hooks", "debugging_hooks", "powerSGD_hook")
_SERVED_ON = {"gloo": _SERVED[:2]}  # PowerSGD begins collectives when others are done, at another moment on each rank
_WIDE = "; 16-bit gradients summed in float32"


class CommHook:
    """Registers the hook of a run: that of the user, who may give its state and a wrapper, too."""

    def __init__(self, hook: Callable[..., Any] | None, state: Any, wrapper: Callable[..., Any] | None) -> None:
        self._hook, self._state, self._wrapper = hook, state, wrapper
        self._said = ""
        self._absent: Tensor | None = None

    def register(self, run: Run, rule: Rule) -> Callable[[MicroBatch], None] | None:
        """Register the hook that the run needs, or none: then DDP divides, to the bits of stock.

        Return what has buckets masked by weights that may stay unread on an accelerator; None elsewhere.
        """
        model = run.ddp
        self._refuse(_SERVED_ON.get(backend_name(model.process_group, run.device), _SERVED))
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        given, hook, self._said = self._hook or self._wrapper, self._hook or allreduce_hook, ""
        if not given and rule != RULES["mean"] and dtypes & {torch.float16, torch.bfloat16}:
            hook, self._said = float32_sum, _WIDE  # stock DDP sums 16-bit gradients in 16 bits
        if self._wrapper is not None:
            hook = self._wrapper(hook)
        of_ddp = getattr(model, "mixed_precision", None) is not None  # has registered its own
        masks = run.device.type != "cpu" and rule.uses_weight and not of_ddp
        if given or self._said or masks:
            model.register_comm_hook(self._state, self._wrapped(hook))
        return self._mask if masks else None

    def _refuse(self, served: Sequence[str]) -> None:
        """Raise a ValueError about a hook of torch that does not return the mean, or that the backend mixes up."""
        for module in (getattr(self._hook, "__module__", ""), type(self._state).__module__):
            folder, _, file = module.rpartition(".")
            if folder == _OF_TORCH and file not in served:
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
        return self._said
