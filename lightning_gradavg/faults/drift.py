"""Comparisons between ranks: of parameters, which must be equal, and of data, which must not be."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg._support.collectives import Contribution, World
from lightning_gradavg._support.text import on_ranks
from lightning_gradavg._support.tree import data_digest

__all__ = ["Drift", "Drifted", "SameData", "drifted", "require_replicas"]

_PART = 2**16  # elements at once
_MULTIPLIER = 6364136223846793005  # Knuth's, odd, by which equal parts at different places count differently


class Drifted(NamedTuple):
    """A tensor whose bits differ between ranks."""

    name: str
    ranks: list[int]  # those in the minority


def drifted(tensors: Iterable[tuple[str, Tensor]]) -> Drifted | None:
    """Return the first tensor whose bits differ between ranks; the same on all ranks.

    It sums each tensor's bits as integers, times numbers that tell places apart: a change of one element always changes
    the sum, no order of additions does. A collective operation, of an integer per tensor.

    Raises:
        RuntimeError: On all ranks, if they have other tensors.
    """
    named = list(tensors)
    with torch.profiler.record_function("GradAvg: compare replicas"):
        # First, as gloo aborts a rank that gets more numbers than it expects.
        names = [f"{name} of shape {tuple(tensor.shape)}" for name, tensor in named]
        refusal = "the ranks have different parameters or buffers"
        World.of(None).agree(refusal, lambda: Contribution(names), RuntimeError)
        of_ranks = World.of(None).gather_integers(_sums_of_bits(named))
    for (name, _), sums_of_ranks in zip(named, zip(*of_ranks, strict=True), strict=True):
        # The sum of most ranks; of several that are equally frequent, that of the lowest rank.
        usual = max(sums_of_ranks, key=sums_of_ranks.count)
        minority = [rank for rank, of_rank in enumerate(sums_of_ranks) if of_rank != usual]
        if minority:
            return Drifted(name, minority)
    return None


def _sums_of_bits(named: Sequence[tuple[str, Tensor]]) -> list[int]:
    """Return an integer per tensor. The host waits for an accelerator once."""
    if not named:
        return []
    device = named[0][1].device
    sums = [_sum_of_bits(tensor.detach()).to(device) for _, tensor in named]
    return torch.stack(sums).tolist()


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return an integer that depends on each bit of a tensor, and on the places of its elements."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integers = tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])
    places = torch.arange(1, 2 * _PART, 2, device=tensor.device)  # odd: no bit of an element is shifted out of the sum
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in integers.flatten().split(_PART):
        bits = part.long()
        # Differences of places are even, so a sign that only the highest bit holds would move unseen.
        mixed = bits ^ ((bits >> 32) & 0xFFFFFFFF)
        total = total * _MULTIPLIER + (mixed * places[: len(bits)]).sum()
    return total


_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers whose elements have so many bytes."""

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
        rates: The learning rates of each rank, in rank order, if they differ; else nothing.
    """

    is_buffer: bool = False
    is_new: bool = False
    is_frozen: bool = False
    is_manual: bool = False
    trained: bool = True
    unused: str | None = None
    zeroed: bool = False
    rates: Sequence[Sequence[float]] = ()

    def causes(self) -> str:
        """Return the causes that the run does not rule out, the likeliest first, and what to do about each."""
        return " ".join(self._causes())

    def _causes(self) -> Iterator[str]:
        if self.is_buffer:
            yield (
                "Each rank computed it from its own samples: compute it from the whole batch, by"
                " lightning_gradavg.gather."
            )
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
        if self.rates:
            listed = [", ".join(f"{rate:g}" for rate in rates) for rates in self.rates]
            yield (
                f"The ranks have other learning rates, in rank order {'; '.join(listed)}. Let all ranks set the same;"
                " log what a scheduler such as ReduceLROnPlateau follows with sync_dist=True."
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
        drift_of: Returns what the run shows about the tensor of a name; called on all ranks, as it may ask them.
    """
    found = drifted(tensors)
    if found is not None:
        raise RuntimeError(
            f"the ranks drifted apart: after {done} {found.name} is not the same on all of them: another one is"
            f" {on_ranks(found.ranks)}. {drift_of(found.name).causes()}"
        )


class SameData:
    """Warns if all ranks read the same batches: two different ones that are equal everywhere are no chance.

    It compares three batches: one more than two, for data that are constant.

    Attributes:
        left: How many batches are still to be compared; 0 when it is decided, too.

    Args:
        batches: What the warning calls the batches, such as "training batches".
        compares: Whether to compare any.
    """

    def __init__(self, batches: str, *, compares: bool = True) -> None:
        self.left = 3 if compares else 0
        self._batches = batches
        self._digests_seen = set[tuple[int, ...]]()

    def compare(self, batch: object | None) -> None:
        """Compare a batch of each rank, None where it has none, which equals no other. A collective operation."""
        if self.left == 0:
            return
        self.left -= 1
        local_digest = [-dist.get_rank(), 0]  # of no batch
        if batch is not None:
            local_digest = _as_integers(data_digest(batch))
        # As numbers: they travel within a step, where a pickle would take ten times as long.
        digests = {tuple(of_rank) for of_rank in World.of(None).gather_integers(local_digest)}
        self._digests_seen |= digests
        if len(self._digests_seen) == 1:
            return  # the ranks have the same batch, but so far every batch was that one
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
