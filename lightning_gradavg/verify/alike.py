"""What makes two runs comparable: both compute in float64, and every sample draws its own random numbers.

A draw of a whole batch, such as one dropout mask of shape `(8, 64)`, is made of the draws of its samples, and a number
that a sample draws depends on the sample and on its place in what the sample draws: not on the batch that it is in, nor
on the length that it is padded to. So N processes and one process draw the same for the same samples. Draws that belong
to no sample are noted: what depends on them cannot be shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.lightning_internals import TorchDispatchMode, writes_in_place

__all__ = ["Alike", "seed_of"]

_LOW = frozenset({torch.float32, torch.float16, torch.bfloat16})
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of splitmix64, as signed


def seed_of(*what: Any) -> int:
    """Return 56 bits that stand for some values."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest(), "big")


def _mixed(bits: Tensor) -> Tensor:
    """Return well mixed 64-bit integers, as splitmix64 makes them."""
    mixed: Tensor = bits * _MULTIPLIERS[0]
    for shift, multiplier in ((30, _MULTIPLIERS[1]), (27, _MULTIPLIERS[2]), (31, 1)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return torch.as_tensor(mixed)


def _uniform(shape: Sequence[int], rows: int, each: int, seeds: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers between 0 and 1 of the samples along dimension `rows`, of which each has `each` positions."""
    place = torch.arange(shape[rows], device=device)
    of_rows = _mixed(torch.tensor(seeds, device=device)[place // each] + _mixed(place % each))
    bits = of_rows.reshape([-1 if dim == rows else 1 for dim in range(len(shape))])
    for dim, size in enumerate(shape):
        if dim != rows:
            along = torch.arange(1, size + 1, device=device)
            bits = _mixed(bits + along.reshape([-1 if other == dim else 1 for other in range(len(shape))]))
    return (((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53


def _between(uniform: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * uniform


def _normal(uniform: Tensor, mean: Any = 0.0, deviation: Any = 1.0) -> Tensor:
    drawn: Tensor = mean + deviation * torch.special.ndtri(uniform)
    return drawn


def _dropped(uniform: Tensor, given: Tensor, part: float, *_: Any) -> tuple[Tensor, Tensor]:
    mask = uniform < 1 - part
    return given * mask / (1 - part if part < 1 else 1), mask


_FORMS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("aten.rand", "aten.rand_like"), lambda u, *_: u),
    **dict.fromkeys(("aten.randn", "aten.randn_like"), lambda u, *_: _normal(u)),
    "aten.uniform_": lambda u, _, *given: _between(u, *given),
    "aten.normal_": lambda u, _, *given: _normal(u, *given),
    "aten.bernoulli_": lambda u, _, part=0.5: u < part,
    "aten.bernoulli": lambda u, given, part=None: u < (given if part is None else part),
    "aten.native_dropout": _dropped,
}
"""What is made of uniform numbers, by operator: the same at every length. Others draw once for each sample."""


class Alike(TorchDispatchMode):
    """Has operators compute in float64, and draw for each sample by itself.

    Args:
        double: Whether low-precision types become float64.

    Attributes:
        keys: One for each sample of the batch in training, in its order; the first two numbers are those of its group,
            which is one micro-batch of one rank.
        shared: What was drawn for no single sample, by operator.
        trace: The draws of the batch: operator, and the dimension of the samples.
        collectives: The operations between ranks.
        last: The operator that ran last.
        paused: Whether operators run as they are.
        first: The dimension that is rather that of the samples, 0 or 1.
    """

    def __init__(self, *, double: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.double, self.last = double, ""
        self.keys: list[tuple[int, ...]] = [(0, 0, 0)]
        self.paused, self.first = False, 0
        self.shared: dict[str, None] = {}
        self.trace: list[tuple[str, int]] = []
        self.collectives: set[str] = set()

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Have operators within run as they are."""
        paused, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = paused

    def begin(self, keys: Sequence[tuple[int, ...]]) -> None:
        """Begin with a batch of these samples."""
        self.keys, self.trace = list(keys), []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        kwargs = dict(kwargs or {})
        if self.paused:
            return func(*args, **kwargs)
        self.last = str(func)
        if func.namespace == "c10d":
            self.collectives.add(func.name().removeprefix("c10d::").strip("_"))
        elif self.double:
            args, kwargs = _widened(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        return self._draw(func, args, kwargs)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        generator, name = torch.default_generator, str(func.overloadpacket)
        in_place = writes_in_place(func)
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            self.shared[f"{name}, with a generator of its own"] = None
            return func(*args, **kwargs)
        before, given = generator.get_state(), args[0].clone() if in_place else None
        devices = {each.device for each in args if isinstance(each, Tensor)} - {torch.device("cpu")}
        here = [(device, _state(device)) for device in devices]
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        drew = [not torch.equal(state, _state(device)) for device, state in here]
        if torch.equal(before, generator.get_state()) and not any(drew) and first.device.type == "cpu":
            return result  # as attention without dropout
        chain = hashlib.blake2b(before.numpy().tobytes(), digest_size=8).hexdigest()
        rows, each = self._place(first.shape)
        self.trace.append((name, rows))
        if name == "aten.randperm" and len(first) == len(self.keys):
            drawn: Any = torch.cat(list(self._permutations(chain))).to(first)
        elif rows < 0 or name == "aten.randperm":
            self.shared[name] = None
            generator.manual_seed(seed_of(chain))
            drawn = func(*args, **kwargs)
        elif name in _FORMS:
            seeds = [seed_of(chain, key) for key in self.keys]
            made = _FORMS[name](_uniform(first.shape, rows, each, seeds, first.device), *args)
            drawn = made if isinstance(made, tuple) else made.to(first.dtype)
        else:
            drawn = self._each(func, (given, *args[1:]) if in_place else args, kwargs, (rows, each, chain), first)
        generator.manual_seed(seed_of(chain, "next"))
        return result.copy_(drawn) if in_place and drawn is not result else drawn

    def _place(self, shape: torch.Size) -> tuple[int, int]:
        """Return the dimension of the samples, -1 where there is none, and the positions of each along it."""
        size = len(self.keys)
        for rows in (self.first, 1 - self.first):
            if (rows == 0 or self.first or len(shape) > 2) and rows < len(shape) and shape[rows] == size:  # noqa: PLR2004
                return rows, 1
        whole = len(shape) > 0 and shape[0] > 0 and shape[0] % size == 0
        return (0, shape[0] // size) if whole else (-1, 0)

    def _permutations(self, chain: str) -> Iterator[Tensor]:
        """Yield a permutation within each micro-batch of each rank, counted from where it begins."""
        start = 0
        for group in dict.fromkeys(key[:2] for key in self.keys):
            torch.default_generator.manual_seed(seed_of(chain, group))
            size = sum(key[:2] == group for key in self.keys)
            yield torch.randperm(size) + start
            start += size

    def _each(self, func: Any, args: Any, kwargs: Any, how: tuple[int, int, str], whole: Tensor) -> Any:
        """Draw once for each sample."""
        rows, each, chain = how
        pieces = []
        for index, key in enumerate(self.keys):
            torch.default_generator.manual_seed(seed_of(chain, key))
            mine = [_narrowed(value, whole.shape, rows, index * each, each) for value in args]
            pieces.append(func(*mine, **kwargs))
        if isinstance(pieces[0], tuple):
            return tuple(torch.cat(column, rows) for column in zip(*pieces, strict=True))
        return torch.cat(pieces, rows)


def _state(device: torch.device) -> Tensor:
    of_type: Any = getattr(torch, device.type)
    state: Tensor = of_type.get_rng_state(device)
    return state


def _narrowed(value: Any, whole: torch.Size, rows: int, start: int, length: int) -> Any:
    """Return an argument of an operator for one sample."""
    if isinstance(value, Tensor) and value.ndim > rows and value.shape[rows] == whole[rows]:
        return value.narrow(rows, start, length).clone()
    if isinstance(value, (list, tuple)) and list(value) == list(whole):
        return [*value[:rows], length, *value[rows + 1 :]]
    return value


def _widened(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of an operator with float64 for lower types, where types are stated or mixed."""
    if kwargs.get("dtype") in _LOW:
        kwargs["dtype"] = torch.float64
    tensors = [each for value in args for each in (value if isinstance(value, (list, tuple)) else [value])]
    types = {each.dtype for each in tensors if isinstance(each, Tensor)}
    if torch.float64 not in types or not types & _LOW:
        return args, kwargs
    keeps_first = writes_in_place(func)

    def wide(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(wide(each) for each in value)
        return value.double() if isinstance(value, Tensor) and value.dtype in _LOW else value

    return tuple(value if keeps_first and not index else wide(value) for index, value in enumerate(args)), kwargs
