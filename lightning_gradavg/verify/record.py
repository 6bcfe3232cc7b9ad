"""What both runs write down: the samples of their batches, gradients, weights, buffers and logs.

Loaders load in this process, so that the samples of a batch are known by the batch itself, and so that these draw the
same random numbers wherever they are read.

Large tensors are not copied. A *sketch* of 4096 numbers stands for each: half of them are elements, half are signed
sums over all elements. It is linear, and changes if any element does.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import pickle
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_gradavg._lightning.internals import (
    BatchNorm,
    averages_of,
    comm_hook_of,
    fetched_here,
    hooks_of_tensor,
    ignore_mixed_precision,
    sharded_modules,
)
from lightning_gradavg._lightning.loaders import user_loader
from lightning_gradavg._lightning.options import StrategyFacts
from lightning_gradavg._support.random_state import random_state, restore_random_state, same_random_state, seeded
from lightning_gradavg._support.tree import batch_samples, bits, leaves
from lightning_gradavg.batches.chunks import PartCollator
from lightning_gradavg.rules import RULES, Rule
from lightning_gradavg.verify.draws import Draw, Draws
from lightning_gradavg.verify.rounding import Perturbation
from lightning_gradavg.verify.rows import Numbers, numbers_of
from lightning_gradavg.verify.shards import change_after_sharding, is_shard, layout_problem, shard_in_whole
from lightning_gradavg.verify.trace import CodeLine, Followed, Piece, Place, Trace, Writes, line_of_function

__all__ = [
    "SKETCHED_ELEMENTS",
    "Bucket",
    "Facts",
    "MicroBatch",
    "Plateau",
    "Reading",
    "Record",
    "Recorder",
    "Refused",
    "Replica",
    "SampleId",
    "Snapshot",
    "Step",
    "Tensors",
    "join_shards",
    "loss_and_weight",
    "sketch",
]

SampleId: TypeAlias = tuple[Hashable, ...]
"""A sample: a digest of its data set and its index there; of a stream, a digest of the sample."""

SampleKey: TypeAlias = tuple[int, ...]
"""What a sample draws from: its micro-batch in the window, its rank, and its place in the micro-batch there."""

Tensors: TypeAlias = dict[str, Tensor]
"""Sketches by the name of their parameter, buffer, option or value."""

_NO_COLLATE_FN = (
    "no collate_fn makes the loader's batches, so their samples are unknown: use one DataLoader with a batch_size"
)

_SKETCHED_NUMBERS = 4096

SKETCHED_ELEMENTS = _SKETCHED_NUMBERS // 2
"""The first numbers of a sketch, which are elements; those behind them are sums."""

# Of an epoch that is read without training. Reading a stream loads its samples; otherwise only indices are read.
_MOST_BATCHES = 20_000
_MOST_SAMPLES = 5_000

_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler)
"""Those that read every sample once."""

_ERRORS_OF_TYPES = re.compile(
    r"(?i)dtype|scalar type|double|float64|float32|not implemented for|expected .* but (got|found)"
)
"""What errors of operators that do not compute in float64 say."""

_EVERY_STEP = range(sys.maxsize)

_UNCOMPARED_OPTIONS = ("params", "initial_lr", "foreach", "fused")
"""Entries of an optimizer's groups that do not change what it computes."""


class Refused(Exception):  # noqa: N818  # no error of the run
    """Ends a run, with the reason why it cannot be compared; without one if everything that was asked for is there."""


