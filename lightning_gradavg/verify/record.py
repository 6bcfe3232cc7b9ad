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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_gradavg._lightning.internals import BatchNorm, fetched_here
from lightning_gradavg._lightning.loaders import user_loader
from lightning_gradavg._lightning.options import StrategyFacts
from lightning_gradavg._support.arguments import raise_first
from lightning_gradavg._support.random_state import random_state, restore_random_state, same_random_state, seeded
from lightning_gradavg._support.tree import batch_samples, bits
from lightning_gradavg.batches.chunks import PartCollator
from lightning_gradavg.rules import RULES, Rule
from lightning_gradavg.verify.draws import Draws

__all__ = ["Id", "Read", "Recorder", "Refused", "Step", "Taken", "Tape", "Tensors", "loss_of", "sketch"]

Id: TypeAlias = tuple[Hashable, ...]
"""A sample: a data set and the index there; of a stream a digest."""

Tensors: TypeAlias = dict[str, Tensor]
"""Sketches by the name of their parameter, buffer, option or value."""

_UNMADE = "no collate_fn makes the loader's batches, so their samples are unknown: use one DataLoader with a batch_size"

_KEPT = 4096
_MOST_BATCHES, _MOST_SAMPLES = 20_000, 5_000  # of an epoch that is read without training; a stream loads samples
_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler)  # that read every sample once
_TYPES = re.compile(r"(?i)dtype|scalar type|double|float64|float32|not implemented for|expected .* but (got|found)")
_IN_FLOAT32 = "the run does not compute in float64 (after {operator}: {error}): verify with --single, in float32"
_MANUAL = "in manual optimization a window of several batches is the user's own sum of them"
_NO_OPTIONS = ("params", "initial_lr", "foreach", "fused")  # of the mathematics


class Refused(Exception):  # noqa: N818  # no error of the run
    """Ends a run, with the reason why it cannot be compared; without one if everything that was asked for is there."""


