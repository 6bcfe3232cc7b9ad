"""Random numbers that belong to samples, whatever batch these are in, and operators in float64.

A draw for a whole batch, such as one dropout mask of shape `(8, 64)`, consists of the draws of its samples: a number
depends on the sample and on its place in what the sample draws, not on the batch, nor on the length to which the sample
is padded. Draws that belong to no sample are noted: what depends on them cannot be shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gradavg._lightning.internals import TorchDispatchMode, writes_in_place
from lightning_gradavg._support.tree import leaves, mapped
from lightning_gradavg.verify.trace import Place

__all__ = ["ROW_PRODUCT", "SAMPLE_CHOICE", "TOTAL_IN_16_BITS", "TYPES_OF_16_BITS", "Draw", "Draws"]

ROW_PRODUCT = "a product of rows"
"""In `Draws.step_operators`: a product of the batch's rows with each other, as a contrastive loss has."""

SAMPLE_CHOICE = "a choice of samples"
"""There, too: the samples were sorted, or the largest of them taken."""

TOTAL_IN_16_BITS = "a total in 16 bits"
"""There, too: one number, such as a sum or a count, was computed or stored in a 16-bit type."""

_TOTALS = ("aten.sum", "aten.mean", "aten.add", "aten.add_", "aten._to_copy")
TYPES_OF_16_BITS = (torch.bfloat16, torch.float16)

_CHOICES = ("aten.topk", "aten.sort", "aten.kthvalue")

_LOW_TYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

# Of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), as signed integers.
_GAMMA = -7046029254386353131
_FIRST_MULTIPLIER = -4658895280553007687
_SECOND_MULTIPLIER = -7723592293110705685


class Draw(NamedTuple):
    """One draw of a batch."""

    operator: str
    dim: int  # the dimension of its result along which the samples are; -1 if there is none
    place: Place | None = None  # where it was drawn


