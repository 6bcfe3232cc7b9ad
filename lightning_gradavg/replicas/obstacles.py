"""What makes it impossible to reproduce another run, found before training starts, and named by module path."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from torch import nn

from lightning_gradavg._lightning.internals import BatchNorm
from lightning_gradavg._lightning.options import Options
from lightning_gradavg._lightning.part import Run

__all__ = ["has_step_end", "remarks", "require_none"]

# The layers of torch that draw random numbers in training. What a user's own forward draws cannot be seen here.
_RANDOM_LAYERS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.MultiheadAttention,
    nn.RNNBase,
)


def has_step_end(module: LightningModule, stage: str = "training") -> bool:
    """Return whether the module has a hook of Lightning 1.x that takes the replicas' gathered outputs."""
    return callable(getattr(module, f"{stage}_step_end", None))


def require_none(run: Run, options: Options, *, static_graph: bool) -> None:
    """Raise a ValueError that lists everything that makes the run impossible, each with what to do.

    It lists all problems, not only the first: each of them may mean another model or script.
    """
    problems = [
        *_problems_of_several_pieces(run, options, static_graph=static_graph),
        *_problems_of_step_end(run, options),
        *_problems_of_batch_norm(run, options),
    ]
    replicas = options.num_replicas or run.world.size
    if options.reproducible and replicas % run.world.size != 0:
        divisors = [str(number) for number in range(1, replicas + 1) if replicas % number == 0]
        problems.append(
            f"{_cut(run, options)}, as the number of processes must divide num_replicas. Use {', '.join(divisors)} of"
            " them, or another num_replicas"
        )
    if not problems:
        return
    if options.reproducible:
        asked = "reproducible=True"
    elif options.preset is not None:
        asked = f"equivalent_to={options.preset!r}"
    else:
        asked = _cut(run, options)
    raise ValueError(f"{asked} cannot hold:\n  " + "\n  ".join(problems))


def _cut(run: Run, options: Options) -> str:
    """Return the option that cuts a rank's samples into pieces, for messages."""
    if options.max_device_batch_size is not None:
        return f"max_device_batch_size={options.max_device_batch_size}"
    ranks = run.world.size
    replicas = options.num_replicas or ranks
    if ranks == 1:
        return f"num_replicas={replicas} on 1 rank"
    return f"num_replicas={replicas} on {ranks} ranks"


def _problems_of_several_pieces(run: Run, options: Options, *, static_graph: bool) -> list[str]:
    """Return what a step of several forwards and backwards cannot serve."""
    problems: list[str] = []
    in_pieces = options.in_pieces(run.world.size)
    # Under `reproducible` the engine sums the gradients of a step after its last backward, on any number of ranks.
    if not run.module.automatic_optimization and (in_pieces or options.reproducible):
        problems.append(
            f"manual optimization with {_cut(run, options)}: training_step steps the optimizer, but a rank has to run"
            " it for several pieces of a batch before a step. Use automatic optimization, or as many ranks as pieces"
        )
    if static_graph and in_pieces:
        problems.append(
            f"static_graph=True with {_cut(run, options)}: a step then has several backwards. Leave static_graph out"
        )
    return problems


def _problems_of_step_end(run: Run, options: Options) -> list[str]:
    """Return that a hook of Lightning 1.x is not called, which took the outputs of all replicas there."""
    if options.preset is None or not has_step_end(run.module):
        return []
    problem = (
        "training_step_end: Lightning 2 does not call it. Gather the outputs of all ranks, with their gradients, by"
        " lightning_gradavg.gather in training_step, and compute the loss there"
    )
    return [problem]


def _problems_of_batch_norm(run: Run, options: Options) -> list[str]:
    """Return what normalizes over other samples than in the run to reproduce.

    | equivalent_to     | batch norm normalizes over      | so it is a problem                                    |
    |-------------------|---------------------------------|-------------------------------------------------------|
    | `"data_parallel"` | a replica                       | if it is synchronized over the ranks                  |
    | `"single_device"` | the whole batch, over all ranks | if a rank computes its samples one part after another |
    """
    if options.preset is None:
        return []
    problems: list[str] = []
    norms = {name: layer for name, layer in run.module.named_modules() if isinstance(layer, BatchNorm)}
    if not options.one_device:
        synchronized = [name for name, layer in norms.items() if isinstance(layer, nn.SyncBatchNorm)]
        if synchronized:
            problems.append(
                f"SyncBatchNorm in {', '.join(synchronized)}: with equivalent_to='data_parallel' every replica"
                " normalizes over its own chunk. Use Trainer(sync_batchnorm=False) and plain batch norm"
            )
        return problems
    # As torch's `_BatchNorm.forward` decides. A layer that begins to train later is an error of its step.
    of_batches = [name for name, layer in norms.items() if layer.training or layer.running_mean is None]
    if options.max_device_batch_size is not None and of_batches:
        problems.append(
            f"{_cut(run, options)} with batch norm in {', '.join(of_batches)}, which needs the whole batch at once."
            " Leave max_device_batch_size out"
        )
    return problems


def remarks(module: LightningModule, options: Options, *, world_size: int) -> list[str]:
    """Return what differs from the run to reproduce, but is no reason to refuse it. `fit` warns about each."""
    found: list[str] = []
    stages = ["validation", "test"]  # Lightning 2 calls none of these hooks
    if options.preset is None:
        stages.insert(0, "training")
    ignored = [f"{stage}_step_end" for stage in stages if has_step_end(module, stage)]
    if ignored:
        found.append(
            f"{', '.join(ignored)} of Lightning 1.x is not called. Log in the step itself. For a loss over the outputs"
            " of all ranks, use lightning_gradavg.gather in training_step"
        )
    drawing = [name for name, layer in module.named_modules() if _draws(layer)]
    if options.one_device and world_size > 1 and drawing:
        found.append(
            f"random numbers drawn in {', '.join(drawing)} differ between ranks: distributed as on one device, but they"
            " are not the same numbers. For numbers that do not depend on the ranks, use equivalent_to='data_parallel'"
            " with num_replicas"
        )
    return found


def _draws(layer: nn.Module) -> bool:
    """Return whether a layer draws random numbers in training."""
    if not isinstance(layer, _RANDOM_LAYERS):
        return False
    # Dropout has `p`; `nn.MultiheadAttention` and recurrent layers have `dropout`.
    probability = getattr(layer, "p", getattr(layer, "dropout", None))
    return probability != 0
