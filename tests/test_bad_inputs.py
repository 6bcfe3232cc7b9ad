"""What a user may get wrong: a message quotes the value, lists what is accepted or what it clashes with, and advises.

Options are refused where they are given, which is on every rank; what ranks find out by themselves they raise together.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from toys import Toy, train

from lightning_gradavg import GradAvgStrategy, average_gradients

RULES = "'mean', 'sum', 'weighted_mean', 'normalized_sum'"
SCALINGS = "'none', 'linear', 'sqrt', 'adam_sde'"
WIRES = "'bfloat16', 'float16'"
GROUP = mock.Mock(spec=dist.ProcessGroup, name="a group")
MESH = mock.Mock(spec=DeviceMesh, ndim=1, name="a mesh")


class Bad(NamedTuple):
    """Options that are refused, and what the message says: the value, what is accepted, and what to do."""

    options: dict[str, Any]
    quoted: str
    accepted: str
    advice: str = ""


SPLIT, PRESET, LINEAR = {"split_batches": True}, {"equivalent_to": "data_parallel"}, {"lr_scaling": "linear"}
NOT_SPLIT = "the chunks of split_batches=True, not set here"

BAD = [
    Bad({"reduction": "avg"}, "reduction='avg'", RULES, "Use one of"),
    Bad({"reduction": 3}, "got 3 of type int", RULES, "or a function (place, weight) -> Share"),
    Bad({"reduction": None}, "got None", RULES),
    Bad({"reduction": ["mean"]}, "got ['mean'] of type list", RULES),
    Bad(
        {**SPLIT, "reduction": "mean_of_node_means"},
        "'mean_of_node_means'",
        "split_batches=True",
        "Use 'weighted_mean'",
    ),
    Bad({**PRESET, "reduction": "sum_of_node_means"}, "'sum_of_node_means'", "'mean', 'weighted_mean'", "leave"),
    Bad({"equivalent_to": "dp"}, "equivalent_to='dp'", "'data_parallel', 'single_device'", "or None"),
    Bad({"equivalent_to": True}, "equivalent_to=True", "'data_parallel', 'single_device'", "or None"),
    Bad({**PRESET, "split_batches": False}, "split_batches=False", "equivalent_to='data_parallel'", "Leave one"),
    Bad({**PRESET, "exact_evaluation": False}, "exact_evaluation=False", "evaluates each sample once", "Leave one"),
    Bad({**PRESET, "broadcast_buffers": False}, "broadcast_buffers=False", "equivalent_to='data_parallel'", "Leave"),
    Bad({"num_replicas": 0}, "got 0", "1 or more, or None"),
    Bad({"num_replicas": 2.5}, "num_replicas=2.5", "give an integer or None"),
    Bad({"num_replicas": "4"}, "num_replicas='4'", "give an integer or None"),
    Bad({"num_replicas": True}, "num_replicas=True", "give an integer or None"),
    Bad({"num_replicas": 4}, "num_replicas=4", NOT_SPLIT, "Set it, or choose the loader's batch_size"),
    Bad({"split_batches": "false"}, "split_batches='false'", "give True, False or None"),
    Bad({"split_batches": 1}, "split_batches=1", "give True, False or None"),
    Bad({"max_device_batch_size": 4}, "max_device_batch_size=4", NOT_SPLIT, "accumulate_grad_batches yourself"),
    Bad({**SPLIT, "max_device_batch_size": 4.5}, "max_device_batch_size=4.5", "give an integer or None"),
    Bad({**SPLIT, "max_device_batch_size": 0}, "got 0", "1 or more, or None for no limit"),
    Bad(
        {**SPLIT, "num_replicas": 2, "max_device_batch_size": 4},
        "batch_size=4",
        "num_replicas=2",
        "torch.utils.checkpoint",
    ),
    Bad({"lr_scaling": "cubic"}, "lr_scaling='cubic'", SCALINGS, "or a function scale -> factor"),
    Bad({"lr_scaling": 2}, "got 2 of type int", SCALINGS),
    Bad({"lr_scaling": None}, "got None", SCALINGS),
    Bad({**LINEAR, "base_batch_size": -1}, "got -1", "an integer >= 1"),
    Bad({**LINEAR, "base_batch_size": "32"}, "base_batch_size='32'", "give an integer or None"),
    Bad({"base_batch_size": 1.5}, "base_batch_size=1.5", "give an integer or None"),
    Bad({"base_world_size": 0}, "got 0", "an integer >= 1"),
    Bad({"base_world_size": None}, "base_world_size=None", "give an integer"),
    Bad({"base_world_size": True}, "base_world_size=True", "give an integer"),
    Bad({**LINEAR, "lr_warmup_steps": -1}, "got -1", "an integer >= 0"),
    Bad({"lr_warmup_steps": 10}, "lr_warmup_steps=10", "lr_scaling='none'", "Choose an lr_scaling"),
    Bad({"lr_warmup_steps": 0.5}, "lr_warmup_steps=0.5", "give an integer"),
    Bad({"allow_recipe_change": "yes"}, "allow_recipe_change='yes'", "give True or False"),
    Bad({"exact_evaluation": "true"}, "exact_evaluation='true'", "give True, False or None"),
    Bad({"nonfinite": "ignore"}, "nonfinite='ignore'", "'propagate', 'raise', 'skip_step'."),
    Bad(
        {"reproducible": True, "num_replicas": 2, "split_batches": True, "nonfinite": "raise"},
        "nonfinite='raise'",
        "reproducible=True",
        "leave one",
    ),
    Bad({"check_replicas_every_n_steps": 0}, "got 0", "an integer >= 1, or None"),
    Bad({"check_replicas_every_n_steps": "all"}, "='all'", "give an integer or None"),
    Bad({"ddp_comm_hook": "fp16"}, "ddp_comm_hook='fp16'", "give a function or None"),
    Bad({"model_averaging_period": 3}, "model_averaging_period=3", "instead of reducing gradients", "Leave it out"),
    Bad({"bucket_cap_mb": -1}, "bucket_cap_mb=-1", "give more than 0, or None"),
    Bad({"bucket_cap_mb": "25"}, "bucket_cap_mb='25'", "give a number or None"),
    Bad({"bucket_cap_mb_list": [1, -2]}, "bucket_cap_mb_list=[1, -2]", "give more than 0, or None"),
    Bad({"find_unused_parameters": "true"}, "find_unused_parameters='true'", "give True or False"),
    Bad({"static_graph": 1}, "static_graph=1", "give True or False"),
    Bad({"dim": "0"}, "dim='0'", "give an integer"),
    Bad({"start_method": "thread"}, "start_method='thread'", "'popen', 'spawn', 'fork', 'forkserver'"),
    Bad({"timeout": 30}, "timeout=30", "give a datetime.timedelta or None"),
    Bad({"process_group": GROUP}, "process_group=", "reduces gradients over some of the run's ranks", "DDPStrategy"),
    Bad({"device_mesh": MESH}, "device_mesh=", "reduces gradients over some of the run's ranks", "DDPStrategy"),
    Bad({"reducton": "sum"}, "reducton='sum'", "is not an option", "Did you mean 'reduction'?"),
    Bad({"find_unused": True}, "find_unused=True", "is not an option", "Did you mean 'find_unused_parameters'?"),
    Bad({"power_sgd_rank": 2}, "power_sgd_rank=2", "It has reduction, equivalent_to, num_replicas"),
]


def named(bad: Bad) -> str:
    values = {name: "..." if isinstance(value, mock.Mock) else repr(value) for name, value in bad.options.items()}
    return ", ".join(f"{name}={value:.30}" for name, value in values.items())


@pytest.mark.parametrize("bad", BAD, ids=named)
def test_a_wrong_option(bad):
    """An option of a wrong name, type or value, or beside another that it contradicts, is refused with what to do."""
    with pytest.raises((TypeError, ValueError)) as refused:
        GradAvgStrategy(**bad.options)
    for part in (bad.quoted, bad.accepted, bad.advice):
        assert part in str(refused.value)


def test_an_option_without_its_name():
    """An option by position is refused with its name."""
    with pytest.raises(TypeError, match=r"takes its options by name, such as reduction='sum'; got \('sum',\)"):
        GradAvgStrategy("sum")


class Gives(Toy):
    """Gives its weight on rank 1, and a good one on the others."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__()
        self.result = result

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.losses(batch).mean(), **({"weight": 1} if dist.get_rank() == 0 else self.result)}


