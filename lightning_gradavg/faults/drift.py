"""Comparisons between ranks: of parameters, which must be equal, and of data, which must not be."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.ranks import World, on_ranks
from lightning_gradavg.tree import data_digest

__all__ = ["SameData", "drifted", "require_replicas"]

_PART, _ODD = 2**16, 6364136223846793005  # elements at once; Knuth's multiplier, which tells parts apart


def drifted(tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, list[int]] | None:
    """Return the first tensor whose bits differ between ranks, and the ranks in the minority; the same on all ranks.

    It sums each tensor's bits as integers, times numbers that tell places apart: a change of one element always changes
    the sum, no order of additions does. A collective operation, of an integer per tensor.
    """
    named = list(tensors)
    sums = [_sum_of_bits(tensor.detach()).to(named[0][1].device) for _, tensor in named]
    of_ranks = World.of(None).gather_integers(torch.stack(sums).tolist() if sums else [])
    for (name, _), held in zip(named, zip(*of_ranks, strict=True), strict=True):
        usual = max(held, key=held.count)
        if found := [rank for rank, one in enumerate(held) if one != usual]:
            return name, found
    return None


def require_replicas(tensors: Iterable[tuple[str, Tensor]], done: str) -> None:
    """Raise a RuntimeError on all ranks if any of their tensors, named as in `"buffer 'mean'"`, has `drifted`."""
    found = drifted(tensors)
    if found is not None:
        name, ranks = found
        raise RuntimeError(
            f"the ranks drifted apart: after {done} {name} is not the same on all of them: another one"
            f" is {on_ranks(ranks)}. Something trains outside of the strategy, such as loss.backward() instead of"
            " self.manual_backward(loss), a window that no backward outside of toggle_model(sync_grad=False) ended, a"
            " step or an assignment on one rank, a module that is no part of the LightningModule, a backward that"
            " leaves parameters without gradient, as in a GAN (pass find_unused_parameters=True), or a buffer that each"
            " rank computes from its own samples: then compute it from the whole batch, in training_step_end."
        )


def _sum_of_bits(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    tensor = tensor.view(getattr(torch, f"int{8 * tensor.element_size()}"))
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

    `left` batches are still to be compared: one more than two, for data that are constant.
    """

    def __init__(self, batches: str, *, compares: bool = True) -> None:
        self.left, self._batches, self._same = 3 * compares, batches, set[tuple[int, ...]]()

    def compare(self, batch: Any | None) -> None:
        """Compare a batch of each rank, None where it has none, which equals no other. A collective operation."""
        if self.left == 0:
            return
        self.left -= 1
        mine = [-dist.get_rank(), 0] if batch is None else _as_integers(data_digest(batch))
        # As numbers: they travel within a step, where a pickle would take ten times as long.
        digests = {tuple(of_rank) for of_rank in World.of(None).gather_integers(mine)}
        self._same |= digests
        if len(self._same) == 1:
            return
        self.left = 0
        if dist.get_rank() == 0 and len(digests) == 1:
            warnings.warn(
                f"all ranks read the same {self._batches}: every sample counts once per rank, and the global batch is"
                " smaller than it seems. Have the dataset yield another part of the data on every rank, by"
                " torch.distributed.get_rank(), or use GradAvgStrategy(split_batches=True), which gives every rank its"
                " part of each batch.",
                stacklevel=3,
            )


def _as_integers(digest: bytes) -> list[int]:
    """Return 16 bytes as two integers of 64 bits."""
    return [int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:])]
