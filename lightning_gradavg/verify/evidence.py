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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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
    flattened,
    is_rounding,
    matches,
    relative_gap,
    rounded_on_the_wire,
)
from lightning_gradavg.verify.record import WHOLE_LOSS, Tape, Tensors
from lightning_gradavg.verify.reference import Examined
from lightning_gradavg.verify.replay import parts_of
from lightning_gradavg.verify.report import times

__all__ = ["Evidence", "Expected"]

_MEANS = ("mean", "mean of the ranks' means")
_WEIGHED = ("weights", "samples")
_OF_TERMS = {"samples", "weights", "terms", "mean"}
_TWICE = ("divided twice", "samples, divided twice", "weights, divided twice")
_SUM_LOSS = '{multiple}: the loss is a sum over samples, use `reduction="sum"`'
_EACH_THE_SAME = "every micro-batch counts the same, but they hold {{{0}}} {1}: the mean over {1} is wanted"
_HELD = "one process takes the shares {shares} of the micro-batches' gradients, the run"

_READINGS: Sequence[tuple[str, Sequence[str], set[str], str]] = (
    ("sum loss", (*_MEANS, *_WEIGHED, "configured window"), {"sum"}, _SUM_LOSS),
    (
        *("short window", ("configured window",), _OF_TERMS),
        "{multiple}: the window has {length:g} micro-batches and is divided by {window}",
    ),
    ("double division", _TWICE, _OF_TERMS, "{multiple}: it is divided by the {ranks} ranks a second time"),
    (
        "unsynchronised replicas",
        ("alone",),
        {*_OF_TERMS, "sum"},
        "the gradient is that of one rank: it was not reduced",
    ),
    ("counts", ("sum",), _OF_TERMS, "{multiple}: the loss is a mean, and the reduction adds the ranks up"),
    ("counts", _WEIGHED, {"weights"}, "the run weighs by samples, the loss is a mean over what the weights count"),
    ("counts", _WEIGHED, {"terms"}, f"{_HELD} others: the weights are not the terms of the loss"),
    ("mean of means", _MEANS, {"samples"}, _EACH_THE_SAME.format("samples", "samples")),
    ("mean of means", _MEANS, {"weights"}, _EACH_THE_SAME.format("weights", "terms")),
    ("mean of means", _MEANS, {"terms"}, f"{_HELD} equal ones: the loss is a mean over other terms than samples"),
    ("hand-compensated loss", ("multiplied",), _OF_TERMS, "{multiple}: it is multiplied by the {ranks} ranks"),
)
"""What a cause shows by: what was done with the ranks' gradients, what would be right, and the detail."""

