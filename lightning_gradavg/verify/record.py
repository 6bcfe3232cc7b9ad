"""What both runs write down: samples, gradients, weights, buffers and logs; and where two of these records differ.

Large tensors are not copied. A *sketch* of 4096 numbers stands for each: half of them are elements, half are signed
sums over all elements. It is linear, and changes if any element does.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_gradavg.lightning_internals import BatchNorm
from lightning_gradavg.options import StrategyFacts
from lightning_gradavg.random_state import random_state, restore_random_state
from lightning_gradavg.rules import RULES, Rule
from lightning_gradavg.tree import batch_samples, leaves
from lightning_gradavg.verify.report import Difference
from lightning_gradavg.verify.samples import DrawsBySample, Loading, Read, is_part, seed

__all__ = [
    "Enough",
    "Facts",
    "Moment",
    "Recorder",
    "Refused",
    "Step",
    "Taken",
    "Tape",
    "Tensors",
    "loss_of",
    "of_group",
    "sketch",
]

Tensors: TypeAlias = dict[str, Tensor]
"""Sketches by the name of their parameter, buffer, option or value."""

_KEPT = 4096
_TYPES = re.compile(
    r"dtype|scalar type|double|float64|float32|not implemented for|expected .* but (got|found)", re.IGNORECASE
)
_IN_FLOAT32 = "the run does not compute in float64 (after {operator}: {error}): verify with --single, in float32"
_NO_OPTIONS = ("params", "initial_lr", "foreach", "fused")  # of the mathematics


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
    loss: float = math.nan
    weight: float | None = None
    trace: list[Any] = field(default_factory=list)

    @property
    def ids(self) -> tuple[Any, ...]:
        """What its samples are known by."""
        (_, part), *_ = leaves(self.parts, is_leaf=is_part)
        return tuple(part.ids)


class Moment(NamedTuple):
    """What there is at one stage of a step, of those that `report.STAGES` names."""

    stage: str
    tensors: Tensors


@dataclass
class Step:
    """What one global batch does, in order."""

    epoch: int
    taken: list[Taken]
    moments: list[Moment]
    logged: dict[str, float]


@dataclass(frozen=True)
class Facts(StrategyFacts):
    """How a run was set up: what a strategy of ours tells, else what holds of stock DDP; without a user's function."""

    rule: Rule = RULES["mean"]
    strategy: str = ""
    ours: bool = False
    automatic: bool = True
    epoch_batches: float = math.inf


