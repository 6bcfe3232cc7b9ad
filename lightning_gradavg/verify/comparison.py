"""Where the record of a run first differs from that of another, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gradavg.verify.draws import of_no_sample
from lightning_gradavg.verify.records import Record, RecordedStep, Refused
from lightning_gradavg.verify.sketches import Difference, Tensors, compare_tensors, size_of

__all__ = [
    "Seen",
    "compare_records",
    "draws_problem",
    "logged_by_all",
    "stages_without_numbers",
]


class Seen(NamedTuple):
    """A difference at a stage of a step, and what was compared there."""

    stage: str
    step: int
    difference: Difference  # the largest
    found: Tensors
    expected: Tensors
    names: set[str]  # of all that differ


def compare_records(run: Record, expected_run: Record, tolerance: float) -> Iterator[Seen]:
    """Yield where a run differs from another, in its order.

    | stage | what is compared |
    |---|---|
    | "weights" | by how much the step moved the weights, because a wrong move is small beside the weights |
    | "optimizer options" | each option by itself, because options have no common factor |
    | any other | the tensors |

    Raises:
        Refused: If one takes other optimizer steps than the other, so that stages cannot be assigned to each other.
    """
    weights_before: Tensors = {}  # of the other run, after the step before
    for position, (step, expected_step) in enumerate(zip(run.steps, expected_run.steps, strict=False)):
        negligible: Tensors = {}  # masks of gradients that are zero but for rounding
        for stage, expected_stage in zip_longest(step.stages, expected_step.stages):
            if stage is None or expected_stage is None or stage.stage != expected_stage.stage:
                raise Refused("one process takes other optimizer steps in a batch than the run, or more of them")
            name, found, expected = stage.stage, stage.tensors, expected_stage.tensors
            noise: Tensors = {}
            if name == "initial weights":
                weights_before = expected
            elif name == "clipped gradient":
                negligible.update(_zero_but_for_rounding(expected))
            elif name == "weights":
                weights = expected
                found = _moved(found, weights_before)
                expected = _moved(weights, weights_before)
                # Optimizers enlarge what is zero but for rounding: it counts as moved as expected.
                for key in negligible.keys() & found.keys() & expected.keys():
                    found[key] = torch.where(negligible[key], expected[key], found[key])
                noise = weights
                weights_before = weights
            together = name != "optimizer options"
            differences = compare_tensors(found, expected, tolerance, noise, together=together)
            if differences:
                names = {difference.name for difference in differences}
                yield Seen(name, position, differences[0], found, expected, names)


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


def logged_by_all(steps_of_ranks: Sequence[RecordedStep]) -> Mapping[str, float]:
    """Return the values of a step that all ranks logged alike, as with `sync_dist`."""
    first, *others = steps_of_ranks
    values = dict(first.logged)
    for step in others:
        values = {name: value for name, value in values.items() if step.logged.get(name) == value}
    return values


def stages_without_numbers(record: Record, steps: int) -> dict[str, str]:
    """Return the stages of a run without a finite number: "none" if there is nothing at all, or "not finite"."""
    tensors_of_stages: dict[str, list[Tensor]] = {}
    for step in record.steps[:steps]:
        for stage in step.stages:
            tensors_of_stages.setdefault(stage.stage, []).extend(stage.tensors.values())
    without = {}
    for name, tensors in tensors_of_stages.items():
        if not tensors:
            without[name] = "none"
        elif not any(tensor.isfinite().any() for tensor in tensors):
            without[name] = "not finite"
    return without


def draws_problem(records: Sequence[Record], alone: Record) -> str:
    """Return why the random numbers of the ranks and of one process cannot be compared; "" if they can."""
    for record in (alone, *records):
        if record.draws_problem:
            return record.draws_problem
    for steps_of_ranks in zip(*(record.steps for record in records), strict=False):
        if any(step.drawn_in_hooks != steps_of_ranks[0].drawn_in_hooks for step in steps_of_ranks):
            return of_no_sample("in a communication hook")
    return ""
