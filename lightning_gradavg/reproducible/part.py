"""What makes every process compute the same numbers for a replica, and what it cannot serve."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_gradavg.part import Part, Run
from lightning_gradavg.ranks import by_value
from lightning_gradavg.replicas.obstacles import has_step_end

__all__ = ["Arithmetic", "FixedArithmetic"]

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class Arithmetic(Part):
    """Numbers are computed as the process happens to be set.

    Attributes:
        settings: What bits depend on and a run that goes on must agree with, by name.
    """

    settings: Mapping[str, Any] = {}


class FixedArithmetic(Arithmetic):
    """Has every process compute the same bits from the same numbers, while a run lasts.

    One thread: sums are cut by threads, and processes of one machine have fewer each. Deterministic algorithms, with
    torch's error for an operator that has none. No search for the fastest convolution, which time decides.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._put_back = ExitStack()

    def setup(self, run: Run) -> None:
        """Refuse what cannot be served, and set what is set in a process."""
        super().setup(run)
        if run.trainer.state.fn == TrainerFn.FITTING:
            self._require_served(run)
        put_back = self._put_back.callback
        put_back(torch.set_num_threads, torch.get_num_threads())
        put_back(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        # Deterministic algorithms fill new memory, which no valid program reads before it writes.
        deterministic: Any = torch.utils.deterministic
        for owner, name in ((torch.backends.cudnn, "benchmark"), (deterministic, "fill_uninitialized_memory")):
            put_back(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, False)
        if _WORKSPACE not in os.environ:
            os.environ[_WORKSPACE] = ":4096:8"  # without it torch refuses cuBLAS
            put_back(os.environ.pop, _WORKSPACE, None)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)

    def _require_served(self, run: Run) -> None:
        replicas, ranks = self._replicas, run.world.size
        served = [str(count) for count in range(1, replicas + 1) if replicas % count == 0]
        refused = {
            f"reproducible=True with num_replicas={replicas} on {ranks} processes: the number of processes must divide"
            f" num_replicas. Use {', '.join(served)} of them, or another num_replicas.": replicas % ranks != 0,
            "reproducible=True does not support manual optimization: a rank would step after the first of its replicas."
            " Use automatic optimization, or leave reproducible out.": not run.module.automatic_optimization,
            "reproducible=True does not support training_step_end: the gradient of one loss of all outputs is summed by"
            " autograd in an order that follows the ranks. Return the loss of each replica from training_step.": (
                has_step_end(run.module)
            ),
        }
        for message, holds in refused.items():
            if holds:
                raise ValueError(message)

    def configure_ddp(self, run: Run) -> None:
        """Note the settings that are the user's choice. A collective operation."""
        super().configure_ddp(run)
        self.settings = {"precision": str(run.trainer.precision), **_float32_products()}
        of_ranks = [str(dict(each)) for each in run.world.gather_objects(self.settings)]
        if len(set(of_ranks)) > 1:
            raise ValueError(f"reproducible=True needs one arithmetic on all ranks, got {by_value(of_ranks)}")

    def describe(self) -> str:
        """Return what is promised."""
        return "; reproducible, in one thread"

    def teardown(self) -> None:
        """Put everything back."""
        self._put_back.close()


def _float32_products() -> dict[str, Any]:
    """Return what float32 numbers are multiplied in."""
    backends: Any = torch.backends
    if not hasattr(backends.cudnn, "conv"):  # before torch 2.9
        return {
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "cudnn_allow_tf32": backends.cudnn.allow_tf32,
        }
    chosen = {
        "float32_matmul": backends.cuda.matmul,
        "float32_matmul_cpu": backends.mkldnn.matmul,
        "float32_conv": backends.cudnn.conv,
        "float32_conv_cpu": backends.mkldnn.conv,
        "float32_rnn": backends.cudnn.rnn,
    }
    # "none", the default, is the same as "ieee".
    return {name: each.fp32_precision.replace("none", "ieee") for name, each in chosen.items()}
