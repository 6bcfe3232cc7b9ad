"""One process that trains freely on the samples that the ranks took.

A global batch is what the user's own `collate_fn` makes of the samples of all ranks. Where there are none, the ranks'
batches are joined leaf by leaf. Nothing but the samples comes from the run: up to the first difference both have the
same state, so what differs first is the culprit.
"""

from __future__ import annotations

import functools
import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

from lightning_gradavg.lightning_internals import BEFORE_TRANSFER
from lightning_gradavg.tree import is_array, leaves, rebuilt
from lightning_gradavg.verify.record import Enough, Recorder, Refused, Taken, Tape, Tensors, loss_of, sketch
from lightning_gradavg.verify.samples import Part, first_loader, is_part

__all__ = ["Build", "Computed", "Keys", "Probe", "Twin"]

Keys: TypeAlias = list[tuple[int, ...]]
Build: TypeAlias = Callable[[], tuple[LightningModule, dict[str, Any], dict[str, Any]]]
"""Returns module, data and options of the Trainer, as of a new run."""

_OF_SEVERAL = (
    *("strategy", "devices", "num_nodes", "accelerator", "callbacks", "accumulate_grad_batches", "plugins"),
    *("limit_train_batches", "overfit_batches", "sync_batchnorm", "use_distributed_sampler", "precision"),
)
"""Options of devices, windows and lengths, which one process sets differently."""


def _joined(collate: Callable[[Any], Any], taken: Sequence[Taken], order: Sequence[int] | None = None) -> Any:
    """Return one batch of the samples of several, collated by the user's `collate_fn`, in another order if given.

    Raises:
        Refused: If their samples are not known.
    """
    of_taken = [[part for _, part in leaves(one.parts, is_leaf=is_part)] for one in taken]
    columns = zip(*of_taken, strict=True)
    batches = (_joined_parts(collate, column, [one.size for one in taken], order) for column in columns)
    return rebuilt(taken[0].parts, batches, is_leaf=is_part)


def _joined_parts(
    collate: Callable[[Any], Any], parts: Sequence[Part], sizes: list[int], order: Sequence[int] | None
) -> Any:
    without = [part for part in parts if part.samples is None]
    if not without:
        samples = [sample for part in parts for sample in pickle.loads(part.samples or b"")]
        return collate(samples if order is None else [samples[index] for index in order])
    if any(part.batch is None for part in parts):
        raise Refused("a batch cannot be copied")
    batches = [pickle.loads(part.batch or b"") for part in parts]
    if len(batches) == 1 and order is None:
        return batches[0]
    if any(part.size is None for part in parts):
        kind = type(batches[0]).__name__
        raise Refused(f"{without[0].why}, and which samples a batch of type {kind} holds is not known")
    return _concatenated(batches, sizes, without[0].why, order)


def _is_column(value: Any) -> bool:
    of_scalars = isinstance(value, (list, tuple)) and all(isinstance(e, (int, float, str, bytes)) for e in value)
    return of_scalars and bool(value)


def _concatenated(batches: Sequence[Any], sizes: list[int], why: str, order: Sequence[int] | None) -> Any:
    held = [dict(leaves(batch, is_leaf=_is_column)) for batch in batches]
    if any(each.keys() != held[0].keys() for each in held):
        raise Refused(f"{why}, and batches of different lengths cannot be joined")
    picked = list(order or range(sum(sizes)))

    def one(place: str) -> Any:
        values = [each[place] for each in held]
        first, is_rows = values[0], all(is_array(value) and len(value.shape) > 0 for value in values)
        if is_rows and len({tuple(value.shape[1:]) for value in values}) > 1:
            shapes = " and ".join(dict.fromkeys(str(tuple(value.shape)) for value in values))
            raise Refused(f"{why}, and batches of the shapes {shapes} cannot be joined")
        if (is_rows or _is_column(first)) and [len(value) for value in values] == sizes:
            if is_rows:
                whole = torch.cat([torch.as_tensor(value) for value in values])[picked]
                return whole if isinstance(first, Tensor) else whole.numpy()
            items = [item for value in values for item in value]
            return type(first)(items[index] for index in picked)
        if any(pickle.dumps(value) != pickle.dumps(first) for value in values):
            raise Refused(f"{why}, and what its batches hold at {place or 'the top'} belongs to no sample")
        return first

    return rebuilt(batches[0], iter([one(place) for place in held[0]]), is_leaf=_is_column)


