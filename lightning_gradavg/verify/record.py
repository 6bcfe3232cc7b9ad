"""What a run leaves behind for the comparison, and the callback that writes it down without changing the run.

On each rank `Recorder` notes every call of `training_step`: the batch, the random state and the module's own state
before it, the loss, and the gradient of that loss on this rank alone. That gradient is seen where the real backward
adds it to the parameters, by a hook that changes nothing: no second differentiation, which a static graph, a hook
that counts or a collective in the backward would take for a step of the run. What the strategy and the precision
multiply the loss by is seen in the same way, at the loss. The methods that are watched are replaced on the class, not
on the module, whose copies and checkpoints then hold nothing of it, and put back with the last step. No error of the
recorder reaches the run.

Big tensors are not copied. A `sketch` of 4096 numbers stands for each: sampled elements, and signed sums over all of
them, in float64. A sketch is linear, so sums and multiples of gradients are compared by their sketches; and it is
another one if any element is. Rank 0 alone writes to a file what the reference needs in full: the weights that
changed since the last step, and the reduced gradient.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from lightning_gradavg.lightning_internals import BEFORE_TRANSFER, TrainingLoop, in_backward
from lightning_gradavg.options import StrategyFacts
from lightning_gradavg.rules import RULES
from lightning_gradavg.strategy import GradAvgStrategy
from lightning_gradavg.verify.state import (
    Randomness,
    digest,
    digests,
    module_state,
    random_states,
    torch_settings,
)

__all__ = ["WHOLE_LOSS", "Call", "Loaded", "Recorder", "RunFacts", "Step", "Tape", "Tensors", "patched", "sketch"]

Tensors: TypeAlias = dict[str, Tensor]
"""Tensors or their sketches, by the name of their parameter or buffer."""

WHOLE_LOSS = ""
"""The key of a loss that has no named terms."""

_KEPT = 4096
_SEVERAL_LOSSES = "the optimizer asks for the loss several times in a step, which cannot be followed"


def sketch(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as float64 on the CPU, of a large one 2048 of them and 2048 signed sums over all.

    The sums are divided by the root of how many elements each has, and so are as large as an element.
    """
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


