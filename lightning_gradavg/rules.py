"""One formula for every linear reduction, and the rules that choose its two numbers.

    g = ( sum over r of  w_r * g_r ) / Z ,        Z = sum over r of  z_r

A *rule* gives each rank a *share*: the multiplier `w_r` of its gradient and the amount `z_r` that it adds to the
normalizer. The mean has `w = z = 1`, the mean weighted by the ranks' weights `n_r` has `w = z = n_r`, and one vote per
node has `w = z = 1/L_r`, where `L_r` is the number of ranks on the node. Uneven nodes are no special case.

Accumulated micro-batches count as further ranks on the same node: the sums run over (rank, micro-batch) pairs, and `W`
and `L` count pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_gradavg.arguments import did_you_mean
from lightning_gradavg.place import Place, node_from_environment

__all__ = [
    "RULES",
    "Rule",
    "RuleFunction",
    "Share",
    "is_number",
    "powers_of_length",
    "resolve_rule",
    "rule_of_split_batches",
    "share_of",
]

_TOLERANCE = 1e-9


class Share(NamedTuple):
    """What one (rank, micro-batch) pair contributes to the reduction.

    Attributes:
        multiplier: `w` in `g = sum(w * g_r) / sum(z)`; finite and >= 0.
        normalizer: `z` in the same formula; finite and >= 0.
    """

    multiplier: Any
    normalizer: Any


RuleFunction: TypeAlias = Callable[[Place, Any], Share]
"""`(place, weight) -> Share`. Pure, the same on all ranks, and arithmetic only.

