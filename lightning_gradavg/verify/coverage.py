"""Whether the ranks together read what one process reads: each sample as often, in the same order, in equal batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lightning_gradavg.verify.record import Taken, Tape
from lightning_gradavg.verify.report import Finding
from lightning_gradavg.verify.samples import Read

__all__ = ["Coverage"]


@dataclass
class Coverage:
    """The comparison of what is read.

    Attributes:
        tapes: What the ranks recorded.
        alone: What one process reads.
        findings: What differs.
        remarks: What is not shown, or known of steps beyond the compared ones.
        note: What there is to say of the samples otherwise.
    """

    tapes: Sequence[Tape]
    alone: Read
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    note: str = ""

    def __post_init__(self) -> None:
        self.facts, every = self.tapes[0].facts, [self.alone, *(tape.read for tape in self.tapes)]
        self.identity = _identity(every)
        self.stream = [self.identity(one) for batch in self.alone.batches for one in batch]
        self.complete, self.shuffled = all(read.complete for read in every), any(read.shuffles for read in every)
        self.chosen = any(read.chooses for read in every)
        self.epochs = [step.epoch for step in self.tapes[0].steps]
        self.steps = [
            [tuple(map(self.identity, one.ids)) for tape in self.tapes for one in _taken(tape, index) if one.counts]
            for index in range(len(self.epochs))
        ]
        self._compare()

    def _compare(self) -> None:
        if self._trained_twice():
            return
        self._compare_lengths()
        if not self.chosen:
            self._compare_coverage()
            self._compare_order()

    def _find(self, cause: str, text: str, position: int = 0, *, note: bool = False) -> None:
        self.findings.append(Finding(cause, "samples", text, position, note=note))

    def _trained_twice(self) -> bool:
        """Find samples that an epoch trains on more often than one process does."""
        world, there, seen = len(self.tapes), Counter(self.stream), Counter[Any]()
        same_on_all = all(
            len(batches) >= world > 1 and len(set(batches)) == 1 and None not in batches[0] for batches in self.steps
        )
        for position, batches in enumerate(self.steps):
            here = Counter(one for batch in batches for one in batch if one is not None)
            seen = seen + here if self.epochs[position] == self.epochs[position - 1] or not position else here
            repeated = sum(
                number - there[one] for one, number in seen.items() if number > there[one] > 0 and not self.chosen
            )
            unknown = self.chosen or not self.alone.complete or not set(here) & set(there)
            if same_on_all and (repeated or unknown):
                text = f"all {world} ranks read the same samples in the same order: the global batch is one rank's"
                self._find("duplicated stream", text, position)
            elif repeated and self.alone.complete and not self.facts.splits:
                text = f"{repeated} of {seen.total()} samples are trained on more often than by one process"
                self._find("padding", text, position)
            if self.findings:
                return True
        return False

    def _compare_lengths(self) -> None:
        """Tell of what the compared steps do not have: a short last batch, or a short window."""
        facts, compared, window = self.facts, self.tapes[0].steps, max(1, self.facts.accumulation)
        known, taken = math.isfinite(facts.epoch_batches), sum(len(step.taken) for step in compared)
        sizes = [[len(batch) for batch in tape.read.batches] for tape in self.tapes]
        number = int(min([*map(len, sizes), facts.epoch_batches]))
        equal = all(
            len({one.size for tape in self.tapes for one in _taken(tape, index)}) == 1 for index in range(len(compared))
        )
        averages = facts.rule.startswith("mean") and not facts.uses_weight and equal
        for start in (start for start in range(0, number if averages else 0, window) if start >= taken):
            found = dict.fromkeys(size for each in sizes for size in each[start : min(start + window, number)])
            if len(found) > 1:
                self.remarks.append(
                    f"the batches {start} to {min(start + window, number) - 1} of an epoch, beyond the steps, hold"
                    f" {' and '.join(map(str, found))} samples: means over them are averaged as if they were equal"
                )
                break
        rest = facts.epoch_batches % window if known else 0
        short = any(len(step.taken) < window for step in compared)
        if rest and facts.automatic and taken < facts.epoch_batches and not (facts.ours or short):
            self.remarks.append(
                f"the last window of an epoch was not among the steps: it has {rest:g} of {window} micro-batches, and"
                f" {facts.strategy} still divides it by {window}; GradAvgStrategy does not"
            )

    def _compare_coverage(self) -> None:
        """Find samples that an epoch never reads, or reads more than once."""
        there = Counter(self.stream)
        here = Counter(self.identity(one) for tape in self.tapes for batch in tape.read.batches for one in batch)
        dropped = sum(max(map(len, tape.read.batches), default=0) for tape in self.tapes)  # what drop_last leaves out
        missing = (there - here).total() if here.keys() & there.keys() else there.total() - here.total()
        more = sum(here[one] - there[one] for one in here if here[one] > there[one] > 0)
        dealt = not self.facts.ours or any(tape.read.dealt for tape in self.tapes)  # else these are stand-ins
        if self.complete and missing > dropped:
            self._find("unread samples", f"{missing} of the {there.total()} samples of an epoch are never read")
        elif self.complete and more and not self.facts.splits and (dealt or more >= there.total()):
            how = f"the sampler repeats {more} samples, to fill the ranks"
            how = "every rank reads all" if more >= there.total() else how
            self.remarks.append(f"beyond the compared steps {how}: they are trained on twice in an epoch")

    def _compare_order(self) -> None:
        """Find the first global batch that is not what one process reads at that place of its epoch."""
        left, known = list(self.stream), set(self.stream)
        for position, batches in enumerate(self.steps):
            here = Counter(one for batch in batches for one in batch)
            if self.epochs[position] != self.epochs[0] or not left:
                return
            there, left = Counter(left[: here.total()]), left[here.total() :]
            if here == there:
                continue
            meant = self.shuffled or self.alone.streams
            if not known & set(here):
                text = "no sample is one that one process reads: they may be transformed at random"
                self.note = text if meant or self.facts.splits else ""
                self.remarks += [] if self.note else [text]
                return
            in_order = all(map(self._rises, self.tapes))
            how = "; every rank reads its own part in order" if in_order else ""
            how = "; a sampler shuffles them" if self.shuffled else how
            shared = f"at this step, {(here & there).total()} of the {here.total()} samples of the global batch"
            text = f"{shared} match the single-process run{how}"
            self._find("data order", text, position, note=meant or in_order)
            return

    def _rises(self, tape: Tape) -> bool:
        places = {one: index for index, one in enumerate(self.stream)}
        found = [places.get(self.identity(one), -1) for step in tape.steps for taken in step.taken for one in taken.ids]
        return all(one < other for one, other in pairwise(found))


def _taken(tape: Tape, index: int) -> Sequence[Taken]:
    return tape.steps[index].taken if index < len(tape.steps) else ()


def _identity(read: Sequence[Read]) -> Callable[[Any], Any]:
    """Return what a sample is known by: its index where all datasets are one, else its content."""
    probes = read[0].probes
    one = bool(probes) and None not in probes and all(each.probes == probes for each in read)
    return lambda each: each[0] if one and each[0] is not None else each[1]
