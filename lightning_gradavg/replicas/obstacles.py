"""What stands in the way of reproducing another run, found before it starts and named by module path."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from torch import nn

from lightning_gradavg._lightning.internals import BatchNorm, syncs_batch_norm
from lightning_gradavg._lightning.options import Options
from lightning_gradavg._lightning.part import Run

__all__ = ["has_step_end", "remarks", "require_none"]

_RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.MultiheadAttention, nn.RNNBase)


def has_step_end(module: LightningModule, stage: str = "training") -> bool:
    """Return whether the module has a hook of Lightning 1.x that takes the replicas' gathered outputs."""
    return callable(getattr(module, f"{stage}_step_end", None))


def require_none(run: Run, options: Options, *, static_graph: bool) -> None:
    """Raise a ValueError that names what makes the run that was asked for impossible, each with what to do."""
    module, ranks, preset, most = run.module, run.world.size, options.preset, options.max_device_batch_size
    manual, reproducible, one_device = not module.automatic_optimization, options.reproducible, options.one_device
    replicas, in_pieces = options.num_replicas or ranks, options.in_pieces(ranks)
    gathers, rule = preset is not None and has_step_end(module), options.rule.name
    cut = f"max_device_batch_size={most}" if most else f"num_replicas={replicas} on {ranks} rank{'s' * (ranks > 1)}"
    norms = {name: each for name, each in module.named_modules() if isinstance(each, BatchNorm)}
    synced = syncs_batch_norm(run.trainer.strategy)
    synchronized = [name for name, each in norms.items() if synced or isinstance(each, nn.SyncBatchNorm)]
    whole = f"batch norm in {', '.join(norms)}" if norms else "training_step_end" * gathers
    divisors = [str(count) for count in range(1, replicas + 1) if replicas % count == 0]
    refused: dict[str, tuple[object, ...]] = {
        f"manual optimization with {cut}: training_step steps the optimizer, but a rank has to run it for several"
        " pieces of a batch before a step. Use automatic optimization, or as many ranks as"
        " pieces": (manual, in_pieces or reproducible),
        f"static_graph=True with {cut}: a step then has several backwards. Leave static_graph out": (
            static_graph,
            in_pieces,
        ),
        f"training_step_end with {cut}: each process runs training_step once before the loss of all outputs is"
        " computed. Use as many processes as replicas, or return each replica's loss from"
        " training_step": (gathers, replicas != ranks),
        "training_step_end with manual optimization: training_step runs its backward before the outputs are gathered."
        " Return the outputs from training_step and the loss from training_step_end instead": (gathers, manual),
        f"reduction={rule!r} with training_step_end: it computes the loss of the whole batch, of which there are no"
        " parts to combine. Leave reduction out": (gathers, rule not in ("mean", "weighted_mean")),
        f"SyncBatchNorm in {', '.join(synchronized)}: with equivalent_to='data_parallel' every replica normalizes over"
        " its own chunk. Use Trainer(sync_batchnorm=False) and plain batch"
        " norm": (preset, not one_device, synchronized),
        f"{cut} with {whole}, which needs the whole batch at once. Leave max_device_batch_size out": (
            one_device,
            most,
            whole,
        ),
        f"{cut}, as the number of processes must divide num_replicas. Use {', '.join(divisors)} of them, or another"
        " num_replicas": (reproducible, replicas % ranks),
        "training_step_end: the gradient of one loss of all outputs is summed by autograd in an order that follows the"
        " ranks. Return the loss of each replica from training_step": (reproducible, gathers),
    }
    found = [text for text, conditions in refused.items() if all(conditions)]
    if found:
        presets = "reproducible=True" if reproducible else f"equivalent_to={preset!r}"
        raise ValueError(f"{cut if preset is None else presets} cannot hold:\n  " + "\n  ".join(found))


def remarks(module: LightningModule, options: Options, *, world_size: int) -> list[str]:
    """Return what differs from the run that was asked for without making it another run."""
    drawing = {name: each for name, each in module.named_modules() if isinstance(each, _RANDOM)}
    random = [name for name, each in drawing.items() if getattr(each, "p", getattr(each, "dropout", None)) != 0]
    stages = ["training"] * (options.preset is None) + ["validation", "test"]
    ignored = [f"{stage}_step_end" for stage in stages if has_step_end(module, stage)]
    remarked: dict[str, tuple[object, ...]] = {
        f"{', '.join(ignored)} of Lightning 1.x is not called. Log in the step itself. For training_step_end to get the"
        " outputs of all replicas, use GradAvgStrategy(equivalent_to='data_parallel')": (ignored,),
        f"random numbers drawn in {', '.join(random)} differ between ranks: distributed as on one device, but they are"
        " not the same numbers. For numbers that do not depend on the ranks, use equivalent_to='data_parallel' with"
        " num_replicas": (options.one_device, world_size > 1, random),
    }
    return [text for text, conditions in remarked.items() if all(conditions)]
