"""What is known of the gradient of one optimizer step, and what it shows.

Four gradients are known. `L` are those of the micro-batches as the ranks computed them, `P` those that one process
computes of each alone, `F` that of all samples at once, and `G` what the reduction made of `L`. A combination of `P`
that is `F` is *right*; with it, `P` makes the gradient `E` that one process expects, and the reduced gradient is
equal if `G` is `E`. Where it is not, a combination of `L` that is `G` is what was *done*, and where the right and the
done are not the same their names say why. Where no combination of `P` is `F`, because of batch norm or a loss that
compares samples, `E` is `F`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_gradavg.reduction.combine import combine
from lightning_gradavg.verify.compare import (
    Parts,
    Tolerance,
    clipped_to,
    combinations,
    combined,
    differences,
    factor_between,
    first_beyond,
    flattened,
    is_rounding,
    matches,
    relative_gap,
    rounded_on_the_wire,
)
from lightning_gradavg.verify.record import WHOLE_LOSS, Call, Tape, Tensors, among
from lightning_gradavg.verify.reference import Act
from lightning_gradavg.verify.replay import Replay, parts_of
from lightning_gradavg.verify.report import times

__all__ = ["Evidence", "Expected"]

Named: TypeAlias = tuple[str, str]
"""A cause, and the detail that shows it."""

_MEANS = ("mean", "mean of the ranks' means")
_WEIGHED = ("weights", "samples")
_OF_TERMS = {"samples", "weights", "terms", "mean"}
_TWICE = ("divided twice", "samples, divided twice", "weights, divided twice")
_SUM_LOSS = '{multiple}: the loss is a sum over samples, use `reduction="sum"`'
_EACH_THE_SAME = "every micro-batch counts the same, but they hold {{{0}}} {1}: the mean over {1} is wanted"
_SHORT = "{multiple}: the window has {length:g} micro-batches and is divided by {window}"
_ALONE = "the gradient is that of one rank: it was not reduced"
_BY_SAMPLES = "the run weighs by samples, the loss is a mean over what the weights count"
_HELD = "one process takes the shares {shares} of the micro-batches' gradients, the run"


class _Reading(NamedTuple):
    """What a cause shows by: what was done with the ranks' gradients, what would be right, and the detail."""

    cause: str
    done: Sequence[str]
    right: AbstractSet[str]
    detail: str


_READINGS = (
    _Reading("sum loss", (*_MEANS, *_WEIGHED, "configured window"), {"sum"}, _SUM_LOSS),
    _Reading("short window", ("configured window",), _OF_TERMS, _SHORT),
    _Reading("double division", _TWICE, _OF_TERMS, "{multiple}: it is divided by the {ranks} ranks a second time"),
    _Reading("unsynchronised replicas", ("alone",), {*_OF_TERMS, "sum"}, _ALONE),
    _Reading("counts", ("sum",), _OF_TERMS, "{multiple}: the loss is a mean, and the reduction adds the ranks up"),
    _Reading("counts", _WEIGHED, {"weights"}, _BY_SAMPLES),
    _Reading("counts", _WEIGHED, {"terms"}, f"{_HELD} others: the weights are not the terms of the loss"),
    _Reading("mean of means", _MEANS, {"samples"}, _EACH_THE_SAME.format("samples", "samples")),
    _Reading("mean of means", _MEANS, {"weights"}, _EACH_THE_SAME.format("weights", "terms")),
    _Reading(
        "mean of means", _MEANS, {"terms"}, f"{_HELD} equal ones: the loss is a mean over other terms than samples"
    ),
    _Reading("hand-compensated loss", ("multiplied",), _OF_TERMS, "{multiple}: it is multiplied by the {ranks} ranks"),
)
_UNEXPLAINED = _Reading(
    "unexplained", (), frozenset(), "{multiple}; done with the ranks' gradients: {done}; right: {right}"
)
_CLIPPED = "every rank clipped its gradient to {} before they were reduced"
_ADDS_A_TERM = (
    "two parts of a batch have the loss of the batch and one term more, the same for every batch: it depends on no"
    " sample, and every micro-batch adds it"
)
_COMPARES = (
    "the gradient of a batch is no combination of those of its parts, neither over the ranks nor within a micro-batch:"
    " samples are compared with each other"
)
_RIGHT_OF_THE_REST = {"constant term": frozenset({"sum"})}
_OF_HALVES = ("samples", "weights", "sum")  # which are uneven, so that their plain mean is no mean over samples
_OF_OTHER_TERMS = (
    ", and the loss is a mean over terms that are not its samples: two parts of a micro-batch take the shares {}."
    ' Return {{"loss": loss, "weight": n}} with their number, under weighted_mean'
)


