"""Random numbers that belong to samples, whatever batch these are in, and operators in float64.

A draw for a whole batch, such as one dropout mask of shape `(8, 64)`, consists of the draws of its samples: a number
depends on the sample and on its place in what the sample draws, not on the batch, nor on the length to which the sample
is padded. Draws that belong to no sample are noted: what depends on them cannot be shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg._lightning.internals import TorchDispatchMode, writes_in_place
from lightning_gradavg._support.tree import leaves, mapped

__all__ = ["Draws"]

_LOW = frozenset({torch.float32, torch.float16, torch.bfloat16})
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110685705)  # of splitmix64, as signed


def _number_of(*what: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest(), "big")


def _mixed(values: Tensor) -> Tensor:
    """Return well mixed 64-bit integers, as splitmix64 makes them."""
    mixed: Tensor = values * _MULTIPLIERS[0]
    for shift, multiplier in ((30, _MULTIPLIERS[1]), (27, _MULTIPLIERS[2]), (31, 1)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return torch.as_tensor(mixed)


def _uniform(shape: Sequence[int], rows: int, each: int, seeds: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers between 0 and 1 of the samples along dimension `rows`, of which each has `each` positions."""

    def along(dim: int, values: Tensor) -> Tensor:
        return values.reshape([-1 if other == dim else 1 for other in range(len(shape))])

    place = torch.arange(shape[rows], device=device)
    mixed = along(rows, _mixed(torch.tensor(seeds, device=device)[place // each] + _mixed(place % each)))
    for dim in (dim for dim in range(len(shape)) if dim != rows):
        mixed = _mixed(mixed + along(dim, torch.arange(1, shape[dim] + 1, device=device)))
    return (((mixed >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53


def _normal(uniform: Tensor, mean: Any = 0.0, deviation: Any = 1.0, *_: Any) -> Tensor:
    drawn: Tensor = mean + deviation * torch.special.ndtri(uniform)
    return drawn


def _dropped(uniform: Tensor, given: Tensor, part: float, *_: Any) -> tuple[Tensor, Tensor]:
    mask = uniform < 1 - part
    return given * mask / (1 - part if part < 1 else 1), mask


def _integers(uniform: Tensor, *bounds: int) -> Tensor | None:
    if not bounds:
        return None
    low, high = (0, *bounds)[-2:]
    return (low + uniform * (high - low)).floor()


_FORMS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("aten.rand", "aten.rand_like"), lambda u, *_: u),
    **dict.fromkeys(("aten.randn", "aten.randn_like"), lambda u, *_: _normal(u)),
    "aten.uniform_": lambda u, _, low=0.0, high=1.0: low + (high - low) * u,
    "aten.normal_": lambda u, _, *given: _normal(u, *given),
    "aten.normal": _normal,
    "aten.exponential_": lambda u, _, rate=1.0: -torch.log1p(-u) / rate,
    "aten.bernoulli_": lambda u, _, part=0.5: u < part,
    "aten.bernoulli": lambda u, given, part=None: u < (given if part is None else part),
    "aten.native_dropout": _dropped,
    "aten.randint": lambda u, *given: _integers(u, *given[:-1]),
    **dict.fromkeys(("aten.randint_like", "aten.random_"), lambda u, _, *bounds: _integers(u, *bounds)),
}
"""What operators make of uniform numbers, the same at every length. What others draw belongs to no sample."""


class Draws(TorchDispatchMode):
    """Lets operators compute in float64 if `double`, and draw for each sample separately."""

    def __init__(self, *, double: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.double, self.paused, self.last = double, False, ""  # the operator that ran last
        self.keys: Sequence[tuple[int, ...]] = [(0, 0, 0)]  # of the samples, in order: micro-batch, rank, place
        self.first = 0  # the dimension that more likely is that of the samples, 0 or 1
        self.shared: dict[str, None] = {}  # operators that drew for no single sample
        self.trace: list[tuple[str, int]] = []  # the draws of the batch, and the dimension of the samples
        self.collectives: set[str] = set()
        self.scopes: set[str] = set()  # of `torch.profiler.record_function`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        kwargs = dict(kwargs or {})
        if self.paused:
            return func(*args, **kwargs)
        self.last = str(func)
        if func.namespace == "c10d":
            self.collectives.add(func.name().removeprefix("c10d::").strip("_"))
        elif func.namespace == "profiler":
            self.scopes.update(name for name in args if isinstance(name, str))
        elif self.double:
            args, kwargs = _widened(func, args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        return self._draw(func, args, kwargs) if draws else func(*args, **kwargs)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, before = str(func.overloadpacket), _states(args, kwargs)
        result = func(*args, **kwargs)
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            self.shared[f"{name}, with a generator of its own"] = None
            return result
        if all(map(torch.equal, before, _states(args, kwargs))):
            return result  # as attention without dropout
        chain = hashlib.blake2b(before[0].numpy().tobytes(), digest_size=8).hexdigest()
        first = result[0] if isinstance(result, tuple) else result
        rows, each = self._place(first.shape)
        self.trace.append((name, rows))
        drawn = None
        if rows >= 0 and name in _FORMS:
            seeds = [_number_of(chain, key) for key in self.keys]
            drawn = _FORMS[name](_uniform(first.shape, rows, each, seeds, first.device), *args)
        torch.default_generator.manual_seed(_number_of(chain, "next"))
        if drawn is None:
            self.shared[name] = None
            return result
        if isinstance(drawn, tuple):
            return drawn
        return result.copy_(drawn) if writes_in_place(func) else drawn.to(first.dtype)

    def _place(self, shape: torch.Size) -> tuple[int, int]:
        """Return the dimension of the samples, -1 where there is none, and the positions of each along it."""
        size, ndim = len(self.keys), len(shape)
        dims = (1, 0) if self.first else (0, 1)[: max(1, ndim - 1)]  # of a matrix the columns are no samples
        found = next((dim for dim in dims if dim < ndim and shape[dim] == size), -1)
        several = found < 0 < ndim and shape[0] > 0 and shape[0] % size == 0
        return (0, shape[0] // size) if several else (found, 1)


def _states(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the states of the generators that an operator may draw from, that of the CPU first."""
    devices = [each.device for each in args if isinstance(each, Tensor)] + [torch.device(kwargs.get("device") or "cpu")]
    others: Any = [getattr(torch, type_) for type_ in sorted({each.type for each in devices} - {"cpu", "meta"})]
    return [torch.get_rng_state(), *(each.get_rng_state() for each in others)]


def _widened(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of an operator with float64 for lower types, where types are stated or mixed."""
    if kwargs.get("dtype") in _LOW:
        kwargs["dtype"] = torch.float64
    types = {leaf.dtype for _, leaf in leaves(args) if isinstance(leaf, Tensor)}
    if torch.float64 not in types or not types & _LOW:
        return args, kwargs
    kept = int(writes_in_place(func))  # the first argument stays what it is
    wide = mapped(args[kept:], lambda leaf: leaf.double() if getattr(leaf, "dtype", None) in _LOW else leaf)
    return (*args[:kept], *wide), kwargs
