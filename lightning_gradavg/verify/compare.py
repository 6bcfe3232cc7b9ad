"""How a run differs from one process: in what is trained, stage by stage in the order of a run, and in what is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_gradavg.verify.record import Refused, Tape, Tensors
from lightning_gradavg.verify.report import Finding
from lightning_gradavg.verify.samples import Read

__all__ = ["Coverage", "Difference", "Seen", "difference", "differences", "flat", "gap_between", "multiple_of"]


@dataclass(frozen=True)
class Difference:
    """Where a tensor of the run differs from that of one process.

    Attributes:
        name: Its parameter, buffer or value.
        relative: The largest absolute difference over the largest absolute value.
        found: The run's value where they differ most.
        expected: That of one process.
        factor: Run / one process where everything that differs is that multiple, or None.
    """

    name: str
    relative: float
    found: float
    expected: float
    factor: float | None = None


Seen: TypeAlias = tuple[str, int, Difference]
"""The stage, the step, and the difference."""


def difference(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    noise: Mapping[str, Tensor] | None = None,
) -> tuple[Difference | None, dict[str, float]]:
    """Return the largest difference beyond the tolerance, and the relative size of all. A missing tensor is zero.

    Args:
        found: The sketches of the run.
        expected: Those of one process.
        tolerance: The relative difference that counts as equal.
        noise: What both were computed from: a hundred-thousandth of the tolerance of that is rounding, as of the
            largest of all tensors. What is zero but for rounding would otherwise differ by 100 %.
    """
    relative, beyond = dict[str, float](), list[Difference]()
    largest = max(map(_size, expected.values()), default=0.0)
    for name in {**expected, **found}:
        mine, other = _paired(found.get(name), expected.get(name))
        if mine.shape != other.shape:
            beyond.append(Difference(name, math.inf, math.nan, math.nan))
            relative[name] = math.inf
            continue
        same = (mine == other) | (mine.isnan() & other.isnan())
        gaps = torch.where(same, 0.0, (mine - other).abs().nan_to_num(math.inf, math.inf))
        at, scale = int(gaps.argmax()), _size(other)
        gap = float(gaps[at])
        rounding = 1e-5 * tolerance * (_size(noise[name]) if noise and name in noise else largest)
        relative[name] = gap / scale if scale else math.inf * bool(gap) if gap else 0.0
        if gap > rounding + tolerance * scale:
            beyond.append(Difference(name, relative[name], float(mine[at]), float(other[at])))
        else:
            relative[name] = min(relative[name], tolerance)
    if not beyond:
        return None, relative
    like = {**expected, **found}
    factor = multiple_of(flat(found, like), flat(expected, like), 100 * tolerance)
    told = factor if factor and abs(factor - 1) > tolerance else None
    return replace(max(beyond, key=lambda one: one.relative), factor=told), relative


def _size(tensor: Tensor) -> float:
    size = float(tensor.abs().max()) if tensor.numel() else 0.0
    return size if math.isfinite(size) else 0.0


def _paired(*tensors: Tensor | None) -> list[Tensor]:
    """Return two sketches, with zeros for one that is missing."""
    known = [each for each in tensors if each is not None and each.numel()]
    zeros = torch.zeros_like(known[0]) if known else torch.zeros(1, dtype=torch.float64)
    return [zeros if each is None or not each.numel() else each for each in tensors]


def flat(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    """Return sketches as one vector in the order of `like`; what is missing is zero."""
    pieces = [tensors.get(name, torch.zeros_like(tensor)) for name, tensor in like.items()]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *pieces])


def gap_between(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two vectors over the largest element expected."""
    if not len(expected):
        return 0.0
    gap, largest = float((found - expected).abs().max()), float(expected.abs().max())
    return gap / largest if largest else math.inf if gap else 0.0


def multiple_of(found: Tensor, expected: Tensor, near: float) -> float | None:
    """Return the factor between two vectors; None if one is no multiple of the other."""
    norm = float(expected.dot(expected)) if found.shape == expected.shape else 0.0
    factor = float(found.dot(expected)) / norm if norm else math.nan
    return factor if math.isfinite(factor) and gap_between(found, factor * expected) <= near else None


def differences(
    run: Tape, alone: Tape, tolerance: float, gradients: dict[str, list[float]] | None = None
) -> Iterator[Seen]:
    """Yield where a run differs from another, in its order, and note the relative differences of reduced gradients.

    Raises:
        Refused: If one takes other steps than the other.
    """
    for stage, position, found in _compared(run, alone, tolerance, {} if gradients is None else gradients):
        if found is not None:
            yield stage, position, found


