"""The comparison of what the ranks recorded with one process that trains freely: stages, findings, report."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch import LightningModule

from lightning_gradavg.lightning_internals import BatchNorm
from lightning_gradavg.verify.coverage import Coverage
from lightning_gradavg.verify.explain import explain
from lightning_gradavg.verify.record import Refused, Step, Tape
from lightning_gradavg.verify.report import CAUSES, STAGES, Finding, Report, Stage
from lightning_gradavg.verify.twin import Difference, Twin, difference, run_twin

__all__ = ["in_float32", "judge", "not_shown"]

_DOUBLE, _SINGLE = 1e-8, 1e-4  # the relative difference that counts as equal in float64 and in float32

Built = tuple[LightningModule, dict[str, Any], dict[str, Any]]

_BESIDE_DRAWS = ("initial weights", "samples", "optimizer options")  # do not depend on what is drawn
_OF_COMBINATIONS = (
    *("short window", "mean of means", "sum loss", "counts", "double division", "constant term"),
    *("bf16 wire", "fp16 wire", "clipped before the reduction", "learning-rate scale", "optimizer options"),
)
_OF_STATE = (
    "one process that accumulates the same micro-batches trains the same, and one that takes them as one batch does"
    " not: something counts or keeps state for every micro-batch, or compares samples within one"
)
_TYPES = re.compile(
    r"dtype|scalar type|double|float64|float32|not implemented for|expected .* but (got|found)", re.IGNORECASE
)


def not_shown(reason: str, tapes: Sequence[Tape] = ()) -> Report:
    """Return the report of a run that could not be compared at all."""
    stages = [Stage(name, "not compared") for name in STAGES]
    names = [(tape.facts.strategy, tape.facts.rule) for tape in tapes] or [("", "")]
    return Report(*names[0], len(tapes), 0, math.nan, stages, remarks=[reason])


def in_float32(error: Exception, operator: str) -> str | None:
    """Return what to say of an error that float64 causes, or None."""
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
        compare_order: Whether to compare the order of samples.
        device: The type of device.
    """
    problems = [tape.problem for tape in tapes if tape.problem]
    if problems or not all(tape.steps for tape in tapes):
        return not_shown((*problems, "the run took no optimizer step")[0], tapes)
    return _Judge(tapes, build, double, tolerance or (_DOUBLE if double else _SINGLE), device).report(compare_order)


@dataclass
class _Judge:
    tapes: Sequence[Tape]
    build: Callable[[], Built]
    double: bool
    tolerance: float
    device: str
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def report(self, order: bool) -> Report:
        """Compare, and put together what was found."""
        facts, twin = self.tapes[0].facts, Twin(self.tapes, self.tolerance, double=self.double, explain=explain)
        refused, found = self._run(twin), None
        if twin.differing is not None and not refused:
            found = _of_twin(twin, *twin.differing)
            refused = "" if found.stage in _BESIDE_DRAWS else self._innocent(twin, found)
        if refused:
            self.remarks.append(refused)
            found = None
        drawn = {name: None for each in (*self.tapes, twin.tape) for name in each.shared} | twin.mode.shared
        steps = len(twin.tape.steps) if found is None else found.step + 1
        if drawn:
            self.remarks.append(
                f"one draw for a whole batch ({', '.join(drawn)}): it belongs to no sample; every rank draws its own,"
                " and one process draws one"
            )
            found = found if found is not None and found.stage in _BESIDE_DRAWS else None
        of_ranks = self._between_ranks()
        if of_ranks is not None and (found is None or of_ranks.step <= found.step):
            steps, found = of_ranks.step + 1, of_ranks
        self.findings += [] if found is None else [found]
        coverage = Coverage(self.tapes, twin.one_process) if order else None
        if coverage is not None:
            self.findings += coverage.findings
            self.remarks += coverage.remarks
        if found is None or found.stage != "initial weights":
            self.findings += self._logged(twin)
        self.findings.sort(key=lambda each: (each.note, each.step, STAGES.index(each.stage)))
        used = {"split_batches": facts.splits, "equivalent_to": facts.replicated, "GradAvgStrategy": facts.ours}
        given = [name for name, there in used.items() if there]
        remedies = (CAUSES[each.cause].remedy(facts.strategy, facts.rule, given) for each in self.findings)
        findings = [
            replace(each, advice=advice, diff=diff)
            for each, (advice, diff) in zip(self.findings, remedies, strict=True)
        ]
        return Report(
            facts.strategy,
            facts.rule,
            len(self.tapes),
            steps,
            self.tolerance,
            list(self._stages(found, steps, coverage.note if coverage is not None else "")),
            findings,
            twin.gradients,
            list(dict.fromkeys(self.remarks)),
            "float64" if self.double else "float32",
        )

    def _stages(self, found: Finding | None, steps: int, of_samples: str) -> Iterator[Stage]:
        at_once = found is not None and found.step == 0 and found.stage != "samples"
        last = STAGES.index(found.stage) if found is not None and at_once else len(STAGES)
        for index, name in enumerate(STAGES):
            first = min((each for each in self.findings if each.stage == name), key=lambda f: f.note, default=None)
            if first is not None:
                yield Stage(name, "note" if first.note else "differs", first.step, first.cause)
            elif index > last and name != "logged values":
                yield Stage(name, "not compared", note="after the first difference")
            else:
                note = of_samples if name == "samples" else ""
                yield Stage(name, "equal" if steps else "not compared", note=note)

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

    def _between_ranks(self) -> Finding | None:
        """Return where the ranks first differ from each other, if they do."""
        first, *others = self.tapes
        found = (each for other in others for each in _between(first, other, self.tolerance))
        return next(found, None)

    def _innocent(self, twin: Twin, found: Finding) -> str:
        """Return what other than a fault may make a difference, if anything."""
        drawn = twin.traces.get(found.step)
        for tape in self.tapes:
            for taken in tape.steps[found.step].taken if found.step < len(tape.steps) else ():
                if drawn is not None and taken.counts and taken.trace != drawn:
                    names = dict.fromkeys(name for name, _ in [*taken.trace, *drawn])
                    return f"a batch of another size draws other random numbers ({', '.join(names)})"
        if len(self.tapes[0].steps[found.step].taken) > 1 and found.cause not in _OF_COMBINATIONS:
            again = Twin(self.tapes, self.tolerance, double=self.double, windowed=True)
            if not self._run(again) and (again.differing is None or again.differing[1] > found.step):
                return _OF_STATE
        return ""

    def _logged(self, twin: Twin) -> Iterator[Finding]:
        """Yield the first value that was logged over all ranks, or equally by all, and differs."""
        synced = set().union(*(tape.synced for tape in self.tapes))
        for position, mine in enumerate(twin.tape.steps):
            of_ranks = [tape.steps[position] for tape in self.tapes if position < len(tape.steps)]
            if any(len(step.taken) > 1 for step in of_ranks) or len(of_ranks) < len(self.tapes):
                continue
            for name, expected in mine.logged.items():
                values = [step.logged.get(name, math.nan) for step in of_ranks]
                known = bool({name, name.removesuffix("_step"), name.removesuffix("_epoch")} & synced)
                if (known or len(set(values)) == 1) and self._apart(values[0], expected):
                    factor = values[0] / expected if expected else None
                    relative = abs(values[0] - expected) / abs(expected or 1)
                    how = "with sync_dist" if known else "equally by all ranks"
                    text = f"{name} was logged {how}; the training is the same"
                    found = Difference(name, relative, values[0], expected, factor)
                    yield Finding("logged value", "logged values", text, position, found)
                    return
            text = self._losses_apart(mine, of_ranks)
            if text and not any(finding.is_difference for finding in self.findings):
                yield Finding("logged value", "logged values", text, 0, note=True)
                return

    def _losses_apart(self, mine: Step, of_ranks: Sequence[Step]) -> str:
        """Tell of a loss that is the same on all ranks, and differs from that of one process, which trains the same."""
        losses, expected = {step.taken[-1].loss for step in of_ranks}, mine.taken[-1].loss
        found = min(losses)
        if len(losses) > 1 or not self._apart(found, expected):
            return ""
        return f"the loss of every rank is {found:.6g}, but {expected:.6g} on one process; the training is the same"

    def _apart(self, one: float, other: float) -> bool:
        finite = math.isfinite(one) and math.isfinite(other)
        return finite and not math.isclose(one, other, rel_tol=10 * self.tolerance, abs_tol=1e-12)


