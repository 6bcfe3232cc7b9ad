"""The samples of a run: what each batch is made of, what its samples draw, and what an epoch reads.

Loaders load in this process, so that the samples of a batch are known by the batch itself. A draw for a whole batch,
such as one dropout mask of shape `(8, 64)`, consists of the draws of its samples. A number depends on the sample and on
its place in what the sample draws, and not on the batch, nor on the length to which the sample is padded. So N
processes and one process draw the same for the same samples. Draws that belong to no sample are noted: what depends on
them cannot be shown.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_gradavg.lightning_internals import TorchDispatchMode, fetched_here, writes_in_place
from lightning_gradavg.random_state import random_state, restore_random_state, same_random_state
from lightning_gradavg.tree import batch_samples, bits, is_array, leaves, mapped

__all__ = ["DrawsBySample", "Loading", "Part", "Read", "first_loader", "is_part", "seed"]

_MOST_BATCHES, _MOST_SAMPLES = 20_000, 5_000  # of an epoch that is read without training; samples are loaded
_KEPT_BATCHES = 512  # that are read ahead
_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler, type(None))  # that read every sample once
_LOW = frozenset({torch.float32, torch.float16, torch.bfloat16})
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110685705)  # of splitmix64, as signed


def _number_of(*what: Any, size: int = 7) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=size).digest(), "big")


def seed(text: str) -> None:
    """Seed the generators of torch, Python and NumPy by a text."""
    number = _number_of(text, size=4)
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def _digest(value: Any) -> bytes | None:
    """Return what is equal for equal data; None where it is not known."""
    made = hashlib.blake2b(digest_size=12)
    try:
        for place, leaf in leaves(value):
            array = leaf.tobytes() if is_array(leaf) and not isinstance(leaf, Tensor) else None
            made.update(f"{place}{getattr(leaf, 'shape', '')};".encode())
            made.update(bits(leaf) if isinstance(leaf, Tensor) else array or pickle.dumps(leaf))
    except Exception:  # noqa: BLE001  # pickle raises nearly anything
        return None
    return made.digest()


def _packed(value: Any) -> bytes | None:
    """Return a copy of a value, as it is now; None where it cannot be copied."""

    def owned(leaf: Any) -> Any:
        return leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf  # a view would drag its storage along

    try:
        return pickle.dumps(mapped(value, owned))
    except Exception:  # noqa: BLE001  # likewise
        return None


@dataclass(frozen=True)
class Part:
    """A batch of one loader."""

    size: int | None = None  # samples
    packed: bytes | None = None  # the samples as `collate_fn` was given them, or the batch where `why` tells why not
    why: str = "its batches are made by no collate_fn"
    ids: Sequence[Hashable] = ()  # of the samples: equal on all processes; None where they are not known
    keys: Sequence[tuple[int, ...]] = ()  # of the samples, on one process


def is_part(value: Any) -> bool:
    """Return whether a value is a `Part`."""
    return isinstance(value, Part)


def first_loader(given: Any) -> Any:
    """Return the first loader in what `fit` takes, in which a list may be a loader; None without any."""
    if isinstance(given, (dict, tuple)):
        given = list(given.values() if isinstance(given, dict) else given)
    elif not (isinstance(given, list) and any(isinstance(each, DataLoader) for each in given)):
        return given
    return next((first_loader(each) for each in given), None)


@dataclass(frozen=True)
class Read:
    """What one pass over the training data reads on this rank."""

    batches: Sequence[Sequence[Hashable]] = ()  # the ids of each
    complete: bool = False
    shuffles: bool = False  # a sampler, or whatever a stream does
    chooses: bool = False  # a sampler of the user's own, which may leave out or repeat samples
    dealt: bool = False  # by a DistributedSampler


class _Seeded:
    """A dataset whose random numbers depend on the index alone, so that a sample is the same wherever it is read."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        state = random_state()
        seed(f"sample {index}")
        try:
            return self._dataset[index]
        finally:
            restore_random_state(state)


