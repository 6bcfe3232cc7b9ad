"""Reports of single optimizer steps, once their gradients are reduced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_gradavg._lightning.part import Part, Run
from lightning_gradavg.reduction.window import WindowRecord
from lightning_gradavg.report.report import StepReport
from lightning_gradavg.rules import Rule

__all__ = ["Reports", "squared_norm"]


def squared_norm(gradients: Iterable[Tensor | None], device: torch.device | None = None) -> Tensor:
    """Return the squared norm of all gradients, a 0-dim float64 tensor; half precision is measured in float32.

    Args:
        gradients: Gradients of any dtype, dense or sparse; None counts as 0.
        device: The device of the result; None for that of the gradients.
    """
    squares = []
    for gradient in gradients:
        if gradient is None:
            continue
        values = gradient
        if gradient.is_sparse:
            # Before it is coalesced, a sparse gradient may have several entries for one row.
            values = gradient.coalesce().values()
        # In half precision the norm of a large gradient overflows (float16) or has three digits (bfloat16).
        dtype = torch.promote_types(values.dtype, torch.float32)
        norm = torch.linalg.vector_norm(values, dtype=dtype)
        squares.append(norm.double().square())
    return _total(squares, device)


def _total(values: Sequence[Tensor], device: torch.device | None) -> Tensor:
    """Return the sum of 0-dim tensors, which may be on several devices; 0 without any."""
    if not values:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([value.to(device) for value in values]).sum()


class Reports(Part):
    """Reports single optimizer steps. Steps that are not observed cost nothing.

    The calls of an observed step: `observe_next_step`; `begin_step` when its window begins; and after the reduction
    `reduced`, which makes the report, or `skipped`. The step after an observed one may be requested already.

    Attributes:
        observing: Whether a step is requested or observed.
    """

    # An attribute, not a property: the strategy asks it in every step.
    observing = False

    def __init__(self, rule: Rule, lr_factors: Callable[[], tuple[float, ...]]) -> None:
        """Report the steps of a run.

        Args:
            rule: The reduction rule.
            lr_factors: Returns `StepReport.lr_factors` of the step in progress.
        """
        self._rule = rule
        self._lr_factors = lr_factors
        self._report: StepReport | None = None
        self._is_requested = False
        self._is_in_window = False  # whether the window of the observed step is open

    def setup(self, run: Run) -> None:
        """Begin a run, and forget a step that the run before did not finish."""
        super().setup(run)
        self._end_window()

    def _end_window(self) -> None:
        self._is_in_window = False
        self.observing = self._is_requested

    def observe_next_step(self) -> None:
        """Observe the step whose window begins next."""
        self._is_requested = True
        self.observing = True

    def report(self) -> StepReport:
        """Return the numbers of the last observed step; RuntimeError if there is none."""
        if self._report is None:
            raise RuntimeError(
                "no optimizer step was observed. Add GradAvgMonitor() to the Trainer's callbacks, or call"
                " strategy.observe_next_step() on all ranks before the step."
            )
        return self._report

    def begin_step(self, *, begins_window: bool) -> Reports | None:
        """Begin a training step; return what observes it, or None if it is not observed."""
        if self._is_requested and begins_window:
            self._is_requested = False
            self._is_in_window = True
        if self._is_in_window:
            return self
        return None

    def reduced(self, record: WindowRecord) -> None:
        """Report the step, once the gradients of its window are reduced. A collective operation."""
        # In manual optimization a training step may have more windows after the observed one.
        if not self._is_in_window:
            return
        # First, so that an exception below does not leave a step that is observed for ever.
        self._end_window()
        # Gradients still carry the loss scale of "16-mixed": Lightning unscales in `MixedPrecision.optimizer_step`.
        loss_scale = 1.0
        scaler = getattr(self.run.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            loss_scale = float(scaler.get_scale())
        gradients = [parameter.grad for parameter in self.run.ddp.parameters() if parameter.requires_grad]
        with torch.profiler.record_function("GradAvg: measure gradients"):
            # The host reads the number here, and so waits for the gradients.
            norm = math.sqrt(squared_norm(gradients, self.run.device)) / loss_scale
        normalizers = self.run.world.gather_floats([float(sum(share.normalizer for share in record.shares))])
        self._report = StepReport(
            step=self.run.trainer.global_step,
            rule=self._rule.name,
            formula=self._rule.formula,
            weight=float(sum(micro_batch.weight for micro_batch in record.micro_batches)),
            normalizer=sum(normalizer for (normalizer,) in normalizers),
            gradient_norm=norm,
            lr_factors=self._lr_factors(),
        )
