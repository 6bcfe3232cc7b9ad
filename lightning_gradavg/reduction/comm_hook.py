"""The communication hook of DDP, where there is one: the user's, or what 16-bit parameters need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from lightning_gradavg._lightning.internals import backend_name
from lightning_gradavg._lightning.part import Run
from lightning_gradavg.hooks import float32_sum
from lightning_gradavg.rules import RULES, Rule

__all__ = ["CommHook"]

# Hooks of torch that return the mean of a bucket. Others average weights (`post_localSGD_hook`), run the optimizer
# (`optimizer_overlap_hooks`) or quantize by collectives of NCCL alone (`quantization_hooks`).
_FOLDER_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks"
_SERVED = ("default_hooks", "debugging_hooks", "powerSGD_hook")
_SERVED_ON = {"gloo": _SERVED[:2]}  # PowerSGD begins collectives when others are done, at another moment on each rank


Hook = Callable[[Any, dist.GradBucket], Future[Tensor]]
"""A communication hook: of its state, which is whatever the user makes it, and of a bucket of gradients."""


class CommHook:
    """Registers the hook of a run: that of the user, who may give its state and a wrapper, too.

    | the user gives | the rule and the parameters                         | DDP's hook                            |
    |----------------|-----------------------------------------------------|---------------------------------------|
    | a hook         | any                                                 | it, in the wrapper if one is given    |
    | a wrapper only | any                                                 | the wrapper of `allreduce_hook`       |
    | neither        | any but the plain mean, and parameters in 16 bits   | `float32_sum`                         |
    | neither        | any other                                           | none: DDP divides, to stock's bits    |
    """

    def __init__(self, hook: Hook | None, state: object, wrapper: Callable[[Hook], Hook] | None) -> None:
        """Take what the user gave."""
        self._hook = hook
        self._state = state
        self._wrapper = wrapper
        self._sums_wide = False

    def register(self, run: Run, rule: Rule) -> None:
        """Register the hook that the run needs, or none."""
        model = run.ddp
        self._refuse(_SERVED_ON.get(backend_name(model.process_group, run.device), _SERVED))
        is_given = self._hook is not None or self._wrapper is not None
        self._sums_wide = False
        # Stock DDP sums 16-bit gradients in 16 bits, and so does the plain mean, which has stock's bits.
        if not is_given and rule != RULES["mean"]:
            self._sums_wide = _has_16_bits(model)
        if not is_given and not self._sums_wide:
            return
        hook: Hook = allreduce_hook
        if self._hook is not None:
            hook = self._hook
        if self._sums_wide:
            hook = float32_sum
        if self._wrapper is not None:
            hook = self._wrapper(hook)
        model.register_comm_hook(self._state, _annotated(hook))

    def _refuse(self, served: Sequence[str]) -> None:
        """Raise a ValueError about a hook of torch that does not return the mean, or that the backend mixes up."""
        # Of the state, too: a function of the user's may call torch's hook, which needs a state of its own class.
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
        if self._sums_wide:
            return "; 16-bit gradients summed in float32"
        return ""


def _has_16_bits(model: nn.Module) -> bool:
    """Return whether a parameter that trains has gradients of 16 bits."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            return True
    return False


def _annotated(inner: Hook) -> Hook:
    """Return a hook that DDP takes.

    `DistributedDataParallel._check_comm_hook` reads the name and the annotations of a hook. So it refuses partial
    functions, callable objects, and annotations that are strings, as under `from __future__ import annotations`.
    """

    def hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        return inner(state, bucket)

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": Future[Tensor]}
    return hook
