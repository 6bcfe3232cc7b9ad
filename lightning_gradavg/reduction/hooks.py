"""A user's own DDP communication hook, made to serve any rule: it averages what the reducer scaled before."""

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from lightning_gradavg.reduction.groups import twin_group
from lightning_gradavg.reduction.reducer import AveragingHook
from lightning_gradavg.wire.worker import Worker

__all__ = ["adapt_hook", "power_sgd"]

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"

_REFUSED_MODULES = {
    f"{_HOOKS}.post_localSGD_hook": "it stops reducing gradients and averages weights instead",
    f"{_HOOKS}.hierarchical_model_averager": "it averages weights instead of gradients",
    f"{_HOOKS}.optimizer_overlap_hooks": "it runs the optimizer before the window is complete",
    f"{_HOOKS}.ddp_zero_hook": "it runs the optimizer before the window is complete",
}

_REFUSED_ON_GLOO = {
    "quantization_pertensor_hook": "it reads the result of an all_gather as only NCCL returns it",
    "quantization_perchannel_hook": "it reads the result of an all_gather as only NCCL returns it",
    "batched_powerSGD_hook": "its orthogonalisation needs a square matrix that it does not make on CPU",
}


def adapt_hook(
    hook: Callable[..., Any],
    state: object,
    wrapper: Callable[..., Any] | None,
    group: dist.ProcessGroup | None,
) -> AveragingHook:
    """Return a user's communication hook as a function of the bucket alone.

    Args:
        hook: `(state, bucket) -> Future`, returning the mean over the ranks as DDP asks of a hook.
        state: The hook's state.
        wrapper: A function of the hook that returns a hook, such as `fp16_compress_wrapper`.
        group: The process group that DDP reduces over.

    Raises:
        ValueError: If the hook owns the optimizer or the averaging, or cannot work on the group's backend.
    """
    gloo = dist.get_backend(group) == "gloo"
    name = getattr(hook, "__qualname__", repr(hook))
    reason = _REFUSED_MODULES.get(getattr(hook, "__module__", "")) or _REFUSED_MODULES.get(type(state).__module__)
    if reason:
        raise ValueError(
            f"ddp_comm_hook={name} cannot be combined with a reduction: {reason}."
            " Use lightning.pytorch.strategies.DDPStrategy for it, or a hook that returns the mean of the bucket."
        )
    if gloo and getattr(hook, "__name__", "") in _REFUSED_ON_GLOO:
        raise ValueError(
            f"ddp_comm_hook={name} does not work on gloo: {_REFUSED_ON_GLOO[hook.__name__]}. Use NCCL, or another hook."
        )
    wrapped = wrapper(hook) if wrapper is not None else hook
    if gloo and type(state).__name__ == "PowerSGDState":
        return _in_order(wrapped, state, group)
    return lambda bucket: wrapped(state, bucket)


def power_sgd(
    rank: int, start_step: int, group: dist.ProcessGroup | None, parameters: Iterable[tuple[str, Tensor]]
) -> AveragingHook:
    """Return torch's PowerSGD with error feedback, its state new.

    Args:
        rank: Rank of the matrices that stand for gradients.
        start_step: Reductions until it begins; those before are plain.
        group: The process group that DDP reduces over.
        parameters: The parameters that DDP reduces, by name.

    Raises:
        ValueError: If a parameter has no dimension or no numbers, which torch's hook fails on.
    """
    odd = [f"{name!r} of shape {tuple(p.shape)}" for name, p in parameters if p.ndim == 0 or p.numel() == 0]
    if odd:
        raise ValueError(
            f"power_sgd_rank={rank} cannot be used with parameters that torch's PowerSGD cannot view as matrices:"
            f" {', '.join(odd)}. Give a scalar the shape (1,) and leave out what is empty, or use wire_dtype='int8'."
        )
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=start_step)
    return adapt_hook(_robust_power_sgd(), state, None, group)


def _orthonormalize(matrices: Tensor, epsilon: float = 0.0) -> None:
    """Replace a batch of matrices by orthonormal bases, whatever their ranks.

    Up to rank 2, and in half precision, torch's hook divides columns by their norms: of a gradient of lower rank that
    makes NaN, or a second copy of the first column out of rounding errors, which doubles the gradient.
    """
    del epsilon
    matrices.copy_(torch.linalg.qr(matrices.float())[0])


def _robust_power_sgd() -> Callable[..., Any]:
    """Return torch's PowerSGD hook with another orthogonalization; it begins anew after a step that was lost.

    What PowerSGD adds to the next step after a number that is not finite would be NaN for ever. Sparse and complex
    buckets are averaged: the matrices are neither.
    """
    original = powerSGD_hook.powerSGD_hook
    hook = FunctionType(original.__code__, {**original.__globals__, "_orthogonalize": _orthonormalize})
    lost = False

    def power_sgd_hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
        nonlocal lost
        if bucket.index() == 0 and lost:
            lost = False
            for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                memory.clear()
        # Of complex parameters DDP makes buckets of their real and imaginary parts, and misstates their gradients.
        if bucket.buffer().is_sparse or any(parameter.is_complex() for parameter in bucket.parameters()):
            state.maybe_increase_iter(bucket)
            return default_hooks.allreduce_hook(state.process_group, bucket)

        def check(done: Future[Any]) -> Tensor:
            nonlocal lost
            total: Tensor = done.value()
            # The same on all ranks. On an accelerator torch's hook waits for it in any case.
            lost = lost or not bool(torch.maximum(total.amax(), total.amin().neg()).isfinite())
            return total

        checked: Future[Tensor] = hook(state, bucket).then(check)
        return checked

    return power_sgd_hook


def _in_order(hook: Callable[..., Any], state: Any, group: dist.ProcessGroup | None) -> AveragingHook:
    """Run a hook of several collectives bucket by bucket, in a thread and a process group of its own."""
    ours = group if group is not None else dist.group.WORLD
    assert ours is not None
    timeout = ours._get_backend(torch.device("cpu")).options._timeout
    twin = twin_group(ours, timeout)
    if twin is None:
        # Torch names a group that its members make alone by how many groups each has, which must then be alike.
        ranks = dist.get_process_group_ranks(ours)
        twin = dist.new_group(ranks, timeout, use_local_synchronization=True)
    state.process_group = twin
    worker = Worker("gradavg-hook")

    def run(bucket: GradBucket, result: Future[Any]) -> None:
        try:
            result.set_result(hook(state, bucket).wait())
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the backward that waits for the bucket
            result.set_exception(RuntimeError(f"the result of ddp_comm_hook={hook.__name__}, which failed: {error!r}"))

    def ordered(bucket: GradBucket) -> Future[Tensor]:
        result: Future[Any] = Future()
        worker.submit(run, bucket, result)
        return result

    return ordered