def sketch(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as float64 on the CPU, of a large one 2048 of them and 2048 signed sums over all."""
    dense = (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)
    if flat.numel() <= _KEPT:
        return flat.to(device="cpu", dtype=torch.float64, copy=True)
    half = _KEPT // 2
    positions, signs = (each.to(flat.device) for each in _pattern(flat.numel(), half))
    sums = flat.new_zeros(half, dtype=torch.float64)
    for part, of_rows in zip(flat.split(half * half), signs.split(half), strict=True):  # a float64 copy of one part
        sums += of_rows @ nn.functional.pad(part.double(), (0, -len(part) % half)).view(-1, half)
    return torch.cat([flat[positions].double(), sums / math.sqrt(len(signs))]).cpu()


@functools.lru_cache(maxsize=64)
def _pattern(size: int, half: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    positions = torch.randint(size, (half,), generator=generator).sort().values
    return positions, torch.randint(2, (-(-size // half),), generator=generator).double() * 2 - 1


@dataclass(frozen=True)
class Read:
    """What one pass over the training data reads on this rank."""

    batches: Sequence[Sequence[Id]] = ()  # the ids of each
    traits: frozenset[str] = frozenset({"goes on"})  # that `_Loading.read` finds


@dataclass
class Taken:
    """One micro-batch on one rank."""

    samples: Sequence[bytes] = ()  # as `collate_fn` was given them
    ids: Sequence[Id] = ()  # of the samples: equal on all processes
    size: int = 1
    why: str = _UNMADE  # its samples are not known
    keys: Sequence[tuple[int, ...]] = ()  # of the samples, on one process
    counts: bool = True  # not if the strategy only kept the rank busy
    loss: float = math.nan
    weight: float | None = None
    trace: list[Any] = field(default_factory=list)


@dataclass
class Step:
    """What one global batch does, in order."""

    epoch: int
    taken: list[Taken]
    moments: list[tuple[str, Tensors]]  # what there is at the stages that `report.STAGES` names
    logged: dict[str, float]


@dataclass(frozen=True)
class Facts(StrategyFacts):
    """How a run was set up: what a strategy of ours tells, else what holds of stock DDP; without a user's function."""

    rule: Rule = RULES["mean"]
    strategy: str = ""
    ours: bool = False
    automatic: bool = True
    epoch_batches: float = math.inf


@dataclass
class Tape:
    """What one process recorded."""

    rank: int = 0
    facts: Facts = field(default_factory=Facts)
    steps: list[Step] = field(default_factory=list)
    shared: dict[str, None] = field(default_factory=dict)
    collectives: set[str] = field(default_factory=set)
    scopes: set[str] = field(default_factory=set)
    read: Read = field(default_factory=Read)
    batch_norms: list[str] = field(default_factory=list)  # whose statistics are those of one rank
    problem: str = ""


def loss_of(output: Any) -> tuple[Any, float | None]:
    """Return the loss in what `training_step` returned, the sum of named ones, and its weight."""
    content = output if isinstance(output, Mapping) else {"loss": output}
    loss, weight = content.get("loss"), content.get("weight")
    if isinstance(loss, Mapping):
        return sum(loss.values()), None
    return loss, None if weight is None or isinstance(weight, Mapping) else float(weight)


def _seed(text: str) -> None:
    """Seed the generators of torch, Python and NumPy."""
    restore_random_state(seeded(hashlib.blake2b(text.encode(), digest_size=24).digest()))


class _Packer(pickle.Pickler):
    """Writes equal samples as equal bytes, and of a view not the storage behind it."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided:
            return NotImplemented
        return _unpacked, (bytearray(bits(value)), value.dtype, tuple(value.shape))


def _unpacked(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _packed(sample: Any) -> bytes:
    _Packer(stream := io.BytesIO()).dump(sample)
    return stream.getvalue()


def _digest(*packed: bytes) -> bytes:
    return hashlib.blake2b(b"".join(packed), digest_size=12).digest()


class _Seeded:
    """A dataset whose random numbers depend on the index alone, so that a sample is the same wherever it is read."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.read: list[Any] = []

    def __getitem__(self, index: Any) -> Any:
        state = random_state()
        _seed(f"sample {index}")
        self.read.append(index)
        try:
            return self._dataset[index]
        finally:
            restore_random_state(state)


def _fingerprint(dataset: Any) -> bytes | None:
    """Return what equal datasets share: a digest of the length and of some samples; None where it is not known."""
    with suppress(Exception):
        size, same = len(dataset), _Seeded(dataset)
        return _digest(_packed(size), *(_packed(same[place]) for place in range(0, size, size // 2 or 1)))
    return None


class _Loading:
    """Lets the loaders of a process load in it, and knows what the batches that were not trained on yet are made of."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Taken]] = {}

    def watch(self, fetcher: Any) -> None:
        """Note the batches of a pass of a `DataLoader`."""
        if not fetcher.auto_collation:
            return
        own, known, same = fetcher.collate_fn, None, _Seeded(fetcher.dataset)
        if not isinstance(fetcher.dataset, IterableDataset):
            known, fetcher.dataset = _fingerprint(fetcher.dataset), same

        def collated(samples: list[Any]) -> Any:
            cut = own.split.cut(len(samples)) if isinstance(own, PartCollator) else None
            mine = slice(cut.start, cut.stop) if cut else slice(None)  # of this rank, of those that all ranks read
            indices, same.read = same.read[mine], []
            why = "a sample cannot be copied"
            packed = list[bytes]()
            with suppress(Exception):  # pickle raises nearly anything
                packed, why = [_packed(sample) for sample in samples[mine]], ""
            before = random_state()
            batch = own(samples)
            if not same_random_state(before, random_state()):
                why = "collate_fn draws random numbers"
            ids: Iterable[Id] = ((known, index) for index in indices) if known else ((_digest(one),) for one in packed)
            self.note(batch.part if cut else batch, Taken(packed, tuple(ids), len(samples[mine]), why))
            return batch

        fetcher.collate_fn = collated

    def note(self, batch: Any, taken: Taken) -> Any:
        """Remember what a batch is made of, and return it."""
        self._made[id(batch)] = (batch, taken)
        return batch

    def taken(self, batch: Any) -> Taken:
        """Return what a batch is made of."""
        return self._made.pop(id(batch), (batch, Taken()))[1]

    def _ids(self, loader: DataLoader[Any]) -> Iterator[Sequence[Id]]:
        if isinstance(loader.dataset, IterableDataset):
            yield from (self.taken(batch).ids for batch in loader)
        elif known := _fingerprint(loader.dataset):
            batches: Any = loader.batch_sampler
            yield from (tuple((known, index) for index in batch) for batch in batches)

    def read(self, loader: Any) -> Read:
        """Read the loader of a run once, without training; of a map-style one the indices alone."""
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        streams, replaces = isinstance(loader.dataset, IterableDataset), getattr(sampler, "replacement", False)
        deals = type(loader.batch_sampler).__module__.partition(".")[0] in ("torch", "builtins")
        most = _MOST_SAMPLES // (loader.batch_size or 1) if streams else _MOST_BATCHES
        try:
            found = list(islice(self._ids(loader), most))
        except Exception:  # noqa: BLE001  # a loader that can be read once only
            found = []
        traits = {
            "goes on": not 0 < len(found) < most,
            "drops a last batch": loader.drop_last,
            "shuffles": streams or isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False),
            # A sampler of the user's own may leave out or repeat samples; one with replacement does.
            "chooses": not streams and (replaces or not (deals and isinstance(sampler, _SAMPLERS))),
            "replaces": replaces,
        }
        return Read(tuple(found), frozenset(name for name, there in traits.items() if there))


class Recorder(Callback):
    """Records the first steps of a run, in float64 if `double`, and ends it; `reads` an epoch of its loader."""

    def __init__(self, steps: int, *, double: bool = True, reads: bool = True) -> None:
        self.most, self._reads = steps, reads
        self.given: Any = None  # the user's loader, if it is read at the end
        self.loading, self.mode = _Loading(), Draws(double=double)
        self.tape = Tape(shared=self.mode.shared, collectives=self.mode.collectives, scopes=self.mode.scopes)
        self.window: list[Taken] = []
        self.moments: list[tuple[str, Tensors]] = []
        self.keys: Sequence[tuple[int, ...]] = []  # of the samples of the batch
        self._counted, self._epoch, self._batch = 0, 0, ExitStack()
        # The plugin is the first to be given a batch as the loader made it.
        self.plugin: Any = DoublePrecision() if double else Precision()
        self._converts = self.plugin.convert_input
        vars(self.plugin)["convert_input"] = self._arrived

    @contextmanager
    def watching(self, module: LightningModule) -> Iterator[None]:
        """Watch a module, which is for this run alone, in training, and end with the record."""
        step, register = module.training_step, DistributedDataParallel.register_comm_hook

        def register_paused(model: Any, state: object, hook: Callable[..., Any]) -> None:
            @functools.wraps(hook)
            def paused(*given: Any) -> Any:
                with mock.patch.object(self.mode, "paused", new=True):  # it computes in the types that it states
                    return hook(*given)

            register(model, state, paused)

        stepped = functools.wraps(step)(lambda *args, **kwargs: self._stepped(step, args, kwargs))
        vars(module)["training_step"] = stepped
        in_type = mock.patch.object(DistributedDataParallel, "register_comm_hook", register_paused)
        # A compiled function draws and rounds where nobody sees it; the stance is there from torch 2.6 on.
        eager: Any = getattr(torch.compiler, "set_stance", nullcontext)
        with fetched_here(self.loading.watch), eager("force_eager"), in_type, self._batch:
            try:
                yield
            except Refused as error:
                self.tape.problem = str(error)
            except RuntimeError as error:
                if not (self.mode.double and _TYPES.search(str(error))):
                    raise
                first = str(error).partition("\n")[0]
                self.tape.problem = _IN_FLOAT32.format(operator=self.mode.last, error=first)
            self._finish()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note how the run is set up, and what it starts from."""
        self.trainer, self.module = trainer, pl_module
        self.given = user_loader(trainer.train_dataloader) if self._reads else None
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # nothing is validated, and a plateau may be watched on that
        self.tape.rank, self.tape.facts = trainer.global_rank, _facts_of(trainer)
        self._note("initial weights", pl_module.named_parameters())
        self.tape.batch_norms = [name for name, part in pl_module.named_modules() if _is_of_one_rank(part)]
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self._updated)
        # Recurrent layers keep time steps along dimension 0, and draw for samples along dimension 1.
        for part in (part for part in pl_module.modules() if isinstance(part, nn.RNNBase)):
            part.register_forward_pre_hook(lambda *_: setattr(self.mode, "first", 1))
            part.register_forward_hook(lambda *_: setattr(self.mode, "first", 0))

    def _note(self, stage: str, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        held = {name: sketch(each) for name, each in tensors if each is not None and each.numel()}
        self.moments.append((stage, held))

    def _arrived(self, batch: Any) -> Any:
        """Begin with a batch, as the loader made it, and return it in the run's type."""
        converted = self._converts(batch)
        self._close()
        if len(self.tape.steps) >= self.most:
            raise Refused
        taken, self._epoch = self.loading.taken(batch), self.trainer.current_epoch
        self.window.append(taken)
        self._batch.close()
        self._batch.callback(restore_random_state, random_state())
        place = len(self.window) - 1, self.tape.rank
        self.keys = self.mode.keys = taken.keys or [(*place, index) for index in range(taken.size)]
        self._counted, self.mode.trace = 0, []
        _seed(f"step {len(self.tape.steps)}")
        self._batch.enter_context(self.mode)
        return converted

    def _stepped(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `training_step`, on a whole batch or on the next piece of it."""
        taken = self.window[-1]
        told = getattr(self.trainer.strategy, "facts", None)
        taken.counts = told is None or told().samples != 0
        with suppress(ValueError):
            rows = batch_samples(args[0])
            if rows < len(self.keys):
                start = self._counted % len(self.keys)
                self.mode.keys, self._counted = self.keys[start : start + rows], start + rows
        _seed(f"step {len(self.tape.steps)}")  # whatever state the strategy has the step begin from
        before = random_state()[1:]
        output = step(*args, **kwargs)
        if before != random_state()[1:]:
            self.mode.shared["a generator of Python or NumPy"] = None
        loss, taken.weight = loss_of(output)
        if isinstance(loss, Tensor) and loss.numel() == 1 and math.isnan(taken.loss):
            taken.loss = float(loss.detach())  # the first, where an optimizer asks for several
        return output

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note the reduced gradients, every time the optimizer asks for the loss."""
        self._note("reduced gradient", self._gradients(optimizer))

    def _gradients(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor | None]]:
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return ((name, one.grad) for name, one in self.module.named_parameters() if id(one) in mine)

    def _updated(self, optimizer: Optimizer, *_: Any) -> None:
        self._note("clipped gradient", self._gradients(optimizer))
        self._note("optimizer options", _options(optimizer))

    def on_train_batch_end(self, *_: Any) -> None:
        """End with a batch."""
        self.window[-1].trace = list(self.mode.trace)
        self._batch.close()

    def _close(self) -> None:
        """Note what a step left behind, once all hooks behind it ran."""
        if not any(stage == "optimizer options" for stage, _ in self.moments):
            return
        buffers = ((n, b) for n, b in self.module.named_buffers() if not n.endswith("num_batches_tracked"))
        self._note("weights", self.module.named_parameters())
        self._note("buffers", buffers)
        # In a window a value is that of one batch.
        metrics = self.trainer.callback_metrics.items() if len(self.window) == 1 else ()
        logged = {name: float(value) for name, value in metrics if value.numel() == 1}
        self.tape.steps.append(Step(self._epoch, self.window, self.moments, logged))
        self.window, self.moments = [], []

    def on_train_end(self, *_: Any) -> None:
        """End with the last step."""
        self._close()

    def _finish(self) -> None:
        """Note what there is to say of the whole."""
        self._batch.close()
        tape, steps = self.tape, [step.taken for step in self.tape.steps]
        unknown = [one.why for taken in [*steps, self.window] for one in taken if one.counts and one.why]
        summed = not tape.facts.automatic and any(len(taken) > 1 for taken in steps)
        wrapped = not isinstance(self.given, (DataLoader, type(None)))
        tape.problem = next(filter(None, [tape.problem, *unknown, _UNMADE * wrapped, _MANUAL * summed]), "")
        if self.given is not None and not tape.problem:
            tape.read = self.loading.read(self.given)


def _is_of_one_rank(part: nn.Module) -> bool:
    normalizes = isinstance(part, BatchNorm) and (part.training or not part.track_running_stats)
    return normalizes and not isinstance(part, nn.SyncBatchNorm)


def _options(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the options of an optimizer's groups: numbers as such, and words, which are in the name, as 1."""
    yield f"type={type(optimizer).__name__}", torch.ones(1)
    for index, group in enumerate(optimizer.param_groups):
        end = f" of group {index}" * bool(index)
        for name, value in ((name, value) for name, value in group.items() if name not in _NO_OPTIONS):
            if isinstance(value, (str, type(None))):
                yield f"{name}={value}{end}", torch.ones(1)
                continue
            with suppress(TypeError, ValueError, RuntimeError):  # what is no number
                yield f"{name}{end}", torch.as_tensor(value, dtype=torch.float64)


def _facts_of(trainer: Trainer) -> Facts:
    strategy: Any = trainer.strategy
    ours, name = hasattr(strategy, "facts"), type(strategy).__name__
    told = strategy.facts() if ours else Facts()
    refused = {
        f"{name} trains replicas with batch statistics of their own, which one process does not have: verify the run"
        " without num_replicas= and equivalent_to='data_parallel'": told.replicas is not None,
        "lr_scaling= changes the learning rate with the number of ranks: verify the run without": told.scales_rates,
    }
    raise_first(Refused, refused)
    rule = replace(told.rule, share=RULES["mean"].share)  # a function may have no pickle
    window, batches = trainer.accumulate_grad_batches, float(trainer.num_training_batches)
    own = {"strategy": name, "ours": ours, "automatic": trainer.lightning_module.automatic_optimization}
    return Facts(**{**vars(told), **own, "rule": rule, "accumulation": window, "epoch_batches": batches})
