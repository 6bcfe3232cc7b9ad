"""Variants that a plain PyTorch loop runs: no reduction, no computation, DDP with torch's hooks, our function."""

# DDP compares a hook's annotations with the real objects, so this module must not postpone their evaluation.

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from benchmarks.block import WARMUP, Clock, Setting, Variant, weight_of_rank
from benchmarks.models import LEARNING_RATE
from lightning_gradavg import average_gradients
from lightning_gradavg.rules import RULES

__all__ = ["BASELINE", "COMPUTE", "EXCHANGE", "plain_variants"]

BASELINE = "DDP"
COMPUTE = "compute only"
EXCHANGE = "communication only"

_BUCKET_ELEMENTS = 25 * 2**20 // 4
"""Of DDP's default bucket, in float32."""


def _loop(
    setting: Setting,
    clock: Clock,
    model: nn.Module,
    reduce: Callable[[], None] = lambda: None,
) -> None:
    """Train as a plain PyTorch loop does; gradients are dropped between forward and backward, as in Lightning."""
    optimizer = SGD(model.parameters(), lr=LEARNING_RATE)
    inputs, target = setting.batch
    for _ in range(WARMUP + setting.steps):
        clock.tick()
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        reduce()
        optimizer.step()
    clock.tick()


def _ddp(setting: Setting, **options: Any) -> DistributedDataParallel:
    device_ids = [setting.device] if setting.device.type == "cuda" else None
    return DistributedDataParallel(setting.module, device_ids=device_ids, **options)


def _compute(setting: Setting, clock: Clock) -> None:
    _loop(setting, clock, setting.module)


def _flat_buckets(setting: Setting) -> Sequence[Tensor]:
    # Zeros stay zeros, however often they are summed.
    total = sum(parameter.numel() for parameter in setting.module.parameters())
    return torch.zeros(total, device=setting.device).split(_BUCKET_ELEMENTS)


def _exchange(setting: Setting, clock: Clock) -> None:
    """Sum the gradients' bytes in buckets of DDP's size, without any computation."""
    buckets = _flat_buckets(setting)
    for _ in range(WARMUP + setting.steps):
        clock.tick()
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            assert work is not None
            work.wait()
    clock.tick()


def _each_parameter(setting: Setting, clock: Clock) -> None:
    """The loop of PyTorch's early tutorial: an all-reduce per parameter after the backward, then a division."""

    def reduce() -> None:
        for parameter in setting.module.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()

    _loop(setting, clock, setting.module, reduce)


def _average_gradients(setting: Setting, clock: Clock, *, reduction: str, **options: Any) -> None:
    weight = weight_of_rank() if RULES[reduction].uses_weight else None
    _loop(
        setting,
        clock,
        setting.module,
        lambda: average_gradients(setting.module, reduction=reduction, weight=weight, **options),
    )


def _raw_ddp(hook: Callable[..., Any] | None = None, **options: Any) -> Any:
    def run(setting: Setting, clock: Clock) -> None:
        model = _ddp(setting, **options)
        if hook is not None:
            model.register_comm_hook(None, hook)
        _loop(setting, clock, model)

    return run


def _bfloat16_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Torch's hook under another name: by its own it is refused on builds without CUDA, where it works."""
    return default_hooks.bf16_compress_hook(state, bucket)


def plain_variants() -> Iterator[Variant]:
    """Yield what a plain loop runs, the process group being up."""
    yield Variant(BASELINE, _raw_ddp())
    yield Variant(COMPUTE, _compute)
    yield Variant(EXCHANGE, _exchange)
    yield Variant("DDP, bucket views", _raw_ddp(gradient_as_bucket_view=True))
    yield Variant("DDP, float16 hook", _raw_ddp(default_hooks.fp16_compress_hook))
    yield Variant("DDP, bfloat16 hook", _raw_ddp(_bfloat16_hook))
    yield Variant("all-reduce per parameter", _each_parameter)
    for reduction in ("mean", "weighted_mean"):
        yield Variant(f"average_gradients, {reduction}", partial(_average_gradients, reduction=reduction))