A weight is a float >= 0, or a 0-dim float64 tensor if it was given as a tensor on an accelerator. So are the numbers of
a share; a `Fraction` keeps sums such as W * (1/W) exact.
"""


@dataclass(frozen=True)
class Rule:
    """A linear reduction rule.

    Attributes:
        name: What messages call it: the `reduction=` name, or the qualified name of a user's function.
        share: The pure function `(place, weight) -> Share`.
        uses_weight: Whether the share depends on the weight. If not, weights are neither read nor communicated.
        formula: The reduction in one line of text, for messages.
    """

    name: str
    share: RuleFunction
    uses_weight: bool
    formula: str

    @property
    def node(self) -> int:
        """The node of this process, or 0 if the share doesn't depend on nodes; then the launcher needn't tell."""
        counts = not isinstance(self.share, _NamedShare) or "1/L" in vars(self.share).values()
        return node_from_environment() if counts else 0


_NUMBERS: Mapping[str, Callable[[Place, Any], Any]] = {
    "1": lambda place, n: 1.0,
    "n": lambda place, n: n,
    "1/L": lambda place, n: Fraction(1, place.ranks_on_node),
    "1/W": lambda place, n: Fraction(1, place.world_size),
}


@dataclass(frozen=True)
class _NamedShare:
    """A share of two `_NUMBERS`. It is data, so rules stay equal in spawned processes."""

    multiplier: str
    normalizer: str

    def __call__(self, place: Place, weight: Any) -> Share:
        return Share(_NUMBERS[self.multiplier](place, weight), _NUMBERS[self.normalizer](place, weight))


def _rule(name: str, multiplier: str, normalizer: str, formula: str) -> Rule:
    return Rule(name, _NamedShare(multiplier, normalizer), "n" in (multiplier, normalizer), formula)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            _rule("mean", "1", "1", "sum(g) / W"),
            _rule("sum", "1", "1/W", "sum(g)"),
            _rule("weighted_mean", "n", "n", "sum(n * g) / sum(n)"),
            _rule("normalized_sum", "1", "n", "sum(g) / sum(n)"),
            _rule("mean_of_node_sums", "1", "1/L", "sum(g) / nodes"),
            _rule("mean_of_node_means", "1/L", "1/L", "sum(g / L) / nodes"),
            _rule("sum_of_node_means", "1/L", "1/W", "sum(g / L)"),
        )
    }
)
"""The named rules. W: pairs of rank and micro-batch; n: weight; L: pairs on the node."""

_MEAN_OVER_SAMPLES = _rule("mean", "n", "n", "sum(n * g) / sum(n) over the samples n of each chunk")


def rule_of_split_batches(rule: Rule) -> Rule:
    """Return the rule for ranks that share each loader batch, where a rank may have fewer samples, or none.

    The mean is then over the samples of the loader batch. A node's mean over its ranks has no such meaning.
    """
    if rule.name in ("mean_of_node_means", "sum_of_node_means"):
        raise ValueError(
            f"reduction={rule.name!r} weights all ranks of a node equally, but with split_batches=True a rank may"
            " have fewer samples than another, or none. Use 'weighted_mean', or set split_batches=False."
        )
    return _MEAN_OVER_SAMPLES if rule == RULES["mean"] else rule


def resolve_rule(reduction: str | RuleFunction | Rule) -> Rule:
    """Return the rule that `reduction` names or is, or raise an error that lists what is accepted."""
    if isinstance(reduction, Rule):
        return reduction
    if isinstance(reduction, str) and reduction in RULES:
        return RULES[reduction]
    if callable(reduction):
        name = getattr(reduction, "__qualname__", type(reduction).__qualname__)
        return Rule(name, reduction, True, f"sum(w * g) / sum(z) with (w, z) from {name}")
    accepted = f"one of {', '.join(map(repr, RULES))}, or a function (place, weight) -> Share"
    if not isinstance(reduction, str):
        raise TypeError(f"reduction must be {accepted}; got {reduction!r} of type {type(reduction).__name__}.")
    raise ValueError(f"reduction={reduction!r} is not a rule.{did_you_mean(reduction, RULES)} Use {accepted}.")


def is_number(value: float) -> bool:
    """Return whether weights and shares may have this value: finite and >= 0."""
    return 0 <= value < math.inf


def share_of(rule: Rule, place: Place, weight: Any) -> Share:
    """Return the share of one pair. Under a rule that uses weights, weight 0 gives the share (0, 0).

    The weight is a number, or a 0-dim tensor. Neither this tensor nor a tensor that the rule returns is read.

    Raises:
        ValueError: If the weight is not finite and >= 0, or the rule fails or returns such a number.
    """
    unread = isinstance(weight, Tensor)
    if rule.uses_weight and not unread and not is_number(weight):
        raise ValueError(f"weight {weight!r} is not a finite number >= 0")
    if rule.uses_weight and not unread and weight == 0:
        return Share(0.0, 0.0)
    try:
        share = Share(*rule.share(place, weight))
        wrong = [name for name, n in share._asdict().items() if not (isinstance(n, Tensor) or is_number(n))]
    except Exception as error:
        raise ValueError(
            f"the reduction rule {rule.name!r} failed on ({place}, {weight}): {error!r}."
            " A rule is a function (place, weight) -> Share(multiplier, normalizer)."
        ) from error
    if wrong:
        raise ValueError(
            f"the reduction rule {rule.name!r} returned {wrong[0]}={getattr(share, wrong[0])!r} for ({place}, weight"
            f" {weight}). Both numbers of a share must be finite and >= 0."
        )
    if not (unread and rule.uses_weight):
        return share
    tensors = (number if isinstance(number, Tensor) else torch.full_like(weight, float(number)) for number in share)
    # Masked, not multiplied: a rule may turn a weight of 0 into NaN.
    return Share(*(number if number is weight else number.masked_fill(weight == 0, 0) for number in tensors))


def powers_of_length(rule: Rule, places: Sequence[Place]) -> Share:
    """Return the powers of a window's length that multipliers and normalizers follow: -1 for 1/W, and 0 for n.

    So a pair's share in a longer window is known before the window's length is. Accumulated micro-batches count as
    further ranks on the same node.
    """
    powers: list[set[float]] = [set(), set()]
    for place, weight in product(places, (1.0, 3.0) if rule.uses_weight else (1.0,)):
        windows = [
            replace(place, world_size=n * place.world_size, ranks_on_node=n * place.ranks_on_node) for n in (1, 2, 3)
        ]
        shares = [share_of(rule, window, weight) for window in windows]
        for known, (one, two, three) in zip(powers, zip(*shares, strict=True), strict=True):
            if one or two or three:
                power = round(math.log2(two / one), 9) if one and two else math.nan
                known.add(power if math.isclose(three, one * 3**power, rel_tol=_TOLERANCE) else math.nan)
    if any(len(known) > 1 or any(map(math.isnan, known)) for known in powers):
        raise ValueError(
            f"the reduction rule {rule.name!r} does not serve windows of several micro-batches, which count as further"
            " ranks on the node: its shares must follow their number by one power, the same at all places and weights."
            " Do not accumulate, or use a rule whose shares do so, such as n / place.world_size."
        )
    return Share(*(next(iter(known), 0.0) for known in powers))
