"""What `fully_shard` (FSDP2) changes about a comparison: ranks have shards, and one process a mesh of one rank.

The user's `configure_model` runs in both. Over one rank, shards are the whole tensors, and their gradients are those of
the loss.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_gradavg._lightning.internals import class_of_sharded_modules
from lightning_gradavg.verify.records import Refused

__all__ = ["is_shard", "on_mesh_of_one", "require_shards_of_all", "shard_in_whole", "sharded_in_one_precision"]


def is_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which this rank has a part."""
    return hasattr(tensor, "device_mesh")  # the module of `DTensor` is slow to import


def require_shards_of_all(name: str, tensor: Any) -> None:
    """Raise `Refused` unless every rank has a shard of a DTensor."""
    placements = tensor.placements
    mesh = tensor.device_mesh
    if mesh.ndim != 1 or mesh.size() != dist.get_world_size() or not placements[0].is_shard():
        raise Refused(
            f"the weight {name!r} has the placements {tuple(placements)} on a mesh of shape {tuple(mesh.shape)}, and"
            " one process has no such mesh: verify the run with fully_shard over all ranks, without HSDP and tensor"
            " parallelism"
        )


def shard_in_whole(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor at its place in the whole tensor, which is zero elsewhere.

    Sketches are linear, so those of all ranks add up to that of the whole (`record.join_shards`). To gather the whole
    here would be a collective, in which a rank waits for others that take fewer steps.
    """
    (placement,) = tensor.placements  # others are refused (`require_shards_of_all`)
    shard: Tensor = tensor.detach().to_local()
    whole = shard.new_zeros(tensor.shape)
    # The ranks have what `torch.chunk` gives them: the last ones may have fewer rows, or none.
    rows = tensor.shape[placement.dim]
    most_rows = math.ceil(rows / tensor.device_mesh.size())
    start = min(most_rows * tensor.device_mesh.get_local_rank(), rows)
    whole.narrow(placement.dim, start, shard.shape[placement.dim]).copy_(shard)
    return whole


@contextmanager
def sharded_in_one_precision(module: LightningModule) -> Iterator[None]:
    """Have what a module's `configure_model` shards compute in one type, whatever its `MixedPrecisionPolicy` says.

    Raises:
        Refused: If `configure_model` leaves weights without values.
    """
    configure_model = module.configure_model
    with ExitStack() as patches:

        @functools.wraps(configure_model)  # Lightning asks whether the user overrides it
        def configured() -> None:
            configure_model()
            for parameter in module.parameters():
                if parameter.is_meta:
                    raise Refused(
                        "the weights are on the meta device when they are sharded, and each rank draws its shards"
                        " afterwards, which one process draws otherwise: verify the run with weights that have values"
                        " before fully_shard"
                    )
            # Policies are read when training begins. Here they exist, and their fields are constants.
            from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415  # slow, and only for sharded models

            no_type = property(_no_type)
            patches.enter_context(
                mock.patch.multiple(
                    MixedPrecisionPolicy, param_dtype=no_type, reduce_dtype=no_type, output_dtype=no_type
                )
            )

        vars(module)["configure_model"] = configured
        yield


def _no_type(policy: object) -> None:
    """Stand for a type of a `MixedPrecisionPolicy`."""


_OF_SUMS_OVER_RANKS = (
    "set_gradient_divide_factor",
    "set_reduce_scatter_divide_factor",  # the older name
    "set_requires_gradient_sync",
)
"""Methods of sharded modules by which a user says how gradients are summed over the ranks."""


def _ignore(*_: object, **__: object) -> None:
    """Stand for such a method."""


@contextmanager
def on_mesh_of_one() -> Iterator[None]:
    """Have modules shard themselves over the one rank of the process group, on the mesh that Lightning would make.

    One process has no sum over ranks. What the user says about it is ignored: otherwise a run whose gradients are
    divided by a wrong number, or are never summed, would equal one process that does the same.
    """
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    sharded = class_of_sharded_modules()
    ignored: dict[str, Any] = dict.fromkeys(_OF_SUMS_OVER_RANKS, _ignore)
    with mock.patch.multiple(sharded, create=True, **ignored), mock.patch.object(LightningModule, "device_mesh", mesh):
        yield
