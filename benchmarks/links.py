"""The figures that the cost model computes with: what links carry, and how long a processor works on each number."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.place import Place
from lightning_gradavg.wire.exchange import SEGMENT_BYTES

__all__ = ["WIRE_TYPES", "Link", "Links", "Stages", "fit_link", "measure_links", "neighbors"]

WIRE_TYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_SIZES = (2**12, 2**16, 2**19, 2**21, 2**23)  # bytes of the messages that are sent
_PARTS = 4  # into which a segment is cut, for as many ranks
_FACTOR = 0.5

Neighbors = tuple[int, int]
"""The rank that this one sends to, and the one that it receives from."""


@dataclass(frozen=True)
class Link:
    """What it takes to send a message of `m` bytes: `latency + m / bandwidth` seconds.

    This is the model of Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", 1994; its `alpha`
    is the latency and its `beta` one over the bandwidth.

    Attributes:
        latency: Seconds per message.
        bandwidth: Bytes per second in each direction, in both at once.

    Raises:
        ValueError: If the latency is not finite and >= 0, or the bandwidth not finite and > 0.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency < math.inf and 0 < self.bandwidth < math.inf):
            raise ValueError(f"a link has a latency >= 0 and a bandwidth > 0, got {self.latency} and {self.bandwidth}.")

    def seconds(self, size: float, messages: int = 1) -> float:
        """Return the time of some messages one after another, of `size` bytes in all."""
        return messages * self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Stages:
    """Processor seconds per number of the stages that a wire type adds.

    Attributes:
        encode: Multiplying the number by the factor of the rule, and writing it in the wire type.
        decode_sum: Reading it in the wire type, and adding it to the sum in float32.
        decode: Reading it in the wire type, and writing it into its bucket.
    """

    encode: float = 0.0
    decode_sum: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True)
