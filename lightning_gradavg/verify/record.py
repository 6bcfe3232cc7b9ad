"""What both runs write down: samples, gradients, weights, buffers and logs.

Large tensors are not copied. A *sketch* of 4096 numbers stands for each: half of them are elements, half are signed
sums over all elements. It is linear, and changes if any element does.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_gradavg.lightning_internals import BatchNorm
from lightning_gradavg.random_state import random_state, restore_random_state
from lightning_gradavg.tree import batch_samples, leaves
from lightning_gradavg.verify.draws import DrawsBySample
from lightning_gradavg.verify.samples import Loading, Read, is_part, seed

__all__ = ["Enough", "Facts", "Recorder", "Refused", "Step", "Taken", "Tape", "Tensors", "loss_of", "sketch"]

Tensors: TypeAlias = dict[str, Tensor]
"""Sketches by the name of their parameter or buffer."""

_KEPT = 4096
_TYPES = re.compile(
    r"dtype|scalar type|double|float64|float32|not implemented for|expected .* but (got|found)", re.IGNORECASE
)
_IN_FLOAT32 = "the run does not compute in float64 (after {operator}: {error}): verify with --single, in float32"


class Enough(Exception):  # noqa: N818  # no error: everything that was asked for is there
    """Ends a run early."""


class Refused(Exception):  # noqa: N818  # likewise
    """Says why a run cannot be compared."""


def sketch(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as float64 on the CPU, of a large one 2048 of them and 2048 signed sums over all."""
    dense = (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)
    if flat.numel() <= _KEPT:
        return flat.to(device="cpu", dtype=torch.float64, copy=True)
    half = _KEPT // 2
    positions, signs = (each.to(flat.device) for each in _pattern(flat.numel(), half))
    table, rest = flat[: len(signs) * half].view(-1, half), flat[len(signs) * half :]
    sums = flat.new_zeros(half, dtype=torch.float64)
    for start in range(0, len(signs), half):  # a float64 copy of a part at a time
        sums += signs[start : start + half] @ table[start : start + half].double()
    sums[: len(rest)] += rest.double()
    return torch.cat([flat[positions].double(), sums / math.sqrt(len(signs))]).cpu()


