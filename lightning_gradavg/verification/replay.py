"""A step computed again on one process, in parts and whole, with and without random layers and batch statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.seed import _set_rng_states
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_gradavg.verification.recorder import random_states, reached
from lightning_gradavg.verification.records import Replay, Tensors, copied
from lightning_gradavg.verification.samples import digest

__all__ = ["VARIANTS", "drawing_modules", "loss_of", "modules_of_variant", "replay"]

VARIANTS = ("plain", "still", "frozen")
"""As it is; without random layers; without random layers and with the running statistics of batch norm."""


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in what `training_step` returned, its named terms added up."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Mapping):
        terms: list[Tensor] = [loss[name] for name in sorted(loss)]
        total: Tensor = sum(terms[1:], terms[0])
        return total
    return loss if isinstance(loss, Tensor) else None


@contextmanager
def undisturbed(module: LightningModule) -> Iterator[None]:
    """Put back buffers, modes and random generators after the block."""
    random = random_states()
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        _set_rng_states(random)
        for buffer, before in buffers:
            buffer.data.copy_(before)
        for part, mode in modes:
            part.training = mode


@contextmanager
def modules_of_variant(module: nn.Module, variant: str, *, everything: bool = False) -> Iterator[None]:
    """Switch off random layers, and for "frozen" batch statistics, too.

    Args:
        module: The module.
        variant: One of `VARIANTS`.
        everything: Whether all layers but batch norm are put into evaluation mode, which also ends the dropout that a
            module applies as a function.
    """
    rates: list[tuple[Any, float]] = []
    modes = [(part, part.training) for part in module.modules()]
    try:
        if variant != "plain":
            part: Any
            for part in module.modules():
                if isinstance(part, _BatchNorm):
                    part.training = part.training and variant != "frozen"
                elif isinstance(part, _DropoutNd) or everything:
                    part.training = False
                elif isinstance(getattr(part, "dropout", None), float):  # of recurrent layers and attention
                    rates.append((part, part.dropout))
                    part.dropout = 0.0
        yield
    finally:
        for part, rate in rates:
            part.dropout = rate
        for part, mode in modes:
            part.training = mode


@contextmanager
def drawing_modules(module: nn.Module, found: list[str]) -> Iterator[None]:
    """Collect the names of the layers that draw random numbers in their forward."""
    before: dict[str, bytes] = {}
    handles = []
    for name, part in module.named_modules():
        if next(part.children(), None) is not None and not isinstance(part, nn.MultiheadAttention):
            continue

        def enter(layer: nn.Module, args: Any, *, name: str = name) -> None:
            del layer, args
            before[name] = digest(random_states())

        def leave(layer: nn.Module, args: Any, output: Any, *, name: str = name) -> None:
            del layer, args, output
            if digest(random_states()) != before[name] and name not in found:
                found.append(name)

        handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _differentiated(module: LightningModule, output: Any) -> tuple[float, Tensors]:
    loss = loss_of(output)
    if loss is None:
        raise ValueError("training_step returned no loss")
    names = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(names.values()), allow_unused=True)
    return float(loss.detach()), copied(dict(reached(names, found)))


def replay(
    module: LightningModule,
    step: Callable[[Any], Any],
    variant: str,
    parts: Sequence[tuple[Any, dict[str, Any] | None]],
    whole: Callable[[], Any] | None,
) -> tuple[Replay, bool]:
    """Return the losses and gradients of one variant, and whether it drew random numbers.

    Args:
        module: The module, which is left as it was.
        step: Runs `training_step` on a micro-batch.
        variant: One of `VARIANTS`.
        parts: The micro-batches, each with the random state that it is computed from.
        whole: Runs the step on the global batch; None where there is none.
    """
    for everything in (False, True):
        with undisturbed(module), modules_of_variant(module, variant, everything=everything):
            start = digest(random_states())
            found = []
            draws = False
            for batch, random in parts:
                if random is not None:
                    _set_rng_states(random)
                    start = digest(random)
                with torch.enable_grad():
                    found.append(_differentiated(module, step(batch)))
                draws |= digest(random_states()) != start
            joined = None if whole is None else _differentiated(module, whole())
        if variant == "plain" or not draws:
            break
    return Replay(found, joined), draws
