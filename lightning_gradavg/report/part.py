"""Reports of single optimizer steps: the local gradients before the reduction, and the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradavg.part import Part, Run
from lightning_gradavg.reduction.weights import WeighedLoss
from lightning_gradavg.reduction.window import Window
from lightning_gradavg.report.report import StepReport, known_sum, measure_rank
from lightning_gradavg.tree import batch_samples

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

    If the loss of a rank `crosses_ranks`, its samples are unknown. `facts` returns `learning_rates` and `lr_scale`.
    """

    observing = False
    """Whether a step is asked for, or under way."""

    def __init__(self, *, crosses_ranks: bool, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._crosses_ranks, self._facts = crosses_ranks, facts
        self._asked = False
        self._report: StepReport | None = None
        self._forget()

    def setup(self, run: Run) -> None:
        """Forget a step that was not finished."""
        super().setup(run)
        self._forget()

    def _forget(self) -> None:
        self._under_way, self.observing = False, self._asked
        self._known: float | None = None  # samples of the loss whose backward comes next
        self._micro_batches: list[tuple[Sequence[Tensor], float | None]] = []  # terms of the loss, samples if known
        self._local: dict[Tensor, Tensor] | None = None  # squared norms of local gradients, after the last backward

    def observe_next_step(self) -> None:
        """Observe the step whose window begins next."""
        self.observing = self._asked = True

    def report(self) -> StepReport:
        """Return the numbers of the last observed step, equal on all ranks; RuntimeError if there is none."""
        if self._report is None:
            raise RuntimeError(
                "no optimizer step was observed. Add GradAvgMonitor() to the Trainer's callbacks, or call"
                " strategy.observe_next_step() on all ranks before the step."
            )
        return self._report

    def begin_step(self, window: Window) -> Reports | None:
        """Begin to observe where that is asked for; return what looks at the step, if any does."""
        if self._asked and window.length == 0:
            self._forget()
            self._under_way, self._asked = True, False
        return self if self._under_way else None

    def weighed(self, samples: float | None, batch: Any) -> None:
        """Note the samples of the loss whose backward comes next, if they are known, else those of its batch."""
        with suppress(ValueError):
            samples = batch_samples(batch) if samples is None else samples
        self._known = None if self._crosses_ranks else samples

    @contextmanager
    def backward(self, loss: WeighedLoss, *, last: bool) -> Iterator[None]:
        """Surround the backward of a loss, the last one of its window or not."""
        self._micro_batches.append(([term.detach() for term in loss.terms], self._known))
        self._known = None
        if not (last and self._under_way):  # a step may have several windows, in manual optimization
            yield
            return
        try:
            with local_gradients(self._parameters, accumulated=len(self._micro_batches) > 1) as self._local:
                yield
        except BaseException:
            self._forget()
            raise

    @property
    def _parameters(self) -> Sequence[nn.Parameter]:
        return [parameter for parameter in self.run.ddp.parameters() if parameter.requires_grad]

    def reduced(self, window: Window, *, skipped: bool) -> None:
        """Report the step, once the gradients of its window are reduced, or the next one. A collective operation."""
        local, seen = self._local, self._micro_batches[-window.length :]
        if local is None:
            return
        self._asked |= skipped
        self._forget()
        if skipped:
            return
        scaler = getattr(self.run.trainer.precision_plugin, "scaler", None)
        loss_scale = 1.0 if scaler is None else float(scaler.get_scale())
        reduced = squared_norm([parameter.grad for parameter in self._parameters], self.run.device)
        own = _total(local.values(), self.run.device)
        local_norm, norm = (math.sqrt(square) / loss_scale for square in (own, reduced))
        losses, samples = zip(*seen, strict=True)
        ranks = window.world.gather_objects(measure_rank(window, losses, known_sum(samples), local_norm))
        step = self.run.trainer.global_step
        self._report = StepReport.of(window, ranks, gradient_norm=norm, step=step, **self._facts())