class _OneProcess(SingleDeviceStrategy):
    """One device, with what a module may ask of a strategy of several."""

    twin: Twin
    recorder: Recorder
    lr_scale = 1.0

    @property
    def global_batch_size(self) -> int:
        return len(self.recorder.keys)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(super().training_step(*args, **kwargs))

    def plain(self, output: Any) -> Any:
        """Return what `training_step` returned as Lightning takes it: one loss, normalized as the run's rule does."""
        end = getattr(self.recorder.module, "training_step_end", None)
        output = output if end is None else end(output)
        loss, weight = loss_of(output)
        if loss is None:
            return output
        if self.twin.facts.rule == "normalized_sum":
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
        own, recorder = [dict(group) for group in optimizer.param_groups], self.recorder
        scales = self.twin.facts.scales_rates
        of_run = self.twin.tapes[0].steps[len(recorder.tape.steps)].updates[len(recorder.updates) :]
        for update in of_run[: int(scales)]:
            for group, options in zip(optimizer.param_groups, update.options, strict=True):
                known = options.keys() & group.keys()
                group.update({name: options[name] for name in known if not isinstance(group[name], Tensor)})
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            for group, options in zip(optimizer.param_groups, own if scales else [], strict=False):
                group.update(options)


class _TwinTrainer(Trainer):
    estimated_steps = math.inf

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        own = super().estimated_stepping_batches  # which sets the loaders up, too
        return self.estimated_steps if math.isfinite(self.estimated_steps) else own


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


@dataclass
class Twin:
    """Trains on one process on what the ranks took."""

    tapes: Sequence[Tape]
    build: Build
    double: bool
    device: str = "cpu"
    windowed: bool = False  # accumulates the micro-batches of a window, instead of joining them

    def __post_init__(self) -> None:
        self.facts, self.steps = self.tapes[0].facts, self.tapes[0].steps
        self.batches = [batch for step in range(len(self.steps)) for batch in self._of_step(step)]

    def _of_step(self, step: int) -> Iterator[tuple[int, list[Taken], Keys]]:
        """Yield the batches of one process for a step: its position, what is joined, and the keys of its samples."""
        window = max(len(tape.steps[step].taken) for tape in self.tapes)
        for group in [[one] for one in range(window)] if self.windowed else [range(window)]:
            counted = [
                (index, rank, taken)
                for index in group
                for rank, tape in enumerate(self.tapes)
                for taken in tape.steps[step].taken[index : index + 1]
                if taken.counts
            ]
            keys: Keys = [(index, rank, i) for index, rank, each in counted for i in range(each.size)]
            yield step, [taken for *_, taken in counted], keys

    def run(self, probe: Callable[[Probe], None] | None = None, at: int = 0) -> Tape:
        """Train, and return the record; with a probe only up to the step `at`, where it is called."""
        module, data, options = self.build()
        collates: list[Callable[[Any], Any]] = []

        def begins(batch: Any, *rest: Any, **_: Any) -> None:
            if probe is not None and len(recorder.tape.steps) == at:
                recorder.paused(probe)(Probe(self, recorder, collates[0], rest))
                raise Enough

        recorder = Recorder(len(self.steps), double=self.double, begins=begins)
        strategy = _OneProcess(torch.device(self.device))
        strategy.twin, strategy.recorder = self, recorder
        callbacks = options.get("callbacks") or []
        trainer = _TwinTrainer(
            strategy=strategy,
            accelerator=self.device,
            callbacks=[*(one for one in callbacks if not isinstance(one, GradientAccumulationScheduler)), recorder],
            plugins=[recorder.plugin],
            accumulate_grad_batches=self.facts.accumulation if self.windowed else 1,
            **{name: value for name, value in options.items() if name not in _OF_SEVERAL},
        )
        trainer.estimated_steps = self.facts.estimated_steps

        def stand_in(given: Any) -> Any:
            """Return what one process reads in place of the loaders: their attributes, and the ranks' samples."""
            recorder.reads, loader = given, first_loader(given)
            collates[:] = [getattr(loader, "collate_fn", lambda samples: samples)]
            methods = {
                "__iter__": lambda _: self._epoch(trainer, recorder, collates[0]),
                "__len__": lambda _: self._length(),
                "__getattr__": lambda _, name: getattr(loader, name),
            }
            return type(type(loader).__name__, (), methods)()

        given = {name: stand_in(each) if name == "train_dataloaders" else each for name, each in data.items()}
        for owner in (module, given.get("datamodule")):
            if isinstance(owner, (LightningModule, LightningDataModule)) and is_overridden("train_dataloader", owner):
                own = owner.train_dataloader
                vars(owner)["train_dataloader"] = functools.wraps(own)(lambda own=own: stand_in(own()))
        with _world_of_one(), recorder.watching(module):
            trainer.fit(module, **given)
        short = len(recorder.tape.steps) < len(self.steps)
        recorder.tape.problem = recorder.tape.problem or "one process takes fewer steps than the run" * short
        return recorder.tape

    def _length(self) -> int:
        batches = self.facts.epoch_batches / (1 if self.windowed else self.facts.accumulation)
        if not math.isfinite(batches):
            raise TypeError("the loader has no length")
        return math.ceil(batches)

    def _epoch(self, trainer: Trainer, recorder: Recorder, collate: Callable[[Any], Any]) -> Iterator[Any]:
        """Yield the batches of an epoch, and more for a run that ended within it."""
        epoch, last = trainer.current_epoch, self.steps[-1].epoch
        found = [batch for batch in self.batches if self.steps[batch[0]].epoch == epoch]
        for _, taken, keys in found:
            yield recorder.loading.note(_joined(collate, taken), Part(len(keys), why="", keys=keys))
        while epoch >= last:
            _, taken, keys = self.batches[-1]
            yield recorder.loading.note(_joined(collate, taken), Part(len(keys), why="", keys=keys))


