"""Random numbers that belong to samples, whatever batch these are in, and operators in float64.

A draw for a whole batch, such as one dropout mask of shape `(8, 64)`, consists of the draws of its samples: a number
depends on the sample and on its place in what the sample draws, not on the batch, nor on the length to which the sample
is padded. Whether a draw is one of samples is known when it is compared with that of another batch: then it has as many
positions for each sample, and a tensor of the shape of a weight has not (`first_other_draw`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gradavg._lightning.internals import TorchDispatchMode, writes_in_place
from lightning_gradavg._support.tree import leaves, mapped
from lightning_gradavg.verify.lines import running_line
from lightning_gradavg.verify.records import DrawnNumbers, SampleKey

__all__ = ["Draws", "first_other_draw"]

_LOW_TYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

# Of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), as signed integers.
_GAMMA = -7046029254386353131
_FIRST_MULTIPLIER = -4658895280553007687
_SECOND_MULTIPLIER = -7723592293110705685


class _SampleDim(NamedTuple):
    """Where the samples of a batch are in a tensor."""

    dim: int  # -1 if no dimension is theirs
    per_sample: int  # the positions along `dim` that one sample has


def _number_of(*what: object) -> int:
    """Return a number of 56 bits that depends on the representation of some objects; it fits a seed and an int64."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest(), "big")


def _mixed(values: Tensor) -> Tensor:
    """Return well mixed 64-bit integers, as splitmix64 makes them."""
    mixed = values * _GAMMA
    mixed = _xor_shifted(mixed, 30) * _FIRST_MULTIPLIER
    mixed = _xor_shifted(mixed, 27) * _SECOND_MULTIPLIER
    return _xor_shifted(mixed, 31)


def _xor_shifted(values: Tensor, bits: int) -> Tensor:
    # int64 shifts copies of the sign into the upper bits. splitmix64 works on unsigned integers, which shift in zeros.
    unsigned_bits = (1 << (64 - bits)) - 1
    shifted: Tensor = values ^ ((values >> bits) & unsigned_bits)
    return shifted


def _along(dim: int, values: Tensor, ndim: int) -> Tensor:
    """Return a vector as a tensor of `ndim` dimensions that lies along one of them."""
    shape = [1] * ndim
    shape[dim] = -1
    return values.reshape(shape)


