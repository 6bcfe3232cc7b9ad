"""What both runs write down: the samples that `collate_fn` was given, and gradients, weights, buffers and logs.

Batches arrive through the precision plugin, the first to be given what a loader yields. Loaders load in this process,
so that the samples of a batch are known by the batch itself. Large tensors are not copied: a *sketch* of 4096 numbers
stands for each, half of them elements, half of them signed sums over all elements. It is linear, and another one if any
element is.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_gradavg.lightning_internals import fetched_here
from lightning_gradavg.random_state import random_state, restore_random_state, same_random_state
from lightning_gradavg.tree import batch_samples, bits, is_array, leaves, mapped
from lightning_gradavg.verify.alike import Alike

__all__ = [
    "Data",
    "Enough",
    "Facts",
    "Loading",
    "Part",
    "Recorder",
    "Refused",
    "Step",
    "Taken",
    "Tape",
    "Tensors",
    "loss_of",
    "precision_of",
    "sketch",
]

Tensors: TypeAlias = dict[str, Tensor]
"""Sketches by the name of their parameter or buffer."""

_KEPT = 4096
_MOST_BATCHES, _MOST_SAMPLES = 20_000, 5_000  # of an epoch that is read without training
_PROBES = 3


class Enough(Exception):  # noqa: N818  # no error: all that was asked for is there
    """Ends a run before its time."""


class Refused(Exception):  # noqa: N818  # likewise
    """Says why a run cannot be compared."""


def sketch(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as float64 on the CPU, of a large one 2048 of them and 2048 signed sums over all."""
    dense = (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)
    if flat.numel() <= _KEPT:
        return flat.to(device="cpu", dtype=torch.float64, copy=True)
    half = _KEPT // 2
    positions, signs = (each.to(flat.device) for each in _pattern(flat.numel(), half))
    table, rest = flat[: len(signs) * half].view(-1, half), flat[len(signs) * half :]
    sums = flat.new_zeros(half, dtype=torch.float64)
    for start in range(0, len(signs), half):  # a float64 copy of a part at a time
        sums += signs[start : start + half] @ table[start : start + half].double()
    sums[: len(rest)] += rest.double()
    return torch.cat([flat[positions].double(), sums / math.sqrt(len(signs))]).cpu()


