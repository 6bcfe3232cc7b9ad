"""What the options of a strategy come to, and which of them contradict each other."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.options import PRESETS, Options
from lightning_gradavg.rules import RULES, Share

DEFAULTS = {name: one.default for name, one in signature(GradAvgStrategy).parameters.items()}


def options_of(**given: Any) -> Options:
    return Options.of({**DEFAULTS, **given})


def own_rule(place: Any, weight: Any) -> Share:
    return Share(1.0, weight)


def test_without_a_preset_nothing_is_switched_on():
    """The defaults are those of stock DDP."""
    nothing = options_of()
    assert (nothing.rule, nothing.preset, nothing.split_batches, nothing.exact_evaluation) == (
        RULES["mean"],
        None,
        False,
        False,
    )
    assert not nothing.replicated
    assert not nothing.one_device


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_splits_batches_and_evaluates_exactly(name):
    """Both presets take the loader's batch for the global batch, whose mean is that over its samples."""
    chosen = options_of(equivalent_to=name)
    assert chosen.split_batches
    assert chosen.exact_evaluation
    assert chosen.replicated
    assert chosen.rule.uses_weight
    assert chosen == options_of(equivalent_to=name, split_batches=True, exact_evaluation=True)


def test_only_one_device_has_one_set_of_statistics():
    """Batch norm is synchronized under single_device alone."""
    assert options_of(equivalent_to="single_device").one_device
    assert not options_of(equivalent_to="data_parallel").one_device


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
    "replicas on one device": (
        {"equivalent_to": "single_device", "num_replicas": 4},
        ["num_replicas=4", "equivalent_to='single_device'"],
    ),
    "cut replicas": (
        {"equivalent_to": "data_parallel", "max_device_batch_size": 2},
        ["max_device_batch_size=2", "equivalent_to='data_parallel'", "torch.utils.checkpoint"],
    ),
    "cut replicas without a preset": (
        {"split_batches": True, "num_replicas": 4, "max_device_batch_size": 2},
        ["max_device_batch_size=2", "num_replicas=4"],
    ),
    "replicas of nothing": ({"num_replicas": 4}, ["num_replicas=4", "split_batches=True"]),
    "no replica": ({"equivalent_to": "data_parallel", "num_replicas": 0}, ["num_replicas", "got 0"]),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_names_both_sides(case):
    """What cannot be combined is an error of the constructor that quotes both options."""
    options, words = CONTRADICTIONS[case]
    with pytest.raises(ValueError, match=r".") as error:
        GradAvgStrategy(**options)
    for word in words:
        assert word in str(error.value)


def test_options_of_ddp_are_handed_on_where_they_are_given():
    """An option of DDP that is left at its default is not passed, since an older torch may not know it."""
    assert {"bucket_cap_mb": 1.0} == GradAvgStrategy(bucket_cap_mb=1.0, init_sync=True)._ddp_kwargs
