"""Means of integers over the ranks.

A mean logged with `sync_dist=True` is a reduced sum over a reduced number of samples. Lightning's strategies round that
number down, on gloo after a sum and on NCCL within the reduction (`SumPostDiv`): ranks with 3 and 2 samples get the sum
over 2 instead of 2.5 (https://github.com/Lightning-AI/pytorch-lightning/issues/21859).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["averages", "averages_integers", "mean_of_integers"]


def averages(reduce_op: object) -> bool:
    """Return whether a strategy is asked for a mean: Lightning takes two names and torch's operation."""
    if isinstance(reduce_op, str):
        return reduce_op.lower() in ("mean", "avg")
    # `ReduceOp.AVG` is of the enum type; an instance of `ReduceOp` compares equal to it.
    if isinstance(reduce_op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return reduce_op == dist.ReduceOp.AVG
    return False


def averages_integers(value: object, reduce_op: object) -> bool:
    """Return whether a strategy is asked for the mean of a tensor of integers or booleans."""
    if not isinstance(value, Tensor):
        return False
    if value.is_floating_point() or value.is_complex():
        return False
    return averages(reduce_op)


def mean_of_integers(tensor: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean of integers by `reduce`, which takes that of float64. A collective operation.

    A mean of whole numbers has the type of the tensor, as in Lightning, and so what is divided by it has Lightning's
    bits. A mean with decimals is of float64. The host reads which it is, once per logged name and epoch.
    """
    # Float64 holds sums of integers exactly up to 2**53.
    mean = reduce(tensor.double())
    whole = mean.to(tensor.dtype)
    if torch.equal(whole.double(), mean):
        return whole
    return mean
