"""Reports of single optimizer steps: the local gradients before the reduction, and the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradavg._lightning.part import Part, Run
from lightning_gradavg._support.tree import batch_samples
from lightning_gradavg.reduction.window import WindowRecord
from lightning_gradavg.report.report import StepReport, measure_rank
from lightning_gradavg.rules import Rule

__all__ = ["Reports", "local_gradients", "squared_norm"]


@contextmanager
def local_gradients(parameters: Sequence[nn.Parameter], *, accumulated: bool) -> Iterator[dict[Tensor, Tensor]]:
    """Collect squared norms of accumulated gradients by parameter during a backward, before DDP reduces them.

    Torch calls hooks after the accumulation from within the node `AccumulateGrad`. DDP's reduction is a hook after that
    node, so it runs later and the gradients are still local here.

    Args:
        parameters: The parameters that DDP reduces.
        accumulated: Whether they hold gradients of earlier micro-batches of the window.
    """
    squares: dict[Tensor, Tensor] = {}

    def measure(parameter: Tensor) -> None:
        if parameter.grad is not None:
            squares[parameter] = squared_norm([parameter.grad.detach()])

    if accumulated:
        # This backward may not reach all parameters that earlier ones reached. Of those that it reaches, the hook
        # replaces the number.
        for parameter in parameters:
            measure(parameter)
    handles = [parameter.register_post_accumulate_grad_hook(measure) for parameter in parameters]
    try:
        yield squares
    finally:
        for handle in handles:
            handle.remove()


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


def _total(values: Iterable[Tensor], device: torch.device | None) -> Tensor:
    """Return the sum of 0-dim tensors, which may be on several devices; 0 without any."""
    moved = [value.to(device) for value in values]
    if not moved:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(moved).sum()


class _State(Enum):
    """How far the observed step is. `Reports` has the table."""

    IDLE = auto()
    IN_WINDOW = auto()
    MEASURED = auto()


class Reports(Part):
    """Reports single optimizer steps. Steps that are not observed cost nothing.

    The calls of an observed step: `observe_next_step`; `begin_step` when its window begins; then for each micro-batch
    `samples_of` and `backward`; and after the reduction `reduced`, or `skipped`.

    | state | the observed step | next |
    |---|---|---|
    | IDLE | there is none | IN_WINDOW: `begin_step`, if a step is requested and its window begins |
    | IN_WINDOW | its micro-batches run | MEASURED: `backward`, the last of the window |
    | MEASURED | the norms of its local gradients are known | IDLE: `reduced`, which makes the report, or `skipped` |

    A backward that raises, or another run, leads to IDLE from any state. A request is apart from the state: the step
    after an observed one may be requested already.

    Attributes:
        observing: Whether a step is requested or observed.
    """

    # An attribute, not a property: the strategy asks it in every step.
    observing = False

    def __init__(self, rule: Rule, *, crosses_ranks: bool, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Report the steps of a run.

        Args:
            rule: The reduction rule.
            crosses_ranks: Whether the loss of a rank is over samples of others, so that its own are not known.
            facts: Returns `learning_rates` and `lr_scale` of `StepReport`.
        """
        self._rule = rule
        self._crosses_ranks = crosses_ranks
        self._facts = facts
        self._is_requested = False
        self._report: StepReport | None = None
        self._enter(_State.IDLE)

    def setup(self, run: Run) -> None:
        """Begin a run, and forget a step that the run before did not finish."""
        super().setup(run)
        self._enter(_State.IDLE)

    def _enter(self, state: _State) -> None:
        """Change the state; what was measured of a step is kept for MEASURED only."""
        self._state = state
        self.observing = self._is_requested or state is not _State.IDLE
        if state is not _State.MEASURED:
            self._backwards = 0  # in the window so far
            self._local_squares: dict[Tensor, Tensor] = {}  # squared norms of local gradients, after the last backward

    def observe_next_step(self) -> None:
        """Observe the step whose window begins next."""
        self._is_requested = True
        self.observing = True

    def report(self) -> StepReport:
        """Return the numbers of the last observed step, equal on all ranks; RuntimeError if there is none."""
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
            self._enter(_State.IN_WINDOW)
        if self._state is _State.IDLE:
            return None
        return self

    def samples_of(self, samples: float | None, batch: object) -> float | None:
        """Return the samples of a micro-batch: `samples` if they are known, else those of its batch, if it tells."""
        # A replica's loss may reach samples of other ranks (`gather`), and its share of the batch says nothing then.
        if self._crosses_ranks:
            return None
        if samples is not None:
            return samples
        try:
            return float(batch_samples(batch))
        except ValueError:  # a batch without tensors, or with different first dimensions
            return None

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Surround the backward of a loss, the last one of its window or not, and measure local gradients in the last.

        In manual optimization, `last` says only that the user does not hold the reduction back: another backward of the
        same window may follow and is measured again.
        """
        self._backwards += 1
        # IDLE: in manual optimization a training step may have more windows after the observed one.
        if not last or self._state is _State.IDLE:
            yield
            return
        try:
            with local_gradients(self._parameters, accumulated=self._backwards > 1) as squares:
                yield
        except BaseException:
            self._enter(_State.IDLE)
            raise
        self._local_squares = squares
        self._enter(_State.MEASURED)

    @property
    def _parameters(self) -> Sequence[nn.Parameter]:
        return [parameter for parameter in self.run.ddp.parameters() if parameter.requires_grad]

    def skipped(self) -> None:
        """Observe the next step instead of this one, which all ranks skip."""
        if self._state is _State.MEASURED:
            self._is_requested = True
            self._enter(_State.IDLE)

    def reduced(self, record: WindowRecord) -> None:
        """Report the step, once the gradients of its window are reduced. A collective operation."""
        if self._state is not _State.MEASURED:
            return
        local_squares = self._local_squares
        # First, so that an exception below does not leave a step that is observed for ever.
        self._enter(_State.IDLE)
        # Gradients still carry the loss scale of "16-mixed": Lightning unscales in `MixedPrecision.optimizer_step`.
        loss_scale = 1.0
        scaler = getattr(self.run.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            loss_scale = float(scaler.get_scale())
        with torch.profiler.record_function("GradAvg: measure gradients"):
            reduced_square = squared_norm([parameter.grad for parameter in self._parameters], self.run.device)
            local_square = _total(local_squares.values(), self.run.device)
            # The host reads both numbers here, and so waits for the gradients.
            norm = math.sqrt(reduced_square) / loss_scale
            local_norm = math.sqrt(local_square) / loss_scale
        ranks = self.run.world.gather_objects(measure_rank(record, self._rule, local_norm))
        facts = self._facts()
        self._report = StepReport.of(
            self._rule,
            ranks,
            step=self.run.trainer.global_step,
            gradient_norm=norm,
            lr_factors=facts["lr_factors"],
        )
