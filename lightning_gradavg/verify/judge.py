"""The comparison of what the ranks recorded with what one process computed: stages, findings, report.

Everything that is compared is a `_Row`: what the run has, what it is compared with, and what it would show if they
differed. Rows make a stage, and their causes the findings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_gradavg.verify.causes import CAUSES
from lightning_gradavg.verify.compare import Difference, Tolerance, differences, first_beyond, is_rounding
from lightning_gradavg.verify.evidence import Evidence, Named
from lightning_gradavg.verify.record import Call, Step, Tape, Tensors
from lightning_gradavg.verify.reference import Act, Reference, Stream
from lightning_gradavg.verify.report import STAGES, Finding, Report, Stage, times
from lightning_gradavg.verify.state import digest

__all__ = ["judge", "not_shown"]

_NAMED = 4  # layers
_TOLD_BY_ALL = "told by the gradient of all samples"
_NOT_TAKEN = "one process took none of these steps"
_NOT_KNOWN = "they change, and what one process makes of them is not known"
_NOT_STEADY = "training_step changed {} between calls: from one state it gives two results"
_OWN = "the loss depends on what every micro-batch has for itself, and one process has once: {}"
_SHORT_WINDOW = (
    "the last window of an epoch was not among the steps: it has {rest:g} of {window} micro-batches, and {strategy}"
    " divides it by {window} all the same; GradAvgStrategy does not"
)
_PADDED = (
    "the end of an epoch was not among the steps: there the sampler repeats {} samples, to fill the ranks;"
    " GradAvgStrategy(split_batches=True) repeats none"
)
_OF_ANY_OPTION = ("optimizer options", "{0} is {1}, on one process {2}")
_OF_ONE_PROCESS = {"lr": ("learning-rate scale", "the learning rate is {1}, on one process {2}")}
_TRANSFORMED = "no sample is one that one process reads: they may be transformed at random"
_DEALT = "; a sampler shuffles them, and deals another order to another number of processes"


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
    names = [*((tape.facts.strategy, tape.facts.told.rule.name) for tape in tapes), ("", "")]
    stages = [Stage(name, "not compared") for name in STAGES]
    return Report(*names[0], len(tapes), 0, "one process", math.nan, stages, [], remarks=[reason])


_Causes: TypeAlias = Callable[[Difference], Iterable[Named]]


def _unsaid(_: Difference) -> list[Named]:
    """Show nothing: what makes the difference is said elsewhere."""
    return []


@dataclass(frozen=True)
class _Row:
    """What is compared in one step.

    Attributes:
        step: Its position.
        found: What the run has.
        expected: What it is compared with.
        dtypes: The types that they were computed in.
        exact: The relative difference up to which they are equal.
        loose: That up to which a difference is rounding by its pattern, or as of a batch compared with its parts.
        slack: What both were computed from by subtraction.
        causes: What a difference shows.
    """

    step: int
    found: Tensors
    expected: Tensors
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    exact: float = 0.0
    loose: float = 0.0
    slack: Tensors = field(default_factory=dict)
    causes: _Causes = _unsaid

    @cached_property
    def measured(self) -> list[Difference]:
        """The differences; those that are rounding at most as large as what is equal."""
        found = differences(self.found, self.expected, self.exact, self.dtypes, self.slack)
        limits = [self.exact if each.relative <= self.loose else math.inf for each in found]
        return [replace(each, relative=min(each.relative, most)) for each, most in zip(found, limits, strict=True)]

    @cached_property
    def beyond(self) -> Difference | None:
        """The first difference, with a factor only if all that differ have the same."""
        return first_beyond(self.measured, self.exact)


def _showing(cause: str, detail: Callable[[Difference], str]) -> _Causes:
    return lambda found: [(cause, detail(found))]


class _Judge:
    def __init__(self, tapes: Sequence[Tape], reference: Reference, tolerance: Tolerance) -> None:
        self.tapes, self.reference, self.tolerance, self.facts = tapes, reference, tolerance, tapes[0].facts
        self.findings: list[Finding] = []
        acts = [(act, position) for act in reference.acts for position in act.steps]
        self.steps = [Evidence(tapes, position, act, tolerance) for act, position in acts]
        self.steady = [e for e in self.steps if not e.act.unsteady]
        self.remarks = dict.fromkeys([*(tape.problem for tape in tapes if tape.problem), *self._foreseen()])
        self.right: set[int] = set()  # steps whose gradient is that of one process
        self.gradients: dict[str, list[float]] = {}

    def report(self, stream: Stream | None) -> Report:
        """Go through the stages, and put together what was found."""
        reduced = self._reduced()  # first: what comes before it does not matter where it is right
        stages = [
            self._stage("initial weights", self._initial()),
            self._samples(stream),
            self._before("outputs", self._outputs()),
            self._before("loss", self._losses()),
            self._before("local gradients", self._locals()),
            reduced,
            self._stage("clipped gradient", self._clipped(), _NOT_TAKEN),
            self._stage("optimizer update", self._update(), _NOT_TAKEN),
            self._stage("buffers", self._buffers(), _NOT_KNOWN),
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
        yield from (_NOT_STEADY.format(act.unsteady) for act in acts if act.unsteady)
        yield from (_OWN.format(", ".join(act.split.own)) for act in acts if act.split.own)
        if len(self.reference.steps) < len(self.steps):
            yield f"one process took {len(self.reference.steps)} of the {len(self.steps)} optimizer steps"
        rest = facts.epoch_batches % facts.window  # NaN of a stream
        seen = any(e.step.batches[1] - e.step.batches[0] < facts.window for e in self.steps)
        if rest > 0 and facts.stock and facts.automatic and not seen:
            yield _SHORT_WINDOW.format(rest=rest, window=facts.window, strategy=facts.strategy)

    def _row(self, step: int, found: Tensors, expected: Tensors, *, loose: bool = False, **options: Any) -> _Row:
        limit = self.tolerance.loose * loose
        return _Row(step, found, expected, self.facts.dtypes, self.tolerance.exact, limit, **options)

    def _stage(self, name: str, rows: Iterable[_Row], missing: str = "") -> Stage:
        """Return a stage from what was compared in the steps, and add what that shows."""
        compared = list(rows)
        differing = [(row, found) for row in compared if (found := row.beyond) is not None]
        for row, found in differing:
            self.findings += [Finding(cause, name, detail, row.step, found) for cause, detail in row.causes(found)]
        if differing:
            return Stage(name, "differs", differing[0][0].step, differing[0][1])
        if missing and not compared:
            return Stage(name, "not compared", note=missing)
        measured = chain.from_iterable(row.measured for row in compared)
        return Stage(name, "equal", None, max(measured, key=lambda each: each.relative, default=None))

    def _before(self, name: str, rows: Iterable[_Row]) -> Stage:
        """Return a stage before the reduced gradient, which is not needed where that is right."""
        stage = self._stage(name, rows, _TOLD_BY_ALL)
        if stage.status == "not compared" or stage.step in self.right:
            return replace(stage, status="not needed", note=stage.note or "the gradient is right all the same")
        return stage

    def _drift(self, step: int, detail: str, of_ranks: Sequence[Tensors]) -> list[_Row]:
        """Return what is not the same bits on all ranks."""
        causes = _showing("unsynchronised replicas", _naming(detail))
        rows = [_Row(step, of_ranks[0], other, self.facts.dtypes, causes=causes) for other in of_ranks[1:]]
        return [row for row in rows if row.beyond]

    def _initial(self) -> list[_Row]:
        here = "is not the same on all ranks when training begins"
        drifted = self._drift(0, here, [tape.initial for tape in self.tapes])
        causes = _showing(
            "initial weights", _naming("begins with other values than on one process; the reference took the run's")
        )
        return [*drifted, self._row(0, self.tapes[0].initial, self.reference.initial, causes=causes)]

    def _samples(self, stream: Stream | None) -> Stage:
        """Compare what was read: by all ranks, twice, or in another order than one process does."""
        name, repeated = "samples", self._repeated()
        if self.facts.padded and not repeated:
            self.remarks[_PADDED.format(self.facts.padded)] = None
        twice = [*self._duplicated(stream), *repeated]
        self.findings += twice
        if twice:
            return Stage(name, "differs", twice[0].step, note=twice[0].detail)
        if stream is None:
            return Stage(name, "equal", note="no sample is read twice; the order of one process was not asked for")
        return self._in_order(stream)

    def _duplicated(self, stream: Stream | None) -> list[Finding]:
        reads = [tuple(sample for batch in tape.batches for sample in batch.samples) for tape in self.tapes]
        # Where one process sees equal samples, too, they are equal and not read twice.
        there = Counter(stream.samples() if stream is not None else ())
        same = len(reads) > 1 and len(set(reads)) == 1 and not Counter(reads[0] * len(reads)) <= there
        detail = f"all {len(reads)} ranks read the same samples in the same order: the global batch is one rank's"
        return [Finding("duplicated stream", "samples", detail, 0)] * same

    def _repeated(self) -> list[Finding]:
        """Return the samples that the sampler repeats, where the end of an epoch was recorded."""
        batches = Counter(batch.epoch for batch in self.tapes[0].batches)
        ended = [epoch for epoch, number in batches.items() if number >= self.facts.epoch_batches and self.facts.padded]
        found = []
        for epoch in ended[:1]:
            of_epoch = [act for act in self.reference.acts if act.epoch == epoch]
            here = [sample for act in of_epoch for sample in act.samples]
            again = len(here) - len(set(here))
            detail = f"{again} of {len(here)} samples are trained on twice in epoch {epoch}, to fill the ranks"
            found += [Finding("padding", "samples", detail, of_epoch[-1].steps[0])] * (again > 0)
        return found

    def _in_order(self, stream: Stream) -> Stage:
        """Find the first global batch that is not what one process reads at that place of its epoch."""
        name, shuffled, known = "samples", self.facts.shuffles or stream.shuffles, set(stream.samples())
        read = {act.epoch: stream.samples(act.epoch) for act in self.reference.acts}  # what is left of each epoch
        for act in self.reference.acts:
            number = len(act.samples)
            here, there = Counter(act.samples), Counter(read[act.epoch][:number])
            read[act.epoch] = read[act.epoch][number:]
            if here != there:
                break
        else:
            return Stage(name, "equal")
        if not shuffled and known.isdisjoint(act.samples):
            return Stage(name, "not compared", act.steps[0], note=_TRANSFORMED)
        shared = f"{(here & there).total()} of the {number} samples of a global batch"
        detail = f"{shared} are those that one process trains on then" + _DEALT * shuffled
        self.findings.append(Finding("data order", name, detail, act.steps[0], note=shuffled))
        return Stage(name, "note" if shuffled else "differs", act.steps[0], note=detail)

    def _outputs(self) -> Iterator[_Row]:
        """Yield the outputs of every sample beside its rank's samples, and beside all."""
        steady = [each for each in self.reference.acts if not (self.facts.step_end or each.unsteady)]
        told = [(each, [each.split] if each.split.has_whole else each.halves) for each in steady]
        for act, split in ((act, split) for act, splits in told for split in splits):
            whole = split.whole.outputs
            of_parts = {name: [part.outputs.get(name, torch.zeros(0)) for part in split.common] for name in whole}
            joined = {name: torch.cat(rows) for name, rows in of_parts.items() if _fit(rows, whole[name])}
            if joined:
                yield self._row(act.steps[0], joined, {name: whole[name] for name in joined}, loose=True)

    def _losses(self) -> Iterator[_Row]:
        """Yield the loss of every micro-batch on its rank, and on one process."""
        both = [(e.position, *pair) for e in self.steady for pair in zip(e.calls, e.computed, strict=True)]
        for step, call, replay in both:
            if call.losses.keys() == replay.losses.keys() and not self.facts.whole_only:
                yield self._row(step, *(_named(each.losses, call) for each in (call, replay)))

    def _locals(self) -> Iterator[_Row]:
        """Yield the gradient of every micro-batch on its rank, and on one process."""
        for e, index in ((each, index) for each in self.steady for index in each.pairs):
            rank, (mine, alone) = e.calls[index].rank, e.pairs[index]
            sides = ({f"{name} (rank {rank})": each for name, each in side.items()} for side in (mine, alone))
            rounding = is_rounding(e.flat(mine), e.flat(alone), (), self.tolerance)
            yield self._row(e.position, *sides, loose=rounding)

    def _reduced(self) -> Stage:
        """Compare the reduced gradient with the one that one process expects."""
        name, numbers = "reduced gradient", [torch.tensor(len(tape.steps)) for tape in self.tapes]
        counted = self._drift(
            0, "is not the same on all ranks", [{"the number of optimizer steps": n} for n in numbers]
        )
        missing: list[str] = []
        stage = self._stage(name, [*counted, *(row for e in self.steps for row in self._reduced_in(e, missing))])
        if missing and stage.status == "equal":
            self.remarks[missing[0]] = None
            return Stage(name, "not compared", note=missing[0])
        return stage

    def _reduced_in(self, e: Evidence, missing: list[str]) -> list[_Row]:
        """Return what is compared in a step; where nothing is, add to what is missing why not."""
        steps = [e.step, *e.others]
        weights = self._drift(e.position, "is not the same on all ranks before the step", [s.before for s in steps])
        here = "has another gradient on every rank: it was not reduced"
        drifted = [*weights, *self._drift(e.position, here, [s.reduced for s in steps])]
        if drifted:
            return drifted[:1]
        if e.act.unsteady or e.expected.gradient is None:
            missing.append(e.expected.problem or "training_step does not give the same result twice")
            return []
        row = self._row(e.position, e.reduced, e.expected.gradient, causes=lambda _: e.causes())
        for each in row.measured:
            self.gradients.setdefault(each.name, [0.0] * e.position).append(each.relative)
        if row.beyond is None or e.is_expected:
            self.right.add(e.position)
            return [replace(row, loose=self.tolerance.loose)]
        if e.split.own:
            missing.append(f"the gradient depends on what one process has once: {', '.join(e.split.own)}")
        return [] if e.split.own else [row]

    def _taken(self) -> list[tuple[Evidence, Step]]:
        """Return the steps that the reference took, too."""
        taken = self.reference.steps
        return [(e, taken[e.position]) for e in self.steps if e.position in taken]

    def _clipped(self) -> Iterator[_Row]:
        """Yield what the optimizer stepped with, from the same reduced gradient."""
        ranks = len(self.tapes)
        for e, theirs in self._taken():
            untouched = self._row(e.position, theirs.clipped, e.reduced).beyond is None

            def causes(found: Difference, *, untouched: bool = untouched) -> list[Named]:
                detail = f"the optimizer gets another part of the same gradient than on one process{_as_factor(found)}"
                again = untouched and math.isclose((found.factor or 0) * ranks, 1, rel_tol=1e-3)
                divided = ("double division", f"{detail}; it is divided by the {ranks} ranks once more")
                return [divided if again else ("unexplained", detail)]

            yield self._row(e.position, e.step.clipped, theirs.clipped, causes=causes)

    def _update(self) -> Iterator[_Row]:
        """Yield what the optimizer adds to the weights, and the options that it does so with."""
        for e, theirs in self._taken():
            before, steps = e.step.before, [e.step, *e.others]
            drifted = self._drift(e.position, "is not the same on all ranks after the step", [s.after for s in steps])
            known = [*self._options(e, theirs), *drifted]
            same = self._row(e.position, e.step.clipped, theirs.clipped).beyond is None
            detail = "the same gradient, with the same options, makes another update"
            unknown = _showing("unexplained", _with_factor(detail)) if same and not known else _unsaid
            updates = ({key: after[key] - before[key] for key in before} for after in (e.step.after, theirs.after))
            yield from known
            yield self._row(e.position, *updates, slack=before, causes=unknown)

    def _options(self, e: Evidence, theirs: Step) -> list[_Row]:
        """Return an option of the optimizer that is not the same on all ranks, or on one process."""
        mine, alone = _options(e.step), _options(theirs)
        unlike = [
            ("different optimizers", f"{{0}} is {{1}} on rank 0 and {{2}} on rank {rank}", *each)
            for rank, other in enumerate(e.others, 1)
            for each in _unlike(mine, _options(other))
        ]
        if not self.facts.told.scales_rates:
            unlike += [(*_OF_ONE_PROCESS.get(each[0], _OF_ANY_OPTION), *each) for each in _unlike(mine, alone)]
        return [
            _Row(
                *(e.position, {name: _number(found, 1)}, {name: _number(expected, 2)}),
                causes=_showing(cause, _with_factor(detail.format(name, found, expected))),
            )
            for cause, detail, name, found, expected in unlike[:1]
        ]

    def _buffers(self) -> Iterator[_Row]:
        """Yield the buffers after every window: beside what one process makes of them, or else beside those before."""
        for act in self.reference.acts:
            mine, known = self.tapes[0].steps[act.steps[-1]].buffers, {} if act.unsteady else act.state
            row = self._beside(act, mine, known or act.calls[0].state)
            if row.beyond is None:
                yield row
                continue
            name, several = row.beyond.name, len(act.calls) > len(self.tapes)
            norm = f"{name.rpartition('.')[0]}.running_var" in mine
            if not known or (several and not norm):  # of which micro-batch one process would keep it, is not known
                self.remarks[f"what one process makes of the buffer {name} is not known"] = None
                continue
            of_rank = self._beside(act, mine, act.state_of_rank).beyond is None
            made = "what rank 0 makes of its own samples, not what one process makes of all"
            cases = [
                ("batch norm", f"is {made}", norm),
                ("buffers of one rank", f"is {made}", of_rank),
                ("unexplained", "is not what one process makes of all", True),
            ]
            cause, detail, _ = next(case for case in cases if case[-1])
            yield replace(row, causes=_showing(cause, _naming(detail)))

    def _beside(self, act: Act, mine: Tensors, state: Mapping[str, Any]) -> _Row:
        expected = {name: state.get(name, buffer) for name, buffer in mine.items()}
        return self._row(act.steps[-1], mine, expected, loose=True)

    def _random(self) -> Stage:
        name, parts = "random state", [part for act in self.reference.acts for part in act.parts]
        drawn = any(part.mode.draws for part in parts)
        if not drawn and not any(part.host for part in parts):
            return Stage(name, "equal", note="no random numbers were drawn")
        layers = list(dict.fromkeys(layer for part in parts for layer in part.layers)) or ["training_step"]
        states = [digest(call.random) for call in self.reference.acts[0].calls]
        same = len(states) > 1 and len(set(states)) == 1 and drawn
        noise = "; all ranks begin from the same random state, so their noise is the same" * same
        more = f" and {len(layers) - _NAMED} more" * (len(layers) > _NAMED)
        where = ", ".join(layers[:_NAMED]) + more
        detail = f"random numbers are drawn in {where}; one process drew the same for each sample{noise}"
        self.findings.append(Finding("stochastic", name, detail))
        return Stage(name, "note", note=detail)


