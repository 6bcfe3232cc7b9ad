"""The comparison in the 16-bit precision that a run trains in, after the one in float64 has found nothing.

In float64, a fault exceeds rounding by far, and the judge names it exactly (`verify.explain`). What is left are faults
that exist in low precision alone. There, rounding is as large as some faults, so what counts as equal is no constant:
it is measured on the model.

1. The ranks train in the precision, and one process trains on the samples of all ranks, as in float64.
2. One process trains again, `DRAWS` times, from initial weights and inputs that are moved to a neighbouring 16-bit
   number, up or down at random (`rounding.Perturbation`). By how much its tensors change is what rounding explains.
3. Two measures of each tensor, at each stage of each step, are compared with the largest of these draws:

   | measure | of the run `G` and one process `F` | finds |
   |---|---|---|
   | distance | the norm of `G - F` over that of `F` | a tensor that is another one |
   | scale | `(G - F) . F` over `F . F` | a tensor that is multiplied: rounding of its elements cancels |

   All tensors of a stage are also measured as one vector, in which rounding cancels further.

A measure is a difference if it exceeds `MOST` times what rounding explains. This is the table of the causes; the first
row that holds gives the cause.

| case | cause |
|---|---|
| the ranks differ from each other | unsynchronised replicas |
| the weight of a loss is a whole number in float64, and another number here | total in 16 bits |
| the elements of a float32 gradient are 16-bit numbers, and those of the mean of its parts are not | 16-bit wire |
| the loss is finite on one side only | total in 16 bits |
| the reduced gradient is multiplied or divided by the loss scale | loss scale |
| the reduced gradient differs, and a total is in 16 bits | total in 16 bits |
| a later stage differs | that of the stage in float64 |
| any other | unexplained |

TTrace takes its tolerances from a perturbed run, too (Chen et al. 2025, arXiv:2506.09280).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gradavg.verify.draws import TOTAL_IN_16_BITS, TYPES_OF_16_BITS
from lightning_gradavg.verify.record import SKETCHED_ELEMENTS, Record, Refused, Step, Tensors
from lightning_gradavg.verify.report import CAUSES, Difference, Finding, Report, Rounding
from lightning_gradavg.verify.rounding import PRECISIONS, Perturbation
from lightning_gradavg.verify.twin import Build, Twin, compare_tensors, filled, flat

__all__ = ["DRAWS", "MOST", "judge_precision"]

DRAWS = 5
"""Perturbed runs of one process."""

MOST = 4.0
"""How many times as large as the largest draw a measure may be."""

_FEWEST_DRAWS = 3  # that take the same steps as the run that is not perturbed
_ROUNDING_OF_FLOAT32 = 1e-6  # what rounding explains at least: sums of float32 numbers in another order
_NEGLIGIBLE = 1e-5  # the norm of a tensor, beside the largest of its stage, that is nothing but rounding
_FEWEST_ELEMENTS = 64  # of a gradient whose every element is a 16-bit number by no accident
_EXACT_STAGES = ("initial weights", "optimizer options")  # the same numbers in any precision
_ALL = "all tensors together"
_REST_OF_MULTIPLE = 0.2  # what may be left of a vector beside a multiple of another one, relative to it
_NEAR_POWER = 0.05


def judge_precision(
    records: Sequence[Record],
    records_in_float64: Sequence[Record],
    build: Build,
    precision: str,
    accelerator: str,
    in_float64: Report,
) -> Report:
    """Return how a run in a 16-bit precision differs from one process, beyond rounding.

    Args:
        records: What the ranks recorded in the precision.
        records_in_float64: What they recorded in float64.
        build: Builds what is trained.
        precision: A key of `PRECISIONS`.
        accelerator: The type of the device.
        in_float64: The report of the same run in float64, which found no difference.
    """
    twin = Twin(records, build, double=False, device=accelerator, precision=precision)
    return _PrecisionJudge(records, records_in_float64, twin, precision, in_float64).report()


class _Stage(NamedTuple):
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
        records_in_float64: What they recorded in float64.
        twin: Trains on one process.
        precision: A key of `PRECISIONS`.
        in_float64: The report in float64.
    """

    def __init__(
        self,
        records: Sequence[Record],
        records_in_float64: Sequence[Record],
        twin: Twin,
        precision: str,
        in_float64: Report,
    ) -> None:
        self._records = records
        self._records_in_float64 = records_in_float64
        self._twin = twin
        self._name = precision
        self._precision = PRECISIONS[precision]
        self._in_float64 = in_float64
        self._gaps: list[_Gap] = []  # of all that was compared

    def report(self) -> Report:
        """Compare, and return the report that takes the place of that in float64."""
        findings: list[Finding] = []
        remarks: list[str] = []
        steps = min(len(record.steps) for record in self._records)
        try:
            finding = self._finding()
            if finding is not None:
                findings.append(finding)
                steps = finding.step + 1
        except Refused as error:
            remarks.append(str(error))
        return Report(
            strategy=self._in_float64.strategy,
            reduction=self._in_float64.reduction,
            world_size=len(self._records),
            steps=steps,
            tolerance=self._in_float64.tolerance,
            findings=[*findings, *self._in_float64.findings],  # in float64 there are notes only
            remarks=remarks,
            precision=self._name,
            baseline=self._in_float64.baseline,
            rounding=self._largest_gap(),
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
        finding = self._difference_between_ranks()
        if finding is not None:
            return finding
        alone = self._twin.train_in_precision(None)
        if alone.problem:
            raise Refused(alone.problem)
        draws = []
        for seed in range(DRAWS):
            draws.append(self._twin.train_in_precision(Perturbation(self._precision, seed)))
        return self._difference_to(alone, draws)

    def _difference_between_ranks(self) -> Finding | None:
        """Return the first difference between ranks, which hold the same bits after a reduction."""
        first = self._records[0]
        for record in self._records[1:]:
            for position, (step, step_of_first) in enumerate(zip(record.steps, first.steps, strict=False)):
                for snapshot, of_first in zip(step.snapshots, step_of_first.snapshots, strict=False):
                    if snapshot.stage == "buffers":
                        continue  # each rank may have its own: DDP broadcasts those of rank 0 before the next forward
                    differences = compare_tensors(snapshot.tensors, of_first.tensors, _ROUNDING_OF_FLOAT32)
                    if differences:
                        name = differences[0].name
                        detail = f"{snapshot.stage} of {name!r} on rank {record.rank} is not that of rank 0"
                        return _finding_of("unsynchronised replicas", snapshot.stage, detail, position)
        return None

    def _difference_to(self, alone: Record, draws: Sequence[Record]) -> Finding | None:
        """Return the first difference of the run to one process that its rounding does not explain."""
        run = self._records[0]
        stages_of_run = _stages_of(run, self._logged_by_all())
        stages_of_alone = _stages_of(alone)
        like_alone = [_Draw(draw, _stages_of(draw)) for draw in draws]
        for position, (step, expected_step) in enumerate(zip(run.steps, alone.steps, strict=False)):
            finding = self._finding_of_weight(position)
            if finding is None:
                finding = self._finding_of_wire(step, position)
            if finding is not None:
                return finding
            if step.is_skipped != expected_step.is_skipped:
                return self._finding_of_skipped_step(expected_step, position)
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
        stages: Sequence[_Stage],
        expected_stages: Sequence[_Stage],
        stages_of_draws: Sequence[Sequence[_Stage]],
    ) -> Finding | None:
        """Return the first stage of a step at which the run differs."""
        if [stage.name for stage in stages] != [stage.name for stage in expected_stages]:
            raise Refused("one process takes other optimizer steps in a batch than the run, or more of them")
        for index, (stage, expected) in enumerate(zip(stages, expected_stages, strict=True)):
            if stage.name in _EXACT_STAGES:
                differences = compare_tensors(stage.tensors, expected.tensors, _ROUNDING_OF_FLOAT32, together=False)
                if differences:
                    cause = "initial weights" if stage.name == "initial weights" else "optimizer options"
                    return _finding_of(cause, stage.name, f"{differences[0].name} is the first to differ", position)
                continue
            of_draws = [stages_of_draw[index].tensors for stages_of_draw in stages_of_draws]
            # A parameter may have no gradient in one of the runs, as where rounding decides which expert gets a token.
            like: Tensors = {}
            for tensors in (*of_draws, stage.tensors, expected.tensors):
                like.update(tensors)
            if stage.name == "logged values":
                # Values that the ranks do not log alike are of one rank, and one process logs others.
                like = {name: expected.tensors[name] for name in stage.tensors if name in expected.tensors}
            found_stage = _Stage(stage.name, filled(stage.tensors, like))
            expected_tensors = filled(expected.tensors, like)
            gaps = _gaps(found_stage, expected_tensors, [filled(tensors, like) for tensors in of_draws])
            self._gaps += gaps
            largest = max(gaps, key=_ratio_of, default=None)
            if largest is not None and largest.ratio > MOST:
                return self._explained(found_stage, expected_tensors, largest, position)
        return None

    def _logged_by_all(self) -> list[Mapping[str, float]]:
        """Return the values of each step that all ranks logged alike, as with `sync_dist`."""
        logged: list[Mapping[str, float]] = []
        for steps in zip(*(record.steps for record in self._records), strict=False):
            values = dict(steps[0].logged)
            for step in steps[1:]:
                values = {name: value for name, value in values.items() if step.logged.get(name) == value}
            logged.append(values)
        return logged

    def _finding_of_weight(self, position: int) -> Finding | None:
        """Return the finding that a count of terms is rounded, if the user's weight of a loss is."""
        for record, in_float64 in zip(self._records, self._records_in_float64, strict=True):
            micro_batches = record.steps[position].micro_batches
            for rounded, exact in zip(micro_batches, in_float64.steps[position].micro_batches, strict=True):
                if rounded.weight is None or exact.weight is None:
                    continue
                if exact.weight == round(exact.weight) and rounded.weight != exact.weight:
                    detail = (
                        f"rank {record.rank} gives the weight {rounded.weight:g}, which is {exact.weight:g} in float64"
                    )
                    return _finding_of("total in 16 bits", "reduced gradient", detail, position)
        return None

    def _finding_of_wire(self, step: Step, position: int) -> Finding | None:
        """Return the finding that gradients of float32 were rounded to 16 bits, if they were."""
        if not self._precision.keeps_gradients or step.is_skipped or len(self._records) == 1:
            return None
        for record in self._records:
            # The mean of a single rank's gradients is a 16-bit number by nature.
            if any(
                micro_batch.weight == 0 or not micro_batch.counts
                for micro_batch in record.steps[position].micro_batches
            ):
                return None
        for snapshot in step.snapshots:
            if snapshot.stage != "reduced gradient":
                continue
            values = _elements(snapshot.tensors) * step.loss_scale
            if int(values.count_nonzero()) < _FEWEST_ELEMENTS:
                continue
            for dtype in TYPES_OF_16_BITS:
                # Under autocast, the gradients of both ranks are 16-bit numbers, and their mean may be one, too.
                if not _are_of_type(values, dtype):
                    continue
                if not _are_of_type(self._mean_of_parts(position) * step.loss_scale, dtype):
                    name = str(dtype).removeprefix("torch.")
                    detail = f"every element of the gradient is a {name} number"
                    return _finding_of("16-bit wire", snapshot.stage, detail, position)
        return None

    def _mean_of_parts(self, position: int) -> Tensor:
        """Return the elements of the mean of what one process computes of each micro-batch of a step alone."""
        gradients = []
        for rank_batch in self._twin.group_of_step(position):
            gradients.append(_elements(self._twin.train_step([rank_batch], position).gradient))
        return torch.stack(gradients).mean(0)

    def _finding_of_skipped_step(self, expected_step: Step, position: int) -> Finding:
        """Return the finding that a step was skipped on one side, or raise `Refused` if it may be none."""
        where = "the ranks"
        if expected_step.is_skipped:
            where = "one process"
        losses = [micro_batch.loss for record in self._records for micro_batch in record.steps[position].micro_batches]
        are_finite = all(math.isfinite(loss) for loss in losses)
        if are_finite != math.isfinite(expected_step.micro_batches[-1].loss):
            detail = f"the loss overflows on {where} only"
            return _finding_of("total in 16 bits", "reduced gradient", detail, position)
        raise Refused(
            f"the loss scaler skips step {position} on {where} only, because a gradient overflows there at a scale of"
            f" {expected_step.loss_scale:g}: verify with a smaller initial scale"
        )

    def _explained(self, stage: _Stage, expected: Tensors, gap: _Gap, position: int) -> Finding:
        """Return the finding of a difference; the table of the module's docstring has the cases."""
        step = self._records[0].steps[position]
        factor = _common_factor(stage.tensors, expected)
        detail = (
            f"`{gap.name}` differs by {gap.found:.2g}, and rounding in {self._name} explains {gap.explained:.2g}"
            f" ({gap.ratio:.3g} x)"
        )
        if factor is not None:
            detail += f"; all together are {factor:.4g} x those of one process"
        cause = "unexplained"
        if stage.name == "weights":
            cause = "weights beside the gradient"
        elif stage.name == "buffers":
            cause = "buffers of one rank"
        elif stage.name == "logged values":
            cause = "logged value"
        elif factor is not None and _is_loss_scale(factor, step.loss_scale):
            cause = "loss scale"
            detail += f", and the loss scale is {step.loss_scale:g}"
        elif self._has_total_in_16_bits(step):
            cause = "total in 16 bits"
        name = gap.name
        if name == _ALL:
            name = max(stage.tensors, key=lambda name: float(stage.tensors[name].norm()))
        difference = _difference_of(name, stage.tensors[name], expected, factor)
        return _finding_of(cause, stage.name, detail, position, difference)

    def _has_total_in_16_bits(self, step: Step) -> bool:
        """Return whether `training_step`, or the gradient of a window, adds up in a 16-bit type."""
        if any(TOTAL_IN_16_BITS in record.step_operators for record in self._records):
            return True
        return len(step.micro_batches) > 1 and not self._precision.keeps_gradients


