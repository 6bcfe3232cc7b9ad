"""The comparison of what the ranks recorded with what one process computed: stages, findings, report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.verify.causes import CAUSES
from lightning_gradavg.verify.compare import Difference, Tolerance, apart, differences, is_rounding
from lightning_gradavg.verify.evidence import Evidence
from lightning_gradavg.verify.record import Step, Tape, Tensors
from lightning_gradavg.verify.reference import Reference, StepOfReference, Stream
from lightning_gradavg.verify.report import STAGES, Finding, Report, Stage, times
from lightning_gradavg.verify.rows import digest

__all__ = ["judge", "not_shown"]

_SEVERAL_LOSSES = "the optimizer asks for the loss several times in a step, of which the first was compared"


def judge(tapes: Sequence[Tape], reference: Reference, tolerance: Tolerance, stream: Stream | None) -> Report:
    """Return how a run on several processes differs from its reference, and why.

    Args:
        tapes: What the ranks recorded, in rank order.
        reference: What one process found on the same samples.
        tolerance: What rounding stays below.
        stream: What one process with the same configuration reads; None if that is not part of the question.

    Raises:
        ValueError: If the tapes are not those of all ranks of one world.
    """
    world = [(tape.rank, tape.world_size) for tape in tapes]
    if world != [(rank, len(tapes)) for rank in range(len(tapes))]:
        raise ValueError(f"tapes must be those of all ranks in rank order, got (rank, world size) {world}")
    return _Judge(tapes, reference, tolerance, stream).report()


def not_shown(reason: str, tapes: Sequence[Tape] = ()) -> Report:
    """Return the report of a run that could not be compared at all."""
    names = [(tape.facts.strategy, tape.facts.told.rule.name) for tape in tapes] or [("", "")]
    stages = [Stage(name, "not compared") for name in STAGES]
    return Report(*names[0], len(tapes), 0, "one process", math.nan, stages, [], remarks=[reason])


@dataclass(frozen=True)
class _Row:
    """What is compared in one step."""

    step: int
    found: Tensors  # what the run has
    expected: Tensors  # what one process has
    loose: bool = False  # a batch is compared with its parts, or the difference has the pattern of rounding
    slack: Tensors | None = None  # what both were computed from by subtraction

    @classmethod
    def of(cls, step: int, sides: Iterable[Tensors], **options: Any) -> _Row:
        """Return a row of both sides."""
        found, expected = sides
        return cls(step, found, expected, **options)


class _Judge:
    def __init__(
        self, tapes: Sequence[Tape], reference: Reference, tolerance: Tolerance, stream: Stream | None
    ) -> None:
        self.tapes, self.reference, self.tolerance = tapes, reference, tolerance
        self.stream, self.facts = stream, tapes[0].facts
        self.findings: list[Finding] = []
        acts = [(examined, position) for examined in reference.acts for position in examined.act.steps]
        self.steps = [Evidence(tapes, position, examined, tolerance) for examined, position in acts]
        self.remarks = dict.fromkeys([*(tape.problem for tape in tapes if tape.problem), *self._foreseen()])
        self.right: set[int] = set()  # steps whose gradient is that of one process
        self.gradients: dict[str, list[float]] = {}

    def report(self) -> Report:
        """Go through the stages, and put together what was found."""
        reduced = self._reduced()  # first: what comes before it does not matter where it is right
        stages = [
            self._initial(),
            self._samples(),
            self._before("outputs", self._outputs()),
            self._before("loss", self._losses()),
            self._before("local gradients", self._locals()),
            reduced,
            self._clipped(),
            self._update(),
            self._buffers(),
            self._random(),
        ]
        kept: dict[str, Finding] = {}
        for finding in sorted(self.findings, key=_rank):
            kept.setdefault(finding.cause, finding)
        advice: dict[str, Any] = {
            name: CAUSES[name].advice_for(finding.detail, self.facts.strategy) for name, finding in kept.items()
        }
        replicas = self.facts.told.replicas
        reference = (
            f"DataParallel over {replicas} replicas" if replicas else "one process on the global batches of the run"
        )
        return Report(
            *(self.facts.strategy, self.facts.told.rule.name, len(self.tapes), len(self.steps)),
            *(f"{reference}, each step from the run's own state", self.tolerance.exact, stages),
            *([replace(finding, **advice[name]) for name, finding in kept.items()], self.gradients, list(self.remarks)),
        )

    def _add(self, cause: str, stage: str, detail: str, step: int | None, found: Difference | None = None) -> None:
        self.findings.append(Finding(cause, stage, detail, step, found))

    def _foreseen(self) -> Iterator[str]:
        """Yield what is taken for granted, and what is known of steps beyond those that were compared."""
        facts, numbers = self.facts, [len(tape.steps) for tape in self.tapes]
        if len(set(numbers)) > 1:
            detail = f"the ranks took different numbers of optimizer steps: {', '.join(map(str, numbers))}"
            self._add("unsynchronised replicas", "reduced gradient", detail, None)
        for examined in self.reference.acts:
            if examined.unsteady:
                yield f"training_step changed {examined.unsteady} between calls: from one state it gives two results"
            if examined.split.own:
                names = ", ".join(examined.split.own)
                yield f"the loss depends on what every micro-batch has for itself, and one process has once: {names}"
        if any(e.step.evaluations > 1 for e in self.steps):
            yield _SEVERAL_LOSSES
        rest = facts.epoch_batches % facts.window if math.isfinite(facts.epoch_batches) else 0
        seen = any(e.step.batches[1] - e.step.batches[0] < facts.window for e in self.steps)
        if rest and facts.stock and facts.automatic and not seen:
            yield (
                f"the last window of an epoch was not among the steps: it has {rest:g} of {facts.window} micro-batches,"
                f" and {facts.strategy} divides it by {facts.window} all the same; GradAvgStrategy does not"
            )

    def _measured(self, row: _Row) -> list[Difference]:
        """Return the differences of a row; those that are rounding at most as large as the tolerance."""
        exact, limit = self.tolerance.exact, self.tolerance.loose if row.loose else 0.0
        found = differences(row.found, row.expected, exact, self.facts.dtypes, row.slack)
        return [replace(each, relative=min(each.relative, exact)) if each.relative <= limit else each for each in found]

    def _beyond(self, row: _Row) -> Difference | None:
        """Return the first difference of a row, with a factor only if all that differ have the same."""
        beyond = [each for each in self._measured(row) if each.relative > self.tolerance.exact]
        known = [each.factor for each in beyond if each.factor is not None]
        same = len(known) == len(beyond) > 0 and math.isclose(max(known), min(known), rel_tol=1e-3)
        return replace(beyond[0], factor=beyond[0].factor if same else None) if beyond else None

    def _stage(self, name: str, rows: Sequence[_Row], missing: str = "") -> Stage:
        """Return a stage from what was compared in the steps, and from what was found in another way."""
        measured = [(row.step, each) for row in rows for each in self._measured(row)]
        beyond = [pair for pair in measured if pair[1].relative > self.tolerance.exact]
        told = [each for each in self.findings if each.stage == name and not each.note]
        if beyond:
            return Stage(name, "differs", *beyond[0])
        if told:
            return Stage(name, "differs", told[0].step, told[0].difference, told[0].detail)
        largest = max((each for _, each in measured), key=lambda each: each.relative, default=None)
        return (
            Stage(name, "not compared", note=missing) if missing and not rows else Stage(name, "equal", None, largest)
        )

    def _before(self, name: str, rows: Sequence[_Row]) -> Stage:
        """Return a stage before the reduced gradient, which is not needed where that is right."""
        stage = self._stage(name, rows, "told by the gradient of all samples")
        if stage.status == "not compared" or stage.step in self.right:
            return replace(stage, status="not needed", note=stage.note or "the gradient is right all the same")
        return stage

    def _drifted(self, e: Evidence, stage: str, name: str, detail: str) -> _Row | None:
        """Return what is not the same on all ranks, which is a finding."""
        others = (apart(getattr(e.step, name), getattr(other, name)) for other in e.others)
        found = next((each for each in others if each is not None), None)
        if found is None:
            return None
        self._add("unsynchronised replicas", stage, f"{found.name} {detail}", e.position, found)
        return _Row.of(e.position, ({found.name: torch.tensor(value)} for value in (found.found, found.expected)))

    def _initial(self) -> Stage:
        name, first = "initial weights", self.tapes[0].initial
        drifted = next((each for tape in self.tapes[1:] if (each := apart(first, tape.initial)) is not None), None)
        if drifted is not None:
            detail = f"{drifted.name} is not the same on all ranks when training begins"
            self._add("unsynchronised replicas", name, detail, 0, drifted)
        row = _Row(0, first, self.reference.initial or first)
        found = self._beyond(row)
        if found is not None:
            detail = f"{found.name} begins with other values than on one process; the reference took the run's"
            self._add(name, name, detail, 0, found)
        return self._stage(name, [row])

    def _samples(self) -> Stage:
        """Compare what was read: samples read by all ranks or twice, and the order of one process."""
        name, windows = (
            "samples",
            [(e.position, self._read_in(e)) for e in self.steps if e.position == e.examined.act.steps[0]],
        )
        self._find_duplicated()
        self._find_padded(windows)
        differs = self._stage(name, [])
        if differs.status == "differs":
            return differs
        if self.stream is None:
            return replace(differs, note="no sample is read twice; the order of one process was not asked for")
        return self._order(windows, self.stream)

    def _read_in(self, e: Evidence) -> list[bytes]:
        counted, numbers = {(piece.rank, piece.batch) for piece in e.pieces}, range(*e.step.batches)
        return [s for tape in self.tapes for n in numbers if (tape.rank, n) in counted for s in tape.batches[n].samples]

    def _epoch(self, step: int) -> int:
        return self.tapes[0].batches[self.tapes[0].steps[step].batches[0]].epoch

    def _find_duplicated(self) -> None:
        reads = [tuple(sample for batch in tape.batches for sample in batch.samples) for tape in self.tapes]
        # Where one process sees equal samples, too, they are equal and not read twice.
        there = Counter(s for _, samples in (self.stream.batches if self.stream is not None else ()) for s in samples)
        if len(reads) > 1 and reads[0] and len(set(reads)) == 1 and not Counter(reads[0] * len(reads)) <= there:
            detail = f"all {len(reads)} ranks read the same samples in the same order: the global batch is one rank's"
            self._add("duplicated stream", "samples", detail, 0)

    def _find_padded(self, windows: Sequence[tuple[int, list[bytes]]]) -> None:
        """Find samples that the sampler repeats, where the end of an epoch was recorded."""
        for epoch in sorted({self._epoch(step) for step, _ in windows}) if self.facts.padded else ():
            of_epoch = [(step, read) for step, read in windows if self._epoch(step) == epoch]
            here = Counter(sample for _, read in of_epoch for sample in read)
            number, again = here.total(), here.total() - len(here)
            if again and sum(batch.epoch == epoch for batch in self.tapes[0].batches) >= self.facts.epoch_batches:
                detail = f"{again} of {number} samples are trained on twice in epoch {epoch}, to fill the ranks"
                self._add("padding", "samples", detail, of_epoch[-1][0])
                return
        if self.facts.padded:
            text = f"the end of an epoch was not among the steps: there the sampler repeats {self.facts.padded} samples"
            self.remarks[f"{text}, to fill the ranks; GradAvgStrategy(split_batches=True) repeats none"] = None

    def _order(self, windows: Sequence[tuple[int, list[bytes]]], stream: Stream) -> Stage:
        """Find the first global batch that is not what one process reads at that place of its epoch."""
        name, taken, shuffled = "samples", Counter[int](), self.facts.shuffles or stream.shuffles
        known = {sample for _, samples in stream.batches for sample in samples}
        for step, here in windows:
            epoch = self._epoch(step)
            read = [sample for at, samples in stream.batches if at == epoch for sample in samples]
            there = Counter(read[taken[epoch] : taken[epoch] + len(here)])
            taken[epoch] += len(here)
            if Counter(here) == there:
                continue
            if not known & set(here) and not shuffled:
                note = "no sample is one that one process reads: they may be transformed at random"
                return Stage(name, "not compared", step, note=note)
            why = (
                "; a sampler shuffles them, and deals another order to another number of processes" if shuffled else ""
            )
            shared = (Counter(here) & there).total()
            detail = (
                f"{shared} of the {len(here)} samples of a global batch are those that one process trains on then{why}"
            )
            self.findings.append(Finding("data order", name, detail, step, note=shuffled))
            return Stage(name, "note" if shuffled else "differs", step, note=detail)
        return Stage(name, "equal")

    def _outputs(self) -> list[_Row]:
        """Return the outputs of every sample beside its rank's samples, and beside all."""
        rows = []
        for examined in self.reference.acts if not self.facts.step_end else ():
            for split in (examined.split, *(examined.halves if examined.split.whole is None else ())):
                whole = split.whole.outputs if split.whole is not None and not examined.unsteady else {}
                of_parts = {name: [part.outputs.get(name) for part in split.common] for name in whole}
                joined = {name: torch.cat(each) for name, each in of_parts.items() if _fit(each, whole[name])}
                rows.append(_Row(examined.act.steps[0], joined, {name: whole[name] for name in joined}, loose=True))
        return [row for row in rows if row.found]

    def _losses(self) -> list[_Row]:
        """Return the loss of every micro-batch on its rank, and on one process."""
        both = [
            (e.position, piece, part.losses)
            for e in self.steps
            for piece, part in zip(e.pieces, e.examined.parts, strict=True)
            if part.losses and piece.call.losses.keys() == part.losses.keys()
            if not (self.facts.whole_only or e.examined.unsteady)
        ]
        return [
            _Row.of(step, ({f"loss {k} (rank {piece.rank})": torch.tensor(each[k]) for k in alone} for each in sides))
            for step, piece, alone in both
            for sides in [(piece.call.losses, alone)]
        ]

    def _locals(self) -> list[_Row]:
        """Return the gradient of every micro-batch on its rank, and on one process."""
        rows = []
        for e in self.steps:
            for piece, pair in zip(e.pieces, e.pairs if not e.examined.unsteady else (), strict=False):
                if pair is not None:
                    sides = ({f"{name} (rank {piece.rank})": each for name, each in side.items()} for side in pair)
                    rounding = is_rounding(e.flat(pair[0]), e.flat(pair[1]), (), self.tolerance)
                    rows.append(_Row.of(e.position, sides, loose=rounding))
        return rows

    def _reduced(self) -> Stage:
        """Compare the reduced gradient with the one that one process expects."""
        rows = [self._reduced_in(e) for e in self.steps]
        stage = self._stage("reduced gradient", [row for row in rows if isinstance(row, _Row)])
        missing = [row for row in rows if isinstance(row, str)]
        if missing and stage.status == "equal":
            self.remarks[missing[0]] = None
            return Stage("reduced gradient", "not compared", note=missing[0])
        return stage

    def _reduced_in(self, e: Evidence) -> _Row | str:
        """Return what is compared in a step, or why nothing is, and add what is found."""
        name = "reduced gradient"
        drifted = self._drifted(e, name, "before", "is not the same on all ranks before the step")
        drifted = drifted or self._drifted(e, name, "reduced", "has another gradient on every rank: it was not reduced")
        if drifted is not None or e.examined.unsteady or e.expected.gradient is None:
            return drifted or e.expected.problem or "training_step does not give the same result twice"
        row = _Row(e.position, e.reduced, e.expected.gradient)
        for each in self._measured(row):
            self.gradients.setdefault(each.name, [0.0] * e.position).append(each.relative)
        found = self._beyond(row)
        if found is None or e.is_expected:
            self.right.add(e.position)
            return replace(row, loose=True)
        if e.split.own:
            return f"the gradient depends on what one process has once: {', '.join(e.split.own)}"
        for cause, detail in e.causes():
            self._add(cause, name, detail, e.position, found)
        return row

    def _taken(self) -> Iterator[tuple[Evidence, StepOfReference]]:
        """Yield the steps that the reference took, too."""
        for e in self.steps:
            theirs = self.reference.steps.get(e.position)
            if theirs is not None and theirs.after:
                yield e, theirs

    def _clipped(self) -> Stage:
        """Compare what the optimizer stepped with, from the same reduced gradient."""
        name, rows, ranks = "clipped gradient", [], len(self.tapes)
        for e, theirs in self._taken():
            rows.append(_Row(e.position, e.step.clipped, theirs.clipped))
            found = self._beyond(rows[-1])
            if found is not None:
                untouched = self._beyond(_Row(e.position, theirs.clipped, e.reduced)) is None
                again = untouched and math.isclose((found.factor or 0) * ranks, 1, rel_tol=1e-3)
                more = f"; it is divided by the {ranks} ranks once more" if again else ""
                detail = (
                    f"the optimizer gets another part of the same gradient than on one process{_as_factor(found)}{more}"
                )
                self._add("double division" if again else "unexplained", name, detail, e.position, found)
        return self._stage(name, rows, _SEVERAL_LOSSES)

    def _update(self) -> Stage:
        """Compare what the optimizer adds to the weights, and the options that it does so with."""
        name, rows = "optimizer update", []
        for e, theirs in self._taken():
            before = e.step.before
            updates = [{key: each[key] - before[key] for key in before} for each in (e.step.after, theirs.after)]
            row = self._drifted(e, name, "after", "is not the same on all ranks after the step")
            rows.append(row or _Row.of(e.position, updates, slack=before))
            found, told = self._beyond(rows[-1]), len(self.findings)
            self._compare_options(e, theirs)
            same = self._beyond(_Row(e.position, e.step.clipped, theirs.clipped)) is None
            if row is None and found is not None and same and told == len(self.findings):
                detail = f"the same gradient, with the same options, makes another update{_as_factor(found)}"
                self._add("unexplained", name, detail, e.position, found)
        return self._stage(name, rows, _SEVERAL_LOSSES)

    def _compare_options(self, e: Evidence, theirs: StepOfReference) -> None:
        """Find an option of the optimizer that is not the same on all ranks, or on one process."""
        name, mine = "optimizer update", _options(e.step)
        for rank, other in enumerate(e.others, 1):
            for option, here, there in _unlike(mine, _options(other)):
                detail = f"{option} is {here} on rank 0 and {there} on rank {rank}"
                return self._add("different optimizers", name, detail, e.position)
        alone = _options(replace(e.step, groups=theirs.groups))
        for option, here, there in _unlike(mine, alone) if not self.facts.told.scales_rates else ():
            numbers = isinstance(here, float) and isinstance(there, float) and there != 0
            found = Difference(option, abs(here / there - 1), math.nan, here, there, here / there) if numbers else None
            label, cause = (
                ("the learning rate", "learning-rate scale") if option == "lr" else (option, "optimizer options")
            )
            detail = f"{label} is {here}, on one process {there}{_as_factor(found)}"
            return self._add(cause, name, detail, e.position, found)
        return None

    def _buffers(self) -> Stage:
        """Compare the buffers after every window."""
        name, rows = "buffers", []
        for examined in self.reference.acts:
            position, pieces = examined.act.steps[-1], examined.act.pieces
            mine, before = self.tapes[0].steps[position].buffers, self.tapes[0].state_at(pieces[0].batch, 0)
            row, of_rank, unchanged = (
                _Row(position, mine, {key: state.get(key, each) for key, each in mine.items()}, loose=True)
                for state in (examined.state, examined.state_of_rank, before)
            )
            changed, found = self._beyond(unchanged), self._beyond(row)
            norm = found is not None and found.name.rpartition(".")[0] + ".running_var" in mine
            known = examined.state and not examined.unsteady
            unknown = changed if not known else found if not norm and len(pieces) > len(self.tapes) else None
            if unknown is not None:
                self.remarks[f"what one process makes of the buffer {unknown.name} is not known"] = None
                continue
            rows.append(row if known else unchanged)
            if known and found is not None:
                followed = self._beyond(of_rank) is None
                cause = "batch norm" if norm else "buffers of one rank" if followed else "unexplained"
                made = "what rank 0 makes of its own samples, not" if followed or norm else "not"
                self._add(cause, name, f"{found.name} is {made} what one process makes of all", position, found)
        return self._stage(name, rows, "they change, and what one process makes of them is not known")

    def _random(self) -> Stage:
        name, parts = "random state", [part for examined in self.reference.acts for part in examined.parts]
        drawn = any(part.mode.draws for part in parts)
        if not drawn and not any(part.host for part in parts):
            return Stage(name, "equal", note="no random numbers were drawn")
        layers = dict.fromkeys(layer for part in parts for layer in part.layers)
        states = [digest(piece.call.random) for piece in self.reference.acts[0].act.pieces]
        same = len(states) > 1 and len(set(states)) == 1 and drawn
        noise = "; all ranks begin from the same random state, so their noise is the same" if same else ""
        where = ", ".join(layers) or "training_step"
        detail = f"random numbers are drawn in {where}; one process drew the same for each sample{noise}"
        self._add("stochastic", name, detail, None)
        return Stage(name, "note", note=detail)