def _rank(finding: Finding) -> tuple[Any, ...]:
    # What leaves the gradients of the batches alone does not lead.
    step, order = -1 if finding.step is None else finding.step, list(CAUSES).index(finding.cause)
    return not finding.is_difference, finding.cause == "data order", step, STAGES.index(finding.stage), order


def _fit(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Return whether the parts' rows are those of the whole."""
    return all(part.shape[1:] == whole.shape[1:] for part in parts) and sum(map(len, parts)) == len(whole)


def _named(losses: Mapping[str, float], call: Call) -> Tensors:
    return {f"loss {key} (rank {call.rank})": torch.tensor(loss) for key, loss in losses.items()}


def _naming(detail: str) -> Callable[[Difference], str]:
    return lambda found: f"{found.name} {detail}"


def _with_factor(detail: str) -> Callable[[Difference], str]:
    return lambda found: detail + _as_factor(found)


def _as_factor(found: Difference) -> str:
    return "" if found.factor is None else f": {times(found.factor)} it"


def _options(step: Step) -> dict[str, Any]:
    """Return the options of an optimizer's groups by name, numbers as floats."""
    groups = [
        {f"{name} of group {index}": value for name, value in group.items()} for index, group in enumerate(step.groups)
    ]
    named = {name.removesuffix(" of group 0"): _as_float(value) for group in groups for name, value in group.items()}
    return {"the optimizer": step.kind, **named}


def _as_float(value: Any) -> Any:
    return float(value) if isinstance(value, (float, int, Tensor)) and not isinstance(value, bool) else value


def _unlike(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    both = [(name, value, theirs.get(name)) for name, value in mine.items()]
    return [each for each in both if digest(each[1]) != digest(each[2])]


def _number(value: Any, size: int) -> Tensor:
    """Return an option as what is compared; of one that is no number, as many zeros: of other sizes, they differ."""
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.zeros(size)
