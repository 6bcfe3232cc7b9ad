"""One process that trains on the samples that the ranks took: freely, until it differs from them.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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
from typing_extensions import override

from lightning_gradavg.lightning_internals import BEFORE_TRANSFER
from lightning_gradavg.random_state import random_state, restore_random_state
from lightning_gradavg.tree import is_array, leaves, rebuilt
from lightning_gradavg.verify.record import Enough, Recorder, Refused, Taken, Tape, Tensors, loss_of, sketch
from lightning_gradavg.verify.samples import Part, Read, items_of, loaders_in, rebuilt_of

__all__ = ["Computed", "Difference", "Twin", "difference", "flat", "gap_between", "joined", "multiple_of", "run_twin"]

_OF_SEVERAL = (
    *("strategy", "devices", "num_nodes", "accelerator", "callbacks", "accumulate_grad_batches", "plugins"),
    *("limit_train_batches", "overfit_batches", "sync_batchnorm", "use_distributed_sampler", "precision"),
)
"""Options of devices, windows and lengths, which one process sets differently."""


@dataclass(frozen=True)
class Difference:
    """Where a tensor of the run differs from that of one process.

    Attributes:
        name: Its parameter, buffer or value.
        relative: The largest absolute difference over the largest absolute value.
        found: The run's value where they differ most.
        expected: That of one process.
        factor: Run / one process where everything that differs is that multiple, or None.
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
    """Return the largest difference beyond the tolerance, and the relative size of all. A missing tensor is zero.

    Args:
        found: The sketches of the run.
        expected: Those of one process.
        tolerance: The relative difference that counts as equal.
        noise: What both were computed from: a hundred-thousandth of the tolerance of that is rounding, as of the
            largest of all tensors. What is zero but for rounding would otherwise differ by 100 %.
    """
    relative, beyond = dict[str, float](), list[Difference]()
    largest = max(map(_size, expected.values()), default=0.0)
    for name in {**expected, **found}:
        mine, other = _paired(found.get(name), expected.get(name))
        if mine.shape != other.shape:
            beyond.append(Difference(name, math.inf, math.nan, math.nan))
            relative[name] = math.inf
            continue
        same = (mine == other) | (mine.isnan() & other.isnan())
        gaps = torch.where(same, 0.0, (mine - other).abs().nan_to_num(math.inf, math.inf))
        at, scale = int(gaps.argmax()), _size(other)
        gap = float(gaps[at])
        rounding = 1e-5 * tolerance * (_size(noise[name]) if noise and name in noise else largest)
        relative[name] = gap / scale if scale else math.inf * bool(gap) if gap else 0.0
        if gap > rounding + tolerance * scale:
            beyond.append(Difference(name, relative[name], float(mine[at]), float(other[at])))
        else:
            relative[name] = min(relative[name], tolerance)
    if not beyond:
        return None, relative
    like = {**expected, **found}
    factor = multiple_of(flat(found, like), flat(expected, like), 100 * tolerance)
    told = factor if factor and abs(factor - 1) > tolerance else None
    return replace(max(beyond, key=lambda one: one.relative), factor=told), relative


def _size(tensor: Tensor) -> float:
    size = float(tensor.abs().max()) if tensor.numel() else 0.0
    return size if math.isfinite(size) else 0.0


def _paired(*tensors: Tensor | None) -> list[Tensor]:
    """Return two sketches, with zeros for one that is missing."""
    known = [each for each in tensors if each is not None and each.numel()]
    zeros = torch.zeros_like(known[0]) if known else torch.zeros(1, dtype=torch.float64)
    return [zeros if each is None or not each.numel() else each for each in tensors]


def flat(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    """Return sketches as one vector in the order of `like`; what is missing is zero."""
    pieces = [tensors.get(name, torch.zeros_like(tensor)) for name, tensor in like.items()]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *pieces])


