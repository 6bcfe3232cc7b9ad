"""DDP communication hooks that return the mean over the ranks: in 16 bits on the wire, and node by node.

They have torch's own signature. Pass one as `ddp_comm_hook=` of `GradAvgStrategy` or of Lightning's `DDPStrategy`, by
import path in YAML, or to `DistributedDataParallel.register_comm_hook`. See docs/performance.md.

A bucket is cut into one part per rank. Each rank sums its part in float32, divides, rounds once, and sends the result
to all. So all ranks get the same bits, and the error does not grow with their number.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with types.

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from lightning_gradavg.device import beside
from lightning_gradavg.lightning_internals import timeout_of
from lightning_gradavg.ranks import World

__all__ = ["bfloat16", "by_node", "by_node_bfloat16", "by_node_float16", "float16", "float32_sum"]

_ALIGNED = 8  # numbers: NCCL moves packs of 16 bytes where every row begins at a multiple of that
_HALF = (torch.float16, torch.bfloat16)


class _Code(NamedTuple):
    """How rows of numbers are sent."""

    dtype: torch.dtype

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(self.dtype)

    def decode(self, payload: Tensor, rows: Tensor) -> Tensor:
        return rows.copy_(payload)


class _Scaled(_Code):
    """Each row travels times a power of two, which is exact and stands in a header.

    It brings the row's largest finite magnitude into [2**14, 2**15): nothing overflows in float16, and what underflows
    is below 2**-39 of that.
    """

    def encode(self, rows: Tensor) -> Tensor:
        largest = rows.abs().nan_to_num_(0, 0, 0).amax(1, keepdim=True).float()
        # The biased exponent b of a float32 stands in bits 23 to 30: 2**(b - 127) <= x < 2**(b - 126).
        power = (141 - (largest.view(torch.int32) >> 23)).clamp_(max=126)
        payload = rows.new_empty(len(rows), _ALIGNED + rows.shape[1], dtype=self.dtype)
        payload[:, :2].view(torch.float32).copy_(_power_of_two(-power))
        payload[:, _ALIGNED:] = rows * _power_of_two(power)
        return payload

    def decode(self, payload: Tensor, rows: Tensor) -> Tensor:
        return rows.copy_(payload[:, _ALIGNED:]).mul_(payload[:, :2].view(torch.float32))


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent in float32, from its bits: a computed power may be off by a rounding."""
    bits: Tensor = (exponent + 127) << 23
    return bits.view(torch.float32)


_Level: TypeAlias = tuple[dist.ProcessGroup, _Code | None]
"""A group whose ranks take the mean, one part each, and how they send it; None for as it is."""