def _uniform_numbers(shape: Sequence[int], samples: _SampleDim, seeds: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers between 0 and 1, each of which depends on the seed of its sample and on its place there."""
    ndim = len(shape)
    positions = torch.arange(shape[samples.dim], device=device)
    of_sample = torch.tensor(seeds, device=device)[positions // samples.per_sample]
    mixed = _along(samples.dim, _mixed(of_sample + _mixed(positions % samples.per_sample)), ndim)
    for dim in range(ndim):
        if dim == samples.dim:
            continue
        # The place is added, and not the size: so padding to another length leaves the first places as they are
        # (test_a_place_draws_the_same_at_any_length).
        places = torch.arange(1, shape[dim] + 1, device=device)
        mixed = _mixed(mixed + _along(dim, places, ndim))
    # A float64 holds 53 bits. Half a unit is added, because `ndtri` and `log1p` are infinite at 0 and 1.
    upper_bits = (mixed >> 11) & ((1 << 53) - 1)
    return (upper_bits.double() + 0.5) * 2.0**-53


# What operators make of uniform numbers. Each function gets numbers between 0 and 1, of the shape of the operator's
# result, and the operator's positional arguments.


def _rand(uniform: Tensor, *_: object) -> Tensor:
    return uniform


def _randn(uniform: Tensor, *_: object) -> Tensor:
    return _normal(uniform)


def _normal(uniform: Tensor, mean: Tensor | float = 0.0, deviation: Tensor | float = 1.0, *_: object) -> Tensor:
    drawn: Tensor = mean + deviation * torch.special.ndtri(uniform)
    return drawn


def _normal_in_place(uniform: Tensor, _: Tensor, *mean_and_deviation: float) -> Tensor:
    return _normal(uniform, *mean_and_deviation)


def _uniform_in_place(uniform: Tensor, _: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * uniform


def _exponential_in_place(uniform: Tensor, _: Tensor, rate: float = 1.0) -> Tensor:
    return -torch.log1p(-uniform) / rate


def _bernoulli_in_place(uniform: Tensor, _: Tensor, probability: Tensor | float = 0.5) -> Tensor:
    drawn: Tensor = uniform < probability
    return drawn


def _bernoulli(uniform: Tensor, probabilities: Tensor, probability: float | None = None) -> Tensor:
    if probability is not None:
        return uniform < probability
    return uniform < probabilities


def _native_dropout(uniform: Tensor, values: Tensor, dropped: float, *_: object) -> tuple[Tensor, Tensor]:
    mask = uniform < 1 - dropped
    if dropped == 1:
        return values * mask, mask
    return values * mask / (1 - dropped), mask


def _integers(uniform: Tensor, bounds: Sequence[int]) -> Tensor | None:
    """Return integers below one bound, or between two; None without any, where the type sets the bounds."""
    if not bounds:
        return None
    low = 0
    if len(bounds) > 1:
        low = bounds[0]
    high = bounds[-1]
    return (low + uniform * (high - low)).floor()


def _randint(uniform: Tensor, *bounds_and_size: Any) -> Tensor | None:
    return _integers(uniform, bounds_and_size[:-1])


def _random_in_place(uniform: Tensor, _: Tensor, *bounds: int) -> Tensor | None:
    return _integers(uniform, bounds)


_FORMS: Mapping[str, Callable[..., Tensor | tuple[Tensor, Tensor] | None]] = {
    "aten.rand": _rand,
    "aten.rand_like": _rand,
    "aten.randn": _randn,
    "aten.randn_like": _randn,
    "aten.uniform_": _uniform_in_place,
    "aten.normal_": _normal_in_place,
    "aten.normal": _normal,
    "aten.exponential_": _exponential_in_place,
    "aten.bernoulli_": _bernoulli_in_place,
    "aten.bernoulli": _bernoulli,
    "aten.native_dropout": _native_dropout,
    "aten.randint": _randint,
    "aten.randint_like": _random_in_place,
    "aten.random_": _random_in_place,
}
"""By operator. What an operator that is not listed draws belongs to no sample."""


class Draws(TorchDispatchMode):
    """Lets operators draw for each sample separately, and compute in float64 if `double`.

    The recorder enters it when a batch arrives, and leaves it when the batch ends. `seed_step` begins a chain of random
    states, which is the same in a batch of any size.

    Attributes:
        is_paused: Whether operators run as they are. Communication hooks run so.
        last_operator: The operator that ran last, for an error of one that has no float64.
        sample_keys: Keys of the samples that are computed, in order; empty where no samples are, as in an optimizer.
        likely_dim: The dimension that is tried first for the samples, 0 or 1: 1 within recurrent layers.
        draws: What the samples of the running batch drew.
        common_draws: What belongs to no sample. The recorder empties it when a step ends.
        scopes: Names of the scopes of `torch.profiler.record_function` that were entered.
    """

    def __init__(self, *, double: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.double = double
        self.is_paused = False
        self.last_operator = ""
        self.sample_keys: Sequence[SampleKey] = [(0, 0, 0)]
        self.likely_dim = 0
        self.draws: list[DrawnNumbers] = []
        self.common_draws: list[DrawnNumbers] = []
        self.scopes: set[str] = set()
        # Digests of the states that the chain has gone through. Any other state is one that the user's code has set.
        self._states_of_chain: set[str] = set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run operators as they are within."""
        was_paused = self.is_paused
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = was_paused

    def seed_step(self, seed: int) -> None:
        """Begin a chain of random states."""
        torch.default_generator.manual_seed(seed)
        self._states_of_chain.add(_digest_of(torch.get_rng_state()))

    def note_common_draw(self, operator: str) -> None:
        """Note that something drew which the mode does not see."""
        self.common_draws.append(DrawnNumbers(operator, (), -1, ""))

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        kwargs = {} if kwargs is None else dict(kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if self.is_paused:
            if draws:
                self._note_draw_within_hook(func)
            return func(*args, **kwargs)
        self.last_operator = str(func)
        if func.namespace in ("c10d", "fsdp"):
            pass  # they take tensors of one type
        elif func.namespace == "profiler":
            for argument in args:
                if isinstance(argument, str):
                    self.scopes.add(argument)
        elif self.double:
            args, kwargs = _widened(func, args, kwargs)
        if draws:
            return self._draw(func, args, kwargs)
        return func(*args, **kwargs)

    def _note_draw_within_hook(self, func: Any) -> None:
        """Note a draw of a communication hook from the generator that all of a process share, if nobody seeded it."""
        digest = _digest_of(torch.get_rng_state())
        if digest in self._states_of_chain:
            self.common_draws.append(DrawnNumbers(str(func.overloadpacket), (), -1, "", running_line()))

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that may draw, and return its result with each sample's own numbers.

        | the operator | returned | noted |
        |---|---|---|
        | draws from a generator that the user made | its own result | in `common_draws`, with the generator's state |
        | left the generators alone, as attention without dropout | its own result | nowhere |
        | has no form, or a result without a dimension of samples | its own result | in `common_draws` |
        | any other | each sample's own numbers | in `draws` |
        """
        name = str(func.overloadpacket)
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, torch.Generator):
                seed = _digest_of(argument.get_state())
                result = func(*args, **kwargs)
                self.common_draws.append(DrawnNumbers(name, _shape_of(result), -1, seed, running_line()))
                return result
        states_before = _generator_states(args, kwargs)
        result = func(*args, **kwargs)
        if _are_equal(states_before, _generator_states(args, kwargs)):
            return result

        # Draws form a chain by the CPU's generator. It is left in a state that does not depend on how many numbers the
        # operator drew, so the next draw is the same in a batch of any size.
        chain = _digest_of(states_before[0])
        is_users = chain not in self._states_of_chain
        tensor = result
        if isinstance(result, tuple):  # dropout returns its mask, too
            tensor = result[0]
        samples = self._sample_dim(tensor.shape)
        drawn = None
        if samples.dim >= 0 and name in _FORMS:
            seeds = [_number_of(chain, key) for key in self.sample_keys]
            uniform = _uniform_numbers(tensor.shape, samples, seeds, tensor.device)
            drawn = _FORMS[name](uniform, *args)
        if drawn is None and is_users:
            # All ranks and one process draw the same if the user's seed is the same.
            self.common_draws.append(DrawnNumbers(name, tuple(tensor.shape), -1, chain, running_line()))
            return result
        torch.default_generator.manual_seed(_number_of(chain, "next"))
        if not is_users:
            self._states_of_chain.add(_digest_of(torch.get_rng_state()))
        if drawn is None:
            self.common_draws.append(DrawnNumbers(name, tuple(tensor.shape), -1, "", running_line()))
            return result
        self.draws.append(DrawnNumbers(name, tuple(tensor.shape), samples.dim, "", running_line()))
        if isinstance(drawn, tuple):
            return drawn
        if writes_in_place(func):
            return result.copy_(drawn)
        return drawn.to(tensor.dtype)

    def _sample_dim(self, shape: torch.Size) -> _SampleDim:
        """Return where the samples may be in a tensor.

        | the tensor | samples |
        |---|---|
        | is computed where no samples are | nowhere |
        | has as many positions along `likely_dim` as there are samples | along this dimension |
        | has as many along the other of the dimensions 0 and 1 | along the other |
        | has a multiple of that along dimension 0, as a loss of tokens | along dimension 0, several positions each |
        | any other | nowhere |

        Outside of recurrent layers, the columns of a matrix are no samples.
        """
        number, ndim = len(self.sample_keys), len(shape)
        if number == 0:
            return _SampleDim(-1, 1)
        if self.likely_dim == 1:
            dims: tuple[int, ...] = (1, 0)
        elif ndim > 2:  # noqa: PLR2004  # more than a matrix
            dims = (0, 1)
        else:
            dims = (0,)
        for dim in dims:
            if dim < ndim and shape[dim] == number:
                return _SampleDim(dim, 1)
        if ndim > 0 and shape[0] > 0 and shape[0] % number == 0:
            return _SampleDim(0, shape[0] // number)
        return _SampleDim(-1, 1)


def first_other_draw(
    draws: Sequence[DrawnNumbers], samples: int, others: Sequence[DrawnNumbers], samples_of_others: int
) -> DrawnNumbers | None:
    """Return the first draw of a batch that another batch does not draw for as many samples as it has; None if none."""
    for draw, other in zip_longest(draws, others):
        if draw is None or other is None:
            return draw or other
        if (draw.operator, draw.dim, len(draw.shape)) != (other.operator, other.dim, len(other.shape)):
            return draw
        if draw.shape[draw.dim] * samples_of_others != other.shape[draw.dim] * samples:
            return draw
    return None


def _digest_of(state: Tensor) -> str:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


def _shape_of(result: Any) -> tuple[int, ...]:
    if isinstance(result, tuple):
        result = result[0]
    return tuple(result.shape)


def _generator_states(args: Sequence[object], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the states of the generators that an operator may draw from, that of the CPU first."""
    types = {torch.device(kwargs.get("device") or "cpu").type}
    for argument in args:
        if isinstance(argument, Tensor):
            types.add(argument.device.type)
    states = [torch.get_rng_state()]
    for device_type in sorted(types - {"cpu", "meta"}):
        states.append(getattr(torch, device_type).get_rng_state())
    return states


def _are_equal(states: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(state, other) for state, other in zip(states, others, strict=True))


def _widened(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of an operator with float64 in place of lower types.

    | the operator | changed |
    |---|---|
    | is given a lower type as `dtype=`, as in `x.float()` or `torch.zeros(2, dtype=torch.float32)` | that type |
    | writes to a tensor of a lower type | its other tensors, if any is float64 |
    | returns a view of a tensor of a lower type, to which may be written | nothing |
    | has tensors of lower types | these tensors |
    """
    if kwargs.get("dtype") in _LOW_TYPES:
        kwargs["dtype"] = torch.float64
    types = {leaf.dtype for _, leaf in leaves(args) if isinstance(leaf, Tensor)}
    if types.isdisjoint(_LOW_TYPES) or func.is_view:
        return args, kwargs
    if writes_in_place(func):  # the first argument is what is written to, and cannot be another tensor
        if torch.float64 not in types:
            return args, kwargs
        return (args[0], *mapped(args[1:], _as_float64)), kwargs
    return mapped(args, _as_float64), kwargs


def _as_float64(leaf: Any) -> Any:
    if getattr(leaf, "dtype", None) in _LOW_TYPES:
        return leaf.double()
    return leaf