def gap_between(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two vectors over the largest element expected."""
    if not len(expected):
        return 0.0
    gap, largest = float((found - expected).abs().max()), float(expected.abs().max())
    return gap / largest if largest else math.inf if gap else 0.0


def multiple_of(found: Tensor, expected: Tensor, near: float) -> float | None:
    """Return the factor between two vectors; None if one is no multiple of the other."""
    norm = float(expected.dot(expected)) if found.shape == expected.shape else 0.0
    factor = float(found.dot(expected)) / norm if norm else math.nan
    return factor if math.isfinite(factor) and gap_between(found, factor * expected) <= near else None


@dataclass(frozen=True)
class Computed:
    """What one process makes of some samples, from the state before the step."""

    gradients: Tensors
    loss: float


def joined(collate: Callable[[Any], Any], taken: Sequence[Taken], order: Sequence[int] | None = None) -> Any:
    """Return one batch of the samples of several, collated by the user's `collate_fn`, in another order if given.

    Raises:
        Refused: If their samples are not known.
    """
    return _joined(collate, [each.parts for each in taken], [each.size for each in taken], order)


def _joined(collate: Callable[[Any], Any], parts: Sequence[Any], sizes: list[int], order: Sequence[int] | None) -> Any:
    first = parts[0]
    if not isinstance(first, Part):
        columns = zip(*map(items_of, parts), strict=True)
        return rebuilt_of(first, [_joined(collate, column, sizes, order) for column in columns])
    without = [part for part in parts if part.samples is None]
    if not without:
        samples = [sample for part in parts for sample in pickle.loads(part.samples)]
        return collate(samples if order is None else [samples[index] for index in order])
    if any(part.batch is None for part in parts):
        raise Refused("a batch cannot be copied")
    batches = [pickle.loads(part.batch) for part in parts]
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
    lr_scale = 1.0

    @property
    def global_batch_size(self) -> int:
        return len(self.twin.all_keys)

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


class _State:
    """Buffers and attributes of a module, as they are now."""

    def __init__(self, module: LightningModule) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._attributes = [(part, dict(vars(part))) for part in module.modules()]

    def restore(self, *, exactly: bool) -> None:
        """Restore both; `exactly` without attributes that are new."""
        for buffer, before in self._buffers:
            buffer.data.copy_(before)
        for part, attributes in self._attributes:
            new = vars(part).keys() - attributes.keys() if exactly else ()
            for name in new:
                del vars(part)[name]
            vars(part).update(attributes)


class Twin(Recorder):
    """Trains on what the ranks took, and stops where it differs.

    Args:
        tapes: What the ranks recorded.
        tolerance: The relative difference that counts as equal.
        double: Whether to compute in float64.
        windowed: Whether to accumulate the micro-batches of a window, instead of joining them.
        explain: Called with the step where the gradient differs, to set `explanation`: a cause, and the detail.

    Attributes:
        differing: The stage and the step that differ, and how.
        gradients: The relative difference of the reduced gradient by parameter, for every step.
        reduced: The run's gradient of the step that differs.
        expected: That of one process.
        one_process: What one process reads in an epoch.
    """

    def __init__(
        self,
        tapes: Sequence[Tape],
        tolerance: float,
        *,
        double: bool,
        windowed: bool = False,
        explain: Callable[[Twin, int], None] | None = None,
    ) -> None:
        super().__init__(len(tapes[0].steps), double=double)
        self.tapes, self.tolerance, self.windowed, self.explain = tapes, tolerance, windowed, explain
        self.facts = tapes[0].facts
        self.differing: tuple[str, int, Difference] | None = None
        self.explanation = ("unexplained", "")
        self.gradients: dict[str, list[float]] = {}
        self.traces: dict[int, list[Any]] = {}
        self.expected, self.reduced = Tensors(), Tensors()
        self.one_process = Read()
        self.raw: Any = None
        self.collate: Callable[[Any], Any] = lambda samples: samples
        self.rest: tuple[Any, ...] = (0,)
        self.batches = [batch for step in range(self.most) for batch in self._of_step(step)]
        self._arrived = self._compared = 0

    def _of_step(self, step: int) -> Iterator[tuple[int, list[Taken], list[tuple[int, ...]]]]:
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
            keys: list[tuple[int, ...]] = [(index, rank, i) for index, rank, each in counted for i in range(each.size)]
            yield step, [taken for *_, taken in counted], keys

    @property
    def length(self) -> float:
        """Batches of an epoch; infinite where that is not known."""
        batches = self.facts.epoch_batches / (1 if self.windowed else self.facts.accumulation)
        return math.ceil(batches) if math.isfinite(batches) else batches

    def stand_in(self, given: Any) -> Any:
        """Return what one process reads in place of the user's loaders: their attributes, and the ranks' samples."""
        self.raw, loader = given, loaders_in(given)[0]
        self.collate = getattr(loader, "collate_fn", self.collate)
        methods = {
            "__iter__": lambda _: self._epoch(),
            "__len__": lambda _: self._sized(),
            "__getattr__": lambda _, name: getattr(loader, name),
        }
        return type(type(loader).__name__, (), methods)()

    def _sized(self) -> int:
        if not math.isfinite(self.length):
            raise TypeError("the loader has no length")
        return int(self.length)

    def _epoch(self) -> Iterator[Any]:
        """Yield the batches of an epoch, and more for a run that ended within it."""
        steps, first = self.tapes[0].steps, self._arrived
        for step, taken, _ in self.batches[first:]:
            if steps[step].epoch != steps[self.batches[first][0]].epoch:
                return
            yield joined(self.collate, taken)
        while True:
            yield joined(self.collate, self.batches[-1][1])

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        state = random_state()
        self.one_process = self.loading.read(self.raw)
        restore_random_state(state)
        self._stop_at("initial weights", 0, difference(self.tapes[0].initial, self.tape.initial, self.tolerance)[0])

    def _stop_at(self, stage: str, position: int, found: Difference | None) -> None:
        if found is not None:
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
        self._before = _State(self.module)
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
        own = [dict(group) for group in optimizer.param_groups]
        if self.facts.scales_rates:
            update = self.tapes[0].steps[len(self.tape.steps)].updates[len(self.updates)]
            for group, options in zip(optimizer.param_groups, update.options, strict=True):
                known = options.keys() & group.keys()
                group.update({name: options[name] for name in known if not isinstance(group[name], Tensor)})
        try:
            yield
        finally:
            for group, options in zip(optimizer.param_groups, own if self.facts.scales_rates else [], strict=False):
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
        if found is not None and self.explain is not None:
            with self.mode.pausing():
                self.explain(self, position)
        self._stop_at("reduced gradient", position, found)

    def _compare_closed(self) -> None:
        """Compare what the last step left behind."""
        if self._compared < len(self.tape.steps):
            self._compared = len(self.tape.steps)
            for stage, found in self._differences(self._compared - 1):
                self._stop_at(stage, self._compared - 1, found)

    def _differences(self, position: int) -> Iterator[tuple[str, Difference | None]]:
        mine, run = self.tape.steps[position], self.tapes[0].steps[position]
        if len(mine.updates) != len(run.updates):
            raise Refused("one process takes another number of optimizer steps in a batch")
        for own, other in zip(mine.updates, run.updates, strict=True):
            yield "clipped gradient", difference(other.used, own.used, self.tolerance)[0]
            for group, options in zip(own.options, other.options, strict=False):
                for name in (name for name in options if name in group):
                    yield "optimizer options", _between_options(name, options[name], group[name], self.tolerance)
        before = self.tape.steps[position - 1].weights if position else self.tape.initial
        moved = {name: tensor - before[name] for name, tensor in mine.weights.items() if name in before}
        of_run = {name: run.weights[name] - before[name] for name in moved if name in run.weights}
        for update in mine.updates:  # an optimizer may make much of what is zero but for rounding
            largest = max(map(_size, update.used.values()), default=0.0)
            for name, used in update.used.items():
                tiny = (used.abs() < 1e-10 * largest) & ((used != 0) | (0 < _size(used) < 1e-10 * largest))
                if name in of_run and used.shape == of_run[name].shape:
                    of_run[name] = torch.where(tiny, moved[name], of_run[name])
        yield "weights", difference(of_run, moved, self.tolerance, noise=mine.weights)[0]
        yield "buffers", difference(run.buffers, mine.buffers, self.tolerance)[0]

    def compute(
        self, taken: Sequence[Taken], keys: Sequence[tuple[int, ...]], order: Sequence[int] | None = None
    ) -> Computed:
        """Return what one process makes of some samples, from the state before the current step."""
        module, outside, all_keys, trace = self.module, random_state(), self.all_keys, self.mode.trace
        now = _State(module)
        parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
        try:
            self._before.restore(exactly=False)
            vars(module).update(log=_nothing, log_dict=_nothing)
            batch = self.converts(joined(self.collate, taken, order))
            self.begin(list(keys) if order is None else [keys[index] for index in order])
            self.mode.paused = False
            batch = getattr(module, BEFORE_TRANSFER)(batch, dataloader_idx=0)
            batch = self.trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            with torch.enable_grad(), self.plugin.train_step_context():
                self._reseed()
                loss, _ = loss_of(self.plain(type(module).training_step(module, batch, *self.rest)))
            known: Any = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            found = {name: sketch(each) for name, each in zip(parameters, known, strict=True) if each is not None}
            return Computed(found, float(loss.detach()))
        finally:
            now.restore(exactly=True)
            restore_random_state(outside)
            self.mode.keys = self.all_keys = all_keys
            self.mode.trace, self.mode.paused = trace, True


def _nothing(*_: Any, **__: Any) -> None:
    """Log nothing."""


def _between_options(name: str, found: Any, expected: Any, tolerance: float) -> Difference | None:
    """Return how an option of the optimizer differs; numbers up to the tolerance, else names only."""
    if isinstance(found, (tuple, list)) and isinstance(expected, (tuple, list)) and len(found) == len(expected):
        pairs = (_between_options(name, *pair, tolerance) for pair in zip(found, expected, strict=True))
        return next(filter(None, pairs), None)
    if isinstance(found, (int, float)) and isinstance(expected, (int, float)):
        if math.isclose(found, expected, rel_tol=tolerance, abs_tol=1e-300):
            return None
        relative = abs(found - expected) / abs(expected) if expected else math.inf
        return Difference(name, relative, found, expected, found / expected if expected else None)
    differs = type(found) is type(expected) and isinstance(found, (str, type(None))) and found != expected
    return Difference(name, math.nan, math.nan, math.nan) if differs else None


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
    trainer = _TwinTrainer(
        strategy=strategy,
        accelerator=device,
        callbacks=[*callbacks, twin],
        plugins=[twin.plugin],
        accumulate_grad_batches=twin.facts.accumulation if twin.windowed else 1,
        **{name: value for name, value in options.items() if name not in _OF_SEVERAL},
    )
    trainer.estimated_steps = twin.facts.estimated_steps
    given = {name: twin.stand_in(each) if name == "train_dataloaders" else each for name, each in data.items()}
    for owner in (module, given.get("datamodule")):
        if isinstance(owner, (LightningModule, LightningDataModule)) and is_overridden("train_dataloader", owner):
            own = owner.train_dataloader
            vars(owner)["train_dataloader"] = functools.wraps(own)(lambda own=own: twin.stand_in(own()))
    with twin.watching(module), _world_of_one():
        trainer.fit(module, **given)
