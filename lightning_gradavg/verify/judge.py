"""The comparison of what the ranks recorded with one process that trains freely: stages, findings, report."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from lightning.pytorch import LightningModule

from lightning_gradavg.lightning_internals import BatchNorm
from lightning_gradavg.verify.explain import explain
from lightning_gradavg.verify.record import Data, Refused, Step, Tape
from lightning_gradavg.verify.report import CAUSES, STAGES, Finding, Report, Stage
from lightning_gradavg.verify.twin import Difference, Twin, difference, run_twin

__all__ = ["DOUBLE", "SINGLE", "in_float32", "judge", "not_shown"]

DOUBLE, SINGLE = 1e-8, 1e-4
"""The relative difference that counts as equal in float64 and in float32."""

Built = tuple[LightningModule, dict[str, Any], dict[str, Any]]

_BESIDE_DRAWS = ("initial weights", "samples", "optimizer options")  # do not depend on what is drawn
_OF_STATE = (
    "one process that accumulates the same micro-batches trains the same, and one that takes them as one batch"
    " does not:"
    " something is counted or kept for every micro-batch, or compares the samples of one"
)
_TYPES = re.compile(
    r"dtype|scalar type|double|float64|float32|not implemented for|expected .* but (got|found)", re.IGNORECASE
)


def not_shown(reason: str, tapes: Sequence[Tape] = ()) -> Report:
    """Return the report of a run that could not be compared at all."""
    stages = [Stage(name, "not compared") for name in STAGES]
    facts = tapes[0].facts if tapes else None
    names = (facts.strategy, facts.rule) if facts else ("", "")
    return Report(*names, len(tapes), 0, math.nan, stages, remarks=[reason])


def in_float32(error: Exception, operator: str) -> str | None:
    """Return what to say of an error that float64 makes, or None."""
    if not isinstance(error, (RuntimeError, NotImplementedError)) or not _TYPES.search(str(error)):
        return None
    first = str(error).splitlines()[0]
    return f"the run does not compute in float64 (after {operator}: {first}): verify with --single, in float32"


def judge(
    tapes: Sequence[Tape],
    build: Callable[[], Built],
    *,
    double: bool = True,
    tolerance: float | None = None,
    compare_order: bool = True,
    device: str = "cpu",
) -> Report:
    """Return how a run on several processes differs from one process, and why.

    Args:
        tapes: What the ranks recorded, in rank order.
        build: Returns module, data and options of the Trainer, as of a new run.
        double: Whether both compute in float64.
        tolerance: The relative difference that counts as equal; None for that of the precision.
        compare_order: Whether the order of samples is to be compared.
        device: The type of device.
    """
    problems = [tape.problem for tape in tapes if tape.problem]
    if problems or not all(tape.steps for tape in tapes):
        return not_shown((*problems, "the run took no optimizer step")[0], tapes)
    return _Judge(tapes, build, double, tolerance or (DOUBLE if double else SINGLE), device).report(order=compare_order)


class _Judge:
    def __init__(
        self,
        tapes: Sequence[Tape],
        build: Callable[[], Built],
        double: bool,
        tolerance: float,
        device: str,
    ) -> None:
        self.tapes, self.build, self.double, self.tolerance, self.device = tapes, build, double, tolerance, device
        self.facts, self.findings, self.remarks = tapes[0].facts, list[Finding](), dict[str, None]()
        self.notes: dict[str, str] = {}

    def report(self, *, order: bool) -> Report:
        """Compare, and put together what was found."""
        twin, refused = self._trained()
        of_ranks = self._of_ranks()
        found = self._of_twin(twin) if twin.differing is not None and not refused else None
        if found is not None and twin.differing is not None and found.stage not in _BESIDE_DRAWS:
            refused = self._otherwise(twin, found)
        if refused:
            self.remarks[refused] = None
            found = None
        if of_ranks is not None and (found is None or of_ranks.step <= found.step):
            found = of_ranks
        steps = len(twin.tape.steps) if found is None else found.step + 1
        self._shared(twin)
        if (
            self.remarks
            and found is not None
            and found is not of_ranks
            and found.stage not in _BESIDE_DRAWS
            and self._drawn(twin)
        ):
            found = None
        self.findings += [found] if found is not None else []
        if order:
            self._data(twin.one_process)
        if found is None or found.stage != "initial weights":
            self._logged(twin)
        self.findings.sort(key=lambda each: (each.note, each.step, STAGES.index(each.stage)))
        used = {
            "split_batches": self.facts.splits,
            "equivalent_to": self.facts.replicated,
            "GradAvgStrategy": self.facts.ours,
        }
        remedies: Iterator[dict[str, Any]] = (
            CAUSES[each.cause].remedy(self.facts.strategy, self.facts.rule, used) for each in self.findings
        )
        complete = [replace(each, **remedy) for each, remedy in zip(self.findings, remedies, strict=True)]
        return Report(
            self.facts.strategy,
            self.facts.rule,
            len(self.tapes),
            steps,
            self.tolerance,
            list(self._stages(complete, found, steps)),
            complete,
            twin.gradients,
            list(self.remarks),
            "float64" if self.double else "float32",
        )

    def _stages(self, findings: Sequence[Finding], found: Finding | None, steps: int) -> Iterator[Stage]:
        last = STAGES.index(found.stage) if found is not None and found.stage != "samples" else len(STAGES)
        for index, name in enumerate(STAGES):
            of_stage = [each for each in findings if each.stage == name]
            note = self.notes.get(name, "")
            if of_stage:
                first = min(of_stage, key=lambda each: each.note)
                yield Stage(name, "note" if first.note else "differs", first.step, first.cause)
            elif index > last and found is not None and found.step == 0 and name != "logged values":
                yield Stage(name, "not compared", note="after the first difference")
            elif steps == 0:
                yield Stage(name, "not compared")
            else:
                yield Stage(name, "equal", note=note)

    def _trained(self) -> tuple[Twin, str]:
        twin = Twin(self.tapes, self.tolerance, double=self.double)
        twin.explain = explain
        return twin, self._run(twin)

    def _run(self, twin: Twin) -> str:
        """Train on one process, and return why it cannot be compared, if so."""
        module, data, options = self.build()
        try:
            run_twin(twin, module, data, options, self.device)
        except Refused as error:
            return str(error)
        except Exception as error:
            reason = in_float32(error, twin.mode.last) if self.double else None
            if reason is None:
                raise
            return reason
        return ""

    def _of_ranks(self) -> Finding | None:
        """Return where the ranks part from each other, if they do."""
        first, *others = self.tapes
        for tape in others:
            for step in range(-1, max(len(tape.steps), len(first.steps))):
                found = self._between(first, tape, step)
                if found is not None:
                    return found
        return None

    def _between(self, first: Tape, other: Tape, position: int) -> Finding | None:
        if position < 0:
            found, _ = difference(other.initial, first.initial, self.tolerance)
            text = f"rank {other.rank} begins with other weights than rank 0"
            return Finding("unsynchronised replicas", "initial weights", text, 0, found) if found else None
        if position >= min(len(first.steps), len(other.steps)):
            text = f"rank 0 took {len(first.steps)} optimizer steps, rank {other.rank} took {len(other.steps)}"
            return Finding("unsynchronised replicas", "reduced gradient", text, position)
        one, two = first.steps[position], other.steps[position]
        for mine, its in zip(one.updates, two.updates, strict=False):
            if (mine.kind, mine.options) != (its.kind, its.options):
                names = [k for a, b in zip(mine.options, its.options, strict=False) for k in a if a[k] != b.get(k)]
                shown = f"{mine.kind} and {its.kind}" if mine.kind != its.kind else ", ".join(dict.fromkeys(names))
                text = f"rank 0 and rank {other.rank} have other optimizers: {shown}"
                return Finding("different optimizers", "optimizer options", text, position)
            pairs = zip(its.reduced, mine.reduced, strict=False)
            found = next(filter(None, (difference(*pair, self.tolerance)[0] for pair in pairs)), None)
            if found is not None:
                text = f"rank {other.rank} steps with another gradient than rank 0"
                return Finding("unsynchronised replicas", "reduced gradient", text, position, found)
        found, _ = difference(two.weights, one.weights, self.tolerance)
        text = f"rank {other.rank} has other weights than rank 0 after the step"
        return Finding("unsynchronised replicas", "weights", text, position, found) if found else None

    def _of_twin(self, twin: Twin) -> Finding:
        """Return the finding of the first difference."""
        assert twin.differing is not None
        stage, position, found = twin.differing
        cause, detail = _UNEXPLAINED
        if stage == "initial weights":
            cause, detail = stage, "the run begins with other values than one process"
        elif stage == "reduced gradient":
            cause, detail = twin.explanation or _UNEXPLAINED
        elif stage == "optimizer options":
            cause = "learning-rate scale" if found.name == "lr" else "optimizer options"
            names = {"lr": "the learning rate"}
            detail = f"{names.get(found.name, found.name)} is {found.found:.6g}, on one process {found.expected:.6g}"
        elif stage == "clipped gradient":
            detail = "the gradient is that of one process before it is clipped, and not afterwards"
        elif stage == "weights":
            cause, detail = "weights beside the gradient", "the optimizer was given what one process gives it"
        elif stage == "buffers":
            owner = twin.module.get_submodule(found.name.rpartition(".")[0])
            cause = "batch norm" if isinstance(owner, BatchNorm) else "buffers of one rank"
            detail = f"{found.name} is not that of one process after the step; gradient and weights are"
        return Finding(cause, stage, detail, position, None if stage == "optimizer options" else found)

    def _otherwise(self, twin: Twin, found: Finding) -> str:
        """Return what else than a fault may make a difference, if anything."""
        step = self.tapes[0].steps[found.step]
        drawn = twin.traces.get(found.step)
        for tape in self.tapes:
            for taken in tape.steps[found.step].taken if found.step < len(tape.steps) else ():
                if drawn is not None and taken.counts and taken.trace != drawn:
                    names = dict.fromkeys(name for name, _ in [*taken.trace, *drawn])
                    return f"random numbers are drawn otherwise in a batch of another size ({', '.join(names)})"
        if len(step.taken) > 1 and found.cause not in _OF_COMBINATIONS:
            again = Twin(self.tapes, self.tolerance, double=self.double, windowed=True)
            if not self._run(again) and (again.differing is None or again.differing[1] > found.step):
                return _OF_STATE
        return ""

    def _drawn(self, twin: Twin) -> dict[str, None]:
        return {name: None for each in (*self.tapes, twin.tape) for name in each.shared} | dict(twin.mode.shared)

    def _shared(self, twin: Twin) -> None:
        drawn = self._drawn(twin)
        if drawn:
            self.remarks[
                f"one draw for a whole batch ({', '.join(drawn)}): it belongs to no sample, every rank draws"
                f" its own, and one"
                " process draws one"
            ] = None

    def _logged(self, twin: Twin) -> None:
        """Compare what was logged over all ranks, or alike by all."""
        synced = set().union(*(tape.synced for tape in self.tapes))
        for position, mine in enumerate(twin.tape.steps):
            of_ranks = [tape.steps[position] for tape in self.tapes if position < len(tape.steps)]
            if any(len(step.taken) > 1 for step in of_ranks) or len(of_ranks) < len(self.tapes):
                continue
            for name, expected in mine.logged.items():
                values = [step.logged.get(name, math.nan) for step in of_ranks]
                known = name.removesuffix("_step").removesuffix("_epoch") in synced or name in synced
                if (known or len(set(values)) == 1) and self._apart(values[0], expected):
                    factor = values[0] / expected if expected else None
                    found = Difference(
                        name, abs(values[0] - expected) / abs(expected or 1), values[0], expected, factor
                    )
                    how = "with sync_dist" if known else "by all ranks alike"
                    text = f"{name} was logged {how}; the training is the same"
                    self.findings.append(Finding("logged value", "logged values", text, position, found))
                    return
            if self._losses_apart(mine, of_ranks):
                return

    def _losses_apart(self, mine: Step, of_ranks: Sequence[Step]) -> bool:
        """Note a loss that all ranks have alike, and one process otherwise, though it trains the same."""
        losses, expected = [step.taken[-1].loss for step in of_ranks], mine.taken[-1].loss
        if (
            len(set(losses)) == 1
            and self._apart(losses[0], expected)
            and not any(f.is_difference for f in self.findings)
        ):
            text = f"the loss of every rank is {losses[0]:.6g}, on one process {expected:.6g}; the training is the same"
            self.findings.append(Finding("logged value", "logged values", text, 0, note=True))
            return True
        return False

    def _apart(self, one: float, other: float) -> bool:
        return (
            math.isfinite(one)
            and math.isfinite(other)
            and not math.isclose(one, other, rel_tol=10 * self.tolerance, abs_tol=1e-12)
        )

    def _data(self, alone: Data) -> None:
        """Compare what is read: by all ranks, twice, never, or in another order."""
        identity = _identity([tape.data for tape in self.tapes], alone)
        read = [[tuple(map(identity, batch)) for batch in tape.data.batches] for tape in self.tapes]
        stream = [identity(one) for batch in alone.batches for one in batch]
        steps = [
            (
                step.epoch,
                [tuple(map(identity, one.ids)) for tape in self.tapes for one in _at(tape, index) if one.counts],
            )
            for index, step in enumerate(self.tapes[0].steps)
        ]
        chosen = alone.chooses or any(tape.data.chooses for tape in self.tapes)
        twice = self._twice(steps, Counter(stream), complete=alone.complete, chosen=chosen)
        if twice is not None:
            self.findings.append(twice)
            return
        self._lengths(read)
        if not chosen:
            self._coverage(read, stream, complete=alone.complete and all(tape.data.complete for tape in self.tapes))
            self._order(steps, stream, alone)

    def _twice(
        self, steps: Sequence[tuple[int, list[tuple[Any, ...]]]], there: Counter[Any], *, complete: bool, chosen: bool
    ) -> Finding | None:
        world = len(self.tapes)
        alike = all(
            len(batches) >= world > 1 and len(set(batches)) == 1 and None not in batches[0] for _, batches in steps
        )
        seen: Counter[Any] = Counter()
        for position, (epoch, batches) in enumerate(steps):
            here = Counter(one for batch in batches for one in batch if one is not None)
            seen = seen + here if not position or steps[position - 1][0] == epoch else here
            more = Counter({one: seen[one] - there[one] for one in seen if seen[one] > there[one] > 0 and not chosen})
            repeated = more.total() if complete else 0
            if alike and (repeated or chosen or not complete or not set(here) & set(there)):
                text = f"all {world} ranks read the same samples in the same order: the global batch is one rank's"
                return Finding("duplicated stream", "samples", text, position)
            if repeated and not self.facts.splits:
                text = f"{repeated} of {seen.total()} samples are trained on more often than by one process"
                return Finding("padding", "samples", text, position)
        return None

    def _lengths(self, read: Sequence[Sequence[tuple[Any, ...]]]) -> None:
        """Say what the steps that were compared do not have: a short last batch, or a short window."""
        facts, compared = self.facts, self.tapes[0].steps
        window, taken = facts.accumulation, sum(len(step.taken) for step in compared)
        sizes = [[len(batch) for batch in of_rank] for of_rank in read]
        seen = [{one.size for tape in self.tapes for one in _at(tape, index)} for index in range(len(compared))]
        number = min((len(of_rank) for of_rank in sizes), default=0)
        if math.isfinite(facts.epoch_batches):
            number = min(number, int(facts.epoch_batches))
        if facts.rule.startswith("mean") and not facts.uses_weight and all(len(each) == 1 for each in seen):
            for start in range(0, number, max(1, window)):
                of_window = [each[index] for each in sizes for index in range(start, min(start + window, number))]
                if start >= taken and len(set(of_window)) > 1:
                    self.remarks[
                        f"the batches {start} to {min(start + window, number) - 1} of an epoch, beyond the steps, hold"
                        f" {' and '.join(map(str, dict.fromkeys(of_window)))} samples: means over them are"
                        f" averaged as if they"
                        " were equal"
                    ] = None
                    break
        rest = facts.epoch_batches % window if math.isfinite(facts.epoch_batches) else 0
        short = any(len(step.taken) < window for step in compared)
        if rest and not facts.ours and facts.automatic and not short and taken < facts.epoch_batches:
            self.remarks[
                f"the last window of an epoch was not among the steps: it has {rest:g} of {window} micro-batches, and"
                f" {facts.strategy} divides it by {window} all the same; GradAvgStrategy does not"
            ] = None

    def _coverage(self, read: Sequence[Sequence[tuple[Any, ...]]], stream: Sequence[Any], *, complete: bool) -> None:
        """Find samples that are never read, or more than once, in an epoch."""
        if not complete:
            return
        here, there = Counter(one for of_rank in read for batch in of_rank for one in batch), Counter(stream)
        dropped = sum(max(map(len, of_rank), default=0) for of_rank in read)  # what drop_last may leave out
        missing = there.total() - here.total() if not set(here) & set(there) else (there - here).total()
        if missing > dropped:
            text = f"{missing} of the {there.total()} samples of an epoch are read by no rank"
            self.findings.append(Finding("unread samples", "samples", text, 0))
            return
        more = sum(here[one] - there[one] for one in here if here[one] > there[one] > 0)
        dealt = not self.facts.ours or any(tape.data.dealt for tape in self.tapes)  # else these are stand-ins
        if more and not self.facts.splits and (dealt or more >= there.total()):
            how = (
                "every rank reads all"
                if more >= there.total()
                else f"the sampler repeats {more} samples, to fill the ranks"
            )
            self.remarks[f"beyond the steps that were compared {how}: they are trained on twice in an epoch"] = None

    def _order(self, steps: Sequence[tuple[int, list[tuple[Any, ...]]]], stream: Sequence[Any], alone: Data) -> None:
        """Find the first global batch that is not what one process reads at that place of its epoch."""
        left, known = list(stream), set(stream)
        place = {one: index for index, one in enumerate(stream)}
        shuffled = alone.shuffles or any(tape.data.shuffles for tape in self.tapes)
        for position, (epoch, batches) in enumerate(steps):
            here = Counter(one for batch in batches for one in batch)
            if epoch != steps[0][0] or not left:
                return
            there, left = Counter(left[: here.total()]), left[here.total() :]
            if here == there:
                continue
            if not set(here) & known:
                text = "no sample is one that one process reads: they may be transformed at random"
                if alone.streams or shuffled or self.facts.splits:
                    self.notes["samples"] = text
                else:
                    self.remarks[text] = None
                return
            in_order = all(
                _rising([place.get(one, -1) for step in tape.steps for t in step.taken for one in self._known(t)])
                for tape in self.tapes
            )
            note = shuffled or in_order or alone.streams
            shared = f"{(here & there).total()} of the {here.total()} samples of a global batch"
            how = (
                "; a sampler shuffles them"
                if shuffled
                else "; every rank reads its own part in order"
                if in_order
                else ""
            )
            text = f"{shared} are those that one process trains on then{how}"
            self.findings.append(Finding("data order", "samples", text, position, note=note))
            return

    def _known(self, taken: Any) -> Iterable[Any]:
        identity = _identity([tape.data for tape in self.tapes], Data(probes=self.tapes[0].data.probes))
        return map(identity, taken.ids)


_UNEXPLAINED = ("unexplained", "")
_OF_COMBINATIONS = (
    *("short window", "mean of means", "sum loss", "counts", "double division", "constant term"),
    *("bf16 wire", "fp16 wire", "clipped before the reduction", "learning-rate scale", "optimizer options"),
)


def _rising(places: Sequence[int]) -> bool:
    return all(one < other for one, other in pairwise(places))


def _at(tape: Tape, index: int) -> list[Any]:
    return tape.steps[index].taken if index < len(tape.steps) else []


def _identity(of_ranks: Sequence[Data], alone: Data) -> Callable[[Any], Any]:
    """Return what a sample is known by: its index where all datasets are one, else its content."""
    one = bool(alone.probes) and all(data.probes == alone.probes for data in of_ranks) and None not in alone.probes
    return lambda each: each[0] if one and each[0] is not None else each[1]
