"""The loss of a global batch on one process, in so many words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradavg.batches.chunks import chunk_bounds
from lightning_gradavg.place import places_on_nodes
from lightning_gradavg.reduction.combine import share_of
from lightning_gradavg.rules import Rule
from lightning_gradavg.tree import slice_batch

__all__ = ["gather_outputs", "loss_of_pairs", "loss_of_replicas"]


def loss_of_pairs(
    outputs: Sequence[Any], samples: Sequence[int], rule: Rule | None, end: Callable[[Any], Any] | None = None
) -> Any:
    """Return the loss of several micro-batches on one process, reduced by a rule.

    Args:
        outputs: What `training_step` returned for each.
        samples: The number of samples of each, its weight where it gave none.
        rule: The rule; None for the mean over the samples.
        end: `training_step_end` where it makes the loss of the gathered outputs.
    """
    if end is not None:
        output = end(gather_outputs(outputs))
        return loss_of_pairs([output], [sum(samples)], rule)
    losses: list[Any] = [output.get("loss") if isinstance(output, Mapping) else output for output in outputs]
    if any(loss is None for loss in losses):
        return None
    weights = [output.get("weight") if isinstance(output, Mapping) else None for output in outputs]
    terms = sorted(losses[0]) if isinstance(losses[0], Mapping) else [None]
    total: Any = 0.0
    for term in terms:
        of_term = [loss if term is None else loss[term] for loss in losses]
        counts = [
            float(count if weight is None else weight[term] if isinstance(weight, Mapping) else weight)
            for weight, count in zip(weights, samples, strict=True)
        ]
        total = total + _reduced(of_term, counts, rule)
    return total


def _reduced(losses: Sequence[Tensor], counts: Sequence[float], rule: Rule | None) -> Tensor:
    if rule is None or (not rule.uses_weight and len(losses) == 1):
        # Without weights one process computes the user's loss, a mean or a sum, as it is.
        counts = counts if len(losses) > 1 else [1.0]
        shares = [(count, count) for count in counts]
    else:
        places = places_on_nodes([0] * len(losses))
        found = [share_of(rule, place, count) for place, count in zip(places, counts, strict=True)]
        shares = [(float(share.multiplier), float(share.normalizer)) for share in found]
    normalizer = sum(share[1] for share in shares)
    kept = [share[0] / normalizer * loss for share, loss in zip(shares, losses, strict=True) if share[0] > 0]
    return sum(kept[1:], kept[0]) if kept else 0.0 * torch.nan_to_num(losses[0])


def loss_of_replicas(
    module: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    samples: int,
    replicas: int,
    rule: Rule | None,
    end: Callable[[Any], Any] | None = None,
    *,
    counts_replicas: bool = False,
) -> Any:
    """Return the loss of a batch as `torch.nn.DataParallel` computes it: in chunks, each with buffers of its own.

    The buffers that replica 0 leaves behind are the module's.
    """
    owners = [(owner, name) for owner in module.modules() for name, buffer in owner._buffers.items() if buffer is not None]
    originals = [owner._buffers[name] for owner, name in owners]
    outputs, counts, kept = [], [], None
    try:
        for start, stop in chunk_bounds(samples, replicas):
            if start == stop:
                continue
            for (owner, name), original in zip(owners, originals, strict=True):
                assert original is not None
                owner._buffers[name] = original.clone()
            outputs.append(step(slice_batch(batch, start, stop)))
            counts.append(stop - start)
            kept = kept or [owner._buffers[name] for owner, name in owners]
    finally:
        for (owner, name), original in zip(owners, originals, strict=True):
            owner._buffers[name] = original
    for original, value in zip(originals, kept or [], strict=True):
        assert original is not None
        assert value is not None
        original.data.copy_(value)
    if counts_replicas and end is None:
        losses = [output["loss"] if isinstance(output, Mapping) else output for output in outputs]
        return sum(losses[1:], losses[0]) / len(losses)
    return loss_of_pairs(outputs, counts, rule, end=end)


def gather_outputs(outputs: Sequence[Any]) -> Any:
    """Return the outputs of all replicas as one: tensors joined along dimension 0, numbers as one entry each."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat([output.reshape(1) if output.ndim == 0 else output for output in outputs])
    if isinstance(first, Mapping):
        return {key: gather_outputs([output[key] for output in outputs]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_make"):
        return first._make(gather_outputs(values) for values in zip(*outputs, strict=True))
    if isinstance(first, (list, tuple)):
        return type(first)(gather_outputs(values) for values in zip(*outputs, strict=True))
    if isinstance(first, (int, float)):
        return torch.tensor(list(outputs))
    return list(outputs)
