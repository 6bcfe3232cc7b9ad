"""A collective of the user's own in a training step that some ranks run without samples: an error on all ranks.

A rank without samples runs `training_step` on samples that another rank has, or that are trained on already. They must
not count, and in what the package exchanges they don't: gradients, logged values, the rows of `gather`, batch norm over
all ranks. What a collective of the user's own is for, nobody knows: a code book, a centre or a count that it sums over
the ranks would hold samples twice, in silence.

A dispatch mode sees the collectives of torch, also functional ones and those of a group of some ranks. It runs around
`training_step` in steps that some rank has no samples of, and in no other. It runs on all ranks: those with samples
would wait in the collective for the rank that raises.

The order of the calls:

    refused_in_training_step    the strategy enters it around a step
        training_step           the user's; each collective is an error, except
            ours                within this context, which the package enters around its own exchanges, and
            answer_for          after this call, which the strategy makes when the user asks which ranks have samples
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn

from lightning_gradavg._lightning.internals import TorchDispatchMode
from lightning_gradavg._lightning.methods import replaced
from lightning_gradavg._support.text import listed_ranks

__all__ = ["answer_for", "is_answered_for", "ours", "refusal", "refused_in_training_step"]

_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
"""The namespaces of torch's operators for collectives. The last two are those of functional collectives, which DTensor
uses (`torch.distributed._functional_collectives`)."""
_WITHOUT_DATA = frozenset(
    {
        "c10d::barrier",
        "c10d::monitored_barrier_",
        # The end of a functional collective, whose begin was looked at.
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
    }
)
"""Operators to which a rank brings no samples."""


class _Refusal(TorchDispatchMode):
    """Raises a RuntimeError at a collective, unless it is ours or the user answers for it.

    Attributes:
        depth_of_ours: How many contexts of `ours` the process is in; collectives pass within them.
        is_answered_for: Whether the user has asked which ranks have samples; collectives pass from then on.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._ranks = ranks
        self.depth_of_ours = 0
        self.is_answered_for = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES and not self._passes(func, args):
            raise RuntimeError(refusal(func.name(), self._ranks))
        if kwargs is None:
            kwargs = {}
        return func(*args, **kwargs)

    def _passes(self, func: Any, args: Any) -> bool:
        if self.depth_of_ours > 0 or self.is_answered_for:
            return True
        return not self._takes_samples(func, args)

    def _takes_samples(self, func: Any, args: Any) -> bool:
        """Return whether a rank without samples brings something to a collective."""
        if func.name() in _WITHOUT_DATA:
            return False
        if func.name() == "c10d::broadcast_":
            # Only the source brings something. It is a rank of the group, and ours are those of the run.
            _, group, source, *_ = args
            return dist.get_global_rank(dist.ProcessGroup.unbox(group), source) in self._ranks
        return True


class _Process:
    """The refusal that stands in this process, if any.

    Not of a thread, as a context variable would be: a backward within `training_step` runs on threads of autograd.
    """

    refusal: _Refusal | None = None


def refusal(operator: str, ranks: Sequence[int]) -> str:
    """Return why a collective is refused, and what to do instead."""
    verb = "has" if len(ranks) == 1 else "have"
    return (
        f"training_step runs the collective {operator}, but {listed_ranks(ranks)} {verb} no samples in this step, and"
        " would bring some that must not count. Use lightning_gradavg.gather, to which such a rank brings no rows; give"
        " every rank samples of each batch, as with drop_last=True; or ask self.trainer.strategy.has_samples on every"
        " rank before the collective, and bring nothing that counts where it is False."
    )


@contextmanager
def refused_in_training_step(module: LightningModule, ranks: Sequence[int], *, watched: bool) -> Iterator[None]:
    """Within the context, have `training_step` raise at a collective of its own. All ranks enter it.

    Args:
        module: The module that trains.
        ranks: The ranks that have no samples in the step.
        watched: Whether to look for collectives on this rank.
    """
    strategy = module.trainer.strategy
    exchanging: list[tuple[object, str]] = [
        (LightningModule, "log"),
        # In manual optimization, training_step calls these two.
        (strategy, "backward"),
        (strategy, "optimizer_step"),
        (nn.SyncBatchNorm, "forward"),
    ]
    training_step = _refusing(module.training_step, _Refusal(ranks), watched)
    with ExitStack() as context:
        for owner, name in exchanging:
            # A context manager made by `contextmanager` also decorates: each call is in a context of its own.
            method = ours()(getattr(owner, name))
            context.enter_context(replaced(owner, name, method))
        context.enter_context(replaced(module, "training_step", training_step))
        yield


def _refusing(training_step: Callable[..., Any], refusal: _Refusal, watched: bool) -> Callable[..., Any]:
    @wraps(training_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        _Process.refusal = refusal
        try:
            if not watched:
                return training_step(*args, **kwargs)
            with refusal:
                return training_step(*args, **kwargs)
        finally:
            _Process.refusal = None

    return step


@contextmanager
def ours() -> Iterator[None]:
    """Let collectives pass that are not the user's own: they leave out what does not count."""
    refusal = _Process.refusal
    if refusal is None:
        yield
        return
    refusal.depth_of_ours += 1
    try:
        yield
    finally:
        refusal.depth_of_ours -= 1


def answer_for() -> None:
    """Have collectives pass in the rest of the `training_step` that runs: its code knows which ranks have samples."""
    if _Process.refusal is not None:
        _Process.refusal.is_answered_for = True


def is_answered_for() -> bool:
    """Return whether the `training_step` that runs answers for its collectives."""
    return _Process.refusal is not None and _Process.refusal.is_answered_for
