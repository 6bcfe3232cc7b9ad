"""What sums a bucket over the ranks: an all-reduce, the exchange, or a user's own DDP communication hook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_gradavg.lightning_internals import backend_name, let_go
from lightning_gradavg.place import Place
from lightning_gradavg.ranks import World, subgroups
from lightning_gradavg.reduction.sums import SUM_DTYPES, BucketSum, plain_sum
from lightning_gradavg.wire.codecs import CODECS, Codec, refuse_double_precision
from lightning_gradavg.wire.exchange import Exchange, InOrder
from lightning_gradavg.wire.route import WireOptions, route_of

__all__ = ["OwnGroups", "exchange_sum", "user_mean"]

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"

_REFUSED_MODULES = {
    f"{_HOOKS}.post_localSGD_hook": "it stops reducing gradients and averages weights instead",
    f"{_HOOKS}.hierarchical_model_averager": "it averages weights instead of gradients",
    f"{_HOOKS}.optimizer_overlap_hooks": "it runs the optimizer before the window is complete",
    f"{_HOOKS}.ddp_zero_hook": "it runs the optimizer before the window is complete",
}

_REFUSED_ON_GLOO = {
    "quantization_pertensor_hook": "it reads the result of an all_gather as only NCCL returns it",
    "quantization_perchannel_hook": "it reads the result of an all_gather as only NCCL returns it",
    "batched_powerSGD_hook": "its orthogonalisation needs a square matrix that it does not make on CPU",
}


class OwnGroups:
    """Process groups that nobody else uses, and what runs on them; to be closed when training ends.

    Args:
        world: The ranks that DDP reduces over.
        device: Where the gradients are.
        timeout: How long a process group waits for a rank.
    """

    def __init__(self, world: World, device: torch.device, timeout: timedelta | None) -> None:
        self._world, self._device, self._timeout = world, device, timeout
        self._in_order: InOrder | None = None
        self._made: list[dict[tuple[int, ...], dist.ProcessGroup]] = []

    def submit(self, call: Callable[[], Tensor]) -> Future[Tensor]:
        """Run a call after all that were submitted before, where the backward does not wait for it."""
        self._in_order = self._in_order or InOrder(self._device, "gradavg-exchange")
        return self._in_order.submit(call)

    def make(self, wanted: Iterable[tuple[int, ...]], needed_by: str) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Return a process group for each set of ranks. A collective operation of all ranks of the run.

        Raises:
            ValueError: If DDP reduces over some of the run's ranks only. Torch names a group that its members make
                alone by how many groups a rank has, which need not be alike on them, and then they wait for ever.
        """
        if self._world.size != dist.get_world_size():
            raise ValueError(
                f"{needed_by} needs process groups of its own, which are made with all ranks of the run; but"
                f" process_group= or device_mesh= has only {self._world.size} of {dist.get_world_size()}. Leave one of"
                " them out."
            )
        made = subgroups(self._world, wanted, self._timeout)
        self._made.append(made)
        return made

    def close(self) -> None:
        """End the thread and the groups, unless a peer may be lost: a group that is destroyed waits for its works.

        What is left of a group here is let go, so that gloo closes its connections, and ranks that wait for this one
        fail.
        """
        if self._in_order is None or self._in_order.close():
            for made in self._made:
                for ranks in [ranks for ranks in made if self._world.rank in ranks]:
                    let_go(made.pop(ranks), failed=self._in_order is not None and self._in_order.failed)
        self._made, self._in_order = [], None


