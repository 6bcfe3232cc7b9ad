"""One process that trains freely on the samples that the ranks took, and where its record differs from that of a run.

A global batch is what the user's own `collate_fn` makes of the samples of all ranks. Nothing but the samples comes from
the run: up to the first difference both have the same state, so what differs first is the culprit. What one process
makes of some of the samples is found by training anew up to a step that has only those.
"""

from __future__ import annotations

import gc
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, repeat, zip_longest
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from typing_extensions import override

from lightning_gradavg._lightning.loaders import LoaderWrapper
from lightning_gradavg.verify.record import Recorder, Refused, Taken, Tape, Tensors, loss_of
from lightning_gradavg.verify.report import Difference

__all__ = ["Build", "Group", "Seen", "Twin", "difference", "differences", "flat", "gap_between", "multiple_of"]

Build: TypeAlias = Callable[[], tuple[LightningModule, dict[str, Any], dict[str, Any]]]
"""Returns module, data and options of the Trainer, as of a new run."""

Group: TypeAlias = Sequence[tuple[int, int, Taken]]
"""Micro-batches that one process takes as one batch: the position in the window, the rank, and what it took."""

_ALONE = {"devices": 1, "sync_batchnorm": False, "limit_train_batches": None, "overfit_batches": 0.0}
"""Options of devices and lengths, which one process sets differently."""


class _OneProcess(SingleDeviceStrategy):
    """One device, with what a module may ask of a strategy of several."""

    recorder: Recorder
    rule: str  # of the run
    lr_scale = 1.0

    @property
    def global_batch_size(self) -> int:
        return len(self.recorder.keys)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return one loss, as Lightning takes it, normalized as the run's rule does."""
        output, end = super().training_step(*args, **kwargs), getattr(self.recorder.module, "training_step_end", None)
        output = output if end is None else end(output)
        loss, weight = loss_of(output)
        if loss is None:
            return output
        if self.rule == "normalized_sum":
            loss = loss / (weight if weight is not None else len(self.recorder.mode.keys))
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("weight", None)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor.unsqueeze(0)  # with its gradient, as one device has it


@contextmanager
def _world_of_one() -> Iterator[None]:
    """Give the user's code a process group to ask."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def all_gather(tensor_list: list[Tensor], tensor: Tensor, *_: Any, **__: Any) -> None:
        tensor_list[0].copy_(tensor)  # with its gradient: what other ranks' rows lack is then seen

    def all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        output_tensor.copy_(input_tensor.reshape(output_tensor.shape))

    into_tensor = {"all_gather_into_tensor", "all_gather_single"} & vars(dist).keys()  # the name from torch 2.13 on
    replaced: Any = {"all_gather": all_gather, **dict.fromkeys(into_tensor, all_gather_into_tensor)}
    try:
        with mock.patch.multiple(dist, **replaced):
            yield
    finally:
        dist.destroy_process_group()


class _TakenAgain(LoaderWrapper):
    """Stands for the user's loader, whose attributes it has, and reads what the ranks took."""

    def __init__(self, loader: Any, batches: Callable[[Any], Iterator[Any]], length: float) -> None:
        super().__init__(loader, read=loader, shown=loader, shared=False)
        self._batches, self._length = batches, length

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.loader)

    def __len__(self) -> int:
        if not math.isfinite(self._length):
            raise TypeError("the loader has no length")
        return math.ceil(self._length)


