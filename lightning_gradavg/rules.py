"""One formula for every linear reduction, and the rules that choose its two numbers.

    g = ( sum over r of  w_r * g_r ) / Z ,        Z = sum over r of  z_r

A *rule* gives each rank a *share*: the multiplier `w_r` of its gradient and the amount `z_r` that it adds to the
normalizer. The mean has `w = z = 1`, the mean weighted by the ranks' weights `n_r` has `w = z = n_r`, and one vote per
node has `w = z = 1/L_r`, where `L_r` is the number of ranks on the node. Nodes may have different numbers of ranks.

Accumulated micro-batches count as further ranks on the same node: the sums run over (rank, micro-batch) pairs, and `W`
and `L` count pairs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from lightning_gradavg._support.arguments import did_you_mean
from lightning_gradavg._support.place import Place, node_from_environment

__all__ = [
    "RULES",
    "Rule",
    "RuleFunction",
    "Share",
    "depends_on_length",
    "explained",
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
"""`(place, weight) -> Share`. Pure, and the same on all ranks: a rank may compute the shares of others.

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
    def normalizes_by_weights(self) -> bool:
        """Whether `Z` is the sum of the weights, as of a named rule that divides by them."""
        return isinstance(self.share, _NamedShare) and self.share.normalizer == "n"

    @property
    def node(self) -> int:
        """The node of this process, or 0 if the share does not depend on nodes.

        In the latter case a launcher that does not tell the node is no error.
        """
        # A user's function may read the node of its place.
        if isinstance(self.share, _NamedShare) and not self.share.uses_nodes:
            return 0
        return node_from_environment()


_Number: TypeAlias = Literal["1", "n", "1/L", "1/W"]
"""A number of a named rule's share. n: weight; L: pairs of rank and micro-batch on the node; W: all pairs."""


def _value_of(number: _Number, place: Place, weight: float) -> float | Fraction:
    if number == "1":
        return 1.0
    if number == "n":
        return weight
    # Fractions: in floats, the sum over 49 ranks of 1/49 is not 1, and the factor of a gradient would not be exact.
    if number == "1/L":
        return Fraction(1, place.ranks_on_node)
    return Fraction(1, place.world_size)


@dataclass(frozen=True)
class _NamedShare:
    """The share of a named rule: two numbers by name.

    It is data, not a function, so a rule that was pickled for a spawned process equals the one in `RULES`.
    """

    multiplier: _Number
    normalizer: _Number

    @property
    def uses_nodes(self) -> bool:
        return self.multiplier == "1/L" or self.normalizer == "1/L"

    def __call__(self, place: Place, weight: float) -> Share:
        multiplier = _value_of(self.multiplier, place, weight)
        normalizer = _value_of(self.normalizer, place, weight)
        return Share(multiplier, normalizer)


def _rule(name: str, multiplier: _Number, normalizer: _Number, formula: str, *, averages_window: bool = False) -> Rule:
    uses_weight = multiplier == "n" or normalizer == "n"
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
"""The named rules: name, w, z and formula. W: pairs of rank and micro-batch; n: weight; L: pairs on the node."""

# `"mean"` where ranks share a loader batch: they may have different numbers of samples. It keeps its name, which
# messages and checkpoints show.
_MEAN_OVER_SAMPLES = _rule("mean", "n", "n", "sum(n * g) / sum(n)")


_MEANINGS = {
    "g": "the gradient of one micro-batch on one rank",
    "n": "its weight",
    "W": "the number of these gradients",
    "L": "the number of those on its node",
}
"""What the letters of the named rules' formulas mean, in the order in which they are explained."""


def explained(rule: Rule) -> str:
    """Return the formula and its letters in words: "gradient = sum(g), where g is the gradient of ..."."""
    meanings = []
    for letter, meaning in _MEANINGS.items():
        if re.search(rf"\b{letter}\b", rule.formula):
            meanings.append(f"{letter} is {meaning}")
    return f"gradient = {rule.formula}, where {' and '.join(meanings)}"


