"""Calls of `training_step` on one process, each from a stated state: what everything about gradients is told from.

A *call* is what is to be computed: that of one rank, a part of its samples, or the samples of all ranks. A *replay* is
what came of it. A *split* is a whole and its parts; what combination of the parts' gradients is that of the whole says
what the loss is: a sum over samples, or a mean over samples or over what the weights count.

Random numbers belong to samples: the whole batch draws, row by row, what its parts drew. A training step with dropout
draws one mask of shape `(8, 64)` for a batch of eight samples, and on two ranks two masks of shape `(4, 64)`. The step
of one process with the same noise is the one whose mask is the two, one below the other: a draw that one process could
have made. `Recorded` notes before each draw of a part what state the generator is in, and `Replayed` runs the whole
batch, makes the draws of the parts again, and joins them along the dimension that grew. A draw of the same shape in all
parts, such as one number for a batch, belongs to no sample: the first part's is taken, and the parts can be run again
with it. Torch tags every operator that draws (`nondeterministic_seeded`), so none is listed here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gradavg.lightning_internals import TorchDispatchMode, writes_in_place
from lightning_gradavg.verify.compare import RIGHT, Parts, Tolerance, combinations, flattened, implied_shares, matches
from lightning_gradavg.verify.record import (
    Call,
    Step,
    Tensors,
    among,
    as_number,
    live_gradients,
    loss_terms,
    sketches,
    trained_by,
)
from lightning_gradavg.verify.state import (
    generators_of,
    host_random_state,
    module_state,
    restore_random_states,
    set_module_state,
)

__all__ = ["Draw", "MisalignedError", "Recorded", "Replay", "Replayed", "Replays", "Split"]

_COLUMNS = 64  # of each output, for each sample


class MisalignedError(ValueError):
    """The draws of a whole batch are not those of its parts, sample by sample."""


@dataclass(frozen=True)
class Draw:
    """One draw of random numbers.

    Attributes:
        operator: The operator that drew.
        shape: Of what it drew.
        state: Of the generator before.
        module: The innermost module in whose code it happened.
    """

    operator: str
    shape: tuple[int, ...]
    state: Tensor
    module: nn.Module | None = None


class Recorded(TorchDispatchMode):
    """Notes every draw within the context.

    Attributes:
        on_device: The generators of an accelerator, beside that of the CPU.
        draws: The draws in their order, those that checkpointing makes again in the backward among them.
        collectives: The operations between ranks that were called.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.on_device: Sequence[Any] = ()
        self.draws: list[Draw] = []
        self.collectives: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and note what it drew, and from which generator."""
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self.collectives.add(func.name().removeprefix("c10d::").strip("_"))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        generators = given or [torch.default_generator, *self.on_device]
        before = [generator.get_state() for generator in generators]
        result = func(*args, **kwargs)
        for generator, state in zip(generators, before, strict=True):
            if not torch.equal(state, generator.get_state()):  # attention without dropout is tagged, too
                self.draws.append(Draw(str(func), tuple(_first(result).shape), state, _module_in_charge()))
                return self._drawn(func, args, kwargs, result, generator)
        return result

    def _drawn(self, func: Any, args: Any, kwargs: Any, result: Any, generator: Any) -> Any:
        """Return what the operator is to have drawn."""
        return result


class Replayed(Recorded):
    """Has a whole batch draw what its parts drew.

    Args:
        parts: The draws of each part; of one part only, to have it draw them again.
        shared: The positions of draws for which the first part's is taken, and
        first: those of the first part.

    Attributes:
        shared: The positions of draws that belong to no sample, and that the parts drew differently.
    """

    def __init__(
        self, parts: Sequence[Sequence[Draw]], shared: AbstractSet[int] = frozenset(), first: Sequence[Draw] = ()
    ) -> None:
        super().__init__()
        self._parts = [[first[n] if n in shared else draw for n, draw in enumerate(draws)] for draws in parts]
        self.shared: set[int] = set()

    def _drawn(self, func: Any, args: Any, kwargs: Any, result: Any, generator: Any) -> Any:
        position, shape = len(self.draws) - 1, self.draws[-1].shape
        if any(len(draws) <= position or draws[position].operator != str(func) for draws in self._parts):
            raise MisalignedError("which random numbers are drawn depends on the batch")
        draws = [draws[position] for draws in self._parts]
        if writes_in_place(func) and result is not args[0]:
            raise MisalignedError(f"{func} changes what it is given, which cannot be followed")
        if all(draw.shape == shape for draw in draws):
            if any(not torch.equal(draw.state, draws[0].state) for draw in draws):
                self.shared.add(position)
            generator.set_state(draws[0].state)
            return func(*args, **kwargs)
        rows, pieces, start = _grown([draw.shape for draw in draws], shape), [], 0
        for draw in draws:
            generator.set_state(draw.state)
            piece = func(*_narrowed(func, args, rows, start, shape, draw.shape), **kwargs)
            # A permutation numbers the samples: this part's begin at `start`.
            pieces.append(piece + start if "randperm" in str(func) else piece)
            start += draw.shape[rows]
        if isinstance(result, tuple):
            return tuple(torch.cat(each, rows) for each in zip(*pieces, strict=True))
        joined = torch.cat(pieces, rows)
        return result.copy_(joined) if writes_in_place(func) else joined

    def require_all(self) -> None:
        """Check that the whole batch drew as often as its parts.

        Raises:
            MisalignedError: If not.
        """
        if any(len(draws) != len(self.draws) for draws in self._parts):
            raise MisalignedError("how many random numbers are drawn depends on the batch")


def _module_in_charge() -> nn.Module | None:
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
        frame = frame.f_back
    return None


def _first(result: Any) -> Tensor:
    tensor: Tensor = result[0] if isinstance(result, (tuple, list)) else result
    return tensor


def _grown(parts: Sequence[tuple[int, ...]], whole: tuple[int, ...]) -> int:
    """Return the dimension along which the parts make up the whole."""
    for rows, size in enumerate(whole):
        others = {(*part[:rows], *part[rows + 1 :]) for part in parts}
        if others == {(*whole[:rows], *whole[rows + 1 :])} and sum(part[rows] for part in parts) == size:
            return rows
    shapes = ", ".join(map(str, parts))
    raise MisalignedError(f"random numbers of the shapes {shapes} do not make up those of shape {whole} of all samples")


def _narrowed(
    func: Any, args: Any, rows: int, start: int, whole: tuple[int, ...], part: tuple[int, ...]
) -> Iterator[Any]:
    """Yield the arguments of an operator for the samples of one part."""
    length = part[rows]
    for value in args:
        if isinstance(value, Tensor) and value.ndim > rows and value.shape[rows] == whole[rows]:
            yield value.narrow(rows, start, length).clone(memory_format=torch.preserve_format)
        elif isinstance(value, (list, tuple)) and tuple(value) == whole:
            yield list(part)
        else:
            yield length if "randperm" in str(func) and value == whole[0] else value


def itself(value: Any) -> Any:
    """Stand for a change that is none."""
    return value


@dataclass
class Replay:
    """What one process computed of a call; gradients in manual optimization by the number of the step."""

    losses: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float | None] = field(default_factory=dict)
    gradients: dict[str, Tensors] = field(default_factory=dict)  # sketches, by the name of the loss, undivided
    outputs: Tensors = field(default_factory=dict)  # some numbers of each sample's, by the module that made them
    state: dict[str, Any] = field(default_factory=dict)  # the module's buffers and attributes afterwards
    mode: Recorded = field(default_factory=Recorded)  # what followed its random numbers
    layers: tuple[str, ...] = ()  # the submodules that drew any
    host: bool = False  # whether Python or NumPy drew any

    def gradient(self, loss: str) -> Tensors:
        """Return the sketches of one loss's gradients; none where it has none."""
        return self.gradients.get(loss, {})