def _between(first: Tape, other: Tape, tolerance: float) -> Iterator[Finding]:
    """Yield where two ranks differ, in the order of a run."""
    cause, who = "unsynchronised replicas", f"rank {other.rank}"

    def of(found: Any, expected: Any) -> Difference | None:
        return difference(found, expected, tolerance)[0]

    begins = of(other.initial, first.initial)
    if begins is not None:
        yield Finding(cause, "initial weights", f"{who} starts with different weights than rank 0", 0, begins)
    for position, (one, two) in enumerate(zip(first.steps, other.steps, strict=False)):
        for mine, its in zip(one.updates, two.updates, strict=False):
            pairs = zip(mine.options, its.options, strict=False)
            names = dict.fromkeys(name for a, b in pairs for name in a if a[name] != b.get(name))
            if mine.kind != its.kind or names:
                shown = ", ".join(names) if mine.kind == its.kind else f"{mine.kind} and {its.kind}"
                text = f"rank 0 and {who} have different optimizers: {shown}"
                yield Finding("different optimizers", "optimizer options", text, position)
            found = next(filter(None, map(of, its.reduced, mine.reduced)), None)
            if found is not None:
                text = f"{who} steps with a different gradient than rank 0"
                yield Finding(cause, "reduced gradient", text, position, found)
        found = of(two.weights, one.weights)
        if found is not None:
            yield Finding(cause, "weights", f"{who} has different weights than rank 0 after the step", position, found)
    if len(first.steps) != len(other.steps):
        text = f"rank 0 took {len(first.steps)} optimizer steps, {who} took {len(other.steps)}"
        yield Finding(cause, "reduced gradient", text, min(len(first.steps), len(other.steps)))


_OF_STAGES = {
    "initial weights": ("initial weights", "the run starts with different values than one process"),
    "clipped gradient": (
        "unexplained",
        "the gradient equals that of one process before clipping, but not afterwards",
    ),
    "weights": ("weights beside the gradient", "the optimizer was given what one process gives it"),
    "buffers": ("buffers of one rank", "{name} is not that of one process after the step; gradient and weights are"),
}


def _of_twin(twin: Twin, stage: str, position: int, found: Difference) -> Finding:
    """Return the finding of the first difference."""
    if stage == "reduced gradient":
        cause, detail = twin.explanation
        return Finding(cause, stage, detail, position, found)
    if stage == "optimizer options":
        cause, name = {"lr": ("learning-rate scale", "the learning rate")}.get(found.name, (stage, found.name))
        return Finding(cause, stage, f"{name} is {found.found:.6g}, but {found.expected:.6g} on one process", position)
    cause, detail = _OF_STAGES[stage]
    owner = twin.module.get_submodule(found.name.rpartition(".")[0]) if stage == "buffers" else None
    cause = "batch norm" if isinstance(owner, BatchNorm) else cause
    return Finding(cause, stage, detail.format(name=found.name), position, found)
