"""The comparison in the 16-bit precision that a run trains in, after the one in float64 has found nothing.

In float64, a fault exceeds rounding by far, and the judge names it exactly (`judge.py`). What is left are faults that
exist in low precision alone. There, rounding is as large as some faults, so what counts as equal is no constant: it is
measured on the model.

1. The ranks train in the precision, and one process trains on the samples of all ranks, as in float64.
2. One process trains again, `DRAWS` times, from initial weights and inputs that are moved to a neighbouring 16-bit
   number, up or down at random (`rounding.Perturbation`). By how much its tensors change is what rounding explains.
3. Two measures of each tensor, at each stage of each step, are compared with the largest of these draws:

   | measure | of the run `G` and one process `F` | finds |
   |---|---|---|
   | distance | the norm of `G - F` over that of `F` | a tensor that is another one |
   | scale | `(G - F) . F` over `F . F` | a tensor that is multiplied: rounding of its elements cancels |

   All tensors of a stage are also measured as one vector, in which rounding cancels further.

A measure is a difference if it exceeds `MOST` times what rounding explains, and the user's tolerance. TTrace takes its
tolerances from a perturbed run, too (Chen et al. 2025, arXiv:2506.09280).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gradavg.verify.causes import CAUSES
from lightning_gradavg.verify.comparison import common_draws_problem, logged_by_all
from lightning_gradavg.verify.records import Record, RecordedStep, Refused
from lightning_gradavg.verify.report import STAGES, Finding, Report, Rounding
from lightning_gradavg.verify.rounding import PRECISIONS, Perturbation
from lightning_gradavg.verify.sketches import Difference, Tensors, compare_tensors, filled, flat
from lightning_gradavg.verify.twin import Build, Twin

__all__ = ["DRAWS", "MOST", "judge_precision"]

DRAWS = 5
"""Perturbed runs of one process."""

MOST = 4.0
"""How many times as large as the largest draw a measure may be."""

_FEWEST_DRAWS = 3  # that take the same steps as the run that is not perturbed
_ROUNDING_OF_FLOAT32 = 1e-6  # what rounding explains at least: sums of float32 numbers in another order
_NEGLIGIBLE = 1e-5  # the norm of a tensor, beside the largest of its stage, that is nothing but rounding
_EXACT_STAGES = ("initial weights", "optimizer options")  # the same numbers in any precision
_ALL = "all tensors together"
_REST_OF_MULTIPLE = 0.2  # what may be left of a vector beside a multiple of another one, relative to it
_NEAR_POWER = 0.05


_CAUSES_OF_STAGES = {
    "initial weights": "initial weights",
    "optimizer options": "optimizer options",
    "weights": "weights beside the gradient",
    "buffers": "buffers of one rank",
    "logged values": "logged value",
}


def judge_precision(
    records: Sequence[Record],
    build: Build,
    precision: str,
    accelerator: str,
    in_float64: Report,
    tolerance: float = 0.0,
) -> Report:
    """Return how a run in a 16-bit precision differs from one process, beyond rounding.

    Args:
        records: What the ranks recorded in the precision.
        build: Builds what is trained.
        precision: A key of `PRECISIONS`.
        accelerator: The type of the device.
        in_float64: The report of the same run in float64, which found no difference.
        tolerance: The relative difference that counts as equal, whatever rounding explains.
    """
    twin = Twin(records, build, double=False, device=accelerator, precision=precision)
    return _PrecisionJudge(records, twin, precision, in_float64, tolerance).report()


class _ComparedStage(NamedTuple):
    """Tensors at one stage of a step; at "weights", by how much the step moved them."""

    name: str  # of `report.STAGES`
    tensors: Tensors


class _Measures(NamedTuple):
    """By how much a tensor differs from that of one process; the module's docstring defines both."""

    distance: float
    scale: float


class _Gap(NamedTuple):
    """A measure of a tensor beside what rounding explains of it."""

    stage: str
    name: str  # of the tensor
    found: float
    explained: float

    @property
    def ratio(self) -> float:
        """The measure over what rounding explains; infinity if something is not finite on one side alone."""
        if math.isfinite(self.found):
            return self.found / self.explained
        return math.inf


