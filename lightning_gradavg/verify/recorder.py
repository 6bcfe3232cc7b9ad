"""The callback that records a run: the samples of its batches, gradients, weights, buffers and logs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_gradavg._lightning.internals import BatchNorm, fetched_here
from lightning_gradavg._support.random_state import random_state, restore_random_state, seed_generators, stream_key
from lightning_gradavg.verify.borders import counts_samples, facts_of, loader_of_user
from lightning_gradavg.verify.draws import Draws, of_no_sample
from lightning_gradavg.verify.loading import NO_COLLATE_FN, Loading, read_epoch
from lightning_gradavg.verify.records import RankBatch, Record, RecordedPiece, RecordedStep, Refused, StageTensors
from lightning_gradavg.verify.shards import is_shard, require_shards_of_all, shard_in_whole, sharded_in_one_precision
from lightning_gradavg.verify.sketches import Tensors, sketch

__all__ = ["Recorder", "loss_and_weight"]

_UNCOMPARED_OPTIONS = ("params", "initial_lr", "foreach", "fused")
"""Entries of an optimizer's groups that do not change what it computes."""

_STRATEGIES_OWN_HOOK = "lightning_gradavg.reduction."
"""How the name of the module begins whose communication hook is no user's."""


class LossAndWeight(NamedTuple):
    """What a training step says of its batch."""

    loss: Any  # a tensor, or whatever the user returned in its place
    weight: float | None


def loss_and_weight(output: object) -> LossAndWeight:
    """Return the loss and the weight in what `training_step` returned."""
    if not isinstance(output, Mapping):
        return LossAndWeight(output, None)
    weight = output.get("weight")
    if weight is not None:
        weight = float(weight)
    return LossAndWeight(output.get("loss"), weight)


