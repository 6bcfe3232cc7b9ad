"""The comparison of what the ranks recorded with what one process computed: stages, findings, report.

Everything that is compared is a `_Row`: what the run has, what it is compared with, and what it would show if they
differed. Rows make a stage, and their causes the findings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_gradavg.verify.causes import CAUSES
from lightning_gradavg.verify.compare import Difference, Tolerance, differences, is_rounding
from lightning_gradavg.verify.evidence import Evidence
from lightning_gradavg.verify.order import Order
from lightning_gradavg.verify.record import Step, Tape, Tensors
from lightning_gradavg.verify.reference import Reference, StepOfReference, Stream
from lightning_gradavg.verify.report import STAGES, Finding, Report, Stage, times
from lightning_gradavg.verify.state import digest

__all__ = ["judge", "not_shown"]

_NOT_TAKEN = "one process took none of these steps"
_NAMED = 4  # layers
_NOT_STEADY = "training_step changed {} between calls: from one state it gives two results"
_OWN = "the loss depends on what every micro-batch has for itself, and one process has once: {}"
_SHORT_WINDOW = (
    "the last window of an epoch was not among the steps: it has {rest:g} of {window} micro-batches, and {strategy}"
    " divides it by {window} all the same; GradAvgStrategy does not"
)


def judge(tapes: Sequence[Tape], reference: Reference, tolerance: Tolerance, stream: Stream | None) -> Report:
    """Return how a run on several processes differs from its reference, and why.

    Args:
        tapes: What the ranks recorded, in rank order.
        reference: What one process found on the same samples.
        tolerance: What rounding stays below.
        stream: What one process with the same configuration reads; None if that is not part of the question.
    """
    return _Judge(tapes, reference, tolerance).report(stream)


def not_shown(reason: str, tapes: Sequence[Tape] = ()) -> Report:
    """Return the report of a run that could not be compared at all."""
    names = [(tape.facts.strategy, tape.facts.told.rule.name) for tape in tapes] or [("", "")]
    stages = [Stage(name, "not compared") for name in STAGES]
    return Report(*names[0], len(tapes), 0, "one process", math.nan, stages, [], remarks=[reason])


_Causes: TypeAlias = Callable[[Difference], Iterable[tuple[str, str]]]


def _no_cause(_: Difference) -> Iterable[tuple[str, str]]:
    return ()


def _showing(cause: str, detail: Callable[[Difference], str]) -> _Causes:
    """Return what tells one cause of a difference."""
    return lambda found: [(cause, detail(found))]


@dataclass(frozen=True)
class _Row:
    """What is compared in one step.

    Attributes:
        step: Its position.
        found: What the run has.
        expected: What it is compared with.
        exact: The relative difference up to which they are equal.
        loose: That up to which a difference is rounding by its pattern, or as of a batch compared with its parts.
        slack: What both were computed from by subtraction.
        causes: What a difference shows, as causes and details.
    """

    step: int
    found: Tensors
    expected: Tensors
    exact: float = 0.0
    loose: float = 0.0
    slack: Tensors = field(default_factory=dict)
    causes: _Causes = _no_cause

    def measured(self, dtypes: Mapping[str, torch.dtype]) -> list[Difference]:
        """Return the differences; those that are rounding at most as large as what is equal."""
        found = differences(self.found, self.expected, self.exact, dtypes, self.slack)
        small = [each.relative <= self.loose for each in found]
        return [
            replace(each, relative=min(each.relative, self.exact)) if rounding else each
            for each, rounding in zip(found, small, strict=True)
        ]

    def beyond(self, dtypes: Mapping[str, torch.dtype]) -> Difference | None:
        """Return the first difference, with a factor only if all that differ have the same."""
        beyond = [each for each in self.measured(dtypes) if each.relative > self.exact]
        factors = [math.nan if each.factor is None else each.factor for each in beyond]
        same = all(math.isclose(factor, factors[0], rel_tol=1e-3) for factor in factors)
        return replace(beyond[0], factor=beyond[0].factor if same else None) if beyond else None


class _Judge:
    def __init__(self, tapes: Sequence[Tape], reference: Reference, tolerance: Tolerance) -> None:
        self.tapes, self.reference, self.tolerance, self.facts = tapes, reference, tolerance, tapes[0].facts
        self.findings: list[Finding] = []
        acts = [(examined, position) for examined in reference.acts for position in examined.act.steps]
        self.steps = [Evidence(tapes, position, examined, tolerance) for examined, position in acts]
        self.remarks = dict.fromkeys([*(tape.problem for tape in tapes if tape.problem), *self._foreseen()])
        self.right: set[int] = set()  # steps whose gradient is that of one process
        self.gradients: dict[str, list[float]] = {}

    def report(self, stream: Stream | None) -> Report:
        """Go through the stages, and put together what was found."""
        reduced = self._reduced()  # first: what comes before it does not matter where it is right
        samples, found, foreseen = Order(self.tapes, [(e.position, e.pieces) for e in self.steps], stream).judge()
        self.findings += found
        self.remarks.update(dict.fromkeys(foreseen))
        stages = [
            self._stage("initial weights", self._initial()),
            samples,
            self._before("outputs", self._outputs()),
            self._before("loss", self._losses()),
            self._before("local gradients", self._locals()),
            reduced,
            self._stage("clipped gradient", self._clipped(), _NOT_TAKEN),
            self._stage("optimizer update", self._update(), _NOT_TAKEN),
            self._stage("buffers", self._buffers(), "they change, and what one process makes of them is not known"),
            self._random(),
        ]
        kept: dict[str, Finding] = {}
        for finding in sorted(self.findings, key=_rank):
            advice: dict[str, Any] = CAUSES[finding.cause].advice_for(finding.detail, self.facts.strategy)
            kept.setdefault(finding.cause, replace(finding, **advice))
        replicas = self.facts.told.replicas
        reference = f"DataParallel over {replicas} replicas" if replicas else "one process on the run's global batches"
        return Report(
            self.facts.strategy,
            self.facts.told.rule.name,
            len(self.tapes),
            len(self.steps),
            f"{reference}, each step from the run's own state",
            self.tolerance.exact,
            stages,
            list(kept.values()),
            self.gradients,
            list(self.remarks),
        )

    def _foreseen(self) -> Iterator[str]:
        """Yield what is taken for granted, and what is known of steps beyond those that were compared."""
        facts, acts = self.facts, self.reference.acts
        yield from (_NOT_STEADY.format(examined.unsteady) for examined in acts if examined.unsteady)
        yield from (_OWN.format(", ".join(examined.split.own)) for examined in acts if examined.split.own)
        if len(self.reference.steps) < len(self.steps):
            yield f"one process took {len(self.reference.steps)} of the {len(self.steps)} optimizer steps"
        rest = facts.epoch_batches % facts.window if math.isfinite(facts.epoch_batches) else 0
        seen = any(e.step.batches[1] - e.step.batches[0] < facts.window for e in self.steps)
        if rest and facts.stock and facts.automatic and not seen:
            yield _SHORT_WINDOW.format(rest=rest, window=facts.window, strategy=facts.strategy)

    def _row(self, step: int, found: Tensors, expected: Tensors, *, loose: bool = False, **options: Any) -> _Row:
        """Return a row of the tolerance of the run."""
        limit = self.tolerance.loose if loose else 0.0
        return _Row(step, found, expected, self.tolerance.exact, limit, **options)

    def _beyond(self, row: _Row) -> Difference | None:
        return row.beyond(self.facts.dtypes)

    def _stage(self, name: str, rows: Iterable[_Row], missing: str = "") -> Stage:
        """Return a stage from what was compared in the steps, and add what that shows."""
        compared, measured = list(rows), []
        differing: list[tuple[int, Difference]] = []
        for row in compared:
            measured += row.measured(self.facts.dtypes)
            found = self._beyond(row)
            if found is not None:
                differing.append((row.step, found))
                of_row = row.causes(found)
                self.findings += [Finding(cause, name, detail, row.step, found) for cause, detail in of_row]
        if differing:
            return Stage(name, "differs", *differing[0])
        if missing and not compared:
            return Stage(name, "not compared", note=missing)
        return Stage(name, "equal", None, max(measured, key=lambda each: each.relative, default=None))

    def _before(self, name: str, rows: Iterable[_Row]) -> Stage:
        """Return a stage before the reduced gradient, which is not needed where that is right."""
        stage = self._stage(name, rows, "told by the gradient of all samples")
        if stage.status == "not compared" or stage.step in self.right:
            return replace(stage, status="not needed", note=stage.note or "the gradient is right all the same")
        return stage

    def _drift(self, step: int, detail: str, of_ranks: Sequence[Tensors]) -> Iterator[_Row]:
        """Yield what is not the same bits on all ranks."""
        causes = _showing("unsynchronised replicas", _naming(detail))
        rows = (_Row(step, of_ranks[0], other, causes=causes) for other in of_ranks[1:])
        yield from (row for row in rows if self._beyond(row))

    def _initial(self) -> Iterator[_Row]:
        first = self.tapes[0].initial
        here = "is not the same on all ranks when training begins"
        yield from self._drift(0, here, [tape.initial for tape in self.tapes])

        other = "begins with other values than on one process; the reference took the run's"
        causes = _showing("initial weights", _naming(other))
        yield self._row(0, first, self.reference.initial, causes=causes)

    def _outputs(self) -> Iterator[_Row]:
        """Yield the outputs of every sample beside its rank's samples, and beside all."""
        steady = [each for each in self.reference.acts if not (self.facts.step_end or each.unsteady)]
        told = [(each, [each.split] if each.split.has_whole else each.halves) for each in steady]
        for examined, split in ((examined, split) for examined, splits in told for split in splits):
            whole = split.whole.outputs
            of_parts = {name: [part.outputs.get(name, torch.zeros(0)) for part in split.common] for name in whole}
            joined = {name: torch.cat(rows) for name, rows in of_parts.items() if _fit(rows, whole[name])}
            if joined:
                yield self._row(examined.act.steps[0], joined, {name: whole[name] for name in joined}, loose=True)

    def _steady(self) -> list[Evidence]:
        """Return the steps whose act gives the same result twice."""
        return [each for each in self.steps if not each.examined.unsteady]

    def _losses(self) -> Iterator[_Row]:
        """Yield the loss of every micro-batch on its rank, and on one process."""
        both = [(e.position, *pair) for e in self._steady() for pair in zip(e.pieces, e.examined.parts, strict=True)]
        for step, piece, part in both if not self.facts.whole_only else ():
            found, alone = piece.losses, part.losses
            if found.keys() == alone.keys():
                names = {key: f"loss {key} (rank {piece.rank})" for key in alone}
                yield self._row(
                    step, *({names[key]: torch.tensor(side[key]) for key in alone} for side in (found, alone))
                )

    def _locals(self) -> Iterator[_Row]:
        """Yield the gradient of every micro-batch on its rank, and on one process."""
        for e, index in ((each, index) for each in self._steady() for index in each.pairs):
            rank, (mine, alone) = e.pieces[index].rank, e.pairs[index]
            sides = ({f"{name} (rank {rank})": each for name, each in side.items()} for side in (mine, alone))
            rounding = is_rounding(e.flat(mine), e.flat(alone), (), self.tolerance)
            yield self._row(e.position, *sides, loose=rounding)

    def _reduced(self) -> Stage:
        """Compare the reduced gradient with the one that one process expects."""
        name, rows = "reduced gradient", list(chain(self._number_of_steps(), *map(self._reduced_in, self.steps)))
        missing = [row for row in rows if isinstance(row, str)]
        stage = self._stage(name, [row for row in rows if isinstance(row, _Row)])
        if missing and stage.status == "equal":
            self.remarks[missing[0]] = None
            return Stage(name, "not compared", note=missing[0])
        return stage

    def _number_of_steps(self) -> Iterator[_Row]:
        numbers = [{"the number of optimizer steps": torch.tensor(len(tape.steps))} for tape in self.tapes]
        yield from self._drift(0, "is not the same on all ranks", numbers)

    def _reduced_in(self, e: Evidence) -> Iterator[_Row | str]:
        """Yield what is compared in a step, or why nothing is."""
        steps = [e.step, *e.others]
        drifted = [
            *self._drift(e.position, "is not the same on all ranks before the step", [each.before for each in steps]),
            *self._drift(
                e.position, "has another gradient on every rank: it was not reduced", [each.reduced for each in steps]
            ),
        ]
        if drifted:
            yield drifted[0]
        elif e.examined.unsteady or e.expected.gradient is None:
            yield e.expected.problem or "training_step does not give the same result twice"
        else:
            yield self._compared(e, e.expected.gradient)

    def _compared(self, e: Evidence, expected: Tensors) -> _Row | str:
        row = self._row(e.position, e.reduced, expected, causes=lambda _: e.causes())
        for each in row.measured(self.facts.dtypes):
            self.gradients.setdefault(each.name, [0.0] * e.position).append(each.relative)
        if self._beyond(row) is None or e.is_expected:
            self.right.add(e.position)
            return replace(row, loose=self.tolerance.loose)
        if e.split.own:
            return f"the gradient depends on what one process has once: {', '.join(e.split.own)}"
        return row

    def _taken(self) -> Iterator[tuple[Evidence, StepOfReference]]:
        """Yield the steps that the reference took, too."""
        theirs = ((e, self.reference.steps.get(e.position)) for e in self.steps)
        yield from ((e, taken) for e, taken in theirs if taken is not None and taken.after)

    def _clipped(self) -> Iterator[_Row]:
        """Yield what the optimizer stepped with, from the same reduced gradient."""
        ranks = len(self.tapes)
        for e, theirs in self._taken():
            untouched = self._beyond(self._row(e.position, theirs.clipped, e.reduced)) is None

            def causes(found: Difference, *, untouched: bool = untouched) -> Iterator[tuple[str, str]]:
                detail = f"the optimizer gets another part of the same gradient than on one process{_as_factor(found)}"
                if untouched and math.isclose((found.factor or 0) * ranks, 1, rel_tol=1e-3):
                    yield "double division", f"{detail}; it is divided by the {ranks} ranks once more"
                else:
                    yield "unexplained", detail

            yield self._row(e.position, e.step.clipped, theirs.clipped, causes=causes)

    def _update(self) -> Iterator[_Row]:
        """Yield what the optimizer adds to the weights, and the options that it does so with."""
        for e, theirs in self._taken():
            known = [*self._options(e, theirs)]
            before, steps = e.step.before, [e.step, *e.others]
            known += self._drift(e.position, "is not the same on all ranks after the step", [s.after for s in steps])
            same = self._beyond(self._row(e.position, e.step.clipped, theirs.clipped)) is None

            def causes(found: Difference, *, unknown: bool = same and not known) -> Iterator[tuple[str, str]]:
                detail = f"the same gradient, with the same options, makes another update{_as_factor(found)}"
                yield from [("unexplained", detail)] if unknown else []

            yield from known
            updates = ({key: after[key] - before[key] for key in before} for after in (e.step.after, theirs.after))
            yield self._row(e.position, *updates, slack=before, causes=causes)

    def _options(self, e: Evidence, theirs: StepOfReference) -> Iterator[_Row]:
        """Yield an option of the optimizer that is not the same on all ranks, or on one process."""
        mine, alone = _options(e.step), _options(replace(e.step, groups=theirs.groups))
        of_ranks = [
            ("different optimizers", f"{name} is {mine[name]} on rank 0 and {there} on rank {rank}", name, there)
            for rank, other in enumerate(e.others, 1)
            for name, there in _unlike(mine, _options(other))
        ]
        of_reference = [
            (
                "learning-rate scale" if name == "lr" else "optimizer options",
                f"{'the learning rate' if name == 'lr' else name} is {mine[name]}, on one process {there}",
                name,
                there,
            )
            for name, there in _unlike(mine, alone)
            if not self.facts.told.scales_rates
        ]
        for cause, detail, name, there in (of_ranks or of_reference)[:1]:
            found, expected = ({name: _number(value, place)} for place, value in enumerate((mine[name], there)))
            yield _Row(e.position, found, expected, causes=_showing(cause, _with_factor(detail)))

    def _buffers(self) -> Iterator[_Row]:
        """Yield the buffers after every window."""
        for examined in self.reference.acts:
            position, pieces = examined.act.steps[-1], examined.act.calls
            mine, before = (
                self.tapes[0].steps[position].buffers,
                next(call.state for call in self.tapes[0].calls if call.batch == pieces[0].batch),
            )
            row, of_rank, unchanged = (
                self._row(position, mine, {key: state.get(key, each) for key, each in mine.items()}, loose=True)
                for state in (examined.state, examined.state_of_rank, before)
            )
            known = bool(examined.state) and not examined.unsteady
            differing = row if known else unchanged
            found = self._beyond(differing)
            norm = found is not None and f"{found.name.rpartition('.')[0]}.running_var" in mine
            if found is not None and not (known and (norm or len(pieces) <= len(self.tapes))):
                self.remarks[f"what one process makes of the buffer {found.name} is not known"] = None
                continue
            followed = norm or self._beyond(of_rank) is None
            cause = "batch norm" if norm else "buffers of one rank" if followed else "unexplained"
            made = "what rank 0 makes of its own samples, not" if followed else "not"
            text = f"is {made} what one process makes of all"
            yield replace(differing, causes=_showing(cause, _naming(text)))

    def _random(self) -> Stage:
        name, parts = "random state", [part for examined in self.reference.acts for part in examined.parts]
        drawn = any(part.mode.draws for part in parts)
        if not drawn and not any(part.host for part in parts):
            return Stage(name, "equal", note="no random numbers were drawn")
        layers = dict.fromkeys(layer for part in parts for layer in part.layers)
        states = [digest(call.random) for call in self.reference.acts[0].act.calls]
        same = len(states) > 1 and len(set(states)) == 1 and drawn
        noise = "; all ranks begin from the same random state, so their noise is the same" if same else ""
        more = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
        where = (", ".join(islice(layers, _NAMED)) or "training_step") + more
        detail = f"random numbers are drawn in {where}; one process drew the same for each sample{noise}"
        self.findings.append(Finding("stochastic", name, detail))
        return Stage(name, "note", note=detail)


