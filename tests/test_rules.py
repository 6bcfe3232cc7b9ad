"""Rules and their names; their numbers by hand are in `cases.py`."""

from __future__ import annotations

import math
import re

import pytest
from toys import approx

from lightning_gradavg._support.place import Place, places_on_nodes
from lightning_gradavg.rules import RULES, Share, explained, in_window, normalizer_of, resolve_rule, share_of


def test_a_weight_of_0_adds_nothing() -> None:
    """Also where w is 1: its loss does not count."""
    assert Share(0.0, 0.0) == share_of(RULES["normalized_sum"], Place(), 0.0)


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if not rule.uses_weight])
@pytest.mark.parametrize("nodes", [[0], [0, 0, 1], [0, 1, 1, 2], [0] * 49])
@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_a_window_of_a_rule_without_weights(name, nodes, length):
    """Every micro-batch counts as a rank of its node, so its own share and Z of the whole window say the same."""
    rule = RULES[name]
    places = places_on_nodes(nodes)
    counted = float(length * len(nodes))
    whole = [share_of(rule, in_window(place, length), 1.0) for place in places]
    z_of_whole = math.fsum(share.normalizer for share in whole) * length
    for place, share in zip(places, whole, strict=True):
        factor = share_of(rule, place, 1.0).multiplier / normalizer_of(rule, places, counted, length)
        assert approx(share.multiplier / z_of_whole) == factor


def test_sums_are_divided_by_exactly_1() -> None:
    """In floats, 49 times 1/49 is not 1."""
    assert normalizer_of(RULES["sum"], places_on_nodes([0] * 49), counted=0.1) == 1


def test_only_rules_of_nodes_ask_the_launcher_for_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "3")
    assert {"mean_of_node_sums", "mean_of_node_means", "sum_of_node_means"} == {
        name for name, rule in RULES.items() if rule.node == 3
    }


def test_names_are_rules() -> None:
    for name, rule in RULES.items():
        assert rule is resolve_rule(name) is resolve_rule(rule)
        assert (name, True) == (rule.name, "sum(" in rule.formula)
    assert {"weighted_mean", "normalized_sum"} == {rule.name for rule in RULES.values() if rule.uses_weight}


def test_a_function_is_no_rule() -> None:
    """The error says how to have its shares."""
    with pytest.raises(TypeError, match="multiply the loss by w and give z as its weight under 'normalized_sum'"):
        resolve_rule(lambda place, weight: (weight, weight))


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_the_start_line_explains_every_letter_of_a_formula(rule):
    letters = re.findall(r"\b[a-zA-Z]\b", rule.formula)
    assert letters
    for letter in letters:
        assert f"{letter} is " in explained(rule)
