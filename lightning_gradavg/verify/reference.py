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
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_gradavg.lightning_internals import BEFORE_TRANSFER, without_gradient_hooks
from lightning_gradavg.replicas.outputs import join_outputs
from lightning_gradavg.tree import slice_batch
from lightning_gradavg.verify.compare import Tolerance, flattened, is_rounding
from lightning_gradavg.verify.noise import MisalignedError, Recorded, Replayed
from lightning_gradavg.verify.record import (
    Recorder,
    Step,
    Tape,
    Tensors,
    live_gradients,
    options_of,
    patched,
    sketches,
)
from lightning_gradavg.verify.replay import Act, Piece, Replay, Replays, Split, acts_of
from lightning_gradavg.verify.rows import UnknownSamplesError, digest, join
from lightning_gradavg.verify.state import hidden_state, module_state, set_module_state, torch_settings

__all__ = ["Enough", "Examined", "Reference", "StepOfReference", "record_reference", "world_of_one"]

_JOINED = 8
"""Micro-batches of a window that are computed as one batch, at most: what holds for them holds for all."""


@dataclass
class StepOfReference:
    """What the reference has to say about an optimizer step, in sketches; no weights where it took none."""

    groups: list[dict[str, Any]]  # the options of its own optimizer
    clipped: Tensors = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)


@dataclass
class Examined:
    """What the reference found out about an act."""

    act: Act
    parts: Sequence[Replay]  # all its pieces as the ranks computed them
    split: Split  # the global batch and the ranks' micro-batches, or the first of them
    without: dict[str, Split] = field(default_factory=dict)  # with something taken away, by the cause that this shows
    halves: list[Split] = field(default_factory=list)  # each micro-batch in two parts, where the global batch is silent
    unsteady: str = ""  # what changes from one computation to the next
    state: dict[str, Any] = field(default_factory=dict)  # of the module after the global batch, where that is known
    state_of_rank: dict[str, Any] = field(default_factory=dict)  # after rank 0's last call alone


@dataclass
class Reference:
    """What one process recorded."""

    initial: Tensors = field(default_factory=dict)  # its own weights; empty where the module is the run's own
    acts: list[Examined] = field(default_factory=list)
    steps: dict[int, StepOfReference] = field(default_factory=dict)


class _FixedStatistics(TorchFunctionMode):
    """Has batch norm normalize by its running statistics, or leave its input alone where it has none.

    Any statistics that do not depend on the batch will do to tell whether the batch's own are what mixes samples.
    """

    _NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**dict(zip(self._NAMES, args, strict=False)), **(kwargs or {})}
        if func is not nn.functional.batch_norm:
            return func(*args, **(kwargs or {}))
        zeros = given["input"].new_zeros(given["input"].shape[1])
        mean, var = given.get("running_mean"), given.get("running_var")
        return func(
            **{
                **given,
                "training": False,
                "running_mean": zeros if mean is None else mean.clone(),
                "running_var": zeros + 1 if var is None else var.clone(),
            }
        )


_TAKEN_AWAY: Mapping[str, Callable[[LightningModule], AbstractContextManager[Any]]] = {
    "batch norm": lambda _: _FixedStatistics(),
    "gradient hooks": without_gradient_hooks,
}
"""What is computed without, where the global batch does not tell what the loss is: by the cause that this shows."""


class _Acts(IterableDataset[int]):
    """Yields the numbers of the acts, one epoch of the run after the other."""

    def __init__(self, acts: Sequence[Act]) -> None:
        epochs = sorted({act.epoch for act in acts})
        self._epochs = [[index for index, act in enumerate(acts) if act.epoch == epoch] for epoch in epochs]

    def __iter__(self) -> Iterator[int]:
        return iter(self._epochs.pop(0) if self._epochs else [])


class _Loader(DataLoader[int]):
    """Says that it is as long as the run's, which schedules ask for."""

    def __init__(self, acts: Sequence[Act], length: float) -> None:
        super().__init__(_Acts(acts), batch_size=None, collate_fn=_itself)
        self._length = length

    def __len__(self) -> int:
        if math.isinf(self._length):
            raise TypeError("a stream has no length")
        return int(self._length)


