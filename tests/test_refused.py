"""REFUSED: what a user may get wrong, the exception, and what its text must contain; the same on all ranks."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import pytorch_lightning
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from toys import Toy, loader

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy, Share
from lightning_gradavg._lightning.options import PRESETS
from lightning_gradavg.rules import RULES

NAMES = "'mean', 'sum', 'weighted_mean', 'normalized_sum'"
SCALINGS = "'none', 'linear', 'sqrt', 'adam_sde'"
RUNS = "'data_parallel', 'single_device', None"
NOT_SPLIT = "the chunks of split_batches=True, not set here"
SPLIT: dict[str, Any] = {"split_batches": True}
PRESET: dict[str, Any] = {"equivalent_to": "data_parallel"}
SINGLE: dict[str, Any] = {"equivalent_to": "single_device"}
BITS: dict[str, Any] = {"reproducible": True, "num_replicas": 2}


def own_rule(place: Any, weight: Any) -> Share:
    return Share(1.0, weight)


# A wrong value is a ValueError, a wrong type or an unknown name a TypeError. The texts quote the value, list what is
# accepted or contradicted, and say what to do.
# fmt: off
REFUSED: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"reduction": "weighted_meen"}, ValueError, ["is not a rule. Did you mean 'weighted_mean'? Use one of", NAMES]),
    ({"reduction": 3}, TypeError, ["got 3 of type int", NAMES, "or a function (place, weight) -> Share"]),
    ({**SPLIT, "reduction": "mean_of_node_means"}, ValueError, ["'mean_of_node_means'", "split_batches=True", "Use"]),
    ({**PRESET, "reduction": "sum_of_node_means"}, ValueError, ["'sum_of_node_means'", "'mean', 'weighted_mean'"]),
    ({"equivalent_to": "single_devise"}, ValueError, ["Did you mean 'single_device'?"]),
    ({"equivalent_to": True}, ValueError, ["equivalent_to=True", RUNS]),
    *(({**PRESET, name: False}, ValueError, [f"{name}=False", "equivalent_to='data_parallel'", "Leave"])
      for name in ("split_batches", "exact_evaluation", "broadcast_buffers", "forward_sync_buffers")),
    ({**SINGLE, "num_replicas": 4}, ValueError, ["num_replicas=4", "equivalent_to='single_device'"]),
    ({**PRESET, "max_device_batch_size": 2}, ValueError, ["max_device_batch_size=2", "torch.utils.checkpoint"]),
    ({**SPLIT, "num_replicas": 2, "max_device_batch_size": 4}, ValueError, ["batch_size=4", "num_replicas=2"]),
    ({"num_replicas": 0}, ValueError, ["got 0", "an integer >= 1, or None"]),
    ({"num_replicas": 2.5}, TypeError, ["num_replicas=2.5", "give int or None"]),
    ({"num_replicas": True}, TypeError, ["num_replicas=True", "give int or None"]),
    ({"num_replicas": 4}, ValueError, ["num_replicas=4", NOT_SPLIT, "Set it, or choose the loader's batch_size"]),
    ({"split_batches": "false"}, TypeError, ["split_batches='false'", "give bool or None"]),
    ({"max_device_batch_size": 4}, ValueError, ["max_device_batch_size=4", NOT_SPLIT, "accumulate_grad_batches"]),
    ({**SPLIT, "max_device_batch_size": 0}, ValueError, ["got 0", "an integer >= 1, or None"]),
    ({"lr_scaling": "lineal"}, ValueError, ["Did you mean 'linear'?", SCALINGS, "or a function scale -> factor"]),
    ({"lr_scaling": 2}, TypeError, ["got 2 of type int", SCALINGS]),
    ({"lr_scaling": "linear", "base_batch_size": -1}, ValueError, ["got -1", "an integer >= 1"]),
    ({"base_world_size": 0}, ValueError, ["got 0", "an integer >= 1"]),
    ({**SPLIT, "base_world_size": 2}, ValueError, ["base_world_size=2 says nothing", "Give base_batch_size"]),
    ({"base_world_size": None}, TypeError, ["base_world_size=None", "give int"]),
    ({"lr_scaling": "linear", "lr_warmup_steps": -1}, ValueError, ["lr_warmup_steps=-1", "must be 0 or more"]),
    ({"lr_warmup_steps": 10}, ValueError, ["lr_warmup_steps=10", "lr_scaling='none'", "Choose an lr_scaling"]),
    ({"nonfinite": "drop_rank"}, ValueError, ["'drop_rank' is not one of 'propagate', 'raise', 'skip_step'"]),
    ({**BITS, "nonfinite": "raise"}, ValueError, ["nonfinite='raise'", "reproducible=True", "Leave one"]),
    ({"reproducible": True, **SINGLE}, ValueError, ["'single_device' contradicts", "equivalent_to='data_parallel'"]),
    ({"reproducible": True}, ValueError, ["reproducible=True needs num_replicas", "got None"]),
    ({**BITS, "static_graph": True}, ValueError, ["static_graph=True contradicts reproducible=True"]),
    ({**BITS, "ddp_comm_hook": own_rule}, ValueError, ["ddp_comm_hook=<function own_rule", "reproducible=True"]),
    ({"check_replicas_every_n_steps": 0}, ValueError, ["got 0", "an integer >= 1, or None"]),
    ({"log_hyperparams": "no"}, TypeError, ["log_hyperparams='no'", "give bool"]),
    ({"model_averaging_period": 3}, ValueError, ["model_averaging_period=3", "instead of reducing gradients", "Leave"]),
    ({"start_method": "thread"}, ValueError, ["start_method='thread'", "'popen', 'spawn', 'fork', 'forkserver'"]),
    ({"timeout": 30}, TypeError, ["timeout=30", "give timedelta or None"]),
    *(({name: "some"}, ValueError, [f"{name}='some' reduces gradients over some of the run's ranks", "DDPStrategy"])
      for name in ("process_group", "device_mesh")),
    ({"reducton": "sum"}, TypeError, ["reducton='sum'", "is not an option", "Did you mean 'reduction'?"]),
    ({"find_unused": True}, TypeError, ["is not an option", "Did you mean 'find_unused_parameters'?"]),
    ({"power_sgd_rank": 2}, TypeError, ["power_sgd_rank=2", "It has reduction, equivalent_to, num_replicas"]),
]
# fmt: on


@pytest.mark.parametrize(
    ("options", "error", "parts"), REFUSED, ids=lambda given: " ".join(given) if isinstance(given, dict) else None
)
def test_options(options, error, parts):
    with pytest.raises(error) as refused:
        GradAvgStrategy(**options)
    assert refused.type is error
    assert [] == [part for part in parts if part not in str(refused.value)], refused.value


def train_on(devices: int, strategy: Any = "gradavg", **environment: str) -> Trainer:
    """Begin a run as a launcher with these variables would have it."""
    with mock.patch.dict(os.environ, environment):
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=devices, logger=False)
        trainer.fit(Toy())
    return trainer


def in_notebook(strategy: Any) -> Trainer:
    with mock.patch.object(sys, "ps1", ">>>", create=True):
        return Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)


SLURM = {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train"}
SLURM |= dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}

UNNAMED: Any = ["sum"]

# fmt: off
CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: GradAvgStrategy(*UNNAMED), TypeError, "takes its options by name, such as reduction='sum'; got ('sum',)"),
    (lambda: GradAvgMonitor(every_n_steps=0), ValueError, "every_n_steps must be an integer >= 1, or None, got 0"),
    (lambda: GradAvgMonitor(every_n_steps=True), TypeError, "an integer >= 1, or None, got True of type bool."),
    (lambda: Trainer(accelerator="cpu", max_epochs=1, logger=False, callbacks=[GradAvgMonitor()])
     .fit(Toy(), loader([[1]])), TypeError, "the Trainer has a SingleDeviceStrategy. Use Trainer(strategy='gradavg')"),
    (lambda: GradAvgStrategy().fingerprint(), RuntimeError, "before the Trainer has begun a run"),
    (lambda: GradAvgStrategy().report(), RuntimeError,
     "no optimizer step was observed. Add GradAvgMonitor() to the Trainer's callbacks, or"),
    (lambda: Fabric(strategy=GradAvgStrategy(), accelerator="cpu", devices=2), ValueError,
     "for Fabric, lightning_gradavg.fabric has another"),
    (lambda: pytorch_lightning.Trainer(strategy=GradAvgStrategy()), ValueError,
     "lightning.pytorch.Trainer, of the package `lightning`"),
    (lambda: in_notebook("gradavg_weighted"), MisconfigurationException,
     "no notebook can. Use GradAvgStrategy(start_method='fork'), or Trainer(strategy='gradavg_notebook')."),
    (lambda: train_on(2, **SLURM), MisconfigurationException,
     "SLURM_NTASKS=1 processes, but Trainer(devices=2, num_nodes=1) trains on 2"),
    (lambda: train_on(4, **TORCHRUN), ValueError, "(4 * 1) does not match the world size (2)"),
]
# fmt: on


@pytest.mark.parametrize(("call", "error", "message"), CALLS, ids=[message for *_, message in CALLS])
def test_calls(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_notebook_forks():
    assert in_notebook("gradavg_notebook").strategy.launcher.is_interactive_compatible


@pytest.mark.parametrize("name", [None, *PRESETS])
def test_what_options_come_to(name):
    """Presets split batches, whose mean is over samples, and evaluate exactly; without one it is stock DDP."""
    preset = name is not None
    found = GradAvgStrategy(equivalent_to=name)._options
    assert (preset, preset, preset) == (found.split_batches, found.exact_evaluation, found.replicated)
    assert (preset, name == "single_device") == (found.rule != RULES["mean"], found.one_device)
    assert {"bucket_cap_mb": 1.0} == GradAvgStrategy(bucket_cap_mb=1.0, init_sync=True)._ddp_kwargs
