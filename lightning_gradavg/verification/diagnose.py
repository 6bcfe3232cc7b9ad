"""Why the reduced gradient of a step is not that of the reference: each cause is shown by what it would have given.

`P` are the gradients of the micro-batches computed one by one on one process, `L` those that the ranks computed, `F`
that of the whole global batch on one process, and `G` the reduced gradient of the run. A combination of `P` that is `F`
is *right*; a combination of `L` that is `G` is what was *done*. Where the two are not the same, their names say why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gradavg.verification.hypotheses import (
    Parts,
    flattened,
    implied_shares,
    matches,
    relative_gap,
    rounded_on_the_wire,
)
from lightning_gradavg.verification.measure import factor_between
from lightning_gradavg.verification.records import Replay
from lightning_gradavg.verification.stages import Comparison, is_random

__all__ = ["Diagnosis", "diagnose"]

_MEANS = frozenset({"mean", "samples", "weights", "mean of the ranks' means"})
_TWICE = frozenset({"divided twice", "samples, divided twice", "weights, divided twice"})
_LOOSE = 0.05
"""Of a gradient that a narrow type may have rounded."""
_ROUNDING = "the micro-batches are combined as is right: if it is gone in float64 (--double), it was rounding"
_NEAR = 1e-3
"""Of a factor that is 1."""


@dataclass(frozen=True)
class Diagnosis:
    """One cause, and the numbers that show it."""

    cause: str
    detail: str


@dataclass(frozen=True)
class _Evidence:
    """What is known of one step.

    Attributes:
        parts: The micro-batches.
        local: `L`, shape (parts, elements); None where it was not recorded.
        alone: `P`, of the same shape; None where the step could not be computed again.
        whole: `F`; None where there is no global batch.
        reduced: `G`.
        expected: The gradient that the reference took its step with.
        uses_weight: Whether the run's rule weighs micro-batches.
        tolerance: Of a match.
    """

    parts: Parts
    local: Tensor | None
    alone: Tensor | None
    whole: Tensor | None
    reduced: Tensor
    expected: Tensor
    uses_weight: bool
    tolerance: float


def diagnose(comparison: Comparison, position: int) -> list[Diagnosis]:
    """Return the causes of a step whose reduced gradient parts from the reference; none where only chance does."""
    like = {**comparison.reference.steps[position].gradient, **comparison.runs[0].steps[position].gradient}
    pairs = comparison.pairs(position)
    replays = comparison.reference.replays.get(position, {})
    facts = comparison.facts
    weights = [micro_batch.weight for _, micro_batch, _ in pairs]
    numbers = tuple(float(weight) for weight in weights if isinstance(weight, (int, float)))
    parts = Parts(
        ranks=tuple(rank for rank, _, _ in pairs),
        samples=tuple(len(micro_batch.samples) for _, micro_batch, _ in pairs),
        weights=numbers if len(numbers) == len(pairs) else None,
        world_size=len(comparison.runs),
        accumulation=facts.accumulation * facts.cuts,
    )
    recorded = [part for _, _, part in pairs if part is not None]
    local = torch.stack([flattened(part.gradient, like) for part in recorded]) if len(recorded) == len(pairs) else None

    def evidence(replay: Replay | None) -> _Evidence:
        alone = whole = None
        if replay is not None:
            alone = torch.stack([flattened(gradient, like) for _, gradient in replay.parts])
            whole = None if replay.whole is None else flattened(replay.whole[1], like)
        return _Evidence(
            parts,
            local,
            alone,
            whole,
            flattened(comparison.runs[0].steps[position].gradient, like),
            flattened(comparison.reference.steps[position].gradient, like),
            bool(getattr(facts.rule, "uses_weight", False)),
            10 * comparison.tolerance,
        )

    plain, still, frozen = (evidence(replays.get(name)) for name in ("plain", "still", "frozen"))
    if is_random(comparison, position):
        return _of_random_step(plain, still, frozen)
    return _of_step(plain, frozen)


def _right(evidence: _Evidence) -> list[str]:
    if evidence.alone is None or evidence.whole is None:
        return []
    return matches(evidence.whole, evidence.alone, evidence.parts, evidence.tolerance)


def _done(evidence: _Evidence) -> list[str]:
    if evidence.local is None:
        return []
    return matches(evidence.reduced, evidence.local, evidence.parts, evidence.tolerance)


def _of_random_step(plain: _Evidence, still: _Evidence, frozen: _Evidence) -> list[Diagnosis]:
    """Compare the way of combining instead of the numbers, which chance made."""
    done, right = _done(plain), _right(still)
    found = []
    if not right and _right(frozen):
        found.append(_batch_norm(frozen))
        right = _right(frozen)
    if not right and still.whole is not None and still.alone is not None:
        return [*found, *_without_right(still, done)]
    if not right:
        # Random numbers that training_step draws itself cannot be switched off: the loss is taken for a mean.
        right = ["weights"] if plain.parts.weights is not None else ["samples"]
    if set(done) & set(right):
        return found
    return [*found, *_named(plain, right, done)]


def _of_step(plain: _Evidence, frozen: _Evidence) -> list[Diagnosis]:
    if plain.local is None:
        return [_unexplained(plain, "the gradients of the micro-batches are not known")]
    wire = rounded_on_the_wire(plain.reduced, plain.local, plain.parts, plain.tolerance / 10)
    changed = _changed_locally(plain)
    if changed is not None:
        return [changed]
    right, done = _right(plain), _done(plain)
    if wire is not None and relative_gap(plain.reduced, plain.expected) < _LOOSE:
        return [Diagnosis(wire, f"the reduced gradient is the reference's as rounded to {wire.split()[0]}")]
    found = []
    if plain.whole is None or plain.alone is None:
        right = ["weights"] if plain.parts.weights is not None else ["samples"]
    elif not right and _right(frozen):
        found.append(_batch_norm(frozen))
        right = _right(frozen)
        if set(right) & set(done):
            return found
    if not right:
        return [*found, *_without_right(plain, done)]
    return [*found, *_named(plain, right, done)]


def _batch_norm(frozen: _Evidence) -> Diagnosis:
    by = _right(frozen)[0]
    return Diagnosis(
        "batch norm",
        "batch norm not synchronised: with running statistics the gradient of the whole batch is that of its"
        f" micro-batches ({by}), with batch statistics it is not",
    )


def _changed_locally(evidence: _Evidence) -> Diagnosis | None:
    """Compare each micro-batch's gradient on its rank with that on one process."""
    local, alone, parts = evidence.local, evidence.alone, evidence.parts
    if local is None or alone is None:
        return None
    gaps = [relative_gap(one, other) for one, other in zip(local, alone, strict=True)]
    if max(gaps) <= evidence.tolerance:
        return None
    factors = [
        1.0 if gap <= evidence.tolerance else factor_between(one, other, evidence.tolerance)
        for gap, one, other in zip(gaps, local, alone, strict=True)
    ]
    if any(factor is None for factor in factors):
        return Diagnosis(
            "non-decomposable loss",
            "the ranks compute other gradients than one process does of the same samples: the loss reaches across"
            f" ranks, and its gradient comes out as {_as_multiple(evidence)}",
        )
    numbers = [factor for factor in factors if factor is not None]
    shown = ", ".join(f"{factor:.4g}" for factor in numbers)
    if all(abs(factor * parts.world_size - 1) <= _NEAR for factor in numbers):
        return Diagnosis(
            "double division",
            f"every rank's loss is divided by the {parts.world_size} ranks, and the reduction divides again",
        )
    assert evidence.local is not None
    fitting = matches(evidence.expected, local, parts, evidence.tolerance)
    cure = f"; their {_reduction_of(fitting)} is the reference" if fitting else ""
    return Diagnosis(
        "hand-compensated loss",
        f"the ranks' losses are {shown} x those of one process on the same samples{cure};"
        f" the reduction makes {_as_multiple(evidence)} of it",
    )