def user_mean(
    hook: Callable[..., Any],
    state: Any,
    wrapper: Callable[..., Any] | None,
    group: dist.ProcessGroup,
    device: torch.device,
    own: OwnGroups,
) -> BucketSum:
    """Return a user's communication hook as a function of the bucket alone. It returns the mean over the ranks.

    What PowerSGD adds to the next step, because a step did not send it, is in units of this step's normalizer, and used
    with the next one's: right as far as steps have weights alike.

    Args:
        hook: `(state, bucket) -> Future`, returning the mean over the ranks as DDP asks of a hook.
        state: The hook's state.
        wrapper: A function of the hook that returns a hook, such as `fp16_compress_wrapper`.
        group: The process group that DDP reduces over.
        device: Where the gradients are.
        own: Runs PowerSGD on gloo.

    Raises:
        ValueError: If the hook owns the optimizer or the averaging, or cannot work on the group's backend.
    """
    gloo = backend_name(group, device) == "gloo"
    name = getattr(hook, "__qualname__", repr(hook))
    reason = _REFUSED_MODULES.get(getattr(hook, "__module__", "")) or _REFUSED_MODULES.get(type(state).__module__)
    if reason:
        raise ValueError(
            f"ddp_comm_hook={name} cannot be combined with a reduction: {reason}."
            " Use lightning.pytorch.strategies.DDPStrategy for it, or a hook that returns the mean of the bucket."
        )
    if gloo and name in _REFUSED_ON_GLOO:
        raise ValueError(
            f"ddp_comm_hook={name} does not work on gloo: {_REFUSED_ON_GLOO[name]}. Use NCCL, or another hook."
        )
    wrapped = wrapper(hook) if wrapper is not None else hook
    if not (gloo and type(state).__name__ == "PowerSGDState"):
        return lambda bucket: wrapped(state, bucket)
    # It starts collectives when others complete, which is at another moment on every rank: on gloo they would meet
    # others. Bucket by bucket, in a thread and on a process group of its own, each meets itself.
    everyone = tuple(range(dist.get_world_size(group)))
    state.process_group = own.make([everyone], f"ddp_comm_hook={name} on gloo")[everyone]
    return lambda bucket: own.submit(lambda: wrapped(state, bucket).wait())


def exchange_sum(
    options: WireOptions,
    places: Sequence[Place],
    group: dist.ProcessGroup,
    device: torch.device,
    parameters: Iterable[tuple[str, Tensor]],
    own: OwnGroups,
) -> tuple[BucketSum | None, str | None]:
    """Return what sums the buckets as the user asks, or None for an all-reduce; and why it is not that, or None.

    Call it on all ranks of the run.

    Args:
        options: What the user asks for.
        places: The places of all ranks of the group, in rank order.
        group: The process group that DDP reduces over.
        device: Where the gradients are.
        parameters: The parameters that DDP reduces, by name.
        own: Runs the exchange.

    Raises:
        ValueError: If gradients would be rounded more than anyone who chose their type can want, if more bytes would be
            sent than without, or if the backend has no way for it.
    """
    for name, parameter in parameters if options.dtype is not None else ():
        refuse_double_precision(str(options.dtype), repr(name), parameter.dtype)
    backend, partial = backend_name(group, device), len(places) != dist.get_world_size()
    supported = (device.type == "cpu") == (backend == "gloo")
    if options.asked_for is None and (partial or not supported):
        return None, None
    if not supported:
        raise ValueError(
            f"{options.asked_for} works on gloo for CPUs and on NCCL and its like for accelerators; this is {backend}"
            f" on {device.type}. Choose process_group_backend accordingly, or leave the option out."
        )
    routes = [route_of(options, places, place.rank, lays_own_ways=device.type != "cpu") for place in places]
    route = routes[dist.get_rank(group)]
    if not route.hops:
        return None, route.reason
    wanted = {hop.ranks for of_rank in routes for hop in of_rank.hops}
    made = own.make(wanted, options.asked_for or "the hierarchical all-reduce")
    codec = Codec(torch.float32) if options.dtype is None else CODECS[options.dtype]
    exchange = Exchange(route, codec, made)
    all_reduce = plain_sum(group)

    def exchange_of(bucket: dist.GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_sparse or buffer.numel() == 0:
            return all_reduce(bucket)

        def run() -> Tensor:
            wide = buffer.to(SUM_DTYPES[buffer.dtype])
            exchange.sum_(wide)
            return wide

        return own.submit(run)

    return exchange_of, route.reason
