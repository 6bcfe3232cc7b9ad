"""The comparison of what the ranks recorded with one process that trains freely: stages, findings, report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from lightning_gradavg.verify.compare import Coverage, Difference, Seen, differences
from lightning_gradavg.verify.explain import explain
from lightning_gradavg.verify.record import Refused, Step, Tape
from lightning_gradavg.verify.report import CAUSES, STAGES, Finding, Report, Stage
from lightning_gradavg.verify.target import Settings
from lightning_gradavg.verify.twin import Build, Twin

__all__ = ["judge"]

_DOUBLE, _SINGLE = 1e-8, 1e-4  # the relative difference that counts as equal in float64 and in float32

_BESIDE_DRAWS = ("initial weights", "optimizer options")  # do not depend on what is drawn
_OF_COMBINATIONS = (
    *("short window", "mean of means", "sum loss", "counts", "double division", "constant term"),
    *("bf16 wire", "fp16 wire", "gradient hooks", "learning-rate scale", "optimizer options"),
)
_OF_STATE = (
    "one process that accumulates the same micro-batches trains the same, and one that takes them as one batch does"
    " not: something counts or keeps state for every micro-batch, or compares samples within one"
)
_OF_DRAWS = "it belongs to no sample; every rank draws its own, and one process draws one"
_BETWEEN_RANKS = {
    "initial weights": "{rank} starts with different weights than rank 0",
    "reduced gradient": "{rank} steps with a different gradient than rank 0",
    "clipped gradient": "{rank} clips to a different gradient than rank 0",
    "optimizer options": "rank 0 and {rank} have different optimizers: {name}",
    "weights": "{rank} has different weights than rank 0 after the step",
}
_OF_STAGES = {
    "initial weights": ("initial weights", "the run starts with different values than one process"),
    "clipped gradient": (
        "unexplained",
        "the gradient equals that of one process before clipping, but not afterwards",
    ),
    "weights": ("weights beside the gradient", "the optimizer was given what one process gives it"),
    "buffers": ("buffers of one rank", "{name} is not that of one process after the step; gradient and weights are"),
}


def judge(tapes: Sequence[Tape], build: Build, settings: Settings) -> Report:
    """Return how a run, as all ranks recorded it, differs from one process, and why."""
    facts, problems = tapes[0].facts, [tape.problem for tape in tapes if tape.problem]
    if problems or not all(tape.steps for tape in tapes):
        stages = [Stage(name, "not compared") for name in STAGES]
        remarks = [*problems, "the run took no optimizer step"][:1]
        return Report(facts.strategy, facts.rule, len(tapes), 0, math.nan, stages, remarks=remarks)
    twin = Twin(tapes, build, not settings.single, settings.accelerator)
    tolerance = settings.tolerance or (_SINGLE if settings.single else _DOUBLE)
    return _Judge(tapes, twin, tolerance).report(settings.compare_order)


@dataclass
class _Judge:
    tapes: Sequence[Tape]
    twin: Twin
    tolerance: float
    gradients: dict[str, list[float]] = field(default_factory=dict)

    def report(self, order: bool) -> Report:
        """Compare, and put together what was found."""
        facts, alone = self.tapes[0].facts, self.twin.run()
        seen, refused = self._first(alone, self.gradients)
        found, steps = None, len(alone.steps) if seen is None else seen[1]
        try:
            found = None if seen is None or refused else self._finding(alone, *seen)
        except Refused as error:
            refused = str(error)
        remarks = [refused] if refused else []
        drawn = {name: None for each in (*self.tapes, alone) for name in each.shared}
        if drawn:
            remarks.insert(0, f"one draw for a whole batch ({', '.join(drawn)}): {_OF_DRAWS}")
            found = found if found is not None and found.stage in _BESIDE_DRAWS else None
        of_ranks = next(self._between_ranks(), None)
        found = of_ranks if of_ranks is not None and (found is None or of_ranks.step <= found.step) else found
        findings = [] if found is None else [found]
        coverage = Coverage(self.tapes, alone.read) if order else None
        if coverage is not None:
            findings += coverage.findings
            remarks += coverage.remarks
        if found is None or found.stage != "initial weights":
            findings += self._logged(alone.steps[:steps])
        findings.sort(key=lambda each: (each.note, each.step, STAGES.index(each.stage)))
        used = {"split_batches": facts.splits, "equivalent_to": facts.replicated, "GradAvgStrategy": facts.ours}
        given = [name for name, there in used.items() if there]
        remedies = [CAUSES[each.cause].remedy(facts.strategy, facts.rule, given) for each in findings]
        steps = steps if found is None else found.step + 1
        return Report(
            facts.strategy,
            facts.rule,
            len(self.tapes),
            steps,
            self.tolerance,
            list(_stages(findings, found, steps, coverage.note if coverage is not None else "")),
            [replace(one, advice=advice, diff=diff) for one, (advice, diff) in zip(findings, remedies, strict=True)],
            self.gradients,
            list(dict.fromkeys(remarks)),
            "float64" if self.twin.double else "float32",
        )

    def _first(self, alone: Tape, gradients: dict[str, list[float]]) -> tuple[Seen | None, str]:
        """Return the first difference to a run on one process, or why there is no telling."""
        try:
            seen = next(differences(self.tapes[0], alone, self.tolerance, gradients), None)
        except Refused as error:
            return None, str(error)
        return seen, alone.problem if seen is None else ""

    def _finding(self, alone: Tape, stage: str, position: int, found: Difference) -> Finding:
        """Return the finding of the first difference.

        Raises:
            Refused: If something other than a fault makes it.
        """
        if stage == "reduced gradient":
            cause, detail = explain(self.twin, alone, position, self.tolerance)
        elif stage == "optimizer options":
            cause, name = {"lr": ("learning-rate scale", "the learning rate")}.get(found.name, (stage, found.name))
            detail = f"{name} is {found.found:.6g}, but {found.expected:.6g} on one process"
        else:
            cause, detail = _OF_STAGES[stage]
            owner = found.name.rpartition(".")[0]
            cause = "batch norm" if stage == "buffers" and owner in alone.batch_norms else cause
        if stage not in _BESIDE_DRAWS:
            self._require_no_other_reason(alone, position, cause)
        told = None if stage == "optimizer options" else found
        return Finding(cause, stage, detail.format(name=found.name), position, told)

    def _require_no_other_reason(self, alone: Tape, position: int, cause: str) -> None:
        drawn = alone.steps[position].taken[-1].trace if position < len(alone.steps) else []
        of_ranks = [taken for tape in self.tapes for taken in tape.steps[position].taken if taken.counts]
        for taken in of_ranks:
            if taken.trace != drawn:
                names = dict.fromkeys(name for name, _ in [*taken.trace, *drawn])
                raise Refused(f"a batch of another size draws other random numbers ({', '.join(names)})")
        if len(self.tapes[0].steps[position].taken) > 1 and cause not in _OF_COMBINATIONS:
            seen, refused = self._first(replace(self.twin, windowed=True).run(), {})
            if not refused and (seen is None or seen[1] > position):
                raise Refused(_OF_STATE)

    def _between_ranks(self) -> Iterator[Finding]:
        """Yield where the ranks first differ from each other."""
        first, *others = self.tapes
        for other in others:
            rank = f"rank {other.rank}"
            with suppress(Refused):
                for stage, position, found in differences(other, first, self.tolerance):
                    if stage in _BETWEEN_RANKS:
                        cause = "different optimizers" if stage == "optimizer options" else "unsynchronised replicas"
                        text = _BETWEEN_RANKS[stage].format(rank=rank, name=found.name)
                        yield Finding(cause, stage, text, position, found)

    def _logged(self, alone: Sequence[Step]) -> list[Finding]:
        """Return the first value that was logged over all ranks, or equally by all, and differs."""
        synced = set().union(*(tape.synced for tape in self.tapes))
        for position, (mine, *of_ranks) in enumerate(zip(alone, *(t.steps for t in self.tapes), strict=False)):
            if any(len(step.taken) > 1 for step in of_ranks):
                continue
            for name, expected in mine.logged.items():
                values = [step.logged.get(name, math.nan) for step in of_ranks]
                known = bool({name, name.removesuffix("_step"), name.removesuffix("_epoch")} & synced)
                if (known or len(set(values)) == 1) and self._apart(values[0], expected):
                    how = "with sync_dist" if known else "equally by all ranks"
                    relative = abs(values[0] - expected) / abs(expected or 1)
                    factor = values[0] / expected if expected else None
                    found = Difference(name, relative, values[0], expected, factor)
                    text = f"{name} was logged {how}; the training is the same"
                    return [Finding("logged value", "logged values", text, position, found)]
        return []

    def _apart(self, one: float, other: float) -> bool:
        finite = math.isfinite(one) and math.isfinite(other)
        return finite and not math.isclose(one, other, rel_tol=10 * self.tolerance, abs_tol=1e-12)


def _stages(findings: Sequence[Finding], found: Finding | None, steps: int, of_samples: str) -> Iterator[Stage]:
    at_once = found is not None and found.step == 0
    last = STAGES.index(found.stage) if found is not None and at_once else len(STAGES)
    for index, name in enumerate(STAGES):
        first = min((each for each in findings if each.stage == name), key=lambda f: f.note, default=None)
        if first is not None:
            yield Stage(name, "note" if first.note else "differs", first.step, first.cause)
        elif index > last and name != "logged values":
            yield Stage(name, "not compared", note="after the first difference")
        else:
            note = of_samples if name == "samples" else ""
            yield Stage(name, "equal" if steps else "not compared", note=note)