def _reduction_of(names: Sequence[str]) -> str:
    return 'plain mean, reduction="mean",' if "mean" in names else names[0]


def _as_multiple(evidence: _Evidence) -> str:
    factor = factor_between(evidence.reduced, evidence.expected, evidence.tolerance)
    return "another gradient" if factor is None else f"{factor:.4g} x the reference"


def _without_right(evidence: _Evidence, done: Sequence[str]) -> list[Diagnosis]:
    """Name why no known combination of the micro-batches is the gradient of the whole batch."""
    assert evidence.whole is not None
    assert evidence.alone is not None
    shares = implied_shares(evidence.whole, evidence.alone, evidence.tolerance)
    if shares is None:
        return [
            Diagnosis(
                "non-decomposable loss",
                "the gradient of the whole batch is no combination of those of its micro-batches",
            )
        ]
    shown = ", ".join(f"{share:.3g}" for share in shares)
    held = f"the whole batch takes the shares {shown} of its micro-batches' gradients"
    if evidence.uses_weight or ("samples" in done and "mean" not in done):
        return [Diagnosis("counts", f"{held}, the run others: the weights are not the terms of the loss")]
    return [Diagnosis("mean of means", f"{held}, the run equal ones: the loss has other terms than samples")]


def _named(evidence: _Evidence, right: Sequence[str], done: Sequence[str]) -> list[Diagnosis]:
    """Name the cause from what was done and what is right."""
    return [next(_readings(evidence, set(right), set(done)))]


