"""One process that trains freely on the samples that the ranks took.

A global batch is what the user's own `collate_fn` makes of the samples of all ranks. Where there are none, the ranks'
batches are joined leaf by leaf. Nothing but the samples comes from the run: up to the first difference both have the
same state, so what differs first is the culprit. What one process makes of some of the samples is found by training
anew up to a step that has only those.
"""

from __future__ import annotations

import functools
import gc
import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, groupby, repeat
from typing import Any, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gradavg.loaders import Shows
from lightning_gradavg.tree import is_array, leaves, rebuilt
from lightning_gradavg.verify.record import Recorder, Refused, Step, Taken, Tape, loss_of, of_group
from lightning_gradavg.verify.samples import Part, first_loader, is_part

__all__ = ["Build", "Group", "Twin"]

Build: TypeAlias = Callable[[], tuple[LightningModule, dict[str, Any], dict[str, Any]]]
"""Returns module, data and options of the Trainer, as of a new run."""

Group: TypeAlias = Sequence[tuple[int, int, Taken]]
"""Micro-batches that one process takes as one batch: the position in the window, the rank, and what it took."""

_OF_SEVERAL = (
    *("strategy", "devices", "num_nodes", "accelerator", "callbacks", "accumulate_grad_batches", "plugins"),
    *("limit_train_batches", "overfit_batches", "sync_batchnorm", "use_distributed_sampler", "precision"),
)
"""Options of devices, windows and lengths, which one process sets differently."""


def _joined(collate: Callable[[Any], Any], taken: Sequence[Taken]) -> Any:
    """Return one batch of the samples of several, collated by the user's `collate_fn`.

    Raises:
        Refused: If their samples are not known.
    """
    of_loaders = zip(*([part for _, part in leaves(one.parts, is_leaf=is_part)] for one in taken), strict=True)
    sizes = [one.size for one in taken]
    return rebuilt(taken[0].parts, (_joined_parts(collate, each, sizes) for each in of_loaders), is_leaf=is_part)


def _joined_parts(collate: Callable[[Any], Any], parts: Sequence[Part], sizes: list[int]) -> Any:
    held, why = [pickle.loads(part.packed) for part in parts if part.packed], max(part.why for part in parts)
    if len(held) < len(parts):
        raise Refused("a batch cannot be copied")
    if not why:
        return collate([sample for samples in held for sample in samples])
    if len(held) == 1:
        return held[0]
    if any(part.size is None for part in parts):
        raise Refused(f"{why}, and which samples a batch of type {type(held[0]).__name__} holds is not known")
    columns = [dict(leaves(batch, is_leaf=_is_column)) for batch in held]
    if any(each.keys() != columns[0].keys() for each in columns):
        raise Refused(f"{why}, and batches of different lengths cannot be joined")
    whole = (_concatenated([each[place] for each in columns], sizes, why) for place in columns[0])
    return rebuilt(held[0], whole, is_leaf=_is_column)


def _is_column(value: Any) -> bool:
    of_scalars = isinstance(value, (list, tuple)) and all(isinstance(e, (int, float, str, bytes)) for e in value)
    return of_scalars and bool(value)


def _concatenated(values: Sequence[Any], sizes: list[int], why: str) -> Any:
    """Return as one what batches hold at one place: rows, a list of a value per sample, or what they share."""
    first, is_rows = values[0], all(is_array(value) and len(value.shape) > 0 for value in values)
    if is_rows and len({tuple(value.shape[1:]) for value in values}) > 1:
        shapes = " and ".join(dict.fromkeys(str(tuple(value.shape)) for value in values))
        raise Refused(f"{why}, and batches of the shapes {shapes} cannot be joined")
    if (is_rows or _is_column(first)) and [len(value) for value in values] == sizes:
        if not is_rows:
            return type(first)(chain(*values))
        whole = torch.cat([torch.as_tensor(value) for value in values])
        return whole if isinstance(first, Tensor) else whole.numpy()
    if any(pickle.dumps(value) != pickle.dumps(first) for value in values):
        raise Refused(f"{why}, and its batches hold different values that belong to no sample")
    return first


class _OneProcess(SingleDeviceStrategy):
    """One device, with what a module may ask of a strategy of several."""

    tape: Tape  # of the run
    recorder: Recorder
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
        if self.tape.facts.rule.name == "normalized_sum":
            loss = loss / (weight if weight is not None else len(self.recorder.mode.keys))
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("weight", None)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor.unsqueeze(0)  # with its gradient, as one device has it

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step with the run's learning rate where its strategy scales that."""
        recorder, groups = self.recorder, optimizer.param_groups
        of_run, done = (
            [moment.tensors for moment in moments if moment.stage == "optimizer options"]
            for moments in (self.tape.steps[len(recorder.tape.steps)].moments, recorder.moments)
        )
        options = of_run[len(done)] if self.tape.facts.scales_rates and len(done) < len(of_run) else {}
        own = [group["lr"] for group in groups]
        for index, group in enumerate(groups if options else ()):
            group["lr"] = type(own[index])(options[f"lr{of_group(index)}"])
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            for group, rate in zip(groups, own if options else (), strict=False):
                group["lr"] = rate


