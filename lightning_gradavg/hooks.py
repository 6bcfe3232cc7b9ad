"""DDP communication hooks that return the mean over the ranks: in 16 bits on the wire, and node by node.

They have torch's own signature. Pass one as `ddp_comm_hook=` of `GradAvgStrategy` or of Lightning's `DDPStrategy`, by
import path in YAML, or to `DistributedDataParallel.register_comm_hook`. See docs/performance.md.

A bucket is cut into parts. One rank sums each part in float32, divides, rounds once, and sends the result to all. So
all ranks get the same bits, and the error does not grow with their number.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with types.

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from lightning_gradavg.device import current_stream, new_stream, within
from lightning_gradavg.lightning_internals import timeout_of
from lightning_gradavg.ranks import World

__all__ = ["bfloat16", "by_node", "by_node_bfloat16", "by_node_float16", "float16", "float32_sum"]

_ALIGNED = 8  # numbers: NCCL moves packs of 16 bytes where every row begins at a multiple of that
_HALF = (torch.float16, torch.bfloat16)

_Groups = dict[tuple[int, ...], dist.ProcessGroup]


class _Code(NamedTuple):
    """How numbers are sent.

    With a header, each row travels times a power of two, which is exact and stands there. It brings the row's largest
    finite magnitude into [2**14, 2**15): nothing overflows in float16, and what underflows is below 2**-39 of that.
    """

    dtype: torch.dtype
    header: int = 0

    def encode(self, rows: Tensor, payload: Tensor) -> None:
        if self.header:
            rows = rows.float()
            largest = rows.abs().nan_to_num_(0, 0, 0).amax(1, keepdim=True)
            # The biased exponent b of a float32 stands in bits 23 to 30: 2**(b - 127) <= x < 2**(b - 126).
            power = (141 - (largest.view(torch.int32) >> 23)).clamp_(max=126)
            payload[:, :2].view(torch.float32).copy_(_power_of_two(-power))
            rows = rows * _power_of_two(power)
        payload[:, self.header :].copy_(rows)

    def decode(self, payload: Tensor, rows: Tensor) -> None:
        rows.copy_(payload[:, self.header :])
        if self.header:
            rows.mul_(payload[:, :2].view(torch.float32))


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent in float32, from its bits: a computed power may be off by a rounding."""
    bits: Tensor = (exponent + 127) << 23
    return bits.view(torch.float32)


class _Hop(NamedTuple):
    """Ranks that add up parts among them: the first `holders` of them hold one each; this rank is at `place`."""

    ranks: tuple[int, ...]
    place: int
    holders: int
    code: _Code


class _Route(NamedTuple):
    """The hops of this rank; for all ranks the number of parts, the code of the mean, and whether it takes two hops."""

    hops: list[_Hop]
    parts: int
    result: _Code
    twice: bool


def _route(nodes: Sequence[int], rank: int, dtype: torch.dtype, wire: _Code | None) -> _Route:
    """Return the way of numbers of a type, first within each node and then, as `wire` if it is given, across nodes."""
    members: dict[int, list[int]] = defaultdict(list)
    for other, node in enumerate(nodes):
        members[node].append(other)
    # The ranks of one place on their nodes add up one part, so there are as many as on the smallest node.
    sizes, mine, own = [len(ranks) for ranks in members.values()], members[nodes[rank]], _Code(dtype)
    place, holders, twice = mine.index(rank), min(sizes), len(sizes) > 1 and max(sizes) > 1
    # Nothing shorter than 16 bits is exact, so these are sent as they are, but for sums.
    result = own if wire is None or dtype in _HALF or len(sizes) == 1 else wire
    hops = [_Hop(tuple(mine), place, holders, own)]
    if place < holders:
        across = tuple(sorted(ranks[place] for ranks in members.values()))
        sums = wire or _Code(torch.promote_types(dtype, torch.float32))
        hops.append(_Hop(across, across.index(rank), len(across), sums if twice else result))
    return _Route([hop for hop in hops if len(hop.ranks) > 1], holders * len(sizes), result, twice)


