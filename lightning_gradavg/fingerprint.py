"""Which state a run is in, in a few characters; and by two runs' logs of it, where they part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gradavg.tree import bits, leaves

__all__ = ["Parting", "StateLog", "combined", "parting_of", "state_digests"]

_SIZE = 8  # bytes of a digest: 16 characters


def state_digests(
    module: nn.Module, optimizers: Sequence[Optimizer], further: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, str]:
    """Return a digest of every tensor and number of a training state, by name: 16 characters that its bits decide.

    Args:
        module: Its parameters and buffers count, those that are not saved with it, too.
        optimizers: What each keeps of every parameter, and the options of its groups.
        further: Other values by name, such as random states; one digest each.
    """
    return {name: _digest(value) for name, value in _state(module, optimizers, further)}


def combined(digests: Mapping[str, str]) -> str:
    """Return the one digest of all digests: the fingerprint of a state."""
    return blake2b(repr(sorted(digests.items())).encode(), digest_size=_SIZE).hexdigest()


def _state(module: nn.Module, optimizers: Sequence[Optimizer], further: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    names = {parameter: name for name, parameter in module.named_parameters()}
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            yield from leaves(options, f"optimizer {index}, group {number}")
            for position, parameter in enumerate(group["params"]):
                name = names.get(parameter, f"group {number}, parameter {position}")
                yield from leaves(optimizer.state.get(parameter, {}), f"optimizer {index}, {name}")
    yield from further.items()


def _digest(value: Any) -> str:
    digest = blake2b(digest_size=_SIZE)
    for place, leaf in leaves(value):
        digest.update(f"{place}{_described(leaf)};".encode())
        if isinstance(leaf, Tensor):
            digest.update(bits(leaf))
    return digest.hexdigest()


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype}{tuple(leaf.shape)}"
    # The text of a user's object may hold its address.
    return repr(leaf) if isinstance(leaf, (int, float, complex, str, bytes, type(None))) else type(leaf).__qualname__


class StateLog:
    """A file with one line of JSON per logged step: its number, the fingerprint, and the digest of every tensor.

    Args:
        path: The file. Lines are added to one that is there: a run that goes on from a checkpoint continues its log.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def add(self, step: int, digests: Mapping[str, str]) -> None:
        """Add the state after `step` optimizer steps."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "fingerprint": combined(digests), "digests": dict(digests)}) + "\n")

    def read(self) -> dict[int, dict[str, str]]:
        """Return the digests by step; of a step that was taken again, after a kill, the later ones.

        Raises:
            ValueError: If there is no such file, or a line but the last is no state.
        """
        if not self.path.is_file():
            raise ValueError(
                f"there is no file {str(self.path)!r}; GradAvgMonitor(state_log={str(self.path)!r}) writes it"
            )
        states = {}
        lines = self.path.read_text("utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                state = json.loads(line)
                states[int(state["step"])] = dict(state["digests"])
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines):  # of a run that was killed while it wrote
                    break
                raise ValueError(f"{self.path}, line {number} is no state of a run: {line[:80]!r}") from error
        return states


@dataclass(frozen=True)
class Parting:
    """Where two runs part.

    Attributes:
        compared: The steps that both logged.
        step: The first of them where they differ, or None.
        names: What differs there, in the order of the state.
        total: Number of tensors and numbers of the state there.
    """

    compared: tuple[int, ...]
    step: int | None = None
    names: tuple[str, ...] = ()
    total: int = 0


def parting_of(first: StateLog, second: StateLog) -> Parting:
    """Return where the runs of two logs part.

    Raises:
        ValueError: If a log cannot be read, or they have no step in common.
    """
    one, other = first.read(), second.read()
    compared = tuple(sorted(one.keys() & other.keys()))
    if not compared:
        raise ValueError(
            f"no step is in both logs: {first.path} has the steps {_shown(one)}, {second.path} {_shown(other)}."
            " Log both with the same every_n_steps."
        )
    for step in compared:
        mine, theirs = one[step], other[step]
        names = tuple(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))
        if names:
            return Parting(compared, step, names, len({**mine, **theirs}))
    return Parting(compared)


def _shown(states: Mapping[int, Any]) -> str:
    steps = sorted(states)
    return f"{steps[0]} to {steps[-1]}" if steps else "(none)"