ON_RANKS = [
    ({"weight": -1}, "weight -1.0 is not a finite number >= 0"),
    ({"weight": float("nan")}, "weight nan is not a finite number >= 0"),
    ({"weight": "three"}, "a weight is one number, got 'three' of type str"),
    ({"weight": [1, 2]}, "a weight is one number, got [1, 2] of type list"),
    ({"weights": 1}, "the result of training_step has 'weights': call it \"weight\""),
    ({}, 'a weight was given for 1 of 2 micro-batches: return "weight" from every training_step'),
    ({"weight": {"cls": 1}}, "its weights are named ['cls'], but its loss terms []"),
]


@pytest.mark.parametrize(("result", "message"), ON_RANKS, ids=str)
def test_a_wrong_weight_of_one_rank(world, result, message):
    """What is wrong with the weight of one rank is raised by both, in the step, and names it."""
    raised = world(2).run_expecting_errors(
        train, [[[1.0]], [[2.0]]], {"result": result}, {"reduction": "weighted_mean"}, module=Gives
    )
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all(message in one.message for one in raised)


def average_wrongly(rank: int, options: dict[str, Any]) -> None:
    """Body: reduce with wrong options on one rank."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    average_gradients([parameter], **(options if dist.get_rank() == rank else {}))


@pytest.mark.parametrize(
    ("options", "quoted"),
    [
        ({"reduction": "avg"}, "'avg'"),
        ({"weight": "three", "reduction": "weighted_mean"}, "'three'"),
        ({"weight": -2, "reduction": "weighted_mean"}, "-2"),
    ],
    ids=str,
)
def test_a_wrong_argument_of_average_gradients_on_one_rank(world, options, quoted):
    """Whatever one rank gets wrong, all raise, and quote it."""
    raised = world(2).run_expecting_errors(average_wrongly, 1, options)
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all(quoted in one.message for one in raised)
