"""Comparisons between ranks: of parameters, which must be equal, and of data, which must not be."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.ranks import World, on_ranks, ranks_by_value
from lightning_gradavg.tree import data_digest

__all__ = ["SameData", "drifted", "require_replicas"]

_PART, _ODD = 2**16, 6364136223846793005  # elements at once; Knuth's multiplier, which tells parts apart
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def drifted(tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> tuple[str, list[int]] | None:
    """Return the first tensor whose bits differ between ranks, and the ranks in the minority; the same on all ranks.

    It sums each tensor's bits as integers, times numbers that tell places apart: a change of one element always changes
    the sum, no order of additions does. A collective operation, of two integers per tensor.
    """
    sums = {name: _sum_of_bits(tensor.detach()).to(device) for name, tensor in tensors}
    if not sums:
        return None
    names, mine = list(sums), torch.stack(list(sums.values()))
    # The largest and, as the complement of the largest complement, the smallest sum of all ranks.
    extremes = torch.stack([mine, ~mine])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    differs = (extremes[0] != ~extremes[1]).tolist()
    first = next((index for index, wrong in enumerate(differs) if wrong), None)
    if first is None:
        return None
    held = ranks_by_value(row[0] for row in World.of(None).gather_integers([int(mine[first])]))
    usual = max(held.values(), key=len)
    return names[first], sorted(rank for ranks in held.values() if ranks is not usual for rank in ranks)


def require_replicas(tensors: Iterable[tuple[str, Tensor]], device: torch.device, done: str) -> None:
    """Raise a RuntimeError on all ranks if any of their tensors, named as in `"buffer 'mean'"`, has `drifted`."""
    found = drifted(tensors, device)
    if found is not None:
        name, ranks = found
        raise RuntimeError(
            f"the ranks drifted apart: after {done} {name} is not the same on all of them: another one"
            f" is {on_ranks(ranks)}. Something trains outside of the strategy, such as loss.backward() instead of"
            " self.manual_backward(loss), a window that no backward outside of toggle_model(sync_grad=False) ended, a"
            " step or an assignment on one rank, or a module that is no part of the LightningModule."
        )


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        tensor = tensor.view(_BITS[tensor.element_size()])
    places = torch.arange(1, 2 * _PART, 2, device=tensor.device)  # odd: no bit of an element is shifted out of the sum
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in tensor.flatten().split(_PART):
        bits = part.long()
        # Differences of places are even, so a sign that only the highest bit holds would move unseen.
        mixed = bits ^ ((bits >> 32) & 0xFFFFFFFF)
        total = total * _ODD + (mixed * places[: len(bits)]).sum()
    return total


class SameData:
    """Warns if all ranks read the same batches: two different ones that are equal everywhere are no chance.

    Args:
        batches: What the warning calls them.

    Attributes:
        left: How many batches are still to be compared: one more than two, for data that are constant.
    """

    def __init__(self, batches: str) -> None:
        self.left = 3
        self._batches, self._same, self._differed = batches, set[bytes](), False

    def compare(self, batch: Any | None, device: torch.device) -> None:
        """Compare a batch of each rank, None where it has none, which equals no other. A collective operation."""
        if self.left == 0:
            return
        self.left -= 1
        digest = bytes(16) if batch is None else data_digest(batch)
        mine = torch.tensor([batch is not None, *digest], dtype=torch.int64, device=device)
        rows = mine.new_empty(dist.get_world_size(), len(mine))
        dist.all_gather(list(rows.unbind()), mine)
        of_ranks = rows.tolist()
        self._differed |= not all(row[0] and row == of_ranks[0] for row in of_ranks)
        self._same.update(bytes(row[1:]) for row in of_ranks)
        if self._differed or len(self._same) == 1:
            return
        self.left = 0
        if dist.get_rank() == 0:
            warnings.warn(
                f"all ranks read the same {self._batches}: every sample counts once per rank, and the global batch is"
                " smaller than it seems. Have the dataset yield another part of the data on every rank, by"
                " torch.distributed.get_rank(), or use GradAvgStrategy(split_batches=True), which gives every rank its"
                " part of each batch.",
                stacklevel=3,
            )
