"""Why a gradient is not that of one process.

`P` are the gradients that one process computes of each micro-batch alone, `F` that of all samples at once, and `G` what
the run made of them. The combination of `P` that is `F` is what would be *right*, the one that is `G` is what was
*done*, and where the two are not the same their names say why. Where no combination of `P` is `F`, samples are compared
with each other: by batch norm, by a hook, or by the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_gradavg.lightning_internals import BatchNorm, without_gradient_hooks
from lightning_gradavg.verify.record import Refused, Taken
from lightning_gradavg.verify.report import times
from lightning_gradavg.verify.twin import Computed, Twin, difference, flat

__all__ = ["explain"]

_MEANS = ("mean", "mean of the ranks' means")
_WEIGHED = ("weights", "samples")
_OF_TERMS = frozenset({"samples", "weights", "terms", "mean"})
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


_SUM = frozenset({"sum"})
_READINGS = (
    _Reading("sum loss", (*_MEANS, *_WEIGHED, "configured window"), _SUM, "{multiple}: the loss is a sum over samples"),
    _Reading(
        "short window",
        ("configured window",),
        _OF_TERMS,
        "{multiple}: the window has {length:g} micro-batches on each rank and is divided by {window}",
    ),
    _Reading("double division", _TWICE, _OF_TERMS, "{multiple}: it is divided by the {ranks} ranks a second time"),
    _Reading("counts", ("sum",), _OF_TERMS, "{multiple}: the loss is a mean, and the reduction adds the ranks up"),
    _Reading("counts", _WEIGHED, _OF_TERMS, "{shares}: the weights are not the terms of the loss"),
    _Reading("mean of means", _MEANS, _OF_TERMS, "{shares} equal ones: the ranks' losses are means over more or less"),
    _Reading("hand-compensated loss", ("multiplied",), _OF_TERMS, "{multiple}: it is multiplied by the {ranks} ranks"),
    _Reading("unsynchronised replicas", ("alone",), _OF_TERMS | _SUM, "the gradient is that of one rank alone"),
)


@dataclass
class _Evidence:
    """What is known of one step."""

    twin: Twin
    taken: Sequence[Taken]
    ranks: Sequence[int]
    keys: Sequence[tuple[int, ...]]
    parts: Sequence[Computed]
    whole: Computed

    @property
    def near(self) -> float:
        """The relative difference up to which a combination is one."""
        return 100 * self.twin.tolerance

    @property
    def world_size(self) -> int:
        return len(self.twin.tapes)

    @property
    def target(self) -> Tensor:
        """`F`."""
        return flat(self.whole.gradients, self.like)

    @cached_property
    def reduced(self) -> Tensor:
        """`G`."""
        return flat(self.twin.reduced, self.like)

    @cached_property
    def like(self) -> dict[str, Tensor]:
        known = [*(part.gradients for part in self.parts), self.whole.gradients, self.twin.reduced]
        _, relative = difference(self.twin.reduced, self.twin.expected, self.twin.tolerance)
        differ = {name for name, each in relative.items() if each > self.twin.tolerance}
        return {name: tensor for tensors in known for name, tensor in tensors.items() if name in differ}

    @cached_property
    def rows(self) -> Tensor:
        """`P`, shape (micro-batches, elements)."""
        return torch.stack([flat(part.gradients, self.like) for part in self.parts])

    def named(self, target: Tensor) -> set[str]:
        """Return the names of the combinations of `P` that a gradient is."""
        known = _combinations(self.ranks, self.taken, self.world_size, self.twin.facts.accumulation)
        return {name for name, shares in known.items() if self._is(target, shares)}

    def _is(self, target: Tensor, shares: Sequence[float]) -> bool:
        weights = torch.tensor(shares, dtype=torch.float64)
        found = weights[weights != 0] @ self.rows[weights != 0]
        return _gap(target, found) <= self.near

    def shares(self, target: Tensor) -> list[float] | None:
        """Return the coefficients with which the parts make up a gradient; None if none do, or many could."""
        scale = float(self.rows.abs().max())
        if not bool(torch.isfinite(target).all()):
            return None
        if not (math.isfinite(scale) and scale > 0) or len(target) <= len(self.rows):
            return None
        if int(torch.linalg.matrix_rank(self.rows, rtol=1e-9)) < len(self.rows):
            return None
        found = torch.linalg.lstsq(self.rows.T / scale, (target / scale).unsqueeze(1)).solution[:, 0]
        return found.tolist() if _gap(target, found @ self.rows) <= self.near else None

    @cached_property
    def right(self) -> dict[str, list[float]]:
        """The combinations of the parts that are the whole: by name, or "terms" with shares of their own."""
        known = _combinations(self.ranks, self.taken, self.world_size, self.twin.facts.accumulation)
        named = {name: known[name] for name in self.named(self.target) & set(_RIGHT) if name in known}
        shares = None if named else self.shares(self.target)
        fits = shares is not None and min(shares) > -self.near and abs(sum(shares) - 1) < self.near
        return {"terms": shares} if fits and shares is not None else named


def _gap(found: Tensor, expected: Tensor) -> float:
    largest = float(expected.abs().max()) if len(expected) else 0.0
    gap = float((found - expected).abs().max()) if len(expected) else 0.0
    return gap / largest if largest else (math.inf if gap else 0.0)


def _combinations(
    ranks: Sequence[int], taken: Sequence[Taken], world_size: int, accumulation: int
) -> Mapping[str, list[float]]:
    """Return the coefficient of every micro-batch under every hypothesis."""
    number, present = len(ranks), sorted(set(ranks))
    lengths = [ranks.count(rank) for rank in ranks]
    found = {
        "mean": [1 / number] * number,
        "sum": [1.0] * number,
        "mean of the ranks' means": [1 / (len(present) * length) for length in lengths],
        "divided twice": [1 / (number * world_size)] * number,
        "multiplied": [world_size / number] * number,
    }
    if number != world_size * accumulation:
        found["configured window"] = [1 / (world_size * accumulation)] * number
    weights = [one.weight for one in taken]
    counts = {"samples": [float(one.size) for one in taken]}
    if None not in weights:
        counts["weights"] = [float(weight or 0.0) for weight in weights]
    for name, of_parts in counts.items():
        total = sum(of_parts)
        if total > 0:
            found[name] = [count / total for count in of_parts]
            found[f"{name}, divided twice"] = [count / total / world_size for count in of_parts]
    if len(present) > 1:
        found["alone"] = [(rank == present[0]) / ranks.count(rank) for rank in ranks]
    return found


def explain(twin: Twin, position: int) -> None:
    """Say why the gradient of a step differs, in `twin.explanation`.

    Raises:
        Refused: If what was compared depends on more than the samples.
    """
    if not twin.facts.automatic:
        twin.explanation = _by_factor(twin)
        return
    _, taken, keys = twin.batches[position]
    starts = [sum(one.size for one in taken[:index]) for index in range(len(taken) + 1)]
    of_parts = [keys[start:stop] for start, stop in pairwise(starts)]
    if len(keys) > 1:
        order = [*range(len(keys) // 2, len(keys)), *range(len(keys) // 2)]
        same, turned = twin.compute(taken, keys), twin.compute(taken, keys, order)
        steady = _differs(same, Computed(twin.expected, same.loss), twin) == 0.0
        if steady and _differs(same, turned, twin):
            raise Refused(
                "with the samples of the batch in another order one process computes another gradient: the"
                " loss, or what"
                " is drawn, depends on their places in the batch"
            )

    def evidence() -> _Evidence:
        parts = [twin.compute([one], mine) for one, mine in zip(taken, of_parts, strict=True)]
        return _Evidence(twin, taken, [mine[0][1] for mine in of_parts], keys, parts, twin.compute(taken, keys))

    known = evidence()
    twin.explanation = _of_right(known) if known.right else _of_whole(known, evidence)


def _differs(one: Computed, other: Computed, twin: Twin) -> float:
    like = {**one.gradients, **other.gradients}
    gap = _gap(flat(one.gradients, like), flat(other.gradients, like))
    return gap if gap > 100 * twin.tolerance else 0.0


def _multiple(twin: Twin, position: int = 0) -> tuple[str, float | None]:  # noqa: ARG001  # one signature
    like = {**twin.expected, **twin.reduced}
    mine, other = flat(twin.reduced, like), flat(twin.expected, like)
    factor = float(mine.dot(other) / other.dot(other)) if float(other.dot(other)) else math.nan
    if math.isfinite(factor) and _gap(mine, factor * other) <= 1e4 * twin.tolerance:
        return f"the gradient is {times(factor)} that of one process", factor
    return "the gradient is another one", None


def _by_factor(twin: Twin) -> tuple[str, str]:
    """Return what a factor alone tells."""
    text, factor = _multiple(twin)
    ranks = len(twin.tapes)
    if factor is not None and math.isclose(factor, ranks, rel_tol=1e-4):
        return "hand-compensated loss", f"{text}: it is multiplied by the {ranks} ranks"
    if factor is not None and math.isclose(factor * ranks, 1, rel_tol=1e-4):
        return "sum loss", f"{text}: the loss is a sum over samples, or was divided by the ranks by hand"
    return "unexplained", text


def _of_right(known: _Evidence) -> tuple[str, str]:
    """Return why a gradient that is made up of its parts is made up otherwise."""
    twin, right = known.twin, set(known.right)
    ratios = [
        one.loss / part.loss if part.loss else math.nan for one, part in zip(known.taken, known.parts, strict=True)
    ]
    compensated = any(math.isfinite(ratio) and abs(ratio - 1) > known.near for ratio in ratios)
    if compensated:
        shown = ", ".join(f"{ratio:.4g}" for ratio in ratios)
        divided = all(math.isclose(ratio * known.world_size, 1, rel_tol=1e-4) for ratio in ratios)
        text = f"{_multiple(twin)[0]}; the ranks' losses are {shown} x those of the same samples on one process"
        mean_is_right = '; with it `reduction="mean"` is right' * _mean_is_right(known, ratios)
        return ("double division", text) if divided else ("hand-compensated loss", text + mean_is_right)
    done = known.named(known.reduced)
    likely, unlikely = (_WEIGHED, _MEANS) if twin.facts.uses_weight else (_MEANS, _WEIGHED)
    done -= set(unlikely) if done & set(likely) else set()
    done -= set() if "sum" in twin.facts.rule else {"sum"}
    for reading in _READINGS:
        if done & set(reading.done) and right & reading.right:
            return reading.cause, _detail(known, reading.detail)
    changed = _changed(known)
    return changed if changed is not None else _by_factor(twin)


def _mean_is_right(known: _Evidence, ratios: Sequence[float]) -> bool:
    shares = [ratio / len(ratios) for ratio in ratios]
    return known._is(known.target, shares)  # of this module


def _detail(known: _Evidence, text: str) -> str:
    facts, right = known.twin.facts, next(iter(known.right.values()))
    shares = f"one process takes the shares {', '.join(f'{one:.4g}' for one in right)} of the micro-batches, the run"
    found = known.shares(known.reduced)
    if found is not None and "{shares}:" in text:
        shares += f" {', '.join(f'{one:.4g}' for one in found)}"
    length = len(known.ranks) / len(set(known.ranks))
    values = {"multiple": _multiple(known.twin)[0], "ranks": known.world_size, "shares": shares}
    return text.format(**values, length=length, window=facts.accumulation)


def _changed(known: _Evidence) -> tuple[str, str] | None:
    """Return what was done to the ranks' gradients beyond combining them, if it is known."""
    fair = torch.tensor(next(iter(known.right.values())), dtype=torch.float64)
    local = [flat(one.local, known.like) for one in known.taken]
    straight = all(_is_multiple(mine, row, known.near) for mine, row in zip(local, known.rows, strict=True))
    if not straight:
        return "gradient hooks", "a rank's own gradient is another one than that of one process for the same samples"
    elements = torch.cat([tensor.reshape(-1)[:_ELEMENTS] for tensor in known.twin.reduced.values()])
    for name, dtype in _WIRES.items():
        if torch.equal(elements.to(dtype).double(), elements):
            return name, f"every element of the gradient is a number of {str(dtype).removeprefix('torch.')}"
    shares = known.shares(known.reduced)
    if shares is not None:
        scales = torch.tensor(shares, dtype=torch.float64) / fair
        lengths, cut = scales * known.rows.norm(dim=1), scales < 1 - known.near
        norm = float(lengths.max())
        if bool(cut.any()) and float(scales.max()) < 1 + known.near and float(lengths[cut].min()) > norm * (1 - 1e-4):
            text = f"every rank clipped its gradient to a norm of {norm:.4g} before they were reduced"
            return "clipped before the reduction", text
    most = float(elements.abs().max())
    rows = torch.stack(
        [
            torch.cat([_elements(part.gradients, name, like) for name, like in known.like.items()])
            for part in known.parts
        ]
    )
    found = torch.cat([_elements(known.twin.reduced, name, like) for name, like in known.like.items()])
    for bound in (most, most * len(rows)):
        if _gap(found, fair @ rows.clamp(-bound, bound)) <= known.near:
            text = f"every rank clipped its gradient to values of {bound:.4g} before they were reduced"
            return "clipped before the reduction", text
    return None


