"""What the options of a strategy come to, and which of them contradict each other."""

from __future__ import annotations

import re
from inspect import signature
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.options import PRESETS, Options
from lightning_gradavg.rules import RULES, Share, rule_of_replica_losses

DEFAULTS = {name: one.default for name, one in signature(GradAvgStrategy).parameters.items()}


def options_of(**given: Any) -> Options:
    return Options.of(**{**DEFAULTS, **given})


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


def test_the_legacy_mean_counts_replicas():
    """`mean_of_replica_losses` is a rule of data_parallel in which every replica has the same say."""
    legacy = options_of(equivalent_to="data_parallel", reduction="mean_of_replica_losses")
    assert legacy.rule is rule_of_replica_losses()
    assert legacy.counts_replicas
    assert not options_of(equivalent_to="data_parallel").counts_replicas


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


SPECS = {"process_group": dist.ProcessGroup, "device_mesh": DeviceMesh}

COUNTING = {
    "equivalent_to='data_parallel'": {"equivalent_to": "data_parallel"},
    "split_batches=True": {"split_batches": True},
    "exact_evaluation=True": {"exact_evaluation": True},
    "lr_scaling='linear'": {"lr_scaling": "linear"},
}


@pytest.mark.parametrize("group", ["process_group", "device_mesh"])
@pytest.mark.parametrize("named", COUNTING)
def test_what_counts_all_ranks_is_refused_beside_a_group(named, group):
    """A group is that of the reduction alone: options that count all ranks are an error that names both."""
    with pytest.raises(ValueError, match=f"{group} has gradients reduced over some of the run's ranks, and ") as error:
        GradAvgStrategy(**COUNTING[named], **{group: mock.Mock(spec=SPECS[group], ndim=1)})
    assert f"{named} counts them all" in str(error.value)
    assert "Leave one of them out" in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"process_group": mock.Mock(spec=dist.ProcessGroup), "device_mesh": mock.Mock(spec=DeviceMesh)},
            "process_group and device_mesh both say over which ranks gradients are reduced. Leave one of them",
        ),
        (
            {"device_mesh": mock.Mock(spec=DeviceMesh, ndim=2, mesh_dim_names=("dp", "tp"))},
            "device_mesh has the dimensions 'dp', 'tp', and gradients are reduced over one. Pass that one, as in dev",
        ),
        (
            {"device_mesh": mock.Mock(spec=DeviceMesh, ndim=2, mesh_dim_names=None)},
            "device_mesh has 2 dimensions, and gradients are reduced over one.",
        ),
    ],
    ids=["both", "two dimensions", "no names"],
)
def test_options_that_do_not_say_over_which_ranks(given, message):
    """A mesh of two dimensions, or a mesh next to a group, is an error that says what to pass."""
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        GradAvgStrategy(**given)


def test_options_of_ddp_are_handed_on_where_they_are_given():
    """An option of DDP that is left at its default is not passed, since an older torch may not know it."""
    assert {"bucket_cap_mb": 1.0} == GradAvgStrategy(bucket_cap_mb=1.0, init_sync=True)._ddp_kwargs


@pytest.mark.parametrize("name", ["delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision"])
@pytest.mark.parametrize(
    ("ours", "needs"),
    [({"reduction": "sum"}, "reduction='sum'"), ({"wire_dtype": "float16"}, "wire_dtype='float16'")],
    ids=["rule", "wire"],
)
def test_gradients_that_ddp_reduces_itself_are_refused(name, ours, needs):
    """Options by which DDP reduces outside of its hook are refused where the hook is needed, and served elsewhere."""
    with pytest.raises(
        ValueError, match=f"{name} has DDP reduce gradients outside the communication hook, which {needs}"
    ):
        GradAvgStrategy(**{name: []}, **ours)
    assert {name: []} == GradAvgStrategy(**{name: []})._ddp_kwargs


def test_option_that_the_installed_torch_does_not_know(monkeypatch):
    """An option that is not one of the installed DDP is an error that says so."""

    def older(self: Any, module: Any) -> None: ...

    monkeypatch.setattr(DistributedDataParallel, "__init__", older)
    with pytest.raises(TypeError, match="static_graph=True is not an option of DistributedDataParallel in torch"):
        GradAvgStrategy(static_graph=True)
