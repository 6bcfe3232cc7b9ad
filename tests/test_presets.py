"""Presets are values: what the options of a strategy come to, and which of them contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.options import PRESETS, plan_of
from lightning_gradavg.rules import RULES, Share, rule_of_replica_losses


def plan(**options: Any) -> Any:
    defaults: dict[str, Any] = {
        "reduction": "mean",
        "equivalent_to": None,
        "num_replicas": None,
        "recompute_replicas": False,
        "split_batches": None,
        "max_device_batch_size": None,
        "exact_evaluation": None,
        "broadcast_buffers": None,
        "forward_sync_buffers": None,
    }
    return plan_of(**{**defaults, **options})


def own_rule(place: Any, weight: Any) -> Share:
    return Share(1.0, weight)


def test_without_a_preset_nothing_is_switched_on():
    """The defaults are those of stock DDP."""
    nothing = plan()
    assert (nothing.rule, nothing.preset, nothing.split_batches, nothing.exact_evaluation) == (
        RULES["mean"],
        None,
        False,
        False,
    )
    assert not nothing.replicated


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_splits_batches_and_evaluates_exactly(name):
    """Both presets take the loader's batch for the global batch, whose mean is that over its samples."""
    chosen = plan(equivalent_to=name)
    assert chosen.split_batches
    assert chosen.exact_evaluation
    assert chosen.replicated
    assert chosen.rule.uses_weight
    assert chosen == plan(equivalent_to=name, split_batches=True, exact_evaluation=True)


def test_only_one_device_has_one_set_of_statistics():
    """Batch norm is synchronized under single_device alone."""
    assert PRESETS["single_device"].synchronizes_statistics
    assert not PRESETS["data_parallel"].synchronizes_statistics


def test_the_legacy_mean_counts_replicas():
    """`mean_of_replica_losses` is a rule of data_parallel in which every replica has the same say."""
    legacy = plan(equivalent_to="data_parallel", reduction="mean_of_replica_losses")
    assert legacy.rule is rule_of_replica_losses()
    assert legacy.counts_replicas
    assert not plan(equivalent_to="data_parallel").counts_replicas


CONTRADICTIONS = {
    "an unknown run": ({"equivalent_to": "dp"}, ["'dp'", "'data_parallel'", "'single_device'"]),
    "batches of each rank": (
        {"equivalent_to": "data_parallel", "split_batches": False},
        ["split_batches=False", "equivalent_to='data_parallel'"],
    ),
    "padded evaluation": (
        {"equivalent_to": "single_device", "exact_evaluation": False},
        ["exact_evaluation=False", "equivalent_to='single_device'"],
    ),
    "buffers of each rank": (
        {"equivalent_to": "data_parallel", "broadcast_buffers": False},
        ["broadcast_buffers=False", "equivalent_to='data_parallel'"],
    ),
    "buffers of each rank, by their newer name": (
        {"equivalent_to": "single_device", "forward_sync_buffers": False},
        ["forward_sync_buffers=False", "equivalent_to='single_device'"],
    ),
    "votes of nodes": (
        {"equivalent_to": "single_device", "reduction": "mean_of_node_sums"},
        ["'mean_of_node_sums'", "equivalent_to='single_device'", "'weighted_mean'"],
    ),
    "a rule of one's own": (
        {"equivalent_to": "data_parallel", "reduction": own_rule},
        ["own_rule", "equivalent_to='data_parallel'"],
    ),
    "no rule at all": ({"equivalent_to": "data_parallel", "reduction": "median"}, ["'median' is not a rule"]),
    "the legacy mean on one device": (
        {"equivalent_to": "single_device", "reduction": "mean_of_replica_losses"},
        ["'mean_of_replica_losses'", "equivalent_to='single_device'"],
    ),
    "the legacy mean alone": ({"reduction": "mean_of_replica_losses"}, ["equivalent_to='data_parallel'"]),
    "replicas on one device": (
        {"equivalent_to": "single_device", "num_replicas": 4},
        ["num_replicas=4", "equivalent_to='single_device'"],
    ),
    "cut replicas": (
        {"equivalent_to": "data_parallel", "max_device_batch_size": 2},
        ["max_device_batch_size=2", "equivalent_to='data_parallel'", "recompute_replicas=True"],
    ),
    "cut replicas without a preset": (
        {"split_batches": True, "num_replicas": 4, "max_device_batch_size": 2},
        ["max_device_batch_size=2", "num_replicas=4"],
    ),
    "replicas of nothing": ({"num_replicas": 4}, ["num_replicas=4", "split_batches=True"]),
    "no replica": ({"equivalent_to": "data_parallel", "num_replicas": 0}, ["num_replicas", "got 0"]),
    "recomputation of one": ({"recompute_replicas": True}, ["recompute_replicas=True", "num_replicas"]),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_names_both_sides(case):
    """What cannot be combined is an error of the constructor that quotes both options."""
    options, words = CONTRADICTIONS[case]
    with pytest.raises(ValueError, match=r".") as error:
        GradAvgStrategy(**options)
    for word in words:
        assert word in str(error.value)
