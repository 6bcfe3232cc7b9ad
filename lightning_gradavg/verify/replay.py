"""Calls of `training_step` on one process, each from a stated state: what everything about gradients is told from.

A *piece* is what a call is to compute: the micro-batch of one rank, a part of it, or the samples of all ranks. A
*replay* is what came of it. A *split* is a whole and its parts, where the whole draws what the parts drew (`noise`);
what combination of the parts' gradients is that of the whole says what the loss is: a sum over samples, or a mean
over samples or over what the weights count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_gradavg.verify.compare import RIGHT, Parts, Tolerance, flattened, implied_shares, matches
from lightning_gradavg.verify.noise import Recorded
from lightning_gradavg.verify.record import Call, Step, Tape, Tensors, live_gradients, loss_terms, sketches
from lightning_gradavg.verify.rows import UnknownSamplesError, samples_in
from lightning_gradavg.verify.state import (
    generators_of,
    host_random_state,
    module_state,
    restore_random_states,
    set_module_state,
)

__all__ = ["Act", "Piece", "Replay", "Replays", "Split", "acts_of"]

_COLUMNS = 64  # of each output, for each sample


@dataclass(frozen=True)
class Piece:
    """What one call of `training_step` on one process is to compute."""

    rank: int  # whose state and random numbers it starts from
    batch: int  # the number of the loader's batch, and
    index: int  # of the call on it
    call: Call
    args: tuple[Any, ...]  # other samples than the call's where it is a part of it, or the whole
    size: int | None  # in samples; None where that is not known


@dataclass(frozen=True)
class Act:
    """What one batch of the reference reproduces."""

    steps: tuple[int, ...]  # one, or those that manual optimization takes in a batch
    epoch: int
    pieces: tuple[Piece, ...]  # every rank's calls whose samples count, in the order of one process
    last: Piece  # the call of rank 0 in which the last of the steps is taken


def acts_of(tapes: Sequence[Tape]) -> list[Act]:
    """Return what one process has to do to take the steps that all ranks took."""
    windows: dict[tuple[int, int], list[int]] = {}
    for position, step in enumerate(tapes[0].steps[: min(len(tape.steps) for tape in tapes)]):
        windows.setdefault(step.batches, []).append(position)
    return [
        Act(
            tuple(steps),
            tapes[0].batches[stop - 1].epoch,
            tuple(_pieces(tapes, start, stop)),
            _piece(tapes[0], stop - 1, len(tapes[0].batches[stop - 1].calls) - 1),
        )
        for (start, stop), steps in windows.items()
    ]


def _pieces(tapes: Sequence[Tape], start: int, stop: int) -> Iterator[Piece]:
    """Yield the calls of a window: by loader batch, then by rank, then by the cuts of a rank's part."""
    cuts = tapes[0].facts.told.micro_batches
    for first in range(start, stop, cuts):
        for tape in tapes:
            for batch in range(first, min(first + cuts, stop, len(tape.batches))):
                calls = tape.batches[batch].calls
                yield from (_piece(tape, batch, index) for index, call in enumerate(calls) if call.counts)


def _piece(tape: Tape, batch: int, index: int) -> Piece:
    call = tape.batches[batch].calls[index]
    try:
        size: int | None = samples_in(call.args[0], tape.facts.loader_size)
    except UnknownSamplesError:
        size = None
    return Piece(tape.rank, batch, index, call, call.args, size)


@dataclass
class Replay:
    """What one process computed of a piece; gradients in manual optimization by the number of the step."""

    losses: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float | None] = field(default_factory=dict)
    gradients: dict[str, Tensors] = field(default_factory=dict)  # sketches, by the name of the loss, undivided
    outputs: Tensors = field(default_factory=dict)  # some numbers of each sample's, by the module that made them
    state: dict[str, Any] = field(default_factory=dict)  # the module's buffers and attributes afterwards
    mode: Recorded = field(default_factory=Recorded)  # what followed its random numbers
    layers: tuple[str, ...] = ()  # the submodules that drew any
    host: bool = False  # whether Python or NumPy drew any


@dataclass
class Split:
    """Parts and whole of the same samples, with the same random numbers."""

    pieces: Sequence[Piece]
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
        return Parts(
            tuple(piece.rank for piece in self.pieces),
            all_known([piece.size for piece in self.pieces]),
            all_known([part.weights.get(key) for part in self.parts]),
        )

    def right(self, key: str, tolerance: Tolerance) -> tuple[list[str], list[float] | None]:
        """Return how the parts' gradients make up the whole's: the names of combinations, or else the shares."""
        if key not in self.whole.gradients:
            return [], None
        like = self.whole.gradients[key]
        rows = torch.stack([flattened(part.gradients.get(key, {}), like) for part in self.common])
        found = matches(flattened(like, like), rows, self.known(key), tolerance)
        names = [name for name in RIGHT if name in found]
        return names, None if names else implied_shares(flattened(like, like), rows, tolerance)

    def tells(self, tolerance: Tolerance) -> bool:
        """Return whether the parts' gradients make up the whole's."""
        return self.has_whole and all(any(self.right(key, tolerance)) for key in self.whole.gradients)


