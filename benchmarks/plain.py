"""Variants that a plain PyTorch loop runs: DDP, with a hook of torch's, and our function."""

# DDP compares a hook's annotations with the real objects, so this module must not postpone their evaluation.

from collections.abc import Callable, Iterator
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

__all__ = ["BASELINE", "plain_variants"]

BASELINE = "DDP"


def _nothing() -> None:
    """Reduce nothing: DDP has done it in the backward."""


def _loop(setting: Setting, clock: Clock, model: nn.Module, reduce: Callable[[], None] = _nothing) -> None:
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


def _average_gradients(setting: Setting, clock: Clock, *, reduction: str, **options: Any) -> None:
    """Be the `run` of a variant: reduce gradients by our function, without DDP."""
    weight = weight_of_rank() if RULES[reduction].uses_weight else None

    def reduce() -> None:
        average_gradients(setting.module, reduction=reduction, weight=weight, **options)

    _loop(setting, clock, setting.module, reduce)


def _raw_ddp(hook: Callable[..., Any] | None = None, **options: Any) -> Callable[[Setting, Clock], None]:
    """Return the `run` of a variant: DDP with these options, and a communication hook."""

    def run(setting: Setting, clock: Clock) -> None:
        device_ids = [setting.device] if setting.device.type == "cuda" else None
        model = DistributedDataParallel(setting.module, device_ids=device_ids, **options)
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
    yield Variant("DDP, bucket views", _raw_ddp(gradient_as_bucket_view=True))
    yield Variant("DDP, bfloat16 hook", _raw_ddp(_bfloat16_hook))
    for reduction in ("mean", "weighted_mean"):
        yield Variant(f"average_gradients, {reduction}", partial(_average_gradients, reduction=reduction))