def _unknown_place() -> Place | None:
    return None


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

    The recorder enters it when a batch arrives, and leaves it when the batch ends. It sets `sample_keys` and `trace`
    before every batch, and `sample_keys` again for every piece of a batch.

    Attributes:
        paused: Whether operators run as they are. Communication hooks run so.
        last_operator: The operator that ran last, for an error of one that has no float64.
        sample_keys: Keys of the samples of the running batch, in order: micro-batch, rank, and place in the batch.
        likely_dim: The dimension that is tried first for the samples, 0 or 1: 1 within recurrent layers.
        shared: Operators that drew for no single sample, in order, each with the place of its first draw.
        place: Returns where code runs. The recorder sets it.
        trace: The draws of the running batch.
        collectives: Names of the collective operations that ran.
        scopes: Names of the scopes of `torch.profiler.record_function` that were entered.
        is_in_step: Whether `training_step` runs.
        weight_storages: Addresses of the weights, whose products with a batch compare no samples.
        step_operators: Names of the operators that ran in it, and what they did beside: `ROW_PRODUCT`, `SAMPLE_CHOICE`,
            `TOTAL_IN_16_BITS`.
    """

    def __init__(self, *, double: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.double = double
        self.paused = False
        self.last_operator = ""
        self.sample_keys: Sequence[tuple[int, ...]] = [(0, 0, 0)]
        self.likely_dim = 0
        self.shared: dict[str, Place | None] = {}
        self.place: Callable[[], Place | None] = _unknown_place
        self.trace: list[Draw] = []
        self.collectives: set[str] = set()
        self.scopes: set[str] = set()
        self.is_in_step = False
        self._gathers_shards = False  # whether the next collective is that of `fully_shard`
        self.weight_storages: set[int] = set()
        self.step_operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        kwargs = {} if kwargs is None else dict(kwargs)
        if self.paused:
            return func(*args, **kwargs)
        self.last_operator = str(func)
        if self.is_in_step:
            self._note_operator(func, args)
        if func.namespace == "c10d":
            self._note_collective(func.name().removeprefix("c10d::").strip("_"))
        elif func.namespace == "fsdp":
            # `fully_shard` copies shards by this operator, and gathers them by the next collective.
            self._gathers_shards = str(func.overloadpacket) == "fsdp.all_gather_copy_in"
        elif func.namespace == "profiler":
            for argument in args:
                if isinstance(argument, str):
                    self.scopes.add(argument)
        elif self.double:
            args, kwargs = _widened(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.is_in_step and isinstance(result, Tensor) and result.dtype in TYPES_OF_16_BITS:
            self._note_result(func, result)
        return result

    def _note_result(self, func: Any, result: Tensor) -> None:
        """Note a 16-bit result of an operator of `training_step`."""
        if result.numel() == 1 and str(func.overloadpacket) in _TOTALS:
            self.step_operators.add(TOTAL_IN_16_BITS)

    def _note_collective(self, name: str) -> None:
        """Note a collective operation, unless `fully_shard` gathers weights by it, and not the user outputs."""
        if not self._gathers_shards:
            self.collectives.add(name)
        self._gathers_shards = False

    def _note_operator(self, func: Any, args: Sequence[Any]) -> None:
        """Note an operator of `training_step`, which says what a loss may do with several samples."""
        name = str(func.overloadpacket)
        self.step_operators.add(name)
        samples = len(self.sample_keys)
        if name in _CHOICES and args[0].ndim == 1 and samples > 1 and len(args[0]) % samples == 0:
            self.step_operators.add(SAMPLE_CHOICE)
        if name == "aten.mm":
            rows = args[0].shape[0]
            is_square = rows > 1 and rows % samples == 0 and args[1].shape[1] == rows
            # A linear layer without bias has such a product, too, if it has as many outputs as the batch has rows.
            is_layer = args[1].untyped_storage().data_ptr() in self.weight_storages
            if is_square and not is_layer:
                self.step_operators.add(ROW_PRODUCT)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that may draw, and return its result with each sample's own numbers.

        | the operator | returned | noted |
        |---|---|---|
        | draws from a generator that the user made | its own result | in `shared` |
        | left the generators alone, as attention without dropout | its own result | nowhere |
        | has no form, or a result without a dimension of samples | its own result | in `shared` and `trace` |
        | any other | each sample's own numbers | in `trace` |
        """
        name = str(func.overloadpacket)
        states_before = _generator_states(args, kwargs)
        result = func(*args, **kwargs)
        if any(isinstance(argument, torch.Generator) for argument in (*args, *kwargs.values())):
            self.shared.setdefault(f"{name}, with a generator of its own", self.place())
            return result
        if _are_equal(states_before, _generator_states(args, kwargs)):
            return result

        tensor = result
        if isinstance(result, tuple):  # dropout returns its mask, too
            tensor = result[0]
        samples = self._sample_dim(tensor.shape)
        self.trace.append(Draw(name, samples.dim, self.place()))
        # Draws form a chain by the CPU's generator. It is left in a state that does not depend on how many numbers the
        # operator drew, so the next draw is the same in a batch of any size.
        chain = hashlib.blake2b(states_before[0].numpy().tobytes(), digest_size=8).hexdigest()
        drawn = None
        if samples.dim >= 0 and name in _FORMS:
            seeds = [_number_of(chain, key) for key in self.sample_keys]
            uniform = _uniform_numbers(tensor.shape, samples, seeds, tensor.device)
            drawn = _FORMS[name](uniform, *args)
        torch.default_generator.manual_seed(_number_of(chain, "next"))
        if drawn is None:
            self.shared.setdefault(name, self.place())
            return result
        if isinstance(drawn, tuple):
            return drawn
        if writes_in_place(func):
            return result.copy_(drawn)
        return drawn.to(tensor.dtype)

    def _sample_dim(self, shape: torch.Size) -> _SampleDim:
        """Return where the samples are in a tensor.

        | the tensor | samples |
        |---|---|
        | has as many positions along `likely_dim` as there are samples | along this dimension |
        | has as many along the other of the dimensions 0 and 1 | along the other |
        | has a multiple of that along dimension 0, as a loss of tokens | along dimension 0, several positions each |
        | any other | nowhere |

        Outside of recurrent layers, the columns of a matrix are no samples.
        """
        number, ndim = len(self.sample_keys), len(shape)
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


def _widened(func: object, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of an operator with float64 in place of lower types, where types are stated or mixed.

    | the operator | changed |
    |---|---|
    | is given a lower type as `dtype=`, as in `x.float()` or `torch.zeros(2, dtype=torch.float32)` | that type |
    | has tensors of float64 and of lower types | the tensors of lower types |
    | any other, as one of lower types alone | nothing |
    """
    if kwargs.get("dtype") in _LOW_TYPES:
        kwargs["dtype"] = torch.float64
    types = {leaf.dtype for _, leaf in leaves(args) if isinstance(leaf, Tensor)}
    if torch.float64 not in types or types.isdisjoint(_LOW_TYPES):
        return args, kwargs
    if writes_in_place(func):  # the first argument is what is written to, and cannot be another tensor
        return (args[0], *mapped(args[1:], _as_float64)), kwargs
    return mapped(args, _as_float64), kwargs


def _as_float64(leaf: Any) -> Any:
    if getattr(leaf, "dtype", None) in _LOW_TYPES:
        return leaf.double()
    return leaf