def all_known(values: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the values, or None where there are none or one of them is None."""
    return tuple(values) if values and None not in values else None


class Replays:
    """Computes calls of `training_step` on one process, each from a stated state.

    Args:
        tapes: What the ranks recorded.
        strategy: What runs the step.

    Attributes:
        replaying: The replay under way, if any.
    """

    def __init__(self, tapes: Sequence[Tape], strategy: SingleDeviceStrategy) -> None:
        self.tapes, self._strategy = tapes, strategy
        self.replaying: Replay | None = None
        self._loaded: dict[str, Path] = {}
        self._files: dict[Path, Tensors] = {}
        self._seeds: Mapping[str, float] = {}
        self._steps: Sequence[Step] = ()
        self._taken = 0

    @property
    def module(self) -> LightningModule:
        """The module in training."""
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module

    def load(self, version: int) -> None:
        """Load the weights of the run after rank 0 had written so many sets of them."""
        wanted = {name: file for spill in self.tapes[0].spills[:version] for name, file in spill.items()}
        for name, parameter in self.module.named_parameters():
            if name in wanted and self._loaded.get(name) != wanted[name]:
                parameter.data.copy_(self.open(wanted[name])[name])  # past autograd, which counts versions
                self._loaded[name] = wanted[name]

    def open(self, file: Path) -> Tensors:
        """Return the tensors in a file, which are read when they are used."""
        if file not in self._files:
            self._files = {**dict(list(self._files.items())[-3:]), file: torch.load(file, mmap=True, weights_only=True)}
        return self._files[file]

    def restore(self, piece: Piece, state: Piece | None = None) -> None:
        """Put the module and the random generators into the state that a call of the run started from."""
        state = state or piece
        self.load(state.call.version)
        wanted, parts = self.tapes[state.rank].state_at(state.batch, state.index), dict(self.module.named_modules())
        for name in module_state(self.module).keys() - wanted.keys():  # what a later call left behind
            path, _, attribute = name.rpartition(".")
            delattr(parts[path], attribute)
        set_module_state(self.module, wanted)
        restore_random_states(piece.call.random, self._strategy.root_device)
        self._clear()

    def _clear(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def run(
        self,
        piece: Piece,
        mode: Recorded | None = None,
        *,
        state: Piece | None = None,
        end: Callable[[Any], Any] = lambda output: output,
        host: Piece | None = None,
        moved: Mapping[str, Any] = MappingProxyType({}),
        steps: Sequence[Step] = (),
    ) -> tuple[Replay, Any]:
        """Return what a piece comes to, and what `training_step` returned.

        Args:
            piece: The piece.
            mode: Follows the random numbers of torch.
            state: The piece whose state it starts from; by default its own.
            end: Makes the loss of what `training_step` returns.
            host: The piece whose random numbers of Python and NumPy are drawn; by default its own.
            moved: Buffers and attributes that begin with other values.
            steps: In manual optimization, the steps that the run took within the call.
        """
        self.restore(piece, state)
        set_module_state(self.module, moved)
        (for_torch, *_), of_device = piece.call.random
        restore_random_states(((for_torch, *(host or piece).call.random[0][1:]), of_device), self._strategy.root_device)
        before, weights = host_random_state(), sketches(dict(self.module.named_parameters()))
        self.replaying = replay = Replay(mode=mode or Recorded())
        replay.mode.on_device = generators_of(self._strategy.root_device)
        self._seeds, self._steps, self._taken = piece.call.seeds, steps, 0
        try:
            with torch.enable_grad(), self._outputs(replay, piece.size), replay.mode:
                args = move_data_to_device(copy.deepcopy(piece.args), self._strategy.root_device)
                output = SingleDeviceStrategy.training_step(self._strategy, *args)
                if self.module.automatic_optimization:
                    self._differentiate(replay, end(output))
        finally:
            self.replaying = None
        replay.state, replay.host = module_state(self.module), host_random_state() != before
        drawing = {id(draw.module) for draw in replay.mode.draws}
        replay.layers = tuple(name for name, part in self.module.named_modules() if name and id(part) in drawing)
        for name, found in sketches(dict(self.module.named_parameters())).items():
            if not torch.equal(found, weights[name]):  # such as of a momentum encoder
                self._loaded.pop(name, None)
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
        replay.losses[name], replay.weights[name] = float(loss.detach()), None if weight is None else float(weight)
        replay.gradients[str(self._taken)] = self._gradient(name, loss, *args, **kwargs)

    def manual_step(self, optimizer: Optimizer) -> None:
        """Stand in for the step of an optimizer in manual optimization: go where the run went."""
        assert self.replaying is not None
        gradients, key = self.replaying.gradients, str(self._taken)
        found = gradients.get(key) or sketches(live_gradients(self.module))  # of a backward past Lightning
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        names = {name for name, parameter in self.module.named_parameters() if id(parameter) in trained}
        gradients[key] = {name: gradient for name, gradient in found.items() if name in names}
        if self._taken < len(self._steps):
            self.load(self._steps[self._taken].version)
        self._taken += 1

    @contextmanager
    def _outputs(self, replay: Replay, size: int | None) -> Iterator[None]:
        """Note some numbers of every sample's outputs, of every module that returns one row for each."""

        def note(name: str, output: Any) -> None:
            if isinstance(output, Tensor) and size and output.shape[:1] == (size,):
                number = sum(known.rpartition(" ")[0] == name for known in replay.outputs)
                columns = output.detach().reshape(size, -1)
                chosen = torch.linspace(0, columns.shape[1] - 1, min(_COLUMNS, columns.shape[1])).long()
                replay.outputs[f"{name} {number}"] = columns[:, chosen].double().cpu()

        with ExitStack() as stack:
            for name, part in self.module.named_modules():
                hook = part.register_forward_hook(lambda _, args, output, name=name or "forward": note(name, output))  # noqa: ARG005  # torch's
                stack.callback(hook.remove)
            yield