def sketch(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as float64 on the CPU, of a large one 2048 of them and 2048 signed sums over all."""
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    flat = dense.reshape(-1)
    if flat.numel() <= _SKETCHED_NUMBERS:
        return flat.to(device="cpu", dtype=torch.float64, copy=True)
    half = SKETCHED_ELEMENTS
    pattern = _sketch_pattern(flat.numel(), half)
    signs = pattern.signs.to(flat.device)
    # The elements are rows of `half` numbers. Every row is added to the sums with a sign of its own. One part after the
    # other is converted to float64, so there is never a float64 copy of the whole tensor.
    sums = flat.new_zeros(half, dtype=torch.float64)
    for part, signs_of_rows in zip(flat.split(half * half), signs.split(half), strict=True):
        padding = -len(part) % half
        rows = nn.functional.pad(part.double(), (0, padding)).view(-1, half)
        sums += signs_of_rows @ rows
    elements = flat[pattern.positions.to(flat.device)].double()
    return torch.cat([elements, sums / math.sqrt(len(signs))]).cpu()


class _SketchPattern(NamedTuple):
    positions: Tensor  # of the elements that are kept
    signs: Tensor  # 1 or -1 for each row of elements


@functools.lru_cache(maxsize=64)
def _sketch_pattern(size: int, half: int) -> _SketchPattern:
    """Return the pattern for tensors of this size, the same in all processes."""
    generator = torch.Generator().manual_seed(size)
    positions = torch.randint(size, (half,), generator=generator).sort().values
    rows = math.ceil(size / half)
    signs = torch.randint(2, (rows,), generator=generator).double() * 2 - 1
    return _SketchPattern(positions, signs)


@dataclass(frozen=True)
class Reading:
    """What one pass over the training data reads on this rank, and how.

    Attributes:
        batches: The samples of each batch.
        is_complete: Whether these are all batches of the pass.
        batch_size: The loader's, or None if a batch sampler decides.
        drops_last: Whether the loader leaves out a last batch that is not full.
        shuffles: Whether the order is random, or that of a stream.
        own_sampler: Whether a sampler may leave out or repeat samples, as one of the user's own may.
        replaces: Whether a sampler draws with replacement.
    """

    batches: Sequence[Sequence[SampleId]] = ()
    is_complete: bool = False
    batch_size: int | None = None
    drops_last: bool = False
    shuffles: bool = False
    own_sampler: bool = False
    replaces: bool = False


class Replica(NamedTuple):
    """Consecutive samples of a batch that `nn.DataParallel` would compute on one device."""

    samples: int
    is_first: bool  # whether its buffers are those of the module afterwards


@dataclass
class MicroBatch:
    """One micro-batch on one rank.

    Attributes:
        packed_samples: The samples, pickled, as `collate_fn` was given them.
        sample_ids: Which samples these are, equal on all processes.
        content_ids: The same by what the samples are, where every rank has a data set of its own.
        size: The number of samples.
        unknown_because: Why the samples are not known; "" if they are.
        sample_keys: What the samples draw from, if the micro-batch joins those of several ranks.
        piece_sizes: The number of samples of each piece, if the strategy ran the batch in pieces, such as replicas.
        replicas: The same of the ranks that it joins, if batch norm normalizes the samples of each by themselves.
        counts: Whether its samples count: not if the strategy only kept the rank busy.
        loss: The value of the loss; of the first, if an optimizer asks for several.
        weight: The weight that `training_step` returned with it.
        draws: What was drawn in the micro-batch.
        pieces: What `training_step` computed, in one call or in several; empty if that was not traced.
    """

    packed_samples: Sequence[bytes] = ()
    sample_ids: Sequence[SampleId] = ()
    content_ids: Sequence[SampleId] = ()
    size: int = 1
    unknown_because: str = _NO_COLLATE_FN
    sample_keys: Sequence[SampleKey] = ()
    piece_sizes: list[int] = field(default_factory=list)
    replicas: Sequence[Replica] = ()
    counts: bool = True
    loss: float = math.nan
    weight: float | None = None
    draws: list[Draw] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    @property
    def sizes_of_pieces(self) -> Sequence[int]:
        """The numbers of samples that the rank computed at once, one after the other."""
        if self.piece_sizes:
            return self.piece_sizes
        return [self.size]


class Snapshot(NamedTuple):
    """Tensors at one stage of a step."""

    stage: str  # of `report.STAGES`
    tensors: Tensors
    shards: frozenset[str] = frozenset()  # names of tensors of which the sketch is that of this rank's shard alone


@dataclass
class Bucket:
    """Gradients that a communication hook of the user reduced together.

    Attributes:
        parameters: Their parameters, in order; emptied when the gradients are read, or the step ends.
        before: The gradients of this rank.
        after: What the hook made of those of all ranks.
    """

    parameters: list[Tensor]
    before: Numbers
    after: Numbers = ()


@dataclass
class Step:
    """What one global batch does, in order.

    Attributes:
        epoch: The epoch.
        micro_batches: The micro-batches of the window.
        snapshots: The tensors at each stage.
        logged: The values that were logged.
        loss_scale: By which a loss scaler multiplied the loss; 1 without one.
        is_skipped: Whether the scaler skipped the optimizer's step, as a gradient overflowed.
        writes: Where weights, buffers and gradients were last written in place, by their names.
        buckets: What a communication hook of the user reduced.
    """

    epoch: int
    micro_batches: list[MicroBatch]
    snapshots: list[Snapshot]
    logged: dict[str, float]
    loss_scale: float = 1.0
    is_skipped: bool = False
    writes: dict[str, Place] = field(default_factory=dict)
    buckets: list[Bucket] = field(default_factory=list)


@dataclass(frozen=True)
class Facts:
    """How a run was set up. Unlike `StrategyFacts` it can be pickled: the rule is without a user's function.

    Attributes:
        strategy: The name of the strategy's class.
        is_gradavg: Whether it is a strategy of this package.
        rule: Its reduction rule; of stock DDP the mean.
        splits_batches: Whether each rank takes its chunk of the loader's batches.
        replicated: Whether a training step runs once per replica, so that batch statistics are those of all ranks.
        replicas: The number of chunks of a loader batch that have batch statistics of their own, as with
            `nn.DataParallel`; None if there are none.
        sharded: Whether the ranks share the model by `fully_shard`, where each has its own buffers.
        accumulation: Loader batches per optimizer step.
        automatic: Whether Lightning optimizes, and not the module.
        epoch_batches: Loader batches in an epoch, on each rank.
    """

    strategy: str = ""
    is_gradavg: bool = False
    rule: Rule = RULES["mean"]
    splits_batches: bool = False
    replicated: bool = False
    replicas: int | None = None
    sharded: bool = False
    accumulation: int = 1
    automatic: bool = True
    epoch_batches: float = math.inf


class Plateau(NamedTuple):
    """A scheduler that follows a value, such as `ReduceLROnPlateau`."""

    name: str  # of its class
    monitor: str  # the value; "" if the module steps the scheduler itself
    has_stepped: bool


@dataclass
class Record:
    """What one process recorded.

    Attributes:
        rank: The rank of the process.
        facts: How its run was set up.
        steps: The optimizer steps.
        shared: Operators that drew for no single sample, in order, each with the place of its first draw.
        collectives: Names of the collective operations that ran.
        scopes: Names of the profiler scopes that were entered.
        step_operators: Names of operators that ran in `training_step`.
        plateaus: Schedulers that follow a value.
        by_content: Whether samples are known by what they are, and not by their index.
        reading: What one epoch reads, if it was asked for.
        batch_norms: Names of layers whose statistics are those of one rank.
        unregistered: Names of tensors that an optimizer holds and the module does not register.
        divisors: The numbers by which `fully_shard` divides sums of the ranks' gradients.
        configured_at: The user's line on which `configure_optimizers` begins; None if it is none of the user's.
        read_at: The user's line on which `__iter__` of a stream begins; None if it is none of the user's.
        logged_at: Where each value was last logged.
        parameter_hooks: The user's lines on which hooks of parameters begin, by the parameters' names.
        comm_hook: The name of the user's communication hook; "" if there is none.
        comm_hook_at: The line on which it begins; None if it is a library's.
        problem: Why the run cannot be compared; "" if it can.
    """

    rank: int = 0
    facts: Facts = field(default_factory=Facts)
    steps: list[Step] = field(default_factory=list)
    shared: dict[str, Place | None] = field(default_factory=dict)
    collectives: set[str] = field(default_factory=set)
    scopes: set[str] = field(default_factory=set)
    step_operators: set[str] = field(default_factory=set)
    plateaus: list[Plateau] = field(default_factory=list)
    by_content: bool = False
    reading: Reading = field(default_factory=Reading)
    batch_norms: list[str] = field(default_factory=list)
    unregistered: list[str] = field(default_factory=list)
    divisors: set[float] = field(default_factory=set)
    configured_at: CodeLine | None = None
    read_at: CodeLine | None = None
    logged_at: dict[str, Place] = field(default_factory=dict)
    parameter_hooks: dict[str, CodeLine] = field(default_factory=dict)
    comm_hook: str = ""
    comm_hook_at: CodeLine | None = None
    problem: str = ""


class LossAndWeight(NamedTuple):
    """What a training step says of its batch."""

    loss: Any  # a tensor, or whatever the user returned in its place
    weight: float | None


def loss_and_weight(output: object) -> LossAndWeight:
    """Return the loss and the weight in what `training_step` returned; of named losses their sum."""
    if not isinstance(output, Mapping):
        return LossAndWeight(output, None)
    loss, weight = output.get("loss"), output.get("weight")
    if isinstance(loss, Mapping):
        return LossAndWeight(sum(loss.values()), None)
    if weight is None or isinstance(weight, Mapping):
        return LossAndWeight(loss, None)
    return LossAndWeight(loss, float(weight))


def _seed(text: str) -> None:
    """Seed the generators of torch, Python and NumPy."""
    restore_random_state(seeded(hashlib.blake2b(text.encode(), digest_size=24).digest()))


class _Packer(pickle.Pickler):
    """Writes equal samples as equal bytes, and of a view not the storage behind it."""

    def reducer_override(self, value: object) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided:
            return NotImplemented
        return _unpacked_tensor, (bytearray(bits(value)), value.dtype, tuple(value.shape))


def _unpacked_tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:  # `torch.frombuffer` refuses an empty buffer
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _packed(sample: object) -> bytes:
    stream = io.BytesIO()
    _Packer(stream).dump(sample)
    return stream.getvalue()


def _digest(*packed: bytes) -> bytes:
    return hashlib.blake2b(b"".join(packed), digest_size=12).digest()


class _SeededDataset:
    """A dataset whose random numbers depend on the index alone, so that a sample is the same wherever it is read.

    Attributes:
        indices: The indices that were read since the list was last emptied.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.indices: list[Hashable] = []

    def __getitem__(self, index: Hashable) -> object:
        state = random_state()
        _seed(f"sample {index}")
        self.indices.append(index)
        try:
            return self._dataset[index]
        finally:
            restore_random_state(state)


def _fingerprint(dataset: Any) -> bytes | None:
    """Return what equal datasets share: a digest of the length and of some samples; None if that cannot be read."""
    try:
        size = len(dataset)
        seeded_dataset = _SeededDataset(dataset)
        packed = [_packed(size)]
        for index in range(0, size, max(1, size // 2)):
            packed.append(_packed(seeded_dataset[index]))
    except Exception:  # noqa: BLE001  # of the user's dataset, and pickle raises nearly anything
        return None
    return _digest(*packed)


class _RecordingCollate:
    """Collates as the user's `collate_fn` does, and notes what the batch is made of.

    It stands in the fetcher of one pass of a loader, which calls it with the samples that it just read.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        dataset: _SeededDataset,
        fingerprint: bytes | None,
        note: Callable[[object, MicroBatch], None],
    ) -> None:
        self._collate, self._dataset, self._fingerprint, self._note = collate, dataset, fingerprint, note

    def __call__(self, samples: list[object]) -> object:
        # Under `split_batches` all ranks read all samples of a batch, and this rank trains on some.
        own = slice(None)
        if isinstance(self._collate, PartCollator):
            chunk = self._collate.split.cut(len(samples))
            own = slice(chunk.start, chunk.stop)
        own_samples = samples[own]
        indices = self._dataset.indices[own]
        self._dataset.indices = []

        unknown_because = ""
        packed: list[bytes] = []
        try:
            packed = [_packed(sample) for sample in own_samples]
        except Exception:  # noqa: BLE001  # pickle raises nearly anything
            unknown_because = "a sample cannot be copied"
        # One process collates these samples again, with those of other ranks.
        before = random_state()
        batch = self._collate(samples)
        if not same_random_state(before, random_state()):
            unknown_because = "collate_fn draws random numbers"

        content_ids = tuple((_digest(sample),) for sample in packed)
        sample_ids: Sequence[SampleId] = content_ids
        if self._fingerprint is not None:
            sample_ids = tuple((self._fingerprint, index) for index in indices)
        micro_batch = MicroBatch(packed, sample_ids, content_ids, len(own_samples), unknown_because)
        if isinstance(self._collate, PartCollator):
            self._note(batch.part, micro_batch)  # what the strategy makes of a `Collated`
        else:
            self._note(batch, micro_batch)
        return batch


class _Noted(NamedTuple):
    """A batch and what it is made of."""

    batch: object  # kept alive, so that no other object gets its id
    micro_batch: MicroBatch


class _Loading:
    """Lets the loaders of a process load in it, and knows what the batches that were not trained on yet are made of.

    `fetched_here` calls `watch` when a pass of a loader begins. The collate function that it puts there calls `note`
    for each batch. The recorder calls `pop` when the batch arrives at training.
    """

    def __init__(self) -> None:
        self._noted: dict[int, _Noted] = {}

    def watch(self, fetcher: Any) -> None:
        """Have a pass of a `DataLoader` note its batches."""
        if not fetcher.auto_collation:
            return  # the loader has batch_size=None, so there is no `collate_fn` of samples
        dataset = _SeededDataset(fetcher.dataset)
        fingerprint = None
        if not isinstance(fetcher.dataset, IterableDataset):
            fingerprint = _fingerprint(fetcher.dataset)
            fetcher.dataset = dataset
        fetcher.collate_fn = _RecordingCollate(fetcher.collate_fn, dataset, fingerprint, self.note)

    def note(self, batch: object, micro_batch: MicroBatch) -> None:
        """Remember what a batch is made of."""
        self._noted[id(batch)] = _Noted(batch, micro_batch)

    def pop(self, batch: object) -> MicroBatch:
        """Return what a batch is made of, and forget it; of an unknown batch, that its samples are unknown."""
        noted = self._noted.pop(id(batch), None)
        if noted is None:
            return MicroBatch()
        return noted.micro_batch

    def read(self, loader: DataLoader[Any], *, by_content: bool) -> Reading:
        """Read the loader of a run once, without training; of a map-style dataset the indices, unless `by_content`."""
        is_stream = isinstance(loader.dataset, IterableDataset)
        most = _MOST_BATCHES
        if is_stream or by_content:
            most = _MOST_SAMPLES // (loader.batch_size or 1)
        try:
            batches = list(islice(self._sample_ids(loader, by_content=by_content), most))
        except Exception:  # noqa: BLE001  # a loader that can be read once only
            batches = []
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        shuffles = isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False)
        replaces = getattr(sampler, "replacement", False)
        # A plain list may be a batch sampler, too.
        batch_sampler_package = type(loader.batch_sampler).__module__.partition(".")[0]
        knows_samplers = batch_sampler_package in ("torch", "builtins") and isinstance(sampler, _SAMPLERS)
        return Reading(
            batches=batches,
            is_complete=0 < len(batches) < most,
            batch_size=loader.batch_size,
            drops_last=loader.drop_last,
            shuffles=is_stream or shuffles,
            own_sampler=not is_stream and (replaces or not knows_samplers),
            replaces=replaces,
        )

    def _sample_ids(self, loader: DataLoader[Any], *, by_content: bool) -> Iterator[Sequence[SampleId]]:
        """Yield the samples of each batch of a pass."""
        if isinstance(loader.dataset, IterableDataset):
            for batch in loader:
                yield self.pop(batch).sample_ids
            return
        assert loader.batch_sampler is not None, "a loader with batch_size=None has no collate_fn, and is not read"
        if by_content:
            dataset = _SeededDataset(loader.dataset)
            for indices in loader.batch_sampler:
                yield tuple((_digest(_packed(dataset[index])),) for index in indices)
            return
        fingerprint = _fingerprint(loader.dataset)
        if fingerprint is None:
            return
        for indices in loader.batch_sampler:
            yield tuple((fingerprint, index) for index in indices)


class Recorder(Callback):
    """Records the first steps of a run, and ends the run.

    `plugin` and the recorder itself are among the plugins and callbacks of a Trainer, which fits the module within
    `watching`. Then Lightning calls, in this order:

    ```text
    on_train_start                  note the set-up and the initial weights
      _begin_batch                  for each batch, from the plugin's `convert_input`; first end the step before
        _training_step              note loss and weight; once for each piece of the batch
        on_before_optimizer_step    note the reduced gradient } each time that an optimizer
        _after_optimizer_step       note the clipped gradient } takes a step
      on_train_batch_end            note what was drawn
    on_train_end                    end the last step
    ```

    Args:
        most_steps: The number of steps after which the run ends.
        double: Whether the run computes in float64.
        reads: Whether to read an epoch of the user's loader at the end.
        by_content: Whether samples are known by what they are. Ranks decide that together, and say it in `record`.
        plugin: The precision plugin of a run in a 16-bit precision; None for float64, or float32.
        perturbation: Moves the initial weights and the inputs of such a run, if they are to be moved.
        traced_steps: The steps whose calls of `training_step` are noted.
        followed: What ranks noted of the samples of the traced step, to be compared with what is computed here.

    Attributes:
        record: What is recorded.
        sample_keys: What the samples of the running batch draw from.
        replicas: The replicas of the running batch, if it joins those of ranks.
        mode: The mode in which a batch is computed.
        loading: What batches are made of.
        plugin: The precision plugin that the Trainer is to have.
    """

    trainer: Trainer
    module: LightningModule

    def __init__(
        self,
        most_steps: int,
        *,
        double: bool = True,
        reads: bool = True,
        by_content: bool = False,
        plugin: Precision | None = None,
        perturbation: Perturbation | None = None,
        traced_steps: range = _EVERY_STEP,
        followed: Sequence[Followed] = (),
    ) -> None:
        self._most_steps = most_steps
        self._traced_steps = traced_steps
        self._reads = reads
        self._loader: Any = None  # the user's, if it is read at the end
        self.loading = _Loading()
        self.mode = Draws(double=double)
        self._trace = Trace(self.mode, followed)
        self._writes = Writes(self._trace)
        self._buckets: list[Bucket] = []
        self.mode.place = self._trace.place
        self.record = Record(
            shared=self.mode.shared,
            collectives=self.mode.collectives,
            scopes=self.mode.scopes,
            step_operators=self.mode.step_operators,
            by_content=by_content,
        )
        self._plateaus: list[Any] = []  # Lightning's `LRSchedulerConfig` of each
        self._first_epochs: list[int] = []  # of the schedulers of `_plateaus`
        # Of the step that is not ended yet.
        self._window: list[MicroBatch] = []
        self._snapshots: list[Snapshot] = []
        # Of the running batch.
        self.sample_keys: Sequence[SampleKey] = []
        self.replicas: Sequence[Replica] = []
        self._epoch = 0
        self._computed_samples = 0  # by the pieces before
        self._batch_scope = ExitStack()
        # Lightning's loop calls `convert_input` of the precision plugin before any hook of a batch, so there the batch
        # is still the object that the loader made.
        self.plugin: Any = Precision()
        if plugin is not None:
            self.plugin = plugin
        elif double:
            self.plugin = DoublePrecision()
        self._perturbation = perturbation
        self._loss_scale = 1.0
        self._convert_input: Callable[[object], object] = self.plugin.convert_input
        self.plugin.convert_input = self._begin_batch

    @contextmanager
    def watching(self, module: LightningModule) -> Iterator[None]:
        """Record what is trained within. The module must be of this run alone."""
        user_step = module.training_step

        @functools.wraps(user_step)  # Lightning reads the names of its parameters
        def training_step(*args: object, **kwargs: object) -> object:
            return self._training_step(user_step, args, kwargs)

        user_log = module.log

        @functools.wraps(user_log)
        def log(name: str, *args: Any, **kwargs: Any) -> None:
            self.record.logged_at[name] = self._trace.place()
            user_log(name, *args, **kwargs)

        vars(module)["training_step"] = training_step
        change_after_sharding(module, _prepare_shards)
        vars(module)["log"] = log
        with ExitStack() as stack:
            stack.enter_context(fetched_here(self.loading.watch))
            stack.enter_context(_without_compilation())
            stack.enter_context(_comm_hooks_paused(self.mode, self._note_bucket))
            stack.enter_context(self._writes)
            stack.enter_context(self._batch_scope)
            try:
                yield
            except Refused as error:
                self.record.problem = str(error)
            except RuntimeError as error:
                if self.plugin.precision == "32-true" or not _ERRORS_OF_TYPES.search(str(error)):
                    raise
                first_line = str(error).partition("\n")[0]
                where = f"after {self.mode.last_operator}: {first_line}"
                self.record.problem = f"the run does not compute in {self.plugin.precision} on this device ({where})"
                if self.mode.double:
                    self.record.problem = (
                        f"the run does not compute in float64 ({where}): verify with --single, in float32"
                    )
            self._finish()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note how the run is set up, and what it starts from."""
        self.trainer, self.module = trainer, pl_module
        if self._reads:
            self._loader = user_loader(trainer.train_dataloader)
            if _have_data_sets_of_their_own(self._loader):
                self.record.by_content = True
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # nothing is validated, and ReduceLROnPlateau may monitor a validation metric
            if isinstance(config.scheduler, ReduceLROnPlateau):
                self._plateaus.append(config)
                self._first_epochs.append(config.scheduler.last_epoch)
        self.record.rank = trainer.global_rank
        self.record.facts = _facts_of(trainer)
        unregistered = _unregistered_tensors(pl_module, trainer.optimizers)
        self.record.unregistered = list(unregistered)
        if self.mode.double:
            # `DoublePrecision` calls `module.double()`, which does not reach these. As in `nn.Module._apply`, a tensor
            # stays the object that the optimizer holds.
            for tensor in unregistered.values():
                tensor.data = tensor.data.double()
        if self.record.facts.sharded:
            self._look_at_shards()
        if self._perturbation is not None:
            self._perturbation.move(weight for _, weight in self._weights())
        self._take_snapshot("initial weights", self._weights())
        self._note_storages_of_weights()
        self._note_lines_of_set_up()
        for name, layer in pl_module.named_modules():
            if _has_statistics_of_one_rank(layer):
                self.record.batch_norms.append(name)
            # Recurrent layers keep time steps along dimension 0, and draw for samples along dimension 1.
            if isinstance(layer, nn.RNNBase):
                layer.register_forward_pre_hook(self._begin_recurrent_layer)
                layer.register_forward_hook(self._end_recurrent_layer)
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self._after_optimizer_step)

    def _note_storages_of_weights(self) -> None:
        for _, weight in self._weights():
            # `fully_shard` gathers the weights of shards into memory that comes and goes.
            if not is_shard(weight):
                self.mode.weight_storages.add(weight.untyped_storage().data_ptr())

    def _look_at_shards(self) -> None:
        """Note how the ranks' gradients are averaged, or raise `Refused` if shards are not those of all ranks."""
        for name, weight in self._weights():
            if not is_shard(weight):
                continue
            problem = layout_problem(name, weight)
            if problem:
                raise Refused(problem)
        for submodule in sharded_modules(self.module):
            for average in averages_of(submodule):
                self.record.divisors.add(average.divisor)

    def _note_lines_of_set_up(self) -> None:
        """Note where the user's code makes the optimizers, reads a stream, and hooks into gradients."""
        self.record.configured_at = line_of_function(self.module.configure_optimizers)
        dataset = getattr(self._loader, "dataset", None)
        if isinstance(dataset, IterableDataset):
            self.record.read_at = line_of_function(type(dataset).__iter__)
        for name, weight in self._weights():
            for hook in hooks_of_tensor(weight):
                line = line_of_function(hook)
                if line is not None:
                    self.record.parameter_hooks[name] = line
        if isinstance(self.trainer.strategy, DDPStrategy):
            comm_hook = comm_hook_of(self.trainer.strategy)
            if comm_hook is not None:
                self.record.comm_hook = getattr(comm_hook, "__qualname__", type(comm_hook).__name__)
                self.record.comm_hook_at = line_of_function(comm_hook)

    def _begin_recurrent_layer(self, *_: object) -> None:
        self.mode.likely_dim = 1

    def _end_recurrent_layer(self, *_: object) -> None:
        self.mode.likely_dim = 0

    def _take_snapshot(self, stage: str, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        sketches = {}
        shards = set()
        for name, tensor in tensors:
            if tensor is None or tensor.numel() == 0:
                continue
            whole = tensor
            if is_shard(tensor):
                shards.add(name)
                whole = shard_in_whole(tensor)
            sketches[name] = sketch(whole)
        self._snapshots.append(Snapshot(stage, sketches, frozenset(shards)))

    def _begin_batch(self, batch: object) -> object:
        """Begin with a batch, as the loader made it, and return it in the run's type."""
        converted = self._convert_input(batch)
        if self._perturbation is not None:
            converted = self._perturbation.moved_batch(converted)
        self._end_step()
        if len(self.record.steps) >= self._most_steps:
            raise Refused
        micro_batch = self.loading.pop(batch)
        # Of one process's batch, the keys are those that its samples have on the ranks.
        self.sample_keys = micro_batch.sample_keys
        if not self.sample_keys:
            window_index = len(self._window)
            self.sample_keys = [(window_index, self.record.rank, place) for place in range(micro_batch.size)]
        self.replicas = micro_batch.replicas
        self._window.append(micro_batch)
        self._epoch = self.trainer.current_epoch
        self._computed_samples = 0
        self._watch_tensors()
        self._enter_batch_scope()
        return converted

    def _watch_tensors(self) -> None:
        """Note calls and writes of the tensors that the module has now."""
        self._trace.watch(self.module, self._weights())
        self._trace.is_on = len(self.record.steps) in self._traced_steps
        self._writes.names = {}
        for name, tensor in (*self._weights(), *self.module.named_buffers()):
            self._writes.watch(name, tensor)

    def _enter_batch_scope(self) -> None:
        """Compute the batch in `mode`, from a random state that depends on the step alone, until the scope closes."""
        self._batch_scope.close()
        self._batch_scope.callback(restore_random_state, random_state())
        self.mode.sample_keys = self.sample_keys
        self.mode.trace = []
        self._seed_step()
        self._batch_scope.enter_context(self.mode)

    def _seed_step(self) -> None:
        _seed(f"step {len(self.record.steps)}")

    def _training_step(
        self, user_step: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call the user's `training_step`, on a whole batch or on the next piece of it."""
        micro_batch = self._window[-1]
        # A stand-in is known here, and not yet when the batch arrives: strategies hear of it in `on_train_batch_start`.
        micro_batch.counts = _strategy_facts(self.trainer).samples != 0
        start = self._begin_piece(args[0])
        # An optimizer may ask for the same samples again, as L-BFGS does. The first time is what is compared.
        self._trace.is_on = self._trace.is_on and all(piece.start < start for piece in micro_batch.pieces)
        self._trace.begin_step(start, start + len(self.mode.sample_keys), len(self.sample_keys))
        self._seed_step()  # whatever state the strategy has the step begin from
        _, *others_before = random_state()
        with mock.patch.object(self.mode, "is_in_step", new=True), self._trace:
            output = user_step(*args, **kwargs)
        _, *others_after = random_state()
        if others_before != others_after:
            self.mode.shared["a generator of Python or NumPy"] = None
        loss, micro_batch.weight = loss_and_weight(output)
        if self._trace.is_on:
            micro_batch.pieces.append(self._trace.end_step(loss))
        # The loss of a piece is not that of the batch. The first value is kept: L-BFGS asks for several in one step.
        is_whole = not micro_batch.piece_sizes
        if is_whole and isinstance(loss, Tensor) and loss.numel() == 1 and math.isnan(micro_batch.loss):
            micro_batch.loss = float(loss.detach())
        return output

    def _begin_piece(self, piece: object) -> int:
        """Let the samples of a piece draw, and return the first of them.

        A strategy may run a batch in pieces, one call after the other, in order.
        """
        start = 0
        with suppress(ValueError):  # a batch without a number of samples, such as a graph, is no piece
            samples = batch_samples(piece)
            if samples < len(self.sample_keys):
                start = self._computed_samples % len(self.sample_keys)  # an optimizer may ask for all pieces again
                stop = start + samples
                self.mode.sample_keys = self.sample_keys[start:stop]
                self._computed_samples = stop
                sizes = self._window[-1].piece_sizes
                if start == 0:
                    sizes.clear()
                sizes.append(samples)
                self.mode.trace.clear()  # one process draws for all pieces at once
        return start

    def on_after_backward(self, *_: object) -> None:
        """Note what a communication hook made of the gradients, and watch them: the module's hooks may change them."""
        for bucket in self._buckets:
            gradients = [parameter.grad.reshape(-1) for parameter in bucket.parameters if parameter.grad is not None]
            if gradients:
                bucket.after = numbers_of(torch.cat(gradients))
            bucket.parameters = []
        for name, parameter in self._weights():
            if parameter.grad is not None:
                self._writes.watch(f"gradient of {name}", parameter.grad)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note the reduced gradients, every time the optimizer asks for the loss."""
        self._take_snapshot("reduced gradient", self._gradients(optimizer))
        if self._scaler is not None:
            self._loss_scale = self._scaler.get_scale()  # it changes when the optimizer has stepped

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        return getattr(self.plugin, "scaler", None)

    def _note_bucket(self, bucket: dist.GradBucket) -> None:
        """Note the gradients that a communication hook is about to reduce."""
        if self.record.comm_hook:
            self._buckets.append(Bucket(bucket.parameters(), numbers_of(bucket.buffer())))

    def _gradients(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the gradients of an optimizer's tensors by their names."""
        ids: set[int] = set()
        for group in optimizer.param_groups:
            ids.update(id(parameter) for parameter in group["params"])
        for name, parameter in self._weights():
            if id(parameter) in ids:
                yield name, parameter.grad

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's parameters, and what its optimizers train beside them.

        A tensor that the module does not register trains like any other, and DDP does not reduce its gradient
        (`test_ranks_verify.py`, "unregistered parameter").
        """
        yield from self.module.named_parameters()
        yield from _unregistered_tensors(self.module, self.trainer.optimizers).items()

    def _after_optimizer_step(self, optimizer: Optimizer, *_: object) -> None:
        """Note what the optimizer stepped on. PyTorch calls it after each `step`."""
        self._take_snapshot("clipped gradient", self._gradients(optimizer))
        self._take_snapshot("optimizer options", _options(optimizer))

    def on_train_batch_end(self, *_: object) -> None:
        """End with a batch."""
        self._window[-1].draws = list(self.mode.trace)
        self._batch_scope.close()

    def _end_step(self) -> None:
        """Note what a step left behind, if the window is complete.

        It is called when the next batch arrives, because by then all hooks of the step have run.
        """
        stages = {snapshot.stage for snapshot in self._snapshots}
        has_stepped = "optimizer options" in stages
        # A loss scaler looks at the gradient first. Without a scaler, an optimizer has looked that takes no step.
        is_skipped = not has_stepped and self._scaler is not None and "reduced gradient" in stages
        if not has_stepped and not is_skipped:
            return
        self._take_snapshot("weights", self._weights())
        self._take_snapshot("buffers", self._compared_buffers())
        for bucket in self._buckets:
            bucket.parameters = []  # left by a backward past Lightning, and too large for a record
        self.record.steps.append(
            Step(
                self._epoch,
                self._window,
                self._snapshots,
                self._logged_values(),
                self._loss_scale,
                is_skipped,
                self._writes.places,
                self._buckets,
            )
        )
        self._window, self._snapshots = [], []
        self._writes.places = {}
        self._buckets = []

    def _compared_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self.module.named_buffers():
            # Batch norm counts its batches. One process has fewer of them than the ranks have in a window.
            if not name.endswith("num_batches_tracked"):
                yield name, buffer

    def _logged_values(self) -> dict[str, float]:
        if len(self._window) > 1:
            return {}  # a value is that of one micro-batch, which one process does not have
        values = {}
        for name, value in self.trainer.callback_metrics.items():
            if value.numel() == 1:
                values[name] = float(value)
        return values

    def on_train_end(self, *_: object) -> None:
        """End with the last step."""
        self._end_step()

    def _finish(self) -> None:
        """Note what there is to say of the whole run."""
        self._batch_scope.close()
        self.record.problem = self._first_problem()
        for config, first_epoch in zip(self._plateaus, self._first_epochs, strict=True):
            scheduler = config.scheduler
            has_stepped = scheduler.last_epoch != first_epoch
            self.record.plateaus.append(Plateau(type(scheduler).__name__, config.monitor or "", has_stepped))
        if self.record.by_content:
            for step in self.record.steps:
                for micro_batch in step.micro_batches:
                    micro_batch.sample_ids = micro_batch.content_ids
        if self._loader is not None and not self.record.problem:
            self.record.reading = self.loading.read(self._loader, by_content=self.record.by_content)

    def _first_problem(self) -> str:
        """Return why the run cannot be compared; "" if it can."""
        if self.record.problem:
            return self.record.problem
        windows = [step.micro_batches for step in self.record.steps]
        for window in [*windows, self._window]:
            for micro_batch in window:
                if micro_batch.counts and micro_batch.unknown_because:
                    return micro_batch.unknown_because
        if self._loader is not None and not isinstance(self._loader, DataLoader):
            return _NO_COLLATE_FN
        if not self.record.facts.automatic and any(len(window) > 1 for window in windows):
            return "in manual optimization a window of several batches is the user's own sum of them"
        return ""


def _prepare_shards(module: nn.Module) -> None:
    """Have a sharded module compute in one precision, as the Trainer does, or raise `Refused` if it has no weights."""
    if any(parameter.is_meta for parameter in module.parameters()):
        raise Refused(
            "the weights are on the meta device when they are sharded, and each rank draws its shards afterwards, which"
            " one process draws otherwise: verify the run with weights that have values before fully_shard"
        )
    ignore_mixed_precision(module)


def join_shards(records: Sequence[Record]) -> None:
    """Replace the sketches of shards by those of whole tensors, in the records of ranks that take the same steps.

    If a rank does not have a tensor, such as a gradient, its shard counts as zero.
    """
    for steps in zip(*(record.steps for record in records), strict=True):
        for position in range(len(steps[0].snapshots)):
            wholes = _sums_of_shards([step.snapshots[position] for step in steps])
            for step in steps:
                snapshot = step.snapshots[position]
                step.snapshots[position] = Snapshot(snapshot.stage, {**snapshot.tensors, **wholes})


def _sums_of_shards(snapshots: Sequence[Snapshot]) -> Tensors:
    """Return the sums of the ranks' sketches of their shards."""
    sums: Tensors = {}
    for snapshot in snapshots:
        for name in snapshot.shards:
            sums[name] = snapshot.tensors[name] + sums.get(name, 0.0)
    return sums


def _have_data_sets_of_their_own(loader: object) -> bool:
    """Return whether the ranks have different data sets, as of `data[rank::world_size]`. It is collective.

    An index says nothing of a sample then (`test_ranks_verify.py`, "a data set cut by hand").
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    fingerprint = None
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        fingerprint = _fingerprint(loader.dataset)
    fingerprints: list[bytes | None] = [None] * dist.get_world_size()
    dist.all_gather_object(fingerprints, fingerprint)
    return len(set(fingerprints)) > 1


@contextmanager
def _without_compilation() -> Iterator[None]:
    """Run compiled functions eagerly: they draw and round where no dispatch mode sees it."""
    if hasattr(torch.compiler, "set_stance"):  # from torch 2.6 on
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


@contextmanager
def _comm_hooks_paused(mode: Draws, note: Callable[[dist.GradBucket], None]) -> Iterator[None]:
    """Have DDP's communication hooks that are registered within run outside of a mode, and note what they reduce.

    They compute in the types that they state, such as `fp16_compress_hook`, and not in float64.
    """
    register = DistributedDataParallel.register_comm_hook

    def register_paused(model: DistributedDataParallel, state: object, hook: Callable[..., object]) -> None:
        register(model, state, _paused(hook, mode, note))

    with mock.patch.object(DistributedDataParallel, "register_comm_hook", register_paused):
        yield


def _paused(hook: Callable[..., object], mode: Draws, note: Callable[[dist.GradBucket], None]) -> Callable[..., object]:
    """Return a communication hook that runs while a mode is paused, and notes each bucket before."""

    @functools.wraps(hook)  # DDP checks the annotations, and logs the name
    def paused(state: object, bucket: dist.GradBucket) -> object:
        with mock.patch.object(mode, "paused", new=True):
            note(bucket)
            return hook(state, bucket)

    return paused


def _has_statistics_of_one_rank(layer: nn.Module) -> bool:
    """Return whether a layer normalizes by the batch that its rank has."""
    if not isinstance(layer, BatchNorm) or isinstance(layer, nn.SyncBatchNorm):
        return False
    return layer.training or not layer.track_running_stats


def _unregistered_tensors(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return the tensors that optimizers hold and the module does not register, by the attributes that hold them."""
    registered = {id(parameter) for parameter in module.parameters()}
    unregistered: dict[int, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if id(tensor) not in registered:
                    unregistered[id(tensor)] = tensor
    if not unregistered:
        return {}
    names = _names_of_attributes(module)
    named = {}
    for position, (key, tensor) in enumerate(unregistered.items()):
        # What no attribute holds, such as a tensor of a callback, has its place as a name.
        named[names.get(key, f"unregistered tensor {position} of the optimizers")] = tensor
    return named


def _names_of_attributes(module: nn.Module) -> dict[int, str]:
    """Return the path of every tensor that an attribute of a module holds, also in lists, dicts and their layers."""
    names: dict[int, str] = {}
    for module_name, layer in module.named_modules():
        for attribute, value in vars(layer).items():
            path = f"{module_name}.{attribute}".removeprefix(".")
            for place, leaf in leaves(value, path):
                if isinstance(leaf, Tensor):
                    names.setdefault(id(leaf), place)
                elif isinstance(leaf, nn.Module):
                    for name, parameter in leaf.named_parameters():
                        names.setdefault(id(parameter), f"{place}.{name}")
    return names


def _options(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the options of an optimizer's groups: numbers as such, and words, which are in the name, as 1."""
    yield f"type={type(optimizer).__name__}", torch.ones(1)
    for index, group in enumerate(optimizer.param_groups):
        of_group = "" if index == 0 else f" of group {index}"
        for name, value in group.items():
            if name in _UNCOMPARED_OPTIONS:
                continue
            if value is None or isinstance(value, str):
                yield f"{name}={value}{of_group}", torch.ones(1)
                continue
            try:
                number = torch.as_tensor(value, dtype=torch.float64)
            except (TypeError, ValueError, RuntimeError):
                continue  # what is no number
            yield f"{name}{of_group}", number


def _strategy_facts(trainer: Trainer) -> StrategyFacts:
    """Return what a strategy of this package says of the run; of any other what holds of stock DDP."""
    strategy: Any = trainer.strategy
    if not hasattr(strategy, "facts"):
        return StrategyFacts(RULES["mean"])
    facts: StrategyFacts = strategy.facts()
    return facts


def _facts_of(trainer: Trainer) -> Facts:
    """Return how a run is set up, or raise `Refused` if one process cannot be set up so."""
    name = type(trainer.strategy).__name__
    facts = _strategy_facts(trainer)
    if facts.replicas is not None and not trainer.lightning_module.automatic_optimization:
        raise Refused(
            f"{name} trains replicas in manual optimization: verify the run without num_replicas= and"
            " equivalent_to='data_parallel'"
        )
    if facts.scales_rates:
        raise Refused("lr_scaling= changes the learning rate with the number of ranks: verify the run without")
    return Facts(
        strategy=name,
        is_gradavg=hasattr(trainer.strategy, "facts"),
        rule=facts.rule,
        splits_batches=facts.splits_batches,
        replicated=facts.replicated,
        replicas=facts.replicas,
        sharded=isinstance(trainer.strategy, ModelParallelStrategy),
        accumulation=trainer.accumulate_grad_batches,
        automatic=trainer.lightning_module.automatic_optimization,
        epoch_batches=float(trainer.num_training_batches),
    )
