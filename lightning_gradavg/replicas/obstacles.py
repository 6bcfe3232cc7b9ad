"""What stands in the way of reproducing another run, found before it starts and named by module path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_gradavg.lightning_internals import BatchNorm
from lightning_gradavg.options import Options
from lightning_gradavg.replicas.batch_norm import unsynchronizable_batch_norms

__all__ = ["has_step_end", "obstacles", "remarks"]

_RANDOM = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.RReLU,
    nn.MultiheadAttention,
    nn.RNNBase,
)


def has_step_end(module: LightningModule) -> bool:
    """Return whether the module has the hook of Lightning 1.x that takes the replicas' gathered outputs."""
    return callable(getattr(module, "training_step_end", None))


def obstacles(
    module: LightningModule,
    options: Options,
    *,
    world_size: int,
    device: torch.device,
    static_graph: bool,
    sync_batchnorm: bool,
) -> list[str]:
    """Return what makes the run that was asked for impossible to reproduce, each with what to do.

    Args:
        module: The module to train.
        options: What was asked for.
        world_size: Number of ranks.
        device: Where the module is trained.
        static_graph: Whether DDP was told that every iteration is alike.
        sync_batchnorm: Whether Lightning is about to turn batch norm into SyncBatchNorm.
    """
    replicas, preset = options.num_replicas or world_size, options.preset
    several, manual = replicas > world_size, not module.automatic_optimization
    gathers = preset is not None and has_step_end(module)
    one_device, of_replicas = options.one_device, preset is not None and not options.one_device
    on_ranks = f"num_replicas={replicas} on {world_size} rank{'s' * (world_size > 1)}"
    norms = {name: each for name, each in module.named_modules() if isinstance(each, BatchNorm)}
    synchronized = [name for name, each in norms.items() if sync_batchnorm or isinstance(each, nn.SyncBatchNorm)]
    unknown = unsynchronizable_batch_norms(module)
    whole = f"batch norm in {', '.join(norms)}" if norms else "training_step_end" * gathers
    most = options.max_device_batch_size
    return _found(
        {
            f"manual optimization with {on_ranks}: training_step steps the optimizer, but a rank has to run it for"
            " several replicas before a step. Use automatic optimization, or as many ranks as replicas": (
                several and manual
            ),
            "recompute_replicas=True with manual optimization: training_step runs the backward itself, and would have"
            " to be run again within it. Leave recompute_replicas out": options.recompute_replicas and manual,
            "training_step_end with manual optimization: training_step runs its backward before the outputs are"
            " gathered. Return the outputs from training_step and the loss from training_step_end instead": (
                gathers and manual
            ),
            f"static_graph=True with {on_ranks}: a step then has several backwards. Leave static_graph out": (
                several and static_graph
            ),
            f"reduction={options.rule.name!r} with training_step_end: it computes the loss of the whole batch, of which"
            " there are no parts to combine. Leave reduction out": (
                gathers and options.rule.name not in ("mean", "weighted_mean")
            ),
            f"SyncBatchNorm in {', '.join(synchronized)}: with equivalent_to='data_parallel' every replica"
            " normalizes over its own chunk. Use Trainer(sync_batchnorm=False) and plain batch norm": (
                of_replicas and synchronized
            ),
            f"SyncBatchNorm in {', '.join(synchronized)}: torch has it on accelerators only. Use plain batch norm,"
            " which is synchronized here on any device": one_device and synchronized and device.type == "cpu",
            f"batch norm with a forward of its own in {', '.join(unknown)}: its statistics cannot be synchronized."
            " Use torch's batch norm, or equivalent_to='data_parallel'": one_device and unknown,
            f"max_device_batch_size={most} with {whole}, which needs the whole batch at once."
            " Leave max_device_batch_size out": one_device and most is not None and whole,
        }
    )


def remarks(module: LightningModule, options: Options, *, world_size: int) -> list[str]:
    """Return what differs from the run that was asked for without making it another run."""
    random = [name for name, each in module.named_modules() if isinstance(each, _RANDOM) and _draws(each)]
    return _found(
        {
            "training_step_end is not called: Lightning 2 ignores this hook of Lightning 1.x. To have it get the"
            " outputs of all replicas, use GradAvgStrategy(equivalent_to='data_parallel')": (
                options.preset is None and has_step_end(module)
            ),
            f"random numbers drawn in {', '.join(random)} are those of each rank: distributed as on one device, but"
            " not the same numbers. For numbers that do not depend on the ranks, use"
            " equivalent_to='data_parallel' with num_replicas": options.one_device and world_size > 1 and random,
        }
    )


def _found(texts: Mapping[str, Any]) -> list[str]:
    """Return the texts whose condition holds."""
    return [text for text, holds in texts.items() if holds]


def _draws(module: nn.Module) -> bool:
    rate = getattr(module, "p", getattr(module, "dropout", 1.0))
    return not inspect.isfunction(rate) and rate != 0