@dataclass
class Tape:
    """What one process recorded."""

    rank: int = 0
    facts: Facts = field(default_factory=Facts)
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
    """Records the first steps of a run, and ends it.

    Args:
        steps: How many.
        double: Whether the run computes in float64.
        reads: Whether an epoch of the Trainer's loaders is read at the end.

    Attributes:
        given: The loaders that are read at the end, if any.
        keys: Those of the samples of the batch.
    """

    def __init__(self, steps: int, *, double: bool = True, reads: bool = True) -> None:
        self.most, self._reads = steps, reads
        self.given: Any = None
        self.loading, self.mode, self.tape = Loading(), DrawsBySample(double=double), Tape()
        self.window: list[Taken] = []
        self.moments: list[Moment] = []
        self.keys: list[tuple[int, ...]] = []
        self._counted, self._epoch, self._batch = 0, 0, ExitStack()
        # The plugin is the first to be given a batch as the loader made it.
        self.plugin: Any = DoublePrecision() if double else Precision()
        self._converts = self.plugin.convert_input
        vars(self.plugin)["convert_input"] = self._arrived

    @contextmanager
    def watching(self, module: LightningModule) -> Iterator[None]:
        """Watch a module, which is for this run alone, in training, and end with the record."""
        step, log, register = module.training_step, module.log, DistributedDataParallel.register_comm_hook

        @functools.wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            return self._stepped(step, args, kwargs)

        @functools.wraps(log)
        def logs(name: str, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("sync_dist"):
                self.tape.synced.add(name)
            log(name, *args, **kwargs)

        def register_paused(model: Any, state: object, hook: Callable[..., Any]) -> None:
            register(model, state, self.mode.pausing(hook))  # it computes in the types that it states

        vars(module).update(training_step=training_step, log=logs)
        in_type = mock.patch.object(DistributedDataParallel, "register_comm_hook", register_paused)
        # A compiled function draws and rounds where nobody sees it; the stance is there from torch 2.6 on.
        eager: Any = getattr(torch.compiler, "set_stance", nullcontext)
        with self.loading.watching(), eager("force_eager"), in_type, self._batch:
            try:
                yield
            except Enough:
                pass
            except (Refused, RuntimeError, NotImplementedError) as error:
                first, refused = str(error).partition("\n")[0], isinstance(error, Refused)
                if not (refused or (self.mode.double and _TYPES.search(str(error)))):
                    raise
                self.tape.problem = first if refused else _IN_FLOAT32.format(operator=self.mode.last, error=first)
                if not self._reads:  # an epoch of several ranks is read by all of them, or by none
                    self._finish()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note how the run is set up, and what it starts from."""
        self.trainer, self.module = trainer, pl_module
        self.given = trainer.train_dataloader if self._reads else self.given
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # nothing is validated, and a plateau may be watched on that
        self.tape.rank, self.tape.facts = trainer.global_rank, _facts_of(trainer)
        self._note("initial weights", pl_module.named_parameters())
        self.tape.batch_norms = {name for name, part in pl_module.named_modules() if isinstance(part, BatchNorm)}
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self._updated)

        def put_first(dimension: int, *_: Any) -> None:
            self.mode.first = dimension

        # Recurrent layers keep time steps along dimension 0, and draw for samples along dimension 1.
        for part in (part for part in pl_module.modules() if isinstance(part, nn.RNNBase)):
            part.register_forward_pre_hook(functools.partial(put_first, 1))
            part.register_forward_hook(functools.partial(put_first, 0))

    def _note(self, stage: str, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        self.moments.append(Moment(stage, _sketches(tensors)))

    def _arrived(self, batch: Any) -> Any:
        """Begin with a batch, as the loader made it, and return it in the run's type."""
        converted = self._converts(batch)
        self._close()
        if len(self.tape.steps) >= self.most:
            self._finish()
            raise Enough
        parts, self._epoch = self.loading.parts(batch), self.trainer.current_epoch
        known = [part for _, part in leaves(parts, is_leaf=is_part)]
        size = max(part.size or 1 for part in known)
        self.window.append(Taken(parts, size))
        self._batch.close()
        self._batch.callback(restore_random_state, random_state())
        self._counted = 0
        self.keys = list(known[0].keys) or [(len(self.window) - 1, self.tape.rank, index) for index in range(size)]
        self.mode.begin(self.keys)
        self._reseed()
        self._batch.enter_context(self.mode)
        return converted

    def _reseed(self) -> None:
        seed(f"step {len(self.tape.steps)}")

    def _stepped(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `training_step`, on a whole batch or on the next piece of it."""
        taken = self.window[-1]
        told = getattr(self.trainer.strategy, "facts", None)
        taken.counts = told is None or told().samples != 0
        with suppress(ValueError):
            rows = batch_samples(args[0])
            if rows < len(self.keys):
                start = self._counted % len(self.keys)
                self.mode.keys, self._counted = self.keys[start : start + rows], start + rows
        self._reseed()  # whatever state the strategy has the step begin from
        before = random_state()[1:]
        output = step(*args, **kwargs)
        if before != random_state()[1:]:
            self.mode.shared["a generator of Python or NumPy"] = None
        loss, taken.weight = loss_of(output)
        if isinstance(loss, Tensor) and loss.numel() == 1 and math.isnan(taken.loss):
            taken.loss = float(loss.detach())  # the first, where an optimizer asks for several
        return output

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note the reduced gradients, every time the optimizer asks for the loss."""
        self._note("reduced gradient", self._gradients(optimizer))

    def _gradients(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor | None]]:
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return ((name, one.grad) for name, one in self.module.named_parameters() if id(one) in mine)

    def _updated(self, optimizer: Optimizer, *_: Any) -> None:
        self._note("clipped gradient", self._gradients(optimizer))
        self._note("optimizer options", _options(optimizer))

    def on_train_batch_end(self, *_: Any) -> None:
        """End with a batch."""
        self.window[-1].trace = list(self.mode.trace)
        self._batch.close()

    def _close(self) -> None:
        """Note what a step left behind, once all hooks behind it ran."""
        if not any(moment.stage == "optimizer options" for moment in self.moments):
            return
        buffers = ((n, b) for n, b in self.module.named_buffers() if not n.endswith("num_batches_tracked"))
        self._note("weights", self.module.named_parameters())
        self._note("buffers", buffers)
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items() if value.numel() == 1}
        self.tape.steps.append(Step(self._epoch, self.window, self.moments, logged))
        self.window, self.moments = [], []

    def on_train_end(self, *_: Any) -> None:
        """End with the run."""
        self._batch.close()
        self._close()
        self._finish()

    def _finish(self) -> None:
        """Note what there is to say of the whole."""
        self._batch.close()
        tape, mode = self.tape, self.mode
        tape.shared, tape.collectives = dict(mode.shared), set(mode.collectives)
        if not tape.facts.automatic and any(len(step.taken) > 1 for step in tape.steps):
            tape.problem = "in manual optimization a window of several batches is the user's own sum of them"
        tape.read = tape.read if self.given is None else self.loading.read(self.given)


