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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gradavg.verify.causes import CAUSES
from lightning_gradavg.verify.comparison import compare_records, draws_problem
from lightning_gradavg.verify.records import Record, RecordedStep, Refused, StageTensors
from lightning_gradavg.verify.report import STAGES, Finding, Report, Rounding
from lightning_gradavg.verify.rounding import PRECISIONS, Perturbation
from lightning_gradavg.verify.sketches import Difference, Tensors, filled, flat
from lightning_gradavg.verify.twin import Build, Twin

__all__ = ["DRAWS", "MOST", "judge_precision"]

DRAWS = 5
"""Perturbed runs of one process."""

MOST = 4.0
"""How many times as large as the largest draw a measure may be."""

_FEWEST_DRAWS = 3  # that take the same steps as the run that is not perturbed
_ROUNDING_OF_FLOAT32 = 1e-6  # what rounding explains at least: sums of float32 numbers in another order
_NEGLIGIBLE = 1e-5  # the norm of a tensor, beside the largest of its stage, that is nothing but rounding
_ALL = "all tensors together"
_REST_OF_MULTIPLE = 0.2  # what may be left of a vector beside a multiple of another one, relative to it
_NEAR_POWER = 0.05

_CAUSES_OF_STAGES = {
    "initial weights": "initial weights",
    "optimizer options": "optimizer options",
    "weights": "weights beside the gradient",
    "buffers": "buffers of one rank",
}


class _Gap(NamedTuple):
    """The largest measure of a stage of a step beside what rounding explains of it."""

    step: int
    stage: str
    name: str  # of the tensor
    found: float
    explained: float
    factor: float | None  # of all tensors of the stage, if they are a multiple of those of one process
    difference: Difference

    @property
    def ratio(self) -> float:
        """The measure over what rounding explains; infinity if something is not finite on one side alone."""
        if math.isfinite(self.found):
            return self.found / self.explained
        return math.inf


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
    report = replace(
        in_float64, steps=min(len(record.steps) for record in records), precision=precision, remarks=[], uncompared=[]
    )
    gaps: list[_Gap] = []
    try:
        alone = _alone(records, twin)
        finding = _difference_between_ranks(records)
        if finding is None:
            finding = _first_difference(records, alone, twin, tolerance, gaps)
    except Refused as error:
        report = replace(report, remarks=[str(error)], uncompared=STAGES[2:])
    else:
        if finding is not None:
            # In float64 there are notes only.
            report = replace(report, steps=finding.step + 1, findings=[finding, *in_float64.findings])
    if not gaps:
        return report
    largest = max(gaps, key=_ratio_of)
    name = f"`{largest.name}` ({largest.stage})"
    return replace(report, rounding=Rounding(largest.ratio, MOST, largest.found, largest.explained, name, DRAWS))


def _alone(records: Sequence[Record], twin: Twin) -> Record:
    """Train on one process, and return its record; raise `Refused` if it cannot be compared with those of the ranks."""
    alone = twin.train_in_precision(None)
    for record in (*records, alone):
        if record.problem:
            raise Refused(record.problem)
    problem = draws_problem(records, alone)
    if problem:
        raise Refused(problem)
    return alone


def _first_difference(
    records: Sequence[Record], alone: Record, twin: Twin, tolerance: float, gaps: list[_Gap]
) -> Finding | None:
    """Return the first difference to one process that rounding does not explain; `gaps` get all that was compared."""
    precision = str(twin.precision)
    for gap in _gaps(records[0], alone, twin, precision, tolerance):
        gaps.append(gap)
        if gap.ratio > MOST:
            return _explained(gap, records[0].steps[gap.step].loss_scale, precision)
    if not gaps:
        raise Refused(
            f"no gradient of the compared steps is finite in {precision}: a loss scaler lowers its scale in such"
            " steps, so verify more --steps"
        )
    return None


def _difference_between_ranks(records: Sequence[Record]) -> Finding | None:
    """Return the first difference between ranks, which hold the same bits after a reduction."""
    for record in records[1:]:
        for seen in compare_records(record, records[0], _ROUNDING_OF_FLOAT32):
            if seen.stage == "buffers":
                continue  # each rank may have its own: DDP broadcasts those of rank 0 before the next forward
            detail = f"{seen.stage} of `{seen.difference.name}` on rank {record.rank} is not that of rank 0"
            return _finding_of("unsynchronised replicas", seen.stage, detail, seen.step)
    return None


def _gaps(run: Record, alone: Record, twin: Twin, precision: str, tolerance: float) -> Iterator[_Gap]:
    """Yield the largest measure of each stage of each step of a run."""
    draws = []
    for seed in range(DRAWS):
        draws.append(twin.train_in_precision(Perturbation(PRECISIONS[precision], seed)))
    before: dict[int, Tensors] = {}  # weights before the step, by the id of the record
    for position, (step, expected_step) in enumerate(zip(run.steps, alone.steps, strict=False)):
        if _course_of(step) != _course_of(expected_step):
            raise Refused(
                f"in step {position}, one side skips an optimizer step, or takes another one: a loss scaler skips where"
                f" a gradient overflows, here at a scale of {expected_step.loss_scale:g}. Verify with a smaller scale"
            )
        draws = [draw for draw in draws if _takes_same_step(draw, position, expected_step)]
        if len(draws) < _FEWEST_DRAWS:
            raise Refused(f"rounding alone decides whether the loss scaler skips step {position}")
        runs = [run, alone, *draws]
        for index, stage in enumerate(step.stages):
            found, expected, *of_draws = [_compared(record, position, index, before) for record in runs]
            if not step.is_skipped and (found or expected):
                yield _largest_gap(position, stage.stage, found, expected, of_draws, tolerance / MOST)


