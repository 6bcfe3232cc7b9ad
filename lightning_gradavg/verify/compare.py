"""How a run differs from another: in what is trained, stage by stage in the order of a run, and in what is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_gradavg.verify.record import Moment, Refused, Tape, Tensors
from lightning_gradavg.verify.report import Difference, Finding
from lightning_gradavg.verify.samples import Read

__all__ = ["Seen", "difference", "differences", "differences_in_reading", "flat", "gap_between", "multiple_of"]


_MOST_BATCHES = 20_000  # of an epoch whose windows are looked at


class Seen(NamedTuple):
    """A difference at a stage of a step, and what was compared there."""

    stage: str
    step: int
    difference: Difference
    found: Tensors
    expected: Tensors
    relative: Mapping[str, float]


def difference(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    noise: Mapping[str, Tensor] | None = None,
    *,
    together: bool = True,
) -> tuple[Difference | None, dict[str, float]]:
    """Return the largest difference beyond the tolerance, and the relative size of all. A missing tensor is zero.

    Args:
        found: The sketches of the run.
        expected: Those of one process.
        tolerance: The relative difference that counts as equal.
        noise: What both were computed from: a hundred-thousandth of the tolerance of that is rounding, as of the
            largest of all tensors. What is zero but for rounding would otherwise differ by 100 %.
        together: Whether a factor is that of all tensors.
    """
    relative, beyond = dict[str, float](), list[Difference]()
    largest = max(map(_size, expected.values()), default=0.0)
    for name in {**expected, **found}:
        mine, other = _paired(found.get(name), expected.get(name))
        same = torch.isclose(mine, other, rtol=0.0, atol=0.0, equal_nan=True)
        gaps = torch.where(same, 0.0, (mine - other).abs().nan_to_num(math.inf, math.inf))
        at, scale = int(gaps.argmax()), _size(other)
        gap = float(gaps[at])
        rounding = 1e-5 * tolerance * (_size(noise[name]) if noise and name in noise else largest)
        relative[name] = gap / scale if scale else math.inf if gap else 0.0
        if gap > rounding + tolerance * scale:
            beyond.append(Difference(name, relative[name], float(mine[at]), float(other[at])))
        else:
            relative[name] = min(relative[name], tolerance)
    if not beyond:
        return None, relative
    most = max(beyond, key=lambda one: one.relative)
    like = {**expected, **found}
    like = like if together else {most.name: like[most.name]}
    near = 1e4 * tolerance
    factor = multiple_of(flat(found, like), flat(expected, like), near)
    return replace(most, factor=factor if factor and abs(factor - 1) > near else None), relative


def _size(tensor: Tensor) -> float:
    size = float(tensor.abs().max()) if tensor.numel() else 0.0
    return size if math.isfinite(size) else 0.0


def _paired(*tensors: Tensor | None) -> list[Tensor]:
    """Return two sketches, with zeros for one that is missing, and NaN where one is shorter."""
    length = max(1, *(0 if each is None else each.numel() for each in tensors))
    known = [torch.zeros(0).double() if each is None else each.reshape(-1) for each in tensors]
    return [nn.functional.pad(each, (0, length - len(each)), value=math.nan if len(each) else 0.0) for each in known]


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
    noted = {} if gradients is None else gradients
    before: Tensors = {}
    for position, (step, own) in enumerate(zip(run.steps, alone.steps, strict=False)):
        tiny: Tensors = {}
        for other, mine in zip_longest(step.moments, own.moments, fillvalue=Moment("", {})):
            (stage, found), (known, expected), noise = other, mine, {}
            if stage != known:
                raise Refused("one process takes other optimizer steps in a batch than the run, or more of them")
            if stage == "clipped gradient":
                tiny |= _zero_but_for_rounding(expected)
            elif stage == "weights":
                # Optimizers enlarge what is zero but for rounding: it counts as moved as expected.
                found, expected, noise = _without(found, before), _without(expected, before), expected
                found |= {name: torch.where(tiny[name], expected[name], found[name]) for name in tiny if name in found}
            seen, relative = difference(found, expected, tolerance, noise, together=stage != "optimizer options")
            before = noise or (expected if stage == "initial weights" else before)
            for name, each in relative.items() if stage == "reduced gradient" else ():
                noted.setdefault(name, []).append(each)
            if seen is not None:
                yield Seen(stage, position, seen, found, expected, relative)


def _without(tensors: Tensors, before: Tensors) -> Tensors:
    return {name: each - before[name] for name, each in tensors.items() if name in before}


def _zero_but_for_rounding(gradients: Tensors) -> Tensors:
    """Return which elements of gradients are next to nothing beside the largest of all."""
    least = 1e-10 * max(map(_size, gradients.values()), default=0.0)
    return {name: (each.abs() < least) & ((each != 0) | (0 < _size(each) < least)) for name, each in gradients.items()}


class _Reading:
    """Whether the ranks together read what one process reads: each sample as often, in the same order and batches."""

    def __init__(self, tapes: Sequence[Tape], alone: Read) -> None:
        self.tapes, self.alone = tapes, alone
        self.facts = tapes[0].facts
        reads = [alone, *(tape.read for tape in tapes)]
        self.complete, self.chosen = all(each.complete for each in reads), any(each.chooses for each in reads)
        self.shuffled = any(each.shuffles for each in reads)
        self.stream = [one for batch in alone.batches for one in batch]
        self.there = Counter(self.stream)
        self.of_ranks = [tape.read.batches for tape in tapes]
        of_steps = zip(*(tape.steps for tape in tapes), strict=False)
        self.taken = [[one for step in steps for one in step.taken if one.counts] for steps in of_steps]
        self.steps = [[one.ids for one in taken] for taken in self.taken]
        self.epochs = [step.epoch for step in tapes[0].steps]

    def repeated(self) -> Iterator[Finding]:
        """Yield a finding of samples that are trained on more often in an epoch than by one process."""
        world, seen = len(self.tapes), Counter[Hashable]()
        alike = all(len(each) >= world > 1 and len(set(each)) == 1 and None not in each[0] for each in self.steps)
        for position, batches in enumerate(self.steps):
            here = Counter(one for batch in batches for one in batch if one is not None)
            seen = here + (seen if position and self.epochs[position] == self.epochs[position - 1] else Counter())
            known = self.alone.complete and not self.chosen
            more = sum(max(0, count - self.there[one]) for one, count in seen.items() if known and self.there[one])
            if alike and (more or not known or not here.keys() & self.there.keys()):
                text = f"all {world} ranks read the same samples in the same order: the global batch is one rank's"
                yield Finding("duplicated stream", "samples", text, position)
            elif more and not self.facts.splits_batches:
                text = f"{more} of {seen.total()} samples are trained on more often than by one process"
                yield Finding("padding", "samples", text, position)

    def lengths(self) -> Iterator[str]:
        """Yield a remark on a window beyond the steps in which not every micro-batch counts as its samples do."""
        facts, window, world = self.facts, max(1, self.facts.accumulation), len(self.tapes)
        taken, known = sum(len(step.taken) for step in self.tapes[0].steps), min(map(len, self.of_ranks))
        even = all(len({one.size for one in each}) == 1 for each in self.taken)
        if not facts.automatic or facts.rule.uses_weight or not facts.rule.name.startswith("mean"):
            return
        number = int(min(known or math.inf, facts.epoch_batches, _MOST_BATCHES))
        for start in range(-(-taken // window) * window, number, window):
            stop = min(start + window, number)
            held = [len(batch) for batches in self.of_ranks for batch in batches[start:stop]]
            held = held if even and known else [1] * (stop - start) * world
            divisor = len(held) if facts.ours else window * world
            if any(size * divisor != sum(held) for size in held):
                sizes = f" of {' and '.join(map(str, sorted(set(held))))} samples" if even and known else ""
                yield (
                    f"beyond the compared steps, from batch {start} on, a window has {len(held)} micro-batches{sizes},"
                    f" whose means {facts.strategy} adds up and divides by {divisor}"
                )
                return

    def coverage(self) -> Iterator[Finding | str]:
        """Yield what is said of samples that an epoch never reads, or reads more than once."""
        here = Counter(one for batches in self.of_ranks for batch in batches for one in batch)
        dropped = sum(max(map(len, batches), default=0) for batches in self.of_ranks)  # what drop_last leaves out
        known, total = here.keys() & self.there.keys(), self.there.total()
        missing = (self.there - here).total() if known else total - here.total()
        more = sum(max(0, here[one] - self.there[one]) for one in known)
        dealt = not self.facts.ours or any(tape.read.dealt for tape in self.tapes)  # else these are stand-ins
        if self.chosen or not self.complete:
            return
        if missing > dropped:
            text = f"{missing} of the {total} samples of an epoch are never read"
            yield Finding("unread samples", "samples", text)
        elif more and not self.facts.splits_batches and (dealt or more >= total):
            how = "every rank reads all" if more >= total else f"the sampler repeats {more} samples, to fill the ranks"
            yield f"beyond the compared steps {how}: they are trained on twice in an epoch"

    def order(self) -> Iterator[Finding | str]:
        """Yield the first global batch that is not what one process reads at that place of its epoch."""
        free = self.shuffled or self.facts.splits_batches
        left, places = self.stream, {one: index for index, one in enumerate(self.stream)}
        for position, batches in enumerate(self.steps):
            here = Counter(one for batch in batches for one in batch)
            there, left = Counter(left[: here.total()]), left[here.total() :]
            if self.chosen or self.epochs[position] != self.epochs[0] or not there:
                return
            if here == there:
                continue
            if not self.there.keys() & here.keys():
                text = "no sample is one that one process reads: they may be transformed at random"
                yield Finding("data order", "samples", text, position, note=True) if free else text
                return
            read = ([one for step in t.steps for batch in step.taken for one in batch.ids] for t in self.tapes)
            rising = all(places.get(one, -1) < places.get(other, -1) for of in read for one, other in pairwise(of))
            text = f"{(here & there).total()} of the {here.total()} samples of the step are those of one process there"
            yield Finding("data order", "samples", text, position, note=self.shuffled or rising)
            return


def differences_in_reading(tapes: Sequence[Tape], alone: Read) -> tuple[list[Finding], list[str]]:
    """Return what ranks and one process read differently, and remarks on what the compared steps do not show."""
    reading = _Reading(tapes, alone)
    told: list[Finding | str] = [*islice(reading.repeated(), 1)]
    told = told or [*reading.lengths(), *reading.coverage(), *reading.order()]
    return [one for one in told if isinstance(one, Finding)], [one for one in told if isinstance(one, str)]