def _mean_of(flat: Tensor, route: _Route, size: int, groups: _Groups) -> Iterator[dist.Work]:
    """Replace a row of numbers by its mean over the ranks; yield each collective, and go on when it is done."""
    wide = torch.promote_types(flat.dtype, torch.float32)
    below, width = route.parts, -(-len(flat) // (route.parts * _ALIGNED)) * _ALIGNED
    padding = route.parts * width - len(flat)
    total, holds = nn.functional.pad(flat, (0, padding)) if padding else flat, True
    for hop in route.hops:
        below, holds, code = below // hop.holders, hop.place < hop.holders, hop.code
        rows = total.view(hop.holders, -1)
        sent = rows.new_empty(hop.holders - holds, code.header + rows.shape[1], dtype=code.dtype)
        received = sent.new_empty((len(hop.ranks) - 1) * holds, sent.shape[1])
        # What a rank holds itself is not rounded.
        code.encode(rows[: hop.place], sent[: hop.place])
        code.encode(rows[hop.place + 1 :], sent[hop.place :])
        others = [int(place != hop.place) for place in range(len(hop.ranks))]
        of, to = [holds * count for count in others], [n * (place < hop.holders) for place, n in enumerate(others)]
        yield dist.all_to_all_single(received, sent, of, to, group=groups[hop.ranks], async_op=True)
        if holds:
            addends = rows.new_empty(len(received), rows.shape[1], dtype=wide)
            code.decode(received, addends)
            total = addends.sum(0).add_(rows[hop.place])
    code = route.result
    known = flat.new_empty(int(holds), code.header + width, dtype=code.dtype)
    if holds:
        code.encode(total.div_(size)[None], known)
    for hop in reversed(route.hops):
        # A rank that holds nothing has no rows, and sends none.
        mine, known = known, known.new_empty(hop.holders * below, known.shape[1])
        ranks, of = len(hop.ranks), [below * (place < hop.holders) for place in range(len(hop.ranks))]
        sent, to = mine.repeat(ranks, 1), [len(mine)] * ranks
        yield dist.all_to_all_single(known, sent, of, to, group=groups[hop.ranks], async_op=True)
        below *= hop.holders
    numbers = flat.new_empty(route.parts, width) if padding else flat.view(route.parts, width)
    code.decode(known, numbers)
    if padding:
        flat.copy_(numbers.view(-1)[: len(flat)])


class _Lane:
    """The process groups in which buckets travel one after another. Making them is a collective operation.

    Ranks must begin the collectives of a group in one order. One that begins when another is done begins at another
    moment on every rank, so on a CPU the lane has groups of its own. An accelerator begins all collectives in one
    order, so there DDP's group serves those among all ranks.
    """

    def __init__(self, nodes: Sequence[int], *, own: bool) -> None:
        self.nodes, self._own = nodes, own
        self._groups: _Groups | None = None
        self._last: Future[Any] = _done(torch.empty(0))

    def _open(self, world: World, device: torch.device) -> _Groups:
        assert world.group is not None
        if self._own and world.size != dist.get_world_size():
            raise ValueError(
                f"the hook makes process groups, which takes all {dist.get_world_size()} ranks of the run, but it"
                f" reduces over {world.size}. Use a group of all ranks, or torch's allreduce_hook."
            )
        routes = [_route(self.nodes, rank, torch.float32, None) for rank in range(world.size)]
        wanted = sorted({hop.ranks for route in routes for hop in route.hops if self._own})
        timeout, self._stream = timeout_of(world.group, device), new_stream(device)
        return {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in wanted}

    def mean(self, flat: Tensor, route: _Route, world: World) -> Future[Any]:
        """Return a future that is done when the numbers are their mean."""
        assert world.group is not None
        if self._groups is None:
            self._groups = self._open(world, flat.device)
        steps = _mean_of(flat, route, world.size, {tuple(range(world.size)): world.group} | self._groups)
        if self._stream is not None:
            self._stream.wait_stream(current_stream(flat.device))
            # The host waits for nothing. What is allocated on this stream is freed on it.
            with within(self._stream):
                for work in steps:
                    work.wait()
                return _done(flat)
        before, end = self._last, Future[Any]()
        self._last = end

        def proceed(done: Future[Any]) -> None:
            try:
                done.value()  # raises what broke it
                while (work := next(steps, None)) is not None:
                    future = work.get_future()
                    if not future.done():
                        future.then(proceed)
                        return
                    future.value()
                end.set_result(flat)
            except Exception as error:  # noqa: BLE001  # whatever it is belongs to the backward that waits
                end.set_exception(error)

        before.then(proceed)
        return end


_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[bool, _Lane]] = WeakKeyDictionary()
"""The lanes of a process group, made at the first use. They go with it, so nothing in them may refer to it."""


def _reduce(state: Any, bucket: dist.GradBucket, wire: _Code | None = None, *, by_node: bool = False) -> Future[Tensor]:
    buffer, world = bucket.buffer(), World.of(state)
    if world.group is None or (buffer.numel() == 0 and not buffer.is_sparse):
        return _done(buffer)
    flat = buffer if buffer.is_sparse else (torch.view_as_real(buffer) if buffer.is_complex() else buffer).view(-1)
    if wire is not None and flat.dtype not in (torch.float32, *_HALF):
        raise ValueError(
            f"this hook would send gradients of {flat.dtype} in 16 bits, a quarter of their digits or fewer. Train in"
            " float32, or use lightning_gradavg.hooks.by_node or torch's allreduce_hook."
        )
    lanes = _MADE.setdefault(world.group, {})
    if by_node not in lanes:
        # Among all ranks each is a node of its own.
        nodes = world.nodes("the hook reduces node by node") if by_node else range(world.size)
        lanes[by_node] = _Lane(nodes, own=flat.device.type == "cpu" or by_node)
    route = _route(lanes[by_node].nodes, world.rank, flat.dtype, wire)
    if flat.is_sparse or (route.result == _Code(flat.dtype) and not route.twice and flat.dtype not in _HALF):
        future: Future[Any] = dist.all_reduce(flat.div_(world.size), group=world.group, async_op=True).get_future()
    else:
        future = lanes[by_node].mean(flat, route, world)
    return future.then(lambda done: done.value()[0] if buffer.is_sparse else (done.value(), buffer)[1])


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
    """Return the mean, summed within each node first, then between nodes. Nodes may differ in size."""
    return _reduce(state, bucket, by_node=True)


def by_node_bfloat16(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean, summed within each node first, and sent as bfloat16 between nodes."""
    return _reduce(state, bucket, _BFLOAT16, by_node=True)


def by_node_float16(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean, summed within each node first, and sent as scaled float16 between nodes."""
    return _reduce(state, bucket, _FLOAT16, by_node=True)