class _State:
    """Buffers and attributes of a module, as they are now."""

    def __init__(self, module: LightningModule) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._attributes = [(part, dict(vars(part))) for part in module.modules()]

    def restore(self, *, attributes: bool = True) -> None:
        for buffer, before in self._buffers:
            buffer.data.copy_(before)
        for part, attributes_before in self._attributes if attributes else ():
            for name in vars(part).keys() - attributes_before.keys():
                del vars(part)[name]
            vars(part).update(attributes_before)


@dataclass(frozen=True)
class Computed:
    """What one process makes of some samples."""

    gradients: Tensors
    loss: float


class Probe:
    """Computes gradients of some samples at the beginning of a step."""

    def __init__(self, twin: Twin, recorder: Recorder, collate: Callable[[Any], Any], rest: tuple[Any, ...]) -> None:
        self.twin, self.module = twin, recorder.module
        self._recorder, self._collate, self._rest = recorder, collate, rest
        vars(self.module).update(dict.fromkeys(("log", "log_dict"), _nothing))

    def compute(
        self, taken: Sequence[Taken], keys: Keys, order: Sequence[int] | None = None, *, keeps: bool = False
    ) -> Computed:
        """Return gradients and loss of samples, in another order if given; `keeps` keeps the attributes that change."""
        module, recorder, before = self.module, self._recorder, _State(self.module)
        strategy: Any = recorder.trainer.strategy
        parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
        try:
            batch = recorder.converts(_joined(self._collate, taken, order))
            recorder.begin(keys if order is None else [keys[index] for index in order])
            recorder.mode.paused = False
            batch = getattr(module, BEFORE_TRANSFER)(batch, dataloader_idx=0)
            batch = strategy.batch_to_device(batch, dataloader_idx=0)
            recorder.reseed()
            loss, _ = loss_of(strategy.plain(type(module).training_step(module, batch, *self._rest)))
            known: Any = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        finally:
            recorder.mode.paused = True
            before.restore(attributes=not keeps)
        found = {name: sketch(each) for name, each in zip(parameters, known, strict=True) if each is not None}
        return Computed(found, float(loss.detach()))


def _nothing(*_: Any, **__: Any) -> None:
    """Log nothing."""
