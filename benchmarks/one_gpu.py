"""Several ranks on one GPU: it shows whether a run is right, and what the host waits for; not the speed of traffic."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator

__all__ = ["OneGpu", "alone_on_a_gpu"]


class OneGpu(CUDAAccelerator):
    """The first GPU, which all ranks of a node share."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        """Return the first GPU for each rank."""
        return [0] * devices


def alone_on_a_gpu() -> None:
    """Have a process count as a host of its own, with kernels of all ranks on the GPU at once. Before NCCL starts.

    NCCL refuses two ranks on one GPU otherwise; the traffic takes the network transport, as between nodes.
    """
    os.environ.update(
        NCCL_HOSTID=f"gradavg-{os.getpid()}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_MAX_CTAS="2",
    )
    torch.cuda.set_device(0)