class _PrecisionJudge:
    """Compares a run in a 16-bit precision with one process, and that with itself under perturbations.

    Args:
        records: What the ranks recorded.
        twin: Trains on one process.
        precision: A key of `PRECISIONS`.
        in_float64: The report in float64.
        tolerance: The relative difference that counts as equal.
    """

    def __init__(
        self, records: Sequence[Record], twin: Twin, precision: str, in_float64: Report, tolerance: float
    ) -> None:
        self._records = records
        self._twin = twin
        self._name = precision
        self._in_float64 = in_float64
        self._tolerance = tolerance
        self._gaps: list[_Gap] = []  # of all that was compared

    def report(self) -> Report:
        """Compare, and return the report that takes the place of that in float64."""
        findings: list[Finding] = []
        remarks: list[str] = []
        uncompared: Sequence[str] = ()
        steps = min(len(record.steps) for record in self._records)
        try:
            finding = self._finding()
            if finding is not None:
                findings.append(finding)
                steps = finding.step + 1
        except Refused as error:
            remarks.append(str(error))
            uncompared = STAGES[2:]
        return replace(
            self._in_float64,
            steps=steps,
            findings=[*findings, *self._in_float64.findings],  # in float64 there are notes only
            remarks=remarks,
            precision=self._name,
            rounding=self._largest_gap(),
            uncompared=uncompared,
        )

    def _largest_gap(self) -> Rounding | None:
        if not self._gaps:
            return None
        gap = max(self._gaps, key=_ratio_of)
        return Rounding(gap.ratio, MOST, gap.found, gap.explained, f"`{gap.name}` ({gap.stage})", DRAWS)

    def _finding(self) -> Finding | None:
        """Return the first difference, or None."""
        for record in self._records:
            if record.problem:
                raise Refused(record.problem)
            if not record.steps:
                raise Refused(f"the run took no optimizer step in {self._name}")
        alone = self._twin.train_in_precision(None)
        if alone.problem:
            raise Refused(alone.problem)
        drawn_by_chance = common_draws_problem(self._records, alone)
        if drawn_by_chance:
            raise Refused(drawn_by_chance)
        finding = self._difference_between_ranks()
        if finding is not None:
            return finding
        draws = []
        for seed in range(DRAWS):
            draws.append(self._twin.train_in_precision(Perturbation(PRECISIONS[self._name], seed)))
        return self._difference_to(alone, draws)

    def _difference_between_ranks(self) -> Finding | None:
        """Return the first difference between ranks, which hold the same bits after a reduction."""
        first = self._records[0]
        for record in self._records[1:]:
            for position, (step, step_of_first) in enumerate(zip(record.steps, first.steps, strict=False)):
                for stage, of_first in zip(step.stages, step_of_first.stages, strict=False):
                    if stage.stage == "buffers":
                        continue  # each rank may have its own: DDP broadcasts those of rank 0 before the next forward
                    differences = compare_tensors(stage.tensors, of_first.tensors, _ROUNDING_OF_FLOAT32)
                    if differences:
                        name = differences[0].name
                        detail = f"{stage.stage} of `{name}` on rank {record.rank} is not that of rank 0"
                        return _finding_of("unsynchronised replicas", stage.stage, detail, position)
        return None

    def _difference_to(self, alone: Record, draws: Sequence[Record]) -> Finding | None:
        """Return the first difference of the run to one process that its rounding does not explain."""
        run = self._records[0]
        logged = [
            logged_by_all(steps_of_ranks)
            for steps_of_ranks in zip(*(record.steps for record in self._records), strict=False)
        ]
        stages_of_run = _stages_of(run, logged)
        stages_of_alone = _stages_of(alone)
        like_alone = [_PerturbedRun(draw, _stages_of(draw)) for draw in draws]
        for position, (step, expected_step) in enumerate(zip(run.steps, alone.steps, strict=False)):
            if step.is_skipped != expected_step.is_skipped:
                raise Refused(
                    f"the loss scaler skips step {position} on one side only, because a gradient overflows there at a"
                    f" scale of {expected_step.loss_scale:g}: verify with a smaller initial scale"
                )
            like_alone = [draw for draw in like_alone if draw.takes_same_step(alone, position)]
            if len(like_alone) < _FEWEST_DRAWS:
                raise Refused(f"rounding alone decides whether the loss scaler skips step {position}")
            if step.is_skipped:
                continue
            stages_of_draws = [draw.stages[position] for draw in like_alone]
            finding = self._difference_in_step(
                position, stages_of_run[position], stages_of_alone[position], stages_of_draws
            )
            if finding is not None:
                return finding
        if not self._gaps:
            raise Refused(
                f"no gradient of the compared steps is finite in {self._name}: a loss scaler lowers its scale in such"
                " steps, so verify more --steps"
            )
        return None

    def _difference_in_step(
        self,
        position: int,
        stages: Sequence[_ComparedStage],
        expected_stages: Sequence[_ComparedStage],
        stages_of_draws: Sequence[Sequence[_ComparedStage]],
    ) -> Finding | None:
        """Return the first stage of a step at which the run differs."""
        if [stage.name for stage in stages] != [stage.name for stage in expected_stages]:
            raise Refused("one process takes other optimizer steps in a batch than the run, or more of them")
        for index, (stage, expected) in enumerate(zip(stages, expected_stages, strict=True)):
            if stage.name in _EXACT_STAGES:
                differences = compare_tensors(stage.tensors, expected.tensors, _ROUNDING_OF_FLOAT32, together=False)
                if differences:
                    detail = f"`{differences[0].name}` is the first to differ"
                    return _finding_of(_CAUSES_OF_STAGES[stage.name], stage.name, detail, position)
                continue
            of_draws = [stages_of_draw[index].tensors for stages_of_draw in stages_of_draws]
            # A parameter may have no gradient in one of the runs, as where rounding decides which expert gets a token.
            like: Tensors = {}
            for tensors in (*of_draws, stage.tensors, expected.tensors):
                like.update(tensors)
            if stage.name == "logged values":
                # Values that the ranks do not log alike are of one rank, and one process logs others.
                like = {name: expected.tensors[name] for name in stage.tensors if name in expected.tensors}
            found_stage = _ComparedStage(stage.name, filled(stage.tensors, like))
            expected_tensors = filled(expected.tensors, like)
            of_draws = [filled(tensors, like) for tensors in of_draws]
            gaps = _gaps(found_stage, expected_tensors, of_draws, self._tolerance / MOST)
            self._gaps += gaps
            largest = max(gaps, key=_ratio_of, default=None)
            if largest is not None and largest.ratio > MOST:
                return self._explained(found_stage, expected_tensors, largest, position)
        return None

    def _explained(self, stage: _ComparedStage, expected: Tensors, gap: _Gap, position: int) -> Finding:
        """Return the finding of a difference: a gradient is known by its factor, any other stage has its cause."""
        loss_scale = self._records[0].steps[position].loss_scale
        factor = _common_factor(stage.tensors, expected)
        detail = (
            f"`{gap.name}` differs by {gap.found:.2g}, and rounding in {self._name} explains {gap.explained:.2g}"
            f" ({gap.ratio:.3g} x)"
        )
        if factor is not None:
            detail += f"; all together are {factor:.4g} x those of one process"
        cause = _CAUSES_OF_STAGES.get(stage.name, "unexplained")
        if "gradient" in stage.name and factor is not None and _is_loss_scale(factor, loss_scale):
            cause = "loss scale"
            detail += f", and the loss scale is {loss_scale:g}"
        name = gap.name
        if name == _ALL:
            name = max(stage.tensors, key=lambda name: float(stage.tensors[name].norm()))
        difference = _difference_of(name, stage.tensors[name], expected, factor)
        return _finding_of(cause, stage.name, detail, position, difference)