def _course_of(step: RecordedStep) -> list[object]:
    """Return what a step goes through."""
    return [step.is_skipped, *(stage.stage for stage in step.stages)]


def _takes_same_step(draw: Record, position: int, expected: RecordedStep) -> bool:
    return position < len(draw.steps) and _course_of(draw.steps[position]) == _course_of(expected)


def _compared(record: Record, position: int, index: int, before: dict[int, Tensors]) -> Tensors:
    """Return the tensors of a stage; at "weights", by how much the step moved them."""
    stage: StageTensors = record.steps[position].stages[index]
    if stage.stage not in ("initial weights", "weights"):
        return stage.tensors
    weights_before = before.get(id(record))
    before[id(record)] = stage.tensors
    if weights_before is None:
        return stage.tensors
    return {name: tensor - weights_before[name] for name, tensor in stage.tensors.items() if name in weights_before}


def _largest_gap(
    step: int, stage: str, found: Tensors, expected: Tensors, of_draws: Sequence[Tensors], accepted: float
) -> _Gap:
    """Return the measure of a stage that exceeds most what the draws explain, or the user accepts."""
    # A parameter may have no gradient in one of the runs, as where rounding decides which expert gets a token.
    like: Tensors = {}
    for tensors in (*of_draws, found, expected):
        like.update(tensors)
    found, expected = filled(found, like), filled(expected, like)
    factor = _common_factor(flat(found, like), flat(expected, like))
    least_norm = _NEGLIGIBLE * max(float(tensor.nan_to_num(0.0, 0.0, 0.0).norm()) for tensor in expected.values())
    measures = _measures(found, expected, least_norm)
    measures_of_draws = [_measures(filled(tensors, like), expected, least_norm) for tensors in of_draws]
    gaps = []
    for index in range(2):
        explained = {name: max(draw[name][index] for draw in measures_of_draws) for name in measures}
        # The draws of a small tensor may all be small by chance.
        usual = statistics.median(value for name, value in explained.items() if name != _ALL)
        for name, measure in measures.items():
            most = explained[name]
            if name != _ALL:
                most = max(most, usual)
            most = max(most + _ROUNDING_OF_FLOAT32, accepted)
            named = name
            if name == _ALL:
                named = max(found, key=lambda key: float(found[key].norm()))
            difference = _difference_of(named, found[named], expected[named], factor)
            gaps.append(_Gap(step, stage, name, measure[index], most, factor, difference))
    return max(gaps, key=_ratio_of)


def _measures(tensors: Tensors, expected: Tensors, least_norm: float) -> Mapping[str, tuple[float, float]]:
    """Return distance and scale of each tensor, and of all together."""
    measures = {name: _measures_of(tensor, expected[name], least_norm) for name, tensor in tensors.items()}
    measures[_ALL] = _measures_of(flat(tensors, expected), flat(expected, expected), 0.0)
    return measures


def _measures_of(tensor: Tensor, expected: Tensor, least_norm: float) -> tuple[float, float]:
    """Return by how much a tensor differs; of one that is smaller than `least_norm`, beside that."""
    is_finite = expected.isfinite()
    if not torch.equal(tensor.isfinite(), is_finite):
        return math.inf, math.inf
    expected = expected[is_finite]
    gap = tensor[is_finite] - expected
    norm = max(float(expected.norm()), least_norm)
    if norm == 0:
        distance = math.inf if gap.any() else 0.0
        return distance, distance
    return float(gap.norm()) / norm, abs(float(gap.dot(expected))) / norm**2


def _common_factor(found: Tensor, expected: Tensor) -> float | None:
    """Return the factor between all tensors of a stage; None if what is left without it is not small."""
    if not found.isfinite().all() or not expected.any():
        return None
    factor = float(found.dot(expected) / expected.dot(expected))
    rest = float((found - factor * expected).norm() / found.norm().clamp(min=1e-300))
    if rest < _REST_OF_MULTIPLE and abs(factor - 1) > rest:
        return factor
    return None


def _difference_of(name: str, tensor: Tensor, expected: Tensor, factor: float | None) -> Difference:
    """Return the element of a tensor that differs most."""
    index = int((tensor - expected).abs().nan_to_num(math.inf, math.inf).argmax())
    distance, _ = _measures_of(tensor, expected, 0.0)
    return Difference(name, distance, float(tensor[index]), float(expected[index]), factor)


def _explained(gap: _Gap, loss_scale: float, precision: str) -> Finding:
    """Return the finding of a difference: a gradient is known by its factor, any other stage has its cause."""
    detail = (
        f"`{gap.name}` differs by {gap.found:.2g}, and rounding in {precision} explains {gap.explained:.2g}"
        f" ({gap.ratio:.3g} x)"
    )
    cause = _CAUSES_OF_STAGES.get(gap.stage, "unexplained")
    if gap.factor is not None:
        detail += f"; all together are {gap.factor:.4g} x those of one process"
        if "gradient" in gap.stage and _is_loss_scale(gap.factor, loss_scale):
            cause = "loss scale"
            detail += f", and the loss scale is {loss_scale:g}"
    return _finding_of(cause, gap.stage, detail, gap.step, gap.difference)


def _is_loss_scale(factor: float, loss_scale: float) -> bool:
    """Return whether a factor is a power of the loss scale."""
    if loss_scale == 1 or factor <= 0:
        return False
    power = math.log(factor) / math.log(loss_scale)
    return round(power) != 0 and abs(power - round(power)) < _NEAR_POWER


def _finding_of(cause: str, stage: str, detail: str, position: int, difference: Difference | None = None) -> Finding:
    explained = CAUSES[cause]
    return Finding(cause, stage, detail, position, difference, explained.advice, explained.code)


def _ratio_of(gap: _Gap) -> float:
    return gap.ratio