def _fingerprint(dataset: Any) -> bytes | None:
    """Return what equal datasets share: a digest of the length and of some samples; None where it is not known."""
    with suppress(Exception):
        size, seeded = len(dataset), _Seeded(dataset)
        digests = [_digest(seeded[place]) for place in range(0, size, size // 2 or 1)]
        return None if None in digests else _digest([size, *digests])
    return None


class Loading:
    """Lets the loaders of a process load in it, and remembers what the batches are made of.

    Attributes:
        made: The batches that were made and not yet trained on, by their identity, and what they are made of.
        skims: Whether batches are only counted: a map-style loader yields indices, and loads nothing.
    """

    def __init__(self) -> None:
        self.made: dict[int, tuple[Any, Part]] = {}
        self.skims = False

    def watching(self) -> AbstractContextManager[None]:
        """Watch every `DataLoader` within."""
        return fetched_here(self._watch)

    def _watch(self, fetcher: Any) -> None:
        dataset, known = fetcher.dataset, None
        if not isinstance(dataset, IterableDataset):
            fetcher.dataset, known = _Seeded(dataset), _fingerprint(dataset)
        if not fetcher.auto_collation:
            return
        fetch, collate, indices = fetcher.fetch, fetcher.collate_fn, list[Any]()
        inner = getattr(collate, "collate", None)  # of a loader that collates each rank's part of a list of samples
        whole = inner or collate

        def collated(samples: Any) -> Any:
            ids = tuple((known, index) for index in indices) if known else tuple(map(_digest, samples))
            packed, before = _packed(list(samples)), random_state()
            batch = whole(samples)
            why = "" if same_random_state(before, random_state()) else "collate_fn draws random numbers"
            why = why if packed is not None else "a sample cannot be copied"
            return self.note(batch, Part(len(samples), packed, why, ids))

        def fetched(index: Any) -> Any:
            indices[:] = list(index) if known else []
            if not (self.skims and known):
                return fetch(index)
            batch = torch.tensor(indices) if all(isinstance(one, int) for one in indices) else list(indices)
            return self.note(batch, Part(len(indices), ids=tuple((known, one) for one in indices)))

        fetcher.collate_fn = replace(collate, collate=collated) if inner else collated
        fetcher.fetch = fetched

    def note(self, batch: Any, part: Part) -> Any:
        """Remember what a batch is made of, and return it."""
        self.made[id(batch)] = (batch, part)
        for oldest in list(islice(self.made, max(0, len(self.made) - _KEPT_BATCHES))):
            del self.made[oldest]
        return batch

    def parts(self, batch: Any) -> Any:
        """Return a `Part` for a batch, or a structure of them for the batches of several loaders."""

        def is_batch(value: Any) -> bool:
            return id(value) in self.made

        several = any(is_batch(leaf) for _, leaf in leaves(batch, is_leaf=is_batch))
        return mapped(batch, self._part, is_leaf=is_batch) if several else self._part(batch)

    def _part(self, batch: Any) -> Part:
        _, part = self.made.pop(id(batch), (batch, Part()))
        if not part.why:
            return part
        with suppress(ValueError):
            part = replace(part, size=part.size or batch_samples(batch))
        packed = None if self.skims else _packed(batch)
        return replace(part, packed=packed, ids=part.ids or tuple(_row_ids(batch, part.size)))

    def read(self, given: Any) -> Read:
        """Read the first loader of a run once, without training."""
        loader = first_loader(getattr(given, "iterables", given))
        dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
        streams, indexed = isinstance(dataset, IterableDataset), hasattr(dataset, "__len__")
        dealing = type(getattr(loader, "batch_sampler", None)).__module__.partition(".")[0]
        own = dealing not in ("torch", "lightning_gradavg", "builtins") or not isinstance(sampler, _SAMPLERS)
        found: list[Any] = []
        self.skims, self.made, loaded = True, {}, 0
        try:
            for batch in islice(loader, _MOST_BATCHES):
                (_, part), *_ = leaves(self.parts(batch), is_leaf=is_part)
                found.append(part.ids)
                loaded += sum(not isinstance(one, tuple) for one in part.ids)
                if loaded >= _MOST_SAMPLES:
                    break
        except Exception:  # noqa: BLE001  # a loader that can be read once only
            found = []
        finally:
            self.skims = False
        return Read(
            tuple(found),
            complete=0 < len(found) < _MOST_BATCHES and loaded < _MOST_SAMPLES,
            shuffles=streams or isinstance(sampler, RandomSampler) or bool(getattr(sampler, "shuffle", False)),
            chooses=indexed and not streams and (own or bool(getattr(sampler, "replacement", False))),
            dealt=isinstance(sampler, DistributedSampler),
        )


def _row_ids(batch: Any, size: int | None) -> Iterator[bytes | None]:
    """Yield a digest of each row of a batch, or of the batch where its rows are not known."""
    if size is None:
        yield _digest(batch)
    for index in range(size or 0):
        yield _digest([leaf[index] for _, leaf in leaves(batch) if is_array(leaf) and leaf.shape[:1] == (size,)])


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


def _classes(uniform: Tensor, weights: Tensor, number: int, replacement: bool = False) -> Tensor | None:
    if number > 1 and not replacement:
        return None
    reached = (weights / weights.sum(-1, keepdim=True)).double().cumsum(-1)
    return torch.searchsorted(reached, uniform).clamp(max=weights.shape[-1] - 1)


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
    "aten.multinomial": _classes,
}
"""What operators make of uniform numbers, the same at every length. What others draw belongs to no sample."""


class DrawsBySample(TorchDispatchMode):
    """Lets operators compute in float64 if `double`, and draw for each sample separately."""

    def __init__(self, *, double: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.double, self.last = double, ""  # the operator that ran last
        self.keys: list[tuple[int, ...]] = [(0, 0, 0)]  # of the samples, in order: micro-batch, rank, place
        self.paused = False
        self.first = 0  # the dimension that more likely is that of the samples, 0 or 1
        self.shared: dict[str, None] = {}  # operators that drew for no single sample
        self.trace: list[tuple[str, int]] = []  # the draws of the batch, and the dimension of the samples
        self.collectives: set[str] = set()

    def begin(self, keys: Sequence[tuple[int, ...]]) -> None:
        """Begin with a batch of these samples."""
        self.keys, self.trace = list(keys), []

    def pausing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function within which operators run unchanged."""

        @functools.wraps(function)
        def paused(*args: Any) -> Any:
            self.paused = True
            try:
                return function(*args)
            finally:
                self.paused = False

        return paused

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
        devices = {each.device for each in args if isinstance(each, Tensor)}
        devices |= {torch.device(kwargs.get("device") or "cpu"), torch.device("cpu")}
        before = {device: _state(device) for device in devices}
        result = func(*args, **kwargs)
        if all(torch.equal(state, _state(device)) for device, state in before.items()):
            return result  # as attention without dropout
        chain = hashlib.blake2b(before[torch.device("cpu")].numpy().tobytes(), digest_size=8).hexdigest()
        first = result[0] if isinstance(result, tuple) else result
        rows, each = self._place(first.shape)
        self.trace.append((name, rows))
        drawn = None
        if rows >= 0 and name in _FORMS:
            seeds = [_number_of(chain, key) for key in self.keys]
            drawn = _FORMS[name](_uniform(first.shape, rows, each, seeds, first.device), *args)
        if drawn is None:
            self.shared[name] = None
            drawn = result
        generator.manual_seed(_number_of(chain, "next"))
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


def _state(device: torch.device) -> Tensor:
    if device.type in ("cpu", "meta"):
        return torch.get_rng_state()
    of_type: Any = getattr(torch, device.type)
    state: Tensor = of_type.get_rng_state(device)
    return state


def _widened(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of an operator with float64 for lower types, where types are stated or mixed."""
    if kwargs.get("dtype") in _LOW:
        kwargs["dtype"] = torch.float64
    types = {leaf.dtype for _, leaf in leaves(args) if isinstance(leaf, Tensor)}
    if torch.float64 not in types or not types & _LOW:
        return args, kwargs

    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.dtype in _LOW else leaf

    kept = int(writes_in_place(func))  # the first argument stays what it is
    return (*args[:kept], *mapped(args[kept:], wide)), kwargs