@dataclass
class Split:
    """Parts and whole of the same samples, with the same random numbers."""

    calls: Sequence[Call] = ()
    parts: Sequence[Replay] = ()  # as the ranks computed them
    common: Sequence[Replay] = ()  # from the whole's state, with its random numbers where these belong to no sample
    whole: Replay = field(default_factory=Replay)
    problem: str = ""  # why there is no whole
    own: tuple[str, ...] = ()  # what each part keeps for itself, and computes otherwise with

    @property
    def has_whole(self) -> bool:
        """Whether all samples could be computed at once."""
        return bool(self.whole.gradients)

    def known(self, key: str) -> Parts:
        """Return what is known of the parts' samples and weights."""
        return parts_of(self.calls, self.parts, key)

    def right(self, key: str, tolerance: Tolerance) -> dict[str, list[float]]:
        """Return how the parts' gradients make up the whole's: shares by the name of a combination, or of "terms"."""
        if key not in self.whole.gradients:
            return {}
        like = self.whole.gradients[key]
        rows = torch.stack([flattened(part.gradient(key), like) for part in self.common])
        known = self.known(key)
        found = matches(flattened(like, like), rows, known, tolerance)
        named = {name: combinations(known)[name] for name in RIGHT if name in found}
        shares = None if named else implied_shares(flattened(like, like), rows, tolerance)
        return named if shares is None else {"terms": shares}

    def tells(self, tolerance: Tolerance) -> bool:
        """Return whether the parts' gradients make up the whole's."""
        return self.has_whole and all(self.right(key, tolerance) for key in self.whole.gradients)


def parts_of(calls: Sequence[Call], replays: Sequence[Replay], key: str, **of_run: int) -> Parts:
    """Return what is known of the samples of calls, and of the weights of one of their losses."""
    samples, weights = [call.samples for call in calls], [replay.weights.get(key) for replay in replays]
    return Parts(tuple(call.rank for call in calls), _all_known(samples), _all_known(weights), **of_run)


def _all_known(values: Sequence[Any]) -> tuple[Any, ...] | None:
    return tuple(values) if values and None not in values else None


def tensors_in(file: Path) -> Tensors:
    """Return the tensors in a file, which are read when they are used."""
    found: Tensors = torch.load(file, mmap=True, weights_only=True)
    return found


