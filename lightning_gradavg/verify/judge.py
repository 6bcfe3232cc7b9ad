"""The judgement of a run in float64 or float32: where it first differs from one process, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from lightning_gradavg.verify.causes import CAUSES
from lightning_gradavg.verify.comparison import (
    Seen,
    compare_records,
    draws_problem,
    logged_by_all,
    stages_without_numbers,
)
from lightning_gradavg.verify.evidence import Evidence
from lightning_gradavg.verify.gradients import Explanation, explain_gradient, written_gradient
from lightning_gradavg.verify.reading import compare_readings
from lightning_gradavg.verify.records import Record, Refused, join_shards
from lightning_gradavg.verify.report import STAGES, Baseline, Finding, Report, value_in_words
from lightning_gradavg.verify.sketches import compare_tensors
from lightning_gradavg.verify.twin import Build, Twin

__all__ = ["judge"]

_BESIDE_DRAWS = ("initial weights", "samples", "optimizer options")
"""Stages that do not depend on what is drawn."""

_CAUSES_OF_STAGES = {
    "initial weights": "initial weights",
    "clipped gradient": "unexplained",
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


def judge(
    records: Sequence[Record], build: Build, tolerance: float, double: bool = True, accelerator: str = "cpu"
) -> Report:
    """Return how a run, as all ranks recorded it, differs from one process, and why."""
    facts = records[0].facts
    twin = Twin(records, build, double, accelerator)
    problem = _first_problem(records, twin)
    if problem:
        return Report(facts.strategy, facts.rule.name, len(records), 0, math.nan, remarks=[problem])
    if facts.sharded:
        join_shards(records)
    return _Judge(records, twin, tolerance).report()


def _first_problem(records: Sequence[Record], twin: Twin) -> str:
    """Return why a run cannot be compared; "" if it can."""
    for record in records:
        if record.problem:
            return record.problem
        if not record.steps:
            return "the run took no optimizer step"
    if records[0].facts.sharded and any(_stages_of(record) != _stages_of(records[0]) for record in records):
        return "the ranks take different optimizer steps, so their shards make no whole tensors"
    if not twin.are_replicas_known():
        return "it is not known which samples are those of a replica: use as many processes as replicas"
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
        self._records, self._twin, self._tolerance = records, twin, tolerance
        self._facts = records[0].facts

    def report(self) -> Report:
        """Compare, and put together what was found."""
        alone = self._twin.train()
        steps = min(len(alone.steps), *(len(record.steps) for record in self._records))
        remarks: list[str] = []
        uncompared: dict[str, None] = {}  # stages
        logged = None
        drawn_by_chance = draws_problem(self._records, alone)
        if drawn_by_chance:
            # Ranks draw other numbers than one process then, so what depends on them differs for no other reason.
            remarks.append(drawn_by_chance)
            uncompared.update(dict.fromkeys(stage for stage in STAGES if stage not in _BESIDE_DRAWS))
            in_training = self._differences_beside_draws(alone)
        else:
            in_training = self._differences_between_ranks()
            try:
                seen = self._first_difference(alone)
                equal_steps = steps
                if seen is not None:
                    equal_steps = seen.step
                    in_training.append(self._finding(seen))
                logged = self._first_logged_difference(alone, equal_steps)
            except Refused as error:
                remarks.append(str(error))
                uncompared.update(dict.fromkeys(STAGES[2:]))

        # Only the first difference is a cause. Those behind it may follow from it.
        findings: list[Finding] = []
        if in_training:
            first = min(in_training, key=_place_in_run)
            steps = first.step + 1
            findings.append(first)
        samples = compare_readings(self._records, alone.reading)
        findings += samples.findings
        remarks += samples.remarks
        if logged is not None:
            findings.append(logged)
        without_numbers = stages_without_numbers(self._records[0], steps)
        for stage, why in without_numbers.items():
            if why == "not finite" and not _differ(findings):
                remarks.append(f"no {stage} of the compared steps is finite")
                uncompared[stage] = None
        remarks += self._remarks_on_schedulers()
        return Report(
            strategy=self._facts.strategy,
            reduction=self._facts.rule.name,
            world_size=len(self._records),
            steps=steps,
            tolerance=self._tolerance,
            findings=[self._with_advice(finding) for finding in sorted(findings, key=_is_note)],
            remarks=list(dict.fromkeys(remarks)),  # each once
            precision="float64" if self._twin.double else "float32",
            baseline=self._baseline(alone),
            uncompared=list(uncompared),
            absent=self._absent_stages(alone, without_numbers, steps),
        )

    def _absent_stages(self, alone: Record, without_numbers: dict[str, str], steps: int) -> list[str]:
        """Return the stages of which the run has nothing."""
        absent = [stage for stage, why in without_numbers.items() if why == "none"]
        has_logged = any(step.logged for step in alone.steps[:steps])
        if not has_logged:
            absent.append("logged values")
        return absent

    def _baseline(self, alone: Record) -> Baseline:
        """Return which run on one process the ranks are compared with, beside that of the user's loader."""
        taken = self._twin.group_of_step(0)
        batch = sum(rank_batch.rank_batch.size for rank_batch in taken)
        return Baseline(batch, alone.reading.batch_size, self._facts.accumulation)

    def _with_advice(self, finding: Finding) -> Finding:
        """Return a finding with what to do about it."""
        if finding.advice or finding.note:
            return finding
        cause = CAUSES[finding.cause]
        if self._facts.sharded:
            cause = cause.for_shards()
        return replace(finding, advice=cause.advice, diff=cause.code)

    def _remarks_on_schedulers(self) -> list[str]:
        """Return what is not known of schedulers that follow a value, and did not step."""
        remarks = []
        for plateau in self._records[0].plateaus:
            if plateau.has_stepped:
                continue
            of_value = ""
            if plateau.monitor:
                of_value = f" on {plateau.monitor!r}"
            remarks.append(
                f"{plateau.name}{of_value} was skipped: verify does not validate, and the compared steps do not reach"
                " it. The ranks keep the same learning rate only if they log the same value, as with sync_dist=True"
            )
        return remarks

    def _first_difference(self, alone: Record) -> Seen | None:
        """Return the first difference in training to a run on one process."""
        seen = next(compare_records(self._records[0], alone, self._tolerance), None)
        if seen is None and alone.problem:
            raise Refused(alone.problem)
        return seen

    def _finding(self, seen: Seen) -> Finding:
        """Return the finding of the first difference, or raise `Refused` if it may be none."""
        name = seen.difference.name
        if seen.stage == "reduced gradient":
            explanation = self._of_gradient(seen)
        elif seen.stage == "optimizer options":
            cause = "optimizer options"
            if name.startswith("lr"):
                cause = "learning-rate scale"
            explanation = Explanation(cause, f"`{name}` is the first to differ")
        else:
            explanation = self._of_tensor(_CAUSES_OF_STAGES[seen.stage], seen)
        if seen.stage == "buffers" and self._facts.replicas is not None:
            raise Refused(
                f"the buffer {name!r} is that of replica 0, of whose samples alone one process has only the running"
                " statistics of batch norm"
            )
        if seen.stage not in _BESIDE_DRAWS:
            self._require_difference_in_windows(seen.step, explanation.cause)
        return Finding(
            explanation.cause,
            seen.stage,
            explanation.detail,
            seen.step,
            seen.difference,
            line=explanation.line,
            where=explanation.where,
        )

    def _differences_beside_draws(self, alone: Record) -> list[Finding]:
        """Return the differences in stages that depend on no draw."""
        findings = [finding for finding in self._differences_between_ranks() if finding.stage in _BESIDE_DRAWS]
        with suppress(Refused):
            for seen in compare_records(self._records[0], alone, self._tolerance):
                if seen.stage in _BESIDE_DRAWS:
                    findings.append(self._finding(seen))
        return findings

    def _of_tensor(self, cause: str, seen: Seen) -> Explanation:
        """Return the explanation of a weight, a buffer or a clipped gradient, with the line that wrote it last."""
        name = seen.difference.name
        detail = f"`{name}` is the first to differ"
        line = ""
        for record in self._records:
            written = record.steps[seen.step].writes.get(name)
            if seen.stage == "clipped gradient":
                line = line or written_gradient(seen, record)
            elif written is not None:
                line = line or str(written)
        if not line or seen.stage == "initial weights":
            return Explanation(cause, detail)
        return Explanation(cause, detail, f"`{name}` was last written, but for optimizers, in", line)

    def _of_gradient(self, seen: Seen) -> Explanation:
        """Return why a reduced gradient differs."""
        factor = seen.difference.factor
        if not self._facts.automatic and factor is not None:
            return Explanation("multiple", f"the gradient is {factor:.4g} x that of one process")
        if not self._facts.automatic:
            return Explanation("unexplained", "in manual optimization, only a common factor would be known")
        return explain_gradient(Evidence(self._twin, seen, self._tolerance), seen, self._records)

    def _require_difference_in_windows(self, step: int, cause: str) -> None:
        """Raise `Refused` if one process that takes windows, too, trains as the run does.

        Then the cause is in the windows and not in the ranks, such as a step counter or spectral norm.
        """
        if len(self._records[0].steps[step].batches) == 1 or cause not in _OF_WINDOWS:
            return
        seen = self._first_difference(self._twin.train_in_windows())
        if seen is None or seen.step > step:
            raise Refused(
                "one process that accumulates the same micro-batches trains the same, and one that takes them as one"
                " batch does not: something counts or keeps state for every micro-batch, or compares samples within one"
            )

    def _differences_between_ranks(self) -> list[Finding]:
        """Return where ranks differ from the first."""
        findings = []
        for record in self._records[1:]:
            # Ranks that take different optimizer steps are not compared with each other.
            with suppress(Refused):
                for seen in compare_records(record, self._records[0], self._tolerance):
                    # Otherwise each rank may have its own: DDP broadcasts those of rank 0 before the next forward.
                    # Shards have no broadcast. Of replicas, `GradAvgStrategy` raises an error where they differ.
                    keeps_buffers_equal = self._facts.sharded or self._facts.replicas is not None
                    if seen.stage == "buffers" and not keeps_buffers_equal:
                        continue
                    findings.append(self._finding_between_ranks(record, seen))
        return findings

    def _finding_between_ranks(self, record: Record, seen: Seen) -> Finding:
        difference = seen.difference
        detail = (
            f"{value_in_words(seen.stage, difference.name)} {difference.found:.6g} on rank {record.rank},"
            f" {difference.expected:.6g} on rank 0"
        )
        cause = "unsynchronised replicas"
        advice = ""
        if seen.names.issubset(record.unregistered):
            cause = "unregistered parameter"
            detail += ". The optimizer holds it, but the module does not register it: DDP does not know it"
        elif seen.stage == "optimizer options" and difference.name.startswith("lr") and record.plateaus:
            cause = "unsynchronised schedule"
        elif seen.stage == "buffers":
            cause = "buffers of one rank"
            if self._facts.sharded:
                detail += ". fully_shard sends no buffers to other ranks"
        elif self._facts.sharded and seen.stage == "reduced gradient":
            detail += ". fully_shard does not know it, so nothing averages its gradient"
            advice = "call fully_shard on the root module, too, or on one that has this parameter"
        explanation = self._of_tensor(cause, seen)
        return Finding(
            cause, seen.stage, detail, seen.step, advice=advice, line=explanation.line, where=explanation.where
        )

    def _first_logged_difference(self, alone: Record, compared_steps: int) -> Finding | None:
        """Return the first value that all ranks logged alike, as with `sync_dist`, and that differs."""
        for position in range(compared_steps):
            expected_step = alone.steps[position]
            found, expected = {}, {}
            for name, value in logged_by_all([record.steps[position] for record in self._records]).items():
                if name in expected_step.logged:
                    found[name] = torch.tensor([value], dtype=torch.float64)
                    expected[name] = torch.tensor([expected_step.logged[name]], dtype=torch.float64)
            differences = compare_tensors(found, expected, 10 * self._tolerance, together=False)
            if differences:
                detail = f"`{differences[0].name}` was logged by all ranks; the training is the same"
                return Finding("logged value", "logged values", detail, position, differences[0])
        return None


def _differ(findings: Sequence[Finding]) -> bool:
    """Return whether something beside notes was found."""
    return any(not finding.note for finding in findings)


def _place_in_run(finding: Finding) -> tuple[int, bool]:
    # Buffers that differ between the ranks may follow from what differs earlier in the step.
    return finding.step, finding.stage == "buffers"


def _is_note(finding: Finding) -> bool:
    return finding.note
