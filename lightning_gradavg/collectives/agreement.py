"""The ranks that reduce together, and the one small exchange by which all of them see the same error or none."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Header", "World", "make_groups", "on_ranks", "ranks_by_value"]

_RANKS_SHOWN = 8


@dataclass(frozen=True)
class World:
    """The ranks that reduce together.

    Attributes:
        group: Their process group; None for a rank that is alone.
        rank: This rank in the group.
        size: Number of ranks in the group.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> World:
        """Return the world of a process group, of the default one if None, or of one rank without any.

        Raises:
            ValueError: If `group` is no process group, or this process is not a member of it.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if group is None:
                return cls()
            raise ValueError(f"group={group!r}, but torch.distributed is not initialized: initialize it, or pass None")
        if group is None:
            group = dist.group.WORLD
        # What new_group returns to a process that it leaves out is no process group, whatever its annotation says.
        left_out: object = dist.GroupMember.NON_GROUP_MEMBER
        if not isinstance(group, dist.ProcessGroup) and group is not left_out:
            raise ValueError(
                f"group must be a process group, as torch.distributed.new_group returns it, or None; got {group!r}"
            )
        rank = -1 if group is left_out else dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                f"the process of global rank {dist.get_rank()} is not a member of the group: only members may reduce"
                " over it. Pass a group that this process belongs to."
            )
        size = dist.get_world_size(group)
        return cls(group if size > 1 else None, rank, size)

    def gather_integers(self, row: Sequence[int]) -> list[list[int]]:
        """Return every rank's row in rank order. All rows are of one length."""
        if self.group is None:
            return [list(row)]
        mine = torch.tensor(row, dtype=torch.int64, device=self._exchange_device)
        rows = mine.new_empty(self.size, len(row))
        dist.all_gather(list(rows.unbind()), mine, group=self.group)
        gathered: list[list[int]] = rows.tolist()
        return gathered

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value in rank order. Slow: for what makes a message."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    @property
    def device_types(self) -> tuple[str, ...] | None:
        """The types of device that the group's backends serve; None for a rank that is alone."""
        if self.group is None:
            return None
        return tuple(entry.split(":")[0] for entry in dist.get_backend_config(self.group).split(","))

    @property
    def _exchange_device(self) -> torch.device:
        # Chosen by what all ranks share, the group: parameters may differ, which is what the exchange finds out.
        types = self.device_types or ("cpu",)
        return torch.device("cpu" if "cpu" in types else types[0])


def make_groups(
    group: dist.ProcessGroup | None, wanted: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make process groups of some of a group's ranks. A collective operation of all ranks of the run.

    Args:
        group: The process group that this rank is a member of; None for that of all ranks. Every rank passes its own.
        wanted: Sets of ranks of `group`, in increasing order and each once; the same on all its members.

    Returns:
        The process group of each set; no process group for a rank that is not in it.
    """
    members = {
        ranks if group is None else tuple(dist.get_global_rank(group, rank) for rank in ranks): ranks
        for ranks in sorted(wanted)
    }
    everywhere = list(members)
    if group is not None:
        # Torch has all ranks of the run make every group, in one order.
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, everywhere)
        everywhere = sorted({each for of_rank in of_ranks for each in of_rank})
    made = {each: dist.new_group(list(each)) for each in everywhere}
    return {ranks: made[each] for each, ranks in members.items()}


@dataclass(frozen=True)
class Header:
    """What a rank tells of itself in the one exchange that every reduction begins with.

    Attributes:
        failed: Whether the rank met a problem; then nothing else is meant.
        parameters: Digest of the rule and the parameters.
        gradients: Digest of the forms of the gradients.
        node: The node, or None if it is not known.
        weight: The weight, or None if it was not given.
    """

    failed: bool
    parameters: int = 0
    gradients: int = 0
    node: int | None = None
    weight: float | None = None

    def pack(self) -> list[int]:
        """Return the header as integers; the weight keeps all its bits."""
        (bits,) = struct.unpack("<q", struct.pack("<d", self.weight or 0.0))
        node = -1 if self.node is None else self.node
        return [self.failed, self.parameters, self.gradients, node, self.weight is not None, bits]

    @classmethod
    def unpack(cls, row: Sequence[int]) -> Header:
        """Return the header that `pack` made integers of."""
        failed, parameters, gradients, node, weighted, bits = row
        (weight,) = struct.unpack("<d", struct.pack("<q", bits))
        return cls(bool(failed), parameters, gradients, None if node < 0 else node, weight if weighted else None)


def ranks_by_value(values: Iterable[object]) -> dict[object, list[int]]:
    """Return the ranks that hold each value: {a: [0], b: [1, 2]} for the values a, b, b of three ranks."""
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def on_ranks(ranks: Sequence[int]) -> str:
    """Return "on rank 0" or "on ranks 1, 2", and a number instead of a long list."""
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    more = f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else ""
    return f"on rank{'s' * (len(ranks) > 1)} {shown}{more}"