class Links:
    """The figures of one cluster.

    Attributes:
        within: Between two ranks of a node, while all ranks of the node send.
        between: A node's link to the other nodes, which its ranks share; None where it was not measured.
        stages: By wire type; a type that is missing takes no processor time.
        sum: Processor seconds per number of adding one float32 to another.
        about: Where the figures come from: for people.
    """

    within: Link
    between: Link | None = None
    stages: Mapping[str, Stages] = field(default_factory=dict)
    sum: float = 0.0
    about: Mapping[str, Any] = field(default_factory=dict)

    def of(self, wire_type: str) -> Stages:
        """Return the stages of a wire type."""
        return self.stages.get(wire_type, Stages())

    def save(self, path: Path) -> None:
        """Write the figures as JSON, which `load` reads."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Links:
        """Return the figures in a file that `save` wrote; of wire types that are not in `WIRE_TYPES` nothing is kept.

        Raises:
            ValueError: If the file cannot be read or holds something else.
        """
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                within=Link(**saved["within"]),
                between=None if saved["between"] is None else Link(**saved["between"]),
                stages={name: Stages(**saved["stages"][name]) for name in WIRE_TYPES if name in saved["stages"]},
                sum=saved["sum"],
                about=saved["about"],
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} holds no figures of links ({type(error).__name__}: {error}).") from error


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[Link, float]:
    """Return the link whose times are nearest to those measured, and how near.

    Least squares of the relative error, `sum of ((latency + size / bandwidth) / second - 1)^2`: latency shows in small
    messages only, whose absolute times are small. A line that does not rise, or begins below 0, gives way to the best
    one through the origin; its residual tells.

    Args:
        sizes: Bytes of two messages or more, of different sizes.
        seconds: The time of each.

    Returns:
        The link, and the root mean square of the relative error.
    """
    # With u = 1/second and v = size/second, the error is latency * u + slope * v - 1: two normal equations.
    us = [1 / second for second in seconds]
    vs = [size / second for size, second in zip(sizes, seconds, strict=True)]
    uu, vv = sum(u * u for u in us), sum(v * v for v in vs)
    uv = sum(u * v for u, v in zip(us, vs, strict=True))
    determinant = uu * vv - uv * uv
    latency = (sum(us) * vv - sum(vs) * uv) / determinant
    slope = (sum(vs) * uu - sum(us) * uv) / determinant
    if latency < 0 or slope <= 0:
        latency, slope = 0.0, sum(vs) / vv
    squares = [(latency * u + slope * v - 1) ** 2 for u, v in zip(us, vs, strict=True)]
    return Link(latency, 1 / slope), math.sqrt(sum(squares) / len(squares))


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
        return _around(mine, rank), int(max(map(len, nodes.values())) > 1)
    if len(nodes) == 1:
        return None, 0
    position, sharing = mine.index(rank), min(map(len, nodes.values()))
    members = [others[position] for others in nodes.values()] if position < sharing else [rank]
    return _around(members, rank), sharing


def _around(members: Sequence[int], rank: int) -> Neighbors | None:
    index = members.index(rank)
    return (members[(index + 1) % len(members)], members[index - 1]) if len(members) > 1 else None


def measure_links(places: Sequence[Place], device: torch.device, *, repeats: int = 15) -> Links:
    """Return the figures of the links and the processors of the default process group, the same on all ranks.

    Call it on all ranks, two or more. Messages of several sizes go from each rank to the next, in both directions of
    the link at once; `fit_link` makes latency and bandwidth of their times. The stages of the wire types run on all
    ranks at once, on as many numbers as a segment of a bucket holds; where one thread computes on a CPU, its processor
    time counts. Each time is the median over the repeats, of the slowest rank.

    Args:
        places: Of all ranks, in rank order.
        device: Where gradients are.
        repeats: Of each time, one more is dropped.
    """
    stages, adding = _measure_stages(device, repeats)
    found: dict[str, tuple[Link, float]] = {}
    for name in ("within", "between"):
        peers, sharing = neighbors(places, dist.get_rank(), between=name == "between")
        if sharing > 0:
            times = [_send_around(peers, size, device, repeats) for size in _SIZES]
            found[name] = fit_link([sharing * size for size in _SIZES], _slowest(times, device))
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
    call: Callable[[], object], device: torch.device, repeats: int, clock: Callable[[], float]
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
    return _median_seconds(send, device, repeats, time.perf_counter)


def _slowest(times: Sequence[float], device: torch.device) -> list[float]:
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    found: list[float] = slowest.tolist()
    return found


def _measure_stages(device: torch.device, repeats: int) -> tuple[dict[str, Stages], float]:
    """Return the stages of every wire type, and the seconds per number of a sum in float32."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter

    def per_number(call: Callable[[], object], numbers: int) -> float:
        return _median_seconds(call, device, repeats, clock) / numbers

    times = []
    for wire_type in WIRE_TYPES.values():
        bucket = torch.randn(_PARTS, SEGMENT_BYTES // wire_type.itemsize // _PARTS, device=device)
        payload, scratch = torch.empty_like(bucket, dtype=wire_type), torch.empty_like(bucket)
        times += [
            per_number(partial(_encode, bucket, scratch, payload), bucket.numel()),
            per_number(partial(payload.sum, 0, dtype=torch.float32), bucket.numel()),
            per_number(partial(bucket.copy_, payload), bucket.numel()),
        ]
    total, other = torch.zeros(SEGMENT_BYTES // 4, device=device), torch.ones(SEGMENT_BYTES // 4, device=device)
    times.append(per_number(partial(total.add_, other), total.numel()))
    *of_stages, adding = _slowest(times, device)
    return {name: Stages(*of_stages[3 * index : 3 * index + 3]) for index, name in enumerate(WIRE_TYPES)}, adding


def _encode(bucket: Tensor, scratch: Tensor, payload: Tensor) -> None:
    payload.copy_(torch.mul(bucket, _FACTOR, out=scratch))
