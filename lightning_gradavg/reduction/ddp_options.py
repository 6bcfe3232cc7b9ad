"""The options of DistributedDataParallel: which differ from their defaults, and which a reduction cannot have."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = ["changed_options"]

DEFAULTS: Mapping[str, Any] = {
    "output_device": None,
    "dim": 0,
    "broadcast_buffers": None,
    "init_sync": True,
    "process_group": None,
    "bucket_cap_mb": None,
    "find_unused_parameters": False,
    "check_reduction": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "delay_all_reduce_named_params": None,
    "param_to_hook_all_reduce": None,
    "mixed_precision": None,
    "device_mesh": None,
    "skip_all_reduce_unused_params": False,
    "bucket_cap_mb_list": None,
    "batched_grad_copy": False,
    "forward_sync_buffers": None,
}

_REDUCED_BY_DDP_ITSELF = ("delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision")


def changed_options(given: Mapping[str, Any], *, hook_of: str | None) -> dict[str, Any]:
    """Return the options of DDP that are not left at their defaults, so that an older torch need not know the others.

    Args:
        given: Values by name; names that are no options of DDP are passed over.
        hook_of: The option that needs DDP's communication hook, such as `reduction='sum'`, or None.

    Raises:
        TypeError: If the installed torch does not know an option.
        ValueError: If an option has DDP reduce gradients outside the communication hook that is needed.
    """
    options = {name: given[name] for name, default in DEFAULTS.items() if given[name] != default}
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    for name, value in options.items():
        if name not in known:
            raise TypeError(
                f"{name}={value!r} is not an option of DistributedDataParallel in torch {torch.__version__}."
            )
        if name in _REDUCED_BY_DDP_ITSELF and hook_of is not None:
            raise ValueError(
                f"{name} has DDP reduce gradients outside the communication hook, which {hook_of} needs."
                " Leave it out, or use reduction='mean' without options of the wire."
            )
    return options
