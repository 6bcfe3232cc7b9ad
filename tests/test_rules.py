"""Rules and their names; their numbers by hand are in `cases.py`."""

from __future__ import annotations

import re

import pytest
from case_parts import root

from lightning_gradavg._support.place import Place
from lightning_gradavg.rules import RULES, Rule, Share, explained, resolve_rule, share_of

ROOT = resolve_rule(root)


def test_a_rule_that_uses_weights_is_not_asked_for_nothing() -> None:
    """So a user's rule may divide by the weight or take its logarithm."""
    rule = Rule("inverse", lambda place, weight: Share(1 / weight, 1 / weight), uses_weight=True, formula="")
    assert Share(0.0, 0.0) == share_of(rule, Place(), 0.0)


def test_only_rules_of_nodes_ask_the_launcher_for_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "3")
    assert {"mean_of_node_sums", "mean_of_node_means", "sum_of_node_means"} == {
        name for name, rule in RULES.items() if rule.node == 3
    }
    assert ROOT.node == 3


def test_names_and_functions_are_rules() -> None:
    for name, rule in RULES.items():
        assert rule is resolve_rule(name) is resolve_rule(rule)
        assert (name, True) == (rule.name, "sum(" in rule.formula)
    assert {"weighted_mean", "normalized_sum"} == {rule.name for rule in RULES.values() if rule.uses_weight}
    assert ("root", True, True) == (ROOT.name, ROOT.uses_weight, "root" in ROOT.formula)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_the_start_line_explains_every_letter_of_a_formula(rule):
    letters = re.findall(r"\b[a-zA-Z]\b", rule.formula)
    assert letters
    for letter in letters:
        assert f"{letter} is " in explained(rule)
