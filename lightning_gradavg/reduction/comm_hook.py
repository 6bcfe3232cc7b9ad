"""The communication hook of DDP, where there is one: the user's, or what 16-bit parameters and unread weights need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

_LOCAL_SGD = "it stops reducing gradients and averages weights instead"
_OPTIMIZER = "it runs the optimizer before the window is complete"
_REFUSED_MODULES = {
    "post_localSGD_hook": _LOCAL_SGD,
    "hierarchical_model_averager": _LOCAL_SGD,
    "optimizer_overlap_hooks": _OPTIMIZER,
    "ddp_zero_hook": _OPTIMIZER,
}
_QUANTIZES = "it reads the result of an all_gather as only NCCL returns it"
_REFUSED_ON_GLOO = {
    "quantization_pertensor_hook": _QUANTIZES,
    "quantization_perchannel_hook": _QUANTIZES,
    "batched_powerSGD_hook": "its orthogonalization needs a square matrix that it does not make on CPU",
}


class CommHook:
    """Registers the hook of a run: that of the user, who may give its state and a wrapper, too.

    Attributes:
        masks: Whether weights may stay unread on an accelerator, because buckets are masked there.
    """

    def __init__(self, hook: Callable[..., Any] | None, state: Any, wrapper: Callable[..., Any] | None) -> None:
        self._hook, self._state, self._wrapper = hook, state, wrapper
        self._sums_wide = self._in_turn = self.masks = False
        self._absent: Tensor | None = None

    def register(self, run: Run, rule: Rule) -> None:
        """Register the hook that the run needs, or none: then DDP divides, to the bits of stock.

        Raises:
            ValueError: If the user's hook owns the optimizer or averages weights, or cannot work on the backend.
        """
        model, hook = run.ddp, self._hook
        gloo = backend_name(model.process_group, run.device) == "gloo"
        if hook is not None:
            self._refuse(hook, gloo=gloo)
        # It starts collectives when others complete, at another moment on each rank: gloo would mix those up.
        self._in_turn = gloo and type(self._state).__name__ == "PowerSGDState"
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        # Stock DDP sums 16-bit gradients in 16 bits.
        half = bool(dtypes & {torch.float16, torch.bfloat16}) and rule != RULES["mean"]
        self._sums_wide = half and hook is None and self._wrapper is None
        if self._sums_wide:
            hook = float32_sum
        if self._wrapper is not None:
            hook = self._wrapper(hook or allreduce_hook)
        of_ddp = getattr(model, "mixed_precision", None) is not None  # has registered its own
        self.masks = run.device.type != "cpu" and rule.uses_weight and not of_ddp
        if hook is not None or self.masks:
            model.register_comm_hook(self._state, self._wrapped(hook or allreduce_hook))

    def _refuse(self, hook: Callable[..., Any], *, gloo: bool) -> None:
        name = getattr(hook, "__qualname__", repr(hook))
        for module in (getattr(hook, "__module__", ""), type(self._state).__module__):
            folder, _, file = module.rpartition(".")
            if folder == "torch.distributed.algorithms.ddp_comm_hooks" and file in _REFUSED_MODULES:
                raise ValueError(
                    f"ddp_comm_hook={name} cannot be combined with a reduction: {_REFUSED_MODULES[file]}. Use"
                    " lightning.pytorch.strategies.DDPStrategy for it, or a hook that returns the mean of the bucket."
                )
        if gloo and name in _REFUSED_ON_GLOO:
            raise ValueError(
                f"ddp_comm_hook={name} does not work on gloo: {_REFUSED_ON_GLOO[name]}. Use NCCL, or another hook."
            )

    def _wrapped(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that DDP takes: it refuses partial functions, callable objects, and postponed annotations."""

        def hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
            if self._absent is not None:
                numbers = stored(bucket.buffer())
                # A product of 0 and NaN is NaN. Gradients of other ranks' losses pass.
                numbers.masked_fill_(numbers.isnan() & self._absent, 0)
            future: Future[Tensor] = inner(state, bucket)
            if self._in_turn:
                future.wait()
            return future

        hook.__annotations__ = {"bucket": dist.GradBucket, "return": Future[Tensor]}
        return hook

    @contextmanager
    def masking(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Replace NaN by 0 in the buckets of this backward if its weights, which nobody has read, are 0."""
        unread = [weight for weight in micro_batch.weights.values() if isinstance(weight, Tensor)]
        self._absent = torch.stack([weight == 0 for weight in unread]).all() if unread else None
        try:
            yield
        finally:
            self._absent = None

    def describe(self) -> str:
        """Return what the line at the start of a run says of it."""
        return "; 16-bit gradients summed in float32" if self._sums_wide else ""
