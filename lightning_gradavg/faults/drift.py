"""Comparisons between ranks: of parameters, which must be equal, and of data, which must not be."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg._support.collectives import World, on_ranks
from lightning_gradavg._support.tree import data_digest

__all__ = ["Drift", "SameData", "drifted", "require_replicas"]

_PART, _ODD = 2**16, 6364136223846793005  # elements at once; Knuth's multiplier, which tells parts apart


def drifted(tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, list[int]] | None:
    """Return the first tensor whose bits differ between ranks, and the ranks in the minority; the same on all ranks.

    It sums each tensor's bits as integers, times numbers that tell places apart: a change of one element always changes
    the sum, no order of additions does. A collective operation, of an integer per tensor.
    """
    named = list(tensors)
    with torch.profiler.record_function("GradAvg: compare replicas"):
        sums = [_sum_of_bits(tensor.detach()).to(named[0][1].device) for _, tensor in named]
        of_ranks = World.of(None).gather_integers(torch.stack(sums).tolist() if sums else [])
    for (name, _), held in zip(named, zip(*of_ranks, strict=True), strict=True):
        usual = max(held, key=held.count)
        if found := [rank for rank, one in enumerate(held) if one != usual]:
            return name, found
    return None


_LEFT_OUT = "If a backward leaves out parameters, as in a GAN, pass find_unused_parameters=True."


@dataclass(frozen=True)
class Drift:
    """What a run shows about a tensor that drifted apart.

    Attributes:
        is_buffer: Whether it is a buffer.
        is_new: Whether it is a parameter that the module got after it was wrapped.
        is_frozen: Whether it is a parameter that does not require a gradient now.
        is_manual: Whether the module optimizes manually.
        trained: Whether the run trained on a batch already.
        unused: A parameter that trains but has no gradient on this rank, where DDP expects one of each, or None.
        zeroed: Whether DDP expects a gradient of each parameter, but all were zeroed since, so none shows as unused.
    """

    is_buffer: bool = False
    is_new: bool = False
    is_frozen: bool = False
    is_manual: bool = False
    trained: bool = True
    unused: str | None = None
    zeroed: bool = False

    def causes(self) -> str:
        """Return the causes that the run does not rule out, the likeliest first, and what to do about each."""
        return " ".join(self._causes())

    def _causes(self) -> Iterator[str]:
        if self.is_buffer:
            yield "Each rank computed it from its own samples: compute it from the whole batch, in training_step_end."
            yield "Or one rank alone assigned to it."
            return
        if self.is_new:
            yield (
                "DDP does not know it: the module got it after the strategy's setup. Create it in __init__ or in"
                " configure_model."
            )
            return
        if not self.trained:
            yield (
                "The run has not trained yet: a hook set it, to other values on some ranks. Set it to the same on all"
                " ranks, or in __init__, from where DDP copies rank 0's values."
            )
            return
        if self.is_frozen:
            yield (
                "It does not require a gradient, so no backward changes it: a step or an assignment on some ranks only"
                " did, or it drifted before it was frozen."
            )
            return
        if self.is_manual:
            yield "In manual optimization, call self.manual_backward(loss) instead of loss.backward()."
            yield "End every window by a backward outside of toggle_model(sync_grad=False)."
        if self.unused is not None:
            yield f"There is no gradient of {self.unused}. {_LEFT_OUT}"
        elif self.is_manual and self.zeroed:
            # In automatic optimization, DDP raises at the next forward.
            yield _LEFT_OUT
        yield "Step, and assign to parameters, on all ranks or on none."


def require_replicas(tensors: Iterable[tuple[str, Tensor]], done: str, drift_of: Callable[[str], Drift]) -> None:
    """Raise a RuntimeError on all ranks if any of their tensors has `drifted`. A collective operation.

    Args:
        tensors: This rank's tensors, named as in `"buffer 'mean'"`.
        done: What was done before, as in `"2 optimizer steps"`.
        drift_of: Returns what the run shows about the tensor of a name.
    """
    found = drifted(tensors)
    if found is not None:
        name, ranks = found
        raise RuntimeError(
            f"the ranks drifted apart: after {done} {name} is not the same on all of them: another one is"
            f" {on_ranks(ranks)}. {drift_of(name).causes()}"
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