class _Draw(NamedTuple):
    """A perturbed run of one process."""

    record: Record
    stages: Sequence[Sequence[_Stage]]  # of each step

    def takes_same_step(self, alone: Record, position: int) -> bool:
        """Return whether it goes through the same stages of a step as the run that is not perturbed."""
        if position >= len(self.record.steps):
            return False
        step, expected = self.record.steps[position], alone.steps[position]
        names = [snapshot.stage for snapshot in step.snapshots]
        return step.is_skipped == expected.is_skipped and names == [snapshot.stage for snapshot in expected.snapshots]


def _stages_of(record: Record, logged: Sequence[Mapping[str, float]] | None = None) -> list[list[_Stage]]:
    """Return the stages of each step, with the moves of weights, and at last with what was logged."""
    if logged is None:
        logged = [step.logged for step in record.steps]
    weights: Tensors = {}
    steps: list[list[_Stage]] = []
    for step, logged_values in zip(record.steps, logged, strict=False):
        stages: list[_Stage] = []
        for snapshot in step.snapshots:
            tensors = snapshot.tensors
            if snapshot.stage == "weights":
                tensors = {name: tensor - weights[name] for name, tensor in tensors.items() if name in weights}
            if snapshot.stage in ("initial weights", "weights"):
                weights = snapshot.tensors
            stages.append(_Stage(snapshot.stage, tensors))
        values = {}
        for name, value in logged_values.items():
            values[name] = torch.tensor([value], dtype=torch.float64)
        stages.append(_Stage("logged values", values))
        steps.append(stages)
    return steps


def _gaps(stage: _Stage, expected: Tensors, of_draws: Sequence[Tensors]) -> list[_Gap]:
    """Return the measures of all tensors of a stage beside what the draws explain of them; all have the same names."""
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
            most = largest_draw + _ROUNDING_OF_FLOAT32
            if name != _ALL:
                most = max(largest_draw, usual) + _ROUNDING_OF_FLOAT32
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


def _elements(tensors: Tensors) -> Tensor:
    """Return the elements that sketches hold, without the sums behind them."""
    empty = torch.zeros(0, dtype=torch.float64)
    return torch.cat([empty, *(sketch[:SKETCHED_ELEMENTS] for sketch in tensors.values())])


def _are_of_type(values: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a type has all of these numbers."""
    return torch.equal(values.to(dtype).double(), values)


def _ratio_of(gap: _Gap) -> float:
    return gap.ratio
