"""DDP communication hooks that return the mean over the ranks: in 16 bits on the wire, and node by node.

They have torch's own signature. Pass one as `ddp_comm_hook=` of `GradAvgStrategy` or of Lightning's `DDPStrategy`, by
import path in YAML, or to `DistributedDataParallel.register_comm_hook`. See docs/performance.md.

A bucket is cut into one part per rank. Each rank sums its part in float32, divides, rounds once, and sends the result
to all. So all ranks get the same bits, and the error does not grow with their number.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with types.

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from lightning_gradavg.device import current_stream, side_stream, within
from lightning_gradavg.lightning_internals import timeout_of
from lightning_gradavg.ranks import World

__all__ = ["bfloat16", "by_node", "by_node_bfloat16", "by_node_float16", "float16", "float32_sum"]

_ALIGNED = 8  # numbers: NCCL moves packs of 16 bytes where every row begins at a multiple of that
_HALF = (torch.float16, torch.bfloat16)


class _Code(NamedTuple):
    """How numbers are sent.

    With a header, each row travels times a power of two, which is exact and stands there. It brings the row's largest
    finite magnitude into [2**14, 2**15): nothing overflows in float16, and what underflows is below 2**-39 of that.
    """

    dtype: torch.dtype
    header: int = 0

    def encode(self, rows: Tensor) -> Tensor:
        if not self.header:
            return rows.to(self.dtype)
        largest = rows.abs().nan_to_num_(0, 0, 0).amax(1, keepdim=True).float()
        # The biased exponent b of a float32 stands in bits 23 to 30: 2**(b - 127) <= x < 2**(b - 126).
        power = (141 - (largest.view(torch.int32) >> 23)).clamp_(max=126)
        payload = rows.new_empty(len(rows), self.header + rows.shape[1], dtype=self.dtype)
        payload[:, :2].view(torch.float32).copy_(_power_of_two(-power))
        payload[:, self.header :] = rows * _power_of_two(power)
        return payload

    def decode(self, payload: Tensor, rows: Tensor) -> Tensor:
        rows.copy_(payload[:, self.header :])
        return rows.mul_(payload[:, :2].view(torch.float32)) if self.header else rows


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent in float32, from its bits: a computed power may be off by a rounding."""
    bits: Tensor = (exponent + 127) << 23
    return bits.view(torch.float32)


class _Hop(NamedTuple):
    """An exchange among the ranks of a group, each of which holds one part."""

    group: dist.ProcessGroup
    code: _Code


_Steps: TypeAlias = Iterator[None]


def _mean(flat: Tensor, hops: list[_Hop], divisor: int) -> _Steps:
    """Replace numbers by their sum over the ranks, divided; pause while an exchange runs.

    The hops after the first add up the part that this rank holds.
    """
    (group, code), *further = hops
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
    total = addends.sum(0)
    if further:
        yield from _mean(total, further, divisor)
    else:
        total.div_(divisor)
    sent = code.encode(total.to(flat.dtype)[None]).repeat(ranks, 1)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    yield
    work.wait()
    numbers = code.decode(received, rows)
    if padding:
        flat.copy_(numbers.view(-1)[: len(flat)])


class _Nodes(NamedTuple):
    """The groups in which this rank reduces node by node; None where all ranks do at once, as on nodes that differ."""

    number: int
    within: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, world: World, group: dist.ProcessGroup, device: torch.device) -> "_Nodes":
        """Make them. A collective operation."""
        members: dict[int, list[int]] = defaultdict(list)
        for rank, node in enumerate(world.nodes("the hook reduces node by node")):
            members[node].append(rank)
        sizes = {len(ranks) for ranks in members.values()}
        if len(members) == 1 or len(sizes) > 1 or sizes == {1}:
            return cls(len(members))
        if world.size != dist.get_world_size():
            raise ValueError(
                f"the hook makes process groups, which takes all {dist.get_world_size()} ranks of the run, but it"
                f" reduces over {world.size}. Use a group of all ranks, or torch's allreduce_hook."
            )
        timeout, own = timeout_of(group, device), []
        for several in (list(members.values()), [list(ranks) for ranks in zip(*members.values(), strict=True)]):
            groups = [dist.new_group(ranks, timeout=timeout) for ranks in several]
            own += [one for one, ranks in zip(groups, several, strict=True) if world.rank in ranks]
        return cls(len(members), *own)


