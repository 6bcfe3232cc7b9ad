"""Where the record of a run first differs from that of another, stage by stage."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

import torch

from lightning_gradavg.verify.records import Record, RecordedStep, Refused, StageTensors
from lightning_gradavg.verify.sketches import NEGLIGIBLE, Difference, Tensors, compare_tensors, filled, gaps_of, size_of

__all__ = ["Rounding", "Seen", "compare_records", "measure_rounding", "stages_with_numbers"]

Rounding: TypeAlias = Mapping[str, Mapping[str, float]]
"""By how much rounding may change an element: by stages, and there by tensors."""

_MOST_OF_ROUNDING = 4.0
"""How many times as large as the rounding that was measured a difference may be."""


class Seen(NamedTuple):
    """A difference at a stage of a step, and what was compared there."""

    stage: str
    step: int
    difference: Difference  # the largest
    found: Tensors
    expected: Tensors
    names: set[str]  # of all that differ


class _Pair(NamedTuple):
    """The tensors of a stage of a step, in two runs."""

    stage: str
    step: int
    found: Tensors
    expected: Tensors
    origin: Tensors  # what they were computed from, whose rounding they carry


def _pairs(run: Record, expected_run: Record) -> Iterator[_Pair]:
    """Yield what can be compared of two runs, in their order. Of weights it is by how much the step moved them.

    A wrong move is small beside the weights.

    Raises:
        Refused: If one takes other optimizer steps than the other, so that stages cannot be assigned to each other.
    """
    weights_before: Tensors = {}  # of the other run, after the step before
    for position, (step, expected_step) in enumerate(zip(run.steps, expected_run.steps, strict=False)):
        for stage, expected_stage in zip_longest(step.stages, expected_step.stages):
            if stage is None or expected_stage is None or stage.stage != expected_stage.stage:
                raise Refused("one process takes other optimizer steps in a batch than the run, or more of them")
            expected = expected_stage.tensors
            pair = _Pair(stage.stage, position, stage.tensors, expected, expected)
            if stage.stage == "weights":
                moved = _moved(stage.tensors, weights_before)
                pair = pair._replace(found=moved, expected=_moved(expected, weights_before))
            if stage.stage in ("initial weights", "weights"):
                weights_before = expected
            yield pair


def _moved(weights: Tensors, before: Tensors) -> Tensors:
    """Return by how much weights differ from those before; sketches are linear."""
    return {name: weight - before[name] for name, weight in weights.items() if name in before}


def compare_records(
    run: Record, expected_run: Record, tolerance: float, rounding: Rounding | None = None
) -> Iterator[Seen]:
    """Yield where a run differs from another, in its order, by more than the tolerance and what rounding explains."""
    negligible: Tensors = {}  # masks of gradients that are zero but for rounding
    for pair in _pairs(run, expected_run):
        found = pair.found
        of_stage: Mapping[str, float] | None = None
        if rounding is not None:
            of_stage = rounding.get(pair.stage, {})
        elif pair.stage == "clipped gradient":
            negligible = {**negligible, **_zero_but_for_rounding(pair.expected)}
        elif pair.stage == "weights":
            # Optimizers enlarge what is zero but for rounding: it counts as moved as expected.
            for name in negligible.keys() & found.keys() & pair.expected.keys():
                found[name] = torch.where(negligible[name], pair.expected[name], found[name])
            of_stage = {name: NEGLIGIBLE * tolerance * size_of(weight) for name, weight in pair.origin.items()}
            negligible = {}
        differences = compare_tensors(found, pair.expected, tolerance, of_stage)
        if differences:
            names = {difference.name for difference in differences}
            yield Seen(pair.stage, pair.step, differences[0], found, pair.expected, names)


def _zero_but_for_rounding(gradients: Tensors) -> Tensors:
    """Return masks of the elements of gradients that are next to nothing beside the largest of all."""
    largest = max((size_of(gradient) for gradient in gradients.values()), default=0.0)
    least = 1e-10 * largest
    masks = {}
    for name, gradient in gradients.items():
        mask = gradient.abs() < least
        # An exact zero is a gradient like any other, as of a word that does not occur. In a tensor of rounding alone,
        # as of a bias before batch norm, it is rounding, too.
        if not 0 < size_of(gradient) < least:
            mask &= gradient != 0
        masks[name] = mask
    return masks


def measure_rounding(in_16_bits: Record, in_float64: Record) -> Rounding:
    """Return what rounding explains: `_MOST_OF_ROUNDING` times what it changes in the same run on one process.

    The largest change of all steps counts. That of a small tensor may be small by chance, so the usual one of its stage
    counts if it is larger.

    Raises:
        Refused: If it explains that most gradients, or a buffer, are lost, so that no difference shows anything.
    """
    rounding: dict[str, dict[str, float]] = {}
    for pair in _pairs(in_16_bits, in_float64):
        of_stage = rounding.setdefault(pair.stage, {})
        # Rounding may decide whether a parameter has a gradient, as where it chooses the expert for a token.
        like = {**pair.found, **pair.expected}
        low = filled(pair.found, like)
        exact = filled(pair.expected, like)
        sizes = {}
        changes = {}  # relative ones
        for name in like:
            sizes[name] = max(size_of(exact[name]), 1e-300)
            changes[name] = float(gaps_of(low[name], exact[name]).max()) / sizes[name]
        if not changes:
            continue
        usual = statistics.median(changes.values())
        # A gradient may be nothing but rounding, as of a bias before a norm.
        lost = {"reduced gradient": usual, "buffers": max(changes.values())}.get(pair.stage, 0.0)
        if _MOST_OF_ROUNDING * lost >= 1:
            raise Refused(
                f"in this precision the {pair.stage} of one process itself is {lost:.2g} x away from float64: look for"
                " a count or a sum that is kept in 16 bits"
            )
        for name, change in changes.items():
            of_stage[name] = max(of_stage.get(name, 0.0), _MOST_OF_ROUNDING * max(change, usual) * sizes[name])
    return rounding


def stages_with_numbers(steps: Sequence[RecordedStep]) -> set[str]:
    """Return the stages of which some number is finite, and those of what is read and logged."""
    stages = {"samples"}
    for step in steps:
        for stage in (*step.stages, StageTensors("logged values", step.logged)):
            if any(tensor.isfinite().any() for tensor in stage.tensors.values()):
                stages.add(stage.stage)
    return stages
