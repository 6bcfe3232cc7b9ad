"""Comparisons between ranks: of parameters, which must be equal, and of data, which must not be."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gradavg.ranks import World, on_ranks, ranks_by_value

__all__ = ["SameData", "drifted", "drifted_parameter", "require_replicas"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def drifted_parameter(module: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Return the name of the first parameter whose bits are not the same on all ranks, or None: see `drifted`."""
    found = drifted(module.named_parameters(), group, device)
    return None if found is None else found[0]


def drifted(
    tensors: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None, device: torch.device
) -> tuple[str, list[int]] | None:
    """Return the name of the first tensor whose bits are not the same on all ranks, and the ranks that are not as most.

    Every tensor's bits are read as integers and summed, in any order and without rounding: a change of one element
    always changes the sum, and no kernel's order of additions does. All ranks return the same. A collective operation,
    of two integers per tensor.

    Args:
        tensors: By name, the same names on all ranks.
        group: The process group; None for the default one.
        device: Where the process group takes tensors from.
    """
    names, sums = [], []
    for name, tensor in tensors:
        names.append(name)
        sums.append(_sum_of_bits(tensor.detach()).to(device))
    if not sums:
        return None
    mine = torch.stack(sums)
    # The largest and, as the complement of the largest complement, the smallest sum of all ranks.
    extremes = torch.stack([mine, ~mine])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    differs = (extremes[0] != ~extremes[1]).tolist()
    first = next((index for index, wrong in enumerate(differs) if wrong), None)
    if first is None:
        return None
    held = ranks_by_value(row[0] for row in World.of(group).gather_integers([int(mine[first])]))
    usual = max(held.values(), key=len)
    return names[first], sorted(rank for ranks in held.values() if ranks is not usual for rank in ranks)


def require_replicas(
    tensors: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None, device: torch.device, steps: int
) -> None:
    """Raise on all ranks unless they hold the same parameters, and buffers if they are given. See `drifted`.

    Args:
        tensors: As for `drifted`; a name may say what it is, as in `"buffer 'mean'"`.
        group: The process group; None for the default one.
        device: Where the process group takes tensors from.
        steps: Optimizer steps so far.

    Raises:
        RuntimeError: If they differ.
    """
    found = drifted(tensors, group, device)
    if found is not None:
        name, ranks = found
        raise RuntimeError(
            f"the ranks drifted apart: after {steps} optimizer steps {name} is not the same on all of them: another one"
            f" is {on_ranks(ranks)}. Something trains outside of the strategy, such as loss.backward() instead of"
            " self.manual_backward(loss), a module that is no part of the LightningModule, or an assignment on one"
            " rank."
        )


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        tensor = tensor.view(_BITS[tensor.element_size()])
    return tensor.sum(dtype=torch.int64)


class SameData:
    """Finds out whether all ranks read the same batches.

    One batch may be the same by chance, or because the data are constant; a second, different one is no chance.
    """

    def __init__(self) -> None:
        self._same: set[bytes] = set()
        self._differed = False

    def compare(self, digest: bytes | None, group: dist.ProcessGroup | None, device: torch.device) -> bool:
        """Compare the ranks' next batch and return whether it is now clear that they read the same ones.

        A collective operation, of 16 bytes per rank.

        Args:
            digest: 16 bytes of the batch; None for a rank that has no samples, which is compared with no other.
            group: The process group; None for the default one.
            device: Where the process group takes tensors from.
        """
        mine = torch.tensor([digest is not None, *(digest or bytes(16))], dtype=torch.int64, device=device)
        rows = mine.new_empty(dist.get_world_size(group), len(mine))
        dist.all_gather(list(rows.unbind()), mine, group=group)
        of_ranks = rows.tolist()
        same = all(row[0] and row == of_ranks[0] for row in of_ranks)
        self._differed |= not same
        self._same.update(_digests(of_ranks))
        return not self._differed and len(self._same) > 1


def _digests(rows: Iterable[list[int]]) -> set[bytes]:
    return {bytes(row[1:]) for row in rows}
