"""What makes every process compute the same numbers for a replica."""

from __future__ import annotations

import os
from contextlib import ExitStack

import torch

from lightning_gradavg._lightning.part import Part, Run

__all__ = ["FixedArithmetic"]

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class FixedArithmetic(Part):
    """Has every process compute the same bits from the same numbers, while a run lasts.

    | setting | because |
    |---|---|
    | one thread | sums are cut by threads, and processes of one machine have fewer each |
    | deterministic algorithms | others add in any order; torch raises for an operator that has none |
    | no search for the fastest convolution | its result depends on the time that each takes |
    """

    def __init__(self) -> None:
        self._settings = ExitStack()  # calls that restore what `setup` changed

    def setup(self, run: Run) -> None:
        """Change the settings of the process."""
        super().setup(run)
        restore_later = self._settings.callback

        restore_later(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        restore_later(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True)
        # Deterministic algorithms also fill new memory, which no valid program reads before it writes.
        self._set(torch.utils.deterministic, "fill_uninitialized_memory", False)

        self._set(torch.backends.cudnn, "benchmark", False)
        if _WORKSPACE not in os.environ:
            # torch refuses cuBLAS under deterministic algorithms unless its workspace has a fixed size.
            os.environ[_WORKSPACE] = ":4096:8"
            restore_later(os.environ.pop, _WORKSPACE, None)

    def _set(self, owner: object, name: str, value: bool) -> None:
        self._settings.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def describe(self) -> str:
        """Return what is promised."""
        return "Reproducible, in one thread."

    def teardown(self) -> None:
        """Restore the settings of the process."""
        self._settings.close()
