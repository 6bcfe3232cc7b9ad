"""The judgement of a run: where it first differs from one process, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter

from lightning_gradavg.verify.comparison import Seen, compare_records, stages_with_numbers
from lightning_gradavg.verify.evidence import Evidence
from lightning_gradavg.verify.gradients import Explanation, explain_gradient
from lightning_gradavg.verify.reading import compare_readings
from lightning_gradavg.verify.records import Record, Refused, join_shards
from lightning_gradavg.verify.report import STAGES, Baseline, Finding, Report
from lightning_gradavg.verify.sketches import compare_tensors, gaps_of
from lightning_gradavg.verify.target import Build
from lightning_gradavg.verify.twin import Twin

__all__ = ["judge"]

_BESIDE_DRAWS = ("initial weights", "samples", "optimizer options")
"""Stages that do not depend on what is drawn: alone compared if ranks draw other random numbers than one process."""

_WITH_NUMBERS = ("reduced gradient", "clipped gradient", "weights")
"""Stages that every run has."""

_CAUSES_OF_STAGES = {
    "initial weights": "initial weights",
    "clipped gradient": "unexplained",
    "optimizer options": "optimizer options",
    "weights": "weights beside the gradient",
    "buffers": "buffers of one rank",
}

_OF_WINDOWS = (
    "non-decomposable loss",
    "batch norm",
    "unexplained",
    "weights beside the gradient",
    "buffers of one rank",
)
"""Causes that state which changes with every micro-batch may have, too."""


def judge(records: Sequence[Record], build: Build, tolerance: float, precision: str = "64-true") -> Report:
    """Return how a run, as all ranks recorded it, differs from one process, and why."""
    facts = records[0].facts
    problem = _first_problem(records)
    if problem:
        return Report(facts.strategy, facts.rule.name, len(records), 0, math.nan, remarks=[problem])
    if facts.sharded:
        join_shards(records)
    return _Judge(records, Twin(records, build, precision), tolerance).report()


def _first_problem(records: Sequence[Record]) -> str:
    """Return why a run cannot be compared; "" if it can."""
    for record in records:
        if record.problem:
            return record.problem
        if not record.steps:
            return (
                "the run took no optimizer step: the loader has no batch, the Trainer's limits (max_epochs, max_steps,"
                " limit_train_batches) leave none, or training_step steps no optimizer"
            )
    if records[0].facts.sharded and any(_stages_of(record) != _stages_of(records[0]) for record in records):
        return "the ranks take different optimizer steps, so their shards make no whole tensors"
    if records[0].facts.replicas is not None and records[0].batch_norms:
        return (
            f"`{records[0].batch_norms[0]}` normalizes by the samples of a replica, and one process has only the whole"
            " batch: verify equivalent_to='single_device', or the module without batch norm"
        )
    return ""


def _stages_of(record: Record) -> list[list[str]]:
    return [[stage.stage for stage in step.stages] for step in record.steps]


class _Judge:
    """Compares a run with one process.

    Args:
        records: What the ranks recorded.
        twin: Trains on one process.
        tolerance: The largest relative difference that counts as equal.
    """

    def __init__(self, records: Sequence[Record], twin: Twin, tolerance: float) -> None:
        self._records = records
        self._twin = twin
        self._tolerance = tolerance
        self._facts = records[0].facts

    def report(self) -> Report:
        """Compare, and put together what was found."""
        alone = self._twin.train()
        steps = min(len(record.steps) for record in (alone, *self._records))
        equal_steps = steps
        remarks = list(self._records[0].remarks)
        stages = tuple(STAGES)  # that can be compared
        draws = [record.draws_problem for record in (alone, *self._records) if record.draws_problem]
        findings: list[Finding] = []
        try:
            seen = self._first_difference(alone, stages)
            if draws and (seen or any(not finding.note for finding in self._logged_differences(alone, steps))):
                # Ranks may draw other numbers than one process, so what depends on them differs for no other reason.
                stages = _BESIDE_DRAWS
                remarks += draws
                seen = self._first_difference(alone, stages)
            findings += self._differences_between_ranks(stages)
            if seen is not None:
                equal_steps = seen.step
                findings.append(self._finding(seen))
        except Refused as error:
            remarks.append(str(error))
            stages = stages[:2]
        gaps = {stage: "not compared" for stage in STAGES if stage not in stages}
        if findings:
            # Only the first difference is a cause. Those behind it may follow from it.
            first = min(findings, key=_place_in_run)
            gaps |= _stages_beside(first, findings)
            findings = [first]
            steps = first.step + 1
        samples = compare_readings(self._records, alone.reading)
        findings += samples.findings
        remarks += samples.remarks
        if "logged values" in stages and equal_steps > 0:
            findings += self._logged_differences(alone, equal_steps)
        finite_stages = stages_with_numbers(self._records[0].steps[:steps])
        for stage in STAGES:
            if stage not in finite_stages:
                gaps.setdefault(stage, "none")
            if stage not in finite_stages and stage in stages and stage in _WITH_NUMBERS:
                remarks.append(f"no {stage} of the compared steps is finite")
        if equal_steps == 0:
            gaps.setdefault("logged values", "not compared")
        return Report(
            strategy=self._facts.strategy,
            reduction=self._facts.rule.name,
            world_size=len(self._records),
            steps=steps,
            tolerance=self._tolerance,
            findings=sorted(findings, key=attrgetter("note")),
            remarks=list(dict.fromkeys(remarks)),  # each once
            precision=self._twin.precision,
            baseline=self._baseline(alone),
            gaps=gaps,
            options=self._facts.given,
            weighs=self._facts.rule.uses_weight,
        )

    def _baseline(self, alone: Record) -> Baseline:
        """Return which run on one process the ranks are compared with, beside that of the user's loader."""
        batch = sum(taken.rank_batch.size for taken in self._twin.group_of_step(0))
        return Baseline(batch, alone.reading.batch_size, self._facts.accumulation, self._facts.replicas)

    def _first_difference(self, alone: Record, stages: Sequence[str]) -> Seen | None:
        """Return the first difference in training to a run on one process, of stages that can be compared."""
        for seen in compare_records(self._records[0], alone, self._tolerance):
            if seen.stage in stages:
                return seen
        if alone.problem:
            raise Refused(alone.problem)
        return None

    def _finding(self, seen: Seen) -> Finding:
        """Return the finding of the first difference, or raise `Refused` if it may be none."""
        name = seen.difference.name
        if seen.stage == "reduced gradient":
            explanation = self._of_gradient(seen)
        else:
            explanation = Explanation(_CAUSES_OF_STAGES[seen.stage], f"`{name}` is the first to differ")
        if seen.stage == "buffers" and self._facts.replicas is not None:
            raise Refused(f"the buffer {name!r} is that of replica 0, and one process has only that of the whole batch")
        if seen.stage not in _BESIDE_DRAWS and explanation.cause in _OF_WINDOWS:
            self._require_difference_in_windows(seen.step)
        return Finding(explanation.cause, seen.stage, explanation.detail, seen.step, seen.difference)

    def _of_gradient(self, seen: Seen) -> Explanation:
        """Return why a reduced gradient differs."""
        if self._facts.automatic:
            return explain_gradient(Evidence(self._twin, seen, self._tolerance), self._records)
        factor = seen.difference.factor
        if factor is not None:
            return Explanation("multiple", f"the gradient is {factor:.4g} x that of one process")
        return Explanation("unexplained", "in manual optimization only a common factor would be known")

    def _require_difference_in_windows(self, step: int) -> None:
        """Raise `Refused` if one process that takes windows, too, trains as the run does.

        Then the cause is in the windows and not in the ranks, such as a step counter or spectral norm.
        """
        if len(self._records[0].steps[step].batches) == 1:
            return
        seen = self._first_difference(self._twin.train_in_windows(), tuple(STAGES))
        if seen is None or seen.step > step:
            raise Refused(
                f"up to step {step} the run equals one process that accumulates the same micro-batches, and not one"
                " that takes them as one batch: something works on every micro-batch by itself, such as global_mean,"
                " which divides each by its own count, a state that changes with each, or what compares the samples of"
                " one"
            )

    def _differences_between_ranks(self, stages: Sequence[str]) -> list[Finding]:
        """Return where ranks differ from the first."""
        findings = []
        # Otherwise each rank may have its own buffers: DDP broadcasts those of rank 0 before the next forward. Shards
        # have no broadcast. Of replicas, `GradAvgStrategy` raises an error where they differ.
        keeps_buffers_equal = self._facts.sharded or self._facts.replicas is not None
        for record in self._records[1:]:
            # Ranks that take different optimizer steps are not compared with each other.
            with suppress(Refused):
                for seen in compare_records(record, self._records[0], self._tolerance):
                    if seen.stage in stages and (seen.stage != "buffers" or keeps_buffers_equal):
                        findings.append(self._finding_between_ranks(record, seen))
        return findings

    def _finding_between_ranks(self, record: Record, seen: Seen) -> Finding:
        difference = seen.difference
        detail = (
            f"{STAGES[seen.stage].format(difference.name)} {difference.found:.6g} on rank {record.rank},"
            f" {difference.expected:.6g} on rank 0"
        )
        cause = "unsynchronised replicas"
        if seen.stage == "buffers":
            cause = "buffers of one rank"
        return Finding(cause, seen.stage, detail, seen.step)

    def _logged_differences(self, alone: Record, compared_steps: int) -> list[Finding]:
        """Return the first value that all ranks logged alike, as with `sync_dist`, and that differs.

        A value that ranks log differently is that of each, and one within a window that of its last micro-batch. One
        process does not have these, so they are noted.
        """
        notes: list[Finding] = []
        for position, step in enumerate(alone.steps[:compared_steps]):
            first, *others = [record.steps[position].logged for record in self._records]
            found = {}
            expected = {}
            for name, value in first.items():
                # A NaN is alike on all ranks, too, as where `sync_dist` averages that of one rank.
                is_of_all = all(name in logged and not gaps_of(logged[name], value).any() for logged in others)
                # One process counts the samples, or whatever it is, of all ranks.
                is_count = value.any() and not gaps_of(len(self._records) * value, step.logged.get(name, value)).any()
                if not is_of_all or is_count or len(self._records[0].steps[position].batches) > 1:
                    detail = f"`{name}` is that of one rank or of one micro-batch, and is not compared"
                    notes = notes or [Finding("logged value", "logged values", detail, position, note=True)]
                elif name in step.logged:
                    found[name] = value
                    expected[name] = step.logged[name]
            differences = compare_tensors(found, expected, 10 * self._tolerance)
            if differences:
                detail = f"`{differences[0].name}` was logged by all ranks; the training is the same"
                return [Finding("logged value", "logged values", detail, position, differences[0])]
        return notes


def _stages_beside(first: Finding, findings: Sequence[Finding]) -> dict[str, str]:
    """Return the stages of step 0 that differ beside the first finding, as a report has them.

    Ranks may differ from one another in one stage of a step, and from one process in an earlier one. Of later steps,
    the stages of step 0, which a report lists, are equal.
    """
    return {finding.stage: "differs" for finding in findings if finding.step == first.step == 0}


def _place_in_run(finding: Finding) -> tuple[int, bool]:
    # Buffers that differ between the ranks may follow from what differs earlier in the step.
    return finding.step, finding.stage == "buffers"