def _elements(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    return tensors.get(name, torch.zeros_like(like)).double().reshape(-1)[:_ELEMENTS]


def _is_multiple(found: Tensor, expected: Tensor, near: float) -> bool:
    norm = float(expected.dot(expected))
    return (
        norm == 0 or float(found.dot(found)) == 0 or _gap(found, float(found.dot(expected)) / norm * expected) <= near
    )


def _of_whole(known: _Evidence, again: Callable[[], _Evidence]) -> tuple[str, str]:
    """Return what makes the gradient of a batch no combination of those of its parts."""
    twin = known.twin
    module = twin.module
    variations: dict[str, Callable[[nn.Module], AbstractContextManager[None]]] = {
        "batch norm": _without_statistics,
        "gradient hooks": without_gradient_hooks,
    }
    if twin.facts.replicated:
        del variations["batch norm"]  # which is over all ranks there
    for cause, variation in variations.items():
        with variation(module):
            other = again()
        if other.right:
            made_up = f"is made up of its parts' ({', '.join(other.right)})"
            return cause, f"without it the gradient of the whole batch {made_up}, with it not"
    if _has_constant_term(known):
        text = "it depends on no sample, and every micro-batch adds it"
        return (
            "constant term",
            f"two parts of a batch have its loss and one term more, the same for every batch: {text}",
        )
    reached = {name for tape in twin.tapes for name in tape.collectives if "gather" in name or "reduce" in name}
    losses = [one.loss for one in known.taken]
    if reached and math.isclose(sum(losses) / len(losses), known.whole.loss, rel_tol=1e-7):
        text = f"what {', '.join(sorted(reached))} brought from other ranks carries no gradient"
        return "detached gather", f"the ranks' losses are those of one process, and the gradient is not: {text}"
    text = "that of a batch is no combination of those of its parts: samples are compared with each other"
    return "non-decomposable loss", f"{_multiple(twin)[0]}, and {text}"


def _has_constant_term(known: _Evidence) -> bool:
    """Return whether the loss is a sum over samples and something that is there once for every batch."""
    twice = known.twin.compute([*known.taken, *known.taken], [*known.keys, *known.keys])
    of_parts = (known.rows.sum(0) - known.target) / max(1, len(known.rows) - 1)
    of_twice = 2 * known.target - flat(twice.gradients, known.like)
    return len(known.rows) > 1 and _gap(of_twice, of_parts) <= 10 * known.near and float(of_parts.abs().max()) > 0


@contextmanager
def _without_statistics(module: nn.Module) -> Iterator[None]:
    """Have batch norm scale and shift only."""

    def affine(norm: BatchNorm) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            zeros, ones = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
            return nn.functional.batch_norm(x, zeros, ones, norm.weight, norm.bias, training=False)

        return forward

    with ExitStack() as stack:
        for part in module.modules():
            known = isinstance(part, BatchNorm) and (part.training or not part.track_running_stats)
            stack.enter_context(mock.patch.object(part, "forward", affine(part)) if known else nullcontext())  # type: ignore[arg-type]
        yield
