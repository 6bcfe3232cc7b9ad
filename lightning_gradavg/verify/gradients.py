"""Why a reduced gradient differs: the first case that holds, in the order of the code.

`evidence.py` says what `P`, `F` and `G` are. `tests/test_ranks_verify.py` has runs of each cause in `DIFFERENT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_gradavg.verify.evidence import Evidence
from lightning_gradavg.verify.records import Record, Refused
from lightning_gradavg.verify.sketches import gap_between

__all__ = ["Explanation", "explain_gradient"]


class Explanation(NamedTuple):
    """Why something differs."""

    cause: str  # a key of `CAUSES`
    detail: str  # what was found, with numbers, and the hook that the gradients go through


def explain_gradient(evidence: Evidence, records: Sequence[Record]) -> Explanation:
    """Return why a reduced gradient differs in automatic optimization, or raise `Refused` if it cannot be said."""
    if evidence.depends_on_order:
        # A batch and its parts differ on one process, too, and explain nothing.
        raise Refused(
            "with the samples of the batch in a different order one process computes a different gradient: the"
            " loss, or a random draw, depends on their positions in the batch"
        )
    if not evidence.right:
        return _of_compared_samples(evidence, records)
    explanation = _of_combination(evidence)
    if explanation is None:
        explanation = _of_change(evidence, records)
    return explanation


def _of_compared_samples(evidence: Evidence, records: Sequence[Record]) -> Explanation:
    """Return why the gradient of a batch is no combination of those of its parts."""
    facts, multiple = evidence.facts, evidence.multiple
    if facts.replicas is not None:
        raise Refused(
            "the gradient of a batch is no combination of those of its replicas: something compares the samples of a"
            " replica with each other. One process has only the whole batch for that"
        )
    detail = f"{multiple}, and that of a batch is no combination of those of its parts"
    batch_norms = records[0].batch_norms
    if batch_norms and not facts.replicated:  # replicas share their statistics over all ranks
        return Explanation("batch norm", f"{detail}: each rank normalizes by its own samples in `{batch_norms[0]}`")
    # One number is a multiple of any other. Of a `gather` without a graph, only what passes through it is divided.
    if evidence.factor is not None and evidence.is_of_all and len(evidence.whole) > 1:
        return Explanation("multiple", multiple)
    return Explanation("non-decomposable loss", detail + _changed_by(records[0]))


def _of_combination(evidence: Evidence) -> Explanation | None:
    """Return which multiple or which other combination of the parts the run made, if it is a known one."""
    rule, number = evidence.facts.rule, len(evidence.batches)
    # Gradients that differ by more than the tolerance, and less than `near`. Both are the same combination then.
    gap = gap_between(evidence.reduced, evidence.whole)
    if gap <= evidence.near:
        return Explanation(
            "unexplained",
            f"the gradients differ by {gap:.2g} of the largest element: what the ranks keep for themselves, such as a"
            " state, may have changed them",
        )
    factors = evidence.factors(evidence.reduced)
    if not factors:
        return None
    if "sum" in evidence.right and "sum" not in rule.name:
        return Explanation("sum loss", f"{evidence.multiple}: the loss is a sum over samples")
    if "sum" in evidence.right:
        # Shares add up to 1, and the right gradient is `number` times the mean.
        factors = {name: factor / number for name, factor in factors.items()}

    made = [name for name, factor in factors.items() if evidence.is_close(factor, 1)]
    if made:
        # Where all micro-batches have equally many samples, several names are the same combination.
        is_mean = "mean" in made and (len(made) == 1 or not rule.uses_weight)
        return _of_shares(evidence, is_mean=is_mean)
    return _of_multiple(evidence, list(factors.values()))


def _of_shares(evidence: Evidence, *, is_mean: bool) -> Explanation:
    """Return what to say of a gradient that is a combination of the parts, but not the right one."""
    right_shares = ", ".join(f"{share:.4g}" for share in next(iter(evidence.right.values())).tolist())
    detail = f"one process weights the micro-batches by {right_shares}, but the run weights them"
    if is_mean:
        return Explanation("mean of means", f"{detail} equally: the ranks' losses have different numbers of terms")
    return Explanation("counts", f"{detail} otherwise: the weights are not the numbers of terms")


def _of_multiple(evidence: Evidence, factors: Sequence[float]) -> Explanation | None:
    """Return why the run made one of these multiples of the right gradient, if it is a known one."""
    number = len(evidence.batches)
    length = number / evidence.world_size
    window = evidence.facts.accumulation
    for factor in factors:
        if length != window and evidence.is_close(factor, length / window):
            said = f"the window has {length:g} micro-batches on each rank and is divided by {window}"
            return Explanation("short window", f"{evidence.multiple}: {said}")
        if "sum" in evidence.facts.rule.name and evidence.is_close(factor, number):
            said = "the loss is a mean, but the reduction adds up the ranks"
            return Explanation("counts", f"{evidence.multiple}: {said}")
    return None


def _of_change(evidence: Evidence, records: Sequence[Record]) -> Explanation:
    """Return what was done to the ranks' gradients beyond combining them, if it is known."""
    if not evidence.reduced.any():
        return Explanation("unexplained", "the run has no gradient, as if the ranks never reduced theirs")
    changed_by = _changed_by(records[0])
    if evidence.factor is not None:
        return Explanation("multiple", evidence.multiple + changed_by)
    cause = "unexplained"
    if changed_by:
        cause = "gradient hooks"
    gap = gap_between(evidence.reduced, evidence.whole)
    detail = f"the gradients differ by {gap:.2g} of the largest element, and no known combination was made"
    return Explanation(cause, detail + changed_by)


def _changed_by(record: Record) -> str:
    """Return the communication hook, which may change a gradient beside its reduction; "" if there is none."""
    if not record.comm_hook:
        return ""
    return f". The gradients go through the communication hook `{record.comm_hook}`"
