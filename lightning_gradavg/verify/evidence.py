"""What is known of one optimizer step, and what its reduced gradient shows.

Four gradients are known. `L` are those of the micro-batches as the ranks computed them, `P` those that one process
computes of each alone, `F` that of all samples at once, and `G` what the reduction made of `L`. A combination of `P` that
is `F` is *right*; with it, `P` makes the gradient `E` that one process expects, and the reduced gradient is equal if `G` is
`E`. Where it is not, a combination of `L` that is `G` is what was *done*, and where the right and the done are not the same
their names say why. Where no combination of `P` is `F`, because of batch norm or a loss that compares samples, `E` is `F`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lightning_gradavg.reduction.reduce import combine
from lightning_gradavg.verify.compare import (
    RIGHT,
    Parts,
    Tolerance,
    clipped_to,
    combinations,
    combined,
    differences,
    factor_between,
    flattened,
    is_rounding,
    matches,
    relative_gap,
    rounded_on_the_wire,
)
from lightning_gradavg.verify.record import WHOLE_LOSS, Tape, Tensors
from lightning_gradavg.verify.reference import Examined
from lightning_gradavg.verify.report import times

__all__ = ["Evidence", "Expected"]

_MEANS = frozenset({"mean", "samples", "weights", "mean of the ranks' means"})
_TWICE = frozenset({"divided twice", "samples, divided twice", "weights, divided twice"})
_NEAR = 1e-3  # of a factor that is 1


@dataclass(frozen=True)
class Expected:
    """The gradient that one process expects of a step.

    Attributes:
        gradient: Sketches of it; None where it cannot be told.
        right: The combinations of its parts that it is.
        shares: Their coefficients, one for each piece; None where it is the whole's own.
        because: What makes it no combination of its parts, as cause and detail; None where it is one.
        problem: Why it cannot be told.
    """

    gradient: Tensors | None = None
    right: tuple[str, ...] = ()
    shares: tuple[float, ...] | None = None
    because: tuple[str, str] | None = None
    problem: str = ""


class Evidence:
    """What is known of one step.

    Args:
        tapes: What the ranks recorded.
        position: The step.
        examined: What the reference found out about the act that it is in.
        tolerance: What rounding stays below.
    """

    def __init__(self, tapes: Sequence[Tape], position: int, examined: Examined, tolerance: Tolerance) -> None:
        self.position, self.examined, self.tolerance = position, examined, tolerance
        self.facts, self.pieces, self.split = tapes[0].facts, examined.act.pieces, examined.split
        self.step = tapes[0].steps[position]
        self.others = [tape.steps[position] for tape in tapes[1:]]
        self.world_size = len(tapes)
        self.tensors = self.step.reduced
        own = None if self.step.within is None else str(self.step.within)
        of_parts = [key for part in examined.parts for key in part.gradients]
        of_whole = list(self.split.whole.gradients) if self.split.whole is not None else []
        self.keys = list(dict.fromkeys((*of_parts, *of_whole))) if own is None else [own]
        self.key, self.own_key = self.keys[0] if len(self.keys) == 1 else WHOLE_LOSS, own or WHOLE_LOSS

    @cached_property
    def like(self) -> Tensors:
        """What vectors are in the order of: all that have a gradient, in the run or on one process."""
        whole = [self.split.whole] if self.split.whole is not None else []
        known = [part.gradients.get(key, {}) for part in (*self.examined.parts, *whole) for key in self.keys]
        return {name: each for tensors in (*known, self.tensors) for name, each in tensors.items()}

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return sketches of gradients as one vector."""
        return flattened(tensors, self.like)

    def parts(self, key: str) -> Parts:
        """Return what is known of the micro-batches and their weights."""
        backward = self.step.backward if self.step.within is not None else None
        known = replace(self.split, pieces=self.pieces, parts=self.examined.parts).known(
            key if backward is None else str(backward)
        )
        return replace(known, world_size=self.world_size, accumulation=self.facts.window)

    @cached_property
    def pairs(self) -> list[tuple[Tensors, Tensors] | None]:
        """For each piece what its rank added to the gradients, and what one process adds; None where not known."""
        found: list[tuple[Tensors, Tensors] | None] = []
        for piece, part in zip(self.pieces, self.examined.parts, strict=True):
            mine, seeds = piece.call.gradients.get(self.own_key), piece.call.seeds
            alone: Tensors = {}
            for key in self.keys:
                seed = seeds.get(key if self.step.within is None else str(self.step.backward), 1.0)
                for name, tensor in part.gradients.get(key, {}).items():
                    alone[name] = alone.get(name, 0) + seed * tensor
            usable = mine and all(seed != 0 and math.isfinite(seed) for seed in seeds.values())
            kept = {name: tensor for name, tensor in (mine or {}).items() if name in self.like}
            found.append((kept, alone) if usable and not self.facts.whole_only else None)
        return found

    @cached_property
    def alike(self) -> bool:
        """Whether every rank computed what one process computes of the same samples."""
        known = [pair for pair in self.pairs if pair is not None]
        return all(is_rounding(self.flat(mine), self.flat(alone), (), self.tolerance) for mine, alone in known)

    @cached_property
    def local(self) -> list[Tensors]:
        """`L`, without what the run multiplied it by; where it is not known, `P`."""
        rows = []
        for piece, part, pair in zip(self.pieces, self.examined.parts, self.pairs, strict=True):
            seeds = set(piece.call.seeds.values())
            if pair is not None and len(seeds) == 1:
                rows.append({name: tensor / next(iter(seeds)) for name, tensor in pair[0].items()})
            else:
                rows.append(part.gradients.get(self.key, {}))
        return rows

    @cached_property
    def rows(self) -> Tensor:
        """`L`, shape (pieces, elements)."""
        return torch.stack([self.flat(row) for row in self.local])

    @cached_property
    def expected(self) -> Expected:
        """`E`, and how it is known."""
        found = [self._expected(key) for key in self.keys] or [Expected(problem="training_step returned no loss")]
        problem = next((each.problem for each in found if each.gradient is None), None)
        if problem is not None:
            return Expected(problem=problem)
        total = {
            name: sum(
                (each.gradient[name] for each in found if each.gradient and name in each.gradient), torch.zeros(())
            )
            for name in self.like
        }
        because = next((each.because for each in found if each.because is not None), None)
        right = tuple(name for name in RIGHT if all(name in each.right for each in found))
        return Expected(total, right, found[0].shares if len(found) == 1 else None, because)

    def _expected(self, key: str) -> Expected:
        whole, parts, told = self.split.whole, self.parts(key), self.facts.told
        names, shares = self.split.right(key, self.tolerance)
        because = None if names or shares else self._because(key)
        if because is not None and because[0] in self.examined.without:
            names, shares = self.examined.without[because[0]].right(key, self.tolerance)
        of_whole = None if whole is None else self._normalized(key, whole.gradients.get(key, {}))
        covers = len(self.split.pieces) == len(self.pieces)
        if self.facts.whole_only or (because is not None and self.facts.replicas is None):
            problem = self.split.problem if whole is None else "the window is too long to be computed as one batch"
            return Expected(of_whole if covers else None, tuple(names), None, because, problem)
        if told is not None and told.counts_replicas:
            number = Counter(piece.batch for piece in self.pieces)
            names, shares = ["mean"], [1 / number[piece.batch] / len(number) for piece in self.pieces]
        elif not names and shares is None and whole is None:
            names = self._told_by_halves(key)
        if names and shares is None:
            shares = combinations(parts)[names[0]]
        if shares is None or len(shares) != len(self.pieces):
            return Expected(problem=self._why_not(key))
        if not self.facts.automatic and len({piece.batch for piece in self.pieces}) > 1:
            return Expected(problem="in manual optimization a window of several batches is the user's own sum of them")
        total: Tensors = {}
        for part, share in zip(self.examined.parts, shares, strict=True):
            for name, tensor in part.gradients.get(key, {}).items() if share != 0 else ():
                total[name] = total.get(name, 0) + share * tensor
        return Expected(self._normalized(key, total), tuple(names), tuple(shares))

    def _normalized(self, key: str, gradient: Tensors) -> Tensors:
        """Return what the run's rule makes of a loss of all samples on one process: a sum is divided by its count."""
        told, parts = self.facts.told, self.parts(key)
        counts = parts.weights or parts.samples
        if told is None or not told.rule.uses_weight or counts is None:
            return gradient
        factor = float(combine(torch.ones(1, 1), rule=told.rule, nodes=[0], weights=[float(sum(counts))]))
        return {name: factor * tensor for name, tensor in gradient.items()}

    def _because(self, key: str) -> tuple[str, str] | None:
        """Return why the whole's gradient is none of its parts', as cause and detail."""
        if self.split.whole is None:
            return None
        for cause, split in self.examined.without.items():
            names, shares = split.right(key, self.tolerance)
            if names or shares:
                shown = names[0] if names else ", ".join(f"{share:.3g}" for share in shares or ())
                return (
                    cause,
                    f"without it the gradient of the whole batch is made up of its parts' ({shown}), with it not",
                )
        if self._has_constant_term(key):
            return "constant term", (
                "two parts of a batch have the loss of the batch and one term more, the same for every batch: it depends"
                f" on no sample, and is added by {len(self.pieces)} micro-batches"
            )
        if any(split.whole is not None and not any(split.right(key, self.tolerance)) for split in self.examined.halves):
            return "non-decomposable loss", (
                "the gradient of a batch is no combination of those of its parts, neither over the ranks nor within a"
                " micro-batch: samples are compared with each other"
            )
        return None

    def _has_constant_term(self, key: str) -> bool:
        """Return whether the loss is a sum over samples and something that is there once for every batch."""

        def too_much(parts: Sequence[Mapping[str, Tensors]], whole: Mapping[str, Tensors]) -> Tensor:
            return torch.stack([self.flat(part.get(key, {})) for part in parts]).sum(0) - self.flat(whole.get(key, {}))

        splits = [split for split in (self.split, *self.examined.halves) if split.whole is not None]
        rests = [
            too_much([part.gradients for part in split.common], split.whole.gradients) / (len(split.common) - 1)
            for split in splits
            if split.whole is not None and len(split.common) > 1
        ]
        if len(rests) < 2 or relative_gap(rests[0], torch.zeros_like(rests[0])) == 0:
            return False
        return all(is_rounding(rest, rests[0], (), self.tolerance) for rest in rests[1:])

    def _told_by_halves(self, key: str) -> list[str]:
        """Return what all micro-batches are of their own parts, where the global batch cannot be computed."""
        told = [split.right(key, self.tolerance)[0] for split in self.examined.halves if split.whole is not None]
        return [name for name in RIGHT if told and name != "mean" and all(name in names for names in told)]

    def _why_not(self, key: str) -> str:
        """Say why it is not known what one process expects."""
        where, problem = f"the global batch of step {self.position}", self.split.problem
        if not problem:
            return f"{where} is no combination of its micro-batches, though these are of their samples: it may be joined wrongly"
        shares = next((found for split in self.examined.halves if (found := split.right(key, self.tolerance)[1])), None)
        if shares is None:
            further = next((f"; {split.problem}" for split in self.examined.halves if split.problem), "")
            return f"{where} cannot be computed ({problem}{further})"
        shown = ", ".join(f"{share:.3g}" for share in shares)
        return (
            f"{where} cannot be computed ({problem}), and the loss is a mean over terms that are not its samples: two parts"
            f' of a micro-batch take the shares {shown}. Return {{"loss": loss, "weight": n}} with the number of terms,'
            " under weighted_mean"
        )

    @cached_property
    def multiple(self) -> str:
        """The reduced gradient beside the expected one, in words."""
        factor = factor_between(self.flat(self.tensors), self.flat(self.expected.gradient or {}), self.tolerance.loose)
        return (
            "the gradient is another one" if factor is None else f"the gradient is {times(factor)} that of one process"
        )

    @cached_property
    def done(self) -> set[str]:
        """The combinations of the ranks' gradients that the reduced one is."""
        return set(matches(self.flat(self.tensors), self.rows, self.parts(self.key), self.tolerance))

    @property
    def is_expected(self) -> bool:
        """Whether the reduced gradient is the expected one, but for rounding."""
        if self.wire is not None:
            return False
        found, target = self.flat(self.tensors), self.flat(self.expected.gradient or {})
        exact = self.tolerance.exact
        # The sum of the ranks' own gradients rounds little, whatever the precision that these are computed in.
        tight = self.expected.shares is not None and self.alike and exact < 1e-3 and None not in self.pairs
        return is_rounding(found, target, self.rows, Tolerance(exact, 10 * exact) if tight else self.tolerance)

    @cached_property
    def wire(self) -> str | None:
        """The wire that rounded the gradients, if one did."""
        found, target = self.flat(self.tensors), self.flat(self.expected.gradient or {})
        near = self.tolerance.exact < relative_gap(found, target) < 0.05  # noqa: PLR2004  # what a wire may make of it
        if not near or not self.alike:
            return None
        return rounded_on_the_wire(self.tensors, self.local, self.parts(self.key), self.tolerance.exact)

    def sum_of_means(self) -> str | None:
        """Return the detail of the one mistake that shows where it is not known what one process expects."""
        halves = [split.right(self.key, self.tolerance)[1] for split in self.examined.halves if split.whole is not None]
        if not halves or None in halves or "sum" not in self.done:
            return None
        return (
            f"{len(self.pieces)} means are added up: two parts of a micro-batch show that its loss is a mean over terms"
        )

    def causes(self) -> Iterator[tuple[str, str]]:
        """Yield what makes the reduced gradient another than expected, with the detail."""
        if self.wire is not None:
            yield self.wire, f"the gradient is that of one process, rounded to {self.wire.split()[0]}"
            return
        if not self.alike:
            yield self._of_ranks()
            return
        because, right = self.expected.because, set(self.expected.right)
        if because is not None:
            yield because[0], f"{because[1]}; {self.multiple}"
            if because[0] == "constant term" and self.done & {*_MEANS, "configured window"}:
                right = {"sum"}
            if not right or right & self.done:
                return
        found = ((cause, shown(self, right)) for cause, shown in _READINGS)
        known = (", ".join(sorted(names)) or "unknown" for names in (self.done, right))
        unexplained = "{}; done with the ranks' gradients: {}; right: {}".format(self.multiple, *known)
        yield next(((cause, detail) for cause, detail in found if detail), ("unexplained", unexplained))

    def _of_ranks(self) -> tuple[str, str]:
        """Name what the ranks compute otherwise than one process does of the same samples."""
        factors, places = self._factors()
        if None not in factors:
            numbers = [factor for factor in factors if factor is not None]
            if all(abs(factor * self.world_size - 1) <= _NEAR for factor in numbers):
                return "double division", (
                    f"what every rank computes{places} is {times(1 / self.world_size)} what one process computes of the same"
                    f" samples, and the reduction divides by {self.world_size} again: {self.multiple}"
                )
            target = self.flat(self.expected.gradient or {})
            fits = "mean" in matches(target, self.rows, self.parts(self.key), self.tolerance)
            cure = '; their plain mean, reduction="mean", is that of one process' if fits else ""
            shown = ", ".join(f"{factor:.4g}" for factor in numbers)
            return "hand-compensated loss", (
                f"what the ranks compute{places} is {shown} x what one process computes of the same samples{cure};"
                f" {self.multiple}"
            )
        used = sorted({name for part in self.examined.parts for name in part.mode.collectives})
        called = f"training_step calls {', '.join(used)}" if used else "training_step calls no collective"
        if used and self.split.whole is not None and "x" not in self.multiple.split("another")[1:]:
            if "another" not in self.multiple:
                return "non-decomposable loss", f"the loss reaches across ranks ({called}), and {self.multiple}"
        return (
            "unexplained",
            f"the ranks compute other gradients of the same samples than one process; {called}; {self.multiple}",
        )

    def _factors(self) -> tuple[list[float | None], str]:
        """Return each rank's factor of what one process computes, None where it has none, and which parameters have it."""
        factors: list[float | None] = []
        where: set[str] = set()
        for mine, alone in (pair for pair in self.pairs if pair is not None):
            beyond = [
                each for each in differences(mine, alone, self.tolerance.loose) if each.relative > self.tolerance.exact
            ]
            found = [each.factor for each in beyond if each.factor is not None] or [1.0]
            same = len(found) >= len(beyond) and max(found) - min(found) <= _NEAR * abs(found[0])
            factors.append(found[0] if same else None)
            where |= {each.name for each in beyond} if len(beyond) < len(alone) else set()
        return factors, f" in {', '.join(sorted(where))}" if where else ""


