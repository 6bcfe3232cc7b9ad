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
import math
from collections.abc import Callable, Iterable, Mapping
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
from lightning_gradavg.verify.rows import digest, digests
from lightning_gradavg.verify.state import Randomness, module_state, random_states, torch_settings

__all__ = [
    "WHOLE_LOSS",
    "Call",
    "Loaded",
    "Recorder",
    "RunFacts",
    "Step",
    "Tape",
    "Tensors",
    "patched",
    "sketch",
    "sketches",
]

Tensors: TypeAlias = dict[str, Tensor]
"""Tensors or their sketches, by the name of their parameter or buffer."""

WHOLE_LOSS = ""
"""The key of a loss that has no named terms."""

_KEPT = 4096


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


def live_gradients(module: nn.Module, names: Iterable[str] | None = None) -> Tensors:
    """Return the gradients of a module's parameters, or of those named, where they have one."""
    chosen = None if names is None else set(names)
    return {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and (chosen is None or name in chosen)
    }


def loss_terms(output: Any) -> dict[str, tuple[Tensor, float | None]]:
    """Return the losses in what `training_step` returned and their weights, by name; the only one as `WHOLE_LOSS`."""
    content = output if isinstance(output, Mapping) else {"loss": output}
    given = (content.get("loss"), content.get("weight"))
    losses, weights = (each if isinstance(each, Mapping) else {WHOLE_LOSS: each} for each in given)
    known = {name: float(weight) for name, weight in weights.items() if weight is not None}
    return {name: (term, known.get(name)) for name, term in losses.items() if isinstance(term, Tensor)}


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return copies of the options of an optimizer's parameter groups, without the parameters."""
    return [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


@dataclass
class Call:
    """One call of `training_step` on one rank.

    In manual optimization losses, weights and seeds are by the number of the backward, gradients by that of the step.
    """

    args: tuple[Any, ...]  # the batch first, on the CPU
    random: Randomness  # before
    state: dict[str, Any]  # the module's buffers and plain attributes that changed since the call before
    version: int  # sets of weights that rank 0 had written before; the last of each parameter are those of this call
    counts: bool  # not if the strategy only kept the rank busy
    losses: dict[str, float] = field(default_factory=dict)  # by name, without any division
    weights: dict[str, float | None] = field(default_factory=dict)
    seeds: dict[str, float] = field(default_factory=dict)  # what each loss was multiplied by before the backward
    gradients: dict[str, Tensors] = field(default_factory=dict)  # this rank's alone, as multiplied, in sketches


@dataclass
class Loaded:
    """A batch that a rank got from its loader."""

    epoch: int
    samples: tuple[bytes, ...]  # a fingerprint of each as it was loaded
    calls: list[Call] = field(default_factory=list)  # one for each replica, else one


@dataclass
class Step:
    """One optimizer step on one rank; tensors are sketches but for the buffers."""

    batches: tuple[int, int]  # trained on since the step before: the first, and behind the last
    within: int | None  # in manual optimization its number within the call of `training_step`
    kind: str  # the class of the optimizer
    groups: list[dict[str, Any]]  # the options of its parameter groups
    before: Tensors  # weights
    reduced: Tensors  # gradients
    file: Path  # where rank 0 wrote them in full
    scale: float  # what they are multiplied by there, for half precision
    backward: int | None  # after which backward of the call they were read; None for before the step
    evaluations: int = 1  # how often the optimizer asked for the loss
    clipped: Tensors = field(default_factory=dict)  # the gradients that the optimizer stepped with
    after: Tensors = field(default_factory=dict)  # weights
    version: int = 0  # sets of weights that rank 0 had written when it was done
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
    world_size: int
    facts: RunFacts
    initial: Tensors = field(default_factory=dict)  # sketches of the weights before the first call
    batches: list[Loaded] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    spills: list[dict[str, Path]] = field(default_factory=list)  # for each set of weights the file of what changed
    problem: str | None = None  # why not everything was recorded

    def state_at(self, batch: int, call: int) -> dict[str, Any]:
        """Return the module's buffers and plain attributes before a call."""
        earlier = [each for loaded in self.batches[:batch] for each in loaded.calls]
        changes = [each.state for each in (*earlier, *self.batches[batch].calls[: call + 1])]
        return {name: value for change in changes for name, value in change.items()}


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


def _say_nothing(text: str) -> None:
    """Stand for progress that is not to be said."""


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

    def __init__(self, steps: int, folder: str | Path, progress: Callable[[str], None] = _say_nothing) -> None:
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
        self.tape.problem = self.tape.problem or self.problem
        return self.tape

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen."""
        self.tape, self.problem, self.listens, self.complete, self._taken = None, None, True, False, 0
        self._open(trainer, pl_module)

    @_quietly
    def _open(self, trainer: Trainer, module: LightningModule) -> None:
        self.tape = Tape(trainer.global_rank, trainer.world_size, facts_of(trainer, module))
        if "training_step" in vars(module):  # and no longer found on the class
            raise RuntimeError("training_step is compiled: its batches and random numbers cannot be followed")
        if trainer.global_step > 0 or trainer.current_epoch > 0:
            raise RuntimeError("the run goes on from an earlier one: what its optimizers hold is not known")
        self._module, self._trainer = module, trainer
        self._written: Tensors = {}
        self._digests: dict[str, bytes] = {}
        self._hooked: set[str] = set()
        self._call: Call | None = None
        self._step: Step | None = None
        self._begun = 0  # the first batch of the window
        self._reading: tuple[int, Tensors] | None = None
        self._watch(BEFORE_TRANSFER, self._saw_batch)
        self._watch("training_step", self._begin, self._end)
        self._watch("manual_backward", self._before_backward, self._read)
        self._undo += [each.register_step_post_hook(self._stepped).remove for each in trainer.optimizers]

    def _watch(self, name: str, before: Callable[..., Any], after: Callable[..., None] | None = None) -> None:
        """Have a method of the module tell its arguments before, and what was told and its result afterwards."""

        def make(original: Any) -> Any:
            def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
                noted = before(*args, **kwargs) if module is self._module else None
                result = original(module, *args, **kwargs)
                if noted is not None and after is not None:
                    after(noted, result)
                return result

            return watched

        self._undo.append(patched(type(self._module), name, make))

    @_quietly
    def _saw_batch(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Begin a new batch, and hear of the gradients of all parameters that can have one now."""
        tape = self.recorded
        if self._step is not None:  # a gradient scaler left it out
            self._step, self._begun = None, len(tape.batches)
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
        tape, strategy, state = self.recorded, self._trainer.strategy, module_state(self._module)
        known, self._digests = self._digests, {name: digest(value) for name, value in state.items()}
        self._write_weights()
        tape.initial = tape.initial or dict(self._written)
        self._call = Call(
            copy.deepcopy(move_data_to_device((*args, *kwargs.values()), torch.device("cpu"))),
            random_states(self._trainer.strategy.root_device),
            {name: value for name, value in state.items() if known.get(name) != self._digests[name]},
            len(tape.spills),
            not isinstance(strategy, GradAvgStrategy) or strategy.facts().samples != 0,
        )
        tape.batches[-1].calls.append(self._call)
        return self._call

    @_quietly
    def _end(self, call: Call, output: Any) -> None:
        for name, (term, weight) in loss_terms(output).items():
            self._saw_loss(call, name, term, weight)

    @_quietly
    def _before_backward(self, loss: Tensor, *args: Any, weight: Any = None, **kwargs: Any) -> int | None:
        if self._call is None:
            return None
        number = len(self._call.losses)
        self._saw_loss(self._call, str(number), loss, None if weight is None else float(weight))
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
        if self._call is None or self._step is not None or gradient is None:
            return
        automatic = self._module.automatic_optimization
        found = self._call.gradients.setdefault(WHOLE_LOSS if automatic else str(self._steps_within()), {})
        # In manual optimization a gradient that the user cleared counts no longer.
        kept = automatic or (parameter.grad is not None and bool(parameter.grad.any()))
        found[name] = sketch(gradient) + (found.get(name, 0) if kept else 0)

    def _steps_within(self) -> int:
        """Return how many steps were taken in this call."""
        steps, number = self.recorded.steps, len(self.recorded.batches)
        return sum(step.within is not None and step.batches[1] == number for step in steps)

    @_quietly
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the reduced gradient before the user's own hook of this name, and clipping, may change it."""
        if pl_module.automatic_optimization and not TrainingLoop(trainer.fit_loop).accumulates:
            self._read(0)

    @_quietly
    def _read(self, backward: int, result: Any = None) -> None:
        """Read the reduced gradient after a backward, or where that is -1 before the step."""
        if self._step is not None:
            return
        live, scaler = live_gradients(self._module), getattr(self._trainer.precision_plugin, "scaler", None)
        self._scale = 1.0 if scaler is None else float(scaler.get_scale())
        if self.recorded.rank == 0:
            torch.save({name: gradient.detach().cpu() for name, gradient in live.items()}, self._file(backward))
        self._reading = backward, {name: found / self._scale for name, found in sketches(live).items()}

    def _file(self, backward: int) -> Path:
        return self.folder / f"gradient-{len(self.recorded.steps)}-{backward}.pt"

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note what the optimizer starts from."""
        self._begin_step(getattr(optimizer, "optimizer", optimizer))

    @_quietly
    def _begin_step(self, optimizer: Optimizer) -> None:
        if self._step is not None:  # the same step asks for the loss again
            self._step.evaluations += 1
            return
        if self._reading is None:  # of a backward past Lightning
            self._read(-1)
        assert self._reading is not None
        (number, reduced), self._reading = self._reading, None
        self._write_weights()
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        names = {name for name, parameter in self._module.named_parameters() if id(parameter) in trained}
        self._step = Step(
            (self._begun, len(self.recorded.batches)),
            None if self._module.automatic_optimization else self._steps_within(),
            type(optimizer).__name__,
            options_of(optimizer),
            dict(self._written),
            {name: tensor for name, tensor in reduced.items() if name in names},
            self._file(number),
            self._scale,
            None if number < 0 else number,
        )

    @_quietly
    def _stepped(self, *args: Any) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        step.clipped = sketches(live_gradients(self._module, step.reduced))
        step.after = sketches(dict(self._module.named_parameters()))
        step.buffers = {name: buffer.detach().cpu().clone() for name, buffer in self._module.named_buffers()}
        if step.within is not None:
            self._write_weights()
        step.version = len(self.recorded.spills)
        self.recorded.steps.append(step)

    def _write_weights(self) -> None:
        """Have rank 0 write the weights that changed since it last did, and all ranks take their sketches."""
        tape, live = self.recorded, dict(self._module.named_parameters())
        found = sketches(live)
        changed = [n for n in live if n not in self._written or not torch.equal(self._written[n], found[n])]
        if changed:
            file = self.folder / f"weights-{len(tape.spills)}.pt"
            tape.spills.append(dict.fromkeys(changed, file))
            self._written.update({name: found[name] for name in changed})
            if tape.rank == 0:
                torch.save({name: live[name].detach().cpu() for name in changed}, file)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Agree with the other ranks whether all steps are recorded."""
        self._taken += 1
        self._end_batch()
        if self.complete or self._taken < self.steps:
            return
        enough = self.problem is not None or (self.tape is not None and len(self.tape.steps) >= self.steps)
        # All ranks come here with the same batch: Lightning itself agrees on a signal once per batch.
        self.complete = trainer.strategy.reduce_boolean_decision(enough, all=True)
        if self.complete:
            self.release()
            self.on_complete(trainer, pl_module)

    @_quietly
    def _end_batch(self) -> None:
        steps, number = self.recorded.steps, len(self.recorded.batches)
        if steps and steps[-1].batches[1] == number:
            self._begun = number
            self.progress(f"recorded step {len(steps)} of {self.steps}")

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


def _of_stock(trainer: Trainer) -> StrategyFacts:
    """Return what `GradAvgStrategy.facts()` would say of stock DDP."""
    return StrategyFacts(
        rule=RULES["mean"],
        splits_batches=False,
        accumulation=trainer.accumulate_grad_batches,
        micro_batches=1,
        replicas=None,
        replicated=False,
        counts_replicas=False,
        equivalent_to=None,
        scales_rates=False,
        samples=None,
    )


def facts_of(trainer: Trainer, module: LightningModule) -> RunFacts:
    """Return how a run that is about to train is set up."""
    strategy, loader = trainer.strategy, trainer.train_dataloader
    ours = isinstance(strategy, GradAvgStrategy)
    told = strategy.facts() if isinstance(strategy, GradAvgStrategy) else _of_stock(trainer)
    sampler: Any = getattr(loader, "sampler", None)
    repeats = isinstance(sampler, DistributedSampler)
    try:
        estimated: float | None = trainer.estimated_stepping_batches
    except RuntimeError:  # of an accumulation that differs between epochs
        estimated = None
    return RunFacts(
        strategy=type(strategy).__name__,
        told=told,
        stock=not ours,
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
        padded=max(0, sampler.total_size - len(sampler.dataset)) if repeats else 0,
        shuffles=repeats and bool(sampler.shuffle),
    )