@dataclass
class Twin:
    """Trains on one process on what the ranks took."""

    tapes: Sequence[Tape]
    build: Build
    double: bool
    device: str = "cpu"

    def taken(self, position: int) -> Group:
        """Return what all ranks took in a step."""
        of_ranks = [(rank, tape.steps[position].taken) for rank, tape in enumerate(self.tapes)]
        every = [(index, rank, one) for rank, taken in of_ranks for index, one in enumerate(taken) if one.counts]
        return sorted(every, key=lambda one: one[:2])

    def step_with(self, group: Group, position: int) -> tuple[Tensors, float]:
        """Return gradient and loss of a step of these micro-batches alone, after the steps before it."""
        steps = [*([self.taken(index)] for index in range(position)), [group]]
        gc.collect()  # the module of the run before, which its Trainer and it hold in a circle
        tape = self.run(steps)
        if tape.problem:
            raise Refused(tape.problem)
        step = tape.steps[position]
        gradient = next(tensors for stage, tensors in step.moments if stage == "reduced gradient")
        return gradient, step.taken[-1].loss

    def windowed(self) -> Tape:
        """Train on windows, as the ranks do, of which each micro-batch holds those of all ranks."""
        of_steps = [self.taken(position) for position in range(len(self.tapes[0].steps))]
        return self.run([[list(each) for _, each in groupby(taken, lambda one: one[0])] for taken in of_steps])

    def run(self, steps: Sequence[Sequence[Group]] = ()) -> Tape:
        """Train on groups, which are the micro-batches of each step; without any on all, and read an epoch, too."""
        of_run, facts = self.tapes[0].steps, self.tapes[0].facts
        recorder = Recorder(len(steps or of_run), double=self.double, reads=not steps)
        steps = steps or [[self.taken(position)] for position in range(len(of_run))]
        module, data, options = self.build()
        window = max(map(len, steps))

        def epoch(loader: Any) -> Iterator[Any]:
            """Yield the batches of an epoch, and the last again for a run that ended within it."""
            now = trainer.current_epoch
            found = [one for step, groups in zip(of_run, steps, strict=False) if step.epoch == now for one in groups]
            more = repeat(steps[-1][-1]) if now >= of_run[len(steps) - 1].epoch else ()
            for group in chain(found, more):
                keys = [(index, rank, place) for index, rank, one in group for place in range(one.size)]
                batch = loader.collate_fn([pickle.loads(packed) for *_, one in group for packed in one.samples])
                yield recorder.loading.note(batch, Taken(size=len(keys), why="", keys=keys))

        length = facts.epoch_batches / facts.accumulation * window
        stand_in: Callable[[Any], Any] = partial(_TakenAgain, batches=epoch, length=length)
        strategy = _OneProcess(torch.device(self.device))
        strategy.recorder, strategy.rule = recorder, facts.rule.name
        callbacks = [one for one in options["callbacks"] if not isinstance(one, GradientAccumulationScheduler)]
        ours = {"strategy": strategy, "callbacks": [*callbacks, recorder], "plugins": [recorder.plugin]}
        trainer = Trainer(**{**options, **_ALONE, **ours, "accumulate_grad_batches": window})
        given = {name: stand_in(each) if name == "train_dataloaders" else each for name, each in data.items()}
        for owner in (module, given.get("datamodule")):
            if isinstance(owner, (LightningModule, LightningDataModule)) and is_overridden("train_dataloader", owner):
                own = owner.train_dataloader
                vars(owner)["train_dataloader"] = lambda own=own: stand_in(own())
        with _world_of_one(), recorder.watching(module):
            trainer.fit(module, **given)
        short = len(recorder.tape.steps) < len(steps)
        recorder.tape.problem = recorder.tape.problem or "one process takes fewer steps than the run" * short
        return recorder.tape


class Seen(NamedTuple):
    """A difference at a stage of a step, and what was compared there."""

    stage: str
    step: int
    difference: Difference
    found: Tensors
    expected: Tensors
    names: set[str]  # of all that differ


