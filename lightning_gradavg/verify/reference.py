"""The reference: the same module on one process, given what the ranks trained on.

It trains with the user's Trainer on one process, one step of the run after the other, and each stage starts from the
run's own result of the stage before: `training_step` from the run's weights, buffers, attributes and random numbers,
clipping and the optimizer from the run's reduced gradient. So a difference is seen in the stage that makes it and in
no other, training does not amplify rounding, and if every step is equal, so is the run.

Everything about a gradient is told by one mechanism, the split of a batch into its parts (`replay`): of the global
batch into the micro-batches of the ranks; where that does not tell what the loss is, the same with one thing taken
away, such as the statistics of the batch in batch norm; and of every micro-batch into two. The whole is computed
twice from one state: where the two differ, the step keeps something that cannot be put back, and nothing is blamed on
the run.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.data import RandomSampler
from typing_extensions import override

from lightning_gradavg.lightning_internals import BEFORE_TRANSFER, without_gradient_hooks
from lightning_gradavg.replicas.outputs import join_outputs
from lightning_gradavg.tree import slice_batch
from lightning_gradavg.verify.compare import Tolerance, flattened, is_rounding
from lightning_gradavg.verify.record import (
    Call,
    Loaded,
    Recorder,
    Step,
    Tape,
    Tensors,
    among,
    live_gradients,
    options_of,
    patched,
    sketches,
    weights_of,
)
from lightning_gradavg.verify.replay import (
    MisalignedError,
    Recorded,
    Replay,
    Replayed,
    Replays,
    Split,
    itself,
    tensors_in,
)
from lightning_gradavg.verify.state import (
    UnknownSamplesError,
    compute_as,
    digest,
    digests,
    hidden_state,
    join,
    known_samples,
    module_state,
    set_module_state,
)

__all__ = ["Act", "Enough", "Reference", "Stream", "read_stream", "record_reference"]

_JOINED = 8
"""Micro-batches of a window that are computed as one batch, at most: what holds for them holds for all."""


@dataclass
class Act:
    """What one batch of the reference reproduces, and what it found out about it."""

    steps: tuple[int, ...]  # one, or those that manual optimization takes in a batch
    epoch: int
    calls: tuple[Call, ...]  # every rank's whose samples count, in the order of one process
    last: Call  # that of rank 0 in which the last of the steps is taken
    samples: list[bytes]  # digests of what the calls read
    parts: Sequence[Replay] = ()  # all calls as the ranks computed them
    split: Split = field(default_factory=Split)  # the global batch and the ranks' micro-batches, or the first of them
    without: dict[str, Split] = field(default_factory=dict)  # with something taken away, by the cause that this shows
    halves: list[Split] = field(default_factory=list)  # each micro-batch in two parts, where the global batch is silent
    unsteady: str = ""  # what changes from one computation to the next
    state: dict[str, Any] = field(default_factory=dict)  # of the module after the global batch, where that is known
    state_of_rank: dict[str, Any] = field(default_factory=dict)  # after rank 0's last call alone


def _acts_of(tapes: Sequence[Tape]) -> list[Act]:
    """Return what one process has to do to take the steps that all ranks took."""
    first, taken = tapes[0], range(min(len(tape.steps) for tape in tapes))
    windows = groupby(taken, key=lambda position: first.steps[position].batches)
    return [_act_of(tapes, tuple(steps), *window) for window, steps in windows]


def _act_of(tapes: Sequence[Tape], steps: tuple[int, ...], start: int, stop: int) -> Act:
    """Return the act of a window: its calls by loader batch, then by rank, then by the cuts of a rank's part."""
    facts = tapes[0].facts
    within = [[call for call in tape.calls if start <= call.batch < stop] for tape in tapes]
    files = {call.batch: call.files for call in reversed(within[0])}
    calls = [
        replace(call, samples=known_samples(call.args[0], facts.loader_size), files=files[call.batch])
        for call in chain.from_iterable(within)
        if call.counts
    ]
    read = sorted({(call.rank, call.batch) for call in calls})
    return Act(
        steps,
        tapes[0].batches[stop - 1].epoch,
        tuple(sorted(calls, key=lambda call: ((call.batch - start) // facts.told.micro_batches, call.rank))),
        within[0][-1],
        [sample for rank, batch in read for sample in tapes[rank].batches[batch].samples],
    )


@dataclass
class Reference:
    """What one process recorded."""

    initial: Tensors  # its own weights, or the run's where the module is the run's own
    acts: list[Act] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)  # as one process takes them


class _FixedStatistics(TorchFunctionMode):
    """Has batch norm normalize by its running statistics, or leave its input alone where it has none.

    Any statistics that do not depend on the batch will do to tell whether the batch's own are what mixes samples.
    """

    _NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.batch_norm:
            return func(*args, **kwargs)
        given = {**dict(zip(self._NAMES, args, strict=False)), **kwargs, "training": False}
        for number, name in enumerate(("running_mean", "running_var")):
            known = given.get(name)
            fixed = given["input"].new_full(given["input"].shape[1:2], number) if known is None else known.clone()
            given[name] = fixed
        return func(**given)


_TAKEN_AWAY: Mapping[str, Callable[[LightningModule], AbstractContextManager[Any]]] = {
    "batch norm": lambda _: _FixedStatistics(),
    "gradient hooks": without_gradient_hooks,
}
"""What is computed without, where the global batch does not tell what the loss is: by the cause that this shows."""


class _Acts:
    """Yields the numbers of the acts, one epoch of the run after the other, and says that it is as long as its loader.

    Schedules ask for that.
    """

    def __init__(self, acts: Sequence[Act], length: float) -> None:
        epochs = sorted({act.epoch for act in acts})
        self._epochs = [[index for index, act in enumerate(acts) if act.epoch == epoch] for epoch in epochs]
        self._length = length

    def __iter__(self) -> Iterator[int]:
        yield from self._epochs.pop(0) if self._epochs else []

    def __len__(self) -> int:
        if math.isinf(self._length):
            raise TypeError("a stream has no length")
        return int(self._length)


_Again: TypeAlias = Callable[[], tuple[Replay, Any]]
"""Computes once more what the reference goes on from: it leaves in the module what one process would have."""


class _ReferenceStrategy(SingleDeviceStrategy):
    """One process that takes every step of a run from where the run took it.

    Args:
        tapes: What the ranks recorded.
        device: Where to compute.
        tolerance: Within which a combination of parts is the whole.
        handed_over: Whether the module is the run's own, with the attributes that it had before training.
        progress: Is told what is done.
    """

    def __init__(
        self,
        tapes: Sequence[Tape],
        device: torch.device,
        tolerance: Tolerance,
        *,
        handed_over: bool,
        progress: Callable[[str], None],
    ) -> None:
        super().__init__(device=device)
        self.tapes, self.tolerance, self.handed_over, self.progress = tapes, tolerance, handed_over, progress
        self.facts, self.acts, self.replays = tapes[0].facts, _acts_of(tapes), Replays(self)
        self.found = Reference(tapes[0].initial if handed_over else {})
        self.act = self.acts[0]
        self._taken = 0  # steps in this call of training_step

    @property
    def module(self) -> LightningModule:
        """The module in training."""
        return self.replays.module

    @override
    def setup(self, trainer: Trainer) -> None:
        if self.handed_over:
            # Such as a learning rate that was found between the copy and the first step.
            set_module_state(self.module, self.tapes[0].calls[0].state)
        super().setup(trainer)
        vars(self.precision_plugin).update(scaler=None)  # the run's gradients are taken unscaled
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # what a plateau is watched on may not be logged here

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return the batch of the act with the number `batch`; hooks on batches ran in the run already."""
        self.act, self._taken = self.acts[batch], 0
        self.replays.steps = [self.tapes[0].steps[position] for position in self.act.steps]
        self.progress(f"reference: step {self.act.steps[0] + 1} of {len(self.tapes[0].steps)}")
        return self.replays.arguments(self.act.last)[0]

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.found.initial = self.found.initial or weights_of(self.module)
        with _silent(self.module):
            first, again = self._examine(self.act)
        # What this one logs and leaves in the module stays; and it is the second from one state.
        replay, output = again()
        self.act.unsteady = self._unsteady(first, replay, again)
        if self.act.split.has_whole or self.facts.told.replicas is not None:
            self.act.state = replay.state
        self.found.acts.append(self.act)
        if self.module.automatic_optimization:
            loss = torch.tensor(sum(replay.losses.values()), device=self.root_device)
            return {**output, "loss": loss} if isinstance(output, Mapping) else loss
        self.replays.restore(self.act.last)
        return super().training_step(*self.replays.arguments(self.act.last))

    def _run(self, call: Call, end: Callable[[Any], Any] = itself) -> Replay:
        return self.replays.run(call, Recorded(), end)[0]

    def _examine(self, act: Act) -> tuple[Replay, _Again]:
        """Compute an act in parts and whole, and further where these do not tell what the loss is."""
        calls, facts, replicas, module = act.calls, self.facts, self.facts.told.replicas, cast("Any", self.module)
        # The loss of outputs that have none of their own is that of all of them together.
        of_part, end = (_nothing, module.training_step_end) if facts.step_end else (itself, itself)
        act.parts = parts = [self._run(call, of_part) for call in calls]
        of_first = [part.state for part, call in zip(parts, calls, strict=True) if call.rank == 0]
        act.state_of_rank = [{}, *of_first][-1]
        # A loss that reaches across the ranks, or batch norm over all, is told by the whole window alone.
        chosen = len(calls) if facts.whole_only or facts.statistics else _JOINED
        act.split = split = Split(calls[:chosen], parts[:chosen], parts[:chosen])
        if facts.step_end and replicas is not None:
            gathered = self._again(calls[0], Recorded, self._gathering(calls, end))
            split.whole, _ = gathered()
            return split.whole, gathered
        first, again = parts[0], self._again(calls[0], partial(Replayed, [parts[0].mode.draws]), of_part)
        whole = self._complete(split, None, end)
        if whole is not None and replicas is None:
            draws = [part.mode.draws for part in split.parts]
            first, again = split.whole, self._again(whole, partial(Replayed, draws), end)
        if not facts.whole_only and not split.tells(self.tolerance):
            self._look_closer(act)
        if not all(split.right(key, self.tolerance).keys() - {"terms"} for key in parts[0].gradients):
            self._probe_state(split)
        return first, again

    def _again(self, call: Call, mode: Callable[[], Recorded], end: Callable[[Any], Any]) -> _Again:
        return lambda: self.replays.run(call, mode(), end)

    def _look_closer(self, act: Act) -> None:
        """Compute an act with something taken away, and each of its parts in two."""
        calls = act.split.calls
        for cause, take_away in _TAKEN_AWAY.items() if act.split.has_whole else ():
            with take_away(self.module):
                act.without[cause] = self._split(calls)
            if act.without[cause].tells(self.tolerance):
                return
        act.halves = [self._split(_halves(call), call) for call in calls if (call.samples or 0) > 1]

    def _split(self, calls: Sequence[Call], whole: Call | None = None) -> Split:
        """Compute parts, and their whole: that of all their samples where it is not given."""
        split = Split(calls)
        with _noting_problems(split):
            split.parts = split.common = [self._run(call) for call in calls]
            self._complete(split, whole)
        return split

    def _complete(self, split: Split, whole: Call | None, end: Callable[[Any], Any] = itself) -> Call | None:
        """Compute the whole of a split, and the parts with what it has in common for them; None where it cannot be."""
        mode = Replayed([part.mode.draws for part in split.parts])
        with _noting_problems(split):
            whole = whole or self._joined(split.calls)
            split.whole, _ = self.replays.run(whole, mode, end)
            mode.require_all()
            self._align(split, whole, mode.shared)
            return whole
        return None

    def _joined(self, calls: Sequence[Call]) -> Call:
        sizes = [call.samples for call in calls if call.samples is not None]
        if len(sizes) < len(calls):
            kind = type(calls[0].args[0]).__name__
            raise UnknownSamplesError(f"which samples a batch of type {kind} holds is not known")
        rest = calls[0] if self.module.automatic_optimization else self.act.last
        batch = join([call.args[0] for call in calls], sizes)
        return replace(calls[0], args=(batch, *rest.args[1:]), samples=sum(sizes))

    def _align(self, split: Split, whole: Call, shared: set[int]) -> None:
        """Compute the parts with what belongs to no sample as the whole has it: random numbers, and the module's state.

        What they compute otherwise with a state of their own is what each part keeps for itself.
        """
        first, draws = split.calls[0], split.parts[0].mode.draws

        def computed(calls: Sequence[Call]) -> list[Replay]:
            modes = [Replayed([part.mode.draws], shared, draws) for part in split.parts]
            return [self.replays.run(call, mode)[0] for call, mode in zip(calls, modes, strict=True)]

        host = first.random[0][1:]
        calls = [replace(call, random=((call.random[0][0], *host), call.random[1])) for call in split.calls]
        if shared or any(part.host for part in split.parts):
            split.common = computed(calls)
        names = _differing([whole, *split.calls])
        if names:
            arguments = whole.args[1:]
            from_first = [
                replace(call, args=(call.args[0], *arguments), state=first.state, files=first.files) for call in calls
            ]
            own, split.common = split.common, computed(from_first)
            split.own = () if all(map(self._alike, own, split.common)) else names

    def _alike(self, one: Replay, other: Replay) -> bool:
        return all(
            is_rounding(flattened(other.gradient(key), found), flattened(found, found), (), self.tolerance)
            for key, found in one.gradients.items()
        )

    def _probe_state(self, split: Split) -> None:
        """Find out whether the loss depends on what each part changes for itself, such as a moving average of it.

        Its average over all samples then makes the whole's gradient one with shares of its own, though no term has any.
        """
        call, first, other = split.calls[0], split.parts[0], split.parts[-1].state
        moved = {
            name: other.get(name) for name, value in first.state.items() if digest(value) != digest(other.get(name))
        }
        if moved and split.has_whole and not split.own:
            probe, _ = self.replays.run(replace(call, state={**call.state, **moved}), Replayed([first.mode.draws]))
            split.own = () if self._alike(first, probe) else tuple(moved)

    def _gathering(self, calls: Sequence[Call], end: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what makes the loss of all replicas' outputs, of which the first is computed."""

        def gather(first: Any) -> Any:
            outputs, kept = [first], module_state(self.module)
            for call in calls[1:]:
                self.replays.restore(call)
                outputs.append(super(_ReferenceStrategy, self).training_step(*self.replays.arguments(call)))
            set_module_state(self.module, kept)  # the buffers of replica 0 are those of the module
            return end(join_outputs(outputs, self.root_device))

        return gather

    def _unsteady(self, one: Replay, other: Replay, again: _Again) -> str:
        """Return what changed between two computations from one state."""
        if self._alike(one, other):
            return ""
        before = hidden_state(self.module)
        again()
        changed = [name for name, found in hidden_state(self.module).items() if before.get(name) != found]
        return ", ".join(changed) or "something that is neither in a buffer nor in an attribute"

    @property
    def _position(self) -> int:
        return self.act.steps[min(self._taken, len(self.act.steps) - 1)]

    @override
    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the run's gradient for that of the loss, and run the hooks around the backward."""
        if self.replays.replaying is not None:
            self.replays.manual_backward(closure_loss, *args, **kwargs)
            return closure_loss
        self.precision_plugin.pre_backward(closure_loss, self.module)
        self._set_gradients(self.tapes[0].steps[self._position])
        return self.precision_plugin.post_backward(closure_loss, self.module)

    def _set_gradients(self, step: Step) -> None:
        full = tensors_in(step.file)
        for name, parameter in self.module.named_parameters():
            if name in step.reduced:
                # A copy, because clipping works in place.
                parameter.grad = full[name].to(parameter.device, parameter.dtype, copy=True)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self.replays.replaying is not None:
            closure()
            self.replays.manual_step(optimizer)
            return None
        position, own = self._position, options_of(optimizer)
        step = self.tapes[0].steps[position]
        if step.backward is None:
            self._set_gradients(step)
        # With the run's options: what is compared is the update, and the options are compared by themselves.
        _set_options(optimizer, step.groups)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        _set_options(optimizer, own)
        self._taken += 1
        clipped = sketches(among(live_gradients(self.module), step.reduced))
        self.found.steps[position] = replace(step, groups=own, clipped=clipped, after=weights_of(self.module))
        return result


def _set_options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, options in zip(optimizer.param_groups, groups, strict=False):
        group.update(copy.deepcopy(options))


def _nothing(output: Any) -> None:
    """Stand for the loss of outputs that have none of their own."""


def _halves(call: Call) -> list[Call]:
    """Return a call's samples as two; uneven, so that a mean over samples is none over the two."""
    size = call.samples or 0
    cut = max(1, size // 3)
    return [
        replace(call, args=(slice_batch(call.args[0], start, stop), *call.args[1:]), samples=stop - start)
        for start, stop in ((0, cut), (cut, size))
    ]


def _differing(calls: Sequence[Call]) -> tuple[str, ...]:
    """Return the names of what calls start from, and do not have alike."""
    starts = [{**call.state, "the weights": call.files, "batch_idx": call.args[1:]} for call in calls]
    names = [*sorted({name for call in calls for name in call.state}), "the weights", "batch_idx"]
    return tuple(name for name in names if len({digest(start.get(name)) for start in starts}) > 1)


@contextmanager
def _noting_problems(split: Split) -> Iterator[None]:
    """Have what fails within make no whole, and say why."""
    try:
        yield
    except (UnknownSamplesError, MisalignedError) as error:
        split.whole, split.problem = Replay(), str(error)
    except Exception as error:  # noqa: BLE001  # the user's code, on a batch that the run does not have
        text = f"training_step fails on another batch than the run's: {type(error).__name__}: {error}"
        split.whole, split.problem = Replay(), text


@contextmanager
def _silent(module: Any) -> Iterator[None]:
    module.log = module.log_dict = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del module.log, module.log_dict


@contextmanager
def _world_of_one() -> Iterator[None]:
    """Give the code of the user a process group to ask, and keep Lightning's advice back."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings(), suppress(Enough):
            warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
            yield
    finally:
        dist.destroy_process_group()


class _ReferenceTrainer(Trainer):
    estimated_steps: float | None = None

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        return super().estimated_stepping_batches if self.estimated_steps is None else self.estimated_steps


_OF_SEVERAL = {
    *("strategy", "devices", "num_nodes", "accelerator", "callbacks", "accumulate_grad_batches"),
    *("limit_train_batches", "overfit_batches", "sync_batchnorm", "use_distributed_sampler", "fast_dev_run"),
    *("max_steps", "max_time"),
}
"""Options of devices, windows and lengths, which one process has otherwise."""


def record_reference(
    tapes: Sequence[Tape],
    module: LightningModule,
    options: Mapping[str, Any],
    *,
    tolerance: Tolerance,
    datamodule: Any = None,
    device: str = "cpu",
    handed_over: bool = False,
    progress: Callable[[str], None] = print,
) -> Reference:
    """Run the reference of a run and return what it found.

    Args:
        tapes: What the ranks recorded, in rank order.
        module: A module as the ranks had it before training.
        options: The options of the run's Trainer.
        tolerance: What rounding stays below.
        datamodule: The data module whose attributes the module may read through its Trainer; its loaders are not used.
        device: The type of the device to compute on.
        handed_over: Whether the module comes from the run itself, and was not built anew.
        progress: Is told what is done.
    """
    facts = tapes[0].facts
    compute_as(facts.settings)
    strategy = _ReferenceStrategy(tapes, torch.device(device), tolerance, handed_over=handed_over, progress=progress)
    dropped = (GradientAccumulationScheduler, Recorder)
    callbacks = [one for one in options.get("callbacks") or [] if not isinstance(one, dropped)]
    kept = {name: value for name, value in options.items() if name not in _OF_SEVERAL}
    trainer = _ReferenceTrainer(strategy=strategy, accelerator=device, callbacks=callbacks, **kept)
    trainer.estimated_steps = facts.estimated_steps
    if datamodule is not None:
        trainer.datamodule = datamodule  # type: ignore[attr-defined]  # set by a connector
    restore = patched(type(module), BEFORE_TRANSFER, lambda original: _untouched)
    try:
        with _world_of_one():
            trainer.fit(module, _Acts(strategy.acts, facts.epoch_batches))
    finally:
        restore()
    return strategy.found


def _untouched(module: Any, batch: Any, dataloader_idx: int = 0) -> Any:
    # The number of an act. The user's hooks on batches ran in the run already.
    return batch


class Enough(Exception):  # noqa: N818  # no error: all that was asked for is there
    """Ends a run before its time, past everything that Lightning does at the end of an epoch."""


@dataclass(frozen=True)
class Stream:
    """What one process reads."""

    batches: Sequence[Loaded]
    shuffles: bool = False  # whether the loader deals the samples at random

    def samples(self, epoch: int | None = None) -> list[bytes]:
        """Return the samples of one epoch, or of all."""
        return [sample for batch in self.batches if epoch in (None, batch.epoch) for sample in batch.samples]


class _Reading(LightningModule):
    """Reads the training batches of a module, and trains nothing: no optimizer steps, and nothing of it is asked for.

    Args:
        module: The module, whose hooks that make data are called.
        batches: How many batches to read, at most.
    """

    def __init__(self, module: LightningModule, batches: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._batches, self.shuffles = batches, False
        self.stream: list[Loaded] = []
        for name in ("prepare_data", "setup", "train_dataloader"):
            if is_overridden(name, module):
                setattr(self, name, getattr(module, name))

    def read(self, batch: Any, **_: Any) -> Any:
        """Note a batch as the loader made it."""
        loader: Any = self.trainer.train_dataloader
        self.shuffles = isinstance(getattr(loader, "sampler", None), RandomSampler)
        self.stream.append(Loaded(self.trainer.current_epoch, digests(batch, getattr(loader, "batch_size", None))))
        if len(self.stream) >= self._batches:
            raise Enough
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Train nothing."""

    def configure_optimizers(self) -> None:
        """Step nothing."""


setattr(_Reading, BEFORE_TRANSFER, _Reading.read)

_OF_DATA = frozenset(["max_epochs", "reload_dataloaders_every_n_epochs", "overfit_batches", "precision", "logger"])


def read_stream(module: LightningModule, data: Mapping[str, Any], options: Mapping[str, Any], batches: int) -> Stream:
    """Return the first batches that one process trains on.

    Args:
        module: The module as before training. It is not trained.
        data: The arguments `train_dataloaders` or `datamodule` of `fit`, or none.
        options: The options of the run's Trainer.
        batches: How many batches to read, at most.
    """
    reading = _Reading(module, batches)
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    kept = {name: value for name, value in options.items() if name in _OF_DATA}
    module.trainer = Trainer(strategy=SingleDeviceStrategy(), accelerator="cpu", **{**kept, **quiet})
    with _world_of_one(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of a fit without optimizer
        module.trainer.fit(reading, **data)
    return Stream(reading.stream, reading.shuffles)