@functools.lru_cache(maxsize=64)
def _pattern(size: int, half: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    positions = torch.randint(size, (half,), generator=generator).sort().values
    return positions, torch.randint(2, (size // half,), generator=generator).double() * 2 - 1


def _sketches(tensors: Iterable[tuple[str, Tensor | None]]) -> Tensors:
    return {name: sketch(tensor) for name, tensor in tensors if tensor is not None}


@dataclass
class Taken:
    """One micro-batch on one rank."""

    parts: Any  # a `Part`, or a structure of them
    size: int
    counts: bool = True  # not if the strategy only kept the rank busy
    local: Tensors = field(default_factory=dict)  # what this rank added to the gradients
    loss: float = math.nan
    weight: float | None = None
    trace: list[Any] = field(default_factory=list)

    @property
    def ids(self) -> tuple[Any, ...]:
        """What its samples are known by."""
        (_, part), *_ = leaves(self.parts, is_leaf=is_part)
        return tuple(part.ids)


@dataclass
class Update:
    """One step of an optimizer."""

    reduced: list[Tensors]  # the gradients before they are clipped, for every time the loss was asked for
    used: Tensors  # those that the optimizer stepped with
    options: list[dict[str, Any]]  # of its parameter groups, and its type


@dataclass
class Step:
    """What one global batch does."""

    epoch: int
    taken: list[Taken]
    updates: list[Update]
    weights: Tensors  # afterwards, with all that hooks do
    buffers: Tensors
    logged: dict[str, float]


@dataclass
class Facts:
    """How a run was set up."""

    strategy: str = ""
    rule: str = "mean"
    uses_weight: bool = False
    splits: bool = False
    replicated: bool = False
    ours: bool = False
    scales_rates: bool = False
    automatic: bool = True
    accumulation: int = 1
    epoch_batches: float = math.inf
    estimated_steps: float = math.inf


@dataclass
class Tape:
    """What one process recorded."""

    rank: int = 0
    facts: Facts = field(default_factory=Facts)
    initial: Tensors = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    synced: set[str] = field(default_factory=set)  # values that were logged with sync_dist
    shared: dict[str, None] = field(default_factory=dict)
    collectives: set[str] = field(default_factory=set)
    read: Read = field(default_factory=Read)
    batch_norms: set[str] = field(default_factory=set)
    problem: str = ""


def loss_of(output: Any) -> tuple[Any, float | None]:
    """Return the loss in what `training_step` returned, the sum of named ones, and its weight."""
    content = output if isinstance(output, Mapping) else {"loss": output}
    loss, weight = content.get("loss"), content.get("weight")
    if isinstance(loss, Mapping):
        return sum(loss.values()), None
    return loss, None if weight is None or isinstance(weight, Mapping) else float(weight)


class Recorder(Callback):
    """Records the first steps of a run, and ends it; `begins` gets the arguments of every `training_step`."""

    def __init__(self, steps: int, *, double: bool = True, begins: Callable[..., None] | None = None) -> None:
        self.most, self.begins = steps, begins
        self.loading, self.mode, self.tape = Loading(), DrawsBySample(double=double), Tape()
        self.window: list[Taken] = []
        self.updates: list[Update] = []
        self.reads: Any = None  # the user's loaders, if the Trainer has others
        self.keys: list[tuple[int, ...]] = []
        self._evaluations: list[Tensors] = []
        self._hooked, self._active, self._counted, self._epoch = set[str](), False, 0, 0
        self._handles: list[Any] = []
        # The plugin is the first to be given a batch as the loader made it.
        self.plugin: Any = DoublePrecision() if double else Precision()
        self.converts = self.plugin.convert_input
        vars(self.plugin)["convert_input"] = self._convert_input

    def _convert_input(self, batch: Any) -> Any:
        converted = self.converts(batch)
        self._arrived(batch)
        return converted

    @contextmanager
    def watching(self, module: LightningModule) -> Iterator[None]:
        """Watch a module in training, and end with the record; nothing of this is left afterwards."""
        step, log = module.training_step, module.log

        @functools.wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            return self._stepped(step, args, kwargs)

        @functools.wraps(log)
        def logs(name: str, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("sync_dist"):
                self.tape.synced.add(name)
            log(name, *args, **kwargs)

        vars(module).update(training_step=training_step, log=logs)
        # A compiled function draws and rounds where nobody sees it; the stance is there from torch 2.6 on.
        eager: Any = getattr(torch.compiler, "set_stance", nullcontext)
        register = DistributedDataParallel.register_comm_hook

        def register_paused(model: Any, state: object, hook: Callable[..., Any]) -> None:
            register(model, state, self.paused(hook))

        try:
            with (
                self.loading.watching(),
                eager("force_eager"),
                mock.patch.object(DistributedDataParallel, "register_comm_hook", register_paused),
                self._told(),
            ):
                yield
        finally:
            self._leave()
            for handle in self._handles:
                handle.remove()
            for name in ("training_step", "log"):
                vars(module).pop(name, None)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Note why a run cannot be compared."""
        try:
            yield
        except Enough:
            pass
        except (Refused, RuntimeError, NotImplementedError) as error:
            first, refused = str(error).partition("\n")[0], isinstance(error, Refused)
            if not (refused or (self.mode.double and _TYPES.search(str(error)))):
                raise
            self.tape.problem = first if refused else _IN_FLOAT32.format(operator=self.mode.last, error=first)
            self._leave()
            if self.reads is not None:
                self._finish()

    def paused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that computes in the types that it states."""

        @functools.wraps(function)
        def paused(*args: Any) -> Any:
            before, self.mode.paused = self.mode.paused, True
            try:
                return function(*args)
            finally:
                self.mode.paused = before

        return paused

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note how the run is set up, and what it starts from."""
        self.trainer, self.module = trainer, pl_module
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # nothing is validated, and a plateau may be watched on that
        self.tape.rank, self.tape.facts = trainer.global_rank, _facts_of(trainer)
        self.tape.initial = _sketches(pl_module.named_parameters())
        self.tape.batch_norms = {name for name, part in pl_module.named_modules() if isinstance(part, BatchNorm)}
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self._updated)

        def put_first(dimension: int, *_: Any) -> None:
            self.mode.first = dimension

        # Recurrent layers keep time steps along dimension 0, and draw for samples along dimension 1.
        for part in (part for part in pl_module.modules() if isinstance(part, nn.RNNBase)):
            self._handles.append(part.register_forward_pre_hook(functools.partial(put_first, 1)))
            self._handles.append(part.register_forward_hook(functools.partial(put_first, 0)))

    def _arrived(self, batch: Any) -> None:
        """Begin with a batch, as the loader made it."""
        self._close()
        if len(self.tape.steps) >= self.most:
            self._finish()
            raise Enough
        parts, self._epoch = self.loading.parts(batch), self.trainer.current_epoch
        known = [part for _, part in leaves(parts, is_leaf=is_part)]
        size = max(part.size or 1 for part in known)
        self.window.append(Taken(parts, size))
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and name not in self._hooked and not known[0].keys:
                self._hooked.add(name)
                parameter.register_hook(functools.partial(self._saw, name))
        self._leave()
        self._counted, self._outside = 0, random_state()
        self.begin(known[0].keys or [(len(self.window) - 1, self.tape.rank, index) for index in range(size)])
        self.mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
        self._active = True

    def _saw(self, name: str, gradient: Tensor | None) -> None:
        if self.window and self._active and gradient is not None:
            local = self.window[-1].local
            local[name] = local[name] + sketch(gradient) if name in local else sketch(gradient)

    def begin(self, keys: list[tuple[int, ...]]) -> None:
        """Draw as at the beginning of a step with samples of these keys."""
        self.keys = keys
        self.mode.begin(keys)
        self.reseed()

    def reseed(self) -> None:
        """Start the random state of the step anew."""
        seed(f"step {len(self.tape.steps)}")

    def _leave(self) -> None:
        if self._active:
            self._active = False
            self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
            restore_random_state(self._outside)

    def _stepped(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `training_step`, on a whole batch or on the next piece of it."""
        if self.begins is not None:
            self.begins(*args, **kwargs)
        taken = self.window[-1]
        told = getattr(self.trainer.strategy, "facts", None)
        taken.counts = told is None or told().samples != 0
        with suppress(ValueError):
            rows = batch_samples(args[0])
            if rows < len(self.keys):
                start = self._counted % len(self.keys)
                self.mode.keys, self._counted = self.keys[start : start + rows], start + rows
        self.reseed()  # whatever state the strategy has the step begin from
        before = random_state()[1:]
        output = step(*args, **kwargs)
        if before != random_state()[1:]:
            self.mode.shared["a generator of Python or NumPy"] = None
        loss, taken.weight = loss_of(output)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            taken.loss = float(loss.detach())
        return output

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note the reduced gradients."""
        self._evaluations.append(self._gradients(optimizer))

    def _gradients(self, optimizer: Optimizer) -> Tensors:
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return _sketches((name, one.grad) for name, one in self.module.named_parameters() if id(one) in mine)

    def _updated(self, optimizer: Optimizer, *_: Any) -> None:
        left_out = ("params", "initial_lr", "foreach", "fused")
        options = [
            {"type": type(optimizer).__name__}
            | {key: _plain(value) for key, value in group.items() if key not in left_out}
            for group in optimizer.param_groups
        ]
        self.updates.append(Update(self._evaluations, self._gradients(optimizer), options))
        self._evaluations = []

    def on_train_batch_end(self, *_: Any) -> None:
        """End with a batch."""
        self.window[-1].trace = list(self.mode.trace)
        self._leave()

    def _close(self) -> None:
        """Note what a step left behind, once all hooks behind it ran."""
        if not self.updates:
            return
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items() if value.numel() == 1}
        buffers = ((n, b) for n, b in self.module.named_buffers() if not n.endswith("num_batches_tracked"))
        weights = _sketches(self.module.named_parameters())
        self.tape.steps.append(Step(self._epoch, self.window, self.updates, weights, _sketches(buffers), metrics))
        self.window, self.updates = [], []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End with the run."""
        self._leave()
        self._close()
        self._finish()

    def _finish(self) -> None:
        """Note what there is to say of the whole."""
        self._leave()
        tape, mode = self.tape, self.mode
        tape.shared, tape.collectives = dict(mode.shared), set(mode.collectives)
        if not tape.facts.automatic and any(len(step.taken) > 1 for step in tape.steps):
            tape.problem = "in manual optimization a window of several batches is the user's own sum of them"
        tape.read = self.loading.read(self.trainer.train_dataloader if self.reads is None else self.reads)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else copy.copy(value)


def _facts_of(trainer: Trainer) -> Facts:
    strategy: Any = trainer.strategy
    facts = Facts(
        type(strategy).__name__,
        automatic=bool(trainer.lightning_module.automatic_optimization),
        accumulation=trainer.accumulate_grad_batches,
        epoch_batches=float(trainer.num_training_batches),
    )
    with suppress(Exception):  # of an accumulation that differs between epochs
        facts.estimated_steps = float(trainer.estimated_stepping_batches)
    if not hasattr(strategy, "facts"):
        return facts
    told = strategy.facts()
    if told.replicas is not None:
        raise Refused(
            f"{facts.strategy} trains replicas with batch statistics of their own, which one process does not have:"
            " verify the run without num_replicas= and equivalent_to='data_parallel'"
        )
    facts.ours, facts.rule, facts.uses_weight = True, told.rule.name, told.rule.uses_weight
    facts.splits, facts.replicated, facts.scales_rates = told.splits_batches, told.replicated, told.scales_rates
    return facts