class Recorder(Callback):
    """Records the first steps of a run, and ends the run.

    `plugin` and the recorder itself are among the plugins and callbacks of a Trainer, which fits the module within
    `watching`. Then Lightning calls, in this order:

    ```text
    on_train_start                  note the set-up and the initial weights
      _begin_batch                  for each batch, from the plugin's `convert_input`; first end the step before
        _training_step              note loss and weight; once for each piece of the batch
        on_before_optimizer_step    note the reduced gradient } each time that an optimizer
        _after_optimizer_step       note the clipped gradient } takes a step
      on_train_batch_end            end with the batch
    on_train_end                    end the last step
    ```

    Args:
        most_steps: The number of steps after which the run ends.
        precision: What the run computes in, "64-true" or "32-true".
        reads: Whether to read an epoch of the user's loader by its indices at the end.

    Attributes:
        record: What is recorded.
        running: The samples that are computed.
        mode: The mode in which a batch is computed.
        loading: What batches are made of.
        plugin: The precision plugin that the Trainer is to have. A method of it is replaced.
    """

    trainer: Trainer
    module: LightningModule

    def __init__(self, most_steps: int, precision: str, *, reads: bool = True) -> None:
        self._most_steps = most_steps
        self._reads = reads
        self._loader: Any = None  # the user's
        self.loading = Loading()
        self.mode = Draws(double=precision == "64-true")
        self.record = Record()
        # Of the step that is not ended yet.
        self._window: list[RankBatch] = []
        self._stages: list[StageTensors] = []
        # Of the running batch.
        self.running = RecordedPiece()
        self._epoch = 0
        self._begun_pieces = 0
        self._batch_scope = ExitStack()
        # Lightning's loop calls `convert_input` of the precision plugin before any hook of a batch, so there the batch
        # is still the object that the loader made.
        self.plugin = Precision()
        if self.mode.double:
            self.plugin = DoublePrecision()
        self._convert_input: Callable[[object], object] = self.plugin.convert_input
        vars(self.plugin)["convert_input"] = self._begin_batch

    @contextmanager
    def watching(self, module: LightningModule) -> Iterator[None]:
        """Record what is trained within. The module must be of this run alone."""
        user_step = module.training_step

        @functools.wraps(user_step)  # Lightning reads the names of its parameters
        def training_step(*args: object, **kwargs: object) -> object:
            return self._training_step(user_step, args, kwargs)

        vars(module)["training_step"] = training_step
        with ExitStack() as stack:
            stack.enter_context(fetched_here(self.loading.watch))
            stack.enter_context(sharded_in_one_precision(module))
            # Compiled functions draw and round where no dispatch mode sees it.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._comm_hooks_paused())
            stack.enter_context(self._batch_scope)
            try:
                yield
            except Refused as error:
                self.record.problem = str(error)
            self._batch_scope.close()
            self._finish()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note how the run is set up, and what it starts from."""
        self.trainer = trainer
        self.module = pl_module
        self._loader = loader_of_user(trainer)
        if self._reads:
            self.record.reading = read_epoch(self._loader)  # now, as `teardown` may close files
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # nothing is validated, and ReduceLROnPlateau may monitor a validation metric
            if config.reduce_on_plateau:
                self.record.remarks.append(
                    f"ReduceLROnPlateau follows {config.monitor!r}, and verify does not validate: the ranks keep the"
                    " same learning rate only if they log the same value, as with sync_dist=True"
                )
        self.record.rank = trainer.global_rank
        self.record.facts = facts_of(trainer)
        if self.mode.double:
            for tensor in _unregistered_tensors(pl_module, trainer.optimizers).values():
                tensor.data = tensor.data.double()  # as `DoublePrecision` does with parameters
        for name, weight in self._weights():
            if is_shard(weight):
                require_shards_of_all(name, weight)
        self._take_stage("initial weights", self._weights())
        for name, layer in pl_module.named_modules():
            if _has_statistics_of_one_rank(layer):
                self.record.batch_norms.append(name)
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self._after_optimizer_step)

    @contextmanager
    def _comm_hooks_paused(self) -> Iterator[None]:
        """Have DDP's communication hooks that are registered within run outside of the mode, and note the user's.

        They compute in the types that they state, such as `fp16_compress_hook`, and not in float64.
        """
        register = DistributedDataParallel.register_comm_hook

        def register_paused(model: DistributedDataParallel, state: object, hook: Callable[..., object]) -> None:
            @functools.wraps(hook)  # DDP checks the annotations, and logs the name
            def paused(state: object, bucket: dist.GradBucket) -> object:
                with self.mode.paused():
                    return hook(state, bucket)

            if not hook.__module__.startswith(_STRATEGIES_OWN_HOOK):
                self.record.comm_hook = hook.__qualname__
            register(model, state, paused)

        with mock.patch.multiple(
            DistributedDataParallel,
            register_comm_hook=register_paused,
            # It takes one copy of the gradients less, unless the user says otherwise.
            __init__=functools.partialmethod(DistributedDataParallel.__init__, gradient_as_bucket_view=True),
        ):
            yield

    def _take_stage(self, stage: str, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        sketches = {}
        shards = set()
        with self.mode.paused():
            for name, tensor in tensors:
                if tensor is None or tensor.numel() == 0:
                    continue
                whole = tensor
                if is_shard(tensor):
                    shards.add(name)
                    whole = shard_in_whole(tensor)
                sketches[name] = sketch(whole)
        self._stages.append(StageTensors(stage, sketches, frozenset(shards)))

    def _begin_batch(self, batch: object) -> object:
        """Begin with a batch, as the loader made it, and return it in the run's type."""
        converted = self._convert_input(batch)
        self._end_step()
        if len(self.record.steps) >= self._most_steps:
            raise Refused
        self._window.append(self.loading.pop(batch))
        self._epoch = self.trainer.current_epoch
        self._begun_pieces = 0
        # Compute it in `mode` until it ends, and draw from a random state of its own.
        self._batch_scope.close()
        self._batch_scope.callback(restore_random_state, random_state())
        if self.mode.double:  # Lightning's plugin sets it for `training_step` alone
            self._batch_scope.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        self._begin_piece(0)
        self._batch_scope.enter_context(self.mode)
        return converted

    def _begin_piece(self, index: int) -> None:
        """Let a piece draw from a random state of its own, on each rank another one."""
        self.running = self._window[-1].pieces[index]
        self.mode.drawn = self.running.draws
        self.mode.parts = self.running.parts
        # Python's and NumPy's generators are seen within `training_step` alone, so elsewhere all ranks draw the same.
        step = len(self.record.steps)
        seed_generators(stream_key(0, "step", step))
        torch.default_generator.manual_seed(hash((step, self.record.rank, len(self._window), index)))

    def _training_step(
        self, user_step: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call the user's `training_step`, on a whole batch or on the next piece of it."""
        rank_batch = self._window[-1]
        # A stand-in is known here, and not yet when the batch arrives: strategies hear of it in `on_train_batch_start`.
        rank_batch.counts = counts_samples(self.trainer)
        # An optimizer may ask for all pieces again. Whatever state the strategy has the step begin from is replaced.
        self._begin_piece(self._begun_pieces % len(rank_batch.pieces))
        self._begun_pieces += 1
        _, *others_before = random_state()
        output = user_step(*args, **kwargs)
        _, *others_after = random_state()
        if others_before != others_after:
            # Here all draw the same numbers, so that all else can be compared.
            self.record.remarks.append(of_no_sample("a generator of Python or NumPy"))
        rank_batch.weight = loss_and_weight(output).weight
        return output

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note the reduced gradients, every time the optimizer asks for the loss."""
        self._take_stage("reduced gradient", self._gradients(optimizer))

    def _gradients(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the gradients of an optimizer's tensors by their names."""
        ids = {id(tensor) for tensor in _tensors_of(optimizer)}
        for name, parameter in self._weights():
            if id(parameter) in ids:
                yield name, parameter.grad

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's parameters, and what its optimizers train beside them.

        A tensor that the module does not register trains like any other, and DDP does not reduce its gradient
        (`test_ranks_verify.py`, "a temperature").
        """
        yield from self.module.named_parameters()
        yield from _unregistered_tensors(self.module, self.trainer.optimizers).items()

    def _after_optimizer_step(self, optimizer: Optimizer, *_: object) -> None:
        """Note what the optimizer stepped on. PyTorch calls it after each `step`."""
        self._take_stage("clipped gradient", self._gradients(optimizer))
        self._take_stage("optimizer options", _options(optimizer))

    def on_train_batch_end(self, *_: object) -> None:
        """End with a batch."""
        self._batch_scope.close()

    def _end_step(self) -> None:
        """Note what a step left behind, if the window is complete.

        It is called when the next batch arrives, because by then all hooks of the step have run.
        """
        stages = {stage.stage for stage in self._stages}
        if "optimizer options" not in stages:
            return  # within a window
        self._take_stage("weights", self._weights())
        self._take_stage("buffers", self._compared_buffers())
        step = RecordedStep(self._epoch, self._window, self._stages, self._logged_values())
        self.record.steps.append(step)
        self._window = []
        self._stages = []

    def _compared_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self.module.named_buffers():
            # Batch norm counts its batches. One process has fewer of them than the ranks have in a window.
            if not name.endswith("num_batches_tracked"):
                yield name, buffer

    def _logged_values(self) -> Tensors:
        return {name: sketch(value) for name, value in self.trainer.callback_metrics.items() if value.numel() == 1}

    def on_train_end(self, *_: object) -> None:
        """End with the last step."""
        self._end_step()

    def _finish(self) -> None:
        """Note what there is to say of the whole run."""
        self.record.draws_problem = self.mode.problem
        windows = [*(step.batches for step in self.record.steps), self._window]
        problems = [self.record.problem]
        for rank_batch in (rank_batch for window in windows for rank_batch in window if rank_batch.counts):
            problems += [piece.unknown_because for piece in rank_batch.pieces]
        # Without a step there may be no loader, and `judge` says why.
        if self._reads and self.record.steps and not isinstance(self._loader, DataLoader):
            problems.append(NO_COLLATE_FN)
        if not self.record.facts.automatic and any(len(window) > 1 for window in windows):
            problems.append("in manual optimization a window of several batches is the user's own sum of them")
        for problem in problems:
            if problem:
                self.record.problem = problem
                break


def _has_statistics_of_one_rank(layer: nn.Module) -> bool:
    """Return whether a layer normalizes by the batch that its rank has."""
    if not isinstance(layer, BatchNorm) or isinstance(layer, nn.SyncBatchNorm):
        return False
    return layer.training or not layer.track_running_stats


def _tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """Return what an optimizer holds."""
    return list(chain(*(group["params"] for group in optimizer.param_groups)))


def _unregistered_tensors(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return the tensors that optimizers hold and the module does not register."""
    registered = {id(parameter) for parameter in module.parameters()}
    named: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for tensor in _tensors_of(optimizer):
            if id(tensor) not in registered:
                registered.add(id(tensor))
                named[f"tensor {len(named)} of the optimizers that the module does not register"] = tensor
    return named


def _options(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the options of an optimizer's groups: numbers as such, and words, which are in the name, as 1."""
    yield f"type={type(optimizer).__name__}", torch.ones(1)
    for index, group in enumerate(optimizer.param_groups):
        of_group = ""
        if index > 0:
            of_group = f" of group {index}"
        for name, value in group.items():
            if name in _UNCOMPARED_OPTIONS:
                continue
            if value is None or isinstance(value, str):
                yield f"{name}={value}{of_group}", torch.ones(1)
                continue
            with suppress(TypeError, ValueError, RuntimeError):  # what is no number
                yield f"{name}{of_group}", torch.as_tensor(value, dtype=torch.float64)