# They go with their process group, so nothing in them may refer to it for long.
_NODES: WeakKeyDictionary[dist.ProcessGroup, _Nodes] = WeakKeyDictionary()
_UNDER_WAY: WeakKeyDictionary[dist.ProcessGroup, list[_Steps]] = WeakKeyDictionary()
"""What is left to do for buckets, the newest first: its exchange begins before this rank waits for another."""


def _hops(world: World, group: dist.ProcessGroup, flat: Tensor, wire: _Code | None, *, by_node: bool) -> list[_Hop]:
    if by_node and group not in _NODES:
        _NODES[group] = _Nodes.of(world, group, flat.device)
    nodes, own = _NODES[group] if by_node else _Nodes(world.size), _Code(flat.dtype)
    if nodes.within is not None and nodes.across is not None:
        sums = wire or _Code(torch.promote_types(flat.dtype, torch.float32))
        return [_Hop(nodes.within, own), _Hop(nodes.across, sums)]
    # Nothing shorter than 16 bits is exact, so these are sent as they are.
    return [_Hop(group, own if wire is None or nodes.number == 1 or flat.dtype in _HALF else wire)]


def _begun(world: World, bucket: dist.GradBucket, wire: _Code | None, *, by_node: bool) -> Future[Tensor]:
    buffer, group = bucket.buffer(), world.group
    if group is None or (buffer.numel() == 0 and not buffer.is_sparse):
        return _done(buffer)
    flat = buffer if buffer.is_sparse else (torch.view_as_real(buffer) if buffer.is_complex() else buffer).view(-1)
    if wire is not None and flat.dtype not in (torch.float32, *_HALF):
        raise ValueError(
            f"this hook would send gradients of {flat.dtype} in 16 bits, a quarter of their digits or fewer. Train in"
            " float32, or use lightning_gradavg.hooks.by_node or torch's allreduce_hook."
        )
    hops = _hops(world, group, flat, wire, by_node=by_node)
    if flat.is_sparse or (hops == [_Hop(group, _Code(flat.dtype))] and flat.dtype not in _HALF):
        reduced: Future[Any] = dist.all_reduce(flat.div_(world.size), group=group, async_op=True).get_future()
        return reduced.then(lambda done: done.value()[0] if buffer.is_sparse else (done.value(), buffer)[1])
    steps, stream = _mean(flat, hops, world.size), side_stream(flat.device)
    if stream is not None:
        # There all collectives begin in one order, and the host waits for none.
        stream.wait_stream(current_stream(flat.device))
        with within(stream):
            for _ in steps:
                pass
            return _done(buffer)
    future: Future[Tensor] = Future()
    _UNDER_WAY.setdefault(group, []).insert(0, _ending(steps, buffer, future))
    return future


def _ending(steps: _Steps, buffer: Tensor, future: Future[Tensor]) -> _Steps:
    yield from steps
    future.set_result(buffer)


def _reduce(state: Any, bucket: dist.GradBucket, wire: _Code | None = None, *, by_node: bool = False) -> Future[Tensor]:
    world = World.of(state)
    future = _begun(world, bucket, wire, by_node=by_node)
    under_way: list[_Steps] = _UNDER_WAY.get(world.group, []) if world.group else []
    # Ranks must begin the collectives of a group in one order. So all begin here, as buckets come in one order, and
    # none when another is done, which is at another moment on every rank.
    while under_way:
        under_way[:] = [steps for steps in under_way if next(steps, "ended") is None]
        if not bucket.is_last():
            break
    return future


def _done(buffer: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future() if buffer.device.type == "cpu" else Future(devices=[buffer.device])
    future.set_result(buffer)
    return future


_BFLOAT16, _FLOAT16 = _Code(torch.bfloat16), _Code(torch.float16, _ALIGNED)


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