def _compared(
    run: Tape, alone: Tape, tolerance: float, gradients: dict[str, list[float]]
) -> Iterator[tuple[str, int, Difference | None]]:
    yield "initial weights", 0, difference(run.initial, alone.initial, tolerance)[0]
    before = alone.initial
    for position, (other, mine) in enumerate(zip(run.steps, alone.steps, strict=False)):
        for theirs, own in zip(other.updates, mine.updates, strict=False):
            if len(own.reduced) > len(theirs.reduced):
                raise Refused("one process asks for the loss more often in a step than the run")
            for found, expected in zip(theirs.reduced, own.reduced, strict=False):
                seen, relative = difference(found, expected, tolerance)
                for name, each in relative.items():
                    gradients.setdefault(name, []).append(each)
                yield "reduced gradient", position, seen
            yield "clipped gradient", position, difference(theirs.used, own.used, tolerance)[0]
            for found_options, options in zip(theirs.options, own.options, strict=False):
                for name in (name for name in found_options if name in options):
                    yield "optimizer options", position, _of_option(name, found_options[name], options[name], tolerance)
        if len(other.updates) != len(mine.updates):
            raise Refused("one process takes another number of optimizer steps in a batch")
        moved = {name: tensor - before[name] for name, tensor in mine.weights.items() if name in before}
        of_run = {name: other.weights[name] - before[name] for name in moved if name in other.weights}
        for update in mine.updates:
            _leave_out_rounding(of_run, moved, update.used)
        yield "weights", position, difference(of_run, moved, tolerance, noise=mine.weights)[0]
        yield "buffers", position, difference(other.buffers, mine.buffers, tolerance)[0]
        before = mine.weights


def _leave_out_rounding(found: Tensors, expected: Tensors, gradients: Tensors) -> None:
    """Take for moved as expected what was moved by a gradient that is zero but for rounding: optimizers enlarge it."""
    largest = max(map(_size, gradients.values()), default=0.0)
    for name, used in gradients.items():
        tiny = (used.abs() < 1e-10 * largest) & ((used != 0) | (0 < _size(used) < 1e-10 * largest))
        if name in found and used.shape == found[name].shape:
            found[name] = torch.where(tiny, expected[name], found[name])


def _of_option(name: str, found: Any, expected: Any, tolerance: float) -> Difference | None:
    """Return how an option of the optimizer differs; numbers up to the tolerance, else names only."""
    if isinstance(found, (tuple, list)) and isinstance(expected, (tuple, list)) and len(found) == len(expected):
        pairs = (_of_option(name, *pair, tolerance) for pair in zip(found, expected, strict=True))
        return next(filter(None, pairs), None)
    if isinstance(found, (int, float)) and isinstance(expected, (int, float)):
        if math.isclose(found, expected, rel_tol=tolerance, abs_tol=1e-300):
            return None
        relative = abs(found - expected) / abs(expected) if expected else math.inf
        return Difference(name, relative, found, expected, found / expected if expected else None)
    differs = type(found) is type(expected) and isinstance(found, (str, type(None))) and found != expected
    return Difference(name, math.nan, math.nan, math.nan) if differs else None