def _options(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the options of an optimizer's groups: numbers as such, and words, which are in the name, as 1."""
    yield f"type={type(optimizer).__name__}", torch.ones(1)
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in _NO_OPTIONS and isinstance(value, (str, type(None))):
                yield f"{name}={value}{of_group(index)}", torch.ones(1)
            elif name not in _NO_OPTIONS and isinstance(value, (bool, int, float, tuple, list, Tensor)):
                with suppress(TypeError, ValueError):
                    yield f"{name}{of_group(index)}", torch.as_tensor(value, dtype=torch.float64)


def of_group(index: int) -> str:
    """Return what the names of an optimizer's options end with, for one of its groups."""
    return f" of group {index}" * bool(index)


def _facts_of(trainer: Trainer) -> Facts:
    strategy: Any = trainer.strategy
    ours, name = hasattr(strategy, "facts"), type(strategy).__name__
    told = vars(strategy.facts() if ours else Facts())
    if told["replicas"] is not None:
        raise Refused(
            f"{name} trains replicas with batch statistics of their own, which one process does not have: verify the"
            " run without num_replicas= and equivalent_to='data_parallel'"
        )
    own = {
        "rule": replace(told["rule"], share=RULES["mean"].share),  # a function may have no pickle
        "accumulation": trainer.accumulate_grad_batches,
        "strategy": name,
        "ours": ours,
        "automatic": trainer.lightning_module.automatic_optimization,
        "epoch_batches": float(trainer.num_training_batches),
    }
    return Facts(**{**told, **own})


class Seen(NamedTuple):
    """A difference at a stage of a step, and what was compared there."""

    stage: str
    step: int
    difference: Difference
    found: Tensors
    expected: Tensors
    relative: Mapping[str, float]


def difference(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    noise: Mapping[str, Tensor] | None = None,
    *,
    together: bool = True,
) -> tuple[Difference | None, dict[str, float]]:
    """Return the largest difference beyond the tolerance, and the relative size of all. A missing tensor is zero.

    Args:
        found: The sketches of the run.
        expected: Those of one process.
        tolerance: The relative difference that counts as equal.
        noise: What both were computed from: a hundred-thousandth of the tolerance of that is rounding, as of the
            largest of all tensors. What is zero but for rounding would otherwise differ by 100 %.
        together: Whether a factor is that of all tensors.
    """
    relative, beyond = dict[str, float](), list[Difference]()
    largest = max(map(_size, expected.values()), default=0.0)
    for name in {**expected, **found}:
        mine, other = _paired(found.get(name), expected.get(name))
        same = torch.isclose(mine, other, rtol=0.0, atol=0.0, equal_nan=True)
        gaps = torch.where(same, 0.0, (mine - other).abs().nan_to_num(math.inf, math.inf))
        at, scale = int(gaps.argmax()), _size(other)
        gap = float(gaps[at])
        rounding = 1e-5 * tolerance * (_size(noise[name]) if noise and name in noise else largest)
        relative[name] = gap / scale if scale else math.inf if gap else 0.0
        if gap > rounding + tolerance * scale:
            beyond.append(Difference(name, relative[name], float(mine[at]), float(other[at])))
        else:
            relative[name] = min(relative[name], tolerance)
    if not beyond:
        return None, relative
    most = max(beyond, key=lambda one: one.relative)
    like = {**expected, **found}
    like = like if together else {most.name: like[most.name]}
    near = 1e4 * tolerance
    factor = multiple_of(flat(found, like), flat(expected, like), near)
    return replace(most, factor=factor if factor and abs(factor - 1) > near else None), relative


def _size(tensor: Tensor) -> float:
    size = float(tensor.abs().max()) if tensor.numel() else 0.0
    return size if math.isfinite(size) else 0.0


def _paired(*tensors: Tensor | None) -> list[Tensor]:
    """Return two sketches, with zeros for one that is missing, and NaN where one is shorter."""
    length = max(1, *(0 if each is None else each.numel() for each in tensors))
    known = [torch.zeros(0).double() if each is None else each.reshape(-1) for each in tensors]
    return [nn.functional.pad(each, (0, length - len(each)), value=math.nan if len(each) else 0.0) for each in known]


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


def differences(
    run: Tape, alone: Tape, tolerance: float, gradients: dict[str, list[float]] | None = None
) -> Iterator[Seen]:
    """Yield where a run differs from another, in its order, and note the relative differences of reduced gradients.

    Raises:
        Refused: If one takes other steps than the other.
    """
    noted = {} if gradients is None else gradients
    before: Tensors = {}
    for position, (step, own) in enumerate(zip(run.steps, alone.steps, strict=False)):
        tiny: Tensors = {}
        for other, mine in zip_longest(step.moments, own.moments, fillvalue=Moment("", {})):
            (stage, found), (known, expected), noise = other, mine, {}
            if stage != known:
                raise Refused("one process takes other optimizer steps in a batch than the run, or more of them")
            if stage == "clipped gradient":
                tiny |= _zero_but_for_rounding(expected)
            elif stage == "weights":
                # Optimizers enlarge what is zero but for rounding: it counts as moved as expected.
                found, expected, noise = _without(found, before), _without(expected, before), expected
                both = tiny.keys() & found.keys() & expected.keys()
                found |= {name: torch.where(tiny[name], expected[name], found[name]) for name in both}
            seen, relative = difference(found, expected, tolerance, noise, together=stage != "optimizer options")
            before = noise or (expected if stage == "initial weights" else before)
            for name, each in relative.items() if stage == "reduced gradient" else ():
                noted.setdefault(name, []).append(each)
            if seen is not None:
                yield Seen(stage, position, seen, found, expected, relative)


def _without(tensors: Tensors, before: Tensors) -> Tensors:
    return {name: each - before[name] for name, each in tensors.items() if name in before}


def _zero_but_for_rounding(gradients: Tensors) -> Tensors:
    """Return which elements of gradients are next to nothing beside the largest of all."""
    least = 1e-10 * max(map(_size, gradients.values()), default=0.0)
    return {name: (each.abs() < least) & ((each != 0) | (0 < _size(each) < least)) for name, each in gradients.items()}
