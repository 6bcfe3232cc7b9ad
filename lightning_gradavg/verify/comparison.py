"""Where the record of a run first differs from that of another, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from lightning_gradavg.verify.records import Record, RecordedStep, Refused, StageTensors
from lightning_gradavg.verify.sketches import NEGLIGIBLE, Difference, Tensors, compare_tensors, size_of

__all__ = ["Seen", "compare_records", "stages_with_numbers"]


class Seen(NamedTuple):
    """A difference at a stage of a step, and what was compared there."""

    stage: str
    step: int
    difference: Difference  # the largest
    found: Tensors
    expected: Tensors
    names: set[str]  # of all that differ


def compare_records(run: Record, expected_run: Record, tolerance: float) -> Iterator[Seen]:
    """Yield where a run differs from another, in its order, by more than the tolerance and rounding.

    Of weights it compares by how much the step moved them: a wrong move is small beside the weights.

    Raises:
        Refused: If one takes other optimizer steps than the other, so that stages cannot be assigned to each other.
    """
    weights_before: Tensors = {}  # of the other run, after the step before
    negligible: Tensors = {}  # masks of gradients that are zero but for rounding
    for position, (step, expected_step) in enumerate(zip(run.steps, expected_run.steps, strict=False)):
        for stage, expected_stage in zip_longest(step.stages, expected_step.stages):
            if stage is None or expected_stage is None or stage.stage != expected_stage.stage:
                raise Refused("one process takes other optimizer steps in a batch than the run, or more of them")
            found = stage.tensors
            expected = expected_stage.tensors
            rounding: dict[str, float] | None = None
            if stage.stage == "clipped gradient":
                negligible |= _zero_but_for_rounding(expected)
            elif stage.stage == "weights":
                # The move carries the rounding of the weights.
                rounding = {name: NEGLIGIBLE * tolerance * size_of(weight) for name, weight in expected.items()}
                found = _moved(found, weights_before)
                expected = _moved(expected, weights_before)
                # Optimizers enlarge what is zero but for rounding: it counts as moved as expected.
                for name in negligible.keys() & found.keys() & expected.keys():
                    found[name] = torch.where(negligible[name], expected[name], found[name])
                negligible = {}
            if stage.stage in ("initial weights", "weights"):
                weights_before = expected_stage.tensors
            differences = compare_tensors(found, expected, tolerance, rounding)
            if differences:
                names = {difference.name for difference in differences}
                yield Seen(stage.stage, position, differences[0], found, expected, names)


def _moved(weights: Tensors, before: Tensors) -> Tensors:
    """Return by how much weights differ from those before; sketches are linear."""
    return {name: weight - before[name] for name, weight in weights.items() if name in before}


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


def stages_with_numbers(steps: Sequence[RecordedStep]) -> set[str]:
    """Return the stages of which some number is finite, and those of what is read and logged."""
    stages = {"samples"}
    for step in steps:
        for stage in (*step.stages, StageTensors("logged values", step.logged)):
            if any(tensor.isfinite().any() for tensor in stage.tensors.values()):
                stages.add(stage.stage)
    return stages
