"""The comparison of what the ranks recorded with what one process computed: stages, findings, report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.verify.causes import CAUSES
from lightning_gradavg.verify.compare import Difference, Tolerance, apart, differences, is_rounding
from lightning_gradavg.verify.evidence import Evidence
from lightning_gradavg.verify.record import Tape, Tensors
from lightning_gradavg.verify.reference import Reference, Stream
from lightning_gradavg.verify.report import STAGES, Finding, Report, Stage, times
from lightning_gradavg.verify.rows import digest

__all__ = ["judge", "not_shown"]


def judge(
    tapes: Sequence[Tape], reference: Reference, tolerance: Tolerance, *, stream: Stream | None, order_asked: bool
) -> Report:
    """Return how a run on several processes differs from its reference, and why.

    Args:
        tapes: What the ranks recorded, in rank order.
        reference: What one process found on the same samples.
        tolerance: What rounding stays below.
        stream: What one process with the same configuration reads; None if it is not known.
        order_asked: Whether the order of samples is part of the question.

    Raises:
        ValueError: If the tapes are not those of all ranks of one world.
    """
    world = [(tape.rank, tape.world_size) for tape in tapes]
    if world != [(rank, len(tapes)) for rank in range(len(tapes))]:
        raise ValueError(f"tapes must be those of all ranks in rank order, got (rank, world size) {world}")
    return _Judge(tapes, reference, tolerance, stream, order_asked=order_asked).report()


def not_shown(reason: str, tapes: Sequence[Tape] = ()) -> Report:
    """Return the report of a run that could not be compared at all."""
    strategy, reduction = (tapes[0].facts.strategy, tapes[0].facts.reduction) if tapes else ("", "")
    stages = [Stage(name, "not compared") for name in STAGES]
    return Report(strategy, reduction, len(tapes), 0, "one process", math.nan, stages, [], remarks=[reason])


@dataclass(frozen=True)
class _Row:
    """What is compared in one step.

    Attributes:
        step: The step.
        found: What the run has.
        expected: What one process has.
        slack: What both were computed from by subtraction.
        loose: Whether a batch is compared with its parts, which round otherwise.
    """

    step: int
    found: Tensors
    expected: Tensors
    slack: Tensors | None = None
    loose: bool = False


class _Judge:
    def __init__(
        self,
        tapes: Sequence[Tape],
        reference: Reference,
        tolerance: Tolerance,
        stream: Stream | None,
        *,
        order_asked: bool,
    ) -> None:
        self.tapes, self.reference, self.tolerance, self.stream = tapes, reference, tolerance, stream
        self.order_asked, self.facts = order_asked, tapes[0].facts
        self.findings: list[Finding] = []
        self.remarks: dict[str, None] = dict.fromkeys(tape.problem for tape in tapes if tape.problem is not None)
        self.steps = [
            Evidence(tapes, position, examined, tolerance)
            for examined in reference.acts
            for position in examined.act.steps
        ]
        self.right: set[int] = set()  # steps whose gradient is that of one process
        self.gradients: dict[str, list[float]] = {}

    def report(self) -> Report:
        """Go through the stages, and put together what was found."""
        self._foresee()
        reduced = self._reduced()  # first: what comes before it does not matter where it is right
        of_ranks = "the reduction makes the right gradient of it"
        stages = [
            self._initial(),
            self._samples(),
            self._before("outputs", self._outputs(), "the gradient is right all the same"),
            self._before("loss", self._losses(), of_ranks),
            self._before("local gradients", self._locals(), of_ranks),
            reduced,
            self._clipped(),
            self._update(),
            self._buffers(),
            self._random(),
        ]
        replicas = self.facts.replicas
        what = (
            "one process on the global batches of the run"
            if replicas is None
            else f"DataParallel over {replicas} replicas"
        )
        return Report(
            self.facts.strategy,
            self.facts.reduction,
            len(self.tapes),
            len(self.steps),
            f"{what}, each step from the run's own state",
            self.tolerance.exact,
            stages,
            self._merged(),
            self.gradients,
            list(self.remarks),
        )

    def _merged(self) -> list[Finding]:
        """Keep the first finding of every cause, the first step to part first, and add the advice."""
        order = list(CAUSES)

        def rank(finding: Finding) -> tuple[Any, ...]:
            # What leaves the gradients of the batches alone does not lead.
            of_data, step = finding.cause == "data order", -1 if finding.step is None else finding.step
            return not finding.is_difference, of_data, step, STAGES.index(finding.stage), order.index(finding.cause)

        kept: dict[str, Finding] = {}
        for finding in sorted(self.findings, key=rank):
            kept.setdefault(finding.cause, finding)
        return [
            replace(finding, **CAUSES[name].advice_for(finding.detail, self.facts.strategy))
            for name, finding in kept.items()
        ]

    def _add(
        self, cause: str, stage: str, detail: str, step: int | None, difference: Difference | None = None, **more: Any
    ) -> None:
        self.findings.append(Finding(cause, stage, detail, step, difference, **more))

    def _measured(self, row: _Row) -> list[Difference]:
        """Return the differences of a row; those that are rounding at most as large as the tolerance."""
        exact = self.tolerance.exact
        found = differences(row.found, row.expected, exact, self.facts.dtypes, row.slack)
        limit = self.tolerance.loose if row.loose else exact
        return [replace(each, relative=min(each.relative, exact)) if each.relative <= limit else each for each in found]

    def _stage(self, name: str, rows: Sequence[_Row], missing: str) -> Stage:
        """Return a stage from what was compared in the steps."""
        if not rows:
            return Stage(name, "not compared", note=missing)
        measured = [(row.step, self._measured(row)) for row in rows]
        beyond = [(step, each) for step, found in measured for each in found if each.relative > self.tolerance.exact]
        if beyond:
            return Stage(name, "differs", *beyond[0])
        largest = max((each for _, found in measured for each in found), key=lambda each: each.relative, default=None)
        return Stage(name, "equal", difference=largest)

    def _before(self, name: str, rows: Sequence[_Row], why: str) -> Stage:
        """Return a stage before the reduced gradient, which is not needed where that is right."""
        stage = self._stage(name, rows, "")
        if stage.status == "not compared" or (stage.status == "differs" and stage.step in self.right):
            note = why if rows else "told by the gradient of all samples"
            return replace(stage, status="not needed", note=note)
        return stage

    def _beyond(self, row: _Row) -> Difference | None:
        """Return the first difference of a row, with a factor only if all that differ have the same."""
        beyond = [each for each in self._measured(row) if each.relative > self.tolerance.exact]
        known = [each.factor for each in beyond if each.factor is not None]
        same = known and len(known) == len(beyond) and max(known) - min(known) <= 1e-3 * abs(known[0])
        return (beyond[0] if same else replace(beyond[0], factor=None)) if beyond else None

    def _apart(self, e: Evidence, stage: str, of: Callable[[Any], Tensors], detail: str) -> Difference | None:
        """Return the first tensor that is not the same on all ranks, which is a finding."""
        drifted = next((found for other in e.others if (found := apart(of(e.step), of(other))) is not None), None)
        if drifted is not None:
            self._add("unsynchronised replicas", stage, f"{drifted.name} {detail}", e.position, drifted)
        return drifted

    def _foresee(self) -> None:
        """Say what is taken for granted, and what is known of steps beyond those that were compared."""
        facts, numbers = self.facts, [len(tape.steps) for tape in self.tapes]
        if len(set(numbers)) > 1:
            detail = f"the ranks took different numbers of optimizer steps: {', '.join(map(str, numbers))}"
            self._add("unsynchronised replicas", "reduced gradient", detail, None)
        for examined in self.reference.acts:
            if examined.unsteady:
                text = f"training_step changed {examined.unsteady} between calls: from one state it gives two results"
                self.remarks[text] = None
            if examined.split.own:
                names = ", ".join(examined.split.own)
                text = (
                    f"the loss depends on what every rank or micro-batch has for itself, and one process once: {names}"
                )
                self.remarks[text] = None
        if any(e.step.evaluations > 1 for e in self.steps):
            self.remarks["the optimizer asks for the loss several times in a step, of which the first was compared"] = (
                None
            )
        rest = facts.epoch_batches % facts.window if math.isfinite(facts.epoch_batches) else 0
        seen = any(e.step.batches[1] - e.step.batches[0] < facts.window for e in self.steps)
        if rest and facts.told is None and facts.automatic and not seen:
            text = (
                f"the last window of an epoch was not among the steps: it has {rest:g} of {facts.window} micro-batches, and"
                f" {facts.strategy} divides it by {facts.window} all the same; GradAvgStrategy does not"
            )
            self.remarks[text] = None

    def _initial(self) -> Stage:
        name, first = "initial weights", self.tapes[0].initial
        drifted = next((found for tape in self.tapes[1:] if (found := apart(first, tape.initial)) is not None), None)
        if drifted is not None:
            detail = f"{drifted.name} is not the same on all ranks when training begins"
            self._add("unsynchronised replicas", name, detail, 0, drifted)
            return Stage(name, "differs", 0, drifted, detail)
        if not self.reference.initial:
            return Stage(name, "equal", note="the same on all ranks")
        row = _Row(0, first, self.reference.initial)
        found = self._beyond(row)
        if found is not None:
            detail = f"{found.name} begins with other values than on one process; the reference took the run's"
            self._add(name, name, detail, 0, found)
        return self._stage(name, [row], "")

    def _samples(self) -> Stage:
        """Compare what was read: samples read by all ranks or twice, and the order of one process."""
        name, before = "samples", len(self.findings)
        windows = [(e.position, self._read_in(e)) for e in self.steps if e.position == e.examined.act.steps[0]]
        self._find_duplicated(windows)
        self._find_padded(windows)
        for found in self.findings[before:]:
            return Stage(name, "differs", found.step, note=found.detail)
        if not self.order_asked:
            return Stage(name, "equal", note="no sample is read twice; the order of one process was not asked for")
        if self.stream is None:
            return Stage(name, "not compared", note="what one process reads is not known")
        return self._order(windows, self.stream)

    def _read_in(self, e: Evidence) -> list[bytes]:
        counted = {(piece.rank, piece.batch) for piece in e.pieces}
        numbers = range(*e.step.batches)
        return [s for tape in self.tapes for n in numbers if (tape.rank, n) in counted for s in tape.batches[n].samples]

    def _epoch(self, step: int) -> int:
        return self.tapes[0].batches[self.tapes[0].steps[step].batches[0]].epoch

    def _find_duplicated(self, windows: Sequence[tuple[int, list[bytes]]]) -> None:
        reads = [tuple(sample for batch in tape.batches for sample in batch.samples) for tape in self.tapes]
        stream = self.stream.batches if self.stream is not None else ()
        # Where one process sees equal samples, too, they are equal and not read twice.
        there = Counter(sample for _, samples in stream for sample in samples)
        if len(reads) > 1 and reads[0] and len(set(reads)) == 1 and not Counter(sum(reads, ())) <= there:
            detail = f"all {len(reads)} ranks read the same samples in the same order: the global batch is one rank's"
            self._add("duplicated stream", "samples", detail, 0)

    def _find_padded(self, windows: Sequence[tuple[int, list[bytes]]]) -> None:
        """Find samples that the sampler repeats, where the end of an epoch was recorded."""
        if self.facts.padded == 0:
            return
        for epoch in sorted({self._epoch(step) for step, _ in windows}):
            of_epoch = [(step, read) for step, read in windows if self._epoch(step) == epoch]
            here = Counter(sample for _, read in of_epoch for sample in read)
            again = sum(here.values()) - len(here)
            whole = sum(batch.epoch == epoch for batch in self.tapes[0].batches) >= self.facts.epoch_batches
            if whole and again > 0:
                detail = (
                    f"{again} of {sum(here.values())} samples are trained on twice in epoch {epoch}, to fill the ranks"
                )
                self._add("padding", "samples", detail, of_epoch[-1][0])
                return
        text = (
            f"the end of an epoch was not among the steps: there the sampler repeats {self.facts.padded} of the samples"
        )
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
            shared = sum((Counter(here) & there).values())
            why = (
                "; a sampler shuffles them, and deals another order to another number of processes" if shuffled else ""
            )
            detail = f"{shared} of the {len(here)} samples of the global batch are those that one process trains on then{why}"
            self._add("data order", name, detail, step, note=shuffled)
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
        return [
            _Row(
                e.position,
                *(
                    {f"loss {key} (rank {piece.rank})": torch.tensor(each[key]) for key in part.losses}
                    for each in (piece.call.losses, part.losses)
                ),
            )
            for e in self.steps
            for piece, part in zip(e.pieces, e.examined.parts, strict=True)
            if piece.call.losses.keys() == part.losses.keys() and part.losses
            if not (self.facts.whole_only or e.examined.unsteady)
        ]

    def _locals(self) -> list[_Row]:
        """Return the gradient of every micro-batch on its rank, and on one process."""
        return [
            _Row(
                e.position,
                *({f"{name} (rank {piece.rank})": each for name, each in side.items()} for side in pair),
                loose=is_rounding(e.flat(pair[0]), e.flat(pair[1]), (), self.tolerance),
            )
            for e in self.steps
            for piece, pair in zip(e.pieces, e.pairs, strict=True)
            if pair is not None and not e.examined.unsteady
        ]

    def _reduced(self) -> Stage:
        """Compare the reduced gradient with the one that one process expects."""
        rows = [row for e in self.steps if (row := self._reduced_in(e)) is not None]
        stage = self._stage("reduced gradient", rows, "")
        missing = {
            e.position: e.expected.problem or "it depends on what is not the same on one process" for e in self.steps
        }
        for row in rows:
            del missing[row.step]
        told = next((finding for finding in self.findings if finding.stage == "reduced gradient"), None)
        if told is not None and stage.status != "differs":
            return Stage("reduced gradient", "differs", told.step, note=told.detail)
        if missing and stage.status != "differs":
            why = next(iter(missing.values()))
            self.remarks[why] = None
            return Stage("reduced gradient", "not compared", min(missing), note=why)
        return stage

    def _reduced_in(self, e: Evidence) -> _Row | None:
        """Return what is compared in a step, or None, and add what is found."""
        name = "reduced gradient"
        drifted = self._apart(
            e, name, lambda step: step.before, "is not the same on all ranks before the step"
        ) or self._apart(e, name, lambda step: step.reduced, "has another gradient on every rank: it was not reduced")
        if drifted is not None:
            return _Row(
                e.position, *({drifted.name: torch.tensor(value)} for value in (drifted.found, drifted.expected))
            )
        if e.examined.unsteady:
            return None
        if e.expected.gradient is None:
            detail = e.sum_of_means()
            if detail is not None:
                self._add("counts", name, detail, e.position)
            return None
        row = _Row(e.position, e.tensors, e.expected.gradient)
        for each in self._measured(row):
            self.gradients.setdefault(each.name, [0.0] * e.position).append(each.relative)
        found = self._beyond(row)
        if found is None or e.is_expected:
            self.right.add(e.position)
            return replace(row, loose=True)
        if e.split.own:
            return None
        for cause, detail in e.causes():
            self._add(cause, name, detail, e.position, found)
        return row

    def _clipped(self) -> Stage:
        """Compare what the optimizer stepped with, from the same reduced gradient."""
        name, rows = "clipped gradient", []
        for e in self.steps:
            theirs = self.reference.steps.get(e.position)
            if theirs is None or not theirs.after:
                continue
            rows.append(_Row(e.position, e.step.clipped, theirs.clipped))
            found, by = self._beyond(rows[-1]), len(self.tapes)
            if found is not None:
                factor = found.factor or math.nan
                untouched = self._beyond(_Row(e.position, theirs.clipped, e.step.reduced)) is None
                twice = untouched and math.isclose(factor * by, 1, rel_tol=1e-3)
                detail = "of the same reduced gradient the optimizer gets another one than on one process"
                shown = "" if found.factor is None else f": {times(factor)} it"
                more = f", the {by} ranks divide once more" if twice else ""
                self._add("double division" if twice else "unexplained", name, detail + shown + more, e.position, found)
        return self._stage(name, rows, "the optimizer asks for the loss several times in a step")

    def _update(self) -> Stage:
        """Compare what the optimizer adds to the weights, and the options that it does so with."""
        name, rows = "optimizer update", []
        if self.facts.global_step > 0:
            note = "the run went on from a checkpoint: what its optimizers held is not known"
            self.remarks[note] = None
            return Stage(name, "not compared", note=note)
        for e in self.steps:
            step, theirs = e.step, self.reference.steps.get(e.position)
            self._compare_options(e, theirs.groups if theirs is not None else ())
            drifted = self._apart(e, name, lambda step: step.after, "is not the same on all ranks after the step")
            if theirs is None or not theirs.after or drifted is not None:
                continue
            updates = [
                {key: each[key] - step.before[key] for key in step.before} for each in (step.after, theirs.after)
            ]
            rows.append(_Row(e.position, *updates, slack=step.before))
            found = self._beyond(rows[-1])
            if found is not None and self._beyond(_Row(e.position, step.clipped, theirs.clipped)) is None:
                factor = "" if found.factor is None else f": {times(found.factor)} it"
                detail = f"the same gradient, with the same options, makes another update{factor}"
                self._add("unexplained", name, detail, e.position, found)
        stage = self._stage(name, rows, "the optimizer asks for the loss several times in a step")
        told = next((finding for finding in self.findings if finding.stage == name), None)
        return stage if told is None else Stage(name, "differs", told.step, told.difference, told.detail)

    def _compare_options(self, e: Evidence, theirs: Sequence[Mapping[str, Any]]) -> None:
        """Find options of the optimizer that are not the same on all ranks, or on one process."""
        name, mine = "optimizer update", _options(e.step.groups, e.step.kind)
        for rank, other in enumerate(e.others, 1):
            there = _options(other.groups, other.kind)
            option = next((key for key in mine if digest(mine[key]) != digest(there.get(key))), None)
            if option is not None:
                detail = f"{option} is {mine[option]} on rank 0 and {there.get(option)} on rank {rank}"
                self._add("different optimizers", name, detail, e.position)
                return
        if self.facts.told is not None and self.facts.told.scales_rates:
            return
        there = _options(theirs, e.step.kind)
        option = next((key for key in mine if key in there and digest(mine[key]) != digest(there[key])), None)
        if option is not None:
            here, alone = mine[option], there[option]
            numbers = isinstance(here, float) and isinstance(alone, float) and alone != 0
            found = Difference(option, abs(here / alone - 1), math.nan, here, alone, here / alone) if numbers else None
            cause = "learning-rate scale" if option == "lr" else "optimizer options"
            ratio = f": {times(here / alone)} it" if numbers else ""
            label = "the learning rate" if option == "lr" else f"{option} of the optimizer"
            self._add(cause, name, f"{label} is {here}, on one process {alone}{ratio}", e.position, found)

    def _buffers(self) -> Stage:
        """Compare the buffers after every window."""
        name, rows = "buffers", []
        for examined in self.reference.acts:
            position = examined.act.steps[-1]
            mine = self.tapes[0].steps[position].buffers
            before = self.tapes[0].state_at(examined.act.pieces[0].batch, 0)
            row, of_rank, unchanged = (
                _Row(position, mine, {key: state.get(key, each) for key, each in mine.items()}, loose=True)
                for state in (examined.state, examined.state_of_rank, before)
            )
            changed = self._beyond(unchanged)
            found = self._beyond(row)
            if (not examined.state or examined.unsteady) and changed is not None:
                self.remarks[f"what one process makes of the buffer {changed.name}, which changes, is not known"] = None
            elif found is None:
                rows.append(row)
            elif self._is_count(found.name, position, examined.act.pieces):
                text = f"the buffer {found.name} changes with every micro-batch, whatever it holds; one process has one of them"
                self.remarks[f"{text} where this run has several"] = None
            else:
                rows.append(row)
                followed = self._beyond(of_rank) is None
                norm = found.name.rpartition(".")[0] + ".running_var" in mine
                cause = "batch norm" if norm else "buffers of one rank" if followed else "unexplained"
                made = "rank 0 makes of its own samples" if followed else "nobody computes here"
                self._add(
                    cause, name, f"{found.name} is what {made}, not what one process makes of all", position, found
                )
        return self._stage(name, rows, "they change with the samples, and what one process makes of all is not known")

    def _is_count(self, name: str, position: int, pieces: Sequence[Any]) -> bool:
        """Return whether a buffer is the same on ranks with other samples, after several micro-batches."""
        buffers = [tape.steps[position].buffers[name] for tape in self.tapes]
        several = len(pieces) > len(self.tapes) and self.facts.replicas is None
        alike = len(buffers) > 1 and all(torch.equal(buffers[0], other) for other in buffers[1:])
        return alike and several

    def _random(self) -> Stage:
        name, parts = "random state", [part for examined in self.reference.acts for part in examined.parts]
        draws = [draw for part in parts for draw in part.mode.draws]
        if not draws and not any(part.host for part in parts):
            return Stage(name, "equal", note="no random numbers were drawn")
        layers = dict.fromkeys(layer for part in parts for layer in part.layers)
        states = [digest(piece.call.random) for piece in self.reference.acts[0].act.pieces]
        same = len(states) > 1 and len(set(states)) == 1 and draws
        noise = "; all ranks begin from the same random state, so their noise is the same" if same else ""
        detail = f"random numbers are drawn in {', '.join(layers) or 'training_step'}; one process drew the same for each sample"
        self._add("stochastic", name, detail + noise, None)
        return Stage(name, "note", note=detail + noise)


def _fit(parts: Sequence[Tensor | None], whole: Tensor) -> bool:
    """Return whether the parts' rows are those of the whole."""
    known = [part for part in parts if part is not None and part.shape[1:] == whole.shape[1:]]
    return len(known) == len(parts) and sum(map(len, known)) == len(whole)


def _options(groups: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Return the options of an optimizer's groups by name, numbers as floats."""
    found: dict[str, Any] = {"the optimizer": kind}
    for index, group in enumerate(groups):
        for name, value in group.items():
            number = (
                isinstance(value, (int, float, Tensor))
                and not isinstance(value, bool)
                and getattr(value, "ndim", 0) == 0
            )
            found[f"{name} of group {index}" if index else name] = float(value) if number else value
    return found
