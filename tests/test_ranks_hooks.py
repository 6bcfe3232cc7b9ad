"""A user's own communication hook. Under every rule, in windows: a row of `cases.py`."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from toys import WEIGHTED, approx, same_everywhere, train

from lightning_gradavg import GradAvgStrategy

CALLS: list[int] = []


def counting_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A user's hook: the mean over ranks."""
    CALLS.append(bucket.index())
    return default_hooks.allreduce_hook(state, bucket)  # type: ignore[arg-type]  # None is the default group


HOOKS: dict[str, Any] = {
    "counting": (counting_hook, None, 1e-6),
    "partial": (partial(counting_hook), None, 1e-6),
    "fp16": (default_hooks.fp16_compress_hook, None, 1e-2),
    "bf16": (default_hooks.bf16_compress_hook, None, 1e-2),
    "fp16 wrapper": (counting_hook, default_hooks.fp16_compress_wrapper, 1e-2),
    "wrapper alone": (None, default_hooks.fp16_compress_wrapper, 1e-2),
}


def train_with_hook(name: str) -> Any:
    """Body."""
    hook, wrapper, _ = HOOKS[name]
    CALLS.clear()
    options = {**WEIGHTED, "ddp_comm_hook": hook, "ddp_comm_wrapper": wrapper}
    seen = train([[[1, 2, 3]], [[4]]], {"kind": "s", "dtype": torch.float32}, options)
    seen.calls = len(CALLS)
    return seen


@pytest.mark.parametrize("name", HOOKS)
def test_hook_composes_with_weights(world, name):
    """On CPU a compression hook and weights give 7.5 within 1e-2, and the hook is called."""
    seen = world(2).run(train_with_hook, name)
    assert approx(7.5, HOOKS[name][2]) == same_everywhere(seen).gradients[0].item()
    assert all(one.calls == (name in ("counting", "partial", "fp16 wrapper")) for one in seen)


REFUSED: dict[str, Any] = {
    "post_localSGD_hook": lambda: {
        "ddp_comm_hook": post_localSGD_hook,
        "ddp_comm_state": PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=2),
    },
    "powerSGD_hook": lambda: {
        "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
        "ddp_comm_state": powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2),
    },
    "quantization_pertensor_hook": lambda: {"ddp_comm_hook": quantization_hooks.quantization_pertensor_hook},
}


def train_refused(name: str, reduction: str) -> None:
    train([[[1.0]]] * 2, None, {"reduction": reduction, **REFUSED[name]()})


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
@pytest.mark.parametrize("name", REFUSED)
def test_hooks_that_cannot_serve_are_refused(world, name, reduction):
    """A hook that owns the averaging, or cannot run on the backend, is refused by name on all ranks."""
    raised = world(2).run_expecting_errors(train_refused, name, reduction)
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all(f"ddp_comm_hook={name}" in one.message for one in raised)


def pickled(**options: Any) -> Any:
    return pickle.loads(pickle.dumps(GradAvgStrategy(**options)))


def test_pickling_changes_nothing(world):
    """A strategy that was pickled, as for spawned processes, reduces as the original does."""
    rows, options = [[[1.0], [2.0]], [[3.0], [6.0]]], {"ddp_comm_hook": default_hooks.allreduce_hook}
    for of in (pickled, GradAvgStrategy):
        seen = same_everywhere(world(2).run(train, rows, None, options, of=of))
        assert [2.0, 4.0] == [gradient.item() for gradient in seen.gradients]
