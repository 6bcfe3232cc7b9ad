"""What makes two runs comparable: both compute in float64, and every sample draws its own random numbers.

A draw for a whole batch, such as one dropout mask of shape `(8, 64)`, consists of the draws of its samples. A number
depends on the sample and on its place in what the sample draws, and not on the batch, nor on the length to which the
sample is padded. So N processes and one process draw the same for the same samples. Draws that belong to no sample are
noted: what depends on them cannot be shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.lightning_internals import TorchDispatchMode, writes_in_place

__all__ = ["DrawsBySample"]

_LOW = frozenset({torch.float32, torch.float16, torch.bfloat16})
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of splitmix64, as signed


def _seed_of(*what: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest(), "big")


def _mixed(bits: Tensor) -> Tensor:
    """Return well mixed 64-bit integers, as splitmix64 makes them."""
    mixed: Tensor = bits * _MULTIPLIERS[0]
    for shift, multiplier in ((30, _MULTIPLIERS[1]), (27, _MULTIPLIERS[2]), (31, 1)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return torch.as_tensor(mixed)


def _uniform(shape: Sequence[int], rows: int, each: int, seeds: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers between 0 and 1 of the samples along dimension `rows`, of which each has `each` positions."""

    def along(dim: int, values: Tensor) -> Tensor:
        return values.reshape([-1 if other == dim else 1 for other in range(len(shape))])

    place = torch.arange(shape[rows], device=device)
    bits = along(rows, _mixed(torch.tensor(seeds, device=device)[place // each] + _mixed(place % each)))
    for dim in (dim for dim in range(len(shape)) if dim != rows):
        bits = _mixed(bits + along(dim, torch.arange(1, shape[dim] + 1, device=device)))
    return (((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53


def _normal(uniform: Tensor, mean: Any = 0.0, deviation: Any = 1.0) -> Tensor:
    drawn: Tensor = mean + deviation * torch.special.ndtri(uniform)
    return drawn


def _dropped(uniform: Tensor, given: Tensor, part: float, *_: Any) -> tuple[Tensor, Tensor]:
    mask = uniform < 1 - part
    return given * mask / (1 - part if part < 1 else 1), mask


_FORMS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("aten.rand", "aten.rand_like"), lambda u, *_: u),
    **dict.fromkeys(("aten.randn", "aten.randn_like"), lambda u, *_: _normal(u)),
    "aten.uniform_": lambda u, _, low=0.0, high=1.0: low + (high - low) * u,
    "aten.normal_": lambda u, _, *given: _normal(u, *given),
    "aten.bernoulli_": lambda u, _, part=0.5: u < part,
    "aten.bernoulli": lambda u, given, part=None: u < (given if part is None else part),
    "aten.native_dropout": _dropped,
}
"""What operators make of uniform numbers, the same at every length. Other operators run once for each sample."""


class DrawsBySample(TorchDispatchMode):
    """Lets operators compute in float64, and draw for each sample separately.

    Args:
        double: Whether low-precision types become float64.

    Attributes:
        keys: One for each sample of the batch, in order. The first two numbers are the micro-batch and the rank.
        shared: What was drawn for no single sample, by operator.
        trace: The draws of the batch: operator, and the dimension of the samples.
        collectives: The operations between ranks.
        last: The operator that ran last.
        paused: Whether operators run unchanged.
        first: The dimension that more likely is that of the samples, 0 or 1.
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
        """Let operators within run unchanged."""
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
        draws = torch.Tag.nondeterministic_seeded in func.tags
        return self._draw(func, args, kwargs) if draws else func(*args, **kwargs)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        generator, name = torch.default_generator, str(func.overloadpacket)
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            self.shared[f"{name}, with a generator of its own"] = None
            return func(*args, **kwargs)
        in_place, before = writes_in_place(func), generator.get_state()
        given = (args[0].clone(), *args[1:]) if in_place else args
        others = {each.device for each in args if isinstance(each, Tensor) and each.device.type != "cpu"}
        states = {device: _state(device) for device in others}
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        drew = any(not torch.equal(state, _state(device)) for device, state in states.items())
        if torch.equal(before, generator.get_state()) and not drew and first.device.type == "cpu":
            return result  # as attention without dropout
        chain = hashlib.blake2b(before.numpy().tobytes(), digest_size=8).hexdigest()
        rows, each = self._place(first.shape)
        self.trace.append((name, rows))
        if name == "aten.randperm" and len(first) == len(self.keys):
            drawn: Any = torch.cat(list(self._permutations(chain))).to(first)
        elif rows < 0 or name == "aten.randperm":
            self.shared[name] = None
            generator.manual_seed(_seed_of(chain))
            drawn = func(*args, **kwargs)
        elif name in _FORMS:
            seeds = [_seed_of(chain, key) for key in self.keys]
            made = _FORMS[name](_uniform(first.shape, rows, each, seeds, first.device), *args)
            drawn = made if isinstance(made, tuple) else made.to(first.dtype)
        else:
            drawn = self._each(func, given, kwargs, (rows, each, chain), first.shape)
        generator.manual_seed(_seed_of(chain, "next"))
        return result.copy_(drawn) if in_place and drawn is not result else drawn

    def _place(self, shape: torch.Size) -> tuple[int, int]:
        """Return the dimension of the samples, -1 where there is none, and the positions of each along it."""
        size, ndim = len(self.keys), len(shape)
        dims = (1, 0) if self.first else (0, 1)[: max(1, ndim - 1)]  # of a matrix the columns are no samples
        found = next((dim for dim in dims if dim < ndim and shape[dim] == size), -1)
        several = found < 0 < ndim and shape[0] > 0 and shape[0] % size == 0
        return (0, shape[0] // size) if several else (found, 1)

    def _permutations(self, chain: str) -> Iterator[Tensor]:
        """Yield a permutation within each micro-batch of each rank, counted from where it begins."""
        groups = [key[:2] for key in self.keys]
        for group in dict.fromkeys(groups):
            torch.default_generator.manual_seed(_seed_of(chain, group))
            yield torch.randperm(groups.count(group)) + groups.index(group)

    def _each(self, func: Any, args: Any, kwargs: Any, how: tuple[int, int, str], whole: torch.Size) -> Any:
        """Draw once for each sample."""
        rows, each, chain = how
        pieces = []
        for index, key in enumerate(self.keys):
            torch.default_generator.manual_seed(_seed_of(chain, key))
            mine = [_narrowed(value, whole, rows, index * each, each) for value in args]
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
    nested = [each for value in args for each in (value if isinstance(value, (list, tuple)) else [value])]
    types = {each.dtype for each in nested if isinstance(each, Tensor)}
    if torch.float64 not in types or not types & _LOW:
        return args, kwargs

    def wide(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(wide(each) for each in value)
        return value.double() if isinstance(value, Tensor) and value.dtype in _LOW else value

    kept = int(writes_in_place(func))  # the first argument stays what it is
    return (*args[:kept], *map(wide, args[kept:])), kwargs
