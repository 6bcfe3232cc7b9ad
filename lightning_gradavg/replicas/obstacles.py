"""What stands in the way of reproducing another run, found before it starts and named by module path."""

from __future__ import annotations

import inspect

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
    found = []
    replicas = options.num_replicas or world_size
    several = replicas > world_size
    gathers = options.preset is not None and has_step_end(module)
    on_ranks = f"num_replicas={replicas} on {world_size} rank{'s' * (world_size > 1)}"
    if several and not module.automatic_optimization:
        found.append(
            f"manual optimization with {on_ranks}: training_step steps the optimizer, but a rank has to run it for"
            " several replicas before a step. Use automatic optimization, or as many ranks as replicas"
        )
    if options.recompute_replicas and not module.automatic_optimization:
        found.append(
            "recompute_replicas=True with manual optimization: training_step runs the backward itself, and would have"
            " to be run again within it. Leave recompute_replicas out"
        )
    if gathers and not module.automatic_optimization:
        found.append(
            "training_step_end with manual optimization: training_step runs its backward before the outputs are"
            " gathered. Return the outputs from training_step and the loss from training_step_end instead"
        )
    if several and static_graph:
        found.append(f"static_graph=True with {on_ranks}: a step then has several backwards. Leave static_graph out")
    if gathers and options.rule.name not in ("mean", "weighted_mean"):
        found.append(
            f"reduction={options.rule.name!r} with training_step_end: it computes the loss of the whole batch, of which"
            " there are no parts to combine. Leave reduction out"
        )
    if options.preset is not None:
        found += _statistics(module, options, device, gathers=gathers, sync_batchnorm=sync_batchnorm)
    return found


def _statistics(
    module: LightningModule, options: Options, device: torch.device, *, gathers: bool, sync_batchnorm: bool
) -> list[str]:
    assert options.preset is not None
    found = []
    norms = [name for name, each in module.named_modules() if isinstance(each, BatchNorm)]
    synchronized = [
        name for name in norms if sync_batchnorm or isinstance(module.get_submodule(name), nn.SyncBatchNorm)
    ]
    if not options.preset.synchronizes_statistics:
        if synchronized:
            found.append(
                f"SyncBatchNorm in {', '.join(synchronized)}: with equivalent_to={options.preset.name!r} every replica"
                " normalizes over its own chunk. Use Trainer(sync_batchnorm=False) and plain batch norm"
            )
        return found
    if synchronized and device.type == "cpu":
        found.append(
            f"SyncBatchNorm in {', '.join(synchronized)}: torch has it on accelerators only. Use plain batch norm,"
            " which is synchronized here on any device"
        )
    unknown = unsynchronizable_batch_norms(module)
    if unknown:
        found.append(
            f"batch norm with a forward of its own in {', '.join(unknown)}: its statistics cannot be synchronized."
            " Use torch's batch norm, or equivalent_to='data_parallel'"
        )
    if options.max_device_batch_size is not None and (norms or gathers):
        what = f"batch norm in {', '.join(norms)}" if norms else "training_step_end"
        found.append(
            f"max_device_batch_size={options.max_device_batch_size} with {what}, which needs the whole batch at once."
            " Leave max_device_batch_size out"
        )
    return found


def remarks(module: LightningModule, options: Options, *, world_size: int) -> list[str]:
    """Return what differs from the run that was asked for without making it another run."""
    found = []
    if options.preset is None:
        if has_step_end(module):
            found.append(
                "training_step_end is not called: Lightning 2 ignores this hook of Lightning 1.x. To have it get the"
                " outputs of all replicas, use GradAvgStrategy(equivalent_to='data_parallel')"
            )
        return found
    if options.preset.synchronizes_statistics and world_size > 1:
        random = [name for name, each in module.named_modules() if isinstance(each, _RANDOM) and _draws(each)]
        if random:
            found.append(
                f"random numbers drawn in {', '.join(random)} are those of each rank: distributed as on one device, but"
                " not the same numbers. For numbers that do not depend on the ranks, use"
                " equivalent_to='data_parallel' with num_replicas"
            )
    return found


def _draws(module: nn.Module) -> bool:
    rate = getattr(module, "p", getattr(module, "dropout", 1.0))
    return not inspect.isfunction(rate) and rate != 0
