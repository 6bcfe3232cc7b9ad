"""Process groups: where their ranks run, and a second one of the same ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from lightning_gradavg.place import Place, places_on_nodes

__all__ = ["gather_places", "twin_group"]


def gather_places(node: int, group: dist.ProcessGroup | None) -> tuple[Place, ...]:
    """Return the places of all ranks of a process group, each rank bringing the node that it runs on."""
    nodes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(nodes, node, group=group)
    return places_on_nodes(nodes)


_TWINS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def twin_group(group: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup | None:
    """Return another process group of the same ranks and backend, the same one for as long as `group` is there.

    None for a group that is not of all ranks. Torch names a group that its members make alone by how many groups a rank
    has, which need not be alike on all of them, and then they wait for each other for ever.
    """
    if dist.get_world_size(group) != dist.get_world_size():
        return None
    if group not in _TWINS:
        _TWINS[group] = dist.new_group(timeout=timeout, backend=dist.get_backend(group))
    return _TWINS[group]
