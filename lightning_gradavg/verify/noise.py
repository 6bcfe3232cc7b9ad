"""Random numbers that belong to samples: the whole batch draws, row by row, what its parts drew.

A training step with dropout draws one mask of shape `(8, 64)` for a batch of eight samples, and on two ranks two masks
of shape `(4, 64)`. The step of one process with the same noise is the one whose mask is the two, one below the other: a
draw that one process could have made. `Recorded` notes before each draw of a part what state the generator is in, and
`Replayed` runs the whole batch, makes the draws of the parts again, and joins them along the dimension that grew. A
draw of the same shape in all parts, such as one number for a batch, belongs to no sample: the first part's is taken,
and the parts can be run again with it.

Torch tags every operator that draws (`nondeterministic_seeded`), so none is listed here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradavg.lightning_internals import TorchDispatchMode, writes_in_place

__all__ = ["Draw", "MisalignedError", "Recorded", "Replayed"]


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
