"""Rules on dense gradients. Numbers by hand are in `cases.py`; `test_ranks_fuzz.py` compares all ranks with these."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from cases import root
from torch import Tensor

from lightning_gradavg.place import Place
from lightning_gradavg.reduction.reference import combine
from lightning_gradavg.rules import RULES, Rule, Share, resolve_rule, share_of

ROOT = resolve_rule(root)


Reduce = Callable[[Tensor], Tensor]
SUM, MEAN = (lambda g: g.sum(0)), (lambda g: g.mean(0))
TWO_LEVELS: dict[str, tuple[Reduce, Reduce]] = {
    "mean_of_node_sums": (SUM, MEAN),
    "mean_of_node_means": (MEAN, MEAN),
    "sum_of_node_means": (MEAN, SUM),
    "sum": (SUM, SUM),
}


@pytest.mark.parametrize("nodes", [[0], [3, 0, 0], [2, 0, 2, 1, 0, 2]], ids=str)
@pytest.mark.parametrize("name", TWO_LEVELS)
def test_node_rules_are_two_levels(name: str, nodes: Sequence[int]) -> None:
    """Within every node and then across them, even or not."""
    within, across = TWO_LEVELS[name]
    gradients = torch.randn(len(nodes), 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    of_node = [gradients[[i for i, other in enumerate(nodes) if other == node]] for node in sorted(set(nodes))]
    expected = across(torch.stack([within(g) for g in of_node]))
    found = combine(gradients, rule=RULES[name], nodes=nodes, weights=[1.0] * len(nodes))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


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
    assert ("root", True, True) == (ROOT.name, ROOT.uses_weight, "root" in ROOT.formula)
