"""DDP communication hooks that return the mean over the ranks: in 16 bits on the wire, and node by node.

They have torch's own signature. Pass one as `ddp_comm_hook=` of `GradAvgStrategy` or of Lightning's `DDPStrategy`, by
import path in YAML, or to `DistributedDataParallel.register_comm_hook`. See docs/performance.md.

A bucket is cut into one part per rank. Each rank sums its part in float32, divides, rounds once, and sends the result
to all. So all ranks get the same bits, and the error does not grow with their number.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with types.

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.device import beside

__all__ = ["bfloat16", "by_node", "by_node_bfloat16", "float32_sum"]

_ALIGNED = 8  # numbers: NCCL moves packs of 16 bytes where every row begins at a multiple of that
_HALF = (torch.float16, torch.bfloat16)


class _Level(NamedTuple):
    """A group whose ranks take the mean, one part each."""

    group: dist.ProcessGroup
    wire: torch.dtype | None  # the type in which numbers are sent; None for their own


def _mean(flat: Tensor, levels: Sequence[_Level], factor: Callable[[], float] | None = None) -> Iterator[None]:
    """Replace numbers by their mean over the ranks of the first level; pause while an exchange runs.

    With a `factor`, of one level, replace them by their sum times the factor.

    The levels after it take the mean of the part that this rank holds: after the first all-to-all, a rank has the mean
    of its part over its node, and the second level averages that over nodes, before it goes to all.
    """
    group, wire = levels[0]
    ranks = group.size()
    wide = torch.promote_types(flat.dtype, torch.float32)
    if wire is None or flat.dtype in _HALF:
        wire = flat.dtype  # nothing shorter than 16 bits is exact, so these are sent as they are
    width = -(-len(flat) // (ranks * _ALIGNED)) * _ALIGNED  # of a part, rounded up
    padding = ranks * width - len(flat)
    padded = flat
    if padding:
        padded = nn.functional.pad(flat, (0, padding))
    rows = padded.view(ranks, width)

    # Every rank gets the row that it sums.
    sent = rows.to(wire)
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    yield
    work.wait()
    addends = received.to(wide)
    addends[group.rank()] = rows[group.rank()]  # what a rank holds itself is not rounded
    mean = addends.sum(0)
    if factor is None:
        mean.div_(ranks)
    else:
        scale_bucket(mean, factor())
    if len(levels) > 1:
        yield from _mean(mean, levels[1:])

    # Every rank sends its mean to all.
    sent = mean.to(wire).repeat(ranks, 1)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    yield
    work.wait()
    rows.copy_(received)
    if padding:
        flat.copy_(padded[: len(flat)])


class _Stage(NamedTuple):
    """Where numbers are exchanged, before a bucket tells its group."""

    group: dist.ProcessGroup | None  # None for the hook's own
    between_nodes: bool


_AT_ONCE = [_Stage(None, between_nodes=True)]


def _stages_by_node(world: World) -> list[_Stage]:
    """Return how this rank reduces node by node. A collective operation.

    | ranks | stages |
    |---|---|
    | on one node | all at once, within the node |
    | one per node, or nodes of different sizes | all at once, between nodes |
    | as many on each of several nodes | within the node, then those of the same part between nodes |
    """
    members: dict[int, list[int]] = defaultdict(list)
    for rank, node in enumerate(world.nodes("the hook reduces node by node")):
        members[node].append(rank)
    sizes = {len(ranks) for ranks in members.values()}
    if len(members) == 1:
        return [_Stage(None, between_nodes=False)]
    if len(sizes) > 1 or sizes == {1}:
        return [_Stage(None, between_nodes=True)]
    # All ranks of the run call `new_group` for each group, also for those that they are not in.
    if world.size != dist.get_world_size():
        raise ValueError(
            f"the hook makes process groups, which takes all {dist.get_world_size()} ranks of the run, but it"
            f" reduces over {world.size}. Use a group of all ranks, or torch's allreduce_hook."
        )
    within_nodes = list(members.values())
    between_nodes = [list(ranks) for ranks in zip(*within_nodes, strict=True)]
    return [
        _Stage(_new_group_of(world.rank, within_nodes), between_nodes=False),
        _Stage(_new_group_of(world.rank, between_nodes), between_nodes=True),
    ]


def _new_group_of(rank: int, members: Sequence[list[int]]) -> dist.ProcessGroup:
    """Make groups, as all ranks do for `new_group`, and return the one that this rank is in.

    They have torch's default timeout: no public name tells the timeout of the run's group.
    """
    group_of_rank: dist.ProcessGroup | None = None
    for ranks in members:
        group: dist.ProcessGroup = dist.new_group(ranks)
        if rank in ranks:
            group_of_rank = group
    assert group_of_rank is not None
    return group_of_rank


# Both go with their process group, so nothing in them may refer to it for long.
_STAGES: WeakKeyDictionary[dist.ProcessGroup, list[_Stage]] = WeakKeyDictionary()
"""How the ranks of a group reduce node by node."""
_UNDER_WAY: WeakKeyDictionary[dist.ProcessGroup, list[Iterator[None]]] = WeakKeyDictionary()
"""What is left to do for buckets on a CPU, the newest first: its exchange begins before this rank waits for another."""


def _reduce(
    state: dist.ProcessGroup | None,
    bucket: dist.GradBucket,
    wire: torch.dtype | None = None,
    *,
    by_node: bool = False,
) -> Future[Tensor]:
    """Return the mean of a bucket, which goes from node to node in the type `wire`."""
    with torch.profiler.record_function("GradAvg: reduce bucket"):
        return _begin_to_reduce(state, bucket, wire, by_node=by_node)


def _begin_to_reduce(
    state: dist.ProcessGroup | None,
    bucket: dist.GradBucket,
    wire: torch.dtype | None,
    *,
    by_node: bool,
    factor: Callable[[], float] | None = None,
) -> Future[Tensor]:
    """Begin the exchanges of a bucket; the future has its mean, or with a `factor` its sum times the factor.

    | bucket | exchange |
    |---|---|
    | of one rank | none |
    | sparse, or of numbers that are summed in their own type at once | torch's all-reduce |
    | any other on a CPU | the steps of `_mean`, of which each bucket that comes runs one for each bucket under way |
    | any other on an accelerator | the steps of `_mean`, launched at once on a second stream |
    """
    world = World.of(state)
    group = world.group
    buffer = bucket.buffer()
    dtype = buffer.dtype.to_real()  # of the numbers: a complex one is two of them
    on_cpu = buffer.device.type == "cpu"
    future: Future[Tensor] = Future() if on_cpu else Future(devices=[buffer.device])
    if group is None:
        future.set_result(buffer)
        return future
    if wire is not None and dtype not in (torch.float32, *_HALF):
        raise ValueError(
            f"this hook would send gradients of {dtype} in 16 bits, a quarter of their digits or fewer. Train in"
            " float32, or use lightning_gradavg.hooks.by_node or torch's allreduce_hook."
        )
    levels = _levels(world, group, wire, by_node=by_node)
    under_way = _UNDER_WAY.setdefault(group, [])
    is_plain = levels == [_Level(group, None)] and dtype not in _HALF
    if buffer.is_sparse or is_plain:
        future = allreduce_hook(group, bucket)
        if buffer.is_complex():
            # torch reduces complex numbers as pairs of real ones, and its future has those.
            future = future.then(partial(_complex_buffer, buffer))
    elif on_cpu:
        under_way.insert(0, _completed(future, buffer, levels, factor))
    else:
        # All collectives begin on one stream, in one order, and the host waits for none.
        with beside(buffer.device):
            for _ in _completed(future, buffer, levels, factor):
                pass
    # Ranks must begin the collectives of a group in one order. So all begin here, as buckets come in one order, and
    # none when another is done, which is at another moment on every rank. Behind the last bucket, none comes.
    _run_one_step_of_each(under_way)
    while under_way and bucket.is_last():
        _run_one_step_of_each(under_way)
    return future


def _levels(world: World, group: dist.ProcessGroup, wire: torch.dtype | None, *, by_node: bool) -> list[_Level]:
    """Return the groups over which a bucket is averaged one after another, the first one within nodes."""
    stages = _AT_ONCE
    if by_node:
        if group not in _STAGES:
            _STAGES[group] = _stages_by_node(world)
        stages = _STAGES[group]
    levels = []
    for stage in stages:
        group_of_stage = group if stage.group is None else stage.group
        levels.append(_Level(group_of_stage, wire if stage.between_nodes else None))
    return levels


def _complex_buffer(buffer: Tensor, done: Future[Tensor]) -> Tensor:
    """Return the complex numbers of a bucket that was reduced in place, or raise what its reduction raised."""
    done.value()
    return buffer


def _run_one_step_of_each(under_way: list[Iterator[None]]) -> None:
    """Run the buckets under way until their next pause; take out those that are completed."""
    for steps in list(under_way):
        try:
            next(steps)
        except StopIteration:
            under_way.remove(steps)


def _completed(
    future: Future[Tensor], buffer: Tensor, levels: Sequence[_Level], factor: Callable[[], float] | None = None
) -> Iterator[None]:
    """Replace a bucket by its mean, and complete its future; arguments and pauses as of `_mean`."""
    yield from _mean(buffer.view(buffer.dtype.to_real()), levels, factor)
    future.set_result(buffer)


def scale_bucket(buffer: Tensor, factor: float) -> None:
    """Multiply numbers in place, of a sparse tensor, too; 0 erases NaN as well."""
    if factor == 0:
        buffer.zero_()  # 0 times NaN is NaN
    elif factor != 1:
        buffer.mul_(factor)


def scaled_sum(group: dist.ProcessGroup, bucket: dist.GradBucket, factor: Callable[[], float]) -> Future[Tensor]:
    """Return the sum of a bucket over the ranks, times a factor that all ranks have.

    What has 16 bits is summed in float32, and rounded once: a sum of float16 overflows where the result does not.

    Args:
        group: The ranks.
        bucket: The bucket.
        factor: Returns the factor, when the ranks have added up: it may wait for what they have sent before.
    """
    buffer = bucket.buffer()
    with torch.profiler.record_function("GradAvg: reduce bucket"):
        if buffer.dtype in _HALF and not buffer.is_sparse and group.size() > 1:
            return _begin_to_reduce(group, bucket, None, by_node=False, factor=factor)
        future: Future[Any] = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        return future.then(partial(_scaled, buffer, factor))


def _scaled(buffer: Tensor, factor: Callable[[], float], done: Future[Any]) -> Tensor:
    """Return what a bucket was summed to, times the factor, or raise what its reduction raised."""
    total: Tensor = done.value()[0]
    if buffer.is_complex():
        total = buffer  # torch reduces complex numbers in place, as pairs of real ones, and its future has those
    scale_bucket(total, factor())
    return total


def bfloat16(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean over `state`, a process group or None for all ranks, sent as bfloat16, summed in float32."""
    return _reduce(state, bucket, torch.bfloat16)


def float32_sum(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean. 16-bit gradients are summed in float32 and rounded once; other buckets are all-reduced."""
    return _reduce(state, bucket)


def by_node(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean, summed within each node first, then between nodes."""
    return _reduce(state, bucket, by_node=True)


def by_node_bfloat16(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean, summed within each node first, and sent as bfloat16 between nodes."""
    return _reduce(state, bucket, torch.bfloat16, by_node=True)
