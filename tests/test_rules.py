"""Rules on dense gradients: laws that hold for all of them, numbers computed by hand, and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import (
    CUSTOM,
    EVERY_RULE,
    NODE_LAYOUTS,
    WEIGHTED_RULES,
    Pairs,
    assert_absent_pairs_contribute_nothing,
    assert_linear,
    assert_nothing_is_zero,
    assert_order_does_not_matter,
    assert_same,
    pairs_of,
)

from lightning_gradavg.place import Place
from lightning_gradavg.reduction.reference import combine
from lightning_gradavg.rules import RULES, Rule, Share, resolve_rule

PAIRS = [pairs_of(nodes, seed) for seed, nodes in enumerate(NODE_LAYOUTS)]

every_pairs = pytest.mark.parametrize("pairs", PAIRS, ids=lambda pairs: "nodes" + "".join(map(str, pairs.nodes)))
every_rule = pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.name)


@every_pairs
@every_rule
def test_reduction_is_linear(rule: Rule, pairs: Pairs) -> None:
    """A rule's reduction is linear in the gradients."""
    assert_linear(rule, pairs)


@every_pairs
@every_rule
def test_order_of_ranks_does_not_matter(rule: Rule, pairs: Pairs) -> None:
    """Numbering ranks and nodes otherwise changes nothing."""
    assert_order_does_not_matter(rule, pairs)


@every_pairs
@pytest.mark.parametrize("rule", WEIGHTED_RULES, ids=lambda rule: rule.name)
def test_weight_zero_contributes_nothing(rule: Rule, pairs: Pairs) -> None:
    """Case 5: a pair of weight 0 does not change the result, with a gradient of NaN or infinity neither."""
    assert_absent_pairs_contribute_nothing(rule, pairs)
    assert_nothing_is_zero(rule, pairs)


