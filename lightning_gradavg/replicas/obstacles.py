"""What stands in the way of reproducing another run, found before it starts and named by module path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_gradavg.lightning_internals import BatchNorm, syncs_batch_norm
from lightning_gradavg.options import Options
from lightning_gradavg.part import Run
from lightning_gradavg.replicas.batch_norm import unsynchronizable_batch_norms

__all__ = ["has_step_end", "remarks", "require_none"]

_RANDOM = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.RReLU, nn.MultiheadAttention, nn.RNNBase),
)


def has_step_end(module: LightningModule) -> bool:
    """Return whether the module has the hook of Lightning 1.x that takes the replicas' gathered outputs."""
    return callable(getattr(module, "training_step_end", None))


def require_none(run: Run, options: Options, *, static_graph: bool) -> None:
    """Raise a ValueError that names what makes the run that was asked for impossible, each with what to do."""
    module, ranks, preset, most = run.module, run.world.size, options.preset, options.max_device_batch_size
    manual, replicas = not module.automatic_optimization, options.num_replicas or ranks
    gathers = preset is not None and has_step_end(module)
    cut = f"max_device_batch_size={most}" if most else f"num_replicas={replicas} on {ranks} rank{'s' * (ranks > 1)}"
    norms = {name: each for name, each in module.named_modules() if isinstance(each, BatchNorm)}
    synced = syncs_batch_norm(run.trainer.strategy)
    synchronized = [name for name, each in norms.items() if synced or isinstance(each, nn.SyncBatchNorm)]
    unknown = unsynchronizable_batch_norms(module)
    whole = f"batch norm in {', '.join(norms)}" if norms else "training_step_end" * gathers
    in_pieces = {
        f"manual optimization with {cut}: training_step steps the optimizer, but a rank has to run it for several"
        " pieces of a batch before a step. Use automatic optimization, or as many ranks as pieces": manual,
        f"static_graph=True with {cut}: a step then has several backwards. Leave static_graph out": static_graph,
    }
    of_all_outputs = {
        f"training_step_end with {cut}: each process runs training_step once before the loss of all outputs is"
        " computed. Use as many processes as replicas, or return each replica's loss from training_step": (
            replicas != ranks
        ),
        "training_step_end with manual optimization: training_step runs its backward before the outputs are gathered."
        " Return the outputs from training_step and the loss from training_step_end instead": manual,
        f"reduction={options.rule.name!r} with training_step_end: it computes the loss of the whole batch, of which"
        " there are no parts to combine. Leave reduction out": options.rule.name not in ("mean", "weighted_mean"),
    }
    data_parallel = {
        f"SyncBatchNorm in {', '.join(synchronized)}: with equivalent_to='data_parallel' every replica normalizes over"
        " its own chunk. Use Trainer(sync_batchnorm=False) and plain batch norm": synchronized,
    }
    one_device = {
        f"SyncBatchNorm in {', '.join(synchronized)}: torch has it on accelerators only. Use plain batch norm, which is"
        " synchronized here on any device": synchronized and run.device.type == "cpu",
        f"batch norm with a forward of its own in {', '.join(unknown)}: its statistics cannot be synchronized. Use"
        " torch's batch norm, or equivalent_to='data_parallel'": unknown,
        f"{cut} with {whole}, which needs the whole batch at once. Leave max_device_batch_size out": most and whole,
    }
    found = [
        *(_found(in_pieces) if options.in_pieces(ranks) else ()),
        *(_found(of_all_outputs) if gathers else ()),
        *(_found(one_device if options.one_device else data_parallel) if preset is not None else ()),
    ]
    if found:
        asked = f"equivalent_to={preset!r}" if preset is not None else cut
        raise ValueError(f"{asked} cannot hold:\n  " + "\n  ".join(found))


def remarks(module: LightningModule, options: Options, *, world_size: int) -> list[str]:
    """Return what differs from the run that was asked for without making it another run."""
    random = [name for name, each in module.named_modules() if isinstance(each, _RANDOM) and _draws(each)]
    return _found(
        {
            "training_step_end is not called: Lightning 2 ignores this hook of Lightning 1.x. To have it get the"
            " outputs of all replicas, use GradAvgStrategy(equivalent_to='data_parallel')": (
                options.preset is None and has_step_end(module)
            ),
            f"random numbers drawn in {', '.join(random)} differ between ranks: distributed as on one device, but"
            " they are not the same numbers. For numbers that do not depend on the ranks, use"
            " equivalent_to='data_parallel' with num_replicas": options.one_device and world_size > 1 and random,
        }
    )


def _found(texts: Mapping[str, Any]) -> list[str]:
    """Return the texts whose condition holds."""
    return [text for text, holds in texts.items() if holds]


def _draws(module: nn.Module) -> bool:
    rate = getattr(module, "p", getattr(module, "dropout", 1.0))
    return not inspect.isfunction(rate) and rate != 0
