"""What a training step says of its loss: the terms, and the weight of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lightning_gradavg.reduction.window import WHOLE_LOSS, MicroBatch
from lightning_gradavg.rules import Rule
from lightning_gradavg.weights import as_weight

__all__ = ["read_weights"]


def read_weights(
    rule: Rule,
    terms: Mapping[str, Tensor],
    weight: Any,
    batch: Any,
    device: torch.device,
    samples: float | None = None,
) -> MicroBatch:
    """Return the weights of a micro-batch; what is wrong with them is noted in it, for all ranks to raise together.

    Args:
        rule: The rule, which may use no weight.
        terms: The loss terms by name.
        weight: What the user gave: nothing, one number for all terms, or one per term by name.
        batch: The batch, whose samples are counted where no weight was given.
        device: Where the gradients are.
        samples: The number of samples, where it is known; 0 if those of the batch do not count.
    """
    if samples == 0:
        named = rule.uses_weight and isinstance(weight, Mapping)
        return MicroBatch(dict.fromkeys(sorted(terms) if named else [WHOLE_LOSS], 0.0), weight is not None, absent=True)
    if not rule.uses_weight:
        return MicroBatch({WHOLE_LOSS: 1.0})
    explicit = weight is not None
    try:
        if not explicit:
            return MicroBatch({WHOLE_LOSS: float(extract_batch_size(batch) if samples is None else samples)})
        if not isinstance(weight, Mapping):
            return MicroBatch({WHOLE_LOSS: as_weight(weight, device)}, explicit)
        if set(weight) == set(terms):
            return MicroBatch({term: as_weight(weight[term], device) for term in sorted(terms)}, explicit)
        problem = f"its weights are named {sorted(weight)}, but its loss terms {sorted(filter(None, terms))}"
    except TypeError as error:
        problem = str(error)
    except (MisconfigurationException, RecursionError):
        problem = (
            f"the number of samples cannot be read from a batch of type {type(batch).__name__}:"
            ' return {"loss": loss, "weight": n} from training_step'
        )
    return MicroBatch(dict.fromkeys(sorted(terms), 0.0), explicit, problem)
