"""A user's own communication hook under every rule."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from toys import approx, same_everywhere, train

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.rules import RULES

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


def train_with_hook(name: str, reduction: str, per_rank: Any, window: int = 1) -> Any:
    hook, wrapper, _ = HOOKS[name]
    CALLS.clear()
    seen = train(
        per_rank,
        {"kind": "s", "dtype": torch.float32},
        {"reduction": reduction, "ddp_comm_hook": hook, "ddp_comm_wrapper": wrapper},
        accumulate_grad_batches=window,
    )
    seen.calls = len(CALLS)
    return seen


@pytest.mark.parametrize("name", HOOKS)
def test_hook_composes_with_weights(world, name):
    """On CPU a compression hook and weights give 7.5 within 1e-2, and the hook is called."""
    seen = world(2).run(train_with_hook, name, "weighted_mean", [[[1, 2, 3]], [[4]]])
    assert approx(7.5, HOOKS[name][2]) == same_everywhere(seen).gradients[0].item()
    assert all(one.calls == (name in ("counting", "partial", "fp16 wrapper")) for one in seen)


def train_with_and_without(window: int) -> Any:
    """Body: under every rule what a hook that averages gives, what no hook gives, and how often it is called."""
    batches = [[[1, 2]] * 3, [[3, 5]] * 3]
    toy: Any = {"kind": "s", "dtype": torch.float32}
    found = []
    for rule in RULES:
        hooked = train_with_hook("counting", rule, batches, window)
        found.append((hooked, train(batches, toy, {"reduction": rule}, accumulate_grad_batches=window)))
    return found


@pytest.mark.parametrize("window", [1, 2])
def test_hook_composes_with_every_rule(world, window):
    """With a hook that averages, every rule gives what it gives without one; called once per window."""
    for of_ranks in zip(*world(2).run(train_with_and_without, window), strict=True):
        seen, without = (same_everywhere(seen) for seen in zip(*of_ranks, strict=True))
        assert seen.calls == len(seen.gradients) == -(-3 // window)
        for mine, expected in zip(seen.gradients, without.gradients, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)


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
