"""Measures the figures of the cost model over a live process group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.costs.allreduce import SEGMENT_BYTES
from lightning_gradavg.costs.links import BYTES_PER_NUMBER, Link, Links, Stages, fit_link
from lightning_gradavg.place import Place
from lightning_gradavg.wire.codecs import BLOCK, CODECS, Codec, Plain

__all__ = ["SIZES", "measure_links", "neighbors"]

SIZES = (2**12, 2**16, 2**19, 2**21, 2**23)
"""Bytes of the messages that are sent. What is larger than a segment of a bucket goes in segments, as buckets do."""

_PARTS = 4
_FACTOR = 0.5
_FINE = 1e-6  # seconds; the thread's clock of Windows ticks every 16 ms

Neighbors = tuple[int, int]
"""The rank that this one sends to, and the one that it receives from."""


def neighbors(places: Sequence[Place], rank: int, *, between: bool) -> tuple[Neighbors | None, int]:
    """Return whom this rank sends to and receives from, and how many ranks share the link that is measured.

    Within nodes each rank sends to the next one on its node. Between nodes each sends to the rank of equal position on
    the next node; positions that some node lacks are idle.

    Args:
        places: Of all ranks, in rank order.
        rank: This rank.
        between: Whether the links between nodes are measured, and not those within.

    Returns:
        The neighbors, or None for a rank that is idle; and the ranks that share a link, 0 where there is none.
    """
    nodes: dict[int, list[int]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place.rank)
    mine = nodes[places[rank].node]
    if not between:
        sharing = int(max(map(len, nodes.values())) > 1)
        return _around(mine, rank), sharing
    if len(nodes) == 1:
        return None, 0
    sharing = min(map(len, nodes.values()))
    position = mine.index(rank)
    if position >= sharing:
        return None, sharing
    return _around([members[position] for members in nodes.values()], rank), sharing


def _around(members: Sequence[int], rank: int) -> Neighbors | None:
    if len(members) == 1:
        return None
    index = members.index(rank)
    return members[(index + 1) % len(members)], members[index - 1]


def measure_links(places: Sequence[Place], device: torch.device, *, repeats: int = 15) -> Links:
    """Return the figures of the links and the processors of the default process group, the same on all ranks.

    Call it on all ranks. Messages of several sizes go from each rank to the next, in both directions of the link at
    once; `fit_link` makes latency and bandwidth of their times. The stages of the wire types run on all ranks at once,
    on as many numbers as a segment of a bucket holds; where one thread computes on a CPU, its processor time counts.
    Each time is the median over the repeats, of the slowest rank.

    Args:
        places: Of all ranks, in rank order.
        device: Where gradients are.
        repeats: Of each time, one more is dropped.

    Raises:
        ValueError: If `repeats` is below 1, or there is only one rank.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be an integer >= 1, got {repeats!r}.")
    if len(places) == 1:
        raise ValueError("links are measured between two ranks or more, and there is 1. Start more, as with --ranks 2.")
    rank = dist.get_rank()
    stages, adding = _measure_stages(device, repeats)
    found: dict[str, tuple[Link, float]] = {}
    for name, is_between in (("within", False), ("between", True)):
        peers, sharing = neighbors(places, rank, between=is_between)
        if sharing > 0:
            times = [_send_around(peers, size, device, repeats) for size in SIZES]
            found[name] = fit_link([sharing * size for size in SIZES], _slowest(times, device))
    # Where every node has one rank, nothing is sent within.
    within, between = found.get("within") or found["between"], found.get("between")
    about = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "backend": dist.get_backend(),
        "device": device.type,
        "world_size": len(places),
        "nodes": len({place.node for place in places}),
        "repeats": repeats,
        "residual": {name: residual for name, (_, residual) in found.items()},
    }
    return Links(within[0], None if between is None else between[0], stages, adding, about)


def _median_seconds(
    call: Callable[[], object], device: torch.device, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the median time of a call; the first one does not count."""
    times = []
    for _ in range(repeats + 1):
        begin = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - begin)
    return statistics.median(times[1:])


def _processor_clock(device: torch.device) -> Callable[[], float]:
    """Return what tells how long a stage works, without what other processes do meanwhile where that can be told."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone and time.get_clock_info("thread_time").resolution <= _FINE else time.perf_counter


def _send_around(peers: Neighbors | None, size: int, device: torch.device, repeats: int) -> float:
    """Return the time in which this rank sends a message and receives one; 0 for an idle rank."""
    dist.barrier()
    if peers is None:
        return 0.0
    to, source = peers
    sent = torch.zeros(size, dtype=torch.uint8, device=device).split(SEGMENT_BYTES)
    received = torch.empty(size, dtype=torch.uint8, device=device).split(SEGMENT_BYTES)
    operations = [
        operation
        for outgoing, incoming in zip(sent, received, strict=True)
        for operation in (dist.P2POp(dist.isend, outgoing, to), dist.P2POp(dist.irecv, incoming, source))
    ]

    def send() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    # No barrier in between: who waits for its neighbor's message begins the next one together with it.
    return _median_seconds(send, device, repeats)


def _slowest(times: Sequence[float], device: torch.device) -> list[float]:
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    found: list[float] = slowest.tolist()
    return found


def _measure_stages(device: torch.device, repeats: int) -> tuple[dict[str, Stages], float]:
    """Return the stages of every wire type, and the seconds per number of a sum in float32."""
    names, times = list(BYTES_PER_NUMBER), []
    for name in names:
        codec: Codec = CODECS[name] if name in CODECS else Plain(torch.float32)
        width = SEGMENT_BYTES // int(BYTES_PER_NUMBER[name]) // (_PARTS * BLOCK) * BLOCK
        times += [seconds / (_PARTS * width) for seconds in _stages_of(codec, width, device, repeats)]
    numbers = SEGMENT_BYTES // 4
    total, other = torch.zeros(numbers, device=device), torch.ones(numbers, device=device)
    times.append(_median_seconds(lambda: total.add_(other), device, repeats, _processor_clock(device)) / numbers)
    *per_number, adding = _slowest(times, device)
    return {name: Stages(*per_number[3 * index : 3 * index + 3]) for index, name in enumerate(names)}, adding


def _stages_of(codec: Codec, width: int, device: torch.device, repeats: int) -> list[float]:
    """Return the times of the three stages on a matrix of `_PARTS` rows, with error feedback where it is needed."""
    bucket = torch.randn(_PARTS, width, generator=torch.Generator().manual_seed(0)).to(device)
    owed = torch.zeros_like(bucket) if codec.lossy else None

    def encode() -> Tensor:
        payload = codec.blank(_PARTS, width, 0, device)
        codec.write(bucket, payload, _FACTOR, owed)
        return payload

    payload = encode()
    calls: tuple[Callable[[], object], ...] = (
        encode,
        lambda: codec.decode(payload).sum(0, keepdim=True),
        lambda: codec.read(payload, bucket),
    )
    return [_median_seconds(call, device, repeats, _processor_clock(device)) for call in calls]