def sketches(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the sketches of all tensors."""
    return {name: sketch(tensor) for name, tensor in tensors.items()}


def weights_of(module: nn.Module) -> Tensors:
    """Return the sketches of a module's parameters."""
    return sketches(dict(module.named_parameters()))


def live_gradients(module: nn.Module) -> Tensors:
    """Return the gradients of a module's parameters that have one."""
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def among(tensors: Mapping[str, Tensor], names: Container[str]) -> Tensors:
    """Return those tensors that are named."""
    return {name: tensor for name, tensor in tensors.items() if name in names}


def trained_by(optimizer: Optimizer, module: nn.Module) -> set[str]:
    """Return the names of the parameters that an optimizer steps."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name for name, parameter in module.named_parameters() if id(parameter) in trained}


def loss_terms(output: Any) -> dict[str, tuple[Tensor, float | None]]:
    """Return the losses in what `training_step` returned and their weights, by name; the only one as `WHOLE_LOSS`."""
    content = output if isinstance(output, Mapping) else {"loss": output}
    given = (content.get("loss"), content.get("weight"))
    losses, weights = (each if isinstance(each, Mapping) else {WHOLE_LOSS: each} for each in given)
    return {name: (term, as_number(weights.get(name))) for name, term in losses.items() if isinstance(term, Tensor)}


def as_number(weight: Any) -> float | None:
    """Return a weight of any type as a number, or None where none was given."""
    return None if weight is None else float(weight)


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return copies of the options of an optimizer's parameter groups, without the parameters."""
    groups = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        del group["params"]
    return copy.deepcopy(groups)


@dataclass(frozen=True)
class Call:
    """One call of `training_step` on one rank, or what the reference makes of it.

    In manual optimization losses, weights and seeds are by the number of the backward, gradients by that of the step.
    """

    rank: int
    batch: int  # the number of the loader's batch
    args: tuple[Any, ...]  # the batch first, on the CPU
    random: Randomness  # before
    state: Mapping[str, Any]  # the module's buffers and plain attributes before
    files: Mapping[str, Path]  # where rank 0 wrote the weights before, by parameter; of other ranks not to be used
    counts: bool  # not if the strategy only kept the rank busy
    losses: dict[str, float] = field(default_factory=dict)  # by name, without any division
    weights: dict[str, float | None] = field(default_factory=dict)
    seeds: dict[str, float] = field(default_factory=dict)  # what each loss was multiplied by before the backward
    gradients: dict[str, Tensors] = field(default_factory=dict)  # this rank's alone, as multiplied, in sketches
    samples: int | None = None  # in the batch, which the reference counts; None where that is not known


@dataclass(frozen=True)
class Loaded:
    """A batch that a rank got from its loader."""

    epoch: int
    samples: tuple[bytes, ...]  # a digest of each as it was loaded


@dataclass
class Step:
    """One optimizer step on one rank; tensors are sketches but for the buffers."""

    batches: tuple[int, int]  # trained on since the step before: the first, and behind the last
    loss: str  # the key of this rank's own gradient: in manual optimization the step's number within the call
    backward: str | None  # after which backward of the call the gradient was read; None for before the step
    kind: str  # the class of the optimizer
    groups: list[dict[str, Any]]  # the options of its parameter groups
    before: Tensors  # weights
    reduced: Tensors  # gradients
    file: Path  # where rank 0 wrote them in full
    clipped: Tensors = field(default_factory=dict)  # the gradients that the optimizer stepped with
    after: Tensors = field(default_factory=dict)  # weights
    files: Mapping[str, Path] = field(default_factory=dict)  # where rank 0 wrote those, in manual optimization
    buffers: Tensors = field(default_factory=dict)  # after


@dataclass(frozen=True)
class RunFacts:
    """How a run was set up."""

    strategy: str  # its class
    told: StrategyFacts  # what `GradAvgStrategy.facts()` says, and what it would say of stock DDP
    stock: bool  # whether it is another strategy than ours
    automatic: bool  # whether Lightning runs the backward and the optimizer
    step_end: bool  # whether the loss is that of `training_step_end`, on the outputs of all replicas
    statistics: bool  # whether batch norm is over all ranks' samples (`sync_batchnorm`)
    precision: str
    device: str  # its type
    settings: dict[str, Any]  # what torch computes with
    dtypes: dict[str, torch.dtype]  # of parameters and buffers
    loader_size: int | None = None  # samples in a full batch; None without a batch size, or where ranks share a batch
    estimated_steps: float | None = None
    epoch_batches: float = math.inf  # on each rank
    padded: int = 0  # samples that the sampler repeats in an epoch so that all ranks have equally many
    shuffles: bool = False

    @property
    def window(self) -> int:
        """Micro-batches of a full accumulation window on each rank."""
        return self.told.accumulation * self.told.micro_batches

    @property
    def whole_only(self) -> bool:
        """Whether the gradient is that of the whole batch by design, which has no parts on one process."""
        return self.step_end or (self.told.replicated and self.told.replicas is None)


@dataclass
class Tape:
    """What one rank recorded."""

    rank: int
    facts: RunFacts
    initial: Tensors = field(default_factory=dict)  # sketches of the weights before the first call
    batches: list[Loaded] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # for each batch one for each replica, else one
    steps: list[Step] = field(default_factory=list)
    problem: str | None = None  # why not everything was recorded


def patched(owner: type, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace a method of a class by `make(method)`, and return what puts it back."""
    original, inherited = getattr(owner, name), name not in vars(owner)
    setattr(owner, name, functools.wraps(original)(make(original)))
    return functools.partial(delattr, owner, name) if inherited else functools.partial(setattr, owner, name, original)


def _quietly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method of the recorder do nothing once recording has ended, and end it where it fails, and not the run."""

    @functools.wraps(method)
    def guarded(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs) if self.listens else None
        except Exception as error:  # noqa: BLE001  # whatever it is, the run is not to end with it
            self.problem = self.problem or f"the run could not be recorded ({type(error).__name__}): {error}"
            self.release()

    return guarded


class Recorder(Callback):
    """Records the first optimizer steps of a run on this rank.

    Args:
        steps: Optimizer steps to record. The ranks agree after each batch whether all have as many.
        folder: Where rank 0 writes weights and gradients.
        progress: Is told what is done.

    Attributes:
        tape: What is recorded, once training began.
        problem: Why recording failed, or None.
        listens: Whether it records.
        complete: Whether all ranks have recorded all steps.
    """

    def __init__(self, steps: int, folder: str | Path, progress: Callable[[str], None] = lambda _: None) -> None:
        if steps < 1:
            raise ValueError(f"steps must be 1 or more, got {steps}")
        self.steps, self.folder, self.progress = steps, Path(folder), progress
        self.tape: Tape | None = None
        self.problem: str | None = None
        self.listens = self.complete = False
        self._undo: list[Callable[[], None]] = []

    @property
    def recorded(self) -> Tape:
        """What is recorded.

        Raises:
            RuntimeError: If training has not begun.
        """
        if self.tape is None:
            raise RuntimeError(self.problem or "training did not begin, so nothing was recorded")
        self.tape.problem = self.problem
        return self.tape

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen."""
        self.tape, self.problem, self.listens, self.complete = None, None, True, False
        self._open(trainer, pl_module)

    @_quietly
    def _open(self, trainer: Trainer, module: LightningModule) -> None:
        self.tape = Tape(trainer.global_rank, facts_of(trainer, module))
        if "training_step" in vars(module):  # and no longer found on the class
            raise RuntimeError("training_step is compiled: its batches and random numbers cannot be followed")
        if trainer.global_step > 0 or trainer.current_epoch > 0:
            raise RuntimeError("the run goes on from an earlier one: what its optimizers hold is not known")
        self._module, self._trainer = module, trainer
        self._written: Tensors = {}  # sketches of the weights that are in a file
        self._files: dict[str, Path] = {}
        self._numbers = itertools.count()
        self._kept: dict[tuple[str, bytes], Any] = {}  # states of the module, by their digests
        self._hooked: set[str] = set()
        self._step: Step | None = None
        self._begun = self._earlier = 0  # the first batch of the window; the steps before this batch
        self._ended = False  # whether the window was stepped on
        self._reading: tuple[str | None, Tensors] | None = None
        self._watch(BEFORE_TRANSFER, self._saw_batch)
        self._watch("training_step", self._begin, self._end)
        self._watch("manual_backward", self._before_backward, self._read)
        self._undo += [each.register_step_post_hook(self._stepped).remove for each in trainer.optimizers]

    def _watch(self, name: str, before: Callable[..., Any], after: Callable[..., None] = lambda *_: None) -> None:
        """Have a method of the module tell its arguments before, and what was told and its result afterwards."""

        def make(original: Any) -> Any:
            def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
                noted = before(*args, **kwargs) if module is self._module else None
                result = original(module, *args, **kwargs)
                if noted is not None:
                    after(noted, result)
                return result

            return watched

        self._undo.append(patched(type(self._module), name, make))

    @_quietly
    def _saw_batch(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Begin a new batch, and hear of the gradients of all parameters that can have one now."""
        tape = self.recorded
        if self._ended:
            self._begun, self._ended = len(tape.batches), False
        self._step, self._earlier = None, len(tape.steps)  # a step that was begun was left out by a gradient scaler
        tape.batches.append(Loaded(self._trainer.current_epoch, digests(batch, tape.facts.loader_size)))
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and name not in self._hooked:
                self._hooked.add(name)
                hook = functools.partial(self._saw_gradient, name, parameter)
                self._undo.append(parameter.register_hook(hook).remove)

    @_quietly
    def _begin(self, *args: Any, **kwargs: Any) -> Call | None:
        # Recomputed replicas run it in the backward, and some optimizers again within a step.
        if self._step is not None or in_backward():
            return None
        tape, strategy = self.recorded, self._trainer.strategy
        # What did not change is the same object in all calls, and is sent to the reference once.
        live = module_state(self._module)
        state = {name: self._kept.setdefault((name, digest(value)), value) for name, value in live.items()}
        self._write_weights()
        tape.initial = tape.initial or self._written
        self._call = Call(
            tape.rank,
            len(tape.batches) - 1,
            copy.deepcopy(move_data_to_device((*args, *kwargs.values()), torch.device("cpu"))),
            random_states(strategy.root_device),
            state,
            dict(self._files),
            not isinstance(strategy, GradAvgStrategy) or strategy.facts().samples != 0,
        )
        tape.calls.append(self._call)
        return self._call

    @_quietly
    def _end(self, call: Call, output: Any) -> None:
        for name, (term, weight) in loss_terms(output).items():
            self._saw_loss(call, name, term, weight)

    @_quietly
    def _before_backward(self, loss: Tensor, *args: Any, weight: Any = None, **kwargs: Any) -> str:
        number = str(len(self._call.losses))
        self._saw_loss(self._call, number, loss, as_number(weight))
        return number

    def _saw_loss(self, call: Call, name: str, term: Tensor, weight: float | None) -> None:
        call.losses[name], call.weights[name] = float(term.detach()), weight
        if term.requires_grad:
            term.register_hook(functools.partial(self._saw_seed, call, name))

    @_quietly
    def _saw_seed(self, call: Call, name: str, gradient: Tensor | None) -> None:
        self._call = call  # replicas of a batch have their backwards after all forwards
        # None: the strategy keeps a micro-batch that does not count from the gradients.
        call.seeds[name] = 0.0 if gradient is None else float(gradient.detach().mean())

    @_quietly
    def _saw_gradient(self, name: str, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if self._step is not None or gradient is None:
            return
        found = self._call.gradients.setdefault(self._loss_of_step(), {})
        # In manual optimization a gradient that the user cleared counts no longer.
        kept = self._module.automatic_optimization or (parameter.grad is not None and bool(parameter.grad.any()))
        found[name] = sketch(gradient) + (found.get(name, 0) if kept else 0)

    def _loss_of_step(self) -> str:
        """Return the key of the gradient that the next step is taken with."""
        within = len(self.recorded.steps) - self._earlier
        return WHOLE_LOSS if self._module.automatic_optimization else str(within)

    @_quietly
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the reduced gradient before the user's own hook of this name, and clipping, may change it."""
        if pl_module.automatic_optimization and not TrainingLoop(trainer.fit_loop).accumulates:
            self._read(WHOLE_LOSS)

    @_quietly
    def _read(self, backward: str | None, result: Any = None) -> None:
        """Read the reduced gradient after a backward, or where that is None before the step."""
        if self._step is not None:
            return
        live, scaler = live_gradients(self._module), getattr(self._trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            live = {name: gradient / scaler.get_scale() for name, gradient in live.items()}
        self._write(live, self._file())
        self._reading = backward, sketches(live)

    def _file(self) -> Path:
        return self.folder / f"gradient-{len(self.recorded.steps)}.pt"

    def _write(self, tensors: Tensors, file: Path) -> None:
        if self.recorded.rank == 0:
            torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, file)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note what the optimizer starts from."""
        self._begin_step(getattr(optimizer, "optimizer", optimizer))

    @_quietly
    def _begin_step(self, optimizer: Optimizer) -> None:
        if self._step is not None:
            raise RuntimeError(_SEVERAL_LOSSES)
        if self._reading is None:  # of a backward past Lightning
            self._read(None)
        assert self._reading is not None
        (backward, reduced), self._reading = self._reading, None
        self._write_weights()
        self._ended = True
        self._step = Step(
            (self._begun, len(self.recorded.batches)),
            self._loss_of_step(),
            backward,
            type(optimizer).__name__,
            options_of(optimizer),
            self._written,
            among(reduced, trained_by(optimizer, self._module)),
            self._file(),
        )

    @_quietly
    def _stepped(self, *args: Any) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        step.clipped = sketches(among(live_gradients(self._module), step.reduced))
        step.after = weights_of(self._module)
        step.buffers = {name: buffer.detach().cpu().clone() for name, buffer in self._module.named_buffers()}
        if step.loss != WHOLE_LOSS:  # the same call goes on from them
            self._write_weights()
        step.files = dict(self._files)
        self.recorded.steps.append(step)
        self.progress(f"recorded step {len(self.recorded.steps)} of {self.steps}")

    def _write_weights(self) -> None:
        """Have rank 0 write the weights that changed since it last did, and all ranks take their sketches."""
        live, found, unwritten = dict(self._module.named_parameters()), weights_of(self._module), torch.zeros(0)
        changed = [name for name in live if not torch.equal(found[name], self._written.get(name, unwritten))]
        if changed:
            file = self.folder / f"weights-{next(self._numbers)}.pt"
            self._files.update(dict.fromkeys(changed, file))
            self._written = found
            self._write(among(live, changed), file)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Agree with the other ranks whether all steps are recorded."""
        if self.complete:
            return
        enough = not self.listens or len(self.recorded.steps) >= self.steps
        # All ranks come here with the same batch: Lightning itself agrees on a signal once per batch.
        self.complete = trainer.strategy.reduce_boolean_decision(enough, all=True)
        if self.complete:
            self.release()
            self.on_complete(trainer, pl_module)

    def on_complete(self, trainer: Trainer, module: LightningModule) -> None:
        """Do what there is to do when all ranks have recorded all steps, on all ranks."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop listening."""
        self.release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop listening."""
        self.release()

    def release(self) -> None:
        """Take all hooks off the run."""
        undo, self._undo, self.listens = self._undo, [], False
        for restore in reversed(undo):
            restore()


def facts_of(trainer: Trainer, module: LightningModule) -> RunFacts:
    """Return how a run that is about to train is set up."""
    strategy, loader = trainer.strategy, trainer.train_dataloader
    of_stock = StrategyFacts(RULES["mean"], accumulation=trainer.accumulate_grad_batches)
    told = strategy.facts() if isinstance(strategy, GradAvgStrategy) else of_stock
    estimated: float | None = None
    with suppress(RuntimeError):  # of an accumulation that differs between epochs
        estimated = trainer.estimated_stepping_batches
    padded, shuffles = _dealt(getattr(loader, "sampler", None))
    return RunFacts(
        strategy=type(strategy).__name__,
        told=told,
        stock=told is of_stock,
        automatic=module.automatic_optimization,
        step_end=told.equivalent_to is not None and callable(getattr(module, "training_step_end", None)),
        statistics=any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()),
        precision=str(trainer.precision),
        device=strategy.root_device.type,
        settings=torch_settings(),
        dtypes={name: each.dtype for name, each in (*module.named_parameters(), *module.named_buffers())},
        loader_size=None if told.splits_batches else getattr(loader, "batch_size", None),
        estimated_steps=estimated,
        epoch_batches=trainer.num_training_batches,
        padded=padded,
        shuffles=shuffles,
    )


def _dealt(sampler: Any) -> tuple[int, bool]:
    """Return how many samples a sampler repeats so that all ranks have equally many, and whether it shuffles."""
    if not isinstance(sampler, DistributedSampler):
        return 0, False
    return max(0, sampler.total_size - len(sampler.dataset)), bool(sampler.shuffle)  # type: ignore[arg-type]  # it has a length
