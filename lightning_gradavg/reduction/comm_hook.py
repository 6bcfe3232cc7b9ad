"""The communication hook of DDP: ranks add up each bucket, and multiply the sum by the factor of the window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg._lightning.internals import after_backward
from lightning_gradavg._support.collectives import backend_of
from lightning_gradavg.hooks import scale_bucket, scaled_sum
from lightning_gradavg.reduction.gradients import ignored_parameters
from lightning_gradavg.reduction.window import Window
from lightning_gradavg.rules import Rule

__all__ = ["CommHook", "Hook", "require_hookable"]

# Hooks of torch that return the mean of a bucket. Others average weights (`post_localSGD_hook`), run the optimizer
# (`optimizer_overlap_hooks`) or quantize by collectives of NCCL alone (`quantization_hooks`).
_FOLDER_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks"
_SERVED = ("default_hooks", "debugging_hooks", "powerSGD_hook")
# On other backends all are served. PowerSGD begins collectives when others are done, at another moment on each rank,
# and gloo mixes them up.
_SERVED_ON = {"gloo": _SERVED[:2]}

_UNWEIGHED = (
    "a backward reduced gradients of the model whose loss was not weighed, so the rule would not be theirs. Call"
    " self.manual_backward, fabric.backward or GradAvgReducer.weigh(...).backward() with weight= instead of"
    " loss.backward()."
)

_NO_BUCKET = (
    "DistributedDataParallel was made under torch._dynamo.config.optimize_ddp='python_reducer', which gives a"
    " communication hook no bucket. Use another value, such as True."
)

Hook = Callable[[Any, dist.GradBucket], Future[Tensor]]
"""A communication hook: of its state, which is whatever the user makes it, and of a bucket of gradients."""


class CommHook:
    """The hook of one model, which DDP calls for each bucket in a backward that reduces.

    | the user gives | there is a window                                 | there is none: the plain mean              |
    |----------------|---------------------------------------------------|--------------------------------------------|
    | a hook         | it gets buckets whose mean is the gradient        | it gets DDP's buckets                      |
    | a wrapper only | the wrapped `allreduce_hook` gets these buckets   | the wrapped `allreduce_hook` gets DDP's    |
    | neither        | ranks add up, and the sum is multiplied; buckets  | no hook is registered: DDP divides, to     |
    |                | of 16 bits add up in float32                      | stock's bits                               |

    Attributes:
        window: The window of the model, set by whoever makes it; None under the plain mean, and after the run.
    """

    def __init__(
        self,
        hook: Hook | None = None,
        state: object = None,
        wrapper: Callable[[Hook], Hook] | None = None,
    ) -> None:
        """Take what the user gave.

        Args:
            hook: A hook that returns the mean of a bucket over the ranks.
            state: What the hook gets as its first argument.
            wrapper: Makes a hook of `hook`, or of `allreduce_hook` without one.
        """
        self.window: Window | None = None
        self._hook = hook
        self._state = state
        self._wrapper = wrapper

    def register(self, model: DistributedDataParallel) -> bool:
        """Register the hook with a model; return False if none is needed, as under the plain mean of stock DDP."""
        hook = self._hook
        if self._wrapper is not None:
            hook = self._wrapper(hook or allreduce_hook)
        if hook is None and self.window is None:
            return False
        group = model.process_group
        ranks = dist.get_world_size(group)
        state = self._state

        # DDP's `_check_comm_hook` reads the name and the annotations of a hook. So it refuses partial functions,
        # callable objects, and annotations that are strings, as in this module.
        def reduce_bucket(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
            if not isinstance(bucket, dist.GradBucket):
                # DDP calls it from Python then, with a gradient and its parameter, and drops what it returns.
                raise TypeError(_NO_BUCKET)
            factor = self._factor_of(bucket)
            if hook is None:
                assert factor is not None
                return scaled_sum(group, bucket, factor)
            if factor is not None:
                scale_bucket(bucket.buffer(), factor() * ranks)
            return hook(state, bucket)

        reduce_bucket.__annotations__ = {"bucket": dist.GradBucket, "return": Future[Tensor]}
        if hook is not None:  # DDP logs the name, and verify reports it
            reduce_bucket.__module__ = hook.__module__
            reduce_bucket.__qualname__ = getattr(hook, "__qualname__", type(hook).__qualname__)
        model.register_comm_hook(None, reduce_bucket)
        return True

    def _factor_of(self, bucket: dist.GradBucket) -> Callable[[], float] | None:
        """Return what tells the factor of a bucket; None under the plain mean, whose buckets stay as they are.

        If the loss behind the bucket was not weighed, the factor is 0, and the backward raises at its end.
        """
        if self.window is None:
            return None
        if not self.window.reduces_bucket(is_last_bucket=bucket.is_last()):
            # An exception here would end the process. It must come out of the backward, behind the end of DDP's
            # reduction: else DDP's next forward fails an assertion of its own.
            after_backward(_raise_unweighed, _do_nothing)
            return _zero
        return self.window.factor

    def require_served(self, model: DistributedDataParallel, device: torch.device) -> None:
        """Raise a ValueError about a hook of torch that returns no mean, or whose collectives the backend mixes up."""
        served = _SERVED_ON.get(backend_of(model.process_group, device), _SERVED)
        # Of the state, too: a function of the user's may call torch's hook, which needs a state of its own class.
        for module in (getattr(self._hook, "__module__", ""), type(self._state).__module__):
            folder, _, file = module.rpartition(".")
            if folder == _FOLDER_OF_TORCH and file not in served:
                raise ValueError(
                    f"ddp_comm_hook={getattr(self._hook, '__qualname__', self._hook)} cannot be combined with a"
                    f" reduction: hooks of {file} average weights, run the optimizer, or work on NCCL only. Use"
                    " lightning.pytorch.strategies.DDPStrategy, or a hook that returns the mean of the bucket."
                )

    def describe(self, parameters: Sequence[Tensor]) -> str:
        """Return what the line at the start of a run says of the hook."""
        if self.window is None or self._hook is not None or self._wrapper is not None:
            return ""
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                return "16-bit gradients are summed in float32."
        return ""


def require_hookable(model: DistributedDataParallel, rule: Rule) -> None:
    """Raise a ValueError about what DDP does past its communication hook."""
    where = f"reduction={rule.name!r} with"
    if model.static_graph:
        raise ValueError(
            f"{where} static_graph=True, which treats DDP's first backward as every step's. Leave it out, or use"
            " reduction='mean' on ranks that have equally many batches."
        )
    ignored = ignored_parameters(model)
    if ignored:
        raise ValueError(
            f"reduction={rule.name!r}: DDP was told to ignore the parameter {ignored[0]!r}, so only its loss would be"
            " weighed. Use reduction='mean' without split_batches, or Lightning's DDPStrategy."
        )
    if model.mixed_precision is not None:
        raise ValueError(
            f"{where} mixed_precision= of DistributedDataParallel, which has a hook of its own. Use the precision of"
            " the Trainer or of Fabric, or torch.autocast."
        )


def _zero() -> float:
    return 0.0


def _raise_unweighed() -> None:
    raise RuntimeError(_UNWEIGHED)


def _do_nothing() -> None:
    """Be called where the backward has raised an error of its own."""