def rule_of_split_batches(rule: Rule) -> Rule:
    """Return the rule for ranks that share each loader batch, which may have different numbers of samples, or none.

    The plain mean becomes the mean over the samples of the loader batch.

    Raises:
        ValueError: If the rule averages over the ranks of a node: a mean over ranks is none over samples.
    """
    if rule.name in ("mean_of_node_means", "sum_of_node_means"):
        raise ValueError(
            f"reduction={rule.name!r} weights all ranks of a node equally, but with split_batches=True a rank may"
            " have fewer samples than another, or none. Use 'weighted_mean', or set split_batches=False."
        )
    # Equal, not identical: in a spawned process the rule is an unpickled copy.
    if rule == RULES["mean"]:
        return _MEAN_OVER_SAMPLES
    return rule


def resolve_rule(reduction: str | RuleFunction | Rule) -> Rule:
    """Return the rule that `reduction` names or is, or raise an error that lists what is accepted."""
    if isinstance(reduction, Rule):
        return reduction
    if isinstance(reduction, str) and reduction in RULES:
        return RULES[reduction]
    if callable(reduction):
        name = getattr(reduction, "__qualname__", type(reduction).__qualname__)
        # Whether a function reads its weight cannot be known, so it always gets one.
        return Rule(name, reduction, uses_weight=True, formula=f"sum(w * g) / sum(z) with (w, z) from {name}")
    accepted = f"one of {', '.join(map(repr, RULES))}, or a function (place, weight) -> Share"
    if not isinstance(reduction, str):
        raise TypeError(f"reduction must be {accepted}; got {reduction!r} of type {type(reduction).__name__}.")
    raise ValueError(f"reduction={reduction!r} is not a rule.{did_you_mean(reduction, RULES)} Use {accepted}.")


def is_number(value: float | Fraction) -> bool:
    """Return whether weights and shares may have this value: finite and >= 0."""
    return 0 <= value < math.inf  # False for NaN


def share_of(rule: Rule, place: Place, weight: float) -> Share:
    """Return the share of one pair. Under a rule that uses weights, weight 0 gives the share (0, 0).

    A user's function is not called with weight 0, so it may divide by the weight or take its logarithm
    (`test_a_rule_that_uses_weights_is_not_asked_for_nothing`).

    Raises:
        ValueError: If the weight is not finite and >= 0, or the rule fails or returns such a number.
    """
    # Weight and share are checked here for every rule, so callers add up and divide without further checks.
    if rule.uses_weight and not is_number(weight):
        raise ValueError(f"weight {weight!r} is not a finite number >= 0")
    if rule.uses_weight and weight == 0:
        return Share(0.0, 0.0)
    try:
        # The function is the user's: it may raise, or return something that is no pair of numbers.
        multiplier, normalizer = rule.share(place, weight)
        usable = is_number(multiplier) and is_number(normalizer)
    except Exception as error:
        raise ValueError(
            f"the reduction rule {rule.name!r} failed on ({place}, {weight}): {error!r}."
            " A rule is a function (place, weight) -> Share(multiplier, normalizer)."
        ) from error
    if not usable:
        wrong = f"multiplier={multiplier!r}"
        if is_number(multiplier):
            wrong = f"normalizer={normalizer!r}"
        raise ValueError(
            f"the reduction rule {rule.name!r} returned {wrong} for ({place}, weight {weight})."
            " Both numbers of a share must be finite and >= 0."
        )
    return Share(multiplier, normalizer)


def in_window(place: Place, length: int) -> Place:
    """Return a rank's place in a window of `length` micro-batches, which count as further ranks on the same node."""
    return replace(place, world_size=length * place.world_size, ranks_on_node=length * place.ranks_on_node)


def depends_on_length(rule: Rule, places: Sequence[Place]) -> bool:
    """Return whether a share depends on the number of micro-batches in its window.

    Shares are needed before the length of the window is known, so only named rules can serve windows whose length they
    depend on:

    | rule | answer |
    |---|---|
    | without weights | `Rule.averages_window`: under the others Z is the same for windows of any length |
    | named, with weights | no: its numbers are 1 and n |
    | a user's function | found by trial, at all places, with two weights and windows of 1, 2 and 3 micro-batches |

    Args:
        rule: The rule.
        places: The places of all ranks.
    """
    if not rule.uses_weight:
        return rule.averages_window
    if isinstance(rule.share, _NamedShare):
        return False
    # A function may differ only on some ranks (rank 0 counts double) or nodes, so every place is tried.
    for place in places:
        for weight in (1.0, 3.0):
            share = share_of(rule, place, weight)
            for length in (2, 3):
                if share_of(rule, in_window(place, length), weight) != share:
                    return True
    return False
