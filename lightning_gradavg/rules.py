"""Every linear reduction is one formula, and a rule is a choice of its two numbers.

    g = ( sum over r of  w_r * g_r ) / Z ,        Z = sum over r of  z_r

A *rule* gives each rank a *share*: the multiplier `w_r` of its gradient and the amount `z_r` that it adds to the
normalizer. The mean takes `w = z = 1`; the mean weighted by the ranks' weights `n_r` takes `w = z = n_r`; one vote per
node takes `w = z = 1/L_r` with `L_r` the ranks on the node. Uneven nodes are no special case.

Accumulated micro-batches count as further ranks on the same node: the sums run over (rank, micro-batch) pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from lightning_gradavg.place import Place

__all__ = ["RULES", "Rule", "RuleFunction", "Share", "resolve_rule", "rule_of_replica_losses", "rule_of_split_batches"]


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

A weight is a number >= 0: a float, or while training a 0-dim float64 tensor. So are the numbers of a share; a
`Fraction` keeps sums such as W * (1/W) exact.
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


def _mean(place: Place, weight: Any) -> Share:
    return Share(1.0, 1.0)


def _sum(place: Place, weight: Any) -> Share:
    return Share(1.0, Fraction(1, place.world_size))


def _weighted_mean(place: Place, weight: Any) -> Share:
    return Share(weight, weight)


def _normalized_sum(place: Place, weight: Any) -> Share:
    return Share(1.0, weight)


def _mean_of_node_sums(place: Place, weight: Any) -> Share:
    return Share(1.0, Fraction(1, place.ranks_on_node))


def _mean_of_node_means(place: Place, weight: Any) -> Share:
    return Share(1.0 / place.ranks_on_node, Fraction(1, place.ranks_on_node))


def _sum_of_node_means(place: Place, weight: Any) -> Share:
    return Share(1.0 / place.ranks_on_node, Fraction(1, place.world_size))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            Rule("mean", _mean, False, "sum(g) / W"),
            Rule("sum", _sum, False, "sum(g)"),
            Rule("weighted_mean", _weighted_mean, True, "sum(n * g) / sum(n)"),
            Rule("normalized_sum", _normalized_sum, True, "sum(g) / sum(n)"),
            Rule("mean_of_node_sums", _mean_of_node_sums, False, "sum(g) / nodes"),
            Rule("mean_of_node_means", _mean_of_node_means, False, "sum(g / L) / nodes"),
            Rule("sum_of_node_means", _sum_of_node_means, False, "sum(g / L)"),
        )
    }
)
"""The named rules. W: pairs of rank and micro-batch; n: weight; L: pairs on the node."""


_MEAN_OVER_SAMPLES = Rule("mean", _weighted_mean, True, "sum(n * g) / sum(n) over the samples n of each chunk")

_MEAN_OVER_REPLICAS = Rule(
    "mean_of_replica_losses", _weighted_mean, True, "sum(g / R) over the R replicas of each loader batch"
)

_PER_RANK = ("mean_of_node_means", "sum_of_node_means")


def rule_of_split_batches(rule: Rule) -> Rule:
    """Return the rule for ranks that share each loader batch, some of them perhaps with fewer samples or none.

    The mean is that over the samples of the loader batch. The mean of a node over its ranks has no such meaning.

    Raises:
        ValueError: If the rule gives every rank of a node the same say.
    """
    if rule == RULES["mean"]:
        return _MEAN_OVER_SAMPLES
    if rule.name in _PER_RANK:
        raise ValueError(
            f"reduction={rule.name!r} gives every rank of a node the same say, but with split_batches=True a rank may"
            " have fewer samples than another, or none. Use 'weighted_mean', or set split_batches=False."
        )
    return rule


def rule_of_replica_losses() -> Rule:
    """Return the mean over the replicas of each loader batch, which the `dp` strategy of Lightning 1.x took.

    The weight of a replica is `1/R`, with R the replicas that have samples of its loader batch: a replica of fewer
    samples has the same say.
    """
    return _MEAN_OVER_REPLICAS


def resolve_rule(reduction: str | RuleFunction | Rule) -> Rule:
    """Return the rule that `reduction` names or is.

    Args:
        reduction: A key of `RULES`, a function `(place, weight) -> Share`, or a `Rule`.

    Raises:
        ValueError: If `reduction` is a string that names no rule.
        TypeError: If `reduction` is neither a string, a rule nor callable.
    """
    if isinstance(reduction, Rule):
        return reduction
    if isinstance(reduction, str):
        try:
            return RULES[reduction]
        except KeyError:
            raise ValueError(
                f"reduction={reduction!r} is not a rule. Use one of {', '.join(map(repr, RULES))},"
                " or a function (place, weight) -> Share."
            ) from None
    if callable(reduction):
        name = getattr(reduction, "__qualname__", type(reduction).__qualname__)
        return Rule(name, reduction, True, f"sum(w * g) / sum(z) with (w, z) from {name}")
    raise TypeError(
        f"reduction must be one of {', '.join(map(repr, RULES))}, or a function (place, weight) -> Share;"
        f" got {reduction!r} of type {type(reduction).__name__}."
    )
