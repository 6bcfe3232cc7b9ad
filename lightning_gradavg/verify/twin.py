"""One process that trains on the samples that the ranks took: freely, until it differs from them.

A global batch is what the user's own `collate_fn` makes of the samples of all ranks. Where there are none, the ranks'
batches are joined leaf by leaf. Nothing is restored and nothing is taken from the run but the samples: up to the first
difference both have the same state, so what differs first is where it is made.
"""

from __future__ import annotations

import copy
import functools
import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_gradavg.lightning_internals import BEFORE_TRANSFER
from lightning_gradavg.random_state import random_state, restore_random_state
from lightning_gradavg.tree import is_array, leaves, rebuilt
from lightning_gradavg.verify.record import (
    Data,
    Enough,
    Loading,
    Part,
    Recorder,
    Refused,
    Taken,
    Tape,
    Tensors,
    loss_of,
    precision_of,
    sketch,
)

__all__ = ["Computed", "Twin", "difference", "joined", "run_twin"]

_OF_SEVERAL = (
    *("strategy", "devices", "num_nodes", "accelerator", "callbacks", "accumulate_grad_batches", "plugins"),
    *("limit_train_batches", "overfit_batches", "sync_batchnorm", "use_distributed_sampler", "precision"),
)
"""Options of devices, windows and lengths, which one process has otherwise."""


@dataclass(frozen=True)
class Difference:
    """Where a tensor of the run differs from that of one process.

    Attributes:
        name: Its parameter, buffer or value.
        relative: The largest absolute difference over the largest absolute value.
        found: The run's value where they differ most.
        expected: That of one process.
        factor: Run / one process where all that differ are that multiple, or None.
    """

    name: str
    relative: float
    found: float
    expected: float
    factor: float | None = None


def difference(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    noise: Mapping[str, Tensor] | None = None,
) -> tuple[Difference | None, dict[str, float]]:
    """Return the first difference beyond the tolerance, and the relative size of all. A missing tensor is zero.

    Args:
        found: Those of the run.
        expected: Those of one process.
        tolerance: The relative difference that counts as equal.
        noise: What both were computed from: a hundred-thousandth of the tolerance of that is rounding, as of the
            largest of all tensors. What is zero but for rounding would otherwise differ by 100 %.
    """
    empty = torch.zeros(1, dtype=torch.float64)
    sizes = {name: float(tensor.abs().max()) if tensor.numel() else 0.0 for name, tensor in expected.items()}
    largest = max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
    relative: dict[str, float] = {}
    beyond: list[str] = []
    for name in {**expected, **found}:
        mine, other = found.get(name), expected.get(name)
        mine, other = (each if each is not None and each.numel() else None for each in (mine, other))
        mine = torch.zeros_like(other) if mine is None and other is not None else mine
        other = torch.zeros_like(mine) if other is None and mine is not None else other
        mine, other = (empty if each is None else each.double().reshape(-1) for each in (mine, other))
        if mine.shape != other.shape:
            relative[name] = math.inf
            beyond.append(name)
            continue
        same = (mine == other) | (mine.isnan() & other.isnan())
        gap = float(torch.where(same, 0.0, (mine - other).abs()).nan_to_num(math.inf, math.inf).max())
        scale = sizes.get(name, 0.0)
        base = float(noise[name].abs().max()) if noise is not None and name in noise else largest
        relative[name] = gap / scale if scale else (math.inf if gap else 0.0)
        allowed = 1e-5 * tolerance * base + (tolerance * scale if math.isfinite(scale) else 0.0)
        if not gap <= allowed:
            beyond.append(name)
        elif relative[name] > tolerance:
            relative[name] = tolerance
    if not beyond:
        return None, relative
    name = max(beyond, key=lambda one: relative[one])
    mine, other = (each.get(name, empty).double().reshape(-1) for each in (found, expected))
    if mine.shape != other.shape:
        mine, other = torch.zeros_like(other) if name not in found else mine[:1], other if name not in found else empty
        other = torch.zeros_like(mine) if name not in expected else other
    if mine.shape != other.shape:
        return Difference(name, math.inf, math.nan, math.nan), relative
    at = int((mine - other).abs().nan_to_num(math.inf).argmax())
    factor = factor_between(found, expected, tolerance)
    return Difference(name, relative[name], float(mine[at]), float(other[at]), factor), relative