def _sum_loss(e: Evidence, right: set[str]) -> str | None:
    return (
        f'{e.multiple}: the loss is a sum over samples, use `reduction="sum"`'
        if "sum" in right and e.done & {*_MEANS, "configured window"}
        else None
    )


def _short_window(e: Evidence, right: set[str]) -> str | None:
    length = len(e.pieces) / max(1, len({piece.rank for piece in e.pieces}))
    short = "configured window" in e.done and length < e.facts.window and (right & _MEANS or e.expected.shares)
    return (
        f"{e.multiple}: the window has {length:g} micro-batches and is divided by {e.facts.window}" if short else None
    )


def _divided_twice(e: Evidence, right: set[str]) -> str | None:
    return (
        f"{e.multiple}: it is divided by the {e.world_size} ranks a second time"
        if e.done & _TWICE and right & _MEANS
        else None
    )


def _one_rank(e: Evidence, right: set[str]) -> str | None:
    alone = next((name for name in sorted(e.done) if name.endswith("alone")), None)
    return None if alone is None else f"the gradient is that of {alone}: it was not reduced"


def _counts(e: Evidence, right: set[str]) -> str | None:
    weighs = e.facts.told is not None and e.facts.told.rule.uses_weight
    if "sum" in e.done and right & _MEANS:
        return f"{e.multiple}: the loss is a mean, and the reduction adds the ranks up"
    if "samples" in e.done and "weights" in right and (weighs or "mean" not in e.done):
        return "the run weighs by samples, the loss is a mean over what the weights count"
    if right or e.expected.shares is None or not e.done or not (weighs or "mean" not in e.done):
        return None
    return f"{_held(e)}, the run others: the weights are not the terms of the loss"