@contextmanager
def _world_of_one() -> Iterator[None]:
    """Give the user's code a process group to ask, and suppress Lightning's advice."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def all_gather(tensor_list: list[Tensor], tensor: Tensor, *_: Any, **__: Any) -> None:
        tensor_list[0].copy_(tensor)  # with its gradient: what other ranks' rows lack is then seen

    def all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        output_tensor.copy_(input_tensor.reshape(output_tensor.shape))

    try:
        with (
            warnings.catch_warnings(),
            mock.patch.multiple(dist, all_gather=all_gather, all_gather_into_tensor=all_gather_into_tensor),
        ):
            warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
            yield
    finally:
        dist.destroy_process_group()


class _TakenAgain(Shows):
    """Stands for the user's loader, whose attributes it has, and reads what the ranks took."""

    def __init__(self, loader: Any, batches: Callable[[], Iterator[Any]], length: float) -> None:
        super().__init__(loader)
        self._batches, self._length = batches, length

    def __iter__(self) -> Iterator[Any]:
        return self._batches()

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

    def step_with(self, group: Group, position: int, variation: Any = nullcontext) -> Step:
        """Return what a step is if one process takes these micro-batches alone, after the steps before it.

        Raises:
            Refused: If it cannot be computed.
        """
        steps = [*([self.taken(index)] for index in range(position)), [group]]
        gc.collect()  # the module of the run before, which its Trainer and it hold in a circle
        tape = self.run(steps, variation)
        if tape.problem:
            raise Refused(tape.problem)
        return tape.steps[position]

    def windowed(self) -> Tape:
        """Train on windows, as the ranks do, of which each micro-batch holds those of all ranks."""
        of_steps = [self.taken(position) for position in range(len(self.tapes[0].steps))]
        return self.run([[list(each) for _, each in groupby(taken, lambda one: one[0])] for taken in of_steps])

    def run(self, steps: Sequence[Sequence[Group]] = (), variation: Any = nullcontext) -> Tape:
        """Train, and return the record.

        Args:
            steps: The groups that are the micro-batches of each step. Without any these are all that the ranks took,
                and what one process reads in an epoch is noted, too.
            variation: A function of the module whose context changes it.
        """
        reads = not steps
        of_run, facts = self.tapes[0].steps, self.tapes[0].facts
        steps = steps or [[self.taken(position)] for position in range(len(of_run))]
        module, data, options = self.build()
        window = max(map(len, steps))
        recorder = Recorder(len(steps), double=self.double, reads=False)

        def epoch(loader: Any) -> Iterator[Any]:
            """Yield the batches of an epoch, and the last again for a run that ended within it."""
            now, collate = trainer.current_epoch, getattr(loader, "collate_fn", lambda samples: samples)
            found = [
                group for step, groups in zip(of_run, steps, strict=False) if step.epoch == now for group in groups
            ]
            more = repeat(steps[-1][-1]) if now >= of_run[len(steps) - 1].epoch else ()
            for group in chain(found, more):
                keys = [(index, rank, place) for index, rank, one in group for place in range(one.size)]
                batch = _joined(collate, [one for *_, one in group])
                yield recorder.loading.note(batch, Part(len(keys), why="", keys=keys))

        def stand_in(given: Any) -> Any:
            recorder.given, loader = given if reads else None, first_loader(given)
            length = facts.epoch_batches / facts.accumulation * window
            return _TakenAgain(loader, lambda: epoch(loader), length)

        strategy = _OneProcess(torch.device(self.device))
        strategy.tape, strategy.recorder = self.tapes[0], recorder
        callbacks = options.get("callbacks") or []
        trainer = Trainer(
            strategy=strategy,
            accelerator=self.device,
            callbacks=[*(one for one in callbacks if not isinstance(one, GradientAccumulationScheduler)), recorder],
            plugins=[recorder.plugin],
            accumulate_grad_batches=window,
            **{name: value for name, value in options.items() if name not in _OF_SEVERAL},
        )
        given = {name: stand_in(each) if name == "train_dataloaders" else each for name, each in data.items()}
        for owner in (module, given.get("datamodule")):
            if isinstance(owner, (LightningModule, LightningDataModule)) and is_overridden("train_dataloader", owner):
                own = owner.train_dataloader
                vars(owner)["train_dataloader"] = functools.wraps(own)(lambda own=own: stand_in(own()))
        with _world_of_one(), recorder.watching(module), variation(module):
            trainer.fit(module, **given)
        short = len(recorder.tape.steps) < len(steps)
        recorder.tape.problem = recorder.tape.problem or "one process takes fewer steps than the run" * short
        return recorder.tape
