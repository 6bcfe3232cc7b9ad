"""Why a gradient differs from that of one process.

`P` are the gradients that one process computes of each micro-batch alone, `F` that of all samples at once, and `G` what
the run made of them. The combination of `P` that is `F` is *right*, the one that is `G` is what was *done*. Where they
differ, their names say why. Where no combination of `P` is `F`, samples are compared with each other: by batch norm, by
a hook, or by the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_gradavg.lightning_internals import BatchNorm, without_gradient_hooks
from lightning_gradavg.verify.compare import difference, flat, gap_between, multiple_of
from lightning_gradavg.verify.record import Refused, Tape, Tensors
from lightning_gradavg.verify.report import times
from lightning_gradavg.verify.twin import Probe, Twin

__all__ = ["explain"]

_MEANS = ("mean", "mean of the ranks' means")
_WEIGHED = ("weights", "samples")
_OF_TERMS = frozenset({"samples", "weights", "terms", "mean"})
_SUM = frozenset({"sum"})
_RIGHT = ("samples", "weights", "sum", "mean")
_TWICE = ("divided twice", "samples, divided twice", "weights, divided twice")
_WIRES = {"bf16 wire": torch.bfloat16, "fp16 wire": torch.float16}
_ELEMENTS = 2048  # of a sketch; the others are sums


class _Reading(NamedTuple):
    """What a cause shows by: what was done, what would be right, and the detail."""

    cause: str
    done: Sequence[str]
    right: frozenset[str]
    detail: str


_READINGS = (
    _Reading("sum loss", (*_MEANS, *_WEIGHED, "configured window"), _SUM, "{multiple}: the loss is a sum over samples"),
    _Reading(
        "short window",
        ("configured window",),
        _OF_TERMS,
        "{multiple}: the window has {length:g} micro-batches on each rank and is divided by {window}",
    ),
    _Reading("double division", _TWICE, _OF_TERMS, "{multiple}: it is divided by the {ranks} ranks a second time"),
    _Reading("counts", ("sum",), _OF_TERMS, "{multiple}: the loss is a mean, but the reduction adds up the ranks"),
    _Reading("counts", _WEIGHED, _OF_TERMS, "{shares}: the weights are not the numbers of terms"),
    _Reading("mean of means", _MEANS, _OF_TERMS, "{shares} equally: the ranks' losses have different numbers of terms"),
    _Reading("hand-compensated loss", ("multiplied",), _OF_TERMS, "{multiple}: it is multiplied by the {ranks} ranks"),
    _Reading("unsynchronised replicas", ("alone",), _OF_TERMS | _SUM, "the gradient is that of one rank alone"),
)


def explain(twin: Twin, alone: Tape, position: int, tolerance: float) -> tuple[str, str]:
    """Return the cause and the detail of a step whose gradient differs.

    Raises:
        Refused: If what was compared depends on more than the samples.
    """
    of_updates = zip(twin.steps[position].updates, alone.steps[position].updates, strict=False)
    pairs = (pair for run, own in of_updates for pair in zip(run.reduced, own.reduced, strict=False))
    reduced, expected = next(pair for pair in pairs if difference(*pair, tolerance)[0] is not None)
    if not twin.facts.automatic:
        return _by_factor(multiple_of(*_flat(reduced, expected), 1e4 * tolerance), len(twin.tapes))
    found: list[tuple[str, str]] = []

    def probe(step: Probe) -> None:
        known = _Evidence(step, position, reduced, expected, tolerance)
        known.require_any_order()
        found.append(_of_parts(known) if known.right else _of_whole(known))

    tape = twin.run(probe, position)
    if not found:
        raise Refused(tape.problem)
    return found[0]


def _flat(one: Tensors, other: Tensors) -> tuple[Tensor, Tensor]:
    like = {**other, **one}
    return flat(one, like), flat(other, like)


class _Evidence:
    """What is known of one step."""

    def __init__(self, probe: Probe, position: int, reduced: Tensors, expected: Tensors, tolerance: float) -> None:
        self._given = (probe, position, reduced, expected, tolerance)
        self.probe, self.facts, self.run, self.alone = probe, probe.twin.facts, reduced, expected
        self.near = 100 * tolerance  # up to which a combination is one
        self.world_size = len(probe.twin.tapes)
        _, self.taken, self.keys = probe.twin.batches[position]
        starts = [sum(one.size for one in self.taken[:index]) for index in range(len(self.taken) + 1)]
        self.ranks = [self.keys[start][1] for start in starts[:-1]]
        of_parts = [self.keys[start:stop] for start, stop in pairwise(starts)]
        self.parts = [probe.compute([one], mine) for one, mine in zip(self.taken, of_parts, strict=True)]
        self.whole = probe.compute(self.taken, self.keys)
        _, relative = difference(reduced, expected, tolerance)
        known = [*(part.gradients for part in self.parts), self.whole.gradients, reduced]
        every = {name: tensor for tensors in known for name, tensor in tensors.items()}
        self.like = {name: tensor for name, tensor in every.items() if relative.get(name, 0.0) > tolerance}
        self.target, self.reduced = flat(self.whole.gradients, self.like), flat(reduced, self.like)
        self.rows = torch.stack([flat(part.gradients, self.like) for part in self.parts])
        self.factor = multiple_of(*_flat(reduced, expected), 1e4 * tolerance)

    def again(self) -> _Evidence:
        """Return what the same computations give now."""
        return _Evidence(*self._given)

    def require_any_order(self) -> None:
        """Check that one process computes the same gradient with the samples in another order."""
        half, size = len(self.keys) // 2, len(self.keys)
        turned = self.probe.compute(self.taken, self.keys, [*range(half, size), *range(half)])
        again = gap_between(*_flat(self.whole.gradients, self.alone))
        if again <= self.near < gap_between(*_flat(turned.gradients, self.alone)):
            raise Refused(
                "with the samples of the batch in a different order one process computes a different gradient: the"
                " loss, or a random draw, depends on their positions in the batch"
            )

    def keeps_state(self) -> bool:
        """Return whether a step leaves an attribute behind that changes the loss of the same samples."""
        self.probe.compute(self.taken, self.keys, keeps=True)
        (first, *_), (known, *_) = self.taken, self.parts
        again = self.probe.compute([first], self.keys[: first.size])
        return not math.isclose(again.loss, known.loss, rel_tol=1e-7)

    @property
    def multiple(self) -> str:
        """The gradient as a multiple of that of one process, in words."""
        return _multiple(self.factor)

    @cached_property
    def combinations(self) -> Mapping[str, list[float]]:
        """The coefficient of every micro-batch under every hypothesis."""
        number, ranks, window = len(self.ranks), self.ranks, self.world_size * self.facts.accumulation
        found = {
            "mean": [1 / number] * number,
            "sum": [1.0] * number,
            "mean of the ranks' means": [1 / (len(set(ranks)) * ranks.count(rank)) for rank in ranks],
            "divided twice": [1 / (number * self.world_size)] * number,
            "multiplied": [self.world_size / number] * number,
            "configured window": [1 / window] * number,
            "alone": [(rank == min(ranks)) / ranks.count(rank) for rank in ranks],
        }
        weights = [one.weight for one in self.taken]
        counts = {"samples": [float(one.size) for one in self.taken]}
        counts |= {} if None in weights else {"weights": [float(weight or 0.0) for weight in weights]}
        for name, of_parts in ((name, each) for name, each in counts.items() if sum(each) > 0):
            found[name] = [count / sum(of_parts) for count in of_parts]
            found[f"{name}, divided twice"] = [share / self.world_size for share in found[name]]
        pointless = {"alone"} if len(set(ranks)) == 1 else set[str]()
        pointless |= {"configured window"} if number == window else set[str]()
        return {name: shares for name, shares in found.items() if name not in pointless}

    def named(self, target: Tensor) -> set[str]:
        """Return the names of the combinations of `P` that a gradient is."""
        return {name for name, shares in self.combinations.items() if self.combines(target, shares)}

    def combines(self, target: Tensor, shares: Sequence[float]) -> bool:
        """Return whether a gradient is this combination of `P`."""
        weights = torch.tensor(shares, dtype=torch.float64)
        return gap_between(target, weights[weights != 0] @ self.rows[weights != 0]) <= self.near

    def shares(self, target: Tensor) -> list[float] | None:
        """Return the coefficients with which the parts make up a gradient; None if none do, or many could."""
        scale, several = float(self.rows.abs().max()), len(target) > len(self.rows)
        if not (several and 0 < scale < math.inf and bool(torch.isfinite(target).all())):
            return None
        if int(torch.linalg.matrix_rank(self.rows, rtol=1e-9)) < len(self.rows):
            return None
        found = torch.linalg.lstsq(self.rows.T / scale, (target / scale).unsqueeze(1)).solution[:, 0]
        return found.tolist() if gap_between(target, found @ self.rows) <= self.near else None

    @cached_property
    def right(self) -> dict[str, list[float]]:
        """The combinations of the parts that are the whole: by name, or "terms" with shares of their own."""
        named = {name: self.combinations[name] for name in _RIGHT if name in self.named(self.target)}
        shares = None if named else self.shares(self.target)
        fits = shares is not None and min(shares) > -self.near and abs(sum(shares) - 1) < self.near
        return {"terms": shares} if fits and shares is not None else named


def _multiple(factor: float | None) -> str:
    return f"the gradient is {'another one' if factor is None else f'{times(factor)} that of one process'}"


def _by_factor(factor: float | None, ranks: int) -> tuple[str, str]:
    """Return what a factor alone tells."""
    text = _multiple(factor)
    if factor is not None and math.isclose(factor, ranks, rel_tol=1e-4):
        return "hand-compensated loss", f"{text}: it is multiplied by the {ranks} ranks"
    if factor is not None and math.isclose(factor * ranks, 1, rel_tol=1e-4):
        return "sum loss", f"{text}: the loss is a sum over samples, or was divided by the ranks by hand"
    return "unexplained", text


def _of_parts(known: _Evidence) -> tuple[str, str]:
    """Return why a gradient that is a combination of its parts is the wrong one."""
    ratios = [
        one.loss / part.loss if part.loss else math.nan for one, part in zip(known.taken, known.parts, strict=True)
    ]
    if any(abs(ratio - 1) > known.near for ratio in ratios if math.isfinite(ratio)):
        shown = ", ".join(f"{ratio:.4g}" for ratio in ratios)
        text = f"{known.multiple}; the ranks' losses are {shown} x those of the same samples on one process"
        if all(math.isclose(ratio * known.world_size, 1, rel_tol=1e-4) for ratio in ratios):
            return "double division", text
        mean_is_right = known.combines(known.target, [ratio / len(ratios) for ratio in ratios])
        return "hand-compensated loss", text + '; with it `reduction="mean"` is right' * mean_is_right
    if "terms" in known.right and known.keeps_state():
        text = "a value that every rank keeps for itself, such as a moving average, changes the loss"
        return "hand-compensated loss", f"{known.multiple}; {text}"
    done = known.named(known.reduced)
    likely, unlikely = (_WEIGHED, _MEANS) if known.facts.uses_weight else (_MEANS, _WEIGHED)
    done -= set(unlikely) if done & set(likely) else set()
    done -= set() if "sum" in known.facts.rule else {"sum"}
    for reading in _READINGS:
        if done & set(reading.done) and set(known.right) & reading.right:
            return reading.cause, _detail(known, reading.detail)
    return _changed(known) or _by_factor(known.factor, known.world_size)


def _detail(known: _Evidence, text: str) -> str:
    right, found = next(iter(known.right.values())), known.shares(known.reduced)
    shares = f"one process weights the micro-batches by {_listed(right)}, but the run weights them"
    return text.format(
        multiple=known.multiple,
        ranks=known.world_size,
        shares=f"{shares} by {_listed(found)}" if found is not None and "{shares}:" in text else shares,
        length=len(known.ranks) / len(set(known.ranks)),
        window=known.facts.accumulation,
    )


def _listed(shares: Sequence[float]) -> str:
    return ", ".join(f"{one:.4g}" for one in shares)


def _changed(known: _Evidence) -> tuple[str, str] | None:
    """Return what was done to the ranks' gradients beyond combining them, if it is known."""
    local = [flat(one.local, known.like) for one in known.taken]
    if not all(_is_multiple(mine, row, known.near) for mine, row in zip(local, known.rows, strict=True)):
        return "gradient hooks", "a rank's own gradient differs from that of one process for the same samples"
    elements = torch.cat([known.run.get(name, each * 0)[:_ELEMENTS] for name, each in known.like.items()])
    for name, dtype in _WIRES.items():
        if torch.equal(elements.to(dtype).double(), elements):
            return name, f"every element of the gradient is a {str(dtype).removeprefix('torch.')} number"
    if known.factor is None:
        return "gradient hooks", "the ranks' own gradients are right, and no known combination of them was made"
    return None