def difference(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    noise: Mapping[str, Tensor] | None = None,
    *,
    together: bool = True,
) -> list[Difference]:
    """Return the differences beyond the tolerance, the largest first. A missing tensor is zero.

    The factor of the first is that of all tensors `together`, or its own.
    """
    beyond, like = list[Difference](), {**found, **expected}
    found, expected = _filled(found, like), _filled(expected, like)
    # What is zero but for rounding, of what both were computed from, would differ by 100 %.
    largest = max(map(_size, expected.values()), default=0.0)
    for (name, mine), other in zip(found.items(), expected.values(), strict=True):
        same = torch.isclose(mine, other, rtol=0.0, atol=0.0, equal_nan=True)
        gaps = torch.where(same, 0.0, (mine - other).abs().nan_to_num(math.inf, math.inf))
        at, scale = int(gaps.argmax()), _size(other)
        gap = float(gaps[at])
        rounding = 1e-5 * tolerance * (_size(noise[name]) if noise and name in noise else largest)
        if gap > rounding + tolerance * scale:
            beyond.append(Difference(name, gap / scale if scale else math.inf, float(mine[at]), float(other[at])))
    beyond.sort(key=lambda one: -one.relative)
    for most in beyond[:1]:
        like, near = like if together else {most.name: like[most.name]}, 1e4 * tolerance
        factor = multiple_of(flat(found, like), flat(expected, like), near)
        beyond[0] = replace(most, factor=factor if factor and abs(factor - 1) > near else None)
    return beyond


def _size(tensor: Tensor) -> float:
    size = float(tensor.abs().max())
    return size if math.isfinite(size) else 0.0


def _filled(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensors:
    """Return sketches of these names and sizes: zeros for one that is missing, and NaN for one of another size."""
    every = {name: tensors.get(name, torch.zeros_like(each)) for name, each in like.items()}
    return {n: each if len(each) == len(like[n]) else torch.full_like(like[n], math.nan) for n, each in every.items()}


def flat(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    """Return sketches as one vector in the order of `like`; what is missing is zero."""
    return torch.cat([torch.zeros(0, dtype=torch.float64), *_filled(tensors, like).values()])


def gap_between(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two vectors over the largest element expected."""
    gap, largest = float((found - expected).abs().max()), float(expected.abs().max())
    return gap / largest if largest else math.inf if gap else 0.0


def multiple_of(found: Tensor, expected: Tensor, near: float) -> float | None:
    """Return the factor between two vectors; None if one is no multiple of the other."""
    factor = float(found.dot(expected) / expected.dot(expected))
    return factor if math.isfinite(factor) and gap_between(found, factor * expected) <= near else None


def differences(run: Tape, alone: Tape, tolerance: float) -> Iterator[Seen]:
    """Yield where a run differs from another, in its order."""
    before: Tensors = {}
    for position, (step, own) in enumerate(zip(run.steps, alone.steps, strict=False)):
        tiny, none = Tensors(), ("", Tensors())
        for other, mine in zip_longest(step.moments, own.moments, fillvalue=none):
            (stage, found), (known, expected), noise = other, mine, Tensors()
            if stage != known:
                raise Refused("one process takes other optimizer steps in a batch than the run, or more of them")
            if stage == "clipped gradient":
                tiny |= _zero_but_for_rounding(expected)
            elif stage == "weights":
                # Optimizers enlarge what is zero but for rounding: it counts as moved as expected.
                found, expected, noise = _without(found, before), _without(expected, before), expected
                both = tiny.keys() & found.keys() & expected.keys()
                found |= {name: torch.where(tiny[name], expected[name], found[name]) for name in both}
            beyond = difference(found, expected, tolerance, noise, together=stage != "optimizer options")
            before = noise or (expected if stage == "initial weights" else before)
            if beyond:
                yield Seen(stage, position, beyond[0], found, expected, {one.name for one in beyond})


def _without(tensors: Tensors, before: Tensors) -> Tensors:
    return {name: each - before[name] for name, each in tensors.items() if name in before}


def _zero_but_for_rounding(gradients: Tensors) -> Tensors:
    """Return which elements of gradients are next to nothing beside the largest of all."""
    least = 1e-10 * max(map(_size, gradients.values()), default=0.0)
    return {name: (each.abs() < least) & ((each != 0) | (0 < _size(each) < least)) for name, each in gradients.items()}