class _PerturbedRun(NamedTuple):
    """A run of one process from weights and inputs that are moved."""

    record: Record
    stages: Sequence[Sequence[_ComparedStage]]  # of each step

    def takes_same_step(self, alone: Record, position: int) -> bool:
        """Return whether it goes through the same stages of a step as the run that is not perturbed."""
        if position >= len(self.record.steps):
            return False
        step, expected = self.record.steps[position], alone.steps[position]
        return step.is_skipped == expected.is_skipped and _names_of(step) == _names_of(expected)


def _names_of(step: RecordedStep) -> list[str]:
    return [stage.stage for stage in step.stages]


def _stages_of(record: Record, logged: Sequence[Mapping[str, float]] | None = None) -> list[list[_ComparedStage]]:
    """Return the stages of each step, with the moves of weights, and at last with what was logged."""
    if logged is None:
        logged = [step.logged for step in record.steps]
    weights: Tensors = {}
    steps: list[list[_ComparedStage]] = []
    for step, logged_values in zip(record.steps, logged, strict=False):
        stages: list[_ComparedStage] = []
        for recorded in step.stages:
            tensors = recorded.tensors
            if recorded.stage == "weights":
                tensors = {name: tensor - weights[name] for name, tensor in tensors.items() if name in weights}
            if recorded.stage in ("initial weights", "weights"):
                weights = recorded.tensors
            stages.append(_ComparedStage(recorded.stage, tensors))
        values = {}
        for name, value in logged_values.items():
            values[name] = torch.tensor([value], dtype=torch.float64)
        stages.append(_ComparedStage("logged values", values))
        steps.append(stages)
    return steps