def _readings(evidence: _Evidence, right: set[str], done: set[str]) -> Iterator[Diagnosis]:
    """Yield what the two can mean, the likeliest first."""
    parts = evidence.parts
    multiple = f"the gradient is {_as_multiple(evidence)}"
    if right & done:
        yield _unexplained(evidence, _ROUNDING)
    if "sum" in right and done & {*_MEANS, "configured window"}:
        yield Diagnosis("sum loss", f'{multiple}: the loss is a sum, use `reduction="sum"`')
    if right & {"sum over samples", "sum over weights"} and done:
        yield Diagnosis("sum loss", f"{multiple}: the loss is a sum, of which the mean is wanted")
    length = len(parts.ranks) / max(1, len(set(parts.ranks)))
    if "configured window" in done and length < parts.accumulation and right & _MEANS:
        yield Diagnosis(
            "short window",
            f"{multiple}: the window has {length:g} micro-batches and is divided by {parts.accumulation}",
        )
    if done & _TWICE and right & _MEANS:
        yield Diagnosis("double division", f"{multiple}: it is divided by the number of ranks a second time")
    alone = next((name for name in sorted(done) if name.endswith("alone")), None)
    if alone is not None:
        yield Diagnosis("unsynchronised replicas", f"the gradient is that of {alone}: it was not reduced")
    if "samples" in done and "weights" in right and (evidence.uses_weight or "mean" not in done):
        yield Diagnosis("counts", "the run weighs by samples, the loss is a mean over what the weights count")
    if done & {"mean", "mean of the ranks' means"} and right & {"samples", "weights"}:
        what = "samples" if "samples" in right or parts.weights is None else "terms"
        sizes = ", ".join(f"{size:g}" for size in (parts.weights if what == "terms" else parts.samples) or ())
        yield Diagnosis(
            "mean of means",
            f"every micro-batch counts the same, but they hold {sizes} {what}: the mean over {what} is wanted",
        )
    if "sum" in done and right & _MEANS:
        yield Diagnosis("counts", f"{multiple}: the loss is a mean, and the reduction adds the ranks up")
    known = (", ".join(sorted(names)) or "unknown" for names in (done, right))
    yield _unexplained(evidence, "done: {}; right: {}".format(*known))


def _unexplained(evidence: _Evidence, detail: str) -> Diagnosis:
    return Diagnosis("unexplained", f"the gradient is {_as_multiple(evidence)}; {detail}")
