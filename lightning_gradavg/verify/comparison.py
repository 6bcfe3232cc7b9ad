"""Where the record of a run first differs from that of another, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gradavg.verify.draws import first_other_draw
from lightning_gradavg.verify.lines import CodeLine
from lightning_gradavg.verify.records import DrawnNumbers, Record, RecordedStep, Refused
from lightning_gradavg.verify.sketches import Difference, Tensors, compare_tensors, size_of

__all__ = [
    "Seen",
    "common_draws_problem",
    "compare_records",
    "logged_by_all",
    "sample_draws_problem",
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


def common_draws_problem(records: Sequence[Record], alone: Record) -> str:
    """Return which random numbers of no sample the ranks and one process do not share; "" if there are none.

    They share what is drawn behind a seed of the user's, if the seed is the same.
    """
    for position, expected_step in enumerate(alone.steps):
        for record in records:
            if position >= len(record.steps):
                continue
            draws = record.steps[position].common_draws
            drawn_by_chance = [draw for draw in (*draws, *expected_step.common_draws) if not draw.seed]
            if not drawn_by_chance and _seeds_of(draws) == _seeds_of(expected_step.common_draws):
                continue
            named = drawn_by_chance or [*draws, *expected_step.common_draws]
            names = ", ".join(dict.fromkeys(draw.operator for draw in named))
            return (
                f"one draw for a whole batch ({names}): it belongs to no sample; every rank draws its own, and one"
                f" process draws one{_at(named[0].place)}"
            )
    return ""


def _seeds_of(draws: Sequence[DrawnNumbers]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(draw.operator, draw.shape, draw.seed) for draw in draws]


def sample_draws_problem(records: Sequence[Record], alone: Record, step: int) -> str:
    """Return which random numbers a batch of another size draws otherwise in a step; "" if there are none."""
    expected = alone.steps[step].batches[-1]
    for record in records:
        if step >= len(record.steps):
            continue
        for rank_batch in record.steps[step].batches:
            if not rank_batch.counts:
                continue
            samples = rank_batch.sizes_of_pieces[-1]
            draw = first_other_draw(rank_batch.draws, samples, expected.draws, expected.size)
            if draw is not None:
                return f"a batch of another size draws other random numbers ({draw.operator}){_at(draw.place)}"
    return ""


def _at(line: CodeLine | None) -> str:
    if line is None:
        return ""
    return f"; drawn in {line}"