_WITHOUT = "without it the gradient of the whole batch is made up of its parts' ({}), with it not"
_TOO_LONG = "the window is too long for one batch"


@dataclass(frozen=True)
class Expected:
    """The gradient that one process expects of a step."""

    gradient: Tensors | None = None  # sketches; None where it cannot be told
    right: frozenset[str] = frozenset()  # the combinations of its parts that it is
    shares: Sequence[float] | None = None  # their coefficients, one for each call; None where it is the whole's own
    because: Named | None = None  # what makes it no combination of its parts
    problem: str = ""  # why it cannot be told


class Evidence:
    """What is known of one step.

    Args:
        tapes: What the ranks recorded.
        position: The step.
        act: What the reference found out about what it is part of.
        tolerance: What rounding stays below.
    """

    def __init__(self, tapes: Sequence[Tape], position: int, act: Act, tolerance: Tolerance) -> None:
        self.position, self.act, self.tolerance = position, act, tolerance
        self.facts, self.calls, self.computed = tapes[0].facts, act.calls, act.parts
        self.step, *self.others = [tape.steps[position] for tape in tapes]
        self.split, self.reduced, self.world_size = act.split, self.step.reduced, len(tapes)
        replays = [*self.computed, self.split.whole]
        # The losses that make up the gradient, and by which names their weights and multiples were noted.
        self.losses = {key: key for replay in replays for key in replay.gradients}
        if not self.facts.automatic:
            self.losses = {self.step.loss: self.step.backward or WHOLE_LOSS}
        known = [*(replay.gradient(key) for replay in replays for key in self.losses), self.reduced]
        self.like = {name: tensor for tensors in known for name, tensor in tensors.items()}

    def flat(self, tensors: Mapping[str, Tensor] | None) -> Tensor:
        """Return sketches of gradients as one vector."""
        return flattened(tensors or {}, self.like)

    def parts(self, key: str) -> Parts:
        """Return what is known of the micro-batches and their weights."""
        of_run = {"world_size": self.world_size, "accumulation": self.facts.window}
        return parts_of(self.calls, self.computed, self.losses[key], **of_run)

    @property
    def any_parts(self) -> Parts:
        """The same for the first of the losses."""
        return self.parts(next(iter(self.losses)))

    @cached_property
    def pairs(self) -> dict[int, tuple[Tensors, Tensors]]:
        """What a rank added to the gradients, and what one process adds: by the call's index, where both are known."""
        both = enumerate(zip(self.calls, self.computed, strict=True))
        return {index: self._pair(call, replay) for index, (call, replay) in both if self._has_own(call)}

    def _has_own(self, call: Call) -> bool:
        counted = all(0 < abs(seed) < math.inf for seed in call.seeds.values())
        return self.step.loss in call.gradients and counted and not self.facts.whole_only

    def _pair(self, call: Call, replay: Replay) -> tuple[Tensors, Tensors]:
        terms = [(call.seeds.get(noted, 1.0), replay.gradient(key)) for key, noted in self.losses.items()]
        return among(call.gradients[self.step.loss], self.like), _total(terms)

    @cached_property
    def alike(self) -> bool:
        """Whether every rank computed what one process computes of the same samples."""
        known = [(self.flat(mine), self.flat(alone)) for mine, alone in self.pairs.values()]
        return all(is_rounding(mine, alone, (), self.tolerance) for mine, alone in known)

    @cached_property
    def local(self) -> list[Tensors]:
        """`L`, without what the run multiplied it by; where it is not known, `P`."""
        rows = [_total([(1.0, replay.gradient(key)) for key in self.losses]) for replay in self.computed]
        for index, (mine, _) in self.pairs.items():
            seeds = set(self.calls[index].seeds.values())
            if len(seeds) == 1:
                rows[index] = _total([(1 / seeds.pop(), mine)])
        return rows

    @cached_property
    def rows(self) -> Tensor:
        """`L`, shape (calls, elements)."""
        return torch.stack([self.flat(row) for row in self.local])

    @cached_property
    def expected(self) -> Expected:
        """`E`, and how it is known."""
        found = [self._of_loss(key) for key in self.losses] or [Expected(problem="training_step returned no loss")]
        unknown = [each for each in found if each.gradient is None]
        if unknown or len(found) == 1:
            return [*unknown, *found][0]
        return Expected(
            _total([(1.0, each.gradient or {}) for each in found]),
            frozenset.intersection(*(each.right for each in found)),
            because=next(filter(None, (each.because for each in found)), None),
        )

    def _of_loss(self, key: str) -> Expected:
        """Return the gradient that one process expects of one of the losses."""
        right, because = self._told(key)
        told, batches = self.facts.told, Counter(call.batch for call in self.calls)
        if self.facts.whole_only or (because is not None and told.replicas is None):
            of_all = self.split.has_whole and len(self.split.calls) == len(self.calls)
            whole = self._normalized(key, self.split.whole.gradient(key)) if of_all else None
            return Expected(whole, frozenset(right), None, because, self.split.problem or _TOO_LONG)
        # Of a split of some micro-batches the name of a combination holds for all, and shares do not.
        combined_by = combinations(self.parts(key))
        shares: Sequence[float] = next((combined_by.get(name, right[name]) for name in right), [])
        if told.counts_replicas:
            shares = [1 / batches[call.batch] / len(batches) for call in self.calls]
        if len(shares) != len(self.calls):
            return Expected(problem=self._why_not(key))
        if not self.facts.automatic and len(batches) > 1:
            return Expected(problem="in manual optimization a window of several batches is the user's own sum of them")
        counted = [(s, replay.gradient(key)) for s, replay in zip(shares, self.computed, strict=True) if s]
        return Expected(self._normalized(key, _total(counted)), frozenset(right), shares)

    def _normalized(self, key: str, gradient: Tensors) -> Tensors:
        """Return what the run's rule makes of a loss of all samples on one process: a sum is divided by its count."""
        parts = self.parts(key)
        counts = parts.weights or parts.samples
        if not self.facts.told.rule.uses_weight or counts is None:
            return gradient
        factor = combine(torch.ones(1, 1), rule=self.facts.told.rule, nodes=[0], weights=[float(sum(counts))])
        return _total([(float(factor), gradient)])

    def _told(self, key: str) -> tuple[dict[str, list[float]], Named | None]:
        """Return what is right for a loss by name, and what makes its gradient no combination of its parts', if known.

        Where the global batch cannot be computed, it is what all micro-batches are of their own parts.
        """
        halves = [half.right(key, self.tolerance) for half in self.act.halves if half.has_whole]
        if not self.split.has_whole:
            common = set.intersection(*(set(right) for right in halves or [{}]))
            return {name: [] for name in _OF_HALVES if name in common}, None
        for cause, split in {"": self.split, **self.act.without}.items():
            right = split.right(key, self.tolerance)
            for name, shares in right.items():
                detail = _WITHOUT.format(_listed(shares) if name == "terms" else name)
                return right, (cause, detail) if cause else None
        if self._has_constant_term(key):
            return {}, ("constant term", _ADDS_A_TERM)
        return {}, None if all(halves) else ("non-decomposable loss", _COMPARES)

    def _has_constant_term(self, key: str) -> bool:
        """Return whether the loss is a sum over samples and something that is there once for every batch."""
        splits = [split for split in (self.split, *self.act.halves) if split.has_whole and len(split.common) > 1]
        rests = [
            self.flat(
                _total([(-1.0, split.whole.gradient(key)), *((1.0, part.gradient(key)) for part in split.common)])
            )
            / (len(split.common) - 1)
            for split in splits
        ]
        return len(rests) > 1 and all(is_rounding(rest, rests[0], (), self.tolerance) for rest in rests[1:])

    def _why_not(self, key: str) -> str:
        """Say why it is not known what one process expects."""
        where = f"the global batch of step {self.position}"
        if not self.split.problem:
            return f"{where} is none of its micro-batches', though these are of their samples: it may be joined wrongly"
        of_halves = [half.right(key, self.tolerance).get("terms") for half in self.act.halves]
        terms = [_OF_OTHER_TERMS.format(_listed(shares)) for shares in filter(None, of_halves)]
        problems = dict.fromkeys(split.problem for split in (self.split, *self.act.halves))
        return f"{where} cannot be computed ({'; '.join(filter(None, problems))}){''.join(terms[:1])}"

    @cached_property
    def multiple(self) -> str:
        """The reduced gradient beside the expected one, in words."""
        factor = factor_between(self.flat(self.reduced), self.flat(self.expected.gradient), self.tolerance.loose)
        return (
            "the gradient is another one" if factor is None else f"the gradient is {times(factor)} that of one process"
        )

    @cached_property
    def done(self) -> str:
        """The combination of the ranks' gradients that the reduced one is, by the name that the run's rule suggests."""
        found = matches(self.flat(self.reduced), self.rows, self.any_parts, self.tolerance)
        suggested = sorted(
            (*_MEANS, *_WEIGHED), key=lambda name: (name in _WEIGHED) != self.facts.told.rule.uses_weight
        )
        named = [*(name for name in suggested if name in found), *found, ""]
        return re.sub(r"^rank \d+ ", "", named[0])

    @property
    def is_expected(self) -> bool:
        """Whether the reduced gradient is the expected one, but for rounding."""
        exact = self.tolerance.exact
        # The sum of the ranks' own gradients rounds little, whatever the precision that these are computed in.
        half = any(self.facts.dtypes.get(name, torch.float32).itemsize < 4 for name in self.reduced)  # noqa: PLR2004  # bytes
        tight = self.expected.shares is not None and self.alike and not half and len(self.pairs) == len(self.calls)
        limit = Tolerance(exact, 10 * exact) if tight else self.tolerance
        found, expected = self.flat(self.reduced), self.flat(self.expected.gradient)
        return self.wire is None and is_rounding(found, expected, self.rows, limit)

    @cached_property
    def wire(self) -> str | None:
        """The wire that rounded the gradients, if one did."""
        gap = relative_gap(self.flat(self.reduced), self.flat(self.expected.gradient))
        near = self.alike and self.tolerance.exact < gap < 0.05  # noqa: PLR2004  # what a wire may make of it
        return rounded_on_the_wire(self.reduced, self.local, self.any_parts, self.tolerance.exact) if near else None

    def causes(self) -> list[Named]:
        """Return what makes the reduced gradient another than expected."""
        because, right = self.expected.because, self.expected.right
        if self.wire is not None:
            return [(self.wire, f"the gradient is that of one process, rounded to {self.wire.split()[0]}")]
        if not self.alike:
            return [self._of_ranks()]
        if because is None:
            return [self._reading(right)]
        cause, detail = because
        right = _RIGHT_OF_THE_REST.get(cause, right)
        also = right and self.done and self.done not in right
        return [(cause, f"{detail}; {self.multiple}"), *([self._reading(right)] if also else [])]

    def _reading(self, right: frozenset[str]) -> Named:
        """Name what the right and the done mean together."""
        parts = self.any_parts
        known = {
            "multiple": self.multiple,
            "shares": _listed(self.expected.shares),
            "samples": _listed(parts.samples),
            "weights": _listed(parts.weights),
            "ranks": self.world_size,
            "window": self.facts.window,
            "length": len(self.calls) / len({call.rank for call in self.calls}),
            "done": self.done or "unknown",
            "right": ", ".join(sorted(right)) or "unknown",
        }
        fitting = (row for row in _READINGS if self.done in row.done and right & row.right)
        reading = next(fitting, self._clipped() or _UNEXPLAINED)
        return reading.cause, reading.detail.format(**known)

    def _clipped(self) -> _Reading | None:
        """Return what every rank clipped its gradient to before they were reduced, if they did."""
        found, shares = self.flat(self.reduced), self.expected.shares
        if shares is None or self.done:
            return None
        norm, value = clipped_to(found, self.rows, shares, self.tolerance), float(found.abs().max())
        clamped = relative_gap(found, combined(self.rows.clamp(-value, value), shares)) <= self.tolerance.exact
        limits = [f"the value {value:.4g}"] * clamped if norm is None else [f"the norm {norm:.4g}"]
        detail = _CLIPPED.format(*limits, "")
        return _Reading("clipped before the reduction", (), frozenset(), detail) if limits else None

    def _of_ranks(self) -> Named:
        """Name what the ranks compute otherwise than one process does of the same samples."""
        factors, where = self._factors()
        same = f"what one process computes of the same samples; {self.multiple}"
        if factors and all(math.isclose(factor * self.world_size, 1, rel_tol=1e-3) for factor in factors):
            again = f", and the reduction divides by {self.world_size} again"
            return "double division", f"what every rank computes{where} is {times(1 / self.world_size)} {same}{again}"
        if factors:
            fits = "mean" in matches(self.flat(self.expected.gradient), self.rows, self.any_parts, self.tolerance)
            cure = '; their plain mean, reduction="mean", is right' * fits
            return "hand-compensated loss", f"what the ranks compute{where} is {_listed(factors)} x {same}{cure}"
        used = sorted({name for replay in self.computed for name in replay.mode.collectives})
        called = f"training_step calls {', '.join(used) or 'no operation between ranks'}"
        across = used and self.split.has_whole and "another" not in self.multiple
        other = "the ranks compute other gradients of the same samples than one process"
        return "non-decomposable loss" if across else "unexplained", f"{other}; {called}; {self.multiple}"

    def _factors(self) -> tuple[list[float], str]:
        """Return each rank's multiple of what one process computes, none if any has none; and in which parameters."""
        exact, found = self.tolerance.exact, [differences(*pair, self.tolerance.loose) for pair in self.pairs.values()]
        first = [first_beyond(of_call, exact) for of_call in found]
        factors = [1.0 if each is None else each.factor for each in first]
        names = dict.fromkeys(each.name for each in chain.from_iterable(found) if each.relative > exact)
        where = f" in {', '.join(names)}" if len(names) < len(found[0]) else ""
        known = [factor for factor in factors if factor is not None]
        return (known, where) if len(known) == len(factors) else ([], "")


def _total(terms: Sequence[tuple[float, Tensors]]) -> Tensors:
    names = dict.fromkeys(name for _, tensors in terms for name in tensors)
    return {name: sum(factor * tensors[name] for factor, tensors in terms if name in tensors) for name in names}  # type: ignore[misc]  # never 0


def _listed(numbers: Sequence[float] | None) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers or ())