_BECAUSE = {
    "constant term": (
        "two parts of a batch have the loss of the batch and one term more, the same for every batch: it depends on no"
        " sample, and every micro-batch adds it"
    ),
    "non-decomposable loss": (
        "the gradient of a batch is no combination of those of its parts, neither over the ranks nor within a"
        " micro-batch: samples are compared with each other"
    ),
}

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
    shares: Sequence[float] | None = None  # their coefficients, one for each piece; None where it is the whole's own
    because: tuple[str, str] | None = None  # what makes it no combination of its parts, as cause and detail
    problem: str = ""  # why it cannot be told


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
        self.facts, self.pieces, self.split = tapes[0].facts, examined.act.calls, examined.split
        self.step, self.others = tapes[0].steps[position], [tape.steps[position] for tape in tapes[1:]]
        self.world_size, self.reduced = len(tapes), tapes[0].steps[position].reduced
        computed = [*examined.parts, self.split.whole]
        manual = self.step.loss != WHOLE_LOSS
        # The losses that make up the gradient, and where a rank's own gradient and what it was multiplied by are noted.
        self.keys = [self.step.loss] if manual else list(dict.fromkeys(k for c in computed for k in c.gradients))
        self.own_key = self.step.loss
        self._noted = {key: str(self.step.backward) if manual else key for key in self.keys}
        known = [each.gradients.get(key, {}) for each in computed for key in self.keys]
        self.like = {name: tensor for tensors in (*known, self.reduced) for name, tensor in tensors.items()}

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return sketches of gradients as one vector."""
        return flattened(tensors, self.like)

    def parts(self, key: str) -> Parts:
        """Return what is known of the micro-batches and their weights."""
        noted, of_run = self._noted.get(key, key), {"world_size": self.world_size, "accumulation": self.facts.window}
        return parts_of(self.pieces, self.examined.parts, noted, **of_run)

    @cached_property
    def pairs(self) -> dict[int, tuple[Tensors, Tensors]]:
        """What a rank added to the gradients, and what one process adds: by the piece's index, where both are known."""
        found = {}
        for index, (piece, part) in enumerate(zip(self.pieces, self.examined.parts, strict=True)):
            mine, seeds = piece.gradients.get(self.own_key, {}), piece.seeds
            if mine and all(seed and math.isfinite(seed) for seed in seeds.values()) and not self.facts.whole_only:
                losses = [(seeds.get(self._noted[key], 1.0), part.gradients.get(key, {})) for key in self.keys]
                found[index] = {name: tensor for name, tensor in mine.items() if name in self.like}, _total(losses)
        return found

    @cached_property
    def alike(self) -> bool:
        """Whether every rank computed what one process computes of the same samples."""
        known = [(self.flat(mine), self.flat(alone)) for mine, alone in self.pairs.values()]
        return all(is_rounding(mine, alone, (), self.tolerance) for mine, alone in known)

    @cached_property
    def local(self) -> list[Tensors]:
        """`L`, without what the run multiplied it by; where it is not known, `P`."""
        rows = [_total([(1.0, part.gradients.get(key, {})) for key in self.keys]) for part in self.examined.parts]
        for index, (mine, _) in self.pairs.items():
            seeds = set(self.pieces[index].seeds.values())
            if len(seeds) == 1:
                rows[index] = _total([(1 / seeds.pop(), mine)])
        return rows

    @cached_property
    def rows(self) -> Tensor:
        """`L`, shape (pieces, elements)."""
        return torch.stack([self.flat(row) for row in self.local])

    @cached_property
    def expected(self) -> Expected:
        """`E`, and how it is known."""
        found = [self._of_loss(key) for key in self.keys] or [Expected(problem="training_step returned no loss")]
        unknown = [each for each in found if each.gradient is None]
        if unknown or len(found) == 1:
            return (unknown or found)[0]
        return Expected(
            _total([(1.0, each.gradient or {}) for each in found]),
            frozenset.intersection(*(each.right for each in found)),
            because=next((each.because for each in found if each.because is not None), None),
        )

    def _of_loss(self, key: str) -> Expected:
        """Return the gradient that one process expects of one of the losses."""
        source, because, told = self.split, self._because(key), self.facts.told
        if because is not None:
            source = self.examined.without.get(because[0], source)
        told_shares = source.right(key, self.tolerance)
        names = list(told_shares.keys() - {"terms"}) and [n for n in told_shares if n != "terms"]
        shares = told_shares.get("terms")
        names = names if self.split.has_whole else self._told_by_halves(key)
        right = frozenset(names or (["terms"] if shares is not None else []))
        if self.facts.whole_only or (because is not None and told.replicas is None):
            return Expected(self._of_whole(key), right, None, because, self.split.problem or _TOO_LONG)
        if told.counts_replicas:
            number = Counter(piece.batch for piece in self.pieces)
            shares = [1 / number[piece.batch] / len(number) for piece in self.pieces]
        elif names:
            shares = combinations(self.parts(key))[names[0]]
        if shares is None or len(shares) != len(self.pieces):
            return Expected(problem=self._why_not(key))
        if not self.facts.automatic and len({piece.batch for piece in self.pieces}) > 1:
            return Expected(problem="in manual optimization a window of several batches is the user's own sum of them")
        counted = [(s, part.gradients.get(key, {})) for s, part in zip(shares, self.examined.parts, strict=True) if s]
        return Expected(self._normalized(key, _total(counted)), right, shares)

    def _of_whole(self, key: str) -> Tensors | None:
        """Return the gradient of all samples at once, if they were computed at once."""
        of_all = self.split.has_whole and len(self.split.calls) == len(self.pieces)
        return self._normalized(key, self.split.whole.gradients.get(key, {})) if of_all else None

    def _normalized(self, key: str, gradient: Tensors) -> Tensors:
        """Return what the run's rule makes of a loss of all samples on one process: a sum is divided by its count."""
        parts = self.parts(key)
        counts = parts.weights or parts.samples
        if not self.facts.told.rule.uses_weight or counts is None:
            return gradient
        factor = combine(torch.ones(1, 1), rule=self.facts.told.rule, nodes=[0], weights=[float(sum(counts))])
        return _total([(float(factor), gradient)])

    def _because(self, key: str) -> tuple[str, str] | None:
        """Return why the whole's gradient is none of its parts', as cause and detail; None if it is, or not known."""
        if not self.split.has_whole or self.split.right(key, self.tolerance):
            return None
        for cause, split in self.examined.without.items():
            for name, shares in split.right(key, self.tolerance).items():
                return cause, _WITHOUT.format(_listed(shares) if name == "terms" else name)
        silent = any(split.has_whole and not split.right(key, self.tolerance) for split in self.examined.halves)
        found = "constant term" if self._has_constant_term(key) else "non-decomposable loss" if silent else ""
        return (found, _BECAUSE[found]) if found else None

    def _has_constant_term(self, key: str) -> bool:
        """Return whether the loss is a sum over samples and something that is there once for every batch."""
        rests = []
        for split in (self.split, *self.examined.halves):
            if split.has_whole and len(split.common) > 1:
                parts = [(1.0, part.gradients.get(key, {})) for part in split.common]
                rest = self.flat(_total([*parts, (-1.0, split.whole.gradients.get(key, {}))]))
                rests.append(rest / (len(parts) - 1))
        return len(rests) > 1 and all(is_rounding(rest, rests[0], (), self.tolerance) for rest in rests[1:])

    def _told_by_halves(self, key: str) -> list[str]:
        """Return what all micro-batches are of their own parts, where the global batch cannot be computed."""
        told = [split.right(key, self.tolerance) for split in self.examined.halves if split.has_whole]
        return [name for name in ("samples", "weights", "sum") if told and all(name in names for names in told)]

    def _why_not(self, key: str) -> str:
        """Say why it is not known what one process expects."""
        halves, where = self.examined.halves, f"the global batch of step {self.position}"
        shares = next((found for split in halves if (found := split.right(key, self.tolerance).get("terms"))), None)
        if not self.split.problem:
            return f"{where} is none of its micro-batches', though these are of their samples: it may be joined wrongly"
        problem = "; ".join(dict.fromkeys([self.split.problem, *(split.problem for split in halves if split.problem)]))
        terms = "" if shares is None else _OF_OTHER_TERMS.format(_listed(shares))
        return f"{where} cannot be computed ({problem}){terms}"

    @cached_property
    def multiple(self) -> str:
        """The reduced gradient beside the expected one, in words."""
        factor = factor_between(self.flat(self.reduced), self.flat(self.expected.gradient or {}), self.tolerance.loose)
        return (
            "the gradient is another one" if factor is None else f"the gradient is {times(factor)} that of one process"
        )

    @cached_property
    def done(self) -> str:
        """The combination of the ranks' gradients that the reduced one is, by the name that the run's rule suggests."""
        found = matches(self.flat(self.reduced), self.rows, self.parts(self.keys[0]), self.tolerance)
        named = (*_WEIGHED, *_MEANS) if self.facts.told.rule.uses_weight else (*_MEANS, *_WEIGHED)
        found = sorted(found, key=lambda name: named.index(name) if name in named else len(named))
        return "alone" if found and found[0].endswith("alone") else found[0] if found else ""

    @property
    def is_expected(self) -> bool:
        """Whether the reduced gradient is the expected one, but for rounding."""
        found, target = self.flat(self.reduced), self.flat(self.expected.gradient or {})
        exact = self.tolerance.exact
        # The sum of the ranks' own gradients rounds little, whatever the precision that these are computed in.
        half = any(self.facts.dtypes.get(name, torch.float32).itemsize < 4 for name in self.reduced)  # noqa: PLR2004  # bytes
        tight = self.expected.shares is not None and self.alike and not half and len(self.pairs) == len(self.pieces)
        limit = Tolerance(exact, 10 * exact) if tight else self.tolerance
        return self.wire is None and is_rounding(found, target, self.rows, limit)

    @cached_property
    def wire(self) -> str | None:
        """The wire that rounded the gradients, if one did."""
        gap = relative_gap(self.flat(self.reduced), self.flat(self.expected.gradient or {}))
        near = self.alike and self.tolerance.exact < gap < 0.05  # noqa: PLR2004  # what a wire may make of it
        parts = self.parts(self.keys[0])
        return rounded_on_the_wire(self.reduced, self.local, parts, self.tolerance.exact) if near else None

    def causes(self) -> Iterator[tuple[str, str]]:
        """Yield what makes the reduced gradient another than expected, with the detail."""
        because, right = self.expected.because, self.expected.right
        if self.wire is not None:
            yield self.wire, f"the gradient is that of one process, rounded to {self.wire.split()[0]}"
        elif not self.alike:
            yield self._of_ranks()
        else:
            if because is not None:
                yield because[0], f"{because[1]}; {self.multiple}"
                right = frozenset({"sum"}) if because[0] == "constant term" else right
            if because is None or (right and self.done and self.done not in right):
                yield self._reading(right)

    def _reading(self, right: frozenset[str]) -> tuple[str, str]:
        """Name what the right and the done mean together."""
        parts = self.parts(self.keys[0])
        for cause, done, of, detail in _READINGS:
            if self.done in done and right & of:
                return cause, detail.format(
                    multiple=self.multiple,
                    shares=_listed(self.expected.shares),
                    samples=_listed(parts.samples),
                    weights=_listed(parts.weights),
                    ranks=self.world_size,
                    window=self.facts.window,
                    length=len(self.pieces) / len({piece.rank for piece in self.pieces}),
                )
        found, shares = self.flat(self.reduced), self.expected.shares
        if shares is not None and not self.done:
            norm, value = clipped_to(found, self.rows, shares, self.tolerance), float(found.abs().max())
            clamped = relative_gap(found, combined(self.rows.clamp(-value, value), shares)) <= self.tolerance.exact
            if norm is not None or clamped:
                what = f"the norm {norm:.4g}" if norm is not None else f"the value {value:.4g}"
                return (
                    "clipped before the reduction",
                    f"every rank clipped its gradient to {what} before they were reduced",
                )
        known = f"done with the ranks' gradients: {self.done or 'unknown'}; right: {', '.join(right) or 'unknown'}"
        return "unexplained", f"{self.multiple}; {known}"

    def _of_ranks(self) -> tuple[str, str]:
        """Name what the ranks compute otherwise than one process does of the same samples."""
        factors, where = self._factors()
        same = f"what one process computes of the same samples; {self.multiple}"
        if factors and all(math.isclose(factor * self.world_size, 1, rel_tol=1e-3) for factor in factors):
            again = f", and the reduction divides by {self.world_size} again"
            return "double division", f"what every rank computes{where} is {times(1 / self.world_size)} {same}{again}"
        if factors:
            target = self.flat(self.expected.gradient or {})
            fits = "mean" in matches(target, self.rows, self.parts(self.keys[0]), self.tolerance)
            cure = '; their plain mean, reduction="mean", is right' * fits
            return "hand-compensated loss", f"what the ranks compute{where} is {_listed(factors)} x {same}{cure}"
        used = sorted({name for part in self.examined.parts for name in part.mode.collectives})
        called = f"training_step calls {', '.join(used) or 'no operation between ranks'}"
        across = used and self.split.has_whole and "another" not in self.multiple
        other = "the ranks compute other gradients of the same samples than one process"
        return "non-decomposable loss" if across else "unexplained", f"{other}; {called}; {self.multiple}"

    def _factors(self) -> tuple[list[float], str]:
        """Return each rank's multiple of what one process computes, none if any has none; and in which parameters."""
        factors: list[float] = []
        where: dict[str, None] = {}
        for mine, alone in self.pairs.values():
            found = differences(mine, alone, self.tolerance.loose)
            beyond = [each for each in found if each.relative > self.tolerance.exact]
            known = [each.factor for each in beyond if each.factor is not None] or [1.0]
            if len(known) < len(beyond) or not math.isclose(max(known), min(known), rel_tol=1e-3):
                return [], ""
            factors.append(known[0])
            where.update({each.name: None for each in beyond if len(beyond) < len(found)})
        return factors, f" in {', '.join(where)}" if where else ""


def _total(terms: Sequence[tuple[float, Tensors]]) -> Tensors:
    """Return the sum of multiples of gradients."""
    names = dict.fromkeys(name for _, tensors in terms for name in tensors)
    return {name: sum(factor * tensors[name] for factor, tensors in terms if name in tensors) for name in names}  # type: ignore[misc]  # never 0


def _listed(numbers: Sequence[float] | None) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers or ())
