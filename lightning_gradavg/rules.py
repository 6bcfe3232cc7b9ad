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
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from lightning_gradavg._support.arguments import did_you_mean
from lightning_gradavg._support.place import Place, node_from_environment

__all__ = [
    "RULES",
    "Rule",
    "RuleFunction",
    "Share",
    "depends_on_length",
    "in_window",
    "is_number",
    "resolve_rule",
    "rule_of_split_batches",
    "share_of",
]


class Share(NamedTuple):
    """What one (rank, micro-batch) pair contributes to the reduction.

    Attributes:
        multiplier: `w` in `g = sum(w * g_r) / sum(z)`; finite and >= 0.
        normalizer: `z` in the same formula; finite and >= 0.
    """

    multiplier: float | Fraction
    normalizer: float | Fraction


RuleFunction: TypeAlias = Callable[[Place, float], Share]
"""`(place, weight) -> Share`. Pure, and the same on all ranks.

A weight is a float >= 0. A number of a share may be a `Fraction`, which keeps sums such as W * (1/W) exact.
"""


@dataclass(frozen=True)
class Rule:
    """A linear reduction rule.

    Attributes:
        name: What messages call it: the `reduction=` name, or the qualified name of a user's function.
        share: The pure function `(place, weight) -> Share`.
        uses_weight: Whether the share depends on the weight. If not, weights are neither read nor communicated.
        formula: The reduction in one line of text, for messages.
        averages_window: Whether a window of several micro-batches is divided by its length, as its micro-batches count
            as further ranks. Only named rules without weights are, and not those of sums.
    """

    name: str
    share: RuleFunction
    uses_weight: bool
    formula: str
    averages_window: bool = False

    @property
    def node(self) -> int:
        """The node of this process, or 0 if the share doesn't depend on nodes; then the launcher needn't tell."""
        counts = not isinstance(self.share, _NamedShare) or "1/L" in vars(self.share).values()
        return node_from_environment() if counts else 0


_NUMBERS: Mapping[str, Callable[[Place, float], float | Fraction]] = {
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

    def __call__(self, place: Place, weight: float) -> Share:
        return Share(_NUMBERS[self.multiplier](place, weight), _NUMBERS[self.normalizer](place, weight))


def _rule(name: str, multiplier: str, normalizer: str, formula: str, *, averages_window: bool = False) -> Rule:
    uses_weight = "n" in (multiplier, normalizer)
    return Rule(name, _NamedShare(multiplier, normalizer), uses_weight, formula, averages_window)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            _rule("mean", "1", "1", "sum(g) / W", averages_window=True),
            _rule("sum", "1", "1/W", "sum(g)"),
            _rule("weighted_mean", "n", "n", "sum(n * g) / sum(n)"),
            _rule("normalized_sum", "1", "n", "sum(g) / sum(n)"),
            _rule("mean_of_node_sums", "1", "1/L", "sum(g) / nodes"),
            _rule("mean_of_node_means", "1/L", "1/L", "sum(g / L) / nodes", averages_window=True),
            _rule("sum_of_node_means", "1/L", "1/W", "sum(g / L)", averages_window=True),
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


def share_of(rule: Rule, place: Place, weight: float) -> Share:
    """Return the share of one pair. Under a rule that uses weights, weight 0 gives the share (0, 0).

    Raises:
        ValueError: If the weight is not finite and >= 0, or the rule fails or returns such a number.
    """
    if rule.uses_weight and not is_number(weight):
        raise ValueError(f"weight {weight!r} is not a finite number >= 0")
    if rule.uses_weight and weight == 0:
        return Share(0.0, 0.0)
    try:
        share = Share(*rule.share(place, weight))
        wrong = [name for name, number in share._asdict().items() if not is_number(number)]
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
    return share


def in_window(place: Place, length: int) -> Place:
    """Return a rank's place in a window of that many micro-batches, which count as further ranks on the same node."""
    return replace(place, world_size=length * place.world_size, ranks_on_node=length * place.ranks_on_node)


def depends_on_length(rule: Rule, places: Sequence[Place]) -> bool:
    """Return whether a share depends on the number of micro-batches in its window.

    Shares are needed before the length of the window is known, so only named rules can serve such windows:
    their dependence is known (`Rule.averages_window`). A rule with weights that is not named is tried at all places
    with two weights.
    """
    if not rule.uses_weight:
        return rule.averages_window
    if isinstance(rule.share, _NamedShare):
        return False
    for place in places:
        for weight in (1.0, 3.0):
            share = share_of(rule, place, weight)
            if share != share_of(rule, in_window(place, 2), weight):
                return True
            if share != share_of(rule, in_window(place, 3), weight):
                return True
    return False
