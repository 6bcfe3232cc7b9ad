"""Reports of single optimizer steps: the local gradients before the reduction, and the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_gradavg.part import Part, Run
from lightning_gradavg.reduction.weigh import WeighedLoss
from lightning_gradavg.reduction.weights import WHOLE_LOSS, loss_terms
from lightning_gradavg.reduction.window import Window
from lightning_gradavg.report.measure import LocalGradients, squared_norm
from lightning_gradavg.report.report import ObservedMicroBatch, StepReport, measure_rank
from lightning_gradavg.rules import Rule
from lightning_gradavg.tree import batch_samples

__all__ = ["Reports"]


@dataclass
class _Observation:
    """An optimizer step that is being observed.

    Attributes:
        losses: What is known of losses, by the identity of their weighed form.
        micro_batches: What is known of those whose backward has been.
        local: The local gradients of the last backward.
    """

    losses: dict[int, ObservedMicroBatch] = field(default_factory=dict)
    micro_batches: list[ObservedMicroBatch] = field(default_factory=list)
    local: LocalGradients | None = None


class Reports(Part):
    """Reports single optimizer steps. Steps that are not observed cost nothing.

    Args:
        rule: The reduction rule.
        crosses_ranks: Whether gradients of one rank's loss reach another within the backward.
        facts: Returns what else a report holds of the step under way: `learning_rates` and `lr_scale`.
    """

    def __init__(self, rule: Rule, *, crosses_ranks: bool, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._rule, self._crosses_ranks, self._facts = rule, crosses_ranks, facts
        self._asked = False
        self._observation: _Observation | None = None
        self._report: StepReport | None = None

    def setup(self, run: Run) -> None:
        """Forget a step that was not finished."""
        super().setup(run)
        self._observation = None

    def observe_next_step(self) -> None:
        """Observe the step whose window begins next."""
        self._asked = True

    @property
    def observing(self) -> bool:
        """Whether `observe_next_step` waits for its step."""
        return self._asked or self._observation is not None

    def report(self) -> StepReport:
        """Return the numbers of the last observed step, equal on all ranks.

        Raises:
            RuntimeError: If no step was observed.
        """
        if self._report is None:
            raise RuntimeError(
                "no optimizer step was observed. Add GradAvgMonitor() to the Trainer's callbacks, or call"
                " strategy.observe_next_step() on all ranks before the step."
            )
        return self._report

    def begin_step(self, window: Window) -> Reports | None:
        """Begin to observe where that is asked for; return what looks at the step, if any does."""
        if self._asked and window.length == 0:
            self._observation, self._asked = _Observation(), False
        return self if self._observation is not None else None

    def weighed(self, loss: Any, weighed: WeighedLoss, samples: float | None, batch: Any) -> None:
        """Note a loss as the user returned it, its weighed form, and its samples if known, else its batch."""
        if self._observation is None:
            return
        named = tuple(weighed.micro_batch.weights) != (WHOLE_LOSS,)
        terms = loss_terms(loss) if named else {WHOLE_LOSS: weighed.value}
        losses = {name: term.detach() for name, term in terms.items()}
        self._observation.losses[id(weighed)] = ObservedMicroBatch(losses, self._count_samples(samples, batch))

    def _count_samples(self, samples: float | None, batch: Any) -> float:
        if self._crosses_ranks:
            return math.nan
        if samples is not None:
            return samples
        try:
            return batch_samples(batch)
        except ValueError:
            return math.nan

    @contextmanager
    def backward(self, loss: WeighedLoss, *, last: bool) -> Iterator[None]:
        """Surround the backward of a loss, the last one of its window or not."""
        observation = self._observation
        if observation is None:
            yield
            return
        observation.micro_batches.append(observation.losses.pop(id(loss), ObservedMicroBatch({}, math.nan)))
        if not last:
            yield
            return
        observation.local = LocalGradients(self._parameters, accumulated=len(observation.micro_batches) > 1)
        try:
            with observation.local:
                yield
        except BaseException:
            self._observation = None
            raise

    @property
    def _parameters(self) -> Sequence[nn.Parameter]:
        return [parameter for parameter in self.run.ddp.parameters() if parameter.requires_grad]

    def reduced(self, window: Window, *, skipped: bool) -> None:
        """Report the step, once the gradients of its window are reduced, or the next one. A collective operation."""
        observation = self._observation
        if observation is None or observation.local is None:
            return
        self._observation, self._asked = None, self._asked or skipped
        if skipped:
            return
        scaler = getattr(self.run.trainer.precision_plugin, "scaler", None)
        loss_scale = float(scaler.get_scale()) if scaler is not None else 1.0
        device, seen = self.run.device, observation.micro_batches[-window.length :]
        if window.loss_divisor is None:
            seen = [
                ObservedMicroBatch({name: loss * window.length for name, loss in each.losses.items()}, each.samples)
                for each in seen
            ]
        total = float(squared_norm([parameter.grad for parameter in self._parameters], device)) / loss_scale**2
        own = float(observation.local.squared_norm(device)) / loss_scale**2
        measured = measure_rank(window, seen, divisor=float(window.divided_by), squared_norm=own)
        ranks = window.world.gather_objects(measured)
        step, facts = self.run.trainer.global_step, self._facts()
        self._report = StepReport.of(self._rule, window.terms, ranks, total, step=step, **facts)
