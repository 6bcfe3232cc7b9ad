"""Reports of single optimizer steps: the local gradients before the reduction, and the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

    Torch runs these hooks within `AccumulateGrad`, and DDP's after it. `accumulated` says whether the parameters hold
    gradients of earlier micro-batches.
    """
    squares: dict[Tensor, Tensor] = {}

    def see(parameter: Tensor) -> None:
        if parameter.grad is not None:
            squares[parameter] = squared_norm([parameter.grad.detach()])

    for parameter in parameters if accumulated else ():  # for those that this backward does not reach
        see(parameter)
    handles = [parameter.register_post_accumulate_grad_hook(see) for parameter in parameters]
    try:
        yield squares
    finally:
        for handle in handles:
            handle.remove()


def squared_norm(gradients: Iterable[Tensor | None], device: torch.device | None = None) -> Tensor:
    """Return the squared norm of all gradients, a 0-dim float64 tensor; half precision is measured in float32."""
    dense = (each.coalesce().values() if each.is_sparse else each for each in gradients if each is not None)
    norms = (torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in dense)
    return _total((norm.double().square() for norm in norms), device)


def _total(values: Iterable[Tensor], device: torch.device | None) -> Tensor:
    found = [value.to(device) for value in values]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=device)


class Reports(Part):
    """Reports single optimizer steps. Steps that are not observed cost nothing.

    The calls of an observed step: `observe_next_step`; `begin_step` when its window begins; then for each micro-batch
    `samples_of` and `backward`; and `reduced` after its reduction, or `skipped`.
    """

    observing = False
    """Whether a step is asked for, or under way."""

    def __init__(self, rule: Rule, *, crosses_ranks: bool, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Report the steps of a run.

        Args:
            rule: The reduction rule.
            crosses_ranks: Whether the loss of a rank is over samples of others, so that its own are not known.
            facts: Returns `learning_rates` and `lr_scale`.
        """
        self._rule = rule
        self._crosses_ranks = crosses_ranks
        self._facts = facts
        self._asked = False
        self._report: StepReport | None = None
        self._forget()

    def setup(self, run: Run) -> None:
        """Forget a step that was not finished."""
        super().setup(run)
        self._forget()

    def _forget(self) -> None:
        self._under_way = False
        self.observing = self._asked
        self._backwards = 0
        self._local: dict[Tensor, Tensor] | None = None  # squared norms of local gradients, after the last backward

    def observe_next_step(self) -> None:
        """Observe the step whose window begins next."""
        self._asked = True
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
        """Begin to observe where that is asked for; return what looks at the step, if any does."""
        if self._asked and begins_window:
            self._asked = False
            self._forget()
            self._under_way = True
            self.observing = True
        return self if self._under_way else None

    def samples_of(self, samples: float | None, batch: object) -> float | None:
        """Return the samples of a micro-batch: `samples` if they are known, else those of its batch, if it tells."""
        if self._crosses_ranks:
            return None
        if samples is not None:
            return samples
        try:
            return float(batch_samples(batch))
        except ValueError:
            return None

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Surround the backward of a loss, the last one of its window or not."""
        self._backwards += 1
        if not (last and self._under_way):  # a step may have several windows, in manual optimization
            yield
            return
        try:
            with local_gradients(self._parameters, accumulated=self._backwards > 1) as self._local:
                yield
        except BaseException:
            self._forget()
            raise

    @property
    def _parameters(self) -> Sequence[nn.Parameter]:
        return [parameter for parameter in self.run.ddp.parameters() if parameter.requires_grad]

    def skipped(self) -> None:
        """Observe the next step instead of this one."""
        if self._local is not None:
            self._asked = True
            self._forget()

    def reduced(self, record: WindowRecord) -> None:
        """Report the step, once the gradients of its window are reduced. A collective operation."""
        local = self._local
        if local is None:
            return
        self._forget()
        loss_scale = 1.0
        scaler = getattr(self.run.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            loss_scale = float(scaler.get_scale())
        with torch.profiler.record_function("GradAvg: measure gradients"):
            reduced_square = squared_norm([parameter.grad for parameter in self._parameters], self.run.device)
            local_square = _total(local.values(), self.run.device)
            norm = math.sqrt(reduced_square) / loss_scale
            local_norm = math.sqrt(local_square) / loss_scale
        ranks = self.run.world.gather_objects(measure_rank(record, self._rule, local_norm))
        step = self.run.trainer.global_step
        self._report = StepReport.of(self._rule, ranks, gradient_norm=norm, step=step, **self._facts())