def _mean(flat: Tensor, levels: list[_Level]) -> Iterator[None]:
    """Replace numbers by their mean over the ranks of the first level; pause while an exchange runs.

    The levels after it take the mean of the part that this rank holds.
    """
    (group, wire), *further = levels
    # Nothing shorter than 16 bits is exact, so these are sent as they are.
    code = _Code(flat.dtype) if wire is None or flat.dtype in _HALF else wire
    ranks, wide = group.size(), torch.promote_types(flat.dtype, torch.float32)
    width = -(-len(flat) // (ranks * _ALIGNED)) * _ALIGNED
    padding = ranks * width - len(flat)
    rows = (nn.functional.pad(flat, (0, padding)) if padding else flat).view(ranks, width)
    sent = code.encode(rows)
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    yield
    work.wait()
    addends = code.decode(received, torch.empty_like(rows, dtype=wide))
    addends[group.rank()] = rows[group.rank()]  # What a rank holds itself is not rounded.
    total = addends.sum(0).div_(ranks)
    if further:
        yield from _mean(total, further)
    sent = code.encode(total.to(flat.dtype)[None]).repeat(ranks, 1)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    yield
    work.wait()
    numbers = code.decode(received, rows)
    if padding:
        flat.copy_(numbers.view(-1)[: len(flat)])


_Way: TypeAlias = tuple[dist.ProcessGroup | None, bool]
"""A group, None for the hook's own, and whether what it exchanges goes from node to node."""

_AT_ONCE: list[_Way] = [(None, True)]


def _ways_by_node(world: World, group: dist.ProcessGroup, device: torch.device) -> list[_Way]:
    """Return how this rank reduces node by node; at once on nodes that differ. A collective operation."""
    members: dict[int, list[int]] = defaultdict(list)
    for rank, node in enumerate(world.nodes("the hook reduces node by node")):
        members[node].append(rank)
    sizes = {len(ranks) for ranks in members.values()}
    if len(members) == 1 or len(sizes) > 1 or sizes == {1}:
        return [(None, len(members) > 1)]
    if world.size != dist.get_world_size():
        raise ValueError(
            f"the hook makes process groups, which takes all {dist.get_world_size()} ranks of the run, but it"
            f" reduces over {world.size}. Use a group of all ranks, or torch's allreduce_hook."
        )
    timeout, own = timeout_of(group, device), []
    for several in (list(members.values()), [list(ranks) for ranks in zip(*members.values(), strict=True)]):
        groups = [dist.new_group(ranks, timeout=timeout) for ranks in several]
        own += [one for one, ranks in zip(groups, several, strict=True) if world.rank in ranks]
    return list(zip(own, (False, True), strict=True))


# They go with their process group, so nothing in them may refer to it for long.
_NODES: WeakKeyDictionary[dist.ProcessGroup, list[_Way]] = WeakKeyDictionary()
_UNDER_WAY: WeakKeyDictionary[dist.ProcessGroup, list[Iterator[None]]] = WeakKeyDictionary()
"""What is left to do for buckets, the newest first: its exchange begins before this rank waits for another."""


def _reduce(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket, wire: _Code | None = None, *, by_node: bool = False
) -> Future[Tensor]:
    with torch.profiler.record_function("GradAvg: reduce bucket"):
        return _begin_to_reduce(state, bucket, wire, by_node=by_node)


def _begin_to_reduce(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket, wire: _Code | None, *, by_node: bool
) -> Future[Tensor]:
    world, buffer = World.of(state), bucket.buffer()
    group, real, on_cpu = world.group, buffer.dtype.to_real(), buffer.device.type == "cpu"
    future: Future[Tensor] = Future() if on_cpu else Future(devices=[buffer.device])
    if group is None:
        future.set_result(buffer)
        return future
    if wire is not None and real not in (torch.float32, *_HALF):
        raise ValueError(
            f"this hook would send gradients of {real} in 16 bits, a quarter of their digits or fewer. Train in"
            " float32, or use lightning_gradavg.hooks.by_node or torch's allreduce_hook."
        )
    if by_node and group not in _NODES:
        _NODES[group] = _ways_by_node(world, group, buffer.device)
    ways = _NODES[group] if by_node else _AT_ONCE
    levels = [(each or group, wire if crosses else None) for each, crosses in ways]
    under_way = _UNDER_WAY.setdefault(group, [])
    if buffer.is_sparse or (levels == [(group, None)] and real not in _HALF):
        future = allreduce_hook(group, bucket)
        if buffer.is_complex():  # then the value are real numbers
            future = future.then(lambda done: (done.value(), buffer)[1])
    else:
        steps = _completed(future, buffer, levels)
        if on_cpu:
            under_way.insert(0, steps)
        else:  # All collectives begin on one stream, in one order, and the host waits for none.
            with beside(buffer.device):
                deque(steps, maxlen=0)
    # Ranks must begin the collectives of a group in one order. So all begin here, as buckets come in one order, and
    # none when another is done, which is at another moment on every rank.
    while under_way:
        under_way[:] = [steps for steps in under_way if next(steps, "ended") is None]
        if not bucket.is_last():
            break
    return future


def _completed(future: Future[Tensor], buffer: Tensor, levels: list[_Level]) -> Iterator[None]:
    yield from _mean(buffer.view(buffer.dtype.to_real()), levels)
    future.set_result(buffer)


_BFLOAT16, _FLOAT16 = _Code(torch.bfloat16), _Scaled(torch.float16)


def bfloat16(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean over `state`, a process group or None for all ranks, sent as bfloat16, summed in float32."""
    return _reduce(state, bucket, _BFLOAT16)


def float16(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean, sent as scaled float16 and summed in float32."""
    return _reduce(state, bucket, _FLOAT16)


def float32_sum(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean. 16-bit gradients are summed in float32 and rounded once; other buckets are all-reduced."""
    return _reduce(state, bucket)


def by_node(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean, summed within each node first, then between nodes."""
    return _reduce(state, bucket, by_node=True)


def by_node_bfloat16(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean, summed within each node first, and sent as bfloat16 between nodes."""
    return _reduce(state, bucket, _BFLOAT16, by_node=True)


def by_node_float16(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean, summed within each node first, and sent as scaled float16 between nodes."""
    return _reduce(state, bucket, _FLOAT16, by_node=True)