@pytest.mark.parametrize("rule", WEIGHTED_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("zero", [0, 0.0, False])
def test_zero_of_any_type_is_absent(rule: Rule, zero: Any) -> None:
    """Case 32: a weight of 0 means the same as an int, a float or a bool."""
    gradients = torch.tensor([[math.nan], [6.0]], dtype=torch.float64)
    expected = combine(gradients[1:], rule=rule, nodes=[0], weights=[2.0])
    if rule is not CUSTOM:  # counts the ranks of the node
        assert_same(expected, combine(gradients, rule=rule, nodes=[0, 0], weights=[zero, 2.0]))
    assert combine(gradients, rule=rule, nodes=[0, 0], weights=[zero, 2.0]).isfinite().all()


@every_pairs
def test_equal_weights_make_the_weighted_mean_the_mean(pairs: Pairs) -> None:
    """With equal weights, of any size, the weighted mean is the mean."""
    for weight in (1.0, 0.25, 1e9):
        assert_same(pairs.combined("mean"), pairs.weighing([weight] * len(pairs)).combined("weighted_mean"))


@every_pairs
@pytest.mark.parametrize("scale", [1e-3, 7.0, 2.0**40])
def test_unit_of_the_weights(pairs: Pairs, scale: float) -> None:
    """Scaling all weights leaves the weighted mean as it is and divides the normalized sum."""
    scaled = pairs.weighing([scale * weight for weight in pairs.weights])
    assert_same(pairs.combined("weighted_mean"), scaled.combined("weighted_mean"))
    assert_same(pairs.combined("normalized_sum") / scale, scaled.combined("normalized_sum"))


@every_pairs
def test_sum_is_world_size_times_mean(pairs: Pairs) -> None:
    """The sum is W times the mean, and the sum of all gradients."""
    assert_same(len(pairs) * pairs.combined("mean"), pairs.combined("sum"))
    assert_same(pairs.gradients.sum(0), pairs.combined("sum"))


@every_pairs
def test_normalized_sum_of_sums_is_the_weighted_mean_of_means(pairs: Pairs) -> None:
    """A loss summed over n items under `normalized_sum` is one averaged over them under `weighted_mean`."""
    sums = Pairs(
        pairs.gradients * torch.tensor(pairs.weights, dtype=torch.float64)[:, None], pairs.nodes, pairs.weights
    )
    assert_same(pairs.combined("weighted_mean"), sums.combined("normalized_sum"))


Reduce = Callable[[torch.Tensor], torch.Tensor]
TWO_LEVELS: dict[str, tuple[Reduce, Reduce]] = {
    "mean_of_node_sums": (lambda g: g.sum(0), lambda g: g.mean(0)),
    "mean_of_node_means": (lambda g: g.mean(0), lambda g: g.mean(0)),
    "sum_of_node_means": (lambda g: g.mean(0), lambda g: g.sum(0)),
    "sum": (lambda g: g.sum(0), lambda g: g.sum(0)),
}


@every_pairs
@pytest.mark.parametrize("name", TWO_LEVELS)
def test_node_rules_are_two_levels(name: str, pairs: Pairs) -> None:
    """Case 10: a node rule is what its name says, computed within every node and then across them, uneven or not."""
    within, across = TWO_LEVELS[name]
    nodes = sorted(set(pairs.nodes))
    of_node = [pairs.gradients[[i for i, node in enumerate(pairs.nodes) if node == n]] for n in nodes]
    assert_same(across(torch.stack([within(g) for g in of_node])), pairs.combined(name))


def test_node_means_are_the_mean_on_equal_nodes() -> None:
    """Case 10: on nodes of equal size, the mean of node means is the mean of all; on others it is not."""
    even, uneven = pairs_of([0, 1, 1, 0]), pairs_of([0, 0, 0, 1])
    assert_same(even.combined("mean"), even.combined("mean_of_node_means"))
    assert not torch.allclose(uneven.combined("mean"), uneven.combined("mean_of_node_means"))


SPLIT_AS = {
    "mean": "mean",
    "sum": "sum",
    "weighted_mean": "weighted",
    "normalized_sum": "sum",
    "mean_of_node_sums": "sum",
    "mean_of_node_means": "mean",
    "sum_of_node_means": "mean",
}


@every_pairs
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_micro_batches_are_further_ranks(name: str, parts: int, pairs: Pairs) -> None:
    """Case 11: cutting every pair into micro-batches, as further pairs on its node, changes nothing.

    The micro-batches' gradients have the pair's as their mean, their sum, or their mean by weight, as the rule has it.
    """
    generator = torch.Generator().manual_seed(3)
    shape = (len(pairs), parts, pairs.gradients.shape[1])
    fractions = torch.rand(shape[:2], generator=generator, dtype=torch.float64) + 0.1
    fractions /= fractions.sum(1, keepdim=True)
    cut = torch.randn(shape, generator=generator, dtype=torch.float64)
    if SPLIT_AS[name] == "sum":
        cut += (pairs.gradients - cut.sum(1))[:, None] / parts
    elif SPLIT_AS[name] == "mean":
        cut += (pairs.gradients - cut.mean(1))[:, None]
    else:
        cut += (pairs.gradients - (fractions[..., None] * cut).sum(1))[:, None]
    weights = (torch.tensor(pairs.weights, dtype=torch.float64)[:, None] * fractions).flatten().tolist()
    nodes = tuple(node for node in pairs.nodes for _ in range(parts))
    assert_same(pairs.combined(name), Pairs(cut.flatten(0, 1), nodes, tuple(weights)).combined(name))


D4, D8 = [1.0, 4.0, 9.0, 16.0], [float(x * x) for x in range(1, 9)]
GOLDEN = [
    pytest.param("sum", [1.0 + 4.0, 9.0 + 16.0], [0, 0], [1, 1], 30.0, id="case 1: summed losses"),
    pytest.param("mean", [1.0 + 4.0, 9.0 + 16.0], [0, 0], [1, 1], 15.0, id="case 1: what plain DDP gives"),
    pytest.param("sum", D8, [0] * 8, [1] * 8, 204.0, id="case 1: eight samples"),
    pytest.param("weighted_mean", [14 / 3, 16.0], [0, 0], [3, 1], 7.5, id="case 2: uneven batches"),
    pytest.param("normalized_sum", [14.0, 16.0], [0, 0], [3, 1], 7.5, id="case 2: uneven batches, summed losses"),
    pytest.param("mean", [14 / 3, 16.0], [0, 0], [3, 1], 31 / 3, id="case 2: what plain DDP gives"),
    pytest.param("weighted_mean", [2.0, 8.0, 4.0, 1.0], [0] * 4, [3, 1, 2, 6], 28 / 12, id="case 4: tokens"),
    pytest.param("mean", [2.0, 8.0, 4.0, 1.0], [0] * 4, [3, 1, 2, 6], 3.75, id="case 4: mean of micro means"),
    pytest.param("weighted_mean", [3.0, math.nan], [0, 0], [2, 0.0], 3.0, id="case 5: nothing on rank 1"),
    pytest.param("mean", [3 * 2 / 4, 5 * 2 / 4], [0, 0], [3, 1], 2.0, id="case 7: compensated by hand"),
    pytest.param("weighted_mean", [3 * 2 / 4, 5 * 2 / 4], [0, 0], [3, 1], 1.75, id="case 7: compensated twice"),
    pytest.param("weighted_mean", [1.0, 2.0], [0, 0], [2, 18], 1.9, id="case 8: class weights"),
    pytest.param("mean", [1.0, 2.0], [0, 0], [2, 18], 1.5, id="case 8: what plain DDP gives"),
    pytest.param("mean_of_node_means", [1.0, 3.0, 5.0, 7.0], [0, 0, 1, 1], [1] * 4, 4.0, id="case 10: mean, mean"),
    pytest.param("mean_of_node_sums", [1.0, 3.0, 5.0, 7.0], [0, 0, 1, 1], [1] * 4, 8.0, id="case 10: sum, mean"),
    pytest.param("sum_of_node_means", [1.0, 3.0, 5.0, 7.0], [0, 0, 1, 1], [1] * 4, 8.0, id="case 10: mean, sum"),
    pytest.param("sum", [1.0, 3.0, 5.0, 7.0], [0, 0, 1, 1], [1] * 4, 16.0, id="case 10: sum, sum"),
    pytest.param("mean_of_node_means", [1.0, 3.0, 5.0], [0, 0, 1], [1] * 3, 3.5, id="uneven nodes: mean, mean"),
    pytest.param("mean_of_node_sums", [1.0, 3.0, 5.0], [0, 0, 1], [1] * 3, 4.5, id="uneven nodes: sum, mean"),
    pytest.param("sum_of_node_means", [1.0, 3.0, 5.0], [0, 0, 1], [1] * 3, 7.0, id="uneven nodes: mean, sum"),
    pytest.param("mean", [1.0, 2.0, 3.0, 6.0], [0, 0, 1, 1], [1] * 4, 3.0, id="case 11: mean"),
    pytest.param("sum", [1.0, 2.0, 3.0, 6.0], [0, 0, 1, 1], [1] * 4, 12.0, id="case 11: sum"),
    pytest.param("weighted_mean", D4, [0] * 4, [1] * 4, 7.5, id="case 6: the norm that a diagnosis must see"),
]


@pytest.mark.parametrize(("name", "gradients", "nodes", "weights", "expected"), GOLDEN)
def test_golden(name: str, gradients: list[float], nodes: list[int], weights: list[float], expected: float) -> None:
    """Numbers computed by hand: cases 1, 2, 4, 5, 6, 7, 8, 10 and 11."""
    column = torch.tensor(gradients, dtype=torch.float64)[:, None]
    assert [pytest.approx(expected, rel=1e-12)] == combine(
        column, rule=RULES[name], nodes=nodes, weights=[float(weight) for weight in weights]
    ).tolist()


def test_correcting_twice_is_wrong_by_a_ratio_one_can_name() -> None:
    """Case 7: a loss compensated by W / count and then weighted is 1.75 where 2.0 is right, a ratio of 0.875."""
    compensated = Pairs(torch.tensor([[3.0 * 2 / 4], [5.0 * 2 / 4]], dtype=torch.float64), (0, 0), (3.0, 1.0))
    ratio = compensated.combined("weighted_mean") / compensated.combined("mean")
    assert [0.875] == ratio.tolist()


def test_large_weights_are_not_rounded() -> None:
    """Case 32: weights 2**24 and 1 are summed without float32 rounding."""
    gradients = torch.tensor([[0.0], [2.0**24 + 1]], dtype=torch.float64)
    combined = combine(gradients, rule=RULES["weighted_mean"], nodes=[0, 0], weights=[2.0**24, 1.0])
    assert [pytest.approx(1.0, abs=1e-10)] == combined.tolist()


def test_the_names_are_the_table() -> None:
    """Every rule is found by its name, and by itself; names and formulas are what messages print."""
    for name, rule in RULES.items():
        assert rule is resolve_rule(name)
        assert rule is resolve_rule(rule)
        assert name == rule.name
        assert "sum(" in rule.formula
    assert {"weighted_mean", "normalized_sum"} == {rule.name for rule in RULES.values() if rule.uses_weight}


def test_a_function_is_a_rule_that_uses_weights() -> None:
    """A user's function becomes a rule with its qualified name; a callable object is named by its type."""

    class Halves:
        def __call__(self, place: Place, weight: Any) -> Share:
            return Share(0.5, 1.0)

    assert ("root_weighted", True) == (CUSTOM.name, CUSTOM.uses_weight)
    assert "root_weighted" in CUSTOM.formula
    assert resolve_rule(Halves()).name.endswith("Halves")
    assert [1.5] == combine(
        torch.tensor([[2.0], [4.0]]), rule=resolve_rule(Halves()), nodes=[0, 0], weights=[1.0, 1.0]
    ).tolist()


def test_unknown_name_is_quoted_with_all_that_are_accepted() -> None:
    """A name that is no rule is quoted, and every rule named."""
    with pytest.raises(ValueError, match="reduction='avg' is not a rule") as caught:
        resolve_rule("avg")
    assert all(repr(name) in str(caught.value) for name in RULES)
    assert "(place, weight) -> Share" in str(caught.value)


@pytest.mark.parametrize("wrong", [None, 3, ["mean"]])
def test_wrong_type_is_quoted(wrong: Any) -> None:
    """What is neither a name nor a function is quoted with its type."""
    with pytest.raises(TypeError, match="reduction must be one of") as caught:
        resolve_rule(wrong)
    assert f"got {wrong!r} of type {type(wrong).__name__}" in str(caught.value)
    assert all(repr(name) in str(caught.value) for name in RULES)


BROKEN: dict[str, Any] = {
    "multiplier=-1.0": lambda place, weight: Share(-1.0, 1.0),
    "normalizer=nan": lambda place, weight: Share(1.0, math.nan),
    "multiplier=inf": lambda place, weight: Share(math.inf, 1.0),
    "'NoneType'": lambda place, weight: Share(None, 1.0),  # type: ignore[arg-type]  # what is to be found
    "TypeError": lambda place, weight: 3.0,
    "ZeroDivisionError": lambda place, weight: Share(1 / 0, 1.0),
}


@pytest.mark.parametrize("said", BROKEN)
def test_share_that_is_no_share_is_quoted(said: str) -> None:
    """What a rule returns or raises is quoted with the rule's name and what it was asked."""
    with pytest.raises(ValueError, match=r"the reduction rule '.*<lambda>'") as caught:
        combine(torch.ones(1, 1), rule=resolve_rule(BROKEN[said]), nodes=[0], weights=[3.0])
    assert said in str(caught.value)
    assert "weight" in str(caught.value)