def _is_multiple(found: Tensor, expected: Tensor, near: float) -> bool:
    """Return whether a gradient is a multiple of another; zero is."""
    return not (found.any() and expected.any()) or multiple_of(found, expected, near) is not None


def _of_whole(known: _Evidence) -> tuple[str, str]:
    """Return why the gradient of a batch is no combination of those of its parts."""
    variations: dict[str, Callable[[nn.Module], AbstractContextManager[None]]] = {
        **({} if known.facts.replicated else {"batch norm": _without_statistics}),  # which are over all ranks there
        "gradient hooks": without_gradient_hooks,
    }
    for cause, variation in variations.items():
        with variation(known.probe.module):
            other = known.again()
        if other.right:
            combines = f"combines from those of its parts ({', '.join(other.right)})"
            return cause, f"only without it the gradient of the whole batch {combines}"
    if _has_constant_term(known):
        text = "the losses of two parts of a batch add up to its loss and one more term, which depends on no sample"
        return "constant term", text
    collectives = {name for tape in known.probe.twin.tapes for name in tape.collectives}
    reached = [name for name in sorted(collectives) if "gather" in name or "reduce" in name]
    losses = [one.loss for one in known.taken]
    if reached and math.isclose(sum(losses) / len(losses), known.whole.loss, rel_tol=1e-7):
        text = f"what {', '.join(reached)} brought from other ranks carries no gradient"
        return "detached gather", f"the ranks' losses are those of one process, but the gradient is not: {text}"
    text = "that of a batch is not a combination of those of its parts: the loss compares samples"
    return "non-decomposable loss", f"{known.multiple}, and {text}"


def _has_constant_term(known: _Evidence) -> bool:
    """Return whether the loss is a sum over samples and something that is there once for every batch."""
    twice = known.probe.compute([*known.taken, *known.taken], [*known.keys, *known.keys])
    of_parts = (known.rows.sum(0) - known.target) / max(1, len(known.rows) - 1)
    of_twice = 2 * known.target - flat(twice.gradients, known.like)
    return len(known.rows) > 1 and gap_between(of_twice, of_parts) <= 10 * known.near and bool(of_parts.any())


@contextmanager
def _without_statistics(module: nn.Module) -> Iterator[None]:
    """Let batch norm scale and shift only."""

    def affine(norm: BatchNorm) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            zeros, ones = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
            return nn.functional.batch_norm(x, zeros, ones, norm.weight, norm.bias, training=False)

        return forward

    with ExitStack() as stack:
        for part in (part for part in module.modules() if isinstance(part, BatchNorm)):
            if part.training or not part.track_running_stats:
                stack.enter_context(mock.patch.object(part, "forward", affine(part)))
        yield
