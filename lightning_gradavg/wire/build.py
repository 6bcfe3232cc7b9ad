"""From what a user asks for to what sums the buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.place import Place
from lightning_gradavg.wire.exchange import Exchange, ScatteredSum
from lightning_gradavg.wire.options import WireOptions
from lightning_gradavg.wire.route import route_of

__all__ = ["build_exchange"]


def build_exchange(
    options: WireOptions,
    places: Sequence[Place],
    rank: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    parameters: Iterable[tuple[str, Tensor]],
) -> tuple[Exchange | None, str | None]:
    """Return what sums the buckets, or None for a plain all-reduce; and why it is not what was asked for, or None.

    Call it on all ranks of `group`.

    Args:
        options: What the user asks for.
        places: The places of all ranks of the group, in rank order.
        rank: This rank in the group.
        group: The process group that DDP reduces over.
        device: Where the gradients are.
        parameters: The parameters that DDP reduces, by name.

    Raises:
        ValueError: If gradients would be rounded more than anyone who chose their type can want, or the backend has no
            way to carry bytes.
    """
    if options.dtype is not None:
        _refuse_double_precision(options.dtype, parameters)
    ours = group if group is not None else dist.group.WORLD
    assert ours is not None
    backend = ours._get_backend(device).name()
    supported = (device.type, backend) in (("cpu", "gloo"), ("cuda", "nccl"))
    if options.asked_for is not None and not supported:
        raise ValueError(
            f"{options.asked_for} works on gloo for CPUs and on NCCL for CUDA devices; this is {backend} on"
            f" {device.type}. Choose process_group_backend accordingly, or leave the option out."
        )
    if not supported:
        return None, None
    route = route_of(options, places, rank, nccl=backend == "nccl")
    if not route.hops:
        return None, route.reason
    return ScatteredSum(route, options.dtype, rank, group, device), route.reason


def _refuse_double_precision(wire_dtype: str, parameters: Iterable[tuple[str, Tensor]]) -> None:
    for name, parameter in parameters:
        if parameter.dtype in (torch.float64, torch.complex128):
            raise ValueError(
                f"wire_dtype={wire_dtype!r} would round the gradient of {name!r}, which is {parameter.dtype}, to a"
                " quarter of its digits or fewer. Leave wire_dtype out, or train in float32."
            )