def _gaps(stage: _ComparedStage, expected: Tensors, of_draws: Sequence[Tensors], accepted: float) -> list[_Gap]:
    """Return the measures of all tensors of a stage beside what the draws explain of them; all have the same names.

    What the user accepts counts as explained.
    """
    names = list(stage.tensors)
    if not names:
        return []
    largest = max(float(expected[name].nan_to_num(0.0, 0.0, 0.0).norm()) for name in names)
    found: dict[str, _Measures] = {}
    explained: dict[str, list[_Measures]] = {}
    for name in names:
        found[name] = _measures(stage.tensors[name], expected[name], _NEGLIGIBLE * largest)
        explained[name] = []
        for tensors in of_draws:
            explained[name].append(_measures(tensors[name], expected[name], _NEGLIGIBLE * largest))
    if stage.name != "logged values":  # which have nothing in common
        whole = flat(expected, expected)
        found[_ALL] = _measures(flat(stage.tensors, expected), whole, 0.0)
        explained[_ALL] = [_measures(flat(tensors, expected), whole, 0.0) for tensors in of_draws]

    gaps: list[_Gap] = []
    for measure in _Measures._fields:
        largest_draws = {}
        for name, measures in explained.items():
            largest_draws[name] = max(getattr(of_draw, measure) for of_draw in measures)
        # The draws of a small tensor may all be small by chance.
        usual = statistics.median(value for name, value in largest_draws.items() if name != _ALL)
        if stage.name == "logged values":
            usual = 0.0
        for name, largest_draw in largest_draws.items():
            most = largest_draw
            if name != _ALL:
                most = max(largest_draw, usual)
            most = max(most + _ROUNDING_OF_FLOAT32, accepted)
            gaps.append(_Gap(stage.name, name, getattr(found[name], measure), most))
    return gaps


def _measures(tensor: Tensor, expected: Tensor, least_norm: float) -> _Measures:
    """Return by how much a tensor differs; of one that is smaller than `least_norm`, beside that."""
    is_finite = expected.isfinite()
    if not torch.equal(tensor.isfinite(), is_finite):
        return _Measures(math.inf, math.inf)
    expected = expected[is_finite]
    gap = tensor[is_finite] - expected
    norm = max(float(expected.norm()), least_norm)
    if norm == 0:
        if gap.any():
            return _Measures(math.inf, math.inf)
        return _Measures(0.0, 0.0)
    return _Measures(float(gap.norm()) / norm, abs(float(gap.dot(expected))) / norm**2)


def _common_factor(tensors: Tensors, expected: Tensors) -> float | None:
    """Return the factor between all tensors of a stage; None if what is left without it is not small."""
    whole = flat(expected, expected)
    found = flat(tensors, expected)
    if not found.isfinite().all() or not whole.any():
        return None
    factor = float(found.dot(whole) / whole.dot(whole))
    rest = float((found - factor * whole).norm() / found.norm().clamp(min=1e-300))
    if rest < _REST_OF_MULTIPLE and abs(factor - 1) > rest:
        return factor
    return None


def _is_loss_scale(factor: float, loss_scale: float) -> bool:
    """Return whether a factor is a power of the loss scale."""
    if loss_scale == 1 or factor <= 0:
        return False
    power = math.log(factor) / math.log(loss_scale)
    return round(power) != 0 and abs(power - round(power)) < _NEAR_POWER


def _difference_of(name: str, tensor: Tensor, expected: Tensors, factor: float | None) -> Difference:
    """Return the element of a tensor that differs most."""
    other = expected[name]
    index = int((tensor - other).abs().nan_to_num(math.inf, math.inf).argmax())
    distance = _measures(tensor, other, 0.0).distance
    return Difference(name, distance, float(tensor[index]), float(other[index]), factor)


def _finding_of(cause: str, stage: str, detail: str, position: int, difference: Difference | None = None) -> Finding:
    explained = CAUSES[cause]
    return Finding(cause, stage, detail, position, difference, explained.advice, explained.code)


def _ratio_of(gap: _Gap) -> float:
    return gap.ratio
