"""Which gradients are in which bucket of a DDP module, and what may be asked of its process group."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["BucketLayout", "bucket_layout", "leave_works", "reduced_parameters"]

_LEAVE_TIMEOUT = 10.0
_LEAVE_ATTEMPTS = 2000  # on a busy machine threads are slow to wake


@dataclass(frozen=True)
class BucketLayout:
    """What a bucket holds.

    Attributes:
        parameters: Positions of its parameters in `reduced_parameters`.
        num_bytes: Size of their gradients.
        numel: Their elements.
        dtype: Their dtype, without `torch.`.
    """

    parameters: tuple[int, ...]
    num_bytes: int
    numel: int
    dtype: str


def reduced_parameters(model: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that DDP reduces, with their names, in DDP's own order.

    To be called while the same parameters require a gradient as when the module was wrapped.
    """
    parameters, _ = model._build_params_for_reducer()
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    return [(names[id(parameter)], parameter) for parameter in parameters]


def bucket_layout(model: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> tuple[BucketLayout, ...] | None:
    """Return the buckets in the order in which DDP reduces them.

    DDP forms its buckets anew after its first iteration, in the order in which gradients became ready, and says so when
    the third begins.

    Args:
        model: The module, which has begun at least three iterations.
        parameters: Those of `reduced_parameters`.

    Returns:
        The buckets, or None if what DDP says about them is not what its rules give.
    """
    data = model._get_ddp_logging_data()
    if data.get("has_rebuilt_buckets"):
        layouts = [
            _layout(_numbers(bucket, None), parameters) for bucket in _parts(data, "rebuilt_per_bucket_param_indices")
        ]
        return _confirmed(layouts, _parts(data, "rebuilt_bucket_sizes"))
    cap = int(data["bucket_cap_bytes"])
    # As in DistributedDataParallel._ddp_init_helper: with unused parameters to find, the first buckets stay.
    for limits in ([sys.maxsize], [dist._DEFAULT_FIRST_BUCKET_BYTES, cap], [cap]):
        groups, _ = dist._compute_bucket_assignment_by_size(list(parameters), limits)
        found = _confirmed([_layout(group, parameters) for group in reversed(groups)], _parts(data, "bucket_sizes"))
        if found is not None:
            return found
    return None


def _parts(data: Mapping[str, Any], key: str) -> list[str]:
    return [part for part in str(data.get(key, "")).split(",") if part.strip()]


def _numbers(text: str, separator: str | None) -> list[int]:
    return [int(number) for number in text.split(separator)]


def _layout(positions: Sequence[int], parameters: Sequence[nn.Parameter]) -> BucketLayout:
    members = [parameters[position] for position in positions]
    return BucketLayout(
        tuple(positions),
        sum(member.numel() * member.element_size() for member in members),
        sum(member.numel() for member in members),
        str(members[0].dtype).removeprefix("torch."),
    )


def _confirmed(layouts: Sequence[BucketLayout], sizes: Sequence[str]) -> tuple[BucketLayout, ...] | None:
    return tuple(layouts) if [layout.num_bytes for layout in layouts] == [int(size) for size in sizes] else None


def leave_works(model: DistributedDataParallel, device: torch.device) -> None:
    """Return when every thread of the process group has left the collectives that the model waited for.

    DDP waits for the results of its collectives. With gloo, the thread that computed one closes the profiler's event
    only after the result was handed over; if the profiler is stopped in between, the event is written into memory that
    was freed ("free(): corrupted unsorted chunks" in torch 2.4). So each thread is given a work of its own, and they
    meet: a thread that takes a work has left the one before. All ranks must call this.

    Raises:
        RuntimeError: If the threads do not meet. The profiler must not be stopped then.
    """
    backend = model.process_group._get_backend(device)
    if backend.name() != "gloo":
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return
    threads: int = backend.options._threads  # type: ignore[attr-defined]  # of gloo's options alone
    met = False
    for _ in range(_LEAVE_ATTEMPTS):
        met = _meet(threads, model.process_group, device) or met
        all_met = torch.tensor([met], dtype=torch.int32, device=device)
        dist.all_reduce(all_met, op=dist.ReduceOp.MIN, group=model.process_group)
        if all_met.item():
            return
    raise RuntimeError(f"the {threads} threads of gloo did not meet in {_LEAVE_ATTEMPTS} attempts")


def _meet(threads: int, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether all threads of the process group were seen at once."""
    meeting = threading.Barrier(threads)
    issuing = threading.get_ident()

    def attend(done: torch.futures.Future[list[Tensor]]) -> None:
        done.wait()
        if threading.get_ident() == issuing:
            # The work was done before it was asked to attend; whoever attended must not wait for it.
            meeting.abort()
            return
        try:
            meeting.wait(_LEAVE_TIMEOUT)
        except threading.BrokenBarrierError:
            return

    works = [dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True) for _ in range(threads)]
    attended = [work.get_future().then(attend) for work in works]
    for future in attended:
        future.wait()
    for work in works:
        work.wait()
    return not meeting.broken
