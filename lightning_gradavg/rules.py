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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from lightning_gradavg._support.arguments import did_you_mean
from lightning_gradavg._support.place import Place, node_from_environment

__all__ = [
    "RULES",
    "Rule",
    "Share",
    "explained",
    "in_window",
    "is_number",
    "normalizer_of",
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

    multiplier: float
    normalizer: float


_Number: TypeAlias = Literal["1", "n", "1/L", "1/W"]
"""A number of a rule's share. n: weight; L: pairs of rank and micro-batch on the node; W: all pairs."""


@dataclass(frozen=True)
class Rule:
    """A linear reduction rule.

    It is data, so a rule that was pickled for a spawned process equals the one in `RULES`.

    Attributes:
        name: What `reduction=` and messages call it.
        multiplier: `w` of a pair.
        normalizer: `z` of a pair.
        formula: The reduction in one line of text, for messages.
        averages_window: Whether the ranks on a node are averaged. A window of several micro-batches is then divided by
            its length, as its micro-batches count as further ranks on the node.
    """

    name: str
    multiplier: _Number
    normalizer: _Number
    formula: str
    averages_window: bool = False

    @property
    def uses_weight(self) -> bool:
        """Whether the share depends on the weight. If not, weights are neither read nor communicated."""
        return self.multiplier == "n" or self.normalizer == "n"

    @property
    def uses_nodes(self) -> bool:
        """Whether the share depends on the number of ranks on the node."""
        return self.multiplier == "1/L" or self.normalizer == "1/L"

    @property
    def node(self) -> int:
        """The node of this process, or 0 if the share does not depend on nodes.

        In the latter case a launcher that does not tell the node is no error.
        """
        if not self.uses_nodes:
            return 0
        return node_from_environment()


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            Rule("mean", "1", "1", "sum(g) / W"),
            Rule("sum", "1", "1/W", "sum(g)"),
            Rule("weighted_mean", "n", "n", "sum(n * g) / sum(n)"),
            Rule("normalized_sum", "1", "n", "sum(g) / sum(n)"),
            Rule("mean_of_node_sums", "1", "1/L", "sum(g) / nodes"),
            Rule("mean_of_node_means", "1/L", "1/L", "sum(g / L) / nodes", averages_window=True),
            Rule("sum_of_node_means", "1/L", "1/W", "sum(g / L)", averages_window=True),
        )
    }
)
"""The rules: name, w, z and formula. W: pairs of rank and micro-batch; n: weight; L: pairs on the node."""

# `"mean"` where ranks share a loader batch: they may have different numbers of samples. It keeps its name, which
# messages and checkpoints show.
_MEAN_OVER_SAMPLES = Rule("mean", "n", "n", "sum(n * g) / sum(n)")


_MEANINGS = {
    "g": "the gradient of one micro-batch on one rank",
    "n": "its weight",
    "W": "the number of these gradients",
    "L": "the number of those on its node",
}
"""What the letters of the rules' formulas mean, in the order in which they are explained."""


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
    if rule.averages_window:
        raise ValueError(
            f"reduction={rule.name!r} weights all ranks of a node equally, but with split_batches=True a rank may"
            " have fewer samples than another, or none. Use 'weighted_mean', or set split_batches=False."
        )
    # Equal, not identical: in a spawned process the rule is an unpickled copy.
    if rule == RULES["mean"]:
        return _MEAN_OVER_SAMPLES
    return rule


def resolve_rule(reduction: str | Rule) -> Rule:
    """Return the rule that `reduction` names or is, or raise an error that lists what is accepted."""
    if isinstance(reduction, Rule):
        return reduction
    accepted = f"one of {', '.join(map(repr, RULES))}"
    given: object = reduction
    if not isinstance(given, str):
        raise TypeError(
            f"reduction must be {accepted}; got {reduction!r} of type {type(reduction).__name__}. For a rule of your"
            " own, multiply the loss by w and give z as its weight under 'normalized_sum'."
        )
    if reduction in RULES:
        return RULES[reduction]
    raise ValueError(f"reduction={reduction!r} is not {accepted}.{did_you_mean(reduction, RULES)}")


def is_number(value: float) -> bool:
    """Return whether a weight may have this value: finite and >= 0."""
    return 0 <= value < math.inf  # False for NaN


def share_of(rule: Rule, place: Place, weight: float) -> Share:
    """Return the share of one pair. Under a rule that uses weights, weight 0 gives the share (0, 0).

    Raises:
        ValueError: If the rule uses weights, and the weight is not finite and >= 0.
    """
    if rule.uses_weight and not is_number(weight):
        raise ValueError(f"weight {weight!r} is not a finite number >= 0")
    if rule.uses_weight and weight == 0:
        return Share(0.0, 0.0)
    values = {"1": 1.0, "n": weight, "1/L": 1 / place.ranks_on_node, "1/W": 1 / place.world_size}
    return Share(values[rule.multiplier], values[rule.normalizer])


def normalizer_of(rule: Rule, places: Sequence[Place], counted: float, length: int = 1) -> float:
    """Return `Z` of a window, for the multipliers that `share_of` gives at these places.

    | z of a pair | Z                                                                      |
    |-------------|------------------------------------------------------------------------|
    | 1 or n      | what all pairs add up to, which only an exchange tells                 |
    | 1/L         | the number of nodes, exactly: in floats, 49 times 1/49 is not 1        |
    | 1/W         | 1, exactly                                                             |

    The last two are multiplied by the length of the window if the rule averages the ranks on a node: `share_of` divides
    by those ranks, and not by their micro-batches, whose number is not known before the window ends.

    Args:
        rule: The rule.
        places: The places of all ranks.
        counted: The sum of z over all pairs.
        length: Number of micro-batches, the same on all ranks.
    """
    if rule.normalizer in ("1", "n"):
        return counted
    normalizer = 1.0
    if rule.normalizer == "1/L":
        normalizer = float(len({place.node for place in places}))
    if rule.averages_window:
        normalizer *= length
    return normalizer


def in_window(place: Place, length: int) -> Place:
    """Return a rank's place in a window of `length` micro-batches, which count as further ranks on the same node."""
    return replace(place, world_size=length * place.world_size, ranks_on_node=length * place.ranks_on_node)
