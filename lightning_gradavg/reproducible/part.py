"""What makes every process compute the same numbers for a replica."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch

from lightning_gradavg._lightning.part import Part, Run

__all__ = ["FixedArithmetic"]

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class FixedArithmetic(Part):
    """Has every process compute the same bits from the same numbers, while a run lasts.

    One thread: sums are cut by threads, and processes of one machine have fewer each. Deterministic algorithms, with
    torch's error for an operator that has none. No search for the fastest convolution, which time decides.
    """

    def __init__(self) -> None:
        self._put_back = ExitStack()

    def setup(self, run: Run) -> None:
        """Set what is set in a process."""
        super().setup(run)
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

    def describe(self) -> str:
        """Return what is promised."""
        return "; reproducible, in one thread"

    def teardown(self) -> None:
        """Put everything back."""
        self._put_back.close()
