"""How long one sum over all ranks takes in the alpha-beta model, by algorithm and wire type, and a step with it.

`W = M * L` ranks stand on `M` nodes of `L` ranks each; `n` numbers of `b` bytes are summed. `a` and `B` are latency and
bandwidth of a link, within a node (`_w`) or between nodes (`_b`). A node's link to the others is shared by its ranks; a
rank sends one message at a time and receives another meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from benchmarks.links import WIRE_TYPES, Link, Links, Stages
from lightning_gradavg.wire.exchange import SEGMENT_BYTES

__all__ = ["ALGORITHMS", "Cost", "Layout", "Work", "bucket_sizes", "cost_of", "predict", "step_seconds"]

FIRST_BUCKET_BYTES = 2**20
"""Of DDP's first bucket, which it keeps small to start early (`torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`)."""


@dataclass(frozen=True)
class Layout:
    """Where the ranks stand.

    Attributes:
        nodes: Number of nodes.
        ranks_per_node: Ranks on each of them.
    """

    nodes: int
    ranks_per_node: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @classmethod
    def of(cls, world_size: int, ranks_per_node: int) -> Layout:
        """Return the layout of some ranks on as few nodes as hold them.

        Raises:
            ValueError: If they do not fill the nodes.
        """
        if world_size < 1 or ranks_per_node < 1 or world_size % min(world_size, ranks_per_node):
            raise ValueError(
                f"{world_size} ranks do not fill nodes of {ranks_per_node} ranks. Give a multiple of {ranks_per_node},"
                " or fewer for a single node."
            )
        return cls(max(1, world_size // ranks_per_node), min(world_size, ranks_per_node))


@dataclass(frozen=True)
class Cost:
    """What one sum takes.

    Attributes:
        wire: Seconds of sending.
        processor: Seconds of encoding, summing and decoding on each rank.
        sent: Bytes that the link of the busiest node sends to other nodes.
        segments: Pieces that are encoded, sent and summed at the same time; 1 where one waits for the other.
    """

    wire: float = 0.0
    processor: float = 0.0
    sent: float = 0.0
    segments: int = 1

    @property
    def seconds(self) -> float:
        """Time from start to end: of a pipeline of two stages, the longer one, and the other for one segment."""
        longer, shorter = max(self.wire, self.processor), min(self.wire, self.processor)
        return longer + shorter / self.segments


def _between(links: Links) -> Link:
    if links.between is None:
        raise ValueError(
            "the figures of these links are of one node only. Measure on two nodes or more, or give --between."
        )
    return links.between


def _round(layout: Layout, links: Links, size: float) -> float:
    """Return the time in which each rank sends `size` bytes to the next one: as long as the slowest of them takes."""
    hops = []
    if layout.ranks_per_node > 1:
        hops.append(links.within.seconds(size))
    if layout.nodes > 1:
        # In the order of the ranks only the last of a node sends to another node: it does not share the link.
        hops.append(_between(links).seconds(size))
    return max(hops)


def ring(numbers: float, wire_type: str, layout: Layout, links: Links) -> Cost:
    """Return the cost of a ring all-reduce.

    `2 (W - 1)` rounds in which each rank sends `n b / W` bytes to the next (Patarasuk and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009); a round is as long as its slowest hop, between nodes
    where there are any. The first half adds `(W - 1) / W * n` numbers per rank. A type other than float32 is encoded
    once, decoded, added and encoded at every addition, and decoded once.
    """
    W, b = layout.world_size, WIRE_TYPES[wire_type].itemsize
    size = numbers * b / W
    sent = 2 * (W - 1) * size if layout.nodes > 1 else 0.0
    return Cost(2 * (W - 1) * _round(layout, links, size), _narrow_sum(numbers, (W - 1) / W, wire_type, links), sent)


def _narrow_sum(numbers: float, added: float, wire_type: str, links: Links) -> float:
    """Return the processor time of a sum that goes from rank to rank in the wire type."""
    if wire_type == "float32":
        return added * numbers * links.sum
    stages = links.of(wire_type)
    return numbers * (stages.encode + stages.decode) + added * numbers * (stages.decode_sum + stages.encode)


def tree(numbers: float, wire_type: str, layout: Layout, links: Links) -> Cost:
    """Return the cost of an all-reduce along two complementary binary trees.

    Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009: each of two
    trees takes half of the data, and who is an inner node of one is a leaf of the other. In `k` packets per tree a
    broadcast over a height of `h` takes about `2 h + 2 k` rounds of `a + n b / (2 k B)`. The best `k` makes that
    `(sqrt(2 h a) + sqrt(n b / B))^2`, and the reduction takes the same. Here `h a` is the sum over the levels,
    `ceil(log2 L)` within and `ceil(log2 M)` between nodes, and `B` the narrowest link. Of two ranks (or nodes) each is
    the root of one tree, and sends and adds one half of what it otherwise would. One rank of a node sends to other
    nodes, as in NCCL. Types are encoded as in the ring.
    """
    b = WIRE_TYPES[wire_type].itemsize
    latency, seconds_of_bytes = 0.0, 0.0
    between = _between(links) if layout.nodes > 1 else links.within
    for members, link in ((layout.ranks_per_node, links.within), (layout.nodes, between)):
        if members > 1:
            latency += math.ceil(math.log2(members)) * link.latency
            seconds_of_bytes = max(seconds_of_bytes, _of_pair(members) * numbers * b / link.bandwidth)
    sent = 2 * _of_pair(layout.nodes) * numbers * b if layout.nodes > 1 else 0.0
    wire = 2 * (math.sqrt(2 * latency) + math.sqrt(seconds_of_bytes)) ** 2
    return Cost(wire, _narrow_sum(numbers, _of_pair(layout.world_size), wire_type, links), sent)


def _of_pair(members: int) -> float:
    return 0.5 if members == 2 else 1.0  # noqa: PLR2004  # a pair


def scattered(numbers: float, wire_type: str, layout: Layout, links: Links) -> Cost:
    """Return the cost of the sum in `wire.exchange` over one hop: all-to-all, sum, all-gather.

    The all-to-all sends `n b / W` bytes to each other rank, one after another: `(W - 1) a + (W - 1)/W n b / B` on equal
    links (pairwise exchange; Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
    MPICH", 2005). From a node `L (W - L)/W n b` bytes go to others, over one link. The all-gather is a ring (same
    source), which is what gloo does: `W - 1` rounds of `n b / W`. Each rank encodes `(W - 1)/W n` numbers, decodes and
    adds as many, adds `n / W` of its own, encodes its part of the sum and decodes `n`.
    """
    W, L, b = layout.world_size, layout.ranks_per_node, WIRE_TYPES[wire_type].itemsize
    size = numbers * b / W
    wire, sent = (W - 1) * _round(layout, links, size), 0.0
    if L > 1:
        wire += links.within.seconds((L - 1) * size, L - 1)
    if layout.nodes > 1:
        wire += _between(links).seconds(L * (W - L) * size, W - L)
        sent = L * (W - L) * size + (W - 1) * size
    stages = links.of(wire_type)
    processor = numbers * (_hop(W, stages, links) + stages.encode / W + stages.decode)
    return Cost(wire, processor, sent, _segments(numbers * b))


def _hop(members: int, stages: Stages, links: Links) -> float:
    """Return the processor time per number of sending others their parts, and adding theirs to one's own."""
    return (members - 1) / members * (stages.encode + stages.decode_sum) + links.sum / members


def node_by_node(numbers: float, wire_type: str, layout: Layout, links: Links) -> Cost:
    """Return the cost of the sum in `wire.exchange` over two hops: within the nodes first.

    Within a node each rank gets `n / L` numbers in float32 and adds them; the `L` ranks of equal position then do so
    over the nodes, `n / W` each, in the wire type, and gather on the way back. The steps are those of `scattered`; per
    node `2 (M - 1)/M n b` bytes go over its link, whatever `L`.
    """
    M, L, b = layout.nodes, layout.ranks_per_node, WIRE_TYPES[wire_type].itemsize
    stages = links.of(wire_type)
    wire, processor, sent = 0.0, 0.0, 0.0
    if L > 1:
        wire += links.within.seconds((L - 1) / L * numbers * 4, L - 1)
        wire += links.within.seconds((L - 1) / L * numbers * b, L - 1)
        processor += numbers * _hop(L, links.of("float32"), links)
    if M > 1:
        half = (M - 1) / M * numbers * b  # of all ranks of a node, which share its link
        wire += 2 * _between(links).seconds(half, M - 1)
        processor += numbers / L * _hop(M, stages, links)
        sent = 2 * half
    processor += numbers * (stages.encode / layout.world_size + stages.decode)
    return Cost(wire, processor, sent, _segments(numbers * b))


def _segments(size: float) -> int:
    return max(1, math.ceil(size / SEGMENT_BYTES))


ALGORITHMS: Mapping[str, Callable[[float, str, Layout, Links], Cost]] = MappingProxyType(
    {"ring": ring, "tree": tree, "scattered": scattered, "node by node": node_by_node}
)


def cost_of(algorithm: str, numbers: float, wire_type: str, layout: Layout, links: Links) -> Cost:
    """Return the cost of one sum of some numbers over all ranks; a single rank sends nothing.

    Args:
        algorithm: A key of `ALGORITHMS`.
        numbers: How many, >= 0.
        wire_type: A key of `WIRE_TYPES`.
        layout: The ranks' places.
        links: Their figures.

    Raises:
        ValueError: If there are several nodes and no figures of the links between them.
    """
    if layout.world_size == 1 or numbers == 0:
        return Cost()
    return ALGORITHMS[algorithm](numbers, wire_type, layout, links)


def bucket_sizes(total: float, cap: float, first: float = FIRST_BUCKET_BYTES) -> tuple[float, ...]:
    """Return the sizes of the buckets that gradients fill, in the order in which they are reduced.

    A parameter is taken to be small beside a bucket: DDP itself closes a bucket with the parameter that reaches the
    cap, and so has larger ones.

    Args:
        total: Size of all gradients, in bytes, > 0.
        cap: Largest size of a bucket, `bucket_cap_mb` of DDP in bytes, > 0.
        first: Largest size of the first one.
    """
    sizes = [min(first, cap, total)]
    while (rest := total - sum(sizes)) > 0:
        sizes.append(min(cap, rest))
    return tuple(sizes)


def step_seconds(
    forward: float, backward: float, sizes: Sequence[float], seconds_of: Callable[[float], float], *, overlap: bool
) -> float:
    """Return the time of an optimizer step whose buckets are summed while the backward goes on.

    Assumed is that a bucket is ready when the backward has computed its share of all bytes: bucket `i` at
    `forward + backward * (s_1 + ... + s_i) / (s_1 + ... + s_N)`; that the buckets are summed one after another, in that
    order; and that summing them does not slow the backward down. So bucket `i` ends at
    `max(ready_i, end_(i-1)) + seconds_of(s_i)`, and the step with the last of them.

    Args:
        forward: Seconds before the backward begins.
        backward: Seconds of the backward.
        sizes: Of the buckets, in the order in which they become ready.
        seconds_of: The time to sum a bucket of a size.
        overlap: Whether buckets are summed during the backward. If not, all are ready at its end.
    """
    total = sum(sizes)
    end = 0.0
    for done, size in zip(accumulate(sizes), sizes, strict=True):
        ready = forward + backward * (done / total if overlap else 1.0)
        end = max(ready, end) + seconds_of(size)
    return max(end, forward + backward)


@dataclass(frozen=True)
class Work:
    """A training step on one rank.

    Attributes:
        gradient_bytes: Size of the gradients in float32, > 0.
        forward: Seconds of the forward, and of what else the backward does not follow upon: the optimizer, the data.
        backward: Seconds of the backward.
        bucket_bytes: `bucket_cap_mb` of DDP, in bytes, > 0.
        overlap: Whether buckets are summed during the backward.
    """

    gradient_bytes: float
    forward: float
    backward: float
    bucket_bytes: float = 25 * 2**20
    overlap: bool = True


def predict(algorithm: str, wire_type: str, work: Work, layout: Layout, links: Links) -> tuple[float, float]:
    """Return the seconds of a step, and those of its communication, hidden or not.

    The work is the same on every rank, whatever their number (weak scaling). Arguments and errors as in `cost_of`.
    """
    sizes = bucket_sizes(work.gradient_bytes, work.bucket_bytes)

    def seconds_of(size: float) -> float:
        return cost_of(algorithm, size / 4, wire_type, layout, links).seconds

    step = step_seconds(work.forward, work.backward, sizes, seconds_of, overlap=work.overlap)
    return step, sum(map(seconds_of, sizes))
