"""Gradients on the wire: dense ones summed in flat buckets, sparse ones gathered, every bucket in flight at once.

Nothing is summed in fewer than 32 bits: narrower gradients are widened, summed and rounded once at the end. Nor is what
a codec sends in fewer: it is scattered, summed where it arrives, and gathered, as in `lightning_gradavg.wire.exchange`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.wire.codecs import Codec

__all__ = ["WIRE_DTYPES", "sum_dense", "sum_sparse"]

WIRE_DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}
"""The dtypes that a gradient may have, and the dtype that each is summed in."""

# The cap is DDP's: larger buckets gain no bandwidth and start later.
BUCKET_BYTES = 25 * 2**20

# From this size on a gradient is a bucket of its own, usually without a copy: one more collective is cheaper than
# copying 1 MiB into a bucket and back.
SINGLE_BYTES = 2**20

# Of a bucket that is scattered, on the wire: one large message leaves half of a full-duplex link idle.
SEGMENT_BYTES = 2**20


@dataclass
class _Bucket:
    """Gradients that are summed together.

    Attributes:
        gradients: Receive the sum; contiguous or not, of any dtype that widens to that of the bucket.
        flat: The memory that is summed over ranks.
        views: `flat`, cut into the shapes of `gradients`; empty where `flat` is the memory of the only gradient.
        work: The sum under way, or None.
        segments: The parts in which it is under way instead.
    """

    gradients: list[Tensor]
    flat: Tensor
    views: list[Tensor]
    work: dist.Work | None = field(default=None)
    segments: list[_Segment] = field(default_factory=list)

    def finish(self) -> None:
        if self.work is not None:
            self.work.wait()
        for segment in self.segments:
            segment.finish()
        if self.views:
            torch._foreach_copy_(self.gradients, self.views)


@dataclass
class _Segment:
    """Consecutive numbers of a bucket, cut into a row for each rank, which sums it.

    Every collective of it is started by the thread that calls, for all segments in one order, so that the ranks agree.

    Attributes:
        numbers: Receive the sum.
        codec: Makes bytes of them.
        group: The ranks.
        own: The row that this rank sums, unrounded.
        received: The payload that is arriving.
        work: Its arrival.
    """

    numbers: Tensor
    codec: Codec
    group: dist.ProcessGroup
    own: Tensor
    received: Tensor
    work: dist.Work

    @classmethod
    def scatter(cls, numbers: Tensor, codec: Codec, group: dist.ProcessGroup) -> _Segment:
        """Begin to send each rank its row."""
        ranks = dist.get_world_size(group)
        missing = -numbers.numel() % (ranks * codec.multiple)
        whole = torch.cat([numbers, numbers.new_zeros(missing)]) if missing else numbers
        rows = whole.view(ranks, -1)
        payload = codec.encode(rows)
        received = torch.empty_like(payload)
        work = dist.all_to_all_single(received, payload, group=group, async_op=True)
        assert work is not None
        return cls(numbers, codec, group, rows[dist.get_rank(group)], received, work)

    def gather(self) -> None:
        """Wait for the others' rows, and begin to send their sum to all."""
        self.work.wait()
        rows = self.codec.decode(self.received)
        rows[dist.get_rank(self.group)] = self.own
        payload = self.codec.encode(rows.sum(0, keepdim=True))
        self.received = payload.new_empty(len(rows), payload.shape[1])
        work = dist.all_gather(list(self.received.unbind()), payload[0], group=self.group, async_op=True)
        assert work is not None
        self.work = work

    def finish(self) -> None:
        """Wait for the sum. All ranks read it from the same bytes."""
        self.work.wait()
        self.numbers.copy_(self.codec.decode(self.received).flatten()[: self.numbers.numel()])


def sum_dense(
    gradients: Sequence[Tensor], factor: float, group: dist.ProcessGroup | None, codec: Codec | None = None
) -> None:
    """Replace every gradient by `sum over ranks of factor * gradient`, in place.

    Args:
        gradients: Strided, no two elements in one memory, none lazily conjugated. The same shapes and dtypes, in the
            same order, on all ranks; strides may differ.
        factor: What this rank's gradients are multiplied by; 0 discards them, whatever they hold.
        group: The process group to sum over; None for no communication.
        codec: What numbers are sent by, where all are summed in its type; None for the type of the sum.
    """
    shared = _shared_storages(gradients)
    buckets = []
    for members in _partition(gradients):
        bucket = _pack(members, factor, shared)
        buckets.append(bucket)
        if group is None:
            continue
        flat = _real(bucket.flat)
        if codec is None:
            bucket.work = dist.all_reduce(flat, group=group, async_op=True)
            continue
        pieces = _cut(flat.view(-1), codec, dist.get_world_size(group))
        bucket.segments = [_Segment.scatter(piece, codec, group) for piece in pieces]
    for bucket in buckets:
        for segment in bucket.segments:
            segment.gather()
    for bucket in buckets:
        bucket.finish()