def _mean_of_means(e: Evidence, right: set[str]) -> str | None:
    parts = e.parts(e.key)
    if not right and e.expected.shares is not None and e.done:
        return f"{_held(e)}, the run equal ones: the loss is a mean over other terms than samples"
    if not (e.done & {"mean", "mean of the ranks' means"} and right & {"samples", "weights"}):
        return None
    what, counts = ("samples", parts.samples) if "samples" in right else ("terms", parts.weights)
    sizes = ", ".join(f"{size:g}" for size in counts or ())
    return f"every micro-batch counts the same, but they hold {sizes} {what}: the mean over {what} is wanted"


def _held(e: Evidence) -> str:
    shown = ", ".join(f"{share:.3g}" for share in e.expected.shares or ())
    return f"one process takes the shares {shown} of the micro-batches' gradients"


def _multiplied(e: Evidence, right: set[str]) -> str | None:
    return (
        f"{e.multiple}: it is multiplied by the {e.world_size} ranks"
        if "multiplied" in e.done and right & _MEANS
        else None
    )


def _clipped(e: Evidence, right: set[str]) -> str | None:
    if e.expected.shares is None or e.done:
        return None
    found = e.flat(e.tensors)
    norm, value = clipped_to(found, e.rows, e.expected.shares, e.tolerance), float(found.abs().max())
    if norm is not None:
        return f"every rank clipped its gradient to the norm {norm:.4g} before they were reduced"
    clamped = combined(e.rows.clamp(-value, value), e.expected.shares)
    fits = relative_gap(found, clamped) <= e.tolerance.exact
    return f"every rank clipped its gradient to the value {value:.4g} before they were reduced" if fits else None


_READINGS: Sequence[tuple[str, Callable[[Evidence, set[str]], str | None]]] = (
    ("sum loss", _sum_loss),
    ("short window", _short_window),
    ("double division", _divided_twice),
    ("unsynchronised replicas", _one_rank),
    ("counts", _counts),
    ("mean of means", _mean_of_means),
    ("hand-compensated loss", _multiplied),
    ("clipped before the reduction", _clipped),
)
"""What the right and the done can mean, the likeliest first: each with the detail where it holds."""
