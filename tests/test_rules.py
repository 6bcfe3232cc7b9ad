"""Rules on dense gradients: laws that hold for all of them, and errors. Numbers by hand are in `cases.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import root
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gradavg.place import Place
from lightning_gradavg.reduction.reference import combine
from lightning_gradavg.rules import RULES, Rule, Share, resolve_rule, share_of

ROOT = resolve_rule(root)


@dataclass(frozen=True)
class Pairs:
    """Gradients of shape `(pairs, 3)`, and the node and weight of every pair of rank and micro-batch."""

    gradients: Tensor
    nodes: Sequence[int]
    weights: Sequence[float]

    def combined(self, rule: Rule | str) -> Tensor:
        return combine(self.gradients, rule=resolve_rule(rule), nodes=self.nodes, weights=self.weights)


@st.composite
def drawn_pairs(draw: st.DrawFn) -> Pairs:
    nodes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    weights = torch.rand(len(nodes), generator=generator, dtype=torch.float64) * 9 + 0.1
    return Pairs(torch.randn(len(nodes), 3, generator=generator, dtype=torch.float64), nodes, weights.tolist())


few = settings(max_examples=20)


@pytest.mark.parametrize("rule", ["weighted_mean", "normalized_sum", ROOT], ids=str)
@few
@given(pairs=drawn_pairs(), zero=st.sampled_from([0, 0.0, False]), data=st.data())
def test_weight_0_contributes_nothing(rule: Any, pairs: Pairs, zero: Any, data: st.DataObject) -> None:
    absent = data.draw(st.sets(st.sampled_from(range(len(pairs.nodes)))))
    weights = [zero if i in absent else weight for i, weight in enumerate(pairs.weights)]
    results = []
    for garbage in (0.0, math.nan, math.inf):
        gradients = pairs.gradients.clone()
        gradients[sorted(absent)] = garbage
        results.append(Pairs(gradients, pairs.nodes, weights).combined(rule))
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


Reduce = Callable[[Tensor], Tensor]
SUM, MEAN = (lambda g: g.sum(0)), (lambda g: g.mean(0))
TWO_LEVELS: dict[str, tuple[Reduce, Reduce]] = {
    "mean_of_node_sums": (SUM, MEAN),
    "mean_of_node_means": (MEAN, MEAN),
    "sum_of_node_means": (MEAN, SUM),
    "sum": (SUM, SUM),
}


@pytest.mark.parametrize("name", TWO_LEVELS)
@few
@given(pairs=drawn_pairs())
def test_node_rules_are_two_levels(name: str, pairs: Pairs) -> None:
    """Within every node and then across them, even or not."""
    within, across = TWO_LEVELS[name]
    of_node = [
        pairs.gradients[[i for i, other in enumerate(pairs.nodes) if other == node]]
        for node in sorted(set(pairs.nodes))
    ]
    expected = across(torch.stack([within(g) for g in of_node]))
    torch.testing.assert_close(pairs.combined(name), expected, rtol=1e-12, atol=1e-12)


def test_a_rule_that_uses_weights_is_not_asked_for_nothing() -> None:
    """So a user's rule may divide by the weight or take its logarithm."""
    rule = Rule("inverse", lambda place, weight: Share(1 / weight, 1 / weight), uses_weight=True, formula="")
    assert Share(0.0, 0.0) == share_of(rule, Place(), 0.0)


def test_only_rules_of_nodes_ask_the_launcher_for_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "3")
    assert {*TWO_LEVELS} - {"sum"} == {name for name, rule in RULES.items() if rule.node == 3}
    assert ROOT.node == 3


def test_names_and_functions_are_rules() -> None:
    for name, rule in RULES.items():
        assert rule is resolve_rule(name) is resolve_rule(rule)
        assert (name, True) == (rule.name, "sum(" in rule.formula)
    assert {"weighted_mean", "normalized_sum"} == {rule.name for rule in RULES.values() if rule.uses_weight}

    class Halves:
        def __call__(self, place: Place, weight: Any) -> Share:
            return Share(0.5, 1.0)

    assert ("root", True, True) == (ROOT.name, ROOT.uses_weight, "root" in ROOT.formula)
    assert resolve_rule(Halves()).name.endswith("Halves")