def _cut(flat: Tensor, codec: Codec, ranks: int) -> tuple[Tensor, ...]:
    """Cut a bucket into segments of nearly equal size."""
    unit = ranks * codec.multiple
    units = -(-flat.numel() // unit)
    size = ranks * codec.row_bytes(units * codec.multiple)
    # On an accelerator a segment costs launches, and the collectives of one stream follow one another anyway.
    count = 1 if flat.device.type != "cpu" else min(units, -(-size // SEGMENT_BYTES))
    segments: tuple[Tensor, ...] = flat.split(-(-units // count) * unit)
    return segments


def _partition(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut gradients into buckets. Depends on nothing but their order, shapes, dtypes and which share a device."""
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for gradient in gradients:
        dtype = WIRE_DTYPES[gradient.dtype]
        size = gradient.numel() * dtype.itemsize
        if size == 0:
            continue
        if size >= SINGLE_BYTES:
            yield [gradient]
            continue
        key = dtype, gradient.device
        members, used = open_buckets.get(key, ([], 0))
        if members and used + size > BUCKET_BYTES:
            yield members
            members, used = [], 0
        members.append(gradient)
        open_buckets[key] = members, used + size
    for members, _ in open_buckets.values():
        yield members


def _pack(gradients: list[Tensor], factor: float, shared: set[int]) -> _Bucket:
    first = gradients[0]
    dtype = WIRE_DTYPES[first.dtype]
    alone = len(gradients) == 1 and dtype == first.dtype and first.is_contiguous()
    if alone and first.untyped_storage().data_ptr() not in shared:
        _scale(first, factor)
        return _Bucket(gradients, first, [])
    flat = torch.empty(sum(gradient.numel() for gradient in gradients), dtype=dtype, device=first.device)
    views = list(torch._C._nn.unflatten_dense_tensors(flat, gradients))
    if factor != 0:
        torch._foreach_copy_(views, gradients)
    _scale(flat, factor)
    return _Bucket(gradients, flat, views)


def _scale(flat: Tensor, factor: float) -> None:
    if factor == 0:
        flat.zero_()
    elif factor != 1:
        # A complex product would make NaN of an infinite part, because the factor's own imaginary part is 0.
        _real(flat).mul_(factor)


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat) if flat.is_complex() else flat


def _shared_storages(gradients: Sequence[Tensor]) -> set[int]:
    """Return the memory that holds more than one gradient: reduced in place, one could be read half-summed."""
    if all(gradient.nbytes < SINGLE_BYTES for gradient in gradients):
        return set()
    seen: set[int] = set()
    shared: set[int] = set()
    for gradient in gradients:
        address = gradient.untyped_storage().data_ptr()
        (shared if address in seen else seen).add(address)
    return shared


def sum_sparse(gradients: Sequence[Tensor], factor: float, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return `sum over ranks of factor * gradient` of every sparse gradient, coalesced.

    Every rank gathers the others' entries and adds them in rank order: gloo and NCCL agree on no sparse collective.

    Args:
        gradients: COO tensors, coalesced or not; the same shapes, sparse dimensions and dtypes, in the same order, on
            all ranks. The number of entries may differ.
        factor: What this rank's gradients are multiplied by; 0 discards them, whatever they hold.
        group: The process group to sum over; None for no communication.
    """
    wide = [_widened(gradient, factor) for gradient in gradients]
    counts = _gather_counts(wide, group)
    pending = [_Gathered.start(tensor, count, group) for tensor, count in zip(wide, counts, strict=True)]
    return [
        gathered.finish(gradient.dtype, gradient.shape) for gathered, gradient in zip(pending, gradients, strict=True)
    ]


def _widened(gradient: Tensor, factor: float) -> Tensor:
    """Return the gradient scaled and coalesced, with nothing added up in fewer than 32 bits."""
    indices, values = gradient._indices(), gradient._values()
    if factor == 0:
        indices, values = indices[:, :0], values[:0]
    values = values.to(WIRE_DTYPES[values.dtype], copy=True).resolve_conj().resolve_neg()
    _scale(values, factor)
    return _coo(indices, values, gradient.shape).coalesce()


def _gather_counts(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[list[int]]:
    """Return the number of entries of every tensor on every rank."""
    counts = torch.tensor([tensor._nnz() for tensor in tensors], dtype=torch.int64, device=tensors[0].device)
    of_ranks = counts[None]
    if group is not None:
        of_ranks = counts.new_empty(dist.get_world_size(group), len(tensors))
        dist.all_gather(list(of_ranks.unbind()), counts, group=group)
    return [list(column) for column in zip(*of_ranks.tolist(), strict=True)]


@dataclass
class _Gathered:
    """The entries of one sparse tensor, on their way from all ranks, padded to the longest."""

    counts: list[int]
    indices: list[Tensor]
    values: list[Tensor]
    works: list[dist.Work]

    @classmethod
    def start(cls, tensor: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> _Gathered:
        indices, values = tensor.indices().t(), tensor.values()
        if group is None:
            return cls(counts, [indices], [values], [])
        gathered = cls(counts, [], [], [])
        for mine, received in ((indices, gathered.indices), (values, gathered.values)):
            padded = mine.new_zeros(max(counts), *mine.shape[1:])
            padded[: len(mine)] = mine
            received += [torch.empty_like(padded) for _ in counts]
            if padded.numel() > 0:
                outputs = [_real(one) for one in received]
                gathered.works.append(dist.all_gather(outputs, _real(padded), group=group, async_op=True))
        return gathered

    def finish(self, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        for work in self.works:
            work.wait()
        indices, values = (
            torch.cat([part[:count] for part, count in zip(parts, self.counts, strict=True)])
            for parts in (self.indices, self.values)
        )
        total = _coo(indices.t(), values, shape).coalesce()
        return _coo(total.indices(), total.values().to(dtype), shape, coalesced=True)


def _coo(indices: Tensor, values: Tensor, shape: torch.Size, *, coalesced: bool | None = None) -> Tensor:
    # The invariants hold by construction; looking at them would wait for the device.
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=coalesced)