class Replays:
    """Computes calls of `training_step` on one process, each from a stated state.

    Args:
        strategy: What runs the step.

    Attributes:
        steps: In manual optimization, the steps that the run took within the calls.
        replaying: The replay under way, if any.
    """

    def __init__(self, strategy: SingleDeviceStrategy) -> None:
        self._strategy = strategy
        self.steps: Sequence[Step] = ()
        self.replaying: Replay | None = None
        self._seeds: Mapping[str, float] = {}
        self._taken = 0

    @property
    def module(self) -> LightningModule:
        """The module in training."""
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module

    def _load(self, files: Mapping[str, Path]) -> None:
        opened = {file: tensors_in(file) for file in set(files.values())}
        for name, parameter in self.module.named_parameters():
            if name in files:
                parameter.data.copy_(opened[files[name]][name])  # past autograd, which counts versions

    def arguments(self, call: Call) -> Any:
        """Return copies of the arguments of a call, because a training step may change its batch."""
        return move_data_to_device(copy.deepcopy(call.args), self._strategy.root_device)

    def restore(self, call: Call) -> None:
        """Put the module and the random generators into the state that a call starts from."""
        self._load(call.files)
        parts = dict(self.module.named_modules())
        for name in module_state(self.module).keys() - call.state.keys():  # what a later call left behind
            path, _, attribute = name.rpartition(".")
            delattr(parts[path], attribute)
        set_module_state(self.module, call.state)
        restore_random_states(call.random, self._strategy.root_device)
        self._clear()

    def _clear(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def run(self, call: Call, mode: Recorded, end: Callable[[Any], Any] = itself) -> tuple[Replay, Any]:
        """Return what a call comes to, and what `training_step` returned.

        Args:
            call: The call.
            mode: Follows the random numbers of torch.
            end: Makes the loss of what `training_step` returns.
        """
        self.restore(call)
        before = host_random_state()
        self.replaying = replay = Replay(mode=mode)
        mode.on_device = generators_of(self._strategy.root_device)
        self._seeds, self._taken = call.seeds, 0
        try:
            with torch.enable_grad(), self._outputs(replay, call.samples), mode:
                output = SingleDeviceStrategy.training_step(self._strategy, *self.arguments(call))
                if self.module.automatic_optimization:
                    self._differentiate(replay, end(output))
        finally:
            self.replaying = None
        replay.state, replay.host = module_state(self.module), host_random_state() != before
        drawing = {id(draw.module) for draw in mode.draws}
        replay.layers = tuple(name for name, part in self.module.named_modules() if name and id(part) in drawing)
        self._clear()
        return replay, output

    def _differentiate(self, replay: Replay, output: Any) -> None:
        terms = loss_terms(output)
        for left, (name, (term, weight)) in zip(reversed(range(len(terms))), terms.items(), strict=True):
            replay.losses[name], replay.weights[name] = float(term.detach()), weight
            if term.requires_grad:
                # As in the run the user's own `backward` may be overridden.
                replay.gradients[name] = self._gradient(name, term, **({"retain_graph": True} if left else {}))
                self._clear()

    def _gradient(self, name: str, loss: Tensor, *args: Any, **kwargs: Any) -> Tensors:
        """Return sketches of the gradients after a backward from the run's own multiple of a loss, without it."""
        seed = self._seeds.get(name) or 1.0
        self.module.backward(loss * seed, *args, **kwargs)
        return {name: found / seed for name, found in sketches(live_gradients(self.module)).items()}

    def manual_backward(self, loss: Tensor, *args: Any, weight: Any = None, **kwargs: Any) -> None:
        """Stand in for a backward in manual optimization."""
        replay = self.replaying
        assert replay is not None
        name = str(len(replay.losses))
        replay.losses[name], replay.weights[name] = float(loss.detach()), as_number(weight)
        replay.gradients[str(self._taken)] = self._gradient(name, loss, *args, **kwargs)

    def manual_step(self, optimizer: Optimizer) -> None:
        """Stand in for the step of an optimizer in manual optimization: go where the run went."""
        assert self.replaying is not None
        gradients, key = self.replaying.gradients, str(self._taken)
        found = gradients.get(key) or sketches(live_gradients(self.module))  # of a backward past Lightning
        gradients[key] = among(found, trained_by(optimizer, self.module))
        for step in self.steps[self._taken : self._taken + 1]:
            self._load(step.files)
        self._taken += 1

    @contextmanager
    def _outputs(self, replay: Replay, size: int | None) -> Iterator[None]:
        """Note some numbers of every sample's outputs, of every module that returns one row for each."""

        def note(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and size and output.shape[:1] == (size,):
                number = sum(known.rpartition(" ")[0] == name for known in replay.outputs)
                columns = output.detach().reshape(size, -1)
                chosen = torch.linspace(0, columns.shape[1] - 1, min(_COLUMNS, columns.shape[1])).long()
                replay.outputs[f"{name} {number}"] = columns[:, chosen].double().cpu()

        with ExitStack() as stack:
            for name, part in self.module.named_modules():
                stack.callback(part.register_forward_hook(partial(note, name or "forward")).remove)
            yield