@dataclass
class Coverage:
    """Whether the ranks together read what one process reads: each sample as often, in the same order and batches."""

    tapes: Sequence[Tape]
    alone: Read
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # what is not shown, or known of steps beyond the compared ones
    note: str = ""  # what there is to say of the samples otherwise

    def __post_init__(self) -> None:
        self.facts, reads = self.tapes[0].facts, [self.alone, *(tape.read for tape in self.tapes)]
        identity = _identity(reads)
        self.stream = [identity(one) for batch in self.alone.batches for one in batch]
        self.there = Counter(self.stream)
        self.of_ranks = [[[identity(one) for one in batch] for batch in tape.read.batches] for tape in self.tapes]
        self.complete, self.chosen = all(read.complete for read in reads), any(read.chooses for read in reads)
        self.shuffled = any(read.shuffles for read in reads)
        taken = [[[one for one in step.taken if one.counts] for step in tape.steps] for tape in self.tapes]
        of_steps = [[one for each in step for one in each] for step in zip(*taken, strict=False)]
        self.steps = [[tuple(map(identity, one.ids)) for one in step] for step in of_steps]
        self.equal_sizes = all(len({one.size for one in step}) == 1 for step in of_steps)
        read = [[identity(each) for step in of_rank for one in step for each in one.ids] for of_rank in taken]
        self.rising = all(map(self._rises, read))
        self._find_repeated()
        if not self.findings:
            self._compare_lengths()
            self._compare_coverage()
            self._compare_order()

    def _find(self, cause: str, text: str, position: int = 0, *, note: bool = False) -> None:
        self.findings.append(Finding(cause, "samples", text, position, note=note))

    def _find_repeated(self) -> None:
        """Find samples that an epoch trains on more often than one process does."""
        world, seen, epoch = len(self.tapes), Counter[Any](), 0
        same_on_all = all(
            len(batches) >= world > 1 and len(set(batches)) == 1 and None not in batches[0] for batches in self.steps
        )
        for position, (batches, step) in enumerate(zip(self.steps, self.tapes[0].steps, strict=False)):
            here = Counter(one for batch in batches for one in batch if one is not None)
            seen, epoch = seen + here if step.epoch == epoch else here, step.epoch
            more = Counter({one: number - self.there[one] for one, number in seen.items() if self.there[one]})
            repeated = 0 if self.chosen else (+more).total()
            unknown = self.chosen or not self.alone.complete or not set(here) & set(self.there)
            if same_on_all and (repeated or unknown):
                text = f"all {world} ranks read the same samples in the same order: the global batch is one rank's"
                self._find("duplicated stream", text, position)
                return
            if repeated and self.alone.complete and not self.facts.splits:
                text = f"{repeated} of {seen.total()} samples are trained on more often than by one process"
                self._find("padding", text, position)
                return

    def _compare_lengths(self) -> None:
        """Tell of what the compared steps do not have: a short last batch, or a short window."""
        facts, compared, window = self.facts, self.tapes[0].steps, max(1, self.facts.accumulation)
        taken, epoch = sum(len(step.taken) for step in compared), facts.epoch_batches
        number = int(min([*map(len, self.of_ranks), epoch]))
        averages = facts.rule.startswith("mean") and not facts.uses_weight and self.equal_sizes
        starts = [start for start in range(0, number if averages else 0, window) if start >= taken]
        windows = [(start, min(start + window, number)) for start in starts]
        for start, stop in windows:
            sizes = dict.fromkeys(len(batch) for batches in self.of_ranks for batch in batches[start:stop])
            if len(sizes) > 1:
                self.remarks.append(
                    f"the batches {start} to {stop - 1} of an epoch, beyond the steps, hold"
                    f" {' and '.join(map(str, sizes))} samples: means over them are averaged as if they were equal"
                )
                break
        rest = epoch % window if math.isfinite(epoch) else 0
        seen = any(len(step.taken) < window for step in compared) or taken >= epoch
        if rest and facts.automatic and not (facts.ours or seen):
            self.remarks.append(
                f"the last window of an epoch was not among the steps: it has {rest:g} of {window} micro-batches, and"
                f" {facts.strategy} still divides it by {window}; GradAvgStrategy does not"
            )

    def _compare_coverage(self) -> None:
        """Find samples that an epoch never reads, or reads more than once."""
        if self.chosen or not self.complete:
            return
        here = Counter(one for batches in self.of_ranks for batch in batches for one in batch)
        dropped = sum(max(map(len, batches), default=0) for batches in self.of_ranks)  # what drop_last leaves out
        known = here.keys() & self.there.keys()
        missing = (self.there - here).total() if known else self.there.total() - here.total()
        more = sum(max(0, here[one] - self.there[one]) for one in known)
        dealt = not self.facts.ours or any(tape.read.dealt for tape in self.tapes)  # else these are stand-ins
        if missing > dropped:
            text = f"{missing} of the {self.there.total()} samples of an epoch are never read"
            self._find("unread samples", text)
        elif more and not self.facts.splits and (dealt or more >= self.there.total()):
            all_read = more >= self.there.total()
            how = "every rank reads all" if all_read else f"the sampler repeats {more} samples, to fill the ranks"
            self.remarks.append(f"beyond the compared steps {how}: they are trained on twice in an epoch")

    def _compare_order(self) -> None:
        """Find the first global batch that is not what one process reads at that place of its epoch."""
        left, epochs = list(self.stream), [step.epoch for step in self.tapes[0].steps]
        for position, batches in enumerate(self.steps):
            here = Counter(one for batch in batches for one in batch)
            if self.chosen or epochs[position] != epochs[0] or not left:
                return
            there, left = Counter(left[: here.total()]), left[here.total() :]
            if here == there:
                continue
            meant = self.shuffled or self.alone.streams
            if not self.there.keys() & here.keys():
                text = "no sample is one that one process reads: they may be transformed at random"
                self.note = text if meant or self.facts.splits else ""
                self.remarks += [] if self.note else [text]
                return
            how = "; every rank reads its own part in order" if self.rising else ""
            how = "; a sampler shuffles them" if self.shuffled else how
            shared = f"at this step, {(here & there).total()} of the {here.total()} samples of the global batch"
            text = f"{shared} match the single-process run{how}"
            self._find("data order", text, position, note=meant or self.rising)
            return

    def _rises(self, read: Sequence[Any]) -> bool:
        places = {one: index for index, one in enumerate(self.stream)}
        return all(one < other for one, other in pairwise(places.get(one, -1) for one in read))


def _identity(reads: Sequence[Read]) -> Callable[[Any], Any]:
    """Return what a sample is known by: its index where all datasets are one, else its content."""
    probes = reads[0].probes
    one = bool(probes) and None not in probes and all(each.probes == probes for each in reads)
    return lambda each: each[0] if one and each[0] is not None else each[1]
