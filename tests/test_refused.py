"""REFUSED: options that a user may get wrong, the exception, and what its text contains; the same on all ranks.

To add a row, append a `Refusal` to the group of its option. A wrong value is a ValueError, a wrong type or an unknown
name a TypeError. Each of `parts` is something the user needs: the value as it was given, what is accepted or what
contradicts it, and what to do. `test_options` makes a `GradAvgStrategy` with these options in one process: options are
checked before a run begins, from nothing but themselves, so all ranks raise the same. Calls that are refused stand
below, in CALLS.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple
from unittest import mock

import pytest
import pytorch_lightning
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parallel import DistributedDataParallel
from toys import Toy, make_loader

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy, fabric
from lightning_gradavg._lightning.options import PRESETS
from lightning_gradavg.rules import RULES


class Refusal(NamedTuple):
    """A row of REFUSED."""

    # Options of `GradAvgStrategy`.
    options: dict[str, Any]
    error: type[Exception]
    # What the text contains, in any order.
    parts: Sequence[str]


def own_rule(place: Any, weight: Any) -> tuple[float, Any]:
    return 1.0, weight


# Options, and texts, of several rows.
SPLIT: dict[str, Any] = {"split_batches": True}
DATA_PARALLEL: dict[str, Any] = {"equivalent_to": "data_parallel"}
SINGLE_DEVICE: dict[str, Any] = {"equivalent_to": "single_device"}
REPRODUCIBLE: dict[str, Any] = {"reproducible": True, "num_replicas": 2}
RULE_NAMES = "'mean', 'sum', 'weighted_mean', 'normalized_sum'"
SCALING_NAMES = "'none', 'linear', 'sqrt', 'adam_sde'"
PRESET_NAMES = "'data_parallel', 'single_device', None"
NOT_SPLIT = "requires split_batches=True. Set it, or"

# fmt: off
REFUSED: list[Refusal] = [
    # Rules.
    Refusal({"reduction": "weighted_meen"}, ValueError,
            ["is not one of", RULE_NAMES, "Did you mean 'weighted_mean'?"]),
    Refusal({"reduction": 3}, ValueError, ["3 is not one of", RULE_NAMES]),
    Refusal({"reduction": own_rule}, ValueError, ["own_rule", "is not one of", RULE_NAMES]),
    Refusal({**SPLIT, "reduction": "mean_of_node_means"}, ValueError,
            ["'mean_of_node_means'", "split_batches=True", "Use"]),
    Refusal({**DATA_PARALLEL, "reduction": "sum_of_node_means"}, ValueError,
            ["'sum_of_node_means'", "'mean', 'weighted_mean'"]),
    # Presets.
    Refusal({"equivalent_to": "single_devise"}, ValueError, ["Did you mean 'single_device'?"]),
    Refusal({"equivalent_to": True}, ValueError, ["equivalent_to=True", PRESET_NAMES]),
    Refusal({**DATA_PARALLEL, "split_batches": False}, ValueError,
            ["split_batches=False", "equivalent_to='data_parallel'", "Leave"]),
    Refusal({**DATA_PARALLEL, "exact_evaluation": False}, ValueError,
            ["exact_evaluation=False", "equivalent_to='data_parallel'", "Leave"]),
    Refusal({**DATA_PARALLEL, "broadcast_buffers": False}, ValueError,
            ["broadcast_buffers=False", "equivalent_to='data_parallel'", "Leave"]),
    Refusal({**DATA_PARALLEL, "forward_sync_buffers": False}, ValueError,
            ["forward_sync_buffers=False", "equivalent_to='data_parallel'", "Leave"]),
    Refusal({**SINGLE_DEVICE, "num_replicas": 4}, ValueError, ["num_replicas=4", "equivalent_to='single_device'"]),
    Refusal({**DATA_PARALLEL, "max_device_batch_size": 2}, ValueError,
            ["max_device_batch_size=2", "torch.utils.checkpoint"]),
    # How a batch is split.
    Refusal({**SPLIT, "num_replicas": 2, "max_device_batch_size": 4}, ValueError, ["batch_size=4", "num_replicas=2"]),
    Refusal({"num_replicas": 0}, ValueError, ["got 0", "an integer >= 1, or None"]),
    Refusal({"num_replicas": 2.5}, TypeError, ["num_replicas=2.5", "give int or None"]),
    Refusal({"num_replicas": True}, TypeError, ["num_replicas=True", "give int or None"]),
    Refusal({"num_replicas": 4}, ValueError,
            ["num_replicas=4", NOT_SPLIT, "reproducible=True", "equivalent_to='data_parallel'"]),
    Refusal({"split_batches": "false"}, TypeError, ["split_batches='false'", "give bool or None"]),
    Refusal({"max_device_batch_size": 4}, ValueError,
            ["max_device_batch_size=4", NOT_SPLIT, "accumulate_grad_batches"]),
    Refusal({**SPLIT, "max_device_batch_size": 0}, ValueError, ["got 0", "an integer >= 1, or None"]),
    # Learning rates.
    Refusal({"lr_scaling": "lineal"}, ValueError,
            ["Did you mean 'linear'?", SCALING_NAMES, "or a function scale -> factor"]),
    Refusal({"lr_scaling": 2}, TypeError, ["got 2 of type int", SCALING_NAMES]),
    Refusal({"lr_scaling": "linear", "base_batch_size": -1}, ValueError, ["got -1", "an integer >= 1"]),
    Refusal({"base_world_size": 0}, ValueError, ["got 0", "an integer >= 1"]),
    Refusal({**SPLIT, "base_world_size": 2}, ValueError, ["base_world_size=2 says nothing", "Give base_batch_size"]),
    Refusal({"base_world_size": None}, TypeError, ["base_world_size=None", "give int"]),
    Refusal({"lr_scaling": "linear", "lr_warmup_steps": -1}, ValueError, ["lr_warmup_steps=-1", "must be 0 or more"]),
    Refusal({"lr_warmup_steps": 10}, ValueError,
            ["lr_warmup_steps=10", "needs an lr_scaling other than 'none'", "scheduler"]),
    # Faults, and the same bits.
    Refusal({"reproducible": True, **SINGLE_DEVICE}, ValueError,
            ["'single_device' contradicts", "equivalent_to='data_parallel'"]),
    Refusal({"reproducible": True}, ValueError, ["reproducible=True needs num_replicas", "got None"]),
    Refusal({**REPRODUCIBLE, "static_graph": True}, ValueError, ["static_graph=True contradicts reproducible=True"]),
    Refusal({**REPRODUCIBLE, "ddp_comm_hook": own_rule}, ValueError,
            ["ddp_comm_hook=<function own_rule", "reproducible=True"]),
    Refusal({"check_replicas_every_n_steps": 0}, ValueError, ["got 0", "an integer >= 1, or None"]),
    # Options of DDPStrategy.
    Refusal({"log_hyperparams": "no"}, TypeError, ["log_hyperparams='no'", "give bool"]),
    Refusal({"model_averaging_period": 3}, ValueError,
            ["model_averaging_period=3", "instead of reducing gradients", "Leave"]),
    Refusal({"start_method": "thread"}, ValueError,
            ["start_method='thread'", "'popen', 'spawn', 'fork', 'forkserver'"]),
    Refusal({"timeout": 30}, TypeError, ["timeout=30", "give timedelta or None"]),
    Refusal({"process_group": "some"}, ValueError,
            ["process_group='some' reduces gradients over some of the run's ranks", "DDPStrategy"]),
    Refusal({"device_mesh": "some"}, ValueError,
            ["device_mesh='some' reduces gradients over some of the run's ranks", "DDPStrategy"]),
    # Options that there are not.
    Refusal({"reducton": "sum"}, TypeError, ["reducton='sum'", "is not an option", "Did you mean 'reduction'?"]),
    Refusal({"find_unused": True}, TypeError, ["is not an option", "Did you mean 'find_unused_parameters'?"]),
    Refusal({"power_sgd_rank": 2}, TypeError, ["power_sgd_rank=2", "It has reduction, equivalent_to, num_replicas"]),
]
# fmt: on


def id_of(row: Refusal) -> str:
    """Return the options of a row as text, a function by its name."""
    return ", ".join(f"{name}={getattr(value, '__name__', repr(value))}" for name, value in row.options.items())


def make_parameters_of_refusals() -> list[Any]:
    """Return a parameter of pytest for every row of REFUSED."""
    parameters = []
    for row in REFUSED:
        marks = []
        if "forward_sync_buffers" in row.options:
            marks.append(NEEDS_FORWARD_SYNC_BUFFERS)
        parameters.append(pytest.param(row, id=id_of(row), marks=marks))
    return parameters


NEEDS_FORWARD_SYNC_BUFFERS = pytest.mark.skipif(
    "forward_sync_buffers" not in signature(DistributedDataParallel).parameters,
    reason="DDP of an older torch has no option forward_sync_buffers",
)


@pytest.mark.parametrize("row", make_parameters_of_refusals())
def test_options(row):
    with pytest.raises(row.error) as refused:
        GradAvgStrategy(**row.options)
    # Not a class that derives from it.
    assert refused.type is row.error
    missing = [part for part in row.parts if part not in str(refused.value)]
    assert [] == missing, refused.value


def train_on(devices: int, strategy: Any = "gradavg", **environment: str) -> Trainer:
    """Begin a run as a launcher with these variables would have it."""
    with mock.patch.dict(os.environ, environment):
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=devices, logger=False)
        trainer.fit(Toy())
    return trainer


def in_notebook(strategy: Any) -> Trainer:
    with mock.patch.object(sys, "ps1", ">>>", create=True):
        return Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)


SLURM = {
    "SLURM_NTASKS": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_NAME": "train",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}


class RefusedCall(NamedTuple):
    """A row of CALLS."""

    call: Callable[[], Any]
    error: type[Exception]
    # What the text contains.
    message: str


def make_strategy_by_position() -> GradAvgStrategy:
    options: Any = ["sum"]
    return GradAvgStrategy(*options)


def train_with_monitor_and_other_strategy() -> None:
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, callbacks=[GradAvgMonitor()])
    trainer.fit(Toy(), make_loader([[1]]))


# fmt: off
CALLS: list[RefusedCall] = [
    RefusedCall(lambda: fabric.GradAvgStrategy(option=1), TypeError,
                "option=1 is not an option of GradAvgStrategy for Fabric. It has reduction, split_batches, "),
    RefusedCall(make_strategy_by_position, TypeError,
                "takes its options by name, such as reduction='sum'; got ('sum',)"),
    RefusedCall(lambda: GradAvgMonitor(every_n_steps=0), ValueError,
                "every_n_steps must be an integer >= 1, or None, got 0"),
    RefusedCall(lambda: GradAvgMonitor(every_n_steps=True), TypeError,
                "an integer >= 1, or None, got True of type bool."),
    RefusedCall(train_with_monitor_and_other_strategy, TypeError,
                "the Trainer has a SingleDeviceStrategy. Use Trainer(strategy='gradavg')"),
    RefusedCall(lambda: GradAvgStrategy().fingerprint(), RuntimeError, "before the Trainer has begun a run"),
    RefusedCall(lambda: GradAvgStrategy().report(), RuntimeError,
                "no optimizer step was observed. Add GradAvgMonitor() to the Trainer's callbacks, or"),
    RefusedCall(lambda: Fabric(strategy=GradAvgStrategy(), accelerator="cpu", devices=2), ValueError,
                "not for Fabric: lightning_gradavg.fabric has another"),
    RefusedCall(lambda: pytorch_lightning.Trainer(strategy=GradAvgStrategy()), ValueError,
                "GradAvgStrategy() [not for pytorch_lightning.Trainer: import Trainer from lightning.pytorch"),
    RefusedCall(lambda: Trainer(strategy=GradAvgStrategy), ValueError,
                "GradAvgStrategy'>`. It must be either a string or an instance of"),
    RefusedCall(lambda: in_notebook("gradavg_weighted"), MisconfigurationException,
                "no notebook can. Use GradAvgStrategy(start_method='fork'), or Trainer(strategy='gradavg_notebook')."),
    RefusedCall(lambda: train_on(2, **SLURM), MisconfigurationException,
                "SLURM_NTASKS=1 processes, but Trainer(devices=2, num_nodes=1) trains on 2"),
    RefusedCall(lambda: train_on(4, **TORCHRUN), ValueError, "(4 * 1) does not match the world size (2)"),
]
# fmt: on


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row.message)
def test_calls(row):
    with pytest.raises(row.error, match=re.escape(row.message)):
        row.call()


def test_a_notebook_forks():
    assert in_notebook("gradavg_notebook").strategy.launcher.is_interactive_compatible


@pytest.mark.parametrize("name", [None, *PRESETS])
def test_what_options_come_to(name):
    """Presets split batches, whose mean is over samples, and evaluate exactly; without one it is stock DDP."""
    is_preset = name is not None
    options = GradAvgStrategy(equivalent_to=name)._options
    assert is_preset == options.split_batches
    assert is_preset == options.exact_evaluation
    assert is_preset == options.replicated
    assert is_preset == (options.rule != RULES["mean"])
    assert (name == "single_device") == options.one_device
    assert {"bucket_cap_mb": 1.0} == GradAvgStrategy(bucket_cap_mb=1.0, static_graph=False)._ddp_kwargs