def flat(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    """Return sketches as one vector in the order of `like`; what is missing is zero."""
    pieces = [tensors.get(name, torch.zeros_like(tensor)).double().reshape(-1) for name, tensor in like.items()]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *pieces])


def factor_between(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> float | None:
    """Return what multiple of the expected the found is, if it is one and not the same."""
    like = {**expected, **found}
    mine, other = flat(found, like), flat(expected, like)
    factor = float(mine.dot(other) / other.dot(other))
    near = float((mine - factor * other).abs().max()) <= 100 * tolerance * float(other.abs().max())
    return factor if near and factor and abs(factor - 1) > tolerance else None


@dataclass(frozen=True)
class Computed:
    """What one process makes of some samples, from the state before the step."""

    gradients: Tensors
    loss: float


def _unpacked(blob: bytes | None) -> Any:
    if blob is None:
        raise Refused("a batch cannot be copied")
    return pickle.loads(blob)


def joined(
    collate: Callable[[Any], Any], taken: Sequence[Any], sizes: Sequence[int], order: Sequence[int] | None = None
) -> Any:
    """Return one batch of the samples of several.

    Args:
        collate: The user's `collate_fn`.
        taken: The batches, as parts or structures of parts.
        sizes: The samples of each.
        order: The samples in another order than theirs.

    Raises:
        Refused: If their samples are not known.
    """
    first = taken[0]
    if not isinstance(first, Part):
        places = list(first) if isinstance(first, dict) else range(len(first))
        columns = [joined(collate, [each[place] for each in taken], sizes, order) for place in places]
        return dict(zip(places, columns, strict=True)) if isinstance(first, dict) else type(first)(columns)
    if all(part.samples is not None for part in taken):
        samples = [sample for part in taken for sample in _unpacked(part.samples)]
        return collate([samples[index] for index in order] if order is not None else samples)
    batches, why = [_unpacked(part.batch) for part in taken], next(part.why for part in taken if part.samples is None)
    if len(batches) == 1 and order is None:
        return batches[0]
    if any(part.size is None for part in taken):
        raise Refused(f"{why}, and which samples a batch of type {type(batches[0]).__name__} holds is not known")
    return _concatenated(batches, list(sizes), why, order)


def _concatenated(batches: Sequence[Any], sizes: list[int], why: str, order: Sequence[int] | None) -> Any:
    def is_column(value: Any) -> bool:
        return (
            type(value) in (list, tuple) and bool(value) and all(isinstance(e, (int, float, str, bytes)) for e in value)
        )

    held = [dict(leaves(batch, is_leaf=is_column)) for batch in batches]
    if any(each.keys() != held[0].keys() for each in held):
        raise Refused(f"{why}, and batches of different lengths cannot be joined")

    def one(place: str) -> Any:
        values = [each[place] for each in held]
        first = values[0]
        if is_array(first) and len(first.shape) > 0:
            tensors = [torch.as_tensor(value) for value in values]
            if len({tensor.shape[1:] for tensor in tensors}) > 1:
                shapes = " and ".join(dict.fromkeys(str(tuple(tensor.shape)) for tensor in tensors))
                raise Refused(f"{why}, and batches of the shapes {shapes} cannot be joined")
            if [len(tensor) for tensor in tensors] == sizes:
                whole = torch.cat(tensors)
                whole = whole[list(order)] if order is not None else whole
                return whole if isinstance(first, Tensor) else whole.numpy()
        if is_column(first) and [len(value) for value in values] == sizes:
            items = [item for value in values for item in value]
            return type(first)(items if order is None else [items[index] for index in order])
        if any(pickle.dumps(value) != pickle.dumps(first) for value in values):
            raise Refused(f"{why}, and what its batches hold at {place or 'the top'} belongs to no sample")
        return first

    return rebuilt(batches[0], iter([one(place) for place in held[0]]), is_leaf=is_column)


class _OneProcess(SingleDeviceStrategy):
    """One device, with what a module may ask of a strategy of several."""

    twin: Twin

    @property
    def global_batch_size(self) -> int:
        """The samples of the batch in training."""
        return len(self.twin.all_keys)

    @property
    def lr_scale(self) -> float:
        """Nothing is scaled."""
        return 1.0

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.twin.plain(super().training_step(*args, **kwargs))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("weight", None)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor.unsqueeze(0)  # with its gradient, as one device has it

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with self.twin.scaled(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)


class Twin(Recorder):
    """Trains on what the ranks took, and stops where it differs.

    Args:
        tapes: What the ranks recorded.
        tolerance: The relative difference that counts as equal.
        together: How many micro-batches of a window are one batch; None for all.

    Attributes:
        differing: The stage and the position of the step that differ, and how.
        gradients: The relative difference of the reduced gradient by parameter, for every step.
        expected: The gradient of the step that differs.
        parts: What one process makes of each micro-batch of that step, where the gradient differs.
    """

    def __init__(self, tapes: Sequence[Tape], tolerance: float, *, double: bool, windowed: bool = False) -> None:
        super().__init__(len(tapes[0].steps), Loading(), double=double)
        self.tapes, self.tolerance, self.windowed = tapes, tolerance, windowed
        self.differing: tuple[str, int, Difference] | None = None
        self.gradients: dict[str, list[float]] = {}
        self.one_process = Data(complete=False)
        self.explain: Callable[[Twin, int], None] | None = None
        self.explanation: tuple[str, str] | None = None
        self.traces: dict[int, list[Any]] = {}
        self.expected: Tensors = {}
        self.reduced: Tensors = {}
        self.raw: Any = None
        self.collate: Callable[[Any], Any] = lambda samples: samples
        self.rest: tuple[Any, ...] = (0,)
        self.plugin: Any = None
        self.facts = tapes[0].facts
        self.batches = [batch for step in range(self.most) for batch in self._of_step(step)]

    def _of_step(self, step: int) -> list[tuple[int, list[Taken], list[tuple[int, ...]]]]:
        """Return the batches of one process for a step: position, what is joined, and the keys of its samples."""
        window = max(len(tape.steps[step].taken) for tape in self.tapes)
        groups = [[one] for one in range(window)] if self.windowed else [list(range(window))]
        found = []
        for group in groups:
            places = [
                (index, rank, tape.steps[step].taken[index])
                for index in group
                for rank, tape in enumerate(self.tapes)
                if index < len(tape.steps[step].taken)
            ]
            counted = [place for place in places if place[2].counts]
            keys: list[tuple[int, ...]] = [
                (index, rank, i) for index, rank, taken in counted for i in range(taken.size)
            ]
            found.append((step, [taken for *_, taken in counted], keys))
        return found

    @property
    def length(self) -> float:
        """Batches of an epoch."""
        window = 1 if self.windowed else self.facts.accumulation
        return math.ceil(self.facts.epoch_batches / window) if math.isfinite(self.facts.epoch_batches) else math.inf

    def stand_in(self, given: Any) -> Any:
        """Return what one process reads in place of the user's loaders: their attributes, and the ranks' samples."""
        self.raw = given
        loader = given
        while not isinstance(loader, DataLoader) and isinstance(loader, (dict, list, tuple)) and loader:
            inner = list(loader.values()) if isinstance(loader, dict) else list(loader)
            if not any(isinstance(each, (DataLoader, dict)) for each in inner):
                break
            loader = inner[0]
        self.collate = getattr(loader, "collate_fn", self.collate)
        methods = {"__iter__": lambda _: self._epoch(), "__len__": lambda _: self._sized()}
        if isinstance(loader, DataLoader):
            stands = copy.copy(loader)
            stands.__class__ = type(type(loader).__name__, (type(loader),), methods)
            return stands
        delegating = {**methods, "__getattr__": lambda _, name: getattr(loader, name)}
        return type("Steps", (), delegating)()

    def _sized(self) -> int:
        if not math.isfinite(self.length):
            raise TypeError("the loader has no length")
        return int(self.length)

    def _epoch(self) -> Iterator[Any]:
        """Yield the batches of an epoch, and one more for a run that was ended within it."""
        first = self._arrived
        for step, taken, _ in self.batches[first:]:
            if self.tapes[0].steps[step].epoch != self.tapes[0].steps[self.batches[first][0]].epoch:
                return
            yield joined(self.collate, [each.parts for each in taken], [each.size for each in taken])
        _, taken, _ = self.batches[-1]
        while True:
            yield joined(self.collate, [each.parts for each in taken], [each.size for each in taken])

    _arrived = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        state = random_state()
        self.one_process = Data.of(self.raw, self.loading)
        restore_random_state(state)
        found, _ = difference(self.tapes[0].initial, self.tape.initial, self.tolerance)
        if found is not None:
            self._stop("initial weights", 0, found)

    def _stop(self, stage: str, position: int, found: Difference) -> None:
        self.differing = (stage, position, found)
        raise Enough

    @override
    def arrived(self, batch: Any) -> None:
        self.close()
        self._compare_closed()
        if len(self.tape.steps) >= self.most or self._arrived >= len(self.batches):
            raise Enough
        _, taken, keys = self.batches[self._arrived]
        self._arrived, self.epoch = self._arrived + 1, self.trainer.current_epoch
        self.window.append(Taken(None, sum(each.size for each in taken)))
        self.enter(keys)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave()
        self.close()
        self._compare_closed()

    @override
    def stepped(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.rest = args[1:]
        return super().stepped(step, args, kwargs)

    def plain(self, output: Any) -> Any:
        """Return what `training_step` returned as Lightning takes it: one loss, normalized as the run's rule does."""
        end = getattr(self.module, "training_step_end", None)
        output = output if end is None else end(output)
        loss, weight = loss_of(output)
        if loss is None:
            return output
        if self.facts.rule == "normalized_sum":
            loss = loss / (weight if weight is not None else len(self.mode.keys))
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    @contextmanager
    def scaled(self, optimizer: Optimizer) -> Iterator[None]:
        """Step with the run's learning rate where its strategy scales that."""
        if not self.facts.scales_rates:
            yield
            return
        own = [dict(group) for group in optimizer.param_groups]
        done, position = len(self.updates), len(self.tape.steps)
        for group, options in zip(
            optimizer.param_groups, self.tapes[0].steps[position].updates[done].options, strict=True
        ):
            group.update(
                {key: value for key, value in options.items() if key in group and not isinstance(group[key], Tensor)}
            )
        try:
            yield
        finally:
            for group, options in zip(optimizer.param_groups, own, strict=True):
                group.update(options)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        position, update = len(self.tape.steps), len(self.updates)
        of_run = self.tapes[0].steps[position].updates
        if update >= len(of_run):
            raise Refused("one process steps more often than the run")
        evaluation = len(self.evaluations) - 1  # an optimizer may ask for the loss several times in a step
        if evaluation >= len(of_run[update].reduced):
            raise Refused("one process asks for the loss more often in a step than the run")
        self.reduced, self.expected = of_run[update].reduced[evaluation], self.evaluations[-1]
        self.traces[position] = list(self.mode.trace)
        found, relative = difference(self.reduced, self.expected, self.tolerance)
        for name, each in relative.items():
            self.gradients.setdefault(name, []).append(each)
        if found is not None:
            if self.explain is not None:
                with self.mode.pausing():
                    self.explain(self, position)
            self._stop("reduced gradient", position, found)

    def _compare_closed(self) -> None:
        """Compare what the step before left behind."""
        position = len(self.tape.steps) - 1
        if position < 0 or getattr(self, "_compared", -1) >= position:
            return
        self._compared = position
        mine, run = self.tape.steps[position], self.tapes[0].steps[position]
        if len(mine.updates) != len(run.updates):
            raise Refused("one process takes another number of optimizer steps in a batch")
        for own, other in zip(mine.updates, run.updates, strict=True):
            found, _ = difference(other.used, own.used, self.tolerance)
            if found is not None:
                self._stop("clipped gradient", position, found)
            for group, options in zip(own.options, other.options, strict=False):
                for name, value in options.items():
                    if name in group and not _near(value, group[name], self.tolerance):
                        self._stop("optimizer options", position, _of_option(name, value, group[name]))
        before = self.tape.steps[position - 1].weights if position else self.tape.initial
        moved = {name: tensor - before[name] for name, tensor in mine.weights.items() if name in before}
        of_run = {name: run.weights[name] - before[name] for name in moved if name in run.weights}
        for update in mine.updates:  # an optimizer may make much of what is zero but for rounding
            largest = max((float(one.abs().max()) for one in update.used.values() if one.numel()), default=0.0)
            for name, used in update.used.items():
                size = float(used.abs().max()) if used.numel() else 0.0
                rounding = (used.abs() < 1e-10 * largest) & ((used != 0) | (0 < size < 1e-10 * largest))
                if name in of_run and used.shape == moved[name].shape == of_run[name].shape:
                    of_run[name] = torch.where(rounding, moved[name], of_run[name])
        found, _ = difference(of_run, moved, self.tolerance, noise=mine.weights)
        if found is not None:
            self._stop("weights", position, found)
        found, _ = difference(run.buffers, mine.buffers, self.tolerance)
        if found is not None:
            self._stop("buffers", position, found)

    def compute(
        self, taken: Sequence[Taken], keys: Sequence[tuple[int, ...]], order: Sequence[int] | None = None
    ) -> Computed:
        """Return what one process makes of some samples, from the state before the step that is under way."""
        module, plugin = self.module, self.plugin
        kept = [(part, dict(vars(part))) for part in module.modules()]
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        outside, mode_keys, trace = random_state(), self.all_keys, self.mode.trace
        parameters = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        vars(module).update(log=_nothing, log_dict=_nothing)
        try:
            for buffer, before in self.before:
                buffer.data.copy_(before)
            for part, attributes in self.attributes:
                vars(part).update(attributes)
            batch = joined(self.collate, [each.parts for each in taken], [each.size for each in taken], order)
            batch = plugin.converted(batch)
            ordered = list(keys) if order is None else [keys[index] for index in order]
            self.enter_again(ordered)
            self.mode.paused = False
            batch = getattr(module, BEFORE_TRANSFER)(batch, dataloader_idx=0)
            batch = self.trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            with torch.enable_grad(), plugin.train_step_context():
                self.reseed()
                output = type(module).training_step(module, batch, *self.rest)
            loss, _ = loss_of(self.plain(output))
            grads = torch.autograd.grad(loss, [one for _, one in parameters], allow_unused=True)
            known: list[Any] = list(grads)  # None for a parameter that is not used
            found = {name: sketch(g) for (name, _), g in zip(parameters, known, strict=True) if g is not None}
            return Computed(found, float(loss.detach()))
        finally:
            for part, attributes in kept:
                vars(part).clear()
                vars(part).update(attributes)
            for buffer, before in buffers:
                buffer.data.copy_(before)
            restore_random_state(outside)
            self.mode.keys = self.all_keys = mode_keys
            self.mode.trace, self.mode.paused = trace, True

    before: Sequence[tuple[Tensor, Tensor]] = ()
    attributes: Sequence[tuple[Any, dict[str, Any]]] = ()

    def enter_again(self, keys: list[tuple[int, ...]]) -> None:
        """Draw as at the beginning of the step."""
        self.all_keys = keys
        self.mode.begin(keys)
        self.reseed()

    @override
    def enter(self, keys: list[tuple[int, ...]]) -> None:
        self.before = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        plain = (int, float, complex, str, bool, Tensor, type(None))
        self.attributes = [
            (part, {name: value for name, value in vars(part).items() if name[:1] != "_" and isinstance(value, plain)})
            for part in self.module.modules()
        ]
        super().enter(keys)


def _nothing(*_: Any, **__: Any) -> None:
    """Log nothing."""


def _near(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)) and len(one) == len(other):
        return all(_near(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-300)
    return type(one) is not type(other) or not isinstance(one, (str, type(None))) or one == other


def _of_option(name: str, found: Any, expected: Any) -> Difference:
    numbers = isinstance(found, (int, float)) and isinstance(expected, (int, float))
    mine, other = (float(found), float(expected)) if numbers else (math.nan, math.nan)
    return Difference(
        name, abs(mine - other) / abs(other) if other else math.inf, mine, other, mine / other if other else None
    )


class _TwinTrainer(Trainer):
    estimated_steps = math.inf

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        own = super().estimated_stepping_batches  # which sets the loaders up, too
        return self.estimated_steps if math.isfinite(self.estimated_steps) else own


@contextmanager
def _world_of_one() -> Iterator[None]:
    """Give the code of the user a process group to ask, and keep Lightning's advice back."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def all_gather(tensor_list: list[Tensor], tensor: Tensor, *_: Any, **__: Any) -> None:
        tensor_list[0].copy_(tensor)  # with its gradient: what other ranks' rows lack is then seen

    def all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        output_tensor.copy_(input_tensor.reshape(output_tensor.shape))

    try:
        with (
            warnings.catch_warnings(),
            mock.patch.multiple(dist, all_gather=all_gather, all_gather_into_tensor=all_gather_into_tensor),
            suppress(Enough),
        ):
            warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
            yield
    finally:
        dist.destroy_process_group()


def run_twin(
    twin: Twin, module: LightningModule, data: Mapping[str, Any], options: Mapping[str, Any], device: str = "cpu"
) -> None:
    """Train on one process until a difference or the end.

    Args:
        twin: What compares.
        module: The module as the user builds it.
        data: The arguments `train_dataloaders` or `datamodule` of `fit`, or none.
        options: The options of the run's Trainer.
        device: The type of the device.
    """
    strategy = _OneProcess(torch.device(device))
    strategy.twin = twin
    callbacks = [one for one in options.get("callbacks") or [] if not isinstance(one, GradientAccumulationScheduler)]
    kept = {name: value for name, value in options.items() if name not in _OF_SEVERAL}
    window = twin.facts.accumulation if twin.windowed else 1
    twin.plugin = precision_of(twin)
    trainer = _TwinTrainer(
        strategy=strategy,
        accelerator=device,
        callbacks=[*callbacks, twin],
        plugins=[twin.plugin],
        accumulate_grad_batches=window,
        **kept,
    )
    trainer.estimated_steps = twin.facts.estimated_steps
    given = dict(data)
    if "train_dataloaders" in given:
        given["train_dataloaders"] = twin.stand_in(given["train_dataloaders"])
    for owner in (module, given.get("datamodule")):
        if isinstance(owner, (LightningModule, LightningDataModule)) and is_overridden("train_dataloader", owner):
            own = owner.train_dataloader

            @functools.wraps(own)
            def train_dataloader(own: Callable[[], Any] = own) -> Any:
                return twin.stand_in(own())

            vars(owner)["train_dataloader"] = train_dataloader
    with twin.watching(module), _world_of_one():
        trainer.fit(module, **given)