@functools.lru_cache(maxsize=64)
def _pattern(size: int, half: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    positions = torch.randint(size, (half,), generator=generator).sort().values
    return positions, torch.randint(2, (size // half,), generator=generator).double() * 2 - 1


def _sketches(tensors: Iterable[tuple[str, Tensor | None]]) -> Tensors:
    return {name: sketch(tensor) for name, tensor in tensors if tensor is not None}


def _digest(value: Any) -> bytes | None:
    """Return what is equal for equal data; None where it is not known."""
    made = hashlib.blake2b(digest_size=12)
    try:
        for place, leaf in leaves(value):
            array = leaf.tobytes() if is_array(leaf) and not isinstance(leaf, Tensor) else None
            content = bits(leaf) if isinstance(leaf, Tensor) else array or pickle.dumps(leaf)
            made.update(f"{place}{getattr(leaf, 'shape', '')};".encode())
            made.update(content)
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
    samples: bytes | None = None  # as `collate_fn` was given them
    batch: bytes | None = None  # as the loader made it, where that is needed
    why: str = ""  # there are no samples
    ids: tuple[Any, ...] = ()  # of the samples: the index in the dataset, and a digest


class Loading:
    """Has the loaders of a process load in it, and remembers what the batches are made of.

    Attributes:
        skims: Whether batches are only counted: a map-style loader yields indices, and loads nothing.
    """

    def __init__(self) -> None:
        self.made: dict[int, tuple[Any, Part]] = {}
        self.skims = False

    def watching(self) -> AbstractContextManager[None]:
        """Watch every `DataLoader` within."""
        return fetched_here(self._watch)

    def _watch(self, fetcher: Any) -> None:
        fetch, collate, of_samples = fetcher.fetch, fetcher.collate_fn, fetcher.auto_collation
        has_indices = not isinstance(fetcher.dataset, IterableDataset)
        inner = getattr(collate, "collate", None)  # of a loader that collates each rank's part of a list of samples
        indices: list[Any] = []

        def collated(samples: Any, collate: Callable[[Any], Any] = inner or collate) -> Any:
            if not of_samples:
                batch = collate(samples)
                self._note(batch, Part(why="its batches are made by no collate_fn"))
                return batch
            known = tuple(zip(indices, map(_digest, samples), strict=False)) if indices else ()
            ids = known or tuple((None, _digest(sample)) for sample in samples)
            part, before = Part(len(samples), _packed(list(samples)), ids=ids), random_state()
            batch = collate(samples)
            why = "" if part.samples is not None else "a sample cannot be copied"
            if not same_random_state(before, random_state()):
                why = "collate_fn draws random numbers"
            self._note(batch, replace(part, why=why, samples=None if why else part.samples))
            return batch

        def fetched(index: Any) -> Any:
            indices[:] = list(index) if has_indices and of_samples else []
            if self.skims and has_indices and of_samples:
                batch = torch.tensor(indices) if all(isinstance(one, int) for one in indices) else list(indices)
                self._note(batch, Part(len(indices), ids=tuple((one, None) for one in indices)))
                return batch
            return fetch(index)

        fetcher.collate_fn = replace(collate, collate=collated) if inner else collated
        fetcher.dataset = _Seeded(fetcher.dataset) if has_indices else fetcher.dataset
        fetcher.fetch = fetched

    def _note(self, batch: Any, part: Part) -> None:
        self.made[id(batch)] = (batch, part)
        if len(self.made) > 512:  # noqa: PLR2004  # batches that are read ahead
            del self.made[next(iter(self.made))]

    def parts(self, batch: Any) -> Any:
        """Return a batch, or a structure of batches of several loaders, with a `Part` for each."""
        known = self.made.pop(id(batch), None)
        if known is not None and known[0] is batch:
            part = known[1]
        elif isinstance(batch, (dict, list, tuple)) and any(id(each) in self.made for each in _items(batch)):
            return _rebuilt(batch, [self.parts(each) for each in _items(batch)])
        else:
            part = Part(why="its batches are made by no collate_fn")
        if part.samples is not None:
            return part
        with suppress(ValueError):
            part = replace(part, size=part.size or batch_samples(batch))
        return replace(
            part, batch=None if self.skims else _packed(batch), ids=part.ids or tuple(_row_ids(batch, part.size))
        )


def _items(structure: Any) -> list[Any]:
    return list(structure.values()) if isinstance(structure, dict) else list(structure)


def _rebuilt(structure: Any, items: list[Any]) -> Any:
    return dict(zip(structure, items, strict=True)) if isinstance(structure, dict) else tuple(items)


def _row_ids(batch: Any, size: int | None) -> Iterator[tuple[None, bytes | None]]:
    """Yield a digest of each row of a batch, or of the batch where its rows are not known."""
    for index in range(size or 0):
        rows = [leaf[index] for _, leaf in leaves(batch) if is_array(leaf) and leaf.shape[:1] == (size,)]
        yield None, _digest(rows)
    if size is None:
        yield None, _digest(batch)


class _Seeded:
    """A dataset whose random numbers depend on the index alone, so that a sample is the same wherever it is read."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        state = random_state()
        _seed(f"sample {index}")
        try:
            return self._dataset[index]
        finally:
            restore_random_state(state)


def _seed(text: str) -> None:
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


@dataclass(frozen=True)
class Data:
    """What one pass over the training data reads on this rank, without training."""

    batches: tuple[tuple[Any, ...], ...] = ()  # the ids of each
    probes: tuple[Any, ...] = ()  # the length of a map-style dataset, and digests of some of its samples
    complete: bool = True
    shuffles: bool = False
    chooses: bool = False  # a sampler of the user's own, which may leave out or repeat samples
    streams: bool = False
    dealt: bool = False  # by a DistributedSampler

    @classmethod
    def of(cls, given: Any, loading: Loading) -> Data:
        """Read the loaders of a run once; those beyond the first count in length only."""
        loader = next(iter(_loaders(given)), None)
        if loader is None:
            return cls(complete=False)
        dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
        indexed = not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__")
        probes = _probed(dataset) if indexed and hasattr(dataset, "__getitem__") else ()
        plain = (SequentialSampler, RandomSampler, DistributedSampler, type(None))
        replaces = bool(getattr(sampler, "replacement", False))
        found: list[Any] = []
        loading.skims, loading.made = True, {}
        read = 0
        try:
            for batch in loader:
                found.append(_ids(loading.parts(batch)))
                read += sum(index is None for index, _ in found[-1])
                if len(found) >= _MOST_BATCHES or read >= _MOST_SAMPLES:
                    break
        except Exception:  # noqa: BLE001  # a loader that can be read once only
            found = []
        finally:
            loading.skims = False
        return cls(
            tuple(found),
            probes,
            bool(found) and len(found) < _MOST_BATCHES and read < _MOST_SAMPLES,
            isinstance(sampler, RandomSampler) or bool(getattr(sampler, "shuffle", False)),
            indexed and (replaces or not isinstance(sampler, plain) or _batches_by_itself(loader)),
            isinstance(dataset, IterableDataset),
            isinstance(sampler, DistributedSampler),
        )


def _batches_by_itself(loader: Any) -> bool:
    sampler = getattr(loader, "batch_sampler", None)
    return sampler is not None and type(sampler).__module__.partition(".")[0] not in ("torch", "lightning_gradavg")


def _loaders(given: Any) -> Iterator[Any]:
    if isinstance(given, (dict, tuple)) or (isinstance(given, list) and any(isinstance(e, DataLoader) for e in given)):
        for each in _items(given):
            yield from _loaders(each)
    elif given is not None:
        yield getattr(given, "iterables", given)


def _probed(dataset: Any) -> tuple[Any, ...]:
    with suppress(Exception):
        size = len(dataset)
        places = sorted({size * step // _PROBES for step in range(_PROBES)}) if size else []
        return (size, *(_digest(_Seeded(dataset)[place]) for place in places))
    return ()


def _ids(parts: Any) -> tuple[Any, ...]:
    """Return what samples are known by; of several loaders those of the first."""
    if isinstance(parts, Part):
        return parts.ids
    return _ids(_items(parts)[0]) if _items(parts) else ()


@dataclass
class Taken:
    """One micro-batch on one rank."""

    parts: Any  # a `Part`, or a structure of them
    size: int
    counts: bool = True  # not if the strategy only kept the rank busy
    local: Tensors = field(default_factory=dict)  # what this rank added to the gradients
    loss: float = math.nan
    weight: float | None = None
    trace: list[Any] = field(default_factory=list)

    @property
    def ids(self) -> tuple[Any, ...]:
        """What its samples are known by."""
        return _ids(self.parts)


@dataclass
class Update:
    """One step of an optimizer."""

    kind: str
    reduced: list[Tensors]  # the gradients before they are clipped, for every time the loss was asked for
    used: Tensors = field(default_factory=dict)  # those that the optimizer stepped with
    options: list[dict[str, Any]] = field(default_factory=list)  # of its parameter groups


@dataclass
class Step:
    """What is done with one global batch."""

    epoch: int
    taken: list[Taken]
    updates: list[Update]
    weights: Tensors = field(default_factory=dict)  # afterwards, with all that hooks do
    buffers: Tensors = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)


@dataclass
class Facts:
    """How a run was set up."""

    strategy: str
    rule: str = "mean"
    uses_weight: bool = False
    splits: bool = False
    replicated: bool = False
    ours: bool = False
    scales_rates: bool = False
    automatic: bool = True
    accumulation: int = 1
    epoch_batches: float = math.inf
    estimated_steps: float = math.inf


@dataclass
class Tape:
    """What one rank recorded."""

    rank: int
    facts: Facts
    initial: Tensors = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    synced: set[str] = field(default_factory=set)  # values that were logged with sync_dist
    shared: dict[str, None] = field(default_factory=dict)
    collectives: set[str] = field(default_factory=set)
    data: Data = field(default_factory=Data)
    problem: str = ""


def loss_of(output: Any) -> tuple[Any, float | None]:
    """Return the loss in what `training_step` returned, the sum of named ones, and its weight."""
    content = output if isinstance(output, Mapping) else {"loss": output}
    loss, weight = content.get("loss"), content.get("weight")
    if isinstance(loss, Mapping):
        return sum(loss.values()), None
    return loss, None if weight is None or isinstance(weight, Mapping) else float(weight)


class _Arrivals:
    """A precision plugin that tells of every batch before anybody changes it."""

    arrived: Callable[[Any], Any]

    def convert_input(self, data: Any) -> Any:
        """Tell, and convert."""
        converted = self.converted(data)
        self.arrived(data)
        return converted

    def converted(self, data: Any) -> Any:
        """Convert only."""
        return super().convert_input(data)  # type: ignore[misc]  # of the plugin beside


class _Double(_Arrivals, DoublePrecision):
    """In float64."""


class _Single(_Arrivals, Precision):
    """In float32."""


def precision_of(recorder: Recorder) -> Precision:
    """Return the precision plugin of a run that is recorded."""
    plugin = _Double() if recorder.mode.double else _Single()
    plugin.arrived = recorder.arrived
    return plugin


class Recorder(Callback):
    """Records the first steps of a run on this rank, and ends it.

    Args:
        steps: Global batches to train on.
        loading: What watches the loaders.
        double: Whether to compute in float64.
    """

    def __init__(self, steps: int, loading: Loading, *, double: bool = True) -> None:
        self.most, self.loading, self.mode = steps, loading, Alike(double=double)
        self.tape = Tape(0, Facts(""))
        self.window: list[Taken] = []
        self.updates: list[Update] = []
        self.evaluations: list[Tensors] = []
        self.epoch = 0
        self.all_keys: list[tuple[int, ...]] = []
        self.rank, self._hooked, self._active, self._counted = 0, set[str](), False, 0

    @contextmanager
    def watching(self, module: LightningModule) -> Iterator[None]:
        """Watch a module in training; nothing of this is left afterwards."""
        step, log = module.training_step, module.log

        @functools.wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            return self.stepped(step, args, kwargs)

        @functools.wraps(log)
        def logs(name: str, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("sync_dist"):
                self.tape.synced.add(name)
            log(name, *args, **kwargs)

        vars(module).update(training_step=training_step, log=logs)
        try:
            with self.loading.watching(), _eager(), self._hooks_as_they_are(), self._steps_first():
                yield
        finally:
            self._leave()
            for name in ("training_step", "log"):
                vars(module).pop(name, None)

    @contextmanager
    def _steps_first(self) -> Iterator[None]:
        """Have recurrent layers, which keep time steps along dimension 0, draw for samples along dimension 1."""

        def along(own: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(own)
            def forward(*args: Any, **kwargs: Any) -> Any:
                self.mode.first = 1
                try:
                    return own(*args, **kwargs)
                finally:
                    self.mode.first = 0

            return forward

        with ExitStack() as stack:
            for kind in (nn.LSTM, nn.GRU, nn.RNN):
                stack.enter_context(mock.patch.object(kind, "forward", along(kind.forward)))
            yield

    @contextmanager
    def _hooks_as_they_are(self) -> Iterator[None]:
        """Have communication hooks of DDP compute in the types that they state."""
        own = DistributedDataParallel.register_comm_hook

        def register(model: Any, state: object, hook: Callable[..., Any]) -> None:
            @functools.wraps(hook)
            def paused(state: object, bucket: Any) -> Any:
                with self.mode.pausing():
                    return hook(state, bucket)

            own(model, state, paused)

        with mock.patch.object(DistributedDataParallel, "register_comm_hook", register):
            yield

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note how the run is set up, and what it starts from."""
        self.trainer, self.module = trainer, pl_module
        self.rank = trainer.global_rank
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # nothing is validated, and a plateau may be watched on that
        self.tape.rank, self.tape.facts = self.rank, _facts_of(trainer)
        self.tape.initial = _sketches(pl_module.named_parameters())
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self._updated)

    def arrived(self, batch: Any) -> None:
        """Begin with a batch, as the loader made it."""
        self.close()
        if len(self.tape.steps) >= self.most:
            self.finish()
            raise Enough
        parts, self.epoch = self.loading.parts(batch), self.trainer.current_epoch
        taken = Taken(parts, _size_of(parts))
        self.window.append(taken)
        self._listen()
        self.enter([(len(self.window) - 1, self.rank, index) for index in range(taken.size)])

    def enter(self, keys: list[tuple[int, ...]]) -> None:
        """Begin to compute with samples of these keys."""
        self._leave()
        self._counted, self._outside = 0, random_state()
        self.all_keys = keys
        self.mode.begin(keys)
        self.reseed()
        self.mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
        self._active = True

    def reseed(self) -> None:
        """Draw as at the beginning of a step."""
        _seed(f"step {len(self.tape.steps)}")

    def _leave(self) -> None:
        if self._active:
            self._active = False
            self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
            restore_random_state(self._outside)

    def _listen(self) -> None:
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and name not in self._hooked:
                self._hooked.add(name)
                parameter.register_hook(functools.partial(self._saw, name))

    def _saw(self, name: str, gradient: Tensor | None) -> None:
        if self.window and self._active and gradient is not None:
            local = self.window[-1].local
            local[name] = local[name] + sketch(gradient) if name in local else sketch(gradient)

    def stepped(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `training_step`, on a whole batch or on the next piece of it."""
        taken = self.window[-1]
        told = getattr(self.trainer.strategy, "facts", None)
        taken.counts = told is None or told().samples != 0
        with suppress(ValueError):
            rows = batch_samples(args[0])
            if rows < len(self.all_keys):
                start = self._counted % len(self.all_keys)
                self.mode.keys, self._counted = self.all_keys[start : start + rows], start + rows
        self.reseed()  # whatever state the strategy has the step begin from
        before = random_state()[1:]
        output = step(*args, **kwargs)
        if before != random_state()[1:]:
            self.mode.shared["a generator of Python or NumPy"] = None
        loss, weight = loss_of(output)
        taken.weight = weight
        if isinstance(loss, Tensor) and loss.numel() == 1:
            taken.loss = float(loss.detach())
        return output

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note the reduced gradients."""
        mine = _trained(optimizer)
        grads = ((name, one.grad) for name, one in pl_module.named_parameters() if id(one) in mine)
        self.evaluations.append(_sketches(grads))

    def _updated(self, optimizer: Optimizer, *_: Any) -> None:
        mine = _trained(optimizer)
        used = _sketches((name, one.grad) for name, one in self.module.named_parameters() if id(one) in mine)
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        plain = [
            {key: _plain(value) for key, value in group.items() if key not in ("initial_lr", "foreach", "fused")}
            for group in options
        ]
        self.updates.append(Update(type(optimizer).__name__, self.evaluations, used, plain))
        self.evaluations = []

    def on_train_batch_end(self, *_: Any) -> None:
        """End with a batch."""
        self.window[-1].trace = list(self.mode.trace)
        self._leave()

    def close(self) -> None:
        """Note what a step left behind, once all hooks behind it ran."""
        if not self.updates:
            return
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items() if value.numel() == 1}
        buffers = ((n, b) for n, b in self.module.named_buffers() if not n.endswith("num_batches_tracked"))
        step = Step(self.epoch, self.window, self.updates, logged=metrics)
        step.weights, step.buffers = _sketches(self.module.named_parameters()), _sketches(buffers)
        self.tape.steps.append(step)
        self.window, self.updates = [], []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End with the run."""
        self._leave()
        self.close()
        self.finish()

    def finish(self) -> None:
        """Note what there is to say of the whole."""
        self._leave()
        tape, mode = self.tape, self.mode
        tape.shared, tape.collectives = dict(mode.shared), set(mode.collectives)
        if not tape.facts.automatic and any(len(step.taken) > 1 for step in tape.steps):
            tape.problem = "in manual optimization a window of several batches is the user's own sum of them"
        tape.data = Data.of(self.trainer.train_dataloader, self.loading)


def _size_of(parts: Any) -> int:
    """Return the number of samples of a batch, 1 where it is not known."""
    if isinstance(parts, Part):
        return parts.size or 1
    sizes = [_size_of(each) for each in _items(parts)]
    return max(sizes, default=1)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else copy.copy(value)


def _trained(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


@contextmanager
def _eager() -> Iterator[None]:
    """Have nothing compiled: a compiled function draws and rounds where nobody sees it."""

    def kept(model: Any = None, **_: Any) -> Any:
        return model if model is not None else lambda each: each

    with mock.patch.object(torch, "compile", kept):
        set_stance: Any = getattr(torch.compiler, "set_stance", None)  # from torch 2.6 on
        if set_stance is None:
            yield
        else:
            with set_stance("force_eager"):
                yield


def _facts_of(trainer: Trainer) -> Facts:
    strategy: Any = trainer.strategy
    told = strategy.facts() if hasattr(strategy, "facts") else None
    accumulation = trainer.accumulate_grad_batches
    facts = Facts(
        type(strategy).__name__,
        automatic=bool(trainer.lightning_module.automatic_optimization),
        accumulation=accumulation,
        epoch_batches=float(trainer.num_training_batches),
    )
    with suppress(Exception):  # of an accumulation that differs between epochs
        facts.estimated_steps = float(trainer.estimated_stepping_batches)
    if told is not None:
        if told.replicas is not None:
            raise Refused(
                f"{facts.strategy} trains replicas with batch statistics of their own, which one process has"
                f" not: verify"
                " the run without num_replicas= and equivalent_to='data_parallel'"
            )
        facts.ours, facts.rule, facts.uses_weight = True, told.rule.name, told.rule.uses_weight
        facts.splits, facts.replicated, facts.scales_rates = told.splits_batches, told.replicated, told.scales_rates
    return facts