def _rank(finding: Finding) -> tuple[Any, ...]:
    """Return what findings are sorted by: what leaves the gradients of the batches alone does not lead."""
    step, order = -1 if finding.step is None else finding.step, list(CAUSES).index(finding.cause)
    return not finding.is_difference, finding.cause == "data order", step, STAGES.index(finding.stage), order


def _fit(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Return whether the parts' rows are those of the whole."""
    return all(part.shape[1:] == whole.shape[1:] for part in parts) and sum(map(len, parts)) == len(whole)


def _naming(detail: str) -> Callable[[Difference], str]:
    return lambda found: f"{found.name} {detail}"


def _with_factor(detail: str) -> Callable[[Difference], str]:
    return lambda found: detail + _as_factor(found)


def _as_factor(found: Difference) -> str:
    return "" if found.factor is None else f": {times(found.factor)} it"


def _options(step: Step) -> dict[str, Any]:
    """Return the options of an optimizer's groups by name, numbers as floats."""
    found: dict[str, Any] = {"the optimizer": step.kind}
    for index, group in enumerate(step.groups):
        for name, value in group.items():
            number = isinstance(value, (float, int, Tensor)) and not isinstance(value, bool)
            found[f"{name} of group {index}" if index else name] = float(value) if number else value
    return found


def _unlike(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((name, theirs.get(name)) for name in mine if digest(mine[name]) != digest(theirs.get(name)))


def _number(value: Any, place: int) -> Tensor:
    """Return an option as what is compared; of one that is no number, other sizes, which differ."""
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.zeros(1 + place)
