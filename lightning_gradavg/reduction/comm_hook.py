"""The communication hook of DDP, where there is one: the user's, or what 16-bit parameters need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from lightning_gradavg._lightning.internals import backend_name
from lightning_gradavg._lightning.part import Run
from lightning_gradavg.hooks import float32_sum
from lightning_gradavg.rules import RULES, Rule

__all__ = ["CommHook"]

_FOLDER_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks"
_SERVED = ("default_hooks", "debugging_hooks", "powerSGD_hook")
_SERVED_ON = {"gloo": _SERVED[:2]}  # PowerSGD begins collectives when others are done, at another moment on each rank


class CommHook:
    """Registers the hook of a run: that of the user, who may give its state and a wrapper, too."""

    def __init__(self, hook: Callable[..., Any] | None, state: Any, wrapper: Callable[..., Any] | None) -> None:
        """Take what the user gave."""
        self._hook = hook
        self._state = state
        self._wrapper = wrapper
        self._sums_wide = False

    def register(self, run: Run, rule: Rule) -> None:
        """Register the hook that the run needs, or none: then DDP divides, to the bits of stock."""
        model = run.ddp
        self._refuse(_SERVED_ON.get(backend_name(model.process_group, run.device), _SERVED))
        hook = self._hook
        is_given = hook is not None or self._wrapper is not None
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        # Stock DDP sums 16-bit gradients in 16 bits.
        self._sums_wide = not is_given and rule != RULES["mean"] and bool(dtypes & {torch.float16, torch.bfloat16})
        if self._sums_wide:
            hook = float32_sum
        if hook is None:
            hook = allreduce_hook
        if self._wrapper is not None:
            hook = self._wrapper(hook)
        if is_given or self._sums_wide:
            model.register_comm_hook(self._state, _annotated(hook))

    def _refuse(self, served: Sequence[str]) -> None:
        """Raise a ValueError about a hook of torch that does not return the mean, or that the backend mixes up."""
        for module in (getattr(self._hook, "__module__", ""), type(self._state).__module__):
            folder, _, file = module.rpartition(".")
            if folder == _FOLDER_OF_TORCH and file not in served:
                raise ValueError(
                    f"ddp_comm_hook={getattr(self._hook, '__qualname__', self._hook)} cannot be combined with a"
                    f" reduction: hooks of {file} average weights, run the optimizer, or work on NCCL only. Use"
                    " lightning.pytorch.strategies.DDPStrategy, or a hook that returns the mean of the bucket."
                )

    def describe(self) -> str:
        """Return what the line at the start of a run says of it."""
        return "; 16-bit gradients summed in float32" if self._sums_wide else ""


def _annotated(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that DDP takes: it refuses partial functions, callable objects, and postponed annotations."""

    def hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        return inner(state, bucket)  # type: ignore[no-any-return]  # of the user

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": Future[Tensor]}
    return hook