def _rank(finding: Finding) -> tuple[Any, ...]:
    """Return what findings are sorted by: what leaves the gradients of the batches alone does not lead."""
    step, order = -1 if finding.step is None else finding.step, list(CAUSES).index(finding.cause)
    return not finding.is_difference, finding.cause == "data order", step, STAGES.index(finding.stage), order


def _fit(parts: Sequence[Tensor | None], whole: Tensor) -> bool:
    """Return whether the parts' rows are those of the whole."""
    known = [part for part in parts if part is not None and part.shape[1:] == whole.shape[1:]]
    return len(known) == len(parts) and sum(map(len, known)) == len(whole)


def _as_factor(found: Difference | None) -> str:
    return "" if found is None or found.factor is None else f": {times(found.factor)} it"


def _options(step: Step) -> dict[str, Any]:
    """Return the options of an optimizer's groups by name, numbers as floats."""
    found: dict[str, Any] = {"the optimizer": step.kind}
    for index, group in enumerate(step.groups):
        for name, value in group.items():
            plain = isinstance(value, (int, float)) and not isinstance(value, bool)
            number = plain or (isinstance(value, Tensor) and value.ndim == 0)
            found[f"{name} of group {index}" if index else name] = float(value) if number else value
    return found


def _unlike(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in mine:
        if digest(mine[name]) != digest(theirs.get(name)):
            yield name, mine[name], theirs.get(name)