def _itself(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class _Last:
    """The replay that the reference goes on from: what it leaves in the module is what one process would have."""

    replay: Replay
    again: Callable[[], tuple[Replay, Any]]


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
        self.facts, self.acts, self.found = tapes[0].facts, acts_of(tapes), Reference()
        self.replays = Replays(tapes, self)
        self.act = self.acts[0]
        self._backwards = self._taken = 0  # in this call of training_step

    @property
    def module(self) -> LightningModule:
        """The module in training."""
        return self.replays.module

    @override
    def setup(self, trainer: Trainer) -> None:
        if self.handed_over:
            # Such as a learning rate that was found between the copy and the first step.
            set_module_state(self.module, self.tapes[0].state_at(0, 0))
        super().setup(trainer)
        vars(self.precision_plugin).update(scaler=None)  # the run's gradients are taken unscaled
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # what a plateau is watched on may not be logged here

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return the batch of the act with the number `batch`; hooks on batches ran in the run already."""
        self.act = self.acts[batch]
        self.progress(f"reference: step {self.act.steps[0] + 1} of {len(self.tapes[0].steps)}")
        return self._on_device(self.act.last)[0]

    def _on_device(self, piece: Piece) -> Any:
        """Return copies of the arguments, because a training step may change its batch."""
        return move_data_to_device(copy.deepcopy(piece.args), self.root_device)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.found.initial or self.handed_over):
            self.found.initial = sketches(dict(self.module.named_parameters()))
        with _silent(self.module):
            examined, last = self._examine()
        # What this one logs and leaves in the module stays; and it is the second from one state.
        replay, output = last.again()
        examined.unsteady = self._unsteady(last, replay)
        if examined.split.has_whole or self.facts.told.replicas is not None:
            examined.state = replay.state
        self.found.acts.append(examined)
        self._backwards = self._taken = 0
        if self.module.automatic_optimization:
            loss = torch.tensor(sum(replay.losses.values()), device=self.root_device)
            return {**output, "loss": loss} if isinstance(output, Mapping) else loss
        self.replays.restore(self.act.last)
        return super().training_step(*self._on_device(self.act.last))

    @property
    def _step(self) -> tuple[int, Step]:
        """The step of the run that is next, and its position."""
        position = self.act.steps[min(self._taken, len(self.act.steps) - 1)]
        return position, self.tapes[0].steps[position]

    def _run(self, piece: Piece, mode: Recorded | None = None, **options: Any) -> Replay:
        steps = [self.tapes[0].steps[position] for position in self.act.steps]
        return self.replays.run(piece, mode, steps=steps, **options)[0]

    def _last(self, replay: Replay, piece: Piece, draws: Sequence[Any] = (), **options: Any) -> _Last:
        steps = [self.tapes[0].steps[position] for position in self.act.steps]

        def again() -> tuple[Replay, Any]:
            return self.replays.run(piece, Replayed(draws) if draws else None, steps=steps, **options)

        return _Last(replay, again)

    def _examine(self) -> tuple[Examined, _Last]:
        """Compute the act in parts and whole, and further where these do not tell what the loss is."""
        pieces, facts = self.act.pieces, self.facts
        end: Any = getattr(self.module, "training_step_end", None) if facts.step_end else _itself
        parts = [self._run(piece, Recorded(), end=_nothing if facts.step_end else _itself) for piece in pieces]
        of_first = [part.state for part, piece in zip(parts, pieces, strict=True) if piece.rank == 0]
        # A loss that reaches across the ranks, or batch norm over all, is told by the whole window alone.
        chosen = len(pieces) if facts.whole_only or facts.statistics else _JOINED
        split = Split(pieces[:chosen], parts[:chosen], parts[:chosen])
        found = Examined(self.act, parts, split, state_of_rank=of_first[-1] if of_first else {})
        last = self._last(parts[0], pieces[0], [parts[0].mode.draws], end=_nothing if facts.step_end else _itself)
        if facts.step_end and facts.told.replicas is not None:
            gathering = self._gathering(pieces, end)
            split.whole = self._run(pieces[0], end=gathering)
            return found, self._last(split.whole, pieces[0], end=gathering)
        whole = self._complete(split, None, end)
        if whole is not None and facts.told.replicas is None:
            last = self._last(split.whole, whole, [part.mode.draws for part in split.parts], end=end)
        if not facts.whole_only and not split.tells(self.tolerance):
            self._look_closer(found)
        if not all(split.right(key, self.tolerance)[0] for key in parts[0].gradients):
            self._probe_state(split)
        return found, last

    def _look_closer(self, found: Examined) -> None:
        """Compute an act with something taken away, and each of its parts in two."""
        pieces = found.split.pieces
        for cause, take_away in _TAKEN_AWAY.items() if found.split.has_whole else ():
            with take_away(self.module):
                found.without[cause] = self._split(pieces)
            if found.without[cause].tells(self.tolerance):
                return
        for piece in pieces:
            if piece.size is not None and piece.size > 1:
                cut = max(1, piece.size // 3)  # uneven, so that a mean over samples is none over the two
                found.halves.append(self._split([_part(piece, 0, cut), _part(piece, cut, piece.size)], piece))

    def _split(self, pieces: Sequence[Piece], whole: Piece | None = None) -> Split:
        """Compute parts, and their whole: that of all their samples where it is not given."""
        split = Split(pieces)
        try:
            split.parts = split.common = [self._run(piece, Recorded()) for piece in pieces]
            self._complete(split, whole)
        except Exception as error:  # noqa: BLE001  # the user's code, on fewer samples than in the run
            split.problem = f"training_step fails on {pieces[0].size} samples: {type(error).__name__}: {error}"
        return split

    def _complete(self, split: Split, whole: Piece | None, end: Callable[[Any], Any] = _itself) -> Piece | None:
        """Compute the whole of a split, and the parts with what it has in common for them."""
        first = split.pieces[0]
        mode = Replayed([part.mode.draws for part in split.parts])
        try:
            whole = whole or self._joined(split.pieces)
            split.whole = self._run(whole, mode, end=end)
            mode.require_all()
        except (UnknownSamplesError, MisalignedError) as error:
            split.whole, split.problem = Replay(), str(error)
            return None
        except Exception as error:  # noqa: BLE001  # the user's code, on a batch that the run does not have
            split.whole, split.problem = Replay(), f"training_step fails on it: {type(error).__name__}: {error}"
            return None
        alike = [replace(piece, args=(piece.args[0], *whole.args[1:])) for piece in split.pieces]
        names = self._differing(alike, split.pieces)
        if names:
            split.common = [
                self._run(piece, Replayed([part.mode.draws]), state=first)
                for piece, part in zip(alike, split.parts, strict=True)
            ]
            split.own = () if all(map(self._alike, split.parts, split.common)) else names
        if mode.shared or any(part.host for part in split.parts):
            draws = split.parts[0].mode.draws
            split.common = [
                self._run(piece, Replayed([part.mode.draws], mode.shared, draws), state=first, host=first)
                for piece, part in zip(alike, split.parts, strict=True)
            ]
        return whole

    def _joined(self, pieces: Sequence[Piece]) -> Piece:
        """Return the samples of all pieces as one."""
        sizes = [piece.size for piece in pieces if piece.size is not None]
        if len(sizes) < len(pieces):
            kind = type(pieces[0].args[0]).__name__
            raise UnknownSamplesError(f"which samples a batch of type {kind} holds is not known")
        rest = pieces[0] if self.module.automatic_optimization else self.act.last
        batch = join([piece.args[0] for piece in pieces], sizes)
        return replace(pieces[0], args=(batch, *rest.args[1:]), size=sum(sizes))

    def _differing(self, alike: Sequence[Piece], pieces: Sequence[Piece]) -> tuple[str, ...]:
        """Return the names of what the pieces start from, and do not have alike."""
        states = [self.tapes[piece.rank].state_at(piece.batch, piece.index) for piece in pieces]
        names = sorted({name for state in states for name in state})
        moved = len({piece.call.version for piece in pieces}) > 1
        numbered = any(digest(a.args[1:]) != digest(b.args[1:]) for a, b in zip(alike, pieces, strict=True))
        found = [name for name in names if len({digest(state.get(name)) for state in states}) > 1]
        return (*found, *["the weights"] * moved, *["batch_idx"] * numbered)

    def _alike(self, one: Replay, other: Replay) -> bool:
        return all(
            is_rounding(flattened(other.gradients.get(key, {}), found), flattened(found, found), (), self.tolerance)
            for key, found in one.gradients.items()
        )

    def _probe_state(self, split: Split) -> None:
        """Find out whether the loss depends on what each part changes for itself, such as a moving average of it.

        Its average over all samples then makes the whole's gradient one with shares of its own, though no term has any.
        """
        first, other = split.parts[0].state, split.parts[-1].state
        moved = {name: other.get(name) for name, value in first.items() if digest(value) != digest(other.get(name))}
        if moved and split.has_whole:
            probe = self._run(split.pieces[0], Replayed([split.parts[0].mode.draws]), moved=moved)
            split.own = split.own or (() if self._alike(split.parts[0], probe) else tuple(moved))

    def _gathering(self, pieces: Sequence[Piece], end: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what makes the loss of all replicas' outputs, of which the first is computed."""

        def gather(first: Any) -> Any:
            outputs, kept = [first], module_state(self.module)
            for piece in pieces[1:]:
                self.replays.restore(piece)
                outputs.append(super(_ReferenceStrategy, self).training_step(*self._on_device(piece)))
            set_module_state(self.module, kept)  # the buffers of replica 0 are those of the module
            return end(join_outputs(outputs, self.root_device))

        return gather

    def _unsteady(self, last: _Last, again: Replay) -> str:
        """Return what changed between two computations from one state."""
        if self._alike(last.replay, again):
            return ""
        before = hidden_state(self.module)
        last.again()
        changed = [name for name, found in hidden_state(self.module).items() if before.get(name) != found]
        return ", ".join(changed) or "something that is neither in a buffer nor in an attribute"

    @override
    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the run's gradient for that of the loss, and run the hooks around the backward."""
        if self.replays.replaying is not None:
            self.replays.manual_backward(closure_loss, *args, **kwargs)
            return closure_loss
        self.precision_plugin.pre_backward(closure_loss, self.module)
        if self._step[1].backward == self._backwards:
            self._set_gradients(self._step[1])
        self._backwards += 1
        return self.precision_plugin.post_backward(closure_loss, self.module)

    def _set_gradients(self, step: Step) -> None:
        full = self.replays.open(step.file)
        for name, parameter in self.module.named_parameters():
            if name in step.reduced:
                # A copy, because clipping works in place.
                gradient = full[name].to(parameter.device, parameter.dtype, copy=True)
                parameter.grad = gradient if step.scale == 1 else gradient / step.scale

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self.replays.replaying is not None:
            closure()
            self.replays.manual_step(optimizer)
            return None
        position, step = self._step
        self.found.steps[position] = found = StepOfReference(options_of(optimizer))
        if step.backward is None:
            self._set_gradients(step)
        if step.evaluations > 1:
            return closure()  # one of many gradients is known, and the step is not taken
        # With the run's options: what is compared is the update, and the options are compared by themselves.
        _set_options(optimizer, step.groups)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        _set_options(optimizer, found.groups)
        self._taken += 1
        found.clipped = sketches(live_gradients(self.module, step.reduced))
        found.after = sketches(dict(self.module.named_parameters()))
        return result


def _set_options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, options in zip(optimizer.param_groups, groups, strict=False):
        group.update(copy.deepcopy(options))


def _nothing(output: Any) -> None:
    """Stand for the loss of outputs that have none of their own."""


def _part(piece: Piece, start: int, stop: int) -> Piece:
    return replace(piece, args=(slice_batch(piece.args[0], start, stop), *piece.args[1:]), size=stop - start)


@contextmanager
def _silent(module: Any) -> Iterator[None]:
    """Have a module log nothing."""
    module.log = module.log_dict = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del module.log, module.log_dict


@contextmanager
def world_of_one() -> Iterator[None]:
    """Give the code of the user a process group to ask, where there is none, and keep Lightning's advice back."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings(), suppress(Enough):
            warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
            yield
    finally:
        if alone:
            dist.destroy_process_group()


class _ReferenceTrainer(Trainer):
    estimated_steps: float | None = None

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        return super().estimated_stepping_batches if self.estimated_steps is None else self.estimated_steps


_OF_SEVERAL = {
    *("strategy", "devices", "num_nodes", "plugins", "accelerator", "callbacks", "accumulate_grad_batches"),
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
    torch_settings(facts.settings)
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
        with world_of_one():
            trainer.fit(module, _Loader(strategy.acts, facts.epoch_batches))
    finally:
        restore()
    return strategy.found


def _untouched(module: Any, batch: Any, dataloader_idx: int = 0) -> Any:
    # The number of an act. The user's hooks on batches ran in the run already.
    return batch


class Enough(Exception):  # noqa: N818  # no error: all that was asked for is there
    """Ends a run before its time, past everything that Lightning does at the end of an epoch."""
